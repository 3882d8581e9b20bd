"""Tensor maps, for copies of tiles (TMA): where a tile lies in global memory, and its bytes' places in shared memory.

On a device a map is 128 bytes whose meaning only the driver and the hardware know. Here it is a record of our own,
`LAYOUT`, with the PTX ISA's fields and codes, so that maps of the host and maps that a kernel writes by
`tensormap.replace` have the same form. Maps with steps between elements or with interleaving are refused.
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
# Bytes of an element by its code: u8, u16, u32, s32, u64, s64, f16, f32, f64 and bf16. Other
# codes convert elements during the copy and are refused.
WIDTHS = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 9: 8, 10: 2}
FLOATS = {6, 7, 9, 10}
SPANS = {0: 16, 1: 32, 2: 64, 3: 128}  # bytes of a row, by swizzle_mode; 16 means no swizzle
LARGEST_BOX, PIECE = 256, 16  # the most elements of a box in one dimension, and the bytes of a piece


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory and the box that is copied at a time; dimensions are innermost first.

    `strides` are in bytes, for all dimensions except the innermost. With `nan`, elements outside the tensor are NaN
    instead of zero.
    """

    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    elemtype: int
    swizzle: int
    nan: bool = False

    def pack(self) -> NDArray[np.uint8]:
        """The map as 128 bytes."""
        rank, record = len(self.dims), np.zeros((), LAYOUT)
        record["global_address"], record["rank"], record["elemtype"] = self.address, rank - 1, self.elemtype
        record["swizzle_mode"], record["fill_mode"] = self.swizzle, self.nan
        record["global_dim"][:rank], record["box_dim"][:rank], record["element_stride"][:rank] = self.dims, self.box, 1
        record["global_stride"][: rank - 1] = self.strides
        return np.frombuffer(record.tobytes(), np.uint8)

    @classmethod
    def unpack(cls, data: NDArray[np.uint8]) -> "TensorMap":
        """The map in 128 bytes. Raises Unknown for a map that is not supported."""
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
        """The size of an element in bytes."""
        return WIDTHS[self.elemtype]

    @property
    def row(self) -> int:
        """The size of a row of the box in bytes."""
        return self.box[0] * self.width

    @property
    def bytes(self) -> int:
        """The size of the box in bytes, including elements outside the tensor."""
        return math.prod(self.box) * self.width

    def wrong(self) -> str | None:
        """The reason why the map is invalid, or None."""
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
        """The box at a corner, cut into pieces: their addresses, whether each is in the tensor, and a piece's bytes."""
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
        """The places in shared memory of the pieces of a box that begins at `start`."""
        place = start + np.arange(0, self.bytes, piece)
        return place ^ ((place >> 7 & SPANS[self.swizzle] // 16 - 1) << 4)

    def filling(self) -> NDArray[np.uint8]:
        """The bytes of an element outside the tensor."""
        if not self.nan:
            return np.zeros(self.width, np.uint8)
        return np.frombuffer(((1 << 8 * self.width - 1) - 1).to_bytes(self.width, "little"), np.uint8)
