"""Ragged attention over latents in Triton: the plan of `ragged_paged_attention`, the loop over keys of `_latent`.

The rows of a sequence are its query tokens times the heads, which all share its keys. A program takes a block of rows:
of a long sequence over all keys that they see, of a short one (decode, speculative decode) over a part of its keys, and
`combine_kernel` merges the parts. One launch has both kinds of programs; there are two launches if the tiles differ and
the host does not know that all sequences are short.
"""

# Triton's language only looks like Python: its constexprs and early-bound branches defeat a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

import dataclasses
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ragged_attention.calls import RaggedMlaAttention
from ragged_attention.kernels_triton._formats import load_scale, scale_arguments
from ragged_attention.kernels_triton._latent import plan
from ragged_attention.kernels_triton._latent.kernel import logit_scales, sums_by_column
from ragged_attention.kernels_triton._latent.operands import operands
from ragged_attention.kernels_triton._latent.rows import (
    load_queries,
    store_columns,
    store_groups,
    zero_after,
    zeros_like,
)
from ragged_attention.kernels_triton._latent.softmax import (
    SEPARATE_QK_ROWS,
    Cache,
    Features,
    KeyList,
    Queries,
    Scales,
    Seen,
    attend,
    finish,
    no_sums,
    sum_of_each_row,
)
from ragged_attention.kernels_triton._sequences import (
    VARYING,
    count_sequences,
    find_segment,
    key_range,
    segment_edge,
)
from ragged_attention.kernels_triton._softmax import merge_parts
from ragged_attention.kernels_triton._tiles import (
    cdiv,
    dependent,
    expect_between,
    expect_power_of_two,
    launchable,
    next_power_of_2,
    overlaps,
)
from ragged_attention.kernels_triton.ragged_paged_attention import (
    FEW_TOKENS,
    MAX_SPLITS,
    SEQUENCES,
    most_tokens,
    own_parts,
    parts_of_all,
    short_sequence,
)

MANY_TOKENS = 8  # average query tokens per sequence above which a batch is taken to have prompts
EVEN = 1024  # capacity of a sequence up to which different lengths do not matter
WAVES = 4  # maximum waves of programs for parts: more would only take memory
FEATURES = frozenset({
    "num_seqs", "d_v", "sm_scale", "causal", "sliding_window", "soft_cap", "sinks", "kv_scale", "return_lse",
    "cache_format", "cache_layout", "out_dtype",
})  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """What may be tuned. Rows are query tokens times heads."""

    block_h: int = 16  # rows of a program for a sequence that is not short
    block_kv: int = 32  # keys per step of such a program
    num_warps: int = 4
    num_stages: int = 2
    split_rows: int = 16  # rows up to which a sequence is short
    split_block_h: int = 16  # rows of a program for a short sequence
    split_block_kv: int = 32
    split_num_warps: int = 4
    split_num_stages: int = 2
    num_splits: int = 1  # total KV splits across the batch's short sequences; 1 disables splitting
    invariant: bool = False  # batch-invariant mode: num_splits applies per sequence, by its own length

    def __post_init__(self) -> None:
        expect_power_of_two(self, **dict.fromkeys(("block_h", "split_block_h"), (16, 128)))
        expect_power_of_two(self, **dict.fromkeys(("block_kv", "split_block_kv"), (16, 128)))
        expect_power_of_two(self, **dict.fromkeys(("num_warps", "split_num_warps"), (1, 16)))
        expect_between(self, num_stages=(1, 8), split_num_stages=(1, 8), num_splits=(1, MAX_SPLITS))
        expect_between(self, split_rows=(1, 2**16))

    @property
    def long(self) -> plan.Tile:
        """The tile for sequences that are not short."""
        return plan.Tile(
            block_h=self.block_h, block_kv=self.block_kv, num_warps=self.num_warps, num_stages=self.num_stages
        )

    @property
    def short(self) -> plan.Tile:
        """The tile for short sequences."""
        return plan.Tile(
            block_h=self.split_block_h,
            block_kv=self.split_block_kv,
            num_warps=self.split_num_warps,
            num_stages=self.split_num_stages,
        )

    @property
    def short_rows(self) -> int:
        """`split_rows`, rounded up to whole blocks."""
        return cdiv(self.split_rows, self.split_block_h) * self.split_block_h


