"""Chunked prefill of one sequence on TPUs over heads-first pages.

A grid step computes attention for one block of the chunk's rows in several KV heads, over all keys that these rows see:
pages before the rows' window or after their last position are not fetched. A block of keys that every row sees entirely
needs no mask. In any other block, logits are masked and the values that no row sees are zeroed, because 0 times NaN is
NaN.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ragged_attention.calls import PrefillAttention, dtype_name
from ragged_attention.errors import InvalidInput
from ragged_attention.jax_shared.logits import soft_capped, window_of
from ragged_attention.kernels_pallas import _heads_first
from ragged_attention.kernels_pallas._blocks import (
    LARGEST_INT,
    NOWHERE,
    bytes_of,
    cdiv,
    expect_sizes,
    next_power_of_2,
    product,
)
from ragged_attention.kernels_pallas._heads_first import block_rows, scale_row, spread, update_softmax, weighted_sum

ROWS = 256  # maximum query rows per KV head in a block: enough work for the matrix unit per load of keys
FEATURES = frozenset({"sm_scale", "soft_cap", "sliding_window", "align"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The tunable parameters.

    Attributes:
        num_kv_pages_per_block: pages fetched and processed together; 0 chooses a number that fits in VMEM.
        num_queries_per_block: query tokens processed together, a power of two, at least 8; 0 chooses one that fits.
        split_weights_below: blocks of rows that see at most this many keys use two bfloat16 terms per weight, as do
            masked blocks of keys; 0 means one term everywhere, which is faster.
        vmem_limit_bytes: bytes of VMEM that the compiler may use; 0 is its default.
    """

    num_kv_pages_per_block: int = 0
    num_queries_per_block: int = 0
    split_weights_below: int = 1024
    vmem_limit_bytes: int = 0

    def __post_init__(self) -> None:
        expect_sizes(
            self, num_kv_pages_per_block=(0, 2**20), num_queries_per_block=(0, 1024),
            split_weights_below=(0, LARGEST_INT), vmem_limit_bytes=(0, LARGEST_INT),
        )  # fmt: skip
        if (rows := self.num_queries_per_block) and (rows < _heads_first.SUBLANES or rows & (rows - 1)):
            least = _heads_first.SUBLANES
            raise InvalidInput(f"expected num_queries_per_block to be a power of two from {least}, got {rows}")


def heuristic(call: Any) -> Tile:
    return Tile()  # `plan_of` replaces zeros by the largest sizes that fit in VMEM


