"""The blocks that programs visit in attention without a cache and in its gradient.

This module repeats the loops of the kernels, because `ragged_attention.tools.schedule` cannot record them.
"""

import collections

from benchmarks.cases.varlen import VarlenCase
from benchmarks.compiled.compiling import Launch
from benchmarks.roofline.model import Programs, cdiv


def programs(case: VarlenCase, launch: Launch) -> Programs:
    """The programs of a kernel. They visit blocks of keys or, if they compute dK and dV, blocks of rows."""
    arguments = launch.constants
    rows, keys, group = arguments["BLOCK_Q"], arguments["BLOCK_KV"], arguments["GROUP"]
    by_keys = launch.name == "dkv_kernel"
    counts: collections.Counter[tuple[float, ...]] = collections.Counter()
    for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True):
        length, block = (kv_len, keys) if by_keys else (q_len * group, rows)
        for first in range(0, length, block):
            if by_keys:
                whole, ends = _rows_visited(case, q_len, kv_len, first, min(first + keys, kv_len) - 1, group, rows)
                counts[(ends, whole)] += case.num_kv_heads
            else:
                low, high = first // group, min((first + rows - 1) // group, q_len - 1)
                counts[_keys_visited(case, q_len, kv_len, low, high, keys)] += case.num_kv_heads
    return counts


def _keys_visited(case: VarlenCase, q_len: int, kv_len: int, low: int, high: int, block: int) -> tuple[float, float]:
    """(key blocks that all queries [low, high] see completely, other key blocks that they visit)."""
    low, high, window = (kv_len - q_len + low, kv_len - q_len + high, case.sliding_window)
    start = max(low - window + 1, 0) // block if window else 0
    end = max(cdiv(min(high + 1, kv_len) if case.causal else kv_len, block), start)
    whole_start = min(max(high - window + block, start * block) // block, end) if window else start
    whole_stop = max(max(min(kv_len, low + 1) if case.causal else kv_len, 0) // block, whole_start)
    return float(whole_stop - whole_start), float(end - start - (whole_stop - whole_start))


def _rows_visited(
    case: VarlenCase, q_len: int, kv_len: int, low: int, high: int, group: int, block: int
) -> tuple[float, float]:
    """(row blocks that see all keys [low, high], other row blocks that see some of them)."""
    ahead, window = kv_len - q_len, case.sliding_window
    first, whole_first = (min(max(key - ahead, 0), q_len) if case.causal else 0 for key in (low, high))
    last = min(max(high + window - ahead, first), q_len) if window else q_len
    whole_last = min(max(low + window - ahead, 0), q_len) if window else q_len
    start, end = first * group // block, cdiv(last * group, block)
    whole_start = min(cdiv(whole_first * group, block), max(end, start))
    whole = max(whole_last * group // block - whole_start, 0)
    return float(whole), float(max(end - start, 0) - whole)
