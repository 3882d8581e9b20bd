"""The recipes that call other projects' kernels, with stand-ins for kernels whose packages need not be installed.

A stand-in takes the arguments of the kernel that it replaces and computes the result with this project's reference or
backends. If the suite fails, the recipe therefore passes an argument wrongly.
"""

import math
import sys
import types
from typing import Any

import pytest

from benchmarks.judged import Recipe
from ragged_attention.testing import judge

torch = pytest.importorskip("torch")


def judged(recipe: Recipe, only: str) -> None:
    # Several batches are needed to learn which calls a kernel supports.
    examples = 25 if "drawn" in only or "given" in only else 1
    report = judge(recipe.kernel, recipe.operation, **{**recipe.limits, "only": only, "examples": examples})
    report.check()


def module(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    """Make a module of these functions importable, along with the packages that contain it."""
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


def dense_mla_reference(q, cache, table, kv_lens, edges, *, q_scale, kv_scale, sm_scale, v_head_dim, window_size):
    from ragged_attention.torch import ragged_mla_attention

    return ragged_mla_attention(
        q, cache, kv_lens, table, edges, q_scale=q_scale, kv_scale=kv_scale, sm_scale=sm_scale, d_v=v_head_dim,
        sliding_window=window_size, return_lse=True, backend="eager",
    )  # fmt: skip


def sparse_mla_reference(*, q_all, kv_cache, page_table_1, active_token_counts, sm_scale, v_head_dim, return_lse):
    from ragged_attention.torch import mla_decode

    assert return_lse
    out, lse = mla_decode(
        q_all[:, None], kv_cache[:, None], indices=page_table_1[:, None], topk_lens=active_token_counts,
        sm_scale=sm_scale, d_v=v_head_dim, backend="eager",
    )  # fmt: skip
    return out[:, 0], lse[..., 0] / math.log(2)


def compressed_sparse_mla_reference(
    q, cache, lists, lens, *, sm_scale, attn_sink, return_lse, swa_page_size, cache_format, extra_k_cache=None,
    extra_indices=None, extra_topk_lengths=None, extra_page_size=None,
):  # fmt: skip
    from ragged_attention.torch import mla_decode

    def pages_of(pages: Any, page_size: Any, row_bytes: int) -> Any:
        return pages[:, : page_size * row_bytes].reshape(len(pages), page_size, 1, row_bytes)

    assert return_lse
    widths = (584, 584) if cache_format == "deepseek_v4" else (528, 288)
    more: dict[str, Any] = {}
    if extra_k_cache is not None:
        assert extra_indices is not None
        assert (extra_topk_lengths == extra_indices.shape[1]).all()
        more["extra_kv_cache"] = pages_of(extra_k_cache, extra_page_size, widths[1])
        more["extra_indices"] = extra_indices[:, None]
    out, lse = mla_decode(
        q[:, None], pages_of(cache, swa_page_size, widths[0]), indices=lists[:, None], topk_lens=lens.int(),
        sm_scale=sm_scale, sinks=attn_sink, backend="eager", **more,
    )  # fmt: skip
    return out[:, 0], lse[..., 0]


def contiguous_logits_reference(*, q_fp8, weights, kv_fp8, k_start, k_end):
    from ragged_attention.torch import indexer_logits

    keys, scale = kv_fp8
    return indexer_logits(q_fp8, keys, weights, key_scale=scale, starts=k_start, stops=k_end, backend="eager")


def paged_decode_logits_reference(
    *, q_fp8, weights, index_k_cache, real_page_table, query_row_to_batch, seqlens_per_query, page_size
):
    from ragged_attention.torch import indexer_logits

    return indexer_logits(
        q_fp8, index_k_cache.view(len(index_k_cache), page_size, 1, -1), weights,
        page_indices=real_page_table[query_row_to_batch], kv_lens=seqlens_per_query.int(),
        cu_q_lens=torch.arange(len(q_fp8) + 1, dtype=torch.int32), backend="eager",
    )  # fmt: skip


def msa_paged_decode_block_scores_reference(
    *, q_fp8, q_scale, index_k_cache, real_page_table, cache_seqlens_int32, page_size
):
    from ragged_attention.torch import block_scores

    scores = block_scores(
        q_fp8, index_k_cache.view(len(index_k_cache), page_size, 1, -1), block_size=128, kv_lens=cache_seqlens_int32,
        page_indices=real_page_table, cu_q_lens=torch.arange(len(q_fp8) + 1, dtype=torch.int32), backend="eager",
    )  # fmt: skip
    return scores.transpose(0, 1) * q_scale.T[..., None] / math.sqrt(128)


def msa_select_blocks_reference(*, block_scores, query_positions, topk):
    from ragged_attention.torch import top_k_blocks

    own = torch.arange(block_scores.shape[2]) == query_positions[:, None] // 128
    scores = block_scores.masked_fill(own & (query_positions >= 0)[:, None], torch.inf)
    return top_k_blocks(scores.transpose(0, 1).contiguous(), topk, backend="eager").transpose(0, 1)


@pytest.mark.parametrize(
    ("name", "only"),
    [
        ("block_scores", "block scores on drawn batches"),
        ("blocks", "selection of given blocks"),
        ("latents", "DeepSeek V3, bfloat16"),
        ("latents", "ragged latents on drawn batches"),
        ("listed", "latent decode, fp8_v32, scales powers"),
        ("listed", "decode, lengths cut lists"),
        ("compressed", "latent decode, fp8_v4, scales far apart"),
        ("compressed", "lengths 0, fp8_v41, 16 heads"),
        ("compressed", "extra cache fp4_v41 beside fp8_v41, 64 heads"),
        ("logits", "indexer logits, as in the model"),
        ("logits", "packed as DeepGEMM has it"),
    ],
)
def test_flashinfer_latents(monkeypatch: pytest.MonkeyPatch, name: str, only: str) -> None:
    from benchmarks.judged import of_flashinfer

    module_of = types.SimpleNamespace(
        dense_mla_reference=dense_mla_reference,
        sparse_mla_reference=sparse_mla_reference,
        compressed_sparse_mla_reference=compressed_sparse_mla_reference,
        contiguous_logits_reference=contiguous_logits_reference,
        paged_decode_logits_reference=paged_decode_logits_reference,
        msa_paged_decode_block_scores_reference=msa_paged_decode_block_scores_reference,
        msa_select_blocks_reference=msa_select_blocks_reference,
    )
    monkeypatch.setattr(of_flashinfer, "reference", lambda path: module_of)
    judged(of_flashinfer.RECIPES[f"flashinfer_{name}"], only)


def multi_latent_ragged_page_attention(
    q, q_rotary, rows, rotary, cache, kv_lens, table, edges, counts, *, softmax_scale, sliding_window, logits_soft_cap
):
    import jax.numpy as jnp

    from ragged_attention.jax import ragged_mla_attention

    d_v, width = q.shape[2], -(-q.shape[2] // 128) * 128
    assert counts.tolist() == [0, 0, len(kv_lens)]
    assert cache.shape[2] * cache.dtype.itemsize == 4
    plain = cache.reshape(len(cache), -1, 1, cache.shape[3])
    plain = jnp.concatenate([plain[..., :d_v], plain[..., width : width + q_rotary.shape[2]]], axis=3)
    return ragged_mla_attention(
        jnp.concatenate([q, q_rotary], axis=2), plain, kv_lens, table.reshape(len(kv_lens), -1), edges, d_v=d_v,
        sm_scale=softmax_scale, sliding_window=sliding_window, soft_cap=logits_soft_cap,
        new_kv=jnp.concatenate([rows, rotary], axis=1),
    )  # fmt: skip


def flash_mla(q, rows, w_k, w_v, *, b_k, causal, softmax_scale, softmax_aux, logits_soft_cap, sliding_window):
    import jax.numpy as jnp

    from ragged_attention.jax import ragged_mla_attention

    num_tokens, d_v = rows.shape[1:]
    assert (w_k[:, 0] == jnp.eye(d_v)).all()
    assert (w_v == w_k).all()
    latents = rows if b_k is None else jnp.concatenate([rows, b_k], axis=2)
    count = jnp.array([num_tokens], jnp.int32)
    return ragged_mla_attention(
        q[0], latents[:, :, None], count, jnp.zeros((1, 1), jnp.int32), jnp.array([0, num_tokens], jnp.int32), d_v=d_v,
        sm_scale=softmax_scale, causal=causal, sinks=softmax_aux, soft_cap=logits_soft_cap,
        sliding_window=None if sliding_window is None else sliding_window[0] + 1,
    )[None]  # fmt: skip


def deepseek_attn(q, rows, w_k, w_v, query_index, key_index, index_weights, index_topk, *, softmax_scale, causal, b_k):
    import jax.numpy as jnp

    from ragged_attention.jax import sparse_mla_prefill, top_k_indices

    assert not causal
    scores = jnp.einsum("qhd,kd,qh->qk", query_index[0], key_index[0], index_weights[0]).astype(jnp.float32)
    latents = rows if b_k is None else jnp.concatenate([rows, b_k], axis=2)
    chosen = top_k_indices(scores, index_topk)[:, None]
    return sparse_mla_prefill(q[0], latents[0][:, None], chosen, sm_scale=softmax_scale, d_v=rows.shape[2])[0][None]


@pytest.mark.parametrize(
    ("name", "only"),
    [
        ("latents", "ragged latents, mixed"),
        ("latents", "window within the last pages"),
        ("latents", "ragged latents, float16"),
        ("flash_mla", "soft cap, window and sinks"),
        ("flash_mla", "ragged latents, not causal"),
        ("flash_mla", "no rotary columns"),
        ("listed", "sparse prefill, top-k longer"),
        ("listed", "sparse prefill on drawn batches"),
    ],
)
def test_ejkernel_latents(monkeypatch: pytest.MonkeyPatch, name: str, only: str) -> None:
    pytest.importorskip("jax")
    from benchmarks.judged import of_ejkernel

    for function in (multi_latent_ragged_page_attention, flash_mla, deepseek_attn):
        each = function.__name__
        module(monkeypatch, f"ejkernel.kernels._xla.{each}", **{each: function})
    judged(of_ejkernel.RECIPES[f"ejkernel_{name}"], only)


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

    limits = {**of_cpus.PAGED, "page_sizes": None}  # no named batch has a page size of 32
    judged(Recipe("torch", of_cpus.function(kernel), "ragged_paged_attention", limits), "attention, chunks")


def test_a_version_is_of_the_distribution() -> None:
    assert Recipe("torch", print, "varlen_attention", {}).version == f"torch {torch.__version__}"
