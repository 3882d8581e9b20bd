"""The gradient of sparse MLA prefill in Triton.

A program has BLOCK_H heads of one query token and visits the rows of the token's list. It recomputes their logits,
accumulates the queries' gradient in registers, and adds to each row's gradient in memory. Many queries can list the
same row, and their programs run in no fixed order. There are two ways to sum a row's gradient:

* By default, programs add with float32 atomics.
* If the result must be deterministic, every list entry writes a separate row, for a chunk of tokens at a time. The
  entries are then sorted by slot with a stable sort, and one program per slot adds the rows of its entries in the order
  of the lists.

With p = exp(logit - lse), share = sigmoid(lse - sink) and delta = out . d_out, the gradients of one head are

    d_logit = p * (share * (d_out . value) + d_lse - share * delta)     d_sink = sum of (share - 1) * delta
    dq = sum of d_logit * row     d_row = d_logit * q, plus share * p * d_out in the value's columns
"""

import dataclasses
import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ragged_attention.calls import SparseMlaPrefillBackward
from ragged_attention.kernels_triton._constants import Constants
from ragged_attention.kernels_triton._formats import narrow
from ragged_attention.kernels_triton._latent.lists import entries_of, keys_of, list_length
from ragged_attention.kernels_triton._latent.plan import LARGEST_INT
from ragged_attention.kernels_triton._latent.rows import Columns, Finished, store_groups, whole_columns
from ragged_attention.kernels_triton._sequences import VARYING
from ragged_attention.kernels_triton._softmax import LOG2E, column_sums, matmul, sum_of_products
from ragged_attention.kernels_triton._tiles import (
    Sizes,
    cdiv,
    expect_between,
    expect_power_of_two,
    item_size,
    launchable_in_float32,
    next_power_of_2,
    shared_memory,
    stride_arguments,
)

