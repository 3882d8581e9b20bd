"""What a plan costs beyond what its call needs, known before anything runs.

`compiling.record` says what the Triton room launches: tiles, splits, grids. With the lengths of a case that tells which
keys each program visits, so how much it multiplies and how many bytes it asks for. Three things make that more than
the call needs: tiles that masks and padding fill, keys that several programs read, results that are put together from
parts. The CUDA kernels' plan is known from their heuristic and the size of their tiles.

A GPU can multiply, ask its memory and ask its second-level cache for only so much in a second; whichever takes longest
is the least time that a step of the plan can take. The floor of a case is the time in which each needed byte comes once
and no operation is in vain; what the steps together take beyond it is the plan's excess. What is multiplied in a second
part, because rounding to 16 bits would lose it, is not excess but the price of exactness, and shown by itself. Latency,
exponentials and the decoding of 8-bit formats are in neither: a plan without excess may still be slow, but one with
much of it cannot be fast.
"""

import argparse
import dataclasses
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.cases import catalogue
from benchmarks.cases.mla import LatentCase
from benchmarks.cases.paged import ITEMSIZE, Case
from benchmarks.compiled import compiling
from ragged_attention import dispatch
from ragged_attention.calls import Device
from ragged_attention.samples import device_of

AnyCase = Case | LatentCase
KernelArgs = Mapping[str, Any]  # by name, without the arrays


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """What a GPU can do in a second."""

    memory: float  # bytes
    cache: float  # bytes that its second-level cache hands to the multiprocessors
    cache_size: int  # bytes
    multiplying: float  # multiplications and additions of bfloat16 matrices


# Memory and matrices as measured on one. The cache is not: FlashAttention-3 at its fastest (740 TFLOP/s, 128 rows a
# program) must have had 5.8e12 bytes from an H100's, and what it does beside that is taken to be a tenth.
H200 = Machine(memory=4.3e12, cache=6.4e12, cache_size=50 * 10**6, multiplying=7.9e14)


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """What programs do."""

    flops: int = 0  # given to the matrix units, with all rows, columns and keys of the tiles
    again: int = 0  # beside these: products of what rounding took from operands
    keys: int = 0  # bytes of keys and values asked for, wherever they come from
    rows: int = 0  # bytes of queries, results and parts of results, read and written

    def __add__(self, other: "Work") -> "Work":
        both = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Work(*(mine + others for mine, others in both))

    def __mul__(self, times: int) -> "Work":
        return Work(*(number * times for number in dataclasses.astuple(self)))


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """What the programs of a kernel do, with what must come from memory for it, and what the case needs of it."""

    name: str
    work: Work
    fetched: float = 0  # bytes
    floor: float = 0  # seconds

    def times(self, machine: Machine, *, exact: bool) -> dict[str, float]:
        """Seconds by what takes them; `exact`: with what is multiplied again."""
        return {
            "memory": self.fetched / machine.memory,
            "cache": (self.work.keys + self.work.rows) / machine.cache,
            "arithmetic": (self.work.flops + exact * self.work.again) / machine.multiplying,
        }


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


# ---- ragged paged attention


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


def visit(case: Case, kernel_args: KernelArgs, rows: Rows, start: int, stop: int) -> Work:
    """What a program of one KV head does with keys [start, stop), the first of which begins a block at an edge.

    The weights of bfloat16 rows are multiplied in two parts where there are masks, and in a split everywhere; in a
    large tile by reading each value twice.
    """
    block, count, d, dv = (kernel_args[name] for name in ("BLOCK_KV", "BLOCK_Q", "D_PAD", "DV_PAD"))
    edge = kernel_args.get("EDGE_KV", block)
    begin, end = rows.whole(start, stop, block, edge, kernel_args.get("SPLIT_WEIGHTS_BELOW", 0))
    both = cdiv(stop, edge) * edge - start
    careless = 0 if kernel_args.get("WEIGHT_PARTS") == 2 else end - begin
    again = both - careless if case.dtype == "bfloat16" else 0
    seen = min(rows.last, stop) - max(rows.first, start)
    values = seen + (seen - careless if again and count >= 64 and dv >= 256 else 0)
    return Work(
        flops=2 * count * both * (d + dv),
        again=2 * count * again * dv,
        keys=(seen * kernel_args["D"] + values * kernel_args["DV"]) * ITEMSIZE[case.stored],
    )


