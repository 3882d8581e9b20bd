"""The PTX emulator alone, without the rest of the test kit: kernels of every kind run, and mistakes are reported.

The kernels run in a separate process, in which Triton compiles. There this file is a script, which prints a line of
JSON for each of `KERNELS` and each architecture.
"""
# Triton's type annotations are narrower than its language.
# pyright: reportArgumentType=false

import inspect
import json
import pickle
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

triton = pytest.importorskip("triton")
torch = pytest.importorskip("torch")

import triton.language as tl  # noqa: E402
from triton.language.extra import libdevice  # noqa: E402

from ragged_attention.testing import ptx  # noqa: E402
from tests.processes import printed  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "ptx.md"
ARCHITECTURES = ("sm_80", "sm_90")
BLOCK = 256
PROJECT = "ragged_attention"


# ---- kernels


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    tl.store(out_ptr + place, tl.load(x_ptr + place, inside) + tl.load(y_ptr + place, inside), inside)


@triton.jit
def softmax_kernel(x_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * width + column, mask=column < width, other=float("-inf"))
    weights = tl.exp(x - tl.max(x, 0))
    tl.store(out_ptr + row * width + column, weights / tl.sum(weights, 0), mask=column < width)


@triton.jit
def layer_norm_kernel(x_ptr, weight_ptr, bias_ptr, out_ptr, mean_ptr, width, eps, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(x_ptr + row * width + column, mask=inside, other=0.0)
    mean = tl.sum(x, 0) / width
    centred = tl.where(inside, x - mean, 0.0)
    scale = 1 / tl.sqrt(tl.sum(centred * centred, 0) / width + eps)
    weight, bias = tl.load(weight_ptr + column, inside), tl.load(bias_ptr + column, inside)
    tl.store(out_ptr + row * width + column, centred * scale * weight + bias, inside)
    tl.store(mean_ptr + row, mean)


@triton.jit
def matmul_kernel(a_ptr, b_ptr, c_ptr, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, K, BLOCK_K):
        inner = first + tl.arange(0, BLOCK_K)
        a = tl.load(a_ptr + rows[:, None] * K + inner, mask=(rows[:, None] < M) & (inner < K), other=0.0)
        b = tl.load(b_ptr + inner[:, None] * N + columns, mask=(inner[:, None] < K) & (columns < N), other=0.0)
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + rows[:, None] * N + columns, acc, mask=(rows[:, None] < M) & (columns < N))


@triton.jit
def histogram_kernel(x_ptr, counts_ptr, most_ptr, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, mask=place < count, other=0)
    tl.atomic_add(counts_ptr + x, 1, mask=place < count)
    tl.atomic_max(most_ptr, tl.max(x, 0))


@triton.jit
def longer(a, b):
    return tl.maximum(a, b)


@triton.jit
def scan_kernel(x_ptr, sums_ptr, most_ptr, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(x_ptr + row * width + column, inside, other=0)
    tl.store(sums_ptr + row * width + column, tl.cumsum(x, 0), inside)
    tl.store(most_ptr + row * width + column, tl.associative_scan(x, 0, longer), inside)


@triton.jit
def narrow_kernel(x_ptr, narrow_ptr, wide_ptr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    narrow = tl.load(x_ptr + place).to(narrow_ptr.dtype.element_ty)
    tl.store(narrow_ptr + place, narrow)
    tl.store(wide_ptr + place, narrow.to(tl.float32))


@triton.jit
def functions_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place)
    tl.store(out_ptr + place, tl.sin(x * 1000))
    tl.store(out_ptr + BLOCK + place, tl.erf(x))
    tl.store(out_ptr + 2 * BLOCK + place, tl.clamp(x, -0.5, 0.5))
    tl.store(out_ptr + 3 * BLOCK + place, libdevice.log1p(tl.abs(x)))
    tl.store(out_ptr + 4 * BLOCK + place, libdevice.fmod(x, 0.3))
    tl.store(out_ptr + 5 * BLOCK + place, tl.sort(x))
    tl.store(out_ptr + 6 * BLOCK + place, tl.exp(x.to(tl.float64)).to(tl.float32))


@triton.jit
def unmasked_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place)
    tl.store(out_ptr + place, x)


