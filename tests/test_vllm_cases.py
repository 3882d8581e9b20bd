"""The cases of vLLM's own test of its unified attention kernel, with the definition in the place of its reference.

Lengths, heads, windows, soft caps and scales are those of `tests/kernels/attention/test_triton_unified_attention.py` of
vLLM 0.33. Page tables are random, so that sequences share pages. Not here are what our operation does not have: 8-bit
queries and caches of 4 bits.
"""

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from ragged_attention.testing import compare, formats
from ragged_attention.testing.paged.specs import Batch
from ragged_attention.testing.runner import Runner

LENGTHS = (((1, 1328), (5, 18), (129, 463)), ((1, 523), (1, 37), (1, 2011)))  # queries and keys of each sequence
HEADS = ((4, 4), (8, 2), (5, 1))
HEAD_DIMS = (128, 256)
WINDOWS = (None, 64, 128, 256)
SOFT_CAPS = (None, 50.0)
CACHES = (("bfloat16", None, None), ("float8_e4m3fn", 0.5, 0.25))  # dtype, scale of keys, scale of values
PAGE_SIZE, NUM_PAGES = 16, 256


@dataclasses.dataclass(frozen=True)
class Case:
    lens: tuple[tuple[int, int], ...]
    heads: tuple[int, int]
    head_dim: int
    window: int | None
    soft_cap: float | None
    cache: tuple[str, float | None, float | None]

    def __str__(self) -> str:
        kind = "decode" if max(self.lens)[0] == 1 else "mixed"
        parts = [kind, f"{self.heads[0]}x{self.heads[1]}", f"d{self.head_dim}", self.cache[0]]
        return " ".join(
            [*parts, *([f"window {self.window}"] if self.window else []), *(["cap"] if self.soft_cap else [])]
        )

    def build(self) -> Batch:
        rng = np.random.default_rng(0)
        q_lens, kv_lens = np.array(self.lens, np.int32).T
        num_q_heads, num_kv_heads = self.heads
        dtype, k_scale, v_scale = self.cache
        shape = (NUM_PAGES, PAGE_SIZE, num_kv_heads, self.head_dim)
        k, v = (formats.stored(rng.standard_normal(shape) / (scale or 1), dtype) for scale in (k_scale, v_scale))
        q = rng.standard_normal((q_lens.sum(), num_q_heads, self.head_dim))
        return Batch(
            q=formats.rounded(q, "bfloat16"),
            kv_pages=(k, v),
            kv_lens=kv_lens,
            page_indices=rng.integers(0, NUM_PAGES, (len(kv_lens), -(-kv_lens.max() // PAGE_SIZE)), np.int32),
            cu_q_lens=np.concatenate([[0], q_lens.cumsum()]).astype(np.int32),
            sliding_window=self.window,
            soft_cap=self.soft_cap,
            k_scale=k_scale,
            v_scale=v_scale,
            dtype="bfloat16",
            cache_dtype=dtype,
        )


PLAIN = [Case(*case, CACHES[0]) for case in itertools.product(LENGTHS, HEADS, HEAD_DIMS, WINDOWS, SOFT_CAPS)]
QUANTISED = [Case(*case, None, None, CACHES[1]) for case in itertools.product(LENGTHS, HEADS, HEAD_DIMS)]


@functools.lru_cache(maxsize=1)  # for all backends in turn
def answered(case: Case) -> tuple[Batch, Any]:
    batch = case.build()
    return batch, batch.expected()


@pytest.mark.parametrize("backend", ["numba", "eager", "triton"])
@pytest.mark.parametrize("case", PLAIN + QUANTISED, ids=str)
def test_agreement_with_the_definition(case: Case, backend: str) -> None:
    runner, (batch, (want_out, want_lse)) = Runner(framework="torch", backend=backend), answered(case)
    with runner.around():
        out, lse = runner.run("ragged_paged_attention", batch, return_lse=True)
    compare.agrees(out, want_out, batch.kind)
    compare.agrees(lse, want_lse, f"lse {batch.kind}", "lse")
