"""Attention over a paged KV cache, writing it, and merging partial results."""

from collections.abc import Mapping, Sequence
from typing import Any, Generic, Literal, TypedDict, Unpack, overload

from ragged_attention.calls import MergeAttentionStates, RaggedPagedAttention, WriteKvPages
from ragged_attention.operations.base import Array, AttentionKeywords, FrontEnd, Memory, Pages


class PagedKeywords(AttentionKeywords[Array, Memory], total=False):
    """The keyword arguments of `ragged_paged_attention` that do not change the number of its results."""

    alibi_slopes: Array | None
    relative_bias: Array | None
    q_scale: float | Array | None
    k_scale: float | Array | None
    v_scale: float | Array | None
    k_scale_pages: Array | None
    v_scale_pages: Array | None
    draft_mask: Array | None
    key_ranges: Array | None
    selected: Array | None
    block_size: int | None
    out_dtype: Any


class WriteKeywords(TypedDict, Generic[Array], total=False):
    """The keyword arguments of `write_kv_pages` that do not change the number of its results."""

    page_indices: Array | None
    kv_lens: Array | None
    cu_q_lens: Array | None
    num_seqs: int | Array | None
    k_scale: float | Array | None
    v_scale: float | Array | None
    backend: str | Sequence[str] | None
    options: Mapping[str, Any] | None


