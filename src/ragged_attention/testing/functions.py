"""Run the suite on plain functions or commands, which get an operation's arguments by their public names.

A function gets NumPy, torch or jax arrays. NumPy arrays of bfloat16 and of 8-bit floats have the dtypes of `ml_dtypes`.
A command reads its arguments from one .npz file and writes its results to another.
"""

import contextlib
import dataclasses
import functools
import inspect
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ragged_attention.calls import CALLS, QUANTIZED
from ragged_attention.calls.base import NOWHERE
from ragged_attention.calls.paged import live_sequences
from ragged_attention.errors import Unsupported
from ragged_attention.testing.paged.specs import Arrays
from ragged_attention.testing.runner import (
    ANSWERED,
    ASKED,
    SAMPLES,
    Absent,
    Declined,
    Runner,
    Taken,
    as_given,
    written_by,
)

DECLINED_STATUS = 77  # exit status of a command that declines a batch; it commonly means a skipped test
RESULTS: Mapping[str, tuple[str, ...]] = {
    "ragged_paged_attention": ("out", "lse"),
    "ragged_mla_attention": ("out", "lse"),
    "varlen_attention": ("out", "lse"),
    "mla_decode": ("out", "lse"),
    "sparse_mla_prefill": ("out", "max_logits", "lse"),
    "merge_attention_states": ("out", "lse"),
    "norm_rope_write": ("q",),
    "latent_norm_rope_write": ("q",),
    "indexer_logits": ("logits",),
    "attention_target": ("target",),
    "indexer_logits_backward": ("d_q", "d_keys", "d_weights"),
    "indexer_topk": ("indices",),
    "top_k_indices": ("indices",),
    "block_scores": ("scores",),
    "select_blocks": ("blocks",),
    "top_k_blocks": ("blocks",),
    "quantize_kv": ("codes", "scales"),
    "dequantize_kv": ("values",),
    "quantize_indexer_keys": ("codes", "scales"),
    "quantize_mla_cache": ("cache",),
    "dequantize_mla_cache": ("kv",),
    "page_indices_to_slots": ("slots",),
}  # the names under which a command writes its results; any other operation has one result, `out`


class NumpyFront:
    """The front end for functions on NumPy arrays, with the interface of `torch_front` and `jax_front`."""

    @staticmethod
    def facts(device: str | None) -> Any:
        return SimpleNamespace(framework="numpy", platform=device or "cpu")

    @staticmethod
    def bring(array: NDArray[Any], dtype: str, *, layout: str, place: Any, device: str | None) -> NDArray[Any]:
        """A contiguous copy of an array, in memory that `place` allocates."""
        del layout, device
        if dtype in QUANTIZED:
            held = array.copy().view(_numpy_dtype(dtype))
        else:
            with np.errstate(over="ignore"):
                held = array.astype(_numpy_dtype(dtype))
        return place(np.ascontiguousarray(held).reshape(array.shape))

    @staticmethod
    def expand(array: NDArray[Any], axis: int) -> NDArray[Any]:
        """The array with a stride of 0 along an axis on which all slices are equal."""
        return np.broadcast_to(np.take(array, range(min(1, array.shape[axis])), axis), array.shape)

    @staticmethod
    def take_back(array: NDArray[Any]) -> NDArray[Any]:
        """The array with floats as float32 and 8-bit floats as their bits; integers stay unchanged."""
        if array.dtype.itemsize == 1 and array.dtype.kind not in "iub":
            return array.view(np.uint8)
        return array if array.dtype.kind in "iub" else array.astype(np.float32)

    @staticmethod
    @contextlib.contextmanager
    def careful() -> Iterator[None]:
        """Suppress NumPy's warnings, because functions may compute with infinities and NaN."""
        with np.errstate(all="ignore"):
            yield


def _numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


