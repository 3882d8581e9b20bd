"""The code that reads the TPU compiler's dumps and writes their table. These tests do not need the compiler."""

import re
from pathlib import Path

import pytest

from benchmarks.cases import tpu as tpu_cases
from benchmarks.cases.tpu import TARGETS
from benchmarks.compiled import tpu_compile, tpu_dump
from benchmarks.peers.tpu import PEERS

pytest.importorskip("jax")

UTILIZATION = """\
== CAPACTIY:
MXU, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU
    2     2     4     2     1     3     3     2     2     2
== UTILIZATION:
    0     0     0     0     0     0     0     0     0     1
    0     0     1     0     0     1     0     0     0     1
    2     0     4     0     0     3     2     1     0     0
    1     0     2     0     1     0     0     2     1     0
    0     0     0     0     0     0     0     0     0     0
    0     0     4     0     0     0     1     1     1     0
    0     0     0     0     0     0     0     0     0     1
"""

BUNDLES = """\
= control target key start
LH: loop header
= control target key end

     0   :  { %s1_s2 = smov [#allocation8] /* materialized constant */ }
   0x1 LB: > { %s4_s2 = sphi %s3_s2, %s5_s2 /* iteration index, stage = 1 */ }
   0x2 LB: >> { %v6_v0 = vld [vmem:[#allocation6] sm:$0xff]  ;;  %s7_s1 = sld
hlo: some_kernel.1
 */ }
   0x3   : >> { %v8_v1 = vmatmul.bf16.gmra.mxu0 %v6_v0 }
   0x4   :  {}
   0x5 PF: > { %9 = vst [vmem:[#allocation2] sm:$0xff] %v8_v1 }
   0x6   :  { %10 = shalt.err (%p11_p0) }
"""

ALLOCATIONS = """\
  #allocation0 [shape = 'u32[]', space=smem, size = 0x4, offset = 0x4, fixed_abs, tag = 'core index']
  #allocation1 [shape = 'u32[144,128]{1,0:T(1,128)}', space=vmem, size = 0x12000, scoped, tag = 'internal scratch']
  #allocation2 [shape = 'bf16[2,8]{1,0:T(8,128)(2,1)}', space=vmem, size = 0x1000, scoped, tag = 'scratch operand']
"""

ANALYSIS = """\
Schedule analysis:
\ttotal scheduled bundles:    7
\t7.00 scheduled bundles (100.00%): %some_kernel.1 = bf16[8]{0} custom-call(), custom_call_target="tpu_custom_call"
"""


def dump(folder: Path, kernel: str, analysis: str = ANALYSIS) -> None:
    texts = {
        "02-original": ALLOCATIONS.replace("0x1000", "0x8"),
        "54-post-ra": ALLOCATIONS,
        f"70-{tpu_dump.UTILIZATION}": UTILIZATION,
        f"71-{tpu_dump.ANALYSIS}": analysis,
        f"72-{tpu_dump.BUNDLES}": BUNDLES,
    }
    for stage, text in texts.items():
        (folder / f"1795301086036515111-{kernel}-{stage}.txt").write_text(text)


def test_a_dump_is_read(tmp_path: Path) -> None:
    dump(tmp_path, "some_kernel.1")
    dump(tmp_path, "fusion.2", ANALYSIS.replace("tpu_custom_call", "other"))
    dump(tmp_path, "TLP")
    (kernel,) = tpu_dump.read(tmp_path)
    assert kernel.name == "some_kernel"
    assert (kernel.whole.bundles, kernel.spills, kernel.fills, kernel.vmem) == (7, 2, 3, 0x13000)
    assert kernel.whole.percent("MXU") == pytest.approx(100 * 3 / 14)
    assert (kernel.loop.bundles, kernel.loop.percent("MXU")) == (3, 50.0)
    assert kernel.loop.percent("VALU") == pytest.approx(100 * 6 / 12)
    assert (kernel.loop_spills, kernel.loop_fills) == (1, 2)


