"""The lightning indexer's logits: what a query token sees, keys and queries as operands, and two kernels.

Each token has a program's products to itself: a block of keys times its queries' heads, which are weighted and summed
while they are in registers, so that one number a key is left. The *tile* kernel holds a block of keys and walks over
neighbouring tokens, for prompts; the *walk* kernel holds a token's queries and walks over keys, for decoding.
"""

# Triton's language only looks like Python: its constexprs and early-bound branches defeat a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

from typing import NamedTuple

import triton
import triton.language as tl

from ragged_attention.kernels_triton._formats import decode, in_float16
from ragged_attention.kernels_triton._sequences import VARYING, count_sequences, query_edge
from ragged_attention.kernels_triton._softmax import matmul, sum_of_products

SEQUENCES: tl.constexpr = tl.constexpr(128)  # whose edges are compared with a token at a time
LARGEST_INT: tl.constexpr = tl.constexpr(2**31 - 1)
LEAST_BLOCKS: tl.constexpr = tl.constexpr(4)  # of a part of a walk, that are worth a program
FILLED: tl.constexpr = tl.constexpr(256)  # columns that become -inf at a time


class Tables(NamedTuple):
    """What says which keys a token sees: ranges of packed keys, or the tables of sequences in pages."""

    starts_ptr: tl.tensor
    stops_ptr: tl.tensor
    kv_lens_ptr: tl.tensor
    cu_q_lens_ptr: tl.tensor
    num_seqs: tl.tensor
    num_tokens: tl.tensor
    capacity: tl.tensor  # tokens that a sequence can have at most
    limit: tl.tensor  # keys, or columns of the tables
    most: tl.tensor  # keys of a range that are seen at most


class Sequence(NamedTuple):
    """The sequence that a token belongs to; if none, then `seq` is 0 and it has no tokens."""

    seq: tl.tensor
    start: tl.tensor
    stop: tl.tensor
    kv_len: tl.tensor


class Rows(NamedTuple):
    """Query rows, their weights, and keys in pages or packed, which then are one page."""

    q_ptr: tl.tensor
    q_token_stride: tl.tensor
    q_head_stride: tl.tensor
    weights_ptr: tl.tensor
    weights_stride: tl.tensor
    keys_ptr: tl.tensor
    page_stride: tl.tensor
    slot_stride: tl.tensor
    scale_ptr: tl.tensor
    scale_page_stride: tl.tensor
    scale_slot_stride: tl.tensor
    page_indices_ptr: tl.tensor
    table_stride: tl.tensor
    num_pages: tl.tensor


class Shape(NamedTuple):
    """Heads and columns, in blocks that make one product, and how they are stored."""

    HEADS: tl.constexpr
    BLOCK_H: tl.constexpr
    D: tl.constexpr
    BLOCK_D: tl.constexpr
    Q_FORMAT: tl.constexpr
    KEY_FORMAT: tl.constexpr
    PAGE_SIZE: tl.constexpr  # 0: packed
    PAGE_UNIT: tl.constexpr  # page strides are counted in this many elements
    SCALES: tl.constexpr  # none, array, or page: behind the keys of a page
    BLOCK_N: tl.constexpr


