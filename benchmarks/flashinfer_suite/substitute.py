"""A package `flashinfer` for this process: our functions, a checkout's definitions, and stubs for all other names."""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.foreign_tests import without_cuda
from ragged_attention.errors import Unsupported

OURS = "ragged_attention.compat.flashinfer"
CAPABILITY = (9, 0)  # the compute capability that tests see: that of an H100, on which tests skip few cases
REPORTED = {"is_sm12x": False}  # whether tests see a device of the kind that MSA requires
# Modules that only compile kernels. Their calls do nothing.
COMPILING = ("flashinfer.jit", "tests.test_helpers.jit_utils")


class Absent:
    """A name that `compat.flashinfer` does not have. Calling it raises `Unsupported` with that name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.name.startswith(COMPILING):
            return []
        raise Unsupported(f"compat.flashinfer has no {self.name.partition('.')[2]}")

    def __or__(self, other: Any) -> "Absent":  # unions in annotations, such as `Name | None`
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.name}.{name}")


class Stub(types.ModuleType):
    """A module of FlashInfer. Names that we do not have are `Absent`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An importer that makes a stub for each module of `flashinfer` that no other importer finds."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if (
            fullname.startswith("flashinfer.") and not fullname.startswith("flashinfer.trace.")
        ) or fullname in COMPILING:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        return Stub(spec.name)

    def exec_module(self, module: Any) -> None:
        if module.__name__ == "flashinfer.utils":
            module.get_compute_capability = lambda device: CAPABILITY
            module.has_flashinfer_jit_cache = lambda: True
            module.determine_attention_backend = lambda *args, **kwargs: "fa2"
            module.get_device_sm_count = lambda device: 108
            module.is_sm90a_supported = lambda device: True
            module.is_sm12x_supported = lambda device: REPORTED["is_sm12x"]
            for family in ("100a", "100f", "110a", "120a", "121a"):
                setattr(module, f"is_sm{family}_supported", lambda device: False)


@contextlib.contextmanager
def as_sm12x() -> Iterator[None]:
    """A context in which tests see a CUDA device of the kind that MSA's tests require."""
    before = torch.cuda.is_available
    REPORTED["is_sm12x"], torch.cuda.is_available = True, lambda: True
    try:
        yield
    finally:
        REPORTED["is_sm12x"], torch.cuda.is_available = False, before


def install(checkout: Path) -> None:
    """Make `import flashinfer` find our functions and the checkout's definitions, and `import tests` its tests."""
    ours: Any = importlib.import_module(OURS)
    package: Any = Stub("flashinfer")
    for name in ours.__all__:
        value = getattr(ours, name)
        if isinstance(value, types.ModuleType):
            module: Any = Stub(f"flashinfer.{name}")
            module.can_implement_filtered_topk = lambda: True
            module.__dict__.update({each: vars(value)[each] for each in vars(value) if not each.startswith("__")})
            sys.modules[module.__name__] = value = module
        setattr(package, name, value)
    package.__version__ = "0"
    sys.modules["flashinfer"] = package
    folder = checkout / "flashinfer/trace"
    spec = importlib.util.spec_from_file_location(
        "flashinfer.trace", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    package.trace = sys.modules["flashinfer.trace"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package.trace)
    sys.meta_path.insert(0, Stubs())
    sys.path.insert(0, str(checkout))
    without_cuda()
    torch.cuda.get_device_capability = lambda device=None: CAPABILITY
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda device=None: types.SimpleNamespace(total_memory=2**36)  # type: ignore
    torch.cuda.memory_reserved = lambda device=None: 0
