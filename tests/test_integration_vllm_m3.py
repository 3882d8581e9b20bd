"""MiniMax M3 in vLLM: the bound functions, a layer's step against dense float64 attention, and the fused steps."""

import dataclasses
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import ragged_attention as ra
from benchmarks import vllm_m3
from ragged_attention.errors import Unsupported
from ragged_attention.integrations import vllm as module
from ragged_attention.testing.compare import agrees
from tests import vllm_fakes as fakes
from tests import vllm_m3_fakes as m3_fakes
from tests.test_integration_vllm import DECODE, KEPT, MIXED, PREFILL, Step, expect_compatible, vllm_config

ours: Any = module
BINDINGS = "ragged_attention.integrations._vllm_bindings"
SELECTS = {"select_indexer_impl_cls", "select_main_backend_and_impl_cls"}
ON_CPU = SELECTS | {
    "fused_minimax_m3_qknorm_rope_kv_insert", "forward", "_supports_activation", "_pad_moe_intermediate", "apply",
    "_compute_routing",
}  # fmt: skip
HEADS, KV_HEADS, INDEX_DIM = 4, 2, 16


@pytest.fixture
def m3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Our module with a fake vLLM for CPUs, in which nothing is bound yet."""
    with fakes.unbound(monkeypatch, "_vllm_m3") as module:
        yield module


@pytest.fixture(params=["eager", "numba"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with ra.use_backend(request.param):
        yield request.param


# Where our functions are bound


def registry() -> Any:
    return importlib.import_module("vllm.model_executor.models.registry").ModelRegistry


def bound_names() -> set[str]:
    bindings: Any = importlib.import_module(BINDINGS)
    return {name for _, name, _, _ in bindings._bound}


@pytest.mark.parametrize("architecture", m3_fakes.ARCHITECTURES)
def test_it_is_bound_when_it_is_loaded_on_a_cpu(architecture, m3):
    homes = {path: dict(vars(importlib.import_module(path))) for path in m3_fakes.contents(fakes.AttentionBackend)}
    ours.register(cpu=True)
    bindings: Any = importlib.import_module(BINDINGS)
    assert registry().models[architecture] == f"{BINDINGS}:{architecture}"
    before = bound_names()
    assert getattr(bindings, architecture) == f"vLLM's {architecture}"
    assert bound_names() - before == ON_CPU
    model: Any = importlib.import_module("vllm.models.minimax_m3.nvidia.model")
    assert (
        model.select_main_backend_and_impl_cls is m3.select_main_backend_and_impl_cls
    )  # the module had imported vLLM's function
    ours.unregister()
    assert {path: dict(vars(importlib.import_module(path))) for path in homes} == homes
    assert registry().models[architecture] == "vllm"


@pytest.mark.parametrize("device", ["sm80", "sm90", "gfx1200"])
@pytest.mark.parametrize("asked", [False, True])
def test_on_gpus_vllms_kernels_stay_unless_the_user_asks(asked, device, monkeypatch):
    with fakes.installed(monkeypatch, device=device):
        ours.register(indexer=asked)
        path, bindings = registry().models["MiniMaxM3SparseForCausalLM"], importlib.import_module(BINDINGS)
        assert (path != "vllm") == (asked and device.startswith("sm"))
        if path != "vllm":
            assert bindings.MiniMaxM3SparseForCausalLM == "vLLM's MiniMaxM3SparseForCausalLM"
            assert bound_names() == SELECTS


def test_signatures(m3):
    experts: Any = importlib.import_module("ragged_attention.integrations._vllm_experts")
    pairs = [
        (m3.fused_minimax_m3_qknorm_rope_kv_insert, m3_fakes.fused_minimax_m3_qknorm_rope_kv_insert),
        (m3.gemma_norm, m3_fakes.MiniMAXGemmaRMSNorm.forward),
        (experts.apply(None), m3_fakes.CPUUnquantizedExperts.apply),
        (experts.pad_moe_intermediate(None), m3_fakes.CPUUnquantizedExperts._pad_moe_intermediate),
        (experts.compute_routing(None), m3_fakes.CPURouter._compute_routing),
        (m3.RaggedM3Indexer.forward, m3_fakes.MiniMaxM3IndexerImpl.forward),
    ]
    for mine, theirs in pairs:
        expect_compatible(mine, theirs, theirs.__name__)
    equal = [(getattr(m3, name), getattr(m3_fakes, name)) for name in SELECTS]
    for mine, theirs in [*equal, (m3.RaggedM3Impl.forward, m3_fakes.MiniMaxM3SparseImpl.forward)]:
        assert [*inspect.signature(mine).parameters] == [*inspect.signature(theirs).parameters]
    for cls in (m3.RaggedM3Backend, m3.RaggedM3IndexerBackend, m3.BlocksMetadataBuilder):
        assert not inspect.isabstract(cls)


@pytest.mark.filterwarnings("ignore")  # warnings of vLLM and of what it imports
def test_vllm_has_what_is_bound(monkeypatch):
    """If vLLM is installed, it has each bound name with the signature of its fake."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    if importlib.util.find_spec("torchvision") is None:  # vLLM needs torchvision only for images
        monkeypatch.setitem(sys.modules, vllm_m3.PROCESSORS, vllm_m3.without_images())
    for one in importlib.import_module(BINDINGS).M3:
        path, _, cls = one.owner.partition(":")
        home = importlib.import_module(path)
        found = vars(getattr(home, cls) if cls else home)[one.name]
        fake = vars(vars(m3_fakes)[cls])[one.name] if cls else vars(m3_fakes)[one.name]
        known, parameters = ([*inspect.signature(each).parameters] for each in (found, fake))
        assert [name for name in parameters if name != "rest"] == known[: len(known) if "rest" not in parameters else 8]


