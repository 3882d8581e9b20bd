"""The output, files and exit status of `ragged-attention conformance`."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ragged_attention import dispatch
from ragged_attention.errors import InvalidInput, how_to_install
from ragged_attention.testing import conformance, environment, progress, reporting
from ragged_attention.testing.verdicts import Verdict
from ragged_attention.tools import cli
from tests import partial_backend

pytest.importorskip("torch", reason="the backend runs through the torch front end")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
Judge = Callable[..., int]


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[Judge]:
    """A function that runs the command on the partial backend with a fault."""

    def run(fault: str, *arguments: str) -> int:
        partial_backend.plant(monkeypatch, fault)
        return conformance.main(["--backend", "partial", "--framework", "torch", "--examples", "6", *arguments])

    yield run
    dispatch.load.cache_clear()


def test_all_that_could_be_judged_passed(judge: Judge, capsys: pytest.CaptureFixture[str]) -> None:
    assert judge("", "--only", "law: p") == 0
    printed = capsys.readouterr().out
    # The laws about partial results and packed sequences need operations that the backend lacks.
    assert re.search(r"^2 passed, \d+ declined, 0 FAILED$", printed, re.MULTILINE)
    assert re.search(r"\d+ batches were declined; the commonest reasons are: .*does not honour num_seqs \(", printed)


def test_a_failure_is_told_in_full(judge: Judge, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        judge("lse in base 2", "--only", "pages may be") == 0
    )  # passes, because the law compares the backend with itself
    capsys.readouterr()
    assert judge("lse in base 2", "--only", "attention on drawn") == 1
    printed = capsys.readouterr().out
    assert "1 check fails: lse is in base 2: multiply it by ln 2" in printed
    assert re.search(r"smallest batch: Spec\(lens=.*dtype='bfloat16'", printed)
    assert "partial's ragged_paged_attention takes: return_lse, sliding_window, sm_scale, soft_cap" in printed
    again = "repeat: ragged-attention conformance --backend partial --framework torch --examples 6 --only "
    assert f"{again}'agreement: attention on drawn batches'" in printed


def test_a_pipe_gets_lines_of_progress(
    judge: Judge, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SAID_EVERY", -1.0)
    assert judge("", "--only", "law: p") == 0
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("[0/")
    assert all(re.match(r"\[\d+/\d+\] torch-partial  ", line) for line in said)


def test_nothing_could_be_judged(judge: Judge) -> None:
    assert judge("", "--only", "write on drawn") == 2
    assert judge("", "--only", "attention, window of 1") == 2  # its batch has an unsupported dtype


@pytest.mark.parametrize("wrong", [("--examples", "0"), ("--framework", "numpy"), ("--no-such-option",)])
def test_a_mistake_in_what_is_asked_for(
    judge: Judge, wrong: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        judge("", *wrong)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert wrong[0] in error


def test_a_missing_extra_is_no_failed_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(cli.OTHER_COMMANDS, "conformance", ("a_module_that_nobody_has", ""))
    assert cli.main(["conformance", "--backend", "partial"]) == 2
    assert "a_module_that_nobody_has" in capsys.readouterr().err
    monkeypatch.setattr(environment, "find_spec", lambda name: None if name == "hypothesis" else name)
    assert cli.main(["conformance", "--backend", "partial"]) == 2
    wanted = f"ragged-attention: conformance needs hypothesis: {how_to_install('testing')}\n"
    assert capsys.readouterr().err == wanted


def test_the_first_failure_ends_a_run(judge: Judge, tmp_path: Path) -> None:
    counts = []
    for more in ([], ["--fail-fast"]):
        assert judge("unscaled softmax", "--only", "attention ", "--junit", str(tmp_path / "it.xml"), *more) == 1
        counts.append(len(ElementTree.parse(tmp_path / "it.xml").findall(".//testcase")))
    cases = ElementTree.parse(tmp_path / "it.xml").findall(".//testcase")
    assert counts[1] < counts[0]
    assert [case.find("failure") is not None for case in cases] == [False] * (len(cases) - 1) + [True]


def test_junit_has_every_check(judge: Judge, tmp_path: Path) -> None:
    assert judge("lse in base 2", "--only", "attention ", "--junit", str(tmp_path / "it.xml")) == 1
    # The backend takes no scale pages, so random batches with them are changed to batches without them.
    (suite,) = ElementTree.parse(tmp_path / "it.xml").getroot()
    cases = {case.get("name"): case for case in suite}
    assert suite.attrib.items() >= {"name": "torch-partial", "tests": str(len(cases)), "failures": "2"}.items()
    assert int(suite.attrib["skipped"]) == len(list(suite.iter("skipped"))) > 5
    for failure in suite.iter("failure"):
        assert "lse is in base 2" in failure.attrib["message"]
        assert "Spec(" in str(failure.text)
    refusals = [skipped.attrib["message"] for skipped in suite.iter("skipped")]
    assert "partial does not promise batch_invariant for ragged_paged_attention" in refusals


def test_a_file_that_cannot_be_written_is_told_at_once(judge: Judge, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="expected --junit to be a file that can be written"):
        judge("", "--junit", str(tmp_path / "no" / "it.xml"))


def test_failures_are_grouped_by_what_most_share() -> None:
    lines = [
        Verdict("law: a", "FAILED", causes=("only here", "the window")),
        Verdict("law: b", "FAILED", causes=("the window",)),
        Verdict("law: c", "FAILED"),
        Verdict("law: d", "passed"),
    ]
    groups = {cause: [line.check for line in group] for cause, group in reporting.grouped(lines).items()}
    assert groups == {"the window": ["law: a", "law: b"], reporting.UNKNOWN: ["law: c"]}
