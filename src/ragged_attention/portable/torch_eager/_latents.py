"""Gathers and dequantises rows of a latent cache, in any format, and quantises new rows."""

import dataclasses
import math
from typing import Any

import torch

from ragged_attention.calls import CacheFormat, expect_count
from ragged_attention.portable.torch_eager._cache import (
    e2m1_codes,
    e2m1_to_float32,
    e4m3_to_float32,
    e8m0_to_float32,
    encode,
    packed,
    to_float32,
)
from ragged_attention.portable.torch_eager._softmax import wide

LARGEST_E4M3, SMALLEST_E4M3 = 448.0, 2.0**-9
LARGEST_E2M1 = 6.0
SMALLEST_SCALE = 1e-4  # the smallest scale of a group of e4m3 codes
CHUNK = 2048  # tokens whose rows are converted at a time


def parts_of(cache: torch.Tensor, layout: CacheFormat) -> list[torch.Tensor]:
    """Views [P, G, bytes] of a cache of bytes: each token's row and, in the layout "page", each token's scales.

    If pages of the layout "page" are not contiguous, the views are of a copy, and writes to them would be lost.
    """
    bits = cache.view(torch.uint8)
    if not layout.planar:
        return [bits[:, :, 0]]
    num_pages, page_size, _, token_bytes = bits.shape
    if (page_size > 1 and bits.stride(1) != token_bytes) or bits.stride(3) != 1:
        bits = bits.contiguous()
    start = bits.storage_offset()
    sizes = (layout.row_bytes, start), (layout.padded_scale_bytes, start + page_size * layout.row_bytes)
    return [bits.as_strided((num_pages, page_size, size), (bits.stride(0), size, 1), at) for size, at in sizes]


def fields_of(parts: list[torch.Tensor], layout: CacheFormat) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of the bytes of the values, the scales and the rotary columns; `parts` are as `parts_of` returns them."""
    first, values = parts[0], layout.value_bytes
    scales = parts[1] if len(parts) == 2 else first[..., values : values + layout.scale_bytes]
    return first[..., :values], scales, first[..., first.shape[-1] - 2 * layout.rotary :]


def dequantized(parts: list[torch.Tensor], layout: CacheFormat) -> torch.Tensor:
    """The rows, float32 [..., d_qk], that `parts` encode: each value times its group's scale, then rotary columns."""
    codes, scales, rotary = fields_of(parts, layout)
    if layout.scales == "float32":
        factors = _copy(scales).view(torch.float32)
    elif layout.scales == "float8_e4m3fn":
        factors = e4m3_to_float32(scales.view(torch.int8))
    else:
        factors = e8m0_to_float32(scales[..., : layout.num_groups])
    values = e2m1_to_float32(codes) if layout.packed_codes else e4m3_to_float32(codes.view(torch.int8))
    values.unflatten(-1, (layout.num_groups, layout.group)).mul_(factors[..., None])
    if not layout.rotary:
        return values
    return torch.cat([values, _copy(rotary).view(torch.bfloat16).to(torch.float32)], dim=-1)


def _copy(field: torch.Tensor) -> torch.Tensor:
    """A contiguous copy, aligned so that it can be viewed as a wider dtype; `contiguous` may return unaligned bytes."""
    return field.clone(memory_format=torch.contiguous_format)


