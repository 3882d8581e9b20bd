"""Ragged attention over latents in Triton.

The kernel divides work as `ragged_paged_attention` does, and uses the loop over keys of `_latent`. The rows of a
sequence are its query tokens times the heads; all of them share its keys. A program computes a block of rows. For a
long sequence the program visits all keys that the rows see. For a short sequence (decode, speculative decode), it
visits one KV split, and `combine_kernel` merges the splits.

If the tiles for long and short sequences are equal, or if the host expects short sequences only, one launch has
programs for long and for short sequences. Otherwise there are two launches.
"""

import dataclasses
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ragged_attention.calls import RaggedMlaAttention
from ragged_attention.kernels_triton._compiler import zero_after
from ragged_attention.kernels_triton._constants import Constants
from ragged_attention.kernels_triton._formats import load_scale, scale_arguments
from ragged_attention.kernels_triton._key_ranges import range_blocks
from ragged_attention.kernels_triton._latent import plan
from ragged_attention.kernels_triton._latent.kernel import capped_scale, sums_by_column
from ragged_attention.kernels_triton._latent.operands import operands
from ragged_attention.kernels_triton._latent.rows import Finished, RowFormat, load_queries, store_groups, zeros_like
from ragged_attention.kernels_triton._latent.softmax import (
    SEPARATE_QK_ROWS,
    Cache,
    KeyList,
    Loop,
    Queries,
    Scales,
    Seen,
    attend,
    first_state,
    lse_in_base_2,
    restoring_factor,
    sum_of_each_row,
)
from ragged_attention.kernels_triton._mask import (
    Mask,
    MaskKind,
    hides_first_keys,
    hull_of,
    key_range,
    max_visible_keys,
    range_arguments,
    ranges_array,
    ranges_of_rows,
)
from ragged_attention.kernels_triton._max_logits import absent, cleared, keeps_largest, raise_largest
from ragged_attention.kernels_triton._ragged import MAX_LOGITS, Shared, results, run_splits, sequence_arguments
from ragged_attention.kernels_triton._sequences import VARYING, count_sequences, max_blocks
from ragged_attention.kernels_triton._softmax import LOG2E, finish
from ragged_attention.kernels_triton._splits import (
    FEW_TOKENS,
    MAX_SPLITS,
    SEQUENCES,
    Batch,
    Division,
    find_rows,
    find_split,
    most_tokens,
    possible_tile,
    sequences_together,
    short_tokens,
    splits_at_most,
)
from ragged_attention.kernels_triton._tiles import (
    Sizes,
    cdiv,
    expect_between,
    expect_power_of_two,
    launchable,
    next_power_of_2,
    overlaps,
)

