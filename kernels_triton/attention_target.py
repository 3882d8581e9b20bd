"""The target of an indexer in Triton: attention probabilities summed over heads, then normalised for each token.

A program of the first kernel has one token and a block of its keys. It visits blocks of heads and sums their
probabilities in registers. The second kernel divides each token's sums by their total.
"""

import dataclasses
from typing import Any

import triton
import triton.language as tl

from ragged_attention.calls import AttentionTarget
from ragged_attention.kernels_triton._indexer import (
    KeyArray,
    KeyBlock,
    Operands,
    Queries,
    Tables,
    key_places,
    listed_keys,
    load_keys,
    load_queries,
    packed_shape,
    seen_range,
)
from ragged_attention.kernels_triton._latent.lists import list_length
from ragged_attention.kernels_triton._sequences import VARYING, PageTable
from ragged_attention.kernels_triton._softmax import LOG2E, matmul
from ragged_attention.kernels_triton._tiles import (
    OLDER_COMPILER,
    WGMMA,
    cdiv,
    expect_between,
    expect_power_of_two,
    launchable,
    next_power_of_2,
    on_cuda_cores,
    stride_arguments,
)

FEATURES = frozenset({"indices", "sm_scale", "topk_lens", "starts", "stops", "relative", "max_keys"})
NORMALISED: tl.constexpr = tl.constexpr(1024)  # columns that the second kernel reads at a time


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The tunable sizes."""

    block_h: int = 16  # heads per product
    block_n: int = 64  # keys per program
    block_d: int = 64  # columns of queries and keys per product
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self) -> None:
        expect_power_of_two(self, block_h=(16, 64), block_n=(16, 128), block_d=(16, 128), num_warps=(1, 16))
        expect_between(self, num_stages=(1, 8))


def why_not(call: AttentionTarget) -> str | None:
    return launchable(call, sums_kernel)


def heuristic(call: AttentionTarget) -> Tile:
    if on_cuda_cores(call):
        return Tile(block_h=32, block_n=32, block_d=16, num_stages=2)
    block_h = min(max(16, next_power_of_2(call.num_heads)), 64)
    wide = block_h == 64 and call.device.arch in WGMMA and not OLDER_COMPILER  # otherwise 128 keys would spill
    return Tile(block_h=block_h, block_n=128 if wide else 64)


invariant_tile = heuristic  # a token's results do not depend on other tokens


@triton.jit(do_not_specialize=VARYING)
def sums_kernel(
    q_ptr, keys_ptr, lse_ptr, lists_ptr, lens_ptr, starts_ptr, stops_ptr,
    sums_ptr,
    num_kv_tokens, longest, num_entries, list_stride, q_token_stride, q_head_stride, slot_stride, scale,
    LISTED: tl.constexpr, HAS_LENS: tl.constexpr, RELATIVE: tl.constexpr, SHAPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sum the probabilities of one token's heads for a block of its columns; 0 for keys that it does not see."""
    token = tl.program_id(0)
    block = tl.program_id(1)
    operands = Operands(
        Queries(q_ptr, q_token_stride, q_head_stride, lse_ptr, 0),
        KeyArray(keys_ptr, 0, slot_stride, lse_ptr, 0, 0),
        PageTable(lists_ptr, 0, 1),
    )
    if LISTED:
        length = list_length(lens_ptr, token, num_entries, HAS_LENS)
        column, key, page = listed_keys(lists_ptr, token, block, list_stride, length, num_kv_tokens, BLOCK_N)
    else:
        low, high = seen_range(token, True, Tables(0, starts_ptr, stops_ptr, num_kv_tokens, longest))
        column = block * BLOCK_N + tl.arange(0, BLOCK_N)
        key = column + low if RELATIVE else column
        page = tl.where((key >= low) & (key < high), 0, -1)
    sums = tl.zeros([BLOCK_N], tl.float32)
    if tl.max(page, 0) >= 0:  # a token without keys may hold NaN
        place = key_places(key, page, operands.keys, SHAPE)
        for first_head in range(0, SHAPE.HEADS, SHAPE.BLOCK_H):
            products = tl.zeros([BLOCK_N, SHAPE.BLOCK_H], tl.float32)
            for first_column in range(0, SHAPE.D, SHAPE.BLOCK_D):
                keys = load_keys(KeyBlock(place, page), first_column, operands, SHAPE, False)
                q = load_queries(token, first_head, first_column, operands.queries, SHAPE)
                products = matmul(keys, tl.trans(q), products)
            head = first_head + tl.arange(0, SHAPE.BLOCK_H)
            lse = tl.load(
                lse_ptr + token.to(tl.int64) * SHAPE.HEADS + head, mask=head < SHAPE.HEADS, other=float("-inf")
            )
            # With inf, the probabilities of a head without keys are 0.
            level = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
            sums += tl.sum(tl.math.exp2(products * (scale * LOG2E) - level[None, :]), 1)
    sums = tl.where(page >= 0, sums, 0.0)
    tl.store(sums_ptr + token.to(tl.int64) * num_entries + column, sums, mask=column < num_entries)


@triton.jit(do_not_specialize=VARYING)
def normalise_kernel(given_ptr, target_ptr, num_entries):
    """Divide each row of sums by its total, unless that is 0."""
    row = target_ptr + tl.program_id(0).to(tl.int64) * num_entries
    totals = tl.zeros([NORMALISED], tl.float32)
    for first in range(0, num_entries, NORMALISED):
        column = first + tl.arange(0, NORMALISED)
        totals += tl.load(row + column, mask=column < num_entries, other=0)
    total = tl.sum(totals, 0)
    total = tl.where(total == 0, 1.0, total)
    for first in range(0, num_entries, NORMALISED):
        column = first + tl.arange(0, NORMALISED)
        sums = tl.load(row + column, mask=column < num_entries, other=0)
        tl.store(row + column, sums / total, mask=column < num_entries)


def run(call: AttentionTarget, tile: Tile, launch: Any) -> Any:
    """Enqueue the kernels; returns the target."""
    q, keys = launch.packed(call.q), call.keys
    lists = launch.packed(call.indices) if call.listed else q
    others = [q if array is None else launch.contiguous(array) for array in (call.topk_lens, call.starts, call.stops)]
    (sums,) = launch(
        sums_kernel,
        (call.num_tokens, cdiv(call.columns, tile.block_n)),
        (q, keys, launch.contiguous(call.lse), lists, *others),
        [((call.num_tokens, call.columns), "float32")],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        num_kv_tokens=keys.shape[0],
        longest=min(call.columns, keys.shape[0]),
        num_entries=call.columns,
        list_stride=launch.strides(lists)[0],
        slot_stride=launch.strides(keys)[0],
        scale=call.scale,
        **stride_arguments(launch, ("token", "head"), q=q),
        LISTED=call.listed,
        HAS_LENS=call.topk_lens is not None,
        RELATIVE=call.relative,
        SHAPE=packed_shape(call, tile.block_h, tile.block_d),
        BLOCK_N=tile.block_n,
    )
    (target,) = launch(
        normalise_kernel, (call.num_tokens,), (sums,), [], inplace=(0,), num_warps=4, num_entries=call.columns
    )
    return target
