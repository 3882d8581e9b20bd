"""Values as the cache stores them, to the bit as `reference/_kv_layout.py` encodes them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ragged_attention.portable.xla._pages import BITS

# Mantissa bits, exponent bias, largest finite value.
FORMATS = {"float8_e4m3fn": (3, 7, 448.0), "float8_e5m2": (2, 15, 57344.0)}


def stored_bits(values: jax.Array, scale: jax.Array | None, dtype: Any) -> jax.Array:
    """`values / scale` in float32, to the nearest `dtype`, ties to even; 8-bit formats saturate.

    It comes as unsigned integers: XLA may pass 8-bit floats through wider ones and lose the sign of a NaN.
    """
    if scale is not None:
        values = quotient(values.astype(jnp.float32), scale[:, None])
    name = jnp.dtype(dtype).name
    if name in FORMATS:
        return codes(values.astype(jnp.float32), *FORMATS[name])
    if name == "int8":
        values = values.astype(jnp.float32)
        values = jnp.clip(jnp.rint(jnp.where(jnp.isnan(values), 0.0, values)), -128, 127).astype(jnp.int8)
    return lax.bitcast_convert_type(values.astype(dtype), BITS[jnp.dtype(dtype).itemsize])


def quotient(values: jax.Array, divisor: jax.Array) -> jax.Array:
    """`values / divisor` in float32, rounded once; the divisor is broadcast.

    XLA multiplies by the reciprocal of a divisor that is a constant or a broadcast, which rounds twice. So each
    element gets its own divisor: the given one plus a zero that is known at run time only.
    """
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    own = lax.bitcast_convert_type(divisor, jnp.uint32) + (lax.population_count(bits) >> 6)
    return values / lax.bitcast_convert_type(own, jnp.float32)


def codes(values: jax.Array, mantissa_bits: int, bias: int, largest: float) -> jax.Array:
    """The codes of an 8-bit float format, in integer arithmetic: casts differ in how they saturate."""
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
    return jnp.where(jnp.isnan(values), jnp.uint8(0x7F), code) | sign
