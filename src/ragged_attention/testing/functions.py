"""A plain function, or a command, as the suite sees it: called with an operation's arguments by their public names.

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

DECLINED_STATUS = 77  # the exit status of a command that does not take a batch, as test programs skip elsewhere
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
}  # the names under which a command writes its results; an operation that is not listed has one, `out`


class NumpyFront:
    """NumPy batches as a function on NumPy arrays gets them; what `torch_front` and `jax_front` do for theirs."""

    @staticmethod
    def facts(device: str | None) -> Any:
        return SimpleNamespace(framework="numpy", platform=device or "cpu")

    @staticmethod
    def bring(array: NDArray[Any], dtype: str, *, layout: str, place: Any, device: str | None) -> NDArray[Any]:
        """A copy of one array, in memory that `place` lays out, without gaps."""
        del layout, device
        if dtype in QUANTIZED:
            held = array.copy().view(_numpy_dtype(dtype))
        else:
            with np.errstate(over="ignore"):
                held = array.astype(_numpy_dtype(dtype))
        return place(np.ascontiguousarray(held).reshape(array.shape))

    @staticmethod
    def once(array: NDArray[Any], axis: int) -> NDArray[Any]:
        """The array with a stride of 0 along an axis over which it is alike."""
        return np.broadcast_to(np.take(array, range(min(1, array.shape[axis])), axis), array.shape)

    @staticmethod
    def take_back(array: NDArray[Any]) -> NDArray[Any]:
        """Floats as float32, 8-bit floats as bits, integers as they are."""
        if array.dtype.itemsize == 1 and array.dtype.kind not in "iub":
            return array.view(np.uint8)
        return array if array.dtype.kind in "iub" else array.astype(np.float32)

    @staticmethod
    @contextlib.contextmanager
    def careful() -> Iterator[None]:
        """A function may compute with infinities and NaN, whose warnings say nothing."""
        with np.errstate(all="ignore"):
            yield


def _numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


@dataclasses.dataclass(frozen=True)
class Command:
    """A program that reads one call from `{input}`, an .npz file, and writes its results to `{output}`, another."""

    words: Sequence[str]
    operation: str
    timeout: float = 60.0  # seconds

    def __call__(self, **arguments: Any) -> Any:
        """Run the program once. Raises `Unsupported` for exit status 77, AssertionError for any other failure."""
        with tempfile.TemporaryDirectory() as folder:
            places = {"input": str(Path(folder, "input.npz")), "output": str(Path(folder, "output.npz"))}
            np.savez(places["input"], **dict(_entries({"operation": self.operation, **arguments})))
            words = [_filled(word, {**places, "operation": self.operation}) for word in self.words]
            try:
                ended = subprocess.run(words, capture_output=True, text=True, timeout=self.timeout, check=False)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"expected the command to end within {self.timeout:g} s") from None
            said = ended.stderr.strip()[-2000:]
            if ended.returncode == DECLINED_STATUS:
                raise Unsupported(said or f"exit status {DECLINED_STATUS}")
            if ended.returncode:
                raise AssertionError(f"expected exit status 0, got {ended.returncode}: {said}")
            if not Path(places["output"]).is_file():
                raise AssertionError(f"expected the command to write {{output}}, got no file: {said}")
            with np.load(places["output"]) as found:
                return self._results(dict(found))

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
    """The entries of a command's input: pairs as two, strings as bytes, foreign dtypes as bits beside their names."""
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
    """One array of a command's output, bits in the dtype that is named beside them."""
    if (given := found.get(f"{name}.dtype")) is None:
        return found[name]
    text = given.item()
    return found[name].view(_numpy_dtype(text.decode() if isinstance(text, bytes) else text))


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """The parameters of a function; None if it does not tell, as compiled functions need not."""
    try:
        return [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):
        return None


