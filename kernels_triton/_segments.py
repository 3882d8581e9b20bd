"""Results whose bits depend on the query and the keys that it sees alone: batch-invariant mode of attention over pages.

Keys are attended to in *segments*, ranges of SEGMENT consecutive keys from a multiple of SEGMENT on. Each segment has a
softmax state of its own, and the normalised results of all segments are merged one after the other. One program visits
all segments of a block of rows, or each segment has a program and the combine kernel merges the results. Both merge by
`with_later`, so the host chooses freely, by shapes.

Within a segment, all loops visit blocks of the same size in ascending order, with the same number of rows and of terms
per weight. Whether a block needs a mask depends on the other rows of a program, but a mask changes no bit of what a row
sees.
"""

from typing import Any

import triton
import triton.language as tl

from ragged_attention.errors import InvalidInput
from ragged_attention.kernels_triton._tiles import expect_power_of_two

SEGMENT = 1024  # keys per segment, unless the caller chooses
MAX_PARTS = 16384  # maximum results of segments, for all KV heads, that are stored for the combine kernel


def expect_segments(tile: Any) -> None:
    """Check the `segment_kv` of a tile: 0, or a number of keys that whole blocks have."""
    if tile.segment_kv != 0:
        expect_power_of_two(tile, segment_kv=(16, 2**20))
        if tile.segment_kv < tile.block_kv:
            raise InvalidInput(f"expected segment_kv >= block_kv = {tile.block_kv}, got {tile.segment_kv}")


@triton.jit
def normalised(m_i, l_i, acc):
    """(rows, their base-2 lse) of a softmax state. A row that has seen no key gets -inf."""
    empty = l_i == 0.0
    l_i = tl.where(empty, 1.0, l_i)
    return acc / l_i[:, None], tl.where(empty, float("-inf"), m_i + tl.math.log2(l_i))


@triton.jit
def with_later(state, rows, lse):
    """The `state` (m_i, l_i, acc) of rows after a later segment, whose normalised rows and base-2 lses are given.

    The compiler must not choose which product a sum absorbs, since this is compiled for several kernels.
    """
    m_i, l_i, acc = state
    rows = tl.where((lse == float("-inf"))[:, None], 0.0, rows)  # they are NaN if an unseen value is NaN
    higher = tl.maximum(m_i, lse)
    finite = tl.where(higher == float("-inf"), 0.0, higher)
    old = tl.math.exp2(m_i - finite)
    new = tl.math.exp2(lse - finite)
    l_i = tl.fma(l_i, old, new)
    acc = tl.fma(rows, tl.broadcast_to(new[:, None], acc.shape), acc * old[:, None])
    return higher, l_i, acc


@triton.jit
def number_of_segments(first, last, SEGMENT: tl.constexpr):
    """The number of segments that have any of the keys [first, last), at least 1."""
    return tl.maximum((last + SEGMENT - 1) // SEGMENT - first // SEGMENT, 1)
