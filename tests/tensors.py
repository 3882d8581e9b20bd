"""Torch tensors that tests use as arguments."""

from typing import Any

import torch


def ints(*values: Any) -> torch.Tensor:
    """An int32 tensor whose elements are the given numbers or rows."""
    return torch.tensor(values, dtype=torch.int32)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """A tensor of normally distributed float32 numbers; equal arguments give equal tensors."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor with a last stride of 2."""
    return tensor.repeat_interleave(2, -1)[..., ::2]
