"""The columns of the largest logits of each row, on TPUs: bisection for the smallest that is chosen, then their places.

Logits become int32 numbers in the same order. A row stays in vector memory, and 32 counts of it, one for each bit, give
the number that the last chosen one has. Of those that are equal to it the ones behind are chosen: as many counts as a
column has bits give where these begin, if there are more than are wanted.

A TPU has no scatter. So places in the result look for their columns instead. Columns lie 128 to a *line*. Sums of what
is chosen, of all lines before each one, say in which line a place has its column; a product with the matrix that has a
1 there fetches that line's choice, another one with a triangle of ones numbers it. The results ascend by themselves.
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
from ragged_attention.kernels_pallas._blocks import LANES, cannot_run, cdiv, expect_sizes, round_up

FEATURES = frozenset({"starts", "stops"})
MOST_LINES = 128  # that are looked at together
MOST_PLACES = 512
ROWS = 8
ROW_BYTES = 2 << 20  # of the logits that are in vector memory at once; as much again of each other copy of them
MOST_COLUMNS = 2**20
NOT_CHOSEN = -(2**31)  # below what any logit becomes
LARGEST_INT = 2**31 - 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """What may be tuned.

    Args:
        num_rows_per_block: rows that are searched together.
        vmem_limit_bytes: vector memory that the compiler may use, 0 for its default.
    """

    num_rows_per_block: int = ROWS
    vmem_limit_bytes: int = 0

    def __post_init__(self) -> None:
        expect_sizes(self, num_rows_per_block=(1, 64), vmem_limit_bytes=(0, LARGEST_INT))


def why_not(call: TopKIndices) -> str | None:
    return cannot_run(call) or too_wide(call.columns)


def too_wide(columns: int) -> str | None:
    """Why rows of logits do not fit, or None."""
    if columns > MOST_COLUMNS:
        return f"keeps a row of logits in vector memory, takes at most {MOST_COLUMNS} columns, got {columns}"
    return None


def heuristic(call: Any) -> Tile:
    return Tile(num_rows_per_block=rows_that_fit(call.num_tokens, call.columns))


def rows_that_fit(num_rows: int, columns: int) -> int:
    return max(1, min(ROWS, num_rows, ROW_BYTES // (4 * max(columns, 1))))


def run(call: TopKIndices, tile: Tile, launch: Any) -> Any:
    """Columns [T, top_k]."""
    del launch  # pallas_call launches
    columns, shape = call.columns, (call.num_tokens,)
    starts = jnp.zeros(shape, jnp.int32) if call.starts is None else jnp.clip(call.starts, 0, columns)
    stops = jnp.full(shape, columns, jnp.int32) if call.stops is None else jnp.clip(call.stops, 0, columns)
    return largest(call.logits, call.top_k, starts, stops, tile)


def largest(logits: Any, top_k: int, starts: Any, stops: Any, tile: Tile) -> Any:
    """The columns i32 [R, top_k] of the largest logits [R, n] among those from `starts` on, before `stops`."""
    num_rows, columns = logits.shape
    if 0 in (num_rows, columns):
        return jnp.full((num_rows, top_k), -1, jnp.int32)
    plan = _plan(columns, top_k, min(tile.num_rows_per_block, num_rows))
    spare = -num_rows % plan.rows
    logits = jnp.pad(logits, ((0, spare), (0, plan.lines * LANES - columns))).reshape(-1, plan.lines, LANES)
    edges = jnp.pad(jnp.stack([starts, stops], axis=-1), ((0, spare), (0, LANES - 2)))[:, None]
    blocks = len(logits) // plan.rows
    chosen = pl.pallas_call(
        functools.partial(_kernel, plan),
        grid=(blocks,),
        in_specs=[
            pl.BlockSpec((plan.rows, 1, LANES), lambda i: (i, 0, 0)),
            pl.BlockSpec((plan.rows, plan.lines, LANES), lambda i: (i, 0, 0)),
        ],
        out_specs=pl.BlockSpec((plan.rows, plan.groups, plan.places), lambda i: (i, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((len(logits), plan.groups, plan.places), jnp.int32),
        scratch_shapes=[
            pltpu.VMEM((plan.rows, plan.lines, LANES), jnp.int32),
            pltpu.VMEM((plan.rows, 8, LANES), jnp.int32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=tile.vmem_limit_bytes or None
        ),
        name="top_k_indices",
    )(edges, logits)
    return chosen.reshape(len(logits), -1)[:num_rows, :top_k]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the kernel is specialised to."""

    top_k: int
    rows: int
    lines: int  # of a row
    together: int  # lines that are looked at together
    groups: int  # of places
    places: int  # of a group


