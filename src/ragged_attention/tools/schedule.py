"""What the programs of Triton's kernels would do, program by program, found by running the kernels' own plan.

The kernels divide their work with integers alone: a program looks up its sequence and the edges of its keys, then
visits blocks of these. So a kernel's source is run here as plain Python over NumPy integers, once for each program of
the first KV head. Everything about queries, keys and results (`STUBS`) is replaced by something that computes nothing,
and the loops over keys by something that notes which blocks they would visit. No rule of a kernel is repeated here, so
none can differ; a function of Triton's that this does not know is an error.
"""

import dataclasses
import heapq
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ragged_attention import dispatch
from ragged_attention.calls import Call, dtype_name
from ragged_attention.samples import ShapeLauncher


@dataclasses.dataclass(frozen=True, slots=True)
class Visit:
    """Blocks of keys [start, stop) that a loop of a program visits, one after another."""

    start: int
    stop: int
    block: int
    masked: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A program that has something to do; every KV head has one like it."""

    index: int  # along the grid's first axis
    seq: int
    tokens: tuple[int, int]  # its first and its last query, counted in the sequence's tokens of this step
    visits: tuple[Visit, ...]

    @property
    def keys(self) -> int:
        """How many keys it visits, seen or not: what its time goes by."""
        return sum(visit.stop - visit.start for visit in self.visits)

    @property
    def span(self) -> tuple[int, int]:
        """The first key of its blocks, and where they end; (0, 0) where it visits none."""
        starts, stops = [visit.start for visit in self.visits], [visit.stop for visit in self.visits]
        return min(starts, default=0), max(stops, default=0)


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """A kernel, its grid, and the programs of one KV head that do not leave at once."""

    kernel: str
    grid: tuple[int, ...]
    programs: tuple[Program, ...]
    merging: int = 0  # programs of one KV head that put results together from parts

    @property
    def heads(self) -> int:
        return self.grid[1]

    @property
    def working(self) -> int:
        return (len(self.programs) or self.merging) * self.heads

    @property
    def longest(self) -> int:
        """The keys of the program that visits most."""
        return max((program.keys for program in self.programs), default=0)


class Unknown:
    """What nothing is known about, queries and products: any computation with it gives it again."""

    def __getattr__(self, name: str) -> "Unknown":
        return self

    def __call__(self, *arguments: Any, **more: Any) -> "Unknown":
        return self

    def __getitem__(self, index: Any) -> "Unknown":
        return self

    def _same(self, other: Any) -> "Unknown":
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _same
    __mod__ = __floordiv__ = __lt__ = __le__ = __gt__ = __ge__ = __and__ = __rand__ = _same
    __eq__ = __ne__ = _same  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]
    __array_ufunc__ = None  # so that NumPy's numbers leave operations to it


UNKNOWN = Unknown()


class Numbers(np.ndarray):
    """Integers as kernels have them: also a single one can be converted."""

    def to(self, dtype: Any) -> "Numbers":
        return self


def numbers(value: Any) -> Any:
    """Integers, single ones and those in tuples too, as `Numbers`; everything else as it is."""
    if isinstance(value, tuple):
        lifted = map(numbers, value)
        return type(value)(*lifted) if hasattr(value, "_fields") else tuple(lifted)
    return np.asarray(value).view(Numbers) if isinstance(value, int | np.integer | np.ndarray | np.bool_) else value


@dataclasses.dataclass(frozen=True, slots=True)
class Pointer:
    """An array's address and some elements more. Of an array that is only a shape nothing can be read."""

    array: Any
    offset: Any = 0

    @property
    def dtype(self) -> Any:
        return types.SimpleNamespace(element_ty=dtype_name(self.array))

    def __add__(self, more: Any) -> "Pointer":
        return self if isinstance(more, Unknown) else Pointer(self.array, self.offset + more)


def load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Any:
    """The integers there; `other` where the mask hides them. Out of bounds is an error, as it is in a kernel."""
    elements = pointer.array.ravel()
    shape = np.broadcast_shapes(np.shape(pointer.offset), np.shape(mask))
    there = np.broadcast_to(True if mask is None else mask, shape)
    offset = np.broadcast_to(pointer.offset, shape)[there]
    if offset.size and offset.min() < 0:
        raise IndexError(f"index {offset.min()} of an array of {elements.size}")
    found = np.full(shape, other, np.int64)
    found[there] = elements[offset]
    return numbers(found)


