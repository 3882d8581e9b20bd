"""Ragged paged attention in Triton: FlashAttention over pages, with split KV for short sequences.

A sequence is *short* if its rows (query tokens times heads of a group) fit one small tile, as in decode and speculative
decode. Short sequences go to the *split* kernel, which divides their keys into KV splits, and the *combine* kernel
merges the splits of each row. All other sequences go to the *tile* kernel, which has one program per block of rows.

Grids are upper bounds that follow from shapes alone, so the host reads nothing back from the device. A program of the
tile kernel finds its sequence by binary search over `cu_q_lens`. A program of the split kernel finds its split by sums
over all lengths or, if each segment of keys is a split (`_segments`), from its index. A program without work returns at
once.

The tile kernel and the split kernel find their rows and keys (`_splits`), load the rows (`_rows`), run the
FlashAttention loop over keys (`_pages`, with the masks of `_mask`), and store the rows. A bundle of tensors is a named
tuple. Compile-time constants are frozen dataclasses (`_constants`); `Config` has all constants of a launch.
docs/kernels.md explains the design.
"""

import dataclasses
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ragged_attention.calls import RaggedPagedAttention, dtype_name
from ragged_attention.errors import InvalidInput
from ragged_attention.kernels_triton import _paged_tiles, _selected_pages
from ragged_attention.kernels_triton._bias import bias_arguments, is_biased
from ragged_attention.kernels_triton._compiler import zero_after
from ragged_attention.kernels_triton._constants import Constants
from ragged_attention.kernels_triton._formats import (
    array_heads,
    cache_views,
    load_scale,
    scale_arguments,
)
from ragged_attention.kernels_triton._key_ranges import smaller_block
from ragged_attention.kernels_triton._mask import (
    Mask,
    hides_first_keys,
    mask_arguments,
    max_visible_keys,
    ranges_array,
    visible_keys,
)
from ragged_attention.kernels_triton._max_logits import absent, cleared, keeps_largest
from ragged_attention.kernels_triton._pages import Attention, Loop, Pages, Shape, attend_all, table_of
from ragged_attention.kernels_triton._ragged import MAX_LOGITS, Shared, results, run_splits, sequence_arguments
from ragged_attention.kernels_triton._rows import (
    Factors,
    Output,
    QueryArray,
    Rows,
    Scaling,
    clear_rows,
    load_queries,
    raise_largest_of_rows,
    store_rows,
    store_split,
)
from ragged_attention.kernels_triton._segments import MAX_PARTS, SEGMENT, expect_segments
from ragged_attention.kernels_triton._selected import MOST_TOKENS, too_long
from ragged_attention.kernels_triton._sequences import VARYING, count_sequences, max_blocks
from ragged_attention.kernels_triton._splits import (
    LARGEST_INT,
    MAX_SPLITS,
    SEQUENCES,
    Batch,
    Division,
    find_rows,
    find_split,
    length_of,
    most_tokens,
    possible_tile,
    sequences_together,
    short_tokens,
    splits_at_most,
)
from ragged_attention.kernels_triton._stored import (
    DTYPES,
    RowPages,
    key_dtype,
    scale_page_arguments,
    stored_of,
    value_dtype,
)
from ragged_attention.kernels_triton._tiles import (
    NARROWEST,
    cdiv,
    expect_between,
    expect_power_of_two,
    launchable,
    next_power_of_2,
    overlaps,
)

