"""The soft cap of logits, and their biases by position: ALiBi slopes, and tables of a relative bias.

A table has one entry for each distance, which is the query's position minus the key's. Its first and last entries also
serve all distances beyond them. Biases are added to logits in base 2, before masks. A row that does not exist has a
bias of 0.
"""

import dataclasses
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ragged_attention.kernels_triton._constants import Constants
from ragged_attention.kernels_triton._softmax import LOG2E, soft_capped


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Bias(Constants):
    """The form of a relative bias [tokens, heads, WIDTH], or [heads, WIDTH] if all queries share the tables."""

    WIDTH: int  # 0 without a relative bias
    AT_OWN: int  # the column of distance 0, a query's own position
    TOKEN_STRIDE: int  # 0 if all queries share the tables


class Table(NamedTuple):
    """The tables of a block of rows."""

    rows: tl.tensor  # the address of each row's table
    exists: tl.tensor  # whether each row exists


def is_biased(call: Any) -> bool:
    """Whether the call adds ALiBi slopes or a relative bias to logits."""
    return call.alibi_slopes is not None or call.relative_bias is not None


def bias_arguments(call: Any, launch: Any, absent: Any) -> tuple[Any, Bias]:
    """(the relative bias, its `Bias`) of a call. Without a relative bias, the array is the stand-in `absent`."""
    if call.relative_bias is None:
        return absent, Bias(WIDTH=0, AT_OWN=0, TOKEN_STRIDE=0)
    bias = launch.contiguous(call.relative_bias)
    stride = bias.shape[1] * bias.shape[2] if len(bias.shape) == 3 else 0
    return bias, Bias(WIDTH=bias.shape[-1], AT_OWN=call.bias_at_own, TOKEN_STRIDE=stride)


@triton.jit
def load_slopes(slopes_ptr, rows, GROUP: tl.constexpr):
    """The ALiBi slope of each row, in base 2; 0 for rows that do not exist."""
    head = rows.kv_head * GROUP + rows.row % GROUP
    return tl.load(slopes_ptr + head, mask=rows.row < rows.num_rows, other=0.0) * LOG2E


@triton.jit
def sloped(logits, slope, position, keys, near):
    """Logits [rows, keys] plus their ALiBi biases.

    Positions are counted from `near`, one of the rows' positions, so that float32 holds their differences exactly.
    """
    position = (position - near).to(tl.float32)
    keys = (keys - near).to(tl.float32)
    return logits + slope[:, None] * (keys[None, :] - position[:, None])


@triton.jit
def table_of(bias_ptr, rows, BIAS: tl.constexpr, GROUP: tl.constexpr):
    """The `Table` of a block of rows, given the address of the whole array."""
    token = (rows.start + rows.row // GROUP).to(tl.int64)
    head = (rows.kv_head * GROUP + rows.row % GROUP).to(tl.int64)
    return Table(bias_ptr + token * BIAS.TOKEN_STRIDE + head * BIAS.WIDTH, rows.row < rows.num_rows)


@triton.jit
def entries(tables, distance, exists, BIAS: tl.constexpr):
    """The base-2 entries for `distance`, query minus key, of the tables at the addresses `tables`; 0 unless `exists`.

    The three tensors broadcast against one another.
    """
    columns = tl.minimum(tl.maximum(distance + BIAS.AT_OWN, 0), BIAS.WIDTH - 1)
    return tl.load(tables + columns, mask=exists, other=0.0) * LOG2E


@triton.jit
def with_table(logits, table, position, keys, BIAS: tl.constexpr):
    """Logits [rows, keys] plus the entries of the rows' tables."""
    return logits + entries(table.rows[:, None], position[:, None] - keys[None, :], table.exists[:, None], BIAS)


@triton.jit
def capped_and_biased(logits, queries, keys, visible, FORM: tl.constexpr):
    """(logits [rows, keys] with soft cap and biases but without masks, the factor that converts them to base 2).

    `queries` has the factors, slopes and tables of the rows. FORM says which of them the call has.
    """
    if FORM.HAS_SOFT_CAP:
        logits = soft_capped(logits * queries.inner, queries.cap)
    scale = queries.outer
    if FORM.HAS_ALIBI:
        logits = sloped(logits * scale, queries.slope, visible.position, keys, visible.low)
        scale = 1.0
    if FORM.BIAS.WIDTH:
        logits = with_table(logits * scale, queries.table, visible.position, keys, FORM.BIAS)
        scale = 1.0
    return logits, scale
