"""Attention of a few query tokens per sequence over a paged latent cache on a CPU, dense or over top-k lists.

A schedule is ignored: this kernel divides its work when it starts.
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
    "page_indices", "kv_lens", "indices", "d_v", "sm_scale", "causal", "sliding_window", "soft_cap", "sinks",
    "topk_lens", "extra_kv_cache", "extra_indices", "extra_topk_lens", "schedule", "cache_format", "cache_layout",
    "out_dtype",
})  # fmt: skip


def run(call: MlaDecode, tile: Tile, launch: Any) -> tuple[Any, Any]:
    q, lens = launch.packed(call.q), call.topk_lens if call.sparse else call.kv_lens
    lists = launch.packed(call.indices if call.sparse else call.page_indices)
    extra_lists = None if call.extra_indices is None else launch.packed(call.extra_indices)
    num_seqs, num_q_tokens, num_q_heads, d_v = call.out_shape
    strides = {"q": launch.strides(q)[:3], "list": launch.strides(lists)[: 1 + call.sparse],
               "lens": _latent_call.steps_of(lens, launch),
               "extra_list": () if extra_lists is None else launch.strides(extra_lists)[:2],
               "extra_lens": _latent_call.steps_of(call.extra_topk_lens, launch),
               "out": (num_q_tokens * num_q_heads * d_v,),
               "lse": (num_q_heads * num_q_tokens, 1, num_q_tokens)}  # fmt: skip
    results = _latent_call.run(
        call, tile, launch, cache=call.kv_cache, extra_cache=call.extra_kv_cache, lse_shape=call.lse_shape,
        operands={"q": q, "lists": lists, "lens": lens, "extra_lists": extra_lists, "extra_lens": call.extra_topk_lens},
        numbers={
            "max_num_seqs": num_seqs, "num_tokens": num_q_tokens, "sparse": call.sparse, "causal": call.causal,
            "window": call.sliding_window or 0, "soft_cap": call.soft_cap or 0.0,
            "length": call.topk if call.sparse else call.capacity, "extra_length": call.extra_topk,
            **_latent_call.named(strides),
        },
    )  # fmt: skip
    return results["out"], results["lse"]
