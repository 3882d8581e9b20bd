"""Reads AMD machine code: the instructions of a kernel's inner loops, and the time of an iteration.

The input is the assembly that Triton keeps with a compiled kernel (`compiled.asm["amdgcn"]`), so no AMD GPU is needed.
A wave is 64 threads on one of a compute unit's four SIMDs. A SIMD issues at most one instruction of a wave every four
cycles, so vector instructions limit a kernel as often as its matrix products do. docs/amd.md gives the sources of the
rates.
"""

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.compiled.sass import natural_loops

WAVE = 64  # threads
SIMDS = 4  # per compute unit
ISSUE = 4  # cycles of one instruction for 64 threads on 16 lanes, and so between two instructions of a wave
QUARTER = 16  # cycles of a quarter-rate instruction
ADDRESSES = 2  # LDS cycles for the addresses of a wave, 32 threads per cycle
LDS_LATENCY = 128.0  # in cycles; this latency and CACHED are not measured
CACHED = 500.0  # cycles until a small load arrives, such as a page number, if its cache line was read before

LINE = re.compile(r"^\s+([a-z]\w*)\s*([^;]*)")
LABEL = re.compile(r"^(\.?\w+):")
REGISTERS = re.compile(r"\b([va])(?:\[(\d+):(\d+)\]|(\d+)\b)")
WIDTHS = {"dword": 4, "ubyte": 1, "sbyte": 1, "ushort": 2, "sshort": 2, "short": 2, "byte": 1}


@dataclasses.dataclass(frozen=True, slots=True)
class Chip:
    """An AMD GPU. LDS rates are per compute unit."""

    name: str
    units: int  # number of compute units
    clock: float  # peak cycles per second
    memory: float  # peak bytes per second of the whole GPU
    lds: int  # bytes of LDS per compute unit
    lds_read: int  # bytes per cycle
    lds_written: int  # bytes per cycle
    exponential: int  # cycles of an exponential for one wave, on a SIMD

    @property
    def share(self) -> float:
        """A compute unit's equal share of the memory bandwidth, in bytes per cycle."""
        return self.memory / self.units / self.clock


