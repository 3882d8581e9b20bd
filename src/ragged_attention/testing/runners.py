"""A backend as the suite sees it: called through a front end, NumPy in and NumPy out."""

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragged_attention import dispatch
from ragged_attention.calls import CALLS
from ragged_attention.errors import BackendMissing, Unsupported
from ragged_attention.testing.batches import Arrays, Batch, MergeBatch, Pages, Spec, WriteBatch, like_pages

FRAMEWORKS = ("torch", "jax")


class Declined(Exception):
    """The backend does not take this batch, which is no error; the text is its reason."""


def as_given(array: NDArray[Any]) -> NDArray[Any]:
    return array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runner:
    """One backend, through one front end, on one device."""

    framework: str
    backend: str
    device: str | None = None
    place: Callable[[NDArray[Any]], NDArray[Any]] = as_given  # where torch's host arrays lie

    def __str__(self) -> str:
        return f"{self.framework}-{self.backend}"

    @property
    def front(self) -> Any:
        return importlib.import_module(f"ragged_attention.testing.{self.framework}_front")

    def attention(
        self, batch: Batch, *, options: Mapping[str, Any] | None = None, return_lse: bool = True
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Out and lse of a batch; without `return_lse` the second is empty."""
        result = self._call("ragged_paged_attention", batch, options, return_lse=return_lse)
        out, lse = result if return_lse else (result, None)
        return self.front.take_back(out), np.empty(0) if lse is None else self.front.take_back(lse)

    def write(self, batch: WriteBatch) -> Pages:
        """The pages after a write, as they are stored."""
        return like_pages(batch.kv_pages, self._call("write_kv_pages", batch, None))

    def merge(self, batch: MergeBatch) -> tuple[NDArray[Any], NDArray[Any]]:
        out, lse = self._call("merge_attention_states", batch, None)
        return self.front.take_back(out), self.front.take_back(lse)

    def _call(self, operation: str, batch: Arrays, options: Any, **extra: Any) -> Any:
        arguments = {name: self._bring(batch, name, value) for name, value in batch.arguments().items()}
        function = getattr(self.front.operations, operation)

        def call(**arguments: Any) -> Any:
            return function(**arguments, **extra, backend=self.backend, options=options)

        try:
            with self.front.careful():
                return self.front.write(call, arguments) if operation == "write_kv_pages" else call(**arguments)
        except Unsupported as refusal:
            raise Declined(str(refusal)) from None

    def _bring(self, batch: Arrays, name: str, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self._bring(batch, name, item) for item in value)
        if not isinstance(value, np.ndarray):
            return value
        dtype = batch.dtype_of(name, value)
        strided = batch.strided  # type: ignore[attr-defined]
        return self.front.bring(name, value, dtype, strided=strided, place=self.place, device=self.device)

    def tunables(self, operation: str) -> tuple[str, ...]:
        """The options that the backend takes for an operation."""
        return tuple(field.name for field in dataclasses.fields(dispatch.load(operation, self.backend).Tile))

    def absent(self) -> str | None:
        """Why nothing can be run here, or None."""
        if importlib.util.find_spec(self.framework) is None:
            return f"{self.framework} is not installed"
        batch = Spec(lens=((1, 1),)).build()
        call = CALLS["ragged_paged_attention"](**batch.arguments(), device=self.front.facts(self.device))  # type: ignore[call-arg]
        try:
            return dispatch.load("ragged_paged_attention", self.backend).why_not(call)
        except BackendMissing as missing:
            return str(missing)


def runner_for(backend: str, framework: str, device: str | None = None) -> Runner:
    """`backend` called through the front end of `framework`, on a torch device such as "cuda" (default: the CPU)."""
    if framework not in FRAMEWORKS:
        raise ValueError(f"expected framework to be one of {', '.join(FRAMEWORKS)}, got {framework!r}")
    return Runner(framework=framework, backend=backend, device=device)


def runners(backend: str | None, framework: str | None, device: str | None) -> tuple[list[Runner], dict[str, str]]:
    """Every runner that the names allow, and why the others cannot run here."""
    present: list[Runner] = []
    absent: dict[str, str] = {}
    for name in (backend,) if backend else dispatch.backends():
        for through in (framework,) if framework else FRAMEWORKS:
            runner = runner_for(name, through, device)
            if reason := runner.absent():
                absent[str(runner)] = reason
            else:
                present.append(runner)
    return present, absent
