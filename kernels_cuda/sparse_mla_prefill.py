"""Sparse MLA prefill on Hopper, which `_latent` computes as decode with one query token per sequence."""

from typing import Any

from ragged_attention.calls import SparseMlaPrefill
from ragged_attention.kernels_cuda import _latent
from ragged_attention.kernels_cuda._latent import Tile as Tile

FEATURES = frozenset({"sm_scale", "d_v", "sinks", "topk_lens", "cache_format", "cache_layout", "deterministic"})


def kind_of(call: SparseMlaPrefill) -> str:
    """The kind of a call, by its static properties. `proven/` lists the kinds for which the test suite has passed."""
    return (
        f"heads={call.num_q_heads}/{call.num_kv_heads} d={call.d_qk} cache={call.kv_format.name} "
        f"tokens<={_latent.power_of_2(call.num_tokens)} topk={call.topk}"
    )


def why_not(call: SparseMlaPrefill) -> str | None:
    return _latent.cannot_take(call, sparse=True) or _latent.cannot_run(call)


def why_not_by_default(call: SparseMlaPrefill) -> str | None:
    return _latent.why_not_by_default(call, kind_of(call))


def heuristic(call: SparseMlaPrefill) -> Tile:
    rows = call.num_q_heads // call.num_kv_heads
    jobs, narrow = call.num_tokens * call.num_kv_heads, _latent.is_narrow(call)
    return Tile(num_splits=_latent.splits(call, jobs, rows, call.topk, narrow=narrow))


def run(call: SparseMlaPrefill, tile: Tile, launch: Any) -> Any:
    """Enqueue the kernels, and return out, max_logits and lse."""
    q = launch.aligned(call.q)
    num_tokens, num_q_heads, d_qk = q.shape
    token_stride, head_stride, _ = _latent.strides_of(q, launch)
    work = _latent.Work(
        function=_latent.function_of(call, tile),
        q=q,
        q_shape=(num_tokens, 1, num_q_heads, d_qk),
        q_strides=(token_stride, d_qk, head_stride),
        lse_shape=(num_tokens, num_q_heads),
        keys=_latent.keys_of(call.kv, call.kv_format, call.indices, call.topk_lens, launch, ("seq", "head")),
    )
    results = _latent.run(call, work, tile, launch, max_logits=True)
    return results["out"], results["max_logits"], results["lse"]
