"""Runners: they call a backend through a front end, with NumPy arrays in and out."""

import collections
import contextlib
import contextvars
import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from ragged_attention import dispatch, tuning
from ragged_attention.calls import CALLS, DecodeSchedule
from ragged_attention.errors import BackendMissing, InvalidInput, TooLarge, Unsupported
from ragged_attention.testing import formats, steering
from ragged_attention.testing.collecting import SCALE_PAGES, written_arrays
from ragged_attention.testing.mla.cache_specs import LatentWriteBatch, ScheduleBatch
from ragged_attention.testing.mla.specs import DecodeSpec, PrefillSpec, as_it_is, at_tuned_widths, fitting
from ragged_attention.testing.paged.specs import Arrays, Batch, Pages, Spec, WriteBatch, like_pages, pages_of
from ragged_attention.testing.varlen.gradients import DIFFERENTIABLE, BackwardBatch, GradientBatch, Gradients
from ragged_attention.testing.varlen.specs import VarlenSpec
from ragged_attention.tools.samples import FakeArray, sample_of

HeadsFirstPages = (
    NDArray[Any] | tuple[NDArray[Any], NDArray[Any]]
)  # the stored pages, or a pair of pages and their scales
FRAMEWORKS = ("torch", "jax")
# Small calls of attention operations; all other operations use the calls of `tools.samples`. A backend that takes any
# of these calls can run here.
SAMPLES = {
    "ragged_paged_attention": Spec(lens=((1, 1),)),
    "sparse_mla_prefill": PrefillSpec(tokens=1),
    "mla_decode": DecodeSpec(topk=0),
    "varlen_attention": VarlenSpec(lens=((1, 1),)),
}

# (operation, backend) of each call that has returned results. It shows what a run has tested.
ANSWERED: set[tuple[str, str]] = set()
# True inside `asking`, for runners that do not call their backend through `dispatch`.
ASKED: contextvars.ContextVar[bool] = contextvars.ContextVar("asked", default=False)
# The number of declined batches for each reason, since the current check began.
DECLINED: collections.Counter[str] = collections.Counter()


def written_by(operation: str) -> str | None:
    """The name of the argument that an operation writes and returns, or None."""
    return next((name for name, kind in CALLS[operation].KINDS.items() if kind.written), None)


class Declined(Exception):
    """Raised if the backend declines a batch, which is not an error; the text is its reason."""


class Absent(Declined):
    """Raised if the backend does not offer the operation at all."""


class Taken(BaseException):
    """Raised inside `asking` if the backend takes the call. It is a BaseException, so that no handler hides it."""


@contextlib.contextmanager
def asking() -> Iterator[None]:
    """Inside this context, a call that a backend takes raises `Taken` and does not run."""

    def run(*_: Any) -> Any:
        raise Taken

    token = ASKED.set(True)
    try:
        with mock.patch.object(dispatch.Choice, "run", run):
            yield
    finally:
        ASKED.reset(token)


def first_refusal(message: str) -> str:
    """The first backend's line in a refusal that lists the reasons of several backends, else the text's first line."""
    first, _, rest = message.partition("\n")
    return (rest.partition("\n")[0] or first).strip()


def reason_of(refusal: Exception) -> str:
    """The first backend's reason in a refusal, without the backend's name."""
    line = first_refusal(str(refusal))
    return line.partition(": ")[2] or line if "\n" in str(refusal) else line


