"""Ragged attention over a paged latent cache on TPUs, by the kernel in `_latent`."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from ragged_attention.kernels_pallas import _latent, mla_decode
from ragged_attention.kernels_pallas._blocks import LARGEST_INT, cdiv, expect_sizes, next_power_of_2
from ragged_attention.kernels_pallas._latent import row_layout as row_layout
from ragged_attention.kernels_pallas._latent import why_not as why_not
from ragged_attention.kernels_pallas._latent_jobs import tokens_of_sequences

FEATURES = frozenset({
    "num_seqs", "d_v", "sm_scale", "causal", "sliding_window", "soft_cap", "sinks", "kv_scale", "return_lse",
    "cache_format", "cache_layout", "out_dtype",
})  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile(mla_decode.Tile):
    """The tunable parameters.

    Args:
        num_keys_per_block, vmem_limit_bytes: as in `sparse_mla_prefill`.
        num_queries_per_block: consecutive query tokens processed together; fewer if their heads do not fit in a tile.
        split_weights_below: tiles that see at most this many keys of a sequence use two bfloat16 terms per weight of
            these keys; 0 means one term everywhere, which is faster.
    """

    split_weights_below: int = 1024

    def __post_init__(self) -> None:
        mla_decode.Tile.__post_init__(self)
        expect_sizes(self, split_weights_below=(0, LARGEST_INT))


def heuristic(call: Any) -> Tile:
    """Tiles with the mean number of tokens per sequence, because a tile computes all rows for each of its sequences."""
    longest = call.num_tokens if call.max_q_len is None else max(call.max_q_len, 1)
    mean = cdiv(call.num_tokens, max(call.max_num_seqs, 1))
    most = max(1, mla_decode.ROWS // call.num_q_heads)
    return Tile(
        num_keys_per_block=_latent.keys_per_block(call.capacity, most=256),
        num_queries_per_block=min(most, next_power_of_2(max(min(mean, longest), 1))),
    )


def run(call: Any, tile: Tile, launch: Any) -> tuple[Any, ...]:
    """Out, and lse if the call requests it."""
    if 0 in (call.num_tokens, call.max_num_seqs, call.num_pages, call.capacity):
        out, lse = jnp.zeros(call.out_shape, call.result_dtype), jnp.full(call.q.shape[:2], -jnp.inf, jnp.float32)
    else:
        work = _latent.Work(
            call=call,
            q=call.q,
            keys=mla_decode.pages_or_rows(call, jnp.clip(call.kv_lens, 0, call.capacity)),
            sinks=None if call.sinks is None else call.sinks[None],
            split_weights_below=tile.split_weights_below,
        )
        out, lse = _latent.run_tokens(work, tokens_of_sequences(call), tile.num_queries_per_block, tile)
    return (out, lse) if call.return_lse else (out,)
