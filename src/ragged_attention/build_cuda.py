"""`ragged-attention build-cuda`: the CUDA kernels built ahead of time, so that no call waits for a compiler.

They need nvcc, g++ and the CUTLASS headers (`doctor` shows which are found), but no GPU. Where jax is installed, the
library that hands its arrays to the kernels is built too, against the installed jaxlib.
"""

import argparse
import importlib
import importlib.util
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ragged_attention.kernels_cuda import compile as kernels
from ragged_attention.kernels_cuda import toolchain


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 when everything is built; what is missing or does not compile raises `BackendMissing`."""
    parser = argparse.ArgumentParser(prog="ragged-attention build-cuda", description=__doc__)
    parser.add_argument(
        "--out", type=Path, metavar="DIR",
        help="copy the kernels' library here too; in kernels_cuda/prebuilt of a checkout it becomes part of wheels",
    )  # fmt: skip
    options = parser.parse_args(argv)
    console, bar = Console(soft_wrap=True), Console(stderr=True)
    compiler = toolchain.nvcc()
    if compiler is not None:
        console.print(f"nvcc: {escape(compiler.path)}, {escape(compiler.release)}", highlight=False)
    path, for_jax = shown(kernels.kernels_recipe(), bar), None
    if importlib.util.find_spec("jax") is not None:
        include: Any = importlib.import_module("jax.ffi").include_dir()
        for_jax = shown(kernels.ffi_recipe(include, path), bar)
    console.print(f"kernels: {escape(str(path))}", highlight=False)
    console.print(f"for jax: {escape(str(for_jax or 'not built, for jax is not installed'))}", highlight=False)
    if options.out is not None:
        console.print(f"copy: {escape(str(_copied(path, options.out)))}", highlight=False)
    return 0


def shown(recipe: kernels.Recipe, console: Console) -> Path:
    """Build by a recipe, with a progress bar while it takes."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("compiling", total=None)
        return kernels.build(
            recipe, lambda done, total, text: bar.update(task, completed=done, total=total, description=text)
        )


def _copied(path: Path, folder: Path) -> Path:
    """The library's copy in `folder`, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy2(path, folder))
