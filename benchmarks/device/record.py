"""The record of calls on a device: a file with one JSON object per line, to which a call appends while it runs.

The `kind` of a line is one of these:

    facts   the machine and its software, once per call
    phase   a phase has begun: the number of its items, and those that it will run
    item    an item has ended: phase, item, result, seconds, message, and fields that its worker adds
    end     a phase has ended: seconds, and the number of items that were not reached

A result is passed, declined, FAILED or "cannot run". Declined means that the backend does not support the item. If an
item ran more than once, its last line counts.
"""

import dataclasses
import json
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

NAME = "record.jsonl"
PASSED, DECLINED, FAILED, CANNOT = "passed", "declined", "FAILED", "cannot run"
DONE = (PASSED, DECLINED)
LATE = "no end after"  # the start of the message if an item failed because its time was up
Line = dict[str, Any]


def read(path: Path) -> Iterator[Line]:
    """The lines of a record. Incomplete lines are skipped, since a killed call may leave such a line."""
    for text in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            yield line


@dataclasses.dataclass
class Record:
    """The lines so far, and the file to which more are appended.

    The fields of `stamp`, such as the device and a digest of the sources, are added to each new line. Items that ran
    before the time `since` count as not run.
    """

    path: Path
    lines: list[Line] = dataclasses.field(default_factory=list)
    stamp: Line = dataclasses.field(default_factory=dict)
    since: float = 0.0
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    @classmethod
    def begun(cls, folder: Path, earlier: Iterable[Path] = ()) -> "Record":
        """The record in a folder. The lines of `earlier` records are added to its own lines."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / NAME
        lines = list(read(path))
        for other in earlier:
            if other.is_file() and other.resolve() != path.resolve():
                lines += [line for line in read(other) if line not in lines]
        lines.sort(key=lambda line: line.get("at", 0))
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return cls(path, lines)

    def write(self, kind: str, **fields: Any) -> None:
        line = {"kind": kind, **fields, "at": round(time.time()), **self.stamp}
        with self._lock:
            self.lines.append(line)
            with open(self.path, "a") as file:
                file.write(json.dumps(line) + "\n")

    def of_kind(self, kind: str) -> list[Line]:
        with self._lock:
            return [line for line in self.lines if line.get("kind") == kind]

    def items(self) -> dict[tuple[str, str], Line]:
        """The last line of each item, by phase and name. The name "" stands for a phase that could not begin.

        A failed item may also have run in other ways (`plan.ways`). Those lines are left out once the item has passed.
        """
        last: dict[tuple[str, str], Line] = {}
        with self._lock:
            for line in self.lines:
                if line.get("kind") == "phase":
                    last.pop((line["phase"], ""), None)
                elif line.get("kind") == "item":
                    last[line["phase"], line["item"]] = line
        passed = {key for key, line in last.items() if line["result"] in DONE}
        return {key: line for key, line in last.items() if (way_of(key[0]), key[1]) not in passed}

    def turns(self, phase: str) -> dict[str, int]:
        """The order in which items of a phase are due. Lower numbers come first.

        A failed item has 0, an item that passed with other sources 2, and an item that need not run 3. Items that never
        ran on this device have no entry. They come after failed items, as if they had 1.
        """
        ages = {}
        for (name, item), line in self.items().items():
            if name != phase or line["at"] < self.since or line.get("device") != self.stamp.get("device"):
                continue
            same = line.get("sources") == self.stamp.get("sources")
            ages[item] = 0 if line["result"] not in DONE else 3 if same else 2
        return ages


def way_of(phase: str) -> str:
    """The phase whose items this phase runs in another way, or "" if it runs no other phase's items."""
    base, comma, _ = phase.partition(", ")
    return base if comma else ""
