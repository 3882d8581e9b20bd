"""This step's K and V on their way into the pages: as the pages store them, and the slot that each token goes to.

Plain jax operations, which XLA fuses with what made K and V; a kernel only has to move the rows.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ragged_attention.kernels_pallas._blocks import per_head

# Mantissa bits, exponent bias, largest finite value.
FORMATS = {"float8_e4m3fn": (3, 7, 448.0), "float8_e5m2": (2, 15, 57344.0)}


def new_rows(call: Any, k: jax.Array, v: jax.Array) -> list[jax.Array]:
    """K [T, K, D] and V [T, K, D_v] as rows of each array of `call`'s pages: [T, 2K, D], or [T, K, D] and [T, K, D_v].

    They have the pages' dtype: divided by the scales in float32, rounded to nearest even, 8-bit formats saturating.
    """
    scales = (call.k_scale, call.v_scale)
    parts = [_stored(new, scale, call.k_pages_like.dtype) for new, scale in zip((k, v), scales, strict=True)]
    if call.combined:
        parts = [jnp.stack(parts, axis=2).reshape(len(k), -1, k.shape[-1])]
    return [lax.bitcast_convert_type(rows, call.k_pages_like.dtype) for rows in parts]


def _stored(values: jax.Array, scale: Any, dtype: Any) -> jax.Array:
    """`values / scale` in `dtype`; 8-bit floats as their bits, for XLA may lose the sign of a NaN on its way."""
    if scale is not None:
        values = _quotient(values.astype(jnp.float32), per_head(scale, values.shape[1]))
    name = jnp.dtype(dtype).name
    if name in FORMATS:
        return _codes(values.astype(jnp.float32), *FORMATS[name])
    if name == "int8":
        values = jnp.nan_to_num(values.astype(jnp.float32), nan=0.0)
        values = jnp.clip(jnp.rint(values), -128, 127)
    return values.astype(dtype)


def _quotient(values: jax.Array, scale: jax.Array) -> jax.Array:
    """`values / scale`, rounded once.

    XLA multiplies by the reciprocal of a divisor that is a constant or a broadcast, which rounds twice. So each
    element gets a divisor of its own: the scale plus a zero that is known at run time only.
    """
    scale = lax.bitcast_convert_type(scale, jnp.uint32)[:, None]
    zero = lax.population_count(lax.bitcast_convert_type(values, jnp.uint32)) >> 6
    return values / lax.bitcast_convert_type(scale + zero, jnp.float32)


def _codes(values: jax.Array, mantissa_bits: int, bias: int, largest: float) -> jax.Array:
    """The codes of an 8-bit float format, in integer arithmetic: casts differ in how they saturate."""
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    magnitude = jnp.minimum(jnp.abs(values), jnp.float32(largest))
    dropped = 23 - mantissa_bits
    normal = lax.bitcast_convert_type(magnitude, jnp.uint32)
    normal += (1 << (dropped - 1)) - 1 + ((normal >> dropped) & 1)
    normal = (normal >> dropped) - ((127 - bias) << mantissa_bits)
    # Below the smallest normal value all codes are one step apart; adding 2**23 steps makes float32 round to a step.
    anchor = np.float32(2.0 ** (1 - bias - mantissa_bits + 23))
    small = lax.bitcast_convert_type(magnitude + anchor, jnp.uint32) - anchor.view(np.uint32)
    code = jnp.where(magnitude < np.float32(2.0 ** (1 - bias)), small, normal)
    code = jnp.where(jnp.isnan(values), 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).astype(jnp.uint8)


def too_many_slots(call: Any) -> str | None:
    """Why the slots of `call`'s pages cannot be numbered in int32."""
    if (num_slots := call.num_pages * call.page_size) >= 2**31 - 1:
        return f"expected num_pages * page_size < 2**31 - 1, got {num_slots}"
    return None


def sent_once(slots: jax.Array, block: int) -> jax.Array:
    """Slots by blocks of tokens, [blocks, block]; -1 where a later token of the block is for the same one.

    Copies that are under way at once may arrive in any order, and partly: so only the last of them is begun.
    """
    slots = jnp.pad(slots, (0, -len(slots) % block), constant_values=-1).reshape(-1, block)
    token = jnp.arange(block)
    again = (slots[:, :, None] == slots[:, None, :]) & (token[:, None] < token[None, :])
    return jnp.where(again.any(axis=2), -1, slots)


def slots(call: Any) -> jax.Array:
    """The slot, page * G + offset, of each token of a `write_kv_pages` call, i32 [T]; -1 for one that has none."""
    if call.slot_mapping is None:
        return slots_from_tables(call, call.num_tokens)
    given = call.slot_mapping
    return jnp.where((given >= 0) & (given < call.num_pages * call.page_size), given, -1).astype(jnp.int32)


def slots_from_tables(call: Any, num_tokens: int) -> jax.Array:
    """The slot of each of `num_tokens` packed tokens by the tables of `call`, i32; -1 for one that has none.

    Token i of a sequence stands at position `kv_len - q_len + i`.
    """
    max_num_seqs, pages_per_seq = call.page_indices.shape
    if 0 in (max_num_seqs, pages_per_seq):
        return jnp.full(num_tokens, -1, jnp.int32)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    edges = live_edges(call, num_tokens)
    stops = jnp.maximum(edges[:-1], edges[1:])
    seq = jnp.searchsorted(stops, token, side="right").astype(jnp.int32)
    there = seq < max_num_seqs
    seq = jnp.minimum(seq, max_num_seqs - 1)
    position = jnp.clip(call.kv_lens, 0, call.capacity)[seq] - (stops[seq] - token)
    there &= (edges[seq] <= token) & (token < stops[seq]) & (position >= 0)
    position = jnp.clip(position, 0, call.capacity - 1)
    page = call.page_indices[seq, position // call.page_size]
    there &= (page >= 0) & (page < call.num_pages)
    return jnp.where(there, page * call.page_size + position % call.page_size, -1)


def live_edges(call: Any, num_tokens: int) -> jax.Array:
    """`cu_q_lens` within [0, num_tokens], where entries past `num_seqs` repeat the last live one.

    So whatever those entries hold, sequences past `num_seqs` are empty, and the edges ascend as far as live ones do.
    """
    edges = jnp.clip(call.cu_q_lens, 0, num_tokens)
    if call.num_seqs is None:
        return edges
    last = jnp.clip(jnp.reshape(jnp.asarray(call.num_seqs, jnp.int32), ()), 0, len(edges) - 1)
    return edges[jnp.minimum(jnp.arange(len(edges)), last)]