def test_what_vllm_is_told_we_support(m3):
    for cls in (m3.RaggedM3Backend, m3.RaggedM3IndexerBackend):
        assert [size.base for size in cls.get_supported_kernel_block_sizes()] == [16]
        assert cls.is_sparse()
        assert cls.supports_dtype(torch.float32)
        assert cls.supports_batch_invariance()
        assert cls.supports_kv_cache_dtype("fp8_e5m2")
        assert not cls.supports_kv_cache_dtype("nvfp4")
        assert cls.get_builder_cls() is m3.BlocksMetadataBuilder
    assert m3.BlocksMetadataBuilder._cudagraph_support is fakes.AttentionCGSupport.UNIFORM_BATCH
    assert (m3.RaggedM3Backend.get_name(), m3.RaggedM3Backend.get_impl_cls()) == ("RAGGED_M3_SPARSE", m3.RaggedM3Impl)
    assert m3.RaggedM3IndexerBackend.get_impl_cls() is m3.RaggedM3Indexer


# A layer's step


class SparseStep(Step):
    """A step of a layer with an indexer; index keys without a token are NaN."""

    def __init__(self, m3: Any, lens: Sequence[tuple[int, int]], *, index: Any = torch.bfloat16, **given: Any) -> None:
        super().__init__(lens, heads=(HEADS, KV_HEADS), **given)
        rows = len(self.q)
        self.index_q = torch.randn(rows, KV_HEADS, INDEX_DIM).to(index)
        self.index_k = torch.full((self.cache.shape[0], self.page, INDEX_DIM), torch.nan).to(index)
        for row, (_, kv_len) in enumerate(lens):
            at = torch.arange(kv_len)
            self.index_k[self.table[row, at // self.page].long(), at % self.page] = torch.randn(kv_len, INDEX_DIM).to(
                index
            )
        written = self.slots[: self.tokens]
        new = torch.cat((self.k, self.v), -1)[: self.tokens].to(self.cache.dtype)
        self.cache[written // self.page, :, written % self.page] = new
        self.builder = m3.BlocksMetadataBuilder(None, ["layer"], vllm_config(), torch.device("cpu"))

    def sparse(self, m3: Any, monkeypatch: Any, cache_dtype: Any = "auto", **settings: Any) -> torch.Tensor:
        """The layer's output from our indexer and our attention."""
        self.layer.layer_name = "layer"
        self.layer.topk_indices_buffer = torch.full((len(self.q) + 5, KV_HEADS, settings["topk_blocks"]), 99).int()
        given = {name: settings[name] for name in ("topk_blocks", "sparse_block_size")}
        indexer = m3.RaggedM3Indexer(
            num_kv_heads=KV_HEADS, scale=0.3, num_index_heads=KV_HEADS, index_head_dim=INDEX_DIM, prefix="layer",
            topk_indices_buffer=self.layer.topk_indices_buffer, **settings,
        )  # fmt: skip
        indexer.index_cache.kv_cache = self.index_k
        impl = m3.RaggedM3Impl(HEADS, self.size, 0.3, KV_HEADS, cache_dtype, **given)
        steps = {name: self.builder.build(0, self.common) for name in ("layer", "layer.index_cache")}
        context = SimpleNamespace(attn_metadata=steps)
        monkeypatch.setattr(importlib.import_module("vllm.forward_context"), "get_forward_context", lambda: context)
        output = torch.full((len(self.q), HEADS * self.size), KEPT, dtype=self.q.dtype)
        indexer(self.index_q.flatten(1))
        assert impl.forward(self.layer, self.q.flatten(1), self.handed(), output) is output
        assert (output[self.tokens :] == KEPT).all()
        assert (self.layer.topk_indices_buffer[self.tokens :] == 99).all()
        return output[: self.tokens].view(-1, HEADS, self.size)

    def alone(self, row: int) -> None:
        """Reduce the step to one of its requests."""
        begin, end = self.common.query_start_loc[row : row + 2].tolist()
        edges = torch.tensor([0, end - begin], dtype=torch.int32)
        self.common = dataclasses.replace(
            self.common, query_start_loc=edges, query_start_loc_cpu=edges, seq_lens=self.common.seq_lens[row : row + 1],
            num_reqs=1, num_actual_tokens=end - begin, max_query_len=end - begin,
            block_table_tensor=self.table[row : row + 1],
        )  # fmt: skip
        self.tokens, self.q, self.index_q = end - begin, self.q[begin:end], self.index_q[begin:end]

    def seen(self, size: int, top_k: int, init: int, local: int) -> list[torch.Tensor]:
        """The masks [H, query length, length] of visible keys for each sequence, computed in a loop over blocks."""
        masks, begin = [], 0
        for row, (q_len, kv_len) in enumerate(self.lens):
            at = torch.arange(kv_len)
            keys = self.index_k[self.table[row, at // self.page].long(), at % self.page].double()
            mask = torch.zeros(KV_HEADS, q_len, kv_len, dtype=torch.bool)
            for i in range(q_len):
                position = kv_len - q_len + i
                products = self.index_q[begin + i].double() @ keys[: position + 1].T
                own = position // size
                scores = torch.stack([part.amax(1) for part in products.split(size, 1)], 1)
                scores[:, :init] = scores[:, max(own - local + 1, 0) :] = torch.inf
                for head in range(KV_HEADS):
                    for block in scores[head].topk(min(top_k, own + 1)).indices.tolist():
                        mask[head, i, block * size : (block + 1) * size] = True
                mask[:, i, position + 1 :] = False
            masks.append(mask.repeat_interleave(HEADS // KV_HEADS, 0))
            begin += q_len
        return masks


@pytest.mark.parametrize("lens", [PREFILL, DECODE, MIXED], ids=["prefill", "decode", "mixed"])
@pytest.mark.parametrize("page", [16, 4])
@pytest.mark.parametrize("forced", [(0, 1), (1, 2), (0, 0)])
def test_a_layer(forced, page, lens, m3, backend, monkeypatch):
    """A layer's step agrees with dense attention for blocks of 8 tokens and pages of twice or half that size.

    A query sees up to 7 blocks and selects three.
    """
    step = SparseStep(m3, lens, page=page)
    forcing = {"init_blocks": forced[0], "local_blocks": forced[1]}
    out = step.sparse(m3, monkeypatch, topk_blocks=3, sparse_block_size=8, **forcing)
    assert agrees(out, step.dense(seen=step.seen(8, 3, *forced)), "float32")


@pytest.mark.parametrize("index", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("layout", ["LBNHC", "BLHNC", "BHLNC"])
def test_a_layer_in_bfloat16(layout, index, m3, backend, monkeypatch):
    """A layer's step in bfloat16 works with other memory layouts and with 8-bit index keys."""
    step = SparseStep(m3, MIXED, layout=layout, dtype=torch.bfloat16, index=index)
    out = step.sparse(m3, monkeypatch, topk_blocks=2, sparse_block_size=16, local_blocks=1)
    assert agrees(out.float(), step.dense(seen=step.seen(16, 2, 0, 1)), "bfloat16")


def test_the_same_bits_in_every_batch(m3, monkeypatch):
    """With vLLM's variable set, Numba's backend gives a request the same bits in every batch."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    settings: dict[str, Any] = dict(topk_blocks=12, sparse_block_size=64, local_blocks=1)
    lens = [(1, 1500), (7, 900), (1, 3), (30, 30)]
    with ra.use_backend("numba"):
        whole = SparseStep(m3, lens)
        among, begin = whole.sparse(m3, monkeypatch, **settings), 0
        for row, (q_len, _) in enumerate(lens):
            step = SparseStep(m3, lens)
            step.alone(row)
            assert torch.equal(step.sparse(m3, monkeypatch, **settings), among[begin : begin + q_len])
            begin += q_len


@pytest.mark.parametrize("cache_dtype", ["fp8", "fp8_e5m2"])
def test_8_bit_caches(cache_dtype, m3, backend, monkeypatch):
    step = SparseStep(m3, MIXED, cache_dtype=cache_dtype, scales=(0.5, 0.25))
    out = step.sparse(m3, monkeypatch, cache_dtype, topk_blocks=3, sparse_block_size=8, local_blocks=1)
    assert agrees(out, step.dense(seen=step.seen(8, 3, 0, 1)), "float32")


def test_keys_that_no_list_names_are_not_read(m3, backend, monkeypatch):
    step = SparseStep(m3, DECODE)
    expected = step.dense(seen=step.seen(8, 2, 0, 1))
    masks = step.seen(8, 2, 0, 1)
    for row, (_, kv_len) in enumerate(step.lens):
        for position in range(kv_len):
            for head in range(KV_HEADS):
                if not masks[row][head * HEADS // KV_HEADS, :, position].any():
                    step.cache[step.table[row, position // step.page], head, position % step.page] = torch.nan
    out = step.sparse(m3, monkeypatch, topk_blocks=2, sparse_block_size=8, local_blocks=1)
    assert agrees(out, expected, "float32")


def test_the_profiling_run(m3, monkeypatch):
    context = SimpleNamespace(attn_metadata=None)
    monkeypatch.setattr(importlib.import_module("vllm.forward_context"), "get_forward_context", lambda: context)
    impl = m3.RaggedM3Impl(4, 32, 0.3, 2, topk_blocks=3, sparse_block_size=8)
    output = torch.zeros(3, 128)
    assert impl.forward(SimpleNamespace(layer_name="layer"), output, torch.tensor([]), output) is output
    assert indexer_of(m3)(output) is None


def indexer_of(m3: Any, **settings: Any) -> Any:
    given = dict(num_kv_heads=2, scale=1.0, topk_blocks=3, sparse_block_size=8, num_index_heads=2, index_head_dim=16)
    return m3.RaggedM3Indexer(**(given | {"prefix": "a", "topk_indices_buffer": torch.zeros(4, 2, 3)} | settings))


def test_what_ours_do_not_take(m3, monkeypatch):
    with pytest.raises(Unsupported, match="expected sparse_score_type to be max for MiniMax M3, got 'mean'"):
        indexer_of(m3, score_type="mean")
    with pytest.raises(Unsupported, match="expected topk_indices_buffer for MiniMax M3, got None"):
        indexer_of(m3, topk_indices_buffer=None)
    for dtype in ("mxfp4", "nvfp4"):
        with pytest.raises(
            Unsupported, match=f"expected indexer_kv_dtype to be one of bf16, fp8, fp8_e4m3 .*'{dtype}'"
        ):
            m3.select_indexer_impl_cls(topk_blocks=16, indexer_kv_dtype=dtype)
    given = dict(topk_blocks=16, num_kv_heads=2)
    with pytest.raises(Unsupported, match=r"expected kv_cache_dtype to be one of auto, float16, .*, got 'nvfp4'"):
        m3.select_main_backend_and_impl_cls(**given, kv_cache_dtype="nvfp4")
    with pytest.raises(Unsupported, match="expected emits_sparse_block_table to be False for MiniMax M3, got True"):
        m3.select_main_backend_and_impl_cls(**given, kv_cache_dtype="auto", emits_sparse_block_table=True)
    impl = m3.RaggedM3Impl(4, 32, 0.3, 2, topk_blocks=3, sparse_block_size=8)
    rows = torch.zeros(3, 128)
    with pytest.raises(Unsupported, match="expected query_fp8 to be None for MiniMax M3, got queries in 8 bits"):
        impl.forward(None, rows, rows, rows, query_fp8=rows)
    monkeypatch.setattr(importlib.import_module("ragged_attention.integrations._vllm_attention"), "ranks_of", id_of_two)
    with pytest.raises(Unsupported, match="expected no decode context parallelism for MiniMax M3, got a cache divided"):
        m3.BlocksMetadataBuilder(None, ["layer"], vllm_config(2), torch.device("cpu"))


def id_of_two(kv_cache_spec: Any, config: Any) -> int:
    """A stand-in for `ranks_of`. Its result is not None, as if several ranks divided a cache."""
    return id((kv_cache_spec, config))


def test_what_it_selects(m3):
    assert m3.select_indexer_impl_cls(topk_blocks=5) is m3.RaggedM3Indexer
    chosen = m3.select_main_backend_and_impl_cls(topk_blocks=5, kv_cache_dtype="fp8", num_kv_heads=2)
    assert chosen == (m3.RaggedM3Backend, m3.RaggedM3Impl)


# The fused steps around attention


def test_the_norm(m3):
    torch.manual_seed(0)
    norm = SimpleNamespace(weight=torch.randn(24), variance_epsilon=1e-6)
    x, residual = torch.randn(5, 24), torch.randn(5, 24)

    def expected(x: torch.Tensor) -> torch.Tensor:
        x = x.double()
        return (x / (x.square().mean(1, keepdim=True) + 1e-6).sqrt() * (1 + norm.weight.double())).float()

    torch.testing.assert_close(m3.gemma_norm(norm, x), expected(x))
    out, summed = m3.gemma_norm(norm, x.bfloat16(), residual.bfloat16())
    whole = x.bfloat16().float() + residual.bfloat16().float()
    assert torch.equal(summed, whole.bfloat16())
    torch.testing.assert_close(out, expected(whole).bfloat16())


class Insert:
    """The arguments of the fused step before attention, and its expected results."""

    heads, dim, rotary, page = (4, 2, 2), 16, 8, 4

    def __init__(self, index_heads: int = 2, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(1)
        rows = sum(self.heads) + (index_heads + 1 if index_heads else 0)
        self.qkv = torch.randn(6, rows * self.dim).to(dtype)
        self.weights = [torch.randn(self.dim) for _ in range(4)]
        self.table = torch.randn(50, self.rotary)
        self.positions = torch.tensor([3, 49, 0, 7, 8, 9])
        self.split = [*self.heads, *([index_heads, 1] if index_heads else [])]
        self.before = self.qkv.double().view(6, rows, self.dim).split(self.split, 1)

    def expected(self, which: int, weight: int) -> torch.Tensor:
        """The expected heads of one kind, computed in float64 and then rounded."""
        x, w = self.before[which], self.weights[weight].double()
        x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + w)
        cos, sin = self.table[self.positions].double()[:, None].chunk(2, -1)
        a, b, rest = x[..., :4], x[..., 4:8], x[..., 8:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1).float()

    def after(self) -> tuple[torch.Tensor, ...]:
        return self.qkv.view(6, -1, self.dim).split(self.split, 1)

    def call(self, m3: Any, *more: Any, **named: Any) -> None:
        q, k, iq, ik = self.weights
        index = [iq, ik, self.split[3]] if len(self.split) > 3 else []
        m3.fused_minimax_m3_qknorm_rope_kv_insert(
            self.qkv, q, k, self.table, self.positions, self.heads[0], self.heads[1], self.rotary, 1e-6, *index, *more,
            **named,
        )  # fmt: skip


def test_a_dense_layers_heads_are_changed_in_place(m3):
    given = Insert(index_heads=0)
    given.call(m3, kv_cache_dtype="auto")
    q, k, v = given.after()
    torch.testing.assert_close(q, given.expected(0, 0))
    torch.testing.assert_close(k, given.expected(1, 1))
    assert torch.equal(v.double(), given.before[2])


@pytest.mark.parametrize("index_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
def test_a_sparse_layers_caches_are_written(cache_dtype, index_dtype, m3):
    """A sparse layer's caches are written only at their slots; one slot is -1, and the last token has none.

    A huge index key is stored as the largest number of the format.
    """
    given = Insert()
    given.weights[3][-1] = 1e6
    slots, index_slots = torch.tensor([5, 0, -1, 11, 2]), torch.tensor([7, 1, 4, -1, 3])
    stored = torch.float8_e4m3fn if cache_dtype == "fp8" else torch.float32
    cache = torch.full((3, 2, given.page, 2 * given.dim), torch.nan).to(stored)
    index_cache = torch.full((2, 3, given.page, given.dim), torch.nan).to(index_dtype)[
        :, 1
    ]  # there are gaps between blocks
    q_out, index_q = torch.zeros(6, 4 * given.dim), torch.zeros(6, 2 * given.dim, dtype=index_dtype)
    handed = cache.view(torch.uint8) if cache_dtype == "fp8" else cache
    given.call(m3, slots, index_slots, handed, index_cache, given.page, q_out, index_q, cache_dtype)
    _, k, v, _, index_k = given.after()
    assert torch.equal(
        given.after()[0].double(), given.before[0]
    )  # q is unchanged, because its results have their own memory
    torch.testing.assert_close(q_out.view(6, 4, -1), given.expected(0, 0))
    torch.testing.assert_close(k, given.expected(1, 1))
    expected = given.expected(3, 2).to(index_dtype).float()
    torch.testing.assert_close(index_q.float().view(6, 2, -1), expected, rtol=0.07, atol=1e-3)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            both = torch.cat((k[token], v[token]), -1).to(stored)
            assert torch.equal(cache[slot // 4, :, slot % 4].float(), both.float())
    largest = torch.finfo(index_dtype).max
    for token, slot in enumerate(index_slots.tolist()):
        if slot >= 0:
            row = index_k[token, 0].clamp(-largest, largest).to(index_dtype).float()
            assert torch.equal(index_cache[slot // 4, slot % 4].float(), row)
    assert int(cache.float().isnan().all(-1)[:, 0].sum()) == 12 - 4
    assert int(index_cache.float().isnan().all(-1).sum()) == 8 - 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_heads_of_16_bits(dtype, m3):
    """16-bit heads work; index keys have their own dtype, which may have a larger range than that of the heads."""
    given, slots = Insert(dtype=dtype), torch.arange(6)
    cache, index_cache = torch.zeros(2, 2, 4, 32, dtype=dtype), torch.zeros(2, 4, 16, dtype=torch.bfloat16)
    given.call(m3, slots, None, cache, index_cache, 4)
    _, k, v, _, index_k = given.after()
    torch.testing.assert_close(k, given.expected(1, 1).to(dtype))
    assert torch.equal(index_cache.view(8, 16)[:6], index_k[:, 0].bfloat16())
    assert torch.equal(cache.transpose(1, 2).reshape(8, 2, 32)[:6], torch.cat((k, v), -1))


def test_one_mapping_of_slots_serves_both_caches(m3):
    given, slots = Insert(), torch.arange(6)
    cache, index_cache = torch.zeros(2, 2, 4, 32), torch.zeros(2, 4, 16)
    given.call(m3, slots, None, cache, index_cache, 4)
    assert torch.equal(index_cache.view(8, 16)[:6], given.after()[4][:, 0])
    torch.testing.assert_close(given.after()[3], given.expected(3, 2))  # index queries are changed in place


def test_a_layer_that_selects_nothing_itself(m3):
    given, slots = Insert(), torch.arange(6)
    cache, index_cache = torch.zeros(2, 2, 4, 32), torch.zeros(2, 4, 16)
    given.call(m3, slots, None, cache, index_cache, 4, skip_index_branch=True)
    assert (index_cache == 0).all()
    assert torch.equal(given.after()[3].double(), given.before[3])
    torch.testing.assert_close(given.after()[1], given.expected(1, 1))


def test_what_the_step_before_attention_does_not_take(m3):
    given = Insert()
    with pytest.raises(Unsupported, match="expected q_fp8_out to be None for MiniMax M3, got queries in 8 bits"):
        given.call(m3, q_fp8_out=given.qkv)
    with pytest.raises(Unsupported, match=r"expected kv_cache_dtype to be one of auto, .*, got 'nvfp4'"):
        given.call(m3, kv_cache_dtype="nvfp4")


# Experts


@pytest.fixture
def experts(m3: Any) -> Any:
    """vLLM's class of experts with our implementation bound."""
    importlib.import_module(BINDINGS).bind(False, importlib.import_module(BINDINGS).M3)
    return importlib.import_module("vllm.model_executor.layers.fused_moe.experts.cpu_moe").CPUUnquantizedExperts


HALVES, SILU = m3_fakes.Activation.SWIGLUOAI_UNINTERLEAVE, m3_fakes.Activation.SILU


def test_the_rows_of_experts_alternate(experts):
    made = experts(activation=HALVES, swiglu_limit=7.0, swiglu_alpha=1.702, swiglu_beta=1.0)
    assert [experts._supports_activation(each) for each in (HALVES, SILU, m3_fakes.Activation.SWIGLUOAI)] == [1, 1, 0]
    layer = SimpleNamespace(w13_weight=torch.nn.Parameter(torch.arange(12.0).view(1, 6, 2)))
    made._pad_moe_intermediate(layer)
    assert layer.w13_weight[0, :, 0].tolist() == [0, 6, 2, 8, 4, 10]
    named = dict.fromkeys(("output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids"))
    made.apply(**named, activation=HALVES)
    made.apply(**named, activation=SILU)
    assert made.calls == ["padded", m3_fakes.Activation.SWIGLUOAI, SILU]
    plain, weight = experts(activation=SILU), layer.w13_weight.clone()
    plain._pad_moe_intermediate(layer)
    assert torch.equal(layer.w13_weight, weight)


def test_another_form_of_the_activation_is_refused(experts):
    made = experts(activation=HALVES, swiglu_limit=7.0, swiglu_alpha=1.5, swiglu_beta=1.0)
    with pytest.raises(Unsupported, match=r"of experts to be \(7.0, 1.702, 1.0\) on a CPU, got \(7.0, 1.5, 1.0\)"):
        made._pad_moe_intermediate(SimpleNamespace(w13_weight=torch.zeros(1, 6, 2)))


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_routing_by_sigmoids(bias, renormalize, experts):
    torch.manual_seed(0)
    router_of: Any = importlib.import_module("vllm.model_executor.layers.fused_moe.router.cpu_router").CPURouter
    logits = torch.randn(5, 6)
    added = torch.randn(6) * 3 if bias else None
    router = router_of(
        scoring_func="sigmoid", top_k=2, renormalize=renormalize, e_score_correction_bias=added,
        routed_scaling_factor=2.0,
    )  # fmt: skip
    weights, chosen = router._compute_routing(None, logits, None)
    assert (weights.dtype, chosen.dtype) == (torch.float32, torch.int32)
    assert weights.is_contiguous()
    assert chosen.is_contiguous()
    for row, line in enumerate(logits.sigmoid()):
        order = sorted(range(6), key=lambda i: -float(line[i] + (added[i] if added is not None else 0)))[:2]
        assert sorted(chosen[row].tolist()) == sorted(order)
        whole = float(line[order].sum()) if renormalize else 1.0
        for expert, weight in zip(chosen[row].tolist(), weights[row].tolist(), strict=True):
            assert weight == pytest.approx(2 * float(line[expert]) / whole)


def test_other_routings_are_vllms(experts):
    router_of: Any = importlib.import_module("vllm.model_executor.layers.fused_moe.router.cpu_router").CPURouter
    for settings in (
        {"scoring_func": "softmax"},
        {"scoring_func": "sigmoid", "use_grouped_topk": True},
        {"scoring_func": "sigmoid", "custom_routing_function": print},
    ):
        assert router_of(**settings)._compute_routing(None, torch.zeros(1, 4), None) == "vLLM's"