@triton.jit
def racing_kernel(out_ptr):
    tl.store(out_ptr, tl.program_id(0))


@triton.jit
def joined_kernel(x_ptr, out_ptr):
    pairs = (x_ptr + 1).to(tl.pointer_type(tl.int64))
    tl.store(out_ptr, tl.load(pairs))


@triton.jit
def locked_kernel(lock_ptr):
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass


@triton.jit
def keyword_kernel(x_ptr, seed, arch):
    tl.store(x_ptr, seed + arch)


# ---- runs of the kernels


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def vector_add(arch: str) -> None:
    x, y, out = normal(1000), normal(1000, seed=1), np.empty(1000, np.float32)
    outcome = ptx.run(add_kernel, (4,), x, y, out, 1000, BLOCK, arch=arch, unwritten=[out])
    np.testing.assert_array_equal(out, x + y)
    assert any(opcode.startswith("ld.global") for opcode in outcome.opcodes)
    out[:] = 0
    # Run again with a torch tensor, a grid that depends on the constants, named arguments, and another order of warps.
    named = {"x_ptr": torch.from_numpy(x), "y_ptr": y, "out_ptr": out, "count": 900, "BLOCK": 128}
    ptx.run(add_kernel, lambda meta: (triton.cdiv(900, meta["BLOCK"]),), **named, num_warps=2, arch=arch, schedule=3)
    np.testing.assert_array_equal(out[:900], (x + y)[:900])
    assert not out[900:].any()


def softmax_of_rows(arch: str) -> None:
    x, out = normal(5, 200), np.empty((5, 200), np.float32)
    ptx.run(softmax_kernel, (5,), x, out, 200, BLOCK=BLOCK, arch=arch, unwritten=[out])
    torch.testing.assert_close(torch.from_numpy(out), torch.from_numpy(x).softmax(1))


def layer_norm(arch: str) -> None:
    x, weight, bias = (torch.from_numpy(normal(*shape, seed=3)) for shape in ((4, 190), (190,), (190,)))
    out, mean = torch.empty(4, 190), torch.empty(4)
    arguments = x, weight, bias, out, mean, 190, 1e-5
    outcome = ptx.run(layer_norm_kernel, (4,), *arguments, BLOCK=BLOCK, num_warps=8, arch=arch, unwritten=[out, mean])
    assert {report.kind for report in outcome.reports.values()} <= {ptx.Rounding}  # for the squares
    torch.testing.assert_close(out, torch.nn.functional.layer_norm(x, (190,), weight, bias, 1e-5))
    torch.testing.assert_close(mean, x.mean(1))


def multiplied(arch: str, dtype: Any, **options: Any) -> ptx.Outcome:
    """Multiply matrices whose last tiles are partial, and compare the product with torch's."""
    a, b = (torch.from_numpy(normal(*shape, seed=2)).to(dtype) for shape in ((100, 144), (144, 72)))
    c = torch.empty(100, 72)
    blocks = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}
    outcome = ptx.run(matmul_kernel, (2, 2), a, b, c, 100, 72, 144, **blocks, **options, arch=arch, unwritten=[c])
    torch.testing.assert_close(c, a.float() @ b.float(), atol=1e-3, rtol=1e-3)
    return outcome


def product_of_matrices(arch: str) -> None:
    outcome = multiplied(arch, torch.bfloat16, num_stages=1)
    unit = "wgmma.mma_async" if arch == "sm_90" else "mma.sync"
    assert any(opcode.startswith(unit) for opcode in outcome.opcodes)


