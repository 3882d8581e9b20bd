"""The sweep over the models of transformers reports its records correctly and detects wrong results."""

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from benchmarks.transformers_models import __main__ as sweep  # noqa: E402
from benchmarks.transformers_models import page  # noqa: E402
from benchmarks.transformers_models.building import KINDS, build, configuration, layers_kept  # noqa: E402
from benchmarks.transformers_models.images import NoForm, image_inputs  # noqa: E402
from benchmarks.transformers_models.outcomes import EAGER, SDPA, Outcome, compare, distance  # noqa: E402
from benchmarks.transformers_models.processes import run_each  # noqa: E402
from benchmarks.transformers_models.verdicts import cells, is_wrong, verdict  # noqa: E402
from benchmarks.transformers_models.watching import watching  # noqa: E402
from ragged_attention.errors import Unsupported  # noqa: E402
from ragged_attention.integrations import transformers as ragged  # noqa: E402
from ragged_attention.integrations.transformers import _calls, _host  # noqa: E402
from tests.with_transformers import registered as registered  # noqa: E402

# transformers warns about its own code, and Python about forks.
pytestmark = pytest.mark.filterwarnings("ignore")
CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
QUICK = "encoder-decoder"  # one family of models, which is quick to run
KERNEL, DENSE = ["XAttention", "varlen_attention", ""], ["XAttention", "dense attention in torch", "it drops weights"]


@pytest.fixture(autouse=True)
def left_as_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registered: None) -> Iterator[None]:
    level = logging.root.manager.disable
    monkeypatch.setattr(sweep, "RAW", tmp_path / "raw.jsonl")
    yield
    _calls.calls.clear()
    logging.disable(level)


def record(**others: Any) -> dict[str, Any]:
    checks = {"generate": [("equal", "1e-07")], "packed": [("not judged", "eager: why")]}
    return {"family": "x", "kind": "causal", "kinds": [], "own": [], "calls": [KERNEL], "checks": checks} | others


# ---- reports


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({}, "equal"),
        ({"calls": [KERNEL, DENSE]}, "equal, partly dense: it drops weights"),
        ({"calls": [DENSE]}, "dense: it drops weights"),
        ({"calls": [DENSE, ["AbsorbedX", "sparse_mla_prefill", ""]]}, "dense: it drops weights"),
        ({"calls": [DENSE, ["IndexedX", "indexer_logits", ""]]}, "dense: it drops weights"),
        ({"calls": [], "own": ["XAttention"]}, "own code: XAttention"),
        ({"own": ["YAttention"]}, "equal; partly own code: YAttention"),
        ({"calls": []}, "no softmax"),
        ({"unbuilt": "no PIL"}, "cannot be built: no PIL"),
        ({"checks": {"generate": [("not judged", "eager: broken")]}}, "cannot be built: eager: broken"),
        ({"checks": {}}, "cannot be built: nothing was compared"),
        ({"ended": "took longer than 5 s"}, "crashes: took longer than 5 s"),
        (
            {"checks": {"logits": [("differs", "0.1"), ("differs", "0.2")], "padded": [("crashes", "E: no")]}},
            "differs: logits",
        ),
        (
            {"checks": {"logits": [("refused", "no")], "padded": [("refused", "no")], "packed": [("equal", "")]}},
            "refused: logits, padded (no)",
        ),
        ({"checks": {"logits": [("equal", "0.1")], "padded": [("crashes", "E: no")]}}, "crashes: padded (E: no)"),
    ],
)  # fmt: skip
def test_a_verdict_says_the_worst(others: dict[str, Any], said: str) -> None:
    assert verdict(record(**others)) == said
    assert is_wrong(record(**others)) == said.startswith(("differs", "crashes"))


def test_a_row_has_a_cell_for_each_column() -> None:
    checks = {"generate": [("equal", "")], "logits": [("equal", ""), ("differs", "")], "images": []}
    row = cells(record(checks=checks, kinds=["grouped", "window"], text_only="no form"))
    assert row[:3] == ["x", "grouped, window", "differs: logits"]
    assert row[3:] == ["=", "differs", "", "", "", "", "", "text only: no form"]


def test_rows_are_written_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    page.PAGE.write_text("Above.\n" + "".join(f"{begin}{end}Between.\n" for begin, end in map(page.marks, KINDS)))
    a, b = record(family="a"), record(family="b", calls=[DENSE])
    assert len(page.changed([a])) == 1
    page.write([b])
    page.write([a])
    assert page.changed([a, b]) == []
    assert list(page.rows_of("causal")) == ["a", "b"]
    assert page.rows_of("seq2seq") == {}
    assert "| a |  | equal |" in page.changed([record(family="a", kinds=["grouped"])])[0]
    assert page.PAGE.read_text().count("Between.") == 3
    assert f"With transformers {transformers.__version__}: 1 equal, 1 dense.\n" in page.PAGE.read_text()


def test_the_page_has_every_family_of_the_release_that_is_installed_here() -> None:
    pinned = next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("transformers=="))
    assert page.PAGE.read_text().count(f"With transformers {pinned.partition('==')[2]}: ") == len(KINDS)
    for kind, (_, names) in KINDS.items():
        assert set(names) <= set(page.rows_of(kind))


# ---- comparisons


def test_shards_part_the_families() -> None:
    every = sweep.entries(sweep.parse([]))
    parts = [sweep.entries(sweep.parse(["--shard", f"{which}/6"])) for which in range(6)]
    assert sorted(entry for part in parts for entry in part) == sorted(every)
    assert min(map(len, parts)) > 30
    assert sweep.entries(sweep.parse(["llama", "t5", "--kind", "seq2seq"])) == [("seq2seq", "t5")]
    with pytest.raises(SystemExit, match="expected families of transformers, got lama"):
        sweep.entries(sweep.parse(["lama"]))


