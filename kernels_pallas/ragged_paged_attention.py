"""Ragged paged attention on a TPU: one kernel, launched for sequences with one query token, then for all others.

A launch is a sequence of steps. In a step, a tile (consecutive query tokens of one sequence) attends to one block of
keys. Meanwhile the pages of the next step are copied into the other buffer, even if that step belongs to another tile
or sequence. If it is a tile's first step, the tile's queries are copied too. Only pages that a query of the tile sees
are fetched; with `key_ranges`, other pages of the same block may be fetched too. The maximum, the sum and the
accumulator stay in VMEM in float32 until the tile ends. Then the tile is normalised, and its rows are copied to the
result. All other rows of the result keep their initial zeros.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ragged_attention.calls import RaggedPagedAttention, dtype_name, expect_bool
from ragged_attention.jax_shared.logits import window_of
from ragged_attention.jax_shared.pages import live_edges, per_head
from ragged_attention.kernels_pallas import write_kv_pages
from ragged_attention.kernels_pallas._blocks import (
    LANES,
    LARGEST_INT,
    LOG2E,
    bytes_of,
    cannot_run,
    cdiv,
    compiler_params,
    expect_sizes,
    item_size,
    next_power_of_2,
    round_up,
    written_dtype,
)
from ragged_attention.kernels_pallas._new_rows import last_writes, new_rows, slots_from_tables, write_scales
from ragged_attention.kernels_pallas._ragged_kernel import UPDATES, Factors, Plan, Refs, Sequences, kernel, scratch
from ragged_attention.kernels_pallas._ranges import ranges_of
from ragged_attention.kernels_pallas._scale_pages import in_lines, lines_of, refusal

SUBLANES = 16  # rows of a bfloat16 tile
FEATURES = frozenset({
    "num_seqs", "sm_scale", "causal", "sliding_window", "soft_cap", "sinks", "k_scale", "v_scale", "return_lse",
    "new_kv", "key_ranges", "out_dtype", "k_scale_pages", "v_scale_pages",
})  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The tunable parameters.

    Attributes:
        num_kv_pages_per_block: pages fetched together into one of the two buffers.
        num_queries_per_block: query tokens processed together, rounded up to a power of two, at least 16. Another
            launch processes the sequences with one query token.
        block_kv: keys processed together, a multiple of 128.
        decode_block_kv: `block_kv` of the launch for sequences with one query token.
        split_weights_below: tiles that see at most this many keys use two bfloat16 terms per weight, as does the launch
            for sequences with one query token; 0 means one term everywhere, which is faster.
        vmem_limit_bytes: bytes of VMEM that the compiler may use; 0 is its default.
        fused_update: write `new_kv` in the attention kernel, not in a kernel before it.
    """

    num_kv_pages_per_block: int = 16
    num_queries_per_block: int = 64
    block_kv: int = 128
    decode_block_kv: int = 256
    split_weights_below: int = 1024
    vmem_limit_bytes: int = 0
    fused_update: bool = False

    def __post_init__(self) -> None:
        expect_sizes(
            self, num_kv_pages_per_block=(1, 4096), num_queries_per_block=(1, 1024), block_kv=(128, 4096, LANES),
            decode_block_kv=(128, 4096, LANES), split_weights_below=(0, LARGEST_INT), vmem_limit_bytes=(0, LARGEST_INT),
        )  # fmt: skip
        expect_bool("fused_update", self.fused_update)