def pipeline_of_asynchronous_copies(arch: str) -> None:
    for schedule in (None, 5):
        opcodes = multiplied(arch, torch.float16, num_stages=3, schedule=schedule).opcodes
        assert {"cp.async.commit_group"} <= opcodes
        assert any(opcode.startswith("cp.async.wait_group") for opcode in opcodes)


def atomics(arch: str) -> None:
    x = np.random.default_rng(4).integers(0, 10, 500).astype(np.int32)
    counts, most = np.zeros(10, np.int32), np.zeros(1, np.int32)
    ptx.run(histogram_kernel, (2,), x, counts, most, 500, BLOCK=BLOCK, arch=arch)
    np.testing.assert_array_equal(counts, np.bincount(x, minlength=10))
    assert most[0] == x.max()


def scans(arch: str) -> None:
    x = np.random.default_rng(5).integers(-9, 10, (3, 250)).astype(np.int32)
    sums, most = np.empty_like(x), np.empty_like(x)
    ptx.run(scan_kernel, (3,), x, sums, most, 250, BLOCK=BLOCK, arch=arch, unwritten=[sums, most])
    np.testing.assert_array_equal(sums, x.cumsum(1))
    np.testing.assert_array_equal(most, np.maximum.accumulate(x, 1))


def conversions_to_eight_bits(arch: str) -> None:
    x = torch.from_numpy(normal(BLOCK, seed=6)) * 50
    for dtype in (torch.float8_e5m2, *((torch.float8_e4m3fn,) if arch == "sm_90" else ())):
        narrow, wide = torch.empty(BLOCK, dtype=dtype), torch.empty(BLOCK)
        ptx.run(narrow_kernel, (1,), x, narrow, wide, BLOCK=BLOCK, arch=arch, unwritten=[narrow, wide])
        torch.testing.assert_close(wide, x.to(dtype).float(), atol=0, rtol=0)
        torch.testing.assert_close(narrow.float(), wide, atol=0, rtol=0)


def functions(arch: str) -> None:
    x, out = torch.from_numpy(normal(BLOCK, seed=7)), torch.empty(7, BLOCK)
    ptx.run(functions_kernel, (1,), x, out, BLOCK, arch=arch, unwritten=[out])
    right = (x.mul(1000).sin(), x.erf(), x.clamp(-0.5, 0.5), x.abs().log1p(), x.fmod(0.3), x.sort().values, x.exp())
    torch.testing.assert_close(out, torch.stack(right), atol=1e-6, rtol=1e-5)


# ---- mistakes


def access_out_of_bounds(arch: str) -> None:
    x, out = np.zeros(1000, np.float32), np.zeros(1024, np.float32)
    with pytest.raises(ptx.OutOfBounds, match=r"read of \d+ bytes outside memory: x_ptr\+4000 of 4000") as caught:
        ptx.run(unmasked_kernel, (4,), x, out, BLOCK=BLOCK, arch=arch)
    error = caught.value
    assert error.instruction is not None
    assert error.instruction.startswith("ld.global")
    assert error.thread is not None
    assert re.fullmatch(r"CTA 3 thread \d+", error.thread)
    lines, begin = inspect.getsourcelines(unmasked_kernel.fn)
    line = begin + next(number for number, text in enumerate(lines) if "tl.load" in text)
    assert error.source is not None
    assert error.source.endswith(f"test_ptx_alone.py:{line}")
    text = ptx.compile(unmasked_kernel, (4,), x, out, BLOCK=BLOCK, arch=arch)
    assert "ld.global" in text.split("\n")[error.line - 1]
    again = pickle.loads(pickle.dumps(error))  # a process pool pickles exceptions
    assert (type(again), str(again), again.thread) == (ptx.OutOfBounds, str(error), error.thread)


