"""Functions that the kernels over heads-first pages [K, P, G, D] share: for plans, launches and blocks of pages.

A block is a run of a sequence's pages, fetched into one of two buffers in VMEM, [2, heads, pages, G, D]. The index of a
buffer, 0 or 1, is called a *slot*. The operands are K, V and, for quantised pages, their scales. Each page is fetched
by one asynchronous copy per operand, for all heads of a grid step together. Each operand has one semaphore per buffer.
While a block is processed, the next block is fetched, even if it belongs to another sequence, head or grid step.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ragged_attention.calls import dtype_name
from ragged_attention.errors import InvalidInput
from ragged_attention.kernels_pallas._blocks import (
    LANES,
    MASKED,
    NOWHERE,
    cannot_run,
    cdiv,
    compiler_params,
    in_powers_of_2,
    next_power_of_2,
    product,
    reset_softmax,
)

SUBLANES = 8
KEYS = 512  # keys per block, if they fit: 2 MiB of K and V with 8 heads of 128 in bfloat16
MAX_HEADS = 8  # maximum KV heads per step; `paged_attention` unrolls their code
MIN_COLUMNS = 128  # to fit in VMEM, blocks shrink to this many columns of logits before a step takes fewer heads
DEFAULT_LIMIT = 2**24  # bytes of VMEM that a kernel may use on any TPU without requesting a limit
BUDGET = DEFAULT_LIMIT * 3 // 4  # maximum bytes of VMEM for a launch's arrays; less if a low limit is requested
TOP_HALF = -(2**16)  # mask of the bits that a float32 and a bfloat16 have in common


@dataclasses.dataclass(frozen=True, slots=True)
class Operand:
    """An array of pages in HBM [K, P, ...], its two buffers in VMEM [2, heads, pages, ...] and their semaphores."""

    pages: Any
    buffer: Any
    semaphores: Any


class Refs(NamedTuple):
    """References to a kernel's memory, in the order in which Pallas passes them."""

    scalars: Any  # the `Scalars` of the kernel's module
    q: Any
    pages: list[Any]
    out: Any
    buffers: list[Any]
    m_i: Any
    l_i: Any
    acc: Any
    state: Any  # i32: the current slot, each slot's number of pages in flight, then any numbers that a kernel adds
    present: Any  # i32 [2, pages], 1 if the page at that offset of a slot is valid; None if not needed
    semaphores: Any

    @property
    def operands(self) -> list[Operand]:
        """K and V, then their scales if the pages are quantised."""
        pairs = enumerate(zip(self.pages, self.buffers, strict=True))
        return [Operand(pages, buffer, self.semaphores.at[i]) for i, (pages, buffer) in pairs]

    def begin(self) -> None:
        reset_softmax(self.m_i, self.l_i, self.acc, MASKED)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The static parameters that paged attention and prefill attention share."""

    scale: float
    soft_cap: float | None
    page_size: int
    page_rows: int  # rows per page of a loaded block, with padding
    pages_per_block: int
    heads: int  # KV heads per step
    head_steps: int  # grid steps for all KV heads of a core, `heads` at a time
    cores: int  # number of cores among which the batch or the heads are divided
    group: int
    quantized: bool

    @property
    def block(self) -> int:
        """Positions per block."""
        return self.pages_per_block * self.page_size

    @property
    def columns(self) -> int:
        """Rows of a loaded block, with padding; these are columns of the logits."""
        return self.pages_per_block * self.page_rows


def largest_plan(
    call: Any, make: Callable[..., Any], used_memory: Callable[[Any, Any], int], *, limit: int, cores: int,
    own_heads: int, pages: int, queries: int = 1, fewest_queries: int = 1,
) -> Any:  # fmt: skip
    """The plan with the most keys, heads and queries per step that fits in VMEM; if none fits, the smallest plan.

    `make(count, **fields)` makes a plan with `count` queries per block, from the fields of the base class. The count is
    at most `queries` and at least `fewest_queries`. `own_heads` is the number of KV heads per core. Users may request
    `pages` per block and a `limit` of VMEM in bytes; each is 0 if not requested.
    """
    page_rows, may_shrink = padded_page(call.page_size, call.quantized), not pages
    pages = pages or max(1, min(KEYS // page_rows, call.pages_per_seq))
    heads = most_heads(own_heads, MAX_HEADS)

    def plan() -> Any:
        return make(
            queries, scale=call.scale, soft_cap=None if call.soft_cap is None else float(call.soft_cap),
            page_size=call.page_size, page_rows=page_rows, pages_per_block=pages, heads=heads,
            head_steps=own_heads // heads, cores=cores, group=call.group, quantized=call.quantized,
        )  # fmt: skip

    while used_memory(plan(), call) > (min(BUDGET, limit * 3 // 4) if limit else BUDGET):
        if may_shrink and pages > 1 and pages * page_rows > MIN_COLUMNS:
            pages //= 2
        elif heads > 1:
            heads = most_heads(own_heads, heads - 1)
        elif queries > fewest_queries:
            queries //= 2
        elif may_shrink and pages > 1:
            pages //= 2
        else:
            break
    return plan()


def most_heads(own_heads: int, most: int) -> int:
    """The largest divisor of `own_heads` that is at most `most`."""
    return max(count for count in range(1, most + 1) if own_heads % count == 0)


def operands_of(call: Any) -> list[jax.Array]:
    """K and V, then their scales if pages are quantised. Scales become [K, P, 1, G], one row of lanes for each page."""
    scales = [array.reshape(*array.shape[:2], 1, call.page_size) for array in call.scales if array is not None]
    return [*call.arrays, *scales]


def launch(
    kernel: Callable[[Refs, Any], None], plan: Any, call: Any, scalars: Any, q: jax.Array, operands: list[jax.Array], *,
    grid: tuple[int, ...], block: tuple[int, ...], index_map: Callable[..., tuple[Any, ...]], state: int,
    with_present: bool, vmem_limit_bytes: int | None, name: str,
) -> jax.Array:  # fmt: skip
    """Launch a kernel, whose result has the shape and blocks of `q`. The grid's first dimension counts the cores.

    `state` is the number of integers in `Refs.state`, and `with_present` tells whether the kernel has `Refs.present`.
    """
    block_spec = pl.BlockSpec(block, index_map)
    return pl.pallas_call(
        lambda *refs: kernel(Refs(*refs), plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=[block_spec, [pl.BlockSpec(memory_space=pl.ANY) for _ in operands]],
            out_specs=block_spec,
            scratch_shapes=[
                *scratch_of(call, plan),
                pltpu.SMEM((state,), jnp.int32),
                pltpu.SMEM((2, plan.pages_per_block), jnp.int32) if with_present else None,
                pltpu.SemaphoreType.DMA((len(operands), 2)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=compiler_params(vmem_limit_bytes, "parallel", *["arbitrary"] * (len(grid) - 1)),
        name=name,
    )(scalars, q, operands)


def scratch_of(call: Any, plan: Any) -> list[Any]:
    """The arrays that a launch keeps in VMEM: the operands' buffers, and m_i, l_i and acc of each tile."""
    shape = (2, plan.heads, plan.pages_per_block)
    scales = [pltpu.VMEM((*shape, 1, call.page_size), jnp.float32)] * (2 * call.quantized)
    pages = [pltpu.VMEM((*shape, call.page_size, call.head_dim), jnp.dtype(call.cache_dtype))] * 2
    states = [pltpu.VMEM((plan.tiles, plan.rows, width), jnp.float32) for width in (LANES, LANES, call.head_dim)]
    return [pages + scales, *states]


