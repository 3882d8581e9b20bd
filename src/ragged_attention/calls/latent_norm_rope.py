"""The record of the fused step before attention over latents: norm, rotary embedding, and the write to the cache."""

from typing import Any

from ragged_attention.calls.base import Result, record
from ragged_attention.calls.fields import (
    FLOATS,
    INT32,
    ArrayKind,
    Count,
    Flag,
    Number,
    RotaryTable,
    Scale,
    Sizes,
    Text,
    dtype_name,
    field,
)
from ragged_attention.calls.mla_cache import CacheKind, LatentWrite
from ragged_attention.calls.norm_rope import RotatingWrite, expect_cos_sin
from ragged_attention.errors import InvalidInput


@record
class LatentNormRopeWrite(LatentWrite, RotatingWrite):
    """The arguments of `latent_norm_rope_write`, whose docstring explains them."""

    q: Any = field(ArrayKind("T H R", lambda call: (dtype_name(call.kv),), checked_last=True))
    kv: Any = field(ArrayKind())
    cache: Any = field(CacheKind(unit_stride=True, written=True))
    slot_mapping: Any = field(ArrayKind("T", ("int32", "int64"), checked_last=True), default=None)
    positions: Any = field(ArrayKind("T", ("int32", "int64"), checked_last=True))
    cos_sin: Any = field(RotaryTable(("cos_sin", "sin"), expect_cos_sin, unit_stride=True))
    kv_weight: Any = field(ArrayKind("W", FLOATS), default=None)
    eps: float = field(Number(positive=True), default=1e-6)
    interleaved: bool = field(Flag(), default=False)
    page_indices: Any = field(ArrayKind("S M", INT32), default=None)
    kv_lens: Any = field(ArrayKind("S", INT32), default=None)
    cu_q_lens: Any = field(ArrayKind("S+1", INT32), default=None)
    num_seqs: Any = field(Count(), default=None)
    kv_scale: Any = field(Scale(divides=True), default=None)
    rope_scale: Any = field(Scale(divides=True), default=None)
    power_of_two_scales: bool = field(Flag(), default=True)
    cache_format: str | None = field(Text(), default=None)
    cache_layout: str | None = field(Text(), default=None)

    def _check(self, sizes: Sizes) -> None:
        super()._check(sizes)
        sizes["R"] = rotary = 2 * self.half
        if rotary > self.width:
            raise InvalidInput(f"expected cos_sin with at most d_qk={self.width} rotary columns, got {rotary}")
        if not 1 <= self.normalized <= self.width and self.kv_weight is not None:
            raise InvalidInput(f"expected kv_weight.shape[0] between 1 and d_qk={self.width}, got {self.normalized}")

    def results(self) -> tuple[Result, ...]:
        return Result(self.q.shape, self.q.dtype), *super().results()

    @property
    def width(self) -> int:
        """The number of columns of a row, d_qk. The last 2 * half of them are rotated."""
        return self.kv.shape[2]

    @property
    def rope_start(self) -> int:
        """The first column that `rope_scale` divides; the number of columns if the call has no `rope_scale`."""
        return self.width if self.rope_scale is None else self.width - 2 * self.half

    @property
    def normalized(self) -> int:
        """The number of columns, from the first one on, that are normalised."""
        return 0 if self.kv_weight is None else self.kv_weight.shape[0]

    @property
    def num_q_heads(self) -> int:
        return self.q.shape[1]
