"""vLLM's and OpenVINO's paged attention on a CPU, called in the same way as `benchmarks/cpu` calls them."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.cpu import peers
from benchmarks.judged import FILLED, Recipe, pages_of


def paged(
    kernel: Callable[..., peers.Contenders],
    q: torch.Tensor,
    kv_pages: Any,
    kv_lens: torch.Tensor,
    page_indices: torch.Tensor,
    cu_q_lens: torch.Tensor,
) -> torch.Tensor:
    """Attention by a kernel over pages of 32 positions, with the default scale and a causal mask."""
    k, v = pages_of(kv_pages)
    inputs = {"q": q, "k": k.contiguous(), "v": v.contiguous(), "page_indices": page_indices}
    contenders = kernel({**inputs, "kv_lens": kv_lens, "cu_q_lens": cu_q_lens})
    if not contenders:
        raise NotImplementedError("the library cannot be loaded")
    (run,) = contenders.values()
    return run()


def vllm(inputs: dict[str, torch.Tensor]) -> peers.Contenders:
    return peers.vllm_attention(inputs, 32)


def openvino(inputs: dict[str, torch.Tensor]) -> peers.Contenders:
    q_lens = inputs["cu_q_lens"].diff().tolist()
    return peers.openvino_attention(inputs, list(zip(q_lens, inputs["kv_lens"].tolist(), strict=True)))


def function(kernel: Callable[..., peers.Contenders]) -> Callable[..., torch.Tensor]:
    """`paged` with `kernel` as its first argument. The function has the name of `kernel`."""

    @functools.wraps(kernel)
    def run(q: Any, kv_pages: Any, kv_lens: Any, page_indices: Any, cu_q_lens: Any) -> torch.Tensor:
        return paged(kernel, q, kv_pages, kv_lens, page_indices, cu_q_lens)

    del run.__wrapped__  # otherwise `judge` would see the parameters of `kernel`
    return run


PAGED: Mapping[str, Any] = {
    "framework": "torch",
    "page_sizes": (32,),
    "dtypes": ("float32", "bfloat16"),
    "declines": (*FILLED, "other value sizes"),
    "contiguous": True,
}
RECIPES: Mapping[str, Recipe] = {
    "vllm_cpu": Recipe("torch", function(vllm), "ragged_paged_attention", {**PAGED, "head_dims": (64, 80, 128)}),
    "openvino": Recipe("openvino", function(openvino), "ragged_paged_attention", {**PAGED, "head_dims": (64, 80, 128)}),
}
