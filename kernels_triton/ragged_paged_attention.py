"""Ragged paged attention in Triton: two kernels over one plan, and a combine.

Sequences whose rows (query tokens times heads of a group) fit one small tile (decode, speculative decode) go to the
*split* kernel, which divides the keys of all of them into parts of one length, however long each sequence is; the
*combine* kernel merges the parts of a sequence. All other sequences go to the *tile* kernel, as in FlashAttention. The
kernels are launched over upper bounds that follow from shapes. A program of the tile kernel finds its sequence by
binary search over `cu_q_lens`, one of the split kernel its part by sums over all lengths; each leaves at once if there
is nothing for it to do, so nothing is read back from the device.
"""

# Triton's language only looks like Python: its constexprs and early-bound branches defeat a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ragged_attention.calls import RaggedPagedAttention, dtype_name
from ragged_attention.errors import InvalidInput
from ragged_attention.kernels_triton._formats import (
    cache_format,
    cache_views,
    in_float16,
    load_scale,
    narrow,
    scale_arguments,
)
from ragged_attention.kernels_triton._pages import Features, Pages, PageSizes, Visible, attend_range
from ragged_attention.kernels_triton._sequences import (
    VARYING,
    count_sequences,
    find_segment,
    key_range,
    query_edge,
    segment_edge,
)
from ragged_attention.kernels_triton._softmax import LN2, LOG2E, merge_parts, unit_under_cap
from ragged_attention.kernels_triton._tiles import (
    OLDER_COMPILER,
    WGMMA,
    cdiv,
    dependent,
    expect_between,
    expect_power_of_two,
    fit,
    item_size,
    launchable,
    next_power_of_2,
    on_cuda_cores,
    overlaps,
)

SMALLEST_SCALE = 1e-30  # stands for a scale of 0, so that -inf times it stays -inf
LARGEST_INT: tl.constexpr = tl.constexpr(2**31 - 1)
MIN_SPLIT = 256  # keys below which a split costs more than it saves
OWN_PART = 1024  # the same where a sequence's splits do not depend on the batch, so that there may be enough already
OWN_PARTS = 16  # which there are then at most: enough for one sequence and eight KV heads to fill a GPU
FEW_TOKENS = 4  # of a sequence that counts as decoding
MAX_SPLITS = 4096
SEQUENCES = (64, 256, 1024, 4096)  # how many a program sums the lengths of: few numbers, since each is code of its own
FEATURES = frozenset({
    "num_seqs", "sm_scale", "causal", "sliding_window", "soft_cap", "sinks", "k_scale", "v_scale", "return_lse",
    "draft_mask", "out_dtype",
})  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """What may be tuned. Rows are query tokens times heads of a group."""

    block_q: int = 64  # rows of a program of the tile kernel
    block_kv: int = 64  # its keys per step
    edge_kv: int = 64  # the same where some row does not see all of them, no more than block_kv
    num_warps: int = 4
    num_stages: int = 2
    split_weights_below: int = 1024  # keys below which a bfloat16 row's weights are not just rounded; 0 is faster
    split_block_q: int = 16  # rows up to which a sequence goes to the split kernel
    split_block_kv: int = 64
    split_num_warps: int = 4
    split_num_stages: int = 3
    num_splits: int = 1  # parts of all keys of a KV head; 1: one a sequence
    invariant: bool = False  # num_splits are of each sequence, by its own length; the tile kernel's keys go in order

    def __post_init__(self) -> None:
        blocks = ("block_q", "block_kv", "edge_kv", "split_block_q", "split_block_kv")
        expect_power_of_two(self, **dict.fromkeys(blocks, (16, 256)), num_warps=(1, 16), split_num_warps=(1, 16))
        expect_between(self, num_stages=(1, 8), split_num_stages=(1, 8), num_splits=(1, MAX_SPLITS))
        if not isinstance(self.split_weights_below, int) or self.split_weights_below < 0:
            raise InvalidInput(f"expected split_weights_below >= 0, got {self.split_weights_below!r}")


def why_not(call: RaggedPagedAttention) -> str | None:
    return launchable(call, tile_kernel)


def heuristic(call: RaggedPagedAttention) -> Tile:
    """Tiles that fit registers and shared memory, wgmma-sized where there are rows for it; splits that fill the GPU.

    Every size is one that compiled without a spill for all of docs/compile_matrix.md.
    """
    return dataclasses.replace(sizes(call, split_rows(call), call.num_tokens * call.group), num_splits=splits(call))


def invariant_tile(call: RaggedPagedAttention) -> Tile:
    """No size depends on the batch. All keys of the tile kernel go through its masked loop, in order, so that a row's
    bits do not depend on the rows beside it either."""
    split = call.sliding_window is None or call.sliding_window > OWN_PART
    tile = sizes(call, most_split_rows(call, FEW_TOKENS))
    return dataclasses.replace(tile, num_splits=OWN_PARTS if split else 1, invariant=True)


def sizes(call: Any, split_block_q: int, rows: int | None = None) -> Tile:
    """Tiles for so many rows of a KV head, or for any number, all keys of a sequence in one part."""
    block_q, block_kv, edge_kv, num_warps, num_stages = tile_sizes(call)
    if rows is not None:
        block_q = min(block_q, max(16, next_power_of_2(rows)))
    if block_q < 64 and not on_cuda_cores(call):  # so that products are of warps
        block_kv = min(block_kv, 64)
        if call.device.arch.startswith("sm_") and padded_width(call) <= 128:
            num_warps = 4
    block_kv, num_stages = fit_pages(call, block_q, block_kv, num_stages)
    split_block_kv, split_num_warps, split_num_stages = split_sizes(call, split_block_q)
    split_block_kv, split_num_stages = fit_pages(call, split_block_q, split_block_kv, split_num_stages)
    return Tile(
        block_q=block_q,
        block_kv=block_kv,
        edge_kv=edge_kv,
        num_warps=num_warps,
        num_stages=num_stages,
        split_block_q=split_block_q,
        split_block_kv=split_block_kv,
        split_num_warps=split_num_warps,
        split_num_stages=split_num_stages,
    )


