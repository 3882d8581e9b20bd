"""Errors of an emulated run: reports (the run continues), faults (the run ends) and unknown instructions."""

import dataclasses
import re
from collections.abc import Mapping, Sequence

LONGEST = 120  # the most characters of an instruction in a message; a wgmma lists up to 128 registers


class Fault(Exception):
    """An operation that no correct kernel does, and after which the run cannot continue.

    `text` says what happened. `line` is the line of the PTX and `instruction` its text. `source` is the line of the
    kernel's source, "file:line"; in a function that the kernel calls, the lines of the calls come first. `thread` is
    the first thread that did it, such as "CTA 3 thread 17". Fields that are not known are None.
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
    """An opcode, modifier or form of operand that the emulator does not know. It refuses such PTX and never guesses."""


class OutOfBounds(Fault):
    """An access outside the elements of every argument, or outside shared, local or parameter memory."""


class Misaligned(Fault):
    """An access at an address that is not a multiple of its size, or of the alignment that a copy requires."""


class Deadlock(Fault):
    """Threads wait at a barrier, at an mbarrier or in a loop for something that can no longer happen."""


class Diverged(Fault):
    """Only part of a warp or warpgroup executes an instruction that all of it must execute together."""


class Hazard(AssertionError):
    """The run ended, but the kernel is wrong, or is right only in some orders of its threads.

    `reports` has all reports. The class is that of the first report that raises: `Race`, `Uninitialised`, or `Hazard`
    itself for asynchronous copies that were never waited for and mbarriers that were not invalidated.
    """

    def __init__(self, text: str, reports: "Sequence[Report]" = ()) -> None:
        self.reports = tuple(reports)
        super().__init__(text)


class Race(Hazard):
    """Two accesses that no barrier, fence, wait or atomic operation orders, at least one of which writes."""


class Rounding(Race):
    """Two threads write float32 numbers that differ only in their last bits to one place. This is reported, not raised.

    Compilers make such code from correct kernels: threads that compute the same sum of products fuse different products
    into their additions. The result is correct within its rounding, but which thread's number remains is not defined.
    """


class Uninitialised(Hazard):
    """A read of memory that nobody has written, or a shuffle from a thread that does not take part."""


@dataclasses.dataclass
class Report:
    """An error that one instruction made `count` times. The other fields describe the first time, as in `Fault`."""

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
    """A message that consists of the place, `text` and, if they are known, the thread and the instruction."""
    if instruction and len(instruction) > LONGEST:
        instruction = f"{instruction[:LONGEST]}..."
    place = f"line {line}{f' ({source})' if source else ''}"
    return f"{place}: {text}{f', {thread}' if thread else ''}{f' [{instruction}]' if instruction else ''}"


class Reporter:
    """Collects reports. Reports of one PTX line whose texts differ only in numbers are merged, with the first text."""

    def __init__(self, sources: Mapping[int, str], instructions: Mapping[int, str]) -> None:
        self.sources, self.instructions = sources, instructions
        self.reports: dict[tuple[int, str], Report] = {}

    def say(self, line: int, text: str, details: str, thread: str | None, kind: type[Hazard]) -> None:
        """Count a report at a line of the PTX. Reports that differ only in `details` (numbers, places) are merged."""
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
