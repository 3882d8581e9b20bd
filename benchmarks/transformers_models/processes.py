"""Runs many items, each in a separate process with a time limit, so that an item cannot stop the other items."""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

T = TypeVar("T")
Work = Callable[[T], Iterable[dict[str, Any]]]  # yields dicts, which are merged into the item's record


class Job:
    """A forked process, which inherits all imported and compiled code."""

    def __init__(self, work: Work, item: Any, limit: float) -> None:
        context = multiprocessing.get_context("fork")
        self.item, self.record, self.limit, self.begin = item, {}, limit, time.monotonic()
        self.pipe, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=_report, args=(work, item, theirs), daemon=True)
        self.process.start()
        theirs.close()  # otherwise the pipe would stay open after the process has ended

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begin

    def read(self) -> bool:
        """Read the available results. Returns whether the process has ended."""
        try:
            while self.pipe.poll():
                self.record |= self.pipe.recv()
        except EOFError:
            self.process.join()
            if self.process.exitcode:
                self.record["ended"] = f"the process ended with {self.process.exitcode}"
            return True
        if self.seconds > self.limit:
            self.process.kill()
            self.process.join()
            self.record["ended"] = f"took longer than {self.limit:.0f} s"
            return True
        return False


def _report(work: Work, item: Any, pipe: Connection) -> None:
    for number in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    try:
        for part in work(item):
            pipe.send(part)
    except Exception as error:
        pipe.send({"ended": f"{type(error).__name__}: {error}"})
    pipe.close()
    os._exit(0)  # ends the process even if other threads hang


def run_each(work: Work, items: Iterable[T], jobs: int, limit: float) -> Iterator[tuple[T, dict[str, Any]]]:
    """Yield the items with their records as they finish.

    A record also has "seconds", and "ended" with the reason if the process failed.
    """
    waiting, running = list(items), []
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(Job(work, waiting.pop(0), limit))
        wait([job.pipe for job in running], timeout=1.0)
        for job in list(running):
            if job.read():
                running.remove(job)
                yield job.item, job.record | {"seconds": round(job.seconds, 1)}
