"""Launches without a GPU: a Triton kernel is compiled for an NVIDIA architecture, and its PTX is emulated.

Triton itself specialises a launch by its actual arguments. A stand-in for Triton's driver gives the architecture, so
that compiling needs no GPU.
"""

import contextlib
import copy
import ctypes
import dataclasses
import importlib
import itertools
import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from ragged_attention.calls.base import shared_memory_of
from ragged_attention.errors import InvalidInput, TooLarge
from ragged_attention.testing.ptx import machine, memory, parsing
from ragged_attention.testing.ptx.errors import Fault, Report, Rounding, Unknown
from ragged_attention.testing.ptx.machine import Outcome
from ragged_attention.testing.ptx.tensor_maps import TensorMap

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90")
NOBODY_WROTE = 0xFF  # the value of bytes that no kernel has written yet: NaN in every float format, -1 as an integer

Grid = Sequence[int] | Callable[[Mapping[str, Any]], Sequence[int]]


def why_not(arch: str) -> str | None:
    """Why nothing can be emulated for an architecture, or None."""
    if arch in ARCHITECTURES:
        return None
    number = arch.removeprefix("sm_")
    if arch.startswith("sm_") and number.isdecimal() and int(number) >= 100:
        reason = "matrix products of sm_100 and later (tcgen05, tensor memory) are not emulated"
    else:
        reason = "nothing else is emulated"
    return f"expected arch to be one of {', '.join(ARCHITECTURES)}, got {arch!r}: {reason}"


def run(
    kernel: Any,
    grid: Grid,
    /,
    *arguments: Any,
    arch: str = "sm_90",
    schedule: int | None = None,
    unwritten: Sequence[Any] = (),
    strict: bool = True,
    **named: Any,
) -> Outcome:
    """Run `kernel[grid](*arguments, **named)` without a GPU: compile it for `arch`, and execute the PTX on the CPU.

    Args:
        kernel: a function under `@triton.jit`, in a file, from which Triton reads its source. For an autotuned kernel
            pass the function that it wraps, `kernel.fn`.
        grid: the number of programs in one to three dimensions, or a function from the arguments to it, as in Triton.
        arguments, named: the kernel's arguments by position or name, and Triton's options, such as `num_warps`,
            `num_stages` and `maxnreg`. Arrays are NumPy arrays or torch tensors on the CPU, of any shape, strides and
            dtype that Triton knows; views of larger arrays are allowed. The kernel writes them in place. Numbers,
            tuples, `tl.constexpr` values and `TensorDescriptor` are passed as on a GPU.
        arch: one of `ARCHITECTURES`.
        schedule: None runs the warps in turn; a number is the seed of a random order.
        unwritten: the arrays whose contents the kernel must not read before it writes them. Their contents are lost.
        strict: whether reports raise `Hazard`, except those of the kind `Rounding`. If not, they are only in the
            outcome.

    Returns:
        The `Outcome`: reports, the number of instructions, and the opcodes that ran.

    Raises:
        Hazard: the run ended, but something was reported; `Race` and `Uninitialised` are its subclasses.
        Fault: the run could not continue; `OutOfBounds`, `Misaligned`, `Deadlock` and `Diverged` are its subclasses.
        Unknown: the PTX has an instruction that the emulator does not know.
        ragged_attention.InvalidInput (a ValueError): another architecture, arrays that are not on the CPU, or arrays
            that share memory and are not views of one array. Its subclass `TooLarge`: the kernel needs more shared
            memory than the architecture has.
        TypeError: `kernel` is not a kernel that Triton compiles, or the arguments are not those of the kernel.
    """
    emulator = Emulator(arch, schedule=schedule)
    _expect_jitted(kernel)
    _forget(emulator, unwritten, (*arguments, *named.values()))
    return _judged(kernel.__name__, emulator.run(kernel, grid, *arguments, **named), strict)


def compile(kernel: Any, grid: Grid, /, *arguments: Any, arch: str = "sm_90", **named: Any) -> str:
    """The PTX that `run` with these arguments would execute. Line numbers in reports and faults refer to it."""
    _expect_arch(arch)
    _expect_jitted(kernel)
    bound = Bound.of(kernel, arguments, named)
    return compile_for(arch, kernel, bound.grid(grid), bound).text


