"""Instructions that the threads of a warp execute together: shuffles, votes, reductions and matrix instructions.

For setmaxnreg, the emulator checks only the registers that warpgroups have when the kernel ends. It ignores the times
of the requests.

Sums of `mma` are float32 sums in NumPy's order (exact for 8-bit integers); the ISA does not specify an order.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragged_attention.testing.ptx import numbers
from ragged_attention.testing.ptx.errors import Diverged, Uninitialised
from ragged_attention.testing.ptx.lanes import WARP, Indices, Lanes, Mask
from ragged_attention.testing.ptx.shared import Shared

Registers = Sequence[NDArray[Any]]
PER_GROUP = 4  # warps of a warpgroup
REGISTERS = 1 << 16  # the 32-bit registers of a multiprocessor


def gather(registers: Registers, warps: Indices) -> NDArray[Any]:
    """The values of registers in some warps: [registers, warps, 32]."""
    return np.stack([register.reshape(-1, WARP)[warps] for register in registers])


def elements(words: NDArray[Any], kind: str) -> NDArray[np.float32]:
    """The elements of words [...], as float32 [..., elements per word]."""
    words = np.ascontiguousarray(words)
    width = {"tf32": 4, "bf16": 2, "f16": 2}.get(kind, 1)
    return single(words.view(f"u{width}").reshape(*words.shape, 4 // width), kind)


def single(codes: NDArray[Any], kind: str) -> NDArray[np.float32]:
    """Codes [...] of one element each, as float32."""
    if kind == "tf32":
        return numbers.tf32_value(codes)
    if kind in numbers.FP8:
        return numbers.FP8[kind][codes]
    if kind in ("s8", "u8"):
        return codes.view(f"{'i' if kind == 's8' else 'u'}1").astype(np.float32)
    return numbers.VALUES[kind](codes)


def left_operand(registers: Registers, warps: Indices, kind: str) -> NDArray[np.float32]:
    """The left operand, of 16 rows, from the registers of each warp: [warps, 16, k].

    Lane 4g + t holds parts of rows g and g + 8. If a word has e elements, these are the elements from t * e to before
    (t + 1) * e. The second half of k is in the second pair of registers.
    """
    parts = elements(gather(registers, warps), kind)  # [registers, warps, 32, elements]
    # The axes are: half of k, half of the rows, warp, g, t, element.
    parts = parts.reshape(len(registers) // 2, 2, len(warps), 8, 4, parts.shape[-1])
    return parts.transpose(2, 1, 3, 0, 4, 5).reshape(len(warps), 16, -1)


def right_operand(registers: Registers, warps: Indices, kind: str) -> NDArray[np.float32]:
    """The right operand, of 8 columns: [warps, k, 8]. Lane 4g + t holds parts of column g, as in `left_operand`."""
    parts = elements(gather(registers, warps), kind).reshape(len(registers), len(warps), 8, 4, -1)
    return parts.transpose(1, 0, 3, 4, 2).reshape(len(warps), -1, 8)


def most_registers(threads: int) -> int:
    """The registers that a multiprocessor has for each thread of a CTA of this size, rounded as ptxas rounds."""
    return min(255, REGISTERS // threads // 8 * 8)


class Warps:
    """The warps of some CTAs, whose threads are launched with `registers` registers each.

    `reserved` has, by warp, the registers per thread and the line of each of its setmaxnreg.
    """

    def __init__(self, lanes: Lanes, shared: Shared, registers: int) -> None:
        self.lanes, self.shared = lanes, shared
        self.registers = registers
        self.reserved: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)

    def members(self, named: Any, mask: Mask, line: int) -> NDArray[np.bool_]:
        """The lanes that take part, as bools [lanes].

        The threads of a warp that execute an instruction must be exactly those in its member mask, `named`.
        """
        active, lanes = self.lanes.marked(mask), self.lanes
        bits = lanes.spread(named).astype(np.int64)
        table = active.reshape(-1, WARP)
        here = (table.astype(np.int64) << np.arange(WARP)).sum(1)
        wrong = active & ((bits & 0xFFFFFFFF) != np.repeat(here, WARP))
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            members = int(bits[at]) & 0xFFFFFFFF
            text = f"threads {here[at // WARP]:#010x} of a warp execute an instruction for {members:#010x}"
            raise lanes.fault(line, at, text, Diverged)
        return active

    def meet(self, named: Any, mask: Mask, line: int) -> None:
        """bar.warp.sync: only its member mask is checked, because threads of a warp count as ordered anyway."""
        self.members(named, mask, line)

    def elect(self, out: Any, leads: Any, named: Any, mask: Mask, line: int) -> None:
        """elect.sync: a leader among the members of each warp."""
        active = self.members(named, mask, line)
        table = active.reshape(-1, WARP)
        leader = np.repeat(table.argmax(1), WARP)
        leads[active] = (self.lanes.every % WARP == leader)[active]
        if out is not None:
            out[active] = leader[active]

    def reserve(self, count: int, mask: Mask, line: int) -> None:
        """setmaxnreg: the registers that a thread may use from here on; a warpgroup's warps must request the same."""
        for warp in self.lanes.whole_warps(mask, line).tolist():
            self.reserved[warp].append((count, line))

    def end(self) -> None:
        """At the end of the kernel, raise if the warps of a CTA wait forever for more registers than there are."""
        groups = -(-self.lanes.warps // PER_GROUP)
        for cta in range(self.lanes.ctas if self.reserved else 0):
            total = 0
            for group in range(groups):
                first = cta * self.lanes.warps + group * PER_GROUP
                asked = [
                    self.reserved[warp] for warp in range(first, min(first + PER_GROUP, (cta + 1) * self.lanes.warps))
                ]
                if any(one != asked[0] for one in asked):
                    line = max(line for one in asked for _, line in one)
                    raise self.lanes.fault(line, first * WARP, "part of a warpgroup executes setmaxnreg", Diverged)
                total += (asked[0][-1][0] if asked[0] else self.registers) * len(asked) * WARP
            if total > (available := self.registers * self.lanes.threads):
                line = max(line for one in self.reserved.values() for _, line in one)
                text = f"a CTA requests {total} registers by setmaxnreg, and has {available}"
                raise self.lanes.fault(line, cta * self.lanes.threads, text)

    def trap(self, mask: Mask, line: int) -> None:
        """trap: a fault if any thread comes here."""
        if (lanes := self.lanes.active(mask)).size:
            raise self.lanes.fault(line, lanes[0], "a trap")

    def shuffle(
        self, out: Any, inside: Any, mode: str, value: Any, by: Any, limit: Any, named: Any, mask: Mask, line: int
    ) -> None:
        """shfl.sync: a lane takes the value of another lane in its segment, or its own if there is no such lane."""
        active = self.members(named, mask, line)
        by = self.lanes.spread(by).astype(np.int64) & 31
        limit = self.lanes.spread(limit).astype(np.int64)
        lane = self.lanes.every % WARP
        segment, clamp = (limit >> 8) & 31, limit & 31
        last, first = (lane & segment) | (clamp & ~segment), lane & segment
        source = {"bfly": lane ^ by, "idx": first | (by & ~segment), "up": lane - by, "down": lane + by}[mode]
        valid = np.asarray(source >= last if mode == "up" else source <= last)
        source = np.where(valid, source, lane) + self.lanes.every - lane
        if (absent := np.flatnonzero(active & ~active[source])).size:
            self.lanes.say(line, absent[0], "shuffles from a lane that does not take part", kind=Uninitialised)
        new = self.lanes.spread(value)[source]
        out[active] = new[active]
        if inside is not None:
            inside[active] = valid[active]

    def reduce(self, out: Any, value: Any, mode: str, named: Any, mask: Mask, line: int) -> None:
        """Execute redux.sync over the members of each warp."""
        active = self.members(named, mask, line)
        table = self.lanes.spread(value).reshape(-1, WARP)
        info = np.iinfo(table.dtype)
        function, neutral = {
            "min": (np.minimum, info.max), "max": (np.maximum, info.min), "add": (np.add, 0), "or": (np.bitwise_or, 0),
            "xor": (np.bitwise_xor, 0), "and": (np.bitwise_and, info.max),
        }[mode]  # fmt: skip
        values = np.where(active.reshape(-1, WARP), table, table.dtype.type(neutral))
        result = function.reduce(values, axis=1, dtype=table.dtype)
        np.copyto(out.reshape(-1, WARP), result[:, None], where=active.reshape(-1, WARP))

    def vote(self, out: Any, flag: Any, mode: str, named: Any, mask: Mask, line: int) -> None:
        """Execute vote.sync over the members of each warp."""
        active = self.members(named, mask, line).reshape(-1, WARP)
        table = self.lanes.spread(flag).reshape(-1, WARP)
        some, every = (table & active).any(1), (table | ~active).all(1)
        ballot = ((table & active).astype(np.uint64) << np.arange(WARP, dtype=np.uint64)).sum(1)
        results: dict[str, Any] = {"any": some, "all": every, "uni": every | ~some, "ballot": ballot.astype(np.uint32)}
        np.copyto(out.reshape(-1, WARP), results[mode][:, None], where=active)

    def _rows(self, address: Any, offset: int, count: int, mask: Mask, line: int) -> tuple[Indices, Indices, Indices]:
        """(warps, lanes, places) of 8 * count rows of 16 bytes: lane i of a warp has the address of row i."""
        warps = self.lanes.whole_warps(mask, line)
        lanes = (warps[:, None] * WARP + np.arange(8 * count)).ravel()
        return warps, lanes, self.shared.place(lanes, address, offset, 16, line)

    def load_matrices(
        self, registers: Registers, address: Any, offset: int, trans: bool, mask: Mask, line: int
    ) -> None:
        """ldmatrix: an 8 x 8 matrix of 16-bit elements to each register, two elements per lane."""
        warps, lanes, index = self._rows(address, offset, len(registers), mask, line)
        rows = self.shared.read(lanes, index, 16, line).reshape(len(warps), len(registers), 8, 16)
        if trans:
            rows = np.ascontiguousarray(rows.view(np.uint16).swapaxes(2, 3))
        words = rows.view(np.uint32).reshape(len(warps), len(registers), WARP)
        for number, register in enumerate(registers):
            register.reshape(-1, WARP)[warps] = words[:, number]

    def store_matrices(
        self, registers: Registers, address: Any, offset: int, trans: bool, mask: Mask, line: int
    ) -> None:
        """stmatrix: an 8 x 8 matrix of 16-bit elements from each register, two elements per lane."""
        warps, lanes, index = self._rows(address, offset, len(registers), mask, line)
        words = np.ascontiguousarray(gather(registers, warps).swapaxes(0, 1)).reshape(len(warps), len(registers), 8, 4)
        if trans:
            words = np.ascontiguousarray(words.view(np.uint16).swapaxes(2, 3))
        self.shared.write(lanes, index, words.view(np.uint8).reshape(len(lanes), 16), line)

    def multiply(
        self,
        out: Registers,
        left: Registers,
        right: Registers,
        addend: Registers,
        kinds: tuple[str, str, str],
        limited: bool,
        mask: Mask,
        line: int,
    ) -> None:
        """mma: out [16, 8] = left [16, k] @ right [k, 8] + addend, in each warp. `kinds` are the matrices' types."""
        warps = self.lanes.whole_warps(mask, line)
        product = np.matmul(left_operand(left, warps, kinds[0]), right_operand(right, warps, kinds[1]))
        parts = product.reshape(len(warps), 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, -1)
        before = numbers.unpack_sums(gather(addend, warps).reshape(len(addend), -1), kinds[2])
        words = numbers.pack_sums(numbers.add_sums(before, parts, kinds[2], limited), kinds[2])
        for register, result in zip(out, words, strict=True):
            register.reshape(-1, WARP)[warps] = result.reshape(-1, WARP)
