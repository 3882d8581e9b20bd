"""Kernels that round softmax weights to 16 bits pass if that is allowed. Coarser rounding fails."""

import contextlib
import dataclasses
from typing import Any
from unittest import mock

import numpy as np
import pytest

from ragged_attention.reference import ragged_paged_attention, sparse_mla_prefill
from ragged_attention.reference._softmax import softmax
from ragged_attention.testing.compare import agrees
from ragged_attention.testing.diagnosis.numbers import ROUNDED
from ragged_attention.testing.runner import Declined, Runner
from ragged_attention.testing.suite import checks
from ragged_attention.testing.verdicts import verdict_of

CHECKS = {str(check): check for check in checks()}
# For each family, checks that fail if weights have two bits fewer, even if rounding is allowed.
TELLING = (
    "corner: attention, head_dim 512",
    "corner: attention, e4m3 queries, 8-bit cache",
    "corner: attention, int8 cache, bfloat16 queries",
    "corner: update, one KV head, head_dim 128",
    "corner: paged decode, a long sequence",
    "corner: chunked prefill, head_dim 256",
    "corner: packed, 16 heads of one",
    "corner: sparse gradient, 576/512, 40 heads",
    "corner: strides of 0, attention",
)
# Checks that fail with correctly rounded weights, unless rounding is allowed.
CANCELLING = (
    "corner: attention, GQA ratio 3",
    "corner: attention, head_dim 512",
    "corner: update, int8",
    "corner: paged decode, head_dim 192",
    "corner: chunked prefill, head_dim 128",
)
KINDS = ("agreement: ", "law: ")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundingRunner(Runner):
    """The reference backend, whose softmax weights have `fewer_bits` bits fewer than the batch's dtype."""

    framework: str = "torch"
    backend: str = "reference"
    fewer_bits: int = 0

    def _call(self, operation: str, batch: Any, options: Any, **extra: Any) -> Any:
        def rounding(logits: Any, values: Any) -> Any:
            _, m_i, lse = softmax(logits, values)
            with np.errstate(invalid="ignore"):
                weights = np.exp(logits - np.where(m_i == -np.inf, 0.0, m_i)[:, None])
            total = np.where(m_i == -np.inf, 1.0, weights.sum(axis=1))
            return self._rounded(weights, batch.dtype) @ values / total[:, None], m_i, lse

        with contextlib.ExitStack() as stack:
            # The other operations call the softmax of these two modules.
            for module in (ragged_paged_attention, sparse_mla_prefill):
                stack.enter_context(mock.patch.object(module, "softmax", rounding))
            return super()._call(operation, batch, options, **extra)

    def _rounded(self, weights: Any, dtype: str) -> Any:
        bits = {"bfloat16": 8, "float16": 11}.get(dtype)
        if bits is None:
            return weights
        mantissa, exponent = np.frexp(weights)
        steps = 2.0 ** (bits - self.fewer_bits)
        return np.ldexp(np.round(mantissa * steps) / steps, exponent)


def run(name: str, **fields: Any) -> int:
    return CHECKS[name].run(RoundingRunner(**fields), 3)


@pytest.mark.parametrize("name", [*dict.fromkeys([*TELLING, *CANCELLING])])
def test_rounded_weights_pass_named_checks(name: str) -> None:
    assert run(name, rounded_weights=True)


@pytest.mark.parametrize("name", [name for name in CHECKS if name.startswith(KINDS)])
def test_rounded_weights_pass_drawn_batches_and_laws(name: str) -> None:
    with contextlib.suppress(Declined):
        run(name, rounded_weights=True)


@pytest.mark.parametrize("name", CANCELLING)
def test_rounded_weights_are_beyond_the_bounds_where_values_cancel(name: str) -> None:
    with pytest.raises(AssertionError, match="times the bound"):
        run(name)


@pytest.mark.parametrize("name", TELLING)
def test_coarser_weights_fail_all_the_same(name: str) -> None:
    with pytest.raises(AssertionError, match="times the bound"):
        run(name, rounded_weights=True, fewer_bits=2)


def test_rounding_is_told_as_the_cause() -> None:
    runner = RoundingRunner()
    verdict = verdict_of(runner, CHECKS["corner: attention, GQA ratio 3"], 1)
    assert verdict.result == "FAILED"
    assert verdict.causes[0] == ROUNDED
    coarser = verdict_of(dataclasses.replace(runner, fewer_bits=4), CHECKS["corner: attention, head_dim 512"], 1)
    assert ROUNDED not in coarser.causes


def test_empty_batches_have_an_allowance() -> None:
    for name in CHECKS:
        if name.startswith("corner: nothing to do"):
            run(name, rounded_weights=True)


def test_an_allowance_is_for_each_element() -> None:
    want, allowance = np.zeros((2, 3)), np.array([[0.1], [0.0]])
    agrees(want + allowance, want, "float32", allowance=allowance)
    with pytest.raises(AssertionError, match=r"out\[1, 0\]"):
        agrees(want + 0.1, want, "float32", allowance=allowance)
    with pytest.raises(AssertionError, match=r"out\[0, 0\]"):
        agrees(want + 0.11, want, "float32", allowance=0.1)