def _plan(columns: int, top_k: int, rows: int) -> Plan:
    lines = cdiv(columns, LANES)
    together = min(MOST_LINES, round_up(lines, 16))
    places = min(MOST_PLACES, round_up(top_k, LANES))
    return Plan(
        top_k=top_k,
        rows=rows,
        lines=round_up(lines, together),
        together=together,
        groups=cdiv(top_k, places),
        places=places,
    )


# ---- the kernel


def _kernel(plan: Plan, edges: Any, logits: Any, out: Any, numbers: Any, found: Any) -> None:
    """Some rows: their logits as numbers, what is chosen of them, where that is."""
    starts, stops = edges[:, :, :1], edges[:, :, 1:2]
    used = cdiv(jnp.max(stops), plan.together * LANES)
    lax.fori_loop(0, used, functools.partial(_number, plan, logits, numbers, starts, stops), None)

    def count(counts: Any) -> Any:
        return _count(plan, numbers, used, counts)

    least = _least_chosen(plan, count)
    above = count(lambda number, column: number > least)
    wanted = plan.top_k - above
    first = _first_of_equals(plan, count, least, wanted)
    sublane = lax.broadcasted_iota(jnp.int32, found.shape, 1)
    found[...] = jnp.where(sublane == 0, least, first)
    out[...] = jnp.full(out.shape, -1, jnp.int32)
    lax.fori_loop(0, plan.rows, functools.partial(_place_row, plan, out, numbers, found, used), None)


def _lines(plan: Plan, block: Any) -> Any:
    """The lines of a block."""
    return pl.ds(pl.multiple_of(block * plan.together, plan.together), plan.together)


def _columns(plan: Plan, block: Any, leading: tuple[int, ...] = ()) -> Any:
    """The columns of a block of lines, i32 [*leading, lines, LANES]."""
    shape = (*leading, plan.together, LANES)
    line, lane = (lax.broadcasted_iota(jnp.int32, shape, len(leading) + axis) for axis in range(2))
    return (block * plan.together + line) * LANES + lane


def _number(plan: Plan, logits: Any, numbers: Any, starts: Any, stops: Any, block: Any, carry: None) -> None:
    """int32 numbers in the order of the logits, in which -0.0 is 0.0; NaN and what does not count are below all."""
    lines, column = _lines(plan, block), _columns(plan, block, (1,))
    logit = logits[:, lines, :]
    counts = (logit > -jnp.inf) & (column >= starts) & (column < stops)
    bits = lax.bitcast_convert_type(jnp.where(logit == 0, 0.0, logit), jnp.int32)
    numbers[:, lines, :] = jnp.where(counts, bits ^ ((bits >> 31) & LARGEST_INT), NOT_CHOSEN)


def _count(plan: Plan, numbers: Any, used: Any, counts: Any) -> Any:
    """How many of each row `counts(number, column)`, f32 [rows, 1, 1], exactly."""

    def add(block: Any, total: Any) -> Any:
        some = counts(numbers[:, _lines(plan, block), :], _columns(plan, block, (1,)))
        return total + jnp.where(some, 1.0, 0.0).reshape(plan.rows, -1, 8, LANES).sum(axis=1)

    total = lax.fori_loop(0, used, add, jnp.zeros((plan.rows, 8, LANES), jnp.float32))
    return total.sum(axis=1, keepdims=True).sum(axis=2, keepdims=True)


def _least_chosen(plan: Plan, count: Any) -> Any:
    """The number of the last chosen one of each row; NOT_CHOSEN where fewer count than are wanted."""

    def halve(bit: Any, least: Any) -> Any:
        candidate = least + lax.shift_left(jnp.int32(1), 31 - bit)  # for the sign the sum wraps around, to 0
        enough = count(lambda number, column: number >= candidate) >= plan.top_k
        return jnp.where(enough, candidate, least)

    return lax.fori_loop(0, 32, halve, jnp.full((plan.rows, 1, 1), NOT_CHOSEN, jnp.int32))


