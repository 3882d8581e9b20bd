"""The attention loop over the pages of one sequence, with online softmax as in FlashAttention."""

import dataclasses
from typing import NamedTuple

import triton
import triton.language as tl

from ragged_attention.kernels_triton._bias import Bias, capped_and_biased
from ragged_attention.kernels_triton._compiler import always, beside, decoded_at_once, twice
from ragged_attention.kernels_triton._constants import Constants
from ragged_attention.kernels_triton._formats import narrow
from ragged_attention.kernels_triton._key_ranges import exact_and_other_ends, range_edges, smaller_block
from ragged_attention.kernels_triton._mask import MaskKind, fewest_keys, hide, may_read, seen_by_all
from ragged_attention.kernels_triton._max_logits import larger, largest_of_state, unchanged
from ragged_attention.kernels_triton._segments import normalised, with_later
from ragged_attention.kernels_triton._sequences import Edges, block_start, end_blocks, query_edge, whole_blocks
from ragged_attention.kernels_triton._softmax import lost_to_rounding, matmul, online_softmax
from ragged_attention.kernels_triton._stored import (
    RowPages,
    Slots,
    Stored,
    load_rows,
    row_scales,
    without_infinite,
)

PAGE_SCAN: tl.constexpr = tl.constexpr(256)  # page indices that `pages_are_valid` checks per step


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Shape(Constants):
    """The sizes of heads and pages, and the element format of pages."""

    GROUP: int  # query heads per KV head
    NUM_HEADS: int
    PAGE_SIZE: int  # keys per page; 0 if keys are packed, so that each key's page is its row
    D: int  # head size of queries and keys
    D_PAD: int  # D, rounded up to a power of two
    DV: int  # head size of values
    DV_PAD: int
    K: Stored
    V: Stored
    V_DTYPE: tl.dtype  # the dtype of the operands of weights and values
    Q_UNITS: bool  # whether query rows are divided by a power of two, their unit, to fit float16
    Q_TERMS: int  # terms per query element: 2 if float16 queries are the sum of two bfloat16 operands


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Loop(Constants):
    """The block sizes of the loop, and the precision of its weights."""

    BLOCK_KV: int  # keys per block of the unmasked loop
    EDGE_KV: int  # keys per block of the masked loop
    EXACT_KV: int = dataclasses.field(init=False)  # keys per block of the exact loop; see `_key_ranges`
    WEIGHT_TERMS: int  # terms per weight in the unmasked loop: 1 (the rounded weight) or 2 (also its rounding error)
    MASKED_BELOW: int  # if a row sees fewer keys than this, the masked loop visits all blocks; see `divide_keys`
    SEGMENT: int = 0  # keys per segment; 0 without segments. Segments need blocks of one size; see `_segments`

    def __post_init__(self) -> None:
        object.__setattr__(self, "EXACT_KV", smaller_block(self.EDGE_KV))
        super().__post_init__()


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Attention(Constants):
    """The compile-time constants of `attend_range`."""

    SHAPE: Shape
    MASK: MaskKind
    LOOP: Loop
    HAS_SOFT_CAP: bool
    HAS_ALIBI: bool
    BIAS: Bias
    KEEPS_LARGEST: bool = False  # see `keeps_largest`


class Queries(NamedTuple):
    """A block of query rows, and the factors of their logits."""

    q: tl.tensor  # [rows, D_PAD]
    lost: tl.tensor  # the second term of `q`, if Q_TERMS is 2
    total: tl.tensor  # the sum of each row, if keys have zero points
    unit: tl.tensor  # the power of two that divided each row, if Q_UNITS
    inner: tl.tensor  # the factor before the soft cap
    cap: tl.tensor
    outer: tl.tensor  # the factor after the soft cap; if there is no cap, the only factor. It makes logits base 2
    slope: tl.tensor  # each row's ALiBi slope in base 2, if HAS_ALIBI
    table: tl.tuple  # the rows' tables of the relative bias, if there is one


