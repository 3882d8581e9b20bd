"""What a machine with a Hopper GPU is asked of the CUDA kernels, as steps of `benchmarks.device`.

build: compiles them and times it. sanitizers: small calls under compute-sanitizer's checkers of memory, of races in
shared memory and of barriers. flashmla: FlashMLA's own cases. Rehearsed on a CPU, all three use the emulation.
"""

import contextlib
import importlib
import importlib.util
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.cases.base import Case
from benchmarks.cases.mla import LatentCase, batch
from benchmarks.device.session import Session, apart, apart_checked, compute_sanitizer, outcomes
from benchmarks.run import to_numpy
from ragged_attention import dispatch, kernels_cuda
from ragged_attention.errors import BackendMissing
from ragged_attention.kernels_cuda import _native
from ragged_attention.kernels_cuda._build import compile as kernels
from ragged_attention.kernels_cuda._build import toolchain
from ragged_attention.samples import device_of
from ragged_attention.testing.paged.specs import garbage

TOOLS = ("memcheck", "racecheck", "synccheck")


def _small(name: str, heads: int, num_seqs: int = 3, **fields: Any) -> LatentCase:
    return batch(name, "-", num_seqs, heads, max_len=150, **fields)


# A case for each kernel and each way in which it finds its rows: a checker slows a kernel down a hundredfold.
SMALL = (
    _small("dense", 128, num_q_tokens=2, causal=True),
    _small("dense_odd_pages", 16, page_size=24, dtype="float16"),
    _small("dense_512", 8, d_qk=512, num_kv_heads=2),
    _small("lists", 64, topk=130),
    _small("lists_512", 128, topk=70, d_qk=512, page_size=1),
    _small("lists_fp8", 128, topk=130, num_q_tokens=2, cache_format="fp8_v32"),
    _small("lists_fp8_h16", 16, topk=130, cache_format="fp8_v32", sinks=True),
    _small("lists_fp8_h32", 32, topk=130, cache_format="fp8_v32"),
    _small("lists_v4", 64, topk=130, d_qk=512, cache_format="fp8_v4"),
    _small("lists_v41_fp4", 64, topk=130, d_qk=512, cache_format="fp8_v41", extra_topk=70, extra_format="fp4_v41"),
    _small("prefill", 128, num_seqs=1, num_q_tokens=3, topk=130, prefill=True, sinks=True),
    _small("prefill_fp8", 16, num_seqs=1, num_q_tokens=3, topk=90, prefill=True, cache_format="fp8_v32"),
)


def exercise(seeds: int, device: str = "cuda", cases: tuple[LatentCase, ...] = SMALL) -> None:
    """Every kind of call, in one split and several, with valid tables, and with arbitrary numbers in them."""
    for seed in range(seeds):
        for case in cases:
            _valid(case, seed, device)
            _invalid(case, seed, device)


def _valid(case: LatentCase, seed: int, device: str) -> None:
    """Right whatever the splits; a decode also by a schedule."""
    import ragged_attention.torch as front

    inputs = case.torch_inputs(seed, device)
    operation = getattr(front, case.operation)
    for num_splits in (1, 2):
        out = operation(**inputs, backend="cuda", options={"num_splits": num_splits})[0]
        case.check(inputs, out, to_numpy)
    if not case.prefill:
        schedule = front.make_decode_schedule(
            None if case.topk else inputs["kv_lens"], case.max_num_seqs, case.num_q_tokens, case.num_q_heads,
            case.num_kv_heads, topk=case.topk or None, num_parts=4, device=device, backend="cuda",
        )  # fmt: skip
        case.check(inputs, operation(**inputs, backend="cuda", schedule=schedule)[0], to_numpy)


def _invalid(case: LatentCase, seed: int, device: str) -> None:
    """Finite, and nothing outside the arrays is touched, which the checkers see."""
    import torch

    import ragged_attention.torch as front

    generator, inputs = np.random.default_rng(seed), case.torch_inputs(seed, device)
    for name, table in case.numpy_inputs(seed).items():
        if name in ("page_indices", "kv_lens", "indices"):
            near = case.max_num_seqs * case.max_len
            inputs[name] = torch.from_numpy(garbage(generator, table.shape, near)).to(device)
    out = getattr(front, case.operation)(**inputs, backend="cuda", options={"num_splits": 2})[0]
    if not bool(out.isfinite().all()):
        raise AssertionError(f"expected finite results of {case.name} from finite inputs, got others")


# ---- where the kernels can run


@contextlib.contextmanager
def in_place(session: Session) -> Iterator[None]:
    """Where backend `cuda` runs: on the device, or in the emulation of a rehearsal."""
    with kernels_cuda.emulating() if session.rehearse else contextlib.nullcontext():
        yield