def why_not(call: RaggedMlaAttention) -> str | None:
    return launchable(call, ragged_latent_kernel) or plan.too_wide(call, plan.Walk())


def heuristic(call: RaggedMlaAttention) -> Tile:
    """As few rows as suffice; enough splits of short sequences' keys to fill the GPU."""
    tokens = cdiv(call.num_tokens, max(call.max_num_seqs, 1)) if call.max_q_len is None else call.max_q_len
    tokens = max(1, tokens) if tokens <= MANY_TOKENS else FEW_TOKENS
    tile = sizes(call, call.num_q_heads * call.num_tokens, call.num_q_heads * tokens)
    return dataclasses.replace(tile, num_splits=splits(call, tile))


def invariant_tile(call: RaggedMlaAttention) -> Tile:
    """No size depends on the batch."""
    tile = sizes(call, plan.LARGEST_INT, call.num_q_heads * FEW_TOKENS)
    split = most_keys(call) > plan.OWN_SPLIT
    return dataclasses.replace(tile, num_splits=plan.OWN_SPLITS if split else 1, invariant=True)


def sizes(call: RaggedMlaAttention, rows: int, short_rows: int) -> Tile:
    """The tile for `rows` rows of all sequences together, and `short_rows` rows of each short sequence; unsplit."""
    walk = plan.Walk(
        dense=True,
        ragged=True,
        page_sizes=(call.page_size,),
        windowed=plan.window_of(call) is not None,
    )
    block_h, block_kv, num_warps, num_stages = plan.fitting_sizes(call, rows, walk)
    split_block_h, split_block_kv, split_num_warps, split_num_stages = plan.fitting_sizes(call, short_rows, walk)
    return Tile(
        block_h=block_h,
        block_kv=block_kv,
        num_warps=num_warps,
        num_stages=num_stages,
        split_rows=short_rows,
        split_block_h=split_block_h,
        split_block_kv=split_block_kv,
        split_num_warps=split_num_warps,
        split_num_stages=split_num_stages,
    )


def most_keys(call: RaggedMlaAttention) -> int:
    """The most keys that a short sequence can see."""
    window = plan.window_of(call)
    return call.capacity if window is None else min(call.capacity, window + FEW_TOKENS)