MIN_SPLIT = 256  # minimum keys per split: a smaller split does not pay for an extra program
FEATURES = frozenset({
    "num_seqs", "sm_scale", "causal", "sliding_window", "soft_cap", "sinks", "alibi_slopes", "relative_bias",
    "k_scale", "v_scale", "k_scale_pages", "v_scale_pages", "return_lse", "return_max_logits", "draft_mask",
    "key_ranges", "selected", "block_size", "out_dtype",
})  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The tunable sizes. Rows are query tokens times heads of a group."""

    block_q: int = 64  # rows per program of the tile kernel
    block_kv: int = 64  # keys per step of the tile kernel's unmasked loop
    edge_kv: int = 64  # keys per step of the tile kernel's masked loop; at most block_kv
    num_warps: int = 4
    num_stages: int = 2
    split_weights_below: int = 1024  # rows that see fewer keys than this get two-term bfloat16 weights; 0 is faster
    split_block_q: int = 16  # a sequence with at most this many rows goes to the split kernel
    split_block_kv: int = 64
    split_num_warps: int = 4
    split_num_stages: int = 3
    num_splits: int = 1  # total KV splits per KV head across the batch; 1 disables splitting
    # Keys per segment, or 0. With segments, the tile and the split kernel have `block_q` rows and `block_kv` keys.
    segment_kv: int = 0
    joined_tokens: int = 1  # tokens per job, for selected blocks; with these, num_splits is per token

    def __post_init__(self) -> None:
        blocks = ("block_q", "block_kv", "edge_kv", "split_block_q", "split_block_kv")
        expect_power_of_two(self, **dict.fromkeys(blocks, (16, 256)), num_warps=(1, 16), split_num_warps=(1, 16))
        expect_power_of_two(self, joined_tokens=(1, MOST_TOKENS))
        expect_between(self, num_stages=(1, 8), split_num_stages=(1, 8), num_splits=(1, MAX_SPLITS))
        if not isinstance(self.split_weights_below, int) or self.split_weights_below < 0:
            raise InvalidInput(f"expected split_weights_below >= 0, got {self.split_weights_below!r}")
        expect_segments(self)

    @property
    def invariant(self) -> bool:
        return self.segment_kv > 0

    @property
    def short_rows(self) -> int:
        """The maximum rows of a sequence that goes to the split kernel. One program has all of these rows."""
        return min(self.split_block_q, self.block_q) if self.segment_kv else self.split_block_q


def why_not(call: RaggedPagedAttention) -> str | None:
    return launchable(call, tile_kernel) or too_long(call)


def heuristic(call: RaggedPagedAttention) -> Tile:
    """A tile that fits registers and shared memory, for wgmma if rows suffice, and enough splits to fill the GPU."""
    if call.selected is not None:
        return Tile(**_selected_pages.tile_fields(call))
    fields = _paged_tiles.tile_fields(call, short_tokens(call), call.num_tokens * call.group)
    return Tile(**fields, num_splits=splits(call))


def invariant_tile(call: RaggedPagedAttention) -> Tile:
    """A batch-invariant tile: no size that affects results' bits depends on the batch or pages; see `_segments`."""
    if call.selected is not None:
        return Tile(**_selected_pages.invariant_fields(call), segment_kv=SEGMENT)
    return Tile(**_paged_tiles.segment_fields(call, short_tokens(call)), segment_kv=SEGMENT)


