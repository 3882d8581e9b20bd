"""llama.cpp's flash attention on a CPU, from the library of `ggml-python`.

The keys and values of a sequence are contiguous, with the heads first. The kernel is faster in this order than in
llama.cpp's own. If our cache is bfloat16, llama.cpp's is float16. That is its default, and its kernel is slower over
bfloat16.
"""

import ctypes
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q [Q, H, D], k [N, K, D] and v [N, K, D'] of one sequence


@functools.cache
def _library() -> Any:
    """The module of the Python binding, or None if it is not installed."""
    if importlib.util.find_spec("ggml") is None:
        return None
    library = importlib.import_module("ggml")
    library.ggml_cpu_init()
    return library


class _Graph:
    """A ggml graph with the calls of a step. It keeps their tensors alive, and never frees the ggml context."""

    def __init__(self) -> None:
        self.library = _library()
        parameters = self.library.ggml_init_params(mem_size=2**20, mem_buffer=None, no_alloc=True)
        self.context = self.library.ggml_init(parameters)
        self.graph = self.library.ggml_new_graph(self.context)
        self.tensors: list[torch.Tensor] = []

    def tensor(self, x: torch.Tensor) -> Any:
        """A ggml tensor on the memory of `x`. ggml numbers the axes from the last one."""
        kind = {torch.float32: "GGML_TYPE_F32", torch.float16: "GGML_TYPE_F16"}[x.dtype]
        x = x[(None,) * (4 - x.dim())]
        made = self.library.ggml_new_tensor_4d(self.context, getattr(self.library, kind), *reversed(x.shape))
        for axis, stride in enumerate(reversed(x.stride())):
            made.contents.nb[axis] = stride * x.itemsize
        made.contents.data = x.data_ptr()
        self.tensors.append(x)
        return made

    def attend(self, part: Part, out: torch.Tensor, scale: float) -> None:
        """Add the attention of one sequence to the graph. It writes to `out`, float32 [Q, H, D']."""
        q, k, v = part
        new, keys = len(q), len(k)
        mask = None
        if new > 1:
            mask = self.tensor(torch.full((new, keys), -torch.inf, dtype=torch.float16).triu(keys - new + 1))
        heads_first = (self.tensor(x.transpose(0, 1)) for x in (_stored(q.float()), k, v))
        call = self.library.ggml_flash_attn_ext(self.context, *heads_first, mask, scale, 0.0, 0.0)
        call.contents.data = out.data_ptr()
        self.library.ggml_build_forward_expand(self.graph, call)

    def run(self, out: torch.Tensor) -> Callable[[], torch.Tensor]:
        """A function that computes the graph on as many threads as torch uses."""
        plan = self.library.ggml_graph_plan(self.graph, torch.get_num_threads(), None)
        work_space = torch.empty(plan.work_size, dtype=torch.uint8)
        plan.work_data = ctypes.cast(work_space.data_ptr(), ctypes.POINTER(ctypes.c_uint8))
        self.tensors += [work_space, out]

        def compute() -> torch.Tensor:
            self.library.ggml_graph_compute(self.graph, ctypes.byref(plan))
            return self.tensors[-1]

        return compute


def _calls(parts: Iterable[Part], scale: float) -> dict[str, Callable[[], torch.Tensor]]:
    graph, parts = _Graph(), list(parts)
    counts = [len(q) for q, _, _ in parts]
    out = torch.empty(sum(counts), parts[0][0].shape[1], parts[0][2].shape[-1])
    for part, result in zip(parts, out.split(counts), strict=True):
        graph.attend(part, result, scale)
    return {"ggml": graph.run(out)}


def _stored(x: torch.Tensor) -> torch.Tensor:
    """The rows [N, K, D] in a dtype that the graph supports, with the heads first in memory."""
    kind = torch.float16 if x.dtype == torch.bfloat16 else x.dtype
    return x.to(kind).transpose(0, 1).contiguous().transpose(0, 1)


def attention(
    inputs: dict[str, torch.Tensor], lens: Sequence[tuple[int, int]]
) -> dict[str, Callable[[], torch.Tensor]]:
    if _library() is None:
        return {}
    rows = inputs["q"].split([new for new, _ in lens])
    parts = []
    for q, pages, (_, keys) in zip(rows, inputs["page_indices"].long(), lens, strict=True):
        used = pages[: -(-keys // inputs["k"].shape[1])]
        k, v = (_stored(inputs[name][used].flatten(0, 1)[:keys]) for name in ("k", "v"))
        parts.append((q, k, v))
    return _calls(parts, inputs["q"].shape[-1] ** -0.5)


def latent_decode(
    q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lens: torch.Tensor, scale: float
) -> dict[str, Callable[[], torch.Tensor]]:
    """Latent attention by llama.cpp's flash attention. The values are the first 512 columns of the keys."""
    if _library() is None:
        return {}
    latents = [_stored(cache[pages.long()].flatten(0, 1)[:keys, None]) for pages, keys in zip(table, lens, strict=True)]
    return _calls(((query[None], rows, rows[..., :512]) for query, rows in zip(q, latents, strict=True)), scale)
