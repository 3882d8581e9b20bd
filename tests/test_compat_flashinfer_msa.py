"""The drop-ins for FlashInfer's MSA: scores, selection and attention agree with its definitions in float64."""

import importlib
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from ragged_attention.errors import InvalidInput, Unsupported
from tests.flashinfer_oracle import LN2, dense, same

msa: Any = importlib.import_module("ragged_attention.compat.flashinfer.msa_ops")
BLOCK = 128
HEADS, KV_HEADS, DIM = 4, 2, 32
LENS = [(3, 300), (0, 5), (5, 5), (1, 129), (2, 0)]  # (q_len, kv_len)
E4M3 = torch.float8_e4m3fn
FORMS = ("packed", "paged", "views")  # the forms of keys and values


@dataclass
class Case:
    """A batch of requests in FlashInfer's format, with NaN in unused memory, and the separate requests."""

    q: Any
    k: Any
    v: Any
    lists: Any  # [num_kv_heads, total_q, topk]
    tables: dict[str, Any]
    requests: list[tuple[Any, Any, Any, Any]]  # (q, k, v, lists) of each request

    @property
    def edges(self) -> Any:
        return prefix(len(q) for q, *_ in self.requests)


def prefix(lens: Any) -> Any:
    return torch.tensor([0, *lens]).cumsum(0).int()