def run_text(
    text: str,
    grid: Sequence[int],
    /,
    *arguments: Any,
    entry: str = "",
    threads: int = 0,
    shared: int = 0,
    arch: str = "sm_90",
    schedule: int | None = None,
    unwritten: Sequence[Any] = (),
    strict: bool = True,
) -> Outcome:
    """Run a kernel of a PTX text, such as `nvcc --ptx` writes, on the CPU.

    Args:
        text: a PTX module.
        grid: the number of CTAs (blocks) in one to three dimensions.
        arguments: one for each parameter of the kernel: an array for a pointer, a number, or the bytes of a struct.
        entry: the name of the kernel as it is in the PTX; by default the first.
        threads: the number of threads in a CTA, which has one dimension: a multiple of 32. By default the number that
            the PTX requires (`.reqntid`).
        shared: the number of bytes of dynamic shared memory in a CTA.
        arch: the architecture that limits shared memory; the text is not compiled for it.
        schedule, unwritten, strict: as for `run`.

    Returns and raises what `run` does.
    """
    emulator = Emulator(arch, schedule=schedule)
    _forget(emulator, unwritten, arguments)
    program = parsing.parse(text, entry)
    return _judged(program.name, emulator.run_text(program, grid, arguments, threads, shared), strict)


def _forget(emulator: "Emulator", unwritten: Sequence[Any], arguments: Sequence[Any]) -> None:
    every = [part for one in arguments for part in (one if isinstance(one, tuple) else (one,))]
    for array in unwritten:
        if not any(array is one for one in every):
            raise InvalidInput(f"expected unwritten to hold arrays that are arguments, got {array!r}")
        emulator.forget(array)


def _judged(name: str, outcome: Outcome, strict: bool) -> Outcome:
    if strict:
        expect_none(name, [report for report in outcome.reports.values() if report.kind is not Rounding])
    return outcome


def expect_none(name: str, reports: Sequence[Report]) -> None:
    """Raise `Hazard`, in the class of the first report, if there are reports of the kernel with this name."""
    if reports:
        lines = "\n".join(f"    {report}" for report in reports)
        raise reports[0].kind(f"expected nothing to report of {name}, got\n{lines}", reports)


