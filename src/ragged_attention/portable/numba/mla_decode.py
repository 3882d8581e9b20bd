"""Attention of a few query tokens per sequence over a paged latent cache on a CPU, dense or over top-k lists.

A schedule is ignored: this kernel divides its work when it starts.
"""

from typing import Any

from ragged_attention.calls import MlaDecode
from ragged_attention.portable.numba import _latent_call
from ragged_attention.portable.numba._call import why_not
from ragged_attention.portable.numba._latent_call import KERNEL, Tile, heuristic, invariant_tile

__all__ = ["FEATURES", "KERNEL", "Tile", "heuristic", "invariant_tile", "run", "why_not"]
FEATURES = frozenset({
    "page_indices", "kv_lens", "indices", "d_v", "sm_scale", "causal", "sliding_window", "soft_cap", "sinks",
    "topk_lens", "extra_kv_cache", "extra_indices", "extra_topk_lens", "schedule", "cache_format", "cache_layout",
    "out_dtype",
})  # fmt: skip


def run(call: MlaDecode, tile: Tile, launch: Any) -> tuple[Any, Any]:
    num_seqs, num_q_tokens, num_q_heads, d_v = call.out_shape
    operands = {
        "lists": launch.packed(call.indices if call.sparse else call.page_indices),
        "lens": call.topk_lens if call.sparse else call.kv_lens, "extra_kv": call.extra_kv_cache,
        "extra_lists": None if call.extra_indices is None else launch.packed(call.extra_indices),
        "extra_lens": call.extra_topk_lens,
    }  # fmt: skip
    numbers = {
        "max_num_seqs": num_seqs, "num_tokens": num_q_tokens, "length": call.topk if call.sparse else call.capacity,
        "extra_length": call.extra_topk, "out_seq_stride": num_q_tokens * num_q_heads * d_v,
    }  # fmt: skip
    axes = {"lists": "seq token" if call.sparse else "seq"}
    lse_strides = (num_q_heads * num_q_tokens, 1, num_q_tokens)
    results = _latent_call.run(call, tile, launch, call.kv_cache, operands, numbers, axes=axes, lse_strides=lse_strides)
    return results["out"], results["lse"]
