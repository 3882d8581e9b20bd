"""The smallest caps on logits: finite results, as in the definition, where an input over the cap overflows."""

import importlib
import importlib.util
from typing import Any

import numpy as np
import pytest

from ragged_attention.testing import tpu_interpreter

TINY = float(np.finfo(np.float32).tiny)  # smaller ones count as 0 on devices without subnormal numbers
rng = np.random.default_rng(0)
Q, K, V, D_OUT = 100 * rng.standard_normal((4, 6, 2, 16)).astype(np.float32)
K[2] = 0  # logits of 0, which are not to be multiplied by infinity
TABLE, KV_LENS, EDGES = np.array([[1, 0]], np.int32), np.array([6], np.int32), np.array([0, 6], np.int32)


def pages(heads_first: bool) -> tuple[np.ndarray, ...]:
    """K and V as two pages of four positions, of which the table lists the second one first."""
    whole = np.zeros((2, 8, 2, 16), np.float32)
    whole[:, :6] = K, V
    split = whole.reshape(2, 2, 4, 2, 16)[:, ::-1]
    return tuple(np.ascontiguousarray(each.transpose(2, 0, 1, 3)) if heads_first else each.copy() for each in split)


def arguments_of(operation: str) -> dict[str, Any]:
    if operation == "ragged_paged_attention":
        tables = {"kv_lens": KV_LENS, "page_indices": TABLE, "cu_q_lens": EDGES}
        return {"q": Q, "kv_pages": pages(False), **tables, "return_lse": True, "k_scale": 100.0}
    if operation == "ragged_mla_attention":
        tables = {"kv_lens": KV_LENS, "page_indices": TABLE, "cu_q_lens": EDGES}
        cache = pages(False)[0][:, :, :1]
        return {"q": Q, "kv_cache": cache, **tables, "d_v": 16, "return_lse": True, "kv_scale": 100.0}
    if operation == "varlen_attention":
        return {"q": Q, "k": K, "v": V, "cu_q_lens": EDGES, "cu_kv_lens": EDGES, "causal": True, "return_lse": True}
    k_pages, v_pages = pages(True)
    if operation == "paged_attention":
        lengths = {"lengths": KV_LENS, "page_indices": TABLE}
        return {"q": Q[:1], "k_pages": k_pages, "v_pages": v_pages, **lengths}
    return {"q": Q, "k_pages": k_pages, "v_pages": v_pages, "length": KV_LENS, "page_indices": TABLE[0]}


def results(framework: str, backend: str, operation: str) -> list[np.ndarray]:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    front = importlib.import_module(f"ragged_attention.{framework}")
    bring = importlib.import_module("jax.numpy").asarray if framework == "jax" else front_of_torch
    given = {name: bring_all(bring, value) for name, value in arguments_of(operation).items()}
    found = getattr(front, operation)(**given, soft_cap=TINY, backend=backend)
    return [np.asarray(each) for each in (found if isinstance(found, tuple) else (found,))]


def front_of_torch(array: np.ndarray) -> Any:
    return importlib.import_module("torch").from_numpy(array)


def bring_all(bring: Any, value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(bring, value))
    return bring(value) if isinstance(value, np.ndarray) else value


OPERATIONS = [
    "ragged_paged_attention", "ragged_mla_attention", "varlen_attention", "paged_attention", "prefill_attention",
]  # fmt: skip


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("framework", "backend"), [("torch", "eager"), ("jax", "xla")])
def test_a_small_cap_gives_what_the_definition_gives(framework: str, backend: str, operation: str) -> None:
    expected = results(framework, "reference", operation)
    assert all(np.isfinite(each).all() for each in expected)
    for found, want in zip(results(framework, backend, operation), expected, strict=True):
        np.testing.assert_allclose(found, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("operation", OPERATIONS[:2])
def test_a_small_cap_in_the_kernel_for_tpus(operation: str) -> None:
    pytest.importorskip("jax")
    expected = results("jax", "reference", operation)
    with tpu_interpreter.watched("eager"):
        found = results("jax", "pallas", operation)
    for each, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(each, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_the_gradient_under_a_small_cap(framework: str) -> None:
    """Nearly all weights are equal, and logits at the cap have no slope."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    front = importlib.import_module(f"ragged_attention.{framework}")
    bring = importlib.import_module("jax.numpy").asarray if framework == "jax" else front_of_torch
    given = [bring(array) for array in (Q, K, V, EDGES, EDGES)]
    found = {}
    for backend in ({"torch": "eager", "jax": "xla"}[framework], "reference"):
        out, lse = front.varlen_attention(*given, soft_cap=TINY, return_lse=True, backend=backend)
        operation = importlib.import_module(f"ragged_attention.{framework}.varlen").varlen_attention_backward
        gradients = operation(bring(D_OUT), *given[:3], out, lse, *given[3:], soft_cap=TINY, backend=backend)
        found[backend] = [np.asarray(each) for each in gradients if each is not None]
    for each, want in zip(*found.values(), strict=True):
        np.testing.assert_allclose(each, want, rtol=2e-5, atol=2e-5 * np.abs(want).max())
