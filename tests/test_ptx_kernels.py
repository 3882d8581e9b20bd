"""Triton kernels with features that ours do not use, in the PTX emulator: tensor descriptors, specialised warps, locks.

They run in a separate process, in which Triton compiles. There this file is a script, which prints a line of JSON for
each of `KERNELS` and each architecture.
"""
# Triton's type annotations are narrower than its language.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

import inspect
import json
import re
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest

triton = pytest.importorskip("triton")
torch = pytest.importorskip("torch")
descriptors = pytest.importorskip("triton.tools.tensor_descriptor")

import triton.language as tl  # noqa: E402

from ragged_attention.testing import ptx  # noqa: E402
from tests.processes import printed  # noqa: E402
from tests.test_ptx_calls import SEEDS  # noqa: E402

VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
SPECIALISES = VERSION >= (3, 9)  # earlier versions do not specialise warps on sm_90


# ---- kernels


@triton.jit
def tiled_product_kernel(
    a, b, c, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPECIALISED: tl.constexpr
):  # fmt: skip
    """c = a @ b.T, by tensor descriptors."""
    row, column = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in tl.range(tl.cdiv(K, BLOCK_K), warp_specialize=SPECIALISED):
        left = a.load([row, step * BLOCK_K])
        right = b.load([column, step * BLOCK_K])
        acc = tl.dot(left, right.T, acc)
    c.store([row, column], acc.to(tl.float16))


