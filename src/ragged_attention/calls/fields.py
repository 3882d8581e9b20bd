"""The kinds of arguments: the valid values of a record's field, their checks, and their flat form.

A kind checks a value, converts it to arguments of a torch operator (tensors, numbers and strings in a fixed order) and
restores it from them. Both front ends use that flat form: torch for its operators, jax for its transformations, where
the arrays among the flat values are leaves and all other values are static.
"""

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from ragged_attention.errors import InvalidInput

FLOATS = ("float32", "float16", "bfloat16")
WIDE_FLOATS = (*FLOATS, "float64")  # gradients are checked by finite differences, which need float64
FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz")  # the 8-bit floats in which caches store keys and values
INT8 = "int8"
QUANTIZED = (*FLOAT8, INT8)
INT32 = ("int32",)  # for index arrays
SMALLEST_FLOAT32 = float(np.finfo(np.float32).tiny)
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
MAX_KEY_RANGES = 8
MAX_BLOCK_SIZE = 256  # maximum number of keys in a selected block
LARGEST_INT32 = int(np.iinfo(np.int32).max)

Dtypes = tuple[str, ...] | Callable[[Any], tuple[str, ...]]  # a function of the record if they depend on other fields


class Array(Protocol):
    """A torch tensor, a jax array or a NumPy array."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


class Arrays(Protocol):
    """Converts a front end's arguments to the form that records take."""

    namespace: Any  # torch or jax.numpy

    def array(self, name: str, value: Any) -> Any:
        """An array in the front end's form, a number as a Python number, or any other value unchanged.

        Raises `TypeError` for an array of another framework.
        """
        ...

    def int32(self, shape: tuple[int, ...], value: int) -> Any:
        """A new array filled with one number, on the device of the call's arrays."""
        ...

    def cast(self, array: Any, dtype: str) -> Any: ...

    def constant(self, array: Any) -> Any:
        """The array as a constant, without a gradient."""
        ...

    def copy(self, array: Any) -> Any:
        """A snapshot of the array, which later writes to the array do not change."""
        ...


# ---- checks


def dtype_name(array: Array) -> str:
    """The name of an array's dtype in any framework, such as `"bfloat16"` or `"float8_e4m3fn"`."""
    return str(array.dtype).rpartition(".")[2]


def wide_dtype(array: Any) -> str:
    """The dtype of logits, log-sum-exp and sinks for queries `array`."""
    return "float64" if dtype_name(array) == "float64" else "float32"


def is_array(value: Any) -> bool:
    # NumPy's float64 is a float, not an array. Under torch.compile, Dynamo's symbolic floats do not support `hasattr`.
    if isinstance(value, (int, float)):
        return False
    return hasattr(value, "shape") and hasattr(value, "dtype")


def is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def expect_any_array(name: str, value: Any) -> None:
    if not is_array(value):
        raise TypeError(f"expected {name} to be an array, got {type(value).__name__}")


def expect_array(name: str, value: Any, shape: str, dtypes: tuple[str, ...], sizes: Mapping[str, int]) -> None:
    """Check an array's type, dtype and shape, such as "S M"; axes that are not in `sizes` may have any size."""
    expect_any_array(name, value)
    if (dtype := dtype_name(value)) not in dtypes:
        advice = ": convert it once a step, not in every layer" if dtype == "int64" and dtypes == INT32 else ""
        if dtype == "float4_e2m1fn_x2" and "uint8" in dtypes:
            advice = ": take its .view(torch.uint8)"
        if shape == "H" and dtypes == ("float32",) and dtype in FLOATS:  # sinks and slopes are model parameters
            advice = ": convert it once, by .float() in torch or .astype('float32') in jax"
        raise InvalidInput(f"expected {name}.dtype to be {' or '.join(dtypes)}, got {dtype}{advice}")
    letters = shape.split()
    got = tuple(value.shape)
    if len(got) != len(letters) or any(sizes.get(a, n) != n for a, n in zip(letters, got, strict=True)):
        named, expected = ", ".join(letters), ", ".join(str(sizes.get(letter, letter)) for letter in letters)
        sized = f" = [{expected}]" if expected != named else ""
        raise InvalidInput(f"expected {name}.shape to be [{named}]{sized}, got {list(got)}")


def expect_nonempty(name: str, size_name: str, size: int) -> None:
    """Check that an axis of an array has at least one element."""
    if size < 1:
        raise InvalidInput(f"expected {name} to have {size_name} >= 1, got {size}")


