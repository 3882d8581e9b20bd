"""Kernels compile for GPUs that are not present, and the checker tells bad kernels from good ones."""

import dataclasses
import itertools
import json
import types
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cases import catalogue
from benchmarks.cases import mla as mla_cases
from benchmarks.compiled import compile_matrix, compiling, fences
from ragged_attention import dispatch
from ragged_attention.calls import dtype_name
from ragged_attention.tools import recording, samples
from tests.processes import printed, run_python

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
def test_compiled_decode(arch: str) -> None:
    done = run_python(
        "-m", "benchmarks.compiled.compile_matrix", "--arch", arch, "--case", "one_page_slot", "--jobs", "1"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no failures" in done.stdout
    for kernel in ("split_kernel", "write_kernel", "merge_kernel"):
        assert kernel in done.stdout


def test_compiled_prefill_uses_wgmma() -> None:
    done = run_python(
        "-m", "benchmarks.compiled.compile_matrix", "--arch", "sm_90", "--case", "prefill_4k", "--jobs", "1"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "wgmma" in done.stdout
    (tile,) = (line for line in done.stdout.splitlines() if "| tile_kernel |" in line)
    assert " | 16 B 100% |" in tile


def test_compiled_attention_without_a_cache_and_its_gradient() -> None:
    names = ["mha_one_of_everything", "mha_one_of_everything_backward"]
    done = run_python("-m", "benchmarks.compiled.compile_matrix", "--arch", "sm_90", "--case", *names, "--jobs", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    for kernel in ("forward_kernel", "prepare_kernel", "dkv_kernel", "dq_kernel"):
        assert kernel in done.stdout


def test_compiled_writing_quantising_and_scheduling() -> None:
    done = run_python(
        "-m", "benchmarks.compiled.compile_matrix", "--arch", "sm_90", "--case", "mla_one_of_everything", "--jobs", "1"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for kernel in ("latent_kernel", "write_rows_kernel", "schedule_kernel"):
        assert kernel in done.stdout


def test_a_thousand_batches_compile_few_variants() -> None:
    """A serving engine compiles few kernel variants, because new lengths and windows do not need new variants.

    The remaining variants come from block sizes that follow the batch size, and from table strides that are divisible
    by 16 or not.
    """
    pytest.importorskip("triton")
    done = run_python("-m", "tests.serving_variants")
    assert done.returncode == 0, done.stderr
    for operation, counts in json.loads(done.stdout).items():
        assert max(counts.values()) <= 12, f"{operation}: {counts}"


def test_compiled_windows_that_16_does_not_divide_spill_nothing() -> None:
    pytest.importorskip("triton")
    sample = {"sliding_window": 2047, "num_tokens": 4096, "max_num_seqs": 1}
    said = printed("-m", "tests.programs.compile_attention", "sm_90", json.dumps(sample))
    assert "tile_kernel None" in said.splitlines(), said


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_compiled_ranges_of_wide_heads_spill_nothing(arch: str) -> None:
    pytest.importorskip("triton")
    sample = {"key_ranges": 2, "head_dim": 256, "num_tokens": 4096, "max_num_seqs": 4}
    said = printed("-m", "tests.programs.compile_attention", arch, json.dumps(sample))
    assert {line.split(maxsplit=1)[1] for line in said.splitlines()} == {"None"}, said


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
def test_compiled_draft_masks_spill_nothing(arch: str) -> None:
    pytest.importorskip("triton")
    samples = {"draft": 8}, {"draft": 64, "num_tokens": 512, "max_num_seqs": 4}
    said = printed("-m", "tests.programs.compile_attention", arch, *map(json.dumps, samples))
    assert {line.split(maxsplit=1)[1] for line in said.splitlines()} == {"None"}, said


def test_causal_masks_as_ranges_cost_hopper_what_they_cost_by_name() -> None:
    pytest.importorskip("triton")
    costs = json.loads(printed("-m", "tests.programs.cost_of_ranges"))
    assert set(costs) == {"tile_kernel", "split_kernel", "forward_kernel", "dq_kernel", "dkv_kernel"}
    for kernel, ((programs, by_name), (programs_of_range, as_range)) in costs.items():
        assert programs_of_range == programs, kernel
        assert as_range <= 1.1 * by_name, kernel


def test_planted_kernels_are_reported() -> None:
    pytest.importorskip("triton")
    done = run_python("-m", "tests.planted_kernels")
    assert done.returncode == 0, done.stderr
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert said["good"] == "None"
    assert said["spilling"].startswith("spills ")
    assert "bytes of shared memory, the device has 101376" in said["too much shared memory"]
    assert said["wrong"].startswith("does not compile: ")


@pytest.mark.parametrize("name", ["num_warps", "grid", "num_splits"])
def test_a_launch_refuses_a_constant_in_place_of_its_value(name: str) -> None:
    """A launch refuses a constexpr as a value.

    When compiling for AMD, Triton 3.6 would end the process if the number of warps were a constexpr.
    """
    one = pytest.importorskip("triton.language").constexpr(1)
    given: dict[str, Any] = {"num_warps": 4, "grid": (1, 1), "num_splits": 1}
    given |= {name: (1, one) if name == "grid" else one}
    arguments = {"num_splits": given.pop("num_splits")}
    kernel = types.SimpleNamespace(__name__="some_kernel")
    with pytest.raises(TypeError, match=f"some_kernel: expected a plain value for {name}, got constexpr"):
        recording.Launch(kernel, (), arguments, num_stages=1, **given)


def test_a_launch_refuses_arguments_that_its_kernel_lacks() -> None:
    kernel = types.SimpleNamespace(__name__="some_kernel", arg_names=["q_ptr", "num_splits"])
    with pytest.raises(TypeError, match=r"^some_kernel: expected only arguments of the kernel, got chunk$"):
        recording.Recorder()(kernel, (1,), (), (), num_splits=1, chunk=4)


def row(kernel: str = "some_kernel", case: str = "prefill_4k", **fields: object) -> compile_matrix.Row:
    facts = {"instructions": (("wgmma", 4),), "registers": 64, "shared": 1024, "limit": 2048, "error": "", "spilled": 0}
    facts |= fields
    return compile_matrix.Row("sm_90", kernel, "q 64, kv 32", 4, 2, [case], compiling.Facts(**facts))  # type: ignore[arg-type]


def loop(loads: dict[int, int], local: int = 0, matrix: str = "wgmma") -> compiling.Loop:
    return compiling.Loop(tuple((width, width * number) for width, number in loads.items()), local, matrix)


def test_what_counts_as_a_failure() -> None:
    assert compile_matrix.failures([row()]) == []
    where = "sm_90 some_kernel (prefill_4k): "
    assert compile_matrix.failures([row(spilled=8)]) == [where + "spills 8 bytes per thread"]
    expected = where + "needs 4096 bytes of shared memory, the device has 2048"
    assert compile_matrix.failures([row(shared=4096)]) == [expected]
    assert compile_matrix.failures([row(error="X: no")])[0] == where + "does not compile: X: no"


def test_many_rows_without_wgmma_are_a_failure() -> None:
    plain = row("tile_kernel", instructions=(("mma", 4),), loops=(loop({16: 8}, matrix="wgmma"),))
    (wrong,) = compile_matrix.failures([plain])
    assert wrong == "sm_90 tile_kernel (prefill_4k): products of 64 rows without wgmma"
    for other in (
        dataclasses.replace(plain, arch="sm_80"),
        dataclasses.replace(plain, kernel="dkv_kernel"),  # the rows of this kernel's products are keys, in blocks of 32
        dataclasses.replace(plain, kernel="combine_kernel"),
        dataclasses.replace(plain, cases=["float32_mixed"]),
    ):
        assert compile_matrix.wgmma_failure(other) is None


def test_tiles_too_small_for_wgmma_are_a_failure() -> None:
    large, small = row("tile_kernel"), dataclasses.replace(row("split_kernel"), blocks="q 32, kv 32")
    assert compile_matrix.small_products([large, small]) == []
    wrong = ["sm_90 (prefill_4k): no product has the 64 rows that wgmma needs"]
    assert compile_matrix.small_products([small, row("combine_kernel")]) == wrong
    assert compile_matrix.small_products([dataclasses.replace(small, arch="sm_80")]) == []
    assert compile_matrix.small_products([dataclasses.replace(small, cases=["decode_64x4k", "float32_mixed"])]) == []


def test_a_product_without_its_fence_is_a_failure_on_hopper() -> None:
    unfenced = row(instructions=(("wgmma", 4), ("unfenced", 2)))
    (wrong,) = compile_matrix.failures([unfenced])
    assert wrong == "sm_90 some_kernel (prefill_4k): 2 wgmma with no proxy fence after a wait for copies"
    assert compile_matrix.failures([dataclasses.replace(unfenced, arch="sm_100")]) == []


WAIT, FENCE, WGMMA = (
    "cp.async.wait_group 0;",
    "fence.proxy.async.shared::cta;",
    "wgmma.mma_async.sync.aligned.m64n8k16 x;",
)


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ((WAIT, "bar.sync 0;", WGMMA), [3]),
        ((WAIT, "bar.sync 0;", FENCE, WGMMA), []),
        ((WAIT, FENCE, "bar.sync 0;", WGMMA, WGMMA), []),
        ((FENCE, WAIT, "tcgen05.mma.cta_group::1 x;"), [3]),
        ((WAIT, "fence.proxy.async.global;", WGMMA), [3]),  # this fence is for global memory
        (("$L__BB0_1:", WGMMA, WAIT, "@%p1 bra $L__BB0_1;", "ret;"), [2]),  # the wait precedes the next product
        (("$L__BB0_1:", FENCE, WGMMA, WAIT, "@%p1 bra $L__BB0_1;", WGMMA, "ret;"), [6]),
        ((WAIT, "@!%p1 bra $L__BB0_1;", FENCE, "$L__BB0_1:", WGMMA), [5]),  # a branch skips the fence
        ((WAIT, "bra.uni $L__BB0_1;", WGMMA, "$L__BB0_1:", FENCE, WGMMA), []),
        ((WAIT, "ret;", WGMMA), []),
    ],
)
def test_products_that_no_fence_stands_before(lines: tuple[str, ...], found: list[int]) -> None:
    assert fences.unfenced("\n".join(lines)) == found


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ("%registers", "%turned", True),
        ("%tensor", "%turned", True),
        ("%filled", "%turned", True),
        ("%registers", "%buffer", False),
        ("%view", "%turned", False),
        ("%registers", "%carried", False),  # a value that a loop carries may come from anywhere
    ],
)
def test_products_that_read_no_copies_need_no_fence(left: str, right: str, expected: bool) -> None:
    kind = "tensor" if left == "%registers" else "!ttg.memdesc"
    code = f"""
    %filled = ttg.local_alloc %value : (tensor<64x128xf16>) -> !ttg.memdesc<64x128xf16>
    %buffer = ttg.local_alloc : () -> !ttg.memdesc<2x64x128xf16>
    %view = ttg.memdesc_index %buffer[%turn] : !ttg.memdesc<2x64x128xf16> -> !ttg.memdesc<64x128xf16>
    %copies = ttg.async_copy_global_to_local %pointers, %view mask %mask : tensor<64x128x!tt.ptr<f16>>
    %turned = ttg.memdesc_trans %filled {{order = array<i32: 1, 0>}} : !ttg.memdesc<64x128xf16>
    %tensor = ttng.tmem_alloc %value : (tensor<64x128xf16>) -> !ttg.memdesc<64x128xf16, #tmem>
    %sums = ttng.warp_group_dot {left}, {right}, %zeros {{isAsync = true}} : {kind}<64x128xf16> * !ttg.memdesc<128x64>
    """
    assert fences.only_reads_what_threads_wrote(code) == expected
    assert fences.only_reads_what_threads_wrote(code.replace("warp_group_dot", "tc_gen5_mma")) == expected
    assert not fences.only_reads_what_threads_wrote(code.replace("warp_group_dot", "another"))


