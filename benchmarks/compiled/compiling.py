"""Triton kernels compiled for GPUs that are not here, and what the result says about them.

A room's `run` is given a launcher that records what would be launched. Each recorded launch is then compiled as the
real launcher's call would be specialised, for any architecture, and read: which matrix instructions, how many
registers, spills, how much shared memory; on NVIDIA also what its inner loops load and by how much at a time.
"""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import importlib
import math
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.compiled import fences, sass, sources
from ragged_attention import dispatch
from ragged_attention.calls import Call, dtype_name
from ragged_attention.calls.base import shared_memory_of
from ragged_attention.tools.samples import MULTIPROCESSORS, FakeArray, ShapeLauncher

ARCHITECTURES = tuple(MULTIPROCESSORS)
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}

POINTERS = {
    "float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16", "int8": "*i8", "uint8": "*u8",
    "bool": "*u8", "int32": "*i32",
    "int64": "*i64", "float8_e4m3fn": "*fp8e4nv",  # as others pass it; ours comes as uint8
}  # fmt: skip

NVIDIA_COUNTS = {
    "wgmma": r"wgmma\.mma_async",
    "tcgen05": r"tcgen05\.mma",
    "mma": r"mma\.sync",
    "cp.async": r"cp\.async\.c[ag]",
    "tma": r"cp\.async\.bulk\.tensor",
}
AMD_COUNTS = {"mfma": r"v_mfma_", "direct-to-lds": r"(?:buffer|global)_load_\S*lds|lds\s*$"}


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel launch: its operands in order, the rest of its arguments by name, its options."""

    kernel: Any
    operands: tuple[Any, ...]
    arguments: Mapping[str, Any]
    num_warps: int
    num_stages: int
    grid: tuple[int, ...] = ()
    launch_pdl: bool = False  # whether it may begin before the launch before it has ended, which is no matter of code

    @property
    def name(self) -> str:
        return self.kernel.__name__

    @property
    def programs(self) -> int:
        return math.prod(self.grid)


class Recorder(ShapeLauncher):
    """A launcher that launches nothing and remembers everything."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def __call__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        inputs: Sequence[Any],
        outputs: Sequence[tuple[Sequence[int], Any]],
        *,
        inplace: Sequence[int] = (),
        num_warps: int = 4,
        num_stages: int = 2,
        launch_pdl: bool = False,
        **arguments: Any,
    ) -> list[Any]:
        new = self.results(inputs, outputs, inplace)
        if 0 not in grid:
            operands = tuple(map(self.bits, (*inputs, *new)))
            self.launches.append(Launch(kernel, operands, arguments, num_warps, num_stages, grid, launch_pdl))
        return new

    def sorted(self, numbers: Any) -> tuple[Any, Any]:
        return numbers, FakeArray(numbers.shape, "int32")

    def bits(self, array: Any) -> Any:
        """8-bit floats reach a kernel as uint8, whichever the front end."""
        return FakeArray(array.shape, "uint8") if dtype_name(array).startswith("float8") else array

    def on_host(self, function: Any, call: Any, outputs: Any, **extra: Any) -> Any:
        raise TypeError(f"expected only kernel launches, got the host function {function.__name__}")


def tile_of(case: Any, call: Call) -> Any:
    """The Triton room's tile for a case's call."""
    module: Any = dispatch.load(call.OPERATION, "triton")
    return module.invariant_tile(call) if case.batch_invariant and call.ATTENDS else module.heuristic(call)


def record(call: Call, tile: Any = None) -> list[Launch]:
    """What the Triton room launches for `call`, at the tile of its heuristic where none is given."""
    module = dispatch.load(call.OPERATION, "triton")
    recorder = Recorder()
    module.run(call, module.heuristic(call) if tile is None else tile, recorder)
    return recorder.launches


def _scalar(value: Any) -> tuple[str, list[Any]]:
    """A number's type and attributes, as Triton specialises it."""
    if isinstance(value, bool):
        return "u1", []
    if isinstance(value, float):
        return "fp32", []
    return "i32" if -(2**31) <= value < 2**31 else "i64", [["tt.divisibility", 16]] if value % 16 == 0 else []


def _operand(array: Any, amd: bool) -> tuple[str, list[Any]]:
    """A pointer's type and attributes: aligned as allocators align, and small ones marked so on AMD."""
    attributes: list[Any] = [["tt.divisibility", 16]]
    size = ITEMSIZE.get(dtype_name(array), 8) * math.prod(array.shape)
    if amd and size <= 2**31 - 1:
        attributes.append(["tt.pointer_range", 32])
    return POINTERS[dtype_name(array)], attributes


