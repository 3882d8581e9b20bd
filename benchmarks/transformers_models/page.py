"""Writes and compares the tables of docs/transformers_models.md."""

import collections
from collections.abc import Iterable, Sequence

import transformers

from benchmarks.cpu.page import ROOT, replace
from benchmarks.transformers_models.building import KINDS
from benchmarks.transformers_models.verdicts import COLUMNS, Record, cells

PAGE = ROOT / "docs" / "transformers_models.md"
HEADS = ("family", "attention", "verdict", *COLUMNS)


def marks(kind: str) -> tuple[str, str]:
    return f"<!-- {kind}: written by `make transformers-models` -->\n", f"<!-- end of {kind} -->\n"


def row(record: Record) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|").replace("<", "&lt;") for cell in cells(record)) + " |"


def rows_of(kind: str) -> dict[str, str]:
    """The page's rows of one kind, by family."""
    begin, end = marks(kind)
    part = PAGE.read_text().partition(begin)[2].partition(end)[0]
    rows = [line for line in part.splitlines() if line.startswith("| ")][1:]
    return {line.split(" | ")[0].removeprefix("| "): line for line in rows}


def write(records: Sequence[Record]) -> None:
    """Rewrite the rows of the families in `records`. Other rows do not change."""
    for kind in KINDS:
        rows = rows_of(kind) | {record["family"]: row(record) for record in records if record["kind"] == kind}
        rows = dict(sorted(rows.items()))
        counts = counted(line.split(" | ")[2] for line in rows.values())
        lines = [f"With transformers {transformers.__version__}: {counts}.", ""]
        lines += ["| " + " | ".join(HEADS) + " |", "|---" * len(HEADS) + "|"]
        lines += rows.values()
        replace(PAGE, "\n".join(lines) + "\n", *marks(kind))


def changed(records: Iterable[Record]) -> list[str]:
    """The differences between the page's rows and the records, one line each."""
    page_rows = {kind: rows_of(kind) for kind in KINDS}
    lines = []
    for record in records:
        before, now = page_rows[record["kind"]].get(record["family"], "nothing"), row(record)
        if before != now:
            lines.append(f"expected {PAGE.name} to say of {record['family']} {now}, got {before}")
    return lines


def counted(verdicts: Iterable[str]) -> str:
    """The number of families with each verdict, without the reasons."""
    counts = collections.Counter(verdict.partition(":")[0] for verdict in verdicts)
    return ", ".join(f"{count} {word}" for word, count in counts.most_common())
