"""Quantises indexer keys; `_kv_layout.quantize_groups` has the arithmetic."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragged_attention.reference._kv_layout import quantize_groups, widened

FEATURES = frozenset({"power_of_two"})


def quantize_indexer_keys(k: ArrayLike, power_of_two: bool = False) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """The e4m3 codes [N, D] and the scales [N] of rows [N, D]."""
    return quantize_groups(widened(k, np.float32), power_of_two)


def run(call: Any, tile: Any, launch: Any) -> Any:
    return launch.on_host(quantize_indexer_keys, call, call.results())
