"""The attention over latent rows that all attentions over latent caches share: one kernel.

A *job* is what shares a list of keys: some rows of queries (heads, in a dense call times query tokens), and a list that
is either of rows of the cache (a selection) or of whole pages of it. The kernel goes through a job's list a block at a
time; in a dense call, whose lists have an order, only through blocks of which some token of the job sees a part. The
pieces of a block are fetched from HBM by one asynchronous copy each, into one of two buffers; while one block is
computed the next is on its way, also across jobs. A buffer has one semaphore, and one wait for all its copies.

A TPU keeps 2 rows of 16 bits, or 4 rows of 8 bits, in the same 32-bit words, and copies whole words. So the cache is
seen as groups of rows that share words, `[groups, 2 or 4, d]`; a selected row comes with its group, and its bits are
shifted out of the words. `row_layout` is the layout in which a cache is seen that way without moving a byte; of a
cache in another one XLA makes a copy first, and of a float16 one, which no TPU computes with, always.

A row is fetched once and is both key and value. Rows that the query does not see (beyond the length, of invalid
indices) are made zeros while they are words, so what they hold cannot matter. `_latent_rows` makes operands of
quantised rows.
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

from ragged_attention.calls import MlaDecode, RaggedMlaAttention, SparseMlaPrefill, dtype_name
from ragged_attention.errors import InvalidInput
from ragged_attention.jax_shared.logits import soft_capped
from ragged_attention.jax_shared.pages import per_head
from ragged_attention.kernels_pallas import _latent_rows
from ragged_attention.kernels_pallas._blocks import LANES, cannot_run, cdiv, expect_sizes, round_up, written_dtype
from ragged_attention.kernels_pallas._latent_jobs import Jobs, Tokens, jobs_of, num_tiles

MOST_KEYS = 2048  # of a block
MOST_ROWS = 512  # of queries at once, half as many of 32 bits
LARGEST_INT = 2**31 - 1
LONGEST_CHUNK = 2048  # entries of a list that are in scalar memory at once
LARGEST_UNIT = 256  # rows of a page that one copy fetches
MOST_UNITS = 32  # copies of a block of pages; a word has a bit for each
UNROLL = 8  # copies that are begun in one turn of a loop


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """What may be tuned.

    Args:
        num_keys_per_block: keys that are fetched and computed at once, a multiple of 16.
        vmem_limit_bytes: vector memory that the compiler may use, 0 for its default.
    """

    num_keys_per_block: int = 128
    vmem_limit_bytes: int = 0

    def __post_init__(self) -> None:
        expect_sizes(self, num_keys_per_block=(16, MOST_KEYS), vmem_limit_bytes=(0, 2**31 - 1))
        if self.num_keys_per_block % 16:
            raise InvalidInput(f"expected num_keys_per_block to be a multiple of 16, got {self.num_keys_per_block}")


def rows_per_word(dtype: Any) -> int:
    """Rows of a cache that share 32-bit words."""
    return 4 // jnp.dtype(dtype).itemsize


def row_layout(dtype: Any, rank: int = 4) -> Layout:
    """The layout of a cache [P, G, 1, ...], or of rows [s_kv, 1, ...], that the kernels read without copying it first.

    `jax.device_put(cache, Format(row_layout(cache.dtype), sharding))` puts a cache there, and with
    `jax.jit(..., in_shardings=..., out_shardings=...)` of such formats it stays. A page should hold a multiple of
    `rows_per_word(dtype)` rows, and a cache of packed rows such a number of them.
    """
    packing = rows_per_word(dtype)
    tiling = ((packing, LANES), (packing, 1)) if packing > 1 else ((1, LANES),)
    return Layout(major_to_minor=(0, 2, 1, 3) if rank == 4 else (1, 0, 2), tiling=tiling)


def planar_refusal(call: Any) -> str | None:
    """Why caches of the call's layout are not taken, or None."""
    if call.layout is not None and call.layout.planar:
        return f"takes caches that have the bytes of a token together, got {call.format!r} by pages"
    return None


