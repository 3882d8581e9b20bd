"""Rows about the CUDA backend for the command line: its tools and libraries, which can be built ahead of time."""

import importlib
import importlib.util
import shutil
from pathlib import Path
from typing import Any

from ragged_attention.errors import BackendMissing
from ragged_attention.kernels_cuda import _native
from ragged_attention.kernels_cuda._build import compile, toolchain


def rows() -> list[tuple[str, str]]:
    """The parts of the backend and their states."""
    return [("CUDA toolchain", tools()), ("CUTLASS", cutlass()), ("CUDA kernels", kernels())]


def tools() -> str:
    """The release and path of nvcc."""
    compiler = toolchain.nvcc()
    if compiler is None:
        return f"{toolchain.nvcc_path()} does not run" if toolchain.nvcc_path() else "not found"
    return f"{compiler.release} in {compiler.path}"


def cutlass() -> str:
    """The release and folder of the CUTLASS headers."""
    include = toolchain.cutlass()
    return f"{toolchain.cutlass_release(include)} in {include}" if include else "not found"


def kernels() -> str:
    """Whether the kernels are built, and what they report about the first device."""
    path = compile.built()
    if path is None:
        if _native.why_not() is not None:  # the table of backends says why
            return "not built"
        return "not built: the first call does it, or `ragged-attention build-cuda`"
    try:
        status = _native.status()
    except BackendMissing as error:
        return f"{path}: {' '.join(str(error).split())}"
    arch = f"sm_{status.major}{status.minor}, {status.num_multiprocessors} multiprocessors"
    return f"{path}; device 0: {status.text if status.code else arch}"


def build(progress: compile.Progress | None, copy_to: Path | None) -> list[tuple[str, str]]:
    """Build every library. Returns rows with the tools and the libraries' paths."""
    path, for_jax = compile.build(compile.kernels_recipe(), progress), None
    if importlib.util.find_spec("jax") is not None:
        include: Any = importlib.import_module("jax.ffi").include_dir()
        for_jax = compile.build(compile.ffi_recipe(include, path), progress)
    built = [("nvcc", tools()), ("kernels", str(path)), ("for jax", str(for_jax or "not built, jax is not installed"))]
    if copy_to is not None:
        copy_to.mkdir(parents=True, exist_ok=True)
        built.append(("copy", str(shutil.copy2(path, copy_to))))
    return built
