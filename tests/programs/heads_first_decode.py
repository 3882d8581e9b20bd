"""Check decode over heads-first pages on interpreted TPU cores; the argument is the interpreter's mode.

In the first check, scalar memory holds three of the four rows of the block table. In the others, two cores divide the
sequences or the heads, and a block of keys is one or more pages. Empty sequences come first, last and in between.
"""

import sys
from typing import Any

import numpy as np

from ragged_attention.jax import paged_attention
from ragged_attention.testing.tpu_interpreter import watched

rng = np.random.default_rng(0)


def check(lengths: list[int], page: int, columns: int, cores: int, **options: Any) -> None:
    count = len(lengths)
    q = rng.standard_normal((count, 8, 64)).astype(np.float32)
    k, v = (rng.standard_normal((4, 30, page, 64)).astype(np.float32) for _ in "kv")
    table = rng.integers(-3, 33, (count, columns)).astype(np.int32)
    arguments: Any = q, k, v, np.array(lengths, np.int32), table
    with watched(sys.argv[1], cores):
        got = np.asarray(paged_attention(*arguments, backend="pallas", options=options))
    want = np.asarray(paged_attention(*arguments, backend="reference"))
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


check([3, 0, 7, 9], 1, 60000, 1)
for inline in (True, False):
    check([0, 5, 0, 0, 40, 33], 16, 4, 2, megacore_mode="batch", inline_seq_dim=inline, pages_per_compute_block=1)
    check([0, 5, 0, 0, 40], 16, 4, 2, megacore_mode="kv_head", inline_seq_dim=inline, pages_per_compute_block=2)
    check([0, 5, 40], 16, 4, 2, megacore_mode=None, inline_seq_dim=inline, pages_per_compute_block=4)
