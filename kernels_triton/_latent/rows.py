"""Latent attention: latent rows and queries as operands, and stores of finished rows."""

# Triton's language only looks like Python: its constexprs and early-bound branches defeat a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

import dataclasses
from typing import NamedTuple

import triton
import triton.language as tl

from ragged_attention.kernels_triton._constants import Constants
from ragged_attention.kernels_triton._formats import decode, decoded_at_once, narrow, unit_of
from ragged_attention.kernels_triton._softmax import lost_to_rounding


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class RowFormat(Constants):
    """How a cache stores its rows. Distances are counted in the cache's elements, bytes if it is quantised."""

    CODES: str  # how `decode` reads a stored value; "e2m1": two to a byte; "plain": it is an operand's element
    SCALES: str  # the dtype of the stored scales; empty: there are none
    GROUP: int  # columns that share a scale
    VALUES: int  # columns stored as codes; 0: all columns
    ROTARY: int  # bfloat16 columns stored after the values and scales; 0: none
    ROTARY_AT: int  # distance of the rotary columns from the beginning of their row
    PLANAR: bool  # whether a page holds all of its scales after all of its rows
    ROW: int  # distance between rows of a planar page
    SCALES_AT: int  # distance of the first scale from the beginning of its row, in a planar page from that of the page
    SCALES_STEP: int  # distance between the scales of consecutive rows of a planar page
    FOLDED: bool  # whether scales multiply logits and weights, and not the values
    RESCALED: bool  # whether weights times scales become float16, and are kept near 1 by a second running maximum
    PAGE_SIZE: int  # rows of a page
    PAGE_UNIT: int  # page strides are counted in this many elements


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Columns(Constants):
    """How the columns of a row are divided into operands: first into equal groups, then the rest."""

    GROUPS: int  # number of groups
    WIDTH: int  # columns of a group, padded to a power of two
    GROUPED: int  # columns of all groups, without padding
    REST: int  # columns after those of the groups; 0: none
    REST_PAD: int  # REST, padded to a power of two


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Operands(Columns):
    """What products of queries and keys multiply."""

    DTYPE: tl.dtype  # of queries and keys in groups
    REST_DTYPE: tl.dtype  # of queries and keys in the rest
    PRODUCTS: int  # products per group: 2 where rounding queries to DTYPE loses something, which is multiplied too
    REST_PRODUCTS: int  # products for the rest
    DIVIDED: bool  # whether each row of queries is divided by a power of two, so that it fits float16
    REST_IS_VALUE: bool  # whether the result has columns of the rest


class Rows(NamedTuple):
    """The rows of a cache that a block of a list names."""

    start: tl.tensor  # where each row begins
    scales: tl.tensor  # where its scales begin
    readable: tl.tensor  # whether it may be read


class Finished(NamedTuple):
    """Accumulators of rows, and the factors that make them results."""

    groups: tl.tuple
    factor: tl.tensor
    rest: tl.tensor
    rest_factor: tl.tensor


@triton.jit
def places_of(pages, offset, slot_stride, FORMAT: tl.constexpr):
    """Where the rows at `offset` in their pages begin, and where their scales do."""
    if FORMAT.PLANAR:
        values = pages + offset.to(tl.int64) * FORMAT.ROW
        # 32 bits are enough for offsets within a page: no memory holds pages of 2^28 rows.
        scales = pages + FORMAT.SCALES_AT + offset * FORMAT.SCALES_STEP
    else:
        values = pages + offset.to(tl.int64) * slot_stride
        scales = values + FORMAT.SCALES_AT
    return values, scales


@triton.jit
def whole_columns(rows, readable, first, COLUMNS: tl.constexpr, COLUMNS_PAD: tl.constexpr):
    """COLUMNS columns of rows, beginning with `first`; zero where a row may not be read."""
    column = tl.arange(0, COLUMNS_PAD)
    mask = readable[:, None]
    if COLUMNS < COLUMNS_PAD:
        mask = mask & (column < COLUMNS)[None, :]
    return tl.load(rows[:, None] + first + column[None, :], mask=mask, other=0)