def tiled(case: Case, kernel_args: KernelArgs) -> Work:
    """What the tile kernel does: blocks of rows of sequences, over all keys that they see."""
    total, group = Work(), kernel_args["GROUP"]
    for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True):
        ahead = kv_len - q_len
        for row in range(0, q_len * group, kernel_args["BLOCK_Q"]):
            high = min((row + kernel_args["BLOCK_Q"] - 1) // group, q_len - 1)
            rows = Rows(ahead + row // group, ahead + high, kv_len, kernel_args["window"])
            total += visit(
                case, kernel_args, rows, rows.first // kernel_args["EDGE_KV"] * kernel_args["EDGE_KV"], rows.last
            )
        total += Work(rows=q_len * group * (kernel_args["D"] + kernel_args["DV"]) * ITEMSIZE[case.dtype])
    return total * case.num_kv_heads


def split(case: Case, kernel_args: KernelArgs) -> tuple[Work, Work]:
    """What the split kernel does, a sequence's keys cut in several parts, and what the kernel that combines them."""
    total, combined = Work(), Work()
    block, item, dv = kernel_args["BLOCK_KV"], ITEMSIZE[case.dtype], kernel_args["DV"]
    for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True):
        rows, count = Rows(kv_len - q_len, kv_len - 1, kv_len, kernel_args["window"]), q_len * kernel_args["GROUP"]
        start = rows.first // block * block
        step = max(cdiv(cdiv(rows.last - start, kernel_args["NUM_SPLITS"]), block) * block, kernel_args["MIN_KEYS"])
        parts = range(start, rows.last, step if kernel_args["NUM_SPLITS"] > 1 else rows.last)
        for begin in parts:
            total += visit(case, kernel_args, rows, begin, min(begin + parts.step, rows.last))
        total += Work(rows=len(parts) * count * kernel_args["D"] * item)
        if kernel_args["NUM_SPLITS"] == 1:
            total += Work(rows=count * dv * item)
        else:
            total += Work(rows=len(parts) * count * dv * 4)
            combined += Work(rows=len(parts) * count * dv * 4 + count * dv * item)
    return total * case.num_kv_heads, combined * case.num_kv_heads


def paged_steps(case: Case, device: Device, machine: Machine, tile: Any) -> Iterator[Step]:
    """The kernels run one after another: the floor of a mixed batch is that of its prefills and that of its decodes."""
    launches = compiling.record(catalogue.attention_call(case, device), tile)
    kernel_args = {launch.name: launch.arguments for launch in launches}
    short = kernel_args["tile_kernel"]["SPLIT_BLOCK_Q"] // kernel_args["tile_kernel"]["GROUP"]
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
        if name == "tile_kernel":
            yield Step(name, tiled(some, kernel_args[name]), some.needed_bytes(), floor)
        else:
            work, combined = split(some, kernel_args[name])
            yield Step(name, work, some.needed_bytes(), floor)
            if combined.rows:
                yield Step("combine_kernel", combined)


# ---- latent attention

LATENT_BYTES = {"fp8_v32": 512 + 4 * 4 + 2 * 64, "fp8_v4": 448 + 7 + 2 * 64}


@dataclasses.dataclass(frozen=True, slots=True)
class Tiles:
    """How a kernel cuts the rows and keys of a job, and what it multiplies of each pair of a row and a key."""

    rows: int
    keys: int
    num_splits: int
    least_blocks: int  # of a split
    columns: int
    columns_again: int
    query_bytes: int  # read of each row


def triton_tiles(case: LatentCase, kernel_args: KernelArgs) -> Tiles:
    a, b = kernel_args["D_V"], kernel_args["D_REST"]
    values = kernel_args["WIDTH"] * kernel_args["GROUPS"]
    rest = kernel_args["D_REST_PAD"] if b else 0
    folded = case.format == "fp8_v32"
    return Tiles(
        rows=kernel_args["BLOCK_H"],
        keys=kernel_args["BLOCK_KV"],
        num_splits=kernel_args["fixed_splits"],
        least_blocks=kernel_args["MIN_BLOCKS"],
        columns=2 * values + rest + (rest if folded and case.d_v > a else 0),
        columns_again=values * (kernel_args["GROUP_PARTS"] - 1) + rest * (kernel_args["PARTS"] - 1),
        query_bytes=(a + b + (a if folded else 0)) * ITEMSIZE[case.dtype],
    )


def cuda_tiles(case: LatentCase, tile: Any) -> Tiles:
    """Of the sources in csrc: blocks of 64 rows and 64 keys."""
    return Tiles(
        rows=64,
        keys=64,
        num_splits=tile.num_splits,
        least_blocks=1,
        columns=case.d_qk + case.d_v,
        columns_again=0,
        query_bytes=case.d_qk * ITEMSIZE[case.dtype],
    )


def attended(case: LatentCase, tiles: Tiles) -> tuple[Work, Work]:
    """What the attention kernel does, and what the one that combines its parts."""
    tokens = 1 if case.topk else case.num_q_tokens  # of a job
    group = case.num_q_heads // case.num_kv_heads
    jobs, rows = case.num_tokens // tokens * case.num_kv_heads, group * tokens
    lengths = [length for length in (case.topk, case.extra_topk) if length] or [case.kv_len]
    each = case.d_qk * ITEMSIZE[case.dtype] if case.format == "plain" else LATENT_BYTES[case.format]
    blocks = sum(cdiv(length, tiles.keys) for length in lengths)
    parts = cdiv(blocks, max(cdiv(blocks, tiles.num_splits), tiles.least_blocks))
    job = Work()
    for row in range(0, rows, tiles.rows):
        keys, count = sum(lengths), blocks
        if case.causal:
            keys -= max(tokens - 1 - (row + tiles.rows - 1) // group, 0)
            count = cdiv(keys, tiles.keys)
        pairs = 2 * tiles.rows * tiles.keys * count
        job += Work(flops=pairs * tiles.columns, again=pairs * tiles.columns_again, keys=keys * each)
    out, part = case.d_v * ITEMSIZE[case.dtype], 4 * case.d_v
    job += Work(rows=rows * (parts * (tiles.query_bytes + part) if parts > 1 else tiles.query_bytes + out))
    combined = Work(rows=rows * (parts * part + out)) if parts > 1 else Work()
    return job * jobs, combined * jobs


def fetched(case: LatentCase, work: Work, row_blocks: int, machine: Machine) -> float:
    """Bytes that come from memory: of rows that many lists name, those that the cache has lost meanwhile come again.

    Programs that read the same list or the same sequence stand side by side and read it once.
    """
    needed = case.needed_rows() * case.row_bytes
    again = max(work.keys / row_blocks - needed, 0) * max(0, 1 - machine.cache_size / needed)
    return case.needed_bytes() + again


def latent_steps(case: LatentCase, machine: Machine, tiles: Tiles) -> Iterator[Step]:
    """A list's rows must come from the cache, at least, for every query that names them."""
    floor, _ = case.floor_seconds(machine.memory, machine.multiplying)
    if case.topk:
        floor = max(floor, case.visible_pairs() * case.row_bytes / machine.cache)
    work, combined = attended(case, tiles)
    rows = case.num_q_heads // case.num_kv_heads * (1 if case.topk else case.num_q_tokens)
    yield Step("latent_kernel", work, fetched(case, work, cdiv(rows, tiles.rows), machine), floor)
    if combined.rows:
        yield Step("combine_kernel", combined)


# ---- plans


def steps(case: AnyCase, backend: str, device: Device, machine: Machine = H200, tile: Any = None) -> list[Step]:
    """What a backend's kernels do for a case, at the tile of the heuristic where none is given."""
    if isinstance(case, Case):
        return list(paged_steps(case, device, machine, tile))
    call = catalogue.attention_call(case, device)
    if backend == "cuda":
        tile = tile or dispatch.load(case.operation, "cuda").heuristic(call)
        return list(latent_steps(case, machine, cuda_tiles(case, tile)))
    kernel_args = compiling.record(call, tile)[0].arguments
    return list(latent_steps(case, machine, triton_tiles(case, kernel_args)))


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """A case on a backend: its floor and the least time of its plan, in seconds, and what takes that."""

    case: AnyCase
    backend: str
    floor: float
    least: float  # without what is multiplied again
    exact: float  # with it
    bound: str
    flops: float  # times what the case needs
    asked: float  # times the bytes that it needs

    @property
    def excess(self) -> float:
        """How much longer than the floor the plan takes, as a fraction of the floor."""
        return self.least / self.floor - 1


def plan_of(case: AnyCase, backend: str, device: Device, machine: Machine = H200) -> Plan:
    found = steps(case, backend, device, machine)
    least, exact = ([step.times(machine, exact=exact) for step in found] for exact in (False, True))
    work = sum((step.work for step in found), Work())
    return Plan(
        case=case,
        backend=backend,
        floor=sum(step.floor for step in found),
        least=sum(max(times.values()) for times in least),
        exact=sum(max(times.values()) for times in exact),
        bound=max(exact[0], key=exact[0].__getitem__),
        flops=(work.flops + work.again) / case.flops(),
        asked=(work.keys + work.rows) / case.needed_bytes(),
    )


def plans(device: Device, machine: Machine = H200) -> Iterator[Plan]:
    """Every case of paged and latent attention on every backend that has kernels for it."""
    for case in catalogue.CASES.values():
        if isinstance(case, Case | LatentCase):
            yield plan_of(case, "triton", device, machine)
            if isinstance(case, LatentCase) and cuda_takes(case, device):
                yield plan_of(case, "cuda", device, machine)


def cuda_takes(case: LatentCase, device: Device) -> bool:
    """Whether the room has a kernel for the case, built or not."""
    if case.extra_topk:
        return False
    latent = importlib.import_module("ragged_attention.kernels_cuda._latent")
    return latent.cannot_take(catalogue.attention_call(case, device), sparse=case.topk > 0) is None


HEAD = "| | case | backend | floor, us | plan, us | bound by | excess | exactness | x FLOP | x bytes |\n"


def table(found: Sequence[Plan]) -> str:
    lines = [
        f"| {plan.case.workload} | {plan.case.name} | {plan.backend} "
        f"| {plan.floor * 1e6:.1f} | {plan.exact * 1e6:.1f} | {plan.bound} "
        f"| {plan.excess:.0%} | {plan.exact / plan.least - 1:.0%} | {plan.flops:.2f} | {plan.asked:.2f} |\n"
        for plan in found
    ]
    return HEAD + "|---" * HEAD.count(" |") + "|\n" + "".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.roofline", description=__doc__)
    parser.parse_args(argv)
    print(table(list(plans(device_of("torch", "sm_90")))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
