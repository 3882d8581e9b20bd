"""The record of a call, which a launcher fills and a kernel reads, and the sharing of its programs among threads.

Every field has eight bytes. The fields that the threads need come first, then the addresses of the arrays, then the
numbers of the call, then the fields that the kernel's plan adds, then the addresses of the kernel's branches.
"""

import ctypes
import functools
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel.models import RecordModel
from numba.core.datamodel.registry import register_default
from numba.extending import intrinsic

from ragged_attention.host import forking
from ragged_attention.portable.numba._branches import Branch
from ragged_attention.portable.numba._compiling import machine_code
from ragged_attention.portable.numba._vectors import (
    I64,
    add_to,
    allocate,
    call_at,
    compiled,
    in_team,
    inlined,
    int_at,
    join_thread,
    number,
    release,
    set_int,
    start_thread,
)

NO_MEMORY = -1
STATE = ("claimed", "num_programs", "workspace", "failed")  # the first fields of every record
CLAIMED, NUM_PROGRAMS, WORKSPACE, FAILED = range(len(STATE))
ALIGNMENT = 64  # bytes


@inlined
def up_to(count, step):
    """The smallest multiple of `step` that is at least `count`."""
    return (count + step - 1) // step * step


class RecordType(types.Record):
    """The type of a record in compiled functions. It caches its long description, which Numba requests often."""

    @functools.cached_property
    def _description(self) -> str:
        return super().__repr__()

    def __repr__(self) -> str:
        return self._description


register_default(RecordType)(RecordModel)


def record_type(names: Sequence[str], floats: Sequence[str] = ()) -> Any:
    """The type of a record with these fields, of which `floats` are float64 and the others int64."""
    kinds = ((name, types.float64 if name in floats else types.int64) for name in names)
    fields = [(name, {"type": kind, "offset": 8 * index}) for index, (name, kind) in enumerate(kinds)]
    return RecordType(fields, size=8 * len(fields), aligned=True)


def record_at(names: Sequence[str], floats: Sequence[str] = ()) -> Any:
    """An intrinsic that takes an address and returns the record with these fields stored there."""
    record = record_type(names, floats)

    @intrinsic
    def at(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], context.get_value_type(signature.return_type))

        return record(types.int64), generate

    return at


def record_in(names: Sequence[str], prefix: str) -> Any:
    """An intrinsic that returns a part of a call's record: the consecutive fields `prefix` + name, for all `names`."""
    inner = record_type(names)

    @intrinsic
    def part(context: Any, call: Any) -> Any:
        offset = call.offset(prefix + names[0])

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            address = builder.add(builder.ptrtoint(values[0], I64), number(offset))
            return builder.inttoptr(address, context.get_value_type(signature.return_type))

        return inner(call), generate

    return part


def bits_of(number: float) -> int:
    """The bits of a float64 as an int64, the form in which launchers pass floats."""
    return struct.unpack("<q", struct.pack("<d", number))[0]


@functools.cache
def stride_names(operand: str, axes: str) -> tuple[str, ...]:
    """The names of the record's fields for an operand's strides."""
    return tuple(f"{operand}_{axis}_stride" for axis in axes.split())


class Fields:
    """The fields of a kernel's record, each of eight bytes: arrays and numbers of the call, then fields of the plan.

    Some numbers describe operands: strides in elements, such as `q_token_stride`; the code of a format, such as
    `q_format`; and the three numbers with which `_formats.scale_of` reads a cache's scale. The last number, `branches`,
    has a bit for each branch that the call needs.
    """

    def __init__(
        self, operands: Sequence[str], results: Sequence[str], numbers: Sequence[str], plan: Sequence[str] = (), *,
        strides: Mapping[str, str] | None = None, formats: Sequence[str] = (), scales: Sequence[str] = (),
        floats: Sequence[str] = (), branches: Sequence[Any] = (),
    ) -> None:  # fmt: skip
        """`strides` names the axes of operands that need not be contiguous, such as {"q": "token head"}.

        `formats` and `scales` name operands. `floats` names the numbers that are float64; launchers pass their bits.
        `branches` are functions that `_branches.branch` has made.
        """
        self.operands, self.results = tuple(operands), tuple(results)
        self.strides, self.formats, self.scales = dict(strides or {}), tuple(formats), tuple(scales)
        described = [name for operand, axes in self.strides.items() for name in stride_names(operand, axes)]
        described += [f"{operand}_format" for operand in (*formats, *scales)]
        described += [f"{operand}_{what}" for operand in scales for what in ("stride", "number")]
        self.numbers = (*described, *numbers, "num_threads", "branches")
        self.branches: tuple[Branch, ...] = tuple(caller.branch for caller in branches)
        self.floats = (*floats, *(f"{operand}_number" for operand in scales))
        addresses = [branch.name for branch in self.branches]
        names = (*STATE, *self.operands, *self.results, *self.numbers, *plan, *addresses)
        self.type, self.at = record_type(names, self.floats), record_at(names, self.floats)
        fields = [(name, ctypes.c_int64) for name in names]
        members = {"OPERANDS": self.operands, "RESULTS": self.results, "NUMBERS": self.numbers, "_fields_": fields}
        self.size, self.branches_at = 8 * len(names), 8 * (len(names) - len(addresses))  # in bytes
        self.structure: type[Any] = type("Record", (ctypes.Structure,), members)  # the record for ctypes


