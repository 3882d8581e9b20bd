"""wgmma: matrix products by four warps together, which run while the warps do something else.

Operands are read when a product is issued, and results arrive when a wait covers it. Until then the result's registers
hold NaN. While a product is in flight, writes to shared memory that it reads, and uses of registers that it reads or
writes, are reported. So are products that use registers which another instruction wrote since the last `wgmma.fence`.
Sums are float32 sums in NumPy's order.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragged_attention.testing.ptx import numbers
from ragged_attention.testing.ptx.copies import Operation, Queue
from ragged_attention.testing.ptx.errors import Diverged, OutOfBounds, Unknown
from ragged_attention.testing.ptx.lanes import WARP, Indices, Lanes, Mask
from ragged_attention.testing.ptx.operands import SHARED_BASE
from ragged_attention.testing.ptx.shared import Cells, Shared
from ragged_attention.testing.ptx.warps import Registers, left_operand, single

GROUP = 4 * WARP
DEPTH = 32  # bytes along k in one product
WIDTHS = {"bf16": 2, "f16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
SPANS = {0: 16, 1: 128, 2: 64, 3: 32}  # bytes of a row, by the descriptor's swizzle mode


@dataclasses.dataclass
class Product(Operation):
    """One warpgroup's product: its result registers, the cells it reads, its registers' names, its accumulator type."""

    group: int
    out: Registers
    cells: Sequence[Cells]
    names: tuple[tuple[str, ...], tuple[str, ...]]
    kind: str
    limited: bool

    @property
    def key(self) -> tuple[int, int]:
        """A key that is equal for products that accumulate into the same registers."""
        return id(self.out[0]), self.group


class Warpgroups(Queue[Product]):
    """The warpgroups of some CTAs.

    `sums` has the accumulators in flight, by `Product.key`. `busy` counts, by (register, group, whether they write it),
    the products in flight that write or read a register. `loose` has (register, group) for registers that were written
    since the last fence.
    """

    what = "wgmma"

    def __init__(self, lanes: Lanes, shared: Shared) -> None:
        super().__init__(lanes)
        self.shared = shared
        self.sums: dict[tuple[int, int], NDArray[Any]] = {}
        self.busy: Counter[tuple[str, int, bool]] = Counter()
        self.loose: set[tuple[str, int]] = set()

    # ---- operands in shared memory

    def _places(
        self, lanes: Indices, descriptor: Any, rows: int, width: int, transposed: int, line: int
    ) -> NDArray[np.int64]:
        """The byte indices [groups, rows, k] of a matrix [rows (of M or N), k], whose elements have `width` bytes.

        A row of the swizzle's span runs along the contiguous dimension (k, or the rows if transposed). Eight such rows
        make a core matrix. The descriptor has the start of the matrix and the distances between core matrices, in units
        of 16 bytes.
        """
        bits = descriptor[lanes].astype(np.uint64)
        start, leading, stride = (((bits >> np.uint64(low)) & np.uint64(0x3FFF)) << np.uint64(4) for low in (0, 16, 32))
        start, leading, stride = (x.astype(np.int64)[:, None, None] for x in (start, leading, stride))
        modes = set((bits >> np.uint64(62)).tolist())
        if ((bits >> np.uint64(49)) & np.uint64(7)).any() or len(modes) != 1:
            raise Unknown(f"line {line}: wgmma by descriptors with a base offset, or of several swizzle modes")
        span = SPANS[modes.pop()]
        row, column = np.arange(rows)[:, None], np.arange(DEPTH // width)[None, :]
        along, across = (width * row, column) if transposed else (width * column, row)
        if span == 16:
            outer, inner = (leading, stride) if transposed else (stride, leading)
            place = start + (across // 8) * outer + (along // 16) * inner + (across % 8) * 16 + along % 16
        elif transposed:
            place = start + (along // span) * leading + (across // 8) * stride + (across % 8) * span + along % span
        else:
            place = start + (across // 8) * stride + (across % 8) * span + along
        if span > 16:
            place = place ^ (((place >> 7) & (span // 16 - 1)) << 4)
        index = place - SHARED_BASE
        if (outside := ((index < 0) | (index + width > self.shared.size)).any((1, 2))).any():
            where = f"bytes {index.min()} to {index.max() + width} of {self.shared.size}"
            raise self.lanes.fault(line, lanes[outside][0], f"wgmma outside shared memory: {where}", OutOfBounds)
        return index + (self.lanes.cta[lanes] * self.shared.stride)[:, None, None]

    def _read(self, places: NDArray[np.int64], groups: Indices, line: int) -> list[Cells]:
        """Record an asynchronous read by warpgroups, given their first warps. Returns the cells that each reads."""
        shared, every = self.shared, []
        for place, first in zip(places, groups.tolist(), strict=True):
            cells = np.unique(place // shared.cell)
            shared.note_asynchronous(cells, range(first, first + 4), line, "wgmma")
            shared.reading[cells] += 1
            every.append(cells)
        return every

    # ---- instructions

    def multiply(
        self,
        out: Registers,
        left: Any,
        right: Any,
        keep: Any,
        kinds: tuple[str, str, str],
        transposed: tuple[int, int],
        limited: bool,
        names: tuple[tuple[str, ...], tuple[str, ...]],
        mask: Mask,
        line: int,
    ) -> None:
        """wgmma.mma_async: out [64, n] = left [64, k] @ right [n, k].T, plus the old out where `keep` is set.

        `right` holds descriptors. `left` holds descriptors or, as a tuple, the registers of the operand. `kinds` are
        the types of left, right and accumulators. `names` are the names of the result's and the left operand's
        registers.
        """
        warps = self.lanes.whole_warps(mask, line)
        if len(warps) % 4 or (warps.reshape(-1, 4) != warps[::4, None] // 4 * 4 + np.arange(4)).any():
            raise self.lanes.fault(line, warps[0] * WARP, "part of a warpgroup executes wgmma", Diverged)
        groups = warps[::4]
        columns = (4 if kinds[2] == "f16" else 2) * len(out)
        right_value, cells = self._matrix(groups, right, columns, kinds[1], transposed[1], line)
        read = [cells]
        if isinstance(left, tuple):
            left_value = left_operand(left, warps, kinds[0]).reshape(len(groups), 64, -1)
        else:
            left_value, cells = self._matrix(groups, left, 64, kinds[0], transposed[0], line)
            read.append(cells)
        product = np.matmul(left_value, right_value.transpose(0, 2, 1)).reshape(
            len(groups), 4, 2, 8, columns // 8, 4, 2
        )
        parts = product.transpose(0, 4, 2, 6, 1, 3, 5).reshape(len(groups), columns // 2, GROUP)
        kept = self.lanes.spread(keep)
        for number, group in enumerate(groups.tolist()):
            lanes = self.lanes.every[WARP * group : WARP * group + GROUP]
            cells = [row[number] for row in read]
            operation = Product(lanes, self.committed[lanes], line, group, out, cells, names, kinds[2], limited)
            self._issue(operation, parts[number], kept[lanes])

    def _matrix(
        self, groups: Indices, descriptor: Any, rows: int, kind: str, transposed: int, line: int
    ) -> tuple[NDArray[np.float32], list[Cells]]:
        """A matrix [groups, rows, k] in shared memory, and the cells that each group reads."""
        width = WIDTHS[kind]
        places = self._places(groups * WARP, descriptor, rows, width, transposed, line)
        cells = self._read(places, groups, line)
        return single(self.shared.bytes.view(f"u{width}")[places // width], kind), cells

    def _issue(self, operation: Product, product: NDArray[np.float32], keep: NDArray[Any]) -> None:
        """Start an operation, whose result is `product` [values, threads]."""
        mine = slice(int(operation.lanes[0]), int(operation.lanes[-1]) + 1)
        if any((name, operation.group) in self.loose for names in operation.names for name in names):
            text = "a wgmma uses registers that were written without a wgmma.fence after it"
            self.lanes.say(operation.line, operation.lanes[0], text)
        before = self.sums.get(operation.key)
        if before is None:  # no product in flight has exactly these accumulators, so none may use any of them
            self._clash(operation, [(name, writes) for name in operation.names[0] for writes in (True, False)])
            before = numbers.unpack_sums(np.stack([register[mine] for register in operation.out]), operation.kind)
        self._clash(operation, [(name, True) for name in operation.names[1]])
        start = np.where(keep, before, before.dtype.type(0))
        self.sums[operation.key] = numbers.add_sums(start, product, operation.kind, operation.limited)
        for register in operation.out:
            register[mine] = 0xFFFFFFFF
        self.busy.update(self._registers(operation))
        self.flight.append(operation)

    @staticmethod
    def _registers(operation: Product) -> Iterable[tuple[str, int, bool]]:
        for writes, names in zip((True, False), operation.names, strict=True):
            yield from ((name, operation.group, writes) for name in names)

    def _clash(self, operation: Product, used: Iterable[tuple[str, bool]]) -> None:
        if any(self.busy[name, operation.group, writes] for name, writes in used):
            self.lanes.say(operation.line, operation.lanes[0], "a wgmma uses registers of another in flight")

    def fence(self, mask: Mask, line: int) -> None:
        """wgmma.fence: later products may use registers that were written before it."""
        groups = set((self.lanes.whole_warps(mask, line) // 4 * 4).tolist())
        self.loose = {one for one in self.loose if one[1] not in groups}

    def touch(self, read: Sequence[str], written: Sequence[str], mask: Mask, line: int) -> None:
        """Check and record another instruction's reads and writes of registers that some wgmma uses."""
        groups, first = np.unique(self.lanes.warp[active := self.lanes.active(mask)] // 4 * 4, return_index=True)
        for group, lane in zip(groups.tolist(), active[first].tolist(), strict=True):
            if any((name, group, True) in self.busy for name in (*read, *written)):
                self.lanes.say(line, lane, "touches a register that a wgmma in flight writes")
            if any((name, group, False) in self.busy for name in written):
                self.lanes.say(line, lane, "overwrites a register that a wgmma in flight reads")
            self.loose.update((name, group) for name in written)

    def arrive(self, operation: Product) -> None:
        if len(operation.lanes) != GROUP:
            raise self.lanes.fault(
                operation.line, operation.lanes[0], "part of a warpgroup waits for a wgmma", Diverged
            )
        last = all(other.key != operation.key for other in self.flight)  # otherwise other products still add to it
        if last and operation.key in self.sums:
            words = numbers.pack_sums(self.sums.pop(operation.key), operation.kind)
            for register, word in zip(operation.out, words, strict=True):
                register[operation.lanes] = word
        for name in self._registers(operation):
            self.busy[name] -= 1
            if not self.busy[name]:
                del self.busy[name]
        for cells in operation.cells:
            self.shared.reading[cells] -= 1
            for warp in range(operation.group, operation.group + 4):
                self.shared.read_at[cells, warp % self.lanes.warps] = self.shared.clocks.now[warp]
