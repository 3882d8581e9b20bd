"""Run checks in a separate process, which can be killed if it hangs and can configure Triton or jax differently.

The process reads names of checks from its standard input and answers each with one line of JSON.
"""

import atexit
import contextlib
import dataclasses
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, ClassVar

from ragged_attention.testing.drawing import Check
from ragged_attention.testing.runner import Runner
from ragged_attention.testing.verdicts import Verdict, verdict_of

READY = "ready\n"


def judged(
    command: Sequence[str], names: Iterable[str], *, timeout: float, environ: Mapping[str, str] | None = None
) -> Iterator[Verdict]:
    """The verdicts of the named checks, from a process that `command` starts and that runs `serve`.

    `timeout` applies to each check, in seconds. A process that hangs is killed, and the next check runs in a new one.
    The process stays alive, so that the next call with the same command and environment reuses it. `environ` is added
    to the environment.
    """
    for name in names:
        yield _process(tuple(command), tuple(sorted((environ or {}).items()))).verdict(name, timeout)


def serve(runner: Runner, checks: Iterable[Check], examples: int) -> None:
    """Run the checks that are named on standard input and write their verdicts; the last step of a `main` function."""
    sys.stdout.write(READY)
    out, sys.stdout = sys.stdout, sys.stderr  # only verdicts go to standard output
    out.flush()
    answer(runner, {str(check): check for check in checks}, sys.stdin, examples, out)


def answer(runner: Runner, checks: Mapping[str, Check], names: Iterable[str], examples: int, out: IO[str]) -> None:
    """Run the named checks in this process, and write each verdict as a line of JSON as soon as it is known."""
    for name in names:
        out.write(json.dumps(dataclasses.asdict(verdict_of(runner, checks[name.strip()], examples))) + "\n")
        out.flush()


def _process(command: tuple[str, ...], environ: tuple[tuple[str, str], ...]) -> "_Process":
    """The running process of this command. A process of any other command is killed, because it takes much memory."""
    if (running := _Process.last) and (running.ended or running.started_by != (command, environ)):
        running.end()
    if _Process.last is None:
        _Process.last = _Process(command, environ)
    return _Process.last


class _Process:
    """A process that reads names of checks and answers each with a line of JSON."""

    last: ClassVar["_Process | None"] = None

    def __init__(self, command: tuple[str, ...], environ: tuple[tuple[str, str], ...]) -> None:
        self.started_by, self.ended = (command, environ), False
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed by `end`)
        everything = os.environ | {"JAX_PLATFORMS": "cpu"} | dict(environ)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=everything
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._begun = False

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._lines.put(line)
        self._lines.put(None)

    def verdict(self, name: str, timeout: float) -> Verdict:
        """The verdict of the named check, which is FAILED if the process hangs or dies."""
        if not self._begun:  # import time does not count towards a check's timeout
            self._begun = self._lines.get() == READY
        begun = time.perf_counter()
        try:
            line = self._answer(name, timeout) if self._begun else None
        except queue.Empty:
            line, hung, message = None, True, f"no end after {timeout:.0f} s: a wait that nothing satisfies?"
        else:
            hung, message = False, "the process ended"
        if line is not None:
            return Verdict(**json.loads(line))
        self.ended = True
        self._process.kill()
        self._process.wait()
        self._errors.seek(0)
        report = f"{message}\n{self._errors.read()[-2000:]}".strip()
        return Verdict(name, "FAILED", seconds=time.perf_counter() - begun, message=report, hung=hung)

    def _answer(self, name: str, timeout: float) -> str | None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # if the process has ended, `_lines` yields None
            self._process.stdin.write(f"{name}\n")
            self._process.stdin.flush()
        return self._lines.get(timeout=timeout)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            with contextlib.suppress(BrokenPipeError):
                stream.close()  # type: ignore[union-attr]
        _Process.last = None


@atexit.register
def _end_the_last() -> None:
    if _Process.last:
        _Process.last.end()
