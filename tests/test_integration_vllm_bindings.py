"""The functions that vLLM's sparse models call by name: where ours are bound, their removal, and their results."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import ragged_attention as ra
from ragged_attention.errors import Unsupported
from ragged_attention.integrations import vllm as module
from tests import vllm_fakes as fakes
from tests import vllm_sparse_fakes as sparse_fakes
from tests.test_integration_vllm import expect_compatible

ours: Any = module
D, PAGE = 32, 16


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Our bindings module with a fake vLLM for CPUs, in which nothing is bound yet."""
    with fakes.unbound(monkeypatch, "_vllm_bindings") as module:
        yield module


@pytest.fixture(params=["eager", "numba"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with ra.use_backend(request.param):
        yield request.param


# Where our functions are bound


LOGITS = {"fp8_fp4_mqa_logits", "fp8_fp4_paged_mqa_logits", "get_paged_mqa_logits_metadata"}
OPERATORS = {
    "indexer_k_quant_and_cache", "cp_gather_indexer_k_quant_cache", "top_k_per_row_prefill", "top_k_per_row_decode",
    "get_indexer_topk",
}  # fmt: skip
FLASH_MLA = {"flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata", "FlashMLASchedMeta"}
CPU = {
    "per_token_group_quant_fp8", "_BUILD_PREFILL_CHUNK_METADATA_KERNEL", "current_workspace_manager", "forward_cpu",
    "get_supported_kernel_block_sizes",
}  # fmt: skip
CPU_OPERATORS = {"fp8_paged_mqa_logits_cpu", "topk_transform_512_cpu"}
# The fake vLLM has no compiled library and therefore no operators, so ours are bound on every device here.
BOUND = {
    "cpu": LOGITS | OPERATORS | CPU_OPERATORS | CPU,
    "sm80": LOGITS | OPERATORS | FLASH_MLA | {"fused_indexer_q_rope_quant", "has_deep_gemm"},
    "sm89": LOGITS | OPERATORS | FLASH_MLA | {"has_deep_gemm"},
    "sm90": OPERATORS,
    "gfx1200": LOGITS | OPERATORS | FLASH_MLA | {"forward_hip"},
}


@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is not None, reason="the installed vLLM's library has the operators"
)
@pytest.mark.parametrize("device", BOUND)
def test_ours_are_where_vllm_has_none(device, monkeypatch):
    with fakes.installed(monkeypatch, device=device):
        bindings = importlib.import_module("ragged_attention.integrations._vllm_bindings")
        assert {name.rpartition(".")[2] for name in bindings.bind()} == BOUND[device]
        bindings.unbind()
        assert {name.rpartition(".")[2] for name in bindings.bind(everywhere=True)} == BOUND[
            device
        ] | LOGITS | CPU_OPERATORS


def held() -> dict[tuple[str, str], Any]:
    """All attributes of vLLM's modules and of their classes, by module or class and name."""
    modules: dict[str, Any] = {path: found for path, found in sys.modules.items() if path.partition(".")[0] == "vllm"}
    places = dict(modules)
    for path, found in modules.items():
        places |= {f"{path}:{name}": one for name, one in vars(found).items() if isinstance(one, type)}
    return {(path, name): value for path, place in places.items() for name, value in [*vars(place).items()]}


def test_all_is_put_back(bindings):
    """One `unregister` restores everything, even after two registrations.

    This includes modules that imported one of our functions by name.
    """
    registry = importlib.import_module("vllm.model_executor.models.registry").ModelRegistry
    before, models = held(), dict(registry.models)
    for _ in range(2):
        ours.register(cpu=True)
    assert registry.models["LlamaForCausalLM"] == "vllm"
    path = registry.models["DeepseekV32ForCausalLM"].replace(":", ".")
    assert path == "ragged_attention.integrations._vllm_bindings.DeepseekV32ForCausalLM"
    deep_gemm = importlib.import_module("vllm.utils.deep_gemm")
    # This is still vLLM's function, because ours are bound only when such a model is loaded.
    assert deep_gemm.fp8_fp4_mqa_logits is sparse_fakes.fp8_fp4_mqa_logits
    assert bindings.DeepseekV32ForCausalLM == "generic V3.2"
    assert bindings.GlmMoeDsaForCausalLM == "generic GLM"
    layer = importlib.import_module("vllm.model_executor.layers.sparse_attn_indexer")
    assert deep_gemm.fp8_fp4_mqa_logits is layer.fp8_fp4_mqa_logits is bindings.fp8_fp4_mqa_logits
    assert layer.has_deep_gemm is sparse_fakes.has_deep_gemm
    late: Any = importlib.import_module("vllm.models.deepseek_v32")
    late.fp8_fp4_mqa_logits = deep_gemm.fp8_fp4_mqa_logits
    ours.unregister()
    assert late.fp8_fp4_mqa_logits is sparse_fakes.fp8_fp4_mqa_logits
    del late.fp8_fp4_mqa_logits
    assert held() == before
    assert registry.models == models
    ours.unregister()  # has nothing to undo and does not fail


def test_has_deep_gemm_is_said_to_the_indexer_alone(monkeypatch):
    with fakes.installed(monkeypatch, device="sm80"):
        bindings = importlib.import_module("ragged_attention.integrations._vllm_bindings")
        ours.register()
        assert bindings.DeepseekV32ForCausalLM == "generic V3.2"
        assert importlib.import_module("vllm.model_executor.layers.sparse_attn_indexer").has_deep_gemm()
        assert not importlib.import_module("vllm.utils.import_utils").has_deep_gemm()


@pytest.mark.parametrize("asked", [False, True])
def test_vllms_own_indexer_stays_unless_the_user_asks(asked, monkeypatch):
    with fakes.installed(monkeypatch, device="sm90"):
        if asked:
            monkeypatch.setenv(ours.INDEXER_VARIABLE, "1")
        ours.register()
        registry = importlib.import_module("vllm.model_executor.models.registry").ModelRegistry
        assert (registry.models["GlmMoeDsaForCausalLM"] == "vllm") is not asked
        if asked:
            bindings = importlib.import_module("ragged_attention.integrations._vllm_bindings")
            assert bindings.GlmMoeDsaForCausalLM == "NVIDIA's GLM"
            deep_gemm = importlib.import_module("vllm.utils.deep_gemm")
            assert deep_gemm.fp8_fp4_paged_mqa_logits is bindings.fp8_fp4_paged_mqa_logits


def test_a_cpu_chooses_ours_for_sparse_attention(bindings):
    platform = importlib.import_module("vllm.platforms.cpu").CpuPlatform
    sparse, dense = (SimpleNamespace(use_sparse=sparse) for sparse in (True, False))
    ours.register(cpu=False)
    with pytest.raises(NotImplementedError):
        platform.get_attn_backend_cls(None, sparse)
    ours.register(cpu=True)
    path = platform.get_attn_backend_cls(None, sparse, num_heads=8)
    assert path == "ragged_attention.integrations.vllm.RaggedSparseMLABackend"
    assert platform.get_attn_backend_cls(selected_backend=None, attn_selector_config=dense) == "vllm.CPU_ATTN"


@pytest.mark.parametrize("architecture", ["GlmMoeDsaForCausalLM", "DeepseekV3ForCausalLM"])
def test_a_cpu_keeps_chunks_and_prefixes_of_sparse_models(architecture, bindings):
    platform = importlib.import_module("vllm.platforms.cpu").CpuPlatform
    ours.register(cpu=True)
    given = SimpleNamespace(
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True, max_num_batched_tokens=64),
        cache_config=SimpleNamespace(enable_prefix_caching=True, block_size=None),
        model_config=SimpleNamespace(architectures=[architecture], is_mm_prefix_lm=False),
    )
    platform.check_and_update_config(given)
    kept = architecture.startswith("Glm")
    assert given.scheduler_config.enable_chunked_prefill == given.cache_config.enable_prefix_caching == kept
    assert (given.scheduler_config.max_num_batched_tokens, given.cache_config.block_size) == (64 if kept else 4096, 16)
    given.model_config = None
    platform.check_and_update_config(given)
    assert given.scheduler_config.max_num_batched_tokens == 4096