def specialise(launch: Launch, amd: bool) -> tuple[dict[str, Any], dict[Any, Any], dict[Any, Any]]:
    """Signature, constants and attributes of the launch: what a compiler wants in place of values."""
    params = launch.kernel.params
    values = {param.name: param.default for param in params if param.has_default}
    values |= dict(zip((param.name for param in params), launch.operands, strict=False)) | dict(launch.arguments)
    constants: dict[Any, Any] = {}
    attributes: dict[Any, Any] = {}

    def type_of(value: Any, param: Any, path: tuple[int, ...]) -> Any:
        if isinstance(value, tuple) and not param.is_constexpr:
            types = [type_of(one, param, (*path, index)) for index, one in enumerate(value)]
            return type(value)(*types) if hasattr(value, "_fields") else tuple(types)
        if hasattr(value, "shape"):
            found, said = _operand(value, amd)
        elif (
            param.is_constexpr
            or value is None
            or (value == 1 and type(value) is int and not (param.do_not_specialize or param.annotation_type))
        ):
            constants[path] = value
            return "constexpr"
        else:
            found, said = _scalar(value)
            found = param.annotation_type or found
            said = [] if param.do_not_specialize or param.do_not_specialize_on_alignment else said
        if said:
            attributes[path] = said
        return found

    signature = {param.name: type_of(values[param.name], param, (index,)) for index, param in enumerate(params)}
    return signature, constants, attributes


@dataclasses.dataclass(frozen=True)
class Loop:
    """One turn of an innermost loop of products, as NVIDIA's machine code has it."""

    loads: tuple[tuple[int, int], ...]  # from global memory: bytes a thread gets at a time, and in all that way
    local: int = 0  # loads and stores of local memory
    matrix: str = ""  # `wgmma`, `mma`, `tcgen05`, or several; none: numbers are multiplied singly
    # On Hopper, of a multiprocessor, by what is busy; what the compile matrix says of a kernel does not rest on it.
    cycles: tuple[tuple[str, float], ...] = dataclasses.field(default=(), compare=False)

    @property
    def wide(self) -> float:
        """The share that comes 16 bytes at a time of what it loads, not counting addresses.

        A row's address, its page number or slot, is one word; so one word per longer load does not count.
        """
        sizes = dict(self.loads)
        longer = sum(size // width for width, size in self.loads if width > 4)
        sizes[4] = max(sizes.get(4, 0) - 4 * longer, 0)
        every = sum(sizes.values())
        return sum(size for width, size in sizes.items() if width >= 16) / every if every else 1.0

    def __str__(self) -> str:
        every = sum(size for _, size in self.loads)
        text = ", ".join(f"{width} B {size / every:.0%}" for width, size in self.loads) or "none"
        return text + (f", **local {self.local}**" if self.local else "")


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the compiled kernel is made of; `error` instead where it does not compile."""

    instructions: tuple[tuple[str, int], ...] = ()
    registers: int = 0
    spilled: int = 0  # bytes of memory a thread needs beyond its registers
    shared: int = 0
    limit: int = 0
    error: str = ""
    loops: tuple[Loop, ...] = ()  # in order of addresses; not read on AMD

    @property
    def failure(self) -> str | None:
        """Why this must not ship, or None."""
        if self.error:
            return f"does not compile: {self.error}"
        if self.spilled:
            return f"spills {self.spilled} bytes per thread"
        if self.shared > self.limit:
            return f"needs {self.shared} bytes of shared memory, the device has {self.limit}"
        if local := max((loop.local for loop in self.loops), default=0):
            return f"{local} loads and stores of local memory in an inner loop"
        return None


def digest(launch: Launch, arch: str) -> str:
    """Equal for launches that compile to the same code, whatever stands around their kernels."""
    parts = (arch, launch.num_warps, launch.num_stages, sources.text_of(launch.kernel))
    said = repr((*parts, *specialise(launch, arch.startswith("gfx"))))
    return hashlib.sha256(said.encode()).hexdigest()[:12]


def compile_launch(launch: Launch, arch: str) -> Facts:
    """Compile for `arch` and read the result. Nothing is cached between runs: the caller sets a fresh cache folder."""
    with _silence() as said:
        try:
            compiled = compiled_by_triton(launch, arch)
        except Exception as error:  # compilers raise anything; what they say is the finding
            return Facts(error=_first_words(error, said()))
    facts = _read_amd(compiled) if arch.startswith("gfx") else _read_nvidia(compiled, launch.num_warps)
    return dataclasses.replace(facts, shared=compiled.metadata.shared, limit=shared_memory_of(arch))


def compiled_by_triton(launch: Launch, arch: str) -> Any:
    """What Triton makes of a launch, as its launcher would specialise it."""
    triton = importlib.import_module("triton")
    compiler = importlib.import_module("triton.compiler")
    targets = importlib.import_module("triton.backends.compiler")
    amd = arch.startswith("gfx")
    signature, constants, attributes = specialise(launch, amd)
    source = compiler.ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    target = targets.GPUTarget("hip", arch, 64) if amd else targets.GPUTarget("cuda", int(arch[3:]), 32)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    return triton.compile(source, target=target, options=options)


def why_not() -> str | None:
    """Why nothing can be compiled in this process, if that is so."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "expected TRITON_INTERPRET to be unset, got 1: the interpreter compiles nothing"
    return None


@contextlib.contextmanager
def processes(jobs: int) -> Iterator[concurrent.futures.Executor]:
    """So many processes that compile, from an empty cache."""
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as cache,
        concurrent.futures.ProcessPoolExecutor(jobs, context, _start_worker, (cache,)) as pool,
    ):
        yield pool


