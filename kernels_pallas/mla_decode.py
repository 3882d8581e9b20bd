"""MLA decode on TPUs, dense and sparse: the call in the terms of `_latent`."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from ragged_attention.kernels_pallas import _latent
from ragged_attention.kernels_pallas._blocks import expect_sizes
from ragged_attention.kernels_pallas._latent import row_layout as row_layout
from ragged_attention.kernels_pallas._latent import why_not as why_not

ROWS = 256  # of queries that a dense call computes together, unless a token's heads are more
FEATURES = frozenset({
    "page_indices", "kv_lens", "indices", "d_v", "sm_scale", "causal", "sinks", "topk_lens", "extra_kv_cache",
    "extra_indices", "extra_topk_lens", "schedule", "cache_format", "cache_layout",
})  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile(_latent.Tile):
    """What may be tuned.

    Args:
        num_keys_per_block, vmem_limit_bytes: as in `sparse_mla_prefill`.
        num_queries_per_block: query tokens of a sequence that share a fetch of its pages, in dense calls.
    """

    num_queries_per_block: int = 1

    def __post_init__(self) -> None:
        _latent.Tile.__post_init__(self)
        expect_sizes(self, num_queries_per_block=(1, 1024))


def tuning_key(call: Any) -> str:
    """The bucket of static facts that a tuned file is keyed by."""
    keys = f"topk={call.topk}+{call.extra_topk}" if call.sparse else f"page={call.page_size}"
    return (
        f"heads={call.num_q_heads}/{call.num_kv_heads} q={call.num_q_tokens} d={call.d_qk}/{call.d_v} "
        f"cache={call.format} {keys}"
    )


def heuristic(call: Any) -> Tile:
    if call.sparse:
        return Tile(num_keys_per_block=_latent.keys_of_lists(max(call.topk, call.extra_topk)))
    keys = _latent.keys_of_lists(call.capacity, most=256)
    group = call.num_q_heads // call.num_kv_heads
    return Tile(num_keys_per_block=keys, num_queries_per_block=max(1, min(call.num_q_tokens, ROWS // group)))


def run(call: Any, tile: Tile, launch: Any) -> tuple[Any, Any]:
    """Out and lse."""
    del launch  # pallas_call launches
    caches = [cache for cache in (call.kv_cache, call.extra_kv_cache) if cache is not None and len(cache)]
    if 0 in (call.num_seqs, call.capacity) or not caches:
        return jnp.zeros(call.out_shape, call.q.dtype), jnp.full(call.lse_shape, -jnp.inf, jnp.float32)
    return _sparse(call, tile) if call.sparse else _dense(call, tile)


def _sparse(call: Any, tile: Tile) -> tuple[Any, Any]:
    """Each query token is a job."""
    given = [
        (call.kv_cache, call.indices, call.topk_lens),
        (call.extra_kv_cache, call.extra_indices, call.extra_topk_lens),
    ]
    keys = []
    for cache, indices, lens in given:
        if cache is not None and len(cache):
            slots = _latent.valid_slots(indices, lens, cache.shape[0] * cache.shape[1])
            keys.append(_latent.selected_rows(cache, slots.reshape(-1, indices.shape[2])))
    work = _latent.Work(
        call=call,
        q=call.q.reshape(-1, *call.q.shape[2:]),
        keys=keys[0],
        extra=keys[1] if len(keys) > 1 else None,
        sinks=None if call.sinks is None else call.sinks[None],
    )
    out, _, lse = _latent.run(work, tile)
    return out.reshape(call.out_shape), lse.reshape(call.q.shape[:3]).swapaxes(1, 2)


def _dense(call: Any, tile: Tile) -> tuple[Any, Any]:
    """Some query tokens of a sequence, with the heads of a KV head, are a job; those of a KV head share a list."""
    num_seqs, num_q_tokens, num_q_heads, d_qk = call.q.shape
    num_kv_heads = call.num_kv_heads
    group = num_q_heads // num_kv_heads
    size = min(tile.num_queries_per_block, num_q_tokens)
    tiles = -(-num_q_tokens // size)
    q = call.q.reshape(num_seqs, num_q_tokens, num_kv_heads, group, d_qk)
    q = jnp.pad(q, ((0, 0), (0, tiles * size - num_q_tokens), (0, 0), (0, 0), (0, 0)))
    q = q.reshape(num_seqs, tiles, size, num_kv_heads, group, d_qk).transpose(0, 3, 1, 2, 4, 5)
    kv_lens = jnp.clip(call.kv_lens, 0, call.capacity)
    work = _latent.Work(
        call=call,
        q=q.reshape(-1, size * group, d_qk),
        keys=_pages_or_rows(call, kv_lens),
        share=tiles,
        limits=_limits(call, kv_lens, tiles, size, group) if call.causal else None,
        sinks=None if call.sinks is None else jnp.tile(call.sinks.reshape(num_kv_heads, group), (1, size)),
    )
    out, _, lse = _latent.run(work, tile)
    jobs = (num_seqs, num_kv_heads, tiles, size, group)
    out = out.reshape(*jobs, call.d_v).transpose(0, 2, 3, 1, 4, 5).reshape(num_seqs, tiles * size, num_q_heads, -1)
    lse = lse.reshape(jobs).transpose(0, 1, 4, 2, 3).reshape(num_seqs, num_q_heads, -1)
    return out[:, :num_q_tokens], lse[:, :, :num_q_tokens]


def _limits(call: Any, kv_lens: Any, tiles: int, size: int, group: int) -> Any:
    """Below which position each row of each job sees keys."""
    token = jnp.arange(tiles * size, dtype=jnp.int32)
    limits = kv_lens[:, None] - jnp.maximum(call.num_q_tokens - 1 - token, 0)
    shape = (call.num_seqs, call.num_kv_heads, tiles, size, group)
    limits = limits.reshape(call.num_seqs, 1, tiles, size, 1)
    return jnp.broadcast_to(limits, shape).reshape(-1, size * group)


def _pages_or_rows(call: Any, kv_lens: Any) -> _latent.Keys:
    """Whole pages, or single rows where pages are not whole rows of words, or hold several KV heads."""
    unit = _latent.unit_of(call.page_size, call.kv_cache.dtype)
    if unit is not None and call.num_kv_heads == 1:
        return _latent.whole_pages(call.kv_cache, call.page_indices, kv_lens, unit)
    position = jnp.arange(call.page_indices.shape[1] * call.page_size, dtype=jnp.int32)[: call.capacity]
    pages = call.page_indices[:, position // call.page_size]
    seen = (pages >= 0) & (pages < call.kv_cache.shape[0]) & (position < kv_lens[:, None])
    slots = jnp.where(seen, pages, 0) * call.page_size + position % call.page_size
    heads = jnp.arange(call.num_kv_heads, dtype=jnp.int32)[:, None]
    numbers = jnp.where(seen[:, None], slots[:, None] * call.num_kv_heads + heads, -1)
    return _latent.selected_rows(call.kv_cache, numbers.reshape(-1, len(position)))
