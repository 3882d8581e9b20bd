"""Turns calls of `block_scores` and `select_blocks` into records of `_blocks`' kernel."""

from typing import Any

from ragged_attention.calls import BlockScores, SelectBlocks
from ragged_attention.portable.numba import _blocks
from ragged_attention.portable.numba._call import Blocks as Tile
from ragged_attention.portable.numba._indexer_call import keys_and_numbers
from ragged_attention.portable.numba._kernels import Kernel

KERNEL = Kernel("block_scores", _blocks.FIELDS, _blocks.plan, _blocks.work)
SCORES_FEATURES = frozenset({
    "key_scale", "starts", "stops", "max_keys", "page_indices", "kv_lens", "cu_q_lens", "num_seqs",
})  # fmt: skip
MAX_ROWS = 64  # rows of queries in a tile, unless a token has more heads


def heuristic(call: BlockScores | SelectBlocks) -> Tile:
    """A tile of few query tokens, but enough that reading the keys costs little compared with the products."""
    return Tile(block_q=min(max(MAX_ROWS // call.num_heads, 1), 16), block_kv=64)


invariant_tile = heuristic  # a product is summed in an order that depends on neither the tile nor the batch


def run(call: BlockScores | SelectBlocks, tile: Tile, launch: Any) -> Any:
    """Launch the kernel; returns blocks or scores."""
    keys, numbers = keys_and_numbers(call, launch)
    if call.bytes:
        numbers["keys_head_stride"] = 0
    name = "blocks" if isinstance(call, SelectBlocks) else "scores"
    (result,) = call.results()
    operands, results = {"keys": keys, "key_scale": call.key_scale}, {name: (result.shape, result.dtype)}
    axes = dict.fromkeys(operands, "page slot head" if call.paged else "slot head")
    return KERNEL.launch(launch, call, tile, operands, numbers, axes=axes, results=results)[name]
