"""The gradient of attention over packed sequences in Triton. Kernels recompute the weights from the log-sum-exp.

The first kernel computes a few numbers per row. The second kernel computes dq: a program holds a block of rows and
visits the keys that they see. The third kernel computes dk and dv: a program holds a block of keys and visits the rows
that see them. A single kernel for all gradients, which adds to dq in memory, would need two products fewer. But its
results would vary from run to run. These kernels are deterministic. If the gradient of a relative bias is requested,
`_bias_gradient` computes it in one more kernel, which repeats two of the five products. Other calls would become slower
if an existing kernel computed it.
"""

import dataclasses
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ragged_attention.calls import VarlenAttentionBackward
from ragged_attention.kernels_triton import _selected_gradient, _varlen
from ragged_attention.kernels_triton._bias import Table, bias_arguments, entries
from ragged_attention.kernels_triton._bias_gradient import bias_gradient
from ragged_attention.kernels_triton._compiler import first_of_block
from ragged_attention.kernels_triton._formats import narrow
from ragged_attention.kernels_triton._key_ranges import exact_and_other_ends, queries_of_keys
from ragged_attention.kernels_triton._mask import (
    Mask,
    end_query,
    first_key,
    first_query,
    may_read,
    meet_ranges,
    ranges_array,
    sees_of,
)
from ragged_attention.kernels_triton._rows import Rows
from ragged_attention.kernels_triton._selected import (
    MOST_TOKENS,
    blocks_of_step,
    joined_tokens,
    keys_of_step,
    too_long,
)
from ragged_attention.kernels_triton._selected_gradient import too_many
from ragged_attention.kernels_triton._sequences import (
    VARYING,
    Edges,
    block_start,
    end_blocks,
    max_blocks,
    whole_blocks,
)
from ragged_attention.kernels_triton._softmax import LOG2E, column_sums, sum_of_products
from ragged_attention.kernels_triton._tiles import (
    OLDER_COMPILER,
    WGMMA,
    Sizes,
    cdiv,
    expect_between,
    expect_power_of_two,
    item_size,
    launchable_in_float32,
    next_power_of_2,
    on_cuda_cores,
    shared_memory,
    stride_arguments,
)
from ragged_attention.kernels_triton._varlen import (
    Config,
    Keys,
    accumulate,
    find_block,
    find_job,
    gather_rows,
    load_columns,
    load_rows,
    product,
    rows_of,
    store_rows,
    times,
    visible_blocks,
    visits_of_job,
    zeros,
)
from ragged_attention.kernels_triton._varlen_gradient import (
    TERMS,
    KeyBlock,
    LoadedRows,
    RowArrays,
    Seeing,
    add_rows,
    load_terms,
    logit_gradients,
    row_ranges,
    row_tables,
    seen_by_rows,
    signed_scales,
    tables_of_head,
    weigh,
)

PREPARED = 2048  # elements of `out` that one program of `prepare_kernel` reads
FEATURES = frozenset({
    "d_lse", "max_q_len", "max_kv_len", "sm_scale", "causal", "sliding_window", "soft_cap", "sinks", "alibi_slopes",
    "relative_bias", "key_ranges", "selected", "block_size", "return_d_relative_bias", "deterministic",
})  # fmt: skip


