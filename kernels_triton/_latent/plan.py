"""Latent attention: a call in the terms of the kernel, and its tile."""

import dataclasses
import functools
import math
from typing import Any

from ragged_attention.calls import CacheFormat, dtype_name, name_in_layout
from ragged_attention.calls.cache_formats import MIXED
from ragged_attention.kernels_triton._tiles import (
    OLDER_COMPILER,
    SMALLEST_SHARED_MEMORY,
    cdiv,
    expect_between,
    expect_power_of_two,
    fit,
    item_size,
    next_power_of_2,
)

MAX_SPLITS = 128


MIN_SPLIT = 64  # keys below which a split is not worth its program


OWN_SPLIT = 512  # the same where a job's splits do not depend on the batch, so that there may be enough already


OWN_SPLITS = 16  # which there are then at most


START_COST = 128  # of a program, in keys


MERGE_COST = 4  # of one more split to merge, in keys


DECODED_EACH = 16  # how often lists name each slot on average from which on a cache is decoded first


DECODED_LEAST = 2**17  # entries of lists below which that is not worth one more kernel


DECODED_MOST = 2**30  # bytes that it may take


DECODED_SHARED_MEMORY = 128 * 1024  # what 32 rows and as many decoded keys need


LARGEST_INT = 2**31 - 1


LEAST = 16  # rows, and keys, of a tile


COPIED = ("plain", "decoded_v4")  # layouts of which rows are operands as they lie, and no more


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """What may be tuned."""

    block_h: int = 16  # rows of a program: heads, in a dense call times query tokens
    block_kv: int = 32  # keys per step
    num_warps: int = 4
    num_stages: int = 2
    num_splits: int = 1  # programs that share one job's keys at most; 1 gives bits that depend on nothing else
    invariant: bool = False  # so do more, by the job's own length alone, whatever a schedule says

    def __post_init__(self) -> None:
        expect_power_of_two(self, block_h=(16, 128), block_kv=(16, 128), num_warps=(1, 16))
        expect_between(self, num_stages=(1, 8), num_splits=(1, 256))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """A cache as kernels can read it, and the lists of keys into it."""

    cache: Any  # [P, G, K, d_qk] or [P, G, 1, bytes], or packed rows [s_kv, K, d_qk]
    lists: Any  # i32, packed: lists of slots, or the page table [S, M] of a dense call
    list_strides: tuple[int, int, int]  # of sequence, query token, KV head
    lens: Any  # i32 [S] or [S, Q], or None
    longest: int  # keys a list can hold
    page_size: int

    def lengths(self, launch: Any) -> dict[str, int]:
        """The kernels' arguments about the lists' lengths."""
        seq, token = (0, 0) if self.lens is None else (*launch.strides(self.lens), 0)[:2]
        return {"longest": self.longest, "lens_seq_stride": seq, "lens_token_stride": token}

    def addresses(self, launch: Any) -> dict[str, int]:
        """The kernels' arguments about where rows and lists lie."""
        if len(self.cache.shape) == 3:
            page, head, _ = launch.strides(self.cache)
            slot = 0
        else:
            page, slot, head, _ = launch.strides(self.cache)
        # Compilers learn that a number is a multiple of 16 or nothing; pages may begin at a multiple of less.
        unit = math.gcd(page, 16)
        return {
            "page_stride": page // unit,
            "PAGE_UNIT": unit,
            "slot_stride": slot,
            # Values that are never used must not spoil what compilers conclude about alignment.
            "head_stride": head if self.cache.shape[-2] > 1 else 0,
            "num_slots": min(self.cache.shape[0] * self.page_size, LARGEST_INT),
            "list_seq_stride": self.list_strides[0],
            "list_token_stride": self.list_strides[1],
            "list_head_stride": self.list_strides[2],
        }


def readable(cache: Any, layout: CacheFormat | None, launch: Any) -> Any:
    """The cache, copied if kernels cannot read it as it lies: they read scales and rotary columns as words."""
    return launch.packed(cache) if layout is None else launch.words(cache, packed_rows=layout.planar)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One call in the kernel's terms."""

    call: Any
    q: Any  # packed
    q_strides: tuple[int, int, int]  # of sequence, query token, head
    lse_shape: tuple[int, ...]
    num_seqs: int
    num_q_tokens: int
    num_kv_heads: int
    sparse: bool
    causal: bool
    keys: Keys
    extra: Keys | None
    schedule: Any  # (parts, num_splits, ...) or None
    window: int | None = None  # None: of all keys
    soft_cap: float | None = None
    decoded: bool = False  # whether `keys` are those that `decoding` wrote

    @property
    def format(self) -> str:
        """How rows lie in the cache, or in place of it."""
        if self.decoded:
            return "decoded_v32" if self.call.format == "fp8_v32" else "decoded_v4"
        return name_in_layout(self.call.layout)

    @property
    def group(self) -> int:
        return self.call.num_q_heads // self.num_kv_heads

    @property
    def rows(self) -> int:
        """Rows of a job for one KV head."""
        return self.group if self.sparse else self.group * self.num_q_tokens

    @property
    def jobs_per_seq(self) -> int:
        return self.num_q_tokens if self.sparse else 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """What of a call decides how many registers a walk over its keys takes, besides the format."""

    dense: bool = False  # through a table of pages instead of a list of slots
    ragged: bool = False  # of which sequence, tokens and keys, a program finds by itself
    extra: bool = False  # on through a second cache
    page_sizes: tuple[int, ...] = (1,)
    decoded: bool = False  # over rows that were decoded before
    windowed: bool = False  # with masks that begin where a window does
    codes: bool = False  # over rows of 8-bit numbers, which share one scale


