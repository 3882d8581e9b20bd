"""Selects the blocks of each row's largest scores in plain torch operations, without synchronising with the device."""

from typing import Any

import torch

from ragged_attention.calls import TopKBlocks
from ragged_attention.portable.torch_eager._blocks import selected
from ragged_attention.portable.torch_eager._indexer import LOGITS

FEATURES = frozenset({"init_blocks", "local_blocks"})
BATCH_INVARIANT = True  # selection is exact, whatever the batch


def run(call: TopKBlocks, tile: Any, launch: Any) -> torch.Tensor:
    (result,) = call.results()
    blocks = torch.full(result.shape, -1, dtype=torch.int32, device=call.scores.device)
    step = max(LOGITS // max(call.num_heads * call.num_blocks, 1), 1)
    for first in range(0, call.num_tokens, step):
        rows = slice(first, first + step)
        blocks[rows] = selected(call.scores[rows], call.top_k, call.init_blocks, call.local_blocks)
    return blocks
