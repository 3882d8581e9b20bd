"""What the fallbacks are timed on: shapes of an 8B model, scaled down to what a CPU does in a moment."""

import dataclasses
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 16


@dataclasses.dataclass(frozen=True)
class Workload:
    """Sequences as (q_len, kv_len)."""

    name: str
    sequences: tuple[tuple[int, int], ...]


WORKLOADS = (
    Workload("W1: 16 decodes at 1k", ((1, 1024),) * 16),
    Workload("W4: prefill of 512", ((512, 512),)),
    Workload("W5: prefill of 512 + 16 decodes at 512", ((512, 512), *((1, 512),) * 16)),
)
