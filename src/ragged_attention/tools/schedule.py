"""The blocks of keys that each program of a Triton kernel visits, found by running the kernel's own index arithmetic.

A program needs only integers to find its work: it looks up its sequence and the range of its keys, then visits that
range block by block. This module runs the source of a kernel as plain Python over NumPy integers, once for each program
of the first KV head. Functions that handle queries, keys or results (`STUBS`) are replaced by stubs that compute
nothing, and the loops over keys by functions that record the blocks. The module repeats no rule of a kernel, so it
cannot disagree with one. If a kernel uses a function of Triton that the module does not know, an error names it.
"""

import dataclasses
import heapq
import itertools
import math
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ragged_attention.calls import Call, dtype_name
from ragged_attention.tools import recording


@dataclasses.dataclass(frozen=True, slots=True)
class Visit:
    """Consecutive blocks of keys [start, stop) that one loop of a program visits."""

    start: int
    stop: int
    block: int
    masked: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A program that has work. Each KV head has an equal program."""

    index: int  # its index on the grid's first axis
    seq: int
    tokens: tuple[int, int]  # its first and last query, as indices into the new tokens of the sequence
    visits: tuple[Visit, ...]

    @property
    def keys(self) -> int:
        """The number of visited keys, including masked keys. The program's time is proportional to this number."""
        return sum(visit.stop - visit.start for visit in self.visits)

    @property
    def span(self) -> tuple[int, int]:
        """The range of keys from its first to its last block; (0, 0) if the program visits no keys."""
        starts, stops = [visit.start for visit in self.visits], [visit.stop for visit in self.visits]
        return min(starts, default=0), max(stops, default=0)


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """A kernel, its grid, and the programs of one KV head that have work."""

    kernel: str
    grid: tuple[int, ...]
    programs: tuple[Program, ...]
    merging: int = 0  # programs of one KV head that merge partial results

    @property
    def heads(self) -> int:
        return self.grid[1]

    @property
    def working(self) -> int:
        return (len(self.programs) or self.merging) * self.heads

    @property
    def longest(self) -> int:
        """The number of keys that the longest program visits."""
        return max((program.keys for program in self.programs), default=0)


class Unknown:
    """A value that is not computed, such as a query or a product. Any computation with it is also unknown."""

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
    __array_ufunc__ = None  # so that NumPy leaves operations with an Unknown to this class


UNKNOWN = Unknown()


class Numbers(np.ndarray):
    """One or more of a kernel's integers, with the method `to` that Triton's integers have."""

    def to(self, dtype: Any) -> "Numbers":
        return self

    def _never_in_place(self, other: Any) -> Any:
        """Makes `+=` and similar operators bind a new value, as in Triton. NumPy would change the array itself."""
        return NotImplemented

    __iadd__ = __isub__ = __imul__ = __ifloordiv__ = __imod__ = __iand__ = __ior__ = _never_in_place  # type: ignore[assignment]


def numbers(value: Any) -> Any:
    """Convert an integer, an array or the integers of a tuple to `Numbers`; return anything else unchanged."""
    if isinstance(value, tuple):
        lifted = map(numbers, value)
        return type(value)(*lifted) if hasattr(value, "_fields") else tuple(lifted)
    return np.asarray(value).view(Numbers) if isinstance(value, int | np.integer | np.ndarray | np.bool_) else value


@dataclasses.dataclass(frozen=True, slots=True)
class Pointer:
    """An address: an array and an offset in elements. If the array is only a shape, loading from it fails."""

    array: Any
    offset: Any = 0

    @property
    def dtype(self) -> Any:
        return types.SimpleNamespace(element_ty=dtype_name(self.array))

    def __add__(self, more: Any) -> "Pointer":
        return self if isinstance(more, Unknown) else Pointer(self.array, self.offset + more)


def load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Any:
    """The integers at a pointer, or `other` for elements with a false mask. An index out of bounds is an error."""
    elements = pointer.array.ravel()
    shape = np.broadcast_shapes(np.shape(pointer.offset), np.shape(mask))
    mask = np.broadcast_to(True if mask is None else mask, shape)
    offset = np.broadcast_to(pointer.offset, shape)[mask]
    if offset.size and offset.min() < 0:
        raise IndexError(f"index {offset.min()} of an array of {elements.size}")
    values = np.full(shape, other, np.int64)
    values[mask] = elements[offset]
    return numbers(values)


