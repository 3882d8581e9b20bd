"""Kernels compile for GPUs that are not here, and the checker that says so tells a bad kernel from a good one."""

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import catalogue, compile_matrix, compiling, mla_cases
from ragged_attention import dispatch, samples

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


def test_planted_kernels_are_reported() -> None:
    pytest.importorskip("triton")
    done = apart("-m", "planted_kernels")
    assert done.returncode == 0, done.stderr
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert said["good"] == "None"
    assert said["spilling"].startswith("spills ")
    assert "bytes of shared memory, the device has 101376" in said["too much shared memory"]
    assert said["wrong"].startswith("does not compile: ")


def row(**fields: object) -> compile_matrix.Row:
    facts = {"instructions": (("wgmma", 4),), "registers": 64, "shared": 1024, "limit": 2048, "error": "", "spilled": 0}
    facts |= fields
    return compile_matrix.Row("sm_90", "some_kernel", "q 64", 4, 2, ["prefill_4k"], compiling.Facts(**facts))  # type: ignore[arg-type]


def test_what_counts_as_a_failure() -> None:
    assert compile_matrix.failures([row()]) == []
    where = "sm_90 some_kernel (prefill_4k): "
    assert compile_matrix.failures([row(spilled=8)]) == [where + "spills 8 bytes a thread"]
    expected = where + "needs 4096 bytes of shared memory, the device has 2048"
    assert compile_matrix.failures([row(shared=4096)]) == [expected]
    assert compile_matrix.failures([row(error="X: no")])[0] == where + "does not compile: X: no"
    assert compile_matrix.failures([row(instructions=())]) == ["sm_90 (prefill_4k): no launch uses wgmma"]


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
    for name in (*compile_matrix.COVERING, *compile_matrix.FEWER, *compile_matrix.COPYING):
        assert catalogue.find(name).name == name
