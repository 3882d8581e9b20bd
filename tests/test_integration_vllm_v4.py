"""DeepSeek-V4 in vLLM on a CPU: the bound functions, a step's tables against loops, and attention by its definition."""

import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import ragged_attention as ra
from ragged_attention.integrations import vllm as module
from ragged_attention.torch import dequantize_mla_cache, quantize_mla_cache
from tests import vllm_fakes as fakes
from tests import vllm_v4_fakes as v4_fakes
from tests.test_integration_vllm import expect_compatible

ours: Any = module
V4 = "ragged_attention.integrations._vllm_v4"
BINDINGS = "ragged_attention.integrations._vllm_bindings"
# Requests with one new token (a decode), with several after earlier tokens, without new tokens, and a whole prompt.
NEW, LENS = [1, 6, 0, 9], [14, 17, 3, 9]
STARTS = [0, 1, 7, 7, 16]
QUERIES = [(row, length - n + i) for row, (n, length) in enumerate(zip(NEW, LENS, strict=True)) for i in range(n)]
BLOCK = 4


@pytest.fixture
def v4(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Our functions with a fake vLLM for CPUs, in which nothing is bound yet."""
    with fakes.unbound(monkeypatch, "_vllm_v4") as module:
        yield module


def ints(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def table_of(block: int) -> torch.Tensor:
    """A block table with shuffled blocks, and with garbage after each request's last block."""
    columns = -(-max(LENS) // block) + 1
    table = (torch.randperm(len(LENS) * columns) + 1).int().view(len(LENS), columns)
    for row, length in enumerate(LENS):
        table[row, -(-length // block) :] = 2**30
    return table


def test_it_is_bound_on_cpus_alone(v4, monkeypatch):
    registry = importlib.import_module("vllm.model_executor.models.registry").ModelRegistry
    homes = {path: dict(vars(importlib.import_module(path))) for path in v4_fakes.contents()}
    layer = importlib.import_module("vllm.models.deepseek_v4.cpu.cpu_sparse").DeepseekV4CPUAttention
    builder = importlib.import_module("vllm.models.deepseek_v4.cpu.cpu_mla").DeepseekV4CPUSparseSWAMetadataBuilder()
    ours.register(cpu=True)
    bindings: Any = importlib.import_module(BINDINGS)
    assert bindings.DeepseekV32ForCausalLM == "generic V3.2"
    assert layer.forward_mqa is v4_fakes.forward_mqa  # our function is bound when V4 is loaded
    assert bindings.DeepseekV4ForCausalLM == "V4 for CPUs"
    assert layer.forward_mqa is v4.forward_mqa
    utilities: Any = importlib.import_module("vllm.v1.attention.backends.mla.compressor_utils")
    assert utilities._COMPRESSED_SLOT_MAPPING_KERNEL.__wrapped__ is v4.compressed_slot_mapping
    assert builder.build_tile_scheduler(3) == dict.fromkeys(("c1a", "c2a", "c4a"))
    ours.unregister()
    assert builder.build_tile_scheduler(3) == {"c4a": None}
    assert layer.forward_mqa is v4_fakes.forward_mqa
    assert {path: dict(vars(importlib.import_module(path))) for path in homes} == homes
    with fakes.installed(monkeypatch, device="sm80"):
        ours.register()
        assert registry.models["DeepseekV4ForCausalLM"] == "vllm"


def test_signatures(v4):
    bindings: Any = importlib.import_module(BINDINGS)
    plain = {one.name: one.ours for one in bindings.V4 if not one.wraps}
    assert plain.keys() == v4_fakes.KERNELS.keys()
    for name, mine in plain.items():
        expect_compatible(mine, v4_fakes.KERNELS[name], name)


@pytest.mark.filterwarnings("ignore")  # warnings of vLLM and of what it imports
def test_vllm_has_what_is_bound():
    """If vLLM is installed, it has each bound name with the signature of its fake."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    for one in importlib.import_module(BINDINGS).V4:
        path, _, cls = one.owner.partition(":")
        home = importlib.import_module(path)
        found = vars(getattr(home, cls) if cls else home)[one.name]
        if one.name in v4_fakes.KERNELS:
            fake = v4_fakes.KERNELS[one.name]
            assert [*inspect.signature(found).parameters] == [*inspect.signature(fake).parameters], one.name


# The tables of a step


def test_the_requests_of_tokens(v4):
    out = torch.full((20,), 99, dtype=torch.int32)
    found = v4.compute_token_to_req_indices(ints(STARTS), out, num_mapped_tokens=16, num_tokens=18)
    assert found.tolist() == [row for row, _ in QUERIES] + [0, 0]
    assert found.data_ptr() == out.data_ptr()
    assert out[18:].tolist() == [99, 99]
    assert v4.compute_token_to_req_indices(ints([0, 0]), out, 0, 0).shape == (0,)


@pytest.mark.parametrize("ranks", [(1, 1), (2, 4)])
@pytest.mark.parametrize("ratio", [2, 4])
def test_where_compressed_entries_go(ratio, ranks, v4):
    """The last token of each group writes its compressed entry, unless the token has no slot."""
    world, interleave = ranks
    table, slots = table_of(BLOCK), torch.arange(16)
    slots[3] = slots[11] = -1
    out = torch.full((18,), -1)
    v4.compressed_slot_mapping(
        out, slots, ints(STARTS), ints(LENS), table, 2, ratio, dcp_world_size=world, cp_interleave=interleave
    )
    for token, (row, position) in enumerate(QUERIES):
        want = -1
        if (position + 1) % ratio == 0 and slots[token] >= 0:
            local = position // (world * interleave) * interleave + position % interleave
            want = int(table[row, local // ratio // 2]) * 2 + local // ratio % 2
        assert int(out[token]) == want
    assert out[16:].tolist() == [-1, -1]


def visible(position: int, window: int, left: int, replay: int) -> int:
    """The first position in a token's window."""
    return max(position - (window - 1) - max(left - (window - 1), 0), 0, replay)


@pytest.mark.parametrize("has_image", [False, True])
@pytest.mark.parametrize("part", [slice(0, 1), slice(1, 16), slice(0, 0)])
def test_slots_of_windows(part, has_image, v4):
    window, width = 5, 9
    table, valid = table_of(BLOCK), torch.ones(16, dtype=torch.bool)
    valid[4] = False
    replay = ints([0, 13, 0, 2, 0])
    count = part.stop - part.start
    left, right = torch.randint(0, 7, (16,)).int(), torch.zeros(16, dtype=torch.int32)
    right[8] = 2
    slots, lens = torch.full((18, 1, width + 1), 99, dtype=torch.int32), torch.full((18,), 99, dtype=torch.int32)
    v4.compute_swa_indices_and_lens(
        slots, lens, window, width, left, right, ints(STARTS), ints(LENS), ints([row for row, _ in QUERIES]), valid,
        table, BLOCK, replay, num_tokens=count, token_offset=part.start, has_image=has_image,
    )  # fmt: skip
    for at, (row, position) in enumerate(QUERIES[part]):
        token = part.start + at
        first = visible(position, window, int(left[token]) if has_image else 0, int(replay[row]))
        stop = position + 1 + (int(right[token]) if has_image else 0)
        seen = range(first, stop) if valid[token] else []
        want = [int(table[row, each // BLOCK]) * BLOCK + each % BLOCK for each in seen]
        assert slots[at, 0, :width].tolist() == (want + [-1] * width)[:width]
        assert int(lens[at]) == len(seen)
    assert (slots[count:] == 99).all()
    assert (slots[:, :, width:] == 99).all()
    assert (lens[count:] == 99).all()


def test_keys_of_prefills(v4):
    out = torch.full((4,), 99, dtype=torch.int32)
    v4.compute_prefill_metadata(
        out, ints(LENS), ints(STARTS), ints([0, 9, 0, 0, 0]), num_prefills=3, num_decodes=1, window_size=5
    )
    assert out.tolist() == [6 + 2, 3, 9, 99]
    v4.compute_prefill_metadata(out, ints(LENS), ints(STARTS), ints([0] * 5), 3, 1, 5)
    assert out.tolist() == [6 + 4, 3, 9, 99]


# Attention


def cache_of(blocks: int, block: int, used: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's view [blocks, block, 584] of pages with gaps between them, and its dequantised rows.

    Unused rows are NaN.
    """
    rows = torch.randn(blocks, block, 1, 512).bfloat16()
    rows.view(-1, 512)[~used] = torch.nan
    packed = quantize_mla_cache(rows, "fp8_v4")
    pages = torch.full((blocks, block * 584 + 96), 255, dtype=torch.uint8)
    pages[:, : block * 584] = packed.view(blocks, -1)
    view = pages.as_strided((blocks, block, 584), (pages.stride(0), 584, 1))
    return view, dequantize_mla_cache(packed, "fp8_v4").view(-1, 512).double()


@pytest.mark.parametrize("ratio", [1, 4, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention(dtype, ratio, v4, monkeypatch):
    """Attention is right for a decode and prefills in one step.

    Each token attends to its window and to its visible compressed entries.
    """
    torch.manual_seed(0)
    tokens, heads, window = len(QUERIES), 3, 5
    # An entry covers `ratio` tokens. With 128, a query must have a large position to see an entry.
    offset = 120 if ratio == 128 else 0
    queries = [(row, position + offset) for row, position in QUERIES]
    blocks = 80
    sliding, entries = ((torch.randperm(blocks)[:76].view(4, 19)).int() for _ in range(2))
    lists = []
    for row, position in queries:
        seen = range(max(position - window + 1, 0), position + 1)
        lists.append([int(sliding[row, each // 8 % 19]) * 8 + each % 8 for each in seen])
    slots = ints([one + [-1] * (window - len(one)) for one in lists]).unsqueeze(1)
    count = [(position + 1) // ratio if ratio > 1 else 0 for _, position in queries]
    selected = torch.full((tokens + 2, 6), -1, dtype=torch.int32)  # two more rows than tokens
    for token in range(tokens):
        chosen = torch.randperm(count[token])[:6] if ratio == 4 else torch.arange(count[token])
        selected[token, : len(chosen)] = chosen.int()
    # The number of compressed entries in a page of 256 tokens.
    page = max(256 // ratio, 1) if ratio > 1 else 1
    extra = [
        [int(entries[row, each // page]) * page + each % page for each in selected[token].tolist() if each >= 0]
        for token, (row, _) in enumerate(queries)
    ]
    used = torch.zeros(blocks * 8, dtype=torch.bool)
    used[[slot for one in lists for slot in one]] = True
    swa, swa_rows = cache_of(blocks, 8, used)
    used = torch.zeros(blocks * page, dtype=torch.bool)
    used[[slot for one in extra for slot in one]] = True
    compressed, compressed_rows = cache_of(blocks, page, used)
    layer = SimpleNamespace(
        prefix="attn", swa_cache_layer=SimpleNamespace(prefix="swa", kv_cache=swa), kv_cache=compressed,
        compress_ratio=ratio, indexer=object() if ratio == 4 else None, topk_indices_buffer=selected,
        max_model_len=300, attn_sink=torch.nn.Parameter(torch.randn(heads)), scale=512**-0.5,
    )  # fmt: skip
    wide = torch.nn.functional.pad(slots[1:], (0, 3), value=-1)  # wider lists of prefills, as for images
    step = SimpleNamespace(
        decode_swa_indices=slots[:1], prefill_swa_indices=wide,
        token_to_req_indices=ints([row for row, _ in queries]),
    )  # fmt: skip
    tables = SimpleNamespace(block_table=entries, block_size=256)
    context = SimpleNamespace(attn_metadata={"swa": step, "attn": tables})
    monkeypatch.setattr(importlib.import_module("vllm.forward_context"), "get_forward_context", lambda: context)
    q = torch.randn(tokens + 2, heads, 512).to(dtype)  # the last two rows are padding
    positions = torch.tensor([position for _, position in queries] + [0, 0])
    for backend in ("eager", "numba"):
        out = torch.full_like(q, 7)
        with ra.use_backend(backend):
            v4.forward_mqa(layer, q, None, positions, out)
        assert (out[tokens:] == 7).all()
        for token in range(tokens):
            rows = torch.cat((swa_rows[lists[token]], compressed_rows[extra[token]]))
            logits = q[token].double() @ rows.T * layer.scale
            weights = torch.cat((logits, layer.attn_sink.detach().double()[:, None]), 1).softmax(1)[:, :-1]
            torch.testing.assert_close(out[token].double(), weights @ rows, rtol=2e-2, atol=1e-2)
    step.decode_swa_indices, step.prefill_swa_indices = slots, None  # a step with only decodes
    again = torch.full_like(q, 7)
    v4.forward_mqa(layer, q, None, positions, again)
    torch.testing.assert_close(again, out, rtol=2e-2, atol=1e-2)


def test_the_profiling_run(v4, monkeypatch):
    context = SimpleNamespace(attn_metadata=None)
    monkeypatch.setattr(importlib.import_module("vllm.forward_context"), "get_forward_context", lambda: context)
    out = torch.full((3, 2, 512), torch.nan)
    v4.forward_mqa(SimpleNamespace(), out, None, None, out)
    assert (out == 0).all()
