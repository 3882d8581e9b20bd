"""Whether vLLM's sparse models use our indexer. They do if vLLM has none for the device, or if the user requests it."""

import importlib
from typing import Any

asked = False  # whether `register(indexer=True)` or the environment variable requests it


def lacking(platform: Any) -> bool:
    """Whether vLLM has no kernels of the lightning indexer for the device of its platform."""
    if platform.is_cuda():
        return not platform.support_deep_gemm()
    if platform.is_rocm():
        aiter: Any = importlib.import_module("vllm._aiter_ops").rocm_aiter_ops
        rocm: Any = importlib.import_module("vllm.platforms.rocm")
        has_aiter = aiter.is_enabled() or aiter.is_rdna_aiter_enabled()
        return not (has_aiter or rocm.on_gfx11() or rocm.on_gfx950())
    return platform.is_cpu()
