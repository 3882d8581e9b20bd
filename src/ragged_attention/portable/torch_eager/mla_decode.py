"""Attention of a few query tokens per sequence over a paged latent cache, in plain torch operations.

Dense calls are computed as ragged latent attention. Sparse calls process a few query tokens at a time, without
synchronising with the device. A schedule is ignored: it is for kernels whose programs run in parallel.
"""

from typing import Any

import torch

from ragged_attention.calls import CacheFormat, MlaDecode
from ragged_attention.portable import torch_eager
from ragged_attention.portable.torch_eager import _host
from ragged_attention.portable.torch_eager._host import result_dtype
from ragged_attention.portable.torch_eager._latents import Tile as Tile
from ragged_attention.portable.torch_eager._latents import heuristic as heuristic
from ragged_attention.portable.torch_eager._lists import Lists, attend, lists_of
from ragged_attention.portable.torch_eager.ragged_mla_attention import Attention

FEATURES = frozenset({
    "page_indices", "kv_lens", "indices", "d_v", "sm_scale", "causal", "sliding_window", "soft_cap", "sinks",
    "topk_lens", "extra_kv_cache", "extra_indices", "extra_topk_lens", "schedule", "cache_format", "cache_layout",
    "out_dtype",
})  # fmt: skip


def why_not(call: MlaDecode) -> str | None:
    return torch_eager.why_not(call) if call.sparse else _host.why_not(call)


def run(call: MlaDecode, tile: Tile, launch: Any) -> list[torch.Tensor]:
    return _sparse(call, tile) if call.sparse else _dense(call, tile)


def _sparse(call: Any, tile: Tile) -> list[torch.Tensor]:
    def lists(cache: Any, layout: CacheFormat, indices: torch.Tensor, lens: torch.Tensor | None) -> Lists:
        if lens is not None:
            lens = (lens if lens.dim() == 2 else lens[:, None]).expand(-1, call.num_q_tokens).flatten()
        return lists_of(cache, layout, indices.flatten(0, 1), lens)

    all_lists = [lists(call.kv_cache, call.kv_format, call.indices, call.topk_lens)]
    if call.extra_indices is not None:
        all_lists += [lists(call.extra_kv_cache, call.extra_kv_format, call.extra_indices, call.extra_topk_lens)]
    out = call.q.new_empty(call.out_shape, dtype=result_dtype(call))
    max_logits, lse = (call.q.new_empty(call.out_shape[:3], dtype=torch.float32) for _ in range(2))
    results = [result.flatten(0, 1) for result in (out, max_logits, lse)]
    attend(call.q.flatten(0, 1), all_lists, call.scale, call.sinks, tile.block_kv, results, call.soft_cap)
    return [out, lse.transpose(1, 2).contiguous()]


def _dense(call: Any, tile: Tile) -> list[torch.Tensor]:
    """Compute the call as ragged attention with Q queries per sequence."""
    count = call.num_q_tokens
    attention = Attention(call, tile, call.q.flatten(0, 1))
    attention.run([(seq * count, (seq + 1) * count) for seq in range(call.num_seqs)])
    return [attention.out.view(call.out_shape), attention.lse.view(call.out_shape[:3]).transpose(1, 2).contiguous()]