GOOD = loop({16: 8, 4: 2})


def test_local_memory_in_an_inner_loop_is_a_failure() -> None:
    assert compile_matrix.failures([row(loops=(GOOD, GOOD))]) == []
    (wrong,) = compile_matrix.failures([row(loops=(GOOD, loop({16: 8}, local=3)))])
    assert wrong == "sm_90 some_kernel (prefill_4k): 3 loads and stores of local memory in an inner loop"


@pytest.mark.parametrize(
    ("loads", "share"),
    [({16: 8}, 1), ({16: 8, 4: 8}, 1), ({}, 1), ({32: 1, 16: 1}, 1), ({4: 1}, 0),
     ({16: 9, 8: 2}, 0.9), ({16: 8, 4: 24}, 2 / 3), ({8: 8, 2: 1}, 0), ({16: 4, 1: 16}, 0.8)],
)  # fmt: skip
def test_what_comes_sixteen_bytes_at_a_time(loads: dict[int, int], share: float) -> None:
    """The share of wide loads leaves out one word per longer load: the page number or slot of that load's row."""
    assert loop(loads).wide == pytest.approx(share)


def test_narrow_loads_of_workloads_are_a_failure() -> None:
    narrow = loop({16: 4, 8: 8})
    (wrong,) = compile_matrix.failures([row("tile_kernel", loops=(GOOD, narrow))])
    assert wrong == ("sm_90 tile_kernel (prefill_4k): an inner loop loads 50% of its bytes 16 at a time, expected 90%")
    assert compile_matrix.failures([row("tile_kernel", loops=(GOOD, loop({16: 9, 8: 2})))]) == []
    # Cases that are not workloads, and kernels without products, are not checked.
    assert compile_matrix.failures([row("tile_kernel", "int8_mixed", loops=(narrow,))]) == []
    assert compile_matrix.failures([row("combine_kernel", loops=(narrow,))]) == []


