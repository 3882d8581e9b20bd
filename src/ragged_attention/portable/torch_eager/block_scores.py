"""The scores of blocks of keys in plain torch operations."""

from typing import Any

import torch

from ragged_attention.calls import BlockScores
from ragged_attention.portable.torch_eager._blocks import FEATURES as FEATURES
from ragged_attention.portable.torch_eager._blocks import parts_of, scores_of
from ragged_attention.portable.torch_eager._indexer import Keys
from ragged_attention.portable.torch_eager._indexer import heuristic as heuristic
from ragged_attention.portable.torch_eager._indexer import why_not as why_not
from ragged_attention.portable.torch_eager._latents import Tile as Tile


def run(call: BlockScores, tile: Tile, launch: Any) -> torch.Tensor:
    (result,) = call.results()
    scores = torch.full(result.shape, -torch.inf, dtype=torch.float32, device=call.q.device)
    keys = None
    for block in parts_of(call):
        keys = keys or Keys(call)
        found = scores_of(call, tile, keys, block)
        scores[block.tokens, :, : found.shape[2]] = found
    return scores
