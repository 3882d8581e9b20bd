"""The record of `attention_target`: the target distribution for training the indexer of sparse attention."""

from collections.abc import Mapping
from typing import Any, ClassVar

from ragged_attention.calls.base import Result, record
from ragged_attention.calls.fields import (
    FLOATS,
    INT32,
    ArrayKind,
    Arrays,
    Flag,
    Integer,
    Number,
    Sizes,
    dtype_name,
    expect_array,
    expect_nonempty,
    field,
    is_array,
)
from ragged_attention.calls.indexer import KeysCall
from ragged_attention.calls.mla import MAX_WIDTH
from ragged_attention.errors import InvalidInput


@record
class AttentionTarget(KeysCall):
    """The arguments of `attention_target`, whose docstring explains them."""

    WHY_NO_GRADIENT: ClassVar[str] = "a target is a constant of the loss"
    FORMS: ClassVar[tuple[tuple[str, ...], ...]] = (("indices",), ("starts", "stops"))
    OF_FORMS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "indices": ("topk_lens",),
        "starts": ("relative", "max_keys"),
    }

    q: Any = field(ArrayKind("T H D", FLOATS))
    keys: Any = field(ArrayKind(unit_stride=True))
    lse: Any = field(ArrayKind("T H", ("float32",)))
    indices: Any = field(ArrayKind("T N", INT32), default=None)
    sm_scale: float | None = field(Number(), default=None)
    topk_lens: Any = field(ArrayKind("T", INT32), default=None)
    starts: Any = field(ArrayKind("T", INT32), default=None)
    stops: Any = field(ArrayKind("T", INT32), default=None)
    relative: bool = field(Flag(), default=False)
    max_keys: int | None = field(Integer(least=1), default=None)

    # Keys are packed, and have no scales.
    page_indices = kv_lens = cu_q_lens = num_seqs = key_scale = None
    ratio = 1

    def _check(self, sizes: Sizes) -> None:
        if (got := self.head_dim) % 16 or not 16 <= got <= MAX_WIDTH:
            raise InvalidInput(f"expected q.shape[2] to be a multiple of 16 from 16 to {MAX_WIDTH}, got {got}")
        expect_nonempty("q", "num_heads", self.num_heads)
        expect_array("keys", self.keys, "s_kv D", (dtype_name(self.q),), {"D": self.head_dim})
        self._expect_one_form()
        self._expect_max_keys()

    @classmethod
    def prepare(cls, arguments: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
        """The record's arguments, without gradients. An axis of one KV head is removed from `keys` and `indices`."""
        prepared = super().prepare(arguments, arrays)
        for name in ("keys", "indices"):
            array = prepared[name]
            if is_array(array) and len(array.shape) == 3 and array.shape[1] == 1:
                prepared[name] = array[:, 0]
        for name in ("q", "keys", "lse"):
            if is_array(prepared[name]):
                prepared[name] = arrays.constant(prepared[name])
        return prepared

    def results(self) -> tuple[Result, ...]:
        return (Result((self.num_tokens, self.columns), "float32"),)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.sm_scale is None else float(self.sm_scale)