def test_loops_nest() -> None:
    assert sorted(tpu_dump.loops(BUNDLES)) == [(1, 6), (2, 5)]
    assert tpu_dump.loops("     0   :  { %s1 = smov 1 }\n") == []


def outcome(**fields: object) -> tpu_compile.Outcome:
    part = tpu_dump.Part(10, (("MXU", 25.0), ("VALU", 50.0), ("VLOAD", 5.0), ("VSTORE", 4.6)))
    kernel = tpu_dump.Kernel("some_kernel", part, part, 4, 3, 2, 1, 2048)
    return tpu_compile.Outcome(**({"case": "rpa", "target": "v6e", "kernels": (kernel,), "temporary": 3072} | fields))  # type: ignore[arg-type]


def test_the_page_has_a_line_for_each_kernel() -> None:
    text = tpu_compile.document([outcome(), outcome(target="v4", kernels=(), error="X: no")], "2026-11-21.")
    assert "| rpa | some_kernel | 10 | 10 | 25 % | 50 % | 5 % | 5 % | 4 (3) | 2 (1) | 2 | 3 |" in text
    assert "| rpa | X: no | - |" in text
    assert "2 compilations, 1 failure of ours." in text


def test_what_counts_as_a_failure() -> None:
    peer = next(iter(PEERS))
    assert tpu_compile.failures([outcome(), outcome(case=peer, error="X: no")]) == []
    assert tpu_compile.failures([outcome(error="X: no")]) == ["v6e rpa: X: no"]


def test_cases_are_chosen_by_name_or_operation() -> None:
    chosen = tpu_compile.names("v4", "ragged_paged_attention")
    assert "rpa_32x8_d128_bf16" in chosen
    assert "jax_rpa_32x8_d128_bf16" in chosen
    assert not [name for name in chosen if "paged_32x8" in name]
    assert tpu_compile.names("v4", "paged_32x8_d128_f32") == ["paged_32x8_d128_f32_cap"]
    shown = {*tpu_cases.EVERYWHERE, *tpu_cases.FURTHER}
    assert {*tpu_compile.names(tpu_cases.MOST)} == shown | {*PEERS}
    assert {*tpu_compile.names("v4")} == {*tpu_cases.EVERYWHERE} | {
        name for name in PEERS if name.removeprefix("jax_") in tpu_cases.EVERYWHERE
    }


def test_every_operation_is_compiled_for_every_kind() -> None:
    operations = {tpu_cases.find(name).operation for name in tpu_cases.EVERYWHERE}
    assert operations == {case.operation for case in tpu_cases.CASES}


def test_without_the_compiler_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tpu_compile.importlib.util, "find_spec", lambda name: None)
    assert tpu_compile.main([]) == 2
    assert "expected the TPU compiler, the package libtpu, to be installed" in capsys.readouterr().err


def test_a_case_that_fails_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(target: str) -> None:
        raise RuntimeError(f"no machine of {target}\nbut | others")

    monkeypatch.setattr(tpu_compile, "_mesh", nowhere)
    found = tpu_compile.compile_case("rpa_32x8_d128_bf16", "v6e", str(tmp_path), {})
    assert found.error == "RuntimeError: no machine of v6e but / others"


def test_the_page_is_complete() -> None:
    text = tpu_compile.DOCUMENT.read_text()
    assert text.startswith(tpu_compile.HEADER)
    assert re.search(r"^\d{4}-\d\d-\d\d, commit [0-9a-f]+, jax [\d.]+, jaxlib [\d.]+, libtpu [\d.]+\.$", text, re.M)
    assert "no failures of ours" in text
    for target in TARGETS:
        part = text.partition(f"\n## {target}\n")[2].partition("\n## ")[0]
        for name in tpu_compile.names(target):
            assert f"| {name} |" in part, f"{name} on {target}"
