"""Errors of a run: reports that let it go on, faults that end it, and instructions that nobody taught it."""

import dataclasses
import re
from collections.abc import Mapping, Sequence

LONGEST = 120  # characters of an instruction that a message shows: a wgmma lists up to 128 registers


class Fault(Exception):
    """No correct kernel does this, and the run cannot go on.

    `line` is the line of the PTX, `instruction` its text, `source` the line of the kernel's source ("file:line", after
    those that call the function it is in), and `thread` the first thread that did it ("CTA 3 thread 17"). Those that
    are not known are None. `text` says what happened.
    """

    def __init__(
        self,
        text: str,
        line: int,
        source: str | None = None,
        thread: str | None = None,
        instruction: str | None = None,
    ) -> None:
        self.text, self.line, self.source, self.thread, self.instruction = text, line, source, thread, instruction
        super().__init__(text, line, source, thread, instruction)

    def __str__(self) -> str:
        return located(self.text, self.line, self.source, self.thread, self.instruction)


class Unknown(NotImplementedError):
    """An opcode, a modifier of one or a form of operand that is not known: it is refused, never guessed."""


class OutOfBounds(Fault):
    """An access outside the elements of every argument, or outside shared, local or parameter memory."""


class Misaligned(Fault):
    """An access at an address that is not a multiple of its size, or of the alignment that a copy asks for."""


class Deadlock(Fault):
    """Threads wait at a barrier, at an mbarrier or in a loop for something that can no longer happen."""


class Diverged(Fault):
    """Part of a warp or warpgroup executes what all of it must execute together."""


class Hazard(AssertionError):
    """A run ended, but the kernel is wrong, or right only in some order of its threads; `reports` has all reports.

    The class is that of the first report that raises: `Race`, `Uninitialised`, or this one for asynchronous copies that
    were never waited for and mbarriers that were not invalidated.
    """

    def __init__(self, text: str, reports: "Sequence[Report]" = ()) -> None:
        self.reports = tuple(reports)
        super().__init__(text)


class Race(Hazard):
    """Two accesses that no barrier, fence, wait or atomic operation orders, at least one of which writes."""


class Rounding(Race):
    """Two threads write float32 numbers that differ in their last bits alone to one place; only reported, not raised.

    Compilers make such code of a right kernel: threads that compute the same sum of products fuse other products into
    their additions. The result is right within its rounding, but which of the numbers stays is not defined.
    """


class Uninitialised(Hazard):
    """A read of memory that nobody has written, or of a register of a thread that does not take part."""


@dataclasses.dataclass
class Report:
    """What one instruction was seen to do wrong, `count` times. The other fields are those of `Fault`, of the first."""

    count: int
    text: str
    line: int
    source: str | None
    thread: str | None
    instruction: str | None
    kind: type[Hazard]

    def __str__(self) -> str:
        times = f", {self.count} times" if self.count > 1 else ""
        return located(f"{self.text}{times}", self.line, self.source, self.thread, self.instruction)


def located(text: str, line: int, source: str | None, thread: str | None, instruction: str | None) -> str:
    """A text with the place where it happened."""
    if instruction and len(instruction) > LONGEST:
        instruction = f"{instruction[:LONGEST]}..."
    place = f"line {line}{f' ({source})' if source else ''}"
    return f"{place}: {text}{f', {thread}' if thread else ''}{f' [{instruction}]' if instruction else ''}"


class Reporter:
    """Collects reports: those of one line that differ only in their numbers are one, with the first one's text."""

    def __init__(self, sources: Mapping[int, str], instructions: Mapping[int, str]) -> None:
        self.sources, self.instructions = sources, instructions
        self.reports: dict[tuple[int, str], Report] = {}

    def say(self, line: int, text: str, details: str, thread: str | None, kind: type[Hazard]) -> None:
        """Count `text` against a line of the PTX; `details` (numbers, places) do not tell reports apart."""
        key = (line, re.sub(r"\d+", "#", text))
        if key not in self.reports:
            whole = f"{text} ({details})" if details else text
            self.reports[key] = Report(0, whole, line, *self._place(line, thread), kind)
        self.reports[key].count += 1

    def fault(self, line: int, text: str, thread: str | None, kind: type[Fault]) -> Fault:
        """The fault to raise for an instruction."""
        return kind(text, line, *self._place(line, thread))

    def _place(self, line: int, thread: str | None) -> tuple[str | None, str | None, str | None]:
        return self.sources.get(line), thread, self.instructions.get(line)
