"""Global memory: named buffers with gaps between them, and a record of who touched each byte.

Reads of bytes that nobody wrote are reported. So are unordered accesses of two CTAs to one place: writes of different
values, a read of what the other wrote, or a plain access to what the other changes by atomic operations. Locks and
flags are understood if their atomic operations release and acquire (`ordering`); reads of other flags are reported.
Accesses outside the buffers, or not aligned to their size, end the run. Races between threads of one CTA in global
memory are not detected, except different values that one instruction writes to one place.

A launch may begin before the previous launch has ended. Then a thread that touches what the previous launch wrote, or
writes what the previous launch read, must have waited for that launch. `griddepcontrol.wait` counts only for the thread
that executes it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragged_attention.testing.ptx import numbers
from ragged_attention.testing.ptx.clocks import Abroad, Clocks
from ragged_attention.testing.ptx.errors import Hazard, Misaligned, OutOfBounds, Race, Rounding, Uninitialised
from ragged_attention.testing.ptx.lanes import Indices, Lanes, Mask
from ragged_attention.testing.ptx.ordering import Order, Shadow

SAME = 2.0**-16  # the largest relative difference of two roundings of one sum: 128 units in the last place of float32


class Memory:
    """The buffers of one launch. Callers `add` each buffer, `seal` the memory, launch, and copy the results `back`."""

    START = 0x7F00_0000_0000
    GAP = 4096

    def __init__(self) -> None:
        self.buffers: list[tuple[str, int, NDArray[np.uint8], Any, Any]] = []
        self.size = self.GAP
        self.variables: dict[str, int] = {}

    def add(self, data: NDArray[np.uint8], name: str, allowed: Any = None, ready: Any = None) -> int:
        """Map bytes [n] and return their address.

        `allowed` and `ready` are bools [n]: which bytes may be touched, and which hold data. None means all of them.
        """
        place = self.size
        self.buffers.append((name, place, data, allowed, ready))
        self.size += -(-data.size // self.GAP) * self.GAP + self.GAP
        return self.START + place

    def add_variables(self, variables: Mapping[str, bytes]) -> None:
        """Map a kernel's arrays of constants, and record their addresses in `variables`."""
        for name, data in variables.items():
            self.variables[name] = self.add(np.frombuffer(bytearray(data), np.uint8), name)

    def seal(self, *, overlapping: bool = False) -> None:
        """Copy the buffers' bytes to the memory that kernels see.

        With `overlapping`, the launch may begin before the previous launch, which used the same memory, has ended.
        """
        # Which bytes the previous launch wrote, and which it touched.
        self.unfinished: tuple[NDArray[np.bool_], NDArray[np.bool_]] | None = None
        if overlapping:
            written = (self.writer.cta != 0) | (self.changer.cta != 0)
            self.unfinished = written, written | (self.reader.cta != 0)
        self.bytes = np.full(self.size, 0xFF, np.uint8)
        allowed = np.zeros(self.size, bool)
        self.ready = np.zeros(self.size, bool)
        self.reader, self.writer, self.changer = (Shadow(self.size) for _ in range(3))  # changer: atomic operations
        self.released: dict[int, Abroad] | None = None
        for _, place, data, may, holds in self.buffers:
            span = slice(place, place + data.size)
            self.bytes[span] = data
            allowed[span] = True if may is None else may
            self.ready[span] = True if holds is None else holds
        self.allowed_before = np.concatenate([[0], np.cumsum(allowed)])  # the number of allowed bytes before each byte

    def count_order(self) -> None:
        """Track the order between CTAs; called for kernels that release or acquire."""
        self.released = {}
        for shadow in (self.reader, self.writer, self.changer):
            shadow.count_order()

    def back(self) -> None:
        """Copy what kernels wrote to the buffers, and record which bytes hold data now."""
        for _, place, data, _, ready in self.buffers:
            current = self.bytes[place : place + data.size]
            if not np.array_equal(data, current):  # memory that was only read may be read-only
                data[:] = current
            if ready is not None:
                ready[:] = self.ready[place : place + data.size]

    def name_of(self, index: int) -> str:
        """A description of a place: the buffer that it lies in or is nearest to, and its offset there."""

        def distance(buffer: tuple[str, int, NDArray[np.uint8], Any, Any]) -> int:
            return max(buffer[1] - index, index - buffer[1] - buffer[2].size + 1, 0)

        if not self.buffers:
            return f"{index}, without any buffer"
        name, place, data, *_ = min(self.buffers, key=distance)
        return f"{name}{index - place:+d} of {data.size}"


