"""Reports how well the loops of compiled kernels keep memory busy: buffers, waits, resident programs, bandwidth.

    python -m benchmarks.compiled.pipelines [--cases NAME ...] [--kernels NAME ...] [--tile FIELD=VALUE ...] [--json F]

`loops.py` counts how long units are busy, so it does not notice a loop that waits for its keys right after it has
requested them. This command compiles every kernel with matrix products for Hopper and reads each of its inner loops:
the buffers in Triton's intermediate form (`staging.py`), the waits in the machine code, the number of programs that
fit a multiprocessor (`hopper.py`), the bytes that these programs have in flight, and the time of an iteration in which
each instruction waits for its operands (`scoreboard.py`). Together they give the bandwidth that the loop can reach at a
given latency of memory. The model is good for ratios between loops; docs/predictions.md says how far measurements may
differ from it.

`--tile` changes fields of the heuristic's tile in all cases that have them. Without `--cases`, the command writes its
part of docs/predictions.md.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import catalogue
from benchmarks.compiled import compiling, document, sass, scoreboard, staging
from benchmarks.compiled.compile_matrix import ATTENTIONS, MULTIPLYING
from benchmarks.compiled.hopper import ARCH, CLOCK, LATENCIES, MULTIPROCESSORS, in_flight_for, programs_at_once
from benchmarks.roofline import plan_of, planned
from benchmarks.roofline.model import H200
from ragged_attention import dispatch
from ragged_attention.tools.samples import device_of

LEAST_BLOCKS = 2  # a decode loop that waits for a block must have this number of blocks in flight, including that block
# The kernels that read many keys for few rows, so that memory limits them.
DECODING = ("split_kernel", "latent_kernel")


@dataclasses.dataclass(frozen=True)
class Walk:
    """One inner loop of a compiled kernel."""

    kernel: str
    loop: int
    num_warps: int
    num_stages: int
    registers: int
    spilled: int
    shared: int
    programs: int  # resident programs per multiprocessor
    buffers: tuple[str, ...]
    stages: int | None  # blocks of keys that the buffers hold
    least_wait: int | None  # groups of copies still in flight after the strictest wait
    copied: int  # bytes of keys and values per iteration
    in_flight: int  # the most bytes that a program has in flight when it starts a wait
    chain: float  # cycles of an iteration of a single program if memory had no latency
    turns: tuple[tuple[float, float], ...]  # (latency of memory in cycles, cycles of an iteration of a single program)
    busy: tuple[tuple[str, float], ...]  # (unit, cycles per iteration for which it is busy)

    @property
    def blocks(self) -> float:
        """The number of blocks of keys in flight when the loop waits for a block, including that block."""
        return self.in_flight / self.copied if self.copied else 0.0

    @property
    def pipelined(self) -> bool:
        """Whether the loop prefetches: while it waits for one block of keys, another block is in flight."""
        return bool(self.least_wait) and self.blocks >= LEAST_BLOCKS

    def turn(self, latency: float, resident: float = 1) -> float:
        """The cycles of an iteration while `resident` programs share the units of a multiprocessor.

        Their waits overlap.
        """
        return max(dict(self.turns)[latency], resident * max(cycles for _, cycles in self.busy))

    def reachable(self, latency: float, resident: float | None = None) -> float:
        """The bytes per second that all multiprocessors can read, by default with as many programs as fit."""
        count = self.programs if resident is None else min(resident, self.programs)
        return count * self.copied / self.turn(latency, count) * MULTIPROCESSORS * CLOCK


def walks(launch: compiling.Launch, latencies: Sequence[float] = LATENCIES) -> list[Walk]:
    """The inner loops of a launch's kernel, compiled for Hopper."""
    compiled = compiling.compiled_by_triton(launch, ARCH)
    code, shared = compiling.machine_code(compiled), int(compiled.metadata.shared)
    loops = sass.multiplying_loops(sass.instructions_of(code.listing))
    staged = staging.read(compiled.asm["ttgir"])
    if len(staged) != len(loops):  # the compiler has split or dropped a loop, so the loops cannot be matched
        staged = [staging.Staging((), (), ())] * len(loops)
    results = []
    for index, (lines, stage) in enumerate(zip(loops, staged, strict=True)):
        alone = {latency: scoreboard.turn(lines, launch.num_warps, latency) for latency in (0.0, *latencies)}
        results.append(
            Walk(
                kernel=launch.name, loop=index, num_warps=launch.num_warps, num_stages=launch.num_stages,
                registers=code.registers, spilled=code.spilled, shared=shared,
                programs=programs_at_once(code.registers, shared, launch.num_warps),
                buffers=tuple(map(str, stage.buffers)), stages=stage.stages,
                least_wait=alone[0.0].least_wait, copied=scoreboard.copied(lines, launch.num_warps),
                in_flight=alone[0.0].in_flight, chain=alone[0.0].cycles,
                turns=tuple((latency, one.cycles) for latency, one in alone.items()),
                busy=tuple(sass.cycles(lines, launch.num_warps).items()),
            )
        )  # fmt: skip
    return results


