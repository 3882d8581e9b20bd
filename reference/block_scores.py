"""The largest product of a query with the keys of each block, for each index head."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ragged_attention.calls import dtype_name
from ragged_attention.reference._indexer import Keys, seen_in_pages, seen_of_ranges
from ragged_attention.reference._kv_layout import Float64, decode

FEATURES = frozenset({
    "key_scale", "starts", "stops", "max_keys", "page_indices", "kv_lens", "cu_q_lens", "num_seqs",
})  # fmt: skip
BATCH_INVARIANT = True


def block_scores(
    q: ArrayLike,
    keys: ArrayLike,
    *,
    block_size: int,
    key_scale: ArrayLike | None = None,
    starts: ArrayLike | None = None,
    stops: ArrayLike | None = None,
    max_keys: int | None = None,
    page_indices: ArrayLike | None = None,
    kv_lens: ArrayLike | None = None,
    cu_q_lens: ArrayLike | None = None,
    num_seqs: ArrayLike | None = None,
    q_dtype: str | None = None,
    key_dtype: str | None = None,
) -> Float64:
    """Scores [T, H, B] in float64, -inf for blocks without a key that the token sees.

    The arguments are those of the operation; `q_dtype` and `key_dtype` name the formats of 8-bit floats given as bits.
    """
    q = decode(q, q_dtype)
    num_tokens, num_heads, head_dim = q.shape
    all_keys = Keys(np.asarray(keys), key_dtype, key_scale, head_dim)
    if page_indices is not None:
        columns = np.shape(page_indices)[1] * np.shape(keys)[1]
        tokens = seen_in_pages(num_tokens, all_keys, (page_indices, kv_lens, cu_q_lens), num_seqs, ratio=1)
    else:
        columns = np.shape(keys)[0] if max_keys is None else max_keys
        tokens = seen_of_ranges(all_keys, starts, stops, relative=True, max_keys=max_keys)
    scores = np.full((num_tokens, num_heads, -(-columns // block_size)), -np.inf)
    for seen in tokens:
        rows = seen.keys.reshape(len(seen.columns), -1, head_dim)  # [n, K, D]
        scales = seen.scales.reshape(len(seen.columns), -1)  # [n, K] or [n, 1]
        group = num_heads // rows.shape[1]
        with np.errstate(invalid="ignore"):  # infinity minus infinity is NaN
            products = np.einsum("kgd,nkd->nkg", q[seen.token].reshape(-1, group, head_dim), rows) * scales[..., None]
        by_block = scores[seen.token].T  # a view [B, H]
        np.maximum.at(by_block, seen.columns // block_size, products.reshape(len(rows), num_heads))
    return scores


def run(call: Any, tile: Any, launch: Any) -> Any:
    formats = {"q_dtype": dtype_name(call.q), "key_dtype": call.key_dtype}
    return launch.on_host(block_scores, call, call.results(), **formats)
