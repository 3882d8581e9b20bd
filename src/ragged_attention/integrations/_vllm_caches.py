"""vLLM's cache formats (`--kv-cache-dtype`) as arguments of our operations.

vLLM's cache of a layer is [blocks, K, block, content], with any strides. K and V of a head are side by side, and each
row's scale follows the row:

    fp8, and the model's own dtype        [K | V]
    ..._per_token_head                    [K | scale | V | scale], a scale is a float32

`nvfp4` is [blocks, 2 K, block, content]. Only the size of this shape is meaningful: each block has the codes of all
keys, the scales of all keys, the codes of all values, and the scales of all values. No cache is ever copied.
"""

import dataclasses
import importlib
from typing import Any, NamedTuple

import torch

from ragged_attention.errors import Unsupported

SCALE = torch.float32.itemsize  # bytes of a row's scale
GROUP = 16  # columns that share a scale in `nvfp4`


@dataclasses.dataclass(frozen=True)
class CacheKind:
    """A format of vLLM's caches."""

    codes: torch.dtype | None  # the dtype of page elements; None: the dtype of vLLM's tensor
    columns: int = 1  # columns per element
    has_layer_scales: bool = False  # whether the layer object has scales, for all rows or per head
    has_row_scales: bool = False  # whether a scale follows each row
    has_group_scales: bool = False  # whether group scales follow the codes of a block
    is_rotated: bool = False  # whether rows are stored rotated (`_vllm_rotation`)

    def head_size_multiple(self) -> int:
        """The number that must divide head sizes."""
        return GROUP if self.has_group_scales else SCALE * self.columns if self.has_row_scales else 1

    @property
    def keeps_scales(self) -> bool:
        """Whether the cache itself stores scales."""
        return self.has_row_scales or self.has_group_scales


PLAIN = ("auto", "float16", "bfloat16")
# vLLM stores 8-bit floats as bytes, and names their dtype separately. Its e4m3 is float8_e4m3fnuz on AMD's MI300, and
# float8_e4m3fn on all other devices.
E4M3 = importlib.import_module("vllm.platforms").current_platform.fp8_dtype()
FP8 = {"fp8": E4M3, "fp8_e4m3": E4M3, "fp8_e5m2": torch.float8_e5m2}
KINDS = {
    **dict.fromkeys(PLAIN, CacheKind(None)),
    **{name: CacheKind(codes, has_layer_scales=True) for name, codes in FP8.items()},
    "int8_per_token_head": CacheKind(torch.int8, has_row_scales=True),
    "fp8_per_token_head": CacheKind(E4M3, has_row_scales=True),
    "int4_per_token_head": CacheKind(torch.uint8, columns=2, has_row_scales=True, is_rotated=True),
    "nvfp4": CacheKind(torch.uint8, columns=2, has_layer_scales=True, has_group_scales=True),
}


class Stored(NamedTuple):
    """A layer's cache as arguments of `ragged_paged_attention` and `write_kv_pages`."""

    kv_pages: tuple[torch.Tensor, torch.Tensor]
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    k_scale_pages: torch.Tensor | None = None
    v_scale_pages: torch.Tensor | None = None


def stored(kv_cache: torch.Tensor, kv_cache_dtype: str, head_size: int, layer: Any = None) -> Stored:
    """vLLM's cache as pages [P, G, K, D] and [P, G, K, D_v] with scales: those in the cache, and those of `layer`."""
    kind = KINDS[kv_cache_dtype]
    scales = (layer._k_scale, layer._v_scale) if kind.has_layer_scales and layer is not None else (None, None)
    if kind.has_group_scales:
        return _by_block(kv_cache, *scales)
    both = kv_cache.transpose(1, 2)
    if not kind.has_row_scales:
        both = both if kind.codes is None else both.view(kind.codes)
        return Stored((both[..., :head_size], both[..., head_size:]), *scales)
    width = head_size // kind.columns + SCALE
    codes, scale_pages = zip(*(_row_and_scale(half) for half in (both[..., :width], both[..., width:])), strict=True)
    return Stored((codes[0].view(kind.codes), codes[1].view(kind.codes)), *scales, *scale_pages)


def _row_and_scale(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of bytes [P, G, K, W] without the scales at their ends, and these scales [P, G, K]."""
    return rows[..., :-SCALE], rows[..., -SCALE:].view(torch.float32).squeeze(-1)


def _by_block(kv_cache: torch.Tensor, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None) -> Stored:
    """A cache with blocks [K codes | K scales | V codes | V scales], in each of which heads or positions come first."""
    blocks, slots, page, content = kv_cache.shape
    heads, codes = slots // 2, content * 8 // 9
    orders = {(page * content, content, 1): (heads, page), (content, slots * content, 1): (page, heads)}
    _, *inner = kv_cache.stride()
    rows = next((order for strides, order in orders.items() if [*strides] == inner), None)
    if rows is None:
        raise Unsupported(f"expected a cache of nvfp4 whose blocks are dense, got strides {list(kv_cache.stride())}")
    sides = kv_cache.as_strided((blocks, 2, heads * page * content), (kv_cache.stride(0), heads * page * content, 1))

    def part(begin: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        both = sides[:, :, heads * page * begin : heads * page * (begin + width)].unflatten(2, (*rows, width))
        k, v = both.unbind(1)
        return (k.transpose(1, 2), v.transpose(1, 2)) if rows == (heads, page) else (k, v)

    scale_pages = (pages.view(torch.float8_e4m3fn) for pages in part(codes, content - codes))
    return Stored(part(0, codes), k_scale, v_scale, *scale_pages)


def customized(spec: Any) -> Any:
    """vLLM's description of a layer's cache, changed to the size that scales and packed codes need."""
    kind = KINDS.get(spec.kv_quant_mode.name.lower())
    if kind is None or not kind.keeps_scales or spec.state_content_bytes is not None:
        return spec
    k, v = (size // kind.columns for size in (spec.head_size, spec.head_size_v))
    if kind.has_row_scales:
        return dataclasses.replace(spec, state_content_bytes=k + v + 2 * SCALE)
    content = k + spec.head_size // GROUP
    return dataclasses.replace(spec, num_head_slots=2 * spec.num_kv_heads, state_content_bytes=content)


def refusal(kv_cache_dtype: str, head_size: int) -> str | None:
    """Why a format cannot store heads of this size, or None if it can."""
    multiple = KINDS[kv_cache_dtype].head_size_multiple()
    if head_size % multiple:
        return (
            f"expected a head size of a multiple of {multiple} with kv_cache_dtype={kv_cache_dtype!r}, got {head_size}"
        )
    return None