def splits(call: RaggedMlaAttention, tile: Tile) -> int:
    """The total number of splits that is fastest if all sequences are short and equally long.

    If lengths differ, each split has about as many keys.
    """
    keys, blocks = most_keys(call), tile.short_rows // tile.split_block_h
    programs = plan.programs_at_once(call, tile.split_block_h)
    if not 0 < call.max_num_seqs <= SEQUENCES[-1]:
        return 1
    each = plan.splits(call.max_num_seqs * blocks, programs, keys, tile.split_block_kv)
    if each == 1 and keys <= EVEN:
        return 1
    return min(call.max_num_seqs * each, max(1, WAVES * programs // blocks), MAX_SPLITS)


@triton.jit
def chosen(own, ones, others, UNIFORM: tl.constexpr):
    """The numbers of one tuple or of another, all of them computed before: a branch would hide that they are alike.

    That they are alike in all threads a compiler knows after a warp's maximum (UNIFORM), and then they take no thread's
    registers; without that, 64 rows by 64 keys spilled 80 to 180 bytes (Triton 3.9 on sm_90). Where the first key
    follows from one, though, Triton loads keys no longer 16 bytes at a time.
    """
    numbers = ()
    for index in tl.static_range(len(ones)):
        number = tl.where(own, ones[index], others[index])
        if UNIFORM:
            number = tl.max(number + tl.zeros([32], tl.int32), 0)
        numbers += (number,)
    return numbers


@triton.jit
def find_block(cu_q_lens_ptr, kv_lens_ptr, num_seqs, num_tokens, capacity, SHORT_ROWS: tl.constexpr,
               NUM_HEADS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_KV: tl.constexpr):  # fmt: skip
    """(seq, start, q_len, kv_len, row_block, begin, end, count, place) of a program with a block of rows over all keys.

    A sequence that is not short, or none, without keys; its first token and its lengths; which block of its rows; then
    the blocks of its keys [begin, end), how many parts these are and where they are kept. `q_len` is 0 where there is
    nothing to do.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the last rows see the most keys: they come first
    segment = find_segment(block, cu_q_lens_ptr, num_seqs, num_tokens, NUM_HEADS, BLOCK_H)
    seq = segment - 1
    live = (seq >= 0) & (seq < num_seqs)
    start = segment_edge(cu_q_lens_ptr, segment, num_seqs, num_tokens)
    q_len = tl.maximum(segment_edge(cu_q_lens_ptr, segment + 1, num_seqs, num_tokens) - start, 0)
    row_block = block - (start * NUM_HEADS // BLOCK_H + segment)
    kv_len = tl.load(kv_lens_ptr + seq, mask=live, other=0)
    q_len = tl.where((row_block >= 0) & ((q_len * NUM_HEADS > SHORT_ROWS) | (live == 0)), q_len, 0)
    kv_len = tl.minimum(tl.maximum(kv_len, 0), capacity)
    return tl.where(live, seq, 0), start, q_len, kv_len, row_block, 0, (kv_len + BLOCK_KV - 1) // BLOCK_KV, 1, 0


@triton.jit
def before(counts, seq, SEQS: tl.constexpr):
    """The parts of the sequences before one that have several: only these are kept."""
    earlier = (tl.arange(0, SEQS) < seq) & (counts > 1)
    return tl.sum(tl.where(earlier, counts, 0), 0)


@triton.jit
def find_part(
    cu_q_lens_ptr, kv_lens_ptr, num_seqs, num_tokens, max_num_seqs, capacity, window, num_splits,
    HAS_WINDOW: tl.constexpr, CAUSAL: tl.constexpr, SHORT_ROWS: tl.constexpr, NUM_HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_KV: tl.constexpr, WHOLE: tl.constexpr, MIN_BLOCKS: tl.constexpr, SEQS: tl.constexpr,
    OWN: tl.constexpr,
):  # fmt: skip
    """The same of a program with a block of a short sequence's rows, over a part of its keys."""
    ROW_BLOCKS: tl.constexpr = SHORT_ROWS // BLOCK_H
    entry = tl.program_id(0) // ROW_BLOCKS
    seq = entry
    part = 0
    count = 1
    each = 0
    place = entry
    if OWN:
        seq = entry // num_splits
        part = entry % num_splits
    elif not WHOLE:
        counts, each = parts_of_all(
            cu_q_lens_ptr, kv_lens_ptr, num_seqs, num_tokens, max_num_seqs, capacity, window, num_splits,
            HAS_WINDOW, CAUSAL, NUM_HEADS, SHORT_ROWS, BLOCK_KV, MIN_BLOCKS, SEQS, False,
        )  # fmt: skip
        ends = tl.cumsum(counts, 0)
        seq = tl.sum((ends <= entry).to(tl.int32), 0)
        own = tl.arange(0, SEQS) == seq
        count = tl.sum(tl.where(own, counts, 0), 0)
        part = entry - tl.sum(tl.where(own, ends, 0), 0) + count
        place = before(counts, seq, SEQS) + part
    start, q_len, kv_len, first, last = short_sequence(
        seq, cu_q_lens_ptr, kv_lens_ptr, num_seqs, num_tokens, max_num_seqs, capacity, window, HAS_WINDOW, CAUSAL,
        NUM_HEADS, SHORT_ROWS, False,
    )  # fmt: skip
    if OWN:
        count, each = own_parts(q_len * NUM_HEADS, first, last, num_splits, SHORT_ROWS, BLOCK_KV, MIN_BLOCKS)
        q_len = tl.where(part < count, q_len, 0)
    row_block = tl.program_id(0) % ROW_BLOCKS
    begin = first // BLOCK_KV
    end = (last + BLOCK_KV - 1) // BLOCK_KV
    if not WHOLE:
        begin += part * each
        end = tl.where(count > 1, tl.minimum(begin + each, end), end)
    return seq, start, q_len, kv_len, row_block, begin, end, count, place


@triton.jit(do_not_specialize=VARYING)
def ragged_latent_kernel(
    q_ptr, cache_ptr, kv_lens_ptr, page_indices_ptr, cu_q_lens_ptr, num_seqs_ptr, sinks_ptr, kv_scale_ptr,
    given_out_ptr, given_lse_ptr, parts_ptr, part_lses_ptr, out_ptr, lse_ptr,
    num_tokens, max_num_seqs, capacity, window, num_slots, table_stride, q_token_stride, q_head_stride,
    page_stride, slot_stride, logit_scale, soft_cap, capped_scale, kv_scale_factor, num_splits, num_parts,
    KV_SCALE_STRIDE: tl.constexpr, HAS_NUM_SEQS: tl.constexpr, HAS_SINKS: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr, FORMAT: tl.constexpr, OPERANDS: tl.constexpr,
    NUM_HEADS: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_KV: tl.constexpr,
    SUMS_BY_COLUMN: tl.constexpr, SHORT: tl.constexpr, LONG: tl.constexpr, SHORT_ROWS: tl.constexpr,
    WHOLE: tl.constexpr, MIN_BLOCKS: tl.constexpr, SEQS: tl.constexpr, OWN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend with BLOCK_H rows of a short sequence to a part of its keys, or with those of a long one to all its keys.

    SHORT and LONG say for which kinds of sequences there are programs. The first programs are for short sequences:
    `num_parts` times the blocks of SHORT_ROWS. If a sequence has several parts, its rows go to parts [places,
    SHORT_ROWS, DV] float32, normalised, and their base-2 lse to part_lses. If WHOLE, every sequence is one part.
    """
    if PDL:
        gdc_launch_dependents()
    num_seqs = count_sequences(num_seqs_ptr, max_num_seqs, HAS_NUM_SEQS)
    if LONG:
        found = find_block(
            cu_q_lens_ptr, kv_lens_ptr, num_seqs, num_tokens, capacity, SHORT_ROWS, NUM_HEADS, BLOCK_H, BLOCK_KV
        )
    if SHORT:
        part = find_part(
            cu_q_lens_ptr, kv_lens_ptr, num_seqs, num_tokens, max_num_seqs, capacity, window, num_splits,
            HAS_WINDOW, CAUSAL, SHORT_ROWS, NUM_HEADS, BLOCK_H, BLOCK_KV, WHOLE, MIN_BLOCKS, SEQS, OWN,
        )  # fmt: skip
        if LONG:
            found = chosen(tl.program_id(0) < num_parts * (SHORT_ROWS // BLOCK_H), part, found, not HAS_WINDOW)
        else:
            found = chosen(True, part, part, not HAS_WINDOW)
    seq, start, q_len, kv_len, row_block, begin, end, count, place = found  # pyright: ignore[reportAssignmentType]
    first_row = row_block * BLOCK_H
    num_rows = q_len * NUM_HEADS
    if first_row < num_rows:
        row = first_row + tl.arange(0, BLOCK_H)
        valid = row < num_rows
        earlier = kv_len - q_len  # keys, before the first query's own
        low = earlier + first_row // NUM_HEADS
        high = earlier + tl.minimum((first_row + BLOCK_H - 1) // NUM_HEADS, q_len - 1)
        first, last = key_range(low, high, kv_len, window, CAUSAL, HAS_WINDOW)
        begin = tl.maximum(begin, first // BLOCK_KV)
        end = tl.minimum(end, (last + BLOCK_KV - 1) // BLOCK_KV)
        ONE_TOKEN: tl.constexpr = NUM_HEADS % BLOCK_H == 0  # then all rows see the keys [first, last)
        limit = earlier + row // NUM_HEADS + 1
        token = (start + row // NUM_HEADS).to(tl.int64)
        q_rows = q_ptr + token * q_token_stride + (row % NUM_HEADS).to(tl.int64) * q_head_stride
        kv_scale = load_scale(kv_scale_ptr, 0, kv_scale_factor, KV_SCALE_STRIDE)
        groups, lost, q_rest, lost_rest, unit = load_queries(q_rows, valid, OPERANDS)
        m_i = tl.full([BLOCK_H], float("-inf"), tl.float32)
        acc = (tl.zeros([BLOCK_H, OPERANDS.WIDTH], tl.float32),) * OPERANDS.GROUPS
        acc_rest = tl.zeros([BLOCK_H, OPERANDS.REST_PAD], tl.float32)
        state = (m_i, m_i, no_sums(m_i, BLOCK_KV, SUMS_BY_COLUMN), acc, acc_rest)
        # See `_latent.kernel` for why a loop of one iteration carries queries that were computed.
        CARRIED: tl.constexpr = (OPERANDS.DIVIDED or FORMAT.FOLDED) and BLOCK_H >= SEPARATE_QK_ROWS
        once = 1
        if CARRIED:
            once = tl.minimum(num_rows - first_row, 1)
        for _ in range(once):
            state = attend(
                Queries(groups, lost, q_rest, lost_rest, unit), state,
                Cache(cache_ptr, page_stride, slot_stride, num_slots),
                KeyList(page_indices_ptr + seq.to(tl.int64) * table_stride, begin, end, first, last),
                Seen(limit - window, limit), Scales(logit_scale * kv_scale, soft_cap, capped_scale),
                Features(False, CAUSAL and not ONE_TOKEN, HAS_WINDOW and not ONE_TOKEN, HAS_SOFT_CAP),
                FORMAT, OPERANDS, BLOCK_KV,
            )  # fmt: skip
            if CARRIED:
                groups = zeros_like(groups)
        m_i, largest, sums, acc, acc_rest = state
        l_i = sum_of_each_row(sums)
        restored = tl.full([BLOCK_H], 1.0, tl.float32)  # factor that makes `acc` relative to `m_i`
        if FORMAT.RESCALED:
            restored = tl.math.exp2(tl.where(l_i == 0.0, 0.0, largest - m_i))
        row = first_row + zero_after(l_i) + tl.arange(0, BLOCK_H)
        valid = row < num_rows
        if WHOLE or count == 1:
            factor, lse, _m_i = finish(m_i, l_i, sinks_ptr, row % NUM_HEADS, valid, HAS_SINKS)
            factor *= kv_scale
            index = start.to(tl.int64) * NUM_HEADS + row
            store_groups(out_ptr, index, acc, acc_rest, factor * restored, factor, valid, OPERANDS,
                         OPERANDS.REST_IS_VALUE, DV)  # fmt: skip
            tl.store(lse_ptr + index, lse, mask=valid)
        else:
            l_i = tl.where(l_i == 0.0, 1.0, l_i)  # then acc is 0 and m_i is -inf
            factor = 1.0 / l_i
            index = place.to(tl.int64) * SHORT_ROWS + row
            store_groups(parts_ptr, index, acc, acc_rest, factor * restored, factor, valid, OPERANDS,
                         OPERANDS.REST_IS_VALUE, DV)  # fmt: skip
            tl.store(part_lses_ptr + index, m_i + tl.math.log2(l_i), mask=valid)
    if PDL and SHORT and not LONG:  # the combine waits for this launch alone, but the long launch must have ended, too
        gdc_wait()


@triton.jit(do_not_specialize=VARYING)
def combine_kernel(
    parts_ptr, part_lses_ptr, kv_lens_ptr, cu_q_lens_ptr, num_seqs_ptr, sinks_ptr, kv_scale_ptr,
    given_out_ptr, given_lse_ptr, out_ptr, lse_ptr,
    num_tokens, max_num_seqs, capacity, window, kv_scale_factor, num_splits,
    KV_SCALE_STRIDE: tl.constexpr, HAS_NUM_SEQS: tl.constexpr, HAS_SINKS: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr, NUM_HEADS: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, BLOCK_KV: tl.constexpr,
    SHORT_ROWS: tl.constexpr, MIN_BLOCKS: tl.constexpr, SEQS: tl.constexpr, MERGED: tl.constexpr, OWN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row of a short sequence of several parts, or some: these, in order, into the result."""
    if PDL:
        gdc_wait()
    seq = tl.program_id(0)
    first_row = tl.program_id(1)
    num_seqs = count_sequences(num_seqs_ptr, max_num_seqs, HAS_NUM_SEQS)
    start, q_len, _, first, last = short_sequence(
        seq, cu_q_lens_ptr, kv_lens_ptr, num_seqs, num_tokens, max_num_seqs, capacity, window, HAS_WINDOW, CAUSAL,
        NUM_HEADS, SHORT_ROWS, False,
    )  # fmt: skip
    num_rows = q_len * NUM_HEADS
    if first_row < num_rows:
        if OWN:
            count, _ = own_parts(num_rows, first, last, num_splits, SHORT_ROWS, BLOCK_KV, MIN_BLOCKS)
            place = seq * num_splits
        else:
            counts, _ = parts_of_all(
                cu_q_lens_ptr, kv_lens_ptr, num_seqs, num_tokens, max_num_seqs, capacity, window, num_splits,
                HAS_WINDOW, CAUSAL, NUM_HEADS, SHORT_ROWS, BLOCK_KV, MIN_BLOCKS, SEQS, False,
            )  # fmt: skip
            count = tl.sum(tl.where(tl.arange(0, SEQS) == seq, counts, 0), 0)
            place = before(counts, seq, SEQS)
        kv_scale = load_scale(kv_scale_ptr, 0, kv_scale_factor, KV_SCALE_STRIDE)
        for row in range(first_row, tl.where(count > 1, num_rows, 0), tl.num_programs(1)):
            index = place.to(tl.int64) * SHORT_ROWS + row
            acc, m_i, l_i = merge_parts(
                parts_ptr + index * DV, part_lses_ptr + index, count, SHORT_ROWS * DV, SHORT_ROWS, 1.0, MERGED, DV,
                DV_PAD,
            )  # fmt: skip
            zero = tl.zeros([1], tl.float32)
            valid = tl.full([1], 1, tl.int1)
            heads = row % NUM_HEADS + tl.zeros([1], tl.int32)
            factor, lse, _m_i = finish(m_i + zero, l_i + zero, sinks_ptr, heads, valid, HAS_SINKS)
            out_index = start.to(tl.int64) * NUM_HEADS + row + tl.zeros([1], tl.int64)
            store_columns(out_ptr, out_index, acc[None, :], factor * kv_scale, valid, 0, DV, DV)
            tl.store(lse_ptr + out_index, lse)


def shared_arguments(call: RaggedMlaAttention, tile: Tile, scale: dict[str, Any]) -> dict[str, Any]:
    """The arguments of both kernels."""
    window = plan.window_of(call)
    return {
        "num_tokens": call.num_tokens,
        "max_num_seqs": call.max_num_seqs,
        "capacity": call.capacity,
        "window": window or 0,
        "HAS_WINDOW": window is not None,
        "HAS_NUM_SEQS": call.num_seqs is not None,
        "HAS_SINKS": call.sinks is not None,
        "CAUSAL": bool(call.causal),
        "NUM_HEADS": call.num_q_heads,
        "DV": call.d_v,
        "DV_PAD": next_power_of_2(call.d_v),
        "SHORT_ROWS": tile.short_rows,
        "PDL": overlaps(call),
        **scale,
    }


def body_arguments(call: RaggedMlaAttention, body: plan.Tile) -> dict[str, Any]:
    """The attention kernel's arguments that follow from the tile of a launch."""
    return {
        "OPERANDS": operands(call, body.block_h),
        "BLOCK_H": body.block_h,
        "BLOCK_KV": body.block_kv,
        "SUMS_BY_COLUMN": sums_by_column(call, call.kv_format, body),
        "num_warps": body.num_warps,
        "num_stages": body.num_stages,
    }


def address_arguments(call: RaggedMlaAttention, cache: Any, table: Any, q: Any, launch: Any) -> dict[str, Any]:
    """The attention kernel's arguments about where queries, rows and tables lie, and how rows are stored."""
    table_stride = launch.strides(table)[0]
    keys = plan.Keys(
        cache=cache,
        form=call.kv_format,
        lists=table,
        list_strides=(table_stride, 0, 0),
        lens=call.kv_lens,
        longest=call.capacity,
        page_size=call.page_size,
    )
    where = keys.addresses(launch)
    return {
        **{name: where[name] for name in ("page_stride", "slot_stride", "num_slots")},
        "table_stride": table_stride,
        **dict(zip(("q_token_stride", "q_head_stride"), launch.strides(q), strict=False)),
        "FORMAT": keys.row_format(call.device.arch, launch),
    }


def decodes(call: RaggedMlaAttention, tile: Tile) -> bool:
    """Whether the host knows that all sequences are short."""
    return most_tokens(call) * call.num_q_heads <= tile.short_rows


def long_programs(call: RaggedMlaAttention, body: plan.Tile) -> int:
    """The most blocks of rows that there can be, see `find_segment`: one program for each."""
    return call.num_tokens * call.num_q_heads // body.block_h + call.max_num_seqs + 2


def run_long(call: RaggedMlaAttention, tile: Tile, launch: Any, inputs: Any, attention: Any) -> Any:
    """Enqueue the kernel for sequences that are not short, and for rows that belong to no sequence."""
    nothing = ((1,), "float32")
    *_, out, lse = launch(
        ragged_latent_kernel,
        (long_programs(call, tile.long) if call.num_tokens else 0,),
        (*inputs, inputs[0], inputs[0]),
        [nothing, nothing, *results(call)],
        **attention,
        **body_arguments(call, tile.long),
        **dict.fromkeys(("num_splits", "num_parts", "MIN_BLOCKS", "SEQS"), 1),
        SHORT=False,
        LONG=True,
        WHOLE=True,
        OWN=False,
    )
    return out, lse


def run_short(
    call: RaggedMlaAttention, tile: Tile, launch: Any, inputs: Any, given: Any, shared: Any, attention: Any
) -> Any:
    """Enqueue the kernels for short sequences. `given` has the results of `run_long`, of which they write the rest;
    without it, they have programs for long sequences, too."""
    whole = tile.num_splits == 1
    own = tile.invariant and not whole
    entries = call.max_num_seqs * tile.num_splits if own else call.max_num_seqs + (0 if whole else tile.num_splits)
    # In a sequence with several parts all but the last are full, so there are fewer than 2 * num_splits of them.
    parts = (1,) if whole else (entries if own else min(entries, 2 * tile.num_splits), tile.short_rows)
    splitting = {
        "MIN_BLOCKS": cdiv(plan.OWN_SPLIT if own else plan.MIN_SPLIT, tile.split_block_kv),
        "SEQS": 1 if whole or own else next(count for count in SEQUENCES if count >= call.max_num_seqs),
        "num_splits": tile.num_splits,
        "OWN": own,
    }
    out, lse = given or (inputs[0], inputs[0])  # stand-ins for results that do not exist yet
    *partial, out, lse = launch(
        ragged_latent_kernel,
        (entries * (tile.short_rows // tile.split_block_h) + (0 if given else long_programs(call, tile.short)),),
        (*inputs, out, lse),
        [
            ((1,) if whole else (*parts, call.d_v), "float32"),
            (parts, "float32"),
            *([] if given else results(call)),
        ],
        inplace=(len(inputs), len(inputs) + 1) if given else (),
        **dependent(shared["PDL"] and given is not None),
        **attention,
        **body_arguments(call, tile.short),
        **splitting,
        num_parts=entries,
        SHORT=True,
        LONG=given is None,
        WHOLE=whole,
    )
    if whole:
        return out, lse
    _, _, kv_lens, _, cu_q_lens, num_seqs, sinks, kv_scale = inputs
    width = next_power_of_2(call.d_v)
    return launch(
        combine_kernel,
        (call.max_num_seqs, min(tile.short_rows, most_tokens(call) * call.num_q_heads)),
        (*partial, kv_lens, cu_q_lens, num_seqs, sinks, kv_scale, out, lse),
        [],
        inplace=(7, 8),
        **dependent(shared["PDL"]),
        num_warps=4,
        num_stages=1,
        BLOCK_KV=tile.split_block_kv,
        MERGED=min(next_power_of_2(tile.num_splits), max(1, (512 if own else 2048) // width)),
        **splitting,
        **shared,
    )


def results(call: RaggedMlaAttention) -> list[Any]:
    """Out and lse as a launcher allocates them."""
    return [(call.out_shape, call.result_dtype), (call.q.shape[:2], "float32")]


def run(call: RaggedMlaAttention, tile: Tile, launch: Any) -> Any:
    """Enqueue the kernels; see the module's docstring for the plan."""
    q = launch.packed(call.q)
    page_indices, cu_q_lens, kv_lens = map(launch.packed, (call.page_indices, call.cu_q_lens, call.kv_lens))
    cache = plan.readable(call.kv_cache, call.kv_format, launch)
    kv_scale, scale_numbers = scale_arguments("kv_scale", call.kv_scale, q, launch)
    num_seqs = kv_lens if call.num_seqs is None else call.num_seqs
    sinks = q if call.sinks is None else launch.packed(call.sinks)
    shared = shared_arguments(call, tile, scale_numbers)
    attention = (
        shared | logit_scales(call.scale, call.soft_cap) | address_arguments(call, cache, page_indices, q, launch)
    )
    inputs = (q, cache, kv_lens, page_indices, cu_q_lens, num_seqs, sinks, kv_scale)
    found: Any = None
    empty = not (call.num_tokens and call.max_num_seqs)
    if empty or not (decodes(call, tile) or tile.long == tile.short):
        found = run_long(call, tile, launch, inputs, attention)
    if not empty:
        found = run_short(call, tile, launch, inputs, found, shared, attention)
    out, lse = found
    return (out, lse) if call.return_lse else out
