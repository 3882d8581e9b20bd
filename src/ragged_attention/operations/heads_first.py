"""Attention over heads-first pages: paged decode, and the chunked prefill of one sequence."""

from collections.abc import Mapping, Sequence
from typing import Any

from ragged_attention.calls import PagedAttention, PrefillAttention
from ragged_attention.operations.base import Array, FrontEnd, Memory, Pages


class HeadsFirst(FrontEnd[Array, Memory]):
    """Attention over heads-first pages."""

    def paged_attention(
        self,
        q: Array,
        k_pages: Pages[Array],
        v_pages: Pages[Array],
        lengths: Array,
        page_indices: Array,
        *,
        sm_scale: float | None = None,
        soft_cap: float | None = None,
        out: Memory | None = None,
        backend: str | Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Array:
        """Decode over a paged cache with heads first: one query per sequence, which sees all of its keys.

        Shapes in letters: S sequences, H query heads, D head size, K KV heads (K divides H), P pages of G positions, M
        pages a sequence can list.

        Args:
            q: [S, H, D] float32, float16 or bfloat16. D is a multiple of 8 from 16 to 512.
            k_pages, v_pages: [K, P, G, D] each, of q's dtype, or float8_e4m3fn, float8_e5m2 or int8; or, quantised, a
                pair `(weight, scales)` each, of such an 8-bit array and f32 [K, P, G, 1], whose values are weight *
                scales. jax's `QuantizedTensor`, of which they are weight * scales / 127.5, is taken as well. In torch
                any strides are accepted, provided that the last one is 1.
            lengths: i32 [S], positions of each sequence in the cache.
            page_indices: i32 [S, M], the block table: entry p of a row is the page that holds the positions from p * G
                on; entries past the last used page are never read as pages.
            sm_scale: factor on q . k; default `D ** -0.5`.
            soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`, after scaling.
            out: torch only: the tensor to write the result to, as in `ragged_paged_attention`.
            backend, options: as in `ragged_paged_attention`.

        Returns:
            out [S, H, D] of q's dtype; 0 for a sequence without keys, its pages missing included.

        Raises:
            InvalidInput, TypeError, Unsupported: as `ragged_paged_attention`.
        """
        arguments = dict(
            q=q, k_pages=k_pages, v_pages=v_pages, lengths=lengths, page_indices=page_indices, sm_scale=sm_scale,
            soft_cap=soft_cap,
        )  # fmt: skip
        return self.run(PagedAttention, arguments, backend, options, out)

    def prefill_attention(
        self,
        q: Array,
        k_pages: Pages[Array],
        v_pages: Pages[Array],
        length: int | Array,
        page_indices: Array,
        *,
        sm_scale: float | None = None,
        soft_cap: float | None = None,
        sliding_window: int | None = None,
        align: str = "chunk",
        out: Memory | None = None,
        backend: str | Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Array:
        """One chunk of one sequence's queries over its pages, heads first, causally.

        Shapes in letters: T rows of the chunk, H query heads, D head size, K KV heads (K divides H), P pages of G
        positions, M pages that the sequence can list.

        Args:
            q: [T, H, D] float32, float16 or bfloat16. D is a multiple of 8 from 16 to 512.
            k_pages, v_pages: as in `paged_attention`.
            length: positions of the sequence in the cache, those of this chunk included: an int, or an i32 array of
                one.
            page_indices: i32 [M], the block table: entry p is the page that holds the positions from p * G on; entries
                past the last used page are never read as pages.
            sm_scale: factor on q . k; default `D ** -0.5`.
            soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`, after scaling and before masking.
            sliding_window: a row sees only positions > its own - sliding_window (with 1, only its own).
            align: where the chunk's rows stand. With "chunk" chunks follow each other from position 0 on, and this is
                the one that holds position `length - 1`: row r stands at `(length - 1) // T * T + r`. With "end" the
                chunk is the last T positions: row r stands at `length - T + r`.
            out: torch only: the tensor to write the result to, as in `ragged_paged_attention`.
            backend, options: as in `ragged_paged_attention`.

        Returns:
            out [T, H, D] of q's dtype; 0 for a row that stands before position 0 or from `length` on, and for one
            that sees no key, its pages being missing.

        Raises:
            InvalidInput, TypeError, Unsupported: as `ragged_paged_attention`.
        """
        arguments = dict(
            q=q, k_pages=k_pages, v_pages=v_pages, length=length, page_indices=page_indices, sm_scale=sm_scale,
            soft_cap=soft_cap, sliding_window=sliding_window, align=align,
        )  # fmt: skip
        return self.run(PrefillAttention, arguments, backend, options, out)
