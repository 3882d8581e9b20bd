"""Attention of each query token over its own list of latent rows on a CPU."""

from typing import Any

from ragged_attention.calls import SparseMlaPrefill
from ragged_attention.portable.numba import _latent_call
from ragged_attention.portable.numba._call import why_not
from ragged_attention.portable.numba._latent_call import KERNEL, Tile, heuristic, invariant_tile

__all__ = ["FEATURES", "KERNEL", "Tile", "heuristic", "invariant_tile", "run", "why_not"]
FEATURES = frozenset({
    "sm_scale", "d_v", "sinks", "topk_lens", "cache_format", "cache_layout", "deterministic", "out_dtype",
})  # fmt: skip


def run(call: SparseMlaPrefill, tile: Tile, launch: Any) -> tuple[Any, Any, Any]:
    """Run the call as a decode with one token per sequence."""
    num_tokens, num_q_heads, d_v = call.out_shape
    numbers = {
        "max_num_seqs": num_tokens, "num_tokens": 1, "sparse": True, "length": call.topk,
        "out_seq_stride": num_q_heads * d_v,
    }  # fmt: skip
    out, max_logits, lse = ((result.shape, result.dtype) for result in call.results())
    results = _latent_call.run(
        call, tile, launch, launch.packed(call.kv), {"lists": launch.packed(call.indices), "lens": call.topk_lens},
        numbers, axes={"q": "seq head", "lists": "seq head"}, lse_strides=(num_q_heads, 0, 1),
        results={"out": out, "max_logits": max_logits, "lse": lse},
    )  # fmt: skip
    return results["out"], results["max_logits"], results["lse"]
