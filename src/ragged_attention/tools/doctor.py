"""`ragged-attention doctor`: which software and devices are present, and which backends would be used.

If an import fails, the table shows the exception.
"""

import importlib
import importlib.metadata
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

import ragged_attention
from ragged_attention import config, dispatch
from ragged_attention.calls import CALLS, Device
from ragged_attention.errors import BackendMissing, Unsupported
from ragged_attention.tools.samples import FRAMEWORKS, device_of, sample_of

MODULES = ("numpy", "torch", "numba", "triton", "jax", "jax_triton")
DISTRIBUTIONS = {"jax_triton": "jax-triton"}


def report(console: Console) -> int:
    """Print every section. Returns 0, or 1 if something that is installed does not work."""
    with console.status("looking around"):
        found = {name: imported(name) for name in MODULES}
        sections = [
            _table("versions", ("what", "version"), versions(found)),
            _table("devices", ("framework", "device"), devices(found)),
            _table("backends", ("backend", "offers", "state"), backends()),
            _table("configuration", ("what", "value"), configuration()),
            _table("picked for a bfloat16 decode", ("operation", *FRAMEWORKS), picks(found)),
        ]
    for section in sections:
        console.print(section)
    return int(any(map(is_broken, found.values())))


def _table(title: str, headings: tuple[str, ...], rows: Any) -> Table:
    columns = (Column(heading, overflow="fold") for heading in headings)
    table = Table(*columns, title=title, title_justify="left", title_style="bold")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    if not table.row_count:
        table.add_row("none")
    return table


def imported(name: str) -> ModuleType | Exception:
    """A module, or the exception of its import, which is `BackendMissing` if it is not installed."""
    try:
        if name != "jax_triton":
            return importlib.import_module(name)
        # The launcher knows how to import this module safely, and returns an exception instead of raising it.
        result = importlib.import_module("ragged_attention.jax._launcher").jax_triton()
    except Exception as error:
        result = error
    missing = isinstance(result, ModuleNotFoundError) and result.name in (name, "jax")
    return BackendMissing("not installed") if missing else result


def is_broken(module: ModuleType | Exception) -> bool:
    return isinstance(module, Exception) and not isinstance(module, BackendMissing)


def one_line(error: BaseException) -> str:
    """An exception in one line. Its type comes first, unless it is this package's `Unsupported`."""
    lines = str(error).strip().splitlines() or [""]
    return " ".join(lines) if isinstance(error, Unsupported) else f"{type(error).__name__}: {lines[0]}"


def versions(found: dict[str, ModuleType | Exception]) -> Iterator[tuple[str, str]]:
    yield "ragged_attention", f"{ragged_attention.__version__} in {Path(ragged_attention.__file__).parent}"
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    for name, module in found.items():
        if isinstance(module, Exception):
            yield name, one_line(module)
        else:
            yield name, getattr(module, "__version__", None) or _version_of(DISTRIBUTIONS.get(name, name))
    yield from reports()
    yield "Pallas for TPU", pallas(found["jax"])


def _version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def reports() -> Iterator[tuple[str, str]]:
    """The rows that the installed backends report, from the `report` hooks of their packages."""
    for backend in dispatch.backends():
        package = dispatch.package_of(backend) or ""
        try:
            with dispatch.importing(package):
                module: Any = importlib.import_module(package)
        except Exception:  # backends() reports the error
            continue
        if hasattr(module, "report"):
            yield from module.report()


def pallas(jax: ModuleType | Exception) -> str:
    """Whether Pallas TPU kernels can run on jax's default device, and the facts that jax knows about the device."""
    if isinstance(jax, Exception):
        return f"needs jax, {one_line(jax)}"
    try:
        return tpu_facts(device_of("jax"))
    except Exception as error:
        return one_line(error)


