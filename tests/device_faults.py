"""Work items with planted faults, which the tests give to the processes of `benchmarks.device`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FAULTS = ("abort", "killed", "hang", "poison", "full card", "wrong", "noise", "asynchronous")


def hang_here() -> None:
    time.sleep(1e6)


class Items:
    def __init__(self, device: str, log: str, *options: str) -> None:
        self.log, self.pending = log, ""
        if "never" in options:
            raise ImportError("no such library")
        if "once" in options:  # the first process starts, and later processes fail
            with open(f"{log}.started", "a+") as file:
                file.seek(0)
                if file.read():
                    raise ImportError("no second time")
                file.write("started")

    def facts(self) -> dict[str, Any]:
        return {"process": os.getpid()}

    def names(self, what: str) -> list[str]:
        if what == "faults":
            return [name for fault in FAULTS for name in (f"before {fault}", fault)] + ["the last"]
        if what == "hang alone":
            return ["hang"]
        if what == "slow":
            return [f"slow {number}" for number in range(20)]
        raise RuntimeError("there is nothing of that kind")

    def run(self, what: str, name: str) -> dict[str, Any]:
        with open(self.log, "a") as file:
            file.write(f"{os.getpid()} {name}\n")
        match name:
            case "abort":
                os.abort()
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                hang_here()
            case "poison":
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            case "full card":
                raise MemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
            case "wrong":
                raise AssertionError("expected 1.5, got 2.5")
            case "child":
                child = subprocess.Popen(["sleep", "60"], start_new_session=True)
                Path(f"{self.log}.child").write_text(str(child.pid))
            case "noise":
                sys.stdout.write("what a library prints\n")
                os.write(1, b"and what one in C prints\n")
            case "asynchronous":
                self.pending = "CUDA error: misaligned address"
        if what == "slow":
            time.sleep(0.4)
        return {"result": "passed", "extra": name}

    def settle(self) -> None:
        if self.pending:
            raise RuntimeError(self.pending)