def race_of_programs(arch: str) -> None:
    out = np.zeros(1, np.int32)
    with pytest.raises(ptx.Race, match="two threads write different values to one place of global memory") as caught:
        ptx.run(racing_kernel, (4,), out, arch=arch)
    (report,) = caught.value.reports
    assert report.thread == "CTA 0 thread 0"
    assert report.instruction is not None
    assert report.instruction.startswith("st.global")
    assert pickle.loads(pickle.dumps(caught.value)).reports == caught.value.reports
    assert ptx.run(racing_kernel, (4,), out, arch=arch, strict=False).reports
    assert not ptx.run(racing_kernel, (1,), out, arch=arch).reports


def race_of_warps(arch: str) -> None:
    """Without barriers, there is a race in the shared memory through which warps exchange their sums."""
    x, out = normal(1, 200), np.empty((1, 200), np.float32)
    right = ptx.Emulator(arch).run(softmax_kernel, (1,), x, out, 200, BLOCK=BLOCK)
    assert not right.reports
    emulator = ptx.Emulator(arch, change=lambda name, text: re.sub(r"bar\.sync\s+0;", "", text))
    reports = emulator.run(softmax_kernel, (1,), x, out, 200, BLOCK=BLOCK).reports.values()
    assert ptx.Race in [report.kind for report in reports]
    assert any("reads what another warp wrote, no barrier between" in report.text for report in reports)


def copy_that_is_not_waited_for(arch: str) -> None:
    a = torch.ones(64, 128, dtype=torch.float16)
    arguments = a, a.view(128, 64), torch.empty(64, 64), 64, 64, 128
    blocks = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}
    emulator = ptx.Emulator(arch, change=lambda name, text: re.sub(r"cp\.async\.wait_group\s+\d+;", "", text))
    reports = emulator.run(matmul_kernel, (1, 1), *arguments, **blocks, num_stages=3).reports.values()
    assert any("before a copy" in report.text and report.kind is ptx.Race for report in reports)


def read_before_the_first_write(arch: str) -> None:
    x, out = np.zeros(256, np.float32), np.zeros(256, np.float32)
    with pytest.raises(ptx.Uninitialised, match="reads what nobody wrote"):
        ptx.run(unmasked_kernel, (1,), x, out, BLOCK=BLOCK, arch=arch, unwritten=[x])
    undefined = ptx.Emulator(arch, change=lambda name, text: re.sub(r"\n[^\n]*st\.shared[^\n]*", "\n", text))
    reports = undefined.run(softmax_kernel, (1,), x, out, 200, BLOCK=BLOCK).reports.values()
    assert any(report.kind is ptx.Uninitialised and "shared memory" in report.text for report in reports)


def access_unaligned(arch: str) -> None:
    with pytest.raises(ptx.Misaligned, match=r"read of 8 bytes unaligned: x_ptr\+4 of 16"):
        ptx.run(joined_kernel, (1,), np.zeros(4, np.int32), np.zeros(1, np.int64), arch=arch)


def lock_that_nobody_releases(arch: str) -> None:
    with pytest.raises(ptx.Deadlock, match=r"deadlock: .* threads wait in a loop"):
        ptx.run(locked_kernel, (2,), np.zeros(1, np.int32), arch=arch)


def instruction_that_is_not_known(arch: str) -> None:
    emulator = ptx.Emulator(
        arch, change=lambda name, text: text.replace("add.f32", "add.sat.f32").replace("ret;", "brkpt; ret;")
    )
    x = np.zeros(256, np.float32)
    with pytest.raises(ptx.Unknown, match=r"line \d+: (brkpt|add\.sat\.f32)"):
        emulator.run(add_kernel, (1,), x, x, x, 256, BLOCK=BLOCK)


