"""Attention of each query token over its own list of latent rows, with plain torch operations.

A few tokens at a time, whose rows are gathered and only then converted to float32. Nothing waits for the device.
Torch's own automatic differentiation sees every step, so the gradient's formulas can be checked by it.
"""

from typing import Any

import torch

from ragged_attention.calls import SparseMlaPrefill
from ragged_attention.portable.torch_eager._framework import why_not as why_not
from ragged_attention.portable.torch_eager._host import result_dtype
from ragged_attention.portable.torch_eager._latents import Tile as Tile
from ragged_attention.portable.torch_eager._latents import heuristic as heuristic
from ragged_attention.portable.torch_eager._lists import attend, lists_of
from ragged_attention.portable.torch_eager._softmax import wide

FEATURES = frozenset({
    "sm_scale", "d_v", "sinks", "topk_lens", "cache_format", "cache_layout", "deterministic", "out_dtype",
})  # fmt: skip


def run(call: SparseMlaPrefill, tile: Tile, launch: Any) -> list[torch.Tensor]:
    q, cache = call.q, call.kv.unsqueeze(1) if call.kv.dim() == 3 else call.kv
    out = q.new_empty(call.out_shape, dtype=result_dtype(call))
    max_logits, lse = (q.new_empty(call.out_shape[:2], dtype=wide(q)) for _ in range(2))
    group = call.num_q_heads // call.num_kv_heads
    for kv_head in range(call.num_kv_heads):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        lists = lists_of(cache[:, :, kv_head : kv_head + 1], call.kv_format, call.indices[:, kv_head], call.topk_lens)
        sinks = None if call.sinks is None else call.sinks[heads]
        results = [result[:, heads] for result in (out, max_logits, lse)]
        attend(q[:, heads], [lists], call.scale, sinks, tile.block_kv, results)
    return [out, max_logits, lse]
