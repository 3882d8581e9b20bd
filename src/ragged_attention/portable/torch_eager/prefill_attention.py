"""Chunked prefill over heads-first pages in plain torch operations: ragged paged attention of one sequence."""

from typing import Any

import torch

from ragged_attention.calls import PrefillAttention
from ragged_attention.portable.torch_eager._heads_first import attend
from ragged_attention.portable.torch_eager._heads_first import heuristic as heuristic
from ragged_attention.portable.torch_eager._host import why_not as why_not
from ragged_attention.portable.torch_eager.ragged_paged_attention import Tile as Tile

FEATURES = frozenset({"sm_scale", "soft_cap", "sliding_window", "align"})


def run(call: PrefillAttention, tile: Tile, launch: Any) -> torch.Tensor:
    length, live = min(max(int(call.length), 0), call.capacity), call.num_tokens
    if call.align == "chunk" and live:
        live = (length - 1) % live + 1 if length else 0
    return attend(
        call,
        tile,
        kv_lens=torch.tensor([length], dtype=torch.int32),
        page_indices=call.page_indices[None],
        cu_q_lens=torch.tensor([0, live], dtype=torch.int32),
    )
