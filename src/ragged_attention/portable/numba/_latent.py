"""Attention over latent rows: the kernel of `ragged_mla_attention`, `mla_decode` and `sparse_mla_prefill`.

A latent row is a key, and its first columns are the value, so it is read once for both. A *job* is the set of query
rows of one KV head that share keys: in a dense call the rows of all query tokens of a sequence, in a sparse call the
rows of one query token. A *unit* is a range of a job's rows with one split of the keys that they see, and a program
computes one unit for one KV head. Sparse prefill is sparse decode with one token per sequence.

In a dense call, positions are those of the sequence. In a sparse call, a position is an index into a list of slots,
which a second list may continue. A position has no key if its page is not in the cache or its list entry is not a slot.
A ragged call numbers query tokens across all sequences, other calls number them from 0 in each sequence.
"""

import numpy as np

from ragged_attention.portable.numba import _formats, _masks, _splits, _tiles
from ragged_attention.portable.numba._formats import BFLOAT16, scale_of, size_of
from ragged_attention.portable.numba._latent_rows import (
    ROWS,
    pair_latents,
    place_of,
    read_latents,
    rows_fields,
)
from ragged_attention.portable.numba._max_logits import cap_of_products, clear_largest, keep_largest
from ragged_attention.portable.numba._records import Fields, record_in, stride_names
from ragged_attention.portable.numba._sequences import clearer_of_gaps, num_sequences, packed_queries_of, within
from ragged_attention.portable.numba._softmax import LN2, LOG2E
from ragged_attention.portable.numba._vectors import (
    LANES,
    compiled,
    float_at,
    inlined,
    int32_at,
    int_at,
    load,
    set_float,
    set_int,
    splat,
    store,
)

FIELDS = Fields(
    operands=("q", "kv", "extra_kv", "lists", "extra_lists", "lens", "extra_lens", "cu_q_lens", "num_seqs", "sinks",
              "kv_scale", "rope_scale", "key_ranges"),
    results=("out", "lse", "max_logits", "head_max_logits"),
    numbers=(
        "max_num_seqs", "num_tokens", "num_q_heads", "num_kv_heads", "head_dim", "v_head_dim", "sparse", "causal",
        "sliding_window", "num_ranges", "return_max_logits", "scales_rope", "scale", "soft_cap", "out_format",
        "out_seq_stride",
        *stride_names("lse", "seq token head"), *rows_fields("kv_"), *rows_fields("extra_"), "length", "extra_length",
        "block_rows", "block_kv", "num_splits", "segment_kv", "pairs", "floats",
    ),
    plan=_splits.SPLITS,
    strides={"q": "seq token head", "lists": "seq token head"}
    | dict.fromkeys(("lens", "extra_lists", "extra_lens"), "seq token"),
    formats=("q",),
    scales=("kv_scale", "rope_scale"),
    floats=("scale", "soft_cap", "work"),
    branches=(_masks.divide_spans, _masks.drop_unseen, _masks.hide_gaps, keep_largest, *_tiles.PRODUCTS),
)  # fmt: skip
NO_KEY = -1  # an empty entry of the table of a list's keys
SCATTER = 0x9E3779B1  # a prime near 2 ** 32 / golden ratio: its multiples modulo 2 ** 32 scatter evenly
call_of, kv_of, extra_of = FIELDS.at, record_in(ROWS, "kv_"), record_in(ROWS, "extra_")


# ---- dividing the work


@inlined
def tokens_of(call, seq):
    """The range (first, one past the last) of a sequence's query tokens."""
    return packed_queries_of(call, seq) if call.cu_q_lens else (0, call.num_tokens)


clear_gaps = clearer_of_gaps(packed_queries_of, _splits.clear)


@inlined
def length_of(lens, index, limit):
    return within(int32_at(lens, index), limit) if lens else limit


@compiled
def lengths_of(call, seq, token):
    """The lengths of a query token's two lists; in a dense call, its sequence's length and 0."""
    first = length_of(call.lens, seq * call.lens_seq_stride + token * call.lens_token_stride, call.length)
    if not call.extra_length:
        return first, 0
    index = seq * call.extra_lens_seq_stride + token * call.extra_lens_token_stride
    return first, length_of(call.extra_lens, index, call.extra_length)