ENTRY_BYTES = 2**30  # maximum memory for rows of entries, unless a single token takes more
FLAT = 1024  # elements per program of an elementwise kernel
MARGIN = 12 * 2**10  # bytes of shared memory that `shared_bytes` does not count
ABREAST = 8  # entries of a slot that are added at a time
NO_ROW: tl.constexpr = tl.constexpr(LARGEST_INT)  # the row of an entry that names no slot
FEATURES = frozenset({"d_lse", "sm_scale", "d_v", "sinks", "topk_lens", "deterministic"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    block_h: int = 16  # heads per program
    block_kv: int = 16  # keys per step
    num_warps: int = 4
    num_stages: int = 1
    keys_first: bool = False  # whether tiles of (head, key) pairs and of dq are transposed
    chunk_tokens: int = 16  # in deterministic mode, tokens per chunk

    def __post_init__(self) -> None:
        expect_power_of_two(self, block_h=(16, 64), block_kv=(16, 64), num_warps=(1, 16))
        expect_between(self, num_stages=(1, 4), chunk_tokens=(1, LARGEST_INT))


def why_not(call: SparseMlaPrefillBackward) -> str | None:
    if call.deterministic and call.num_slots * call.num_kv_heads >= LARGEST_INT:
        return f"expected fewer than 2**31 - 1 rows of kv for deterministic=True, got {call.num_slots} slots"
    if call.device.platform == "cuda" and shared_bytes(call, 16, 16) > shared_memory(call):
        limit = f"{shared_memory(call)} bytes of shared memory"
        return f"expected rows that fit {limit}, 16 at a time, got {call.d_qk} columns of {item_size(call.q)} bytes"
    return launchable_in_float32(call, gradient_kernel)


def heuristic(call: SparseMlaPrefillBackward) -> Tile:
    tile = sizes(call)
    bytes_per_token = call.num_kv_heads * call.topk * cdiv(call.group, tile.rows) * call.d_qk * 4
    return Tile(
        **tile.fields("block_h"),
        keys_first=has_wide_keys_first(call, tile.rows),
        chunk_tokens=min(max(ENTRY_BYTES // bytes_per_token, 1), max(call.num_tokens, 1)),
    )


def sizes(call: Any) -> Sizes:
    """The sizes, with heads as rows: as many heads as fit, because each block of heads reads the whole list.

    More keys per step would leave no registers to prefetch the next block.
    """
    if item_size(call.q) == 4:
        return Sizes(16, 16, 8, 1)
    rows = max(16, next_power_of_2(call.group))
    if call.device.arch.startswith("gfx"):
        return Sizes(min(rows, 32 if call.device.arch == "gfx950" else 16), 16, 4, 2)
    if call.device.arch == "sm_90" and rows == 16:
        return Sizes(16, 16, 4, 2)  # a multiprocessor then runs two independent programs
    if has_wide_keys_first(call, min(rows, 32)):
        return Sizes(32, 32, 8, 2)
    for heads, keys in ((32, 16), (16, 32), (16, 16)):
        if heads <= rows and shared_bytes(call, heads, keys) + MARGIN <= shared_memory(call):
            return Sizes(heads, keys, 8, 2)
    return Sizes(16, 16, 8, 1)


def has_wide_keys_first(call: Any, heads: int) -> bool:
    """Whether dq is computed transposed, by wgmma. Shared memory then holds queries in two layouts."""
    if call.device.arch != "sm_90" or heads < 32 or item_size(call.q) == 4 or call.d_v <= 256:
        return False
    return shared_bytes(call, 2 * heads, 32) + MARGIN <= shared_memory(call)


def shared_bytes(call: Any, heads: int, keys: int) -> int:
    """An estimate of a program's shared memory: queries, gradients of the output, and a block of rows."""
    value, rest = (next_power_of_2(width) if width else 0 for width in (call.d_v, call.d_qk - call.d_v))
    return (heads * (2 * value + rest) + keys * (value + rest)) * item_size(call.q)


# ---- kernels


@triton.jit(do_not_specialize=VARYING)
def zero_kernel(like_ptr, rows_ptr, dq_ptr, terms_ptr, count, FLAT: tl.constexpr):
    """Write zeros to the rows' gradients. The launch also allocates two other outputs for later kernels."""
    index = tl.program_id(0).to(tl.int64) * FLAT + tl.arange(0, FLAT)
    tl.store(rows_ptr + index, tl.zeros([FLAT], tl.float32), mask=index < count)


@triton.jit(do_not_specialize=VARYING)
def narrow_kernel(wide_ptr, out_ptr, count, FLAT: tl.constexpr):
    """Round float32 to the dtype of the output."""
    index = tl.program_id(0).to(tl.int64) * FLAT + tl.arange(0, FLAT)
    wide = tl.load(wide_ptr + index, mask=index < count, other=0)
    tl.store(out_ptr + index, narrow(wide, out_ptr.dtype.element_ty), mask=index < count)


@triton.jit(do_not_specialize=VARYING)
def rows_kernel(
    list_ptr, lens_ptr, rows_ptr, first_token, list_token_stride, list_head_stride, num_slots,
    TOPK: tl.constexpr, KV_HEADS: tl.constexpr, HAS_LENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the index of each list entry's row in the gradient, or NO_ROW for an entry without a slot."""
    job = tl.program_id(0)
    token = first_token + job // KV_HEADS
    kv_head = job % KV_HEADS
    last = list_length(lens_ptr, token, TOPK, HAS_LENS)
    position = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    entries = list_ptr + token.to(tl.int64) * list_token_stride + kv_head.to(tl.int64) * list_head_stride
    slot = tl.load(entries + position, mask=position < last, other=-1)
    row = tl.where((slot >= 0) & (slot < num_slots), slot * KV_HEADS + kv_head, NO_ROW)
    tl.store(rows_ptr + job.to(tl.int64) * TOPK + position, row, mask=position < TOPK)


@triton.jit(do_not_specialize=VARYING)
def gather_kernel(
    parts_ptr, rows_ptr, order_ptr, given_ptr, sums_ptr, count,
    BLOCKS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, ABREAST: tl.constexpr,
):  # fmt: skip
    """Add the rows of all entries that name one slot to the slot's row of the gradient.

    `order` has the entries sorted by slot. Only the program at a slot's first entry adds rows; the other programs
    return.
    """
    index = tl.program_id(0)
    row = tl.load(rows_ptr + index)
    previous = tl.load(rows_ptr + tl.maximum(index - 1, 0))
    if (row != NO_ROW) & ((index == 0) | (previous != row)):
        column = tl.arange(0, WIDTH_PAD)
        inside = column < WIDTH
        sums = tl.load(given_ptr + row.to(tl.int64) * WIDTH + column, mask=inside, other=0)
        more = index < count
        while more:
            place = index + tl.arange(0, ABREAST)
            same = tl.load(rows_ptr + place, mask=place < count, other=NO_ROW) == row
            entry = tl.load(order_ptr + place, mask=same, other=0).to(tl.int64)
            for block in range(BLOCKS):
                parts = parts_ptr + (entry * BLOCKS + block) * WIDTH
                rows = tl.load(parts[:, None] + column[None, :], mask=same[:, None] & inside[None, :], other=0)
                sums += tl.sum(rows, 0)
            index += ABREAST
            more = tl.min(same.to(tl.int32), 0) == 1
        tl.store(sums_ptr + row.to(tl.int64) * WIDTH + column, sums, mask=inside)


class Gradients(NamedTuple):
    """The gradients of logits and the weights [keys, heads] of a block of keys and a block of heads."""

    dlogits: tl.tensor
    weights: tl.tensor  # multiplied by share
    readable: tl.tensor  # whether a key's row may be written
    scale: tl.tensor  # the scale of logits


@triton.jit
def give_columns(rows, gradients, q, d_out, FIRST: tl.constexpr, LAST: tl.constexpr, IS_VALUE: tl.constexpr,
                 BY_ENTRY: tl.constexpr):  # fmt: skip
    """Write columns [FIRST, LAST) of the rows' gradients: store them if BY_ENTRY, else add them atomically."""
    columns: tl.constexpr = q.shape[1]
    dlogits = gradients.dlogits
    drows = matmul(dlogits, q, tl.zeros([dlogits.shape[0], columns], tl.float32)) * gradients.scale
    if IS_VALUE:
        drows = matmul(gradients.weights, d_out, drows)
    column = FIRST + tl.arange(0, columns)
    mask = gradients.readable[:, None] & (column < LAST)[None, :]
    if BY_ENTRY:
        tl.store(rows[:, None] + column[None, :], drows, mask=mask)
    else:
        tl.atomic_add(rows[:, None] + column[None, :], drows, mask=mask, sem="relaxed")


@triton.jit
def load_group(rows, readable, GROUP: tl.constexpr, COLUMNS: tl.constexpr):
    """The group of the rows' columns with index GROUP."""
    FIRST: tl.constexpr = GROUP * COLUMNS.WIDTH
    return whole_columns(rows, readable, FIRST, COLUMNS.GROUPED - FIRST, COLUMNS.WIDTH)


@triton.jit
def load_groups(rows, readable, COLUMNS: tl.constexpr):
    """All groups of the rows' columns."""
    groups = ()
    for group in tl.static_range(COLUMNS.GROUPS):
        groups += (load_group(rows, readable, group, COLUMNS),)
    return groups


@triton.jit
def row_products(rows, groups, readable, COLUMNS: tl.constexpr):
    """The dot product of each row at the addresses `rows` and the corresponding row of `groups`."""
    sums = tl.zeros(rows.shape, tl.float32)
    for group in tl.static_range(len(groups)):
        columns = load_group(rows, readable, group, COLUMNS).to(tl.float32)
        sums += sum_of_products(columns, groups[group].to(tl.float32), readable[:, None], 1)
    return sums


@triton.jit
def add_products(heads, keys, acc, KEYS_FIRST: tl.constexpr):
    """acc + heads @ keys.T, [heads, keys], or its transpose if KEYS_FIRST."""
    for group in tl.static_range(len(heads)):
        if KEYS_FIRST:
            acc = matmul(keys[group], tl.trans(heads[group]), acc)
        else:
            acc = matmul(heads[group], tl.trans(keys[group]), acc)
    return acc


@triton.jit
def add_rows(pairs, groups, acc, KEYS_FIRST: tl.constexpr):
    """acc + pairs [heads, keys] @ groups, for each group of columns. If KEYS_FIRST, pairs and acc are transposed."""
    sums = ()
    for group in tl.static_range(len(acc)):
        if KEYS_FIRST:
            sums += (matmul(tl.trans(groups[group]), pairs, acc[group]),)
        else:
            sums += (matmul(pairs, groups[group], acc[group]),)
    return sums


@triton.jit
def of_heads(vector, KEYS_FIRST: tl.constexpr):
    """A vector over heads, reshaped to broadcast over a tile of (head, key) pairs."""
    return vector[None, :] if KEYS_FIRST else vector[:, None]


@triton.jit
def swapped(tiles, SWAPPED: tl.constexpr):
    """The tiles, transposed if SWAPPED."""
    results = ()
    for index in tl.static_range(len(tiles)):
        results += (tl.trans(tiles[index]) if SWAPPED else tiles[index],)
    return results


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PairTile(Constants):
    """A tile of pairs of query heads and keys."""

    BLOCK_H: int  # heads per tile
    BLOCK_KV: int  # keys per tile
    KEYS_FIRST: bool  # whether keys are the tile's rows


@triton.jit(do_not_specialize=VARYING)
def gradient_kernel(
    d_out_ptr, q_ptr, kv_ptr, list_ptr, lens_ptr, out_ptr, lse_ptr, d_lse_ptr, sinks_ptr,
    given_rows_ptr, given_dq_ptr, given_terms_ptr, parts_ptr, rows_ptr, dq_ptr, terms_ptr,
    first_token, d_out_token_stride, d_out_head_stride, q_token_stride, q_head_stride, out_token_stride,
    out_head_stride, list_token_stride, list_head_stride, page_stride, slot_stride, head_stride,
    num_slots, scale,
    HAS_LENS: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_D_LSE: tl.constexpr, BY_ENTRY: tl.constexpr,
    PAGE_SIZE: tl.constexpr, TOPK: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    COLUMNS: tl.constexpr, PAIR_TILE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of BLOCK_H heads of one token, and their contributions to the rows of its list."""
    BLOCK_H: tl.constexpr = PAIR_TILE.BLOCK_H
    BLOCK_KV: tl.constexpr = PAIR_TILE.BLOCK_KV
    KEYS_FIRST: tl.constexpr = PAIR_TILE.KEYS_FIRST
    PAIRS: tl.constexpr = (BLOCK_KV, BLOCK_H) if KEYS_FIRST else (BLOCK_H, BLOCK_KV)
    BLOCKS: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    D: tl.constexpr = COLUMNS.GROUPED + COLUMNS.REST
    NUM_HEADS: tl.constexpr = KV_HEADS * GROUP
    job = tl.program_id(0) // BLOCKS
    block_of_heads = tl.program_id(0) % BLOCKS
    token = first_token + job // KV_HEADS
    kv_head = job % KV_HEADS
    row = block_of_heads * BLOCK_H + tl.arange(0, BLOCK_H)
    valid = row < GROUP
    head = kv_head * GROUP + row
    wide_token = token.to(tl.int64)
    index = wide_token * NUM_HEADS + head
    lse = tl.load(lse_ptr + index, mask=valid, other=float("-inf"))
    has_keys = lse != float("-inf")
    level = tl.where(has_keys, lse * LOG2E, float("inf"))  # inf makes the weights of a row without keys 0

    q_rows = q_ptr + wide_token * q_token_stride + head.to(tl.int64) * q_head_stride
    d_out_rows = d_out_ptr + wide_token * d_out_token_stride + head.to(tl.int64) * d_out_head_stride
    out_rows = out_ptr + wide_token * out_token_stride + head.to(tl.int64) * out_head_stride
    q = load_groups(q_rows, has_keys, COLUMNS)
    d_out = load_groups(d_out_rows, has_keys, COLUMNS)
    delta = row_products(out_rows, d_out, has_keys, COLUMNS)
    q_rest = q[0]
    if COLUMNS.REST > 0:
        q_rest = whole_columns(q_rows, has_keys, COLUMNS.GROUPED, COLUMNS.REST, COLUMNS.REST_PAD)
    dq = swapped((tl.zeros([BLOCK_H, COLUMNS.WIDTH], tl.float32),) * COLUMNS.GROUPS, KEYS_FIRST)
    dq_rest = swapped((tl.zeros([BLOCK_H, COLUMNS.REST_PAD], tl.float32),), KEYS_FIRST)

    share = tl.full([BLOCK_H], 1.0, tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=valid, other=float("-inf"))
        share = tl.where(has_keys, 1 / (1 + tl.math.exp2((sink - lse) * LOG2E)), 1.0)
        tl.store(terms_ptr + index, tl.where(has_keys, (share - 1) * delta, 0.0), mask=valid)
    offset = -share * delta
    if HAS_D_LSE:
        offset += tl.load(d_lse_ptr + index, mask=valid & has_keys, other=0)

    kv_ptr += kv_head.to(tl.int64) * head_stride
    last = list_length(lens_ptr, token, TOPK, HAS_LENS)
    entries = list_ptr + wide_token * list_token_stride + kv_head.to(tl.int64) * list_head_stride
    blocks = (last + BLOCK_KV - 1) // BLOCK_KV
    following = entries_of(entries, 0, blocks > 0, 0, last, True, PAGE_SIZE, BLOCK_KV)
    for block in range(blocks):
        slots = following
        following = entries_of(entries, block + 1, block + 1 < blocks, 0, last, True, PAGE_SIZE, BLOCK_KV)
        position, page, slot_in_page, readable = keys_of(slots, block, 0, last, num_slots, True, PAGE_SIZE, BLOCK_KV)
        rows = kv_ptr + page.to(tl.int64) * page_stride + slot_in_page.to(tl.int64) * slot_stride
        if BY_ENTRY:
            entry = (job.to(tl.int64) * TOPK + position) * BLOCKS + block_of_heads
            target = parts_ptr + entry * D
        else:
            slot = page.to(tl.int64) * PAGE_SIZE + slot_in_page
            target = rows_ptr + (slot * KV_HEADS + kv_head) * D
        zero = tl.zeros(PAIRS, tl.float32)
        keys = load_groups(rows, readable, COLUMNS)
        logits = add_products(q, keys, zero, KEYS_FIRST)
        products = add_products(d_out, keys, zero, KEYS_FIRST)
        if COLUMNS.REST > 0:
            keys_rest = whole_columns(rows, readable, COLUMNS.GROUPED, COLUMNS.REST, COLUMNS.REST_PAD)
            logits = add_products((q_rest,), (keys_rest,), logits, KEYS_FIRST)
        weights = tl.math.exp2(logits * (scale * LOG2E) - of_heads(level, KEYS_FIRST))
        weights = tl.where(readable[:, None] if KEYS_FIRST else readable[None, :], weights, 0.0)
        shared = weights * of_heads(share, KEYS_FIRST)
        dlogits = narrow(shared * products + weights * of_heads(offset, KEYS_FIRST), q[0].dtype)
        by_key = swapped((dlogits, narrow(shared, q[0].dtype)), not KEYS_FIRST)
        gradients = Gradients(by_key[0], by_key[1], readable, scale)
        dq = add_rows(dlogits, keys, dq, KEYS_FIRST)
        for group in tl.static_range(COLUMNS.GROUPS):
            give_columns(
                target, gradients, q[group], d_out[group], group * COLUMNS.WIDTH, COLUMNS.GROUPED, True, BY_ENTRY
            )
        if COLUMNS.REST > 0:
            dq_rest = add_rows(dlogits, (keys_rest,), dq_rest, KEYS_FIRST)
            give_columns(target, gradients, q_rest, d_out[0], COLUMNS.GROUPED, D, False, BY_ENTRY)
    factor = tl.full([BLOCK_H], 1.0, tl.float32) * scale
    dq = swapped(dq, KEYS_FIRST)
    dq_rest = swapped(dq_rest, KEYS_FIRST)
    store_groups(dq_ptr, index, Finished(dq, factor, dq_rest[0], factor), valid, COLUMNS, COLUMNS.REST > 0, D)


# ---- launching


def lists_of(call: Any, launch: Any) -> tuple[Any, Any, dict[str, Any]]:
    """(lists, their lengths, the kernels' arguments about them)."""
    lists = launch.packed(call.indices)
    token_stride, head_stride, _ = launch.strides(lists)
    lens = lists if call.topk_lens is None else launch.contiguous(call.topk_lens)
    return lists, lens, {
        "list_token_stride": token_stride,
        "list_head_stride": head_stride,
        "num_slots": min(call.num_slots, LARGEST_INT),
        "TOPK": call.topk,
        "KV_HEADS": call.num_kv_heads,
        "HAS_LENS": call.topk_lens is not None,
    }  # fmt: skip


def columns_of(call: Any) -> Columns:
    """The `Columns` of a row: the value's columns in groups, then the rest."""
    groups, rest = 4 if call.d_v > 128 else 1, call.d_qk - call.d_v
    return Columns(
        GROUPS=groups,
        WIDTH=max(16, next_power_of_2(cdiv(call.d_v, groups))),
        GROUPED=call.d_v,
        REST=rest,
        REST_PAD=max(16, next_power_of_2(rest)),
    )


def add_chunk(call: Any, tile: Tile, launch: Any, first: int, tokens: int, sums: Any) -> Any:
    """Enqueue the gradients of a chunk of tokens; returns the entries' rows (or a stand-in) and the updated `sums`."""
    q, d_out, out = launch.packed(call.q), launch.packed(call.d_out), launch.packed(call.out)
    kv = launch.packed(call.kv)
    page, *slot, head, _ = launch.strides(kv)
    lists, lens, of_lists = lists_of(call, launch)
    lse = launch.contiguous(call.lse)
    blocks = cdiv(call.group, tile.block_h)
    parts = (tokens * call.num_kv_heads * call.topk, blocks, call.d_qk) if call.deterministic else (1,)
    return launch(
        gradient_kernel,
        (tokens * call.num_kv_heads * blocks,),
        (
            d_out, q, kv, lists, lens, out, lse, lse if call.d_lse is None else launch.contiguous(call.d_lse),
            lse if call.sinks is None else launch.packed(call.sinks), *sums,
        ),
        [(parts, "float32")],
        inplace=(9, 10, 11),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        first_token=first,
        scale=call.scale,
        **stride_arguments(launch, ("token", "head"), d_out=d_out, q=q, out=out),
        page_stride=page,
        slot_stride=slot[0] if slot else 0,
        head_stride=head if call.num_kv_heads > 1 else 0,
        **of_lists,
        HAS_SINKS=call.sinks is not None,
        HAS_D_LSE=call.d_lse is not None,
        BY_ENTRY=call.deterministic,
        PAGE_SIZE=call.page_size,
        GROUP=call.group,
        COLUMNS=columns_of(call),
        PAIR_TILE=PairTile(BLOCK_H=tile.block_h, BLOCK_KV=tile.block_kv, KEYS_FIRST=tile.keys_first),
    )  # fmt: skip


def gather(
    launch: Any, lists: Any, lens: Any, of_lists: dict[str, Any], first: int, jobs: int, parts: Any, sums: Any
) -> Any:  # fmt: skip
    """Enqueue the addition of the entries' rows to `sums`, in an order that depends on the lists alone.

    `parts` [entries, blocks of heads, columns] has the rows of `jobs` lists. These lists belong to the chunk of tokens
    that begins at `first`.
    """
    count, topk = parts.shape[0], of_lists["TOPK"]
    block = min(max(16, next_power_of_2(topk)), FLAT)
    (rows,) = launch(
        rows_kernel,
        (jobs, cdiv(topk, block)),
        (lists, lens),
        [((count,), "int32")],
        first_token=first,
        **of_lists,
        BLOCK=block,
    )
    rows, order = launch.sorted(rows)
    (sums,) = launch(
        gather_kernel,
        (count,),
        (parts, rows, order, sums),
        [],
        inplace=(3,),
        num_warps=4,
        count=count,
        BLOCKS=parts.shape[1],
        WIDTH=parts.shape[2],
        WIDTH_PAD=next_power_of_2(parts.shape[2]),
        ABREAST=ABREAST,
    )
    return sums


def narrowed(launch: Any, sums: Any, like: Any) -> Any:
    """Enqueue the rounding of float32 sums to the dtype of `like`, unless that is float32; returns the result."""
    count = math.prod(like.shape)
    if item_size(like) == 4:
        return sums
    (result,) = launch(narrow_kernel, (cdiv(count, FLAT),), (sums,), [(like.shape, like.dtype)], count=count, FLAT=FLAT)
    return result


def run(call: SparseMlaPrefillBackward, tile: Tile, launch: Any) -> Any:
    """Enqueue the kernels; returns dq, dkv and, with sinks, d_sinks."""
    count = call.num_slots * call.num_kv_heads * call.d_qk
    sums, dq, terms = launch(
        zero_kernel,
        (max(cdiv(count, FLAT), 1),),
        (call.q,),
        [(call.kv.shape, "float32"), (call.q.shape, call.q.dtype), (call.q.shape[:2], "float32")],
        count=count,
        FLAT=FLAT,
    )
    step = tile.chunk_tokens if call.deterministic else max(call.num_tokens, 1)
    for first in range(0, call.num_tokens, step):
        tokens = min(step, call.num_tokens - first)
        parts, sums, dq, terms = add_chunk(call, tile, launch, first, tokens, (sums, dq, terms))
        if call.deterministic:
            sums = gather(launch, *lists_of(call, launch), first, tokens * call.num_kv_heads, parts, sums)
    dkv = narrowed(launch, sums, call.kv)
    return (dq, dkv) if call.sinks is None else (dq, dkv, column_sums(terms, launch))
