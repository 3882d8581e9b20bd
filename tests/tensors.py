"""Tensors of torch from which tests build their arguments."""

from typing import Any

import torch


def ints(*values: Any) -> torch.Tensor:
    """An int32 tensor of numbers or rows."""
    return torch.tensor(values, dtype=torch.int32)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normally distributed float32 numbers, equal for equal arguments."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose last stride is 2."""
    return tensor.repeat_interleave(2, -1)[..., ::2]
