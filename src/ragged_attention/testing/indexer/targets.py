"""Calls of `attention_target`, their comparison with the reference, and laws that need no reference."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ragged_attention.calls import CALLS
from ragged_attention.reference._kv_layout import Float64, decode
from ragged_attention.reference.attention_target import attention_target
from ragged_attention.testing.compare import agrees, identical
from ragged_attention.testing.indexer.specs import IndexerBatch, IndexerSpec
from ragged_attention.testing.integers import garbage
from ragged_attention.testing.runner import Runner

OPERATION = "attention_target"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TargetBatch(IndexerBatch):
    """The arguments of one `attention_target` call in NumPy. The call does not use `weights`."""

    OF_TOKENS = ("q", "weights", "lse")

    lse: NDArray[np.float32]
    sm_scale: float | None = None
    topk_lens: NDArray[np.int32] | None = None

    def arguments(self) -> dict[str, Any]:
        return {name: value for name, value in super().arguments().items() if name in CALLS[OPERATION].KINDS}

    def definition(self) -> dict[str, Any]:
        return self.arguments() | {name: decode(getattr(self, name), self.dtype) for name in ("q", "keys")}

    def seen(self) -> Any:
        for token, columns, rows in super().seen():
            counted = np.ones(len(columns), bool)
            if self.topk_lens is not None:
                counted = columns < self.topk_lens[token]
            if counted.any():
                yield token, columns[counted], rows[counted]

    def poisoned(self) -> Self:
        idle = np.ones(len(self.q), bool)
        for token, _, _ in self.seen():
            idle[token] = False
        return super().poisoned().change(lse=np.where(idle[:, None], np.float32(np.nan), self.lse))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetSpec:
    """The parameters of an `attention_target` call: those of an indexer call over packed keys, and a few more."""

    of: IndexerSpec
    sm_scale: float | None = None
    blind_heads: float = 0.0  # the fraction of lse that is -inf, as for heads without keys
    wider: bool = False  # whether the attention saw more keys than are listed, so that probabilities sum to less than 1
    lens: str | None = None  # kind of topk_lens: None, "any" or "wild"

    def build(self) -> TargetBatch:
        spec, rng = dataclasses.replace(self.of, poison=False), np.random.default_rng(self.of.seed + 1)
        forward = spec.build()
        values = {field.name: getattr(forward, field.name) for field in dataclasses.fields(forward)}
        lens, count = None, forward.columns
        if forward.indices is not None and self.lens is not None:
            size = len(forward.q)
            lens = garbage(rng, size, count) if self.lens == "wild" else rng.integers(0, count + 1, size, np.int32)
        lse = np.full(forward.q.shape[:2], -np.inf, np.float32)
        batch = TargetBatch(**values, lse=lse, sm_scale=self.sm_scale, topk_lens=lens)
        arguments = batch.definition()
        scale = forward.q.shape[2] ** -0.5 if self.sm_scale is None else self.sm_scale
        for token, _, rows in batch.seen():
            logits = scale * (arguments["q"][token] @ arguments["keys"][rows].T)
            lse[token] = np.logaddexp.reduce(logits, axis=1) + self.wider * rng.uniform(0, 3, len(logits))
        lse[rng.random(lse.shape) < self.blind_heads] = -np.inf
        batch = batch.change(lse=lse)
        return batch.poisoned() if self.of.poison else batch


def expected(batch: TargetBatch) -> Float64:
    return attention_target(**batch.definition())


def check_target(runner: Runner, batch: TargetBatch, options: Mapping[str, Any] | None = None) -> None:
    agrees(runner.run(OPERATION, batch, options=options), expected(batch), "float32", "target")


# ---- laws


def rows_sum_to_one(runner: Runner, spec: TargetSpec) -> None:
    batch = spec.build()
    target = runner.run(OPERATION, batch)
    sums, visible = np.zeros(len(batch.q)), np.zeros(target.shape, bool)
    for token, columns, _ in batch.seen():
        sums[token] = (batch.lse[token] > -np.inf).any()
        visible[token, columns] = True
    agrees(target.sum(axis=1), sums, "float32", "sum of a row")
    if target[~visible].any() or (target < 0).any():
        raise AssertionError("expected 0 for keys that are not seen, and nothing below it, got others")


def a_constant_drops_out(runner: Runner, spec: TargetSpec) -> None:
    """Adding a constant for each token to the lse of all heads changes nothing."""
    batch = spec.build()
    constant = np.random.default_rng(spec.of.seed).integers(-3, 4, (len(batch.q), 1)).astype(np.float32)
    other = runner.run(OPERATION, batch.change(lse=batch.lse + constant))
    agrees(other, runner.run(OPERATION, batch), "float32", "target")


def unseen_takes_no_part(runner: Runner, spec: TargetSpec) -> None:
    batch = spec.build()
    identical(runner.run(OPERATION, batch.poisoned()), runner.run(OPERATION, batch), "target")


def queries_do_not_mix(runner: Runner, spec: TargetSpec) -> None:
    batch = spec.build()
    target = runner.run(OPERATION, batch)
    for rows, alone in batch.parts():
        agrees(runner.run(OPERATION, alone), target[rows], "float32", "target of a part")


def ranges_are_lists(runner: Runner, spec: TargetSpec) -> None:
    """A list of a row's range, in any order, gives the same target as the range."""
    batch = dataclasses.replace(spec, of=dataclasses.replace(spec.of, listed=None)).build()
    rng, most = np.random.default_rng(spec.of.seed), max((len(columns) for _, columns, _ in batch.seen()), default=0)
    indices, places = np.full((2, len(batch.q), most + 1), -1, np.int32)
    for token, columns, rows in batch.seen():
        order = rng.permutation(len(columns))
        indices[token, : len(columns)], places[token, : len(columns)] = rows[order], columns[order]
    none = {"starts": None, "stops": None, "relative": False, "max_keys": None}
    target, want = runner.run(OPERATION, batch.change(indices=indices, **none)), runner.run(OPERATION, batch)
    got = np.zeros_like(want)
    token = np.broadcast_to(np.arange(len(places))[:, None], places.shape)
    got[token[places >= 0], places[places >= 0]] = target[places >= 0]
    agrees(got, want, "float32", "target")


def the_same_bits_again(runner: Runner, spec: TargetSpec) -> None:
    batch = spec.build()
    first = runner.run(OPERATION, batch)
    for _ in range(3):
        identical(runner.run(OPERATION, batch), first, "target")


LAWS: dict[str, Callable[[Runner, TargetSpec], None]] = {
    "rows of a target sum to 1": rows_sum_to_one,
    "a constant in lse drops out of a target": a_constant_drops_out,
    "unseen keys take no part in a target": unseen_takes_no_part,
    "queries of targets do not mix": queries_do_not_mix,
    "a target over ranges is one over lists": ranges_are_lists,
    "a target has the same bits again": the_same_bits_again,
}
