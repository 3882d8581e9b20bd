"""PTX as text -> one kernel as basic blocks.

A block ends at a branch, a return, a barrier of the whole CTA, or before a label that something branches to. Only what
a kernel of Triton's has is read: one entry, registers, labels, instructions and the debug information that tells the
line of the Python source. A variable of the kernel's own (`.shared` or `.local` with a size) is refused where an
instruction names it, for it is no register.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping

from ragged_attention.testing.ptx.errors import Unknown

BARRIERS = ("bar.sync", "barrier.sync", "barrier.sync.aligned", "barrier.cta.sync", "barrier.cta.sync.aligned")


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
    """Instructions that run one after another, and where threads go from there.

    `ending` is "fall" (to the next block), "branch" (to block `target`, if `guard` allows), "return" or "barrier"
    (number `barrier`, for `expected` threads or, if None, all of the CTA); `opcode` says so in the text, and `line` is
    that of the last statement.
    """

    instructions: tuple[Instruction, ...]
    line: int
    ending: str = "fall"
    opcode: str = ""
    target: int = -1
    guard: Guard | None = None
    barrier: int = 0
    expected: int | None = None
    aligned: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """One kernel.

    `params` are (name, type) in order, such as ("k_param_0", "u64"); `widths` the type of each register or, with a
    `<` behind the prefix, of a numbered row of them; `sources` the Python line ("file:line") of each PTX line;
    `symbols` the names of shared memory of a size that the launch tells; `threads` those of a CTA, 0 if not said.
    """

    name: str
    params: list[tuple[str, str]]
    widths: Mapping[str, str]
    blocks: list[Block]
    threads: int
    text: str
    sources: Mapping[int, str]
    symbols: frozenset[str]

    def type_of(self, register: str) -> str | None:
        """The declared type of a register ("b32", "pred"), or None if there is no such register."""
        return self.widths.get(register) or self.widths.get(re.sub(r"\d+$", "<", register))


def split_operands(text: str) -> tuple[str, ...]:
    """What stands between the commas that are outside all brackets."""
    parts, depth, start = [], 0, 0
    for index, character in enumerate(text):
        depth += (character in "{[(") - (character in "}])")
        if character == "," and not depth:
            parts.append(text[start:index].strip())
            start = index + 1
    last = text[start:].strip()
    return (*parts, last) if last else tuple(parts)


@functools.lru_cache(maxsize=64)
def parse(text: str) -> Kernel:
    """Read the first kernel of a PTX module."""
    header = re.search(r"\.entry\s+([\w$]+)\s*\((.*?)\)(.*?)\{", text, re.S)
    if not header:
        raise Unknown("a PTX text without a kernel (.entry)")
    words = [re.sub(r"//.*", "", one).split() for one in header[2].split(",")]
    params = [(one[-1], one[1].lstrip(".")) for one in words if one]
    threads = re.search(r"\.reqntid\s+(\d+)(?![\d\s]*,)", re.sub(r",\s*1\b", "", header[3]))
    if ".reqntid" in header[3] and not threads:
        raise Unknown("CTAs of more than one dimension (.reqntid)")
    body = _Body(text, header.end())
    return Kernel(
        name=header[1],
        params=params,
        widths=body.widths,
        blocks=_blocks(body.statements, body.last_line),
        threads=int(threads[1]) if threads else 0,
        text=text,
        sources=body.sources,
        symbols=frozenset(re.findall(r"\.extern\s+\.shared\b[^;]*?([\w$]+)\s*\[\s*\]\s*;", text[: header.start()])),
    )


class _Body:
    """What stands between a kernel's braces: `statements` are labels (str) and instructions."""

    def __init__(self, text: str, begin: int) -> None:
        self.widths: dict[str, str] = {}
        self.statements: list[str | Instruction] = []
        self.sources: dict[int, str] = {}
        self.last_line = 0
        files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.M))
        source = None
        for line, piece in _pieces(text, begin):
            if location := re.match(r"\.loc\s+(\d+)\s+(\d+)", piece):
                known = location[1] in files and int(location[2]) > 0
                source = f"{files[location[1]]}:{location[2]}" if known else None
            elif label := re.fullmatch(r"([$\w%]+):", piece):
                self.statements.append(label[1])
            elif piece.startswith(".reg"):
                self._declare(line, piece)
            elif not piece.startswith("."):
                self.statements.append(_instruction(line, piece))
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


def _pieces(text: str, begin: int) -> Iterator[tuple[int, str]]:
    """(line, statement) up to the brace that closes the kernel; scopes inside it are flattened."""
    number, depth, pending = text[:begin].count("\n") + 1, 1, ""
    for offset, raw in enumerate(text[begin:].split("\n")):
        line = raw.split("//")[0].strip()
        if not pending and line.startswith((".loc", ".file")):
            yield number + offset, line
            continue
        pending = f"{pending} {line}".strip()
        while pending:
            if pending[0] in "{}":  # a brace that opens an operand is never at the start of a statement
                depth += 1 if pending[0] == "{" else -1
                if depth == 0:
                    return
                pending = pending[1:].strip()
            elif label := re.match(r"[$\w%]+:(?!:)", pending):
                yield number + offset, label[0]
                pending = pending[label.end() :].strip()
            elif ";" in pending:
                one, pending = (part.strip() for part in pending.split(";", 1))
                if one:
                    yield number + offset, one
            else:
                break  # the statement goes on in the next line
    raise Unknown("a kernel without an end")


def _instruction(line: int, piece: str) -> Instruction:
    guard = None
    if guarded := re.match(r"@(!?)\s*(%?[\w$]+)\s+(.*)$", piece, re.S):
        guard, piece = Guard(guarded[2], bool(guarded[1])), guarded[3]
    opcode, _, rest = re.sub(r"\s+", " ", piece).partition(" ")
    return Instruction(line, guard, opcode, split_operands(rest))


def _blocks(statements: list[str | Instruction], last_line: int) -> list[Block]:
    """Cut statements into blocks; the last one is the end of the kernel's text."""
    targets = {s.operands[0] for s in statements if not isinstance(s, str) and _is_branch(s)}
    pieces: list[tuple[list[Instruction], Instruction | None]] = [([], None)]  # and what ends each, None: a label
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
    numbers = [int(text, 0) for text in end.operands if re.fullmatch(r"0[xX][0-9a-fA-F]+|\d+", text)]
    if end.guard or len(numbers) != len(end.operands) or not 1 <= len(numbers) <= 2:
        raise Unknown(str(end))
    aligned = end.opcode.startswith("bar.") or end.opcode.endswith(".aligned")
    expected = numbers[1] if len(numbers) == 2 else None
    return Block(inside, end.line, "barrier", end.opcode, barrier=numbers[0], expected=expected, aligned=aligned)
