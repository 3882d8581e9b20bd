"""A process that runs items for `pool`: python -m benchmarks.device.worker MODULE DEVICE [ARGUMENT ...]

It answers each line of standard input with a line on standard output. Both are JSON. MODULE has a class `Items`:

    Items(device, *arguments)    device is "cuda" or "cpu"; an exception says why nothing can run here
    facts() -> dict              facts about the process, reported when it is ready
    names(what) -> list[str]     the items; an exception says why there are none
    run(what, name) -> dict      result, message, and further fields of the record; an exception is a failure
    settle()                     waits for the device, so that an error is reported for the item that caused it
    limit                        seconds that the next item may take; set before each item
"""

import ctypes
import faulthandler
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import IO, Any

from benchmarks.device import carried
from benchmarks.device.record import FAILED

# On this signal, a process writes to standard error where it hangs. SIGUSR1 and SIGUSR2 are not free, because LLVM
# (Triton, XLA) handles them.
DUMP = signal.SIGVTALRM
DUMPS = "(most recent call first)"  # text in the first line of each thread in faulthandler's output
LONGEST = 1500  # most characters of a message
# After one of these errors, later results of the process mean nothing, or it keeps memory that other processes need.
POISON = (
    "CUDA error", "CUDA_ERROR", "cudaError", "illegal memory access", "misaligned address", "illegal instruction",
    "unspecified launch failure", "device-side assert", "CUBLAS_STATUS", "CUDNN_STATUS", "out of memory",
    "RESOURCE_EXHAUSTED",
)  # fmt: skip


def is_poison(message: str) -> bool:
    """Whether a message means that this process must not run anything else."""
    return any(word in message for word in POISON)


def answer_to(items: Any, request: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request."""
    began = time.perf_counter()
    try:
        if "list" in request:
            return {"names": items.names(request["list"])}
        items.limit = request["seconds"]
        answer = items.run(request["what"], request["run"])
    except Exception as error:
        answer: dict[str, Any] = {"result": FAILED, "message": f"{type(error).__name__}: {error}"}
        if "list" in request:
            return {"absent": answer["message"][:LONGEST]}
    message = str(answer.get("message", ""))
    try:
        items.settle()
    except Exception as error:  # an error that the item caused on the device appears only here
        answer["result"], message = FAILED, f"{type(error).__name__}: {error}\n{message}"
    if answer["result"] == FAILED and is_poison(message):
        answer["poisoned"] = True
    return answer | {"message": message[:LONGEST], "seconds": round(time.perf_counter() - began, 3)}


def serve(module: str, device: str, arguments: Sequence[str], requests: IO[str], answers: IO[str]) -> None:
    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        carried.use(device)
        items = importlib.import_module(module).Items(device, *arguments)
        say({"ready": items.facts()})
    except Exception as error:
        say({"absent": f"{type(error).__name__}: {error}"[:LONGEST]})
        return
    for line in requests:
        answer = answer_to(items, json.loads(line))
        say(answer)
        if answer.get("poisoned"):
            answers.close()
            os._exit(3)  # a normal exit would wait for a device that may not answer any more


def main() -> None:
    module, device, *arguments = sys.argv[1:]
    faulthandler.enable()
    faulthandler.register(DUMP)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no worker outlives the call that started it
    # Output of libraries must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(module, device, arguments, sys.stdin, answers)


if __name__ == "__main__":
    main()
