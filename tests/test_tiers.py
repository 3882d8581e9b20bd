"""The covering tier keeps to its time budget and runs every group of tests. With the rest, it has all tests."""

import json
import zlib

import pytest

from benchmarks.shards import in_shard
from ragged_attention.testing.suite import corners, laws
from tests import durations, tiers
from tests.durations import Durations

KNOWN = durations.known()
CHECKS = {"test_agreement.py::test_corner": [*map(str, corners())], "test_laws.py::test_law": [*map(str, laws())]}
RUNNERS = ("torch-reference", "torch-eager", "torch-triton", "jax-reference", "jax-xla", "jax-triton")


def covering(groups: dict[str, list[str]], known: Durations = KNOWN) -> set[str]:
    return {node for nodes in groups.values() for node in nodes} - tiers.skipped_by_the_covering_tier(groups, known)


@pytest.mark.parametrize("name", RUNNERS)
@pytest.mark.parametrize("test", CHECKS)
def test_the_covering_part_has_every_operation_on_every_runner(test: str, name: str) -> None:
    groups: dict[str, list[str]] = {}
    for check in CHECKS[test]:
        node = f"tests/{test}[{name}-{check}]"
        groups.setdefault(durations.group_of(node, check), []).append(node)
    taken = covering(groups)
    assert len(groups) > 5
    assert all(taken & {*nodes} for nodes in groups.values())


def test_the_covering_part_keeps_to_its_budget() -> None:
    each = tiers.allowance(KNOWN)
    slow = sum(tiers.taken_of(group, *KNOWN.slow[group], each) * KNOWN.slow[group][1] for group in KNOWN.slow)
    assert slow + sum(KNOWN.quick.values()) <= tiers.BUDGET
    assert each > 0.4


@pytest.mark.parametrize("group", KNOWN.slow)
def test_what_is_known_is_of_tests_that_exist(group: str) -> None:
    assert durations.exists(group)


def test_cases_are_left_out_evenly_and_one_stays_if_it_is_not_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "BUDGET", 20.0)
    known = Durations({"test_a.py::test_long": (2, 100.0), "test_a.py::test": (40, 5), "test_b.py::test": (9, 1)}, {})
    groups = {group: [f"{group}[{number}]" for number in range(cases)] for group, (cases, _) in known.slow.items()}
    groups["test_c.py::test_new"] = [f"test_c.py::test_new[{number}]" for number in range(20)]
    taken = covering(groups, known)
    assert {group: len(taken & {*nodes}) for group, nodes in groups.items()} == {
        "test_a.py::test_long": 0,
        "test_a.py::test": 2,
        "test_b.py::test": 9,
        "test_c.py::test_new": 20,
    }
    for found in (tiers.places_of("some", 10, 3), tiers.places_of("another", 10, 3)):
        gaps = {(second - first) % 10 for first, second in zip(found, [*found[1:], found[0]], strict=True)}
        assert gaps <= {3, 4}


def test_a_mark_demands_a_case_that_takes_long() -> None:
    group = durations.group_of("tests/test_a.py::test_it[long-0]", value="long")
    groups = {group: [f"{group}{number}" for number in range(3)]}
    assert len(covering(groups, Durations({group: (3, 1000.0)}, {}))) == 1


def test_a_quick_group_takes_all_that_a_slow_one_leaves() -> None:
    known = Durations({"test_a.py::test_slow": (100, 20.0), "test_b.py::test_quick": (100, 0.5)}, {"test_c.py": 30.0})
    each = tiers.allowance(known)
    assert tiers.taken_of("test_some.py::test_it", 100, 0.5, each) == 100
    assert tiers.taken_of("test_some.py::test_it", 100, 20.0, each) == int((tiers.BUDGET - 80) / 20)


def test_groups_are_those_of_a_test_a_runner_and_an_operation() -> None:
    node = "tests/test_laws.py::test_law[jax-xla-law: packed, gradients have their sums]"
    assert (
        durations.group_of(node, "law: packed, gradients have their sums")
        == "test_laws.py::test_law[jax-xla-law: packed]"
    )
    assert durations.group_of("tests/test_some.py::test_one[a-b[c]]") == "test_some.py::test_one"
    assert durations.group_of("tests/test_some.py::test_one[sm_90-b]", value="b") == "test_some.py::test_one[each: b]"


def test_a_run_replaces_what_is_known_of_its_groups() -> None:
    gone, here, other = (
        "test_gone.py::test_it",
        "test_tiers.py::test_shards_part_the_tests",
        "test_tiers.py::test_any_text_names_a_shard",
    )
    known = Durations(
        {gone: (1, 5.0), here: (2, 3.0)}, {"test_tiers.py": 9.0, "test_gone.py": 1.0, "test_docs.py": 2.0}
    )
    updated = known.updated({here: (4, 0.1), other: (3, 2.5)})
    assert updated == Durations({other: (3, 2.5)}, {"test_docs.py": 2.0, "test_tiers.py": 0.4})
    read = json.loads(updated.written())
    assert read == {"slow": {other: [3, 2.5]}, "quick": {"test_docs.py": 2.0, "test_tiers.py": 0.4}}


def test_shards_part_the_tests() -> None:
    nodes = [f"test_some.py::test_one[{number}]" for number in range(300)]
    shards = [{node for node in nodes if in_shard(node, f"{which}/4")} for which in range(4)]
    assert set.union(*shards) == set(nodes)
    assert sum(map(len, shards)) == len(nodes)
    assert min(map(len, shards)) > 40


def test_any_text_names_a_shard() -> None:
    commit = "4a61f0b1"
    which = zlib.crc32(commit.encode()) % 16
    node = next(f"{number}" for number in range(999) if zlib.crc32(f"{number}".encode()) % 16 == which)
    assert in_shard(node, f"{commit}/16")
    assert not in_shard(node, f"{which + 1}/16")


def test_the_longest_of_many_cases_does_not_count() -> None:
    assert durations.typical([1.0, 1.0, 40.0, 4.0]) == 2.0
    assert durations.typical([1.0, 3.0]) == 1.0
    assert durations.typical([3.0]) == 3.0