class Emulator:
    """Compiles launches for one architecture and runs them. It remembers which bytes were written by earlier launches.

    It never raises `Hazard`: its reports are in the outcomes of the launches.
    """

    def __init__(
        self,
        arch: str,
        *,
        schedule: int | None = None,
        lanes: int = 2048,
        change: Callable[[str, str], str] | None = None,
    ) -> None:
        """Create an emulator of an architecture.

        `lanes` is the number of threads that run side by side, and `change(name, ptx)` returns the PTX to run in place
        of a kernel's; `schedule` is as for `run`.
        """
        _expect_arch(arch)
        self.arch, self.schedule, self.lanes, self.change = arch, schedule, lanes, change
        self.launches: Counter[str] = Counter()  # the number of launches, by the kernel's module and name
        # For allocations with unwritten bytes, by address: which bytes were written.
        self._written: dict[int, NDArray[np.bool_]] = {}

    def forget(self, array: Any) -> None:
        """Mark the elements of an array as unwritten, and overwrite them with `NOBODY_WROTE`."""
        operand = Operand.of(array)
        if operand.size:
            elements = np.zeros(operand.size, bool)
            operand.mark(elements)
            operand.bytes()[elements] = NOBODY_WROTE
            self._written[operand.base] = self._written.get(operand.base, True) & ~elements
            weakref.finalize(operand.owner, self._written.pop, operand.base, None)

    def run(self, kernel: Any, grid: Grid, /, *arguments: Any, **named: Any) -> Outcome:
        """Run a kernel with arguments by position or name, and with Triton's options; see the function `run`."""
        _expect_jitted(kernel)
        bound = Bound.of(kernel, arguments, named)
        grid = bound.grid(grid)
        compiled = compile_for(self.arch, kernel, grid, bound)
        text = compiled.text if self.change is None else self.change(compiled.name, compiled.text)
        program = parsing.parse(text)
        values = list(compiled.values(bound.all))
        operands = ((name, value.operand if isinstance(value, Tiles) else value) for name, value in values)
        space, addresses = self.mapped([(name, value) for name, value in operands if isinstance(value, Operand)])
        flat = [value.within(addresses) if isinstance(value, Operand | Tiles) else value for _, value in values]
        flat += self._for_triton(space, math.prod(grid) * compiled.scratch)[: len(program.params) - len(flat)]
        numbers = {name: number(kind, value) for (name, kind), value in zip(program.params, flat, strict=True)}
        outcome = self._launch(program, space, numbers, grid, compiled.threads, compiled.shared)
        self.launches[f"{kernel.__module__}.{kernel.__name__}"] += 1
        return outcome

    def run_text(
        self, program: parsing.Kernel, grid: Sequence[int], arguments: Sequence[Any], threads: int, shared: int
    ) -> Outcome:
        """Run a kernel that was read from a text; see the function `run_text`."""
        if len(arguments) != len(program.params):
            raise TypeError(f"expected {len(program.params)} arguments of {program.name}, got {len(arguments)}")
        values = [_as_operand(value) for value in arguments]
        for (name, kind), value in zip(program.params, values, strict=True):
            _expect_kind(name, kind, value)
        pairs = list(zip((name for name, _ in program.params), values, strict=True))
        space, addresses = self.mapped([(name, value) for name, value in pairs if isinstance(value, Operand)])
        flat = [value.within(addresses) if isinstance(value, Operand) else value for value in values]
        numbers = {name: number(kind, value) for (name, kind), value in zip(program.params, flat, strict=True)}
        return self._launch(program, space, numbers, grid, threads, shared)

    def _launch(
        self,
        program: parsing.Kernel,
        space: memory.Memory,
        numbers: Mapping[str, Any],
        grid: Sequence[int],
        threads: int,
        shared: int,
    ) -> Outcome:
        """Run a kernel over memory that is not sealed yet, and copy its results to the arrays."""
        if (needed := program.shared + shared) > (most := shared_memory_of(self.arch)):
            raise TooLarge(
                f"expected {program.name} to need at most {most} bytes of shared memory on {self.arch}, got {needed}"
            )
        space.add_variables(program.variables)
        space.seal()
        try:
            outcome = machine.launch(
                program, space, numbers, tuple(grid), program.threads or threads, shared, lanes=self.lanes,
                seed=self.schedule,
            )  # fmt: skip
        except (Fault, Unknown) as error:
            error.add_note(f"in {program.name} on {self.arch}")
            raise
        space.back()
        return outcome

    @staticmethod
    def _for_triton(space: memory.Memory, size: int) -> list[int]:
        """The addresses of Triton's own two buffers: `size` bytes for tensor maps, and none (0) for a profiler."""
        if not size:
            return [0, 0]
        return [space.add(np.zeros(size, np.uint8), "Triton's global scratch", None, np.zeros(size, bool)), 0]

    def mapped(self, operands: Sequence[tuple[str, "Operand"]]) -> tuple[memory.Memory, dict[int, int]]:
        """Memory, not yet sealed, that holds the operands' allocations, and the address of each operand by its id.

        Operands that share an allocation also share it in this memory. A kernel may touch the elements of all operands.
        """
        space, addresses = memory.Memory(), {}
        groups: dict[int, list[tuple[str, Operand]]] = {}
        for name, operand in operands:
            groups.setdefault(operand.base if operand.size else id(operand), []).append((name, operand))
        _expect_apart([group[0] for _, group in sorted(groups.items()) if group[0][1].size])
        for base, group in groups.items():
            first = group[0][1]
            allowed = np.zeros(first.size, bool)
            for _, operand in group:
                operand.mark(allowed)
            names, written = "/".join(name for name, _ in group), self._written.get(base)
            start = space.add(first.bytes(), names, None if allowed.all() else allowed, written)
            addresses |= {id(operand): start + operand.offset for _, operand in group}
        return space, addresses


@dataclasses.dataclass(frozen=True, eq=False)
class Operand:
    """An array as it is passed to a kernel; Triton treats it as a tensor."""

    owner: Any  # keeps the memory alive
    dtype: str  # the dtype's name
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes
    itemsize: int
    base: int  # the address of the allocation
    size: int  # bytes of the allocation
    offset: int  # byte offset of the first element in the allocation

    @classmethod
    def of(cls, array: Any) -> "Operand":
        """The operand of a NumPy array, a torch tensor on the CPU (both may be views) or a tensor descriptor."""
        if _is_descriptor(array):
            array = array.base
        name = str(array.dtype).rpartition(".")[2]
        if isinstance(array, np.ndarray):
            whole = array
            while isinstance(whole.base, np.ndarray):
                whole = whole.base
            low, high = np.lib.array_utils.byte_bounds(whole)
            offset = array.ctypes.data - low
            return cls(array, name, array.shape, array.strides, array.itemsize, low, high - low, offset)
        if not hasattr(array, "untyped_storage"):
            raise TypeError(f"expected NumPy arrays or torch tensors, got {type(array).__name__}")
        if array.device.type != "cpu":
            raise InvalidInput(f"expected arrays on the CPU, got one on {array.device}")
        storage, size = array.untyped_storage(), array.element_size()
        strides = tuple(size * step for step in array.stride())
        start, offset = storage.data_ptr(), size * array.storage_offset()
        return cls(array, name, tuple(array.shape), strides, size, start, storage.nbytes(), offset)

    def data_ptr(self) -> int:
        return self.base + self.offset

    def within(self, addresses: Mapping[int, int]) -> int:
        """The operand's address in the memory that the kernel sees."""
        return addresses[id(self)]

    def bytes(self) -> NDArray[np.uint8]:
        """All of the allocation."""
        if not self.size:
            return np.zeros(0, np.uint8)
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.size).from_address(self.base))

    def mark(self, marks: NDArray[np.bool_]) -> None:
        """Set the marks of the array's own bytes; `marks` [size] has one for each byte of the allocation."""
        if math.prod(self.shape):
            as_strided(marks[self.offset :], (*self.shape, self.itemsize), (*self.strides, 1))[...] = True


