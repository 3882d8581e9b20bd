"""Items: the checks of the shipped suite and a smoke test, for each backend of one front end."""

import dataclasses
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from hypothesis import Phase

from benchmarks.device.plan import WITHOUT_PDL
from benchmarks.device.record import CANNOT, DECLINED, PASSED
from ragged_attention.testing import environment

BACKENDS = {"torch": ("triton", "cuda", "eager"), "jax": ("triton", "cuda", "xla")}
# The smoke test of a backend is the first of these checks that the backend supports.
SMOKE = ("corner: attention, mixed prefill and decode", "corner: latent decode", "corner: attention")
EXAMPLES = 2  # examples drawn for each check
KINDS = {"corner": ("corner",), "drawn": ("agreement", "law")}


class Items:
    def __init__(self, device: str, framework: str, *options: str) -> None:
        environment.prepare(device)
        self.device, self.framework = device, framework
        self.module = importlib.import_module(framework)
        if device == "cuda" and not self.sees_a_gpu():
            raise RuntimeError(f"{framework} sees no GPU")
        if WITHOUT_PDL in options:
            tiles = importlib.import_module("ragged_attention.kernels_triton._tiles")
            mock.patch.object(tiles, "overlaps", return_value=False).start()
        if device == "cuda":  # shrinking a failing example would take minutes
            drawing: Any = importlib.import_module("ragged_attention.testing.drawing")
            drawing.PHASES = (Phase.explicit, Phase.generate)
        self.compilations = Compilations() if device == "cuda" else None
        from ragged_attention.testing.suite import checks

        # the phases of `tools` check memory accesses
        self.checks = {str(check): check for check in checks() if check.kind != "memory"}
        self.runners: dict[str, Any] = {}

    def sees_a_gpu(self) -> bool:
        """Whether the framework sees a GPU. If it does not, jax would run all items on the CPU, and they would pass."""
        return self.module.default_backend() == "gpu" if self.framework == "jax" else self.module.cuda.is_available()

    def facts(self) -> dict[str, Any]:
        if self.framework == "jax":
            return {"device": self.module.devices()[0].device_kind, "jax": self.module.__version__}
        gpu = self.device == "cuda"
        name = self.module.cuda.get_device_name() if gpu else "CPU"
        return {"device": name, "torch": self.module.__version__}

    def runner(self, backend: str) -> Any:
        """The suite's runner for a backend. On a CPU the CUDA kernels are emulated."""
        if backend not in self.runners:
            from ragged_attention.testing import cuda_emulator
            from ragged_attention.testing.runner import runner_for

            runner = runner_for(backend, self.framework, self.device)
            if backend == "cuda" and self.device == "cpu":
                if reason := cuda_emulator.missing():
                    raise RuntimeError(reason)
                runner = cuda_emulator.emulated(runner, "eager")
            if reason := runner.absent():
                raise RuntimeError(reason)
            self.runners[backend] = runner
        return self.runners[backend]

    def names(self, what: str) -> list[str]:
        if what == "smoke":
            return list(BACKENDS[self.framework])
        backend, kind = what.split()
        self.runner(backend)
        return [name for name, check in self.checks.items() if check.kind in KINDS[kind]]

    def run(self, what: str, name: str) -> dict[str, Any]:
        if what == "smoke":
            return self.smoke(name)
        return self.judged(what.split()[0], name)

    def judged(self, backend: str, name: str) -> dict[str, Any]:
        from ragged_attention.testing.verdicts import verdict_of

        verdict = verdict_of(self.runner(backend), self.checks[name], EXAMPLES)
        answer = {"result": verdict.result, "message": verdict.message, "answered": list(verdict.answered)}
        if self.compilations is not None:
            answer |= self.compilations.since_last()
        return answer

    def smoke(self, backend: str) -> dict[str, Any]:
        """Run the first check of the smoke test that the backend supports."""
        try:
            self.runner(backend)
        except RuntimeError as reason:
            return {"result": CANNOT, "message": str(reason)}
        answer: dict[str, Any] = {"result": CANNOT, "message": "declines all batches of the smoke test"}
        for name in self._smoke_checks():
            answer = self.judged(backend, name)
            if answer["result"] != DECLINED:
                return answer | {"message": f"{name}: {answer['message']}" if answer["result"] != PASSED else name}
        return answer

    def _smoke_checks(self) -> Iterator[str]:
        for part in SMOKE:
            yield from (name for name in self.checks if name.startswith(part))

    def settle(self) -> None:
        """Wait for the device, so that a kernel's fault shows before the next item begins."""
        if self.framework == "jax":
            self.module.effects_barrier()
            self.module.block_until_ready(self.module.numpy.zeros(1) + 1)
        elif self.device == "cuda":
            self.module.cuda.synchronize()


@dataclasses.dataclass
class Compilations:
    """The number of kernels that Triton compiled in this process, and of those that it found in its cache."""

    compiled: int = 0
    found: int = 0

    def __post_init__(self) -> None:
        if hasattr(importlib.import_module("triton"), "knobs"):
            importlib.import_module("triton").knobs.compilation.listener = self._note

    def _note(self, *, cache_hit: bool, **rest: Any) -> None:
        self.found += cache_hit
        self.compiled += not cache_hit

    def since_last(self) -> dict[str, int]:
        answer = {"compiled": self.compiled, "found_compiled": self.found}
        self.compiled = self.found = 0
        return {name: count for name, count in answer.items() if count}
