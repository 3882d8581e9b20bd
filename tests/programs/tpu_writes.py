"""Check writes of keys and values on interpreted TPU cores; the argument is the interpreter's mode.

The slots contain runs of every length, -1, and repeated slots, both near each other and far apart. The blocks have
several sizes, the last of which runs on two cores.
"""

import sys
from typing import Any

import numpy as np

from ragged_attention.jax import write_kv_pages
from ragged_attention.testing.tpu_interpreter import watched

rng = np.random.default_rng(0)
for block, cores in ((1, 1), (5, 1), (16, 1), (64, 2)):
    k, v = (rng.standard_normal((61, 2, 16)).astype(np.float32) for _ in "kv")
    pages = rng.standard_normal((6, 8, 4, 16)).astype(np.float32)
    slots = np.concatenate([np.arange(n) + rng.integers(48 - n) for n in (1, 9, 3, 17, 8, 7, 16)]).astype(np.int32)
    slots[rng.random(61) < 0.05] = -1
    arguments: Any = k, v, pages, slots
    with watched(sys.argv[1], cores):
        got = np.asarray(write_kv_pages(*arguments, backend="pallas", options={"num_tokens_per_block": block}))
    expected = np.asarray(write_kv_pages(*arguments, backend="reference"))
    np.testing.assert_array_equal(
        got, expected
    )  # if two tokens have the same slot, the later token is kept, as in the reference
