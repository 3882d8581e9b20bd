"""Bulk copies of byte ranges and of tensor tiles (TMA), between global and shared memory.

A copy to shared memory reads global memory when it is issued. Its bytes arrive when a thread waits at its mbarrier;
until then the target holds 0xFF, which is NaN in every float format. A copy to global memory reads shared memory when
it is issued, and that memory must not change until the issuing thread has waited. The bytes arrive in global memory
when that thread waits for the whole copy (a wait without `.read`), or at the kernel's end.

The emulator is lenient: without a proxy fence, a copy may overwrite shared memory that threads have read, if a barrier
lies between. Also without a proxy fence, it may read global memory that threads have written.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragged_attention.testing.ptx.copies import Operation, Queue
from ragged_attention.testing.ptx.errors import Hazard, Misaligned, OutOfBounds, Unknown
from ragged_attention.testing.ptx.lanes import Indices, Lanes, Mask
from ragged_attention.testing.ptx.mbarriers import Mbarriers
from ragged_attention.testing.ptx.memory import GlobalAccess, Memory
from ragged_attention.testing.ptx.operands import PARAM_BASE, PARAM_WINDOW, SHARED_BASE
from ragged_attention.testing.ptx.shared import Shared
from ragged_attention.testing.ptx.tensor_maps import LAYOUT, PIECE, TensorMap

Place = tuple[Any, int]  # (register or None, offset in bytes)
MAP = LAYOUT.itemsize
TILE_ALIGNMENT = 128  # the alignment of a tile in shared memory, in bytes
# (kind, dtype) of the numbers on which atomic operations of tiles are supported, by the map's element code.
CHANGED = {2: ("u", "u4"), 3: ("s", "i4"), 4: ("u", "u8"), 5: ("s", "i8"), 6: ("f16", "u2"), 7: ("f", "f4"),
           10: ("bf16", "u2")}  # fmt: skip


@dataclasses.dataclass
class Store(Operation):
    """One thread's copy to global memory. `write` delivers the bytes; `cells` must not change until `free` is set."""

    cells: NDArray[np.int64]
    write: Callable[[], None]
    free: bool = False