def _start_worker(cache: str) -> None:
    os.environ["TRITON_CACHE_DIR"] = cache
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # its default, of which it would warn


class _silence:
    """Keep what compilers write to the file descriptors of this process away from the terminal."""

    def __enter__(self) -> Any:
        sys.stdout.flush()
        sys.stderr.flush()
        self.file = tempfile.TemporaryFile()
        self.saved = os.dup(1), os.dup(2)
        os.dup2(self.file.fileno(), 1)
        os.dup2(self.file.fileno(), 2)
        return self._read

    def _read(self) -> str:
        sys.stdout.flush()
        sys.stderr.flush()
        self.file.seek(0)
        return self.file.read().decode(errors="replace")

    def __exit__(self, *_: object) -> None:
        for descriptor, saved in zip((1, 2), self.saved, strict=True):
            os.dup2(saved, descriptor)
            os.close(saved)
        self.file.close()


def _first_words(error: Exception, said: str) -> str:
    """The most informative line of a compiler's error message, on one line."""
    root: BaseException = error
    while root.__cause__ or root.__context__:  # an error in an inlined function is reported once per level
        root = root.__cause__ or root.__context__ or root
    lines = [line.strip() for line in (str(root) + "\n" + said).splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"error|fatal|assert|not supported|Error", line)]
    text = telling[0] if telling else (lines or [type(root).__name__])[-1]
    return re.sub(r"/\S*/", "", f"{type(error).__name__}: {text}")[:200].replace("|", "/")


def _count(patterns: Mapping[str, str], text: str) -> tuple[tuple[str, int], ...]:
    found = ((name, len(re.findall(pattern, text, re.MULTILINE))) for name, pattern in patterns.items())
    return tuple((name, count) for name, count in found if count)


def _read_nvidia(compiled: Any, num_warps: int) -> Facts:
    code, ptx = machine_code(compiled), compiled.asm["ptx"]
    lacking = 0 if fences.only_reads_what_threads_wrote(compiled.asm["ttgir"]) else len(fences.unfenced(ptx))
    return Facts(
        instructions=_count(NVIDIA_COUNTS, ptx) + ((("unfenced", lacking),) if lacking else ()),
        registers=code.registers,
        spilled=code.spilled,
        loops=inner_loops(code.listing, num_warps),
    )


@dataclasses.dataclass(frozen=True)
class MachineCode:
    """What NVIDIA's tools say of a kernel that Triton compiled."""

    listing: str  # of its instructions
    registers: int  # a thread
    spilled: int  # bytes a thread


def machine_code(compiled: Any) -> MachineCode:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        code, resources = (sass.listing(flag, Path(file.name)) for flag in ("-sass", "-res-usage"))
    usage = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", resources)}
    return MachineCode(code, usage["REG"], max(usage["STACK"], usage["LOCAL"]))


def inner_loops(code: str, num_warps: int) -> tuple[Loop, ...]:
    """The innermost loops of products in cuobjdump's listing of one kernel."""
    found = []
    for lines in sass.multiplying_loops(sass.instructions_of(code)):
        loop = sass.count(lines)
        found.append(
            Loop(
                loads=tuple((width, width * number) for width, number in loop.loads),
                local=loop["LDL"] + loop["STL"],
                matrix=" ".join(name for kind, name in sass.MATRIX.items() if loop[kind]),
                cycles=tuple(sass.cycles(lines, num_warps).items()),
            )
        )
    return tuple(found)


def _read_amd(compiled: Any) -> Facts:
    text = compiled.asm["amdgcn"]

    def metadata(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", text)
        return int(found[1]) if found else 0

    return Facts(
        instructions=_count(AMD_COUNTS, text),
        registers=metadata("vgpr_count"),
        spilled=max(metadata("private_segment_fixed_size"), 4 * metadata("vgpr_spill_count")),
    )
