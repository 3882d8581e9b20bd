"""Draw the badges at the top of README.md, as self-contained SVG.

    python docs/badges.py build/tests.json [FOLDER]

`make status` writes them to docs/pictures/badges/ from the record of a test run. Continuous integration writes
the badges of its own run to build/badges/, from where a web host can publish them.
"""

import argparse
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "pictures" / "badges"
GOOD, BAD, PLAIN = "#1a7f37", "#cf222e", "#0969da"


def badge(label: str, value: str, colour: str) -> str:
    """One badge: a grey half with the label, and a coloured half with the value."""
    left, right = (round(10 + 6.3 * len(text)) for text in (label, value))
    halves = (
        f'<path fill="{fill}" d="M{x} 0h{width}v20h-{width}z"/>'
        f'<text x="{x + width / 2}" y="14" textLength="{width - 10}">{escape(text)}</text>'
        for fill, x, width, text in (("#57606a", 0, left, label), (colour, left, right, value))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img">'
        f"<title>{escape(label)}: {escape(value)}</title>"
        '<g font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" fill="#fff" text-anchor="middle">'
        f"{''.join(halves)}</g></svg>\n"
    )


def badges(record: Mapping[str, Any]) -> dict[str, str]:
    """The SVG of each badge by file name: the outcome of the tests, the Python versions and the license."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tests = record["tests"]
    failed = tests.get("failed", 0) + tests.get("error", 0)
    outcome = f"{failed:,} failed" if failed else f"{tests['passed']:,} passed"
    least, _, most = project["requires-python"].removeprefix(">=").partition(",<3.")
    return {
        "tests.svg": badge("tests", outcome, BAD if failed else GOOD),
        "python.svg": badge("python", f"{least} to 3.{int(most) - 1}", PLAIN),
        "license.svg": badge("license", project["license"], PLAIN),
    }


def write(record: Mapping[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, svg in badges(record).items():
        (folder / name).write_text(svg)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    arguments = parser.parse_args()
    write(json.loads(arguments.record.read_text()), arguments.folder)


if __name__ == "__main__":
    main()
