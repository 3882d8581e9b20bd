"""The gradient of the lightning indexer's logits in Triton.

A program of the *query* kernel has a block of one token's heads and visits the keys that the token sees. It recomputes
their products and sums the gradients of the queries and the weights in registers. The gradients of keys are sums over
tokens, which are added in an order that depends on the ranges or lists alone:

* If tokens have ranges, a program of the *key* kernel holds a block of keys and visits the tokens that see one of them.
* If tokens have lists, the query kernel also writes a separate row for each entry, for a chunk of tokens at a time.
  Kernels of `sparse_mla_prefill_backward` then add up the rows of the entries that name one key.
"""

import dataclasses
from typing import Any

import triton
import triton.language as tl

from ragged_attention.calls import IndexerLogitsBackward
from ragged_attention.kernels_triton._formats import narrow
from ragged_attention.kernels_triton._indexer import (
    KeyArray,
    KeyBlock,
    Operands,
    Queries,
    Shape,
    Tables,
    key_places,
    listed_keys,
    load_keys,
    load_queries,
    load_scales,
    load_weights,
    packed_shape,
    seen_range,
)
from ragged_attention.kernels_triton._sequences import VARYING, PageTable
from ragged_attention.kernels_triton._softmax import matmul, sum_of_products
from ragged_attention.kernels_triton._splits import LARGEST_INT
from ragged_attention.kernels_triton._tiles import (
    OLDER_COMPILER,
    cdiv,
    expect_between,
    expect_power_of_two,
    launchable,
    next_power_of_2,
    on_cuda_cores,
    stride_arguments,
)
from ragged_attention.kernels_triton.sparse_mla_prefill_backward import (
    ENTRY_BYTES,
    FLAT,
    gather,
    narrowed,
    zero_kernel,
)

FEATURES = frozenset({"key_scale", "starts", "stops", "relative", "max_keys", "indices"})
TOKENS: tl.constexpr = tl.constexpr(32)  # tokens whose ranges the key kernel reads at a time


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The tunable sizes."""

    block_h: int = 16  # heads per product
    block_n: int = 32  # keys per product
    num_warps: int = 4
    key_warps: int = 4  # the warps of the key kernel
    num_stages: int = 1
    chunk_tokens: int = 16  # tokens per chunk, if tokens have lists

    def __post_init__(self) -> None:
        expect_power_of_two(self, block_h=(16, 64), block_n=(16, 128), num_warps=(1, 16), key_warps=(1, 16))
        expect_between(self, num_stages=(1, 4), chunk_tokens=(1, LARGEST_INT.value))


def why_not(call: IndexerLogitsBackward) -> str | None:
    return launchable(call, query_kernel)


def heuristic(call: IndexerLogitsBackward) -> Tile:
    block_h, block_n, num_warps, key_warps = sizes(call)
    bytes_per_token = max(call.columns, 1) * cdiv(call.num_heads, block_h) * call.head_dim * 4
    return Tile(
        block_h=block_h,
        block_n=block_n,
        num_warps=num_warps,
        key_warps=key_warps,
        chunk_tokens=min(max(ENTRY_BYTES // bytes_per_token, 1), max(call.num_tokens, 1)),
    )


def sizes(call: Any) -> tuple[int, int, int, int]:
    """(heads, keys, warps, warps of the key kernel): sizes that compile without spills."""
    arch, block_h = call.device.arch, min(max(16, next_power_of_2(call.num_heads)), 64)
    if on_cuda_cores(call):
        return 16, 16, 4, 8
    if call.head_dim > 128:
        return min(block_h, 32), 32, 8, 8
    warps = 8 if block_h == 64 else 4
    if arch.startswith("gfx") or (arch == "sm_120" and OLDER_COMPILER):
        return block_h, 32, warps, warps
    return block_h, 64, warps, warps


# ---- kernels


@triton.jit
def d_products(products, weights, towards):
    """The gradients of products; 0 unless a product is positive. `towards` has d_logits times the keys' scales."""
    return tl.where(products > 0, weights * towards, 0.0)