def absent(session: Session) -> str | None:
    """Why backend `cuda` does not run here."""
    if session.rehearse:
        return toolchain.missing_to_emulate()
    try:
        status = _native.status()
    except BackendMissing as missing:
        return str(missing)
    return status.text if status.code else None


def takes(case: Case, framework: str, device: str) -> bool:
    """Whether the CUDA kernels take a case as it comes from the device."""
    try:
        return dispatch.refusal("cuda", case.attention_call(device_of(framework, device))) is None
    except BackendMissing:
        return False


# ---- steps


def build(session: Session) -> bool:
    """The library, and the one for jax where it is installed; what each took, unless it was there already."""
    rows: dict[str, Any] = session.report.setdefault("cuda_build", {})
    nvcc, include = toolchain.nvcc(), toolchain.cutlass()
    rows["nvcc"] = nvcc.release if nvcc else "absent"
    rows["CUTLASS"] = toolchain.cutlass_release(include) if include else "absent"
    try:
        if session.rehearse:
            _timed(rows, "emulation", kernels.emulation_recipe())
        else:
            path = _timed(rows, "kernels", kernels.kernels_recipe())
            if importlib.util.find_spec("jax"):
                _timed(rows, "for jax", kernels.ffi_recipe(importlib.import_module("jax.ffi").include_dir(), path))
            status = _native.status()
            rows["device"] = status.text if status.code else f"sm_{status.major}{status.minor}"
    except BackendMissing as missing:
        rows["failed"] = str(missing)
        return False
    rows.pop("failed", None)
    return absent(session) is None


def _timed(rows: dict[str, Any], what: str, recipe: kernels.Recipe) -> Any:
    """Build by a recipe; a library that was there already keeps the time that an earlier command saw."""
    if recipe.path.is_file():
        rows.setdefault(what, "was built already")
        return recipe.path
    began = time.monotonic()
    path = kernels.build(recipe)
    rows[what] = f"built in {time.monotonic() - began:.0f} s"
    return path


def sanitizers(session: Session) -> bool:
    """The small calls under each checker, or, in a rehearsal, under none."""
    rows = session.report.setdefault("sanitizers", {})
    tool = None if session.rehearse else compute_sanitizer()
    reason = absent(session) or (None if tool or session.rehearse else "compute-sanitizer is not here")
    for name in TOOLS[:1] if session.rehearse else TOOLS:
        if reason or rows.get(name, {}).get("result") == "passed":
            rows.setdefault(name, {"result": "cannot run", "seconds": 0.0, "said": [reason]})
            continue
        code = f"from benchmarks.device.cuda import exercise; exercise({1 if session.quick else 3})"
        if session.rehearse:
            code = (
                "from benchmarks.device import cuda as d\n"
                "with d.kernels_cuda.emulating(): d.exercise(1, 'cpu', d.SMALL[3:4])"
            )
        rows[name] = apart_checked(session, tool, name, code, "something was found")
        session.store()
    return all(row["result"] in ("passed", "cannot run") for row in rows.values())


def flash_mla(session: Session) -> bool:
    """FlashMLA's cases by backend `cuda`."""
    if reason := absent(session):
        session.report["flash_mla"] = {"result": "cannot run", "seconds": 0.0, "said": [reason]}
        return True
    arguments = ["--backend", "cuda", "--device", session.device]
    if session.rehearse:
        arguments += ["--list", "e0", "--heads", "2", "--max-tokens", "60", "--covering", "--limit", "3"]
    elif session.quick:
        arguments += ["--covering"]
    command = [sys.executable, "-m", "benchmarks.flash_mla_matrix", *arguments]
    session.report["flash_mla"] = apart(session, command, {0: "passed"}, COLUMNS="160")
    return session.report["flash_mla"]["result"] == "passed"


# ---- the report


def markdown(report: dict[str, Any]) -> list[str]:
    """These steps' part of the page."""
    lines: list[str] = []
    if rows := report.get("cuda_build"):
        lines += ["## CUDA kernels", "", *(f"- {name}: {_one_line(text)}" for name, text in rows.items()), ""]
    if rows := report.get("sanitizers"):
        lines += outcomes("Checkers on the CUDA kernels", "checker", rows)
    if row := report.get("flash_mla"):
        lines += ["## FlashMLA's cases by the CUDA kernels", "", f"{row['result']} in {row['seconds']} s.", ""]
        lines += ["```", *row["said"], "```", ""]
    return lines


def _one_line(text: Any) -> str:
    lines = str(text).splitlines()
    return lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
