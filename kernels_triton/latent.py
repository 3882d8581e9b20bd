"""The attention over latent rows that `mla_decode` and `sparse_mla_prefill` share: one kernel, and a combine.

A *job* is what shares a list of keys: in a dense call a sequence (its query tokens and heads are the rows), in a sparse
call one query token (its heads are the rows), since every token has its own list. Sparse prefill is sparse decode of
one token a sequence. A program computes BLOCK_H rows of a job over one split of its keys. Programs that share keys
stand next to each other in the grid, so that the second finds them in the cache.

A latent row is read once and serves as K and, transposed, as V. A plain or `fp8_v4` row becomes one operand of the
value's columns and one of the rest; `fp8_v4` scales are powers of two, so its bfloat16 operand is exact. An `fp8_v32`
row is never multiplied by its scales: its codes become float16 operands, exactly, and the scale of a group of 128
columns goes into the logits of that group and into the weights of that group's values. Such weights are held near 1
by a second running maximum, over logit plus log2 of the key's scale.

Logits are held in base 2. Queries that an 8-bit cache's operands would round, those of float16 beside bfloat16 and of
float32 beside either, come in two parts: what rounding leaves, and what it loses.
"""

# Triton's language only looks like Python: its constexprs and early-bound branches defeat a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

import dataclasses
import math
from typing import Any

import triton
import triton.language as tl

from ragged_attention.calls import dtype_name
from ragged_attention.kernels_triton.blocks import (
    LN2,
    LOG2E,
    VARYING,
    cdiv,
    decode,
    expect_between,
    expect_power_of_two,
    item_size,
    launchable,
    lost_to_rounding,
    matmul,
    merge_parts,
    narrow,
    next_power_of_2,
    pages_of,
)

MAX_SPLITS = 32
MIN_SPLIT = 64  # keys below which a split is not worth its program
START_COST = 128  # of a program, in keys
MERGE_COST = 4  # of a split more to merge, in keys
SMALLEST_SHARED_MEMORY = 64 * 1024
DECODED_SHARED_MEMORY = 128 * 1024  # what 32 rows and as many decoded keys need
OLDER_COMPILER = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)  # needs 30 registers fewer than 3.9
LARGEST_INT = 2**31 - 1
# Rows from which on eight warps share each row. Where the result of a product leads to another product, compilers give
# every warp rows of its own instead, and let half of the warps repeat what the others do. So the products of queries
# and keys stand apart, in a branch that is always taken, and each is scaled before they are added, which would make one
# chain of them.
APART = tl.constexpr(64)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """What may be tuned."""

    block_h: int = 16  # rows of a program: heads, in a dense call times query tokens
    block_kv: int = 32  # keys a step
    num_warps: int = 4
    num_stages: int = 2
    num_splits: int = 1  # programs that share one job's keys at most; 1 gives bits that depend on nothing else

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
        """What kernels are told of the lists' lengths."""
        seq, token = (0, 0) if self.lens is None else (*launch.strides(self.lens), 0)[:2]
        return {"longest": self.longest, "lens_seq_stride": seq, "lens_token_stride": token}

    def places(self, launch: Any) -> dict[str, int]:
        """What kernels are told of where rows and lists lie."""
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
            # What is never used must not spoil what compilers conclude about alignment.
            "head_stride": head if self.cache.shape[-2] > 1 else 0,
            "num_slots": min(self.cache.shape[0] * self.page_size, LARGEST_INT),
            "list_seq_stride": self.list_strides[0],
            "list_token_stride": self.list_strides[1],
            "list_head_stride": self.list_strides[2],
        }


def readable(cache: Any, layout: str, launch: Any) -> Any:
    """The cache, copied if kernels cannot read it where it lies: they read scales and rotary columns as words."""
    return launch.packed(cache) if layout == "plain" else launch.words(cache, packed_rows=layout == "fp8_v4")


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


# ---- choosing a tile


def why_not(call: Any) -> str | None:
    return launchable(call, latent_kernel)


def columns(call: Any) -> tuple[int, int]:
    """Columns of the operand that serves as V, and of the other one."""
    if call.format == "plain":
        return call.d_v, call.d_qk - call.d_v
    return (512, 0) if call.format == "fp8_v4" else (512, 64)


def operand_size(call: Any) -> int:
    return item_size(call.q) if call.format == "plain" else 2


def tile_for(call: Any, rows: int, jobs: int, keys: int, *, dense: bool, extra: bool) -> Tile:
    """Rows as few as do, wgmma-sized where there are 64; splits that fill the GPU.

    `jobs` counts jobs times KV heads, `keys` is the longest list there can be. Tile sizes depend on neither, so that
    with `num_splits` 1 a sequence's bits do not depend on its batch.
    """
    block_h, block_kv, num_warps, num_stages = sizes(
        call, min(max(16, next_power_of_2(rows)), 16 if item_size(call.q) == 4 else 64), dense, extra
    )
    block_kv, num_stages = fit(call, block_h, block_kv, num_stages)
    slots = call.device.num_multiprocessors * (2 if block_h <= 16 else 1)
    return Tile(
        block_h=block_h,
        block_kv=block_kv,
        num_warps=num_warps,
        num_stages=num_stages,
        num_splits=splits(jobs * cdiv(rows, block_h), slots, keys, block_kv),
    )