@compiled
def claimed(address):
    """Yield indices of programs, each in a single thread, until none is left; `address` is the record's address."""
    index, num_programs = add_to(address + 8 * CLAIMED, 1), int_at(address, NUM_PROGRAMS)
    while index < num_programs:
        yield index
        index = add_to(address + 8 * CLAIMED, 1)


@compiled
def programs(address, memory):
    """Yield a thread's programs, then release its `memory`; yields nothing if `memory` could not be allocated."""
    if memory:
        for index in claimed(address):  # noqa: UP028, Numba has no "yield from"
            yield index
        release(memory)


@compiled
def mark_failed(address):
    """Mark a call as failed because one of its programs found no memory."""
    set_int(address, FAILED, 1)


@compiled
def end(address, num_programs):
    """Stop threads from taking more programs; returns whether all programs were taken.

    All were taken if `work` has ended in a thread that found memory, since that thread stops only when none is left.
    """
    return add_to(address + 8 * CLAIMED, num_programs) >= num_programs


@compiled
def in_own_threads(work, record, num_threads):
    """Call `work` in `num_threads` threads, the caller's included, or in fewer if the system refuses to start more."""
    handles, started = allocate(8 * num_threads), 1
    if handles:
        while started < num_threads and start_thread(handles + 8 * started, work, record) == 0:
            started += 1
    call_at(work, record)
    for index in range(1, started):
        join_thread(int_at(handles, index))
    release(handles)


def run_kernel(record, plan, work, team, num_threads):
    """Run a kernel, given the addresses of its two functions; returns 0 or NO_MEMORY.

    `team` is the address of GOMP_parallel, or 0 to start threads here. The whole call is machine code, so no Python
    exception, such as that of Ctrl-C, can end it while one of its threads runs.
    """
    count, complete = call_at(plan, record), True
    if count > 0:
        set_int(record, NUM_PROGRAMS, count)
        num_threads = min(num_threads, count)
        if num_threads < 2:
            call_at(work, record)
        elif team:
            in_team(team, work, record, num_threads)
        else:
            in_own_threads(work, record, num_threads)
        complete = end(record, count) and int_at(record, FAILED) == 0
    release(int_at(record, WORKSPACE))
    return 0 if count >= 0 and complete else NO_MEMORY


@functools.cache
@forking.postponed()  # `CFunc.ctypes` is a cached property, which takes a lock in Python 3.11
def runner() -> Any:
    """The compiled `run_kernel`, as a ctypes function."""
    kinds = "int64(int64, int64, int64, int64, int64)"
    return machine_code("the threads of the kernels", {run_kernel: kinds})[0].ctypes


def _on_stack(context: Any, numbers: Any) -> Any:
    """Write a tuple of int64 to the stack, after its length; returns the address."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = cgutils.alloca_once(builder, ir.ArrayType(I64, 1 + len(numbers)))
        elements = (number(len(numbers)), *cgutils.unpack_tuple(builder, values[0], len(numbers)))
        for index, element in enumerate(elements):
            builder.store(element, builder.gep(place, [number(0), number(index)]))
        return builder.ptrtoint(place, I64)

    return types.int64(types.UniTuple(types.int64, len(numbers))), generate


on_stack: Any = intrinsic(_on_stack)


@compiled
def allocate_arena(num_numbers, sizes):
    """Allocate a record, followed by a buffer for each entry of `sizes`, a list of sizes in bytes (see `on_stack`).

    The record has `num_numbers` numbers, then the buffers' addresses. Returns its address, 0 if there is no memory.
    """
    count, first = int_at(sizes, 0), sizes + 8
    total = header = up_to(8 * (num_numbers + count), ALIGNMENT)
    for index in range(count):
        total += up_to(int_at(first, index), ALIGNMENT)
    address = allocate(total)
    if address:
        place = address + header
        for index in range(count):
            set_int(address, num_numbers + index, place)
            place += up_to(int_at(first, index), ALIGNMENT)
    return address


@inlined
def list_rows(rows, count, first, size):
    """Write the addresses of `count` rows of `size` bytes each, the first of them at `first`, to the list `rows`."""
    for row in range(count):
        set_int(rows, row, first + row * size)