@dataclasses.dataclass(frozen=True, eq=False)
class Tiles:
    """An operand that is passed to the kernel as a tensor map; `map` does not have its address yet."""

    operand: Operand
    map: TensorMap

    @classmethod
    def of(cls, descriptor: Any, required: Mapping[str, Any]) -> "Tiles":
        """The map that Triton's launcher would make of a descriptor, as the compiled kernel requires it."""
        if required["fp4_padded"] or required.get("is_im2col") or descriptor.round_f32_to_tf32:
            raise Unknown("a tensor descriptor of 4-bit elements, for convolutions or that rounds to tf32")
        width = required["elem_size"]
        tensor_map = TensorMap(
            address=0,
            dims=tuple(map(int, reversed(descriptor.shape))),
            strides=tuple(int(stride) * width for stride in reversed(descriptor.strides[:-1])),
            box=tuple(reversed(required["block_size"])),
            elemtype=required["elem_type"],
            swizzle=required["swizzle"],
            nan=descriptor.padding == "nan",
        )
        return cls(descriptor.base, tensor_map)

    def within(self, addresses: Mapping[int, int]) -> NDArray[np.uint8]:
        """The map's bytes."""
        return dataclasses.replace(self.map, address=addresses[id(self.operand)]).pack()


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A kernel as Triton compiled it for a launch."""

    name: str
    text: str  # PTX
    shared: int  # bytes of shared memory per CTA
    threads: int  # threads per CTA, used if the PTX does not specify them
    signature: Mapping[str, Any]  # parameter types by name, "constexpr" for values that are compiled in
    maps: Sequence[Mapping[str, Any]]  # the properties of each tensor map; empty if the architecture has no TMA
    scratch: int  # bytes of global scratch memory per program

    def values(self, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """The arguments of the PTX in order, each with the name of the Triton parameter that it comes from."""
        maps = iter(self.maps)

        def parts(name: str, kind: Any, value: Any) -> Iterator[tuple[str, Any]]:
            if isinstance(kind, tuple):
                for one, part in zip(kind, value, strict=True):
                    yield from parts(name, one, part)
            elif kind.startswith("tensordesc"):
                sizes = (*value.shape, *value.strides)
                tensor = (value.base, *sizes, value.padding == "nan", value.round_f32_to_tf32)
                yield from ((name, one) for one in ((Tiles.of(value, next(maps)),) if self.maps else tensor))
                yield from ((name, size) for size in sizes)
            elif kind != "constexpr":
                yield name, value

        for name, kind in self.signature.items():
            yield from parts(name, kind, arguments[name])


class _Driver:
    """A stand-in for Triton's driver: it has a device of one architecture, on which nothing can be launched."""

    def __init__(self, arch: str) -> None:
        self.arch = arch

    def get_current_target(self) -> Any:
        return importlib.import_module("triton.backends.compiler").GPUTarget("cuda", int(self.arch[3:]), 32)

    def get_current_device(self) -> Any:
        return f"emulated {self.arch}"  # the key of kernel caches; not a number, which a real device may have

    def get_current_stream(self, device: Any) -> int:
        return 0


_one_at_a_time = threading.RLock()  # Triton has one global driver


@contextlib.contextmanager
def _driving(arch: str) -> Iterator[None]:
    config = importlib.import_module("triton.runtime.driver").driver
    with _one_at_a_time:
        before = config._active
        config.set_active(_Driver(arch))
        try:
            yield
        finally:
            config._active = before


