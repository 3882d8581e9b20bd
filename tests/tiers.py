"""Which tests a run takes: the covering part, the rest of them, or all; and of these, one shard.

`make test` runs the covering part, `make test-all` everything, and continuous integration the covering part and one
shard of the rest, chosen by the commit, so that over the commits everything runs.

The covering part keeps to a budget, by what tests/durations.json knows of each group of tests: the cases of one test,
within the suite the checks of one operation on one runner, and where a test is marked with `each`, the cases of one
value of the parameter that this names. Each group may take the same time, as much as the budget allows; of one that
needs more, cases are left out, evenly, but one always runs, unless it alone takes longer than dozens of others and no
mark demands it. So quick tests all run, a new test runs whole until it is measured, and the suite still checks every
operation on every backend through both front ends. The rest is what was left out, with the tests that draw batches,
for these draw more.
"""

import bisect
import os
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import pytest

from benchmarks.shards import in_shard
from ragged_attention.testing.drawing import PROFILES, examples_of
from tests import durations
from tests.durations import Durations

TIERS = ("covering", "rest", "all")


def quick_to_compile() -> str:
    """Flags by which XLA compiles for a CPU in half the time: each module in one piece, and fusions in an older way.

    jaxlib 0.11 no longer has the older way, and XLA ends the process at a flag that it does not know.
    """
    in_one_piece, older = "--xla_cpu_parallel_codegen_split_count=1", "--xla_cpu_use_fusion_emitters=false"
    try:
        has_both = tuple(map(int, metadata.version("jaxlib").split(".")[:2])) < (0, 11)
    except metadata.PackageNotFoundError:
        return ""
    return f"{older} {in_one_piece}" if has_both else in_one_piece


QUICK_TO_COMPILE = quick_to_compile()
# Seconds that the tests of the covering part may take together, by what is known of them. Two processes share them,
# which have 480 s, and need the rest to collect the tests, and for first cases, which compile what others use.
BUDGET = 680.0
LONGEST = 4.5  # seconds; a longer case is no part of it


def add_options(group: Any) -> None:
    group.addoption("--tier", choices=TIERS, help="default: covering; all in larger profiles and for tests by their id")
    group.addoption("--shard", metavar="WHICH/COUNT", help="of these tests one shard; WHICH is a number or any text")


def tier_of(config: pytest.Config) -> str:
    by_id = any("::" in argument for argument in config.args)
    whole = by_id or examples_of() != PROFILES["dev"]
    return config.getoption("--tier") or ("all" if whole else "covering")


def configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "each(parameter): at least one case of each of its values runs")
    if tier_of(config) == "covering":
        # Compiling is most of what tests from jax do. Where everything runs, XLA optimises as it does for users.
        os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        os.environ.setdefault("XLA_FLAGS", QUICK_TO_COMPILE)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tier, shard = tier_of(config), config.getoption("--shard")
    groups: dict[str, list[str]] = defaultdict(list)
    group_of = {item.nodeid: durations.group_of(item.nodeid, check_of(item), value_of(item)) for item in items}
    for node, group in group_of.items():
        groups[group].append(node)
    left_out = left_out_of_the_covering_part(groups, durations.known())
    for item in items:
        durations.note(item, group_of[item.nodeid], len(groups[group_of[item.nodeid]]))
    kept, spared = [], []
    for item in items:
        draws = "examples" in getattr(item, "fixturenames", ())
        chosen = {"covering": item.nodeid not in left_out, "rest": item.nodeid in left_out or draws, "all": True}[tier]
        (kept if chosen and (not shard or in_shard(item.nodeid, shard)) else spared).append(item)
    config.hook.pytest_deselected(items=spared)
    items[:] = kept


def left_out_of_the_covering_part(groups: Mapping[str, Sequence[str]], known: Durations) -> set[str]:
    """Of the tests of these groups, those that are left out; groups of which nothing is known are quick."""
    each = allowance(known)
    left_out: set[str] = set()
    for group, nodes in groups.items():
        taken = taken_of(group, len(nodes), known.slow[group][1], each) if group in known.slow else len(nodes)
        places = places_of(group, len(nodes), taken)
        left_out.update(node for place, node in enumerate(nodes) if place not in places)
    return left_out


def places_of(group: str, cases: int, taken: int) -> list[int]:
    """Which cases are taken; where a group begins differs, so that runners do not all take the same checks."""
    first = zlib.crc32(group.encode()) % cases
    return [(first + number * cases // taken) % cases for number in range(taken)]


def taken_of(group: str, cases: int, seconds: float, each: float) -> int:
    """How many of a group's cases a number of seconds for each group allows, one at least unless that is too long."""
    return min(cases, int(each / seconds + 1e-6)) or int(seconds <= LONGEST or durations.is_of_each(group))


def allowance(known: Durations) -> float:
    """The most seconds that each group may take if all together are to keep to the budget."""
    room = BUDGET - sum(known.quick.values())

    def fits(each: float) -> bool:
        return sum(taken_of(group, *known.slow[group], each) * known.slow[group][1] for group in known.slow) <= room

    steps = sorted({taken * seconds for cases, seconds in known.slow.values() for taken in range(1, cases + 1)})
    fitting = bisect.bisect_left(steps, True, key=lambda each: not fits(each))
    return steps[fitting - 1] if fitting else 0.0


def check_of(item: pytest.Item) -> str:
    """The check of the suite that a test runs, or ""."""
    return str(params_of(item).get("check", ""))


def value_of(item: pytest.Item) -> str:
    """The value of the parameter that `pytest.mark.each` names, if the test has that mark: each value is a group."""
    mark = item.get_closest_marker("each")
    return "" if mark is None else str(params_of(item)[mark.args[0]])


def params_of(item: pytest.Item) -> Mapping[str, Any]:
    return item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
