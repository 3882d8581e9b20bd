"""Sparse MLA prefill in Triton. For the kernels of `_latent` it is a decode with one query token per sequence."""

import dataclasses
from typing import Any

from ragged_attention.calls import SparseMlaPrefill
from ragged_attention.errors import InvalidInput
from ragged_attention.kernels_triton._latent import decoding, kernel, plan
from ragged_attention.kernels_triton._tiles import launchable_in_float32

FEATURES = frozenset({
    "sm_scale", "d_v", "sinks", "topk_lens", "cache_format", "cache_layout", "deterministic", "out_dtype",
})  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile(plan.Tile):
    decoded: bool = False  # whether a quantised cache is decoded once, before the attention kernel

    def __post_init__(self) -> None:
        plan.Tile.__post_init__(self)
        if self.decoded not in (False, True):
            raise InvalidInput(f"expected decoded to be True or False, got {self.decoded!r}")


def why_not(call: SparseMlaPrefill) -> str | None:
    return launchable_in_float32(call, kernel.latent_kernel) or plan.too_wide(call, plan.KeyAccess())


def heuristic(call: SparseMlaPrefill) -> Tile:
    return tile_for(call, decoded=plan.decodes_first(call))


def invariant_tile(call: SparseMlaPrefill) -> Tile:
    """A batch-invariant tile: block sizes do not depend on the batch. Most prefills fill the GPU without splits."""
    return dataclasses.replace(tile_for(call, decoded=False), num_splits=1)


def tile_for(call: SparseMlaPrefill, *, decoded: bool) -> Tile:
    jobs = call.num_tokens * call.num_kv_heads
    tile = plan.tile_for(call, call.group, jobs, call.topk, plan.KeyAccess(decoded=decoded))
    return Tile(**dataclasses.asdict(tile), decoded=decoded)


def run(call: SparseMlaPrefill, tile: Tile, launch: Any) -> Any:
    """Enqueue the kernels; returns out, max_logits and lse."""
    if tile.decoded and not call.kv_format.quantized:
        raise InvalidInput("expected decoded=False with a plain cache, got True")
    decoded = tile.decoded and call.num_slots > 0
    q = launch.packed(call.q)
    q_token_stride, q_head_stride, _ = launch.strides(q)
    keys = plan.keys_of_lists(call.kv, call.kv_format, call.indices, call.topk_lens, launch, by_head=True)
    work = plan.Work(
        call=call,
        q=q,
        q_strides=(q_token_stride, 0, q_head_stride),
        lse_shape=(call.num_tokens, call.num_q_heads),
        num_seqs=call.num_tokens,
        num_q_tokens=1,
        sparse=True,
        keys=decoding.decoded(keys, call, launch) if decoded else keys,
    )
    out, lse, max_logits = kernel.run(work, tile, launch, max_logits=True)
    return out, max_logits, lse