class Paged(FrontEnd[Array, Memory]):
    """Attention over a paged KV cache, the write of the cache, and the merge of partial results."""

    @overload
    def ragged_paged_attention(
        self, q: Array, kv_pages: Pages[Array], kv_lens: Array, page_indices: Array, cu_q_lens: Array,
        num_seqs: int | Array | None = None, *, return_lse: Literal[False] = False,
        return_max_logits: Literal[False] = False, new_kv: None = None,
        **keywords: Unpack[PagedKeywords[Array, Memory]],
    ) -> Array: ...  # fmt: skip
    @overload
    def ragged_paged_attention(
        self, q: Array, kv_pages: Pages[Array], kv_lens: Array, page_indices: Array, cu_q_lens: Array,
        num_seqs: int | Array | None = None, *, return_lse: Literal[True],
        return_max_logits: Literal[False] = False, new_kv: None = None,
        **keywords: Unpack[PagedKeywords[Array, Memory]],
    ) -> tuple[Array, Array]: ...  # fmt: skip
    @overload
    def ragged_paged_attention(
        self, q: Array, kv_pages: Pages[Array], kv_lens: Array, page_indices: Array, cu_q_lens: Array,
        num_seqs: int | Array | None = None, *, return_lse: Literal[False] = False,
        return_max_logits: Literal[False] = False, new_kv: tuple[Array, Array],
        **keywords: Unpack[PagedKeywords[Array, Memory]],
    ) -> tuple[Array, Pages[Array]]: ...  # fmt: skip
    @overload
    def ragged_paged_attention(
        self, q: Array, kv_pages: Pages[Array], kv_lens: Array, page_indices: Array, cu_q_lens: Array,
        num_seqs: int | Array | None = None, *, return_lse: Literal[True],
        return_max_logits: Literal[False] = False, new_kv: tuple[Array, Array],
        **keywords: Unpack[PagedKeywords[Array, Memory]],
    ) -> tuple[Array, Array, Pages[Array]]: ...  # fmt: skip
    @overload
    def ragged_paged_attention(
        self, q: Array, kv_pages: Pages[Array], kv_lens: Array, page_indices: Array, cu_q_lens: Array,
        num_seqs: int | Array | None = None, *, return_lse: bool = False, return_max_logits: Literal[True],
        new_kv: None = None, **keywords: Unpack[PagedKeywords[Array, Memory]],
    ) -> tuple[Array, ...]: ...  # fmt: skip
    @overload
    def ragged_paged_attention(
        self, q: Array, kv_pages: Pages[Array], kv_lens: Array, page_indices: Array, cu_q_lens: Array,
        num_seqs: int | Array | None = None, *, return_lse: bool = False, return_max_logits: Literal[True],
        new_kv: tuple[Array, Array], **keywords: Unpack[PagedKeywords[Array, Memory]],
    ) -> tuple[Pages[Array], ...]: ...  # fmt: skip
    def ragged_paged_attention(
        self,
        q: Array,
        kv_pages: Pages[Array],
        kv_lens: Array,
        page_indices: Array,
        cu_q_lens: Array,
        num_seqs: int | Array | None = None,
        *,
        max_q_len: int | None = None,
        sm_scale: float | None = None,
        causal: bool = True,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: Array | None = None,
        alibi_slopes: Array | None = None,
        relative_bias: Array | None = None,
        q_scale: float | Array | None = None,
        k_scale: float | Array | None = None,
        v_scale: float | Array | None = None,
        k_scale_pages: Array | None = None,
        v_scale_pages: Array | None = None,
        return_lse: bool = False,
        return_max_logits: bool = False,
        new_kv: tuple[Array, Array] | None = None,
        draft_mask: Array | None = None,
        key_ranges: Array | None = None,
        selected: Array | None = None,
        block_size: int | None = None,
        out_dtype: Any = None,
        out: Memory | None = None,
        backend: str | Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Array | tuple[Pages[Array], ...]:
        """Attention of ragged queries over a paged KV cache: prefill, chunked prefill, decode and any mix of them.

        Shapes in letters: T query tokens, H query heads, D head size, P pages of G positions, K KV heads (K divides H),
        S sequences, at most M pages per sequence.

        Args:
            q: [T, H, D] float32, float16 or bfloat16; the queries of all sequences, one after another. Rows from
                `cu_q_lens[num_seqs]` on are padding. D is a multiple of 8 from 16 to 512. float8_e4m3fn queries need
                `q_scale`; they are widened to the dtype of `kv_pages`, or to bfloat16 if the pages are 8-bit, and "q's
                dtype" below means that wider dtype.
            kv_pages: the cache, [P, G, 2K, D] with K of head h at 2h and V at 2h + 1, or a pair `(k_pages, v_pages)` of
                [P, G, K, D] and [P, G, K, D_v]. Its dtype is that of `q`, float8_e4m3fn, float8_e5m2, float8_e4m3fnuz,
                int8 or uint8. An element of uint8 holds two 4-bit codes, the even column in the low half, so a row has
                D / 2 elements; uint8 pages need scale pages. The arrays of a pair may have different formats. In torch
                any strides are accepted if the last one is 1. Sequences may share pages.
            kv_lens: i32 [S], the number of positions of each sequence in the cache, including this step's.
            page_indices: i32 [S, M], the block table: entry p of a row is the page that holds the G positions from p *
                G on. Entries past the last used page are never read as pages.
            cu_q_lens: i32 [S + 1], prefix sums of the query lengths; entries past `num_seqs` are never read.
            num_seqs: the number of live sequences: an int, or an i32 array of one element (which stays on its device);
                None means S.
            max_q_len: an upper bound on the queries per sequence, known to the host. It is a hint for the selection of
                kernels: with 1, a batch that only decodes needs one launch less. Results do not depend on it.
            sm_scale: factor on q . k; default `D ** -0.5`.
            causal: whether a query sees only the positions up to its own, instead of all `kv_len` positions. Query i of
                a sequence is at position `kv_len - q_len + i`.
            sliding_window: a query at position p sees only positions > p - sliding_window (with 1, only p). With
                `causal=False` this bounds the left side only.
            soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`, after scaling and before masking.
            sinks: f32 [H], one logit per head, which is added to the denominator of the softmax only. Sinks of other
                dtypes are refused: convert a model's parameters once, as by `sinks.float()`, not in every call.
            alibi_slopes: f32 [H], finite: the logit of the query at position p and the key at position j gains
                `alibi_slopes[h] * (j - p)`, after scaling and `soft_cap`, before masking. Positions are those of
                `causal`, for drafts too. vLLM's kernels add `alibi_slopes[h] * (j - s)` instead, where s is the
                position of the sequence's first new token. Without sinks `out` is the same, but vLLM's lse of query i
                is higher by `alibi_slopes[h] * i`.
            relative_bias: f32 [H, B] or, with a table for each query, [T, H, B]: a bias by distance, which is added
                like that of `alibi_slopes`, after `soft_cap` and before masking. The query at position p and the key at
                position j use column `clamp(p - j + o, 0, B - 1)`, where o is 0 if causal, but `B // 2` with
                `causal=False` or with `key_ranges`. The first and the last column thus also serve all distances beyond
                theirs.
            q_scale: the scale of float8_e4m3fn queries, whose true values are q * q_scale: a float, or an array [] or
                [H]. A float is multiplied into `sm_scale`; an array multiplies the widened queries, which are then
                rounded again.
            k_scale, v_scale: the scales of cached keys and values, whose true values are the stored values times the
                scale: a float, or an array [] or [K]. `new_kv` is written with these scales, as by `write_kv_pages`. An
                array of three or more axes is taken as scale pages. Without scales, float pages, also those of 8-bit
                floats, have a scale of 1. int8 pages of K or V need a scale or scale pages.
            k_scale_pages, v_scale_pages: the scales that are stored with the rows of K and V, n of them for each
                position and KV head: [P, G, K, n], or [P, G, K] if n is 1. In torch any strides are accepted, so they
                may be views into the pages. Dtypes and n determine the format:

                - int8 or 8-bit float pages, float32, n = 1: value = code * scale, with a scale for each
                  token and head.
                - uint8 pages (4-bit codes from 0 to 15), float32, n = 1: value = (code - zero) * scale. The lowest 4
                  bits of the float are `zero`; the float with those bits cleared is `scale`, as in vLLM's
                  `int4_per_token_head`.
                - uint8 pages (4-bit codes from 0 to 15), float32 or float16, n = 2: `scale`, then `zero`.
                - uint8 pages (e2m1 codes), float8_e4m3fn, n = D / 16: nvfp4, whose scale per tensor is `k_scale` or
                  `v_scale`.
                - float8_e4m3fn pages, float8_e8m0fnu, n = D / 32: mxfp8.
                - uint8 pages (e2m1 codes), float8_e8m0fnu, n = D / 32: mxfp4.

                Results do not depend on scales of positions that no query sees, whatever they hold. A query that sees a
                NaN scale has NaN in its result, at least in the columns of the scale's block. An infinite scale makes
                the results of queries that see it infinite or NaN, or makes its key's weight 0; backends differ there.
                Neither affects other queries.
            return_lse: also return the log-sum-exp.
            return_max_logits: also return the largest logit of each query head in the whole call, by which QK-clip of
                MuonClip (Kimi K2, 2025) rescales the weights that project queries and keys.
            new_kv: this step's keys and values, a pair of [T, K, D] and [T, K, D_v] of q's dtype, or of the pages'
                8-bit dtype, one row per query. They are written into the pages before attention, as `write_kv_pages`
                writes them with `page_indices`, `kv_lens` and `cu_q_lens`. A backend may fuse the write and the
                attention.
            draft_mask: bool [T, W], for tree speculative decoding: entry [t, j] says whether query t sees its
                sequence's new token at position `kv_len - q_len + j`. It replaces `causal` among the new tokens.
                Earlier positions are visible as usual, and new tokens with j >= W are hidden. `sliding_window` applies
                as well.
            key_ranges: i32 [T, R, 2], R from 1 to 8: each query sees the union of R ranges [begin, end) of positions of
                its sequence, which may be before or after its own. A key in two ranges counts once. The ranges replace
                `causal`, `sliding_window` and `draft_mask`, which must be left at their defaults. Any int32 is safe: a
                begin below 0 counts as 0, an end beyond `kv_len` as `kv_len`, and a range whose begin is not below its
                end is empty. Rows of padding are not read. The module `ragged_attention.key_ranges` makes ranges for
                chunks, image spans, blocks, prefixes and trees.
            selected: i32 [T, K, N], or [T, 1, N] for all KV heads: sparse attention to blocks of keys. An entry b in a
                query's list for a KV head names the positions [b * block_size, (b + 1) * block_size) of the query's
                sequence. The query heads of that KV head see only named positions, and only those that `causal`,
                `sliding_window`, `draft_mask` or `key_ranges` also allow. A list may be in any order, and a block that
                is named twice counts once. Any int32 is safe: an entry without a position in the sequence names
                nothing, such as -1, which may pad a list anywhere. Rows of padding are not read, nor are keys that no
                query sees. N may be 0.
            block_size: the number of positions in a block, a power of two from 1 to 256, whatever the page size; given
                with `selected` only.
            out_dtype: the dtype of `out`: "float32", "float16", "bfloat16", or the framework's dtype of that name;
                default q's dtype. Partial results that `merge_attention_states` will merge are best kept in float32.
            out: torch only: a tensor to which the result is written, and which is then returned. It has the result's
                shape and dtype and any strides. Its old content is not read. `triton`, `cuda` and `numba` write to it
                directly if it is packed, begins at a multiple of 16 bytes and shares no storage with the arguments;
                otherwise the result is copied to it. A call with `out` has no gradient.
            backend: the backend of this call: a name, or a list of names in order of preference; see
                `ragged_attention.config`.
            options: the tunables of this call, which are fields of the selected backend's `Tile`.

        Returns:
            One array, or a tuple of the requested results in this order: out [T, H, D_v]; with `return_lse` lse [T, H]
            float32, the natural log-sum-exp of the visible logits, sinks not counted; with `return_max_logits`
            max_logits [H] float32; with `new_kv` the pages, as `write_kv_pages` returns them (in torch the given
            tensors, written in place, and in jax new arrays), and after them `k_scale_pages` and `v_scale_pages` if
            there are scale pages. A query that sees no key, and a padding row, gets out 0 and lse -inf. No index value
            makes a kernel read outside the arrays: lengths are clamped to the arrays' sizes, and a page index outside
            [0, P) makes its positions invisible. Softmax and sums are in float32.

            max_logits has, for each query head, the largest `sm_scale * q . k` over all queries of the call and the
            keys that they see, with `q_scale` and the scales of the keys applied, before `soft_cap` and biases, and
            without sinks. It is -inf if no query sees a key. It is NaN if the logit of a visible key is NaN, but may be
            infinite if the same query also has an infinite logit.

        Raises:
            InvalidInput: (a ValueError) shapes, dtypes or options that contradict the above; values of the index arrays
                are checked only under `validate="full"`.
            TypeError: a value of the wrong kind.
            Unsupported: no requested backend takes the call; the message gives each backend's reason.

        The operation is JAX's `ragged_paged_attention` with the sinks of ejKernel's version. The online softmax follows
        Milakov and Gimelshein (2018) and FlashAttention, and the KV splits follow Flash-Decoding.
        """
        arguments = dict(
            q=q, kv_pages=kv_pages, kv_lens=kv_lens, page_indices=page_indices, cu_q_lens=cu_q_lens, num_seqs=num_seqs,
            max_q_len=max_q_len, sm_scale=sm_scale, causal=causal, sliding_window=sliding_window, soft_cap=soft_cap,
            sinks=sinks, alibi_slopes=alibi_slopes, relative_bias=relative_bias, q_scale=q_scale, k_scale=k_scale,
            v_scale=v_scale, k_scale_pages=k_scale_pages, v_scale_pages=v_scale_pages, return_lse=return_lse,
            return_max_logits=return_max_logits, new_kv=new_kv, draft_mask=draft_mask, key_ranges=key_ranges,
            selected=selected, block_size=block_size, out_dtype=out_dtype,
        )  # fmt: skip
        if new_kv is not None:
            return self.run_with_write(RaggedPagedAttention, arguments, backend, options, out)
        results = self.run(RaggedPagedAttention, arguments, backend, options, out)
        results = results[: 1 + return_lse + return_max_logits]  # with `out`, torch returns empty tensors for the rest
        return tuple(results) if len(results) > 1 else results[0]

    @overload
    def write_kv_pages(
        self, k: Array, v: Array, kv_pages: Pages[Array],
        slot_mapping: Array | tuple[Array, Array, Array] | None = None, *,
        k_scale_pages: None = None, v_scale_pages: None = None, **keywords: Unpack[WriteKeywords[Array]],
    ) -> Pages[Array]: ...  # fmt: skip
    @overload
    def write_kv_pages(
        self, k: Array, v: Array, kv_pages: Pages[Array],
        slot_mapping: Array | tuple[Array, Array, Array] | None = None, *,
        k_scale_pages: Array, v_scale_pages: Array | None = None, **keywords: Unpack[WriteKeywords[Array]],
    ) -> tuple[Pages[Array], Array | None, Array | None]: ...  # fmt: skip
    @overload
    def write_kv_pages(
        self, k: Array, v: Array, kv_pages: Pages[Array],
        slot_mapping: Array | tuple[Array, Array, Array] | None = None, *,
        k_scale_pages: None = None, v_scale_pages: Array, **keywords: Unpack[WriteKeywords[Array]],
    ) -> tuple[Pages[Array], Array | None, Array | None]: ...  # fmt: skip
    def write_kv_pages(
        self,
        k: Array,
        v: Array,
        kv_pages: Pages[Array],
        slot_mapping: Array | tuple[Array, Array, Array] | None = None,
        *,
        page_indices: Array | None = None,
        kv_lens: Array | None = None,
        cu_q_lens: Array | None = None,
        num_seqs: int | Array | None = None,
        k_scale: float | Array | None = None,
        v_scale: float | Array | None = None,
        k_scale_pages: Array | None = None,
        v_scale_pages: Array | None = None,
        backend: str | Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        """Write this step's K and V into the pages of the cache, quantised if the pages have 8-bit or 4-bit codes.

        Letters as in `ragged_paged_attention`.

        Args:
            k, v: [T, K, D] and [T, K, D_v], float32, float16 or bfloat16; or of the pages' 8-bit dtype: then they are
                copied, because they are scaled already.
            kv_pages: combined pages or a pair, as `ragged_paged_attention` takes them.
            slot_mapping: i32 or i64 [T], the slot `page * G + offset` of each token; -1, and anything else outside [0,
                P * G), is skipped. In jax, NumPy arrays of i64 are accepted without `jax_enable_x64` too, but not as
                arguments of the caller's own `jax.jit`, which truncates them to int32 before this function sees them. A
                tuple `(page_indices, kv_lens, cu_q_lens)` stands for those three arguments.
            page_indices, kv_lens, cu_q_lens, num_seqs: those of the attention call, instead of slots: token i of a
                sequence goes to position `kv_len - q_len + i`. Tokens whose page index is outside [0, P) are skipped,
                and so are padding tokens, which follow the last live sequence. Table entries past `num_seqs` may have
                any value.
            k_scale, v_scale: the stored value is `k / k_scale`, computed in float32, rounded to nearest even and
                saturated at the format's largest finite value. A scale is a float whose magnitude is at least the
                smallest normal float32, or an array [] or [K]. In an array, a number of smaller magnitude counts as 0
                with its sign. The quotient then saturates, or is infinite in 16-bit and 32-bit pages, or is NaN if k is
                0 as well. int8 pages store NaN as 0, and float8_e4m3fnuz pages store -0 as 0. On devices that flush
                subnormal numbers, as XLA does, subnormal numbers in k and v count as 0 too. The default is 1, except
                for int8 pages, which need a scale or scale pages unless k and v are int8 too.
            k_scale_pages, v_scale_pages: the scale pages that attention reads; they are written too. Each row, or each
                block of a row's columns, gets its own scale. All steps are in float32. x is a row divided by `k_scale`,
                and `amax` is the largest magnitude in x, or in its block if each block has a scale:

                - One scale per token and head: scale = max(amax / d, 1e-6), where d is 127 for int8, 448 for
                  float8_e4m3fn, 57344 for float8_e5m2, and 224 for float8_e4m3fnuz. The code is x * (1 / scale),
                  clamped; int8 rounds half away from zero, as vLLM does.
                - 4-bit codes from 0 to 15: scale = max((max(x) - min(x)) / 15, 1e-6). With `zero` in the bits of the
                  scale, zero is -min(x) / scale and the code is x * (1 / scale) + zero; zero and code are rounded half
                  away from zero and clamped to 0 to 15, as in vLLM. For a stored zero, the scale is also at least amax
                  / 32768, zero is not rounded, and codes are rounded to even.
                - nvfp4: scale = amax / (6 * k_scale), rounded to e4m3, where `amax` is that of the row before its
                  division by `k_scale`. The code is k * (1 / (scale * k_scale)), or 0 if the scale is 0, as in
                  FlashInfer.
                - mxfp8: the scale is the least power of two from 2^-127 to 2^127 that is at least amax / 448. The code
                  is x / scale.
                - mxfp4: the scale is 2^(e - 2), from 2^-127 to 2^127, where 2^e is the largest power of two up to amax,
                  or the next larger power if amax is at least 1.75 times this one. If 2^e is 2^128, the scale is 2^127,
                  as in vLLM. The code is x / scale.

                Unless stated otherwise above, codes are rounded to nearest even and saturate. e2m1 codes of zero keep
                the sign of x. A row whose values all have one sign may lose much precision with a zero point that is
                limited to 0 to 15, as in vLLM.

                A NaN makes the scale of its row or block NaN, and the codes 0. An infinity in a row with one scale
                makes the codes 0 and the scale infinite; the scale of a row of 4-bit codes is NaN if all its values are
                this infinity. A query that sees the row gets NaN. An infinity in a block makes the scale the largest
                finite one, and is stored as the largest code of its sign. k and v of the pages' dtype are not accepted
                with scale pages.
            backend, options: as in `ragged_paged_attention`.

        Returns:
            The pages. In torch the given tensors are written in place and returned; in jax the pages are new arrays,
            which reuse the memory of the given arrays if those are donated. Only the tokens' slots change. If two
            tokens have the same slot, either token may remain. k and v may be views of the pages: they are read before
            the write. The written tensors may be interleaved views of one tensor, but no two of them may share a byte.
            With scale pages the result is the tuple `(kv_pages, k_scale_pages, v_scale_pages)`, with None for absent
            scale pages.

            A write has no gradient; asking for one raises RuntimeError.

        Raises:
            InvalidInput, TypeError, Unsupported: as `ragged_paged_attention`.
        """
        arguments = dict(
            k=k, v=v, kv_pages=kv_pages, slot_mapping=slot_mapping, page_indices=page_indices, kv_lens=kv_lens,
            cu_q_lens=cu_q_lens, num_seqs=num_seqs, k_scale=k_scale, v_scale=v_scale, k_scale_pages=k_scale_pages,
            v_scale_pages=v_scale_pages,
        )  # fmt: skip
        return self.write(WriteKvPages, arguments, backend, options)

    def merge_attention_states(
        self,
        outs: Array | Sequence[Array],
        lses: Array | Sequence[Array],
        *,
        sinks: Array | None = None,
        out_dtype: Any = None,
        out: Memory | None = None,
        backend: str | Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[Array, Array]:
        """Merge partial attention results over disjoint ranges of keys: split KV, shared prefixes, context parallel.

        Args:
            outs: [N, T, H, D_v] float32, float16 or bfloat16, or a sequence of N arrays [T, H, D_v].
            lses: f32 [N, T, H], natural log-sum-exps as `ragged_paged_attention` returns them, or N arrays [T, H].
            sinks: f32 [H], one logit per head, which is added to the denominator of the merged softmax only. Give them
                only if the partial results were computed without sinks.
            out_dtype: as in `ragged_paged_attention`; default the dtype of `outs`.
            out, backend, options: as in `ragged_paged_attention`.

        Returns:
            out [T, H, D_v], and lse [T, H] float32, the sinks not counted. A partial result whose lse is -inf has no
            weight, whatever its out holds. If all are -inf, out is 0 and lse -inf.

        Raises:
            InvalidInput, TypeError, Unsupported: as `ragged_paged_attention`.
        """
        arguments = dict(outs=outs, lses=lses, sinks=sinks, out_dtype=out_dtype)
        return self.run(MergeAttentionStates, arguments, backend, options, out)
