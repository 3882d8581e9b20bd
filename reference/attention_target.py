"""The distribution of attention over a token's keys, summed over heads, which an indexer is trained to match."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ragged_attention.reference._indexer import Keys, seen_of_lists, seen_of_ranges
from ragged_attention.reference._kv_layout import Float64, widened

FEATURES = frozenset({"indices", "sm_scale", "topk_lens", "starts", "stops", "relative", "max_keys"})
BATCH_INVARIANT = True


def attention_target(
    q: ArrayLike,
    keys: ArrayLike,
    lse: ArrayLike,
    indices: ArrayLike | None = None,
    *,
    sm_scale: float | None = None,
    topk_lens: ArrayLike | None = None,
    starts: ArrayLike | None = None,
    stops: ArrayLike | None = None,
    relative: bool = False,
    max_keys: int | None = None,
) -> Float64:
    """The target [T, columns] in float64, whose rows sum to 1 or are 0; the arguments are those of the operation."""
    q, lse = widened(q), widened(lse)
    all_keys, scale = (
        Keys(np.asarray(keys), None, None, q.shape[2]),
        q.shape[2] ** -0.5 if sm_scale is None else sm_scale,
    )
    if indices is not None:
        lists = np.asarray(indices)
        columns = lists.shape[1]
        if topk_lens is not None:
            lists = np.where(np.arange(columns) < np.asarray(topk_lens)[:, None], lists, -1)
        tokens = seen_of_lists(all_keys, lists)
    else:
        columns = len(all_keys.stored) if max_keys is None else max_keys
        tokens = seen_of_ranges(all_keys, starts, stops, relative, max_keys)
    target = np.zeros((len(q), columns))
    for seen in tokens:
        has_keys = lse[seen.token] > -np.inf  # a head without keys has no probabilities
        logits = scale * (q[seen.token, has_keys] @ seen.keys.T)
        sums = np.exp(logits - lse[seen.token, has_keys, None]).sum(axis=0)
        total = sums.sum()
        target[seen.token, seen.columns] = sums / total if total > 0 else 0.0
    return target


def run(call: Any, tile: Any, launch: Any) -> Any:
    return launch.on_host(attention_target, call, call.results())
