"""Compares the machine code of our Triton kernels with that of other projects' kernels, compiled in the same way.

    python -m benchmarks.compiled.peers [--cases NAME ...] [--folder FOLDER] [--json FILE]

`benchmarks/peers/recorded.py` records the launches of other projects' kernels. The command compiles them for Hopper and
computes the time of the busiest unit, the bandwidth that the loops can reach, and the total time if iterations wait for
memory. `python -m benchmarks.peers.sources` fetches the sources. Without `--cases`, the command writes its part of
docs/predictions.md.
"""

import argparse
import dataclasses
import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.cases import catalogue
from benchmarks.cases.varlen import VarlenCase
from benchmarks.compiled import compiling, document, loops, pipelines
from benchmarks.compiled.hopper import ARCH, LATENCIES, MULTIPROCESSORS
from benchmarks.compiled.pipelines import Walk
from benchmarks.peers import recorded, registry, sources
from benchmarks.roofline import Launched, steps, varlen
from benchmarks.roofline.model import H200, Step, Work
from ragged_attention.tools.samples import device_of

SHOWN = (
    "decode_64x4k", "decode_1x32k", "decode_8x32k", "decode_63x1k_1x128k", "decode_70b_64x4k", "decode_70b_tp8_64x4k",
    "prefill_4k", "mixed_2q2k_32q1s1k", "speculative_64q4s4k", "gpt_oss_window_64x4k", "gpt_oss_full_64x4k",
    "gpt_oss_prefill_4k", "gemma2_32x4k", "gemma2_prefill_4k", "gemma3_32x4k", "gemma4_global_32x4k",
    "gemma4_global_prefill_4k", "fp8_64x4k", "fp8_prefill_4k", "mla_dense_h16_128x4k", "mla_dense_h64_128x4k",
    "mla_dense_h128_128x4k", "mla_dense_h16_1x32k", "mha_128_4k", "mha_128_4k_backward", "mha_192_4k",
    "mha_192_4k_backward", "mha_gqa_8x2k", "mha_gqa_8x2k_backward", "mha_packed", "mha_packed_backward",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Side:
    """The kernels that one project launches for a case."""

    who: str
    busy: dict[str, float]  # seconds for which each kind of unit is busy
    waiting: dict[float, float]  # latency of memory in cycles -> seconds in total
    main: Walk  # the loop that takes most of the time
    resident: float  # programs of this loop's kernel that a multiprocessor runs at the same time
    launches: tuple[Launched, ...]

    @property
    def bound(self) -> str:
        return max(self.busy, key=self.busy.__getitem__)


def side_of(who: str, pairs: Iterable[recorded.Recorded], least: float) -> Side:
    """The compiled kernels of a case. `least` is the time in which memory can move the needed bytes."""
    busy: dict[str, float] = {}
    waiting = dict.fromkeys(LATENCIES, 0.0)
    launched, mains = [], []
    for launch, programs in pairs:
        step = Step(launch.name, Work(), programs=programs)
        launched.append(Launched(launch.name, launch.programs, step.working))
        if not step.turns:
            continue
        walks = pipelines.walks(launch)
        if len(walks) != len(step.turns):  # iterations are known for one loop only; assume the largest
            walks = [max(walks, key=lambda walk: dict(walk.busy)["instructions"])]
        loops.keep_busy(busy, step, walks)
        for latency in LATENCIES:
            waiting[latency] += loops.seconds(step, walks, latency)
        walk, turns = max(zip(walks, step.turns, strict=False), key=lambda both: both[0].chain * both[1])
        mains.append((walk.chain * turns, walk, min(walk.programs, max(step.working / MULTIPROCESSORS, 1))))
    _, main, resident = max(mains, key=lambda found: found[0])
    return Side(who, busy, {key: max(value, least) for key, value in waiting.items()}, main, resident, tuple(launched))


def ours(name: str, least: float) -> Side:
    case = catalogue.find(name)
    device = device_of("torch", ARCH)
    launches = compiling.record(case.attention_call(device))
    if isinstance(case, VarlenCase):
        pairs = [
            recorded.Recorded(one, varlen.programs(case, one) if "BLOCK_KV" in one.constants else {(): one.programs})
            for one in launches
        ]
    else:
        programs = {step.name: step.programs for step in steps(case, "triton", device)}
        pairs = [recorded.Recorded(one, programs.get(one.name, {})) for one in launches]
    return side_of("ours", pairs, least)


def compared(name: str, folder: Path) -> list[Side]:
    """Our kernels for a case, then those of each peer that accepts the case. Empty if no peer accepts it."""
    registry.FOLDER = folder
    case = catalogue.find(name)
    least = case.needed_bytes() / H200.memory
    peers = [peer for peer in recorded.PEERS if isinstance(case, peer.kinds) and not peer.declines(case)]
    found = [
        side_of(peer.name, peer.record(case), least) for peer in peers if not sources.missing(folder, peer.package)
    ]
    return [ours(name, least), *found] if found else []


HEAD = (
    "| case | who | warps, stages | registers | spilled | programs | wait | blocks ahead | reachable, TB/s "
    "| busiest unit, us | waiting, us | launches | times ours | of our reach |\n"
)


def lines_of(name: str, sides: Sequence[Side]) -> str:
    """The table lines of one case.

    The last two columns compare a side with ours at the longer latency: its modelled time, and its bandwidth.
    """
    text, slow = "", LATENCIES[-1]
    for side in sides:
        walk, mine = side.main, sides[0]
        rates = " - ".join(f"{walk.reachable(latency, side.resident) / 1e12:.1f}" for latency in reversed(LATENCIES))
        waits = " - ".join(dict.fromkeys(f"{side.waiting[latency] * 1e6:.0f}" for latency in LATENCIES))
        share = walk.reachable(slow, side.resident) / (mine.main.reachable(slow, mine.resident) or math.nan)
        ratios = f"{side.waiting[slow] / mine.waiting[slow]:.2f} | {share:.2f}"
        if not walk.programs:
            waits, ratios = "does not fit", "- | -"
        text += (
            f"| {name} | {side.who} | {walk.num_warps}, {walk.num_stages} | {walk.registers} | {walk.spilled} "
            f"| {walk.programs} | {'-' if walk.least_wait is None else walk.least_wait} | {walk.blocks:.1f} | {rates} "
            f"| {side.busy[side.bound] * 1e6:.1f} {side.bound} | {waits} | {len(side.launches)} | {ratios} |\n"
        )
    return text


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compiled.peers", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--cases", "--case", nargs="+", help="only these cases; nothing is written")
    parser.add_argument("--folder", type=Path, default=sources.FOLDER, help="where the sources are")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes")
    options = parser.parse_args(argv)
    packages = {peer.package for peer in recorded.PEERS}
    absent = [reason for package in sorted(packages) if (reason := sources.missing(options.folder, package))]
    if reason := compiling.why_not() or (absent and "; ".join(absent)):
        print(reason, file=sys.stderr)
        return 2
    names = options.cases or SHOWN
    with compiling.processes(min(options.jobs, len(names))) as pool:
        found = list(pool.map(compared, names, [options.folder] * len(names)))
    text = document.table(HEAD, map(lines_of, names, found))
    if options.json:
        rows = [
            {"case": name, **dataclasses.asdict(side)}
            for name, sides in zip(names, found, strict=True)
            for side in sides
        ]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.cases:
        print(text)
    else:
        document.replace("peers", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
