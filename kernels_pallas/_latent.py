"""The attention over latent rows that `mla_decode` and `sparse_mla_prefill` share: one kernel.

A *job* is what shares a list of keys: some rows of queries (heads, in a dense call times query tokens), and a list that
is either of rows of the cache (a selection) or of whole pages of it. The kernel goes through a job's list a block at a
time. The pieces of a block are fetched from HBM by one asynchronous copy each, into one of two buffers; while one
block is computed the next is on its way, also across jobs. A buffer has one semaphore, and one wait for all its copies.

A TPU keeps 2 rows of 16 bits, or 4 rows of 8 bits, in the same 32-bit words, and copies whole words. So the cache is
seen as groups of rows that share words, `[groups, 2 or 4, d]`; a selected row comes with its group, and its bits are
shifted out of the words. `row_layout` is the layout in which a cache is seen that way without moving a byte; of a
cache in another one XLA makes a copy first, and of a float16 one, which no TPU computes with, always.

A row is fetched once and is both key and value. Rows that the query does not see (beyond the length, of invalid
indices) are made zeros while they are words, so what they hold cannot matter. `fp8_v32` rows are never multiplied by
their scales: the codes become matrix operands, exactly, and the scale of a group of 128 columns goes into the logits of
that group and into the weights of that group's values. Rotary columns stay where their low bytes lie: the queries'
rotary columns are spread to meet them there.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.layout import Layout
from jax.experimental.pallas import tpu as pltpu

from ragged_attention.calls import CACHE_FORMATS, MlaDecode, SparseMlaPrefill, dtype_name
from ragged_attention.errors import InvalidInput
from ragged_attention.kernels_pallas._blocks import LANES, cannot_run, cdiv, expect_sizes, round_up

MOST_KEYS = 2048  # of a block
MOST_ROWS = 512  # of queries at once, half as many of 32 bits
LARGEST_INT = 2**31 - 1
LONGEST_CHUNK = 2048  # entries of a list that are in scalar memory at once
LARGEST_UNIT = 256  # rows of a page that one copy fetches
MOST_UNITS = 32  # copies of a block of pages; a word has a bit for each
TAIL = 2 * LANES  # lanes for the scales' and the rotary columns' bytes of `fp8_v32`
UNROLL = 8  # copies that are begun in one turn of a loop
V32 = CACHE_FORMATS["fp8_v32"]


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


def why_not(call: MlaDecode | SparseMlaPrefill) -> str | None:
    """Why the kernel does not take a call, or None."""
    if reason := cannot_run(call):
        return reason
    if dtype_name(call.q) == "float64":
        return "takes q.dtype of at most 32 bits, got float64"
    if call.format not in ("plain", "fp8_v32"):
        why = ", whose pages no copy can cut into rows" if call.layout.planar else ""  # type: ignore[union-attr]
        return f"takes cache_format 'plain' and 'fp8_v32', got {call.format!r}{why}"
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
    lens: Any | None = None  # i32 [L], how many keys there are in whole pages; None: pieces are single rows


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


def selected_rows(cache: Any, rows: Any) -> Keys:
    """Keys that are single rows, by their numbers [L, N] in `cache` [..., columns]; -1 selects nothing."""
    cache = words_of(cache).reshape(-1, cache.shape[-1])
    packing = rows_per_word(cache.dtype)
    if missing := -len(cache) % packing:
        cache = jnp.pad(cache, ((0, missing), (0, 0)))
    return Keys(cache=cache.reshape(-1, 1, packing, cache.shape[-1]), pieces=rows)


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
    """One call: rows of queries, job after job, and lists, each of which `share` jobs one after another use."""

    call: Any
    q: Any  # [jobs, rows, d_qk]
    keys: Keys
    extra: Keys | None = None  # the same number of lists; of single rows, as those of `keys`
    share: int = 1
    limits: Any = None  # i32 [jobs, rows]: a row sees positions below; None is no limit
    sinks: Any = None  # f32 [kinds of jobs, rows]; job j has kind (j // share) % kinds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the kernel is specialised to."""

    layout: str  # of the cache
    half: bool  # its 16 bits are float16
    selects: bool
    pieces: int  # of a block
    unit: int  # rows of a piece as it is fetched
    packing: int
    blocks: int  # of a chunk, at most
    chunks: int  # of a list
    first_extra: int  # the first chunk of the second cache
    tiles: int  # that the rows of one of the call's jobs are divided into; each is a job here
    jobs_per_core: int
    limited: bool
    scale: float
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

    @property
    def value_columns(self) -> int:
        """Columns of the accumulator; those of `fp8_v32` come in groups, the rotary ones with gaps between them."""
        if self.layout == "plain":
            return self.d_v
        return round_up(min(self.d_v, V32.values), LANES) + TAIL * (self.d_v > V32.values)


