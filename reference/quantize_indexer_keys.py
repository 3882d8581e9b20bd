"""Rows for the indexer, quantised; `_indexer.quantized` has the arithmetic."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragged_attention.reference._indexer import quantized

FEATURES = frozenset({"power_of_two"})


def quantize_indexer_keys(k: ArrayLike, power_of_two: bool = False) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Rows [N, D] as the bits of e4m3 values [N, D] and scales [N]."""
    return quantized(k, power_of_two)


def run(call: Any, tile: Any, launch: Any) -> Any:
    return launch.on_host(quantize_indexer_keys, call, call.results())
