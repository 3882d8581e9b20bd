"""Latent attention: latent rows and queries as operands, and what is written of finished rows."""

# Triton's language only looks like Python: its constexprs and early-bound branches defeat a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

import triton
import triton.language as tl

from ragged_attention.kernels_triton._formats import decode, decoded_at_once, narrow
from ragged_attention.kernels_triton._softmax import lost_to_rounding


@triton.jit
def whole_columns(rows, readable, first, COLUMNS: tl.constexpr, COLUMNS_PAD: tl.constexpr):
    """Columns from `first` on of rows, zero where a row may not be read."""
    column = tl.arange(0, COLUMNS_PAD)
    mask = readable[:, None]
    if COLUMNS < COLUMNS_PAD:
        mask = mask & (column < COLUMNS)[None, :]
    return tl.load(rows[:, None] + first + column[None, :], mask=mask, other=0)


@triton.jit
def rotary_columns(rows, readable, FIRST: tl.constexpr):
    """The 64 bfloat16 columns that begin at byte FIRST of rows of bytes."""
    place = (rows + FIRST).to(tl.pointer_type(tl.bfloat16))
    return tl.load(place[:, None] + tl.arange(0, 64)[None, :], mask=readable[:, None], other=0)


@triton.jit
def power_of_two(scales, readable):
    """e8m0 scales as float32; 255 is NaN."""
    power = tl.load(scales, mask=readable, other=127).to(tl.uint8, bitcast=True)
    bits = power.to(tl.uint32) << 23
    bits = tl.where(power == 0, 0x00400000, tl.where(power == 255, 0x7FC00000, bits))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def v4_columns(pages, place, readable, FIRST: tl.constexpr, PAGE_SIZE: tl.constexpr, CODES: tl.constexpr,
               DTYPE: tl.constexpr):  # fmt: skip
    """128 columns of `fp8_v4` rows: two groups of 64 codes with a power of two each; the very last group is rotary."""
    column = tl.arange(0, 128)
    first = (column < 64)[None, :]
    rows = pages + place.to(tl.int64) * 576
    scales = pages + PAGE_SIZE * 576 + place * 8 + FIRST // 64  # 32 bits suffice: no memory holds pages of 2^28 rows
    codes = whole_columns(rows, readable, FIRST, 448 - FIRST, 128).to(tl.uint8, bitcast=True)
    values = decode(codes, CODES, tl.float32)
    scale = power_of_two(scales, readable)[:, None]
    if FIRST < 384:
        values = values * tl.where(first, scale, power_of_two(scales + 1, readable)[:, None])
    else:
        rotary = (rows + 448).to(tl.pointer_type(tl.bfloat16))[:, None] + (column - 64)[None, :]
        rotary = tl.load(rotary, mask=readable[:, None] & (column >= 64)[None, :], other=0).to(tl.float32)
        values = tl.where(first, values * scale, rotary)
    return narrow(values, DTYPE)


@triton.jit
def key_columns(pages, rows, place, readable, FIRST: tl.constexpr, FORMAT: tl.constexpr, CODES: tl.constexpr,
                PAGE_SIZE: tl.constexpr, D_V: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """Columns [FIRST, FIRST + WIDTH) of rows as an operand; those of `fp8_v32` without their scale."""
    if FORMAT == "fp8_v4":
        keys = v4_columns(pages, place, readable, FIRST, PAGE_SIZE, CODES, DTYPE)
    else:
        keys = whole_columns(rows, readable, FIRST, D_V - FIRST, WIDTH)
        if FORMAT == "fp8_v32":
            keys = decoded_at_once(decode(keys.to(tl.uint8, bitcast=True), CODES, DTYPE), readable)
    return keys


@triton.jit
def group_scale(rows, readable, GROUP: tl.constexpr):
    """The scale of a group of 128 columns of `fp8_v32` rows."""
    return tl.load((rows + 512 + 4 * GROUP).to(tl.pointer_type(tl.float32)), mask=readable, other=0)


@triton.jit
def unit_of(q):
    """The power of two by which a row of queries is divided to lie below 2^9."""
    exponent = (tl.max(tl.abs(q), 1).to(tl.int32, bitcast=True) >> 23) - 127 - 8
    exponent = tl.minimum(tl.maximum(exponent, -118), 119)
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def query_columns(rows, valid, unit, FIRST: tl.constexpr, LAST: tl.constexpr, WIDTH: tl.constexpr,
                  FORMAT: tl.constexpr):  # fmt: skip
    """Columns [FIRST, FIRST + WIDTH) of query rows as an operand for keys of a format, and what that lost."""
    given = whole_columns(rows, valid, FIRST, LAST - FIRST, WIDTH)
    q = given
    lost = given
    if FORMAT == "fp8_v32":  # its keys are float16
        wide = given.to(tl.float32) / unit[:, None]
        q = narrow(wide, tl.float16)
        lost = lost_to_rounding(wide, q)
    elif FORMAT != "plain" and given.dtype != tl.bfloat16:  # its keys are bfloat16
        q = narrow(given.to(tl.float32), tl.bfloat16)
        lost = lost_to_rounding(given.to(tl.float32), q)
    return q, lost


@triton.jit
def zero_after(l_i):
    """0, but no compiler knows it before the sums `l_i` are there (they are never negative).

    Indices that are added to it are computed after the loop; Triton 3.6 to 3.9 otherwise compute them before and keep
    them in registers throughout.
    """
    return (tl.min(l_i, 0) < 0).to(tl.int32)


@triton.jit
def store_columns(target_ptr, place, acc, factor, valid, FIRST: tl.constexpr, LAST: tl.constexpr, D: tl.constexpr):
    """Columns [FIRST, FIRST + width) of finished rows of D, as far as they lie before LAST."""
    column = FIRST + tl.arange(0, acc.shape[1])
    value = narrow(acc * factor[:, None], target_ptr.dtype.element_ty)
    mask = valid[:, None] & (column < LAST)[None, :]
    tl.store(target_ptr + place[:, None] * D + column[None, :], value, mask=mask)


@triton.jit
def store_groups(target_ptr, place, acc0, acc1, acc2, acc3, acc_rest, factor, rest_factor, valid, GROUPS: tl.constexpr,
                 WIDTH: tl.constexpr, D_V: tl.constexpr, HAS_REST: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """Finished rows of D columns: those before D_V are in groups of WIDTH, the others in `acc_rest`."""
    LAST: tl.constexpr = D_V if D_V < D else D  # pyright: ignore[reportAssignmentType]
    store_columns(target_ptr, place, acc0, factor, valid, 0, LAST, D)
    if GROUPS == 4:
        store_columns(target_ptr, place, acc1, factor, valid, WIDTH, LAST, D)
        store_columns(target_ptr, place, acc2, factor, valid, 2 * WIDTH, LAST, D)
        store_columns(target_ptr, place, acc3, factor, valid, 3 * WIDTH, LAST, D)
    if HAS_REST:
        store_columns(target_ptr, place, acc_rest, rest_factor, valid, D_V, D, D)
