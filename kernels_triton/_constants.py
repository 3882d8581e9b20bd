"""Records of constants. A kernel takes a whole record as one compile-time argument, and passes it on as one."""

import dataclasses
import types
from typing import Any

import triton.knobs
import triton.language as tl

INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)  # whether TRITON_INTERPRET was set at import


class Constants:
    """Base of frozen dataclasses whose fields a kernel reads as compile-time constants, such as `SHAPE.HEAD_DIM`.

    A kernel declares the record as `SHAPE: tl.constexpr`, and so does every function that it passes the record to.
    Triton compiles a kernel again for each different record, and distinguishes records by their hash, `==` and `repr`.
    So fields have plain values (numbers, booleans, strings, Triton's dtypes, or further records), and subclasses are
    declared with `eq=False` and `repr=False`.
    """

    _values: tuple[Any, ...]

    def __post_init__(self) -> None:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        object.__setattr__(self, "_values", tuple(values.values()))
        if not INTERPRETED:  # the interpreter accepts plain values as constants
            for name, value in values.items():
                object.__setattr__(self, name, tl.constexpr(value))

    @property
    def plain(self) -> types.SimpleNamespace:
        """The fields as plain values, for host code. Nested records are converted, too."""
        names = (field.name for field in dataclasses.fields(self))  # type: ignore[arg-type]
        values = (getattr(value, "plain", value) for value in self._values)
        return types.SimpleNamespace(**dict(zip(names, values, strict=True)))

    def __hash__(self) -> int:
        return hash(self._values)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._values == self._values

    def __repr__(self) -> str:
        return "_".join((type(self).__name__, *map(str, self._values)))  # becomes part of a function's name in LLVM