CHIPS = {
    "gfx942": Chip("MI300X", 304, 2.1e9, 5.3e12, 64 * 1024, 128, 128, 16),
    "gfx950": Chip("MI355X", 256, 2.4e9, 8.0e12, 160 * 1024, 256, 128, 8),
}
# vector registers per SIMD lane, the granule in which they are allocated, and the most waves per SIMD
VECTORS, GRANULE, WAVES = 512, 8, 8


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction of a kernel: its index, its name without the suffix for its encoding, and its operands."""

    place: int
    name: str
    operands: str

    @property
    def kind(self) -> str:
        return kind_of(self.name, self.operands)

    @property
    def width(self) -> int:
        """The bytes that each thread loads or stores."""
        return width_of(self.name)

    @property
    def written(self) -> list[int]:
        """The vector registers that a product writes. Accumulation registers are numbered from 256."""
        return registers(self.operands.partition(",")[0])

    @property
    def read(self) -> list[int]:
        return registers(self.operands.partition(",")[2])


def registers(text: str) -> list[int]:
    numbers = []
    for file, first, last, single in REGISTERS.findall(text):
        start, stop = (int(first), int(last)) if first else (int(single), int(single))
        numbers += range(start + 256 * (file == "a"), stop + 1 + 256 * (file == "a"))
    return numbers


def kind_of(name: str, operands: str) -> str:
    """The kind of an instruction, named after the unit that executes it or after its purpose."""
    if re.match(r"v_s?mfmac?_", name):
        return "matrix"
    if name.startswith("v_accvgpr"):
        return "copy"
    if name.startswith("v_"):
        if re.match(r"v_(?:exp|log|rcp|rsq|sqrt|sin|cos)_", name):
            return "special"
        return "convert" if name.startswith("v_cvt_") else "vector"
    if name.startswith("ds_"):
        if re.search(r"permute|swizzle", name):
            return "exchange"
        return "write" if name.startswith("ds_write") else "read"
    if re.match(r"(?:buffer|global|flat|scratch)_", name):
        if name.startswith("scratch"):
            return "scratch"
        if "_load" not in name:
            return "store"
        return "direct" if "_lds_" in name or operands.rstrip().endswith("lds") else "load"
    return {"s_waitcnt": "wait", "s_barrier": "barrier"}.get(name, "scalar")


def width_of(name: str) -> int:
    """The bytes per thread of a load, a store or an LDS access."""
    if match := re.match(r"ds_(?:read|write)(2?)(?:st64)?_(?:[bui])(\d+)", name):
        return int(match[2]) // 8 * (2 if match[1] else 1)
    if match := re.search(r"_dwordx(\d)", name):
        return 4 * int(match[1])
    return next((width for word, width in WIDTHS.items() if name.endswith(word)), 4)


def instructions_of(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions of a kernel, and the index of the instruction at each label."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(code)
        elif match := LINE.match(line):
            name = re.sub(r"_e(?:32|64)$", "", match[1])
            code.append(Instruction(len(code), name, match[2].strip()))
            if name == "s_endpgm":
                break
    return code, labels


def metadata(text: str, name: str) -> int:
    match = re.search(rf"\.{name}:\s*(\d+)", text)
    return int(match[1]) if match else 0


# ---- loops


def multiplying_loops(text: str) -> list[list[Instruction]]:
    """The innermost loops with matrix products, ordered by address."""
    code, labels = instructions_of(text)
    blocks = _blocks(code, labels)
    loops = natural_loops({start: leads for start, (_, leads) in blocks.items()})
    bodies = {frozenset(loop): [line for start in sorted(loop) for line in blocks[start][0]] for loop in loops}
    working = [loop for loop, lines in bodies.items() if any(line.kind == "matrix" for line in lines)]
    inner = [loop for loop in working if not any(other < loop for other in working)]
    return [bodies[loop] for loop in sorted(inner, key=min)]


def _blocks(code: Sequence[Instruction], labels: Mapping[str, int]) -> dict[int, tuple[list[Instruction], list[int]]]:
    """The basic blocks by their first index, each with its instructions and the indices of its successors."""
    leaving = ("s_branch", "s_cbranch", "s_endpgm", "s_setpc")
    starts = {0, *(place for place in labels.values() if place < len(code))}
    starts |= {line.place + 1 for line in code[:-1] if line.name.startswith(leaving)}
    edges = sorted(starts)
    blocks: dict[int, tuple[list[Instruction], list[int]]] = {}
    for first, end in zip(edges, [*edges[1:], len(code)], strict=True):
        last = code[end - 1]
        leads = [labels[last.operands]] if last.operands in labels and "branch" in last.name else []
        if end < len(code) and not last.name.startswith(("s_branch", "s_endpgm", "s_setpc")):
            leads.append(end)
        blocks[first] = (list(code[first:end]), leads)
    return blocks


@dataclasses.dataclass(frozen=True)
class Counts:
    """The instructions of a loop by kind, its products by shape, and its memory accesses by bytes per thread."""

    kinds: Mapping[str, int]
    products: Mapping[str, int]
    widths: Mapping[str, Mapping[int, int]]  # kind -> bytes per thread -> number of accesses

    def __getitem__(self, kind: str) -> int:
        return self.kinds.get(kind, 0)


def count(lines: Iterable[Instruction]) -> Counts:
    kinds: collections.Counter[str] = collections.Counter()
    products: collections.Counter[str] = collections.Counter()
    widths: dict[str, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    for line in lines:
        kinds[line.kind] += 1
        if line.kind == "matrix":
            products[re.sub(r"v_s?mfmac?_(?:f32|i32)_", "", line.name)] += 1
        elif line.kind in ("read", "write", "load", "direct"):
            widths[line.kind][line.width] += 1
    return Counts(kinds, products, widths)


# ---- cycles


def matrix_cycles(name: str) -> int:
    """The cycles of a product on a SIMD's matrix unit. On gfx950, wider forms do twice the work in the same time."""
    match = re.search(r"_(\d+)x\d+x(\d+)", name)
    if match is None:
        raise ValueError(f"expected a product with its shape in its name, got {name}")
    rows, single = int(match[1]), re.search(r"x[124]_?(?:f32|xf32)", name) is not None
    return {4: 8, 16: 16, 32: 32}[rows] * (2 if single and rows > 4 else 1)


def vector_cycles(line: Instruction, chip: Chip) -> int:
    """The cycles of a vector instruction of one wave on its SIMD."""
    if line.kind == "special":
        return chip.exponential
    slow = re.match(r"v_(?:mul_lo_u32|mul_hi_|mad_u64|mad_i64|cvt_(?!pk_|scale))", line.name)
    return QUARTER if slow else ISSUE


def lds_cycles(line: Instruction, chip: Chip) -> float:
    """The cycles of LDS for one wave. An access narrower than a bank takes as long as a whole bank, 4 bytes."""
    rate = chip.lds_written if line.kind in ("write", "direct") else chip.lds_read
    return ADDRESSES + WAVE * max(line.width, 4) / rate


