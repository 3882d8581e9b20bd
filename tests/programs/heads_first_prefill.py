"""Check chunked prefill over heads-first pages on interpreted TPU cores; the argument is the interpreter's mode."""

import sys
from typing import Any

import numpy as np

from ragged_attention.jax import prefill_attention
from ragged_attention.testing.tpu_interpreter import watched

DIVISIONS: list[tuple[int, int, str, int | None, dict[str, int]]] = [
    (2, 16, "chunk", None, {"num_kv_pages_per_block": 1, "num_queries_per_block": 8}),
    (1, 3, "chunk", 9, {"num_kv_pages_per_block": 4, "num_queries_per_block": 16, "split_weights_below": 0}),
    (1, 16, "end", 20, {"num_kv_pages_per_block": 2, "num_queries_per_block": 8, "vmem_limit_bytes": 2**20}),
]
rng = np.random.default_rng(0)
for cores, page, align, window, options in DIVISIONS:
    for length in (0, 5, 70):
        q = rng.standard_normal((24, 4, 64)).astype(np.float32)
        k, v = (rng.standard_normal((2, 30, page, 64)).astype(np.float32) for _ in "kv")
        table = rng.integers(-1, 31, 80 // page).astype(np.int32)
        arguments: Any = q, k, v, np.array([length], np.int32), table
        shared: dict[str, Any] = {"sliding_window": window, "align": align}
        with watched(sys.argv[1], cores):
            got = np.asarray(prefill_attention(*arguments, **shared, backend="pallas", options=options))
        want = np.asarray(prefill_attention(*arguments, **shared, backend="reference"))
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