def test_exceptions_of_narrow_loads_have_a_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_matrix, "NARROW", {("tile_kernel", "8 bits", "wgmma"): (0.5, "a reason")})
    half, less = loop({16: 4, 8: 8}), loop({16: 4, 8: 9})
    assert compile_matrix.loop_failure(row("tile_kernel", "fp8_prefill_4k", loops=(half,))) is None
    for unlike in (
        row("tile_kernel", "fp8_prefill_4k", loops=(less,)),
        row("tile_kernel", "prefill_4k", loops=(half,)),
        row("split_kernel", "fp8_prefill_4k", loops=(half,)),
        row("tile_kernel", "fp8_prefill_4k", loops=(dataclasses.replace(half, matrix="mma"),)),
    ):
        assert "of its bytes 16 at a time" in (compile_matrix.loop_failure(unlike) or "")


def test_an_older_compiler_has_exceptions_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_matrix, "NARROW_ON_OLDER", {("tile_kernel", "plain", "wgmma"): (0.5, "a reason")})
    half = row("tile_kernel", loops=(loop({16: 4, 8: 8}),))
    assert compile_matrix.failures([half], "3.6.0") == []
    assert len(compile_matrix.failures([half], "3.9.0")) == len(compile_matrix.failures([half])) == 1


def test_the_page_has_every_exception() -> None:
    page = (ROOT / "docs" / "compile_matrix.md").read_text()
    tables = (("", compile_matrix.NARROW), (f" (Triton {compile_matrix.OLDER})", compile_matrix.NARROW_ON_OLDER))
    lines = {
        f"| {' | '.join(key)}{version} | {least:.0%} | {why} |"
        for version, exceptions in tables
        for key, (least, why) in exceptions.items()
    }
    assert lines == {line for line in page.splitlines() if "_kernel |" in line}
    assert all(f"`{arch}`" in page for arch in compiling.ARCHITECTURES)


