"""Latent attention through torch's own machinery: operators, fake tensors, compilation, schedules, in-place writes."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import ragged_attention as ra
import ragged_attention.torch as rt
from ragged_attention import dispatch
from ragged_attention.calls import CALLS, Device
from ragged_attention.portable.torch_eager import _latents, write_mla_cache
from ragged_attention.torch import _plan
from tests.operators import operator_arguments
from tests.tensors import ints, normal, strided

WIDTHS = {"plain": 48, "fp8_v32": 576, "fp8_v4": 512, "fp8_v41": 512, "fp4_v41": 512}
NUM_PAGES, PAGE_SIZE, NUM_HEADS, NUM_SEQS, NUM_Q_TOKENS = 6, 4, 3, 2, 2
FORMATS = pytest.mark.parametrize("format", list(WIDTHS))


def latent_cache(format: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    rows = (normal(NUM_PAGES, PAGE_SIZE, 1, WIDTHS[format], seed=1) / 3).to(dtype)
    return rows if format == "plain" else rt.quantize_mla_cache(rows, format)


def dense(format: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {
        "q": normal(NUM_SEQS, NUM_Q_TOKENS, NUM_HEADS, WIDTHS[format]).to(dtype),
        "kv_cache": latent_cache(format, dtype),
        "page_indices": ints([3, 0, 5], [1, 99, 4]),
        "kv_lens": ints(9, 6),
        "d_v": 32,
    }


def ragged(format: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Arguments with one query in the first sequence, four in the second, and one padding row."""
    inputs = dense(format, dtype)
    q = torch.cat([inputs["q"].flatten(0, 1), normal(2, NUM_HEADS, WIDTHS[format], seed=3).to(dtype)])
    return inputs | {"q": q, "cu_q_lens": ints(0, 1, 5), "sinks": normal(NUM_HEADS), "return_lse": True}


