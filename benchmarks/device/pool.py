"""Worker processes, and the run of a phase's items on several processes.

Each item runs in a worker process with a time limit. A crash, a hang, a poisoned CUDA context or a lack of GPU memory
costs only the item that caused it: its process is killed, and the next item gets another process. Neither this module
nor its users import torch or jax, so the process that conducts a call never touches the device.
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
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.device import carried, worker
from benchmarks.device.plan import ENOUGH, Phase, Start
from benchmarks.device.record import CANNOT, FAILED, LATE, Record

ROOT = Path(__file__).parents[2]
START_SECONDS = 120.0  # limit for the start of a process, which imports while other processes import too
END_SECONDS = 10.0  # limit for the exit of killed processes, which a driver may delay
LEAST = 2.0  # seconds; nothing begins with less time left
MOST_STARTS = 3  # failed starts in a row after which a phase ends
DUMPED = 2**16  # bytes at the end of standard error that are searched for the place of a crash
# Environment variables of the machine that are dropped, because they would change what is compiled or where it runs.
# NEEDED, the driver's location, is kept.
DROPPED = ("TRITON_", "JAX_PLATFORMS", "XLA_FLAGS", "CUDA_LAUNCH_BLOCKING")
NEEDED = ("TRITON_LIBCUDA_PATH",)


class Late(Exception):
    """There was no answer within the time limit."""


class Ended(Exception):
    """The process has ended."""


class Worker:
    """A worker process."""

    def __init__(self, start: Start, device: str) -> None:
        self.start, self.facts, self._ending = start, None, threading.Lock()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `end`)
        command = [sys.executable, "-m", worker.__name__, start.module, device, *start.arguments]
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment(dict(start.environ)), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._errors, text=True, process_group=0,
        )  # fmt: skip
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        """Put the process's answers into the queue.

        Only this thread closes the pipe, because closing it waits for a pending read.
        """
        assert self._process.stdout is not None
        with self._process.stdout as answers:
            for line in answers:
                self._lines.put(line)
        self._lines.put(None)

    def _answer(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=max(0.1, seconds))
        except queue.Empty:
            raise Late from None
        if line is None:
            raise Ended(f"the process ended: {self._how_it_ended()}")
        return json.loads(line)

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return "it closed its output but keeps running"
        return signal.Signals(-code).name if code < 0 else f"exit status {code}"

    def ready(self, seconds: float) -> Mapping[str, Any]:
        """The facts that the process reports once it has started. `Ended` has the reason if it cannot run."""
        if self.facts is None:
            answer = self._answer(seconds)
            if "absent" in answer:
                raise Ended(answer["absent"])
            self.facts = answer["ready"]
        return self.facts

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        with contextlib.suppress(BrokenPipeError, ValueError):  # the process has ended; `_answer` reports how
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({**request, "seconds": seconds}) + "\n")
            self._process.stdin.flush()
        return self._answer(seconds)

    def kill(self) -> None:
        """Kill the process and all its children, without waiting."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()

    def end(self, *, dump: bool = False, seconds: float = END_SECONDS) -> str:
        """Kill the process and return the end of its standard error.

        With `dump`, the process first writes stack traces, which show where it hangs.
        """
        if dump:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(worker.DUMP)
                time.sleep(0.5)
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.1, seconds))
        with self._ending:  # the phase and the end of the call may both end this process
            if self._errors.closed:
                return ""
            self._errors.seek(0, os.SEEK_END)
            self._errors.seek(max(0, self._errors.tell() - DUMPED))
            text = self._errors.read().decode(errors="replace")
            self._errors.close()
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.close()  # type: ignore[union-attr]
        return last_dump(text)


def last_dump(text: str) -> str:
    """The part of standard error that shows why a process ended: the last dump, with the innermost frames first."""
    lines = [line for line in text.splitlines() if not line.startswith("Extension modules:")]
    dumps = [number for number, line in enumerate(lines) if worker.DUMPS in line or line.startswith("Fatal Python")]
    # A dump lists every thread. The thread that runs the items comes last.
    text = "\n".join(lines[dumps[-1] :]) if dumps else "\n".join(lines)
    return (text[: worker.LONGEST] if dumps else text[-worker.LONGEST :]).strip()


def environment(more: dict[str, str]) -> dict[str, str]:
    """The environment of workers: our sources, caches in writable places, and the settings that calls share."""
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    variables = os.environ.items()
    inherited = {name: value for name, value in variables if name in NEEDED or not name.startswith(DROPPED)}
    return inherited | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | carried.environment() | more


def end_all(workers: Iterable[Worker]) -> None:
    """Kill all the processes, then wait until they have exited."""
    workers, until = list(workers), time.monotonic() + END_SECONDS
    for process in workers:
        process.kill()
    for process in workers:
        process.end(seconds=until - time.monotonic())


