"""The tests that a run selects: the covering tier, the rest, or all tests. Optionally only one shard of these runs.

The covering tier is a representative part of the tests. `make test` runs it, and `make test-all` runs everything.
Continuous integration runs the covering tier and one shard of the rest. The commit selects the shard, so that
everything runs over a series of commits.

The covering tier has a budget of seconds. tests/durations.json has the recorded seconds of each group of tests. A group
holds the cases of one test. In the suite, a group holds the checks of one operation on one runner. For a test that is
marked with `each`, a group holds the cases of one value of the named parameter. Every group has the same allowance, the
largest that fits the budget. A group that needs more time skips some of its cases, evenly spaced, but runs at least
one. Only a case of more than LONGEST seconds is skipped entirely, unless its test is marked with `each`. Therefore all
quick tests run, a new test runs whole until it is measured, and the suite checks every operation on every backend
through both front ends.

The rest are the skipped tests and all tests that draw random batches. In the rest, these draw more batches.
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
    """XLA flags that halve the time to compile for a CPU.

    They compile each module in one piece and use the older fusion emitters.

    jaxlib 0.11 no longer has the older emitters, and XLA aborts the process if it does not know a flag.
    """
    in_one_piece, older = "--xla_cpu_parallel_codegen_split_count=1", "--xla_cpu_use_fusion_emitters=false"
    try:
        has_both = tuple(map(int, metadata.version("jaxlib").split(".")[:2])) < (0, 11)
    except metadata.PackageNotFoundError:
        return ""
    return f"{older} {in_one_piece}" if has_both else in_one_piece


QUICK_TO_COMPILE = quick_to_compile()
# The largest sum of recorded seconds of all tests in the covering tier. Two processes share the tests. Each has 480 s.
# The remaining time is for collecting the tests, and for first cases, which compile kernels that later cases reuse.
BUDGET = 680.0
LONGEST = 4.5  # in seconds; a case that takes longer is not in the covering tier


def add_options(group: Any) -> None:
    group.addoption(
        "--tier", choices=TIERS, help="default: covering, or all in larger profiles and if tests are named by id"
    )
    group.addoption(
        "--shard", metavar="WHICH/COUNT", help="run one shard of these tests; WHICH is a number or any text"
    )


def tier_of(config: pytest.Config) -> str:
    by_id = any("::" in argument for argument in config.args)
    whole = by_id or examples_of() != PROFILES["dev"]
    return config.getoption("--tier") or ("all" if whole else "covering")


def configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "each(parameter): run at least one case for each value of the parameter")
    if tier_of(config) == "covering":
        # Tests of jax spend most of their time compiling. In the other tiers, XLA optimises as it does for users.
        os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        os.environ.setdefault("XLA_FLAGS", QUICK_TO_COMPILE)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tier, shard = tier_of(config), config.getoption("--shard")
    groups: dict[str, list[str]] = defaultdict(list)
    group_of = {item.nodeid: durations.group_of(item.nodeid, check_of(item), value_of(item)) for item in items}
    for node, group in group_of.items():
        groups[group].append(node)
    skipped = skipped_by_the_covering_tier(groups, durations.known())
    for item in items:
        durations.note(item, group_of[item.nodeid], len(groups[group_of[item.nodeid]]))
    selected, deselected = [], []
    for item in items:
        draws = "examples" in getattr(item, "fixturenames", ())
        in_tier = {"covering": item.nodeid not in skipped, "rest": item.nodeid in skipped or draws, "all": True}[tier]
        (selected if in_tier and (not shard or in_shard(item.nodeid, shard)) else deselected).append(item)
    config.hook.pytest_deselected(items=deselected)
    items[:] = selected


def skipped_by_the_covering_tier(groups: Mapping[str, Sequence[str]], known: Durations) -> set[str]:
    """The tests that the covering tier skips; groups without recorded durations count as quick."""
    limit = allowance(known)
    skipped: set[str] = set()
    for group, nodes in groups.items():
        taken = taken_of(group, len(nodes), known.slow[group][1], limit) if group in known.slow else len(nodes)
        places = places_of(group, len(nodes), taken)
        skipped.update(node for place, node in enumerate(nodes) if place not in places)
    return skipped


def places_of(group: str, cases: int, taken: int) -> list[int]:
    """The indices of the selected cases. The first index depends on the group, so runners select different checks."""
    first = zlib.crc32(group.encode()) % cases
    return [(first + number * cases // taken) % cases for number in range(taken)]


def taken_of(group: str, cases: int, seconds: float, limit: float) -> int:
    """The number of a group's cases that fit into the allowance `limit`: at least 1, unless a case is too long."""
    return min(cases, int(limit / seconds + 1e-6)) or int(seconds <= LONGEST or durations.is_of_each(group))


def allowance(known: Durations) -> float:
    """The largest number of seconds per group for which all groups together fit the budget."""
    available = BUDGET - sum(known.quick.values())

    def fits(limit: float) -> bool:
        return (
            sum(taken_of(group, *known.slow[group], limit) * known.slow[group][1] for group in known.slow) <= available
        )

    steps = sorted({taken * seconds for cases, seconds in known.slow.values() for taken in range(1, cases + 1)})
    fitting = bisect.bisect_left(steps, True, key=lambda limit: not fits(limit))
    return steps[fitting - 1] if fitting else 0.0


def check_of(item: pytest.Item) -> str:
    """The name of the suite's check that a test runs, or ""."""
    return str(params_of(item).get("check", ""))


def value_of(item: pytest.Item) -> str:
    """The value of the parameter that `pytest.mark.each` names, or "" if the test has no such mark."""
    mark = item.get_closest_marker("each")
    return "" if mark is None else str(params_of(item)[mark.args[0]])


def params_of(item: pytest.Item) -> Mapping[str, Any]:
    return item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
