"""Write the CPU rows of docs/status.md from the record of a test run, or compare the page with the record.

    python docs/status_table.py build/tests.json [--check]

`make test` and `make test-all` write the record. With --check the page is not changed, and the exit status is 1 if the
page names an operation on a backend that did not run or failed, or omits one that ran.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent / "status.md"
BEGIN, END = "<!-- written by docs/status_table.py -->\n", "<!-- end of what is written -->\n"
COLUMNS = {
    "reference": "`reference`",
    "numba": "`numba`",
    "eager": "`eager`",
    "xla": "`xla`",
    "triton": "`triton`, interpreted",
    "ptx": "`triton`, compiled and emulated",
    "pallas": "`pallas`, interpreted",
    "cuda": "`cuda`, emulated",
}


def shown(record: Mapping[str, Any]) -> dict[tuple[str, str], Mapping[str, int]]:
    """The numbers of tests by outcome, for each operation and backend of the table."""
    return {
        (operation, backend): outcomes
        for operation, backends in record["operations"].items()
        for backend, outcomes in backends.items()
        if backend in COLUMNS
    }


def table(record: Mapping[str, Any]) -> str:
    """The table in Markdown, after a sentence on the run. Each cell is a number of tests."""
    ran, tests = shown(record), record["tests"]
    failed = tests.get("failed", 0)
    outcome = f"{tests['passed']} tests passed, {failed} failed"
    lines = [
        f"Last run on {record['date']} at commit {record['commit']} by `{record['command']}`: {outcome}.",
        "",
        f"| operation | {' | '.join(COLUMNS.values())} |",
        "|---" * (1 + len(COLUMNS)) + "|",
    ]
    for operation in sorted({operation for operation, _ in ran}):
        cells = [_cell(ran.get((operation, backend))) for backend in COLUMNS]
        lines.append(f"| `{operation}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(outcomes: Mapping[str, int] | None) -> str:
    if outcomes is None:
        return "-"
    failed = outcomes.get("failed", 0)
    return f"{outcomes.get('passed', 0)} pass" + (f", {failed} FAIL" if failed else "")


def faults(page: str, record: Mapping[str, Any]) -> list[str]:
    """The differences between a page and a record, except in the numbers of tests."""
    ran = shown(record)
    failed = {pair for pair, outcomes in ran.items() if outcomes.get("failed") or not outcomes.get("passed")}
    named = set()
    for operation, *cells in re.findall(r"^\| `(\w+)` \|" + r" ([^|]*) \|" * len(COLUMNS) + "$", _written(page), re.M):
        named |= {(operation, backend) for backend, cell in zip(COLUMNS, cells, strict=True) if "pass" in cell}
    return [
        *(f"{operation} on {backend} is named, but did not run" for operation, backend in sorted(named - ran.keys())),
        *(f"{operation} on {backend} is named, but failed" for operation, backend in sorted(named & failed)),
        *(f"{operation} on {backend} ran, but is not named" for operation, backend in sorted(ran.keys() - named)),
    ]


def _written(page: str) -> str:
    return page.partition(BEGIN)[2].partition(END)[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    record, page = json.loads(arguments.record.read_text()), PAGE.read_text()
    if arguments.check:
        differences = faults(page, record)
        sys.stdout.write("".join(f"{line}\n" for line in differences))
        return bool(differences)
    PAGE.write_text(page.replace(BEGIN + _written(page), BEGIN + table(record)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
