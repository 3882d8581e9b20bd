"""Rows of latent caches as matrix operands: where the kernel has which columns, and what their bytes mean.

A row comes as its bytes, one to a lane. Codes of 8 bits become numbers where they lie. A byte of `fp4_v41` holds the
codes of an even and an odd column, so the kernel has all even columns first, and the queries and the results are put
in that order. Rotary columns of `fp8_v32` stay where their low bytes lie; the queries' are spread to meet them there.

float32 scales (`fp8_v32`) are not multiplied with codes, for no narrower operand would hold the products: each goes
into the logits of its group of columns, and into the weights of that group's values. The other formats' are powers of
two, or have few digits, so that bfloat16 holds every product with a code; these operands are the values themselves.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from ragged_attention.calls import CACHE_FORMATS
from ragged_attention.kernels_pallas._blocks import LANES, round_up

TAIL = 2 * LANES  # lanes for the scales' and the rotary columns' bytes of `fp8_v32`
V32 = CACHE_FORMATS["fp8_v32"]
# Behind the values of a row: the scales of `fp8_v32`, before its rotary columns.
V32_SCALES = V32.token_bytes - V32.row_bytes


def value_columns(form: str, d_v: int) -> int:
    """Columns of values in the kernel; those of `fp8_v32` come in groups, the rotary ones with gaps between them."""
    if form == "fp8_v32":
        return round_up(min(d_v, V32.values), LANES) + TAIL * (d_v > V32.values)
    return CACHE_FORMATS[form].values if form == "fp4_v41" else d_v


def spread(q: Any, form: str) -> Any:
    """Queries [..., d_qk] with their columns where the kernel has those of a row."""
    if form == "fp4_v41":
        return jnp.concatenate([q[..., ::2], q[..., 1::2]], axis=-1)
    if form != "fp8_v32":
        return q
    first, rotary = q[..., : V32.values], q[..., V32.values :]
    rotary = jnp.stack([rotary, jnp.zeros_like(rotary)], axis=-1).reshape(*rotary.shape[:-1], -1)
    rotary = jnp.pad(rotary, [(0, 0)] * (q.ndim - 1) + [(V32_SCALES, TAIL - V32_SCALES - 2 * V32.rotary)])
    return jnp.concatenate([first, rotary], axis=-1)


def gathered(out: Any, form: str, d_v: int) -> Any:
    """The inverse of `spread` for the values' columns."""
    if form == "fp4_v41":
        return jnp.stack(jnp.split(out, 2, axis=-1), axis=-1).reshape(out.shape)[..., :d_v]
    if form != "fp8_v32" or d_v <= V32.values:
        return out[..., :d_v]
    first, rotary = out[..., : V32.values], out[..., V32.values + V32_SCALES :: 2]
    return jnp.concatenate([first, rotary[..., : d_v - V32.values]], axis=-1)


def operands(raw: Any, form: str, dtype: Any) -> list[tuple[Any, Any]]:
    """Rows as parts of their columns [keys, ...] of `dtype`, each with its scale as [1, keys] or None."""
    if form == "fp8_v32":
        return _v32(raw, dtype)
    return [((_fp8_v41 if form == "fp8_v41" else _fp4_v41)(raw).astype(dtype), None)]


def numbers(raw: Any, dtype: str) -> Any:
    """The numbers of a plain cache, given as their bits, in float32; bfloat16 holds those of 8 bits too."""
    if dtype == "int8":
        return ((raw << 24) >> 24).astype(jnp.float32)
    exponent, mantissa = {"float16": (5, 10), "float8_e4m3fn": (4, 3), "float8_e5m2": (5, 2)}[dtype]
    return from_bits(raw, exponent=exponent, mantissa=mantissa)


