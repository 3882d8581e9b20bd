"""Recipes that test other projects' kernels. A recipe calls a kernel through a function with our names and layouts.

python -m benchmarks.judged                 # all recipes whose packages are installed
python -m benchmarks.judged sdpa flex       # only these recipes
"""

import dataclasses
import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

# Requirements of the operations that most kernels do not meet.
OPEN = ("invalid indices", "padding", "empty batches")
FILLED = (*OPEN, "empty sequences")
FLOATS = ("float32", "float16", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A function that calls a kernel, and the arguments with which `judge` tests it."""

    package: str  # the package's import name
    kernel: Callable[..., Any]
    operation: str
    limits: Mapping[str, Any]

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None

    @property
    def version(self) -> str:
        """The names and versions of the distributions that contain the package."""
        names = importlib.metadata.packages_distributions()[self.package]
        return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in sorted(set(names)))


def pages_of(kv_pages: Any) -> tuple[Any, Any]:
    """The pages of K and of V, each [P, page_size, K, D], from `kv_pages`, which is that pair or combined pages."""
    return kv_pages if isinstance(kv_pages, tuple) else (kv_pages[:, :, 0::2], kv_pages[:, :, 1::2])


def not_causal(operation: str, call: Any) -> bool:
    """Whether a call is declined because the kernel only has a causal mask."""
    return not call.causal
