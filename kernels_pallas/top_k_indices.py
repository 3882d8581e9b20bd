"""The columns of the largest logits of each row on TPUs. First find the smallest selected logit, then list columns.

Logits become int32 *keys* in the same order. A row stays in VMEM. Bisection over the 32 bits of a key, with one count
over the row per bit, finds the smallest selected key. If more columns have this key than are needed, the last of these
columns are selected. Bisection over the bits of a column's index finds the first selected one.

A TPU has no scatter, so each entry of the result looks up its column instead. A row is divided into *lines* of 128
columns. Prefix sums of the number of selected columns per line determine the line with an entry's column. A product
with a one-hot matrix fetches the selection of this line, and a product with a triangle of ones counts selected columns
along the line. So the columns of a result are in ascending order.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ragged_attention.calls import TopKIndices
from ragged_attention.kernels_pallas._blocks import (
    LANES,
    LARGEST_INT,
    cannot_run,
    cdiv,
    expect_sizes,
    product,
    round_up,
)

FEATURES = frozenset({"starts", "stops"})
MAX_LINES = 128  # maximum lines processed together
MAX_ENTRIES = 512  # maximum entries of the result processed together
ROWS = 8
ROW_BYTES = 2 << 20  # maximum size of the logits in a block of several rows in VMEM; their keys take as much
MAX_COLUMNS = 2**20
NOT_SELECTED = -(2**31)  # below the key of any logit


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The tunable parameters.

    Args:
        num_rows_per_block: rows of logits searched together.
        vmem_limit_bytes: bytes of VMEM that the compiler may use; 0 is its default.
    """

    num_rows_per_block: int = ROWS
    vmem_limit_bytes: int = 0

    def __post_init__(self) -> None:
        expect_sizes(self, num_rows_per_block=(1, 64), vmem_limit_bytes=(0, LARGEST_INT))


def why_not(call: TopKIndices) -> str | None:
    return cannot_run(call) or too_wide(call.columns)


def too_wide(columns: int) -> str | None:
    """Why rows of logits do not fit, or None."""
    if columns > MAX_COLUMNS:
        return f"keeps a row of logits in vector memory, takes at most {MAX_COLUMNS} columns, got {columns}"
    return None


def heuristic(call: Any) -> Tile:
    return Tile(num_rows_per_block=rows_that_fit(call.num_tokens, call.columns))


