"""What every record shares: the wording of the static law's errors, facts of devices, the `Call` itself."""

import abc
import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol, Self

import numpy as np

from ragged_attention.errors import InvalidInput

FLOATS = ("float32", "float16", "bfloat16")
WIDE_FLOATS = (*FLOATS, "float64")  # where gradients are checked by finite differences, which need it
QUANTIZED = ("float8_e4m3fn", "float8_e5m2", "int8")


class Array(Protocol):
    """What torch tensors, jax arrays and NumPy arrays all offer."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Static facts about where a call runs; what `why_not` and `heuristic` may rest on."""

    framework: str  # torch | jax
    platform: str  # cuda | rocm | tpu | cpu | mps | xpu
    name: str = ""
    arch: str = ""  # sm_90, gfx942, ...
    num_multiprocessors: int = 1  # of a TPU its cores
    shared_memory: int = 0  # bytes one program can have; of a TPU a core's vector memory (VMEM)
    scalar_memory: int = 0  # of a TPU a core's scalar memory (SMEM), bytes
    unavailable: tuple[tuple[str, str], ...] = ()  # backends that the front end cannot launch here, each with a reason

    def why_unavailable(self, backend: str) -> str | None:
        return dict(self.unavailable).get(backend)


NOWHERE = Device(framework="numpy", platform="cpu")


def dtype_name(array: Array) -> str:
    """`"bfloat16"`, `"float8_e4m3fn"`, `"int32"`, ..., whichever framework the array is of."""
    return str(array.dtype).rpartition(".")[2]


def wide_dtype(array: Any) -> str:
    """The dtype of logits, of their log-sum-exp and of sinks beside queries of a dtype."""
    return "float64" if dtype_name(array) == "float64" else "float32"


def is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def expect_array(name: str, value: Any, shape: str, dtypes: tuple[str, ...], sizes: Mapping[str, int]) -> None:
    """Check one array's kind, dtype and shape; `shape` is letters such as "S M", each a size or a new axis."""
    if not is_array(value):
        raise TypeError(f"expected {name} to be an array, got {type(value).__name__}")
    if dtype_name(value) not in dtypes:
        raise InvalidInput(f"expected {name}.dtype to be {' or '.join(dtypes)}, got {dtype_name(value)}")
    letters = shape.split()
    wanted = "[" + ", ".join(str(sizes.get(letter, letter)) for letter in letters) + "]"
    got = tuple(value.shape)
    if len(got) != len(letters) or any(sizes.get(a, n) != n for a, n in zip(letters, got, strict=True)):
        named = "[" + ", ".join(letters) + "]"
        raise InvalidInput(f"expected {name}.shape to be {named} = {wanted}, got {list(got)}")


def expect_number(name: str, value: Any, *, positive: bool = False) -> None:
    if not is_number(value):
        raise TypeError(f"expected {name} to be a number, got {type(value).__name__}")
    if not math.isfinite(value):
        raise InvalidInput(f"expected {name} to be finite, got {value}")
    if positive and not value > 0:
        raise InvalidInput(f"expected {name} > 0, got {value}")


def expect_count(name: str, value: Any, least: int) -> None:
    """Check a plain integer of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"expected {name} to be an int, got {type(value).__name__}")
    if value < least:
        raise InvalidInput(f"expected {name} >= {least}, got {value}")


def expect_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"expected {name} to be a bool, got {type(value).__name__}")


def expect_groups(num_q_heads: int, num_kv_heads: int) -> None:
    """Check that every KV head serves as many query heads."""
    if num_q_heads < 1 or num_q_heads % num_kv_heads:
        raise InvalidInput(f"expected num_q_heads to be a multiple of {num_kv_heads=}, got {num_q_heads}")


def expect_results(call: Any, shape: str, sizes: Mapping[str, int]) -> None:
    """Check what a gradient is told of results: `d_out` and `out` of this shape, `lse` and `d_lse` without its end."""
    for name in ("d_out", "out"):
        expect_array(name, getattr(call, name), shape, (dtype_name(call.q),), sizes)
    for name in ("lse", "d_lse"):
        if name == "lse" or call.d_lse is not None:
            expect_array(name, getattr(call, name), shape.rpartition(" ")[0], (call.lse_dtype,), sizes)


class Call:
    """What all records share."""

    OPERATION: ClassVar[str]
    device: Device

    @classmethod
    def argument_names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in dataclasses.fields(cls) if field.name != "device")  # type: ignore[arg-type]

    @classmethod
    @functools.cache
    def optional_fields(cls) -> Mapping[str, Any]:
        """The arguments that may be left out, with their defaults: what a backend's FEATURES are about."""
        given = dataclasses.fields(cls)  # type: ignore[arg-type]
        return {f.name: f.default for f in given if f.name != "device" and f.default is not dataclasses.MISSING}

    def arguments(self) -> dict[str, Any]:
        """The arguments by name, as the operation's definition in `reference/` takes them."""
        return {name: getattr(self, name) for name in self.argument_names()}

    @classmethod
    def unchecked(cls, **values: Any) -> Self:
        """A record whose values are known to be lawful, every field given."""
        record = object.__new__(cls)
        for name, value in values.items():
            object.__setattr__(record, name, value)
        return record

    def map(self, change: Callable[[Any], Any]) -> Self:
        """The same call with every array changed; nothing is checked again, so only kind or storage may differ."""
        values = self.arguments()
        for name, value in values.items():
            if isinstance(value, tuple | list):
                values[name] = tuple(change(item) if is_array(item) else item for item in value)
            elif is_array(value):
                values[name] = change(value)
        return self.unchecked(**values, device=self.device)


class GroupedCall(Call):
    """What the records share in which queries [T, H, D] attend to keys of fewer heads."""

    q: Any
    sm_scale: Any

    @property
    @abc.abstractmethod
    def num_kv_heads(self) -> int: ...

    @property
    def num_q_heads(self) -> int:
        return self.q.shape[1]

    @property
    def head_dim(self) -> int:
        return self.q.shape[2]

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.sm_scale is None else float(self.sm_scale)
