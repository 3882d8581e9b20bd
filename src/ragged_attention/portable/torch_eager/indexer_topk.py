"""Selects each token's keys with the largest logits of the lightning indexer, in plain torch operations.

Tokens are processed in blocks. Each block's top-k is selected before the next block's logits are computed.
"""

from typing import Any

import numpy as np
import torch

from ragged_attention.calls import IndexerTopk
from ragged_attention.portable.torch_eager._host import Ints, on_host
from ragged_attention.portable.torch_eager._indexer import FEATURES as FEATURES_OF_LOGITS
from ragged_attention.portable.torch_eager._indexer import Block, Keys, blocks_of, largest, logits_of
from ragged_attention.portable.torch_eager._indexer import heuristic as heuristic
from ragged_attention.portable.torch_eager._indexer import why_not as why_not
from ragged_attention.portable.torch_eager._latents import Tile as Tile

FEATURES = FEATURES_OF_LOGITS | {"candidate_blocks", "candidate_block_size"}


def run(call: IndexerTopk, tile: Tile, launch: Any) -> torch.Tensor:
    positions = torch.full((call.num_tokens, call.top_k), -1, dtype=torch.int32, device=call.q.device)
    candidates = Candidates(call) if call.candidate_blocks is not None else None
    keys = None
    for block in blocks_of(call):
        columns = block.columns() if candidates is None else candidates.columns(block)
        if len(columns) == 0:
            continue
        keys = keys or Keys(call)
        logits = logits_of(call, tile, keys, block, columns)
        if candidates is not None:
            logits.masked_fill_(~candidates.listed(block, columns), -torch.inf)
        selected = largest(logits, call.top_k)
        columns = torch.from_numpy(columns.astype(np.int32)).to(selected.device)
        positions[block.tokens] = torch.where(selected < 0, selected, columns[selected.clamp(min=0)])
    return positions


class Candidates:
    """Each token's candidate blocks, of `size` consecutive positions each; a token selects no other position."""

    def __init__(self, call: Any) -> None:
        self.lists = call.candidate_blocks
        self.on_host = on_host(call.candidate_blocks)
        self.size = min(call.candidate_block_size, max(call.columns, 1))

    def columns(self, block: Block) -> Ints:
        """The columns of `block` that are candidates of any of its tokens; other keys are not read."""
        columns = block.columns()
        return columns[np.isin(columns // self.size, self.on_host[block.tokens])]

    def listed(self, block: Block, columns: Ints) -> torch.Tensor:
        """Bool [tokens, n]: whether each of the `columns` [n] is a candidate of each token of `block`."""
        lists = self.lists[block.tokens].to(torch.int64)
        count = int(columns[-1]) // self.size + 1
        table = torch.zeros((len(lists), count + 1), dtype=torch.bool, device=lists.device)
        table.scatter_(1, torch.where((lists >= 0) & (lists < count), lists, count), True)
        return table.index_select(1, torch.from_numpy(columns // self.size).to(lists.device))
