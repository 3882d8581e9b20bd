"""Turns attention calls over pages of K and V into records of `_paged`'s kernel."""

import dataclasses
import sys
from typing import Any

from ragged_attention.calls import QUANTIZED, RaggedPagedAttention, dtype_name
from ragged_attention.calls.base import Call
from ragged_attention.errors import InvalidInput
from ragged_attention.portable.numba import _paged, _sequences
from ragged_attention.portable.numba._compiling import WHY_NOT
from ragged_attention.portable.numba._formats import CODES
from ragged_attention.portable.numba._kernels import Kernel
from ragged_attention.portable.numba._records import stride_names
from ragged_attention.portable.numba._splits import expect_splits

KERNEL = Kernel("paged_attention", _paged.FIELDS, _paged.plan, _paged.work)
SPLITS_PER_SEQUENCE = 8  # in batch-invariant mode
TILE_FLOATS = 384 * 256  # floats of a tile's queries and results: they fit the L2 cache, and many rows share each key
MULTIPLES = {"block_q": 1, "block_rows": 1, "block_kv": 8}  # each block size must be a multiple of its number here


def expect_tile(tile: Any) -> None:
    """Check a tile's numbers of rows and keys, and its number of splits if it has one."""
    for field in dataclasses.fields(tile):
        value, step = getattr(tile, field.name), MULTIPLES.get(field.name)
        if step is None:
            expect_splits(value)
        elif not isinstance(value, int) or value % step or not step <= value <= 1024:
            condition = "from 1" if step == 1 else f"to be a multiple of {step} from {step}"
            raise InvalidInput(f"expected {field.name} {condition} to 1024, got {value!r}")


@dataclasses.dataclass(frozen=True, slots=True)
class Blocks:
    """The tunable parameters of kernels that do not split the keys of a query.

    Args:
        block_q: queries of a sequence that a program takes.
        block_kv: keys converted or multiplied at a time, a multiple of 8.
    """

    block_q: int
    block_kv: int
    __post_init__ = expect_tile


@dataclasses.dataclass(frozen=True, slots=True)
class Tile(Blocks):
    """The tunable parameters.

    Args:
        num_splits: the maximum number of KV splits per query; their number then depends only on how many keys the query
            sees. 0: blocks are split in proportion to their work.
    """

    num_splits: int = 0


def block_q_of(call: Any) -> int:
    """The number of queries that fill a tile."""
    rows = min(TILE_FLOATS // (2 * call.head_dim), 512)
    return max(rows // call.group, 1)


def heuristic(call: Any) -> Tile:
    """A tile; it has few keys if memory bandwidth limits the call, so that prefetches are spread evenly.

    Converting 8-bit keys takes longer than fetching them, so a tile has more of them.
    """
    block_kv = 96
    if call.num_tokens <= 4 * call.max_num_seqs:
        block_kv = 64 if call.cache_dtype in QUANTIZED else 16
    return Tile(block_q=block_q_of(call), block_kv=block_kv)


def invariant_tile(call: Any) -> Tile:
    """A tile that does not depend on the batch."""
    return Tile(block_q=block_q_of(call), block_kv=64, num_splits=SPLITS_PER_SEQUENCE)


def cannot_run(call: Call) -> str | None:
    """Why these kernels do not run on the device of the call, or None."""
    if WHY_NOT:
        return WHY_NOT
    if call.device.platform != "cpu":
        return f"runs on CPUs, got a call from {call.device.platform}"
    if sys.platform not in ("linux", "darwin"):
        return f"runs on Linux and macOS, got {sys.platform}"
    return None


def why_not(call: Any) -> str | None:
    """Why these kernels do not take an attention call, or None."""
    if (dtype := dtype_name(call.q)) not in CODES:
        return f"takes q.dtype float32, bfloat16 or float16, got {dtype}"
    return cannot_run(call)


def numbers_of_pages(call: Any, launch: Any) -> dict[str, int]:
    """The strides of K and V, and the offset from K to V, if the same pages hold both."""
    if not call.combined:
        return {}
    page, slot, head, _ = launch.strides(call.kv_pages)
    names = (name for operand in ("k_pages", "v_pages") for name in stride_names(operand, "page slot head"))
    return dict(zip(names, 2 * (page, slot, 2 * head), strict=True)) | {"v_offset": head}


def run(
    call: RaggedPagedAttention, tile: Tile, launch: Any, *, layout: int = _sequences.PACKED,
    scales: tuple[Any, Any] = (None, None), axes: str = "page slot head",
) -> dict[str, Any]:  # fmt: skip
    """Enqueue the kernel; returns out and lse by name.

    `axes` names the axes of the pages. `scales` are arrays with one scale per position and head, with the same axes.
    """
    k_pages, v_pages = (call.kv_pages, call.kv_pages) if call.combined else call.kv_pages
    pages = {"k_pages": k_pages, "v_pages": v_pages, "k_scales": scales[0], "v_scales": scales[1]}
    drafted = call.draft_mask is not None
    numbers = {
        "max_num_seqs": _sequences.max_sequences(call, call.max_num_seqs), "layout": layout, "drafted": drafted,
        "draft_width": call.draft_mask.shape[1] if drafted else 0,
        "out_format": CODES[call.out_dtype or dtype_name(call.q)], **numbers_of_pages(call, launch),
    }  # fmt: skip
    return KERNEL.launch(launch, call, tile, pages, numbers, axes=dict.fromkeys(pages, axes))