SMALL_CAPACITY = 1024  # up to this capacity per sequence, unequal lengths do not justify splits
WAVES = 4  # maximum waves of programs that compute splits: more would only take memory
FEATURES = frozenset({
    "num_seqs", "d_v", "sm_scale", "causal", "sliding_window", "soft_cap", "sinks", "kv_scale", "rope_scale",
    "return_lse", "return_max_logits", "key_ranges", "cache_format", "cache_layout", "out_dtype",
})  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The tunable sizes. Rows are query tokens times heads."""

    block_h: int = 16  # rows per program for long sequences
    block_kv: int = 32  # keys per step for long sequences
    num_warps: int = 4
    num_stages: int = 2
    split_rows: int = 16  # maximum rows of a short sequence
    split_block_h: int = 16  # rows per program for short sequences
    split_block_kv: int = 32
    split_num_warps: int = 4
    split_num_stages: int = 2
    num_splits: int = 1  # total KV splits across the batch's short sequences; 1 disables splitting
    invariant: bool = False  # batch-invariant mode: num_splits is the maximum per sequence

    def __post_init__(self) -> None:
        blocks = ("block_h", "split_block_h", "block_kv", "split_block_kv")
        expect_power_of_two(self, **dict.fromkeys(blocks, (16, 128)), num_warps=(1, 16), split_num_warps=(1, 16))
        expect_between(self, num_stages=(1, 8), split_num_stages=(1, 8), num_splits=(1, MAX_SPLITS))
        expect_between(self, split_rows=(1, 2**16))

    @property
    def long(self) -> Sizes:
        """The sizes for long sequences."""
        return Sizes(self.block_h, self.block_kv, self.num_warps, self.num_stages)

    @property
    def short(self) -> Sizes:
        """The sizes for short sequences."""
        return Sizes(self.split_block_h, self.split_block_kv, self.split_num_warps, self.split_num_stages)

    @property
    def short_rows(self) -> int:
        """`split_rows`, rounded up to whole blocks."""
        return cdiv(self.split_rows, self.split_block_h) * self.split_block_h


def why_not(call: RaggedMlaAttention) -> str | None:
    return launchable(call, ragged_latent_kernel) or plan.too_wide(call, plan.KeyAccess())


def heuristic(call: RaggedMlaAttention) -> Tile:
    """The smallest row blocks that suffice, and enough splits of short sequences to fill the GPU."""
    tile = tile_for(call, call.num_q_heads * call.num_tokens, call.num_q_heads * max(1, short_tokens(call)))
    return dataclasses.replace(tile, num_splits=splits(call, tile))


def invariant_tile(call: RaggedMlaAttention) -> Tile:
    """A batch-invariant tile: no size depends on the batch."""
    tile = tile_for(call, plan.LARGEST_INT, call.num_q_heads * FEW_TOKENS)
    split = max_visible_keys(call, FEW_TOKENS) > plan.MIN_INVARIANT_SPLIT
    return dataclasses.replace(tile, num_splits=plan.MAX_INVARIANT_SPLITS if split else 1, invariant=True)


def tile_for(call: RaggedMlaAttention, rows: int, short_rows: int) -> Tile:
    """The tile, without splits, for `rows` rows in the batch and `short_rows` rows per short sequence."""
    shared = call.num_ranges == 1 and call.num_q_heads % plan.MOST_ROWS == 0  # all rows of a block share the range
    access = plan.KeyAccess(
        dense=True,
        ragged=True,
        page_sizes=(call.page_size,),
        windowed=hides_first_keys(call),
        ranges=0 if shared else call.num_ranges,
    )
    long, short = (plan.fitting_sizes(call, count, access) for count in (rows, short_rows))
    return Tile(**long.fields("block_h"), **short.fields("block_h", "split_"), split_rows=short_rows)


def splits(call: RaggedMlaAttention, tile: Tile) -> int:
    """The total number of splits that is fastest if all sequences are short and have equally many keys.

    If lengths differ, longer sequences get more of these splits, so that all splits have about equally many keys.
    """
    keys, blocks = max_visible_keys(call, FEW_TOKENS), tile.short_rows // tile.split_block_h
    programs = plan.programs_at_once(call, tile.split_block_h)
    if not 0 < call.max_num_seqs <= SEQUENCES[-1]:
        return 1
    each = plan.splits(call.max_num_seqs * blocks, programs, keys, tile.split_block_kv)
    if each == 1 and keys <= SMALL_CAPACITY:
        return 1
    return min(call.max_num_seqs * each, max(1, WAVES * programs // blocks), MAX_SPLITS)


@triton.jit
def selected(condition, first, second, UNIFORM: tl.constexpr):
    """The tuple `first` if `condition`, else `second`.

    Both tuples are computed, because after a branch the compiler would not know that all threads have equal numbers. If
    UNIFORM, a maximum over a warp proves this to the compiler, so that the numbers go to uniform registers. Otherwise
    tiles of 64 rows and 64 keys spill 80 to 180 bytes per thread (Triton 3.9 on sm_90). But if the first key of a block
    depends on such a maximum, Triton no longer loads keys 16 bytes at a time.
    """
    numbers = ()
    for index in tl.static_range(len(first)):
        number = tl.where(condition, first[index], second[index])
        if UNIFORM:
            number = tl.max(number + tl.zeros([32], tl.int32), 0)
        numbers += (number,)
    return numbers


@triton.jit
def find_row_block(batch, NUM_HEADS: tl.constexpr, BLOCK_H: tl.constexpr, DIVISION: tl.constexpr):
    """(seq, start, q_len, kv_len, row_block, begin, end, count, place) of a program for a long sequence.

    The program has a block of the sequence's rows and all keys of the sequence. Rows without a sequence have no keys.
    `row_block` is the block's index in its sequence, and [begin, end) are the key blocks. `count` is the number of
    splits, here 1, and `place` the index at which a split is stored. `q_len` is 0 if the program has no work.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # start with the last rows, which see the most keys
    seq, start, q_len, first_row, live = find_rows(block, batch, NUM_HEADS, BLOCK_H)
    kv_len = tl.load(batch.kv_lens_ptr + seq, mask=live, other=0)
    q_len = tl.where((first_row >= 0) & ((q_len * NUM_HEADS > DIVISION.SHORT_ROWS) | (live == 0)), q_len, 0)
    kv_len = tl.minimum(tl.maximum(kv_len, 0), batch.capacity)
    end = (kv_len + DIVISION.BLOCK_KV - 1) // DIVISION.BLOCK_KV
    return tl.where(live, seq, 0), start, q_len, kv_len, first_row // BLOCK_H, 0, end, 1, 0