def rows_that_fit(num_rows: int, columns: int) -> int:
    return max(1, min(ROWS, num_rows, ROW_BYTES // (4 * max(columns, 1))))


def run(call: TopKIndices, tile: Tile, launch: Any) -> Any:
    """Columns [T, top_k]."""
    columns, shape = call.columns, (call.num_tokens,)
    starts = jnp.zeros(shape, jnp.int32) if call.starts is None else jnp.clip(call.starts, 0, columns)
    stops = jnp.full(shape, columns, jnp.int32) if call.stops is None else jnp.clip(call.stops, 0, columns)
    return largest(call.logits, call.top_k, starts, stops, tile)


def largest(logits: Any, top_k: int, starts: Any, stops: Any, tile: Tile) -> Any:
    """The columns i32 [R, top_k] of the largest logits [R, n] among columns `starts` to `stops - 1` of each row."""
    num_rows, columns = logits.shape
    if 0 in (num_rows, columns):
        return jnp.full((num_rows, top_k), -1, jnp.int32)
    plan = _plan(columns, top_k, min(tile.num_rows_per_block, num_rows))
    spare = -num_rows % plan.rows
    logits = jnp.pad(logits, ((0, spare), (0, plan.lines * LANES - columns))).reshape(-1, plan.lines, LANES)
    edges = jnp.pad(jnp.stack([starts, stops], axis=-1), ((0, spare), (0, LANES - 2)))[:, None]
    blocks = len(logits) // plan.rows
    selected = pl.pallas_call(
        functools.partial(_kernel, plan),
        grid=(blocks,),
        in_specs=[
            pl.BlockSpec((plan.rows, 1, LANES), lambda i: (i, 0, 0)),
            pl.BlockSpec((plan.rows, plan.lines, LANES), lambda i: (i, 0, 0)),
        ],
        out_specs=pl.BlockSpec((plan.rows, plan.groups, plan.entries), lambda i: (i, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((len(logits), plan.groups, plan.entries), jnp.int32),
        scratch_shapes=[
            pltpu.VMEM((plan.rows, plan.lines, LANES), jnp.int32),
            pltpu.VMEM((plan.rows, 8, LANES), jnp.int32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=tile.vmem_limit_bytes or None
        ),
        name="top_k_indices",
    )(edges, logits)
    return selected.reshape(len(logits), -1)[:num_rows, :top_k]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The static parameters of the kernel."""

    top_k: int
    rows: int  # rows per block
    lines: int  # lines per row
    together: int  # lines processed together: a block of lines
    groups: int  # groups of entries of the result
    entries: int  # entries per group


def _plan(columns: int, top_k: int, rows: int) -> Plan:
    lines = cdiv(columns, LANES)
    together = min(MAX_LINES, round_up(lines, 16))
    entries = min(MAX_ENTRIES, round_up(top_k, LANES))
    return Plan(
        top_k=top_k,
        rows=rows,
        lines=round_up(lines, together),
        together=together,
        groups=cdiv(top_k, entries),
        entries=entries,
    )


# ---- the kernel


def _kernel(plan: Plan, edges: Any, logits: Any, out: Any, keys: Any, limits: Any) -> None:
    """Compute the keys of a block of rows, the limits of their selection, and their selected columns."""
    starts, stops = edges[:, :, :1], edges[:, :, 1:2]
    used = cdiv(jnp.max(stops), plan.together * LANES)
    lax.fori_loop(0, used, functools.partial(_store_keys, plan, logits, keys, starts, stops), None)

    count = functools.partial(_count, plan, keys, used)
    least = _least_selected(plan, count)
    wanted = plan.top_k - count(lambda key, column: key > least)
    first = _first_of_equals(plan, count, least, wanted)
    sublane = lax.broadcasted_iota(jnp.int32, limits.shape, 1)
    limits[...] = jnp.where(sublane == 0, least, first)
    out[...] = jnp.full(out.shape, -1, jnp.int32)
    lax.fori_loop(0, plan.rows, functools.partial(_list_columns, plan, out, keys, limits, used), None)


def _lines(plan: Plan, block: Any) -> Any:
    """The `pl.ds` that selects a block's lines."""
    return pl.ds(pl.multiple_of(block * plan.together, plan.together), plan.together)


def _columns(plan: Plan, block: Any, leading: tuple[int, ...] = ()) -> Any:
    """The indices of the columns in a block of lines, i32 [*leading, lines, LANES]."""
    shape = (*leading, plan.together, LANES)
    line, lane = (lax.broadcasted_iota(jnp.int32, shape, len(leading) + axis) for axis in range(2))
    return (block * plan.together + line) * LANES + lane


def _store_keys(plan: Plan, logits: Any, keys: Any, starts: Any, stops: Any, block: Any, carry: None) -> None:
    """Store int32 keys in the order of the logits; NOT_SELECTED for NaN, -inf and columns outside [starts, stops)."""
    lines, column = _lines(plan, block), _columns(plan, block, (1,))
    logit = logits[:, lines, :]
    selectable = (logit > -jnp.inf) & (column >= starts) & (column < stops)
    bits = lax.bitcast_convert_type(jnp.where(logit == 0, 0.0, logit), jnp.int32)  # -0.0 equals 0.0
    keys[:, lines, :] = jnp.where(selectable, bits ^ ((bits >> 31) & LARGEST_INT), NOT_SELECTED)


def _count(plan: Plan, keys: Any, used: Any, holds: Any) -> Any:
    """For each row, the exact number of columns for which `holds(key, column)` is true, f32 [rows, 1, 1]."""

    def add(block: Any, total: Any) -> Any:
        counted = holds(keys[:, _lines(plan, block), :], _columns(plan, block, (1,)))
        return total + jnp.where(counted, 1.0, 0.0).reshape(plan.rows, -1, 8, LANES).sum(axis=1)

    total = lax.fori_loop(0, used, add, jnp.zeros((plan.rows, 8, LANES), jnp.float32))
    return total.sum(axis=1, keepdims=True).sum(axis=2, keepdims=True)


def _least_selected(plan: Plan, count: Any) -> Any:
    """The smallest selected key of each row; NOT_SELECTED if the row has fewer than `top_k` columns to select."""

    def halve(bit: Any, least: Any) -> Any:
        candidate = least + lax.shift_left(jnp.int32(1), 31 - bit)  # for the sign bit, the sum wraps around to 0
        enough = count(lambda key, column: key >= candidate) >= plan.top_k
        return jnp.where(enough, candidate, least)

    return lax.fori_loop(0, 32, halve, jnp.full((plan.rows, 1, 1), NOT_SELECTED, jnp.int32))


def _first_of_equals(plan: Plan, count: Any, least: Any, wanted: Any) -> Any:
    """The first column whose key, equal to `least`, is among the last `wanted` such keys of a row, i32 [rows, 1, 1]."""
    bits = (plan.lines * LANES - 1).bit_length()
    equal = count(lambda key, column: (key == least) & (key > NOT_SELECTED))

    def halve(bit: Any, first: Any) -> Any:
        candidate = first + lax.shift_left(jnp.int32(1), bits - 1 - bit)
        remaining = count(lambda key, column: (key == least) & (column >= candidate))
        return jnp.where(remaining >= wanted, candidate, first)

    rounds = jnp.where(jnp.max(equal - wanted) > 0, bits, 0)
    return lax.fori_loop(0, rounds, halve, jnp.zeros((plan.rows, 1, 1), jnp.int32))


def _list_columns(plan: Plan, out: Any, keys: Any, limits: Any, used: Any, row: Any, carry: None) -> None:
    """Store the selected columns of a row in ascending order."""
    least, first = limits[row, :1, :1], limits[row, 1:2, :1]

    def list_block(block: Any, base: Any) -> Any:
        key = keys[row, _lines(plan, block), :]
        equal = (key == least) & (_columns(plan, block) >= first)
        selected = jnp.where(((key > least) | equal) & (key > NOT_SELECTED), 1.0, 0.0)
        counts = selected.sum(axis=1, keepdims=True)
        before = base + _product(_triangle(plan.together, strict=True), selected).sum(axis=1, keepdims=True)
        total = jnp.sum(counts)

        def write(group: Any, carry: None) -> None:
            start = group * plan.entries

            @pl.when((base < start + plan.entries) & (base + total > start))
            def _() -> None:
                target = pl.ds(group, 1)
                column = _columns_of_entries(plan, selected, before, counts, start.astype(jnp.float32))
                shifted = column + block * plan.together * LANES
                out[row, target, :] = jnp.where(column >= 0, shifted, out[row, target, :])

        lax.fori_loop(0, plan.groups, write, None)
        return base + total

    lax.fori_loop(0, used, list_block, jnp.float32(0))


def _columns_of_entries(plan: Plan, selected: Any, before: Any, counts: Any, start: Any) -> Any:
    """The column of each entry of a group, relative to the block, i32 [1, entries]; -1 if it is not in the block.

    `selected` [lines, LANES] is 1 or 0. `counts` [lines, 1] has the number of selected columns of each line, and
    `before` [lines, 1] that of all earlier lines of the row together.
    """
    entry = start + lax.broadcasted_iota(jnp.int32, (1, plan.entries), 1).astype(jnp.float32)
    in_line = jnp.where((before <= entry) & (entry < before + counts), 1.0, 0.0)  # [lines, entries]
    line = lax.broadcasted_iota(jnp.int32, in_line.shape, 0).astype(jnp.float32)
    fetched = _product(selected, in_line, contracted=0)  # [LANES, entries]
    rank = _product(_triangle(LANES, strict=False), fetched)
    base = (in_line * before).sum(axis=0, keepdims=True)
    lane = lax.broadcasted_iota(jnp.int32, fetched.shape, 0).astype(jnp.float32)
    lane = jnp.where((fetched > 0) & (rank == entry - base + 1), lane, 0.0).sum(axis=0, keepdims=True)
    column = (in_line * line).sum(axis=0, keepdims=True) * LANES + lane
    return jnp.where(in_line.sum(axis=0, keepdims=True) > 0, column, -1.0).astype(jnp.int32)


def _triangle(size: int, *, strict: bool) -> Any:
    """The matrix m [size, size] for which row i of m @ x is the sum of x's rows up to i, or before i if `strict`."""
    row, column = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in range(2))
    return jnp.where(column < row if strict else column <= row, 1.0, 0.0)


def _product(left: Any, right: Any, contracted: int = 1) -> Any:
    """An exact matrix product of integers up to 256, which bfloat16 holds."""
    return product(left.astype(jnp.bfloat16), right.astype(jnp.bfloat16), contracted)
