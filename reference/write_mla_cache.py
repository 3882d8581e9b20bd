"""This step's latent rows, written (and quantised) into the pages of the cache."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragged_attention.reference._kv_layout import latent_format, planes, quantize_rows
from ragged_attention.reference._no_tuning import Tile as Tile
from ragged_attention.reference._no_tuning import heuristic as heuristic
from ragged_attention.reference._no_tuning import why_not as why_not

FEATURES = frozenset({"power_of_two_scales", "cache_format", "cache_layout"})


def write_mla_cache(
    kv: ArrayLike,
    cache: ArrayLike,
    slot_mapping: ArrayLike,
    power_of_two_scales: bool = True,
    cache_format: str | None = None,
    cache_layout: str | None = None,
) -> NDArray[Any]:
    """The new cache: the rows `kv` [T, K, d_qk] at their slots, anything else as it was.

    A slot outside [0, P*G) is skipped; of two tokens for one slot the later one wins.
    """
    cache = np.array(cache, order="C")
    slots = np.asarray(slot_mapping)
    valid = (slots >= 0) & (slots < cache.shape[0] * cache.shape[1])
    page, offset = np.divmod(slots[valid], cache.shape[1])
    rows, layout = np.asarray(kv)[valid], latent_format(cache, cache_format, cache_layout)
    if layout is None:
        cache[page, offset] = rows
    else:
        stored = quantize_rows(rows[:, 0], layout, power_of_two_scales)
        for plane, new in zip(planes(cache, layout), stored, strict=True):
            plane[page, offset] = new
    return cache


def run(call: Any, tile: Tile, launch: Any) -> Any:
    del tile
    return launch.on_host(write_mla_cache, call, "cache")[0]