def window_of(call: Any) -> int | None:
    """The call's window; one as long as the longest sequence hides nothing."""
    return call.sliding_window if call.sliding_window and call.sliding_window < call.capacity else None


def columns(call: Any) -> tuple[int, int]:
    """Columns of the operand that serves as V, and of the other one."""
    if call.format == "plain":
        return call.d_v, call.d_qk - call.d_v
    return (512, 64) if call.format == "fp8_v32" else (512, 0)


def decoded_width(call: Any) -> int:
    """Elements, of 16 bits, of a decoded row: with `fp8_v32` four scales between the columns, and 8 that nobody reads,
    so that rows begin at multiples of 16."""
    return 592 if call.format == "fp8_v32" else 512


def operand_size(call: Any) -> int:
    return item_size(call.q) if call.format == "plain" else 2


def tile_for(call: Any, rows: int, jobs: int, keys: int, walk: Walk) -> Tile:
    """As few rows as suffice, wgmma-sized where there are 64; splits that fill the GPU.

    `jobs` counts jobs times KV heads, `keys` is the longest list there can be. Tile sizes depend on neither, so that
    with `num_splits` 1 a sequence's bits do not depend on its batch.
    """
    block_h, block_kv, num_warps, num_stages = fitting_sizes(call, rows, walk)
    work, multiprocessors = jobs * cdiv(rows, block_h), call.device.num_multiprocessors
    num_splits = splits(work, programs_at_once(call, block_h), keys, block_kv)
    alone = work * num_splits <= multiprocessors  # so that there is no other program to work while one waits
    if alone and call.device.arch == "sm_90" and block_h <= 16 and num_stages == 2 and item_size(call.q) == 2:
        num_stages = 3
    return Tile(
        block_h=block_h,
        block_kv=block_kv,
        num_warps=num_warps,
        num_stages=num_stages,
        num_splits=num_splits,
    )


def programs_at_once(call: Any, block_h: int) -> int:
    """How many programs the device runs, by estimate."""
    return call.device.num_multiprocessors * (2 if block_h <= 16 else 1)


def fitting_sizes(call: Any, rows: int, walk: Walk) -> tuple[int, int, int, int]:
    """Rows, keys, warps and stages for so many rows, as the device's shared memory has room for them."""
    block_h, block_kv, num_warps, num_stages = sizes(
        call, min(max(16, next_power_of_2(rows)), 16 if item_size(call.q) == 4 else 64), walk
    )
    size = functools.partial(shared_bytes, call, walk, block_h)
    block_kv, num_stages = fit(call, block_kv, num_stages, size, good_keys=32, good_stages=num_stages)
    return block_h, block_kv, num_warps, num_stages


