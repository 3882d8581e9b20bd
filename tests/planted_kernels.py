"""Kernels that must not ship, with which the checker is tested; run as a script, without TRITON_INTERPRET."""

from typing import Any

import triton
import triton.language as tl

from benchmarks.compiled.compiling import Launch, compile_launch
from ragged_attention.tools.samples import FakeArray


@triton.jit
def product_kernel(q_ptr, k_ptr, out_ptr, n, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    m = tl.arange(0, M)
    d = tl.arange(0, D)
    j = tl.arange(0, N)
    q = tl.load(q_ptr + m[:, None] * D + d[None, :])
    acc = tl.zeros([M, D], tl.float32)
    for first in range(0, n, N):
        k = tl.load(k_ptr + (first + j)[:, None] * D + d[None, :])
        weights = tl.dot(q, tl.trans(k))
        acc = tl.dot(weights.to(q.dtype), k, acc)
    tl.store(out_ptr + m[:, None] * D + d[None, :], acc.to(out_ptr.dtype.element_ty))


@triton.jit
def wrong_kernel(q_ptr, k_ptr, out_ptr, n, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    tl.store(out_ptr, tl.load(q_ptr + tl.arange(0, M)) + tl.load(k_ptr + tl.arange(0, N)))


def launch(kernel: Any, m: int, n: int, d: int, num_warps: int, num_stages: int) -> Launch:
    rows = FakeArray((m, d), "bfloat16")
    return Launch(kernel, (rows, FakeArray((4096, d), "bfloat16"), rows), {"n": 4096, "M": m, "N": n, "D": d},
                  num_warps, num_stages)  # fmt: skip


PLANTED = {
    "good": launch(product_kernel, 16, 64, 64, 4, 2),
    "spilling": launch(product_kernel, 64, 64, 256, 2, 1),
    "too much shared memory": launch(product_kernel, 16, 128, 128, 4, 6),
    "wrong": launch(wrong_kernel, 32, 64, 64, 4, 1),
}

if __name__ == "__main__":
    for name, planted in PLANTED.items():
        print(f"{name}: {compile_launch(planted, 'sm_86').failure}")  # noqa: T201
