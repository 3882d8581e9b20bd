"""The records of the fused step before attention: norms, rotary embedding, and the write to the cache."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ragged_attention.calls.base import Result, record
from ragged_attention.calls.fields import (
    FLOATS,
    INT32,
    Array,
    ArrayKind,
    Arrays,
    Count,
    Flag,
    Number,
    Pair,
    RotaryTable,
    Scale,
    Sizes,
    dtype_name,
    expect_array,
    expect_nonempty,
    field,
)
from ragged_attention.calls.paged import PagedCall, TableWrite, expect_pages, live_sequences, tables_for_slots
from ragged_attention.errors import InvalidInput


def expect_cos_sin(name: str, cos_sin: Any, call: Any, sizes: Sizes) -> None:
    """Check the table of the rotary embedding: [N, R], cosines before sines, or a pair of [N, R/2]."""
    if not isinstance(cos_sin, (tuple, list)):
        expect_array(name, cos_sin, "N R", FLOATS, {})
        num_positions, width = cos_sin.shape
        if width % 2 or not width:
            raise InvalidInput(f"expected {name}.shape[1] to be the rotary columns R, an even number, got {width}")
    else:
        if len(cos_sin) != 2:
            raise TypeError(f"expected {name} to be an array or a pair (cos, sin), got {len(cos_sin)} values")
        expect_array(f"{name}[0]", cos_sin[0], "N R/2", FLOATS, {})
        num_positions, half = cos_sin[0].shape
        expect_array(f"{name}[1]", cos_sin[1], "N R/2", (dtype_name(cos_sin[0]),), {"N": num_positions, "R/2": half})
        expect_nonempty(f"{name}[0]", "rotary columns", half)
        width = 2 * half
    expect_nonempty(name, "positions", num_positions)


class RotatingWrite(TableWrite):
    """The base of writes that normalise and rotate this step's rows first, and return the rotated queries."""

    NUM_RESULTS: ClassVar[int | None] = 1

    positions: Any
    cos_sin: Any

    @property
    def cos(self) -> Array:
        """The array whose first columns are the cosines."""
        return self.cos_sin[0] if isinstance(self.cos_sin, (tuple, list)) else self.cos_sin

    @property
    def sin(self) -> Array:
        """The array that holds the sines, from column `sin_offset` on."""
        return self.cos_sin[1] if isinstance(self.cos_sin, (tuple, list)) else self.cos_sin

    @property
    def sin_offset(self) -> int:
        return 0 if isinstance(self.cos_sin, (tuple, list)) else self.half

    @property
    def num_positions(self) -> int:
        """The number of positions in the table, N."""
        return self.cos.shape[0]

    @property
    def half(self) -> int:
        """The number of rotated pairs of columns, R / 2."""
        return self.cos.shape[1] // (1 if isinstance(self.cos_sin, (tuple, list)) else 2)

    def check_values(self) -> None:
        super().check_values()
        positions = np.asarray(self.positions)
        outside = (positions < 0) | (positions >= self.num_positions)
        if self.slot_mapping is not None:
            outside &= np.asarray(self.slot_mapping) >= 0
        else:
            count = self.kv_lens.shape[0] if self.num_seqs is None else int(np.asarray(self.num_seqs).reshape(()))
            outside[int(self.cu_q_lens[count]) :] = False
        if (bad := np.flatnonzero(outside)).size:
            got = positions[bad[0]]
            raise InvalidInput(f"expected positions[{bad[0]}] between 0 and {self.num_positions - 1}, got {got}")


@record
class NormRopeWrite(PagedCall, RotatingWrite):
    """The arguments of `norm_rope_write`, whose docstring explains them."""

    q: Any = field(ArrayKind("T H D", FLOATS))
    k: Any = field(ArrayKind("T K D", lambda call: (dtype_name(call.q),), checked_last=True))
    v: Any = field(ArrayKind("T K D_v", lambda call: (dtype_name(call.q),), checked_last=True))
    kv_pages: Any = field(Pair(("kv_pages", "v_pages"), expect_pages, unit_stride=True, written=True))
    slot_mapping: Any = field(ArrayKind("T", ("int32", "int64"), checked_last=True), default=None)
    positions: Any = field(ArrayKind("T", ("int32", "int64")))
    cos_sin: Any = field(RotaryTable(("cos_sin", "sin"), expect_cos_sin, unit_stride=True))
    q_weight: Any = field(ArrayKind("D", FLOATS), default=None)
    k_weight: Any = field(ArrayKind("D", FLOATS), default=None)
    eps: float = field(Number(positive=True), default=1e-6)
    interleaved: bool = field(Flag(), default=False)
    page_indices: Any = field(ArrayKind("S M", INT32), default=None)
    kv_lens: Any = field(ArrayKind("S", INT32), default=None)
    cu_q_lens: Any = field(ArrayKind("S+1", INT32), default=None)
    num_seqs: Any = field(Count(), default=None)
    k_scale: Any = field(Scale(divides=True), default=None)
    v_scale: Any = field(Scale(divides=True), default=None)

    def _check(self, sizes: Sizes) -> None:
        self._expect_slots_or_tables()
        if (got := self.k_pages_like.shape[3]) != self.head_dim:
            name = "kv_pages" if self.combined else "k_pages"
            raise InvalidInput(f"expected {name}.shape[3] = head_dim={self.head_dim}, got {got}")
        self._expect_cache("q", self.q)
        if 2 * self.half > self.head_dim:
            raise InvalidInput(
                f"expected cos_sin with at most head_dim={self.head_dim} rotary columns, got {2 * self.half}"
            )

    @classmethod
    def prepare(cls, arguments: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
        return live_sequences(super().prepare(tables_for_slots(arguments), arrays))

    def results(self) -> tuple[Result, ...]:
        caches = (self.kv_pages,) if self.combined else self.kv_pages
        return Result(self.q.shape, self.q.dtype), *(Result(pages.shape, pages.dtype) for pages in caches)

    @property
    def num_tokens(self) -> int:
        return self.q.shape[0]

    @property
    def num_q_heads(self) -> int:
        return self.q.shape[1]

    @property
    def head_dim(self) -> int:
        return self.q.shape[2]

    @property
    def copies(self) -> bool:
        """False: rows are rotated before they are stored, while a `WriteKvPages` may copy them unchanged."""
        return False
