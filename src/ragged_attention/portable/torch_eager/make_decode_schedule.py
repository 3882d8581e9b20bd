"""Divides the work of one decode step among programs, with loops on the host over programs and sequences."""

from typing import Any

import numpy as np
import torch

from ragged_attention.calls import MakeDecodeSchedule
from ragged_attention.portable.torch_eager._host import on_host
from ragged_attention.portable.torch_eager._host import why_not as why_not

BLOCK = 64  # keys per block
FEATURES = frozenset({"extra_lens", "sparse", "num_parts", "overhead"})


def run(call: MakeDecodeSchedule, tile: Any, launch: Any) -> list[torch.Tensor]:
    """The parts of all programs, and the cumulative number of splits.

    Each program has a budget of `payload` blocks. Each sequence that the program works on costs `overhead` blocks more.
    """
    ends = _blocks(call)
    blocks = [max(end, 1) for end in ends]  # even a sequence without keys has a result to write
    payload = -(-(sum(blocks) + len(blocks) * call.overhead) // call.num_ranges) + call.overhead
    parts, num_splits = [], [0]
    seq = done = split = 0  # where the next program begins: a sequence, and a block and a split in it
    for _ in range(call.num_ranges):
        start, left = (seq, done, split), payload
        while seq < len(blocks) and left >= blocks[seq] - done + call.overhead:
            left -= blocks[seq] - done + call.overhead
            num_splits.append(num_splits[-1] + split + 1)
            seq, done, split = seq + 1, 0, 0
        if seq < len(blocks) and left > call.overhead:
            done, split = done + left - call.overhead, split + 1
        last, end = (seq, done) if done else (seq - 1, ends[seq - 1] if seq else 0)
        parts.append((*start[:2], last, end, start[2], 0, 0, 0))
    device = call.lens.device
    return [torch.tensor(table, dtype=torch.int32, device=device) for table in (parts, num_splits)]


def _blocks(call: Any) -> list[int]:
    """The number of blocks that each sequence's keys fill; the keys of a second cache begin a new block."""
    keys = np.maximum(on_host(call.lens).astype(np.int64), int(call.sparse))
    if call.extra_lens is not None:
        keys = -(-keys // BLOCK) * BLOCK + np.maximum(on_host(call.extra_lens).astype(np.int64), 0)
    return (-(-keys // BLOCK)).tolist()
