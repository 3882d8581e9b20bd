"""Processes that answer for items, and the run of a phase on several of them.

Every item runs in a process apart and within a limit. A crash, a hang, a poisoned context or a full card costs the item
that met it: its process is ended, the next item gets another. This module and those that use it import neither torch
nor jax, so the process that conducts a call never touches the device.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.device import carried, worker
from benchmarks.device.plan import Phase, Start
from benchmarks.device.record import CANNOT, FAILED, Record

ROOT = Path(__file__).parents[2]
START_SECONDS = 120.0  # for what a process imports, all of them at once
END_SECONDS = 10.0  # for the end of a process that was killed
LEAST = 2.0  # seconds: with less left nothing is begun
MOST_STARTS = 3  # failed ones in a row, after which a phase is given up


class Late(Exception):
    """No answer within the limit."""


class Ended(Exception):
    """The process is no more."""


class Worker:
    """One process."""

    def __init__(self, start: Start, device: str) -> None:
        self.start, self.facts = start, None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `end`)
        command = [sys.executable, "-m", worker.__name__, start.module, device, *start.arguments]
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment(dict(start.environ)), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._errors, text=True, process_group=0,
        )  # fmt: skip
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(ValueError):  # closed meanwhile
            for line in self._process.stdout or ():
                self._lines.put(line)
        self._lines.put(None)

    def _answer(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=max(0.1, seconds))
        except queue.Empty:
            raise Late from None
        if line is None:
            code = self._process.wait()
            raise Ended(f"the process ended: {signal.Signals(-code).name if code < 0 else f'exit status {code}'}")
        return json.loads(line)

    def ready(self, seconds: float) -> Mapping[str, Any]:
        """What the process says of itself; waits for it to be there. `Ended` says why it cannot be."""
        if self.facts is None:
            said = self._answer(seconds)
            if "absent" in said:
                raise Ended(said["absent"])
            self.facts = said["ready"]
        return self.facts

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            pass  # `_answer` says how it ended
        return self._answer(seconds)

    def end(self, *, dump: bool = False) -> str:
        """End the process and all that it started; with `dump` it first says where it hangs. The last that it said."""
        if dump:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(worker.DUMP)
                time.sleep(0.5)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold on to a process that it waits for
            self._process.wait(END_SECONDS)
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - worker.LONGEST))
        said = self._errors.read().decode(errors="replace")
        self._errors.close()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError, ValueError):
                stream.close()  # type: ignore[union-attr]
        return said.strip()


def environment(more: dict[str, str]) -> dict[str, str]:
    """What workers start with: our sources, caches in places that can be written, and settings that calls share."""
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | carried.environment() | more


@dataclasses.dataclass
class Pool:
    """Processes that are kept from phase to phase, by how they were started."""

    device: str
    idle: list[Worker] = dataclasses.field(default_factory=list)
    running: set[Worker] = dataclasses.field(default_factory=set)
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    # A process dies with the thread that started it (PR_SET_PDEATHSIG), so one thread starts all of them.
    _starter: concurrent.futures.Executor = dataclasses.field(
        default_factory=lambda: concurrent.futures.ThreadPoolExecutor(1)
    )

    def _started(self, start: Start) -> Worker:
        return self._starter.submit(Worker, start, self.device).result()

    def take(self, start: Start) -> Worker:
        """A process that is started so, one that is there already if possible."""
        with self._lock:
            found = next((one for one in self.idle if one.start == start), None)
            if found:
                self.idle.remove(found)
        taken = found or self._started(start)
        with self._lock:
            self.running.add(taken)
        return taken

    def give(self, one: Worker) -> None:
        with self._lock:
            self.running.discard(one)
            self.idle.append(one)

    def drop(self, one: Worker, *, dump: bool = False) -> str:
        with self._lock:
            self.running.discard(one)
        return one.end(dump=dump)

    def start_ahead(self, start: Start, count: int) -> None:
        """Have so many processes import what they need while others still work."""
        missing = count - sum(one.start == start for one in self.idle)
        started = [self._started(start) for _ in range(max(0, missing))]
        with self._lock:
            self.idle += started

    def keep(self, *starts: Start) -> None:
        """End all idle processes but those that are started so."""
        with self._lock:
            gone = [one for one in self.idle if one.start not in starts]
            self.idle = [one for one in self.idle if one.start in starts]
        for one in gone:
            one.end()

    def end(self) -> None:
        self.keep()
        for one in list(self.running):
            self.drop(one)
        self._starter.shutdown()


@dataclasses.dataclass
class PhaseRun:
    """One phase of a call."""

    phase: Phase
    pool: Pool
    record: Record
    until: float
    workers: int
    chosen: Callable[[list[str]], list[str]]  # of the items' names those that are to be run
    todo: "queue.Queue[str]" = dataclasses.field(default_factory=queue.Queue)
    failed_starts: int = 0

    @property
    def left(self) -> float:
        return self.until - time.monotonic()

    def run(self) -> None:
        """Run the items, most at once; what time does not allow is left for the next call."""
        began, name = time.monotonic(), self.phase.name
        first = self._listed()
        if first is None:
            return
        threads = [
            threading.Thread(target=self._work, args=(first if number == 0 else None,))
            for number in range(min(self.workers, max(1, self.todo.qsize())))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - began
        if self.failed_starts >= MOST_STARTS:
            self.record.write("item", phase=name, item="", result=CANNOT, message="processes do not start any more")
        self.record.write("end", phase=name, seconds=round(seconds, 1), not_reached=self.todo.qsize())

    def _listed(self) -> Worker | None:
        """Ask which items there are; the process that knew, or None if there is nothing to run."""
        one = self.pool.take(self.phase.start)
        try:
            facts = one.ready(min(START_SECONDS, self.left))
            said = one.ask({"list": self.phase.what}, self.left)
            if "names" not in said:
                raise Ended(said["absent"])
        except Late:
            self._cannot(f"no list of items in time\n{self.pool.drop(one, dump=True)}")
            return None
        except Ended as ended:
            self._cannot(f"{ended}\n{self.pool.drop(one)}".strip())
            return None
        names = said["names"]
        todo = self.chosen(names)
        self.record.write("phase", phase=self.phase.name, items=len(names), todo=len(todo), process=facts)
        for item in todo:
            self.todo.put(item)
        if not todo:
            self.pool.give(one)
            return None
        return one

    def _cannot(self, message: str) -> None:
        self.record.write("item", phase=self.phase.name, item="", result=CANNOT, message=message[: worker.LONGEST])

    def _work(self, one: Worker | None) -> None:
        """Run items one after another, in one process as long as that is good."""
        while self.left > LEAST and self.failed_starts < MOST_STARTS:
            try:
                item = self.todo.get_nowait()
            except queue.Empty:
                break
            one = self._started(one)
            if one is None:
                self.todo.put(item)
                continue
            if not self._one(one, item):
                one = None
        if one:
            self.pool.give(one)

    def _started(self, one: Worker | None) -> Worker | None:
        one = one or self.pool.take(self.phase.start)
        try:
            one.ready(min(START_SECONDS, self.left))
        except Late:
            self.pool.drop(one)
            return None
        except Ended:
            self.pool.drop(one)
            self.failed_starts += 1
            return None
        self.failed_starts = 0
        return one

    def _one(self, one: Worker, item: str) -> bool:
        """Run an item; False if its process is not to be used again."""
        limit, began = min(self.phase.item_seconds, self.left), time.monotonic()

        def failed(message: str) -> None:
            self._said(item, {"result": FAILED, "message": message, "seconds": round(time.monotonic() - began, 3)})

        try:
            said = one.ask({"what": self.phase.what, "run": item}, limit)
        except Late:
            last = self.pool.drop(one, dump=True)
            if limit < self.phase.item_seconds:  # the phase's time was up, not the item's: the next call runs it
                self.todo.put(item)
            else:
                failed(f"no end after {limit:.0f} s\n{last}")
            return False
        except Ended as ended:
            failed(f"{ended}\n{self.pool.drop(one)}")
            return False
        self._said(item, said)
        if said.get("poisoned"):
            self.pool.drop(one)
            return False
        return True

    def _said(self, item: str, said: Mapping[str, Any]) -> None:
        self.record.write("item", phase=self.phase.name, item=item, **said)
