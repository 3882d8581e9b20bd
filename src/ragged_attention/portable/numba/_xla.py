"""How XLA calls a kernel: through a handler of its foreign function interface, on the threads of XLA's pool.

The interface is a C ABI (xla/ffi/api/c_api.h): a handler gets the address of a call frame. A kernel's handler is a stub
that calls `handle` with this address and that of `about`, a record of numbers that describe the kernel.
"""

import ctypes
import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import binding, ir

from ragged_attention.host import forking
from ragged_attention.portable.numba._compiling import machine_code
from ragged_attention.portable.numba._records import FAILED, NUM_PROGRAMS, STATE, WORKSPACE, end, record_at
from ragged_attention.portable.numba._vectors import (
    I64,
    add_to,
    allocate,
    call_at,
    compiled,
    copy,
    inlined,
    int32_at,
    int_at,
    let_others_run,
    number,
    release,
    set_int,
)

# Offsets of fields in a call frame and in the structures it points to, in words of eight bytes.
EXTENSION, API, CONTEXT, NUM_OPERANDS, OPERANDS, NUM_RESULTS, RESULTS, ATTRIBUTES = 1, 2, 3, 7, 9, 12, 14, 20
DATA, RANK, DIMENSIONS = 3, 4, 5  # in a buffer
VALUES = 2  # in an array of numbers
IS_METADATA, TYPE, METADATA = 1, 2, 3  # in an extension; TYPE counts four-byte words; IS_METADATA is a value of TYPE
VERSION, TRAITS = 3, 4  # in the metadata
CREATE_ERROR, DESTROY_ERROR, SCHEDULE, NUM_THREADS = 6, 8, 17, 18  # in the table of XLA's functions
RESOURCE_EXHAUSTED, FAILED_PRECONDITION = 8, 9

ABOUT = ("version", "words", "num_operands", "num_results", "num_numbers", "num_branches", "branches",
         "plan", "work", "task", "no_memory", "not_compiled")  # fmt: skip
about_at = record_at(ABOUT)
# The words before a call's record: the number of threads that still use the call's memory, the address of `work`, the
# number of pool threads that are running `work`, and the arguments of XLA's functions.
HOLDERS, WORK, RUNNING, ARGUMENTS, WORDS = 0, 1, 2, 3, 17


@compiled
def data_of(buffer):
    """The address of an array's elements, 0 if it has none."""
    for axis in range(int_at(buffer, RANK)):
        if int_at(int_at(buffer, DIMENSIONS), axis) == 0:
            return 0
    return int_at(buffer, DATA)


@compiled
def succeeds(api, function, arguments, size):
    """Call one of XLA's functions; returns whether it succeeds.

    It has `size` words of arguments, of which this function sets the first two.
    """
    set_int(arguments, 0, 8 * size)
    set_int(arguments, 1, 0)
    error = call_at(int_at(api, function), arguments)
    if error:
        set_int(arguments, 0, 24)
        set_int(arguments, 2, error)
        call_at(int_at(api, DESTROY_ERROR), arguments)
    return error == 0


@inlined
def let_go(block):
    """End a thread's use of a call's memory; the last thread releases it."""
    if add_to(block + 8 * HOLDERS, -1) == 1:
        release(int_at(block, WORDS + WORKSPACE))
        release(block)


def task(block):
    """Run a call's programs in a thread of the pool."""
    add_to(block + 8 * RUNNING, 1)
    call_at(int_at(block, WORK), block + 8 * WORDS)
    add_to(block + 8 * RUNNING, -1)
    let_go(block)
    return 0


@compiled
def lacks_branches(about, needed):
    """Whether a branch that a call needs is not compiled; `needed` has a bit for each branch."""
    lacks = False
    for index in range(about.num_branches):
        lacks = lacks or (needed >> index & 1 and int_at(about.branches, index) == 0)
    return lacks


