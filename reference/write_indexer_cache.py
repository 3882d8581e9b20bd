"""Quantises this step's keys of the indexer and writes them to its pages."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragged_attention.reference._indexer import planes, quantized

FEATURES = frozenset({"power_of_two"})


def write_indexer_cache(
    k: ArrayLike, cache: ArrayLike, slot_mapping: ArrayLike, power_of_two: bool = False
) -> NDArray[np.uint8]:
    """The new cache, with rows `k` [T, D] at their slots.

    A slot outside [0, P * G) is skipped; of two tokens with one slot the later one wins.
    """
    cache = np.array(cache, order="C")
    slots = np.asarray(slot_mapping)
    valid = (slots >= 0) & (slots < cache.shape[0] * cache.shape[1])
    page, offset = np.divmod(slots[valid], cache.shape[1])
    codes, factors = quantized(np.asarray(k)[valid], power_of_two)
    values, scales = planes(cache)
    values[page, offset] = codes
    scales[page, offset] = factors.astype("<f4").view(np.uint8).reshape(-1, 4)
    return cache


def run(call: Any, tile: Any, launch: Any) -> Any:
    return launch.on_host(write_indexer_cache, call, "cache")
