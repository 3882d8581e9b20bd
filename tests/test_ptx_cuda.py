"""Our CUDA kernels in the PTX emulator: nvcc's PTX for Hopper, launched by each kernel's own host code.

`make test` runs the kernels for few heads and the kernel that makes schedules, whose files compile in half a minute.
The shards run a call of every kernel, every check of the suite, and planted faults.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

pytest.importorskip("torch")

from benchmarks import ptx_faults
from ragged_attention.kernels_cuda import _abi, _native
from ragged_attention.kernels_cuda._build import compile, toolchain
from ragged_attention.testing import suite
from ragged_attention.testing.mla.cache_specs import ScheduleSpec
from ragged_attention.testing.mla.oracle import check_decode, check_decode_by_schedule, check_prefill, check_schedule
from ragged_attention.testing.mla.specs import DecodeSpec, PrefillSpec
from ragged_attention.testing.ptx import recorded
from ragged_attention.testing.ptx_runner import SCHEDULES, CompiledRunner
from ragged_attention.testing.runner import ANSWERED
from ragged_attention.testing.verdicts import verdict_of

if reason := toolchain.missing_to_compile() or compile.missing_to_store():
    pytest.skip(reason, allow_module_level=True)

SEESAW = "6SeesawIN7cutlass"
BFLOAT16, FLOAT16 = f"{SEESAW}10bfloat16_tE", f"{SEESAW}6half_tE"
MERGE, MERGE_HALVES = "7CombineIN7cutlass10bfloat16_tE", "7CombineIN7cutlass6half_tE"
MERGE_FEW, DEAL = "13NarrowCombine", "4Deal"
FEW: Mapping[str, Any] = {"topk": 150, "kv_lens": (200, 60), "format": "fp8_v32"}


def decode(**fields: Any) -> DecodeSpec:
    """A batch of latent decode: by default sparse, with bfloat16 rows of 576 columns in pages of 64."""
    defaults = {"topk": 150, "kv_lens": (200, 60), "page_size": 64, "dtype": "bfloat16", "d_qk": 576, "d_v": 512}
    return DecodeSpec(**defaults | fields)  # type: ignore[arg-type]


def prefill(**fields: Any) -> PrefillSpec:
    defaults = {"topk": 150, "rows": 200, "tokens": 2, "heads": 16, "dtype": "bfloat16", "d_qk": 576, "d_v": 512}
    return PrefillSpec(**defaults | fields)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Case:
    """A call, and the kernels that it launches.

    `kernels` has a distinctive part of each kernel's name. The kernel that makes schedules is not among them. `splits`
    is the option `num_splits`, or None if a schedule divides the keys.
    """

    spec: DecodeSpec | PrefillSpec
    kernels: tuple[str, ...]
    splits: int | None = 1

    def check(self, runner: CompiledRunner) -> None:
        batch: Any = self.spec.build()
        if self.splits is None:
            check_decode_by_schedule(runner, batch)
        elif isinstance(self.spec, PrefillSpec):
            check_prefill(runner, batch, {"num_splits": self.splits})
        else:
            check_decode(runner, batch, {"num_splits": self.splits})


FEW_HEADS = {
    "8 heads": Case(decode(**FEW, heads=8), ("6NarrowILi1ELb0E",)),
    "16 heads": Case(decode(**FEW, heads=16, sinks="normal", q_tokens=2), ("6NarrowILi2ELb0E",)),
    "32 heads": Case(decode(**FEW, heads=32, lens="wild"), ("6NarrowILi2ELb1E",)),
    "16 heads, 3 splits": Case(decode(**FEW, heads=16), ("6NarrowILi2ELb0E", MERGE_FEW), 3),
    "32 heads, by a schedule": Case(decode(**FEW, heads=32), ("6NarrowILi2ELb1E", MERGE_FEW), None),
    "prefill": Case(prefill(heads=16, format="fp8_v32", page_size=64), ("6NarrowILi2ELb0E",)),
}
DENSE: Mapping[str, Any] = {"topk": 0, "causal": True, "q_tokens": 2, "heads": 16}
V41: Mapping[str, Any] = {"heads": 64, "format": "fp8_v41"}
CASES = {
    **FEW_HEADS,
    "dense": Case(decode(**DENSE), (f"{BFLOAT16}Li576ELb0E",)),
    "dense, pages of two blocks": Case(decode(**DENSE | {"page_size": 128}), (f"{BFLOAT16}Li576ELb0E",)),
    "dense, row by row": Case(decode(**DENSE | {"page_size": 24}), (f"{BFLOAT16}Li576ELb0E", MERGE), 2),
    "dense, float16": Case(decode(**DENSE, dtype="float16"), (f"{FLOAT16}Li576ELb0E", MERGE_HALVES), None),
    "dense, 512 columns": Case(decode(**DENSE, d_qk=512), (f"{BFLOAT16}Li512ELb0E", MERGE), None),
    "dense, 512 columns, float16": Case(decode(**DENSE, d_qk=512, dtype="float16"), (f"{FLOAT16}Li512ELb0E",)),
    "lists": Case(decode(heads=64, sinks="normal"), (f"{BFLOAT16}Li576ELb1E", MERGE), None),
    "lists, 512 columns": Case(decode(heads=128, d_qk=512), (f"{BFLOAT16}Li512ELb1E", MERGE), 2),
    "fp8_v32": Case(decode(heads=64, format="fp8_v32"), ("9Fp8Decode",)),
    "fp8_v32, by a schedule": Case(decode(heads=64, format="fp8_v32"), ("9Fp8Decode", MERGE), None),
    "fp8_v4": Case(decode(heads=64, format="fp8_v4"), ("5Fp8V4", MERGE), 2),
    "fp8_v41": Case(decode(**V41), ("3V41", MERGE), None),
    "fp8_v41, scales behind a page": Case(decode(**V41 | {"format": "fp8_v41, page"}), ("3V41",)),
    "fp8_v41 beside fp4_v41": Case(
        decode(**V41, extra_format="fp4_v41", extra_topk=70, extra_slots=128), ("3V41", MERGE), 2
    ),
    "fp4_v41": Case(decode(heads=64, format="fp4_v41"), ("3V41",)),
    "prefill of lists": Case(prefill(heads=64, sinks="normal"), (f"{BFLOAT16}Li576ELb1E",)),
    "prefill of lists, 2 splits": Case(prefill(d_qk=512), (f"{BFLOAT16}Li512ELb1E", MERGE), 2),
    "prefill, fp8_v32": Case(prefill(heads=64, format="fp8_v32", page_size=64), ("9Fp8Decode",)),
    "prefill, fp8_v4": Case(prefill(heads=64, format="fp8_v4", page_size=64), ("5Fp8V4",)),
    "prefill, fp8_v41": Case(prefill(heads=64, format="fp8_v41", page_size=64), ("3V41",)),
    "prefill, fp4_v41": Case(prefill(heads=64, format="fp4_v41", page_size=64), ("3V41",)),
}  # fmt: skip


@functools.cache
def runner_of(seed: int | None) -> CompiledRunner:
    return CompiledRunner(backend="cuda", seed=seed)


def expect_right(case: Case, seed: int | None) -> None:
    """Assert that results agree with the reference, nothing is reported, and exactly the case's kernels have run."""
    runner = runner_of(seed)
    runner.emulator.launches.clear()
    with runner.around():
        case.check(runner)
    ran = {name for name in runner.emulator.launches if DEAL not in name}
    assert len(ran) == len(case.kernels)
    for kernel in case.kernels:
        assert any(kernel in name for name in ran), (kernel, ran)


