"""The gradient of a relative bias: the gradients of logits, summed over the pairs that share a table column.

A column stands for a distance, query minus key. The first and the last column also stand for all distances beyond them.
A program holds a block of one head's queries and visits the keys that they see, in blocks with at least as many keys as
the block has queries. A query has at most one key in each column between the first and the last one. So if each query
has its own table, the gradients of these columns are stored without a summation.

If the queries share the tables, the diagonals of each tile [queries, keys] are added up, because a diagonal has one
distance. Rotating row r of the tile by r columns turns diagonals into columns. The elements that do not wrap around
have distances of this tile. Those that wrap around have distances of the previous tile, whose own sums stay in
registers until these are added. So each block of queries adds to each column in memory once. A program visits several
blocks of queries and adds to its own row of sums. The programs' rows are added up at the end. No order of summation
depends on when programs run.
"""

import dataclasses
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ragged_attention.kernels_triton import _varlen
from ragged_attention.kernels_triton._bias import Table, entries
from ragged_attention.kernels_triton._key_ranges import hull_edges
from ragged_attention.kernels_triton._mask import Mask, may_read, sees_of
from ragged_attention.kernels_triton._rows import Rows
from ragged_attention.kernels_triton._selected import Named, named_blocks, names
from ragged_attention.kernels_triton._sequences import VARYING, max_blocks
from ragged_attention.kernels_triton._softmax import column_sums
from ragged_attention.kernels_triton._tiles import cdiv, item_size
from ragged_attention.kernels_triton._varlen import (
    Array,
    Config,
    Keys,
    find_block,
    load_rows,
    product,
    rows_of,
    visible_blocks,
)
from ragged_attention.kernels_triton._varlen_gradient import TERMS, load_terms, signed_scales, weigh

MOST_SUMS = 2**24  # maximum floats in all programs' rows of sums, unless a single program takes more
SMALLEST = 16  # queries of the smallest block
WIDEST_HELD: tl.constexpr = tl.constexpr(384)  # maximum columns of a query plus its d_out in registers
PROGRAMS = 2048  # the intended number of programs, over all heads: enough to fill any GPU


class QueryArrays(NamedTuple):
    """The addresses of one sequence's queries, d_out and terms, for one head."""

    q: Array
    d_out: Array
    terms_ptr: tl.tensor


class Queries(NamedTuple):
    """A block of one head's queries, with their terms and their tables; see `prepare_kernel`."""

    arrays: QueryArrays
    first: tl.tensor
    readable: tl.tensor
    q: tl.tuple
    d_out: tl.tuple
    norm: tl.tensor
    offset: tl.tensor
    share: tl.tensor
    alibi: tl.tensor
    scales: tl.tuple
    table: tl.tuple
    named: tl.tuple  # the blocks of keys that each query's list names, if there are lists


@triton.jit
def load_wide(queries, CONFIG: tl.constexpr):
    """(q, d_out) of a block of queries. Wide queries are loaded in every iteration: registers cannot hold them."""
    q = queries.q
    d_out = queries.d_out
    if CONFIG.Q.MAIN + CONFIG.Q.REST + CONFIG.OUT.MAIN + CONFIG.OUT.REST > WIDEST_HELD:
        q = load_rows(queries.arrays.q, queries.first, queries.readable, True, CONFIG.BLOCK_Q, CONFIG.Q)
        d_out = load_rows(queries.arrays.d_out, queries.first, queries.readable, True, CONFIG.BLOCK_Q, CONFIG.OUT)
    return q, d_out


