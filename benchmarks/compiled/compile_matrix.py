"""Every Triton kernel, at the tiles its heuristic returns for real shapes, compiled for every supported GPU.

    python -m benchmarks.compiled.compile_matrix [--check] [--afresh] [--arch sm_90 ...] [--case NAME ...] [--jobs N]

Needs neither a GPU nor torch nor jax, and must run without TRITON_INTERPRET. Works with whichever Triton is imported
and writes that version's section of docs/compile_matrix.md. What each compilation found is kept beside it, in
docs/compile_matrix.json, so only what changed since is compiled (all of it with `--afresh`), and an interrupted run
goes on where it stopped. `--check` compares instead of writing, and compiles some of what did not change as well. It
fails on a kernel that does not compile, spills, needs more shared memory than the
device has, on sm_90 does without wgmma where there are rows for it or without a proxy fence that one needs, or in its
inner loops uses local memory or, in a workload's case, loads less at a time than it should.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib
import importlib.util
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.cases import catalogue
from benchmarks.cases import indexer as indexer_cases
from benchmarks.cases import mla as mla_cases
from benchmarks.cases import paged as paged_cases
from benchmarks.cases import ragged_mla as ragged_cases
from benchmarks.cases import varlen as varlen_cases
from benchmarks.compiled import compiling, kept_facts, sass
from ragged_attention import dispatch
from ragged_attention.calls import CALLS, Call
from ragged_attention.calls.base import shared_memory_of
from ragged_attention.tools import samples

DOCUMENT = Path(__file__).parents[2] / "docs" / "compile_matrix.md"
KEPT = DOCUMENT.with_suffix(".json")

# A case for each piece of code that the named shapes compile to; the others repeat it with other numbers.
COVERING = (
    "decode_64x4k", "decode_64x4k_page1", "prefill_4k", "gpt_oss_window_64x4k", "gemma2_prefill_4k",
    "gemma4_global_prefill_4k", "fp8_64x4k", *paged_cases.COMPILED_ONLY,
    "mla_dense_h16_128x4k", "mla_dense_h128_128q2s4k", "mla_dense_fp8_h128_128x4k",
    "mla_sparse_bf16_h128_32q2", "mla_sparse_h16_b8", "mla_sparse_h32_b8", "mla_sparse_h128_128q2",
    "mla_sparse_v4_h64_128q2", "mla_sparse_v41_h64_128q2", "mla_prefill_h128_32k", "mla_prefill_fp8_h128_32k",
    *mla_cases.COMPILED_ONLY,
    "mla_ragged_64x4k", "mla_ragged_h16_64x4k", "mla_ragged_4k", *ragged_cases.COMPILED_ONLY,
    "mha_128_4k", "mha_128_4k_backward", "mha_192_4k", "mha_192_4k_backward", *varlen_cases.COMPILED_ONLY,
    "indexer_decode_64x32k", "indexer_prefill_4k", *indexer_cases.COMPILED_ONLY,
)  # fmt: skip
# With these, sm_90 has every code that the workloads' cases launch there, plain numbers apart.
TARGETS = (
    "decode_64x4k_page256", "speculative_tree_64q4s4k", "gpt_oss_full_64x4k", "gpt_oss_prefill_4k", "gemma2_32x4k",
    "gemma3_32x4k", "gemma4_global_32x4k", "fp8_64x4k_page64",
    "fp8_64x4k_head_scales", "fp8_prefill_4k", "fp8_prefill_4k_head_scales", "mla_dense_h128_128x4k",
    "mla_sparse_h16_b1", "mla_sparse_h8_b64", "mla_sparse_h32_b64", "mla_prefill_h16_32k",
    "mla_prefill_v4_h64_32k", "mha_128_4k_full", "mha_128_4k_full_backward", "mha_192_4k_full",
    "mha_192_4k_full_backward", "mha_gqa_8x2k", "mha_gqa_8x2k_backward",
)  # fmt: skip
# Architectures that differ from one of the others in little but their shared memory get the shapes that fill it.
FEWER = (
    "decode_64x4k", "prefill_4k", "gemma2_prefill_4k", "gemma4_global_prefill_4k", "fp8_64x4k", "float32_mixed",
    "int8_mixed", "ratio_7_page_24", "mla_dense_h128_128q2s4k", "mla_sparse_h16_b8", "mla_sparse_v4_h64_128q2",
    "mla_prefill_h16_2k", "mha_192_4k", "mha_192_4k_backward", "mha_gemma_256", "mha_gemma_256_backward",
    "mha_float32_80_backward", "indexer_decode_64x32k", "indexer_prefill_4k", "indexer_prefill_bf16",
    "indexer_decode_bf16_queries",
)  # fmt: skip
ALIKE = ("sm_86", "sm_100", "sm_120", "gfx950")
# Latent attention takes long to compile: sm_90 gets all of its cases, the other architectures one for each tile.
LATENT_TILES = (
    "mla_dense_h16_128x4k", "mla_dense_h128_128q2s4k", "mla_sparse_v4_h16", "mla_sparse_v4_h64_128q2",
    "mla_sparse_h16_b8", "mla_sparse_h128_128q2", "mla_float32_h16", "mla_float32_fp8_h16", "mla_float32_v4_h16",
    "mla_prefill_h16_2k", "mla_prefill_float32_h16", "mla_sparse_v41_h16", "mla_sparse_fp4_h16",
    "mla_ragged_64x4k", "mla_ragged_h16_64x4k", "mla_ragged_window_cap", "mla_ragged_e4m3", "mla_ragged_float32_h16",
)  # fmt: skip
ATTENTIONS = (
    "ragged_paged_attention", "mla_decode", "ragged_mla_attention", "sparse_mla_prefill",
    "sparse_mla_prefill_backward", "varlen_attention", "varlen_attention_backward", "indexer_topk", "indexer_logits",
)  # fmt: skip
# All else is plain copying, so fewer shapes cover it.
COPYING = (
    "decode_64x4k", "fp8_64x4k", "float32_mixed", "int8_mixed", "phi_head_80_mixed", "one_page_slot",
    "mla_sparse_h16_b8", "mla_sparse_v4_h64_128q2", "mla_float16_h32", "mla_float16_fp8_h16", "mla_narrow_24_heads",
    "mla_float32_fp8_h16", "mla_one_of_everything", "mla_ragged_64x4k", "mla_ragged_e4m3", "mla_ragged_int8_h16",
    "indexer_decode_64x32k", "indexer_prefill_4k",
)  # fmt: skip

SPOT_CHECK = 24  # of so many compilations that did not change a check does one again
SAVED_EVERY = 30.0  # seconds, while compiling

# The kernels that multiply, whose inner loops are judged in workloads' cases. Of what such a loop loads, no less than
# this share must come 16 bytes at a time.
MULTIPLYING = (
    "tile_kernel", "split_kernel", "latent_kernel", "ragged_latent_kernel", "forward_kernel", "dkv_kernel", "dq_kernel",
    "gradient_kernel", "tile_logits_kernel", "walk_logits_kernel",
)  # fmt: skip
LEAST_WIDE = 0.9
# Where it is less, the least that it is and why: by kernel, its case's `key_format`, and matrix unit;
# then where an older Triton does worse.
Exceptions = dict[tuple[str, str, str], tuple[float, str]]
ROTARY = "of 16 keys the 64 rotary columns are 8 bytes for each of 256 threads"
EIGHT_BITS = "without e4m3, values go from shared memory straight into a product's operand, which takes them by 8 bytes"
CODES = "of 16 keys 128 codes are 8 bytes for each of 256 threads"
HALVES = "of 32 keys 128 codes of 4 bits are 8 bytes for each of 256 threads"
SCALES = "scales are words or bytes of their own"
BY_TWO = "the list's slots come by twos"
TERMS = "a row's norm, offset and share are words of their own"
WEIGHTS = "a token's weights come by twos, to every warp"
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
    ("tile_kernel", "8 bits", "mma"): (0.40, EIGHT_BITS),
    ("split_kernel", "8 bits", "mma"): (0.44, EIGHT_BITS),
    ("latent_kernel", "plain", "wgmma"): (0.64, BY_TWO),
    ("latent_kernel", "fp8_v32", "mma"): (0.74, f"{SCALES}, {BY_TWO}"),
    ("latent_kernel", "fp8_v32", "wgmma"): (0.64, f"{SCALES}, {BY_TWO}"),
    ("dkv_kernel", "plain", "wgmma"): (0.64, TERMS),
    ("dkv_kernel", "plain", "tcgen05"): (0.42, TERMS),
    ("latent_kernel", "fp8_v4", "mma"): (0.86, f"{SCALES}, {BY_TWO}"),
    ("latent_kernel", "fp8_v41 beside fp4_v41", "mma"): (0.0, f"{HALVES}, {SCALES}"),
}
# Bytes per thread that the older Triton spills, since offsets of tokens have 64 bits; the newer one has room for them.
SPILLED_ON_OLDER = {"dkv_kernel": 8, "forward_kernel": 8}
# Which of a kernel's block sizes is the rows of its products; 64 of them make a wgmma.
ROWS = {
    "dkv_kernel": "kv", "latent_kernel": "h", "ragged_latent_kernel": "h", "gradient_kernel": "h",
    "tile_logits_kernel": "n", "walk_logits_kernel": "n",
}  # fmt: skip
WGMMA_ROWS = 64

HEADER = """\
# Compile matrix