@pytest.mark.parametrize("sees_images", [True, False], ids=["images", "text only"])
@pytest.mark.parametrize("has_spans", [True, False], ids=["spans", "causal"])
def test_a_cpu_keeps_images_whole_whose_tokens_see_one_another(has_spans, sees_images, bindings):
    """On a CPU, images whose tokens see each other are not split between steps, as on vLLM's GPU platforms.

    Otherwise the first part of an image would not see the rest.
    """
    platform = importlib.import_module("vllm.platforms.cpu").CpuPlatform
    ours.register(cpu=True)
    scheduler = SimpleNamespace(
        enable_chunked_prefill=True, max_num_batched_tokens=64, is_multimodal_model=sees_images,
        disable_chunked_mm_input=False,
    )  # fmt: skip
    platform.check_and_update_config(SimpleNamespace(
        scheduler_config=scheduler, cache_config=SimpleNamespace(enable_prefix_caching=True, block_size=None),
        model_config=SimpleNamespace(architectures=["Gemma3ForConditionalGeneration"], is_mm_prefix_lm=has_spans),
    ))  # fmt: skip
    assert scheduler.disable_chunked_mm_input is (has_spans and sees_images)


def test_a_cpu_rotates_queries_by_heads(bindings):
    rotary = importlib.import_module("vllm.model_executor.layers.rotary_embedding.base").RotaryEmbedding()
    ours.register(cpu=False)
    assert rotary.forward_cpu(None, torch.zeros(2, 3, 8)) == "operator"
    ours.register(cpu=True)  # takes effect on layers that exist already, as in dense latent models
    assert rotary.forward_cpu(None, torch.zeros(2, 3, 8)) == "native"
    assert rotary.forward_cpu(None, torch.zeros(2, 24), None) == "operator"