SMALLEST = 16  # rows, or keys, of the smallest block


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The tunable sizes. Rows are query tokens times heads of a group."""

    block_q: int = 64  # rows per step of the dk and dv kernel
    block_kv: int = 64  # keys per program of the dk and dv kernel
    num_warps: int = 4
    num_stages: int = 2
    dq_block_q: int = 64  # rows per program of the dq kernel
    dq_block_kv: int = 64  # keys per step of the dq kernel
    dq_num_warps: int = 4
    dq_num_stages: int = 2
    joined_tokens: int = 1  # tokens per program of the dq kernel that visits selected blocks

    def __post_init__(self) -> None:
        expect_power_of_two(self, joined_tokens=(1, MOST_TOKENS))
        blocks = ("block_q", "block_kv", "dq_block_q", "dq_block_kv")
        expect_power_of_two(self, **dict.fromkeys(blocks, (16, 256)), num_warps=(1, 16), dq_num_warps=(1, 16))
        expect_between(self, num_stages=(1, 8), dq_num_stages=(1, 8))


def why_not(call: VarlenAttentionBackward) -> str | None:
    return launchable_in_float32(call, dkv_kernel) or too_wide(call) or too_long(call) or too_many(call)


def too_wide(call: VarlenAttentionBackward) -> str | None:
    """The reason why even the smallest blocks of float32 rows and keys do not fit shared memory; None if they fit."""
    if not on_cuda_cores(call) or call.device.platform != "cuda":
        return None
    columns, limit = _varlen.columns(call), f"{shared_memory(call)} bytes of shared memory"
    if (SMALLEST + SMALLEST) * columns * item_size(call.q) <= shared_memory(call):
        return None
    return f"expected float32 rows that fit {limit}, {SMALLEST} at a time, got {columns} columns of queries and values"


def heuristic(call: VarlenAttentionBackward) -> Tile:
    """A tile that fits registers and shared memory; see docs/compile_matrix.md."""
    columns = _varlen.columns(call)
    dkv, dq = dkv_sizes(call), dq_sizes(call)
    if call.selected is not None:
        dkv, dq = _selected_gradient.sizes(call, dkv, dq)
    keys = min(dkv.keys, max(16, next_power_of_2(call.num_kv_tokens)))
    rows, stages = _varlen.fit_rows(call, keys * columns, dkv.rows, dkv.stages)
    dkv = dkv._replace(rows=rows, keys=keys, stages=stages)
    rows = _varlen.rows_at_most(call, dq.rows)
    keys, stages = _varlen.fit_rows(call, rows * columns, dq.keys, dq.stages)
    dq = dq._replace(rows=rows, keys=keys, stages=stages)
    return Tile(
        **dkv.fields("block_q"),
        **dq.fields("block_q", "dq_"),
        joined_tokens=joined_tokens(call, rows, call.num_kv_tokens),
    )


def stages_on_amd(arch: str, columns: int, most: int = 320) -> int:
    """The number of stages: two if copies go directly to shared memory, else one, as a second would take registers."""
    return 2 if arch == "gfx950" and columns <= most else 1


def dkv_sizes(call: Any) -> Sizes:
    """The preferred sizes of the dk and dv kernel, which holds two accumulators in registers."""
    arch, columns = call.device.arch, _varlen.columns(call)
    if call.device.platform == "cpu":
        return Sizes(64, 64, 4, 2)
    if on_cuda_cores(call):
        biased = call.relative_bias is not None  # the addresses of bias entries take registers
        return Sizes(16, 16, 8 if biased and arch.startswith("sm_") else 4, 1)
    if call.relative_bias is not None:
        block = 32 if columns <= 512 else 16
        return Sizes(block, block, 8 if arch.startswith("sm_") else 4, 1)
    if not arch.startswith("sm_"):
        stages = stages_on_amd(arch, columns, 256 if OLDER_COMPILER else 320)
        if columns > 512:
            return Sizes(16, 16, 4, stages)
        return Sizes(32, 64 if columns <= 320 and call.soft_cap is None else 32, 4, stages)
    if columns > 512:
        return Sizes(16, 32 if arch in WGMMA and not OLDER_COMPILER else 16, 8, 2)
    if arch == "sm_90":
        return dkv_sizes_of_hopper(call, columns)
    if arch in WGMMA:
        return Sizes(64 if columns <= 256 else 32, 128 if columns <= 320 else 64, 8, 2)
    if columns <= 128:
        return Sizes(32, 128, 8, 2)
    return Sizes(64 if columns <= 256 else 32, 64 if columns <= 384 else 32, 8, 2)


def dkv_sizes_of_hopper(call: Any, columns: int) -> Sizes:
    """`dkv_sizes` on Hopper: 64 keys and four warps if their registers can hold the accumulators of dk and dv.

    A multiprocessor then runs two independent programs. Accumulators with 320 columns leave few registers for masks,
    soft caps and shares.
    """
    if call.key_ranges is not None and OLDER_COMPILER:  # the addresses of ranges take registers
        return Sizes(32, 64, 8, 3) if columns <= 256 else Sizes(32, 32, 8, 3)
    if columns <= 256:
        return Sizes(64 if columns <= 128 else 32, 64, 4, 3)
    if columns > 320:
        return Sizes(32, 32, 8, 3)
    simple = call.soft_cap is None and not has_share(call)
    if OLDER_COMPILER:
        return Sizes(32, 128 if simple and 64 % call.group == 0 else 64, 8, 3)
    return Sizes(32 if simple and call.causal else 16, 64, 4, 3)


def dq_sizes(call: Any) -> Sizes:
    """The preferred sizes of the dq kernel."""
    arch, columns = call.device.arch, _varlen.columns(call)
    if call.device.platform == "cpu":
        return Sizes(64, 64, 4, 2)
    if on_cuda_cores(call):
        spills = OLDER_COMPILER and arch in WGMMA  # whether eight warps would spill
        return Sizes(16, 16, 8 if arch.startswith("sm_") and not spills else 4, 1)
    if call.relative_bias is not None:
        takes_registers = columns > 256 or len(call.relative_bias.shape) == 3 or call.key_ranges is not None
        return Sizes(32 if columns <= 512 else 16, 32, 8 if takes_registers and arch.startswith("sm_") else 4, 1)
    if not arch.startswith("sm_"):
        return Sizes(64 if columns <= 320 else 32, 32 if columns <= 512 else 16, 4, stages_on_amd(arch, columns))
    if arch == "sm_90" and columns <= 192:
        return Sizes(64, 64, 4, 3)
    if arch in WGMMA:
        if columns > 512:
            return Sizes(32, 32, 8, 2)
        return Sizes(128, 64 if columns <= 320 else 32, 8, 3 if arch == "sm_90" or columns <= 256 else 2)
    most = 384 if call.key_ranges is None else 256
    return Sizes(64 if columns <= most else 32, 64 if columns <= 256 else 32, 8, 2)


@triton.jit(do_not_specialize=VARYING)
def prepare_kernel(
    out_ptr, d_out_ptr, lse_ptr, d_lse_ptr, sinks_ptr, slopes_ptr,
    terms_ptr, parts_ptr,
    num_tokens, out_token_stride, out_head_stride, d_out_token_stride, d_out_head_stride, lse_stride, d_lse_stride,
    HAS_SINKS: tl.constexpr, HAS_D_LSE: tl.constexpr, HAS_ALIBI: tl.constexpr,
    GROUP: tl.constexpr, NUM_HEADS: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute `norm`, `offset` and `share` for a block of tokens of one head, and copy its slope.

    These four terms go to `terms` [K, T_q, GROUP, TERMS]. The block's contribution to the head's d_sink goes to `parts`
    [blocks, H]. A row whose lse is -inf has seen no key. Its norm is inf, and its offset and share are 0.
    """
    block = tl.program_id(0)
    head = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    lse = tl.load(lse_ptr + token.to(tl.int64) * lse_stride + head, mask=inside, other=float("-inf"))
    saw_keys = lse != float("-inf")
    out_offsets = token.to(tl.int64) * out_token_stride + head.to(tl.int64) * out_head_stride
    d_out_offsets = token.to(tl.int64) * d_out_token_stride + head.to(tl.int64) * d_out_head_stride
    out = load_columns(out_ptr, out_offsets, saw_keys, True, DV, 0, DV_PAD).to(tl.float32)
    d_out = load_columns(d_out_ptr, d_out_offsets, saw_keys, True, DV, 0, DV_PAD).to(tl.float32)
    delta = sum_of_products(out, d_out, saw_keys[:, None], 1)
    norm = lse * LOG2E
    offset = -delta
    share = tl.full([BLOCK], 1.0, tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head)
        # The sink's fraction of the denominator is sigmoid(sink - lse). Neither it nor its complement is computed by
        # subtraction, which would cancel.
        tail = tl.math.exp2(-tl.abs(lse - sink) * LOG2E)
        small = tail / (1 + tail)
        large = 1 / (1 + tail)
        sink_share = tl.where(lse < sink, large, small)
        d_sink = tl.sum(tl.where(saw_keys, -sink_share * delta, 0.0), 0)
        tl.store(parts_ptr + block.to(tl.int64) * NUM_HEADS + head, d_sink)
        if HAS_D_LSE:
            share = tl.where(lse < sink, small, large)
            offset = share * offset
        else:
            norm = tl.maximum(lse, sink) * LOG2E + tl.math.log2(1 + tail)
    if HAS_D_LSE:
        offset += tl.load(d_lse_ptr + token.to(tl.int64) * d_lse_stride + head, mask=saw_keys, other=0.0)
    norm = tl.where(saw_keys, norm, float("inf"))
    offset = tl.where(saw_keys, offset, 0.0)
    share = tl.where(saw_keys, share, 0.0)
    row_terms = terms_ptr + (((head // GROUP).to(tl.int64) * num_tokens + token) * GROUP + head % GROUP) * TERMS
    slope = share  # not used without HAS_ALIBI
    if HAS_ALIBI:
        slope = tl.full([BLOCK], 1.0, tl.float32) * (tl.load(slopes_ptr + head) * LOG2E)
    terms = tl.join(tl.join(norm, share), tl.join(offset, slope))
    terms = tl.reshape(terms, [BLOCK, TERMS])
    tl.store(row_terms[:, None] + tl.arange(0, TERMS)[None, :], terms, mask=inside[:, None])


class RowBlock(NamedTuple):
    """A block of rows, their terms (see `prepare_kernel`), and the factors of logits (see `signed_scales`)."""

    q: tl.tuple
    d_out: tl.tuple
    norm: tl.tensor
    offset: tl.tensor
    share: tl.tensor
    alibi: tl.tensor  # the rows' slopes
    scales: tl.tuple
    table: tl.tuple  # the rows' tables of the relative bias


@triton.jit
def visit_rows(keys, sums, arrays, blocks, seeing, mask, CONFIG: tl.constexpr, MASKED: tl.constexpr):
    """Add the contributions of blocks of rows to the `sums` (dk / sm_scale, dv) of a block of keys; returns the sums.

    Without MASKED, every row must see every key. With MASKED, only rows in [seeing.first, seeing.last) are read. Logits
    are transposed, [keys, rows], so that weights are the left operand of the products over rows without a
    transposition.
    """
    BLOCK_Q: tl.constexpr = CONFIG.BLOCK_Q
    GROUP: tl.constexpr = CONFIG.Q.GROUP
    KIND: tl.constexpr = CONFIG.MASK
    # If four warps have no registers to spare, each iteration computes its addresses; see `aligned_down`. With 128 keys
    # and eight warps, an iteration computes only the addresses of terms; otherwise Triton 3.6 would spill on sm_100.
    MANY_KEYS: tl.constexpr = keys.k[0].shape[0] > 64
    FULL: tl.constexpr = not MANY_KEYS and (CONFIG.K.D > 128 or CONFIG.HAS_SHARE)
    STEP: tl.constexpr = 2 * BLOCK_Q if FULL and keys.k[0].dtype != tl.float32 else 1
    TERMS_STEP: tl.constexpr = 2 * BLOCK_Q if MANY_KEYS else STEP
    for index in range(blocks.num_blocks):
        block = block_start(blocks, index, MASKED, BLOCK_Q)
        row = block + tl.arange(0, BLOCK_Q)
        readable = (row >= seeing.first) & (row < seeing.last)
        ranges = row_ranges(seeing, row, GROUP, KIND)
        if KIND.RANGES > 0 and MASKED:
            kv_len = seeing.num_old + seeing.q_len
            meets, _ = meet_ranges(ranges, seeing.low, seeing.high, kv_len, readable, KIND)
            readable = readable & meets
        q = load_rows(arrays.q, block, readable, MASKED, BLOCK_Q, CONFIG.Q, STEP)
        d_out = load_rows(arrays.d_out, block, readable, MASKED, BLOCK_Q, CONFIG.OUT, STEP)
        products = product(keys.k, q)
        seen = seen_by_rows(ranges, row, seeing, mask, GROUP, KIND)
        HIDDEN: tl.constexpr = MASKED and KIND.HIDES  # otherwise every row sees every key
        norm, offset, share, alibi = load_terms(arrays.terms_ptr, block, readable, MASKED, BLOCK_Q, TERMS_STEP)
        rows = LoadedRows(q, d_out, norm, offset, share, alibi, row, readable, arrays.tables_ptr)
        sums = add_rows(keys, sums, rows, products, seen, HIDDEN, KIND.RANGES > 0 and MASKED, CONFIG)
    return sums


@triton.jit
def visit_all_rows(keys, arrays, edges, seeing, mask, CONFIG: tl.constexpr):
    """(dk / sm_scale, dv) of a block of keys, over all rows that see the keys."""
    sums = (zeros(keys.k[0].shape[0], CONFIG.K), zeros(keys.v[0].shape[0], CONFIG.V))
    sums = visit_rows(keys, sums, arrays, end_blocks(edges, CONFIG.BLOCK_Q), seeing, mask, CONFIG, True)
    return visit_rows(keys, sums, arrays, whole_blocks(edges, CONFIG.BLOCK_Q), seeing, mask, CONFIG, False)


@triton.jit
def seeing_blocks(low, q_start, q_len, kv_len, mask, CONFIG: tl.constexpr):
    """(`Seeing`, `Edges`) of the block of keys from `low` on. Here `Edges` describes blocks of rows, not keys."""
    if CONFIG.MASK.RANGES:
        seeing, edges = seeing_by_ranges(low, q_start, q_len, kv_len, mask, CONFIG)
    else:
        seeing, edges = seeing_in_order(low, q_len, kv_len, mask, CONFIG)
    return seeing, edges


@triton.jit
def seeing_by_ranges(low, q_start, q_len, kv_len, mask, CONFIG: tl.constexpr):
    """`seeing_blocks` for queries that have ranges of keys."""
    BLOCK_Q: tl.constexpr = CONFIG.BLOCK_Q
    GROUP: tl.constexpr = CONFIG.Q.GROUP
    num_old = kv_len - q_len
    key = low + tl.arange(0, CONFIG.BLOCK_KV) - num_old
    high = tl.minimum(low + CONFIG.BLOCK_KV, kv_len)
    ptr = mask.ranges_ptr + tl.cast(q_start, tl.int64) * (2 * CONFIG.MASK.RANGES)
    first, last, whole_first, whole_last = queries_of_keys(ptr, low, high, q_len, kv_len, CONFIG.MASK)
    start = first * GROUP // BLOCK_Q * BLOCK_Q
    end = tl.maximum((last * GROUP + BLOCK_Q - 1) // BLOCK_Q * BLOCK_Q, start)
    whole_start = tl.minimum((whole_first * GROUP + BLOCK_Q - 1) // BLOCK_Q * BLOCK_Q, end)
    whole_stop = tl.maximum(whole_last * GROUP // BLOCK_Q * BLOCK_Q, whole_start)
    seeing = Seeing(first * GROUP, last * GROUP, key, q_len, num_old, ptr, low, high)
    return seeing, Edges(start, whole_start, whole_stop, end, ())


@triton.jit
def seeing_in_order(low, q_len, kv_len, mask, CONFIG: tl.constexpr):
    """`seeing_blocks` without ranges: the first and last visible key never move back from one query to the next."""
    BLOCK_Q: tl.constexpr = CONFIG.BLOCK_Q
    GROUP: tl.constexpr = CONFIG.Q.GROUP
    KIND: tl.constexpr = CONFIG.MASK
    num_old = kv_len - q_len
    high = tl.minimum(low + CONFIG.BLOCK_KV, kv_len) - 1 - num_old
    key = low + tl.arange(0, CONFIG.BLOCK_KV) - num_old
    low -= num_old
    first = first_query(low, q_len, KIND)
    last = tl.maximum(end_query(high, q_len, mask, KIND), first)
    start = first * GROUP // BLOCK_Q * BLOCK_Q
    end = tl.maximum((last * GROUP + BLOCK_Q - 1) // BLOCK_Q * BLOCK_Q, start)
    whole_start = (first_query(high, q_len, KIND) * GROUP + BLOCK_Q - 1) // BLOCK_Q * BLOCK_Q
    whole_start = tl.minimum(whole_start, end)
    whole_stop = tl.maximum(end_query(low, q_len, mask, KIND) * GROUP // BLOCK_Q * BLOCK_Q, whole_start)
    seeing = Seeing(first * GROUP, last * GROUP, key, q_len, num_old, 0, 0, 0)
    return seeing, Edges(start, whole_start, whole_stop, end, ())


@triton.jit(do_not_specialize=VARYING)
def dkv_kernel(
    d_out_ptr, q_ptr, k_ptr, v_ptr, terms_ptr, cu_q_lens_ptr, cu_kv_lens_ptr, bias_ptr, ranges_ptr,
    dk_ptr, dv_ptr,
    num_q_tokens, num_kv_tokens, num_seqs, window, d_out_head_stride, q_head_stride, k_head_stride, v_head_stride,
    sm_scale, soft_cap, CONFIG: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of one KV head's block of keys over all rows that see it. Keys without a sequence get 0."""
    BLOCK_KV: tl.constexpr = CONFIG.BLOCK_KV
    block = tl.program_id(0)  # start with the first keys, which the most rows see under a causal mask
    kv_head = tl.program_id(1)
    mask = Mask(window, ranges_ptr=ranges_ptr)
    start, kv_len, low, q_start, q_len = find_block(
        block, cu_kv_lens_ptr, cu_q_lens_ptr, num_seqs, num_kv_tokens, num_q_tokens, 1, BLOCK_KV
    )
    if (low >= 0) & (low < kv_len):
        key = low + tl.arange(0, BLOCK_KV)
        readable = first_of_block(kv_len - low, BLOCK_KV)
        if CONFIG.MASK.HAS_WINDOW:  # keys that no row sees may be NaN, so they are not read
            position = tl.maximum(kv_len - q_len, 0) - low  # the first query that can see keys, relative to `low`
            readable = readable & (tl.arange(0, BLOCK_KV) >= first_key(position, mask, CONFIG.MASK))
        arrays = RowArrays(
            rows_of(q_ptr, q_start, kv_head, q_head_stride, CONFIG.Q),
            rows_of(d_out_ptr, q_start, kv_head, d_out_head_stride, CONFIG.OUT),
            terms_ptr + (kv_head.to(tl.int64) * num_q_tokens + q_start) * (CONFIG.Q.GROUP * TERMS),
            tables_of_head(bias_ptr, q_start, kv_head, CONFIG.BIAS, CONFIG.Q.GROUP),
        )
        k_rows = rows_of(k_ptr, start, kv_head, k_head_stride, CONFIG.K)
        v_rows = rows_of(v_ptr, start, kv_head, v_head_stride, CONFIG.V)
        scales = signed_scales(sm_scale, soft_cap, CONFIG.HAS_SOFT_CAP)
        k = load_rows(k_rows, low, readable, True, BLOCK_KV, CONFIG.K)
        v = load_rows(v_rows, low, readable, True, BLOCK_KV, CONFIG.V)
        seeing, edges = seeing_blocks(low, q_start, q_len, kv_len, mask, CONFIG)
        dk, dv = visit_all_rows(KeyBlock(k, v, seeing.key, scales), arrays, edges, seeing, mask, CONFIG)

        writable = key < kv_len
        store_rows(dk_ptr, start + low, kv_head, 0, times(dk, sm_scale), writable, BLOCK_KV, CONFIG.K)
        store_rows(dv_ptr, start + low, kv_head, 0, dv, writable, BLOCK_KV, CONFIG.V)


@triton.jit
def add_keys(rows, dq, keys, products, seen, visible, HIDDEN: tl.constexpr, CONFIG: tl.constexpr):
    """Add the contributions of keys to `dq`, the dq / sm_scale of a block of rows; returns the sum.

    `products` has the products of the keys with q, and of the values with d_out. Without HIDDEN, every row sees every
    key.
    """
    products, d_weights = products
    norm = rows.norm[:, None]
    if CONFIG.HAS_ALIBI:
        norm = norm - rows.alibi[:, None] * (keys.key[None, :] - visible.position[:, None]).to(tl.float32)
    if CONFIG.BIAS.WIDTH:
        distance = visible.position[:, None] - keys.key[None, :]
        norm = norm - entries(rows.table.rows[:, None], distance, rows.table.exists[:, None], CONFIG.BIAS)
    weights, slope = weigh(products, norm, seen, rows.scales, HIDDEN, CONFIG.HAS_SOFT_CAP)
    d_logits = logit_gradients(weights, slope, d_weights, rows.offset[:, None], rows.share[:, None], CONFIG)
    if (CONFIG.MASK.RANGES > 0 or CONFIG.LISTS is not None) and HIDDEN:  # rows that see no key may be NaN
        d_logits = tl.where(seen, d_logits, 0.0)
    return accumulate(narrow(d_logits, rows.q[0].dtype), keys.k, dq)


@triton.jit
def visit_keys(rows, dq, arrays, blocks, visible, mask, CONFIG: tl.constexpr, MASKED: tl.constexpr,
               EXACT: tl.constexpr = False):  # fmt: skip
    """Add the contributions of blocks of keys to `dq`, the dq / sm_scale of a block of rows; returns the sum.

    MASKED and EXACT are explained in `varlen_attention.attend`.
    """
    BLOCK_KV: tl.constexpr = CONFIG.BLOCK_KV
    for index in range(blocks.num_blocks):
        block = block_start(blocks, index, MASKED, BLOCK_KV)
        key = block + tl.arange(0, BLOCK_KV)
        readable = may_read(key, visible, CONFIG.MASK, EXACT)
        k = load_rows(arrays.k, block, readable, MASKED, BLOCK_KV, CONFIG.K)
        v = load_rows(arrays.v, block, readable, MASKED, BLOCK_KV, CONFIG.V)
        products = (product(rows.q, k), product(rows.d_out, v))
        seen = sees_of(visible, key, mask, CONFIG.MASK)
        dq = add_keys(rows, dq, KeyBlock(k, v, key, rows.scales), products, seen, visible, MASKED, CONFIG)
    return dq


@triton.jit
def visit_all_keys(rows, arrays, edges, visible, mask, CONFIG: tl.constexpr):
    """dq / sm_scale of a block of rows."""
    dq = zeros(rows.norm.shape[0], CONFIG.Q)
    dq = visit_keys(rows, dq, arrays, whole_blocks(edges, CONFIG.BLOCK_KV), visible, mask, CONFIG, False)
    ends = end_blocks(edges, CONFIG.BLOCK_KV)
    if CONFIG.MASK.RANGES:
        exact, ends = exact_and_other_ends(edges, visible.ranges.solid, CONFIG.BLOCK_KV, CONFIG.BLOCK_KV)
        dq = visit_keys(rows, dq, arrays, exact, visible, mask, CONFIG, True, EXACT=True)
    return visit_keys(rows, dq, arrays, ends, visible, mask, CONFIG, True)


@triton.jit
def visit_blocks(rows, arrays, visits, visible, mask, CONFIG: tl.constexpr):
    """dq / sm_scale of a job's rows over the blocks that its lists name."""
    LISTS: tl.constexpr = CONFIG.LISTS
    BLOCK_KV: tl.constexpr = CONFIG.BLOCK_KV
    dq = zeros(rows.norm.shape[0], CONFIG.Q)
    following = blocks_of_step(visits, 0, LISTS, BLOCK_KV)
    for step in range(visits.end):
        block = following
        following = blocks_of_step(visits, step + 1, LISTS, BLOCK_KV)
        key, readable, seen = keys_of_step(visits, block, step, mask, LISTS, BLOCK_KV)
        k = gather_rows(arrays.k, key, 0, readable, CONFIG.K)
        v = gather_rows(arrays.v, key, 0, readable, CONFIG.V)
        products = (product(rows.q, k), product(rows.d_out, v))
        dq = add_keys(rows, dq, KeyBlock(k, v, key, rows.scales), products, seen, visible, True, CONFIG)
    return dq


@triton.jit(do_not_specialize=VARYING)
def dq_kernel(
    d_out_ptr, q_ptr, k_ptr, v_ptr, terms_ptr, cu_q_lens_ptr, cu_kv_lens_ptr, bias_ptr, ranges_ptr, lists_ptr,
    dq_ptr,
    num_q_tokens, num_kv_tokens, num_seqs, window, d_out_head_stride, q_head_stride, k_head_stride, v_head_stride,
    sm_scale, soft_cap, CONFIG: tl.constexpr,
):  # fmt: skip
    """Compute dq of a block of rows of one KV head over all keys that they see. Rows without a sequence get 0."""
    GROUP: tl.constexpr = CONFIG.Q.GROUP
    BLOCK_Q: tl.constexpr = CONFIG.BLOCK_Q
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # a sequence's last rows come first: they may see the most keys
    kv_head = tl.program_id(1)
    mask = Mask(window, ranges_ptr=ranges_ptr)
    job = find_job(block, cu_q_lens_ptr, cu_kv_lens_ptr, num_seqs, num_q_tokens, num_kv_tokens, CONFIG)
    start = job.start
    first_row = job.first_row
    if (first_row >= 0) & (first_row < job.end_row):
        row = first_row + tl.arange(0, BLOCK_Q)
        readable = first_of_block(job.end_row - first_row, BLOCK_Q)
        if CONFIG.MASK.CAUSAL:  # rows that see no key may be NaN, so they are not read
            readable = readable & (row >= (job.q_len - job.kv_len) * GROUP)
        q_rows = rows_of(q_ptr, start, kv_head, q_head_stride, CONFIG.Q)
        d_out_rows = rows_of(d_out_ptr, start, kv_head, d_out_head_stride, CONFIG.OUT)
        k_rows = rows_of(k_ptr, job.kv_start, kv_head, k_head_stride, CONFIG.K)
        v_rows = rows_of(v_ptr, job.kv_start, kv_head, v_head_stride, CONFIG.V)
        terms_ptr += (kv_head.to(tl.int64) * num_q_tokens + start) * (GROUP * TERMS)
        scales = signed_scales(sm_scale, soft_cap, CONFIG.HAS_SOFT_CAP)
        q = load_rows(q_rows, first_row, readable, True, BLOCK_Q, CONFIG.Q)
        d_out = load_rows(d_out_rows, first_row, readable, True, BLOCK_Q, CONFIG.OUT)
        norm, offset, share, alibi = load_terms(terms_ptr, first_row, readable, True, BLOCK_Q)
        tables_ptr = tables_of_head(bias_ptr, start, kv_head, CONFIG.BIAS, GROUP)
        table = Table(row_tables(tables_ptr, row, CONFIG.BIAS, GROUP), row < job.end_row)
        rows = RowBlock(q, d_out, norm, offset, share, alibi, scales, table)
        if CONFIG.LISTS is None:
            block_rows = Rows(row, job.end_row, start, kv_head)
            visible, edges = visible_blocks(block_rows, first_row, job.q_len, job.kv_len, mask, CONFIG)
            dq = visit_all_keys(rows, Keys(k_rows, v_rows), edges, visible, mask, CONFIG)
        else:
            visits, visible = visits_of_job(lists_ptr, job, kv_head, CONFIG)
            dq = visit_blocks(rows, Keys(k_rows, v_rows), visits, visible, mask, CONFIG)
        store_rows(dq_ptr, start, kv_head, first_row, times(dq, sm_scale), row < job.end_row, BLOCK_Q, CONFIG.Q)


def prepare(call: Any, d_out: Any, launch: Any) -> tuple[Any, Any | None]:
    """Enqueue `prepare_kernel`; returns all rows' terms and the parts [blocks, H] of d_sinks (None without sinks)."""
    out, lse = launch.packed(call.out), launch.packed(call.lse)
    d_lse = lse if call.d_lse is None else launch.packed(call.d_lse)
    pad = next_power_of_2(call.v_head_dim)
    block = max(16, min(128, PREPARED // pad))
    blocks = cdiv(call.num_q_tokens, block)
    sinks, slopes = (lse if heads is None else launch.packed(heads) for heads in (call.sinks, call.alibi_slopes))
    terms, parts = launch(
        prepare_kernel,
        (blocks, call.num_q_heads),
        (out, d_out, lse, d_lse, sinks, slopes),
        [
            ((call.num_kv_heads, call.num_q_tokens, call.group, TERMS.value), "float32"),
            ((1, 1) if call.sinks is None else (blocks, call.num_q_heads), "float32"),
        ],
        num_warps=4,
        num_tokens=call.num_q_tokens,
        lse_stride=launch.strides(lse)[0],
        d_lse_stride=launch.strides(d_lse)[0],
        HAS_SINKS=call.sinks is not None,
        HAS_D_LSE=call.d_lse is not None,
        HAS_ALIBI=call.alibi_slopes is not None,
        GROUP=call.group,
        NUM_HEADS=call.num_q_heads,
        DV=call.v_head_dim,
        DV_PAD=pad,
        BLOCK=block,
        **stride_arguments(launch, ("token", "head"), out=out, d_out=d_out),
    )
    return terms, None if call.sinks is None else parts


def has_share(call: Any) -> bool:
    return call.sinks is not None and call.d_lse is not None


def key_gradients(call: Any, tile: Tile, launch: Any, inputs: Any, numbers: Any, config: dict[str, Any]) -> Any:
    """Enqueue the dk and dv kernel; returns dk and dv."""
    return launch(
        dkv_kernel,
        (max_blocks(call.num_kv_tokens, tile.block_kv, call.num_seqs), call.num_kv_heads),
        inputs,
        [(call.k.shape, call.k.dtype), (call.v.shape, call.v.dtype)],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        CONFIG=Config(BLOCK_Q=tile.block_q, BLOCK_KV=tile.block_kv, **config),
        **numbers,
    )


def run(call: VarlenAttentionBackward, tile: Tile, launch: Any) -> Any:
    """Enqueue the kernels; returns dq, dk, dv, d_sinks and d_relative_bias. d_sinks and d_relative_bias may be None."""
    arrays, edges, numbers, config = _varlen.shared_arguments(call, launch, "d_out", "q", "k", "v")
    terms, parts = prepare(call, arrays["d_out"], launch)
    bias, config["BIAS"] = bias_arguments(call, launch, edges[0])
    inputs = (*arrays.values(), terms, *edges, bias, ranges_array(call, launch, edges[0]))
    config["HAS_SHARE"] = has_share(call)
    named, lists = _varlen.lists_of(call, launch, tile.joined_tokens, edges, numbers, config["MASK"])
    programs, block_q = _varlen.programs(call, tile.dq_block_q, lists)
    [dq] = launch(
        dq_kernel,
        (programs, call.num_kv_heads),
        (*inputs, named),
        [(call.q.shape, call.q.dtype)],
        num_warps=tile.dq_num_warps,
        num_stages=tile.dq_num_stages,
        CONFIG=Config(BLOCK_Q=block_q, BLOCK_KV=tile.dq_block_kv, LISTS=lists, **config),
        **numbers,
    )
    if lists is None:
        dk, dv = key_gradients(call, tile, launch, inputs, numbers, config)
    else:
        dk, dv = _selected_gradient.key_gradients(call, tile, launch, inputs, edges, numbers, config)
    d_sinks = None if parts is None else column_sums(parts, launch)
    d_bias = bias_gradient(call, tile, launch, inputs, edges, numbers, config) if call.has_d_relative_bias else None
    return dq, dk, dv, d_sinks, d_bias
