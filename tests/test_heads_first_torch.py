"""Attention over heads-first pages, and attention that writes new keys and values, under torch's own machinery."""

import collections
import warnings
from typing import Any

import pytest
import torch

import ragged_attention as ra
import ragged_attention.torch as rt
from tests.operators import operator_arguments

K, P, G, D, H = 2, 8, 4, 16, 4
Quantized = collections.namedtuple("Quantized", ["weight", "scales"])


def pages(quantized: bool = False) -> Any:
    random = torch.Generator().manual_seed(1)
    if not quantized:
        return torch.randn(K, P, G, D, generator=random)
    codes = torch.randint(-128, 128, (K, P, G, D), generator=random, dtype=torch.int8)
    return codes, torch.rand(K, P, G, 1, generator=random) / 50


def decode_inputs(quantized: bool = False) -> dict[str, Any]:
    return {
        "q": torch.randn(3, H, D, generator=torch.Generator().manual_seed(0)),
        "k_pages": pages(quantized),
        "v_pages": pages(quantized),
        "lengths": torch.tensor([0, 5, 8], dtype=torch.int32),
        "page_indices": torch.tensor([[-1, 99], [3, 1], [0, 7]], dtype=torch.int32),
    }


def chunk_inputs(quantized: bool = False) -> dict[str, Any]:
    inputs = decode_inputs(quantized)
    lengths, table = inputs.pop("lengths"), inputs.pop("page_indices")
    return inputs | {"length": lengths[1:2], "page_indices": table[1]}


@pytest.mark.parametrize("quantized", [False, True])
def test_both_pass_opcheck(quantized: bool) -> None:
    operators = torch.ops.ragged_attention
    decode = operator_arguments("paged_attention", **decode_inputs(quantized), soft_cap=3)
    torch.library.opcheck(operators.paged_attention.default, decode)
    chunk = operator_arguments("prefill_attention", **chunk_inputs(quantized), sliding_window=3, align="end")
    torch.library.opcheck(operators.prefill_attention.default, chunk)


def both(inputs: dict[str, Any], chunk: dict[str, Any], length: int, align: str) -> Any:
    chunk = {**chunk, "length": length}
    return rt.paged_attention(**inputs), rt.prefill_attention(**chunk, align=align)