def sizes(call: Any, rows: int, dense: bool, extra: bool) -> tuple[int, int, int, int]:
    """Rows, keys, warps and stages; `extra` is whether there is a second cache, which needs registers of its own."""
    arch, plain = call.device.arch, call.format == "plain"
    if operand_size(call) == 4 and arch:  # no matrix unit is exact in float32
        return (16, 16, 8, 2 if OLDER_COMPILER else 1) if arch.startswith("sm_") else (16, 16, 4, 1)
    if arch.startswith("gfx"):
        return min(rows, 32), 32 if plain else 16, 4, 1
    budget = call.device.shared_memory or SMALLEST_SHARED_MEMORY
    if not plain and item_size(call.q) == 4:  # products in three parts
        return 16, 32 if call.format == "fp8_v4" else 16, 8, 2
    if rows <= 16 or (not plain and budget < DECODED_SHARED_MEMORY):
        return 16, 32, 4, 3 if dense and plain and arch == "sm_90" else 2
    wgmma = rows >= 64 and arch == "sm_90"
    if plain:
        if wgmma and not extra:
            return 64, 32, 8, 3
        return 32, 32, 4 if arch.startswith("sm_8") else 8, 2
    if OLDER_COMPILER:
        return 32, 32, 8, 2
    if call.format == "fp8_v4":
        return (64, 16, 8, 2) if wgmma else (32, 32, 8, 2)
    return 32, 64, 8, 2


def fit(call: Any, rows: int, keys: int, stages: int) -> tuple[int, int]:
    """Keys and stages whose tiles stay within the device's shared memory."""
    budget = call.device.shared_memory or SMALLEST_SHARED_MEMORY
    while shared_bytes(call, rows, keys, stages) > budget:
        if keys > 32:
            keys //= 2
        elif stages > 1:
            stages -= 1
        elif keys > 16:
            keys //= 2
        else:
            break
    return keys, stages


def shared_bytes(call: Any, rows: int, keys: int, stages: int) -> int:
    """About what a program needs: queries, weights, the rows in flight and, once decoded, each twice as an operand."""
    values, rest = (next_power_of_2(n) if n else 0 for n in columns(call))
    own = rows * (values + rest + keys)
    if call.format == "plain":
        return (max(stages - 1, 1) * keys * (values + rest) + own) * operand_size(call)
    staged = 128 if call.format == "fp8_v4" else 0
    return (keys * (2 * values + rest + staged) + own) * operand_size(call) + (stages - 1) * keys * call.d_qk


def splits(work: int, slots: int, keys: int, block_kv: int) -> int:
    """Into how many splits the keys of a job are cut: what ends soonest, if all lists are as long as they can be.

    A split has whole blocks of keys, so of numbers of splits with equally long ones the smallest is taken.
    """
    blocks, least = cdiv(keys, block_kv), cdiv(MIN_SPLIT, block_kv)
    most = max(1, min(MAX_SPLITS, cdiv(keys, MIN_SPLIT)))

    def cost(n: int) -> int:
        longest = max(cdiv(blocks, n), least) * block_kv
        return cdiv(work * n, slots) * (longest + START_COST) + (n > 1) * n * MERGE_COST

    return min(range(1, most + 1), key=cost)


# ---- finding the work


@triton.jit
def split_edge(num_splits_ptr, seq, num_entries):
    return tl.minimum(tl.maximum(tl.load(num_splits_ptr + seq), 0), num_entries)


@triton.jit
def find_entry(entry, num_splits_ptr, num_seqs, num_entries, fixed_splits, SCHEDULED: tl.constexpr):
    """(sequence, split, splits) of an entry of the grid; the split may be none of them, then there is no work."""
    if SCHEDULED:
        seq = 0
        high = num_seqs
        while high - seq > 1:
            middle = (seq + high) // 2
            found = split_edge(num_splits_ptr, middle, num_entries) <= entry
            seq = tl.where(found, middle, seq)
            high = tl.where(found, high, middle)
        first = split_edge(num_splits_ptr, seq, num_entries)
        split = tl.where(entry < first, num_entries, entry - first)  # before all of them there is no work either
        count = split_edge(num_splits_ptr, seq + 1, num_entries) - first
    else:
        seq = entry // fixed_splits
        split = entry % fixed_splits
        count = fixed_splits
    return seq, split, count


@triton.jit
def token_and_head(row, job, kv_head, GROUP: tl.constexpr, SPARSE: tl.constexpr):
    """The query token and the head of rows of a job."""
    if SPARSE:
        token = job + tl.zeros_like(row)
        head = kv_head * GROUP + row
    else:
        token = row // GROUP
        head = kv_head * GROUP + row % GROUP
    return token, head


@triton.jit
def list_length(lens_ptr, seq, token, longest, seq_stride, token_stride, HAS_LENS: tl.constexpr):
    count = longest
    if HAS_LENS:
        place = seq.to(tl.int64) * seq_stride + tl.cast(token, tl.int64) * token_stride
        count = tl.minimum(tl.maximum(tl.load(lens_ptr + place), 0), longest)
    return count


