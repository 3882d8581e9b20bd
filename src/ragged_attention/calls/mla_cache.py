"""The records of the operations on a latent cache: quantise, dequantise, write, and convert positions to slots."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from ragged_attention.calls.base import Call, Result, record
from ragged_attention.calls.cache_formats import CACHE_FORMATS, E8M0, LAYOUTS, CacheFormat, laid_out, stored_format
from ragged_attention.calls.fields import (
    FLOATS,
    INT8,
    INT32,
    QUANTIZED,
    WIDE_FLOATS,
    ArrayKind,
    Arrays,
    Count,
    Dtype,
    Flag,
    Integer,
    Kind,
    Scale,
    Sizes,
    Text,
    dtype_name,
    expect_array,
    expect_nonempty,
    expect_text,
    field,
    is_array,
)
from ragged_attention.calls.paged import (
    PagesCall,
    TableWrite,
    check_rows,
    expect_packed_rows,
    live_sequences,
    tables_for_slots,
)
from ragged_attention.errors import InvalidInput

BYTES = ("uint8", "float8_e4m3fn", "int8")


def expect_format(name: str, value: Any, plain: bool) -> None:
    known = ("plain",) * plain + tuple(CACHE_FORMATS)
    expect_text(name, value)
    if value not in known:
        raise InvalidInput(f"expected {name} to be one of {', '.join(known)}, got {value!r}")


def expect_layout(name: str, cache_layout: Any) -> None:
    """Check a layout for the format `name`, which may be `plain`."""
    if cache_layout is None:
        return
    expect_text("cache_layout", cache_layout)
    if cache_layout not in LAYOUTS:
        raise InvalidInput(f"expected cache_layout to be one of {', '.join(LAYOUTS)}, got {cache_layout!r}")
    layouts = CACHE_FORMATS[name].layouts if name != "plain" else ("token",)
    if cache_layout not in layouts:
        raise InvalidInput(f"expected cache_layout={layouts[0]!r} with cache_format={name!r}, got {cache_layout!r}")


def format_of(name: str, cache: Any, given: str | None, row_width: int | None = None) -> str:
    """The format of a cache of valid dtype and rank: `plain` or a name in CACHE_FORMATS.

    Callers pass `row_width`, the number of columns of a row, if a cache of 8-bit numbers may be `plain` too, with a
    scale that the call gives. Such a cache is recognised by its width: in every quantised format, the number of bytes
    per token differs from the number of columns.
    """
    if given is not None:
        expect_format("cache_format", given, plain=True)
    dtype, width = dtype_name(cache), cache.shape[-1]
    if given in (None, "plain") and dtype in QUANTIZED and width == row_width:
        return "plain"
    if dtype in WIDE_FLOATS:
        if given not in (None, "plain"):
            raise InvalidInput(
                f"expected {name}.dtype to be {' or '.join(BYTES)} with cache_format={given!r}, got {dtype}"
            )
        return "plain"
    may_be_plain = given in (None, "plain") and dtype in QUANTIZED and row_width is None
    advice = ": a plain 8-bit cache is for dense attention, by ragged_mla_attention" if may_be_plain else ""
    if given == "plain":
        expected = f"{' or '.join(FLOATS)} with cache_format='plain'"
        raise InvalidInput(f"expected {name}.dtype to be {expected}, got {dtype}{advice}")
    forms = [form for form in CACHE_FORMATS.values() if given in (None, form.name)]
    for form in forms:
        if form.token_bytes == width:
            return form.name
    wanted = " or ".join(f"{form.token_bytes} ({form.name})" for form in forms)
    raise InvalidInput(f"expected {name}.shape[3] to be {wanted} for a cache of bytes, got {width}{advice}")


def expect_cache(
    name: str, cache: Any, given: str | None, cache_layout: str | None, floats: tuple[str, ...] = FLOATS,
    row_width: int | None = None,
) -> str:  # fmt: skip
    """Check a paged cache alone and return its format. If `row_width` is given, 8-bit numbers may be `plain`."""
    eight_bit = BYTES if row_width is None else tuple(dict.fromkeys((*BYTES, *QUANTIZED)))
    expect_array(name, cache, "P G K C", (*floats, *eight_bit), {})
    format_name = format_of(name, cache, given, row_width)
    expect_layout(format_name, cache_layout)
    _, page_size, num_kv_heads, _ = cache.shape
    expect_nonempty(name, "page_size", page_size)
    if num_kv_heads < 1 or (format_name != "plain" and num_kv_heads != 1):
        condition = (
            "num_kv_heads >= 1" if format_name == "plain" else f"num_kv_heads = 1 with cache_format={format_name!r}"
        )
        raise InvalidInput(f"expected {name} to have {condition}, got {num_kv_heads}")
    return format_name


class CacheKind(Kind):
    """A paged latent cache in the call's `cache_format`, or else in the format that its dtype and width imply.

    If the call has a `row_width`, a cache of 8-bit numbers may be `plain`.
    """

    def check(self, name: str, value: Any, call: Any, sizes: Sizes) -> None:
        expect_cache(name, value, call.cache_format, call.cache_layout, row_width=call.row_width)
        sizes.setdefault("K", value.shape[2])


@record
class QuantizeMlaCache(Call):
    """The arguments of `quantize_mla_cache`, whose docstring explains them."""

    kv: Any = field(ArrayKind())
    format: str = field(Text())
    power_of_two_scales: bool = field(Flag(), default=True)
    cache_layout: str | None = field(Text(), default=None)

    def _check(self, sizes: Sizes) -> None:
        expect_format("format", self.format, plain=False)
        expect_layout(self.format, self.cache_layout)
        expect_array("kv", self.kv, "P G 1 D", FLOATS, {"1": 1, "D": CACHE_FORMATS[self.format].width})
        expect_nonempty("kv", "page_size", self.kv.shape[1])
        _expect_powers("format", self.format, self.power_of_two_scales)

    def results(self) -> tuple[Result, ...]:
        return (Result(self.out_shape, "uint8"),)

    @property
    def kv_format(self) -> CacheFormat:
        """The format in the call's layout."""
        return laid_out(self.format, self.cache_layout)

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (*self.kv.shape[:3], CACHE_FORMATS[self.format].token_bytes)