def test_the_path_of_the_indexer(bindings):
    """The indexer calls functions by name, which we bind, if it must write the cache itself.

    DeepSeek-V4 writes the cache before the indexer runs, and keeps vLLM's path for CPUs.
    """
    bindings.bind()
    layer = importlib.import_module("vllm.model_executor.layers.sparse_attn_indexer")
    metadata = importlib.import_module("vllm.v1.attention.backends.mla.indexer")
    for skips, path in ((False, "by names"), (True, "cpu")):
        assert layer.SparseAttnIndexer(skips).forward_cpu(None, None, None, None) == path
    sizes = metadata.DeepseekV32IndexerBackend.get_supported_kernel_block_sizes()
    assert [size.base for size in sizes] == [16]


def test_a_cpu_has_a_workspace(bindings):
    workspace = importlib.import_module("vllm.v1.worker.workspace")
    with pytest.raises(IndexError):
        workspace.current_workspace_manager()
    bindings.bind()
    for _ in range(2):
        assert workspace.current_workspace_manager() == torch.device("cpu")


def test_a_name_that_vllm_lacks_is_an_error(bindings, monkeypatch):
    home = importlib.import_module("vllm._custom_ops")
    monkeypatch.delattr(home, "top_k_per_row_prefill")
    with pytest.raises(Unsupported, match=r"expected vLLM to have vllm._custom_ops.top_k_per_row_prefill, which ours"):
        bindings.bind()
    with pytest.raises(AttributeError, match="has no attribute 'LlamaForCausalLM'"):
        _ = bindings.LlamaForCausalLM


# Signatures


def replaced(bindings: Any) -> Iterator[tuple[str, Any, Any]]:
    """The replaced functions: the name, our function, and the fake of vLLM's function."""
    for one in bindings.BINDINGS:
        is_metadata = one.name == "_BUILD_PREFILL_CHUNK_METADATA_KERNEL"
        fake = getattr(sparse_fakes, "build_prefill_chunk_metadata" if is_metadata else one.name, None)
        if inspect.isfunction(fake) and not one.wraps:
            yield one.name, one.ours, fake
    yield "get_indexer_topk(...)", bindings.get_indexer_topk("auto"), sparse_fakes.indexer_topk