def _known(function: Callable[..., Any]) -> Any:
    """A function of NumPy as a class holds it."""

    def call(*arguments: Any) -> Any:
        return UNKNOWN if any(isinstance(a, Unknown) for a in arguments) else numbers(function(*arguments))

    return staticmethod(call)


class Language:
    """Of `triton.language` what kernels plan with; what is not here fails by its name."""

    int32 = int64 = "int64"
    bfloat16, float32, int1 = "bfloat16", "float32", "int1"
    math = UNKNOWN
    where, minimum, maximum = map(_known, (np.where, np.minimum, np.maximum))
    sum, cumsum, max, min = map(_known, (np.sum, np.cumsum, np.max, np.min))
    arange = _known(np.arange)
    zeros_like = _known(np.zeros_like)
    load = staticmethod(load)

    def __init__(self, grid: Sequence[int]) -> None:
        self.grid = grid
        self.program: tuple[int, ...] = ()

    def program_id(self, axis: int) -> Any:
        return numbers(self.program[axis])

    def num_programs(self, axis: int) -> int:
        return self.grid[axis]

    def cast(self, value: Any, dtype: Any) -> Any:
        return value

    def zeros(self, shape: Any, dtype: Any) -> Unknown:
        return UNKNOWN

    def full(self, shape: Any, value: Any, dtype: Any) -> Unknown:
        return UNKNOWN

    def store(self, pointer: Any, value: Any, mask: Any = None) -> None:
        """Results are of no interest."""


def _plain(value: Any) -> Any:
    """A record of constants as one of plain values, everything else as it is."""
    return getattr(value, "plain", value)


# Functions of the kernels' modules that have to do with queries, keys and results, not with who does what; and how many
# values each returns.
STUBS = {
    "clear_rows": 1, "draft_rows": 1, "finish": 3, "gdc_launch_dependents": 1, "gdc_wait": 1, "load_queries": 5,
    "load_scale": 1, "logit_scales": 4, "no_sums": 1, "store_columns": 1, "store_groups": 1, "store_part": 1,
    "store_rows": 1, "sum_of_each_row": 1, "zero_after": 1, "zeros_like": 2,
}  # fmt: skip


