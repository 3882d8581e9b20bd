"""Latent attention: loads of latent rows and queries as operands, and stores of finished rows."""

import dataclasses
from typing import NamedTuple

import triton
import triton.language as tl

from ragged_attention.kernels_triton._compiler import decoded_at_once
from ragged_attention.kernels_triton._constants import Constants
from ragged_attention.kernels_triton._formats import decode, narrow, scale_values, unit_of
from ragged_attention.kernels_triton._softmax import lost_to_rounding


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class RowFormat(Constants):
    """The layout of a cache's rows. Distances are in elements of the cache, which are bytes if it is quantised."""

    CODES: str  # the values' FORMAT, see `decode`; "e2m1" has two values per byte
    SCALES: str  # the dtype of the stored scales, or "" without scales
    GROUP: int  # columns that share a scale
    VALUES: int  # the number of columns in the format CODES, from the first on; 0 means all columns
    ROTARY: int  # bfloat16 columns stored after the values and scales
    ROTARY_AT: int  # distance of the rotary columns from the beginning of their row
    PLANAR: bool  # whether a page holds all of its scales after all of its rows
    ROW: int  # distance between rows of a planar page
    SCALES_AT: int  # distance of the first scale from the beginning of its row or, if planar, of its page
    SCALES_STEP: int  # distance between the scales of consecutive rows of a planar page
    FOLDED: bool  # whether scales multiply logits and weights instead of values
    RESCALED: bool  # whether weights times scales are float16, and a second running maximum keeps them near 1
    PAGE_SIZE: int  # rows of a page
    PAGE_UNIT: int  # page strides are given in units of this many elements


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Columns(Constants):
    """The division of a row's columns into operands: equal groups, followed by the rest."""

    GROUPS: int  # number of groups
    WIDTH: int  # columns of a group, padded to a power of two
    GROUPED: int  # columns of all groups, without padding
    REST: int  # columns after the groups
    REST_PAD: int  # REST, padded to a power of two


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Operands(Columns):
    """The operands of products of queries and keys."""

    DTYPE: tl.dtype  # the dtype of the groups' operands
    REST_DTYPE: tl.dtype  # the dtype of the rest's operands
    PRODUCTS: int  # products per group: 2 if rounding queries to DTYPE is inexact and the error has its own product
    REST_PRODUCTS: int  # products for the rest
    DIVIDED: bool  # whether query rows are divided by a power of two to fit float16
    REST_IS_VALUE: bool  # whether the rest serves as values, too
    REST_SCALED: bool  # whether the products for the rest have a factor of their own


class Rows(NamedTuple):
    """The cache rows of a block of list entries."""

    start: tl.tensor  # the address of each row
    scales: tl.tensor  # the address of each row's scales
    readable: tl.tensor  # whether the row may be read


class Finished(NamedTuple):
    """The accumulators of finished rows, and the factors that turn them into results."""

    groups: tl.tuple
    factor: tl.tensor
    rest: tl.tensor
    rest_factor: tl.tensor


@triton.jit
def places_of(pages, offset, slot_stride, FORMAT: tl.constexpr):
    """(addresses of rows, addresses of their scales) for the rows at `offset` in their pages."""
    if FORMAT.PLANAR:
        values = pages + offset.to(tl.int64) * FORMAT.ROW
        # 32 bits suffice for offsets within a page, since no memory holds a page of 2^28 rows.
        scales = pages + FORMAT.SCALES_AT + offset * FORMAT.SCALES_STEP
    else:
        values = pages + offset.to(tl.int64) * slot_stride
        scales = values + FORMAT.SCALES_AT
    return values, scales


@triton.jit
def whole_columns(rows, readable, first, COLUMNS: tl.constexpr, COLUMNS_PAD: tl.constexpr):
    """COLUMNS columns of rows, from column `first` on; rows that may not be read are zero."""
    column = tl.arange(0, COLUMNS_PAD)
    mask = readable[:, None]
    if COLUMNS < COLUMNS_PAD:
        mask = mask & (column < COLUMNS)[None, :]
    return tl.load(rows[:, None] + first + column[None, :], mask=mask, other=0)


