"""Block selection: which blocks of keys sparse attention over per-head (not latent) keys and values reads."""

from collections.abc import Mapping, Sequence
from typing import Any

from ragged_attention.calls import BlockScores, SelectBlocks, TopKBlocks
from ragged_attention.operations.base import Array, FrontEnd, Memory


class Blocks(FrontEnd[Array, Memory]):
    """The scores of blocks of keys, and the selection of blocks."""

    def block_scores(
        self,
        q: Array,
        keys: Array,
        *,
        block_size: int,
        key_scale: Array | None = None,
        starts: Array | None = None,
        stops: Array | None = None,
        max_keys: int | None = None,
        page_indices: Array | None = None,
        kv_lens: Array | None = None,
        cu_q_lens: Array | None = None,
        num_seqs: int | Array | None = None,
        backend: str | Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Array:
        """The score of each key block for each query token and index head, by which sparse attention selects blocks.

            scores[t, h, b] = max over s of q[t, h] . key[s, k] * key_scale[s, k]

        Here s runs over those positions `[b * block_size, (b + 1) * block_size)` of block b that the query sees, and k
        is the key head that serves index head h. Products are not scaled, because a positive factor on a query does not
        change the selection. Shapes in letters: T query tokens, H index heads, K heads of index keys, D head size, N
        packed keys, P pages of G positions, S sequences, at most M pages per sequence, B blocks.

        Args:
            q: [T, H, D] bfloat16, float16, float32, or float8_e4m3fn. D is a multiple of 16 up to 256.
            keys: paged [P, G, K, D] or packed [N, K, D], of q's dtype or float8_e4m3fn. H is a multiple of K, and head
                `h // (H / K)` of the keys serves index head h; K is 1 in MiniMax M3, whose index keys serve all heads.
                Or pages of bytes, uint8 [P, G, 1, D + 4], as `write_indexer_cache` fills them.
            block_size: the number of positions per block, a power of two from 1 to 256. Neither it nor the page size
                needs to divide the other.
            key_scale: f32 [P, G, K] or [N, K], a factor on each key's products; None is 1. Pages of bytes include their
                scales.
            starts, stops: i32 [T], query t sees the rows [starts[t], stops[t]) of packed keys; clamped to [0, N]. Block
                0 begins at `starts[t]`, so all queries of a sequence should have the sequence's first key there.
            max_keys: the number of packed keys, from `starts[t]` on, that a query may see; default N.
            page_indices, kv_lens, cu_q_lens, num_seqs: as in `ragged_paged_attention`: i32 [S, M], [S], [S + 1] and the
                number of live sequences. Query i of a sequence sees the positions `j < kv_len - q_len + i + 1`. A page
                index outside [0, P) makes its positions invisible.
            backend, options: as in `ragged_paged_attention`.

        Returns:
            f32 [T, H, B] with B = ceil(M * G / block_size) for pages, ceil(max_keys / block_size) for packed keys; -inf
            for blocks without a key that the query sees, and in rows of padding. Products and sums are in float32. A
            NaN among the products of a block makes its score NaN.

        Raises:
            InvalidInput, TypeError, Unsupported: as `ragged_paged_attention`.

        These are the scores of MiniMax M3's sparse attention (`block_size` 128), as transformers and FlashInfer
        (`msa_proxy_score`, which returns [H, B, T]) define them. There is no gradient.
        """
        arguments = dict(
            q=q, keys=keys, block_size=block_size, key_scale=key_scale, starts=starts, stops=stops, max_keys=max_keys,
            page_indices=page_indices, kv_lens=kv_lens, cu_q_lens=cu_q_lens, num_seqs=num_seqs,
        )  # fmt: skip
        return self.run(BlockScores, arguments, backend, options)

    def select_blocks(
        self,
        q: Array,
        keys: Array,
        top_k: int,
        *,
        block_size: int,
        key_scale: Array | None = None,
        starts: Array | None = None,
        stops: Array | None = None,
        max_keys: int | None = None,
        page_indices: Array | None = None,
        kv_lens: Array | None = None,
        cu_q_lens: Array | None = None,
        num_seqs: int | Array | None = None,
        init_blocks: int = 0,
        local_blocks: int = 0,
        backend: str | Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Array:
        """The blocks of keys with the largest `block_scores` of each query and index head.

        The result is that of `top_k_blocks(block_scores(...), ...)`. The scores of all tokens are never stored at once.

        Args:
            q, keys, block_size, key_scale, starts, stops, max_keys: as in `block_scores`, with its letters.
            page_indices, kv_lens, cu_q_lens, num_seqs: as in `block_scores`.
            top_k, init_blocks, local_blocks: as in `top_k_blocks`.
            backend, options: as in `ragged_paged_attention`.

        Returns:
            i32 [T, H, top_k], as `top_k_blocks` returns it.

        Raises:
            InvalidInput, TypeError, Unsupported: as `ragged_paged_attention`.
        """
        arguments = dict(
            q=q, keys=keys, top_k=top_k, block_size=block_size, key_scale=key_scale, starts=starts, stops=stops,
            max_keys=max_keys, page_indices=page_indices, kv_lens=kv_lens, cu_q_lens=cu_q_lens, num_seqs=num_seqs,
            init_blocks=init_blocks, local_blocks=local_blocks,
        )  # fmt: skip
        return self.run(SelectBlocks, arguments, backend, options)

    def top_k_blocks(
        self,
        scores: Array,
        top_k: int,
        *,
        init_blocks: int = 0,
        local_blocks: int = 0,
        backend: str | Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Array:
        """The blocks with the largest scores of each query and head, and the blocks that are always selected.

        Args:
            scores: f32 [T, H, B], such as those of `block_scores`; -inf for a block that the query does not see.
            top_k: the number of blocks to select, from 1 to 4096.
            init_blocks: the number of blocks from block 0 on that are always selected.
            local_blocks: the number of blocks, ending with the query's own block, that are always selected; with 1,
                only its own block. A query's own block is the last one whose score is not -inf.
            backend, options: as in `ragged_paged_attention`.

        Returns:
            i32 [T, H, top_k], in each row the blocks in ascending order, then -1. Blocks that are always selected count
            towards `top_k`, so they must be no more than `top_k`. If scores are equal, the block with the larger index,
            which has the newer keys, is selected. A block of score -inf is never selected. NaN counts as -inf, except
            in a block that is always selected. Whether a subnormal number counts as 0 depends on the device.

        Raises:
            InvalidInput, TypeError, Unsupported: as `ragged_paged_attention`.

        MiniMax M3 selects 16 blocks with `local_blocks=1`. Other implementations differ if scores are equal:
        transformers selects what `torch.topk` returns, and FlashInfer ignores the lowest bits of a score in
        comparisons. transformers and vLLM return the blocks unsorted, FlashInfer in ascending order.
        """
        arguments = dict(scores=scores, top_k=top_k, init_blocks=init_blocks, local_blocks=local_blocks)
        return self.run(TopKBlocks, arguments, backend, options)
