"""Sparse MLA prefill in Triton: in the terms of `_latent`, a decode of one query token per sequence."""

import dataclasses
from typing import Any

from ragged_attention.calls import SparseMlaPrefill
from ragged_attention.kernels_triton._latent import kernel, plan
from ragged_attention.kernels_triton._latent.plan import Tile as Tile
from ragged_attention.kernels_triton._tiles import launchable_in_float32

FEATURES = frozenset({"sm_scale", "d_v", "sinks", "topk_lens", "cache_format", "deterministic"})


def why_not(call: SparseMlaPrefill) -> str | None:
    return launchable_in_float32(call, kernel.latent_kernel)


def heuristic(call: SparseMlaPrefill) -> Tile:
    rows = call.num_q_heads // call.num_kv_heads
    return plan.tile_for(call, rows, call.num_tokens * call.num_kv_heads, call.topk, plan.Walk())


def invariant_tile(call: SparseMlaPrefill) -> Tile:
    """No size depends on the batch; of a prefill there are enough tokens without splits."""
    return dataclasses.replace(heuristic(call), num_splits=1)


def run(call: SparseMlaPrefill, tile: Tile, launch: Any) -> Any:
    """Enqueue the kernels; returns out, max_logits and lse."""
    lists = launch.packed(call.indices)
    token_stride, head_stride, _ = launch.strides(lists)
    q = launch.packed(call.q)
    q_token_stride, q_head_stride, _ = launch.strides(q)
    work = plan.Work(
        call=call,
        q=q,
        q_strides=(q_token_stride, 0, q_head_stride),
        lse_shape=(call.num_tokens, call.num_q_heads),
        num_seqs=call.num_tokens,
        num_q_tokens=1,
        num_kv_heads=call.num_kv_heads,
        sparse=True,
        causal=False,
        keys=plan.Keys(
            cache=plan.readable(call.kv, call.format, launch),
            lists=lists,
            list_strides=(token_stride, 0, head_stride),
            lens=call.topk_lens,
            longest=call.topk,
            page_size=call.page_size,
        ),
        extra=None,
        schedule=None,
    )
    out, lse, max_logits = kernel.run(work, tile, launch, max_logits=True)
    return out, max_logits, lse
