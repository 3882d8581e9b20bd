"""Ragged paged attention over latents on a CPU: `_latent`'s kernel with packed queries."""

from typing import Any

from ragged_attention.calls import RaggedMlaAttention
from ragged_attention.portable.numba import _latent_call
from ragged_attention.portable.numba._call import why_not as why_not
from ragged_attention.portable.numba._latent_call import KERNEL as KERNEL
from ragged_attention.portable.numba._latent_call import Tile as Tile
from ragged_attention.portable.numba._latent_call import heuristic as heuristic
from ragged_attention.portable.numba._latent_call import invariant_tile as invariant_tile

FEATURES = frozenset({
    "num_seqs", "d_v", "sm_scale", "causal", "sliding_window", "soft_cap", "sinks", "kv_scale", "return_lse",
    "cache_format", "cache_layout", "out_dtype",
})  # fmt: skip


def run(call: RaggedMlaAttention, tile: Tile, launch: Any) -> Any:
    q, tables, kv_lens = launch.packed(call.q), launch.packed(call.page_indices), launch.contiguous(call.kv_lens)
    counted = isinstance(call.num_seqs, int)
    token, head, _ = launch.strides(q)
    strides = {"q": (0, token, head), "list": launch.strides(tables)[:1], "lens": (1,),
               "lse": (0, call.num_q_heads, 1)}  # fmt: skip
    results = _latent_call.run(
        call, tile, launch, cache=call.kv_cache, lse_shape=call.q.shape[:2] if call.return_lse else None,
        operands={
            "q": q, "lists": tables, "lens": kv_lens, "cu_q_lens": launch.contiguous(call.cu_q_lens),
            "num_seqs": None if counted else call.num_seqs,
        },
        numbers={
            "max_num_seqs": call.num_seqs if counted else call.max_num_seqs, "num_tokens": call.num_tokens,
            "causal": call.causal, "window": call.sliding_window or 0, "soft_cap": call.soft_cap or 0.0,
            "length": call.capacity, **_latent_call.named(strides),
        },
    )  # fmt: skip
    return (results["out"], results["lse"]) if call.return_lse else results["out"]
