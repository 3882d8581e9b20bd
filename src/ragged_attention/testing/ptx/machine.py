"""Runs a kernel over a grid: it keeps the position of each thread, handles barriers and owns the other objects.

Threads of several CTAs run at a time, as lanes of the same arrays. If lanes are at different basic blocks, those at the
lowest block run first, so that diverged lanes meet again. Not every PTX text orders its blocks so that this suffices.
So before a block that a warp must execute together, lanes wait for the lanes of their warp that can still reach this
block. With a seed, randomly drawn warps (or warpgroups) may run ahead of the others. Hazards are found by clocks, not
by chance, so one order shows most of them; other orders show the effect of a value that a thread reads too early. Lanes
that wait, at an mbarrier or for a lock, let others go first. If no other lane can continue, that is a deadlock.

The emulator is lenient here too: threads that have ended count as arrived at a barrier that gives no number of threads.
A loop that waits for memory which another thread changes without atomic operations may never end. Clusters, tcgen05,
calls and generic addresses of shared memory are refused, as `Unknown`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragged_attention.testing.ptx import numbers
from ragged_attention.testing.ptx.bulk import Bulk
from ragged_attention.testing.ptx.clocks import Knowledge
from ragged_attention.testing.ptx.copies import Copies
from ragged_attention.testing.ptx.errors import Deadlock, Diverged, Fault, Report, Reporter, Unknown
from ragged_attention.testing.ptx.lanes import WARP, Lanes
from ragged_attention.testing.ptx.mbarriers import Mbarriers
from ragged_attention.testing.ptx.memory import GlobalAccess, Memory
from ragged_attention.testing.ptx.operands import Names
from ragged_attention.testing.ptx.ordering import ORDERING
from ragged_attention.testing.ptx.parsing import Block, Kernel, size_of
from ragged_attention.testing.ptx.shared import Shared
from ragged_attention.testing.ptx.spaces import Generic, Local, Parameters
from ragged_attention.testing.ptx.translation import Program, translate
from ragged_attention.testing.ptx.warpgroups import GROUP, Warpgroups
from ragged_attention.testing.ptx.warps import Warps, most_registers

__all__ = ["Fault", "Outcome", "Report", "Unknown", "launch"]

ENDED = 1 << 30  # the block number of a lane that has returned
PATIENCE = 100  # how often all waiting lanes check again before this counts as a deadlock


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The reports of a run, and what it executed.

    The keys of `reports` are (line of the PTX, text without numbers). `instructions` counts an instruction once for all
    the threads that execute it together. `opcodes` and `lines` are those of the basic blocks that ran.
    """

    reports: dict[tuple[int, str], Report]
    instructions: int
    opcodes: set[str]
    lines: set[int]


