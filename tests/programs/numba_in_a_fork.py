"""Call `numba` in a forked child, where each call starts its own threads.

The first calls start all their threads, and an exception that arrives during a call is raised after the call. In the
last call there is no memory for the stacks of more threads.
"""

import os
import resource
import signal
from pathlib import Path
from typing import Any

import torch

from ragged_attention.torch import ragged_paged_attention

torch.set_num_threads(3)
q, kv = torch.randn(1600, 2, 64), torch.randn(100, 16, 4, 64)
tables = torch.tensor([1600]).int(), torch.arange(100).int()[None], torch.tensor([0, 1600]).int()
out = torch.empty_like(q)


def attend(**arguments: Any) -> torch.Tensor:
    return ragged_paged_attention(q, kv, *tables, backend="numba", options={"block_q": 64}, **arguments)


def equal(found: torch.Tensor) -> bool:
    # Each part is so small that torch does not use OpenMP, whose threads do not exist in the child.
    return all(torch.equal(*pair) for pair in zip(found.split(200), expected.split(200), strict=True))


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


expected = attend()
child = os.fork()
if not child:
    signal.alarm(60)
    signal.signal(signal.SIGPROF, interrupt)
    assert equal(attend())
    assert equal(attend(out=out))  # torch looks up the operator here, so that interruptions arrive in later calls
    for part in range(8):
        out.view(-1).numpy()[:] = 0
        signal.setitimer(signal.ITIMER_PROF, 0.001 + part * 0.004)
        try:
            attend(out=out)
        except KeyboardInterrupt:
            assert equal(out)
        signal.setitimer(signal.ITIMER_PROF, 0)
    torch.set_num_threads(9)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
    limit = used + 2**22
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    assert equal(attend(out=out))
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print("well")
