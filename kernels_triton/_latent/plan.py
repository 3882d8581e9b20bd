"""Latent attention: a call in the terms of the kernel, and the selection of its tile."""

import dataclasses
import functools
from typing import Any

from ragged_attention.calls import CacheFormat, dtype_name
from ragged_attention.kernels_triton._latent.operands import columns, decoded_format, decoded_width, row_format
from ragged_attention.kernels_triton._latent.rows import RowFormat
from ragged_attention.kernels_triton._tiles import (
    OLDER_COMPILER,
    Sizes,
    cdiv,
    expect_between,
    expect_power_of_two,
    fit,
    item_size,
    next_power_of_2,
    page_unit,
    shared_memory,
)

MAX_SPLITS = 128
MIN_SPLIT = 64  # minimum keys per split: a smaller split does not pay for an extra program
MIN_INVARIANT_SPLIT = 512  # minimum keys per split in batch-invariant mode: other jobs may already fill the GPU
MAX_INVARIANT_SPLITS = 16  # maximum splits per job in batch-invariant mode
START_COST = 128  # cost of starting a program, in multiples of the cost of a key
MERGE_COST = 4  # cost of merging one more split, in multiples of the cost of a key
MIN_MENTIONS = 16  # minimum list entries per slot, on average, for decoding a cache first
MIN_ENTRIES = 2**17  # minimum list entries for decoding first: fewer do not pay for an extra kernel
MAX_DECODED_BYTES = 2**30  # maximum bytes of a decoded cache
DECODED_SHARED_MEMORY = 128 * 1024  # bytes of shared memory for 32 rows and 32 decoded keys
LARGEST_INT = 2**31 - 1
SMALLEST = 16  # rows and keys of the smallest tile
MOST_ROWS = 64  # rows of the largest tile
FEW_RANGES = 2  # models' masks have at most this many key ranges per query


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    block_h: int = 16  # rows per program: heads or, in a dense call, heads times query tokens
    block_kv: int = 32  # keys per step
    num_warps: int = 4
    num_stages: int = 2
    num_splits: int = 1  # maximum splits per job; with 1, results are batch-invariant
    invariant: bool = False  # batch-invariant mode: a job's splits depend on its length only, not on a schedule

    def __post_init__(self) -> None:
        expect_power_of_two(self, block_h=(16, 128), block_kv=(16, 128), num_warps=(1, 16))
        expect_between(self, num_stages=(1, 8), num_splits=(1, 256))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """A cache that kernels can read, and the lists of keys in it."""

    cache: Any  # [P, G, K, d_qk] or [P, G, 1, bytes], or packed rows [s_kv, K, d_qk]
    form: CacheFormat  # the format of the caller's cache
    lists: Any  # int32, with a contiguous last axis: lists of slots, or the page table [S, M] of a dense call
    list_strides: tuple[int, int, int]  # strides of sequence, query token and KV head
    lens: Any  # int32 [S] or [S, Q], or None
    longest: int  # the maximum number of keys in a list
    page_size: int  # rows per page; 1 for packed rows
    decoded: bool = False  # whether `cache` holds the rows that `decoding` wrote, see `decoded_format`

    def addresses(self, launch: Any) -> dict[str, int]:
        """The kernels' address arguments for rows and lists."""
        page, *slot, head, _ = launch.strides(self.cache)
        return {
            "page_stride": page // page_unit(page),
            "slot_stride": slot[0] if slot else 0,
            # An unused stride is 0, so that it does not make the compiler assume a worse alignment.
            "head_stride": head if self.cache.shape[-2] > 1 else 0,
            "num_slots": min(self.cache.shape[0] * self.page_size, LARGEST_INT),
            "longest": self.longest,
            "list_seq_stride": self.list_strides[0],
            "list_token_stride": self.list_strides[1],
            "list_head_stride": self.list_strides[2],
        }

    def row_format(self, arch: str, launch: Any) -> RowFormat:
        """The `RowFormat` of the cache for a GPU."""
        unit = page_unit(launch.strides(self.cache)[0])
        return decoded_format(self.form, unit) if self.decoded else row_format(self.form, arch, self.page_size, unit)


