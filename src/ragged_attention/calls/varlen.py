"""The records of attention over packed sequences without a cache, and of its gradient, for training and prefill."""

from typing import Any, ClassVar

import numpy as np

from ragged_attention.calls.base import GroupedCall, Result, expect_groups, gradients_of, record
from ragged_attention.calls.fields import (
    INT32,
    WIDE_FLOATS,
    ArrayKind,
    BlockSize,
    Flag,
    Integer,
    KeyRanges,
    Number,
    RelativeBias,
    Selected,
    Sizes,
    dtype_name,
    expect_nonempty,
    field,
    wide_dtype,
)
from ragged_attention.calls.paged import RaggedPagedAttention
from ragged_attention.errors import InvalidInput

MAX_HEAD_DIM = 512


def like_q(call: Any) -> tuple[str, ...]:
    return (dtype_name(call.q),)


def like_lse(call: Any) -> tuple[str, ...]:
    return (wide_dtype(call.q),)


class VarlenCall(GroupedCall):
    """The base of attention over packed sequences and its gradient."""

    k: Any
    v: Any
    cu_q_lens: Any
    cu_kv_lens: Any
    max_q_len: Any
    max_kv_len: Any
    soft_cap: Any
    sinks: Any
    alibi_slopes: Any

    def _check(self, sizes: Sizes) -> None:
        expect_nonempty("k", "num_kv_heads", self.num_kv_heads)
        for name, width in (("q.shape[2]", self.head_dim), ("v.shape[2]", self.v_head_dim)):
            if not 1 <= width <= MAX_HEAD_DIM:
                raise InvalidInput(f"expected {name} from 1 to {MAX_HEAD_DIM}, got {width}")
        expect_groups(self.num_q_heads, self.num_kv_heads)
        if self.cu_q_lens.shape[0] < 1:
            raise InvalidInput("expected cu_q_lens to have at least one entry, got 0")
        self._expect_one_mask()
        self._expect_lists_of_blocks()

    @property
    def num_q_tokens(self) -> int:
        return self.q.shape[0]

    @property
    def num_kv_tokens(self) -> int:
        return self.k.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def v_head_dim(self) -> int:
        return self.v.shape[2]

    @property
    def num_seqs(self) -> int:
        return self.cu_q_lens.shape[0] - 1

    def check_values(self) -> None:
        for name, tokens, limit_name in (("cu_q_lens", self.q, "max_q_len"), ("cu_kv_lens", self.k, "max_kv_len")):
            edges, num_tokens = getattr(self, name).astype(np.int64), tokens.shape[0]
            if edges[0] != 0:
                raise InvalidInput(f"expected {name}[0] = 0, got {edges[0]}")
            limit = getattr(self, limit_name)
            for seq, length in enumerate(np.diff(edges)):
                start, stop = edges[seq : seq + 2]
                if length < 0:
                    raise InvalidInput(f"expected {name} to ascend, got {start}, {stop} at sequence {seq}")
                if stop > num_tokens:
                    raise InvalidInput(f"expected {name}[{seq + 1}] <= {num_tokens=}, got {stop}")
                if limit is not None and length > limit:
                    raise InvalidInput(f"expected no sequence longer than {limit_name}={limit}, got {length} at {seq}")


Q = ArrayKind("T_q H D", WIDE_FLOATS)
K = ArrayKind("T_k K D", like_q)
V = ArrayKind("T_k K D_v", like_q)
EDGES = ArrayKind("S+1", INT32)
HINT = Integer(symbolic=True, hint=True)
WINDOW = Integer(least=1, symbolic=True)
SINKS = ArrayKind("H", like_lse)
SLOPES = ArrayKind("H", like_lse)
RANGES = KeyRanges(tokens="T_q")
SELECTED = Selected(tokens="T_q")
BIAS = RelativeBias(dtypes=like_lse, tokens="T_q")


