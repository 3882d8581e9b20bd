"""Ragged paged attention over latents on a CPU: `_latent`'s kernel with packed queries."""

from typing import Any

from ragged_attention.calls import RaggedMlaAttention
from ragged_attention.portable.numba import _latent_call
from ragged_attention.portable.numba._call import results_of, why_not
from ragged_attention.portable.numba._latent_call import KERNEL, Tile, heuristic, invariant_tile
from ragged_attention.portable.numba._sequences import max_sequences

__all__ = ["FEATURES", "KERNEL", "Tile", "heuristic", "invariant_tile", "run", "why_not"]
FEATURES = frozenset({
    "num_seqs", "d_v", "sm_scale", "causal", "sliding_window", "soft_cap", "sinks", "kv_scale", "rope_scale",
    "return_lse", "return_max_logits", "key_ranges", "cache_format", "cache_layout", "out_dtype",
})  # fmt: skip


def run(call: RaggedMlaAttention, tile: Tile, launch: Any) -> Any:
    operands = {"lists": launch.packed(call.page_indices), "lens": launch.contiguous(call.kv_lens)}
    numbers = {
        "max_num_seqs": max_sequences(call, call.max_num_seqs), "length": call.capacity,
        "num_ranges": call.num_ranges, "scales_rope": call.scales_rope,
    }  # fmt: skip
    results = _latent_call.run(
        call, tile, launch, call.kv_cache, operands, numbers, axes={"q": "token head", "lists": "seq"},
        lse_strides=(0, call.num_q_heads, 1), results=results_of(call),
    )  # fmt: skip
    return call.requested(out=results["out"], lse=results["lse"], max_logits=results["head_max_logits"])
