"""The covering part and the rest are together everything, and no operation, backend or front end is left out."""

import zlib
from pathlib import Path

import pytest

from benchmarks.shards import in_shard
from ragged_attention.testing.suite import corners, laws
from tests import tiers

TESTS = Path(__file__).parent
RUNNERS = ("torch-reference", "torch-eager", "torch-triton", "jax-reference", "jax-xla", "jax-triton")
CHECKS = {"test_agreement.py::test_corner": [*map(str, corners())], "test_laws.py::test_law": [*map(str, laws())]}
NODES = {
    f"tests/{test}[{runner}-{check}]": check
    for test, checks in CHECKS.items()
    for runner in RUNNERS
    for check in checks
}
COVERING = {*NODES} - tiers.left_out_of_the_covering_part(NODES)


def test_the_covering_part_is_less_than_half() -> None:
    assert len(COVERING) < len(NODES) / 2


@pytest.mark.parametrize("name", RUNNERS)
def test_the_covering_part_has_every_operation_on_every_runner(name: str) -> None:
    every = {tiers.subject_of(check) for check in NODES.values()}
    taken = {tiers.subject_of(check) for node, check in NODES.items() if f"[{name}-" in node and node in COVERING}
    assert taken == every
    assert len(every) > 20


@pytest.mark.parametrize("name", ["torch-eager", "torch-reference"])
def test_the_covering_part_has_every_law(name: str) -> None:
    assert all(f"tests/test_laws.py::test_law[{name}-{law}]" in COVERING for law in map(str, laws()))


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


@pytest.mark.parametrize("prefix", tiers.SHARES)
def test_what_is_thinned_out_exists(prefix: str) -> None:
    file, _, test = prefix.partition("::")
    name, cases, _ = test.partition("[")
    assert f"def {name}{'(' if cases else ''}" in (TESTS / file).read_text()


def test_a_share_is_of_a_group_and_none_of_it_is_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "SHARES", {"test_some.py::test_long": 0, "test_some.py::test_one[": 3})
    nodes = {f"tests/test_some.py::test_one[{number}]": "" for number in range(7)}
    others = {"tests/test_some.py::test_long": "", "tests/test_some.py::test_another": ""}
    taken = {*nodes, *others} - tiers.left_out_of_the_covering_part(nodes | others)
    assert "tests/test_some.py::test_another" in taken
    assert "tests/test_some.py::test_long" not in taken
    assert 2 <= len(taken & {*nodes}) <= 3