def test_a_loop_of_many_rows_wants_wgmma() -> None:
    plain = dataclasses.replace(GOOD, matrix="mma")
    wanted = "an inner loop of 64 rows uses mma, expected wgmma"
    assert compile_matrix.loop_failure(row("tile_kernel", loops=(GOOD, plain))) == wanted
    assert compile_matrix.loop_failure(row("dkv_kernel", loops=(plain,))) is None  # the rows of its products are keys
    older = dataclasses.replace(row("tile_kernel", loops=(plain,)), arch="sm_80")
    assert compile_matrix.loop_failure(older) is None


def test_a_kernel_whose_loops_are_not_found_is_a_failure() -> None:
    lost = row("tile_kernel")
    assert compile_matrix.loop_failure(lost) == "no inner loop of products was found"
    assert compile_matrix.loop_failure(dataclasses.replace(lost, arch="gfx942")) is None
    assert compile_matrix.loop_failure(row("tile_kernel", error="X: no")) is None
    # For a batch of one token, the compiler sees that this kernel has no work.
    assert compile_matrix.loop_failure(row("tile_kernel", instructions=())) is None


def test_a_report_has_a_line_for_each_kernel() -> None:
    wide = row(loops=(GOOD, GOOD, loop({8: 1}, local=2)))
    rows = [row(), wide, row(spilled=8), row(error="X: no")]
    text = compile_matrix.report("3.9.0", rows, ["a failure"], ["sm_90 x: no"])
    lines = [line for line in text.splitlines() if line.startswith("| some_kernel |")]
    assert "4 compilations, 1 failure." in text
    assert "- a failure" in text
    assert "- sm_90 x: no" in text
    assert lines[0].endswith(" | wgmma 4 | 64 | 0 | 1.0 | - |")
    assert lines[1].endswith(" | 16 B 94%, 4 B 6% / 8 B 100%, **local 2** |")
    assert lines[2].endswith(" | **8 B** | 1.0 | - |")
    assert lines[3].endswith(" | **X: no** | - | - | - | - |")
    assert {line.count(" | ") for line in lines} == {len(compile_matrix.COLUMNS) - 1}
    assert "no failures." in compile_matrix.report("3.9.0", rows[:1], [], [])


