"""Forks while other threads are at work: neither the process nor its copy waits for what does not come."""

import os
import subprocess
import sys
import threading

import pytest

from ragged_attention.host import forking
from ragged_attention.host.interpreting import interpreting
from tests.apart import printed

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")

# In a process without other threads of any library; each line is a fork at another time.
LIGHT = """
import os, signal, threading, time
from ragged_attention.host import forking
from ragged_attention.config import use_backend
from ragged_attention.host.interpreting import interpreting

def fork():
    child = os.fork()
    if not child:
        signal.alarm(20)
        with interpreting(), forking.postponed():
            use_backend("eager")
        os._exit(0 if forking.forked() and not forking._inside else 3)
    assert os.waitpid(child, 0)[1] == 0
    assert not forking.forked()

def hold(section):
    with section():
        begun.set()
        time.sleep(0.2)
        ended.append(section)

fork()
for section in (interpreting, forking.postponed):
    begun, ended = threading.Event(), []
    thread = threading.Thread(target=hold, args=(section,))
    thread.start()
    begun.wait()
    fork()
    assert ended  # so that nothing half done was copied
    thread.join()
    with section():
        child = os.fork()  # a thread does not wait for itself
    if not child:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
print("well")
"""


def test_a_fork_waits_until_nothing_is_half_done() -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "well\n", done.stdout + done.stderr


def test_kernels_for_cpus_run_in_every_copy_of_a_process() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("numba")
    assert printed("-m", "tests.forks") == "well\n"


def test_sections_that_forks_wait_for_do_not_wait_for_each_other() -> None:
    with forking.postponed():
        other = threading.Thread(target=lambda: forking.postponed().__enter__())
        other.start()
        other.join(10)
        assert not other.is_alive()
    forking._inside.clear()


def test_a_launch_within_an_interpreted_one_is_an_error() -> None:
    """As in the handler of a signal, where waiting for the other one would never end."""
    with (
        interpreting(),
        pytest.raises(RuntimeError, match="expected no launch within one that Triton's"),
        interpreting(),
    ):
        pass
    with interpreting():
        pass
