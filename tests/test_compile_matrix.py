"""Kernels compile for GPUs that are not here, and the checker that says so tells a bad kernel from a good one."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import catalogue, compile_matrix, compiling, mla_cases
from ragged_attention import dispatch, samples
from ragged_attention.calls import dtype_name

ROOT = Path(__file__).parent.parent


def apart(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own, where Triton compiles instead of interpreting."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(Path(__file__).parent), environ.get("PYTHONPATH", "")])
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environ, capture_output=True, text=True)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
def test_a_decode_compiles(arch: str) -> None:
    done = apart("-m", "benchmarks.compile_matrix", "--arch", arch, "--case", "one_page_slot", "--jobs", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no failures" in done.stdout
    for kernel in ("split_kernel", "write_kernel", "merge_kernel"):
        assert kernel in done.stdout


def test_a_prefill_uses_wgmma() -> None:
    done = apart("-m", "benchmarks.compile_matrix", "--arch", "sm_90", "--case", "prefill_4k", "--jobs", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "wgmma" in done.stdout
    (tile,) = (line for line in done.stdout.splitlines() if "| tile_kernel |" in line)
    assert " | 16 B 9" in tile


def test_attention_without_a_cache_and_its_gradient_compile() -> None:
    names = ["mha_one_of_everything", "mha_one_of_everything_backward"]
    done = apart("-m", "benchmarks.compile_matrix", "--arch", "sm_90", "--case", *names, "--jobs", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    for kernel in ("forward_kernel", "prepare_kernel", "dkv_kernel", "dq_kernel"):
        assert kernel in done.stdout


def test_writing_quantising_and_scheduling_compile() -> None:
    done = apart("-m", "benchmarks.compile_matrix", "--arch", "sm_90", "--case", "mla_one_of_everything", "--jobs", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    for kernel in ("latent_kernel", "write_rows_kernel", "schedule_kernel"):
        assert kernel in done.stdout


def test_a_thousand_batches_compile_few_variants() -> None:
    """What changes from step to step, lengths and windows included, is no reason to compile in the middle of serving.

    What is left are block sizes that follow the size of the batch, and strides of tables that 16 divides or not.
    """
    pytest.importorskip("triton")
    done = apart("-m", "serving_variants")
    assert done.returncode == 0, done.stderr
    for operation, counts in json.loads(done.stdout).items():
        assert max(counts.values()) <= 12, f"{operation}: {counts}"


ODD_WINDOW = """
from benchmarks import compiling
from ragged_attention.samples import Sample, device_of
sample = Sample(sliding_window=2047, num_tokens=4096, max_num_seqs=1)
launches = compiling.record(sample.call("ragged_paged_attention", device_of("torch", "sm_90")))
print(*{compiling.compile_launch(launch, "sm_90").failure for launch in launches if launch.name == "tile_kernel"})
"""


def test_a_window_that_16_does_not_divide_spills_nothing() -> None:
    pytest.importorskip("triton")
    done = apart("-c", ODD_WINDOW)
    assert done.stdout == "None\n", done.stdout + done.stderr


def test_planted_kernels_are_reported() -> None:
    pytest.importorskip("triton")
    done = apart("-m", "planted_kernels")
    assert done.returncode == 0, done.stderr
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert said["good"] == "None"
    assert said["spilling"].startswith("spills ")
    assert "bytes of shared memory, the device has 101376" in said["too much shared memory"]
    assert said["wrong"].startswith("does not compile: ")


def row(kernel: str = "some_kernel", case: str = "prefill_4k", **fields: object) -> compile_matrix.Row:
    facts = {"instructions": (("wgmma", 4),), "registers": 64, "shared": 1024, "limit": 2048, "error": "", "spilled": 0}
    facts |= fields
    return compile_matrix.Row("sm_90", kernel, "q 64, kv 32", 4, 2, [case], compiling.Facts(**facts))  # type: ignore[arg-type]


def loop(loads: dict[int, int], local: int = 0, matrix: str = "wgmma") -> compiling.Loop:
    return compiling.Loop(tuple((width, width * number) for width, number in loads.items()), local, matrix)


def test_what_counts_as_a_failure() -> None:
    assert compile_matrix.failures([row()]) == []
    where = "sm_90 some_kernel (prefill_4k): "
    assert compile_matrix.failures([row(spilled=8)]) == [where + "spills 8 bytes a thread"]
    expected = where + "needs 4096 bytes of shared memory, the device has 2048"
    assert compile_matrix.failures([row(shared=4096)]) == [expected]
    assert compile_matrix.failures([row(error="X: no")])[0] == where + "does not compile: X: no"
    assert compile_matrix.failures([row(instructions=())]) == ["sm_90 (prefill_4k): no launch uses wgmma"]


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
    """A word for each longer load, its row's page number or slot, does not count."""
    assert loop(loads).wide == pytest.approx(share)


