"""Paged decode on TPUs over heads-first pages: one query per sequence.

A grid step computes attention for several KV heads of one sequence, over all keys of the sequence, or over one block of
them if `inline_seq_dim` is off. Invalid pages are left out of a block, so its valid keys come first, and the mask
follows from their number. If groups are small, query heads of several KV heads share the eight rows of a register: each
KV head's keys are multiplied with all eight rows, and each row keeps the results of its own KV head.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ragged_attention.calls import PagedAttention, dtype_name
from ragged_attention.errors import InvalidInput
from ragged_attention.jax_shared.logits import soft_capped
from ragged_attention.kernels_pallas import _heads_first
from ragged_attention.kernels_pallas._blocks import LARGEST_INT, bytes_of, cdiv, expect_sizes, product, round_up
from ragged_attention.kernels_pallas._heads_first import block_rows, scale_row, spread, update_softmax, weighted_sum

MEGACORE_MODES = (None, "batch", "kv_head")
FEATURES = frozenset({"sm_scale", "soft_cap"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The tunable parameters.

    Attributes:
        pages_per_compute_block: pages fetched and processed together, a divisor of the pages that a sequence can list.
            0 chooses a number that fits in VMEM, which need not be a divisor.
        megacore_mode: "batch" divides the sequences among the cores of a TPU, "kv_head" the KV heads. The number of
            sequences or KV heads must be a multiple of the number of cores.
        inline_seq_dim: whether a grid step attends to all keys of a sequence, or only to one block of them.
        vmem_limit_bytes: bytes of VMEM that the compiler may use; 0 is its default.
    """

    pages_per_compute_block: int = 0
    megacore_mode: str | None = None
    inline_seq_dim: bool = True
    vmem_limit_bytes: int = 0

    def __post_init__(self) -> None:
        expect_sizes(self, pages_per_compute_block=(0, 2**20), vmem_limit_bytes=(0, LARGEST_INT))
        if self.megacore_mode not in MEGACORE_MODES:
            modes = ", ".join(map(repr, MEGACORE_MODES))
            raise InvalidInput(f"expected megacore_mode to be one of {modes}, got {self.megacore_mode!r}")
        if not isinstance(self.inline_seq_dim, bool):
            raise TypeError(f"expected inline_seq_dim to be a bool, got {type(self.inline_seq_dim).__name__}")


def heuristic(call: Any) -> Tile:
    """Divide the sequences evenly among the cores if that is possible, or else the KV heads if that is possible."""
    cores = call.device.num_multiprocessors
    if cores > 1 and call.max_num_seqs % cores == 0:
        return Tile(megacore_mode="batch")
    return Tile(megacore_mode="kv_head" if cores > 1 and call.num_kv_heads % cores == 0 else None)


def why_not(call: PagedAttention) -> str | None:
    fits = used_memory(plan_of(call, heuristic(call)), call) <= _heads_first.BUDGET
    return _heads_first.refusal(call, fits, rows=call.device.num_multiprocessors)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan(_heads_first.Plan):
    """The static parameters of one launch."""

    per_tile: int  # number of KV heads whose query rows share a tile
    rows: int  # query rows per tile, with padding
    megacore_mode: str | None
    inline_seq_dim: bool

    @property
    def tiles(self) -> int:
        """Tiles of query rows per step."""
        return self.heads // self.per_tile

    def address(self, core: Any, row: Any, head_step: Any) -> tuple[Any, Any]:
        """The sequence and the head step in the whole launch, given a core's own row and head step."""
        if self.megacore_mode == "batch":
            row = row * self.cores + core
        return row, core * self.head_steps + head_step if self.megacore_mode == "kv_head" else head_step