def sizes(call: Any, rows: int, walk: Walk) -> tuple[int, int, int, int]:
    """Rows, keys, warps and stages."""
    arch, plain = call.device.arch, call.format == "plain" and not walk.codes
    if walk.decoded:
        return (64, 32, 8, 3) if call.format == "fp8_v32" else (64, 64, 8, 2)
    if operand_size(call) == 4 and arch:  # no matrix unit is exact in float32
        return (16, 16, 8, 2 if OLDER_COMPILER else 1) if arch.startswith("sm_") else (16, 16, 4, 1)
    if arch.startswith("gfx"):
        # A second stage halves the turns over plain rows; over decoded ones it takes a second program's registers.
        return min(rows, 32), 16, 4, 2 if plain else 1
    budget = call.device.shared_memory or SMALLEST_SHARED_MEMORY
    little = budget < DECODED_SHARED_MEMORY
    if not plain and item_size(call.q) == 4:  # products in three parts
        beside = little and walk.extra and call.format != call.extra_format
        return 16, 16 if call.format == "fp8_v32" or beside else 32, 8, 2
    if call.format in MIXED and (
        (little and OLDER_COMPILER) or (rows <= 16 and walk.extra and call.format != call.extra_format)
    ):
        return 16, 16, 4, 2  # scales of many groups, and of two formats, take registers
    crowded = walk.ragged and walk.windowed and call.format == "fp8_v32"  # 32 rows of these spilled
    if rows <= 16 or crowded or (not plain and little):
        return 16, 32, 4, 3 if plain and arch == "sm_90" else 2
    wgmma = rows >= 64 and arch == "sm_90" and call.d_v <= 512
    if plain:
        if wgmma and not (OLDER_COMPILER and walk.extra):
            fewer = walk.windowed or (walk.ragged and OLDER_COMPILER) or (walk.dense and walk.page_sizes[0] % 64)
            return (64, 32, 8, 3) if fewer else (64, 64, 8, 2)
        return 32, 32, 4 if arch.startswith("sm_8") and not walk.windowed else 8, 2
    if wgmma and fits_wgmma(call, walk):
        return 64, 32, 8, 2 if call.format in MIXED and walk.extra else 3  # of two formats, scales take registers
    if call.format == "fp8_v32":
        return 32, 32 if walk.windowed or OLDER_COMPILER else 64, 8, 2
    return 32, 32, 8, 2


def too_wide(call: Any, walk: Walk) -> str | None:
    """Why no tile of a call fits the shared memory of its device, which AMD's do not hold operands in, or None."""
    budget = call.device.shared_memory
    if call.device.platform != "cuda" or not budget:
        return None
    least = shared_bytes(call, walk, LEAST, LEAST, 1)
    if least <= budget:
        return None
    return (
        f"takes rows of which {LEAST} fit {budget} bytes of shared memory beside {LEAST} keys, got d_qk {call.d_qk} in "
        f"{dtype_name(call.q)}, for {least} bytes"
    )


def fits_wgmma(call: Any, walk: Walk) -> bool:
    """Whether 64 rows leave registers for decoding."""
    if walk.windowed:
        return False
    if walk.codes:
        return dtype_name(call.q) == "bfloat16" and call.code_dtype != "int8"
    if call.format == "fp8_v32":
        return not walk.extra and not (OLDER_COMPILER and (walk.ragged or dtype_name(call.q) == "float16"))
    if dtype_name(call.q) != "bfloat16" or OLDER_COMPILER:
        return False
    if call.format in MIXED:
        return call.format == "fp8_v41" or not walk.extra
    return not walk.extra or all(size.bit_count() == 1 for size in walk.page_sizes)


def decodes_first(call: Any, rows: int) -> bool:
    """Whether a sparse prefill's quantised cache is better decoded once than for each query that lists a row of it.

    Only where that was found to be faster: with the tiles of 64 rows of Hopper. Entries of lists that name no slot are
    not known here and count too.
    """
    if call.format == "plain" or dtype_name(call.q) != "bfloat16" or call.d_v > 512:
        return False
    if call.device.arch != "sm_90" or next_power_of_2(rows) < 64:
        return False
    entries = call.num_tokens * call.topk
    often = entries >= max(DECODED_EACH * call.num_slots, DECODED_LEAST)
    return often and 2 * call.num_slots * decoded_width(call) <= DECODED_MOST


def shared_bytes(call: Any, walk: Walk, rows: int, keys: int, stages: int) -> int:
    """About what a program needs: queries, weights, the rows in flight and, once decoded, each twice as an operand."""
    values, rest = (next_power_of_2(n) if n else 0 for n in columns(call))
    own = rows * (values + rest + keys)
    if walk.codes:
        return (2 * keys * (values + rest) + own) * operand_size(call) + (stages - 1) * keys * call.d_qk
    if call.format == "plain" or walk.decoded:
        # A product that runs by itself (wgmma) holds one buffer more.
        return (max(stages - (rows < 64), 1) * keys * (values + rest) + own) * operand_size(call)
    staged = 0 if call.format == "fp8_v32" else 128
    return (keys * (2 * values + rest + staged) + own) * operand_size(call) + (stages - 1) * keys * call.d_qk


def splits(work: int, slots: int, keys: int, block_kv: int) -> int:
    """The number of splits of a job's keys: the fastest if all lists are as long as they can be.

    A split has whole blocks of keys; of several numbers that make splits equally long the smallest is taken.
    """
    blocks, least = cdiv(keys, block_kv), cdiv(MIN_SPLIT, block_kv)
    most = max(1, min(MAX_SPLITS, cdiv(keys, MIN_SPLIT)))

    def cost(n: int) -> int:
        longest = max(cdiv(blocks, n), least) * block_kv
        return cdiv(work * n, slots) * (longest + START_COST) + (n > 1) * n * MERGE_COST

    return min(range(1, most + 1), key=cost)
