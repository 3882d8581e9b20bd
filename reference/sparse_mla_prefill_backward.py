"""The gradient of sparse MLA prefill."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ragged_attention.reference._kv_layout import Float64, widened
from ragged_attention.reference.sparse_mla_prefill import selected
from ragged_attention.reference.varlen_attention_backward import attend_backward, row_terms, run_gradient

FEATURES = frozenset({"d_lse", "sm_scale", "d_v", "sinks", "topk_lens", "deterministic"})


def sparse_mla_prefill_backward(
    d_out: ArrayLike,
    q: ArrayLike,
    kv: ArrayLike,
    indices: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    d_lse: ArrayLike | None = None,
    sm_scale: float | None = None,
    d_v: int = 512,
    sinks: ArrayLike | None = None,
    topk_lens: ArrayLike | None = None,
    deterministic: bool = False,
) -> tuple[Float64, Float64, Float64 | None]:
    """dq, dkv and d_sinks, shaped like q, kv and sinks, in float64. The formulas are in this folder's `README.md`."""
    del deterministic  # every sum here has a fixed order
    q, kv, d_out = (widened(array) for array in (q, kv, d_out))
    indices, lse = np.asarray(indices), widened(lse)
    num_tokens, num_q_heads, d_qk = q.shape
    num_kv_heads, topk = indices.shape[1:]
    rows = kv.reshape(-1, num_kv_heads, d_qk)  # packed rows, or pages one after another
    group = num_q_heads // num_kv_heads
    lens = np.broadcast_to(topk if topk_lens is None else np.asarray(topk_lens), (num_tokens,))
    scale = d_qk**-0.5 if sm_scale is None else sm_scale
    share, delta, d_lse, d_sinks = row_terms(d_out, out, lse, d_lse, sinks)
    dq, d_rows = np.zeros(q.shape), np.zeros(rows.shape)
    for token in range(num_tokens):
        for kv_head in range(num_kv_heads):
            slots = selected(indices[token, kv_head], lens[token], len(rows))
            heads = slice(kv_head * group, (kv_head + 1) * group)
            keys = rows[slots, kv_head]
            dq[token, heads], dk, dv, _ = attend_backward(
                d_out[token, heads], q[token, heads], keys, keys[:, :d_v], np.ones((group, len(slots)), bool),
                lse[token, heads], share[token, heads], delta[token, heads], d_lse[token, heads], scale, None,
            )  # fmt: skip
            dk[:, :d_v] += dv
            np.add.at(d_rows[:, kv_head], slots, dk)
    return dq, d_rows.reshape(kv.shape), d_sinks


def run(call: Any, tile: Any, launch: Any) -> Any:
    return run_gradient(sparse_mla_prefill_backward, call, launch)
