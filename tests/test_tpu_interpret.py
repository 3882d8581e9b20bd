"""The Pallas kernels agree with the reference in both modes of the interpreter, which runs in separate processes.

All checks would take hours, so a few represent them: one of each kind in the mode that detects races, and one of every
third kind in the other mode. Kernels with planted faults show that the checks detect faults.
"""

import collections
import functools
import re
import sys
from pathlib import Path

import pytest

from ragged_attention.calls import CALLS
from ragged_attention.testing.drawing import PROFILES, examples_of
from tests.processes import printed

pytest.importorskip("jax")

from ragged_attention.testing import conformance
from ragged_attention.testing import tpu_interpreter as interpreter
from ragged_attention.testing.drawing import Check
from ragged_attention.testing.runner import ANSWERED
from tests import planted_pallas as planting

FOLDER = Path(__file__).parent.parent / "kernels_pallas"
OPERATIONS = sorted({path.stem for path in FOLDER.glob("*.py")} & set(CALLS))
PIECE = 8  # checks per piece
DECLINED = re.compile(r"fp8_v4\b|, page\b|drafted")  # formats and masks that the kernels decline
EXAMPLES = 2 if examples_of() == PROFILES["dev"] else examples_of() // 20


@functools.cache
def checks_by_operation() -> dict[str, dict[str, list[Check]]]:
    """The checks of each operation by kind. They are cached, because finding an operation takes a reference run."""
    found: dict[str, dict[str, list[Check]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for check in interpreter.checks():
        if operation := interpreter.operation_of(check):
            found[operation][check.kind].append(check)
    return found


def checks_of(operation: str) -> dict[str, list[Check]]:
    return checks_by_operation()[operation]


def representatives(operation: str, mode: str) -> list[str]:
    """The names of the checks that represent all checks of an operation in a mode."""
    kinds = [[check for check in group if not DECLINED.search(str(check))] for group in checks_of(operation).values()]
    kinds = [group for group in kinds if group]
    share, every = {"on_wait": (0.25, 1), "eager": (0.75, 3)}[mode]
    return [str(group[int(share * len(group))]) for group in kinds[::every]]


def pieces() -> list[list[str]]:
    """The names of all checks, in pieces that each take minutes."""
    names = [str(check) for check in interpreter.checks()]
    return [names[first : first + PIECE] for first in range(0, len(names), PIECE)]


def expect_agreement(names: list[str], mode: str) -> int:
    """Run checks, all of which must pass; returns the number of batches that the kernels took."""
    wrong, taken = [], 0
    for verdict in interpreter.judged("pallas", names, mode=mode, examples=EXAMPLES):
        taken += verdict.taken
        ANSWERED.update((name, "pallas") for name in verdict.answered)  # the checks ran in another process
        if verdict.result == "FAILED":
            wrong.append(f"{verdict.check}: {verdict.message}")
        if verdict.hung:  # the other checks may hang too
            break
    assert not wrong, "\n".join(wrong)
    return taken


@pytest.mark.each("operation")
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("mode", interpreter.MODES)
def test_the_kernels_agree_with_the_definition(mode: str, operation: str) -> None:
    assert expect_agreement(representatives(operation, mode), mode), "every batch was declined"


@pytest.mark.parametrize("names", pieces(), ids=lambda names: names[0])
@pytest.mark.parametrize("mode", interpreter.MODES)
def test_all_checks_agree(mode: str, names: list[str]) -> None:
    expect_agreement(names, mode)


def test_every_operation_of_the_room_is_judged() -> None:
    for operation in OPERATIONS:
        assert {"corner", "agreement"} <= set(checks_of(operation)), operation


def of_planted() -> list[Check]:
    return checks_of(planting.OPERATION)["corner"]


@pytest.mark.parametrize("mode", interpreter.MODES)
def test_an_honest_kernel_passes(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    planting.plant(monkeypatch, "none")
    runner = interpreter.InterpretedRunner(backend=planting.BACKEND, mode=mode)
    assert [check.run(runner, 1) for check in of_planted()[:3]] == [1, 1, 1]


CAUGHT = {
    "no wait": ("on_wait", "got nan"),
    "a wait too few": ("eager", "non-zero count"),
    "one semaphore for both slots": ("on_wait", "got nan"),
    "a read of what is on its way": ("on_wait", "RACE DETECTED"),
    "a part too far": ("eager", "Out-of-bounds"),
    "a part too early": ("eager", "Out-of-bounds"),
    "wrong": ("eager", "times the bound"),
}


@pytest.mark.parametrize("fault", CAUGHT)
def test_a_faulty_kernel_fails(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    planting.plant(monkeypatch, fault)
    mode, expected = CAUGHT[fault]
    runner = interpreter.InterpretedRunner(backend=planting.BACKEND, mode=mode)
    said = []
    for check in of_planted():
        try:
            check.run(runner, 1)
        except AssertionError as error:
            said.append(str(error))
            break
    assert any(expected in text for text in said), said


def test_a_kernel_that_runs_on_after_its_call_is_waited_for() -> None:
    """A kernel that outlives its call is waited for. With one device, jax returns from some calls before they run."""
    printed("-m", "tests.programs.late_tpu_interpreter", XLA_FLAGS="")


def test_a_kernel_that_hangs_is_ended_and_named() -> None:
    """A check that hangs is ended and reported. The next check runs in another process."""
    names = [str(check) for check in of_planted()[:2]]
    command = (sys.executable, "-m", "tests.planted_pallas", "a wait too many")
    verdicts = list(interpreter.judged(planting.BACKEND, names, mode="eager", timeout=3, command=command))
    assert [verdict.check for verdict in verdicts] == names
    assert all(verdict.hung and "no end after 3 s" in verdict.message for verdict in verdicts)


def test_a_process_that_dies_is_reported() -> None:
    command = (sys.executable, "-c", "import sys; sys.exit('no such luck')")
    (verdict,) = interpreter.judged("pallas", ["corner: any"], mode="eager", command=command)
    assert verdict.result == "FAILED"
    assert not verdict.hung
    assert "the process ended" in verdict.message
    assert "no such luck" in verdict.message


def test_the_command_judges_pallas_kernels_in_both_modes(capsys: pytest.CaptureFixture[str]) -> None:
    assert conformance.main(["--backend", "pallas", "--only", "write, by slots: int8"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "No TPU is used: jax's interpreter of TPU kernels runs them" in printed
    for mode in interpreter.MODES:
        assert f"jax-pallas, interpreted, {mode} on cpu" in printed
    assert printed.count("1 passed, 0 declined, 0 FAILED") == 2


def test_faults_are_complete() -> None:
    assert {*CAUGHT, "none", "a wait too many"} == set(planting.FAULTS)
    with pytest.raises(ValueError, match=r"expected a fault among none, .*, got 'other'"):
        planting.plant(pytest.MonkeyPatch(), "other")
