"""Checks that compare attention over packed sequences, and gradients, with the reference."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ragged_attention.testing.compare import agrees, identical
from ragged_attention.testing.rounded_weights import Allowance, allowance
from ragged_attention.testing.runner import Runner
from ragged_attention.testing.varlen.gradients import BackwardBatch, GradientBatch, Gradients, expected
from ragged_attention.testing.varlen.specs import VarlenBatch

RUNS = 5  # number of runs that must give the same bits
DETERMINISTIC = ("triton", "eager", "reference")  # backends whose dense gradients are always deterministic


def varlen_agrees(got: Any, want: Any, dtype: str, what: str = "", *, rounding: Allowance = 0.0) -> None:
    """Raise AssertionError unless out and lse of a call agree with those expected.

    In float32, only products and sums are rounded, so the bounds are those of other attention in float32.
    """
    kinds = ("float32", "lse float32") if dtype == "float32" else ("varlen out", "varlen lse")
    for name, mine, theirs, kind in zip(("out", "lse"), got, want, kinds, strict=True):
        agrees(mine, theirs, kind, f"{name}{what}", allowance=rounding if name == "out" else 0.0)


def gradients_agree(got: Mapping[str, Any], want: Mapping[str, Any], dtype: str, what: str = "") -> None:
    """Raise AssertionError unless gradients, by the names of their arguments, agree with those expected.

    The bounds of `out` also suit gradients, which are sums over few rows and keys of terms that are smaller than 1.
    """
    if got.keys() != want.keys():
        raise AssertionError(f"expected gradients of {', '.join(want)}, got {', '.join(got)}")
    for name, array in want.items():
        agrees(got[name], array, "float32" if dtype == "float32" else "gradient", f"d{name}{what}")


def check_varlen(runner: Runner, batch: VarlenBatch, options: Mapping[str, Any] | None = None) -> None:
    got = runner.run("varlen_attention", batch, options=options, return_lse=True)
    varlen_agrees(got, batch.expected(), batch.dtype, rounding=allowance(runner, batch))


def check_varlen_without_lse(runner: Runner, batch: VarlenBatch) -> None:
    out, lse = batch.expected()
    got = runner.run("varlen_attention", batch), lse
    varlen_agrees(got, (out, lse), batch.dtype, rounding=allowance(runner, batch))


def results_agree(
    got: Gradients, out: Any, lse: Any, batch: GradientBatch, what: str = "", *, rounding: Allowance = 0.0
) -> None:
    """Raise AssertionError unless out and lse of a differentiated call agree with those expected."""
    if isinstance(batch.forward, VarlenBatch):
        varlen_agrees((got.out, got.lse), (out, lse), batch.forward.dtype, what, rounding=rounding)
        return
    agrees(got.out, out, "prefill out", f"out{what}", allowance=rounding)
    agrees(got.lse, lse, "prefill lse", f"lse{what}")


def check_gradients(runner: Runner, batch: GradientBatch, options: Mapping[str, Any] | None = None) -> None:
    """Gradients agree with the reference, by automatic differentiation or, with `options`, by the backward operation.

    The expected gradients use the out and lse that the operation returned, because gradients amplify the rounding of
    out to 16 bits if one key has nearly all the weight. Out and lse are compared with the reference first.
    """
    if options:
        call = batch.backward(*batch.results())
        gradients_agree(runner.backward(call, options=options), expected(call), batch.forward.dtype)
        return
    got = runner.gradients(batch)
    want = batch.forward.expected()
    results_agree(got, want[0], want[-1], batch, rounding=allowance(runner, batch.forward))
    gradients_agree(got.of, expected(batch.backward(got.out, got.lse)), batch.forward.dtype)


def check_same_bits(runner: Runner, batch: GradientBatch) -> None:
    """Gradients have the same bits in every run, if `deterministic` is set or the backend is in DETERMINISTIC."""
    always = batch.operation == "varlen_attention" and runner.backend in DETERMINISTIC
    call: BackwardBatch = batch.change(deterministic=not always).backward(*batch.results())
    first = runner.backward(call)
    for _ in range(RUNS - 1):
        for name, array in runner.backward(call).items():
            identical(array, first[name], f"d{name}")


def rows_without_gradient(batch: GradientBatch) -> dict[str, np.ndarray]:
    """For each argument, whether an entry takes no part, so that its gradient is 0."""
    forward = batch.forward
    if isinstance(forward, VarlenBatch):
        unseen = forward.unseen()
        rows = {"q": forward.fully_masked_heads(), "k": unseen, "v": unseen}
        return rows if forward.relative_bias is None else rows | {"relative_bias": forward.unused_columns()}
    return {"q": forward.fully_masked_heads(), "kv": forward.selection.unread.reshape(forward.kv.shape[:-2])}
