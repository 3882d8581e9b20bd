"""Compiles every Triton kernel, at the tiles its heuristic returns for real shapes, for every supported GPU.

    python -m benchmarks.compiled.compile_matrix [--check] [--afresh] [--arch sm_90 ...] [--case NAME ...] [--jobs N]

The command needs neither a GPU nor torch nor jax, and must run without TRITON_INTERPRET. It uses the Triton that Python
imports. It fails if a kernel does not compile, spills, or needs more shared memory than the device has. On sm_90 it
also fails if a kernel lacks wgmma although its products have enough rows, or lacks a proxy fence that wgmma needs. In
the inner loops of workloads it rejects local memory and loads that are too narrow.

benchmarks/results/compiled.txt lists the digests of all compilations that have passed, so a run compiles only what has
changed and adds the compilations that pass. With `--afresh` it compiles everything. `--check` leaves the list as it is
and compiles a sample of the passed compilations again. Each run writes its tables to build/compile_matrix_VERSION.md.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.cases import blocks as blocks_cases
from benchmarks.cases import catalogue
from benchmarks.cases import indexer as indexer_cases
from benchmarks.cases import mla as mla_cases
from benchmarks.cases import paged as paged_cases
from benchmarks.cases import ragged_mla as ragged_cases
from benchmarks.cases import varlen as varlen_cases
from benchmarks.compiled import compiling, sass
from ragged_attention import dispatch
from ragged_attention.calls import CALLS, Call
from ragged_attention.tools import samples

ROOT = Path(__file__).parents[2]
PASSED = ROOT / "benchmarks" / "results" / "compiled.txt"
REPORTS = ROOT / "build"

# One case for each piece of code that the named shapes compile to. The code of other cases differs only in numbers.
COVERING = (
    "decode_64x4k", "decode_64x4k_page1", "prefill_4k", "gpt_oss_window_64x4k", "gemma2_prefill_4k",
    "gemma4_global_prefill_4k", "fp8_64x4k", *paged_cases.COMPILED_ONLY,
    "mla_dense_h16_128x4k", "mla_dense_h128_128q2s4k", "mla_dense_fp8_h128_128x4k",
    "mla_sparse_bf16_h128_32q2", "mla_sparse_h16_b8", "mla_sparse_h32_b8", "mla_sparse_h128_128q2",
    "mla_sparse_v4_h64_128q2", "mla_sparse_v41_h64_128q2", "mla_prefill_h128_32k", "mla_prefill_fp8_h128_32k",
    *mla_cases.COMPILED_ONLY,
    "mla_ragged_64x4k", "mla_ragged_h16_64x4k", "mla_ragged_4k", *ragged_cases.COMPILED_ONLY,
    "mha_128_4k", "mha_128_4k_backward", "mha_192_4k", "mha_192_4k_backward", *varlen_cases.COMPILED_ONLY,
    "indexer_decode_64x32k", "indexer_prefill_4k", *indexer_cases.COMPILED_ONLY, *blocks_cases.COMPILED_ONLY,
)  # fmt: skip
# Together with these cases, sm_90 compiles all code that the workloads launch, except code that differs only in
# numbers.
TARGETS = (
    "decode_64x4k_page256", "speculative_tree_64q4s4k", "gpt_oss_full_64x4k", "gpt_oss_prefill_4k", "gemma2_32x4k",
    "gemma3_32x4k", "prefill_2k", "gemma4_global_32x4k", "fp8_64x4k_page64",
    "fp8_64x4k_head_scales", "fp8_prefill_4k", "fp8_prefill_4k_head_scales", "mla_dense_h128_128x4k",
    "mla_sparse_h16_b1", "mla_sparse_h32_b64", "mla_sparse_h8_b64", "mla_prefill_h16_32k",
    "mla_prefill_v4_h64_32k", "mha_128_4k_full", "mha_128_4k_full_backward", "mha_192_4k_full",
    "mha_192_4k_full_backward", "mha_gqa_8x2k", "mha_gqa_8x2k_backward", "indexer_decode_1x128k",
)  # fmt: skip
# The shapes that need most shared memory. They suffice for FEWER_CASES_ON: the main difference between these and all
# other architectures is the size of shared memory.
FEWER = (
    "decode_64x4k", "prefill_4k", "gemma2_prefill_4k", "gemma4_global_prefill_4k", "fp8_64x4k", "float32_mixed",
    "int8_mixed", "fnuz_64x4k", "ratio_7_page_24", "mla_dense_h128_128q2s4k", "mla_sparse_h16_b8",
    "mla_sparse_v4_h64_128q2", "mla_prefill_h16_2k", "mha_192_4k", "mha_192_4k_backward", "mha_gemma_256",
    "mha_gemma_256_backward", "mha_float32_80_backward", "indexer_decode_64x32k", "indexer_prefill_4k",
    "indexer_prefill_bf16", "indexer_decode_bf16_queries", "blocks_decode_64x32k", "blocks_prefill_4k",
    "blocks_prefill_float32", "blocks_128_prompt", "blocks_128_decode", "mha_blocks_64", "mha_blocks_64_backward",
)  # fmt: skip
FEWER_CASES_ON = ("sm_86", "sm_100", "sm_120", "gfx950")
# Latent attention compiles slowly. So only sm_90 compiles all its cases. Other architectures compile one case per tile.
LATENT_TILES = (
    "mla_dense_h16_128x4k", "mla_dense_h128_128q2s4k", "mla_sparse_v4_h16", "mla_sparse_v4_h64_128q2",
    "mla_sparse_h16_b8", "mla_sparse_h128_128q2", "mla_float32_h16", "mla_float32_fp8_h16", "mla_float32_v4_h16",
    "mla_prefill_h16_2k", "mla_prefill_float32_h16", "mla_sparse_v41_h16", "mla_sparse_fp4_h16",
    "mla_ragged_64x4k", "mla_ragged_h16_64x4k", "mla_ragged_window_cap", "mla_ragged_e4m3", "mla_ragged_fnuz",
    "mla_ragged_two_scales", "mla_ragged_two_scales_h16", "mla_ragged_float32_h16",
)  # fmt: skip
ATTENTIONS = (
    "ragged_paged_attention", "mla_decode", "ragged_mla_attention", "sparse_mla_prefill",
    "sparse_mla_prefill_backward", "varlen_attention", "varlen_attention_backward", "indexer_topk", "indexer_logits",
    "indexer_logits_backward", "attention_target",
    "select_blocks", "block_scores", "top_k_blocks",
)  # fmt: skip
# The cases for operations other than ATTENTIONS. They only copy, and therefore need fewer shapes.
COPYING = (
    "decode_64x4k", "fp8_64x4k", "fnuz_64x4k", "float32_mixed", "int8_mixed", "phi_head_80_mixed", "one_page_slot",
    "mla_sparse_h16_b8", "mla_sparse_v4_h64_128q2", "mla_float16_h32", "mla_float16_fp8_h16", "mla_narrow_24_heads",
    "mla_float32_fp8_h16", "mla_one_of_everything", "mla_ragged_64x4k", "mla_ragged_e4m3", "mla_ragged_fnuz",
    "mla_ragged_two_scales", "mla_ragged_int8_h16", "indexer_decode_64x32k", "indexer_prefill_4k",
)  # fmt: skip

SPOT_CHECK = 24  # `--check` compiles one in SPOT_CHECK of the passed compilations again
SAVED_EVERY = 30.0  # seconds between two saves while compiling

# The kernels with matrix products. In a workload, at least LEAST_WIDE of the bytes that an inner loop of such a kernel
# loads must come 16 at a time. After a change that makes a check stricter, run `--afresh`.
MULTIPLYING = (
    "tile_kernel", "split_kernel", "latent_kernel", "ragged_latent_kernel", "forward_kernel", "dkv_kernel", "dq_kernel",
    "bias_kernel", "selected_kernel", "selected_dkv_kernel", "gradient_kernel",
    "tile_logits_kernel", "walk_logits_kernel", "list_logits_kernel", "query_kernel", "key_kernel", "sums_kernel",
    "block_scores_kernel",
)  # fmt: skip
LEAST_WIDE = 0.9
# Exceptions from LEAST_WIDE: (kernel, `key_format` of the case, matrix unit) -> (another lower bound, the reason).
# docs/compile_matrix.md shows them. NARROW_ON_OLDER is for the older Triton, which needs lower bounds.
Exceptions = dict[tuple[str, str, str], tuple[float, str]]
ROTARY = "the 64 rotary columns of 16 keys give each of 256 threads only 8 bytes"
EIGHT_BITS = "without e4m3, values go from shared memory straight into an operand that takes 8 bytes at a time"
CODES = "128 codes of 16 keys give each of 256 threads only 8 bytes"
HALVES = "128 codes of 4 bits of 32 keys give each of 256 threads only 8 bytes"
SCALES = "scales are separate words or bytes"
BY_TWO = "slots of the list are loaded two at a time"
TERMS = "the norm, offset and share of a row are separate words"
WEIGHTS = "every warp loads the weights of a token two at a time"
NARROW: Exceptions = {
    ("split_kernel", "8 bits", "mma"): (0.47, EIGHT_BITS),
    ("tile_kernel", "8 bits", "mma"): (0.44, EIGHT_BITS),
    ("gradient_kernel", "plain", "mma"): (0.80, f"{ROTARY}, {BY_TWO}"),
    ("latent_kernel", "fp8_v4", "mma"): (0.89, SCALES),
    ("latent_kernel", "fp8_v4", "wgmma"): (0.29, CODES),
    ("latent_kernel", "fp8_v41 beside fp4_v41", "wgmma"): (0.0, f"{HALVES}, {SCALES}"),
    ("tile_logits_kernel", "8 bits", "wgmma"): (0.49, WEIGHTS),
    ("tile_logits_kernel", "8 bits", "tcgen05"): (0.49, WEIGHTS),
    ("tile_logits_kernel", "8 bits", "mma"): (0.49, WEIGHTS),
}
OLDER = "3.6"
NARROW_ON_OLDER: Exceptions = {
    ("tile_kernel", "8 bits", "mma"): (0.33, f"{EIGHT_BITS}, {SCALES}"),
    ("tile_kernel", "8 bits", "wgmma"): (0.33, SCALES),
    ("tile_kernel", "8 bits", "tcgen05"): (0.33, SCALES),
    ("split_kernel", "8 bits", "mma"): (0.33, f"{EIGHT_BITS}, {SCALES}"),
    ("latent_kernel", "plain", "wgmma"): (0.64, BY_TWO),
    ("latent_kernel", "fp8_v32", "mma"): (0.74, f"{SCALES}, {BY_TWO}"),
    ("latent_kernel", "fp8_v32", "wgmma"): (0.64, f"{SCALES}, {BY_TWO}"),
    ("dkv_kernel", "plain", "wgmma"): (0.64, TERMS),
    ("dkv_kernel", "plain", "tcgen05"): (0.42, TERMS),
    ("latent_kernel", "fp8_v4", "mma"): (0.86, f"{SCALES}, {BY_TWO}"),
    ("latent_kernel", "fp8_v41 beside fp4_v41", "mma"): (0.0, f"{HALVES}, {SCALES}"),
}
# Bytes per thread that the older Triton may spill. It has no registers left for the 64-bit offsets of tokens.
SPILLED_ON_OLDER = {"dkv_kernel": 8, "forward_kernel": 8, "norm_rope_kernel": 8, "key_kernel": 24}
# Kernel -> the block size that is the number of rows of its products (by default "q"). wgmma needs at least 64 rows.
ROWS = {
    "dkv_kernel": "kv", "latent_kernel": "h", "ragged_latent_kernel": "h", "gradient_kernel": "h",
    "tile_logits_kernel": "n", "walk_logits_kernel": "n", "list_logits_kernel": "n", "query_kernel": "h",
    "key_kernel": "n", "sums_kernel": "n",
    "block_scores_kernel": "m",
}  # fmt: skip
WGMMA_ROWS = 64

COLUMNS = (
    "kernel", "cases", "blocks", "warps", "stages", "instructions", "registers", "spilled", "shared", "loads",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Job:
    """One compilation for `arch`: launch number `launch` of call number `call` of a case."""

    case: str
    arch: str
    call: int
    launch: int


@dataclasses.dataclass
class Row:
    """One compiled kernel and every case that uses it."""

    arch: str
    kernel: str
    blocks: str
    num_warps: int
    num_stages: int
    cases: list[str]
    facts: compiling.Facts = dataclasses.field(default_factory=compiling.Facts)

    @property
    def where(self) -> str:
        return f"{self.arch} {self.kernel} ({self.cases[0]})"

    @property
    def workload(self) -> str | None:
        """The first case that is a workload, or None. The other cases only need to compile."""
        return next((name for name in self.cases if name in catalogue.CASES), None)

    @property
    def product_rows(self) -> int:
        """The rows of the kernel's matrix products; 0 for a kernel that has none."""
        sizes = dict(block.split() for block in self.blocks.split(", ") if block)
        return int(sizes[ROWS.get(self.kernel, "q")]) if self.kernel in MULTIPLYING else 0


