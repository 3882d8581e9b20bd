"""MLA decode on Hopper, dense and sparse, with the kernels that `_latent` calls."""

from typing import Any

from ragged_attention.calls import MlaDecode
from ragged_attention.kernels_cuda import _latent
from ragged_attention.kernels_cuda._latent import Tile as Tile

FEATURES = frozenset({
    "page_indices", "kv_lens", "indices", "d_v", "sm_scale", "causal", "sinks", "topk_lens", "schedule",
    "cache_format", "cache_layout", "extra_kv_cache", "extra_indices", "extra_topk_lens",
})  # fmt: skip


def kind_of(call: MlaDecode) -> str:
    """The kind of a call, by its static properties. `proven/` lists the kinds for which the test suite has passed."""
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
    return _latent.why_not_by_default(call, kind_of(call))


def heuristic(call: MlaDecode) -> Tile:
    group = call.num_q_heads // call.num_kv_heads
    rows, jobs = (group, call.num_q_tokens) if call.sparse else (group * call.num_q_tokens, call.num_kv_heads)
    narrow = bool(call.sparse) and _latent.is_narrow(call)
    return Tile(num_splits=_latent.splits(call, call.num_seqs * jobs, rows, call.capacity, narrow=narrow))


def run(call: MlaDecode, tile: Tile, launch: Any) -> Any:
    """Enqueue the kernels, and return out and lse."""
    q = launch.aligned(call.q)
    if call.sparse:
        lists, lens, axes = call.indices, call.topk_lens, ("seq", "token")
    else:
        lists, lens, axes = call.page_indices, call.kv_lens, ("seq",)
    extra = None
    if call.extra_kv_cache is not None:
        extra = _latent.keys_of(
            call.extra_kv_cache, call.extra_kv_format, call.extra_indices, call.extra_topk_lens, launch
        )
    work = _latent.Work(
        function=_latent.function_of(call, tile) if call.sparse else _latent.DENSE,
        q=q,
        q_shape=q.shape,
        q_strides=_latent.strides_of(q, launch)[:3],
        lse_shape=call.lse_shape,
        keys=_latent.keys_of(call.kv_cache, call.kv_format, lists, lens, launch, axes),
        causal=bool(call.causal),
        schedule=call.schedule,
        extra=extra,
    )
    results = _latent.run(call, work, tile, launch)
    return results["out"], results["lse"]
