"""The record of a call, as a kernel reads it and as a launcher fills it, and how threads share its programs.

All fields are of eight bytes: in front what the threads need, then addresses of arrays, then numbers, then what the
kernel's plan adds.
"""

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
from numba.core import types
from numba.extending import intrinsic

from ragged_attention.portable.numba._vectors import add_to, compiled, set_int

NO_MEMORY = -1
STATE = ("claimed", "num_programs", "workspace", "failed")  # in front of every record
CLAIMED, NUM_PROGRAMS, WORKSPACE, FAILED = range(len(STATE))


def record_at(layout: np.dtype) -> Any:
    """An intrinsic from an address to the record of this layout that lies there."""
    record = numba.from_dtype(layout)

    @intrinsic
    def at(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], context.get_value_type(signature.return_type))

        return record(types.int64), generate

    return at


def bits_of(number: float) -> int:
    """A float64 as the int64 of its bits, the form in which records are handed over."""
    return struct.unpack("<q", struct.pack("<d", number))[0]


class Fields:
    """The fields of a kernel's record, all of eight bytes: addresses and numbers of the call, then the plan's own."""

    def __init__(
        self, operands: Sequence[str], results: Sequence[str], numbers: Sequence[str], plan: Sequence[str] = (), *,
        floats: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """`floats` are those of the numbers that are float64, handed over as `bits_of` them."""
        self.operands, self.results, self.numbers = tuple(operands), tuple(results), tuple(numbers)
        names = (*STATE, *operands, *results, *numbers, *plan)
        self.layout = np.dtype([(name, np.float64 if name in floats else np.int64) for name in names])
        self.at = record_at(self.layout)
        members = {
            "OPERANDS": self.operands,
            "RESULTS": self.results,
            "NUMBERS": self.numbers,
            "_fields_": [(name, ctypes.c_int64) for name in names],
        }
        self.structure: type[Any] = type("Record", (ctypes.Structure,), members)  # the record as ctypes has it


@compiled
def programs(address, num_programs):
    """The numbers of programs that no other thread takes, until none is left; `address` is the record's."""
    index = add_to(address + 8 * CLAIMED, 1)
    while index < num_programs:
        yield index
        index = add_to(address + 8 * CLAIMED, 1)


@compiled
def fails(address):
    """Let a call fail of which one program found no memory."""
    set_int(address, FAILED, 1)


@compiled
def end(address, num_programs):
    """Let no thread take another program; returns whether all were taken, which those that are done do not show.

    A thread that finds no memory takes none, so some are left where no thread found any.
    """
    return add_to(address + 8 * CLAIMED, num_programs) >= num_programs
