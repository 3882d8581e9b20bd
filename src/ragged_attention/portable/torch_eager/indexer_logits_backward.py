"""The gradient of the lightning indexer's logits in plain torch operations.

Products are recomputed, either for a block of tokens with similar ranges and a tile of keys at a time, or for a few
list entries at a time. Sums are in float32, and their order depends on the ranges or lists alone.
"""

from typing import Any

import torch

from ragged_attention.calls import IndexerLogitsBackward
from ragged_attention.portable.torch_eager import _indexer
from ragged_attention.portable.torch_eager._cache import to_float32
from ragged_attention.portable.torch_eager._indexer import Block, Keys, blocks_of, relu, rows_of, tiles_of
from ragged_attention.portable.torch_eager._indexer import heuristic as heuristic
from ragged_attention.portable.torch_eager._indexer_lists import entries_of
from ragged_attention.portable.torch_eager._latents import Tile as Tile
from ragged_attention.portable.torch_eager._sums import ORDERED, add_rows

FEATURES = frozenset({"key_scale", "starts", "stops", "relative", "max_keys", "indices"})


def why_not(call: IndexerLogitsBackward) -> str | None:
    if call.listed and call.device.platform not in ORDERED:
        return f"adds up the rows of lists in a fixed order on {', '.join(ORDERED)}, got {call.device.platform}"
    return _indexer.why_not(call)


def run(call: IndexerLogitsBackward, tile: Tile, launch: Any) -> list[torch.Tensor]:
    d_q, d_weights = (torch.zeros_like(like, memory_format=torch.contiguous_format) for like in (call.q, call.weights))
    d_keys = torch.zeros(call.keys.shape, dtype=torch.float32, device=call.q.device)
    if call.listed:
        _add_lists(call, tile, d_q, d_keys, d_weights)
    else:
        keys = Keys(call) if call.keys.shape[0] else None
        for block in blocks_of(call):
            assert keys is not None
            _add_block(call, tile, keys, block, d_q, d_keys, d_weights)
    return [d_q, d_keys.to(call.keys.dtype), d_weights]


def _d_products(products: torch.Tensor, weights: torch.Tensor, d_sums: torch.Tensor) -> torch.Tensor:
    """The gradients [B, H, n] of products, from the weights [B, H] and the gradients [B, n] of the sums over heads."""
    return (weights[:, :, None] * d_sums[:, None, :]).masked_fill_(~(products > 0), 0.0)


def _add_lists(call: Any, tile: Tile, d_q: torch.Tensor, d_keys: torch.Tensor, d_weights: torch.Tensor) -> None:
    """Write the gradients of all queries and weights, if tokens have lists, and add those of the keys to `d_keys`."""
    sums = None
    for entries in entries_of(call, tile):
        tokens = entries.tokens
        if entries.columns.start == 0:
            sums = entries.q.new_zeros(entries.q.shape)
        assert sums is not None
        d_sums = call.d_logits[tokens, entries.columns]
        d_sums = d_sums if entries.scales is None else d_sums * entries.scales
        d_sums = d_sums.masked_fill(entries.hidden, 0.0)
        products = entries.products()
        d_products = _d_products(products, call.weights[tokens], d_sums)
        sums.baddbmm_(d_products, entries.keys)
        d_q[tokens] = sums.to(d_q.dtype)
        d_weights[tokens] += torch.bmm(relu(products), d_sums.unsqueeze(2)).squeeze(2)
        d_rows = torch.bmm(d_products.transpose(1, 2), entries.q)
        add_rows(d_keys, entries.slots.reshape(-1), d_rows.flatten(0, 1), deterministic=True)


def _add_block(
    call: Any, tile: Tile, keys: Keys, block: Block, d_q: torch.Tensor, d_keys: torch.Tensor, d_weights: torch.Tensor
) -> None:
    """Write the gradients of a block's queries and weights, and add those of the keys to `d_keys`."""
    for rows, tokens in rows_of(call, tile, block):
        q, weights = to_float32(call.q[tokens]), call.weights[tokens]
        sums = q.new_zeros(q.shape)
        for columns, values, scales, hidden in tiles_of(call, tile, keys, block, rows):
            d_sums = call.d_logits[tokens, columns]
            d_sums = (d_sums if scales is None else d_sums * scales).masked_fill(hidden, 0.0)
            products = torch.mm(q.flatten(0, 1), values.t()).unflatten(0, q.shape[:2])
            d_products = _d_products(products, weights, d_sums)
            flat = d_products.flatten(0, 1)
            sums.flatten(0, 1).addmm_(flat, values)
            d_weights[tokens] += torch.bmm(relu(products), d_sums.unsqueeze(2)).squeeze(2)
            d_keys[columns.start + block.shift : columns.stop + block.shift].addmm_(flat.t(), q.flatten(0, 1))
        d_q[tokens] = sums.to(d_q.dtype)