def padded_width(call: Any) -> int:
    return next_power_of_2(max(call.head_dim, call.v_head_dim))


def tile_sizes(call: Any) -> tuple[int, int, int, int, int]:
    """Rows, keys, keys at the edges, warps and stages of the tile kernel."""
    arch, width = call.device.arch, padded_width(call)
    if on_cuda_cores(call):
        return 16, 16, 16, 4 if arch in ("sm_80", "sm_86") else 8, 3 if arch.startswith("sm_") else 2
    if width > 256:
        if not arch.startswith("sm_"):
            return 32, 16, 16, 4, 2 if arch == "gfx950" else 1
        if arch == "sm_90" and leaves_registers(call):
            return 64, 32, 16, 8, 3 if dtype_name(call.q) == "bfloat16" and call.head_dim == width else 2
        return (32, 64, 32, 8, 2) if arch == "sm_90" else (32, 32, 32, 8, 2)
    if call.draft_mask is not None:  # addresses of its entries take registers
        return 32, 32, 16, 4, 3 if arch.startswith("sm_") else 2
    if width > 128:
        if arch == "sm_90":
            return 128, 32, 16, 8, 3
        return (64, 32, 32, 8, 2) if arch in WGMMA else (32, 32, 32, 4, 2)
    if arch == "sm_90":
        powers = all(n & (n - 1) == 0 for n in (call.group, call.page_size))
        windowed = call.sliding_window is not None and width > 64
        if cache_format(call) != "plain" or not powers or windowed:  # decoding, dividing and masks take registers
            return 128, 64, 32, 8, 3
        keys = 64 if call.page_size in (1, 32, 64) else 128
        return (256, 64, 32, 8, 3) if width <= 64 else (128, keys, 64, 8, 3)
    if call.device.platform == "cpu":
        return 128, 64, 32, 8, 3
    if arch in WGMMA:
        return 128, 32, 32, 8, 3
    if not arch.startswith("sm_"):
        return 128, 32, 32, 4, 2
    one_product = dtype_name(call.q) == call.cache_dtype == "float16"  # and nothing to decode
    edge = 64 if cache_format(call) == "plain" else 32  # decoding takes registers
    return (64, 32, 32, 4, 3) if one_product else (64, 64, edge, 8, 3)


def leaves_registers(call: Any) -> bool:
    """Whether 64 rows of 512 columns fit the registers, of which their sums alone are half: where little else is to
    be done than to multiply."""
    plain = cache_format(call) == "plain" and call.soft_cap is None and call.draft_mask is None
    return plain and call.group & (call.group - 1) == 0 and not OLDER_COMPILER


