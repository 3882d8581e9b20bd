"""Shared by the two suites of vLLM's tests: its package of tests, and a platform that the tests take for a GPU."""

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.foreign_tests import bare_package


def install(checkout: Path, modules: Iterable[str]) -> None:
    """Import vLLM's modules as on a CPU, and only then make its tests believe that they run on a GPU."""
    models = Path(importlib.import_module("vllm.models").__path__[0])
    for name in ("minimax_m3", "qwen4_exp"):  # avoids importing whole models
        bare_package(f"vllm.models.{name}", models / name)
    for name in modules:
        importlib.import_module(name)
    # only this package, since the checkout's own `vllm` has no compiled libraries
    bare_package("tests", checkout / "tests")
    platform = importlib.import_module("vllm.platforms").current_platform
    platform.is_cuda = lambda: True
    platform.supports_fp8 = lambda: True
    platform.synchronize = lambda: None
    platform.is_device_capability_family = lambda family, *_: family == 100
    vars(importlib.import_module("vllm.triton_utils"))["HAS_TRITON"] = True
    torch.cuda.is_available = lambda: True


def replace(module: str, *functions: Any) -> None:
    """Replace the functions of a module that have the same names."""
    vars(importlib.import_module(module)).update({each.__name__: each for each in functions})
