"""The interfaces of a backend's module, which the dispatch calls, and of a launcher, which a backend calls."""

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ragged_attention.calls import Call

OPTIONS = {"num_warps": 4, "num_stages": 2}  # the default options of a launch
Shaped = tuple[Sequence[int], Any]  # the shape of a result to allocate, and its dtype or the dtype's name


class Implementation(Protocol):
    """The interface of each module `<backend's package>.<operation>`. Only `run` is required; `complete` adds the rest.

    A module may also offer `invariant_tile(call)`, which returns a `Tile` that makes an attention call's results
    batch-invariant. A module whose heuristic always returns such a tile sets `BATCH_INVARIANT = True` instead. A module
    with neither refuses calls under `batch_invariant`.
    """

    @property
    def Tile(self) -> type[Any]:
        """A frozen dataclass of the tunables, which checks its constraints. By default it has no fields."""
        ...

    @property
    def FEATURES(self) -> frozenset[str]:
        """The optional fields of the record that the module supports, by default none.

        The dispatch refuses a call that sets any other field.
        """
        ...

    def heuristic(self, call: Any, /) -> Any:
        """A valid `Tile` for a call, by default `Tile()`."""
        ...

    def why_not(self, call: Any, /) -> str | None:
        """None if the module takes the call, else a sentence with argument, value and limit.

        The default is the `why_not` of the module's package. If the package has none, the module takes every call. The
        result depends only on static facts.
        """
        ...

    def why_not_by_default(self, call: Any, /) -> str | None:
        """A reason to refuse a call that does not request the backend by name, by default None.

        It is called after `why_not`. It refuses calls for which no measurement shows that the backend is the fastest.
        """
        ...

    def run(self, call: Any, tile: Any, launch: Any, /) -> Any:
        """Run the operation and return its results. It is called only after `why_not` has returned None."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class NoTunables:
    """The `Tile` of a module that has nothing to tune."""

    def __str__(self) -> str:
        return "no tunables"


def complete(module: Any) -> Implementation:
    """The module, with defaults for the names that it does not define; its package may have a default `why_not`."""
    package = sys.modules.get(getattr(module, "__package__", ""))
    defaults: dict[str, Any] = {
        "Tile": NoTunables,
        "FEATURES": frozenset(),
        "heuristic": lambda call: module.Tile(),
        "why_not": getattr(package, "why_not", lambda call: None),
        "why_not_by_default": lambda call: None,
    }
    if getattr(module, "BATCH_INVARIANT", False):
        defaults["invariant_tile"] = lambda call: module.heuristic(call)
    for name, default in defaults.items():
        if not hasattr(module, name):
            setattr(module, name, default)
    return module


class Launcher(Protocol):
    """Runs a backend's kernels and functions on the arrays of a front end.

    The methods take arrays of the call's record and earlier results. A dtype is the framework's own or its name.
    """

    def __call__(
        self, kernel: Any, grid: tuple[int, ...], inputs: Sequence[Any], outputs: Sequence[Shaped], *,
        inplace: Sequence[int] = (), **arguments: Any,
    ) -> list[Any]:  # fmt: skip
        """Enqueue the Triton kernel `kernel[grid](*inputs, *outputs, **arguments)` and return the outputs.

        `outputs` has the shapes and dtypes of new arrays, which are allocated uninitialised. The kernel may also write
        the inputs whose indices are in `inplace`: it gets them a second time, as outputs after the new arrays. 8-bit
        floats and bools reach the kernel as uint8. The arguments include `num_warps` and `num_stages` if they differ
        from OPTIONS, and `launch_pdl` if it is True.
        """
        ...

    @property
    def num_threads(self) -> int:
        """The number of CPU threads that a call may use; if it is 0, the framework decides."""
        ...

    def native(
        self, function: Any, operands: Mapping[str, Any], outputs: Mapping[str, Shaped | str | None],
        numbers: Mapping[str, int | float],
    ) -> dict[str, Any]:  # fmt: skip
        """Call a compiled function and return its results by name; None stands for an absent array.

        `outputs` gives an operand's name for a result that overwrites this operand. Other results are allocated
        uninitialised. `function` is a backend's object: `function.record` is the ctypes structure of the arguments, and
        `function.on(platform)` is the compiled function, which reads that structure before it returns.
        """
        ...

    def on_host(
        self, function: Callable[..., Any], call: Call, outputs: str | Sequence[Shaped | str], **extra: Any
    ) -> Any:
        """Run a NumPy function on the call's arguments. It gets floats as float64, and 8-bit floats as their bits.

        For each result, `outputs` has its shape and dtype, or the name of the argument that the result overwrites.
        """
        ...

    def sorted(self, numbers: Any, /) -> tuple[Any, Any]:
        """The numbers [N] in a stable ascending order, and the i32 index that each number had before the sort."""
        ...

    def strides(self, array: Any, /) -> tuple[int, ...]:
        """An array's strides, in elements."""
        ...

    def contiguous(self, array: Any, /) -> Any:
        """The array, copied if it is not contiguous."""
        ...

    def packed(self, array: Any, /) -> Any:
        """The array, copied unless its last dimension is contiguous."""
        ...

    def aligned(self, array: Any, /, bytes: int = 16) -> Any:
        """The array, copied unless its rows are contiguous and begin at multiples of `bytes`."""
        ...

    def words(self, array: Any, /, *, packed_rows: bool) -> Any:
        """A paged cache of bytes, copied unless its pages and rows begin at multiples of 4 bytes.

        With `packed_rows` it is also copied if there are gaps between the rows of a page.
        """
        ...


class PackedArrays:
    """The methods of a launcher whose arrays are always contiguous and aligned, so that none is copied."""

    def strides(self, array: Any, /) -> tuple[int, ...]:
        return tuple(math.prod(array.shape[axis + 1 :]) for axis in range(len(array.shape)))

    def contiguous(self, array: Any, /) -> Any:
        return array

    packed = contiguous

    def aligned(self, array: Any, /, bytes: int = 16) -> Any:
        return array

    def words(self, array: Any, /, *, packed_rows: bool) -> Any:
        return array