def test_narrow_loads_of_workloads_are_a_failure() -> None:
    narrow = loop({16: 4, 8: 8})
    (wrong,) = compile_matrix.failures([row("tile_kernel", loops=(GOOD, narrow))])
    assert wrong == (
        "sm_90 tile_kernel (prefill_4k): of what an inner loop loads 50% comes 16 bytes at a time, expected 90%"
    )
    assert compile_matrix.failures([row("tile_kernel", loops=(GOOD, loop({16: 9, 8: 2})))]) == []
    # Neither what only shows that something compiles nor what does not multiply is judged.
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
        assert "comes 16 bytes at a time" in (compile_matrix.loop_failure(unlike) or "")
    assert "| tile_kernel | 8 bits | wgmma | 50% | a reason |" in compile_matrix.merged("", "3.9.0", "")


def test_an_older_compiler_has_exceptions_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_matrix, "NARROW_ON_OLDER", {("tile_kernel", "plain", "wgmma"): (0.5, "a reason")})
    half = row("tile_kernel", loops=(loop({16: 4, 8: 8}),))
    assert compile_matrix.failures([half], "3.6.0") == []
    assert len(compile_matrix.failures([half], "3.9.0")) == len(compile_matrix.failures([half])) == 1
    assert "no failures" in compile_matrix.section("3.6.0", [half], [])
    assert "1 failure." in compile_matrix.section("3.9.0", [half], [])
    assert "| tile_kernel | plain | wgmma (Triton 3.6) | 50% | a reason |" in compile_matrix.merged("", "3.9.0", "")


def test_a_loop_of_many_rows_wants_wgmma() -> None:
    plain = dataclasses.replace(GOOD, matrix="mma")
    wanted = "an inner loop of 64 rows uses mma, expected wgmma"
    assert compile_matrix.loop_failure(row("tile_kernel", loops=(GOOD, plain))) == wanted
    assert compile_matrix.loop_failure(row("dkv_kernel", loops=(plain,))) is None  # whose rows are its keys
    older = dataclasses.replace(row("tile_kernel", loops=(plain,)), arch="sm_80")
    assert compile_matrix.loop_failure(older) is None


def test_a_kernel_whose_loops_are_not_found_is_a_failure() -> None:
    lost = row("tile_kernel")
    assert compile_matrix.loop_failure(lost) == "no inner loop of products was found"
    assert compile_matrix.loop_failure(dataclasses.replace(lost, arch="gfx942")) is None
    assert compile_matrix.loop_failure(row("tile_kernel", error="X: no")) is None
    # Of a batch of one token the compiler sees that this kernel has nothing to do.
    assert compile_matrix.loop_failure(row("tile_kernel", instructions=())) is None


def test_loads_are_shown_once_each() -> None:
    shown = compile_matrix._facts(row(loops=(GOOD, GOOD, loop({8: 1}, local=2))))
    assert shown.endswith(" | 16 B 94%, 4 B 6% / 8 B 100%, **local 2** |")
    assert compile_matrix._facts(row()).endswith(" | - |")
    headings, line = len(compile_matrix.COLUMNS), compile_matrix._line(row(loops=(GOOD,)))
    assert line.count(" | ") == headings - 1
    assert compile_matrix._line(row(error="X: no")).count(" | ") == headings - 1


def test_each_version_has_a_section_of_its_own() -> None:
    old = compile_matrix.merged("", "3.6.0", compile_matrix.section("3.6.0", [row()], []))
    both = compile_matrix.merged(old, "3.10.0", compile_matrix.section("3.10.0", [row(spilled=8)], ["sm_90 x: no"]))
    assert both.index("## Triton 3.10.0") < both.index("## Triton 3.6.0")
    assert "**8 B**" in both
    assert compile_matrix.merged(both, "3.6.0", compile_matrix.section("3.6.0", [row()], [])) == both


def test_check_tells_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    monkeypatch.setattr(compile_matrix, "DOCUMENT", tmp_path / "matrix.md")
    console = Console(record=True, width=200)
    text = compile_matrix.section("3.9.0", [row()], [])
    assert compile_matrix._store("3.9.0", text, True, console) == 1
    assert compile_matrix._store("3.9.0", text, False, console) == 0
    assert compile_matrix._store("3.9.0", text, True, console) == 0
    assert compile_matrix._store("3.9.0", compile_matrix.section("3.9.0", [row(registers=65)], []), True, console) == 1
    assert "| 65 |" in console.export_text()


