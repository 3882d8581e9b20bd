"""Attention over several jax devices: these tests start the checks of tests/devices.py and judge their results."""

import json
import os
import re
import socket
import subprocess
import sys
from typing import Any

import pytest

from tests.processes import ROOT, printed
from tests.tiers import QUICK_TO_COMPILE

pytest.importorskip("jax")

DIVIDED = {
    "block_scores", "select_blocks", "top_k_blocks",
    "merge_attention_states", "mla_decode", "norm_rope_write", "paged_attention", "prefill_attention",
    "ragged_mla_attention", "ragged_paged_attention", "sparse_mla_prefill", "varlen_attention",
    "varlen_attention_backward", "write_kv_pages",
}  # fmt: skip


def devices(*checks: str) -> dict[str, Any]:
    """The result of each check on eight virtual devices."""
    found: dict[str, Any] = {}
    for line in printed("-m", "tests.devices", *checks, XLA_FLAGS=QUICK_TO_COMPILE).splitlines():
        found |= json.loads(line)
    assert found.keys() == set(checks)
    return found


def test_what_is_refused() -> None:
    devices("the_mesh_in_force", "scaled_queries", "what_heads_refuse", "what_positions_refuse")


def test_heads_of_every_operation() -> None:
    found = devices("heads", "gradients_over_heads", "without_exceptions")
    assert set(found["heads"]) == DIVIDED


def test_writes_of_divided_and_of_whole_caches() -> None:
    """Calls with divided queries can write a whole cache, which has latents or a single KV head, and return it."""
    found = devices("writes_over_heads")
    assert set(found["writes_over_heads"]) == {
        "latent_norm_rope_write", "norm_rope_write", "ragged_mla_attention", "ragged_paged_attention",
        "write_kv_pages", "write_mla_cache",
    }  # fmt: skip


def test_positions() -> None:
    devices("decode", "live_sequences", "mla_decode")


def test_a_ring_exchanges_keys_and_nothing_else() -> None:
    """A ring sends only keys and values, each in one message before its loop and in one message in the loop.

    In training it also sends their gradients.
    """
    exchanges = devices("varlen")["varlen"]
    assert exchanges["forward over 4"] == exchanges["forward over 3"] == {"collective-permute": 4}
    assert exchanges["forward over 2"] == {"collective-permute": 2}
    assert exchanges["forward over 1"] == exchanges["training over 1"] == {}
    assert all(each.keys() <= {"collective-permute"} for each in exchanges.values())


def test_a_devices_memory_falls_as_devices_grow() -> None:
    most = devices("memory")["memory"]
    assert all(most[str(2 * size)] < 0.65 * most[str(size)] for size in (1, 2, 4))


@pytest.mark.parametrize(
    "name", ["context_parallel_decode", "context_parallel_mla_decode", "context_parallel_varlen_attention"]
)
def test_divided_positions_take_no_ranges_of_keys(name: str) -> None:
    """Attention divided by positions takes no `key_ranges`, because a device's keys do not begin at position 0."""
    from ragged_attention.jax import distributed

    with pytest.raises(TypeError, match="unexpected keyword argument 'key_ranges'"):
        getattr(distributed, name)(*[None] * 5, axis_name="devices", key_ranges=None)


def test_two_processes() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environ = {
        **os.environ,
        "PYTHONPATH": path,
        "XLA_FLAGS": QUICK_TO_COMPILE,
        "WORLD_SIZE": "2",
        "COORDINATOR": coordinator,
    }
    command = [sys.executable, "-m", "tests.devices", "processes"]
    talk: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    running = [subprocess.Popen(command, cwd=ROOT, env=environ | {"RANK": str(rank)}, **talk) for rank in range(2)]
    try:
        for process in running:
            out, _ = process.communicate(timeout=300)
            assert process.returncode == 0, out
    finally:
        for process in running:
            process.kill()


@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_example_agrees_with_one_device(count: int) -> None:
    out = printed("examples/parallel_decode_jax.py", "--devices", str(count), XLA_FLAGS=QUICK_TO_COMPILE)
    assert re.search(r"by heads +\S+ +nothing", out), out
    assert len(re.findall(r"1 all-gather$", out, re.MULTILINE)) == 3
    assert len(re.findall(r"\d collective-permute$", out, re.MULTILINE)) == 2