def split_sizes(call: Any, rows: int) -> tuple[int, int, int]:
    """Keys, warps and stages of the split kernel."""
    arch, width = call.device.arch, padded_width(call)
    if not arch.startswith("sm_"):
        return split_sizes_elsewhere(call, rows)
    if on_cuda_cores(call):
        return 16, max(8, rows // 8), 3
    if width > 256:
        return 32, 8, 3
    if width > 128 or call.draft_mask is not None:
        return 32, 4, 3
    # Where products are of warps, fewer keys let more programs run at once; masks of windows then spill, and so does
    # what decodes e4m3 by integers.
    spills = call.sliding_window is not None or (cache_format(call) == "e4m3_bits" and not OLDER_COMPILER)
    wide = arch in WGMMA and not (OLDER_COMPILER and width <= 64)
    return 64 if wide or spills else 32, 4, 3


def split_sizes_elsewhere(call: Any, rows: int) -> tuple[int, int, int]:
    """The same on AMD, and of an unknown device."""
    width = padded_width(call)
    if on_cuda_cores(call):
        return 16, 4 * max(1, rows // 32), 2
    if width > 256:
        return 16, 4, 2
    if call.draft_mask is not None:
        return 32, 4, 1  # two stages are more than Triton 3.6 can compile
    return (32, 4, 3) if width > 128 else (64, 4, 2)


def fit_pages(call: Any, rows: int, keys: int, stages: int) -> tuple[int, int]:
    """Keys and stages whose K and V tiles, with Q and the weights, stay within the device's shared memory."""
    width = next_power_of_2(call.head_dim)
    both = width + next_power_of_2(call.v_head_dim)

    # A pipeline of n stages keeps n - 1 blocks in shared memory, and one more where products run on by themselves, but
    # for looking up the pages of WIDE rows (`_pages.attend`). Such products take weights from registers.
    wide = call.device.arch in WGMMA and rows >= 64
    more = 0 if wide else 1
    fewer = 1 if width >= 512 else more

    def size(keys: int, stages: int) -> int:
        return (max(stages - fewer, 1) * keys * both + rows * (width + more * keys)) * item_size(call.q)

    return fit(call, keys, stages, size, good_keys=32)


def split_rows(call: Any) -> int:
    """Rows up to which a sequence counts as decoding: any in a batch of short ones, else four tokens' worth."""
    tokens = cdiv(call.num_tokens, max(call.max_num_seqs, 1)) if call.max_q_len is None else call.max_q_len
    return most_split_rows(call, tokens if tokens <= 8 else FEW_TOKENS)


def most_split_rows(call: Any, tokens: int) -> int:
    return min(max(16, next_power_of_2(call.group * tokens)), 64 if call.group <= 64 else 128)


def splits(call: Any) -> int:
    """Parts for eight programs per multiprocessor, as far as there can be keys for them."""
    keys = call.capacity if call.sliding_window is None else min(call.capacity, call.sliding_window + 8)
    if keys <= MIN_SPLIT or not 0 < call.max_num_seqs <= SEQUENCES[-1]:
        return 1
    wanted = cdiv(8 * call.device.num_multiprocessors, max(call.num_kv_heads, 1))
    return min(wanted, call.max_num_seqs * cdiv(keys, MIN_SPLIT), MAX_SPLITS)


class Rows(NamedTuple):
    """A block of rows, (query token, head of the group) pairs, of one sequence and KV head."""

    row: tl.tensor  # of each, counted from the sequence's first
    num_rows: tl.tensor  # of the sequence; those behind them belong to no query
    start: tl.tensor  # the sequence's first token
    kv_head: tl.tensor


@triton.jit
def load_rows(q_ptr, token_stride, head_stride, rows, negative, SIGNED: tl.constexpr, GROUP: tl.constexpr,
              D: tl.constexpr, D_PAD: tl.constexpr):  # fmt: skip
    """Query rows [ROWS, D_PAD], zero where there is none.

    They are negated for a negative scale, if it may be one (SIGNED). Operands that were only loaded stay in shared
    memory, where Hopper's matrix units read them; computed ones take registers.
    """
    d = tl.arange(0, D_PAD)
    token = (rows.start + rows.row // GROUP).to(tl.int64)
    head = rows.kv_head * GROUP + rows.row % GROUP
    offset = token * token_stride + head.to(tl.int64) * head_stride
    mask = (rows.row < rows.num_rows)[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + offset[:, None] + d[None, :], mask=mask, other=0)
    if SIGNED:
        wide = q.to(tl.float32)
        q = tl.where(negative, -wide, wide).to(q.dtype)
    return q


@triton.jit
def store_rows(out_ptr, lse_ptr, state, rows, sinks_ptr, v_scale, HAS_SINKS: tl.constexpr, GROUP: tl.constexpr,
               NUM_HEADS: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr):  # fmt: skip
    """Finished rows: divide by the denominator, sink included, and write out and lse. No key seen: 0 and -inf."""
    m_i, l_i, acc = state
    head = rows.kv_head * GROUP + rows.row % GROUP
    empty = l_i == 0.0
    m_i = tl.where(empty, 0.0, m_i)
    l_i = tl.where(empty, 1.0, l_i)
    denominator = l_i
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=rows.row < rows.num_rows, other=float("-inf"))
        denominator += tl.math.exp2(sink * LOG2E - m_i)
    out = tl.where(empty[:, None], 0.0, acc * (v_scale / denominator)[:, None])
    lse = tl.where(empty, float("-inf"), (m_i + tl.math.log2(l_i)) * LN2)
    dv = tl.arange(0, DV_PAD)
    index = (rows.start + rows.row // GROUP).to(tl.int64) * NUM_HEADS + head
    mask = (rows.row < rows.num_rows)[:, None] & (dv < DV)[None, :]
    tl.store(out_ptr + index[:, None] * DV + dv[None, :], narrow(out, out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + index, lse, mask=rows.row < rows.num_rows)


@triton.jit
def store_part(parts_ptr, lses_ptr, state, rows, part, DV: tl.constexpr, DV_PAD: tl.constexpr):
    """One split's rows, normalised, and their lse in base 2, to the part of that number."""
    m_i, l_i, acc = state
    dv = tl.arange(0, DV_PAD)
    index = part * rows.row.shape[0] + rows.row
    empty = l_i == 0.0  # then acc is 0
    l_i = tl.where(empty, 1.0, l_i)
    acc = acc / l_i[:, None]
    lse = tl.where(empty, float("-inf"), m_i + tl.math.log2(l_i))
    mask = (rows.row < rows.num_rows)[:, None] & (dv < DV)[None, :]
    tl.store(parts_ptr + index[:, None] * DV + dv[None, :], acc, mask=mask)
    tl.store(lses_ptr + index, lse, mask=rows.row < rows.num_rows)


@triton.jit
def clear_rows(out_ptr, lse_ptr, cu_q_lens_ptr, num_seqs, num_tokens, entry, kv_head, GROUP: tl.constexpr,
               NUM_HEADS: tl.constexpr, ROWS: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr):  # fmt: skip
    """Write the rows that belong to no sequence, 0 and -inf; the program of each entry looks after some."""
    first = query_edge(cu_q_lens_ptr, 0, num_tokens)
    last = query_edge(cu_q_lens_ptr, num_seqs, num_tokens)
    dv = tl.arange(0, DV_PAD)
    zeros = tl.zeros([ROWS, DV_PAD], out_ptr.dtype.element_ty)
    for first_row in range(entry * ROWS, num_tokens * GROUP, tl.num_programs(0) * ROWS):
        row = first_row + tl.arange(0, ROWS)
        token = row // GROUP
        nobodys = (token < num_tokens) & ((token < first) | (token >= last))
        index = token.to(tl.int64) * NUM_HEADS + kv_head * GROUP + row % GROUP
        tl.store(out_ptr + index[:, None] * DV + dv[None, :], zeros, mask=nobodys[:, None] & (dv < DV)[None, :])
        tl.store(lse_ptr + index, tl.full([ROWS], float("-inf"), tl.float32), mask=nobodys)


@triton.jit
def logit_scales(k_scale_ptr, kv_head, k_scale_factor, sm_scale, soft_cap,
                 K_SCALE_STRIDE: tl.constexpr, HAS_SOFT_CAP: tl.constexpr, SMALLEST: tl.constexpr):  # fmt: skip
    """(inner, outer, cap, negative): what logits are multiplied by, in magnitude, before and after `cap`; the sign."""
    scale = load_scale(k_scale_ptr, kv_head, k_scale_factor, K_SCALE_STRIDE) * sm_scale
    magnitude = tl.maximum(tl.abs(scale), SMALLEST)
    inner = magnitude
    outer = magnitude * LOG2E
    cap = soft_cap
    if HAS_SOFT_CAP:
        unit = unit_under_cap(soft_cap)
        inner = magnitude * unit
        outer = LOG2E / unit
        cap = soft_cap * unit
    return inner, outer, cap, scale < 0


@triton.jit
def draft_rows(draft_mask_ptr, rows, q_len, draft_stride, GROUP: tl.constexpr, HAS_DRAFT_MASK: tl.constexpr):
    """Where the rows of a draft mask begin that are the queries'; a row without a query sees no more than the last."""
    rows_ptr = draft_mask_ptr
    if HAS_DRAFT_MASK:
        token = (rows.start + tl.minimum(rows.row // GROUP, q_len - 1)).to(tl.int64)
        rows_ptr = draft_mask_ptr + token * draft_stride
    return rows_ptr


@triton.jit(do_not_specialize=VARYING)
def tile_kernel(
    q_ptr, k_ptr, v_ptr, kv_lens_ptr, page_indices_ptr, cu_q_lens_ptr, num_seqs_ptr, sinks_ptr,
    k_scale_ptr, v_scale_ptr, draft_mask_ptr,
    out_ptr, lse_ptr,
    num_tokens, max_num_seqs, num_pages, capacity, window, v_offset, table_stride,
    q_token_stride, q_head_stride, k_page_stride, k_slot_stride, k_head_stride,
    v_page_stride, v_slot_stride, v_head_stride,
    sm_scale, soft_cap, k_scale_factor, v_scale_factor, draft_stride, draft_width,
    K_SCALE_STRIDE: tl.constexpr, V_SCALE_STRIDE: tl.constexpr, HAS_NUM_SEQS: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr, CAUSAL: tl.constexpr, HAS_DRAFT_MASK: tl.constexpr,
    SIGNED: tl.constexpr,
    GROUP: tl.constexpr, NUM_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    DV: tl.constexpr, DV_PAD: tl.constexpr, FORMAT: tl.constexpr, SMALLEST: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, EDGE_KV: tl.constexpr, SPLIT_WEIGHTS_BELOW: tl.constexpr,
    SPLIT_BLOCK_Q: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One block of rows of one KV head, over all its keys; also writes the padding rows."""
    if PDL:
        gdc_launch_dependents()
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the last rows see the most keys: begin with them
    kv_head = tl.program_id(1)
    num_seqs = count_sequences(num_seqs_ptr, max_num_seqs, HAS_NUM_SEQS)
    segment = find_segment(block, cu_q_lens_ptr, num_seqs, num_tokens, GROUP, BLOCK_Q)
    seq = segment - 1
    live = (seq >= 0) & (seq < num_seqs)
    start = segment_edge(cu_q_lens_ptr, segment, num_seqs, num_tokens)
    stop = tl.maximum(segment_edge(cu_q_lens_ptr, segment + 1, num_seqs, num_tokens), start)
    q_len = stop - start
    num_rows = q_len * GROUP
    first_row = (block - (start * GROUP // BLOCK_Q + segment)) * BLOCK_Q
    if (first_row >= 0) & (first_row < num_rows) & ((num_rows > SPLIT_BLOCK_Q) | (live == 0)):
        rows = Rows(first_row + tl.arange(0, BLOCK_Q), num_rows, start, kv_head)
        low = 0
        high = 0
        kv_len = 0
        if live:
            kv_len = tl.minimum(tl.maximum(tl.load(kv_lens_ptr + seq), 0), capacity)
            low = kv_len - q_len + first_row // GROUP
            high = kv_len - q_len + tl.minimum((first_row + BLOCK_Q - 1) // GROUP, q_len - 1)
        first, last = key_range(low, high, kv_len, window, CAUSAL, HAS_WINDOW)
        inner_scale, outer_scale, cap, negative = logit_scales(
            k_scale_ptr, kv_head, k_scale_factor, sm_scale, soft_cap, K_SCALE_STRIDE, HAS_SOFT_CAP, SMALLEST
        )
        q = load_rows(q_ptr, q_token_stride, q_head_stride, rows, negative, SIGNED, GROUP, D, D_PAD)
        unit = None
        if FORMAT != "plain" and q.dtype == tl.bfloat16:
            q, unit = in_float16(q)
        pages = Pages(
            k_ptr + kv_head.to(tl.int64) * k_head_stride, k_page_stride, k_slot_stride,
            v_ptr + v_offset + kv_head.to(tl.int64) * v_head_stride, v_page_stride, v_slot_stride,
            page_indices_ptr + seq.to(tl.int64) * table_stride, num_pages,
        )  # fmt: skip
        visible = Visible(
            first, last, low, high, kv_len - q_len + rows.row // GROUP, kv_len, window,
            draft_rows(draft_mask_ptr, rows, q_len, draft_stride, GROUP, HAS_DRAFT_MASK), draft_width,
            kv_len - q_len,
        )  # fmt: skip
        state = attend_range(
            q, unit, first // EDGE_KV * EDGE_KV, last, visible, pages, (inner_scale, outer_scale, cap),
            Features(CAUSAL, HAS_WINDOW, HAS_SOFT_CAP, HAS_DRAFT_MASK),
            PageSizes(PAGE_SIZE, D, D_PAD, DV, DV_PAD, FORMAT), BLOCK_KV, EDGE_KV, 1, SPLIT_WEIGHTS_BELOW,
        )  # fmt: skip
        v_scale = load_scale(v_scale_ptr, kv_head, v_scale_factor, V_SCALE_STRIDE)
        store_rows(out_ptr, lse_ptr, state, rows, sinks_ptr, v_scale, HAS_SINKS, GROUP, NUM_HEADS, DV, DV_PAD)


@triton.jit
def short_sequence(seq, cu_q_lens_ptr, kv_lens_ptr, num_seqs, num_tokens, max_num_seqs, capacity, window,
                   HAS_WINDOW: tl.constexpr, CAUSAL: tl.constexpr, GROUP: tl.constexpr,
                   BLOCK_Q: tl.constexpr, ALONE: tl.constexpr):  # fmt: skip
    """(start, q_len, kv_len, first, last) of one sequence or of several; q_len is 0 for one that is not live, or whose
    rows are for the tile kernel, unless the split kernel is ALONE."""
    row = tl.minimum(seq, max_num_seqs - 1)
    start = query_edge(cu_q_lens_ptr, row, num_tokens)
    stop = tl.maximum(query_edge(cu_q_lens_ptr, row + 1, num_tokens), start)
    own = seq < num_seqs
    if not ALONE:
        own = own & ((stop - start) * GROUP <= BLOCK_Q)
    q_len = tl.where(own, stop - start, 0)
    kv_len = tl.minimum(tl.maximum(tl.load(kv_lens_ptr + row), 0), capacity)
    first, last = key_range(kv_len - q_len, kv_len - 1, kv_len, window, CAUSAL, HAS_WINDOW)
    return start, q_len, kv_len, first, last


@triton.jit
def parts_of_all(cu_q_lens_ptr, kv_lens_ptr, num_seqs, num_tokens, max_num_seqs, capacity, window, num_splits,
                 HAS_WINDOW: tl.constexpr, CAUSAL: tl.constexpr, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr,
                 BLOCK_KV: tl.constexpr, MIN_BLOCKS: tl.constexpr, SEQS: tl.constexpr,
                 ALONE: tl.constexpr):  # fmt: skip
    """(the parts of each sequence, how many blocks of keys one has): about `num_splits` in all, one each at least.

    A sequence of more rows than a block holds is one part.
    """
    seq = tl.arange(0, SEQS)
    _, q_len, _, first, last = short_sequence(seq, cu_q_lens_ptr, kv_lens_ptr, num_seqs, num_tokens, max_num_seqs,
                                              capacity, window, HAS_WINDOW, CAUSAL, GROUP, BLOCK_Q,
                                              ALONE)  # fmt: skip
    short = (q_len > 0) & (q_len * GROUP <= BLOCK_Q)
    blocks = tl.where(short, (last + BLOCK_KV - 1) // BLOCK_KV - first // BLOCK_KV, 0)
    each = (tl.sum(blocks.to(tl.int64), 0) + num_splits - 1) // num_splits
    each = tl.minimum(tl.maximum(each, MIN_BLOCKS), LARGEST_INT // BLOCK_KV).to(tl.int32)
    return tl.where(q_len > 0, tl.maximum((blocks + each - 1) // each, 1), 0), each


@triton.jit
def own_parts(num_rows, first, last, num_splits, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
              MIN_BLOCKS: tl.constexpr):  # fmt: skip
    """The same of one sequence where its own length alone says how many parts there are, up to `num_splits`."""
    blocks = tl.where(num_rows <= BLOCK_Q, (last + BLOCK_KV - 1) // BLOCK_KV - first // BLOCK_KV, 0)
    each = tl.maximum((blocks + num_splits - 1) // num_splits, MIN_BLOCKS)
    return tl.maximum((blocks + each - 1) // each, 1), each


@triton.jit
def later_rows(index, cu_q_lens_ptr, num_seqs, num_tokens, max_num_seqs, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr,
               SEQS: tl.constexpr):  # fmt: skip
    """Of the blocks of rows that are not a sequence's first, number `index`: (its sequence, its first row)."""
    seq = tl.arange(0, SEQS)
    row = tl.minimum(seq, max_num_seqs - 1)
    q_len = query_edge(cu_q_lens_ptr, row + 1, num_tokens) - query_edge(cu_q_lens_ptr, row, num_tokens)
    later = tl.where(seq < num_seqs, tl.maximum((q_len * GROUP - 1) // BLOCK_Q, 0), 0)
    ends = tl.cumsum(later, 0)
    found = tl.sum((ends <= index).to(tl.int32), 0)
    before = tl.sum(tl.where(seq < found, later, 0), 0)
    return found, (index - before + 1) * BLOCK_Q


@triton.jit(do_not_specialize=VARYING)
def split_kernel(
    q_ptr, k_ptr, v_ptr, kv_lens_ptr, page_indices_ptr, cu_q_lens_ptr, num_seqs_ptr, sinks_ptr,
    k_scale_ptr, v_scale_ptr, draft_mask_ptr,
    given_out_ptr, given_lse_ptr, parts_ptr, part_lses_ptr, out_ptr, lse_ptr,
    num_tokens, max_num_seqs, num_pages, capacity, window, v_offset, table_stride,
    q_token_stride, q_head_stride, k_page_stride, k_slot_stride, k_head_stride,
    v_page_stride, v_slot_stride, v_head_stride,
    sm_scale, soft_cap, k_scale_factor, v_scale_factor, draft_stride, draft_width, num_splits,
    K_SCALE_STRIDE: tl.constexpr, V_SCALE_STRIDE: tl.constexpr, HAS_NUM_SEQS: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr, CAUSAL: tl.constexpr, HAS_DRAFT_MASK: tl.constexpr,
    SIGNED: tl.constexpr,
    GROUP: tl.constexpr, NUM_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    DV: tl.constexpr, DV_PAD: tl.constexpr, FORMAT: tl.constexpr, SMALLEST: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, WEIGHT_PARTS: tl.constexpr, WHOLE: tl.constexpr,
    MIN_BLOCKS: tl.constexpr, SEQS: tl.constexpr, OWN: tl.constexpr, ALONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One part of a short sequence's keys for one KV head; a sequence of one part is finished here.

    Otherwise the result goes to parts [entries, K, BLOCK_Q, DV] float32, normalised, and its base-2 lse beside it. If
    WHOLE every sequence is one part. Where no tile kernel runs (ALONE) the rows of no sequence are written here too,
    and if a sequence is not short after all, a program of those behind `most_parts` takes each further block of rows.
    """
    if PDL:
        gdc_launch_dependents()
    entry = tl.program_id(0)  # the one axis without a small limit on some GPUs
    kv_head = tl.program_id(1)
    num_seqs = count_sequences(num_seqs_ptr, max_num_seqs, HAS_NUM_SEQS)
    if ALONE:
        clear_rows(out_ptr, lse_ptr, cu_q_lens_ptr, num_seqs, num_tokens, entry, kv_head, GROUP, NUM_HEADS, BLOCK_Q,
                   DV, DV_PAD)  # fmt: skip
    most_parts = max_num_seqs * num_splits if OWN else max_num_seqs + (0 if WHOLE else num_splits)
    seq = entry
    first_row = 0
    part = 0
    count = 1
    each = 0
    if ALONE and entry >= most_parts:
        seq, first_row = later_rows(
            entry - most_parts, cu_q_lens_ptr, num_seqs, num_tokens, max_num_seqs, GROUP, BLOCK_Q, SEQS
        )
    elif OWN:
        seq = entry // num_splits
        part = entry % num_splits
    elif not WHOLE:
        counts, each = parts_of_all(
            cu_q_lens_ptr, kv_lens_ptr, num_seqs, num_tokens, max_num_seqs, capacity, window, num_splits,
            HAS_WINDOW, CAUSAL, GROUP, BLOCK_Q, BLOCK_KV, MIN_BLOCKS, SEQS, ALONE,
        )  # fmt: skip
        ends = tl.cumsum(counts, 0)
        seq = tl.sum((ends <= entry).to(tl.int32), 0)
        own = tl.arange(0, SEQS) == seq
        count = tl.sum(tl.where(own, counts, 0), 0)
        part = entry - tl.sum(tl.where(own, ends, 0), 0) + count
    start, q_len, kv_len, first, last = short_sequence(
        seq, cu_q_lens_ptr, kv_lens_ptr, num_seqs, num_tokens, max_num_seqs, capacity, window, HAS_WINDOW, CAUSAL,
        GROUP, BLOCK_Q, ALONE,
    )  # fmt: skip
    num_rows = q_len * GROUP
    if OWN:
        count, each = own_parts(num_rows, first, last, num_splits, BLOCK_Q, BLOCK_KV, MIN_BLOCKS)
        num_rows = tl.where(part < count, num_rows, 0)
    begin = first // BLOCK_KV * BLOCK_KV
    stop = last
    if not WHOLE:
        begin += part * each * BLOCK_KV
        stop = tl.where(count > 1, begin + tl.minimum(each * BLOCK_KV, last - begin), last)
    if num_rows > first_row:
        rows = Rows(first_row + tl.arange(0, BLOCK_Q), num_rows, start, kv_head)
        inner_scale, outer_scale, cap, negative = logit_scales(
            k_scale_ptr, kv_head, k_scale_factor, sm_scale, soft_cap, K_SCALE_STRIDE, HAS_SOFT_CAP, SMALLEST
        )
        q = load_rows(q_ptr, q_token_stride, q_head_stride, rows, negative, SIGNED, GROUP, D, D_PAD)
        unit = None
        if FORMAT != "plain" and q.dtype == tl.bfloat16:
            q, unit = in_float16(q)
        pages = Pages(
            k_ptr + kv_head.to(tl.int64) * k_head_stride, k_page_stride, k_slot_stride,
            v_ptr + v_offset + kv_head.to(tl.int64) * v_head_stride, v_page_stride, v_slot_stride,
            page_indices_ptr + seq.to(tl.int64) * table_stride, num_pages,
        )  # fmt: skip
        visible = Visible(
            first, last, kv_len - q_len, kv_len - 1, kv_len - q_len + rows.row // GROUP, kv_len, window,
            draft_rows(draft_mask_ptr, rows, q_len, draft_stride, GROUP, HAS_DRAFT_MASK), draft_width,
            kv_len - q_len,
        )  # fmt: skip
        state = attend_range(
            q, unit, begin, stop, visible, pages, (inner_scale, outer_scale, cap),
            Features(CAUSAL, HAS_WINDOW, HAS_SOFT_CAP, HAS_DRAFT_MASK),
            PageSizes(PAGE_SIZE, D, D_PAD, DV, DV_PAD, FORMAT), BLOCK_KV, BLOCK_KV, WEIGHT_PARTS, 0,
        )  # fmt: skip
        if WHOLE or count == 1:
            v_scale = load_scale(v_scale_ptr, kv_head, v_scale_factor, V_SCALE_STRIDE)
            store_rows(out_ptr, lse_ptr, state, rows, sinks_ptr, v_scale, HAS_SINKS, GROUP, NUM_HEADS, DV, DV_PAD)
        else:
            index = entry.to(tl.int64) * (NUM_HEADS // GROUP) + kv_head
            store_part(parts_ptr, part_lses_ptr, state, rows, index, DV, DV_PAD)
    if PDL and not ALONE:  # what comes next has waited for this kernel only, and must find the tile kernel's rows too
        gdc_wait()


@triton.jit(do_not_specialize=VARYING)
def combine_kernel(
    parts_ptr, part_lses_ptr, kv_lens_ptr, cu_q_lens_ptr, num_seqs_ptr, sinks_ptr, v_scale_ptr,
    given_out_ptr, given_lse_ptr, out_ptr, lse_ptr,
    num_tokens, max_num_seqs, capacity, window, v_scale_factor, num_splits,
    V_SCALE_STRIDE: tl.constexpr, HAS_NUM_SEQS: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, CAUSAL: tl.constexpr, GROUP: tl.constexpr, NUM_HEADS: tl.constexpr,
    DV: tl.constexpr, DV_PAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    MIN_BLOCKS: tl.constexpr, SEQS: tl.constexpr, PARTS: tl.constexpr, OWN: tl.constexpr, ALONE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row of a short sequence of several parts, or some: these, in order, into the result."""
    if PDL:
        gdc_wait()
    seq = tl.program_id(0)
    kv_head = tl.program_id(1)
    first_row = tl.program_id(2)
    num_seqs = count_sequences(num_seqs_ptr, max_num_seqs, HAS_NUM_SEQS)
    start, q_len, _, first, last = short_sequence(
        seq, cu_q_lens_ptr, kv_lens_ptr, num_seqs, num_tokens, max_num_seqs, capacity, window, HAS_WINDOW, CAUSAL,
        GROUP, BLOCK_Q, ALONE,
    )  # fmt: skip
    num_rows = q_len * GROUP
    if first_row < num_rows:
        if OWN:
            count, _ = own_parts(num_rows, first, last, num_splits, BLOCK_Q, BLOCK_KV, MIN_BLOCKS)
            entry = seq * num_splits
        else:
            counts, _ = parts_of_all(
                cu_q_lens_ptr, kv_lens_ptr, num_seqs, num_tokens, max_num_seqs, capacity, window, num_splits,
                HAS_WINDOW, CAUSAL, GROUP, BLOCK_Q, BLOCK_KV, MIN_BLOCKS, SEQS, ALONE,
            )  # fmt: skip
            entry = tl.sum(tl.where(tl.arange(0, SEQS) < seq, counts, 0), 0)
            count = tl.sum(tl.where(tl.arange(0, SEQS) == seq, counts, 0), 0)
        KV_HEADS: tl.constexpr = NUM_HEADS // GROUP
        step: tl.constexpr = KV_HEADS * BLOCK_Q
        v_scale = load_scale(v_scale_ptr, kv_head, v_scale_factor, V_SCALE_STRIDE)
        for row in range(first_row, tl.where(count > 1, num_rows, 0), tl.num_programs(2)):
            index = (entry.to(tl.int64) * KV_HEADS + kv_head) * BLOCK_Q + row
            acc, m_i, l_i = merge_parts(
                parts_ptr + index * DV, part_lses_ptr + index, count, step * DV, step, 1.0, PARTS, DV, DV_PAD
            )
            zero = tl.zeros([1], tl.float32)
            rows = Rows(row + tl.arange(0, 1), num_rows, start, kv_head)
            store_rows(out_ptr, lse_ptr, (m_i + zero, l_i + zero, acc[None, :]), rows, sinks_ptr, v_scale, HAS_SINKS,
                       GROUP, NUM_HEADS, DV, DV_PAD)  # fmt: skip


def shared_arguments(call: Any, v_arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of all three kernels."""
    # A window as long as the longest sequence hides nothing.
    window = call.sliding_window if call.sliding_window and call.sliding_window < call.capacity else None
    return {
        "num_tokens": call.num_tokens,
        "max_num_seqs": call.max_num_seqs,
        "capacity": call.capacity,
        "window": window or 0,
        "HAS_NUM_SEQS": call.num_seqs is not None,
        "HAS_SINKS": call.sinks is not None,
        "HAS_WINDOW": window is not None,
        "CAUSAL": bool(call.causal) and call.draft_mask is None,
        "GROUP": call.group,
        "NUM_HEADS": call.num_q_heads,
        "DV": call.v_head_dim,
        "DV_PAD": next_power_of_2(call.v_head_dim),
        "PDL": overlaps(call),
        **v_arguments,
    }


def attention_arguments(
    call: Any, views: tuple[Any, ...], k_scale: Mapping[str, Any], q_strides: Any, table_stride: int, draft_stride: int
) -> dict[str, Any]:
    """More arguments of the two attention kernels; `views` and `k_scale` as the functions of `_formats` give them."""
    _, _, k_strides, v_strides, v_offset = views
    return {
        "num_pages": call.num_pages,
        "v_offset": v_offset,
        "table_stride": table_stride,
        **dict(zip(("q_token_stride", "q_head_stride"), q_strides, strict=False)),
        **dict(zip(("k_page_stride", "k_slot_stride", "k_head_stride"), k_strides, strict=True)),
        **dict(zip(("v_page_stride", "v_slot_stride", "v_head_stride"), v_strides, strict=True)),
        "sm_scale": call.scale,
        **k_scale,
        "SIGNED": k_scale["K_SCALE_STRIDE"] >= 0 or call.scale * k_scale["k_scale_factor"] < 0,
        "draft_stride": draft_stride,
        "draft_width": 0 if call.draft_mask is None else call.draft_mask.shape[1],
        "HAS_DRAFT_MASK": call.draft_mask is not None,
        "soft_cap": float(call.soft_cap or 1.0),
        "HAS_SOFT_CAP": call.soft_cap is not None,
        "PAGE_SIZE": call.page_size,
        "D": call.head_dim,
        "D_PAD": next_power_of_2(call.head_dim),
        "FORMAT": cache_format(call),
        "SMALLEST": SMALLEST_SCALE,
    }


def decodes(call: Any, tile: Tile) -> bool:
    """Whether the split kernel can do without the tile kernel, as far as the host knows."""
    few = most_tokens(call) * call.group <= tile.split_block_q
    return few and call.num_tokens > 0 and 0 < call.max_num_seqs <= SEQUENCES[-1]


def most_tokens(call: Any) -> int:
    """Of a sequence in this batch, as far as the host knows; 1 at least."""
    return max(1, call.num_tokens if call.max_q_len is None else min(call.max_q_len, call.num_tokens))


def run_short(
    call: Any, tile: Tile, launch: Any, inputs: Any, given: Any, shared: Any, attention: Any
) -> list[Any]:  # fmt: skip
    """Enqueue the kernels of short sequences: they write what the tile kernel left of `given`, or all without that."""
    whole = tile.num_splits == 1
    own = tile.invariant and not whole
    entries = call.max_num_seqs * tile.num_splits if own else call.max_num_seqs + (0 if whole else tile.num_splits)
    later = 0 if given else call.num_tokens * call.group // tile.split_block_q
    parts = (1,) if whole else (entries, call.num_kv_heads, tile.split_block_q)
    splitting = {
        "BLOCK_Q": tile.split_block_q,
        "BLOCK_KV": tile.split_block_kv,
        "MIN_BLOCKS": cdiv(OWN_PART if own else MIN_SPLIT, tile.split_block_kv),
        "OWN": own,
        "SEQS": 1 if (whole or own) and given else next(count for count in SEQUENCES if count >= call.max_num_seqs),
        "num_splits": tile.num_splits,
        "ALONE": given is None,
    }
    out, lse = given or (inputs[0], inputs[0])  # these stand for arrays that are not there
    *partial, out, lse = launch(
        split_kernel,
        (entries + later, call.num_kv_heads),
        (*inputs, out, lse),
        [
            ((1,) if whole else (*parts, call.v_head_dim), "float32"),
            (parts, "float32"),
            *([] if given else results(call)),
        ],
        inplace=(len(inputs), len(inputs) + 1) if given else (),
        **dependent(shared["PDL"] and given is not None),
        num_warps=tile.split_num_warps,
        num_stages=tile.split_num_stages,
        WEIGHT_PARTS=2 if in_bfloat16(call) else 1,
        WHOLE=whole,
        **splitting,
        **attention,
    )
    if whole:
        return [out, lse]
    _, _, _, kv_lens, _, cu_q_lens, num_seqs, sinks, _, v_scale, _ = inputs
    return launch(
        combine_kernel,
        (call.max_num_seqs, call.num_kv_heads, min(tile.split_block_q, most_tokens(call) * call.group)),
        (*partial, kv_lens, cu_q_lens, num_seqs, sinks, v_scale, out, lse),
        [],
        inplace=(7, 8),
        **dependent(shared["PDL"]),
        num_stages=1,
        # Of few parts there is no need to have so many numbers in registers.
        PARTS=min(next_power_of_2(tile.num_splits), max(1, (512 if own else 2048) // next_power_of_2(call.v_head_dim))),
        **splitting,
        **shared,
    )


def careful_below(call: Any, tile: Tile) -> int:
    """Keys below which a row's weights are not just rounded."""
    return tile.split_weights_below if in_bfloat16(call) else 0


def in_bfloat16(call: Any) -> bool:
    """Whether products are of bfloat16, to which weights are rounded with care."""
    return dtype_name(call.q) == call.cache_dtype == "bfloat16"


def results(call: Any) -> list[Any]:
    """Out and lse as a launcher allocates them."""
    return [(call.out_shape, call.result_dtype), (call.q.shape[:2], "float32")]


def run(call: RaggedPagedAttention, tile: Tile, launch: Any) -> Any:
    """Enqueue the kernels; see the module's docstring for the plan."""
    q = launch.packed(call.q)
    page_indices, cu_q_lens, kv_lens = map(launch.packed, (call.page_indices, call.cu_q_lens, call.kv_lens))
    views = cache_views(call, launch)
    k_scale, k_arguments = scale_arguments("k_scale", call.k_scale, q, launch)
    v_scale, v_arguments = scale_arguments("v_scale", call.v_scale, q, launch)
    num_seqs = kv_lens if call.num_seqs is None else call.num_seqs
    sinks = q if call.sinks is None else launch.packed(call.sinks)
    draft_mask = q if call.draft_mask is None else launch.packed(call.draft_mask)
    shared = shared_arguments(call, v_arguments)
    table_stride = launch.strides(page_indices)[0]
    attention = shared | attention_arguments(
        call, views, k_arguments, launch.strides(q), table_stride, launch.strides(draft_mask)[0]
    )
    inputs = (q, *views[:2], kv_lens, page_indices, cu_q_lens, num_seqs, sinks, k_scale, v_scale, draft_mask)
    found: Any = None
    if not decodes(call, tile):
        blocks = call.num_tokens * call.group // tile.block_q + call.max_num_seqs + 2
        found = launch(
            tile_kernel,
            (blocks if call.num_tokens else 0, call.num_kv_heads),
            inputs,
            results(call),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            BLOCK_Q=tile.block_q,
            BLOCK_KV=tile.block_kv,
            EDGE_KV=min(tile.edge_kv, tile.block_kv),
            SPLIT_WEIGHTS_BELOW=LARGEST_INT.value if tile.invariant else careful_below(call, tile),
            SPLIT_BLOCK_Q=tile.split_block_q,
            **attention,
        )
    if call.num_tokens and call.max_num_seqs:
        found = run_short(call, tile, launch, inputs, found, shared, attention)
    out, lse = found
    return (out, lse) if call.return_lse else out
