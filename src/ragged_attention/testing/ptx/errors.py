"""What a run tells: reports that let it go on, faults that end it, and instructions that nobody taught it."""

import dataclasses
import re
from collections.abc import Mapping


class Fault(Exception):
    """What no lawful kernel does; the run ends. `line` is that of the PTX, `source` ours ("file:line"), if known."""

    def __init__(self, text: str, line: int, source: str | None = None) -> None:
        self.line, self.source = line, source
        super().__init__(f"line {line}{f' ({source})' if source else ''}: {text}")


class Unknown(NotImplementedError):
    """An opcode, a modifier of one or a form of operand that is not known: refused, never guessed."""


@dataclasses.dataclass
class Report:
    """What one instruction was seen to do wrong, however often. `line` and `source` are as in `Fault`."""

    count: int
    text: str
    line: int
    source: str | None


class Reporter:
    """Collects reports: those of one line that differ in their numbers alone are one, with the first one's text."""

    def __init__(self, sources: Mapping[int, str]) -> None:
        self.sources = sources
        self.reports: dict[tuple[int, str], Report] = {}

    def say(self, line: int, text: str, details: str = "") -> None:
        """Count `text` against a line of the PTX; `details` (numbers, places) do not tell reports apart."""
        key = (line, re.sub(r"\d+", "#", text))
        whole = f"{text} ({details})" if details else text
        self.reports.setdefault(key, Report(0, whole, line, self.sources.get(line))).count += 1

    def fault(self, line: int, text: str) -> Fault:
        """The fault to raise for an instruction."""
        return Fault(text, line, self.sources.get(line))