def from_bits(raw: Any, *, exponent: int, mantissa: int) -> Any:
    """Small floats, as integers, in float32; exactly, also where the unit flushes what is below the normal numbers."""
    magnitude = raw & ((1 << (exponent + mantissa)) - 1)
    up, bias = 23 - mantissa, 127 - ((1 << (exponent - 1)) - 1)
    smallest = 2.0 ** (bias + 1 - 127)
    normal = pltpu.bitcast((magnitude << up) + (bias << 23), jnp.float32)
    below = pltpu.bitcast((magnitude << up) | ((bias + 1) << 23), jnp.float32) - jnp.float32(smallest)
    value = jnp.where(magnitude < (1 << mantissa), below, normal)
    if exponent == 5:
        infinite = pltpu.bitcast((magnitude << up) | 0x7F800000, jnp.float32)
        value = jnp.where(magnitude >= (31 << mantissa), infinite, value)
    elif exponent == 4:  # e4m3 has no infinity and one NaN, e2m1 neither
        value = jnp.where(magnitude == (1 << (exponent + mantissa)) - 1, jnp.float32(jnp.nan), value)
    return jnp.where((raw >> (exponent + mantissa)) != 0, -value, value)


def _v32(raw: Any, dtype: Any) -> list[tuple[Any, Any]]:
    """Four groups of 128 columns with their scales, then the rotary columns at every other lane behind the scales'."""
    num_keys = raw.shape[0]
    tail = raw[:, V32.values :]
    tail = jnp.concatenate([tail, jnp.zeros((num_keys, TAIL - tail.shape[1]), jnp.int32)], axis=1)
    pairs = tail | (pltpu.roll(tail, TAIL - 1, 1) << 8)
    scales = pltpu.bitcast(pairs | (pltpu.roll(pairs, TAIL - 2, 1) << 16), jnp.float32)[:, :LANES].T
    lane = lax.broadcasted_iota(jnp.int32, tail.shape, 1)
    is_rotary = (lane >= V32_SCALES) & (lane < V32_SCALES + 2 * V32.rotary) & (lane % 2 == 0)
    rotary = pltpu.bitcast(jnp.where(is_rotary, pairs << 16, 0), jnp.float32)
    values = from_bits(raw[:, : V32.values], exponent=4, mantissa=3).astype(dtype)
    groups = range(V32.num_groups)
    parts = [(values[:, V32.group * g : V32.group * (g + 1)], scales[4 * g : 4 * g + 1]) for g in groups]
    return [*parts, (rotary.astype(dtype), None)]


def _fp8_v41(raw: Any) -> Any:
    """e4m3 codes times scales that are powers of two: the exponents of float32, of which the last stands for NaN.

    The smallest, 2^-127, lies below the normal numbers; the matrix unit would make it 0, and here it is.
    """
    codes, scales = _codes_and_scales(raw, "fp8_v41")
    powers = pltpu.bitcast(jnp.where(scales == 0xFF, 0x7FC00000, scales << 23), jnp.float32)
    return from_bits(codes, exponent=4, mantissa=3) * _for_groups(powers, codes.shape[1], CACHE_FORMATS["fp8_v41"])


def _fp4_v41(raw: Any) -> Any:
    """e2m1 codes times e4m3 scales; the even columns, which are the low halves of the bytes, then the odd ones."""
    codes, scales = _codes_and_scales(raw, "fp4_v41")
    factors = from_bits(scales, exponent=4, mantissa=3)
    factors = _for_groups(factors, codes.shape[1], CACHE_FORMATS["fp4_v41"])
    halves = [from_bits(half, exponent=2, mantissa=1) * factors for half in (codes & 0xF, codes >> 4)]
    return jnp.concatenate(halves, axis=1)


def _codes_and_scales(raw: Any, form: str) -> tuple[Any, Any]:
    """The bytes of the values, and those of the scales, which fill LANES with zeros behind them."""
    split = CACHE_FORMATS[form].value_bytes
    scales = raw[:, split:]
    spare = jnp.zeros((raw.shape[0], LANES - scales.shape[1]), jnp.int32)
    return raw[:, :split], jnp.concatenate([scales, spare], axis=1)


def _for_groups(scales: Any, width: int, form: Any) -> Any:
    """Scales [keys, LANES] as each of a row's `width` bytes needs them, [keys, width].

    The matrix unit hands them out: of each sum only one term is not zero. A scale of NaN so spoils its whole row, which
    it does anyway, since all of a row counts for its logit.
    """
    shape = (LANES, width)
    group = lax.broadcasted_iota(jnp.int32, shape, 0), lax.broadcasted_iota(jnp.int32, shape, 1)
    own = group[0] == group[1] // (width // form.num_groups)
    own = jnp.where(own, 1.0, 0.0).astype(jnp.bfloat16)
    return lax.dot_general(
        scales.astype(jnp.bfloat16), own, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