What the Triton kernels compile to, at the tiles their heuristics choose for the shapes of `benchmarks/cases/`, for GPUs
that need not be there. Written by `make compile-matrix`, which fails on a kernel that does not compile, spills, needs
more shared memory than the device has, or on sm_90 has an unfenced product or does without wgmma where there are 64
rows for it (in 16 bits; of pages up to head size 256, of latents plain ones); and on an inner loop that uses local
memory, that has 64 rows on sm_90 and other products than wgmma, or that loads too little 16 bytes at a time (see
below).

What each compilation found lies in `compile_matrix.json`, under a digest of all that it is made from: the sources of
the kernel and of what it calls (comments apart), types, constants, alignments and options. So only what changed is
compiled. CI compares, and of what did not change it compiles one in twenty-four again.

Columns: block sizes of the tile; warps and stages of this launch; instructions in the code, as
counts (wgmma: Hopper's matrix instructions, tcgen05: Blackwell's, mma: those of Ampere and later, mfma: AMD's,
cp.async: asynchronous copies to shared memory; unfenced: those of wgmma and tcgen05 with no proxy fence between them
and a wait for copies before them, see [what the emulator found](ptx.md#what-it-found)); registers a thread (on AMD:
vector registers); bytes a thread that do not fit the registers; shared memory in KiB, and the most one program can
have; loads, read from NVIDIA's machine code: of the bytes that a thread asks of global memory in a turn of an innermost
loop of products, how many come 16, 8, 4, 2 or 1 at a time (a kernel's loops in order, those that are alike once; -
where there is none or it is not read).

In the workloads' cases, of what such a loop loads {least} must come 16 bytes at a time, one word for each longer
load apart, a row's page number or slot. Known exceptions, with the share that they may not fall below:

| kernel | keys | products | share | why |
|---|---|---|---|---|
{exceptions}

Under Triton 3.6 the kernels `dkv_kernel` and `forward_kernel` may spill 8 bytes per thread: offsets of tokens have 64
bits, for which it finds no registers.
"""
COLUMNS = (
    "kernel", "cases", "blocks", "warps", "stages", "instructions", "registers", "spilled", "shared", "loads",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Job:
    """One compilation: the launch numbered `launch` of the call numbered `call` of a case, for `arch`."""

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


@functools.cache
def calls_for(case: str, arch: str) -> tuple[Call, ...]:
    """The case's calls, one per form of an operation, that the Triton room has and takes."""
    return tuple(call for call in _calls_of(case, arch) if declined(call) is None)


def _calls_of(case: str, arch: str) -> list[Call]:
    calls = catalogue.find(case).calls(samples.device_of("torch", arch))
    return [call for call in calls if call.OPERATION in ATTENTIONS or case in COPYING]


def declined(call: Call) -> str | None:
    return dispatch.load(call.OPERATION, "triton").why_not(call)


@functools.cache
def launches_for(case: str, arch: str, call: int) -> tuple[compiling.Launch, ...]:
    chosen = calls_for(case, arch)[call]
    return tuple(compiling.record(chosen, compiling.tile_of(catalogue.find(case), chosen)))


def covering(arch: str) -> tuple[str, ...]:
    """The cases that are compiled for an architecture where none are named."""
    if arch in ALIKE:
        return FEWER
    if arch == "sm_90":
        return (*COVERING, *TARGETS)
    return tuple(name for name in COVERING if name in LATENT_TILES or not name.startswith("mla_"))


Planned = dict[str, tuple[Job, Row]]


def plan(names: Sequence[str] | None, archs: Iterable[str]) -> Planned:
    """What to compile, each code once: digest -> the job and the row that its facts go to."""
    found: Planned = {}
    for arch in archs:
        for name in names or covering(arch):
            for index in range(len(calls_for(name, arch))):
                for number, launch in enumerate(launches_for(name, arch, index)):
                    digest = compiling.digest(launch, arch)
                    if digest in found:
                        used = found[digest][1].cases
                        used += [name] if name not in used else []
                        continue
                    row = Row(arch, launch.name, _blocks(launch), launch.num_warps, launch.num_stages, [name])
                    found[digest] = (Job(name, arch, index, number), row)
    return found


def refusals(names: Sequence[str] | None, archs: Iterable[str]) -> list[str]:
    """The calls that the Triton room declines, with its reasons: said aloud, for nothing is compiled for them."""
    return [
        f"{arch} {call.OPERATION} ({name}): {reason}"
        for arch in archs
        for name in names or covering(arch)
        for call in _calls_of(name, arch)
        if (reason := declined(call))
    ]


def missing_operations() -> list[str]:
    """Operations of the Triton room that no case calls."""
    room = importlib.import_module(dispatch.PACKAGES["triton"])
    offered = {name for name in CALLS if importlib.util.find_spec(f"{room.__name__}.{name}")}
    called = {call.OPERATION for name in covering("sm_90") for call in _calls_of(name, "sm_90")}
    return sorted(offered - called)


def _blocks(launch: compiling.Launch) -> str:
    """The block sizes among the launch's arguments."""
    sizes = {name: value for name, value in launch.arguments.items() if name.startswith("BLOCK")}
    return ", ".join(f"{name.removeprefix('BLOCK_').lower()} {value}" for name, value in sizes.items())


def alike(rows: Sequence[Row]) -> list[Row]:
    """Rows of which nothing but the cases differs, joined; the order of first appearance."""
    joined: dict[Any, Row] = {}
    for row in rows:
        key = (row.arch, row.kernel, row.blocks, row.num_warps, row.num_stages, row.facts)
        if key in joined:
            joined[key].cases += [name for name in row.cases if name not in joined[key].cases]
        else:
            joined[key] = dataclasses.replace(row, cases=list(row.cases))
    return list(joined.values())


def _compile(job: Job) -> compiling.Facts:
    return compiling.compile_launch(launches_for(job.case, job.arch, job.call)[job.launch], job.arch)


def compile_all(
    planned: Planned, jobs: int, console: Console, found: Callable[[str, compiling.Facts], None] | None = None
) -> None:
    """Compile everything planned in `jobs` processes, from an empty cache; `found` hears of each at once."""
    if not planned:
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with compiling.processes(jobs) as pool, Progress(*columns, console=console) as progress:
        task = progress.add_task("compiling", total=len(planned))
        waiting = {pool.submit(_compile, job): (digest, row) for digest, (job, row) in planned.items()}
        for done in concurrent.futures.as_completed(waiting):
            digest, row = waiting[done]
            row.facts = done.result()
            if found:
                found(digest, row.facts)
            if reason := row.facts.failure:
                progress.console.print(f"{row.where}: {reason}", style="red", markup=False, highlight=False)
            progress.update(task, advance=1, description=row.where)


def rows_of(planned: Planned) -> list[Row]:
    """All rows in a stable order."""
    return sorted((row for _, row in planned.values()), key=_order)


def fill(planned: Planned, kept: Mapping[str, compiling.Facts]) -> Planned:
    """Give the rows their kept facts; what is left is to be compiled."""
    for digest, (_, row) in planned.items():
        if digest in kept:
            row.facts = dataclasses.replace(kept[digest], limit=shared_memory_of(row.arch))
    return {digest: both for digest, both in planned.items() if digest not in kept}


def compile_and_keep(changed: Planned, kept: dict[str, compiling.Facts], version: str, options: Any) -> None:
    """Compile what changed and save it every now and then, so that a run that is interrupted goes on."""
    saved = time.monotonic()

    def found(digest: str, facts: compiling.Facts) -> None:
        nonlocal saved
        kept[digest] = facts
        if time.monotonic() - saved > SAVED_EVERY:
            kept_facts.save(KEPT, version, kept)
            saved = time.monotonic()

    compile_all(changed, options.jobs, options.console, found)


def _order(row: Row) -> tuple[Any, ...]:
    return (
        compiling.ARCHITECTURES.index(row.arch),
        row.kernel,
        row.cases[0],
        row.blocks,
        row.num_warps,
        row.num_stages,
    )


def failures(rows: Sequence[Row], version: str = "") -> list[str]:
    """Everything that must not ship, one line each; `version` is Triton's, the newest where none is given."""
    found = _failures_by_row(rows, version)
    for name in sorted({name for row in rows if row.arch == "sm_90" for name in row.cases}):
        case = catalogue.find(name)
        if case.dtype == "float32" or case.wgmma_rows < WGMMA_ROWS:
            continue
        used = [row.facts for row in rows if row.arch == "sm_90" and name in row.cases]
        if not any("wgmma" in dict(facts.instructions) for facts in used):
            found.append(f"sm_90 ({name}): no launch uses wgmma")
    return found


def _failures_by_row(rows: Iterable[Row], version: str) -> list[str]:
    judged = (fit_failure, fence_failure, loop_failure)
    reasons = ((row, judge(row, version)) for row in rows for judge in judged)
    return [f"{row.where}: {reason}" for row, reason in reasons if reason]


def fit_failure(row: Row, version: str = "") -> str | None:
    """Why a row must not ship, but for what the older Triton is known to spill."""
    spilled = row.facts.spilled
    if spilled and version.startswith(f"{OLDER}.") and spilled <= SPILLED_ON_OLDER.get(row.kernel, 0):
        loops = tuple(dataclasses.replace(loop, local=0) for loop in row.facts.loops)
        return dataclasses.replace(row.facts, spilled=0, loops=loops).failure
    return row.facts.failure


def fence_failure(row: Row, version: str = "") -> str | None:
    """Whether copies may come too late for a wgmma. On Blackwell, no kernel can mend what the compiler leaves out."""
    lacking = dict(row.facts.instructions).get("unfenced", 0)
    return f"{lacking} wgmma with no proxy fence after a wait for copies" if lacking and row.arch == "sm_90" else None


def loop_failure(row: Row, version: str = "") -> str | None:
    """What is wrong with the inner loops of a kernel that multiplies, by NVIDIA's machine code."""
    named = [name for name in row.cases if name in catalogue.CASES]
    if row.facts.error or not named or row.kernel not in MULTIPLYING or not row.arch.startswith("sm_"):
        return None
    if not row.facts.loops and not set(sass.MATRIX.values()).isdisjoint(dict(row.facts.instructions)):
        return "no inner loop of products was found"
    case = catalogue.find(named[0])
    narrow = NARROW | (NARROW_ON_OLDER if version.startswith(f"{OLDER}.") else {})
    for loop in row.facts.loops:
        least, _ = narrow.get((row.kernel, case.key_format, loop.matrix), (LEAST_WIDE, ""))
        if loop.wide < least:
            return f"of what an inner loop loads {loop.wide:.0%} comes 16 bytes at a time, expected {least:.0%}"
        rows = _product_rows(row)
        if row.arch == "sm_90" and case.dtype != "float32" and rows >= WGMMA_ROWS and loop.matrix != "wgmma":
            return f"an inner loop of {rows} rows uses {loop.matrix or 'no matrix unit'}, expected wgmma"
    return None


def _product_rows(row: Row) -> int:
    sizes = dict(block.split() for block in row.blocks.split(", "))
    return int(sizes[ROWS.get(row.kernel, "q")])


def section(version: str, rows: Sequence[Row], refused: Sequence[str]) -> str:
    """One Triton version's part of the document."""
    lines = [f"## Triton {version}", ""]
    wrong = failures(rows, version)
    lines += [f"{len(rows)} compilations, {len(wrong) or 'no'} failure{'s' if len(wrong) != 1 else ''}.", ""]
    lines += [f"- {text}" for text in wrong] + ([""] if wrong else [])
    if refused:
        lines += ["Declined by the kernels themselves, so not compiled:", "", *(f"- {text}" for text in refused), ""]
    for arch in compiling.ARCHITECTURES:
        if some := alike([row for row in rows if row.arch == arch]):
            limit = max(row.facts.limit for row in some) // 1024
            lines += [f"### {arch} on Triton {version}", "", f"Shared memory of one program: {limit} KiB.", ""]
            lines += [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS), *map(_line, some), ""]
    return "\n".join(lines)


