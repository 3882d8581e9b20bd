"""The record of a test run, and the page that is written from the record."""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from ragged_attention.testing.paged.specs import Spec
from ragged_attention.testing.runner import runner_for
from tests import record

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parent.parent
STATUS = runpy.run_path(str(ROOT / "docs" / "status_table.py"))
RECORD = {
    "date": "2026-01-02",
    "commit": "abc1234",
    "command": "make test",
    "tests": {"passed": 7, "failed": 1},
    "operations": {
        "mla_decode": {"eager": {"passed": 3}, "cuda": {"passed": 1, "failed": 1}, "mutant": {"failed": 9}},
        "write_kv_pages": {"triton": {"passed": 2}},
    },
}


def page(shown: dict) -> str:
    return f"before\n{STATUS['BEGIN']}{STATUS['table'](shown)}{STATUS['END']}after\n"


def without(operation: str, backend: str) -> dict:
    changed = json.loads(json.dumps(RECORD))
    del changed["operations"][operation][backend]
    return changed


def test_the_table_says_what_ran() -> None:
    table = STATUS["table"](RECORD)
    assert "2026-01-02 at commit abc1234 by `make test`: 7 tests passed, 1 failed." in table
    assert "| `mla_decode` | - | - | 3 pass | - | - | - | - | 1 pass, 1 FAIL |" in table
    assert "mutant" not in table


def test_a_page_that_differs_from_a_run_is_noticed() -> None:
    healed = without("mla_decode", "cuda")
    assert STATUS["faults"](page(healed), healed) == []
    assert STATUS["faults"](page(RECORD), RECORD) == ["mla_decode on cuda is named, but failed"]
    assert STATUS["faults"](page(healed), without("write_kv_pages", "triton")) == [
        "write_kv_pages on triton is named, but did not run",
        "mla_decode on cuda ran, but is not named",
    ]


def test_a_test_is_recorded_with_what_its_runners_ran(tmp_path: Path) -> None:
    item = SimpleNamespace(user_properties=[])
    around = record.pytest_runtest_call(item)  # type: ignore[arg-type]
    next(around)
    runner_for("reference", "torch").run("ragged_paged_attention", Spec(lens=((1, 1),)).build())
    with pytest.raises(StopIteration):
        next(around)
    file = tmp_path / "deep" / "tests.json"
    options = {"--tier": "covering", "--record": str(file)}
    counted = record.Record(SimpleNamespace(args=(), getoption=options.get))  # type: ignore[arg-type]
    for when in ("setup", "call", "teardown"):
        properties = item.user_properties if when == "call" else []
        report = SimpleNamespace(when=when, outcome="passed", user_properties=properties)
        counted.pytest_runtest_logreport(report)  # type: ignore[arg-type]
    counted.pytest_sessionfinish()
    written = json.loads(file.read_text())
    assert (written["command"], written["tests"]) == ("make test", {"passed": 1})
    assert written["operations"] == {"ragged_paged_attention": {"reference": {"passed": 1}}}