@functools.cache
def calls_for(case: str, arch: str) -> tuple[Call, ...]:
    """The calls of the case that the Triton backend accepts, one for each form of an operation."""
    return tuple(call for call in _calls_of(case, arch) if declined(call) is None)


def _calls_of(case: str, arch: str) -> list[Call]:
    calls = catalogue.find(case).calls(samples.device_of("torch", arch))
    return [call for call in calls if call.OPERATION in ATTENTIONS or case in COPYING]


def declined(call: Call) -> str | None:
    return dispatch.load(call.OPERATION, "triton").why_not(call)


@functools.cache
def launches_for(case: str, arch: str, call: int) -> tuple[compiling.Launch, ...]:
    record = calls_for(case, arch)[call]
    return tuple(compiling.record(record, compiling.tile_of(catalogue.find(case), record)))


def covering(arch: str) -> tuple[str, ...]:
    """The cases that a run without `--case` compiles for an architecture."""
    if arch in FEWER_CASES_ON:
        return FEWER
    if arch == "sm_90":
        return (*COVERING, *TARGETS)
    return tuple(name for name in COVERING if name in LATENT_TILES or not name.startswith("mla_"))


Planned = dict[str, tuple[Job, Row]]


def plan(names: Sequence[str] | None, archs: Iterable[str]) -> Planned:
    """All compilations by digest, each with its job and the row that receives its facts.

    For kernels of workloads the loops are checked too. Their digests end with +, since they stand for more checks.
    """
    planned: Planned = {}
    for arch in archs:
        for name in names or covering(arch):
            for index in range(len(calls_for(name, arch))):
                for number, launch in enumerate(launches_for(name, arch, index)):
                    row = Row(arch, launch.name, _blocks(launch), launch.num_warps, launch.num_stages, [])
                    _, row = planned.setdefault(compiling.digest(launch, arch), (Job(name, arch, index, number), row))
                    row.cases += [name] if name not in row.cases else []
    return {digest + ("+" if both[1].workload else ""): both for digest, both in planned.items()}


