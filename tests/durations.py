"""The recorded durations of groups of tests, by which tests/tiers.py selects tests, and the plugin that records them.

A group holds the cases of one test. If the test runs the suite, a group holds the cases of one runner and one
operation; if the test is marked with `each`, those of one value. tests/durations.json lists the groups that take a
second or more, with their number of cases and the mean seconds of a case. Quicker groups always run whole, so only
their sum for each file is recorded. `pytest --keep-durations` replaces the durations of the groups that it runs and
drops groups whose test no longer exists. Run it on an idle machine and over whole files.
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
QUICK = 1.0  # a group that takes fewer seconds is quick
PROPERTY = "group"
EACH = "each: "  # in a group's name, the prefix of the value of `each` that all its cases share


@dataclass(frozen=True)
class Durations:
    """For each slow group its number of cases and the seconds of a case; for each file the seconds of quick groups."""

    slow: Mapping[str, tuple[int, float]]
    quick: Mapping[str, float]

    def updated(self, ran: Mapping[str, tuple[int, float]]) -> "Durations":
        """These durations with those of a run: for each group its number of cases and the mean seconds of a case."""
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
        """The durations as JSON, with one line for each group and file, so that diffs are easy to read."""
        slow = ",\n".join(f"  {json.dumps(group)}: {json.dumps(value)}" for group, value in self.slow.items())
        quick = ",\n".join(f"  {json.dumps(file)}: {json.dumps(value)}" for file, value in self.quick.items())
        return f'{{\n "slow": {{\n{slow}\n }},\n "quick": {{\n{quick}\n }}\n}}\n'


def known() -> Durations:
    record = json.loads(FILE.read_text())
    return Durations({group: (cases, seconds) for group, (cases, seconds) in record["slow"].items()}, record["quick"])


def group_of(node: str, check: str = "", value: str = "") -> str:
    """The group of a test, given its id and either the suite's check that it runs or its value of `each`."""
    node = node.removeprefix("tests/")
    if value:
        return f"{node.partition('[')[0]}[{EACH}{value}]"
    if check and node.endswith(f"{check}]"):
        return f"{node.removesuffix(f'{check}]')}{subject_of(check)}]"
    return node.partition("[")[0]


def is_of_each(group: str) -> bool:
    """Whether the test is marked with `each`, so that one case of this group must run, however long it takes."""
    return f"[{EACH}" in group


def subject_of(check: str) -> str:
    """The subject of a check, which is the beginning of its name, such as "corner: latent decode"."""
    kind, _, name = check.partition(": ")
    return f"{kind}: {name.partition(',')[0]}" if "," in name else kind


def file_of(group: str) -> str:
    return group.partition("::")[0]


def exists(group: str) -> bool:
    file, _, test = group.partition("::")
    name = test.partition("[")[0].rpartition("::")[2]
    return (TESTS / file).exists() and f"def {name}(" in (TESTS / file).read_text()


# ---- the pytest plugin


def add_options(group: Any) -> None:
    group.addoption(
        "--keep-durations", action="store_true", help=f"write the durations of groups of tests to {FILE.name}"
    )


def note(item: pytest.Item, group: str, cases: int) -> None:
    """Add the group of a test, and the group's number of cases (run or not), to the test's reports."""
    item.user_properties.append((PROPERTY, [group, cases]))


class Watch:
    """Adds up the seconds of each test, including setup and teardown, in the process that collects the reports."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._group: dict[str, tuple[str, int]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        properties: dict[str, Any] = dict(report.user_properties)  # type: ignore[arg-type]
        if PROPERTY in properties:  # missing if the test's process died
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
    """The mean of all cases except the longest, which may have compiled kernels for the others, or of a single case."""
    taken = sorted(seconds)[:-1] if len(seconds) > 1 else seconds
    return sum(taken) / len(taken)


def configure(config: pytest.Config) -> None:
    if config.getoption("--keep-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Watch())
