"""Turns attention calls over pages of K and V into records of `_paged`'s kernel."""

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ragged_attention.calls import RaggedPagedAttention, dtype_name
from ragged_attention.calls.base import Call
from ragged_attention.calls.cache_formats import KvFormat
from ragged_attention.calls.fields import FLOATS
from ragged_attention.errors import InvalidInput
from ragged_attention.portable.numba import _paged, _sequences
from ragged_attention.portable.numba._compiling import WHY_NOT
from ragged_attention.portable.numba._formats import CODES, FLOAT16, FLOAT32
from ragged_attention.portable.numba._kernels import Kernel
from ragged_attention.portable.numba._records import stride_names
from ragged_attention.portable.numba._scaled_rows import side_numbers
from ragged_attention.portable.numba._splits import expect_segment, expect_splits
from ragged_attention.portable.numba._vectors import LANES, PAIRS

KERNEL = Kernel("paged_attention", _paged.FIELDS, _paged.plan, _paged.work)
# Keys per segment in batch-invariant mode: without lists, and with lists, which name only some keys of a range.
SEGMENT, SEGMENT_OF_LISTS = 2048, 8192
TILE_FLOATS = 384 * 256  # maximum floats in a tile's queries and results; they should fit the L2 cache
FIRST_CACHE = 32 * 1024  # bytes that every core's L1 cache is assumed to have
WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2}  # bytes per number; numbers in other formats take at most one
MULTIPLES = {"block_q": 1, "block_rows": 1, "block_kv": 8}  # by parameter: its value must be a multiple of this number
EXPECTED = {"num_splits": expect_splits, "segment_kv": expect_segment}


def expect_tile(tile: Any) -> None:
    """Raise InvalidInput if a parameter of a tile is out of range or not a multiple of its number in MULTIPLES."""
    for field in dataclasses.fields(tile):
        value = getattr(tile, field.name)
        if field.name in EXPECTED:
            EXPECTED[field.name](value)
            continue
        step = MULTIPLES[field.name]
        if not isinstance(value, int) or value % step or not step <= value <= 1024:
            condition = "from 1" if step == 1 else f"to be a multiple of {step} from {step}"
            raise InvalidInput(f"expected {field.name} {condition} to 1024, got {value!r}")


@dataclasses.dataclass(frozen=True, slots=True)
class Blocks:
    """The tunable parameters of kernels without a tunable number of KV splits.

    Args:
        block_q: query tokens of a sequence in a tile.
        block_kv: keys in a tile, a multiple of 8.
    """

    block_q: int
    block_kv: int
    __post_init__ = expect_tile


@dataclasses.dataclass(frozen=True, slots=True)
class Tile(Blocks):
    """The tunable parameters of `_paged`'s kernel.

    Args:
        segment_kv: keys per segment. The first segment of a sequence has its keys [0, segment_kv). Segments are
            attended to in order, and their results are merged in the same order. So a row's bits depend only on the
            keys that it sees. 0: there are no segments, and blocks are split in proportion to their work.
    """

    segment_kv: int = 0


