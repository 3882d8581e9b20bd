"""The base of both front ends, torch and jax, which run the public functions' calls on their framework's arrays."""

import abc
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypedDict, TypeVar

from ragged_attention.calls import CALLS, Call, WritingCall

Array = TypeVar("Array")  # torch.Tensor or jax.Array
Memory = TypeVar("Memory")  # the type of `out`: torch.Tensor in torch; Never in jax, whose arrays are immutable

Pages = Array | tuple[Array, Array]


def requested(results: Sequence[Any], return_lse: bool, return_max_logits: bool) -> Any:
    """The `out` of an attention call, or a tuple of `out` and the requested ones of `lse` and `max_logits`.

    `results` holds out, lse and max_logits, whether they are requested or not.
    """
    out, lse, max_logits = results
    others = (*([lse] if return_lse else []), *([max_logits] if return_max_logits else []))
    return (out, *others) if others else out


class AttentionKeywords(TypedDict, Generic[Array, Memory], total=False):
    """Keyword arguments of all attention functions with overloads that do not change the number of results."""

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
    """Runs calls on the arrays of a framework.

    The methods' `arguments` map the names of the public function's arguments to values, without `backend`, `options`
    and `out`.
    """

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Name the public functions as users import them, because Python's error messages show qualified names."""
        super().__init_subclass__(**keywords)
        for name in CALLS.keys() & vars(cls).keys():
            vars(cls)[name].__qualname__ = name

    @abc.abstractmethod
    def prepare(self, record: type[Call], arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The record's arguments, converted from those of the public function."""

    @abc.abstractmethod
    def checked(self, record: type[Call], prepared: Mapping[str, Any]) -> Call:
        """The call record with prepared arguments and the device that runs the call."""

    @abc.abstractmethod
    def run_prepared(
        self, record: type[Call], prepared: Mapping[str, Any], backend: Any, options: Any, out: Memory | None = None
    ) -> Any:
        """Run an operation on prepared arguments. Returns an array if it always has one result, else a sequence."""

    @abc.abstractmethod
    def run_with_write(
        self, record: type[WritingCall], arguments: Mapping[str, Any], backend: Any, options: Any,
        out: Memory | None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Run an attention call with `new_kv`. The last result is the written cache."""

    @abc.abstractmethod
    def write(self, record: type[Call], arguments: Mapping[str, Any], backend: Any, options: Any) -> Any:
        """Run a write. Returns its results, if it has any, then the written caches, in the form that it received."""

    def call_of(self, operation: str, arguments: Mapping[str, Any]) -> Call:
        """The checked record of a call, from all arguments of the public function by name."""
        record = CALLS[operation]
        return self.checked(record, self.prepare(record, arguments))

    def run(
        self, record: type[Call], arguments: Mapping[str, Any], backend: Any, options: Any, out: Memory | None = None
    ) -> Any:
        """Run an operation on the public function's arguments."""
        return self.run_prepared(record, self.prepare(record, arguments), backend, options, out)
