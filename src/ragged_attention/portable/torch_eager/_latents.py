"""The rows of a latent cache in all its formats: read by slot as float32, and written as bytes."""

import dataclasses
import math
from typing import Any

import torch

from ragged_attention.calls import CacheFormat, expect_count
from ragged_attention.portable.torch_eager._cache import e4m3_to_float32, to_float32
from ragged_attention.portable.torch_eager._softmax import wide
from ragged_attention.portable.torch_eager.write_kv_pages import encode

LARGEST = 448.0  # of float8_e4m3fn
SMALLEST_SCALE = 1e-4
LARGEST_E2M1, SMALLEST_E4M3 = 6.0, 2.0**-9
TWICE_E2M1 = 0xC8643210 - 2**32  # 0, 1, 2, 3, 4, 6, 8, 12 in 4 bits each
CHUNK = 2048  # tokens whose rows are converted at a time


def parts_of(cache: torch.Tensor, layout: CacheFormat) -> list[torch.Tensor]:
    """A cache of bytes as views [P, G, bytes] of what each token has together; the layout "page" stores scales apart.

    A page of that layout is addressed by its bytes: the cache is copied where they do not follow each other, and must
    not be written then.
    """
    bits = cache.view(torch.uint8)
    if not layout.planar:
        return [bits[:, :, 0]]
    num_pages, page_size, _, token_bytes = bits.shape
    if (page_size > 1 and bits.stride(1) != token_bytes) or bits.stride(3) != 1:
        bits = bits.contiguous()
    page_stride, start = bits.stride(0), bits.storage_offset()
    row_bytes = layout.row_bytes
    scale_bytes = token_bytes - row_bytes
    return [
        bits.as_strided((num_pages, page_size, row_bytes), (page_stride, row_bytes, 1), start),
        bits.as_strided(
            (num_pages, page_size, scale_bytes), (page_stride, scale_bytes, 1), start + page_size * row_bytes
        ),
    ]


def fields_of(parts: list[torch.Tensor], layout: CacheFormat) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The bytes of the values, of the scales and of the rotary columns, as views of the parts of some tokens."""
    first, values = parts[0], layout.value_bytes
    scales = parts[1] if len(parts) == 2 else first[..., values : values + layout.scale_bytes]
    return first[..., :values], scales, first[..., first.shape[-1] - 2 * layout.rotary :]


def dequantized(parts: list[torch.Tensor], layout: CacheFormat) -> torch.Tensor:
    """Rows float32 [..., d_qk] from the bytes of their parts: each value times its group's scale."""
    codes, scales, rotary = fields_of(parts, layout)
    if layout.scales == "float32":
        factors = _copy(scales).view(torch.float32)
    elif layout.scales == "float8_e4m3fn":
        factors = e4m3_to_float32(scales.view(torch.int8))
    else:
        exponents = scales[..., : layout.num_groups].to(torch.int32)
        bits = (exponents << 23).masked_fill_(exponents == 0, 0x00400000).masked_fill_(exponents == 0xFF, 0x7FC00000)
        factors = bits.view(torch.float32)
    values = e2m1_to_float32(codes) if layout.codes == "float4_e2m1fn" else e4m3_to_float32(codes.view(torch.int8))
    values.unflatten(-1, (layout.num_groups, layout.group)).mul_(factors[..., None])
    if not layout.rotary:
        return values
    return torch.cat([values, _copy(rotary).view(torch.bfloat16).to(torch.float32)], dim=-1)


def e2m1_to_float32(codes: torch.Tensor) -> torch.Tensor:
    """Bytes [..., n] as values [..., 2 n]: the low half of a byte is the even one."""
    pairs = torch.stack([codes & 0xF, codes >> 4], dim=-1).flatten(-2).to(torch.int32)
    doubled = (TWICE_E2M1 >> ((pairs & 7) << 2)) & 0xF
    return (doubled.to(torch.float32) * 0.5).copysign_(7.5 - pairs)


def _copy(field: torch.Tensor) -> torch.Tensor:
    """The bytes packed and aligned, so that they can be viewed as what they stand for; `contiguous` need not do it."""
    return field.clone(memory_format=torch.contiguous_format)


