"""Prove and measure the kernels on a machine with a GPU that is available for only a few minutes.

    python -m benchmarks.device --prepare                      beforehand, on any machine: makes carried/
    python -m benchmarks.device prove --out DIR                five minutes: are the kernels right?
    python -m benchmarks.device measure --out DIR              six minutes: how fast are the kernels?
    python -m benchmarks.device prove --device cpu --out DIR   a rehearsal of `prove` with a few small items

Each call appends its results to DIR/record.jsonl as they arrive, and resumes from that record or from
carried/record.jsonl. The exit status is 0 if nothing failed, 1 if something failed or nothing passed, and 2 if there is
no GPU. docs/device.md says more.
"""

import argparse
import contextlib
import dataclasses
import faulthandler
import itertools
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.device import carried, plan, summary
from benchmarks.device.pool import LEAST, ROOT, PhaseRun, Pool
from benchmarks.device.record import FAILED, NAME, PASSED, Record

MINUTES = {"prove": 5.2, "measure": 6.0}
REHEARSED, REHEARSAL_MINUTES = 3, 30  # items per phase, and minutes per call, in a rehearsal on a CPU
RESERVE = 8.0  # seconds reserved at the end of a call for killing processes and for the summary
OVERDUE = 40.0  # seconds after its time limit at which a call is ended by force
QUERIED = "name,driver_version,clocks.sm,clocks.mem,temperature.gpu,power.limit,memory.used,memory.total"
ASKING_TORCH = "import torch; print(torch.cuda.get_device_name())"
PACKAGES = (
    "torch", "triton", "jax", "jaxlib", "jax-cuda13-plugin", "jax-triton", "numpy", "numba", "hypothesis",
)  # fmt: skip


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device", description=__doc__, formatter_class=form)
    parser.add_argument("call", nargs="?", choices=tuple(MINUTES), help="what to do on the device")
    parser.add_argument(
        "--prepare",
        action="store_true",
        help="make the parts to send to the machine with the GPU; needs a network, but no GPU",
    )
    parser.add_argument(
        "--only", default="", metavar="PARTS", help="with --prepare: only these parts, separated by commas"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "device", help="the folder for the record")
    parser.add_argument("--minutes", type=float, help="time limit of the call; default: 5.2 to prove, 6 to measure")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu is a rehearsal")
    parser.add_argument(
        "--phases", default="", help="only the phases whose name contains one of these words, separated by commas"
    )
    parser.add_argument("--items", type=int, help=f"maximum number of items per phase; default on a CPU: {REHEARSED}")
    parser.add_argument("--workers", type=int, help="maximum number of worker processes; default: the number of cores")
    parser.add_argument("--afresh", action="store_true", help="also run items that have passed")
    options = parser.parse_args(argv)
    if options.prepare == bool(options.call):
        parser.error("expected one of prove, measure and --prepare")
    return options


def facts(device: str) -> dict[str, Any]:
    """The machine and its software, found without using the device."""
    versions = {package: carried.version(package) for package in PACKAGES}
    name = "CPU" if device == "cpu" else ""
    machine: dict[str, Any] = {"device": name, "python": platform.python_version(), "versions": versions}
    machine |= {"cores": len(os.sched_getaffinity(0)), "ptxas": plan.newer_ptxas()}
    if device == "cuda":
        row = printed(shutil.which("nvidia-smi") or "nvidia-smi", f"--query-gpu={QUERIED}", "--format=csv,noheader")
        machine |= {"device": row.partition(",")[0] or printed(sys.executable, "-c", ASKING_TORCH), "nvidia-smi": row}
    return machine