def refusal(call: Any, fits: bool, rows: int) -> str | None:
    """Why the kernels over heads-first pages do not take a call, or None.

    `fits` says whether the smallest launch fits in VMEM. Scalar memory must hold `rows` rows of the page table.
    """
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
    """Bytes of scalar memory per sequence, for its page indices, its length and the index of the next sequence."""
    return 4 * (call.pages_per_seq + 2)


def table_bytes(call: Any) -> int:
    """Bytes of scalar memory for all sequences of a launch."""
    return call.device.scalar_memory * 3 // 4


def expect_block(call: Any, name: str, pages: int, used: int) -> None:
    """Check that a launch of `used` bytes fits in VMEM, if `pages` per block were requested (else `pages` is 0)."""
    if pages and used > (most := call.device.shared_memory):
        raise InvalidInput(f"expected {name} to fit in {most} bytes of vector memory, got {pages}, which take {used}")


def vmem_limit(call: Any, asked: int, used: int) -> int | None:
    """The VMEM limit for the compiler: the requested limit, or a higher limit than the default if needed, or None."""
    needed = used * 3 // 2 + 2**22
    return asked or (min(needed, call.device.shared_memory) if needed > DEFAULT_LIMIT else None)


def fetch(
    table: Any, start: Any, offsets: tuple[Any, Any], heads: Any, slot: Any, operands: Sequence[Operand],
    present: Any = None,
) -> Any:  # fmt: skip
    """Start fetching the valid pages at offsets from `offsets[0]` to `offsets[1] - 1` of a block. Returns their number.

    Offset i has the page index `table[start + i]`, which is valid in [0, P). If `present` [2, pages] is given, it gets
    a flag for each page, and a page is copied to its own offset. Otherwise, valid pages are copied to offsets 0, 1 and
    so on, without gaps.
    """
    num_pages = operands[0].pages.shape[1]

    def step(offset: Any, count: Any) -> Any:
        page = table[start + offset]
        valid = (page >= 0) & (page < num_pages)
        if present is not None:
            present[slot, offset] = valid.astype(jnp.int32)

        @pl.when(valid)
        def _() -> None:
            for operand in operands:
                pltpu.make_async_copy(
                    operand.pages.at[heads, page],
                    operand.buffer.at[slot, :, count if present is None else offset],
                    operand.semaphores.at[slot],
                ).start()

        return count + valid.astype(jnp.int32)

    return lax.fori_loop(*offsets, step, jnp.int32(0))


