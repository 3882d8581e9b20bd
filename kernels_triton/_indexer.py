"""The lightning indexer's logits: visible keys, operands, and the kernels.

A matrix product multiplies a block of keys with the heads of one token. The kernel weights this product in registers
and sums it over heads, which leaves one logit per key. The *tile* kernel, for prompts, holds a block of keys and visits
neighbouring tokens. The *walk* kernel, for decoding, holds one token's queries and visits blocks of keys. In the *list*
kernel, a program has one token and a block of entries of the token's list of packed keys.
"""

import dataclasses
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ragged_attention.kernels_triton._constants import Constants
from ragged_attention.kernels_triton._formats import decode, in_float16
from ragged_attention.kernels_triton._sequences import VARYING, PageTable, count_sequences, query_edge
from ragged_attention.kernels_triton._softmax import matmul, sum_of_products
from ragged_attention.kernels_triton._splits import LARGEST_INT, Batch

SEQUENCES: tl.constexpr = tl.constexpr(128)  # sequences that a program searches at a time
LEAST_BLOCKS: tl.constexpr = tl.constexpr(4)  # minimum key blocks per program, unless a token sees fewer
FILLED: tl.constexpr = tl.constexpr(256)  # columns set to -inf at a time


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Sight(Constants):
    """The constants that determine which keys a token sees."""

    PAGED: bool  # whether keys are in pages, and lengths decide what a token sees; else each token has a range
    RATIO: int  # tokens of a sequence that each key represents
    RELATIVE: bool  # whether a row of logits begins at the first key that its token sees
    HAS_NUM_SEQS: bool


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Shape(Constants):
    """The numbers of heads and columns, their block sizes, and the formats of queries and keys."""

    HEADS: int
    BLOCK_H: int
    D: int
    BLOCK_D: int
    Q_FORMAT: str  # see `decode`; with "e4m3_units", matrix units multiply e4m3 codes directly
    KEY_FORMAT: str
    PAGE_SIZE: int  # rows per page, or 0 if keys are packed
    PAGE_UNIT: int  # page strides are given in units of this many elements
    SCALES: str  # the keys' scales: "none", "array", or "page" if they follow the codes in each page


def packed_shape(call: Any, block_h: int, block_d: int, scales: Any = None) -> Shape:
    """The `Shape` of a call over packed keys with elements of 16 or 32 bits, which may have an array of scales."""
    return Shape(
        HEADS=call.num_heads,
        BLOCK_H=block_h,
        D=call.head_dim,
        BLOCK_D=block_d,
        Q_FORMAT="plain",
        KEY_FORMAT="plain",
        PAGE_SIZE=0,
        PAGE_UNIT=1,
        SCALES="none" if scales is None else "array",
    )


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Config(Constants):
    """The compile-time constants of a logits kernel."""

    SHAPE: Shape
    SIGHT: Sight
    BLOCK_N: int  # keys per product
    BLOCK_T: int  # tokens per program of the tile kernel
    FILL: bool  # whether logits of unseen keys are set to -inf; otherwise they are not written
    HAS_CANDIDATES: bool = False  # whether each token has a list of candidate blocks and sees only their keys
    CANDIDATE_SIZE: int = 1  # keys per candidate block


class Tables(NamedTuple):
    """The arrays and numbers that determine which keys a token sees."""

    batch: Batch  # the sequences, if keys are in pages
    starts_ptr: tl.tensor  # each token's range [start, stop), if keys are packed
    stops_ptr: tl.tensor
    num_columns: tl.tensor  # columns of the logits; if keys are packed, the number of keys
    longest: tl.tensor  # the maximum number of keys that a token sees in its range


class Sequence(NamedTuple):
    """A token's sequence. For a token without one, the sequence is empty and `seq` is 0."""

    seq: tl.tensor
    start: tl.tensor
    stop: tl.tensor
    kv_len: tl.tensor


class Queries(NamedTuple):
    """The queries [tokens, heads, D] and their weights [tokens, heads]."""

    ptr: tl.tensor
    token_stride: tl.tensor
    head_stride: tl.tensor
    weights_ptr: tl.tensor
    weights_stride: tl.tensor


