"""Branches: parts of kernels that few calls need. Each is compiled, and cached on disk, when a call first needs it.

A branch is a separate C function, which a kernel calls by its address. The addresses are the last fields of a call's
record. `Fields` lists a kernel's branches, and `Kernel.launch` compiles those that a call needs.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.typing.templates import Signature, signature

from ragged_attention.portable.numba._vectors import I64, element, intrinsic_of, number


@dataclasses.dataclass(frozen=True)
class Branch:
    """A branch: a function and the arguments of `branch`."""

    function: Callable[..., Any]
    needed_by: tuple[str, ...]
    result: types.Type

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.function).parameters)

    def signature(self, records: Mapping[str, types.Record]) -> Signature:
        """The types of the C function; `records` are those of parameters by name, and all others are int64."""
        return signature(self.result, *(records.get(name, types.int64) for name in self.parameters))


def branch(*needed_by: str, result: types.Type = types.none) -> Callable[[Callable[..., Any]], Any]:
    """A decorator that makes a function a branch. Kernels call a branch like any other function.

    A kernel may call it only if one of the fields `needed_by` of the call's record is not 0. The first parameter is
    `call`, the record; others may be `tile` and `unit`, and any further ones are int64.
    """

    def decorated(function: Callable[..., Any]) -> Any:
        new_branch = Branch(function, needed_by, result)

        def typed(call: Any, *others: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                record = builder.ptrtoint(values[0], I64)
                address = builder.load(element(builder, record, number(call.offset(new_branch.name) // 8), I64))
                kind = ir.FunctionType(context.get_value_type(result), [value.type for value in values])
                return builder.call(builder.inttoptr(address, kind.as_pointer()), values)

            parameters = (kind if isinstance(kind, types.Record) else types.int64 for kind in (call, *others))
            return signature(result, *parameters), generate

        caller = intrinsic_of(new_branch.name, new_branch.parameters, typed)
        caller.__doc__, caller.branch = function.__doc__, new_branch
        return caller

    return decorated