@dataclasses.dataclass
class Pool:
    """Processes that stay from phase to phase. A phase reuses processes that were started as it needs them."""

    device: str
    idle: list[Worker] = dataclasses.field(default_factory=list)
    running: set[Worker] = dataclasses.field(default_factory=set)
    stopping: bool = False  # the call is ending: nothing more begins, and a killed item does not count as failed
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    # A process dies with the thread that started it (PR_SET_PDEATHSIG), so one thread starts all processes.
    _starter: concurrent.futures.Executor = dataclasses.field(
        default_factory=lambda: concurrent.futures.ThreadPoolExecutor(1)
    )

    def _started(self, start: Start) -> Worker:
        return self._starter.submit(Worker, start, self.device).result()

    def take(self, start: Start) -> Worker:
        """A process that was started in this way: an idle process if possible, otherwise a new process."""
        with self._lock:
            found = next((process for process in self.idle if process.start == start), None)
            if found:
                self.idle.remove(found)
        taken = found or self._started(start)
        with self._lock:
            self.running.add(taken)
        return taken

    def give(self, process: Worker) -> None:
        with self._lock:
            self.running.discard(process)
            self.idle.append(process)

    def drop(self, process: Worker, *, dump: bool = False) -> str:
        with self._lock:
            self.running.discard(process)
        return process.end(dump=dump)

    def start_ahead(self, start: Start, count: int) -> None:
        """Start processes before they are needed, so that they import while other processes still work."""
        missing = count - sum(process.start == start for process in self.idle)
        started = [self._started(start) for _ in range(max(0, missing))]
        with self._lock:
            self.idle += started

    def keep(self, *starts: Start) -> None:
        """End all idle processes except those that were started in one of these ways."""
        with self._lock:
            ended = [process for process in self.idle if process.start not in starts]
            self.idle = [process for process in self.idle if process.start in starts]
        end_all(ended)

    def end(self) -> None:
        self.stopping = True
        with self._lock:
            ended = [*self.idle, *self.running]
            self.idle, self.running = [], set()
        end_all(ended)
        self._starter.shutdown()


@dataclasses.dataclass
class PhaseRun:
    """The run of one phase of a call."""

    phase: Phase
    pool: Pool
    record: Record
    until: float
    workers: int
    select: Callable[[list[str]], list[str]]  # selects the items to run from the names of all items
    todo: "queue.Queue[str]" = dataclasses.field(default_factory=queue.Queue)
    failed_starts: int = 0

    @property
    def left(self) -> float:
        return self.until - time.monotonic()

    @property
    def goes_on(self) -> bool:
        return self.left > LEAST and self.failed_starts < MOST_STARTS and not self.pool.stopping

    def run(self) -> None:
        """Run the items on several processes at a time. Items for which time is too short are left to the next call."""
        began, name = time.monotonic(), self.phase.name
        first = self._listed()
        if first is None:
            return
        threads = [
            threading.Thread(target=self._work, args=(first if number == 0 else None,), daemon=True)
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
        """Put the items into the queue. Returns the process that listed them, or None if there is nothing to run."""
        process = self.pool.take(self.phase.start)
        try:
            facts = process.ready(min(START_SECONDS, self.left))
            answer = process.ask({"list": self.phase.what}, self.left)
            if "names" not in answer:
                raise Ended(answer["absent"])
        except Late:
            self._cannot(f"no list of items in time\n{self.pool.drop(process, dump=True)}")
            return None
        except Ended as ended:
            self._cannot(f"{ended}\n{self.pool.drop(process)}".strip())
            return None
        names = answer["names"]
        todo = self.select(names)
        self.record.write("phase", phase=self.phase.name, items=len(names), todo=todo, process=facts)
        for item in todo:
            self.todo.put(item)
        if not todo:
            self.pool.give(process)
            return None
        return process

    def _cannot(self, message: str) -> None:
        self.record.write("item", phase=self.phase.name, item="", result=CANNOT, message=message[: worker.LONGEST])

    def _work(self, process: Worker | None) -> None:
        """Run items one after another, in one process as long as it is usable."""
        while self.goes_on:
            try:
                item = self.todo.get_nowait()
            except queue.Empty:
                break
            process = self._started(process)
            if process is None:
                self.todo.put(item)
                continue
            if not self._run_item(process, item):
                process = None
        if process:
            self.pool.give(process)

    def _started(self, process: Worker | None) -> Worker | None:
        process = process or self.pool.take(self.phase.start)
        limit = min(START_SECONDS, self.left)
        try:
            process.ready(limit)
        except Late:
            if limit < START_SECONDS:  # the time of the phase is up, but the next phase may need the process
                self.pool.give(process)
            else:
                self.pool.drop(process)
                self.failed_starts += 1
            return None
        except Ended:
            self.pool.drop(process)
            self.failed_starts += 1
            return None
        self.failed_starts = 0
        return process

    def _run_item(self, process: Worker, item: str) -> bool:
        """Run an item. Returns False if its process must not be used again."""
        limit, began = min(self.phase.item_seconds, self.left), time.monotonic()

        def failed(message: str) -> None:
            if self.pool.stopping:  # the call is ending, and has killed the process
                self.todo.put(item)
            else:
                seconds = round(time.monotonic() - began, 3)
                self._write_result(item, {"result": FAILED, "message": message, "seconds": seconds})

        try:
            answer = process.ask({"what": self.phase.what, "run": item}, limit)
        except Late:
            last = self.pool.drop(process, dump=True)
            if limit < min(self.phase.item_seconds, ENOUGH):  # the phase's time was up before the item's
                self.todo.put(item)
            else:
                failed(f"{LATE} {limit:.0f} s\n{last}")
            return False
        except Ended as ended:
            failed(f"{ended}\n{self.pool.drop(process)}")
            return False
        self._write_result(item, answer)
        if answer.get("poisoned"):
            self.pool.drop(process)
            return False
        return True

    def _write_result(self, item: str, answer: Mapping[str, Any]) -> None:
        self.record.write("item", phase=self.phase.name, item=item, **answer)
