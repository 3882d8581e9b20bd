"""The kernel of the lightning indexer's logits, which computes them tile by tile.

A *tile* is a few query tokens of one sequence with all their heads. Its columns (the keys) are computed in blocks. A
block consists of *pieces*, each a run of keys of one page; a block of packed keys is a single piece. A piece is fetched
from HBM by one asynchronous copy, into one of two buffers: while one block is processed, the next one is fetched, even
if it belongs to the next tile. Blocks that no token of a tile sees are neither fetched nor processed.

Keys are columns of the matrix product, so the contents of an invisible key affect only its own logit, which is masked
at the end. Logits are multiplied by the key scales, 4 bytes per key, which XLA first puts in the order of the columns.
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
from ragged_attention.jax_shared.pages import live_edges
from ragged_attention.kernels_pallas._blocks import (
    LANES,
    LARGEST_INT,
    MAX_PIECES,
    bits_of_valid,
    cannot_run,
    cdiv,
    compiler_params,
    expect_sizes,
    next_power_of_2,
    product,
    round_up,
    start_pieces,
)
from ragged_attention.kernels_pallas._latent_rows import numbers, words_of

FEATURES = frozenset({
    "key_scale", "starts", "stops", "relative", "max_keys", "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "ratio",
})  # fmt: skip
MAX_COLUMNS = 2**30
MAX_PIECE_KEYS = 256
MIN_PIECE_KEYS = 16  # 16 rows of 16-bit numbers fill a register; if pieces would be smaller, XLA first joins the pages
PAGES_AT_ONCE = 64  # pages that XLA separates into keys and scales at once; for a whole cache, compiling takes minutes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The tunable parameters.

    Args:
        num_keys_per_block: keys fetched and processed together, a multiple of 128.
        num_queries_per_block: query tokens of a sequence that share one fetch of its keys.
        vmem_limit_bytes: bytes of VMEM that the compiler may use; 0 is its default.
    """

    num_keys_per_block: int = 512
    num_queries_per_block: int = 8
    vmem_limit_bytes: int = 0

    def __post_init__(self) -> None:
        expect_sizes(
            self, num_keys_per_block=(LANES, 4096, LANES), num_queries_per_block=(1, 64),
            vmem_limit_bytes=(0, LARGEST_INT),
        )  # fmt: skip


def why_not(call: Any) -> str | None:
    if reason := cannot_run(call):
        return reason
    if (width := width_of(call)) > MAX_COLUMNS:
        return f"takes at most {MAX_COLUMNS} columns, got {width}"
    if (rows := call.keys.shape[0] * (call.page_size if call.paged else 1)) > LARGEST_INT:
        return f"numbers keys in int32, got {rows}"
    return None


def width_of(call: Any) -> int:
    """Columns of the kernel's logits. With packed keys, there is one column per key, even in a relative call."""
    return call.columns if call.paged else call.keys.shape[0]


def heuristic(call: Any) -> Tile:
    """Tiles of 8 queries, or fewer if sequences have fewer queries on average, and blocks of up to 512 keys."""
    queries = 8
    if call.paged:
        queries = min(next_power_of_2(cdiv(call.num_tokens, max(call.kv_lens.shape[0], 1))), 8)
    keys = 512 if queries * round_up(call.num_heads, 8) <= 512 else 256
    return Tile(
        num_keys_per_block=min(keys, round_up(max(width_of(call), 1), LANES)), num_queries_per_block=max(queries, 1)
    )


# ---- describing a call to the kernel


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """The keys in pieces, and the list of each sequence's pieces. Packed keys count as one sequence."""

    keys: Any  # [N, keys per piece, D]
    numbers: Any  # i32 [S, blocks, pieces per block], indices in `keys`; -1 for a piece of a page that does not exist
    scales: Any | None  # f32 [S, columns]
    known: Any | None  # bool [S, columns], whether each column's page exists; None if `numbers` shows it


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The query tokens as rows of tiles. A row without a token sees no column."""

    token: Any  # i32 [tiles, rows]; for rows without a token, any valid token
    starts: Any  # i32 [tiles, rows], the first column that a row sees
    stops: Any  # i32 [tiles, rows], one past the last column that a row sees
    seq: Any  # i32 [tiles], the sequence of each tile
    of_token: Any | None  # i32 [T], the row of each token, or -1 if it has none; None: row i is token i


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The static parameters of the kernel."""

    heads: int
    padded_heads: int  # `heads`, rounded up to the rows of a register
    rows: int  # rows per tile
    pieces: int  # pieces per block
    piece_keys: int  # keys per piece
    blocks: int  # blocks per tile
    dtype: Any  # the dtype of matrix operands
    steps: int  # grid steps per core

    @property
    def keys(self) -> int:
        """Keys per block."""
        return self.pieces * self.piece_keys


