"""The lightning indexer's logits in tiles: one kernel, and a call in its terms.

A *tile* is some query tokens of one sequence, all their heads one below the other, and goes over the columns a block
at a time. Keys lie in pieces of pages: the pieces of a block are fetched from HBM by one asynchronous copy each, into
one of two buffers, and the block after it, of the next tile too, is on its way while one is computed. Blocks that no
token of a tile sees are neither fetched nor computed.

Keys are the columns of the matrix product, so what an invisible one holds reaches no other; it is masked at the end.
Scales are factors of logits: XLA puts them in the order of a tile's columns, 4 bytes for each key of 16 to 1024.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ragged_attention.calls import dtype_name
from ragged_attention.errors import InvalidInput
from ragged_attention.jax_shared.pages import live_edges
from ragged_attention.kernels_pallas._blocks import (
    LANES,
    cannot_run,
    cdiv,
    expect_sizes,
    next_power_of_2,
    round_up,
)
from ragged_attention.kernels_pallas._latent_rows import from_bits

FEATURES = frozenset({
    "key_scale", "starts", "stops", "relative", "max_keys", "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "ratio",
})  # fmt: skip
MOST_COLUMNS = 2**30
MOST_PIECES = 32  # of a block; a word has a bit for each
LARGEST_PIECE = 256  # keys
SMALLEST_PIECE = 16  # which are whole registers of 16 bits; XLA puts the keys of smaller ones together first
PAGES_AT_ONCE = 64  # that XLA takes apart; of a whole cache at once it takes minutes to compile that
UNROLL = 8  # copies that are begun in one turn of a loop
LARGEST_INT = 2**31 - 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """What may be tuned.

    Args:
        num_keys_per_block: keys that are fetched and computed at once, a multiple of 128.
        num_queries_per_block: query tokens of a sequence that share a fetch of its keys.
        vmem_limit_bytes: vector memory that the compiler may use, 0 for its default.
    """

    num_keys_per_block: int = 512
    num_queries_per_block: int = 8
    vmem_limit_bytes: int = 0

    def __post_init__(self) -> None:
        expect_sizes(
            self, num_keys_per_block=(LANES, 4096), num_queries_per_block=(1, 64), vmem_limit_bytes=(0, LARGEST_INT)
        )
        if self.num_keys_per_block % LANES:
            raise InvalidInput(f"expected num_keys_per_block to be a multiple of 128, got {self.num_keys_per_block}")


def why_not(call: Any) -> str | None:
    if reason := cannot_run(call):
        return reason
    if (width := width_of(call)) > MOST_COLUMNS:
        return f"takes at most {MOST_COLUMNS} columns, got {width}"
    if (rows := call.keys.shape[0] * (call.page_size if call.paged else 1)) > LARGEST_INT:
        return f"numbers keys in int32, got {rows}"
    return None


def width_of(call: Any) -> int:
    """Columns of the logits in tiles: relative ones, too, are rows of the keys."""
    return call.columns if call.paged else call.keys.shape[0]


def heuristic(call: Any) -> Tile:
    """As many queries as sequences have in the mean, up to 8; no more keys than there are."""
    queries = 8
    if call.paged:
        queries = min(next_power_of_2(cdiv(call.num_tokens, max(call.kv_lens.shape[0], 1))), 8)
    keys = 512 if queries * round_up(call.num_heads, 8) <= 512 else 256
    return Tile(
        num_keys_per_block=min(keys, round_up(max(width_of(call), 1), LANES)), num_queries_per_block=max(queries, 1)
    )


# ---- a call in the kernel's terms


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Keys in pieces, and which of them each sequence's columns are; packed keys are one sequence."""

    keys: Any  # [N, unit, D]
    numbers: Any  # i32 [S, blocks, pieces of a block]; -1 where there is none
    scales: Any | None  # f32 [S, columns]
    known: Any | None  # bool [S, columns] where pieces do not tell which pages exist


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Query tokens in tiles."""

    token: Any  # i32 [tiles, rows]; any where there is none
    starts: Any  # i32 [tiles, rows], the first column that a row sees
    stops: Any  # and where it ends
    seq: Any  # i32 [tiles]
    of_token: Any | None  # i32 [T], the row in which each token is, -1 for none; None: tokens are the rows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the kernel is specialised to."""

    heads: int
    padded_heads: int  # a multiple of the rows of a register
    rows: int
    pieces: int
    unit: int
    blocks: int
    scaled: bool
    dtype: Any  # of matrix operands
    steps: int  # of a core

    @property
    def keys(self) -> int:
        """Keys of a block."""
        return self.pieces * self.unit