def refusals(names: Sequence[str] | None, archs: Iterable[str]) -> list[str]:
    """The calls that the Triton backend declines, with its reasons. They are not compiled."""
    return [
        f"{arch} {call.OPERATION} ({name}): {reason}"
        for arch in archs
        for name in names or covering(arch)
        for call in _calls_of(name, arch)
        if (reason := declined(call))
    ]


def missing_operations() -> list[str]:
    """The operations of the Triton backend that no case calls."""
    package = importlib.import_module(dispatch.PACKAGES["triton"])
    offered = {name for name in CALLS if importlib.util.find_spec(f"{package.__name__}.{name}")}
    called = {call.OPERATION for name in covering("sm_90") for call in _calls_of(name, "sm_90")}
    return sorted(offered - called)


def _blocks(launch: compiling.Launch) -> str:
    """The block sizes among the arguments of the launch."""
    sizes = {name: value for name, value in launch.constants.items() if name.startswith("BLOCK")}
    return ", ".join(f"{name.removeprefix('BLOCK_').lower()} {value}" for name, value in sizes.items())


def _compile(job: Job) -> compiling.Facts:
    return compiling.compile_launch(launches_for(job.case, job.arch, job.call)[job.launch], job.arch)


def compile_all(
    planned: Planned, jobs: int, console: Console, report: Callable[[str, Row], None] = lambda digest, row: None
) -> None:
    """Compile all of `planned` in `jobs` processes, from an empty cache. `report` is called after each compilation."""
    if not planned:
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with compiling.processes(jobs) as pool, Progress(*columns, console=console) as progress:
        task = progress.add_task("compiling", total=len(planned))
        waiting = {pool.submit(_compile, job): (digest, row) for digest, (job, row) in planned.items()}
        for done in concurrent.futures.as_completed(waiting):
            digest, row = waiting[done]
            row.facts = done.result()
            report(digest, row)
            if reason := row.facts.failure:
                progress.console.print(f"{row.where}: {reason}", style="red", markup=False, highlight=False)
            progress.update(task, advance=1, description=row.where)


