"""Triton kernels of vLLM and of flash-linear-attention, run by Triton's interpreter on a CPU.

vLLM's sources are files in `peers/`, where `python -m benchmarks.peers.sources` puts them.
"""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.judged import FILLED, FLOATS, Recipe, not_causal, pages_of
from ragged_attention.testing import triton_interpreter

SEGMENTS = 16  # the number of KV splits in vLLM's backend
ROW_BLOCKS = 128  # vLLM's backend splits keys for at most this number of blocks of queries


@functools.cache
def vllm_module(name: str) -> Any:
    """A module of vLLM's attention kernels."""
    from benchmarks.peers import registry

    if importlib.util.find_spec("vllm") is None:
        if not any(registry.FOLDER.glob(f"**/{name}.py")):
            raise NotImplementedError(f"expected {name}.py in {registry.FOLDER.name}/")
        sys.meta_path.append(registry.StandIns())
    triton_interpreter.quicken()
    return importlib.import_module(f"vllm.v1.attention.ops.{name}")


def vllm_unified(
    q: torch.Tensor,
    kv_pages: Any,
    kv_lens: torch.Tensor,
    page_indices: torch.Tensor,
    cu_q_lens: torch.Tensor,
    sm_scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`unified_attention`, with scratch memory, so that it can split keys."""
    k_pages, v_pages = pages_of(kv_pages)
    if sliding_window is not None and not causal:
        raise NotImplementedError("without a causal mask its window bounds both sides")
    (_, num_heads, head_dim), num_kv_heads = q.shape, k_pages.shape[2]
    threshold = max(1, ROW_BLOCKS // num_kv_heads)
    scratch = torch.empty(max(threshold, len(q)), num_heads, SEGMENTS, 1 << (head_dim - 1).bit_length())
    out = torch.empty_like(q)
    vllm_module("triton_unified_attention").unified_attention(
        q, k_pages, v_pages, out, cu_q_lens, int(cu_q_lens.diff().max()), kv_lens, int(kv_lens.max()),
        head_dim**-0.5 if sm_scale is None else sm_scale, causal, ((sliding_window or 0) - 1, 0), page_indices,
        soft_cap or 0.0, None, None, None,
        seq_threshold_3D=threshold, num_par_softmax_segments=SEGMENTS, softmax_segm_output=scratch,
        softmax_segm_max=scratch[..., 0].clone(), softmax_segm_expsum=scratch[..., 0].clone(), sinks=sinks,
    )  # fmt: skip
    return out


def decoded(q: torch.Tensor, k: Any, v: Any, kv_lens: Any, page_indices: Any, scale: float, **more: Any) -> Any:
    """`decode_attention_fwd` with four KV splits: out [S, H, D] and lse [S, H]."""
    out, lse = q.new_empty(*q.shape[:2], v.shape[3]), torch.empty(q.shape[:2])
    logits = torch.empty(*q.shape[:2], 4, v.shape[3] + 1)
    vllm_module("triton_decode_attention").decode_attention_fwd(
        q, k, v, out, lse, page_indices, kv_lens, logits, 4, scale, page_size=k.shape[1], **more
    )
    return out, lse


def vllm_decode(
    q: torch.Tensor,
    kv_pages: Any,
    kv_lens: torch.Tensor,
    page_indices: torch.Tensor,
    sm_scale: float | None = None,
    soft_cap: float | None = None,
    return_lse: bool = False,
) -> Any:
    """`decode_attention_fwd` over pages of K and V."""
    k_pages, v_pages = pages_of(kv_pages)
    scale = q.shape[2] ** -0.5 if sm_scale is None else sm_scale
    result = decoded(q, k_pages, v_pages, kv_lens, page_indices, scale, logit_cap=soft_cap or 0.0)
    return result if return_lse else result[0]


def vllm_mla(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    page_indices: torch.Tensor,
    kv_lens: torch.Tensor,
    d_v: int = 512,
    sm_scale: float | None = None,
    causal: bool = False,
    soft_cap: float | None = None,
) -> Any:
    """`decode_attention_fwd` over DeepSeek's latents, with one token per sequence."""
    scale = q.shape[3] ** -0.5 if sm_scale is None else sm_scale
    out, lse = decoded(
        q[:, 0], kv_cache, kv_cache[..., :d_v], kv_lens, page_indices, scale, logit_cap=soft_cap or 0.0, is_mla=True
    )
    return out[:, None], lse[:, :, None]


def fla_parallel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q_lens: torch.Tensor,
    cu_kv_lens: torch.Tensor,
    sm_scale: float | None = None,
    causal: bool = False,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`parallel_attn`. It requires as many queries as keys, so rows of zeros are added before a sequence's queries."""
    added = cu_kv_lens.diff() - cu_q_lens.diff()
    triton_interpreter.quicken()
    kernels = importlib.import_module("fla.ops.attn.parallel")
    rows = torch.arange(len(q)) + torch.repeat_interleave(added.cumsum(0), cu_q_lens.diff().long())
    queries = q.new_zeros(len(k), *q.shape[1:]).index_copy(0, rows, q)
    return kernels.parallel_attn(
        queries[None], k[None], v[None], scale=sm_scale, window_size=sliding_window, cu_seqlens=cu_kv_lens.long(),
        sink_bias=sinks,
    )[0, rows]  # fmt: skip


def fla_decode(
    q: torch.Tensor,
    kv_pages: Any,
    kv_lens: torch.Tensor,
    page_indices: torch.Tensor,
    sm_scale: float | None = None,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`attn_decoding_one_step`, over keys and values that are gathered to be contiguous per sequence."""
    triton_interpreter.quicken()
    decoding = importlib.import_module("fla.ops.attn.decoding")
    tuner = decoding.naive_attn_decoding_kernel.fn
    tuner.configs = tuner.configs[:1]  # the configurations differ only in warps, and timing them would need a GPU
    k, v = (
        torch.cat(
            [pages[table.long()].flatten(0, 1)[:kv_len] for table, kv_len in zip(page_indices, kv_lens, strict=True)]
        )
        for pages in pages_of(kv_pages)
    )
    edges = torch.nn.functional.pad(kv_lens.long().cumsum(0), (1, 0))
    return decoding.attn_decoding_one_step(
        q[None], k[None], v[None], scale=sm_scale, cu_seqlens=edges, window_size=sliding_window, sink_bias=sinks
    )[0]


def several_q_tokens(operation: str, call: Any) -> bool:
    return call.q.shape[1] != 1


def several_kv_heads(operation: str, call: Any) -> bool:
    return call.kv_cache.shape[2] != 1


def one_of_heads(operation: str, call: Any) -> bool:
    """Whether there is only one head. The kernel reads latents for groups of heads."""
    return call.q.shape[2] == 1


def another_d_v(operation: str, call: Any) -> bool:
    """Whether `d_v` differs from the width that the kernel assumes for queries of width 576 or 288."""
    return call.d_v != {576: 512, 288: 256}.get(call.q.shape[3], call.d_v)


def another_format(operation: str, call: Any) -> bool:
    return call.kv_cache.dtype != call.q.dtype


LIMITS: Mapping[str, Any] = {"framework": "torch", "dtypes": FLOATS, "declines": FILLED, "contiguous": True}
PAIRED: Mapping[str, Any] = {**LIMITS, "declines": (*FILLED, "other value sizes")}
LATENT: Mapping[str, Any] = {
    **LIMITS,
    "declines": (*FILLED, another_format, several_q_tokens, several_kv_heads, one_of_heads, another_d_v),
}
# The suite does not draw calls that `declines` excludes. It would draw them if the function raised instead.
CAUSAL: Mapping[str, Any] = {
    **LIMITS,
    "declines": (*FILLED, "more queries than keys", not_causal),
    "gradients": True,
}
RECIPES: Mapping[str, Recipe] = {
    "vllm_unified": Recipe("triton", vllm_unified, "ragged_paged_attention", {**PAIRED, "rounded_weights": True}),
    "vllm_decode": Recipe("triton", vllm_decode, "ragged_paged_attention", {**LIMITS, "decode_only": True}),
    "vllm_mla": Recipe("triton", vllm_mla, "mla_decode", LATENT),
    "fla_parallel": Recipe("fla", fla_parallel, "varlen_attention", CAUSAL),
    "fla_decode": Recipe("fla", fla_decode, "ragged_paged_attention", {**LIMITS, "decode_only": True}),
}