def _first_of_equals(plan: Plan, count: Any, least: Any, wanted: Any) -> Any:
    """The column from which on numbers equal to `least` are chosen, i32 [rows, 1, 1]: so that `wanted` are."""
    bits = (plan.lines * LANES - 1).bit_length()
    equal = count(lambda number, column: (number == least) & (number > NOT_CHOSEN))

    def halve(bit: Any, first: Any) -> Any:
        candidate = first + lax.shift_left(jnp.int32(1), bits - 1 - bit)
        behind = count(lambda number, column: (number == least) & (column >= candidate))
        return jnp.where(behind >= wanted, candidate, first)

    rounds = jnp.where(jnp.max(equal - wanted) > 0, bits, 0)
    return lax.fori_loop(0, rounds, halve, jnp.zeros((plan.rows, 1, 1), jnp.int32))


def _place_row(plan: Plan, out: Any, numbers: Any, found: Any, used: Any, row: Any, carry: None) -> None:
    """Write the chosen columns of a row in ascending order."""
    least, first = found[row, :1, :1], found[row, 1:2, :1]

    def place(block: Any, base: Any) -> Any:
        number = numbers[row, _lines(plan, block), :]
        equal = (number == least) & (_columns(plan, block) >= first)
        chosen = jnp.where(((number > least) | equal) & (number > NOT_CHOSEN), 1.0, 0.0)
        counts = chosen.sum(axis=1, keepdims=True)
        before = base + _product(_triangle(plan.together, strict=True), chosen).sum(axis=1, keepdims=True)
        total = jnp.sum(counts)

        def into(group: Any, carry: None) -> None:
            start = group * plan.places

            @pl.when((base < start + plan.places) & (base + total > start))
            def _() -> None:
                here = pl.ds(group, 1)
                column = _columns_of_places(plan, chosen, before, counts, start.astype(jnp.float32))
                shifted = column + block * plan.together * LANES
                out[row, here, :] = jnp.where(column >= 0, shifted, out[row, here, :])

        lax.fori_loop(0, plan.groups, into, None)
        return base + total

    lax.fori_loop(0, used, place, jnp.float32(0))


def _columns_of_places(plan: Plan, chosen: Any, before: Any, counts: Any, start: Any) -> Any:
    """In which column of a block each place of a group has its choice, i32 [1, places]; -1 for none.

    `chosen` [lines, LANES] is 1 or 0; `before` [lines, 1] are the choices before each line, `counts` those in it.
    """
    place = start + lax.broadcasted_iota(jnp.int32, (1, plan.places), 1).astype(jnp.float32)
    own = jnp.where((before <= place) & (place < before + counts), 1.0, 0.0)  # [lines, places]
    line = lax.broadcasted_iota(jnp.int32, own.shape, 0).astype(jnp.float32)
    fetched = _product(chosen, own, contracted=0)  # [LANES, places]
    rank = _product(_triangle(LANES, strict=False), fetched)
    base = (own * before).sum(axis=0, keepdims=True)
    lane = lax.broadcasted_iota(jnp.int32, fetched.shape, 0).astype(jnp.float32)
    lane = jnp.where((fetched > 0) & (rank == place - base + 1), lane, 0.0).sum(axis=0, keepdims=True)
    column = (own * line).sum(axis=0, keepdims=True) * LANES + lane
    return jnp.where(own.sum(axis=0, keepdims=True) > 0, column, -1.0).astype(jnp.int32)


def _triangle(size: int, *, strict: bool) -> Any:
    """Sums over rows as a matrix [size, size]: all before a row if strict, else it too."""
    row, column = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in range(2))
    return jnp.where(column < row if strict else column <= row, 1.0, 0.0)


def _product(one: Any, other: Any, contracted: int = 1) -> Any:
    """The product of matrices of whole numbers up to 256, which bfloat16 holds; their sums are exact."""
    return lax.dot_general(
        one.astype(jnp.bfloat16),
        other.astype(jnp.bfloat16),
        (((contracted,), (0,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
