"""The buffers and waits with which a loop loads keys, read from Triton's GPU IR (TTGIR).

`ttg.local_alloc : () -> memdesc<2x64x128xbf16>` allocates two blocks of 64 rows and 128 columns, and `ttg.async_wait
{num = 3}` waits until at most three groups of copies are in flight. Machine code has the waits too, but does not show
what shared memory is used for.
"""

import dataclasses
import math
import re

BITS = {"i8": 8, "bf16": 16, "f16": 16, "f32": 32, "i32": 32, "f8E4M3FN": 8, "f8E5M2": 8, "i64": 64, "i1": 8}
PRODUCT = re.compile(r"\b(?:tt\.dot|ttng\.warp_group_dot|ttng\.tc_gen5_mma)\b(?!_wait)")
LOOP = re.compile(r"\bscf\.(?:for|while)\b")
BUFFER = re.compile(r"(%[\w.]+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<([\dx]+)x(\w+), [^>]*mutable>")
VIEW = re.compile(r"(%[\w.]+) = ttg\.memdesc_\w+ (%[\w.]+)")
SMALLEST = 1024  # the least bytes of a block of keys or values; smaller buffers hold page numbers, slots and scales


@dataclasses.dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer in shared memory for `stages` blocks of `shape`."""

    stages: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """The bytes of one block."""
        return math.prod(self.shape) * BITS.get(self.dtype, 16) // 8

    def __str__(self) -> str:
        return f"{self.stages} x {'x'.join(map(str, self.shape))} {self.dtype}"


@dataclasses.dataclass(frozen=True, slots=True)
class Staging:
    """The buffers and waits of one innermost loop with products."""

    buffers: tuple[Buffer, ...]  # buffers of keys and values
    waits: tuple[int, ...]  # for each wait for copies in the loop: the copy groups still in flight after it
    settled: tuple[int, ...]  # for each wait for wgmma in the loop: the products still in flight after it

    @property
    def stages(self) -> int | None:
        """The number of blocks in the smallest buffer of an operand. None if nothing is copied to buffers."""
        return min((buffer.stages for buffer in self.buffers), default=None)


def read(ttgir: str) -> list[Staging]:
    """The innermost loops with products of a kernel, in order."""
    return [
        Staging(
            _buffers(ttgir[:start], ttgir[start:end]),
            tuple(int(number) for number in re.findall(r"ttg\.async_wait [^\n]*?num = (\d+)", ttgir[start:end])),
            tuple(int(n) for n in re.findall(r"warp_group_dot_wait [^\n]*?pendings = (\d+)", ttgir[start:end])),
        )
        for start, end in _loops(ttgir)
    ]


def _buffers(before: str, body: str) -> tuple[Buffer, ...]:
    """The buffers that are defined before a loop and used in it.

    A buffer with one stage may be used through a view that is also defined before the loop.
    """
    depth = _indentation(body.splitlines()[0])
    held: dict[str, tuple[str, Buffer]] = {}
    for line in before.splitlines():
        if _indentation(line) > depth:
            continue
        if found := BUFFER.search(line):
            stages, *shape = map(int, found[2].split("x"))
            held[found[1]] = (found[1], Buffer(stages, tuple(shape), found[3]))
        elif (view := VIEW.search(line)) and view[2] in held:
            held[view[1]] = held[view[2]]
    used = dict(held[name] for name in re.findall(r"%[\w.]+", body) if name in held)
    return tuple(buffer for _, buffer in sorted(used.items()) if buffer.size >= SMALLEST)


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


def _loops(ttgir: str) -> list[tuple[int, int]]:
    """The start and end of each loop that multiplies and has no such loop inside."""
    opened: list[tuple[int, bool]] = []  # (start of an open region, whether it belongs to a loop)
    loops: list[tuple[int, int]] = []
    place = 0
    for line in ttgir.splitlines(keepends=True):
        code = re.sub(r'"[^"]*"|\{[^{}]*\}', "", line)  # braces of attributes do not open regions
        for brace in re.findall(r"[{}]", code):
            if brace == "{":
                opened.append((place, LOOP.search(line) is not None))
            elif opened:
                start, loop = opened.pop()
                if loop:
                    loops.append((start, place + len(line)))
        place += len(line)
    working = sorted((start, end) for start, end in loops if PRODUCT.search(ttgir[start:end]))
    return [(start, end) for start, end in working if not any(start < other and stop < end for other, stop in working)]