def why_not(call: MlaDecode | RaggedMlaAttention | SparseMlaPrefill) -> str | None:
    """Why the kernel does not take a call, or None."""
    if reason := cannot_run(call):
        return reason
    if dtype_name(call.q) == "float64":
        return "takes q.dtype of at most 32 bits, got float64"
    if (reason := planar_refusal(call)) is not None:
        return reason
    for cache in (getattr(call, "kv", None), getattr(call, "kv_cache", None), getattr(call, "extra_kv_cache", None)):
        rows = 0 if cache is None else math.prod(cache.shape[:-1])
        if rows > LARGEST_INT:
            return f"numbers rows in int32, got {rows // call.num_kv_heads} slots of {call.num_kv_heads} KV heads"
    return None


def keys_of_lists(longest: int, most: int = 128) -> int:
    """Keys of a block for lists of up to `longest`: no more than they have."""
    return min(most, round_up(max(longest, 1), 16))


# ---- a call in the kernel's terms


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """A cache as the kernel reads it, and L lists of pieces of it."""

    cache: Any  # [pieces, groups of rows, rows of a group, columns]
    pieces: Any  # i32 [L, N], -1 where nothing is to be seen; of rows their numbers
    lens: Any | None = None  # i32 [L], how many keys there are in order; None: they have no order
    selects: bool = False  # pieces are single rows


def words_of(cache: Any) -> Any:
    """The cache with a dtype that the kernel loads: bytes, and 16 bits that are not bfloat16, as integers."""
    if dtype_name(cache) == "float16":
        return lax.bitcast_convert_type(cache, jnp.int16)
    return lax.bitcast_convert_type(cache, jnp.uint8) if cache.dtype.itemsize == 1 else cache


def valid_slots(indices: Any, lens: Any, num_slots: int) -> Any:
    """Lists of slots [..., N] with -1 for what is out of range, or beyond the list's length."""
    seen = (indices >= 0) & (indices < num_slots)
    if lens is not None:
        lens = lens.reshape(lens.shape + (1,) * (indices.ndim - lens.ndim))
        seen &= jnp.arange(indices.shape[-1], dtype=jnp.int32) < lens
    return jnp.where(seen, indices, -1)


def selected_rows(cache: Any, rows: Any, lens: Any = None) -> Keys:
    """Keys that are single rows, by their numbers [L, N] in `cache` [..., columns]; -1 selects nothing."""
    cache = words_of(cache).reshape(-1, cache.shape[-1])
    packing = rows_per_word(cache.dtype)
    if missing := -len(cache) % packing:
        cache = jnp.pad(cache, ((0, missing), (0, 0)))
    return Keys(cache=cache.reshape(-1, 1, packing, cache.shape[-1]), pieces=rows, lens=lens, selects=True)


def unit_of(page_size: int, dtype: Any) -> int | None:
    """Rows of a page that one copy fetches, a power of two; None if a page is not a whole number of groups of rows."""
    unit = min(page_size & -page_size, LARGEST_UNIT)
    return unit if unit % rows_per_word(dtype) == 0 else None


