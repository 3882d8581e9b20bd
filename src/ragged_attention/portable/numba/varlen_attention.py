"""Attention of packed sequences to packed sequences on a CPU: `_paged`'s kernel with one key per page."""

from typing import Any

from ragged_attention.calls import VarlenAttention, dtype_name
from ragged_attention.portable.numba._call import KERNEL, attention_numbers, block_q_of
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
        "q": q, "k_pages": k, "v_pages": v, "cu_q_lens": launch.contiguous(call.cu_q_lens),
        "cu_kv_lens": launch.contiguous(call.cu_kv_lens),
        "sinks": None if call.sinks is None else launch.contiguous(call.sinks),
    }  # fmt: skip
    numbers = {
        **attention_numbers(call, q, launch), "out_format": CODES[dtype_name(q)], "num_tokens": call.num_q_tokens,
        "max_num_seqs": call.num_seqs, "layout": PACKED, "num_pages": call.num_kv_tokens, "page_size": 1,
        "capacity": call.num_kv_tokens, "cache_format": CODES[dtype_name(k)], "k_scale_number": 1.0,
        "v_scale_number": 1.0,
    }  # fmt: skip
    for name, array in (("k", k), ("v", v)):
        numbers[f"{name}_page_stride"], numbers[f"{name}_head_stride"] = launch.strides(array)[:2]
    lse = (call.out_shape[:2], "float32")
    results = KERNEL.launch(launch, tile, operands, {"out": (call.out_shape, call.q.dtype), "lse": lse}, numbers)
    return results["out"], results["lse"]
