"""Ragged paged attention on a CPU: `_paged`'s kernel on the pages of the call."""

from typing import Any

from ragged_attention.calls import RaggedPagedAttention
from ragged_attention.portable.numba import _call
from ragged_attention.portable.numba._call import KERNEL as KERNEL
from ragged_attention.portable.numba._call import Tile as Tile
from ragged_attention.portable.numba._call import heuristic as heuristic
from ragged_attention.portable.numba._call import invariant_tile as invariant_tile
from ragged_attention.portable.numba._call import why_not as why_not

FEATURES = frozenset({
    "num_seqs", "sm_scale", "causal", "sliding_window", "soft_cap", "sinks", "k_scale", "v_scale", "return_lse",
    "draft_mask", "out_dtype",
})  # fmt: skip


def run(call: RaggedPagedAttention, tile: Tile, launch: Any) -> Any:
    results = _call.run(call, tile, launch)
    return (results["out"], results["lse"]) if call.return_lse else results["out"]
