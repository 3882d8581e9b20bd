"""How long tests take, by groups: what tests/tiers.py chooses by, and what keeps that up to date.

A group is the cases of one test; where the test runs the suite, those of one runner and one operation; and where it is
marked with `each`, those of one value. Groups that take a second or more stand in tests/durations.json with the number
of their cases and the mean seconds of one; quick ones are summed up by files, for they always run whole. `pytest
--keep-durations`, on an idle machine and over whole files, replaces what is known of the groups that it runs; groups
whose test is gone are dropped.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
FILE = TESTS / "durations.json"
QUICK = 1.0  # seconds of a whole group
PROPERTY = "group"
EACH = "each: "  # so begins in a group's brackets the value of `each` that its cases share


@dataclass(frozen=True)
class Durations:
    """Cases and seconds of one, by slow groups; seconds of all quick groups, by files."""

    slow: Mapping[str, tuple[int, float]]
    quick: Mapping[str, float]

    def updated(self, ran: Mapping[str, tuple[int, float]]) -> "Durations":
        """With what a run has shown: of each group how many cases there are, and the mean seconds of those that ran."""
        slow, files = dict(self.slow), {file_of(group) for group in ran}
        quick = {file: seconds for file, seconds in self.quick.items() if file not in files}
        for group, (cases, seconds) in ran.items():
            slow.pop(group, None)
            if cases * seconds >= QUICK:
                slow[group] = cases, round(seconds, 4)
            else:
                quick[file_of(group)] = quick.get(file_of(group), 0) + cases * seconds
        return Durations(
            {group: slow[group] for group in sorted(slow) if exists(group)},
            {file: round(quick[file], 1) for file in sorted(quick) if (TESTS / file).exists()},
        )

    def written(self) -> str:
        """As JSON, a line for each group and file, so that a change reads well."""
        slow = ",\n".join(f"  {json.dumps(group)}: {json.dumps(value)}" for group, value in self.slow.items())
        quick = ",\n".join(f"  {json.dumps(file)}: {json.dumps(value)}" for file, value in self.quick.items())
        return f'{{\n "slow": {{\n{slow}\n }},\n "quick": {{\n{quick}\n }}\n}}\n'


def known() -> Durations:
    record = json.loads(FILE.read_text())
    return Durations({group: (cases, seconds) for group, (cases, seconds) in record["slow"].items()}, record["quick"])


def group_of(node: str, check: str = "", value: str = "") -> str:
    """The group of a test by its id, and by the check of the suite that it runs or the value of `each`."""
    node = node.removeprefix("tests/")
    if value:
        return f"{node.partition('[')[0]}[{EACH}{value}]"
    if check and node.endswith(f"{check}]"):
        return f"{node.removesuffix(f'{check}]')}{subject_of(check)}]"
    return node.partition("[")[0]


def is_of_each(group: str) -> bool:
    """Whether a test's mark demands that one case of this group runs, however long that takes."""
    return f"[{EACH}" in group


def subject_of(check: str) -> str:
    """What a check is about, as its name begins: "corner: latent decode"."""
    kind, _, name = check.partition(": ")
    return f"{kind}: {name.partition(',')[0]}" if "," in name else kind


def file_of(group: str) -> str:
    return group.partition("::")[0]


def exists(group: str) -> bool:
    file, _, test = group.partition("::")
    name = test.partition("[")[0].rpartition("::")[2]
    return (TESTS / file).exists() and f"def {name}(" in (TESTS / file).read_text()


# ---- what pytest is told


def add_options(group: Any) -> None:
    group.addoption("--keep-durations", action="store_true", help=f"write how long groups of tests took to {FILE.name}")


def note(item: pytest.Item, group: str, cases: int) -> None:
    """Give the reports of a test its group and how many cases that has, run or not."""
    item.user_properties.append((PROPERTY, [group, cases]))


class Watch:
    """Adds up the seconds of tests, with what they set up, where reports come together."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._group: dict[str, tuple[str, int]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        properties: dict[str, Any] = dict(report.user_properties)  # type: ignore[arg-type]
        if PROPERTY in properties:  # not where the process of the test came to an end
            group, cases = properties[PROPERTY]
            self._group[report.nodeid] = group, cases

    def pytest_sessionfinish(self) -> None:
        FILE.write_text(known().updated(self.by_groups()).written())

    def by_groups(self) -> dict[str, tuple[int, float]]:
        seconds, cases = defaultdict(list), {}
        for node, (group, count) in self._group.items():
            seconds[group].append(self._seconds[node])
            cases[group] = count
        return {group: (cases[group], typical(each)) for group, each in seconds.items()}


def typical(seconds: Sequence[float]) -> float:
    """The mean without the longest, which may have compiled what the others use; a single one as it is."""
    taken = sorted(seconds)[:-1] if len(seconds) > 1 else seconds
    return sum(taken) / len(taken)


def configure(config: pytest.Config) -> None:
    if config.getoption("--keep-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Watch())
