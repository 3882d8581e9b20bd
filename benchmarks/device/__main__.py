"""All that a machine with a GPU is good for, in one command.

    python -m benchmarks.device [--quick] [--out DIR] [--steps env,build,...] [--minutes N]

Steps: env (versions, device, measured ceilings), build (the CUDA kernels, timed), conformance (every backend, both
front ends), checks (torch.compile, graph replay with changed lengths, streams, no synchronisation), memcheck (any index
values under compute-sanitizer), sanitizers (its three checkers on the CUDA kernels), flashmla (FlashMLA's own cases by
them), bench (the cases W1 to W13 with the peers present). Results are written as they come, as JSON and Markdown, and a
later command with the same folder, device and commit goes on where the last one stopped, so each can stay short.
"""

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.cases.base import Case
from benchmarks.cases.catalogue import CASES
from benchmarks.device import cuda as device_cuda
from benchmarks.device.session import ROOT, Session, apart, apart_checked, compute_sanitizer, outcomes
from benchmarks.peers import registry
from benchmarks.run import HEADS, Machine, Result, cells, default_backends, is_red, run_case, this_machine
from ragged_attention.tuning import device_slug

STEPS = ("env", "build", "conformance", "checks", "overhead", "memcheck", "sanitizers", "flashmla", "bench")
PACKAGES = ("torch", "triton", "jax", "jaxlib", "jax-triton", "numpy", "nvidia-cutlass", "flashinfer-python", "vllm")
CHECKED = (
    "decode_64x4k", "mixed_2q2k_32q1s1k", "gpt_oss_window_64x4k", "fp8_64x4k", "speculative_64q4s4k",
    "mla_dense_h128_128q2s4k", "mla_sparse_h16_b8", "mla_sparse_v4_h64_128q2", "mla_prefill_fp8_h128_32k",
    "mha_gqa_8x2k", "mha_gqa_8x2k_backward",
)  # fmt: skip
QUICK = (
    "decode_64x4k", "prefill_4k", "mixed_2q2k_32q1s1k", "gpt_oss_full_64x4k", "fp8_64x4k",
    "mla_dense_h16_128x4k", "mla_sparse_h128_128q2", "mla_sparse_h16_b8", "mla_prefill_h128_32k",
    "mha_128_4k", "mha_128_4k_backward", "mha_192_4k", "mha_192_4k_backward",
)  # fmt: skip
REHEARSED = ("decode_64x4k", "mixed_2q2k_32q1s1k", "mla_sparse_h16_b8", "mha_gqa_8x2k_backward")
CHECKED_CUDA = (
    "mla_dense_h128_128q2s4k", "mla_sparse_bf16_h128_32q2", "mla_sparse_h16_b8", "mla_prefill_h128_32k",
    "mla_prefill_fp8_h128_32k",
)  # fmt: skip
REHEARSED_CUDA = ("mla_sparse_h16_b8",)


