"""Global memory: named buffers with gaps between them, and who touched each byte.

Reported are reads of bytes that nobody wrote, and what two CTAs do to one place without an order: different values
written, one's read of what the other wrote, or a plain access to what the other changes by atomic operations. CTAs that
tell each other by flags what is ready are not understood: their reads are reported. Accesses outside the buffers or not
aligned to their size end the run. Not watched: threads of one CTA racing in global memory.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragged_attention.testing.ptx import numbers
from ragged_attention.testing.ptx.lanes import Indices, Lanes, Mask

SEVERAL = -1  # instead of a CTA's number + 1


class Memory:
    """The buffers of one launch: `add` each, `seal`, launch, and bring results `back`."""

    START = 0x7F00_0000_0000
    GAP = 4096

    def __init__(self) -> None:
        self.buffers: list[tuple[str, int, NDArray[np.uint8], Any, Any]] = []
        self.size = self.GAP

    def add(self, data: NDArray[np.uint8], name: str, allowed: Any = None, ready: Any = None) -> int:
        """Map bytes [n] and return their address.

        `allowed` and `ready` are bools [n]: which bytes may be touched, and which hold something; None: all of them.
        """
        place = self.size
        self.buffers.append((name, place, data, allowed, ready))
        self.size += -(-data.size // self.GAP) * self.GAP + self.GAP
        return self.START + place

    def seal(self) -> None:
        """Copy the buffers' bytes to where kernels see them."""
        self.bytes = np.full(self.size, 0xFF, np.uint8)
        allowed = np.zeros(self.size, bool)
        self.ready = np.zeros(self.size, bool)
        # The CTA, as its number + 1, that touched a byte: by plain reads, plain writes, atomic operations.
        self.reader, self.writer, self.changer = (np.zeros(self.size, np.int32) for _ in range(3))
        for _, place, data, may, holds in self.buffers:
            span = slice(place, place + data.size)
            self.bytes[span] = data
            allowed[span] = True if may is None else may
            self.ready[span] = True if holds is None else holds
        self.allowed_before = np.concatenate([[0], np.cumsum(allowed)])  # how many bytes below each are allowed

    def back(self) -> None:
        """Copy what kernels wrote to the buffers, and which bytes hold something by now."""
        for _, place, data, _, ready in self.buffers:
            data[:] = self.bytes[place : place + data.size]
            if ready is not None:
                ready[:] = self.ready[place : place + data.size]

    def name_of(self, index: int) -> str:
        """The buffer that a place lies in or is nearest to, and where in it."""

        def distance(buffer: tuple[str, int, NDArray[np.uint8], Any, Any]) -> int:
            return max(buffer[1] - index, index - buffer[1] - buffer[2].size + 1, 0)

        if not self.buffers:
            return f"{index}, without any buffer"
        name, place, data, *_ = min(self.buffers, key=distance)
        return f"{name}{index - place:+d} of {data.size}"