def busy(lines: Sequence[Instruction], num_warps: int, chip: Chip) -> dict[str, float]:
    """Kind of unit -> the cycles per iteration for which a program keeps the busiest such unit busy, without waits."""
    waves = -(-num_warps // SIMDS)  # waves on one SIMD
    cycles: dict[str, float] = dict.fromkeys(("matrices", "vectors", "LDS"), 0.0)
    for line in lines:
        if line.kind == "matrix":
            cycles["matrices"] += matrix_cycles(line.name) * waves
        elif line.name.startswith("v_"):
            cycles["vectors"] += vector_cycles(line, chip) * waves
        elif line.kind in ("read", "write", "direct", "exchange"):
            cycles["LDS"] += lds_cycles(line, chip) * num_warps
    return cycles


def copied(lines: Iterable[Instruction], num_warps: int) -> int:
    """The bytes of keys and values that a program loads per iteration.

    Narrow loads are not counted, because they fetch page numbers, slots and scales.
    """
    return sum(line.width * WAVE * num_warps for line in lines if is_key(line))


def is_key(line: Instruction) -> bool:
    return line.kind == "direct" or (line.kind == "load" and line.width >= 8)


def programs_at_once(vectors: int, shared: int, num_warps: int, chip: Chip) -> int:
    """The number of programs that fit a compute unit, which may be 0.

    A program has `vectors` vector registers per thread and `shared` bytes of LDS.
    """
    waves = min(VECTORS // max(-(-vectors // GRANULE) * GRANULE, GRANULE), WAVES)
    by_registers = waves * SIMDS // num_warps
    return min(by_registers, chip.lds // shared) if shared else by_registers


# ---- waiting


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """One iteration of a loop, for a program that has a compute unit to itself."""

    cycles: float
    least_wait: int | None  # loads and stores still in flight after the strictest wait for memory
    lead: float  # fewest cycles from the request for keys to the wait for them; they hide memory latency
    in_flight: int  # most bytes of keys in flight


WARM_UP, MEASURED = 2, 4  # iterations


class Wave:
    """A wave that issues its instructions in order, in step with the other waves of its program."""

    def __init__(self, num_warps: int, chip: Chip, latency: float) -> None:
        self.num_warps, self.chip, self.latency = num_warps, chip, latency
        self.waves = -(-num_warps // SIMDS)
        self.now = self.matrix_free = self.lds_free = 0.0
        self.ready: dict[int, float] = {}  # vector register -> time when it can be read
        self.memory: list[tuple[float, float, int]] = []  # (time of the request, time of arrival, bytes of keys)
        self.local: list[float] = []
        self.least: int | None = None
        self.leads: list[tuple[float, int]] = []
        self.under_way = 0

    def issue(self, line: Instruction) -> None:
        kind = line.kind
        if kind == "wait":
            self.wait(line.operands)
        elif kind == "matrix":
            self.multiply(line)
        elif kind in ("load", "direct", "store", "scratch"):
            size = line.width * WAVE * self.num_warps if is_key(line) else 0
            self.now += ISSUE * self.waves
            latency = self.latency if size else min(self.latency, CACHED)
            self.memory.append((self.now, self.now + latency, size))
            self.under_way = max(self.under_way, sum(size for _, _, size in self.memory))
        elif kind in ("read", "write", "exchange"):
            self.now += ISSUE * self.waves
            self.lds_free = max(self.lds_free, self.now) + lds_cycles(line, self.chip) * self.num_warps
            self.local.append(self.lds_free + LDS_LATENCY)
        elif line.name.startswith("v_"):
            self.now = max([self.now, *(self.ready.get(one, 0.0) for one in line.read)])
            self.now += vector_cycles(line, self.chip) * self.waves
        elif line.name == "s_nop":
            self.now += int(line.operands) + 1
        else:
            self.now += ISSUE

    def multiply(self, line: Instruction) -> None:
        """Issue a product once the matrix unit is free and the registers that it reads are ready."""
        start = max([self.now, self.matrix_free, *(self.ready.get(one, 0.0) for one in line.read)])
        self.matrix_free = start + matrix_cycles(line.name) * self.waves
        self.ready |= dict.fromkeys(line.written, self.matrix_free)
        self.now = start + ISSUE * self.waves

    def wait(self, operands: str) -> None:
        limits = {name: int(number) for name, number in re.findall(r"(\w+)\((\d+)\)", operands)}
        if "vmcnt" in limits:
            left = limits["vmcnt"]
            done = self.memory[: max(len(self.memory) - left, 0)]
            self.memory = self.memory[len(done) :]
            if any(size for _, _, size in done):
                self.least = left if self.least is None else min(self.least, left)
            self.leads += [(self.now - issued, size) for issued, _, size in done if size]
            self.now = max([self.now, *(arrival for _, arrival, _ in done)])
        if "lgkmcnt" in limits:
            done = self.local[: max(len(self.local) - limits["lgkmcnt"], 0)]
            self.local = self.local[len(done) :]
            self.now = max([self.now, *done])
        self.now += ISSUE


def turn(lines: Sequence[Instruction], num_warps: int, chip: Chip, latency: float) -> Turn:
    """The steady state of an iteration. `latency` is that of memory, in cycles."""
    wave = Wave(num_warps, chip, latency)
    start = 0.0
    for number in range(WARM_UP + MEASURED):
        if number == WARM_UP:
            start, wave.leads, wave.least, wave.under_way = wave.now, [], None, 0
        for line in lines:
            wave.issue(line)
    lead = min((lead for lead, _ in wave.leads), default=0.0)
    return Turn((wave.now - start) / MEASURED, wave.least, lead, wave.under_way)
