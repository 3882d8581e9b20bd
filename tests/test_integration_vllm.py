"""Our classes for vLLM implement its interface, checked with fakes, and agree with dense attention."""

import copy
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import logging
import pickle
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import ragged_attention as ra
from ragged_attention import config
from ragged_attention.errors import Unsupported
from ragged_attention.integrations import vllm as module
from ragged_attention.testing.compare import agrees
from tests import vllm_fakes as fakes

ours: Any = module

BACKENDS = ("eager", "numba")
CLASSES = {"_vllm_attention": "Attention", "_vllm_mla": "MLA", "_vllm_sparse": "SparseMLA"}
KEPT = 77.0  # the value of an output's padding rows, which must not change


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with ra.use_backend(request.param):
        yield request.param


# Registration and versions


def test_the_names_lead_to_our_classes(vllm):
    for _ in range(2):  # plug-ins may be loaded more than once
        ours.register()
    for name, cls in (("RAGGED", "Attention"), ("RAGGED_MLA", "MLA"), ("RAGGED_SPARSE_MLA", "SparseMLA")):
        path, _, attribute = vllm.path(name).rpartition(".")
        found = getattr(importlib.import_module(path), attribute)
        assert found is getattr(ours, f"Ragged{cls}Backend")
        assert found.get_name() == name
    assert vllm.path("CPU_ATTN").startswith("vllm.")


def test_a_cpu_runs_ours_for_those_who_ask(vllm, monkeypatch):
    monkeypatch.setenv("RAGGED_ATTENTION_VLLM_CPU", "1")
    ours.register(cpu=False)
    assert vllm.path("CPU_ATTN").startswith("vllm.")
    ours.register()
    assert vllm.path("CPU_ATTN").endswith(".RaggedAttentionBackend")
    assert vllm.path("CPU_MLA").endswith(".RaggedMLABackend")
    assert vllm.path("AMX_MLA").endswith(".RaggedMLABackend")
    assert vllm.path("TRITON_ATTN").startswith("vllm.")


def test_a_name_reaches_a_process_that_has_not_loaded_plugins(vllm, monkeypatch):
    ours.register()
    pickled = pickle.dumps(vllm["RAGGED"])
    assert pickle.loads(pickled) is vllm["RAGGED"]
    with fakes.installed(monkeypatch) as other:
        assert pickle.loads(pickled) is other["RAGGED"]
        assert other.path("RAGGED").endswith(".RaggedAttentionBackend")
        assert copy.deepcopy(other["RAGGED"]) is other["RAGGED"]


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0rc1", "0.3.2", "dev"])
def test_another_version_is_refused(version, monkeypatch, caplog):
    with fakes.installed(monkeypatch, version) as registry:
        for attempt in (ours.register, lambda: ours.RaggedMLABackend):
            with pytest.raises(Unsupported, match=rf"expected vllm 0.32 or 0.33, .*, got vllm {version}"):
                attempt()
        with caplog.at_level(logging.WARNING):
            ours.plugin()  # must not fail, because the user may not have selected our backend
        assert f"got vllm {version}" in caplog.text
        assert registry.path("RAGGED").endswith("RaggedAttentionBackend")


@pytest.mark.parametrize("version", ["0.32.0", "0.33.1.dev5+gabc"])
def test_a_tested_version_is_taken(version, monkeypatch, caplog):
    with fakes.installed(monkeypatch, version):
        with caplog.at_level(logging.WARNING):
            ours.plugin()
        assert not caplog.text
        assert ours.RaggedAttentionBackend.get_name() == "RAGGED"


def test_without_vllm(monkeypatch):
    fakes.absent(monkeypatch)
    for attempt in (ours.register, lambda: ours.RaggedAttentionBackend):
        with pytest.raises(ImportError, match=r"expected vllm 0.32 or 0.33 to be installed .*, got none"):
            attempt()
    with pytest.raises(AttributeError, match="has no attribute 'RaggedBackend'"):
        _ = ours.RaggedBackend


# The interface


def classes() -> list[type]:
    """Our classes: the backend, the builder and the implementation of each kind."""
    backends = [getattr(ours, f"Ragged{kind}Backend") for kind in CLASSES.values()]
    return [cls for b in backends for cls in (b, b.get_builder_cls(), b.get_impl_cls())]


def test_every_abstract_method_is_there(vllm):
    for cls in classes():
        assert not inspect.isabstract(cls), sorted(cls.__abstractmethods__)


def test_signatures_take_what_vllm_passes(vllm):
    compared = 0
    for cls in classes():
        own = [each for each in cls.__mro__ if each.__module__.startswith("ragged_attention.")]
        for name, method in {name: method for each in reversed(own) for name, method in vars(each).items()}.items():
            bases = [base for base in cls.__mro__[1:] if name in vars(base) and base.__module__ == fakes.__name__]
            if bases and inspect.isroutine(getattr(cls, name)):
                expect_compatible(getattr(cls, name), getattr(bases[0], name), f"{cls.__name__}.{name}")
                compared += method is not None
    assert compared > 30


