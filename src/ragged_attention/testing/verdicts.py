"""Run a check and determine whether it passed, was declined or failed."""

import contextlib
import dataclasses
import faulthandler
import sys
import time
from collections.abc import Iterator

from ragged_attention.testing import diagnosis, steering
from ragged_attention.testing.drawing import Check, Failure, in_frame
from ragged_attention.testing.runner import ANSWERED, DECLINED, Declined, Runner


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The outcome of one check."""

    check: str
    result: str  # passed | declined | FAILED
    taken: int = 0  # batches that the backend took
    seconds: float = 0.0
    message: str = ""
    hung: bool = False
    answered: tuple[str, ...] = ()  # the operations that the backend ran
    declined: int = 0  # batches that the backend declined
    refusals: tuple[tuple[str, int], ...] = ()  # the most common reasons for declined batches, each with its count
    batch: str = ""  # an expression that creates the smallest failing batch
    causes: tuple[str, ...] = ()  # likely causes of the failure, the most specific first

    @property
    def reasons(self) -> tuple[str, ...]:
        """The most common reasons for declined batches, as text."""
        return tuple(f"{reason} ({count})" for reason, count in self.refusals)


def verdict_of(runner: Runner, check: Check, examples: int) -> Verdict:
    """The verdict of a check on a runner's backend."""
    ANSWERED.clear()
    DECLINED.clear()
    begun, taken, result, message, batch, causes = time.perf_counter(), 0, "passed", "", "", ()
    try:
        with _traced(), runner.around():
            taken = in_frame(str(check), lambda: check.run(runner, examples))
        if not taken:
            result, message = "declined", f"nothing was judged{_commonest()}"
    except Declined as refusal:
        result, message = "declined", str(refusal)
    except Exception as error:  # any error of a kernel is a failure of this check only
        result, message = "FAILED", _described(error)
        batch, causes = _diagnosed(runner, getattr(error, "failure", None))
    answered = tuple(sorted(operation for operation, backend in ANSWERED if backend == runner.backend))
    return Verdict(
        str(check), result, taken, time.perf_counter() - begun, message,
        answered=answered, declined=DECLINED.total(), refusals=tuple(DECLINED.most_common(3)), batch=batch,
        causes=causes,
    )  # fmt: skip


@contextlib.contextmanager
def _traced() -> Iterator[None]:
    """Print the stack to standard error if a kernel kills this process by an access outside its arrays.

    The batch and the check appear in this stack, because `in_frame` names frames after them.
    """
    if faulthandler.is_enabled() or sys.__stderr__ is None:
        yield
        return
    faulthandler.enable(sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.disable()


def _commonest() -> str:
    return "".join(f": {reason}" for reason, _ in DECLINED.most_common(1))


def _diagnosed(runner: Runner, failure: Failure | None) -> tuple[str, tuple[str, ...]]:
    """The expression that creates a failure's batch, or "", and the likely causes."""
    if failure is None:
        return "", ()
    batch = ""
    try:
        with _traced(), runner.around():
            batch = steering.told(failure.batch)
            return batch, diagnosis.causes(runner, failure.batch, failure.check)
    except Exception as error:  # the kernel may fail differently on a similar batch
        return batch, (f"a similar batch raises {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}",)


def _described(error: Exception) -> str:
    """The text of an error, without Hypothesis's note of the batch if the verdict has the batch in a shorter form."""
    known = hasattr(error, "failure")
    notes = [note for note in getattr(error, "__notes__", ()) if not (known and note.startswith("Failing test case"))]
    lines = [f"{type(error).__name__}: {error}", *notes]
    if "are NaN in one" in lines[0]:
        lines.append("If keys that no query may see hold NaN, mask their values too: a weight of 0 times NaN is NaN.")
    return "\n".join(lines)
