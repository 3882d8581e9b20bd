"""After a fork while other threads work, neither the process nor its child hangs."""

import os
import threading

import pytest

from ragged_attention.host import forking
from ragged_attention.host.interpreting import interpreting
from tests.processes import printed

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no os.fork")


def test_a_fork_waits_until_nothing_is_half_done() -> None:
    assert printed("-m", "tests.programs.light_forks") == "well\n"


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
    """A launch within an interpreted launch, as in a signal handler, is an error; waiting would never end."""
    with (
        interpreting(),
        pytest.raises(RuntimeError, match="expected no launch within one that Triton's"),
        interpreting(),
    ):
        pass
    with interpreting():
        pass
