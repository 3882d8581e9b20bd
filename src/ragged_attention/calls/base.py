"""The base classes of records, which derive schemas and checks from their fields, and the facts about a device."""

import abc
import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self, TypeVar, dataclass_transform

import numpy as np

from ragged_attention.calls.fields import Arrays, Kind, Sizes, field, is_array, wide_dtype
from ragged_attention.errors import InvalidInput


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Static facts about the device that runs a call. A backend's `why_not` and `heuristic` may depend on them."""

    framework: str  # torch | jax
    platform: str  # cuda | rocm | tpu | cpu | mps | xpu
    name: str = ""
    arch: str = ""  # sm_90, gfx942, ...
    num_multiprocessors: int = 1  # on a TPU, its cores
    shared_memory: int = 0  # bytes per program; on a TPU, bytes of vector memory (VMEM) per core
    scalar_memory: int = 0  # bytes of scalar memory (SMEM) per core of a TPU
    unavailable: tuple[tuple[str, str], ...] = ()  # backends that the front end cannot launch here, each with a reason

    def why_unavailable(self, backend: str) -> str | None:
        return dict(self.unavailable).get(backend)


NOWHERE = Device(framework="numpy", platform="cpu")

# The maximum shared memory (LDS on AMD) per program, in KiB.
SHARED_MEMORY = {
    "sm_75": 64, "sm_80": 163, "sm_86": 99, "sm_87": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_103": 227,
    "sm_120": 99, "sm_121": 99, "gfx950": 160,
}  # fmt: skip


def shared_memory_of(arch: str) -> int:
    """The maximum bytes of shared memory per program; for an unknown architecture, the smallest known size."""
    return 1024 * SHARED_MEMORY.get(arch, min(SHARED_MEMORY.values()))


def expect_groups(num_q_heads: int, num_kv_heads: int) -> None:
    """Check that every KV head serves the same number of query heads."""
    if num_q_heads < 1 or num_q_heads % num_kv_heads:
        raise InvalidInput(f"expected num_q_heads to be a multiple of {num_kv_heads=}, got {num_q_heads}")


class Result(NamedTuple):
    """Shape and dtype of one result."""

    shape: tuple[int, ...]
    dtype: Any  # a name, or a framework's own


Record = TypeVar("Record", bound="Call")