def precision(dtype: Any) -> Any:
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def run(work: Work, tile: Tile) -> tuple[Any, Any, Any]:
    """Out [jobs, rows, d_v] of q's dtype, max_logits and lse [jobs, rows] float32."""
    call = work.call
    jobs, rows, _ = work.q.shape
    half_wide = dtype_name(call.q) == "bfloat16"
    tiles = cdiv(rows, MOST_ROWS if half_wide else MOST_ROWS // 2)
    rows_per_tile = round_up(cdiv(rows, tiles), 16 if half_wide else 8)

    def tiled(array: Any) -> Any:
        """[..., rows, ...] as [... * tiles, rows of a tile, ...]."""
        array = jnp.pad(array, ((0, 0), (0, tiles * rows_per_tile - rows), *[(0, 0)] * (array.ndim - 2)))
        return array.reshape(-1, rows_per_tile, *array.shape[2:])

    plan = _plan(work, tile, tiles)
    operands = [tiled(_spread(work.q.astype(plan.dtype), plan))]
    for values in (work.limits, work.sinks):
        if values is not None:
            operands.append(jnp.broadcast_to(tiled(values)[..., None], (*tiled(values).shape, LANES)))
    out_dtype = jnp.float32 if dtype_name(call.q) == "float16" else call.q.dtype
    out, stats = _launch(plan, work, operands, out_dtype, tile)
    out = _gathered(out.reshape(jobs, tiles * rows_per_tile, -1)[:, :rows], plan).astype(call.q.dtype)
    stats = stats.reshape(jobs, tiles, 8, rows_per_tile).swapaxes(1, 2).reshape(jobs, 8, -1)[:, :, :rows]
    return out, stats[:, 0], stats[:, 1]


def _plan(work: Work, tile: Tile, tiles: int) -> Plan:
    call, keys = work.call, work.keys
    _, groups, packing, _ = keys.cache.shape
    selects, unit = keys.lens is None, groups * packing
    pieces = tile.num_keys_per_block // (1 if selects else unit)
    if not selects:
        pieces = max(1, min(pieces, keys.pieces.shape[1], MOST_UNITS))
    lengths = [part.pieces.shape[1] for part in (keys, work.extra) if part is not None]
    blocks = min(max(1, LONGEST_CHUNK // pieces), max(cdiv(length, pieces) for length in lengths))
    chunks = [cdiv(length, blocks * pieces) for length in lengths]
    jobs, cores = work.q.shape[0] * tiles, max(1, call.device.num_multiprocessors)
    return Plan(
        layout=call.format,
        half=keys.cache.dtype == jnp.int16,
        selects=selects,
        pieces=pieces,
        unit=unit,
        packing=packing,
        blocks=blocks,
        chunks=sum(chunks),
        first_extra=chunks[0],
        tiles=tiles,
        jobs_per_core=jobs if jobs % cores else jobs // cores,
        limited=work.limits is not None,
        scale=call.scale,
        d_v=call.d_v,
        dtype=jnp.dtype(jnp.bfloat16 if dtype_name(call.q) == "bfloat16" else jnp.float32),
    )


def log2(power: int) -> int:
    return power.bit_length() - 1


def _spread(q: Any, plan: Plan) -> Any:
    """Queries with their rotary columns where the kernel has those of an `fp8_v32` row."""
    if plan.layout == "plain":
        return q
    first, rotary = q[..., : V32.values], q[..., V32.values :]
    rotary = jnp.stack([rotary, jnp.zeros_like(rotary)], axis=-1).reshape(*rotary.shape[:-1], -1)
    before = V32.token_bytes - V32.values - 2 * V32.rotary
    after = TAIL - before - 2 * V32.rotary
    rotary = jnp.pad(rotary, [(0, 0)] * (q.ndim - 1) + [(before, after)])
    return jnp.concatenate([first, rotary], axis=-1)


def _gathered(out: Any, plan: Plan) -> Any:
    """The inverse of `_spread` for the values' columns."""
    if plan.layout == "plain" or plan.d_v <= V32.values:
        return out[..., : plan.d_v]
    before = V32.token_bytes - V32.values - 2 * V32.rotary
    first, rotary = out[..., : V32.values], out[..., V32.values + before :: 2]
    return jnp.concatenate([first, rotary[..., : plan.d_v - V32.values]], axis=-1)


def _lists(keys: Keys, plan: Plan) -> list[Any]:
    """The lists in chunks. For scalar memory [L, C, 1, ...]: pieces, in a call on whole pages a word for each block
    with the bits of its valid pieces and the list's length, and the number of blocks. Of single rows also, for vector
    memory, the index of each among those that share its words, or -1, [L, C, blocks, rows].
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
    if keys.lens is None:
        scalars = jnp.concatenate([numbers, count], axis=-1)
        return [scalars[:, :, None], jnp.where(in_blocks >= 0, in_blocks % plan.packing, -1)]
    bits = jnp.uint32(1) << jnp.arange(plan.pieces, dtype=jnp.uint32)
    bits = jnp.where(in_blocks >= 0, bits, 0).sum(axis=-1, dtype=jnp.uint32)
    lens = jnp.broadcast_to(keys.lens[:, None, None], count.shape)
    scalars = jnp.concatenate([numbers, lax.bitcast_convert_type(bits, jnp.int32), lens, count], axis=-1)
    return [scalars[:, :, None]]


def _launch(plan: Plan, work: Work, operands: list[Any], out_dtype: Any, tile: Tile) -> tuple[Any, Any]:
    parts = [keys for keys in (work.keys, work.extra) if keys is not None]
    chunked = [jnp.concatenate(arrays, axis=1) for arrays in zip(*(_lists(keys, plan) for keys in parts), strict=True)]
    scalars, *vectors = [array.reshape(-1, *array.shape[2:]) for array in chunked]
    jobs, rows, _ = operands[0].shape
    steps = plan.jobs_per_core * plan.chunks
    share, kinds = work.share * plan.tiles, 1 if work.sinks is None else work.sinks.shape[0]

    def job(core: Any, step: Any) -> Any:
        return core * plan.jobs_per_core + step // plan.chunks

    def chunk(core: Any, step: Any) -> Any:
        return job(core, step) // share * plan.chunks + step % plan.chunks

    def of_job(core: Any, step: Any) -> tuple[Any, ...]:
        return job(core, step), 0, 0

    def of_kind(core: Any, step: Any) -> tuple[Any, ...]:
        return job(core, step) // share % kinds * plan.tiles + job(core, step) % plan.tiles, 0, 0

    def of_chunk(core: Any, step: Any) -> tuple[Any, ...]:
        return chunk(core, step), 0, 0

    def of_next_chunk(core: Any, step: Any) -> tuple[Any, ...]:
        return chunk(core, jnp.minimum(step + 1, steps - 1)), 0, 0

    def block(array: Any, index: Any, memory: Any = pltpu.VMEM) -> pl.BlockSpec:
        return pl.BlockSpec((None, *array.shape[1:]), index, memory_space=memory)

    maps = [of_job, *([of_job] * plan.limited), *([of_kind] * (work.sinks is not None))]
    whole = pl.BlockSpec(memory_space=pltpu.HBM)
    buffer = (2, plan.pieces, plan.unit // plan.packing, plan.packing, work.keys.cache.shape[-1])
    columns = plan.value_columns
    return pl.pallas_call(
        functools.partial(_kernel, plan, work.sinks is not None, len(parts)),
        grid=(jobs // plan.jobs_per_core, steps),
        in_specs=[
            block(scalars, of_chunk, pltpu.SMEM),
            block(scalars, of_next_chunk, pltpu.SMEM),
            *(block(array, of_chunk) for array in vectors),
            *(block(array, index) for array, index in zip(operands, maps, strict=True)),
            *[whole] * len(parts),
        ],
        out_specs=[pl.BlockSpec((None, rows, columns), of_job), pl.BlockSpec((None, 8, rows), of_job)],
        out_shape=[
            jax.ShapeDtypeStruct((jobs, rows, columns), out_dtype),
            jax.ShapeDtypeStruct((jobs, 8, rows), jnp.float32),
        ],
        scratch_shapes=[
            pltpu.VMEM(buffer, work.keys.cache.dtype),
            pltpu.VMEM((rows, LANES), jnp.float32),
            pltpu.VMEM((rows, LANES), jnp.float32),
            pltpu.VMEM((rows, columns), jnp.float32),
            pltpu.SMEM((1,), jnp.int32),
            pltpu.SemaphoreType.DMA((2,)),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            disable_bounds_checks=True,  # the numbers of pieces are clamped to the cache, and a check takes two thirds
            vmem_limit_bytes=tile.vmem_limit_bytes or None,  # of the time that beginning a copy takes
        ),
        name="latent_attention",
    )(scalars, scalars, *vectors, *operands, *(keys.cache for keys in parts))


# ---- the kernel


def _kernel(plan: Plan, has_sinks: bool, num_caches: int, lists: Any, next_lists: Any, *others: Any) -> None:
    """One chunk of one job's list; the first chunk of a job begins its softmax, the last one finishes it."""
    refs = list(others)
    indices = refs.pop(0) if plan.selects else None
    q = refs.pop(0)
    limits = refs.pop(0) if plan.limited else None
    sinks = refs.pop(0) if has_sinks else None
    caches, (out, stats, buffer, m_i, l_i, acc, turn, arrived) = refs[:num_caches], refs[num_caches:]
    step = pl.program_id(1)
    chunk = step % plan.chunks
    next_chunk = jnp.where(chunk + 1 == plan.chunks, 0, chunk + 1)
    last = lists.shape[1] - 1
    num_blocks = lists[0, last]
    num_next = jnp.where(step == pl.num_programs(1) - 1, 0, next_lists[0, last])

    @pl.when(step == 0)
    def _() -> None:
        turn[0] = 0

    pl.when(chunk == 0)(lambda: _begin(m_i, l_i, acc))

    def start(block: Any, own: Any, slot: Any) -> None:
        """Fetch a block of this step, or the first of the next; a piece that is not valid fetches some other."""

        def one(cache: Any, piece: Any) -> None:
            index = block * plan.pieces + piece
            number = jnp.where(own, lists[0, index], next_lists[0, index])
            pltpu.make_async_copy(cache.at[number], buffer.at[slot, piece], arrived.at[slot]).start()

        def fetch(cache: Any) -> None:
            pl.loop(0, plan.pieces, unroll=math.gcd(plan.pieces, UNROLL))(functools.partial(one, cache))

        extra = jnp.where(own, chunk, next_chunk) >= plan.first_extra
        pl.when(jnp.logical_not(extra))(lambda: fetch(caches[0]))
        if num_caches == 2:
            pl.when(extra)(lambda: fetch(caches[1]))

    def turn_over(block: Any, carry: None) -> None:
        """Begin to fetch what comes after a block, then compute it; before the first block (-1) there is none."""
        slot = turn[0]
        own = block + 1 < num_blocks

        @pl.when(own | (num_next > 0))
        def _() -> None:
            start(jnp.where(own, block + 1, 0), own, jnp.where(block < 0, slot, 1 - slot))

        @pl.when(block >= 0)
        def _() -> None:
            pltpu.make_async_copy(buffer.at[slot], buffer.at[slot], arrived.at[slot]).wait()
            first = (chunk * plan.blocks + block) * plan.keys
            raw, seen, offset = _taken(buffer[slot], lists, indices, block, first, plan)
            if limits is not None:
                seen &= first + offset < limits[:, :1]
            _extend(q, _operands(raw, plan), seen, plan, m_i, l_i, acc)
            turn[0] = 1 - slot

        return carry

    # The step before has begun to fetch this one's first block; but there is none before the first step.
    lax.fori_loop(jnp.where((step == 0) | (num_blocks == 0), -1, 0), num_blocks, turn_over, None)

    @pl.when(chunk == plan.chunks - 1)
    def _() -> None:
        lse, factor = _finished(m_i[:, :1], l_i[:, :1], None if sinks is None else sinks[:, :1])
        out[...] = (acc[...] * factor).astype(out.dtype)
        lane = lax.broadcasted_iota(jnp.int32, m_i.shape, 1)
        stats[...] = jnp.where(lane == 0, m_i[...], lse).T[:8]


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


def _taken(fetched: Any, lists: Any, indices: Any, block: Any, first: Any, plan: Plan) -> tuple[Any, Any, Any]:
    """The bits of a block's keys, which of them are valid, and their offset from `first`, where the block begins."""
    if indices is not None:
        return _selected(fetched, indices[pl.ds(block, 1), :], plan)
    valid_pieces = lists[0, plan.blocks * plan.pieces + block]
    kv_len = lists[0, lists.shape[1] - 2]
    return _paged(fetched, valid_pieces, kv_len - first, plan)


def _words(fetched: Any) -> Any:
    """What was fetched as rows of 32-bit words."""
    return pltpu.bitcast(fetched.reshape(-1, fetched.shape[-1]), jnp.int32)


def _selected(fetched: Any, index: Any, plan: Plan) -> tuple[Any, Any, Any]:
    """The bits of selected rows, [keys, columns], of the words each shares with others; zeros where `index` is -1.

    Also which of them are valid, and their offset in the block, [1, keys].
    """
    bits = 32 // plan.packing
    column = jnp.broadcast_to(index, (8, plan.keys)).T[:, :1]
    words = _words(fetched)
    if plan.packing > 1:
        words = (words >> (bits * jnp.maximum(column, 0))) & ((1 << bits) - 1)
    return jnp.where(column >= 0, words, 0), index >= 0, lax.broadcasted_iota(jnp.int32, (1, plan.keys), 1)


def _splits_words(plan: Plan) -> bool:
    """Whether keys of whole pages are taken out of their words, ordered by their index within a word."""
    return plan.packing > 1 and (plan.layout != "plain" or plan.half)


def _offsets(plan: Plan) -> Any:
    """Which position in a block of whole pages each key has, [1, keys]."""
    lane = lax.broadcasted_iota(jnp.int32, (1, plan.keys), 1)
    if not _splits_words(plan):
        return lane
    index = sum((lane >= plan.words * index).astype(jnp.int32) for index in range(1, plan.packing))
    return (lane - plan.words * index) * plan.packing + index


def _paged(fetched: Any, valid_pieces: Any, kv_len: Any, plan: Plan) -> tuple[Any, Any, Any]:
    """The bits of the rows of whole pages; zeros for what lies beyond the length, or in a page that does not exist.

    [keys, columns] taken out of their words, or [words, columns] if the words serve as they are. Also which of them are
    valid, and their offset in the block, [1, keys].
    """
    offset = _offsets(plan)
    seen = (offset < kv_len) & ((valid_pieces >> (offset >> log2(plan.unit))) & 1 != 0)
    bits = 32 // plan.packing
    row = lax.broadcasted_iota(jnp.int32, (plan.words, 1), 0) * plan.packing
    present = jnp.zeros_like(row)
    for index in range(plan.packing):
        field = ((1 << bits) - 1) << (bits * index)
        present |= jnp.where(row + index < kv_len, field - ((field >> 31) << 32), 0)
    present = jnp.where((valid_pieces >> (row >> log2(plan.unit))) & 1 != 0, present, 0)
    words = _words(fetched) & present
    if not _splits_words(plan):
        return words, seen, offset
    fields = [words >> (bits * index) for index in range(plan.packing)]
    return jnp.concatenate(fields, axis=0) & ((1 << bits) - 1), seen, offset


def _operands(raw: Any, plan: Plan) -> list[tuple[Any, Any]]:
    """Keys as matrix operands: parts of their columns [keys, ...], each with its scale as [1, keys] or None."""
    if plan.layout != "plain":
        return _v32_operands(raw, plan)
    if plan.half:
        values = _from_bits(raw, exponent=5, mantissa=10)
    elif plan.selects or plan.packing == 1:
        values = pltpu.bitcast(raw << (32 - 32 // plan.packing), jnp.float32)
    else:
        values = pltpu.bitcast(raw, plan.dtype)
    return [(values.astype(plan.dtype), None)]


def _from_bits(raw: Any, *, exponent: int, mantissa: int) -> Any:
    """Small floats, as integers, in float32; exactly, also where the unit flushes what is below the normal numbers."""
    magnitude = raw & ((1 << (exponent + mantissa)) - 1)
    up, bias = 23 - mantissa, 127 - ((1 << (exponent - 1)) - 1)
    smallest = 2.0 ** (bias + 1 - 127)
    normal = pltpu.bitcast((magnitude << up) + (bias << 23), jnp.float32)
    below = pltpu.bitcast((magnitude << up) | ((bias + 1) << 23), jnp.float32) - jnp.float32(smallest)
    value = jnp.where(magnitude < (1 << mantissa), below, normal)
    if exponent == 5:
        infinite = pltpu.bitcast((magnitude << up) | 0x7F800000, jnp.float32)
        value = jnp.where(magnitude >= (31 << mantissa), infinite, value)
    else:  # e4m3 has no infinity and one NaN
        value = jnp.where(magnitude == (1 << (exponent + mantissa)) - 1, jnp.float32(jnp.nan), value)
    return jnp.where((raw >> (exponent + mantissa)) != 0, -value, value)


def _v32_operands(raw: Any, plan: Plan) -> list[tuple[Any, Any]]:
    """Four groups of 128 columns with their scales, then the rotary columns at every other lane behind the scales'."""
    num_keys = raw.shape[0]
    tail = raw[:, V32.values :]
    tail = jnp.concatenate([tail, jnp.zeros((num_keys, TAIL - tail.shape[1]), jnp.int32)], axis=1)
    pairs = tail | (pltpu.roll(tail, TAIL - 1, 1) << 8)
    scales = pltpu.bitcast(pairs | (pltpu.roll(pairs, TAIL - 2, 1) << 16), jnp.float32)[:, :LANES].T
    lane = lax.broadcasted_iota(jnp.int32, tail.shape, 1)
    first = V32.token_bytes - V32.values - 2 * V32.rotary
    is_rotary = (lane >= first) & (lane < first + 2 * V32.rotary) & (lane % 2 == 0)
    rotary = pltpu.bitcast(jnp.where(is_rotary, pairs << 16, 0), jnp.float32)
    groups = range(V32.values // V32.group)
    values = _from_bits(raw[:, : V32.values], exponent=4, mantissa=3).astype(plan.dtype)
    parts = [(values[:, V32.group * g : V32.group * (g + 1)], scales[4 * g : 4 * g + 1]) for g in groups]
    return [*parts, (rotary.astype(plan.dtype), None)]


def _extend(q: Any, parts: list[tuple[Any, Any]], seen: Any, plan: Plan, m_i: Any, l_i: Any, acc: Any) -> None:
    """Add a block of keys to the running softmax."""
    dot = functools.partial(lax.dot_general, precision=precision(plan.dtype), preferred_element_type=jnp.float32)
    products, column = [], 0
    for operand, scale in parts:
        width = operand.shape[1]
        product = dot(q[:, column : column + width], operand, (((1,), (1,)), ((), ())))
        products.append(product if scale is None else product * scale)
        column += width
    logits = jnp.where(seen, sum(products[1:], products[0]) * plan.scale, -jnp.inf)
    before = m_i[:, :1]
    high = jnp.maximum(before, logits.max(axis=1, keepdims=True))
    base = jnp.where(high == -jnp.inf, 0.0, high)
    weights, alpha = jnp.exp(logits - base), jnp.exp(before - base)
    m_i[...] = jnp.broadcast_to(high, m_i.shape)
    l_i[...] = l_i[...] * alpha + weights.sum(axis=1, keepdims=True)
    column = 0
    for operand, scale in parts:
        width = min(operand.shape[1], acc.shape[1] - column)
        if width <= 0:
            break
        scaled = weights if scale is None else weights * jnp.where(seen, scale, 0.0)
        values = dot(scaled.astype(plan.dtype), operand[:, :width], (((1,), (0,)), ((), ())))
        acc[:, column : column + width] = acc[:, column : column + width] * alpha + values
        column += width
