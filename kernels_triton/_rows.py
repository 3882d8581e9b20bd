"""Loads of query rows and stores of result rows, for attention over pages.

A row is a (query token, query head) pair of one sequence and KV head.
"""

import dataclasses
from typing import NamedTuple

import triton
import triton.language as tl

from ragged_attention.kernels_triton._bias import Bias, Table, load_slopes, table_of
from ragged_attention.kernels_triton._constants import Constants
from ragged_attention.kernels_triton._formats import in_float16, load_scale, narrow
from ragged_attention.kernels_triton._max_logits import largest_of_state, raise_largest
from ragged_attention.kernels_triton._pages import Queries
from ragged_attention.kernels_triton._segments import normalised
from ragged_attention.kernels_triton._sequences import query_edge
from ragged_attention.kernels_triton._softmax import LOG2E, finish, lost_to_rounding, unit_under_cap

SMALLEST_SCALE: tl.constexpr = tl.constexpr(1e-30)  # replaces a scale of 0, so that -inf times the scale stays -inf


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Scaling(Constants):
    """Which scales, caps, sinks and slopes a call has."""

    K_SCALE_STRIDE: int  # see `load_scale`
    V_SCALE_STRIDE: int
    SIGNED: bool  # whether the scale of logits may be negative
    HAS_SOFT_CAP: bool
    HAS_SINKS: bool
    HAS_ALIBI: bool
    BIAS: Bias


class Rows(NamedTuple):
    """A block of rows of one sequence and KV head."""

    row: tl.tensor  # the rows' indices in the sequence
    num_rows: tl.tensor  # the sequence's number of rows; later rows belong to no query
    start: tl.tensor  # the sequence's first token
    kv_head: tl.tensor


class Factors(NamedTuple):
    """The scales, the soft cap and the biases of logits."""

    sm_scale: tl.tensor  # includes the scale of keys, if that is a number
    soft_cap: tl.tensor
    k_scale_ptr: tl.tensor  # see `load_scale`
    slopes_ptr: tl.tensor
    bias_ptr: tl.tensor


class QueryArray(NamedTuple):
    """The array of queries, [tokens, heads, D]."""

    ptr: tl.tensor
    token_stride: tl.tensor
    head_stride: tl.tensor


class Output(NamedTuple):
    """The arrays of results: out [tokens, heads, DV] and lse [tokens, heads]."""

    out_ptr: tl.tensor
    lse_ptr: tl.tensor


@triton.jit
def logit_scales(scale, soft_cap, HAS_SOFT_CAP: tl.constexpr):
    """(inner, cap, outer) of `Queries`, for the magnitude of `scale`."""
    magnitude = tl.maximum(tl.abs(scale), SMALLEST_SCALE)
    inner = magnitude
    outer = magnitude * LOG2E
    cap = soft_cap
    if HAS_SOFT_CAP:
        unit = unit_under_cap(soft_cap)
        inner = magnitude * unit
        outer = LOG2E / unit
        cap = soft_cap * unit
    return inner, cap, outer