@triton.jit
def spread(numbers, EACH: tl.constexpr, COLUMNS: tl.constexpr):
    """A tensor [rows, COLUMNS] in which each [rows] tensor of the tuple `numbers` fills EACH consecutive columns."""
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
    """The scale, times FACTOR, of each code byte of WIDTH columns; a byte has the codes of PER_BYTE columns."""
    LAST: tl.constexpr = FIRST + WIDTH if FIRST + WIDTH < FORMAT.VALUES else FORMAT.VALUES
    COUNT: tl.constexpr = (LAST - FIRST + FORMAT.GROUP - 1) // FORMAT.GROUP
    EACH: tl.constexpr = FORMAT.GROUP // PER_BYTE
    BYTES: tl.constexpr = WIDTH // PER_BYTE
    first = rows.scales + FIRST // FORMAT.GROUP
    loaded = ()
    if COUNT > 4:  # load four scales at a time, as a word
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
    """e2m1 codes as float32, times 2^-14. The codes have sign, exponent and mantissa in the same order as float16."""
    half = ((codes & 7) << 9) | ((codes & 8) << 12)
    return half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def scaled_pairs(rows, FIRST: tl.constexpr, FORMAT: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr):
    """WIDTH e2m1 columns of rows, from FIRST on, multiplied by their scales. A byte has the codes of two columns."""
    # Codes are loaded two bytes at a time. For an operand joined from single bytes, Triton 3.6 selects a layout for 32
    # keys, with eight neighbouring keys per thread. A product with only 16 keys then pairs weights with the wrong keys.
    COUNT: tl.constexpr = WIDTH // 4
    both = whole_columns(rows.start.to(tl.pointer_type(tl.uint16)), rows.readable, FIRST // 4, COUNT, COUNT)
    pairs = tl.reshape(tl.join(both & 0xFF, both >> 8), [both.shape[0], WIDTH // 2]).to(tl.uint32)
    scale = column_scales(rows, FIRST, FORMAT, WIDTH, 2, 16384.0)
    even = narrow(e2m1_values(pairs) * scale, DTYPE)
    odd = narrow(e2m1_values(pairs >> 4) * scale, DTYPE)
    return tl.reshape(tl.join(even, odd), [even.shape[0], WIDTH])


@triton.jit
def rotary_columns(rows, first, FORMAT: tl.constexpr, COLUMNS: tl.constexpr, COLUMNS_PAD: tl.constexpr):
    """COLUMNS rotary columns of rows, from rotary column `first` on."""
    rotary = (rows.start + FORMAT.ROTARY_AT).to(tl.pointer_type(tl.bfloat16))
    return whole_columns(rotary, rows.readable, first, COLUMNS, COLUMNS_PAD)


@triton.jit
def scaled_columns(rows, FIRST: tl.constexpr, FORMAT: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr):
    """WIDTH columns of rows, from column FIRST on, multiplied by their scales. The last columns may be rotary."""
    CODED: tl.constexpr = FORMAT.VALUES - FIRST  # columns before the rotary columns
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
    """COLUMNS columns of rows, from column `first` on, decoded if they are codes, but not multiplied by scales."""
    keys = whole_columns(rows.start, rows.readable, first, COLUMNS, COLUMNS_PAD)
    if FORMAT.CODES != "plain":
        if FORMAT.CODES != "int8":
            keys = keys.to(tl.uint8, bitcast=True)
        keys = decoded_at_once(decode(keys, FORMAT.CODES, DTYPE), rows.readable)
    return keys


@triton.jit
def key_columns(rows, FIRST: tl.constexpr, FORMAT: tl.constexpr, OPERANDS: tl.constexpr):
    """The group of columns from FIRST on as an operand, multiplied by scales unless these are folded."""
    if FORMAT.SCALES == "" or FORMAT.FOLDED:
        keys = stored_columns(rows, FIRST, FORMAT, OPERANDS.GROUPED - FIRST, OPERANDS.WIDTH, OPERANDS.DTYPE)
    elif FORMAT.CODES == "e2m1":
        keys = scaled_pairs(rows, FIRST, FORMAT, OPERANDS.WIDTH, OPERANDS.DTYPE)
    else:
        keys = scaled_columns(rows, FIRST, FORMAT, OPERANDS.WIDTH, OPERANDS.DTYPE)
    return keys


@triton.jit
def rest_columns(rows, FORMAT: tl.constexpr, OPERANDS: tl.constexpr):
    """The columns after the groups, as an operand."""
    if FORMAT.ROTARY > 0:
        keys = rotary_columns(rows, 0, FORMAT, OPERANDS.REST, OPERANDS.REST_PAD)
    else:
        keys = stored_columns(
            rows, OPERANDS.GROUPED, FORMAT, OPERANDS.REST, OPERANDS.REST_PAD, OPERANDS.REST_DTYPE
        )  # fmt: skip
    return keys


@triton.jit
def key_groups(rows, FORMAT: tl.constexpr, OPERANDS: tl.constexpr):
    """All groups of columns, as operands."""
    groups = ()
    for group in tl.static_range(OPERANDS.GROUPS):
        groups += (key_columns(rows, group * OPERANDS.WIDTH, FORMAT, OPERANDS),)
    return groups


@triton.jit
def group_scale(rows, GROUP: tl.constexpr):
    """The float32 scale of each row's columns in the group with index GROUP; the caller folds it."""
    EACH: tl.constexpr = 32 // rows.scales.dtype.element_ty.primitive_bitwidth  # elements of the cache per scale
    return tl.load((rows.scales + EACH * GROUP).to(tl.pointer_type(tl.float32)), mask=rows.readable, other=0)


@triton.jit
def query_columns(rows, valid, unit, FIRST: tl.constexpr, LAST: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr,
                  DIVIDED: tl.constexpr):  # fmt: skip
    """(operand, rounding error) of the columns [FIRST, FIRST + WIDTH) of query rows; columns from LAST on are zero.

    If DIVIDED, rows are divided by `unit` before they are rounded. If nothing is rounded, the error is a stand-in.
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
    """(operands, rounding errors) of the groups of columns of query rows."""
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
    """(groups, lost, rest, lost_rest, unit) of query rows; see `Queries`."""
    unit = tl.full([rows.shape[0]], 1.0, tl.float32)
    REST_DIVIDED: tl.constexpr = OPERANDS.DIVIDED and tl.float16 == OPERANDS.REST_DTYPE
    if OPERANDS.DIVIDED:
        grouped = whole_columns(rows, valid, 0, OPERANDS.GROUPED, OPERANDS.GROUPS * OPERANDS.WIDTH)
        unit = unit_of(grouped.to(tl.float32))
    if REST_DIVIDED and OPERANDS.REST > 0:  # the rest is divided, too, so the unit must be large enough for it
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
    """A tuple of zero operands with the shapes of `groups`."""
    zeros = ()
    for group in tl.static_range(len(groups)):
        zeros += (tl.zeros_like(groups[group]),)
    return zeros


@triton.jit
def store_columns(target_ptr, index, acc, factor, valid, FIRST: tl.constexpr, LAST: tl.constexpr, D: tl.constexpr):
    """Store `acc` times `factor` in the columns [FIRST, LAST) of finished rows, which have D columns."""
    column = FIRST + tl.arange(0, acc.shape[1])
    value = narrow(acc * factor[:, None], target_ptr.dtype.element_ty)
    mask = valid[:, None] & (column < LAST)[None, :]
    tl.store(target_ptr + index[:, None] * D + column[None, :], value, mask=mask)


@triton.jit
def store_groups(target_ptr, index, finished, valid, COLUMNS: tl.constexpr, HAS_REST: tl.constexpr, D: tl.constexpr):
    """Store finished rows of D columns: the columns of all groups and, if HAS_REST, the rest."""
    LAST: tl.constexpr = COLUMNS.GROUPED if COLUMNS.GROUPED < D else D  # pyright: ignore[reportAssignmentType]
    for group in tl.static_range(len(finished.groups)):
        store_columns(target_ptr, index, finished.groups[group], finished.factor, valid, group * COLUMNS.WIDTH, LAST, D)
    if HAS_REST:
        store_columns(target_ptr, index, finished.rest, finished.rest_factor, valid, COLUMNS.GROUPED, D, D)