def quantized(
    rows: torch.Tensor, layout: CacheFormat, power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The bytes of rows [..., d_qk], in the order of `fields_of`. Every NaN in e4m3 is stored as 0x7F."""
    groups = rows[..., : layout.values].to(torch.float32).unflatten(-1, (-1, layout.group))
    rotary = bfloat16_bits(rows[..., layout.values :]).view(torch.uint8)
    if layout.packed_codes:
        return *_quantized_to_e2m1(groups), rotary
    codes, scales = quantized_groups(groups, power_of_two)
    if layout.scales == "float32":
        stored = scales.view(torch.uint8)
    else:
        exponents = (scales.view(torch.int32) >> 23).to(torch.uint8)  # 0xFF if the scale is not finite
        stored = torch.nn.functional.pad(exponents, (0, layout.padded_scale_bytes - layout.num_groups))
    return codes.flatten(-2), stored, rotary


def bfloat16_bits(values: torch.Tensor) -> torch.Tensor:
    """Values rounded to bfloat16, as int16 bits; a NaN keeps its sign and its upper payload bits on every device."""
    values = values.to(torch.float32).contiguous()
    nan = (values.view(torch.int32) >> 16 | 0x40).to(torch.int16)
    return torch.where(values.isnan(), nan, values.to(torch.bfloat16).view(torch.int16))


def quantized_groups(groups: torch.Tensor, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes of float32 groups [..., group], as uint8, and their scales [...]. A NaN gets the code 0x7F."""
    # Divide by a tensor: some devices would replace a Python number by its reciprocal, and so round differently.
    largest, smallest = (groups.new_full((), value) for value in (LARGEST_E4M3, SMALLEST_SCALE))
    scales = torch.maximum(groups.abs().amax(-1) / largest, smallest)
    scales.masked_fill_(scales.isnan(), torch.nan)
    if power_of_two:
        up = ((scales.view(torch.int32) + 0x7FFFFF) & -0x800000).view(torch.float32)
        scales = torch.where(scales.isfinite(), up, scales)
    scaled = groups / scales[..., None]
    return encode(scaled.masked_fill_(scaled.isnan(), torch.nan), torch.float8_e4m3fn), scales


def _quantized_to_e2m1(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of groups [..., num_groups, group] as 4-bit values, and the bytes of their e4m3 scales."""
    scales = (groups.abs().amax(-1) / groups.new_full((), LARGEST_E2M1)).clamp_(SMALLEST_E4M3, LARGEST_E4M3)
    stored = encode(scales.masked_fill_(scales.isnan(), torch.nan), torch.float8_e4m3fn)
    scaled = groups / e4m3_to_float32(stored.view(torch.int8))[..., None]
    return packed(e2m1_codes(scaled).flatten(-2)), stored


def chunks(array: torch.Tensor) -> list[tuple[slice, slice]]:
    """The indices that cut an array [P, G, ...] into chunks of at most CHUNK tokens: whole pages, or part of one."""
    num_pages, page_size = array.shape[0], array.shape[1]
    pages, offsets = max(CHUNK // page_size, 1), min(page_size, CHUNK)
    return [
        (slice(page, page + pages), slice(offset, offset + offsets))
        for page in range(0, num_pages, pages)
        for offset in range(0, page_size, offsets)
    ]


@dataclasses.dataclass(frozen=True)
class Tile:
    """The tunable size."""

    block_kv: int  # rows converted to float32 at a time

    def __post_init__(self) -> None:
        expect_count("block_kv", self.block_kv, 1)


def heuristic(call: Any) -> Tile:
    """Blocks whose rows and logits take about 3 MiB on a CPU, so that its cache holds them, and 64 MiB elsewhere."""
    budget = (3 if call.device.platform == "cpu" else 64) * 2**20
    return Tile(block_kv=max(budget // (8 * call.d_qk + 12 * call.num_q_heads), 64))


class Windows:
    """Gathers the elements of an array [P, G, ...] by slot, for any page and row strides."""

    def __init__(self, array: torch.Tensor) -> None:
        num_pages, self.page_size, *inner = array.shape
        row_stride = array.stride(1) if self.page_size > 1 else 0
        page_stride = array.stride(0) if num_pages > 1 else self.page_size * row_stride
        # `view` has a window at every multiple of the greatest common divisor of page stride and row stride, so every
        # slot has a window. Windows may overlap, and some belong to no slot.
        step = math.gcd(page_stride, row_stride) or 1
        self.page_step, self.row_step = page_stride // step, row_stride // step
        count = (num_pages - 1) * self.page_step + (self.page_size - 1) * self.row_step + 1
        self.view = array.as_strided((count, *inner), (step, *array.stride()[2:]))

    def at(self, slots: torch.Tensor) -> torch.Tensor:
        """A copy of the elements at slots i64 [n], which must lie within the array."""
        if self.page_size == 1:
            window = slots if self.page_step == 1 else slots * self.page_step
        elif self.row_step == 1 and self.page_step == self.page_size:
            window = slots
        else:
            page = slots // self.page_size
            window = page * self.page_step + (slots - page * self.page_size) * self.row_step
        return self.view.index_select(0, window)


class Rows:
    """Gathers rows of one cache, and converts only what it gathers."""

    def __init__(self, cache: torch.Tensor, layout: CacheFormat) -> None:
        """`cache` is [P, G, K, d_qk] or bytes [P, G, 1, token_bytes], and has at least one slot."""
        self.layout, self.dtype = layout, cache.dtype
        plain = cache.view(torch.int8) if cache.itemsize == 1 else cache
        self.windows = [Windows(part) for part in ([plain] if not layout.quantized else parts_of(cache, layout))]

    def at(self, slots: torch.Tensor) -> torch.Tensor:
        """The rows [n, K, d_qk] at slots i64 [n] within the cache: in float32, or in float64 if stored so."""
        parts = [windows.at(slots) for windows in self.windows]
        if not self.layout.quantized:
            (stored,) = parts
            return to_float32(stored.view(self.dtype)) if stored.itemsize == 1 else stored.to(wide(stored))
        return dequantized(parts, self.layout).unsqueeze(1)