def _kind(value: Any) -> str:
    """The name of a value's type in an error message, with advice for a tracer."""
    name = type(value).__name__
    return f"{name}: make it static, this is fixed when jax traces the call" if name.endswith("Tracer") else name


def expect_number(name: str, value: Any, *, positive: bool = False) -> None:
    """Check that a number is finite in float32. With `positive`, it must be at least the smallest normal float32."""
    if not is_number(value):
        raise TypeError(f"expected {name} to be a number, got {_kind(value)}")
    # torch.compile can trace comparisons of a symbolic float, but not `math.isfinite`.
    if not abs(value) <= LARGEST_FLOAT32:
        if value != value or abs(value) == math.inf:
            raise InvalidInput(f"expected {name} to be finite, got {value}")
        raise InvalidInput(f"expected {name} within the range of float32, got a larger one")
    if positive and not value > 0:
        raise InvalidInput(f"expected {name} > 0, got {value}")
    if positive and value < SMALLEST_FLOAT32:
        raise InvalidInput(f"expected {name} >= {SMALLEST_FLOAT32}, the smallest normal float32, got {value}")


def expect_divisor(name: str, value: Any) -> None:
    """Check that a number has at least the magnitude of the smallest normal float32, so that it can divide."""
    expect_number(name, value)
    if not abs(value) >= SMALLEST_FLOAT32:
        least = f"{SMALLEST_FLOAT32}, the smallest normal float32"
        raise InvalidInput(f"expected {name} of a magnitude of at least {least}, got {value}")


def expect_count(name: str, value: Any, least: int) -> None:
    """Check an integer between `least` and the largest int32."""
    if not is_integer(value):
        raise TypeError(f"expected {name} to be an int, got {_kind(value)}")
    if value < least:
        raise InvalidInput(f"expected {name} >= {least}, got {value}")
    if value > LARGEST_INT32:
        raise InvalidInput(f"expected {name} <= {LARGEST_INT32}, got {value}")


def expect_bool(name: str, value: Any) -> None:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"expected {name} to be a bool, got {_kind(value)}")


def expect_text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"expected {name} to be a str, got {_kind(value)}")


# ---- kinds


def field(kind: "Kind", *, default: Any = dataclasses.MISSING) -> Any:
    """A field of a record; a default of None makes it optional."""
    kind = dataclasses.replace(kind, optional=default is None)
    return dataclasses.field(default=default, metadata={"kind": kind})


