"""The demo's transformers in torch."""

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F

import ragged_attention.torch
from ragged_attention.demo.engine import Batch, Limits
from ragged_attention.demo.gqa import GroupedQueries
from ragged_attention.demo.mla import LatentAttention
from ragged_attention.demo.model import Weights
from ragged_attention.demo.transformer import Framework
from ragged_attention.errors import InvalidInput
from ragged_attention.torch._launcher import DTYPES, device_facts

TORCH = Framework(torch, F, ragged_attention.torch, lambda array, like: torch.from_numpy(array).to(like.device))
GQA, MLA = GroupedQueries(TORCH), LatentAttention(TORCH)
TRANSFORMERS = {"gqa": GQA, "mla": MLA}


def device_named(name: str | None) -> str:
    """The requested device, or else a GPU if there is one."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return str(torch.zeros(1, device=name).device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise InvalidInput(f"expected device to be one that torch has here, got {name!r}: {reason}") from None


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread, because a step on a CPU has too little work for several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Model:
    """A transformer with its paged cache."""

    def __init__(
        self, kind: str, weights: Weights, limits: Limits, *, device: str = "cpu", backend: str | None = None
    ) -> None:
        self.platform = device
        self.device = torch.device(device)
        self.backend = backend
        self.transformer = TRANSFORMERS[kind]
        self.weights = {name: torch.from_numpy(value).to(self.device) for name, value in weights.items()}
        cache = self.transformer.cache(weights, limits)
        dtype = DTYPES[cache.dtype]
        self.caches = [torch.zeros(cache.shape, dtype=dtype, device=self.device) for _ in weights["q"]]
        self.backends = self.transformer.backends(weights, limits, device_facts(self.caches[0].device), backend)

    @torch.no_grad()
    @one_thread()
    def step(self, batch: Batch) -> np.ndarray:
        arrays = {name: torch.from_numpy(value).to(self.device) for name, value in vars(batch).items()}
        logits, self.caches = self.transformer.paged_logits(self.weights, self.caches, arrays, self.backend)
        return logits.cpu().numpy()

    @torch.no_grad()
    def full(self, tokens: np.ndarray) -> np.ndarray:
        """Logits [N, T, V] of whole sequences [N, T], by attention without a cache."""
        return self.transformer.full_logits(self.weights, torch.from_numpy(tokens).to(self.device)).cpu().numpy()
