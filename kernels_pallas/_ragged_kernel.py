"""The Pallas kernel of ragged paged attention. In each step, a tile of queries attends to one block of keys.

The functions follow the order of work: find the step's tile and its range of keys, start the copies for the next step,
compute this step, and store the results after the tile's last block.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ragged_attention.jax_shared.logits import soft_capped
from ragged_attention.kernels_pallas._blocks import (
    LANES,
    LN2,
    LOG2E,
    MASKED,
    NOWHERE,
    cdiv,
    in_powers_of_2,
    product,
    reset_softmax,
    round_up,
)
from ragged_attention.kernels_pallas._scale_pages import Lines, scales_of_part

CHUNK = 16  # tokens transposed to heads-first order at a time, so that they stay in registers
UPDATES = 128  # tokens whose new rows are copied at a time


class Plan(NamedTuple):
    """The static parameters of one launch."""

    block_q: int
    rows: int  # query rows per KV head and tile, with padding
    pages: int  # pages per block
    block: int  # positions per block
    block_kv: int  # keys per part of a block; a block is processed one part at a time
    num_blocks_kv: int  # parts per block; the last one may be incomplete
    page_size: int
    num_pages: int
    pages_per_seq: int
    num_tokens: int
    num_kv_heads: int
    group: int
    head_dim: int
    v_head_dim: int
    combined: bool
    causal: bool
    window: int | None
    num_ranges: int  # number of key ranges per query; 0 if `causal` and `window` determine the keys
    soft_cap: float | None
    has_sinks: bool
    has_lse: bool
    cores: int
    split_weights_below: int
    num_updates: int | None  # new rows that the kernel first writes into the pages; None if it only reads them
    scale_lines: Lines | None  # the layout of the scales of a page's rows; None if they have none
    dtype: Any  # the dtype of matrix operands
    out_dtype: Any  # the dtype in which the kernel writes the result

    @property
    def num_q_heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def widths(self) -> list[tuple[int, int]]:
        """The number of heads and the head size of each array of pages."""
        if self.combined:
            return [(2 * self.num_kv_heads, self.head_dim)]
        return [(self.num_kv_heads, self.head_dim), (self.num_kv_heads, self.v_head_dim)]

    @property
    def per_word(self) -> int:
        """Operand elements per 32-bit word."""
        return 4 // self.dtype.itemsize

    @property
    def transposes(self) -> bool:
        """Whether a part is transposed to heads-first order, because some words have elements of two tokens."""
        return self.widths[0][0] % self.per_word != 0

    def order(self, row: Any) -> Any:
        """For row `row` of an operand: the offset, within the part, of the key in that row.

        Two rows that share words have one key from each half of the part.
        """
        if self.per_word == 1 or self.transposes:
            return row
        return (row >> 1) + (row & 1) * (self.block_kv // 2)

    @property
    def in_columns(self) -> bool:
        """Whether the logits have queries as columns and keys as rows."""
        return self.block_q > 1

    @property
    def reads_ranges(self) -> bool:
        """Whether each row of a tile has its own ranges. If a tile has one query, the ranges are in scalar memory."""
        return self.num_ranges > 0 and self.in_columns

    @property
    def columns(self) -> int:
        """Query rows of a KV head whose logits are computed together."""
        if not self.in_columns:
            return self.rows
        return LANES if self.rows % (2 * LANES) else 2 * LANES

    @property
    def per_query(self) -> tuple[int, int]:
        """The shape of an array with one number per query row."""
        return (1, self.rows) if self.in_columns else (self.rows, 1)

    @property
    def per_key(self) -> tuple[int, int]:
        return (self.block_kv, LANES) if self.in_columns else (1, self.block_kv)

    @property
    def part_scales(self) -> tuple[int, int]:
        """The shape of the scales of a part's rows: a column, or a row, for each head of K, then of V."""
        width = self.scale_lines.width if self.scale_lines else 0
        return (self.block_kv, width) if self.in_columns else (width, self.block_kv)

    @property
    def acc_shape(self) -> tuple[int, int]:
        return (self.v_head_dim, self.rows) if self.in_columns else (self.rows, self.v_head_dim)


class Sequences(NamedTuple):
    """The sequences of a launch. All values except those of the page table are clamped to the arrays' sizes."""

    starts: Any  # i32 [S], the first row of each sequence
    q_lens: Any  # i32 [S]
    kv_lens: Any  # i32 [S]
    pages: Any  # i32 [S, M], the page table; [S * M] in the kernel


class Factors(NamedTuple):
    """The factors by which each KV head's logits and values are multiplied, f32 [K], and the sinks, f32 [H] or None."""

    logits: Any
    values: Any
    sinks: Any


