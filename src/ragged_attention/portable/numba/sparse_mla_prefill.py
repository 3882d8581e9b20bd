"""Attention of each query token over its own list of latent rows on a CPU."""

from typing import Any

from ragged_attention.calls import SparseMlaPrefill
from ragged_attention.portable.numba import _latent_call
from ragged_attention.portable.numba._call import why_not as why_not
from ragged_attention.portable.numba._latent_call import KERNEL as KERNEL
from ragged_attention.portable.numba._latent_call import Tile as Tile
from ragged_attention.portable.numba._latent_call import heuristic as heuristic
from ragged_attention.portable.numba._latent_call import invariant_tile as invariant_tile

FEATURES = frozenset({
    "sm_scale", "d_v", "sinks", "topk_lens", "cache_format", "cache_layout", "deterministic", "out_dtype",
})  # fmt: skip


def run(call: SparseMlaPrefill, tile: Tile, launch: Any) -> tuple[Any, Any, Any]:
    """Run the call as a decode with one token per sequence."""
    q, kv, lists = launch.packed(call.q), launch.packed(call.kv), launch.packed(call.indices)
    token, head, _ = launch.strides(q)
    list_token, list_head, _ = launch.strides(lists)
    num_tokens, num_q_heads, d_v = call.out_shape
    strides = {"q": (token, 0, head), "list": (list_token, 0, list_head), "out": (num_q_heads * d_v,),
               "lens": _latent_call.steps_of(call.topk_lens, launch), "lse": (num_q_heads, 0, 1)}  # fmt: skip
    results = _latent_call.run(
        call, tile, launch, cache=kv, lse_shape=(num_tokens, num_q_heads), max_logits=True,
        operands={"q": q, "lists": lists, "lens": call.topk_lens},
        numbers={
            "max_num_seqs": num_tokens, "num_tokens": 1, "sparse": True, "length": call.topk,
            **_latent_call.named(strides),
        },
    )  # fmt: skip
    return results["out"], results["max_logits"], results["lse"]