def whole_pages(cache: Any, page_indices: Any, kv_lens: Any, unit: int) -> Keys:
    """Keys that are whole pages of `cache` [P, G, 1, columns], as far as sequences of `kv_lens` reach."""
    num_pages, page_size, _, width = cache.shape
    cache = words_of(cache)
    packing = rows_per_word(cache.dtype)
    units = page_size // unit
    first = jnp.where((page_indices >= 0) & (page_indices < num_pages), page_indices * units, -1)
    pieces = first[..., None] + jnp.arange(units, dtype=jnp.int32)
    pieces = jnp.where(first[..., None] >= 0, pieces, -1).reshape(len(page_indices), -1)
    there = jnp.arange(pieces.shape[1], dtype=jnp.int32) < cdiv(kv_lens, unit)[:, None]
    cache = cache.reshape(-1, unit // packing, packing, width)
    return Keys(cache=cache, pieces=jnp.where(there, pieces, -1), lens=kv_lens)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One call: tiles of rows of queries, and lists of keys; without `jobs` a tile for each list."""

    call: Any
    q: Any  # [tiles, rows, d_qk]
    keys: Keys
    extra: Keys | None = None  # the same number of lists; of single rows, as those of `keys`
    jobs: Jobs | None = None  # on tiles of some tokens, each with all of its heads
    heads: int = 1  # of a token
    sinks: Any = None  # f32 [kinds of lists, rows]; list i has kind i % kinds
    form: str | None = None  # the format of both caches; None is the call's
    split_weights_below: int = 0  # keys of a job of which bfloat16 weights are not just rounded


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the kernel is specialised to."""

    layout: str  # of the cache
    numbers: str | None  # the dtype of a plain cache's, where the kernel has them as integers
    selects: bool
    pieces: int  # of a block
    unit: int  # rows of a piece as it is fetched
    packing: int
    blocks: int  # of a chunk, at most
    chunks: int  # of a list
    first_extra: int  # the first chunk of the second cache
    tiles: int  # that the rows of one of the call's jobs are divided into; each is a job here
    jobs_per_core: int
    cores: int
    kinds: int  # of lists, by their sinks; 0 if there are none
    by_tokens: bool  # jobs are those of tokens, which see keys by their positions
    shares: bool  # a tile may have several jobs
    split_weights_below: int  # keys of a job; 0 where the weights are just rounded
    causal: bool
    window: int | None
    soft_cap: float | None
    d_v: int
    dtype: Any  # of matrix operands

    @property
    def keys(self) -> int:
        """Keys of a block."""
        return self.pieces if self.selects else self.pieces * self.unit

    @property
    def words(self) -> int:
        """Rows of 32-bit words of a block."""
        return self.pieces * self.unit // self.packing


def precision(dtype: Any) -> Any:
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def most_rows(call: Any) -> int:
    """Rows of queries that the kernel computes at once."""
    return MOST_ROWS if dtype_name(call.q) == "bfloat16" else MOST_ROWS // 2


def cores_of(call: Any) -> int:
    return max(1, call.device.num_multiprocessors)


def table_bytes(call: Any) -> int:
    """Scalar memory that is for the tables of a launch's jobs."""
    return call.device.scalar_memory // 2


def run_tokens(work: Work, tokens: Tokens, size: int, tile: Tile) -> tuple[Any, Any]:
    """Out [T, H, d_v] and lse [T, H] of `work` with q [T, H, d_qk] and sinks [kinds, H], in tiles of `size` tokens."""
    call, (num_tokens, heads, d_qk) = work.call, work.q.shape
    size = max(1, min(size, num_tokens, most_rows(call) // heads))
    step = size * cores_of(call)
    # At most so many tokens have jobs, each at least one, whose tables fit scalar memory.
    together = max(table_bytes(call) // (4 * len(Jobs._fields)) // step, 1) * step
    sinks = None if work.sinks is None else jnp.tile(work.sinks, (1, size))

    def attend(first: int) -> tuple[Any, Any]:
        some = tokens.part(first, together)
        count, tiles = len(some.lists), num_tiles(len(some.lists), size, cores_of(call))
        q = jnp.pad(work.q[first : first + count], ((0, tiles * size - count), (0, 0), (0, 0)))
        part = dataclasses.replace(
            work, q=q.reshape(tiles, -1, d_qk), jobs=jobs_of(some, size, cores_of(call)), heads=heads, sinks=sinks
        )
        out, _, lse = run(part, tile)
        return out.reshape(-1, heads, call.d_v)[:count], lse.reshape(-1, heads)[:count]

    parts = [attend(first) for first in range(0, num_tokens, together)]
    out, lse = (arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return out, lse


def run(work: Work, tile: Tile) -> tuple[Any, Any, Any]:
    """Out [tiles, rows, d_v] of the call's dtype, max_logits and lse [tiles, rows] float32."""
    call = work.call
    given, rows, _ = work.q.shape
    tiles = cdiv(rows, most_rows(call))
    rows_per_tile = round_up(cdiv(rows, tiles), 16 if dtype_name(call.q) == "bfloat16" else 8)

    def tiled(array: Any) -> Any:
        """[..., rows, ...] as [... * tiles, rows of a tile, ...]."""
        array = jnp.pad(array, ((0, 0), (0, tiles * rows_per_tile - rows), *[(0, 0)] * (array.ndim - 2)))
        return array.reshape(-1, rows_per_tile, *array.shape[2:])

    plan = _plan(work, tile, tiles)
    operands = [tiled(_latent_rows.spread(work.q.astype(plan.dtype), plan.layout))]
    tokens = jnp.arange(rows, dtype=jnp.int32)[None] // work.heads if plan.by_tokens else None
    for values in (tokens, work.sinks):
        if values is not None:
            operands.append(jnp.broadcast_to(tiled(values)[..., None], (*tiled(values).shape, LANES)))
    out, stats = _launch(plan, work, operands, written_dtype(call), tile)
    out = out.reshape(given, tiles * rows_per_tile, -1)[:, :rows]
    out = _latent_rows.gathered(out, plan.layout, plan.d_v).astype(call.result_dtype)
    stats = stats.reshape(given, tiles, 8, rows_per_tile).swapaxes(1, 2).reshape(given, 8, -1)[:, :, :rows]
    return out, stats[:, 0], stats[:, 1]


def _plan(work: Work, tile: Tile, tiles: int) -> Plan:
    call, keys = work.call, work.keys
    _, groups, packing, _ = keys.cache.shape
    unit = groups * packing
    pieces = tile.num_keys_per_block // (1 if keys.selects else unit)
    if not keys.selects:
        pieces = max(1, min(pieces, keys.pieces.shape[1], MOST_UNITS))
    lengths = [part.pieces.shape[1] for part in (keys, work.extra) if part is not None]
    blocks = min(max(1, LONGEST_CHUNK // pieces), max(cdiv(length, pieces) for length in lengths))
    chunks = [cdiv(length, blocks * pieces) for length in lengths]
    jobs = (len(work.q) if work.jobs is None else len(work.jobs.lists)) * tiles
    cores = cores_of(call) if jobs % cores_of(call) == 0 else 1
    window, soft_cap = getattr(call, "sliding_window", None), getattr(call, "soft_cap", None)
    return Plan(
        layout=work.form or call.format,
        numbers=_integers(call),
        selects=keys.selects,
        pieces=pieces,
        unit=unit,
        packing=packing,
        blocks=blocks,
        chunks=sum(chunks),
        first_extra=chunks[0],
        tiles=tiles,
        jobs_per_core=jobs // cores,
        cores=cores,
        kinds=0 if work.sinks is None else len(work.sinks),
        by_tokens=work.jobs is not None,
        shares=jobs > len(work.q) * tiles,
        split_weights_below=work.split_weights_below if dtype_name(call.q) == "bfloat16" else 0,
        causal=work.jobs is not None and call.causal,
        window=None if window is None or window >= call.capacity else int(window),
        soft_cap=None if soft_cap is None else float(soft_cap),
        d_v=call.d_v,
        dtype=jnp.dtype(jnp.bfloat16 if dtype_name(call.q) == "bfloat16" else jnp.float32),
    )


def _integers(call: Any) -> str | None:
    """The dtype of a plain cache's numbers if the kernel has them as integers, `words_of`."""
    name = dtype_name(call.q) if (code := getattr(call, "code_dtype", None)) is None else code
    return name if call.format == "plain" and name not in ("bfloat16", "float32") else None


def _factors(call: Any, plan: Plan) -> Any:
    """What logits and values are multiplied by, f32 [2]."""
    (scale,) = per_head(getattr(call, "kv_scale", None), 1)
    logits = scale * jnp.float32(call.scale)
    return jnp.stack([logits, scale])


def log2(power: int) -> int:
    return power.bit_length() - 1


def _lists(keys: Keys, plan: Plan) -> list[Any]:
    """The lists in chunks. For scalar memory [L, C, 1, ...]: pieces, in a call on whole pages a word for each block
    with the bits of its valid pieces, the list's length if it has one, and the number of blocks. Of single rows also,
    for vector memory, the index of each among those that share its words, or -1, [L, C, blocks, rows].
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
    # Invalid pieces are fetched from all over the cache: fetching the same one again and again would be slow.
    numbers = jnp.where(pieces >= 0, pieces // (plan.packing if plan.selects else 1), (ordinal - 1) % len(keys.cache))
    numbers = numbers.reshape(num_lists, chunks, chunk)
    ends = [count] if keys.lens is None else [jnp.broadcast_to(keys.lens[:, None, None], count.shape), count]
    if plan.selects:
        scalars = jnp.concatenate([numbers, *ends], axis=-1)
        return [scalars[:, :, None], jnp.where(in_blocks >= 0, in_blocks % plan.packing, -1)]
    bits = jnp.uint32(1) << jnp.arange(plan.pieces, dtype=jnp.uint32)
    bits = jnp.where(in_blocks >= 0, bits, 0).sum(axis=-1, dtype=jnp.uint32)
    scalars = jnp.concatenate([numbers, lax.bitcast_convert_type(bits, jnp.int32), *ends], axis=-1)
    return [scalars[:, :, None]]


class Maps:
    """Which block of each array a step of a core needs, given the scalars that come before a kernel."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.steps = plan.jobs_per_core * plan.chunks

    def job(self, core: Any, step: Any) -> tuple[Any, Any]:
        """A job of the call, and which tile of its rows."""
        index = core * self.plan.jobs_per_core + step // self.plan.chunks
        return index // self.plan.tiles, index % self.plan.tiles

    def of_queries(self, core: Any, step: Any, _: Any, *jobs: Any) -> tuple[Any, ...]:
        job, tile = self.job(core, step)
        return (Jobs(*jobs).tiles[job] if jobs else job) * self.plan.tiles + tile, 0, 0

    def of_tile(self, core: Any, step: Any, *_: Any) -> tuple[Any, ...]:
        return self.job(core, step)[1], 0, 0

    def list(self, core: Any, step: Any, *jobs: Any) -> Any:
        job = self.job(core, step)[0]
        return Jobs(*jobs).lists[job] if jobs else job

    def of_kind(self, core: Any, step: Any, _: Any, *jobs: Any) -> tuple[Any, ...]:
        kind = self.list(core, step, *jobs) % self.plan.kinds
        return kind * self.plan.tiles + self.job(core, step)[1], 0, 0

    def of_chunk(self, core: Any, step: Any, _: Any, *jobs: Any) -> tuple[Any, ...]:
        return self.list(core, step, *jobs) * self.plan.chunks + step % self.plan.chunks, 0, 0

    def of_next_chunk(self, core: Any, step: Any, *scalars: Any) -> tuple[Any, ...]:
        return self.of_chunk(core, jnp.minimum(step + 1, self.steps - 1), *scalars)


def _launch(plan: Plan, work: Work, operands: list[Any], out_dtype: Any, tile: Tile) -> tuple[Any, Any]:
    parts = [keys for keys in (work.keys, work.extra) if keys is not None]
    chunked = [jnp.concatenate(arrays, axis=1) for arrays in zip(*(_lists(keys, plan) for keys in parts), strict=True)]
    scalars, *vectors = [array.reshape(-1, *array.shape[2:]) for array in chunked]
    tiles, rows, _ = operands[0].shape
    maps, first = Maps(plan), (_factors(work.call, plan), *(work.jobs or ()))

    def block(array: Any, index: Any, memory: Any = pltpu.VMEM) -> pl.BlockSpec:
        return pl.BlockSpec((None, *array.shape[1:]), index, memory_space=memory)

    wanted = [maps.of_queries, *([maps.of_tile] * plan.by_tokens), *([maps.of_kind] * (plan.kinds > 0))]
    whole = pl.BlockSpec(memory_space=pltpu.HBM)
    buffer = (2, plan.pieces, plan.unit // plan.packing, plan.packing, work.keys.cache.shape[-1])
    columns = _latent_rows.value_columns(plan.layout, plan.d_v)
    results = [
        jax.ShapeDtypeStruct((tiles, rows, columns), out_dtype),
        jax.ShapeDtypeStruct((tiles, 8, rows), jnp.float32),
    ]
    return pl.pallas_call(
        lambda *refs: _kernel(plan, _named(plan, len(parts), refs)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(first),
            grid=(plan.cores, maps.steps),
            in_specs=[
                block(scalars, maps.of_chunk, pltpu.SMEM),
                block(scalars, maps.of_next_chunk, pltpu.SMEM),
                *(block(array, maps.of_chunk) for array in vectors),
                *(block(array, index) for array, index in zip(operands, wanted, strict=True)),
                *[whole] * len(parts),
            ],
            out_specs=[block(result, maps.of_queries) for result in results],
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
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            disable_bounds_checks=True,  # the numbers of pieces are clamped to the cache, and a check takes two thirds
            vmem_limit_bytes=tile.vmem_limit_bytes or None,  # of the time that beginning a copy takes
        ),
        name="latent_attention",
    )(*first, scalars, scalars, *vectors, *operands, *(keys.cache for keys in parts))


# ---- the kernel


class Refs(NamedTuple):
    """The kernel's memory: scalars, blocks of this step, caches in HBM, buffers."""

    factors: Any
    jobs: Jobs | None
    lists: Any
    next_lists: Any
    indices: Any  # of single rows, i32 [blocks, pieces]
    q: Any
    tokens: Any  # i32 [rows, LANES], which of the tile's each row is of
    sinks: Any
    caches: list[Any]
    out: Any
    stats: Any
    buffer: Any
    m_i: Any
    l_i: Any
    acc: Any
    turn: Any  # i32 [1], the half of the buffer that is computed next
    arrived: Any


def _named(plan: Plan, num_caches: int, refs: Any) -> Refs:
    """The references in the order in which Pallas gives them, by name."""
    refs = list(refs)

    def take(count: int) -> list[Any]:
        return [refs.pop(0) for _ in range(count)]

    (factors,), jobs = take(1), Jobs(*take(len(Jobs._fields))) if plan.by_tokens else None
    lists = take(2)
    (indices,), (q,) = take(1) if plan.selects else [None], take(1)
    (tokens,), (sinks,) = take(1) if plan.by_tokens else [None], take(1) if plan.kinds else [None]
    return Refs._make([factors, jobs, *lists, indices, q, tokens, sinks, take(num_caches), *refs])


class Span(NamedTuple):
    """What one step computes."""

    position: Any  # of the tile's first token, were it the list's
    begin: Any  # the tile's tokens that are the job's own
    end: Any
    low: Any  # the first key that they see
    high: Any  # one past the last
    first: Any  # the first block of the chunk with such keys
    last: Any  # one past the last


def _span(plan: Plan, refs: Refs, lists: Any, step: Any) -> Span:
    count, nothing = lists[0, lists.shape[1] - 1], jnp.int32(0)
    if refs.jobs is None:
        return Span(nothing, nothing, nothing, nothing, nothing, nothing, count)
    job = Maps(plan).job(pl.program_id(0), step)[0]
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
    """One chunk of one job's list; the first chunk of a job begins its softmax, the last one finishes it."""
    buffer, turn, arrived = refs.buffer, refs.turn, refs.arrived
    step, last_step = pl.program_id(1), pl.num_programs(1) - 1
    chunk = step % plan.chunks
    next_chunk = jnp.where(chunk + 1 == plan.chunks, 0, chunk + 1)
    span = _span(plan, refs, refs.lists, step)
    coming = _span(plan, refs, refs.next_lists, jnp.minimum(step + 1, last_step))
    some_come = (step < last_step) & (coming.first < coming.last)

    @pl.when(step == 0)
    def _() -> None:
        turn[0] = 0

    pl.when(chunk == 0)(lambda: _begin(refs.m_i, refs.l_i, refs.acc))

    def start(block: Any, own: Any, slot: Any) -> None:
        """Fetch a block of this step, or the first of the next; a piece that is not valid fetches some other."""

        def one(cache: Any, piece: Any) -> None:
            index = block * plan.pieces + piece
            number = jnp.where(own, refs.lists[0, index], refs.next_lists[0, index])
            pltpu.make_async_copy(cache.at[number], buffer.at[slot, piece], arrived.at[slot]).start()

        def fetch(cache: Any) -> None:
            pl.loop(0, plan.pieces, unroll=math.gcd(plan.pieces, UNROLL))(functools.partial(one, cache))

        extra = jnp.where(own, chunk, next_chunk) >= plan.first_extra
        pl.when(jnp.logical_not(extra))(lambda: fetch(refs.caches[0]))
        if len(refs.caches) == 2:
            pl.when(extra)(lambda: fetch(refs.caches[1]))

    def turn_over(block: Any, carry: None) -> None:
        """Begin to fetch what comes after a block, then compute it; before the first block there is none."""
        slot = turn[0]
        own = block + 1 < span.last

        @pl.when(own | some_come)
        def _() -> None:
            start(jnp.where(own, block + 1, coming.first), own, jnp.where(block < span.first, slot, 1 - slot))

        @pl.when(block >= span.first)
        def _() -> None:
            pltpu.make_async_copy(buffer.at[slot], buffer.at[slot], arrived.at[slot]).wait()
            _compute(plan, refs, span, block, (chunk * plan.blocks + block) * plan.keys)
            turn[0] = 1 - slot

        return carry

    # The step before has begun to fetch this one's first block; but there is none before the first step.
    before = jnp.where((step == 0) | (span.first == span.last), 1, 0)
    lax.fori_loop(span.first - before, span.last, turn_over, None)
    pl.when(chunk == plan.chunks - 1)(lambda: _store(plan, refs, span))


def _compute(plan: Plan, refs: Refs, span: Span, block: Any, first: Any) -> None:
    """One block of the chunk, whose keys begin at `first` in the list."""
    raw, seen, offset = _taken(plan, refs, span, block, first)
    if plan.causal or plan.window is not None:
        key, position = first + offset, span.position + refs.tokens[:, :1]
        if plan.causal:
            seen &= key <= position
        if plan.window is not None:
            seen &= key > position - plan.window
    few = span.high - span.low <= plan.split_weights_below
    _extend(plan, refs, _operands(raw, plan), seen, few)


def _store(plan: Plan, refs: Refs, span: Span) -> None:
    """Normalise what a job has summed."""
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
    """Store the rows of a job's own tokens; the tile's other ones are those of other jobs, or of none."""
    tiles, job = refs.jobs.tiles, Maps(plan).job(pl.program_id(0), pl.program_id(1))[0]  # type: ignore[union-attr]
    is_first = pl.program_id(1) < plan.chunks * plan.tiles  # of its core

    @pl.when(is_first | (tiles[jnp.maximum(job - 1, 0)] != tiles[job]))
    def _() -> None:
        refs.out[...] = jnp.zeros(refs.out.shape, refs.out.dtype)
        refs.stats[...] = jnp.full(refs.stats.shape, -jnp.inf, jnp.float32)

    token, lane = refs.tokens[:, :1], lax.broadcasted_iota(jnp.int32, stats.shape, 1)
    own = (token >= span.begin) & (token < span.end)
    refs.out[...] = jnp.where(own, out, refs.out[...].astype(jnp.float32)).astype(refs.out.dtype)
    stats = jnp.where(lane == 2, jnp.where(own, 1.0, 0.0), stats).T[:8]
    refs.stats[...] = jnp.where(stats[2:3] > 0, stats, refs.stats[...])


def _begin(m_i: Any, l_i: Any, acc: Any) -> None:
    """Begin with the softmax of no keys."""
    m_i[...] = jnp.full(m_i.shape, -jnp.inf, jnp.float32)
    l_i[...] = jnp.zeros(l_i.shape, jnp.float32)
    acc[...] = jnp.zeros(acc.shape, jnp.float32)


def _finished(m_i: Any, l_i: Any, sinks: Any) -> tuple[Any, Any]:
    """The lse of each row, and the factor that normalises its accumulated values."""
    some = m_i != -jnp.inf
    lse = jnp.where(some, m_i + jnp.log(l_i), -jnp.inf)
    factor = jnp.where(some, 1.0 / jnp.where(some, l_i, 1.0), 0.0)
    if sinks is not None:
        factor *= jnp.where(some, 1.0 / (1.0 + jnp.exp(sinks - lse)), 0.0)
    return lse, factor


def _taken(plan: Plan, refs: Refs, span: Span, block: Any, first: Any) -> tuple[Any, Any, Any]:
    """The bits of a block's keys, which of them are valid, and their offset from `first`, where the block begins."""
    fetched = refs.buffer[refs.turn[0]]
    bounds = (span.low - first, span.high - first) if plan.by_tokens else None
    if plan.selects:
        return _selected(fetched, refs.indices[pl.ds(block, 1), :], bounds, plan)
    valid_pieces = refs.lists[0, plan.blocks * plan.pieces + block]
    return _paged(fetched, valid_pieces, bounds, plan)


def _within(offset: Any, bounds: Any, plan: Plan) -> Any:
    """Which offsets in a block some token of the job sees; only a window bounds them below."""
    low, high = bounds
    return (offset < high) if plan.window is None else (offset >= low) & (offset < high)


def _words(fetched: Any) -> Any:
    """What was fetched as rows of 32-bit words."""
    return pltpu.bitcast(fetched.reshape(-1, fetched.shape[-1]), jnp.int32)


def _selected(fetched: Any, index: Any, bounds: Any, plan: Plan) -> tuple[Any, Any, Any]:
    """The bits of selected rows, [keys, columns], of the words each shares with others; zeros where `index` is -1.

    Also which of them are valid, and their offset in the block, [1, keys].
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


def _splits_words(plan: Plan) -> bool:
    """Whether keys of whole pages are taken out of their words, ordered by their index within a word."""
    return plan.packing > 1 and (plan.layout != "plain" or plan.numbers is not None)


def _offsets(plan: Plan) -> Any:
    """Which position in a block of whole pages each key has, [1, keys]."""
    lane = lax.broadcasted_iota(jnp.int32, (1, plan.keys), 1)
    if not _splits_words(plan):
        return lane
    index = sum((lane >= plan.words * index).astype(jnp.int32) for index in range(1, plan.packing))
    return (lane - plan.words * index) * plan.packing + index


def _paged(fetched: Any, valid_pieces: Any, bounds: Any, plan: Plan) -> tuple[Any, Any, Any]:
    """The bits of the rows of whole pages; zeros for what no token sees, or lies in a page that does not exist.

    [keys, columns] taken out of their words, or [words, columns] if the words serve as they are. Also which of them are
    valid, and their offset in the block, [1, keys].
    """
    offset = _offsets(plan)
    seen = _within(offset, bounds, plan) & ((valid_pieces >> (offset >> log2(plan.unit))) & 1 != 0)
    bits = 32 // plan.packing
    row = lax.broadcasted_iota(jnp.int32, (plan.words, 1), 0) * plan.packing
    present = jnp.zeros_like(row)
    for index in range(plan.packing):
        field = ((1 << bits) - 1) << (bits * index)
        present |= jnp.where(_within(row + index, bounds, plan), field - ((field >> 31) << 32), 0)
    present = jnp.where((valid_pieces >> (row >> log2(plan.unit))) & 1 != 0, present, 0)
    words = _words(fetched) & present
    if not _splits_words(plan):
        return words, seen, offset
    fields = [words >> (bits * index) for index in range(plan.packing)]
    return jnp.concatenate(fields, axis=0) & ((1 << bits) - 1), seen, offset


def _operands(raw: Any, plan: Plan) -> list[tuple[Any, Any]]:
    """Keys as matrix operands: parts of their columns [keys, ...], each with its scale as [1, keys] or None."""
    if plan.layout != "plain":
        return _latent_rows.operands(raw, plan.layout, plan.dtype)
    if plan.numbers is not None:
        values = _latent_rows.numbers(raw, plan.numbers)
    elif plan.selects or plan.packing == 1:
        values = pltpu.bitcast(raw << (32 - 32 // plan.packing), jnp.float32)
    else:
        values = pltpu.bitcast(raw, plan.dtype)
    return [(values.astype(plan.dtype), None)]


def _extend(plan: Plan, refs: Refs, parts: list[tuple[Any, Any]], seen: Any, few: Any) -> None:
    """Add a block of keys to the running softmax; where a job sees `few`, with what bfloat16 cuts off the weights."""
    q, m_i, l_i, acc = refs.q, refs.m_i, refs.l_i, refs.acc
    dot = functools.partial(lax.dot_general, precision=precision(plan.dtype), preferred_element_type=jnp.float32)
    products, column = [], 0
    for operand, scale in parts:
        width = operand.shape[1]
        product = dot(q[:, column : column + width], operand, (((1,), (1,)), ((), ())))
        products.append(product if scale is None else product * scale)
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
    mixed = []  # columns of values, their weights
    column = 0
    for operand, scale in parts:
        width = min(operand.shape[1], acc.shape[1] - column)
        if width <= 0:
            break
        scaled = weights if scale is None else weights * jnp.where(seen, scale, 0.0)
        values = dot(scaled.astype(plan.dtype), operand[:, :width], (((1,), (0,)), ((), ())))
        acc[:, column : column + width] = acc[:, column : column + width] * alpha + values
        mixed.append((slice(column, column + width), scaled, operand[:, :width]))
        column += width

    def add_rest() -> None:
        for columns, scaled, operand in mixed:
            rest = scaled - scaled.astype(plan.dtype).astype(jnp.float32)
            acc[:, columns] = acc[:, columns] + dot(rest.astype(plan.dtype), operand, (((1,), (0,)), ((), ())))

    if plan.split_weights_below:
        pl.when(few)(add_rest)
