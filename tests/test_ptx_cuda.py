"""Our CUDA kernel of dense latent decode in the emulator of PTX: what nvcc makes of it for Hopper, on small batches.

What the host does is done here: the record of the call, what is derived from it, and the tensor map.
"""

import ctypes
import re
import subprocess
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from ragged_attention.kernels_cuda import _abi
from ragged_attention.kernels_cuda._build import toolchain
from ragged_attention.kernels_cuda._build.compile import SOURCES
from ragged_attention.reference.mla_decode import mla_decode
from ragged_attention.testing import compare
from ragged_attention.testing.ptx import parsing
from ragged_attention.testing.ptx.machine import Fault, Outcome, launch
from ragged_attention.testing.ptx.memory import Memory
from ragged_attention.testing.ptx.tensor_maps import TensorMap

UNIT = """
#include "sm90/launch.h"
#include "sm90/seesaw.h"
int launch_one(RaLatent const& call) { return launch_latent<Seesaw<bf16, 576, false>>(call, nullptr); }
"""
SHARED = 227 << 10
D_QK, D_V, BLOCK, HEADS, TOKENS = 576, 512, 64, 16, 2
LENS = (150, 30)
BFLOAT16 = 10  # among the element types of tensor maps
MAP_AT, USE_TMA_AT = 384, 768  # in `LatentParams`, behind the plan


class Plan(ctypes.Structure):
    """`Plan` of csrc/work.h."""

    _fields_ = (
        ("call", _abi.Latent),
        *((name, ctypes.c_int) for name in (
            "num_seqs", "num_q_tokens", "num_q_heads", "num_kv_heads", "group", "page_size", "num_pages", "num_parts",
            "num_splits", "longest", "rows", "tiles", "tokens",
        )),
        ("scale", ctypes.c_float),
    )  # fmt: skip


