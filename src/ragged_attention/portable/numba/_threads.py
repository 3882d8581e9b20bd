"""A whole call from torch in machine code: its plan, its programs in threads, and the release of its memory.

No Python exception, such as that of Ctrl-C, can end a call while one of its threads runs.
"""

from typing import Any

from ragged_attention.portable.numba._compiling import machine_code
from ragged_attention.portable.numba._records import FAILED, NO_MEMORY, NUM_PROGRAMS, WORKSPACE, end
from ragged_attention.portable.numba._vectors import (
    allocate,
    call_at,
    compiled,
    in_team,
    int_at,
    join_thread,
    release,
    set_int,
    start_thread,
)


@compiled
def in_own_threads(work, record, num_threads):
    """Call `work` in `num_threads` threads, the caller's included, or in fewer if the system refuses to start more."""
    handles, started = allocate(8 * num_threads), 1
    if handles:
        while started < num_threads and start_thread(handles + 8 * started, work, record) == 0:
            started += 1
    call_at(work, record)
    for index in range(1, started):
        join_thread(int_at(handles, index))
    release(handles)


def run(record, plan, work, team, num_threads):
    """Run a kernel, given the addresses of its two functions; returns 0 or NO_MEMORY.

    `team` is the address of GOMP_parallel, or 0 to start threads here.
    """
    count, complete = call_at(plan, record), True
    if count > 0:
        set_int(record, NUM_PROGRAMS, count)
        num_threads = min(num_threads, count)
        if num_threads < 2:
            call_at(work, record)
        elif team:
            in_team(team, work, record, num_threads)
        else:
            in_own_threads(work, record, num_threads)
        complete = end(record, count) and int_at(record, FAILED) == 0
    release(int_at(record, WORKSPACE))
    return 0 if count >= 0 and complete else NO_MEMORY


def runner() -> Any:
    """The compiled `run`."""
    return machine_code("the threads of the kernels", {run: "int64(int64, int64, int64, int64, int64)"})[0]
