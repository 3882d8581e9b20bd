"""The generated parts of docs/predictions.md."""

from collections.abc import Iterable
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "predictions.md"


def table(head: str, lines: Iterable[str]) -> str:
    """A Markdown table: a header line and the lines below it, each of which ends with a newline."""
    return head + "|---" * head.count(" |") + "|\n" + "".join(lines)


def part(name: str, text: str | None = None) -> str:
    """The text between a part's marks, in the document or in `text`."""
    begin, end = marks(name)
    return (DOCUMENT.read_text() if text is None else text).partition(begin)[2].partition(end)[0].strip()


def written(text: str, name: str, new: str) -> str:
    """The text with one part replaced."""
    begin, end = marks(name)
    before, found, rest = text.partition(begin)
    if not found:
        raise ValueError(f"expected a part {name} in {DOCUMENT.name}, got none")
    return f"{before}{begin}\n{new.strip()}\n\n{end}{rest.partition(end)[2]}"


def replace(name: str, new: str) -> None:
    DOCUMENT.write_text(written(DOCUMENT.read_text(), name, new))


def marks(name: str) -> tuple[str, str]:
    return f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
