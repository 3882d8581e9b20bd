"""Attention over heads-first pages in Triton: the kernels of `ragged_paged_attention` with other strides."""

from typing import Any

import triton
import triton.language as tl

from ragged_attention.calls.heads_first import HeadsFirstCall, RaggedHeadsFirst
from ragged_attention.kernels_triton import ragged_paged_attention
from ragged_attention.kernels_triton._sequences import VARYING
from ragged_attention.kernels_triton._tiles import cdiv
from ragged_attention.kernels_triton.ragged_paged_attention import Tile

EDGES = 256  # elements of `cu_q_lens` that one program writes


class HeadsFirstStrides:
    """A launcher that reports the strides of heads-first pages in the axis order of the ragged operation's pages."""

    def __init__(self, launch: Any) -> None:
        self.launch = launch

    def __call__(self, *arguments: Any, **options: Any) -> list[Any]:
        return self.launch(*arguments, **options)

    def strides(self, array: Any) -> tuple[int, ...]:
        strides = self.launch.strides(array)
        return (*strides[1:3], strides[0], strides[3]) if len(strides) == 4 else strides

    def packed(self, array: Any) -> Any:
        return self.launch.packed(array)


@triton.jit
def live_rows(length, num_tokens, ALIGN: tl.constexpr):
    """The number of a chunk's query tokens that exist. With ALIGN "chunk", the sequence may end within the chunk."""
    live = num_tokens
    if ALIGN == "chunk":
        live = tl.where(length > 0, (length - 1) % tl.maximum(num_tokens, 1) + 1, 0)
    return live


@triton.jit(do_not_specialize=VARYING)
def decode_edges_kernel(lengths_ptr, edges_ptr, count, BLOCK: tl.constexpr):
    """Write `cu_q_lens` for a batch with one query per sequence."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(edges_ptr + index, index, mask=index < count)


@triton.jit(do_not_specialize=VARYING)
def chunk_edges_kernel(length_ptr, edges_ptr, num_tokens, capacity, ALIGN: tl.constexpr):
    """Write `cu_q_lens` for a prefill chunk of one sequence."""
    length = tl.minimum(tl.maximum(tl.load(length_ptr), 0), capacity)
    tl.store(edges_ptr, 0)
    tl.store(edges_ptr + 1, live_rows(length, num_tokens, ALIGN))


def heuristic(call: HeadsFirstCall) -> Tile:
    return ragged_paged_attention.heuristic(ragged(call))


def invariant_tile(call: HeadsFirstCall) -> Tile:
    return ragged_paged_attention.invariant_tile(ragged(call))


def ragged(call: HeadsFirstCall, **indices: Any) -> RaggedHeadsFirst:
    """The call as a ragged call with the index arrays `indices`. Its scales of slots become scale pages."""
    k_scales, v_scales = call.scales
    return call.as_ragged(k_scale_pages=k_scales, v_scale_pages=v_scales, **indices)


def attend(call: HeadsFirstCall, tile: Tile, launch: Any, lengths: Any, align: str) -> Any:
    """Enqueue a heads-first call's kernels; returns out. `align` is "decode" or the alignment of a prefill chunk."""
    lengths = launch.packed(lengths)
    edges = cumulative(call, launch, lengths, align)
    return ragged_paged_attention.run(
        ragged(call, kv_lens=lengths, cu_q_lens=edges), tile, HeadsFirstStrides(launch)
    )  # fmt: skip


def cumulative(call: Any, launch: Any, lengths: Any, align: str) -> Any:
    """The `cu_q_lens` of the equivalent ragged call, written by a kernel."""
    if align != "decode":
        sizes = {"num_tokens": call.num_tokens, "capacity": call.capacity}
        return launch(chunk_edges_kernel, (1,), (lengths,), [((2,), "int32")], num_warps=1, ALIGN=align, **sizes)[0]
    count = call.num_tokens + 1
    outputs = [((count,), "int32")]
    return launch(decode_edges_kernel, (cdiv(count, EDGES),), (lengths,), outputs, count=count, BLOCK=EDGES)[0]
