"""The record of ragged attention over a paged latent cache: queries of any number, one row for all heads."""

from collections.abc import Mapping
from typing import Any, ClassVar

from ragged_attention.calls.base import Call, record
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
    QueryScale,
    Scale,
    Sizes,
    Text,
    dtype_name,
    field,
)
from ragged_attention.calls.mla import LatentCall
from ragged_attention.calls.mla_cache import CacheKind, LatentPagesCall, WriteMlaCache, expect_scale, with_heads
from ragged_attention.calls.paged import RaggedCall
from ragged_attention.calls.varlen import SINKS
from ragged_attention.errors import InvalidInput


@record
class RaggedMlaAttention(LatentPagesCall, LatentCall, RaggedCall):
    """The arguments of `ragged_mla_attention`, which says what they mean."""

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
        prepared = super().prepare(arguments, arrays)
        return prepared | {"new_kv": with_heads(prepared["new_kv"])}

    @classmethod
    def arguments_of_write(cls, arguments: Mapping[str, Any]) -> dict[str, Any]:
        names = (
            "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "kv_scale", "cache_format", "cache_layout",
        )  # fmt: skip
        known = {"kv": arguments["new_kv"], "cache": arguments["kv_cache"], "slot_mapping": None}
        return known | {"power_of_two_scales": True} | {name: arguments[name] for name in names}

    @property
    def row_width(self) -> int:
        return self.d_qk
