"""FlashInfer's packing of mask bits into bytes, and of rows into 4-bit codes with a scale for each 16 columns."""

import itertools

import torch

from ragged_attention.compat.flashinfer._arguments import NVFP4
from ragged_attention.compat.flashinfer.page import pages_of, scale_pages_of
from ragged_attention.errors import InvalidInput

__all__ = ["nvfp4_kv_dequantize", "nvfp4_kv_dequantize_paged", "nvfp4_kv_quantize", "packbits", "segment_packbits"]

GROUP = 16  # columns that share a scale
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes of the codes 0 to 7; 8 is added for a negative number


def packbits(x: torch.Tensor, bitorder: str = "big") -> torch.Tensor:
    """The elements of `x`, 0 or 1 each, as bits of bytes: uint8 [ceil(len(x) / 8)], as `numpy.packbits` packs them.

    Args:
        x: any shape; elements that are not 0 count as 1.
        bitorder: "big" for the first element in the highest bit, "little" for the lowest.
    """
    if bitorder not in ("big", "little"):
        raise InvalidInput(f"expected bitorder to be big or little, got {bitorder!r}")
    bits = x.reshape(-1).bool()
    bits = torch.nn.functional.pad(bits.to(torch.uint8), (0, -len(bits) % 8)).view(-1, 8)
    shifts = torch.arange(8, dtype=torch.uint8, device=x.device)
    return (bits << (shifts if bitorder == "little" else shifts.flip(0))).sum(1, dtype=torch.uint8)


def segment_packbits(x: torch.Tensor, indptr: torch.Tensor, bitorder: str = "big") -> tuple[torch.Tensor, torch.Tensor]:
    """`packbits` of each segment `x[indptr[i]:indptr[i + 1]]`, each beginning with a new byte.

    Args:
        x: [indptr[-1]].
        indptr: [batch_size + 1].
        bitorder: as for `packbits`.

    Returns:
        the bytes, uint8 [new_indptr[-1]], and new_indptr, the row pointers to each segment's bytes, in the form of
        indptr.
    """
    edges = indptr.tolist()
    packed = [packbits(x[start:end], bitorder) for start, end in itertools.pairwise(edges)]
    sizes = torch.tensor([0, *(len(segment) for segment in packed)], dtype=indptr.dtype, device=indptr.device)
    return torch.cat([x.new_empty(0, dtype=torch.uint8), *packed]), sizes.cumsum(0, dtype=indptr.dtype)


