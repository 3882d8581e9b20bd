"""A program of the CPU kernels with several KV heads gives the same bits as programs with one head each."""

from typing import Any

import numpy as np
import pytest

numba = pytest.importorskip("numba")
torch = pytest.importorskip("torch")

from ragged_attention.key_ranges import causal_ranges  # noqa: E402
from ragged_attention.testing import agrees  # noqa: E402
from ragged_attention.torch import quantize_kv, ragged_paged_attention  # noqa: E402
from tests.test_kernels_numba import with_threads  # noqa: E402

HEAD_DIM, PAGE_SIZE = 32, 16
# (query length, KV length): decodes, drafts, a prompt with too many rows for a shared program, and a split sequence.
LENS = [(1, 1), (1, 40), (3, 3), (40, 90), (1, 1500), (4, 33), (0, 8), *[(1, 17 + step) for step in range(18)]]


def batch(heads: int, group: int, dtype: Any, cache: str) -> dict[str, Any]:
    """A call with `heads` KV heads and one invalid page; unused slots are NaN if the cache's dtype has NaN."""
    generator = torch.Generator().manual_seed(heads + group)
    used = [-(-keys // PAGE_SIZE) for _, keys in LENS]
    order, table = torch.randperm(sum(used), generator=generator).int(), torch.full((len(LENS), max(used)), -1).int()
    for row, pages in zip(table, order.split(used), strict=True):
        row[: len(pages)] = pages
    table[8, 0] = sum(used) + 5
    size = sum(used), PAGE_SIZE, heads, HEAD_DIM
    k, v = (torch.randn(size, generator=generator) for _ in range(2))
    given: dict[str, Any] = {}
    if cache in ("combined", "split"):
        for (_, keys), row in zip(LENS, table, strict=True):
            for rows in (k, v):
                if keys % PAGE_SIZE:
                    rows[row[keys // PAGE_SIZE].clamp(0, sum(used) - 1).long(), keys % PAGE_SIZE :] = torch.nan
        k, v = k.to(dtype), v.to(dtype)
    elif cache == "e4m3":
        k, v = (rows.clamp(-2, 2).to(torch.float8_e4m3fn) for rows in (k, v))
    else:
        zero: Any = (
            "stored" if cache == "int4_token_head" else None
        )  # the zero point is not an integer, so a fraction of it must still be subtracted
        (k, k_scales), (v, v_scales) = (quantize_kv(rows, cache, zero=zero) for rows in (k, v))
        given = {"k_scale_pages": k_scales, "v_scale_pages": v_scales}
    edges = torch.tensor([0, *(tokens for tokens, _ in LENS)]).cumsum(0).int()
    pages = torch.stack([k, v], 3).flatten(2, 3) if cache == "combined" else (k, v)
    q = torch.randn(int(edges[-1]), heads * group, HEAD_DIM, generator=generator).to(dtype)
    lens = torch.tensor([keys for _, keys in LENS]).int()
    return {"q": q, "kv_pages": pages, "kv_lens": lens, "page_indices": table, "cu_q_lens": edges} | given


def masks(call: dict[str, Any], name: str) -> dict[str, Any]:
    """The arguments that a mask or a bias adds to a call."""
    tokens, q_heads, _ = call["q"].shape
    generator = torch.Generator().manual_seed(1)
    if name == "ranges":
        ranges = causal_ranges(call["cu_q_lens"], call["kv_lens"], tokens)
        first = torch.stack([ranges[:, 0, 0], ranges[:, 0, 1].clamp(max=5)], -1)
        return {"key_ranges": torch.stack([first, ranges[:, 0].clamp(min=9)], 1).contiguous()}
    return {
        "none": {},
        "window": {"sliding_window": 30, "sinks": torch.randn(q_heads, generator=generator)},
        "capped": {"soft_cap": 3.0, "return_max_logits": True},
        "biases": {
            "alibi_slopes": torch.rand(q_heads, generator=generator),
            "relative_bias": torch.randn(q_heads, 20, generator=generator),
        },
        "drafts": {"draft_mask": torch.rand(tokens, 4, generator=generator) < 0.7},
    }[name]


@pytest.mark.parametrize("mask", ["none", "window", "ranges", "capped", "biases", "drafts"])
@pytest.mark.parametrize("cache", ["combined", "split", "e4m3", "int8_token_head", "int4_token_head", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "group"), [(8, 4), (6, 3), (2, 5)])
def test_heads_that_share_a_program_change_no_bit(heads: int, group: int, dtype: Any, cache: str, mask: str) -> None:
    call = batch(heads, group, dtype, cache)
    call |= masks(call, mask) | {"return_lse": True}
    together = with_threads(1, lambda: ragged_paged_attention(**call, backend="numba"))
    # With more threads than programs, each program has one head.
    alone = with_threads(64, lambda: ragged_paged_attention(**call, backend="numba"))
    for ours, each in zip(together, alone, strict=True):
        assert torch.equal(ours.isnan(), each.isnan())
        assert torch.equal(ours.nan_to_num(), each.nan_to_num())
    if dtype == torch.float32:  # the suite checks the rounding of bfloat16
        expected = ragged_paged_attention(**call, backend="reference")
        assert agrees(together[0], expected[0], "float32")
        assert agrees(together[1], expected[1], "lse float32")


@pytest.mark.parametrize(("heads", "group"), [(8, 4), (2, 5)])
def test_jax_computes_the_same_bits(heads: int, group: int) -> None:
    jax = pytest.importorskip("jax")
    from ragged_attention.jax import ragged_paged_attention as from_jax

    call = batch(heads, group, torch.float32, "combined")
    ours = from_jax(**{name: jax.numpy.asarray(value.numpy()) for name, value in call.items()}, backend="numba")
    expected = with_threads(1, lambda: ragged_paged_attention(**call, backend="numba"))
    assert torch.equal(torch.from_numpy(np.array(ours)).nan_to_num(), expected.nan_to_num())