SOURCES = {
    "helpers.py": """
import triton
import triton.language as tl

FACTOR: tl.constexpr = tl.constexpr(3)

@triton.jit
def scaled(x):
    return x * FACTOR
""",
    "kernels.py": """
import triton
import triton.language as tl
from . import helpers
from .helpers import scaled

@triton.jit
def copy_kernel(x_ptr, out_ptr, strides, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out_ptr + i * strides[0], scaled(tl.load(x_ptr + i)))
""",
}
# (text to replace, replacement, whether the digest changes)
EDITS = (
    ("", "", False),
    ("import triton\n", "import triton  # the compiler\n\n\n", False),
    ("    i = tl", '    """Copy, scaled."""\n    # All of it.\n    i = tl', False),
    ("scaled(tl.load(x_ptr + i))", "helpers.scaled(tl.load(x_ptr + i))", True),
    ("tl.arange(0, SIZE)", "tl.arange(0, SIZE) + 0", True),
    ("return x * FACTOR", "return x + FACTOR", True),
    ("constexpr(3)", "constexpr(4)", True),
)


def test_a_digest_rests_on_what_is_compiled(tmp_path: Path) -> None:
    """The digest depends on called functions, constants, types and options.

    It does not depend on comments, docstrings and line numbers.
    """
    pytest.importorskip("triton")
    for index, (old, new, _) in enumerate(EDITS):
        folder = tmp_path / f"edit_{index}"
        folder.mkdir()
        for name, text in SOURCES.items():
            (folder / name).write_text(text.replace(old, new))
    said = printed("-m", "tests.programs.digests", str(tmp_path), str(len(EDITS)))
    same, different, failure = said.splitlines()
    assert same.split() == [str(not changes) for *_, changes in EDITS]
    assert different == "5"
    assert failure == "None"


def test_a_digest_rests_on_every_function_that_triton_counts() -> None:
    pytest.importorskip("triton")
    number, *wrong = printed("-m", "tests.programs.reached_functions").splitlines()
    assert int(number) > 10
    assert wrong == []


