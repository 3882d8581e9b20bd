"""MLA decode on Hopper, dense and sparse, by the kernels that `_latent` calls."""

from typing import Any

from ragged_attention.calls import MlaDecode
from ragged_attention.kernels_cuda import _latent
from ragged_attention.kernels_cuda._latent import Tile as Tile

FEATURES = frozenset({
    "page_indices", "kv_lens", "indices", "d_v", "sm_scale", "causal", "sinks", "topk_lens", "schedule",
    "cache_format", "cache_layout", "extra_kv_cache", "extra_indices", "extra_topk_lens",
})  # fmt: skip


def tuning_key(call: MlaDecode) -> str:
    """The bucket of static facts that a tuned file is keyed by."""
    keys = (
        f"topk={call.topk}{f'+{call.extra_topk}' * bool(call.extra_topk)}"
        if call.sparse
        else f"blocks<={_latent.power_of_2(_latent.cdiv(call.capacity, 64))}"
    )
    return (
        f"heads={call.num_q_heads}/{call.num_kv_heads} q={call.num_q_tokens} d={call.d_qk} cache={call.kv_format.name} "
        f"seqs<={_latent.power_of_2(call.num_seqs)} {keys}"
    )


def why_not(call: MlaDecode) -> str | None:
    if call.kv_format.folded and call.extra_kv_cache is not None:
        return f"takes extra_kv_cache with any other cache_format, got {call.kv_format.name!r}"
    return _latent.cannot_take(call, sparse=call.sparse) or _latent.cannot_run(call)


def why_not_by_default(call: MlaDecode) -> str | None:
    return _latent.why_not_by_default(call, tuning_key(call))


def heuristic(call: MlaDecode) -> Tile:
    group = call.num_q_heads // call.num_kv_heads
    rows, jobs = (group, call.num_q_tokens) if call.sparse else (group * call.num_q_tokens, call.num_kv_heads)
    narrow = bool(call.sparse) and _latent.is_narrow(call)
    return Tile(num_splits=_latent.splits(call, call.num_seqs * jobs, rows, call.capacity, narrow=narrow))


def run(call: MlaDecode, tile: Tile, launch: Any) -> Any:
    """Enqueue the kernels, and return out and lse."""
    sparse, q, cache = call.sparse, launch.aligned(call.q), _latent.aligned(call.kv_cache, call.kv_format, launch)
    lists = launch.packed(call.indices if sparse else call.page_indices)
    steps = launch.strides(lists)
    work = _latent.Work(
        function=_latent.function_of(call, tile) if sparse else _latent.DENSE,
        q=q,
        q_shape=q.shape,
        q_strides=_latent.strides_of(q, launch)[:3],
        lse_shape=call.lse_shape,
        cache=cache,
        form=call.kv_format,
        lists=lists,
        list_strides=(steps[0], steps[1] if sparse else 0, 0),
        lens=call.topk_lens if sparse else call.kv_lens,
        causal=bool(call.causal),
        schedule=call.schedule,
        extra=None if call.extra_kv_cache is None else _extra(call, launch),
    )
    results = _latent.run(call, work, tile, launch)
    return results["out"], results["lse"]


def _extra(call: MlaDecode, launch: Any) -> _latent.Extra:
    return _latent.Extra(
        cache=_latent.aligned(call.extra_kv_cache, call.extra_kv_format, launch),
        form=call.extra_kv_format,
        lists=launch.packed(call.extra_indices),
        lens=call.extra_topk_lens,
    )
