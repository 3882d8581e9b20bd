"""The suite passes other people's correct kernels: plain Triton that rounds by `.to`, `tl.store` and `tl.dot`."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ragged_attention import dispatch
from ragged_attention.testing import runner_for, verdicts
from ragged_attention.testing.drawing import Check, on_corner
from ragged_attention.testing.indexer.oracle import check_logits
from ragged_attention.testing.indexer.specs import IndexerSpec
from ragged_attention.testing.mla.oracle import check_decode
from ragged_attention.testing.mla.specs import DecodeSpec
from ragged_attention.testing.paged.oracle import check_attention, check_write
from ragged_attention.testing.paged.specs import Spec
from ragged_attention.testing.paged.strategies import WriteSpec
from ragged_attention.testing.varlen.oracle import check_varlen
from ragged_attention.testing.varlen.specs import VarlenSpec
from tests.processes import ROOT, printed

pytest.importorskip("triton")

LENS = ((1, 40), (5, 9), (1, 33), (3, 3), (1, 0))
HEADS: dict[str, Any] = {"num_kv_heads": 2, "group": 3, "head_dim": 40}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {  # (check, spec class, its fields) by operation
    "ragged_paged_attention": (check_attention, Spec, {"lens": LENS, "poison": "nan", **HEADS}),
    "mla_decode": (check_decode, DecodeSpec, {"kv_lens": (40, 5, 0, 33), "q_tokens": 2, "heads": 20, "topk": 0}),
    "varlen_attention": (check_varlen, VarlenSpec, {"lens": LENS, "causal": True, "kv_heads": 2, "group": 3, "d": 40}),
    "indexer_logits": (check_logits, IndexerSpec, {"lens": LENS[:2], "packed": True, "heads": 5, "head_dim": 48}),
}


def forget() -> None:
    for cached in (dispatch.third_party_packages, dispatch._announced, dispatch.load):
        cached.cache_clear()


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The backend `stranger`, registered through an entry point, as if pip had installed its package."""
    info = tmp_path / "stranger-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{dispatch.ENTRY_POINTS}]\nstranger = tests.stranger\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    forget()
    yield "stranger"
    forget()


@pytest.mark.usefixtures("stranger")
def test_compiled_kernels_of_others_pass_in_the_emulator_of_ptx(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    found = printed("-m", "tests.programs.compiled_strangers", PYTHONPATH=path)
    assert [line.split()[0] for line in found.splitlines() if "result='passed'" in line] == list(FAMILIES)


def passes(backend: str, framework: str, check: Any, structure: Any) -> None:
    pytest.importorskip(framework)
    judged = Check("corner", "a right kernel", on_corner(check, structure.build))
    verdict = verdicts.verdict_of(runner_for(backend, framework), judged, examples=1)
    assert verdict.result == "passed", verdict.message


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_right_attentions_and_logits_pass(stranger: str, family: str, dtype: str, framework: str) -> None:
    check, structure, fields = FAMILIES[family]
    passes(stranger, framework, check, structure(dtype=dtype, **fields))


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("cache_dtype", [None, "float8_e4m3fn", "float8_e5m2"])
def test_right_writes_pass(stranger: str, dtype: str, cache_dtype: str | None, framework: str) -> None:
    spec = Spec(dtype=dtype, cache_dtype=cache_dtype, lens=LENS[:2], scales="float", **HEADS)
    passes(stranger, framework, check_write, WriteSpec(spec=spec, reach=1.0 if cache_dtype is None else 1000.0))
