"""Quantises this step's indexer keys and writes them to the indexer's pages."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragged_attention.reference._indexer import planes
from ragged_attention.reference.quantize_indexer_keys import quantize_indexer_keys
from ragged_attention.reference.write_kv_pages import slots_from_tables

FEATURES = frozenset({"slot_mapping", "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "power_of_two"})


def write_indexer_cache(
    k: ArrayLike,
    cache: ArrayLike,
    slot_mapping: ArrayLike | None = None,
    power_of_two: bool = False,
    *,
    page_indices: Any = None,
    kv_lens: Any = None,
    cu_q_lens: Any = None,
    num_seqs: ArrayLike | None = None,
) -> NDArray[np.uint8]:
    """The new cache, with rows `k` [T, D] at their slots.

    Tokens with a slot outside [0, P * G) are skipped. If two tokens have the same slot, the later token wins.
    """
    cache = np.array(cache, order="C")
    if slot_mapping is None:
        sizes = len(np.asarray(k)), *cache.shape[:2]
        slots = slots_from_tables(page_indices, kv_lens, cu_q_lens, num_seqs, *sizes)
    else:
        slots = np.asarray(slot_mapping)
    valid = (slots >= 0) & (slots < cache.shape[0] * cache.shape[1])
    page, offset = np.divmod(slots[valid], cache.shape[1])
    codes, factors = quantize_indexer_keys(np.asarray(k)[valid], power_of_two)
    values, scales = planes(cache)
    values[page, offset] = codes
    scales[page, offset] = factors.astype("<f4").view(np.uint8).reshape(-1, 4)
    return cache


def run(call: Any, tile: Any, launch: Any) -> Any:
    return launch.on_host(write_indexer_cache, call, "cache")
