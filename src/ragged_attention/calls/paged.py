"""The records of the operations over a paged KV cache of K and V heads. A *side* of the cache is its K or its V."""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ragged_attention.calls.base import Call, GroupedCall, Result, WritingCall, record
from ragged_attention.calls.cache_formats import (
    SCALE_PAGES_DTYPES,
    UNSCALED_FORMATS,
    KvFormat,
    advice_on_scales,
    advice_on_width,
    scaled_format,
)
from ragged_attention.calls.fields import (
    FLOATS,
    INT8,
    INT32,
    QUANTIZED,
    Array,
    ArrayKind,
    Arrays,
    BlockSize,
    Count,
    Dtype,
    Flag,
    Integer,
    KeyRanges,
    Number,
    Pair,
    QueryScale,
    RelativeBias,
    Scale,
    Selected,
    Sizes,
    Stack,
    dtype_name,
    expect_any_array,
    expect_array,
    expect_nonempty,
    expect_num_seqs,
    expect_scales,
    field,
    is_array,
    is_integer,
    is_number,
)
from ragged_attention.errors import InvalidInput

PACKED = "uint8"  # the dtype of pages whose elements hold two 4-bit codes


def expect_pages(name: str, kv_pages: Any, call: Any, sizes: Sizes) -> None:
    """Check `kv_pages` alone: combined `[P, G, 2K, D]`, or a pair `(k_pages, v_pages)` of `[P, G, K, D]`.

    An element of uint8 pages holds two columns, so such pages have half as many elements per row.
    """
    if not isinstance(kv_pages, (tuple, list)):
        expect_array(name, kv_pages, "P G 2K D", _page_dtypes(call), {})
        num_pages, page_size, combined, width = kv_pages.shape
        if combined % 2 or combined == 0:
            raise InvalidInput(f"expected {name}.shape[2] to be 2 * num_kv_heads, an even number, got {combined}")
        head_dim = width * _columns(kv_pages)
        axes = {"P": num_pages, "G": page_size, "K": combined // 2, "D": head_dim, "D_v": head_dim}
    else:
        if len(kv_pages) != 2:
            raise TypeError(f"expected {name} to be an array or a pair (k_pages, v_pages), got {len(kv_pages)} values")
        expect_array("k_pages", kv_pages[0], "P G K D", _page_dtypes(call), {})
        axes = dict(zip("PGK", kv_pages[0].shape[:3], strict=True))
        expect_array("v_pages", kv_pages[1], "P G K D_v", _page_dtypes(call), axes)
        axes |= {"D": kv_pages[0].shape[3] * _columns(kv_pages[0]), "D_v": kv_pages[1].shape[3] * _columns(kv_pages[1])}
        expect_nonempty("k_pages", "num_kv_heads", axes["K"])
    for letter, size in axes.items():
        sizes.setdefault(letter, size)


def _page_dtypes(call: Any) -> tuple[str, ...]:
    """The dtypes that pages may have."""
    packed = (PACKED,) if call is None or "k_scale_pages" in call.KINDS else ()
    return (*FLOATS, *QUANTIZED, *packed)


def _columns(pages: Any) -> int:
    """The number of columns that one element of the pages holds."""
    return 2 if dtype_name(pages) == PACKED else 1


@dataclasses.dataclass(frozen=True)
class ScalePages(ArrayKind):
    """The stored scales of the rows of one side, [P, G, K, n]. The record checks them.

    Callers may leave out the last axis if n is 1.
    """

    def prepare(self, name: str, value: Any, arrays: Arrays) -> Any:
        value = arrays.array(name, value)
        return value[..., None] if is_array(value) and len(value.shape) == 3 else value

    def check(self, name: str, value: Any, call: Any, sizes: Sizes) -> None:
        expect_any_array(name, value)
        if (dtype := dtype_name(value)) not in SCALE_PAGES_DTYPES:
            expected = " or ".join(SCALE_PAGES_DTYPES)
            raise InvalidInput(f"expected {name}.dtype to be {expected}, got {dtype}{advice_on_scales(dtype)}")
        if len(value.shape) != 4:
            raise InvalidInput(f"expected {name} to have 3 or 4 axes, got {list(value.shape)}")


def with_scale_pages(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, with a `k_scale` or `v_scale` of three or more axes moved to that side's scale pages."""
    moved = dict(arguments)
    for side in ("k", "v"):
        scale, name = arguments[f"{side}_scale"], f"{side}_scale_pages"
        if not is_array(scale) or len(scale.shape) < 3:
            continue
        if arguments[name] is not None:
            raise InvalidInput(f"expected {side}_scale of at most one axis beside {name}, got {list(scale.shape)}")
        moved |= {f"{side}_scale": None, name: scale}
    return moved


def expect_new_kv(name: str, new_kv: Any, call: Any, sizes: Sizes) -> None:
    """Check this step's keys and values, a pair of `[T, K, D]` and `[T, K, D_v]`."""
    if not isinstance(new_kv, (tuple, list)) or len(new_kv) != 2:
        got = f"{len(new_kv)} values" if isinstance(new_kv, (tuple, list)) else type(new_kv).__name__
        raise TypeError(f"expected {name} to be a pair (k, v), got {got}")
    call.expect_new_rows(tuple((f"{name}[{index}]", array) for index, array in enumerate(new_kv)))
    for index, shape in enumerate(("T K D", "T K D_v")):
        expect_array(f"{name}[{index}]", new_kv[index], shape, (dtype_name(call.q), *call.code_dtypes), sizes)
    dtypes = [dtype_name(array) for array in new_kv]
    if len(set(dtypes)) > 1:
        raise InvalidInput(f"expected {name} to have one dtype, got {' and '.join(dtypes)}")


def expect_head_dim(name: str, head_dim: int) -> None:
    if head_dim % 8 or not 16 <= head_dim <= 512:
        advice = f": append zeros up to {max(16, -(-head_dim // 8) * 8)}" if 0 < head_dim < 512 else ""
        if advice and name.startswith("q"):
            advice += f", with sm_scale={head_dim}**-0.5"
        raise InvalidInput(f"expected {name} to be a multiple of 8 from 16 to 512, got {head_dim}{advice}")


def live_sequences(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments, with the tables cut to the live sequences if `num_seqs` is a Python int.

    If `num_seqs` is an array, the tables keep their size, because reading it would wait for the device.
    """
    count = arguments["num_seqs"]
    tables = {name: arguments[name] for name in TABLES if name in arguments}
    if not is_integer(count) or not all(is_array(table) and len(table.shape) for table in tables.values()):
        return arguments  # the record raises if an array is missing
    expect_num_seqs(count, tables["page_indices"].shape[0])
    live = {name: table[: count + (name == "cu_q_lens")] for name, table in tables.items()}
    return arguments | live | {"num_seqs": None}


def with_wide_queries(arguments: dict[str, Any], cache: Any, arrays: Arrays) -> dict[str, Any]:
    """The arguments with float8_e4m3fn queries widened to the dtype of `cache`, or to bfloat16 if `cache` is 8-bit.

    `q_scale` is applied too. A number is multiplied into `sm_scale`. An array multiplies the queries in float32, before
    they are rounded to the wider dtype.
    """
    q, q_scale, sm_scale = (arguments[name] for name in ("q", "q_scale", "sm_scale"))
    if not is_array(q) or dtype_name(q) != "float8_e4m3fn":
        if q_scale is not None and is_array(q):
            raise InvalidInput(f"expected q_scale only with q of float8_e4m3fn, got q.dtype {dtype_name(q)}")
        return arguments
    if is_array(q_scale):
        expect_scales("q_scale", q_scale, "num_q_heads", q.shape[1] if len(q.shape) == 3 else 1)
        q = arrays.cast(q, "float32") * arrays.cast(q_scale, "float32").reshape(-1, 1)
    elif q_scale is not None and (sm_scale is None or is_number(sm_scale)):
        sm_scale = (max(q.shape[-1], 1) ** -0.5 if sm_scale is None else sm_scale) * q_scale
    wide = dtype_name(cache) if is_array(cache) and dtype_name(cache) in FLOATS else "bfloat16"
    return arguments | {"q": arrays.cast(q, wide), "q_scale": None, "sm_scale": sm_scale}


TABLES = ("page_indices", "kv_lens", "cu_q_lens")


def tables_for_slots(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """A write's arguments, with a tuple (page_indices, kv_lens, cu_q_lens) in `slot_mapping` moved to these three."""
    tables = arguments["slot_mapping"]
    if not isinstance(tables, (tuple, list)) or any(map(is_number, tables)):
        return arguments  # the record refuses a list of slots
    if len(tables) != 3:
        raise InvalidInput(
            f"expected slot_mapping to be an array or (page_indices, kv_lens, cu_q_lens), got {len(tables)} values"
        )
    return {**arguments, **dict(zip(TABLES, tables, strict=True)), "slot_mapping": None}


class PagesCall(Call):
    """The base of records with a cache of pages [P, G, ...]."""

    page_indices: Any

    @property
    def k_pages_like(self) -> Array:
        """The cache, or the first array if the cache is a pair."""
        cache = getattr(self, self.CACHE)
        return cache[0] if isinstance(cache, (tuple, list)) else cache

    @property
    def cache_dtype(self) -> str:
        return dtype_name(self.k_pages_like)

    @property
    def k_format(self) -> KvFormat:
        """The format of the keys."""
        return UNSCALED_FORMATS[self.cache_dtype]

    @property
    def v_format(self) -> KvFormat:
        """The format of the values."""
        return self.k_format

    @property
    def num_pages(self) -> int:
        return self.k_pages_like.shape[0]

    @property
    def page_size(self) -> int:
        return self.k_pages_like.shape[1]

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size

    @property
    def pages_per_seq(self) -> int:
        return self.page_indices.shape[-1]

    @property
    def capacity(self) -> int:
        """The maximum number of positions per sequence; longer lengths are clamped to it.

        It is the number of positions in a row of `page_indices`, but at most 2**31 - 2**16, so that the end of a block
        after the last position still fits int32.
        """
        return min(self.pages_per_seq * self.page_size, 2**31 - 2**16)

    def _check_table(self, lengths_name: str, lengths: Any) -> None:
        """Check the lengths and the pages of all sequences. Expects NumPy arrays."""
        for seq, (length, row) in enumerate(zip(lengths, self.page_indices, strict=True)):
            self._check_row(f"{lengths_name}[{seq}]", length, f"page_indices[{seq}, *]", row)

    def _check_row(self, length_name: str, length: Any, row_name: str, row: Any) -> None:
        """Check the length of one sequence and the indices of the pages that it uses."""
        limit = self.pages_per_seq * self.page_size
        if not 0 <= length <= limit:
            raise InvalidInput(
                f"expected {length_name} between 0 and pages_per_seq * page_size = {limit}, got {length}"
            )
        expect_page_indices(row_name, row[: -(-int(length) // self.page_size)], self.num_pages)


class TableWrite(PagesCall):
    """The base of writes of this step's rows, to slots or to the positions that the tables of attention imply."""

    NUM_RESULTS: ClassVar[int | None] = 0
    WRITES: ClassVar[bool] = True

    slot_mapping: Any
    kv_lens: Any
    cu_q_lens: Any
    num_seqs: Any

    @property
    @abc.abstractmethod
    def num_tokens(self) -> int: ...

    def _expect_slots_or_tables(self) -> None:
        tables = [name for name in TABLES if getattr(self, name) is not None]
        if (self.slot_mapping is not None) == bool(tables) or len(tables) not in (0, 3):
            got = ", ".join(tables + ["slot_mapping"] * (self.slot_mapping is not None)) or "neither"
            raise InvalidInput(f"expected slot_mapping, or page_indices with kv_lens and cu_q_lens, got {got}")
        if self.slot_mapping is not None and self.num_seqs is not None:
            raise InvalidInput("expected num_seqs only with page_indices, got it with slot_mapping")

    def check_values(self) -> None:
        if self.slot_mapping is not None:
            check_slots(self.slot_mapping, self.num_slots)
        else:
            check_ragged_values(self)


class RaggedCall(PagesCall, GroupedCall, WritingCall):
    """The base of attention calls with packed queries over pages of many sequences."""

    ATTENDS: ClassVar[bool] = True
    TAKES_OUT: ClassVar[bool] = True
    NUM_RESULTS: ClassVar[int | None] = None
    MOST_RESULTS: ClassVar[int] = 3

    kv_lens: Any
    cu_q_lens: Any
    num_seqs: Any
    max_q_len: int | None
    causal: bool
    sliding_window: int | None
    return_lse: bool

    @classmethod
    def prepare(cls, arguments: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
        prepared = live_sequences(super().prepare(arguments, arrays))
        cache = prepared[cls.CACHE]
        return with_wide_queries(prepared, cache[0] if isinstance(cache, tuple) and cache else cache, arrays)

    def named_results(self) -> dict[str, Result]:
        """The requested results by name, in their order."""
        lse = {"lse": Result(self.q.shape[:2], "float32")} if self.return_lse else {}
        return {"out": Result(self.out_shape, self.result_dtype), **lse, **self.max_logits_if_requested()}

    def results(self) -> tuple[Result, ...]:
        return tuple(self.named_results().values())

    def requested(self, **arrays: Any) -> Any:
        """The requested results of a backend: a tuple in their order, or the array itself if only one is requested."""
        results = [arrays[name] for name in self.named_results()]
        return tuple(results) if len(results) > 1 else results[0]

    @property
    def num_tokens(self) -> int:
        return self.q.shape[0]

    @property
    def max_num_seqs(self) -> int:
        return self.kv_lens.shape[0]

    def check_values(self) -> None:
        within = self.key_ranges is None and (self.causal or self.sliding_window is not None)
        check_ragged_values(self, max_q_len=self.max_q_len, within=within)


class PagedCall(PagesCall):
    """The base of records with `kv_pages`, one combined array or a pair."""

    CACHE: ClassVar[str] = "kv_pages"

    kv_pages: Any
    k_scale: Any
    v_scale: Any

    k_scale_pages: Any = None
    v_scale_pages: Any = None

    def _expect_cache(self, name: str, array: Array) -> None:
        """Check the page size and the formats of the pages.

        Pages without scale pages must be 8-bit or have the dtype of `array`, the argument called `name`.
        """
        if self.page_size < 1:
            raise InvalidInput(f"expected page_size >= 1, got {self.page_size}")
        for side, pages, scales in zip("kv", self.sides, self.scale_pages, strict=True):
            if scales is None:
                self._expect_unscaled(side, pages, name, array)
            else:
                self._expect_scaled(side, scales)
        if dtype_name(array) not in QUANTIZED:  # otherwise rows are codes, copied without scales
            self._expect_scales_of_integers()

    def _expect_scales_of_integers(self) -> None:
        """Refuse int8 pages if their side has neither a scale nor scale pages.

        Pages of 8-bit floats have a default scale of 1, since floats cover the usual values of K and V without a scale.
        Integers do not.
        """
        sides = zip("kv", self.sides, (self.k_scale, self.v_scale), self.scale_pages, strict=True)
        missing = [
            side
            for side, pages, scale, scale_pages in sides
            if dtype_name(pages) == INT8 and scale is None and scale_pages is None
        ]
        if not missing:
            return
        what = "kv_pages" if self.combined or len(missing) > 1 else f"{missing[0]}_pages"
        expected = " and ".join(f"{side}_scale" for side in missing)
        if "k_scale_pages" in self.KINDS:
            pages, comma = " and ".join(f"{side}_scale_pages" for side in missing), "," * (len(missing) > 1)
            expected += f"{comma} or {pages}{comma}"
        advice = " and ".join(f"{side}_scale=1.0" for side in missing)
        raise InvalidInput(
            f"expected {expected} with {what} of {INT8}, got none: pass {advice} if the codes are the values"
        )

    def _expect_unscaled(self, side: str, pages: Array, name: str, array: Array) -> None:
        got, what = dtype_name(pages), "kv_pages" if self.combined else f"{side}_pages"
        if got == PACKED:
            advice = "their elements hold 4-bit codes, which have scales of their own"
            raise InvalidInput(f"expected {side}_scale_pages with {what} of {PACKED}, got none: {advice}")
        if got not in (dtype_name(array), *QUANTIZED):
            raise InvalidInput(
                f"expected {what}.dtype to be that of {name}, {dtype_name(array)}, or {' or '.join(QUANTIZED)}, "
                f"got {got}"
            )

    def _expect_scaled(self, side: str, scales: Array) -> None:
        form, width = (self.k_format, self.k_head_dim) if side == "k" else (self.v_format, self.v_head_dim)
        if form.group and width % form.group:
            advice = advice_on_width(form, width)
            advice += f", with sm_scale={width}**-0.5 in attention" if side == "k" else ""
            raise InvalidInput(
                f"expected the head size of {side}_pages in {form.name} to be a multiple of {form.group}, "
                f"got {width}{advice}"
            )
        # `prepare` may have added the last axis. So an error shows only the first three axes, or only the last one.
        name, expected, got = f"{side}_scale_pages", [self.num_pages, self.page_size, self.num_kv_heads], scales.shape
        if list(got[:3]) != expected:
            both = self.combined and list(got[:3]) == [*expected[:2], 2 * self.num_kv_heads]
            advice = ": give those of K and of V, such as scales[:, :, 0::2] and scales[:, :, 1::2]" if both else ""
            raise InvalidInput(f"expected {name}.shape[:3] to be [P, G, K] = {expected}, got {list(got[:3])}{advice}")
        if got[3] != (count := form.scales_of_row(width)):
            raise InvalidInput(
                f"expected {name} in {form.name} to have {width} / {form.group} = {count} {form.scales} for each row, "
                f"got {got[3]}"
            )

    def expect_new_rows(self, rows: Sequence[tuple[str, Any]]) -> None:
        """Check that the new rows of K and V, each given with its name, suit scale pages: rows must not be codes.

        If an element of the pages holds two columns, rows have twice as many columns as the pages have elements.
        """
        for side, pages, scales, (name, array) in zip("kv", self.sides, self.scale_pages, rows, strict=True):
            if scales is None or not is_array(array) or len(array.shape) != 3:
                continue
            what = "kv_pages" if self.combined else f"{side}_pages"
            if (dtype := dtype_name(array)) in QUANTIZED:
                raise InvalidInput(
                    f"expected {name}.dtype to be {' or '.join(FLOATS)} beside {side}_scale_pages, which the write "
                    f"computes, got {dtype}"
                )
            if (got := pages.shape[3]) * _columns(pages) != array.shape[2] and _columns(pages) > 1:
                expected, advice = f"{name}.shape[2]={array.shape[2]} / 2", f"an element of {PACKED} holds two columns"
                raise InvalidInput(f"expected {what}.shape[3] = {expected}, got {got}: {advice}")

    @property
    def sides(self) -> tuple[Array, Array]:
        """The arrays that hold K and V: twice the same array if they are combined."""
        return (self.kv_pages, self.kv_pages) if self.combined else self.kv_pages

    @property
    def scale_pages(self) -> tuple[Any, Any]:
        """The scale pages of K and V; None for a side without scale pages."""
        return self.k_scale_pages, self.v_scale_pages

    @property
    def scaled(self) -> bool:
        """Whether a side has scale pages."""
        return self.k_scale_pages is not None or self.v_scale_pages is not None

    @property
    def k_format(self) -> KvFormat:
        return _format_of("k_scale_pages", self.sides[0], self.k_scale_pages)

    @property
    def v_format(self) -> KvFormat:
        return _format_of("v_scale_pages", self.sides[1], self.v_scale_pages)

    @property
    def caches(self) -> list[Array]:
        """The arrays of the cache in the order of the operators' results: pages, then scale pages."""
        pages = [self.kv_pages] if self.combined else [*self.kv_pages]
        return pages + [scales for scales in self.scale_pages if scales is not None]

    @property
    def combined(self) -> bool:
        """Whether one array holds K and V interleaved."""
        return not isinstance(self.kv_pages, (tuple, list))

    @property
    def code_dtypes(self) -> tuple[str, ...]:
        """The dtype of 8-bit pages, if new keys and values may also have it and be copied as codes; otherwise empty.

        It is empty for pages with scale pages, because the scales of the copied codes would be missing.
        """
        dtypes = {dtype_name(pages) for pages in self.sides}
        return tuple(dtypes) if len(dtypes) == 1 and dtypes <= {*QUANTIZED} and not self.scaled else ()

    @property
    def num_kv_heads(self) -> int:
        return self.k_pages_like.shape[2] // (2 if self.combined else 1)

    @property
    def k_head_dim(self) -> int:
        """The head size of the stored keys."""
        return self.sides[0].shape[3] * _columns(self.sides[0])

    @property
    def v_head_dim(self) -> int:
        return self.sides[1].shape[3] * _columns(self.sides[1])


def _format_of(name: str, pages: Array, scales: Any) -> KvFormat:
    """The format of a side of the cache; `name` is the name of its scale pages in an error."""
    dtype = dtype_name(pages)
    if scales is None:
        return UNSCALED_FORMATS[dtype]
    return scaled_format(name, dtype, dtype_name(scales), scales.shape[3])


@record
class WriteKvPages(PagedCall, TableWrite):
    """The arguments of `write_kv_pages`, whose docstring explains them."""

    k: Any = field(ArrayKind())  # [T, K, D]; `_check` checks it against the K and D of the pages
    v: Any = field(ArrayKind("T K D_v", lambda call: (dtype_name(call.k),), checked_last=True))
    kv_pages: Any = field(Pair(("kv_pages", "v_pages"), expect_pages, unit_stride=True, written=True))
    slot_mapping: Any = field(ArrayKind("T", ("int32", "int64"), checked_last=True), default=None)
    page_indices: Any = field(ArrayKind("S M", INT32), default=None)
    kv_lens: Any = field(ArrayKind("S", INT32), default=None)
    cu_q_lens: Any = field(ArrayKind("S+1", INT32), default=None)
    num_seqs: Any = field(Count(), default=None)
    k_scale: Any = field(Scale(divides=True), default=None)
    v_scale: Any = field(Scale(divides=True), default=None)
    k_scale_pages: Any = field(ScalePages(written=True), default=None)
    v_scale_pages: Any = field(ScalePages(written=True), default=None)

    def _check(self, sizes: Sizes) -> None:
        self._expect_slots_or_tables()
        self.expect_new_rows((("k", self.k), ("v", self.v)))
        expect_array("k", self.k, "T K D", (*FLOATS, *self.code_dtypes), sizes)
        sizes.bind("T K D", self.k)
        self._expect_cache("k", self.k)

    @classmethod
    def prepare(cls, arguments: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
        return live_sequences(super().prepare(with_scale_pages(tables_for_slots(arguments)), arrays))

    @classmethod
    def caches_of(cls, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        return super().caches_of(with_scale_pages(arguments))

    def results(self) -> tuple[Result, ...]:
        return tuple(Result(array.shape, array.dtype) for array in self.caches)

    @property
    def num_tokens(self) -> int:
        return self.k.shape[0]

    @property
    def head_dim(self) -> int:
        return self.k.shape[2]

    @property
    def copies(self) -> bool:
        """Whether k and v already have the dtype of 8-bit pages. If so, they are copied, and scales are ignored."""
        return dtype_name(self.k) in QUANTIZED


@record
class RaggedPagedAttention(PagedCall, RaggedCall):
    """The arguments of `ragged_paged_attention`, whose docstring explains them."""

    WRITE: ClassVar[type[Call]] = WriteKvPages

    q: Any = field(ArrayKind("T H D", FLOATS))
    kv_pages: Any = field(Pair(("kv_pages", "v_pages"), expect_pages, unit_stride=True))
    kv_lens: Any = field(ArrayKind("S", INT32))
    page_indices: Any = field(ArrayKind("S M", INT32))
    cu_q_lens: Any = field(ArrayKind("S+1", INT32))
    num_seqs: Any = field(Count(), default=None)
    max_q_len: int | None = field(Integer(symbolic=True, hint=True), default=None)
    sm_scale: float | None = field(Number(), default=None)
    causal: bool = field(Flag(), default=True)
    sliding_window: int | None = field(Integer(least=1, symbolic=True), default=None)
    soft_cap: float | None = field(Number(positive=True), default=None)
    sinks: Any = field(ArrayKind("H", ("float32",)), default=None)
    alibi_slopes: Any = field(ArrayKind("H", ("float32",)), default=None)
    relative_bias: Any = field(RelativeBias(dtypes=("float32",)), default=None)
    q_scale: Any = field(QueryScale(), default=None)
    k_scale: Any = field(Scale(), default=None)
    v_scale: Any = field(Scale(), default=None)
    k_scale_pages: Any = field(ScalePages(), default=None)
    v_scale_pages: Any = field(ScalePages(), default=None)
    return_lse: bool = field(Flag(), default=False)
    return_max_logits: bool = field(Flag(), default=False)
    new_kv: Any = field(Pair(("new_k", "new_v"), expect_new_kv), default=None)
    draft_mask: Any = field(ArrayKind("T W", ("bool",)), default=None)
    key_ranges: Any = field(KeyRanges(), default=None)
    selected: Any = field(Selected(), default=None)
    block_size: int | None = field(BlockSize(), default=None)
    out_dtype: str | None = field(Dtype(choices=FLOATS), default=None)

    def _check(self, sizes: Sizes) -> None:
        head_dim = self.head_dim
        expect_head_dim("q.shape[2]", head_dim)
        if (got := self.k_head_dim) != head_dim:
            name, packed = "kv_pages" if self.combined else "k_pages", _columns(self.sides[0]) > 1
            expected, shown = (f"{head_dim=} / 2", got // 2) if packed else (f"{head_dim=}", got)
            raise InvalidInput(f"expected {name}.shape[3] = {expected}, got {shown}")
        expect_head_dim("v_pages.shape[3]" + " * 2" * (_columns(self.sides[1]) > 1), self.v_head_dim)
        self._expect_one_mask()
        self._expect_lists_of_blocks()
        self._expect_cache("q", self.q)
        self._expect_groups()

    def _expect_groups(self) -> None:
        """Check that every KV head serves the same number of query heads. The error says if pages look heads-first."""
        num_q_heads, num_kv_heads, parts = self.q.shape[1], self.num_kv_heads, 2 if self.combined else 1
        if num_q_heads >= 1 and num_q_heads % num_kv_heads == 0:
            return
        axis = "kv_pages.shape[2] / 2" if self.combined else "k_pages.shape[2]"
        heads, rest = divmod(self.k_pages_like.shape[1], parts)
        is_heads_first = num_q_heads >= 1 and heads > 0 and rest == 0 and num_q_heads % heads == 0
        letter = "2K" if self.combined else "K"
        advice = f": are the pages laid out heads first, [P, {letter}, G, D]? expected [P, G, {letter}, D]"
        raise InvalidInput(
            f"expected q.shape[1] to be a multiple of num_kv_heads = {axis} = {num_kv_heads}, got {num_q_heads}"
            f"{advice if is_heads_first else ''}"
        )

    @classmethod
    def prepare(cls, arguments: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
        return super().prepare(with_scale_pages(arguments), arrays)

    @classmethod
    def arguments_of_write(cls, arguments: Mapping[str, Any]) -> dict[str, Any]:
        k, v = arguments["new_kv"]
        return super().arguments_of_write(arguments) | {"k": k, "v": v}


def check_rows(call: Any) -> list[int]:
    """The number of rows of each live sequence. Raise `InvalidInput` for invalid `num_seqs` and `cu_q_lens`.

    Expects NumPy arrays.
    """
    num_tokens, max_num_seqs = call.num_tokens, call.page_indices.shape[0]
    count = max_num_seqs if call.num_seqs is None else int(np.asarray(call.num_seqs).reshape(()))
    expect_num_seqs(count, max_num_seqs)
    starts = call.cu_q_lens[: count + 1].astype(np.int64)
    if count and starts[0] != 0:
        raise InvalidInput(f"expected cu_q_lens[0] = 0, got {starts[0]}")
    for seq in range(count):
        if starts[seq + 1] < starts[seq]:
            raise InvalidInput(f"expected cu_q_lens to ascend, got {starts[seq]}, {starts[seq + 1]} at sequence {seq}")
        if starts[seq + 1] > num_tokens:
            raise InvalidInput(f"expected cu_q_lens[{seq + 1}] <= {num_tokens=}, got {starts[seq + 1]}")
    return np.diff(starts).tolist()


def check_ragged_values(call: Any, *, max_q_len: int | None = None, ratio: int = 1, within: bool = True) -> None:
    """Raise `InvalidInput` for the first invalid value in the tables of a ragged call. Expects NumPy arrays.

    A page holds `page_size` rows, and each row stands for `ratio` tokens. With `within`, a sequence must have at least
    as many keys as queries. A call over a part of the cache may have fewer keys, so it passes `within=False`.
    """
    page_size, pages_per_seq = call.page_size, call.page_indices.shape[1]
    formula = "pages_per_seq * page_size" if ratio == 1 else "(pages_per_seq * page_size + 1) * ratio - 1"
    longest = (pages_per_seq * page_size + 1) * ratio - 1  # the last ratio - 1 tokens have no row yet
    for seq, q_len in enumerate(check_rows(call)):
        kv_len = int(call.kv_lens[seq])
        if max_q_len is not None and q_len > max_q_len:
            raise InvalidInput(f"expected no sequence of more than {max_q_len=} queries, got {q_len} at {seq}")
        if not 0 <= kv_len <= longest:
            raise InvalidInput(f"expected kv_lens[{seq}] between 0 and {formula} = {longest}, got {kv_len}")
        if within and q_len > kv_len:
            raise InvalidInput(f"expected q_len <= kv_lens[{seq}] = {kv_len}, got q_len {q_len} of sequence {seq}")
        used = -(-(kv_len // ratio) // page_size) if q_len else 0
        expect_page_indices(f"page_indices[{seq}, *]", call.page_indices[seq, :used], call.num_pages)


def expect_page_indices(name: str, pages: Any, num_pages: int) -> None:
    """Raise `InvalidInput` naming the first entry outside [0, num_pages). Its index replaces the * in `name`."""
    bad = np.flatnonzero((pages < 0) | (pages >= num_pages))
    if bad.size:
        address = name.replace("*", str(bad[0]))
        raise InvalidInput(f"expected {address} between 0 and {num_pages - 1}, got {pages[bad[0]]}")


def expect_packed_rows(name: str, pages: Any, strides: Callable[[Any], tuple[int, ...]], condition: str = "") -> None:
    """Raise `InvalidInput` unless each page's rows are contiguous. The message includes `condition`."""
    row, got = pages.shape[3], strides(pages)[1]
    if pages.shape[1] > 1 and 0 not in pages.shape and got != row:
        raise InvalidInput(f"expected {name} with rows packed in each page (stride {row}){condition}, got {got}")


def check_slots(slot_mapping: Any, num_slots: int) -> None:
    """Raise `InvalidInput` naming the first slot outside the cache. Expects NumPy arrays."""
    bad = np.flatnonzero((slot_mapping < -1) | (slot_mapping >= num_slots))
    if bad.size:
        got = slot_mapping[bad[0]]
        raise InvalidInput(f"expected slot_mapping[{bad[0]}] to be -1 or between 0 and {num_slots - 1}, got {got}")


@record
class MergeAttentionStates(Call):
    """The arguments of `merge_attention_states`, whose docstring explains them."""

    TAKES_OUT: ClassVar[bool] = True
    NUM_RESULTS: ClassVar[int | None] = 2

    outs: Any = field(Stack("N T H D_v", FLOATS))
    lses: Any = field(Stack("N T H", ("float32",)))
    sinks: Any = field(ArrayKind("H", ("float32",)), default=None)
    out_dtype: str | None = field(Dtype(choices=FLOATS), default=None)

    def _check(self, sizes: Sizes) -> None:
        if self.outs.shape[0] < 1:
            raise InvalidInput("expected outs to hold at least one part, got 0")

    def results(self) -> tuple[Result, ...]:
        out, lse = Result(self.outs.shape[1:], self.out_dtype or self.outs.dtype), self.lses
        return out, Result(lse.shape[1:], lse.dtype)
