"""The records of multi-head latent attention (MLA): a latent row is a key, and its first columns are the value."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ragged_attention.calls.base import Call, GroupedCall, Result, expect_groups, gradients_of, record
from ragged_attention.calls.cache_formats import CACHE_FORMATS, CacheFormat, stored_format
from ragged_attention.calls.fields import (
    FLOATS,
    INT32,
    QUANTIZED,
    WIDE_FLOATS,
    ArrayKind,
    Arrays,
    ArrayTuple,
    Count,
    Dtype,
    Flag,
    Integer,
    KeyRanges,
    Number,
    QueryScale,
    Scale,
    Sizes,
    Text,
    dtype_name,
    expect_array,
    expect_nonempty,
    field,
)
from ragged_attention.calls.mla_cache import (
    CacheKind,
    LatentPagesCall,
    ScaledLatentCall,
    WriteMlaCache,
    expect_cache,
    expect_layout,
    format_of,
    with_heads,
)
from ragged_attention.calls.mla_schedule import expect_list_lens, schedule_arrays, scheduled_lens
from ragged_attention.calls.paged import RaggedCall
from ragged_attention.calls.varlen import SINKS, like_lse, like_q
from ragged_attention.errors import InvalidInput

MAX_WIDTH = 1024


class LatentCall(GroupedCall):
    """The base of attention calls over latents."""

    d_v: Any

    def _check_queries(self) -> None:
        d_qk = self.d_qk
        if d_qk % 16 or not 16 <= d_qk <= MAX_WIDTH:
            name = f"q.shape[{len(self.q.shape) - 1}]"
            raise InvalidInput(f"expected {name} to be a multiple of 16 from 16 to {MAX_WIDTH}, got {d_qk}")
        if self.d_v % 16 or not 16 <= self.d_v <= d_qk:
            raise InvalidInput(f"expected d_v to be a multiple of 16 from 16 to {d_qk=}, got {self.d_v}")

    def _check_rows(self, name: str, cache: Any, format_name: str) -> None:
        """Check that the rows of a cache fit the queries."""
        width = cache.shape[-1] if format_name == "plain" else CACHE_FORMATS[format_name].width
        d_qk = self.d_qk
        if format_name != "plain" and width != d_qk:
            raise InvalidInput(
                f"expected q's last dimension to be {width} with cache_format={format_name!r}, got {d_qk}"
            )
        if width != d_qk:
            raise InvalidInput(f"expected {name}.shape[{len(cache.shape) - 1}] = {d_qk=}, got {width}")
        if format_name == "plain" and dtype_name(cache) not in (dtype_name(self.q), *QUANTIZED):
            raise InvalidInput(
                f"expected {name}.dtype to be that of q, {dtype_name(self.q)}, or bytes, got {dtype_name(cache)}"
            )
        expect_groups(self.num_q_heads, cache.shape[-2])

    @property
    def d_qk(self) -> int:
        return self.head_dim

    @property
    def v_head_dim(self) -> int:
        return self.d_v


class Lists(ArrayKind):
    """Lists of at least one key per query."""

    def check(self, name: str, value: Any, call: Any, sizes: Sizes) -> None:
        super().check(name, value, call, sizes)
        if value.shape[-1] < 1:
            raise InvalidInput(f"expected {name} to list at least one key per query, got 0")


class SparsePrefillCall(LatentPagesCall, LatentCall):
    """The base of sparse prefill and its gradient, with latent rows in pages or packed."""

    CACHE: ClassVar[str] = "kv"

    kv: Any
    indices: Any
    cache_format: str | None = None  # gradients support only plain rows
    cache_layout: str | None = None

    @property
    def num_tokens(self) -> int:
        return self.q.shape[0]

    @property
    def topk(self) -> int:
        return self.indices.shape[2]

    @property
    def page_size(self) -> int:
        """The number of rows per page; packed rows count as pages of one row."""
        return 1 if len(self.kv.shape) == 3 else self.kv.shape[1]


Q_PACKED = ArrayKind("T H D", WIDE_FLOATS)
LISTS = Lists("T K N", INT32, checked_last=True)


@record
class SparseMlaPrefill(SparsePrefillCall):
    """The arguments of `sparse_mla_prefill`, whose docstring explains them."""

    ATTENDS: ClassVar[bool] = True
    TAKES_OUT: ClassVar[bool] = True
    NUM_RESULTS: ClassVar[int | None] = 3
    RESULT_GRADIENTS: ClassVar[Mapping[str, int]] = {"d_out": 0, "d_lse": 2}
    SAVED_RESULTS: ClassVar[Mapping[str, int]] = {"out": 0, "lse": 2}
    DIFFERENTIABLE: ClassVar[tuple[str, ...]] = ("q", "kv", "sinks")

    q: Any = field(Q_PACKED)
    kv: Any = field(ArrayKind())
    indices: Any = field(LISTS)
    sm_scale: float | None = field(Number(), default=None)
    d_v: int = field(Integer(), default=512)
    sinks: Any = field(SINKS, default=None)
    topk_lens: Any = field(ArrayKind("T", INT32), default=None)
    cache_format: str | None = field(Text(), default=None)
    cache_layout: str | None = field(Text(), default=None)
    deterministic: bool = field(Flag(), default=False)
    out_dtype: str | None = field(Dtype(choices=FLOATS), default=None)

    def _check(self, sizes: Sizes) -> None:
        self._check_queries()
        if len(self.kv.shape) == 3:
            expect_array("kv", self.kv, "s_kv K D", WIDE_FLOATS, {})
            expect_nonempty("kv", "num_kv_heads", self.kv.shape[1])
            format_name = format_of("kv", self.kv, self.cache_format)
            expect_layout(format_name, self.cache_layout)
        else:
            format_name = expect_cache("kv", self.kv, self.cache_format, self.cache_layout, WIDE_FLOATS)
        self._check_rows("kv", self.kv, format_name)
        sizes["K"] = self.num_kv_heads

    def results(self) -> tuple[Result, ...]:
        max_logits = lse = Result(self.out_shape[:2], self.lse_dtype)
        return Result(self.out_shape, self.result_dtype), max_logits, lse

    @classmethod
    def expect_gradient(cls, arguments: Mapping[str, Any]) -> None:
        own, got = dtype_name(arguments["q"]), arguments["out_dtype"]
        if got not in (None, own):
            raise InvalidInput(f"expected out_dtype to be that of q, {own}, if a gradient is required, got {got}")


@record
class SparseMlaPrefillBackward(SparsePrefillCall):
    """The arguments of `sparse_mla_prefill_backward`, whose docstring explains them."""

    NUM_RESULTS: ClassVar[int | None] = 3

    d_out: Any = field(ArrayKind("T H d_v", like_q, checked_last=True))
    q: Any = field(Q_PACKED)
    kv: Any = field(ArrayKind())
    indices: Any = field(LISTS)
    out: Any = field(ArrayKind("T H d_v", like_q, checked_last=True))
    lse: Any = field(ArrayKind("T H", like_lse, checked_last=True))
    d_lse: Any = field(ArrayKind("T H", like_lse, checked_last=True), default=None)
    sm_scale: float | None = field(Number(), default=None)
    d_v: int = field(Integer(), default=512)
    sinks: Any = field(SINKS, default=None)
    topk_lens: Any = field(ArrayKind("T", INT32), default=None)
    deterministic: bool = field(Flag(), default=False)

    def _check(self, sizes: Sizes) -> None:
        self._check_queries()
        pages = len(self.kv.shape) == 4
        expect_array("kv", self.kv, "P G K D" if pages else "s_kv K D", (dtype_name(self.q),), {})
        expect_nonempty("kv", "num_kv_heads", self.num_kv_heads)
        expect_nonempty("kv", "page_size", self.page_size)
        self._check_rows("kv", self.kv, "plain")
        sizes |= {"K": self.num_kv_heads, "d_v": self.d_v}

    def results(self) -> tuple[Result, ...]:
        return gradients_of(self, SparseMlaPrefill)


@record
class MlaDecode(LatentPagesCall, LatentCall):
    """The arguments of `mla_decode`, whose docstring explains them; `schedule` is a tuple of the schedule's arrays."""

    ATTENDS: ClassVar[bool] = True
    TAKES_OUT: ClassVar[bool] = True
    NUM_RESULTS: ClassVar[int | None] = 2
    CACHE: ClassVar[str] = "kv_cache"

    q: Any = field(ArrayKind("S Q H D", FLOATS))
    kv_cache: Any = field(CacheKind(unit_stride=True))
    page_indices: Any = field(ArrayKind("S M", INT32), default=None)
    kv_lens: Any = field(ArrayKind("S", INT32), default=None)
    indices: Any = field(Lists("S Q N", INT32), default=None)
    d_v: int = field(Integer(), default=512)
    sm_scale: float | None = field(Number(), default=None)
    causal: bool = field(Flag(), default=False)
    sliding_window: int | None = field(Integer(least=1, symbolic=True), default=None)
    soft_cap: float | None = field(Number(positive=True), default=None)
    sinks: Any = field(SINKS, default=None)
    topk_lens: Any = field(ArrayKind(), default=None)  # [S] or [S, Q]
    extra_kv_cache: Any = field(ArrayKind(unit_stride=True), default=None)
    extra_indices: Any = field(Lists("S Q N'", INT32), default=None)
    extra_topk_lens: Any = field(ArrayKind(), default=None)  # [S] or [S, Q]
    schedule: Any = field(ArrayTuple(hint=True), default=None)  # the arrays of a `DecodeSchedule` that are not None
    cache_format: str | None = field(Text(), default=None)
    cache_layout: str | None = field(Text(), default=None)
    out_dtype: str | None = field(Dtype(choices=FLOATS), default=None)

    def _check(self, sizes: Sizes) -> None:
        self._check_queries()
        if self.num_q_tokens < 1:
            raise InvalidInput("expected q to have at least one query token per sequence, got 0")
        format_name = self.format
        self._check_rows("kv_cache", self.kv_cache, format_name)
        if self.sparse:
            self._check_sparse(sizes, format_name)
        else:
            self._check_dense(sizes)
        if self.schedule is not None:
            expect_array("schedule.num_splits", self.schedule[1], "S+1", INT32, sizes)
            expect_array("schedule.parts", self.schedule[0], "R 8", INT32, {"8": 8})
            for name, lens in zip(("lens", "extra_lens"), self.schedule[2:], strict=False):
                expect_array(f"schedule.{name}", lens, "S", INT32, sizes)

    def _check_dense(self, sizes: Sizes) -> None:
        for name in ("page_indices", "kv_lens"):
            if getattr(self, name) is None:
                raise InvalidInput(f"expected {name} with a dense call (one without indices), got None")
        for name in ("topk_lens", "extra_kv_cache", "extra_indices", "extra_topk_lens"):
            if getattr(self, name) is not None:
                raise InvalidInput(f"expected {name} only together with indices, got it without")

    def _check_sparse(self, sizes: Sizes, format_name: str) -> None:
        if self.num_kv_heads != 1:
            raise InvalidInput(f"expected kv_cache to have num_kv_heads = 1 with indices, got {self.num_kv_heads}")
        if self.causal:
            raise InvalidInput("expected causal=False with indices, which select the keys themselves, got True")
        if (got := self.sliding_window) is not None:
            raise InvalidInput(
                f"expected sliding_window=None with indices, which select the keys themselves, got {got}"
            )
        expect_list_lens("topk_lens", self.topk_lens, sizes)
        if (self.extra_kv_cache is None) != (self.extra_indices is None):
            absent = "extra_kv_cache" if self.extra_kv_cache is None else "extra_indices"
            raise InvalidInput(f"expected extra_kv_cache and extra_indices together, got {absent}=None")
        if self.extra_kv_cache is None:
            if self.extra_topk_lens is not None:
                raise InvalidInput("expected extra_topk_lens only together with extra_indices, got it without")
            return
        extra = expect_cache("extra_kv_cache", self.extra_kv_cache, None, self.cache_layout)
        mixable = [name for name, form in CACHE_FORMATS.items() if form.mixable]
        if extra != format_name and not (extra in mixable and format_name in mixable):
            allowed = " or ".join(mixable) if format_name in mixable else format_name
            raise InvalidInput(f"expected extra_kv_cache in the format of kv_cache, {allowed}, got {extra}")
        self._check_rows("extra_kv_cache", self.extra_kv_cache, extra)
        if (got := self.extra_kv_cache.shape[2]) != 1:
            raise InvalidInput(f"expected extra_kv_cache to have num_kv_heads = 1, got {got}")
        expect_list_lens("extra_topk_lens", self.extra_topk_lens, sizes)

    @classmethod
    def prepare(cls, arguments: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
        names = ("schedule", "q", "kv_cache", "indices", "extra_indices")
        schedule = schedule_arrays(*(arguments[name] for name in names))
        return super().prepare({**arguments, "schedule": schedule}, arrays)

    def results(self) -> tuple[Result, ...]:
        return Result(self.out_shape, self.result_dtype), Result(self.lse_shape, "float32")

    @property
    def sparse(self) -> bool:
        return self.indices is not None

    @property
    def num_seqs(self) -> int:
        return self.q.shape[0]

    @property
    def num_q_tokens(self) -> int:
        """The number of query tokens per sequence."""
        return self.q.shape[1]

    @property
    def topk(self) -> int:
        """The number of entries per list; 0 in a dense call."""
        return self.indices.shape[2] if self.sparse else 0

    @property
    def extra_topk(self) -> int:
        return 0 if self.extra_indices is None else self.extra_indices.shape[2]

    @property
    def capacity(self) -> int:
        """The maximum number of keys per query."""
        return self.topk + self.extra_topk if self.sparse else super().capacity

    @property
    def extra_kv_format(self) -> CacheFormat:
        """The format of the second cache, or of the first cache if there is no second one."""
        if self.extra_kv_cache is None:
            return self.kv_format
        extra = format_of("extra_kv_cache", self.extra_kv_cache, None)
        return stored_format(extra, self.cache_layout, dtype_name(self.extra_kv_cache))

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        return (self.num_seqs, self.num_q_heads, self.num_q_tokens)

    def check_values(self) -> None:
        if not self.sparse:
            self._check_table("kv_lens", self.kv_lens)
        if self.schedule is not None:
            self._check_schedule()

    def _check_schedule(self) -> None:
        parts, num_splits, *lengths = self.schedule
        most = self.num_seqs + parts.shape[0]
        if num_splits[0] != 0 or (np.diff(num_splits) < 0).any() or num_splits[-1] > most:
            raise InvalidInput(f"expected schedule.num_splits to ascend from 0 to at most {most}, got {num_splits}")
        names = ("topk_lens", "extra_topk_lens") if self.sparse else ("kv_lens",)
        for name, scheduled in zip(names, lengths, strict=False):
            count = self.topk if name == "topk_lens" else self.extra_topk
            lens = scheduled_lens(getattr(self, name), count) if self.sparse else self.kv_lens
            lens = np.broadcast_to(lens, scheduled.shape)
            if (bad := np.flatnonzero(scheduled != lens)).size:
                seq = bad[0]
                got = f"{scheduled[seq]} where {name}[{seq}] = {lens[seq]}"
                raise InvalidInput(f"expected a schedule made for these {name}, got one made for {got}")


@record
class RaggedMlaAttention(ScaledLatentCall, LatentCall, RaggedCall):
    """The arguments of `ragged_mla_attention`, whose docstring explains them."""

    WRITE: ClassVar[type[Call]] = WriteMlaCache
    CACHE: ClassVar[str] = "kv_cache"

    q: Any = field(ArrayKind("T H D", FLOATS))
    kv_cache: Any = field(CacheKind(unit_stride=True))
    kv_lens: Any = field(ArrayKind("S", INT32))
    page_indices: Any = field(ArrayKind("S M", INT32))
    cu_q_lens: Any = field(ArrayKind("S+1", INT32))
    num_seqs: Any = field(Count(), default=None)
    max_q_len: int | None = field(Integer(symbolic=True, hint=True), default=None)
    d_v: int = field(Integer(), default=512)
    sm_scale: float | None = field(Number(), default=None)
    causal: bool = field(Flag(), default=True)
    sliding_window: int | None = field(Integer(least=1, symbolic=True), default=None)
    soft_cap: float | None = field(Number(positive=True), default=None)
    sinks: Any = field(SINKS, default=None)
    q_scale: Any = field(QueryScale(), default=None)
    kv_scale: Any = field(Scale(), default=None)
    rope_scale: Any = field(Scale(), default=None)
    return_lse: bool = field(Flag(), default=False)
    return_max_logits: bool = field(Flag(), default=False)
    new_kv: Any = field(ArrayKind("T K D", like_q), default=None)
    key_ranges: Any = field(KeyRanges(), default=None)
    cache_format: str | None = field(Text(), default=None)
    cache_layout: str | None = field(Text(), default=None)
    out_dtype: str | None = field(Dtype(choices=FLOATS), default=None)

    def _check(self, sizes: Sizes) -> None:
        self._check_queries()
        if (got := self.kv_cache.shape[2]) != 1:
            raise InvalidInput(f"expected kv_cache to have num_kv_heads = 1, a row that serves all heads, got {got}")
        self._check_rows("kv_cache", self.kv_cache, self.format)
        self._expect_scales()
        self._expect_one_mask()

    @classmethod
    def prepare(cls, arguments: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
        prepared = super().prepare(arguments, arrays)
        return prepared | {"new_kv": with_heads(prepared["new_kv"])}

    @classmethod
    def arguments_of_write(cls, arguments: Mapping[str, Any]) -> dict[str, Any]:
        rows = {"kv": arguments["new_kv"], "cache": arguments["kv_cache"]}
        # The write uses d_v only to find the rotary columns, which `rope_scale` divides.
        d_v = None if arguments["rope_scale"] is None else arguments["d_v"]
        return super().arguments_of_write(arguments) | rows | {"d_v": d_v}

    @property
    def row_width(self) -> int:
        return self.d_qk

    @property
    def scales_rope(self) -> bool:
        """Whether the rotary columns, those after the first `d_v`, have a scale of their own."""
        return self.rope_scale is not None and self.d_v < self.d_qk
