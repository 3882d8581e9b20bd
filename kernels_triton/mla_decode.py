"""Dense and sparse MLA decode in Triton, with the kernels of `_latent`."""

import dataclasses
from typing import Any

from ragged_attention.calls import MlaDecode
from ragged_attention.kernels_triton._latent import kernel, plan
from ragged_attention.kernels_triton._latent.plan import Tile as Tile
from ragged_attention.kernels_triton._mask import key_limit, max_visible_keys, window_of
from ragged_attention.kernels_triton._tiles import launchable

FEATURES = frozenset({
    "page_indices", "kv_lens", "indices", "d_v", "sm_scale", "causal", "sliding_window", "soft_cap", "sinks",
    "topk_lens", "extra_kv_cache", "extra_indices", "extra_topk_lens", "schedule", "cache_format", "cache_layout",
    "out_dtype",
})  # fmt: skip


def why_not(call: MlaDecode) -> str | None:
    return launchable(call, kernel.latent_kernel) or plan.too_wide(call, plan.KeyAccess())


def heuristic(call: MlaDecode) -> Tile:
    rows, jobs = (call.group, call.num_q_tokens) if call.sparse else (call.group * call.num_q_tokens, 1)
    jobs *= call.num_seqs * call.num_kv_heads
    extra = call.extra_topk > 0
    page_sizes = (call.page_size, call.extra_kv_cache.shape[1]) if extra else (call.page_size,)
    windowed = key_limit(call) is not None
    access = plan.KeyAccess(dense=not call.sparse, extra=extra, page_sizes=page_sizes, windowed=windowed)
    return plan.tile_for(call, rows, jobs, max_visible_keys(call, call.num_q_tokens), access)


def invariant_tile(call: MlaDecode) -> Tile:
    """A batch-invariant tile: block sizes do not depend on the batch."""
    return dataclasses.replace(heuristic(call), num_splits=plan.MAX_INVARIANT_SPLITS, invariant=True)


def run(call: MlaDecode, tile: Tile, launch: Any) -> Any:
    """Enqueue the kernels; returns out and lse."""
    extra = None
    if not call.sparse:
        keys = plan.keys_of_tables(call, launch.packed(call.page_indices), launch)
    else:
        keys = plan.keys_of_lists(call.kv_cache, call.kv_format, call.indices, call.topk_lens, launch)
        if call.extra_indices is not None:
            extra = plan.keys_of_lists(
                call.extra_kv_cache, call.extra_kv_format, call.extra_indices, call.extra_topk_lens, launch
            )
    q = launch.packed(call.q)
    work = plan.Work(
        call=call,
        q=q,
        q_strides=launch.strides(q)[:3],
        lse_shape=call.lse_shape,
        num_seqs=call.num_seqs,
        num_q_tokens=call.num_q_tokens,
        sparse=call.sparse,
        causal=bool(call.causal),
        keys=keys,
        extra=extra,
        schedule=None if tile.invariant else call.schedule,
        window=window_of(call),
        soft_cap=call.soft_cap,
    )
    out, lse, _ = kernel.run(work, tile, launch, max_logits=False)
    return out, lse
