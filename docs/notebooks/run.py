"""Run a notebook of this folder without Jupyter, and compare the output of its cells with the stored output.

    python docs/notebooks/run.py docs/notebooks/paged_attention_from_zero.ipynb
    python docs/notebooks/run.py --write docs/notebooks/paged_attention_from_zero.ipynb    # store the new output

The code cells run in order, in one namespace, in this process. The output of a cell with the tag `varies` is not
compared: it depends on the machine, on versions or on the number of checks in the suite.
"""

import argparse
import contextlib
import difflib
import io
import json
import linecache
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MAGIC = "%%writefile "  # the only magic that the notebooks use; it writes the other lines of the cell to a file


def run_cell(source: str, name: str, namespace: dict[str, Any]) -> str:
    """Run one cell and return its output."""
    printed = io.StringIO()
    # Tracebacks and Triton look up the source code of functions in this cache.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    with contextlib.redirect_stdout(printed):
        if source.startswith(MAGIC):
            first, _, text = source.partition("\n")
            path = Path(first.removeprefix(MAGIC))
            print(f"Writing {path}")
            path.write_text(f"{text}\n")
        else:
            exec(compile(source, name, "exec", dont_inherit=True), namespace)
    return printed.getvalue()


def stored(cell: dict[str, Any]) -> str:
    """The output that the notebook stores for a cell."""
    return "".join("".join(output["text"]) for output in cell["outputs"])


def outputs_of(printed: str) -> list[dict[str, Any]]:
    """A cell's printed text as outputs in the notebook format."""
    if not printed:
        return []
    return [{"name": "stdout", "output_type": "stream", "text": printed.splitlines(keepends=True)}]


def run(notebook: dict[str, Any], name: str) -> list[str]:
    """Run all code cells and store their output in `notebook`. Returns the lines of a diff from the old output."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    differences: list[str] = []
    for number, cell in enumerate(notebook["cells"], 1):
        if cell["cell_type"] != "code":
            continue
        where = f"{name}, cell {number} ({cell['id']})"
        printed, before = run_cell("".join(cell["source"]), where, namespace), stored(cell)
        if "varies" not in cell["metadata"].get("tags", ()):
            lines = before.splitlines(), printed.splitlines()
            differences += difflib.unified_diff(*lines, f"stored in {where}", "printed now", lineterm="")
        cell["outputs"] = outputs_of(printed)
    return differences


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if every cell ran and printed the stored output, otherwise 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--write", action="store_true", help="store the output of the cells")
    options = parser.parse_args(argv)
    path = options.notebook.resolve()  # a notebook may change the working directory
    notebook = json.loads(path.read_text())
    try:
        differences = run(notebook, path.name)
    except Exception:
        traceback.print_exc()  # unlike the interpreter's own traceback, this one shows the lines of cells
        return 1
    if options.write:
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
        return 0
    for line in differences:
        print(line, file=sys.stderr)
    return int(bool(differences))


if __name__ == "__main__":
    raise SystemExit(main())