@dataclasses.dataclass(frozen=True)
class Command:
    """A program that reads one call from the .npz file `{input}` and writes its results to the .npz file `{output}`."""

    words: Sequence[str]
    operation: str
    timeout: float = 60.0  # seconds

    def __call__(self, **arguments: Any) -> Any:
        """The results of one run of the program.

        Raises `Unsupported` for exit status 77, AssertionError for any other failure.
        """
        with tempfile.TemporaryDirectory() as folder:
            places = {"input": str(Path(folder, "input.npz")), "output": str(Path(folder, "output.npz"))}
            np.savez(places["input"], **dict(_entries({"operation": self.operation, **arguments})))
            words = [_filled(word, {**places, "operation": self.operation}) for word in self.words]
            try:
                process = subprocess.run(words, capture_output=True, text=True, timeout=self.timeout, check=False)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"expected the command to end within {self.timeout:g} s") from None
            message = process.stderr.strip()[-2000:]
            if process.returncode == DECLINED_STATUS:
                raise Unsupported(message or f"exit status {DECLINED_STATUS}")
            if process.returncode:
                raise AssertionError(f"expected exit status 0, got {process.returncode}: {message}")
            if not Path(places["output"]).is_file():
                raise AssertionError(f"expected the command to write {{output}}, got no file: {message}")
            with np.load(places["output"]) as entries:
                return self._results(dict(entries))

    def _results(self, found: Mapping[str, NDArray[Any]]) -> Any:
        names = RESULTS.get(self.operation, ("out",))
        if (written := written_by(self.operation)) is not None:
            others = RESULTS[self.operation] if CALLS[self.operation].NUM_RESULTS else ()
            names = (*others, written, f"{written}.0", f"{written}.1")
        names = dict.fromkeys((*names, "max_logits"))
        results = tuple(_decoded(found, name) for name in names if name in found)
        if not results:
            raise AssertionError(f"expected {next(iter(names))} in the output, got {', '.join(found) or 'nothing'}")
        return results if len(results) > 1 else next(iter(results))


def _filled(word: str, places: Mapping[str, str]) -> str:
    for name, text in places.items():
        word = word.replace(f"{{{name}}}", text)
    return word