def block_q_of(call: Any) -> int:
    """The number of query tokens that fill a tile."""
    rows = min(TILE_FLOATS // (2 * call.head_dim), 512)
    return max(rows // call.group, 1)


def converts(call: Any) -> bool:
    """Whether keys or values are stored as codes of at most 8 bits."""
    return any(form.codes not in FLOATS for form in (call.k_format, call.v_format))


def tile_of_lists(call: Any, decodes: bool = False) -> Tile:
    """The tile for a call with lists of blocks; `decodes` says that each sequence of a paged call has one query.

    Many queries share the keys that a tile reads, and each query visits the keys that its own list names. So a tile is
    as large as the L2 cache allows. Decode is limited by memory bandwidth, so its tiles are small, as in `heuristic`.
    Lists of blocks of fewer than 16 keys name few keys of a range, so a tile covers more keys.
    """
    small = call.block_size < 16
    if decodes:
        keys = 64 if converts(call) else 32
        return Tile(block_q=block_q_of(call), block_kv=4 * keys if small else keys)
    return Tile(block_q=block_q_of(call), block_kv=512 if small else 256)


def keys_of_a_decode(call: Any) -> int:
    """The keys in a tile of a decode, from 16 to 64: they and their values should fill half of a core's L1 cache."""
    k_size, v_size = (WIDTHS.get(form.codes, 1) for form in (call.k_format, call.v_format))
    keys = FIRST_CACHE // 2 // (k_size * call.head_dim + v_size * call.v_head_dim)
    return min(max(keys // 16 * 16, 16), 64)


def keys_of_a_prompt(call: Any) -> int:
    """The keys in a tile of a prefill: more keys if they are pairs of bfloat16, which take half the memory."""
    return 384 if PAIRS and dtype_name(call.q) == "bfloat16" else 128


def heuristic(call: Any) -> Tile:
    """The tile for a call. Decode is limited by memory bandwidth: few keys per tile spread its prefetches evenly."""
    if call.selected is not None:
        return tile_of_lists(call, call.num_tokens <= call.max_num_seqs)
    if call.num_tokens <= 4 * call.max_num_seqs:
        return Tile(block_q=block_q_of(call), block_kv=keys_of_a_decode(call))
    return Tile(block_q=block_q_of(call), block_kv=keys_of_a_prompt(call))


def invariant_tile(call: Any) -> Tile:
    """A tile whose results for a query depend only on that query and the keys that it sees.

    With lists, a tile has a single query. Otherwise, the lists of neighbouring queries would determine which keys are
    multiplied together.
    """
    if call.selected is None:
        keys = keys_of_a_decode(call) if call.k_format.codes == "float32" else 64  # a prefill of pairs needs more keys
        return Tile(block_q=block_q_of(call), block_kv=keys, segment_kv=SEGMENT)
    return Tile(block_q=1, block_kv=256, segment_kv=SEGMENT_OF_LISTS)


def cannot_run(call: Call) -> str | None:
    """Why no kernel of this backend can run on this machine or the call's device, or None."""
    if WHY_NOT:
        return WHY_NOT
    if call.device.platform != "cpu":
        return f"runs on CPUs, got a call from {call.device.platform}"
    if sys.platform not in ("linux", "darwin"):
        return f"runs on Linux and macOS, got {sys.platform}"
    return None


def why_not(call: Any) -> str | None:
    """Why the attention kernels cannot run a call, or None."""
    if (dtype := dtype_name(call.q)) not in CODES:
        return f"takes q.dtype float32, bfloat16 or float16, got {dtype}"
    return cannot_run(call)


def numbers_of_pages(call: Any, launch: Any) -> dict[str, int]:
    """The strides of K and V and the offset from K to V, if the same pages hold both; empty otherwise."""
    if not call.combined:
        return {}
    page, slot, head, _ = launch.strides(call.kv_pages)
    names = (name for operand in ("k_pages", "v_pages") for name in stride_names(operand, "page slot head"))
    return dict(zip(names, 2 * (page, slot, 2 * head), strict=True)) | {"v_offset": head}


def numbers_of_sides(forms: Sequence[KvFormat], scales: Sequence[Any], launch: Any) -> dict[str, int]:
    """The numbers that describe the rows of K and of V; `scales` has their scale pages, None for rows without."""
    numbers: dict[str, int] = {}
    for prefix, form, of in zip(("k_", "v_"), forms, scales, strict=True):
        numbers |= side_numbers(prefix, form, of, () if of is None else launch.strides(of))
    return numbers


def numbers_of_products(q: Any, codes: Sequence[int], width: int, v_width: int, *, exact: bool) -> dict[str, int]:
    """The numbers `pairs` and `floats` of a kernel's record: 1 for what the kernel multiplies, else 0.

    Pairs are of bfloat16. They must fill whole vectors, and bfloat16 must represent all queries, keys and values
    exactly. Keys and values are stored in the formats `codes`. `exact` says whether bfloat16 also represents the
    numbers that the kernel computes from queries and keys before it multiplies them.
    """
    are_exact = dtype_name(q) == "bfloat16" and FLOAT32 not in codes and FLOAT16 not in codes
    pairs = PAIRS and exact and are_exact and width % (2 * LANES) == 0 and v_width % LANES == 0
    return {"pairs": int(pairs), "floats": int(not pairs)}


def products_of_sides(call: Any, sides: Mapping[str, int], *, scaled: bool) -> dict[str, int]:
    """`numbers_of_products` for K and V, which `sides` describes; `scaled` says whether their rows have scales.

    With lists, rows are multiplied by their scales as they are read, and bfloat16 may not represent the products.
    """
    codes, exact = (sides["k_codes"], sides["v_codes"]), not (scaled and call.selected is not None)
    return numbers_of_products(call.q, codes, call.head_dim, call.v_head_dim, exact=exact)


def numbers_of_lists(call: Any) -> dict[str, int]:
    """The sizes of `selected`: lists per query, entries per list, keys per block. They are 0 without `selected`."""
    if call.selected is None:
        return dict.fromkeys(("num_lists", "num_selected", "block_size"), 0)
    return {"num_lists": call.selected.shape[1], "num_selected": call.num_selected, "block_size": call.block_size}


def branches_of_lists(call: Any, *, scaled: bool) -> dict[str, int]:
    """The numbers that select the branches for calls with or without lists; `scaled` says whether rows have scales."""
    listed, biased = call.selected is not None, call.alibi_slopes is not None or call.relative_bias is not None
    needed = {"unlisted": not listed, "listed_scales": listed and scaled, "listed_biases": listed and biased}
    return {name: int(value) for name, value in needed.items()}


def numbers_of_bias(call: Any) -> dict[str, int]:
    """The sizes of `relative_bias`, 0 without one."""
    if call.relative_bias is None:
        return dict.fromkeys(("bias_width", "bias_stride", "bias_at_own"), 0)
    width, stride = call.relative_bias.shape[-1], math.prod(call.relative_bias.shape[1:])
    stride = stride if len(call.relative_bias.shape) == 3 else 0
    return {"bias_width": width, "bias_stride": stride, "bias_at_own": call.bias_at_own}


def results_of(call: Any) -> dict[str, tuple[Any, Any]]:
    """The shape and dtype of each result of an attention call, by its name in the kernels.

    The result `max_logits` is `head_max_logits` there, because the kernels' own `max_logits` is [T, H].
    """
    return {
        "head_max_logits" if name == "max_logits" else name: (result.shape, result.dtype)
        for name, result in call.named_results().items()
    }


def run(
    call: RaggedPagedAttention, tile: Tile, launch: Any, *, layout: int = _sequences.PACKED,
    scales: tuple[Any, Any] | None = None, axes: str = "page slot head",
) -> dict[str, Any]:  # fmt: skip
    """Launch the kernel; returns the results by name.

    `axes` names the leading axes of the pages. `scales` are the scales of K and of V, one per slot and head, in arrays
    with the same axes. Without `scales`, the call's scale pages are used.
    """
    forms = call.k_format, call.v_format
    if scales is None:
        scales = call.scale_pages
    else:
        forms = tuple(form if of is None else dataclasses.replace(form, scales=dtype_name(of))
                      for form, of in zip(forms, scales, strict=True))  # fmt: skip
    k_pages, v_pages = (call.kv_pages, call.kv_pages) if call.combined else call.kv_pages
    pages = {"k_pages": k_pages, "v_pages": v_pages, "k_scales": scales[0], "v_scales": scales[1]}
    drafted = call.draft_mask is not None
    sides, scaled = numbers_of_sides(forms, scales, launch), any(of is not None for of in scales)
    numbers = {
        "max_num_seqs": _sequences.max_sequences(call, call.max_num_seqs), "layout": layout, "drafted": drafted,
        "draft_width": call.draft_mask.shape[1] if drafted else 0, "num_ranges": call.num_ranges,
        "out_format": CODES[call.out_dtype or dtype_name(call.q)], **numbers_of_pages(call, launch),
        **numbers_of_bias(call), **numbers_of_lists(call), **branches_of_lists(call, scaled=scaled), **sides,
        **products_of_sides(call, sides, scaled=scaled),
        "decode_kv": 0 if tile.segment_kv else keys_of_a_decode(call),  # 0: segments need tiles of one size
    }  # fmt: skip
    axes_of_pages = dict.fromkeys(pages, axes)
    return KERNEL.launch(launch, call, tile, pages, numbers, axes=axes_of_pages, results=results_of(call))
