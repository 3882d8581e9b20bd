"""Multi-head latent attention: the attention operations, the schedule of a decode step, and the quantised cache."""

from collections.abc import Mapping, Sequence
from typing import Any

from ragged_attention.calls import (
    DecodeSchedule,
    DequantizeMlaCache,
    MakeDecodeSchedule,
    MlaDecode,
    PageIndicesToSlots,
    QuantizeMlaCache,
    SparseMlaPrefill,
    SparseMlaPrefillBackward,
    WriteMlaCache,
)
from ragged_attention.calls.mla_schedule import schedule_for
from ragged_attention.operations.base import Array, FrontEnd, Memory


class Latent(FrontEnd[Array, Memory]):
    """Latent attention, the schedule of a decode step, and the quantised cache."""

    def sparse_mla_prefill(
        self,
        q: Array,
        kv: Array,
        indices: Array,
        *,
        sm_scale: float | None = None,
        d_v: int = 512,
        sinks: Array | None = None,
        topk_lens: Array | None = None,
        cache_format: str | None = None,
        cache_layout: str | None = None,
        deterministic: bool = False,
        out_dtype: Any = None,
        out: Memory | None = None,
        backend: str | Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[Array, Array, Array]:
        """Attention of each query token over its own list of latent rows: DeepSeek sparse attention, prefill.

        Shapes in letters: T query tokens, H query heads, K KV heads (K divides H; 1 in every published model), N
        selected keys per query, P pages of G positions.

        Args:
            q: [T, H, d_qk] bfloat16, float16 or float32, on the portable backends also float64 (for checking
                gradients); d_qk a multiple of 16 up to 1024.
            kv: the latent rows, [s_kv, K, d_qk] of q's dtype, packed; or a paged cache [P, G, K, d_qk], or a quantised
                cache [P, G, 1, bytes], as `mla_decode` takes them. A row is the key; its first `d_v` columns are the
                value.
            indices: i32 [T, K, N], rows of `kv`, or slots `page * G + offset` of a paged cache, in any order. An index
                outside [0, s_kv) (or [0, P * G)), such as -1, selects nothing and is never read as a row; an index that
                is listed twice counts twice.
            sm_scale: factor on q . k; default `d_qk ** -0.5`. Absorbed models must pass the scale of their heads before
                absorption, such as `192 ** -0.5` in DeepSeek-V3; see `mla_decode`.
            d_v: the number of columns of the value, a multiple of 16 up to d_qk.
            sinks: f32 [H] (f64 with float64 queries), one logit per head, which is added to the denominator of the
                softmax only.
            topk_lens: i32 [T], the lengths of the lists, clamped to [0, N]; later entries of `indices` are ignored.
            cache_format, cache_layout: as in `mla_decode`.
            deterministic: whether the gradient has the same bits in every run. Contributions to a row are then added in
                the order of the queries that select it, which takes an extra index. Otherwise GPUs add them in any
                order.
            out_dtype: as in `ragged_paged_attention`. With another dtype than q's there is no gradient.
            out: as in `ragged_paged_attention`; a call with `out` has no gradient.
            backend: as in `ragged_paged_attention`. The gradient also runs on this backend if it offers
                `sparse_mla_prefill_backward`.
            options: as in `ragged_paged_attention`. The gradient uses the options that the configuration has for
                `sparse_mla_prefill_backward`.

        Returns:
            Always three arrays, in FlashMLA's order: out [T, H, d_v]; max_logits [T, H] float32, the largest scaled
            logit; lse [T, H] float32, the natural log-sum-exp of the logits (both float64 for float64 queries). Sinks
            multiply out by `sigmoid(lse - sink)` and change neither max_logits nor lse. A query that selects nothing
            gets out 0, max_logits -inf and lse -inf. Rows that are not selected may hold NaN. Softmax and sums are in
            float32; a quantised value is its 8-bit or 4-bit code times its scale. The backend `triton` multiplies
            quantised rows by 16-bit softmax weights even if q is float32; out is then only as accurate as with bfloat16
            queries. An e8m0 scale of 2 ** -127, which `quantize_mla_cache` never writes, counts as 0 on devices that
            flush subnormal numbers, as XLA does.

            The results out and lse are differentiable once, in reverse mode, with respect to q, a plain kv and sinks;
            max_logits counts as a constant. Rows that are not selected get a gradient of 0.

        Raises:
            InvalidInput, TypeError, Unsupported: as `ragged_paged_attention`.

        The operation is FlashMLA's `flash_mla_sparse_fwd` (DeepSeek-V3.2), made general; the function of that name in
        `compat.flash_mla` has FlashMLA's conventions (base-2 max_logits and lse by default).
        """
        arguments = dict(
            q=q, kv=kv, indices=indices, sm_scale=sm_scale, d_v=d_v, sinks=sinks, topk_lens=topk_lens,
            cache_format=cache_format, cache_layout=cache_layout, deterministic=deterministic, out_dtype=out_dtype,
        )  # fmt: skip
        return self.run(SparseMlaPrefill, arguments, backend, options, out)

    def sparse_mla_prefill_backward(
        self,
        d_out: Array,
        q: Array,
        kv: Array,
        indices: Array,
        out: Array,
        lse: Array,
        *,
        d_lse: Array | None = None,
        sm_scale: float | None = None,
        d_v: int = 512,
        sinks: Array | None = None,
        topk_lens: Array | None = None,
        deterministic: bool = False,
        backend: str | Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[Array, Array, Array | None]:
        """The gradient of `sparse_mla_prefill`, for automatic differentiation and for other training loops.

        Letters as in `sparse_mla_prefill`.

        Args:
            d_out: [T, H, d_v] of q's dtype, the gradient of a scalar with respect to `out`.
            kv: [s_kv, K, d_qk] or pages [P, G, K, d_qk], of q's dtype; a quantised cache has no gradient.
            q, indices, sm_scale, d_v, sinks, topk_lens, deterministic: the arguments of `sparse_mla_prefill`.
            out, lse: the results of `sparse_mla_prefill`: [T, H, d_v] of q's dtype, [T, H] float32.
            d_lse: [T, H] like `lse`, the gradient with respect to `lse`; None means 0. It is ignored where `lse` is
                -inf.
            backend, options: as in `ragged_paged_attention`.

        Returns:
            dq and dkv of the shapes and dtypes of q and kv, and d_sinks like `sinks`, None without sinks. The formulas
            are those of `varlen_attention_backward`. The gradient of a row is the sum of its gradients as key and, in
            the first `d_v` columns, as value, over all entries of all lists that name it. A row that no list names gets
            0, even if it holds NaN. Sums are in float32.

        Raises:
            InvalidInput, TypeError, Unsupported: as `ragged_paged_attention`.
        """
        arguments = dict(
            d_out=d_out, q=q, kv=kv, indices=indices, out=out, lse=lse, d_lse=d_lse, sm_scale=sm_scale, d_v=d_v,
            sinks=sinks, topk_lens=topk_lens, deterministic=deterministic,
        )  # fmt: skip
        dq, dkv, d_sinks = self.run(SparseMlaPrefillBackward, arguments, backend, options)
        return dq, dkv, None if sinks is None else d_sinks

    def mla_decode(
        self,
        q: Array,
        kv_cache: Array,
        page_indices: Array | None = None,
        kv_lens: Array | None = None,
        *,
        indices: Array | None = None,
        d_v: int = 512,
        sm_scale: float | None = None,
        causal: bool = False,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: Array | None = None,
        topk_lens: Array | None = None,
        extra_kv_cache: Array | None = None,
        extra_indices: Array | None = None,
        extra_topk_lens: Array | None = None,
        schedule: DecodeSchedule | None = None,
        cache_format: str | None = None,
        cache_layout: str | None = None,
        out_dtype: Any = None,
        out: Memory | None = None,
        backend: str | Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[Array, Array]:
        """Attention of a few query tokens per sequence over a paged latent cache: over all keys, or over top-k lists.

        Shapes in letters: S sequences, Q query tokens per sequence, H query heads, K KV heads (K divides H), P pages of
        G positions, at most M pages per sequence, N selected keys per query.

        Args:
            q: [S, Q, H, d_qk] bfloat16, float16 or float32; d_qk a multiple of 16 up to 1024.
            kv_cache: the latents. Plain: [P, G, K, d_qk] of q's dtype. Quantised: bytes (uint8, int8 or float8_e4m3fn)
                [P, G, 1, n], where n is 656 in the format `fp8_v32` (d_qk 576), 584 in `fp8_v4`, 528 in `fp8_v41` and
                288 in `fp4_v41` (d_qk 512 in all three); see `quantize_mla_cache`. G may be any number. In torch there
                may be gaps between pages. The first `d_v` columns are the value.
            page_indices, kv_lens: i32 [S, M] and [S], as in `ragged_paged_attention`, for dense calls, which are those
                without `indices`. Sparse calls need neither. As in FlashMLA, they take both and use only the lists.
            indices: i32 [S, Q, N], makes the call sparse (K must be 1): slots `page * G + offset` of the cache for each
                query token, in any order. A slot outside [0, P * G), such as -1, selects nothing; a slot that is listed
                twice counts twice.
            d_v: the number of columns of the value, a multiple of 16 up to d_qk.
            sm_scale: factor on q . k; default `d_qk ** -0.5`. Models with absorbed projections must pass the scale of
                their heads before absorption: DeepSeek-V3, whose heads have 128 + 64 columns, must pass `192 ** -0.5`,
                while the default is `576 ** -0.5`. The arguments do not show whether q is absorbed, so a call without
                the scale cannot be refused. FlashMLA has the same default.
            causal: dense calls only. Queries are aligned at the end: query j of a sequence sees positions < kv_len - (Q
                - 1 - j).
            sliding_window: dense calls only. Query j sees only positions >= kv_len - (Q - 1 - j) - sliding_window (with
                1, only its own position). With `causal=False` this bounds the left side only.
            soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`, after scaling.
            sinks: f32 [H], one logit per head, which is added to the denominator of the softmax only.
            topk_lens: i32 [S] or [S, Q], the lengths of the lists, clamped to [0, N]; later entries of `indices` are
                ignored.
            extra_kv_cache, extra_indices, extra_topk_lens: a second cache of the same format, whose pages may differ in
                number and size, its lists i32 [S, Q, N'] and their lengths. Each query attends to the keys that it
                selects from both caches. One cache may be `fp8_v41` and the other `fp4_v41`. (FlashMLA takes `fp4_v41`
                only as the second cache beside `fp8_v41`; here it may also be the only cache, in dense calls too.)
            schedule: the division of the work that `make_decode_schedule` returns. Without a schedule, shapes alone
                determine how each sequence's keys are divided among programs. The results of different divisions differ
                by rounding only.
            cache_format: `plain`, `fp8_v32`, `fp8_v4`, `fp8_v41` or `fp4_v41`; by default, the dtype and last dimension
                of the cache decide.
            cache_layout: the order of the bytes in both caches: "token" keeps the bytes of each token together, "page"
                stores all values of a page and then all its scales. The default is "page" for `fp8_v4` and "token" for
                all other formats; only `fp8_v41` and `fp4_v41` may have either layout.
            out_dtype, out, backend, options: as in `ragged_paged_attention`. With the kernels of `triton` and `cuda`,
                `options={"num_splits": 1}` without a schedule makes each sequence's results bitwise independent of the
                other sequences.

        Returns:
            Always two arrays: out [S, Q, H, d_v], and lse [S, H, Q] float32, the natural log-sum-exp of the scaled
            logits. `lse.mT` is lse in the order of out, [S, Q, H]. Heads come first as in FlashMLA; all other
            operations return lse with tokens first. Sinks multiply out by `sigmoid(lse - sink)` and leave lse as it is.
            A query that sees no key gets out 0 and lse -inf. No index value makes a kernel read outside the arrays:
            lengths are clamped to the arrays' sizes, and a page index outside [0, P) makes its positions invisible.
            Keys and values that no query sees may be NaN. Softmax and sums are in float32, quantised rows as in
            `sparse_mla_prefill`.

        Raises:
            InvalidInput, TypeError, Unsupported: as `ragged_paged_attention`. A schedule made for other lengths is
                refused only under `validate="full"`.

        The operation is FlashMLA's `flash_mla_with_kvcache` made general (any heads, pages, formats, top-k); the
        function of that name in `compat.flash_mla` has FlashMLA's conventions (lse +inf for a query that sees no key).
        """
        arguments = dict(
            q=q, kv_cache=kv_cache, page_indices=page_indices, kv_lens=kv_lens, indices=indices, d_v=d_v,
            sm_scale=sm_scale, causal=causal, sliding_window=sliding_window, soft_cap=soft_cap, sinks=sinks,
            topk_lens=topk_lens, extra_kv_cache=extra_kv_cache, extra_indices=extra_indices,
            extra_topk_lens=extra_topk_lens, schedule=schedule, cache_format=cache_format, cache_layout=cache_layout,
            out_dtype=out_dtype,
        )  # fmt: skip
        return self.run(MlaDecode, arguments, backend, options, out)

    def make_decode_schedule(
        self,
        kv_lens: Array | None,
        batch_size: int,
        num_q_tokens: int,
        num_q_heads: int,
        num_kv_heads: int = 1,
        *,
        topk: int | None = None,
        topk_lens: Array | None = None,
        extra_topk: int | None = None,
        extra_topk_lens: Array | None = None,
        num_parts: int | None = None,
        overhead: int = 5,
        device: Any = None,
        backend: str | Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> DecodeSchedule:
        """Divide the work of one decode step among programs, once for all layers; the result goes to `mla_decode`.

        The sequences' keys, in blocks of 64, are laid end to end and cut into `num_parts` ranges of about equal cost; a
        sequence that straddles a cut is computed in several splits. The operation runs on the device and reads nothing
        back, and the shapes of its results depend only on the batch size and `num_parts`, so it can be captured in a
        CUDA graph.

        Args:
            kv_lens: i32 [S], the lengths of a dense call; None for a sparse call.
            batch_size, num_q_tokens, num_q_heads, num_kv_heads: S, Q, H and K of the `mla_decode` call.
            topk: the number of entries in each list of a sparse call; None for a dense call.
            topk_lens: i32 [S] or [S, Q], as in `mla_decode`; only with `topk`.
            extra_topk, extra_topk_lens: `topk` and `topk_lens` of the second cache.
            num_parts: the number of ranges; the default fills the device with blocks of 64 query rows.
            device: torch only: the device of the schedule if `topk` is given without `topk_lens`.
            overhead: the cost of starting a sequence, counted in blocks.
            backend, options: as in `ragged_paged_attention`.

        Returns:
            A `DecodeSchedule`.

        Raises:
            InvalidInput, TypeError, Unsupported: as `ragged_paged_attention`.

        The algorithm and the order of the fields of `parts` are those of FlashMLA's `get_mla_metadata` of September
        2025.
        """
        arguments = dict(
            kv_lens=kv_lens, batch_size=batch_size, num_q_tokens=num_q_tokens, num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads, topk=topk, topk_lens=topk_lens, extra_topk=extra_topk,
            extra_topk_lens=extra_topk_lens, num_parts=num_parts, overhead=overhead, device=device,
        )  # fmt: skip
        prepared = self.prepare(MakeDecodeSchedule, arguments)
        return schedule_for(arguments, prepared, self.run_prepared(MakeDecodeSchedule, prepared, backend, options))

    def quantize_mla_cache(
        self,
        kv: Array,
        format: str,
        power_of_two_scales: bool = True,
        *,
        cache_layout: str | None = None,
        backend: str | Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Array:
        """Quantise a latent cache: values of 8 or 4 bits with one scale per group of columns.

        Args:
            kv: [P, G, 1, d_qk] bfloat16, float16 or float32; d_qk is 576 for `fp8_v32` and 512 for the other formats.
            format: `fp8_v32` (656 bytes per token) or `fp8_v4` (584 bytes), whose last 64 columns, the rotary ones,
                stay in bfloat16; `fp8_v41` (528 bytes) or `fp4_v41` (288 bytes), which quantise every column.
                `CacheFormat` describes the bytes.
            power_of_two_scales: round scales up to a power of two; `fp8_v4` and `fp8_v41` can store no other scales.
                The scales of `fp4_v41` are always e4m3.
            cache_layout: as in `mla_decode`.
            backend, options: as in `ragged_paged_attention`.

        Returns:
            uint8 [P, G, 1, bytes]. The scale of a group is its largest magnitude over 448, in float32, at least 1e-4;
            each value is divided by the scale in float32 and rounded to the nearest e4m3, ties to even. Every backend
            makes the same bytes. NaN becomes 0x7F. A group that holds NaN or an infinity has the scale NaN or infinity;
            `fp8_v4` and `fp8_v41` store both as 0xFF, which is NaN. In `fp4_v41`, the scale is the largest magnitude
            over 6, clamped to the range from 2 ** -9 to 448 and rounded to the nearest e4m3; values are rounded to the
            nearest e2m1, at most 6; and a group that holds NaN has the scale NaN and values 0.

        Raises:
            InvalidInput, TypeError, Unsupported: as `ragged_paged_attention`.
        """
        arguments = dict(kv=kv, format=format, power_of_two_scales=power_of_two_scales, cache_layout=cache_layout)
        return self.run(QuantizeMlaCache, arguments, backend, options)

    def dequantize_mla_cache(
        self,
        cache: Array,
        format: str | None = None,
        dtype: Any = "bfloat16",
        *,
        cache_layout: str | None = None,
        backend: str | Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Array:
        """The rows that a quantised latent cache holds.

        Args:
            cache: bytes (uint8, int8 or float8_e4m3fn) [P, G, 1, 656, 584, 528 or 288].
            format: `fp8_v32`, `fp8_v4`, `fp8_v41` or `fp4_v41`; by default, the last dimension decides.
            dtype: the dtype of the result, "bfloat16", "float16" or "float32", or the framework's dtype of that name.
            cache_layout: as in `mla_decode`.
            backend, options: as in `ragged_paged_attention`.

        Returns:
            [P, G, 1, d_qk] of `dtype`: value times scale in float32, then rounded once.

        Raises:
            InvalidInput, TypeError, Unsupported: as `ragged_paged_attention`.
        """
        arguments = dict(cache=cache, format=format, dtype=dtype, cache_layout=cache_layout)
        return self.run(DequantizeMlaCache, arguments, backend, options)

    def write_mla_cache(
        self,
        kv: Array,
        cache: Array,
        slot_mapping: Array | tuple[Array, Array, Array] | None = None,
        *,
        page_indices: Array | None = None,
        kv_lens: Array | None = None,
        cu_q_lens: Array | None = None,
        num_seqs: int | Array | None = None,
        kv_scale: float | Array | None = None,
        rope_scale: float | Array | None = None,
        d_v: int | None = None,
        power_of_two_scales: bool = True,
        cache_format: str | None = None,
        cache_layout: str | None = None,
        backend: str | Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Array:
        """Write this step's latent rows into a paged cache; a quantised cache gets the bytes of `quantize_mla_cache`.

        Args:
            kv: [T, K, d_qk], or [T, d_qk] for one KV head; float32, float16 or bfloat16.
            cache: as `ragged_mla_attention` takes it: plain, of kv's dtype or 8-bit, or quantised.
            slot_mapping, page_indices, kv_lens, cu_q_lens, num_seqs: as in `write_kv_pages`.
            kv_scale: the scale of a plain cache, a float or an array [] or [K]. The stored value is `kv / kv_scale`,
                computed in float32, rounded to nearest even and, in an 8-bit cache, saturated at the format's largest
                finite value. The default is 1, also for 8-bit floats; an int8 cache needs a scale. Scales below the
                smallest normal float32 are treated as in `write_kv_pages`.
            rope_scale, d_v: the scale of a plain cache's rotary columns, which follow the first `d_v`, in the forms of
                `kv_scale`, which is its default. `d_v` is given with `rope_scale` only.
            power_of_two_scales: as in `quantize_mla_cache`. The default is True, because `fp8_v4` and `fp8_v41` can
                store no other scales. In `write_indexer_cache`, whose scales are float32, `power_of_two` is False by
                default.
            cache_format, cache_layout: as in `mla_decode`.
            backend, options: as in `ragged_paged_attention`.

        Returns:
            The cache, as `write_kv_pages` returns the pages. kv may be a view of the cache: it is read before the
            write.

        Raises:
            InvalidInput, TypeError, Unsupported: as `ragged_paged_attention`; slots out of range, except -1, are
                refused only under `validate="full"`.
        """
        arguments = dict(
            kv=kv, cache=cache, slot_mapping=slot_mapping, page_indices=page_indices, kv_lens=kv_lens,
            cu_q_lens=cu_q_lens, num_seqs=num_seqs, kv_scale=kv_scale, rope_scale=rope_scale, d_v=d_v,
            power_of_two_scales=power_of_two_scales, cache_format=cache_format, cache_layout=cache_layout,
        )  # fmt: skip
        return self.write(WriteMlaCache, arguments, backend, options)

    def page_indices_to_slots(
        self,
        positions: Array,
        page_indices: Array,
        page_size: int,
        *,
        cu_q_lens: Array | None = None,
        num_seqs: int | Array | None = None,
        backend: str | Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Array:
        """Convert positions in sequences, which an indexer selects, to slots of the cache for sparse attention.

        Args:
            positions: i32 [S, ...], positions in each sequence, such as [S, Q, N] for Q queries per sequence. With
                `cu_q_lens` it is [T, ...], positions for each row of a ragged batch, such as [T, N] from
                `indexer_topk`. -1 stands for no position.
            page_indices: i32 [S, M], the block table.
            page_size: G, the number of positions per page.
            cu_q_lens, num_seqs: as in `ragged_paged_attention`: the rows of each sequence, and the number of live
                sequences.
            backend, options: as in `ragged_paged_attention`.

        Returns:
            i32 of the shape of `positions`: `page_indices[s, position // G] * G + position % G` for a position in
            sequence s; -1 for a position outside [0, M * G), for a negative page index, for a slot beyond int32, and
            for a row of no live sequence.

        Raises:
            InvalidInput, TypeError, Unsupported: as `ragged_paged_attention`; the values in `cu_q_lens` and `num_seqs`
                are checked only under `validate="full"`.
        """
        arguments = dict(
            positions=positions, page_indices=page_indices, page_size=page_size, cu_q_lens=cu_q_lens, num_seqs=num_seqs
        )
        return self.run(PageIndicesToSlots, arguments, backend, options)