@triton.jit
def load_rows(array, rows, negative, SIGNED: tl.constexpr, SHAPE: tl.constexpr):
    """Query rows [ROWS, D_PAD]. Rows that do not exist are zero. If SIGNED and `negative`, rows are negated.

    SIGNED is a constant because computed operands take registers, while operands that are only loaded stay in shared
    memory, where Hopper's matrix units read them.
    """
    d = tl.arange(0, SHAPE.D_PAD)
    token = (rows.start + rows.row // SHAPE.GROUP).to(tl.int64)
    head = rows.kv_head * SHAPE.GROUP + rows.row % SHAPE.GROUP
    offset = token * array.token_stride + head.to(tl.int64) * array.head_stride
    mask = (rows.row < rows.num_rows)[:, None] & (d < SHAPE.D)[None, :]
    q = tl.load(array.ptr + offset[:, None] + d[None, :], mask=mask, other=0)
    if SIGNED:
        wide = q.to(tl.float32)
        q = tl.where(negative, -wide, wide).to(q.dtype)
    return q


@triton.jit
def load_queries(array, rows, factors, SCALING: tl.constexpr, SHAPE: tl.constexpr):
    """A block of query rows as `Queries`."""
    scale = load_scale(factors.k_scale_ptr, rows.kv_head, 1.0, SCALING.K_SCALE_STRIDE) * factors.sm_scale
    inner, cap, outer = logit_scales(scale, factors.soft_cap, SCALING.HAS_SOFT_CAP)
    q = load_rows(array, rows, scale < 0, SCALING.SIGNED, SHAPE)
    lost = q  # a stand-in, not used with one term
    if SHAPE.Q_TERMS == 2:
        exact = q.to(tl.float32)
        q = narrow(exact, tl.bfloat16)
        lost = lost_to_rounding(exact, q)
    unit = outer  # a stand-in, not used without Q_UNITS
    if SHAPE.Q_UNITS:
        q, unit = in_float16(q)
    total = outer  # a stand-in, not used without zero points
    if SHAPE.K.ZERO != "":
        total = tl.sum(q.to(tl.float32), 1)
    slope = outer  # a stand-in, not used without HAS_ALIBI
    if SCALING.HAS_ALIBI:
        slope = load_slopes(factors.slopes_ptr, rows, SHAPE.GROUP)
    table = Table(outer, outer)  # a stand-in, not used without a relative bias
    if SCALING.BIAS.WIDTH:
        table = table_of(factors.bias_ptr, rows, SCALING.BIAS, SHAPE.GROUP)
    return Queries(q, lost, total, unit, inner, cap, outer, slope, table)


@triton.jit
def store_rows(output, state, rows, sinks_ptr, v_scale, HAS_SINKS: tl.constexpr, SHAPE: tl.constexpr):
    """Write out and lse of finished rows. A row that has seen no key gets 0 and -inf."""
    m_i, l_i, acc = state[0], state[1], state[2]
    head = rows.kv_head * SHAPE.GROUP + rows.row % SHAPE.GROUP
    exists = rows.row < rows.num_rows
    factor, lse = finish(m_i, l_i, sinks_ptr, head, exists, v_scale, HAS_SINKS)
    out = tl.where((l_i == 0.0)[:, None], 0.0, acc * factor[:, None])  # acc is NaN if an unseen value is NaN
    dv = tl.arange(0, SHAPE.DV_PAD)
    index = (rows.start + rows.row // SHAPE.GROUP).to(tl.int64) * SHAPE.NUM_HEADS + head
    mask = exists[:, None] & (dv < SHAPE.DV)[None, :]
    out_ptr = output.out_ptr + index[:, None] * SHAPE.DV + dv[None, :]
    tl.store(out_ptr, narrow(out, output.out_ptr.dtype.element_ty), mask=mask)
    tl.store(output.lse_ptr + index, lse, mask=exists)


@triton.jit
def store_split(parts_ptr, part_lses_ptr, state, rows, part, ROWS: tl.constexpr, SHAPE: tl.constexpr):
    """Write a split's normalised rows and their base-2 lse to index `part` of the splits, which have ROWS rows each."""
    m_i, l_i, acc = state[0], state[1], state[2]
    dv = tl.arange(0, SHAPE.DV_PAD)
    index = part * ROWS + rows.row
    acc, lse = normalised(m_i, l_i, acc)
    exists = rows.row < rows.num_rows
    mask = exists[:, None] & (dv < SHAPE.DV)[None, :]
    tl.store(parts_ptr + index[:, None] * SHAPE.DV + dv[None, :], acc, mask=mask)
    tl.store(part_lses_ptr + index, lse, mask=exists)


@triton.jit
def clear_rows(output, batch, entry, kv_head, ROWS: tl.constexpr, SHAPE: tl.constexpr):
    """Write 0 and -inf to rows that belong to no sequence. Programs along the grid's first axis share these rows."""
    first = query_edge(batch.cu_q_lens_ptr, 0, batch.num_tokens)
    last = query_edge(batch.cu_q_lens_ptr, batch.num_seqs, batch.num_tokens)
    dv = tl.arange(0, SHAPE.DV_PAD)
    zeros = tl.zeros([ROWS, SHAPE.DV_PAD], output.out_ptr.dtype.element_ty)
    for first_row in range(entry * ROWS, batch.num_tokens * SHAPE.GROUP, tl.num_programs(0) * ROWS):
        row = first_row + tl.arange(0, ROWS)
        token = row // SHAPE.GROUP
        unowned = (token < batch.num_tokens) & ((token < first) | (token >= last))
        index = token.to(tl.int64) * SHAPE.NUM_HEADS + kv_head * SHAPE.GROUP + row % SHAPE.GROUP
        mask = unowned[:, None] & (dv < SHAPE.DV)[None, :]
        tl.store(output.out_ptr + index[:, None] * SHAPE.DV + dv[None, :], zeros, mask=mask)
        tl.store(output.lse_ptr + index, tl.full([ROWS], float("-inf"), tl.float32), mask=unowned)


@triton.jit
def raise_largest_of_rows(max_ptr, state, rows, SHAPE: tl.constexpr):
    """Raise the largest logits of the heads to those of finished rows; see `raise_largest`."""
    head = rows.kv_head * SHAPE.GROUP + rows.row % SHAPE.GROUP
    raise_largest(max_ptr, largest_of_state(state), state[1], head, rows.row < rows.num_rows)
