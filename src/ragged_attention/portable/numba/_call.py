"""Calls of attention over pages in the terms of `_paged`'s record, whatever their layout."""

import dataclasses
import sys
from typing import Any

from ragged_attention.calls import RaggedPagedAttention, dtype_name
from ragged_attention.calls.base import Call
from ragged_attention.errors import InvalidInput
from ragged_attention.portable.numba import _paged, _sequences
from ragged_attention.portable.numba._formats import CODES
from ragged_attention.portable.numba._kernels import Kernel, bits_of
from ragged_attention.portable.numba._scales import numbers_of

KERNEL = Kernel("paged_attention", _paged.FIELDS, _paged.plan, _paged.work)
ROWS = 64  # of a tile, about: what a core's second cache holds beside a tile of keys


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """What may be tuned.

    Args:
        block_q: queries of a sequence that a program takes.
        block_kv: keys converted to float32 at a time, a multiple of 8.
    """

    block_q: int
    block_kv: int

    def __post_init__(self) -> None:
        if not isinstance(self.block_q, int) or not 1 <= self.block_q <= 1024:
            raise InvalidInput(f"expected block_q from 1 to 1024, got {self.block_q!r}")
        if not isinstance(self.block_kv, int) or self.block_kv % 8 or not 8 <= self.block_kv <= 1024:
            raise InvalidInput(f"expected block_kv to be a multiple of 8 from 8 to 1024, got {self.block_kv!r}")


def heuristic(call: Any) -> Tile:
    return Tile(block_q=max(ROWS // call.group, 1), block_kv=32)


def cannot_run(call: Call) -> str | None:
    """Why these kernels do not run where the call's arrays are, or None."""
    if call.device.platform != "cpu":
        return f"runs on CPUs, got a call from {call.device.platform}"
    if sys.platform not in ("linux", "darwin"):
        return f"runs on Linux and macOS, got {sys.platform}"
    return None


AXES = ("page", "slot", "head")  # of the strides of pages


def strides_of(array: Any, launch: Any, axes: str) -> tuple[int, ...]:
    """The strides of an array's axes (page, slot, head, column), the order of which `axes` gives as letters."""
    steps = launch.strides(array)
    return tuple(steps[axes.index(letter)] for letter in "PGK")


def run(
    call: RaggedPagedAttention, tile: Tile, launch: Any, *, layout: int = _sequences.PACKED,
    scales: tuple[Any, Any] = (None, None), axes: str = "PGKD",
) -> dict[str, Any]:  # fmt: skip
    """Enqueue the kernel; returns out and lse by name.

    `axes` are those of the pages, `scales` arrays of one scale per position and head that lie as the pages do.
    """
    q = launch.packed(call.q)
    q_strides = launch.strides(q)
    if call.combined:
        page, slot, head = strides_of(call.kv_pages, launch, axes)
        k_pages = v_pages = call.kv_pages
        steps, v_offset = {"k": (page, slot, 2 * head), "v": (page, slot, 2 * head)}, head
    else:
        k_pages, v_pages = call.kv_pages
        steps, v_offset = {"k": strides_of(k_pages, launch, axes), "v": strides_of(v_pages, launch, axes)}, 0
    tables = launch.packed(call.page_indices)
    k_scale, k_numbers = numbers_of("k_scale", call.k_scale, launch)
    v_scale, v_numbers = numbers_of("v_scale", call.v_scale, launch)
    mask = None if call.draft_mask is None else launch.packed(call.draft_mask)
    for name, array in zip(("k_scales", "v_scales"), scales, strict=True):
        steps[name] = (0, 0, 0) if array is None else strides_of(array, launch, axes)
    counted = call.num_seqs is not None and not isinstance(call.num_seqs, int)
    return launch.native(
        KERNEL,
        {
            "q": q,
            "k_pages": k_pages,
            "v_pages": v_pages,
            "kv_lens": launch.contiguous(call.kv_lens),
            "page_indices": tables,
            "cu_q_lens": launch.contiguous(call.cu_q_lens) if layout == _sequences.PACKED else None,
            "cu_kv_lens": None,
            "num_seqs": call.num_seqs if counted else None,
            "sinks": None if call.sinks is None else launch.contiguous(call.sinks),
            "k_scale": k_scale,
            "v_scale": v_scale,
            "k_scales": scales[0],
            "v_scales": scales[1],
            "draft_mask": mask,
        },
        {"out": (call.out_shape, call.q.dtype), "lse": (call.q.shape[:2], "float32") if call.return_lse else None},
        {
            "num_tokens": call.num_tokens,
            "num_q_heads": call.num_q_heads,
            "num_kv_heads": call.num_kv_heads,
            "head_dim": call.head_dim,
            "v_head_dim": call.v_head_dim,
            "max_num_seqs": call.num_seqs if isinstance(call.num_seqs, int) else call.max_num_seqs,
            "layout": layout,
            "q_format": CODES[dtype_name(call.q)],
            "q_token_stride": q_strides[0],
            "q_head_stride": q_strides[1],
            "num_pages": call.num_pages,
            "page_size": call.page_size,
            "capacity": call.capacity,
            "table_stride": launch.strides(tables)[0] if len(tables.shape) > 1 else 0,
            "cache_format": CODES[call.cache_dtype],
            **{f"{name}_{axis}_stride": step for name, given in steps.items() for axis, step in zip(AXES, given, strict=True)},
            "v_offset": v_offset,
            "causal": call.causal,
            "window": call.sliding_window or 0,
            "drafted": mask is not None,
            "draft_width": 0 if mask is None else mask.shape[1],
            "draft_stride": 0 if mask is None else launch.strides(mask)[0],
            "scale": bits_of(call.scale),
            "soft_cap": bits_of(call.soft_cap or 0.0),
            **k_numbers,
            **v_numbers,
            "block_q": tile.block_q,
            "block_kv": tile.block_kv,
            "num_threads": launch.num_threads,
        },
    )
