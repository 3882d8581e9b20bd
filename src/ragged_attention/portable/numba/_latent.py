"""Attention over latent rows: the kernel of `ragged_mla_attention`, of `mla_decode` and of `sparse_mla_prefill`.

A row is key and, its first columns, value, so it is read once. A *job* is what shares keys: in a dense call all query
tokens and heads of one KV head of a sequence, in a sparse call those of one token; sparse prefill is sparse decode of
one token per sequence. A program computes some rows of a job over one split of the keys that they see. A position is a
place in the page table's row, or in a list and then in the second list; one that is on no page, or lists no slot, has
no key. In a ragged call the tokens of all sequences are counted through, else those of each from 0.
"""

import numpy as np

from ragged_attention.portable.numba._formats import BFLOAT16, FLOAT16, FLOAT32, narrow, size_of
from ragged_attention.portable.numba._latent_rows import PLAIN, place_of, read_latents
from ragged_attention.portable.numba._records import NO_MEMORY, Fields, programs
from ragged_attention.portable.numba._scales import fields_of, scale_of
from ragged_attention.portable.numba._sequences import gaps_by, num_sequences, packed_queries_of
from ragged_attention.portable.numba._softmax import LN2, LOG2E, NOTHING, log_sum_exp, scale_row, weight_of_sink
from ragged_attention.portable.numba._splits import SHARES, SPLITS, is_last, provide, splits_of
from ragged_attention.portable.numba._tiles import (
    begin,
    mix_values,
    multiply_keys,
    new_tile,
    pair_keys,
    pair_values,
    read_query,
    tile_at,
    turn_to_next,
    weigh_keys,
    within,
)
from ragged_attention.portable.numba._vectors import (
    LANES,
    PAIRS,
    compiled,
    fill,
    float_at,
    inlined,
    int32_at,
    int_at,
    pasted,
    prefetch,
    release,
    set_float,
    set_int,
    zero,
)

CACHE = ("num_pages", "page_size", "page_stride", "slot_stride")
FIELDS = Fields(
    operands=("q", "kv", "extra_kv", "lists", "extra_lists", "lens", "extra_lens", "cu_q_lens", "num_seqs", "sinks",
              "kv_scale"),
    results=("out", "lse", "max_logits"),
    numbers=(
        "max_num_seqs", "num_tokens", "num_q_heads", "num_kv_heads", "d_qk", "d_v", "sparse", "causal", "window",
        "scale", "soft_cap", *fields_of("kv_scale"), "q_format", "out_format", "q_seq_stride", "q_token_stride",
        "q_head_stride", "out_seq_stride", "lse_seq_stride", "lse_token_stride", "lse_head_stride",
        "layout", "extra_layout", "cache_format", "head_stride", *CACHE, *(f"extra_{name}" for name in CACHE),
        "length", "list_seq_stride", "list_token_stride", "list_head_stride", "lens_seq_stride", "lens_token_stride",
        "extra_length", "extra_list_seq_stride", "extra_list_token_stride", "extra_lens_seq_stride",
        "extra_lens_token_stride", "block_rows", "block_kv", "num_splits", "num_threads",
    ),
    plan=SPLITS,
    floats=("scale", "soft_cap", "kv_scale_number", "work"),
)  # fmt: skip
call_of = FIELDS.at
UNIT = ("seq", "token", "first", "last", "low", "high", "split", "num_splits", "partial")
SEQ, TOKEN, FIRST, LAST, LOW, HIGH, SPLIT, NUM_SPLITS, PARTIAL = range(len(UNIT))


# ---- dividing the work


@inlined
def tokens_of(call, seq):
    """A sequence's first and one-past-last query token."""
    return packed_queries_of(call, seq) if call.cu_q_lens else (0, call.num_tokens)


gaps = gaps_by(packed_queries_of)


@inlined
def length_of(lens, index, most):
    return within(int32_at(lens, index), most) if lens else most


@compiled
def lengths_of(call, seq, token):
    """How many positions a query token has, those of the second list apart."""
    first = length_of(call.lens, seq * call.lens_seq_stride + token * call.lens_token_stride, call.length)
    if not call.extra_length:
        return first, 0
    index = seq * call.extra_lens_seq_stride + token * call.extra_lens_token_stride
    return first, length_of(call.extra_lens, index, call.extra_length)


@inlined
def seen_from(call, token, stop, length):
    """The positions that a query token sees, from the first to before the last; `stop` is behind its sequence's last
    token, which stands at the last of `length` positions."""
    position = length - stop + token
    left = position - call.window + 1 if call.window else 0
    return left, position + 1 if call.causal else length


