"""Tiles of rows of K and V that have scales of their own: branches of `_paged`'s kernel."""

import math

import numpy as np
from numba.core import types

from ragged_attention.portable.numba import _scaled_rows, _tiles
from ragged_attention.portable.numba._branches import branch
from ragged_attention.portable.numba._paged_keys import keys_of, sees, values_of
from ragged_attention.portable.numba._scaled_rows import folded, load_scales, read_row
from ragged_attention.portable.numba._sequences import kv_len_of, queries_of
from ragged_attention.portable.numba._vectors import add_multiple, int_at


@branch("k_group", "k_zero")
def expand_keys(call, tile, count):
    """Read `count` keys whose codes must be expanded; skip a key whose address is 0."""
    _scaled_rows.expand_keys(tile, keys_of(call), call.head_dim, count)


@branch("v_group", "v_zero", result=types.int64)
def expand_values(call, tile, count):
    """Read `count` values whose codes must be expanded; returns whether some are wrong (see `_scaled_rows`)."""
    return _scaled_rows.expand_values(tile, values_of(call), call.v_head_dim, count)


@branch("k_scales")
def read_key_factors(call, tile, count):
    """List the scales of `count` keys as factors of their logits, and the rests of their zero points (see `_tiles`).

    If a key's scale or zero point is not finite, its factor is NaN: rows that see the key get NaN, as from a key that
    is NaN, and other rows hide its logit.
    """
    factors, rests = tile.k_factors, tile.k_rests
    _scaled_rows.read_factors(tile, keys_of(call), tile.sources, tile.k_scales, factors, rests, count, math.nan)


@branch("v_scales", result=types.int64)
def read_value_factors(call, tile, count):
    """List the scales of `count` values as factors of their weights, and the rests of their zero points (see `_tiles`).

    Returns how many values have a scale or zero point that is not finite; these get the factor 0.
    """
    factors, rests = tile.v_factors, tile.v_rests
    return _scaled_rows.read_factors(tile, values_of(call), tile.v_sources, tile.v_scales, factors, rests, count, 0.0)


@branch("v_scales")
def add_wrong_values(call, tile, unit, rows, first, count):
    """Add those values of `count` keys that were left out because of their scales to the rows that see them.

    If they were multiplied with all rows, NaN times a weight of 0 would also reach rows that do not see them.
    """
    group, (start, stop) = call.num_q_heads // call.num_kv_heads, queries_of(call, unit.seq)
    values, kv_len = values_of(call), kv_len_of(call, unit.seq)
    for key in range(count):
        source, scales, position = int_at(tile.v_sources, key), int_at(tile.v_scales, key), first + key
        if not source or load_scales(values, scales, tile.scratch):
            continue
        read_row(values, source, scales, tile.wide_row, call.v_head_dim, tile.scratch)
        for row in range(rows):
            token = unit.first + row // group
            if not int_at(tile.left, row) <= position < int_at(tile.right, row):
                continue
            if sees(call, token, kv_len - (stop - start), kv_len, position):
                weight = np.float32(1) if folded(values) else _tiles.weight_at(tile, row, key)
                add_multiple(tile.out + 4 * row * tile.columns, tile.wide_row, call.v_head_dim, weight)
