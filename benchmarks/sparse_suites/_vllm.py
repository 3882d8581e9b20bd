"""What both suites of vLLM's tests need: its package of tests, and a platform that they take for a GPU."""

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.foreign_tests import bare_package


def install(checkout: Path, modules: Iterable[str]) -> None:
    """Import vLLM's modules as on a CPU, and only then tell its tests that this is a GPU."""
    models = Path(importlib.import_module("vllm.models").__path__[0])
    for name in ("minimax_m3", "qwen4_exp"):  # not whole models
        bare_package(f"vllm.models.{name}", models / name)
    for name in modules:
        importlib.import_module(name)
    bare_package("tests", checkout / "tests")  # alone, for the checkout's `vllm` has no compiled libraries
    platform = importlib.import_module("vllm.platforms").current_platform
    platform.is_cuda = lambda: True
    platform.supports_fp8 = lambda: True
    platform.synchronize = lambda: None
    platform.is_device_capability_family = lambda family, *_: family == 100
    vars(importlib.import_module("vllm.triton_utils"))["HAS_TRITON"] = True
    torch.cuda.is_available = lambda: True


def replace(module: str, *functions: Any) -> None:
    """Put functions in the place of a module's own of their names."""
    vars(importlib.import_module(module)).update({each.__name__: each for each in functions})
