"""The demo's transformers in torch, served and judged."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ragged_attention.demo import torch_gqa, torch_mla
from ragged_attention.demo.engine import Batch, Limits
from ragged_attention.demo.model import STEP_TABLES, Weights, chosen_backends
from ragged_attention.demo.torch_layers import Attention, Tensor, forward, full_logits
from ragged_attention.errors import InvalidInput
from ragged_attention.torch._launcher import device_facts

ATTENTIONS: dict[str, Attention] = {"gqa": torch_gqa, "mla": torch_mla}


def device_named(name: str | None) -> str:
    """The requested device, or the best one here."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return str(torch.zeros(1, device=name).device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise InvalidInput(f"expected device to be one that torch has here, got {name!r}: {reason}") from None


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """On a CPU the work of a step is so small that several threads would only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Model:
    """A transformer with its paged cache, and once more without one."""

    def __init__(
        self, kind: str, weights: Weights, limits: Limits, *, device: str = "cpu", backend: str | None = None
    ) -> None:
        self.platform = device
        self.device = torch.device(device)
        self.backend = backend
        self.attention = ATTENTIONS[kind]
        self.weights = {name: torch.from_numpy(value).to(self.device) for name, value in weights.items()}
        self.caches = [self.attention.cache(self.weights, limits) for _ in self.weights["q"]]
        tables = self._tables(self._on_device(Batch.empty(limits)))
        calls = self.attention.calls(self.weights, limits, tables, device_facts(self.caches[0].device))
        self.backends = chosen_backends(*calls, backend)

    @torch.no_grad()
    @one_thread()
    def step(self, batch: Batch) -> np.ndarray:
        arrays = self._on_device(batch)
        tables = self._tables(arrays)

        def attended(layer: int, h: Tensor) -> Tensor:
            return self.attention.served(
                self.weights, layer, h, arrays["positions"], self.caches[layer], tables, self.backend
            )

        hidden = forward(self.weights, arrays["tokens"], attended)
        return (hidden[arrays["last_rows"]] @ self.weights["embed"].T).cpu().numpy()

    @torch.no_grad()
    def full(self, tokens: np.ndarray) -> np.ndarray:
        """Logits [N, T, V] by plain attention over whole sequences [N, T]."""
        return full_logits(self.attention, self.weights, torch.from_numpy(tokens).to(self.device)).cpu().numpy()

    def _on_device(self, batch: Batch) -> dict[str, Tensor]:
        names = ("tokens", "positions", "last_rows", *STEP_TABLES)
        return {name: torch.from_numpy(getattr(batch, name)).to(self.device) for name in names}

    @staticmethod
    def _tables(arrays: dict[str, Tensor]) -> dict[str, Any]:
        return {name: arrays[name] for name in STEP_TABLES}
