"""The weights of the demo's transformers and their shapes, without a framework.

Tokens are bytes. The models have RMSNorm, rotary positions, a gated feed-forward layer, and embeddings that input and
output share. The shapes of the weights define the sizes:

    embed [V, E]    gate, up [L, E, F]    down [L, F, E]    attention_norm, feed_norm [L, E]    last_norm [E]

The first model has H query heads and K KV heads:

    q [L, E, H, D]    k, v [L, E, K, D]    o [L, H, D, E]

The other model caches a latent of C numbers and a rotary key of R numbers per token. From these, each head computes a
key of N + R numbers and a value of N numbers. Cached rows are divided by kv_scale and rounded to 8 bits:

    q [L, E, H, N + R]    latent [L, E, C + R]    latent_norm [L, C]    k, v [L, C, H, N]    o [L, H, N, E]
    kv_scale [L]
"""

import dataclasses
from importlib import resources

import numpy as np
from numpy.typing import NDArray

ROPE_BASE = 10_000.0
NORM_EPSILON = 1e-5
STEP_TABLES = ("kv_lens", "page_indices", "cu_q_lens", "num_seqs")
LARGEST_CODE = 448.0  # the largest float8_e4m3fn, the dtype of cached latents

Weights = dict[str, NDArray[np.float32]]


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """A model of the demo: its file, its attention, and a description of the attention that checks its tokens."""

    file: str
    operation: str
    checked_by: str


KINDS = {
    "gqa": Kind("weights.npz", "ragged_paged_attention", "full attention without a cache"),
    "mla": Kind(
        "weights_mla.npz",
        "ragged_mla_attention",
        "full attention without a cache, its keys and values made from latents rounded to 8 bits",
    ),
}


def load_weights(kind: str) -> Weights:
    """The weights that come with the package, as float32. The files hold float16."""
    folder = resources.files("ragged_attention.demo")
    with resources.as_file(folder / KINDS[kind].file) as path, np.load(path) as stored:
        return {name: stored[name].astype(np.float32) for name in stored.files}


def rope_frequencies(head_dim: int) -> NDArray[np.float32]:
    """The angle by which one position turns each pair of channels, [D / 2]."""
    return (ROPE_BASE ** (-np.arange(0, head_dim, 2) / head_dim)).astype(np.float32)