def launch(
    kernel: Kernel,
    memory: Memory,
    params: Mapping[str, Any],
    grid: Sequence[int],
    threads: int,
    shared: int,
    *,
    lanes: int = 2048,
    seed: int | None = None,
) -> Outcome:
    """Run `kernel` over sealed memory, with `threads` threads and `shared` bytes of dynamic shared memory in a CTA.

    `params` has, by name, NumPy numbers of the parameters' types, or bytes. `lanes` is the number of threads that run
    at a time; at least one CTA's threads do. Raises Fault for an operation that no correct kernel does, with the
    reports before it as notes, and Unknown for PTX that the emulator does not know.
    """
    if threads % WARP or not threads:
        raise Unknown(f"CTAs of {threads} threads, which are not whole warps")
    program, reporter = translate(kernel), Reporter(kernel.sources, kernel.instructions)
    rng = None if seed is None else np.random.default_rng(seed)
    x, y, z = (*map(int, grid), 1, 1)[:3]
    ctas = [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
    batch = max(1, lanes // threads)
    if ORDERING.search(kernel.text):
        memory.count_order()
    instructions, reached = 0, set()
    for start in range(0, len(ctas), batch):
        machine = Machine(
            program, memory, params, Lanes(ctas[start : start + batch], (x, y, z), threads, reporter), shared, rng
        )
        try:
            machine.run()
        except Fault as fault:
            for report in reporter.reports.values():
                fault.add_note(f"before that, {report}")
            raise
        instructions += machine.executed
        reached |= machine.reached
    blocks = [kernel.blocks[index] for index in reached]
    lines = {one.line for block in blocks for one in block.instructions} | {block.line for block in blocks}
    opcodes = {one.opcode for block in blocks for one in block.instructions}
    opcodes |= {block.opcode for block in blocks if block.opcode}
    return Outcome(reporter.reports, instructions, opcodes, lines)


class Machine:
    """Some CTAs of one launch.

    By lane: `at` is the block to execute next, `parked` whether the lane waits at a barrier, `barrier` the number of
    that barrier, and `counted` the barrier's number of threads, or 0 if it gives none. `arrived` has, by (CTA,
    barrier), how many threads arrived there without waiting, and what their warps knew.
    """

    def __init__(
        self,
        program: Program,
        memory: Memory,
        params: Mapping[str, Any],
        lanes: Lanes,
        shared: int,
        rng: np.random.Generator | None,
    ) -> None:
        self.kernel, self.lanes, self.rng = program.names.kernel, lanes, rng
        self.shared = Shared(lanes, self.kernel.shared + shared, self.kernel.text)
        access = GlobalAccess(memory, lanes, self.shared.clocks)
        self.copies = Copies(lanes, self.shared, access)
        self.mbarriers = Mbarriers(lanes, self.shared)
        parameters = Parameters(lanes, image(self.kernel, params))
        self.bulk = Bulk(lanes, self.shared, access, self.mbarriers, parameters.data)
        self.warps = Warps(lanes, self.shared, self.kernel.most_registers or most_registers(lanes.threads))
        self.warpgroups = Warpgroups(lanes, self.shared)
        local = Local(lanes, self.kernel.locals[""])
        space = _storage(program.names, lanes, params) | _variables(program.names, memory) | {
            "np": np, "n": numbers, "memory": access, "shared": self.shared, "copies": self.copies,
            "warps": self.warps, "warpgroups": self.warpgroups, "busy": self.warpgroups.busy,
            "mbarriers": self.mbarriers, "bulk": self.bulk, "params": parameters,
            "local": local, "generic": Generic(lanes, access, local),
        }  # fmt: skip
        exec(program.code, space)
        self.functions = [space[f"b{index}"] for index in range(len(self.kernel.blocks))]
        self.at = np.zeros(lanes.count, np.int64)
        self.parked = np.zeros(lanes.count, bool)
        self.barrier, self.counted = np.zeros(lanes.count, np.int64), np.zeros(lanes.count, np.int64)
        self.together_only = np.array([_needs_a_warp(block) for block in self.kernel.blocks])
        self.arrived: dict[tuple[int, int], list[tuple[int, list[Knowledge]]]] = {}
        # The results of `_reaching`, by the number of a block that a warp must execute together.
        self.reaching: dict[int, NDArray[np.bool_]] = {}
        self.executed, self.reached = 0, set()
        self.looked, self.changes = 0, 0  # how often all waiting lanes checked again since the last change
        whole_groups = "wgmma" in self.kernel.text and lanes.threads % GROUP == 0
        self.together = GROUP if whole_groups else WARP

    def run(self) -> None:
        """Run until all threads have ended."""
        with np.errstate(all="ignore"):
            while True:
                free = ~self.parked & (self.at < ENDED)
                if not free.any():
                    break
                index, mask = self._choose(self._willing(free) if self.lanes.waiting.any() else free)
                taken = self.functions[index](True if mask.all() else mask)
                block = self.kernel.blocks[index]
                self.executed += len(block.instructions)
                self.reached.add(index)
                self._go_on(index, block, mask, taken)
        if self.parked.any():
            raise self._deadlock(self.parked)
        for one in (self.copies, self.warpgroups, self.bulk, self.mbarriers, self.warps):
            one.end()

    def _deadlock(self, stuck: NDArray[np.bool_]) -> Fault:
        lane = int(np.flatnonzero(stuck)[0])
        if self.parked[lane]:
            waited = ", ".join(map(str, np.unique(self.barrier[self.parked])))
            line = self.kernel.blocks[int(self.at[lane]) - 1].line
            text = f"{int(self.parked.sum())} threads wait at barriers ({waited}) that nobody else comes to"
        else:
            line = self.kernel.blocks[int(self.at[lane])].line
            lacking = self.mbarriers.open() or "for other CTAs, which may not have begun"
            text = f"{int(stuck.sum())} threads wait in a loop: {lacking}"
        return self.lanes.fault(line, lane, f"deadlock: {text}", Deadlock)

    def _willing(self, free: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """The free lanes that do not wait, in whole warps if possible. If all free lanes wait, they check again."""
        waiting = self.lanes.waiting
        if self.lanes.changes != self.changes:
            self.changes, self.looked = self.lanes.changes, 0
            waiting[:] = False
            return free
        warps = np.repeat((waiting & free).reshape(-1, WARP).any(1), WARP)
        if (whole := free & ~warps).any():
            return whole
        # Lanes of partly waiting warps that do not wait themselves. They may run unless their block needs a whole warp.
        rest = np.flatnonzero(free & ~waiting)
        if (rest := rest[~self.together_only[self.at[rest]]]).size:
            return np.isin(self.lanes.every, rest)
        self.looked += not (free & waiting & ~self.lanes.sure).any()
        if self.looked > PATIENCE:
            raise self._deadlock(free & waiting)
        waiting[:] = False
        return free

    def _choose(self, free: NDArray[np.bool_]) -> tuple[int, NDArray[np.bool_]]:
        """The block to execute next, and the lanes that execute it."""
        left = free
        while left.any():
            index, mask = self._lowest(left)
            early = self._early(index, mask, free)
            if early is None:
                return index, mask
            if (whole := mask & ~early).any():
                return index, whole
            left = left & ~early
        return self._lowest(free)

    def _early(self, index: int, mask: NDArray[np.bool_], free: NDArray[np.bool_]) -> NDArray[np.bool_] | None:
        """Lanes that must wait at a block that warps execute together, because their warp has lanes yet to reach it."""
        if not self.together_only[index]:
            return None
        if index not in self.reaching:
            self.reaching[index] = _reaching(self.kernel.blocks, index)
        coming = free & ~mask & self.reaching[index][np.minimum(self.at, len(self.kernel.blocks))]
        warps = (coming.reshape(-1, WARP).any(1) & mask.reshape(-1, WARP).any(1)).repeat(WARP)
        return mask & warps if warps.any() else None

    def _lowest(self, free: NDArray[np.bool_]) -> tuple[int, NDArray[np.bool_]]:
        """The block to execute and its lanes: the lowest block of all lanes or, with a seed, that of a drawn warp."""
        if self.rng is None:
            index = int(self.at[free].min())
            return index, free & (self.at == index)
        # The lowest block of each warp or warpgroup.
        lowest = np.where(free, self.at, ENDED).reshape(-1, self.together).min(1)
        first = self.rng.choice(np.flatnonzero(lowest < ENDED))
        index = int(lowest[first])
        drawn = self.rng.random(len(lowest)) < 0.5
        drawn[first] = True
        return index, free & (self.at == index) & np.repeat(drawn & (lowest == index), self.together)

    def _go_on(self, index: int, block: Block, mask: NDArray[np.bool_], taken: Any) -> None:
        """Move lanes to their next block after they executed a block."""
        if block.ending == "fall":
            self.at[mask] = index + 1
            return
        if block.ending in ("branch", "return"):
            target = block.target if block.ending == "branch" else ENDED
            self.at[mask] = target if taken is True else np.where(taken, target, index + 1)[mask]
            if block.ending == "return" and self.parked.any():
                for number in np.unique(self.barrier[self.parked & (self.counted == 0)]).tolist():
                    self._release(number, None)
            return
        if block.aligned:
            table, ended = mask.reshape(-1, WARP), (self.at >= ENDED).reshape(-1, WARP)
            if (part := table & ~(table | ended).all(1, keepdims=True)).any():
                lane = int(np.flatnonzero(part)[0])
                raise self.lanes.fault(block.line, lane, "part of a warp executes an aligned barrier", Diverged)
        number, expected = (self.lanes.spread(-1 if one is None else one).astype(np.int64) for one in taken)
        for pair in set(zip(number[mask].tolist(), expected[mask].tolist(), strict=True)):
            self._arrive(index, block, pair, mask & (number == pair[0]) & (expected == pair[1]))

    def _arrive(self, index: int, block: Block, pair: tuple[int, int], mask: NDArray[np.bool_]) -> None:
        """Let threads arrive at a barrier. `pair` is its number and its number of threads, or -1 if it gives none."""
        number, expected = pair
        if number > 15 or (expected >= 0 and (expected % WARP or not expected)):
            lane = int(np.flatnonzero(mask)[0])
            raise self.lanes.fault(block.line, lane, f"a barrier of number {number} for {expected} threads")
        if block.ending == "arrive":
            self.at[mask] = index + 1
            self._record_arrivals(number, mask)
        else:
            self.at[mask], self.parked[mask], self.barrier[mask] = index + 1, True, number
            self.counted[mask] = max(expected, 0)
        self._release(number, expected if expected >= 0 else None)

    def _record_arrivals(self, number: int, mask: NDArray[np.bool_]) -> None:
        """Record threads that arrive at a barrier without waiting."""
        for cta in np.unique(self.lanes.cta[mask]).tolist():
            here = mask & (self.lanes.cta == cta)
            told = [self.shared.clocks.tell(warp) for warp in np.unique(self.lanes.warp[here]).tolist()]
            self.arrived.setdefault((cta, number), []).append((int(here.sum()), told))

    def _release(self, number: int, expected: int | None) -> None:
        """Release the threads of each CTA in which all threads that the barrier waits for have arrived."""
        here = self.parked & (self.barrier == number)
        table = here.reshape(self.lanes.ctas, -1)
        ended = (self.at >= ENDED).reshape(self.lanes.ctas, -1)
        left = np.array([sum(n for n, _ in self.arrived.get((cta, number), ())) for cta in range(self.lanes.ctas)])
        ready = table.any(1) & (table | ended).all(1) if expected is None else table.sum(1) + left >= expected
        for cta in np.flatnonzero(ready).tolist():
            released = here & (self.lanes.cta == cta)
            self.parked[released] = False
            word = [told for _, tellers in self.arrived.pop((cta, number), ()) for told in tellers]
            if released.any():
                self.shared.clocks.join(np.unique(self.lanes.warp[released]), word)


def _variables(names: Names, memory: Memory) -> dict[str, Any]:
    """The addresses of the kernel's arrays of constants, by their Python names."""
    if missing := names.variables.keys() - memory.variables.keys():
        raise Unknown(f"the variable {', '.join(missing)}, which is not in memory")
    return {name: np.uint64(memory.variables[variable]) for variable, name in names.variables.items()}


def _reaching(blocks: Sequence[Block], index: int) -> NDArray[np.bool_]:
    """The blocks from which threads can reach a block, as bools [blocks + 1].

    The block's own entry is false. So is the last entry, which stands for threads that have ended.
    """
    comes_from: dict[int, list[int]] = {}
    for number, block in enumerate(blocks):
        targets = {number + 1} if block.ending != "branch" or block.guard else set()
        targets |= {block.target} if block.ending == "branch" else set()
        for target in targets if block.ending != "return" or block.guard else ():
            comes_from.setdefault(target, []).append(number)
    reaches, left = np.zeros(len(blocks) + 1, bool), [index]
    while left:
        for number in comes_from.get(left.pop(), ()):
            if not reaches[number]:
                reaches[number] = True
                left.append(number)
    reaches[index] = False
    return reaches


def _needs_a_warp(block: Block) -> bool:
    """Whether a block has an instruction, or ends at a barrier, that the threads of a warp must execute together."""
    return block.aligned or any(".sync" in one.opcode or ".aligned" in one.opcode for one in block.instructions)


def image(kernel: Kernel, params: Mapping[str, Any]) -> NDArray[np.uint8]:
    """The bytes of a kernel's parameter space."""
    space = np.zeros(max((kernel.offsets[name] + size_of(kind) for name, kind in kernel.params), default=0), np.uint8)
    for name, kind in kernel.params:
        data = np.frombuffer(np.asarray(params[name]).tobytes(), np.uint8)[: size_of(kind)]
        space[kernel.offsets[name] : kernel.offsets[name] + data.size] = data
    return space


def _storage(names: Names, lanes: Lanes, params: Mapping[str, Any]) -> dict[str, Any]:
    """Registers, constants, special registers and parameters, by their Python names."""
    values: dict[str, Any] = {name: np.zeros(lanes.count, dtype) for name, dtype in names.registers.items()}
    values |= {name: values[base].view(dtype) for name, (base, dtype) in names.views.items()}
    values |= names.constants
    values |= {name: lanes.specials[special] for name, special in names.specials.items()}
    for name, (parameter, offset, dtype) in names.params.items():
        size = int(dtype[1:])
        data = np.asarray(params[parameter]).tobytes()[offset : offset + size].ljust(size, b"\0")
        values[name] = np.frombuffer(data, dtype)[0]
    return values
