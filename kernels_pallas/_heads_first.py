"""What the kernels over heads-first pages [K, P, G, D] share: the fetch of pages, and how a block of them is read.

A block is a number of pages that lie in one of two buffers [2, heads, pages, G, D] in vector memory (VMEM). Each page
is fetched by one asynchronous copy per operand (K, V, and their scales if any), for all heads of a step
at once; each operand has a semaphore of its own for each of the two buffers. While one block is computed on, the next
is under way, over the borders of sequences, heads and grid steps as well.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ragged_attention.calls import dtype_name
from ragged_attention.errors import InvalidInput
from ragged_attention.kernels_pallas._blocks import LANES, cannot_run, cdiv, in_pieces, next_power_of_2, vector_bytes

SUBLANES = 8
FEWEST_COLUMNS = 128  # of the logits of a block, to which it shrinks before the heads of a step do
DEFAULT_LIMIT = 2**24  # bytes of vector memory that the compiler gives a kernel at least
BUDGET = DEFAULT_LIMIT * 3 // 4  # of them for what a launch holds
TOP_HALF = -(2**16)  # the bits of a float32 that a bfloat16 has


@dataclasses.dataclass(frozen=True, slots=True)
class Operand:
    """An array of pages in HBM [K, P, ...], its two buffers in VMEM [2, heads, pages, ...] and their semaphores."""

    pages: Any
    buffer: Any
    semaphores: Any


def operands_of(call: Any) -> list[jax.Array]:
    """K and V, then their scales if any, [K, P, 1, G] each: those of a page lie in a row of lanes."""
    scales = [array.reshape(*array.shape[:2], 1, call.page_size) for array in call.scales if array is not None]
    return [*call.arrays, *scales]


def buffers_of(call: Any, heads: int, pages: int) -> list[Any]:
    """The buffers of the operands."""
    shape = (2, heads, pages, call.page_size, call.head_dim)
    scales = [pltpu.VMEM((2, heads, pages, 1, call.page_size), jnp.float32)] * (2 * call.quantized)
    return [pltpu.VMEM(shape, jnp.dtype(call.cache_dtype))] * 2 + scales


def bytes_of(scratch: Iterable[Any]) -> int:
    """The vector memory that scratch shapes take."""
    return sum(vector_bytes(item.shape, item.dtype) for item in scratch)


def refusal(call: Any, fits: bool, rows: int) -> str | None:
    """Why no kernel over heads-first pages takes a call; `rows` of its page table are in scalar memory at once."""
    if (reason := cannot_run(call)) is not None:
        return reason
    if dtype_name(call.q) == "float16":
        return "TPUs have no float16"
    if not fits:
        return f"has no vector memory for two buffers of a page of {call.page_size=}, {call.head_dim=}"
    if (needed := rows * row_bytes(call)) > (most := table_bytes(call)):
        return f"needs {needed} bytes of scalar memory for {rows} row(s) of page_indices, at most {most} are for them"
    return None


def row_bytes(call: Any) -> int:
    """The scalar memory that a sequence takes: its page indices, its length and the number of the next sequence."""
    return 4 * (call.pages_per_seq + 2)


def table_bytes(call: Any) -> int:
    """The scalar memory that all sequences of a launch may take."""
    return call.device.scalar_memory * 3 // 4


def expect_block(call: Any, name: str, pages: int, used: int) -> None:
    """Check the requested pages per block against the vector memory; a launch with them takes `used` bytes of it."""
    if used > (most := call.device.shared_memory):
        raise InvalidInput(f"expected {name} to fit in {most} bytes of vector memory, got {pages}, which take {used}")


def vmem_limit(call: Any, asked: int, used: int) -> int | None:
    """The compiler's limit of vector memory: the one asked for, else its default, or more where that is tight."""
    needed = used * 3 // 2 + 2**22
    return asked or (min(needed, call.device.shared_memory) if needed > DEFAULT_LIMIT else None)


def fetch(
    table: Any, start: Any, offsets: tuple[Any, Any], heads: Any, slot: Any, operands: Sequence[Operand],
    present: Any = None,
) -> Any:  # fmt: skip
    """Start the copies of the pages that `table` lists for some offsets of a block; returns how many there are.

    Offset i is entry `start + i`; an index outside [0, P) is skipped. With flags `present` [2, pages] each page lies
    at its offset and has its flag set or cleared; without them the valid pages lie one after another.
    """
    num_pages = operands[0].pages.shape[1]

    def step(offset: Any, found: Any) -> Any:
        page = table[start + offset]
        there = (page >= 0) & (page < num_pages)
        if present is not None:
            present[slot, offset] = there.astype(jnp.int32)

        @pl.when(there)
        def _() -> None:
            for operand in operands:
                pltpu.make_async_copy(
                    operand.pages.at[heads, page],
                    operand.buffer.at[slot, :, found if present is None else offset],
                    operand.semaphores.at[slot],
                ).start()

        return found + there.astype(jnp.int32)

    return lax.fori_loop(*offsets, step, jnp.int32(0))