def arguments_that_do_not_fit(arch: str) -> None:
    x, out = np.zeros(256, np.float32), np.zeros(256, np.float32)
    for error, text, call in (
        (TypeError, "expected each argument of unmasked_kernel once, got x_ptr twice",
         lambda: ptx.run(unmasked_kernel, (1,), x, x_ptr=x, out_ptr=out, BLOCK=BLOCK, arch=arch)),
        (TypeError, "expected at most 3 arguments of unmasked_kernel, got 4",
         lambda: ptx.run(unmasked_kernel, (1,), x, out, BLOCK, 7, arch=arch)),
        (TypeError, "argument: 'out_ptr'",
         lambda: ptx.run(unmasked_kernel, (1,), x, BLOCK=BLOCK, arch=arch)),
        (KeyError, "num_wraps", lambda: ptx.run(unmasked_kernel, (1,), x, out, BLOCK=BLOCK, num_wraps=4, arch=arch)),
        (ValueError, "expected unwritten to hold arrays that are arguments",
         lambda: ptx.run(unmasked_kernel, (1,), x, out, BLOCK=BLOCK, unwritten=["out_ptr"], arch=arch)),
        (ptx.Unknown, "clusters of 2 CTAs",
         lambda: ptx.run(unmasked_kernel, (1,), x, out, BLOCK=BLOCK, num_ctas=2, arch="sm_90")),
    ):  # fmt: skip
        with pytest.raises(error, match=re.escape(text)):
            call()
    named = np.zeros(1, np.int32)
    ptx.run(keyword_kernel, (1,), named, 3, 4, arch=arch)  # this kernel's parameters have names of `run`'s options
    assert named[0] == 7


KERNELS: dict[str, Callable[[str], None]] = {
    function.__name__: function
    for function in (
        vector_add,
        softmax_of_rows,
        layer_norm,
        product_of_matrices,
        pipeline_of_asynchronous_copies,
        atomics,
        scans,
        conversions_to_eight_bits,
        functions,
        access_out_of_bounds,
        race_of_programs,
        race_of_warps,
        copy_that_is_not_waited_for,
        read_before_the_first_write,
        access_unaligned,
        lock_that_nobody_releases,
        instruction_that_is_not_known,
        arguments_that_do_not_fit,
    )
}


# ---- the process that compiles


def main() -> None:
    for arch in ARCHITECTURES:
        for name, function in KERNELS.items():
            error = ""
            try:
                function(arch)
            except BaseException:  # `Exception` would miss pytest's failures
                error = traceback.format_exc()
            sys.stdout.write(json.dumps({"arch": arch, "name": name, "error": error}) + "\n")


# ---- tests


@pytest.fixture(scope="module")
def errors() -> dict[tuple[str, str], str]:
    lines = map(json.loads, printed(__file__).splitlines())
    return {(line["arch"], line["name"]): line["error"] for line in lines}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_kernel(arch: str, name: str, errors: dict[tuple[str, str], str]) -> None:
    assert not errors[arch, name], errors[arch, name]


REVERSE = """
.version 8.7
.target sm_90
.address_size 64
.visible .entry reverse(.param .u64 reverse_param_0, .param .u64 reverse_param_1, .param .u32 reverse_param_2,
    .param .f32 reverse_param_3)
{
    .reg .pred %p<4>;  .reg .b32 %r<16>;  .reg .f32 %f<4>;  .reg .b64 %rd<12>;
    .shared .align 4 .b8 tile[512];
    ld.param.u64 %rd1, [reverse_param_0];
    ld.param.u64 %rd2, [reverse_param_1];
    ld.param.u32 %r1, [reverse_param_2];
    ld.param.f32 %f1, [reverse_param_3];
    cvta.to.global.u64 %rd3, %rd1;
    cvta.to.global.u64 %rd4, %rd2;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r3, %r2, %r4;
    setp.ge.s32 %p1, %r5, %r1;
    mul.wide.s32 %rd5, %r5, 4;
    add.s64 %rd6, %rd3, %rd5;
    add.s64 %rd7, %rd4, %rd5;
    mov.u32 %r6, tile;
    shl.b32 %r7, %r4, 2;
    add.s32 %r8, %r6, %r7;
    @%p1 bra $L__BB0_2;
    ld.global.f32 %f2, [%rd6];
    st.shared.f32 [%r8], %f2;
$L__BB0_2:
    bar.sync 0;
    sub.s32 %r9, %r2, %r4;
    shl.b32 %r10, %r9, 2;
    add.s32 %r11, %r6, %r10;
    @%p1 bra $L__BB0_4;
    ld.shared.f32 %f3, [%r11+-4];
    mul.f32 %f3, %f3, %f1;
    st.global.f32 [%rd7], %f3;
$L__BB0_4:
    ret;
}
"""


