"""The target of an indexer in plain torch operations, for blocks of tokens and tiles of keys."""

from typing import Any

import torch

from ragged_attention.calls import AttentionTarget
from ragged_attention.portable.torch_eager._cache import to_float32
from ragged_attention.portable.torch_eager._indexer import Block, Keys, blocks_of, rows_of, tiles_of
from ragged_attention.portable.torch_eager._indexer import heuristic as heuristic
from ragged_attention.portable.torch_eager._indexer import why_not as why_not
from ragged_attention.portable.torch_eager._indexer_lists import entries_of
from ragged_attention.portable.torch_eager._latents import Tile as Tile

FEATURES = frozenset({"indices", "sm_scale", "topk_lens", "starts", "stops", "relative", "max_keys"})


def run(call: AttentionTarget, tile: Tile, launch: Any) -> torch.Tensor:
    sums = torch.zeros(call.num_tokens, call.columns, dtype=torch.float32, device=call.q.device)
    if call.listed:
        for entries in entries_of(call, tile):
            products = entries.products()
            sums[entries.tokens, entries.columns] = _sums(call, entries.tokens, products, entries.hidden)
    elif call.keys.shape[0]:
        keys = Keys(call)
        for block in blocks_of(call):
            _write_block(call, tile, keys, block, sums)
    total = sums.sum(1, keepdim=True)
    return torch.where(total > 0, sums / total, 0.0)


def _sums(call: Any, tokens: slice, products: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """The sums over heads [B, n] of the probabilities that belong to products [B, H, n]; 0 for `hidden` keys [B, n]."""
    lse = call.lse[tokens].masked_fill(call.lse[tokens] == -torch.inf, torch.inf)  # a head without keys adds nothing
    return torch.exp(products * call.scale - lse[..., None]).sum(1).masked_fill_(hidden, 0.0)


def _write_block(call: Any, tile: Tile, keys: Keys, block: Block, sums: torch.Tensor) -> None:
    """Write the sums of a block of tokens over the keys that they see."""
    for rows, tokens in rows_of(call, tile, block):
        q = to_float32(call.q[tokens])
        for columns, values, _, hidden in tiles_of(call, tile, keys, block, rows):
            products = torch.mm(q.flatten(0, 1), values.t()).unflatten(0, q.shape[:2])
            sums[tokens, columns] = _sums(call, tokens, products, hidden)
