"""Attention of packed sequences to packed sequences on a CPU: `_paged`'s kernel with one key per page."""

from typing import Any

from ragged_attention.calls import VarlenAttention, dtype_name
from ragged_attention.calls.cache_formats import UNSCALED_FORMATS
from ragged_attention.portable.numba import _call
from ragged_attention.portable.numba._call import (
    KERNEL,
    Tile,
    block_q_of,
    branches_of_lists,
    keys_of_a_prompt,
    numbers_of_bias,
    numbers_of_lists,
    numbers_of_sides,
    products_of_sides,
    results_of,
    tile_of_lists,
    why_not,
)
from ragged_attention.portable.numba._formats import CODES
from ragged_attention.portable.numba._sequences import PACKED

__all__ = ["FEATURES", "KERNEL", "Tile", "heuristic", "invariant_tile", "run", "why_not"]
FEATURES = frozenset({
    "max_q_len", "max_kv_len", "sm_scale", "causal", "sliding_window", "soft_cap", "sinks", "alibi_slopes",
    "relative_bias", "key_ranges", "selected", "block_size", "return_max_logits", "deterministic",
})  # fmt: skip


def heuristic(call: VarlenAttention) -> Tile:
    if call.selected is not None:
        return tile_of_lists(call)
    return Tile(block_q=block_q_of(call), block_kv=keys_of_a_prompt(call))


def invariant_tile(call: VarlenAttention) -> Tile:
    return _call.invariant_tile(call.as_ragged())


def run(call: VarlenAttention, tile: Tile, launch: Any) -> tuple[Any, ...]:
    pages = {"k_pages": launch.packed(call.k), "v_pages": launch.packed(call.v)}
    sides = numbers_of_sides((UNSCALED_FORMATS[dtype_name(call.q)],) * 2, (None, None), launch)
    numbers = {
        "num_tokens": call.num_q_tokens, "max_num_seqs": call.num_seqs, "layout": PACKED, "page_size": 1,
        "num_pages": call.num_kv_tokens, "capacity": call.num_kv_tokens, "out_format": CODES[dtype_name(call.q)],
        "num_ranges": call.num_ranges, **numbers_of_lists(call), **numbers_of_bias(call),
        **branches_of_lists(call, scaled=False),
        **sides, **products_of_sides(call, sides, scaled=False),
    }  # fmt: skip
    axes, results = dict.fromkeys(pages, "page head"), results_of(call)
    made = KERNEL.launch(launch, call, tile, pages, numbers, axes=axes, results=results)
    return tuple([made[name] for name in results])