def test_ptx_of_another_compiler_runs() -> None:
    """A text in nvcc's form runs: its parameters are numbered, and a shared array has a fixed size."""
    x, out = normal(256), np.empty(256, np.float32)
    ptx.run_text(REVERSE, (2,), x, out, 256, 2.0, threads=128, unwritten=[out])
    np.testing.assert_array_equal(out, 2 * x.reshape(2, 128)[:, ::-1].ravel())
    with pytest.raises(ptx.Race, match="reads what another warp wrote, no barrier between"):
        ptx.run_text(REVERSE.replace("bar.sync 0;", ""), (2,), x, out, 256, 2.0, threads=128)
    with pytest.raises(ptx.OutOfBounds, match=r"write of 4 bytes outside memory: reverse_param_1"):
        ptx.run_text(REVERSE, (2,), x, np.empty(200, np.float32), np.int32(256), np.float32(2), threads=128)
    with pytest.raises(ptx.Uninitialised, match="shared memory that nobody wrote"):
        ptx.run_text(REVERSE, (2,), x, out, 250, 2.0, threads=128)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((1, 2, 3), "expected 4 arguments of reverse, got 3"),
        ((1, 2, 3.5, 1.0), "expected a number of type u32 for the parameter reverse_param_2, got 3.5"),
        ((1.5, 2, 3, 1.0), "expected an array or an integer for the parameter reverse_param_0, got 1.5"),
        ((1, 2, 3, np.zeros(1)), "expected a number for the parameter reverse_param_3, got an array of float64"),
    ],
)
def test_arguments_of_a_text_are_checked(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(TypeError, match=re.escape(text)):
        ptx.run_text(REVERSE, (1,), *arguments, threads=128)


def test_a_text_has_as_much_shared_memory_as_the_architecture() -> None:
    with pytest.raises(ValueError, match="at most 101376 bytes of shared memory on sm_86, got 131072"):
        ptx.run_text(REVERSE.replace("[512]", "[131072]"), (1,), 1, 2, 3, 4.0, threads=128, arch="sm_86")


def test_nothing_but_numpy_is_loaded() -> None:
    program = f"import sys; from {PROJECT}.testing import ptx; print(*{{name.split('.')[0] for name in sys.modules}})"
    names = {name for name in printed("-c", program).split() if not re.match(r"_|cython", name)}
    assert names - sys.stdlib_module_names == {"numpy", PROJECT}


def test_nothing_speaks_of_the_project() -> None:
    word = PROJECT.removeprefix("ragged_")
    package = (ROOT / "src" / PROJECT / "testing" / "ptx").glob("*.py")
    for path in (*package, PAGE, Path(__file__)):
        assert word not in re.sub("ragged[-_]", "", path.read_text().lower().replace(f"ragged_{word}", ""))


def test_the_examples_of_the_page_run(tmp_path: Path) -> None:
    page, example = PAGE.read_text(), tmp_path / "example.py"
    first, second = re.findall(r"^```py\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len([line for line in first.splitlines() if line]) == 10
    example.write_text(f"{first}\nimport sys\nprint('torch' in sys.modules)")
    assert printed(str(example)) == "False\n"
    example.write_text(first + second)
    output, shown = (re.sub(r"line \d+ \(\S*\)", "line", text) for text in (printed(str(example)), page))
    assert output.partition("[")[0] in shown  # leaves out the registers, which depend on the compiler


if __name__ == "__main__":
    main()