@record
class VarlenAttention(VarlenCall):
    """The arguments of `varlen_attention`, whose docstring explains them."""

    ATTENDS: ClassVar[bool] = True
    TAKES_OUT: ClassVar[bool] = True
    NUM_RESULTS: ClassVar[int | None] = 3
    DIFFERENTIABLE: ClassVar[tuple[str, ...]] = ("q", "k", "v", "sinks", "relative_bias")
    OFTEN_CONSTANT: ClassVar[tuple[str, ...]] = ("relative_bias",)

    q: Any = field(Q)
    k: Any = field(K)
    v: Any = field(V)
    cu_q_lens: Any = field(EDGES)
    cu_kv_lens: Any = field(EDGES)
    max_q_len: int | None = field(HINT, default=None)
    max_kv_len: int | None = field(HINT, default=None)
    sm_scale: float | None = field(Number(), default=None)
    causal: bool = field(Flag(), default=False)
    sliding_window: int | None = field(WINDOW, default=None)
    soft_cap: float | None = field(Number(positive=True), default=None)
    sinks: Any = field(SINKS, default=None)
    alibi_slopes: Any = field(SLOPES, default=None)
    relative_bias: Any = field(BIAS, default=None)
    key_ranges: Any = field(RANGES, default=None)
    selected: Any = field(SELECTED, default=None)
    block_size: int | None = field(BlockSize(), default=None)
    return_max_logits: bool = field(Flag(), default=False)
    deterministic: bool = field(Flag(), default=False)

    def named_results(self) -> dict[str, Result]:
        """The results by name, in order."""
        out, lse = Result(self.out_shape, self.q.dtype), Result(self.out_shape[:2], self.lse_dtype)
        return {"out": out, "lse": lse, **self.max_logits_if_requested()}

    def results(self) -> tuple[Result, ...]:
        return tuple(self.named_results().values())

    def as_ragged(self) -> "RaggedPacked":
        """This call as a call of ragged paged attention in which each key counts as a page.

        `kv_lens` holds `cu_kv_lens`. There is no page table, so `page_indices` is only a placeholder.
        """
        values: dict[str, Any] = dict.fromkeys(RaggedPagedAttention.argument_names())
        given = {name: getattr(self, name) for name in self.argument_names() if name in values}
        values |= {"kv_pages": (self.k, self.v), "kv_lens": self.cu_kv_lens, "page_indices": self.cu_kv_lens}
        return RaggedPacked.unchecked(**values | given | {"return_lse": True}, device=self.device)


class RaggedPacked(RaggedPagedAttention):
    """A call of ragged paged attention over packed keys, for backends that can read them.

    The sequence `seq` has the keys from `kv_lens[seq]` to `kv_lens[seq + 1]`.
    """

    @property
    def page_size(self) -> int:
        return 0

    @property
    def num_kv_heads(self) -> int:
        return self.kv_pages[0].shape[1]

    @property
    def v_head_dim(self) -> int:
        return self.kv_pages[1].shape[2]

    @property
    def max_num_seqs(self) -> int:
        return self.kv_lens.shape[0] - 1

    @property
    def capacity(self) -> int:
        """The total number of keys, which no sequence can exceed."""
        return self.num_pages


@record
class VarlenAttentionBackward(VarlenCall):
    """The arguments of `varlen_attention_backward`, whose docstring explains them."""

    NUM_RESULTS: ClassVar[int | None] = 5

    d_out: Any = field(ArrayKind("T_q H D_v", like_q, checked_last=True))
    q: Any = field(Q)
    k: Any = field(K)
    v: Any = field(V)
    out: Any = field(ArrayKind("T_q H D_v", like_q, checked_last=True))
    lse: Any = field(ArrayKind("T_q H", like_lse, checked_last=True))
    cu_q_lens: Any = field(EDGES)
    cu_kv_lens: Any = field(EDGES)
    d_lse: Any = field(ArrayKind("T_q H", like_lse, checked_last=True), default=None)
    max_q_len: int | None = field(HINT, default=None)
    max_kv_len: int | None = field(HINT, default=None)
    sm_scale: float | None = field(Number(), default=None)
    causal: bool = field(Flag(), default=False)
    sliding_window: int | None = field(WINDOW, default=None)
    soft_cap: float | None = field(Number(positive=True), default=None)
    sinks: Any = field(SINKS, default=None)
    alibi_slopes: Any = field(SLOPES, default=None)
    relative_bias: Any = field(BIAS, default=None)
    key_ranges: Any = field(RANGES, default=None)
    selected: Any = field(SELECTED, default=None)
    block_size: int | None = field(BlockSize(), default=None)
    return_d_relative_bias: bool = field(Flag(), default=False)
    deterministic: bool = field(Flag(), default=False)

    @property
    def has_d_relative_bias(self) -> bool:
        """Whether the gradient of `relative_bias` is a result."""
        return self.return_d_relative_bias and self.relative_bias is not None

    def results(self) -> tuple[Result, ...]:
        return gradients_of(self, VarlenAttention)