def _facts(row: Row) -> str:
    """The last columns of a row's line."""
    facts = row.facts
    if facts.error:
        return f"**{facts.error}** | - | - | - | - |"
    counts = ", ".join(f"{name} {count}" for name, count in facts.instructions) or "-"
    spilled = f"**{facts.spilled} B**" if facts.spilled else "0"
    shared = f"{facts.shared / 1024:.1f}"
    shared = f"**{shared}**" if facts.shared > facts.limit else shared
    loads = " / ".join(dict.fromkeys(map(str, facts.loops))) or "-"
    return f"{counts} | {facts.registers} | {spilled} | {shared} | {loads} |"


def _line(row: Row) -> str:
    cells = (row.kernel, ", ".join(row.cases), row.blocks, row.num_warps, row.num_stages, _facts(row))
    return "| " + " | ".join(map(str, cells))


def merged(document: str, version: str, new: str) -> str:
    """The document with this version's section replaced, newest version first."""
    parts = re.split(r"^(?=## Triton )", document, flags=re.MULTILINE)[1:]
    held = {part.split(maxsplit=3)[2]: part.rstrip() + "\n" for part in parts}
    held[version] = new.rstrip() + "\n"
    order = sorted(held, key=lambda text: [int(number) for number in re.findall(r"\d+", text)], reverse=True)
    return "\n".join([_header(), *(held[name] for name in order)])


