"""Attention of packed sequences to packed sequences on a CPU: `_paged`'s kernel with one key per page."""

from typing import Any

from ragged_attention.calls import VarlenAttention, dtype_name
from ragged_attention.portable.numba._call import KERNEL, block_q_of
from ragged_attention.portable.numba._call import Tile as Tile
from ragged_attention.portable.numba._call import invariant_tile as invariant_tile
from ragged_attention.portable.numba._call import why_not as why_not
from ragged_attention.portable.numba._formats import CODES
from ragged_attention.portable.numba._sequences import PACKED

FEATURES = frozenset({
    "max_q_len", "max_kv_len", "sm_scale", "causal", "sliding_window", "soft_cap", "sinks", "deterministic",
})  # fmt: skip


def heuristic(call: VarlenAttention) -> Tile:
    return Tile(block_q=block_q_of(call), block_kv=64)


def run(call: VarlenAttention, tile: Tile, launch: Any) -> tuple[Any, Any]:
    q, k, v = launch.packed(call.q), launch.packed(call.k), launch.packed(call.v)
    operands = {
        "q": q,
        "k_pages": k,
        "v_pages": v,
        "cu_q_lens": launch.contiguous(call.cu_q_lens),
        "cu_kv_lens": launch.contiguous(call.cu_kv_lens),
        "sinks": None if call.sinks is None else launch.contiguous(call.sinks),
    }
    numbers: dict[str, Any] = {}
    for array, axes in ((q, ("q_token", "q_head")), (k, ("k_page", "k_head")), (v, ("v_page", "v_head"))):
        numbers |= zip((f"{axis}_stride" for axis in axes), launch.strides(array)[:2], strict=True)
    numbers |= {
        "num_tokens": call.num_q_tokens,
        "num_q_heads": call.num_q_heads,
        "num_kv_heads": call.num_kv_heads,
        "head_dim": call.head_dim,
        "v_head_dim": call.v_head_dim,
        "max_num_seqs": call.num_seqs,
        "layout": PACKED,
        "q_format": CODES[dtype_name(q)],
        "out_format": CODES[dtype_name(q)],
        "num_pages": call.num_kv_tokens,
        "page_size": 1,
        "capacity": call.num_kv_tokens,
        "cache_format": CODES[dtype_name(k)],
        "causal": call.causal,
        "window": call.sliding_window or 0,
        "scale": call.scale,
        "soft_cap": call.soft_cap or 0.0,
        "k_scale_number": 1.0,
        "v_scale_number": 1.0,
        "block_q": tile.block_q,
        "block_kv": tile.block_kv,
        "num_splits": tile.num_splits,
    }
    lse = (call.out_shape[:2], "float32")
    results = KERNEL.launch(launch, operands, {"out": (call.out_shape, call.q.dtype), "lse": lse}, numbers)
    return results["out"], results["lse"]
