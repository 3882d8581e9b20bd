"""Recipes that judge kernels of other projects: a function around each, with the names and layouts of ours.

python -m benchmarks.judged                 # all recipes whose packages are installed
python -m benchmarks.judged sdpa flex       # some
"""

import dataclasses
import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

# What the operations define and most kernels leave open.
OPEN = ("invalid indices", "padding", "empty batches")
FILLED = (*OPEN, "empty sequences")
FLOATS = ("float32", "float16", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A function around a kernel, and what `judge` is told of it."""

    package: str  # as it is imported
    kernel: Callable[..., Any]
    operation: str
    limits: Mapping[str, Any]

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None

    @property
    def version(self) -> str:
        """The names and versions of the distributions that the package comes with."""
        names = importlib.metadata.packages_distributions()[self.package]
        return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in sorted(set(names)))


def pages_of(kv_pages: Any) -> tuple[Any, Any]:
    """The pages of K and those of V, each [P, page_size, K, D], of either form of `kv_pages`."""
    return kv_pages if isinstance(kv_pages, tuple) else (kv_pages[:, :, 0::2], kv_pages[:, :, 1::2])


def not_causal(operation: str, call: Any) -> bool:
    """What a recipe declines whose kernel has a causal mask only."""
    return not call.causal
