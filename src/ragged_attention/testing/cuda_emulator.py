"""Run the suite on the CUDA kernels without a GPU, in the emulation that `kernels_cuda` builds with g++.

Each batch runs in three modes, which find different faults:

- `eager`: asynchronous copies and products complete as soon as they are issued.
- `late`: copies land only when no thread can continue without them. Products are computed when they are waited for,
  from the operands' values at that time.
- `crossed`: copies land at once, products are computed as in `late`, and one warpgroup runs for as long as it can.

A block's memory is NaN at first. A wait that nothing can satisfy raises an error instead of hanging.

`ragged-attention conformance --backend cuda` does this on a CPU, in every mode.
"""

import contextlib
import dataclasses
import importlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ragged_attention import kernels_cuda
from ragged_attention.kernels_cuda._build import compile, toolchain
from ragged_attention.testing.runner import FRAMEWORKS, Runner

BACKEND = "cuda"
# Each mode with the seed for the order in which threads run. With 0, threads take turns.
MODES: Mapping[str, int] = {"eager": 0, "late": 1, "crossed": 1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmulatedRunner(Runner):
    """A runner whose CUDA kernels are emulated in this process."""

    backend: str = BACKEND
    mode: str = "late"

    def __str__(self) -> str:
        return f"{super().__str__()}, emulated, {self.mode}"

    def _call(self, operation: str, batch: Any, options: Any, **extra: Any) -> Any:
        result = super()._call(operation, batch, options, **extra)
        if self.framework == "jax":  # jax runs asynchronously, but must end before `around` does
            importlib.import_module("jax").block_until_ready(result)
        return result

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        with kernels_cuda.emulating(self.mode, MODES[self.mode]), super().around():
            yield

    def as_arguments(self) -> Sequence[str]:
        return [*super().as_arguments(), "--emulated", self.mode]


def emulated(runner: Runner, mode: str) -> EmulatedRunner:
    """The emulated runner with the front end, device and memory placement of `runner`."""
    return EmulatedRunner(framework=runner.framework, device=runner.device, place=runner.place, mode=mode)


def missing() -> str | None:
    """Why the emulation cannot be built here, or None."""
    return toolchain.missing_to_emulate() or compile.missing_to_store()


def runners(backend: str, framework: str | None, device: str | None) -> list[EmulatedRunner]:
    """A runner for each mode and installed front end; none unless the backend's emulation can be built here."""
    if backend != BACKEND or device not in (None, "cpu") or missing():
        return []
    present = [name for name in (framework, *FRAMEWORKS) if name and importlib.util.find_spec(name)]
    return [EmulatedRunner(framework=name, mode=mode) for name in present[: 1 if framework else None] for mode in MODES]