def handle(frame, address):
    """Run the kernel that the `about` at `address` describes; returns the address of XLA's error, or 0."""
    about = about_at(address)
    extension = int_at(frame, EXTENSION)
    if extension:
        if int32_at(extension, TYPE) == IS_METADATA:
            set_int(int_at(extension, METADATA), VERSION, about.version)
            set_int(int_at(extension, METADATA), TRAITS, 0)
        return 0
    api, context = int_at(frame, API), int_at(frame, CONTEXT)
    numbers = int_at(int_at(int_at(frame, ATTRIBUTES), 0), VALUES)
    if lacks_branches(about, int_at(numbers, about.num_numbers - 1)):
        return call_at(int_at(api, CREATE_ERROR), about.not_compiled)
    block = allocate(8 * (WORDS + about.words))
    if block == 0:
        return call_at(int_at(api, CREATE_ERROR), about.no_memory)
    record = block + 8 * WORDS
    for word in range(WORDS + about.words):
        set_int(block, word, 0)
    results = len(STATE) + about.num_operands
    for index in range(about.num_operands):
        set_int(record, len(STATE) + index, data_of(int_at(int_at(frame, OPERANDS), index)))
    for index in range(about.num_results):
        set_int(record, results + index, data_of(int_at(int_at(frame, RESULTS), index)))
    for index in range(about.num_numbers):
        set_int(record, results + about.num_results + index, int_at(numbers, index))
    copy(record + 8 * (about.words - about.num_branches), about.branches, 8 * about.num_branches)
    arguments, complete, threads = block + 8 * ARGUMENTS, True, 1
    set_int(arguments, 2, context)
    set_int(arguments, 3, arguments + 64)
    if succeeds(api, NUM_THREADS, arguments, 4):
        threads = int_at(arguments, 8)
    # The last two numbers of a call are `num_threads`, which the caller does not know, and `branches`.
    set_int(record, results + about.num_results + about.num_numbers - 2, threads)
    count = call_at(about.plan, record)
    set_int(record, NUM_PROGRAMS, count)
    set_int(block, WORK, about.work)
    add_to(block + 8 * HOLDERS, 1)
    if count > 0:
        for _ in range(min(threads, count) - 1):
            add_to(block + 8 * HOLDERS, 1)
            set_int(arguments, 2, context)
            set_int(arguments, 3, about.task)
            set_int(arguments, 4, block)
            if not succeeds(api, SCHEDULE, arguments, 5):
                add_to(block + 8 * HOLDERS, -1)
        call_at(about.work, record)
        complete = end(record, count)
        # A pool thread that starts later finds no program, so only running ones are waited for.
        while add_to(block + 8 * RUNNING, 0) > 0:
            let_others_run()
        complete = complete and int_at(record, FAILED) == 0
    let_go(block)
    return 0 if count >= 0 and complete else call_at(int_at(api, CREATE_ERROR), about.no_memory)


@functools.cache
def shared_code() -> tuple[Any, ...]:
    """The compiled code that the handlers of all kernels share."""
    return machine_code("the handler for jax", {handle: "int64(int64, int64)", task: "int64(int64)"})


@functools.cache
def _version(include: str) -> int:
    """The interface's version in the installed headers, as one word of two int32: major and minor."""
    text = Path(include, "xla", "ffi", "api", "c_api.h").read_text()
    major, minor = (int(re.findall(rf"#define XLA_FFI_API_{part} (\d+)", text)[0]) for part in ("MAJOR", "MINOR"))
    return major | minor << 32


_alive: list[Any] = []  # the code and data of handlers, to which XLA keeps pointers as long as the process lives


def _error(message: str, code: int) -> int:
    """The address of the arguments of XLA_FFI_Error_Create: size, no extension, message, code."""
    text = ctypes.create_string_buffer(message.encode())
    arguments = np.array([32, 0, ctypes.addressof(text), code], np.int64)
    _alive.extend((text, arguments))
    return arguments.ctypes.data


@functools.cache  # because every trace of a call requests it
@forking.postponed()
def handler(kernel: Any, include: str) -> Any:
    """A kernel's handler, as a ctypes function."""
    (plan, work), (shared, on_pool) = kernel.compiled, shared_code()
    no_memory = _error(str(kernel.error(-1, "cpu", {})), RESOURCE_EXHAUSTED)
    not_compiled = _error(
        f"{kernel.name} lacks a branch that this call needs: trace the call in this process first", FAILED_PRECONDITION
    )
    fields = kernel.fields
    lengths = map(len, (fields.operands, fields.results, fields.numbers, fields.branches))
    about = np.array(
        [_version(include), fields.size // 8, *lengths, ctypes.addressof(kernel.addresses), plan.address, work.address,
         on_pool.address, no_memory, not_compiled], np.int64,
    )  # fmt: skip
    module = ir.Module()
    stub = ir.Function(module, ir.FunctionType(I64, [I64]), name=f"handle_{kernel.name}")
    builder = ir.IRBuilder(stub.append_basic_block())
    kind = ir.FunctionType(I64, [I64, I64]).as_pointer()
    target = builder.inttoptr(number(shared.address), kind)
    builder.ret(builder.call(target, [stub.args[0], number(about.ctypes.data)]))
    machine = binding.Target.from_default_triple().create_target_machine(jit=True)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(str(module)), machine)
    engine.finalize_object()
    _alive.extend((kernel.addresses, about, engine))
    return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(engine.get_function_address(stub.name))
