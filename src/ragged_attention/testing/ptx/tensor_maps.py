"""Tensor maps: how copies of whole tiles (TMA) find a tile in global memory, and its bytes' places in shared memory.

On a device a map is 128 bytes whose meaning only the driver and the hardware know. Here they are a record of our own,
`LAYOUT`, with the PTX ISA's fields and codes, so that a host's map and one that a kernel writes by `tensormap.replace`
are the same. Known are tiles without steps between elements and without interleaving.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragged_attention.testing.ptx.errors import Unknown

LAYOUT = np.dtype({
    "names": ["global_address", "global_stride", "global_dim", "box_dim", "element_stride",
              "rank", "elemtype", "interleave_layout", "swizzle_mode", "fill_mode"],
    "formats": ["u8", ("u8", 4), ("u4", 5), ("u4", 5), ("u4", 5), "u1", "u1", "u1", "u1", "u1"],
    "offsets": [0, 8, 40, 60, 80, 100, 101, 102, 103, 104],
    "itemsize": 128,
})  # fmt: skip
# Bytes of an element by its code: u8, u16, u32, s32, u64, s64, f16, f32, f64 and bf16; others are changed in passing.
WIDTHS = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 9: 8, 10: 2}
FLOATS = {6, 7, 9, 10}
SPANS = {0: 16, 1: 32, 2: 64, 3: 128}  # bytes of a row, by swizzle_mode; 16: no swizzle
LARGEST_BOX, PIECE = 256, 16


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory and the box that is copied at a time; dimensions are innermost first.

    `strides` are bytes, of all dimensions but the innermost; `nan` says that what lies outside is NaN, not zero.
    """

    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    elemtype: int
    swizzle: int
    nan: bool = False

    def pack(self) -> NDArray[np.uint8]:
        """The 128 bytes."""
        rank, record = len(self.dims), np.zeros((), LAYOUT)
        record["global_address"], record["rank"], record["elemtype"] = self.address, rank - 1, self.elemtype
        record["swizzle_mode"], record["fill_mode"] = self.swizzle, self.nan
        record["global_dim"][:rank], record["box_dim"][:rank], record["element_stride"][:rank] = self.dims, self.box, 1
        record["global_stride"][: rank - 1] = self.strides
        return np.frombuffer(record.tobytes(), np.uint8)

    @classmethod
    def unpack(cls, data: NDArray[np.uint8]) -> "TensorMap":
        """What 128 bytes say; refused where it is not known."""
        (record,) = np.frombuffer(data.tobytes(), LAYOUT)
        rank, elemtype, swizzle = int(record["rank"]) + 1, int(record["elemtype"]), int(record["swizzle_mode"])
        if (record["element_stride"][:rank] != 1).any() or record["interleave_layout"]:
            raise Unknown("a tensor map with steps between elements or with interleaving")
        if elemtype not in WIDTHS or swizzle not in SPANS:
            raise Unknown(f"a tensor map of elements {elemtype} and swizzle {swizzle}")
        dims, box = (tuple(map(int, record[name][:rank])) for name in ("global_dim", "box_dim"))
        strides = tuple(map(int, record["global_stride"][: rank - 1]))
        fill = int(record["fill_mode"])
        if fill > 1 or (fill and elemtype not in FLOATS):
            raise Unknown(f"a tensor map of elements {elemtype} that fills by {fill}")
        return cls(int(record["global_address"]), dims, strides, box, elemtype, swizzle, bool(fill))

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return WIDTHS[self.elemtype]

    @property
    def row(self) -> int:
        """Bytes of a row of the box."""
        return self.box[0] * self.width

    @property
    def bytes(self) -> int:
        """Bytes of the box, which count in full whatever of it lies outside."""
        return math.prod(self.box) * self.width

    def wrong(self) -> str | None:
        """What no lawful map says, or None."""
        if not 1 <= len(self.dims) <= 5 or not all(self.dims) or not all(self.box):
            return f"expected 1 to 5 dimensions, none of them empty, got {self.dims} in boxes of {self.box}"
        if max(self.box) > LARGEST_BOX:
            return f"expected boxes of at most {LARGEST_BOX} elements a dimension, got {self.box}"
        if self.address % PIECE or any(stride % PIECE or stride >= 1 << 40 for stride in self.strides):
            return f"expected an address and strides of a multiple of {PIECE} bytes, got {self.strides}"
        if self.row % PIECE:
            return f"expected rows of a multiple of {PIECE} bytes in shared memory, got {self.row}"
        if self.swizzle and self.row > SPANS[self.swizzle]:
            return f"expected rows of at most {SPANS[self.swizzle]} bytes for the swizzle, got {self.row}"
        return None

    def tile(self, corner: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.bool_], int]:
        """The box at a corner in pieces of some bytes: their addresses, which lie inside the tensor, and the bytes."""
        numbers = (corner[0] * self.width, self.dims[0] * self.width, self.row)
        piece = self.width if any(number % PIECE for number in numbers) else PIECE
        if self.swizzle and self.row < SPANS[self.swizzle]:
            raise Unknown("a tensor map whose rows are shorter than its swizzle")
        steps: tuple[int, ...] = (piece, *self.strides)
        per_row = piece // self.width  # elements
        address: Any = np.full(1, self.address, np.int64)
        inside: Any = np.ones(1, bool)
        for axis in reversed(range(len(self.dims))):
            each = per_row if axis == 0 else 1
            index = corner[axis] + np.arange(0, self.box[axis], each)
            address = (address[:, None] + index // each * steps[axis]).ravel()
            inside = (inside[:, None] & (index >= 0) & (index < self.dims[axis])).ravel()
        return address, inside, piece

    def places(self, start: int, piece: int) -> NDArray[np.int64]:
        """Where in shared memory the pieces of the box go, whose first byte is at `start`."""
        place = start + np.arange(0, self.bytes, piece)
        return place ^ ((place >> 7 & SPANS[self.swizzle] // 16 - 1) << 4)

    def filling(self) -> NDArray[np.uint8]:
        """The bytes of an element that lies outside."""
        if not self.nan:
            return np.zeros(self.width, np.uint8)
        return np.frombuffer(((1 << 8 * self.width - 1) - 1).to_bytes(self.width, "little"), np.uint8)