@triton.jit
def gradients_of_logits(queries, keys, block, visible, mask, CONFIG: tl.constexpr):
    """The gradients of logits [queries, keys] for the keys from `block` on; 0 for keys that a query does not see."""
    LISTS: tl.constexpr = CONFIG.LISTS
    BLOCK: tl.constexpr = CONFIG.BLOCK_KV
    key = block + tl.arange(0, BLOCK)
    readable = may_read(key, visible, CONFIG.MASK, True)
    k = load_rows(keys.k, block, readable, True, BLOCK, CONFIG.K)
    v = load_rows(keys.v, block, readable, True, BLOCK, CONFIG.V)
    q, d_out = load_wide(queries, CONFIG)
    products = product(q, k)
    d_weights = product(d_out, v)
    distance = visible.position[:, None] - key[None, :]
    norm = queries.norm[:, None]
    if CONFIG.HAS_ALIBI:
        norm = norm + queries.alibi[:, None] * distance.to(tl.float32)
    norm = norm - entries(queries.table.rows[:, None], distance, queries.table.exists[:, None], CONFIG.BIAS)
    seen = sees_of(visible, key, mask, CONFIG.MASK)
    if LISTS is not None:
        seen = seen & names(queries.named.ptr[:, None], queries.named.num_blocks[:, None],
                            key[None, :] // LISTS.BLOCK_SIZE, LISTS.WIDTH)  # fmt: skip
    weights, _ = weigh(products, norm, seen, queries.scales, True, CONFIG.HAS_SOFT_CAP)
    d_logits = weights * queries.offset[:, None]
    if CONFIG.HAS_SHARE:
        d_weights = queries.share[:, None] * d_weights
    d_logits = d_logits + weights * d_weights
    if CONFIG.MASK.RANGES > 0 or LISTS is not None:  # rows that see no key, and keys that no row sees, may be NaN
        d_logits = tl.where(seen, d_logits, 0.0)
    return d_logits


@triton.jit
def load_queries(arrays, first, readable, scales, table, named, CONFIG: tl.constexpr, GROUP: tl.constexpr):
    """The queries [first, first + BLOCK_Q) of a sequence and head."""
    BLOCK: tl.constexpr = CONFIG.BLOCK_Q
    q = load_rows(arrays.q, first, readable, True, BLOCK, CONFIG.Q)
    d_out = load_rows(arrays.d_out, first, readable, True, BLOCK, CONFIG.OUT)
    norm, offset, share, alibi = load_terms(arrays.terms_ptr, first, readable, True, BLOCK, 1, GROUP * TERMS)
    return Queries(arrays, first, readable, q, d_out, norm, offset, share, alibi, scales, table, named)


@triton.jit
def add_between(sums_ptr, columns, sums, WIDTH: tl.constexpr):
    """Add `sums` to their `columns` in memory, except to the first and the last column of the table."""
    mask = (columns > 0) & (columns < WIDTH - 1)
    tl.store(sums_ptr + columns, tl.load(sums_ptr + columns, mask=mask, other=0.0) + sums, mask=mask)


@triton.jit
def ends_of(d_logits, columns, WIDTH: tl.constexpr):
    """(sum in or before the first column, sum in or after the last column) of each row's gradients."""
    first = tl.sum(tl.where(columns <= 0, d_logits, 0.0), 1)
    last = tl.sum(tl.where((columns >= WIDTH - 1) & (columns > 0), d_logits, 0.0), 1)
    return first, last


@triton.jit
def add_diagonals(queries, keys, edges, visible, mask, sums_ptr, ends, CONFIG: tl.constexpr):
    """Add the gradients of a block of queries to the sums of their head.

    The gradients of the first and the last column are added to `ends` instead. Returns the new `ends`.
    """
    BLOCK: tl.constexpr = CONFIG.BLOCK_KV
    WIDTH: tl.constexpr = CONFIG.BIAS.WIDTH
    first, last = ends
    place = tl.arange(0, BLOCK)
    target = tl.arange(0, CONFIG.BLOCK_Q)[:, None] + place[None, :]
    kept = tl.zeros([BLOCK], tl.float32)
    column = visible.low + CONFIG.BIAS.AT_OWN - place
    for block in range(edges.start, edges.end, BLOCK):
        d_logits = gradients_of_logits(queries, keys, block, visible, mask, CONFIG)
        columns = visible.position[:, None] - (block + place)[None, :] + CONFIG.BIAS.AT_OWN
        in_first, in_last = ends_of(d_logits, columns, WIDTH)
        first += in_first
        last += in_last
        rotated = tl.gather(d_logits, target % BLOCK, 1)
        add_between(sums_ptr, column - block + BLOCK, kept + tl.sum(tl.where(target < BLOCK, 0.0, rotated), 0), WIDTH)
        kept = tl.sum(tl.where(target < BLOCK, rotated, 0.0), 0)
    add_between(sums_ptr, column - edges.end + BLOCK, kept, WIDTH)
    return first, last


@triton.jit
def store_own(queries, keys, edges, visible, mask, d_tables, CONFIG: tl.constexpr):
    """Store the gradients of a block of queries that have their own tables, at the addresses `d_tables`."""
    BLOCK: tl.constexpr = CONFIG.BLOCK_KV
    WIDTH: tl.constexpr = CONFIG.BIAS.WIDTH
    own = visible.position + CONFIG.BIAS.AT_OWN  # a key's column is `own` minus the key
    first = tl.zeros([CONFIG.BLOCK_Q], tl.float32)
    last = tl.zeros([CONFIG.BLOCK_Q], tl.float32)
    for block in range(edges.start, edges.end, BLOCK):
        d_logits = gradients_of_logits(queries, keys, block, visible, mask, CONFIG)
        columns = own[:, None] - (block + tl.arange(0, BLOCK))[None, :]
        in_first, in_last = ends_of(d_logits, columns, WIDTH)
        first += in_first
        last += in_last
        between = (columns > 0) & (columns < WIDTH - 1) & queries.table.exists[:, None]
        tl.store(d_tables[:, None] + columns, d_logits, mask=between)
    for start in range(0, WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)[None, :]
        key = own[:, None] - columns
        unseen = (key < edges.start) | (key >= edges.end)
        between = (columns > 0) & (columns < WIDTH - 1) & queries.table.exists[:, None]
        tl.store(d_tables[:, None] + columns, tl.zeros([CONFIG.BLOCK_Q, BLOCK], tl.float32), mask=unseen & between)
    if WIDTH > 1:
        tl.store(d_tables + (WIDTH - 1), last, mask=queries.table.exists)
        tl.store(d_tables, first, mask=queries.table.exists)
    else:
        tl.store(d_tables, first + last, mask=queries.table.exists)


@triton.jit(do_not_specialize=VARYING)
def bias_kernel(
    d_out_ptr, q_ptr, k_ptr, v_ptr, terms_ptr, cu_q_lens_ptr, cu_kv_lens_ptr, bias_ptr, ranges_ptr,
    lists_ptr, sums_ptr,
    num_q_tokens, num_kv_tokens, num_seqs, window, d_out_head_stride, q_head_stride, k_head_stride, v_head_stride,
    sm_scale, soft_cap, blocks, GROUP: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a head's tables for several blocks of queries.

    If queries share the tables, each program has a row of `sums` [programs, heads, WIDTH], and these rows are added up
    later. Otherwise `sums` is the gradient, [tokens, heads, WIDTH].
    """
    BLOCK: tl.constexpr = CONFIG.BLOCK_Q
    WIDTH: tl.constexpr = CONFIG.BIAS.WIDTH
    STRIDE: tl.constexpr = CONFIG.BIAS.TOKEN_STRIDE
    part = tl.program_id(0)
    head = tl.program_id(1)
    kv_head = head // GROUP
    mask = Mask(window, ranges_ptr=ranges_ptr)
    first = tl.zeros([BLOCK], tl.float32)
    last = tl.zeros([BLOCK], tl.float32)
    if STRIDE == 0:
        sums_ptr += (part.to(tl.int64) * tl.num_programs(1) + head) * WIDTH
        for start in range(0, WIDTH, BLOCK):
            column = start + tl.arange(0, BLOCK)
            tl.store(sums_ptr + column, tl.zeros([BLOCK], tl.float32), mask=column < WIDTH)
    scales = signed_scales(sm_scale, soft_cap, CONFIG.HAS_SOFT_CAP)
    for block in range(part, blocks, tl.num_programs(0)):
        start, q_len, first_row, kv_start, kv_len = find_block(
            block, cu_q_lens_ptr, cu_kv_lens_ptr, num_seqs, num_q_tokens, num_kv_tokens, 1, BLOCK
        )
        if (first_row >= 0) & (first_row < q_len):
            row = first_row + tl.arange(0, BLOCK)
            readable = row < q_len
            if CONFIG.MASK.CAUSAL:  # rows that see no key may be NaN, so they are not read
                readable = readable & (row >= q_len - kv_len)
            visible, edges = visible_blocks(Rows(row, q_len, start, head), first_row, q_len, kv_len, mask, CONFIG)
            if CONFIG.MASK.RANGES:
                edges = hull_edges(visible, CONFIG.BLOCK_KV)  # one range, because tiles pass sums to the next one
            q_rows = rows_of(q_ptr, start, head, q_head_stride, CONFIG.Q)
            d_out_rows = rows_of(d_out_ptr, start, head, d_out_head_stride, CONFIG.OUT)
            k_rows = rows_of(k_ptr, kv_start, kv_head, k_head_stride, CONFIG.K)
            v_rows = rows_of(v_ptr, kv_start, kv_head, v_head_stride, CONFIG.V)
            terms = terms_ptr + ((kv_head.to(tl.int64) * num_q_tokens + start) * GROUP + head % GROUP) * TERMS
            table = (start + row).to(tl.int64) * STRIDE + head.to(tl.int64) * WIDTH
            arrays = QueryArrays(q_rows, d_out_rows, terms)
            tables = Table(bias_ptr + table, row < q_len)
            named = Named(row, row)  # a stand-in, not used without lists
            if CONFIG.LISTS is not None:  # each query is a job of its own; see `_selected`
                job = row + start + block - first_row // BLOCK - start // BLOCK
                named = named_blocks(lists_ptr, job, kv_head, CONFIG.LISTS, readable)
            queries = load_queries(arrays, first_row, readable, scales, tables, named, CONFIG, GROUP)
            keys = Keys(k_rows, v_rows)
            if STRIDE == 0:
                tl.debug_barrier()  # other threads stored zeros, and the previous block's sums
                first, last = add_diagonals(queries, keys, edges, visible, mask, sums_ptr, (first, last), CONFIG)
            else:
                store_own(queries, keys, edges, visible, mask, sums_ptr + table, CONFIG)
    if STRIDE == 0:
        tl.debug_barrier()
        if WIDTH > 1:
            tl.store(sums_ptr + (WIDTH - 1), tl.sum(last, 0))
            tl.store(sums_ptr, tl.sum(first, 0))
        else:
            tl.store(sums_ptr, tl.sum(first + last, 0))


def bias_gradient(
    call: Any, tile: Any, launch: Any, inputs: Any, edges: tuple[Any, Any], numbers: Any, config: dict[str, Any]
) -> Any:
    """Enqueue the kernels; returns the gradient of `relative_bias`.

    `edges` has cu_q_lens and cu_kv_lens. The other arguments are those of the dk and dv kernel. This kernel also uses
    the tile of the dk and dv kernel, because that kernel needs more registers.
    """
    block_q, block_kv = block_sizes(call, tile)
    blocks, shape = max_blocks(call.num_q_tokens, block_q, call.num_seqs), call.relative_bias.shape
    num_heads, width = shape[-2:]
    is_shared = len(shape) == 2
    parts = blocks
    if is_shared:
        parts = max(1, min(blocks, cdiv(PROGRAMS, num_heads), MOST_SUMS // (num_heads * width)))
    named, lists = _varlen.lists_of(call, launch, 1, edges, numbers, config["MASK"])
    of_one_head = {name: _of_one_head(config[name]) for name in ("Q", "OUT")}
    [sums] = launch(
        bias_kernel,
        (parts, num_heads),
        (*inputs, named),
        [((parts, num_heads * width) if is_shared else shape, "float32")],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        blocks=blocks,
        GROUP=call.group,
        CONFIG=Config(BLOCK_Q=block_q, BLOCK_KV=block_kv, LISTS=lists, **config | of_one_head),
        **numbers,
    )
    return column_sums(sums, launch, shape) if is_shared else sums


def block_sizes(call: Any, tile: Any) -> tuple[int, int]:
    """(queries, keys) per block, from the sizes of a tile.

    Wide heads have smaller blocks, which fit registers and shared memory. A block has twice as many keys as queries.
    With equal numbers, the compiler would unroll the loop over keys, which takes too many registers. Only wide heads in
    float32 have as many keys as queries.
    """
    block_q, is_wide = min(tile.block_q, tile.block_kv), _varlen.columns(call) > WIDEST_HELD.value
    if is_wide and item_size(call.q) == 4:
        return block_q, block_q
    block_q = max(SMALLEST, block_q // 2) if is_wide else block_q
    return block_q, 2 * block_q


def _of_one_head(layout: Any) -> Any:
    """The layout of an array of queries, with each query head as a KV head of its own."""
    return dataclasses.replace(layout, GROUP=1)