def _known(function: Callable[..., Any]) -> Any:
    """A NumPy function as a static method that also accepts `UNKNOWN`."""

    def call(*arguments: Any) -> Any:
        return UNKNOWN if any(isinstance(a, Unknown) for a in arguments) else numbers(function(*arguments))

    return staticmethod(call)


class Language:
    """The part of `triton.language` that index arithmetic uses. An error names any other function."""

    int32 = int64 = "int64"
    bfloat16, float32, int1 = "bfloat16", "float32", "int1"
    math = zeros = full = store = UNKNOWN  # products and results are not computed
    where, minimum, maximum = map(_known, (np.where, np.minimum, np.maximum))
    sum, cumsum, max, min = map(_known, (np.sum, np.cumsum, np.max, np.min))
    arange, zeros_like = map(_known, (np.arange, np.zeros_like))
    load = staticmethod(load)
    static_range = range

    def __init__(self, grid: Sequence[int]) -> None:
        self.grid = grid
        self.program: tuple[int, ...] = ()

    def program_id(self, axis: int) -> Any:
        return numbers(self.program[axis])

    def num_programs(self, axis: int) -> int:
        return self.grid[axis]

    def cast(self, value: Any, dtype: Any) -> Any:
        return value


# Functions of the kernels' modules that handle queries, keys or results, and the number of values that each returns.
STUBS = {
    "clear_rows": 1, "finish": 2, "first_state": 5, "gdc_launch_dependents": 1, "gdc_wait": 1, "load_queries": 1,
    "load_scale": 1, "lse_in_base_2": 1, "narrow": 1, "restoring_factor": 1, "rows.load_queries": 5, "store_groups": 1,
    "normalised": 2, "store_rows": 1, "store_split": 1, "sum_of_each_row": 1, "with_later": 3, "zero_after": 1,
    "zeros_like": 2,
}  # fmt: skip


