"""Each kernel reads and writes operands correctly if their entries lie more than 2**31 elements apart."""

import dataclasses
import functools
import math
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

import ragged_attention.torch as rt
from ragged_attention.calls import IndexerLogits
from ragged_attention.kernels_triton import indexer_logits
from ragged_attention.kernels_triton.merge_attention_states import merge_kernel
from ragged_attention.tools.samples import device_of
from ragged_attention.torch._launcher import LAUNCHER
from tests import far_strides
from tests.far_strides import unread

OPTIONS = {"tiles": {"split_block_q": 16, "block_q": 16}, "splits": {"num_splits": 2}}


def called(name: str, axis: int) -> list[torch.Tensor]:
    return far_strides.called(name, axis, "triton", OPTIONS.get(name))


@functools.cache
def near(name: str) -> list[torch.Tensor]:
    return called(name, far_strides.NOWHERE)


@pytest.mark.parametrize(("name", "axis"), far_strides.CASES)
def test_strides_may_exceed_32_bits(name: str, axis: int) -> None:
    for got, want in zip(called(name, axis), near(name), strict=True):
        assert torch.equal(got, want), f"largest difference: {float((got.double() - want.double()).abs().max())}"


@pytest.mark.parametrize("rows", [2**24, 2**25 + 1])
def test_partial_results_may_be_far_apart(rows: int) -> None:
    """The kernel merges the first row of two partial results that lie 2**31 elements or more apart."""
    outs, lses = unread(2 * rows * 128 + 128, torch.float32), unread(2 * rows + 1, torch.float32)
    outs[rows * 128 : rows * 128 + 128] = 2.0
    out, lse = torch.zeros(128), torch.zeros(1)
    sizes: dict[str, Any] = {"HAS_SINKS": False, "NUM_HEADS": 1, "PARTS": 2, "DV": 128, "DV_PAD": 128}
    merge_kernel[(1,)](outs, lses, lses, out, lse, count=2, rows=rows, **sizes)
    assert torch.equal(out, torch.ones(128))
    assert float(lse) == pytest.approx(math.log(2))


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("walk", [False, True])
def test_rows_of_logits_may_be_far_apart(walk: bool, paged: bool) -> None:
    """The kernel writes rows of logits that are far apart, for a chunk of the last three of five tokens.

    Together the rows exceed 2**31 elements. With packed keys, no token of the chunk sees the last block of keys.
    """
    arguments: dict[str, Any] = {"q": far_strides.normal(5, 6, 32), "weights": far_strides.normal(5, 6).float()}
    arguments |= far_strides.TABLES | far_strides.PAGED_KEYS if paged else far_strides.PACKED_KEYS
    if not paged:
        arguments |= {"starts": far_strides.ints(0, 7, 3, 0, 9), "stops": far_strides.ints(20, 24, 9, 16, 12)}
    call = IndexerLogits(**arguments, device=device_of("torch"))
    stride, tile = 2**30 + 64, dataclasses.replace(indexer_logits.heuristic(call), walk=walk, block_n=16)
    # FAR elements precede the rows, so that offsets that wrap around stay in this memory.
    memory = unread(far_strides.FAR + 3 * stride, torch.float32)
    logits = memory[far_strides.FAR :].view(3, stride)
    indexer_logits.enqueue(indexer_logits.work_of(call, LAUNCHER), tile, LAUNCHER, 2, 3, stride, logits, fill=True)
    want = rt.indexer_logits(**arguments, backend="triton", options={"walk": walk, "block_n": 16})
    assert torch.equal(logits[:, : want.shape[1]], want[2:])