@triton.jit
def clamped(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def find_sequence(token, tables):
    """The sequence of a token: as many end at it or before it as stand before that sequence."""
    seq = 0
    for first in range(0, tables.num_seqs, SEQUENCES):
        index = first + tl.arange(0, SEQUENCES)
        stops = tl.load(tables.cu_q_lens_ptr + index + 1, mask=index < tables.num_seqs, other=LARGEST_INT)
        seq += tl.sum((stops <= token).to(tl.int32), 0)
    live = seq < tables.num_seqs
    seq = tl.where(live, seq, 0)
    start = query_edge(tables.cu_q_lens_ptr, seq, tables.num_tokens)
    stop = query_edge(tables.cu_q_lens_ptr, tl.where(live, seq + 1, 0), tables.num_tokens)
    live = live & (start <= token) & (token < stop)
    kv_len = clamped(tl.load(tables.kv_lens_ptr + seq, mask=live, other=0), 0, tables.capacity)
    return Sequence(tl.where(live, seq, 0), tl.where(live, start, token), tl.where(live, stop, token), kv_len)


@triton.jit
def seen_in_sequence(token, sequence, RATIO: tl.constexpr):
    """How many positions of its sequence a token sees."""
    seen = tl.maximum(sequence.kv_len - (sequence.stop - token) + 1, 0) // RATIO
    return tl.where(sequence.start < sequence.stop, seen, 0)


@triton.jit
def seen_range(token, there, tables):
    """The packed keys [first, last) that tokens see; none where a token is not `there`."""
    first = clamped(tl.load(tables.starts_ptr + token, mask=there, other=0), 0, tables.limit)
    last = clamped(tl.load(tables.stops_ptr + token, mask=there, other=0), 0, tables.limit)
    last = tl.where(last - first > tables.most, first + tables.most, last)
    return first, tl.maximum(first, last)


@triton.jit
def seen_by(token, tables, PAGED: tl.constexpr, RATIO: tl.constexpr):
    """(sequence, first key, one past the last) of a token."""
    if PAGED:
        sequence = find_sequence(token, tables)
        seq = sequence.seq
        first = 0
        last = seen_in_sequence(token, sequence, RATIO)
    else:
        seq = 0
        first, last = seen_range(token, True, tables)
    return seq, first, last


@triton.jit
def pages_of_keys(keys, readable, seq, rows, PAGE_SIZE: tl.constexpr):
    """The page of each key, -1 where there is none; packed keys are on page 0."""
    if PAGE_SIZE:
        table = rows.page_indices_ptr + seq.to(tl.int64) * rows.table_stride
        page = tl.load(table + keys // PAGE_SIZE, mask=readable, other=-1)
        page = tl.where((page >= 0) & (page < rows.num_pages), page, -1)
    else:
        page = tl.where(readable, 0, -1)
    return page


@triton.jit
def key_places(keys, page, rows, shape):
    """Where the keys' values begin."""
    if shape.PAGE_SIZE:
        offset = keys % shape.PAGE_SIZE
        place = page.to(tl.int64) * rows.page_stride * shape.PAGE_UNIT
        if shape.SCALES == "page":  # which are small enough
            place += offset * shape.D
        else:
            place += offset.to(tl.int64) * rows.slot_stride
    else:
        place = keys.to(tl.int64) * rows.slot_stride
    return place


@triton.jit
def load_scales(keys, page, rows, shape):
    """The keys' scales; 0 where a key may not be read."""
    if shape.SCALES == "page":
        scales = rows.keys_ptr + page.to(tl.int64) * rows.page_stride * shape.PAGE_UNIT + shape.PAGE_SIZE * shape.D
        places = (scales + keys % shape.PAGE_SIZE * 4).to(tl.pointer_type(tl.float32), bitcast=True)
    elif shape.PAGE_SIZE:
        place = page.to(tl.int64) * rows.scale_page_stride
        places = rows.scale_ptr + place + (keys % shape.PAGE_SIZE).to(tl.int64) * rows.scale_slot_stride
    else:
        places = rows.scale_ptr + keys.to(tl.int64) * rows.scale_slot_stride
    return tl.load(places, mask=page >= 0, other=0)


@triton.jit
def in_format(ptr, FORMAT: tl.constexpr):
    """A pointer to what a matrix unit takes as it lies: codes of e4m3 as numbers."""
    if FORMAT == "e4m3_units":
        ptr = ptr.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    return ptr


@triton.jit
def load_keys(places, page, rows, first_column, shape, HALVES: tl.constexpr):
    """Columns of keys [BLOCK_N, BLOCK_D] as an operand, 0 where a key may not be read.

    Codes of e4m3 become the queries' type, or float16 (HALVES), which they are exact in and a single conversion from.
    """
    d = first_column + tl.arange(0, shape.BLOCK_D)
    mask = (page >= 0)[:, None]
    if shape.D % shape.BLOCK_D:
        mask = mask & (d < shape.D)[None, :]
    stored = tl.load(
        in_format(rows.keys_ptr, shape.KEY_FORMAT) + places[:, None] + d[None, :],
        mask=mask,
        other=0.0 if shape.KEY_FORMAT == "e4m3_units" else 0,
    )
    if shape.KEY_FORMAT != "plain" and shape.KEY_FORMAT != "e4m3_units":
        if HALVES or shape.Q_FORMAT != "plain":
            stored = decode(stored, shape.KEY_FORMAT, tl.float16)
        else:
            stored = decode(stored, shape.KEY_FORMAT, rows.q_ptr.dtype.element_ty)
    return stored


@triton.jit
def load_queries(token, first_head, first_column, rows, shape):
    """Columns of heads [BLOCK_H, BLOCK_D] of one token as an operand."""
    d = first_column + tl.arange(0, shape.BLOCK_D)
    head = first_head + tl.arange(0, shape.BLOCK_H)
    place = token.to(tl.int64) * rows.q_token_stride + head.to(tl.int64) * rows.q_head_stride
    places = in_format(rows.q_ptr, shape.Q_FORMAT) + place[:, None] + d[None, :]
    if shape.HEADS % shape.BLOCK_H or shape.D % shape.BLOCK_D:
        mask = (head < shape.HEADS)[:, None] & (d < shape.D)[None, :]
        stored = tl.load(places, mask=mask, other=0.0 if shape.Q_FORMAT == "e4m3_units" else 0)
    else:
        stored = tl.load(places)
    if shape.Q_FORMAT != "plain" and shape.Q_FORMAT != "e4m3_units":
        stored = decode(stored, shape.Q_FORMAT, tl.float16)
    return stored


@triton.jit
def load_weights(token, first_head, rows, shape):
    head = first_head + tl.arange(0, shape.BLOCK_H)
    place = rows.weights_ptr + token.to(tl.int64) * rows.weights_stride + head
    return tl.load(place, mask=head < shape.HEADS, other=0) if shape.HEADS % shape.BLOCK_H else tl.load(place)


@triton.jit
def weighted(products, weights, first_head, shape):
    """The sum over heads of what is positive of products [BLOCK_N, BLOCK_H]; NaN counts as positive."""
    positive = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if shape.HEADS % shape.BLOCK_H or shape.BLOCK_H <= 16:
        head = first_head + tl.arange(0, shape.BLOCK_H)
        total = sum_of_products(positive, weights[None, :], (head < shape.HEADS)[None, :], 1)
    else:
        total = tl.sum(positive * weights[None, :], 1)
    return total


@triton.jit
def scores_of_heads(token, first_head, places, page, rows, shape, keys, queries, weights, KEYS_HELD: tl.constexpr,
                    QUERIES_HELD: tl.constexpr, HALVES: tl.constexpr):  # fmt: skip
    """What a block of heads adds to the logits of one token over a block of keys, but for the keys' scales.

    `keys`, or `queries`, transposed, and `weights`, are used where they are held; else they are loaded.
    """
    products = tl.zeros([shape.BLOCK_N, shape.BLOCK_H], tl.float32)
    if shape.D <= shape.BLOCK_D:
        k = keys if KEYS_HELD else load_keys(places, page, rows, 0, shape, HALVES)
        q = queries if QUERIES_HELD else tl.trans(load_queries(token, first_head, 0, rows, shape))
        products = matmul(k, q, products)
    else:
        for first_column in range(0, shape.D, shape.BLOCK_D):
            k = load_keys(places, page, rows, first_column, shape, HALVES)
            q = load_queries(token, first_head, first_column, rows, shape)
            products = matmul(k, tl.trans(q), products)
    w = weights if QUERIES_HELD else load_weights(token, first_head, rows, shape)
    return weighted(products, w, first_head, shape)


@triton.jit
def scores_of(token, places, page, rows, shape, keys, queries, weights, KEYS_HELD: tl.constexpr,
              QUERIES_HELD: tl.constexpr, HALVES: tl.constexpr):  # fmt: skip
    """The same of all heads; in a loop where they are several blocks, for unrolled they spill."""
    if shape.HEADS <= shape.BLOCK_H:
        total = scores_of_heads(token, 0, places, page, rows, shape, keys, queries, weights, KEYS_HELD, QUERIES_HELD,
                                HALVES)  # fmt: skip
    else:
        total = tl.zeros([shape.BLOCK_N], tl.float32)
        for first_head in range(0, shape.HEADS, shape.BLOCK_H):
            total += scores_of_heads(token, first_head, places, page, rows, shape, keys, queries, weights, KEYS_HELD,
                                     QUERIES_HELD, HALVES)  # fmt: skip
    return total


@triton.jit
def logits_of_run(
    begin, end, low, high, tile_start, sequence, tables, rows, shape, logits_ptr, row_stride,
    RATIO: tl.constexpr, FILL: tl.constexpr, RELATIVE: tl.constexpr,
):  # fmt: skip
    """A block of keys with the tokens [begin, end), of one `sequence` if keys are in pages, that see [low, high).

    `logits_ptr` is where row 0 would begin. If FILL, what no token sees becomes -inf; RELATIVE rows begin with the
    first key that their token sees.
    """
    PAGED: tl.constexpr = shape.PAGE_SIZE > 0
    HELD: tl.constexpr = shape.D <= shape.BLOCK_D
    keys = tile_start + tl.arange(0, shape.BLOCK_N)
    if (tile_start < high) & (tile_start + shape.BLOCK_N > low):
        page = pages_of_keys(keys, (keys >= low) & (keys < high), sequence.seq, rows, shape.PAGE_SIZE)
        places = key_places(keys, page, rows, shape)
        held = None
        if HELD:
            held = load_keys(places, page, rows, 0, shape, False)
        scale = None
        if shape.SCALES != "none":
            scale = load_scales(keys, page, rows, shape)
        for index in range(end - begin):
            token = begin + index
            scores = scores_of(token, places, page, rows, shape, held, None, None, HELD, False, False)
            if shape.SCALES != "none":
                scores = scores * scale
            if PAGED:
                first = 0
                last = seen_in_sequence(token, sequence, RATIO)
            else:
                first, last = seen_range(token, True, tables)
            seen = (keys >= first) & (keys < last)
            scores = tl.where(seen & (page >= 0), scores, float("-inf"))
            row = logits_ptr + token.to(tl.int64) * row_stride
            if RELATIVE:
                tl.store(row + (keys - first), scores, mask=seen)
            elif FILL:
                tl.store(row + keys, scores, mask=keys < tables.limit)
            else:
                tl.store(row + keys, scores, mask=seen)
    elif FILL:
        for index in range(end - begin):
            token = begin + index
            row = logits_ptr + token.to(tl.int64) * row_stride
            tl.store(row + keys, tl.full([shape.BLOCK_N], float("-inf"), tl.float32), mask=keys < tables.limit)


@triton.jit(do_not_specialize=VARYING)
def tile_logits_kernel(
    q_ptr, keys_ptr, weights_ptr, scale_ptr, starts_ptr, stops_ptr, page_indices_ptr, kv_lens_ptr, cu_q_lens_ptr,
    num_seqs_ptr, given_logits_ptr, logits_ptr,
    first_token, num_rows, num_tokens, max_num_seqs, capacity, num_kv_tokens, longest, num_pages, table_stride,
    q_token_stride, q_head_stride, weights_stride, page_stride, slot_stride, scale_page_stride, scale_slot_stride,
    row_stride,
    HAS_NUM_SEQS: tl.constexpr, HEADS: tl.constexpr, BLOCK_H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    Q_FORMAT: tl.constexpr, KEY_FORMAT: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_UNIT: tl.constexpr,
    SCALES: tl.constexpr, RATIO: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, FILL: tl.constexpr,
    RELATIVE: tl.constexpr,
):  # fmt: skip
    """A block of keys with a block of tokens: those of each sequence among them, one sequence after the other, or
    all of them where keys are packed."""
    tile_start = tl.program_id(0) * BLOCK_N
    token = first_token + tl.program_id(1) * BLOCK_T
    end = tl.minimum(token + BLOCK_T, first_token + num_rows)
    num_seqs = count_sequences(num_seqs_ptr, max_num_seqs, HAS_NUM_SEQS)
    tables = Tables(starts_ptr, stops_ptr, kv_lens_ptr, cu_q_lens_ptr, num_seqs, num_tokens, capacity, num_kv_tokens,
                    longest)  # fmt: skip
    rows = Rows(q_ptr, q_token_stride, q_head_stride, weights_ptr, weights_stride, keys_ptr, page_stride, slot_stride,
                scale_ptr, scale_page_stride, scale_slot_stride, page_indices_ptr, table_stride,
                num_pages)  # fmt: skip
    if PAGE_SIZE:
        while token < end:
            sequence = find_sequence(token, tables)
            stop = tl.minimum(tl.maximum(sequence.stop, token + 1), end)
            high = seen_in_sequence(stop - 1, sequence, RATIO)
            logits_of_run(
                token, stop, 0, high, tile_start, sequence, tables, rows,
                Shape(HEADS, BLOCK_H, D, BLOCK_D, Q_FORMAT, KEY_FORMAT, PAGE_SIZE, PAGE_UNIT, SCALES, BLOCK_N),
                logits_ptr - first_token.to(tl.int64) * row_stride, row_stride, RATIO, FILL, RELATIVE,
            )  # fmt: skip
            token = stop
    else:
        there = token + tl.arange(0, BLOCK_T)
        first, last = seen_range(there, there < end, tables)
        low = tl.min(tl.where(first < last, first, LARGEST_INT), 0)
        high = tl.max(tl.where(first < last, last, 0), 0)
        logits_of_run(
            token, end, low, high, tile_start, Sequence(0, 0, 0, 0), tables, rows,
            Shape(HEADS, BLOCK_H, D, BLOCK_D, Q_FORMAT, KEY_FORMAT, PAGE_SIZE, PAGE_UNIT, SCALES, BLOCK_N),
            logits_ptr - first_token.to(tl.int64) * row_stride, row_stride, RATIO, FILL, RELATIVE,
        )  # fmt: skip


@triton.jit
def walked_keys(block, end, first, last, listed_ptr, num_entries, LISTED: tl.constexpr, SIZE: tl.constexpr,
                RELATIVE: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """The keys that a walk comes to in its block of that number, and which of them are in [first, last).

    They are those from the multiple of BLOCK_N before `first` on, or the positions of the blocks in a list, which
    count from `first` if they are RELATIVE. Behind the block before `end` there are none.
    """
    step = block * BLOCK_N + tl.arange(0, BLOCK_N)
    if LISTED:
        base = first if RELATIVE else 0
        entry = step // SIZE
        listed = tl.load(listed_ptr + entry, mask=entry < tl.where(block < end, num_entries, 0), other=-1)
        known = (listed >= 0) & (listed <= (last - base - 1) // SIZE)
        position = tl.where(known, listed, 0) * SIZE + step % SIZE
        seen = known & (position >= first - base) & (position < last - base)
        keys = base + tl.where(seen, position, 0)
    else:
        keys = first // BLOCK_N * BLOCK_N + step
        seen = (keys >= first) & (keys < tl.where(block < end, last, first))
    return keys, seen


@triton.jit
def walk(
    token, begin, end, seq, first, last, listed_ptr, num_entries, rows, shape, row_ptr, LISTED: tl.constexpr,
    SIZE: tl.constexpr, RELATIVE: tl.constexpr,
):  # fmt: skip
    """The logits of one token over the blocks [begin, end) of its walk; what it does not see is not written.

    Pages are looked up while the block before is on its way, as in paged attention.
    """
    HELD: tl.constexpr = shape.HEADS <= shape.BLOCK_H and shape.D <= shape.BLOCK_D
    HALVES: tl.constexpr = HELD and shape.KEY_FORMAT != "plain" and rows.q_ptr.dtype.element_ty == tl.bfloat16
    queries = None
    weights = None
    if HELD:
        queries = load_queries(token, 0, 0, rows, shape)
        weights = load_weights(token, 0, rows, shape)
        if HALVES:
            queries, unit = in_float16(queries)
            weights = weights * unit
        # Here, for what a loop transposes compilers (Triton 3.6 to 3.9) copy to shared memory in every turn.
        queries = tl.trans(queries)
    keys, seen = walked_keys(begin, end, first, last, listed_ptr, num_entries, LISTED, SIZE, RELATIVE, shape.BLOCK_N)
    page = pages_of_keys(keys, seen, seq, rows, shape.PAGE_SIZE)
    for index in range(end - begin):
        places = key_places(keys, page, rows, shape)
        scores = scores_of(token, places, page, rows, shape, None, queries, weights, False, HELD, HALVES)
        if shape.SCALES != "none":
            scores = scores * load_scales(keys, page, rows, shape)
        scores = tl.where(page >= 0, scores, float("-inf"))
        tl.store(row_ptr + (keys - first if RELATIVE else keys), scores, mask=seen)
        keys, seen = walked_keys(begin + index + 1, end, first, last, listed_ptr, num_entries, LISTED, SIZE,
                                 RELATIVE, shape.BLOCK_N)  # fmt: skip
        page = pages_of_keys(keys, seen, seq, rows, shape.PAGE_SIZE)


@triton.jit(do_not_specialize=VARYING)
def walk_logits_kernel(
    q_ptr, keys_ptr, weights_ptr, scale_ptr, starts_ptr, stops_ptr, page_indices_ptr, kv_lens_ptr, cu_q_lens_ptr,
    num_seqs_ptr, candidates_ptr, given_logits_ptr, logits_ptr,
    first_token, num_tokens, max_num_seqs, capacity, num_kv_tokens, longest, num_pages, table_stride, num_parts,
    num_entries, candidates_stride,
    q_token_stride, q_head_stride, weights_stride, page_stride, slot_stride, scale_page_stride, scale_slot_stride,
    row_stride,
    HAS_NUM_SEQS: tl.constexpr, HEADS: tl.constexpr, BLOCK_H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    Q_FORMAT: tl.constexpr, KEY_FORMAT: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_UNIT: tl.constexpr,
    SCALES: tl.constexpr, RATIO: tl.constexpr, BLOCK_N: tl.constexpr, FILL: tl.constexpr, RELATIVE: tl.constexpr,
    LISTED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One of the parts, of a length, that a token's keys are divided into."""
    token = first_token + tl.program_id(0)
    part = tl.program_id(1)
    num_seqs = count_sequences(num_seqs_ptr, max_num_seqs, HAS_NUM_SEQS)
    tables = Tables(starts_ptr, stops_ptr, kv_lens_ptr, cu_q_lens_ptr, num_seqs, num_tokens, capacity, num_kv_tokens,
                    longest)  # fmt: skip
    rows = Rows(q_ptr, q_token_stride, q_head_stride, weights_ptr, weights_stride, keys_ptr, page_stride, slot_stride,
                scale_ptr, scale_page_stride, scale_slot_stride, page_indices_ptr, table_stride,
                num_pages)  # fmt: skip
    seq, first, last = seen_by(token, tables, PAGE_SIZE > 0, RATIO)
    row_ptr = logits_ptr + tl.program_id(0).to(tl.int64) * row_stride
    length = num_entries * SIZE if LISTED else last - first // BLOCK_N * BLOCK_N
    blocks = tl.where(first < last, (length + BLOCK_N - 1) // BLOCK_N, 0)
    each = tl.maximum((blocks + num_parts - 1) // num_parts, LEAST_BLOCKS)
    begin = part * each
    walk(
        token, begin, tl.minimum(begin + each, blocks), seq, first, last,
        candidates_ptr + token.to(tl.int64) * candidates_stride, num_entries, rows,
        Shape(HEADS, BLOCK_H, D, BLOCK_D, Q_FORMAT, KEY_FORMAT, PAGE_SIZE, PAGE_UNIT, SCALES, BLOCK_N),
        row_ptr, LISTED, SIZE, RELATIVE,
    )  # fmt: skip
    if FILL:
        share = (num_kv_tokens + num_parts - 1) // num_parts
        stop = tl.minimum((part + 1) * share, num_kv_tokens)
        for start in range(part * share, stop, FILLED):
            column = start + tl.arange(0, FILLED)
            unseen = (column < stop) & ((column < first) | (column >= last))
            tl.store(row_ptr + column, tl.full([FILLED], float("-inf"), tl.float32), mask=unseen)


@triton.jit(do_not_specialize=VARYING)
def fill_kernel(given_logits_ptr, logits_ptr, count, BLOCK: tl.constexpr):
    """-inf everywhere, where kernels of logits write only what is seen."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(logits_ptr + index, tl.full([BLOCK], float("-inf"), tl.float32), mask=index < count)