@dataclass_transform(kw_only_default=True, frozen_default=True, eq_default=False, field_specifiers=(field,))
def record(cls: type[Record]) -> type[Record]:
    """Make a class a record: a frozen dataclass whose fields are `fields.field(kind, default)`."""
    cls = dataclasses.dataclass(frozen=True, kw_only=True, eq=False)(cls)
    cls.OPERATION = re.sub("(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
    fields = [item for item in dataclasses.fields(cls) if item.metadata]  # type: ignore[arg-type]
    cls.KINDS = {item.name: item.metadata["kind"] for item in fields}
    cls.DEFAULTS = {item.name: item.default for item in fields if item.default is not dataclasses.MISSING}
    cls.RANGES = dict(_ranges(cls.KINDS))
    cls.ABSENT = {name: kind.flatten(name, None) for name, kind in cls.KINDS.items() if kind.optional}
    cls.SCALARS = {name: kind.scalars for name, kind in cls.KINDS.items()}
    cls.WRITTEN = tuple(name for name, kind in cls.KINDS.items() if kind.written)
    cls.REGROUPED = {name: kind for name, kind in cls.KINDS.items() if type(kind).unflatten is not Kind.unflatten}
    return cls


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Call(abc.ABC):
    """The base of all records. Building a record checks each field by its kind, then how the fields fit together."""

    OPERATION: ClassVar[str]  # the name of the class in snake case
    KINDS: ClassVar[Mapping[str, Kind]]  # the kinds of the fields
    DEFAULTS: ClassVar[Mapping[str, Any]]  # the defaults of optional fields
    RANGES: ClassVar[Mapping[str, tuple[int, int]]]  # the first and end index of each field's flat arguments
    ABSENT: ClassVar[Mapping[str, tuple[Any, ...]]]  # the flat arguments of None, for each field that may be None
    REGROUPED: ClassVar[Mapping[str, Kind]]  # the kinds of fields that are not equal to one flat argument
    SCALARS: ClassVar[Mapping[str, tuple[type, ...]]]  # the types of each field's numbers, flags or texts
    WRITTEN: ClassVar[tuple[str, ...]]  # the arguments that the operation writes, the cache first
    # The number of results without the written cache, or None if it depends on the arguments. MOST_RESULTS is then its
    # maximum.
    NUM_RESULTS: ClassVar[int | None] = 1
    MOST_RESULTS: ClassVar[int] = 1
    WRITES: ClassVar[bool] = False  # whether it writes its cache, which is returned after the other results
    TAKES_OUT: ClassVar[bool] = False  # whether torch callers may pass memory for the first result
    DIFFERENTIABLE: ClassVar[tuple[str, ...]] = ()  # arguments for which `<operation>_backward` returns gradients
    # The DIFFERENTIABLE arguments that are often constants. Such an argument's gradient `d_<name>` is computed only if
    # `return_d_<name>` is True.
    OFTEN_CONSTANT: ClassVar[tuple[str, ...]] = ()
    # Further arguments of `<operation>_backward`: the gradients of results, and saved results, each with the index of
    # its result. If the first result is unused, its gradient is 0; the gradient of another unused result is None.
    RESULT_GRADIENTS: ClassVar[Mapping[str, int]] = {"d_out": 0, "d_lse": 1}
    SAVED_RESULTS: ClassVar[Mapping[str, int]] = {"out": 0, "lse": 1}
    ATTENDS: ClassVar[bool] = False  # whether results are sums over the keys of sequences
    WHY_NO_GRADIENT: ClassVar[str] = "it works on a KV cache, for inference"
    CACHE: ClassVar[str]  # the name of the argument with the KV cache
    SEPARABLE: ClassVar[frozenset[str]] = frozenset()  # arguments that another operation can handle before this one

    device: Device = NOWHERE

    def __post_init__(self) -> None:
        sizes = Sizes()
        for last in (False, True):
            for name, kind in self.KINDS.items():
                value = getattr(self, name)
                if kind.checked_last is last and not (value is None and kind.optional):
                    kind.check(name, value, self, sizes)
            if not last:
                self._check(sizes)

    def _check(self, sizes: Sizes) -> None:
        """Raise unless the fields fit together. Each field has already passed its own check."""
        del sizes

    def check_strides(self, strides: Callable[[Any], tuple[int, ...]]) -> None:
        """Raise if the operation cannot use the arrays' strides, which `strides(array)` returns."""
        del strides

    @abc.abstractmethod
    def results(self) -> tuple[Result, ...]:
        """The shapes and dtypes of the results."""

    def check_values(self) -> None:  # noqa: B027
        """Raise `InvalidInput` for the first invalid value in an index array. The arrays must be NumPy arrays.

        An operation that does not override this method accepts every value, and ignores values that refer to nothing.
        """

    @classmethod
    def no_gradient(cls) -> str:
        """The error message for differentiating an operation that has no gradient."""
        is_gradient = cls.OPERATION.endswith("_backward")
        reason = "it is a gradient itself" if is_gradient else cls.WHY_NO_GRADIENT
        return f"{cls.OPERATION} has no gradient: {reason}"

    @classmethod
    def name_of(cls, index: int) -> str:
        """The name of the argument to which a flat argument belongs."""
        return next(name for name, (first, stop) in cls.RANGES.items() if first <= index < stop)

    @classmethod
    def no_gradient_of(cls, index: int) -> str | None:
        """The error message for a gradient with respect to a flat argument; None if the argument is differentiable.

        An operation has gradients with respect to its DIFFERENTIABLE arguments. All other arguments are constants.
        """
        name = cls.name_of(index)
        if name in cls.DIFFERENTIABLE:
            return None
        return f"{cls.OPERATION} has no gradient with respect to {name}: expected {name} without one"

    @classmethod
    def requests_of_gradients(cls, differentiated: Collection[str]) -> dict[str, bool]:
        """The flags `return_d_<name>` of `<operation>_backward`, to request gradients of OFTEN_CONSTANT arguments."""
        return {f"return_d_{name}": name in differentiated for name in cls.OFTEN_CONSTANT}

    @classmethod
    def expect_gradient(cls, arguments: Mapping[str, Any]) -> None:
        """Raise `InvalidInput` if a differentiable operation has no gradient with these arguments."""
        del arguments

    @classmethod
    def argument_names(cls) -> tuple[str, ...]:
        return tuple(cls.KINDS)

    @classmethod
    def prepare(cls, arguments: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
        """The record's arguments, converted from those of the public function, which accepts more forms."""
        return {
            name: None if (value := arguments[name]) is None else kind.prepare(name, value, arrays)
            for name, kind in cls.KINDS.items()
        }

    @classmethod
    def schema(cls) -> str:
        """The flat arguments as a torch operator declares them."""
        declared = [text for name, kind in cls.KINDS.items() for text in kind.schema(name)]
        marks = (f"({letter}!)" for letter in "abcdefgh")
        return ", ".join(text.format(next(marks)) if "{}" in text else text for text in declared)

    @classmethod
    def flatten(cls, arguments: Mapping[str, Any]) -> list[Any]:
        """Arguments in the order and form of `schema`."""
        flat: list[Any] = []
        for name, kind in cls.KINDS.items():
            value = arguments[name]
            flat += cls.ABSENT[name] if value is None and kind.optional else kind.flatten(name, value)
        return flat

    @classmethod
    def unflatten(cls, flat: Sequence[Any]) -> dict[str, Any]:
        """The inverse of `flatten`."""
        arguments = {name: flat[first] for name, (first, stop) in cls.RANGES.items() if first < stop}
        for name, kind in cls.REGROUPED.items():
            arguments[name] = kind.unflatten(flat[slice(*cls.RANGES[name])])
        return arguments

    def written(self) -> list[str]:
        """The names of the arguments that this call writes."""
        return [name for name in self.WRITTEN if getattr(self, name) is not None]

    @classmethod
    def written_by(cls, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        """The names of the arguments that a call writes, itself or by an operation before it."""
        return cls.WRITTEN

    @classmethod
    def regrouped(cls, arguments: Mapping[str, Any], written: Sequence[Any]) -> dict[str, Any]:
        """The `written` arrays, given in the order of the results, by the name of the argument that each replaces."""
        arrays, replaced = iter(written), {}
        for name in cls.WRITTEN:
            given = arguments[name]
            if isinstance(given, (tuple, list)):
                replaced[name] = tuple(next(arrays) for _ in given)
            elif given is not None:
                replaced[name] = next(arrays)
        return replaced

    @classmethod
    def caches_of(cls, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        """The public results of a write: only the cache or, if the call has any other WRITTEN argument, all of them."""
        caches = tuple(arguments[name] for name in cls.WRITTEN)
        return caches[:1] if all(cache is None for cache in caches[1:]) else caches

    def arguments(self) -> dict[str, Any]:
        """The arguments by name, which are those of the operation's function in `reference/`."""
        return {name: getattr(self, name) for name in self.argument_names()}

    def changed(self) -> list[str]:
        """The optional arguments that differ from their defaults."""
        return [name for name, default in self.DEFAULTS.items() if not _is(getattr(self, name), default)]

    @classmethod
    def unchecked(cls, **values: Any) -> Self:
        """A record of values that are known to be valid; every field must be given."""
        record = object.__new__(cls)
        for name, value in values.items():
            object.__setattr__(record, name, value)
        return record

    def map(self, change: Callable[[Any], Any]) -> Self:
        """The call with `change` applied to every array, without new checks; `change` must keep the shapes."""
        values = self.arguments()
        for name, value in values.items():
            if isinstance(value, (tuple, list)):
                values[name] = tuple(change(item) if is_array(item) else item for item in value)
            elif is_array(value):
                values[name] = change(value)
        return self.unchecked(**values, device=self.device)


def _ranges(kinds: Mapping[str, Kind]) -> Iterator[tuple[str, tuple[int, int]]]:
    stop = 0
    for name, kind in kinds.items():
        first, stop = stop, stop + len(kind.schema(name))
        yield name, (first, stop)


def _is(value: Any, default: Any) -> bool:
    if isinstance(value, np.generic):
        value = value.item()
    return value is default or (isinstance(value, (bool, int, float, str)) and value == default)


class WritingCall(Call):
    """The base of attention calls with `new_kv`, this step's rows, which another operation can write first."""

    SEPARABLE: ClassVar[frozenset[str]] = frozenset({"new_kv"})
    WRITE: ClassVar[type[Call]]  # the record of the operation that writes `new_kv`

    @classmethod
    def arguments_of_write(cls, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that the write shares with this call. A subclass adds the rows to write."""
        shared = {name: arguments[name] for name in cls.WRITE.KINDS if name in arguments}
        return {**cls.WRITE.DEFAULTS, **shared}

    @classmethod
    def written_by(cls, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        if arguments["new_kv"] is None:
            return ()
        return tuple(cls.CACHE if name == cls.WRITE.CACHE else name for name in cls.WRITE.WRITTEN)

    def write_of_new_kv(self) -> Any:
        """The call that writes `new_kv`."""
        return self.WRITE(**self.arguments_of_write(self.arguments()), device=self.device)

    def after_write(self, written: Sequence[Any]) -> Self:
        """This call without `new_kv`, on the written caches."""
        replaced = self.WRITE.regrouped(self.arguments_of_write(self.arguments()), written)
        changed = {self.CACHE if name == self.WRITE.CACHE else name: value for name, value in replaced.items()}
        return self.unchecked(**self.arguments() | changed | {"new_kv": None}, device=self.device)


class GroupedCall(Call):
    """The base of records in which queries [..., H, D] attend to keys that may have fewer heads."""

    q: Any
    sm_scale: Any
    causal: Any
    sliding_window: Any
    key_ranges: Any = None
    selected: Any = None
    block_size: int | None = None
    relative_bias: Any
    out_dtype: str | None = None
    return_max_logits: bool = False

    def _expect_one_mask(self) -> None:
        """Check that a call with `key_ranges` has no other mask."""
        if self.key_ranges is None:
            return
        for name in ("causal", "sliding_window", "draft_mask"):
            got, default = getattr(self, name, None), self.DEFAULTS.get(name)
            if not _is(got, default):
                got = "an array" if is_array(got) else got
                raise InvalidInput(f"expected {name} at its default, {default}, with key_ranges, got {got}")

    def _expect_lists_of_blocks(self) -> None:
        """Check that a call has both the lists of blocks, `selected`, and `block_size`, or neither of them."""
        if (self.selected is None) != (self.block_size is None):
            got = "block_size" if self.selected is None else "selected"
            raise InvalidInput(f"expected selected and block_size, or neither, got {got} alone")

    @property
    @abc.abstractmethod
    def num_kv_heads(self) -> int: ...

    @property
    def num_q_heads(self) -> int:
        return self.q.shape[-2]

    @property
    def head_dim(self) -> int:
        return self.q.shape[-1]

    @property
    def v_head_dim(self) -> int:
        """The head size of the values."""
        return self.head_dim

    @property
    def group(self) -> int:
        """The number of query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def num_ranges(self) -> int:
        """The number of ranges of keys that each query has; 0 without `key_ranges`."""
        return 0 if self.key_ranges is None else self.key_ranges.shape[1]

    @property
    def num_selected(self) -> int:
        """The number of entries in each list of blocks; 0 without `selected`."""
        return 0 if self.selected is None else self.selected.shape[2]

    @property
    def bias_at_own(self) -> int:
        """The column of `relative_bias` that belongs to a query's own position."""
        return 0 if self.causal and self.key_ranges is None else self.relative_bias.shape[-1] // 2

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.sm_scale is None else float(self.sm_scale)

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (*self.q.shape[:-1], self.v_head_dim)

    @property
    def result_dtype(self) -> Any:
        """The dtype of `out`."""
        return self.out_dtype or self.q.dtype

    @property
    def lse_dtype(self) -> str:
        return wide_dtype(self.q)

    def max_logits_if_requested(self) -> dict[str, Result]:
        """The result `max_logits` by its name, or nothing."""
        return {"max_logits": Result((self.num_q_heads,), self.lse_dtype)} if self.return_max_logits else {}


def gradients_of(call: Call, forward: type[Call]) -> tuple[Result, ...]:
    """The results of a gradient operation: one result with the shape and dtype of each differentiable argument.

    The result for an absent argument is empty, and so is the result for a gradient that the call does not request.
    """
    arrays = [
        getattr(call, name) if name not in forward.OFTEN_CONSTANT or getattr(call, f"return_d_{name}") else None
        for name in forward.DIFFERENTIABLE
    ]
    return tuple(Result((0,), "float32") if array is None else Result(array.shape, array.dtype) for array in arrays)
