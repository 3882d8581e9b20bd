"""Attention of a few query tokens per sequence over a paged latent cache on a CPU, dense or of top-k lists.

A schedule is for kernels that divide their work before they start; here it has no use.
"""

from typing import Any

from ragged_attention.calls import MlaDecode
from ragged_attention.portable.numba import _latent_call
from ragged_attention.portable.numba._call import why_not as why_not
from ragged_attention.portable.numba._latent_call import KERNEL as KERNEL
from ragged_attention.portable.numba._latent_call import Tile as Tile
from ragged_attention.portable.numba._latent_call import heuristic as heuristic
from ragged_attention.portable.numba._latent_call import invariant_tile as invariant_tile

FEATURES = frozenset({
    "page_indices", "kv_lens", "indices", "d_v", "sm_scale", "causal", "sinks", "topk_lens", "extra_kv_cache",
    "extra_indices", "extra_topk_lens", "schedule", "cache_format", "cache_layout",
})  # fmt: skip


def run(call: MlaDecode, tile: Tile, launch: Any) -> tuple[Any, Any]:
    q = launch.packed(call.q)
    lists = launch.packed(call.indices if call.sparse else call.page_indices)
    steps = launch.strides(lists)
    _, num_q_heads, num_q_tokens = call.lse_shape
    results = _latent_call.run(
        call, tile, launch, q=q, q_shape=q.shape, q_strides=launch.strides(q)[:3], lists=lists,
        list_strides=(steps[0], steps[1] if call.sparse else 0, 0), length=call.topk if call.sparse else call.capacity,
        lens=call.topk_lens if call.sparse else call.kv_lens, lse_shape=call.lse_shape,
        lse_strides=(num_q_heads * num_q_tokens, 1, num_q_tokens), cache=call.kv_cache, sparse=call.sparse,
        causal=call.causal, extra_cache=call.extra_kv_cache, extra_lists=call.extra_indices,
        extra_lens=call.extra_topk_lens,
    )  # fmt: skip
    return results["out"], results["lse"]
