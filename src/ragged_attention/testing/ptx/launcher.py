"""Launches of Triton kernels without a GPU: each is compiled for an NVIDIA architecture, and its PTX is emulated.

Triton itself decides what a launch is specialised for, by the very arguments. A stand-in for its driver names the
architecture; compiling needs no GPU.
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
from ragged_attention.testing.ptx.tensor_maps import TensorMap

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90")
NOBODY_WROTE = 0xFF  # in each byte of what no kernel wrote yet: a NaN as a float of any format, -1 as an integer

Grid = Sequence[int] | Callable[[Mapping[str, Any]], Sequence[int]]


class Hazard(AssertionError):
    """A compiled kernel does what is not right, or right only in some order of its threads."""


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
    arguments: Mapping[str, Any],
    *,
    arch: str = "sm_90",
    num_warps: int = 4,
    num_stages: int = 2,
    seed: int | None = None,
    unwritten: Sequence[str] = (),
    strict: bool = True,
) -> machine.Outcome:
    """Run a `@triton.jit` kernel as it is compiled for `arch`, on torch CPU tensors or NumPy arrays, in place.

    `arguments` are the kernel's by name, constants included; a tensor may stand in one of Triton's `TensorDescriptor`.
    `grid` is as Triton takes it, in programs. The contents of the arrays named in `unwritten` are forgotten first, so
    that reading what the kernel has not written shows. Warps run in turn, or in an order that `seed` draws. Raises
    `Hazard` with what was found, and `machine.Fault` for what cannot go on; without `strict` what was found is only in
    the outcome's `reports`.
    """
    emulator = Emulator(arch, seed=seed)
    for name in unwritten:
        emulator.forget(arguments[name])
    outcome = emulator.run(kernel, grid, arguments, num_warps=num_warps, num_stages=num_stages)
    if strict:
        expect_none(kernel.__name__, outcome)
    return outcome


def expect_none(name: str, outcome: machine.Outcome) -> None:
    """Raise `Hazard` if anything was reported of the kernel of this name."""
    if outcome.reports:
        lines = [
            f"PTX line {report.line} ({report.source}): {report.text}, {report.count} times"
            for report in outcome.reports.values()
        ]
        raise Hazard(f"expected nothing to report of {name}, got\n" + "\n".join(f"    {line}" for line in lines))


class Emulator:
    """Compiles launches for one architecture and runs them; knows across launches which bytes were written."""

    def __init__(
        self,
        arch: str,
        *,
        seed: int | None = None,
        lanes: int = 2048,
        change: Callable[[str, str], str] | None = None,
    ) -> None:
        """`lanes`: how many threads run side by side. `change(name, ptx)`: the PTX to run in place of a kernel's."""
        if reason := why_not(arch):
            raise InvalidInput(reason)
        self.arch, self.seed, self.lanes, self.change = arch, seed, lanes, change
        self.launches: Counter[str] = Counter()  # by the full names of kernels
        self._written: dict[int, NDArray[np.bool_]] = {}  # by where memory begins, of which not all holds something

    def forget(self, array: Any) -> None:
        """From now on nobody has written the elements of an array."""
        found = Operand.of(array)
        if found.size:
            elements = np.zeros(found.size, bool)
            found.mark(elements)
            found.bytes()[elements] = NOBODY_WROTE
            self._written[found.base] = self._written.get(found.base, True) & ~elements
            weakref.finalize(found.owner, self._written.pop, found.base, None)

    def run(
        self, kernel: Any, grid: Grid, arguments: Mapping[str, Any], *, num_warps: int = 4, num_stages: int = 2
    ) -> machine.Outcome:
        """Run a kernel; see the function `run`."""
        _expect_jitted(kernel)
        given = {parameter.name: parameter.default for parameter in kernel.params if parameter.has_default}
        given |= {name: _as_operand(value) for name, value in arguments.items()}
        grid = grid(given) if callable(grid) else grid
        compiled = compile_for(self.arch, kernel, grid, given, num_warps, num_stages)
        if compiled.shared > shared_memory_of(self.arch):
            raise TooLarge(
                f"expected {compiled.name} to need at most {shared_memory_of(self.arch)} bytes of shared memory on "
                f"{self.arch}, got {compiled.shared}"
            )
        text = compiled.text if self.change is None else self.change(compiled.name, compiled.text)
        program = parsing.parse(text)
        values = list(compiled.values(given))
        operands = ((name, value.operand if isinstance(value, Tiles) else value) for name, value in values)
        space, addresses = self.mapped([(name, value) for name, value in operands if isinstance(value, Operand)])
        flat = [value.within(addresses) if isinstance(value, Operand | Tiles) else value for _, value in values]
        flat += self._for_triton(space, math.prod(grid) * compiled.scratch)[: len(program.params) - len(flat)]
        numbers = {name: number(kind, value) for (name, kind), value in zip(program.params, flat, strict=True)}
        threads = program.threads or 32 * num_warps
        space.add_variables(program.variables)
        space.seal()
        try:
            outcome = machine.launch(
                program, space, numbers, tuple(grid), threads, compiled.shared, lanes=self.lanes, seed=self.seed
            )
        except (machine.Fault, machine.Unknown) as error:
            error.add_note(f"in {compiled.name} as it is compiled for {self.arch}")
            raise
        space.back()
        self.launches[f"{kernel.__module__}.{kernel.__name__}"] += 1
        return outcome

    @staticmethod
    def _for_triton(space: memory.Memory, size: int) -> list[int]:
        """The addresses of memory for Triton's own purposes: of tensor maps, and of a profiler, which asks for none."""
        if not size:
            return [0, 0]
        return [space.add(np.zeros(size, np.uint8), "Triton's global scratch", None, np.zeros(size, bool)), 0]

    def mapped(self, operands: Sequence[tuple[str, "Operand"]]) -> tuple[memory.Memory, dict[int, int]]:
        """Memory, to be sealed, that holds the operands' allocations, and the address of each operand by its id.

        Operands that share an allocation share it there; what may be touched are the elements of any of them.
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
    """An array as a kernel is given it; Triton takes it for a tensor."""

    owner: Any  # keeps the memory
    dtype: str  # its name
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    itemsize: int
    base: int  # the address of the allocation
    size: int  # bytes of the allocation
    offset: int  # bytes from there to the first element

    @classmethod
    def of(cls, array: Any) -> "Operand":
        """A torch tensor on the CPU or a NumPy array, which may be a view of a larger one, or a descriptor's."""
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
        if array.device.type != "cpu":
            raise InvalidInput(f"expected arrays on the CPU, got one on {array.device}")
        storage, size = array.untyped_storage(), array.element_size()
        strides = tuple(size * step for step in array.stride())
        start, offset = storage.data_ptr(), size * array.storage_offset()
        return cls(array, name, tuple(array.shape), strides, size, start, storage.nbytes(), offset)

    def data_ptr(self) -> int:
        return self.base + self.offset

    def within(self, addresses: Mapping[int, int]) -> int:
        """Where the kernel finds it."""
        return addresses[id(self)]

    def bytes(self) -> NDArray[np.uint8]:
        """All of the allocation."""
        if not self.size:
            return np.zeros(0, np.uint8)
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.size).from_address(self.base))

    def mark(self, marks: NDArray[np.bool_]) -> None:
        """Set what belongs to the array of marks [size], one for each byte of the allocation."""
        if math.prod(self.shape):
            as_strided(marks[self.offset :], (*self.shape, self.itemsize), (*self.strides, 1))[...] = True


