"""Compiles Triton kernels for GPUs that are not present, and reads the result.

`record` returns what the Triton backend would launch for a call. Each launch can be compiled for any architecture, with
the specialisation that the real launcher would cause. The module extracts matrix instructions, registers, spills and
shared memory from the result, and on NVIDIA GPUs also the widths of the loads in inner loops.
"""

import base64
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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.compiled import fences, sass, sources
from ragged_attention import dispatch
from ragged_attention.calls import QUANTIZED, Call, dtype_name
from ragged_attention.calls.base import shared_memory_of
from ragged_attention.tools.recording import Launch
from ragged_attention.tools.recording import record as record

ARCHITECTURES = ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2} | dict.fromkeys(QUANTIZED, 1)

POINTERS = {
    "float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16", "int8": "*i8", "uint8": "*u8",
    "bool": "*u8", "int32": "*i32",
    "int64": "*i64", "float8_e4m3fn": "*fp8e4nv",  # for kernels of other projects; ours receive uint8
}  # fmt: skip

NVIDIA_COUNTS = {
    "wgmma": r"wgmma\.mma_async",
    "tcgen05": r"tcgen05\.mma",
    "mma": r"mma\.sync",
    "cp.async": r"cp\.async\.c[ag]",
    "tma": r"cp\.async\.bulk\.tensor",
}
AMD_COUNTS = {"mfma": r"v_mfma_", "direct-to-lds": r"(?:buffer|global)_load_\S*lds|lds\s*$"}


def tile_of(case: Any, call: Call) -> Any:
    """The tile of the Triton backend for the call of a case."""
    module: Any = dispatch.load(call.OPERATION, "triton")
    return module.invariant_tile(call) if case.batch_invariant and call.ATTENDS else module.heuristic(call)


def _scalar(value: Any) -> tuple[str, list[Any]]:
    """The type and the attributes to which Triton specialises a number."""
    if isinstance(value, bool):
        return "u1", []
    if isinstance(value, float):
        return "fp32", []
    return "i32" if -(2**31) <= value < 2**31 else "i64", [["tt.divisibility", 16]] if value % 16 == 0 else []


def _operand(array: Any, amd: bool) -> tuple[str, list[Any]]:
    """The type and the attributes of a pointer.

    It is aligned like newly allocated memory. On AMD, arrays below 2 GiB are marked, as the launcher marks them.
    """
    attributes: list[Any] = [["tt.divisibility", 16]]
    size = ITEMSIZE.get(dtype_name(array), 8) * math.prod(array.shape)
    if amd and size <= 2**31 - 1:
        attributes.append(["tt.pointer_range", 32])
    return POINTERS[dtype_name(array)], attributes


def specialise(launch: Launch, amd: bool) -> tuple[dict[str, Any], dict[Any, Any], dict[Any, Any]]:
    """The signature, constants and attributes of the launch, which the compiler needs instead of values."""
    params = launch.kernel.params
    values = {param.name: param.default for param in params if param.has_default}
    values |= dict(zip((param.name for param in params), launch.operands, strict=False)) | dict(launch.arguments)
    constants: dict[Any, Any] = {}
    attributes: dict[Any, Any] = {}

    def type_of(value: Any, param: Any, path: tuple[int, ...]) -> Any:
        if isinstance(value, tuple) and not param.is_constexpr:
            types = [type_of(item, param, (*path, index)) for index, item in enumerate(value)]
            return type(value)(*types) if hasattr(value, "_fields") else tuple(types)
        if hasattr(value, "shape"):
            kind, specialised = _operand(value, amd)
        elif (
            param.is_constexpr
            or value is None
            or (value == 1 and type(value) is int and not (param.do_not_specialize or param.annotation_type))
        ):
            constants[path] = value
            return "constexpr"
        else:
            kind, specialised = _scalar(value)
            kind = param.annotation_type or kind
            specialised = [] if param.do_not_specialize or param.do_not_specialize_on_alignment else specialised
        if specialised:
            attributes[path] = specialised
        return kind

    signature = {param.name: type_of(values[param.name], param, (index,)) for index, param in enumerate(params)}
    return signature, constants, attributes