def sparse(format: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    inputs = dense(format, dtype)
    del inputs["page_indices"], inputs["kv_lens"]
    shape, random = (NUM_SEQS, NUM_Q_TOKENS, 7), torch.Generator().manual_seed(2)
    indices = torch.randint(-2, NUM_PAGES * PAGE_SIZE + 2, shape, generator=random, dtype=torch.int32)
    return inputs | {"indices": indices, "topk_lens": ints(5, 3)}


def but(inputs: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return inputs | changes


def with_extra(inputs: dict[str, Any]) -> dict[str, Any]:
    return inputs | {
        "extra_kv_cache": inputs["kv_cache"][:2],
        "extra_indices": torch.arange(NUM_SEQS * NUM_Q_TOKENS * 3, dtype=torch.int32).view(NUM_SEQS, NUM_Q_TOKENS, 3),
        "extra_topk_lens": ints([1, 2], [3, 0]),
    }


def prefill(format: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    inputs = sparse(format, dtype)
    return {
        "q": inputs["q"][:, 0],
        "kv": inputs["kv_cache"],
        "indices": inputs["indices"][:, :1],
        "topk_lens": inputs["topk_lens"],
        "d_v": 32,
    }


def check_operator(operation: str, *arguments: Any, **keywords: Any) -> None:
    operator = getattr(torch.ops.ragged_attention, operation).default
    torch.library.opcheck(operator, operator_arguments(operation, *arguments, **keywords))


@FORMATS
def test_attentions_pass_opcheck(format: str) -> None:
    schedule = rt.make_decode_schedule(dense(format)["kv_lens"], NUM_SEQS, NUM_Q_TOKENS, NUM_HEADS)
    sinks = normal(NUM_HEADS)
    check_operator("mla_decode", **dense(format), schedule=schedule, causal=True)
    check_operator("mla_decode", **with_extra(sparse(format)), sinks=sinks, sm_scale=1)
    check_operator("sparse_mla_prefill", **prefill(format), sinks=sinks)
    check_operator("ragged_mla_attention", **ragged(format), num_seqs=ints(2), sliding_window=3)
    check_operator("ragged_mla_attention", **but(ragged(format), return_lse=False), out_dtype=torch.bfloat16)


@FORMATS
def test_writing_passes_opcheck(format: str) -> None:
    new = normal(3, WIDTHS[format])
    check_operator("write_mla_cache", new, latent_cache(format), torch.tensor([1, -1, 5]))
    tables = dense(format)["page_indices"], dense(format)["kv_lens"], ints(0, 1, 3)
    check_operator("write_mla_cache", new, latent_cache(format), tables, num_seqs=ints(2))


@pytest.mark.parametrize("format", ["fp8_v32", "fp8_v4", "fp8_v41", "fp4_v41"])
def test_quantising_passes_opcheck(format: str) -> None:
    check_operator("quantize_mla_cache", normal(2, 3, 1, WIDTHS[format]), format)
    check_operator("dequantize_mla_cache", latent_cache(format), dtype=torch.float16)


def test_schedules_and_slots_pass_opcheck() -> None:
    check_operator("make_decode_schedule", ints(9, 6), 2, 2, 3)
    check_operator("make_decode_schedule", None, 2, 2, 3, topk=128, extra_topk=64, num_parts=7)
    tables = dense("plain")["page_indices"]
    check_operator("page_indices_to_slots", ints([[0, 5], [-1, 11]], [[2, 2], [3, 99]]), tables, 4)
    check_operator("page_indices_to_slots", ints([0, 5], [2, 2], [3, 9]), tables, 4, cu_q_lens=ints(0, 1, 3))


def engine_step(q: Any, new: Any, cache: Any, slots: Any, page_indices: Any, kv_lens: Any, positions: Any) -> Any:
    """All seven operations, in the order in which a model's layer would call them."""
    rt.write_mla_cache(new, cache, slots)
    num_seqs, num_q_tokens, num_q_heads, _ = q.shape
    schedule = rt.make_decode_schedule(kv_lens, num_seqs, num_q_tokens, num_q_heads)
    over_all = rt.mla_decode(q, cache, page_indices, kv_lens, causal=True, schedule=schedule)
    indices = rt.page_indices_to_slots(positions, page_indices, cache.shape[1])
    topk = indices.shape[-1]
    lists = rt.make_decode_schedule(
        None, num_seqs, num_q_tokens, num_q_heads, topk=topk, topk_lens=kv_lens, extra_topk=topk
    )
    over_lists = rt.mla_decode(
        q, cache, indices=indices, topk_lens=kv_lens, extra_kv_cache=cache, extra_indices=indices, schedule=lists,
        backend="eager", options={"block_kv": 3},
    )  # fmt: skip
    rows = rt.dequantize_mla_cache(cache, dtype=torch.float32)
    of_prefill = rt.sparse_mla_prefill(q[:, 0].float(), rows, indices[:, :1])
    return (*over_all, *over_lists, *of_prefill, rt.quantize_mla_cache(rows, "fp8_v32")), (schedule, lists)


def step_inputs(num_seqs: int = 2) -> list[Any]:
    positions = torch.randint(0, 12, (num_seqs, 2, 5), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    return [
        normal(num_seqs, 2, 4, 576).bfloat16(),
        torch.ones(3, 576),
        latent_cache("fp8_v32"),
        torch.tensor([1, -1, 7]),
        torch.arange(3 * num_seqs, dtype=torch.int32).view(num_seqs, 3),
        torch.arange(5, 5 + num_seqs, dtype=torch.int32),
        positions,
    ]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_whole_step_compiles_into_one_graph(compiler: str, dynamic: bool | None) -> None:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own internals
        compiled: Any = torch.compile(engine_step, fullgraph=True, backend=compiler, dynamic=dynamic)
        for num_seqs in (2,) if dynamic is None else (2, 3):
            plain, traced = step_inputs(num_seqs), step_inputs(num_seqs)
            (want, schedules), (got, traced_schedules) = engine_step(*plain), compiled(*traced)
            torch.testing.assert_close(got, want)
            assert torch.equal(traced[2], plain[2])  # the cache is written in place
            for one, other in zip(traced_schedules, schedules, strict=True):
                assert one.made_for == other.made_for
                torch.testing.assert_close(
                    (one.parts, one.num_splits, one.lens), (other.parts, other.num_splits, other.lens)
                )


def test_a_schedule_goes_into_compiled_code() -> None:
    inputs = dense("plain")
    schedule = rt.make_decode_schedule(inputs["kv_lens"], NUM_SEQS, NUM_Q_TOKENS, NUM_HEADS)
    torch._dynamo.reset()
    compiled: Any = torch.compile(lambda **keywords: rt.mla_decode(**keywords), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**inputs, schedule=schedule), rt.mla_decode(**inputs))


@FORMATS
def test_fake_tensors_get_shapes_dtypes_and_static_checks(format: str) -> None:
    width = WIDTHS[format]
    with FakeTensorMode() as mode:

        def fake(inputs: dict[str, Any]) -> Any:
            return {
                name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
                for name, value in inputs.items()
            }

        inputs = fake(dense(format, torch.bfloat16))
        out, lse = rt.mla_decode(**inputs)
        assert (out.shape, out.dtype) == ((NUM_SEQS, NUM_Q_TOKENS, NUM_HEADS, 32), torch.bfloat16)
        assert (lse.shape, lse.dtype) == ((NUM_SEQS, NUM_HEADS, NUM_Q_TOKENS), torch.float32)
        assert rt.mla_decode(**inputs, out_dtype="float32")[0].dtype == torch.float32
        out, lse = rt.ragged_mla_attention(**fake(ragged(format, torch.bfloat16)), out_dtype=torch.float16)
        assert (out.shape, out.dtype) == ((6, NUM_HEADS, 32), torch.float16)
        assert (lse.shape, lse.dtype) == ((6, NUM_HEADS), torch.float32)
        out, max_logits, lse = rt.sparse_mla_prefill(**fake(prefill(format, torch.float16)))
        assert (out.shape, out.dtype) == ((NUM_SEQS, NUM_HEADS, 32), torch.float16)
        assert max_logits.shape == lse.shape == (NUM_SEQS, NUM_HEADS)
        assert max_logits.dtype == lse.dtype == torch.float32
        schedule = rt.make_decode_schedule(inputs["kv_lens"], NUM_SEQS, NUM_Q_TOKENS, NUM_HEADS, num_parts=5)
        assert (schedule.parts.shape, schedule.num_splits.shape) == ((5, 8), (NUM_SEQS + 1,))
        slots = rt.page_indices_to_slots(torch.zeros(2, 3, 4, dtype=torch.int32), inputs["page_indices"], 4)
        assert (slots.shape, slots.dtype) == ((2, 3, 4), torch.int32)
        with pytest.raises(ra.InvalidInput, match=r"expected kv_lens\.shape to be \[S\] = \[2\], got \[1\]"):
            rt.mla_decode(**but(inputs, kv_lens=inputs["kv_lens"][:1]))
        if format != "plain":
            cache = rt.quantize_mla_cache(torch.zeros(2, 3, 1, width), format)
            assert (cache.shape[:3], cache.dtype) == ((2, 3, 1), torch.uint8)
            assert rt.dequantize_mla_cache(cache, dtype="float16").shape == (2, 3, 1, width)
            assert rt.dequantize_mla_cache(cache, dtype="float16").dtype == torch.float16


@pytest.mark.parametrize("operation", ["mla_decode", "ragged_mla_attention", "quantize_mla_cache"])
def test_there_is_no_gradient(operation: str) -> None:
    calls: dict[str, Any] = {
        "mla_decode": lambda q: rt.mla_decode(**but(dense("plain"), q=q))[0],
        "ragged_mla_attention": lambda q: rt.ragged_mla_attention(**but(ragged("plain"), q=q.flatten(0, 1)))[0],
        "quantize_mla_cache": lambda q: rt.dequantize_mla_cache(rt.quantize_mla_cache(q, "fp8_v32"), dtype="float32"),
    }
    shape = (2, 3, 1, 576) if operation == "quantize_mla_cache" else (NUM_SEQS, NUM_Q_TOKENS, NUM_HEADS, 48)
    q = normal(*shape).requires_grad_()
    out = calls[operation](q)
    if operation == "quantize_mla_cache":
        assert not out.requires_grad  # uint8 results have no gradient
        return
    with pytest.raises(RuntimeError, match=f"{operation} has no gradient: it works on a KV cache"):
        out.sum().backward()


# ---- strides of caches


def laid_apart(cache: torch.Tensor, gap: int) -> torch.Tensor:
    """A copy of the cache with gaps of `gap` elements, filled with NaN, between its pages."""
    page = cache[0].numel()
    if cache.element_size() == 1:
        memory = torch.full((NUM_PAGES, page + gap), 0xFF, dtype=torch.uint8).view(cache.dtype)
    else:
        memory = torch.full((NUM_PAGES, page + gap), torch.nan, dtype=cache.dtype)
    memory[:, :page].view(torch.uint8).copy_(cache.flatten(1).view(torch.uint8))
    return memory[:, :page].view(cache.shape)


@FORMATS
@pytest.mark.parametrize("gap", [1, 8, 700])
def test_pages_may_lie_apart(format: str, gap: int) -> None:
    cache = laid_apart(latent_cache(format), gap)
    assert not cache.is_contiguous()
    for inputs in (dense(format), sparse(format), with_extra(sparse(format))):
        torch.testing.assert_close(rt.mla_decode(**but(inputs, kv_cache=cache)), rt.mla_decode(**inputs))
    inputs = prefill(format)
    torch.testing.assert_close(rt.sparse_mla_prefill(**but(inputs, kv=cache)), rt.sparse_mla_prefill(**inputs))
    if format != "plain":
        assert torch.equal(rt.dequantize_mla_cache(cache), rt.dequantize_mla_cache(latent_cache(format)))


@FORMATS
def test_rows_of_a_page_may_lie_apart_where_they_are_read(format: str) -> None:
    cache = torch.cat([latent_cache(format)] * 2, dim=2)[:, :, :1]
    assert cache.stride(1) == 2 * cache.shape[3]
    for inputs in (dense(format), sparse(format)):
        torch.testing.assert_close(rt.mla_decode(**but(inputs, kv_cache=cache)), rt.mla_decode(**inputs))
    if format != "plain":
        assert torch.equal(rt.dequantize_mla_cache(cache), rt.dequantize_mla_cache(latent_cache(format)))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("format", ["fp8_v32", "fp8_v4", "fp8_v41", "fp4_v41"])
def test_bytes_may_be_of_any_kind(format: str, dtype: torch.dtype) -> None:
    inputs = dense(format)
    cache = inputs["kv_cache"].view(dtype)
    torch.testing.assert_close(rt.mla_decode(**but(inputs, kv_cache=cache)), rt.mla_decode(**inputs))
    assert torch.equal(rt.dequantize_mla_cache(cache), rt.dequantize_mla_cache(inputs["kv_cache"]))
    written = rt.write_mla_cache(normal(1, WIDTHS[format]), cache.clone(), ints(3))
    wanted = rt.write_mla_cache(normal(1, WIDTHS[format]), inputs["kv_cache"].clone(), ints(3))
    assert written.dtype == dtype
    assert torch.equal(written.view(torch.uint8), wanted)


def test_everything_but_a_cache_may_be_strided() -> None:
    for inputs in (dense("plain"), sparse("plain")):
        apart: dict[str, Any] = {
            name: strided(value) if isinstance(value, torch.Tensor) and name != "kv_cache" else value
            for name, value in inputs.items()
        }
        torch.testing.assert_close(rt.mla_decode(**apart), rt.mla_decode(**inputs))
    inputs = but(prefill("plain"), kv=latent_cache("plain").view(-1, 1, 48))
    apart = {name: strided(value) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    torch.testing.assert_close(rt.sparse_mla_prefill(**apart), rt.sparse_mla_prefill(**inputs))
    rows = normal(2, 3, 1, 576)
    assert torch.equal(rt.quantize_mla_cache(strided(rows), "fp8_v32"), rt.quantize_mla_cache(rows, "fp8_v32"))


@pytest.mark.parametrize("name", ["kv_cache", "extra_kv_cache"])
def test_a_cache_with_a_strided_last_dimension_is_refused(name: str) -> None:
    inputs = with_extra(sparse("plain"))
    with pytest.raises(ra.InvalidInput, match=f"expected {name} with a last stride of 1, got 2"):
        rt.mla_decode(**but(inputs, **{name: strided(inputs[name])}))


# ---- in-place writes


@FORMATS
@pytest.mark.parametrize("backend", ["eager", "reference"])
def test_tokens_are_written_in_place_and_nothing_else(format: str, backend: str) -> None:
    width, cache = WIDTHS[format], laid_apart(latent_cache(format), 8)
    before = cache.clone()
    new = normal(4, width, seed=3)
    assert rt.write_mla_cache(new, cache, torch.tensor([9, -1, 2, 24]), backend=backend) is cache
    slots = cache if format == "plain" else rt.dequantize_mla_cache(cache, dtype="float32")
    old = before if format == "plain" else rt.dequantize_mla_cache(before, dtype="float32")
    slots, old = slots.reshape(-1, width).clone(), old.reshape(-1, width)
    # In 4 bits, rounding changes a value by up to a quarter, and the scale by up to a sixteenth.
    rtol, atol = (0.26, 0.3 * float(new.abs().max()) / 6) if format == "fp4_v41" else (0.08, 0.01)
    for token, slot in ((0, 9), (2, 2)):
        torch.testing.assert_close(slots[slot], new[token], rtol=rtol, atol=atol)
        slots[slot] = old[slot]
    assert torch.equal(slots, old)
    around = cache.as_strided((NUM_PAGES, 8), (cache.stride(0), 1), cache[0].numel())
    assert (around == 0xFF).all() if format != "plain" else around.isnan().all()


def test_heads_may_be_named_or_left_out() -> None:
    cache, other = latent_cache("plain"), latent_cache("plain")
    rt.write_mla_cache(normal(2, 48), cache, ints(0, 5))
    rt.write_mla_cache(normal(2, 1, 48), other, torch.tensor([0, 5]))
    assert torch.equal(cache, other)


def test_pages_that_bytes_do_not_address_cannot_be_written() -> None:
    cache = torch.cat([latent_cache("fp8_v4")] * 2, dim=2)[:, :, :1]
    message = r"expected cache with rows packed in each page \(stride 584\) for 'fp8_v4', got 1168"
    with pytest.raises(ra.InvalidInput, match=message):
        rt.write_mla_cache(normal(1, 512), cache, ints(0))
    rows = torch.zeros(4, 3, 2, 528, dtype=torch.uint8)[:, :, :1]
    message = r"expected cache with rows packed in each page \(stride 528\) for 'fp8_v41', got 1056"
    with pytest.raises(ra.InvalidInput, match=message):
        rt.write_mla_cache(normal(1, 512), rows, ints(0), cache_layout="page")
    rt.write_mla_cache(normal(1, 512), rows, ints(0))
    cache = torch.cat([latent_cache("fp8_v32")] * 2, dim=2)[:, :, :1]  # each token's bytes are contiguous
    rt.write_mla_cache(torch.ones(1, 576), cache, ints(0))
    assert (rt.dequantize_mla_cache(cache)[0, 0] == 1).all()


def test_slots_are_checked_on_request() -> None:
    with ra.use_backend(validate="full"), pytest.raises(ra.InvalidInput, match=r"expected slot_mapping\[1\] to be -1"):
        rt.write_mla_cache(normal(2, 48), latent_cache("plain"), ints(0, 24))


def test_dtypes_may_be_named() -> None:
    cache = latent_cache("fp8_v4")
    for name in ("bfloat16", "float16", "float32"):
        named, given = (rt.dequantize_mla_cache(cache, dtype=dtype) for dtype in (name, getattr(torch, name)))
        assert named.dtype == getattr(torch, name)
        assert torch.equal(named, given)
    with pytest.raises(ra.InvalidInput, match=r"expected dtype to be .*, got 'float64'"):
        rt.dequantize_mla_cache(cache, dtype=torch.float64)
    with pytest.raises(TypeError, match="expected dtype to be a str, got int"):
        rt.dequantize_mla_cache(cache, dtype=3)  # type: ignore[arg-type]


# ---- schedules


def test_a_schedule_knows_what_it_was_made_for() -> None:
    kv_lens = ints(300, 0, 5000)
    schedule = rt.make_decode_schedule(kv_lens, 3, 1, 128, num_parts=8)
    assert schedule.num_splits.tolist() == [0, 1, 2, 9]
    assert schedule.made_for == (3, 1, 128, 1, 0, 0)
    kv_lens.add_(1)
    assert schedule.lens.tolist() == [300, 0, 5000]  # a copy: a step changes the caller's tensor in place
    assert schedule.extra_lens is None

    schedule = rt.make_decode_schedule(None, 2, 3, 16, topk=64, topk_lens=ints([1, 99, 0], [-5, 2, 3]), extra_topk=32)
    assert schedule.made_for == (2, 3, 16, 1, 64, 32)
    assert (schedule.lens.tolist(), schedule.extra_lens.tolist()) == ([64, 3], [32, 32])
    schedule = rt.make_decode_schedule(None, 2, 3, 16, topk=64, extra_topk=32, extra_topk_lens=ints(40, 4))
    assert (schedule.lens.tolist(), schedule.extra_lens.tolist()) == ([64, 64], [32, 4])


def test_parts_fill_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(framework="torch", platform="cpu", num_multiprocessors=132)
    monkeypatch.setattr(_plan, "device_facts", lambda _: device)
    monkeypatch.setattr(_plan, "_plans", {})
    lens = ints(9, 9)
    assert len(rt.make_decode_schedule(lens, 2, 1, 128).parts) == 132 // 2
    assert len(rt.make_decode_schedule(lens, 2, 2, 128, 2).parts) == 132 // 2 // 2
    assert len(rt.make_decode_schedule(lens, 2, 1, 8).parts) == 132
    assert len(rt.make_decode_schedule(lens, 2, 999, 128).parts) == 1
    assert len(rt.make_decode_schedule(None, 2, 2, 128, topk=2048).parts) == 132 // (2 * 2)
    assert len(rt.make_decode_schedule(None, 2, 3, 8, topk=2048).parts) == 132 // 3


def test_a_top_k_is_scheduled_on_the_device_named() -> None:
    assert rt.make_decode_schedule(None, 2, 1, 16, topk=64).parts.device.type == "cpu"
    assert rt.make_decode_schedule(None, 2, 1, 16, topk=64, device="meta").parts.device.type == "meta"
    with torch.device("meta"):
        assert rt.make_decode_schedule(None, 2, 1, 16, topk=64).parts.device.type == "meta"
        assert (
            rt.make_decode_schedule(
                None, 2, 1, 16, topk=64, topk_lens=torch.zeros(2, dtype=torch.int32, device="cpu")
            ).lens.device.type
            == "cpu"
        )


SCHEDULE_ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"batch_size": 2.0}, TypeError, "expected batch_size to be an int, got float"),
    ({"batch_size": -1}, ra.InvalidInput, "expected batch_size >= 0, got -1"),
    ({"num_q_tokens": 0}, ra.InvalidInput, "expected num_q_tokens >= 1, got 0"),
    ({"num_q_heads": True}, TypeError, "expected num_q_heads to be an int, got bool"),
    ({"num_kv_heads": 2}, ra.InvalidInput, "expected num_q_heads to be a multiple of num_kv_heads=2, got 3"),
    ({"topk_lens": ints(1, 2)}, ra.InvalidInput, "expected topk_lens only together with topk"),
    ({"extra_topk": 4}, ra.InvalidInput, "expected extra_topk only together with topk"),
    ({"extra_topk_lens": ints(1)}, ra.InvalidInput, "expected extra_topk_lens only together with topk"),
    ({"batch_size": 3}, ra.InvalidInput, r"expected kv_lens.shape to be \[S\] = \[3\], got \[2\]"),
    ({"kv_lens": ints(1, 2).long()}, ra.InvalidInput, "expected kv_lens.dtype to be int32, got int64"),
    ({"kv_lens": np.zeros(2, np.int32)}, TypeError, "expected kv_lens to be a torch.Tensor, got ndarray"),
    (
        {"kv_lens": None, "topk": 8, "num_q_heads": 4, "num_kv_heads": 2},
        ra.InvalidInput,
        "expected num_kv_heads = 1 with topk, got 2",
    ),
    ({"kv_lens": None, "topk": 0}, ra.InvalidInput, "expected topk >= 1, got 0"),
    ({"kv_lens": None, "topk": 8, "extra_topk": 0}, ra.InvalidInput, "expected extra_topk >= 1, got 0"),
    ({"kv_lens": None, "topk": 8, "extra_topk": 1.5}, TypeError, "expected extra_topk to be an int, got float"),
    (
        {"kv_lens": None, "topk": 8, "extra_topk_lens": ints(1, 1)},
        ra.InvalidInput,
        "expected extra_topk_lens only together with",
    ),
    ({"kv_lens": None, "topk": 8, "topk_lens": [1, 2]}, TypeError, "expected topk_lens to be an array, got list"),
    (
        {"kv_lens": None, "topk": 8, "topk_lens": ints(1, 2).long()},
        ra.InvalidInput,
        "expected topk_lens.dtype to be int32, got int64",
    ),
    (
        {"kv_lens": None, "topk": 8, "topk_lens": ints(1, 2, 3)},
        ra.InvalidInput,
        r"expected topk_lens.shape to be \[S\] = \[2\], got \[3\]",
    ),
    ({"num_parts": 0}, ra.InvalidInput, "expected num_parts >= 1, got 0"),
    ({"num_parts": 1.5}, TypeError, "expected num_parts to be an int, got float"),
    ({"overhead": -1}, ra.InvalidInput, "expected overhead >= 0, got -1"),
    ({"options": {"block_kv": 3}}, ra.InvalidInput, "expected options among none for this backend, got 'block_kv'"),
]


@pytest.mark.parametrize(("change", "kind", "message"), SCHEDULE_ERRORS)
def test_what_cannot_be_scheduled_is_refused(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"kv_lens": ints(9, 6), "batch_size": 2, "num_q_tokens": 2, "num_q_heads": 3}
    with pytest.raises(kind, match=message):
        rt.make_decode_schedule(**(arguments | change))


def test_a_schedule_for_other_calls_is_refused() -> None:
    inputs = dense("plain")
    schedule = rt.make_decode_schedule(inputs["kv_lens"], NUM_SEQS, NUM_Q_TOKENS, NUM_HEADS)
    with pytest.raises(ra.InvalidInput, match="expected a schedule made for num_q_heads=2, got one made for num_q_h"):
        rt.mla_decode(**but(inputs, q=inputs["q"][:, :, :2]), schedule=schedule)
    with pytest.raises(ra.InvalidInput, match="expected a schedule made for topk=7, got one made for topk=0"):
        rt.mla_decode(**sparse("plain"), schedule=schedule)
    with pytest.raises(TypeError, match="expected schedule to be a DecodeSchedule, got tuple"):
        rt.mla_decode(**inputs, schedule=(schedule.parts, schedule.num_splits))  # type: ignore[arg-type]


def test_a_schedule_of_other_lengths_only_counts_when_asked() -> None:
    inputs = dense("plain")
    stale = rt.make_decode_schedule(inputs["kv_lens"] + 1, NUM_SEQS, NUM_Q_TOKENS, NUM_HEADS, num_parts=3)
    torch.testing.assert_close(rt.mla_decode(**inputs, schedule=stale), rt.mla_decode(**inputs))
    inputs["page_indices"] = inputs["page_indices"].clamp(0, 5)
    message = r"expected a schedule made for these kv_lens, got one made for 10 where kv_lens\[0\] = 9"
    with ra.use_backend(validate="full"), pytest.raises(ra.InvalidInput, match=message):
        rt.mla_decode(**inputs, schedule=stale)
    fresh = rt.make_decode_schedule(inputs["kv_lens"], NUM_SEQS, NUM_Q_TOKENS, NUM_HEADS, num_parts=3)
    with ra.use_backend(validate="full"):
        rt.mla_decode(**inputs, schedule=fresh)


def test_schedules_alike_share_a_plan() -> None:
    inputs = dense("plain")
    schedules = [
        rt.make_decode_schedule(inputs["kv_lens"] + more, NUM_SEQS, NUM_Q_TOKENS, NUM_HEADS, num_parts=parts)
        for more, parts in ((0, 4), (3, 4), (0, 5))
    ]
    _plan._plans.clear()
    for schedule, plans in zip((*schedules, None), (1, 1, 2, 3), strict=True):
        rt.mla_decode(**inputs, schedule=schedule)
        assert len(_plan._plans) == plans


# ---- choice of the backend


def test_explain_takes_what_the_call_takes() -> None:
    inputs = dense("plain")
    schedule = rt.make_decode_schedule(inputs["kv_lens"], NUM_SEQS, NUM_Q_TOKENS, NUM_HEADS)
    selected = prefill("plain")
    out, _, lse = rt.sparse_mla_prefill(**selected)
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "sparse_mla_prefill": ((), prefill("fp8_v4")),
        "sparse_mla_prefill_backward": ((), selected | {"d_out": out, "out": out, "lse": lse}),
        "mla_decode": ((), inputs | {"schedule": schedule, "options": {"block_kv": 24}}),
        "ragged_mla_attention": ((), ragged("fp8_v32") | {"options": {"block_kv": 24}}),
        "make_decode_schedule": ((inputs["kv_lens"], NUM_SEQS, NUM_Q_TOKENS, NUM_HEADS), {}),
        "quantize_mla_cache": ((normal(2, 3, 1, 576), "fp8_v32"), {}),
        "dequantize_mla_cache": ((latent_cache("fp8_v32"),), {"dtype": torch.float32}),
        "write_mla_cache": ((normal(2, 48), inputs["kv_cache"], ints(0, 1)), {}),
        "page_indices_to_slots": ((ints([0], [1]), inputs["page_indices"], 4), {}),
    }
    assert set(calls) == {name for name in CALLS if "mla" in CALLS[name].__module__.rpartition(".")[2]}
    for operation, (arguments, keywords) in calls.items():
        table = ra.explain(operation, *arguments, **keywords)
        assert table.startswith(f"{operation} from torch on cpu\n")
        assert ("* eager      chosen" if operation == "make_decode_schedule" else "* numba      chosen") in table
        assert "reference  could run, not asked for" in table
    assert "* reference  chosen" in ra.explain("mla_decode", **inputs, backend="reference")


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"block_kv": 0}, ra.InvalidInput, "expected block_kv >= 1, got 0"),
        ({"block_kv": 1.5}, TypeError, "expected block_kv to be an int, got float"),
        ({"num_warps": 4}, ra.InvalidInput, "expected options among block_kv for this backend, got 'num_warps'"),
        (["block_kv"], TypeError, "expected options to be a mapping, got list"),
    ],
)
def test_options_are_checked(options: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        rt.mla_decode(**dense("plain"), options=options, backend="eager")
    with pytest.raises(kind, match=message):
        rt.ragged_mla_attention(**ragged("plain"), options=options, backend="eager")
    with pytest.raises(kind, match=message):
        rt.sparse_mla_prefill(**prefill("plain"), options=options, backend="eager")


def test_only_dense_decoding_reads_lengths_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    rt.mla_decode(**sparse("plain"), backend="eager")
    rt.sparse_mla_prefill(**prefill("plain"), backend="eager")
    _plan._plans.clear()
    with pytest.raises(ra.Unsupported, match="expected a stream that is not being captured, since lengths are read"):
        rt.mla_decode(**dense("plain"), backend="eager")


@FORMATS
def test_fallbacks_that_promise_it_wait_for_nothing(format: str) -> None:
    """A fallback that promises not to stall the device runs on meta tensors, which have no values to read."""
    slots = {"positions": ints([[0, 5]], [[-1, 11]]), "page_indices": ints([3], [1]), "page_size": 4}
    calls = {
        "mla_decode": with_extra(sparse(format)) | {"sinks": normal(NUM_HEADS)},
        "sparse_mla_prefill": prefill(format),
        "page_indices_to_slots": slots,
    }
    if format != "plain":
        calls["quantize_mla_cache"] = {"kv": normal(2, 3, 1, WIDTHS[format]), "format": format}
        calls["dequantize_mla_cache"] = {"cache": latent_cache(format)}
    device = Device(framework="torch", platform="meta")
    for operation, inputs in calls.items():
        arguments: dict[str, Any] = {
            name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in inputs.items()
        }
        module, call = dispatch.load(operation, "eager"), CALLS[operation](**arguments, device=device)  # type: ignore[call-arg]
        assert module.why_not(call) is None
        module.run(call, module.heuristic(call), None)


# ---- inside the fallbacks


@FORMATS
@pytest.mark.parametrize(("backend", "sizes"), [("eager", (1, 2, 3, 5, 8)), ("numba", (8, 16, 40))])
def test_results_do_not_depend_on_the_size_of_pieces(format: str, backend: str, sizes: tuple[int, ...]) -> None:
    for inputs in (but(dense(format), causal=True), sparse(format), with_extra(sparse(format))):
        whole = rt.mla_decode(**inputs, backend=backend)
        for block_kv in sizes:
            torch.testing.assert_close(rt.mla_decode(**inputs, options={"block_kv": block_kv}, backend=backend), whole)
    inputs = ragged(format)
    whole = rt.ragged_mla_attention(**inputs, sliding_window=5, backend=backend)
    for block_kv in sizes:
        found = rt.ragged_mla_attention(**inputs, sliding_window=5, options={"block_kv": block_kv}, backend=backend)
        torch.testing.assert_close(found, whole)
    inputs = prefill(format)
    whole = rt.sparse_mla_prefill(**inputs, backend=backend)
    for block_kv in sizes:
        torch.testing.assert_close(
            rt.sparse_mla_prefill(**inputs, options={"block_kv": block_kv}, backend=backend), whole
        )


@FORMATS
def test_no_more_rows_are_gathered_at_once_than_the_tile_says(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gathered: list[int] = []
    at = _latents.Rows.at

    def counted(self: Any, slots: torch.Tensor) -> torch.Tensor:
        gathered.append(len(slots))
        return at(self, slots)

    monkeypatch.setattr(_latents.Rows, "at", counted)
    options = {"block_kv": 4}
    rt.mla_decode(**dense(format), options=options, backend="eager")
    assert sum(gathered) == 9 + 4  # the visible keys, except those of the page that does not exist
    gathered.clear()
    rt.ragged_mla_attention(**ragged(format), sliding_window=3, options=options, backend="eager")
    assert sum(gathered) == 3 + 4  # 3 keys in one query's window, and 4 keys outside the page that does not exist
    rt.mla_decode(**with_extra(sparse(format)), options=options, backend="eager")
    rt.sparse_mla_prefill(**prefill(format), options=options, backend="eager")
    assert max(gathered) <= 4


@pytest.mark.parametrize("format", ["fp8_v32", "fp8_v4", "fp8_v41", "fp4_v41"])
@pytest.mark.parametrize("chunk", [1, 3, 4, 9])
def test_caches_are_converted_in_pieces(format: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = normal(NUM_PAGES, PAGE_SIZE, 1, WIDTHS[format])
    cache = rt.quantize_mla_cache(rows, format)
    values, written = rt.dequantize_mla_cache(cache), torch.zeros_like(cache)
    monkeypatch.setattr(_latents, "CHUNK", chunk)
    monkeypatch.setattr(write_mla_cache, "CHUNK", chunk)
    assert torch.equal(rt.quantize_mla_cache(rows, format), cache)
    assert torch.equal(rt.dequantize_mla_cache(cache), values)
    rt.write_mla_cache(rows.flatten(0, 1), written, torch.arange(NUM_PAGES * PAGE_SIZE))
    assert torch.equal(written, cache)


@pytest.mark.parametrize(("backend", "block_kv"), [("eager", 2), ("eager", 100), ("numba", 8), ("numba", 32)])
def test_what_nobody_selects_may_be_nan(backend: str, block_kv: int) -> None:
    """NaN in unselected rows changes nothing, even if a list selects no row, or no row of one of two caches."""
    cache = torch.full((2, 4, 1, 48), torch.nan)
    cache[1, 2:] = normal(2, 1, 48)
    extra = torch.full((1, 3, 1, 48), torch.nan)
    extra[0, 1] = normal(1, 48, seed=5)
    indices = ints([[-1, 8, 7, -(2**31)]], [[2**31 - 1, -1, -1, -1]], [[6, 0, 0, 0]], [[-1, -1, -1, -1]])
    extra_indices = ints([[-1, -1, 9]], [[-1, 1, 3]], [[1, 1, 0]], [[3, 4, 5]])
    lens, extra_lens = ints(4, 4, 1, 4), ints(3, 3, 2, 3)
    q = normal(4, 1, NUM_HEADS, 48)
    out, lse = rt.mla_decode(
        q, cache, indices=indices, topk_lens=lens, extra_kv_cache=extra, extra_indices=extra_indices,
        extra_topk_lens=extra_lens, d_v=48, options={"block_kv": block_kv}, backend=backend,
    )  # fmt: skip
    assert out.isfinite().all()
    torch.testing.assert_close(out[0, 0], cache[1, 3].expand(NUM_HEADS, -1))
    torch.testing.assert_close(out[1, 0], extra[0, 1].expand(NUM_HEADS, -1))
    assert (out[3] == 0).all()
    assert (lse[3] == -torch.inf).all()


def test_a_cache_may_have_more_slots_than_an_index_can_name() -> None:
    cache = normal(48).expand(2**16, 2**16, 1, 48)
    out, lse = rt.mla_decode(normal(1, 1, 1, 48), cache, indices=ints([[2**31 - 1, -(2**31), 7]]), d_v=48)
    torch.testing.assert_close(out.flatten(), cache[0, 0, 0])
    assert lse.isfinite().all()


@pytest.mark.parametrize("num_pages", [0, 1])
def test_a_cache_or_batch_may_be_empty(num_pages: int) -> None:
    cache = normal(num_pages, 4, 1, 48)
    q = normal(2, 1, NUM_HEADS, 48)
    nothing = torch.full((2, 1, 3), -1, dtype=torch.int32)
    calls: tuple[dict[str, Any], ...] = (
        {"indices": nothing},
        {"indices": nothing, "extra_kv_cache": cache, "extra_indices": nothing},
        {"page_indices": ints([0], [1]), "kv_lens": ints(0, 0)},
        {"page_indices": torch.zeros(2, 0, dtype=torch.int32), "kv_lens": ints(5, 5)},
    )
    for keywords in calls:
        out, lse = rt.mla_decode(q, cache, d_v=48, **keywords)
        assert (out == 0).all()
        assert (lse == -torch.inf).all()
    assert rt.mla_decode(q[:0], cache, indices=nothing[:0], d_v=48)[0].shape == (0, 1, NUM_HEADS, 48)
    assert rt.sparse_mla_prefill(q[:0, 0], cache, nothing[:0], d_v=48)[0].shape == (0, NUM_HEADS, 48)
    assert rt.page_indices_to_slots(nothing[:0], ints([0])[:0], 4).shape == (0, 1, 3)
    assert rt.make_decode_schedule(ints(1)[:0], 0, 1, 3).num_splits.tolist() == [0]
    assert rt.write_mla_cache(normal(0, 48), cache, ints()) is cache