@dataclasses.dataclass(frozen=True, eq=False)
class Tiles:
    """An operand that the kernel is given as a tensor map, which lacks its address."""

    operand: Operand
    map: TensorMap

    @classmethod
    def of(cls, descriptor: Any, asked: Mapping[str, Any]) -> "Tiles":
        """The map that Triton's launcher would make of a descriptor, as the compiled kernel asks for it."""
        if asked["fp4_padded"] or asked.get("is_im2col") or descriptor.round_f32_to_tf32:
            raise machine.Unknown("a tensor descriptor of 4-bit elements, for convolutions or that rounds to tf32")
        width = asked["elem_size"]
        found = TensorMap(
            address=0,
            dims=tuple(map(int, reversed(descriptor.shape))),
            strides=tuple(int(stride) * width for stride in reversed(descriptor.strides[:-1])),
            box=tuple(reversed(asked["block_size"])),
            elemtype=asked["elem_type"],
            swizzle=asked["swizzle"],
            nan=descriptor.padding == "nan",
        )
        return cls(descriptor.base, found)

    def within(self, addresses: Mapping[int, int]) -> NDArray[np.uint8]:
        """The map's bytes."""
        return dataclasses.replace(self.map, address=addresses[id(self.operand)]).pack()


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A kernel as Triton compiled it for a launch."""

    name: str
    text: str  # PTX
    shared: int  # bytes of a CTA
    signature: Mapping[str, Any]  # types by the names of parameters, "constexpr" where the value is compiled in
    maps: Sequence[Mapping[str, Any]]  # what each tensor map has to be, none where there are no such instructions
    scratch: int  # bytes of global memory that a program needs for itself

    def values(self, given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """What the PTX takes, in order, with the name of the parameter that it is or is a part of."""
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
            yield from parts(name, kind, given[name])


class _Driver:
    """In place of Triton's driver: there is a device of an architecture, which nothing can be launched on."""

    def __init__(self, arch: str) -> None:
        self.arch = arch

    def get_current_target(self) -> Any:
        return importlib.import_module("triton.backends.compiler").GPUTarget("cuda", int(self.arch[3:]), 32)

    def get_current_device(self) -> Any:
        return f"emulated {self.arch}"  # what kernels are kept by: no number, which may be that of a real one

    def get_current_stream(self, device: Any) -> int:
        return 0


