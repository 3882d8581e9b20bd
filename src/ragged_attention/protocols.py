"""The two seams, typed: what a backend's module offers to the dispatch, and what a front end offers to a backend."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ragged_attention.calls import Call

OPTIONS = {"num_warps": 4, "num_stages": 2}  # of a launch that does not set others
Shaped = tuple[Sequence[int], Any]  # the shape of a result to allocate, and its dtype or that dtype's name


class Implementation(Protocol):
    """What each module `<backend's package>.<operation>` offers.

    It may offer two more functions. `why_not_by_default(call)` is asked after `why_not` if a call reaches the backend
    in its platform's order without naming it: it declines for kernels that are not yet shown to be the fastest ones.
    An attention operation may have `invariant_tile(call)`, a `Tile` that makes results batch-invariant; without it,
    calls under `batch_invariant` are refused.
    """

    @property
    def Tile(self) -> type[Any]:
        """A frozen dataclass of what may be tuned, its constraints checked."""
        ...

    @property
    def FEATURES(self) -> frozenset[str]:
        """The optional fields of the record that are honoured; dispatch refuses a call that sets any other."""
        ...

    def heuristic(self, call: Any, /) -> Any:
        """A sound `Tile` for a call."""
        ...

    def why_not(self, call: Any, /) -> str | None:
        """None if it takes the call, else one sentence: argument, value, limit. It depends on static facts only."""
        ...

    def run(self, call: Any, tile: Any, launch: Any, /) -> Any:
        """The operation's results; may assume that `why_not` returned None."""
        ...


class Launcher(Protocol):
    """How a backend's work is done on the arrays of the front end that was called.

    Arrays are those of the call's record, or of earlier results; `dtype` is the framework's, or a dtype's name.
    """

    def __call__(
        self, kernel: Any, grid: tuple[int, ...], inputs: Sequence[Any], outputs: Sequence[Shaped], *,
        inplace: Sequence[int] = (), **arguments: Any,
    ) -> list[Any]:  # fmt: skip
        """Enqueue the Triton kernel `kernel[grid](*inputs, *outputs, **arguments)` and return the outputs.

        After the new outputs come, once more, the inputs numbered in `inplace`, which the kernel may write.
        """
        ...

    @property
    def num_threads(self) -> int:
        """How many threads of a CPU a call may use; 0 leaves it to the framework."""
        ...

    def native(
        self, function: Any, operands: Mapping[str, Any], outputs: Mapping[str, Shaped | str | None],
        numbers: Mapping[str, int | float],
    ) -> dict[str, Any]:  # fmt: skip
        """Call a compiled function and return its results by name; None stands for an absent array.

        A result given as the name of an operand is written in that one's place.
        """
        ...

    def on_host(self, function: Callable[..., Any], call: Call, outputs: str | Sequence[Shaped], **extra: Any) -> Any:
        """Run a NumPy function on the call's arguments: floats as float64, 8-bit floats as bits.

        `outputs` are its results, or the name of the argument that takes them.
        """
        ...

    def sorted(self, numbers: Any, /) -> tuple[Any, Any]:
        """Numbers [N] in ascending order, and their i32 indices before sorting; equal ones keep their order."""
        ...

    def strides(self, array: Any, /) -> tuple[int, ...]:
        """An array's strides, in elements."""
        ...

    def contiguous(self, array: Any, /) -> Any:
        """The array, copied if it is not contiguous."""
        ...

    def packed(self, array: Any, /) -> Any:
        """The array, copied if its last dimension is strided."""
        ...

    def aligned(self, array: Any, /, bytes: int = 16) -> Any:
        """The array, copied if a row of it is strided or does not begin at a multiple of `bytes`."""
        ...

    def words(self, array: Any, /, *, packed_rows: bool) -> Any:
        """A paged cache of bytes, copied if a page or row of it does not begin at a multiple of 4 bytes."""
        ...


class PackedArrays:
    """The methods of a launcher whose arrays are always contiguous and aligned, so that none is ever copied."""

    def strides(self, array: Any, /) -> tuple[int, ...]:
        return tuple(math.prod(array.shape[axis + 1 :]) for axis in range(len(array.shape)))

    def contiguous(self, array: Any, /) -> Any:
        return array

    packed = contiguous

    def aligned(self, array: Any, /, bytes: int = 16) -> Any:
        del bytes
        return array

    def words(self, array: Any, /, *, packed_rows: bool) -> Any:
        del packed_rows
        return array
