"""The demo's transformer, apart from any framework: its weights, its shape, and the backends its calls take.

Bytes in, bytes out; RMSNorm, rotary positions, grouped queries, a gated feed-forward layer, embeddings shared by input
and output. The shapes of the weights define its size:

    embed [V, E]    q [L, E, H, D]    k, v [L, E, K, D]    o [L, H, D, E]    gate, up [L, E, F]    down [L, F, E]
    attention_norm, feed_norm [L, E]    last_norm [E]
"""

from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragged_attention import dispatch
from ragged_attention.calls import Device, RaggedPagedAttention, WriteKvPages

WEIGHTS = "weights.npz"
ROPE_BASE = 10_000.0
NORM_EPSILON = 1e-5
STEP_TABLES = ("kv_lens", "page_indices", "cu_q_lens", "num_seqs")

Weights = dict[str, NDArray[np.float32]]


def load_weights() -> Weights:
    """The weights that come with the package, stored in half precision, computed with in single."""
    with resources.as_file(resources.files("ragged_attention.demo") / WEIGHTS) as path, np.load(path) as stored:
        return {name: stored[name].astype(np.float32) for name in stored.files}


def rope_frequencies(head_dim: int) -> NDArray[np.float32]:
    """The angle by which one position turns each pair of channels, [D / 2]."""
    return (ROPE_BASE ** (-np.arange(0, head_dim, 2) / head_dim)).astype(np.float32)


def chosen_backends(q: Any, k: Any, kv_pages: Any, tables: dict[str, Any], device: Device, backend: str | None) -> str:
    """Which backend a step's calls run on, by the choice that the calls themselves will make."""
    attention = RaggedPagedAttention(q=q, kv_pages=kv_pages, **tables, device=device)
    write = WriteKvPages(k=k, v=k, kv_pages=kv_pages, **tables, device=device)
    attends, writes = (dispatch.choose(call, backend=backend).backend for call in (attention, write))
    return attends if attends == writes else f"{attends}, writes {writes}"
