"""Paged decode over heads-first pages with plain torch operations: ragged paged attention, one query per sequence."""

from typing import Any

import torch

from ragged_attention.calls import PagedAttention
from ragged_attention.portable.torch_eager import _heads_first, ragged_paged_attention
from ragged_attention.portable.torch_eager._host import why_not as why_not
from ragged_attention.portable.torch_eager.ragged_paged_attention import Tile as Tile

FEATURES = frozenset({"sm_scale", "soft_cap"})


def heuristic(call: PagedAttention) -> Tile:
    return ragged_paged_attention.heuristic(call.as_ragged())


def run(call: PagedAttention, tile: Tile, launch: Any) -> torch.Tensor:
    del launch
    edges = torch.arange(call.num_tokens + 1, dtype=torch.int32)
    return _heads_first.attend(call, tile, kv_lens=call.lengths, cu_q_lens=edges)