def rows_of(planned: Planned) -> list[Row]:
    """All rows in a stable order."""
    return sorted((row for _, row in planned.values()), key=_order)


def _order(row: Row) -> tuple[Any, ...]:
    return compiling.ARCHITECTURES.index(row.arch), row.kernel, row.cases, row.blocks, row.num_warps, row.num_stages


def small_products(rows: Iterable[Row]) -> list[str]:
    """The cases on sm_90 that should use wgmma, but whose tiles give no product enough rows for it.

    The tiles show this without a compilation.
    """
    most: dict[str, int] = {}
    for row in rows:
        if row.arch == "sm_90":
            most |= {name: max(most.get(name, 0), row.product_rows) for name in row.cases}
    return [
        f"sm_90 ({name}): no product has the {WGMMA_ROWS} rows that wgmma needs"
        for name, number in sorted(most.items())
        if number < WGMMA_ROWS <= (case := catalogue.find(name)).wgmma_rows and case.dtype != "float32"
    ]


def failures(rows: Iterable[Row], version: str = "") -> list[str]:
    """One line for each reason why a compiled kernel must not ship. `version` is Triton's, or "" for the newest."""
    checks = (fit_failure, fence_failure, wgmma_failure, loop_failure)
    reasons = ((row, check(row, version)) for row in rows for check in checks)
    return [f"{row.where}: {reason}" for row, reason in reasons if reason]


