"""Comparisons of our attention with transformers' own, and their outcomes."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from ragged_attention.errors import Unsupported
from ragged_attention.integrations import transformers as ragged

Result = tuple[torch.Tensor, ...]
Run = Callable[[Any, str], Result]  # runs a model with the attention of this name

EAGER, SDPA = "eager", "sdpa"
ALLOWED = 1e-4  # the largest relative error of our results (by norms) in float32
ULP = 2.0**-8  # one rounding step of bfloat16
EQUAL, DIFFERS, REFUSED, CRASHES, NOT_JUDGED = "equal", "differs", "refused", "crashes", "not judged"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a check: one of the five words, and the reason or the error."""

    word: str
    why: str = ""


def brief(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, Unsupported) else f"{type(error).__name__}: {text[:200]}"


def compare(model: Any, exact: Any, run: Run, *others: Run, ours: Any = None) -> Outcome:
    """Compare our attention with the eager attention of `exact`, which is the model in float32.

    If they differ, results of two other kinds also count as right. The first kind are the results of `others`, because
    transformers' own attention may be wrong in one way to use a model and right in another way. The second kind is the
    result of transformers' SDPA attention, because tokens of some models see padding, and there eager and SDPA differ.

    `ours` is the model that runs with our attention, if it is not `model`.
    """
    try:
        right, allowed = _reference(model, exact, run)
    except Exception as error:
        return Outcome(NOT_JUDGED, f"{EAGER}: {brief(error)}")
    try:
        found = _seeded(run, model if ours is None else ours, ragged.NAME)
    except Unsupported as error:
        return Outcome(REFUSED, brief(error))
    except Exception as error:
        return Outcome(CRASHES, brief(error))
    off = distance(found, right)
    if off <= allowed:
        return Outcome(EQUAL, f"{off:.1e}")

    def sdpa(model: Any, _: str) -> Result:
        return run(model, SDPA)

    for other in (*others, sdpa):
        with contextlib.suppress(Exception):
            right, allowed = _reference(model, exact, other)
            if distance(found, right) <= allowed:
                return Outcome(EQUAL, f"to {other.__name__}, else off by {off:.1e}")
    return Outcome(DIFFERS, f"{off:.1e}")


def _reference(model: Any, exact: Any, run: Run) -> tuple[Result, float]:
    """The right results, and the largest error allowed for ours.

    If `model` is not `exact`, we allow twice the error of its eager attention, plus one rounding step of bfloat16.
    """
    right = _seeded(run, exact, EAGER)
    if not all(bool(tensor.isfinite().all()) for tensor in right):
        raise ValueError("not finite")
    return right, ALLOWED if exact is model else 2 * distance(_seeded(run, model, EAGER), right) + ULP


def _seeded(run: Run, model: Any, attention: str) -> Result:
    torch.manual_seed(0)
    return run(model, attention)


def distance(found: Result, right: Result) -> float:
    """The largest relative error of any tensor, by norms. It is NaN if any of these errors is NaN."""
    offs = [(a.double() - b.double()).norm() / b.double().norm() for a, b in zip(found, right, strict=True)]
    return float(torch.stack(offs).max())