@triton.jit
def scale_values(codes, SCALES: tl.constexpr, FACTOR: tl.constexpr):
    """Scales of one byte, the lowest of each of `codes`, as float32 and multiplied by FACTOR; exact, NaN stays."""
    if SCALES == "float8_e8m0fnu":
        power = codes & 0xFF
        bits = power.to(tl.uint32) << 23
        bits = tl.where(power == 0, 0x00400000, tl.where(power == 255, 0x7FC00000, bits))
        scale = bits.to(tl.float32, bitcast=True)
        if FACTOR != 1.0:
            scale = scale * FACTOR
    else:  # float8_e4m3fn; float16 has sign, exponent and mantissa in the same order
        code = codes.to(tl.uint32)
        half = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
        factor: tl.constexpr = 256.0 * FACTOR
        scale = half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * factor
        scale = tl.where((code & 0x7F) == 0x7F, float("nan"), scale)
    return scale


@triton.jit
def spread(numbers, EACH: tl.constexpr, COLUMNS: tl.constexpr):
    """[rows, COLUMNS] of which the first EACH columns are the first of `numbers` [rows], the next EACH the second."""
    column = tl.arange(0, COLUMNS)[None, :]
    spans = ()
    for index in tl.static_range(len(numbers)):
        spans += (numbers[index][:, None],)
    for level in tl.static_range(len(numbers)):
        if len(spans) > 1:  # join each span with its neighbour
            joined = ()
            for index in tl.static_range(0, len(spans), 2):
                if index + 1 < len(spans):
                    joined += (tl.where(column < (index + 1) * (EACH << level), spans[index], spans[index + 1]),)
                else:
                    joined += (spans[index],)
            spans = joined
    return spans[0]


