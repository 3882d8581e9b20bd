"""Writes this step's K and V, quantised if the cache is, to the pages."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragged_attention.reference._kv_layout import divisors, encode, sequence_bounds

FEATURES = frozenset({"slot_mapping", "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "k_scale", "v_scale"})


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
    cache_dtype: str | None = None,
    copies: bool = False,
) -> Any:
    """The new pages, in the layout of `kv_pages`, with `k / k_scale`, computed in float32 and encoded as `cache_dtype`.

    `v` is stored likewise. If `copies`, both are stored unchanged. A slot outside [0, P * G) is skipped; of two tokens
    with one slot the later one wins.
    """
    combined = not isinstance(kv_pages, tuple | list)
    arrays = [np.array(pages) for pages in ([kv_pages] if combined else kv_pages)]
    new_k, new_v = (arrays[0][:, :, 0::2], arrays[0][:, :, 1::2]) if combined else arrays
    num_pages, page_size, num_kv_heads, _ = new_k.shape
    if slot_mapping is None:
        slots = slots_from_tables(page_indices, kv_lens, cu_q_lens, num_seqs, len(np.asarray(k)), num_pages, page_size)
    else:
        slots = np.asarray(slot_mapping)
    for pages, tokens, scale in ((new_k, k, k_scale), (new_v, v, v_scale)):
        stored = np.asarray(tokens)
        if not copies:
            with np.errstate(divide="ignore", invalid="ignore"):  # division by 0 gives infinity or NaN
                quotients = stored.astype(np.float32) / divisors(scale, num_kv_heads)[None, :, None]
            stored = encode(quotients, cache_dtype)
        for token, slot in enumerate(slots):
            if 0 <= slot < num_pages * page_size:
                pages[slot // page_size, slot % page_size] = stored[token]
    return arrays[0] if combined else tuple(arrays)


def run(call: Any, tile: Any, launch: Any) -> Any:
    return launch.on_host(write_kv_pages, call, "kv_pages", cache_dtype=call.cache_dtype, copies=call.copies)
