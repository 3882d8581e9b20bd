"""The gradient of attention over lists of latent rows, in plain torch operations.

Tokens are processed a few at a time. The rows that they list are gathered again, and the rows' gradients are summed in
float32, or in float64 for float64 inputs.
"""

from typing import Any

import torch

from ragged_attention.calls import SparseMlaPrefillBackward
from ragged_attention.portable import torch_eager
from ragged_attention.portable.torch_eager._latents import Tile as Tile
from ragged_attention.portable.torch_eager._latents import heuristic as heuristic
from ragged_attention.portable.torch_eager._lists import Lists, lists_by_head
from ragged_attention.portable.torch_eager._softmax import RowTerms, wide
from ragged_attention.portable.torch_eager._sums import ORDERED, add_rows

FEATURES = frozenset({"d_lse", "sm_scale", "d_v", "sinks", "topk_lens", "deterministic"})


def why_not(call: SparseMlaPrefillBackward) -> str | None:
    if call.deterministic and call.device.platform not in ORDERED:
        return f"adds up in a fixed order on {', '.join(ORDERED)}, got deterministic=True on {call.device.platform}"
    return torch_eager.why_not(call)


def run(call: SparseMlaPrefillBackward, tile: Tile, launch: Any) -> list[torch.Tensor]:
    dq, dkv = (torch.zeros_like(array, memory_format=torch.contiguous_format) for array in (call.q, call.kv))
    d_sinks = None if call.sinks is None else torch.zeros_like(call.sinks)
    step = max(tile.block_kv // call.topk, 1)
    for kv_head, heads, lists in lists_by_head(call):
        d_rows = torch.zeros(call.num_slots, call.d_qk, dtype=wide(call.q), device=call.q.device)
        for first in range(0, call.num_tokens if lists.rows else 0, step):
            tokens = slice(first, first + step)
            dq[tokens, heads], d_sinks_of_block = _block(call, lists, tokens, heads, tile.block_kv, d_rows)
            if d_sinks is not None:
                d_sinks[heads] += d_sinks_of_block
        dkv.view(call.num_slots, call.num_kv_heads, call.d_qk)[:, kv_head] = d_rows
    return [dq, dkv] if d_sinks is None else [dq, dkv, d_sinks]


def _block(
    call: Any, lists: Lists, tokens: slice, heads: slice, block_kv: int, d_rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """dq [B, R, d_qk] and d_sinks [R] of some tokens; the gradients of the rows they list are added to `d_rows`."""
    dtype = d_rows.dtype
    slots, hidden = lists.selected(tokens)
    # A token that selects nothing still reads a row. That row and the token's q and d_out may hold NaN: all become 0.
    fully_masked = hidden.all(1)[:, None, None]
    q, d_out = (array[tokens, heads].to(dtype).masked_fill(fully_masked, 0.0) for array in (call.q, call.d_out))
    out, lse = call.out[tokens, heads].to(dtype), call.lse[tokens, heads]
    d_lse = None if call.d_lse is None else call.d_lse[tokens, heads]
    terms = RowTerms(d_out, out, lse, d_lse, None if call.sinks is None else call.sinks[heads])
    scaled, dq = q * call.scale, torch.zeros_like(q)
    keys = max(block_kv // q.shape[0], 1)
    for low in range(0, slots.shape[1], keys):
        some, off = slots[:, low : low + keys], hidden[:, None, low : low + keys]
        rows = lists.rows.at(some.reshape(-1)).view(*some.shape, -1).masked_fill_(fully_masked, 0.0)  # type: ignore[union-attr]
        values = rows[..., : call.d_v]
        weights = terms.weights(torch.bmm(scaled, rows.transpose(1, 2)).masked_fill_(off, -torch.inf))
        d_logits = terms.d_logits(weights, values)
        dq.baddbmm_(d_logits, rows, alpha=call.scale)
        more = torch.bmm(d_logits.transpose(1, 2), scaled)
        more[..., : call.d_v].baddbmm_(weights.transpose(1, 2), terms.d_out)
        add_rows(d_rows, some.reshape(-1), more.flatten(0, 1), call.deterministic)
    return dq, terms.d_sinks.sum(0)
