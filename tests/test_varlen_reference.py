"""The reference gradients equal the derivatives of the reference operations, by finite differences in float64."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ragged_attention.reference.sparse_mla_prefill import sparse_mla_prefill
from ragged_attention.reference.sparse_mla_prefill_backward import sparse_mla_prefill_backward
from ragged_attention.reference.varlen_attention import varlen_attention
from ragged_attention.reference.varlen_attention_backward import varlen_attention_backward

STEP = 1e-5
Arrays = dict[str, Any]
# Sequences without queries, without keys, with more queries than keys; padding follows the last query and the last key.
EDGES = {"cu_q_lens": np.array([0, 3, 3, 5, 9, 10]), "cu_kv_lens": np.array([0, 4, 6, 6, 8, 9])}
FORMS = {
    "plain": {},
    "causal": {"causal": True},
    "causal in a window": {"causal": True, "sliding_window": 2},
    "in a window": {"sliding_window": 2},
    "capped": {"soft_cap": 0.9},
    "everything at once": {"causal": True, "sliding_window": 3, "soft_cap": 1.5, "sm_scale": -0.8},
    "no scale": {"sm_scale": 0.0},
}


def packed(seed: int, **changes: Any) -> Arrays:
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal(shape) for shape in ((11, 4, 3), (10, 2, 3), (10, 2, 5)))
    return {"q": q, "k": k, "v": v, **EDGES, **changes}


def sparse(seed: int, **changes: Any) -> Arrays:
    """Sparse prefill arguments. Lists have duplicates, -1 and indices out of range; `topk_lens` empties one list."""
    rng = np.random.default_rng(seed)
    indices = rng.integers(-2, 8, (4, 2, 6))
    indices[1, 0, :3] = 5
    lens = np.array([6, 4, 0, 9])
    arrays = {"q": rng.standard_normal((4, 4, 5)), "kv": rng.standard_normal((6, 2, 5)) / 2, "indices": indices}
    return arrays | {"d_v": 3, "topk_lens": lens} | changes


def finite(array: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(array), array, 0.0)


def differences(function: Callable[..., Any], arguments: Arrays, name: str, weights: tuple[Any, ...]) -> np.ndarray:
    """The derivative, for each element of one argument, of the weighted sum of a function's results."""

    def total(value: np.ndarray) -> float:
        results = function(**arguments | {name: value})
        return sum(
            float((finite(result) * weight).sum())
            for result, weight in zip(results, weights, strict=True)
            if weight is not None
        )

    value = arguments[name]
    found = np.zeros(value.shape)
    for index in np.ndindex(value.shape):
        step = np.zeros(value.shape)
        step[index] = STEP
        found[index] = (total(value + step) - total(value - step)) / (2 * STEP)
    return found


@pytest.mark.parametrize("bias", [None, (4, 3), (4, 12), (11, 4, 1), (11, 4, 7)], ids=str)
@pytest.mark.parametrize("with_sinks", [False, True], ids=["without sinks", "with sinks"])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_packed_attention(form: str, with_sinks: bool, bias: tuple[int, ...] | None) -> None:
    rng = np.random.default_rng(1)
    sinks = rng.standard_normal(4) if with_sinks else None
    table = None if bias is None else rng.standard_normal(bias)
    arguments = packed(2, sinks=sinks, relative_bias=table, **FORMS[form])
    out, lse = varlen_attention(**arguments)
    d_out, d_lse = rng.standard_normal(out.shape), rng.standard_normal(lse.shape)
    terms: Arrays = {"out": out, "lse": lse, "d_lse": d_lse}
    found: Any = varlen_attention_backward(d_out, **terms, **arguments, return_d_relative_bias=True)
    for name, gradient in zip(("q", "k", "v", "sinks", "relative_bias"), found, strict=True):
        if arguments[name] is None:
            assert gradient is None
            continue
        want = differences(varlen_attention, arguments, name, (d_out, d_lse))
        np.testing.assert_allclose(gradient, want, rtol=1e-6, atol=1e-8, err_msg=name)
    assert varlen_attention_backward(d_out, **terms, **arguments)[4] is None


@pytest.mark.parametrize("pages", [False, True], ids=["packed rows", "pages"])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["without sinks", "with sinks"])
def test_gradients_of_sparse_prefill(with_sinks: bool, pages: bool) -> None:
    rng = np.random.default_rng(3)
    arguments = sparse(4, sinks=rng.standard_normal(4) if with_sinks else None)
    if pages:
        arguments["kv"] = arguments["kv"].reshape(2, 3, 2, 5)
    out, _, lse = sparse_mla_prefill(**arguments)
    d_out, d_lse = rng.standard_normal(out.shape), rng.standard_normal(lse.shape)
    found: Any = sparse_mla_prefill_backward(d_out, out=out, lse=lse, d_lse=d_lse, **arguments)
    names = ("q", "kv", "sinks") if with_sinks else ("q", "kv")
    for name, gradient in zip(names, found, strict=False):
        want = differences(sparse_mla_prefill, arguments, name, (d_out, None, d_lse))
        np.testing.assert_allclose(gradient, want, rtol=1e-6, atol=1e-8, err_msg=name)
    assert with_sinks or found[2] is None


def test_what_takes_no_part_may_be_nan() -> None:
    clean = packed(5, causal=True)
    out, lse = varlen_attention(**clean)
    d_out = np.ones(out.shape)
    want = varlen_attention_backward(d_out, out=out, lse=lse, **clean)
    corrupted = {name: clean[name].copy() for name in ("q", "k", "v")}
    for name in ("k", "v"):
        corrupted[name][9:] = np.nan  # after the last sequence
        corrupted[name][4:6] = np.nan  # keys of a sequence without queries
    corrupted["q"][3:5], corrupted["q"][10:], d_out[10:] = np.nan, np.nan, np.nan
    got_out, got_lse = varlen_attention(**clean | corrupted)
    np.testing.assert_array_equal(got_out, out)
    got = varlen_attention_backward(d_out, out=got_out, lse=got_lse, **clean | corrupted)
    for name, mine, theirs in zip(("dq", "dk", "dv"), got, want, strict=False):
        np.testing.assert_array_equal(mine, theirs, err_msg=name)
