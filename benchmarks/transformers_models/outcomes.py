"""Our attention beside transformers' own: how a comparison went."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from ragged_attention.errors import Unsupported
from ragged_attention.integrations import transformers as ragged

Result = tuple[torch.Tensor, ...]
Run = Callable[[Any, str], Result]  # of a model, with the attention of this name

EAGER, SDPA = "eager", "sdpa"
ALLOWED = 1e-4  # in float32: the norm of what differs, by the norm of what is right
ULP = 2.0**-8  # of bfloat16
EQUAL, DIFFERS, REFUSED, CRASHES, NOT_JUDGED = "equal", "differs", "refused", "crashes", "not judged"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a check went: one of the five words, and why or by how much."""

    word: str
    why: str = ""


def brief(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, Unsupported) else f"{type(error).__name__}: {text[:200]}"


def compare(model: Any, exact: Any, run: Run, *others: Run, ours: Any = None) -> Outcome:
    """Our attention must give what the exact model's own does, which is the model in float32.

    Where it does not, what `others` give counts as right too, since transformers' own may be wrong in one way to use a
    model and right in another; so does what its SDPA attention gives, since tokens of some models see padding, where
    the two differ. `ours` is the model that runs with our attention, if it is another one.
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
    """What is right, and how far off ours may be: twice as far as the model's own, and a step of its numbers."""
    right = _seeded(run, exact, EAGER)
    if not all(bool(tensor.isfinite().all()) for tensor in right):
        raise ValueError("not finite")
    return right, ALLOWED if exact is model else 2 * distance(_seeded(run, model, EAGER), right) + ULP


def _seeded(run: Run, model: Any, attention: str) -> Result:
    torch.manual_seed(0)
    return run(model, attention)


def distance(found: Result, right: Result) -> float:
    """The norm of the difference by the norm, of the tensor that is most off; NaN if anything is."""
    offs = [(a.double() - b.double()).norm() / b.double().norm() for a, b in zip(found, right, strict=True)]
    return float(torch.stack(offs).max())