class KeyArray(NamedTuple):
    """The keys, in pages or packed. Packed keys count as a single page."""

    ptr: tl.tensor
    page_stride: tl.tensor
    slot_stride: tl.tensor
    scale_ptr: tl.tensor
    scale_page_stride: tl.tensor
    scale_slot_stride: tl.tensor


class Operands(NamedTuple):
    """The addresses of the products' operands."""

    queries: Queries
    keys: KeyArray
    table: PageTable


class KeyBlock(NamedTuple):
    """The locations of a block of keys."""

    place: tl.tensor  # the offset of each key's first element in the array of keys
    page: tl.tensor  # each key's page, or -1 for a key that may not be read


class Held(NamedTuple):
    """Operands that a loop holds in registers or shared memory. An operand that is None is loaded in each iteration."""

    keys: Any = None
    queries: Any = None  # transposed
    weights: Any = None


class Walk(NamedTuple):
    """The keys of one token that a program visits, in blocks."""

    end: tl.tensor  # one past the index of the last block
    first: tl.tensor  # the token sees no keys outside [first, last)
    last: tl.tensor
    candidates_ptr: tl.tensor
    num_candidates: tl.tensor


@triton.jit
def clamped(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def find_sequence(token, batch):
    """The `Sequence` of a token. Its index is the number of sequences that end at or before the token."""
    seq = 0
    for first in range(0, batch.num_seqs, SEQUENCES):
        index = first + tl.arange(0, SEQUENCES)
        stops = tl.load(batch.cu_q_lens_ptr + index + 1, mask=index < batch.num_seqs, other=LARGEST_INT)
        seq += tl.sum((stops <= token).to(tl.int32), 0)
    live = seq < batch.num_seqs
    seq = tl.where(live, seq, 0)
    start = query_edge(batch.cu_q_lens_ptr, seq, batch.num_tokens)
    stop = query_edge(batch.cu_q_lens_ptr, tl.where(live, seq + 1, 0), batch.num_tokens)
    live = live & (start <= token) & (token < stop)
    kv_len = clamped(tl.load(batch.kv_lens_ptr + seq, mask=live, other=0), 0, batch.capacity)
    return Sequence(tl.where(live, seq, 0), tl.where(live, start, token), tl.where(live, stop, token), kv_len)


@triton.jit
def seen_in_sequence(token, sequence, RATIO: tl.constexpr):
    """The number of keys in `sequence` that one of its tokens sees."""
    seen = tl.maximum(sequence.kv_len - (sequence.stop - token) + 1, 0) // RATIO
    return tl.where(sequence.start < sequence.stop, seen, 0)


@triton.jit
def seen_range(token, exists, tables):
    """The range [first, last) of packed keys that each token sees; it is empty for a token that does not exist."""
    first = clamped(tl.load(tables.starts_ptr + token, mask=exists, other=0), 0, tables.num_columns)
    last = clamped(tl.load(tables.stops_ptr + token, mask=exists, other=0), 0, tables.num_columns)
    last = tl.where(last - first > tables.longest, first + tables.longest, last)
    return first, tl.maximum(first, last)


@triton.jit
def seen_by(token, tables, SIGHT: tl.constexpr):
    """(sequence, first, last) of a token, which sees the keys [first, last) of that sequence."""
    if SIGHT.PAGED:
        sequence = find_sequence(token, tables.batch)
        seq = sequence.seq
        first = 0
        last = seen_in_sequence(token, sequence, SIGHT.RATIO)
    else:
        seq = 0
        first, last = seen_range(token, True, tables)
    return seq, first, last


@triton.jit
def pages_of_keys(keys, readable, seq, table, PAGE_SIZE: tl.constexpr):
    """The page of each key, or -1 for a key without a page. Packed keys are on page 0."""
    if PAGE_SIZE:
        table_ptr = table.ptr + seq.to(tl.int64) * table.stride
        page = tl.load(table_ptr + keys // PAGE_SIZE, mask=readable, other=-1)
        page = tl.where((page >= 0) & (page < table.num_pages), page, -1)
    else:
        page = tl.where(readable, 0, -1)
    return page


@triton.jit
def key_places(keys, page, array, SHAPE: tl.constexpr):
    """The offset of each key's first element in the array of keys."""
    if SHAPE.PAGE_SIZE:
        slot = keys % SHAPE.PAGE_SIZE
        place = page.to(tl.int64) * array.page_stride * SHAPE.PAGE_UNIT
        if SHAPE.SCALES == "page":  # offsets within such a page fit 32 bits
            place += slot * SHAPE.D
        else:
            place += slot.to(tl.int64) * array.slot_stride
    else:
        place = keys.to(tl.int64) * array.slot_stride
    return place


@triton.jit
def load_scales(keys, page, array, SHAPE: tl.constexpr):
    """The keys' scales; 0 for keys that may not be read."""
    PAGE_SIZE: tl.constexpr = SHAPE.PAGE_SIZE
    if SHAPE.SCALES == "page":
        scales = array.ptr + page.to(tl.int64) * array.page_stride * SHAPE.PAGE_UNIT + PAGE_SIZE * SHAPE.D
        places = (scales + keys % PAGE_SIZE * 4).to(tl.pointer_type(tl.float32), bitcast=True)
    elif PAGE_SIZE:
        place = page.to(tl.int64) * array.scale_page_stride
        places = array.scale_ptr + place + (keys % PAGE_SIZE).to(tl.int64) * array.scale_slot_stride
    else:
        places = array.scale_ptr + keys.to(tl.int64) * array.scale_slot_stride
    return tl.load(places, mask=page >= 0, other=0)


@triton.jit
def in_format(ptr, FORMAT: tl.constexpr):
    """The pointer, cast to float8 elements if matrix units multiply e4m3 codes directly."""
    if FORMAT == "e4m3_units":
        ptr = ptr.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    return ptr


@triton.jit
def load_keys(block, first_column, operands, SHAPE: tl.constexpr, IN_FLOAT16: tl.constexpr):
    """A block of the keys' columns [BLOCK_N, BLOCK_D] as an operand; keys that may not be read are 0.

    e4m3 codes are converted to the queries' dtype or, if IN_FLOAT16, to float16, which takes one exact conversion.
    """
    d = first_column + tl.arange(0, SHAPE.BLOCK_D)
    mask = (block.page >= 0)[:, None]
    if SHAPE.D % SHAPE.BLOCK_D:
        mask = mask & (d < SHAPE.D)[None, :]
    stored = tl.load(
        in_format(operands.keys.ptr, SHAPE.KEY_FORMAT) + block.place[:, None] + d[None, :],
        mask=mask,
        other=0.0 if SHAPE.KEY_FORMAT == "e4m3_units" else 0,
    )
    if SHAPE.KEY_FORMAT != "plain" and SHAPE.KEY_FORMAT != "e4m3_units":
        if IN_FLOAT16 or SHAPE.Q_FORMAT != "plain":
            stored = decode(stored, SHAPE.KEY_FORMAT, tl.float16)
        else:
            stored = decode(stored, SHAPE.KEY_FORMAT, operands.queries.ptr.dtype.element_ty)
    return stored


@triton.jit
def load_queries(token, first_head, first_column, queries, SHAPE: tl.constexpr):
    """A block of one token's heads and columns [BLOCK_H, BLOCK_D] as an operand."""
    d = first_column + tl.arange(0, SHAPE.BLOCK_D)
    head = first_head + tl.arange(0, SHAPE.BLOCK_H)
    place = token.to(tl.int64) * queries.token_stride + head.to(tl.int64) * queries.head_stride
    places = in_format(queries.ptr, SHAPE.Q_FORMAT) + place[:, None] + d[None, :]
    if SHAPE.HEADS % SHAPE.BLOCK_H or SHAPE.D % SHAPE.BLOCK_D:
        mask = (head < SHAPE.HEADS)[:, None] & (d < SHAPE.D)[None, :]
        stored = tl.load(places, mask=mask, other=0.0 if SHAPE.Q_FORMAT == "e4m3_units" else 0)
    else:
        stored = tl.load(places)
    if SHAPE.Q_FORMAT != "plain" and SHAPE.Q_FORMAT != "e4m3_units":
        stored = decode(stored, SHAPE.Q_FORMAT, tl.float16)
    return stored


@triton.jit
def load_weights(token, first_head, queries, SHAPE: tl.constexpr):
    head = first_head + tl.arange(0, SHAPE.BLOCK_H)
    place = queries.weights_ptr + token.to(tl.int64) * queries.weights_stride + head
    return tl.load(place, mask=head < SHAPE.HEADS, other=0) if SHAPE.HEADS % SHAPE.BLOCK_H else tl.load(place)


@triton.jit
def weighted(products, weights, first_head, SHAPE: tl.constexpr):
    """The weighted sum over heads of products [BLOCK_N, BLOCK_H]. Negative products count as 0; NaN stays NaN."""
    positive = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if SHAPE.HEADS % SHAPE.BLOCK_H or SHAPE.BLOCK_H <= 16:
        head = first_head + tl.arange(0, SHAPE.BLOCK_H)
        total = sum_of_products(positive, weights[None, :], (head < SHAPE.HEADS)[None, :], 1)
    else:
        total = tl.sum(positive * weights[None, :], 1)
    return total


@triton.jit
def scores_of_heads(token, first_head, block, operands, held, SHAPE: tl.constexpr, IN_FLOAT16: tl.constexpr):
    """The contribution of a block of heads to one token's logits over a block of keys, without the keys' scales."""
    products = tl.zeros([block.page.shape[0], SHAPE.BLOCK_H], tl.float32)
    if SHAPE.D <= SHAPE.BLOCK_D:
        k = load_keys(block, 0, operands, SHAPE, IN_FLOAT16) if held.keys is None else held.keys
        if held.queries is None:
            q = tl.trans(load_queries(token, first_head, 0, operands.queries, SHAPE))
        else:
            q = held.queries
        products = matmul(k, q, products)
    else:
        for first_column in range(0, SHAPE.D, SHAPE.BLOCK_D):
            k = load_keys(block, first_column, operands, SHAPE, IN_FLOAT16)
            q = load_queries(token, first_head, first_column, operands.queries, SHAPE)
            products = matmul(k, tl.trans(q), products)
    w = load_weights(token, first_head, operands.queries, SHAPE) if held.weights is None else held.weights
    return weighted(products, w, first_head, SHAPE)


@triton.jit
def scores_of(token, block, operands, held, SHAPE: tl.constexpr, IN_FLOAT16: tl.constexpr):
    """One token's logits over a block of keys, without the keys' scales.

    If there are several blocks of heads, a loop visits them. Unrolled, the loop would spill.
    """
    if SHAPE.HEADS <= SHAPE.BLOCK_H:
        total = scores_of_heads(token, 0, block, operands, held, SHAPE, IN_FLOAT16)
    else:
        total = tl.zeros([block.page.shape[0]], tl.float32)
        for first_head in range(0, SHAPE.HEADS, SHAPE.BLOCK_H):
            total += scores_of_heads(token, first_head, block, operands, held, SHAPE, IN_FLOAT16)
    return total


class Run(NamedTuple):
    """A run of neighbouring tokens [begin, end), which see no keys outside [low, high)."""

    begin: tl.tensor
    end: tl.tensor
    low: tl.tensor
    high: tl.tensor


class Logits(NamedTuple):
    """The array of logits; `ptr` is the address of the row of token 0, which may lie outside the array."""

    ptr: tl.tensor
    row_stride: tl.tensor


@triton.jit
def logits_of_run(run, tile_start, sequence, tables, operands, logits, CONFIG: tl.constexpr):
    """Write the logits of a run of tokens over a block of keys. With pages, all tokens belong to `sequence`."""
    SHAPE: tl.constexpr = CONFIG.SHAPE
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    keys = tile_start + tl.arange(0, BLOCK_N)
    if (tile_start < run.high) & (tile_start + BLOCK_N > run.low):
        readable = (keys >= run.low) & (keys < run.high)
        page = pages_of_keys(keys, readable, sequence.seq, operands.table, SHAPE.PAGE_SIZE)
        block = KeyBlock(key_places(keys, page, operands.keys, SHAPE), page)
        held_keys = None
        if SHAPE.D <= SHAPE.BLOCK_D:
            held_keys = load_keys(block, 0, operands, SHAPE, False)
        scale = None
        if SHAPE.SCALES != "none":
            scale = load_scales(keys, page, operands.keys, SHAPE)
        for index in range(run.end - run.begin):
            token = run.begin + index
            scores = scores_of(token, block, operands, Held(held_keys), SHAPE, False)
            if SHAPE.SCALES != "none":
                scores = scores * scale
            if CONFIG.SIGHT.PAGED:
                first = 0
                last = seen_in_sequence(token, sequence, CONFIG.SIGHT.RATIO)
            else:
                first, last = seen_range(token, True, tables)
            seen = (keys >= first) & (keys < last)
            scores = tl.where(seen & (page >= 0), scores, float("-inf"))
            row = logits.ptr + token.to(tl.int64) * logits.row_stride
            if CONFIG.SIGHT.RELATIVE:
                tl.store(row + (keys - first), scores, mask=seen)
            elif CONFIG.FILL:
                tl.store(row + keys, scores, mask=keys < tables.num_columns)
            else:
                tl.store(row + keys, scores, mask=seen)
    elif CONFIG.FILL:
        for index in range(run.end - run.begin):
            token = run.begin + index
            row = logits.ptr + token.to(tl.int64) * logits.row_stride
            tl.store(row + keys, tl.full([BLOCK_N], float("-inf"), tl.float32), mask=keys < tables.num_columns)


@triton.jit(do_not_specialize=VARYING)
def tile_logits_kernel(
    q_ptr, keys_ptr, weights_ptr, scale_ptr, starts_ptr, stops_ptr, page_indices_ptr, kv_lens_ptr, cu_q_lens_ptr,
    num_seqs_ptr, given_logits_ptr, logits_ptr,
    first_token, num_rows, num_tokens, max_num_seqs, capacity, num_kv_tokens, longest, num_pages, table_stride,
    q_token_stride, q_head_stride, weights_stride, page_stride, slot_stride, scale_page_stride, scale_slot_stride,
    row_stride, CONFIG: tl.constexpr,
):  # fmt: skip
    """Compute the logits of a block of tokens over a block of keys. With pages, each sequence's tokens are one run."""
    BLOCK_T: tl.constexpr = CONFIG.BLOCK_T
    tile_start = tl.program_id(0) * CONFIG.BLOCK_N
    token = first_token + tl.program_id(1) * BLOCK_T
    end = tl.minimum(token + BLOCK_T, first_token + num_rows)
    num_seqs = count_sequences(num_seqs_ptr, max_num_seqs, CONFIG.SIGHT.HAS_NUM_SEQS)
    batch = Batch(cu_q_lens_ptr, kv_lens_ptr, num_seqs, max_num_seqs, num_tokens, capacity)
    tables = Tables(batch, starts_ptr, stops_ptr, num_kv_tokens, longest)
    operands = Operands(
        Queries(q_ptr, q_token_stride, q_head_stride, weights_ptr, weights_stride),
        KeyArray(keys_ptr, page_stride, slot_stride, scale_ptr, scale_page_stride, scale_slot_stride),
        PageTable(page_indices_ptr, table_stride, num_pages),
    )
    logits = Logits(logits_ptr - tl.cast(first_token, tl.int64) * row_stride, row_stride)
    if CONFIG.SIGHT.PAGED:
        while token < end:
            sequence = find_sequence(token, batch)
            stop = tl.minimum(tl.maximum(sequence.stop, token + 1), end)
            high = seen_in_sequence(stop - 1, sequence, CONFIG.SIGHT.RATIO)
            logits_of_run(Run(token, stop, 0, high), tile_start, sequence, tables, operands, logits, CONFIG)
            token = stop
    else:
        tokens = token + tl.arange(0, BLOCK_T)
        first, last = seen_range(tokens, tokens < end, tables)
        low = tl.min(tl.where(first < last, first, LARGEST_INT), 0)
        high = tl.max(tl.where(first < last, last, 0), 0)
        sequence = Sequence(0, 0, 0, 0)
        logits_of_run(Run(token, end, low, high), tile_start, sequence, tables, operands, logits, CONFIG)


@triton.jit
def walked_keys(block, walk, CONFIG: tl.constexpr):
    """(keys, seen) of block `block` of a walk; `seen` masks the keys that the token sees.

    Block 0 begins at `walk.first`, rounded down to a multiple of BLOCK_N. With candidates, a walk visits the keys of
    the candidate blocks instead. Candidate blocks are numbered from `walk.first` if RELATIVE, else from key 0. After
    the last block, `seen` is False.
    """
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    SIZE: tl.constexpr = CONFIG.CANDIDATE_SIZE
    step = block * BLOCK_N + tl.arange(0, BLOCK_N)
    if CONFIG.HAS_CANDIDATES:
        base = walk.first if CONFIG.SIGHT.RELATIVE else 0
        entry = step // SIZE
        num_entries = tl.where(block < walk.end, walk.num_candidates, 0)
        candidate = tl.load(walk.candidates_ptr + entry, mask=entry < num_entries, other=-1)
        known = (candidate >= 0) & (candidate <= (walk.last - base - 1) // SIZE)
        position = tl.where(known, candidate, 0) * SIZE + step % SIZE
        seen = known & (position >= walk.first - base) & (position < walk.last - base)
        keys = base + tl.where(seen, position, 0)
    else:
        keys = walk.first // BLOCK_N * BLOCK_N + step
        seen = (keys >= walk.first) & (keys < tl.where(block < walk.end, walk.last, walk.first))
    return keys, seen


@triton.jit
def walk_keys(token, seq, begin, walk, operands, row_ptr, CONFIG: tl.constexpr):
    """Write one token's logits of seen keys, from block `begin` of its walk on. Pages are looked up a block ahead."""
    SHAPE: tl.constexpr = CONFIG.SHAPE
    HOLD: tl.constexpr = SHAPE.HEADS <= SHAPE.BLOCK_H and SHAPE.D <= SHAPE.BLOCK_D
    BFLOAT16: tl.constexpr = operands.queries.ptr.dtype.element_ty == tl.bfloat16
    IN_FLOAT16: tl.constexpr = HOLD and SHAPE.KEY_FORMAT != "plain" and BFLOAT16
    queries = None
    weights = None
    if HOLD:
        queries = load_queries(token, 0, 0, operands.queries, SHAPE)
        weights = load_weights(token, 0, operands.queries, SHAPE)
        if IN_FLOAT16:
            queries, unit = in_float16(queries)
            weights = weights * unit
        queries = tl.trans(queries)  # in the loop, Triton 3.6 to 3.9 would copy them to shared memory every time
    keys, seen = walked_keys(begin, walk, CONFIG)
    page = pages_of_keys(keys, seen, seq, operands.table, SHAPE.PAGE_SIZE)
    for index in range(walk.end - begin):
        block = KeyBlock(key_places(keys, page, operands.keys, SHAPE), page)
        scores = scores_of(token, block, operands, Held(None, queries, weights), SHAPE, IN_FLOAT16)
        if SHAPE.SCALES != "none":
            scores = scores * load_scales(keys, page, operands.keys, SHAPE)
        scores = tl.where(page >= 0, scores, float("-inf"))
        tl.store(row_ptr + (keys - walk.first if CONFIG.SIGHT.RELATIVE else keys), scores, mask=seen)
        keys, seen = walked_keys(begin + index + 1, walk, CONFIG)
        page = pages_of_keys(keys, seen, seq, operands.table, SHAPE.PAGE_SIZE)


@triton.jit(do_not_specialize=VARYING)
def walk_logits_kernel(
    q_ptr, keys_ptr, weights_ptr, scale_ptr, starts_ptr, stops_ptr, page_indices_ptr, kv_lens_ptr, cu_q_lens_ptr,
    num_seqs_ptr, candidates_ptr, given_logits_ptr, logits_ptr,
    first_token, num_tokens, max_num_seqs, capacity, num_kv_tokens, longest, num_pages, table_stride, num_parts,
    num_entries, candidates_stride,
    q_token_stride, q_head_stride, weights_stride, page_stride, slot_stride, scale_page_stride, scale_slot_stride,
    row_stride, CONFIG: tl.constexpr,
):  # fmt: skip
    """Compute one token's logits over one part of its keys. The last parts may have fewer blocks than the others."""
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    token = first_token + tl.program_id(0)
    part = tl.program_id(1)
    num_seqs = count_sequences(num_seqs_ptr, max_num_seqs, CONFIG.SIGHT.HAS_NUM_SEQS)
    batch = Batch(cu_q_lens_ptr, kv_lens_ptr, num_seqs, max_num_seqs, num_tokens, capacity)
    tables = Tables(batch, starts_ptr, stops_ptr, num_kv_tokens, longest)
    operands = Operands(
        Queries(q_ptr, q_token_stride, q_head_stride, weights_ptr, weights_stride),
        KeyArray(keys_ptr, page_stride, slot_stride, scale_ptr, scale_page_stride, scale_slot_stride),
        PageTable(page_indices_ptr, table_stride, num_pages),
    )
    seq, first, last = seen_by(token, tables, CONFIG.SIGHT)
    row_ptr = logits_ptr + tl.program_id(0).to(tl.int64) * row_stride
    length = num_entries * CONFIG.CANDIDATE_SIZE if CONFIG.HAS_CANDIDATES else last - first // BLOCK_N * BLOCK_N
    blocks = tl.where(first < last, (length + BLOCK_N - 1) // BLOCK_N, 0)
    blocks_of_part = tl.maximum((blocks + num_parts - 1) // num_parts, LEAST_BLOCKS)
    begin = part * blocks_of_part
    end = tl.minimum(begin + blocks_of_part, blocks)
    candidates_ptr += token.to(tl.int64) * candidates_stride
    walk_keys(token, seq, begin, Walk(end, first, last, candidates_ptr, num_entries), operands, row_ptr, CONFIG)
    if CONFIG.FILL:
        share = (num_kv_tokens + num_parts - 1) // num_parts
        stop = tl.minimum((part + 1) * share, num_kv_tokens)
        for start in range(part * share, stop, FILLED):
            column = start + tl.arange(0, FILLED)
            unseen = (column < stop) & ((column < first) | (column >= last))
            tl.store(row_ptr + column, tl.full([FILLED], float("-inf"), tl.float32), mask=unseen)


@triton.jit
def listed_keys(lists_ptr, token, block, list_stride, list_length, num_keys, BLOCK_N: tl.constexpr):
    """(column, key, page) of a block of entries in a token's list of packed keys; page -1 if an entry names no key."""
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    entries = lists_ptr + token.to(tl.int64) * list_stride + column
    key = tl.load(entries, mask=column < list_length, other=-1)
    seen = (key >= 0) & (key < num_keys)
    return column, tl.where(seen, key, 0), tl.where(seen, 0, -1)


@triton.jit(do_not_specialize=VARYING)
def list_logits_kernel(
    q_ptr, keys_ptr, weights_ptr, scale_ptr, lists_ptr,
    logits_ptr,
    num_kv_tokens, num_entries, list_stride, q_token_stride, q_head_stride, weights_stride, slot_stride,
    scale_slot_stride, SHAPE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute one token's logits over a block of the entries of its list."""
    token = tl.program_id(0)
    column, key, page = listed_keys(
        lists_ptr, token, tl.program_id(1), list_stride, num_entries, num_kv_tokens, BLOCK_N
    )
    operands = Operands(
        Queries(q_ptr, q_token_stride, q_head_stride, weights_ptr, weights_stride),
        KeyArray(keys_ptr, 0, slot_stride, scale_ptr, 0, scale_slot_stride),
        PageTable(lists_ptr, 0, 1),
    )
    block = KeyBlock(key_places(key, page, operands.keys, SHAPE), page)
    scores = scores_of(token, block, operands, Held(), SHAPE, False)
    if SHAPE.SCALES != "none":
        scores = scores * load_scales(key, page, operands.keys, SHAPE)
    scores = tl.where(page >= 0, scores, float("-inf"))
    tl.store(logits_ptr + token.to(tl.int64) * num_entries + column, scores, mask=column < num_entries)


@triton.jit(do_not_specialize=VARYING)
def fill_kernel(given_logits_ptr, logits_ptr, count, BLOCK: tl.constexpr):
    """Set all logits to -inf, for kernels that write only the logits of seen keys."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(logits_ptr + index, tl.full([BLOCK], float("-inf"), tl.float32), mask=index < count)