@pytest.mark.parametrize("quantized", [False, True])
def test_both_compile_into_one_graph_and_follow_a_changing_length(quantized: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    inputs = decode_inputs(quantized), chunk_inputs(quantized)
    for length, align in ((5, "chunk"), (6, "chunk"), (8, "chunk"), (5, "end")):
        for got, want in zip(compiled(*inputs, length, align), both(*inputs, length, align), strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("backend", ["eager", "reference"])
def test_scales_are_those_of_jax_where_the_pages_are(backend: str) -> None:
    inputs = decode_inputs(quantized=True)
    codes, scales = inputs["k_pages"]
    of_jax: Any = Quantized(codes, scales * 127.5)
    want = rt.paged_attention(**inputs, backend=backend)
    got = rt.paged_attention(**inputs | {"k_pages": of_jax, "v_pages": of_jax}, backend=backend)
    torch.testing.assert_close(got, want)
    chunk = chunk_inputs(quantized=True)
    want = rt.prefill_attention(**chunk, backend=backend)
    got = rt.prefill_attention(**chunk | {"k_pages": of_jax, "v_pages": of_jax}, backend=backend)
    torch.testing.assert_close(got, want)


def test_pages_with_a_strided_last_dimension_are_refused() -> None:
    inputs = decode_inputs()
    inputs["v_pages"] = inputs["v_pages"].repeat(1, 1, 1, 2)[..., ::2]
    with pytest.raises(ra.InvalidInput, match="expected v_pages with a last stride of 1, got 2"):
        rt.paged_attention(**inputs)


def test_both_are_explained() -> None:
    assert "* numba" in ra.explain("paged_attention", **decode_inputs())
    assert "* numba" in ra.explain("prefill_attention", **chunk_inputs(), align="end")


def test_there_is_no_gradient() -> None:
    inputs = decode_inputs()
    inputs["q"].requires_grad_()
    with pytest.raises(RuntimeError, match="paged_attention has no gradient"):
        rt.paged_attention(**inputs).sum().backward()


# ---- new keys and values


def step_inputs(pair: bool = False) -> dict[str, Any]:
    random = torch.Generator().manual_seed(2)
    kv_pages: Any = torch.randn(6, 4, 2 * K, D, generator=random)
    if pair:
        kv_pages = (kv_pages[:, :, 0::2].contiguous(), kv_pages[:, :, 1::2].contiguous())
    return {
        "q": torch.randn(5, H, D, generator=random),
        "kv_pages": kv_pages,
        "kv_lens": torch.tensor([3, 8], dtype=torch.int32),
        "page_indices": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
        "cu_q_lens": torch.tensor([0, 2, 5], dtype=torch.int32),
        "new_kv": (torch.randn(5, K, D, generator=random), torch.randn(5, K, D, generator=random)),
    }


def held(kv_pages: Any) -> list[torch.Tensor]:
    return [array.clone() for array in (kv_pages if isinstance(kv_pages, tuple) else (kv_pages,))]


def step(**inputs: Any) -> Any:
    return rt.ragged_paged_attention(**inputs, return_lse=True)


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("num_seqs", [None, 1, torch.tensor([1], dtype=torch.int32)], ids=["none", "int", "array"])
def test_new_keys_are_written_and_then_seen(pair: bool, num_seqs: Any) -> None:
    inputs = step_inputs(pair) | {"num_seqs": num_seqs, "k_scale": 0.5}
    other = step_inputs(pair) | {"num_seqs": num_seqs, "k_scale": 0.5}
    k, v = other.pop("new_kv")
    tables = {name: other[name] for name in ("kv_lens", "page_indices", "cu_q_lens", "num_seqs", "k_scale")}
    rt.write_kv_pages(k, v, other["kv_pages"], **tables)
    out, lse, given = step(**inputs)
    assert given is inputs["kv_pages"]
    for got, want in zip(held(given), held(other["kv_pages"]), strict=True):
        assert torch.equal(got, want)
    for got, want in zip((out, lse), step(**other), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_step_that_writes_compiles_into_one_graph(pair: bool, compiler: str) -> None:
    torch._dynamo.reset()
    eager, traced = step_inputs(pair), step_inputs(pair)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own internals
        compiled = torch.compile(step, fullgraph=True, backend=compiler)
        for got, want in zip(compiled(**traced)[:2], step(**eager)[:2], strict=True):
            torch.testing.assert_close(got, want)
    for got, want in zip(held(traced["kv_pages"]), held(eager["kv_pages"]), strict=True):
        assert torch.equal(got, want)


def test_a_list_will_do_for_the_pair() -> None:
    inputs = step_inputs()
    inputs["new_kv"] = list(inputs["new_kv"])
    torch.testing.assert_close(step(**inputs)[0], step(**step_inputs())[0])


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"sliding_window": 0}, ra.InvalidInput, "expected sliding_window >= 1, got 0"),
        ({"new_kv": (torch.ones(3, K, D),) * 2}, ra.InvalidInput, r"expected new_kv\[0\].shape to be \[T, K, D\]"),
        ({"options": {"fused_update": True}}, ra.InvalidInput, "expected options among block_q, block_kv"),
        ({"backend": "xla"}, ra.Unsupported, "no backend asked for takes this ragged_paged_attention call"),
        ({"kv_lens": torch.ones(2)}, ra.InvalidInput, "expected kv_lens.dtype to be int32, got float32"),
    ],
)
def test_a_call_that_is_refused_writes_nothing(changes: Any, error: type[Exception], text: str) -> None:
    inputs = step_inputs()
    with pytest.raises(error, match=text):
        step(**inputs | changes)
    assert torch.equal(inputs["kv_pages"], step_inputs()["kv_pages"])


def test_a_call_whose_values_are_refused_writes_nothing() -> None:
    inputs = step_inputs() | {"kv_lens": torch.tensor([1, 8], dtype=torch.int32)}
    with ra.use_backend(validate="full"), pytest.raises(ra.InvalidInput, match=r"expected q_len <= kv_lens\[0\] = 1"):
        step(**inputs)
    assert torch.equal(inputs["kv_pages"], step_inputs()["kv_pages"])


def test_a_writing_call_is_explained() -> None:
    assert "* numba" in ra.explain("ragged_paged_attention", **step_inputs())