def with_heads(kv: Any) -> Any:
    """Rows [T, d_qk] as [T, 1, d_qk], with an axis for their one KV head; any other value unchanged."""
    return kv[:, None] if is_array(kv) and len(kv.shape) == 2 else kv


def expect_no_scales(format_name: str, **scales: Any) -> None:
    """Refuse `kv_scale` and `rope_scale` for a quantised format."""
    for name, scale in scales.items():
        if format_name != "plain" and scale is not None:
            raise InvalidInput(f"expected {name}=None with {format_name!r}, which stores scales of its own, got one")


def _expect_powers(name: str, value: str, power_of_two_scales: Any) -> None:
    if value != "plain" and CACHE_FORMATS[value].scales == E8M0 and not power_of_two_scales:
        raise InvalidInput(f"expected power_of_two_scales=True with {name}={value!r}, got False")


@record
class DequantizeMlaCache(Call):
    """The arguments of `dequantize_mla_cache`, whose docstring explains them."""

    cache: Any = field(ArrayKind(unit_stride=True))
    format: str | None = field(Text(), default=None)
    dtype: str = field(Dtype(choices=FLOATS), default="bfloat16")
    cache_layout: str | None = field(Text(), default=None)

    def _check(self, sizes: Sizes) -> None:
        if self.format is not None:
            expect_format("format", self.format, plain=False)
        expect_array("cache", self.cache, "P G 1 C", BYTES, {"1": 1})
        expect_cache("cache", self.cache, self.format, self.cache_layout)

    def results(self) -> tuple[Result, ...]:
        return (Result(self.out_shape, self.dtype),)

    @property
    def kv_format(self) -> CacheFormat:
        """The format in the call's layout."""
        return laid_out(format_of("cache", self.cache, self.format), self.cache_layout)

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (*self.cache.shape[:3], self.kv_format.width)


class LatentPagesCall(PagesCall):
    """The base of records with a paged latent cache, the argument `CACHE`."""

    cache_format: str | None
    cache_layout: str | None

    @property
    def row_width(self) -> int | None:
        """The number of columns of a row if the record takes plain 8-bit caches, else None."""
        return None

    @property
    def num_kv_heads(self) -> int:
        return self.k_pages_like.shape[-2]

    @property
    def format(self) -> str:
        return format_of(self.CACHE, self.k_pages_like, self.cache_format, self.row_width)

    @property
    def kv_format(self) -> CacheFormat:
        return stored_format(self.format, self.cache_layout, self.cache_dtype)


class ScaledLatentCall(LatentPagesCall):
    """The base of records whose plain cache has a scale."""

    kv_scale: Any
    rope_scale: Any

    def _expect_scales(self) -> None:
        """Check that the call gives a scale for a plain int8 cache, and no scale for a quantised cache.

        A quantised cache stores its scales. A plain cache of 8-bit floats has a default scale of 1.
        """
        expect_no_scales(self.format, kv_scale=self.kv_scale, rope_scale=self.rope_scale)
        if self.format == "plain" and self.cache_dtype == INT8 and self.kv_scale is None:
            advice = "pass kv_scale=1.0 if the codes are the values"
            raise InvalidInput(f"expected kv_scale with {self.CACHE} of {INT8}, got none: {advice}")


