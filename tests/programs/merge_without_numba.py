"""Merge states with the default backend and with `numba`, then warm up the kernel; print results or errors."""

from typing import Any

import torch

from ragged_attention.tools import warmup
from ragged_attention.torch import merge_attention_states


def merged(backend: str | None) -> Any:
    try:
        out, _ = merge_attention_states(torch.ones(2, 3, 4, 8), torch.zeros(2, 3, 4), backend=backend)
        return out.sum().item()
    except Exception as error:
        return type(error).__name__, str(error).splitlines()[1:2]


print(merged(None), merged("numba"))
try:
    warmup.main(["merge_attention_states"])
except RuntimeError as error:
    print(error)