def test_signatures_of_what_is_bound(bindings):
    pairs = [*replaced(bindings)]
    assert len(pairs) == 18
    for name, mine, theirs in pairs:
        expect_compatible(mine, theirs, name)


@pytest.mark.filterwarnings("ignore")  # warnings of vLLM and of what it imports
def test_vllm_has_what_is_bound():
    """If vLLM is installed, it has each bound name with the signature of its fake."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    bindings = importlib.import_module("ragged_attention.integrations._vllm_bindings")
    fake_of = {name: fake for name, _, fake in replaced(bindings)}
    for one in bindings.BINDINGS:
        path, _, cls = one.owner.partition(":")
        home = importlib.import_module(path)
        found = vars(getattr(home, cls) if cls else home)[one.name]
        if one.name in fake_of and "flashmla" not in path and one.name != "get_indexer_topk":
            parameters = inspect.signature(found).parameters
            assert [*parameters] == [*inspect.signature(fake_of[one.name]).parameters], one.name


# Numbers


def e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e4m3fn)


def pages_of(bindings: Any, lens: list[int]) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """A cache with gaps between pages, its page table, and the dequantised keys of each request.

    Unused bytes are 255, which is NaN.
    """
    per_request = -(-max(lens) // PAGE) + 1
    total = per_request * len(lens) + 1
    cache = torch.full((total, 2, PAGE, D + 4), 255, dtype=torch.uint8)[:, 1]
    table = (torch.randperm(total - 1)[: per_request * len(lens)] + 1).view(len(lens), per_request).int()
    keys = []
    for row, length in enumerate(lens):
        k = torch.randn(length, D)
        position = torch.arange(length)
        slots = table[row, position // PAGE].long() * PAGE + position % PAGE
        padded = torch.cat((k, torch.full((1, D), torch.nan)))
        bindings.indexer_k_quant_and_cache(padded, cache, torch.cat((slots, torch.tensor([-1]))), D, "ue8m0")
        scale = torch.exp2(torch.ceil(torch.log2(k.abs().amax(1, keepdim=True) / 448)))
        keys.append(e4m3(k / scale).float() * scale)
    return cache, table, keys


def logits_of(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The logits of queries [T, H, D] by the definition, in float64."""
    return torch.einsum("th,thn->tn", weights.double(), torch.einsum("thd,nd->thn", q.double(), keys.double()).relu())


def expect_largest(indices: torch.Tensor, logits: torch.Tensor, top_k: int) -> None:
    """Assert that a row lists distinct positions with the largest logits, then -1; ties may be broken either way."""
    count = min(top_k, len(logits))
    chosen = indices[:count].long()
    assert len(set(chosen.tolist())) == count
    assert (indices[count:] == -1).all()
    torch.testing.assert_close(logits[chosen].sort().values, logits.topk(count).values.sort().values)


def test_the_cache_is_written_and_gathered(bindings, backend):
    """The cache has vLLM's bytes, and keys are gathered in order.

    Rows after the last key and rows of a page -1 are not written.
    """
    lens = [20, 1, 0, 33]
    cache, table, keys = pages_of(bindings, lens)
    edges = torch.tensor([0, *lens]).cumsum(0).int()
    got, scales = torch.full((60, D), 7, dtype=torch.uint8), torch.full((60, 4), 7, dtype=torch.uint8)
    bindings.cp_gather_indexer_k_quant_cache(cache, got.view(torch.float8_e4m3fn), scales, table, edges)
    values = got[:54].view(torch.float8_e4m3fn).float() * scales[:54].view(torch.float32)
    assert torch.equal(values, torch.cat(keys))
    assert (got[54:] == 7).all()
    assert (scales[54:] == 7).all()
    table[3, 1] = -1
    bindings.cp_gather_indexer_k_quant_cache(cache, got.fill_(7), scales, table, edges)
    assert (got[21 + 16 : 21 + 32] == 7).all()
    empty = torch.zeros(0, D, dtype=torch.uint8), torch.zeros(0, 4, dtype=torch.uint8)
    bindings.cp_gather_indexer_k_quant_cache(cache, *empty, table, edges)


