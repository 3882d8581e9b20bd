"""What becomes of a check: the one place that distinguishes a failure, a refusal and a success."""

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
    """What became of one check."""

    check: str
    result: str  # passed | declined | FAILED
    taken: int = 0  # batches that were judged
    seconds: float = 0.0
    message: str = ""
    hung: bool = False
    answered: tuple[str, ...] = ()  # the operations that the backend ran
    declined: int = 0  # batches that it refused
    refusals: tuple[tuple[str, int], ...] = ()  # its commonest reasons to refuse, each with its count
    batch: str = ""  # the smallest batch that fails, as the expression that makes it
    causes: tuple[str, ...] = ()  # what is probably wrong, the most telling first

    @property
    def reasons(self) -> tuple[str, ...]:
        """The commonest reasons to refuse a batch, in words."""
        return tuple(f"{reason} ({count})" for reason, count in self.refusals)


def verdict_of(runner: Runner, check: Check, examples: int) -> Verdict:
    """Run a check on a backend."""
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
    except Exception as error:  # whatever a kernel of others may raise is a failure, and the next check goes on
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
    """If a kernel ends this process by a step outside its arrays, standard error shows the line that did it.

    Below it are the batch and the check, which `in_frame` names.
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
    """The batch of a failure, if a structure describes it, and the likely causes."""
    if failure is None:
        return "", ()
    batch = ""
    try:
        with _traced(), runner.around():
            batch = steering.told(failure.batch)
            return batch, diagnosis.causes(runner, failure.batch, failure.check)
    except Exception as error:  # of the kernel, which may fail on a batch like this one in another way
        return batch, (f"a batch like it ends in {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}",)


def _described(error: Exception) -> str:
    """An error without Hypothesis's note of the batch if the verdict has the batch in a shorter form."""
    known = hasattr(error, "failure")
    notes = [note for note in getattr(error, "__notes__", ()) if not (known and note.startswith("Failing test case"))]
    lines = [f"{type(error).__name__}: {error}", *notes]
    if "are NaN in one" in lines[0]:
        lines.append("Where what no query may see holds NaN, mask the values too: a weight of 0 times NaN is NaN.")
    return "\n".join(lines)