def pieces_of(call: Any, tile: Tile) -> Pieces:
    """The keys of a call in pieces: parts of pages, or whole blocks if keys are packed or XLA has to join pages."""
    keys, scales = _keys_and_scales(call)
    size, width, head_dim = tile.num_keys_per_block, width_of(call), keys.shape[-1]
    if not call.paged:
        keys, scales, known = keys[None], None if scales is None else scales[None], None
    else:
        num_pages, page_size, _ = keys.shape
        exists = (call.page_indices >= 0) & (call.page_indices < num_pages)
        table = jnp.where(exists, call.page_indices, 0)
        num_seqs = len(table)
        if scales is not None:
            scales = scales[table].reshape(num_seqs, -1)
        piece_keys = min(page_size & -page_size, size & -size, MAX_PIECE_KEYS)
        count = math.gcd(size, MAX_PIECES * piece_keys) // piece_keys
        if piece_keys >= MIN_PIECE_KEYS and count * piece_keys % LANES == 0:
            per_page = page_size // piece_keys
            numbers = table[..., None] * per_page + jnp.arange(per_page, dtype=jnp.int32)
            numbers = jnp.where(exists[..., None], numbers, -1).reshape(num_seqs, -1)
            numbers = jnp.pad(numbers, ((0, 0), (0, -numbers.shape[1] % count)), constant_values=-1)
            numbers = numbers.reshape(num_seqs, -1, count)
            return Pieces(keys=keys.reshape(-1, piece_keys, head_dim), numbers=numbers, scales=scales, known=None)
        keys, known = keys[table].reshape(num_seqs, -1, head_dim), jnp.repeat(exists, page_size, axis=1)
    blocks = cdiv(width, size)
    numbers = jnp.arange(len(keys) * blocks, dtype=jnp.int32).reshape(-1, blocks, 1)
    keys = jnp.pad(keys, ((0, 0), (0, blocks * size - width), (0, 0))).reshape(-1, size, head_dim)
    return Pieces(keys=keys, numbers=numbers, scales=scales, known=known)


def _keys_and_scales(call: Any) -> tuple[Any, Any]:
    """The keys in a dtype that the kernel can load (float16 and all 8-bit dtypes as integers), and their scales."""
    keys, scales = call.keys, call.key_scale
    if call.bytes:
        page_size, head_dim = call.page_size, call.head_dim

        def separated(page: Any) -> tuple[Any, Any]:
            values, scales = jnp.split(page.reshape(-1), [page_size * head_dim])
            scales = lax.bitcast_convert_type(scales.reshape(page_size, 4), jnp.float32)
            return values.reshape(page_size, head_dim), scales

        return lax.map(separated, keys, batch_size=PAGES_AT_ONCE)
    return words_of(keys), scales


def rows_of(call: Any, rows: int) -> Rows:
    """The tokens of a call in tiles of `rows` rows."""
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
        past = jnp.cumsum(tiles, dtype=jnp.int32)  # one past the last tile of each sequence
        most = (num_tokens + min(num_seqs, num_tokens) * (rows - 1)) // rows
        tile = jnp.arange(most, dtype=jnp.int32)
        seq = jnp.minimum(jnp.searchsorted(past, tile, side="right").astype(jnp.int32), num_seqs - 1)
        # Tiles after the last one start after the last sequence's end, so they see nothing.
        first = starts[seq] + (tile - (past - tiles)[seq]) * rows
        of_token = (past - tiles)[own] * rows + token - starts[own]
        of_token = jnp.where(inside, jnp.clip(of_token, 0, most * rows - 1), -1)
    index = first[:, None] + jnp.arange(rows, dtype=jnp.int32)
    has_token = (index >= starts[seq][:, None]) & (index < ends[seq][:, None])
    lens = jnp.clip(call.kv_lens, 0, call.token_capacity)
    stops = jnp.maximum(lens[seq][:, None] - (ends[seq][:, None] - index) + 1, 0) // min(call.ratio, LARGEST_INT)
    stops = jnp.where(has_token, stops, 0)
    token = jnp.clip(index, 0, num_tokens - 1)
    return Rows(token=token, starts=jnp.zeros_like(stops), stops=stops, seq=seq, of_token=of_token)