def test_the_same_code_is_checked_by_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    console = pytest.importorskip("rich.console").Console()
    twice = 2 * compile_matrix.SPOT_CHECK
    planned = {str(number): (compile_matrix.Job("any", "sm_80", 0, number), row()) for number in range(twice)}
    compiled: list[int] = []

    def compile_all(some: dict[str, Any], jobs: int, shown: object) -> list[compile_matrix.Row]:
        compiled.append(len(some))
        return [row(registers=registers) for registers in registers_now]

    monkeypatch.setattr(compile_matrix, "compile_all", compile_all)
    text = compile_matrix.merged("", "3.9.0", compile_matrix.section("3.9.0", [row()], [], "0123"))
    part = compile_matrix.recorded(text, "3.9.0")
    assert "Code 0123." in part
    registers_now = [64, 64]
    assert compile_matrix.spot_check(planned, part, 1, console) == []
    registers_now = [65]
    (wrong,) = compile_matrix.spot_check(planned, part, 1, console)
    assert "65 | 0 |" in wrong
    assert wrong.endswith("is not in compile_matrix.md")
    assert compiled == [2, 2]
    assert compile_matrix.digest(planned) == compile_matrix.digest(reversed(planned))
    assert compile_matrix.digest(planned) != compile_matrix.digest(["0"])


def test_interpreting_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert compile_matrix.main([]) == 2
    assert "expected TRITON_INTERPRET to be unset, got 1" in capsys.readouterr().err


def test_every_operation_of_the_room_is_covered() -> None:
    pytest.importorskip("triton")
    assert compile_matrix.missing_operations() == []


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
def test_every_tile_for_latents_is_compiled(arch: str) -> None:
    """Whatever the heads, formats and kinds of call, the sizes that are chosen are among those of the matrix."""
    pytest.importorskip("triton")
    found = {tile_of(catalogue.find(name), arch) for name in compile_matrix.covering(arch) if name.startswith("mla_")}
    chosen = set()
    widths = {"plain": 576, "fp8_v32": 576, "fp8_v4": 512}
    for heads, (form, d_qk), dtype, kind in itertools.product(
        (8, 16, 32, 64, 128), widths.items(), ("bfloat16", "float16", "float32"), KINDS
    ):
        case = mla_cases.LatentCase(
            name="any", workload="-", num_seqs=8, num_q_tokens=2, kv_len=4096, num_q_heads=heads, format=form,
            dtype=dtype, d_qk=d_qk, **kind,
        )  # fmt: skip
        chosen.add(tile_of(case, arch))
    assert chosen <= found


KINDS: tuple[dict[str, Any], ...] = ({}, {"topk": 2048}, {"topk": 2048, "prefill": True})


def tile_of(case: mla_cases.LatentCase, arch: str) -> tuple[Any, ...]:
    """The sizes that a case is compiled at; splits are arguments of the kernel's."""
    call = mla_cases.attention_call(case, samples.device_of("torch", arch))
    tile = dispatch.load(call.OPERATION, "triton").heuristic(call)
    sizes = (tile.block_h, tile.block_kv, tile.num_warps, tile.num_stages)
    return case.format, "float32" if case.dtype == "float32" else "16 bits", *sizes


# A kernel's constants that change numbers in its code, not what is computed how; and those of which it matters only
# whether they are 1.
NUMBERS = {"NUM_HEADS", "SPLIT_BLOCK_Q", "ROWS", "TOPK", "KV_HEADS", "MIN_KEYS", "MIN_BLOCKS"}
ONE_OR_MORE = {"GROUP", "NUM_SPLITS", "NUM_Q"}


def shape_of(launch: compiling.Launch) -> tuple[Any, ...]:
    """Equal for launches whose code differs in numbers only: tile, types and features, warps and stages."""
    found: list[Any] = [launch.name, launch.num_warps, launch.num_stages, *map(dtype_name, launch.operands)]
    for name, value in sorted(launch.arguments.items()):
        if not name.isupper() or name in NUMBERS:  # lower case are sizes and strides
            continue
        if name in ONE_OR_MORE:
            value = value > 1
        if name.endswith("PAGE_SIZE"):  # a block of keys lies on one page, or each key on one of its own, or neither
            value = 1 if value == 1 else "whole" if value % launch.arguments.get("BLOCK_KV", 1) == 0 else "parts"
        found.append((name, value))
    return tuple(found)


def shapes_of(case: str) -> dict[tuple[Any, ...], str]:
    places = range(len(compile_matrix.calls_for(case, "sm_90")))
    launches = (launch for place in places for launch in compile_matrix.launches_for(case, "sm_90", place))
    return {shape_of(launch): f"{case}: {launch.name}" for launch in launches}


def test_whatever_the_workloads_launch_is_compiled() -> None:
    """On sm_90, every kernel of every case that is reported, at its tile and with its features."""
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


def test_the_document_has_every_covering_case() -> None:
    document = compile_matrix.DOCUMENT.read_text()
    for version in ("3.9", "3.6"):
        part = document.partition(f"## Triton {version}")[2].partition("\n## ")[0]
        for arch in compiling.ARCHITECTURES:
            rows = part.partition(f"### {arch} ")[2].partition("\n### ")[0]
            for name in compile_matrix.covering(arch):
                assert name in rows, f"{name} on {arch}, Triton {version}"
        assert "no failures" in part


def test_names_of_the_covering_cases() -> None:
    for name in (*compile_matrix.COVERING, *compile_matrix.TARGETS, *compile_matrix.FEWER, *compile_matrix.COPYING):
        assert catalogue.find(name).name == name
