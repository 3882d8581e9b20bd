"""What is particular to the Triton room: its tiles' limits, and weights of few keys in a table made for many."""

import importlib
from typing import Any

import numpy as np
import pytest

import ragged_attention as ra
from ragged_attention.reference.ragged_paged_attention import ragged_paged_attention as definition
from ragged_attention.testing.compare import agrees

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("operation", "fields", "text"),
    [
        ("ragged_paged_attention", {"block_q": 48}, "expected block_q to be a power of two from 16 to 256, got 48"),
        ("ragged_paged_attention", {"num_warps": 32}, "expected num_warps to be a power of two from 1 to 16, got 32"),
        ("ragged_paged_attention", {"num_splits": 0}, "expected num_splits from 1 to 256, got 0"),
        ("ragged_paged_attention", {"careful_keys": -1}, "expected careful_keys >= 0, got -1"),
        ("write_kv_pages", {"block_t": 3}, "expected block_t to be a power of two from 1 to 256, got 3"),
        ("merge_attention_states", {"num_warps": 3}, "expected num_warps to be a power of two from 1 to 16, got 3"),
    ],
)
def test_tiles_have_limits(operation: str, fields: dict[str, int], text: str) -> None:
    module = importlib.import_module(f"ragged_attention.kernels_triton.{operation}")
    with pytest.raises(ra.InvalidInput, match=f"^{text}$"):
        module.Tile(**fields)


def test_few_keys_are_exact_enough_in_a_table_for_many() -> None:
    import ragged_attention.torch as rt

    random = torch.Generator().manual_seed(3)
    q = torch.randn(64, 8, 64, generator=random).bfloat16()
    kv_pages = torch.randn(16, 16, 4, 64, generator=random).bfloat16()
    page_indices = torch.arange(16, dtype=torch.int32).repeat(1, 16)  # room for 4096 keys, of which 160 are there
    tables = (torch.tensor([160]).int(), page_indices, torch.tensor([0, 64]).int())
    got: Any = rt.ragged_paged_attention(q, kv_pages, *tables, sm_scale=1.0, backend="triton")
    values = [tensor.double().numpy() for tensor in (q, kv_pages)]
    want = definition(*values, *(table.numpy() for table in tables), sm_scale=1.0)
    agrees(np.asarray(got.float()), want, "bfloat16")
