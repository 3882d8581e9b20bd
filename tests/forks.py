"""A test of forks before, during and after calls of the CPU kernels; run as a script in a separate process.

The process starts OpenMP's threads first. A fork does not copy them.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.context import BaseContext

import torch

torch.set_num_threads(2)
if __name__ != "__mp_main__":  # the name under which a child process imports this module: no threads there
    torch.ones(2_000_000).exp_()


def expect_right() -> None:
    """Check a call of a kernel with several programs, on tensors so small that torch itself uses one thread."""
    from ragged_attention.torch import merge_attention_states as merge

    out, _ = merge(torch.ones(3, 100, 4, 16), torch.zeros(3, 100, 4), backend="numba")
    assert out.sum().item() == out.numel()


def expect_right_in_copies() -> None:
    """Check a call in two child processes, and in a child process of each of them."""
    for _ in range(2):
        expect_right_in_a_copy(lambda: (expect_right(), expect_right_in_a_copy(expect_right)))


def expect_right_in_a_copy(function: Callable[[], object]) -> None:
    child = os.fork()
    if not child:
        signal.alarm(40)  # ends the child if it waits for a thread that the fork did not copy
        code = 3
        try:
            function()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def expect_right_in_a_process(context: BaseContext) -> None:
    process = context.Process(target=expect_right)  # type: ignore[attr-defined]
    process.start()
    process.join(40)
    process.kill()
    assert process.exitcode == 0


class Calls(torch.utils.data.Dataset[torch.Tensor]):
    """A data set whose items are produced after a call of a kernel."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        expect_right()
        return torch.tensor(index)


def beside(function: Callable[[], object], then: Callable[[], object], begun: Callable[[], bool]) -> None:
    """Run `function` in another thread, and `then` in this thread as soon as `begun` returns True."""
    thread = threading.Thread(target=function)
    thread.start()
    while not begun():
        time.sleep(0.001)
    then()
    thread.join()


def one(address: int) -> int:
    return address + 1


def two(address: int) -> int:
    return address + 2


def expect_compiled() -> None:
    from ragged_attention.portable.numba._compiling import machine_code

    assert machine_code("two", {two: "int64(int64)"})[0].ctypes(3) == 5


def fork_while_compiling() -> None:
    from ragged_attention.portable.numba import _compiling

    begun: list[object] = []
    _compiling._Shelf.load_overload = lambda *given: begun.append(given)  # type: ignore[method-assign]
    _compiling._Shelf.save_overload = lambda *given: None  # type: ignore[method-assign]
    beside(
        lambda: _compiling.machine_code("one", {one: "int64(int64)"}),
        lambda: expect_right_in_a_copy(expect_compiled),
        lambda: bool(begun),
    )


def main() -> None:
    expect_right_in_a_copy(expect_right)  # the front end is imported in the child
    import ragged_attention.torch  # noqa: F401

    expect_right_in_copies()  # before the first call
    # during the first call, which runs in another thread
    beside(expect_right, expect_right_in_copies, lambda: "numba" in sys.modules)
    expect_right_in_copies()  # after the first call
    ended = threading.Event()

    def call_all_the_time() -> None:
        while not ended.is_set():
            expect_right()

    def fork_all_the_time() -> None:
        for _ in range(3):
            expect_right_in_copies()
        ended.set()

    beside(call_all_the_time, fork_all_the_time, lambda: True)
    beside(expect_right_in_copies, expect_right, lambda: True)  # the other thread forks while this thread calls
    fork_while_compiling()
    expect_right_in_a_process(multiprocessing.get_context("fork"))
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["tests.forks"])
    expect_right_in_a_process(server)
    loaded = torch.utils.data.DataLoader(Calls(), num_workers=2, multiprocessing_context="fork")
    assert sorted(int(item) for item in loaded) == [0, 1, 2, 3]
    expect_right()
    sys.stdout.write("well\n")


if __name__ == "__main__":
    main()
