"""What the fallbacks are timed on: shapes of an 8B model, scaled down to what a CPU does in a moment."""

from pathlib import Path

from benchmarks.cases.paged import PagedCase

RESULTS = Path(__file__).parent / "results"
NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 16


def _workload(name: str, *lens: tuple[int, int]) -> PagedCase:
    q_lens, kv_lens = zip(*lens, strict=True)
    return PagedCase(
        name=name, workload=name.partition(":")[0], q_lens=q_lens, kv_lens=kv_lens, num_q_heads=NUM_Q_HEADS,
        num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, page_size=PAGE_SIZE,
    )  # fmt: skip


WORKLOADS = (
    _workload("W1: 16 decodes at 1k", *((1, 1024),) * 16),
    _workload("W4: prefill of 512", (512, 512)),
    _workload("W5: prefill of 512 + 16 decodes at 512", (512, 512), *((1, 512),) * 16),
)
