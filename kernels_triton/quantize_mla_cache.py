"""The quantisation of a latent cache in Triton. The kernel writes row i of `kv` to slot i of a new cache of bytes."""

from typing import Any

from ragged_attention.calls import QuantizeMlaCache
from ragged_attention.kernels_triton import write_kv_pages, write_mla_cache
from ragged_attention.kernels_triton._tiles import cdiv, launchable

Tile = write_mla_cache.Tile
FEATURES = frozenset({"power_of_two_scales", "cache_layout"})


def why_not(call: QuantizeMlaCache) -> str | None:
    return launchable(call, write_mla_cache.write_rows_kernel)


def heuristic(call: QuantizeMlaCache) -> Tile:
    num_pages, page_size, _, width = call.kv.shape
    return write_mla_cache.tile_for(call.kv_format, num_pages * page_size, width)


def run(call: QuantizeMlaCache, tile: Tile, launch: Any) -> Any:
    """Enqueue the kernel; returns the new cache."""
    kv = launch.packed(call.kv)
    num_pages, page_size, _, _ = kv.shape
    row = call.out_shape[3]
    (cache,) = launch(
        write_mla_cache.write_rows_kernel,
        (cdiv(num_pages * page_size, tile.block_t), write_mla_cache.programs_per_row(call.kv_format, 1)),
        (kv,) * 9,  # kv is also the stand-in for absent arrays
        [(call.out_shape, "uint8")],
        num_tokens=num_pages * page_size,
        slots_stride=0,
        **write_kv_pages.NO_TABLES,
        kv_scale_factor=1.0,
        rope_scale_factor=1.0,
        KV_SCALE_STRIDE=-1,
        ROPE_SCALE_STRIDE=-1,
        ROPE_START=call.kv.shape[-1],
        **dict(zip(("kv_page_stride", "kv_row_stride", "kv_head_stride"), launch.strides(kv), strict=False)),
        page_stride=page_size * row,
        row_stride=row,
        head_stride=row,
        PLACES="rows",
        HAS_NUM_SEQS=False,
        SCALED=False,
        KV_PAGE=page_size,
        **write_mla_cache.constants(call, num_pages * page_size, page_size, tile),
    )
    return cache