class Refs(NamedTuple):
    """References to the kernel's memory, in the order in which Pallas passes them. Absent ones are None."""

    count: Any  # i32 [1], the number of sequences that the launch computes
    order: Any  # i32 [S], the indices of these sequences, then padding
    seqs: Sequences
    factors: Factors
    slots: Any  # i32 [T] with padding, the slot of each new row, or -1
    ranges: Any  # `Ranges`
    q: Any
    row_ranges: Any  # i32 [tiles, 2R, rows], see `ranges_of`
    new_rows: Any
    scale_pages: Any  # f32 [P, lines, width], see `_scale_pages`; None if pages have no scales
    read_pages: list[Any] | None  # the pages, if the launch only reads them
    initial: Any  # the initial values of the results, which share memory with the results
    out: Any
    lse: Any
    written_pages: list[Any] | None  # the pages, if the launch writes them
    buffers: list[Any]  # [2, positions, heads, D] for each array of pages
    scale_buffer: Any  # f32 [2, pages, lines, width]
    scales: Any  # f32, the scales of the part that was converted last, in the shape `Plan.part_scales`
    position: Any  # i32 [2, num_blocks_kv, ...], the position of each key in the buffers
    q_buffer: Any  # [2, block_q, H, D]
    ranges_buffer: Any  # i32 [2, 2R, rows]
    q_rows: Any  # [K, rows, D]
    heads: list[Any]  # one part of a block for each array of pages, in the form that `heads_buffer` describes
    m_i: Any  # f32 [K, ...], the running maximum of each query
    l_i: Any  # f32 [K, ...], the running sum of each query
    acc: Any  # f32 [K, D_v, rows] or [K, rows, D_v]: [K, *acc_shape]
    by_head: Any  # [H, block_q, D_v], a tile's result before it is transposed
    out_buffer: Any  # [block_q, H, D_v]
    lse_heads: Any  # f32 [H, block_q] with padding, a tile's lse before it is transposed
    lse_buffer: Any  # f32 [block_q, 1, H]
    pending: Any  # i32 [1], the number of result rows whose copies to HBM are in flight
    missing: Any  # i32 [2], for each buffer: 1 if a page of its block does not exist
    kv_arrived: Any  # semaphores [2, arrays of pages]
    scales_arrived: Any  # [2]
    q_arrived: Any  # [2]
    ranges_arrived: Any  # [2]
    out_copied: Any
    lse_copied: Any

    @property
    def pages(self) -> list[Any]:
        """Each array of pages in HBM."""
        return self.written_pages or self.read_pages or []


def scratch(plan: Plan, q: Any, pages: Any) -> list[Any]:
    """The kernel's buffers and semaphores, in the order of `Refs`."""
    positions, heads, f32 = plan.num_blocks_kv * plan.block_kv, plan.num_q_heads, jnp.float32
    lines = plan.scale_lines
    return [
        [pltpu.VMEM((2, positions, *array.shape[2:]), array.dtype) for array in pages],
        pltpu.VMEM((2, plan.pages, lines.lines, lines.width), f32) if lines else None,
        pltpu.VMEM(plan.part_scales, f32) if lines else None,
        pltpu.VMEM((2, plan.num_blocks_kv, *plan.per_key), jnp.int32),
        pltpu.VMEM((2, plan.block_q, heads, plan.head_dim), q.dtype),
        pltpu.VMEM((2, 2 * plan.num_ranges, plan.rows), jnp.int32) if plan.reads_ranges else None,
        pltpu.VMEM((plan.num_kv_heads, plan.rows, plan.head_dim), plan.dtype),
        [heads_buffer(plan, which) for which in range(len(pages))],
        pltpu.VMEM((plan.num_kv_heads, *plan.per_query), f32),
        pltpu.VMEM((plan.num_kv_heads, *plan.per_query), f32),
        pltpu.VMEM((plan.num_kv_heads, *plan.acc_shape), f32),
        pltpu.VMEM((heads, plan.block_q, plan.v_head_dim), plan.out_dtype),
        pltpu.VMEM((plan.block_q, heads, plan.v_head_dim), plan.out_dtype),
        pltpu.VMEM((round_up(heads, 8), round_up(plan.block_q, LANES)), f32),
        pltpu.VMEM((plan.block_q, 1, heads), f32),
        pltpu.SMEM((1,), jnp.int32),
        pltpu.SMEM((2,), jnp.int32),
        pltpu.SemaphoreType.DMA((2, len(pages))),
        pltpu.SemaphoreType.DMA((2,)) if lines else None,
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SemaphoreType.DMA((2,)) if plan.reads_ranges else None,
        pltpu.SemaphoreType.DMA,
        pltpu.SemaphoreType.DMA,
    ]