def expect_compatible(mine: Any, theirs: Any, what: str) -> None:
    """Assert that `mine` accepts every call of `theirs`, by position or name, and needs no more arguments."""
    own, other = inspect.signature(mine).parameters, inspect.signature(theirs).parameters
    kinds = {parameter.kind for parameter in own.values()}
    named = [name for name, parameter in own.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    for position, name in enumerate(other):
        if position < len(named) and name == named[position]:
            continue
        in_order = inspect.Parameter.VAR_POSITIONAL in kinds or other[name].default is not inspect.Parameter.empty
        assert inspect.Parameter.VAR_KEYWORD in kinds or (name in named and in_order), f"{what}: {name}"
    for name in named:
        assert name in other or own[name].default is not inspect.Parameter.empty, f"{what}: {name}"


@pytest.mark.filterwarnings("ignore")  # warnings of vLLM and of what it imports
@pytest.mark.parametrize("path", fakes.CONTENTS)
def test_the_fakes_have_vllms_signatures(path):
    """If vLLM is installed, its classes have each method of our fakes, with the same parameters."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    real = importlib.import_module(path)
    for fake in fakes.CONTENTS[path]:
        if inspect.isfunction(fake):
            expect_the_same(fake, getattr(real, fake.__name__), False, fake.__name__)
        for name in vars(fake):
            method = getattr(fake, name)
            if inspect.isroutine(method) and (name == "__init__" or not name.startswith("__")):
                found = getattr(getattr(real, fake.__name__), name)
                expect_the_same(method, found, dataclasses.is_dataclass(fake), f"{fake.__name__}.{name}")


def expect_the_same(fake: Any, found: Any, any_order: bool, what: str) -> None:
    """Assert that a fake has vLLM's parameters.

    It may lack parameters at the end, and may have another one that is optional and new in a later version.
    """
    abstract = "__isabstractmethod__"
    assert getattr(fake, abstract, False) == getattr(found, abstract, False), what
    parameters, known = inspect.signature(fake).parameters, [*inspect.signature(found).parameters]
    needed = [n for n, p in parameters.items() if n in known or p.default is inspect.Parameter.empty]
    assert set(needed) <= set(known) if any_order else known[: len(needed)] == needed, what


def test_vllms_own_variable_asks_for_batch_invariance(vllm, monkeypatch):
    attention = importlib.import_module("ragged_attention.integrations._vllm_attention")
    for value, asked in (("1", True), ("0", False), ("1", True)):
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
        with attention.as_vllm_asks():
            assert config.is_batch_invariant() == asked
        assert not config.is_batch_invariant()


def test_what_vllm_is_told_we_support(vllm):
    plain, mla, sparse = (getattr(ours, f"Ragged{kind}Backend") for kind in CLASSES.values())
    assert not plain.forward_includes_kv_cache_update
    assert plain.supports_sink()
    assert plain.supports_sliding_window()
    assert plain.supports_per_head_quant_scales()
    for cls in (plain, mla, sparse):
        assert cls.supports_non_causal() == (cls is plain)
        assert cls.supports_mm_prefix() == cls.supports_rswa() == (cls is plain)
        assert not cls.supports_alibi_sqrt()
        assert cls.supports_batch_invariance()
        assert cls.get_impl_cls().supports_dcp
        assert not cls.get_impl_cls().supports_pcp
        assert cls.supports_attn_type("decoder")
        others = [cls.supports_attn_type(t) for t in ("encoder", "encoder_only", "encoder_decoder")]
        assert others == [cls is plain] * 3
        assert cls.supports_kv_cache_dtype("nvfp4") == (cls is plain)
        assert [size.base for size in cls.get_supported_kernel_block_sizes()] == [16]
        assert not cls.get_impl_cls().fused_output_quant_supported(None, None)
    assert [plain.supports_head_size(size) for size in (8, 16, 20, 80, 512, 576)] == [
        False,
        True,
        False,
        True,
        True,
        False,
    ]
    assert plain.supports_kv_cache_dtype("fp8_e5m2")
    assert (mla.is_mla(), mla.is_sparse(), sparse.is_mla(), sparse.is_sparse()) == (True, False, True, True)
    assert mla.supports_head_size(576)
    assert not sparse.supports_head_size(512)
    assert [cls.supports_kv_cache_dtype("fp8_e4m3") for cls in (mla, sparse)] == [True, False]
    assert not mla.supports_kv_cache_dtype("fp8_e5m2")
    assert mla.get_builder_cls().query_len_support.value == "varlen"
    assert mla.get_builder_cls().reorder_batch_threshold == 128
    rest: tuple[Any, ...] = (64, True, False, False, False, None)
    assert mla.supports_combination(576, torch.bfloat16, "fp8_ds_mla", *rest) is None
    reason = mla.supports_combination(512, torch.bfloat16, "fp8_ds_mla", *rest)
    assert reason == "fp8_ds_mla holds rows of 576 columns, not 512"
    assert sparse.supports_combination(576, torch.bfloat16, "auto", *rest) is None


# Attention


def vllm_config(
    ranks: int = 1,
    interleave: int = 1,
    exchange: str = "ag_rs",
    spans: bool = False,
    prefix_window: int | None = None,
    layers: dict[str, Any] | None = None,
) -> SimpleNamespace:
    return SimpleNamespace(
        model_config=SimpleNamespace(is_mm_prefix_lm=spans, rswa_window=prefix_window),
        compilation_config=SimpleNamespace(static_forward_context=layers or {}),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=ranks, cp_kv_cache_interleave_size=interleave, dcp_comm_backend=exchange
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=8),
    )


def metadata_builder(spec: Any = None, layers: dict[str, Any] | None = None, **config: Any) -> Any:
    """Our metadata builder for the named layers; without layers, key ranges are made on demand."""
    made = vllm_config(layers=layers, **config)
    return ours.RaggedAttentionBackend.get_builder_cls()(spec, [*(layers or {})], made, torch.device("cpu"))


class Step:
    """A step of requests (query length, length) in vLLM's terms; the cache is NaN except for earlier tokens."""

    def __init__(
        self,
        lens: Sequence[tuple[int, int]],
        *,
        heads: tuple[int, int] = (4, 2),
        size: int = 32,
        page: int = 16,
        layout: str = "LBHNC",
        dtype: torch.dtype = torch.float32,
        cache_dtype: str = "auto",
        scales: tuple[Any, Any] = (1.0, 1.0),
        padding: int = 3,
    ) -> None:
        torch.manual_seed(7)
        self.lens, self.page, self.size = lens, page, size
        self.tokens = sum(q for q, _ in lens)
        self.q, self.k, self.v = (
            torch.randn(self.tokens + padding, n, size).to(dtype) for n in (heads[0], heads[1], heads[1])
        )
        longest = max(length for _, length in lens)
        pages = [-(-length // page) for _, length in lens]
        order = (torch.randperm(sum(pages) + 2) + 1).tolist()
        self.table = torch.zeros(len(lens), -(-longest // page) + 1, dtype=torch.int32)
        for row, count in enumerate(pages):
            self.table[row, :count] = torch.tensor([order.pop() for _ in range(count)])
        e4m3 = importlib.import_module("vllm.platforms").current_platform.fp8_dtype()
        self.fp8 = {"fp8": e4m3, "fp8_e5m2": torch.float8_e5m2}.get(cache_dtype)
        self.cache = in_memory_as(layout, (sum(pages) + 3, heads[1], page, 2 * size), self.fp8 or dtype)
        self.slots = torch.full((self.tokens + padding,), -1, dtype=torch.int64)
        self.layer = SimpleNamespace(_k_scale=torch.tensor(scales[0]), _v_scale=torch.tensor(scales[1]))
        begin = 0
        for row, (q_len, kv_len) in enumerate(lens):
            for position in range(kv_len - q_len):
                stored = torch.randn(heads[1], 2 * size).to(self.cache.dtype)
                self.cache[self.table[row, position // page], :, position % page] = stored
            for i in range(q_len):
                position = kv_len - q_len + i
                self.slots[begin + i] = self.table[row, position // page] * page + position % page
            begin += q_len
        edges = torch.tensor([0, *(q for q, _ in lens)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self.common = fakes.CommonAttentionMetadata(
            query_start_loc=edges,
            query_start_loc_cpu=edges,
            seq_lens=torch.tensor([length for _, length in lens], dtype=torch.int32),
            num_reqs=len(lens),
            num_actual_tokens=self.tokens,
            max_query_len=max(q for q, _ in lens),
            max_seq_len=longest,
            block_table_tensor=self.table,
            slot_mapping=self.slots,
        )

    def handed(self) -> torch.Tensor:
        """The cache as vLLM passes it: as bytes if it holds 8-bit floats."""
        return self.cache.view(torch.uint8) if self.fp8 else self.cache

    def run(self, impl: Any, builder: Any = None) -> torch.Tensor:
        """The output of a layer's step, which writes new keys and values and then attends."""
        self.layer.impl = impl
        metadata = (builder or metadata_builder(layers={"layer": self.layer})).build(0, self.common)
        impl.do_kv_cache_update(self.layer, self.k, self.v, self.handed(), self.slots)
        output = torch.full_like(self.q, KEPT)
        returned = impl.forward(self.layer, self.q, self.k, self.v, self.handed(), metadata, output)
        assert returned is output
        assert (output[self.tokens :] == KEPT).all()
        return output[: self.tokens]

    def dense(
        self, *, window: int | None = None, cap: float | None = None, sinks: Any = None, causal: bool = True,
        slopes: Any = None, seen: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        """The output of dense attention in float64, from the values in the cache.

        ALiBi is vLLM's: distances are relative to the first new key. `seen` has a mask [query length, length] for each
        sequence.
        """
        outs, begin, scale = [], 0, 0.3
        group = self.q.shape[1] // self.k.shape[1]
        for row, (q_len, kv_len) in enumerate(self.lens):
            at = torch.arange(kv_len)
            held = self.cache[self.table[row, at // self.page].long(), :, at % self.page].double()
            shape = (-1, 1)
            k = held[..., : self.size] * self.layer._k_scale.double().view(shape if self.layer._k_scale.dim() else ())
            v = held[..., self.size :] * self.layer._v_scale.double().view(shape if self.layer._v_scale.dim() else ())
            q = self.q[begin : begin + q_len].double()
            logits = scale * torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1))
            if cap is not None:
                logits = cap * torch.tanh(logits / cap)
            if slopes is not None:
                logits = logits + torch.tensor(slopes).double()[:, None, None] * (at - (kv_len - q_len))
            own = torch.arange(kv_len - q_len, kv_len)[:, None]
            reach = window or kv_len + 1  # to both sides if attention is not causal, as in vLLM
            mask = (at < own + (1 if causal else reach)) & (at > own - reach) if seen is None else seen[row]
            logits = logits.masked_fill(~mask, float("-inf"))
            extra = torch.full((len(logits), q_len, 1), float("-inf")).double()
            if sinks is not None:
                extra = sinks.double()[:, None, None].expand_as(extra)
            weights = torch.cat((logits, extra), -1).softmax(-1)[..., :-1]
            outs.append(torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1)))
            begin += q_len
        return torch.cat(outs)


def in_memory_as(layout: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A layer's cache of NaN, with logical shape [blocks, K, block, content], in one of vLLM's memory layouts."""
    blocks, heads, page, content = shape
    order = {
        "LBHNC": lambda nan: nan(blocks, heads, page, content),
        "LBNHC": lambda nan: nan(blocks, page, heads, content).transpose(1, 2),
        "BLHNC": lambda nan: nan(blocks, 3, heads, page, content)[:, 1],
        "BLNHC": lambda nan: nan(blocks, 3, page, heads, content)[:, 1].transpose(1, 2),
        "BHLNC": lambda nan: nan(blocks, heads, 3, page, content)[:, :, 1],
    }
    return order[layout](lambda *sizes: torch.full(sizes, float("nan")).to(dtype))


def implementation(**options: Any) -> Any:
    arguments: dict[str, Any] = {"num_heads": 4, "head_size": 32, "scale": 0.3, "num_kv_heads": 2}
    return ours.RaggedAttentionBackend.get_impl_cls()(**(arguments | options))


PREFILL, DECODE = [(5, 5), (20, 20), (1, 1)], [(1, 40), (1, 16), (1, 17), (1, 1)]
MIXED = [(1, 50), (7, 30), (1, 3), (18, 18)]


@pytest.mark.parametrize("lens", [PREFILL, DECODE, MIXED], ids=["prefill", "decode", "mixed"])
@pytest.mark.parametrize("page", [16, 32, 64])
def test_attention(page, lens, vllm, backend):
    step = Step(lens, page=page)
    assert agrees(step.run(implementation()), step.dense(), "float32")


@pytest.mark.parametrize("layout", ["LBNHC", "BLHNC", "BLNHC", "BHLNC"])
def test_any_order_of_memory_and_no_copy(layout, vllm, backend):
    step = Step(MIXED, layout=layout)
    pages = implementation()._stored(step.layer, step.cache).kv_pages
    assert {pages[0].untyped_storage().data_ptr(), pages[1].untyped_storage().data_ptr()} == {
        step.cache.untyped_storage().data_ptr()
    }
    assert agrees(step.run(implementation()), step.dense(), "float32")


@pytest.mark.parametrize("heads", [(4, 4), (6, 1), (8, 2)])
def test_grouped_heads_in_bfloat16(heads, vllm, backend):
    step = Step(MIXED, heads=heads, dtype=torch.bfloat16)
    out = step.run(implementation(num_heads=heads[0], num_kv_heads=heads[1]))
    assert agrees(out.float(), step.dense(), "bfloat16")


@pytest.mark.parametrize(
    ("options", "features"),
    [
        ({"sliding_window": 9}, {"window": 9}),
        ({"logits_soft_cap": 1.5}, {"cap": 1.5}),
        ({"logits_soft_cap": 0.0}, {}),
        ({"sliding_window": 20, "logits_soft_cap": 2.0, "sinks": True}, {"window": 20, "cap": 2.0, "sinks": True}),
        ({"sinks": True}, {"sinks": True}),
    ],
)
@pytest.mark.parametrize("sink_dtype", [torch.float32, torch.bfloat16])
def test_windows_soft_caps_and_sinks(options, features, sink_dtype, vllm, backend):
    sinks = torch.nn.Parameter(torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=sink_dtype))
    options, features = ({k: sinks if v is True else v for k, v in d.items()} for d in (options, features))
    step = Step(MIXED)
    assert agrees(step.run(implementation(**options)), step.dense(**features).detach(), "float32")


@pytest.mark.parametrize(
    ("options", "features"), [({}, {}), ({"sliding_window": 9, "logits_soft_cap": 1.5}, {"window": 9, "cap": 1.5})]
)
def test_alibi(options, features, vllm, backend):
    slopes = [0.5, 0.25, 0.125, 0.0625]
    step = Step(MIXED)
    out = step.run(implementation(alibi_slopes=slopes, **options))
    assert agrees(out, step.dense(slopes=slopes, **features), "float32")


@pytest.mark.parametrize("scales", [(0.5, 0.25), ([0.5, 0.125], [0.25, 2.0])], ids=["one", "a_head"])
@pytest.mark.parametrize("cache_dtype", ["fp8", "fp8_e5m2"])
def test_8_bit_caches(cache_dtype, scales, vllm, backend):
    step = Step(MIXED, cache_dtype=cache_dtype, scales=scales)
    out = step.run(implementation(kv_cache_dtype=cache_dtype))
    assert agrees(out, step.dense(), "float32")
    written = step.cache.transpose(1, 2).flatten(0, 1)[step.slots[: step.tokens]].float()
    wanted = (step.k[: step.tokens] / step.layer._k_scale.view(-1, 1)).to(step.fp8 or torch.uint8).float()
    assert torch.equal(written[..., : step.size], wanted)


def test_8_bit_caches_of_an_mi300(monkeypatch, backend):
    """On an MI300, 8-bit caches have the dtype that vLLM's platform reports, which is e4m3fnuz."""
    with fakes.installed(monkeypatch, device="gfx942"):
        step = Step(MIXED, cache_dtype="fp8", scales=([0.5, 0.125], [0.25, 2.0]))
        assert step.fp8 == torch.float8_e4m3fnuz
        step.k[0] = -0.0  # must be stored as the code 0: the code of -0 in other formats is NaN in e4m3fnuz
        assert agrees(step.run(implementation(kv_cache_dtype="fp8")), step.dense(), "float32")
        written = step.cache.transpose(1, 2).flatten(0, 1)[step.slots[: step.tokens]].float()
        wanted = (step.k[: step.tokens] / step.layer._k_scale.view(-1, 1)).to(step.fp8).float()
        assert torch.equal(written[..., : step.size], wanted)


def test_nothing_but_the_slots_is_written(vllm, backend):
    step = Step(MIXED)
    step.slots[2] = -1  # vLLM does not store this token
    before = step.cache.clone()
    implementation().do_kv_cache_update(step.layer, step.k, step.v, step.cache, step.slots[: step.tokens])
    rows, old = (cache.transpose(1, 2).flatten(0, 1) for cache in (step.cache, before))
    touched = torch.zeros(len(rows), dtype=torch.bool)
    touched[step.slots[step.slots >= 0]] = True
    assert torch.equal(rows[~touched], old[~touched]) or torch.equal(
        rows[~touched].nan_to_num(9.0), old[~touched].nan_to_num(9.0)
    )
    kept = step.slots[: step.tokens] >= 0
    new = torch.cat((step.k, step.v), -1)[: step.tokens][kept]
    assert torch.equal(rows[step.slots[: step.tokens][kept]], new)


def test_requests_that_only_pad_a_graph(vllm, backend):
    """Requests without queries and keys, with which vLLM pads a batch to its graph's size, change nothing."""
    step = Step(DECODE)
    step.common.query_start_loc = torch.cat((step.common.query_start_loc, torch.tensor([4, 4]).int()))
    step.common.seq_lens = torch.cat((step.common.seq_lens, torch.tensor([0, 0]).int()))
    step.common.block_table_tensor = torch.cat((step.table, torch.full((2, step.table.shape[1]), 9999).int()))
    assert agrees(step.run(implementation()), step.dense(), "float32")


def test_values_of_another_size(vllm, backend):
    """If values have another size than keys, the second part of a cache row is as wide as a value."""
    impl, cache = implementation(head_size=32), torch.randn(2, 2, 16, 32 + 16)
    k_pages, v_pages = impl._stored(None, cache).kv_pages
    assert (k_pages.shape, v_pages.shape) == ((2, 16, 2, 32), (2, 16, 2, 16))


def test_a_profiling_run_gets_zeros_and_flat_outputs_are_taken(vllm, backend):
    step, impl = Step(DECODE), implementation()
    output = torch.full_like(step.q, KEPT)
    assert not impl.forward(step.layer, step.q, step.k, step.v, torch.empty(0), None, output).any()
    wanted = step.run(impl)
    flat = torch.zeros(len(step.q), 4 * 32)
    builder = metadata_builder()
    impl.forward(step.layer, step.q, step.k, step.v, step.cache, builder.build(0, step.common), flat)
    assert torch.equal(flat[: step.tokens].view(wanted.shape), wanted)


def test_other_layers_share_a_step_by_other_tables(vllm):
    step = Step(DECODE)
    builder = metadata_builder()
    assert builder.supports_update_block_table
    first = builder.build(0, step.common)
    table, slots = step.table + 1, step.slots + 1
    second = builder.update_block_table(first, table, slots)
    assert second.page_indices is table
    assert second.slot_mapping is slots
    assert second.kv_lens is first.kv_lens is step.common.seq_lens
    assert first.page_indices is step.table


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attn_type": "prefix"}, "expected attn_type to be decoder or encoder or encoder_only or .*, got 'prefix'"),
        *(
            ({"attn_type": kind, "alibi_slopes": [0.5] * 4}, "expected alibi_slopes to be None for RAGGED")
            for kind in ("encoder", "encoder_only", "encoder_decoder")
        ),
        (
            {"alibi_slopes": [0.5] * 4, "sinks": torch.zeros(4)},
            "expected sinks to be None with alibi_slopes for RAGGED, got both",
        ),
        ({"sinks": torch.zeros(3)}, r"expected sinks of shape \[num_heads=4\], got \[3\]"),
    ],
)
def test_a_layer_that_we_cannot_run_is_refused(options, message, vllm):
    with pytest.raises(Unsupported, match=message):
        implementation(**options)


# Attention that is not causal: drafts, encoders, and cross-attention


@pytest.mark.parametrize("window", [None, 1, 4, 7])
def test_attention_that_is_not_causal(window, vllm, backend):
    """Without causal attention, every new token sees the whole request, or a window to both sides."""
    step = Step([(7, 30), (1, 3), (5, 5)])
    step.common.causal = False
    out = step.run(implementation(sliding_window=window))
    assert agrees(out, step.dense(window=window, causal=False), "float32")


def test_slopes_of_attention_that_is_not_causal_are_refused(vllm):
    step = Step([(7, 30), (1, 3)])
    step.common.causal = False
    with pytest.raises(Unsupported, match="expected causal attention with alibi_slopes for RAGGED, got causal=False"):
        step.run(implementation(alibi_slopes=[0.5] * 4))


def encoder_step(lens: Sequence[int], **options: Any) -> Step:
    """A step of whole sequences; only `Step.dense` uses the keys and values in the cache."""
    step = Step([(n, n) for n in lens], **options)
    at = step.slots[: step.tokens]
    step.cache[at // step.page, :, at % step.page] = torch.cat((step.k, step.v), -1)[: step.tokens]
    step.common.causal = False
    return step


@pytest.mark.parametrize("window", [None, 1, 2, 7, 100])
@pytest.mark.parametrize("options", [{}, {"logits_soft_cap": 1.5, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}])
@pytest.mark.parametrize("attn_type", ["encoder", "encoder_only"])
def test_layers_without_a_cache(attn_type, options, window, vllm, backend):
    """Layers without a cache attend to the keys and values of the call, with or without a window on both sides.

    vLLM passes these layers an empty cache.
    """
    step = encoder_step([5, 0, 20, 1, 0])
    wanted = step.dense(window=window, cap=options.get("logits_soft_cap"), sinks=options.get("sinks"), causal=False)
    step.cache = torch.empty(0)
    impl = implementation(attn_type=attn_type, sliding_window=window, **options)
    assert agrees(step.run(impl), wanted, "float32")


@pytest.mark.parametrize("window", [None, 7])
def test_layers_without_a_cache_in_bfloat16(window, vllm, backend):
    """Layers without a cache ignore the setting of an 8-bit cache."""
    step = encoder_step([33, 20], dtype=torch.bfloat16)
    impl = implementation(attn_type="encoder_only", sliding_window=window, kv_cache_dtype="fp8")
    assert agrees(step.run(impl).float(), step.dense(window=window, causal=False), "bfloat16")


@pytest.mark.parametrize("window", [None, 4])
def test_a_step_of_an_encoder_without_tokens(window, vllm, backend):
    step = Step([(0, 0)], padding=2)
    out = step.run(implementation(attn_type="encoder_only", sliding_window=window))
    assert out.shape == (0, 4, 32)


@pytest.mark.parametrize("first", [True, False], ids=["first_step", "later_step"])
def test_cross_attention(first, vllm, backend):
    """Cross-attention works: a decoder's queries attend to an encoder's keys, which are passed once per request.

    As in vLLM's builder for such layers, lengths are the encoder's, and there are slots only for new requests.
    """
    q_lens, encoder_lens = [3, 1, 4], [20, 33, 7]
    step = Step([(n, n) for n in encoder_lens], padding=0)
    fresh = [0, 2] if first else []
    edges = torch.tensor([0, *encoder_lens]).cumsum(0).tolist()
    rows = torch.cat((step.k, step.v), -1)
    for request in range(3):
        slots = step.slots[edges[request] : edges[request + 1]]
        if request not in fresh:
            step.cache[slots // step.page, :, slots % step.page] = rows[edges[request] : edges[request + 1]]
    owned = torch.cat([torch.arange(edges[r], edges[r + 1]) for r in fresh]) if fresh else torch.arange(0)
    queries = torch.randn(sum(q_lens), 4, 32)
    common = dataclasses.replace(step.common, causal=False, num_actual_tokens=len(queries), max_query_len=4)
    common.query_start_loc = torch.tensor([0, 3, 4, 8], dtype=torch.int32)
    common.query_start_loc_cpu = common.query_start_loc
    metadata = metadata_builder().build(0, common)
    metadata.slot_mapping = step.slots[owned]
    impl, output = implementation(attn_type="encoder_decoder"), torch.full_like(queries, KEPT)
    key, value = (step.k[owned], step.v[owned]) if first else (None, None)
    if first:
        impl.do_kv_cache_update(step.layer, key, value, step.cache, metadata.slot_mapping)
    impl.forward(step.layer, queries, key, value, step.cache, metadata, output)
    for request, (begin, end) in enumerate(((0, 3), (3, 4), (4, 8))):
        own = slice(edges[request], edges[request + 1])
        k, v = (x[own].repeat_interleave(2, 1) for x in (step.k, step.v))
        want, _ = attend(queries[begin:end], k, v, 0.3)
        assert agrees(output[begin:end], want, "float32")


@pytest.mark.parametrize("name", ["output_scale", "output_block_scale"])
def test_quantised_outputs_are_refused(name, vllm):
    step = Step(DECODE)
    with pytest.raises(Unsupported, match="expected output_scale and output_block_scale to be None"):
        implementation().forward(step.layer, step.q, step.k, step.v, step.cache, None, step.q, **{name: torch.ones(1)})


# Latent attention


class Latents:
    """Requests of the given lengths with latents in a cache [blocks, block, L + R], which is NaN elsewhere."""

    def __init__(self, lens: Sequence[int], *, rank: int = 64, rope: int = 16, page: int = 16) -> None:
        torch.manual_seed(3)
        self.lens, self.rank, self.rope, self.page = lens, rank, rope, page
        pages = [-(-length // page) for length in lens]
        order = torch.randperm(sum(pages) + 1).tolist()
        self.table = torch.zeros(len(lens), max(pages) + 1, dtype=torch.int32)
        for row, count in enumerate(pages):
            self.table[row, :count] = torch.tensor([order.pop() for _ in range(count)])
        self.cache = torch.full((sum(pages) + 1, 2, page, rank + rope), float("nan"))[
            :, 1
        ]  # there are gaps between blocks
        self.rows = [torch.randn(length, rank + rope) for length in lens]
        self.kv_lens = torch.tensor(lens, dtype=torch.int32)

    def slots(self, row: int, positions: torch.Tensor) -> torch.Tensor:
        return self.table[row, positions // self.page].long() * self.page + positions % self.page

    def write(self, impl: Any, cache: torch.Tensor, kv_cache_dtype: str = "auto", scale: float = 1.0) -> None:
        """Write all latents with the implementation's method; padding and a slot of -1 follow."""
        slots = torch.cat([self.slots(row, torch.arange(length)) for row, length in enumerate(self.lens)])
        rows = torch.cat([*self.rows, torch.randn(2, self.rank + self.rope)])
        slots = torch.cat((slots, torch.tensor([-1])))
        kv_c, k_pe = rows.split([self.rank, self.rope], -1)
        impl.do_kv_cache_update(kv_c, k_pe.unsqueeze(1), cache, slots, kv_cache_dtype, torch.tensor(scale), False)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, seen: Any = None) -> tuple[Any, Any]:
    """Out and natural lse of dense float64 attention from [tokens, H, D] to [keys, H, ...] or [keys, ...]."""
    k, v = (x.double() if x.dim() == 3 else x.double()[:, None].expand(-1, q.shape[1], -1) for x in (k, v))
    logits = scale * torch.einsum("qhd,khd->qhk", q.double(), k)
    if seen is not None:
        logits = logits.masked_fill(~seen[:, None], float("-inf"))
    lse = logits.logsumexp(-1)
    weights = torch.exp(logits - lse[..., None]).nan_to_num(0.0)
    return torch.einsum("qhk,khd->qhd", weights, v), lse


NOPE, V_SIZE = 32, 24


def latent_implementation(kind: str, rank: int, rope: int, heads: int = 2, **options: Any) -> Any:
    weight = torch.randn(heads * (NOPE + V_SIZE), rank, generator=torch.Generator().manual_seed(5)) / rank**0.5
    arguments: dict[str, Any] = {
        "num_heads": heads, "head_size": rank + rope, "scale": 0.2, "num_kv_heads": 1, "alibi_slopes": None,
        "sliding_window": None, "kv_cache_dtype": "auto", "logits_soft_cap": None, "attn_type": "decoder",
        "kv_sharing_target_layer_name": None, "q_lora_rank": None, "kv_lora_rank": rank, "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": rope, "qk_head_dim": NOPE + rope, "v_head_dim": V_SIZE,
        "kv_b_proj": lambda x: (x @ weight.T, None),
    }  # fmt: skip
    return getattr(ours, f"Ragged{kind}Backend").get_impl_cls()(**(arguments | options))


def decode_of(data: Latents, q_lens: Sequence[int], longest: int | None = None, **changes: Any) -> SimpleNamespace:
    """The metadata of requests whose last `q_lens` tokens are the queries; `longest` bounds these numbers."""
    edges = torch.tensor([0, *q_lens]).cumsum(0).int()
    decode = SimpleNamespace(block_table=data.table, seq_lens=data.kv_lens)
    metadata = {"decode": decode, "causal": True, "query_start_loc": edges, "max_query_len": longest or max(q_lens)}
    return SimpleNamespace(**metadata | changes)


def expect_decoded(data: Latents, q: torch.Tensor, q_lens: Sequence[int], got: Any, dtype: str = "float32") -> None:
    """Assert that the result for all queries agrees with dense attention; rows after the last query are padding."""
    out, lse = got
    rank, token = data.rank, 0
    assert (out.shape, lse.shape, lse.dtype) == ((*q.shape[:2], rank), q.shape[:2], torch.float32)
    for rows, length, queries in zip(data.rows, data.lens, q_lens, strict=True):
        own, token = slice(token, token + queries), token + queries
        seen = torch.arange(length) <= torch.arange(length - queries, length)[:, None]
        want, want_lse = attend(q[own], rows, rows[:, :rank], 0.2, seen)
        assert agrees(out[own], want, dtype)
        assert agrees(lse[own], want_lse, f"lse {dtype}")
    assert not out[token:].any()


MIXES = {"decode": (1, 1, 1), "drafts": (3, 3, 3), "mixed": (1, 7, 2), "prompt": (1, 16, 0)}


@pytest.mark.parametrize("q_lens", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("parts", [False, True])
def test_mla_short_requests(parts, q_lens, vllm, backend):
    """One call takes any mix of short requests.

    Padding rows follow. The bound on query lengths is that of the whole batch, which also has a longer request.
    """
    data = Latents([40, 16, 5])
    impl = latent_implementation("MLA", 64, 16)
    data.write(impl, data.cache)
    q = torch.randn(sum(q_lens) + 2, 2, 80)
    metadata = decode_of(data, q_lens, longest=300, num_prefills=1)
    metadata.query_start_loc = torch.cat((metadata.query_start_loc, torch.tensor([300 + sum(q_lens)]).int()))
    given = tuple(q.split([64, 16], -1)) if parts else q
    expect_decoded(data, q, q_lens, impl.forward_mqa(given, data.cache, metadata, SimpleNamespace()))


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e4m3"])
def test_mla_over_a_cache_of_eight_bits(kv_cache_dtype, vllm, backend):
    """An 8-bit cache is written and read with the layer's scale; unwritten bytes are 0x7f, which is NaN."""
    data = Latents([40, 16, 5])
    impl = latent_implementation("MLA", 64, 16, kv_cache_dtype=kv_cache_dtype)
    cache = torch.full(data.cache.shape, 127, dtype=torch.uint8)
    data.write(impl, cache, kv_cache_dtype, scale=0.02)
    codes = [(rows / 0.02).to(torch.float8_e4m3fn) for rows in data.rows]
    for row, length in enumerate(data.lens):
        slots = data.slots(row, torch.arange(length))
        assert torch.equal(cache[slots // data.page, slots % data.page], codes[row].view(torch.uint8))
    data.rows = [code.float() * 0.02 for code in codes]
    q = torch.randn(10, 2, 80)
    layer = SimpleNamespace(_k_scale=torch.tensor(0.02))
    out = impl.forward_mqa(q, cache.view(torch.float8_e4m3fn), decode_of(data, (1, 7, 2)), layer)
    expect_decoded(data, q, (1, 7, 2), out)


def test_mla_over_an_8_bit_cache_of_an_mi300(monkeypatch, backend):
    with fakes.installed(monkeypatch, device="gfx942"):
        data, impl = Latents([40, 16, 5]), latent_implementation("MLA", 64, 16, kv_cache_dtype="fp8")
        cache = torch.full(data.cache.shape, 0x80, dtype=torch.uint8)  # 0x80 is NaN in e4m3fnuz
        data.write(impl, cache, "fp8", scale=0.02)
        data.rows = [(rows / 0.02).to(torch.float8_e4m3fnuz).float() * 0.02 for rows in data.rows]
        q, layer = torch.randn(10, 2, 80), SimpleNamespace(_k_scale=torch.tensor(0.02))
        expect_decoded(data, q, (1, 7, 2), impl.forward_mqa(q, cache, decode_of(data, (1, 7, 2)), layer))


def test_mla_decode_over_ranks(vllm, backend):
    """If two ranks hold alternate positions, their results merged by lse are those of one rank.

    One of the ranks holds no position of the second request.
    """
    whole, q = Latents([40, 1]), torch.randn(2, 2, 80)
    impl = latent_implementation("MLA", 64, 16)
    parts = []
    for rank in range(2):
        share = Latents([40, 40])
        share.rows = [rows[rank::2] for rows in whole.rows]
        share.lens = [len(rows) for rows in share.rows]
        share.write(impl, share.cache)
        lens = torch.tensor(share.lens, dtype=torch.int32)
        metadata = decode_of(share, (1, 1))
        metadata.decode.seq_lens = lens
        parts.append(impl.forward_mqa(q, share.cache, metadata, SimpleNamespace()))
    assert impl.can_return_lse_for_decode
    assert impl.lse_base_on_e
    outs, lses = (torch.stack([part[i] for part in parts]).double() for i in range(2))
    lse = lses.logsumexp(0)
    out = (outs * torch.exp(lses - lse)[..., None]).sum(0)
    for row in range(2):
        want, want_lse = attend(q[row : row + 1], whole.rows[row], whole.rows[row][:, :64], 0.2)
        assert agrees(out[row : row + 1], want, "float32")
        assert agrees(lse[row : row + 1], want_lse, "lse float32")


def chunk_of(first: int, edges: Sequence[int], pieces: Sequence[tuple[int, int]]) -> SimpleNamespace:
    """A chunk of cached context as vLLM plans it. `pieces` has each request's (start, length), from `first` on."""
    last = first + len(pieces)
    lens = torch.tensor([length for _, length in pieces])
    return SimpleNamespace(
        request_slice=slice(first, last),
        token_slice=slice(edges[first], edges[last]),
        query_start_loc=torch.tensor([edge - edges[first] for edge in edges[first : last + 1]], dtype=torch.int32),
        cu_seq_lens=torch.cat((torch.zeros(1), lens.cumsum(0))).int(),
        starts=torch.tensor([start for start, _ in pieces], dtype=torch.int32),
        token_to_seq=torch.arange(len(pieces)).repeat_interleave(lens).int(),
    )


def prefill_of(data: Latents, edges: Sequence[int], chunks: Sequence[Any]) -> SimpleNamespace:
    context = SimpleNamespace(chunks=chunks) if chunks else None
    starts = torch.tensor(edges, dtype=torch.int32)
    return SimpleNamespace(
        prefill=SimpleNamespace(block_table=data.table, query_start_loc=starts, chunked_context=context)
    )


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "fp8_ds_mla"])
@pytest.mark.parametrize("earlier", [(0, 0, 0), (5, 0, 33)], ids=["whole", "later_chunks"])
def test_mla_prefill(earlier, kv_cache_dtype, vllm, backend):
    """Prefill of new tokens after cached context works, also if a long context comes in two chunks."""
    rank, rope = (512, 64) if kv_cache_dtype == "fp8_ds_mla" else (64, 16)
    new = [4, 7, 6]
    data = Latents([n + before for n, before in zip(new, earlier, strict=True)], rank=rank, rope=rope)
    impl = latent_implementation("MLA", rank, rope, kv_cache_dtype=kv_cache_dtype)
    cache = data.cache
    if kv_cache_dtype == "fp8_ds_mla":
        cache = torch.full((*data.cache.shape[:2], 656), 255, dtype=torch.uint8)
    if kv_cache_dtype == "fp8":
        cache = torch.full(data.cache.shape, 127, dtype=torch.uint8)
    data.write(impl, cache, kv_cache_dtype, scale=0.02)
    edges = [0, 4, 11, 17]
    chunks = [chunk_of(0, edges, [(0, 5), (0, 0), (0, 16)]), chunk_of(2, edges, [(16, 17)])] if any(earlier) else []
    q = torch.randn(17, 2, NOPE + rope)
    kv_c, k_pe = torch.cat([r[-n:] for r, n in zip(data.rows, new, strict=True)]).split([rank, rope], -1)
    output = torch.zeros(17, 2 * V_SIZE)
    metadata = prefill_of(data, edges, chunks)
    impl.forward_mha(q, kv_c, k_pe[:, None], cache, metadata, torch.tensor(0.02), output)
    for row, (n, before) in enumerate(zip(new, earlier, strict=True)):
        latents = data.rows[row].clone()
        if kv_cache_dtype == "fp8_ds_mla":
            slots = data.slots(row, torch.arange(before))
            held = cache.view(1, -1, 1, 656)[:, slots] if before else cache.view(1, -1, 1, 656)[:, :0]
            latents[:before] = dequantised(held)
        if kv_cache_dtype == "fp8":
            latents[:before] = (latents[:before] / 0.02).to(torch.float8_e4m3fn).float() * 0.02
        projected = impl.kv_b_proj(latents[:, :rank])[0].view(-1, 2, NOPE + V_SIZE)
        k = torch.cat((projected[..., :NOPE], latents[:, None, rank:].expand(-1, 2, -1)), -1)
        seen = torch.arange(n + before) <= torch.arange(before, n + before)[:, None]
        want, _ = attend(q[edges[row] : edges[row + 1]], k, projected[..., NOPE:], 0.2, seen)
        assert agrees(output[edges[row] : edges[row + 1]].view(n, 2, V_SIZE), want, "float32")


def dequantised(held: torch.Tensor) -> torch.Tensor:
    """Rows of 656 bytes as float32: the format has 512 e4m3 codes, 4 float32 scales and 64 bfloat16 numbers."""
    rows = held.reshape(-1, 656).contiguous()
    values = rows[:, :512].contiguous().view(torch.float8_e4m3fn).float().view(-1, 4, 128)
    scales = rows[:, 512:528].contiguous().view(torch.float32)
    return torch.cat(((values * scales[..., None]).flatten(1), rows[:, 528:].contiguous().view(torch.bfloat16)), 1)


def test_mla_context_on_several_ranks_is_vllms(vllm):
    data, edges = Latents([9]), [0, 4]
    impl = latent_implementation("MLA", 64, 16)
    impl.dcp_world_size = 2
    output = torch.zeros(4, 2 * V_SIZE)
    metadata = prefill_of(data, edges, [chunk_of(0, edges, [(0, 5)])])
    rows = torch.randn(4, 2, NOPE + 16), torch.randn(4, 64), torch.randn(4, 1, 16)
    impl.forward_mha(*rows, data.cache, metadata, torch.tensor(1.0), output)
    assert (output == 7).all()


@pytest.mark.parametrize("kind", ["MLA", "SparseMLA"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sliding_window": 8}, "expected sliding_window to be None for RAGGED_.*MLA, got 8"),
        ({"alibi_slopes": [1.0]}, "expected alibi_slopes to be None"),
        ({"logits_soft_cap": 3.0}, "expected logits_soft_cap to be None for RAGGED_.*MLA, got 3.0"),
        ({"attn_type": "encoder"}, "expected attn_type to be decoder for RAGGED_.*MLA, got 'encoder'"),
        (
            {"kv_cache_dtype": "fp8_e5m2"},
            "expected kv_cache_dtype to be one of auto, float16, bfloat16, fp8_ds_mla,.* got 'fp8_e5m2'",
        ),
    ],
)
def test_a_latent_layer_that_we_cannot_run_is_refused(options, message, kind, vllm):
    with pytest.raises(Unsupported, match=message):
        latent_implementation(kind, 64, 16, **options)


def test_a_latent_step_that_we_cannot_run_is_refused(vllm):
    data, q = Latents([20, 20]), torch.randn(4, 2, 80)
    impl = latent_implementation("MLA", 64, 16)
    impl.dcp_world_size = 2
    with pytest.raises(Unsupported, match="expected one decode query per request under context parallelism"):
        impl.forward_mqa(q, data.cache, decode_of(data, (2, 2)), None)
    with pytest.raises(Unsupported, match="expected output_scale to be None, got a quantised output"):
        impl.forward_mha(q, q, q, data.cache, None, None, q, output_scale=torch.ones(1))


def test_a_profiling_run_writes_no_latents(vllm, monkeypatch):
    impl, written = latent_implementation("MLA", 64, 16), []
    home = inspect.getmodule(impl.do_kv_cache_update)
    monkeypatch.setattr(home, "write_mla_cache", lambda rows, *_, **__: written.append(rows))
    latents, slots = (torch.ones(2, 64), torch.ones(2, 1, 16)), torch.tensor([0, 1])
    impl.do_kv_cache_update(*latents, torch.tensor([]), slots, "auto", None)
    assert not written
    impl.do_kv_cache_update(*latents, torch.zeros(1, 16, 80), slots, "auto", None)
    assert [rows.shape for rows in written] == [(2, 80)]


# Sparse latent attention


def sparse_step(data: Latents, q_lens: Sequence[int], padding: int = 0) -> Any:
    """The metadata from our builder; the sequences' last `q_lens` tokens are the queries."""
    builder_cls = ours.RaggedSparseMLABackend.get_builder_cls()
    builder = builder_cls(None, ["layer"], vllm_config(), torch.device("cpu"))
    edges = torch.tensor([0, *q_lens]).cumsum(0, dtype=torch.int32)
    common = fakes.CommonAttentionMetadata(
        query_start_loc=edges, query_start_loc_cpu=edges, seq_lens=data.kv_lens, num_reqs=len(q_lens),
        num_actual_tokens=sum(q_lens) + padding, max_query_len=max(q_lens), max_seq_len=max(data.lens),
        block_table_tensor=data.table, slot_mapping=torch.zeros(0, dtype=torch.int64),
    )  # fmt: skip
    return builder.build(0, common)


def test_tokens_know_their_requests(vllm):
    metadata = sparse_step(Latents([20, 9, 30]), [1, 0, 4], padding=3)
    assert metadata.request_of_token.tolist() == [0, 2, 2, 2, 2, 2, 2, 2]
    assert (metadata.num_decodes, metadata.num_decode_tokens, metadata.num_prefills) == (3, 8, 0)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_ds_mla"])
@pytest.mark.parametrize("q_lens", [(1, 1, 1), (1, 6, 2)], ids=["decode", "mixed"])
def test_sparse_mla(q_lens, kv_cache_dtype, vllm, backend):
    data = Latents([40, 16, 23], rank=512, rope=64)
    tokens = sum(q_lens)
    buffer = torch.full((tokens + 4, 8), -1, dtype=torch.int32)
    owner, token = [row for row, n in enumerate(q_lens) for _ in range(n)], 0
    for row, n in enumerate(q_lens):
        for i in range(n):
            seen = data.lens[row] - n + i + 1
            chosen = torch.randperm(seen)[: min(seen, 5)].int()
            buffer[token, torch.randperm(8)[: len(chosen)]] = chosen  # lists may contain -1 anywhere
            token += 1
    buffer[0] = -1  # the first query selects nothing
    impl = latent_implementation(
        "SparseMLA", 512, 64, kv_cache_dtype=kv_cache_dtype, indexer=SimpleNamespace(topk_indices_buffer=buffer)
    )
    cache = data.cache
    if kv_cache_dtype == "fp8_ds_mla":
        cache = torch.full((len(data.cache), 2, data.page, 656), 255, dtype=torch.uint8)[:, 1]
    data.write(impl, cache, kv_cache_dtype)
    q = torch.randn(tokens, 2, 576)
    impl.record_logical_topk_ready()  # vLLM's layer calls this between the indexer and attention
    out, lse = impl.forward_mqa(q.split([512, 64], -1), cache, sparse_step(data, q_lens), SimpleNamespace())
    assert (out.shape, lse.shape) == ((tokens, 2, 512), (tokens, 2))
    for t in range(tokens):
        chosen = buffer[t][buffer[t] >= 0].long()
        rows = data.rows[owner[t]][chosen]
        if kv_cache_dtype == "fp8_ds_mla":
            slots = data.slots(owner[t], chosen)
            rows = dequantised(cache[slots // data.page, slots % data.page])
        want, want_lse = attend(q[t : t + 1], rows, rows[:, :512], 0.2)
        assert agrees(out[t : t + 1], want, "float32")
        assert agrees(lse[t : t + 1], want_lse, "lse float32")


def test_positions_become_slots(vllm, monkeypatch):
    """Positions become slots, and positions outside the table become -1.

    If the concatenated page tables had indices beyond int32, each token gets a copy of its table instead.
    """
    _ = ours.RaggedSparseMLABackend
    sparse: Any = importlib.import_module("ragged_attention.integrations._vllm_sparse")
    table = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32)
    positions = torch.tensor([[0, 31, 32, -1], [17, 2**31 - 1, 5, -7]], dtype=torch.int32)
    request = torch.tensor([1, 0], dtype=torch.int32)
    wanted = [[32, 15, -1, -1], [17, -1, 53, -1]]
    slots = functools.partial(sparse.slots_of_tokens, positions, request, table, 16)
    assert slots().tolist() == wanted
    monkeypatch.setattr(sparse, "_INT32_MAX", 63)
    assert slots().tolist() == wanted


# The fused steps before attention


def rotated_by_hand(x: torch.Tensor, angles: torch.Tensor, is_neox: bool) -> torch.Tensor:
    """Rows with their first columns rotated as complex numbers, in float64."""
    half = angles.shape[-1]
    columns = x[..., : 2 * half].double()
    pairs = columns.unflatten(-1, (2, half)).mT if is_neox else columns.unflatten(-1, (half, 2))
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)[:, None]
    turned = torch.view_as_real(turned)
    turned = turned.mT.flatten(-2) if is_neox else turned.flatten(-2)
    return torch.cat([turned, x[..., 2 * half :].double()], -1)


@pytest.mark.parametrize("is_neox", [True, False])
def test_the_fused_rope_rotates_queries_in_place_and_writes_rotated_keys(is_neox, vllm, backend):
    step, impl = Step(MIXED), implementation()
    assert impl.fused_rope_kvcache_supported() is True
    positions = torch.randint(0, 64, (len(step.q),))
    table = torch.rand(64, 12, dtype=torch.float64) * 6
    cos_sin = torch.cat([table.cos(), table.sin()], -1).float()
    wanted_q, wanted_k = (rotated_by_hand(x, table[positions], is_neox) for x in (step.q, step.k))
    query, slots = step.q.clone().flatten(1), step.slots[: step.tokens]
    impl.do_rope_and_kv_cache_update(
        step.layer, query, step.k.flatten(1), step.v.flatten(1), positions, cos_sin, is_neox, step.handed(), slots
    )
    assert agrees(query[: step.tokens].view_as(step.q[: step.tokens]), wanted_q[: step.tokens], "float32")
    assert torch.equal(
        query[step.tokens :], step.q[step.tokens :].flatten(1)
    )  # rows of padding have no slots and do not change
    written = step.cache[slots // step.page, :, slots % step.page]
    assert agrees(written[..., : step.size], wanted_k[: step.tokens], "float32")
    assert torch.equal(written[..., step.size :], step.v[: step.tokens])


@pytest.mark.parametrize("kind", ["encoder", "encoder_only", "encoder_decoder"])
def test_only_decoders_have_fused_steps(kind, vllm):
    impl = implementation(attn_type=kind)
    assert impl.fused_rope_kvcache_supported() is impl.fused_qk_norm_rope_kvcache_supported() is False


def test_the_fused_norm_and_rope_fill_the_queries(vllm, backend):
    step, impl = Step(PREFILL, cache_dtype="fp8", scales=(0.5, 0.25)), implementation(kv_cache_dtype="fp8")
    assert impl.fused_qk_norm_rope_kvcache_supported() is True
    positions, table = torch.arange(len(step.q)), torch.rand(64, 16, dtype=torch.float64) * 6
    cos_sin = torch.cat([table.cos(), table.sin()], -1).float()
    weights = [torch.rand(step.size) + 0.5 for _ in range(2)]
    normed = [
        torch.nn.functional.rms_norm(x, (step.size,), w, 1e-5) for x, w in zip((step.q, step.k), weights, strict=True)
    ]
    wanted_q, wanted_k = (rotated_by_hand(x, table[positions], True) for x in normed)
    qkv = torch.cat([step.q.flatten(1), step.k.flatten(1), step.v.flatten(1)], -1)
    q_out, k_out = torch.full_like(step.q.flatten(1), KEPT), torch.full_like(step.k.flatten(1), KEPT)
    impl.do_qk_norm_rope_kvcache_update(
        step.layer, qkv, q_out, k_out, positions, *weights, 1e-5, cos_sin, True, step.handed(), step.slots
    )
    assert agrees(q_out.view_as(step.q), wanted_q, "float32")
    assert not k_out.any()
    slots = step.slots[: step.tokens]
    written = step.cache[slots // step.page, :, slots % step.page].float()
    assert torch.allclose(written[..., : step.size] * 0.5, wanted_k[: step.tokens].float(), rtol=0.07, atol=0.002)
