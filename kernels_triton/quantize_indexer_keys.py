"""The quantisation of the indexer's keys in Triton, with the functions of `write_indexer_cache`."""

from typing import Any

from ragged_attention.calls import QuantizeIndexerKeys
from ragged_attention.kernels_triton import write_indexer_cache
from ragged_attention.kernels_triton._tiles import cdiv, launchable

Tile = write_indexer_cache.Tile
FEATURES = frozenset({"power_of_two"})


def why_not(call: QuantizeIndexerKeys) -> str | None:
    return launchable(call, write_indexer_cache.quantize_keys_kernel)


def heuristic(call: QuantizeIndexerKeys) -> Tile:
    return write_indexer_cache.tile_for(*call.k.shape)


def run(call: QuantizeIndexerKeys, tile: Tile, launch: Any) -> Any:
    """Enqueue the kernel; returns the values and their scales."""
    k = launch.packed(call.k)
    codes, scales = launch(
        write_indexer_cache.quantize_keys_kernel,
        (cdiv(k.shape[0], tile.block_t),),
        (k,),
        call.results(),
        **write_indexer_cache.arguments_of(k, call.power_of_two, tile, launch),
    )
    return codes, scales
