"""Where the keys and values of `_paged`'s kernel lie, and in which form they are multiplied."""

import numpy as np

from ragged_attention.portable.numba import _tiles
from ragged_attention.portable.numba._formats import BFLOAT16, FLOAT32, scale_of, size_of
from ragged_attention.portable.numba._sequences import first_key_of
from ragged_attention.portable.numba._softmax import LOG2E
from ragged_attention.portable.numba._vectors import LANES, compiled, inlined, int32_at, int_at, prefetch, set_int


@inlined
def pairs_up(call):
    """Whether to multiply pairs of bfloat16: q, K and V are exact in bfloat16 and have no scales per position."""
    scaled = call.k_scales or call.v_scales
    return not scaled and _tiles.pairs_with(call.q_format, call.k_pages_format, call.head_dim, call.v_head_dim)


@inlined
def reads_in_place(call, tile):
    """Whether keys are multiplied in the cache itself, without being copied to the tile."""
    if tile.paired:
        return call.k_pages_format == BFLOAT16
    return call.k_pages_format == FLOAT32 and call.head_dim % LANES == 0 and not call.k_scales


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
    """List the addresses of the next keys [key, count) of a tile, from position `first` on, and prefetch the keys.

    The prefetches overlap with the work on the current keys. Returns how many of the positions have no page.
    """
    holes, size = 0, size_of(call.k_pages_format)
    number, slot = place_of(call, seq, first)
    while key < count:
        page, run = page_at(call, seq, number), min(call.page_size - slot, count - key)
        k = v = k_step = v_step = 0
        if 0 <= page < call.num_pages:
            k = page * call.k_pages_page_stride + slot * call.k_pages_slot_stride + head * call.k_pages_head_stride
            v = page * call.v_pages_page_stride + slot * call.v_pages_slot_stride + head * call.v_pages_head_stride
            k, v = call.k_pages + size * k, call.v_pages + size * (v + call.v_offset)
            k_step, v_step = size * call.k_pages_slot_stride, size * call.v_pages_slot_stride
        else:
            holes += run
        for index in range(key, key + run):
            set_int(tile.next_sources, index, k)
            set_int(tile.next_v_sources, index, v)
            if k:
                prefetch(k, size * call.head_dim)
            k, v = k + k_step, v + v_step
        key, number, slot = key + run, number + 1, 0
    return holes


@compiled
def prefetch_values(call, tile, first, stop):
    """Prefetch the values of the next keys [first, stop)."""
    for key in range(first, stop):
        source = int_at(tile.next_v_sources, key)
        if source:
            prefetch(source, size_of(call.k_pages_format) * call.v_head_dim)
