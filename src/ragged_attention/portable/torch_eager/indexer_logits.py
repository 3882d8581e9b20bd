"""The lightning indexer's logits in plain torch operations, for blocks of tokens and tiles of keys."""

from typing import Any

import torch

from ragged_attention.calls import IndexerLogits
from ragged_attention.portable.torch_eager._indexer import FEATURES as FEATURES_OF_BOTH
from ragged_attention.portable.torch_eager._indexer import Keys, blocks_of, logits_of
from ragged_attention.portable.torch_eager._indexer import heuristic as heuristic
from ragged_attention.portable.torch_eager._indexer import why_not as why_not
from ragged_attention.portable.torch_eager._indexer_lists import write_logits
from ragged_attention.portable.torch_eager._latents import Tile as Tile

FEATURES = FEATURES_OF_BOTH | {"indices"}


def run(call: IndexerLogits, tile: Tile, launch: Any) -> torch.Tensor:
    shape = (call.num_tokens, call.columns)
    logits = torch.full(shape, -torch.inf, dtype=torch.float32, device=call.q.device)
    if call.listed:
        write_logits(call, tile, logits)
        return logits
    keys = None
    for block in blocks_of(call):
        keys = keys or Keys(call)
        logits[block.tokens, block.low : block.high] = logits_of(call, tile, keys, block, block.columns())
    return logits
