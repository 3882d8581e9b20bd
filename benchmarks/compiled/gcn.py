"""What AMD's machine code says of a kernel: the instructions of its inner loops, and how long a turn of them takes.

Read from the assembly that Triton keeps of a kernel (`compiled.asm["amdgcn"]`), on any machine. A wave is 64 threads on
one of a compute unit's four SIMDs, which issues at most one instruction of it every four cycles; so instructions of
vectors are as likely to bind a kernel as its matrix products. Where the rates come from, docs/amd.md says.
"""

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.compiled.sass import natural_loops

WAVE = 64  # threads
SIMDS = 4  # of a compute unit
ISSUE = 4  # cycles from one instruction of a wave to the next, and of one on 16 lanes for 64 threads
QUARTER = 16  # cycles of an instruction at a quarter of the rate
ADDRESSES = 2  # cycles of LDS for a wave's addresses, of 32 threads each
LDS_LATENCY = 128.0  # cycles; not measured, nor is the next
CACHED = 500.0  # cycles, of a word such as a page number, whose neighbours were read before

LINE = re.compile(r"^\s+([a-z]\w*)\s*([^;]*)")
LABEL = re.compile(r"^(\.?\w+):")
REGISTERS = re.compile(r"\b([va])(?:\[(\d+):(\d+)\]|(\d+)\b)")
WIDTHS = {"dword": 4, "ubyte": 1, "sbyte": 1, "ushort": 2, "sshort": 2, "short": 2, "byte": 1}


@dataclasses.dataclass(frozen=True, slots=True)
class Chip:
    """A GPU with such code; rates of one compute unit in a cycle, or of one of its SIMDs where that is said."""

    name: str
    units: int  # compute units
    clock: float  # cycles in a second, at most
    memory: float  # bytes in a second, at most
    lds: int  # bytes of a compute unit
    lds_read: int  # bytes in a cycle
    lds_written: int
    exponential: int  # cycles of a wave on a SIMD

    @property
    def share(self) -> float:
        """The bytes of memory that a compute unit gets in a cycle if each gets its share."""
        return self.memory / self.units / self.clock


CHIPS = {
    "gfx942": Chip("MI300X", 304, 2.1e9, 5.3e12, 64 * 1024, 128, 128, 16),
    "gfx950": Chip("MI355X", 256, 2.4e9, 8.0e12, 160 * 1024, 256, 128, 8),
}
VECTORS, GRANULE, WAVES = 512, 8, 8  # registers of a SIMD's lane, in pieces of so many; waves that it holds at most


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One of a kernel's, its name without the suffix that says how it is encoded, and where it stands."""

    place: int
    name: str
    operands: str

    @property
    def kind(self) -> str:
        return kind_of(self.name, self.operands)

    @property
    def width(self) -> int:
        """The bytes that a thread gets or gives at a time."""
        return width_of(self.name)

    @property
    def written(self) -> list[int]:
        """The vector registers that a product writes; accumulation registers count from 256."""
        return registers(self.operands.partition(",")[0])

    @property
    def read(self) -> list[int]:
        return registers(self.operands.partition(",")[2])


def registers(text: str) -> list[int]:
    found = []
    for file, first, last, single in REGISTERS.findall(text):
        start, stop = (int(first), int(last)) if first else (int(single), int(single))
        found += range(start + 256 * (file == "a"), stop + 1 + 256 * (file == "a"))
    return found


def kind_of(name: str, operands: str) -> str:
    """What carries out an instruction, and for what."""
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
    """The bytes a thread of a load, a store or an access of LDS."""
    if found := re.match(r"ds_(?:read|write)(2?)(?:st64)?_(?:[bui])(\d+)", name):
        return int(found[2]) // 8 * (2 if found[1] else 1)
    if found := re.search(r"_dwordx(\d)", name):
        return 4 * int(found[1])
    return next((width for word, width in WIDTHS.items() if name.endswith(word)), 4)


