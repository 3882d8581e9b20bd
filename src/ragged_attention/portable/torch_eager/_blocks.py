"""The scores of blocks of keys in plain torch operations, and the selection of blocks.

As in `_indexer`, keys are gathered and converted to float32 a tile at a time, and each tile is multiplied with a few
tokens at a time. A tile holds whole blocks.
"""

from collections.abc import Iterator
from typing import Any

import torch

from ragged_attention.portable.torch_eager._cache import to_float32
from ragged_attention.portable.torch_eager._indexer import (
    LOGITS,
    Block,
    Keys,
    best_of,
    blocks_of,
    max_products,
    ordered,
)
from ragged_attention.portable.torch_eager._latents import Tile

FEATURES = frozenset({
    "key_scale", "starts", "stops", "max_keys", "page_indices", "kv_lens", "cu_q_lens", "num_seqs",
})  # fmt: skip
FORCED = 0x7F800001  # the `ordered` number of a block that is always selected, greater than that of infinity


def parts_of(call: Any) -> Iterator[Block]:
    """A call's blocks of tokens, cut so that only the scores of a single token may have more than LOGITS elements."""
    step = max(LOGITS // max(call.num_heads * call.num_blocks, 1), 1)
    for block in blocks_of(call):
        for first in range(block.first, block.last, step):
            last = min(first + step, block.last)
            rows = slice(first - block.first, last - block.first)
            yield block._replace(first=first, last=last, starts=block.starts[rows], stops=block.stops[rows])


def scores_of(call: Any, tile: Tile, keys: Keys, block: Block) -> torch.Tensor:
    """The scores [tokens, H, n] of a block of tokens, for the n blocks of keys up to the last that a token sees."""
    size, high, count = call.block_size, block.high, block.last - block.first
    shape = (count, call.num_kv_heads, call.group, -(-high // size))
    scores = torch.full(shape, -torch.inf, dtype=torch.float32, device=call.q.device)
    stops = torch.from_numpy(block.stops).to(call.q.device)[:, None]
    width = -(-tile.block_kv // size) * size
    step = max(max_products(call) // (call.num_heads * width), 1)
    for low in range(0, high, width):
        column = torch.arange(low, min(low + width, high), device=call.q.device)
        values, scales, valid = keys.at(block, column)
        values = values.reshape(len(column), call.num_kv_heads, call.head_dim)
        target = scores[..., low // size : (low + width) // size]
        for first in range(0, count, step):
            rows = slice(first, min(first + step, count))
            if low >= block.stops[rows].max():
                continue
            hidden = column >= stops[rows]
            if valid is not None:
                hidden |= ~valid
            tokens = slice(block.first + rows.start, block.first + rows.stop)
            target[rows] = _block_maxima(call, tokens, values, scales, hidden)
    return scores.flatten(1, 2)


def _block_maxima(
    call: Any, tokens: slice, keys: torch.Tensor, scales: torch.Tensor | None, hidden: torch.Tensor
) -> torch.Tensor:
    """The scores [tokens, K, group, n] of n blocks of keys; `keys` are [n * block_size or fewer, K, D]."""
    q = to_float32(call.q[tokens]).unflatten(1, (call.num_kv_heads, call.group))
    rows = q.permute(1, 0, 2, 3).flatten(1, 2)  # [K, tokens * group, D]
    products = torch.bmm(rows, keys.permute(1, 2, 0)).unflatten(1, (q.shape[0], call.group))
    if scales is not None:
        products.mul_(scales.reshape(len(keys), -1).t()[:, None, None])
    products.masked_fill_(hidden[:, None], -torch.inf)
    padding = -len(keys) % call.block_size
    if padding:
        products = torch.nn.functional.pad(products, (0, padding), value=-torch.inf)
    return products.unflatten(3, (-1, call.block_size)).amax(-1).permute(1, 0, 2, 3)


def selected(scores: torch.Tensor, top_k: int, init_blocks: int, local_blocks: int) -> torch.Tensor:
    """The selected blocks i32 [..., top_k]: some are always selected, the others have the largest scores [..., n]."""
    block = torch.arange(scores.shape[-1], device=scores.device)
    order = ordered(scores)
    if init_blocks or local_blocks:
        seen = scores != -torch.inf
        last_seen = torch.where(seen, block, -1).amax(-1, keepdim=True) if len(block) else scores.new_empty(0)
        forced = seen & ((block < init_blocks) | (block > last_seen - local_blocks))
        order = order.masked_fill(forced, FORCED)
    return best_of(order.flatten(0, -2), top_k).unflatten(0, scores.shape[:-1])
