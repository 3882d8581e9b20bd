"""Multi-head latent attention of ragged queries over a paged latent cache."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Unpack, overload

from ragged_attention.calls import RaggedMlaAttention
from ragged_attention.operations.base import Array, AttentionKeywords, FrontEnd, Memory


class RaggedMlaKeywords(AttentionKeywords[Array, Memory], total=False):
    """The keyword arguments of `ragged_mla_attention` that do not change the number of its results."""

    d_v: int
    q_scale: float | Array | None
    kv_scale: float | Array | None
    rope_scale: float | Array | None
    key_ranges: Array | None
    cache_format: str | None
    cache_layout: str | None
    out_dtype: Any


class RaggedLatent(FrontEnd[Array, Memory]):
    """Latent attention of ragged queries over a paged cache."""

    @overload
    def ragged_mla_attention(
        self, q: Array, kv_cache: Array, kv_lens: Array, page_indices: Array, cu_q_lens: Array,
        num_seqs: int | Array | None = None, *, return_lse: Literal[False] = False,
        return_max_logits: Literal[False] = False, new_kv: None = None,
        **keywords: Unpack[RaggedMlaKeywords[Array, Memory]],
    ) -> Array: ...  # fmt: skip
    @overload
    def ragged_mla_attention(
        self, q: Array, kv_cache: Array, kv_lens: Array, page_indices: Array, cu_q_lens: Array,
        num_seqs: int | Array | None = None, *, return_lse: Literal[True],
        return_max_logits: Literal[False] = False, new_kv: Array | None = None,
        **keywords: Unpack[RaggedMlaKeywords[Array, Memory]],
    ) -> tuple[Array, ...]: ...  # fmt: skip
    @overload
    def ragged_mla_attention(
        self, q: Array, kv_cache: Array, kv_lens: Array, page_indices: Array, cu_q_lens: Array,
        num_seqs: int | Array | None = None, *, return_lse: Literal[False] = False,
        return_max_logits: Literal[False] = False, new_kv: Array,
        **keywords: Unpack[RaggedMlaKeywords[Array, Memory]],
    ) -> tuple[Array, Array]: ...  # fmt: skip
    @overload
    def ragged_mla_attention(
        self, q: Array, kv_cache: Array, kv_lens: Array, page_indices: Array, cu_q_lens: Array,
        num_seqs: int | Array | None = None, *, return_lse: bool = False, return_max_logits: Literal[True],
        new_kv: Array | None = None, **keywords: Unpack[RaggedMlaKeywords[Array, Memory]],
    ) -> tuple[Array, ...]: ...  # fmt: skip
    def ragged_mla_attention(
        self,
        q: Array,
        kv_cache: Array,
        kv_lens: Array,
        page_indices: Array,
        cu_q_lens: Array,
        num_seqs: int | Array | None = None,
        *,
        max_q_len: int | None = None,
        d_v: int = 512,
        sm_scale: float | None = None,
        causal: bool = True,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: Array | None = None,
        q_scale: float | Array | None = None,
        kv_scale: float | Array | None = None,
        rope_scale: float | Array | None = None,
        return_lse: bool = False,
        return_max_logits: bool = False,
        new_kv: Array | None = None,
        key_ranges: Array | None = None,
        cache_format: str | None = None,
        cache_layout: str | None = None,
        out_dtype: Any = None,
        out: Memory | None = None,
        backend: str | Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Array | tuple[Array, ...]:
        """Attention of ragged queries over a paged latent cache: prompts, chunks, decodes and drafts in one call.

        Shapes in letters: T query tokens, H query heads, P pages of G positions, S sequences, at most M pages per
        sequence. One latent row per position serves all heads: the row is the key, and its first `d_v` columns are the
        value.

        Args:
            q: [T, H, d_qk] float32, float16 or bfloat16; the queries of all sequences, one after another, absorbed (in
                the space of the latents). Rows from `cu_q_lens[num_seqs]` on are padding. d_qk is a multiple of 16 up
                to 1024. float8_e4m3fn queries need `q_scale`; they are widened to the dtype of `kv_cache`, or to
                bfloat16 if the cache is 8-bit, and "q's dtype" below means that wider dtype.
            kv_cache: the latents. Plain: [P, G, 1, d_qk] of q's dtype, or of float8_e4m3fn, float8_e5m2,
                float8_e4m3fnuz or int8, whose scale is `kv_scale`; `mla_decode` and `sparse_mla_prefill` do not take
                plain 8-bit caches. Quantised: bytes [P, G, 1, 656, 584, 528 or 288] in the formats that `mla_decode`
                takes. Sequences may share pages.
            kv_lens, page_indices, cu_q_lens: i32 [S], [S, M] and [S + 1], as in `ragged_paged_attention`.
            num_seqs, max_q_len: as in `ragged_paged_attention`.
            d_v: the number of columns of the value, a multiple of 16 up to d_qk.
            sm_scale: factor on q . k; default `d_qk ** -0.5`. Absorbed models must pass the scale of their heads before
                absorption, such as `192 ** -0.5` in DeepSeek-V3; see `mla_decode`.
            causal, sliding_window, soft_cap, sinks, q_scale, return_lse, return_max_logits: as in
                `ragged_paged_attention`.
            kv_scale: the scale of a plain cache, whose true values are the stored values times the scale: a float, or
                an array [] or [1]. The default is 1, also for 8-bit floats; an int8 cache needs a scale. `new_kv` is
                written with this scale, as by `write_mla_cache`.
            rope_scale: the scale of a plain cache's rotary columns, which follow the first `d_v`, in the forms of
                `kv_scale`, which is its default.
            new_kv: this step's latents, [T, d_qk] or [T, 1, d_qk] of q's dtype, one per query. They are written into
                the cache before attention, as `write_mla_cache` does by `page_indices`, `kv_lens` and `cu_q_lens`.
            key_ranges: i32 [T, R, 2], the positions that each query sees, as in `ragged_paged_attention`. This
                operation has no `draft_mask`, so key ranges also serve draft trees. The guide to tree speculation shows
                how `ragged_attention.key_ranges.tree_ranges` makes such ranges.
            cache_format, cache_layout: as in `mla_decode`.
            out_dtype, out, backend, options: as in `ragged_paged_attention`.

        Returns:
            out [T, H, d_v]; with `return_lse` also lse [T, H] float32, the natural log-sum-exp of the visible logits,
            sinks not counted; with `return_max_logits` then max_logits [H] float32, as `ragged_paged_attention` returns
            it. A query that sees no key, and a padding row, gets out 0 and lse -inf. With `new_kv` the last result is
            the cache, as `write_mla_cache` returns it: in torch the given tensor, written in place, and in jax a new
            array. No index value makes a kernel read outside the arrays: lengths are clamped to the arrays' sizes, and
            a page index outside [0, P) makes its positions invisible. Keys and values that no query sees may be NaN.
            Softmax and sums are in float32, quantised rows as in `sparse_mla_prefill`.

        Raises:
            InvalidInput, TypeError, Unsupported: as `ragged_paged_attention`.

        The result is that of `ragged_paged_attention` with one KV head whose values are the first `d_v` columns of its
        keys. If all sequences have the same number of queries, it is that of `mla_decode` with `causal=True`. The
        operation is tpu-inference's `mla_ragged_paged_attention` with the cache formats of FlashMLA.
        """
        arguments = dict(
            q=q, kv_cache=kv_cache, kv_lens=kv_lens, page_indices=page_indices, cu_q_lens=cu_q_lens, num_seqs=num_seqs,
            max_q_len=max_q_len, d_v=d_v, sm_scale=sm_scale, causal=causal, sliding_window=sliding_window,
            soft_cap=soft_cap, sinks=sinks, q_scale=q_scale, kv_scale=kv_scale, rope_scale=rope_scale,
            return_lse=return_lse, return_max_logits=return_max_logits, new_kv=new_kv, key_ranges=key_ranges,
            cache_format=cache_format, cache_layout=cache_layout, out_dtype=out_dtype,
        )  # fmt: skip
        if new_kv is not None:
            return self.run_with_write(RaggedMlaAttention, arguments, backend, options, out)
        results = self.run(RaggedMlaAttention, arguments, backend, options, out)
        results = results[: 1 + return_lse + return_max_logits]  # with `out`, torch returns empty tensors for the rest
        return tuple(results) if len(results) > 1 else results[0]
