"""Records the launches of the Triton backend for a call, without running them.

The call's arrays need no values, because launches depend only on shapes and dtypes.
"""

import dataclasses
import math
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ragged_attention import dispatch
from ragged_attention.calls import Call, dtype_name
from ragged_attention.protocols import OPTIONS, PackedArrays
from ragged_attention.tools.samples import FakeArray


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel launch: its operands in order, its other arguments by name, and its options."""

    kernel: Any
    operands: tuple[Any, ...]
    arguments: Mapping[str, Any]
    num_warps: int
    num_stages: int
    grid: tuple[int, ...] = ()
    launch_pdl: bool = False  # whether it may start before the previous launch ends; its code is the same

    def __post_init__(self) -> None:
        """Raise `TypeError` if an argument is Triton's `constexpr`, as fields of records are, not its plain value."""
        numbers = {"num_warps": self.num_warps, "num_stages": self.num_stages, "grid": self.grid, **self.arguments}
        for name, value in numbers.items():
            for each in value if isinstance(value, tuple) else (value,):
                if type(each).__name__ == "constexpr":
                    raise TypeError(f"{self.name}: expected a plain value for {name}, got {each!r}")

    @property
    def name(self) -> str:
        return self.kernel.__name__

    @property
    def constants(self) -> dict[str, Any]:
        """The arguments other than arrays. A record of constants is replaced by its fields, with plain values.

        If several records have a field of the same name, the first value counts.
        """
        return dict(reversed(list(_flat(self.arguments))))

    @property
    def programs(self) -> int:
        return math.prod(self.grid)


def _flat(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in arguments.items():
        values = getattr(value, "plain", value)
        if isinstance(values, types.SimpleNamespace):
            yield from _flat(vars(values))
        else:
            yield name, value


class Recorder(PackedArrays):
    """A launcher that launches nothing and remembers every launch. Its arrays are contiguous, so it copies none."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def __call__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        inputs: Sequence[Any],
        outputs: Iterable[tuple[Sequence[int], Any]],
        *,
        inplace: Sequence[int] = (),
        num_warps: int = OPTIONS["num_warps"],
        num_stages: int = OPTIONS["num_stages"],
        launch_pdl: bool = False,
        **arguments: Any,
    ) -> list[Any]:
        if unknown := sorted(arguments.keys() - set(kernel.arg_names)):  # the interpreter ignores them
            raise TypeError(f"{kernel.__name__}: expected only arguments of the kernel, got {', '.join(unknown)}")
        new = [FakeArray(tuple(shape), str(dtype).rpartition(".")[2]) for shape, dtype in outputs]
        new += [inputs[index] for index in inplace]
        if 0 not in grid:
            operands = tuple(map(self.bits, (*inputs, *new)))
            self.launches.append(Launch(kernel, operands, arguments, num_warps, num_stages, grid, launch_pdl))
        return new

    def sorted(self, numbers: Any) -> tuple[Any, Any]:
        return numbers, FakeArray(numbers.shape, "int32")

    def bits(self, array: Any) -> Any:
        """The array as a kernel receives it: both front ends pass 8-bit floats as uint8."""
        return FakeArray(array.shape, "uint8") if dtype_name(array).startswith("float8") else array

    def on_host(self, function: Any, call: Any, outputs: Any, **extra: Any) -> Any:
        raise TypeError(f"expected only kernel launches, got the host function {function.__name__}")


def record(call: Call, tile: Any = None) -> list[Launch]:
    """The launches of the Triton backend for `call`; `tile` defaults to that of its heuristic."""
    module: Any = dispatch.load(call.OPERATION, "triton")
    recorder = Recorder()
    module.run(call, module.heuristic(call) if tile is None else tile, recorder)
    return recorder.launches
