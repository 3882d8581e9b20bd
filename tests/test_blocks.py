"""Block selection agrees with independent definitions: dense torch, and the indexer of transformers' MiniMax M3."""

import itertools
from typing import Any

import numpy as np
import pytest

from ragged_attention.errors import Unsupported
from ragged_attention.reference.top_k_blocks import top_k_blocks

torch = pytest.importorskip("torch")
import ragged_attention.torch as rt  # noqa: E402

BACKENDS = ("reference", "eager", "numba")


def ints(*values: Any) -> Any:
    return torch.tensor(values, dtype=torch.int32)


def dense_scores(q: Any, k: Any, block_size: int) -> Any:
    """The scores [T, H, B] of the last T tokens of one sequence with keys [n, K, D], from a matrix of all products."""
    tokens, heads, _ = q.shape
    products = torch.einsum("thd,nhd->thn", q.double(), k.double().repeat_interleave(heads // k.shape[1], 1))
    future = torch.arange(len(k)) > len(k) - tokens + torch.arange(tokens)[:, None]
    products = products.masked_fill(future[:, None], -torch.inf)
    whole = torch.nn.functional.pad(products, (0, -len(k) % block_size), value=-torch.inf)
    return whole.unflatten(2, (-1, block_size)).amax(3).float()


def chosen_by_sort(scores: Any, top_k: int, init_blocks: int, local_blocks: int) -> list[int]:
    """The blocks selected from one row of scores, computed in plain Python."""
    seen = [block for block, score in enumerate(scores) if score > -np.inf]
    forced = [block for block in seen if block < init_blocks or block > seen[-1] - local_blocks]
    others = sorted((block for block in seen if block not in forced), key=lambda block: (-scores[block], -block))
    return sorted(forced + others[: top_k - len(forced)])


def batch(page_size: int, seed: int = 0) -> tuple[Any, Any, dict[str, Any], list[tuple[Any, Any, slice]]]:
    """Queries, pages and tables of a batch, and each sequence's queries, keys and rows.

    The sequences are a prompt, a chunk and two single tokens.
    """
    torch.manual_seed(seed)
    lens, heads, key_heads, dim = ((9, 9), (4, 37), (1, 50), (1, 1)), 6, 2, 32
    used = [-(-kv_len // page_size) for _, kv_len in lens]
    pages = torch.randn(sum(used) + 3, page_size, key_heads, dim)
    order = torch.randperm(len(pages)).int()
    table = torch.full((len(lens), max(used)), -7, dtype=torch.int32)
    q = torch.randn(sum(q_len for q_len, _ in lens), heads, dim)
    parts, start = [], 0
    for seq, (q_len, kv_len) in enumerate(lens):
        table[seq, : used[seq]] = order[sum(used[:seq]) : sum(used[: seq + 1])]
        keys = pages[table[seq, : used[seq]].long()].flatten(0, 1)[:kv_len]
        rows = slice(start, start + q_len)
        parts.append((q[rows], keys, rows))
        start += q_len
    edges = [0, *itertools.accumulate(q_len for q_len, _ in lens)]
    tables = {"page_indices": table, "kv_lens": ints(*(kv_len for _, kv_len in lens)), "cu_q_lens": ints(*edges)}
    return q, pages, tables, parts


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("block_size", "page_size"), [(1, 4), (4, 4), (8, 3), (2, 16), (256, 5)])
def test_scores_and_choice_are_those_of_a_dense_matrix(backend, block_size, page_size):
    q, pages, tables, parts = batch(page_size)
    scores = rt.block_scores(q, pages, block_size=block_size, **tables, backend=backend)
    forced = {"init_blocks": 1, "local_blocks": 2}
    chosen = rt.select_blocks(q, pages, 4, block_size=block_size, **forced, **tables, backend=backend)
    for own_q, keys, rows in parts:
        want = dense_scores(own_q, keys, block_size)
        blocks = want.shape[2]
        torch.testing.assert_close(scores[rows, :, :blocks], want, rtol=1e-4, atol=1e-4)
        assert scores[rows, :, blocks:].isneginf().all()
        for index in np.ndindex(*want.shape[:2]):
            row = chosen[rows][index].tolist()
            expected = chosen_by_sort(want[index].tolist(), 4, **forced)
            assert row == expected + [-1] * (4 - len(expected))


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_keys_are_scored_from_the_start_of_their_sequence(backend):
    """Blocks are counted from the start of a sequence, not from the first packed key."""
    _, _, _, parts = batch(4)
    q, keys = (torch.cat([part[index] for part in parts]) for index in (0, 1))
    edges = [0, *itertools.accumulate(len(part[1]) for part in parts)]
    starts = ints(*(edges[seq] for seq, part in enumerate(parts) for _ in part[0]))
    stops = ints(
        *(edges[seq + 1] - len(part[0]) + i + 1 for seq, part in enumerate(parts) for i in range(len(part[0])))
    )
    scores = rt.block_scores(q, keys, block_size=4, starts=starts, stops=stops, max_keys=50, backend=backend)
    assert scores.shape[2] == 13
    for own_q, own_keys, rows in parts:
        want = dense_scores(own_q, own_keys, 4)
        torch.testing.assert_close(scores[rows, :, : want.shape[2]], want, rtol=1e-4, atol=1e-4)
        assert scores[rows, :, want.shape[2] :].isneginf().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_which_blocks_are_chosen(backend):
    """`top_k_blocks` follows each of its rules."""
    inf, nan = torch.inf, torch.nan

    def chosen(scores: list[float], top_k: int, **forced: Any) -> list[int]:
        return rt.top_k_blocks(torch.tensor([[scores]], dtype=torch.float32), top_k, **forced, backend=backend)[
            0, 0
        ].tolist()

    assert chosen([1, 3, 2, -inf], 2) == [1, 2]
    assert chosen([2, 1, 2, 2], 2) == [2, 3]  # ties go to the newer block
    assert chosen([0.0, -0.0, -1], 1) == [1]  # zeros of both signs are equal
    assert chosen([1, 2], 4) == [0, 1, -1, -1]
    assert chosen([1, -inf, 2, -inf], 4, local_blocks=2) == [0, 2, -1, -1]  # a block that is not seen is never selected
    assert chosen([9, 8, 7, 1, 0, -inf], 2, local_blocks=2) == [3, 4]  # forced blocks count towards top_k = 2
    assert chosen([-9, 8, 7, 1, 0, -inf], 3, init_blocks=1, local_blocks=1) == [0, 1, 4]
    assert chosen([1, 2, -inf], 3, init_blocks=3) == [0, 1, -1]
    assert chosen([inf, inf, 5], 2, local_blocks=1) == [1, 2]  # not even infinity displaces a forced block
    assert chosen([nan, 1, nan, 0], 2) == [1, 3]  # a block whose score is NaN is not selected
    # A block whose score is NaN is selected if it is forced, because it counts as seen.
    assert chosen([3, 1, nan, -inf], 2, local_blocks=1) == [0, 2]
    assert chosen([nan, nan], 2) == [-1, -1]
    assert chosen([-inf, -inf], 2, init_blocks=1, local_blocks=1) == [-1, -1]


def test_a_nan_among_scores_of_a_long_row_is_not_chosen():
    scores = np.random.default_rng(0).standard_normal((2, 3, 300)).astype(np.float32)
    scores[:, :, ::7] = np.nan
    for backend in ("eager", "numba"):
        got = rt.top_k_blocks(torch.from_numpy(scores), 100, init_blocks=2, local_blocks=3, backend=backend)
        np.testing.assert_array_equal(got, top_k_blocks(scores, 100, init_blocks=2, local_blocks=3))


@pytest.mark.parametrize("backend", ["cuda", "pallas"])
@pytest.mark.parametrize("operation", ["block_scores", "select_blocks"])
def test_other_backends_refuse_by_name(backend, operation):
    q, pages, tables, _ = batch(4)
    more = {} if operation == "block_scores" else {"top_k": 2}
    with pytest.raises((Unsupported, RuntimeError), match=f"{backend}: does not offer {operation}"):
        getattr(rt, operation)(q, pages, block_size=4, **tables, **more, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("block_size", "top_k", "local_blocks"), [(4, 3, 1), (8, 2, 0), (2, 6, 3), (16, 5, 1)])
def test_transformers_indexer_of_minimax_m3_selects_the_same(backend, block_size, top_k, local_blocks):
    modeling = pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")
    configuration = pytest.importorskip("transformers.models.minimax_m3_vl.configuration_minimax_m3_vl")
    torch.manual_seed(block_size)
    heads, dim, length = 2, 32, 45
    config = configuration.MiniMaxM3VLTextConfig(
        hidden_size=48, num_attention_heads=4, num_key_value_heads=heads, num_hidden_layers=2, index_n_heads=heads,
        index_head_dim=dim, index_block_size=block_size, index_topk_blocks=top_k, index_local_blocks=local_blocks,
    )  # fmt: skip
    indexer = modeling.MiniMaxM3VLIndexer(config, 0).float()
    for parameter in indexer.parameters():
        torch.nn.init.normal_(parameter)
    found = {}
    indexer.q_norm.register_forward_hook(lambda module, inputs, out: found.update(q=out))
    indexer.k_norm.register_forward_hook(lambda module, inputs, out: found.update(k=out))
    no_rotation = torch.ones(2, length, dim), torch.zeros(2, length, dim)
    positions = torch.arange(length)[None].expand(2, -1)
    with torch.no_grad():
        theirs = indexer(torch.randn(2, length, 48), no_rotation, None, positions)  # [S, H, T, top_k]
    for seq in range(2):
        chosen = rt.select_blocks(
            found["q"][seq], found["k"][seq], top_k, block_size=block_size, local_blocks=local_blocks,
            starts=torch.zeros(length).int(), stops=torch.arange(1, length + 1).int(), backend=backend,
        )  # fmt: skip
        want = theirs[seq].transpose(0, 1)
        assert want.shape[2] == min(top_k, -(-length // block_size))
        want = torch.nn.functional.pad(want, (0, top_k - want.shape[2]), value=-1)
        want = want.masked_fill(want < 0, 10**6).sort().values
        ours = chosen.masked_fill(chosen < 0, 10**6).long()
        assert torch.equal(ours, want)