def fit_failure(row: Row, version: str = "") -> str | None:
    """The reason why the kernel does not fit the device, or None. Known spills of the older Triton are allowed."""
    spilled = row.facts.spilled
    if spilled and version.startswith(f"{OLDER}.") and spilled <= SPILLED_ON_OLDER.get(row.kernel, 0):
        loops = tuple(dataclasses.replace(loop, local=0) for loop in row.facts.loops)
        return dataclasses.replace(row.facts, spilled=0, loops=loops).failure
    return row.facts.failure


def fence_failure(row: Row, version: str = "") -> str | None:
    """A message with the number of wgmma instructions that may read copies too early, or None.

    Blackwell is not checked: there only the compiler could add a missing fence.
    """
    lacking = dict(row.facts.instructions).get("unfenced", 0)
    return f"{lacking} wgmma with no proxy fence after a wait for copies" if lacking and row.arch == "sm_90" else None


def wgmma_failure(row: Row, version: str = "") -> str | None:
    """A message if the kernel lacks wgmma although its products of 16 or 8 bits have enough rows, or None."""
    if row.facts.error or row.arch != "sm_90" or row.product_rows < WGMMA_ROWS:
        return None
    if catalogue.find(row.cases[0]).dtype == "float32" or "wgmma" in dict(row.facts.instructions):
        return None
    return f"products of {row.product_rows} rows without wgmma"


