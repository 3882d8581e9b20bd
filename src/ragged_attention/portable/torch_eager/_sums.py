"""Sums of rows that are added by index."""

import torch

ORDERED = ("cpu", "cuda", "rocm")  # platforms on which torch can accumulate by index in a fixed order


def add_rows(total: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, deterministic: bool) -> None:
    """Add each row to `total` at its slot: in order on a CPU, on a GPU in any order unless `deterministic`."""
    if deterministic and total.device.type != "cpu":
        total.index_put_((slots,), rows, accumulate=True)
    else:
        total.index_add_(0, slots, rows)
