"""Writes this step's K and V, quantised if the cache is, to the pages."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragged_attention.calls.cache_formats import KvFormat
from ragged_attention.reference._kv_layout import divisors, encode, sequence_bounds
from ragged_attention.reference._scaled_rows import quantized

FEATURES = frozenset({
    "slot_mapping", "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "k_scale", "v_scale", "k_scale_pages",
    "v_scale_pages",
})  # fmt: skip


def slots_from_tables(
    page_indices: ArrayLike,
    kv_lens: ArrayLike,
    cu_q_lens: ArrayLike,
    num_seqs: ArrayLike | None,
    num_tokens: int,
    num_pages: int,
    page_size: int,
) -> NDArray[np.int64]:
    """The slot (page * G + offset) of each token; -1 for a token without a sequence, a position or a valid page.

    Token i of a sequence has position `kv_len - q_len + i`: this step's tokens are the last of the `kv_len` positions.
    """
    page_indices = np.asarray(page_indices)
    slots = np.full(num_tokens, -1, np.int64)
    for seq, (start, stop) in enumerate(sequence_bounds(cu_q_lens, num_seqs, num_tokens)):
        kv_len = int(np.clip(np.asarray(kv_lens)[seq], 0, page_indices.shape[1] * page_size))
        for token in range(start, stop):
            position = kv_len - (stop - token)
            if position >= 0 and 0 <= (page := int(page_indices[seq, position // page_size])) < num_pages:
                slots[token] = page * page_size + position % page_size
    return slots


def write_kv_pages(
    k: ArrayLike,
    v: ArrayLike,
    kv_pages: Any,
    slot_mapping: ArrayLike | None = None,
    *,
    page_indices: Any = None,
    kv_lens: Any = None,
    cu_q_lens: Any = None,
    num_seqs: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    k_scale_pages: ArrayLike | None = None,
    v_scale_pages: ArrayLike | None = None,
    k_format: KvFormat | None = None,
    v_format: KvFormat | None = None,
    copies: bool = False,
) -> Any:
    """The new pages, in the layout of `kv_pages`.

    They store `k / k_scale`, computed in float32 and encoded as `k_format`, and `v` likewise. If `copies`, k and v are
    stored unchanged. Without formats, the caller casts the result. If K or V has scale pages [P, G, K, n], the result
    is the tuple (kv_pages, k_scale_pages, v_scale_pages), with None for absent scale pages. Tokens with a slot outside
    [0, P * G) are skipped. If two tokens have the same slot, the later token wins.
    """
    combined = not isinstance(kv_pages, tuple | list)
    arrays = [np.array(pages) for pages in ([kv_pages] if combined else kv_pages)]
    new_k, new_v = (arrays[0][:, :, 0::2], arrays[0][:, :, 1::2]) if combined else arrays
    num_pages, page_size, num_kv_heads, _ = new_k.shape
    if slot_mapping is None:
        slots = slots_from_tables(page_indices, kv_lens, cu_q_lens, num_seqs, len(np.asarray(k)), num_pages, page_size)
    else:
        slots = np.asarray(slot_mapping)
    scale_pages = [None if pages is None else np.array(pages) for pages in (k_scale_pages, v_scale_pages)]
    for pages, stored_scales, tokens, scale, form in zip(
        (new_k, new_v), scale_pages, (k, v), (k_scale, v_scale), (k_format, v_format), strict=True
    ):
        codes, scales = stored_rows(np.asarray(tokens), scale, form, num_kv_heads, copies)
        for token, slot in enumerate(slots):
            if 0 <= slot < num_pages * page_size:
                pages[slot // page_size, slot % page_size] = codes[token]
                if stored_scales is not None:
                    stored_scales[slot // page_size, slot % page_size] = scales[token]
    written = arrays[0] if combined else tuple(arrays)
    return (written, *scale_pages) if any(pages is not None for pages in scale_pages) else written


def stored_rows(
    tokens: NDArray[Any], scale: ArrayLike | None, form: KvFormat | None, num_kv_heads: int, copies: bool
) -> tuple[NDArray[Any], Any]:
    """The codes and the scales that the pages store for new rows; scales are None if the format has none."""
    if copies:
        return tokens, None
    divided_by = divisors(scale, num_kv_heads)
    if form is not None and form.scaled:
        return quantized(tokens, divided_by, form)
    with np.errstate(divide="ignore", invalid="ignore"):  # division by 0 gives infinity or NaN
        quotients = tokens.astype(np.float32) / divided_by[None, :, None]
    return encode(quotients, None if form is None else form.codes), None


def run(call: Any, tile: Any, launch: Any) -> Any:
    formats = {"k_format": call.k_format, "v_format": call.v_format}
    return launch.on_host(_flat, call, call.written(), copies=call.copies, **formats)


def _flat(**arguments: Any) -> Any:
    """The written arrays, without absent ones."""
    written = write_kv_pages(**arguments)
    if arguments["k_scale_pages"] is None and arguments["v_scale_pages"] is None:
        return written
    pages, *scale_pages = written
    return *(pages if isinstance(pages, tuple) else (pages,)), *(array for array in scale_pages if array is not None)
