"""Attention of packed sequences to packed sequences with plain torch operations, on any device torch has.

The lengths are read on the host, so a call waits for its device. Everything is computed in float32, 16-bit inputs
included, and in float64 where the inputs are. Torch's own automatic differentiation sees every step, so the
gradient's formulas can be checked by it.
"""

from typing import Any

import torch

from ragged_attention.calls import VarlenAttention
from ragged_attention.portable.torch_eager._host import why_not as why_not
from ragged_attention.portable.torch_eager._softmax import soft_capped, wide
from ragged_attention.portable.torch_eager._varlen import Block, by_kv_head, by_token, hide, sequences
from ragged_attention.portable.torch_eager._varlen import Tile as Tile
from ragged_attention.portable.torch_eager._varlen import heuristic as heuristic

FEATURES = frozenset({
    "max_q_len", "max_kv_len", "sm_scale", "causal", "sliding_window", "soft_cap", "sinks", "deterministic",
})  # fmt: skip


def run(call: VarlenAttention, tile: Tile, launch: Any) -> list[torch.Tensor]:
    dtype, group = wide(call.q), call.group
    out = call.q.new_zeros(call.out_shape)
    lse = call.q.new_full(call.out_shape[:2], -torch.inf, dtype=dtype)
    for seq in sequences(call, tile):
        for heads in seq.heads:
            k, v = (array[seq.keys, heads].transpose(0, 1).to(dtype) for array in (call.k, call.v))
            q_heads = slice(heads.start * group, heads.stop * group)
            for block in seq.blocks:
                found, found_lse = _attend(call, block, heads, k, v)
                out[block.rows, q_heads] = by_token(found, group).to(out.dtype)
                lse[block.rows, q_heads] = by_token(found_lse, group)
    return [out, lse]


def _attend(
    call: Any, block: Block, heads: slice, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out [heads, rows * group, D_v] and lse [heads, rows * group] of a block over k, v [heads, keys, ...]."""
    group = call.group
    q = by_kv_head(call.q[block.rows], heads, group).to(k.dtype) * call.scale
    scores = torch.bmm(q, k[:, block.keys].transpose(1, 2))
    if call.soft_cap is not None:
        scores = soft_capped(scores, call.soft_cap)
    weights = torch.softmax(hide(scores, block, group), -1)
    # The largest logit has the weight exp(m_i - lse): two cheap reductions instead of a pass of exponentials.
    lse = scores.amax(-1) - torch.log(weights.amax(-1))
    out = torch.bmm(weights, v[:, block.keys])
    if call.sinks is not None:
        sinks = by_kv_head(call.sinks.expand(q.shape[1] // group, -1), heads, group)
        out = out * torch.sigmoid(lse - sinks)[..., None]
    return out, lse
