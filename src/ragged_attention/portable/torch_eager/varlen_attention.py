"""Attention over packed sequences in plain torch operations.

The lengths are read on the host, so a call synchronises with its device. Results are computed in float64 if the
inputs are float64, else in float32. Torch can differentiate every step, so autograd can check the gradient's formulas.
"""

from typing import Any

import torch

from ragged_attention.calls import VarlenAttention
from ragged_attention.portable.torch_eager._host import why_not as why_not
from ragged_attention.portable.torch_eager._softmax import soft_capped, wide
from ragged_attention.portable.torch_eager._varlen import (
    Block,
    biased,
    by_kv_head,
    by_token,
    heads_of,
    hide,
    largest_logits,
)
from ragged_attention.portable.torch_eager._varlen import Tile as Tile
from ragged_attention.portable.torch_eager._varlen import heuristic as heuristic

FEATURES = frozenset({
    "max_q_len", "max_kv_len", "sm_scale", "causal", "sliding_window", "soft_cap", "sinks", "alibi_slopes",
    "relative_bias", "key_ranges", "selected", "block_size", "return_max_logits", "deterministic",
})  # fmt: skip


def run(call: VarlenAttention, tile: Tile, launch: Any) -> list[torch.Tensor]:
    dtype, group = wide(call.q), call.group
    out = call.q.new_zeros(call.out_shape)
    lse = call.q.new_full(call.out_shape[:2], -torch.inf, dtype=dtype)
    max_logits = call.q.new_full((call.num_q_heads,), -torch.inf, dtype=dtype) if call.return_max_logits else None
    for keys, heads, q_heads, blocks in heads_of(call, tile):
        k, v = (array[keys, heads].transpose(0, 1).to(dtype) for array in (call.k, call.v))
        for block in blocks:
            some = None if max_logits is None else max_logits[q_heads]
            out_of_block, lse_of_block = _attend(call, block, heads, k, v, some)
            out[block.rows, q_heads] = by_token(out_of_block, group).to(out.dtype)
            lse[block.rows, q_heads] = by_token(lse_of_block, group)
    return [out, lse] if max_logits is None else [out, lse, max_logits]


def _attend(
    call: Any, block: Block, heads: slice, k: torch.Tensor, v: torch.Tensor, max_logits: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out [heads, rows * group, D_v] and lse [heads, rows * group] of a block; k and v are [heads, keys, ...].

    The largest logits of the heads so far, `max_logits` [heads * group], are updated in place.
    """
    group = call.group
    q = by_kv_head(call.q[block.rows], heads, group).to(k.dtype) * call.scale
    logits = torch.bmm(q, block.read(k, heads).transpose(1, 2))
    if max_logits is not None:
        max_logits.copy_(torch.maximum(max_logits, largest_logits(logits, block, block.blind, heads, group)))
    scores = soft_capped(logits, call.soft_cap)
    weights = torch.softmax(hide(biased(scores, call, block.distance, heads, block.rows), block, heads, group), -1)
    # The largest weight is exp(m_i - lse), so two cheap reductions replace another pass of exponentials.
    lse = scores.amax(-1) - torch.log(weights.amax(-1))
    out = torch.bmm(weights, block.read(v, heads))
    if call.sinks is not None:
        sinks = by_kv_head(call.sinks.expand(q.shape[1] // group, -1), heads, group)
        out = out * torch.sigmoid(lse - sinks)[..., None]
    if block.blind is not None:
        blind = block.blind_rows(heads, group)
        out, lse = out.masked_fill(blind, 0.0), lse.masked_fill(blind[..., 0], -torch.inf)
    return out, lse