def by_token(results: Any, rows: Rows, num_tokens: int, nothing: Any) -> Any:
    """Reorder the results of rows [tiles * rows, n] by token, [T, n]. Tokens outside all sequences get `nothing`."""
    if rows.of_token is None:
        return results[:num_tokens]
    return jnp.where(rows.of_token[:, None] >= 0, results[jnp.maximum(rows.of_token, 0)], nothing)


def from_own_start(call: Any, logits: Any, starts: Any) -> Any:
    """Convert the kernel's logits to the call's [R, columns]: in a relative call, columns count from a row's start."""
    if not call.relative:
        return logits
    logits = jnp.pad(logits, ((0, 0), (0, call.columns)), constant_values=-jnp.inf)
    return jax.vmap(lambda row, start: lax.dynamic_slice(row, (start,), (call.columns,)))(logits, starts)


def sees_nothing(call: Any) -> bool:
    """Whether the shapes show that no token sees a key."""
    return 0 in (call.num_tokens, width_of(call), call.keys.shape[0]) or (call.paged and not call.kv_lens.shape[0])


def pad_rows(array: Any, spare: int) -> Any:
    """An array with `spare` zeros appended along its first axis."""
    return jnp.pad(array, ((0, spare), *[(0, 0)] * (array.ndim - 1)))


# ---- the launch


def logits_of(call: Any, pieces: Pieces, rows: Rows, tile: Tile) -> Any:
    """Logits f32 [tiles, rows per tile, columns]; columns that a row does not see get -inf."""
    tiles = len(rows.seq)
    cores = max(1, call.device.num_multiprocessors)
    plan = _plan(call, pieces, rows, cores)
    spare = -tiles % cores
    padded = functools.partial(pad_rows, spare=spare)
    q = call.q[rows.token].astype(plan.dtype)
    q = jnp.pad(q, ((0, spare), (0, 0), (0, plan.padded_heads - plan.heads), (0, 0)))
    weights = jnp.pad(call.weights[rows.token], ((0, spare), (0, -plan.rows % 8), (0, -plan.heads % LANES)))
    sees_keys = rows.starts < rows.stops
    edges = [jnp.where(sees_keys, rows.starts, LARGEST_INT), jnp.where(sees_keys, rows.stops, 0)]
    edges = padded(jnp.pad(jnp.stack(edges, axis=-1), ((0, 0), (0, 0), (0, LANES - 2))))
    scales = None
    if pieces.scales is not None:
        scales = (pieces.scales if len(pieces.scales) == 1 else padded(pieces.scales[rows.seq]))[:, None]
    operands = (q.reshape(len(q), -1, q.shape[-1]), weights, edges, scales)
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
        piece_keys=pieces.keys.shape[1],
        blocks=blocks,
        dtype=jnp.dtype(jnp.bfloat16 if narrow else jnp.float32),
        steps=cdiv(len(rows.seq), cores) * blocks,
    )


def _lists(plan: Plan, pieces: Pieces, seq: Any, edges: Any) -> Any:
    """For each block of each tile: its pieces, a mask of the valid pieces, and whether to compute the block.

    Invalid entries fetch a piece too: entry i fetches piece i, modulo the number of pieces. They do not all fetch the
    same piece, because repeated copies of one piece would be slow.
    """
    ordinal = jnp.arange(plan.blocks * plan.pieces, dtype=jnp.int32).reshape(plan.blocks, -1)
    numbers = jnp.where(pieces.numbers >= 0, pieces.numbers, ordinal % len(pieces.keys))
    lists = jnp.concatenate([numbers, bits_of_valid(pieces.numbers)[..., None]], axis=-1)[seq]
    first = jnp.arange(plan.blocks, dtype=jnp.int32) * plan.keys
    low, high = edges[..., 0].min(axis=1)[:, None], edges[..., 1].max(axis=1)[:, None]
    live = (first < high) & (first + plan.keys > low) & (lists[..., -1] != 0)
    lists = jnp.concatenate([lists, live[..., None].astype(jnp.int32)], axis=-1)
    return lists.reshape(-1, 1, lists.shape[-1])