def test_small_keys_have_a_larger_least_scale(bindings):
    """The smallest scale is 2 ** -13 in our function and 2 ** -22 in vLLM's.

    Both have equal scales if a key's largest element is at least 2 ** -13 * 448 / 2 = 0.027.
    """
    cache = torch.zeros(1, PAGE, D + 4, dtype=torch.uint8)
    largest = torch.tensor([0.0, 1e-3, 2**-14 * 449, 1.0])
    bindings.indexer_k_quant_and_cache(largest[:, None].repeat(1, D), cache, torch.arange(4), D, "ue8m0")
    scales = cache.view(-1)[PAGE * D :].view(torch.float32)[:4]
    assert scales.tolist() == [2**-13, 2**-13, 2**-13, 2**-8]


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
def test_prompts(weights_dtype, bindings, backend):
    """Prompts have the right logits of gathered keys, and selections by positions in the request.

    The keys after the last one are NaN.
    """
    torch.manual_seed(1)
    lens, top_k = [20, 9], 6
    _, _, keys = pages_of(bindings, lens)
    packed = torch.cat((*keys, torch.full((3, D), torch.nan)))
    starts = torch.tensor([0] * 20 + [20] * 9, dtype=torch.int32)
    stops = torch.cat((torch.arange(1, 21), 20 + torch.arange(1, 10))).int()
    q, weights = e4m3(torch.randn(29, 4, D)), torch.randn(29, 4).to(weights_dtype)
    kv = e4m3(packed * 4), torch.full((32,), 0.25)
    logits = bindings.fp8_fp4_mqa_logits((q, None), kv, weights, starts, stops, clean_logits=False)
    want = logits_of(q, weights, kv[0].float().nan_to_num() * 0.25)
    indices = torch.full((31, top_k), 99, dtype=torch.int32)
    bindings.top_k_per_row_prefill(
        logits, starts, stops, indices[:29], logits.shape[0], *logits.stride(), topk_tokens=top_k
    )
    assert (indices[29:] == 99).all()
    for t in range(29):
        seen = slice(int(starts[t]), int(stops[t]))
        torch.testing.assert_close(logits[t, seen].double(), want[t, seen], rtol=1e-5, atol=1e-4)
        expect_largest(indices[t], want[t, seen], top_k)


@pytest.mark.parametrize("next_n", [1, 3])
@pytest.mark.parametrize("each", [True, False], ids=["lengths_of_queries", "lengths_of_sequences"])
def test_decodes(each, next_n, bindings, backend):
    """Decodes with one or several queries per sequence are right; a padding sequence selects nothing."""
    torch.manual_seed(2)
    lens, top_k = [40, 5, 33], 8
    cache, table, keys = pages_of(bindings, lens)
    lens, table = [*lens, 0], torch.cat((table, torch.full_like(table[:1], -1)))
    q, weights = e4m3(torch.randn(4, next_n, 2, D)), torch.randn(4 * next_n, 2)
    ends = torch.tensor(lens)[:, None] - next_n + 1 + torch.arange(next_n)
    seq_lens = ends.clamp(min=0).int() if each else torch.tensor(lens, dtype=torch.int32)
    schedule = bindings.get_paged_mqa_logits_metadata(seq_lens, PAGE, 5)
    assert schedule.shape == (6, 2)
    columns = 100  # vLLM's max_model_len, which exceeds the table's length
    logits = bindings.fp8_fp4_paged_mqa_logits(
        (q, None), cache.unsqueeze(-2), weights, seq_lens, table, schedule, max_model_len=columns, clean_logits=False
    )
    assert logits.shape == (4 * next_n, columns)
    indices = torch.full((4 * next_n, top_k), 99, dtype=torch.int32)
    bindings.get_indexer_topk("auto")(logits, seq_lens, next_n, indices, top_k, max(lens))
    for t, end in enumerate(ends.flatten().tolist()):
        sequence = t // next_n
        if end <= 0:
            assert (indices[t] == -1).all()
            continue
        want = logits_of(q.flatten(0, 1)[t : t + 1], weights[t : t + 1], keys[sequence][:end])[0]
        torch.testing.assert_close(logits[t, :end].double(), want, rtol=1e-5, atol=1e-4)
        expect_largest(indices[t], want, top_k)


