"""Turns calls of `indexer_logits` and `indexer_topk` into records of `_indexer`'s kernel."""

from typing import Any

from ragged_attention.calls import IndexerLogits, IndexerTopk
from ragged_attention.portable.numba import _indexer, _sequences
from ragged_attention.portable.numba._call import Blocks as Tile
from ragged_attention.portable.numba._formats import CODES
from ragged_attention.portable.numba._kernels import Kernel

KERNEL = Kernel("indexer", _indexer.FIELDS, _indexer.plan, _indexer.work)
LOGITS_FEATURES = frozenset({
    "key_scale", "starts", "stops", "relative", "max_keys", "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "ratio",
    "indices",
})  # fmt: skip


def heuristic(call: IndexerLogits | IndexerTopk) -> Tile:
    """A tile of few query tokens, but enough that reading the keys costs little compared with the products."""
    del call
    return Tile(block_q=8, block_kv=64)


invariant_tile = heuristic  # a logit is summed in an order that depends on neither the tile nor the batch


def keys_and_numbers(call: Any, launch: Any) -> tuple[Any, dict[str, Any]]:
    """The keys, and the numbers that describe their storage. Packed keys are treated as one page and one sequence."""
    keys = launch.words(call.keys, packed_rows=True) if call.bytes else call.keys
    numbers = {
        "key_format": CODES[call.key_dtype], "in_bytes": call.bytes, "packed": not call.paged,
        "layout": _sequences.PACKED, "num_pages": 1, "max_num_seqs": 1, "capacity": 0,
    }  # fmt: skip
    if call.paged:
        max_num_seqs = _sequences.max_sequences(call, call.kv_lens.shape[0])
        numbers |= {"num_pages": keys.shape[0], "max_num_seqs": max_num_seqs, "capacity": call.token_capacity}
    if call.bytes:  # the rows of a page are contiguous, and so are its scales
        numbers |= {"keys_slot_stride": call.head_dim, "key_scale_slot_stride": 1}
    return keys, numbers


def run(call: IndexerLogits | IndexerTopk, tile: Tile, launch: Any) -> Any:
    """Launch the kernel; returns the indices of a top-k, or logits."""
    keys, numbers = keys_and_numbers(call, launch)
    name = "logits"
    if isinstance(call, IndexerTopk):
        name = "indices"
        if call.candidate_blocks is not None:
            numbers["num_candidates"] = call.candidate_blocks.shape[1]
    (result,) = call.results()
    operands, results = {"keys": keys, "key_scale": call.key_scale}, {name: (result.shape, result.dtype)}
    if call.listed:
        operands["key_lists"] = launch.packed(call.indices)
    axes: dict[str, str] = dict.fromkeys(("keys", "key_scale"), "page slot" if call.paged else "slot")
    return KERNEL.launch(launch, call, tile, operands, numbers, axes=axes, results=results)[name]
