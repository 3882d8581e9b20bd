"""Qwen4's sparse attention in vLLM: the bound functions, and their agreement with float64 loops over queries."""

import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import ragged_attention as ra
from ragged_attention.integrations import vllm as module
from ragged_attention.testing.compare import agrees
from tests import vllm_fakes as fakes
from tests import vllm_qsa_fakes as qsa_fakes
from tests.test_integration_vllm import expect_compatible

ours: Any = module
BINDINGS = "ragged_attention.integrations._vllm_bindings"
# Requests with one new token, with several after earlier tokens, without new tokens, and two whole prompts.
NEW, LENS = [1, 6, 0, 9, 2], [14, 37, 3, 9, 2]
PAGE, RATIO, HEADS, DIM = 8, 4, 3, 16


@pytest.fixture
def qsa(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Our module with a fake vLLM for an NVIDIA GPU, in which nothing is bound yet."""
    with fakes.unbound(monkeypatch, "_vllm_qsa", device="sm90") as module:
        yield module


@pytest.fixture(params=["eager", "numba"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with ra.use_backend(request.param):
        yield request.param


# Where our functions are bound


@pytest.mark.parametrize("device", ["sm80", "sm90", "gfx1200", "cpu"])
@pytest.mark.parametrize("asked", [False, True])
def test_it_is_bound_on_nvidias_gpus_if_the_user_asks(asked, device, monkeypatch):
    with fakes.installed(monkeypatch, device=device):
        ours.register(cpu=True, indexer=asked)
        registry = importlib.import_module("vllm.model_executor.models.registry").ModelRegistry
        is_led = registry.models["Qwen4ExpForCausalLM"] != "vllm"
        assert is_led == (asked and device.startswith("sm"))
        homes = {path: dict(vars(importlib.import_module(path))) for path in qsa_fakes.contents()}
        if is_led:
            bindings: Any = importlib.import_module(BINDINGS)
            found: Any = importlib.import_module("ragged_attention.integrations._vllm_qsa")
            assert bindings.Qwen4ExpForCausalLM == "vLLM's Qwen4ExpForCausalLM"
            attention: Any = importlib.import_module("vllm.models.qwen4_exp.nvidia.ops.qsa")
            assert attention.qsa_sparse_paged_attention is found.qsa_sparse_paged_attention
            ours.unregister()
        assert {path: dict(vars(importlib.import_module(path))) for path in homes} == homes


def test_signatures(qsa):
    for one in importlib.import_module(BINDINGS).QSA:
        fake = getattr(qsa_fakes, one.name)
        if one.name != "qsa_sparse_paged_attention":  # this function has a keyword-only argument
            expect_compatible(one.ours, fake, one.name)
        assert [*inspect.signature(one.ours).parameters] == [*inspect.signature(fake).parameters]


@pytest.mark.filterwarnings("ignore")  # warnings of vLLM and of what it imports
def test_vllm_has_what_is_bound():
    """If vLLM is installed, it has each bound name with the signature of its fake."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    for one in importlib.import_module(BINDINGS).QSA:
        found = vars(importlib.import_module(one.owner))[one.name]
        fake = getattr(qsa_fakes, one.name)
        assert [*inspect.signature(found).parameters] == [*inspect.signature(fake).parameters]


# The selection of groups


def ints(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def queries() -> list[tuple[int, int]]:
    """The request and the position of each query."""
    return [(row, length - n + i) for row, (n, length) in enumerate(zip(NEW, LENS, strict=True)) for i in range(n)]


def pages_of(lens: list[int], page: int) -> tuple[int, torch.Tensor]:
    """The number of pages, and shuffled page tables with garbage after each request's last page."""
    columns = -(-max(lens) // page) + 1
    table = torch.randperm(len(lens) * columns).int().view(len(lens), columns)
    for row, length in enumerate(lens):
        table[row, -(-length // page) :] = 2**30
    return len(lens) * columns, table


class Groups:
    """The keys of the groups of `LENS`, with NaN in unused slots, and queries for them."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(3)
        self.lens = [length // RATIO for length in LENS]
        pages, self.table = pages_of(self.lens, 2)
        self.cache = torch.full((2, pages, 2, 1, DIM), torch.nan).to(dtype)[
            1
        ]  # follows another layer's cache in memory
        for row, count in enumerate(self.lens):
            for group in range(count):
                self.cache[self.table[row, group // 2], group % 2, 0] = torch.randn(DIM).to(dtype)
        self.q = torch.randn(sum(NEW), HEADS, DIM).to(dtype)
        self.visible = ints([(position + 1) // RATIO for _, position in queries()])

    def expect(self, got: torch.Tensor, rows: slice, top_k: int) -> None:
        """Assert that each row lists, in order, the groups with the largest sums of positive products."""
        for token, (row, position) in [*enumerate(queries())][rows]:
            count = (position + 1) // RATIO
            at = torch.arange(count)
            keys = self.cache[self.table[row, at // 2].long(), at % 2, 0].double()
            scores = (self.q[token].double() @ keys.T).relu().sum(0)
            line = got[token - rows.start].tolist()
            chosen = line[: min(top_k, count)]
            assert chosen == sorted(set(chosen))
            assert line[len(chosen) :] == [-1] * (top_k - len(chosen))
            largest = scores.topk(len(chosen)).values.sort().values
            torch.testing.assert_close(scores[chosen].sort().values, largest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("top_k", [3, 12])
def test_groups_of_prompts(top_k, dtype, qsa, backend):
    """Groups are selected for the prompts of a step, whose first row is a decode; a prompt has up to nine groups."""
    made = Groups(dtype)
    edges = ints([0, *NEW]).cumsum(0).int()
    got = torch.full((sum(NEW) - 1, top_k), 99, dtype=torch.int32)
    qsa.qsa_select_paged_prefill(
        made.q[1:], made.cache, made.table[1:], edges[1:], made.visible[1:], top_k * RATIO, RATIO, max(NEW), got,
        max(LENS),
    )  # fmt: skip
    made.expect(got, slice(1, sum(NEW)), top_k)


@pytest.mark.parametrize("length", [1, 3])
def test_groups_of_decodes(length, qsa, backend, monkeypatch):
    """Groups are selected for decodes with drafts, and for a request without groups, as in a graph."""
    monkeypatch.setitem(globals(), "NEW", [length, length, 0])
    monkeypatch.setitem(globals(), "LENS", [14, 37, 0])
    made = Groups(torch.bfloat16)
    q = torch.cat((made.q, made.q[:length]))
    visible = torch.cat((made.visible, torch.zeros(length, dtype=torch.int32)))
    got = torch.full((3 * length, 5), 99, dtype=torch.int32)
    qsa.qsa_select_paged_decode(q, made.cache, made.table, visible, 5 * RATIO, RATIO, length, got)
    made.expect(got, slice(0, 2 * length), 5)
    assert (got[2 * length :] == -1).all()


@pytest.mark.parametrize("ratio", [1, 2, 4, 8])
def test_lengths_let_queries_see_their_groups(ratio, qsa):
    """With the computed lengths, queries see their groups wherever a chunk begins and ends.

    Rows after the last request are padding.
    """
    for begin in range(9):
        for count in range(1, 9):
            positions = torch.arange(begin, begin + count)
            visible = torch.cat(((positions + 1) // ratio, torch.tensor([7, 7]))).int()
            lengths = qsa.lengths_of(visible, ints([0, 0, count]), ratio)
            assert lengths.dtype == torch.int32
            assert lengths[0] == 0
            seen = (lengths[1] - count + torch.arange(count) + 1) // ratio
            assert torch.equal(seen, (positions + 1) // ratio)
    assert qsa.lengths_of(ints([]), ints([0, 0]), ratio).tolist() == [0]


# Attention


@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_attention(cache_dtype, prefill, qsa, backend):
    """Attention agrees with loops over queries.

    Each list has a count, and contains -1 and positions without a page. Some rows have no request or an empty list.
    """
    torch.manual_seed(4)
    pages, table = pages_of(LENS, PAGE)
    table[table == 2**30] = -1
    table[1, 1] = pages + 3  # an invalid page
    cache = torch.full((pages, 2, PAGE, 2 * DIM), torch.nan).to(cache_dtype)
    step, width = queries(), 11
    lists = torch.full((len(step), width + 1), -1, dtype=torch.int32)
    named: list[list[int]] = []
    for token, (row, position) in enumerate(step):
        at = torch.randperm(position + 1)[: width - 2].tolist()
        lists[token, : len(at)] = ints(at)
        lists[token, len(at) // 2] = (-1, 2**20, at[len(at) // 2])[token % 3]
        lists[token, -1] = count = len(at) - (token % 2)
        lists[token, count:-1] = 0  # excluded by the count
        kept = [each for each in lists[token, :count].tolist() if 0 <= each < 2**20]
        named.append([each for each in kept if not (row == 1 and each // PAGE == 1)])
        for each in named[token]:
            cache[table[row, each // PAGE], :, each % PAGE] = torch.randn(2, 2 * DIM).to(cache_dtype)
    requests = ints([row for row, _ in step])
    requests[3], named[3] = -1, []
    requests[5], named[5] = len(LENS), []
    lists[7], named[7] = ints([-1] * width + [0]), []
    q = torch.randn(len(step), 4, DIM).bfloat16()
    gate = torch.randn(len(step), 4 * DIM).bfloat16()
    keys, values = cache.transpose(1, 2).split(DIM, dim=-1)
    scales = (0.5, 0.25) if cache_dtype == torch.float8_e4m3fn else (None, None)
    out = torch.full_like(q, torch.nan)
    found = qsa.qsa_sparse_paged_attention(
        q, keys, values, lists, table, requests, prefill, out, *scales, output_gate=gate
    )
    assert found is out
    expected = torch.zeros(q.shape, dtype=torch.float64)
    for token, (row, _) in enumerate(step):
        if named[token]:
            at = torch.tensor(named[token])
            held = cache[table[row, at // PAGE].long(), :, at % PAGE].double().repeat_interleave(2, 1)
            k, v = held[..., :DIM] * (scales[0] or 1.0), held[..., DIM:] * (scales[1] or 1.0)
            weights = (torch.einsum("hd,nhd->hn", q[token].double(), k) * DIM**-0.5).softmax(-1)
            expected[token] = torch.einsum("hn,nhd->hd", weights, v)
    expected *= gate.view_as(q).double().sigmoid()
    assert agrees(out.float(), expected, "bfloat16")
    again = qsa.qsa_sparse_paged_attention(
        q, keys, values, lists, table, requests, prefill, None, *scales, output_gate=gate
    )
    assert torch.equal(again, out)


@pytest.mark.parametrize("prefill", [False, True])
def test_no_tokens(prefill, qsa, backend):
    q, cache = torch.zeros(0, 4, DIM).bfloat16(), torch.zeros(2, PAGE, 2, DIM).bfloat16()
    arguments = (q, cache, cache, torch.zeros(0, 5).int(), ints([[0, 1]]), ints([]), prefill)
    assert qsa.qsa_sparse_paged_attention(*arguments, output_gate=q).shape == q.shape
    got = torch.zeros(0, 3, dtype=torch.int32)
    qsa.qsa_select_paged_prefill(q, cache[:, :, :1], ints([[0, 1]]), ints([0, 0]), ints([]), 12, RATIO, 1, got, 1)


def test_tables_too_large_to_be_joined(qsa, monkeypatch):
    """If joined tables would have positions beyond int32, each token gets its own table, and results are equal."""
    torch.manual_seed(5)
    cache = torch.randn(4, PAGE, 2, DIM).bfloat16()
    q, lists = torch.randn(3, 4, DIM).bfloat16(), ints([[0, 9, 2], [15, 1, 2], [3, 3, 1]])
    arguments = (q, cache, cache, lists, ints([[0, 1], [2, 3]]), ints([0, 1, 1]), True)
    joined = qsa.qsa_sparse_paged_attention(*arguments, output_gate=q)
    monkeypatch.setattr(qsa, "_INT32_MAX", 31)
    apart = qsa.qsa_sparse_paged_attention(*arguments, output_gate=q)
    assert agrees(apart.float(), joined.double(), "bfloat16")
