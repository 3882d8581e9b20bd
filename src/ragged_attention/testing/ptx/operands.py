"""The parts of an instruction in Python: operands become expressions, and modifiers are removed one by one.

A register is an array of unsigned integers (of bools for predicates) with one element per lane. Views show it as signed
integers or floats. A constant is a NumPy scalar. `Names` collects the names that the expressions use, and the machine
creates their values. If modifiers remain when its translation is done, the instruction is refused.
"""

import functools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ragged_attention.testing.ptx.errors import Unknown
from ragged_attention.testing.ptx.parsing import Instruction, Kernel

SHARED_BASE = 1024  # shared memory begins here: the first bytes belong to the system, as on Hopper
PARAM_BASE = 0x400  # where a kernel's parameters begin in the parameter space
PARAM_WINDOW = 0x7E00_0000_0000  # where the parameter space lies among generic addresses
LOCAL_WINDOW = 0x7D00_0000_0000  # where local memory lies among generic addresses
SPECIALS = {
    *(f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"),
    *("%laneid", "%warpid"),
}
LOCAL_BASE = 64  # where local memory begins in the local space
PARAMETER = re.compile(r"\[\s*([\w$]+)\s*(?:\+\s*(\d+)\s*)?\]")
LETTERS = {"u": "u", "s": "i", "f": "f"}  # PTX type letters to NumPy dtype letters


class Type(NamedTuple):
    """The type of an instruction.

    `letter` is u, s, f, p (predicate) or h (16-bit floats), `size` is in bytes, and `half` is bf16 or f16 for h.
    """

    letter: str
    size: int
    half: str = ""


@functools.cache
def type_of(text: str) -> Type | None:
    """The type that a modifier names, or None; `b32` counts as `u32`."""
    if named := re.fullmatch(r"(bf16|f16)(x2)?", text):
        return Type("h", 4 if named[2] else 2, named[1])
    if named := re.fullmatch(r"([usb])(8|16|32|64)|(f)(32|64)", text):
        return Type((named[1] or named[3]).replace("b", "u"), int(named[2] or named[4]) // 8)
    return Type("p", 1) if text == "pred" else None


class Names:
    """The names that the Python code of a kernel uses.

    The keys are Python names. The values of `registers` are dtypes, those of `views` (base register, dtype), those of
    `constants` values, those of `specials` PTX names, and those of `params` (parameter, offset, dtype). In `variables`,
    the keys are PTX names and the values Python names.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.registers: dict[str, str] = {}
        self._arrays: dict[str, str] = {}  # Python names, by the PTX name of a register
        self.views: dict[str, tuple[str, str]] = {}
        self.constants: dict[str, Any] = {}
        self.specials: dict[str, str] = {}
        self.params: dict[str, tuple[str, int, str]] = {}
        self.variables: dict[str, str] = {}

    def is_register(self, text: str) -> bool:
        return self.kernel.type_of(text) is not None

    def size_of(self, register: str) -> int:
        """The size of a register in bytes. Predicates are refused."""
        declared = type_of(self.kernel.type_of(register) or "")
        if declared is None or declared.letter == "p":
            raise Unknown(f"{register} is no register of numbers")
        return declared.size

    def _array(self, register: str, dtype: str) -> str:
        """The Python name of a register. No other register has the same name."""
        name = self._arrays.setdefault(register, f"r{len(self._arrays)}_" + re.sub(r"\W", "", register))
        self.registers[name] = dtype
        return name

    def register(self, text: str, letter: str = "u") -> str:
        """The array of a register of numbers, viewed as unsigned integers, signed integers or floats."""
        size = self.size_of(text)
        base = self._array(text, f"u{size}")
        if letter == "u":
            return base
        self.views[f"{base}_{letter}"] = (base, f"{LETTERS[letter]}{size}")
        return f"{base}_{letter}"

    def predicate(self, text: str) -> str:
        """The array of a predicate register, its negation for `!p`, or a constant."""
        if text.startswith("!"):
            return f"np.logical_not({self.predicate(text[1:])})"
        if re.fullmatch(r"-?\d+", text):
            return str(int(text) != 0)
        if self.kernel.type_of(text) != "pred":
            raise Unknown(f"{text} is no predicate")
        return self._array(text, "?")

    def carry(self) -> str:
        """The array of the carry flag."""
        self.registers["carry"] = "?"
        return "carry"

    def constant(self, value: Any) -> str:
        name = f"k{len(self.constants)}"
        self.constants[name] = value
        return name

    def value(self, text: str, letter: str, size: int, convert: bool = False) -> str:
        """An operand as an expression of a dtype. With `convert`, a register of another width is cut or extended."""
        if letter == "p":
            return self.predicate(text)
        if text in SPECIALS:
            if (letter, size) != ("u", 4):
                raise Unknown(f"{text} as other than 32 unsigned bits")
            self.specials["special_" + text[1:].replace(".", "_")] = text
            return "special_" + text[1:].replace(".", "_")
        if text in self.kernel.symbols:
            return self.constant(np.dtype(f"u{size}").type(SHARED_BASE + self.kernel.symbols[text]))
        if text in self.kernel.variables and (letter, size) == ("u", 8):
            return self.variables.setdefault(text, f"variable{len(self.variables)}")
        if text in self.kernel.locals:
            return self.constant(np.dtype(f"u{size}").type(LOCAL_BASE + self.kernel.locals[text]))
        if text in self.kernel.offsets and letter == "u":
            return self.constant(np.dtype(f"u{size}").type(PARAM_BASE + self.kernel.offsets[text]))
        if self.is_register(text):
            if self.size_of(text) == size:
                return self.register(text, letter)
            if not convert or letter == "f":
                raise Unknown(f"{text} has another width than the instruction")
            return f"{self.register(text, letter)}.astype('{LETTERS[letter]}{size}')"
        return self.constant(_literal(text, letter, size))

    def address(self, text: str, param: bool = False) -> tuple[str, int]:
        """The name of the array with an address register's values, and the offset in bytes, from an operand.

        The operand is [register + offset], [symbol + offset] or [number + offset]. For a symbol or a number, the name
        is "None". A symbol is an array in shared memory or, with `param`, a parameter.
        """
        named = re.fullmatch(r"\[\s*([^\s+\]]+)\s*(?:\+\s*(-?\w+)\s*)?\]", text)
        if not named:
            raise Unknown(f"the address {text}")
        base, offset = named[1], int(named[2] or "0", 0)
        if param and base in self.kernel.offsets:
            return "None", PARAM_BASE + self.kernel.offsets[base] + offset
        if base in self.kernel.symbols and not param:
            return "None", SHARED_BASE + self.kernel.symbols[base] + offset
        if re.fullmatch(r"\d+", base):
            return "None", int(base) + offset
        return self.register(base), offset

    def is_parameter(self, text: str) -> bool:
        """Whether an operand has the form [parameter + offset]."""
        named = PARAMETER.fullmatch(text)
        return bool(named) and named[1] in self.kernel.offsets

    def parameter(self, text: str, size: int) -> str:
        """An operand [parameter + offset] as a constant of `size` bytes."""
        named = PARAMETER.fullmatch(text)
        if not named:
            raise Unknown(f"the parameter {text}")
        name = f"param_{named[1]}_{named[2] or 0}_{size}".replace("$", "_")
        self.params[name] = (named[1], int(named[2] or 0), f"u{size}")
        return name


def _literal(text: str, letter: str, size: int) -> Any:
    """A literal as a NumPy scalar: an integer, or the bits of a float after 0f or 0d."""
    if re.fullmatch({4: r"0[fF][0-9a-fA-F]{8}", 8: r"0[dD][0-9a-fA-F]{16}"}.get(size, "(?!)"), text):
        number = int(text[2:], 16)
    elif re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text) and letter != "f":
        number = int(text.rstrip("U"), 0) & ((1 << 8 * size) - 1)
    else:
        raise Unknown(f"the operand {text}")
    return np.array([number], f"u{size}").view(f"{LETTERS[letter]}{size}")[0]


def pieces_of(text: str) -> list[str]:
    """The operands inside {a, b}, or the operand itself, as a list."""
    return [piece.strip() for piece in text.strip("{} ").split(",")]


class Statement:
    """One instruction during its translation to Python; `mask` is the expression for the lanes that take part."""

    def __init__(self, instruction: Instruction, names: Names, mask: str) -> None:
        self.instruction, self.names, self.mask = instruction, names, mask
        self.head, *self.modifiers = instruction.opcode.split(".")
        self.operands = instruction.operands
        self.line = instruction.line

    def refused(self, why: str) -> Unknown:
        return Unknown(f"{self.instruction}: {why}")

    def take(self, *choices: str) -> str | None:
        """Remove and return the first modifier that is among `choices`, or return None."""
        for modifier in self.modifiers:
            if modifier in choices:
                self.modifiers.remove(modifier)
                return modifier
        return None

    def need(self, *choices: str) -> str:
        """Remove and return the first modifier that is among `choices`. Refuse the instruction if there is none."""
        modifier = self.take(*choices)
        if modifier is None:
            raise self.refused(f"none of .{', .'.join(choices)}")
        return modifier

    def flag(self, name: str) -> bool:
        return self.take(name) is not None

    def type(self) -> Type:
        """Remove the last modifier and return it as a type."""
        kind = type_of(self.modifiers[-1]) if self.modifiers else None
        if kind is None:
            raise self.refused("no known type")
        self.modifiers.pop()
        return kind

    def expect(self, *counts: int) -> None:
        """Refuse the instruction unless its number of operands is among `counts`."""
        if len(self.operands) not in counts:
            raise self.refused(f"{len(self.operands)} operands")

    def finish(self) -> None:
        """Refuse the instruction if modifiers remain."""
        if self.modifiers:
            raise self.refused(f"the modifier .{', .'.join(self.modifiers)}")

    def value(self, index: int, letter: str, size: int, convert: bool = False) -> str:
        """An operand as an expression; see `Names.value`."""
        return self.names.value(self.operands[index], letter, size, convert)

    def values(self, indices: Sequence[int], letter: str, size: int) -> list[str]:
        return [self.value(index, letter, size) for index in indices]

    def vector(self, index: int, letter: str = "u") -> str:
        """The registers of {a, b, ...}, as a tuple."""
        return "(" + "".join(f"{self.names.register(one, letter)}, " for one in pieces_of(self.operands[index])) + ")"

    def extend(self, expression: str, letter: str, size: int) -> list[str]:
        """Write to the first operand, which may be wider than `size` bytes. Signed values extend their sign."""
        if self.names.size_of(self.operands[0]) < size:
            raise self.refused("a result that is too narrow")
        return self.assign(expression, letter)

    def assign(self, expression: str, letter: str = "u", size: int | None = None) -> list[str]:
        """Write to the first operand in the lanes of the mask. It must have `size` bytes, if given."""
        if letter == "p":
            return [f"np.copyto({self.names.predicate(self.operands[0])}, {expression}, where={self.mask})"]
        if size is not None and self.names.size_of(self.operands[0]) != size:
            raise self.refused("a result of another width")
        target = self.names.register(self.operands[0], letter)
        return [f"np.copyto({target}, {expression}, casting='unsafe', where={self.mask})"]

    def apply(self, function: str, arguments: Sequence[str], letter: str, size: int) -> list[str]:
        """Call a NumPy function that writes to the first operand itself, which is faster than `assign`."""
        if letter == "p":
            target = self.names.predicate(self.operands[0])
        elif self.names.size_of(self.operands[0]) == size:
            target = self.names.register(self.operands[0], letter)
        else:
            raise self.refused("a result of another width")
        return [f"{function}({', '.join(arguments)}, out={target}, where={self.mask})"]
