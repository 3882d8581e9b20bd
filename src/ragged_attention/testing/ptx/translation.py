"""Translates PTX to Python: one function per block, compiled once per kernel.

A function takes the mask of the lanes that run (True: all of them). It returns the lanes that take the block's branch,
or the barrier that the threads arrive at. Its globals are the names that `Names` collected, the modules that it calls
and the machine's objects; each machine has its own globals.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator
from types import CodeType

from ragged_attention.testing.ptx import arithmetic, asynchronous, conversions, operations
from ragged_attention.testing.ptx.errors import Unknown
from ragged_attention.testing.ptx.operands import Names, Statement, pieces_of
from ragged_attention.testing.ptx.parsing import Block, Guard, Instruction, Kernel

HANDLERS = {**arithmetic.HANDLERS, **conversions.HANDLERS, **operations.HANDLERS, **asynchronous.HANDLERS}
WITHOUT_RESULT = ("st", "red", "cp", "stmatrix", "bar", "fence", "trap", "tensormap")


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A kernel in Python: `code` defines functions b0, b1, ..., which refer to `names`."""

    code: CodeType
    names: Names


@functools.lru_cache(maxsize=64)
def translate(kernel: Kernel) -> Program:
    """A kernel as a program. Raises Unknown for the first instruction that is not known."""
    names = Names(kernel)
    in_flight = _asynchronous_registers(kernel)
    lines: list[str] = []
    for index, block in enumerate(kernel.blocks):
        lines.append(f"def b{index}(m):")
        for instruction in _as_assembled(block):
            lines += [f"    {line}" for line in _instruction(instruction, names, in_flight)]
        lines.append(f"    return {_barrier(block, names) if block.barrier else _guard(block.guard, names)}")
    return Program(compile("\n".join(lines), f"<{kernel.name} from PTX>", "exec"), names)


def _guard(guard: Guard | None, names: Names) -> str:
    if guard is None:
        return "True"
    return names.predicate(f"!{guard.register}" if guard.negated else guard.register)


def _barrier(block: Block, names: Names) -> str:
    """An expression for a pair: the number of a barrier, and its number of threads or None."""
    try:
        number, *count = (names.value(operand, "u", 4) for operand in block.barrier)
    except Unknown as error:
        raise Unknown(f"line {block.line}: {block.opcode}: {error}") from error
    return f"({number}, {count[0] if count else None})"


def _instruction(instruction: Instruction, names: Names, in_flight: frozenset[str]) -> Iterator[str]:
    mask = "m"
    if instruction.guard:
        mask = "g"
        yield f"g = np.logical_and(m, {_guard(instruction.guard, names)})"
    statement = Statement(instruction, names, mask)
    handler = HANDLERS.get(statement.head)
    if handler is None:
        raise Unknown(f"{instruction}: the opcode {statement.head} is not known")
    try:
        lines = handler(statement)
        statement.finish()
    except Unknown as error:
        raise error if str(instruction) in str(error) else Unknown(f"{instruction}: {error}") from error
    except (IndexError, KeyError, ValueError) as error:
        raise Unknown(f"{instruction}: not in a form that is known ({error!r})") from error
    if in_flight and statement.head != "wgmma":
        yield from _watch(instruction, in_flight, mask)
    yield from lines


def _as_assembled(block: Block) -> list[Instruction]:
    """The instructions of a block, with each wgmma.fence moved to the next product in the block, if there is one.

    LLVM may compute operands of a product between the fence and the product. The assembler moves the fence, as
    WARPGROUP.ARRIVE, after these computations, because the product depends on them.
    """
    instructions: list[Instruction] = []
    fence: int | None = None
    for one in block.instructions:
        if one.opcode.startswith("wgmma."):
            if fence is not None:
                instructions.append(instructions.pop(fence))
            fence = len(instructions) if one.opcode.startswith("wgmma.fence") and one.guard is None else None
        instructions.append(one)
    return instructions


def _asynchronous_registers(kernel: Kernel) -> frozenset[str]:
    """The registers that a wgmma reads or writes after it was issued."""
    registers: set[str] = set()
    for block in kernel.blocks:
        for one in block.instructions:
            if one.opcode.startswith("wgmma.mma_async"):
                registers.update(*(pieces_of(operand) for operand in one.operands[:2] if operand.startswith("{")))
    return frozenset(registers)


def _watch(instruction: Instruction, in_flight: frozenset[str], mask: str) -> Iterator[str]:
    """Lines that check registers which some wgmma uses. A read matters only while a wgmma is in flight (`busy`)."""
    split = 0 if instruction.opcode.split(".")[0] in WITHOUT_RESULT else 1
    written = _registers(instruction.operands[:split]) & in_flight
    read = _registers(instruction.operands[split:]) & in_flight
    if written or read:
        arguments = f"{tuple(sorted(read))}, {tuple(sorted(written))}, {mask}, {instruction.line}"
        yield f"{'' if written else 'if busy: '}warpgroups.touch({arguments})"


def _registers(operands: tuple[str, ...]) -> set[str]:
    return {word for operand in operands for word in re.findall(r"%?[\w$]+", operand)}
