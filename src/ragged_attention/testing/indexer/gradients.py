"""Calls of the gradient of the indexer's logits, and the comparison of their results with the reference.

A product is that of a query and a key here. The derivative of its relu jumps at 0. If rounding can change the sign of a
product, its term in a gradient is either added in full or left out. So each gradient may be wrong by the terms of such
products (`allowances`). A gradient of 16 bits may also be wrong by the rounding of each term's coefficient.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ragged_attention.calls import CALLS
from ragged_attention.reference._kv_layout import decode
from ragged_attention.reference.indexer_logits_backward import indexer_logits_backward
from ragged_attention.testing.compare import agrees
from ragged_attention.testing.indexer.specs import IndexerBatch, IndexerSpec
from ragged_attention.testing.runner import Runner

OPERATION = "indexer_logits_backward"
NAMES = ("d_q", "d_keys", "d_weights")
SIZES = {"float32": 0.3, "float16": 0.03, "bfloat16": 0.03}  # scale of d_logits, for which gradients are about 1
NEAR_ZERO = 1e-5  # products below this fraction of their terms' summed magnitudes may get either sign
COEFFICIENTS = {
    "float32": 0.0,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
}  # relative errors of rounded coefficients, by dtype
DEVIATIONS = 4  # standard deviations that a sum of rounding errors may reach


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LogitsGradientBatch(IndexerBatch):
    """The arguments of one `indexer_logits_backward` call in NumPy."""

    OF_TOKENS = ("q", "weights", "d_logits")

    d_logits: NDArray[np.float32]

    def arguments(self) -> dict[str, Any]:
        return {name: value for name, value in super().arguments().items() if name in CALLS[OPERATION].KINDS}

    def definition(self) -> dict[str, Any]:
        return self.arguments() | {name: decode(getattr(self, name), self.dtype) for name in ("q", "keys")}

    def visible(self) -> NDArray[np.bool_]:
        """Whether each token sees each column, bool [T, N]."""
        visible = np.zeros((len(self.q), self.columns), bool)
        for token, columns, _ in self.seen():
            visible[token, columns] = True
        return visible

    def poisoned(self) -> Self:
        """The batch poisoned like its forward call, with NaN and infinities as gradients of logits that are -inf."""
        poison = np.where(np.arange(self.columns) % 2, np.float32(np.nan), np.float32(np.inf))
        return super().poisoned().change(d_logits=np.where(self.visible(), self.d_logits, poison))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogitsGradientSpec:
    """The parameters of a gradient: those of its forward call, whose keys are packed and have the queries' dtype."""

    of: IndexerSpec

    def build(self) -> LogitsGradientBatch:
        spec = dataclasses.replace(self.of, poison=False)
        forward, rng = spec.build(), np.random.default_rng(spec.seed + 1)
        shape = (len(forward.q), forward.columns)
        if spec.exact:
            d_logits = rng.integers(-2, 3, shape)
        else:
            d_logits = rng.standard_normal(shape) * SIZES[spec.dtype] * spec.heads**-0.5
        values = {field.name: getattr(forward, field.name) for field in dataclasses.fields(forward)}
        batch = LogitsGradientBatch(**values, d_logits=d_logits.astype(np.float32))
        return batch.poisoned() if self.of.poison else batch


def allowances(batch: LogitsGradientBatch) -> tuple[NDArray[np.float64], ...]:
    """The errors that each gradient may have in addition to those of float32 sums."""
    arguments = batch.definition()
    q, keys, weights = (np.asarray(arguments[name], np.float64) for name in ("q", "keys", "weights"))
    scale = np.ones(len(keys)) if batch.key_scale is None else batch.key_scale.astype(np.float64)
    whole = [np.zeros(array.shape) for array in (q, keys, weights)]
    squares = [np.zeros(array.shape) for array in (q, keys, weights)]
    for token, columns, rows in batch.seen():
        mine, listed = np.abs(q[token]), np.abs(keys[rows])
        products = q[token] @ keys[rows].T
        d_sums = np.abs(batch.d_logits[token, columns] * scale[rows])
        coefficients = np.abs(weights[token])[:, None] * d_sums
        either = (products != 0) & (np.abs(products) < NEAR_ZERO * (mine @ listed.T))
        whole[0][token] += (coefficients * either) @ listed
        np.add.at(whole[1], rows, (coefficients * either).T @ mine)
        whole[2][token] += NEAR_ZERO * (mine @ listed.T * either) @ d_sums
        counted = np.where(products > 0, coefficients, 0.0)
        squares[0][token] += counted**2 @ listed**2
        np.add.at(squares[1], rows, (counted**2).T @ mine**2)
    rounding = DEVIATIONS * COEFFICIENTS[batch.dtype]
    return tuple(each + rounding * np.sqrt(square) for each, square in zip(whole, squares, strict=True))


def gradients_agree(got: tuple[Any, ...], want: tuple[Any, ...], batch: LogitsGradientBatch, what: str = "") -> None:
    """Raise AssertionError unless d_q, d_keys and d_weights are as expected."""
    for name, mine, theirs, allowance in zip(NAMES, got, want, allowances(batch), strict=True):
        kind = "float32" if batch.dtype == "float32" or name == "d_weights" else "gradient"
        agrees(mine, theirs, kind, f"{name}{what}", allowance=allowance)


def check_gradient(runner: Runner, batch: LogitsGradientBatch, options: Mapping[str, Any] | None = None) -> None:
    got = runner.run(OPERATION, batch, options=options)
    gradients_agree(got, indexer_logits_backward(**batch.definition()), batch)