def segments_to_split(call: Any, tile: Tile) -> int:
    """The number of segments of a short sequence if each segment has a program; 1 if one program visits all segments.

    One program visits all segments if the stored results of all sequences' segments would take much memory. A batch of
    that many sequences fills the GPU without segments.
    """
    tokens = max(tile.short_rows // call.group, 1)
    keys = max_visible_keys(call, tokens)
    segments = max(cdiv(keys, tile.segment_kv) + (keys < call.capacity), 1)  # a window may begin within a segment
    return segments if call.max_num_seqs * segments * call.num_kv_heads <= MAX_PARTS else 1


def splits(call: Any) -> int:
    """The number of splits that gives each multiprocessor eight programs, but each split at least MIN_SPLIT keys."""
    keys = max_visible_keys(call, 8)
    if keys <= MIN_SPLIT or not 0 < call.max_num_seqs <= SEQUENCES[-1]:
        return 1
    wanted = cdiv(8 * call.device.num_multiprocessors, max(call.num_kv_heads, 1))
    return min(wanted, call.max_num_seqs * cdiv(keys, MIN_SPLIT), MAX_SPLITS)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Config(Constants):
    """The compile-time constants of a launch of the tile kernel or the split kernel."""

    ATTENTION: Attention
    SCALING: Scaling
    DIVISION: Division
    BLOCK_Q: int  # rows per program
    COMBINED: bool  # whether K and V are interleaved in one array
    HAS_NUM_SEQS: bool
    PDL: bool  # programmatic dependent launch: this kernel and the one before it may overlap


@triton.jit(do_not_specialize=VARYING)
def tile_kernel(
    q_ptr, k_ptr, v_ptr, kv_lens_ptr, page_indices_ptr, cu_q_lens_ptr, num_seqs_ptr, sinks_ptr,
    k_scale_ptr, v_scale_ptr, k_scales_ptr, v_scales_ptr, mask_ptr, slopes_ptr, bias_ptr, given_max_ptr,
    out_ptr, lse_ptr, max_ptr,
    num_tokens, max_num_seqs, num_pages, capacity, table_stride,
    q_token_stride, q_head_stride, k_page_stride, k_slot_stride, k_head_stride,
    v_page_stride, v_slot_stride, v_head_stride, k_scales_stride, v_scales_stride,
    sm_scale, soft_cap, v_scale_factor, window, draft_stride, draft_width,
    CONFIG: tl.constexpr,
):  # fmt: skip
    """Attend with one block of rows of one KV head to all keys that they see. Rows without a sequence get 0."""
    SHAPE: tl.constexpr = CONFIG.ATTENTION.SHAPE
    KIND: tl.constexpr = CONFIG.ATTENTION.MASK
    GROUP: tl.constexpr = SHAPE.GROUP
    BLOCK_Q: tl.constexpr = CONFIG.BLOCK_Q
    EDGE_KV: tl.constexpr = CONFIG.ATTENTION.LOOP.EDGE_KV
    if CONFIG.PDL:
        gdc_launch_dependents()
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # start with the last rows, which see the most keys
    kv_head = tl.program_id(1)
    num_seqs = count_sequences(num_seqs_ptr, max_num_seqs, CONFIG.HAS_NUM_SEQS)
    batch = Batch(cu_q_lens_ptr, kv_lens_ptr, num_seqs, max_num_seqs, num_tokens, capacity)
    mask = Mask(window, mask_ptr, draft_stride, draft_width, mask_ptr)
    seq, start, q_len, first_row, live = find_rows(block, batch, GROUP, BLOCK_Q)
    num_rows = q_len * GROUP
    long = (num_rows > CONFIG.DIVISION.SHORT_ROWS) | (live == 0)
    if (first_row >= 0) & (first_row < num_rows) & long:
        low = 0
        high = 0
        kv_len = 0
        if live:
            kv_len = length_of(seq, kv_lens_ptr, capacity, CONFIG.DIVISION.PACKED)
            low = kv_len - q_len + first_row // GROUP
            high = kv_len - q_len + tl.minimum((first_row + BLOCK_Q - 1) // GROUP, q_len - 1)
        rows = Rows(first_row + tl.arange(0, BLOCK_Q), num_rows, start, kv_head)
        queries = load_queries(
            QueryArray(q_ptr, q_token_stride, q_head_stride), rows,
            Factors(sm_scale, soft_cap, k_scale_ptr, slopes_ptr, bias_ptr), CONFIG.SCALING, SHAPE,
        )  # fmt: skip
        k_head, v_head = array_heads(kv_head.to(tl.int64), CONFIG.COMBINED)
        pages = Pages(
            RowPages(
                k_ptr + k_head * k_head_stride, k_page_stride, k_slot_stride,
                k_scales_ptr + kv_head.to(tl.int64) * k_scales_stride,
            ),
            RowPages(
                v_ptr + v_head * v_head_stride, v_page_stride, v_slot_stride,
                v_scales_ptr + kv_head.to(tl.int64) * v_scales_stride,
            ),
            table_of(page_indices_ptr, seq, table_stride, kv_lens_ptr, capacity, SHAPE.PAGE_SIZE), num_pages,
        )  # fmt: skip
        visible = visible_keys(rows, low, high, q_len, kv_len, mask, GROUP, KIND)
        begin = visible.first // EDGE_KV * EDGE_KV
        state = attend_all(queries, begin, visible.last, visible, mask, pages, CONFIG.ATTENTION)
        v_scale = load_scale(v_scale_ptr, kv_head, v_scale_factor, CONFIG.SCALING.V_SCALE_STRIDE)
        if KIND.RANGES:  # computed again, which saves registers in the loop
            rows = Rows(first_row + zero_after(state[1]) + tl.arange(0, BLOCK_Q), num_rows, start, kv_head)
        store_rows(Output(out_ptr, lse_ptr), state, rows, sinks_ptr, v_scale, CONFIG.SCALING.HAS_SINKS, SHAPE)
        if max_ptr is not None:
            raise_largest_of_rows(max_ptr, state, rows, SHAPE)


@triton.jit(do_not_specialize=VARYING)
def split_kernel(
    q_ptr, k_ptr, v_ptr, kv_lens_ptr, page_indices_ptr, cu_q_lens_ptr, num_seqs_ptr, sinks_ptr,
    k_scale_ptr, v_scale_ptr, k_scales_ptr, v_scales_ptr, mask_ptr, slopes_ptr, bias_ptr, given_max_ptr,
    given_out_ptr, given_lse_ptr,
    parts_ptr, part_lses_ptr, out_ptr, lse_ptr, max_ptr,
    num_tokens, max_num_seqs, num_pages, capacity, table_stride,
    q_token_stride, q_head_stride, k_page_stride, k_slot_stride, k_head_stride,
    v_page_stride, v_slot_stride, v_head_stride, k_scales_stride, v_scales_stride,
    sm_scale, soft_cap, v_scale_factor, window, draft_stride, draft_width,
    num_splits, CONFIG: tl.constexpr,
):  # fmt: skip
    """Attend with a short sequence's rows of one KV head to one split of its keys.

    If the sequence has one split, its result is final. Otherwise the split's normalised result goes to parts [splits,
    K, BLOCK_Q, DV] float32, and its base-2 lse to an array without the last axis. If the tile kernel does not run, this
    kernel also writes the rows that belong to no sequence. If a sequence turns out not to be short, the grid's last
    programs compute its blocks of rows after the first.
    """
    SHAPE: tl.constexpr = CONFIG.ATTENTION.SHAPE
    KIND: tl.constexpr = CONFIG.ATTENTION.MASK
    DIVISION: tl.constexpr = CONFIG.DIVISION
    BLOCK_Q: tl.constexpr = CONFIG.BLOCK_Q
    BLOCK_KV: tl.constexpr = CONFIG.ATTENTION.LOOP.BLOCK_KV
    if CONFIG.PDL:
        gdc_launch_dependents()
    entry = tl.program_id(0)  # axis 0, because some GPUs limit the other axes to 65535 programs
    kv_head = tl.program_id(1)
    num_seqs = count_sequences(num_seqs_ptr, max_num_seqs, CONFIG.HAS_NUM_SEQS)
    batch = Batch(cu_q_lens_ptr, kv_lens_ptr, num_seqs, max_num_seqs, num_tokens, capacity)
    mask = Mask(window, mask_ptr, draft_stride, draft_width, mask_ptr)
    output = Output(out_ptr, lse_ptr)
    if DIVISION.ALL_SEQUENCES:
        clear_rows(output, batch, entry, kv_head, BLOCK_Q, SHAPE)
    split = find_split(entry, batch, mask, num_splits, KIND, DIVISION)
    num_rows = split.q_len * SHAPE.GROUP
    begin = split.seen_first // BLOCK_KV * BLOCK_KV
    stop = split.seen_end
    if DIVISION.SEGMENT:
        if split.splits > 1:
            segment = (split.seen_first // DIVISION.SEGMENT + split.number) * DIVISION.SEGMENT
            begin = tl.maximum(begin, segment)
            stop = tl.minimum(stop, segment + DIVISION.SEGMENT)
    elif DIVISION.SPLIT_KV:
        begin += split.number * split.blocks_each * BLOCK_KV
        end = begin + tl.minimum(split.blocks_each * BLOCK_KV, split.seen_end - begin)
        stop = tl.where(split.splits > 1, end, split.seen_end)
    if num_rows > split.first_row:
        rows = Rows(split.first_row + tl.arange(0, BLOCK_Q), num_rows, split.start, kv_head)
        queries = load_queries(
            QueryArray(q_ptr, q_token_stride, q_head_stride), rows,
            Factors(sm_scale, soft_cap, k_scale_ptr, slopes_ptr, bias_ptr), CONFIG.SCALING, SHAPE,
        )  # fmt: skip
        k_head, v_head = array_heads(kv_head.to(tl.int64), CONFIG.COMBINED)
        pages = Pages(
            RowPages(
                k_ptr + k_head * k_head_stride, k_page_stride, k_slot_stride,
                k_scales_ptr + kv_head.to(tl.int64) * k_scales_stride,
            ),
            RowPages(
                v_ptr + v_head * v_head_stride, v_page_stride, v_slot_stride,
                v_scales_ptr + kv_head.to(tl.int64) * v_scales_stride,
            ),
            table_of(page_indices_ptr, split.seq, table_stride, kv_lens_ptr, capacity, SHAPE.PAGE_SIZE), num_pages,
        )  # fmt: skip
        low = split.kv_len - split.q_len
        visible = visible_keys(rows, low, split.kv_len - 1, split.q_len, split.kv_len, mask, SHAPE.GROUP, KIND)
        state = attend_all(queries, begin, stop, visible, mask, pages, CONFIG.ATTENTION)
        if not DIVISION.SPLIT_KV or split.splits == 1:
            v_scale = load_scale(v_scale_ptr, kv_head, v_scale_factor, CONFIG.SCALING.V_SCALE_STRIDE)
            store_rows(output, state, rows, sinks_ptr, v_scale, CONFIG.SCALING.HAS_SINKS, SHAPE)
        else:
            part = split.place.to(tl.int64) * (SHAPE.NUM_HEADS // SHAPE.GROUP) + kv_head
            store_split(parts_ptr, part_lses_ptr, state, rows, part, DIVISION.SHORT_ROWS, SHAPE)
        if max_ptr is not None:
            raise_largest_of_rows(max_ptr, state, rows, SHAPE)
    if CONFIG.PDL and not DIVISION.ALL_SEQUENCES:
        gdc_wait()  # the next kernel waits for this one only, but also needs the rows of the tile kernel


def shared_arguments(call: Any, launch: Any) -> Shared:
    """The arguments that the tile kernel and the split kernel share, with q as a stand-in for absent arrays."""
    q = launch.packed(call.q)
    k_pages, v_pages, kv_strides = cache_views(call, launch)
    k_scale, k_factor, k_stride = scale_arguments(call.k_scale, q, launch)
    v_scale, v_factor, v_stride = scale_arguments(call.v_scale, q, launch)
    draft_mask = q if call.draft_mask is None else launch.packed(call.draft_mask)
    slopes = q if call.alibi_slopes is None else launch.packed(call.alibi_slopes)
    bias, bias_form = bias_arguments(call, launch, q)
    mask, mask_numbers = mask_arguments(call, launch.strides(draft_mask)[0])
    has_soft_cap, has_alibi = call.soft_cap is not None, call.alibi_slopes is not None
    scale_pages, scale_strides = scale_page_arguments(call, q, launch)
    sequences, numbers = sequence_arguments(call, launch, q)
    numbers |= {
        "num_pages": call.num_pages,
        "sm_scale": call.scale * k_factor,
        "soft_cap": float(call.soft_cap or 1.0),
        "v_scale_factor": v_factor,
        **kv_strides,
        **scale_strides,
        **mask_numbers,
    }
    scaling = Scaling(
        K_SCALE_STRIDE=k_stride,
        V_SCALE_STRIDE=v_stride,
        SIGNED=k_stride >= 0 or call.scale * k_factor < 0,
        HAS_SOFT_CAP=has_soft_cap,
        HAS_SINKS=call.sinks is not None,
        HAS_ALIBI=has_alibi,
        BIAS=bias_form,
    )
    array = draft_mask if call.key_ranges is None else ranges_array(call, launch, q)  # never both arrays
    others = {"k_scale": k_scale, "v_scale": v_scale, **scale_pages, "mask": array, "alibi_slopes": slopes}
    others |= {"relative_bias": bias, MAX_LOGITS: cleared(call, launch, q)}
    attention = {"SHAPE": shape_of(call, call.v_head_dim, launch), "MASK": mask, "KEEPS_LARGEST": keeps_largest(call)}
    return Shared(
        {"q": q, "k_pages": k_pages, "v_pages": v_pages, **sequences, **others},
        numbers,
        {
            "ATTENTION": {**attention, "HAS_SOFT_CAP": has_soft_cap, "HAS_ALIBI": has_alibi, "BIAS": bias_form},
            "SCALING": scaling,
            "COMBINED": call.combined,
            "HAS_NUM_SEQS": call.num_seqs is not None,
            "PDL": overlaps(call),
        },
    )


def config_of(shared: Shared, loop: Loop, division: Division, block_q: int) -> Config:
    """The `Config` of a launch whose programs have `block_q` rows."""
    attention = Attention(LOOP=loop, **shared.constants["ATTENTION"])
    return Config(**shared.constants | {"ATTENTION": attention}, DIVISION=division, BLOCK_Q=block_q)


def shape_of(call: Any, v_head_dim: int, launch: Any) -> Shape:
    """The sizes of a call, the formats of its keys and values, and the dtypes of their operands."""
    k_dtype, dtype, arch = key_dtype(call), dtype_name(call.q), call.device.arch
    return Shape(
        GROUP=call.group,
        NUM_HEADS=call.num_q_heads,
        PAGE_SIZE=call.page_size,
        D=call.head_dim,
        D_PAD=max(next_power_of_2(call.head_dim), NARROWEST),
        DV=v_head_dim,
        DV_PAD=max(next_power_of_2(v_head_dim), NARROWEST),
        K=stored_of(call.k_format, arch, call.k_scale_pages, launch),
        V=stored_of(call.v_format, arch, call.v_scale_pages, launch),
        V_DTYPE=DTYPES[value_dtype(call)],
        Q_UNITS=dtype == "bfloat16" and k_dtype == "float16",
        Q_TERMS=2 if dtype == "float16" and k_dtype == "bfloat16" else 1,
    )


def in_bfloat16(call: Any) -> bool:
    """Whether weights are bfloat16 operands, so that they may need two terms."""
    return value_dtype(call) == "bfloat16"


def all_are_short(call: Any, tile: Tile) -> bool:
    """Whether the host expects all sequences to be short, so that the tile kernel need not run."""
    few = most_tokens(call) * call.group <= tile.short_rows
    return few and call.num_tokens > 0 and 0 < call.max_num_seqs <= SEQUENCES[-1]


def loop_of_tile(call: Any, tile: Tile) -> Loop:
    """The `Loop` of the tile kernel."""
    if tile.segment_kv:
        return loop_of_segments(call, tile)
    masked_below = tile.split_weights_below if in_bfloat16(call) else 0
    if in_bfloat16(call) and is_biased(call):
        masked_below = LARGEST_INT.value  # a steep slope leaves most of the weight to few keys, however many there are
    edge_kv = min(tile.edge_kv, tile.block_kv)
    return Loop(BLOCK_KV=tile.block_kv, EDGE_KV=edge_kv, WEIGHT_TERMS=1, MASKED_BELOW=masked_below)


def loop_of_split(call: Any, tile: Tile) -> Loop:
    """The `Loop` of the split kernel."""
    if tile.segment_kv:
        return loop_of_segments(call, tile)
    keys, terms = tile.split_block_kv, 2 if in_bfloat16(call) else 1
    return Loop(BLOCK_KV=keys, EDGE_KV=split_edge(call, keys), WEIGHT_TERMS=terms, MASKED_BELOW=0)


def loop_of_segments(call: Any, tile: Tile) -> Loop:
    """The `Loop` of the tile kernel and the split kernel if there are segments."""
    return Loop(
        BLOCK_KV=tile.block_kv,
        EDGE_KV=tile.block_kv,
        WEIGHT_TERMS=2 if in_bfloat16(call) else 1,
        MASKED_BELOW=LARGEST_INT.value if hides_first_keys(call) else 0,
        SEGMENT=tile.segment_kv,
    )


def run_tile(call: Any, tile: Tile, launch: Any, shared: Shared) -> list[Any]:
    """Enqueue the tile kernel, for long sequences and rows that belong to no sequence; returns the results."""
    division = Division(
        GROUP=call.group,
        SHORT_ROWS=tile.short_rows,
        BLOCK_KV=tile.block_kv,
        SPLIT_KV=False,
        PACKED=call.page_size == 0,
    )
    return launch(
        tile_kernel,
        (max_blocks(call.num_tokens * call.group, tile.block_q, call.max_num_seqs), call.num_kv_heads),
        tuple(shared.arrays.values()),
        results(call),
        inplace=shared.max_logits(call),
        **absent(call),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        CONFIG=config_of(shared, loop_of_tile(call, tile), division, tile.block_q),
        **shared.numbers,
    )


def split_edge(call: Any, block_kv: int) -> int:
    """The keys per block of the split kernel's masked loop: with ranges of keys, 64 would take too many registers."""
    return smaller_block(block_kv) if call.num_ranges and block_kv > 32 else block_kv


def run_split(call: Any, tile: Tile, launch: Any, shared: Shared, target: Any) -> Any:
    """Enqueue the split kernel and, if needed, the combine kernel; returns the results. See `run_splits`."""
    if tile.segment_kv:
        tile = dataclasses.replace(
            tile,
            split_block_q=tile.short_rows,
            split_block_kv=tile.block_kv,
            split_num_warps=tile.num_warps,
            split_num_stages=tile.num_stages,
            num_splits=segments_to_split(call, tile),
        )
    split_kv = tile.num_splits > 1
    division = Division(
        GROUP=call.group,
        SHORT_ROWS=tile.split_block_q,
        BLOCK_KV=tile.split_block_kv,
        SPLIT_KV=split_kv,
        SEGMENT=tile.segment_kv if split_kv else 0,
        PACKED=call.page_size == 0,
        ALL_SEQUENCES=target is None,
        MIN_BLOCKS=cdiv(MIN_SPLIT, tile.split_block_kv),
        MAX_SEQS=sequences_together(call.max_num_seqs) if target is None or split_kv else 1,
    )
    entries, _ = splits_at_most(call.max_num_seqs, tile.num_splits, invariant=tile.invariant)
    later = 0 if target else call.num_tokens * call.group // tile.split_block_q
    return run_splits(
        launch,
        call,
        shared,
        target,
        (entries, call.num_kv_heads, tile.split_block_q),
        kernel=split_kernel,
        grid=(entries + later, call.num_kv_heads),
        division=division,
        mask=shared.constants["ATTENTION"]["MASK"],
        scale=("v_scale", shared.constants["SCALING"].plain.V_SCALE_STRIDE),
        num_warps=tile.split_num_warps,
        num_stages=tile.split_num_stages,
        num_splits=tile.num_splits,
        CONFIG=config_of(
            shared, loop_of_split(call, tile), division, tile.block_q if tile.segment_kv else tile.split_block_q
        ),
    )


def run_dense(call: Any, tile: Tile, launch: Any, shared: Shared) -> Any:
    """Enqueue the kernels of a call without lists of blocks; returns the results."""
    target: Any = None if all_are_short(call, tile) else run_tile(call, tile, launch, shared)
    has_rows = call.num_tokens and call.max_num_seqs
    return run_split(call, tile, launch, shared, target) if has_rows else target


def run(call: RaggedPagedAttention, tile: Tile, launch: Any) -> Any:
    """Enqueue the kernels; returns out or a tuple of the requested results."""
    shared = shared_arguments(call, launch)
    if call.selected is not None:
        made = _selected_pages.run(call, tile, launch, shared, weight_terms=2 if in_bfloat16(call) else 1)
    else:
        made = run_dense(call, possible_tile(call, tile), launch, shared)
    return call.requested(**dict(zip(("out", "lse", "max_logits"), made, strict=False)))
