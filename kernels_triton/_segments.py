"""Batch-invariant attention over pages: the bits of a result depend only on the query and the keys that it sees.

Keys are attended to in *segments*: ranges of SEGMENT consecutive keys that begin at a multiple of SEGMENT. Each segment
has a softmax state of its own, and the normalised results of all segments are merged one after the other. One program
visits all segments of a block of rows, or each segment has a program and the combine kernel merges the results. Both
ways merge with `with_later` and give the same bits, so the host can choose between them by shapes.

Within a segment, all loops visit blocks of the same size in ascending order, with the same number of rows and of terms
per weight. Whether a block needs a mask depends on the other rows of a program, but masking a block does not change any
bit for a row that sees the whole block.
"""

from typing import Any

import triton
import triton.language as tl

from ragged_attention.errors import InvalidInput
from ragged_attention.kernels_triton._tiles import expect_power_of_two

SEGMENT = 1024  # keys per segment, unless the caller chooses
MAX_PARTS = 16384  # maximum stored results of segments, over all sequences and KV heads


def expect_segments(tile: Any) -> None:
    """Check the `segment_kv` of a tile. It must be 0, or a power of two of at least `block_kv` keys."""
    if tile.segment_kv != 0:
        expect_power_of_two(tile, segment_kv=(16, 2**20))
        if tile.segment_kv < tile.block_kv:
            raise InvalidInput(f"expected segment_kv >= block_kv = {tile.block_kv}, got {tile.segment_kv}")


@triton.jit
def normalised(m_i, l_i, acc):
    """(normalised rows, their base-2 lse) of a softmax state. A row that has seen no key gets the lse -inf."""
    empty = l_i == 0.0
    l_i = tl.where(empty, 1.0, l_i)
    return acc / l_i[:, None], tl.where(empty, float("-inf"), m_i + tl.math.log2(l_i))


@triton.jit
def with_later(state, rows, lse):
    """The `state` (m_i, l_i, acc) of rows after a later segment, whose normalised rows and base-2 lses are given.

    The `fma` are explicit, because several kernels compile this function. Otherwise the compiler could fuse different
    products with the sums in different kernels.
    """
    m_i, l_i, acc = state
    rows = tl.where((lse == float("-inf"))[:, None], 0.0, rows)  # an unseen NaN among the values makes rows NaN
    higher = tl.maximum(m_i, lse)
    finite = tl.where(higher == float("-inf"), 0.0, higher)
    old = tl.math.exp2(m_i - finite)
    new = tl.math.exp2(lse - finite)
    l_i = tl.fma(l_i, old, new)
    acc = tl.fma(rows, tl.broadcast_to(new[:, None], acc.shape), acc * old[:, None])
    return higher, l_i, acc


@triton.jit
def number_of_segments(first, last, SEGMENT: tl.constexpr):
    """The number of segments that contain any of the keys [first, last), at least 1."""
    return tl.maximum((last + SEGMENT - 1) // SEGMENT - first // SEGMENT, 1)
