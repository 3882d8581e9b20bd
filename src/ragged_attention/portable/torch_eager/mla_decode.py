"""Attention of a few query tokens per sequence over a paged latent cache, with plain torch operations.

Dense calls go sequence by sequence, for which lengths and page tables are read on the host; the keys that some query
sees are gathered and converted to float32 piece by piece. Sparse calls take a few query tokens at a time, each with its
own keys, and wait for nothing. A schedule is for kernels that run side by side; here it has no use.
"""

from typing import Any

import numpy as np
import torch

from ragged_attention.calls import MlaDecode
from ragged_attention.portable.torch_eager._host import (
    Ints,
    framework_is_torch,
    held_kv_lens,
    on_host,
    readable_on_host,
)
from ragged_attention.portable.torch_eager._latents import Rows
from ragged_attention.portable.torch_eager._latents import Tile as Tile
from ragged_attention.portable.torch_eager._latents import heuristic as heuristic
from ragged_attention.portable.torch_eager._lists import attend, lists_of
from ragged_attention.portable.torch_eager._softmax import Softmax

QUERY_ROWS = 1024  # of one KV head that meet the keys together
FEATURES = frozenset({
    "page_indices", "kv_lens", "indices", "d_v", "sm_scale", "causal", "sinks", "topk_lens", "extra_kv_cache",
    "extra_indices", "extra_topk_lens", "schedule", "cache_format", "cache_layout",
})  # fmt: skip


def why_not(call: MlaDecode) -> str | None:
    return framework_is_torch(call) if call.sparse else readable_on_host(call)


def run(call: MlaDecode, tile: Tile, launch: Any) -> list[torch.Tensor]:
    del launch
    return _sparse(call, tile) if call.sparse else _dense(call, tile)


def _sparse(call: Any, tile: Tile) -> list[torch.Tensor]:
    def of_tokens(lens: torch.Tensor | None) -> torch.Tensor | None:
        if lens is not None and lens.dim() == 1:
            lens = lens[:, None].expand(-1, call.num_q_tokens)
        return None if lens is None else lens.flatten()

    lists = [lists_of(call.kv_cache, call.layout, call.indices.flatten(0, 1), of_tokens(call.topk_lens))]
    if call.extra_indices is not None:
        extra = call.extra_indices.flatten(0, 1)
        lists.append(lists_of(call.extra_kv_cache, call.extra_layout, extra, of_tokens(call.extra_topk_lens)))
    out = call.q.new_empty(call.out_shape)
    max_logits, lse = (call.q.new_empty(call.out_shape[:3], dtype=torch.float32) for _ in range(2))
    results = [result.flatten(0, 1) for result in (out, max_logits, lse)]
    attend(call.q.flatten(0, 1), lists, call.scale, call.sinks, tile.block_kv, results)
    return [out, lse.transpose(1, 2).contiguous()]


def _dense(call: Any, tile: Tile) -> list[torch.Tensor]:
    out = call.q.new_zeros(call.out_shape)
    lse = torch.full(call.lse_shape, -torch.inf, dtype=torch.float32, device=call.q.device)
    if call.num_slots:
        rows, tables = Rows(call.kv_cache, call.layout), on_host(call.page_indices)
        for seq, kv_len in enumerate(held_kv_lens(call, call.num_seqs)):
            positions, slots = _keys(tables[seq], kv_len, call)
            _sequence(call, tile, rows, seq, kv_len - call.num_q_tokens, positions, slots, out[seq], lse[seq])
    return [out, lse]


def _keys(table: Ints, kv_len: int, call: Any) -> tuple[Ints, torch.Tensor]:
    """The positions of a sequence that lie on valid pages, ascending, and their slots."""
    page_size = call.page_size
    positions = np.arange(kv_len)
    pages = table[: -(-kv_len // page_size)].astype(np.int64)
    slots = (pages[:, None] * page_size + np.arange(page_size)).reshape(-1)[:kv_len]
    valid = (pages >= 0) & (pages < call.kv_cache.shape[0])
    if not valid.all():
        seen = np.repeat(valid, page_size)[:kv_len]
        positions, slots = positions[seen], slots[seen]
    return positions, torch.from_numpy(slots).to(call.q.device)


def _sequence(
    call: Any, tile: Tile, rows: Rows, seq: int, before: int, positions: Ints, slots: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor,
) -> None:  # fmt: skip
    """One sequence's queries into out [Q, H, d_v] and lse [H, Q]; the first one stands at position `before`."""
    num_kv_heads = call.num_kv_heads
    group = call.num_q_heads // num_kv_heads
    step = max(QUERY_ROWS // group, 1)
    sinks = None if call.sinks is None else call.sinks.view(num_kv_heads, 1, group)
    for first in range(0, call.num_q_tokens, step):
        q = call.q[seq, first : first + step].unflatten(1, (num_kv_heads, group)).transpose(0, 1)
        count = q.shape[1]
        own = before + np.arange(first, first + count)
        seen = np.searchsorted(positions, own, side="right") if call.causal else np.full(count, len(positions))
        softmax = Softmax(q.flatten(1, 2), call.scale, call.d_v)
        for low in range(0, int(seen[-1]), tile.block_kv):
            high = min(low + tile.block_kv, int(seen[-1]))
            hidden = None
            if high > seen[0]:
                by_token = np.arange(low, high) >= seen[:, None]
                hidden = torch.from_numpy(by_token).to(slots.device).repeat_interleave(group, 0)
            softmax.add(rows.at(slots[low:high]).transpose(0, 1), hidden)
        sinks_of_rows = None if sinks is None else sinks.expand(-1, count, -1).flatten(1, 2)
        found, _, found_lse = softmax.finish(sinks_of_rows)
        tokens = slice(first, first + count)
        out[tokens].unflatten(1, (num_kv_heads, group)).copy_(found.unflatten(1, (count, group)).transpose(0, 1))
        lse[:, tokens].unflatten(0, (num_kv_heads, group)).copy_(found_lse.unflatten(1, (count, group)).transpose(1, 2))
