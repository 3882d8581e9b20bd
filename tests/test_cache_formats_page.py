"""The tables of docs/cache_formats.md agree with the saved results, which the benchmark reproduces."""

import json

import pytest

pytest.importorskip("torch")

import torch

from benchmarks import cache_formats as bench
from benchmarks.timing import Timing
from ragged_attention.calls.cache_formats import SCALED_FORMATS, KvFormat
from ragged_attention.torch import quantize_kv


@pytest.fixture(scope="module")
def record() -> dict:
    return json.loads(bench.RESULTS.read_text())


def test_the_page_has_the_tables(record: dict) -> None:
    assert bench.PAGE.read_text() == bench.written(bench.PAGE.read_text(), record)
    assert bench.main(["--check"]) == 0


def test_a_page_without_its_marks_is_refused(record: dict) -> None:
    with pytest.raises(ValueError, match=r"expected the page to have the lines <!-- bytes and errors: .* and <!-- end"):
        bench.written("# A page\n", record)


@pytest.mark.parametrize("form", SCALED_FORMATS, ids=lambda form: f"{form.name} {form.zero}")
def test_every_format_with_scales_is_described(form: KvFormat) -> None:
    assert f"`{form.name}`" in bench.PAGE.read_text()
    assert f'"{form.name}"' in str(quantize_kv.__doc__)


@pytest.mark.parametrize("form", bench.FORMATS, ids=lambda form: form.name)
def test_bytes_are_those_of_the_arrays(record: dict, form: bench.Format) -> None:
    (row,) = (row for row in record["formats"] if row["name"] == form.name)
    for width in bench.WIDTHS:
        pages, scales = form.empty(width, 1, 1)
        held = pages.nbytes + (0 if scales is None else scales.nbytes)
        assert row["bytes"][str(width)] == 2 * held / bench.PAGE_SIZE


@pytest.mark.parametrize("form", bench.FORMATS[::3], ids=lambda form: form.name)
def test_errors_are_those_that_the_results_say(record: dict, form: bench.Format) -> None:
    (row,) = (row for row in record["formats"] if row["name"] == form.name)
    found = bench.errors(form, [bench.with_outliers(64)])
    assert found == {name: pytest.approx(value, rel=1e-2) for name, value in row["errors"]["outliers 64"].items()}


def test_narrow_heads_have_no_blocks() -> None:
    mxfp8 = next(form for form in bench.FORMATS if form.name == "mxfp8")
    assert bench.errors(mxfp8, [bench.gaussian(16)]) is None


def test_attention_in_float64_is_the_definition() -> None:
    base = bench.FORMATS[0]
    q, k, v = (rows.bfloat16().float() for rows in bench.gaussian(32))
    found = bench.errors(base, [(q, k, v)])
    assert found is not None
    assert found["largest"] < 1e-5


def test_times_that_disagree_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    seconds = iter([1.0, 1.0, 2.0, 2.0, *[1.0] * 4, 2.0, 1.0, 1.3, 1.0])

    def timed(calls: dict, rounds: int) -> dict[str, Timing]:
        del rounds
        return {name: Timing((1.0 if name == bench.BASE else next(seconds),)) for name in calls}

    monkeypatch.setattr(bench, "decode", lambda form, keys: form.name)
    monkeypatch.setattr(bench, "on_cpu", timed)
    forms = bench.FORMATS[:3]
    try:
        steady, apart = bench.times(forms[:2]), bench.times(forms)
    finally:
        torch.set_num_threads(threads)
    assert steady["over_bfloat16"] == {
        "1024": {"bfloat16": 1.0, "int8": 1.0},
        "8192": {"bfloat16": 1.0, "int8": 2.0},
    }
    assert apart["over_bfloat16"] == {}
    assert "two runs differed by" in bench.tables({"formats": [], "times": apart})["times"]
    table = bench.tables({"formats": [], "times": steady})["times"]
    assert "| format | 8 x 1k keys | 8 x 8k keys |\n|---|---|---|\n| bfloat16 | 1.00 | 1.00 |\n" in table
    assert "| int8 | 1.00 | 2.00 |" in table


def test_a_run_without_times_keeps_those_of_the_last_one(
    record: dict, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setattr(bench, "measured", lambda console: {"formats": record["formats"]})
    page, results = tmp_path / "page.md", tmp_path / "results.json"
    page.write_text(bench.PAGE.read_text())
    results.write_text(bench.RESULTS.read_text())
    monkeypatch.setattr(bench, "PAGE", page)
    monkeypatch.setattr(bench, "RESULTS", results)
    assert bench.main(["--save"]) == 0
    assert json.loads(results.read_text()) == record
    results.unlink()
    assert bench.saved_times() is None
    page.write_text(page.read_text().replace("| nvfp4 |", "| nvfp5 |"))
    results.write_text(json.dumps(record))
    assert bench.main(["--check"]) == int(record["times"] is not None)