def test_every_kind_of_layer_is_kept_once() -> None:
    config = configuration("gemma3_text", "causal")
    assert config.layer_types == ["sliding_attention", "full_attention"]
    assert (config.sliding_window, config.num_key_value_heads, config.head_dim) == (7, 2, 16)
    kinds = ["a", "a", "b", "a", "b", "c"]
    assert layers_kept(transformers.PreTrainedConfig(layer_types=kinds), 6) == [0, 2, 5]
    assert layers_kept(transformers.PreTrainedConfig(layer_types=["a"] * 6), 6) == [0, 1]


def test_heads_over_256_stay_that() -> None:
    assert configuration("deepseek_v4", "causal").head_dim > 256


def test_no_difference_hides() -> None:
    right = (torch.ones(3), torch.ones(2))
    assert distance((torch.ones(3), torch.ones(2)), right) == 0
    assert distance((torch.ones(3), torch.tensor([1.0, 2.0])), right) > 0.5
    assert not distance((torch.tensor([1.0, 2.0, 1.0]), torch.full((2,), torch.nan)), right) <= 1e9


def outcome_of(found: Any, *others: Any, theirs: float = 1.0, by_sdpa: float | None = None) -> Outcome:
    """The outcome of a comparison if transformers' attention gives `theirs` and ours gives `found`, or raises it."""

    def run(model: Any, attention: str) -> Any:
        if attention == ragged.NAME and isinstance(found, Exception):
            raise found
        values = {EAGER: theirs, SDPA: theirs if by_sdpa is None else by_sdpa, ragged.NAME: found}
        return (torch.tensor([values[attention]]),)

    return compare("model", "model", run, *others)


def test_outcomes() -> None:
    assert outcome_of(1.0).word == "equal"
    assert outcome_of(1.01).word == "differs"
    assert outcome_of(1.01, lambda model, attention: (torch.tensor([1.01]),)).word == "equal"
    assert outcome_of(1.01, lambda model, attention: (torch.tensor([1.02]),)).word == "differs"
    assert outcome_of(1.01, by_sdpa=1.01) == Outcome("equal", "to sdpa, else off by 1.0e-02")
    assert outcome_of(1.01, by_sdpa=1.02).word == "differs"
    assert outcome_of(Unsupported("expected no x")) == Outcome("refused", "expected no x")
    assert outcome_of(ValueError("no")) == Outcome("crashes", "ValueError: no")
    assert outcome_of(1.0, theirs=float("inf")) == Outcome("not judged", "eager: ValueError: not finite")


@pytest.mark.parametrize(("ours", "word"), [(1.05, "equal"), (1.2, "differs")])
def test_a_step_of_bfloat16_may_be_off_twice_as_far_as_its_own(ours: float, word: str) -> None:
    values = {("exact", EAGER): 1.0, ("model", EAGER): 1.05, ("model", ragged.NAME): ours}
    values |= {(of, SDPA): values[of, EAGER] for of in ("exact", "model")}
    assert compare("model", "exact", lambda *key: (torch.tensor([values[key]]),)).word == word


@pytest.mark.parametrize(
    ("family", "kinds", "own"),
    [
        ("gemma3_text", {"grouped", "window"}, set()),
        ("bloom", set(), {"BloomAttention"}),
        ("mamba", {"recurrent"}, set()),
    ],
)
def test_a_family_is_watched(family: str, kinds: set[str], own: set[str]) -> None:
    model = build(family, "causal")
    model.set_attn_implementation(ragged.NAME)
    with watching(model) as found, torch.no_grad():
        model(torch.arange(12)[None])
    assert (found.kinds, found.own) == (kinds, own)


def test_images_change_what_is_compared() -> None:
    inputs = image_inputs(build("qwen2_vl", "images"))
    assert {"pixel_values", "image_grid_thw", "input_ids"} <= set(inputs)
    with pytest.raises(NoForm, match="no images in a known form") as refusal:
        image_inputs(build("mamba", "causal"))
    assert f"text only: {refusal.value} |" in page.PAGE.read_text()


# ---- processes


def parts(item: str) -> Iterator[dict[str, Any]]:
    yield {"begun": item}
    if item == "ends":
        os._exit(3)
    if item == "hangs":
        time.sleep(60)
    if item == "fails":
        raise ValueError("no")
    yield {"done": True}


def test_no_item_ends_the_others() -> None:
    found = dict(run_each(parts, ["ends", "hangs", "fails", "works"], jobs=4, limit=1.0))
    assert found["works"]["done"]
    assert found["ends"]["ended"] == "the process ended with 3"
    assert found["fails"]["ended"] == "ValueError: no"
    assert found["hangs"]["ended"] == "took longer than 1 s"
    assert all(each["begun"] == item for item, each in found.items())


def test_a_family_agrees(capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep.main([QUICK, "--jobs", "1"]) == 0
    assert capsys.readouterr().out.endswith("): equal\n1 equal\n")


def test_a_silent_difference_is_reported(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any, **others: Any) -> Any:
        out, weights = right(*args, **others)
        return 1.001 * out, weights

    right = _host.attention
    monkeypatch.setattr(_host, "attention", wrong)
    ragged.unregister()
    assert sweep.main([QUICK, "--jobs", "1"]) == 1
    assert "differs: generate, logits, static cache, padded\n" in capsys.readouterr().out


def test_a_changed_row_is_reported(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "rows_of", lambda kind: {})
    assert sweep.main([QUICK, "--jobs", "1", "--check"]) == 1
    assert f"to say of {QUICK} | {QUICK} |" in capsys.readouterr().err
