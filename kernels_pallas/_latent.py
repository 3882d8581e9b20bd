"""The kernel that computes attention over a latent cache for all operations.

A *job* is a set of query rows that share a list of keys. The rows are heads, or heads of several query tokens in a
dense call. The list consists of *pieces* of the cache. In a sparse call, a piece is a single row. In a dense call, it
is usually a run of rows of a page. The kernel processes a job's list in blocks of keys. A dense list is in order of
position, so the kernel skips the blocks that no token of the job sees. Each piece of a block is fetched from HBM by one
asynchronous copy, into one of two buffers: while a block is processed, the next block is fetched, even if it belongs to
the next job. A buffer has one semaphore, and the kernel waits once for all copies into it.

A TPU packs 2 rows of 16 bits, or 4 rows of 8 bits, into the same 32-bit words, and copies whole words. So the kernel
views the cache as groups of rows that share words, `[groups, 2 or 4, d]`: a selected row arrives with its group, and
its bits are extracted from the words by shifts. If the cache has the memory layout `row_layout`, this view needs no
copy. XLA first copies a cache in any other layout. It always copies a float16 cache, because no TPU computes with
float16.

A row is fetched once and serves as both key and value. A row that no token of the job sees (its position is beyond
the length, or its index is invalid) is zeroed while it is still in words, so its contents cannot matter. `_latent_rows`
turns quantised rows into matrix operands.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.layout import Layout
from jax.experimental.pallas import tpu as pltpu

from ragged_attention.calls import CacheFormat, MlaDecode, RaggedMlaAttention, SparseMlaPrefill, dtype_name
from ragged_attention.jax_shared.logits import soft_capped, window_of
from ragged_attention.jax_shared.pages import per_head
from ragged_attention.kernels_pallas import _latent_rows
from ragged_attention.kernels_pallas._blocks import (
    LANES,
    LARGEST_INT,
    MAX_PIECES,
    bits_of_valid,
    cannot_run,
    cdiv,
    compiler_params,
    expect_sizes,
    product,
    reset_softmax,
    round_up,
    start_pieces,
    written_dtype,
)
from ragged_attention.kernels_pallas._latent_jobs import Jobs, Tokens, jobs_of, num_tiles

MAX_KEYS = 2048  # maximum keys per block
MAX_ROWS = 512  # maximum query rows processed together if they are bfloat16, else half as many
LONGEST_CHUNK = 2048  # maximum pieces per chunk, the part of a list that a grid step has in scalar memory
MAX_PIECE_ROWS = 256  # maximum rows of a page that one copy fetches


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The tunable parameters.

    Args:
        num_keys_per_block: keys fetched and processed together, a multiple of 16.
        vmem_limit_bytes: bytes of VMEM that the compiler may use; 0 is its default.
    """

    num_keys_per_block: int = 128
    vmem_limit_bytes: int = 0

    def __post_init__(self) -> None:
        expect_sizes(self, num_keys_per_block=(16, MAX_KEYS, 16), vmem_limit_bytes=(0, LARGEST_INT))


def rows_per_word(dtype: Any) -> int:
    """The number of rows of a cache that share a 32-bit word."""
    return 4 // jnp.dtype(dtype).itemsize


def row_layout(dtype: Any, rank: int = 4) -> Layout:
    """The layout of a cache [P, G, 1, ...], or of packed rows [s_kv, 1, ...], that the kernels read without a copy.

    `jax.device_put(cache, Format(row_layout(cache.dtype), sharding))` gives a cache this layout, and
    `jax.jit(..., in_shardings=..., out_shardings=...)` with such formats keeps it. The number of rows in a page, or of
    packed rows, should be a multiple of `rows_per_word(dtype)`.
    """
    packing = rows_per_word(dtype)
    tiling = ((packing, LANES), (packing, 1)) if packing > 1 else ((1, LANES),)
    return Layout(major_to_minor=(0, 2, 1, 3) if rank == 4 else (1, 0, 2), tiling=tiling)


def why_not(call: MlaDecode | RaggedMlaAttention | SparseMlaPrefill) -> str | None:
    """Why the kernel does not take a call, or None."""
    if reason := cannot_run(call):
        return reason
    if dtype_name(call.q) == "float64":
        return "takes q.dtype of at most 32 bits, got float64"
    for form in (call.kv_format, getattr(call, "extra_kv_format", call.kv_format)):
        if (reason := _latent_rows.refusal(form)) is not None:
            return reason
    for cache in (getattr(call, "kv", None), getattr(call, "kv_cache", None), getattr(call, "extra_kv_cache", None)):
        rows = 0 if cache is None else math.prod(cache.shape[:-1])
        if rows > LARGEST_INT:
            return f"numbers rows in int32, got {rows // call.num_kv_heads} slots of {call.num_kv_heads} KV heads"
    return None


