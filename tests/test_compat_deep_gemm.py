"""Code written for DeepGEMM's logits gets the results of DeepGEMM's formulas, within its tolerance and on its data."""

from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import ragged_attention.compat.deep_gemm as deep_gemm
from ragged_attention.errors import InvalidInput
from ragged_attention.torch import write_indexer_cache

E4M3 = torch.float8_e4m3fn


def calc_diff(got: Any, want: Any) -> float:
    """DeepGEMM's measure of difference: one minus a cosine that also compares the arrays' lengths."""
    got, want = got.double(), want.double()
    return float(1 - 2 * (got * want).sum() / (got * got + want * want).sum())


def packed(seq_len: int, seq_len_kv: int, heads: int = 8, dim: int = 64) -> Any:
    generator = torch.Generator().manual_seed(seq_len)
    keys = torch.randn(seq_len_kv, dim, generator=generator)
    scale = keys.abs().amax(1).clamp(1e-4) / 448
    return {
        "q": torch.randn(seq_len, heads, dim, generator=generator).to(E4M3),
        "kv": ((keys / scale[:, None]).to(E4M3), scale),
        "weights": torch.randn(seq_len, heads, generator=generator),
    }


def wanted(call: dict[str, Any], starts: Any, stops: Any) -> Any:
    keys = call["kv"][0].float() * call["kv"][1][:, None]
    score = torch.einsum("mhd,nd->hmn", call["q"].float(), keys).relu()
    logits = (score * call["weights"].T[:, :, None]).sum(0)
    columns = torch.arange(len(keys))
    return logits.masked_fill((columns < starts[:, None]) | (columns >= stops[:, None]), -torch.inf)


def same(got: Any, want: Any, bound: float = 5e-6) -> None:
    assert torch.equal(got == -torch.inf, want == -torch.inf)
    seen = want != -torch.inf
    assert calc_diff(got[seen], want[seen]) < bound


@pytest.mark.parametrize(("seq_len", "seq_len_kv"), [(64, 128), (70, 70), (1, 500)])
@pytest.mark.parametrize("newer", [False, True])
def test_packed_keys(seq_len: int, seq_len_kv: int, newer: bool) -> None:
    call = packed(seq_len, seq_len_kv)
    starts = torch.arange(seq_len, dtype=torch.int32) // 3
    stops = torch.arange(seq_len, dtype=torch.int32) + (seq_len_kv - seq_len)
    want = wanted(call, starts, stops)
    q, kv, weights = call["q"], call["kv"], call["weights"]
    if newer:
        got = deep_gemm.fp8_fp4_mqa_logits((q, None), kv, weights, cu_seq_len_k_start=starts, cu_seq_len_k_end=stops)
    else:
        got = deep_gemm.fp8_mqa_logits(q, kv, weights, starts, stops)
    same(got, want)
    longest = int((stops - starts).max())
    moved = deep_gemm.fp8_mqa_logits(q, kv, weights, starts, stops, clean_logits=False, max_seqlen_k=longest)
    assert moved.shape == (seq_len, longest)
    for row, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        count = max(stop - start, 0)
        torch.testing.assert_close(moved[row, :count], got[row, start : start + count])
        assert (moved[row, count:] == -torch.inf).all()


