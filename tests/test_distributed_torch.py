"""Attention over several torch processes: these tests start the checks of tests/ranks.py and judge their results."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import scaling
from ragged_attention.calls.sharding import KvShard, zigzag_order, zigzag_pairs
from ragged_attention.errors import InvalidInput
from tests.divided import TRAFFIC
from tests.processes import ROOT, run_python

torch = pytest.importorskip("torch")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("torch is built without gloo", allow_module_level=True)

# The largest relative overhead in bytes, for gloo's message headers and the processes' first messages.
OVERHEAD = 0.02
DIVIDED = {
    "block_scores", "select_blocks", "top_k_blocks",
    "indexer_logits_backward", "latent_norm_rope_write", "merge_attention_states", "mla_decode", "norm_rope_write",
    "paged_attention",
    "prefill_attention", "ragged_mla_attention", "ragged_paged_attention", "sparse_mla_prefill",
    "sparse_mla_prefill_backward", "varlen_attention", "varlen_attention_backward", "write_kv_pages",
}  # fmt: skip


def ranks(size: int, *checks: str) -> dict[str, Any]:
    """Rank 0's result of each check; all ranks must succeed."""
    done = run_python("-m", "tests.ranks", str(size), *checks, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        found |= json.loads(line)
    assert found.keys() == set(checks)
    return found


def expected_traffic(size: int) -> dict[str, int]:
    """The bytes that the model of docs/scaling.md predicts for the calls of `check_traffic`."""
    decode = (TRAFFIC["tokens"], TRAFFIC["heads"], TRAFFIC["width"], size)
    ring = (2 * TRAFFIC["piece"], TRAFFIC["kv_heads"], 2 * TRAFFIC["width"], 4, size)
    return {
        "decode": scaling.decode_bytes(*decode),
        "decode_own_heads": scaling.decode_bytes(*decode, own_heads=True),
        "prefill": scaling.ring_bytes(*ring),
        "training": scaling.training_bytes(*ring),
    }


def expect_traffic(found: dict[str, int], size: int) -> None:
    for form, expected in expected_traffic(size).items():
        assert expected <= found[form] <= (1 + OVERHEAD) * expected, (form, expected, found[form])


def test_two_ranks_give_what_one_device_gives() -> None:
    found = ranks(
        2,
        "decode",
        "half",
        "scaled_queries",
        "live_sequences",
        "mla_decode",
        "varlen",
        "what_heads_refuse",
        "what_positions_refuse",
        "traffic",
    )
    expect_traffic(found["traffic"], 2)


def test_one_rank_is_a_group_too() -> None:
    ranks(1, "gradients_over_heads", "decode", "mla_decode", "varlen")


@pytest.mark.parametrize("size", [2, 3, 4])
def test_heads_of_every_operator(size: int) -> None:
    meshes = ["meshes"] if size == 4 else []
    found = ranks(size, "heads", "gradients_over_heads", "writes_over_heads", "what_heads_refuse", *meshes)
    assert set(found["heads"]) == DIVIDED


def test_writes_of_divided_and_of_whole_caches() -> None:
    """Calls with divided queries can write a whole cache, which has latents or a single KV head."""
    found = ranks(2, "whole_caches")
    assert set(found["whole_caches"]) == {
        "latent_norm_rope_write", "norm_rope_write", "ragged_mla_attention", "ragged_paged_attention",
        "write_indexer_cache", "write_kv_pages", "write_mla_cache",
    }  # fmt: skip


@pytest.mark.parametrize("size", [3, 4])
def test_positions_over_more_ranks(size: int) -> None:
    found = ranks(size, "decode", "half", "live_sequences", "mla_decode", "varlen", "what_positions_refuse", "traffic")
    expect_traffic(found["traffic"], size)


@pytest.mark.parametrize(
    "name", ["context_parallel_decode", "context_parallel_mla_decode", "context_parallel_varlen_attention"]
)
def test_divided_positions_take_no_ranges_of_keys(name: str) -> None:
    """Attention divided by positions takes no `key_ranges`, because a rank's keys do not begin at position 0."""
    distributed = pytest.importorskip("ragged_attention.torch.distributed")
    with pytest.raises(TypeError, match="unexpected keyword argument 'key_ranges'"):
        getattr(distributed, name)(*[None] * 4, key_ranges=None)


def test_a_ranks_memory_falls_as_ranks_grow() -> None:
    most = {size: ranks(size, "memory")["memory"]["bytes"] for size in (1, 2, 4)}
    assert most[2] < 0.65 * most[1]
    assert most[4] < 0.65 * most[2]


def test_a_rank_that_dies_ends_the_others() -> None:
    began = time.monotonic()
    done = run_python("-m", "tests.ranks", "3", "death")
    assert done.returncode == 3, done.stdout + done.stderr  # the exit status of the rank that died
    assert time.monotonic() - began < 60
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert {each["rank"] for each in reports} == {0, 1}
    assert all(re.search("(?i)connection|timed out", each["said"]) for each in reports)


def test_a_rank_that_hangs_is_given_up() -> None:
    began = time.monotonic()
    done = run_python("-m", "tests.ranks", "2", "silence")
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_example_agrees_with_one_device(size: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(
        [*command, str(Path("examples", "parallel_decode.py"))], cwd=ROOT, env=environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        out, error = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, out + error
    assert f"{size} processes on" in out
    assert len(re.findall(r"^  .* \de-\d\d$|^  .* 0\.0e\+00$|^  .*e-\d\d$", out, re.MULTILINE)) == 6


# ---- sharding rules


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("interleave", [1, 3, 4, 8, 64])
def test_every_position_is_one_ranks(size: int, interleave: int) -> None:
    rule, positions = KvShard(size, interleave), np.arange(50, dtype=np.int32)
    local = np.stack([rule.at(rank).local(positions) for rank in range(size)])
    assert ((local >= 0).sum(axis=0) == 1).all()
    for rank in range(size):
        own = local[rank][local[rank] >= 0]
        np.testing.assert_array_equal(own, np.arange(len(own)))
        lengths = [(local[rank][:length] >= 0).sum() for length in range(51)]
        np.testing.assert_array_equal(rule.at(rank).lengths(np.arange(51)), lengths)
    np.testing.assert_array_equal(rule.at(0).local(np.array([-1, -7])), [-1, -1])


def test_whose_pages_are_whose() -> None:
    assert KvShard(2, 8, 1).columns(7, 4) == [2, 3, 6]
    assert KvShard(3, 4, 0).columns(7, 4) == [0, 3, 6]
    with pytest.raises(InvalidInput, match=r"^expected interleave to be a multiple of page_size=4, got 6$"):
        KvShard(2, 6, 0).columns(7, 4)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((0, 4), "expected size >= 1, got 0"),
        ((2, 0), "expected interleave >= 1, got 0"),
        ((2, 4, 2), "expected rank between 0 and 1, got 2"),
    ],
)
def test_a_rule_that_is_none(given: tuple[int, ...], said: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{said}$"):
        KvShard(*given)


def test_a_rule_without_a_rank_has_no_lengths() -> None:
    with pytest.raises(InvalidInput, match=r"^expected a shard with a rank, as `shard.at\(rank\)` gives, got rank="):
        KvShard(2, 4).lengths(np.array([3]))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_zigzag_is_the_same_work_for_all(size: int) -> None:
    order = zigzag_order(24, size)
    assert sorted(row for rows in order for row in rows) == list(range(24))
    pieces = [(order[2 * rank].start, order[2 * rank + 1].start) for rank in range(size)]
    for rank in range(size):
        for source in range(size):
            found = set(zigzag_pairs(rank, source, True))
            seen = {
                (i, j, (rank, i) == (source, j))
                for i in range(2)
                for j in range(2)
                if pieces[source][j] <= pieces[rank][i]
            }
            assert found == seen
            assert len(found) == (3 if rank == source else 2)