class Sizes(dict[str, int]):
    """The sizes of a call's axes by letter. Each checked array adds the sizes of its axes; an axis S also adds S+1."""

    def bind(self, shape: str, value: Array) -> None:
        for letter, size in zip(shape.split(), value.shape, strict=True):
            self.setdefault(letter, size)
            self.setdefault(f"{letter}+1", size + 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of field. The flat form of most kinds is the value itself, under the field's name."""

    optional: bool = False  # whether None is valid
    checked_last: bool = False  # whether it is checked after later fields, because it must match their sizes
    hint: bool = False  # whether its value does not affect the results
    unit_stride: bool = False  # whether rows must be contiguous: in torch the last stride must be 1
    written: bool = False  # whether the operation writes it: in torch in place, in jax as a new array

    schema_type = "Tensor"  # the type in a torch schema, without the `?` of an optional one
    scalars: ClassVar[tuple[type, ...]] = ()  # the Python types that it accepts unchanged: numbers, flags or strings

    def prepare(self, name: str, value: Any, arrays: Arrays) -> Any:
        """A public function's argument, converted to the record's."""
        return arrays.array(name, value)

    def check(self, name: str, value: Any, call: Any, sizes: Sizes) -> None:
        """Raise unless the value is valid. None is passed only if it is not allowed. By default, check nothing."""

    def schema(self, name: str) -> tuple[str, ...]:
        """The flat arguments in a torch schema; `{}` is a placeholder for a written argument's mark, such as `(a!)`."""
        return (f"{self.schema_type}{'{}' if self.written else ''}{'?' if self.optional else ''} {name}",)

    def flatten(self, name: str, value: Any) -> tuple[Any, ...]:
        """The flat arguments of a value. Raises for a value that a torch schema would misread."""
        return (value,)

    def unflatten(self, values: Sequence[Any]) -> Any:
        return values[0]


@dataclasses.dataclass(frozen=True)
class ArrayKind(Kind):
    """An array. Its `shape` is given in letters, such as "T H D". If it is None, the record checks the array."""

    shape: str | None = None
    dtypes: Dtypes = ()

    def check(self, name: str, value: Any, call: Any, sizes: Sizes) -> None:
        if self.shape is None:
            expect_any_array(name, value)
            return
        dtypes = self.dtypes(call) if callable(self.dtypes) else self.dtypes
        expect_array(name, value, self.shape, dtypes, sizes)
        sizes.bind(self.shape, value)


class _Scalar(Kind):
    """A value that is not an array."""

    def prepare(self, name: str, value: Any, arrays: Arrays) -> Any:
        return value.item() if isinstance(value, np.generic) else value

    def flatten(self, name: str, value: Any) -> tuple[Any, ...]:
        if value is not None or not self.optional:
            self.check(name, value, None, Sizes())
        return (value,)


@dataclasses.dataclass(frozen=True)
class Number(_Scalar):
    """A finite number."""

    positive: bool = False
    schema_type = "float"
    scalars = (float, int)

    def check(self, name: str, value: Any, call: Any, sizes: Sizes) -> None:
        expect_number(name, value, positive=self.positive)

    def flatten(self, name: str, value: Any) -> tuple[Any, ...]:
        _Scalar.flatten(self, name, value)
        return (value if value is None else float(value),)


@dataclasses.dataclass(frozen=True)
class Integer(_Scalar):
    """An integer of at least `least`."""

    least: int = 0
    symbolic: bool = False  # whether torch.compile may keep it symbolic; backends then see None
    scalars = (int,)

    @property
    def schema_type(self) -> str:  # type: ignore[override]
        return "SymInt" if self.symbolic else "int"

    def check(self, name: str, value: Any, call: Any, sizes: Sizes) -> None:
        expect_count(name, value, self.least)

    def flatten(self, name: str, value: Any) -> tuple[Any, ...]:
        if self.symbolic and type(value).__name__ == "SymInt":
            return (value,)
        return _Scalar.flatten(self, name, value)

    def unflatten(self, values: Sequence[Any]) -> Any:
        (value,) = values
        return value if isinstance(value, int) else None


class Flag(_Scalar):
    """True or False."""

    schema_type = "bool"
    scalars = (bool,)

    def check(self, name: str, value: Any, call: Any, sizes: Sizes) -> None:
        expect_bool(name, value)


@dataclasses.dataclass(frozen=True)
class Text(_Scalar):
    """A string, one of `choices`. If `choices` is empty, the record checks the string."""

    choices: tuple[str, ...] = ()
    schema_type = "str"
    scalars = (str,)

    def check(self, name: str, value: Any, call: Any, sizes: Sizes) -> None:
        expect_text(name, value)
        if self.choices and value not in self.choices:
            raise InvalidInput(f"expected {name} to be {' or '.join(map(repr, self.choices))}, got {value!r}")


class Dtype(Text):
    """The name of a float dtype, which may also be given as the framework's dtype."""

    def prepare(self, name: str, value: Any, arrays: Arrays) -> Any:
        if value is None or isinstance(value, str):
            return value
        text = str(value)
        if text.startswith("torch."):
            return text.removeprefix("torch.")
        is_dtype = isinstance(value, (np.dtype, type)) or (hasattr(value, "dtype") and not hasattr(value, "shape"))
        return np.dtype(value).name if is_dtype else value


class Count(Kind):
    """The number of live sequences: an int, or an i32 array of one element, which is never read back."""

    scalars = (int,)

    def check(self, name: str, value: Any, call: Any, sizes: Sizes) -> None:
        if is_integer(value):
            if "S" in sizes:  # otherwise an array is missing, and the record raises an error about it
                expect_num_seqs(value, sizes["S"])
        else:
            _expect_one_int32(name, value)


def expect_num_seqs(value: int, max_num_seqs: int) -> None:
    if not 0 <= value <= max_num_seqs:
        raise InvalidInput(f"expected num_seqs between 0 and {max_num_seqs=}, got {value}")


class Length(Kind):
    """One length: an int, which becomes an array, or an i32 array of one element."""

    def prepare(self, name: str, value: Any, arrays: Arrays) -> Any:
        if not is_integer(value):
            return arrays.array(name, value)
        if not 0 <= value <= LARGEST_INT32:
            raise InvalidInput(f"expected {name} between 0 and {LARGEST_INT32}, got {value}")
        return arrays.int32((1,), int(value))

    def check(self, name: str, value: Any, call: Any, sizes: Sizes) -> None:
        _expect_one_int32(name, value)


def _expect_one_int32(name: str, value: Any) -> None:
    if not is_array(value):
        raise TypeError(f"expected {name} to be an int or an array, got {type(value).__name__}")
    if dtype_name(value) != "int32" or tuple(value.shape) not in ((), (1,)):
        raise InvalidInput(f"expected {name} to be int32 of shape [1], got {dtype_name(value)}{list(value.shape)}")


def expect_scales(name: str, value: Any, heads_name: str, num_heads: int) -> None:
    """Check an array of scales, with one element or one per head."""
    if not is_array(value):
        raise TypeError(f"expected {name} to be a number or an array, got {type(value).__name__}")
    if dtype_name(value) not in FLOATS or tuple(value.shape) not in ((), (1,), (num_heads,)):
        expected, got = f"[] or [{heads_name}={num_heads}]", f"{dtype_name(value)}{list(value.shape)}"
        raise InvalidInput(f"expected {name} to be a float array of shape {expected}, got {got}")


@dataclasses.dataclass(frozen=True)
class Scale(Kind):
    """The scale of cached values: a number, or an array with one element or one per KV head.

    New rows are divided by the scale when a write, or an attention call with `new_kv`, stores them in the cache.
    """

    divides: bool = False  # whether every call divides by it; otherwise only a call with `new_kv` does
    scalars = (float, int)

    def check(self, name: str, value: Any, call: Any, sizes: Sizes) -> None:
        if is_number(value):
            divides = self.divides or getattr(call, "new_kv", None) is not None
            (expect_divisor if divides else expect_number)(name, value)
        else:
            expect_scales(name, value, "num_kv_heads", call.num_kv_heads)

    def schema(self, name: str) -> tuple[str, ...]:
        return f"Tensor? {name}", f"float? {name}_number"

    def flatten(self, name: str, value: Any) -> tuple[Any, ...]:
        if is_number(value):
            expect_number(name, value)
            return None, float(value)
        return value, None

    def unflatten(self, values: Sequence[Any]) -> Any:
        array, number = values
        return number if array is None else array


class QueryScale(Kind):
    """The scale of 8-bit queries. The record's `prepare` applies it, so no backend sees it."""

    def prepare(self, name: str, value: Any, arrays: Arrays) -> Any:
        value = arrays.array(name, value)
        if is_number(value):
            expect_number(name, value)
        elif not is_array(value):
            raise TypeError(f"expected {name} to be a number or an array, got {type(value).__name__}")
        return value

    def schema(self, name: str) -> tuple[str, ...]:
        return ()

    def flatten(self, name: str, value: Any) -> tuple[Any, ...]:
        return ()

    def unflatten(self, values: Sequence[Any]) -> Any:
        return None


@dataclasses.dataclass(frozen=True)
class Pair(Kind):
    """One array or a pair of arrays, which `expect(name, value, record, sizes)` checks."""

    names: tuple[str, str]  # the names of the flat arguments
    expect: Callable[[str, Any, Any, Sizes], None]

    def prepare(self, name: str, value: Any, arrays: Arrays) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple(arrays.array(f"{name}[{index}]", item) for index, item in enumerate(value))
        return arrays.array(name, value)

    def check(self, name: str, value: Any, call: Any, sizes: Sizes) -> None:
        self.expect(name, value, call, sizes)

    def schema(self, name: str) -> tuple[str, ...]:
        first, second = self.names
        tensor = "Tensor{}" if self.written else "Tensor"
        return f"{tensor}{'?' if self.optional else ''} {first}", f"{tensor}? {second}"

    def flatten(self, name: str, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, (tuple, list)):
            return value, None
        if len(value) != 2:
            self.expect(name, value, None, Sizes())
        return tuple(value)

    def unflatten(self, values: Sequence[Any]) -> Any:
        first, second = values
        return first if second is None else (first, second)


class RotaryTable(Pair):
    """The cosines and sines of all positions, in one array or a pair. Unlike pages, these arrays have no head axis."""


@dataclasses.dataclass(frozen=True)
class RelativeBias(ArrayKind):
    """A table of biases by distance: [H, B] for all queries, or a table per query, [T, H, B]."""

    tokens: str = "T"  # the letter of the axis of queries

    def check(self, name: str, value: Any, call: Any, sizes: Sizes) -> None:
        expect_any_array(name, value)
        dtypes = self.dtypes(call) if callable(self.dtypes) else self.dtypes
        expect_array(name, value, "H B" if len(value.shape) == 2 else f"{self.tokens} H B", dtypes, sizes)
        expect_nonempty(name, "B", value.shape[-1])


@dataclasses.dataclass(frozen=True)
class KeyRanges(ArrayKind):
    """The ranges of keys that each query sees, [T, R, 2]."""

    dtypes: Dtypes = INT32
    tokens: str = "T"  # the letter of the axis of queries

    def check(self, name: str, value: Any, call: Any, sizes: Sizes) -> None:
        expect_array(name, value, f"{self.tokens} R 2", INT32, {"2": 2, **sizes})
        if not 1 <= (got := value.shape[1]) <= MAX_KEY_RANGES:
            raise InvalidInput(f"expected {name} to have from 1 to {MAX_KEY_RANGES} ranges of each query, got {got}")


class HeadKeys(ArrayKind):
    """Index keys [..., K, D], which the record checks."""


class HeadKeyScales(ArrayKind):
    """The scales of index keys [..., K], which the record checks."""


def expect_lists(name: str, got: int, num_kv_heads: int) -> None:
    """Check the number of lists that a query has."""
    if got not in (1, num_kv_heads):
        expected = f"one list for all KV heads or one for each of {num_kv_heads=}"
        raise InvalidInput(f"expected {name} to have {expected}, got {got}")


@dataclasses.dataclass(frozen=True)
class Selected(ArrayKind):
    """The blocks of keys that each query sees: a list for each KV head, [T, K, N], or one for all heads, [T, 1, N]."""

    dtypes: Dtypes = INT32
    tokens: str = "T"  # the letter of the axis of queries

    def check(self, name: str, value: Any, call: Any, sizes: Sizes) -> None:
        axes = {name: size for name, size in sizes.items() if name != "K"}
        expect_array(name, value, f"{self.tokens} K N", INT32, axes)
        expect_lists(name, value.shape[1], call.num_kv_heads)


@dataclasses.dataclass(frozen=True)
class BlockSize(Integer):
    """The number of keys in a block: a power of two."""

    def check(self, name: str, value: Any, call: Any, sizes: Sizes) -> None:
        if not is_integer(value):
            raise TypeError(f"expected {name} to be an int, got {_kind(value)}")
        if not 1 <= value <= MAX_BLOCK_SIZE or value & (value - 1):
            raise InvalidInput(f"expected {name} to be a power of two from 1 to {MAX_BLOCK_SIZE}, got {value}")


class Stack(ArrayKind):
    """An array, or a sequence of arrays, which `prepare` stacks."""

    def prepare(self, name: str, value: Any, arrays: Arrays) -> Any:
        if not isinstance(value, (tuple, list)):
            return arrays.array(name, value)
        if not value:
            raise InvalidInput(f"expected {name} to hold at least one part, got 0")
        parts = [arrays.array(f"{name}[{index}]", part) for index, part in enumerate(value)]
        shape, sizes, dtypes = str(self.shape).partition(" ")[2], Sizes(), self.dtypes
        for index, part in enumerate(parts):  # frameworks would stack arrays of different dtypes
            assert not callable(dtypes)
            expect_array(f"{name}[{index}]", part, shape, dtypes, sizes)
            sizes.bind(shape, part)
            dtypes = (dtype_name(part),)
        return arrays.namespace.stack(parts)


@dataclasses.dataclass(frozen=True)
class ArrayTuple(Kind):
    """A tuple of any number of arrays, which the record checks."""

    schema_type = "Tensor[]"

    def prepare(self, name: str, value: Any, arrays: Arrays) -> Any:
        return tuple(arrays.array(f"{name}[{index}]", item) for index, item in enumerate(value))

    def schema(self, name: str) -> tuple[str, ...]:
        return (f"Tensor[] {name}",)

    def flatten(self, name: str, value: Any) -> tuple[Any, ...]:
        return (list(value or ()),)

    def unflatten(self, values: Sequence[Any]) -> Any:
        return tuple(values[0]) or None