def wait(count: Any, slot: Any, operands: Sequence[Operand]) -> None:
    """Wait for `count` pages of each operand; a semaphore counts bytes, so any pages of as many will do."""

    def arrived(_: Any, size: int) -> None:
        for operand in operands:
            piece = operand.buffer.at[slot, :, pl.ds(0, size)]
            pltpu.make_async_copy(piece, piece, operand.semaphores.at[slot]).wait()

    in_pieces(count, operands[0].buffer.shape[2], arrived)


def padded_page(page_size: int, scaled: bool) -> int:
    """Rows that a page takes in a block once loaded: whole tiles of sublanes, or of lanes for `scaled` pages."""
    if page_size % (LANES if scaled else SUBLANES) == 0:
        return page_size
    return max(SUBLANES, next_power_of_2(page_size))


def block_rows(pages: jax.Array, page_rows: int, dtype: Any) -> jax.Array:
    """The pages [pages, G, D] of a block as rows [pages * page_rows, D] of `dtype`; padding rows are 0."""
    count, page_size, width = pages.shape
    if page_size != page_rows or page_rows % (SUBLANES * 4 // jnp.dtype(dtype).itemsize):
        pages = pages.astype(jnp.float32)  # whose rows need no packing
    elif pages.dtype != dtype:
        pages = pages.astype(dtype)
    if page_size != page_rows:
        pages = jnp.pad(pages, ((0, 0), (0, page_rows - page_size), (0, 0)))
    return pages.reshape(count * page_rows, width).astype(dtype)


def positions(columns: int, page_size: int, page_rows: int) -> jax.Array:
    """The position in the block of each of its rows, [1, columns]; a huge one for padding rows."""
    column = lax.broadcasted_iota(jnp.int32, (1, columns), 1)
    if page_size == page_rows:
        return column
    page, offset = column >> (page_rows.bit_length() - 1), column & (page_rows - 1)
    return jnp.where(offset < page_size, page * page_size + offset, jnp.iinfo(jnp.int32).max)


def scale_row(scales: jax.Array, page_rows: int) -> jax.Array:
    """The scales [pages, 1, G] of a block as a row [1, pages * page_rows]; garbage where nothing was fetched.

    Pages lie on sublanes and their positions on lanes. Where several fill a register's lanes, each is repeated along
    them, keeps its own share, and the sublanes are summed.
    """
    pages, _, page_size = scales.shape
    scales = scales.reshape(pages, page_size)
    if page_size != page_rows:
        scales = jnp.pad(scales, ((0, 0), (0, page_rows - page_size)))
    share = max(1, LANES // page_rows)
    if share > 1:
        while scales.shape[1] < LANES:
            scales = jnp.concatenate([scales, scales], axis=1)
        page, lane = (lax.broadcasted_iota(jnp.int32, scales.shape, axis) for axis in (0, 1))
        own = (lane >> (page_rows.bit_length() - 1)) == (page & (share - 1))
        scales = jnp.where(own, scales, 0.0)
    rows = [jnp.sum(scales[at : at + share], axis=0, keepdims=True) for at in range(0, pages, share)]
    return jnp.concatenate(rows, axis=1)[:, : pages * page_rows]


def lane_sums(p: jax.Array) -> jax.Array:
    """The sum of each row, left as one partial sum per lane."""
    rows, columns = p.shape
    if columns % LANES:
        only_first = lax.broadcasted_iota(jnp.int32, (rows, LANES), 1) == 0
        return jnp.where(only_first, jnp.sum(p, axis=1, keepdims=True), 0.0)
    return functools.reduce(jnp.add, [p[:, at : at + LANES] for at in range(0, columns, LANES)])


def spread(row_values: jax.Array, width: int) -> jax.Array:
    """Values [rows, 128], the same in all lanes, widened to `width` without moving a lane."""
    return jnp.concatenate([row_values] * cdiv(width, LANES), axis=1)[:, :width]


def product(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """A product of matrices, summed in float32; at full precision for float32 operands."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def weighted_sum(weights: jax.Array, values: jax.Array, careful: bool) -> jax.Array:
    """Weights [rows, columns] in float32 times values [columns, D].

    For 16-bit values weights are rounded, or, `careful`, taken as the sum of their leading bits and the rest: twice
    the rows against the same values, which costs a matrix unit nothing where rows are few.
    """
    if values.dtype == jnp.float32 or not careful:
        return product(weights.astype(values.dtype), values, (1, 0))
    bits = lax.bitcast_convert_type(weights, jnp.int32) & TOP_HALF
    leading = lax.bitcast_convert_type(bits, jnp.float32)
    both = jnp.concatenate([leading, weights - leading], axis=0)
    mixed = product(both.astype(values.dtype), values, (1, 0))
    return mixed[: len(weights)] + mixed[len(weights) :]
