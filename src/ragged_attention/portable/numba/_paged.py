"""Attention over K and V, in pages of any layout or packed.

This is the kernel of `ragged_paged_attention`, `paged_attention`, `prefill_attention` and `varlen_attention`.

Packed keys are treated as pages of one key each; the index of a page is the row of its key.

A *block* is a range of consecutive queries of a sequence. The query heads that share a KV head are rows of one tile, so
each K and V is read once for all of them. A *unit* is a block with one split of the keys that it sees: keys that the
causal mask, the window, the ranges of keys or the lists of blocks of keys hide from the whole block are skipped. A
program computes one unit for one KV head or, if the unit has few rows, for several KV heads (`_paged_heads`). A block
with a large share of the work has several splits, and the last of them to finish merges them. How the work is divided
depends on the shapes, lengths and ranges alone.
"""

from ragged_attention.portable.numba import _masks, _selected, _splits, _tiles
from ragged_attention.portable.numba._formats import scale_of, size_of
from ragged_attention.portable.numba._max_logits import clear_largest, keep_largest
from ragged_attention.portable.numba._paged_heads import heads_together
from ragged_attention.portable.numba._paged_keys import keeps_order, keys_of, list_scales
from ragged_attention.portable.numba._paged_lists import (
    add_biases,
    attend_to_blocks,
    read_scaled_key,
    read_scaled_value,
)
from ragged_attention.portable.numba._paged_logits import (
    add_relative_bias,
    add_slopes,
    hide_undrafted,
    hide_unseen,
)
from ragged_attention.portable.numba._paged_scales import (
    add_wrong_values,
    expand_keys,
    expand_values,
    read_key_factors,
    read_value_factors,
)
from ragged_attention.portable.numba._paged_tiles import attend_to_range
from ragged_attention.portable.numba._records import Fields
from ragged_attention.portable.numba._scaled_rows import leaves_rests, side_fields
from ragged_attention.portable.numba._sequences import clearer_of_gaps, kv_len_of, num_sequences, queries_of
from ragged_attention.portable.numba._vectors import compiled, inlined, prefetch

FIELDS = Fields(
    operands=(
        "q", "k_pages", "v_pages", "kv_lens", "page_indices", "cu_q_lens", "cu_kv_lens", "num_seqs", "sinks",
        "alibi_slopes", "relative_bias", "k_scale", "v_scale", "k_scales", "v_scales", "draft_mask", "key_ranges",
        "selected",
    ),
    results=("out", "lse", "head_max_logits"),
    numbers=(
        "num_tokens", "num_q_heads", "num_kv_heads", "head_dim", "v_head_dim", "max_num_seqs", "layout", "out_format",
        "num_pages", "page_size", "capacity", "v_offset", "causal", "sliding_window", "drafted", "draft_width",
        "num_ranges", "num_lists", "num_selected", "block_size", "unlisted", "listed_scales", "listed_biases", "scale",
        "soft_cap", "bias_width", "bias_stride", "bias_at_own", "return_max_logits", "block_q", "block_kv", "decode_kv",
        "segment_kv", "pairs", "floats",
        *side_fields("k_"), *side_fields("v_"),
    ),
    plan=(*_splits.SPLITS, "named_size"),
    strides={"q": "token head", "page_indices": "seq", "draft_mask": "token"}
    | dict.fromkeys(("k_pages", "v_pages", "k_scales", "v_scales"), "page slot head"),
    formats=("q",),
    scales=("k_scale", "v_scale"),
    floats=("scale", "soft_cap", "work"),
    branches=(
        _selected.divide_lists, attend_to_blocks, add_biases, read_scaled_key, read_scaled_value, attend_to_range,
        _masks.divide_spans, _masks.drop_unseen, _masks.hide_gaps, hide_undrafted, add_slopes, add_relative_bias,
        list_scales, expand_keys, expand_values, read_key_factors, read_value_factors, add_wrong_values, hide_unseen,
        keep_largest, _splits.merge_kept, _splits.keep, *_tiles.PRODUCTS,
    ),
)  # fmt: skip
call_of = FIELDS.at
clear_gaps = clearer_of_gaps(queries_of, _splits.clear)


# ---- dividing the work


@compiled
def range_of(call, first_new, kv_len, first, last):
    """The range of keys that the queries [first, last) of a sequence see; query 0 is at position `first_new`."""
    low, high = 0, kv_len
    if call.causal and not call.drafted:
        high = min(first_new + last, kv_len)
    if call.sliding_window:
        low = max(first_new + first - call.sliding_window + 1, 0)
    return low, max(high, low)