class Matrix:
    """Runs `compile_matrix.main` with a plan that compiles nothing.

    `spilled` has the spills that a compilation reports.
    """

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spilled = {f"{index:02}": 0 for index in range(2 * compile_matrix.SPOT_CHECK)}
        self.compiled: list[str] = []
        monkeypatch.setattr(compile_matrix, "PASSED", tmp_path / "compiled.txt")
        monkeypatch.setattr(compile_matrix, "REPORTS", tmp_path / "build")
        monkeypatch.setattr(compile_matrix, "plan", self.plan)
        monkeypatch.setattr(compile_matrix, "compile_all", self.compile_all)
        monkeypatch.setattr(compile_matrix, "refusals", lambda *_: [])
        monkeypatch.setattr(compile_matrix.compiling, "why_not", lambda: None)
        monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")

    def plan(self, names: object, archs: object) -> compile_matrix.Planned:
        blank = dataclasses.replace(row(), facts=compiling.Facts(), cases=["decode_64x4k"])
        return {
            digest: (compile_matrix.Job("any", "sm_90", 0, 0), dataclasses.replace(blank, blocks=f"q {digest}"))
            for digest in self.spilled
        }

    def compile_all(self, planned: compile_matrix.Planned, jobs: int, console: object, report: Any) -> None:
        self.compiled = sorted(planned)
        for digest, (_, one) in planned.items():
            one.facts = row(spilled=self.spilled[digest]).facts
            report(digest, one)

    def run(self, *arguments: str) -> tuple[int, int]:
        """The exit status and the number of compilations."""
        self.compiled = []
        return compile_matrix.main(arguments), len(self.compiled)


@pytest.fixture
def matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Matrix:
    pytest.importorskip("triton")
    pytest.importorskip("rich")
    return Matrix(tmp_path, monkeypatch)


def test_only_what_has_not_passed_is_compiled(matrix: Matrix) -> None:
    every = len(matrix.spilled)
    assert matrix.run("--check") == (0, every)  # `--check` saves nothing
    assert matrix.run() == (0, every)
    assert matrix.run() == (0, 0)
    assert matrix.run("--check") == (0, 2)
    matrix.spilled["new"] = 0
    assert matrix.run("--check") == (0, 3)
    assert "new" in matrix.compiled
    assert matrix.run() == (0, 1)
    assert matrix.run() == (0, 0)
    del matrix.spilled["new"]
    assert matrix.run() == (0, 0)
    assert "new" not in compile_matrix.PASSED.read_text()
    assert matrix.run("--afresh") == (0, every)


def test_what_fails_is_compiled_until_it_passes(matrix: Matrix) -> None:
    matrix.spilled["01"] = 8
    assert matrix.run() == (1, len(matrix.spilled))
    (report,) = compile_matrix.REPORTS.iterdir()
    assert "1 failure." in report.read_text()
    assert matrix.run("--check") == (1, 3)
    assert matrix.run() == (1, 1)
    assert matrix.compiled == ["01"]
    matrix.spilled["01"] = 0
    assert matrix.run() == (0, 1)
    assert matrix.run() == (0, 0)


def test_a_check_compiles_a_sample_again(matrix: Matrix) -> None:
    assert matrix.run() == (0, 2 * compile_matrix.SPOT_CHECK)
    matrix.spilled["00"] = 8
    assert matrix.run() == (0, 0)
    assert matrix.run("--check") == (1, 2)


def test_versions_of_triton_pass_apart(matrix: Matrix) -> None:
    planned = matrix.plan(None, ())
    compile_matrix.save_passed("3.9.0", planned, ["00", "01", "unknown"])
    compile_matrix.save_passed("3.6.0", planned, ["02"])
    assert compile_matrix.load_passed("3.9.0") == {"00", "01"}
    assert compile_matrix.PASSED.read_text() == "3.6.0 some_kernel 02\n3.9.0 some_kernel 00 01\n"


def test_a_workload_is_not_passed_by_a_case_of_fewer_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(compiling, "digest", lambda launch, arch: launch.name)
    judged = compile_matrix.plan(["prefill_4k"], ["sm_90"])
    monkeypatch.setattr(catalogue, "COMPILED_ONLY", catalogue.CASES)
    monkeypatch.setattr(catalogue, "CASES", {})
    assert {digest + "+" for digest in compile_matrix.plan(["prefill_4k"], ["sm_90"])} == judged.keys()


def test_interpreting_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert compile_matrix.main([]) == 2
    assert "expected TRITON_INTERPRET to be unset, got 1" in capsys.readouterr().err


