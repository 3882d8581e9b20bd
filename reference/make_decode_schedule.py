"""Divides the work of one decode step among programs, like FlashMLA's `get_mla_metadata` of September 2025."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

BLOCK = 64  # keys per block
FEATURES = frozenset({"extra_lens", "sparse", "num_parts", "overhead"})


def scheduled_blocks(lens: ArrayLike, extra_lens: ArrayLike | None, sparse: bool) -> tuple[Any, Any]:
    """The cost of each sequence in blocks, at least 1, and its number of blocks, 0 if it has no keys.

    A sparse sequence counts as having at least one key. The keys of a second cache begin a new block.
    """
    keys = np.maximum(np.asarray(lens, np.int64), int(sparse))
    if extra_lens is not None:
        keys = -(-keys // BLOCK) * BLOCK + np.maximum(np.asarray(extra_lens, np.int64), 0)
    ends = -(-keys // BLOCK)
    return np.maximum(ends, 1), ends


def make_decode_schedule(
    lens: ArrayLike, extra_lens: ArrayLike | None = None, sparse: bool = False, num_parts: int = 1, overhead: int = 5
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Parts [num_parts, 8] (a part is the work of one program) and num_splits [S + 1].

    The blocks of all sequences, end to end, are assigned to the parts in order. A part has a budget of `payload`
    blocks, and each sequence that it works on costs `overhead` more blocks. A part that cannot afford the rest of a
    sequence takes as many blocks as it can, and the next part continues with the sequence's next split. A row of
    `parts` is: first sequence, first block in it, last sequence, end block in it (exclusive), index of the part's
    split of the first sequence, 0, 0, 0. A part that begins at sequence S is idle. Sequence s has
    `num_splits[s + 1] - num_splits[s]` splits.
    """
    blocks, ends = scheduled_blocks(lens, extra_lens, sparse)
    num_seqs = len(blocks)
    payload = -(-int((blocks + overhead).sum()) // num_parts) + overhead
    parts = np.zeros((num_parts, 8), np.int32)
    num_splits = np.zeros(num_seqs + 1, np.int32)
    seq = block = split = 0  # the start of the next part
    for part in parts:
        part[[0, 1, 4]] = seq, block, split
        budget = payload
        while seq < num_seqs and budget >= blocks[seq] - block + overhead:
            budget -= blocks[seq] - block + overhead
            num_splits[seq + 1] = num_splits[seq] + split + 1
            seq, block, split = seq + 1, 0, 0
        if seq < num_seqs and budget > overhead:
            block, split = block + budget - overhead, split + 1
        if block > 0:
            part[2:4] = seq, block
        else:
            part[2:4] = seq - 1, ends[seq - 1] if seq > 0 else 0
    return parts, num_splits


def run(call: Any, tile: Any, launch: Any) -> Any:
    num_ranges = call.num_ranges

    def make_parts(*, num_parts: int | None, programs: int, **arguments: Any) -> tuple[Any, Any]:
        del num_parts, programs  # the call derives the number of parts, `num_ranges`, from them
        return make_decode_schedule(**arguments, num_parts=num_ranges)

    return launch.on_host(make_parts, call, call.results())