def _launch(plan: Plan, lists: Any, operands: tuple[Any, ...], keys: Any, columns: int, tile: Tile) -> Any:
    """The logits of all tiles. `operands` are q, weights, edges, and scales or None."""
    tiles, scales = len(operands[0]), operands[3]

    def block_of(core: Any, step: Any) -> Any:
        return core * plan.steps + step

    def of_columns(core: Any, step: Any) -> tuple[Any, ...]:
        return block_of(core, step) // plan.blocks, 0, block_of(core, step) % plan.blocks

    specs: list[Any] = [
        pl.BlockSpec((None, *array.shape[1:]), lambda core, step: (block_of(core, step) // plan.blocks, 0, 0))
        for array in operands[:3]
    ]
    shared = scales is None or len(scales) != tiles
    of_scales = (lambda core, step: (0, 0, block_of(core, step) % plan.blocks)) if shared else of_columns
    specs.append(None if scales is None else pl.BlockSpec((None, 1, plan.keys), of_scales))
    entries, last = (None, *lists.shape[1:]), plan.steps - 1
    return pl.pallas_call(
        functools.partial(_kernel, plan),
        grid=(tiles * plan.blocks // plan.steps, plan.steps),
        in_specs=[
            pl.BlockSpec(entries, lambda core, step: (block_of(core, step), 0, 0), memory_space=pltpu.SMEM),
            pl.BlockSpec(
                entries, lambda core, step: (block_of(core, jnp.minimum(step + 1, last)), 0, 0), memory_space=pltpu.SMEM
            ),
            *specs,
            pl.BlockSpec(memory_space=pltpu.HBM),
        ],
        out_specs=pl.BlockSpec((None, plan.rows, plan.keys), of_columns),
        out_shape=jax.ShapeDtypeStruct((tiles, plan.rows, columns), jnp.float32),
        scratch_shapes=[
            pltpu.VMEM((2, plan.pieces, *keys.shape[1:]), keys.dtype),
            pltpu.SemaphoreType.DMA((2,)),
        ],
        compiler_params=compiler_params(tile.vmem_limit_bytes, "parallel", "arbitrary"),
        name="indexer_logits",
    )(lists, lists, *operands, keys)


# ---- the kernel


def _kernel(
    plan: Plan, lists: Any, next_lists: Any, q: Any, weights: Any, edges: Any, scales: Any, keys: Any, out: Any,
    buffer: Any, arrived: Any,
) -> None:  # fmt: skip
    """Compute the logits of one block of columns of one tile, after starting the copies for the next step."""
    step, slot = pl.program_id(1), pl.program_id(1) % 2
    valid, live = lists[0, plan.pieces], lists[0, plan.pieces + 1] != 0

    def start(numbers: Any, slot: Any) -> None:
        def fetch_piece(piece: Any) -> None:
            pltpu.make_async_copy(keys.at[numbers[0, piece]], buffer.at[slot, piece], arrived.at[slot]).start()

        start_pieces(plan.pieces, fetch_piece)

    pl.when((step == 0) & live)(lambda: start(lists, slot))
    next_live = (step < plan.steps - 1) & (next_lists[0, plan.pieces + 1] != 0)
    pl.when(next_live)(lambda: start(next_lists, 1 - slot))

    @pl.when(live)
    def _() -> None:
        pltpu.make_async_copy(buffer.at[slot], buffer.at[slot], arrived.at[slot]).wait()
        logits = _logits(q[...], _operand(buffer[slot], plan), weights[...], plan)
        if scales is not None:
            logits *= scales[...]
        lane = lax.broadcasted_iota(jnp.int32, (1, plan.keys), 1)
        column = step % plan.blocks * plan.keys + lane  # a core's first block is the first of a tile
        seen = (column >= edges[:, :1]) & (column < edges[:, 1:2])
        if plan.pieces > 1:  # a block of one piece is live only if the piece is valid
            seen &= (valid >> (lane >> (plan.piece_keys.bit_length() - 1))) & 1 != 0
        out[...] = jnp.where(seen, logits, -jnp.inf)

    @pl.when(jnp.logical_not(live))
    def _() -> None:
        out[...] = jnp.full(out.shape, -jnp.inf, jnp.float32)


def _operand(fetched: Any, plan: Plan) -> Any:
    """The fetched pieces as a matrix operand [keys per block, D]."""
    if fetched.dtype == jnp.uint8:
        fetched = numbers(fetched.astype(jnp.int32), "float8_e4m3fn")
    elif fetched.dtype == jnp.int16:
        fetched = numbers(fetched.astype(jnp.int32) & 0xFFFF, "float16")
    return fetched.reshape(plan.keys, -1).astype(plan.dtype)


def _logits(q: Any, keys: Any, weights: Any, plan: Plan) -> Any:
    """The logits [rows, keys]: weighted sums over a row's heads of the positive parts of the products."""
    products = product(q, keys, 1, 1)
    products = jnp.where(products < 0, 0.0, products)  # a ReLU that keeps NaN
    weights = weights.T
    rows = []
    for row in range(plan.rows):
        first = row * plan.padded_heads
        own = products[first : first + plan.heads] * weights[: plan.heads, row : row + 1]
        rows.append(own.sum(axis=0, keepdims=True))
    return jnp.concatenate(rows, axis=0)