@dataclasses.dataclass(frozen=True)
class Loop:
    """One iteration of an innermost loop with matrix products, read from NVIDIA's machine code."""

    loads: tuple[tuple[int, int], ...]  # global loads: (bytes per load, bytes of all such loads)
    local: int = 0  # loads and stores of local memory
    matrix: str = ""  # `wgmma`, `mma`, `tcgen05`, or several; empty if no matrix unit is used
    # Cycles for which each unit of a Hopper multiprocessor is busy. The compile matrix does not use them.
    cycles: tuple[tuple[str, float], ...] = dataclasses.field(default=(), compare=False)

    @property
    def wide(self) -> float:
        """The fraction of the loaded bytes that is loaded at least 16 bytes at a time.

        For each longer load one word is not counted, since it is the page number or the slot of a row.
        """
        sizes = dict(self.loads)
        longer = sum(size // width for width, size in self.loads if width > 4)
        sizes[4] = max(sizes.get(4, 0) - 4 * longer, 0)
        total = sum(sizes.values())
        return sum(size for width, size in sizes.items() if width >= 16) / total if total else 1.0

    def __str__(self) -> str:
        total = sum(size for _, size in self.loads)
        text = ", ".join(f"{width} B {size / total:.0%}" for width, size in self.loads) or "none"
        return text + (f", **local {self.local}**" if self.local else "")


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the code of a compiled kernel contains. If the kernel does not compile, only `error` is set."""

    instructions: tuple[tuple[str, int], ...] = ()
    registers: int = 0
    spilled: int = 0  # bytes of memory that a thread needs because its registers do not suffice
    shared: int = 0
    limit: int = 0
    error: str = ""
    loops: tuple[Loop, ...] = ()  # ordered by address; always empty on AMD

    @property
    def failure(self) -> str | None:
        """The reason why the kernel must not ship, or None."""
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
    """A digest of everything that a launch compiles from. Code outside the kernels does not change it."""
    parts = (arch, launch.num_warps, launch.num_stages, sources.text_of(launch.kernel))
    text = repr((*parts, *specialise(launch, arch.startswith("gfx"))))
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()[:6]).decode()


def compile_launch(launch: Launch, arch: str) -> Facts:
    """Compile for `arch` and read the result. The caller sets a fresh cache folder, so nothing is reused."""
    with _silence() as output:
        try:
            compiled = compiled_by_triton(launch, arch)
        except Exception as error:  # compilers raise all kinds of errors; the message is the result
            return Facts(error=_first_words(error, output()))
    facts = _read_amd(compiled) if arch.startswith("gfx") else _read_nvidia(compiled, launch.num_warps)
    return dataclasses.replace(facts, shared=compiled.metadata.shared, limit=shared_memory_of(arch))


def compiled_by_triton(launch: Launch, arch: str) -> Any:
    """Triton's compiled kernel for a launch, with the specialisation that its launcher would cause."""
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
    """The reason why this process cannot compile, or None if it can."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "expected TRITON_INTERPRET to be unset, got 1: the interpreter compiles nothing"
    return None


@contextlib.contextmanager
def processes(jobs: int) -> Iterator[concurrent.futures.Executor]:
    """A pool of `jobs` processes for compilations, which starts with an empty cache."""
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as cache,
        concurrent.futures.ProcessPoolExecutor(jobs, context, _start_worker, (cache,)) as pool,
    ):
        yield pool


def _start_worker(cache: str) -> None:
    os.environ["TRITON_CACHE_DIR"] = cache
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton's default; Triton warns if this is unset


class _silence:
    """Capture what compilers write to the file descriptors of this process, and keep it off the terminal."""

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


def _first_words(error: Exception, messages: str) -> str:
    """The most informative line of a compiler's error message."""
    root: BaseException = error
    while root.__cause__ or root.__context__:  # Triton wraps an error once per inlined function
        root = root.__cause__ or root.__context__ or root
    lines = [line.strip() for line in (str(root) + "\n" + messages).splitlines() if line.strip()]
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
    """What NVIDIA's tools report about a kernel that Triton compiled."""

    listing: str  # the machine code
    registers: int  # per thread
    spilled: int  # bytes per thread


def machine_code(compiled: Any) -> MachineCode:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        code, resources = (sass.listing(flag, Path(file.name)) for flag in ("-sass", "-res-usage"))
    usage = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", resources)}
    return MachineCode(code, usage["REG"], max(usage["STACK"], usage["LOCAL"]))


def inner_loops(code: str, num_warps: int) -> tuple[Loop, ...]:
    """The innermost loops with matrix products in cuobjdump's listing of one kernel."""
    loops = []
    for lines in sass.multiplying_loops(sass.instructions_of(code)):
        loop = sass.count(lines)
        loops.append(
            Loop(
                loads=tuple((width, width * number) for width, number in loop.loads),
                local=loop["LDL"] + loop["STL"],
                matrix=" ".join(name for kind, name in sass.MATRIX.items() if loop[kind]),
                cycles=tuple(sass.cycles(lines, num_warps).items()),
            )
        )
    return tuple(loops)


def _read_amd(compiled: Any) -> Facts:
    text = compiled.asm["amdgcn"]

    def metadata(name: str) -> int:
        match = re.search(rf"\.{name}:\s*(\d+)", text)
        return int(match[1]) if match else 0

    return Facts(
        instructions=_count(AMD_COUNTS, text),
        registers=metadata("vgpr_count"),
        spilled=max(metadata("private_segment_fixed_size"), 4 * metadata("vgpr_spill_count")),
    )
