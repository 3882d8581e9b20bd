"""The base of both front ends, which run operations on a framework's arrays for the public functions."""

import abc
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypedDict, TypeVar

from ragged_attention.calls import CALLS, Call, WritingCall

Array = TypeVar("Array")  # torch.Tensor or jax.Array
Memory = TypeVar("Memory")  # the type of `out`: torch.Tensor in torch, Never in jax, whose arrays cannot be written

Pages = Array | tuple[Array, Array]


class AttentionKeywords(TypedDict, Generic[Array, Memory], total=False):
    """Keyword arguments of the attentions with overloads; none of them changes the number of results."""

    max_q_len: int | None
    sm_scale: float | None
    causal: bool
    sliding_window: int | None
    soft_cap: float | None
    sinks: Array | None
    out: Memory | None
    backend: str | Sequence[str] | None
    options: Mapping[str, Any] | None


class FrontEnd(abc.ABC, Generic[Array, Memory]):
    """Runs calls on the arrays of a framework. Arguments go by name, next to `backend`, `options` and `out`."""

    @abc.abstractmethod
    def prepare(self, record: type[Call], arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The record's arguments, converted from those of the public function."""

    @abc.abstractmethod
    def checked(self, record: type[Call], prepared: Mapping[str, Any]) -> Call:
        """The record of prepared arguments, on the device that runs the call."""

    @abc.abstractmethod
    def run_prepared(
        self, record: type[Call], prepared: Mapping[str, Any], backend: Any, options: Any, out: Memory | None = None
    ) -> Any:
        """The results of the record's arguments: an array if the operation always has one result, else a sequence."""

    @abc.abstractmethod
    def run_with_write(
        self, record: type[WritingCall], arguments: Mapping[str, Any], backend: Any, options: Any,
        out: Memory | None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        """The results of an attention that has `new_kv`; the last result is the written cache."""

    @abc.abstractmethod
    def write(self, record: type[Call], arguments: Mapping[str, Any], backend: Any, options: Any) -> Any:
        """The written cache of a write, an array or a pair, like the given one."""

    def call_of(self, operation: str, arguments: Mapping[str, Any]) -> Call:
        """The checked record of a call by the public function's arguments, every one given by name."""
        record = CALLS[operation]
        return self.checked(record, self.prepare(record, arguments))

    def run(
        self, record: type[Call], arguments: Mapping[str, Any], backend: Any, options: Any, out: Memory | None = None
    ) -> Any:
        """The results of a public function's call."""
        return self.run_prepared(record, self.prepare(record, arguments), backend, options, out)
