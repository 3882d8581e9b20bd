"""Ragged paged attention on a CPU: `_paged`'s kernel on the pages of the call."""

from typing import Any

from ragged_attention.calls import RaggedPagedAttention
from ragged_attention.portable.numba import _call
from ragged_attention.portable.numba._call import KERNEL, Tile, heuristic, invariant_tile, why_not

__all__ = ["FEATURES", "KERNEL", "Tile", "heuristic", "invariant_tile", "run", "why_not"]
FEATURES = frozenset({
    "num_seqs", "sm_scale", "causal", "sliding_window", "soft_cap", "sinks", "alibi_slopes", "relative_bias",
    "k_scale", "v_scale", "k_scale_pages", "v_scale_pages", "return_lse", "return_max_logits", "draft_mask",
    "key_ranges", "selected", "block_size", "out_dtype",
})  # fmt: skip


def run(call: RaggedPagedAttention, tile: Tile, launch: Any) -> Any:
    results = _call.run(call, tile, launch)
    return call.requested(out=results["out"], lse=results["lse"], max_logits=results["head_max_logits"])
