"""How calls of attention over pages of K and V become records of `_paged`'s kernel."""

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
from ragged_attention.portable.numba._scales import numbers_of
from ragged_attention.portable.numba._splits import expect_splits

KERNEL = Kernel("paged_attention", _paged.FIELDS, _paged.plan, _paged.work)
SPLITS_PER_SEQUENCE = 8  # in batch-invariant mode
TILE_FLOATS = 384 * 256  # of queries and results: many rows share the keys read, and the second-level cache holds all


def expect_block(name: str, value: int, step: int = 1) -> None:
    """Check a tile's number of rows or keys."""
    if not isinstance(value, int) or value % step or not step <= value <= 1024:
        condition = "from 1" if step == 1 else f"to be a multiple of {step} from {step}"
        raise InvalidInput(f"expected {name} {condition} to 1024, got {value!r}")


@dataclasses.dataclass(frozen=True, slots=True)
class Blocks:
    """The tunable parameters of kernels that do not split the keys of a query.

    Args:
        block_q: queries of a sequence that a program takes.
        block_kv: keys converted or multiplied at a time, a multiple of 8.
    """

    block_q: int
    block_kv: int

    def __post_init__(self) -> None:
        expect_block("block_q", self.block_q)
        expect_block("block_kv", self.block_kv, 8)


@dataclasses.dataclass(frozen=True, slots=True)
class Tile(Blocks):
    """The tunable parameters.

    Args:
        num_splits: the most splits of the keys that a query sees; the number depends on these keys alone. 0: a block
            has splits according to its share of all work.
    """

    num_splits: int = 0

    def __post_init__(self) -> None:
        Blocks.__post_init__(self)
        expect_splits(self.num_splits)


def block_q_of(call: Any) -> int:
    """The number of queries that fill a tile."""
    rows = min(TILE_FLOATS // (2 * call.head_dim), 512)
    return max(rows // call.group, 1)


def heuristic(call: Any) -> Tile:
    """A tile with few keys where memory bandwidth limits the call, so that the prefetches are spread evenly.

    Decoding 8-bit keys takes longer than fetching them, so their tile has more keys.
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
    """Why these kernels do not take a call with queries, or None."""
    if (dtype := dtype_name(call.q)) not in CODES:
        return f"takes q.dtype float32, bfloat16 or float16, got {dtype}"
    return cannot_run(call)


AXES = ("page", "slot", "head")  # whose strides a kernel gets


def strides_of(array: Any, launch: Any, axes: str) -> tuple[int, int, int]:
    """The strides of page, slot and head in an array whose axes are named by the letters `axes`."""
    steps = launch.strides(array)
    page, slot, head = (steps[axes.index(letter)] for letter in "PGK")
    return page, slot, head


def _named(steps: dict[str, tuple[int, int, int]]) -> dict[str, int]:
    return {f"{name}_{axis}_stride": step for name, of in steps.items() for axis, step in zip(AXES, of, strict=True)}


def strides_of_pages(call: Any, axes: str, launch: Any) -> dict[str, int]:
    """The strides of K and of V, and the offset from K to V in pages that hold both."""
    if not call.combined:
        pair = zip("kv", call.kv_pages, strict=True)
        return _named({name: strides_of(pages, launch, axes) for name, pages in pair}) | {"v_offset": 0}
    page, slot, head = strides_of(call.kv_pages, launch, axes)
    return _named(dict.fromkeys("kv", (page, slot, 2 * head))) | {"v_offset": head}


def strides_of_scales(scales: tuple[Any, Any], axes: str, launch: Any) -> dict[str, int]:
    """The strides of arrays of scales laid out like the pages; 0 if there are none."""
    pair = zip(("k_scales", "v_scales"), scales, strict=True)
    return _named({name: (0, 0, 0) if array is None else strides_of(array, launch, axes) for name, array in pair})


def strides_of_rows(name: str, array: Any, launch: Any) -> dict[str, int]:
    """The strides of token and head of an array [T, H, D]."""
    token, head, _ = launch.strides(array)
    return {f"{name}_token_stride": token, f"{name}_head_stride": head}


def attention_numbers(call: Any, q: Any, launch: Any) -> dict[str, Any]:
    """The numbers that paged and packed attention share."""
    return {
        "num_q_heads": call.num_q_heads, "num_kv_heads": call.num_kv_heads, "head_dim": call.head_dim,
        "v_head_dim": call.v_head_dim, "q_format": CODES[dtype_name(q)], **strides_of_rows("q", q, launch),
        "causal": call.causal, "window": call.sliding_window or 0, "scale": call.scale,
        "soft_cap": call.soft_cap or 0.0,
    }  # fmt: skip


def run(
    call: RaggedPagedAttention, tile: Tile, launch: Any, *, layout: int = _sequences.PACKED,
    scales: tuple[Any, Any] = (None, None), axes: str = "PGKD",
) -> dict[str, Any]:  # fmt: skip
    """Enqueue the kernel; returns out and lse by name.

    `axes` names the axes of the pages; `scales` are arrays with one scale per position and head, laid out like the
    pages.
    """
    q, tables = launch.packed(call.q), launch.packed(call.page_indices)
    k_pages, v_pages = (call.kv_pages, call.kv_pages) if call.combined else call.kv_pages
    k_scale, k_numbers = numbers_of("k_scale", call.k_scale, launch)
    v_scale, v_numbers = numbers_of("v_scale", call.v_scale, launch)
    mask = None if call.draft_mask is None else launch.packed(call.draft_mask)
    return KERNEL.launch(
        launch,
        tile,
        {
            "q": q, "k_pages": k_pages, "v_pages": v_pages, "kv_lens": launch.contiguous(call.kv_lens),
            "page_indices": tables,
            "cu_q_lens": launch.contiguous(call.cu_q_lens) if layout == _sequences.PACKED else None,
            "num_seqs": None if isinstance(call.num_seqs, int) else call.num_seqs,
            "sinks": None if call.sinks is None else launch.contiguous(call.sinks), "k_scale": k_scale,
            "v_scale": v_scale, "k_scales": scales[0], "v_scales": scales[1], "draft_mask": mask,
        },
        {"out": (call.out_shape, call.result_dtype), "lse": (call.q.shape[:2], "float32") if call.return_lse else None},
        {
            **attention_numbers(call, q, launch), "out_format": CODES[call.out_dtype or dtype_name(q)],
            "num_tokens": call.num_tokens,
            "max_num_seqs": call.num_seqs if isinstance(call.num_seqs, int) else call.max_num_seqs, "layout": layout,
            "num_pages": call.num_pages, "page_size": call.page_size, "capacity": call.capacity,
            "table_stride": launch.strides(tables)[0] if len(tables.shape) > 1 else 0,
            "cache_format": CODES[call.cache_dtype], "drafted": mask is not None,
            "draft_width": 0 if mask is None else mask.shape[1],
            "draft_stride": 0 if mask is None else launch.strides(mask)[0], **strides_of_pages(call, axes, launch),
            **strides_of_scales(scales, axes, launch), **k_numbers, **v_numbers,
        },
    )  # fmt: skip
