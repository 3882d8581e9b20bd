"""FlashInfer's functions on pages: the lengths of requests, and appending to paged caches of keys and latents."""

import math
from typing import Any

import torch

from ragged_attention.calls import is_number
from ragged_attention.compat.flashinfer._arguments import NVFP4, expect_layout, stored
from ragged_attention.compat.names import named_as
from ragged_attention.errors import InvalidInput
from ragged_attention.torch import write_kv_pages, write_mla_cache

__all__ = [
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
    "nvfp4_quantize_append_paged_kv_cache",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
]

KV_NAMES = {
    "k": "append_key", "v": "append_value", "kv_pages": "paged_kv_cache", "k_pages": "paged_kv_cache[0]",
    "v_pages": "paged_kv_cache[1]", "k_scale_pages": "kv_cache_sf[0]", "v_scale_pages": "kv_cache_sf[1]",
}  # fmt: skip


def pages_of(paged_kv_cache: Any, kv_layout: str, name: str = "paged_kv_cache") -> tuple[torch.Tensor, torch.Tensor]:
    """The pages of keys and of values as views `[P, G, K, D]`.

    Args:
        paged_kv_cache: a pair of `[P, G, K, D]`, or of `[P, K, D]` with pages of one position; or one tensor with an
            axis of 2 after the first. HND pages are `[P, K, G, D]`.
        kv_layout: "NHD" or "HND".
        name: the argument's name, for error messages.
    """
    expect_layout(kv_layout)
    if isinstance(paged_kv_cache, (tuple, list)) and len(paged_kv_cache) == 2:
        pair = tuple(paged_kv_cache)
    elif isinstance(paged_kv_cache, torch.Tensor):
        if paged_kv_cache.dim() not in (4, 5) or paged_kv_cache.shape[1] != 2:
            got = list(paged_kv_cache.shape)
            raise InvalidInput(f"expected {name}.shape to be [max_num_pages, 2, ...] with 4 or 5 dimensions, got {got}")
        pair = paged_kv_cache.unbind(1)
    else:
        raise TypeError(f"expected {name} to be a tensor or a pair of them, got {type(paged_kv_cache).__name__}")
    return _positions_first(f"{name}[0]", pair[0], kv_layout), _positions_first(f"{name}[1]", pair[1], kv_layout)


def _positions_first(name: str, pages: Any, kv_layout: str) -> torch.Tensor:
    if not isinstance(pages, torch.Tensor):
        raise TypeError(f"expected {name} to be a torch.Tensor, got {type(pages).__name__}")
    if pages.dim() == 3:  # pages of one position
        return pages.unsqueeze(1)
    if pages.dim() != 4:
        raise InvalidInput(f"expected {name} to have 3 or 4 dimensions, got {pages.dim()}")
    return pages.transpose(1, 2) if kv_layout == "HND" else pages


