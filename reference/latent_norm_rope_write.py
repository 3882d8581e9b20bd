"""Normalises and rotates this step's latent rows, writes them to the cache, and rotates the queries."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ragged_attention.calls import dtype_name
from ragged_attention.reference import write_mla_cache as writing
from ragged_attention.reference._kv_layout import widened
from ragged_attention.reference._rotary import normalized, rotated, rounded
from ragged_attention.reference.write_mla_cache import write_mla_cache

FEATURES = writing.FEATURES - {"d_v"} | {"kv_weight", "eps", "interleaved"}


def latent_norm_rope_write(
    q: ArrayLike,
    kv: ArrayLike,
    cache: ArrayLike,
    slot_mapping: ArrayLike | None = None,
    *,
    positions: ArrayLike,
    cos_sin: Any,
    kv_weight: ArrayLike | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    page_indices: Any = None,
    kv_lens: Any = None,
    cu_q_lens: Any = None,
    num_seqs: ArrayLike | None = None,
    kv_scale: ArrayLike | None = None,
    rope_scale: ArrayLike | None = None,
    power_of_two_scales: bool = True,
    cache_format: str | None = None,
    cache_layout: str | None = None,
    dtype: str = "float32",
    code_dtype: str | None = None,
) -> tuple[Any, ...]:
    """The rotated queries and the new cache.

    The first columns of a row, one for each weight, are normalised. Its last columns, as many as q has, are rotated. A
    row is rounded once, to `dtype`, and then written as by `write_mla_cache`.
    """
    rows = widened(kv).copy()
    if kv_weight is not None:
        count = len(np.asarray(kv_weight))
        rows[..., :count] = normalized(rows[..., :count], kv_weight, eps)
    start = rows.shape[-1] - np.asarray(q).shape[-1]
    rows[..., start:] = rotated(rows[..., start:], positions, cos_sin, interleaved)
    written = write_mla_cache(
        rounded(rows, dtype), cache, slot_mapping, page_indices=page_indices, kv_lens=kv_lens, cu_q_lens=cu_q_lens,
        num_seqs=num_seqs, kv_scale=kv_scale, rope_scale=rope_scale, d_v=start,
        power_of_two_scales=power_of_two_scales, cache_format=cache_format, cache_layout=cache_layout,
        code_dtype=code_dtype,
    )  # fmt: skip
    return rounded(rotated(q, positions, cos_sin, interleaved), dtype), written


def run(call: Any, tile: Any, launch: Any) -> Any:
    outputs, code_dtype = ((call.q.shape, call.q.dtype), "cache"), call.kv_format.code_dtype
    return launch.on_host(latent_norm_rope_write, call, outputs, dtype=dtype_name(call.kv), code_dtype=code_dtype)