@triton.jit
def store_rows(ptr, rows, stored, first_place, SHAPE: tl.constexpr):
    """Write the `rows` [n, BLOCK_D] with True in `stored` [n] to an array, from its row `first_place` on."""
    d = tl.arange(0, SHAPE.BLOCK_D)
    place = (first_place + tl.arange(0, rows.shape[0])) * SHAPE.D
    mask = stored[:, None] & (d < SHAPE.D)[None, :]
    tl.store(ptr + place[:, None] + d[None, :], narrow(rows, ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=VARYING)
def query_kernel(
    d_logits_ptr, q_ptr, keys_ptr, weights_ptr, scale_ptr, starts_ptr, stops_ptr, lists_ptr, given_dq_ptr,
    given_dw_ptr,
    parts_ptr, dq_ptr, dw_ptr,
    first_token, num_kv_tokens, longest, num_entries, d_logits_stride, list_stride, q_token_stride, q_head_stride,
    weights_stride, slot_stride, scale_slot_stride,
    LISTED: tl.constexpr, RELATIVE: tl.constexpr, SHAPE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block of one token's heads and, with lists, their contributions to the list's keys."""
    BLOCK_H: tl.constexpr = SHAPE.BLOCK_H
    BLOCKS: tl.constexpr = (SHAPE.HEADS + BLOCK_H - 1) // BLOCK_H
    job = tl.program_id(0) // BLOCKS
    block_of_heads = tl.program_id(0) % BLOCKS
    token = first_token + job
    first_head = block_of_heads * BLOCK_H
    operands = Operands(
        Queries(q_ptr, q_token_stride, q_head_stride, weights_ptr, weights_stride),
        KeyArray(keys_ptr, 0, slot_stride, scale_ptr, 0, scale_slot_stride),
        PageTable(lists_ptr, 0, 1),
    )
    q = load_queries(token, first_head, 0, operands.queries, SHAPE)
    weights = load_weights(token, first_head, operands.queries, SHAPE)
    if LISTED:
        low = 0
        high = num_entries
    else:
        low, high = seen_range(token, True, Tables(0, starts_ptr, stops_ptr, num_kv_tokens, longest))
    d_logits = d_logits_ptr + token.to(tl.int64) * d_logits_stride
    dq = tl.zeros([BLOCK_H, SHAPE.BLOCK_D], tl.float32)
    dw = tl.zeros([BLOCK_H], tl.float32)
    for step in range((high - low + BLOCK_N - 1) // BLOCK_N):
        if LISTED:
            column, key, page = listed_keys(lists_ptr, token, step, list_stride, num_entries, num_kv_tokens, BLOCK_N)
        else:
            key = low + step * BLOCK_N + tl.arange(0, BLOCK_N)
            page = tl.where(key < high, 0, -1)
            column = key - low if RELATIVE else key
        keys = load_keys(KeyBlock(key_places(key, page, operands.keys, SHAPE), page), 0, operands, SHAPE, False)
        towards = tl.load(d_logits + column, mask=page >= 0, other=0)
        if SHAPE.SCALES != "none":
            towards = towards * load_scales(key, page, operands.keys, SHAPE)
        products = matmul(q, tl.trans(keys), tl.zeros([BLOCK_H, BLOCK_N], tl.float32))
        dw += sum_of_products(products, towards[None, :], products > 0, 1)
        coefficients = narrow(d_products(products, weights[:, None], towards[None, :]), q.dtype)
        dq = matmul(coefficients, keys, dq)
        if LISTED:
            rows = matmul(tl.trans(coefficients), q, tl.zeros([BLOCK_N, SHAPE.BLOCK_D], tl.float32))
            entry = job.to(tl.int64) * num_entries + column
            d = tl.arange(0, SHAPE.BLOCK_D)
            target = parts_ptr + (entry * BLOCKS + block_of_heads) * SHAPE.D
            mask = (page >= 0)[:, None] & (d < SHAPE.D)[None, :]
            tl.store(target[:, None] + d[None, :], rows, mask=mask)
    head = first_head + tl.arange(0, BLOCK_H)
    first_row = token.to(tl.int64) * SHAPE.HEADS + first_head
    store_rows(dq_ptr, dq, head < SHAPE.HEADS, first_row, SHAPE)
    tl.store(dw_ptr + first_row + tl.arange(0, BLOCK_H), dw, mask=head < SHAPE.HEADS)


@triton.jit(do_not_specialize=VARYING)
def key_kernel(
    d_logits_ptr, q_ptr, keys_ptr, weights_ptr, scale_ptr, starts_ptr, stops_ptr,
    dk_ptr,
    num_tokens, num_kv_tokens, longest, d_logits_stride, q_token_stride, q_head_stride, weights_stride, slot_stride,
    scale_slot_stride, RELATIVE: tl.constexpr, SHAPE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block of keys over the tokens whose ranges include one of the keys."""
    tile_start = tl.program_id(0) * BLOCK_N
    operands = Operands(
        Queries(q_ptr, q_token_stride, q_head_stride, weights_ptr, weights_stride),
        KeyArray(keys_ptr, 0, slot_stride, scale_ptr, 0, scale_slot_stride),
        PageTable(starts_ptr, 0, 1),
    )
    tables = Tables(0, starts_ptr, stops_ptr, num_kv_tokens, longest)
    key = tile_start + tl.arange(0, BLOCK_N)
    exists = key < num_kv_tokens
    page = tl.where(exists, 0, -1)
    keys = load_keys(KeyBlock(key_places(key, page, operands.keys, SHAPE), page), 0, operands, SHAPE, False)
    dk = tl.zeros([BLOCK_N, SHAPE.BLOCK_D], tl.float32)
    for first_token in range(0, num_tokens, TOKENS):
        tokens = first_token + tl.arange(0, TOKENS)
        lows, highs = seen_range(tokens, tokens < num_tokens, tables)
        meets = (lows < highs) & (lows < tile_start + BLOCK_N) & (highs > tile_start)
        if tl.max(meets.to(tl.int32), 0) > 0:
            for index in range(first_token, tl.minimum(first_token + TOKENS, num_tokens)):
                token = tl.cast(index, tl.int32)  # in the interpreter, `index` is a Python number
                low, high = seen_range(token, True, tables)
                # A token that sees no key of the block may hold NaN.
                if (low < high) & (low < tile_start + BLOCK_N) & (high > tile_start):
                    seen = (key >= low) & (key < high)
                    column = key - low if RELATIVE else key
                    row = d_logits_ptr + token.to(tl.int64) * d_logits_stride
                    towards = tl.load(row + column, mask=seen, other=0)
                    if SHAPE.SCALES != "none":
                        towards = towards * load_scales(key, tl.where(seen, 0, -1), operands.keys, SHAPE)
                    for first_head in range(0, SHAPE.HEADS, SHAPE.BLOCK_H):
                        q = load_queries(token, first_head, 0, operands.queries, SHAPE)
                        weights = load_weights(token, first_head, operands.queries, SHAPE)
                        products = matmul(keys, tl.trans(q), tl.zeros([BLOCK_N, SHAPE.BLOCK_H], tl.float32))
                        coefficients = d_products(products, weights[None, :], towards[:, None])
                        dk = matmul(narrow(coefficients, q.dtype), q, dk)
    store_rows(dk_ptr, dk, exists, tl.cast(tile_start, tl.int64), SHAPE)


# ---- launching


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A call's arguments in the kernels' terms."""

    arrays: tuple[Any, ...]  # arguments of the query and the key kernel, with q as a stand-in for absent arrays
    numbers: dict[str, Any]
    shape: Shape


def work_of(call: IndexerLogitsBackward, tile: Tile, launch: Any) -> Work:
    """The `Work` of a call, with q as a stand-in for absent arrays."""
    d_logits, q, weights = map(launch.packed, (call.d_logits, call.q, call.weights))
    scale = q if call.key_scale is None else call.key_scale
    ranges = [q if edges is None else launch.contiguous(edges) for edges in (call.starts, call.stops)]
    return Work(
        arrays=(d_logits, q, call.keys, weights, scale, *ranges),
        numbers={
            "num_kv_tokens": call.keys.shape[0],
            "longest": min(call.columns, call.keys.shape[0]),
            "d_logits_stride": launch.strides(d_logits)[0],
            "weights_stride": launch.strides(weights)[0],
            "slot_stride": launch.strides(call.keys)[0],
            "scale_slot_stride": 0 if call.key_scale is None else launch.strides(scale)[0],
            **stride_arguments(launch, ("token", "head"), q=q),
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            "RELATIVE": call.relative,
            "BLOCK_N": tile.block_n,
        },
        shape=packed_shape(call, tile.block_h, next_power_of_2(call.head_dim), call.key_scale),
    )


def add_chunk(call: Any, tile: Tile, launch: Any, work: Work, first: int, tokens: int, results: Any) -> Any:
    """Enqueue the gradients of a chunk's queries and weights; returns the entries' rows (or a stand-in) and results."""
    blocks = cdiv(call.num_heads, tile.block_h)
    lists = launch.packed(call.indices) if call.listed else work.arrays[1]
    parts = (tokens * call.columns, blocks, call.head_dim) if call.listed else (1,)
    return launch(
        query_kernel,
        (tokens * blocks,),
        (*work.arrays, lists, *results),
        [(parts, "float32")],
        inplace=(8, 9),
        first_token=first,
        num_entries=call.columns if call.listed else 0,
        list_stride=launch.strides(lists)[0],
        **work.numbers,
        LISTED=call.listed,
        SHAPE=work.shape,
    )


def run(call: IndexerLogitsBackward, tile: Tile, launch: Any) -> Any:
    """Enqueue the kernels; returns the gradients of q, keys and weights."""
    work, (num_keys, head_dim) = work_of(call, tile, launch), call.keys.shape
    by_entry = call.listed or not num_keys
    count = num_keys * head_dim if by_entry else 1
    d_keys, *results = launch(
        zero_kernel,
        (max(cdiv(count, FLAT), 1),),
        (work.arrays[1],),
        [
            (call.keys.shape if by_entry else (1,), "float32"),
            (call.q.shape, call.q.dtype),
            (call.weights.shape, "float32"),
        ],
        count=count,
        FLAT=FLAT,
    )
    step = tile.chunk_tokens if call.listed else max(call.num_tokens, 1)
    for first in range(0, call.num_tokens, step):
        tokens = min(step, call.num_tokens - first)
        parts, *results = add_chunk(call, tile, launch, work, first, tokens, results)
        if call.listed and call.columns and num_keys:
            lists = launch.packed(call.indices)
            of_lists = {
                "list_token_stride": launch.strides(lists)[0],
                "list_head_stride": 0,
                "num_slots": min(num_keys, LARGEST_INT.value),
                "TOPK": call.columns,
                "KV_HEADS": 1,
                "HAS_LENS": False,
            }
            d_keys = gather(launch, lists, lists, of_lists, first, tokens, parts, d_keys)
    if by_entry:
        d_keys = narrowed(launch, d_keys, call.keys)
    else:
        (d_keys,) = launch(
            key_kernel,
            (cdiv(num_keys, tile.block_n),),
            work.arrays,
            [(call.keys.shape, call.keys.dtype)],
            num_tokens=call.num_tokens,
            **work.numbers | {"num_warps": tile.key_warps},
            SHAPE=work.shape,
        )
    return (results[0], d_keys, results[1])