class Simulation:
    """Runs the programs of one launch, one after another."""

    def __init__(self, launch: recording.Launch) -> None:
        kernel = launch.kernel
        self.language = Language(launch.grid)
        self.visits: list[Visit] = []
        self.work: dict[str, Any] = {}
        self.tokens = (0, 0)
        self.merges = False
        self.arguments: dict[str, Any] = dict(zip(kernel.arg_names, map(Pointer, launch.operands), strict=False))
        for name in launch.arguments.keys() & kernel.arg_names:
            self.arguments[name] = getattr(launch.arguments[name], "plain", launch.arguments[name])
        self.stubs: dict[str, Any] = {name: self._stub(count) for name, count in STUBS.items()}
        self.stubs["merge_parts"] = self.stubs["merge_segments"] = self._merge
        self.plain: dict[Any, Callable[..., Any]] = {}
        self.run = self._plain(kernel)

    @staticmethod
    def _stub(count: int) -> Callable[..., Any]:
        return lambda *arguments: UNKNOWN if count == 1 else (UNKNOWN,) * count

    def _plain(self, function: Any) -> Callable[..., Any]:
        """A kernel, or a function that it calls, as plain Python over `Numbers`."""
        if function not in self.plain:
            fn = function.fn
            scope: dict[str, Any] = {}
            plain = types.FunctionType(fn.__code__, scope, fn.__name__, fn.__defaults__, fn.__closure__)
            self.plain[function] = lambda *arguments, **more: numbers(plain(*arguments, **more))
            for name in set(fn.__code__.co_names) & fn.__globals__.keys():  # co_names also holds names of attributes
                scope[name] = self._named(name, fn.__globals__[name])
        return self.plain[function]

    def _named(self, name: str, value: Any) -> Any:
        """The replacement for a global name in a kernel's module."""
        if name == "tl":
            return self.language
        if name == "attend":
            return self._attend_pages if value.fn.__module__.endswith("_pages") else self._attend_list
        qualified = f"{getattr(getattr(value, 'fn', value), '__module__', '').rpartition('.')[2]}.{name}"
        for stub in (qualified, name):
            if stub in self.stubs:
                return self.stubs[stub]
        if hasattr(value, "fn"):
            plain = self._plain(value)
            return self._tokens(plain) if name == "token_and_head" else plain
        return getattr(value, "value", value) if type(value).__name__ == "constexpr" else value

    def _merge(self, *arguments: Any) -> Any:
        self.merges = True
        return (UNKNOWN,) * 3

    def _tokens(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """`token_and_head` of `_latent` that also records the range of tokens, without rows after the last token."""

        def token_and_head(row: Any, *arguments: Any) -> Any:
            token, head = plain(row, *arguments)
            if not isinstance(row, Unknown):
                self.tokens = (int(np.min(token)), min(int(np.max(token)), self.arguments["CONFIG"].LISTS.Q_TOKENS - 1))
            return token, head

        return token_and_head

    def _note(self, first: int, blocks: int, block: int, masked: bool) -> None:
        if blocks > 0:
            self.visits.append(Visit(first, first + blocks * block, block, masked))

    def _attend_pages(self, queries, state, blocks, visible, mask, pages, attention, masked, EXACT=False):
        """Replaces the loop of `_pages`, which visits several ranges of blocks."""
        loop, count = attention.LOOP, int(blocks.num_blocks)
        block = loop.EXACT_KV if EXACT else loop.EDGE_KV if masked else loop.BLOCK_KV
        ends = [(int(blocks.left_blocks), blocks.right)] if masked else []
        parts = [(0, blocks.left), *ends, *blocks.later, (count, 0)]
        for (index, start), (next_index, _) in itertools.pairwise(parts):
            self._note(int(start), min(int(next_index), count) - int(index), block, masked)
        seq = int(pages.table_ptr.offset) // self.arguments["table_stride"]
        tokens = (int(visible.low - visible.num_old), int(visible.high - visible.num_old))
        self.work = {"seq": seq, "tokens": tokens}
        return state

    def _attend_list(self, queries, state, cache, keys_of_list, seen_by_row, factors, row_format, loop):
        """Replaces the loop of `_latent`. Keys are positions in a list; a second list begins at position 0 too."""
        block, begin, end = loop.BLOCK_KV, int(keys_of_list.begin), int(keys_of_list.end)
        self._note(begin * block, end - begin, block, True)
        if not self.work:
            seq = int(keys_of_list.ptr.offset) // self.arguments["list_seq_stride"]
            self.work = {"seq": seq, "tokens": self.tokens}
        return (UNKNOWN,) * 5

    def programs(self) -> Iterator[tuple[Program | None, bool]]:
        """Each program of the first KV head in order (None if it has no work), and whether it merges results."""
        for third in range(math.prod(self.language.grid[2:])):
            for index in range(self.language.grid[0]):
                self.language.program = (index, 0, third)
                self.visits, self.work, self.merges = [], {}, False
                self.run(**self.arguments)
                yield Program(index=index, visits=tuple(self.visits), **self.work) if self.work else None, self.merges


def launches_of(call: Call, tile: Any = None) -> list[Launch]:
    """The launches that the Triton backend makes for a call, with the blocks that each program visits.

    Lengths and tables of the call must be NumPy arrays. The other arrays need only shapes and dtypes. `tile` defaults
    to that of the backend's heuristic.
    """
    return [simulated(launch) for launch in recording.record(call, tile)]


def simulated(launch: recording.Launch) -> Launch:
    """A recorded launch with the blocks that each program visits."""
    programs = list(Simulation(launch).programs())
    working = tuple(program for program, _ in programs if program)
    return Launch(launch.name, launch.grid, working, sum(merges for _, merges in programs))


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """The run of a program on a multiprocessor (`lane`). Start and stop count keys since the start of the kernel."""

    lane: int
    start: int
    stop: int
    program: Program


def timeline(launch: Launch, lanes: int) -> list[Turn]:
    """Assign the programs of all KV heads to multiprocessors (`lanes`).

    Each program, in the order of the grid, runs on the multiprocessor that becomes free first. Its time is its number
    of keys.
    """
    free = [(0, lane) for lane in range(lanes)]
    turns: list[Turn] = []
    for program in launch.programs * launch.heads:
        start, lane = heapq.heappop(free)
        turns.append(Turn(lane, start, start + program.keys, program))
        heapq.heappush(free, (turns[-1].stop, lane))
    return turns


def filled(turns: Sequence[Turn], lanes: int) -> float:
    """The fraction of the time, until the last program ends, in which multiprocessors are busy."""
    end = max((turn.stop for turn in turns), default=0)
    return sum(turn.program.keys for turn in turns) / (end * lanes) if end else 1.0