class Pages(NamedTuple):
    """The addresses of one KV head's K and V, and of one sequence's row of the page table."""

    k: RowPages
    v: RowPages
    table_ptr: tl.tensor  # if keys are packed, the row of the sequence's first key
    num_pages: tl.tensor


@triton.jit
def pages_are_valid(page_row_ptr, first_page, last_page, num_pages):
    """1 if all entries [first_page, last_page) of the page table row are valid page indices, else 0."""
    valid = 1
    for start in range(first_page, last_page, PAGE_SCAN):
        slots = start + tl.arange(0, PAGE_SCAN)
        pages = tl.load(page_row_ptr + slots, mask=slots < last_page, other=0)
        good = (pages >= 0) & (pages < num_pages)
        valid = tl.minimum(valid, tl.min(good.to(tl.int32), 0))
    return valid


@triton.jit
def pages_of(table_ptr, block, first, last, exists, MASKED: tl.constexpr, PAGE_SIZE: tl.constexpr,
             BLOCK_KV: tl.constexpr):  # fmt: skip
    """The page of each key of the block that begins at key `block`, or a single page if it holds the whole block.

    If the block does not exist, pages are -1 and nothing is read. If MASKED and each key has its own page entry, pages
    of keys outside [first, last) are -1, too.
    """
    if PAGE_SIZE > 0 and PAGE_SIZE % BLOCK_KV == 0:
        page = tl.load(table_ptr + block // PAGE_SIZE, mask=exists, other=-1)
    else:
        keys = block + tl.arange(0, BLOCK_KV)
        if MASKED:
            readable = (keys >= first) & (keys < tl.where(exists, last, first))
        else:
            readable = keys < tl.where(exists, block + BLOCK_KV, block)
        page = page_entries(table_ptr, keys, readable, PAGE_SIZE)
    return page


@triton.jit
def page_entries(table_ptr, keys, readable, PAGE_SIZE: tl.constexpr):
    """The page of each key; -1 for keys that are not readable."""
    if PAGE_SIZE == 0:
        page = tl.where(readable, table_ptr + keys, -1)
    else:
        page = tl.load(table_ptr + keys // PAGE_SIZE, mask=readable, other=-1)
    return page


@triton.jit
def table_of(page_indices_ptr, seq, table_stride, kv_lens_ptr, capacity, PAGE_SIZE: tl.constexpr):
    """`Pages.table_ptr` of a sequence. If keys are packed, `kv_lens_ptr` is cu_kv_lens."""
    if PAGE_SIZE == 0:
        table = query_edge(kv_lens_ptr, tl.maximum(seq, 0), capacity)
    else:
        table = page_indices_ptr + seq.to(tl.int64) * table_stride
    return table


@triton.jit
def are_readable(keys, page, first, last, num_pages, PAGE_SIZE: tl.constexpr, BLOCK_KV: tl.constexpr):
    """A mask of the keys that are in [first, last) and on a valid page."""
    known = (page >= 0) & (page < num_pages)
    if PAGE_SIZE > 0 and PAGE_SIZE % BLOCK_KV == 0:
        readable = (keys >= tl.where(known, first, last)) & (keys < last)
    else:
        readable = (keys >= first) & (keys < last) & known
    return readable


@triton.jit
def look_up(pages, blocks, index, visible, MASKED: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_KV: tl.constexpr):
    """The pages of the block that a loop visits in iteration `index`; -1 after the last block."""
    block = block_start(blocks, index, MASKED, BLOCK_KV)
    return pages_of(pages.table_ptr, block, visible.first, visible.last, index < blocks.num_blocks, MASKED, PAGE_SIZE,
                    BLOCK_KV)  # fmt: skip


@triton.jit
def load_keys(pages, slots, DTYPE: tl.constexpr, MASKED: tl.constexpr, SHAPE: tl.constexpr):
    return load_rows(pages.k, slots, DTYPE, MASKED, SHAPE.PAGE_SIZE, SHAPE.D, SHAPE.D_PAD, SHAPE.K)


@triton.jit
def load_values(pages, slots, ROWS: tl.constexpr, MASKED: tl.constexpr, SHAPE: tl.constexpr):
    values = load_rows(pages.v, slots, SHAPE.V_DTYPE, MASKED, SHAPE.PAGE_SIZE, SHAPE.DV, SHAPE.DV_PAD, SHAPE.V)
    if SHAPE.V.DECODED_AT_ONCE and ROWS < 128:
        values = decoded_at_once(values, slots.readable)
    return values


@triton.jit
def with_scales(weights, acc, logits, pages, slots, TERMS: tl.constexpr, MASKED: tl.constexpr, SHAPE: tl.constexpr):
    """(weights times the scales of the values' rows, acc minus the contribution of their zero points).

    A key adds nothing to the rows that do not see it, even if its scale is NaN.
    """
    scales, zeros = row_scales(pages.v, slots, MASKED, SHAPE.PAGE_SIZE, SHAPE.V)
    weights = weights * scales[None, :]
    if MASKED:
        weights = tl.where(logits == float("-inf"), 0.0, weights)
    if SHAPE.V.ZERO != "":
        used = narrow(weights, SHAPE.V_DTYPE)  # the weights as rounded for the product
        share = used.to(tl.float32)
        if TERMS == 2:
            share += lost_to_rounding(weights, used).to(tl.float32)
        share = tl.where(share == 0, 0.0, share * zeros[None, :])
        acc = acc - tl.sum(share, 1)[:, None]
    return weights, acc


@triton.jit
def add_values(acc, weights, logits, pages, slots, TERMS: tl.constexpr, MASKED: tl.constexpr, SHAPE: tl.constexpr):
    """acc + weights @ values.

    Rounding a weight to bfloat16 has a relative error of up to 2^-9. That is too much if few keys contribute to the
    output, because the errors do not average out. With two TERMS, a second product adds the rounding errors;
    for large accumulators, `beside` joins both products.
    """
    ROWS: tl.constexpr = weights.shape[0]
    ONE_PRODUCT: tl.constexpr = TERMS == 2 and ROWS >= 64 and SHAPE.DV_PAD >= 512
    if SHAPE.V.SCALES != "" and SHAPE.V.GROUP == 0:
        weights, acc = with_scales(weights, acc, logits, pages, slots, TERMS, MASKED, SHAPE)
    if SHAPE.V.GROUP > 0 and MASKED:
        values, weights = without_infinite(load_values(pages, slots, ROWS, MASKED, SHAPE), weights, logits)
        rounded = narrow(weights, SHAPE.V_DTYPE)
        acc = matmul(rounded, values, acc)
        if TERMS == 2:
            acc = matmul(lost_to_rounding(weights, rounded), values, acc)
        return acc
    rounded = narrow(weights, SHAPE.V_DTYPE)
    if ONE_PRODUCT:
        page = twice(slots.page) if slots.page.numel > 1 else slots.page
        values = load_values(pages, Slots(twice(slots.keys), page, twice(slots.readable)), ROWS, MASKED, SHAPE)
        acc = matmul(beside(rounded, lost_to_rounding(weights, rounded)), values, acc)
    else:
        values = load_values(pages, slots, ROWS, MASKED, SHAPE)
        acc = matmul(rounded, values, acc)
        if TERMS == 2:
            acc = matmul(lost_to_rounding(weights, rounded), values, acc)
    return acc


@triton.jit
def logits_of(queries, k, pages, slots, index, visible, ATTENTION: tl.constexpr, MASKED: tl.constexpr):
    """(logits [rows, keys], the factor that converts them to base 2, products), in iteration `index` of a loop.

    `logits` include the soft cap and biases, but no masks. `products` are the logits before the soft cap and biases.
    """
    SHAPE: tl.constexpr = ATTENTION.SHAPE
    WIDE: tl.constexpr = queries.q.shape[0] >= 64 and SHAPE.DV_PAD >= 512
    logits = tl.zeros([queries.q.shape[0], k.shape[0]], tl.float32)
    if not WIDE or always(index, 0):
        logits = matmul(queries.q, tl.trans(k), logits)
    if SHAPE.Q_TERMS == 2:
        logits = matmul(queries.lost, tl.trans(k), logits)
    if SHAPE.K.SCALES != "" and SHAPE.K.GROUP == 0:
        scales, zeros = row_scales(pages.k, slots, MASKED, SHAPE.PAGE_SIZE, SHAPE.K)
        if SHAPE.K.ZERO != "":
            logits = logits - queries.total[:, None] * zeros[None, :]
        logits = logits * scales[None, :]
    if SHAPE.Q_UNITS:
        logits = logits * queries.unit[:, None]
    products = logits
    logits, scale = capped_and_biased(products, queries, slots.keys, visible, ATTENTION)
    return logits, scale, products


@triton.jit
def attend(queries, state, blocks, visible, mask, pages, ATTENTION: tl.constexpr, MASKED: tl.constexpr,
           EXACT: tl.constexpr = False):  # fmt: skip
    """Online softmax of query rows over blocks of keys: updates `state` = (m_i, l_i, acc) and returns it.

    If KEEPS_LARGEST, `state` also has the largest logits before the soft cap and biases. Without MASKED, every row must
    see every key of the blocks, and every page must be valid. With MASKED, only keys in [visible.first, visible.last)
    on valid pages are read. A key that no row sees has no effect, even if it is NaN. If the rows' ranges of keys are
    not solid (see `RowRanges`), this guarantee takes an EXACT loop.

    The pages of a block are looked up one iteration ahead. A lookup in the same iteration would take pipeline stages
    from the copies of keys and values (Triton 3.6 to 3.9). For WIDE rows, no registers are left to look ahead.
    """
    SHAPE: tl.constexpr = ATTENTION.SHAPE
    ROWS: tl.constexpr = queries.q.shape[0]
    LOOP: tl.constexpr = ATTENTION.LOOP
    BLOCK_KV: tl.constexpr = LOOP.EXACT_KV if EXACT else (LOOP.EDGE_KV if MASKED else LOOP.BLOCK_KV)
    TERMS: tl.constexpr = (2 if tl.bfloat16 == SHAPE.V_DTYPE else 1) if MASKED else LOOP.WEIGHT_TERMS
    WIDE: tl.constexpr = ROWS >= 64 and SHAPE.DV_PAD >= 512
    m_i, l_i, acc = state[0], state[1], state[2]
    largest = largest_of_state(state)
    next_page = look_up(pages, blocks, 0, visible, MASKED, SHAPE.PAGE_SIZE, BLOCK_KV)
    for index in range(blocks.num_blocks):
        if WIDE:
            page = look_up(pages, blocks, index, visible, MASKED, SHAPE.PAGE_SIZE, BLOCK_KV)
        else:
            page = next_page
            next_page = look_up(pages, blocks, index + 1, visible, MASKED, SHAPE.PAGE_SIZE, BLOCK_KV)
        keys = block_start(blocks, index, MASKED, BLOCK_KV) + tl.arange(0, BLOCK_KV)
        readable = are_readable(keys, page, visible.first, visible.last, pages.num_pages, SHAPE.PAGE_SIZE, BLOCK_KV)
        if MASKED and ATTENTION.MASK.RANGES > 0:
            readable = readable & may_read(keys, visible, ATTENTION.MASK, EXACT)
        slots = Slots(keys, page, readable)
        k = load_keys(pages, slots, queries.q.dtype, MASKED, SHAPE)
        logits, scale, products = logits_of(queries, k, pages, slots, index, visible, ATTENTION, MASKED)
        if ATTENTION.KEEPS_LARGEST:
            products = unchanged(products, queries, ATTENTION)
            if MASKED:
                products = hide(products, keys, readable, visible, mask, ATTENTION.MASK)
            largest = larger(largest, products)
        if MASKED:
            logits = hide(logits, keys, readable, visible, mask, ATTENTION.MASK)
            if ATTENTION.MASK.HAS_DRAFT_MASK:  # a weight of 0 would not hide a NaN in a value that no row sees
                readable = readable & (tl.max(logits, 0) != float("-inf"))
        weights, alpha, m_i, l_i = online_softmax(logits, m_i, l_i, scale)
        slots = Slots(keys, page, readable)
        acc = add_values(acc * alpha[:, None], weights, logits, pages, slots, TERMS, MASKED, SHAPE)
    state = (m_i, l_i, acc)
    if ATTENTION.KEEPS_LARGEST:
        state += (largest,)
    return state


@triton.jit
def divide_keys(start, stop, visible, mask, pages, ATTENTION: tl.constexpr):
    """The `Edges` of the keys [start, stop), where `start` is the first key of a block.

    The masked loop visits all blocks if a page index among them is invalid, or if a row sees fewer keys than
    MASKED_BELOW. The rounding errors of so few weights would not average out; in bfloat16, the masked loop therefore
    has two-term weights. The masked loop also visits keys in order, which segments need. So a call with segments sets
    MASKED_BELOW to the maximum if masks can hide the first keys.
    """
    BLOCK_KV: tl.constexpr = ATTENTION.LOOP.BLOCK_KV
    EDGE_KV: tl.constexpr = ATTENTION.LOOP.EDGE_KV
    end = tl.maximum((stop + EDGE_KV - 1) // EDGE_KV * EDGE_KV, start)
    whole_start, whole_stop = seen_by_all(start, stop, end, visible, mask, ATTENTION.MASK, BLOCK_KV)
    valid = whole_pages_are_valid(whole_start, whole_stop, pages, ATTENTION.SHAPE.PAGE_SIZE)
    unmasked = (valid == 1) & (fewest_keys(visible, mask, ATTENTION.MASK) >= ATTENTION.LOOP.MASKED_BELOW)
    return Edges(start, whole_start, tl.where(unmasked, whole_stop, whole_start), end, ())


@triton.jit
def whole_pages_are_valid(whole_start, whole_stop, pages, PAGE_SIZE: tl.constexpr):
    """1 if all pages of the keys [whole_start, whole_stop) are valid, else 0."""
    valid = 1
    if PAGE_SIZE > 0:
        # If no block is whole, no page is scanned: with a window, whole_start may lie beyond the page table.
        last_page = tl.where(whole_stop > whole_start, (whole_stop + PAGE_SIZE - 1) // PAGE_SIZE, 0)
        valid = pages_are_valid(pages.table_ptr, whole_start // PAGE_SIZE, last_page, pages.num_pages)
    return valid


@triton.jit
def divide_ranges(start, stop, visible, mask, pages, ATTENTION: tl.constexpr):
    """`divide_keys` for rows that have ranges of keys."""
    LOOP: tl.constexpr = ATTENTION.LOOP
    PAGE_SIZE: tl.constexpr = ATTENTION.SHAPE.PAGE_SIZE
    EDGE_KV: tl.constexpr = LOOP.EXACT_KV if LOOP.SEGMENT > 0 else LOOP.EDGE_KV  # see `attend_range`
    edges = range_edges(start, stop, visible.ranges, ATTENTION.MASK, LOOP.BLOCK_KV, EDGE_KV)
    valid = whole_pages_are_valid(edges.whole_start, edges.whole_stop, pages, PAGE_SIZE)
    for part in tl.static_range(len(edges.later)):
        _, whole_start, whole_stop, _ = edges.later[part]
        valid = tl.minimum(valid, whole_pages_are_valid(whole_start, whole_stop, pages, PAGE_SIZE))
    unmasked = valid == 1
    if LOOP.MASKED_BELOW > 0:
        unmasked = unmasked & (fewest_keys(visible, mask, ATTENTION.MASK) >= LOOP.MASKED_BELOW)
    later = ()
    for part in tl.static_range(len(edges.later)):
        left, whole_start, whole_stop, right = edges.later[part]
        later += ((left, whole_start, tl.where(unmasked, whole_stop, whole_start), right),)
    whole_stop = tl.where(unmasked, edges.whole_stop, edges.whole_start)
    return Edges(edges.start, edges.whole_start, whole_stop, edges.end, later)


@triton.jit
def nothing_seen(ROWS: tl.constexpr, DV_PAD: tl.constexpr):
    """(m_i, l_i, acc) of rows that have seen no key."""
    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    return m_i, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, DV_PAD], tl.float32)


@triton.jit
def attend_range(queries, start, stop, visible, mask, pages, ATTENTION: tl.constexpr):
    """The state of `attend` after the keys [start, stop); see `Edges` for the two loops."""
    # Segments need blocks in order and of one size. So only one loop runs if masks can hide the first keys: the masked
    # loop or, with ranges, the exact loop.
    MASKS_ALL: tl.constexpr = ATTENTION.LOOP.SEGMENT > 0 and (ATTENTION.MASK.HAS_FIRST_KEY or ATTENTION.MASK.RANGES > 0)
    if ATTENTION.MASK.RANGES:
        edges = divide_ranges(start, stop, visible, mask, pages, ATTENTION)
    else:
        edges = divide_keys(start, stop, visible, mask, pages, ATTENTION)
    state = nothing_seen(queries.q.shape[0], ATTENTION.SHAPE.DV_PAD)
    if ATTENTION.KEEPS_LARGEST:
        state += (state[0],)
    if not MASKS_ALL:
        whole = whole_blocks(edges, ATTENTION.LOOP.BLOCK_KV)
        state = attend(queries, state, whole, visible, mask, pages, ATTENTION, False)
    if MASKS_ALL and ATTENTION.MASK.RANGES > 0:
        exact = end_blocks(edges, ATTENTION.LOOP.EXACT_KV)
        return attend(queries, state, exact, visible, mask, pages, ATTENTION, True, EXACT=True)
    ends = end_blocks(edges, ATTENTION.LOOP.EDGE_KV)
    if ATTENTION.MASK.RANGES:
        exact, ends = exact_and_other_ends(edges, visible.ranges.solid, ATTENTION.LOOP.EXACT_KV, ATTENTION.LOOP.EDGE_KV)
        state = attend(queries, state, exact, visible, mask, pages, ATTENTION, True, EXACT=True)
    return attend(queries, state, ends, visible, mask, pages, ATTENTION, True)


@triton.jit
def with_segment(state, part):
    """The `state` (m_i, l_i, acc, largest) of rows, merged with `part`, the state of a later segment alone."""
    rows, lse = normalised(part[0], part[1], part[2])
    m_i, l_i, acc = with_later((state[0], state[1], state[2]), rows, lse)
    return m_i, l_i, acc, tl.maximum(state[3], largest_of_state(part))


@triton.jit
def attend_all(queries, start, stop, visible, mask, pages, ATTENTION: tl.constexpr):
    """`attend_range`, one segment after another if there are segments."""
    SEGMENT: tl.constexpr = ATTENTION.LOOP.SEGMENT
    if SEGMENT == 0:
        state = attend_range(queries, start, stop, visible, mask, pages, ATTENTION)
    else:
        state = nothing_seen(queries.q.shape[0], ATTENTION.SHAPE.DV_PAD)
        state += (state[0],)
        for segment in range(start // SEGMENT, (stop + SEGMENT - 1) // SEGMENT):
            first = tl.maximum(start, segment * SEGMENT)
            last = tl.minimum(stop, (segment + 1) * SEGMENT)
            part = attend_range(queries, first, last, visible, mask, pages, ATTENTION)
            state = with_segment(state, part)
    return state