@inlined
def seen_from(call, token, stop, length):
    """The range (first, one past the last) of positions that a query token sees; the first may be negative.

    The sequence's last query token, `stop` - 1, is at position `length` - 1.
    """
    position = length - stop + token
    left = position - call.sliding_window + 1 if call.sliding_window else 0
    return left, position + 1 if call.causal else length


@compiled
def divide(call, units):
    """Split all jobs into units, which are listed unless `units` is 0 (see `add_splits`); returns the total work."""
    work, group, call.num_units, call.num_partials = 0.0, call.num_q_heads // call.num_kv_heads, 0, 0
    for seq in range(num_sequences(call)):
        start, stop = tokens_of(call, seq)
        tokens = 1 if call.sparse else stop - start  # query tokens per job
        for token in range(start, stop, max(tokens, 1)):
            length = sum(lengths_of(call, seq, token))
            max_splits = max(call.num_splits // tokens, 1) if call.num_splits else 0
            for first in range(0, tokens * group, call.block_rows):
                last = min(first + call.block_rows, tokens * group)
                if call.key_ranges:
                    begin, end = token + first // group, token + (last - 1) // group + 1
                    work += _masks.divide_spans(call, units, seq, token, first, last, begin, end, length, max_splits)
                    continue
                low, high = 0, length
                if not call.sparse:
                    low = max(seen_from(call, token + first // group, stop, length)[0], 0)
                    high = max(min(seen_from(call, token + (last - 1) // group, stop, length)[1], length), low)
                work += _splits.add_splits(call, units, seq, token, first, last, low, high, high - low, max_splits)
    return work


plan_units = _splits.planner(divide)


def plan(address):
    """List the units, and in a ragged call write the results of queries that belong to no sequence."""
    call = call_of(address)
    if call.cu_q_lens:
        clear_gaps(call)
    clear_largest(call)
    return plan_units(call, 1)


# ---- one program


@inlined
def reads_in_place(call, tile):
    """Whether keys are multiplied in the cache itself, without being copied to the tile."""
    return tile.paired and kv_of(call).codes == BFLOAT16


@inlined
def keeps_order(call, tile):
    """Whether the columns of keys keep their order in pairs of bfloat16."""
    return reads_in_place(call, tile) or kv_of(call).group > 0


@inlined
def scale_of_cache(call, head):
    return scale_of(call.kv_scale, call.kv_scale_format, call.kv_scale_stride, call.kv_scale_number, head)


@inlined
def scale_of_logits(call, head):
    """The factor that turns products q . k into natural logits before the soft cap.

    If the cache has two scales, `read_queries` has already multiplied the queries by them.
    """
    return call.scale if call.scales_rope else call.scale * scale_of_cache(call, head)


@compiled
def scale_query(call, query, head):
    """Multiply the columns of a float32 query by the scales of the cache's columns."""
    rope_scale = scale_of(call.rope_scale, call.rope_scale_format, call.rope_scale_stride, call.rope_scale_number, head)
    columns, rotary = splat(scale_of_cache(call, head)), splat(rope_scale)
    for column in range(0, call.head_dim, LANES):
        store(query, column, load(query, column) * (columns if column < call.v_head_dim else rotary))


@inlined
def query_of(call, unit, head, row):
    """The query token and query head of a unit's row."""
    group, row = call.num_q_heads // call.num_kv_heads, unit.first + row
    return unit.token + row // group, head * group + row % group


@compiled
def read_queries(call, tile, unit, head):
    """Read a unit's queries and set the bounds of what each row sees; returns the number of rows."""
    rows, length = unit.last - unit.first, sum(lengths_of(call, unit.seq, unit.token))
    _, stop = tokens_of(call, unit.seq)
    _tiles.begin(tile, rows)
    for row in range(rows):
        token, q_head = query_of(call, unit, head, row)
        place = unit.seq * call.q_seq_stride + token * call.q_token_stride + q_head * call.q_head_stride
        source = call.q + size_of(call.q_format) * place
        _tiles.read_query(tile, row, call.q_format, source, call.head_dim, keeps_order(call, tile))
        if call.scales_rope:
            scale_query(call, tile.q + 4 * row * tile.width, head)
        left, right = (0, length) if call.sparse else seen_from(call, token, stop, length)
        if call.key_ranges:
            left, right = _masks.bounds_of(call, token, length)
        _tiles.set_bounds(tile, row, left, right)
    return rows


@compiled
def slot_of(call, seq, token, head, position, length):
    """A position's page, negative if it has none, and its slot in that page; `length` is the first list's length."""
    if not call.sparse:
        page = int32_at(call.lists, seq * call.lists_seq_stride + position // call.kv_page_size)
        return page if page < call.kv_num_pages else -1, position % call.kv_page_size
    if position < length:
        index = seq * call.lists_seq_stride + token * call.lists_token_stride + head * call.lists_head_stride
        slot, page_size, num_pages = int32_at(call.lists, index + position), call.kv_page_size, call.kv_num_pages
    else:
        index = seq * call.extra_lists_seq_stride + token * call.extra_lists_token_stride
        slot = int32_at(call.extra_lists, index + position - length)
        page_size, num_pages = call.extra_page_size, call.extra_num_pages
    return slot // page_size if 0 <= slot < num_pages * page_size else -1, slot % page_size


@compiled
def list_next(call, tile, unit, head, first, count, length):
    """List the rows of the next `count` positions, from `first` on; returns how many have no row.

    The addresses of the scales go to `next_v_sources`. `length` is the first list's length.
    """
    holes, kv, extra = 0, kv_of(call), extra_of(call)
    base = call.kv + head * kv.head_step
    for key in range(count):
        page, slot = slot_of(call, unit.seq, unit.token, head, first + key, length)
        row = scale = 0
        if page < 0:
            holes += 1
        elif not call.sparse or first + key < length:
            row, scale = place_of(kv, page, slot)
            row, scale = base + row, base + scale
        else:
            row, scale = place_of(extra, page, slot)
            row, scale = call.extra_kv + row, call.extra_kv + scale
        set_int(tile.next_sources, key, row)
        set_int(tile.next_v_sources, key, scale)
    return holes


@inlined
def table_size(call):
    """The number of entries of the table for `repeats_a_key`: a power of two, at least twice the keys in the lists."""
    size = 64
    while size < 2 * (call.length + call.extra_length):
        size *= 2
    return size


@compiled
def repeats_a_key(call, table, unit, head):
    """Whether the lists of a unit's token name a key more than once.

    The table is a hash table of the keys so far. A multiplication by SCATTER gives the entry at which the search for a
    key begins. The search ends at the first entry that is empty or has the key.
    """
    (length, others), size = lengths_of(call, unit.seq, unit.token), table_size(call)
    for entry in range(size):
        set_int(table, entry, NO_KEY)
    for position in range(length + others):
        page, slot = slot_of(call, unit.seq, unit.token, head, position, length)
        if page < 0:
            continue
        key = 2 * (page * (call.kv_page_size if position < length else call.extra_page_size) + slot)
        key += 0 if position < length else 1
        entry = (key * SCATTER >> 20) & (size - 1)
        stored = int_at(table, entry)
        while stored != NO_KEY and stored != key:
            entry = (entry + 1) & (size - 1)
            stored = int_at(table, entry)
        if stored == key:
            return True
        set_int(table, entry, key)
    return False


@inlined
def set_row_bytes(call, tile):
    """Set how many bytes are prefetched of a key, and of its scales if they are stored apart from the key."""
    kv, extra = kv_of(call), extra_of(call)
    tile.k_bytes = max(kv.row_bytes, extra.row_bytes)
    tile.scale_bytes = kv.scales_step if kv.group and kv.scales_step < kv.row_bytes else 0


@inlined
def tokens_of_unit(call, unit):
    """The range of a unit's query tokens."""
    group = call.num_q_heads // call.num_kv_heads
    return unit.token + unit.first // group, unit.token + (unit.last - 1) // group + 1


@compiled
def list_seen(call, tile, unit, head, first, stop, whole, length):
    """`list_next` for the next keys of a unit, as many as a tile holds.

    If not `whole`, keys that no row of the unit sees are treated as missing.
    """
    count = min(tile.keys, stop - first)
    holes = list_next(call, tile, unit, head, first, count, length)
    if not whole:
        first_token, last_token = tokens_of_unit(call, unit)
        holes += _masks.drop_unseen(call, tile, first_token, last_token, length, first, count)
    return holes


@inlined
def read_keys(call, tile, num_first, count):
    """Read `count` rows, the first `num_first` of them from the first cache.

    In a tile without pairs the keys are also the values. Keys that are multiplied in the cache are not read here.
    """
    kv, width, others = kv_of(call), tile.width, count - num_first
    sources, scales, row = tile.sources + 8 * num_first, tile.v_sources + 8 * num_first, tile.k + 4 * num_first * width
    if not tile.paired:
        read_latents(kv, tile.sources, tile.v_sources, tile.k, width, call.head_dim, num_first, tile.factors)
        read_latents(extra_of(call), sources, scales, row, width, call.head_dim, others, tile.factors)
    elif kv.group:
        pair_latents(kv, tile.sources, tile.v_sources, tile.k, width, num_first, tile.factors)
        pair_latents(extra_of(call), sources, scales, row, width, others, tile.factors)
    elif not reads_in_place(call, tile):
        _formats.pair_keys(kv.codes, tile.sources, tile.k, width, count)


@inlined
def read_values(call, tile, count):
    """Read the values of `count` keys of a paired tile: the beginnings of their rows, in pairs of keys."""
    kv, sources, codes = kv_of(call), tile.sources, kv_of(call).codes
    if kv.group:  # the values have already been read as parts of the keys
        sources, codes = tile.v_rows, BFLOAT16
        for key in range(count):
            set_int(tile.v_rows, key, int_at(tile.k_rows, key) if int_at(tile.sources, key) else 0)
    _formats.pair_values(codes, sources, tile.v, tile.v_width, call.v_head_dim, count)


@compiled
def attend(call, tile, unit, head, _, rows):
    """Attend from a unit's rows to its keys, one tile of keys after another."""
    length, _ = lengths_of(call, unit.seq, unit.token)
    factor = scale_of_logits(call, head) * (LOG2E if call.soft_cap == 0 else np.float32(1))
    tokens, group = tokens_of_unit(call, unit), call.num_q_heads // call.num_kv_heads
    first, stop, whole = _masks.seen_from(call, tokens, length, unit.low, unit.high)
    next_holes = list_seen(call, tile, unit, head, first, stop, whole, length)
    set_row_bytes(call, tile)
    tile.repeats = tile.paired and call.sparse and repeats_a_key(call, tile.table, unit, head)
    while first < stop:
        count, holes = min(tile.keys, stop - first), next_holes
        after = first + count
        if after == stop:
            after, stop, whole = _masks.seen_from(call, tokens, length, after, unit.high)
        _tiles.advance(tile)
        read_keys(call, tile, within(length - first, count) if call.sparse else count, count)
        next_holes = list_seen(call, tile, unit, head, after, stop, whole, length)
        _tiles.expect_next(tile, min(tile.keys, stop - after))
        keys = tile.sources if reads_in_place(call, tile) else tile.k_rows
        _tiles.multiply_keys(call, tile, keys, rows, first, count, factor, 0, 0, cap_of_products(call))
        if call.num_ranges > 1:
            _masks.hide_gaps(call, tile, unit.token, unit.first, rows, group, length, first, count)
        if call.return_max_logits:
            keep_largest(call, tile, head, unit.first, rows, group, first, count, holes)
            if call.num_ranges > 1:  # `keep_largest` may have capped the hidden logits
                _masks.hide_gaps(call, tile, unit.token, unit.first, rows, group, length, first, count)
        _tiles.weigh_keys(tile, rows, first, count, holes, 0, 0)
        if tile.paired:
            read_values(call, tile, count)
        _tiles.mix_values(call, tile, rows, count, False)
        first = after


@compiled
def finish(call, tile, unit, head, rows):
    """Write the results of a unit's rows after all of their splits are merged."""
    size, kv_scale = size_of(call.out_format), scale_of_cache(call, head)
    for row in range(rows):
        token, q_head = query_of(call, unit, head, row)
        place = unit.seq * call.out_seq_stride + (token * call.num_q_heads + q_head) * call.v_head_dim
        _splits.write_row(call, tile, row, q_head, call.out + size * place, kv_scale)
        place = unit.seq * call.lse_seq_stride + token * call.lse_token_stride + q_head * call.lse_head_stride
        _splits.write_lse(call, tile, row, place)
        if call.max_logits:
            set_float(call.max_logits, place, float_at(tile.m_i, row) * LN2)


def work(address):
    call = call_of(address)
    table = 8 * table_size(call) if call.pairs and call.sparse else 0
    return _splits.run_units(
        address, call, call.block_rows, not call.pairs, call.pairs, table, 0, False, read_queries, attend, finish
    )