@pytest.mark.parametrize("page_size", [32, 64, 7])
@pytest.mark.parametrize("next_n", [1, 2, 4])
@pytest.mark.parametrize("by_query", [False, True])
def test_pages(page_size: int, next_n: int, by_query: bool) -> None:
    batch_size, heads, dim, columns = 3, 8, 64, 300
    generator = torch.Generator().manual_seed(page_size)
    lens = torch.tensor([200, 4, 111], dtype=torch.int32)
    per_seq = -(-200 // page_size)
    table = torch.randperm(batch_size * per_seq, generator=generator).int().view(batch_size, per_seq)
    keys = torch.randn(batch_size * per_seq * page_size, dim, generator=generator)
    cache = torch.full((batch_size * per_seq, page_size, 1, dim + 4), 0xFF, dtype=torch.uint8)
    write_indexer_cache(keys, cache, torch.arange(len(keys)))
    q = torch.randn(batch_size, next_n, heads, dim, generator=generator).to(E4M3)
    weights = torch.randn(batch_size * next_n, heads, generator=generator)
    seen = lens[:, None] - next_n + torch.arange(1, next_n + 1)
    if by_query:
        seen = (seen * torch.rand(batch_size, next_n, generator=generator)).int()
    context_lens = seen.int() if by_query else lens
    meta = deep_gemm.get_paged_mqa_logits_metadata(context_lens, page_size, 132)
    assert (meta.shape, meta.dtype) == ((133, 2), torch.int32)
    got = deep_gemm.fp8_paged_mqa_logits(q, cache, weights, context_lens, table, meta, columns)
    newer = deep_gemm.fp8_fp4_paged_mqa_logits((q, None), cache, weights, context_lens, table, meta, columns)
    assert torch.equal(got, newer)
    rows = keys.view(-1, page_size, dim)[table.long()].flatten(1, 2)
    score = torch.einsum("bnhd,bkd->bnhk", q.float(), rows).relu()
    want = torch.einsum("bnhk,bnh->bnk", score, weights.view(batch_size, next_n, heads)).flatten(0, 1)
    want = torch.nn.functional.pad(want, (0, columns - want.shape[1]))
    want = want.masked_fill(torch.arange(columns) >= seen.reshape(-1, 1), -torch.inf)
    same(got, want, 1e-3)  # DeepGEMM's own bound: `want` is computed from keys that are not quantised
    few = deep_gemm.fp8_fp4_paged_mqa_logits(
        (q, None), cache, weights.bfloat16(), context_lens, table, None, 50, logits_dtype=torch.bfloat16
    )
    assert (few.shape, few.dtype) == ((batch_size * next_n, 50), torch.bfloat16)
    same(few.float(), want[:, :50], 1e-3)


def test_what_is_not_taken_is_said_in_its_words() -> None:
    call = packed(4, 9)
    edges: Any = (torch.zeros(4, dtype=torch.int32), torch.full((4,), 9, dtype=torch.int32))
    q, kv, weights = call.values()
    cases: Any = (
        (r"expected kv\[0\].shape to be", (q, (kv[0][:, :32], kv[1]), weights, *edges)),
        (r"expected kv\[1\].shape to be", (q, (kv[0], kv[1][:5]), weights, *edges)),
        (r"expected cu_seq_len_k_start.dtype to be int32", (q, kv, weights, edges[0].float(), edges[1])),
        (r"expected clean_logits=False with max_seqlen_k", (q, kv, weights, *edges, True, 5)),
        (r"expected q in FP8, got int8: FP4", (q.view(torch.int8), kv, weights, *edges)),
    )
    for text, arguments in cases:
        with pytest.raises(InvalidInput, match=text):
            deep_gemm.fp8_mqa_logits(*arguments)
    with pytest.raises(InvalidInput, match="expected q without scales"):
        deep_gemm.fp8_fp4_mqa_logits((q, weights), kv, weights, *edges)
    with pytest.raises(InvalidInput, match=r"expected logits_dtype to be float32 or bfloat16, got torch\.float16"):
        deep_gemm.fp8_fp4_mqa_logits((q, None), kv, weights, *edges, logits_dtype=torch.float16)
    cache, lens = torch.zeros(2, 4, 1, 68, dtype=torch.uint8), torch.tensor([3], dtype=torch.int32)
    table = torch.tensor([[0, 1]], dtype=torch.int32)
    paged = {"kv_cache": cache, "weights": weights, "context_lens": lens, "block_table": table}
    for text, changes in (
        (r"expected q.shape to be \[batch_size", {"q": q}),
        (r"expected context_lens.shape to be \[batch_size=1\] or", {"context_lens": lens.repeat(2)}),
        (r"expected block_table.dtype to be int32", {"block_table": table.long()}),
        (r"expected kv_cache.shape to be", {"kv_cache": cache[..., :32]}),
    ):
        given: dict[str, Any] = {"q": q[None], "schedule_meta": None, "max_context_len": 8, **paged, **changes}
        with pytest.raises(InvalidInput, match=text):
            deep_gemm.fp8_paged_mqa_logits(**given)
