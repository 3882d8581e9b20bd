"""The smallest and the largest soft caps give the reference results.

Logits divided by a tiny cap overflow, and divided by a huge cap they are subnormal, which some devices flush to 0.
"""

import importlib
import importlib.util
from typing import Any

import numpy as np
import pytest

from ragged_attention.testing import tpu_interpreter

TINY = float(np.finfo(np.float32).tiny)  # devices without subnormal numbers treat smaller values as 0
LARGEST = float(np.finfo(np.float32).max)  # many callers use this to mean "no cap"
HUGE = 1e36
# (magnitude of queries, magnitude of keys, cap). Logits are far above the cap, far below it, or reach it.
SIZES = {"a tiny cap": (100, 100, TINY), "no cap": (1, 1, LARGEST), "huge logits": (1e18, 1e18, HUGE),
         "the largest of both": (1e18, 2e19, LARGEST)}  # fmt: skip
ROWS = np.random.default_rng(0).standard_normal((4, 6, 2, 16)).astype(np.float32)
TABLE, KV_LENS, EDGES = np.array([[1, 0]], np.int32), np.array([6], np.int32), np.array([0, 6], np.int32)


def rows_of(case: str) -> tuple[np.ndarray, ...]:
    q_size, k_size, _ = SIZES[case]
    q, k = (ROWS[:2].astype(np.float64) * [[[[q_size]]], [[[k_size]]]]).astype(np.float32)
    k[2] = 0  # logits of 0 must not be multiplied by infinity, the reciprocal of a tiny cap
    return q, k, ROWS[2], ROWS[3]


def pages(case: str, heads_first: bool) -> tuple[np.ndarray, ...]:
    """K and V as two pages of four positions. The page table lists the second page first."""
    whole = np.zeros((2, 8, 2, 16), np.float32)
    whole[:, :6] = rows_of(case)[1:3]
    split = whole.reshape(2, 2, 4, 2, 16)[:, ::-1]
    return tuple(np.ascontiguousarray(each.transpose(2, 0, 1, 3)) if heads_first else each.copy() for each in split)


def arguments_of(operation: str, case: str) -> dict[str, Any]:
    q, k, v, _ = rows_of(case)
    scale = 100.0 if case == "a tiny cap" else None
    if operation == "ragged_paged_attention":
        tables = {"kv_lens": KV_LENS, "page_indices": TABLE, "cu_q_lens": EDGES}
        return {"q": q, "kv_pages": pages(case, False), **tables, "return_lse": True, "k_scale": scale}
    if operation == "ragged_mla_attention":
        tables = {"kv_lens": KV_LENS, "page_indices": TABLE, "cu_q_lens": EDGES}
        cache = pages(case, False)[0][:, :, :1]
        return {"q": q, "kv_cache": cache, **tables, "d_v": 16, "return_lse": True, "kv_scale": scale}
    if operation == "mla_decode":
        cache = pages(case, False)[0][:, :, :1]
        return {"q": q[None, :1], "kv_cache": cache, "page_indices": TABLE, "kv_lens": KV_LENS, "d_v": 16}
    if operation == "varlen_attention":
        return {"q": q, "k": k, "v": v, "cu_q_lens": EDGES, "cu_kv_lens": EDGES, "causal": True, "return_lse": True}
    k_pages, v_pages = pages(case, True)
    if operation == "paged_attention":
        lengths = {"lengths": KV_LENS, "page_indices": TABLE}
        return {"q": q[:1], "k_pages": k_pages, "v_pages": v_pages, **lengths}
    return {"q": q, "k_pages": k_pages, "v_pages": v_pages, "length": KV_LENS, "page_indices": TABLE[0]}


def front_of(framework: str) -> tuple[Any, Any]:
    """A framework's front end, and the function that converts NumPy arrays to its arrays."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    front = importlib.import_module(f"ragged_attention.{framework}")
    if framework == "jax":
        return front, importlib.import_module("jax.numpy").asarray
    return front, importlib.import_module("torch").from_numpy


def results(framework: str, backend: str, operation: str, case: str) -> list[np.ndarray]:
    front, bring = front_of(framework)
    given = {name: bring_all(bring, value) for name, value in arguments_of(operation, case).items()}
    found = getattr(front, operation)(**given, soft_cap=SIZES[case][2], backend=backend)
    return [np.asarray(each) for each in (found if isinstance(found, tuple) else (found,))]


def bring_all(bring: Any, value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(bring, value))
    return bring(value) if isinstance(value, np.ndarray) else value


def expect(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert all(np.isfinite(each).all() for each in expected)
    for each, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(each, want, rtol=2e-5, atol=2e-5)


OPERATIONS = [
    "ragged_paged_attention", "ragged_mla_attention", "mla_decode", "varlen_attention", "paged_attention",
    "prefill_attention",
]  # fmt: skip
BACKENDS = [("torch", "eager"), ("torch", "numba"), ("torch", "triton"), ("jax", "xla"), ("jax", "numba")]


@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("framework", "backend"), BACKENDS)
def test_a_cap_gives_what_the_definition_gives(framework: str, backend: str, operation: str, case: str) -> None:
    pytest.importorskip(backend if backend in ("numba", "triton") else framework)
    expect(results(framework, backend, operation, case), results(framework, "reference", operation, case))


@pytest.mark.parametrize("case", ["a tiny cap", "no cap"])  # the xla backend, with the same formula, runs all cases
@pytest.mark.parametrize("operation", [each for each in OPERATIONS if each != "varlen_attention"])
def test_a_cap_in_the_kernels_for_tpus(operation: str, case: str) -> None:
    pytest.importorskip("jax")
    expected = results("jax", "reference", operation, case)
    with tpu_interpreter.watched("eager"):
        found = results("jax", "pallas", operation, case)
    expect(found, expected)


@pytest.mark.parametrize("case", ["a tiny cap", "no cap"])  # with larger logits, rounding makes the weights meaningless
@pytest.mark.parametrize(("framework", "backend"), BACKENDS[:-1])
def test_the_gradient_under_a_cap(framework: str, backend: str, case: str) -> None:
    """Gradients equal the reference, even if a tiny cap makes weights nearly equal and the soft cap's slope is 0."""
    front, bring = front_of(framework)
    pytest.importorskip(backend if backend in ("numba", "triton") else framework)
    q, k, v, d_out = map(bring, rows_of(case))
    edges, soft_cap = bring(EDGES), SIZES[case][2]
    found = {}
    for name in (backend, "reference"):
        out, lse = front.varlen_attention(q, k, v, edges, edges, soft_cap=soft_cap, return_lse=True, backend=name)
        operation = importlib.import_module(f"ragged_attention.{framework}").varlen_attention_backward
        gradients = operation(d_out, q, k, v, out, lse, edges, edges, soft_cap=soft_cap, backend=name)
        found[name] = [np.asarray(each) for each in gradients if each is not None]
    for each, want in zip(*found.values(), strict=True):
        np.testing.assert_allclose(each, want, rtol=2e-5, atol=2e-5 * np.abs(want).max())