class GlobalAccess:
    """What some CTAs do to global memory."""

    def __init__(self, memory: Memory, lanes: Lanes) -> None:
        self.memory, self.lanes, self.reporter = memory, lanes, lanes.reporter

    def place(self, lanes: Indices, address: Any, offset: int, size: int, line: int, what: str) -> Indices:
        """Where [lanes] accesses of `size` bytes begin in memory, which must be allowed and aligned."""
        given = np.zeros(len(lanes), np.int64) if address is None else address[lanes].astype(np.int64)
        index = given + (offset - Memory.START)
        inside = (index >= 0) & (index + size <= self.memory.size)
        safe = np.where(inside, index, 0)
        allowed = self.memory.allowed_before[safe + size] - self.memory.allowed_before[safe] == size
        if not (good := inside & allowed).all():
            at = int(np.flatnonzero(~good)[0])
            raise self.reporter.fault(
                line,
                f"{what} of {size} bytes outside memory: {self.memory.name_of(int(index[at]))}, "
                f"{self.lanes.describe(int(lanes[at]))}; {int((~good).sum())} threads",
            )
        if (index % size).any():
            at = int(np.flatnonzero(index % size)[0])
            where = self.memory.name_of(int(index[at]))
            raise self.reporter.fault(line, f"{what} of {size} bytes unaligned: {where}")
        return index

    def _others(self, shadow: NDArray[np.int32], rows: Indices, size: int, me: NDArray[Any]) -> NDArray[np.bool_]:
        """[lanes, size]: the bytes that another CTA touched."""
        touched = shadow.reshape(-1, size)[rows]
        return (touched != 0) & (touched != me)

    def _mark(self, shadow: NDArray[np.int32], rows: Indices, size: int, me: NDArray[Any]) -> None:
        """Note that CTAs `me` [lanes, 1] touch bytes, some perhaps at once."""
        table = shadow.reshape(-1, size)
        before = table[rows]
        after = np.where((before == 0) | (before == me), me, SEVERAL)
        table[rows] = after
        lost = (table[rows] != after).any(1)
        if lost.any():
            table[rows[lost]] = SEVERAL

    def _say(self, line: int, rows: Indices, size: int, bad: NDArray[np.bool_], text: str) -> None:
        if bad.any():
            row = int(np.flatnonzero(bad.any(1))[0])
            self.reporter.say(line, text, self.memory.name_of(int(rows[row]) * size + int(bad[row].argmax())))

    def read(self, lanes: Indices, index: Indices, size: int, line: int) -> NDArray[np.uint8]:
        """Bytes [lanes, size] at `index`."""
        rows, me = index // size, (self.lanes.number[lanes] + 1)[:, None]
        self._say(line, rows, size, ~self.memory.ready.reshape(-1, size)[rows], "reads what nobody wrote")
        for shadow, how in ((self.memory.writer, "wrote"), (self.memory.changer, "changes by atomic operations")):
            others = self._others(shadow, rows, size, me)
            self._say(line, rows, size, others, f"reads what another CTA of this launch {how}")
        self._mark(self.memory.reader, rows, size, me)
        return self.memory.bytes.reshape(-1, size)[rows]

    def load(self, registers: Sequence[Any], address: Any, offset: int, dtype: str, mask: Mask, line: int) -> None:
        """ld.global: each register gets an element of `dtype`, one behind the other."""
        lanes = self.lanes.active(mask)
        if not lanes.size:
            return
        size = int(dtype[1:]) * len(registers)
        index = self.place(lanes, address, offset, size, line, "read")
        elements = self.read(lanes, index, size, line).view(dtype)
        for number, register in enumerate(registers):
            if register is not None:
                register[lanes] = elements[:, number]

    def store(self, values: Sequence[Any], address: Any, offset: int, size: int, mask: Mask, line: int) -> None:
        """st.global: elements of `size` bytes, one behind the other."""
        lanes = self.lanes.active(mask)
        if not lanes.size:
            return
        data = columns(values, self.lanes, lanes)
        index = self.place(lanes, address, offset, data.shape[1], line, "write")
        size, me = data.shape[1], (self.lanes.number[lanes] + 1)[:, None]
        rows, table = index // size, self.memory.bytes.reshape(-1, size)
        different = self._others(self.memory.writer, rows, size, me) & (table[rows] != data)
        self._say(line, rows, size, different, "two CTAs write different values to one place of global memory")
        read = self._others(self.memory.reader, rows, size, me) & (table[rows] != data)
        self._say(line, rows, size, read, "writes what another CTA of this launch read")
        changed = self._others(self.memory.changer, rows, size, me)
        self._say(line, rows, size, changed, "writes what another CTA changes by atomic operations")
        table[rows] = data
        text = "two threads write different values to one place of global memory"
        self._say(line, rows, size, table[rows] != data, text)
        self.memory.ready.reshape(-1, size)[rows] = True
        self._mark(self.memory.writer, rows, size, me)

    def atomic(
        self,
        operation: str,
        kind: str,
        size: int,
        results: Sequence[Any],
        address: Any,
        offset: int,
        values: Sequence[Sequence[Any]],
        mask: Mask,
        line: int,
    ) -> None:
        """atom.global and red.global: `values` has the operands (two for cas), each with a vector's elements.

        `results` are registers for what was there before, None or missing where nobody asks. Lanes take turns in their
        order, element by element.
        """
        lanes = self.lanes.active(mask)
        if not lanes.size:
            return
        count = len(values[0])
        first = self.place(lanes, address, offset, size * count, line, "atomic operation")
        me = (self.lanes.number[lanes] + 1)[:, None]
        for element in range(count):
            rows = first // size + element
            self._say(line, rows, size, ~self.memory.ready.reshape(-1, size)[rows], "changes what nobody wrote")
            for shadow, how in ((self.memory.writer, "wrote"), (self.memory.reader, "read")):
                others = self._others(shadow, rows, size, me)
                self._say(line, rows, size, others, f"changes what another CTA of this launch {how}")
            operands = [self.lanes.spread(row[element])[lanes] for row in values]
            before = self._in_turn(rows, ATOMIC[operation], kind, size, operands)
            if results and results[element] is not None:
                results[element][lanes] = before
            self.memory.ready.reshape(-1, size)[rows] = True
            self._mark(self.memory.changer, rows, size, me)

    def _in_turn(self, rows: Indices, function: Any, kind: str, size: int, operands: Sequence[Any]) -> NDArray[Any]:
        """Change elements, of each place one lane after another. Returns the bits that each found."""
        letter = {"s": "i", "f": "f"}.get(kind, "u")
        table, found = self.memory.bytes.view(f"{letter}{size}"), np.zeros(len(rows), f"{letter}{size}")
        order = np.argsort(rows, kind="stable")
        begins = np.concatenate([[True], rows[order][1:] != rows[order][:-1]])
        turn = np.arange(len(rows)) - np.maximum.accumulate(np.where(begins, np.arange(len(rows)), 0))
        for number in range(int(turn.max()) + 1):
            now = order[turn == number]
            found[now] = table[rows[now]]
            table[rows[now]] = function(kind, found[now], *(operand[now] for operand in operands))
        return found.view(f"u{size}")


def columns(values: Sequence[Any], every: Lanes, lanes: Indices) -> NDArray[np.uint8]:
    """The elements that lanes store, as bytes [lanes, n]."""
    return np.stack([every.spread(value)[lanes] for value in values], axis=1).view(np.uint8).reshape(len(lanes), -1)


def _add(kind: str, old: Any, new: Any) -> Any:
    """Sums; of float32 with subnormals flushed, as global memory does."""
    if kind in ("f16", "bf16"):
        return numbers.on_halves(np.add, kind, old, new)
    if kind == "f" and old.dtype == np.float32:
        return numbers.flush(numbers.flush(old) + numbers.flush(new))
    return old + new


ATOMIC: dict[str, Any] = {
    "add": _add,
    "exch": lambda kind, old, new: new,
    "cas": lambda kind, old, wanted, new: np.where(old == wanted, new, old),
    "min": lambda kind, old, new: np.minimum(old, new),
    "max": lambda kind, old, new: np.maximum(old, new),
    "and": lambda kind, old, new: old & new,
    "or": lambda kind, old, new: old | new,
    "xor": lambda kind, old, new: old ^ new,
    "inc": lambda kind, old, limit: np.where(old >= limit, 0, old + 1),
    "dec": lambda kind, old, limit: np.where((old == 0) | (old > limit), limit, old - 1),
}