def commit() -> str:
    """The commit of the checkout, with a mark where files differ from it; empty where git cannot say."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=ROOT, capture_output=True, text=True
    )
    return done.stdout.strip() if done.returncode == 0 else ""


def begin(options: argparse.Namespace, console: Console) -> Session:
    """A session that goes on with the report of this day, device and commit, if there is one."""
    import torch

    name = "rehearsal" if options.rehearse else torch.cuda.get_device_name()
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    head = {"name": f"{today}_{device_slug(name)}", "device": name, "date": today, "commit": options.commit or commit()}
    path = options.out / f"{head['name']}.json"
    report = json.loads(path.read_text()) if path.is_file() else {}
    if report.get("commit") != head["commit"]:
        report = head
    until = time.monotonic() + 60 * options.minutes
    return Session(options.out, options.quick, options.rehearse, until, console, report, markdown)


# ---- steps


def environment(session: Session) -> bool:
    """Versions, the device as its driver describes it, and the ceilings that floors are computed from."""
    facts: dict[str, Any] = {"python": platform.python_version(), "machine": platform.machine()}
    for package in PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "absent"
    if shutil.which("nvidia-smi"):
        query = "--query-gpu=name,driver_version,clocks.sm,clocks.mem,temperature.gpu,power.limit"
        done = subprocess.run(["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True)
        facts["nvidia-smi"] = done.stdout.strip()
    if not session.rehearse:
        from benchmarks import timing

        facts["copy_bytes_per_second"] = timing.copy_bandwidth()
        facts["bf16_flops_per_second"] = timing.matmul_rate()
    facts["peers"] = {name: why or "present" for name, why in registry.presence().items()}
    session.report["env"] = facts
    return True


def conformance(session: Session) -> bool:
    """The shipped suite on every backend through both front ends, each in a process of its own."""
    rows = session.report.setdefault("conformance", {})
    cuda = () if device_cuda.absent(session) else ("cuda",)
    backends = {"torch": ("triton", "eager", *cuda), "jax": ("triton", "xla", *cuda)}
    examples = 2 if session.quick else 25
    for framework, names in backends.items():
        for backend in names:
            key = f"{framework}-{backend}"
            if rows.get(key, {}).get("result") == "passed" or importlib.util.find_spec(framework) is None:
                continue
            arguments = ["--backend", backend, "--framework", framework, "--device", session.device]
            arguments += ["--examples", str(examples)] + (["--only", "decode"] if session.rehearse else [])
            code = f"import sys; from ragged_attention.testing.conformance import main; sys.exit(main({arguments!r}))"
            rows[key] = apart(session, [sys.executable, "-c", code], {0: "passed", 2: "cannot run"})
            session.store()
            if session.left < 60:
                break
    return all(row["result"] in ("passed", "cannot run") for row in rows.values())


def checks(session: Session) -> bool:
    from benchmarks.device import checks as device_checks

    cases = device_checks.small(REHEARSED if session.rehearse else CHECKED, 48 if session.rehearse else 333)
    backend = "eager" if session.rehearse else "triton"
    timed = None if session.rehearse else CASES["decode_64x4k"]
    found = device_checks.checks(cases, backend, session.device, timed=timed)
    if not device_cuda.absent(session):
        length = 48 if session.rehearse else 333
        cases = device_checks.small(REHEARSED_CUDA if session.rehearse else CHECKED_CUDA, length)
        timed = None if session.rehearse else CASES["mla_dense_h128_128x4k"]
        with device_cuda.in_place(session):
            found += device_checks.checks(cases, "cuda", session.device, timed=timed)
    session.report["checks"] = [dataclasses.asdict(check) for check in found]
    return all(check.passed for check in found)


def overhead(session: Session) -> bool:
    """What calls cost the host, in a process where Triton compiles."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "overhead.json")
        cases = [REHEARSED[0]] if session.rehearse else []
        command = [sys.executable, "-m", "benchmarks.overhead", *cases, "--json", str(file)]
        done = apart(session, command, {0: "passed"}, TRITON_INTERPRET="0")
        session.report["overhead"] = done | {"calls": json.loads(file.read_text()) if file.is_file() else []}
    return done["result"] == "passed"


def memcheck(session: Session) -> bool:
    """Calls with any index values, under the memory checker where there is one."""
    tool = compute_sanitizer()
    if tool is None or session.rehearse:
        session.report["memcheck"] = {"result": "cannot run", "said": ["compute-sanitizer is not here"]}
        return True
    code = f"from benchmarks.device.checks import poke; poke({4 if session.quick else 24})"
    session.report["memcheck"] = apart_checked(session, tool, "memcheck", code, "stray accesses")
    return session.report["memcheck"]["result"] == "passed"


def bench(session: Session) -> bool:
    """Every case with every peer; those that this report already has are not timed again."""
    done = session.report.setdefault("bench", {})
    chosen = [case for case in CASES.values() if not session.quick or case.name in QUICK]
    if session.rehearse:
        chosen = [CASES[name].scaled_down(length=48) for name in REHEARSED]
    machine = _machine(session)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=session.console) as progress:
        task = progress.add_task("timing", total=len(chosen))
        for case in chosen:
            progress.update(task, advance=1, description=case.name)
            if case.name in done or session.left < 30:
                continue
            done[case.name] = [result.as_json() for result in _one_case(case, machine, session)]
            session.store()
    session.report["bench_missing"] = [case.name for case in chosen if case.name not in done]
    return not any(is_red(Result(**row)) for rows in done.values() for row in rows)


def _machine(session: Session) -> Machine:
    facts = session.report.get("env", {})
    if session.rehearse:
        return Machine("torch", False, "CPU")
    if "copy_bytes_per_second" not in facts:
        return this_machine("torch", ceilings=True)
    return Machine(
        "torch", True, session.report["device"], facts["copy_bytes_per_second"], facts["bf16_flops_per_second"]
    )


def _one_case(case: Case, machine: Machine, session: Session) -> list[Result]:
    import torch

    rounds = 3 if session.rehearse else 20 if session.quick else 50
    backends = default_backends(machine)
    if not device_cuda.absent(session):
        with device_cuda.in_place(session):
            if device_cuda.takes(case, "torch", session.device):
                backends.insert(0, "cuda")  # what the others are compared with
    if machine.gpu and case.num_tokens > 64:
        backends = [name for name in backends if name != "eager"]  # minutes, and it answers no question there
    with device_cuda.in_place(session) if "cuda" in backends else contextlib.nullcontext():
        results = run_case(case, machine, backends, with_peers=not session.rehearse, rounds=rounds)
    if machine.gpu:
        torch.cuda.empty_cache()
    return results


