"""Latent attention: a call's formats and shapes as the records of constants that kernels read."""

from typing import Any

import triton.language as tl

from ragged_attention.calls import WIDE_FLOATS, CacheFormat, dtype_name
from ragged_attention.kernels_triton._formats import number_format
from ragged_attention.kernels_triton._latent.rows import Operands, RowFormat
from ragged_attention.kernels_triton._latent.softmax import SEPARATE_QK_ROWS
from ragged_attention.kernels_triton._tiles import cdiv, next_power_of_2

DTYPES = {"float32": tl.float32, "float16": tl.float16, "bfloat16": tl.bfloat16}
SCALED_WIDTH = 128  # columns of a group of codes


def row_format(form: CacheFormat, arch: str, page_size: int, page_unit: int) -> RowFormat:
    """The `RowFormat` of a cache format with pages of `page_size` rows."""
    return RowFormat(
        CODES=number_format(form.codes, arch),
        SCALES=form.scales,
        GROUP=form.group,
        VALUES=form.values,
        ROTARY=form.rotary,
        ROTARY_AT=form.rotary_at,
        PLANAR=form.planar,
        ROW=form.row_bytes,
        SCALES_AT=page_size * form.row_bytes if form.planar else form.value_bytes,
        SCALES_STEP=form.padded_scale_bytes,
        FOLDED=form.folded,
        RESCALED=form.folded,
        PAGE_SIZE=page_size,
        PAGE_UNIT=page_unit,
    )


def decoded_format(form: CacheFormat, page_unit: int) -> RowFormat:
    """The `RowFormat` of the bfloat16 rows that `decoding` makes from a quantised format, with one row per page.

    The columns of all groups come first. If scales are folded, these columns are stored unscaled, and their float32
    scales follow, each in the space of two elements. Rotary columns are last, unless they are part of a group.
    """
    grouped, rest = stored_columns(form)
    return RowFormat(
        CODES="plain",
        SCALES=form.scales if form.folded else "",
        GROUP=form.group,
        VALUES=grouped,
        ROTARY=rest,
        ROTARY_AT=grouped + folded_elements(form),
        PLANAR=False,
        ROW=0,
        SCALES_AT=grouped,
        SCALES_STEP=0,
        FOLDED=form.folded,
        RESCALED=False,
        PAGE_SIZE=1,
        PAGE_UNIT=page_unit,
    )


def decoded_width(form: CacheFormat) -> int:
    """The elements of a decoded row, with padding so that each row begins at a multiple of 16 elements."""
    return cdiv(sum(stored_columns(form)) + folded_elements(form), 16) * 16


def folded_elements(form: CacheFormat) -> int:
    """The number of 16-bit elements that hold a decoded row's scales."""
    return 2 * form.num_groups if form.folded else 0


def stored_columns(form: CacheFormat) -> tuple[int, int]:
    """(columns in groups, remaining columns) of a quantised row.

    Rotary columns belong to the last group if they fill it exactly; otherwise they are the remaining columns.
    """
    free_columns = -form.values % SCALED_WIDTH
    return (form.width, 0) if form.rotary == free_columns else (form.values, form.rotary)


def columns(call: Any) -> tuple[int, int]:
    """(columns in groups, which serve as V, and remaining columns) of a row."""
    return stored_columns(call.kv_format) if call.kv_format.quantized else (call.d_v, call.d_qk - call.d_v)


def is_copied(form: CacheFormat, decoded: bool) -> bool:
    """Whether stored rows serve as operands without conversion."""
    return (decoded or form.codes in WIDE_FLOATS) and not form.folded


def groups_of(form: CacheFormat, width: int, rows: int, decoded: bool) -> int:
    """The number of groups for `width` columns. Two groups make each thread copy fewer rows than one group would."""
    if form.folded:
        return form.num_groups  # the products over a group are multiplied by its scale
    if width <= SCALED_WIDTH:
        return 1
    return 2 if is_copied(form, decoded) and rows >= SEPARATE_QK_ROWS.value else 4


def operands(call: Any, rows: int, *, decoded: bool = False) -> Operands:
    """The `Operands` of tiles with this many rows; `decoded` says whether `decoding` has decoded the cache."""
    form, q_dtype = call.kv_format, DTYPES[dtype_name(call.q)]
    grouped, rest = columns(call)
    groups = groups_of(form, grouped, rows, decoded)
    kind = rest_kind = q_dtype
    if form.eight_bit and q_dtype == tl.bfloat16:
        kind = rest_kind = tl.float16
    elif form.quantized:
        kind, rest_kind = tl.float16 if form.folded and not decoded else tl.bfloat16, tl.bfloat16
    return Operands(
        GROUPS=groups,
        WIDTH=max(16, next_power_of_2(cdiv(grouped, groups))),
        GROUPED=grouped,
        REST=rest,
        REST_PAD=max(16, next_power_of_2(rest)),
        DTYPE=kind,
        REST_DTYPE=rest_kind,
        PRODUCTS=products(q_dtype, kind),
        REST_PRODUCTS=products(q_dtype, rest_kind),
        DIVIDED=kind == tl.float16 and (form.quantized or q_dtype != kind),
        REST_IS_VALUE=call.d_v > grouped,
        REST_SCALED=getattr(call, "scales_rope", False),
    )


def products(q_dtype: tl.dtype, kind: tl.dtype) -> int:
    """The number of products: 1 if queries fit the operands' dtype `kind`, else 2, to add the queries' rounding errors.

    bfloat16 queries fit float16, because their rows are divided by a power of two.
    """
    return 1 if q_dtype == kind or (q_dtype, kind) == (tl.bfloat16, tl.float16) else 2