def wait(count: Any, slot: Any, operands: Sequence[Operand]) -> None:
    """Wait for `count` pages of each operand, whichever pages they are: a semaphore only counts bytes."""

    def arrived(_: Any, size: int) -> None:
        for operand in operands:
            pages = operand.buffer.at[slot, :, pl.ds(0, size)]
            pltpu.make_async_copy(pages, pages, operand.semaphores.at[slot]).wait()

    in_powers_of_2(count, operands[0].buffer.shape[2], arrived)


def padded_page(page_size: int, scaled: bool) -> int:
    """Rows per page of a loaded block: a multiple of 8 (of 128 if `scaled`), or a power of two, at least 8."""
    if page_size % (LANES if scaled else SUBLANES) == 0:
        return page_size
    return max(SUBLANES, next_power_of_2(page_size))


def block_rows(pages: jax.Array, page_rows: int, dtype: Any) -> jax.Array:
    """The pages [pages, G, D] of a block as rows [pages * page_rows, D] of `dtype`, with zeros as padding."""
    count, page_size, width = pages.shape
    if page_size != page_rows or page_rows % (SUBLANES * 4 // jnp.dtype(dtype).itemsize):
        pages = pages.astype(jnp.float32)  # in float32, no rows share words, so pages of 8 rows can be joined
    elif pages.dtype != dtype:
        pages = pages.astype(dtype)
    if page_size != page_rows:
        pages = jnp.pad(pages, ((0, 0), (0, page_rows - page_size), (0, 0)))
    return pages.reshape(count * page_rows, width).astype(dtype)


def positions(columns: int, page_size: int, page_rows: int) -> jax.Array:
    """For each column of the logits, the offset of its key in the block, [1, columns]; NOWHERE for padding."""
    column = lax.broadcasted_iota(jnp.int32, (1, columns), 1)
    if page_size == page_rows:
        return column
    page, offset = column >> (page_rows.bit_length() - 1), column & (page_rows - 1)
    return jnp.where(offset < page_size, page * page_size + offset, NOWHERE)


def scale_row(scales: jax.Array, page_rows: int) -> jax.Array:
    """The scales [pages, 1, G] of a block as a row [1, pages * page_rows]. Pages not fetched get garbage.

    Pages are on sublanes and their positions on lanes. If the scales of several pages fit in the lanes of a register,
    each page's scales are repeated along the lanes and masked to the page's own lanes, and the sublanes are summed.
    """
    pages, _, page_size = scales.shape
    scales = scales.reshape(pages, page_size)
    if page_size != page_rows:
        scales = jnp.pad(scales, ((0, 0), (0, page_rows - page_size)))
    together = max(1, LANES // page_rows)
    if together > 1:
        while scales.shape[1] < LANES:
            scales = jnp.concatenate([scales, scales], axis=1)
        page, lane = (lax.broadcasted_iota(jnp.int32, scales.shape, axis) for axis in (0, 1))
        is_own = (lane >> (page_rows.bit_length() - 1)) == (page & (together - 1))
        scales = jnp.where(is_own, scales, 0.0)
    rows = [jnp.sum(scales[at : at + together], axis=0, keepdims=True) for at in range(0, pages, together)]
    return jnp.concatenate(rows, axis=1)[:, : pages * page_rows]


def lane_sums(p: jax.Array) -> jax.Array:
    """The sum of each row as 128 partial sums, one per lane, [rows, 128]."""
    rows, columns = p.shape
    if columns % LANES:
        only_first = lax.broadcasted_iota(jnp.int32, (rows, LANES), 1) == 0
        return jnp.where(only_first, jnp.sum(p, axis=1, keepdims=True), 0.0)
    return functools.reduce(jnp.add, [p[:, at : at + LANES] for at in range(0, columns, LANES)])


def spread(row_values: jax.Array, width: int) -> jax.Array:
    """Values [rows, 128] that are equal in all lanes, widened to `width` without moving data between lanes."""
    return jnp.concatenate([row_values] * cdiv(width, LANES), axis=1)[:, :width]


def update_softmax(s: jax.Array, m_i: Any, l_i: Any, index: Any) -> tuple[jax.Array, jax.Array]:
    """Update the online softmax of a tile. Returns the weights and alpha, by which the accumulator is multiplied."""
    before = m_i[index]
    after = jnp.maximum(before, jnp.max(s, axis=1, keepdims=True))
    p = jnp.exp(s - spread(after, s.shape[1]))
    alpha = jnp.exp(before - after)
    m_i[index] = after
    l_i[index] = l_i[index] * alpha + lane_sums(p)
    return p, alpha


def weighted_sum(weights: jax.Array, values: jax.Array, split_weights: bool) -> jax.Array:
    """The product of weights [rows, columns] in float32 and values [columns, D].

    If values are bfloat16, weights are rounded to bfloat16. With `split_weights`, each weight becomes two terms: its
    leading bits and the rounded remainder. This doubles the rows, which costs no time if there are few rows.
    """
    if values.dtype == jnp.float32 or not split_weights:
        return product(weights.astype(values.dtype), values)
    bits = lax.bitcast_convert_type(weights, jnp.int32) & TOP_HALF
    leading = lax.bitcast_convert_type(bits, jnp.float32)
    both = jnp.concatenate([leading, weights - leading], axis=0)
    mixed = product(both.astype(values.dtype), values)
    return mixed[: len(weights)] + mixed[len(weights) :]