RUN: dict[str, Callable[[Session], bool]] = {
    "env": environment,
    "build": device_cuda.build,
    "conformance": conformance,
    "checks": checks,
    "overhead": overhead,
    "memcheck": memcheck,
    "sanitizers": device_cuda.sanitizers,
    "flashmla": device_cuda.flash_mla,
    "bench": bench,
}


# ---- the report


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    lines = [f"# {report['device']}, {report['date']}", "", f"Commit {report['commit'] or 'unknown'}.", ""]
    if facts := report.get("env"):
        lines += ["## Environment", ""]
        lines += [f"- {name}: {_fact_line(name, value)}" for name, value in facts.items() if name != "peers"]
        lines += ["", "Peers: " + "; ".join(f"{name}: {why}" for name, why in facts["peers"].items()) + ".", ""]
    if rows := report.get("conformance"):
        lines += outcomes("Conformance", "backend", rows)
    if found := report.get("checks"):
        lines += ["## Checks", "", "| check | result |", "|---|---|"]
        for check in found:
            message = check["message"].replace("\n", " ").replace("|", "/")
            lines.append(f"| {check['name']} | {'passed' if check['passed'] else 'FAILED: ' + message} |")
        lines.append("")
    if row := report.get("overhead"):
        lines += ["## Microseconds of the host per call", ""]
        lines += _overhead_lines(row["calls"]) if row["calls"] else ["```", *row["said"][-25:], "```", ""]
    if row := report.get("memcheck"):
        lines += ["## Memory checker", "", f"{row['result']}. {' '.join(row['said'][-1:])}", ""]
    return "\n".join(lines + device_cuda.markdown(report) + _bench_lines(report))


def _overhead_lines(calls: Sequence[dict[str, Any]]) -> list[str]:
    rows = [[f"{value:.1f}" if isinstance(value, float) else str(value) for value in call.values()] for call in calls]
    return [f"| {' | '.join(row)} |" for row in (list(calls[0]), ["---"] * len(calls[0]), *rows)] + [""]


def _fact_line(name: str, value: Any) -> str:
    if name.endswith("bytes_per_second"):
        return f"{value / 1e12:.2f} TB/s"
    return f"{value / 1e12:.0f} TFLOP/s" if name.endswith("flops_per_second") else str(value)


def _bench_lines(report: dict[str, Any]) -> list[str]:
    rows = [Result(**row) for name, rows in report.get("bench", {}).items() for row in rows]
    if not rows:
        return []
    lines = ["## Times", ""]
    lines += [
        "Kernel time, cold L2 cache, median. `time / ours`: above 1, ours is faster. `host us`: a call, ungraphed."
    ]
    lines += ["", "| | " + " | ".join(HEADS) + " |", "|---" * (1 + len(HEADS)) + "|"]
    for row in sorted(rows, key=lambda row: (len(row.workload), row.workload)):
        lines.append(f"| {row.workload} | " + " | ".join(cell.replace("|", "/") for cell in cells(row)) + " |")
    if missing := report.get("bench_missing"):
        lines += ["", "Not reached in time: " + ", ".join(missing) + "."]
    return [*lines, ""]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.device", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a minute or two: fewer cases, rounds and examples")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results")
    parser.add_argument("--steps", default=",".join(STEPS), help=f"some of {','.join(STEPS)}")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin nothing that this leaves no time for")
    parser.add_argument("--commit", default="", help="the commit to report, where git cannot say")
    parser.add_argument("--allow-no-gpu", action="store_true", help="exit with 0 where there is no GPU")
    parser.add_argument("--rehearse", action="store_true", help="run the steps' plumbing on the CPU, on tiny cases")
    options = parser.parse_args(argv)
    options.steps = options.steps.split(",")
    if unknown := [step for step in options.steps if step not in STEPS]:
        parser.error(f"expected steps among {', '.join(STEPS)}, got {', '.join(unknown)}")
    return options


def _has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    console = Console(soft_wrap=True)
    if not options.rehearse and not _has_gpu():
        console.print("no GPU: nothing to do")
        return 0 if options.allow_no_gpu else 2
    session = begin(options, console)
    failed = []
    for step in options.steps:
        if session.left < 30:
            console.print(f"{step}: no time left")
            failed.append(step)
            continue
        began = time.monotonic()
        good = RUN[step](session)
        session.store()
        console.print(f"{step}: {'passed' if good else 'FAILED'} in {time.monotonic() - began:.0f} s")
        failed += [] if good else [step]
    console.print(markdown(session.report), markup=False, highlight=False)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
