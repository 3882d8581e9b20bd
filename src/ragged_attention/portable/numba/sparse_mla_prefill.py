"""Attention of each query token over its own list of latent rows on a CPU."""

from typing import Any

from ragged_attention.calls import SparseMlaPrefill
from ragged_attention.portable.numba import _latent_call
from ragged_attention.portable.numba._call import why_not as why_not
from ragged_attention.portable.numba._latent_call import KERNEL as KERNEL
from ragged_attention.portable.numba._latent_call import Tile as Tile
from ragged_attention.portable.numba._latent_call import heuristic as heuristic
from ragged_attention.portable.numba._latent_call import invariant_tile as invariant_tile

FEATURES = frozenset({"sm_scale", "d_v", "sinks", "topk_lens", "cache_format", "cache_layout", "deterministic"})


def run(call: SparseMlaPrefill, tile: Tile, launch: Any) -> tuple[Any, Any, Any]:
    """As a decode of one token per sequence."""
    q, kv, lists = launch.packed(call.q), launch.packed(call.kv), launch.packed(call.indices)
    token, head, _ = launch.strides(q)
    steps = launch.strides(lists)
    num_tokens, num_q_heads, _ = call.out_shape
    results = _latent_call.run(
        call, tile, launch, q=q, q_shape=(num_tokens, 1, num_q_heads, call.d_qk), q_strides=(token, 0, head),
        lists=lists, list_strides=(steps[0], 0, steps[1]), length=call.topk, lens=call.topk_lens,
        lse_shape=(num_tokens, num_q_heads), lse_strides=(num_q_heads, 0, 1), cache=kv, sparse=True, max_logits=True,
    )  # fmt: skip
    return results["out"], results["max_logits"], results["lse"]
