"""The gradient of the lightning indexer's logits, by which an indexer is trained."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ragged_attention.reference._indexer import Keys, seen_of_lists, seen_of_ranges
from ragged_attention.reference._kv_layout import Float64, widened

FEATURES = frozenset({"key_scale", "starts", "stops", "relative", "max_keys", "indices"})


def indexer_logits_backward(
    d_logits: ArrayLike,
    q: ArrayLike,
    keys: ArrayLike,
    weights: ArrayLike,
    *,
    key_scale: ArrayLike | None = None,
    starts: ArrayLike | None = None,
    stops: ArrayLike | None = None,
    relative: bool = False,
    max_keys: int | None = None,
    indices: ArrayLike | None = None,
) -> tuple[Float64, Float64, Float64]:
    """d_q, d_keys and d_weights, shaped like q, keys and weights, in float64.

    With product = q[t, h] . key[s], and g = d_logits[t, s] * key_scale[s], the gradient of the sum over heads:

        d_q[t, h] = sum over s of g * weights[t, h] * (product > 0) * key[s]
        d_key[s] = sum over t and h of g * weights[t, h] * (product > 0) * q[t, h]
        d_weights[t, h] = sum over s of g * relu(product)
    """
    d_logits, q, weights = widened(d_logits), widened(q), widened(weights)
    all_keys = Keys(np.asarray(keys), None, key_scale, q.shape[2])
    if indices is not None:
        tokens = seen_of_lists(all_keys, np.asarray(indices))
    else:
        tokens = seen_of_ranges(all_keys, starts, stops, relative, max_keys)
    d_q, d_keys, d_weights = np.zeros(q.shape), np.zeros(np.shape(keys)), np.zeros(weights.shape)
    for seen in tokens:
        token = seen.token
        products = q[token] @ seen.keys.T  # [H, n]
        d_sums = d_logits[token, seen.columns] * seen.scales
        d_products = np.where(products > 0, weights[token][:, None] * d_sums, 0.0)
        d_q[token] = d_products @ seen.keys
        d_weights[token] = np.where(products > 0, products, 0.0) @ d_sums
        np.add.at(d_keys, seen.rows, d_products.T @ q[token])
    return d_q, d_keys, d_weights


def run(call: Any, tile: Any, launch: Any) -> Any:
    return launch.on_host(indexer_logits_backward, call, call.results())