def why_not(call: PrefillAttention) -> str | None:
    return _heads_first.refusal(call, used_memory(plan_of(call, heuristic(call)), call) <= _heads_first.BUDGET, rows=1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan(_heads_first.Plan):
    """The static parameters of one launch."""

    window: int | None
    block_q: int  # query tokens per block
    q_blocks: int
    split_weights_below: int

    @property
    def rows(self) -> int:
        """Query rows per KV head and block; the rows of each query head are consecutive."""
        return self.group * self.block_q

    @property
    def tiles(self) -> int:
        """Tiles of query rows per step."""
        return self.heads


def plan_of(call: Any, tile: Tile) -> Plan:
    """The plan with the most rows, heads and keys per step that fit in VMEM."""
    cores = call.device.num_multiprocessors
    cores = cores if call.num_kv_heads % cores == 0 else 1
    most = next_power_of_2(ROWS // call.group + 1) // 2
    asked = tile.num_queries_per_block

    def make(block_q: int, **fields: Any) -> Plan:
        return Plan(
            **fields, window=window_of(call, call.capacity), block_q=block_q,
            q_blocks=cdiv(call.num_tokens, block_q), split_weights_below=tile.split_weights_below,
        )  # fmt: skip

    return _heads_first.largest_plan(
        call, make, used_memory, limit=tile.vmem_limit_bytes, cores=cores, own_heads=call.num_kv_heads // cores,
        pages=tile.num_kv_pages_per_block, fewest_queries=asked or _heads_first.SUBLANES,
        queries=asked or max(_heads_first.SUBLANES, min(most, next_power_of_2(call.num_tokens))),
    )  # fmt: skip


def used_memory(plan: Plan, call: Any) -> int:
    """Bytes of VMEM that a launch uses: for its scratch, the queries, the results, and one head's logits, K and V."""
    rows = [pltpu.VMEM((2 * plan.heads, plan.rows, call.head_dim), jnp.dtype(dtype_name(call.q)))] * 2
    logits = [pltpu.VMEM((plan.rows, plan.columns), jnp.float32)] * 3
    keys = [pltpu.VMEM((2, plan.columns, call.head_dim), jnp.float32)]
    return bytes_of([_heads_first.scratch_of(call, plan), *rows, *logits, *keys])


def run(call: Any, tile: Tile, launch: Any) -> jax.Array:
    plan = plan_of(call, tile)
    used = used_memory(plan, call)
    _heads_first.expect_block(call, "num_kv_pages_per_block", tile.num_kv_pages_per_block, used)
    if 0 in call.out_shape or call.pages_per_seq == 0 or call.num_pages == 0:
        return jnp.zeros(call.out_shape, call.q.dtype)
    chunk, _, width = call.q.shape
    length = jnp.clip(call.length.reshape(()), 0, call.capacity)
    base = length - chunk if call.align == "end" else (length - 1) // chunk * chunk  # the first row's position
    # Rows ordered by KV head, then by block, then by head of the group: [K, blocks, group * block_q, D].
    split = (plan.q_blocks, plan.block_q, call.num_kv_heads, plan.group, width)
    blocks = jnp.pad(call.q, ((0, plan.q_blocks * plan.block_q - chunk), (0, 0), (0, 0))).reshape(split)
    blocks = blocks.transpose(2, 0, 3, 1, 4).reshape(call.num_kv_heads, plan.q_blocks, plan.rows, width)
    operands = _heads_first.operands_of(call)
    lows, highs, following, first = ranges(length, base, plan)

    def index_map(core: Any, head_step: Any, q_block: Any, *_: Any) -> tuple[Any, ...]:
        return core * plan.head_steps + head_step, q_block, 0, 0

    scalars = Scalars(lows, highs, following, jnp.stack([length, base, first]), call.page_indices)
    out = _heads_first.launch(
        kernel, plan, call, scalars, blocks, operands, grid=(plan.cores, plan.head_steps, plan.q_blocks),
        block=(plan.heads, 1, plan.rows, width), index_map=index_map, state=3, with_present=True,
        vmem_limit_bytes=_heads_first.vmem_limit(call, tile.vmem_limit_bytes, used),
        name="ragged_attention_prefill_attention",
    )  # fmt: skip
    out = out.reshape(call.num_kv_heads, plan.q_blocks, plan.group, plan.block_q, width).transpose(1, 3, 0, 2, 4)
    return out.reshape(-1, *call.q.shape[1:])[:chunk]


def ranges(length: jax.Array, base: jax.Array, plan: Plan) -> tuple[jax.Array, ...]:
    """For each block of rows: the first visible position, one past the last, and the next block that sees positions.

    The fourth result is the first block of rows that sees positions.
    """
    block = jnp.arange(plan.q_blocks, dtype=jnp.int32)
    top = base + block * plan.block_q
    highs = jnp.clip(top + plan.block_q, 0, length)
    live = highs > jnp.maximum(top, 0)
    lows = jnp.zeros_like(top) if plan.window is None else jnp.maximum(jnp.maximum(top, 0) - plan.window + 1, 0)
    least = lax.cummin(jnp.where(live, block, plan.q_blocks), reverse=True)
    return jnp.where(live, lows, highs), highs, jnp.append(least[1:], jnp.int32(plan.q_blocks)), least[0]


class Scalars(NamedTuple):
    """The arrays in scalar memory."""

    lows: Any  # the first three results of `ranges`
    highs: Any
    following: Any
    facts: Any  # the sequence's length, the position of the chunk's first row, the first block of rows that sees keys
    table: Any


def kernel(refs: _heads_first.Refs, plan: Plan) -> None:
    """Compute attention for one block of the chunk's rows in some heads, over all keys that the rows see."""
    scalars = refs.scalars
    first_head = pl.program_id(0) * plan.head_steps
    head_step, q_block = first_head + pl.program_id(1), pl.program_id(2)
    low, high = scalars.lows[q_block], scalars.highs[q_block]
    refs.begin()

    @pl.when(low < high)
    def _() -> None:
        blocks = low // plan.block, cdiv(high, plan.block)
        lax.fori_loop(*blocks, lambda block, _: visit(refs, plan, first_head, head_step, q_block, block), None)

    weight = jnp.sum(refs.l_i[...], axis=2, keepdims=True)
    position = scalars.facts[1] + q_block * plan.block_q + row_tokens(weight.shape, 1, plan)
    live = (weight != 0) & (position >= 0) & (position < scalars.facts[0])
    refs.out[:, 0] = jnp.where(live, refs.acc[...] / jnp.where(live, weight, 1.0), 0.0).astype(refs.out.dtype)


def visit(refs: _heads_first.Refs, plan: Plan, first_head: Any, head_step: Any, q_block: Any, block: Any) -> None:
    """Attend with a block of rows to one block of pages, while the next block of pages is fetched."""
    state, scalars = refs.state, refs.scalars
    length, base, first = (scalars.facts[i] for i in range(3))
    low, high, following = scalars.lows[q_block], scalars.highs[q_block], scalars.following[q_block]

    @pl.when((head_step == first_head) & (q_block == first) & (block == low // plan.block))
    def _() -> None:
        state[0] = 0
        start(refs, plan, head_step, q_block, block, 0)

    slot = state[0]
    more = (block + 1) * plan.block < high
    to_next_head = jnp.logical_not(more) & (following == plan.q_blocks)
    next_head = jnp.where(to_next_head, head_step + 1, head_step)
    next_q = jnp.where(more, q_block, jnp.where(to_next_head, first, following))

    @pl.when(next_head < first_head + plan.head_steps)
    def _() -> None:
        next_block = jnp.where(more, block + 1, scalars.lows[next_q] // plan.block)
        start(refs, plan, next_head, next_q, next_block, 1 - slot)

    fetched = state[1 + slot]
    _heads_first.wait(fetched, slot, refs.operands)
    state[0] = 1 - slot
    # All rows see the whole block if the first row sees its last position and the last row sees its first position.
    begins, top = block * plan.block, base + q_block * plan.block_q
    whole = (fetched == plan.pages_per_block) & (begins + plan.block <= jnp.minimum(top + 1, length))
    if plan.window is not None:
        whole &= begins > top + plan.block_q - 1 - plan.window
    if refs.q.dtype != jnp.float32:
        whole &= high - low > plan.split_weights_below  # with few keys, take the other branch, which splits weights

    @pl.when(whole)
    def _() -> None:
        column = _heads_first.positions(plan.columns, plan.page_size, plan.page_rows)
        attend(refs, plan, slot, None if plan.page_size == plan.page_rows else column < NOWHERE, False)

    @pl.when(jnp.logical_not(whole))
    def _() -> None:
        seen = (low - begins, high - begins)
        clear_unseen(refs, plan, slot, seen)
        attend(refs, plan, slot, visible(refs, plan, slot, seen, top - begins), plan.split_weights_below > 0)


def start(refs: _heads_first.Refs, plan: Plan, head_step: Any, q_block: Any, block: Any, slot: Any) -> None:
    """Start fetching the pages of a block that the rows see, at least in part."""
    scalars, before = refs.scalars, block * plan.pages_per_block
    left = jnp.maximum(scalars.lows[q_block] // plan.page_size - before, 0)
    right = jnp.minimum(cdiv(scalars.highs[q_block], plan.page_size) - before, plan.pages_per_block)
    heads = pl.ds(head_step * plan.heads, plan.heads)
    count = _heads_first.fetch(scalars.table, before, (left, right), heads, slot, refs.operands, refs.present)
    refs.state[1 + slot] = count


def row_tokens(shape: tuple[int, ...], axis: int, plan: Plan) -> jax.Array:
    """The index of each row's token in the block of rows."""
    return lax.broadcasted_iota(jnp.int32, shape, axis) & (plan.block_q - 1)


def clear_unseen(refs: _heads_first.Refs, plan: Plan, slot: Any, seen: tuple[Any, Any]) -> None:
    """Zero a block's values that are outside `seen` or in invalid pages. Their weight is 0, but 0 times NaN is NaN."""
    values = refs.operands[1].buffer

    def clear(page: Any, _: None) -> None:
        left, right = seen[0] - page * plan.page_size, seen[1] - page * plan.page_size
        has_seen = (right > 0) & (left < plan.page_size) & (refs.present[slot, page] != 0)

        @pl.when(jnp.logical_not(has_seen) | (left > 0) | (right < plan.page_size))
        def _() -> None:
            old = values[slot, :, page]
            offset = lax.broadcasted_iota(jnp.int32, old.shape, 1)
            is_seen = (offset >= left) & (offset < jnp.where(has_seen, right, 0))
            values[slot, :, page] = jnp.where(is_seen, old, jnp.zeros_like(old))

    lax.fori_loop(0, plan.pages_per_block, clear, None)


def visible(refs: _heads_first.Refs, plan: Plan, slot: Any, seen: tuple[Any, Any], top: Any) -> jax.Array:
    """Which columns of a block of keys each row sees, bool [rows, columns].

    `seen` is the range [first, end) of keys that some row sees, and `top` the position of the first row's query. `seen`
    and `top` are relative to the block's first key.
    """
    index = lax.broadcasted_iota(jnp.int32, (1, plan.columns), 1)

    def hide(page: Any, column: jax.Array) -> jax.Array:
        in_page = (index >= page * plan.page_rows) & (index < (page + 1) * plan.page_rows)
        return jnp.where(in_page & (refs.present[slot, page] == 0), NOWHERE, column)

    first = jnp.maximum(seen[0], 0) // plan.page_size
    last = cdiv(jnp.minimum(seen[1], plan.block), plan.page_size)
    column = lax.fori_loop(first, last, hide, _heads_first.positions(plan.columns, plan.page_size, plan.page_rows))
    query = top + row_tokens((plan.rows, 1), 0, plan)
    mask = column <= query
    if plan.window is not None:
        mask &= column > query - plan.window
    return mask


def attend(refs: _heads_first.Refs, plan: Plan, slot: Any, mask: jax.Array | None, split_weights: bool) -> None:
    """Add the keys of a block to the online softmax of every row, one head after another."""
    k_buffer, v_buffer, *scale_buffers = [operand.buffer for operand in refs.operands]
    q, m_i, l_i, acc = refs.q, refs.m_i, refs.l_i, refs.acc

    def one_head(head: Any, _: None) -> None:
        k = block_rows(k_buffer[slot, head], plan.page_rows, q.dtype)
        s = product(q[head, 0], k, 1, 1) * plan.scale
        if scale_buffers:
            s = s * scale_row(scale_buffers[0][slot, head], plan.page_rows)
        if plan.soft_cap is not None:
            s = soft_capped(s, plan.soft_cap)
        if mask is not None:
            s = jnp.where(mask, s, -jnp.inf)
        p, alpha = update_softmax(s, m_i, l_i, head)
        if scale_buffers:
            p = p * scale_row(scale_buffers[1][slot, head], plan.page_rows)
            p = p if mask is None else jnp.where(mask, p, 0.0)
        v = block_rows(v_buffer[slot, head], plan.page_rows, q.dtype)
        acc[head] = acc[head] * spread(alpha, acc.shape[-1]) + weighted_sum(p, v, split_weights)

    lax.fori_loop(0, plan.heads, one_head, None)
