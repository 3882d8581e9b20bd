"""The plans of ragged paged attention."""

import collections
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from benchmarks.compiled import compiling
from benchmarks.compiled.compiling import ITEMSIZE
from benchmarks.roofline import KernelArgs, Machine, Programs, Step, Work, cdiv
from ragged_attention.calls import Device

if TYPE_CHECKING:
    from benchmarks.cases.paged import PagedCase


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """A program's rows, as far as it matters which keys they see."""

    low: int  # the positions of the first and the last query
    high: int
    kv_len: int
    window: int  # 0: none

    @property
    def first(self) -> int:
        return max(self.low - self.window + 1, 0) if self.window else 0

    @property
    def last(self) -> int:
        return min(self.high + 1, self.kv_len)

    def whole(self, start: int, stop: int, block: int, edge: int, split_weights_below: int) -> tuple[int, int]:
        """The blocks of keys from `start` to `stop` that every query sees, none if one sees too few to be careless."""
        begin = start
        if self.window:
            begin = min(cdiv(max(self.high - self.window + 1, start), block) * block, cdiv(stop, edge) * edge)
        end = max(min(stop, self.low + 1) // block * block, begin)
        return begin, end if min(self.low + 1, self.window or self.kv_len) >= split_weights_below else begin


def visit(case: "PagedCase", kernel_args: KernelArgs, rows: Rows, start: int, stop: int) -> Work:
    """What a program of one KV head does with keys [start, stop), the first of which begins a block at an edge.

    The weights of bfloat16 rows are multiplied in two parts where there are masks, and in a split everywhere, unless
    the cache has 8 bits; in a large tile by reading each value twice.
    """
    block, count, d, dv = (kernel_args[name] for name in ("BLOCK_KV", "BLOCK_Q", "D_PAD", "DV_PAD"))
    edge = kernel_args.get("EDGE_KV", block)
    begin, end = rows.whole(start, stop, block, edge, kernel_args.get("SPLIT_WEIGHTS_BELOW", 0))
    both = cdiv(stop, edge) * edge - start
    careless = 0 if kernel_args.get("WEIGHT_PARTS") == 2 else end - begin
    again = both - careless if case.dtype == case.stored == "bfloat16" else 0
    seen = min(rows.last, stop) - max(rows.first, start)
    values = seen + (seen - careless if again and count >= 64 and dv >= 256 else 0)
    return Work(
        flops=2 * count * both * (d + dv),
        again=2 * count * again * dv,
        keys=(seen * kernel_args["D"] + values * kernel_args["DV"]) * ITEMSIZE[case.stored],
    )


def tiled(case: "PagedCase", kernel_args: KernelArgs) -> tuple[Work, Programs]:
    """What the tile kernel does: blocks of rows of sequences, over all keys that they see."""
    total, group = Work(), kernel_args["GROUP"]
    programs: collections.Counter[tuple[float, ...]] = collections.Counter()
    for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True):
        ahead = kv_len - q_len
        for row in range(0, q_len * group, kernel_args["BLOCK_Q"]):
            high = min((row + kernel_args["BLOCK_Q"] - 1) // group, q_len - 1)
            rows = Rows(ahead + row // group, ahead + high, kv_len, kernel_args["window"])
            own = visit(
                case, kernel_args, rows, rows.first // kernel_args["EDGE_KV"] * kernel_args["EDGE_KV"], rows.last
            )
            programs[turns("tile_kernel", own, kernel_args)] += case.num_kv_heads
            total += own
        total += Work(rows=q_len * group * (kernel_args["D"] + kernel_args["DV"]) * ITEMSIZE[case.dtype])
    return total * case.num_kv_heads, programs


def split(case: "PagedCase", kernel_args: KernelArgs) -> tuple[Work, Programs, Work, int]:
    """What the split kernel does, all keys cut in parts of one length, and what the kernel that combines them, with the
    rows that it combines."""
    total, combined, rows_combined = Work(), Work(), 0
    programs: collections.Counter[tuple[float, ...]] = collections.Counter()
    block, item, dv = kernel_args["BLOCK_KV"], ITEMSIZE[case.dtype], kernel_args["DV"]
    short = [
        (Rows(kv_len - q_len, kv_len - 1, kv_len, kernel_args["window"]), q_len * kernel_args["GROUP"])
        for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True)
    ]
    blocks = sum(cdiv(rows.last, block) - rows.first // block for rows, _ in short)
    each = blocks if kernel_args["WHOLE"] else max(cdiv(blocks, kernel_args["num_splits"]), kernel_args["MIN_BLOCKS"])
    for rows, count in short:
        parts = range(rows.first // block * block, rows.last, each * block)
        for begin in parts:
            own = visit(case, kernel_args, rows, begin, min(begin + parts.step, rows.last))
            programs[turns("split_kernel", own, kernel_args)] += case.num_kv_heads
            total += own
        total += Work(rows=len(parts) * count * kernel_args["D"] * item)
        if len(parts) == 1:
            total += Work(rows=count * dv * item)
        else:
            total += Work(rows=len(parts) * count * dv * 4)
            combined += Work(rows=len(parts) * count * dv * 4 + count * dv * item)
            rows_combined += count * case.num_kv_heads
    return total * case.num_kv_heads, programs, combined * case.num_kv_heads, rows_combined


def turns(name: str, work: Work, kernel_args: KernelArgs) -> tuple[float, ...]:
    """How often a program turns in each loop of its kernel, the one without masks first.

    Of a tile kernel the masked keys are those whose weights are multiplied twice, so this is for bfloat16 queries.
    """
    count, d, dv, block = (kernel_args[name] for name in ("BLOCK_Q", "D_PAD", "DV_PAD", "BLOCK_KV"))
    keys = work.flops / (2 * count * (d + dv))
    if name == "split_kernel":  # all its keys but the last few of a part
        return keys / block, 0.0
    masked = work.again / (2 * count * dv)
    return (keys - masked) / block, masked / kernel_args["EDGE_KV"]


def steps(case: "PagedCase", device: Device, machine: Machine, tile: Any) -> Iterator[Step]:
    """The kernels run one after another: the floor of a mixed batch is that of its prefills and that of its decodes."""
    launches = compiling.record(case.attention_call(device), tile)
    kernel_args = {launch.name: launch.arguments for launch in launches}
    split_args = kernel_args["split_kernel"]
    short = split_args["BLOCK_Q"] // split_args["GROUP"]
    lengths = list(zip(case.q_lens, case.kv_lens, strict=True))
    for name, found in (
        ("tile_kernel", [pair for pair in lengths if pair[0] > short]),
        ("split_kernel", [pair for pair in lengths if pair[0] <= short]),
    ):
        if not found:
            continue
        q_lens, kv_lens = zip(*found, strict=True)
        some = dataclasses.replace(case, q_lens=q_lens, kv_lens=kv_lens)
        floor, _ = some.floor_seconds(machine.memory, machine.multiplying)
        own, combined, rows = kernel_args[name], Work(), 0
        if name == "tile_kernel":
            work, programs = tiled(some, own)
        else:
            work, programs, combined, rows = split(some, own)
        yield Step(name, work, some.needed_bytes(), floor, programs)
        if rows:
            yield Step("combine_kernel", combined, programs={(): rows})