class Walk:
    """The programs of one launch, one after another."""

    def __init__(self, kernel: Any, grid: Sequence[int], operands: Sequence[Any], given: Mapping[str, Any]) -> None:
        self.language = Language(grid)
        self.visits: list[Visit] = []
        self.found: dict[str, Any] = {}
        self.tokens = (0, 0)
        self.merges = False
        self.arguments: dict[str, Any] = dict(zip(kernel.arg_names, map(Pointer, operands), strict=False))
        self.arguments |= {name: _plain(value) for name, value in given.items() if name in kernel.arg_names}
        self.stubs: dict[str, Any] = {name: self._stub(count) for name, count in STUBS.items()}
        self.stubs |= {"load_rows": self._rows, "in_float16": lambda q: (q, None), "merge_parts": self._merge}
        self.plain: dict[Any, Callable[..., Any]] = {}
        self.run = self._plain(kernel)

    @staticmethod
    def _stub(count: int) -> Callable[..., Any]:
        return lambda *arguments: UNKNOWN if count == 1 else (UNKNOWN,) * count

    def _plain(self, function: Any) -> Callable[..., Any]:
        """A kernel, or a function that it calls, as plain Python over this module's numbers."""
        if function not in self.plain:
            fn = function.fn
            scope: dict[str, Any] = {}
            plain = types.FunctionType(fn.__code__, scope, fn.__name__, fn.__defaults__, fn.__closure__)
            self.plain[function] = lambda *arguments, **more: numbers(plain(*arguments, **more))
            for name in set(fn.__code__.co_names) & fn.__globals__.keys():  # among them attributes of the same names
                scope[name] = self._named(name, fn.__globals__[name])
        return self.plain[function]

    def _named(self, name: str, value: Any) -> Any:
        """What stands for a name of a kernel's module."""
        if name == "tl":
            return self.language
        if name == "attend":
            return self._attend_pages if value.fn.__module__.endswith("_pages") else self._attend_list
        if name in self.stubs:
            return self.stubs[name]
        if hasattr(value, "fn"):
            plain = self._plain(value)
            return self._tokens(plain) if name == "token_and_head" else plain
        return getattr(value, "value", value) if type(value).__name__ == "constexpr" else value

    def _rows(self, q_ptr: Pointer, *arguments: Any) -> Any:
        return types.SimpleNamespace(dtype=q_ptr.dtype.element_ty, shape=(self.arguments["BLOCK_Q"],))

    def _merge(self, *arguments: Any) -> Any:
        self.merges = True
        return (UNKNOWN,) * 3

    def _tokens(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """`token_and_head` of `_latent`, whose tokens are noted; rows behind the last are of none."""

        def token_and_head(row: Any, *arguments: Any) -> Any:
            token, head = plain(row, *arguments)
            if not isinstance(row, Unknown):
                self.tokens = (int(np.min(token)), min(int(np.max(token)), self.arguments["NUM_Q"] - 1))
            return token, head

        return token_and_head

    def _note(self, first: int, blocks: int, block: int, masked: bool) -> None:
        if blocks > 0:
            self.visits.append(Visit(first, first + blocks * block, block, masked))

    def _attend_pages(self, q, unit, state, blocks, visible, pages, scales, features, sizes, masked, block, parts):
        """Stands for the loop of `_pages`, which visits blocks in two runs."""
        left = int(blocks.left_blocks) if masked else int(blocks.num_blocks)
        self._note(int(blocks.left), left, block, masked)
        self._note(int(blocks.right), int(blocks.num_blocks) - left, block, masked)
        seq = int(pages.table_ptr.offset) // self.arguments["table_stride"]
        tokens = (int(visible.low - visible.first_new), int(visible.high - visible.first_new))
        self.found = {"seq": seq, "tokens": tokens}
        return state

    def _attend_list(self, queries, state, cache, keys_of_list, *rest):
        """Stands for the loop of `_latent`; keys are positions in a list, in a second list from 0 on again."""
        block, begin, end = self.arguments["BLOCK_KV"], int(keys_of_list.begin), int(keys_of_list.end)
        self._note(begin * block, end - begin, block, True)
        if not self.found:
            seq = int(keys_of_list.ptr.offset) // self.arguments["list_seq_stride"]
            self.found = {"seq": seq, "tokens": self.tokens}
        return (UNKNOWN,) * 5

    def programs(self) -> Iterator[tuple[Program | None, bool]]:
        """Of each program of the first KV head, in order: what it visits, None if nothing, and whether it merges."""
        for third in range(math.prod(self.language.grid[2:])):
            for index in range(self.language.grid[0]):
                self.language.program = (index, 0, third)
                self.visits, self.found, self.merges = [], {}, False
                self.run(**self.arguments)
                yield Program(index=index, visits=tuple(self.visits), **self.found) if self.found else None, self.merges


class Recorder(ShapeLauncher):
    """A launcher that launches nothing, but walks through the programs that would run."""

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
        **arguments: Any,
    ) -> list[Any]:
        new = self.results(inputs, outputs, inplace)
        if 0 not in grid:
            found = list(Walk(kernel, grid, (*inputs, *new), arguments).programs())
            working = tuple(program for program, _ in found if program)
            name = getattr(kernel, "__name__", None) or kernel.fn.__name__
            self.launches.append(Launch(name, grid, working, sum(merges for _, merges in found)))
        return new


def launches_of(call: Call, tile: Any = None) -> list[Launch]:
    """What the Triton room would launch for a call whose lengths and tables are NumPy arrays, all else shapes.

    `tile` is that of the room's heuristic where none is given.
    """
    room: Any = dispatch.load(call.OPERATION, "triton")
    recorder = Recorder()
    room.run(call, room.heuristic(call) if tile is None else tile, recorder)
    return recorder.launches


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """A program on a multiprocessor, in keys since its kernel began."""

    lane: int
    start: int
    stop: int
    program: Program


def timeline(launch: Launch, lanes: int) -> list[Turn]:
    """The programs of all KV heads on multiprocessors: each, in the order of the grid, goes to the one that is free
    first, and takes as long as it has keys."""
    free = [(0, lane) for lane in range(lanes)]
    turns: list[Turn] = []
    for program in launch.programs * launch.heads:
        start, lane = heapq.heappop(free)
        turns.append(Turn(lane, start, start + program.keys, program))
        heapq.heappush(free, (turns[-1].stop, lane))
    return turns


def filled(turns: Sequence[Turn], lanes: int) -> float:
    """The share of the time until the last program ends that multiprocessors have something to do."""
    end = max((turn.stop for turn in turns), default=0)
    return sum(turn.program.keys for turn in turns) / (end * lanes) if end else 1.0
