"""A reference in FlashInfer's package: a file that needs nothing but torch, read without what FlashInfer imports."""

import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.judged import FILLED, FLOATS, Recipe, pages_of


@functools.cache
def reference(path: str) -> Any:
    """A file below `attention` of the package, as a module of its own."""
    found = importlib.util.find_spec("flashinfer")
    assert found is not None
    assert found.origin is not None
    file = Path(found.origin).parent / "experimental/b12x/attention" / path
    if not file.exists():
        raise NotImplementedError(f"this version has no {path}")
    spec = importlib.util.spec_from_file_location(f"flashinfer_{file.parent.name}_reference", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def paged(
    q: torch.Tensor,
    kv_pages: Any,
    kv_lens: torch.Tensor,
    page_indices: torch.Tensor,
    cu_q_lens: torch.Tensor,
    sm_scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """`paged_attention_reference`. Its lse counts sinks, which ours leaves out."""
    k_pages, v_pages = pages_of(kv_pages)
    result = reference("paged/reference.py").paged_attention_reference(
        q, k_pages, v_pages, page_indices, kv_lens, cu_q_lens, softmax_scale=sm_scale, causal=causal,
        window_left=-1 if sliding_window is None else sliding_window - 1, attention_sink_bias=sinks,
    )  # fmt: skip
    return result if return_lse and sinks is None else result[0]


RECIPES: Mapping[str, Recipe] = {
    "flashinfer_paged": Recipe(
        "flashinfer",
        paged,
        "ragged_paged_attention",
        {"framework": "torch", "dtypes": FLOATS, "declines": FILLED},
    ),
}
