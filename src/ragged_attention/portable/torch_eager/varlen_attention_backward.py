"""The gradient of attention over packed sequences in plain torch operations.

The weights are computed again, from the log-sum-exp. Blocks are processed in order, so the order of every sum is fixed.
"""

from typing import Any

import torch

from ragged_attention.calls import VarlenAttentionBackward
from ragged_attention.portable.torch_eager._host import why_not as why_not
from ragged_attention.portable.torch_eager._softmax import RowTerms, soft_capped, wide
from ragged_attention.portable.torch_eager._varlen import (
    Block,
    add_to_tables,
    biased,
    by_kv_head,
    by_token,
    heads_of,
    hide,
)
from ragged_attention.portable.torch_eager._varlen import Tile as Tile
from ragged_attention.portable.torch_eager._varlen import heuristic as heuristic

FEATURES = frozenset({
    "d_lse", "max_q_len", "max_kv_len", "sm_scale", "causal", "sliding_window", "soft_cap", "sinks", "alibi_slopes",
    "relative_bias", "key_ranges", "selected", "block_size", "return_d_relative_bias", "deterministic",
})  # fmt: skip


def run(call: VarlenAttentionBackward, tile: Tile, launch: Any) -> list[torch.Tensor | None]:
    dtype, group = wide(call.q), call.group
    dq, dk, dv = (torch.zeros_like(array, memory_format=torch.contiguous_format) for array in (call.q, call.k, call.v))
    d_sinks = None if call.sinks is None else torch.zeros_like(call.sinks)
    contiguous = torch.contiguous_format
    d_bias = torch.zeros_like(call.relative_bias, memory_format=contiguous) if call.has_d_relative_bias else None
    for keys, heads, q_heads, blocks in heads_of(call, tile):
        k, v = (array[keys, heads].transpose(0, 1).to(dtype) for array in (call.k, call.v))
        more_dk, more_dv = (torch.zeros_like(array, memory_format=torch.contiguous_format) for array in (k, v))
        for block in blocks:
            dq_of_block = _block(call, block, heads, k, v, more_dk, more_dv, d_sinks, d_bias)
            dq[block.rows, q_heads] = by_token(dq_of_block, group).to(dq.dtype)
        dk[keys, heads], dv[keys, heads] = more_dk.transpose(0, 1), more_dv.transpose(0, 1)
    return [dq, dk, dv, d_sinks, d_bias]


def _block(
    call: Any, block: Block, heads: slice, k: torch.Tensor, v: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor,
    d_sinks: torch.Tensor | None, d_bias: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """dq [heads, rows * group, D] of a block; adds the block's other gradients to `dk`, `dv` and so on."""
    group = call.group

    def of_rows(array: torch.Tensor) -> torch.Tensor:
        return by_kv_head(array, heads, group).to(k.dtype)

    q, d_out, out, lse = (of_rows(array[block.rows]) for array in (call.q, call.d_out, call.out, call.lse))
    if block.blind is not None:  # rows that see no key may hold NaN
        blind = block.blind_rows(heads, group)
        q, d_out = q.masked_fill(blind, 0.0), d_out.masked_fill(blind, 0.0)
    d_lse = None if call.d_lse is None else of_rows(call.d_lse[block.rows])
    sinks = None if call.sinks is None else of_rows(call.sinks.expand(q.shape[1] // group, -1))
    terms = RowTerms(d_out, out, lse, d_lse, sinks)
    k, v = (block.read(array, heads) for array in (k, v))
    scores = soft_capped(torch.bmm(q * call.scale, k.transpose(1, 2)), call.soft_cap)
    slope = None if call.soft_cap is None else 1 - (scores / call.soft_cap).square_()
    weights = terms.weights(hide(biased(scores, call, block.distance, heads, block.rows), block, heads, group))
    _add_product(dv, block, weights.transpose(1, 2), terms.d_out)
    d_scores = terms.d_logits(weights, v)
    if d_bias is not None:
        add_to_tables(d_bias, d_scores, call, block, heads)
    if slope is not None:
        d_scores.mul_(slope)
    _add_product(dk, block, d_scores.transpose(1, 2), q, call.scale)
    if d_sinks is not None:
        of_heads = d_sinks.view(call.num_kv_heads, group)[heads]
        of_heads += terms.d_sinks.unflatten(1, (-1, group)).sum(1)
    return torch.bmm(d_scores, k).mul_(call.scale)


def _add_product(
    gradient: torch.Tensor, block: Block, left: torch.Tensor, right: torch.Tensor, scale: float = 1
) -> None:
    """Add a product of matrices, times `scale`, to the gradient of a block's keys."""
    if isinstance(block.keys, slice):
        gradient[:, block.keys].baddbmm_(left, right, alpha=scale)
    else:
        gradient[:, block.keys] += torch.bmm(left, right).mul_(scale)