def loop_failure(row: Row, version: str = "") -> str | None:
    """The problem with the inner loops of a workload's kernel, according to NVIDIA's machine code, or None."""
    if row.facts.error or not row.workload or row.kernel not in MULTIPLYING or not row.arch.startswith("sm_"):
        return None
    if not row.facts.loops and not set(sass.MATRIX.values()).isdisjoint(dict(row.facts.instructions)):
        return "no inner loop of products was found"
    case = catalogue.find(row.workload)
    narrow = NARROW | (NARROW_ON_OLDER if version.startswith(f"{OLDER}.") else {})
    for loop in row.facts.loops:
        least, _ = narrow.get((row.kernel, case.key_format, loop.matrix), (LEAST_WIDE, ""))
        if loop.wide < least:
            return f"an inner loop loads {loop.wide:.0%} of its bytes 16 at a time, expected {least:.0%}"
        rows = row.product_rows
        if row.arch == "sm_90" and case.dtype != "float32" and rows >= WGMMA_ROWS and loop.matrix != "wgmma":
            return f"an inner loop of {rows} rows uses {loop.matrix or 'no matrix unit'}, expected wgmma"
    return None


def report(version: str, rows: Sequence[Row], wrong: Sequence[str], refused: Sequence[str]) -> str:
    """The report on the compilations in Markdown, with a table for each architecture."""
    lines = [f"# Triton {version}", ""]
    lines += [f"{len(rows)} compilations, {len(wrong) or 'no'} failure{'s' if len(wrong) != 1 else ''}.", ""]
    lines += [f"- {text}" for text in wrong] + ([""] if wrong else [])
    if refused:
        lines += ["The kernels decline these calls, so they are not compiled:", "", *(f"- {text}" for text in refused)]
    for arch in compiling.ARCHITECTURES:
        if compiled := [row for row in rows if row.arch == arch]:
            limit = max(row.facts.limit for row in compiled) // 1024
            lines += ["", f"## {arch}", "", f"A program has at most {limit} KiB of shared memory.", ""]
            lines += [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS), *map(_line, compiled)]
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    cells = (row.kernel, ", ".join(row.cases), row.blocks, row.num_warps, row.num_stages, *_facts(row.facts))
    return f"| {' | '.join(map(str, cells))} |"


def _facts(facts: compiling.Facts) -> tuple[Any, ...]:
    """The cells of a table row that come from the compilation."""
    if facts.error:
        return f"**{facts.error}**", "-", "-", "-", "-"
    counts = ", ".join(f"{name} {count}" for name, count in facts.instructions) or "-"
    spilled = f"**{facts.spilled} B**" if facts.spilled else "0"
    shared = f"{facts.shared / 1024:.1f}"
    shared = f"**{shared}**" if facts.shared > facts.limit else shared
    return counts, facts.registers, spilled, shared, " / ".join(dict.fromkeys(map(str, facts.loops))) or "-"


def load_passed(version: str) -> set[str]:
    """The digests that passed under one Triton version."""
    lines = PASSED.read_text().splitlines() if PASSED.is_file() else []
    return {digest for line in lines if line.startswith(f"{version} ") for digest in line.split()[2:]}


