"""Documents and examples pass `sm_scale` to latent attention, because its default is wrong for absorbed models."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LATENT = {"mla_decode", "ragged_mla_attention", "sparse_mla_prefill", "context_parallel_mla_decode"}
# Documents whose layers are not absorbed: their queries are as wide as the latents, so the default is right.
NOT_ABSORBED = {"docs/guides/train_deepseek.md", "docs/sparse_attention.md#training", "examples/train_deepseek.py"}


def calls_without_scale(code: str) -> list[str]:
    """The calls of latent attention that pass neither `sm_scale` nor `**keywords`."""
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    named = [(ast.unparse(call.func).rpartition(".")[2], {word.arg for word in call.keywords}) for call in calls]
    return [name for name, keywords in named if name in LATENT and not keywords & {"sm_scale", None}]


def texts() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "examples").glob("*.py")):
        yield str(path.relative_to(ROOT)), path.read_text()
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for code in FENCE.findall(path.read_text()):
            part = "#training" if path.name == "sparse_attention.md" and "attention_target" in code else ""
            yield f"{path.relative_to(ROOT)}{part}", code


def test_every_call_of_latent_attention_has_a_scale() -> None:
    assert {name for name, code in texts() if calls_without_scale(code)} == NOT_ABSORBED


@pytest.mark.parametrize(
    ("code", "missing"),
    [
        ("mla_decode(q, cache, d_v=64)", ["mla_decode"]),
        ("ra.torch.sparse_mla_prefill(q, kv, indices)", ["sparse_mla_prefill"]),
        ("mla_decode(q, cache, sm_scale=0.1)", []),
        ("mla_decode(q, cache, **keywords)", []),
        ("ragged_paged_attention(q, kv_pages)", []),
    ],
)
def test_calls_without_a_scale_are_found(code: str, missing: list[str]) -> None:
    assert calls_without_scale(code) == missing
