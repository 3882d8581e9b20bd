"""Latent attention: latent rows and queries as operands, and what is written of finished rows."""

# Triton's language only looks like Python: its constexprs and early-bound branches defeat a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

from typing import NamedTuple

import triton
import triton.language as tl

from ragged_attention.kernels_triton._formats import decode, decoded_at_once, narrow, unit_of
from ragged_attention.kernels_triton._softmax import lost_to_rounding


class Layout(NamedTuple):
    """How a cache stores its rows."""

    FORMAT: tl.constexpr
    CODES: tl.constexpr  # how its 8-bit codes are decoded; FORMAT "codes" has nothing else
    PAGE_SIZE: tl.constexpr
    PAGE_UNIT: tl.constexpr  # page strides are counted in this many elements


class Columns(NamedTuple):
    """Which columns make one operand: those before D_V in GROUPS groups of WIDTH, and D_REST others."""

    GROUPS: tl.constexpr
    WIDTH: tl.constexpr
    D_V: tl.constexpr
    D_REST: tl.constexpr
    D_REST_PAD: tl.constexpr
    GROUP_PARTS: tl.constexpr  # products with queries per column of a group: 2 where these come in two parts
    PARTS: tl.constexpr  # the same of the others


class Found(NamedTuple):
    """Rows of a cache that a block of a list names."""

    pages: tl.tensor  # where each row's page begins
    rows: tl.tensor  # where the row does, if rows are packed one after another
    offset: tl.tensor  # of the row in its page
    readable: tl.tensor


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
    address = (rows + FIRST).to(tl.pointer_type(tl.bfloat16))
    return tl.load(address[:, None] + tl.arange(0, 64)[None, :], mask=readable[:, None], other=0)


@triton.jit
def power_of_two(scales, readable):
    """e8m0 scales as float32; 255 is NaN."""
    power = tl.load(scales, mask=readable, other=127).to(tl.uint8, bitcast=True)
    bits = power.to(tl.uint32) << 23
    bits = tl.where(power == 0, 0x00400000, tl.where(power == 255, 0x7FC00000, bits))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def v4_columns(found, FIRST: tl.constexpr, PAGE_SIZE: tl.constexpr, CODES: tl.constexpr, DTYPE: tl.constexpr):
    """128 columns of `fp8_v4` rows: two groups of 64 codes with a power of two each; the very last group is rotary."""
    column = tl.arange(0, 128)
    first = (column < 64)[None, :]
    rows = found.pages + found.offset.to(tl.int64) * 576
    # 32 bits are enough for offsets within a page: no memory holds pages of 2^28 rows.
    scales = found.pages + PAGE_SIZE * 576 + found.offset * 8 + FIRST // 64
    codes = whole_columns(rows, found.readable, FIRST, 448 - FIRST, 128).to(tl.uint8, bitcast=True)
    values = decode(codes, CODES, tl.float32)
    scale = power_of_two(scales, found.readable)[:, None]
    if FIRST < 384:
        values = values * tl.where(first, scale, power_of_two(scales + 1, found.readable)[:, None])
    else:
        rotary = (rows + 448).to(tl.pointer_type(tl.bfloat16))[:, None] + (column - 64)[None, :]
        rotary = tl.load(rotary, mask=found.readable[:, None] & (column >= 64)[None, :], other=0).to(tl.float32)
        values = tl.where(first, values * scale, rotary)
    return narrow(values, DTYPE)


@triton.jit
def place_of_scales(found, BYTES: tl.constexpr, SCALES: tl.constexpr, PAGE_SIZE: tl.constexpr, PLANAR: tl.constexpr):
    """Where rows of BYTES of values and SCALES of scales begin, and their scales, in pages of either layout."""
    if PLANAR:
        rows = found.pages + found.offset.to(tl.int64) * BYTES
        scales = found.pages + PAGE_SIZE * BYTES + found.offset * SCALES
    else:
        rows = found.rows
        scales = found.rows + BYTES
    return rows, scales


@triton.jit
def v41_columns(found, FIRST: tl.constexpr, PAGE_SIZE: tl.constexpr, PLANAR: tl.constexpr, CODES: tl.constexpr,
                DTYPE: tl.constexpr):  # fmt: skip
    """128 columns of `fp8_v41` rows: four groups of 32 codes with a power of two each."""
    column = tl.arange(0, 128)[None, :]
    rows, scales = place_of_scales(found, 512, 16, PAGE_SIZE, PLANAR)
    codes = whole_columns(rows, found.readable, FIRST, 128, 128).to(tl.uint8, bitcast=True)
    first = scales + FIRST // 32
    low = tl.where(column < 32, power_of_two(first, found.readable)[:, None],
                   power_of_two(first + 1, found.readable)[:, None])  # fmt: skip
    high = tl.where(column < 96, power_of_two(first + 2, found.readable)[:, None],
                    power_of_two(first + 3, found.readable)[:, None])  # fmt: skip
    return narrow(decode(codes, CODES, tl.float32) * tl.where(column < 64, low, high), DTYPE)


