"""CUTLASS kernels for Hopper."""

from ragged_attention.errors import BackendMissing
from ragged_attention.kernels_cuda import compile, toolchain


def state() -> str | None:
    """What answers rest on beside a call: the library of the emulation in force here, None where there is none."""
    return None if compile.emulated() is None else compile.emulation()._name


def report() -> list[tuple[str, str]]:
    """Rows for `ragged-attention doctor`: the tools that are found, and whether the kernels are built."""
    compiler, missing, include = toolchain.nvcc(), toolchain.missing_to_compile(), toolchain.cutlass()
    if compiler is None:
        tools = missing or f"{toolchain.nvcc_path()} does not run"
    else:
        tools = f"{compiler.release} in {compiler.path}{f'; {missing}' if missing else ''}"
    headers = f"{toolchain.cutlass_release(include)} in {include}" if include else toolchain.NO_CUTLASS
    return [("CUDA toolchain", tools), ("CUTLASS", headers), ("CUDA kernels", _kernels())]


def _kernels() -> str:
    """Whether the kernels are built, and what they say of the first device."""
    path = compile.built()
    if path is None:
        return compile.why_not() or "not built: the first call does it, or `ragged-attention build-cuda`"
    try:
        status = compile.status()
    except BackendMissing as error:
        return f"{path}: {error}"
    arch = f"sm_{status.major}{status.minor}, {status.num_multiprocessors} multiprocessors"
    return f"{path}; device 0: {status.text if status.code else arch}"
