"""The rotation of rows in vLLM's `int4_per_token_head`: column signs, then a Hadamard transform without normalisation.

The rotation spreads outliers over all columns. It also gives most rows both positive and negative numbers, which their
zero points need.
"""

import functools

import torch


def rotated(x: torch.Tensor) -> torch.Tensor:
    """The rotated rows, in x's dtype. The product of two rotated rows is `norm` times the product of the rows."""
    matrix = _matrix(norm(x.shape[-1]), x.device)
    return (x.float().unflatten(-1, (-1, len(matrix))) @ matrix).flatten(-2).to(x.dtype)


def rotated_back(x: torch.Tensor) -> torch.Tensor:
    """The inverse of `rotated`, in float32."""
    matrix = _matrix(norm(x.shape[-1]), x.device)
    return (x.float().unflatten(-1, (-1, len(matrix))) @ matrix.T).flatten(-2) / len(matrix)


def norm(head_size: int) -> int:
    """The largest power of two that divides a head size: the number of columns that are rotated together."""
    return head_size & -head_size


@functools.cache
def _matrix(size: int, device: torch.device) -> torch.Tensor:
    """The rotation of `size` columns, f32 [size, size]: a rotated row is `row @ matrix`.

    The signs must be those of vLLM, so that its caches can be read. vLLM draws them on the CPU with this seed. The
    default device is set here, because vLLM loads models with another one.
    """
    with torch.device("cpu"):
        step, matrix = torch.tensor([[1.0, 1.0], [1.0, -1.0]]), torch.ones(1, 1)
        while len(matrix) < size:
            matrix = torch.kron(step, matrix)
        draws = torch.bernoulli(torch.full((size,), 0.5), generator=torch.Generator().manual_seed(0x9E3779B9))
        return ((2 * draws - 1)[:, None] * matrix).to(device)
