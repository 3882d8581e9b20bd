"""The places of keys and values in `_paged`'s kernel, and the form in which they are multiplied."""

import numpy as np

from ragged_attention.portable.numba import _masks
from ragged_attention.portable.numba._branches import branch
from ragged_attention.portable.numba._formats import BFLOAT16, FLOAT32, scale_of, size_of
from ragged_attention.portable.numba._products import COLUMNS
from ragged_attention.portable.numba._records import record_in
from ragged_attention.portable.numba._scaled_rows import SIDE, expanded, row_bytes, scale_bytes
from ragged_attention.portable.numba._sequences import first_key_of
from ragged_attention.portable.numba._softmax import LOG2E
from ragged_attention.portable.numba._vectors import (
    LANES,
    byte_at,
    compiled,
    inlined,
    int32_at,
    prefetch,
    set_int,
)

keys_of, values_of = record_in(SIDE, "k_"), record_in(SIDE, "v_")


@inlined
def is_scaled(call):
    """Whether rows of K or V have scales of their own."""
    return call.k_scales != 0 or call.v_scales != 0


@inlined
def reads_in_place(call, tile):
    """Whether keys are multiplied in the cache itself, without being copied to the tile."""
    if tile.paired:
        return call.k_codes == BFLOAT16
    return call.k_codes == FLOAT32 and call.head_dim % LANES == 0


@inlined
def values_in_place(call):
    """Whether values are multiplied in the cache itself if there are few rows."""
    return call.v_codes == FLOAT32 and call.v_head_dim % COLUMNS == 0


@inlined
def set_row_bytes(call, tile):
    """Set how many bytes of a key and of its value are prefetched."""
    tile.k_bytes = row_bytes(keys_of(call), call.head_dim)
    tile.v_bytes = row_bytes(values_of(call), call.v_head_dim)


@inlined
def keeps_order(call, tile):
    """Whether the columns of keys keep their order in pairs of bfloat16."""
    return reads_in_place(call, tile) or expanded(keys_of(call))


@inlined
def factor_of(call, head):
    """The factor of q . k. It includes log2(e); with a soft cap, `capped` multiplies by log2(e) after capping."""
    k_scale = scale_of(call.k_scale, call.k_scale_format, call.k_scale_stride, call.k_scale_number, head)
    return call.scale * k_scale * (LOG2E if call.soft_cap == 0 else np.float32(1))


@inlined
def place_of(call, seq, position):
    """The index of a position's page in its sequence's block table, and the position's slot in that page."""
    if call.cu_kv_lens:
        return first_key_of(call, seq) + position, 0
    return position // call.page_size, position % call.page_size


@inlined
def page_at(call, seq, number):
    """The page at an index of a sequence's block table; the table may hold any int32."""
    return number if call.cu_kv_lens else int32_at(call.page_indices + 4 * seq * call.page_indices_seq_stride, number)


@compiled
def list_next(call, tile, seq, head, first, key, count):
    """List the addresses of keys [key, count) of the next tile; key number `key` is at position `first`.

    Returns how many of the positions have no page.
    """
    holes, start, size, v_size = 0, key, size_of(call.k_codes), size_of(call.v_codes)
    number, slot = place_of(call, seq, first)
    while key < count:
        page, run = page_at(call, seq, number), min(call.page_size - slot, count - key)
        k = v = k_step = v_step = 0
        if 0 <= page < call.num_pages:
            k = page * call.k_pages_page_stride + slot * call.k_pages_slot_stride + head * call.k_pages_head_stride
            v = page * call.v_pages_page_stride + slot * call.v_pages_slot_stride + head * call.v_pages_head_stride
            k, v = call.k_pages + size * k, call.v_pages + v_size * (v + call.v_offset)
            k_step, v_step = size * call.k_pages_slot_stride, v_size * call.v_pages_slot_stride
        else:
            holes += run
        for index in range(key, key + run):
            set_int(tile.next_sources, index, k)
            set_int(tile.next_v_sources, index, v)
            k, v = k + k_step, v + v_step
        key, number, slot = key + run, number + 1, 0
    if is_scaled(call):
        list_scales(call, tile, seq, head, first, start, count)
    return holes


@branch("k_scales", "v_scales")
def list_scales(call, tile, seq, head, first, key, count):
    """List the addresses of the scales of keys [key, count) of the next tile, and prefetch these scales.

    Key number `key` is at position `first`. The addresses for positions without a page are arbitrary.
    """
    keys, values = keys_of(call), values_of(call)
    size, v_size = size_of(keys.scale_codes), size_of(values.scale_codes)
    number, slot = place_of(call, seq, first)
    while key < count:
        page, run = page_at(call, seq, number), min(call.page_size - slot, count - key)
        k = page * call.k_scales_page_stride + slot * call.k_scales_slot_stride + head * call.k_scales_head_stride
        v = page * call.v_scales_page_stride + slot * call.v_scales_slot_stride + head * call.v_scales_head_stride
        k, v, exists = call.k_scales + size * k, call.v_scales + v_size * v, 0 <= page < call.num_pages
        for index in range(key, key + run):
            set_int(tile.next_k_scales, index, k)
            set_int(tile.next_v_scales, index, v)
            if exists and call.k_scales:
                prefetch(k, scale_bytes(keys))
            if exists and call.v_scales:
                prefetch(v, scale_bytes(values))
            k, v = k + size * call.k_scales_slot_stride, v + v_size * call.v_scales_slot_stride
        key, number, slot = key + run, number + 1, 0


@compiled
def sees(call, token, first_new, kv_len, position):
    """Whether the draft mask and the ranges let a query token see the key at `position`.

    The caller ensures that the key lies within the bounds of what the token sees and, if it has lists, in its lists.
    """
    if call.drafted and position >= first_new:
        draft = position - first_new
        place = token * call.draft_mask_token_stride + draft
        return draft < call.draft_width and byte_at(call.draft_mask, place) != 0
    return call.num_ranges < 2 or _masks.sees(call, token, token + 1, kv_len, position, position + 1)
