"""FlashInfer's block sparse attention agrees with dense float64 attention under a mask of the same blocks."""

import importlib
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from ragged_attention.errors import InvalidInput, Unsupported
from tests.flashinfer_oracle import dense, same

sparse: Any = importlib.import_module("ragged_attention.compat.flashinfer.sparse")
WORKSPACE = torch.empty(16, dtype=torch.uint8)
HEADS, KV_HEADS, DIM = 4, 2, 32
FLOATS = {"q_data_type": torch.float32, "o_data_type": torch.float32}


def normal(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def matrix(num_rows: int, num_columns: int) -> Any:
    """A bool matrix of the blocks that are present: an empty row, random rows and a full row."""
    drawn = torch.rand(num_rows, num_columns, generator=torch.Generator().manual_seed(0)) < 0.4
    drawn[0], drawn[-1] = False, True
    return drawn


def compressed(present: Any) -> tuple[Any, Any]:
    """The row pointers and column indices of a block matrix; the columns of each row are in descending order."""
    indices = [row.nonzero()[:, 0].flip(0) for row in present]
    return torch.tensor([0, *map(len, indices)]).cumsum(0).int(), torch.cat(indices).int()


def planned(present: Any, m: int, n: int, r: int, c: int, **settings: Any) -> Any:
    wrapper = sparse.BlockSparseAttentionWrapper(WORKSPACE)
    wrapper.plan(*compressed(present), m, n, r, c, HEADS, KV_HEADS, DIM, **(FLOATS | settings))
    return wrapper


@pytest.mark.parametrize(("r", "c"), [(1, 1), (4, 16), (3, 5), (16, 6), (2, 512)])
def test_blocks_of_one_size(r: int, c: int) -> None:
    m, n = 4 * r - (1 if r > 2 else 0), 6 * c
    present = matrix(4, 6)
    q, k, v = normal(m, HEADS, DIM), normal(n, KV_HEADS, DIM), normal(n, KV_HEADS, DIM)
    wrapper = planned(present, m, n, r, c)
    out, lse = wrapper.run(q, k, v, return_lse=True)
    want, want_lse = dense(q, k, v, mask=present.repeat_interleave(r, 0)[:m].repeat_interleave(c, 1))
    same(out, want)
    same(lse, want_lse)
    assert wrapper._blocks.block_size == min(c & -c, 256)


def test_masks_within_blocks() -> None:
    present, r, c = matrix(3, 5), 4, 6
    indptr, indices = compressed(present)
    mask = torch.rand(len(indices), r, c, generator=torch.Generator().manual_seed(1)) < 0.5
    whole = torch.zeros(12, 30, dtype=torch.bool)
    for row in range(3):
        for place in range(int(indptr[row]), int(indptr[row + 1])):
            column = int(indices[place])
            whole[row * r : (row + 1) * r, column * c : (column + 1) * c] = mask[place]
    q, k, v = normal(12, HEADS, DIM), normal(30, KV_HEADS, DIM), normal(30, KV_HEADS, DIM)
    same(planned(present, 12, 30, r, c, mask=mask).run(q, k, v), dense(q, k, v, mask=whole)[0])


def test_a_block_that_is_named_twice_counts_once() -> None:
    wrapper = sparse.BlockSparseAttentionWrapper(WORKSPACE)
    indptr, indices = torch.tensor([0, 3]), torch.tensor([1, 0, 1])
    wrapper.plan(indptr, indices, 2, 8, 2, 4, HEADS, KV_HEADS, DIM, **FLOATS)
    q, k, v = normal(2, HEADS, DIM), normal(8, KV_HEADS, DIM), normal(8, KV_HEADS, DIM)
    same(wrapper.run(q, k, v), dense(q, k, v)[0])


def test_settings_buffers_and_scales() -> None:
    present, mask = matrix(4, 6), matrix(4, 6).repeat_interleave(2, 0).repeat_interleave(4, 1)
    q, k, v = normal(8, HEADS, DIM), normal(24, KV_HEADS, DIM), normal(24, KV_HEADS, DIM)
    wrapper = planned(present, 8, 24, 2, 4, logits_soft_cap=3.0, sm_scale=0.3)
    buffers = {"out": torch.empty(8, HEADS, DIM), "lse": torch.empty(8, HEADS)}
    out, lse = wrapper.run(q, k, v, return_lse=True, **buffers)
    assert out is buffers["out"]
    assert lse is buffers["lse"]
    want = dense(q, k, v, mask=mask, cap=3.0, sm_scale=0.3)
    same(out, want[0])
    same(lse, want[1])
    same(wrapper.forward(q, k, v, sm_scale=0.1), dense(q, k, v, mask=mask, sm_scale=0.1)[0])

    e4m3 = torch.float8_e4m3fn
    wrapper = planned(present, 8, 24, 2, 4, q_data_type=e4m3, o_data_type=torch.bfloat16)
    q, k, v = (each.to(e4m3) for each in (q, k, v))
    scales = [torch.tensor([0.5, 2.0, 1.0, 0.25]), torch.tensor([0.5, 1.5]), torch.tensor([2.0, 0.5])]
    out = wrapper.run(q, k, v, *scales)
    of_q, of_k, of_v = (each.float() * scale[:, None] for each, scale in zip((q, k, v), scales, strict=True))
    same(out, dense(of_q, of_k, of_v, mask=mask)[0], torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("unit", [1, 2, 512])
def test_blocks_of_any_sizes(unit: int, dtype: Any) -> None:
    """Blocks may have any sizes, and each KV head its own partition."""
    rows, columns = torch.tensor([[3, 2, 1], [1, 1, 4]]), unit * torch.tensor([[4, 1, 2], [2, 4, 1]])
    present = torch.stack([matrix(3, 3), matrix(3, 3).flip(0)])
    n = 7 * unit
    q, k, v = normal(HEADS, 6, DIM, dtype=dtype), *(normal(KV_HEADS, n, DIM, dtype=dtype) for _ in range(2))
    wrapper = sparse.VariableBlockSparseAttentionWrapper(WORKSPACE)
    wrapper.plan(present, rows.int(), columns.int(), HEADS, KV_HEADS, DIM, q_data_type=dtype)
    out, lse = wrapper.run(q, k, v, return_lse=True)
    masks = [
        each.repeat_interleave(of_rows, 0).repeat_interleave(of_columns, 1)
        for each, of_rows, of_columns in zip(present, rows, columns, strict=True)
    ]
    mask = torch.stack(masks).repeat_interleave(HEADS // KV_HEADS, 0)
    want, want_lse = dense(*(each.transpose(0, 1) for each in (q, k, v)), mask=mask)
    assert out.is_contiguous()
    assert out.dtype == dtype
    same(out, want.transpose(0, 1), dtype)
    same(lse, want_lse.T)
    assert wrapper._blocks.block_size == min(unit, 256)
    forwarded = wrapper.forward(q, k, v, sm_scale=0.2, logits_soft_cap=2.0)
    want, _ = dense(*(each.transpose(0, 1) for each in (q, k, v)), mask=mask, sm_scale=0.2, cap=2.0)
    same(forwarded, want.transpose(0, 1), dtype)


def test_empty_matrices() -> None:
    none = torch.zeros(3, 4, dtype=torch.bool)
    out, lse = planned(none, 6, 8, 2, 2).run(
        normal(6, HEADS, DIM), normal(8, KV_HEADS, DIM), normal(8, KV_HEADS, DIM), return_lse=True
    )
    assert (out == 0).all()
    assert lse.isneginf().all()
    masked = planned(none, 6, 8, 2, 2, mask=torch.zeros(0, 2, 2, dtype=torch.bool))
    assert (masked.run(normal(6, HEADS, DIM), normal(8, KV_HEADS, DIM), normal(8, KV_HEADS, DIM)) == 0).all()
    wrapper = sparse.BlockSparseAttentionWrapper(WORKSPACE)
    nothing = torch.zeros(0, dtype=torch.int32)
    wrapper.plan(torch.zeros(1, dtype=torch.int32), nothing, 0, 8, 2, 2, HEADS, KV_HEADS, DIM, **FLOATS)
    out = wrapper.run(normal(0, HEADS, DIM), normal(8, KV_HEADS, DIM), normal(8, KV_HEADS, DIM))
    assert out.shape == (0, HEADS, DIM)
    wrapper = sparse.VariableBlockSparseAttentionWrapper(WORKSPACE)
    sizes = torch.ones(2, 3, dtype=torch.int32), torch.ones(2, 0, dtype=torch.int32)
    wrapper.plan(none[None, :, :0].expand(2, 3, 0), *sizes, HEADS, KV_HEADS, DIM, q_data_type="float32")
    out = wrapper.run(normal(HEADS, 3, DIM), normal(KV_HEADS, 0, DIM), normal(KV_HEADS, 0, DIM))
    assert out.shape == (HEADS, 3, DIM)
    assert (out == 0).all()


def test_what_would_change_results_is_refused_by_name() -> None:
    present, tensor = matrix(2, 2), torch.ones(1)
    for name in (
        "packed_mask",
        "block_mask",
        "kv_block_lens",
        "q2k_indices",
        "q2k_num",
        "q_scale",
        "k_scale",
        "v_scale",
    ):
        with pytest.raises(Unsupported, match=rf"expected {name}=None, got a tensor of shape \[1\]"):
            planned(present, 4, 4, 2, 2, **{name: tensor})
    with pytest.raises(
        Unsupported, match="expected causal=False, got True: FlashInfer counts positions among the keys"
    ):
        planned(present, 4, 4, 2, 2, causal=True)
    with pytest.raises(Unsupported, match="expected pos_encoding_mode='NONE', got 'ALIBI': lists of keys have no"):
        planned(present, 4, 4, 2, 2, pos_encoding_mode="ALIBI")
    q, k = normal(4, HEADS, DIM), normal(4, KV_HEADS, DIM)
    with pytest.raises(Unsupported, match="expected pos_encoding_mode='NONE', got 'ROPE_LLAMA'"):
        planned(present, 4, 4, 2, 2).forward(q, k, k, pos_encoding_mode="ROPE_LLAMA")
    sizes = torch.full((KV_HEADS, 2), 2, dtype=torch.int32)
    wrapper, plan = (
        sparse.VariableBlockSparseAttentionWrapper(WORKSPACE),
        (present.expand(KV_HEADS, 2, 2), sizes, sizes),
    )
    with pytest.raises(Unsupported, match="expected causal=False"):
        wrapper.plan(*plan, HEADS, KV_HEADS, DIM, causal=True)
    with pytest.raises(Unsupported, match="expected pos_encoding_mode='NONE'"):
        wrapper.plan(*plan, HEADS, KV_HEADS, DIM, pos_encoding_mode="ALIBI")
    wrapper.plan(*plan, HEADS, KV_HEADS, DIM, q_data_type="float32")
    q, k = normal(HEADS, 4, DIM), normal(KV_HEADS, 4, DIM)
    for name in ("out", "lse"):
        with pytest.raises(Unsupported, match=f"expected {name}=None, got a tensor"):
            wrapper.run(q, k, k, **{name: tensor})


def test_invalid_arguments_are_said_in_flashinfers_words() -> None:
    present = matrix(2, 2)
    with pytest.raises(InvalidInput, match="expected R >= 1 and C >= 1, which divides N, got R=2, C=3, N=4"):
        planned(present, 4, 4, 2, 3)
    with pytest.raises(InvalidInput, match=r"expected indptr.shape to be \[4\], got \[3\]"):
        planned(present, 6, 4, 2, 2)
    with pytest.raises(InvalidInput, match=r"expected mask to be torch.bool \[2, 2, 2\], got torch.uint8 \[2, 2, 2\]"):
        planned(present, 4, 4, 2, 2, mask=torch.ones(2, 2, 2, dtype=torch.uint8))
    q, k = normal(4, HEADS, DIM), normal(4, KV_HEADS, DIM)
    with pytest.raises(RuntimeError, match=r"expected plan\(\) before run\(\) of BlockSparseAttentionWrapper"):
        sparse.BlockSparseAttentionWrapper(WORKSPACE).run(q, k, k)
    wrapper = planned(present, 4, 4, 2, 2)
    with pytest.raises(InvalidInput, match=r"expected q.shape to be \[4, 4, 32\] as in plan\(\), got \[3, 4, 32\]"):
        wrapper.run(q[:3], k, k)
    with pytest.raises(InvalidInput, match=r"expected k.shape to be \[4, 2\] as in plan\(\), got \[3, 2\]"):
        wrapper.run(q, k[:3], k)
    with pytest.raises(InvalidInput, match=r"expected v.dtype to be torch.float32 as in plan\(\), got torch.float16"):
        wrapper.run(q, k, k.half())
    sizes, uneven = torch.full((KV_HEADS, 2), 2, dtype=torch.int32), torch.tensor([[2, 2], [2, 1]], dtype=torch.int32)
    variable = sparse.VariableBlockSparseAttentionWrapper(WORKSPACE)
    with pytest.raises(
        InvalidInput, match="expected the shapes of block_mask_map, block_row_sz and block_col_sz to be"
    ):
        variable.plan(present, sizes, sizes, HEADS, KV_HEADS, DIM)
    with pytest.raises(InvalidInput, match="expected block_row_sz and block_col_sz to have one sum for all heads, got"):
        variable.plan(present.expand(KV_HEADS, 2, 2), sizes, uneven, HEADS, KV_HEADS, DIM)