def scale_pages_of(kv_cache_sf: Any, kv_layout: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The e4m3 scales of blocks of 16 columns, which may be given as bytes, as views `[P, G, K, D / 16]`."""
    if kv_cache_sf is None:
        return None, None
    k_scales, v_scales = (
        scales.view(torch.float8_e4m3fn) if scales.dtype == torch.uint8 else scales
        for scales in pages_of(kv_cache_sf, kv_layout, "kv_cache_sf")
    )
    return k_scales, v_scales


def scale_rows_of(kv_cache_sf: Any, kv_layout: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The scales of packed keys and values, in the form of pages of one position."""
    k_scales, v_scales = scale_pages_of(kv_cache_sf, "NHD")
    if k_scales is None or v_scales is None or kv_layout == "NHD":
        return k_scales, v_scales
    return k_scales.transpose(0, 2), v_scales.transpose(0, 2)


def get_seq_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """The number of cached positions of each request, [batch_size].

    Args:
        kv_indptr: [batch_size + 1], row pointers into the page indices.
        kv_last_page_len: [batch_size].
        page_size: the number of positions per page.
    """
    return (kv_indptr.diff() - 1).clamp(min=0) * page_size + kv_last_page_len


def get_batch_indices_positions(
    append_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    nnz: int,
    batch_indices: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The request and the position of each appended row, i32 [nnz] each; -1 and 0 for rows of no request.

    Args:
        append_indptr: [batch_size + 1], row pointers to the appended rows of each request.
        seq_lens: [batch_size], the lengths of the requests, the appended rows included.
        nnz: the number of rows.
        batch_indices, positions: tensors for the results.
    """
    rows = torch.arange(nnz, device=append_indptr.device)
    ends, lens = append_indptr[1:].long(), seq_lens.to(append_indptr.device).long()
    if not len(ends):
        requests, places = torch.full_like(rows, -1), torch.zeros_like(rows)
    else:
        request = torch.searchsorted(ends, rows, right=True)
        known, request = request < len(ends), request.clamp(max=len(ends) - 1)
        requests = torch.where(known, request, -1)
        places = torch.where(known, lens[request] - ends[request] + rows, 0)
    return stored("batch_indices", batch_indices, requests.int()), stored("positions", positions, places.int())


def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Write keys and values into the pages of their requests.

    Args:
        append_key, append_value: [nnz, num_kv_heads, head_dim].
        batch_indices, positions: [nnz], as `get_batch_indices_positions` returns them. Rows whose request is -1, and
            positions past the pages of a request, are skipped.
        paged_kv_cache: a pair of NHD `[max_num_pages, page_size, num_kv_heads, head_dim]` or HND `[max_num_pages,
            num_kv_heads, page_size, head_dim]`, or one tensor with an axis of 2 after the first. If it is 8-bit, rows
            of 16 and 32 bits are rounded and saturated.
        kv_indices, kv_indptr: the pages of each request.
        kv_last_page_len: without effect.
        kv_layout: "NHD" or "HND".
    """
    del kv_last_page_len
    pages = pages_of(paged_kv_cache, kv_layout)
    slots = _slots(batch_indices, positions, kv_indices, kv_indptr, pages[0].shape[1])
    with named_as(KV_NAMES):
        k_scale, v_scale = (1.0 if array.dtype == torch.int8 else None for array in pages)
        write_kv_pages(append_key, append_value, pages, slots, k_scale=k_scale, v_scale=v_scale)


def nvfp4_quantize_append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    k_scale: float,
    v_scale: float,
    kv_layout: str = "NHD",
) -> None:
    """Write keys and values into the pages of their requests as 4-bit codes with a scale for each 16 columns.

    Args:
        append_key, append_value: [nnz, num_kv_heads, head_dim]; head_dim is a multiple of 16.
        paged_kv_cache: as for `append_paged_kv_cache`, uint8 with `head_dim // 2` columns.
        kv_cache_sf: the scales, in the same form with `head_dim // 16` columns of float8_e4m3fn, or their bytes.
        k_scale, v_scale: positive numbers, which multiply the stored values.

    The other arguments are those of `append_paged_kv_cache`. `write_kv_pages` describes how rows are quantised.
    """
    del kv_last_page_len
    pages = pages_of(paged_kv_cache, kv_layout)
    slots = _slots(batch_indices, positions, kv_indices, kv_indptr, pages[0].shape[1])
    _write_nvfp4(append_key, append_value, pages, kv_cache_sf, slots, k_scale, v_scale, kv_layout)


def nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    slot_mapping: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """`nvfp4_quantize_append_paged_kv_cache` with slots instead of requests and positions.

    Args:
        append_key, append_value: at least as many rows as there are slots; further rows are padding.
        slot_mapping: i32 or i64 [nnz], `page * page_size + offset`; rows with a slot outside the cache are skipped.
        k_scale, v_scale: numbers, or tensors of one element, whose value is not read back.
    """
    if not 0 <= len(slot_mapping) <= min(len(append_key), len(append_value)):
        got = min(len(append_key), len(append_value))
        raise InvalidInput(
            f"expected append_key and append_value of at least len(slot_mapping)={len(slot_mapping)}, got {got} rows"
        )
    rows = append_key[: len(slot_mapping)], append_value[: len(slot_mapping)]
    pages = pages_of(paged_kv_cache, kv_layout)
    _write_nvfp4(*rows, pages, kv_cache_sf, slot_mapping, k_scale, v_scale, kv_layout)


def _write_nvfp4(
    append_key: torch.Tensor, append_value: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], kv_cache_sf: Any,
    slots: torch.Tensor, k_scale: Any, v_scale: Any, kv_layout: str,
) -> None:  # fmt: skip
    scales: dict[str, Any] = {}
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if is_number(scale) and not 0 < scale < math.inf:
            raise InvalidInput(f"expected {name} to be a positive finite number, got {scale}")
        scales[name] = scale if is_number(scale) else scale.reshape(())
    for index, side in enumerate(pages):
        if side.dtype != NVFP4:
            raise InvalidInput(f"expected paged_kv_cache[{index}].dtype to be {NVFP4}, got {side.dtype}")
    k_scales, v_scales = scale_pages_of(kv_cache_sf, kv_layout)
    with named_as(KV_NAMES):
        write_kv_pages(append_key, append_value, pages, slots, k_scale_pages=k_scales, v_scale_pages=v_scales, **scales)


def append_paged_mla_kv_cache(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    ckv_cache: torch.Tensor | None,
    kpe_cache: torch.Tensor | None,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
) -> None:
    """Write latents and rotary keys into the pages of their requests.

    Args:
        append_ckv, append_kpe: [nnz, ckv_dim], [nnz, kpe_dim].
        ckv_cache, kpe_cache: [max_num_pages, page_size, ckv_dim], [max_num_pages, page_size, kpe_dim]; they may be
            views of one cache. A cache that is None is not written.

    The other arguments are those of `append_paged_kv_cache`.
    """
    del kv_last_page_len
    for cache, rows, name, row_name in (
        (ckv_cache, append_ckv, "ckv_cache", "append_ckv"),
        (kpe_cache, append_kpe, "kpe_cache", "append_kpe"),
    ):
        if cache is not None:
            slots = _slots(batch_indices, positions, kv_indices, kv_indptr, cache.shape[1])
            with named_as({"kv": row_name, "cache": name}):
                scale = 1.0 if cache.dtype == torch.int8 else None
                write_mla_cache(rows, cache.unsqueeze(2), slots, kv_scale=scale)


def _slots(
    batch_indices: torch.Tensor, positions: torch.Tensor, indices: torch.Tensor, indptr: torch.Tensor, page_size: int
) -> torch.Tensor:
    """The slot `page * page_size + offset` of each row, i64 [nnz]; -1 for rows without a request or a page."""
    device = indices.device
    request, position = batch_indices.to(device).long(), positions.to(device).long()
    starts, ends = indptr[:-1].to(device).long(), indptr[1:].to(device).long()
    if not len(starts) or not len(indices):
        return torch.full_like(request, -1)
    known = (request >= 0) & (request < len(starts)) & (position >= 0)
    request = request.clamp(0, len(starts) - 1)
    entry = starts[request] + position // page_size
    known &= (entry < ends[request]) & (entry < len(indices))
    slots = indices[entry.clamp(0, len(indices) - 1)].long() * page_size + position % page_size
    return torch.where(known, slots, -1)