def printed(*command: str) -> str:
    """The first line of a command's output, or "" if the command fails or does not exist."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        if done.returncode == 0:
            return done.stdout.partition("\n")[0].strip()
    return ""


def brief(here: dict[str, Any]) -> str:
    """The facts in one line."""
    known = here["carried"]
    parts = ", ".join(known["parts"]) if known else "nothing"
    missing = [part for part in carried.PARTS if not known or part not in known["parts"]]
    parts += f", MISSING: {', '.join(missing)}" if missing else ""
    parts += "".join(f", NOT UNPACKED: {part}: {why}" for part, why in here["not_unpacked"].items())
    old = " (MADE FOR OTHER SOURCES)" if known and carried.is_stale() else ""
    versions = ", ".join(f"{name} {version or 'absent'}" for name, version in here["versions"].items())
    travelled = f"carried: {parts}{old}, unpacked in {here['unpacked']} s"
    return f"{here['cores']} cores, python {here['python']}, {versions}; {travelled}"


def say(line: str) -> None:
    print(line, flush=True)


def conduct(options: argparse.Namespace) -> int:
    """Run the phases of a call one after another."""
    began, rehearsal = time.monotonic(), options.device == "cpu"
    minutes = options.minutes or (REHEARSAL_MINUTES if rehearsal else MINUTES[options.call])
    here, at = facts(options.device), carried.commit()
    head = [f"{here['device'] or 'no GPU'}, commit {at or 'unknown'}"]
    say(head[0])
    if not rehearsal and not here["device"]:
        say("neither nvidia-smi nor torch names a GPU: nothing to do; --device cpu rehearses")
        return 2
    record = Record.begun(options.out, [carried.FOLDER / NAME])
    record.stamp = {
        "call": options.call,
        "device": here["device"],
        "commit": at,
        "sources": carried.source_digest(carried.KERNELS),
        "triton": here["versions"]["triton"],
    }
    record.since = time.time() if options.afresh else 0.0
    here |= carried.unpack(measuring=options.call == "measure")
    record.write("facts", **here)
    head.append(brief(here))
    say(head[1])
    space = plan.SPACE if rehearsal else max(1.0, minutes / MINUTES[options.call])
    conductor = Conductor(options, record, Pool(options.device), began + 60 * minutes - RESERVE, space)
    # the last resort if something hangs; the record is already written
    faulthandler.dump_traceback_later(60 * minutes + OVERDUE, exit=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # raise SystemExit, so that `finally` runs
    try:
        conductor.run()
    finally:
        conductor.pool.end()
        lines = [*summary.lines(record, options.call), f"{time.monotonic() - began:.0f} s"]
        (options.out / "summary.txt").write_text("\n".join([*head, *lines, ""]))
        for line in lines:
            say(line)
        faulthandler.cancel_dump_traceback_later()
    results = {line["result"] for line in record.items().values()}
    return int(FAILED in results or PASSED not in results)


class Conductor:
    """Runs the phases of a call, and starts the processes that each phase needs.

    `space` multiplies the time limits of the phases.
    """

    def __init__(self, options: argparse.Namespace, record: Record, pool: Pool, until: float, space: float) -> None:
        self.options, self.record, self.pool, self.until, self.space = options, record, pool, until, space
        self.cores = options.workers or len(os.sched_getaffinity(0))
        self.most = options.items or (REHEARSED if options.device == "cpu" else 0)

    def run(self) -> None:
        words = [word.strip() for word in self.options.phases.split(",")]
        phases = [
            phase for phase in plan.phases(self.options.call, self.record) if any(word in phase.name for word in words)
        ]
        for phase, following in itertools.zip_longest(phases, phases[1:]):
            if self.until - time.monotonic() < LEAST:
                say(f"{phase.name}: not begun, the time is up")
                continue
            self.begin(phase, following)
            self.phase(phase)
            if phase.name.endswith("smoke"):
                say(summary.verdict(self.record))

    def workers(self, phase: plan.Phase) -> int:
        return min(phase.workers, self.cores)

    def begin(self, phase: plan.Phase, following: plan.Phase | None) -> None:
        """Start the processes of this phase and of the following one, and end all other processes."""
        ahead = following if following and not phase.alone and not following.alone else None
        self.pool.keep(phase.start, *([ahead.start] if ahead else []))
        self.pool.start_ahead(phase.start, min(self.workers(phase), self.most or self.cores))
        if ahead and ahead.start != phase.start:
            self.pool.start_ahead(ahead.start, min(self.workers(ahead), self.most or self.cores))

    def phase(self, phase: plan.Phase) -> None:
        each, seconds = self.space * phase.item_seconds, self.space * phase.seconds
        phase = dataclasses.replace(phase, item_seconds=each, seconds=seconds)
        run = PhaseRun(
            phase, self.pool, self.record, min(self.until, time.monotonic() + phase.seconds), self.workers(phase),
            lambda names: phase.select(self.record, names, self.most),
        )  # fmt: skip
        try:
            run.run()
        except Exception as error:  # an error of this program ends the phase, not the whole call
            traceback.print_exc()
            message = f"{type(error).__name__}: {error}"
            self.record.write("item", phase=phase.name, item="", result=FAILED, message=message)
        say(summary.of_phase(self.record, phase.name))


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if options.prepare:
        from benchmarks.device import prepare

        return prepare.prepare([part for part in options.only.split(",") if part])
    return conduct(options)


if __name__ == "__main__":
    sys.exit(main())
