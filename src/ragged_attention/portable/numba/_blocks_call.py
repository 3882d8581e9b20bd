"""Turns calls of `block_scores` and `select_blocks` into records of `_blocks`' kernel."""

from typing import Any

from ragged_attention.calls import BlockScores, SelectBlocks
from ragged_attention.portable.numba import _blocks, _sequences
from ragged_attention.portable.numba._call import Blocks as Tile
from ragged_attention.portable.numba._formats import CODES
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
    keys = launch.words(call.keys, packed_rows=True) if call.bytes else call.keys
    numbers = {
        "key_format": CODES[call.key_dtype], "in_bytes": call.bytes, "packed": not call.paged,
        "layout": _sequences.PACKED, "num_pages": 1, "max_num_seqs": 1, "capacity": 0,
    }  # fmt: skip
    if call.paged:  # packed keys are treated as one page and one sequence
        max_num_seqs = _sequences.max_sequences(call, call.kv_lens.shape[0])
        numbers |= {"num_pages": keys.shape[0], "max_num_seqs": max_num_seqs, "capacity": call.token_capacity}
    if call.bytes:  # the rows of a page follow one another, and so do its scales
        numbers |= {"keys_slot_stride": call.head_dim, "keys_head_stride": 0, "key_scale_slot_stride": 1}
    name = "blocks" if isinstance(call, SelectBlocks) else "scores"
    (result,) = call.results()
    operands, results = {"keys": keys, "key_scale": call.key_scale}, {name: (result.shape, result.dtype)}
    axes = dict.fromkeys(operands, "page slot head" if call.paged else "slot head")
    return KERNEL.launch(launch, call, tile, operands, numbers, axes=axes, results=results)[name]
