"""MLA decode on TPUs, dense and sparse, by the kernel in `_latent`."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from ragged_attention.calls import CacheFormat
from ragged_attention.kernels_pallas import _latent
from ragged_attention.kernels_pallas._blocks import expect_sizes
from ragged_attention.kernels_pallas._latent import row_layout as row_layout
from ragged_attention.kernels_pallas._latent import why_not as why_not
from ragged_attention.kernels_pallas._latent_jobs import Tokens

ROWS = 256  # query rows per tile of a dense call, unless a single token has more heads
FEATURES = frozenset({
    "page_indices", "kv_lens", "indices", "d_v", "sm_scale", "causal", "sliding_window", "soft_cap", "sinks",
    "topk_lens", "extra_kv_cache", "extra_indices", "extra_topk_lens", "schedule", "cache_format", "cache_layout",
    "out_dtype",
})  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile(_latent.Tile):
    """The tunable parameters.

    Args:
        num_keys_per_block, vmem_limit_bytes: as in `sparse_mla_prefill`.
        num_queries_per_block: query tokens that share one fetch of their sequence's pages, in dense calls.
    """

    num_queries_per_block: int = 1

    def __post_init__(self) -> None:
        _latent.Tile.__post_init__(self)
        expect_sizes(self, num_queries_per_block=(1, 1024))


def heuristic(call: Any) -> Tile:
    if call.sparse:
        return Tile(num_keys_per_block=_latent.keys_per_block(max(call.topk, call.extra_topk)))
    keys = _latent.keys_per_block(call.capacity, most=256)
    group = call.num_q_heads // call.num_kv_heads
    return Tile(num_keys_per_block=keys, num_queries_per_block=max(1, min(call.num_q_tokens, ROWS // group)))


def run(call: Any, tile: Tile, launch: Any) -> tuple[Any, Any]:
    """Out and lse."""
    caches = [cache for cache in (call.kv_cache, call.extra_kv_cache) if cache is not None and len(cache)]
    if 0 in (call.num_seqs, call.capacity) or not caches:
        return jnp.zeros(call.out_shape, call.result_dtype), jnp.full(call.lse_shape, -jnp.inf, jnp.float32)
    return _sparse(call, tile) if call.sparse else _dense(call, tile)


def _sparse(call: Any, tile: Tile) -> tuple[Any, Any]:
    """Out and lse of a sparse call, in which each query token is a job."""
    caches = [
        (call.kv_cache, call.indices, call.topk_lens, call.kv_format),
        (call.extra_kv_cache, call.extra_indices, call.extra_topk_lens, call.extra_kv_format),
    ]
    keys, forms = [], []
    for cache, indices, lens, form in caches:
        if cache is not None and len(cache):
            slots = _latent.valid_slots(indices, lens, cache.shape[0] * cache.shape[1])
            keys.append(_latent.selected_rows(cache, slots.reshape(-1, indices.shape[2])))
            forms.append(form)
    attend = _in_one_format if len(set(forms)) == 1 else _in_two_formats
    out, lse = attend(call, keys, forms, tile)
    return out.reshape(call.out_shape), lse.reshape(call.q.shape[:3]).swapaxes(1, 2)


def _in_one_format(call: Any, keys: list[_latent.Keys], forms: list[CacheFormat], tile: Tile) -> tuple[Any, Any]:
    """Out [jobs, H, d_v] and lse [jobs, H] of queries with one list, or with two lists over caches in one format."""
    work = _latent.Work(
        call=call,
        q=call.q.reshape(-1, *call.q.shape[2:]),
        keys=keys[0],
        extra=keys[1] if len(keys) > 1 else None,
        sinks=None if call.sinks is None else call.sinks[None],
        form=forms[0],
    )
    out, _, lse = _latent.run(work, tile)
    return out, lse


def _in_two_formats(call: Any, keys: list[_latent.Keys], forms: list[CacheFormat], tile: Tile) -> tuple[Any, Any]:
    """Out and lse of queries with two lists over caches in different formats: two launches, merged by their lse.

    One launch cannot read both caches, because the kernel orders the columns of the two formats differently.
    """
    part = dataclasses.replace(call, sinks=None, out_dtype="float32")
    outs, lses = zip(*(_in_one_format(part, [keys[i]], [forms[i]], tile) for i in range(2)), strict=True)
    lse = jnp.logaddexp(*lses)
    base = jnp.where(lse == -jnp.inf, 0.0, lse)
    first, second = (out * jnp.exp(own - base)[..., None] for out, own in zip(outs, lses, strict=True))
    out = first + second
    if call.sinks is not None:
        out *= (1.0 / (1.0 + jnp.exp(call.sinks - base)))[..., None]
    return out.astype(call.result_dtype), lse


def _dense(call: Any, tile: Tile) -> tuple[Any, Any]:
    """Out and lse of a dense call. The query heads of a KV head, for all tokens of a sequence, share a list."""
    num_seqs, count, num_q_heads, d_qk = call.q.shape
    num_kv_heads = call.num_kv_heads
    lists, group = num_seqs * num_kv_heads, num_q_heads // num_kv_heads
    kv_lens = jnp.repeat(jnp.clip(call.kv_lens, 0, call.capacity), num_kv_heads)
    size = min(tile.num_queries_per_block, count)
    tokens = Tokens(
        lists=jnp.repeat(jnp.arange(lists, dtype=jnp.int32), count),
        positions=(kv_lens[:, None] - count + jnp.arange(count, dtype=jnp.int32)).reshape(-1),
        changes=lists if count % size else 0,
    )
    work = _latent.Work(
        call=call,
        q=call.q.reshape(num_seqs, count, num_kv_heads, group, d_qk).swapaxes(1, 2).reshape(-1, group, d_qk),
        keys=pages_or_rows(call, kv_lens),
        sinks=None if call.sinks is None else call.sinks.reshape(num_kv_heads, group),
    )
    out, lse = _latent.run_tokens(work, tokens, size, tile)
    out = out.reshape(num_seqs, num_kv_heads, count, group, call.d_v).swapaxes(1, 2).reshape(call.out_shape)
    return out, lse.reshape(num_seqs, num_kv_heads, count, group).swapaxes(2, 3).reshape(call.lse_shape)


def pages_or_rows(call: Any, kv_lens: Any) -> _latent.Keys:
    """The lists of a dense call, one for each KV head of each sequence, with lengths `kv_lens` [S * K].

    A list has pieces of pages, or single rows if rows of two pages share words or if a page has several KV heads.
    """
    piece_rows, num_kv_heads = _latent.piece_rows_of(call.page_size, call.kv_cache.dtype), call.num_kv_heads
    if piece_rows is not None and num_kv_heads == 1:
        return _latent.whole_pages(call.kv_cache, call.page_indices, kv_lens, piece_rows)
    position = jnp.arange(call.page_indices.shape[1] * call.page_size, dtype=jnp.int32)[: call.capacity]
    pages = call.page_indices[:, position // call.page_size]
    seen = (pages >= 0) & (pages < call.kv_cache.shape[0]) & (position < kv_lens[::num_kv_heads, None])
    slots = jnp.where(seen, pages, 0) * call.page_size + position % call.page_size
    heads = jnp.arange(num_kv_heads, dtype=jnp.int32)[:, None]
    numbers = jnp.where(seen[:, None], slots[:, None] * num_kv_heads + heads, -1)
    return _latent.selected_rows(call.kv_cache, numbers.reshape(-1, len(position)), kv_lens)