@triton.jit
def divide(blocks, count, SCHEDULED: tl.constexpr, MIN_BLOCKS: tl.constexpr):
    """(blocks of a split, splits): a schedule's splits are kept, others are no more than they deserve."""
    blocks_each = (blocks + tl.maximum(count, 1) - 1) // tl.maximum(count, 1)
    used = count
    if not SCHEDULED:
        blocks_each = tl.maximum(blocks_each, MIN_BLOCKS)
        used = tl.maximum((blocks + blocks_each - 1) // blocks_each, 1)
    return blocks_each, used


@triton.jit
def keys_of(list_ptr, block, last, num_slots, SPARSE: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_KV: tl.constexpr):
    """A block of a list: (position, page, place in the page, whether it may be read)."""
    position = block * BLOCK_KV + tl.arange(0, BLOCK_KV)
    if SPARSE:
        slot = tl.load(list_ptr + position, mask=position < last, other=-1)
        readable = (slot >= 0) & (slot < num_slots)
        slot = tl.where(readable, slot, 0)
        page = slot // PAGE_SIZE
        place = slot % PAGE_SIZE
    else:
        page, readable = pages_of(list_ptr, block * BLOCK_KV, position, 0, last, num_slots // PAGE_SIZE, True,
                                  PAGE_SIZE, BLOCK_KV)  # fmt: skip
        place = position % PAGE_SIZE
    return position, page, place, readable


# ---- latent rows as operands


@triton.jit
def whole_columns(rows, readable, first, COLUMNS: tl.constexpr, COLUMNS_PAD: tl.constexpr):
    """Columns from `first` on of rows, zero where a row may not be read."""
    column = tl.arange(0, COLUMNS_PAD)
    mask = readable[:, None]
    if COLUMNS < COLUMNS_PAD:
        mask = mask & (column < COLUMNS)[None, :]
    return tl.load(rows[:, None] + first + column[None, :], mask=mask, other=0)


@triton.jit
def rotary_columns(rows, readable, FIRST: tl.constexpr):
    """The 64 bfloat16 columns that begin at byte FIRST of rows of bytes."""
    place = (rows + FIRST).to(tl.pointer_type(tl.bfloat16))
    return tl.load(place[:, None] + tl.arange(0, 64)[None, :], mask=readable[:, None], other=0)


@triton.jit
def power_of_two(scales, readable):
    """e8m0 scales as float32; 255 is NaN."""
    power = tl.load(scales, mask=readable, other=127).to(tl.uint8, bitcast=True)
    bits = power.to(tl.uint32) << 23
    bits = tl.where(power == 0, 0x00400000, tl.where(power == 255, 0x7FC00000, bits))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def v4_columns(pages, place, readable, FIRST: tl.constexpr, PAGE_SIZE: tl.constexpr, CODES: tl.constexpr,
               DTYPE: tl.constexpr):  # fmt: skip
    """128 columns of `fp8_v4` rows: two groups of 64 codes with a power of two each; the very last group is rotary."""
    column = tl.arange(0, 128)
    first = (column < 64)[None, :]
    rows = pages + place.to(tl.int64) * 576
    scales = pages + PAGE_SIZE * 576 + place.to(tl.int64) * 8 + FIRST // 64
    codes = whole_columns(rows, readable, FIRST, 448 - FIRST, 128).to(tl.uint8, bitcast=True)
    values = decode(codes, CODES, tl.float32)
    scale = power_of_two(scales, readable)[:, None]
    if FIRST < 384:
        values = values * tl.where(first, scale, power_of_two(scales + 1, readable)[:, None])
    else:
        rotary = (rows + 448).to(tl.pointer_type(tl.bfloat16))[:, None] + (column - 64)[None, :]
        rotary = tl.load(rotary, mask=readable[:, None] & (column >= 64)[None, :], other=0).to(tl.float32)
        values = tl.where(first, values * scale, rotary)
    return narrow(values, DTYPE)


@triton.jit
def key_columns(pages, rows, place, readable, FIRST: tl.constexpr, FORMAT: tl.constexpr, CODES: tl.constexpr,
                PAGE_SIZE: tl.constexpr, A: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """Columns [FIRST, FIRST + WIDTH) of rows as an operand; those of `fp8_v32` without their scale."""
    if FORMAT == "fp8_v4":
        keys = v4_columns(pages, place, readable, FIRST, PAGE_SIZE, CODES, DTYPE)
    else:
        keys = whole_columns(rows, readable, FIRST, A - FIRST, WIDTH)
        if FORMAT == "fp8_v32":
            keys = decode(keys.to(tl.uint8, bitcast=True), CODES, DTYPE)
            # A factor of 1 keeps compilers from decoding again for each dot and warp, straight into registers.
            keys = keys * tl.where(readable, 1.0, 0.0).to(DTYPE)[:, None]
    return keys


@triton.jit
def group_scale(rows, readable, GROUP: tl.constexpr):
    """The scale of a group of 128 columns of `fp8_v32` rows."""
    return tl.load((rows + 512 + 4 * GROUP).to(tl.pointer_type(tl.float32)), mask=readable, other=0)


@triton.jit
def query_times(q, q_lost, keys, logits, PARTS: tl.constexpr):
    """logits + q . keys, with what a query's rounding lost as a second part."""
    transposed = tl.trans(keys)
    logits = matmul(q, transposed, logits)
    if PARTS == 2:
        logits = matmul(q_lost, transposed, logits)
    return logits


@triton.jit
def group_logits(q, q_lost, keys, scale, logits, FOLDED: tl.constexpr, PARTS: tl.constexpr):
    if FOLDED:
        logits += query_times(q, q_lost, keys, tl.zeros(logits.shape, tl.float32), PARTS) * scale[None, :]
    elif q.shape[0] >= APART:
        logits += query_times(q, q_lost, keys, tl.zeros(logits.shape, tl.float32), PARTS) * scale
    else:
        logits = query_times(q, q_lost, keys, logits, PARTS)
    return logits


@triton.jit
def block_logits(
    q0, q1, q2, q3, lost0, lost1, lost2, lost3, q_rest, lost_rest, unit, keys0, keys1, keys2, keys3, rest,
    scale0, scale1, scale2, scale3, logit_scale,
    FOLDED: tl.constexpr, GROUPS: tl.constexpr, B: tl.constexpr, GROUP_PARTS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Logits, in base 2, of rows and a block of keys; for APART see there."""
    none = tl.zeros([q0.shape[0], keys0.shape[0]], tl.float32)
    logits = group_logits(q0, lost0, keys0, scale0, none, FOLDED, GROUP_PARTS)
    if GROUPS == 4:
        logits = group_logits(q1, lost1, keys1, scale1, logits, FOLDED, GROUP_PARTS)
        logits = group_logits(q2, lost2, keys2, scale2, logits, FOLDED, GROUP_PARTS)
        logits = group_logits(q3, lost3, keys3, scale3, logits, FOLDED, GROUP_PARTS)
    if q0.shape[0] < APART:
        if FOLDED:
            logits = logits * unit[:, None]
        if B > 0:
            logits = query_times(q_rest, lost_rest, rest, logits, PARTS)
        logits = logits * logit_scale
    else:
        if FOLDED:
            logits = logits * (unit * logit_scale)[:, None]
        if B > 0:
            logits += query_times(q_rest, lost_rest, rest, none, PARTS) * logit_scale
    return logits


@triton.jit
def group_values(weights, scale, keys, acc, FOLDED: tl.constexpr):
    if FOLDED:
        weights = weights * scale[None, :]
    return matmul(narrow(weights, keys.dtype), keys, acc)


# ---- online softmax over a range of blocks


@triton.jit
def attend(
    q0, q1, q2, q3, lost0, lost1, lost2, lost3, q_rest, lost_rest, unit,
    highest, largest, total, acc0, acc1, acc2, acc3, acc_rest,
    cache_ptr, list_ptr, begin, end, last, limit, num_slots, page_stride, slot_stride, logit_scale,
    SPARSE: tl.constexpr, CAUSAL: tl.constexpr, FORMAT: tl.constexpr, CODES: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PAGE_UNIT: tl.constexpr, BLOCK_KV: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, A: tl.constexpr,
    B: tl.constexpr, B_PAD: tl.constexpr, GROUP_PARTS: tl.constexpr, PARTS: tl.constexpr,
    REST_IS_VALUE: tl.constexpr,
):  # fmt: skip
    """Blocks [begin, end) of a list of keys.

    acc0 to acc3, a group of columns each, are relative to `largest`, a running maximum of logit plus log2 scale where
    scales are folded; all else is relative to `highest`.
    """
    FOLDED: tl.constexpr = FORMAT == "fp8_v32"
    for block in range(begin, end):
        position, page, place, readable = keys_of(list_ptr, block, last, num_slots, SPARSE, PAGE_SIZE, BLOCK_KV)
        pages = cache_ptr + page.to(tl.int64) * page_stride * PAGE_UNIT + tl.zeros_like(place).to(tl.int64)
        rows = pages + place.to(tl.int64) * slot_stride
        scale0 = logit_scale
        scale1 = logit_scale
        scale2 = logit_scale
        scale3 = logit_scale
        if FOLDED:
            scale0 = group_scale(rows, readable, 0)
            scale1 = group_scale(rows, readable, 1)
            scale2 = group_scale(rows, readable, 2)
            scale3 = group_scale(rows, readable, 3)
        keys0 = key_columns(pages, rows, place, readable, 0, FORMAT, CODES, PAGE_SIZE, A, WIDTH, q0.dtype)
        keys1, keys2, keys3, rest = keys0, keys0, keys0, keys0
        if GROUPS == 4:
            keys1 = key_columns(pages, rows, place, readable, WIDTH, FORMAT, CODES, PAGE_SIZE, A, WIDTH, q0.dtype)
            keys2 = key_columns(pages, rows, place, readable, 2 * WIDTH, FORMAT, CODES, PAGE_SIZE, A, WIDTH, q0.dtype)
            keys3 = key_columns(pages, rows, place, readable, 3 * WIDTH, FORMAT, CODES, PAGE_SIZE, A, WIDTH, q0.dtype)
        if FOLDED:
            rest = rotary_columns(rows, readable, 528).to(q_rest.dtype)
        elif B > 0:
            rest = whole_columns(rows, readable, A, B, B_PAD)
        logits = tl.zeros([q0.shape[0], BLOCK_KV], tl.float32)
        if q0.shape[0] < APART or block >= begin:
            logits = block_logits(
                q0, q1, q2, q3, lost0, lost1, lost2, lost3, q_rest, lost_rest, unit, keys0, keys1, keys2, keys3, rest,
                scale0, scale1, scale2, scale3, logit_scale, FOLDED, GROUPS, B, GROUP_PARTS, PARTS,
            )  # fmt: skip
        seen = readable[None, :]
        if CAUSAL:
            seen = seen & (position[None, :] < limit[:, None])
        logits = tl.where(seen, logits, float("-inf"))
        higher = tl.maximum(highest, tl.max(logits, 1))
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.math.exp2(logits - finite[:, None])
        kept = tl.math.exp2(highest - finite)
        total = total * kept + tl.sum(weights, 1)
        highest = higher
        if FOLDED:
            if REST_IS_VALUE:
                acc_rest = matmul(narrow(weights, q_rest.dtype), rest, acc_rest * kept[:, None])
            scale = tl.maximum(tl.maximum(tl.abs(scale0), tl.abs(scale1)), tl.maximum(tl.abs(scale2), tl.abs(scale3)))
            exponent = (scale.to(tl.int32, bitcast=True) >> 23).to(tl.float32) - 127.0
            # Scales under 2^-60 bring nothing that could be told from 0 beside a finite logit.
            larger = tl.maximum(largest, tl.max(logits + tl.maximum(exponent, -60.0)[None, :], 1))
            within = tl.where(larger == float("-inf"), 0.0, larger)
            weights = weights * tl.math.exp2(finite - within)[:, None]
            kept = tl.math.exp2(largest - within)
            largest = larger
        acc0 = group_values(weights, scale0, keys0, acc0 * kept[:, None], FOLDED)
        if GROUPS == 4:
            acc1 = group_values(weights, scale1, keys1, acc1 * kept[:, None], FOLDED)
            acc2 = group_values(weights, scale2, keys2, acc2 * kept[:, None], FOLDED)
            acc3 = group_values(weights, scale3, keys3, acc3 * kept[:, None], FOLDED)
    return highest, largest, total, acc0, acc1, acc2, acc3, acc_rest


@triton.jit
def unit_of(q):
    """The power of two by which a row of queries is divided to lie below 2^9."""
    exponent = (tl.max(tl.abs(q), 1).to(tl.int32, bitcast=True) >> 23) - 127 - 8
    exponent = tl.minimum(tl.maximum(exponent, -118), 119)
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def query_columns(rows, valid, unit, FIRST: tl.constexpr, LAST: tl.constexpr, WIDTH: tl.constexpr,
                  FORMAT: tl.constexpr):  # fmt: skip
    """Columns [FIRST, FIRST + WIDTH) of query rows as an operand for keys of a format, and what that lost."""
    given = whole_columns(rows, valid, FIRST, LAST - FIRST, WIDTH)
    q = given
    lost = given
    if FORMAT == "fp8_v32":  # its keys are float16
        wide = given.to(tl.float32) / unit[:, None]
        q = narrow(wide, tl.float16)
        lost = lost_to_rounding(wide, q)
    elif FORMAT != "plain" and given.dtype != tl.bfloat16:  # its keys are bfloat16
        q = narrow(given.to(tl.float32), tl.bfloat16)
        lost = lost_to_rounding(given.to(tl.float32), q)
    return q, lost


@triton.jit
def store_columns(target_ptr, place, acc, factor, valid, FIRST: tl.constexpr, LAST: tl.constexpr, D: tl.constexpr):
    """Columns [FIRST, FIRST + width) of finished rows of D, as far as they lie before LAST."""
    column = FIRST + tl.arange(0, acc.shape[1])
    value = narrow(acc * factor[:, None], target_ptr.dtype.element_ty)
    mask = valid[:, None] & (column < LAST)[None, :]
    tl.store(target_ptr + place[:, None] * D + column[None, :], value, mask=mask)


@triton.jit
def store_groups(target_ptr, place, acc0, acc1, acc2, acc3, acc_rest, factor, rest_factor, valid, GROUPS: tl.constexpr,
                 WIDTH: tl.constexpr, A: tl.constexpr, HAS_REST: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """Finished rows of D columns: those before A are in groups of WIDTH, the others in `acc_rest`."""
    LAST: tl.constexpr = A if A < D else D  # pyright: ignore[reportAssignmentType]
    store_columns(target_ptr, place, acc0, factor, valid, 0, LAST, D)
    if GROUPS == 4:
        store_columns(target_ptr, place, acc1, factor, valid, WIDTH, LAST, D)
        store_columns(target_ptr, place, acc2, factor, valid, 2 * WIDTH, LAST, D)
        store_columns(target_ptr, place, acc3, factor, valid, 3 * WIDTH, LAST, D)
    if HAS_REST:
        store_columns(target_ptr, place, acc_rest, rest_factor, valid, A, D, D)


@triton.jit
def finish(highest, total, sinks_ptr, head, valid, HAS_SINKS: tl.constexpr):
    """(what the accumulator is multiplied by, the natural lse, the largest natural logit) of rows."""
    empty = total == 0.0
    level = tl.where(empty, 0.0, highest)
    total = tl.where(empty, 1.0, total)
    denominator = total
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=valid, other=float("-inf"))
        denominator += tl.math.exp2(sink * LOG2E - level)
    factor = tl.where(empty, 0.0, 1.0 / denominator)
    lse = tl.where(empty, float("-inf"), (level + tl.math.log2(total)) * LN2)
    return factor, lse, highest * LN2


# ---- kernels


@triton.jit(do_not_specialize=VARYING)
def latent_kernel(
    q_ptr, cache_ptr, list_ptr, lens_ptr, extra_cache_ptr, extra_list_ptr, extra_lens_ptr, num_splits_ptr, sinks_ptr,
    out_ptr, lse_ptr, max_ptr, parts_ptr, part_lses_ptr, part_max_ptr,
    num_seqs, num_entries, fixed_splits, q_seq_stride, q_token_stride, q_head_stride,
    page_stride, slot_stride, head_stride, num_slots, longest,
    list_seq_stride, list_token_stride, list_head_stride, lens_seq_stride, lens_token_stride,
    extra_page_stride, extra_slot_stride, extra_num_slots, extra_longest,
    extra_list_seq_stride, extra_list_token_stride, extra_lens_seq_stride, extra_lens_token_stride,
    logit_scale,
    SPARSE: tl.constexpr, CAUSAL: tl.constexpr, HAS_LENS: tl.constexpr, HAS_EXTRA: tl.constexpr,
    HAS_EXTRA_LENS: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_MAX: tl.constexpr, SCHEDULED: tl.constexpr,
    FORMAT: tl.constexpr, CODES: tl.constexpr, PAGE_SIZE: tl.constexpr, EXTRA_PAGE_SIZE: tl.constexpr,
    PAGE_UNIT: tl.constexpr, EXTRA_PAGE_UNIT: tl.constexpr,
    NUM_Q: tl.constexpr, NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    DV: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, A: tl.constexpr, B: tl.constexpr, B_PAD: tl.constexpr,
    GROUP_PARTS: tl.constexpr, PARTS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_KV: tl.constexpr,
    WHOLE: tl.constexpr, MIN_BLOCKS: tl.constexpr,
):  # fmt: skip
    """BLOCK_H rows of one job for one KV head, over one split of its keys. A job in one split is finished here.

    Otherwise the split's normalised result goes to parts [entries, jobs of a sequence, K, ROWS, DV], its base-2 lse
    and largest logit to arrays of that shape without DV.
    """
    JOBS: tl.constexpr = NUM_Q if SPARSE else 1  # pyright: ignore[reportAssignmentType]
    ROW_BLOCKS: tl.constexpr = (ROWS + BLOCK_H - 1) // BLOCK_H
    KV_HEADS: tl.constexpr = NUM_HEADS // GROUP
    kv_head = tl.program_id(1)
    row = tl.program_id(0) % ROW_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
    job = tl.program_id(0) // ROW_BLOCKS % JOBS
    entry = tl.program_id(0) // (ROW_BLOCKS * JOBS)
    seq, split, count = find_entry(entry, num_splits_ptr, num_seqs, num_entries, fixed_splits, SCHEDULED)
    last = list_length(lens_ptr, seq, job, longest, lens_seq_stride, lens_token_stride, HAS_LENS)
    blocks = (last + BLOCK_KV - 1) // BLOCK_KV
    extra_last = 0
    if HAS_EXTRA:
        extra_last = list_length(extra_lens_ptr, seq, job, extra_longest, extra_lens_seq_stride,
                                 extra_lens_token_stride, HAS_EXTRA_LENS)  # fmt: skip
    all_blocks = blocks + (extra_last + BLOCK_KV - 1) // BLOCK_KV
    blocks_each, used = divide(all_blocks, count, SCHEDULED, MIN_BLOCKS)
    if split < used:
        begin = tl.minimum(split * blocks_each, all_blocks)
        end = tl.minimum(begin + blocks_each, all_blocks)
        valid = row < ROWS
        token, head = token_and_head(row, job, kv_head, GROUP, SPARSE)
        sequence = seq.to(tl.int64)
        limit = last - (NUM_Q - 1) + token
        if CAUSAL:  # keys that no row sees are not read
            last_token = tl.minimum((tl.program_id(0) % ROW_BLOCKS * BLOCK_H + BLOCK_H - 1) // GROUP, NUM_Q - 1)
            last = tl.maximum(last - (NUM_Q - 1) + last_token, 0)
            end = tl.minimum(end, (last + BLOCK_KV - 1) // BLOCK_KV)
        q_rows = (
            q_ptr + sequence * q_seq_stride + token.to(tl.int64) * q_token_stride + head.to(tl.int64) * q_head_stride
        )
        cache = cache_ptr + kv_head.to(tl.int64) * head_stride
        wide_job = job.to(tl.int64)
        list_row = list_ptr + sequence * list_seq_stride + wide_job * list_token_stride
        list_row += kv_head.to(tl.int64) * list_head_stride
        extra_row = extra_list_ptr + sequence * extra_list_seq_stride + wide_job * extra_list_token_stride
        first_extra = tl.maximum(begin - blocks, 0)
        last_extra = tl.maximum(end - blocks, 0)
        begin = tl.minimum(begin, blocks)
        end = tl.minimum(end, blocks)
        highest = tl.full([BLOCK_H], float("-inf"), tl.float32)
        largest = highest
        total = tl.zeros([BLOCK_H], tl.float32)
        unit = total + 1.0
        REST_IS_VALUE: tl.constexpr = FORMAT == "fp8_v32" and DV > A
        if FORMAT == "fp8_v32":
            unit = unit_of(whole_columns(q_rows, valid, 0, A, 4 * WIDTH).to(tl.float32))
        q0, lost0 = query_columns(q_rows, valid, unit, 0, A, WIDTH, FORMAT)
        q1, lost1, q2, lost2, q3, lost3 = q0, lost0, q0, lost0, q0, lost0
        q_rest, lost_rest = q0, lost0
        acc0 = tl.zeros([BLOCK_H, WIDTH], tl.float32)
        acc1, acc2, acc3 = acc0, acc0, acc0
        acc_rest = tl.zeros([BLOCK_H, B_PAD], tl.float32)
        if GROUPS == 4:
            q1, lost1 = query_columns(q_rows, valid, unit, WIDTH, A, WIDTH, FORMAT)
            q2, lost2 = query_columns(q_rows, valid, unit, 2 * WIDTH, A, WIDTH, FORMAT)
            q3, lost3 = query_columns(q_rows, valid, unit, 3 * WIDTH, A, WIDTH, FORMAT)
        if B > 0:
            q_rest, lost_rest = query_columns(
                q_rows, valid, unit, A, A + B, B_PAD, "rotary" if FORMAT == "fp8_v32" else FORMAT
            )
        highest, largest, total, acc0, acc1, acc2, acc3, acc_rest = attend(
            q0, q1, q2, q3, lost0, lost1, lost2, lost3, q_rest, lost_rest, unit,
            highest, largest, total, acc0, acc1, acc2, acc3, acc_rest,
            cache, list_row, begin, end, last, limit, num_slots, page_stride, slot_stride, logit_scale,
            SPARSE, CAUSAL, FORMAT, CODES, PAGE_SIZE, PAGE_UNIT, BLOCK_KV, GROUPS, WIDTH, A, B, B_PAD,
            GROUP_PARTS, PARTS, REST_IS_VALUE,
        )  # fmt: skip
        if HAS_EXTRA:
            highest, largest, total, acc0, acc1, acc2, acc3, acc_rest = attend(
                q0, q1, q2, q3, lost0, lost1, lost2, lost3, q_rest, lost_rest, unit,
                highest, largest, total, acc0, acc1, acc2, acc3, acc_rest,
                extra_cache_ptr, extra_row, first_extra, last_extra, extra_last, limit, extra_num_slots,
                extra_page_stride, extra_slot_stride, logit_scale,
                SPARSE, CAUSAL, FORMAT, CODES, EXTRA_PAGE_SIZE, EXTRA_PAGE_UNIT, BLOCK_KV, GROUPS, WIDTH, A,
                B, B_PAD, GROUP_PARTS, PARTS, REST_IS_VALUE,
            )  # fmt: skip
        regain = tl.full([BLOCK_H], 1.0, tl.float32)
        if FORMAT == "fp8_v32":
            regain = tl.math.exp2(tl.where(total == 0.0, 0.0, largest - highest))
        # Always 0, which no compiler knows: so places are computed now, not kept in registers through the loop.
        late = (tl.min(total, 0) < 0).to(tl.int32)
        row = tl.program_id(0) % ROW_BLOCKS * BLOCK_H + late + tl.arange(0, BLOCK_H)
        valid = row < ROWS
        token, head = token_and_head(row, job, kv_head, GROUP, SPARSE)
        if WHOLE or used == 1:
            factor, lse, largest_logit = finish(highest, total, sinks_ptr, head, valid, HAS_SINKS)
            place = (sequence * NUM_Q + token) * NUM_HEADS + head
            store_groups(out_ptr, place, acc0, acc1, acc2, acc3, acc_rest, factor * regain, factor, valid, GROUPS,
                         WIDTH, A, REST_IS_VALUE, DV)  # fmt: skip
            place = (sequence * NUM_HEADS + head) * NUM_Q + token
            tl.store(lse_ptr + place, lse, mask=valid)
            if HAS_MAX:
                tl.store(max_ptr + place, largest_logit, mask=valid)
        else:
            factor = 1.0 / tl.where(total == 0.0, 1.0, total)
            place = ((entry.to(tl.int64) * JOBS + job) * KV_HEADS + kv_head) * ROWS + row
            store_groups(parts_ptr, place, acc0, acc1, acc2, acc3, acc_rest, factor * regain, factor, valid, GROUPS,
                         WIDTH, A, REST_IS_VALUE, DV)  # fmt: skip
            lse = tl.where(total == 0.0, float("-inf"), highest + tl.math.log2(tl.where(total == 0.0, 1.0, total)))
            tl.store(part_lses_ptr + place, lse, mask=valid)
            if HAS_MAX:
                tl.store(part_max_ptr + place, highest, mask=valid)


@triton.jit(do_not_specialize=VARYING)
def combine_kernel(
    parts_ptr, part_lses_ptr, part_max_ptr, lens_ptr, extra_lens_ptr, num_splits_ptr, sinks_ptr,
    given_out_ptr, given_lse_ptr, given_max_ptr, out_ptr, lse_ptr, max_ptr,
    num_entries, fixed_splits, longest, lens_seq_stride, lens_token_stride,
    extra_longest, extra_lens_seq_stride, extra_lens_token_stride,
    SPARSE: tl.constexpr, HAS_LENS: tl.constexpr, HAS_EXTRA: tl.constexpr, HAS_EXTRA_LENS: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_MAX: tl.constexpr, SCHEDULED: tl.constexpr,
    NUM_Q: tl.constexpr, NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DV: tl.constexpr,
    DV_PAD: tl.constexpr, BLOCK_KV: tl.constexpr, WHOLE: tl.constexpr, MIN_BLOCKS: tl.constexpr,
    MERGED: tl.constexpr,
):  # fmt: skip
    """One row of a job that was computed in several splits, merged in their order."""
    JOBS: tl.constexpr = NUM_Q if SPARSE else 1  # pyright: ignore[reportAssignmentType]
    KV_HEADS: tl.constexpr = NUM_HEADS // GROUP
    kv_head = tl.program_id(1)
    row = tl.program_id(0) % ROWS
    job = tl.program_id(0) // ROWS % JOBS
    seq = tl.program_id(0) // (ROWS * JOBS)
    if SCHEDULED:
        first = split_edge(num_splits_ptr, seq, num_entries)
        used = split_edge(num_splits_ptr, seq + 1, num_entries) - first
    else:
        first = seq * fixed_splits
        last = list_length(lens_ptr, seq, job, longest, lens_seq_stride, lens_token_stride, HAS_LENS)
        blocks = (last + BLOCK_KV - 1) // BLOCK_KV
        if HAS_EXTRA:
            last = list_length(extra_lens_ptr, seq, job, extra_longest, extra_lens_seq_stride,
                               extra_lens_token_stride, HAS_EXTRA_LENS)  # fmt: skip
            blocks += (last + BLOCK_KV - 1) // BLOCK_KV
        _, used = divide(blocks, fixed_splits, SCHEDULED, MIN_BLOCKS)
    if used != 1:
        step = JOBS * KV_HEADS * ROWS
        place = ((first.to(tl.int64) * JOBS + job) * KV_HEADS + kv_head) * ROWS + row
        acc, highest, total = merge_parts(
            parts_ptr + place * DV, part_lses_ptr + place, used, step * DV, step, 1.0, MERGED, DV, DV_PAD
        )
        zero = tl.zeros([1], tl.float32)
        token = row // GROUP
        head = kv_head * GROUP + row % GROUP
        if SPARSE:
            token = job
            head = kv_head * GROUP + row
        valid = tl.full([1], 1, tl.int1)
        heads = head + tl.zeros([1], tl.int32)
        factor, lse, _highest = finish(highest + zero, total + zero, sinks_ptr, heads, valid, HAS_SINKS)
        out_place = ((seq.to(tl.int64) * NUM_Q + token) * NUM_HEADS + head) + tl.zeros([1], tl.int64)
        store_columns(out_ptr, out_place, acc[None, :], factor, valid, 0, DV, DV)
        lse_place = ((seq.to(tl.int64) * NUM_HEADS + head) * NUM_Q + token) + tl.zeros([1], tl.int64)
        tl.store(lse_ptr + lse_place, lse)
        if HAS_MAX:
            largest = float("-inf")
            for start in range(0, used, MERGED):
                part = start + tl.arange(0, MERGED)
                maxima = tl.load(part_max_ptr + place + part.to(tl.int64) * step, mask=part < used,
                                 other=float("-inf"))  # fmt: skip
                largest = tl.maximum(largest, tl.max(maxima, 0))
            tl.store(max_ptr + lse_place, largest * LN2 + zero)


# ---- launching


def codes_of(call: Any) -> str:
    """How kernels are to read e4m3: in hardware where there is that."""
    arch = call.device.arch
    hardware = int(arch[3:]) >= 89 if arch.startswith("sm_") else arch in ("gfx942", "gfx950")
    return "e4m3" if hardware else "e4m3_bits"


def as_extra(arguments: dict[str, int]) -> dict[str, int]:
    """Arguments about the second cache, which serves one KV head."""
    prefix = {True: "EXTRA_", False: "extra_"}
    return {prefix[name.isupper()] + name: value for name, value in arguments.items() if "head" not in name}


def shared_arguments(work: Work, tile: Tile, entries: int, max_logits: bool, launch: Any) -> dict[str, Any]:
    """What both kernels are told of a call."""
    keys, extra = work.keys, work.extra
    return {
        "num_entries": entries,
        **keys.lengths(launch),
        # Without a second cache these are not used.
        **as_extra((extra or keys).lengths(launch)),
        "SPARSE": work.sparse,
        "HAS_LENS": keys.lens is not None,
        "HAS_EXTRA": extra is not None,
        "HAS_EXTRA_LENS": extra is not None and extra.lens is not None,
        "HAS_SINKS": work.call.sinks is not None,
        "HAS_MAX": max_logits,
        "SCHEDULED": work.schedule is not None,
        "NUM_Q": work.num_q_tokens,
        "NUM_HEADS": work.call.num_q_heads,
        "GROUP": work.group,
        "ROWS": work.rows,
        "DV": work.call.d_v,
        "BLOCK_KV": tile.block_kv,
        "fixed_splits": 1 if work.schedule is not None else tile.num_splits,
        "WHOLE": tile.num_splits == 1 and work.schedule is None,
        "MIN_BLOCKS": cdiv(MIN_SPLIT, tile.block_kv),
    }


def attention_arguments(work: Work, tile: Tile, launch: Any) -> dict[str, Any]:
    """What the attention kernel is told besides."""
    call = work.call
    width, rest = columns(call)
    groups = 4 if width > 128 and (call.format != "plain" or tile.block_h < APART.value) else 1
    seq_stride, token_stride, head_stride = work.q_strides
    parts = 1 if call.format == "plain" or dtype_name(call.q) == "bfloat16" else 2
    return {
        "num_seqs": work.num_seqs,
        "q_seq_stride": seq_stride,
        "q_token_stride": token_stride,
        "q_head_stride": head_stride,
        **work.keys.places(launch),
        **as_extra((work.extra or work.keys).places(launch)),
        "logit_scale": call.scale * LOG2E.value,
        "CAUSAL": work.causal,
        "FORMAT": call.format,
        "CODES": codes_of(call),
        "PAGE_SIZE": work.keys.page_size,
        "EXTRA_PAGE_SIZE": (work.extra or work.keys).page_size,
        "GROUPS": groups,
        "WIDTH": max(16, next_power_of_2(cdiv(width, groups))),
        "A": width,
        "B": rest,
        "B_PAD": max(16, next_power_of_2(rest)),
        # The products that a query column takes: with float16 codes of `fp8_v32`, and with bfloat16 columns.
        "GROUP_PARTS": parts if call.format == "fp8_v4" else 2 if parts == 2 and item_size(call.q) == 4 else 1,
        "PARTS": parts,
        "BLOCK_H": tile.block_h,
    }


def run(work: Work, tile: Tile, launch: Any, *, max_logits: bool) -> Any:
    """Enqueue the kernels; returns out, lse and, if asked for, max_logits, else something in its place."""
    call, keys, extra, scheduled = work.call, work.keys, work.extra or work.keys, work.schedule is not None
    entries = work.num_seqs + work.schedule[0].shape[0] if scheduled else work.num_seqs * tile.num_splits
    whole = tile.num_splits == 1 and not scheduled
    absent = work.q  # stands for arrays that are not there
    lens = absent if keys.lens is None else keys.lens
    extra_lens = absent if extra.lens is None else extra.lens
    num_splits = launch.packed(work.schedule[1]) if scheduled else absent
    sinks = absent if call.sinks is None else launch.packed(call.sinks)
    shared = shared_arguments(work, tile, entries, max_logits, launch)
    parts = (entries, work.jobs_per_seq, work.num_kv_heads, work.rows)
    nothing = ((1,), "float32")
    out, lse, maxima, *partial = launch(
        latent_kernel,
        (entries * work.jobs_per_seq * cdiv(work.rows, tile.block_h), work.num_kv_heads),
        (work.q, keys.cache, keys.lists, lens, extra.cache, extra.lists, extra_lens, num_splits, sinks),
        [
            (call.out_shape, call.q.dtype),
            (work.lse_shape, "float32"),
            (work.lse_shape, "float32") if max_logits else nothing,
            nothing if whole else ((*parts, call.d_v), "float32"),
            nothing if whole else (parts, "float32"),
            (parts, "float32") if max_logits and not whole else nothing,
        ],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **shared,
        **attention_arguments(work, tile, launch),
    )
    if whole or not work.num_seqs:
        return out, lse, maxima
    return launch(
        combine_kernel,
        (work.num_seqs * work.jobs_per_seq * work.rows, work.num_kv_heads),
        (*partial, lens, extra_lens, num_splits, sinks, out, lse, maxima),
        [],
        inplace=(7, 8, 9),
        num_warps=4,
        num_stages=1,
        DV_PAD=next_power_of_2(call.d_v),
        MERGED=min(next_power_of_2(tile.num_splits), max(1, 4096 // next_power_of_2(call.d_v))),
        **shared,
    )
