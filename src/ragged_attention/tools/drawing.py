"""Pictures of a batch and its schedule, as SVG that is readable on light and on dark pages."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any
from xml.sax.saxutils import escape

from ragged_attention.tools.schedule import Launch, Program, timeline

Box = tuple[float, float, float, float]  # x, y, width, height

LEFT, WIDTH, RIGHT = 200, 560, 40  # the columns of a picture: labels, boxes, margin
LIGHT = """
text { font: 12px system-ui, sans-serif; fill: #24292f } .small { font-size: 10px } .quiet { fill: #57606a }
.head { font-weight: 600 } .one { fill: #0969da } .two { fill: #9a6700 } .three { fill: #8250df }
.four { fill: #1a7f37 } .grey { fill: #8c959f } .faint { fill: #8c959f40 }
.line { stroke: #57606a; fill: none } .dotted { stroke: #57606a; stroke-dasharray: 3 3 }
.on { fill: #ffffff; font-size: 10px }
"""
DARK = """
text { fill: #e6edf3 } .quiet { fill: #9198a1 } .line, .dotted { stroke: #9198a1 } .on { fill: #0d1117 }
.one { fill: #2f81f7 } .two { fill: #d29922 } .three { fill: #a371f7 } .four { fill: #3fb950 } """
STYLES = {
    "as the page": f"{LIGHT}@media (prefers-color-scheme: dark) {{{DARK}}}\n",
    "light": LIGHT,
    "dark": f"{LIGHT}{DARK.lstrip()}\n",
}


def number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


class Drawing:
    """SVG elements in the order in which they are drawn, and the height that they need."""

    def __init__(self, title: str, description: str, width: int = LEFT + WIDTH + RIGHT) -> None:
        self.title, self.description, self.width = title, description, width
        self.height = 0.0
        self.marks: list[str] = []

    def text(self, x: float, y: float, text: object, kind: str = "", anchor: str = "") -> None:
        kind = f' class="{kind}"' if kind else ""
        anchor = f' text-anchor="{anchor}"' if anchor else ""
        self.marks.append(f'<text x="{number(x)}" y="{number(y)}"{kind}{anchor}>{escape(str(text))}</text>')
        self.height = max(self.height, y + 6)

    def boxes(self, kind: str, boxes: Iterable[Box]) -> None:
        """Draw boxes of one colour as one path."""
        path = ""
        for x, y, width, height in boxes:
            path += f"M{number(x)} {number(y)}h{number(width)}v{number(height)}h{number(-width)}z"
            self.height = max(self.height, y + height + 6)
        if path:
            self.marks.append(f'<path class="{kind}" d="{path}"/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str = "line", dashes: str = "") -> None:
        """Draw a line; `dashes` has the lengths of its dashes and gaps, which replace those of the kind."""
        ends = f'x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}"'
        style = f' style="stroke-dasharray: {dashes}"' if dashes else ""
        self.marks.append(f'<line class="{kind}" {ends}{style}/>')
        self.height = max(self.height, y1 + 6, y2 + 6)

    def legend(self, x: float, y: float, entries: Iterable[tuple[str, str]]) -> None:
        """Draw coloured boxes side by side, each with its meaning."""
        for kind, text in entries:
            self.boxes(kind, [(x, y - 9, 10, 10)])
            self.text(x + 15, y, text, "small")
            x += 32 + 5.4 * len(text)

    def svg(self, scheme: str = "as the page") -> str:
        """The text of the SVG file, in the colours of one of STYLES."""
        height = round(self.height + 6)
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{height}" '
            f'viewBox="0 0 {self.width} {height}" role="img">',
            f"<title>{escape(self.title)}</title>",
            f"<desc>{escape(self.description)}</desc>",
            f"<style>{STYLES[scheme]}</style>",
            *self.marks,
            "</svg>\n",
        ]
        return "\n".join(lines)


def runs(lengths: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The first and the last sequence of each run of sequences with equal lengths."""
    groups = (list(group) for _, group in itertools.groupby(enumerate(lengths), key=lambda pair: pair[1]))
    return [(group[0][0], group[-1][0]) for group in groups]


def named(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first} - {last}"


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def draw_pages(
    drawing: Drawing, y: float, lengths: Sequence[tuple[int, int]], page_size: int, max_rows: int = 24
) -> float:
    """Draw a heading and each sequence's slots by page: cached keys, keys of this step's tokens, and unused slots.

    A run of sequences with equal lengths shares a row. Returns the y coordinate below the last row.
    """
    drawing.text(10, y, f"Sequences and their pages of {counted(page_size, 'slot')}", "head")
    y += 22
    longest = max(-(-kv_len // page_size) for _, kv_len in lengths) * page_size
    scale = WIDTH / max(longest, 1)
    gap = 1.0 if scale * page_size >= 6 else 0.0
    drawing.legend(LEFT, y, [("one", "cached keys"), ("two", "keys of new tokens"), ("faint", "unused slots")])
    y += 10
    for first, last in runs(lengths)[:max_rows]:
        q_len, kv_len = lengths[first]
        pages = -(-kv_len // page_size)
        label = f"seq {named(first, last)}: {q_len} new, {counted(kv_len, 'key')}, {counted(pages, 'page')}"
        if len(label) > 36:  # wider than its column
            label = label.rpartition(", ")[0]
        drawing.text(LEFT - 8, y + 11, label, "small", "end")
        spans = {"one": (0, kv_len - q_len), "two": (kv_len - q_len, kv_len), "faint": (kv_len, pages * page_size)}
        for kind, (start, stop) in spans.items():
            drawing.boxes(kind, _cut(start, stop, page_size if gap else 0, scale, gap, y))
        y += 19
    return y


def _cut(start: int, stop: int, page_size: int, scale: float, gap: float, y: float) -> list[Box]:
    """The slots [start, stop) as one box per page, with a gap after each page. A page size of 0 gives one box."""
    edges = [start, *range((start // page_size + 1) * page_size, stop, page_size), stop] if page_size else [start, stop]
    return [
        (LEFT + left * scale, y, (right - left) * scale - (0.0 if not page_size or right % page_size else gap), 14)
        for left, right in itertools.pairwise(edges)
        if right > left
    ]


def groups_of(programs: Iterable[Program]) -> list[list[Program]]:
    """Groups of programs that visit the same keys for the same tokens, such as the programs of different heads.

    The groups are sorted by their tokens and keys.
    """
    groups: dict[Any, list[Program]] = {}
    for program in sorted(programs, key=lambda program: (program.tokens, program.span)):
        groups.setdefault((program.tokens, program.visits), []).append(program)
    return list(groups.values())


def evenly(rows: Sequence[Any], count: int) -> list[Any]:
    """At most `count` of the rows, evenly spaced from the first to the last."""
    if len(rows) <= count:
        return list(rows)
    return [rows[round(index * (len(rows) - 1) / (count - 1))] for index in range(count)]


def label_of(group: Sequence[Program]) -> str:
    """The index of the first program, and the number of the other programs."""
    first = group[0].index
    return f"{first}" if len(group) == 1 else f"{first} and {len(group) - 1} more"


def tokens_of(program: Program) -> str:
    low, high = program.tokens
    return f"token {low}" if low == high else f"tokens {low} - {high}"


def draw_keys(drawing: Drawing, y: float, programs: Sequence[Program], kv_len: int, max_rows: int = 32) -> float:
    """Draw the blocks of a sequence's keys that its programs visit, with a row for each group of programs."""
    scale = WIDTH / max(kv_len, 1)
    drawing.legend(LEFT, y, [("one", "without masks"), ("two", "with masks"), ("faint", "not visited")])
    y += 10
    shown = evenly(groups_of(programs), max_rows)
    drawing.boxes("faint", [(LEFT, y + 11 * row, kv_len * scale, 9) for row in range(len(shown))])
    for masked, kind in ((False, "one"), (True, "two")):
        visits = [(row, visit) for row, group in enumerate(shown) for visit in group[0].visits]
        spans = [(row, visit.start, min(visit.stop, kv_len)) for row, visit in visits if visit.masked == masked]
        drawing.boxes(
            kind, [(LEFT + start * scale, y + 11 * row, (stop - start) * scale, 9) for row, start, stop in spans]
        )
    for row, group in enumerate(shown):
        text = f"{label_of(group)}: {tokens_of(group[0])}"
        drawing.text(LEFT - 8, y + 11 * row + 8, text, "small", "end")
    y += 11 * len(shown) + 10
    drawing.text(LEFT, y, "key 0", "small quiet")
    drawing.text(LEFT + WIDTH, y, f"key {kv_len - 1}", "small quiet", "end")
    return y + 10


Span = tuple[int, int, bool]  # a program on a multiprocessor: start, stop, whether its sequence is highlighted


def _joined(spans: Sequence[Span], min_length: float) -> list[Span]:
    """The spans, after each span shorter than `min_length` is joined with an adjacent span of its kind before it."""
    joined: list[Span] = []
    for start, stop, highlighted in spans:
        if joined and joined[-1][1:] == (start, highlighted) and stop - start < min_length:
            joined[-1] = (joined[-1][0], stop, highlighted)
        else:
            joined.append((start, stop, highlighted))
    return joined


def draw_timeline(
    drawing: Drawing, y: float, launch: Launch, lanes: int, seq: int, end: int | None = None, height: int = 132
) -> float:
    """Draw the programs of each multiprocessor, from top to bottom. Programs of the sequence `seq` are highlighted.

    Multiprocessors that work longest on this sequence come first. Multiprocessors with equal work share a box.
    """
    work: dict[int, list[Span]] = {lane: [] for lane in range(lanes)}
    turns = timeline(launch, lanes)
    for turn in turns:
        work[turn.lane].append((turn.start, turn.stop, turn.program.seq == seq))
    last = max((turn.stop for turn in turns), default=0)
    end = max(end or last, 1)
    scale, row = WIDTH / end, height / lanes
    drawing.boxes("faint", [(LEFT, y, WIDTH, height)])
    boxes: dict[bool, list[Box]] = {True: [], False: []}
    rows = sorted(_joined(spans, 5 / scale) for spans in work.values())
    rows.sort(key=lambda spans: -sum(stop - start for start, stop, highlighted in spans if highlighted))
    drawn = 0
    for spans, group in itertools.groupby(rows):
        count = len(list(group))
        for start, stop, highlighted in spans:
            left, right = LEFT + start * scale, LEFT + stop * scale
            boxes[highlighted].append((left, y + drawn * row, max(right - left - 0.5, 0.5), count * row))
        drawn += count
    drawing.boxes("one", boxes[False])
    drawing.boxes("two", boxes[True])
    drawing.line(LEFT + last * scale, y - 4, LEFT + last * scale, y + height + 4, "dotted")
    y += height + 14
    drawing.text(LEFT, y, "0 keys", "small quiet")
    drawing.text(LEFT + last * scale, y, f"{last} keys", "small quiet", "end")
    return y + 10
