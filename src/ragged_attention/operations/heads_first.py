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
        """Decode over a paged cache with heads first: one query per sequence, which sees all keys of its sequence.

        Shapes in letters: S sequences, H query heads, D head size, K KV heads (K divides H), P pages of G positions, at
        most M pages per sequence.

        Args:
            q: [S, H, D] float32, float16 or bfloat16. D is a multiple of 8 from 16 to 512.
            k_pages, v_pages: [K, P, G, D] each, of q's dtype, float8_e4m3fn, float8_e5m2 or float8_e4m3fnuz. Or
                quantised: each is a pair `(weight, scales)` with the values weight * scales, where weight is
                [K, P, G, D] of int8 or 8-bit floats and scales is f32 [K, P, G, 1]; or jax's `QuantizedTensor`, with
                the values weight * scales / 127.5. In torch any strides are accepted if the last one is 1.
            lengths: i32 [S], the number of positions of each sequence in the cache.
            page_indices: i32 [S, M], as in `ragged_paged_attention`.
            sm_scale: factor on q . k; default `D ** -0.5`.
            soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`, after scaling.
            out, backend, options: as in `ragged_paged_attention`.

        Returns:
            out [S, H, D] of q's dtype; 0 for a sequence that sees no key, because it has none or its pages are invalid.

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
        """Causal attention of one chunk of a sequence's queries over the sequence's heads-first pages.

        Shapes in letters: T rows of the chunk, H query heads, D head size, K KV heads (K divides H), P pages of G
        positions, at most M pages of the sequence.

        Args:
            q: [T, H, D] float32, float16 or bfloat16. D is a multiple of 8 from 16 to 512.
            k_pages, v_pages: as in `paged_attention`.
            length: the number of positions of the sequence in the cache, including this chunk: an int, or an i32 array
                of one element.
            page_indices: i32 [M], the sequence's row of the block table of `ragged_paged_attention`.
            sm_scale: factor on q . k; default `D ** -0.5`.
            soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`, after scaling and before masking.
            sliding_window: a row at position p sees only positions > p - sliding_window (with 1, only p).
            align: the positions of the chunk's rows. With "chunk", chunks of T rows follow each other from position 0,
                and this chunk holds position `length - 1`: row r is at `(length - 1) // T * T + r`. With "end", the
                chunk is the last T positions: row r is at `length - T + r`.
            out, backend, options: as in `ragged_paged_attention`.

        Returns:
            out [T, H, D] of q's dtype; 0 for a row whose position is below 0 or not below `length`, and for a row that
            sees no key because its pages are invalid.

        Raises:
            InvalidInput, TypeError, Unsupported: as `ragged_paged_attention`.
        """
        arguments = dict(
            q=q, k_pages=k_pages, v_pages=v_pages, length=length, page_indices=page_indices, sm_scale=sm_scale,
            soft_cap=soft_cap, sliding_window=sliding_window, align=align,
        )  # fmt: skip
        return self.run(PrefillAttention, arguments, backend, options, out)
