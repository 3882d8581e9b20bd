"""CPU kernels that run out of memory at each of their allocations in turn; run as a script in a separate process.

Every operation is called repeatedly. The first call may allocate nothing, the second call may allocate once, and so
on. Each call must raise the expected error or give the result of the reference implementation.
"""

import ctypes
import sys
from collections.abc import Iterable
from typing import Any

from llvmlite import binding

from ragged_attention.testing import environment

environment.prepare("cpu")

import torch  # noqa: E402

from ragged_attention import dispatch  # noqa: E402
from ragged_attention.calls import CALLS  # noqa: E402
from ragged_attention.errors import BackendMissing  # noqa: E402
from ragged_attention.testing.drawing import Check  # noqa: E402
from ragged_attention.testing.runner import ANSWERED, Declined, Runner, runner_for  # noqa: E402
from ragged_attention.testing.suite import corners  # noqa: E402

ALLOCATES_NOTHING = "page_indices_to_slots"
FOR_JAX = {"attention": "ragged_paged_attention", "packed gradient": "varlen_attention_backward"}
granted, asked = sys.maxsize, 0  # allocations of one call: the limit, and the number requested so far
real_aligned_alloc = ctypes.CDLL(None).aligned_alloc
real_aligned_alloc.argtypes, real_aligned_alloc.restype = (ctypes.c_size_t, ctypes.c_size_t), ctypes.c_void_p


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
def limited(alignment: int, size: int) -> int | None:
    global asked
    asked += 1
    return real_aligned_alloc(alignment, size) if asked <= granted else None


def run(runner: Runner, check: Check, limit: int) -> bool:
    """Whether a check runs out of memory if only `limit` allocations are granted."""
    global granted, asked
    granted, asked = limit, 0
    try:
        check.run(runner, 1)
    except (MemoryError, RuntimeError, ValueError) as error:
        on_jax = runner.framework == "jax"
        expected = isinstance(error, MemoryError) or (on_jax and str(error).startswith("RESOURCE_EXHAUSTED: "))
        if not expected or "found no memory to work in" not in str(error) or asked <= limit:
            raise
        return True
    finally:
        granted = sys.maxsize
    return False


def first_corners() -> dict[str, Check]:
    """The first corner of each kind; a corner's kind is its name up to the first comma."""
    checks: dict[str, Check] = {}
    for check in corners():
        checks.setdefault(check.name.partition(",")[0], check)
    return checks


def starve(runner: Runner, checks: Iterable[Check], operations: Iterable[str]) -> None:
    """Starve each check that is the first to call one of the operations.

    For each of these checks, print the number of limits under which it ran out of memory.
    """
    uncalled = set(operations)
    for check in checks:
        ANSWERED.clear()
        try:
            check.run(runner, 1)
        except Declined:
            continue
        if not (called := {operation for operation, _ in ANSWERED} & uncalled):
            continue
        uncalled -= called
        failed, limit = 0, 0
        while limit == 0 or asked >= limit:  # the last run reached its limit
            failed += run(runner, check, limit)
            limit += 1
        assert failed, check
        sys.stdout.write(f"{runner} {', '.join(sorted(called))} {failed}\n")
    assert not uncalled, f"no corner calls {', '.join(sorted(uncalled))}"


def offered(operation: str) -> Any:
    try:
        return dispatch.load(operation, "numba")
    except BackendMissing:
        return None


if __name__ == "__main__":
    binding.add_symbol("aligned_alloc", ctypes.cast(limited, ctypes.c_void_p).value)
    torch.set_num_threads(2)
    kinds = first_corners()
    starve(
        runner_for("numba", "torch"), kinds.values(), {name for name in CALLS if offered(name)} - {ALLOCATES_NOTHING}
    )
    starve(runner_for("numba", "jax"), [kinds[name] for name in FOR_JAX], FOR_JAX.values())
    sys.stdout.write("well\n")
