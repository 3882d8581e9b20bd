"""Rows of K and V that are stored as codes with scales: their values, and the quantisation of new rows.

`write_kv_pages` documents the rules. The arithmetic is in float32, with the steps of `reference/_scaled_rows.py`.
Divisors are tensors, because some devices would replace a Python number by its reciprocal, and so round differently.
"""

import torch

from ragged_attention.calls.cache_formats import KvFormat
from ragged_attention.portable.torch_eager._cache import (
    e2m1_codes,
    e2m1_to_float32,
    e4m3_to_float32,
    e8m0_to_float32,
    encode,
    nibbles,
    packed,
    to_float32,
)

# The divisor of a row's largest magnitude, by the dtype of its codes. For e4m3fnuz it is not the largest number, 240.
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e4m3fnuz": 224.0, "float8_e5m2": 57344.0}
LEAST_SCALE = 1e-6
LARGEST_ZERO = 32768.0
ZERO_BITS = 15  # the bits of a float32 scale that hold a zero point


# ---- values


def values_of(stored: torch.Tensor, scales: torch.Tensor | None, form: KvFormat) -> torch.Tensor:
    """The float32 values [..., D] of stored rows [..., W]; the rows themselves if they are float32.

    `scales` are the rows' scales [..., n], in which 8-bit scales may be given as bits; None if the
    format has no scales.
    """
    values = decoded_codes(stored, form)
    if scales is None:
        return values
    factors, zeros = scales_and_zeros(scales, form)
    groups = values.unflatten(-1, (factors.shape[-1], values.shape[-1] // factors.shape[-1]))
    if zeros is not None:
        groups.sub_(zeros[..., None])
    return groups.mul_(factors[..., None]).flatten(-2)


def decoded_codes(stored: torch.Tensor, form: KvFormat) -> torch.Tensor:
    """The numbers that codes stand for, one for each column."""
    if not form.packed_codes:
        return to_float32(stored)
    return nibbles(stored).to(torch.float32) if form.codes == "uint4" else e2m1_to_float32(stored)


def scales_and_zeros(scales: torch.Tensor, form: KvFormat) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The scales of rows or of their blocks, [..., n], and the zero points, None if the format has none."""
    if form.zero == "stored":
        return scales[..., :1].to(torch.float32), scales[..., 1:].to(torch.float32)
    if form.zero == "mantissa":
        bits = scales.view(torch.int32)
        return (bits & ~ZERO_BITS).view(torch.float32), (bits & ZERO_BITS).to(torch.float32)
    if form.scales == "float8_e8m0fnu":
        return e8m0_to_float32(scales.view(torch.uint8)), None
    if form.scales == "float8_e4m3fn":
        return e4m3_to_float32(scales.view(torch.int8)), None
    return scales.to(torch.float32), None


# ---- quantisation


def quantized(rows: torch.Tensor, scale: torch.Tensor | None, form: KvFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes [..., K, W] and the scales [..., K, n] that are stored for new rows [..., K, D].

    Codes and scales of 8 bits are returned as uint8 or int8. `scale` [K] multiplies the values of each KV head; None
    stands for 1. A NaN makes the scale of its row or block NaN, and the codes 0.
    """
    rows = rows.to(torch.float32)
    scale = None if scale is None else scale[:, None]
    if form.scales == "float8_e4m3fn":
        return _in_blocks_of_e4m3(rows, scale, form)
    if scale is not None:
        rows = rows / scale
    if form.group:
        return _in_blocks_of_powers(rows, form)
    return _shifted(rows, form) if form.zero else _symmetric(rows, form)


def _symmetric(rows: torch.Tensor, form: KvFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes without a zero point, with one scale for each row."""
    largest = LARGEST[form.codes]
    scales = _at_least(LEAST_SCALE, _divided(rows.abs().amax(-1, keepdim=True), largest))
    scaled = rows * _inverse(scales)
    scaled.masked_fill_(scaled.isnan(), 0.0)
    if form.codes == "int8":
        return half_away(scaled).clamp_(-128, 127).to(torch.int8), _without_payload(scales)
    return encode(scaled.clamp_(-largest, largest), getattr(torch, form.codes)), _without_payload(scales)


def _shifted(rows: torch.Tensor, form: KvFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes from 0 to 15, with one scale and one zero point for each row."""
    least, most = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
    scales = _at_least(LEAST_SCALE, _divided(most - least, 15.0))
    if form.zero == "stored":  # so that a float16 holds the zero point
        scales = torch.maximum(scales, _divided(torch.maximum(most, -least), LARGEST_ZERO))
    zeros, finite = 0 - least / scales, scales.isfinite()  # never -0
    if form.zero == "mantissa":
        zeros = half_away(zeros).clamp_(0, 15)
        codes = half_away(rows * _inverse(scales) + zeros)
        low = torch.where(finite, zeros, 0).to(torch.int32)
        stored = (low | (_without_payload(scales).view(torch.int32) & ~ZERO_BITS)).view(torch.float32)
    else:
        codes = torch.round(rows * _inverse(scales) + zeros)
        stored = torch.cat([_without_payload(scales), torch.where(finite, zeros, 0)], -1)
        stored = stored.to(getattr(torch, form.scales))
    codes = torch.where(finite & ~codes.isnan(), codes.clamp_(0, 15), 0)
    return packed(codes.to(torch.uint8)), stored


def _in_blocks_of_e4m3(
    rows: torch.Tensor, scale: torch.Tensor | None, form: KvFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    """e2m1 codes with an e4m3 scale for each block."""
    blocks = _blocks(rows, form)
    scale = rows.new_ones(()) if scale is None else scale
    largest = blocks.abs().amax(-1)
    scales = torch.where(scale > 0, largest / (6 * scale), 0).masked_fill_(largest.isnan(), torch.nan)
    stored = encode(scales, torch.float8_e4m3fn)
    factors = e4m3_to_float32(stored.view(torch.int8))
    inverse = torch.where(factors > 0, _inverse(factors * scale), 0)
    codes = e2m1_codes(blocks * inverse[..., None]).masked_fill_(factors.isnan()[..., None], 0)
    return packed(codes.flatten(-2)), stored


def _in_blocks_of_powers(rows: torch.Tensor, form: KvFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 or e2m1 codes with a power of two as the scale of each block."""
    blocks = _blocks(rows, form)
    largest = blocks.abs().amax(-1)
    # The largest magnitude is m * 2 ** e. The exponent e is incremented if m >= 1.75 (e2m1) or m > 1.75 (e4m3).
    added, steps = (0x200000, 2) if form.packed_codes else (0x1FFFFF, 8)
    raised = (largest.view(torch.int32) + added) >> 23
    beyond = raised == 255 if form.packed_codes else largest.isinf()
    exponents = (raised - 127 - steps).clamp_(-127, 127).masked_fill_(beyond, 127)
    scaled, invalid = _times_power(blocks, -exponents[..., None]), largest.isnan()
    codes = e2m1_codes(scaled) if form.packed_codes else encode(scaled, getattr(torch, form.codes))
    codes = codes.masked_fill_(invalid[..., None], 0).flatten(-2)
    stored = (exponents + 127).masked_fill_(invalid, 0xFF).to(torch.uint8)
    return packed(codes) if form.packed_codes else codes, stored


def _blocks(rows: torch.Tensor, form: KvFormat) -> torch.Tensor:
    return rows.unflatten(-1, (rows.shape[-1] // form.group, form.group))


def half_away(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers rounded to integers as vLLM does: half is added to their magnitude, and the fraction is cut off."""
    return (numbers + torch.where(numbers >= 0, 0.5, -0.5)).trunc_()


def _divided(numbers: torch.Tensor, divisor: float) -> torch.Tensor:
    return numbers / numbers.new_full((), divisor)


def _inverse(numbers: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(numbers) / numbers


def _at_least(least: float, numbers: torch.Tensor) -> torch.Tensor:
    """The larger of each number and `least`; NaN for NaN."""
    return torch.maximum(numbers, numbers.new_full((), least))


def _times_power(numbers: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Numbers times 2**exponents, for exponents from -127 to 127, in two steps: a single factor may be subnormal."""
    first = exponents >> 1
    return numbers * _power(first) * _power(exponents - first)


def _power(exponents: torch.Tensor) -> torch.Tensor:
    return ((exponents + 127) << 23).view(torch.float32)


def _without_payload(scales: torch.Tensor) -> torch.Tensor:
    """The scales, with the same bits for every NaN."""
    return scales.masked_fill(scales.isnan(), torch.nan)
