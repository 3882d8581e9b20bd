"""Reads NVIDIA machine code: the registers, memory and instructions of kernels and of their inner loops.

The disassembler comes with Triton. Without Triton, it is the one on PATH. No GPU is needed.
"""

import collections
import dataclasses
import importlib.util
import itertools
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

# Patterns of the instructions that are counted by kind. Products are also counted by shape, and global loads by width.
KINDS = {
    "HGMMA": r"[HQ]GMMA\.",  # QGMMA multiplies 8-bit floats
    "HMMA": r"[HIDQO]MMA\.",
    "UTCMMA": r"UTC\w*MMA",
    "UTMALDG": r"UTMALDG",
    "LDGSTS": r"LDGSTS",
    "UBLKCP": r"UBLKCP",
    "LDG": r"LDG\.",
    "USETMAXREG": r"USETMAXREG",
    "LDL": r"LDL",
    "STL": r"STL",
    "LDS": r"LDSM?\b",
    "STS": r"STSM?\b",
    "EX2": r"MUFU\.EX2",
    "FFMA": r"FFMA",
    "float": r"(?:FMUL|FADD|FFMA|FMNMX|F2FP|HMUL2|HADD2|HFMA2)",
    "settled": r"WARPGROUP\.DEPBAR",
    "mbarrier": r"SYNCS\.PHASECHK",
    "barrier": r"BAR\.(?:SYNC|ARV)",
}
# the kinds that are matrix products, with their names in PTX
MATRIX = {"HGMMA": "wgmma", "HMMA": "mma", "UTCMMA": "tcgen05"}
# An instruction, followed by the two words of its encoding if the listing has them.
LINE = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);"
    r"(?:\s*/\* 0x[0-9a-f]{16} \*/\s+/\* 0x([0-9a-f]{16}) \*/)?",
    re.MULTILINE,
)
CONTROL = 41  # the first of the bits of the second word that control when the instruction is issued


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction of a kernel: its address, name with modifiers, operands, and whether it is predicated."""

    address: int
    name: str
    operands: str
    predicated: bool
    control: int | None = None  # the bits that control its issue (see `scoreboard.py`), if the listing has them

    @property
    def target(self) -> int | None:
        """The address to which a branch leads. None for other instructions."""
        match = re.search(r"0x([0-9a-f]+)\s*$", self.operands) if self.name.startswith("BRA") else None
        return int(match[1], 16) if match else None


@dataclasses.dataclass(frozen=True)
class Counts:
    """The instructions of a piece of code: their number, the matrix products by shape, and the rest by kind."""

    instructions: int
    products: tuple[tuple[str, int], ...]
    kinds: Mapping[str, int]
    loads: tuple[tuple[int, int], ...] = ()  # (bytes per thread of a global load, number of such loads)

    def __getitem__(self, kind: str) -> int:
        return self.kinds.get(kind, 0)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel of a library, as the listings show it."""

    symbol: str
    type: str  # C++ name of the body, such as `Combine<cutlass::half_t>`
    registers: int
    stack: int
    local: int
    static_shared: int
    set_registers: tuple[int, ...]  # the numbers of registers that warpgroups request at run time
    counts: Counts
    loops: tuple[Counts, ...]  # the loops that do the work
    code: tuple[Instruction, ...] = ()

    @property
    def name(self) -> str:
        return self.type.replace("cutlass::bfloat16_t", "bf16").replace("cutlass::half_t", "f16")


def tool(name: str) -> str:
    """The path of a tool such as cuobjdump, from Triton or PATH."""
    spec = importlib.util.find_spec("triton")
    folders = (
        [str(Path(folder, "backends/nvidia/bin")) for folder in (spec.submodule_search_locations or ())] if spec else []
    )
    path = next((path for folder in (*folders, None) if (path := shutil.which(name, path=folder))), None)
    if path is None:
        raise FileNotFoundError(f"no {name} in triton or on PATH")
    return path


def read(library: Path) -> list[Kernel]:
    """The kernels of a library, sorted by name."""
    return kernels_of(listing("-sass", library), listing("-res-usage", library))


def listing(flag: str, path: Path) -> str:
    """The listing that cuobjdump makes of a file: machine code for `-sass`, resources for `-res-usage`."""
    program = tool("cuobjdump")
    environ = {"PATH": f"{Path(program).parent}:/usr/bin:/bin"}  # cuobjdump looks for nvdisasm there
    return subprocess.run([program, flag, path], capture_output=True, text=True, check=True, env=environ).stdout