def quantized(
    rows: torch.Tensor, layout: CacheFormat, power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The bytes of rows [..., d_qk], as `fields_of` has them. Every NaN of 8 bits becomes the code 0x7F."""
    groups = rows[..., : layout.values].to(torch.float32).unflatten(-1, (-1, layout.group))
    rotary = bfloat16_bits(rows[..., layout.values :]).view(torch.uint8)
    if layout.codes == "float4_e2m1fn":
        return *_quantized_to_e2m1(groups), rotary
    codes, scales = quantized_groups(groups, power_of_two)
    if layout.scales == "float32":
        stored = scales.view(torch.uint8)
    else:
        exponents = (scales.view(torch.int32) >> 23).to(torch.uint8)  # 0xFF where not finite
        padding = layout.token_bytes - layout.row_bytes - layout.num_groups
        stored = torch.nn.functional.pad(exponents, (0, padding))
    return codes.flatten(-2), stored, rotary


def bfloat16_bits(values: torch.Tensor) -> torch.Tensor:
    """The bits of values as bfloat16, packed, as int16; a NaN stays one of its sign and payload, on every device."""
    values = values.to(torch.float32).contiguous()
    nan = (values.view(torch.int32) >> 16 | 0x40).to(torch.int16)
    return torch.where(values.isnan(), nan, values.to(torch.bfloat16).view(torch.int16))


def quantized_groups(groups: torch.Tensor, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes of float32 groups [..., group], as uint8, and their scales [...]. Every NaN becomes the code 0x7F."""
    # Tensors as divisors, since some devices divide by a Python number through its reciprocal; filled on the device.
    largest, smallest = (groups.new_full((), value) for value in (LARGEST, SMALLEST_SCALE))
    scales = torch.maximum(groups.abs().amax(-1) / largest, smallest)
    scales.masked_fill_(scales.isnan(), torch.nan)
    if power_of_two:
        up = ((scales.view(torch.int32) + 0x7FFFFF) & -0x800000).view(torch.float32)
        scales = torch.where(scales.isfinite(), up, scales)
    scaled = groups / scales[..., None]
    return encode(scaled.masked_fill_(scaled.isnan(), torch.nan), torch.float8_e4m3fn), scales


def _quantized_to_e2m1(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of groups [..., groups, group] of 4 bits a value, and those of their e4m3 scales."""
    scales = (groups.abs().amax(-1) / groups.new_full((), LARGEST_E2M1)).clamp_(SMALLEST_E4M3, LARGEST)
    stored = encode(scales.masked_fill_(scales.isnan(), torch.nan), torch.float8_e4m3fn)
    scaled = groups / e4m3_to_float32(stored.view(torch.int8))[..., None]
    magnitude = scaled.abs()
    # A code is how many middles between two neighbours lie below; in the middle itself the even one is taken.
    code = torch.zeros_like(magnitude, dtype=torch.uint8)
    for index, middle in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        code += magnitude >= middle if index % 2 else magnitude > middle
    code = torch.where(scaled.isnan(), 0, code | (scaled.signbit().to(torch.uint8) << 3)).flatten(-2)
    return code[..., 0::2] | (code[..., 1::2] << 4), stored


def chunks(array: torch.Tensor) -> list[tuple[slice, slice]]:
    """An array [P, G, ...] as rectangles of at most CHUNK of its tokens: whole pages, or parts of one."""
    num_pages, page_size = array.shape[0], array.shape[1]
    pages, offsets = max(CHUNK // page_size, 1), min(page_size, CHUNK)
    return [
        (slice(page, page + pages), slice(offset, offset + offsets))
        for page in range(0, num_pages, pages)
        for offset in range(0, page_size, offsets)
    ]


@dataclasses.dataclass(frozen=True)
class Tile:
    """What may be tuned.

    Args:
        block_kv: rows converted to float32 at a time.
    """

    block_kv: int

    def __post_init__(self) -> None:
        expect_count("block_kv", self.block_kv, 1)


def heuristic(call: Any) -> Tile:
    """Rows and logits of about 3 MiB on a CPU, whose cache holds them, and of 64 MiB elsewhere."""
    budget = (3 if call.device.platform == "cpu" else 64) * 2**20
    return Tile(block_kv=max(budget // (8 * call.d_qk + 12 * call.num_q_heads), 64))


class Windows:
    """Equal pieces of memory, one at each slot of an array [P, G, ...] of any page and row strides."""

    def __init__(self, array: torch.Tensor) -> None:
        num_pages, self.page_size, *inner = array.shape
        row_stride = array.stride(1) if self.page_size > 1 else 0
        page_stride = array.stride(0) if num_pages > 1 else self.page_size * row_stride
        # Windows at every multiple of what divides both strides, most of which belong to no slot and overlap.
        step = math.gcd(page_stride, row_stride) or 1
        self.page_step, self.row_step = page_stride // step, row_stride // step
        count = (num_pages - 1) * self.page_step + (self.page_size - 1) * self.row_step + 1
        self.view = array.as_strided((count, *inner), (step, *array.stride()[2:]))

    def at(self, slots: torch.Tensor) -> torch.Tensor:
        """The pieces at slots i64 [n], which lie within the array, in new memory."""
        if self.page_size == 1:
            where = slots if self.page_step == 1 else slots * self.page_step
        elif self.row_step == 1 and self.page_step == self.page_size:
            where = slots
        else:
            page = slots // self.page_size
            where = page * self.page_step + (slots - page * self.page_size) * self.row_step
        return self.view.index_select(0, where)


class Rows:
    """The rows of one cache, converted only when they are read."""

    def __init__(self, cache: torch.Tensor, layout: CacheFormat) -> None:
        """`cache` is [P, G, K, d_qk], or bytes [P, G, 1, token_bytes]; it has at least one slot."""
        self.layout, self.dtype = layout, cache.dtype
        plain = cache.view(torch.int8) if cache.itemsize == 1 else cache
        self.windows = [Windows(part) for part in ([plain] if not layout.quantized else parts_of(cache, layout))]

    def at(self, slots: torch.Tensor) -> torch.Tensor:
        """Float32 [n, K, d_qk], float64 for a cache of that, at slots i64 [n], which lie within the cache."""
        parts = [windows.at(slots) for windows in self.windows]
        if not self.layout.quantized:
            (stored,) = parts
            return to_float32(stored.view(self.dtype)) if stored.itemsize == 1 else stored.to(wide(stored))
        return dequantized(parts, self.layout).unsqueeze(1)
