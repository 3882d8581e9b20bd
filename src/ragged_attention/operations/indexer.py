"""The lightning indexer of DeepSeek sparse attention, which selects the keys that latent attention reads."""

from collections.abc import Mapping, Sequence
from typing import Any

from ragged_attention.calls import (
    IndexerLogits,
    IndexerLogitsBackward,
    IndexerTopk,
    QuantizeIndexerKeys,
    TopKIndices,
    WriteIndexerCache,
)
from ragged_attention.operations.base import Array, FrontEnd, Memory


class Indexer(FrontEnd[Array, Memory]):
    """The lightning indexer, the selection of keys, and the cache of the indexer's keys."""

    def indexer_logits(
        self,
        q: Array,
        keys: Array,
        weights: Array,
        *,
        key_scale: Array | None = None,
        starts: Array | None = None,
        stops: Array | None = None,
        relative: bool = False,
        max_keys: int | None = None,
        page_indices: Array | None = None,
        kv_lens: Array | None = None,
        cu_q_lens: Array | None = None,
        num_seqs: int | Array | None = None,
        ratio: int = 1,
        indices: Array | None = None,
        backend: str | Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Array:
        """The score of each key for each query token, by which sparse attention selects its keys.

            logits[t, s] = (sum over h of weights[t, h] * relu(q[t, h] . key[s])) * key_scale[s]

        Shapes in letters: T query tokens, H heads of the indexer, D its head size, N packed keys, L listed keys per
        query, P pages of G positions, S sequences, at most M pages per sequence. Keys have one head. A call has exactly
        one of three forms: packed keys with a range for each query (`starts`, `stops`), packed keys with a list for
        each query (`indices`), or paged keys with the tables of `ragged_paged_attention`.

        Args:
            q: [T, H, D] bfloat16, float16, float32, or float8_e4m3fn, whose scales belong in `weights`. D is a multiple
                of 16 up to 256, H any number (64 heads of 128 in DeepSeek-V3.2).
            keys: packed [N, D]; or paged [P, G, D]; each of q's dtype, or float8_e4m3fn. Or pages of bytes, uint8
                [P, G, 1, D + 4], as `write_indexer_cache` fills them: a page holds the e4m3 values of its G keys, then
                their G float32 scales. Each page is contiguous; there may be gaps between pages.
            weights: f32 [T, H].
            key_scale: f32 [N] or [P, G], a factor on each key's logits; None is 1. Pages of bytes include their scales.
            starts, stops: i32 [T], query t sees the rows [starts[t], stops[t]) of packed keys; clamped to [0, N].
            relative: whether column j of row t is key `starts[t] + j` instead of key j.
            max_keys: the number of columns with `relative`; default N. Later keys are not seen.
            page_indices, kv_lens, cu_q_lens, num_seqs: as in `ragged_paged_attention`: i32 [S, M], [S], [S + 1] and the
                number of live sequences. Query i of a sequence sees the positions
                `j < (kv_len - q_len + i + 1) // ratio`. A page index outside [0, P) makes its positions invisible.
            ratio: the number of tokens that one row of a paged cache stands for, as in the compressed attention of
                DeepSeek-V4; `kv_lens` counts tokens.
            indices: i32 [T, L], the rows of packed keys that each query sees, in any order, as `indexer_topk` returns
                them: column j of row t is key `indices[t, j]`. An index outside [0, N), such as -1, is no key.
            backend: as in `ragged_paged_attention`. The gradient runs on it too if it offers
                `indexer_logits_backward`.
            options: as in `ragged_paged_attention`. The gradient uses the options that the configuration has for
                `indexer_logits_backward`.

        Returns:
            f32 [T, N] with ranges, [T, max_keys] with ranges and `relative`, [T, L] with lists, or [T, M * G] with
            pages; -inf for keys that a query does not see, and in rows of padding. Products and sums are in float32 (an
            e4m3 product on Hopper keeps fewer bits). A NaN key makes its logits NaN for the queries that see it, and
            changes no other logits.

            The logits are differentiable once, in reverse mode, with respect to q, keys and weights, if the keys are
            packed and of q's dtype, and this is bfloat16, float16 or float32. `indexer_logits_backward` has the
            formulas. There is no gradient with respect to `key_scale` or to keys in pages.

        Raises:
            InvalidInput, TypeError, Unsupported: as `ragged_paged_attention`.

        The score is that of DeepSeek-V3.2's technical report; ranges, `key_scale` and pages of bytes are DeepGEMM's.
        """
        arguments = dict(
            q=q, keys=keys, weights=weights, key_scale=key_scale, starts=starts, stops=stops, relative=relative,
            max_keys=max_keys, page_indices=page_indices, kv_lens=kv_lens, cu_q_lens=cu_q_lens, num_seqs=num_seqs,
            ratio=ratio, indices=indices,
        )  # fmt: skip
        return self.run(IndexerLogits, arguments, backend, options)

    def indexer_logits_backward(
        self,
        d_logits: Array,
        q: Array,
        keys: Array,
        weights: Array,
        *,
        key_scale: Array | None = None,
        starts: Array | None = None,
        stops: Array | None = None,
        relative: bool = False,
        max_keys: int | None = None,
        indices: Array | None = None,
        backend: str | Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[Array, Array, Array]:
        """The gradient of `indexer_logits` over packed keys, for automatic differentiation and other training loops.

        With product = q[t, h] . key[s], and g[t, s] = d_logits[t, s] * key_scale[s]:

            d_q[t, h] = sum over s of g[t, s] * weights[t, h] * (product > 0) * key[s]
            d_key[s] = sum over t and h of g[t, s] * weights[t, h] * (product > 0) * q[t, h]
            d_weights[t, h] = sum over s of g[t, s] * relu(product)

        Letters as in `indexer_logits`.

        Args:
            d_logits: f32 [T, columns], the gradient of a scalar with respect to the logits. It is ignored, and may be
                NaN, for keys that a query does not see, whose logits are -inf.
            q: [T, H, D] bfloat16, float16 or float32.
            keys: [N, D] of q's dtype.
            weights, key_scale, starts, stops, relative, max_keys, indices: the arguments of `indexer_logits`.
            backend, options: as in `ragged_paged_attention`.

        Returns:
            d_q and d_keys of the shapes and dtypes of q and keys, and d_weights f32 [T, H]. The derivative of relu at 0
            is 0. A query that sees no key, and a key that no query sees, get 0, even if they hold NaN. A key that a
            list names twice counts twice. Sums are in float32, in the same order in every run.

        Raises:
            InvalidInput, TypeError, Unsupported: as `ragged_paged_attention`.

        Training with sparse attention, as DeepSeek-V3.2's technical report describes it, needs logits and gradients at
        the selected keys alone (`indices`), and its dense warm-up at all keys.
        """
        arguments = dict(
            d_logits=d_logits, q=q, keys=keys, weights=weights, key_scale=key_scale, starts=starts, stops=stops,
            relative=relative, max_keys=max_keys, indices=indices,
        )  # fmt: skip
        return self.run(IndexerLogitsBackward, arguments, backend, options)

    def indexer_topk(
        self,
        q: Array,
        keys: Array,
        weights: Array,
        top_k: int,
        *,
        key_scale: Array | None = None,
        starts: Array | None = None,
        stops: Array | None = None,
        relative: bool = False,
        max_keys: int | None = None,
        page_indices: Array | None = None,
        kv_lens: Array | None = None,
        cu_q_lens: Array | None = None,
        num_seqs: int | Array | None = None,
        ratio: int = 1,
        candidate_blocks: Array | None = None,
        candidate_block_size: int | None = None,
        backend: str | Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Array:
        """For each query, the keys with the largest `indexer_logits`, to which sparse latent attention attends.

        Letters as in `indexer_logits`. No matrix of all logits is kept.

        Args:
            q, keys, weights, key_scale, starts, stops, relative, max_keys: as in `indexer_logits`.
            page_indices, kv_lens, cu_q_lens, num_seqs, ratio: as in `indexer_logits`.
            top_k: the number of keys to select, from 1 to 4096.
            candidate_blocks: i32 [T, B], the B blocks of positions from which each query selects, in any order: block b
                is the positions `[b * candidate_block_size, (b + 1) * candidate_block_size)`. A block that is listed
                twice counts once; -1, or any other number without positions, is skipped. With None all positions are
                candidates.
            candidate_block_size: the number of positions per block, with `candidate_blocks`.
            backend, options: as in `ragged_paged_attention`.

        Returns:
            i32 [T, top_k], in each row the positions of the largest logits in ascending order, then -1. A position is a
            column of `indexer_logits`: a position in the sequence (paged), a row of `keys` (packed), or a distance from
            the row's start (`relative`). If logits are equal, the larger position, which is the newer token, is
            selected. NaN counts as -inf, and -inf is never selected. `page_indices_to_slots` converts positions in
            pages to slots.

        Raises:
            InvalidInput, TypeError, Unsupported: as `ragged_paged_attention`.
        """
        arguments = dict(
            q=q, keys=keys, weights=weights, top_k=top_k, key_scale=key_scale, starts=starts, stops=stops,
            relative=relative, max_keys=max_keys, page_indices=page_indices, kv_lens=kv_lens, cu_q_lens=cu_q_lens,
            num_seqs=num_seqs, ratio=ratio, candidate_blocks=candidate_blocks,
            candidate_block_size=candidate_block_size,
        )  # fmt: skip
        return self.run(IndexerTopk, arguments, backend, options)

    def top_k_indices(
        self,
        logits: Array,
        top_k: int,
        starts: Array | None = None,
        stops: Array | None = None,
        *,
        backend: str | Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Array:
        """The columns of the largest logits of each row, by the rules of `indexer_topk`.

        Args:
            logits: f32 [T, N].
            top_k: the number of columns to select, from 1 to 4096.
            starts, stops: i32 [T], row t selects from the columns [starts[t], stops[t]), clamped to [0, N]; other
                columns are never read. The defaults are 0 and N.
            backend, options: as in `ragged_paged_attention`.

        Returns:
            i32 [T, top_k], in each row the columns in ascending order, then -1. If logits are equal, the larger column
            is selected. NaN counts as -inf, and -inf is never selected. Whether a subnormal number counts as 0 depends
            on the device.

        Raises:
            InvalidInput, TypeError, Unsupported: as `ragged_paged_attention`.
        """
        arguments = dict(logits=logits, top_k=top_k, starts=starts, stops=stops)
        return self.run(TopKIndices, arguments, backend, options)

    def quantize_indexer_keys(
        self,
        k: Array,
        power_of_two: bool = False,
        *,
        backend: str | Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[Array, Array]:
        """Quantise rows to e4m3 values with one scale per row: the arguments `keys` and `key_scale` of the indexer.

        Args:
            k: [N, D] bfloat16, float16 or float32; D a multiple of 16 up to 256.
            power_of_two: round scales up to a power of two; see `write_indexer_cache` for the default.
            backend, options: as in `ragged_paged_attention`.

        Returns:
            values float8_e4m3fn [N, D] and scale f32 [N]. A scale is the row's largest magnitude over 448, in float32,
            at least 1e-4; each value is divided by the scale in float32 and rounded to the nearest e4m3, ties to even.
            Every backend makes the same bytes. NaN becomes 0x7F, and the scale of a row that holds NaN or an infinity
            is NaN or infinity.

        Raises:
            InvalidInput, TypeError, Unsupported: as `ragged_paged_attention`.
        """
        arguments = dict(k=k, power_of_two=power_of_two)
        return self.run(QuantizeIndexerKeys, arguments, backend, options)

    def write_indexer_cache(
        self,
        k: Array,
        cache: Array,
        slot_mapping: Array | tuple[Array, Array, Array] | None = None,
        power_of_two: bool = False,
        *,
        page_indices: Array | None = None,
        kv_lens: Array | None = None,
        cu_q_lens: Array | None = None,
        num_seqs: int | Array | None = None,
        backend: str | Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Array:
        """Quantise this step's indexer keys, as `quantize_indexer_keys` does, and write them into the indexer's pages.

        Args:
            k: [T, D] bfloat16, float16 or float32; D a multiple of 16 up to 256.
            cache: uint8 [P, G, 1, D + 4]: a page holds the e4m3 values of its G keys, then their G float32 scales. Each
                page is contiguous; there may be gaps between pages. This is DeepGEMM's layout.
            slot_mapping, page_indices, kv_lens, cu_q_lens, num_seqs: as in `write_kv_pages`: slots, or the tables of
                the step, which `indexer_topk` takes too. Here, lengths count keys, one for each row of k. A cache with
                one key for `ratio` tokens therefore needs slots or its own tables: `kv_lens // ratio` as `kv_lens`, and
                as `cu_q_lens` the prefix sums of the new keys per sequence,
                `kv_lens // ratio - (kv_lens - q_lens) // ratio`.
            power_of_two: round scales up to a power of two. The pages store float32 scales, which need no rounding, so
                the default is False. In `write_mla_cache`, `power_of_two_scales` is True by default, because two
                formats of latents can store no other scales.
            backend, options: as in `ragged_paged_attention`.

        Returns:
            The cache, as `write_kv_pages` returns the pages. k may be a view of the cache: it is read before the write.

        Raises:
            InvalidInput, TypeError, Unsupported: as `ragged_paged_attention`; slots out of range, except -1, are
                refused only under `validate="full"`.
        """
        arguments = dict(
            k=k, cache=cache, slot_mapping=slot_mapping, power_of_two=power_of_two, page_indices=page_indices,
            kv_lens=kv_lens, cu_q_lens=cu_q_lens, num_seqs=num_seqs,
        )  # fmt: skip
        return self.write(WriteIndexerCache, arguments, backend, options)
