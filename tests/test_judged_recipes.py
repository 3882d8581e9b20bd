"""The recipes around kernels of other projects, with stand-ins for the kernels of packages that need not be installed.

A stand-in takes the arguments that its kernel takes, and computes by this project, so the suite finds what a recipe
passes wrongly.
"""

import sys
import types
from typing import Any

import pytest

from benchmarks.judged import Recipe
from ragged_attention.testing import judge

torch = pytest.importorskip("torch")


def judged(recipe: Recipe, only: str) -> None:
    report = judge(recipe.kernel, recipe.operation, **{**recipe.limits, "only": only, "examples": 1})
    report.check()


def module(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    """A module to import, and the packages that it is in."""
    words = name.split(".")
    for count in range(1, len(words) + 1):
        package = types.ModuleType(".".join(words[:count]))
        package.__path__ = []
        monkeypatch.setitem(sys.modules, package.__name__, package)
    sys.modules[name].__dict__.update(functions)


def window_of(left: int) -> int | None:
    return left + 1 if left >= 0 else None


@pytest.mark.parametrize("only", ["attention, sinks", "attention, sm_scale", "soft cap", "window of a page"])
def test_vllm_unified(monkeypatch: pytest.MonkeyPatch, only: str) -> None:
    from benchmarks.judged import of_triton
    from ragged_attention.torch import ragged_paged_attention

    def unified_attention(
        q, k, v, out, cu_q_lens, max_q_len, kv_lens, max_kv_len, scale, causal, window, table, cap, *_, sinks, **__
    ) -> None:  # fmt: skip
        assert (max_q_len, max_kv_len) == (int(cu_q_lens.diff().max()), int(kv_lens.max()))
        out[:] = ragged_paged_attention(
            q, (k, v), kv_lens, table, cu_q_lens, sm_scale=scale, causal=causal, soft_cap=cap or None, sinks=sinks,
            sliding_window=window_of(window[0]), backend="eager",
        )  # fmt: skip

    kernels = types.SimpleNamespace(unified_attention=unified_attention)
    monkeypatch.setattr(of_triton, "vllm_module", lambda name: kernels)
    judged(of_triton.RECIPES["vllm_unified"], only)


@pytest.mark.parametrize(
    ("name", "only"),
    [
        ("vllm_decode", "attention, decode"),
        ("vllm_decode", "attention, one key"),
        ("vllm_mla", "latent decode, dense, 128 heads"),
    ],
)
def test_vllm_decode(monkeypatch: pytest.MonkeyPatch, name: str, only: str) -> None:
    from benchmarks.judged import of_triton
    from ragged_attention.torch import ragged_paged_attention

    def decode_attention_fwd(q, k, v, out, lse, table, kv_lens, logits, splits, scale, page_size, logit_cap, **_):
        assert logits.shape == (*q.shape[:2], splits, v.shape[3] + 1)
        assert page_size == k.shape[1]
        edges = torch.arange(len(q) + 1, dtype=torch.int32)
        out[:], lse[:] = ragged_paged_attention(
            q, (k, v), kv_lens, table, edges, sm_scale=scale, soft_cap=logit_cap or None, return_lse=True,
            backend="eager",
        )  # fmt: skip

    kernels = types.SimpleNamespace(decode_attention_fwd=decode_attention_fwd)
    monkeypatch.setattr(of_triton, "vllm_module", lambda name: kernels)
    judged(of_triton.RECIPES[name], only)


def test_fla_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.judged import of_torch, of_triton

    def parallel_attn(q, k, v, scale, window_size, cu_seqlens, sink_bias):
        assert sink_bias is None
        return of_torch.sdpa(q[0], k[0], v[0], cu_seqlens, cu_seqlens, scale, True, window_size)[None]

    module(monkeypatch, "fla.ops.attn.parallel", parallel_attn=parallel_attn)
    judged(of_triton.RECIPES["fla_parallel"], "packed, grouped heads")


def test_fla_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.judged import of_triton
    from ragged_attention.torch import varlen_attention

    def attn_decoding_one_step(q, k, v, scale, cu_seqlens, window_size, sink_bias):
        edges = torch.arange(q.shape[1] + 1, dtype=torch.int32)
        return varlen_attention(
            q[0], k[0], v[0], edges, cu_seqlens.int(), sm_scale=scale, causal=True, sliding_window=window_size,
            sinks=sink_bias, backend="eager",
        )[None]  # fmt: skip

    tuned = types.SimpleNamespace(fn=types.SimpleNamespace(configs=[1, 2]))
    functions = {"naive_attn_decoding_kernel": tuned, "attn_decoding_one_step": attn_decoding_one_step}
    module(monkeypatch, "fla.ops.attn.decoding", **functions)
    judged(of_triton.RECIPES["fla_decode"], "attention, decode")
    assert tuned.fn.configs == [1]


@pytest.mark.parametrize("only", ["attention, sinks", "attention, sm_scale", "window of a page", "one key"])
def test_flashinfer(monkeypatch: pytest.MonkeyPatch, only: str) -> None:
    from benchmarks.judged import of_flashinfer
    from ragged_attention.torch import ragged_paged_attention

    def reference(q, k, v, table, kv_lens, edges, *, softmax_scale, causal, window_left, attention_sink_bias):
        return ragged_paged_attention(
            q, (k, v), kv_lens, table, edges, sm_scale=softmax_scale, causal=causal, return_lse=True,
            sliding_window=window_of(window_left), sinks=attention_sink_bias, backend="eager",
        )  # fmt: skip

    module_of = types.SimpleNamespace(paged_attention_reference=reference)
    monkeypatch.setattr(of_flashinfer, "reference", lambda path: module_of)
    judged(of_flashinfer.RECIPES["flashinfer_paged"], only)


@pytest.mark.parametrize("only", ["attention, sinks", "attention, sm_scale", "soft cap", "window of a page"])
@pytest.mark.parametrize("name", ["ejkernel_ragged", "ejkernel_unified"])
def test_ejkernel(monkeypatch: pytest.MonkeyPatch, name: str, only: str) -> None:
    pytest.importorskip("jax")
    from benchmarks.judged import of_ejkernel
    from ragged_attention.compat import ejkernel
    from ragged_attention.jax import ragged_paged_attention

    def unified_attention(q, k, v, kv_lens, table, edges, **given):
        return ragged_paged_attention(
            q, (k, v), kv_lens, table, edges, sinks=given["softmax_aux"], sm_scale=given["softmax_scale"],
            causal=given["causal"], sliding_window=given["sliding_window"], soft_cap=given["logits_soft_cap"],
        )  # fmt: skip

    functions = {
        "ragged_page_attention_v2": ejkernel.ragged_page_attention_v2,
        "unified_attention": unified_attention,
    }
    for each, function in functions.items():
        module(monkeypatch, f"ejkernel.kernels._xla.{each}", **{each: function})
    judged(of_ejkernel.RECIPES[name], only)


def test_jax() -> None:
    pytest.importorskip("jax")
    from benchmarks.judged import of_jax

    judged(of_jax.RECIPES["dot_product"], "packed, grouped heads")


def test_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.judged import of_cpus
    from ragged_attention.torch import ragged_paged_attention

    def kernel(inputs):
        kv_pages = (inputs["k"], inputs["v"])
        more = (inputs["kv_lens"], inputs["page_indices"], inputs["cu_q_lens"])
        return {"kernel": lambda: ragged_paged_attention(inputs["q"], kv_pages, *more, backend="eager")}

    limits = {**of_cpus.PAGED, "page_sizes": None}  # no named batch has pages of 32
    judged(Recipe("torch", of_cpus.function(kernel), "ragged_paged_attention", limits), "attention, chunks")


def test_a_version_is_of_the_distribution() -> None:
    assert Recipe("torch", print, "varlen_attention", {}).version == f"torch {torch.__version__}"
