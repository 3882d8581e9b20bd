"""Parses PTX text: one kernel, as basic blocks.

A block ends at a branch, a return or a CTA's barrier, or before a label that some branch names. The parser reads only
what kernels of Triton and nvcc have: one entry, registers, labels, instructions, arrays in shared and local memory, and
the debug information with the lines of the Python source.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping

from ragged_attention.testing.ptx.errors import Unknown

BARRIERS = tuple(
    f"{name}.{action}{aligned}"
    for name in ("bar", "barrier", "bar.cta", "barrier.cta")
    for action in ("sync", "arrive")
    for aligned in (("", ".aligned") if name.startswith("barrier") else ("",))
)
Scope = tuple[int, ...]  # the braces around a statement, outermost first, numbered in the order in which they open
Location = tuple[str, ...]  # the file, line and column of a `.loc`


@dataclasses.dataclass(frozen=True)
class Guard:
    """`@p` or `@!p`: the predicate that says which threads take part."""

    register: str
    negated: bool


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction: its opcode with all modifiers, and its operands as written."""

    line: int
    guard: Guard | None
    opcode: str
    operands: tuple[str, ...]

    def __str__(self) -> str:
        return f"line {self.line}: {self.opcode} {', '.join(self.operands)}".rstrip()


@dataclasses.dataclass(frozen=True)
class Block:
    """Instructions that run one after another, and how the block ends.

    `ending` is "fall" (to the next block), "branch" (to block `target`, if `guard` allows), "return", "barrier" or
    "arrive" (at a barrier, without a wait). `barrier` has a barrier's operands: its number and, if it is not for all
    threads of the CTA, its number of threads. `opcode` is the opcode of the ending, and `line` that of the last
    statement.
    """

    instructions: tuple[Instruction, ...]
    line: int
    ending: str = "fall"
    opcode: str = ""
    target: int = -1
    guard: Guard | None = None
    barrier: tuple[str, ...] = ()
    aligned: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """One kernel.

    `params` are (name, type) in order, such as ("k_param_0", "u64") or ("k_param_1", "b8[128]"). `widths` has the type
    of each register; numbered registers have one entry, whose key is their prefix and `<`. `sources` has the Python
    line ("file:line") of each PTX line; in a called function, the lines of the calls come first, the outermost call
    before the others. `symbols` has the offsets of arrays in shared memory, and `shared` is the size in bytes of all
    those with a static size. `locals` has the offsets of arrays in a thread's local memory and, under the empty name,
    their total bytes. `variables` has the contents of arrays of constants. `threads` is the number of threads in a CTA
    and `most_registers` the number of registers of a thread; both are 0 if the PTX does not give them.
    """

    name: str
    params: list[tuple[str, str]]
    widths: Mapping[str, str]
    blocks: list[Block]
    threads: int
    text: str
    sources: Mapping[int, str]
    symbols: Mapping[str, int]
    shared: int
    locals: Mapping[str, int]
    variables: Mapping[str, bytes]
    most_registers: int

    @functools.cached_property
    def offsets(self) -> dict[str, int]:
        """The offset of each parameter in the parameter space, in bytes; arrays are aligned to 64."""
        offsets, end = {}, 0
        for name, kind in self.params:
            size, alignment = size_of(kind), 64 if "[" in kind else size_of(kind)
            offsets[name] = -(-end // alignment) * alignment
            end = offsets[name] + size
        return offsets

    @functools.cached_property
    def instructions(self) -> dict[int, str]:
        """The text of the instructions on each line."""
        texts: dict[int, str] = {}
        for block in self.blocks:
            for one in block.instructions:
                text = f"{one.opcode} {', '.join(one.operands)}".rstrip()
                texts[one.line] = f"{texts[one.line]}; {text}" if one.line in texts else text
            if block.opcode and block.line not in texts:
                texts[block.line] = f"{block.opcode} {', '.join(block.barrier)}".rstrip()
        return texts

    def type_of(self, register: str) -> str | None:
        """The declared type of a register ("b32", "pred"), or None if there is no such register."""
        return self.widths.get(register) or self.widths.get(f"{register.rstrip('0123456789')}<")


def split_operands(text: str) -> tuple[str, ...]:
    """The operands in a text: its parts between the commas that are outside all brackets."""
    if not set(text) & set("{[("):
        return tuple(part for part in map(str.strip, text.split(",")) if part)
    parts, depth, start = [], 0, 0
    for index, character in enumerate(text):
        depth += (character in "{[(") - (character in "}])")
        if character == "," and not depth:
            parts.append(text[start:index].strip())
            start = index + 1
    last = text[start:].strip()
    return (*parts, last) if last else tuple(parts)


@functools.lru_cache(maxsize=64)
def parse(text: str, name: str = "") -> Kernel:
    """The kernel with this name in a PTX module; by default, the module's first kernel."""
    wanted = re.escape(name) or r"[\w$]+"
    header = re.search(rf"\.entry\s+({wanted})\s*\((.*?)\)(.*?)\{{", text, re.S)
    if not header:
        raise Unknown(f"a PTX text without {f'the kernel {name}' if name else 'a kernel'} (.entry)")
    params = [_param(one) for one in re.sub(r"//.*", "", header[2]).split(",") if one.strip()]
    threads = re.search(r"\.reqntid\s+(\d+)(?![\d\s]*,)", re.sub(r",\s*1\b", "", header[3]))
    if ".reqntid" in header[3] and not threads:
        raise Unknown("CTAs of more than one dimension (.reqntid)")
    body = _Body(text, header.end())
    following = re.compile(r"^\s*(?:\.visible\s+)?\.(?:entry|func)\b", re.M).search(text, header.end())
    kernel_text = text[header.start() : following.start() if following else len(text)]
    symbols, shared = _shared(text[: header.start()], kernel_text)
    return Kernel(
        name=header[1],
        params=params,
        widths=body.widths,
        blocks=_blocks(body.statements, body.last_line),
        threads=int(threads[1]) if threads else 0,
        text=kernel_text,
        sources=body.sources,
        locals=body.locals,
        variables=_variables(text),
        most_registers=int(registers[1]) if (registers := re.search(r"\.maxnreg\s+(\d+)", header[3])) else 0,
        symbols=symbols,
        shared=shared,
    )


def size_of(kind: str) -> int:
    """The size in bytes of a parameter's type, such as u64 or b8[128]."""
    width, _, count = kind[1:].rstrip("]").partition("[")
    return int(width) // 8 * int(count or 1)


def _shared(before: str, kernel_text: str) -> tuple[dict[str, int], int]:
    """The offsets of the shared arrays that a kernel names, and the bytes of those with a static size.

    Arrays whose size the launch determines (`.extern`) all begin at one place, after the others.
    """
    places, end = {}, 0
    array = r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.[busf](\d+)\s+([\w$]+)\s*((?:\[\d+\])*)\s*;"
    named = set(re.findall(r"[\w$]+", re.sub(array, "", kernel_text)))
    for alignment, bits, name, counts in re.findall(array, before + kernel_text):
        if name in named:
            size = int(bits) // 8
            places[name] = -(-end // int(alignment or size)) * int(alignment or size)
            end = places[name] + size * math.prod(map(int, re.findall(r"\d+", counts)))
    dynamic = re.findall(r"\.extern\s+\.shared\b(?:\s+\.align\s+(\d+))?[^;]*?([\w$]+)\s*\[\s*\]\s*;", before)
    alignment = max((int(alignment or 16) for alignment, _ in dynamic), default=1)
    end = -(-end // alignment) * alignment
    return places | {name: end for _, name in dynamic}, end


def _variables(text: str) -> dict[str, bytes]:
    """The contents of the module's initialised arrays."""
    contents = {}
    array = r"^\s*\.global\s+(?:\.align\s+\d+\s+)?\.[busf](\d+)\s+([\w$]+)\[\d+\]\s*=\s*\{([^}]*)\}\s*;"
    for bits, name, values in re.findall(array, text, re.MULTILINE):
        if re.fullmatch(r"[-\d\s,]*", values):  # integers; arrays of other values stay unknown
            numbers = map(int, values.split(","))
            contents[name] = b"".join(
                number.to_bytes(int(bits) // 8, "little", signed=number < 0) for number in numbers
            )
    return contents


def _param(text: str) -> tuple[str, str]:
    """The (name, type) of a parameter of the kernel."""
    match = re.fullmatch(
        r"\s*\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+(?:\.ptr\b.*\s)?([\w$]+)\s*(\[\d+\])?\s*", text, re.S
    )
    if not match:
        raise Unknown(f"the parameter {text.strip()}")
    return match[2], match[1] + (match[3] or "")


class _Body:
    """The text between a kernel's braces, parsed: `statements` are labels (str) and instructions."""

    def __init__(self, text: str, begin: int) -> None:
        self.widths: dict[str, str] = {}
        self.statements: list[str | Instruction] = []
        self.sources: dict[int, str] = {}
        self.locals = {"": 0}
        self.last_line = 0
        source, sources = None, _Sources(text)
        pieces = list(_pieces(text, begin))
        labels = {(piece[:-1], scope) for _, piece, scope in pieces if re.fullmatch(r"[$\w%]+:", piece)}
        for line, piece, scope in pieces:
            if re.match(r"\.loc\b", piece):
                source = sources.at(piece)
            elif label := re.fullmatch(r"([$\w%]+):", piece):
                self.statements.append(_label(label[1], scope, labels))
            elif piece.startswith(".reg"):
                self._declare(line, piece)
            elif piece.startswith(".local"):
                self._reserve(line, piece)
            elif not piece.startswith("."):
                one = _instruction(line, piece)
                if _is_branch(one):
                    one = dataclasses.replace(one, operands=(_label(one.operands[0], scope, labels),))
                self.statements.append(one)
                if source:
                    self.sources[line] = source
                self.last_line = line

    def _declare(self, line: int, piece: str) -> None:
        declared = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", piece, re.S)
        if not declared:
            raise Unknown(f"line {line}: {piece}")
        for name in declared[2].split(","):
            name = re.sub(r"<\d+>", "<", name.strip())  # `%r<9>` declares %r0, ..., %r8
            if self.widths.setdefault(name, declared[1]) != declared[1]:
                raise Unknown(f"line {line}: register {name} of another type than in another scope")

    def _reserve(self, line: int, piece: str) -> None:
        """Reserve local memory for an array."""
        array = re.fullmatch(r"\.local\s+(?:\.align\s+(\d+)\s+)?\.b8\s+([\w$]+)\[(\d+)\]", piece)
        if not array:
            raise Unknown(f"line {line}: {piece}")
        self.locals[array[2]] = -(-self.locals[""] // 16) * 16
        self.locals[""] = self.locals[array[2]] + int(array[3])


class _Sources:
    """The lines of Python that `.loc` directives name."""

    def __init__(self, text: str) -> None:
        self.files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.M))
        self.callers: dict[Location, Location] = {}

    def at(self, directive: str) -> str | None:
        """The lines for a directive, from the kernel's own to the innermost function's, or None if unknown."""
        numbers = r"(\d+)\s+(\d+)\s+(\d+)"
        match = re.match(rf"\.loc\s+{numbers}(?:.*\binlined_at\s+{numbers})?", directive)
        if not match or match[1] not in self.files or int(match[2]) == 0:
            return None
        place: Location | None = match.group(1, 2, 3)
        if match[4]:
            self.callers[place] = match.group(4, 5, 6)
        else:
            self.callers.pop(place, None)
        chain: list[Location] = []
        while place and place not in chain:
            chain.append(place)
            place = self.callers.get(place)
        return " > ".join(f"{self.files.get(file, '?')}:{line}" for file, line, _ in reversed(chain))


def _label(name: str, scope: Scope, labels: set[tuple[str, Scope]]) -> str:
    """The label that a name refers to in a scope, changed to a name that no other label of the kernel has."""
    for depth in range(len(scope), 0, -1):
        if (name, scope[:depth]) in labels:
            return f"{name} of scope {scope[depth - 1]}"
    return name


def _pieces(text: str, begin: int) -> Iterator[tuple[int, str, Scope]]:
    """Each statement, as (line, statement, scope), up to the brace that closes the kernel."""
    number, scope, opened, pending, inline = text[:begin].count("\n") + 1, (), 0, "", False
    for offset, raw in enumerate(text[begin:].split("\n")):
        if comment := re.search(r"// (begin|end) inline asm", raw):
            inline = comment[1] == "begin"
        line = raw.split("//")[0].strip()
        if inline and re.match(r"\.loc\b", line):
            continue  # LLVM adds line numbers within inline assembly to the assembly's own line
        if not pending and re.match(r"\.(loc|file)\b", line):
            yield number + offset, line, scope
            continue
        pending = f"{pending} {line}".strip()
        while pending:
            if pending[0] in "{}":  # a brace that opens an operand is never at the start of a statement
                if pending[0] == "{":
                    opened += 1
                    scope = (*scope, opened)
                elif scope:
                    scope = scope[:-1]
                else:
                    return
                pending = pending[1:].strip()
            elif label := re.match(r"[$\w%]+:(?!:)", pending):
                yield number + offset, label[0], scope
                pending = pending[label.end() :].strip()
            elif ";" in pending:
                one, pending = (part.strip() for part in pending.split(";", 1))
                if one:
                    yield number + offset, one, scope
            else:
                break  # the statement continues on the next line
    raise Unknown("a kernel without an end")


def _instruction(line: int, piece: str) -> Instruction:
    guard = None
    if guarded := re.match(r"@(!?)\s*(%?[\w$]+)\s+(.*)$", piece, re.S):
        guard, piece = Guard(guarded[2], bool(guarded[1])), guarded[3]
    opcode, _, rest = re.sub(r"\s+", " ", piece).partition(" ")
    return Instruction(line, guard, opcode, split_operands(rest))


def _blocks(statements: list[str | Instruction], last_line: int) -> list[Block]:
    """The blocks of some statements; an additional last block stands for the end of the kernel's text."""
    targets = {s.operands[0] for s in statements if not isinstance(s, str) and _is_branch(s)}
    # The instructions of each block, and the one that ends it: None if the block ends before a label.
    pieces: list[tuple[list[Instruction], Instruction | None]] = [([], None)]
    labels: dict[str, int] = {}
    for one in statements:
        if isinstance(one, str):
            if one in targets:
                if pieces[-1][0]:
                    pieces.append(([], None))
                labels[one] = len(pieces) - 1
        elif _is_branch(one) or one.opcode in ("ret", "exit", *BARRIERS):
            pieces[-1:] = [(pieces[-1][0], one), ([], None)]
        else:
            pieces[-1][0].append(one)
    if missing := targets - labels.keys():
        raise Unknown(f"a branch to {', '.join(sorted(missing))}, which is no label")
    blocks = [_block(tuple(inside), end, labels) for inside, end in pieces]
    return [*blocks, Block((), last_line, "return")]


def _is_branch(instruction: Instruction) -> bool:
    if instruction.opcode.partition(".")[0] != "bra":
        return False
    if instruction.opcode not in ("bra", "bra.uni") or len(instruction.operands) != 1:
        raise Unknown(str(instruction))
    return True


def _block(inside: tuple[Instruction, ...], end: Instruction | None, labels: Mapping[str, int]) -> Block:
    """A block that ends with `end`, or at a label."""
    if end is None:
        return Block(inside, inside[-1].line if inside else 0)
    if _is_branch(end):
        return Block(inside, end.line, "branch", end.opcode, labels[end.operands[0]], end.guard)
    if end.opcode in ("ret", "exit"):
        return Block(inside, end.line, "return", end.opcode, guard=end.guard)
    ending = "arrive" if "arrive" in end.opcode else "barrier"
    if end.guard or not 1 + (ending == "arrive") <= len(end.operands) <= 2:
        raise Unknown(str(end))
    aligned = end.opcode.startswith("bar.") or end.opcode.endswith(".aligned")
    return Block(inside, end.line, ending, end.opcode, barrier=end.operands, aligned=aligned)