@pytest.fixture(scope="module")
def ptx(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The PTX of the kernel and of the one that merges splits."""
    if reason := toolchain.missing_to_compile():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("ptx")
    (folder / "unit.cu").write_text(UNIT)
    nvcc, cutlass = toolchain.nvcc(), toolchain.cutlass()
    assert nvcc is not None
    flags = ("-std=c++17", "-O3", "-arch=sm_90a", "--expt-relaxed-constexpr", "--expt-extended-lambda", "-DNDEBUG")
    command = (nvcc.path, "-ptx", "-lineinfo", *flags, f"-I{SOURCES}", f"-I{cutlass}", "-o", "unit.ptx", "unit.cu")
    subprocess.run(command, cwd=folder, check=True)
    return (folder / "unit.ptx").read_text()


def entry(text: str, name: str) -> parsing.Kernel:
    """The kernel of a module whose name has a part."""
    (begin,) = (found.start() for found in re.finditer(rf"^\.visible \.entry \w*{name}", text, re.MULTILINE))
    shared = re.findall(r"^\.extern \.shared.*$", text, re.MULTILINE)
    return parsing.parse("\n".join([*shared, text[begin:]]))


class Batch:
    """Sequences of `LENS` keys in pages, and the call of the kernel on them."""

    def __init__(self, page_size: int, num_splits: int = 1) -> None:
        rng, seqs, pages = np.random.default_rng(0), len(LENS), -(-max(LENS) // page_size)
        self.splits, self.page_size, self.num_pages = num_splits, page_size, 2 * pages + 1
        self.arrays: dict[str, NDArray[Any]] = {
            "q": rng.normal(size=(seqs, TOKENS, HEADS, D_QK)).astype(ml_dtypes.bfloat16),
            "kv": rng.normal(0, 0.5, (self.num_pages, page_size, 1, D_QK)).astype(ml_dtypes.bfloat16),
            "lists": rng.permutation(self.num_pages)[: seqs * pages].reshape(seqs, pages).astype(np.int32),
            "lens": np.array(LENS, np.int32),
            "out": np.zeros((seqs, TOKENS, HEADS, D_V), ml_dtypes.bfloat16),
            "lse": np.zeros((seqs, HEADS, TOKENS), np.float32),
            "partial_out": np.zeros((seqs * num_splits, TOKENS, HEADS, D_V), np.float32),
            "partial_lse": np.zeros((seqs * num_splits, TOKENS, HEADS), np.float32),
        }
        self.memory = Memory()
        self.addresses = {}
        for name, array in self.arrays.items():
            data = array.reshape(-1).view(np.uint8)
            ready = np.zeros(data.size, bool) if name in ("out", "lse", "partial_out", "partial_lse") else None
            self.addresses[name] = self.memory.add(data, name, None, ready)
        self.memory.seal()

    def plan(self) -> Plan:
        seqs, pages = self.arrays["lists"].shape
        row, page = D_QK, self.page_size * D_QK
        call = _abi.Latent(
            **self.addresses, num_seqs=seqs, num_q_tokens=TOKENS, num_q_heads=HEADS, num_kv_heads=1, d_qk=D_QK,
            causal=1, q_seq_stride=TOKENS * HEADS * D_QK, q_token_stride=HEADS * D_QK, q_head_stride=D_QK,
            num_pages=self.num_pages, page_size=self.page_size, page_stride=page, slot_stride=row, head_stride=row,
            list_seq_stride=pages, list_head_stride=1, list_length=pages, lens_seq_stride=1,
            num_parts=seqs * self.splits, num_splits=self.splits, num_partials=seqs * self.splits, sm_scale=D_QK**-0.5,
        )  # fmt: skip
        return Plan(
            call=call, num_seqs=seqs, num_q_tokens=TOKENS, num_q_heads=HEADS, num_kv_heads=1, group=HEADS,
            page_size=self.page_size, num_pages=self.num_pages, num_parts=seqs * self.splits, num_splits=self.splits,
            longest=pages * self.page_size, rows=HEADS * TOKENS, tiles=1, tokens=1, scale=D_QK**-0.5 / np.log(2),
        )  # fmt: skip

    def tensor_map(self) -> TensorMap:
        """Columns, rows of a page, KV heads and pages, in boxes of 64 x 64; pages that do not serve have another."""
        serves, row = self.page_size % BLOCK == 0, 2 * D_QK
        rows, address = (self.page_size, self.addresses["kv"]) if serves else (BLOCK, self.addresses["q"])
        dims = (D_QK, rows, 1, self.num_pages if serves else 1)
        return TensorMap(address, dims, (row, row, rows * row), (BLOCK, BLOCK, 1, 1), BFLOAT16, 3)

    def params(self, size: int) -> NDArray[np.uint8]:
        """The bytes of the kernel's parameter."""
        data, plan = np.zeros(size, np.uint8), np.frombuffer(bytes(self.plan()), np.uint8)
        data[: plan.size] = plan
        if size > MAP_AT:
            data[MAP_AT : MAP_AT + 128] = self.tensor_map().pack()
            data[USE_TMA_AT] = self.page_size % BLOCK == 0
        return data

    def run(self, text: str, seed: int | None = None) -> Outcome:
        """Both kernels, or the first if there are no splits, one behind the other."""
        outcome = self._launch(entry(text, "Seesaw"), len(LENS) * self.splits, 384, seed)
        self.memory.back()
        if self.splits > 1:
            self.memory.seal()  # in another launch it is no matter who wrote what
            self._launch(entry(text, "Combine"), len(LENS) * TOKENS * HEADS // 4, 128, seed)  # a warp for each row
            self.memory.back()
        return outcome

    def _launch(self, kernel: parsing.Kernel, grid: int, threads: int, seed: int | None) -> Outcome:
        ((name, kind),) = kernel.params
        params = {name: self.params(parsing.size_of(kind))}
        outcome = launch(kernel, self.memory, params, (grid,), threads, SHARED, seed=seed)
        assert not outcome.reports, "\n".join(f"{one.source}: {one.text}" for one in outcome.reports.values())
        return outcome

    def expect_right(self) -> None:
        q, kv = (self.arrays[name].astype(np.float64) for name in ("q", "kv"))
        out, lse = mla_decode(q, kv, self.arrays["lists"], self.arrays["lens"], d_v=D_V, causal=True)
        compare.agrees(self.arrays["out"].astype(np.float64), out, "bfloat16")
        compare.agrees(self.arrays["lse"], lse, "lse bfloat16", "lse")


@pytest.mark.parametrize(("page_size", "seed"), [(64, None), (64, 1), (128, 2), (16, None), (16, 1)])
def test_the_kernel_agrees_with_the_definition(ptx: str, page_size: int, seed: int | None) -> None:
    """By tensor maps where pages are whole blocks, else by copies of each thread."""
    batch = Batch(page_size)
    opcodes = " ".join(batch.run(ptx, seed).opcodes)
    batch.expect_right()
    assert ("cp.async.bulk.tensor.4d" in opcodes) == (page_size % BLOCK == 0)
    for opcode in ("setmaxnreg", "bar.arrive", "cp.async.mbarrier.arrive.noinc", "wgmma.mma_async"):
        assert opcode in opcodes


def test_splits_are_merged(ptx: str) -> None:
    batch = Batch(64, num_splits=2)
    batch.run(ptx)
    batch.expect_right()


@pytest.mark.parametrize(
    ("page_size", "pattern", "instead", "report"),
    [
        (16, r"fence\.proxy\.async[^;]*;", "", "a wgmma reads what was written without a proxy fence after it"),
        (64, r"mbarrier\.try_wait\S* P1, ", "setp.eq.b32 P1, 0, 0; // ", "reads shared memory that nobody wrote"),
        (64, r"wgmma\.wait_group\S* 0;", "", "touches a register that a wgmma in flight writes"),
        (64, r"bar\.sync %r\d+, %r\d+;", "", "another warp"),
    ],
)
def test_faults_are_noticed(ptx: str, page_size: int, pattern: str, instead: str, report: str) -> None:
    with pytest.raises((AssertionError, Fault), match=report):
        Batch(page_size).run(re.sub(pattern, instead, ptx))


def test_what_nobody_arrives_at(ptx: str) -> None:
    counted = re.sub(r"mov\.u32\s+(%r\d+), 129;", r"mov.u32 \1, 130;", ptx)
    assert counted != ptx
    with pytest.raises(Fault, match=r"deadlock: .* threads wait in a loop: the mbarrier at shared byte"):
        Batch(64).run(counted)
