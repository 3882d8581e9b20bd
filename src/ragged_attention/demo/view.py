"""The output of the demo: a line per step, the texts as they grow (live on a terminal), and the verdict."""

import dataclasses
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ragged_attention.demo.check import Verdict
from ragged_attention.demo.engine import Sequence, StepReport

COLUMNS = ("step", "prefill", "decode", "running", "waiting", "pages", "shared", "preempted")
PLAIN_TEXTS_EVERY = 16  # steps
SHOWN_MISMATCHES = 8


def readable(tokens: bytes | list[int]) -> str:
    """Bytes as text on one line, with a replacement mark for an incomplete character."""
    return bytes(tokens).decode("utf-8", "replace").replace("\n", "\\n")


class View:
    """Prints everything to one console. Without a terminal the output is plain lines."""

    def __init__(self, console: Console, title: str, num_pages: int, backends: str) -> None:
        self.console = console
        self.title = title
        self.num_pages = num_pages
        self.backends = backends
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> Self:
        self.line(self.title, style="bold")
        self.line("".join(f"{name:>{len(name) + 2}}" for name in COLUMNS) + "  backend", style="bold")
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._live.stop()

    def line(self, text: str | Text, style: str = "") -> None:
        self.console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    def step(self, number: int, report: StepReport, sequences: list[Sequence]) -> None:
        counts = dataclasses.asdict(report) | {"pages_used": f"{report.pages_used}/{self.num_pages}"}
        values = zip(COLUMNS, (number, *counts.values()), strict=True)
        numbers = "".join(f"{value:>{len(name) + 2}}" for name, value in values)
        self.line(f"{numbers}  {self.backends}")
        if self._live:
            self._live.update(Text("\n").join(map(self._tail, sequences)), refresh=True)
        elif number % PLAIN_TEXTS_EVERY == PLAIN_TEXTS_EVERY - 1:
            for sequence in sequences:
                if sequence.new_tokens and not sequence.finished:
                    self.line(self._whole(sequence))

    def texts(self, sequences: list[Sequence]) -> None:
        self.line("\nprompts and what was written", style="bold")
        for sequence in sequences:
            self.line(self._whole(sequence))

    def verdict(self, verdict: Verdict, checked_by: str) -> None:
        right = verdict.num_tokens - len(verdict.mismatches)
        self.line(
            f"\n{right} of {verdict.num_tokens} tokens equal those of {checked_by}",
            style="bold green" if verdict.agrees else "bold red",
        )
        self.line(
            f"largest difference of a logit {verdict.largest_difference:.1e}; "
            f"the closest choice was {verdict.closest_choice:.1e} ahead of the next"
        )
        for wrong in verdict.mismatches[:SHOWN_MISMATCHES]:
            self.line(
                f"#{wrong.sequence} new token {wrong.index}: served {bytes([wrong.served])!r}, "
                f"full attention {bytes([wrong.expected])!r}, ahead by {wrong.margin:.1e}"
            )

    def _whole(self, sequence: Sequence) -> Text:
        return Text.assemble(
            (f"#{sequence.number:<2} ", "cyan"),
            (readable(sequence.prompt), "dim"),
            " | " if not self.console.is_terminal else "",
            (readable(sequence.new_tokens), "bold"),
        )

    def _tail(self, sequence: Sequence) -> Text:
        """A line of the live display, with as much of the text's end as fits."""
        state = "done" if sequence.finished else "run" if sequence.pages else "wait"
        text = Text.assemble((readable(sequence.prompt), "dim"), (readable(sequence.new_tokens), "bold"))
        width = max(self.console.width - 12, 8)
        return Text.assemble((f"#{sequence.number:<2} {state:<5}", "cyan"), text[max(len(text) - width, 0) :])
