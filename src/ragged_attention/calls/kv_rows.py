"""The records of the operations that convert rows of K or V to a format with scales, and back."""

import abc
import math
from typing import Any, ClassVar

from ragged_attention.calls.base import Call, Result, record
from ragged_attention.calls.cache_formats import (
    UNSCALED_FORMATS,
    KvFormat,
    advice_on_width,
    element_of,
    named_format,
    scaled_format,
)
from ragged_attention.calls.fields import (
    FLOATS,
    INT8,
    QUANTIZED,
    ArrayKind,
    Dtype,
    Scale,
    Sizes,
    Text,
    dtype_name,
    field,
)
from ragged_attention.calls.paged import PACKED, expect_head_dim
from ragged_attention.errors import InvalidInput


class RowsCall(Call):
    """The base of records whose first argument is rows [..., K, W] of K or V."""

    @property
    @abc.abstractmethod
    def rows(self) -> Any: ...

    @property
    def num_kv_heads(self) -> int:
        """The size of the axis K; 1 for a single row [W]."""
        return self.rows.shape[-2] if len(self.rows.shape) > 1 else 1

    @property
    def num_tokens(self) -> int:
        """The number of tokens: the product of the axes before [K, W]."""
        return math.prod(self.rows.shape[:-2])


def expect_rows(name: str, rows: Any, dtypes: tuple[str, ...]) -> None:
    """Check the dtype and the number of axes of rows [..., K, W]."""
    if (got := dtype_name(rows)) not in dtypes:
        raise InvalidInput(f"expected {name}.dtype to be {' or '.join(dtypes)}, got {got}")
    if not rows.shape:
        raise InvalidInput(f"expected {name} to have at least one axis, got none")


def expect_blocks(name: str, form: KvFormat, width: int) -> None:
    """Check that the number of columns of a row is a multiple of the format's `group`."""
    if form.group and width % form.group:
        advice = advice_on_width(form, width)
        raise InvalidInput(f"expected {name} in {form.name} to be a multiple of {form.group}, got {width}{advice}")


@record
class QuantizeKv(RowsCall):
    """The arguments of `quantize_kv`, whose docstring explains them."""

    NUM_RESULTS: ClassVar[int | None] = 2

    x: Any = field(ArrayKind())
    format: str = field(Text())
    scale: Any = field(Scale(divides=True), default=None)
    zero: str | None = field(Text(choices=("mantissa", "stored")), default=None)
    scales_dtype: str | None = field(Dtype(), default=None)

    def _check(self, sizes: Sizes) -> None:
        expect_rows("x", self.x, FLOATS)
        expect_head_dim("x.shape[-1]", self.x.shape[-1])
        expect_blocks("x.shape[-1]", self.kv_format, self.x.shape[-1])

    @property
    def kv_format(self) -> KvFormat:
        return named_format(self.format, self.zero, self.scales_dtype)

    @property
    def rows(self) -> Any:
        return self.x

    def results(self) -> tuple[Result, ...]:
        form, (*rows, width) = self.kv_format, self.x.shape
        count = form.scales_of_row(width)
        scales = (*rows, count) if form.group or count > 1 else tuple(rows)
        codes = (*rows, width // form.columns_per_element)
        return Result(codes, element_of(form)), Result(scales, form.scales)


@record
class DequantizeKv(RowsCall):
    """The arguments of `dequantize_kv`, whose docstring explains them."""

    codes: Any = field(ArrayKind())
    scales: Any = field(ArrayKind(), default=None)
    scale: Any = field(Scale(), default=None)
    dtype: str = field(Dtype(choices=FLOATS), default="float32")

    def _check(self, sizes: Sizes) -> None:
        expect_rows("codes", self.codes, (*FLOATS, *QUANTIZED, PACKED))
        if self.scales is None:
            if dtype_name(self.codes) == PACKED:
                raise InvalidInput(f"expected scales with codes of {PACKED}, got none")
            if dtype_name(self.codes) == INT8 and self.scale is None:
                advice = "pass scale=1.0 if the codes are the values"
                raise InvalidInput(f"expected scales or scale with codes of {INT8}, got none: {advice}")
        else:
            self._expect_scales()
        expect_head_dim("codes.shape[-1]" + " * 2" * self.kv_format.packed_codes, self.head_dim)

    def _expect_scales(self) -> None:
        *rows, _ = self.codes.shape
        form, got = self.kv_format, tuple(self.scales.shape)
        expect_blocks("the number of columns", form, self.head_dim)
        count = form.scales_of_row(self.head_dim)
        allowed = [(*rows, count)] + [tuple(rows)] * (not form.group and count == 1)
        if got not in allowed:
            expected = " or ".join(str(list(shape)) for shape in allowed)
            raise InvalidInput(f"expected scales.shape to be {expected} for {form.name}, got {list(got)}")

    @property
    def kv_format(self) -> KvFormat:
        if self.scales is None:
            return UNSCALED_FORMATS[dtype_name(self.codes)]
        has_axis = len(self.scales.shape) == len(self.codes.shape)
        count = self.scales.shape[-1] if has_axis else 1
        return scaled_format("scales", dtype_name(self.codes), dtype_name(self.scales), count)

    @property
    def head_dim(self) -> int:
        return self.codes.shape[-1] * self.kv_format.columns_per_element

    @property
    def rows(self) -> Any:
        return self.codes

    @property
    def scales_of_rows(self) -> Any:
        """The scales, with a last axis for the scales of a row: [..., n], in which n may be 1; None without scales."""
        if self.scales is None or len(self.scales.shape) == len(self.codes.shape):
            return self.scales
        return self.scales[..., None]

    def results(self) -> tuple[Result, ...]:
        return (Result((*self.codes.shape[:-1], self.head_dim), self.dtype),)