@triton.jit
def fp4_values(codes):
    """e2m1 codes as float32 of 2^-14 of their values: float16 has sign, exponent and mantissa in the same order."""
    half = ((codes & 7) << 9) | ((codes & 8) << 12)
    return half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def fp4_columns(found, FIRST: tl.constexpr, PAGE_SIZE: tl.constexpr, PLANAR: tl.constexpr, DTYPE: tl.constexpr):
    """128 columns of `fp4_v41` rows: eight groups of 8 bytes, of two codes each, with an e4m3 scale each."""
    rows, scales = place_of_scales(found, 256, 32, PAGE_SIZE, PLANAR)
    # Two bytes at a time: where an operand was loaded in single bytes and joined, Triton 3.6 gives each thread eight
    # neighbouring keys out of 32, even if the product with the values has only 16.
    both = whole_columns(rows.to(tl.pointer_type(tl.uint16)), found.readable, FIRST // 4, 32, 32)
    pairs = tl.reshape(tl.join(both & 0xFF, both >> 8), [both.shape[0], 64]).to(tl.uint32)
    # The scales of 64 columns at once, in a word.
    words = (scales + FIRST // 16).to(tl.pointer_type(tl.uint32))
    low = tl.load(words, mask=found.readable, other=0)[:, None]
    high = tl.load(words + 1, mask=found.readable, other=0)[:, None]
    byte = tl.arange(0, 64)[None, :]
    code = tl.where(byte < 32, low, high) >> (byte // 8 % 4 * 8).to(tl.uint32)
    half = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
    scale = half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 4194304.0  # 2^8, and 2^14 of the values
    scale = tl.where((code & 0x7F) == 0x7F, float("nan"), scale)
    even = narrow(fp4_values(pairs) * scale, DTYPE)
    odd = narrow(fp4_values(pairs >> 4) * scale, DTYPE)
    return tl.reshape(tl.join(even, odd), [even.shape[0], 128])


@triton.jit
def key_columns(found, FIRST: tl.constexpr, layout, columns, DTYPE: tl.constexpr):
    """The group of columns from FIRST on as an operand; those of `fp8_v32` without their scale."""
    if layout.FORMAT == "fp8_v4":
        keys = v4_columns(found, FIRST, layout.PAGE_SIZE, layout.CODES, DTYPE)
    elif layout.FORMAT == "fp8_v41":
        keys = v41_columns(found, FIRST, layout.PAGE_SIZE, False, layout.CODES, DTYPE)
    elif layout.FORMAT == "fp8_v41_page":
        keys = v41_columns(found, FIRST, layout.PAGE_SIZE, True, layout.CODES, DTYPE)
    elif layout.FORMAT == "fp4_v41":
        keys = fp4_columns(found, FIRST, layout.PAGE_SIZE, False, DTYPE)
    elif layout.FORMAT == "fp4_v41_page":
        keys = fp4_columns(found, FIRST, layout.PAGE_SIZE, True, DTYPE)
    else:
        keys = whole_columns(found.rows, found.readable, FIRST, columns.D_V - FIRST, columns.WIDTH)
        if layout.FORMAT == "fp8_v32":
            codes = decode(keys.to(tl.uint8, bitcast=True), layout.CODES, DTYPE)
            keys = decoded_at_once(codes, found.readable)
        elif layout.FORMAT == "codes":
            keys = decoded_at_once(decode(keys, layout.CODES, DTYPE), found.readable)
    return keys


@triton.jit
def rest_columns(found, layout, columns, DTYPE: tl.constexpr):
    """The columns behind D_V as an operand."""
    keys = whole_columns(found.rows, found.readable, columns.D_V, columns.D_REST, columns.D_REST_PAD)
    if layout.FORMAT == "codes":
        keys = decoded_at_once(decode(keys, layout.CODES, DTYPE), found.readable)
    return keys


@triton.jit
def key_groups(found, layout, columns, DTYPE: tl.constexpr):
    """The columns before D_V, group by group."""
    groups = ()
    for group in tl.static_range(columns.GROUPS):
        groups += (key_columns(found, group * columns.WIDTH, layout, columns, DTYPE),)
    return groups


@triton.jit
def group_scale(rows, readable, GROUP: tl.constexpr):
    """The scale of a group of 128 columns of `fp8_v32` rows, or of such decoded."""
    EACH: tl.constexpr = 32 // rows.dtype.element_ty.primitive_bitwidth  # elements
    return tl.load((rows + 512 + EACH * GROUP).to(tl.pointer_type(tl.float32)), mask=readable, other=0)


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
    elif FORMAT == "codes":  # its keys are float16 unless queries are float32
        if given.dtype == tl.bfloat16:
            q = narrow(given.to(tl.float32) / unit[:, None], tl.float16)
    elif FORMAT != "plain" and given.dtype != tl.bfloat16:  # its keys are bfloat16
        q = narrow(given.to(tl.float32), tl.bfloat16)
        lost = lost_to_rounding(given.to(tl.float32), q)
    return q, lost


@triton.jit
def query_groups(rows, valid, unit, columns, FORMAT: tl.constexpr):
    """The columns before D_V, group by group: (operands, what each lost)."""
    groups = ()
    lost = ()
    for group in tl.static_range(columns.GROUPS):
        q, q_lost = query_columns(rows, valid, unit, group * columns.WIDTH, columns.D_V, columns.WIDTH, FORMAT)
        groups += (q,)
        lost += (q_lost,)
    return groups, lost


@triton.jit
def load_queries(rows, valid, columns, FORMAT: tl.constexpr):
    """(groups, lost, rest, lost_rest, unit) of rows as `Queries` has them."""
    unit = tl.full([rows.shape[0]], 1.0, tl.float32)
    if FORMAT == "fp8_v32":
        unit = unit_of(whole_columns(rows, valid, 0, columns.D_V, 4 * columns.WIDTH).to(tl.float32))
    elif FORMAT == "codes" and rows.dtype.element_ty == tl.bfloat16:
        # Both are powers of two, of which the larger one is that of the whole row.
        unit = unit_of(whole_columns(rows, valid, 0, columns.D_V, columns.GROUPS * columns.WIDTH).to(tl.float32))
        if columns.D_REST > 0:
            rest = whole_columns(rows, valid, columns.D_V, columns.D_REST, columns.D_REST_PAD)
            unit = tl.maximum(unit, unit_of(rest.to(tl.float32)))
    groups, lost = query_groups(rows, valid, unit, columns, FORMAT)
    q_rest, lost_rest = groups[0], lost[0]
    if columns.D_REST > 0:
        q_rest, lost_rest = query_columns(
            rows, valid, unit, columns.D_V, columns.D_V + columns.D_REST, columns.D_REST_PAD,
            "rotary" if FORMAT == "fp8_v32" else FORMAT,
        )  # fmt: skip
    return groups, lost, q_rest, lost_rest, unit


@triton.jit
def zeros_like(groups):
    """Operands of zeros."""
    zeros = ()
    for group in tl.static_range(len(groups)):
        zeros += (tl.zeros_like(groups[group]),)
    return zeros


@triton.jit
def zero_after(l_i):
    """0, but no compiler knows it before the sums `l_i` are there (they are never negative).

    Indices that are added to it are computed after the loop; Triton 3.6 to 3.9 otherwise compute them before and keep
    them in registers throughout.
    """
    return (tl.min(l_i, 0) < 0).to(tl.int32)


@triton.jit
def store_columns(target_ptr, index, acc, factor, valid, FIRST: tl.constexpr, LAST: tl.constexpr, D: tl.constexpr):
    """Columns [FIRST, FIRST + width) of finished rows of D, as far as they lie before LAST."""
    column = FIRST + tl.arange(0, acc.shape[1])
    value = narrow(acc * factor[:, None], target_ptr.dtype.element_ty)
    mask = valid[:, None] & (column < LAST)[None, :]
    tl.store(target_ptr + index[:, None] * D + column[None, :], value, mask=mask)


@triton.jit
def store_groups(target_ptr, index, groups, rest, factor, rest_factor, valid, WIDTH: tl.constexpr, D_V: tl.constexpr,
                 HAS_REST: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """Finished rows of D columns: those before D_V are in groups of WIDTH, the others in `rest`."""
    LAST: tl.constexpr = D_V if D_V < D else D  # pyright: ignore[reportAssignmentType]
    for group in tl.static_range(len(groups)):
        store_columns(target_ptr, index, groups[group], factor, valid, group * WIDTH, LAST, D)
    if HAS_REST:
        store_columns(target_ptr, index, rest, rest_factor, valid, D_V, D, D)
