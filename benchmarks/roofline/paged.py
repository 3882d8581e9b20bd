"""The launches of ragged paged attention and their work, from the keys that each program visits."""

import collections
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from benchmarks.cases.paged import PagedCase
from benchmarks.compiled.compiling import ITEMSIZE
from benchmarks.roofline.model import KernelArgs, Machine, Step, Work, visible
from ragged_attention.calls import Device
from ragged_attention.tools import recording, schedule


def planned(case: PagedCase, device: Device) -> tuple[str, ...]:
    del case, device
    return ("triton",)


def steps(case: PagedCase, backend: str, device: Device, machine: Machine, tile: Any) -> Iterator[Step]:
    """The steps of a case.

    The kernels run one after another, so each step has its own floor, which is the floor of its sequences.
    """
    del backend
    for launch, programs in attention(case, device, tile):
        counts = collections.Counter(program.seq for program in programs)
        part = dataclasses.replace(
            case,
            q_lens=tuple(case.q_lens[seq] for seq in counts),
            kv_lens=tuple(case.kv_lens[seq] for seq in counts),
        )
        floor, _ = part.floor_seconds(machine.memory, machine.multiplying)
        work = sum((visited(case, launch.constants, program) for program in programs), Work())
        combined, rows_combined = Work(), 0
        width, item = launch.constants["D"] * ITEMSIZE[case.dtype], ITEMSIZE[case.dtype]
        for seq, count in counts.items():
            rows, d_v = case.q_lens[seq] * launch.constants["GROUP"], launch.constants["DV"]
            if launch.name == "tile_kernel" or count == 1:
                work += Work(rows=rows * (width + d_v * item))
            else:
                work += Work(rows=rows * count * (width + d_v * 4))
                combined += Work(rows=rows * (count * d_v * 4 + d_v * item))
                rows_combined += rows * case.num_kv_heads
        turns = collections.Counter(map(turns_of, programs))
        working = {iterations: number * case.num_kv_heads for iterations, number in turns.items()}
        yield Step(launch.name, work * case.num_kv_heads, part.needed_bytes(), floor, working)
        if rows_combined:
            yield Step("combine_kernel", combined * case.num_kv_heads, programs={(): rows_combined})


@functools.cache
def attention(
    case: PagedCase, device: Device, tile: Any
) -> list[tuple[recording.Launch, tuple[schedule.Program, ...]]]:
    """(launch, its programs) for each of a case's attention launches that has work."""
    launches = recording.record(case.call(case.operation, device, **case.tables()), tile)
    simulated = [
        (launch, schedule.simulated(launch).programs) for launch in launches if launch.name != "combine_kernel"
    ]
    return [(launch, programs) for launch, programs in simulated if programs]


def visited(case: PagedCase, kernel_args: KernelArgs, program: schedule.Program) -> Work:
    """The work of a program for the keys that it visits.

    A bfloat16 kernel over a bfloat16 cache splits weights into two terms, in masked blocks and in all blocks of
    `split_kernel`. The second term takes another product with the values, for which a wide tile reads them again.
    """
    count, d, d_v = (kernel_args[name] for name in ("BLOCK_Q", "D_PAD", "DV_PAD"))
    whole = sum(visit.stop - visit.start for visit in program.visits if not visit.masked)
    once = 0 if kernel_args["WEIGHT_TERMS"] == 2 else whole
    again = program.keys - once if case.dtype == case.stored == "bfloat16" else 0
    seen = seen_keys(case, program)
    values = seen + (seen - once if again and count >= 64 and d_v >= 512 else 0)
    return Work(
        flops=2 * count * program.keys * (d + d_v),
        again=2 * count * again * d_v,
        keys=(seen * kernel_args["D"] + values * kernel_args["DV"]) * ITEMSIZE[case.stored],
    )


def seen_keys(case: PagedCase, program: schedule.Program) -> int:
    """The number of visited keys that at least one query of the program sees. Other keys are not read."""
    start, stop = program.span
    kv_len = case.kv_lens[program.seq]
    low, high = (kv_len - case.q_lens[program.seq] + token for token in program.tokens)
    first, last = visible(low, high, kv_len, case.sliding_window)
    return min(last, stop) - max(first, start)


def turns_of(program: schedule.Program) -> tuple[float, float]:
    """(key blocks that a program visits in the loop without masks, key blocks in the masked loop)."""
    blocks = [0.0, 0.0]
    for visit in program.visits:
        blocks[visit.masked] += (visit.stop - visit.start) / visit.block
    return blocks[0], blocks[1]