def case(form: str, dtype: Any = torch.float32, kv_dtype: Any = None, lens: Any = LENS, page_size: int = BLOCK) -> Case:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator)

    requests = []
    for q_len, kv_len in lens:
        k, v = (normal(kv_len, KV_HEADS, DIM).to(kv_dtype or dtype) for _ in range(2))
        blocks = torch.randint(-2, max(-(-kv_len // BLOCK), 1) + 2, (KV_HEADS, q_len, 4), generator=generator).int()
        blocks[..., -1] = blocks[..., 0]  # one block occurs twice in each list
        blocks[:, 1::2] = torch.tensor([-1, 2**31 - 1, 0, -(2**31)], dtype=torch.int32)
        requests.append((normal(q_len, HEADS, DIM).to(dtype), k, v, blocks))
    q, lists = torch.cat([each[0] for each in requests]), torch.cat([each[3] for each in requests], 1)
    if form == "packed":
        k, v = (torch.cat([each[part] for each in requests]) for part in (1, 2))
        return Case(q, k, v, lists, {"cu_seqlens_k": prefix(len(each[1]) for each in requests)}, requests)
    counts = [-(-len(each[1]) // page_size) for each in requests]
    order = torch.randperm(sum(counts) + 2, generator=generator).int()
    table = torch.full((len(lens), max(counts)), 2**31 - 1, dtype=torch.int32)
    pages = torch.full((len(order), KV_HEADS, page_size, 2 * DIM), torch.nan).to(kv_dtype or dtype)
    if form == "paged":
        k_pages, v_pages = torch.full_like(pages[..., :DIM], torch.nan), torch.full_like(pages[..., :DIM], torch.nan)
    else:
        k_pages, v_pages = pages.split(DIM, -1)
    for row, (start, count) in enumerate(zip(prefix(counts).tolist(), counts, strict=False)):
        table[row, :count] = order[start : start + count]
        for position in range(len(requests[row][1])):
            page = order[start + position // page_size]
            for held, part in ((k_pages, 1), (v_pages, 2)):
                held[page, :, position % page_size] = requests[row][part][position]
    used = torch.tensor([kv_len for _, kv_len in lens], dtype=torch.int32)
    return Case(q, k_pages, v_pages, lists, {"page_table": table, "seqused_k": used}, requests)


def mask_of(lists: Any, q_len: int, kv_len: int, causal: bool, first: int | None) -> Any:
    """The mask of the keys that the queries of one request see, bool [num_qo_heads, q_len, kv_len]."""
    position = (kv_len - q_len if first is None else first) + torch.arange(q_len)[:, None]
    key = torch.arange(kv_len)
    named = (lists.long()[..., None] == key // BLOCK).any(2)  # [K, T, N]
    return (named & ((key <= position) | (not causal))).repeat_interleave(HEADS // KV_HEADS, 0)


def wanted(made: Case, causal: bool, firsts: Any = None, scale: float | None = None) -> tuple[Any, Any]:
    """The exact out, and lse to base e."""
    parts = []
    for index, (q, k, v, lists) in enumerate(made.requests):
        first = None if firsts is None else firsts[index]
        mask = mask_of(lists, len(q), len(k), causal, first)
        parts.append(dense(q, k.float(), v.float(), mask=mask, sm_scale=scale))
    return torch.cat([out for out, _ in parts]), torch.cat([lse * LN2 for _, lse in parts])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_attention_to_selected_blocks(form: str, causal: bool) -> None:
    made = case(form)
    out, lse = msa.msa_sparse_attention(
        made.q, made.k, made.v, made.lists, made.edges, causal=causal, return_softmax_lse=True, **made.tables
    )
    want_out, want_lse = wanted(made, causal)
    same(out, want_out)
    same(lse, want_lse)
    assert torch.equal(
        out, msa.msa_sparse_attention(made.q, made.k, made.v, made.lists, made.edges, causal=causal, **made.tables)
    )


@pytest.mark.parametrize("form", FORMS)
def test_positions_of_first_queries(form: str) -> None:
    made, firsts = case(form), [130, 0, 1, 200, 3]
    for given in (torch.tensor(firsts, dtype=torch.int32), 127):
        each = firsts if isinstance(given, torch.Tensor) else [given] * len(firsts)
        out = msa.msa_sparse_attention(
            made.q, made.k, made.v, made.lists, made.edges, causal=True, q_offset=given, **made.tables
        )
        same(out, wanted(made, True, each)[0])
        unmasked = msa.msa_sparse_attention(
            made.q, made.k, made.v, made.lists, made.edges, causal=False, q_offset=given, **made.tables
        )
        same(unmasked, wanted(made, False)[0])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keys_of_8_bits_and_a_factor_on_values(form: str, dtype: Any) -> None:
    made = case(form, dtype, E4M3)
    out = msa.msa_sparse_attention(
        made.q, made.k, made.v, made.lists, made.edges, causal=True, v_global_scale=0.5, **made.tables
    )
    assert out.dtype == dtype
    same(out, 0.5 * wanted(made, True)[0], dtype)


def test_a_factor_on_values_of_the_queries_dtype() -> None:
    made = case("packed")
    out = msa.msa_sparse_attention(made.q, made.k, made.v, made.lists, made.edges, v_global_scale=3.0, **made.tables)
    same(out, 3.0 * wanted(made, False)[0])


def test_the_lse_of_other_temperatures() -> None:
    made = case("packed")
    out, lse, warm = msa.msa_sparse_attention(
        made.q, made.k, made.v, made.lists, made.edges, softmax_scale=0.2, return_temperature_lse=True,
        lse_temperature_scale=0.7, **made.tables,
    )  # fmt: skip
    want_out, want_lse = wanted(made, False, scale=0.2)
    same(out, want_out)
    same(lse, want_lse)
    same(warm, wanted(made, False, scale=0.2 * 0.7)[1])


@pytest.mark.parametrize("seqlen_q", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_decode(form: str, seqlen_q: int) -> None:
    made = case(form, lens=[(seqlen_q, 300), (seqlen_q, 2), (seqlen_q, 128)], page_size=16)
    buffer = torch.full_like(made.q, torch.nan)
    out, lse = msa.msa_sparse_decode_attention(
        made.q, made.k, made.v, made.lists, seqlen_q=seqlen_q, return_softmax_lse=True, out=buffer, **made.tables
    )
    assert out is buffer
    want_out, want_lse = wanted(made, True)
    same(out, want_out)
    same(lse, want_lse)


def test_decode_of_8_bits() -> None:
    made = case("paged", E4M3, E4M3, lens=[(1, 300), (1, 2)])
    out = msa.msa_sparse_decode_attention(made.q, made.k, made.v, made.lists, **made.tables)
    assert out.dtype == torch.bfloat16
    same(out, wanted(made, True)[0], torch.bfloat16)


def scores_of(made: Case, causal: bool, firsts: Any, tiles: int) -> Any:
    """The scores of blocks: the largest product for each head, block and query."""
    parts = []
    for index, (q, k, _, _) in enumerate(made.requests):
        first = len(k) - len(q) if firsts is None else firsts[index]
        products = torch.einsum("qhd,khd->hqk", q.double(), k.double().repeat_interleave(HEADS // KV_HEADS, 1))
        hidden = torch.arange(len(k)) > first + torch.arange(len(q))[:, None]
        products = products.masked_fill(hidden & causal, -torch.inf)[..., : tiles * BLOCK]
        padded = torch.nn.functional.pad(products, (0, tiles * BLOCK - products.shape[2]), value=-torch.inf)
        parts.append(padded.unflatten(2, (tiles, BLOCK)).amax(3).transpose(1, 2))
    return torch.cat(parts, 2)


@pytest.mark.parametrize("firsts", [None, [130, 0, 1, 200, 3]])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_scores(form: str, causal: bool, firsts: Any) -> None:
    made = case(form)
    given = None if firsts is None else torch.tensor(firsts, dtype=torch.int32)
    common = {"causal": causal, "q_offset": given, **made.tables}
    scores = msa.msa_proxy_score(made.q, made.k, made.edges, **common)
    want = scores_of(made, causal, firsts, 3)
    assert scores.shape == want.shape
    torch.testing.assert_close(scores.double(), want, rtol=1e-4, atol=1e-4)
    for tiles in (2, 5):
        buffer = torch.empty(1, tiles, len(made.q))
        for sizes in ({"max_k_tiles": tiles}, {}):
            found = msa.msa_proxy_score(made.q, made.k, made.edges, reduce_heads=True, output=buffer, **sizes, **common)
            assert found is buffer
            want = scores_of(made, causal, firsts, tiles).amax(0, keepdim=True)
            torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["packed", "paged"])
def test_scores_of_8_bits(form: str) -> None:
    made = case(form, torch.bfloat16, E4M3)
    scores = msa.msa_proxy_score(made.q, made.k, made.edges, **made.tables)
    torch.testing.assert_close(scores.double(), scores_of(made, True, None, 3), rtol=1e-4, atol=1e-4)


def selected(scores: Any, topk: int, valid: int, begin: int, end: int) -> list[int]:
    """The blocks selected for one query and head, if no two blocks have the same score."""
    last = max(valid - end, begin)
    forced = [block for block in range(valid) if block < begin or block >= last]
    free = [block for block in range(valid) if block not in forced and scores[block] > -torch.inf]
    best = sorted(free, key=lambda block: -scores[block])[: topk - len(forced)]
    return sorted(forced + best) + [-1] * (topk - len(forced) - len(best))


@pytest.mark.parametrize(("begin", "end"), [(0, 0), (0, 1), (2, 3)])
def test_selection(begin: int, end: int) -> None:
    heads, tiles, tokens, topk = 2, 24, 9, 7
    scores = torch.randperm(heads * tiles * tokens, generator=torch.Generator().manual_seed(0)).float()
    scores = scores.view(heads, tiles, tokens)
    scores[:, ::2] = -scores[:, ::2]
    scores[1, 4:20, 3] = -torch.inf  # leaves fewer finite scores than topk
    scores[0, 10, 4] = torch.inf
    counts = torch.tensor([24, 1, 0, 22, 24, 5, -3, 99, 2], dtype=torch.int32)
    givens: tuple[Any, ...] = (None, 20, counts)
    for given in givens:
        buffer = torch.empty(tokens, heads, topk, dtype=torch.int32)
        lists = msa.msa_topk_select(scores, topk, given, buffer, force_begin_blocks=begin, force_end_blocks=end)
        assert lists is buffer
        for token in range(tokens):
            valid = min(max(int(counts[token]), 0), tiles) if given is counts else int(given or tiles)
            for head in range(heads):
                assert lists[token, head].tolist() == selected(scores[head, :, token], topk, valid, begin, end)


def test_of_equal_scores_the_newer_block_is_selected() -> None:
    scores = torch.zeros(1, 5, 1)
    scores[0, 3] = torch.nan
    assert msa.msa_topk_select(scores, 2).tolist() == [[[2, 4]]]
    assert msa.msa_topk_select(scores, 2, force_end_blocks=2).tolist() == [[[3, 4]]]


@pytest.mark.parametrize("form", FORMS)
def test_the_three_steps_together(form: str) -> None:
    made = case(form, lens=[(4, 900), (2, 140)])
    scores = msa.msa_proxy_score(made.q, made.k, made.edges, **made.tables)
    valid = torch.tensor([-(-900 // BLOCK)] * 4 + [2] * 2, dtype=torch.int32)
    lists = msa.msa_topk_select(scores[:: HEADS // KV_HEADS].contiguous(), 8, valid, force_end_blocks=1)
    out = msa.msa_sparse_attention(
        made.q, made.k, made.v, lists.permute(1, 0, 2).contiguous(), made.edges, causal=True, **made.tables
    )
    parts = [dense(q, k, v, causal=True)[0] for q, k, v, _ in made.requests]
    same(out, torch.cat(parts))  # all blocks are selected


@pytest.mark.parametrize("form", ["packed", "paged"])
def test_empty_batches(form: str) -> None:
    made = case(form, lens=[(0, 3)])
    tables = {name: each[:0] if name != "cu_seqlens_k" else each[:1] for name, each in made.tables.items()}
    edges = made.edges[:1]
    assert msa.msa_sparse_attention(made.q, made.k, made.v, made.lists, edges, q_offset=1, **tables).shape == (0, 4, 32)
    assert msa.msa_sparse_decode_attention(made.q, made.k, made.v, made.lists, **tables).shape == (0, 4, 32)
    for offset in (None, 1):
        assert msa.msa_proxy_score(made.q, made.k, edges, q_offset=offset, **tables).shape == (4, 0, 0)
    assert msa.msa_topk_select(torch.empty(2, 3, 0), 2).shape == (0, 2, 2)


def test_views_of_pages_that_hold_keys_and_values_are_taken() -> None:
    assert msa.SUPPORTS_PACKED_KV
    assert msa.supports_packed_kv("cpu")


def test_what_would_change_results_is_refused_by_name() -> None:
    made = case("packed")
    arguments = (made.q, made.k, made.v, made.lists)
    for name in ("k_scale", "v_scale", "k_global_scale"):
        with pytest.raises(Unsupported, match=f"expected {name}=None, got 2.0: keys and values of 4 bits"):
            msa.msa_sparse_attention(*arguments, made.edges, **made.tables, **{name: 2.0})
        with pytest.raises(Unsupported, match=f"expected {name}=None"):
            msa.msa_sparse_decode_attention(*arguments, **made.tables, **{name: 2.0})
    packed = torch.zeros(len(made.k), KV_HEADS, DIM // 2, dtype=torch.uint8)
    with pytest.raises(Unsupported, match=r"expected k.dtype to be q.dtype or float8_e4m3fn, got torch.uint8"):
        msa.msa_sparse_attention(made.q, packed, packed, made.lists, made.edges, **made.tables)
    with pytest.raises(Unsupported, match=r"expected v.dtype to be q.dtype or float8_e4m3fn, got torch.uint8"):
        msa.msa_sparse_attention(made.q, made.k, packed, made.lists, made.edges, **made.tables)


def test_invalid_arguments_are_said_in_flashinfers_words() -> None:
    made, paged = case("packed"), case("paged")
    with pytest.raises(InvalidInput, match="expected cu_seqlens_k without page_table, got None"):
        msa.msa_proxy_score(made.q, made.k, made.edges)
    with pytest.raises(InvalidInput, match="expected seqused_k with page_table, got None"):
        msa.msa_proxy_score(made.q, paged.k, made.edges, page_table=paged.tables["page_table"])
    with pytest.raises(InvalidInput, match=r"expected k.shape to be \[total_k, num_kv_heads, D\]"):
        msa.msa_proxy_score(made.q, paged.k, made.edges, **made.tables)
    with pytest.raises(InvalidInput, match=r"expected k.shape to be \[num_pages, num_kv_heads, page_size, D\]"):
        msa.msa_sparse_attention(made.q, made.k, made.v, made.lists, made.edges, **paged.tables)
    with pytest.raises(InvalidInput, match=r"expected q2k_indices.shape to be \[num_kv_heads, total_q, topk\]"):
        msa.msa_sparse_attention(made.q, made.k, made.v, made.lists[0], made.edges, **made.tables)
    with pytest.raises(InvalidInput, match=r"expected q2k_indices.dtype to be int32, got int64"):
        msa.msa_sparse_attention(made.q, made.k, made.v, made.lists.long(), made.edges, **made.tables)
    with pytest.raises(InvalidInput, match=r"expected q.shape\[0\] to be a multiple of seqlen_q, got 11, seqlen_q=2"):
        msa.msa_sparse_decode_attention(made.q, made.k, made.v, made.lists, seqlen_q=2, **made.tables)
    scores = torch.zeros(2, 8, 3)
    with pytest.raises(InvalidInput, match=r"expected max_score.shape to be \[num_qo_heads, max_k_tiles, total_qo_len"):
        msa.msa_topk_select(scores[0], 4)
    with pytest.raises(InvalidInput, match="expected force_begin_blocks and force_end_blocks from 0 on with a sum"):
        msa.msa_topk_select(scores, 4, force_begin_blocks=3, force_end_blocks=2)
    for count in (0, 9, 2):
        with pytest.raises(InvalidInput, match="num_valid_pages from 1 on, no fewer than the 3 blocks that are"):
            msa.msa_topk_select(scores, 4, count, force_begin_blocks=3)
    for counts in (torch.ones(3), torch.ones(4, dtype=torch.int32)):
        with pytest.raises(InvalidInput, match="expected num_valid_pages to be 1D int32 with total_qo_len=3 entries"):
            msa.msa_topk_select(scores, 4, counts)