class GlobalAccess:
    """The accesses of some CTAs to global memory."""

    def __init__(self, memory: Memory, lanes: Lanes, clocks: Clocks) -> None:
        self.memory, self.lanes = memory, lanes
        self.order = Order(lanes, clocks, memory.released)
        self.polled: dict[int, tuple[Any, Any]] = {}  # by line: each lane's last value, and whether it has one
        # Which lanes have not waited for the previous launch.
        self.early = np.full(lanes.count, memory.unfinished is not None)

    def place(self, lanes: Indices, address: Any, offset: int, size: int, line: int, what: str) -> Indices:
        """The indices [lanes] at which accesses of `size` bytes begin; the accesses must be allowed and aligned."""
        base = np.zeros(len(lanes), np.int64) if address is None else address[lanes].astype(np.int64)
        return self.reach(lanes, base + offset, size, line, what)

    def reach(self, lanes: Indices, address: Indices, size: int, line: int, what: str) -> Indices:
        """Like `place`, for addresses [lanes] that include the offset."""
        index = address - Memory.START
        inside = (index >= 0) & (index + size <= self.memory.size)
        safe = np.where(inside, index, 0)
        allowed = self.memory.allowed_before[safe + size] - self.memory.allowed_before[safe] == size
        if not (good := inside & allowed).all():
            at = int(np.flatnonzero(~good)[0])
            where, threads = self.memory.name_of(int(index[at])), int((~good).sum())
            text = f"{what} of {size} bytes outside memory: {where} ({threads} threads)"
            raise self.lanes.fault(line, lanes[at], text, OutOfBounds)
        if (index % size).any():
            at = int(np.flatnonzero(index % size)[0])
            where = self.memory.name_of(int(index[at]))
            raise self.lanes.fault(line, lanes[at], f"{what} of {size} bytes unaligned: {where}", Misaligned)
        return index

    def _say(
        self,
        line: int,
        lanes: Indices,
        rows: Indices,
        size: int,
        bad: NDArray[np.bool_],
        text: str,
        kind: type[Hazard] = Race,
    ) -> None:
        """Report the first lane that accesses bad bytes; `bad` is [lanes, size]."""
        if bad.any():
            row = int(np.flatnonzero(bad.any(1))[0])
            where = self.memory.name_of(int(rows[row]) * size + int(bad[row].argmax()))
            self.lanes.say(line, lanes[row], text, where, kind)

    def wait_for_launch_before(self, mask: Mask) -> None:
        """Execute griddepcontrol.wait."""
        self.early[self.lanes.active(mask)] = False

    def _expect_waited(self, lanes: Indices, rows: Indices, size: int, line: int, writes: bool) -> None:
        """Report accesses to an earlier launch's memory by lanes that did not wait for that launch."""
        if self.memory.unfinished is not None and (early := self.early[lanes]).any():
            bad = self.memory.unfinished[writes].reshape(-1, size)[rows] & early[:, None]
            how = "writes what the launch before touches" if writes else "reads what the launch before writes"
            self._say(line, lanes, rows, size, bad, f"{how}, and did not wait for it")

    def read(self, lanes: Indices, index: Indices, size: int, line: int) -> NDArray[np.uint8]:
        """The bytes [lanes, size] at `index`."""
        rows = index // size
        self._expect_waited(lanes, rows, size, line, writes=False)
        self._say(
            line,
            lanes,
            rows,
            size,
            ~self.memory.ready.reshape(-1, size)[rows],
            "reads what nobody wrote",
            Uninitialised,
        )
        for shadow, how in ((self.memory.writer, "wrote"), (self.memory.changer, "changes by atomic operations")):
            others = self.order.others(shadow, rows, size, lanes)
            self._say(line, lanes, rows, size, others, f"reads what another CTA of this launch {how}")
        self.order.mark(self.memory.reader, rows, size, lanes)
        return self.memory.bytes.reshape(-1, size)[rows]

    def load(self, registers: Sequence[Any], address: Any, offset: int, dtype: str, mask: Mask, line: int) -> None:
        """ld.global: the registers get consecutive elements of `dtype`."""
        lanes = self.lanes.active(mask)
        if not lanes.size:
            return
        size = int(dtype[1:]) * len(registers)
        index = self.place(lanes, address, offset, size, line, "read")
        elements = self.read(lanes, index, size, line).view(dtype)
        deal(elements, registers, lanes)

    def load_constant(
        self, registers: Sequence[Any], address: Any, offset: int, dtype: str, mask: Mask, line: int
    ) -> None:
        """ld.global.nc reads through a cache that sees no writes, so no launch that may still run may write there."""
        lanes, memory = self.lanes.active(mask), self.memory
        size = int(dtype[1:]) * len(registers)
        rows = self.place(lanes, address, offset, size, line, "read") // size
        written = (memory.writer.cta.reshape(-1, size)[rows] | memory.changer.cta.reshape(-1, size)[rows]) != 0
        if memory.unfinished is not None:
            written |= memory.unfinished[0].reshape(-1, size)[rows]
        self._say(line, lanes, rows, size, written, "reads by ld.nc what this launch or the one before it writes")
        self.load(registers, address, offset, dtype, mask, line)

    def store(self, values: Sequence[Any], address: Any, offset: int, size: int, mask: Mask, line: int) -> None:
        """st.global: consecutive elements of `size` bytes."""
        lanes = self.lanes.active(mask)
        if not lanes.size:
            return
        data = columns(values, self.lanes, lanes)
        self.write(lanes, self.place(lanes, address, offset, data.shape[1], line, "write"), data, line)

    def write(self, lanes: Indices, index: Indices, data: NDArray[np.uint8], line: int) -> None:
        """Write bytes [lanes, n] at `index`."""
        size, order = data.shape[1], self.order
        rows, table = index // size, self.memory.bytes.reshape(-1, size)
        self._expect_waited(lanes, rows, size, line, writes=True)
        different = order.others(self.memory.writer, rows, size, lanes) & (table[rows] != data)
        self._say(line, lanes, rows, size, different, "two CTAs write different values to one place of global memory")
        read = order.others(self.memory.reader, rows, size, lanes) & (table[rows] != data)
        self._say(line, lanes, rows, size, read, "writes what another CTA of this launch read")
        changed = order.others(self.memory.changer, rows, size, lanes)
        self._say(line, lanes, rows, size, changed, "writes what another CTA changes by atomic operations")
        table[rows] = data
        text = "two threads write different values to one place of global memory"
        self._say(line, lanes, rows, size, table[rows] != data, text, kind_of_loss(table[rows], data))
        self.memory.ready.reshape(-1, size)[rows] = True
        order.mark(self.memory.writer, rows, size, lanes)

    def atomic(
        self,
        operation: str,
        kind: str,
        size: int,
        results: Sequence[Any],
        address: Any,
        offset: int,
        values: Sequence[Sequence[Any]],
        orders: tuple[bool, bool],
        mask: Mask,
        line: int,
    ) -> None:
        """Execute atom.global or red.global.

        `values` holds the operands (two for cas), each as a list with one entry per element of the vector. `results`
        holds the registers for the old contents: an entry is None, or the sequence is empty, where these are not
        wanted. `orders` is whether the operation acquires, and whether it releases. For each element, lanes operate one
        after another.
        """
        lanes = self.lanes.active(mask)
        if not lanes.size:
            return
        count = len(values[0]) if values else 1
        first = self.place(lanes, address, offset, size * count, line, "atomic operation")
        self.order.synchronise(*orders, first, lanes)
        for element in range(count):
            operands = [self.lanes.spread(row[element])[lanes] for row in values]
            index = first + element * size
            before, changed = self.change(operation, kind, size, lanes, index, operands, line, bool(results))
            if operation == "cas":
                self.lanes.waits(lanes, (before != operands[0]) & ~changed)
            else:
                self._poll(lanes, before, changed, line)
            if results and results[element] is not None:
                results[element][lanes] = before

    def change(
        self,
        operation: str,
        kind: str,
        size: int,
        lanes: Indices,
        index: Indices,
        operands: Sequence[Any],
        line: int,
        reads: bool = True,
    ) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Do an atomic operation of each lane at its index. Returns the old bits, and which lanes changed them."""
        rows, looks = index // size, operation == LOOK
        verb = "reads" if looks else "changes"
        self._expect_waited(lanes, rows, size, line, writes=not looks)
        if reads:
            unwritten = ~self.memory.ready.reshape(-1, size)[rows]
            self._say(line, lanes, rows, size, unwritten, f"{verb} what nobody wrote", Uninitialised)
        shadows = ((self.memory.writer, "wrote"), (self.memory.reader, "read"))
        for shadow, how in shadows[:1] if looks else shadows:
            others = self.order.others(shadow, rows, size, lanes)
            self._say(line, lanes, rows, size, others, f"{verb} what another CTA of this launch {how}")
        old, changed = in_turn(self.memory.bytes, rows, operation, kind, size, operands)
        self.lanes.changes += bool(changed.any())
        if not looks:
            self.memory.ready.reshape(-1, size)[rows] = True
            self.order.mark(self.memory.changer, rows, size, lanes)
        return old, changed

    def fence(self, mask: Mask) -> None:
        """Execute a fence that also orders accesses of other CTAs."""
        self.order.fence(self.lanes.active(mask))

    def _poll(self, lanes: Indices, old: NDArray[Any], changed: NDArray[np.bool_], line: int) -> None:
        """Mark lanes that found the same value as last time at this line and changed nothing. They may be waiting."""
        before, known = self.polled.setdefault(
            line, (np.zeros(self.lanes.count, np.uint64), np.zeros(self.lanes.count, bool))
        )
        self.lanes.waits(lanes, known[lanes] & (before[lanes] == old) & ~changed, sure=False)
        before[lanes], known[lanes] = old, True


def in_turn(
    memory: NDArray[np.uint8], rows: Indices, operation: str, kind: str, size: int, operands: Sequence[Any]
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Do atomic operations on elements of `size` bytes. Operations on the same row happen one after another.

    Returns the bits that each operation found, and whether it changed them.
    """
    letter, function = {"s": "i", "f": "f"}.get(kind, "u"), ATOMIC[operation]
    table, old = memory.view(f"{letter}{size}"), np.zeros(len(rows), f"{letter}{size}")
    changed = np.zeros(len(rows), bool)
    order = np.argsort(rows, kind="stable")
    begins = np.concatenate([[True], rows[order][1:] != rows[order][:-1]])
    position = np.arange(len(rows)) - np.maximum.accumulate(np.where(begins, np.arange(len(rows)), 0))
    for number in range(int(position.max()) + 1):
        now = order[position == number]
        old[now] = table[rows[now]]
        new = function(kind, old[now], *(operand[now] for operand in operands))
        changed[now] = new != old[now]
        table[rows[now]] = new
    return old.view(f"u{size}"), changed


