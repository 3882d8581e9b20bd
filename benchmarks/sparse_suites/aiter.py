"""Runs aiter's tests of paged decode through `ragged_paged_attention`, also with caches of MI300's 8-bit floats."""

import sys
import types
from pathlib import Path
from typing import Any

import torch

from benchmarks.foreign_tests import bare_package
from ragged_attention.errors import Unsupported
from ragged_attention.torch import ragged_paged_attention

FILES = ("op_tests/triton_tests/attention/test_pa_decode.py",)
SIZES = ("B", "H_Q", "SEQ_LEN")
LARGEST = 1e5
TESTS = ("test_paged_attn", "test_paged_attn_per_token_quant")


def paged_attention_decode(
    output: Any, query: Any, key_cache: Any, value_cache: Any, seq_lens: Any, block_tables: Any, attn_scale: float,
    max_seq_len: int, compute_type: Any, k_scale: Any, v_scale: Any, num_seq_partitions: int = 0,
    alibi_slopes: Any = None,
) -> None:  # fmt: skip
    """Replace aiter's function. Queries are [sequences, heads, size], and caches [pages, KV heads, positions, size]."""
    if k_scale.numel() > 1:
        raise Unsupported(f"expected one k_scale, got {tuple(k_scale.shape)}: scales of single positions")
    pages = key_cache.transpose(1, 2), value_cache.transpose(1, 2)
    edges = torch.arange(len(query) + 1, dtype=torch.int32)
    output[:] = ragged_paged_attention(
        query.to(output.dtype), pages, seq_lens.int(), block_tables, edges, sm_scale=attn_scale, k_scale=k_scale,
        v_scale=v_scale, alibi_slopes=alibi_slopes,
    )  # fmt: skip


def pertoken_quant(x: Any, scale_dtype: Any, quant_dtype: Any) -> tuple[Any, Any]:
    """The rows as 8-bit codes, with one scale per row."""
    scale = (x.float().abs().amax(-1, keepdim=True) / torch.finfo(quant_dtype).max).to(scale_dtype)
    return (x.float() / scale).to(quant_dtype), scale


def install(checkout: Path) -> None:
    """Make stand-ins for the two modules that the tests import. Nothing of aiter's own package is imported."""
    bare_package("aiter", checkout / "aiter")
    vars(sys.modules["aiter"])["pertoken_quant"] = pertoken_quant
    for name in ("ops", "ops.triton", "ops.triton.attention"):
        bare_package(f"aiter.{name}", checkout / "aiter" / name.replace(".", "/"))
    module = types.ModuleType("aiter.ops.triton.attention.pa_decode")
    vars(module)["paged_attention_decode"] = paged_attention_decode
    sys.modules[module.__name__] = module