class Bulk(Queue[Store]):
    """The bulk copies of some CTAs; `params` are the bytes of the kernel's parameters."""

    what = "bulk copy"

    def __init__(
        self, lanes: Lanes, shared: Shared, memory: GlobalAccess, mbarriers: Mbarriers, params: NDArray[np.uint8]
    ) -> None:
        super().__init__(lanes)
        self.shared, self.memory, self.mbarriers, self.params = shared, memory, mbarriers, params
        self.acquired: set[tuple[int, int]] = set()  # (CTA, place) of maps in global memory that fences made visible

    # ---- tensor maps

    def _map(self, lane: int, address: Place, line: int) -> TensorMap:
        """The map at a generic address, in the kernel's parameters or in global memory."""
        where = _number(address, lane)
        begin = where - PARAM_WINDOW - PARAM_BASE
        if where % 64:
            raise self.lanes.fault(line, lane, "a tensor map that is not aligned to 64 bytes", Misaligned)
        if 0 <= begin <= self.params.size - MAP:
            data = self.params[begin : begin + MAP]
        else:
            data = self._map_in_memory(lane, where, line)
        try:
            tensor_map = TensorMap.unpack(data)
            wrong = tensor_map.wrong()
        except Unknown as error:
            raise Unknown(f"line {line}: {error}") from error
        if wrong:
            raise self.lanes.fault(line, lane, f"an invalid tensor map: {wrong}")
        return tensor_map

    def _map_in_memory(self, lane: int, where: int, line: int) -> NDArray[np.uint8]:
        lanes, pieces = np.full(MAP // PIECE, lane), where + np.arange(0, MAP, PIECE)
        index = self.memory.reach(lanes, pieces, PIECE, line, "read of a tensor map")
        place = int(index[0])
        written = self.memory.memory.writer.cta[place : place + MAP].any()
        if written and (int(self.lanes.cta[lane]), place) not in self.acquired:
            self.lanes.say(line, lane, "uses a tensor map without a proxy fence after it was written")
        return self.memory.read(lanes, index, PIECE, line).ravel()

    def replace_field(self, address: Place, field: str, ordinal: int, value: Any, mask: Mask, line: int) -> None:
        """Execute tensormap.replace: write one field of a map in shared memory."""
        dtype, begin = LAYOUT.fields[field][:2]  # type: ignore[index]
        base, count = dtype.base, int(np.prod(dtype.shape, dtype=int))
        if not 0 <= ordinal < count:
            lane = int(self.lanes.active(mask)[0])
            raise self.lanes.fault(line, lane, f"a tensor map has no {field} {ordinal}")
        number = np.asarray(value).astype(base)
        register, offset = address
        self.shared.store((number,), register, offset + begin + ordinal * base.itemsize, base.itemsize, mask, line)

    def publish_map(self, target: Place, source: Place, mask: Mask, line: int) -> None:
        """tensormap.cp_fenceproxy: each warp copies a map to global memory, for the proxy that uses it."""
        for warp in self.lanes.whole_warps(mask, line).tolist():
            lanes = warp * 32 + np.arange(MAP // PIECE)  # each lane copies one piece
            pieces = np.arange(0, MAP, PIECE)
            begin = self._shared_place(int(lanes[0]), source, MAP, line)
            data = self.shared.read(lanes, begin + pieces, PIECE, line)
            where = _number(target, int(lanes[0])) + pieces
            self.memory.write(lanes, self.memory.reach(lanes, where, PIECE, line, "write"), data, line)

    def acquire_map(self, address: Place, mask: Mask, line: int) -> None:
        """fence.proxy.tensormap::generic.acquire: the CTA may use a map in global memory from now on."""
        for lane in self.lanes.active(mask).tolist():
            self.acquired.add((int(self.lanes.cta[lane]), _number(address, lane) - Memory.START))

    # ---- to shared memory

    def _shared_place(self, lane: int, address: Place, alignment: int, line: int) -> int:
        """The index in `shared.bytes` of a lane's address, which must be aligned to `alignment`."""
        byte = _number(address, lane) - SHARED_BASE
        if byte % alignment:
            text = f"shared byte {byte} is not aligned to {alignment}, as this copy requires"
            raise self.lanes.fault(line, lane, text, Misaligned)
        return byte + int(self.lanes.cta[lane]) * self.shared.stride

    def _inside(self, lane: int, places: NDArray[np.int64], piece: int, line: int) -> NDArray[np.int64]:
        """The indices [pieces, piece] of the bytes of pieces, all of which must lie in the CTA's shared memory."""
        begin = int(self.lanes.cta[lane]) * self.shared.stride
        if places.min() < begin or places.max() + piece > begin + self.shared.size:
            span = f"bytes {places.min() - begin} to {places.max() + piece - begin} of {self.shared.size}"
            raise self.lanes.fault(line, lane, f"a bulk copy outside shared memory: {span}", OutOfBounds)
        return places[:, None] + np.arange(piece)

    def load_tile(
        self, target: Place, source: Place, corner: Sequence[Any], mbarrier: Place, mask: Mask, line: int
    ) -> None:
        """Execute cp.async.bulk.tensor to shared memory. Elements outside the tensor become the map's filling."""
        for lane in self.lanes.active(mask).tolist():
            tensor_map = self._map(lane, source, line)
            address, inside, piece = tensor_map.tile(self._corner(tensor_map, corner, lane, line))
            data = np.tile(tensor_map.filling(), (len(address), piece // tensor_map.width))
            lanes = np.full(int(inside.sum()), lane)
            if lanes.size:
                index = self.memory.reach(lanes, address[inside], piece, line, "copy of a tile")
                data[inside] = self.memory.read(lanes, index, piece, line)
            begin = self._shared_place(lane, target, TILE_ALIGNMENT, line)
            self._load(lane, self._inside(lane, tensor_map.places(begin, piece), piece, line), data, mbarrier, line)

    def load(self, target: Place, source: Place, size: Any, mbarrier: Place, mask: Mask, line: int) -> None:
        """Execute cp.async.bulk to shared memory."""
        for lane in self.lanes.active(mask).tolist():
            pieces, lanes = self._pieces(lane, size, line)
            begin, where = self._shared_place(lane, target, PIECE, line), _number(source, lane)
            index = self.memory.reach(lanes, where + pieces, PIECE, line, "bulk copy")
            data = self.memory.read(lanes, index, PIECE, line)
            self._load(lane, self._inside(lane, begin + pieces, PIECE, line), data, mbarrier, line)

    def _load(self, lane: int, places: NDArray[np.int64], data: NDArray[np.uint8], mbarrier: Place, line: int) -> None:
        shared, who = self.shared, np.array([lane])
        barrier = self.mbarriers.at(lane, *mbarrier, line)
        cells = np.unique(places // shared.cell)
        shared.hazard(line, who, cells, shared.pending[cells], "copies to where another copy is in flight")
        warp = int(self.lanes.warp[lane])
        unfenced: Any = shared.written_at[cells] > shared.clocks.fenced[warp, shared.written_by[cells]]
        text = "a bulk copy overwrites what was written without a proxy fence after it"
        shared.hazard(line, who, cells, unfenced, text)
        shared.note_write(cells[None, :], who, line, np.zeros((1, len(cells)), bool))
        shared.bytes[places] = 0xFF
        shared.pending[cells] = True

        def land(clock: int) -> None:
            shared.bytes[places] = data
            shared.pending[cells] = False
            shared.written_by[cells], shared.written_at[cells] = barrier.agent, clock
            shared.written_line[cells], shared.written[cells] = line, True

        self.mbarriers.start(barrier, land, data.size, line)

    # ---- to global memory

    def store_tile(
        self, target: Place, corner: Sequence[Any], source: Place, change: str | None, mask: Mask, line: int
    ) -> None:
        """Execute cp.async.bulk.tensor to global memory. Elements outside the tensor are dropped.

        With `change`, execute cp.reduce.async.bulk.tensor, which does an atomic operation on each element.
        """
        for lane in self.lanes.active(mask).tolist():
            tensor_map = self._map(lane, target, line)
            address, inside, piece = tensor_map.tile(self._corner(tensor_map, corner, lane, line))
            begin = self._shared_place(lane, source, TILE_ALIGNMENT, line)
            places = self._inside(lane, tensor_map.places(begin, piece), piece, line)
            lanes = np.full(int(inside.sum()), lane)
            index = self.memory.reach(lanes, address[inside], piece, line, "copy of a tile") if lanes.size else lanes
            self._store(lane, places, inside, index, line, (change, tensor_map.elemtype) if change else None)

    def store(self, target: Place, source: Place, size: Any, mask: Mask, line: int) -> None:
        """Execute cp.async.bulk to global memory."""
        for lane in self.lanes.active(mask).tolist():
            pieces, lanes = self._pieces(lane, size, line)
            places = self._inside(lane, self._shared_place(lane, source, PIECE, line) + pieces, PIECE, line)
            index = self.memory.reach(lanes, _number(target, lane) + pieces, PIECE, line, "bulk copy")
            self._store(lane, places, np.ones(len(pieces), bool), index, line)

    def _store(
        self,
        lane: int,
        places: NDArray[np.int64],
        inside: NDArray[np.bool_],
        index: Indices,
        line: int,
        change: tuple[str, int] | None = None,
    ) -> None:
        shared, who = self.shared, np.array([lane])
        cells = np.unique(places // shared.cell)
        shared.note_asynchronous(cells, [int(self.lanes.warp[lane])], line, self.what)
        shared.storing[cells] += 1
        shared.watched = True
        data = shared.bytes[places][inside]

        def write() -> None:
            if data.size and change:
                self._change(lane, index, data, *change, line)
            elif data.size:
                self.memory.write(np.full(len(index), lane), index, data, line)

        self.flight.append(Store(who, self.committed[who], line, cells, write))

    def _change(
        self, lane: int, index: Indices, data: NDArray[np.uint8], operation: str, elemtype: int, line: int
    ) -> None:
        """Do an atomic operation on each element of some pieces."""
        kind, dtype = CHANGED.get(elemtype, ("", ""))
        if not kind or (kind[0] in "fb" and operation != "add"):
            raise Unknown(f"line {line}: .{operation} on elements of the kind {elemtype}")
        values = np.ascontiguousarray(data).view(dtype)
        places = index[:, None] + np.arange(0, data.shape[1], values.itemsize)
        lanes = np.full(places.size, lane)
        self.memory.change(operation, kind, values.itemsize, lanes, places.ravel(), [values.ravel()], line)

    def wait_read(self, left: int, mask: Mask, line: int) -> None:
        """cp.async.bulk.wait_group.read: only the last `left` groups may still read the shared memory they copy."""
        active = self.lanes.marked(mask)
        for operation in self.flight:
            lane = operation.lanes[0]
            if active[lane] and operation.groups[0] < self.committed[lane] - left:
                self._free(operation)

    def _free(self, operation: Store) -> None:
        if not operation.free:
            operation.free = True
            warp = int(self.lanes.warp[operation.lanes[0]])
            self.shared.storing[operation.cells] -= 1
            self.shared.read_at[operation.cells, warp % self.lanes.warps] = self.shared.clocks.now[warp]

    def arrive(self, operation: Store) -> None:
        self._free(operation)
        operation.write()

    def end(self) -> None:
        for operation in self.flight:
            if not operation.free:
                text = "the kernel ends before the reading of this bulk copy was waited for"
                self.lanes.say(operation.line, operation.lanes[0], text, kind=Hazard)
            operation.write()

    # ---- operands

    def _corner(self, tensor_map: TensorMap, corner: Sequence[Any], lane: int, line: int) -> list[int]:
        if len(corner) != len(tensor_map.dims):
            text = f"a tile at {len(corner)} coordinates of a tensor of {len(tensor_map.dims)} dimensions"
            raise self.lanes.fault(line, lane, text)
        return [int(self.lanes.spread(one)[lane]) for one in corner]

    def _pieces(self, lane: int, size: Any, line: int) -> tuple[NDArray[np.int64], Indices]:
        count = int(self.lanes.spread(size)[lane])
        if count % PIECE or not count:
            raise self.lanes.fault(line, lane, f"a bulk copy of {count} bytes, no multiple of {PIECE}", Misaligned)
        pieces = np.arange(0, count, PIECE)
        return pieces, np.full(len(pieces), lane)


def _number(address: Place, lane: int) -> int:
    """One lane's address, as a number."""
    register, offset = address
    return offset if register is None else int(register[lane]) + offset