@pytest.mark.parametrize("seed", SCHEDULES)
@pytest.mark.parametrize("name", FEW_HEADS)
def test_few_heads(name: str, seed: int | None) -> None:
    expect_right(FEW_HEADS[name], seed)


@pytest.mark.parametrize("topk", [0, 150])
def test_a_schedule_is_that_of_the_definition(topk: int) -> None:
    runner = runner_of(None)
    with runner.around():
        check_schedule(runner, ScheduleSpec(seqs=70, topk=topk).build())


@pytest.mark.parametrize("seed", SCHEDULES)
@pytest.mark.parametrize("name", [name for name in CASES if name not in FEW_HEADS])
def test_a_kernel_agrees_with_the_definition(name: str, seed: int | None) -> None:
    expect_right(CASES[name], seed)


def test_every_kernel_has_a_case() -> None:
    texts = [recorded.Library(_native.recorder(function)).text for function in _abi.LAUNCHERS]
    compiled = {name for text in texts for name in re.findall(r"\.entry\s+(\w+)", text)}
    wanted = {kernel for case in CASES.values() for kernel in case.kernels} | {DEAL}
    assert not [name for name in compiled if not any(kernel in name for kernel in wanted)]


# ---- the suite

PIECES = 6


@pytest.mark.parametrize("piece", range(PIECES))
@pytest.mark.parametrize("seed", SCHEDULES)
def test_the_suite(seed: int | None, piece: int) -> None:
    runner = runner_of(seed)
    verdicts = [verdict_of(runner, check, 1) for check in suite.checks()[piece::PIECES]]
    ANSWERED.update((operation, "cuda") for one in verdicts for operation in one.answered)  # each verdict clears it
    wrong = [f"{one.check}: {one.message}" for one in verdicts if one.result == "FAILED"]
    assert not wrong, "\n".join(wrong)
    assert sum(one.result == "passed" for one in verdicts) > 20