def tpu_facts(device: Device) -> str:
    if (reason := device.why_unavailable("pallas")) is not None:
        return reason
    memories = f"{device.shared_memory >> 20} MiB of VMEM and {device.scalar_memory >> 10} KiB of SMEM per core"
    return f"{device.name or 'an interpreted TPU'}, cores: {device.num_multiprocessors}, {memories}"


def devices(found: dict[str, ModuleType | Exception]) -> Iterator[tuple[str, str]]:
    """The devices that torch and jax can see."""
    torch: Any = found["torch"]
    if not isinstance(torch, Exception):
        yield "torch", "cpu"
        for index in range(torch.cuda.device_count()):
            facts = device_of("torch", f"cuda:{index}")
            yield "torch", f"cuda:{index} {facts.name}, {facts.arch}, {facts.num_multiprocessors} multiprocessors"
        for name in ("mps", "xpu"):
            if hasattr(torch, name) and getattr(torch, name).is_available():
                yield "torch", name
    jax: Any = found["jax"]
    if not isinstance(jax, Exception):
        try:
            seen = [f"{device.platform}:{device.id} {device.device_kind}" for device in jax.devices()]
        except RuntimeError as error:
            seen = [one_line(error)]
        yield from (("jax", device) for device in seen)


def _offer(offered: list[str], lacking: list[str]) -> str:
    """A short description of the operations that a backend offers."""
    if len(lacking) > len(offered):
        return ", ".join(offered)
    return f"all but {', '.join(lacking)}" if lacking else "all operations"


def lacking_of(backend: str) -> str | None:
    """What a backend lacks on this machine, according to its package's `missing` hook, or None."""
    package: Any = importlib.import_module(dispatch.package_of(backend) or "")
    return package.missing() if callable(getattr(package, "missing", None)) else None


def backends() -> Iterator[tuple[str, str, str]]:
    """Each backend, the operations it offers, and whether they can be imported and have what they need."""
    for backend in dispatch.backends():
        offered, absent, faults = [], [], []
        for operation in CALLS:
            try:
                dispatch.load(operation, backend)
                offered.append(operation)
            except BackendMissing as missing:
                absent.append(str(missing).replace(operation, "any operation"))
            except Exception as error:
                faults.append(f"{operation}: {one_line(error)}")
        if offered and not faults:
            absent = [reason] if (reason := lacking_of(backend)) else []
        state = "; ".join(faults) or (f"absent: {', '.join(dict.fromkeys(absent))}" if absent else "present")
        yield backend, _offer(offered, [operation for operation in CALLS if operation not in offered]), state
    for name in dispatch.shadowed():
        yield name, "", dispatch.why_shadowed(name)


def configuration() -> Iterator[tuple[str, str]]:
    try:
        now = config.get_config()
    except (ValueError, TypeError) as error:
        yield "fault", one_line(error)
        return
    yield "backend", ", ".join(f"{key}: {', '.join(names)}" for key, names in now.backend.items()) or "auto"
    yield "options", "; ".join(f"{key}: {dict(value)}" for key, value in now.options.items()) or "none"
    yield "validate", str(now.validate)
    yield "batch_invariant", str(now.batch_invariant)
    for variable in (*config.VARIABLES, "TRITON_INTERPRET"):
        yield variable, os.environ.get(variable, "not set")


def picks(found: dict[str, ModuleType | Exception]) -> Iterator[tuple[str, ...]]:
    """The backend that each framework would use for each operation on the default device of this machine."""
    for operation in CALLS:
        yield operation, *(_pick(operation, framework, found[framework]) for framework in FRAMEWORKS)


def _pick(operation: str, framework: str, module: ModuleType | Exception) -> str:
    if isinstance(module, Exception):
        return one_line(module)
    try:
        device = device_of(framework)
        choice = dispatch.choose(sample_of(operation).call(operation, device))
    except Exception as error:
        return one_line(error)
    return f"{choice.backend} on {device.name or device.platform}: {choice.tile}"
