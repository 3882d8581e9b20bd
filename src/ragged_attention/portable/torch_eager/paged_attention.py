"""Paged decode over heads-first pages in plain torch operations: ragged paged attention with one query per sequence."""

from typing import Any

import torch

from ragged_attention.calls import PagedAttention
from ragged_attention.portable.torch_eager._heads_first import attend
from ragged_attention.portable.torch_eager._heads_first import heuristic as heuristic
from ragged_attention.portable.torch_eager._host import why_not as why_not
from ragged_attention.portable.torch_eager.ragged_paged_attention import Tile as Tile

FEATURES = frozenset({"sm_scale", "soft_cap"})


def run(call: PagedAttention, tile: Tile, launch: Any) -> torch.Tensor:
    edges = torch.arange(call.num_tokens + 1, dtype=torch.int32)
    return attend(call, tile, kv_lens=call.lengths, cu_q_lens=edges)