def _as_operand(value: Any) -> Any:
    """An argument as it is passed to Triton: arrays, also those in tuples, become operands."""
    if isinstance(value, tuple):
        parts = [_as_operand(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if _is_descriptor(value):
        descriptor = copy.copy(value)
        descriptor.base = Operand.of(value.base)
        return descriptor
    if isinstance(value, np.generic) or not (hasattr(value, "shape") and hasattr(value, "dtype")):
        return value
    return Operand.of(value)


def _is_descriptor(value: Any) -> bool:
    """Whether a value is a Triton tensor descriptor. Its class is recognised by name, as modules differ."""
    return type(value).__name__ == "TensorDescriptor" and hasattr(value, "block_shape")


def _expect_apart(operands: Sequence[tuple[str, Operand]]) -> None:
    """Raise InvalidInput if allocations, sorted by address, overlap, because each is mapped separately."""
    for (name, first), (other, second) in itertools.pairwise(operands):
        if first.base + first.size > second.base:
            raise InvalidInput(f"expected arrays that share memory to be views of one, got {name} and {other}")


def _expect_arch(arch: str) -> None:
    if reason := why_not(arch):
        raise InvalidInput(reason)


def _expect_jitted(kernel: Any) -> None:
    jitted = importlib.import_module("triton").JITFunction
    if not isinstance(kernel, jitted):
        interpreted = type(kernel).__name__ == "InterpretedFunction"
        hint = "unset TRITON_INTERPRET before triton is imported" if interpreted else "give the function that it wraps"
        raise TypeError(f"expected a kernel of triton.jit that Triton compiles, got {type(kernel).__name__}: {hint}")


@dataclasses.dataclass(frozen=True)
class Bound:
    """The arguments and options of a launch, with arrays as operands; `all` has them by name, with defaults."""

    positional: Sequence[Any]
    named: Mapping[str, Any]
    all: Mapping[str, Any]

    @classmethod
    def of(cls, kernel: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> "Bound":
        """Bind arguments to the parameters of a kernel, as Python binds those of a function."""
        names = [parameter.name for parameter in kernel.params]
        if len(arguments) > len(names):
            raise TypeError(f"expected at most {len(names)} arguments of {kernel.__name__}, got {len(arguments)}")
        if twice := [name for name in names[: len(arguments)] if name in named]:
            raise TypeError(f"expected each argument of {kernel.__name__} once, got {', '.join(twice)} twice")
        positional, by_name = [*map(_as_operand, arguments)], {name: _as_operand(one) for name, one in named.items()}
        defaults = {parameter.name: parameter.default for parameter in kernel.params if parameter.has_default}
        return cls(positional, by_name, defaults | dict(zip(names, positional, strict=False)) | by_name)

    def grid(self, grid: Grid) -> Sequence[int]:
        """The number of programs in each dimension, which may depend on the arguments."""
        return grid(self.all) if callable(grid) else grid


def _expect_kind(name: str, kind: str, value: Any) -> None:
    """Raise if a value cannot be a parameter of a PTX type."""
    size = parsing.size_of(kind)
    if "[" in kind:
        fits, expected = isinstance(value, bytes) and len(value) == size, f"{size} bytes"
    elif isinstance(value, Operand):
        fits, expected = size == 8 and kind[0] != "f", "a number"
    else:
        wanted = (int, np.integer, float, np.floating) if kind[0] in "fb" else (int, np.integer)
        fits, expected = (
            isinstance(value, wanted),
            "an array or an integer" if size == 8 else f"a number of type {kind}",
        )
    if not fits:
        got = f"an array of {value.dtype}" if isinstance(value, Operand) else repr(value)
        raise TypeError(f"expected {expected} for the parameter {name}, got {got}")


def compile_for(arch: str, kernel: Any, grid: Sequence[int], bound: Bound) -> Compiled:
    """The kernel as Triton compiles it for a launch with these arguments and options."""
    with _driving(arch):
        compiled = kernel.warmup(*bound.positional, grid=tuple(grid), **bound.named)
    facts = compiled.metadata
    if getattr(facts, "profile_scratch_size", 0):
        raise Unknown("a kernel that is compiled for a profiler")
    if facts.num_ctas != 1:
        raise Unknown(f"clusters of {facts.num_ctas} CTAs (num_ctas)")
    return Compiled(
        name=compiled.name,
        text=compiled.asm["ptx"],
        shared=facts.shared,
        threads=32 * facts.num_warps,
        signature=compiled.src.signature,
        maps=getattr(facts, "tensordesc_meta", None) or (),
        scratch=getattr(facts, "global_scratch_size", 0),
    )


def number(kind: str, value: Any) -> NDArray[Any]:
    """A parameter of a PTX type such as u64 or f32, as an array without axes; the type b8[n] stays n bytes."""
    if "[" in kind:
        return np.frombuffer(value, np.uint8)
    size = int(kind[1:]) // 8
    if kind[0] == "f" or isinstance(value, float | np.floating):
        return np.array(value, f"f{size}")
    return np.array(int(value) & ((1 << 8 * size) - 1), f"u{size}")