@compiled
def divide(call, units):
    """Count the units, or list them where `units` is their memory; returns the work of all, `call.work` once known."""
    work, count, partials = 0.0, 0, 0
    group = call.num_q_heads // call.num_kv_heads
    for seq in range(num_sequences(call)):
        start, stop = tokens_of(call, seq)
        tokens = 1 if call.sparse else stop - start  # of a job
        for token in range(start, stop, max(tokens, 1)):
            length = sum(lengths_of(call, seq, token))
            most = max(call.num_splits // tokens, 1) if call.num_splits else 0
            for first in range(0, tokens * group, call.block_rows):
                last = min(first + call.block_rows, tokens * group)
                low, high = 0, length
                if not call.sparse:
                    low = max(seen_from(call, token + first // group, stop, length)[0], 0)
                    high = max(min(seen_from(call, token + (last - 1) // group, stop, length)[1], length), low)
                keys = high - low
                num_splits = splits_of((last - first) * keys, keys, call.work, SHARES, most)
                step = (keys + num_splits - 1) // num_splits
                for split in range(num_splits if units else 0):
                    unit = units + 8 * len(UNIT) * (count + split)
                    set_int(unit, SEQ, seq)
                    set_int(unit, TOKEN, token)
                    set_int(unit, FIRST, first)
                    set_int(unit, LAST, last)
                    set_int(unit, LOW, low + split * step)
                    set_int(unit, HIGH, min(low + (split + 1) * step, high))
                    set_int(unit, SPLIT, split)
                    set_int(unit, NUM_SPLITS, num_splits)
                    set_int(unit, PARTIAL, partials)
                work += (last - first) * keys
                count += num_splits
                partials += num_splits if num_splits > 1 else 0
    call.num_units, call.num_partials = count, partials
    return work


def plan(address):
    """List the units: some rows of a job with the splits of their keys; a program is one of them for one KV head."""
    call = call_of(address)
    if call.cu_q_lens:
        for first, stop in gaps(call):
            row = call.num_q_heads * call.d_v * size_of(call.out_format)
            zero(call.out + first * row, (stop - first) * row)
            if call.lse:
                fill(call.lse, first * call.num_q_heads, stop * call.num_q_heads, NOTHING)
    call.work = 0.0
    call.work = divide(call, 0)
    divide(call, 0)
    if not provide(call, 8 * len(UNIT), call.block_rows * (call.d_v + 2), call.num_kv_heads):
        return NO_MEMORY
    divide(call, call.units)
    return call.num_units * call.num_kv_heads


# ---- one program


@inlined
def pairs_up(call):
    """Whether products are those of bfloat16: plain numbers that it holds exactly, in whole vectors.

    Not of lists, which may have a key many times: what rounding takes from its equal weights would add up.
    """
    return (
        PAIRS
        and not call.sparse
        and call.layout == PLAIN
        and call.q_format == BFLOAT16
        and call.cache_format != FLOAT32
        and call.cache_format != FLOAT16
        and call.d_qk % (2 * LANES) == 0
        and call.d_v % LANES == 0
    )


@inlined
def reads_in_place(call, tile):
    """Whether keys are multiplied where they lie."""
    return tile.paired and call.cache_format == BFLOAT16


@inlined
def scale_of_cache(call, head):
    return scale_of(call.kv_scale, call.kv_scale_format, call.kv_scale_stride, call.kv_scale_number, head)


@inlined
def query_of(call, unit, head, row):
    """The query token and head of a unit's row."""
    group, row = call.num_q_heads // call.num_kv_heads, int_at(unit, FIRST) + row
    return int_at(unit, TOKEN) + row // group, head * group + row % group


@compiled
def read_queries(call, tile, unit, head):
    """A unit's queries, each row with the positions that it sees."""
    seq, rows = int_at(unit, SEQ), int_at(unit, LAST) - int_at(unit, FIRST)
    length, (_, stop) = sum(lengths_of(call, seq, int_at(unit, TOKEN))), tokens_of(call, seq)
    begin(tile, rows)
    for row in range(rows):
        token, q_head = query_of(call, unit, head, row)
        place = seq * call.q_seq_stride + token * call.q_token_stride + q_head * call.q_head_stride
        source = call.q + size_of(call.q_format) * place
        read_query(tile, row, call.q_format, source, call.d_qk, reads_in_place(call, tile))
        left, right = (0, length) if call.sparse else seen_from(call, token, stop, length)
        set_int(tile.left, row, left)
        set_int(tile.right, row, right)
    return rows


@compiled
def slot_of(call, seq, token, head, position, length):
    """The page of a position, -1 for none, and its place there; `length` is how many the first list has."""
    if not call.sparse:
        page = int32_at(call.lists, seq * call.list_seq_stride + position // call.page_size)
        return page if page < call.num_pages else -1, position % call.page_size
    if position < length:
        index = seq * call.list_seq_stride + token * call.list_token_stride + head * call.list_head_stride
        slot, page_size, num_pages = int32_at(call.lists, index + position), call.page_size, call.num_pages
    else:
        index = seq * call.extra_list_seq_stride + token * call.extra_list_token_stride
        slot = int32_at(call.extra_lists, index + position - length)
        page_size, num_pages = call.extra_page_size, call.extra_num_pages
    return slot // page_size if 0 <= slot < num_pages * page_size else -1, slot % page_size


@compiled
def list_next(call, tile, unit, head, first, count, length):
    """The addresses of the next `count` rows, from a position on, which are asked for now.

    While they come, the rows before them are computed. Returns how many of the positions have none.
    """
    holes, size, seq, token = 0, size_of(call.cache_format), int_at(unit, SEQ), int_at(unit, TOKEN)
    for key in range(count):
        page, slot = slot_of(call, seq, token, head, first + key, length)
        row = scale = 0
        if page >= 0:
            if not call.sparse or first + key < length:
                base = call.kv + size * head * call.head_stride
                row, scale = place_of(call.layout, size, page, slot, call.page_stride, call.slot_stride, call.page_size)
            else:
                base = call.extra_kv
                row, scale = place_of(call.extra_layout, size, page, slot, call.extra_page_stride,
                                      call.extra_slot_stride, call.extra_page_size)  # fmt: skip
            row, scale = base + row, base + scale
            prefetch(row, size * call.d_qk)
        else:
            holes += 1
        set_int(tile.next_sources, key, row)
        set_int(tile.next_v_sources, key, scale)
    return holes


@pasted
def read_keys(call, tile, own, count):
    """Read rows as keys, and if they are not paired as values too; the first `own` ones are those of the first list."""
    if not tile.paired:
        read_latents(call.layout, own, call.extra_layout, call.cache_format, tile.sources, tile.v_sources, tile.k,
                     tile.width, call.d_qk, count)  # fmt: skip
    elif not reads_in_place(call, tile):
        pair_keys(call.cache_format, tile.sources, tile.k, tile.width, count)


@pasted
def attend(call, tile, unit, head, rows):
    """A unit's rows over its keys, one tile of keys after another."""
    low, high = int_at(unit, LOW), int_at(unit, HIGH)
    length, _ = lengths_of(call, int_at(unit, SEQ), int_at(unit, TOKEN))
    factor = call.scale * scale_of_cache(call, head) * (LOG2E if call.soft_cap == 0 else np.float32(1))
    next_holes = list_next(call, tile, unit, head, low, min(tile.keys, high - low), length)
    for first in range(low, high, tile.keys):
        count, holes, behind = min(tile.keys, high - first), next_holes, first + tile.keys
        turn_to_next(tile)
        read_keys(call, tile, within(length - first, count) if call.sparse else count, count)
        next_holes = list_next(call, tile, unit, head, behind, min(tile.keys, high - behind), length)
        keys = tile.sources if reads_in_place(call, tile) else tile.k_rows
        multiply_keys(tile, keys, rows, first, count, factor, call.soft_cap)
        weigh_keys(tile, rows, first, count, holes)
        if tile.paired:
            pair_values(call.cache_format, tile.sources, tile.v, tile.v_width, call.d_v, count)
        mix_values(tile, rows, first, count)


@compiled
def finish(call, tile, unit, head, rows):
    """Write the results of rows whose keys were all seen."""
    seq, size, kv_scale = int_at(unit, SEQ), size_of(call.out_format), scale_of_cache(call, head)
    for row in range(rows):
        token, q_head = query_of(call, unit, head, row)
        m_i, l_i, out = float_at(tile.m_i, row), float_at(tile.l_i, row), tile.out + 4 * row * tile.columns
        target = call.out + size * (seq * call.out_seq_stride + (token * call.num_q_heads + q_head) * call.d_v)
        if m_i == NOTHING:
            zero(target, size * call.d_v)
        else:
            scale_row(out, tile.columns, kv_scale)
            narrow(call.out_format, out, target, call.d_v, l_i + weight_of_sink(call.sinks, q_head, m_i))
        place = seq * call.lse_seq_stride + token * call.lse_token_stride + q_head * call.lse_head_stride
        if call.lse:
            set_float(call.lse, place, log_sum_exp(m_i, l_i))
        if call.max_logits:
            set_float(call.max_logits, place, m_i * LN2)


# ---- all programs


@pasted
def program(call, tile, index):
    """One unit for one KV head."""
    unit, head = call.units + 8 * len(UNIT) * (index // call.num_kv_heads), index % call.num_kv_heads
    rows = read_queries(call, tile, unit, head)
    attend(call, tile, unit, head, rows)
    num_splits = int_at(unit, NUM_SPLITS)
    place = int_at(unit, PARTIAL) * call.num_kv_heads + head * num_splits
    if is_last(call, tile, rows, call.d_v, place, int_at(unit, SPLIT), num_splits):
        finish(call, tile, unit, head, rows)


def work(address):
    """Programs, one after another, until none is left."""
    call = call_of(address)
    paired = pairs_up(call)
    width = call.d_qk // 2 if paired else call.d_qk
    memory = new_tile(call.block_rows, call.block_kv, width, call.d_v, not paired, paired)
    if memory == 0:
        return NO_MEMORY
    tile = tile_at(memory)
    for index in programs(address, call.num_programs):
        program(call, tile, index)
    release(memory)
    return 0
