"""The record of ragged attention over a paged latent cache: queries of any number, one row for all heads."""

from collections.abc import Mapping
from typing import Any, ClassVar

from ragged_attention.calls.base import Call, Result, WritingCall, record
from ragged_attention.calls.fields import (
    FLOATS,
    INT32,
    ArrayKind,
    Arrays,
    Count,
    Dtype,
    Flag,
    Integer,
    Number,
    Scale,
    Sizes,
    Text,
    dtype_name,
    field,
    is_array,
)
from ragged_attention.calls.mla import LatentCall
from ragged_attention.calls.mla_cache import (
    CacheFormat,
    CacheKind,
    WriteMlaCache,
    expect_scale,
    format_of,
    is_plain_8bit,
    laid_out,
    with_heads,
)
from ragged_attention.calls.paged import check_ragged_values, live_sequences
from ragged_attention.calls.varlen import SINKS
from ragged_attention.errors import InvalidInput


@record
class RaggedMlaAttention(LatentCall, WritingCall):
    """The arguments of `ragged_mla_attention`, which says what they mean."""

    OPERATION: ClassVar[str] = "ragged_mla_attention"
    ATTENDS: ClassVar[bool] = True
    TAKES_OUT: ClassVar[bool] = True
    NUM_RESULTS: ClassVar[int | None] = None
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
    kv_scale: Any = field(Scale(), default=None)
    return_lse: bool = field(Flag(), default=False)
    new_kv: Any = field(ArrayKind("T K D", lambda call: (dtype_name(call.q),)), default=None)
    cache_format: str | None = field(Text(), default=None)
    cache_layout: str | None = field(Text(), default=None)
    out_dtype: str | None = field(Dtype(choices=FLOATS), default=None)

    def _check(self, sizes: Sizes) -> None:
        self._check_queries()
        if (got := self.kv_cache.shape[2]) != 1:
            raise InvalidInput(f"expected kv_cache to have num_kv_heads = 1, a row that serves all heads, got {got}")
        self._check_rows("kv_cache", self.kv_cache, self.format)
        expect_scale(self.format, self.kv_scale)

    @classmethod
    def prepare(cls, arguments: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
        prepared = live_sequences(super().prepare(arguments, arrays))
        return prepared | {"new_kv": with_heads(prepared["new_kv"])}

    @classmethod
    def arguments_of_write(cls, arguments: Mapping[str, Any]) -> dict[str, Any]:
        names = (
            "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "kv_scale", "cache_format", "cache_layout",
        )  # fmt: skip
        known = {"kv": arguments["new_kv"], "cache": arguments["kv_cache"], "slot_mapping": None}
        return known | {"power_of_two_scales": True} | {name: arguments[name] for name in names}

    def results(self) -> tuple[Result, ...]:
        out, lse = Result(self.out_shape, self.result_dtype), Result(self.q.shape[:2], "float32")
        return (out, lse) if self.return_lse else (out,)

    @property
    def given_format(self) -> str | None:
        return self.cache_format

    @property
    def row_width(self) -> int | None:
        return self.q.shape[-1] if is_array(self.q) else None

    @property
    def num_kv_heads(self) -> int:
        return 1

    @property
    def num_tokens(self) -> int:
        return self.q.shape[0]

    @property
    def max_num_seqs(self) -> int:
        return self.kv_lens.shape[0]

    @property
    def num_pages(self) -> int:
        return self.kv_cache.shape[0]

    @property
    def page_size(self) -> int:
        return self.kv_cache.shape[1]

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size

    @property
    def capacity(self) -> int:
        """The most positions one sequence's row of `page_indices` can hold; longer lengths count as this."""
        return min(self.page_indices.shape[1] * self.page_size, 2**31 - 2**16)

    @property
    def format(self) -> str:
        return format_of("kv_cache", self.kv_cache, self.cache_format, self.row_width)

    @property
    def layout(self) -> CacheFormat | None:
        """The format in the call's layout, None of a plain cache."""
        return laid_out(self.format, self.cache_layout)

    @property
    def code_dtype(self) -> str | None:
        """The dtype of a plain 8-bit cache, None of any other."""
        return dtype_name(self.kv_cache) if is_plain_8bit(self.kv_cache, self.row_width) else None

    @property
    def out_shape(self) -> tuple[int, int, int]:
        return (self.num_tokens, self.num_q_heads, self.d_v)

    def check_values(self) -> None:
        """Raise `InvalidInput` naming the first sequence whose index values are invalid. Expects NumPy arrays."""
        check_ragged_values(
            self.kv_lens, self.page_indices, self.cu_q_lens, self.num_seqs,
            self.num_tokens, self.num_pages, self.page_size, self.max_q_len,
        )  # fmt: skip