def as_given(array: NDArray[Any]) -> NDArray[Any]:
    return array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runner:
    """Runs the suite's calls on one backend, through one front end, on one device."""

    notices_steps_outside: ClassVar[bool] = False  # if False, accesses outside arrays must be tested in another process

    framework: str
    backend: str
    device: str | None = None
    place: Callable[[NDArray[Any]], NDArray[Any]] = as_given  # returns an array in memory for torch tensors on the host
    rounded_weights: bool = False  # whether softmax weights may be rounded to 16 bits
    strided_only: frozenset[str] | None = None  # the arguments that may be views with gaps; None: all

    def __str__(self) -> str:
        return f"{self.framework}-{self.backend}"

    @property
    def front(self) -> Any:
        return importlib.import_module(f"ragged_attention.testing.{self.framework}_front")

    def run(self, operation: str, batch: Arrays, *, options: Mapping[str, Any] | None = None, **keywords: Any) -> Any:
        """The results of an operation on a batch, as a NumPy array or a tuple of them.

        If the operation writes one of its arguments, the updated argument follows the other results. `keywords` are
        further arguments that are passed unchanged: flags, or objects that an earlier call returned.
        """
        result = self._call(operation, batch, options, **keywords)
        if (written := written_by(operation)) is None:
            return self._take_back(result)
        arguments, count = batch.arguments(), CALLS[operation].NUM_RESULTS or 0
        arrays = zip(result[count:], written_arrays(arguments, written), strict=True)
        stored = [array.view(pages.dtype) for array, pages in arrays]
        cache = like_pages(arguments[written], stored)
        if any(arguments.get(name) is not None for name in SCALE_PAGES):
            scales = iter(stored[len(pages_of(arguments[written])) :])
            return cache, *(None if arguments[name] is None else next(scales) for name in SCALE_PAGES)
        return (*result[:count], cache) if count else cache

    def update(
        self, batch: Batch, new: WriteBatch, *, options: Mapping[str, Any] | None = None
    ) -> tuple[NDArray[Any], NDArray[Any], Pages]:
        """Out, lse and the written pages of an attention call that also writes the K and V of `new`."""
        pair = tuple(self._bring(new, name, getattr(new, name)) for name in ("k", "v"))
        return self.run("ragged_paged_attention", batch, options=options, return_lse=True, new_kv=pair)

    def update_latents(self, batch: Arrays, new: LatentWriteBatch) -> tuple[Any, Any, NDArray[Any]]:
        """Out, lse and the written cache of a latent attention call that also writes the rows of `new`."""
        kv, cache = (self._bring(new, name, getattr(new, name)) for name in ("kv", "cache"))
        extra = {"return_lse": True, "new_kv": kv, "kv_cache": cache}
        out, lse, written = self.run("ragged_mla_attention", batch, **extra)
        return out, lse, written.view(new.cache.dtype)

    def gradients(self, batch: GradientBatch) -> Gradients:
        """A call's out and lse, and its gradients from the framework's automatic differentiation."""
        forward, names = batch.forward, batch.differentiated
        self._expect_offered(f"{batch.operation}_backward")
        whole = batch.backward(np.empty(0), np.empty(0))
        towards = {name: self._bring(whole, f"d_{name}", getattr(batch, f"d_{name}")) for name in ("out", "lse")}

        def differentiate(call: Callable[..., Any], arguments: dict[str, Any]) -> Any:
            return self.front.differentiate(call, arguments, names, towards["out"], towards["lse"])

        # Without a gradient of lse, call `varlen_attention` with return_lse=False, so that this path is tested too.
        with_lse = batch.d_lse is not None
        extra = {"return_lse": with_lse} if batch.operation == "varlen_attention" else {}
        results, gradients = self._call(batch.operation, forward, None, through=differentiate, **extra)
        ANSWERED.add((f"{batch.operation}_backward", self.backend))
        if extra and not with_lse:
            results = results, self._call(batch.operation, forward, None, return_lse=True)[1]
        out, lse = (self.front.take_back(results[index]) for index in (0, -1))
        return Gradients(out, lse, dict(zip(names, map(self.front.take_back, gradients), strict=True)))

    def backward(self, batch: BackwardBatch, *, options: Mapping[str, Any] | None = None) -> dict[str, NDArray[Any]]:
        """The gradients from the backward operation, by the names of their arguments."""
        gradients = self._call(f"{batch.forward.OPERATION}_backward", batch, options)
        arguments = batch.forward.arguments()
        names = [name for name in DIFFERENTIABLE if arguments.get(name) is not None]
        return dict(zip(names, [self.front.take_back(array) for array in gradients if array is not None], strict=True))

    def schedule(self, batch: ScheduleBatch) -> DecodeSchedule:
        """A schedule from the front end's `make_decode_schedule`, which `mla_decode` accepts."""
        where: dict[str, Any] = {"device": self.device} if self.framework == "torch" else {}
        return self._call("make_decode_schedule", batch, None, **where)

    def _call(
        self, operation: str, batch: Arrays, options: Any, *, through: Callable[..., Any] | None = None, **extra: Any
    ) -> Any:
        """The front end's results. `through`, if given, makes the call: it gets the function and its arguments."""
        arguments = {name: self._bring(batch, name, value) for name, value in batch.arguments().items()}
        function = getattr(self.front.operations, operation)

        def call(**arguments: Any) -> Any:
            return function(**arguments | extra, backend=self.backend, options=options or None)

        try:
            with self.front.careful():
                if through is not None:
                    result = through(call, arguments)
                elif written := written_by(operation):
                    result = self.front.write(call, arguments, written, CALLS[operation].NUM_RESULTS or 0)
                else:
                    result = call(**arguments)
        except BackendMissing as missing:
            raise Absent(str(missing)) from None
        except Unsupported as refusal:
            raise Declined(str(refusal)) from None
        except TooLarge as refusal:
            if not options:  # the backend's own choice of options must fit
                raise
            raise Declined(str(refusal)) from None
        ANSWERED.add((operation, self.backend))
        return result

    def _expect_offered(self, operation: str) -> None:
        """Raise `Absent` if the backend lacks an operation, because another backend would silently replace it."""
        try:
            dispatch.load(operation, self.backend)
        except BackendMissing as missing:
            raise Absent(str(missing)) from None

    def expect_promise(self, operation: str) -> None:
        """Raise `Absent` unless the backend promises `batch_invariant` for an operation."""
        self._expect_offered(operation)
        if not hasattr(dispatch.load(operation, self.backend), "invariant_tile"):
            raise Absent(f"{self.backend} does not promise batch_invariant for {operation}")

    def _take_back(self, result: Any) -> Any:
        if isinstance(result, tuple | list):
            return tuple(map(self._take_back, result))
        return self.front.take_back(result) if hasattr(result, "shape") else result

    def _bring(self, batch: Arrays, name: str, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self._bring(batch, name, item) for item in value)
        if not isinstance(value, np.ndarray):
            return value
        dtype = batch.dtype_of(name, value)
        if dtype in formats.FORMATS and value.dtype == np.float32:
            value = formats.stored(value, dtype)
        strided = batch.strided and (self.strided_only is None or name in self.strided_only)
        layout = batch.layout_of(name) if strided else ""
        array = self.front.bring(value, dtype, layout=layout, place=self.place, device=self.device)
        return self.front.expand(array, batch.expanded[name]) if name in batch.expanded else array

    def tunables(self, operation: str) -> tuple[str, ...]:
        """The options that the backend takes for an operation; none if it lacks the operation."""
        try:
            return tuning.options_of(dispatch.load(operation, self.backend).Tile)
        except BackendMissing:
            return ()

    def absent(self) -> str | None:
        """The reason why this runner can run nothing here, or None."""
        if reason := self._without_framework():
            return reason
        with self.around():
            reasons = [self._refuses(operation) for operation in (*SAMPLES, *(CALLS.keys() - SAMPLES.keys()))]
            if None in reasons:
                return None
            offered = [text for text in reasons if text and "does not offer" not in text]
            if offered and any(map(self._takes_some, CALLS)):
                return None
        return offered[0] if offered else reasons[0]

    def _without_framework(self) -> str | None:
        """The reason why the framework or the device cannot be used here, or None."""
        if importlib.util.find_spec(self.framework) is None:
            return dispatch.missing_package(self.framework)
        return self.front.unusable(self.device) if self.framework == "torch" and self.device else None

    def _takes_some(self, operation: str) -> bool:
        """Whether the backend takes any call of an operation, even if with one dtype and one page size only."""
        try:
            features = dispatch.load(operation, self.backend).FEATURES
        except BackendMissing:
            return False
        device, sample = self.front.facts(self.device), sample_of(operation)
        kinds = CALLS[operation].KINDS.items()
        arguments: dict[str, Any] = {
            name: None for name, kind in kinds if getattr(kind, "optional", False) and name not in features
        }
        if "slot_mapping" in features and "page_indices" in arguments:  # slots replace the page tables
            arguments["slot_mapping"] = FakeArray((sample.num_tokens,), "int32")

        def ask(other: Any) -> str | None:
            try:
                return dispatch.refusal(self.backend, other.call(operation, device, **arguments))
            except (InvalidInput, TypeError) as error:  # the fields contradict each other
                return str(error)

        return steering.find_taken(sample, [sample], ask) is not None

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """A context for running checks, in which latents have widths that the backend takes."""
        with fitting(at_tuned_widths if self._narrow else as_it_is):
            yield

    @functools.cached_property
    def _narrow(self) -> bool:
        """Whether the backend only takes latents with the widths of real models."""
        if self._refuses("mla_decode") is None:
            return False
        with fitting(at_tuned_widths):
            return self._refuses("mla_decode") is None

    def overlapping(self) -> contextlib.AbstractContextManager[None]:
        """A context in which sequences may share rows, so that it is undefined whose result these rows get."""
        return contextlib.nullcontext()

    def as_arguments(self) -> Sequence[str]:
        """Command-line arguments from which a separate process recreates this runner."""
        device = ["--device", self.device] if self.device else []
        return ["--backend", self.backend, "--framework", self.framework, *device]

    def _refuses(self, operation: str) -> str | None:
        device = self.front.facts(self.device)
        if operation in SAMPLES:
            on_host, batch = dataclasses.replace(self, device=None), SAMPLES[operation].build()
            arguments = {name: on_host._bring(batch, name, value) for name, value in batch.arguments().items()}
            call = CALLS[operation](**arguments, device=device)  # type: ignore[call-arg]
        else:
            call = sample_of(operation).call(operation, device)
        try:
            return dispatch.refusal(self.backend, call)
        except BackendMissing as missing:
            return str(missing)


def runner_for(backend: str, framework: str, device: str | None = None) -> Runner:
    """A runner of `backend` through `framework`, on a torch device such as "cuda" (default: the CPU)."""
    if framework not in FRAMEWORKS:
        raise ValueError(f"expected framework to be one of {', '.join(FRAMEWORKS)}, got {framework!r}")
    return Runner(framework=framework, backend=backend, device=device)


def runners(backend: str | None, framework: str | None, device: str | None) -> tuple[list[Runner], dict[str, str]]:
    """The matching runners that can run here, and the reason why each other runner cannot. None matches any name."""
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