@triton.jit
def find_key_split(batch, mask, num_splits, KIND: tl.constexpr, DIVISION: tl.constexpr, BLOCK_H: tl.constexpr):
    """The tuple of `find_row_block` for a program that has a block of a short sequence's rows and one KV split."""
    ROW_BLOCKS: tl.constexpr = DIVISION.SHORT_ROWS // BLOCK_H
    split = find_split(tl.program_id(0) // ROW_BLOCKS, batch, mask, num_splits, KIND, DIVISION)
    begin = split.seen_first // DIVISION.BLOCK_KV
    end = (split.seen_end + DIVISION.BLOCK_KV - 1) // DIVISION.BLOCK_KV
    if DIVISION.SPLIT_KV:
        begin += split.number * split.blocks_each
        end = tl.where(split.splits > 1, tl.minimum(begin + split.blocks_each, end), end)
    row_block = tl.program_id(0) % ROW_BLOCKS
    return split.seq, split.start, split.q_len, split.kv_len, row_block, begin, end, split.splits, split.place


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Config(Constants):
    """The compile-time constants of a launch of the kernel."""

    FORMAT: RowFormat
    LOOP: Loop
    MASK: MaskKind
    DIVISION: Division
    NUM_HEADS: int
    BLOCK_H: int  # rows per program
    DV: int  # columns of a result row
    CAP_UNIT: float  # see `unit_under_cap`
    QUERIES: int  # number of query tokens to which a program's rows can belong
    UNIFORM: bool  # whether to prove to the compiler that all threads have the same work; see `selected`
    HAS_SHORT: bool  # whether the launch has programs for short sequences
    HAS_LONG: bool  # whether the launch has programs for long sequences and rows that belong to no sequence
    HAS_NUM_SEQS: bool
    HAS_SINKS: bool
    KV_SCALE_STRIDE: int  # see `load_scale`
    ROPE_SCALE_STRIDE: int
    PDL: bool  # programmatic dependent launch: this kernel and the one before it may overlap


@triton.jit(do_not_specialize=VARYING)
def ragged_latent_kernel(
    q_ptr, cache_ptr, kv_lens_ptr, page_indices_ptr, cu_q_lens_ptr, num_seqs_ptr, sinks_ptr, kv_scale_ptr,
    rope_scale_ptr, ranges_ptr, given_max_ptr, given_out_ptr, given_lse_ptr, parts_ptr, part_lses_ptr, out_ptr,
    lse_ptr, max_ptr,
    num_tokens, max_num_seqs, capacity, window, num_slots, table_stride, q_token_stride, q_head_stride,
    page_stride, slot_stride, logit_scale, soft_cap, kv_scale_factor, rope_scale_factor, num_splits, num_parts,
    CONFIG: tl.constexpr,
):  # fmt: skip
    """Attend with BLOCK_H rows of a short sequence to one KV split, or of a long sequence to all keys that they see.

    The first programs are those of short sequences: `num_parts` for each block of their SHORT_ROWS rows. If a sequence
    has several splits, their normalised results go to parts [splits, SHORT_ROWS, DV] float32, and their base-2 lse to
    an array without the last axis. The other programs are those of long sequences; they also write rows that belong to
    no sequence.
    """
    LOOP: tl.constexpr = CONFIG.LOOP
    FORMAT: tl.constexpr = CONFIG.FORMAT
    OPERANDS: tl.constexpr = LOOP.OPERANDS
    KIND: tl.constexpr = CONFIG.MASK
    NUM_HEADS: tl.constexpr = CONFIG.NUM_HEADS
    BLOCK_H: tl.constexpr = CONFIG.BLOCK_H
    BLOCK_KV: tl.constexpr = LOOP.BLOCK_KV
    SHORT_ROWS: tl.constexpr = CONFIG.DIVISION.SHORT_ROWS
    if CONFIG.PDL:
        gdc_launch_dependents()
    num_seqs = count_sequences(num_seqs_ptr, max_num_seqs, CONFIG.HAS_NUM_SEQS)
    batch = Batch(cu_q_lens_ptr, kv_lens_ptr, num_seqs, max_num_seqs, num_tokens, capacity)
    mask = Mask(window, ranges_ptr=ranges_ptr)
    if CONFIG.HAS_LONG:
        work = find_row_block(batch, NUM_HEADS, BLOCK_H, CONFIG.DIVISION)
    if CONFIG.HAS_SHORT:
        split = find_key_split(batch, mask, num_splits, KIND, CONFIG.DIVISION, BLOCK_H)
        if CONFIG.HAS_LONG:
            is_short = tl.program_id(0) < num_parts * (SHORT_ROWS // BLOCK_H)
            work = selected(is_short, split, work, CONFIG.UNIFORM)
        else:
            work = selected(True, split, split, CONFIG.UNIFORM)
    seq, start, q_len, kv_len, row_block, begin, end, count, place = work  # pyright: ignore[reportAssignmentType]
    first_row = row_block * BLOCK_H
    num_rows = q_len * NUM_HEADS
    if first_row < num_rows:
        row = first_row + tl.arange(0, BLOCK_H)
        valid = row < num_rows
        num_old = kv_len - q_len  # the number of keys before the first query's own key
        low = num_old + first_row // NUM_HEADS
        high = num_old + tl.minimum((first_row + BLOCK_H - 1) // NUM_HEADS, q_len - 1)
        first, last = key_range(low, high, kv_len, mask, KIND)
        limit = num_old + row // NUM_HEADS + 1
        later = ()
        row_ranges = limit  # stand-ins, not used without ranges of keys
        query_ranges = limit
        if KIND.RANGES:
            ranges = ranges_of_rows(start, tl.minimum(row // NUM_HEADS, q_len - 1), kv_len, mask, KIND)
            first, last = hull_of(ranges, KIND)
            begin, end, later = range_blocks(begin, end, kv_len, ranges, KIND, BLOCK_KV)
            queries = tl.minimum(low + tl.arange(0, CONFIG.QUERIES), high) - num_old
            row_ranges = ranges.rows
            query_ranges = ranges.ptr + queries.to(tl.int64) * (2 * KIND.RANGES)
        else:
            begin = tl.maximum(begin, first // BLOCK_KV)
            end = tl.minimum(end, (last + BLOCK_KV - 1) // BLOCK_KV)
        token = (start + row // NUM_HEADS).to(tl.int64)
        q_rows = q_ptr + token * q_token_stride + (row % NUM_HEADS).to(tl.int64) * q_head_stride
        kv_scale = load_scale(kv_scale_ptr, 0, kv_scale_factor, CONFIG.KV_SCALE_STRIDE)
        rope_scale = load_scale(rope_scale_ptr, 0, rope_scale_factor, CONFIG.ROPE_SCALE_STRIDE)
        groups, lost, q_rest, lost_rest, unit = load_queries(q_rows, valid, OPERANDS)
        state = first_state(BLOCK_H, LOOP)
        # Computed queries are carried by a loop of one iteration; `_latent.kernel` explains why.
        CARRIED: tl.constexpr = (OPERANDS.DIVIDED or FORMAT.FOLDED) and BLOCK_H >= SEPARATE_QK_ROWS
        once = 1
        if CARRIED:
            once = tl.minimum(num_rows - first_row, 1)
        for _ in range(once):
            state = attend(
                Queries(groups, lost, q_rest, lost_rest, unit), state,
                Cache(cache_ptr, page_stride, slot_stride, num_slots),
                KeyList(page_indices_ptr + seq.to(tl.int64) * table_stride, begin, end, first, last, later),
                Seen(limit - window, limit, row_ranges, query_ranges, kv_len),
                Scales(logit_scale * kv_scale, soft_cap, LOG2E / CONFIG.CAP_UNIT, logit_scale * rope_scale),
                FORMAT, LOOP,
            )  # fmt: skip
            if CARRIED:
                groups = zeros_like(groups)
        m_i, largest, sums, acc, acc_rest = state[0], state[1], state[2], state[3], state[4]
        l_i = sum_of_each_row(sums)
        restored = restoring_factor(m_i, l_i, largest, FORMAT.RESCALED)
        row = first_row + zero_after(l_i) + tl.arange(0, BLOCK_H)
        valid = row < num_rows
        if not CONFIG.DIVISION.SPLIT_KV or count == 1:
            factor, lse = finish(m_i, l_i, sinks_ptr, row % NUM_HEADS, valid, kv_scale, CONFIG.HAS_SINKS)
            index = start.to(tl.int64) * NUM_HEADS + row
            store_groups(out_ptr, index, Finished(acc, factor * restored, acc_rest, factor), valid, OPERANDS,
                         OPERANDS.REST_IS_VALUE, CONFIG.DV)  # fmt: skip
            tl.store(lse_ptr + index, lse, mask=valid)
        else:
            factor = 1.0 / tl.where(l_i == 0.0, 1.0, l_i)
            index = place.to(tl.int64) * SHORT_ROWS + row
            store_groups(parts_ptr, index, Finished(acc, factor * restored, acc_rest, factor), valid, OPERANDS,
                         OPERANDS.REST_IS_VALUE, CONFIG.DV)  # fmt: skip
            tl.store(part_lses_ptr + index, lse_in_base_2(m_i, l_i), mask=valid)
        if max_ptr is not None:
            uncapped = m_i
            if LOOP.KEEPS_LARGEST:
                uncapped = state[5]
            raise_largest(max_ptr, uncapped, l_i, row % NUM_HEADS, valid)
    if CONFIG.PDL and CONFIG.HAS_SHORT and not CONFIG.HAS_LONG:
        gdc_wait()  # the next kernel waits for this launch only, but also needs the rows of the previous launch


def shared_arguments(call: RaggedMlaAttention, launch: Any) -> Shared:
    """The arguments that all launches of a call share, with q as a stand-in for absent arrays."""
    q = launch.packed(call.q)
    sequences, numbers = sequence_arguments(call, launch, q)
    keys = plan.keys_of_tables(call, sequences["page_indices"], launch)
    kv_scale, kv_scale_factor, kv_scale_stride = scale_arguments(call.kv_scale, q, launch)
    rope_scale, rope_scale_factor, rope_scale_stride = scale_arguments(call.rope_scale, q, launch)
    mask, mask_numbers = range_arguments(call)
    scales, cap_unit = capped_scale(call.scale, call.soft_cap)
    addresses = keys.addresses(launch)
    numbers |= {name: addresses[name] for name in ("page_stride", "slot_stride", "num_slots")}
    numbers |= {**mask_numbers, "kv_scale_factor": kv_scale_factor, "rope_scale_factor": rope_scale_factor}
    numbers |= scales
    constants = {
        "FORMAT": keys.row_format(call.device.arch, launch),
        "MASK": mask,
        "NUM_HEADS": call.num_q_heads,
        "DV": call.d_v,
        "CAP_UNIT": cap_unit,
        "HAS_NUM_SEQS": call.num_seqs is not None,
        "HAS_SINKS": call.sinks is not None,
        "KV_SCALE_STRIDE": kv_scale_stride,
        "ROPE_SCALE_STRIDE": rope_scale_stride,
        "PDL": overlaps(call),
    }
    arrays = {"q": q, "kv_cache": keys.cache, **sequences, "kv_scale": kv_scale, "rope_scale": rope_scale}
    arrays |= {"key_ranges": ranges_array(call, launch, q), MAX_LOGITS: cleared(call, launch, q)}
    return Shared(arrays, numbers, constants)


def division_of(call: RaggedMlaAttention, tile: Tile, block_kv: int, *, splits: bool) -> Division:
    """The `Division` of a launch; `splits` says whether it has programs for short sequences."""
    split_kv = splits and tile.num_splits > 1
    balanced = split_kv and not tile.invariant
    return Division(
        GROUP=call.num_q_heads,
        SHORT_ROWS=tile.short_rows,
        BLOCK_KV=block_kv,
        SPLIT_KV=split_kv,
        BATCH_INVARIANT=split_kv and tile.invariant,
        COMPACT=balanced,
        MIN_BLOCKS=cdiv(plan.MIN_INVARIANT_SPLIT if tile.invariant else plan.MIN_SPLIT, block_kv) if split_kv else 1,
        MAX_SEQS=sequences_together(call.max_num_seqs) if balanced else 1,
    )


def launch_arguments(
    call: RaggedMlaAttention, tile: Tile, sizes: Sizes, shared: Shared, division: Division, *, short: bool, long: bool
) -> dict[str, Any]:
    """The options and constants of a launch for short sequences, long sequences, or both."""
    # If each block has heads of one token only, all of its rows see the same keys, and the loop needs no masks.
    mixed, mask = call.num_q_heads % sizes.rows != 0, shared.constants["MASK"].plain
    queries = cdiv(sizes.rows, call.num_q_heads) + (sizes.rows % call.num_q_heads > 1) if mixed else 1
    return {
        "num_splits": tile.num_splits,
        "num_warps": sizes.warps,
        "num_stages": sizes.stages,
        "CONFIG": Config(
            LOOP=Loop(
                SPARSE=False,
                CAUSAL=mask.CAUSAL and mixed,
                HAS_WINDOW=mask.HAS_WINDOW and mixed,
                HAS_SOFT_CAP=call.soft_cap is not None,
                RANGES=mask.RANGES if mixed or mask.RANGES > 1 else 0,  # one shared range is the whole key list
                RANGES_DIFFER=mask.RANGES > 0 and mixed,
                BLOCK_KV=sizes.keys,
                KEEPS_LARGEST=keeps_largest(call),
                SUMS_BY_COLUMN=sums_by_column(call, call.kv_format, sizes),
                OPERANDS=operands(call, sizes.rows),
            ),
            DIVISION=division,
            BLOCK_H=sizes.rows,
            QUERIES=next_power_of_2(queries),
            UNIFORM=not (mask.HAS_FIRST_KEY or mask.RANGES),
            HAS_SHORT=short,
            HAS_LONG=long,
            **shared.constants,
        ),
    }


def run_long(call: RaggedMlaAttention, tile: Tile, launch: Any, shared: Shared) -> Any:
    """Enqueue the kernel for long sequences and rows that belong to no sequence; returns the results."""
    nothing, q = ((1,), "float32"), shared.arrays["q"]  # q is a stand-in for absent arrays
    division = division_of(call, tile, tile.block_kv, splits=False)
    _, _, *made = launch(
        ragged_latent_kernel,
        (max_blocks(call.num_tokens * call.group, tile.block_h, call.max_num_seqs),),
        (*shared.arrays.values(), q, q),
        [nothing, nothing, *results(call)],
        inplace=shared.max_logits(call),
        **absent(call),
        num_parts=0,
        **shared.numbers,
        **launch_arguments(call, tile, tile.long, shared, division, short=False, long=True),
    )
    return made


def run_short(call: RaggedMlaAttention, tile: Tile, launch: Any, shared: Shared, target: Any) -> Any:
    """Enqueue the kernels for short sequences; returns the results. See `run_splits`."""
    entries, stored = splits_at_most(call.max_num_seqs, tile.num_splits, invariant=tile.invariant)
    programs = entries * (tile.short_rows // tile.split_block_h)
    division = division_of(call, tile, tile.split_block_kv, splits=True)
    if target is None:  # the launch also has programs for long sequences
        programs += max_blocks(call.num_tokens * call.group, tile.split_block_h, call.max_num_seqs)
    return run_splits(
        launch,
        call,
        shared,
        target,
        (stored, tile.short_rows),
        kernel=ragged_latent_kernel,
        grid=(programs,),
        division=division,
        mask=shared.constants["MASK"],
        scale=("kv_scale", shared.constants["KV_SCALE_STRIDE"]),
        num_parts=entries,
        **launch_arguments(call, tile, tile.short, shared, division, short=True, long=target is None),
    )


def run(call: RaggedMlaAttention, tile: Tile, launch: Any) -> Any:
    """Enqueue the kernels; returns out or a tuple of the requested results."""
    tile, shared = possible_tile(call, tile), shared_arguments(call, launch)
    empty = not (call.num_tokens and call.max_num_seqs)
    all_are_short = most_tokens(call) * call.num_q_heads <= tile.short_rows  # the host's estimate
    target: Any = None
    if empty or not (all_are_short or tile.long == tile.short):
        target = run_long(call, tile, launch, shared)
    made = target if empty else run_short(call, tile, launch, shared, target)
    return call.requested(**dict(zip(("out", "lse", "max_logits"), made, strict=False)))