def accepted_by(function: Callable[..., Any]) -> frozenset[str] | None:
    """The names of the arguments that a function accepts; None if it accepts any, or does not say."""
    parameters = None if isinstance(function, Command) else parameters_of(function)
    if parameters is None or any(each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    return frozenset(each.name for each in parameters)


def positional_only(function: Callable[..., Any]) -> list[str]:
    """The names of the parameters that a function does not take by keyword, as all arguments are given."""
    parameters = parameters_of(function) or []
    return [each.name for each in parameters if each.kind is each.POSITIONAL_ONLY and each.default is each.empty]


def record_of(operation: str, arguments: Mapping[str, Any]) -> Any:
    """The record of a batch's arguments, which nothing has checked."""
    cls = CALLS[operation]
    return cls.unchecked(**{**cls.DEFAULTS, **arguments}, device=NOWHERE)


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
    """Plain functions, one for each operation, in place of a backend."""

    functions: Mapping[str, Callable[..., Any]]
    why_not: Callable[[str, Any], str | None]  # the reason to decline a batch, by its record of NumPy arrays
    declines: Callable[[str, Any], str | None] | None = None  # likewise, asked about what is not declined before
    features: Collection[str] | None = None  # the optional arguments of functions that do not tell
    contiguous: bool = False  # whether arrays come without gaps and strides of 0
    differentiable: bool = False  # whether the framework can differentiate the functions
    invariant: bool = False  # whether results of a sequence promise to have the same bits in every batch
    not_returned: set[str] = dataclasses.field(default_factory=set)  # results that no function returned

    notices_steps_outside = True  # there is no process that could be started apart with the function

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
        """The names of the arguments that a function accepts; None if it accepts any."""
        accepted = accepted_by(self.functions[operation])
        if accepted is None and self.features is not None:
            return frozenset({*CALLS[operation].KINDS} - {*CALLS[operation].DEFAULTS} | {*self.features})
        return accepted

    def _refuses(self, operation: str) -> str | None:
        try:
            self._call(operation, SAMPLES[operation].build(), None)
        except Declined as refusal:
            return str(refusal)
        except Exception:  # a function that fails is judged, so it has not refused
            return None
        return None

    def _call(
        self, operation: str, batch: Arrays, options: Any, *, through: Callable[..., Any] | None = None, **extra: Any
    ) -> Any:
        function = self._function(operation)
        if options:
            raise Declined("a function has no options")
        if self.contiguous:
            batch = batch.change(strided=False, alike={})
        accepted = self._accepted(operation)
        arguments = batch.arguments()
        if isinstance(arguments.get("num_seqs"), int) and accepted is not None and "num_seqs" not in accepted:
            arguments = live_sequences(arguments)
        in_numpy = dataclasses.replace(self, framework="numpy", place=as_given)
        record = record_of(operation, {name: in_numpy._bring(batch, name, value) for name, value in arguments.items()})
        if reason := self.why_not(operation, record):
            raise Declined(reason)
        names = self._passed(record, accepted, extra)
        if self.declines and (reason := self.declines(operation, record)):  # last, as it may depend on values
            raise Declined(reason)
        if ASKED.get():
            raise Taken
        given = {name: self._bring(batch, name, arguments[name]) for name in names if name in arguments}
        given |= {name: value for name, value in extra.items() if name in names}

        def call(**given: Any) -> Any:
            result = function(**given)
            if through is not None:
                self._expect_differentiable(result, extra)
            return self._completed(batch, result, record, extra)

        try:
            with self.front.careful():
                if through is not None:
                    result = through(call, given)
                elif (written := written_by(operation)) is not None:
                    result = function(**given)
                    *others, pages = result if CALLS[operation].NUM_RESULTS else (result,)
                    pages = given[written] if pages is None else pages
                    arrays = [*others, *(pages if isinstance(pages, tuple | list) else [pages])]
                    result = [*map(self.front.take_back, arrays)]
                else:
                    result = call(**given)
        except (Unsupported, NotImplementedError) as refusal:
            raise Declined(str(refusal) or type(refusal).__name__) from None
        ANSWERED.add((operation, self.backend))
        return result

    def _passed(self, record: Any, accepted: frozenset[str] | None, extra: Mapping[str, Any]) -> list[str]:
        """The names of the arguments that the function gets: those without a default, and those not at theirs.

        Raises `Declined` for one that the function does not accept, unless it says nothing in this call.
        """
        changed = {*record.changed(), *(name for name, value in extra.items() if value is not False)} - {"schedule"}
        names = [name for name in record.KINDS if name not in record.DEFAULTS or name in changed]
        names += [name for name in ("return_lse",) if name in changed and name not in record.KINDS]
        if accepted is None:
            return names
        silent = {"return_lse"} | {name for name in names if name in record.KINDS and record.KINDS[name].hint}
        if "cu_q_lens" in names and _one_query_each(record):
            silent.add("cu_q_lens")  # one query for each sequence, as a decode kernel expects
        if missing := [name for name in names if name not in accepted | silent]:
            raise Declined(f"{self.backend} does not take {missing[0]}")
        if "new_kv" in names and "return_lse" not in accepted:
            raise Declined(f"{self.backend} takes new_kv without return_lse, which the checks of updates need")
        return [name for name in names if name in accepted]

    def _expect_differentiable(self, result: Any, extra: Mapping[str, Any]) -> None:
        """Raise `Declined` if a result has no gradient, because it is missing or depends on no argument."""
        first, *others = result if isinstance(result, tuple | list) else (result,)
        if extra.get("return_lse") and not others:
            raise Declined(f"{self.backend} returns no lse that could be differentiated")
        if self.framework == "torch" and not first.requires_grad:
            raise Declined(f"{self.backend} returns a result that depends on no argument")

    @staticmethod
    def _expect_results(result: Any, names: Sequence[str]) -> None:
        """Raise AssertionError unless the function returned all of several results, in a tuple or a list."""
        count = len(result) if isinstance(result, tuple | list) else 1
        if len(names) > 1 and count != len(names):
            kind = f"{count} results" if isinstance(result, tuple | list) else type(result).__name__
            raise AssertionError(f"expected the function to return {' and '.join(names)}, got {kind}")

    def _completed(self, batch: Any, result: Any, record: Any, extra: Mapping[str, Any]) -> Any:
        """The results of an attention; those that the function did not return are the definition's.

        So a function that returns `out` alone is judged by every check of `out`.
        """
        operation = record.OPERATION
        names = RESULTS.get(operation, ("out",))
        if result is None:
            raise AssertionError(f"expected the function to return {' and '.join(names)}, got None")
        if not hasattr(batch, "expected"):  # no attention
            self._expect_results(result, names)
            return result
        several = extra.get("return_lse") or operation in ("mla_decode", "sparse_mla_prefill")
        names = RESULTS[operation] if several else ("out",)
        if extra.get("return_max_logits"):
            names = (*names, "max_logits")
            self._expect_results(result, names)
        results = tuple(result) if isinstance(result, tuple | list) else (result,)
        if "new_kv" not in extra:  # where the cache is returned as well
            results = results[: len(names)]
        if len(results) >= len(names):
            return results if len(results) > 1 else next(iter(results))
        self.not_returned.update(f"{name} of {operation}" for name in names[len(results) :])
        rest = [np.asarray(array, np.float32) for array in batch.expected()[len(results) : len(names)]]
        bring = functools.partial(self.front.bring, dtype="float32", layout="", place=as_given, device=self.device)
        return (*results, *map(bring, rest))