@triton.jit
def attention_kernel(q, k, v, out, count, scale, HEAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Causal attention of one head, by tensor descriptors that the kernel makes."""
    tl.assume(count > 0)
    q_tiles = tl.make_tensor_descriptor(q, [count, HEAD], [HEAD, 1], [BLOCK_M, HEAD])
    k_tiles = tl.make_tensor_descriptor(k, [count, HEAD], [HEAD, 1], [BLOCK_N, HEAD])
    v_tiles = tl.make_tensor_descriptor(v, [count, HEAD], [HEAD, 1], [BLOCK_N, HEAD])
    out_tiles = tl.make_tensor_descriptor(out, [count, HEAD], [HEAD, 1], [BLOCK_M, HEAD])
    first = tl.program_id(0) * BLOCK_M
    rows, columns = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD), tl.float32)
    queries = q_tiles.load([first, 0])
    for start in tl.range(0, first + BLOCK_M, BLOCK_N):
        scores = tl.dot(queries, k_tiles.load([start, 0]).T) * (scale * 1.4426950408889634)
        seen = start + columns[None, :] <= rows[:, None]
        scores = tl.where(seen, scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, 1))
        alpha, p = tl.math.exp2(m_i - m_new), tl.math.exp2(scores - m_new[:, None])
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(tl.float16), v_tiles.load([start, 0]), acc * alpha[:, None])
        m_i = m_new
    out_tiles.store([first, 0], (acc / l_i[:, None]).to(tl.float16))


@triton.jit
def take_turns_kernel(x, total, lock, WIDTH: tl.constexpr, BARRIER: tl.constexpr):
    """Programs add a row each to the total, one after another, under a lock."""
    column = tl.arange(0, WIDTH)
    row = tl.load(x + tl.program_id(0) * WIDTH + column)
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.store(total + column, tl.load(total + column) + row)
    if BARRIER:
        tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


@triton.jit
def fetched(pointer, place, count):
    return tl.load(pointer + place, mask=place < count, other=0.0)


@triton.jit
def sum_kernel(x, out, count, BLOCK: tl.constexpr, num_stages: tl.constexpr):
    """A sum by a helper and by `tl.sum`; `num_stages` is both a parameter and an option of the launch."""
    total = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, count, BLOCK, num_stages=num_stages):
        total += fetched(x, start + tl.arange(0, BLOCK), count)
    tl.store(out, tl.sum(total, 0))


# ---- runs of the kernels


def product(arch: str, specialised: bool = False, change: Any = None, seed: int | None = None) -> Any:
    """(outcome, result, expected result) of a product of slices of larger arrays. The last tiles exceed the slices."""
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(140, 208, generator=generator).to(torch.float16) for _ in range(2))
    a, b, c = a[:100, :200], b[8:, 8:], torch.empty(100, 160, dtype=torch.float16)[:, :132]
    a = a[:, : b.shape[1]]
    tiles = {"a": (a, [64, 64]), "b": (b, [64, 64]), "c": (c, [64, 64])}
    arguments: dict[str, Any] = {
        name: descriptors.TensorDescriptor.from_tensor(tensor, box) for name, (tensor, box) in tiles.items()
    }
    arguments |= {"K": 200, "BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "SPECIALISED": specialised}
    emulator = ptx.Emulator(arch, schedule=seed, change=change)
    emulator.forget(arguments["c"])
    outcome = emulator.run(tiled_product_kernel, (2, 3), **arguments, num_warps=4, num_stages=3)
    return outcome, c, a.float() @ b.float().T


def opcodes_of(outcome: Any) -> str:
    return " ".join(sorted(outcome.opcodes))


def products_by_descriptors(arch: str) -> None:
    for seed in (None, 2):
        outcome, result, right = product(arch, seed=seed)
        assert not outcome.reports, texts(outcome)
        torch.testing.assert_close(result.float(), right, atol=3e-2, rtol=2e-3)
    tiles = ("cp.async.bulk.tensor.2d.shared", "cp.async.bulk.tensor.2d.global", "mbarrier.try_wait", "wgmma.mma_async")
    for opcode in tiles if arch == "sm_90" else ("mma.sync",):
        assert opcode in opcodes_of(outcome)


def products_of_specialised_warps(arch: str) -> None:
    """On sm_90 some warps copy and others multiply, and they synchronise through mbarriers."""
    for seed in (None, 2):
        outcome, result, right = product(arch, True, seed=seed)
        assert not outcome.reports, texts(outcome)
        torch.testing.assert_close(result.float(), right, atol=3e-2, rtol=2e-3)
    if arch == "sm_90" and SPECIALISES:
        assert "setmaxnreg.dec" in opcodes_of(outcome)


def attention_by_descriptors_made_on_the_device(arch: str) -> None:
    count, head = 150, 64
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(count, head, generator=generator).to(torch.float16) for _ in range(3))
    out = torch.empty_like(q)
    blocks = {"HEAD": head, "BLOCK_M": 64, "BLOCK_N": 32}
    arguments = {"q": q, "k": k, "v": v, "out": out, "count": count, "scale": 0.125, **blocks}
    outcome = ptx.run(attention_kernel, (3,), **arguments, arch=arch, schedule=1, unwritten=[out])
    scores = (q.float() @ k.float().T * 0.125).masked_fill(torch.ones(count, count).triu(1).bool(), float("-inf"))
    torch.testing.assert_close(out.float(), scores.softmax(1) @ v.float(), atol=4e-3, rtol=4e-3)
    if arch == "sm_90":
        for opcode in ("tensormap.replace", "fence.proxy.tensormap", "cp.async.bulk.tensor.2d.global"):
            assert opcode in opcodes_of(outcome)


def turns_by_a_lock(arch: str) -> None:
    x, lock = torch.randn(40, 512), torch.zeros(1, dtype=torch.int32)
    for seed, barrier in ((None, True), (1, True), (None, False)):
        total = torch.zeros(512)
        arguments = {"x": x, "total": total, "lock": lock, "WIDTH": 512, "BARRIER": barrier}
        ptx.run(take_turns_kernel, (40,), **arguments, arch=arch, schedule=seed)
        torch.testing.assert_close(total, x.sum(0), atol=1e-4, rtol=1e-4)
        assert lock.item() == 0


def lines_of_ones_own(arch: str) -> None:
    """Reports name the kernel's line and, if it calls a helper or Triton's library, also the line in that function."""
    source, begin = inspect.getsourcelines(sum_kernel.fn)
    loads = begin + next(n for n, line in enumerate(source) if "fetched(x" in line)
    sums = begin + next(n for n, line in enumerate(source) if "tl.sum(" in line)
    x, out = torch.randn(1000), torch.empty(1)
    arguments = {"x": x, "out": out, "count": 1000, "BLOCK": 256, "num_stages": 3}
    ptx.run(sum_kernel, (1,), **arguments, arch=arch, unwritten=[out])
    torch.testing.assert_close(out[0], x.sum(), atol=1e-3, rtol=1e-3)
    outcome = ptx.run(sum_kernel, (1,), **arguments, arch=arch, unwritten=[x], strict=False)
    (report,) = {one.source or "" for one in outcome.reports.values()}
    assert re.fullmatch(rf"\S*test_ptx_kernels.py:{loads} > \S*test_ptx_kernels.py:\d+", report), report
    emulator = ptx.Emulator(arch, change=lambda name, text: re.sub(r"bar\.sync\s+0;", "", text))
    sources = [one.source or "" for one in emulator.run(sum_kernel, (1,), **arguments).reports.values()]
    assert any(re.fullmatch(rf"\S*test_ptx_kernels.py:{sums} > \S*standard.py:\d+", one) for one in sources)


def faults_in_copies_of_tiles(arch: str) -> None:
    """Each change to the compiler's PTX that breaks a copy of a tile is reported."""
    if arch != "sm_90":
        return
    reports = {name: planted(arch, pattern, instead) for name, (pattern, instead) in PLANTED.items()}
    missed = [name for name, texts_ in reports.items() if not texts_]
    assert not missed, missed


PLANTED = {
    "a wait": (r"mbarrier\.try_wait\.parity\S* complete, ", "setp.eq.b32 complete, 0, 0; // "),
    "half of the bytes": (r"(arrive\.expect_tx\.shared::cta\.b64 _, \[%r\d+\], )16384", r"\g<1>8192"),
    "more bytes": (r"(arrive\.expect_tx\.shared::cta\.b64 _, \[%r\d+\], )16384", r"\g<1>16400"),
    "the fence before the store": (r"fence\.proxy\.async\.shared::cta;", ""),
    "the wait for the store": (r"cp\.async\.bulk\.commit_group;", ""),
}


def planted(arch: str, pattern: str, instead: str) -> str:
    """The reports, or the fault, of a product with a part of its PTX replaced."""
    try:
        return texts(product(arch, change=lambda name, text: re.sub(pattern, instead, text))[0])
    except ptx.Fault as fault:
        return str(fault)


def texts(outcome: Any) -> str:
    return "\n".join(f"{report.source}: {report.text}" for report in outcome.reports.values())


KERNELS: dict[str, Callable[[str], None]] = {
    function.__name__: function
    for function in (
        products_by_descriptors,
        products_of_specialised_warps,
        attention_by_descriptors_made_on_the_device,
        turns_by_a_lock,
        lines_of_ones_own,
        faults_in_copies_of_tiles,
    )
}


# ---- the process that compiles


def main() -> None:
    for arch in SEEDS:
        for name, function in KERNELS.items():
            begun, error = time.perf_counter(), ""
            try:
                function(arch)
            except Exception:
                error = traceback.format_exc()
            line = {"arch": arch, "name": name, "error": error, "seconds": time.perf_counter() - begun}
            sys.stdout.write(json.dumps(line) + "\n")


# ---- tests


@pytest.fixture(scope="module")
def answers() -> dict[tuple[str, str], str]:
    lines = map(json.loads, printed(__file__).splitlines())
    return {(line["arch"], line["name"]): line["error"] for line in lines}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("arch", SEEDS)
def test_a_kernel_is_right_and_nothing_is_reported(arch: str, name: str, answers: dict[tuple[str, str], str]) -> None:
    assert not answers[arch, name], answers[arch, name]


if __name__ == "__main__":
    main()
