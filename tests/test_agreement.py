"""Every backend gives what the definition gives: on a named batch for each edge, and on drawn ones."""

import pytest

from ragged_attention import dispatch
from ragged_attention.testing.runners import Runner, runner_for
from ragged_attention.testing.suite import Check, agreement, corners

# Drawn batches are slow where each is compiled or interpreted anew; the corners are run in full everywhere.
PACE = {"jax-xla": 0.2, "torch-triton": 0.4, "jax-triton": 0.2}


@pytest.mark.parametrize("check", list(corners()), ids=str)
def test_corner(runner: Runner, check: Check) -> None:
    check.run(runner, 1)


@pytest.mark.parametrize("check", list(agreement()), ids=str)
def test_agreement(runner: Runner, check: Check, examples: int) -> None:
    check.run(runner, max(3, int(examples * PACE.get(str(runner), 1.0))))


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("backend", dispatch.ROOMS)
def test_a_backend_runs_here_or_says_why(backend: str, framework: str) -> None:
    reason = runner_for(backend, framework).absent()
    if reason is not None:
        assert len(reason) > 10
        pytest.skip(reason)
