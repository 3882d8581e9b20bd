"""Selects the blocks of keys with the largest scores for each token and index head, in plain torch operations.

Tokens are processed in parts. Each part's blocks are selected before the next part's scores are computed.
"""

from typing import Any

import torch

from ragged_attention.calls import SelectBlocks
from ragged_attention.portable.torch_eager._blocks import FEATURES as FEATURES_OF_SCORES
from ragged_attention.portable.torch_eager._blocks import parts_of, scores_of, selected
from ragged_attention.portable.torch_eager._indexer import Keys
from ragged_attention.portable.torch_eager._indexer import heuristic as heuristic
from ragged_attention.portable.torch_eager._indexer import why_not as why_not
from ragged_attention.portable.torch_eager._latents import Tile as Tile

FEATURES = FEATURES_OF_SCORES | {"init_blocks", "local_blocks"}


def run(call: SelectBlocks, tile: Tile, launch: Any) -> torch.Tensor:
    (result,) = call.results()
    blocks = torch.full(result.shape, -1, dtype=torch.int32, device=call.q.device)
    keys = None
    for block in parts_of(call):
        keys = keys or Keys(call)
        scores = scores_of(call, tile, keys, block)
        blocks[block.tokens] = selected(scores, call.top_k, call.init_blocks, call.local_blocks)
    return blocks