_one_at_a_time = threading.RLock()  # Triton has one driver


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
    """An argument as Triton is given it: an array as an operand, also in a tuple."""
    if isinstance(value, tuple):
        parts = [_as_operand(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if _is_descriptor(value):
        held = copy.copy(value)
        held.base = Operand.of(value.base)
        return held
    return Operand.of(value) if hasattr(value, "shape") and hasattr(value, "dtype") else value


def _is_descriptor(value: Any) -> bool:
    """Whether it is one of Triton's, told by its name, for not every Triton has them in the same place."""
    return type(value).__name__ == "TensorDescriptor" and hasattr(value, "block_shape")


def _expect_apart(operands: Sequence[tuple[str, Operand]]) -> None:
    """Raise if allocations, in the order of their addresses, overlap: each of them is mapped by itself."""
    for (name, first), (other, second) in itertools.pairwise(operands):
        if first.base + first.size > second.base:
            raise InvalidInput(f"expected arrays that share memory to be views of one, got {name} and {other}")


def _expect_jitted(kernel: Any) -> None:
    jitted = importlib.import_module("triton").JITFunction
    if not isinstance(kernel, jitted):
        interpreted = type(kernel).__name__ == "InterpretedFunction"
        hint = "unset TRITON_INTERPRET before triton is imported" if interpreted else "give the function that it wraps"
        raise TypeError(f"expected a kernel of triton.jit that Triton compiles, got {type(kernel).__name__}: {hint}")


def compile_for(
    arch: str, kernel: Any, grid: Sequence[int], given: Mapping[str, Any], num_warps: int, num_stages: int
) -> Compiled:
    """The kernel as a launch with these arguments would have it compiled."""
    options = {"num_warps": num_warps, "num_stages": num_stages}  # which a kernel may take as parameters, too
    with _driving(arch):
        compiled = kernel.warmup(grid=tuple(grid), **{**options, **given})
    facts = compiled.metadata
    if getattr(facts, "profile_scratch_size", 0):
        raise machine.Unknown("a kernel that is compiled for a profiler")
    return Compiled(
        name=compiled.name,
        text=compiled.asm["ptx"],
        shared=facts.shared,
        signature=compiled.src.signature,
        maps=getattr(facts, "tensordesc_meta", None) or (),
        scratch=getattr(facts, "global_scratch_size", 0),
    )


def number(kind: str, value: Any) -> NDArray[Any]:
    """A parameter of a PTX type such as u64 or f32, as an array without axes; one of several bytes as they are."""
    if "[" in kind:
        return value
    size = int(kind[1:]) // 8
    if kind[0] == "f" or isinstance(value, float):
        return np.array(value, f"f{size}")
    return np.array(int(value) & ((1 << 8 * size) - 1), f"u{size}")