@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_cpu_operators(integers, bindings, backend):
    """The CPU operators compute logits, the 512 largest and their slots from rows of bytes, as in DeepSeek-V4."""
    torch.manual_seed(3)
    lens = [600, 5, 33]
    cache, table, keys = pages_of(bindings, lens)
    q, weights, seq_lens = e4m3(torch.randn(3, 2, D)), torch.randn(3, 2), torch.tensor(lens, dtype=integers)
    rows = cache.as_strided((len(cache), PAGE * (D + 4)), (cache.stride(0), 1))
    logits = bindings.fp8_paged_mqa_logits_cpu(q, rows, weights, seq_lens, table.to(integers), PAGE, 601)
    assert logits.shape == (3, 601)
    assert logits.is_contiguous()
    slots, positions = (torch.full((3, 512), 99, dtype=torch.int32) for _ in range(2))
    bindings.topk_transform_512_cpu(logits, seq_lens, table.to(integers), slots, PAGE, positions)
    for t, length in enumerate(lens):
        want = logits_of(q[t : t + 1], weights[t : t + 1], keys[t])[0]
        torch.testing.assert_close(logits[t, :length].double(), want, rtol=1e-5, atol=1e-4)
        expect_largest(positions[t], want, 512)
        chosen = positions[t].clamp(min=0)
        found = table[t, chosen // PAGE] * PAGE + chosen % PAGE
        assert torch.equal(slots[t], torch.where(positions[t] < 0, -1, found))
    again = torch.empty_like(slots)
    bindings.topk_transform_512_cpu(logits, seq_lens, table.to(integers), again, PAGE)
    assert torch.equal(again, slots)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("power_of_two", [True, False, None])
def test_groups_of_a_row(power_of_two, dtype, bindings):
    x = torch.cat((torch.randn(3, 64), torch.zeros(1, 64), torch.full((1, 64), 3e4))).to(dtype)
    out = torch.empty(5, 64, dtype=torch.float8_e4m3fn)
    codes, scales = bindings.per_token_group_quant_fp8(x, 32, use_ue8m0=power_of_two, out_q=out)
    assert codes is out
    largest = x.double().view(5, 2, 32).abs().amax(-1).clamp(min=1e-10) / 448
    want = torch.exp2(torch.ceil(torch.log2(largest))) if power_of_two else largest
    torch.testing.assert_close(scales.double(), want, rtol=1e-6, atol=0)
    exact = e4m3((x.float().view(5, 2, 32) / scales[..., None]).clamp(-448, 448))
    assert torch.equal(codes.float(), exact.float().view(5, 64))
    other, _ = bindings.per_token_group_quant_fp8(x, 32, use_ue8m0=power_of_two)
    assert torch.equal(other.view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.parametrize("is_neox", [True, False])
def test_queries_are_rotated_and_quantised(is_neox, bindings):
    positions, rotary = torch.tensor([0, 5, 900]), 16
    angles = torch.arange(1000)[:, None] * 10000.0 ** -(torch.arange(rotary // 2) / (rotary // 2))
    cache = torch.cat((angles.cos(), angles.sin()), -1)
    q, weights = torch.randn(3, 2, D).bfloat16(), torch.randn(3, 2).bfloat16()
    codes, scaled = bindings.fused_indexer_q_rope_quant(positions, q, cache, weights, 0.5, 0.25, is_neox)
    pairs = q[..., :rotary].double()
    pairs = pairs.unflatten(-1, (2, -1)).transpose(-1, -2) if is_neox else pairs.unflatten(-1, (-1, 2))
    turned = (
        torch.view_as_complex(pairs.contiguous())
        * torch.polar(torch.ones(()).double(), angles[positions].double())[:, None]
    )
    turned = torch.view_as_real(turned)
    turned = (turned.transpose(-1, -2) if is_neox else turned).flatten(-2)
    whole = torch.cat((turned, q[..., rotary:].double()), -1)
    scale = torch.exp2(torch.ceil(torch.log2(whole.bfloat16().double().abs().amax(-1) / 448)))
    torch.testing.assert_close(scaled.double(), weights.double() * scale * 0.5 * 0.25, rtol=1e-6, atol=0)
    error = (codes.double() * scale[..., None] - whole).abs()
    assert (error <= whole.abs() * (2**-4 + 2**-8) + scale[..., None] * 2**-9).all()


@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("ranks", [(0, 1, 1), (0, 2, 1), (1, 2, 4)])
@pytest.mark.parametrize("part", [slice(0, 11), slice(3, 8)])
def test_metadata_of_a_prompt(part, ranks, ratio, bindings):
    """The metadata of requests with 4, 0 and 7 new tokens after earlier ones agrees with a loop over queries."""
    rank, world, interleave = ranks
    new, lens = [4, 0, 7], [9, 6, 21]
    edges = torch.tensor([0, *new]).cumsum(0).int()
    kept = [length // ratio for length in lens]

    def local(count: int) -> int:
        return sum(position // interleave % world == rank for position in range(count))

    keys = torch.tensor([0, *kept]).cumsum(0).int()
    own = torch.tensor([0, *map(local, kept)]).cumsum(0).int()
    to_seq = torch.full((int(keys[-1]),), 99, dtype=torch.int32)
    starts, stops = (torch.full((part.stop - part.start,), 99, dtype=torch.int32) for _ in range(2))
    bindings.build_prefill_chunk_metadata(
        edges, torch.tensor(lens, dtype=torch.int32), keys, own, to_seq, starts, stops, part.start, part.stop, *ranks,
        num_reqs=3, COMPRESS_RATIO=ratio,
    )  # fmt: skip
    assert to_seq.tolist() == [row for row, count in enumerate(kept) for _ in range(count)]
    queries = [
        (row, length - n + i + 1) for row, (n, length) in enumerate(zip(new, lens, strict=True)) for i in range(n)
    ]
    for at, (row, seen) in enumerate(queries[part]):
        count = local(seen // ratio)
        # An empty range starts at 0, because vLLM's CPU indexer looks up the request by the start.
        start = int(own[row]) if count else 0
        assert (int(starts[at]), int(stops[at])) == (start, start + count)


def test_what_ours_do_not_take(bindings):
    x = torch.zeros(2, D)
    for wrong in ({"column_major_scales": True}, {"tma_aligned_scales": True}):
        with pytest.raises(Unsupported, match="expected scales in the order of rows, got column_major_scales or tma"):
            bindings.per_token_group_quant_fp8(x, D, **wrong)
    with pytest.raises(Unsupported, match=r"expected dtype to be float8_e4m3fn, got torch.float8_e5m2"):
        bindings.per_token_group_quant_fp8(x, D, dtype=torch.float8_e5m2)
    with pytest.raises(Unsupported, match="expected quant_block_size to be the keys' size, 32, got 16"):
        bindings.indexer_k_quant_and_cache(x, torch.zeros(1, PAGE, D + 4, dtype=torch.uint8), None, 16, "ue8m0")


def test_vllm_may_tell_stand_ins_of_kernels_what_to_compile(bindings):
    kernels = [one for one in (*bindings.BINDINGS, *bindings.V4) if one.name.endswith("_KERNEL")]
    assert len(kernels) == 4
    for one in kernels:
        assert one.ours.register_warmup(max_tokens=64) is None