def nvfp4_kv_quantize(input: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows to 4-bit codes with an e4m3 scale for each 16 columns.

    As in FlashInfer's kernel, a scale is `1 / global_scale * (amax * (1 / 6))`, and a code is the value times
    `1 / (scale * global_scale)`, rounded. FlashInfer's reciprocals are approximate and ours are exact, so a number
    between two codes may round differently. The functions that append to a cache compute scales by a division instead.

    Args:
        input: [M, K]; K is a multiple of 16.
        global_scale: f32 [1], which multiplies stored values.

    Returns:
        the codes, uint8 [M, K / 2], with even columns in the low halves; and the scales' bytes, uint8 [M, K / 16].
    """
    if input.dim() != 2 or input.shape[1] % GROUP:
        raise InvalidInput(f"expected input.shape to be [M, K] with K a multiple of {GROUP}, got {list(input.shape)}")
    blocks, tensor_scale = input.float().unflatten(1, (-1, GROUP)), global_scale.float().reshape(())
    largest = blocks.abs().amax(-1, keepdim=True)
    scales = (tensor_scale.reciprocal() * (largest * (1 / torch.tensor(6.0)))).clamp(max=448).to(torch.float8_e4m3fn)
    factors = scales.float()
    scaled = blocks * torch.where(factors > 0, (factors * tensor_scale).reciprocal(), 0)
    magnitude = scaled.abs()
    codes = torch.zeros_like(scaled, dtype=torch.uint8)
    for below, above in itertools.pairwise(E2M1):
        middle, odd = (below + above) / 2, E2M1.index(above) % 2
        codes += magnitude > middle if odd else magnitude >= middle  # a tie goes to the even code
    codes = torch.where(largest.isnan(), 0, codes + 8 * scaled.signbit()).to(torch.uint8).flatten(1)
    return codes[:, ::2] | codes[:, 1::2] << 4, scales.view(torch.uint8).squeeze(-1)


def nvfp4_kv_dequantize(
    fp4_data: torch.Tensor,
    block_scales: torch.Tensor,
    global_scale: torch.Tensor,
    output_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """The rows [M, K], in `output_dtype`, of codes and scales that `nvfp4_kv_quantize` made.

    Args:
        fp4_data: uint8 [M, K / 2].
        block_scales: e4m3 [M, K / 16], or their bytes.
        global_scale: f32 [1].
    """
    if fp4_data.dim() != 2 or fp4_data.shape[1] * 2 % GROUP:
        got = list(fp4_data.shape)
        raise InvalidInput(f"expected fp4_data.shape to be [M, K / 2] with K a multiple of {GROUP}, got {got}")
    return _values(fp4_data, block_scales.view(torch.float8_e4m3fn), global_scale).to(output_dtype)


def nvfp4_kv_dequantize_paged(
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    output_k: torch.Tensor,
    output_v: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Dequantise the keys and values of requests from nvfp4 pages into dense tensors.

    Args:
        paged_kv_cache, kv_cache_sf: as for `nvfp4_quantize_append_paged_kv_cache`.
        block_tables: int [batch, max_pages_per_request], the pages of each request.
        seq_lens: int [batch].
        k_scale, v_scale: f32 [1], which multiply stored values.
        output_k, output_v: [batch, max_seq_len, num_kv_heads, head_dim]; positions from `seq_lens` on, and positions on
            pages that do not exist, are not written.
        kv_layout: "NHD" or "HND".
    """
    pages, scales = pages_of(paged_kv_cache, kv_layout), scale_pages_of(kv_cache_sf, kv_layout)
    num_pages, page_size = pages[0].shape[:2]
    for name, codes, code_scales, scale, output in (
        ("output_k", pages[0], scales[0], k_scale, output_k),
        ("output_v", pages[1], scales[1], v_scale, output_v),
    ):
        if codes.dtype != NVFP4 or code_scales is None:
            raise InvalidInput(f"expected paged_kv_cache of {NVFP4} with kv_cache_sf, got {codes.dtype}")
        position = torch.arange(output.shape[1], device=output.device)
        if block_tables.shape[1] * page_size < len(position):
            got = list(block_tables.shape)
            max_seq_len = len(position)
            raise InvalidInput(f"expected block_tables with pages for {max_seq_len=}, got {got} of {page_size}")
        page = block_tables.long()[:, position // page_size]
        is_cached = (position < seq_lens[:, None]) & (page >= 0) & (page < num_pages)
        rows = page[is_cached] * page_size + (position % page_size).expand_as(page)[is_cached]
        values = _values(codes.flatten(0, 1)[rows], code_scales.flatten(0, 1)[rows], scale).to(output.dtype)
        if values.shape[1:] != output.shape[2:]:
            wanted, got = list(values.shape[1:]), list(output.shape[2:])
            raise InvalidInput(f"expected {name}.shape[2:] to be {wanted}, got {got}")
        output[is_cached] = values


def _values(codes: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """The float32 values of packed codes [..., K / 2] with scales [..., K / 16]."""
    table = torch.tensor((*E2M1, *(-magnitude for magnitude in E2M1)), device=codes.device)
    numbers = table[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()].unflatten(-1, (-1, GROUP))
    return (numbers * scales.float().unsqueeze(-1) * global_scale.float().reshape(())).flatten(-2)
