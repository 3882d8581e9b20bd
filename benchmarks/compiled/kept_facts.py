"""What compilations found, kept beside the document so that only what changes is compiled again.

A JSON file: by Triton version and by digest of a compilation (`compiling.digest`) one line of facts. What does not
compile is not kept.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.compiled.compiling import Facts, Loop

READER = 3  # to be counted up when `compiling` or `sass` read something else out of the same code


def load(path: Path, version: str) -> dict[str, Facts]:
    """The facts of one Triton version by digest, without the devices' limits."""
    return {digest: _decoded(line) for digest, line in _read(path).get(version, {}).items()}


def save(path: Path, version: str, facts: Mapping[str, Facts]) -> None:
    """Replace what the file has of one Triton version."""
    held = _read(path)
    held[version] = {digest: _encoded(one) for digest, one in facts.items() if not one.error}
    new = path.with_suffix(".new")
    new.write_text("".join(_lines(held)))
    new.replace(path)


def _read(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text()) if path.is_file() else {}
    return found.get("triton", {}) if found.get("reader") == READER else {}


def _lines(held: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    yield f'{{"reader": {READER},\n"triton": {{'
    for index, (version, facts) in enumerate(sorted(held.items())):
        yield f"{',' if index else ''}\n{json.dumps(version)}: {{\n"
        yield ",\n".join(f"{json.dumps(digest)}: {json.dumps(facts[digest])}" for digest in sorted(facts))
        yield "}"
    yield "}}\n"


def _encoded(facts: Facts) -> list[Any]:
    loops = [[dict(loop.loads), loop.local, loop.matrix] for loop in facts.loops]
    return [dict(facts.instructions), facts.registers, facts.spilled, facts.shared, loops]


def _decoded(line: list[Any]) -> Facts:
    instructions, registers, spilled, shared, loops = line
    return Facts(
        instructions=tuple(instructions.items()),
        registers=registers,
        spilled=spilled,
        shared=shared,
        loops=tuple(
            Loop(tuple((int(width), size) for width, size in loads.items()), local, matrix)
            for loads, local, matrix in loops
        ),
    )
