"""The fused step before attention: norms of heads, rotary embedding, and the write to the cache."""

from collections.abc import Mapping, Sequence
from typing import Any

from ragged_attention.calls import LatentNormRopeWrite, NormRopeWrite
from ragged_attention.operations.base import Array, FrontEnd, Memory, Pages


class NormRope(FrontEnd[Array, Memory]):
    """The operations that prepare queries and write this step's rows."""

    def norm_rope_write(
        self,
        q: Array,
        k: Array,
        v: Array,
        kv_pages: Pages[Array],
        slot_mapping: Array | tuple[Array, Array, Array] | None = None,
        *,
        positions: Array,
        cos_sin: Array | tuple[Array, Array],
        q_weight: Array | None = None,
        k_weight: Array | None = None,
        eps: float = 1e-6,
        interleaved: bool = False,
        page_indices: Array | None = None,
        kv_lens: Array | None = None,
        cu_q_lens: Array | None = None,
        num_seqs: int | Array | None = None,
        k_scale: float | Array | None = None,
        v_scale: float | Array | None = None,
        backend: str | Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[Array, Pages[Array]]:
        """Normalise and rotate this step's queries and keys, and write keys and values into the pages of the cache.

        This is one pass over q, k and v instead of three. For each token and head it computes

            x = x / sqrt(mean(x * x) + eps) * weight                        (if there is a weight)
            x[first], x[second] = x[first] * cos - x[second] * sin, x[second] * cos + x[first] * sin

        in float32, and rounds once, to the dtype of q. Here `first` and `second` are the columns of the rotated pairs,
        as `interleaved` says. Then keys and values are stored as `write_kv_pages` stores them, byte for byte. The
        embedding is that of RoFormer (Su et al., 2021); the norm is RMSNorm (Zhang and Sennrich, 2019) over one head,
        as Qwen3 and Gemma 3 have it. Letters as in `ragged_paged_attention`; N is the number of positions in the table,
        and R the number of rotary columns.

        Args:
            q: [T, H, D], float32, float16 or bfloat16. H and K are independent. q, k and v may be views of one tensor
                [T, (H + 2K) * D]: only their last stride must be 1, otherwise they are copied.
            k, v: [T, K, D] and [T, K, D_v], of the dtype of q.
            kv_pages: combined pages or a pair, as `ragged_paged_attention` takes them, of the dtype of q or 8-bit.
            slot_mapping: i32 or i64 [T], as in `write_kv_pages`: the slot of each token, or -1 for a token that is not
                written.
            positions: i32 or i64 [T], each token's row of the table (in jax, i64 needs `jax_enable_x64`). A position
                outside [0, N) is clamped to this range. Under `validate="full"` such a position is refused, unless its
                token is padding.
            cos_sin: the table, float32, float16 or bfloat16: [N, R] with R / 2 cosines before R / 2 sines, or a pair
                (cos, sin) of [N, R/2]. R is even and at most D. Only the first R columns of a head are rotated.
            q_weight, k_weight: [D], float32, float16 or bfloat16, the weights of the norms; None leaves out the norm.
                The norm multiplies by the weights as given: a model whose factor is 1 + weight, such as Gemma, passes
                that sum.
            eps: a float > 0, added to the mean of squares.
            interleaved: whether columns 2i and 2i + 1 form a pair (GPT-J), instead of columns i and i + R / 2 (Llama,
                GPT-NeoX).
            page_indices, kv_lens, cu_q_lens, num_seqs: those of the attention call, instead of slots, as in
                `write_kv_pages`.
            k_scale, v_scale: as in `write_kv_pages`.
            backend, options: as in `ragged_paged_attention`.

        Returns:
            `(q, pages)`: new queries [T, H, D] of the dtype of q, and the pages as `write_kv_pages` returns them. The
            queries of all T tokens are computed, also those of tokens that are not written. A row depends on no other
            row.

            The operation has no gradient; asking for one raises RuntimeError.

        Raises:
            InvalidInput, TypeError, Unsupported: as `ragged_paged_attention`.
        """
        arguments = dict(
            q=q, k=k, v=v, kv_pages=kv_pages, slot_mapping=slot_mapping, positions=positions, cos_sin=cos_sin,
            q_weight=q_weight, k_weight=k_weight, eps=eps, interleaved=interleaved, page_indices=page_indices,
            kv_lens=kv_lens, cu_q_lens=cu_q_lens, num_seqs=num_seqs, k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
        return self.write(NormRopeWrite, arguments, backend, options)

    def latent_norm_rope_write(
        self,
        q: Array,
        kv: Array,
        cache: Array,
        slot_mapping: Array | tuple[Array, Array, Array] | None = None,
        *,
        positions: Array,
        cos_sin: Array | tuple[Array, Array],
        kv_weight: Array | None = None,
        eps: float = 1e-6,
        interleaved: bool = False,
        page_indices: Array | None = None,
        kv_lens: Array | None = None,
        cu_q_lens: Array | None = None,
        num_seqs: int | Array | None = None,
        kv_scale: float | Array | None = None,
        rope_scale: float | Array | None = None,
        power_of_two_scales: bool = True,
        cache_format: str | None = None,
        cache_layout: str | None = None,
        backend: str | Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[Array, Array]:
        """Normalise and rotate this step's latent rows, write them into the cache, and rotate the queries.

        This is the counterpart of `norm_rope_write` for multi-head latent attention (DeepSeek-V2, 2024). It also
        computes in float32 and rounds once, to the dtype of kv. The cache then holds what `write_mla_cache` stores for
        the rounded rows, byte for byte. R is the number of rotary columns in the table, N its number of positions.

        Args:
            q: [T, H, R], the rotary columns of the queries, which are not normalised; of the dtype of kv. It may be a
                view, such as `q[..., -R:]`: only its last stride must be 1, otherwise it is copied.
            kv: [T, K, d_qk], or [T, d_qk] for one KV head, such as the output of a model's `kv_a_proj_with_mqa`;
                float32, float16 or bfloat16. The last R columns are rotated.
            cache: as `write_mla_cache` takes it, in any of its formats.
            slot_mapping: as in `norm_rope_write`.
            positions, cos_sin: as in `norm_rope_write`.
            kv_weight: [W], float32, float16 or bfloat16, the weights of the norm of the first W columns. DeepSeek-V3's
                `kv_a_layernorm` has W = d_qk - R; a norm of whole rows, before the rotation, has W = d_qk. None leaves
                out the norm. The norm multiplies by the weights as given.
            eps, interleaved: as in `norm_rope_write`. DeepSeek's models are interleaved.
            page_indices, kv_lens, cu_q_lens, num_seqs: as in `norm_rope_write`.
            kv_scale, power_of_two_scales, cache_format, cache_layout: as in `write_mla_cache`.
            rope_scale: the scale of the last R columns of a plain cache; default `kv_scale`.
            backend, options: as in `ragged_paged_attention`.

        Returns:
            `(q, cache)`: new rotary columns [T, H, R], of all T tokens, and the cache as `write_mla_cache` returns it.

            The operation has no gradient; asking for one raises RuntimeError.

        Raises:
            InvalidInput, TypeError, Unsupported: as `write_mla_cache`.
        """
        arguments = dict(
            q=q, kv=kv, cache=cache, slot_mapping=slot_mapping, positions=positions, cos_sin=cos_sin,
            kv_weight=kv_weight, eps=eps, interleaved=interleaved, page_indices=page_indices, kv_lens=kv_lens,
            cu_q_lens=cu_q_lens, num_seqs=num_seqs, kv_scale=kv_scale, rope_scale=rope_scale,
            power_of_two_scales=power_of_two_scales, cache_format=cache_format, cache_layout=cache_layout,
        )  # fmt: skip
        return self.write(LatentNormRopeWrite, arguments, backend, options)