def _header() -> str:
    tables = (("", NARROW), (f" (Triton {OLDER})", NARROW_ON_OLDER))
    lines = [
        f"| {' | '.join(where)}{which} | {least:.0%} | {why} |"
        for which, table in tables
        for where, (least, why) in table.items()
    ]
    return HEADER.format(least=f"{LEAST_WIDE:.0%}", exceptions="\n".join(lines))


def spot_check(planned: Planned, kept: Mapping[str, compiling.Facts], jobs: int, console: Console) -> list[str]:
    """Compile some of what did not change again; says where something else was found."""
    unchanged = sorted(digest for digest in planned if digest in kept)
    some = {digest: (planned[digest][0], dataclasses.replace(planned[digest][1])) for digest in unchanged[::SPOT_CHECK]}
    compile_all(some, jobs, console)
    return [
        f"{row.where}: found {_facts(row)}, expected {_facts(planned[digest][1])} as kept in {KEPT.name}"
        for digest, (_, row) in some.items()
        if row.facts != planned[digest][1].facts
    ]


def _store(version: str, text: str, check: bool, console: Console) -> int:
    old = DOCUMENT.read_text() if DOCUMENT.is_file() else ""
    new = merged(old, version, text)
    if not check:
        DOCUMENT.parent.mkdir(exist_ok=True)
        DOCUMENT.write_text(new)
        return 0
    if new == old:
        return 0
    changed = sorted(set(new.splitlines()) ^ set(old.splitlines()))
    console.print(f"{DOCUMENT.name} differs from what Triton {version} compiles now; make compile-matrix rewrites it:")
    for line in changed[:20]:
        console.print(("+ " if line in new.splitlines() else "- ") + line, markup=False, highlight=False)
    return 1