# ---- planted faults


SYNCHRONISES = (
    "bar.sync dropped", "mbarrier wait dropped", "mbarrier arrival dropped", "mbarrier for one arrival more",
    "setmaxnreg.dec dropped",
)  # fmt: skip
MULTIPLIES = ("bar.arrive dropped", "arrival after copies dropped", "cp.async dropped", "matrices transposed, or not")
FETCHES = ("bulk copy dropped", "more bytes expected at an mbarrier", "fence.proxy.async dropped")
# For each kernel, the kinds of faults that are noticed at both places where they are planted. `fp8_v32` leaves out two
# dropped waits. One repeats a wait of the other warpgroup. The other protects registers, and PTX has no limit of those.
FAULTS = {
    "cuda fp8_v32 of 16 heads": (*SYNCHRONISES, *FETCHES),
    "cuda merge of few rows": ("griddepcontrol.wait dropped",),
    "cuda fp8_v32 of 32 heads": (*SYNCHRONISES, *FETCHES),
    "cuda merge": ("griddepcontrol.wait dropped",),
    "cuda lists": (*SYNCHRONISES, *MULTIPLIES, "wgmma.wait_group dropped"),
    "cuda fp8_v32": ("bar.sync dropped", *SYNCHRONISES[2:], *MULTIPLIES),
    "cuda fp8_v4": (*SYNCHRONISES, *MULTIPLIES),
    "cuda fp8_v41 and fp4_v41": (*SYNCHRONISES, *MULTIPLIES),
    "cuda dense": (*SYNCHRONISES, "bar.arrive dropped", "more bytes expected at an mbarrier"),
    "cuda dense, row by row": (*SYNCHRONISES, *MULTIPLIES),
}
FEW_HEADS_FAULTS = list(FAULTS)[:2]


@functools.lru_cache(maxsize=1)
def judge_of(kernel: str) -> ptx_faults.Judge:
    return ptx_faults.Judge("sm_90", kernel)


def expect_noticed(kernel: str, kind: str) -> None:
    judge = judge_of(kernel)
    answers = {line: judge(line, ptx_faults.KINDS[kind][1]) for line in judge.sites(kind, 2)}
    assert answers
    for line, answer in answers.items():
        assert answer.kind not in ("unnoticed", "other bits"), (line, answer)


def planted(kernels: Iterable[str]) -> list[Any]:
    return [pytest.param(kernel, kind, id=f"{kernel}-{kind}") for kernel in kernels for kind in FAULTS[kernel]]


@pytest.mark.parametrize(("kernel", "kind"), planted(FEW_HEADS_FAULTS))
def test_faults_of_few_heads_are_noticed(kernel: str, kind: str) -> None:
    expect_noticed(kernel, kind)


@pytest.mark.parametrize(("kernel", "kind"), planted(list(FAULTS)[2:]))
def test_planted_faults_are_noticed(kernel: str, kind: str) -> None:
    expect_noticed(kernel, kind)
