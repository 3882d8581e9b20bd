"""The suite catches faults in this package's Pallas kernels: each mutant has one planted fault and must fail."""

import sys

import pytest

from ragged_attention.testing.drawing import PROFILES, examples_of
from tests.pallas_mutants import MUTANTS, Mutant

pytest.importorskip("jax")

from ragged_attention.testing import tpu_interpreter as interpreter

# The default profile judges one mutant in three. All mutants' replaced texts must still be found in the sources.
JUDGED = list(MUTANTS)[:: 1 if examples_of() > PROFILES["dev"] else 3]


@pytest.mark.parametrize("name", JUDGED)
def test_a_planted_fault_is_caught(name: str) -> None:
    mutant = MUTANTS[name]
    command = (sys.executable, "-m", "tests.pallas_mutants", name)
    verdicts = list(interpreter.judged("pallas", mutant.checks, mode=mutant.mode, timeout=120, command=command))
    assert "FAILED" in [verdict.result for verdict in verdicts]
    for verdict in verdicts:
        assert verdict.result != "FAILED" or "AssertionError" in verdict.message, verdict.message


@pytest.mark.parametrize("name", MUTANTS)
def test_every_fault_can_be_planted(name: str) -> None:
    compile(MUTANTS[name].source(), name, "exec")


def test_a_fault_that_is_nowhere_is_reported() -> None:
    with pytest.raises(ValueError, match=r"expected kernels_pallas/_blocks.py to have the text 'no such text'"):
        Mutant("_blocks", "no such text", "", "eager", ()).source()


def test_checks_of_mutants_exist() -> None:
    known = {str(check) for check in interpreter.checks()}
    assert {check for mutant in MUTANTS.values() for check in mutant.checks} <= known