def launches_of(name: str, tile: Mapping[str, Any] | None = None, arch: str = ARCH) -> Iterator[compiling.Launch]:
    """The launches of a case's kernels with matrix products. Launches with equal code occur once.

    `tile` overrides fields of the heuristic's tile.
    """
    seen = set()
    case = catalogue.find(name)
    for call in case.calls(device_of("torch", arch)):
        module = dispatch.load(call.OPERATION, "triton") if call.OPERATION in ATTENTIONS else None
        if module is None or module.why_not(call):
            continue
        default = compiling.tile_of(case, call)
        changed = {key: value for key, value in (tile or {}).items() if hasattr(default, key)}
        for launch in compiling.record(call, dataclasses.replace(default, **changed)):
            digest = compiling.digest(launch, arch)
            if launch.name in MULTIPLYING and digest not in seen:
                seen.add(digest)
                yield launch


def read_case(name: str, kernels: Sequence[str] = (), tile: Mapping[str, Any] | None = None) -> list[Walk]:
    """The inner loops of the selected kernels of a case."""
    return [walk for launch in selected_launches(name, kernels, tile) for walk in walks(launch)]


def selected_launches(
    name: str, kernels: Sequence[str], tile: Mapping[str, Any] | None, arch: str = ARCH
) -> Iterator[compiling.Launch]:
    """The launches of a case's kernels with the given names, or by default of all kernels that have work."""
    idle = idle_kernels(name)
    launches = launches_of(name, tile, arch)
    return (one for one in launches if (one.name in kernels if kernels else one.name not in idle))


def idle_kernels(name: str) -> set[str]:
    """The kernels that a case launches although they have no work."""
    case, device = catalogue.find(name), device_of("torch", ARCH)
    if "triton" not in planned(case, device):
        return set()
    plan = plan_of(case, "triton", device)
    return {launch.name for launch in plan.launches if not launch.working}


# ---- the table

HEAD = (
    "| case | kernel | warps, stages | registers | spilled | shared, KiB | programs | buffers | wait | blocks ahead "
    "| KiB ahead | chain, cycles | turn, cycles | units, cycles | reachable, TB/s |\n"
)


def label(loop: Any) -> str:
    """The name of a loop's kernel. The number of the loop follows, except for the first loop."""
    return loop.kernel if loop.loop == 0 else f"{loop.kernel}, loop {loop.loop}"


def line_of(name: str, walk: Walk) -> str:
    turns = " - ".join(f"{walk.turn(latency):.0f}" for latency in LATENCIES)
    rates = " - ".join(f"{walk.reachable(latency) / 1e12:.1f}" for latency in reversed(LATENCIES))
    unit, cycles = max(walk.busy, key=lambda item: item[1])
    ahead = f"{walk.blocks:.1f} | {walk.programs * walk.in_flight / 1024:.0f}"
    wait = "-" if walk.least_wait is None else walk.least_wait
    return (
        f"| {name} | {label(walk)} | {walk.num_warps}, {walk.num_stages} | {walk.registers} | {walk.spilled} "
        f"| {walk.shared / 1024:.0f} | {walk.programs} | {walk.stages or '-'} | {wait} | {ahead} "
        f"| {walk.chain:.0f} | {turns} | {cycles:.0f} {unit} | {rates} |\n"
    )


def table(walks: Iterable[tuple[str, Walk]]) -> str:
    return document.table(HEAD, (line_of(name, walk) for name, walk in walks))


def needed() -> str:
    """A sentence with the bytes that a multiprocessor must have in flight by Little's law."""
    amounts = " to ".join(f"{in_flight_for(H200.memory, latency) / 1024:.0f}" for latency in LATENCIES)
    return f"{amounts} KiB in flight per multiprocessor, at all times, give {H200.memory / 1e12:.1f} TB/s."


# One case for each important piece of code, so that the page stays readable.
SHOWN = (
    "decode_64x4k", "decode_64x4k_page1", "decode_64x4k_page64", "decode_70b_tp8_64x4k", "speculative_tree_64q4s4k",
    "gpt_oss_window_64x4k", "gpt_oss_full_64x4k", "gemma2_32x4k", "gemma3_32x4k", "gemma4_global_32x4k", "fp8_64x4k",
    "fp8_64x4k_page64", "prefill_4k", "gemma2_prefill_4k", "mla_dense_h16_128x4k", "mla_dense_h128_128x4k",
    "mla_sparse_h16_b8", "mla_sparse_h32_b8", "mla_sparse_h128_128q2", "mla_sparse_v4_h64_128q2",
    "mla_prefill_h128_32k", "mha_128_4k", "mha_128_4k_backward",
)  # fmt: skip


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compiled.pipelines", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    return parse_choice(parser, argv)


def parse_choice(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Add the options that select cases, kernels and tiles, and parse all arguments."""
    parser.add_argument("--cases", "--case", nargs="+", help="only these cases; nothing is written")
    parser.add_argument("--kernels", nargs="+", default=[], help="only kernels with these names")
    parser.add_argument(
        "--tile", nargs="+", default=[], metavar="FIELD=VALUE", help="fields to change in the heuristic's tile"
    )
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes")
    options = parser.parse_args(argv)
    options.tile = {name: int(value) for name, _, value in (one.partition("=") for one in options.tile)}
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
    if reason := compiling.why_not():
        print(reason, file=sys.stderr)
        return 2
    names = options.cases or SHOWN
    with compiling.processes(min(options.jobs, len(names))) as pool:
        results = pool.map(read_case, names, [options.kernels] * len(names), [options.tile] * len(names))
        named_walks = [
            (name, walk) for name, walks_of_case in zip(names, results, strict=True) for walk in walks_of_case
        ]
    text = table(named_walks)
    if options.json:
        rows = [{"case": name, **dataclasses.asdict(walk)} for name, walk in named_walks]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.cases:
        print(text + "\n" + needed())
    else:
        document.replace("pipelines", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
