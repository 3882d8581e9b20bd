"""Rows of K and V as pages store them: their formats, and loads of rows as operands of products.

If a whole row has one scale, its codes are the operand, and the scale multiplies a column of logits or of weights. If
blocks of columns have scales, the scales multiply the codes, and the result is the operand.
"""

import dataclasses
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ragged_attention.calls import dtype_name
from ragged_attention.calls.cache_formats import KvFormat
from ragged_attention.kernels_triton._compiler import MISPAIRS_FEW
from ragged_attention.kernels_triton._constants import INTERPRETED, Constants
from ragged_attention.kernels_triton._formats import decode, narrow, number_format, scale_values

NO_STRIDES = (0, 0, 0, 0)
DTYPES = {"float32": tl.float32, "float16": tl.float16, "bfloat16": tl.bfloat16}


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Stored(Constants):
    """How pages store the rows of K or of V.

    The strides are those of the scale pages, in elements. They depend on the layout of pages alone, so they are
    constants. The stride of heads is not among them, because it may depend on the number of pages.
    """

    CODES: str  # the elements' FORMAT, see `decode`; "uint4" and "e2m1" have the codes of two columns in a byte
    SCALES: str  # the dtype of stored scales, or ""
    GROUP: int  # columns of a block with its own scale; 0 if a scale belongs to the whole row
    ZERO: str  # where a row's zero point is stored: "mantissa", "stored", or "" without one; see `KvFormat`
    DECODED_AT_ONCE: bool  # whether values need the workaround `decoded_at_once`
    PAGE_STRIDE: int
    SLOT_STRIDE: int
    COLUMN_STRIDE: int


class RowPages(NamedTuple):
    """The addresses of one KV head's rows of K or of V, and of their scales."""

    ptr: tl.tensor
    page_stride: tl.tensor
    slot_stride: tl.tensor
    scales_ptr: tl.tensor  # a stand-in if there are no scales


class Slots(NamedTuple):
    """The locations of a block's keys."""

    keys: tl.tensor  # the keys' positions in the sequence
    page: tl.tensor  # the page of each key, or the one page of all keys
    readable: tl.tensor  # whether each key may be read


@triton.jit
def addresses(first_ptr, page_stride, slot_stride, slots, PAGE_SIZE: tl.constexpr):
    """The address of each key's row, from the address of the first row. If PAGE_SIZE is 0, each key is a page."""
    pages = first_ptr + slots.page.to(tl.int64) * page_stride
    if PAGE_SIZE > 0:
        pages += (slots.keys % PAGE_SIZE).to(tl.int64) * slot_stride
    return pages


@triton.jit
def load_elements(rows, COUNT: tl.constexpr, COUNT_PAD: tl.constexpr, readable, MASKED: tl.constexpr):
    """COUNT elements of rows, from the addresses `rows` [keys]. If MASKED, unreadable rows are zero."""
    column = tl.arange(0, COUNT_PAD)
    if MASKED:
        stored = tl.load(rows[:, None] + column[None, :], mask=readable[:, None] & (column < COUNT)[None, :], other=0)
    elif COUNT == COUNT_PAD:
        stored = tl.load(rows[:, None] + column[None, :])
    else:
        stored = tl.load(rows[:, None] + column[None, :], mask=(column < COUNT)[None, :], other=0)
    return stored


