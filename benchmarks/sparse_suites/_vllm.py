"""Helpers of `minimax_m3` and `qsa`. They import vLLM, and make its platform look like a GPU to vLLM's tests."""

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.foreign_tests import bare_package


def install(checkout: Path, modules: Iterable[str]) -> None:
    """Import vLLM's modules as on a CPU. After that, make its platform look like a GPU to the tests."""
    models = Path(importlib.import_module("vllm.models").__path__[0])
    for name in ("minimax_m3", "qwen4_exp"):  # avoids importing whole models
        bare_package(f"vllm.models.{name}", models / name)
    for name in modules:
        importlib.import_module(name)
    # only `tests` comes from the checkout, since its `vllm` has no compiled libraries
    bare_package("tests", checkout / "tests")
    platform = importlib.import_module("vllm.platforms").current_platform
    platform.is_cuda = lambda: True
    platform.supports_fp8 = lambda: True
    platform.synchronize = lambda: None
    platform.is_device_capability_family = lambda family, *_: family == 100
    vars(importlib.import_module("vllm.triton_utils"))["HAS_TRITON"] = True
    torch.cuda.is_available = lambda: True


def replace(module: str, *functions: Any) -> None:
    """Replace functions of a module by `functions`, which have the same names."""
    vars(importlib.import_module(module)).update({function.__name__: function for function in functions})