class LatentWrite(ScaledLatentCall, TableWrite):
    """The base of writes of latent rows `kv` to `cache`."""

    CACHE: ClassVar[str] = "cache"

    kv: Any
    cache: Any
    power_of_two_scales: bool

    def _check(self, sizes: Sizes) -> None:
        self._expect_slots_or_tables()
        self._expect_scales()
        format_name = self.format
        width = self.cache.shape[3] if format_name == "plain" else CACHE_FORMATS[format_name].width
        dtypes = (dtype_name(self.cache),) if format_name == "plain" and not self.kv_format.eight_bit else FLOATS
        expect_array("kv", self.kv, "T K D", dtypes, {"K": sizes["K"], "D": width})
        sizes.bind("T K D", self.kv)
        _expect_powers("cache_format", format_name, self.power_of_two_scales)

    @classmethod
    def prepare(cls, arguments: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
        prepared = live_sequences(super().prepare(tables_for_slots(arguments), arrays))
        return prepared | {"kv": with_heads(prepared["kv"])}

    def results(self) -> tuple[Result, ...]:
        return (Result(self.cache.shape, self.cache.dtype),)

    @property
    def row_width(self) -> int | None:
        return self.kv.shape[-1] if is_array(self.kv) and len(self.kv.shape) else None

    @property
    def num_tokens(self) -> int:
        return self.kv.shape[0]

    def check_strides(self, strides: Callable[[Any], tuple[int, ...]]) -> None:
        """Refuse gaps between rows in the layout "page", in which scales are found by their offset in the page."""
        if self.kv_format.planar:
            expect_packed_rows("cache", self.cache, strides, f" for {self.format!r}")


@record
class WriteMlaCache(LatentWrite):
    """The arguments of `write_mla_cache`, whose docstring explains them."""

    kv: Any = field(ArrayKind())
    cache: Any = field(CacheKind(unit_stride=True, written=True))
    slot_mapping: Any = field(ArrayKind("T", ("int32", "int64"), checked_last=True), default=None)
    page_indices: Any = field(ArrayKind("S M", INT32), default=None)
    kv_lens: Any = field(ArrayKind("S", INT32), default=None)
    cu_q_lens: Any = field(ArrayKind("S+1", INT32), default=None)
    num_seqs: Any = field(Count(), default=None)
    kv_scale: Any = field(Scale(divides=True), default=None)
    rope_scale: Any = field(Scale(divides=True), default=None)
    d_v: int | None = field(Integer(), default=None)
    power_of_two_scales: bool = field(Flag(), default=True)
    cache_format: str | None = field(Text(), default=None)
    cache_layout: str | None = field(Text(), default=None)

    def _check(self, sizes: Sizes) -> None:
        super()._check(sizes)
        if (self.d_v is None) != (self.rope_scale is None):
            got = "rope_scale without d_v, where its columns begin" if self.d_v is None else "d_v without rope_scale"
            raise InvalidInput(f"expected rope_scale and d_v together, got {got}")
        if self.d_v is not None and self.d_v > (width := self.kv.shape[2]):
            raise InvalidInput(f"expected d_v between 0 and d_qk={width}, got {self.d_v}")

    @property
    def rope_start(self) -> int:
        """The first column that `rope_scale` divides; the number of columns if the call has no `rope_scale`."""
        return self.kv.shape[2] if self.d_v is None else self.d_v


@record
class PageIndicesToSlots(Call):
    """The arguments of `page_indices_to_slots`, whose docstring explains them."""

    positions: Any = field(ArrayKind())
    page_indices: Any = field(ArrayKind())
    page_size: int = field(Integer(least=1))
    cu_q_lens: Any = field(ArrayKind(), default=None)
    num_seqs: Any = field(Count(), default=None)

    def _check(self, sizes: Sizes) -> None:
        rank = len(self.positions.shape) if is_array(self.positions) else 1
        first = "S" if self.cu_q_lens is None else "T"
        letters = " ".join((first, *(f"N{axis}" for axis in range(1, rank))))
        expect_array("positions", self.positions, letters, INT32, {})
        expect_array("page_indices", self.page_indices, "S M", INT32, {})
        num_rows, num_seqs = self.num_tokens, self.page_indices.shape[0]
        if self.cu_q_lens is not None:
            expect_array("cu_q_lens", self.cu_q_lens, "S+1", INT32, {"S+1": num_seqs + 1})
        elif self.num_seqs is not None:
            raise InvalidInput("expected num_seqs only with cu_q_lens, got it alone")
        elif num_rows != num_seqs:
            advice = "pass cu_q_lens if positions has the rows of a ragged batch"
            raise InvalidInput(
                f"expected page_indices to have a row for each of {num_rows} rows of positions, "
                f"got {num_seqs}: {advice}"
            )

    @classmethod
    def prepare(cls, arguments: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
        return live_sequences(super().prepare(arguments, arrays))

    @property
    def num_tokens(self) -> int:
        """The number of rows of `positions`."""
        return self.positions.shape[0]

    def check_values(self) -> None:
        if self.cu_q_lens is not None:
            check_rows(self)

    def results(self) -> tuple[Result, ...]:
        return (Result(self.positions.shape, "int32"),)
