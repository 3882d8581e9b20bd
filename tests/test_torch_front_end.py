"""The torch front end through torch's own machinery: operators, fake tensors, compilation, gradients, plans."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import ragged_attention as ra
import ragged_attention.torch as rt
from ragged_attention.key_ranges import causal_ranges
from ragged_attention.torch import _plan
from tests.operators import operator_arguments

NUM_PAGES, PAGE_SIZE, NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 12, 4, 4, 2, 16


def batch(dtype: torch.dtype = torch.float32, cache: torch.dtype | None = None) -> dict[str, Any]:
    """Arguments of an attention call: a prefill, a decode and one padding row."""
    random = torch.Generator().manual_seed(0)
    pages = torch.randn(NUM_PAGES, PAGE_SIZE, 2 * NUM_KV_HEADS, HEAD_DIM, generator=random)
    return {
        "q": torch.randn(6, NUM_Q_HEADS, HEAD_DIM, generator=random).to(dtype),
        "kv_pages": pages.to(cache or dtype),
        "kv_lens": torch.tensor([4, 9], dtype=torch.int32),
        "page_indices": torch.randperm(NUM_PAGES, generator=random)[:6].reshape(2, 3).int(),
        "cu_q_lens": torch.tensor([0, 4, 5], dtype=torch.int32),
    }


@pytest.mark.parametrize("cache", [None, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("return_lse", [False, True])
def test_attention_passes_opcheck(cache: torch.dtype | None, return_lse: bool) -> None:
    requests = {"return_lse": return_lse, "return_max_logits": return_lse}
    given = {**requests, "sinks": torch.randn(NUM_Q_HEADS), "k_scale": 0.5, "v_scale": 2.0}
    arguments = operator_arguments("ragged_paged_attention", **batch(cache=cache), **given)
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if cache == torch.float8_e4m3fn:
        checks.remove("test_schema")  # this check needs arithmetic on its inputs, which torch lacks for this dtype
    torch.library.opcheck(torch.ops.ragged_attention.ragged_paged_attention.default, arguments, test_utils=checks)


@pytest.mark.parametrize("by_slot", [False, True])
@pytest.mark.parametrize("pair", [False, True])
def test_write_passes_opcheck(by_slot: bool, pair: bool) -> None:
    inputs = batch()
    k = torch.randn(6, NUM_KV_HEADS, HEAD_DIM)
    tables = tuple(inputs[name] for name in ("page_indices", "kv_lens", "cu_q_lens"))
    pages = inputs["kv_pages"]
    if pair:
        pages = (pages[:, :, 0::2].contiguous(), pages[:, :, 1::2].contiguous())
    slots = torch.arange(6, dtype=torch.int32) if by_slot else tables
    arguments = operator_arguments("write_kv_pages", k=k, v=k, kv_pages=pages, slot_mapping=slots)
    torch.library.opcheck(torch.ops.ragged_attention.write_kv_pages.default, arguments)


def test_merge_passes_opcheck() -> None:
    arguments = (torch.randn(3, 5, 2, 16), torch.randn(3, 5, 2), torch.randn(2), "bfloat16", "eager", None)
    torch.library.opcheck(torch.ops.ragged_attention.merge_attention_states.default, arguments)


def engine_step(q: Any, k: Any, kv_pages: Any, kv_lens: Any, page_indices: Any, cu_q_lens: Any, num_seqs: Any) -> Any:
    rt.write_kv_pages(k, k, kv_pages, (page_indices, kv_lens, cu_q_lens), num_seqs=num_seqs, k_scale=0.5)
    out, lse = rt.ragged_paged_attention(
        q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs, sliding_window=7, soft_cap=3.0, k_scale=0.5,
        return_lse=True, backend="eager", options={},
    )  # fmt: skip
    return rt.merge_attention_states([out, out * 2], [lse, lse + 1])


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("num_seqs", [None, 2, torch.tensor([2], dtype=torch.int32)], ids=["none", "int", "array"])
def test_a_whole_step_compiles_into_one_graph(compiler: str, num_seqs: Any) -> None:
    inputs = batch()
    k = torch.randn(6, NUM_KV_HEADS, HEAD_DIM)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own internals
        compiled = torch.compile(engine_step, fullgraph=True, backend=compiler)
        plain_pages, compiled_pages = inputs["kv_pages"].clone(), inputs["kv_pages"].clone()
        tables = (inputs["kv_lens"], inputs["page_indices"], inputs["cu_q_lens"], num_seqs)
        want = engine_step(inputs["q"], k, plain_pages, *tables)
        got = compiled(inputs["q"], k, compiled_pages, *tables)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    assert torch.equal(compiled_pages, plain_pages)


def attention(**arguments: Any) -> Any:
    return rt.ragged_paged_attention(**arguments)


def test_compiled_code_follows_changing_lengths() -> None:
    inputs = batch()
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for kv_lens in ([4, 9], [8, 2], [0, 12]):
        inputs["kv_lens"] = torch.tensor(kv_lens, dtype=torch.int32)
        torch.testing.assert_close(compiled(**inputs), rt.ragged_paged_attention(**inputs))


@pytest.mark.parametrize("scale", [0.5, torch.tensor(0.5), torch.linspace(0.25, 2, NUM_Q_HEADS)])
@pytest.mark.parametrize("dynamic", [None, True])
def test_e4m3_queries_are_widened_in_compiled_code_too(scale: Any, dynamic: bool | None) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    inputs: dict[str, Any] = batch() | {"backend": "eager"}
    inputs["kv_pages"], inputs["q"] = inputs["kv_pages"].bfloat16(), inputs["q"].to(torch.float8_e4m3fn)
    factor = scale.reshape(-1, 1) if isinstance(scale, torch.Tensor) else scale
    wide: dict[str, Any] = inputs | {"q": (inputs["q"].float() * factor).bfloat16()}
    found = rt.ragged_paged_attention(**inputs, q_scale=scale)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, rt.ragged_paged_attention(**wide))
    torch.testing.assert_close(compiled(**inputs, q_scale=scale), found)
    with pytest.raises(
        ra.InvalidInput, match=rf"float array of shape \[\] or \[num_q_heads={NUM_Q_HEADS}\], got float32"
    ):
        rt.ragged_paged_attention(**inputs, q_scale=torch.ones(NUM_Q_HEADS + 1))
    with pytest.raises(ra.InvalidInput, match="expected sm_scale within the range of float32, got a larger one"):
        rt.ragged_paged_attention(**inputs, sm_scale=1e30, q_scale=1e30)


def test_dynamic_token_counts_compile() -> None:
    torch._dynamo.reset()
    compiled: Any = torch.compile(attention, fullgraph=True, backend="aot_eager", dynamic=True)
    for extra in (0, 3, 7):
        inputs = batch()
        inputs["q"] = torch.cat([inputs["q"], torch.randn(extra, NUM_Q_HEADS, HEAD_DIM)])
        torch.testing.assert_close(compiled(**inputs), rt.ragged_paged_attention(**inputs))


def test_ranges_of_keys_compile_and_may_change() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    inputs = batch()
    for window in (None, 2, 100):
        ranges = causal_ranges(inputs["cu_q_lens"], inputs["kv_lens"], len(inputs["q"]), sliding_window=window)
        found = compiled(**inputs, key_ranges=ranges, backend="eager")
        torch.testing.assert_close(found, rt.ragged_paged_attention(**inputs, sliding_window=window))
    with FakeTensorMode() as mode:
        fake: dict[str, Any] = {name: mode.from_tensor(value) for name, value in batch().items()}
        assert rt.ragged_paged_attention(**fake, key_ranges=mode.from_tensor(ranges)).shape == fake["q"].shape
        with pytest.raises(ra.InvalidInput, match="expected sliding_window at its default, None, with key_ranges"):
            rt.ragged_paged_attention(**fake, key_ranges=mode.from_tensor(ranges), sliding_window=3)


def test_lists_of_blocks_compile_and_may_change() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    inputs = batch()
    for heads in (1, 2):
        lists = torch.randint(-1, 9, (len(inputs["q"]), heads, 3), dtype=torch.int32)
        found = compiled(**inputs, selected=lists, block_size=2, backend="eager")
        want = rt.ragged_paged_attention(**inputs, selected=lists, block_size=2, backend="reference")
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
    with FakeTensorMode() as mode:
        fake: dict[str, Any] = {name: mode.from_tensor(value) for name, value in batch().items()}
        assert (
            rt.ragged_paged_attention(**fake, selected=mode.from_tensor(lists), block_size=2).shape == fake["q"].shape
        )
        with pytest.raises(ra.InvalidInput, match="expected block_size to be a power of two from 1 to 256, got 5"):
            rt.ragged_paged_attention(**fake, selected=mode.from_tensor(lists), block_size=5)


def test_fake_tensors_get_shapes_and_static_checks() -> None:
    with FakeTensorMode() as mode:
        inputs: dict[str, Any] = {name: mode.from_tensor(value) for name, value in batch(torch.bfloat16).items()}
        out, lse = rt.ragged_paged_attention(**inputs, return_lse=True)
        assert (out.shape, out.dtype, lse.shape, lse.dtype) == (
            inputs["q"].shape,
            torch.bfloat16,
            (6, 4),
            torch.float32,
        )
        with pytest.raises(ra.InvalidInput, match=r"expected cu_q_lens\.shape to be"):
            rt.ragged_paged_attention(**(inputs | {"cu_q_lens": inputs["cu_q_lens"][:-1]}))


def test_there_is_no_gradient() -> None:
    inputs = batch()
    inputs["q"].requires_grad_()
    out: Any = rt.ragged_paged_attention(**inputs)
    with pytest.raises(RuntimeError, match="ragged_paged_attention has no gradient"):
        out.sum().backward()


def test_tensors_on_different_devices_are_refused() -> None:
    inputs = batch()
    inputs["kv_lens"] = inputs["kv_lens"].to("meta")
    with pytest.raises(ra.InvalidInput, match="expected kv_lens on the device of the others, cpu, got meta"):
        rt.ragged_paged_attention(**inputs)


def test_numpy_arrays_are_refused_by_name() -> None:
    inputs = batch()
    inputs["cu_q_lens"] = inputs["cu_q_lens"].numpy()
    with pytest.raises(TypeError, match=r"expected cu_q_lens to be a torch.Tensor, got ndarray"):
        rt.ragged_paged_attention(**inputs)


def test_pages_with_a_strided_last_dimension_are_refused() -> None:
    inputs = batch()
    inputs["kv_pages"] = inputs["kv_pages"].repeat(1, 1, 1, 2)[..., ::2]
    with pytest.raises(ra.InvalidInput, match="expected kv_pages with a last stride of 1, got 2"):
        rt.ragged_paged_attention(**inputs)


def test_a_plan_serves_calls_alike_and_no_others() -> None:
    inputs = batch()
    _plan._plans.clear()
    rt.ragged_paged_attention(**inputs)
    rt.ragged_paged_attention(**(inputs | {"q": inputs["q"] * 2, "kv_lens": inputs["kv_lens"] - 1}))
    assert len(_plan._plans) == 1
    rt.ragged_paged_attention(**inputs, causal=False)
    with ra.use_backend("reference"):
        rt.ragged_paged_attention(**inputs)
    assert len(_plan._plans) == 3
    with pytest.raises(ra.InvalidInput, match=r"expected kv_lens\.shape"), ra.use_backend("reference"):
        rt.ragged_paged_attention(**(inputs | {"kv_lens": inputs["kv_lens"][:, None]}))
    with ra.use_backend(validate="full"), pytest.raises(ra.InvalidInput, match=r"expected kv_lens\[0\] between 0"):
        rt.ragged_paged_attention(**(inputs | {"kv_lens": inputs["kv_lens"] - 100}))


def test_the_number_of_plans_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_plan, "_MAX_PLANS", 3)
    inputs = batch()
    for window in range(1, 9):
        rt.ragged_paged_attention(**inputs, sliding_window=window)
    assert len(_plan._plans) <= 3


# ---- torch's features around operations


def latent_cache_call(**changes: Any) -> dict[str, Any]:
    return {"kv": torch.ones(2, 32), "cache": torch.zeros(3, 4, 1, 32), "slot_mapping": torch.tensor([0, 5])} | changes


@pytest.mark.parametrize("backend", ["reference", "eager", "triton"])
def test_a_write_in_place_is_one_to_torch(backend: str) -> None:
    call = latent_cache_call()
    q = torch.randn(2, 1, 32, requires_grad=True)
    out = rt.sparse_mla_prefill(q, call["cache"], torch.zeros(2, 1, 1, dtype=torch.int32), d_v=16, backend=backend)[0]
    before = call["cache"]._version
    rt.write_mla_cache(**call, backend=backend)
    assert call["cache"]._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("backend", ["reference", "eager", "triton"])
def test_what_cannot_be_written_is_refused(backend: str) -> None:
    with torch.inference_mode():
        inference = torch.zeros(3, 4, 1, 32)
        rt.write_mla_cache(**latent_cache_call(cache=inference), backend=backend)
    with pytest.raises(RuntimeError, match="write_mla_cache writes cache, an inference tensor, in place outside"):
        rt.write_mla_cache(**latent_cache_call(cache=inference), backend=backend)
    leaf = torch.zeros(3, 4, 1, 32, requires_grad=True)
    with pytest.raises(RuntimeError, match="write_mla_cache writes cache in place, and that has no gradient"):
        rt.write_mla_cache(**latent_cache_call(cache=leaf), backend=backend)
    with torch.no_grad():
        rt.write_mla_cache(**latent_cache_call(cache=leaf), backend=backend)
    expanded = torch.zeros(1, 4, 1, 32).expand(3, 4, 1, 32)
    with pytest.raises(ra.InvalidInput, match="expected cache without overlapping memory, got strides"):
        rt.write_mla_cache(**latent_cache_call(cache=expanded), backend=backend)


def test_pages_of_torchs_pairs_of_4_bits_are_told_their_bytes() -> None:
    inputs = batch()
    inputs["kv_pages"] = torch.zeros(NUM_PAGES, PAGE_SIZE, 4, 8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    with pytest.raises(ra.InvalidInput, match=r"got float4_e2m1fn_x2: take its .view\(torch.uint8\)"):
        rt.ragged_paged_attention(**inputs)


def test_numpys_integers_count() -> None:
    inputs = batch()
    counted = rt.ragged_paged_attention(**inputs, num_seqs=np.int64(1), sliding_window=np.int64(3))  # type: ignore[arg-type]
    assert torch.equal(counted, rt.ragged_paged_attention(**inputs, num_seqs=1, sliding_window=3))
    with pytest.raises(TypeError, match="expected page_size to be an int, got dtype"):
        rt.page_indices_to_slots(inputs["page_indices"], inputs["page_indices"], torch.float32)  # type: ignore[arg-type]
    options = {"block_q": np.int64(16)}
    assert torch.equal(
        rt.ragged_paged_attention(**inputs, options=options),
        rt.ragged_paged_attention(**inputs, options={"block_q": 16}),
    )
    with pytest.raises(ra.InvalidInput, match="expected option block_q to be finite, got inf"):
        rt.ragged_paged_attention(**inputs, options={"block_q": float("inf")})


@pytest.mark.parametrize("backend", ["numba", "eager", "triton", "reference"])
@pytest.mark.parametrize("size", [0, 4])
def test_a_tensor_without_its_memory_is_refused(backend: str, size: int) -> None:
    """A tensor whose storage was resized is refused. Libraries that free parameters between layers resize storages."""
    names = ("q", "kv_pages", "kv_lens", "page_indices", "cu_q_lens", "out")
    for name in names:
        given: dict[str, Any] = {
            "q": torch.zeros(2, 4, 16),
            "kv_pages": torch.zeros(4, 8, 4, 16),
            "kv_lens": torch.tensor([3, 9]).int(),
            "page_indices": torch.arange(4).int().view(2, 2),
            "cu_q_lens": torch.arange(3).int(),
            "out": torch.zeros(2, 4, 16),
        }
        given[name].untyped_storage().resize_(size)
        with pytest.raises(ra.InvalidInput, match=f"expected {name} with memory for .*, got {size} bytes"):
            rt.ragged_paged_attention(**given, backend=backend)


def test_tensors_without_entries_need_no_memory() -> None:
    empty = torch.zeros(0, 4, 16)
    empty.untyped_storage().resize_(0)
    out = rt.ragged_paged_attention(
        empty, torch.zeros(4, 8, 4, 16), torch.tensor([3]).int(), torch.zeros(1, 2).int(), torch.tensor([0, 0]).int()
    )
    assert out.shape == empty.shape


# ---- calls without torch's dispatcher


class Seen(TorchDispatchMode):
    """A mode that records the names of this package's operators that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "ragged_attention":
            self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


