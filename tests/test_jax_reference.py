"""The results equal those of the reference function for JAX's own TPU kernel, on batches that both support."""

import importlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import ragged_attention.jax as rj
from ragged_attention.testing.compare import agrees

HEAD_DIM, NUM_PAGES, PAGES_PER_SEQ = 128, 64, 6


def shared_batch(seed: int) -> tuple[tuple[Any, ...], dict[str, Any], int]:
    """Positional arguments and options that both functions take, and the number of live rows."""
    random = np.random.default_rng(seed)
    max_num_seqs, page_size = int(random.integers(1, 5)), int(random.choice([4, 16]))
    num_seqs, num_kv_heads = int(random.integers(1, max_num_seqs + 1)), int(random.choice([1, 2, 4]))
    q_lens = random.integers(1, 20, max_num_seqs)
    kv_lens = np.minimum(q_lens + random.integers(0, 60, max_num_seqs), page_size * PAGES_PER_SEQ)
    q_lens = np.minimum(q_lens, kv_lens)
    cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    live = int(cu_q_lens[num_seqs])
    num_q_heads = num_kv_heads * int(random.choice([1, 3, 4]))
    arguments = (
        jnp.asarray(random.standard_normal((live + int(random.integers(0, 4)), num_q_heads, HEAD_DIM)), jnp.float32),
        jnp.asarray(random.standard_normal((NUM_PAGES, page_size, 2 * num_kv_heads, HEAD_DIM)), jnp.float32),
        jnp.asarray(kv_lens, jnp.int32),
        jnp.asarray(random.permutation(NUM_PAGES)[: max_num_seqs * PAGES_PER_SEQ].reshape(max_num_seqs, -1), jnp.int32),
        jnp.asarray(cu_q_lens),
        jnp.array([num_seqs], jnp.int32),
    )
    options = {
        "sm_scale": float(random.choice([1.0, HEAD_DIM**-0.5])),
        "sliding_window": 5 if random.random() < 0.5 else None,
        "soft_cap": 10.0 if random.random() < 0.5 else None,
    }
    return arguments, options, live


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("backend", ["xla", "triton"])
def test_agrees_with_the_reference_of_jax(backend: str, seed: int) -> None:
    theirs = importlib.import_module("jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel")
    arguments, options, live = shared_batch(seed)
    want = theirs.ref_ragged_paged_attention(*arguments, **options)
    got: Any = rj.ragged_paged_attention(*arguments, **options, backend=backend)
    agrees(np.asarray(got)[:live], np.asarray(want, np.float64)[:live], "float32")