def kind_of_loss(kept: NDArray[np.uint8], data: NDArray[np.uint8]) -> type[Race]:
    """The kind of race if lanes wrote the bytes `data` [lanes, n] at once, and the bytes `kept` remained."""
    if data.shape[1] % 4:
        return Race
    wrong = (kept.view("u4") != data.view("u4")).ravel()
    one, other = (np.ascontiguousarray(words).view("f4").ravel()[wrong].astype(float) for words in (kept, data))
    small, large = np.minimum(abs(one), abs(other)), np.maximum(abs(one), abs(other))
    # Small integers are subnormal as floats, so they are never taken for rounded numbers.
    near = (abs(one - other) <= large * SAME) & (small >= np.finfo("f4").tiny) & np.isfinite(large)
    return Rounding if near.all() else Race


def deal(elements: NDArray[Any], registers: Sequence[Any], lanes: Indices) -> None:
    """Write the elements [lanes, n] that lanes loaded to registers, except to those that are None."""
    for number, register in enumerate(registers):
        if register is not None:
            register[lanes] = elements[:, number]


def columns(values: Sequence[Any], every: Lanes, lanes: Indices) -> NDArray[np.uint8]:
    """The elements that lanes store, as bytes [lanes, n]."""
    return np.stack([every.spread(value)[lanes] for value in values], axis=1).view(np.uint8).reshape(len(lanes), -1)


def _add(kind: str, old: Any, new: Any) -> Any:
    """The sum of `old` and `new`. In float32, subnormals are flushed, as by atomic operations on global memory."""
    if kind in ("f16", "bf16"):
        return numbers.on_halves(np.add, kind, old, new)
    if kind == "f" and old.dtype == np.float32:
        return numbers.flush(numbers.flush(old) + numbers.flush(new))
    return old + new


LOOK = "look"  # a load that may run at the same time as atomic operations
ATOMIC: dict[str, Any] = {
    LOOK: lambda kind, old: old,
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