def heuristic(call: Any) -> Tile:
    """Tiles of up to about 256 rows per KV head and blocks of up to 1024 keys, reduced to fit in half of VMEM."""
    most = max(512 // call.group * 2 // item_size(call.q) // 2, SUBLANES)
    mean = next_power_of_2(cdiv(call.num_tokens, max(call.max_num_seqs, 1)))
    block_q = min(max(mean, SUBLANES), next_power_of_2(most + 1) // 2)
    pages = max(1, min(1024, max(call.capacity, 1)) // call.page_size)
    tile = Tile(num_kv_pages_per_block=pages, num_queries_per_block=block_q)
    while used_memory(call, tile) > call.device.shared_memory // 2:
        if pages > 1 and (pages * call.page_size > 256 or block_q <= SUBLANES):
            pages = cdiv(pages, 2)
        elif block_q > SUBLANES:
            block_q //= 2
        else:
            break
        tile = Tile(num_kv_pages_per_block=pages, num_queries_per_block=block_q)
    limit = max(used_memory(call, tile) * 3 // 2 + 2**22, 2**24)
    return dataclasses.replace(tile, vmem_limit_bytes=min(limit, call.device.shared_memory * 15 // 16))


def used_memory(call: Any, tile: Tile) -> int:
    """Bytes of VMEM that the buffers of the larger launch take."""
    pages = [call.kv_pages] if call.combined else list(call.kv_pages)
    plans = [plan_of(call, tile, block_q, call.num_tokens) for block_q in (1, queries_per_tile(tile))]
    return max(bytes_of(scratch(plan, call.q, pages)) for plan in plans)


def why_not(call: RaggedPagedAttention) -> str | None:
    if (reason := cannot_run(call)) is not None:
        return reason
    if (reason := refusal(call)) is not None:
        return reason
    if "float16" in (dtype_name(call.q), call.cache_dtype):
        return "TPUs have no float16"
    if (needed := used_memory(call, heuristic(call))) > (most := call.device.shared_memory * 3 // 4):
        return f"needs {needed} bytes of vector memory for pages of {call.page_size} positions, {most} are for them"
    if (needed := scalars_per_sequence(call) * 4) > (most := table_bytes(call)):
        return f"needs {needed} bytes of scalar memory for one row of page_indices, {most} are for them"
    return None if call.new_kv is None else write_kv_pages.why_not(call.write_of_new_kv())


def table_bytes(call: Any) -> int:
    """Bytes of scalar memory for the rows of the page table that one launch gets."""
    return call.device.scalar_memory // 2


def scalars_per_sequence(call: Any) -> int:
    """Numbers in scalar memory per sequence, for its row of the page table and for its ranges."""
    return call.page_indices.shape[1] + (2 * call.num_ranges + 3 if call.num_ranges else 0)


def queries_per_tile(tile: Tile) -> int:
    return max(SUBLANES, next_power_of_2(tile.num_queries_per_block))


def plan_of(call: Any, tile: Tile, block_q: int, num_tokens: int, num_updates: int | None = None) -> Plan:
    """The plan of a launch over tiles of `block_q` queries; `num_tokens` includes the padding of `q`."""
    block = tile.num_kv_pages_per_block * call.page_size
    block_kv = min(tile.block_kv if block_q > 1 else tile.decode_block_kv, round_up(block, LANES))
    return Plan(
        block_q=block_q,
        rows=round_up(call.group * block_q, LANES if block_q > 1 else 8),
        pages=tile.num_kv_pages_per_block,
        block=block,
        block_kv=block_kv,
        num_blocks_kv=cdiv(block, block_kv),
        page_size=call.page_size,
        num_pages=call.num_pages,
        pages_per_seq=call.page_indices.shape[1],
        num_tokens=num_tokens,
        num_kv_heads=call.num_kv_heads,
        group=call.group,
        head_dim=call.head_dim,
        v_head_dim=call.v_head_dim,
        combined=call.combined,
        causal=call.causal,
        num_ranges=call.num_ranges,
        window=window_of(call, call.capacity),
        soft_cap=None if call.soft_cap is None else float(call.soft_cap),
        has_sinks=call.sinks is not None,
        has_lse=call.return_lse,
        cores=call.device.num_multiprocessors if num_updates is None else 1,  # a core cannot wait for another's writes
        split_weights_below=tile.split_weights_below,
        num_updates=num_updates,
        scale_lines=lines_of(call.num_kv_heads, call.page_size) if call.scaled else None,
        dtype=jnp.dtype(dtype_name(call.q)),
        out_dtype=written_dtype(call),
    )


def run(call: Any, tile: Tile, launch: Any) -> Any:
    """[out, lse if requested, pages if written]. Rows that see no key get 0, and -inf in lse."""
    if call.new_kv is not None and not tile.fused_update:
        write = call.write_of_new_kv()
        pages = write_kv_pages.run(write, write_kv_pages.heuristic(write), launch)
        return [*run(call.after_write(pages), tile, launch), *pages]
    num_tokens, block_q = call.num_tokens, queries_per_tile(tile)
    padded = max(num_tokens, block_q) if num_tokens > 1 else num_tokens
    pages, scales = [call.kv_pages] if call.combined else list(call.kv_pages), call.scale_pages
    out = jnp.zeros((padded, *call.out_shape[1:]), written_dtype(call))
    lse = jnp.full((padded, 1, call.num_q_heads), -jnp.inf, jnp.float32)
    if 0 not in (num_tokens, call.max_num_seqs, call.num_pages, call.page_indices.shape[1]):
        q = jnp.pad(call.q, ((0, padded - num_tokens), (0, 0), (0, 0)))
        seqs, factors, update = sequences(call), factors_of(call), None
        if call.new_kv is not None:
            rows, slots = new_rows(call, *call.new_kv), slots_from_tables(call, num_tokens)
            update = Update(rows[: len(pages)], last_writes(slots, UPDATES).reshape(-1))
            if call.scaled:
                scales = write_scales(call, rows[len(pages) :], slots)
        lines = in_lines(*scales) if call.scaled else None
        together = max(table_bytes(call) // 4 // scalars_per_sequence(call), 1)
        ranges = call.key_ranges
        if ranges is not None:
            ranges = jnp.pad(ranges, ((0, padded - num_tokens), (0, 0), (0, 0)))
        for first in range(0, call.max_num_seqs, together):
            part = Sequences(*(array[first : first + together] for array in seqs))
            for size in (1, block_q) if num_tokens > 1 else (1,):
                plan = plan_of(call, tile, size, padded, None if update is None else num_tokens)
                out, lse, pages = attend(
                    plan, tile.vmem_limit_bytes, q, pages, lines, part, factors, ranges, update, out, lse
                )
                update = None  # only the first launch writes
    results = [out[:num_tokens].astype(call.result_dtype), *([lse[:num_tokens, 0]] if call.return_lse else [])]
    if call.new_kv is None:
        return results
    return [*results, *pages, *(scales if call.scaled else ())]


class Update(NamedTuple):
    """This step's keys and values as rows of the pages, and the slot of each row."""

    rows: list[Any]  # [T, heads, D] for each array of pages
    slots: Any  # i32 [T] with padding; -1 for a row that is not written


def sequences(call: Any) -> Sequences:
    """The sequences of a call, whose index arrays may have any values. Sequences from `num_seqs` on have no rows."""
    edges = live_edges(call.cu_q_lens, call.num_seqs, call.num_tokens)
    lens = jnp.maximum(edges[1:] - edges[:-1], 0)
    return Sequences(edges[:-1], lens, jnp.clip(call.kv_lens, 0, call.capacity), call.page_indices)


def factors_of(call: Any) -> Factors:
    factor = per_head(call.k_scale, call.num_kv_heads) * jnp.float32(call.scale)
    if call.soft_cap is None:
        factor = factor * LOG2E
    return Factors(factor, per_head(call.v_scale, call.num_kv_heads), call.sinks)


@functools.partial(jax.jit, static_argnums=(0, 1))  # traced once per plan, even if a page table needs many launches
def attend(
    plan: Plan, vmem_limit_bytes: int, q: Any, pages: list[Any], scales: Any, seqs: Sequences, factors: Factors,
    key_ranges: Any, update: Update | None, out: Any, lse: Any,
) -> tuple[Any, Any, list[Any]]:  # fmt: skip
    """Out, lse and pages after a launch. It first writes `update`, and then processes the sequences of its `plan`."""
    computed = ((seqs.q_lens > 1) if plan.in_columns else (seqs.q_lens == 1)) & (seqs.kv_lens > 0)
    ranges, row_ranges = (None, None) if key_ranges is None else ranges_of(plan, seqs, computed, key_ranges)
    (order,) = jnp.nonzero(computed, size=len(computed), fill_value=0)
    scalars = (
        jnp.sum(computed, dtype=jnp.int32)[None],
        order.astype(jnp.int32),
        seqs._replace(pages=seqs.pages.reshape(-1)),
        factors,
        None if update is None else update.slots,
        ranges,
    )
    inputs = (q, row_ranges, *((None, scales, pages) if update is None else (update.rows, scales, None)))
    initial = (out, lse if plan.has_lse else None, None if update is None else pages)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    num_inputs, num_results = len(jax.tree.leaves((scalars, inputs))), len(jax.tree.leaves(initial))
    new_out, new_lse, new_pages = pl.pallas_call(
        lambda *refs: kernel(plan, Refs(*refs)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(plan.cores,),
            in_specs=jax.tree.map(lambda _: anywhere, (*inputs, initial)),
            out_specs=jax.tree.map(lambda _: anywhere, initial),
            scratch_shapes=scratch(plan, q, pages),
        ),
        out_shape=jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), initial),
        input_output_aliases={num_inputs + index: index for index in range(num_results)},
        compiler_params=compiler_params(vmem_limit_bytes, "parallel"),
        name=f"ragged_paged_attention_{'tiles' if plan.in_columns else 'decode'}",
    )(*scalars, *inputs, initial)
    return new_out, new_lse if plan.has_lse else lse, pages if update is None else new_pages
