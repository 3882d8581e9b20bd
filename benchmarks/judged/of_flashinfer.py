"""FlashInfer's reference implementations that need only torch. They are loaded without the rest of FlashInfer."""

import functools
import importlib
import importlib.util
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.foreign_tests import bare_package
from benchmarks.judged import FILLED, FLOATS, Recipe, not_causal, pages_of


@functools.cache
def reference(path: str) -> Any:
    """A file in the package's folder `attention`, imported as a separate module."""
    spec = importlib.util.find_spec("flashinfer")
    assert spec is not None
    assert spec.origin is not None
    file = Path(spec.origin).parent / "experimental/b12x/attention" / path
    if not file.exists():
        raise NotImplementedError(f"this version has no {path}")
    package = f"flashinfer_{file.parent.name.strip('_')}"
    if package not in sys.modules:  # avoids everything that the package itself would import
        bare_package(package, file.parent)
    return importlib.import_module(f"{package}.{file.stem}")


def paged(
    q: torch.Tensor,
    kv_pages: Any,
    kv_lens: torch.Tensor,
    page_indices: torch.Tensor,
    cu_q_lens: torch.Tensor,
    sm_scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """`paged_attention_reference`. Its lse includes sinks, so with sinks only `out` is compared."""
    k_pages, v_pages = pages_of(kv_pages)
    result = reference("paged/reference.py").paged_attention_reference(
        q, k_pages, v_pages, page_indices, kv_lens, cu_q_lens, softmax_scale=sm_scale, causal=causal,
        window_left=-1 if sliding_window is None else sliding_window - 1, attention_sink_bias=sinks,
    )  # fmt: skip
    return result if return_lse and sinks is None else result[0]


def latents(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_lens: torch.Tensor,
    page_indices: torch.Tensor,
    cu_q_lens: torch.Tensor,
    d_v: int = 512,
    sm_scale: float | None = None,
    sliding_window: int | None = None,
    q_scale: float | torch.Tensor | None = None,
    kv_scale: float | torch.Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """`dense_mla_reference`."""
    result = reference("dense_mla/_reference.py").dense_mla_reference(
        q, kv_cache, page_indices, kv_lens, cu_q_lens, q_scale=q_scale, kv_scale=kv_scale,
        sm_scale=q.shape[2] ** -0.5 if sm_scale is None else sm_scale, v_head_dim=d_v, window_size=sliding_window,
    )  # fmt: skip
    return result if return_lse else result[0]


def listed(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    d_v: int = 512,
    sm_scale: float | None = None,
    topk_lens: torch.Tensor | None = None,
) -> Any:
    """`sparse_mla_reference`, over rows of 656 bytes. Its lse is converted from base 2 to base e."""
    (num_seqs, num_tokens, num_heads, d_qk), slots = q.shape, kv_cache.shape[0] * kv_cache.shape[1]
    lens = None if topk_lens is None else topk_lens.reshape(num_seqs, -1).expand(num_seqs, num_tokens).flatten()
    out, lse = reference("_shared/mla/reference.py").sparse_mla_reference(
        q_all=q.flatten(0, 1), kv_cache=kv_cache.view(torch.uint8).reshape(slots, 1, 656),
        page_table_1=indices.flatten(0, 1), active_token_counts=lens,
        sm_scale=d_qk**-0.5 if sm_scale is None else sm_scale, v_head_dim=d_v, return_lse=True,
    )  # fmt: skip
    lse = lse.view(num_seqs, num_tokens, num_heads).transpose(1, 2) * math.log(2)
    return out.view(num_seqs, num_tokens, num_heads, d_v), lse


def compressed(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    d_v: int = 512,
    sm_scale: float | None = None,
    sinks: torch.Tensor | None = None,
    topk_lens: torch.Tensor | None = None,
    extra_kv_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_lens: torch.Tensor | None = None,
    cache_layout: str | None = None,
) -> Any:
    """`compressed_sparse_mla_reference`. Its lse includes sinks, so with sinks only `out` is compared.

    The reference ends a list at its first negative entry. So our lists are sorted, with the valid entries first.
    """
    packed = kv_cache.shape[3] == 584
    flat, rows = q.flatten(0, 1), q.shape[0] * q.shape[1]
    scale = q.shape[3] ** -0.5 if sm_scale is None else sm_scale

    def prepared(cache: torch.Tensor, lists: torch.Tensor, lens: torch.Tensor | None) -> tuple[Any, Any, Any]:
        width = lists.shape[2]
        ends = torch.full(q.shape[:2], width) if lens is None else lens.reshape(len(q), -1).expand(q.shape[:2])
        unknown = (torch.arange(width) >= ends[..., None]) | (lists >= cache.shape[0] * cache.shape[1])
        lists = lists.masked_fill(unknown, -1).flatten(0, 1).sort(descending=True)[0]
        pages = cache.view(torch.uint8).flatten(1)
        if packed:
            pages = torch.nn.functional.pad(pages, (0, -pages.shape[1] % 576))
        return pages, lists, torch.full((rows,), width)

    more: dict[str, Any] = {}
    if extra_kv_cache is not None and extra_indices is not None:
        names = ("extra_k_cache", "extra_indices", "extra_topk_lengths")
        more = dict(zip(names, prepared(extra_kv_cache, extra_indices, extra_topk_lens), strict=True))
        more["extra_page_size"] = extra_kv_cache.shape[1]
    out, lse = reference("_shared/mla/compressed_reference.py").compressed_sparse_mla_reference(
        flat, *prepared(kv_cache, indices, topk_lens), sm_scale=scale, attn_sink=sinks, return_lse=True,
        swa_page_size=kv_cache.shape[1], cache_format="deepseek_v4" if packed else "deepseek_v41", **more,
    )  # fmt: skip
    out, lse = out.view(q.shape)[..., :d_v], lse.view(q.shape[:3]).transpose(1, 2)
    return (out, lse) if sinks is None else out


def logits(
    q: torch.Tensor,
    keys: torch.Tensor,
    weights: torch.Tensor,
    key_scale: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    stops: torch.Tensor | None = None,
    page_indices: torch.Tensor | None = None,
    kv_lens: torch.Tensor | None = None,
    cu_q_lens: torch.Tensor | None = None,
) -> torch.Tensor:
    """`contiguous_logits_reference`, or over pages of bytes `paged_decode_logits_reference`, row by row."""
    module = reference("dsa_indexer/reference.py")
    if page_indices is None:
        scale = torch.ones(len(keys)) if key_scale is None else key_scale
        return module.contiguous_logits_reference(
            q_fp8=q, weights=weights, kv_fp8=(keys, scale), k_start=starts, k_end=stops
        )
    assert kv_lens is not None
    assert cu_q_lens is not None
    counts = cu_q_lens.diff()
    seq = torch.repeat_interleave(torch.arange(len(counts)), counts)
    seen = kv_lens[seq] - cu_q_lens[1:][seq] + torch.arange(len(q)) + 1
    return module.paged_decode_logits_reference(
        q_fp8=q, weights=weights, index_k_cache=keys.flatten(1), real_page_table=page_indices, query_row_to_batch=seq,
        seqlens_per_query=seen, page_size=keys.shape[1],
    )  # fmt: skip


def scores_of_blocks(
    q: torch.Tensor,
    keys: torch.Tensor,
    block_size: int,
    page_indices: torch.Tensor,
    kv_lens: torch.Tensor,
    cu_q_lens: torch.Tensor,
) -> torch.Tensor:
    """`msa_paged_decode_block_scores_reference`, row by row. The query scale cancels its factor head_dim ** -0.5."""
    counts = cu_q_lens.diff()
    seq = torch.repeat_interleave(torch.arange(len(counts)), counts)
    seen = kv_lens[seq] - cu_q_lens[1:][seq] + torch.arange(len(q)) + 1
    scores = reference("dsa_indexer/msa_reference.py").msa_paged_decode_block_scores_reference(
        q_fp8=q, q_scale=torch.full(q.shape[:2], math.sqrt(q.shape[2])), index_k_cache=keys.flatten(1),
        real_page_table=page_indices[seq], cache_seqlens_int32=seen.int(), page_size=keys.shape[1],
    )  # fmt: skip
    return scores.transpose(0, 1)


def selected_blocks(scores: torch.Tensor, top_k: int, local_blocks: int = 0) -> torch.Tensor:
    """`msa_select_blocks_reference`. It forces the block of a query's position, or no block at position -1."""
    last_block = torch.where(scores[:, 0].isneginf(), -1, torch.arange(scores.shape[2])).amax(1)
    position = 128 * last_block if local_blocks else torch.full_like(last_block, -1)
    return (
        reference("dsa_indexer/msa_reference.py")
        .msa_select_blocks_reference(
            block_scores=scores.transpose(0, 1).contiguous(), query_positions=position.int(), topk=top_k
        )
        .transpose(0, 1)
    )


def another_d_qk(operation: str, call: Any) -> bool:
    return call.q.shape[2] not in (576, 1088)


def another_dtype(operation: str, call: Any) -> bool:
    return call.q.dtype != call.kv_cache.dtype


def other_scales(operation: str, call: Any) -> bool:
    """Whether the reference does not accept the scales.

    With e4m3 queries it needs `kv_scale` and at most one query scale. With other queries it accepts no `kv_scale`.
    """
    scaled = call.q.dtype.itemsize == 1
    return (call.kv_scale is not None) != scaled or (scaled and np.size(call.q_scale) != 1)


def no_lists(operation: str, call: Any) -> bool:
    return call.indices is None


def another_format(operation: str, call: Any) -> bool:
    """Whether rows do not have 656 bytes."""
    return call.kv_cache.shape[3] != 656


def another_compressed_format(operation: str, call: Any) -> bool:
    """Whether the reference cannot read rows of these sizes.

    It reads rows of 584 bytes in both caches. It also reads rows of 528 bytes in the first cache and 288 in the second,
    if they are stored token by token.
    """
    widths = [cache.shape[3] for cache in (call.kv_cache, call.extra_kv_cache) if cache is not None]
    return widths not in ([584], [584, 584], [528], [528, 288]) or (widths[0] == 528 and call.cache_layout == "page")


def another_cache_dtype_of_keys(operation: str, call: Any) -> bool:
    """Whether keys are not e4m3 values, either packed or in pages of bytes."""
    return call.keys.dtype.name != ("float8_e4m3fn" if call.page_indices is None else "uint8")


def another_size(operation: str, call: Any) -> bool:
    return call.block_size != 128


def another_dtype_of_queries(operation: str, call: Any) -> bool:
    return call.q.dtype.name != "float8_e4m3fn"


def other_forced_blocks(operation: str, call: Any) -> bool:
    """Whether more blocks than the query's own block are forced."""
    return call.local_blocks > 1


def equal_scores(operation: str, call: Any) -> bool:
    """Whether scores are equal, so that several selections are right, or +inf, which is the score of a forced block."""
    finite = np.sort(np.where(np.isneginf(call.scores), np.nan, call.scores), axis=2)
    return bool((finite[..., 1:] == finite[..., :-1]).any() or np.isposinf(call.scores).any())


LIMITS: Mapping[str, Any] = {"framework": "torch", "declines": FILLED, "contiguous": True}
RECIPES: Mapping[str, Recipe] = {
    "flashinfer_latents": Recipe(
        "flashinfer",
        latents,
        "ragged_mla_attention",
        {
            **LIMITS,
            "dtypes": ("bfloat16", "float8_e4m3fn"),
            "declines": (
                *FILLED,
                "more queries than keys",
                not_causal,
                another_d_qk,
                another_dtype,
                other_scales,
            ),
        },
    ),
    "flashinfer_listed": Recipe(
        "flashinfer",
        listed,
        "mla_decode",
        {
            **LIMITS,
            "declines": ("empty batches", no_lists, another_format),
        },
    ),
    "flashinfer_compressed": Recipe(
        "flashinfer",
        compressed,
        "mla_decode",
        {
            **LIMITS,
            "declines": ("empty batches", no_lists, another_compressed_format),
        },
    ),
    "flashinfer_logits": Recipe(
        "flashinfer",
        logits,
        "indexer_logits",
        {
            **LIMITS,
            "declines": ("empty batches", "padding", another_cache_dtype_of_keys),
            "head_dims": (128,),
        },
    ),
    "flashinfer_block_scores": Recipe(
        "flashinfer",
        scores_of_blocks,
        "block_scores",
        {
            **LIMITS,
            "declines": (
                "empty batches",
                "padding",
                another_cache_dtype_of_keys,
                another_dtype_of_queries,
                another_size,
            ),
            "head_dims": (128,),
        },
    ),
    "flashinfer_blocks": Recipe(
        "flashinfer",
        selected_blocks,
        "top_k_blocks",
        {
            **LIMITS,
            "declines": ("empty batches", other_forced_blocks, equal_scores),
        },
    ),
    "flashinfer_paged": Recipe(
        "flashinfer",
        paged,
        "ragged_paged_attention",
        {"framework": "torch", "dtypes": FLOATS, "declines": FILLED},
    ),
}