@triton.jit
def load_codes(pages, slots, MASKED: tl.constexpr, PAGE_SIZE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
               STORED: tl.constexpr):  # fmt: skip
    """The codes [keys, D_PAD] of rows, one in each element."""
    rows = addresses(pages.ptr, pages.page_stride, pages.slot_stride, slots, PAGE_SIZE)
    if STORED.CODES == "uint4" or STORED.CODES == "e2m1":
        # Codes are loaded two bytes at a time; see `_latent.rows.scaled_pairs`.
        both = load_elements(rows.to(tl.pointer_type(tl.uint16)), D // 4, D_PAD // 4, slots.readable, MASKED)
        pairs = tl.reshape(tl.join(both & 0xFF, both >> 8), [both.shape[0], D_PAD // 2])
        codes = tl.reshape(tl.join(pairs & 0xF, pairs >> 4), [both.shape[0], D_PAD])
    else:
        codes = load_elements(rows, D, D_PAD, slots.readable, MASKED)
    return codes


@triton.jit
def block_scales(pages, slots, MASKED: tl.constexpr, PAGE_SIZE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
                 STORED: tl.constexpr):  # fmt: skip
    """The scale of each column, [keys, D_PAD] float32."""
    block = tl.arange(0, D_PAD // STORED.GROUP)
    rows = addresses(pages.scales_ptr, STORED.PAGE_STRIDE, STORED.SLOT_STRIDE, slots, PAGE_SIZE)
    exists = (block < D // STORED.GROUP)[None, :]
    if MASKED:
        exists = exists & slots.readable[:, None]
    address = rows[:, None] + block[None, :] * STORED.COLUMN_STRIDE
    if MISPAIRS_FEW and STORED.CODES == "e2m1" and (rows.shape[0] < 32 or D_PAD < 32):
        stored = tl.zeros(address.shape, pages.scales_ptr.dtype.element_ty)
        if pages.slot_stride >= 0:  # always true, but hides the load's size; see MISPAIRS_FEW
            stored = tl.load(address, mask=exists, other=0)
    else:
        stored = tl.load(address, mask=exists, other=0)
    scales = scale_values(stored, STORED.SCALES, 1.0)
    each = tl.broadcast_to(scales[:, :, None], [scales.shape[0], scales.shape[1], STORED.GROUP])
    return tl.reshape(each, [scales.shape[0], D_PAD])


@triton.jit
def load_rows(pages, slots, DTYPE: tl.constexpr, MASKED: tl.constexpr, PAGE_SIZE: tl.constexpr, D: tl.constexpr,
              D_PAD: tl.constexpr, STORED: tl.constexpr):  # fmt: skip
    """Rows [keys, D_PAD] as an operand, multiplied by the scales of their blocks, but not by those of whole rows."""
    codes = load_codes(pages, slots, MASKED, PAGE_SIZE, D, D_PAD, STORED)
    if STORED.GROUP:
        wide = decode(codes, STORED.CODES, tl.float32)
        values = narrow(wide * block_scales(pages, slots, MASKED, PAGE_SIZE, D, D_PAD, STORED), DTYPE)
    else:
        values = decode(codes, STORED.CODES, DTYPE)
    return values


@triton.jit
def load_numbers(address, slots, MASKED: tl.constexpr):
    """The number at each key's `address`, as float32. If MASKED, the numbers of unreadable keys are 0."""
    numbers = tl.load(address, mask=slots.readable, other=0) if MASKED else tl.load(address)
    return numbers.to(tl.float32)


@triton.jit
def row_scales(pages, slots, MASKED: tl.constexpr, PAGE_SIZE: tl.constexpr, STORED: tl.constexpr):
    """(scales, zero points) [keys] of whole rows; zero points are 0 if the format has none."""
    address = addresses(pages.scales_ptr, STORED.PAGE_STRIDE, STORED.SLOT_STRIDE, slots, PAGE_SIZE)
    scale = load_numbers(address, slots, MASKED)
    zero = tl.zeros_like(scale)
    if STORED.ZERO == "mantissa":
        bits = scale.to(tl.uint32, bitcast=True)
        zero = (bits & 0xF).to(tl.float32)
        scale = (bits & 0xFFFFFFF0).to(tl.float32, bitcast=True)
    elif STORED.ZERO == "stored":
        zero = load_numbers(address + STORED.COLUMN_STRIDE, slots, MASKED)
    return scale, zero


@triton.jit
def without_infinite(values, weights, logits):
    """(values, weights): infinities and NaNs among values become 0, and weights of rows that see them become NaN.

    Otherwise a weight of 0 times such a value would be NaN in rows that do not see it, too.
    """
    finite = tl.abs(values.to(tl.float32)) < float("inf")
    bad = tl.min(finite.to(tl.int32), 1) == 0
    values = tl.where(finite, values.to(tl.float32), 0.0).to(values.dtype)
    return values, tl.where(bad[None, :] & (logits != float("-inf")), float("nan"), weights)


# ---- host side


def stored_of(form: KvFormat, arch: str, scale_pages: Any, launch: Any) -> Stored:
    """The `Stored` of a format, with the strides of its scale pages."""
    codes = number_format(form.codes, arch)
    strides = NO_STRIDES if scale_pages is None else launch.strides(scale_pages)
    by_integers = codes in ("e4m3_bits", "e4m3fnuz_bits")
    return Stored(
        CODES=codes,
        SCALES=form.scales,
        GROUP=form.group,
        ZERO=form.zero,
        DECODED_AT_ONCE=form.eight_bit and not by_integers and not INTERPRETED,
        PAGE_STRIDE=strides[0],
        SLOT_STRIDE=strides[1],
        COLUMN_STRIDE=strides[3],
    )


def scale_page_arguments(call: Any, stand_in: Any, launch: Any) -> tuple[dict[str, Any], dict[str, int]]:
    """(arrays, numbers) of the scale pages of K and V; `stand_in` replaces the array if K or V has none."""
    arrays, numbers = {}, {}
    for side, pages in zip("kv", call.scale_pages, strict=True):
        arrays[f"{side}_scales"] = stand_in if pages is None else pages
        numbers[f"{side}_scales_stride"] = 0 if pages is None else launch.strides(pages)[2]
    return arrays, numbers


def value_dtype(call: Any) -> str:
    """The dtype of the values' operands.

    Codes are exact in float16, which rounds weights less than bfloat16. But weights times stored scales may exceed the
    range of float16, and so may values times powers of two.
    """
    dtype = dtype_name(call.q)
    if dtype == "float32":
        return dtype
    if call.v_format.scaled:
        return "bfloat16"
    return "float16" if call.v_format.eight_bit else dtype


def key_dtype(call: Any) -> str:
    """The dtype of the operands of queries and keys.

    float16 cannot represent scales above 2^15. With such scales, a float16 query is the sum of two bfloat16 terms.
    """
    dtype, form = dtype_name(call.q), call.k_format
    if dtype == "bfloat16" and form.quantized and not form.group:
        return "float16"  # the queries are divided by their unit
    return "bfloat16" if dtype == "float16" and form.scales == "float8_e8m0fnu" else dtype