@triton.jit
def column_scales(rows, FIRST: tl.constexpr, FORMAT: tl.constexpr, WIDTH: tl.constexpr, PER_BYTE: tl.constexpr,
                  FACTOR: tl.constexpr):  # fmt: skip
    """The scale, times FACTOR, of each byte of the codes of WIDTH columns; a byte holds those of PER_BYTE columns."""
    LAST: tl.constexpr = FIRST + WIDTH if FIRST + WIDTH < FORMAT.VALUES else FORMAT.VALUES
    COUNT: tl.constexpr = (LAST - FIRST + FORMAT.GROUP - 1) // FORMAT.GROUP
    EACH: tl.constexpr = FORMAT.GROUP // PER_BYTE
    BYTES: tl.constexpr = WIDTH // PER_BYTE
    first = rows.scales + FIRST // FORMAT.GROUP
    loaded = ()
    if COUNT > 4:  # four scales at a time, in a word
        words = first.to(tl.pointer_type(tl.uint32))
        for index in tl.static_range(COUNT // 4):
            loaded += (tl.load(words + index, mask=rows.readable, other=0),)
        byte = tl.arange(0, BYTES)[None, :]
        codes = spread(loaded, 4 * EACH, BYTES) >> (byte // EACH % 4 * 8).to(tl.uint32)
        scales = scale_values(codes, FORMAT.SCALES, FACTOR)
    else:
        for index in tl.static_range(COUNT):
            code = tl.load(first + index, mask=rows.readable, other=0).to(tl.uint8, bitcast=True)
            loaded += (scale_values(code, FORMAT.SCALES, FACTOR),)
        scales = spread(loaded, EACH, BYTES)
    return scales


@triton.jit
def e2m1_values(codes):
    """e2m1 codes as float32 of 2^-14 of their values: float16 has sign, exponent and mantissa in the same order."""
    half = ((codes & 7) << 9) | ((codes & 8) << 12)
    return half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def scaled_pairs(rows, FIRST: tl.constexpr, FORMAT: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr):
    """WIDTH columns of rows, beginning with FIRST, multiplied by their scales; a byte holds the codes of two."""
    # Two bytes at a time: where an operand was loaded in single bytes and joined, Triton 3.6 gives each thread eight
    # neighbouring keys out of 32, even if the product with the values has only 16.
    COUNT: tl.constexpr = WIDTH // 4
    both = whole_columns(rows.start.to(tl.pointer_type(tl.uint16)), rows.readable, FIRST // 4, COUNT, COUNT)
    pairs = tl.reshape(tl.join(both & 0xFF, both >> 8), [both.shape[0], WIDTH // 2]).to(tl.uint32)
    scale = column_scales(rows, FIRST, FORMAT, WIDTH, 2, 16384.0)
    even = narrow(e2m1_values(pairs) * scale, DTYPE)
    odd = narrow(e2m1_values(pairs >> 4) * scale, DTYPE)
    return tl.reshape(tl.join(even, odd), [even.shape[0], WIDTH])


@triton.jit
def rotary_columns(rows, first, FORMAT: tl.constexpr, COLUMNS: tl.constexpr, COLUMNS_PAD: tl.constexpr):
    """COLUMNS rotary columns of rows, beginning with `first` of them."""
    rotary = (rows.start + FORMAT.ROTARY_AT).to(tl.pointer_type(tl.bfloat16))
    return whole_columns(rotary, rows.readable, first, COLUMNS, COLUMNS_PAD)


@triton.jit
def scaled_columns(rows, FIRST: tl.constexpr, FORMAT: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr):
    """WIDTH columns of rows, beginning with FIRST, multiplied by their scales; the last may be rotary ones."""
    CODED: tl.constexpr = FORMAT.VALUES - FIRST  # columns until the rotary ones
    codes = whole_columns(rows.start, rows.readable, FIRST, CODED, WIDTH).to(tl.uint8, bitcast=True)
    values = decode(codes, FORMAT.CODES, tl.float32) * column_scales(rows, FIRST, FORMAT, WIDTH, 1, 1.0)
    if CODED < WIDTH:
        column = tl.arange(0, WIDTH)
        rotary = (rows.start + FORMAT.ROTARY_AT).to(tl.pointer_type(tl.bfloat16))[:, None] + (column - CODED)[None, :]
        mask = rows.readable[:, None] & (column >= CODED)[None, :]
        values = tl.where((column < CODED)[None, :], values, tl.load(rotary, mask=mask, other=0).to(tl.float32))
    return narrow(values, DTYPE)


@triton.jit
def stored_columns(rows, first, FORMAT: tl.constexpr, COLUMNS: tl.constexpr, COLUMNS_PAD: tl.constexpr,
                   DTYPE: tl.constexpr):  # fmt: skip
    """COLUMNS columns of rows, beginning with `first`, decoded where they are codes, without any scale."""
    keys = whole_columns(rows.start, rows.readable, first, COLUMNS, COLUMNS_PAD)
    if FORMAT.CODES != "plain":
        if FORMAT.CODES != "int8":
            keys = keys.to(tl.uint8, bitcast=True)
        keys = decoded_at_once(decode(keys, FORMAT.CODES, DTYPE), rows.readable)
    return keys


@triton.jit
def key_columns(rows, FIRST: tl.constexpr, FORMAT: tl.constexpr, OPERANDS: tl.constexpr):
    """The group of columns that begins with FIRST as an operand, without its scales where these are folded."""
    if FORMAT.SCALES == "" or FORMAT.FOLDED:
        keys = stored_columns(rows, FIRST, FORMAT, OPERANDS.GROUPED - FIRST, OPERANDS.WIDTH, OPERANDS.DTYPE)
    elif FORMAT.CODES == "e2m1":
        keys = scaled_pairs(rows, FIRST, FORMAT, OPERANDS.WIDTH, OPERANDS.DTYPE)
    else:
        keys = scaled_columns(rows, FIRST, FORMAT, OPERANDS.WIDTH, OPERANDS.DTYPE)
    return keys


@triton.jit
def rest_columns(rows, FORMAT: tl.constexpr, OPERANDS: tl.constexpr):
    """The columns after those of the groups as an operand."""
    if FORMAT.ROTARY > 0:
        keys = rotary_columns(rows, 0, FORMAT, OPERANDS.REST, OPERANDS.REST_PAD)
    else:
        keys = stored_columns(
            rows, OPERANDS.GROUPED, FORMAT, OPERANDS.REST, OPERANDS.REST_PAD, OPERANDS.REST_DTYPE
        )  # fmt: skip
    return keys


@triton.jit
def key_groups(rows, FORMAT: tl.constexpr, OPERANDS: tl.constexpr):
    """The groups of columns as operands."""
    groups = ()
    for group in tl.static_range(OPERANDS.GROUPS):
        groups += (key_columns(rows, group * OPERANDS.WIDTH, FORMAT, OPERANDS),)
    return groups


@triton.jit
def group_scale(rows, GROUP: tl.constexpr):
    """The float32 scales of a group of columns that are to be folded."""
    EACH: tl.constexpr = 32 // rows.scales.dtype.element_ty.primitive_bitwidth  # elements of the cache to a scale
    return tl.load((rows.scales + EACH * GROUP).to(tl.pointer_type(tl.float32)), mask=rows.readable, other=0)


@triton.jit
def query_columns(rows, valid, unit, FIRST: tl.constexpr, LAST: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr,
                  DIVIDED: tl.constexpr):  # fmt: skip
    """Columns [FIRST, FIRST + WIDTH) of query rows, as far as they lie before LAST, as an operand; what rounding lost.

    If DIVIDED, rows are divided by `unit` first.
    """
    given = whole_columns(rows, valid, FIRST, LAST - FIRST, WIDTH)
    q = given
    lost = given
    if DIVIDED or given.dtype != DTYPE:
        exact = given.to(tl.float32)
        if DIVIDED:
            exact = exact / unit[:, None]
        q = narrow(exact, DTYPE)
        lost = lost_to_rounding(exact, q)
    return q, lost


@triton.jit
def query_groups(rows, valid, unit, OPERANDS: tl.constexpr):
    """The groups of columns of query rows: (operands, what rounding lost of each)."""
    groups = ()
    lost = ()
    for group in tl.static_range(OPERANDS.GROUPS):
        q, q_lost = query_columns(
            rows, valid, unit, group * OPERANDS.WIDTH, OPERANDS.GROUPED, OPERANDS.WIDTH, OPERANDS.DTYPE,
            OPERANDS.DIVIDED,
        )  # fmt: skip
        groups += (q,)
        lost += (q_lost,)
    return groups, lost


@triton.jit
def load_queries(rows, valid, OPERANDS: tl.constexpr):
    """(groups, lost, rest, lost_rest, unit) of rows, as `Queries` has them."""
    unit = tl.full([rows.shape[0]], 1.0, tl.float32)
    REST_DIVIDED: tl.constexpr = OPERANDS.DIVIDED and tl.float16 == OPERANDS.REST_DTYPE
    if OPERANDS.DIVIDED:
        grouped = whole_columns(rows, valid, 0, OPERANDS.GROUPED, OPERANDS.GROUPS * OPERANDS.WIDTH)
        unit = unit_of(grouped.to(tl.float32))
    if REST_DIVIDED and OPERANDS.REST > 0:  # both are powers of two, of which the larger one is that of the whole row
        rest = whole_columns(rows, valid, OPERANDS.GROUPED, OPERANDS.REST, OPERANDS.REST_PAD)
        unit = tl.maximum(unit, unit_of(rest.to(tl.float32)))
    groups, lost = query_groups(rows, valid, unit, OPERANDS)
    q_rest, lost_rest = groups[0], lost[0]
    if OPERANDS.REST > 0:
        q_rest, lost_rest = query_columns(
            rows, valid, unit, OPERANDS.GROUPED, OPERANDS.GROUPED + OPERANDS.REST, OPERANDS.REST_PAD,
            OPERANDS.REST_DTYPE, REST_DIVIDED,
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
def store_columns(target_ptr, index, acc, factor, valid, FIRST: tl.constexpr, LAST: tl.constexpr, D: tl.constexpr):
    """Store `acc` times `factor` in finished rows of D columns, from column FIRST on and before column LAST."""
    column = FIRST + tl.arange(0, acc.shape[1])
    value = narrow(acc * factor[:, None], target_ptr.dtype.element_ty)
    mask = valid[:, None] & (column < LAST)[None, :]
    tl.store(target_ptr + index[:, None] * D + column[None, :], value, mask=mask)


@triton.jit
def store_groups(target_ptr, index, finished, valid, COLUMNS: tl.constexpr, HAS_REST: tl.constexpr, D: tl.constexpr):
    """Store finished rows of D columns: those of the groups and, if HAS_REST, those of the rest."""
    LAST: tl.constexpr = COLUMNS.GROUPED if COLUMNS.GROUPED < D else D  # pyright: ignore[reportAssignmentType]
    for group in tl.static_range(len(finished.groups)):
        store_columns(target_ptr, index, finished.groups[group], finished.factor, valid, group * COLUMNS.WIDTH, LAST, D)
    if HAS_REST:
        store_columns(target_ptr, index, finished.rest, finished.rest_factor, valid, COLUMNS.GROUPED, D, D)
