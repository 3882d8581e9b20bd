"""The interface that the cases of all families share. Each family has its own file in this folder.

A case is a sample whose sizes follow from the lengths of its sequences. The sizes give a floor: the bytes that any
implementation must move (each needed byte once) and the operations that it must do (those that no mask removes). The
inputs of a case are made from a seed, with equal values for every framework.
"""

import abc
import dataclasses
import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import numpy as np

from ragged_attention.calls import Call, Device, dtype_name
from ragged_attention.reference._kv_layout import FORMATS, encode
from ragged_attention.tools.samples import AnySample, FakeArray

K = 1024
# The length of the block of random values that fills inputs by repetition. It is prime, so no two pages or rows are
# equal.
BLOCK = 4_194_301
ROWS = 4  # the number of rows that are checked in each span
Tables = dict[str, np.ndarray]  # index arguments by name
Compared = Iterator[tuple[str, np.ndarray, np.ndarray]]  # (a name, some rows of the result, the expected rows)
FORWARD = ("out", "lse")  # results of the forward pass that the gradient needs


class Case(AnySample, abc.ABC):
    """One batch: lengths of its sequences, heads and options."""

    name: str
    workload: str  # the name under which tables report the case, such as "W1"; "-" if no table reports it
    dtype: str
    num_tokens: int
    backward: bool = False
    batch_invariant: bool = False  # whether kernels use their batch-invariant tiles

    @property
    @abc.abstractmethod
    def operation(self) -> str: ...

    @property
    def key_format(self) -> str:
        """The format of the keys, which decides how a kernel loads them."""
        return "plain"

    @property
    @abc.abstractmethod
    def wgmma_rows(self) -> int:
        """The most rows that a product can have, or 0 if wgmma is not expected for the format of the keys."""

    @abc.abstractmethod
    def needed_bytes(self) -> int:
        """The number of bytes that must be read or written, each counted once."""

    @abc.abstractmethod
    def flops(self) -> int:
        """Multiplications and additions in the products of all visible pairs of a query and a key."""

    def floor_seconds(self, bytes_per_second: float, flops_per_second: float) -> tuple[float, str]:
        """The least time of any implementation in seconds, and whether memory or arithmetic bounds it."""
        memory, arithmetic = self.needed_bytes() / bytes_per_second, self.flops() / flops_per_second
        return (memory, "memory") if memory >= arithmetic else (arithmetic, "arithmetic")

    @abc.abstractmethod
    def scaled_down(self, *, length: int = 77, sequences: int = 3) -> Self:
        """A batch of the same kind that is small enough for tests on any machine."""

    def attention_call(self, device: Device) -> Any:
        """The record of the case's own operation, over arrays without values."""
        return self.call(self.operation, device)

    def calls(self, device: Device) -> Iterator[Call]:
        """The records of all operations that a serving step with this case runs, over arrays without values."""
        yield self.attention_call(device)

    # ---- inputs

    @abc.abstractmethod
    def tables(self, seed: int = 0) -> Tables:
        """The index arrays of the case's own operation."""

    @abc.abstractmethod
    def changed(self) -> Iterator[tuple[Self, Tables]]:
        """Yield a case with other lengths or lists, then this case, each with the index arrays that change."""

    def values(self, name: str, array: FakeArray, generator: np.random.Generator) -> np.ndarray:
        """At most BLOCK random values. They are repeated to fill the argument `name`."""
        del name
        return generator.standard_normal(min(BLOCK, max(1, math.prod(array.shape))), np.float32)

    def numpy_inputs(self, seed: int = 0) -> dict[str, Any]:
        """Arguments for the reference implementation."""
        return self.with_forward(self._inputs(seed, numpy_array, np.asarray), "numpy")

    def torch_inputs(self, seed: int = 0, device: Any = "cpu") -> dict[str, Any]:
        """Arguments for the torch front end, on `device`."""
        torch = importlib.import_module("torch")

        def array(values: np.ndarray, like: FakeArray) -> Any:
            """A tensor with the shape and dtype of `like`, filled by repeating `values`."""
            count = math.prod(like.shape)
            held = torch.from_numpy(values).to(device).to(getattr(torch, like.dtype))
            # some operations do not support 8-bit floats
            bits = held.view(torch.uint8) if like.dtype in FORMATS else held
            return bits.repeat(-(-count // len(values)))[:count].view(held.dtype).view(like.shape)

        return self.with_forward(self._inputs(seed, array, lambda table: torch.from_numpy(table).to(device)), "torch")

    def jax_inputs(self, seed: int = 0) -> dict[str, Any]:
        """Arguments for the jax front end, on its default device."""
        jnp = importlib.import_module("jax.numpy")

        def array(values: np.ndarray, like: FakeArray) -> Any:
            return jnp.resize(jnp.asarray(values).astype(like.dtype), like.shape)

        return self.with_forward(self._inputs(seed, array, jnp.asarray), "jax")

    def with_forward(self, inputs: dict[str, Any], framework: str) -> dict[str, Any]:
        """The inputs. A family that has gradients adds the results of the forward pass."""
        del framework
        return inputs

    def _inputs(
        self, seed: int, array: Callable[[np.ndarray, FakeArray], Any], table: Callable[[np.ndarray], Any]
    ) -> dict[str, Any]:
        generator, tables = np.random.default_rng([seed, 1]), self.tables(seed)

        def made(name: str, value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(made(name, item) for item in value)
            if not isinstance(value, FakeArray):
                return value
            return table(tables[name]) if name in tables else array(self.values(name, value, generator), value)

        arguments = self.arguments(self.operation)
        return {
            name: made(name, value) for name, value in arguments.items() if value is not None and name not in FORWARD
        }

    # ---- results

    def judged(self, result: Any) -> Any:
        """The part of a result that is checked: `out`, or a list of the gradients."""
        if self.backward:
            return [array for array in result if array is not None]
        return result[0] if isinstance(result, tuple | list) else result

    def check(self, inputs: dict[str, Any], out: Any, to_numpy: Any) -> None:
        """Raise AssertionError if `out`, or any gradient of a backward case, is wrong.

        At full size the reference would take hours, so only some rows of some sequences are checked. The reference
        computes these rows in float64, from keys that are gathered from the inputs of the run. `to_numpy`
        copies arrays to the host: floats as float64, 8-bit floats as their bits.
        """
        from ragged_attention.testing.compare import agrees

        for what, got, want in self.compared(inputs, out, to_numpy):
            agrees(got, want, self.bounds, f"{self.name}, {what}")

    @property
    @abc.abstractmethod
    def bounds(self) -> str:
        """The name of the error bounds for the results."""

    @abc.abstractmethod
    def compared(self, inputs: dict[str, Any], out: Any, to_numpy: Any) -> Compared:
        """Yield (name, some rows of the result, the same rows by the reference)."""


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values rounded to `dtype`, as float64 or as the bits of 8-bit floats."""
    if dtype in FORMATS:
        return encode(values, dtype)
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
        return bits.view(np.float32).astype(np.float64)
    return values.astype(dtype).astype(np.float64)


def numpy_array(values: np.ndarray, like: FakeArray) -> np.ndarray:
    """An array with the shape of `like`, filled by repeating `values`, which are rounded to its dtype."""
    return np.resize(values if like.dtype == "uint8" else rounded(values, like.dtype), like.shape)


@dataclasses.dataclass(frozen=True)
class Span:
    """Rows [start, stop) of a batch, which belong to sequence `seq`. The last row sees `kv_len` keys."""

    seq: int
    start: int
    stop: int
    kv_len: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)

    def __str__(self) -> str:
        return f"sequence {self.seq}, rows {self.start} to {self.stop - 1}"


def spans(q_lens: Sequence[int], kv_lens: Sequence[int], sequences: int = 3) -> Iterator[Span]:
    """The first and the last rows of evenly spaced sequences, and of the sequence with most queries."""
    starts = np.concatenate([[0], np.cumsum(q_lens)])
    count = len(q_lens)
    for seq in sorted({*np.linspace(0, count - 1, min(sequences, count)).astype(int), int(np.argmax(q_lens))}):
        num_rows = min(ROWS, q_lens[seq])
        for begin in sorted({0, q_lens[seq] - num_rows}):
            start, end = int(starts[seq]) + begin, begin + num_rows
            yield Span(int(seq), start, start + num_rows, kv_lens[seq] - q_lens[seq] + end)


def taken(array: Any, pages: np.ndarray) -> Any:
    """`array[pages]` for torch and jax. 8-bit floats are indexed as bits, since some devices cannot index them."""
    if type(array).__module__.partition(".")[0] != "torch":
        return array[pages]
    torch = importlib.import_module("torch")
    index = torch.from_numpy(pages).to(array.device)
    if dtype_name(array) in FORMATS:
        return array.view(torch.uint8)[index].view(array.dtype)
    return array[index]


def drawn(low: int, high: int, count: int) -> list[int]:
    """`count` random lengths from `low` to `high`. They do not change between runs."""
    return [int(length) for length in np.random.default_rng(7).integers(low, high, count, endpoint=True)]