def test_modes_and_the_profiler_see_operators() -> None:
    call = batch()
    expected, out = attention(**call), torch.empty_like(call["q"])
    with Seen() as seen:
        assert torch.equal(attention(**call), expected)
        assert attention(**call, out=out) is out
    assert seen.names == ["ragged_paged_attention.default", "ragged_paged_attention.out"]
    assert torch.equal(out, expected)
    with torch.profiler.profile() as profile:
        attention(**call)
    assert "ragged_attention::ragged_paged_attention" in {event.name for event in profile.events() or ()}


def test_a_negated_view_is_read_as_its_values() -> None:
    call = batch()
    expected = attention(**call)
    negated = torch._neg_view(-call["q"])  # pyright: ignore
    assert negated.is_neg()
    assert torch.equal(attention(**call | {"q": negated}), expected)


@pytest.mark.parametrize("given", [{"sliding_window": 5.0}, {"causal": 1}, {"sliding_window": True}], ids=str)
def test_an_argument_of_another_type_is_refused_though_an_equal_one_was_taken(given: dict[str, Any]) -> None:
    ((name, value),) = given.items()
    attention(**batch() | {name: bool(value) if name == "causal" else int(value)})
    with pytest.raises(TypeError, match=f"expected {name} to be"):
        attention(**batch() | given)


def test_a_gradient_is_refused_and_a_constant_is_not() -> None:
    call = batch()
    expected = attention(**call)
    call["q"] = call["q"].requires_grad_()
    with torch.no_grad():
        assert torch.equal(attention(**call), expected)
    with pytest.raises(RuntimeError, match="has no gradient"):
        attention(**call).sum().backward()