def heads_buffer(plan: Plan, which: int) -> Any:
    """The buffer from which `operand` extracts single heads of a part, for one array of pages.

    It has heads first, [heads, block_kv, D], or rows of words, [D / 128, block_kv * heads / per_word, 128].
    """
    count, dim = plan.widths[which]
    if plan.transposes:
        return pltpu.VMEM((count, plan.block_kv, dim), plan.dtype)
    dtype = plan.dtype if plan.per_word == 1 else jnp.uint32
    return pltpu.VMEM((cdiv(dim, LANES), plan.block_kv * count // plan.per_word, LANES), dtype)


class Step(NamedTuple):
    """One step of the iteration over sequences, tiles and blocks."""

    index: Any  # the sequence's index in `order`
    tile: Any  # the tile's index in the sequence
    block: Any  # the index of the block of keys
    kv_slot: Any  # the buffer of the block, 0 or 1
    q_slot: Any  # the buffer of the queries, 0 or 1


class Span(NamedTuple):
    """A tile's queries and keys. Near the end of `q`, the fetched rows begin before the tile's first row."""

    seq: Any
    source: Any  # the index in `q` of the first fetched row
    shift: Any  # the number of fetched rows before the tile's first row
    count: Any  # the tile's number of rows
    position: Any  # the position that the first fetched row has, or would have, in this sequence
    low: Any  # the first key that any row sees
    high: Any  # one past the last key that any row sees
    kv_len: Any
    tile: Any  # the tile's number in `Ranges`; None without ranges


def span_of(plan: Plan, refs: Refs, step: Step) -> Span:
    """The span of a step's tile; for a step after the last one, an arbitrary span."""
    seq = refs.order[jnp.minimum(step.index, refs.count[0] - 1)]
    start, q_len, kv_len = refs.seqs.starts[seq], refs.seqs.q_lens[seq], refs.seqs.kv_lens[seq]
    first = step.tile * plan.block_q
    count = jnp.clip(q_len - first, 0, plan.block_q)
    source = jnp.clip(start + first, 0, plan.num_tokens - plan.block_q)
    shift = start + first - source
    position = kv_len - q_len + first - shift
    low, high, tile = jnp.int32(0), kv_len, None
    if plan.num_ranges:
        tile = jnp.minimum(refs.ranges.first_tiles[seq] + step.tile, refs.ranges.lows.shape[0] - 1)
        low, high = refs.ranges.lows[tile], refs.ranges.highs[tile]
    elif plan.causal:
        high = jnp.clip(position + shift + count, 0, kv_len)
    if plan.window is not None:
        low = jnp.clip(position + shift - (plan.window - 1), 0, high)
    return Span(seq, source, shift, count, position, low, high, kv_len, tile)


def kernel(plan: Plan, refs: Refs) -> None:
    """Process the sequences of one core. Of n cores, core i has the entries i, i + n, i + 2n and so on of `order`."""
    core = pl.program_id(0)
    first = Step(core, jnp.int32(0), jnp.int32(0), jnp.int32(0), jnp.int32(0))
    refs.pending[0] = 0
    if plan.num_updates is not None:
        write_new_rows(plan, refs)

    @pl.when(core < refs.count[0])
    def _() -> None:
        span = span_of(plan, refs, first)
        begin = first._replace(block=span.low // plan.block)
        fetch_queries(plan, refs, span, begin.q_slot)
        fetch_pages(plan, refs, span, begin)
        lax.while_loop(lambda step: step.index < refs.count[0], lambda step: run_step(plan, refs, step), begin)
        wait_results(plan, refs)


def write_new_rows(plan: Plan, refs: Refs) -> None:
    """Copy the new rows to their slots, UPDATES at a time."""
    count: Any = plan.num_updates

    def copies(token: Any, slot: Any) -> list[Any]:
        page, offset = lax.div(slot, jnp.int32(plan.page_size)), lax.rem(slot, jnp.int32(plan.page_size))
        return [
            pltpu.make_async_copy(rows.at[token], pages.at[page, offset], refs.kv_arrived.at[0, which])
            for which, (rows, pages) in enumerate(zip(refs.new_rows, refs.pages, strict=True))
        ]

    def for_each(first: Any, act: Callable[[Any], None]) -> None:
        def one(token: Any, _: Any) -> None:
            slot = refs.slots[token]

            @pl.when(slot >= 0)
            def _() -> None:
                for copy in copies(token, slot):
                    act(copy)

        lax.fori_loop(first, jnp.minimum(first + UPDATES, count), one, None)

    def write(batch: Any, _: Any) -> None:
        for_each(batch * UPDATES, lambda copy: copy.start())
        for_each(batch * UPDATES, lambda copy: copy.wait())

    lax.fori_loop(0, cdiv(count, UPDATES), write, None)


def run_step(plan: Plan, refs: Refs, step: Step) -> Step:
    """Start the copies for the next step, then compute this one. Returns the next step."""
    span = span_of(plan, refs, step)
    begins = step.block == span.low // plan.block
    ends = (step.block + 1) * plan.block >= span.high
    next_tile = ends & ((step.tile + 1) * plan.block_q < refs.seqs.q_lens[span.seq])
    next_step = Step(
        index=step.index + jnp.where(ends & ~next_tile, plan.cores, 0),
        tile=jnp.where(ends, jnp.where(next_tile, step.tile + 1, 0), step.tile),
        block=block_after(plan, refs, span, step.block),
        kv_slot=1 - step.kv_slot,
        q_slot=jnp.where(ends, 1 - step.q_slot, step.q_slot),
    )
    next_span = span_of(plan, refs, next_step)
    next_step = next_step._replace(block=jnp.where(ends, next_span.low // plan.block, next_step.block))

    @pl.when(next_step.index < refs.count[0])
    def _() -> None:
        fetch_pages(plan, refs, next_span, next_step)
        pl.when(ends)(lambda: fetch_queries(plan, refs, next_span, next_step.q_slot))

    pl.when(begins)(lambda: begin_tile(plan, refs, span, step))
    wait_pages(plan, refs, span, step)
    compute(plan, refs, span, step)
    pl.when(ends)(lambda: end_tile(plan, refs, span))
    return next_step


def block_after(plan: Plan, refs: Refs, span: Span, block: Any) -> Any:
    """The next block of a tile that has keys which a row may see. After the tile's last block, it is arbitrary."""
    if not plan.num_ranges:
        return block + 1
    key, next_key = (block + 1) * plan.block, span.high
    for begin, end in edges_of(plan, refs, span):
        next_key = jnp.where(end > key, jnp.minimum(next_key, jnp.maximum(begin, key)), next_key)
    return next_key // plan.block


def edges_of(plan: Plan, refs: Refs, span: Span) -> list[tuple[Any, Any]]:
    """The ranges of a tile. If it has several queries, range r contains the ranges r of all of them."""
    first = span.tile * 2 * plan.num_ranges
    edges = [refs.ranges.edges[first + edge] for edge in range(2 * plan.num_ranges)]
    return list(zip(edges[::2], edges[1::2], strict=True))


def query_copies(plan: Plan, refs: Refs, span: Span, slot: Any) -> list[Any]:
    """The copies of a tile's queries to their buffer, and of the rows' ranges if `reads_ranges`."""
    rows = refs.q.at[pl.ds(span.source, plan.block_q)]
    copies = [pltpu.make_async_copy(rows, refs.q_buffer.at[slot], refs.q_arrived.at[slot])]
    if plan.reads_ranges:
        ranges = refs.row_ranges.at[span.tile]
        copies.append(pltpu.make_async_copy(ranges, refs.ranges_buffer.at[slot], refs.ranges_arrived.at[slot]))
    return copies


def fetch_queries(plan: Plan, refs: Refs, span: Span, slot: Any) -> None:
    for copy in query_copies(plan, refs, span, slot):
        copy.start()


def page_range(plan: Plan, span: Span, step: Step) -> tuple[Any, Any]:
    """The pages of a block that have keys which the tile sees, as a range of offsets in the block."""
    first = step.block * plan.pages
    low = jnp.maximum(span.low // plan.page_size - first, 0)
    return low, jnp.clip(cdiv(span.high, plan.page_size) - first, low, plan.pages)


def page_of(plan: Plan, refs: Refs, span: Span, step: Step, offset: Any) -> Any:
    """The entry of the page table for the page at `offset` in a block; it may be invalid."""
    column = jnp.minimum(step.block * plan.pages + offset, plan.pages_per_seq - 1)
    return refs.seqs.pages[span.seq * plan.pages_per_seq + column]


def page_copies(plan: Plan, refs: Refs, page: Any, slot: Any, offset: Any) -> list[Any]:
    """The copies of a page into buffer `slot`, as page `offset` of the block: one per array, and one for the scales."""
    copies = [
        pltpu.make_async_copy(
            array.at[page],
            buffer.at[slot, pl.ds(offset * plan.page_size, plan.page_size)],
            refs.kv_arrived.at[slot, which],
        )
        for which, (array, buffer) in enumerate(zip(refs.pages, refs.buffers, strict=True))
    ]
    if plan.scale_lines:
        lines, buffer = refs.scale_pages.at[page], refs.scale_buffer.at[slot, offset]
        copies.append(pltpu.make_async_copy(lines, buffer, refs.scales_arrived.at[slot]))
    return copies


def fetch_pages(plan: Plan, refs: Refs, span: Span, step: Step) -> None:
    """Start the copies of a block's pages, and store the keys' positions: NOWHERE for missing pages and padding."""
    slot = step.kv_slot
    offset = plan.order(lax.broadcasted_iota(jnp.int32, plan.per_key, 0 if plan.in_columns else 1))
    for part in range(plan.num_blocks_kv):
        own = offset + part * plan.block_kv
        position = own + step.block * plan.block
        refs.position[slot, part] = jnp.where(own < plan.block, position, NOWHERE)

    refs.missing[slot] = 0

    def fetch(index: Any, _: Any) -> None:
        page = page_of(plan, refs, span, step, index)
        for copy in page_copies(plan, refs, jnp.clip(page, 0, plan.num_pages - 1), slot, index):
            copy.start()

        @pl.when((page < 0) | (page >= plan.num_pages))
        def _() -> None:
            refs.missing[slot] = 1
            first = index * plan.page_size
            for part in range(plan.num_blocks_kv):
                own = offset + part * plan.block_kv
                in_page = (own >= first) & (own < first + plan.page_size)
                refs.position[slot, part] = jnp.where(in_page, NOWHERE, refs.position[slot, part])

    low, high = page_range(plan, span, step)
    lax.fori_loop(low, high, fetch, None)


def wait_pages(plan: Plan, refs: Refs, span: Span, step: Step) -> None:
    """Wait for all copies of a block. Then zero its missing pages, for which `fetch_pages` has copied other pages."""
    low, high = page_range(plan, span, step)

    def wait(index: Any, _: Any) -> None:
        for copy in page_copies(plan, refs, 0, step.kv_slot, index):
            copy.wait()

    def clear(token: Any, _: Any) -> None:
        for buffer in refs.buffers:
            buffer[step.kv_slot, token] = jnp.zeros(buffer.shape[2:], buffer.dtype)

    def clear_if_missing(index: Any, _: Any) -> None:
        page = page_of(plan, refs, span, step, index)
        missing = (page < 0) | (page >= plan.num_pages)
        pl.when(missing)(lambda: lax.fori_loop(index * plan.page_size, (index + 1) * plan.page_size, clear, None))

    lax.fori_loop(low, high, wait, None)
    pl.when(refs.missing[step.kv_slot] > 0)(lambda: lax.fori_loop(low, high, clear_if_missing, None))


def begin_tile(plan: Plan, refs: Refs, span: Span, step: Step) -> None:
    """Transpose the queries to heads-first order, and reset the online softmax."""
    for copy in query_copies(plan, refs, span, step.q_slot):
        copy.wait()
    group = plan.group
    if plan.block_q == 1:
        for head in range(plan.num_kv_heads):
            rows = refs.q_buffer[step.q_slot, 0, pl.ds(head * group, group), :]
            refs.q_rows[head, pl.ds(0, group), :] = rows.astype(plan.dtype)
    else:
        for first in range(0, plan.block_q, CHUNK):
            tokens = refs.q_buffer[step.q_slot, pl.ds(first, CHUNK)].astype(plan.dtype)
            by_head = jnp.swapaxes(tokens, 0, 1)
            for head in range(plan.num_q_heads):
                row = head % group * plan.block_q + first
                refs.q_rows[head // group, pl.ds(row, CHUNK), :] = by_head[head]
    reset_softmax(refs.m_i, refs.l_i, refs.acc, MASKED)


def compute(plan: Plan, refs: Refs, span: Span, step: Step) -> None:
    """Attend to the keys of one block. In decode and in tiles with few keys, bfloat16 weights may get two terms."""
    base = step.block * plan.block

    def attend_part(split_weights: bool, part: Any) -> None:
        convert_heads(plan, refs, step, part)
        if plan.scale_lines:
            scales = scales_of_part(plan, refs.scale_buffer, step.kv_slot, part)
            refs.scales[...] = scales if plan.in_columns else scales.T
        # While the softmax of a group of queries is computed, the matrix unit multiplies for the next and previous
        # group.
        groups = [(head, first) for head in range(plan.num_kv_heads) for first in range(0, plan.rows, plan.columns)]
        logits, mix_previous = multiply_keys(plan, refs, *groups[0]), functools.partial(lambda: None)
        for group, after in zip(groups, [*groups[1:], None], strict=True):
            next_logits = multiply_keys(plan, refs, *after) if after else None
            seen = visible(plan, refs, span, step, part, group[1])
            weights, alpha = update_softmax(plan, refs, *group, logits, seen)
            mix_previous()
            logits = next_logits
            mix_previous = functools.partial(mix_values, plan, refs, group, weights, alpha, seen, split_weights)
        mix_previous()

    def attend_parts(split_weights: bool) -> None:
        lax.fori_loop(low, high, lambda part, _: attend_part(split_weights, part), None)

    low = jnp.maximum(span.low - base, 0) // plan.block_kv
    high = jnp.minimum(cdiv(span.high - base, plan.block_kv), plan.num_blocks_kv)
    zero_unseen(plan, refs, span, step, low, high)
    if plan.dtype == jnp.float32 or not plan.split_weights_below:
        attend_parts(False)
    elif not plan.in_columns:  # with so few rows, the second term costs no time
        attend_parts(True)
    else:
        few = span.high - span.low <= plan.split_weights_below
        pl.when(few)(lambda: attend_parts(True))
        pl.when(~few)(lambda: attend_parts(False))


def zero_unseen(plan: Plan, refs: Refs, span: Span, step: Step, low: Any, high: Any) -> None:
    """Zero the keys of parts [low, high) that the tile does not see. Their weight is 0, but 0 times NaN is NaN.

    If a tile has several queries with ranges, `mix_values` zeroes the keys between the ranges.
    """
    base = step.block * plan.block
    seen_low = jnp.maximum(span.low - base, 0)
    seen_high = jnp.minimum(span.high - base, plan.block)

    def zero_chunk(chunk: Any, _: Any) -> None:
        for buffer in refs.buffers:
            rows = pl.ds(chunk * CHUNK, CHUNK)
            tokens = buffer[step.kv_slot, rows]
            offset = chunk * CHUNK + lax.broadcasted_iota(jnp.int32, tokens.shape, 0)
            seen = (offset >= seen_low) & (offset < seen_high)
            if has_gaps:
                seen = in_ranges(plan, refs, span, offset + base)
            buffer[step.kv_slot, rows] = jnp.where(seen, tokens, jnp.zeros((), tokens.dtype))

    chunks, has_gaps = plan.block_kv // CHUNK, plan.num_ranges > 1 and not plan.in_columns
    if has_gaps:
        lax.fori_loop(low * chunks, high * chunks, zero_chunk, None)
        return
    lax.fori_loop(low * chunks, cdiv(seen_low, CHUNK), zero_chunk, None)
    lax.fori_loop(seen_high // CHUNK, high * chunks, zero_chunk, None)


def convert_heads(plan: Plan, refs: Refs, step: Step, part: Any) -> None:
    """Convert one part of a block to the form from which `operand` extracts single heads."""
    for buffer, heads in zip(refs.buffers, refs.heads, strict=True):
        for first in range(0, plan.block_kv, CHUNK):
            tokens = buffer[step.kv_slot, pl.ds(part * plan.block_kv + first, CHUNK)].astype(plan.dtype)
            count, dim = tokens.shape[1:]
            if plan.transposes:
                heads[:, pl.ds(first, CHUNK), :] = jnp.swapaxes(tokens, 0, 1)
                continue
            words = tokens.reshape(CHUNK * count, dim)
            if plan.per_word == 2:
                words = pltpu.bitcast(words, jnp.uint32)
            rows = len(words)
            for lane in range(0, dim, LANES):
                columns = words[:, lane : lane + LANES]
                heads[lane // LANES, pl.ds(first // CHUNK * rows, rows), pl.ds(0, columns.shape[1])] = columns


def operand(plan: Plan, refs: Refs, which: int, head: int) -> Any:
    """The keys or values of one head in the part that was converted last, [block_kv, D], in `plan.order`."""
    heads = refs.heads[which]
    count, dim = plan.widths[which]
    if plan.transposes:
        return heads[head]
    stride, lanes = count // plan.per_word, []
    for lane in range(cdiv(dim, LANES)):
        if plan.per_word == 1:
            lanes.append(heads[lane, pl.ds(head, plan.block_kv, stride=stride), :])
            continue
        half = plan.block_kv // 2
        first = heads[lane, pl.ds(head // 2, half, stride=stride), :]
        second = heads[lane, pl.ds(head // 2 + half * stride, half, stride=stride), :]
        low, high = jnp.uint32(0xFFFF), jnp.uint32(0xFFFF0000)
        word = (first >> 16) | (second & high) if head % 2 else (first & low) | (second << 16)
        lanes.append(pltpu.bitcast(word, plan.dtype))
    return jnp.concatenate(lanes, axis=1)[:, :dim]


def own_queries(plan: Plan, head: int, first: int) -> tuple[Any, ...]:
    """The index of a group of queries in m_i, l_i and acc."""
    return (head, slice(None), pl.ds(first, plan.columns)) if plan.in_columns else (head,)


def multiply_keys(plan: Plan, refs: Refs, head: int, first: int) -> Any:
    """The products of a group of queries with the keys of a part of a block.

    In tiles of several tokens, queries are columns, so that maxima and sums over keys combine whole registers.
    """
    k = operand(plan, refs, 0, 2 * head if plan.combined else head)
    q = refs.q_rows[head, pl.ds(first, plan.columns), :]
    return product(*((k, q) if plan.in_columns else (q, k)), 1, 1)


def row_scales(plan: Plan, refs: Refs, which: int) -> Any:
    """The scales of the part's keys for KV head `which`, or of the part's values for head `which` - K."""
    own = pl.ds(which, 1)
    return refs.scales[:, own] if plan.in_columns else refs.scales[own, :]


def update_softmax(plan: Plan, refs: Refs, head: int, first: int, logits: Any, seen: Any) -> tuple[Any, Any]:
    """Update the online softmax. Returns the keys' weights and alpha, by which the accumulator is multiplied."""
    keys, own = 0 if plan.in_columns else 1, own_queries(plan, head, first)
    factor = refs.factors.logits[head]
    logits = logits * (row_scales(plan, refs, head) * factor if plan.scale_lines else factor)
    if plan.soft_cap is not None:
        logits = soft_capped(logits, plan.soft_cap) * LOG2E
    logits = jnp.where(seen, logits, MASKED)
    before = refs.m_i[own]
    m_i = jnp.maximum(before, jnp.max(logits, axis=keys, keepdims=True))
    weights = jnp.exp2(logits - m_i)
    alpha = jnp.exp2(before - m_i)
    refs.m_i[own] = m_i
    refs.l_i[own] = refs.l_i[own] * alpha + jnp.sum(weights, axis=keys, keepdims=True)
    return weights, alpha


def mix_values(
    plan: Plan, refs: Refs, group: tuple[int, int], weights: Any, alpha: Any, seen: Any, split_weights: bool
) -> None:
    """Add the weighted values to the accumulator."""
    head, own = group[0], own_queries(plan, *group)
    v = operand(plan, refs, 0, 2 * head + 1) if plan.combined else operand(plan, refs, 1, head)
    if plan.reads_ranges:  # a value that none of these queries sees has weight 0, but it may be NaN
        number = jnp.max(jnp.where(seen, 1, 0), axis=1, keepdims=True)
        v = jnp.where(jnp.broadcast_to(number, v.shape) > 0, v, jnp.zeros((), v.dtype))
    if plan.scale_lines:  # the scale of a value that a query does not see may be NaN
        weights = jnp.where(seen, weights * row_scales(plan, refs, plan.num_kv_heads + head), 0.0)
    acc = jnp.float32(0)
    for part in weight_operands(plan, weights, split_weights):
        acc += product(v, part, 0, 0) if plan.in_columns else product(part, v)
    refs.acc[own] = refs.acc[own] * alpha + acc


def in_ranges(plan: Plan, refs: Refs, span: Span, key: Any) -> Any:
    """Whether each of the keys is visible to the query of a tile with only one query."""
    seen = [(key >= begin) & (key < end) for begin, end in edges_of(plan, refs, span)]
    return functools.reduce(jnp.logical_or, seen)


def visible(plan: Plan, refs: Refs, span: Span, step: Step, part: Any, first: int) -> Any:
    """Which keys of a part of a block each query sees, in the shape of the logits."""
    key = refs.position[step.kv_slot, part]
    if plan.in_columns:
        key = jnp.concatenate([key] * (plan.columns // LANES), axis=1)
    if plan.reads_ranges:
        own = pl.ds(first, plan.columns)
        edges = [refs.ranges_buffer[step.q_slot, pl.ds(edge, 1), own] for edge in range(2 * plan.num_ranges)]
        seen = [(key >= begin) & (key < end) for begin, end in zip(edges[::2], edges[1::2], strict=True)]
        return functools.reduce(jnp.logical_or, seen)
    if plan.num_ranges:
        return jnp.broadcast_to(in_ranges(plan, refs, span, key), (plan.rows, plan.block_kv))
    shape = (1, plan.columns) if plan.in_columns else (plan.rows, 1)
    row = lax.broadcasted_iota(jnp.int32, shape, 1 if plan.in_columns else 0) + first
    query = (row & (plan.block_q - 1)) + span.position
    seen = key < span.kv_len
    if plan.causal:
        seen = key <= query
    if plan.window is not None:
        seen &= key > query - plan.window
    return seen


def weight_operands(plan: Plan, weights: Any, split_weights: bool) -> list[Any]:
    """The rounded weights and, if `split_weights`, their rounding errors, which do not average out over few keys."""
    rounded = weights.astype(plan.dtype)
    return [rounded, (weights - rounded.astype(jnp.float32)).astype(plan.dtype)] if split_weights else [rounded]


def end_tile(plan: Plan, refs: Refs, span: Span) -> None:
    """Normalise the rows of a tile, and start their copies to HBM."""
    wait_results(plan, refs)
    group, size = plan.group, plan.block_q
    query = lax.broadcasted_iota(jnp.int32, plan.per_query, 1 if plan.in_columns else 0)
    lses = []
    for head in range(plan.num_kv_heads):
        m_i, l_i = refs.m_i[head], refs.l_i[head]
        sees_keys = ~(m_i <= MASKED)  # also true if m_i is NaN
        l_i = jnp.where(sees_keys, l_i, 1.0)
        lse = jnp.where(sees_keys, m_i * LN2 + jnp.log(l_i), -jnp.inf)
        factor = jnp.where(sees_keys, refs.factors.values[head] / l_i, 0.0)
        if plan.has_sinks:
            sink = jnp.zeros(plan.per_query, jnp.float32)
            for member in range(group):
                own = (query >= member * size) & (query < (member + 1) * size)
                sink = jnp.where(own, refs.factors.sinks[head * group + member], sink)
            factor = jnp.where(sees_keys, factor / (1.0 + jnp.exp(sink - lse)), 0.0)
        acc = jnp.where(sees_keys, refs.acc[head] * factor, 0.0).astype(refs.out_buffer.dtype)
        if plan.in_columns:
            refs.by_head[pl.ds(head * group, group)] = acc.T[: group * size].reshape(group, size, plan.v_head_dim)
        else:
            refs.out_buffer[0, pl.ds(head * group, group)] = acc[:group]
        lses.append(lse)
    if plan.in_columns:
        for first in range(0, size, CHUNK):
            refs.out_buffer[pl.ds(first, CHUNK)] = jnp.swapaxes(refs.by_head[:, pl.ds(first, CHUNK), :], 0, 1)
    if plan.has_lse:
        store_lses(plan, refs, lses)
    refs.pending[0] = span.count
    for copies in result_copies(plan, refs):
        in_powers_of_2(
            span.count, size,
            lambda at, rows, copies=copies: copies(span.shift + at, span.source + span.shift + at, rows).start(),
        )  # fmt: skip


def store_lses(plan: Plan, refs: Refs, lses: list[Any]) -> None:
    """Store the lse of each KV head's queries in `lse_buffer`, [block_q, 1, H]."""
    size, group, heads = plan.block_q, plan.group, plan.num_q_heads
    if not plan.in_columns:
        column = lax.broadcasted_iota(jnp.int32, (1, heads), 1)
        row = jnp.zeros((1, heads), jnp.float32)
        for head in range(heads):
            row = jnp.where(column == head, lses[head // group][head % group : head % group + 1], row)
        refs.lse_buffer[0] = row
        return
    for head in range(heads):
        first = head % group * size
        refs.lse_heads[pl.ds(head, 1), pl.ds(0, size)] = lses[head // group][:, first : first + size]
    refs.lse_buffer[:, 0, :] = refs.lse_heads[...].T[:size, :heads]


def result_copies(plan: Plan, refs: Refs) -> list[Any]:
    """For each result, a function that describes a copy of `size` rows from `offset` in its buffer to `row` in HBM."""

    def copy(buffer: Any, array: Any, semaphore: Any) -> Any:
        return lambda offset, row, size: pltpu.make_async_copy(
            buffer.at[pl.ds(offset, size)], array.at[pl.ds(row, size)], semaphore
        )

    copies = [copy(refs.out_buffer, refs.out, refs.out_copied)]
    return [*copies, copy(refs.lse_buffer, refs.lse, refs.lse_copied)] if plan.has_lse else copies


def wait_results(plan: Plan, refs: Refs) -> None:
    """Wait until the previous tile's rows have been copied out of their buffers."""
    for copies in result_copies(plan, refs):
        in_powers_of_2(refs.pending[0], plan.block_q, lambda _, rows, copies=copies: copies(0, 0, rows).wait())
    refs.pending[0] = 0