def pieces_of(call: Any, tile: Tile) -> Pieces:
    """The keys of a call in pieces: those of pages where they lie, or in blocks that XLA makes of them."""
    keys, scales = _keys_and_scales(call)
    size = tile.num_keys_per_block
    if not call.paged:
        blocks = cdiv(width_of(call), size)
        keys = jnp.pad(keys, ((0, blocks * size - width_of(call)), (0, 0))).reshape(blocks, size, -1)
        numbers = jnp.arange(blocks, dtype=jnp.int32)[None, :, None]
        return Pieces(keys=keys, numbers=numbers, scales=None if scales is None else scales[None], known=None)
    num_pages, page_size, head_dim = keys.shape
    exists = (call.page_indices >= 0) & (call.page_indices < num_pages)
    table = jnp.where(exists, call.page_indices, 0)
    num_seqs = len(table)
    if scales is not None:
        scales = scales[table].reshape(num_seqs, -1)
    unit = min(page_size & -page_size, size & -size, LARGEST_PIECE)
    pieces = math.gcd(size, MOST_PIECES * unit) // unit
    if unit < SMALLEST_PIECE or pieces * unit % LANES:
        blocks = cdiv(width_of(call), size)
        keys = keys[table].reshape(num_seqs, -1, head_dim)
        keys = jnp.pad(keys, ((0, 0), (0, blocks * size - width_of(call)), (0, 0))).reshape(-1, size, head_dim)
        numbers = jnp.arange(num_seqs * blocks, dtype=jnp.int32).reshape(num_seqs, blocks, 1)
        return Pieces(keys=keys, numbers=numbers, scales=scales, known=jnp.repeat(exists, page_size, axis=1))
    numbers = table[..., None] * (page_size // unit) + jnp.arange(page_size // unit, dtype=jnp.int32)
    numbers = jnp.where(exists[..., None], numbers, -1).reshape(num_seqs, -1)
    numbers = jnp.pad(numbers, ((0, 0), (0, -numbers.shape[1] % pieces)), constant_values=-1)
    numbers = numbers.reshape(num_seqs, -1, pieces)
    return Pieces(keys=keys.reshape(-1, unit, head_dim), numbers=numbers, scales=scales, known=None)


def _keys_and_scales(call: Any) -> tuple[Any, Any]:
    """Keys as the kernel loads them, 8 and 16 bits that are not bfloat16 as integers, and their scales."""
    keys, scales = call.keys, call.key_scale
    if call.bytes:
        page_size, head_dim = call.page_size, call.head_dim

        def planes(page: Any) -> tuple[Any, Any]:
            values, scales = jnp.split(page.reshape(-1), [page_size * head_dim])
            scales = lax.bitcast_convert_type(scales.reshape(page_size, 4), jnp.float32)
            return values.reshape(page_size, head_dim), scales

        return lax.map(planes, keys, batch_size=PAGES_AT_ONCE)
    if dtype_name(keys) == "float16":
        return lax.bitcast_convert_type(keys, jnp.int16), scales
    return lax.bitcast_convert_type(keys, jnp.uint8) if keys.dtype.itemsize == 1 else keys, scales


def rows_of(call: Any, rows: int) -> Rows:
    """The tokens of a call in tiles of `rows`."""
    return _rows_in_pages(call, rows) if call.paged else _rows_of_ranges(call, rows)


def _rows_of_ranges(call: Any, rows: int) -> Rows:
    limit = call.keys.shape[0]
    spare = -call.num_tokens % rows
    starts, stops = (jnp.pad(jnp.clip(edges, 0, limit), (0, spare)) for edges in (call.starts, call.stops))
    if call.max_keys is not None:
        stops = jnp.minimum(stops, starts + jnp.minimum(limit - starts, call.max_keys))
    token = jnp.minimum(jnp.arange(len(starts), dtype=jnp.int32), call.num_tokens - 1)
    token, starts, stops = (array.reshape(-1, rows) for array in (token, starts, stops))
    return Rows(token=token, starts=starts, stops=stops, seq=jnp.zeros(len(token), jnp.int32), of_token=None)


def _rows_in_pages(call: Any, rows: int) -> Rows:
    num_tokens, num_seqs = call.num_tokens, call.kv_lens.shape[0]
    edges = live_edges(call.cu_q_lens, call.num_seqs, num_tokens)
    starts, ends = edges[:-1], jnp.maximum(edges[:-1], edges[1:])
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    own = jnp.minimum(jnp.searchsorted(ends, token, side="right").astype(jnp.int32), num_seqs - 1)
    inside = (token >= starts[own]) & (token < ends[own])
    if rows == 1:
        seq, first, of_token = own, token, None
    else:
        tiles = cdiv(ends - starts, rows)
        behind = jnp.cumsum(tiles, dtype=jnp.int32)
        most = (num_tokens + min(num_seqs, num_tokens) * (rows - 1)) // rows
        tile = jnp.arange(most, dtype=jnp.int32)
        seq = jnp.minimum(jnp.searchsorted(behind, tile, side="right").astype(jnp.int32), num_seqs - 1)
        # A tile behind the last one begins behind its sequence, and so sees nothing.
        first = starts[seq] + (tile - (behind - tiles)[seq]) * rows
        of_token = (behind - tiles)[own] * rows + token - starts[own]
        of_token = jnp.where(inside, jnp.clip(of_token, 0, most * rows - 1), -1)
    rank = first[:, None] + jnp.arange(rows, dtype=jnp.int32)
    there = (rank >= starts[seq][:, None]) & (rank < ends[seq][:, None])
    lens = jnp.clip(call.kv_lens, 0, call.token_capacity)
    stops = jnp.maximum(lens[seq][:, None] - (ends[seq][:, None] - rank) + 1, 0) // min(call.ratio, LARGEST_INT)
    stops = jnp.where(there, stops, 0)
    token = jnp.clip(rank, 0, num_tokens - 1)
    return Rows(token=token, starts=jnp.zeros_like(stops), stops=stops, seq=seq, of_token=of_token)


def by_token(results: Any, rows: Rows, num_tokens: int, nothing: Any) -> Any:
    """Results of rows [tiles * rows, n] as those of tokens [T, n]; `nothing` for tokens of no sequence."""
    if rows.of_token is None:
        return results[:num_tokens]
    return jnp.where(rows.of_token[:, None] >= 0, results[jnp.maximum(rows.of_token, 0)], nothing)


def from_own_start(call: Any, logits: Any, starts: Any) -> Any:
    """Logits [R, N] of packed keys as the call's columns [R, columns]: if relative, each row from its own start."""
    if not call.relative:
        return logits
    logits = jnp.pad(logits, ((0, 0), (0, call.columns)), constant_values=-jnp.inf)
    return jax.vmap(lambda row, start: lax.dynamic_slice(row, (start,), (call.columns,)))(logits, starts)


def sees_nothing(call: Any) -> bool:
    """Whether there is nothing to see, by the shapes alone."""
    return 0 in (call.num_tokens, width_of(call), call.keys.shape[0]) or (call.paged and not call.kv_lens.shape[0])


# ---- the launch


def logits_of(call: Any, pieces: Pieces, rows: Rows, tile: Tile) -> Any:
    """Logits f32 [tiles, rows of a tile, columns], -inf where nothing is seen."""
    tiles = len(rows.seq)
    cores = max(1, call.device.num_multiprocessors)
    plan = _plan(call, pieces, rows, cores)
    spare = -tiles % cores

    def padded(array: Any) -> Any:
        return jnp.pad(array, ((0, spare), *[(0, 0)] * (array.ndim - 1)))

    q = call.q[rows.token].astype(plan.dtype)
    q = jnp.pad(q, ((0, spare), (0, 0), (0, plan.padded_heads - plan.heads), (0, 0)))
    weights = jnp.pad(call.weights[rows.token], ((0, spare), (0, -plan.rows % 8), (0, -plan.heads % LANES)))
    some = rows.starts < rows.stops
    edges = [jnp.where(some, rows.starts, LARGEST_INT), jnp.where(some, rows.stops, 0)]
    edges = padded(jnp.pad(jnp.stack(edges, axis=-1), ((0, 0), (0, 0), (0, LANES - 2))))
    operands = [q.reshape(len(q), -1, q.shape[-1]), weights, edges]
    if pieces.scales is not None:
        scales = pieces.scales if len(pieces.scales) == 1 else padded(pieces.scales[rows.seq])
        operands.append(scales[:, None])
    logits = _launch(plan, _lists(plan, pieces, padded(rows.seq), edges), operands, pieces.keys, width_of(call), tile)
    if pieces.known is not None:
        logits = jnp.where(padded(pieces.known[rows.seq])[:, None], logits, -jnp.inf)
    return logits[:tiles]


def _plan(call: Any, pieces: Pieces, rows: Rows, cores: int) -> Plan:
    _, blocks, count = pieces.numbers.shape
    narrow = {dtype_name(call.q), call.key_dtype} <= {"bfloat16", "float8_e4m3fn"}
    return Plan(
        heads=call.num_heads,
        padded_heads=round_up(call.num_heads, 8),
        rows=rows.token.shape[1],
        pieces=count,
        unit=pieces.keys.shape[1],
        blocks=blocks,
        scaled=pieces.scales is not None,
        dtype=jnp.dtype(jnp.bfloat16 if narrow else jnp.float32),
        steps=cdiv(len(rows.seq), cores) * blocks,
    )


def _lists(plan: Plan, pieces: Pieces, seq: Any, edges: Any) -> Any:
    """For scalar memory, of each block of each tile: its pieces, a bit for each that is valid, and whether it is seen.

    Pieces that are not valid are fetched from all over the keys: fetching the same one again and again would be slow.
    """
    ordinal = jnp.arange(plan.blocks * plan.pieces, dtype=jnp.int32).reshape(plan.blocks, -1)
    numbers = jnp.where(pieces.numbers >= 0, pieces.numbers, ordinal % len(pieces.keys))
    bits = jnp.uint32(1) << jnp.arange(plan.pieces, dtype=jnp.uint32)
    bits = jnp.where(pieces.numbers >= 0, bits, 0).sum(axis=-1, keepdims=True, dtype=jnp.uint32)
    lists = jnp.concatenate([numbers, lax.bitcast_convert_type(bits, jnp.int32)], axis=-1)[seq]
    first = jnp.arange(plan.blocks, dtype=jnp.int32) * plan.keys
    low, high = edges[..., 0].min(axis=1)[:, None], edges[..., 1].max(axis=1)[:, None]
    live = (first < high) & (first + plan.keys > low) & (lists[..., -1] != 0)
    lists = jnp.concatenate([lists, live[..., None].astype(jnp.int32)], axis=-1)
    return lists.reshape(-1, 1, lists.shape[-1])


def _launch(plan: Plan, lists: Any, operands: list[Any], keys: Any, columns: int, tile: Tile) -> Any:
    tiles = len(operands[0])

    def block_of(core: Any, step: Any) -> Any:
        return core * plan.steps + step

    def of_block(core: Any, step: Any) -> tuple[Any, ...]:
        return block_of(core, step), 0, 0

    def of_next(core: Any, step: Any) -> tuple[Any, ...]:
        return block_of(core, jnp.minimum(step + 1, plan.steps - 1)), 0, 0

    def of_tile(core: Any, step: Any) -> tuple[Any, ...]:
        return block_of(core, step) // plan.blocks, 0, 0

    def of_columns(core: Any, step: Any) -> tuple[Any, ...]:
        return block_of(core, step) // plan.blocks, 0, block_of(core, step) % plan.blocks

    def of_shared_columns(core: Any, step: Any) -> tuple[Any, ...]:
        return 0, 0, block_of(core, step) % plan.blocks

    specs = [pl.BlockSpec((None, *array.shape[1:]), of_tile) for array in operands[:3]]
    for scales in operands[3:]:
        specs.append(pl.BlockSpec((None, 1, plan.keys), of_columns if len(scales) == tiles else of_shared_columns))
    entries = (None, *lists.shape[1:])
    return pl.pallas_call(
        functools.partial(_kernel, plan),
        grid=(tiles * plan.blocks // plan.steps, plan.steps),
        in_specs=[
            pl.BlockSpec(entries, of_block, memory_space=pltpu.SMEM),
            pl.BlockSpec(entries, of_next, memory_space=pltpu.SMEM),
            *specs,
            pl.BlockSpec(memory_space=pltpu.HBM),
        ],
        out_specs=pl.BlockSpec((None, plan.rows, plan.keys), of_columns),
        out_shape=jax.ShapeDtypeStruct((tiles, plan.rows, columns), jnp.float32),
        scratch_shapes=[
            pltpu.VMEM((2, plan.pieces, *keys.shape[1:]), keys.dtype),
            pltpu.SemaphoreType.DMA((2,)),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            disable_bounds_checks=True,  # the numbers of pieces are those of keys that there are
            vmem_limit_bytes=tile.vmem_limit_bytes or None,
        ),
        name="indexer_logits",
    )(lists, lists, *operands, keys)


# ---- the kernel


def _kernel(plan: Plan, lists: Any, next_lists: Any, q: Any, weights: Any, edges: Any, *others: Any) -> None:
    """One block of columns of one tile. Each step begins the copies of the next one."""
    keys, out, buffer, arrived = others[-4:]
    scales = others[0] if plan.scaled else None
    step, slot = pl.program_id(1), pl.program_id(1) % 2
    valid, live = lists[0, plan.pieces], lists[0, plan.pieces + 1] != 0

    def start(numbers: Any, slot: Any) -> None:
        def one(piece: Any) -> None:
            pltpu.make_async_copy(keys.at[numbers[0, piece]], buffer.at[slot, piece], arrived.at[slot]).start()

        pl.loop(0, plan.pieces, unroll=math.gcd(plan.pieces, UNROLL))(one)

    pl.when((step == 0) & live)(lambda: start(lists, slot))
    more = (step < plan.steps - 1) & (next_lists[0, plan.pieces + 1] != 0)
    pl.when(more)(lambda: start(next_lists, 1 - slot))

    @pl.when(live)
    def _() -> None:
        pltpu.make_async_copy(buffer.at[slot], buffer.at[slot], arrived.at[slot]).wait()
        logits = _logits(q[...], _operand(buffer[slot], plan), weights[...], plan)
        if scales is not None:
            logits *= scales[...]
        lane = lax.broadcasted_iota(jnp.int32, (1, plan.keys), 1)
        column = block_column(step, plan) + lane
        seen = (column >= edges[:, :1]) & (column < edges[:, 1:2])
        if plan.pieces > 1:  # of one, being seen says that it is valid
            seen &= (valid >> (lane >> (plan.unit.bit_length() - 1))) & 1 != 0
        out[...] = jnp.where(seen, logits, -jnp.inf)

    @pl.when(jnp.logical_not(live))
    def _() -> None:
        out[...] = jnp.full(out.shape, -jnp.inf, jnp.float32)


def block_column(step: Any, plan: Plan) -> Any:
    """The first column of a step's block; a core has whole tiles."""
    return step % plan.blocks * plan.keys


def _operand(fetched: Any, plan: Plan) -> Any:
    """Fetched pieces as keys [keys of the block, D]."""
    if fetched.dtype == jnp.uint8:
        fetched = from_bits(fetched.astype(jnp.int32), exponent=4, mantissa=3)
    elif fetched.dtype == jnp.int16:
        fetched = from_bits(fetched.astype(jnp.int32) & 0xFFFF, exponent=5, mantissa=10)
    return fetched.reshape(plan.keys, -1).astype(plan.dtype)


def _logits(q: Any, keys: Any, weights: Any, plan: Plan) -> Any:
    """The weighted sums over heads, [rows, keys]."""
    precision = lax.Precision.HIGHEST if plan.dtype == jnp.float32 else None
    products = lax.dot_general(
        q, keys, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
    products = jnp.where(products < 0, 0.0, products)  # which keeps NaN
    weights = weights.T
    rows = []
    for row in range(plan.rows):
        first = row * plan.padded_heads
        own = products[first : first + plan.heads] * weights[: plan.heads, row : row + 1]
        rows.append(own.sum(axis=0, keepdims=True))
    return jnp.concatenate(rows, axis=0)
