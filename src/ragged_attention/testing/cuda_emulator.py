"""The suite on the CUDA kernels where there is no GPU: by the emulation of one that `kernels_cuda` builds with g++.

Each batch is judged in three modes that show different faults: `eager`, in which what is asynchronous happens as soon
as it is asked for; `late`, in which copies land only when no thread can go on without, and products are computed when
they are waited for, from what the operands are by then; and `crossed`, in which copies land at once, products are late
and one warpgroup runs for as long as it can. Memory of a block is NaN at first, and a wait that nothing satisfies is an
error, so that nothing hangs.

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
MODES: Mapping[str, int] = {"eager": 0, "late": 1, "crossed": 1}  # and the seed of the order of threads; 0: in turn


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmulatedRunner(Runner):
    """The CUDA kernels in the emulation, in this very process."""

    backend: str = BACKEND
    mode: str = "late"

    def __str__(self) -> str:
        return f"{super().__str__()}, emulated, {self.mode}"

    def _call(self, operation: str, batch: Any, options: Any, **extra: Any) -> Any:
        result = super()._call(operation, batch, options, **extra)
        if self.framework == "jax":  # which goes on by itself, but not outside of `around`
            importlib.import_module("jax").block_until_ready(result)
        return result

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        with kernels_cuda.emulating(self.mode, MODES[self.mode]), super().around():
            yield

    def apart(self) -> Sequence[str]:
        return [*super().apart(), "--emulated", self.mode]


def emulated(runner: Runner, mode: str) -> EmulatedRunner:
    """The same runner, emulated."""
    return EmulatedRunner(framework=runner.framework, device=runner.device, place=runner.place, mode=mode)


def missing() -> str | None:
    """Why the emulation cannot be built here."""
    return toolchain.missing_to_emulate() or compile.missing_to_store()


def runners(backend: str, framework: str | None, device: str | None) -> list[EmulatedRunner]:
    """A runner for each mode and front end that is here, if the emulation of the backend can be built."""
    if backend != BACKEND or device not in (None, "cpu") or missing():
        return []
    present = [name for name in (framework, *FRAMEWORKS) if name and importlib.util.find_spec(name)]
    return [EmulatedRunner(framework=name, mode=mode) for name in present[: 1 if framework else None] for mode in MODES]