def plan_of(call: Any, tile: Tile) -> Plan:
    """The plan with the most heads and keys per step that fit in VMEM."""
    cores = call.device.num_multiprocessors if tile.megacore_mode is not None else 1
    own_heads = max(1, call.num_kv_heads // cores if tile.megacore_mode == "kv_head" else call.num_kv_heads)

    def make(_: int, *, heads: int, group: int, **fields: Any) -> Plan:
        per_tile = _heads_first.most_heads(heads, max(1, _heads_first.SUBLANES // group))
        rows = round_up(per_tile * group, _heads_first.SUBLANES)
        return Plan(
            **fields, heads=heads, group=group, per_tile=per_tile, rows=rows, megacore_mode=tile.megacore_mode,
            inline_seq_dim=tile.inline_seq_dim,
        )  # fmt: skip

    return _heads_first.largest_plan(
        call, make, used_memory, limit=tile.vmem_limit_bytes, cores=cores, own_heads=own_heads,
        pages=tile.pages_per_compute_block,
    )  # fmt: skip


def used_memory(plan: Plan, call: Any) -> int:
    """Bytes of VMEM that a launch uses: for its scratch, queries and results, and one head's K and V in float32."""
    tiles = [pltpu.VMEM((2 * plan.tiles, plan.rows, call.head_dim), jnp.dtype(dtype_name(call.q)))] * 2
    rows = [pltpu.VMEM((2, plan.columns, call.head_dim), jnp.float32)]
    return bytes_of([_heads_first.scratch_of(call, plan), *tiles, *rows])


def run(call: Any, tile: Tile, launch: Any) -> jax.Array:
    check(call, tile)
    plan = plan_of(call, tile)
    used = used_memory(plan, call)
    _heads_first.expect_block(call, "pages_per_compute_block", tile.pages_per_compute_block, used)
    if 0 in call.out_shape or call.pages_per_seq == 0 or call.num_pages == 0:
        return jnp.zeros(call.out_shape, call.q.dtype)
    split = plan.cores if plan.megacore_mode == "batch" else 1
    batch = call.max_num_seqs
    at_once = max(1, _heads_first.table_bytes(call) // _heads_first.row_bytes(call) // split) * split
    lengths = jnp.clip(call.lengths, 0, call.capacity)
    operands = _heads_first.operands_of(call)
    parts = [slice(start, min(start + at_once, batch)) for start in range(0, batch, at_once)]
    outs = [decode(call.q[part], operands, lengths[part], call.page_indices[part], plan, call, tile) for part in parts]
    return jnp.concatenate(outs) if len(outs) > 1 else outs[0]


def check(call: Any, tile: Tile) -> None:
    """Check that the tile's blocks and cores divide the sizes of the call."""
    cores, pages = call.device.num_multiprocessors, tile.pages_per_compute_block
    if pages and call.pages_per_seq % pages:
        raise InvalidInput(f"expected pages_per_compute_block to divide {call.pages_per_seq=}, got {pages}")
    for mode, name in (("batch", "max_num_seqs"), ("kv_head", "num_kv_heads")):
        if tile.megacore_mode == mode and (count := getattr(call, name)) % cores:
            raise InvalidInput(f"expected {name} to be a multiple of {cores=} for megacore_mode={mode!r}, got {count}")


def decode(
    q: jax.Array, operands: list[jax.Array], lengths: jax.Array, page_indices: jax.Array, plan: Plan, call: Any,
    tile: Tile,
) -> jax.Array:  # fmt: skip
    """One launch, over sequences whose page indices fit in scalar memory."""
    batch, _, width = q.shape
    all_tiles, members = call.num_kv_heads // plan.per_tile, plan.per_tile * plan.group
    tiled = q.reshape(batch, all_tiles, members, width)
    if plan.rows != members:
        tiled = jnp.pad(tiled, ((0, 0), (0, 0), (0, plan.rows - members), (0, 0)))
    split = plan.cores if plan.megacore_mode == "batch" else 1
    following, first = schedule(lengths, split)

    def index_map(core: Any, row: Any, head_step: Any, *_: Any) -> tuple[Any, ...]:
        return *plan.address(core, row, head_step), 0, 0

    grid = (plan.cores, batch // split, plan.head_steps)
    if not plan.inline_seq_dim:
        grid = (*grid, cdiv(call.pages_per_seq, plan.pages_per_block))
    scalars = Scalars(lengths, page_indices.reshape(-1), following, jnp.broadcast_to(first, (plan.cores,)))
    out = _heads_first.launch(
        kernel, plan, call, scalars, tiled, operands, grid=grid, block=(1, plan.tiles, plan.rows, width),
        index_map=index_map, state=5, with_present=False,
        vmem_limit_bytes=_heads_first.vmem_limit(call, tile.vmem_limit_bytes, used_memory(plan, call)),
        name="ragged_attention_paged_attention",
    )  # fmt: skip
    return out[:, :, :members].reshape(q.shape)


def schedule(lengths: jax.Array, cores: int) -> tuple[jax.Array, jax.Array]:
    """For each sequence [S], the next sequence with keys on its core; for each core, its first sequence with keys.

    S stands for no sequence. Core i has the sequences i, i + cores, i + 2 * cores and so on.
    """
    batch = lengths.shape[0]
    row = jnp.arange(batch, dtype=jnp.int32)
    with_keys = jnp.where(lengths > 0, row, batch).reshape(batch // cores, cores)
    least = lax.cummin(with_keys, axis=0, reverse=True)
    after = jnp.concatenate([least[1:], jnp.full((1, cores), batch, jnp.int32)])
    return after.reshape(batch), least[0]


class Scalars(NamedTuple):
    """The arrays in scalar memory."""

    lengths: Any
    table: Any
    following: Any
    first: Any


def kernel(refs: _heads_first.Refs, plan: Plan) -> None:
    """Attend with some heads of a sequence to all its keys or one block. `refs.state[3:]` has each slot's key count."""
    core = pl.program_id(0)
    row, head_step = plan.address(core, pl.program_id(1), pl.program_id(2))
    blocks = cdiv(refs.scalars.lengths[row], plan.block)

    def finish() -> None:
        weight = jnp.sum(refs.l_i[...], axis=2, keepdims=True)
        refs.out[0] = (refs.acc[...] / jnp.where(weight == 0, 1.0, weight)).astype(refs.out.dtype)

    if plan.inline_seq_dim:
        refs.begin()
        lax.fori_loop(0, blocks, lambda block, _: visit(refs, plan, core, row, head_step, block), None)
        finish()
    else:
        block = pl.program_id(3)
        pl.when(block == 0)(refs.begin)
        pl.when(block < blocks)(lambda: visit(refs, plan, core, row, head_step, block))
        pl.when(block == pl.num_programs(3) - 1)(finish)


def visit(refs: _heads_first.Refs, plan: Plan, core: Any, row: Any, head_step: Any, block: Any) -> None:
    """Attend to one block of a sequence, while the next block is fetched."""
    _, first_head = plan.address(core, 0, 0)
    state, lengths = refs.state, refs.scalars.lengths

    @pl.when((row == refs.scalars.first[core]) & (head_step == first_head) & (block == 0))
    def _() -> None:
        state[0] = 0
        start(refs, plan, row, head_step, block, 0)

    slot = state[0]
    more = (block + 1) * plan.block < lengths[row]
    same = head_step + 1 < first_head + plan.head_steps
    next_row = jnp.where(more | same, row, refs.scalars.following[row])
    next_head = jnp.where(more, head_step, jnp.where(same, head_step + 1, first_head))

    @pl.when(next_row < lengths.shape[0])
    def _() -> None:
        start(refs, plan, next_row, next_head, jnp.where(more, block + 1, 0), 1 - slot)

    _heads_first.wait(state[1 + slot], slot, refs.operands)
    state[0] = 1 - slot
    clear_tail(refs.operands[1].buffer, slot, state[3 + slot], plan)
    attend(refs, plan, slot, state[3 + slot])


def start(refs: _heads_first.Refs, plan: Plan, row: Any, head_step: Any, block: Any, slot: Any) -> None:
    """Start fetching a block, and store the number of its valid pages and keys."""
    lengths, table = refs.scalars.lengths, refs.scalars.table
    length, before = lengths[row], block * plan.pages_per_block
    used = jnp.minimum(plan.pages_per_block, cdiv(length, plan.page_size) - before)
    first = row * (table.shape[0] // lengths.shape[0]) + before
    heads = pl.ds(head_step * plan.heads, plan.heads)
    valid = _heads_first.fetch(table, first, (0, used), heads, slot, refs.operands)
    # All fetched pages are full, except perhaps the last page of the sequence.
    last = table[first + used - 1]
    is_fetched = (last >= 0) & (last < refs.operands[0].pages.shape[1])
    unused = jnp.maximum((before + used) * plan.page_size - length, 0)
    refs.state[1 + slot] = valid
    refs.state[3 + slot] = valid * plan.page_size - jnp.where(is_fetched, unused, 0)


def clear_tail(values: Any, slot: Any, keys: Any, plan: Plan) -> None:
    """Zero the values of a block after those of its `keys` valid keys. Their weight is 0, but 0 times NaN is NaN."""
    full = keys // plan.page_size

    @pl.when(full < plan.pages_per_block)
    def _() -> None:
        page = values[slot, :, full]
        offset = lax.broadcasted_iota(jnp.int32, page.shape, 1)
        values[slot, :, full] = jnp.where(offset < keys - full * plan.page_size, page, jnp.zeros_like(page))

        def zero(page: Any, _: None) -> None:
            values[slot, :, page] = jnp.zeros(values.shape[1:2] + values.shape[3:], values.dtype)

        lax.fori_loop(full + 1, plan.pages_per_block, zero, None)


def attend(refs: _heads_first.Refs, plan: Plan, slot: Any, keys: Any) -> None:
    """Add the keys of a block to the online softmax of every tile of query rows."""
    k_buffer, v_buffer, *scale_buffers = [operand.buffer for operand in refs.operands]
    q, m_i, l_i, acc = refs.q, refs.m_i, refs.l_i, refs.acc
    seen = _heads_first.positions(plan.columns, plan.page_size, plan.page_rows) < keys

    def merged(results: list[jax.Array]) -> jax.Array:
        """The rows of a tile, each from the result of its own KV head."""
        rows = results[0]
        row = lax.broadcasted_iota(jnp.int32, rows.shape, 0)
        for member, result in enumerate(results[1:], start=1):
            rows = jnp.where(row < member * plan.group, rows, result)
        return rows

    for tile in range(plan.tiles):
        heads = range(tile * plan.per_tile, (tile + 1) * plan.per_tile)
        logits = []
        for head in heads:
            k = block_rows(k_buffer[slot, head], plan.page_rows, q.dtype)
            logits.append(product(q[0, tile], k, 1, 1))
            if scale_buffers:
                logits[-1] *= scale_row(scale_buffers[0][slot, head], plan.page_rows)
        s = merged(logits) * plan.scale
        if plan.soft_cap is not None:
            s = soft_capped(s, plan.soft_cap)
        s = jnp.where(seen, s, -jnp.inf)
        p, alpha = update_softmax(s, m_i, l_i, tile)
        mixed = []
        for head in heads:
            v = block_rows(v_buffer[slot, head], plan.page_rows, q.dtype)
            weights = p
            if scale_buffers:
                weights = jnp.where(seen, p * scale_row(scale_buffers[1][slot, head], plan.page_rows), 0.0)
            mixed.append(weighted_sum(weights, v, split_weights=True))
        acc[tile] = acc[tile] * spread(alpha, acc.shape[-1]) + merged(mixed)