def _entries(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The entries of a command's input.

    A pair becomes two entries and a string becomes bytes. An array whose dtype NumPy lacks becomes its bits, with an
    entry for the dtype's name.
    """
    for name, value in arguments.items():
        if isinstance(value, tuple):
            yield from _entries({f"{name}.{index}": item for index, item in enumerate(value)})
        elif isinstance(value, str):
            yield name, np.bytes_(value)
        elif isinstance(value, np.ndarray) and value.dtype.kind not in "fiub":
            yield name, value.view(f"u{value.itemsize}")
            yield f"{name}.dtype", np.bytes_(value.dtype.name)
        else:
            yield name, np.asarray(value)


def _decoded(found: Mapping[str, NDArray[Any]], name: str) -> NDArray[Any]:
    """One array of a command's output, viewed in the dtype that its `.dtype` entry names, if there is one."""
    if (given := found.get(f"{name}.dtype")) is None:
        return found[name]
    text = given.item()
    return found[name].view(_numpy_dtype(text.decode() if isinstance(text, bytes) else text))


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """The parameters of a function; None if it has no signature, like some compiled functions."""
    try:
        return [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):
        return None


def accepted_by(function: Callable[..., Any]) -> frozenset[str] | None:
    """The names of the arguments that a function accepts; None if it accepts any, or if its parameters are unknown."""
    parameters = None if isinstance(function, Command) else parameters_of(function)
    if parameters is None or any(each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    return frozenset(each.name for each in parameters)


def positional_only(function: Callable[..., Any]) -> list[str]:
    """The names of required parameters that cannot be passed by keyword. The suite passes all arguments by keyword."""
    parameters = parameters_of(function) or []
    return [each.name for each in parameters if each.kind is each.POSITIONAL_ONLY and each.default is each.empty]


def record_of(operation: str, arguments: Mapping[str, Any]) -> Any:
    """The record of a batch's arguments, without validation."""
    cls = CALLS[operation]
    return cls.unchecked(**{**cls.DEFAULTS, **arguments}, device=NOWHERE)


def arguments_of(spec: Any, framework: str = "numpy", device: str | None = None) -> dict[str, Any]:
    """The arrays and numbers that a function under test gets for a spec such as `Spec(...)`, by argument name.

    Arrays have the dtypes and strides of the call: torch tensors are views with gaps if the spec has `strided=True`.
    Arguments at their default are left out. `framework` and `device` mean the same as for `judge`.
    """
    batch = spec.build()
    runner = FunctionRunner(
        framework=framework, backend="", device=device, functions={}, why_not=lambda operation, record: None
    )
    defaults = CALLS[batch.OPERATION].DEFAULTS if hasattr(batch, "OPERATION") else {}
    arguments = {name: value for name, value in batch.arguments().items() if value is not None}
    return {
        name: runner._bring(batch, name, value)
        for name, value in arguments.items()
        if name not in defaults or isinstance(value, np.ndarray | tuple) or value != defaults[name]
    }


def q_lens_of(record: Any) -> NDArray[np.int64]:
    """The number of queries of each live sequence."""
    count = getattr(record, "num_seqs", None)
    edges = record.cu_q_lens if count is None else record.cu_q_lens[: int(np.asarray(count).reshape(())) + 1]
    return np.diff(edges.astype(np.int64))


def _one_query_each(record: Any) -> bool:
    num_tokens = getattr(record, "num_tokens", None)
    return num_tokens is not None and np.array_equal(record.cu_q_lens, np.arange(num_tokens + 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FunctionRunner(Runner):
    """Runs plain functions, one for each operation, in place of a backend."""

    functions: Mapping[str, Callable[..., Any]]
    why_not: Callable[[str, Any], str | None]  # why to decline a record of NumPy arrays, or None
    declines: Callable[[str, Any], str | None] | None = None  # like `why_not`, which is called first
    features: Collection[str] | None = None  # the optional arguments of functions whose parameters are unknown
    contiguous: bool = False  # whether all arrays are contiguous, without strides of 0
    differentiable: bool = False  # whether the framework can differentiate the functions
    invariant: bool = False  # whether a sequence's results are promised to have the same bits in every batch
    not_returned: set[str] = dataclasses.field(default_factory=set)  # results that functions did not return

    notices_steps_outside = True  # keeps checks in this process, because a function cannot be sent to another one

    @property
    def front(self) -> Any:
        return NumpyFront if self.framework == "numpy" else super().front

    def absent(self) -> str | None:
        return None if self.framework == "numpy" else self._without_framework()

    def tunables(self, operation: str) -> tuple[str, ...]:
        del operation
        return ()

    def expect_promise(self, operation: str) -> None:
        self._function(operation)
        if not self.invariant:
            raise Absent(f"{self.backend} does not offer batch invariance")

    def _expect_offered(self, operation: str) -> None:
        self._function(operation.removesuffix("_backward"))
        if not self.differentiable:
            raise Absent(f"{self.backend} does not offer {operation}")

    def _function(self, operation: str) -> Callable[..., Any]:
        if operation not in self.functions:
            raise Absent(f"{self.backend} does not offer {operation}")
        return self.functions[operation]

    def _accepted(self, operation: str) -> frozenset[str] | None:
        """The names of the arguments that an operation's function accepts; None if it accepts any."""
        accepted = accepted_by(self.functions[operation])
        if accepted is None and self.features is not None:
            return frozenset({*CALLS[operation].KINDS} - {*CALLS[operation].DEFAULTS} | {*self.features})
        return accepted

    def _refuses(self, operation: str) -> str | None:
        try:
            self._call(operation, SAMPLES[operation].build(), None)
        except Declined as refusal:
            return str(refusal)
        except Exception:  # a failure is not a refusal; the checks will report it
            return None
        return None

    def _call(
        self, operation: str, batch: Arrays, options: Any, *, through: Callable[..., Any] | None = None, **extra: Any
    ) -> Any:
        function = self._function(operation)
        if options:
            raise Declined("a function has no options")
        if self.contiguous:
            batch = batch.change(strided=False, expanded={})
        accepted = self._accepted(operation)
        arguments = batch.arguments()
        if isinstance(arguments.get("num_seqs"), int) and accepted is not None and "num_seqs" not in accepted:
            arguments = live_sequences(arguments)
        in_numpy = dataclasses.replace(self, framework="numpy", place=as_given)
        record = record_of(operation, {name: in_numpy._bring(batch, name, value) for name, value in arguments.items()})
        if reason := self.why_not(operation, record):
            raise Declined(reason)
        names = self._passed(record, accepted, extra)
        # This refusal comes last, because it may depend on values, which the search in `steering` cannot choose.
        if self.declines and (reason := self.declines(operation, record)):
            raise Declined(reason)
        if ASKED.get():
            raise Taken
        passed = {name: self._bring(batch, name, arguments[name]) for name in names if name in arguments}
        passed |= {name: value for name, value in extra.items() if name in names}

        def call(**passed: Any) -> Any:
            result = function(**passed)
            if through is not None:
                self._expect_differentiable(result, extra)
            return self._completed(batch, result, record, extra)

        try:
            with self.front.careful():
                if through is not None:
                    result = through(call, passed)
                elif (written := written_by(operation)) is not None:
                    result = function(**passed)
                    *others, pages = result if CALLS[operation].NUM_RESULTS else (result,)
                    pages = passed[written] if pages is None else pages
                    arrays = [*others, *(pages if isinstance(pages, tuple | list) else [pages])]
                    result = [*map(self.front.take_back, arrays)]
                else:
                    result = call(**passed)
        except (Unsupported, NotImplementedError) as refusal:
            raise Declined(str(refusal) or type(refusal).__name__) from None
        ANSWERED.add((operation, self.backend))
        return result

    def _passed(self, record: Any, accepted: frozenset[str] | None, extra: Mapping[str, Any]) -> list[str]:
        """The names of the arguments to pass: those without a default, and those whose value is not the default.

        Raises `Declined` if the function does not accept one of them, except those that are not needed in this call.
        """
        changed = {*record.changed(), *(name for name, value in extra.items() if value is not False)} - {"schedule"}
        names = [name for name in record.KINDS if name not in record.DEFAULTS or name in changed]
        names += [name for name in ("return_lse",) if name in changed and name not in record.KINDS]
        if accepted is None:
            return names
        silent = {"return_lse"} | {name for name in names if name in record.KINDS and record.KINDS[name].hint}
        if "cu_q_lens" in names and _one_query_each(record):
            silent.add("cu_q_lens")  # it is 0, 1, 2, ..., which a decode kernel does not need
        if missing := [name for name in names if name not in accepted | silent]:
            raise Declined(f"{self.backend} does not take {missing[0]}")
        if "new_kv" in names and "return_lse" not in accepted:
            raise Declined(f"{self.backend} takes new_kv without return_lse, which the checks of updates need")
        return [name for name in names if name in accepted]

    def _expect_differentiable(self, result: Any, extra: Mapping[str, Any]) -> None:
        """Raise `Declined` if a result cannot be differentiated, because it is missing or depends on no argument."""
        first, *others = result if isinstance(result, tuple | list) else (result,)
        if extra.get("return_lse") and not others:
            raise Declined(f"{self.backend} returns no lse that could be differentiated")
        if self.framework == "torch" and not first.requires_grad:
            raise Declined(f"{self.backend} returns a result that depends on no argument")

    @staticmethod
    def _expect_results(result: Any, names: Sequence[str]) -> None:
        """Raise AssertionError unless the function returned one value per name; several must be a tuple or a list."""
        count = len(result) if isinstance(result, tuple | list) else 1
        if len(names) > 1 and count != len(names):
            kind = f"{count} results" if isinstance(result, tuple | list) else type(result).__name__
            raise AssertionError(f"expected the function to return {' and '.join(names)}, got {kind}")

    def _completed(self, batch: Any, result: Any, record: Any, extra: Mapping[str, Any]) -> Any:
        """The function's results; for an attention call, the reference's results replace missing ones.

        So every check of `out` also applies to a function that returns only `out`.
        """
        operation = record.OPERATION
        names = RESULTS.get(operation, ("out",))
        if result is None:
            raise AssertionError(f"expected the function to return {' and '.join(names)}, got None")
        if not hasattr(batch, "expected"):  # not an attention call
            self._expect_results(result, names)
            return result
        several = extra.get("return_lse") or operation in ("mla_decode", "sparse_mla_prefill")
        names = RESULTS[operation] if several else ("out",)
        if extra.get("return_max_logits"):
            names = (*names, "max_logits")
            self._expect_results(result, names)
        results = tuple(result) if isinstance(result, tuple | list) else (result,)
        if "new_kv" not in extra:  # with `new_kv`, the function also returns the cache
            results = results[: len(names)]
        if len(results) >= len(names):
            return results if len(results) > 1 else next(iter(results))
        self.not_returned.update(f"{name} of {operation}" for name in names[len(results) :])
        rest = [np.asarray(array, np.float32) for array in batch.expected()[len(results) : len(names)]]
        bring = functools.partial(self.front.bring, dtype="float32", layout="", place=as_given, device=self.device)
        return (*results, *map(bring, rest))
