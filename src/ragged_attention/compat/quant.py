"""The cache helpers of FlashMLA's tests of September 2025, with their names and their rule for scales.

`ragged_attention.torch.quantize_mla_cache` computes scales in float32, at least 1e-4 and by default powers of two. Here
scales of any size are computed in the input's dtype. With dv=512, tile_size=128 and d=576, `quantize_k_cache` makes an
`fp8_v32` cache too.
"""

import torch

from ragged_attention.errors import InvalidInput

E4M3_MAX = 448.0


def quantize_k_cache(input_k_cache: torch.Tensor, dv: int, tile_size: int = 128) -> torch.Tensor:
    """Quantise a latent cache: e4m3 values with a float32 scale per `tile_size` columns, then bfloat16 columns.

    Args:
        input_k_cache: [num_blocks, block_size, 1, d] bfloat16, float16 or float32.
        dv: number of columns that are quantised, from the first on; a multiple of `tile_size`.
        tile_size: number of columns that share a scale, which is their largest magnitude over 448.

    Returns:
        float8_e4m3fn [num_blocks, block_size, 1, dv + 4 * (dv // tile_size) + 2 * (d - dv)]: the bytes of the values,
        of the scales, and of the last columns. If a tile's values or its scale are 0, its bytes are 0.
    """
    _expect_tiles(input_k_cache, "input_k_cache", dv, tile_size)
    if not input_k_cache.is_floating_point() or input_k_cache.element_size() == 1:
        raise InvalidInput(f"expected input_k_cache.dtype to be of 16 or 32 bits, got {input_k_cache.dtype}")
    if input_k_cache.shape[3] < dv:
        raise InvalidInput(f"expected input_k_cache.shape[3] >= {dv=}, got {input_k_cache.shape[3]}")
    tiles = input_k_cache[..., :dv].unflatten(-1, (-1, tile_size))
    scales = (tiles.abs().amax(-1, keepdim=True) / E4M3_MAX).float()
    divisors = torch.where(scales == 0, 1.0, scales)
    # If a scale was rounded down, the largest value may exceed 448, which e4m3 would turn into NaN.
    values = (tiles.float() / divisors).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    unquantized = input_k_cache[..., dv:].to(torch.bfloat16).contiguous()
    parts = (values.flatten(-2), scales.flatten(-2).contiguous(), unquantized)
    return torch.cat([part.view(torch.uint8) for part in parts], -1).view(torch.float8_e4m3fn)


def dequantize_k_cache(quant_k_cache: torch.Tensor, dv: int = 512, tile_size: int = 128, d: int = 576) -> torch.Tensor:
    """The values of a cache made by `quantize_k_cache`, as bfloat16 [num_blocks, block_size, 1, d]."""
    _expect_tiles(quant_k_cache, "quant_k_cache", dv, tile_size)
    sizes = dv, 4 * (dv // tile_size), 2 * (d - dv)
    if quant_k_cache.element_size() != 1 or d < dv or quant_k_cache.shape[3] != sum(sizes):
        got = f"{quant_k_cache.shape[3]} of {quant_k_cache.dtype}"
        raise InvalidInput(
            f"expected quant_k_cache to have rows of {sum(sizes)} bytes with {dv=}, {tile_size=}, {d=}, got {got}"
        )
    codes, scales, unquantized = quant_k_cache.view(torch.uint8).split(sizes, -1)
    values = codes.view(torch.float8_e4m3fn).float().unflatten(-1, (-1, tile_size))
    scales, unquantized = scales.contiguous().view(torch.float32), unquantized.contiguous().view(torch.bfloat16)
    return torch.cat([(values * scales[..., None]).flatten(-2).to(torch.bfloat16), unquantized], -1)


def _expect_tiles(cache: torch.Tensor, name: str, dv: int, tile_size: int) -> None:
    if not isinstance(cache, torch.Tensor):
        raise TypeError(f"expected {name} to be a torch.Tensor, got {type(cache).__name__}")
    if cache.dim() != 4 or cache.shape[2] != 1:
        raise InvalidInput(f"expected {name}.shape to be [num_blocks, block_size, 1, d], got {list(cache.shape)}")
    if tile_size < 1 or dv < tile_size or dv % tile_size:
        raise InvalidInput(f"expected dv to be a positive multiple of {tile_size=}, got {dv}")
