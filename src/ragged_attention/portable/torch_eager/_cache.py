"""Converts elements of caches from and to float32, and finds the pages of one sequence."""

import dataclasses
from typing import Any

import numpy as np
import torch

from ragged_attention.portable.torch_eager._host import Ints

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz)
DOUBLED_E2M1 = 0xC8643210 - 2**32  # twice the 8 e2m1 magnitudes, 4 bits each, as an int32: 0, 1, 2, 3, 4, 6, 8, 12


def to_float32(stored: torch.Tensor) -> torch.Tensor:
    """Elements of any cache dtype in float32, exactly; the tensor itself if it is float32 already."""
    if stored.dtype == torch.float8_e5m2:  # its bits are the upper half of a float16
        return (stored.view(torch.int8).to(torch.int16) << 8).view(torch.float16).to(torch.float32)
    if stored.dtype == torch.float8_e4m3fn:
        return e4m3_to_float32(stored.view(torch.int8))
    if stored.dtype == torch.float8_e4m3fnuz:
        return e4m3fnuz_to_float32(stored.view(torch.int8))
    return stored.to(torch.float32)


def e4m3_to_float32(bits: torch.Tensor) -> torch.Tensor:
    """The exact values of float8_e4m3fn codes, which are given as int8. The exponent bias is 7."""
    values = shifted_to_float16(bits).to(torch.float32).mul_(256.0)
    # On a CPU, `masked_fill_` takes over ten times as long as a search for NaN. Elsewhere, a search would synchronise.
    if bits.device.type != "cpu" or (bits.numel() and int((bits | -0x80).amax()) == -1):
        values.masked_fill_((bits & 0x7F) == 0x7F, torch.nan)
    return values


def e4m3fnuz_to_float32(bits: torch.Tensor) -> torch.Tensor:
    """The exact values of float8_e4m3fnuz codes, which are given as int8.

    The exponent bias is 8, one more than in float8_e4m3fn. The only NaN has the code that is -0 in other formats.
    """
    values = shifted_to_float16(bits).to(torch.float32).mul_(128.0)
    # Search for NaN first, as for float8_e4m3fn. NaN is the least of all signed codes.
    if bits.device.type != "cpu" or (bits.numel() and int(bits.amin()) == -0x80):
        values.masked_fill_(bits == -0x80, torch.nan)
    return values


def shifted_to_float16(bits: torch.Tensor) -> torch.Tensor:
    """8-bit floats with 4 exponent bits, given as int8, as float16 with the same exponent and mantissa bits.

    float16 has one exponent bit more and a bias of 15, so a value is divided by 2 ** (15 - bias). Sign extension also
    copies the sign to bit 14, which is cleared.
    """
    return bits.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4001).view(torch.float16)


def encode(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Float32 values rounded to `dtype`, ties to even. 8-bit formats saturate; 8-bit floats are returned as bits."""
    if dtype == torch.int8:
        return torch.nan_to_num(values, nan=0.0).round_().clamp_(-128, 127).to(dtype)
    if dtype not in FLOAT8:
        return values.to(dtype)
    largest = torch.finfo(dtype).max
    bits = values.clamp(-largest, largest).to(dtype).view(torch.uint8)
    if dtype == torch.float8_e4m3fnuz:  # torch converts every NaN to its only NaN, and -0 to 0
        return bits
    nan = torch.where(torch.signbit(values), 0xFF, 0x7F).to(torch.uint8)
    return torch.where(torch.isnan(values), nan, bits)


def e2m1_to_float32(codes: torch.Tensor) -> torch.Tensor:
    """Bytes [..., n] as values [..., 2 n]; a byte's low 4 bits hold the first of its two values."""
    pairs = nibbles(codes).to(torch.int32)
    doubled = (DOUBLED_E2M1 >> ((pairs & 7) << 2)) & 0xF
    return (doubled.to(torch.float32) * 0.5).copysign_(7.5 - pairs)


def e8m0_to_float32(codes: torch.Tensor) -> torch.Tensor:
    """The powers of two that e8m0 codes, given as uint8, stand for; 0xFF is NaN."""
    exponents = codes.to(torch.int32)
    bits = (exponents << 23).masked_fill_(exponents == 0, 0x00400000).masked_fill_(exponents == 0xFF, 0x7FC00000)
    return bits.view(torch.float32)


def nibbles(codes: torch.Tensor) -> torch.Tensor:
    """The 4-bit codes [..., 2 n] of bytes [..., n], as uint8."""
    return torch.stack([codes & 0xF, codes >> 4], dim=-1).flatten(-2)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes [..., 2 n], as uint8, in bytes [..., n], with the even column in the low half."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """The 4-bit codes of float32 values, rounded to nearest, ties to even, saturating; 0 for NaN."""
    magnitude = values.abs()
    # Without its sign, a code is the number of midpoints of neighbouring values that are below the magnitude. On a
    # midpoint, the even code wins.
    code = torch.zeros_like(magnitude, dtype=torch.uint8)
    for index, middle in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        code += magnitude >= middle if index % 2 else magnitude > middle
    return torch.where(values.isnan(), 0, code | (values.signbit().to(torch.uint8) << 3))


@dataclasses.dataclass(frozen=True, slots=True)
class Keys:
    """The positions that a sequence's queries may see, ascending; positions on invalid pages are left out."""

    pages: torch.Tensor  # i32 [n], the ids of the pages that hold the positions
    page_ids: Ints  # `pages` on the host
    first: int  # the first position's offset in its page
    positions: Ints  # i64 [count]
    whole: bool  # True if all pages are valid, so that the positions are consecutive

    @property
    def count(self) -> int:
        return len(self.positions)


def keys_of(tables: torch.Tensor, host_row: Ints, seq: int, low: int, high: int, call: Any) -> Keys:
    """The keys at positions [low, high) of sequence `seq`; `host_row` is `tables[seq]` on the host."""
    size = call.page_size
    page = np.arange(low // size, -(-high // size))
    ids = host_row[page[0] : page[-1] + 1] if len(page) else host_row[:0]
    pages = tables[seq, low // size : low // size + len(page)]
    valid = (ids >= 0) & (ids < call.num_pages)
    if valid.all():
        return Keys(pages, ids, low % size, np.arange(low, high), True)
    page, ids = page[valid], ids[valid]
    pages = torch.from_numpy(ids.astype(np.int32)).to(tables.device)
    positions = (page[:, None] * size + np.arange(size)).reshape(-1)
    first = int(np.searchsorted(positions, low))
    return Keys(pages, ids, first, positions[first : np.searchsorted(positions, high)], False)