def instructions_of(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions of a kernel, and at which place each label stands."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := LINE.match(line):
            name = re.sub(r"_e(?:32|64)$", "", found[1])
            code.append(Instruction(len(code), name, found[2].strip()))
            if name == "s_endpgm":
                break
    return code, labels


def metadata(text: str, name: str) -> int:
    found = re.search(rf"\.{name}:\s*(\d+)", text)
    return int(found[1]) if found else 0


# ---- loops


def multiplying_loops(text: str) -> list[list[Instruction]]:
    """The innermost loops of matrix products of a kernel, in order of addresses."""
    code, labels = instructions_of(text)
    blocks = _blocks(code, labels)
    loops = natural_loops({start: leads for start, (_, leads) in blocks.items()})
    bodies = {frozenset(loop): [line for start in sorted(loop) for line in blocks[start][0]] for loop in loops}
    working = [loop for loop, lines in bodies.items() if any(line.kind == "matrix" for line in lines)]
    inner = [loop for loop in working if not any(other < loop for other in working)]
    return [bodies[loop] for loop in sorted(inner, key=min)]


def _blocks(code: Sequence[Instruction], labels: Mapping[str, int]) -> dict[int, tuple[list[Instruction], list[int]]]:
    """Stretches without a branch inside, by their first place: their instructions and where they lead."""
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
    """Instructions of a loop by kind; products by shape; accesses of memories by bytes a thread."""

    kinds: Mapping[str, int]
    products: Mapping[str, int]
    widths: Mapping[str, Mapping[int, int]]  # by kind: how often so many bytes

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
    """Cycles of a SIMD's matrix unit: as many for the wider forms of gfx950, which multiply twice as much."""
    found = re.search(r"_(\d+)x\d+x(\d+)", name)
    if found is None:
        raise ValueError(f"expected a product with its shape in its name, got {name}")
    rows, single = int(found[1]), re.search(r"x[124]_?(?:f32|xf32)", name) is not None
    return {4: 8, 16: 16, 32: 32}[rows] * (2 if single and rows > 4 else 1)


def vector_cycles(line: Instruction, chip: Chip) -> int:
    """Cycles of a SIMD for one that is carried out lane by lane."""
    if line.kind == "special":
        return chip.exponential
    slow = re.match(r"v_(?:mul_lo_u32|mul_hi_|mad_u64|mad_i64|cvt_(?!pk_|scale))", line.name)
    return QUARTER if slow else ISSUE


def lds_cycles(line: Instruction, chip: Chip) -> float:
    """Cycles of LDS for a wave; what is narrower than a bank takes as long as a bank's width."""
    rate = chip.lds_written if line.kind in ("write", "direct") else chip.lds_read
    return ADDRESSES + WAVE * max(line.width, 4) / rate


def busy(lines: Sequence[Instruction], num_warps: int, chip: Chip) -> dict[str, float]:
    """Cycles that a turn of a program keeps what is busiest of each kind of unit busy; waiting is in none."""
    waves = -(-num_warps // SIMDS)  # on one SIMD
    found: dict[str, float] = dict.fromkeys(("matrices", "vectors", "LDS"), 0.0)
    for line in lines:
        if line.kind == "matrix":
            found["matrices"] += matrix_cycles(line.name) * waves
        elif line.name.startswith("v_"):
            found["vectors"] += vector_cycles(line, chip) * waves
        elif line.kind in ("read", "write", "direct", "exchange"):
            found["LDS"] += lds_cycles(line, chip) * num_warps
    return found


def copied(lines: Iterable[Instruction], num_warps: int) -> int:
    """The bytes of keys and values that a program asks of memory in a turn; words are addresses, slots and scales."""
    return sum(line.width * WAVE * num_warps for line in lines if is_key(line))


def is_key(line: Instruction) -> bool:
    return line.kind == "direct" or (line.kind == "load" and line.width >= 8)


def programs_at_once(vectors: int, shared: int, num_warps: int, chip: Chip) -> int:
    """Programs of so many registers a thread and bytes of LDS that a compute unit holds; 0 where none fits."""
    waves = min(VECTORS // max(-(-vectors // GRANULE) * GRANULE, GRANULE), WAVES)
    by_registers = waves * SIMDS // num_warps
    return min(by_registers, chip.lds // shared) if shared else by_registers


# ---- waiting


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """A turn of a loop, of one program that has a compute unit to itself."""

    cycles: float
    least_wait: int | None  # loads and stores that the strictest wait for memory leaves under way
    lead: float  # cycles that keys are asked for before they are waited for: the latency that costs nothing
    in_flight: int  # bytes of keys that a program has under way at most


WARM_UP, MEASURED = 2, 4  # turns


class Wave:
    """A wave that issues its instructions in order, beside the others of its program, all in step."""

    def __init__(self, num_warps: int, chip: Chip, latency: float) -> None:
        self.num_warps, self.chip, self.latency = num_warps, chip, latency
        self.waves = -(-num_warps // SIMDS)
        self.now = self.matrix_free = self.lds_free = 0.0
        self.ready: dict[int, float] = {}  # when a product's registers can be read
        self.memory: list[tuple[float, float, int]] = []  # when asked for, when there, bytes of keys
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
            self.under_way = max(self.under_way, sum(each for _, _, each in self.memory))
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
        """The next product may begin when the matrix unit is free, and what is read of others is there."""
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
            self.leads += [(self.now - asked, size) for asked, _, size in done if size]
            self.now = max([self.now, *(there for _, there, _ in done)])
        if "lgkmcnt" in limits:
            done = self.local[: max(len(self.local) - limits["lgkmcnt"], 0)]
            self.local = self.local[len(done) :]
            self.now = max([self.now, *done])
        self.now += ISSUE


def turn(lines: Sequence[Instruction], num_warps: int, chip: Chip, latency: float) -> Turn:
    """A turn of a loop once its turns take the same time, at a latency of memory in cycles."""
    wave = Wave(num_warps, chip, latency)
    start = 0.0
    for number in range(WARM_UP + MEASURED):
        if number == WARM_UP:
            start, wave.leads, wave.least, wave.under_way = wave.now, [], None, 0
        for line in lines:
            wave.issue(line)
    lead = min((lead for lead, _ in wave.leads), default=0.0)
    return Turn((wave.now - start) / MEASURED, wave.least, lead, wave.under_way)