@compiled
def divide(call, units):
    """Split all blocks into units, which are listed unless `units` is 0 (see `add_splits`); returns the total work."""
    work, call.num_units, call.num_partials, call.named_size = 0.0, 0, 0, 0
    for seq in range(num_sequences(call)):
        start, stop = queries_of(call, seq)
        kv_len = kv_len_of(call, seq)
        first_new = kv_len - (stop - start)
        for first in range(0, stop - start, call.block_q):
            last = min(first + call.block_q, stop - start)
            begin, end = start + first, start + last
            low, high = range_of(call, first_new, kv_len, first, last)
            if call.num_lists:
                low, high = (0, kv_len) if call.key_ranges else (low, high)
                work += _selected.divide_lists(call, units, seq, begin, end, low, high)
            elif call.key_ranges:
                work += _masks.divide_spans(call, units, seq, 0, begin, end, begin, end, kv_len, 0)
            elif call.segment_kv:
                work += _splits.add_segments(call, units, seq, 0, begin, end, low, high, high - low)
            else:
                work += _splits.add_splits(call, units, seq, 0, begin, end, low, high, high - low, 0)
    return work


plan_units = _splits.planner(divide)


def plan(address):
    """List the units, and write the results of queries that belong to no sequence."""
    call = call_of(address)
    clear_gaps(call)
    clear_largest(call)
    num_programs = plan_units(call, call.num_q_heads // call.num_kv_heads)
    call.heads = heads_together(call, num_programs)
    return num_programs


# ---- one program

TOKENS_AHEAD = 2  # how many tokens ahead queries are prefetched


@inlined
def read_queries(call, tile, unit, head):
    """Read a block's queries for a KV head and set the bounds of what each row sees; returns the number of rows."""
    group, (_, stop) = call.num_q_heads // call.num_kv_heads, queries_of(call, unit.seq)
    kv_len = kv_len_of(call, unit.seq)
    rows, row = (unit.last - unit.first) * group, 0
    in_order, summed = keeps_order(call, tile), leaves_rests(keys_of(call), tile)
    size = size_of(call.q_format)
    ahead = TOKENS_AHEAD * size * call.q_token_stride
    _tiles.begin(tile, rows)
    for token in range(unit.first, unit.last):
        left, right = _masks.seen_between(call, token, stop, kv_len)
        for q_head in range(head * group, (head + 1) * group):
            source = call.q + size * (token * call.q_token_stride + q_head * call.q_head_stride)
            prefetch(source + ahead, size * call.head_dim)
            _tiles.read_query(tile, row, call.q_format, source, call.head_dim, in_order)
            if summed:
                _tiles.sum_query(tile, row)
            _tiles.set_bounds(tile, row, left, right)
            row += 1
    return rows


@compiled
def attend_between(call, tile, unit, head, heads, rows, low, high):
    """Attend from a unit's rows to the keys [low, high)."""
    if call.num_lists:
        attend_to_blocks(call, tile, unit, head, low, high)
    else:
        attend_to_range(call, tile, unit, head, heads, rows, low, high)


@compiled
def attend(call, tile, unit, head, heads, rows):
    """Attend from a unit's rows to its keys, one segment after another if the call has segments."""
    low, high, size = unit.low, unit.high, call.segment_kv
    while size and low // size < (high - 1) // size:
        end = (low // size + 1) * size
        attend_between(call, tile, unit, head, heads, rows, low, end)
        _splits.keep(call, tile, rows)
        low = end
    attend_between(call, tile, unit, head, heads, rows, low, high)
    if size:
        _splits.merge_kept(call, tile, rows)


@compiled
def finish(call, tile, unit, head, rows):
    """Write the results of a block after all of its splits are merged."""
    group, size = call.num_q_heads // call.num_kv_heads, call.v_head_dim * size_of(call.out_format)
    v_scale = scale_of(call.v_scale, call.v_scale_format, call.v_scale_stride, call.v_scale_number, head)
    for row in range(rows):
        q_head = head * group + row % group
        place = (unit.first + row // group) * call.num_q_heads + q_head
        _splits.write_row(call, tile, row, q_head, call.out + size * place, v_scale)
        _splits.write_lse(call, tile, row, place)


def work(address):
    call = call_of(address)
    rows = call.block_q * (call.num_q_heads // call.num_kv_heads)
    named = call.named_size
    segments = call.segment_kv > 0
    return _splits.run_units(address, call, rows, False, call.pairs, 0, named, segments, read_queries, attend, finish)
