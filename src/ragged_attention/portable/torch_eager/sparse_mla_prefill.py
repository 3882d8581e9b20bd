"""Attention of each query token over its own list of latent rows, in plain torch operations.

Tokens are processed a few at a time: the rows that they list are gathered, then converted, without synchronising with
the device. Torch can differentiate every step, so autograd can check the gradient's formulas.
"""

from typing import Any

import torch

from ragged_attention.calls import SparseMlaPrefill
from ragged_attention.portable.torch_eager._host import result_dtype
from ragged_attention.portable.torch_eager._latents import Tile as Tile
from ragged_attention.portable.torch_eager._latents import heuristic as heuristic
from ragged_attention.portable.torch_eager._lists import attend, lists_by_head
from ragged_attention.portable.torch_eager._softmax import wide

FEATURES = frozenset({
    "sm_scale", "d_v", "sinks", "topk_lens", "cache_format", "cache_layout", "deterministic", "out_dtype",
})  # fmt: skip


def run(call: SparseMlaPrefill, tile: Tile, launch: Any) -> list[torch.Tensor]:
    q = call.q
    out = q.new_empty(call.out_shape, dtype=result_dtype(call))
    max_logits, lse = (q.new_empty(call.out_shape[:2], dtype=wide(q)) for _ in range(2))
    for _, heads, lists in lists_by_head(call):
        sinks = None if call.sinks is None else call.sinks[heads]
        results = [result[:, heads] for result in (out, max_logits, lse)]
        attend(q[:, heads], [lists], call.scale, sinks, tile.block_kv, results)
    return [out, max_logits, lse]