def keys_per_block(longest: int, most: int = 128) -> int:
    """Keys per block for lists of up to `longest` keys: that number, rounded up to a multiple of 16, at most `most`."""
    return min(most, round_up(max(longest, 1), 16))


# ---- describing a call to the kernel


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """A cache as the kernel reads it, and L lists of its pieces."""

    cache: Any  # [pieces, groups per piece, rows per group, columns]
    pieces: Any  # i32 [L, N], indices of pieces, or of rows if `selects`; -1 for an invalid piece
    lens: Any | None = None  # i32 [L], the keys of each list, if lists are in order of position; else None
    selects: bool = False  # whether entries of the lists select single rows, not whole pieces


def valid_slots(indices: Any, lens: Any, num_slots: int) -> Any:
    """Lists of slots [..., N], in which entries that are out of range or beyond a list's length are replaced by -1."""
    valid = (indices >= 0) & (indices < num_slots)
    if lens is not None:
        lens = lens.reshape(lens.shape + (1,) * (indices.ndim - lens.ndim))
        valid &= jnp.arange(indices.shape[-1], dtype=jnp.int32) < lens
    return jnp.where(valid, indices, -1)


def selected_rows(cache: Any, rows: Any, lens: Any = None) -> Keys:
    """Lists of single rows, by their indices [L, N] among all rows of `cache` [..., columns]; -1 selects no row."""
    cache = _latent_rows.words_of(cache).reshape(-1, cache.shape[-1])
    packing = rows_per_word(cache.dtype)
    if missing := -len(cache) % packing:
        cache = jnp.pad(cache, ((0, missing), (0, 0)))
    return Keys(cache=cache.reshape(-1, 1, packing, cache.shape[-1]), pieces=rows, lens=lens, selects=True)


def piece_rows_of(page_size: int, dtype: Any) -> int | None:
    """The rows of a page that one copy fetches, a power of two; None if rows of different pages share words."""
    piece_rows = min(page_size & -page_size, MAX_PIECE_ROWS)
    return piece_rows if piece_rows % rows_per_word(dtype) == 0 else None


