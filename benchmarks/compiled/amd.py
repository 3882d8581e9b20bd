"""The bottlenecks of the Triton kernels' loops on AMD's GPUs, read from their machine code.

    python -m benchmarks.compiled.amd [--cases NAME ...] [--arch gfx942 ...] [--kernels NAME ...] [--tile FIELD=VALUE]

The command compiles every kernel with matrix products of the main cases for MI300X (gfx942) and MI355X (gfx950), and
reads each of its inner loops (`gcn.py`): registers, resident programs, instructions by kind and width, the cycles for
which units are busy, the cycles between the request for a block of keys and the wait for it, and the cycles of an
iteration. docs/amd.md states the assumptions. The command writes the tables of docs/amd.md; with `--cases` it only
prints.
"""

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.compiled import compiling, document, gcn, pipelines
from benchmarks.compiled.gcn import CHIPS, SIMDS, Chip, Counts, Turn

DOCUMENT = Path(__file__).parents[2] / "docs" / "amd.md"
LATENCIES = (1500.0, 2100.0)  # latencies of memory under load, in cycles; not measured

# One case for each important piece of code. If a case has several kernels, the tuple names those that are read.
SHOWN: dict[str, tuple[str, ...]] = {
    "decode_64x4k": (), "decode_64x4k_page1": (), "decode_64x4k_page64": (), "gpt_oss_full_64x4k": (),
    "gemma2_32x4k": (), "gemma4_global_32x4k": (), "fp8_64x4k": (), "prefill_4k": (), "gpt_oss_prefill_4k": (),
    "gemma2_prefill_4k": (), "fp8_prefill_4k": (), "mha_128_4k": (), "mha_128_4k_backward": (),
    "mla_dense_h16_128x4k": (), "mla_dense_h128_128x4k": (), "mla_sparse_h16_b8": (), "mla_sparse_h128_128q2": (),
    "mla_sparse_v4_h64_128q2": (), "mla_prefill_h16_32k": ("gradient_kernel",),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Loop:
    """One inner loop of a kernel compiled for AMD."""

    kernel: str
    loop: int
    arch: str
    num_warps: int
    num_stages: int
    vectors: int  # vector registers per thread, in both register files
    accumulators: int  # of these, accumulation registers (AGPRs), which are the second file
    scalars: int  # scalar registers per wave
    parked: int  # scalar registers that are spilled to lanes of vector registers
    spilled: int  # spilled bytes per thread
    lds: int  # bytes of LDS per program
    counts: Counts
    busy: Mapping[str, float]  # kind of unit -> cycles per iteration
    copied: int  # bytes of keys and values per iteration
    chain: Turn  # an iteration if memory had no latency
    turns: tuple[tuple[float, Turn], ...]  # (latency of memory in cycles, an iteration at that latency)

    @property
    def chip(self) -> Chip:
        return CHIPS[self.arch]

    @property
    def programs(self) -> int:
        """The number of programs that fit a compute unit."""
        return gcn.programs_at_once(self.vectors, self.lds, self.num_warps, self.chip)

    @property
    def waves(self) -> float:
        """The number of resident waves per SIMD."""
        return self.programs * self.num_warps / SIMDS

    @property
    def needs(self) -> dict[str, float]:
        """The cycles that an iteration needs from each kind of unit.

        For decode kernels, memory is a unit too: the time to load keys at a compute unit's share of the bandwidth.
        Kernels with many rows usually find keys in caches, because other programs have already loaded them.
        """
        memory = {"memory": self.copied / self.chip.share} if self.kernel in pipelines.DECODING else {}
        return {**self.busy, **memory}

    @property
    def bound(self) -> str:
        """The unit that an iteration keeps busy longest."""
        return max(self.needs, key=self.needs.__getitem__)

    def turn(self, latency: float) -> float:
        """The cycles per iteration of each resident program.

        Programs share the units of a compute unit, but their waits overlap.
        """
        return max(dict(self.turns)[latency].cycles, self.programs * max(self.busy.values()))

    def reachable(self, latency: float) -> float:
        """The bytes of keys and values per second that all compute units together can read."""
        return self.programs * self.copied / self.turn(latency) * self.chip.units * self.chip.clock


def loops(launch: compiling.Launch, arch: str) -> list[Loop]:
    """The inner loops of a launch's kernel, compiled for a GPU."""
    compiled = compiling.compiled_by_triton(launch, arch)
    text, chip = compiled.asm["amdgcn"], CHIPS[arch]
    facts = {name: gcn.metadata(text, name) for name in ("vgpr_count", "agpr_count", "sgpr_count", "sgpr_spill_count")}
    spilled = max(gcn.metadata(text, "private_segment_fixed_size"), 4 * gcn.metadata(text, "vgpr_spill_count"))
    return [
        Loop(
            launch.name, index, arch, launch.num_warps, launch.num_stages, facts["vgpr_count"], facts["agpr_count"],
            facts["sgpr_count"], facts["sgpr_spill_count"], spilled, compiled.metadata.shared, gcn.count(lines),
            gcn.busy(lines, launch.num_warps, chip), gcn.copied(lines, launch.num_warps),
            gcn.turn(lines, launch.num_warps, chip, 0.0),
            tuple((latency, gcn.turn(lines, launch.num_warps, chip, latency)) for latency in LATENCIES),
        )
        for index, lines in enumerate(gcn.multiplying_loops(text))
    ]  # fmt: skip


def read_case(name: str, arch: str, kernels: Sequence[str] = (), tile: Mapping[str, Any] | None = None) -> list[Loop]:
    """The inner loops of the selected kernels of a case."""
    return [loop for launch in pipelines.selected_launches(name, kernels, tile, arch) for loop in loops(launch, arch)]


# ---- tables

CODE = (
    "| case | kernel | warps, stages | vector registers | scalar | spilled | LDS, KiB | waves | products | vectors "
    "| conversions | LDS reads | LDS writes | exchanges | loads | barriers |\n"
)
UNITS = ("matrices", "vectors", "LDS", "memory")
TIME = f"| case | kernel | {' | '.join(UNITS)} | bound | matrices | wait | lead | chain | turn | reachable, TB/s |\n"


def accesses(counts: Counts, *kinds: str) -> str:
    """The number of accesses by width, such as `16 B x 8, 4 B x 5`.

    Loads into LDS that bypass the registers are marked "direct".
    """
    texts = [
        f"{width} B x {number}{' direct' if kind == 'direct' else ''}"
        for kind in kinds
        for width, number in sorted(counts.widths.get(kind, {}).items(), reverse=True)
    ]
    return ", ".join(texts) or "-"


def code_line(case: str, loop: Loop) -> str:
    counts = loop.counts
    products = ", ".join(f"{shape} x {number}" for shape, number in sorted(counts.products.items()))
    scalar = f"{loop.scalars}, {loop.parked} parked" if loop.parked else str(loop.scalars)
    vectors = f"{loop.vectors}, {loop.accumulators} of them AGPRs" if loop.accumulators else str(loop.vectors)
    return (
        f"| {case} | {pipelines.label(loop)} | {loop.num_warps}, {loop.num_stages} | {vectors} | {scalar} "
        f"| {loop.spilled} | {loop.lds / 1024:.0f} | {loop.waves:g} | {products} "
        f"| {counts['vector'] + counts['special']} "
        f"| {counts['convert'] or '-'} | {accesses(counts, 'read')} | {accesses(counts, 'write')} "
        f"| {counts['exchange'] or '-'} | {accesses(counts, 'load', 'direct')} | {counts['barrier']} |\n"
    )


def time_line(case: str, loop: Loop) -> str:
    turns = " - ".join(f"{loop.turn(latency):.0f}" for latency in LATENCIES)
    rates = " - ".join(f"{loop.reachable(latency) / 1e12:.1f}" for latency in reversed(LATENCIES))
    wait = "-" if loop.chain.least_wait is None else loop.chain.least_wait
    needs = " | ".join(f"{loop.needs[unit]:.0f}" if unit in loop.needs else "-" for unit in UNITS)
    return (
        f"| {case} | {pipelines.label(loop)} | {needs} | {loop.bound} "
        f"| {loop.busy['matrices'] / loop.needs[loop.bound]:.0%} | {wait} | {loop.chain.lead:.0f} "
        f"| {loop.chain.cycles:.0f} | {turns} | {rates} |\n"
    )


Found = Sequence[tuple[str, Loop]]


def tables(found: Found) -> str:
    """Two tables for a GPU: the instructions of its loops, and their times."""
    made = document.table(CODE, (code_line(case, loop) for case, loop in found))
    return made + "\n" + document.table(TIME, (time_line(case, loop) for case, loop in found))


def read_all(options: argparse.Namespace, arch: str) -> Found:
    cases = {name: tuple(options.kernels) for name in options.cases} if options.cases else SHOWN
    with compiling.processes(min(options.jobs, len(cases))) as pool:
        results = list(
            pool.map(read_case, cases, [arch] * len(cases), cases.values(), [options.tile] * len(cases), chunksize=1)
        )
    return [(name, loop) for name, found in zip(cases, results, strict=True) for loop in found]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compiled.amd", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--arch", nargs="+", choices=CHIPS, default=list(CHIPS), help="compile for these GPUs")
    options = pipelines.parse_choice(parser, argv)
    if reason := compiling.why_not():
        print(reason, file=sys.stderr)
        return 2
    for arch in options.arch:
        text = tables(read_all(options, arch))
        if options.cases:
            print(f"{arch}\n\n{text}")
        else:
            DOCUMENT.write_text(document.written(DOCUMENT.read_text(), arch, text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
