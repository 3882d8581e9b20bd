"""The records of attention over packed sequences, without a cache, and of its gradient: training and prefill."""

import dataclasses
from typing import Any, ClassVar

import numpy as np

from ragged_attention.calls.base import (
    NOWHERE,
    WIDE_FLOATS,
    Device,
    GroupedCall,
    dtype_name,
    expect_array,
    expect_bool,
    expect_count,
    expect_groups,
    expect_number,
    expect_results,
    wide_dtype,
)
from ragged_attention.calls.paged import expect_window
from ragged_attention.errors import InvalidInput

MAX_HEAD_DIM = 256


class VarlenCall(GroupedCall):
    """What the attention over packed sequences and its gradient share."""

    k: Any
    v: Any
    cu_q_lens: Any
    cu_kv_lens: Any
    max_q_len: Any
    max_kv_len: Any
    causal: Any
    sliding_window: Any
    soft_cap: Any
    sinks: Any
    deterministic: Any

    def _check(self) -> None:
        expect_array("q", self.q, "T_q H D", WIDE_FLOATS, {})
        same = (dtype_name(self.q),)
        expect_array("k", self.k, "T_k K D", same, {"D": self.head_dim})
        if self.num_kv_heads < 1:
            raise InvalidInput("expected k to have num_kv_heads >= 1, got 0")
        expect_array("v", self.v, "T_k K D_v", same, {"T_k": self.num_kv_tokens, "K": self.num_kv_heads})
        for name, width in (("q.shape[2]", self.head_dim), ("v.shape[2]", self.v_head_dim)):
            if not 1 <= width <= MAX_HEAD_DIM:
                raise InvalidInput(f"expected {name} from 1 to {MAX_HEAD_DIM}, got {width}")
        expect_groups(self.num_q_heads, self.num_kv_heads)
        expect_array("cu_q_lens", self.cu_q_lens, "S+1", ("int32",), {})
        if self.cu_q_lens.shape[0] < 1:
            raise InvalidInput("expected cu_q_lens to have at least one entry, got 0")
        expect_array("cu_kv_lens", self.cu_kv_lens, "S+1", ("int32",), {"S+1": self.cu_q_lens.shape[0]})
        self._check_options()

    def _check_options(self) -> None:
        for name in ("max_q_len", "max_kv_len"):
            if (value := getattr(self, name)) is not None:
                expect_count(name, value, 0)
        if self.sm_scale is not None:
            expect_number("sm_scale", self.sm_scale)
        expect_bool("causal", self.causal)
        expect_window(self.sliding_window)
        if self.soft_cap is not None:
            expect_number("soft_cap", self.soft_cap, positive=True)
        if self.sinks is not None:
            expect_array("sinks", self.sinks, "H", (wide_dtype(self.q),), {"H": self.num_q_heads})
        expect_bool("deterministic", self.deterministic)

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

    @property
    def out_shape(self) -> tuple[int, int, int]:
        return (self.num_q_tokens, self.num_q_heads, self.v_head_dim)

    @property
    def lse_dtype(self) -> str:
        return wide_dtype(self.q)

    def check_values(self) -> None:
        """Raise `InvalidInput` naming the first sequence whose edges break the law. Expects NumPy arrays."""
        for name, tokens, limit_name in (("cu_q_lens", self.q, "max_q_len"), ("cu_kv_lens", self.k, "max_kv_len")):
            edges, num_tokens = getattr(self, name).astype(np.int64), tokens.shape[0]
            if edges[0] != 0:
                raise InvalidInput(f"expected {name}[0] = 0, got {edges[0]}")
            limit = getattr(self, limit_name)
            for seq, length in enumerate(np.diff(edges)):
                if length < 0:
                    raise InvalidInput(
                        f"expected {name} to ascend, got {edges[seq]}, {edges[seq + 1]} at sequence {seq}"
                    )
                if edges[seq + 1] > num_tokens:
                    raise InvalidInput(f"expected {name}[{seq + 1}] <= {num_tokens=}, got {edges[seq + 1]}")
                if limit is not None and length > limit:
                    raise InvalidInput(f"expected no sequence longer than {limit_name}={limit}, got {length} at {seq}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VarlenAttention(VarlenCall):
    """Attention of packed sequences to packed sequences, without a cache: training, and prefill of whole prompts.

    Shapes in letters: S sequences, T_q query tokens and T_k keys of all of them, H query heads, K KV heads (K divides
    H), D head size of queries and keys, D_v that of values.

    Args:
        q: [T_q, H, D] bfloat16, float16 or float32, on the portable backends also float64 (for checking gradients);
            the queries of all sequences, one after another. D and D_v from 1 to 256.
        k, v: [T_k, K, D] and [T_k, K, D_v] of q's dtype.
        cu_q_lens, cu_kv_lens: i32 [S + 1] each, prefix sums of the lengths: sequence s has the queries
            [cu_q_lens[s], cu_q_lens[s + 1]) and the keys [cu_kv_lens[s], cu_kv_lens[s + 1]). Empty sequences are
            lawful. Rows from the last entry on are padding. Entries are held within [0, T_q] and [0, T_k].
        max_q_len, max_kv_len: lengths that no sequence exceeds, a hint by which tiles are chosen. Results do not rest
            on them.
        sm_scale: factor on q . k; default `D ** -0.5`.
        causal: aligned at the end: query i of a sequence stands at position `kv_len - q_len + i` and sees the keys up
            to its own position, which is none where that is negative; otherwise it sees all keys of its sequence.
        sliding_window: it sees only keys at positions > its own - sliding_window (1 is itself alone). With
            `causal=False` this bounds the left side only.
        soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`, after scaling and before masking.
        sinks: f32 [H] (f64 beside float64 queries), a logit a head that joins the softmax's denominator and brings no
            value.
        return_lse: also return the log-sum-exp.
        deterministic: the gradients have the same bits in every run. The kernels of `triton`, `eager` and
            `reference` are so whether it is asked for or not.
        backend: this call's backend, a name or an ordered list of them; see `ragged_attention.config`. The gradient
            runs on it too if it offers `varlen_attention_backward`.
        options: this call's tunables, fields of the chosen backend's `Tile`; those of the gradient are the
            configuration's for `varlen_attention_backward`.

    Returns:
        out [T_q, H, D_v] of q's dtype; with `return_lse` also lse [T_q, H] float32 (float64 of float64 queries), the
        natural log-sum-exp of the visible logits, sinks not counted. A query that sees no key, and a padding row,
        gets out 0 and lse -inf. Softmax and sums are in float32. No value of the prefix sums makes a kernel read
        outside the arrays. What no query sees may be NaN.

        Differentiable with respect to q, k, v and sinks, through out and through lse, by reverse mode, once. What no
        query sees gets a gradient of 0, as does a query that sees nothing.

    Raises:
        InvalidInput: (a ValueError) shapes, dtypes or options that contradict the above; values of the prefix sums
            only under `validate="full"`.
        TypeError: a value of a wrong kind.
        Unsupported: no backend asked for takes the call; the message has each one's reason.

    The operation is FlashMLA's and FlashAttention's `flash_attn_varlen_func`; online softmax after Milakov and
    Gimelshein (2018), the recomputing gradient after Dao et al. (FlashAttention, 2022).
    """

    OPERATION: ClassVar[str] = "varlen_attention"

    q: Any  # [T_q, H, D]
    k: Any  # [T_k, K, D]
    v: Any  # [T_k, K, D_v]
    cu_q_lens: Any  # i32 [S + 1]
    cu_kv_lens: Any  # i32 [S + 1]
    max_q_len: int | None = None
    max_kv_len: int | None = None
    sm_scale: float | None = None
    causal: bool = False
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: Any = None  # f32 [H]
    deterministic: bool = False
    device: Device = NOWHERE

    def __post_init__(self) -> None:
        self._check()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VarlenAttentionBackward(VarlenCall):
    """The gradient of `varlen_attention`: what automatic differentiation of it calls, and kernels are swapped by.

    Letters as in `varlen_attention`.

    Args:
        d_out: [T_q, H, D_v] of q's dtype, the gradient of a scalar with respect to `out`.
        q, k, v, cu_q_lens, cu_kv_lens, max_q_len, max_kv_len, sm_scale, causal, sliding_window, soft_cap, sinks,
            deterministic: as `varlen_attention` was given them.
        out, lse: what `varlen_attention` returned: [T_q, H, D_v] of q's dtype, [T_q, H] float32.
        d_lse: [T_q, H] like `lse`, the gradient with respect to it; None is 0. Where `lse` is -inf it is ignored.
        backend, options: as everywhere; see `varlen_attention`.

    Returns:
        dq, dk, dv of the shapes and dtypes of q, k, v, and d_sinks like `sinks`, None without sinks. With
        p[j] = exp(logit[j] - lse), share = sigmoid(lse - sink), 1 without sinks, and delta = out . d_out:

            dv[j] = sum over rows of share * p[j] * d_out
            d_logit[j] = p[j] * (share * (d_out . v[j] - delta) + d_lse)
            d_sink = sum over rows of (share - 1) * delta

        from which dq and dk follow by the product rule, through the soft cap's `1 - tanh^2`. A row or key that takes
        no part gets 0. Sums are in float32.

    Raises:
        InvalidInput, TypeError, Unsupported: as `varlen_attention`.
    """

    OPERATION: ClassVar[str] = "varlen_attention_backward"

    d_out: Any  # [T_q, H, D_v]
    q: Any  # [T_q, H, D]
    k: Any  # [T_k, K, D]
    v: Any  # [T_k, K, D_v]
    out: Any  # [T_q, H, D_v]
    lse: Any  # f32 [T_q, H]
    cu_q_lens: Any  # i32 [S + 1]
    cu_kv_lens: Any  # i32 [S + 1]
    d_lse: Any = None  # f32 [T_q, H]
    max_q_len: int | None = None
    max_kv_len: int | None = None
    sm_scale: float | None = None
    causal: bool = False
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: Any = None  # f32 [H]
    deterministic: bool = False
    device: Device = NOWHERE

    def __post_init__(self) -> None:
        self._check()
        sizes = {"T_q": self.num_q_tokens, "H": self.num_q_heads, "D_v": self.v_head_dim}
        expect_results(self, "T_q H D_v", sizes)
