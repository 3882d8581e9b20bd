"""The lightning indexer's logits, by which each query token selects keys."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ragged_attention.calls import dtype_name
from ragged_attention.reference._indexer import Keys, seen_in_pages, seen_of_lists, seen_of_ranges
from ragged_attention.reference._kv_layout import Float64, decode, widened

FEATURES = frozenset({
    "key_scale", "starts", "stops", "relative", "max_keys", "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "ratio",
    "indices",
})  # fmt: skip
BATCH_INVARIANT = True


def indexer_logits(
    q: ArrayLike,
    keys: ArrayLike,
    weights: ArrayLike,
    *,
    key_scale: ArrayLike | None = None,
    starts: ArrayLike | None = None,
    stops: ArrayLike | None = None,
    relative: bool = False,
    max_keys: int | None = None,
    page_indices: ArrayLike | None = None,
    kv_lens: ArrayLike | None = None,
    cu_q_lens: ArrayLike | None = None,
    num_seqs: ArrayLike | None = None,
    ratio: int = 1,
    indices: ArrayLike | None = None,
    q_dtype: str | None = None,
    key_dtype: str | None = None,
) -> Float64:
    """Logits [T, columns] in float64, -inf where a token does not see the key.

    The arguments are those of the operation; `q_dtype` and `key_dtype` name the formats of 8-bit floats given as bits.
    """
    q, weights = decode(q, q_dtype), widened(weights)
    all_keys = Keys(np.asarray(keys), key_dtype, key_scale, q.shape[2])
    if page_indices is not None:
        columns = np.shape(page_indices)[1] * np.shape(keys)[1]
        tokens = seen_in_pages(len(q), all_keys, (page_indices, kv_lens, cu_q_lens), num_seqs, ratio)
    elif indices is not None:
        columns = np.shape(indices)[1]
        tokens = seen_of_lists(all_keys, np.asarray(indices))
    else:
        columns = len(all_keys.stored) if max_keys is None else max_keys
        tokens = seen_of_ranges(all_keys, starts, stops, relative, max_keys)
    logits = np.full((len(q), columns), -np.inf)
    for seen in tokens:
        with np.errstate(invalid="ignore"):  # infinity minus infinity is NaN
            products = np.maximum(q[seen.token] @ seen.keys.T, 0.0)
            logits[seen.token, seen.columns] = weights[seen.token] @ products * seen.scales
    return logits


def run(call: Any, tile: Any, launch: Any) -> Any:
    formats = {"q_dtype": dtype_name(call.q), "key_dtype": call.key_dtype}
    return launch.on_host(indexer_logits, call, call.results(), **formats)