def test_every_operation_of_the_room_is_covered() -> None:
    pytest.importorskip("triton")
    assert compile_matrix.missing_operations() == []


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
def test_every_tile_for_latents_is_compiled(arch: str) -> None:
    """For all heads, formats and kinds of call, the heuristic's tiles for latents are among those of the matrix."""
    pytest.importorskip("triton")
    found = {tile_of(catalogue.find(name), arch) for name in compile_matrix.covering(arch) if name.startswith("mla_")}
    chosen = set()
    widths = {"plain": 576, "fp8_v32": 576, "fp8_v4": 512}
    for heads, (form, d_qk), dtype, kind in itertools.product(
        (8, 16, 32, 64, 128), widths.items(), ("bfloat16", "float16", "float32"), KINDS
    ):
        case = mla_cases.batch(
            "any", "-", 8, heads, num_q_tokens=2, max_len=4096, cache_format=form, dtype=dtype, d_qk=d_qk, **kind
        )
        chosen.add(tile_of(case, arch))
    assert chosen <= found


KINDS: tuple[dict[str, Any], ...] = ({}, {"topk": 2048}, {"topk": 2048, "prefill": True})


def tile_of(case: mla_cases.LatentCase, arch: str) -> tuple[Any, ...]:
    """The format, dtype and tile sizes that a case compiles to. The number of splits is a run-time argument."""
    call = case.attention_call(samples.device_of("torch", arch))
    tile = dispatch.load(call.OPERATION, "triton").heuristic(call)
    sizes = (tile.block_h, tile.block_kv, tile.num_warps, tile.num_stages)
    return case.cache_format, "float32" if case.dtype == "float32" else "16 bits", *sizes


# NUMBERS are constants that only change numbers in a kernel's code. For ONE_OR_MORE it only matters if they exceed 1.
NUMBERS = {"NUM_HEADS", "SPLIT_BLOCK_Q", "ROWS", "TOPK", "KV_HEADS", "MIN_BLOCKS"}
ONE_OR_MORE = {"GROUP", "MAX_SEQS", "NUM_Q", "PARTS"}


def shape_of(launch: compiling.Launch) -> tuple[Any, ...]:
    """A key that is equal for launches whose code differs only in numbers: tile, types, features, warps and stages."""
    found: list[Any] = [launch.name, launch.num_warps, launch.num_stages, *map(dtype_name, launch.operands)]
    for name, value in sorted(launch.constants.items()):
        if not name.isupper() or name in NUMBERS:  # lower-case constants are sizes and strides
            continue
        if name in ONE_OR_MORE:
            value = value > 1
        if name.endswith("PAGE_SIZE"):  # pages of one key, pages of whole blocks of keys, or other sizes
            value = 1 if value == 1 else "whole" if value % launch.constants.get("BLOCK_KV", 1) == 0 else "parts"
        found.append((name, value))
    return tuple(found)


def shapes_of(case: str) -> dict[tuple[Any, ...], str]:
    indices = range(len(compile_matrix.calls_for(case, "sm_90")))
    launches = (launch for index in indices for launch in compile_matrix.launches_for(case, "sm_90", index))
    return {shape_of(launch): f"{case}: {launch.name}" for launch in launches}


def test_whatever_the_workloads_launch_is_compiled() -> None:
    """On sm_90 the matrix compiles every kernel of every reported case, with its tile and features."""
    pytest.importorskip("triton")
    compiled = {shape for case in compile_matrix.covering("sm_90") for shape in shapes_of(case)}
    missing = [name for case in catalogue.CASES for shape, name in shapes_of(case).items() if shape not in compiled]
    assert missing == []


def test_no_target_is_compiled_for_nothing() -> None:
    pytest.importorskip("triton")
    shapes = {case: set(shapes_of(case)) for case in compile_matrix.covering("sm_90")}
    for target in compile_matrix.TARGETS:
        others = set().union(*(shapes[case] for case in shapes if case != target))
        assert shapes[target] - others, target


def test_names_of_the_covering_cases() -> None:
    for name in (*compile_matrix.COVERING, *compile_matrix.TARGETS, *compile_matrix.FEWER, *compile_matrix.COPYING):
        assert catalogue.find(name).name == name