def save_passed(version: str, planned: Planned, passed: Iterable[str]) -> None:
    """Replace the lines of one Triton version. A line has the version, a kernel and its digests that passed."""
    by_kernel: dict[str, list[str]] = {}
    for digest in sorted(planned.keys() & set(passed)):
        by_kernel.setdefault(planned[digest][1].kernel, []).append(digest)
    lines = PASSED.read_text().splitlines() if PASSED.is_file() else []
    lines = [line for line in lines if not line.startswith(f"{version} ")]
    lines += [" ".join((version, kernel, *digests)) for kernel, digests in by_kernel.items()]
    new = PASSED.with_suffix(".new")
    new.write_text("".join(f"{line}\n" for line in sorted(lines)))
    new.replace(PASSED)


def _only(names: Sequence[str] | None, archs: Sequence[str], version: str, options: argparse.Namespace) -> int:
    """Compile the named cases and print the report."""
    planned = plan(names, archs)
    compile_all(planned, options.jobs, options.console)
    rows = rows_of(planned)
    wrong = failures(rows, version) + small_products(rows)
    Console(width=400).print(report(version, rows, wrong, refusals(names, archs)), markup=False, highlight=False)
    return _outcome(version, f"{len(rows)} compilations", wrong, options.console)


def _everything(version: str, options: argparse.Namespace) -> int:
    """Compile all that has not passed before. With `--check`, also compile a sample of what has passed."""
    planned = plan(None, compiling.ARCHITECTURES)
    passed = set() if options.afresh else load_passed(version)
    passed_before = sorted(planned.keys() & passed)
    sample = passed_before[::SPOT_CHECK] if options.check else []
    compiled = {digest: both for digest, both in planned.items() if digest not in passed or digest in sample}
    saved = time.monotonic()

    def record(digest: str, row: Row) -> None:
        """Record a passed digest. Every SAVED_EVERY seconds, save them, so that an interrupted run can resume."""
        nonlocal saved
        if not failures([row], version):
            passed.add(digest)
        if not options.check and time.monotonic() - saved > SAVED_EVERY:
            save_passed(version, planned, passed)
            saved = time.monotonic()

    compile_all(compiled, options.jobs, options.console, record)
    if not options.check:
        save_passed(version, planned, passed)
    rows = rows_of(compiled)
    wrong = failures(rows, version) + small_products(row for _, row in planned.values())
    wrong += [f"{name}: no case calls it" for name in missing_operations()]
    REPORTS.mkdir(exist_ok=True)
    text = report(version, rows, wrong, refusals(None, compiling.ARCHITECTURES))
    (REPORTS / f"compile_matrix_{version}.md").write_text(text)
    what = f"{len(planned)} compilations, {len(planned) - len(passed_before)} of them new, {len(sample)} compiled again"
    return _outcome(version, what, wrong, options.console)


def _outcome(version: str, what: str, wrong: Sequence[str], console: Console) -> int:
    for line in wrong:
        console.print(line, style="red", markup=False, highlight=False)
    console.print(f"Triton {version}: {what}, {len(wrong)} failures")
    return 1 if wrong else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.compiled.compile_matrix", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--check", action="store_true", help="compile a sample of the passed compilations again; save nothing"
    )
    parser.add_argument("--afresh", action="store_true", help="compile everything, even what has passed before")
    parser.add_argument(
        "--arch", nargs="+", choices=compiling.ARCHITECTURES, help="only these architectures; nothing is saved"
    )
    parser.add_argument("--case", nargs="+", help="only these cases, or `all`; nothing is saved")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes")
    options = parser.parse_args(argv)
    options.console = Console(stderr=True, soft_wrap=True)
    if reason := compiling.why_not():
        options.console.print(reason)
        return 2
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton's default; Triton warns if this is unset
    version = importlib.import_module("triton").__version__
    if not options.arch and not options.case:
        return _everything(version, options)
    names = [*catalogue.CASES, *catalogue.COMPILED_ONLY] if options.case == ["all"] else options.case
    return _only(names, options.arch or compiling.ARCHITECTURES, version, options)


if __name__ == "__main__":
    sys.exit(main())