def whole_pages(cache: Any, page_indices: Any, kv_lens: Any, piece_rows: int) -> Keys:
    """Lists of each sequence's pages of `cache` [P, G, 1, columns], up to `kv_lens`, in pieces of `piece_rows` rows."""
    num_pages, page_size, _, width = cache.shape
    cache = _latent_rows.words_of(cache)
    packing = rows_per_word(cache.dtype)
    per_page = page_size // piece_rows
    first = jnp.where((page_indices >= 0) & (page_indices < num_pages), page_indices * per_page, -1)
    pieces = first[..., None] + jnp.arange(per_page, dtype=jnp.int32)
    pieces = jnp.where(first[..., None] >= 0, pieces, -1).reshape(len(page_indices), -1)
    in_sequence = jnp.arange(pieces.shape[1], dtype=jnp.int32) < cdiv(kv_lens, piece_rows)[:, None]
    cache = cache.reshape(-1, piece_rows // packing, packing, width)
    return Keys(cache=cache, pieces=jnp.where(in_sequence, pieces, -1), lens=kv_lens)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One launch: tiles of query rows, and lists of keys. Without `jobs`, tile i attends to list i."""

    call: Any
    q: Any  # [tiles, rows, d_qk]
    keys: Keys
    extra: Keys | None = None  # a second list of single rows for each list of `keys`, from another cache
    jobs: Jobs | None = None  # the jobs of tiles whose rows are the heads of consecutive tokens
    heads: int = 1  # query rows per token
    sinks: Any = None  # f32 [kinds, rows]; list i has sinks[i % kinds]
    form: CacheFormat | None = None  # the format of the caches of `keys` and `extra`; None: the format of the call
    split_weights_below: int = 0  # jobs that see at most this many keys use two bfloat16 terms per weight


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The static parameters of the kernel."""

    form: CacheFormat
    selects: bool  # as in `Keys`
    pieces: int  # pieces per block
    piece_rows: int  # rows that are fetched for one piece
    packing: int  # rows per group, which share words
    blocks: int  # maximum blocks per chunk
    chunks: int  # chunks per list; a grid step computes one
    first_extra: int  # index of the first chunk of the second cache's list
    tiles: int  # tiles into which a job's rows are divided; several if the heads of one token do not fit in one tile
    jobs_per_core: int
    cores: int
    kinds: int  # number of different sink vectors, see `Work.sinks`; 0 if there are no sinks
    by_tokens: bool  # whether rows belong to tokens of sequences, whose positions decide which keys they see
    shares: bool  # whether a tile may have several jobs
    split_weights_below: int  # as in `Work`; 0: never
    causal: bool
    window: int | None
    soft_cap: float | None
    d_v: int
    dtype: Any  # the dtype of matrix operands

    @property
    def keys(self) -> int:
        """Keys per block."""
        return self.pieces if self.selects else self.pieces * self.piece_rows

    @property
    def words(self) -> int:
        """Rows of 32-bit words per block."""
        return self.pieces * self.piece_rows // self.packing

    @property
    def decodes(self) -> bool:
        """Whether stored values reach the kernel as integers, which `_latent_rows` decodes."""
        return self.form.codes not in ("bfloat16", "float32")

    @property
    def unpacks_pages(self) -> bool:
        """Whether the kernel unpacks page rows from words. A block's keys are then ordered by their index in a word."""
        return self.packing > 1 and self.decodes

    @property
    def steps(self) -> int:
        """Grid steps per core."""
        return self.jobs_per_core * self.chunks

    # The following functions find the job and list of a core's step, and the block that the step needs of each array.

    def job(self, core: Any, step: Any) -> tuple[Any, Any]:
        """The job that a step computes, and the index of the step's tile in that job."""
        index = core * self.jobs_per_core + step // self.chunks
        return index // self.tiles, index % self.tiles

    def of_queries(self, core: Any, step: Any, _: Any, jobs: Jobs | None) -> tuple[Any, ...]:
        job, tile = self.job(core, step)
        return (job if jobs is None else jobs.tiles[job]) * self.tiles + tile, 0, 0

    def of_tile(self, core: Any, step: Any, *_: Any) -> tuple[Any, ...]:
        return self.job(core, step)[1], 0, 0

    def list_of(self, core: Any, step: Any, jobs: Jobs | None) -> Any:
        job = self.job(core, step)[0]
        return job if jobs is None else jobs.lists[job]

    def of_kind(self, core: Any, step: Any, _: Any, jobs: Jobs | None) -> tuple[Any, ...]:
        kind = self.list_of(core, step, jobs) % self.kinds
        return kind * self.tiles + self.job(core, step)[1], 0, 0

    def of_chunk(self, core: Any, step: Any, _: Any, jobs: Jobs | None) -> tuple[Any, ...]:
        return self.list_of(core, step, jobs) * self.chunks + step % self.chunks, 0, 0

    def of_next_chunk(self, core: Any, step: Any, *scalars: Any) -> tuple[Any, ...]:
        return self.of_chunk(core, jnp.minimum(step + 1, self.steps - 1), *scalars)


def max_rows(call: Any) -> int:
    """The maximum number of query rows that the kernel processes together."""
    return MAX_ROWS if dtype_name(call.q) == "bfloat16" else MAX_ROWS // 2


def cores_of(call: Any) -> int:
    return max(1, call.device.num_multiprocessors)


def table_bytes(call: Any) -> int:
    """Bytes of scalar memory for the table of a launch's jobs."""
    return call.device.scalar_memory // 2


def run_tokens(work: Work, tokens: Tokens, size: int, tile: Tile) -> tuple[Any, Any]:
    """The results of `work`, whose q is [T, H, d_qk] and whose sinks are [kinds, H], in tiles of up to `size` tokens.

    They are out [T, H, d_v] and lse [T, H].
    """
    call, (num_tokens, heads, d_qk) = work.call, work.q.shape
    size = max(1, min(size, num_tokens, max_rows(call) // heads))
    step = size * cores_of(call)
    # The table of a launch's jobs must fit in scalar memory. A launch has at most one job per token.
    together = max(table_bytes(call) // (4 * len(Jobs._fields)) // step, 1) * step
    sinks = None if work.sinks is None else jnp.tile(work.sinks, (1, size))

    def attend(first: int) -> tuple[Any, Any]:
        own = tokens.part(first, together)
        count, tiles = len(own.lists), num_tiles(len(own.lists), size, cores_of(call))
        q = jnp.pad(work.q[first : first + count], ((0, tiles * size - count), (0, 0), (0, 0)))
        part = dataclasses.replace(
            work, q=q.reshape(tiles, -1, d_qk), jobs=jobs_of(own, size, cores_of(call)), heads=heads, sinks=sinks
        )
        out, _, lse = run(part, tile)
        return out.reshape(-1, heads, call.d_v)[:count], lse.reshape(-1, heads)[:count]

    parts = [attend(first) for first in range(0, num_tokens, together)]
    out, lse = (arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return out, lse


def run(work: Work, tile: Tile) -> tuple[Any, Any, Any]:
    """Out [tiles, rows, d_v] in the call's dtype; max_logits and lse [tiles, rows] in float32."""
    call = work.call
    count, rows, _ = work.q.shape
    tiles = cdiv(rows, max_rows(call))
    rows_per_tile = round_up(cdiv(rows, tiles), 16 if dtype_name(call.q) == "bfloat16" else 8)

    def tiled(array: Any) -> Any:
        """An array [N, rows, ...] as [N * tiles, rows per tile, ...]."""
        array = jnp.pad(array, ((0, 0), (0, tiles * rows_per_tile - rows), *[(0, 0)] * (array.ndim - 2)))
        return array.reshape(-1, rows_per_tile, *array.shape[2:])

    plan = _plan(work, tile, tiles)

    def in_all_lanes(values: Any) -> Any:
        return None if values is None else tiled(jnp.broadcast_to(values[..., None], (*values.shape, LANES)))

    q = tiled(_latent_rows.reorder(work.q.astype(plan.dtype), plan.form))
    tokens = jnp.arange(rows, dtype=jnp.int32)[None] // work.heads if plan.by_tokens else None
    out, stats = _launch(plan, work, (q, in_all_lanes(tokens), in_all_lanes(work.sinks)), written_dtype(call), tile)
    out = out.reshape(count, tiles * rows_per_tile, -1)[:, :rows]
    out = _latent_rows.restore(out, plan.form, plan.d_v).astype(call.result_dtype)
    stats = stats.reshape(count, tiles, 8, rows_per_tile).swapaxes(1, 2).reshape(count, 8, -1)[:, :, :rows]
    return out, stats[:, 0], stats[:, 1]


def _plan(work: Work, tile: Tile, tiles: int) -> Plan:
    call, keys = work.call, work.keys
    _, groups, packing, _ = keys.cache.shape
    piece_rows = groups * packing
    pieces = tile.num_keys_per_block // (1 if keys.selects else piece_rows)
    if not keys.selects:
        pieces = max(1, min(pieces, keys.pieces.shape[1], MAX_PIECES))
    lengths = [part.pieces.shape[1] for part in (keys, work.extra) if part is not None]
    blocks = min(max(1, LONGEST_CHUNK // pieces), max(cdiv(length, pieces) for length in lengths))
    chunks = [cdiv(length, blocks * pieces) for length in lengths]
    jobs = (len(work.q) if work.jobs is None else len(work.jobs.lists)) * tiles
    cores = cores_of(call) if jobs % cores_of(call) == 0 else 1
    by_tokens, soft_cap = work.jobs is not None, getattr(call, "soft_cap", None)
    return Plan(
        form=work.form or call.kv_format,
        selects=keys.selects,
        pieces=pieces,
        piece_rows=piece_rows,
        packing=packing,
        blocks=blocks,
        chunks=sum(chunks),
        first_extra=chunks[0],
        tiles=tiles,
        jobs_per_core=jobs // cores,
        cores=cores,
        kinds=0 if work.sinks is None else len(work.sinks),
        by_tokens=by_tokens,
        shares=jobs > len(work.q) * tiles,
        split_weights_below=work.split_weights_below if dtype_name(call.q) == "bfloat16" else 0,
        causal=by_tokens and call.causal,
        window=window_of(call, call.capacity) if by_tokens else None,
        soft_cap=None if soft_cap is None else float(soft_cap),
        d_v=call.d_v,
        dtype=jnp.dtype(jnp.bfloat16 if dtype_name(call.q) == "bfloat16" else jnp.float32),
    )


def _factors(call: Any) -> Any:
    """The factors by which the logits and the values are multiplied, f32 [2]."""
    (scale,) = per_head(getattr(call, "kv_scale", None), 1)
    return jnp.stack([scale * jnp.float32(call.scale), scale])


def log2(power: int) -> int:
    return power.bit_length() - 1


def _lists(keys: Keys, plan: Plan) -> list[Any]:
    """The lists divided into C chunks, as an array for scalar memory and, if pieces are rows, one for vector memory.

    A chunk in scalar memory, [L, C, 1, ...], has the indices of the pieces to fetch, or of the rows' groups; a mask of
    each block's valid pieces, unless pieces are rows; the list's length, if `keys.lens` is given; and the number of
    blocks up to the last valid piece. The array for vector memory [L, C, blocks, rows] has the index of each row in its
    group, or -1.
    """
    num_lists, length = keys.pieces.shape
    chunk = plan.blocks * plan.pieces
    chunks = cdiv(length, chunk)
    pieces = jnp.pad(keys.pieces, ((0, 0), (0, chunks * chunk - length)), constant_values=-1)
    ordinal = jnp.arange(1, chunks * chunk + 1, dtype=jnp.int32)
    used = jnp.where(pieces >= 0, ordinal, 0).max(axis=1)
    used = used[:, None] - jnp.arange(chunks, dtype=jnp.int32) * chunk
    count = jnp.clip(cdiv(used, plan.pieces), 0, plan.blocks)[..., None]
    in_blocks = pieces.reshape(num_lists, chunks, plan.blocks, plan.pieces)
    # Invalid entries fetch a piece too: entry i fetches piece i, modulo the number of pieces. They do not all fetch the
    # same piece, because repeated copies of one piece would be slow.
    numbers = jnp.where(pieces >= 0, pieces // (plan.packing if plan.selects else 1), (ordinal - 1) % len(keys.cache))
    numbers = numbers.reshape(num_lists, chunks, chunk)
    ends = [count] if keys.lens is None else [jnp.broadcast_to(keys.lens[:, None, None], count.shape), count]
    if plan.selects:
        scalars = jnp.concatenate([numbers, *ends], axis=-1)
        return [scalars[:, :, None], jnp.where(in_blocks >= 0, in_blocks % plan.packing, -1)]
    return [jnp.concatenate([numbers, bits_of_valid(in_blocks), *ends], axis=-1)[:, :, None]]


def _launch(
    plan: Plan, work: Work, queries: tuple[Any, Any | None, Any | None], out_dtype: Any, tile: Tile
) -> tuple[Any, Any]:
    """Launch the kernel. `queries` are q, tokens and sinks of all tiles. `Refs` describes these and the results."""
    parts = [keys for keys in (work.keys, work.extra) if keys is not None]
    chunked = [jnp.concatenate(arrays, axis=1) for arrays in zip(*(_lists(keys, plan) for keys in parts), strict=True)]
    scalars, indices = [array.reshape(-1, *array.shape[2:]) for array in chunked] + [None] * (not plan.selects)
    tiles, rows, _ = queries[0].shape

    def block(array: Any, index: Any, memory: Any = pltpu.VMEM) -> pl.BlockSpec | None:
        return None if array is None else pl.BlockSpec((None, *array.shape[1:]), index, memory_space=memory)

    whole = pl.BlockSpec(memory_space=pltpu.HBM)
    buffer = (2, plan.pieces, plan.piece_rows // plan.packing, plan.packing, work.keys.cache.shape[-1])
    columns = _latent_rows.value_columns(plan.form, plan.d_v)
    results = [
        jax.ShapeDtypeStruct((tiles, rows, columns), out_dtype),
        jax.ShapeDtypeStruct((tiles, 8, rows), jnp.float32),
    ]
    return pl.pallas_call(
        lambda *refs: _kernel(plan, Refs(*refs)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(plan.cores, plan.steps),
            in_specs=[
                block(scalars, plan.of_chunk, pltpu.SMEM),
                block(scalars, plan.of_next_chunk, pltpu.SMEM),
                block(indices, plan.of_chunk),
                *map(block, queries, (plan.of_queries, plan.of_tile, plan.of_kind)),
                [whole] * len(parts),
            ],
            out_specs=[block(result, plan.of_queries) for result in results],
            scratch_shapes=[
                pltpu.VMEM(buffer, work.keys.cache.dtype),
                pltpu.VMEM((rows, LANES), jnp.float32),
                pltpu.VMEM((rows, LANES), jnp.float32),
                pltpu.VMEM((rows, columns), jnp.float32),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=results,
        compiler_params=compiler_params(tile.vmem_limit_bytes, "parallel", "arbitrary"),
        name="latent_attention",
    )(_factors(work.call), work.jobs, scalars, scalars, indices, *queries, [keys.cache for keys in parts])


# ---- the kernel


class Refs(NamedTuple):
    """References to the kernel's memory, in the order in which Pallas passes them. Absent ones are None."""

    factors: Any  # f32 [2], the result of `_factors`
    jobs: Jobs | None
    lists: Any  # i32 [1, ...], this step's chunk, as `_lists` describes it
    next_lists: Any  # i32 [1, ...], the next step's chunk
    indices: Any  # i32 [blocks, pieces], the index of each selected row in its group, or -1
    q: Any  # [rows, d_qk]
    tokens: Any  # i32 [rows, LANES], the index of each row's token in the tile
    sinks: Any  # f32 [rows, LANES]
    caches: list[Any]  # the caches in HBM
    out: Any
    stats: Any  # f32 [8, rows]; the first two rows are max_logits and lse
    buffer: Any  # [2, pieces, ...]
    m_i: Any
    l_i: Any
    acc: Any
    half: Any  # i32 [1], the half of the buffer that is computed next
    arrived: Any  # the semaphore of each half


class Span(NamedTuple):
    """The tokens and keys that one step computes. Without `Refs.jobs`, all fields are 0 except `last`."""

    position: Any  # the position that the tile's first token has, or would have, in the list's sequence
    begin: Any  # the first of the tile's tokens that belong to the job
    end: Any  # one past the last of these tokens
    low: Any  # the first key that these tokens see
    high: Any  # one past the last key that they see
    first: Any  # the first block of the chunk to compute
    last: Any  # one past the last block to compute


def _span(plan: Plan, refs: Refs, lists: Any, step: Any) -> Span:
    count, nothing = lists[0, lists.shape[1] - 1], jnp.int32(0)
    if refs.jobs is None:
        return Span(nothing, nothing, nothing, nothing, nothing, nothing, count)
    job = plan.job(pl.program_id(0), step)[0]
    position, begin, end = refs.jobs.positions[job], refs.jobs.begins[job], refs.jobs.ends[job]
    low, high = nothing, lists[0, lists.shape[1] - 2]
    if plan.causal:
        high = jnp.clip(position + end, 0, high)
    if plan.window is not None:
        low = jnp.clip(position + begin - (plan.window - 1), 0, high)
    high = jnp.where(begin < end, high, low)
    before = step % plan.chunks * plan.blocks
    first = jnp.clip(low // plan.keys - before, 0, count)
    last = jnp.where(low < high, jnp.clip(cdiv(high, plan.keys) - before, first, count), first)
    return Span(position, begin, end, low, high, first, last)


def _kernel(plan: Plan, refs: Refs) -> None:
    """Process one chunk of a job's list. The first chunk resets the softmax, the last one stores the job's result."""
    buffer, half, arrived = refs.buffer, refs.half, refs.arrived
    step, last_step = pl.program_id(1), pl.num_programs(1) - 1
    chunk = step % plan.chunks
    next_chunk = jnp.where(chunk + 1 == plan.chunks, 0, chunk + 1)
    span = _span(plan, refs, refs.lists, step)
    next_span = _span(plan, refs, refs.next_lists, jnp.minimum(step + 1, last_step))
    next_has_blocks = (step < last_step) & (next_span.first < next_span.last)

    @pl.when(step == 0)
    def _() -> None:
        half[0] = 0

    pl.when(chunk == 0)(lambda: reset_softmax(refs.m_i, refs.l_i, refs.acc, -jnp.inf))

    def start(block: Any, is_own: Any, slot: Any) -> None:
        """Start fetching a block of this step's chunk if `is_own`, else of the next step's chunk."""

        def fetch_piece(cache: Any, piece: Any) -> None:
            index = block * plan.pieces + piece
            number = jnp.where(is_own, refs.lists[0, index], refs.next_lists[0, index])
            pltpu.make_async_copy(cache.at[number], buffer.at[slot, piece], arrived.at[slot]).start()

        def fetch(cache: Any) -> None:
            start_pieces(plan.pieces, functools.partial(fetch_piece, cache))

        extra = jnp.where(is_own, chunk, next_chunk) >= plan.first_extra
        pl.when(jnp.logical_not(extra))(lambda: fetch(refs.caches[0]))
        if len(refs.caches) == 2:
            pl.when(extra)(lambda: fetch(refs.caches[1]))

    def fetch_and_compute(block: Any, carry: None) -> None:
        """Start fetching the block after `block`. Then attend to `block`, unless it precedes the first block."""
        slot = half[0]
        is_own = block + 1 < span.last

        @pl.when(is_own | next_has_blocks)
        def _() -> None:
            next_block = jnp.where(is_own, block + 1, next_span.first)
            start(next_block, is_own, jnp.where(block < span.first, slot, 1 - slot))

        @pl.when(block >= span.first)
        def _() -> None:
            pltpu.make_async_copy(buffer.at[slot], buffer.at[slot], arrived.at[slot]).wait()
            _compute(plan, refs, span, block, (chunk * plan.blocks + block) * plan.keys)
            half[0] = 1 - slot

        return carry

    # Usually the previous step has started to fetch this step's first block. The first step, and a step without blocks,
    # run one extra iteration that only starts copies.
    before = jnp.where((step == 0) | (span.first == span.last), 1, 0)
    lax.fori_loop(span.first - before, span.last, fetch_and_compute, None)
    pl.when(chunk == plan.chunks - 1)(lambda: _store(plan, refs, span))


def _compute(plan: Plan, refs: Refs, span: Span, block: Any, first: Any) -> None:
    """Attend to one block of the chunk; `first` is the index of the block's first key in the list."""
    raw, seen, offset = _rows_of(plan, refs, span, block, first)
    if plan.causal or plan.window is not None:
        key, position = first + offset, span.position + refs.tokens[:, :1]
        if plan.causal:
            seen &= key <= position
        if plan.window is not None:
            seen &= key > position - plan.window
    few = span.high - span.low <= plan.split_weights_below
    _extend(plan, refs, _operands(raw, plan), seen, few)


def _store(plan: Plan, refs: Refs, span: Span) -> None:
    """Normalise and store the result of a job."""
    lse, factor = _finished(refs.m_i[:, :1], refs.l_i[:, :1], None if refs.sinks is None else refs.sinks[:, :1])
    factor *= refs.factors[1]
    out = jnp.where(factor == 0.0, 0.0, refs.acc[...] * factor)
    lane = lax.broadcasted_iota(jnp.int32, refs.m_i.shape, 1)
    stats = jnp.where(lane == 0, refs.m_i[...], lse)
    if plan.shares:
        _store_own(plan, refs, span, out, stats)
    else:
        refs.out[...], refs.stats[...] = out.astype(refs.out.dtype), stats.T[:8]


def _store_own(plan: Plan, refs: Refs, span: Span, out: Any, stats: Any) -> None:
    """Store the rows of the job's tokens. The tile's other rows belong to other jobs or to no sequence."""
    tiles, job = refs.jobs.tiles, plan.job(pl.program_id(0), pl.program_id(1))[0]  # type: ignore[union-attr]
    is_first = pl.program_id(1) < plan.chunks * plan.tiles  # the first job of its core

    @pl.when(is_first | (tiles[jnp.maximum(job - 1, 0)] != tiles[job]))
    def _() -> None:
        refs.out[...] = jnp.zeros(refs.out.shape, refs.out.dtype)
        refs.stats[...] = jnp.full(refs.stats.shape, -jnp.inf, jnp.float32)

    token, lane = refs.tokens[:, :1], lax.broadcasted_iota(jnp.int32, stats.shape, 1)
    own = (token >= span.begin) & (token < span.end)
    refs.out[...] = jnp.where(own, out, refs.out[...].astype(jnp.float32)).astype(refs.out.dtype)
    stats = jnp.where(lane == 2, jnp.where(own, 1.0, 0.0), stats).T[:8]
    refs.stats[...] = jnp.where(stats[2:3] > 0, stats, refs.stats[...])


def _finished(m_i: Any, l_i: Any, sinks: Any) -> tuple[Any, Any]:
    """The lse of each row, and the factor that normalises its accumulator."""
    sees_keys = m_i != -jnp.inf
    lse = jnp.where(sees_keys, m_i + jnp.log(l_i), -jnp.inf)
    factor = jnp.where(sees_keys, 1.0 / jnp.where(sees_keys, l_i, 1.0), 0.0)
    if sinks is not None:
        factor *= jnp.where(sees_keys, 1.0 / (1.0 + jnp.exp(sinks - lse)), 0.0)
    return lse, factor


def _rows_of(plan: Plan, refs: Refs, span: Span, block: Any, first: Any) -> tuple[Any, Any, Any]:
    """The bits of a block's keys, a mask of the valid keys, and their offsets from the block's first key, `first`."""
    fetched = refs.buffer[refs.half[0]]
    bounds = (span.low - first, span.high - first) if plan.by_tokens else None
    if plan.selects:
        return _selected(fetched, refs.indices[pl.ds(block, 1), :], bounds, plan)
    valid_pieces = refs.lists[0, plan.blocks * plan.pieces + block]
    return _paged(fetched, valid_pieces, bounds, plan)


def _within(offset: Any, bounds: Any, plan: Plan) -> Any:
    """A mask of the offsets in a block that some token of the job sees."""
    low, high = bounds  # without a window, no offset is below low
    return (offset < high) if plan.window is None else (offset >= low) & (offset < high)


def _words(fetched: Any) -> Any:
    """The fetched block as rows of 32-bit words."""
    return pltpu.bitcast(fetched.reshape(-1, fetched.shape[-1]), jnp.int32)


def _selected(fetched: Any, index: Any, bounds: Any, plan: Plan) -> tuple[Any, Any, Any]:
    """The bits of selected rows [keys, columns], and a mask of the valid rows and their offsets, both [1, keys].

    `index` [1, keys] is each row's index in its group. Rows with -1 are invalid, and their bits are returned as zeros.
    """
    bits = 32 // plan.packing
    offset = lax.broadcasted_iota(jnp.int32, (1, plan.keys), 1)
    if bounds is not None:
        index = jnp.where(_within(offset, bounds, plan), index, -1)
    column = jnp.broadcast_to(index, (8, plan.keys)).T[:, :1]
    words = _words(fetched)
    if plan.packing > 1:
        words = (words >> (bits * jnp.maximum(column, 0))) & ((1 << bits) - 1)
    return jnp.where(column >= 0, words, 0), index >= 0, offset


def _offsets(plan: Plan) -> Any:
    """Each key's offset in its block of pages, [1, keys]; keys are in the order in which they are unpacked."""
    lane = lax.broadcasted_iota(jnp.int32, (1, plan.keys), 1)
    if not plan.unpacks_pages:
        return lane
    index = sum((lane >= plan.words * index).astype(jnp.int32) for index in range(1, plan.packing))
    return (lane - plan.words * index) * plan.packing + index


def _paged(fetched: Any, valid_pieces: Any, bounds: Any, plan: Plan) -> tuple[Any, Any, Any]:
    """The bits of page rows, and a mask of the valid rows and their offsets in the block, both [1, keys].

    The bits are [keys, columns], or [words, columns] if they are not unpacked. They are zero for rows that no token of
    the job sees and for rows of pages that do not exist.
    """
    offset = _offsets(plan)
    seen = _within(offset, bounds, plan) & ((valid_pieces >> (offset >> log2(plan.piece_rows))) & 1 != 0)
    bits = 32 // plan.packing
    row = lax.broadcasted_iota(jnp.int32, (plan.words, 1), 0) * plan.packing
    present = jnp.zeros_like(row)
    for index in range(plan.packing):
        field = ((1 << bits) - 1) << (bits * index)
        present |= jnp.where(_within(row + index, bounds, plan), field - ((field >> 31) << 32), 0)
    present = jnp.where((valid_pieces >> (row >> log2(plan.piece_rows))) & 1 != 0, present, 0)
    words = _words(fetched) & present
    if not plan.unpacks_pages:
        return words, seen, offset
    fields = [words >> (bits * index) for index in range(plan.packing)]
    return jnp.concatenate(fields, axis=0) & ((1 << bits) - 1), seen, offset


def _operands(raw: Any, plan: Plan) -> list[tuple[Any, Any]]:
    """The keys as matrix operands, in the form in which `_latent_rows.operands` returns them."""
    if plan.decodes:
        return _latent_rows.operands(raw, plan.form, plan.dtype)
    if plan.selects or plan.packing == 1:
        values = pltpu.bitcast(raw << (32 - 32 // plan.packing), jnp.float32)
    else:
        values = pltpu.bitcast(raw, plan.dtype)
    return [(values.astype(plan.dtype), None)]


def _extend(plan: Plan, refs: Refs, parts: list[tuple[Any, Any]], seen: Any, few: Any) -> None:
    """Add a block of keys to the online softmax. If the job sees `few` keys, add the weights' rounding errors too."""
    q, m_i, l_i, acc = refs.q, refs.m_i, refs.l_i, refs.acc
    products, column = [], 0
    for operand, scale in parts:
        width = operand.shape[1]
        part = product(q[:, column : column + width], operand, 1, 1)
        products.append(part if scale is None else part * scale)
        column += width
    logits = sum(products[1:], products[0]) * refs.factors[0]
    if plan.soft_cap is not None:
        logits = soft_capped(logits, plan.soft_cap)
    logits = jnp.where(seen, logits, -jnp.inf)
    before = m_i[:, :1]
    high = jnp.maximum(before, logits.max(axis=1, keepdims=True))
    base = jnp.where(high == -jnp.inf, 0.0, high)
    weights, alpha = jnp.exp(logits - base), jnp.exp(before - base)
    m_i[...] = jnp.broadcast_to(high, m_i.shape)
    l_i[...] = l_i[...] * alpha + weights.sum(axis=1, keepdims=True)
    mixed = []  # for each operand: its columns of the result, its weights in float32, the operand
    column = 0
    for operand, scale in parts:
        width = min(operand.shape[1], acc.shape[1] - column)
        if width <= 0:
            break
        scaled = weights if scale is None else weights * jnp.where(seen, scale, 0.0)
        values = product(scaled.astype(plan.dtype), operand[:, :width])
        acc[:, column : column + width] = acc[:, column : column + width] * alpha + values
        mixed.append((slice(column, column + width), scaled, operand[:, :width]))
        column += width

    def add_rounding_errors() -> None:
        for columns, scaled, operand in mixed:
            error = scaled - scaled.astype(plan.dtype).astype(jnp.float32)
            acc[:, columns] = acc[:, columns] + product(error.astype(plan.dtype), operand)

    if plan.split_weights_below:
        pl.when(few)(add_rounding_errors)
