"""How calls of the indexer's logits and of their top-k become records of `_indexer`'s kernel."""

from typing import Any

from ragged_attention.calls import IndexerLogits, IndexerTopk, dtype_name
from ragged_attention.portable.numba import _indexer, _sequences
from ragged_attention.portable.numba._call import Blocks as Tile
from ragged_attention.portable.numba._formats import CODES
from ragged_attention.portable.numba._kernels import Kernel

KERNEL = Kernel("indexer", _indexer.FIELDS, _indexer.plan, _indexer.work)
FEATURES_OF_LOGITS = frozenset({
    "key_scale", "starts", "stops", "relative", "max_keys", "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "ratio",
})  # fmt: skip


def heuristic(call: IndexerLogits | IndexerTopk) -> Tile:
    """A tile with enough tokens that reading keys costs little beside the products, and with few rows of logits."""
    del call
    return Tile(block_q=8, block_kv=64)


invariant_tile = heuristic  # the order of a logit's sum does not depend on the batch


def _numbers_of_keys(call: IndexerLogits | IndexerTopk, keys: Any, launch: Any) -> dict[str, int]:
    """The layout of keys and their scales: packed keys are one page, and rows of bytes in a page follow one another."""
    strides, scales = launch.strides(keys), (0, 0)
    if call.key_scale is not None:
        scales = (0, *launch.strides(call.key_scale))[-2:]
    elif call.bytes:
        scales = (0, 1)
    return {
        "key_format": CODES[call.key_dtype], "in_bytes": call.bytes, "num_pages": keys.shape[0] if call.paged else 1,
        "page_size": call.page_size, "page_stride": strides[0] if call.paged else 0,
        "slot_stride": call.head_dim if call.bytes else strides[-2], "scales_page_stride": scales[0],
        "scales_slot_stride": scales[1],
    }  # fmt: skip


def _max_num_seqs(call: IndexerLogits | IndexerTopk) -> int:
    """The most sequences; packed keys have one sequence of all tokens."""
    if not call.paged:
        return 1
    return call.kv_lens.shape[0] if call.num_seqs is None or not isinstance(call.num_seqs, int) else call.num_seqs


def run(
    call: IndexerLogits | IndexerTopk, tile: Tile, launch: Any, *, top_k: int = 0, candidates: Any = None,
    candidate_size: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Enqueue the kernel; returns by name indices if there is a `top_k`, otherwise logits."""
    q, weights = launch.packed(call.q), launch.packed(call.weights)
    keys = launch.words(call.keys, packed_rows=True) if call.bytes else call.keys
    tables = launch.packed(call.page_indices) if call.paged else None
    candidates = None if candidates is None else launch.packed(candidates)
    token_stride, head_stride, _ = launch.strides(q)

    def contiguous(array: Any) -> Any:
        return None if array is None else launch.contiguous(array)

    return KERNEL.launch(
        launch,
        tile,
        {
            "q": q, "keys": keys, "weights": weights, "key_scale": call.key_scale, "starts": contiguous(call.starts),
            "stops": contiguous(call.stops), "page_indices": tables, "kv_lens": contiguous(call.kv_lens),
            "cu_q_lens": contiguous(call.cu_q_lens),
            "num_seqs": None if isinstance(call.num_seqs, int) else call.num_seqs, "candidates": candidates,
        },
        {
            "logits": None if top_k else ((call.num_tokens, call.columns), "float32"),
            "indices": ((call.num_tokens, top_k), "int32") if top_k else None,
        },
        {
            "num_tokens": call.num_tokens, "num_heads": call.num_heads, "head_dim": call.head_dim,
            "q_format": CODES[dtype_name(q)], "q_token_stride": token_stride, "q_head_stride": head_stride,
            "weights_token_stride": launch.strides(weights)[0], **_numbers_of_keys(call, keys, launch),
            "packed": not call.paged, "relative": call.relative, "columns": call.columns,
            "max_num_seqs": _max_num_seqs(call), "layout": _sequences.PACKED,
            "capacity": call.token_capacity if call.paged else 0,
            "table_stride": launch.strides(tables)[0] if call.paged else 0, "ratio": call.ratio, "top_k": top_k,
            "num_candidates": 0 if candidates is None else candidates.shape[1],
            "candidates_stride": 0 if candidates is None else launch.strides(candidates)[0],
            "candidate_size": candidate_size,
        },
    )  # fmt: skip
