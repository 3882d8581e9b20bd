"""Selects the columns of each row's largest logits in plain torch operations, without synchronising with the device."""

from typing import Any

import torch

from ragged_attention.calls import TopKIndices
from ragged_attention.portable.torch_eager._indexer import LOGITS, largest

FEATURES = frozenset({"starts", "stops"})
BATCH_INVARIANT = True  # selection is exact, whatever the batch


def run(call: TopKIndices, tile: Any, launch: Any) -> torch.Tensor:
    selected = torch.empty((call.num_tokens, call.top_k), dtype=torch.int32, device=call.logits.device)
    column = torch.arange(call.columns, dtype=torch.int32, device=call.logits.device)
    step = max(LOGITS // max(call.columns, 1), 1)
    for first in range(0, call.num_tokens, step):
        rows = slice(first, first + step)
        logits = call.logits[rows]
        if call.starts is not None:
            logits = logits.masked_fill(column < call.starts[rows, None], -torch.inf)
        if call.stops is not None:
            logits = logits.masked_fill(column >= call.stops[rows, None], -torch.inf)
        selected[rows] = largest(logits, call.top_k)
    return selected
