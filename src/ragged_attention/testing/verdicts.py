"""What becomes of a check: the one place that distinguishes a failure, a refusal and a success."""

import dataclasses
import time

from ragged_attention.testing.drawing import Check
from ragged_attention.testing.runner import ANSWERED, DECLINED, Declined, Runner


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of one check."""

    check: str
    result: str  # passed | declined | FAILED
    taken: int = 0  # batches that were judged
    seconds: float = 0.0
    message: str = ""
    hung: bool = False
    answered: tuple[str, ...] = ()  # the operations that the backend ran
    declined: int = 0  # batches that it refused
    reasons: tuple[str, ...] = ()  # its commonest reasons to refuse, each with its count


def verdict_of(runner: Runner, check: Check, examples: int) -> Verdict:
    """Run a check on a backend."""
    ANSWERED.clear()
    DECLINED.clear()
    begun, taken, result, message = time.perf_counter(), 0, "passed", ""
    try:
        with runner.around():
            taken = check.run(runner, examples)
        if not taken:
            result, message = "declined", f"nothing was judged{_commonest()}"
    except Declined as refusal:
        result, message = "declined", str(refusal)
    except Exception as error:  # whatever a kernel of others may raise is a failure, and the next check goes on
        result, message = "FAILED", _described(error)
    answered = tuple(sorted(operation for operation, backend in ANSWERED if backend == runner.backend))
    return Verdict(
        str(check), result, taken, time.perf_counter() - begun, message,
        answered=answered, declined=DECLINED.total(), reasons=_reasons(),
    )  # fmt: skip


def _reasons() -> tuple[str, ...]:
    return tuple(f"{reason} ({count})" for reason, count in DECLINED.most_common(3))


def _commonest() -> str:
    return "".join(f": {reason}" for reason, _ in DECLINED.most_common(1))


def _described(error: Exception) -> str:
    """An error with the batch that Hypothesis shrank it to."""
    lines = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
    if "are NaN in one" in lines[0]:
        lines.append("What no query may see holds NaN in these batches, and a weight of 0 times NaN is NaN.")
    return "\n".join(lines)