def _only(names: Sequence[str] | None, archs: Sequence[str], version: str, options: argparse.Namespace) -> int:
    """Compile and print; nothing is kept or written."""
    planned = plan(names, archs)
    compile_all(planned, options.jobs, options.console)
    rows = rows_of(planned)
    Console(width=400).print(section(version, rows, refusals(names, archs)), markup=False, highlight=False)
    return _report(version, f"{len(rows)} compilations", failures(rows, version), options.console)


def _everything(version: str, options: argparse.Namespace) -> int:
    """Compile what changed, then write the document or compare with it."""
    planned = plan(None, compiling.ARCHITECTURES)
    kept = {} if options.afresh else kept_facts.load(KEPT, version)
    stale = kept.keys() - planned.keys()
    changed = fill(planned, kept)
    differing, differs = [], 0
    if options.check:
        differing = spot_check(planned, kept, options.jobs, options.console)
        compile_all(changed, options.jobs, options.console)
        if changed or stale:
            said = f"{len(changed)} compilations are not in {KEPT.name} and {len(stale)} there are no longer used"
            options.console.print(f"{said}; make compile-matrix rewrites it")
            differs = 1
    else:
        compile_and_keep(changed, kept, version, options)
        kept_facts.save(KEPT, version, {digest: row.facts for digest, (_, row) in planned.items()})
    rows = rows_of(planned)
    differs |= _store(version, section(version, rows, refusals(None, compiling.ARCHITECTURES)), options.check,
                      options.console)  # fmt: skip
    wrong = differing + failures(rows, version) + [f"{name}: no case calls it" for name in missing_operations()]
    what = f"{len(rows)} compilations, {len(changed)} of them new"
    return _report(version, what, wrong, options.console) or differs


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.compiled.compile_matrix", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--check", action="store_true", help="compare with docs/compile_matrix.md instead of writing")
    parser.add_argument("--afresh", action="store_true", help="compile everything, whatever was found before")
    parser.add_argument("--arch", nargs="+", choices=compiling.ARCHITECTURES, help="only these; nothing is written")
    parser.add_argument("--case", nargs="+", help="only these, or `all`; nothing is written")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes")
    options = parser.parse_args(argv)
    options.console = Console(stderr=True, soft_wrap=True)
    if reason := compiling.why_not():
        options.console.print(reason)
        return 2
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # its default, of which it would warn
    version = importlib.import_module("triton").__version__
    if not options.arch and not options.case:
        return _everything(version, options)
    names = [*catalogue.CASES, *catalogue.COMPILED_ONLY] if options.case == ["all"] else options.case
    return _only(names, options.arch or compiling.ARCHITECTURES, version, options)


def _report(version: str, what: str, wrong: Sequence[str], console: Console) -> int:
    for line in wrong:
        console.print(line, style="red", markup=False, highlight=False)
    console.print(f"Triton {version}: {what}, {len(wrong)} failures")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
