"""Encodes this step's K and V for the pages, and finds their slots, for every backend written in jax.

The encoding is bit for bit that of `reference/_kv_layout.py`. XLA fuses it with the operations that produce K and V,
so a kernel only has to move rows.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SIGN, INFINITY, MANTISSA = np.int32(-(2**31)), np.int32(0x7F800000), np.int32(0x7FFFFF)  # masks of float32
BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}
# Mantissa bits, exponent bias, largest finite value.
FORMATS = {"float8_e4m3fn": (3, 7, 448.0), "float8_e5m2": (2, 15, 57344.0), "float8_e4m3fnuz": (3, 8, 240.0)}


def per_head(scale: Any, num_kv_heads: int) -> jax.Array:
    """A scale in any of its forms (None, number, [], [1] or [K]) as one float32 per KV head."""
    return jnp.broadcast_to(jnp.asarray(1.0 if scale is None else scale, jnp.float32), (num_kv_heads,))


def stored_bits(values: jax.Array, scale: jax.Array | None, dtype: Any) -> jax.Array:
    """`values / scale` in float32, rounded to `dtype`, ties to even; 8-bit formats saturate.

    The result has unsigned integers, because XLA may convert 8-bit floats to wider ones and lose the sign of a NaN.
    """
    if scale is not None:
        values = quotient(values.astype(jnp.float32), scale[:, None])
    name = jnp.dtype(dtype).name
    if name in FORMATS:
        return codes(values.astype(jnp.float32), *FORMATS[name], has_negative_zero=name != "float8_e4m3fnuz")
    if name == "int8":
        values = values.astype(jnp.float32)
        values = jnp.clip(jnp.rint(jnp.where(jnp.isnan(values), 0.0, values)), -128, 127).astype(jnp.int8)
    return lax.bitcast_convert_type(values.astype(dtype), BITS[jnp.dtype(dtype).itemsize])


def quotient(values: jax.Array, divisor: jax.Array) -> jax.Array:
    """`values / divisor` in float32, rounded to nearest; the divisor is broadcast.

    XLA's own division is not always rounded to nearest. On GPUs its error is up to two units in the last place, and if
    the divisor is a constant or a broadcast, XLA multiplies by its reciprocal. A subnormal divisor counts as 0 of the
    same sign, as on devices that flush it.
    """
    bits = lax.bitcast_convert_type(divisor, jnp.int32)
    bits = jnp.where(bits & INFINITY == 0, bits & SIGN, bits)
    divisor = jnp.broadcast_to(lax.bitcast_convert_type(bits, jnp.float32), values.shape)
    return nearest_quotient(values, divisor, values / divisor)


def nearest_quotient(values: jax.Array, divisor: jax.Array, estimate: jax.Array) -> jax.Array:
    """The float32 nearest to `values / divisor`, from an estimate that is at most three units in the last place off.

    If the dividend or the estimate is 0, subnormal or not finite, the result is the estimate. Otherwise the remainder
    of an integer division shows how many units the estimate is off. For a and b in [1, 2), the exponent of
    a * 2^i / (b * 2^j) is i - j, or i - j - 1 if a < b. The nearest float is unique, because no quotient of two floats
    is halfway between two others.
    """
    dividend, by, guess = (lax.bitcast_convert_type(each, jnp.int32) & ~SIGN for each in (values, divisor, estimate))
    a, b = ((bits & MANTISSA) + MANTISSA + 1 for bits in (dividend, by))
    less = (a < b).astype(jnp.int32)
    power_of_two = ((dividend >> 23) - (by >> 23) + 127 - less) << 23  # as float32 bits
    whole = guess - power_of_two + MANTISSA + 1
    remainder = (a << (23 + less)) - whole * b  # modulo 2^32, which is exact because it is small
    off = jnp.zeros_like(guess)
    for halves in (1, 3, 5):
        off += (2 * remainder > halves * b).astype(jnp.int32) - (2 * remainder < -halves * b).astype(jnp.int32)
    exact = (dividend > MANTISSA) & (guess > MANTISSA) & (guess < INFINITY)
    bits = lax.bitcast_convert_type(estimate, jnp.int32) + jnp.where(exact, off, 0)
    return lax.bitcast_convert_type(bits, jnp.float32)


def codes(
    values: jax.Array, mantissa_bits: int, bias: int, largest: float, has_negative_zero: bool = True
) -> jax.Array:
    """The codes of values in an 8-bit float format. Integer arithmetic replaces casts, which saturate differently.

    In a format without -0, the code that -0 would have is the only NaN.
    """
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    sign = ((bits >> 24) & 0x80).astype(jnp.uint8)
    magnitude = jnp.minimum(jnp.abs(values), jnp.float32(largest))
    dropped = 23 - mantissa_bits
    normal = lax.bitcast_convert_type(magnitude, jnp.uint32)
    normal += (1 << (dropped - 1)) - 1 + ((normal >> dropped) & 1)
    normal = (normal >> dropped) - ((127 - bias) << mantissa_bits)
    # Below the smallest normal value all codes are one step apart; adding 2**23 steps makes float32 round to a step.
    anchor = np.float32(2.0 ** (1 - bias - mantissa_bits + 23))
    small = lax.bitcast_convert_type(magnitude + anchor, jnp.uint32) - anchor.view(np.uint32)
    code = jnp.where(magnitude < np.float32(2.0 ** (1 - bias)), small, normal).astype(jnp.uint8)
    if not has_negative_zero:
        return jnp.where(jnp.isnan(values), jnp.uint8(0x80), jnp.where(code > 0, code | sign, code))
    return jnp.where(jnp.isnan(values), jnp.uint8(0x7F), code) | sign


def live_edges(cu_q_lens: Any, num_seqs: Any, num_tokens: int) -> jax.Array:
    """`cu_q_lens` within [0, num_tokens], with entries past `num_seqs` replaced by the last live entry.

    So sequences past `num_seqs` are empty, whatever those entries contain, and the edges ascend if the live edges do.
    """
    edges = jnp.clip(cu_q_lens, 0, num_tokens)
    if num_seqs is None:
        return edges
    last = jnp.clip(jnp.reshape(jnp.asarray(num_seqs, jnp.int32), ()), 0, len(edges) - 1)
    return edges[jnp.minimum(jnp.arange(len(edges), dtype=jnp.int32), last)]


def bounds_of(cu_lens: Any, num_tokens: int, num_seqs: Any = None) -> tuple[jax.Array, jax.Array]:
    """The first row of each sequence, and one past its last, i32 [S] each."""
    edges = live_edges(cu_lens, num_seqs, num_tokens)
    return edges[:-1], jnp.maximum(edges[:-1], edges[1:])


def sequences_of_tokens(cu_q_lens: Any, num_seqs: Any, num_tokens: int) -> tuple[jax.Array, jax.Array]:
    """The sequence of each token, and the number of its tokens from this one on, i32 [T] each.

    For a token of no live sequence, the number is 0 and the sequence is arbitrary. There must be a sequence.
    """
    starts, stops = bounds_of(cu_q_lens, num_tokens, num_seqs)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    seq = jnp.searchsorted(stops, token, side="right").astype(jnp.int32)
    seq = jnp.minimum(seq, len(stops) - 1)
    return seq, jnp.where(starts[seq] <= token, jnp.maximum(stops[seq] - token, 0), 0)


def addresses_of_slots(slots: jax.Array, num_pages: int, page_size: int) -> tuple[jax.Array, jax.Array]:
    """The page and the offset of each slot, i32 [T]; the page is `num_pages` for a slot outside the pages."""
    page, offset = slots // page_size, slots % page_size
    valid = (slots >= 0) & (page < num_pages)
    page, offset = (jnp.where(valid, part, 0).astype(jnp.int32) for part in (page, offset))
    return jnp.where(valid, page, num_pages), offset


def addresses_of_tokens(call: Any, num_tokens: int) -> tuple[jax.Array, jax.Array]:
    """The page and the offset of each of `num_tokens` packed tokens, from the tables of `call`.

    Token i of a sequence is at position `kv_len - q_len + i`.
    """
    if 0 in call.page_indices.shape:
        return jnp.full(num_tokens, call.num_pages, jnp.int32), jnp.zeros(num_tokens, jnp.int32)
    seq, to_stop = sequences_of_tokens(call.cu_q_lens, call.num_seqs, num_tokens)
    position = jnp.clip(call.kv_lens, 0, call.capacity)[seq] - to_stop
    valid = (to_stop > 0) & (position >= 0)
    position = jnp.clip(position, 0, call.capacity - 1)
    page = call.page_indices[seq, position // call.page_size]
    valid &= (page >= 0) & (page < call.num_pages)
    return jnp.where(valid, page, call.num_pages), position % call.page_size