def readable(cache: Any, form: CacheFormat, launch: Any) -> Any:
    """The cache, or a copy if its alignment does not allow kernels to read scales and rotary columns as words."""
    return launch.words(cache, packed_rows=form.planar) if form.quantized else launch.packed(cache)


def keys_of_lists(
    cache: Any, form: CacheFormat, indices: Any, lens: Any, launch: Any, *, by_head: bool = False
) -> Keys:  # fmt: skip
    """The `Keys` of lists of slots: `indices` [S, Q, n] or, if `by_head`, [S, K, n]."""
    lists = launch.packed(indices)
    first, second, _ = launch.strides(lists)
    return Keys(
        cache=readable(cache, form, launch),
        form=form,
        lists=lists,
        list_strides=(first, 0, second) if by_head else (first, second, 0),
        lens=lens,
        longest=indices.shape[2],
        page_size=cache.shape[1] if len(cache.shape) == 4 else 1,
    )


def keys_of_tables(call: Any, table: Any, launch: Any) -> Keys:
    """The `Keys` of a dense call, from its packed page table."""
    return Keys(
        cache=readable(call.kv_cache, call.kv_format, launch),
        form=call.kv_format,
        lists=table,
        list_strides=(launch.strides(table)[0], 0, 0),
        lens=call.kv_lens,
        longest=call.capacity,
        page_size=call.page_size,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One call in the kernel's terms."""

    call: Any
    q: Any  # each row is contiguous
    q_strides: tuple[int, int, int]  # strides of sequence, query token and head
    lse_shape: tuple[int, ...]
    num_seqs: int
    num_q_tokens: int
    sparse: bool
    keys: Keys
    causal: bool = False
    extra: Keys | None = None
    schedule: Any = None  # (parts, num_splits, ...) or None
    window: int | None = None  # None if no window hides keys
    soft_cap: float | None = None

    @property
    def rows(self) -> int:
        """Rows per job and KV head."""
        return self.call.group * (1 if self.sparse else self.num_q_tokens)

    @property
    def jobs_per_seq(self) -> int:
        """Lists of keys per sequence."""
        return self.num_q_tokens if self.sparse else 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeyAccess:
    """How a program finds its keys. Like the cache's format, this affects how many registers the loop takes."""

    dense: bool = False  # keys come through a page table, not a list of slots
    ragged: bool = False  # each program searches for its sequence, tokens and keys
    extra: bool = False  # a second cache has further keys
    page_sizes: tuple[int, ...] = (1,)  # rows per page of each cache
    decoded: bool = False  # `decoding` has decoded the rows in advance
    windowed: bool = False  # a window, or ranges of keys, may hide a sequence's first keys
    ranges: int = 0  # key ranges per query that the loop compares with keys


def operand_size(call: Any) -> int:
    """The size of an operand's elements, in bytes."""
    return 2 if call.kv_format.quantized else item_size(call.q)


def has_small_groups(form: CacheFormat) -> bool:
    """Whether a row has more than two scales in one operand's columns, so that the scales take registers."""
    return form.quantized and form.group < 64


def mixes_formats(call: Any, access: KeyAccess) -> bool:
    """Whether the second cache has a different format from the first."""
    return access.extra and call.kv_format != call.extra_kv_format


def tile_for(call: Any, rows: int, jobs: int, keys: int, access: KeyAccess) -> Tile:
    """The tile with the smallest row blocks that suffice, 64 rows for wgmma if possible, and splits that fill the GPU.

    `jobs` is the number of jobs times KV heads, and `keys` the maximum length of a list. Block sizes depend on neither,
    so that results with `num_splits` 1 are batch-invariant.
    """
    tile = fitting_sizes(call, rows, access)
    work, multiprocessors = jobs * cdiv(rows, tile.rows), call.device.num_multiprocessors
    num_splits = splits(work, programs_at_once(call, tile.rows), keys, tile.keys)
    one_each = work * num_splits <= multiprocessors  # each multiprocessor then runs at most one program
    if one_each and call.device.arch == "sm_90" and tile.rows <= 16 and tile.stages == 2 and item_size(call.q) == 2:
        tile = tile._replace(stages=3)
    return Tile(**tile.fields("block_h"), num_splits=num_splits)


def programs_at_once(call: Any, block_h: int) -> int:
    """An estimate of the number of programs that the device runs concurrently."""
    return call.device.num_multiprocessors * (2 if block_h <= 16 else 1)


def fitting_sizes(call: Any, rows: int, access: KeyAccess) -> Sizes:
    """The sizes for `rows` rows that fit the device's shared memory."""
    most_rows = 16 if item_size(call.q) == 4 else MOST_ROWS
    tile = sizes(call, min(max(16, next_power_of_2(rows)), most_rows), access)
    size = functools.partial(shared_bytes, call, access, tile.rows)
    keys, stages = fit(call, tile.keys, tile.stages, size, good_keys=32, good_stages=tile.stages)
    return tile._replace(keys=keys, stages=stages)


def sizes(call: Any, rows: int, access: KeyAccess) -> Sizes:
    """The preferred sizes, whether or not they fit shared memory."""
    arch, form = call.device.arch, call.kv_format
    decodes = form.quantized or form.eight_bit
    if access.decoded:
        return Sizes(64, 32, 8, 3) if form.folded else Sizes(64, 64, 8, 2)
    if operand_size(call) == 4 and arch:  # no matrix unit is exact in float32
        return Sizes(16, 16, 8, 2 if OLDER_COMPILER else 1) if arch.startswith("sm_") else Sizes(16, 16, 4, 1)
    if arch.startswith("gfx"):
        # A second stage loads a block ahead. It halves the time of an iteration if rows are plain. If the loop decodes
        # rows, the stage takes so many registers that a compute unit runs one program instead of two.
        return Sizes(min(rows, 32), 16, 4, 1 if decodes else 2)
    little = shared_memory(call) < DECODED_SHARED_MEMORY
    if decodes and item_size(call.q) == 4:  # a float32 query has two terms, each with its own product
        return Sizes(16, 16 if form.folded or (little and mixes_formats(call, access)) else 32, 8, 2)
    if has_small_groups(form) and ((little and OLDER_COMPILER) or (rows <= 16 and mixes_formats(call, access))):
        return Sizes(16, 16, 4, 2)  # scales of many groups or of two formats take registers
    crowded = access.ragged and access.windowed and form.folded  # here 32 rows would spill
    if decodes and access.ranges:
        if form.quantized and not form.folded:
            return Sizes(16, 32, 4 if little and not OLDER_COMPILER else 8, 2)
        few = access.ranges <= FEW_RANGES and not (form.eight_bit and OLDER_COMPILER)
        # Triton 3.9 spills with four warps, and Triton 3.6 with eight. A second stage takes registers.
        return Sizes(16, 16, 4 if OLDER_COMPILER else 8, 2 if few else 1)
    if rows <= 16 or crowded or (decodes and little):
        num_warps = 8 if decodes and little and OLDER_COMPILER else 4  # with four warps, sm_120 spills
        return Sizes(16, 32, num_warps, 3 if not decodes and arch == "sm_90" else 2)
    wgmma = rows >= 64 and arch == "sm_90" and call.d_v <= 512
    if not decodes:
        if wgmma and not access.ranges and not (OLDER_COMPILER and access.extra):
            partial_pages = access.dense and access.page_sizes[0] % 64 != 0
            fewer = access.windowed or (access.ragged and OLDER_COMPILER) or partial_pages
            return Sizes(64, 32, 8, 3) if fewer else Sizes(64, 64, 8, 2)
        return Sizes(32, 32, 4 if arch.startswith("sm_8") and not access.windowed else 8, 2)
    if wgmma and fits_wgmma(call, access):
        scales = has_small_groups(form) and access.extra  # the scales of two formats take registers
        return Sizes(64, 32, 8, 2 if scales else 3)
    more_keys = form.folded and not (access.windowed or OLDER_COMPILER)
    return Sizes(32, 64 if more_keys else 32, 8, 2)


def too_wide(call: Any, access: KeyAccess) -> str | None:
    """The reason why no tile fits shared memory, or None. AMD GPUs hold operands in registers, so any tile fits."""
    budget = call.device.shared_memory
    if call.device.platform != "cuda" or not budget:
        return None
    least = shared_bytes(call, access, SMALLEST, SMALLEST, 1)
    if least <= budget:
        return None
    limit = f"{budget} bytes of shared memory together with {SMALLEST} keys"
    return (
        f"expected rows of which {SMALLEST} fit {limit}, got d_qk {call.d_qk} in {dtype_name(call.q)}, "
        f"which take {least} bytes"
    )


def fits_wgmma(call: Any, access: KeyAccess) -> bool:
    """Whether a tile of 64 rows, with wgmma, leaves registers for decoding."""
    form, dtype = call.kv_format, dtype_name(call.q)
    if access.windowed:
        return False
    if form.eight_bit:
        return dtype == "bfloat16" and form.codes != "int8"
    if form.folded:
        return not access.extra and not (OLDER_COMPILER and (access.ragged or dtype == "float16"))
    if dtype != "bfloat16" or OLDER_COMPILER:
        return False
    if has_small_groups(form):
        return not (form.packed_codes and access.extra)
    return not access.extra or all(size.bit_count() == 1 for size in access.page_sizes)


def decodes_first(call: Any) -> bool:
    """Whether a sparse prefill decodes its quantised cache once in advance, instead of once for each list entry.

    It does so only on Hopper with tiles of 64 rows, where measurements showed this to be faster. The estimate includes
    list entries that name no slot, because the host cannot distinguish them from other entries.
    """
    if not call.kv_format.quantized or dtype_name(call.q) != "bfloat16" or call.d_v > 512:
        return False
    if call.device.arch != "sm_90" or next_power_of_2(call.group) < 64:
        return False
    entries = call.num_tokens * call.topk
    often = entries >= max(MIN_MENTIONS * call.num_slots, MIN_ENTRIES)
    return often and 2 * call.num_slots * decoded_width(call.kv_format) <= MAX_DECODED_BYTES


def shared_bytes(call: Any, access: KeyAccess, rows: int, keys: int, stages: int) -> int:
    """Estimated bytes of shared memory: queries, weights, rows in flight and, if the loop decodes, decoded operands."""
    form = call.kv_format
    values, rest = (next_power_of_2(n) if n else 0 for n in columns(call))
    queries = rows * (values + rest + keys)
    if form.eight_bit:
        return (2 * keys * (values + rest) + queries) * operand_size(call) + (stages - 1) * keys * call.d_qk
    if access.decoded or not form.quantized:
        # Asynchronous products (wgmma) need one more buffer.
        return (max(stages - (rows < 64), 1) * keys * (values + rest) + queries) * operand_size(call)
    staged = 0 if form.folded else 128
    return (keys * (2 * values + rest + staged) + queries) * operand_size(call) + (stages - 1) * keys * call.d_qk


def splits(work: int, concurrent: int, keys: int, block_kv: int) -> int:
    """The number of splits per job that is fastest if all lists have their maximum length, `keys`.

    Without splits there would be `work` programs, and the device runs `concurrent` at once. A split consists of whole
    key blocks. If several numbers are equally fast, the smallest is returned.
    """
    blocks, least = cdiv(keys, block_kv), cdiv(MIN_SPLIT, block_kv)
    most = max(1, min(MAX_SPLITS, cdiv(keys, MIN_SPLIT)))

    def cost(n: int) -> int:
        longest = max(cdiv(blocks, n), least) * block_kv
        return cdiv(work * n, concurrent) * (longest + START_COST) + (n > 1) * n * MERGE_COST

    return min(range(1, most + 1), key=cost)
