"""Attention over packed sequences, and its gradient."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Unpack, overload

from ragged_attention.calls import VarlenAttention, VarlenAttentionBackward, expect_bool
from ragged_attention.operations.base import Array, AttentionKeywords, FrontEnd, Memory, requested


class VarlenKeywords(AttentionKeywords[Array, Memory], total=False):
    """The keyword arguments of `varlen_attention` that do not change the number of its results."""

    max_kv_len: int | None
    alibi_slopes: Array | None
    relative_bias: Array | None
    key_ranges: Array | None
    selected: Array | None
    block_size: int | None
    deterministic: bool


class Varlen(FrontEnd[Array, Memory]):
    """Attention over packed sequences, and its gradient."""

    @overload
    def varlen_attention(
        self, q: Array, k: Array, v: Array, cu_q_lens: Array, cu_kv_lens: Array, *, return_lse: Literal[False] = False,
        return_max_logits: Literal[False] = False, **keywords: Unpack[VarlenKeywords[Array, Memory]],
    ) -> Array: ...  # fmt: skip
    @overload
    def varlen_attention(
        self, q: Array, k: Array, v: Array, cu_q_lens: Array, cu_kv_lens: Array, *, return_lse: Literal[True],
        return_max_logits: Literal[False] = False, **keywords: Unpack[VarlenKeywords[Array, Memory]],
    ) -> tuple[Array, Array]: ...  # fmt: skip
    @overload
    def varlen_attention(
        self, q: Array, k: Array, v: Array, cu_q_lens: Array, cu_kv_lens: Array, *, return_lse: bool = False,
        return_max_logits: Literal[True], **keywords: Unpack[VarlenKeywords[Array, Memory]],
    ) -> tuple[Array, ...]: ...  # fmt: skip
    def varlen_attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        cu_q_lens: Array,
        cu_kv_lens: Array,
        *,
        max_q_len: int | None = None,
        max_kv_len: int | None = None,
        sm_scale: float | None = None,
        causal: bool = False,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: Array | None = None,
        alibi_slopes: Array | None = None,
        relative_bias: Array | None = None,
        key_ranges: Array | None = None,
        selected: Array | None = None,
        block_size: int | None = None,
        return_lse: bool = False,
        return_max_logits: bool = False,
        deterministic: bool = False,
        out: Memory | None = None,
        backend: str | Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Array | tuple[Array, ...]:
        """Attention of packed sequences to packed sequences, without a cache: training, and prefill of whole prompts.

        Shapes in letters: S sequences, T_q query tokens and T_k keys in total, H query heads, K KV heads (K divides H),
        D head size of queries and keys, D_v head size of values.

        Args:
            q: [T_q, H, D] bfloat16, float16 or float32, on the portable backends also float64 (for checking gradients);
                the queries of all sequences, one after another. D and D_v from 1 to 512.
            k, v: [T_k, K, D] and [T_k, K, D_v] of q's dtype.
            cu_q_lens, cu_kv_lens: i32 [S + 1] each, prefix sums of the lengths: sequence s has the queries
                [cu_q_lens[s], cu_q_lens[s + 1]) and the keys [cu_kv_lens[s], cu_kv_lens[s + 1]). Empty sequences are
                allowed. Rows from the last entry on are padding. Entries are clamped to [0, T_q] and [0, T_k].
            max_q_len, max_kv_len: upper bounds on the sequences' lengths, hints for tile sizes. Results do not depend
                on them.
            sm_scale: factor on q . k; default `D ** -0.5`.
            causal: whether a query sees only the keys up to its own position (none if that is negative), instead of all
                keys of its sequence. Queries are aligned at the end of the keys: query i of a sequence is at position
                `kv_len - q_len + i`.
            sliding_window: a query at position p sees only keys at positions > p - sliding_window (with 1, only p).
                With `causal=False` this bounds the left side only.
            soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`, after scaling and before masking.
            sinks: f32 [H] (f64 with float64 queries), one logit per head, which is added to the denominator of the
                softmax only.
            alibi_slopes: f32 [H] (f64 with float64 queries), finite: the logit of the query at position p and the key
                at position j gains `alibi_slopes[h] * (j - p)`, after scaling and `soft_cap`, before masking. Positions
                are those of `causal`, also with `causal=False`. Logits of keys after the query then grow with the
                distance, while FlashAttention subtracts `alibi_slopes[h] * abs(j - p)`. Slopes are constants: they have
                no gradient.
            relative_bias: as in `ragged_paged_attention`, [H, B] or [T_q, H, B] (f64 with float64 queries): a bias by
                distance, as in T5. Its gradient is computed only if `relative_bias` needs one.
            key_ranges: i32 [T_q, R, 2], R from 1 to 8, as in `ragged_paged_attention`: ranges of keys of the query's
                own sequence, whose first packed key is position 0. The gradient skips each pair of query block and key
                block in which no query sees a key.
            selected: i32 [T_q, K, N] or [T_q, 1, N], as in `ragged_paged_attention`: lists of blocks of keys, one for
                each KV head or one for all. Block b has the packed keys [b * block_size, (b + 1) * block_size) of the
                query's own sequence. Lists have no gradient.
            block_size: the number of keys in a block, a power of two from 1 to 256; given with `selected` only.
            return_lse: also return the log-sum-exp.
            return_max_logits: also return the largest logit of each query head, as `ragged_paged_attention` does.
            deterministic: whether the gradients have the same bits in every run. With `triton`, `eager` and `reference`
                they always have.
            out: as in `ragged_paged_attention`; a call with `out` has no gradient.
            backend: as in `ragged_paged_attention`. The gradient also runs on this backend if it offers
                `varlen_attention_backward`.
            options: as in `ragged_paged_attention`. The gradient uses the options that the configuration has for
                `varlen_attention_backward`.

        Returns:
            out [T_q, H, D_v] of q's dtype; with `return_lse` also lse [T_q, H] float32 (float64 for float64 queries),
            the natural log-sum-exp of the visible logits, sinks not counted; with `return_max_logits`, last, max_logits
            [H] float32 (float64 for float64 queries), as `ragged_paged_attention` returns it, without a gradient. A
            query that sees no key, and a padding row, gets out 0 and lse -inf. Softmax and sums are in float32. No
            value of the prefix sums makes a kernel read outside the arrays. Keys and values that no query sees may be
            NaN.

            The results out and lse are differentiable once, in reverse mode, with respect to q, k, v, sinks and
            relative_bias. Keys and values that no query sees get a gradient of 0, as do queries that see no key, and
            columns of relative_bias that no pair of query and visible key uses.

        Raises:
            InvalidInput, TypeError, Unsupported: as `ragged_paged_attention`.

        The operation is FlashMLA's and FlashAttention's `flash_attn_varlen_func`; the online softmax follows Milakov
        and Gimelshein (2018), and the recomputing gradient follows Dao et al. (FlashAttention, 2022).
        """
        arguments = dict(
            q=q, k=k, v=v, cu_q_lens=cu_q_lens, cu_kv_lens=cu_kv_lens, max_q_len=max_q_len, max_kv_len=max_kv_len,
            sm_scale=sm_scale, causal=causal, sliding_window=sliding_window, soft_cap=soft_cap, sinks=sinks,
            alibi_slopes=alibi_slopes, relative_bias=relative_bias, key_ranges=key_ranges, selected=selected,
            block_size=block_size, return_max_logits=return_max_logits, deterministic=deterministic,
        )  # fmt: skip
        expect_bool("return_lse", return_lse)
        results = self.run(VarlenAttention, arguments, backend, options, out)
        return requested(results, return_lse, return_max_logits)

    def varlen_attention_backward(
        self,
        d_out: Array,
        q: Array,
        k: Array,
        v: Array,
        out: Array,
        lse: Array,
        cu_q_lens: Array,
        cu_kv_lens: Array,
        *,
        d_lse: Array | None = None,
        max_q_len: int | None = None,
        max_kv_len: int | None = None,
        sm_scale: float | None = None,
        causal: bool = False,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: Array | None = None,
        alibi_slopes: Array | None = None,
        relative_bias: Array | None = None,
        key_ranges: Array | None = None,
        selected: Array | None = None,
        block_size: int | None = None,
        return_d_relative_bias: bool = False,
        deterministic: bool = False,
        backend: str | Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[Array, Array, Array, Array | None, Array | None]:
        """The gradient of `varlen_attention`, for automatic differentiation and for other training loops.

        Letters as in `varlen_attention`.

        Args:
            d_out: [T_q, H, D_v] of q's dtype, the gradient of a scalar with respect to `out`.
            q, k, v, cu_q_lens, cu_kv_lens, max_q_len, max_kv_len, sm_scale, causal, sliding_window, soft_cap, sinks,
                alibi_slopes, relative_bias, key_ranges, selected, block_size, deterministic: the arguments of
                `varlen_attention`.
            out, lse: the results of `varlen_attention`: [T_q, H, D_v] of q's dtype, [T_q, H] float32.
            d_lse: [T_q, H] like `lse`, the gradient with respect to `lse`; None means 0. It is ignored where `lse` is
                -inf.
            return_d_relative_bias: also compute the gradient of `relative_bias`, which takes extra time. Automatic
                differentiation requests it if `relative_bias` needs a gradient.
            backend, options: as in `ragged_paged_attention`.

        Returns:
            dq, dk, dv of the shapes and dtypes of q, k, v; d_sinks like `sinks`, None without sinks; d_relative_bias
            like `relative_bias`, None without it or without `return_d_relative_bias`. In the sums, a row is a query
            token with one query head. With p[j] = exp(logit[j] - lse), share = sigmoid(lse - sink) (1 without sinks),
            and delta = out . d_out:

                dv[j] = sum over rows of share * p[j] * d_out
                d_logit[j] = p[j] * (share * (d_out . v[j] - delta) + d_lse)
                d_sink = sum over rows of (share - 1) * delta
                d_relative_bias[c] = sum of d_logit[j] over the rows and their keys that use column c

            from which dq and dk follow by the chain rule, with the factor `1 - tanh^2` if there is a soft cap. A query
            that sees no key, and a key that no query sees, get 0. Sums are in float32.

        Raises:
            InvalidInput, TypeError, Unsupported: as `ragged_paged_attention`.
        """
        arguments = dict(
            d_out=d_out, q=q, k=k, v=v, out=out, lse=lse, cu_q_lens=cu_q_lens, cu_kv_lens=cu_kv_lens, d_lse=d_lse,
            max_q_len=max_q_len, max_kv_len=max_kv_len, sm_scale=sm_scale, causal=causal, sliding_window=sliding_window,
            soft_cap=soft_cap, sinks=sinks, alibi_slopes=alibi_slopes, relative_bias=relative_bias,
            key_ranges=key_ranges, selected=selected, block_size=block_size,
            return_d_relative_bias=return_d_relative_bias, deterministic=deterministic,
        )  # fmt: skip
        dq, dk, dv, d_sinks, d_bias = self.run(VarlenAttentionBackward, arguments, backend, options)
        has_d_bias = relative_bias is not None and return_d_relative_bias
        return dq, dk, dv, None if sinks is None else d_sinks, d_bias if has_d_bias else None