def kernels_of(sass: str, usage: str) -> list[Kernel]:
    """The kernels in cuobjdump's listings of machine code and resources."""
    resources = {
        symbol: {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", text)}
        for symbol, text in re.findall(r"Function (\S+):\n(.*)", usage)
    }
    parts = re.split(r"^\s*Function : (\S+)\s*$", sass, flags=re.MULTILINE)[1:]
    kernels = []
    for symbol, body in zip(parts[::2], parts[1::2], strict=True):
        used, code = resources[symbol], instructions_of(body)
        wanted = {
            int(match[1], 16)
            for line in code
            if line.name.startswith("USETMAXREG") and (match := re.search(r"0x([0-9a-f]+)", line.operands))
        }
        kernels.append(
            Kernel(
                symbol, body_type(demangled(symbol)), used["REG"], used["STACK"], used["LOCAL"], used["SHARED"],
                tuple(sorted(wanted)), count(code), tuple(map(count, working_loops(code))), tuple(code),
            )
        )  # fmt: skip
    return sorted(kernels, key=lambda kernel: kernel.name)


def instructions_of(body: str) -> list[Instruction]:
    """The instructions of a listing.

    Some disassemblers add scheduling information, such as ` &req={2} ?trans1`. It is dropped from the operands.
    """
    return [
        Instruction(
            int(match[1], 16),
            match[2],
            re.split(r"\s[&?]", match[3])[0].strip(),
            "@" in match[0].partition(match[2])[0],
            int(match[4], 16) >> CONTROL & 0x1FFFFF if match[4] else None,
        )
        for match in LINE.finditer(body)
    ]


def demangled(symbol: str) -> str:
    return subprocess.run(["c++filt", symbol], capture_output=True, text=True, check=True).stdout.strip()


def body_type(signature: str) -> str:
    """`Body<...>` of `void op::kernel<Body<...>, ...>(...)`: the first argument of the outermost template."""
    _, opened, inside = signature.partition("<")
    depth = 0
    for index, letter in enumerate(inside):
        if depth == 0 and letter in ",>":
            return inside[:index].strip()
        depth += (letter == "<") - (letter == ">")
    return signature.partition("(")[0] if not opened else signature


def count(code: Sequence[Instruction]) -> Counts:
    """The number of instructions in a piece of code, by kind."""
    names = collections.Counter(line.name for line in code)
    products: collections.Counter[str] = collections.Counter()
    for name, number in names.items():
        if match := re.match(r"(?:[HQ]G|[HIDQO])MMA\.([\dx]+)", name):
            products[match[1]] += number
    kinds = {
        kind: sum(number for name, number in names.items() if re.match(pattern, name))
        for kind, pattern in KINDS.items()
    }
    loads: collections.Counter[int] = collections.Counter()
    for name, number in names.items():
        # In code that copies to shared memory, loads of one word fetch page numbers and slots, not elements.
        lookup = kinds["LDGSTS"] and name.startswith("LDG.") and load_width(name) == 4
        if re.match(r"LDG(?:STS)?\b", name) and not lookup:
            loads[load_width(name)] += number
    # NOPs after the end of a kernel only fill its last cache line of instructions.
    real = len(code) - names["NOP"]
    by_shape = tuple(sorted(products.items(), key=lambda item: item[0], reverse=True))
    return Counts(real, by_shape, kinds, tuple(sorted(loads.items(), reverse=True)))


def load_width(name: str) -> int:
    """The bytes per thread of a load. They are 4 if no modifier gives a width."""
    modifiers = name.split(".")[1:]
    bits = next((word for word in modifiers if re.fullmatch(r"64|128|256|[US](?:8|16)", word)), "32")
    return int(bits.strip("US")) // 8


# ---- costs

# The rates of a Hopper multiprocessor per cycle.
PRODUCTS = 2048  # 16-bit multiply-adds by HGMMA
WARPGROUPWISE = {"HGMMA": 2, "QGMMA": 1}  # bytes per element; products of 1-byte elements have twice the rate
# The fraction of PRODUCTS that HMMA reaches. No datasheet gives it; it is the best measured for kernels without HGMMA.
WARPWISE = 0.63
HMMA_SIZES = {"16816": 16 * 8 * 16, "1688": 16 * 8 * 8}
SHARED = 128  # bytes read from or written to shared memory
ISSUED = 4  # warp instructions
SPECIAL = 16  # exponentials and similar functions
# Instructions of the unit for special functions. Conversions belong to it: NVIDIA's assembler issues those of a warp 8
# cycles apart, as it does with exponentials.
SPECIALS = ("MUFU", "F2F", "F2I", "I2F")


def cycles(lines: Sequence[Instruction], num_warps: int) -> dict[str, float]:
    """The cycles for which `num_warps` warps with these instructions keep each unit of a Hopper multiprocessor busy.

    The largest of these numbers is a lower bound for the time of the code. Waits are not included.
    """
    products, read, special = 0.0, 0, 0
    for line in lines:
        kind, *modifiers = line.name.split(".")
        if kind in WARPGROUPWISE:
            m, n, k = map(int, modifiers[0].split("x"))
            from_shared = line.operands.split(",")[1].strip().startswith("gdesc")
            size = WARPGROUPWISE[kind]
            products += m * n * k * size / 2 * num_warps / 4
            read += size * k * (n + m * from_shared) * num_warps // 4
        elif kind == "HMMA":
            products += HMMA_SIZES.get(modifiers[0], 0) * num_warps / WARPWISE
        elif kind in ("LDSM", "STSM"):
            tiles = int(modifiers[-1]) if modifiers[-1].isdigit() else 1
            read += 128 * tiles * num_warps
        elif kind in ("LDS", "STS", "LDGSTS"):
            read += 32 * load_width(line.name) * num_warps
        special += 32 * (kind in SPECIALS) * num_warps
    issued = sum(line.name != "NOP" for line in lines) * num_warps
    return {
        "matrices": products / PRODUCTS,
        "shared memory": read / SHARED,
        "instructions": issued / ISSUED,
        "special functions": special / SPECIAL,
    }


# ---- loops


def working_loops(code: Sequence[Instruction]) -> list[list[Instruction]]:
    """The innermost loops of producers and consumers (`_works`), ordered by address."""
    return _innermost(code, _works)


def multiplying_loops(code: Sequence[Instruction]) -> list[list[Instruction]]:
    """The innermost loops with matrix products, ordered by address.

    If the kernel has no matrix products, they are its loops with scalar products.
    """
    matrices = any(count(code)[kind] for kind in MATRIX)
    return _innermost(code, _multiplies_matrices if matrices else _multiplies)


def _innermost(code: Sequence[Instruction], works: Callable[[Counts], object]) -> list[list[Instruction]]:
    blocks = _blocks(code)
    loops = natural_loops({start: successors for start, (_, successors) in blocks.items()})
    bodies = [frozenset(loop) for loop in loops]

    def lines(loop: Iterable[int]) -> list[Instruction]:
        return [line for start in sorted(loop) for line in blocks[start][0]]

    working = [loop for loop in bodies if works(count(lines(loop)))]
    inner = [loop for loop in working if not any(other < loop for other in working)]
    return [lines(loop) for loop in sorted(inner, key=min)]


def _works(counts: Counts) -> bool:
    """Whether a loop does the kernel's main work: it waits at mbarriers, and computes products or copies keys.

    Loops without an mbarrier only prepare or finish the work.
    """
    copies = counts["UTMALDG"] or counts["LDGSTS"] or counts["UBLKCP"] or (counts["LDG"] and counts["STS"])
    return bool(counts["mbarrier"] and (counts["HGMMA"] or counts["HMMA"] or copies))


def _multiplies_matrices(counts: Counts) -> bool:
    return any(counts[kind] for kind in MATRIX)


def _multiplies(counts: Counts) -> bool:
    """Whether scalar products are more than a quarter of the loop. Other loops have a few of them too."""
    return 4 * counts["FFMA"] > counts.instructions


def _blocks(code: Sequence[Instruction]) -> dict[int, tuple[list[Instruction], list[int]]]:
    """The basic blocks by their first address, each with its instructions and the addresses of its successors."""
    if not code:
        return {}
    targets = {line.target for line in code}
    starts = {code[0].address}
    for line, following in itertools.pairwise(code):
        if following.address in targets or line.name.startswith(("BRA", "EXIT", "RET")):
            starts.add(following.address)
    blocks: dict[int, tuple[list[Instruction], list[int]]] = {}
    edges = sorted(starts)
    for first, end in zip(edges, [*edges[1:], None], strict=True):
        inside = [line for line in code if line.address >= first and (end is None or line.address < end)]
        last = inside[-1]
        leads = [last.target] if last.target is not None else []
        if end is not None and (_conditional(last) or not last.name.startswith(("BRA", "EXIT", "RET"))):
            leads.append(end)
        blocks[first] = (inside, leads)
    return blocks


def _conditional(line: Instruction) -> bool:
    """Whether execution can continue past a branch: `@P0 BRA there`, `BRA P0, there`, `BRA.DIV UR4, there`."""
    return line.predicated or "," in line.operands


def natural_loops(edges: Mapping[int, Sequence[int]]) -> list[set[int]]:
    """The natural loops of a flow graph, as sets of blocks.

    A back edge leads to a block that dominates the block from which the edge comes. The loop of a back edge consists of
    these two blocks and all blocks between them.
    """
    order = sorted(edges)
    before: dict[int, set[int]] = {block: set() for block in order}
    for block, leads in edges.items():
        for target in leads:
            before[target].add(block)
    every = set(order)
    passed = {block: every if block != order[0] else {block} for block in order}
    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            ways = [passed[previous] for previous in before[block]]
            now = (set.intersection(*ways) if ways else set()) | {block}
            if now != passed[block]:
                passed[block], changed = now, True
    loops: dict[int, set[int]] = {}
    for block in order:
        for head in set(edges[block]) & passed[block]:
            loop, waiting = loops.setdefault(head, {head}), [block]
            while waiting:
                if (inside := waiting.pop()) not in loop:
                    loop.add(inside)
                    waiting.extend(before[inside])
    return list(loops.values())
