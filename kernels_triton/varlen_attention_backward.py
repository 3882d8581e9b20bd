"""The gradient of attention over packed sequences in Triton: logits are computed again, from the log-sum-exp.

A kernel over rows prepares what every key of a row needs of it; one over blocks of keys has dk and dv, visiting the
rows that see them; one over blocks of rows has dq, visiting the keys that they see. That is two products more than a
single kernel would need that adds to dq in memory, and every sum has one order: the same bits in every run.

With the sink in the denominator, weight = exp(logit - lse) * share is one exponential again, and of each row two
numbers are enough: `norm`, in base 2, so that weight = 2^(logit - norm), and `offset`, so that
d_logit = weight * (d_out . v + offset). Only sinks together with a gradient of lse need `share` itself.
"""

# Triton's language only looks like Python: its constexprs and early-bound branches defeat a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false

import dataclasses
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ragged_attention.calls import VarlenAttentionBackward
from ragged_attention.kernels_triton import _varlen
from ragged_attention.kernels_triton._formats import narrow
from ragged_attention.kernels_triton._sequences import VARYING, Edges, block_start, end_blocks, whole_blocks
from ragged_attention.kernels_triton._softmax import LOG2E, column_sums, soft_capped, sum_of_products
from ragged_attention.kernels_triton._tiles import (
    OLDER_COMPILER,
    WGMMA,
    cdiv,
    expect_between,
    expect_power_of_two,
    launchable_in_float32,
    next_power_of_2,
    on_cuda_cores,
)
from ragged_attention.kernels_triton._varlen import (
    Array,
    Features,
    Visible,
    Widths,
    accumulate,
    before,
    find_block,
    head_start,
    key_blocks,
    load_columns,
    load_rows,
    logit_scales,
    product,
    sees,
    store_rows,
    times,
    zeros,
)

PREPARED = 2048  # elements of `out` that one program of the first kernel reads
TERMS: tl.constexpr = tl.constexpr(4)  # numbers of a row, with one to spare
FEATURES = frozenset({
    "d_lse", "max_q_len", "max_kv_len", "sm_scale", "causal", "sliding_window", "soft_cap", "sinks", "deterministic",
})  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """What may be tuned. Rows are query tokens times heads of a group."""

    block_q: int = 64  # rows per step of the kernel of dk and dv
    block_kv: int = 64  # keys of one of its programs
    num_warps: int = 4
    num_stages: int = 2
    dq_block_q: int = 64  # rows of a program of the kernel of dq
    dq_block_kv: int = 64  # its keys per step
    dq_num_warps: int = 4
    dq_num_stages: int = 2

    def __post_init__(self) -> None:
        blocks = ("block_q", "block_kv", "dq_block_q", "dq_block_kv")
        expect_power_of_two(self, **dict.fromkeys(blocks, (16, 256)), num_warps=(1, 16), dq_num_warps=(1, 16))
        expect_between(self, num_stages=(1, 8), dq_num_stages=(1, 8))


def why_not(call: VarlenAttentionBackward) -> str | None:
    return launchable_in_float32(call, dkv_kernel)


def heuristic(call: VarlenAttentionBackward) -> Tile:
    """Tiles that fit registers and shared memory; see docs/compile_matrix.md."""
    columns = _varlen.columns(call)
    block_q, block_kv, num_warps, num_stages = dkv_sizes(call)
    block_kv = min(block_kv, max(16, next_power_of_2(call.num_kv_tokens)))
    block_q, num_stages = _varlen.fit_rows(call, block_kv * columns, block_q, num_stages)
    dq_block_q, dq_block_kv, dq_num_warps, dq_num_stages = dq_sizes(call)
    dq_block_q = _varlen.rows_at_most(call, dq_block_q)
    dq_block_kv, dq_num_stages = _varlen.fit_rows(call, dq_block_q * columns, dq_block_kv, dq_num_stages)
    return Tile(
        block_q=block_q,
        block_kv=block_kv,
        num_warps=num_warps,
        num_stages=num_stages,
        dq_block_q=dq_block_q,
        dq_block_kv=dq_block_kv,
        dq_num_warps=dq_num_warps,
        dq_num_stages=dq_num_stages,
    )


def stages_on_amd(arch: str, columns: int, most: int = 320) -> int:
    """Two where copies go straight to shared memory: through registers they take a second program's."""
    return 2 if arch == "gfx950" and columns <= most else 1


def dkv_sizes(call: Any) -> tuple[int, int, int, int]:
    """Rows per step, keys, warps and stages of the kernel of dk and dv, both of which it holds in registers."""
    arch, columns = call.device.arch, _varlen.columns(call)
    if call.device.platform == "cpu":
        return 64, 64, 4, 2
    if on_cuda_cores(call):
        return 16, 16, 4, 1
    if not arch.startswith("sm_"):
        num_stages = stages_on_amd(arch, columns, 256 if OLDER_COMPILER else 320)
        return 32, 64 if columns <= 320 and call.soft_cap is None else 32, 4, num_stages
    if arch == "sm_90":
        return dkv_sizes_of_hopper(call, columns)
    if arch in WGMMA:
        return 64 if columns <= 256 else 32, 128 if columns <= 320 else 64, 8, 2
    if columns <= 128:
        return 32, 128, 8, 2
    return (64, 64, 8, 2) if columns <= 256 else (32, 64, 8, 2) if columns <= 384 else (32, 32, 8, 2)


def dkv_sizes_of_hopper(call: Any, columns: int) -> tuple[int, int, int, int]:
    """64 keys and four warps where these hold both sums: two programs a multiprocessor then do not wait for each other.

    Sums of 320 columns leave few registers, which masks, soft caps and shares contend for.
    """
    if columns <= 256:
        return 64 if columns <= 128 else 32, 64, 4, 3
    if columns > 320:
        return 32, 32, 8, 3
    simple = call.soft_cap is None and not has_share(call)
    if OLDER_COMPILER:
        return 32, 128 if simple and 64 % call.group == 0 else 64, 8, 3
    return 32 if simple and call.causal else 16, 64, 4, 3


def dq_sizes(call: Any) -> tuple[int, int, int, int]:
    """Rows, keys per step, warps and stages of the kernel of dq."""
    arch, columns = call.device.arch, _varlen.columns(call)
    if call.device.platform == "cpu":
        return 64, 64, 4, 2
    if on_cuda_cores(call):
        return 16, 16, 8 if arch.startswith("sm_") else 4, 1
    if not arch.startswith("sm_"):
        return 64 if columns <= 320 else 32, 32, 4, stages_on_amd(arch, columns)
    if arch == "sm_90" and columns <= 192:
        return 64, 64, 4, 3
    if arch in WGMMA:
        num_stages = 3 if arch == "sm_90" or columns <= 256 else 2
        return 128, 64 if columns <= 320 else 32, 8, num_stages
    return (64, 64, 8, 2) if columns <= 256 else (64, 32, 8, 2) if columns <= 384 else (32, 32, 8, 2)


@triton.jit(do_not_specialize=VARYING)
def prepare_kernel(
    out_ptr, d_out_ptr, lse_ptr, d_lse_ptr, sinks_ptr,
    terms_ptr, parts_ptr,
    num_tokens, out_token_stride, out_head_stride, d_out_token_stride, d_out_head_stride, lse_stride, d_lse_stride,
    HAS_SINKS: tl.constexpr, HAS_D_LSE: tl.constexpr,
    GROUP: tl.constexpr, NUM_HEADS: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of a block of tokens of one head: `norm`, `offset` and `share`.

    They go to `terms` [K, T_q, GROUP, TERMS] in the order in which `load_terms` has them; the block's part of the
    head's d_sink to `parts` [blocks, H]. Rows whose lse is -inf take no part: their norm is inf, all else is 0.
    """
    block = tl.program_id(0)
    head = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    lse = tl.load(lse_ptr + token.to(tl.int64) * lse_stride + head, mask=inside, other=float("-inf"))
    some = lse != float("-inf")
    out_offsets = token.to(tl.int64) * out_token_stride + head.to(tl.int64) * out_head_stride
    d_out_offsets = token.to(tl.int64) * d_out_token_stride + head.to(tl.int64) * d_out_head_stride
    out = load_columns(out_ptr, out_offsets, some, True, DV, 0, DV_PAD).to(tl.float32)
    d_out = load_columns(d_out_ptr, d_out_offsets, some, True, DV, 0, DV_PAD).to(tl.float32)
    delta = sum_of_products(out, d_out, some[:, None], 1)
    norm = lse * LOG2E
    offset = -delta
    share = tl.full([BLOCK], 1.0, tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head)
        # sigmoid(lse - sink) and its complement to 1, neither by subtraction
        tail = tl.math.exp2(-tl.abs(lse - sink) * LOG2E)
        small = tail / (1 + tail)
        large = 1 / (1 + tail)
        lost = tl.where(lse < sink, large, small)
        tl.store(parts_ptr + block.to(tl.int64) * NUM_HEADS + head, tl.sum(tl.where(some, -lost * delta, 0.0), 0))
        if HAS_D_LSE:
            share = tl.where(lse < sink, small, large)
            offset = share * offset
        else:
            norm = tl.maximum(lse, sink) * LOG2E + tl.math.log2(1 + tail)
    if HAS_D_LSE:
        offset += tl.load(d_lse_ptr + token.to(tl.int64) * d_lse_stride + head, mask=some, other=0.0)
    norm = tl.where(some, norm, float("inf"))
    offset = tl.where(some, offset, 0.0)
    share = tl.where(some, share, 0.0)
    row_terms = terms_ptr + (((head // GROUP).to(tl.int64) * num_tokens + token) * GROUP + head % GROUP) * TERMS
    terms = tl.join(tl.join(norm, share), tl.join(offset, share))
    terms = tl.reshape(terms, [BLOCK, TERMS])
    tl.store(row_terms[:, None] + tl.arange(0, TERMS)[None, :], terms, mask=inside[:, None])


@triton.jit
def weigh(products, norm, seen, scales, MASKED: tl.constexpr, HAS_SOFT_CAP: tl.constexpr):
    """(weights, slope) of pairs of row and key, from q . k: 2^(logit - norm) and the slope of the soft cap there."""
    inner, outer, cap = scales
    slope = 1.0
    if HAS_SOFT_CAP:
        products = soft_capped(products * inner, cap)
        share_of_cap = products * (1.0 / cap)
        slope = 1 - share_of_cap * share_of_cap
    exponents = products * outer - norm
    if MASKED:
        exponents = tl.where(seen, exponents, float("-inf"))
    return tl.math.exp2(exponents), slope


@triton.jit
def change(weights, slope, d_weights, offset, share, HAS_SOFT_CAP: tl.constexpr, HAS_SHARE: tl.constexpr):
    """d_products / sm_scale of pairs of row and key, from d_out . v."""
    if HAS_SHARE:
        d_weights = share * d_weights
    d_logits = weights * d_weights + weights * offset
    if HAS_SOFT_CAP:
        d_logits = d_logits * slope
    return d_logits


class Seeing(NamedTuple):
    """Which rows of a sequence see the keys of a block; tokens are counted from the first query, so that rows need no
    registers for positions."""

    first: tl.tensor  # the rows [first, last) see some key
    last: tl.tensor
    key: tl.tensor
    q_len: tl.tensor  # where keys end, too
    window: tl.tensor


class RowTerms(NamedTuple):
    """A block of rows, and what keys need to know of them."""

    q: tl.tuple
    d_out: tl.tuple
    norm: tl.tensor
    offset: tl.tensor
    share: tl.tensor


@triton.jit
def visit_rows(
    keys, sums, q_array, d_out_array, terms_ptr, blocks, seeing, scales, features, MASKED: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, widths, v_widths,
):  # fmt: skip
    """What blocks of rows add to `sums` = (dk, dv) of `keys` = (k, v).

    Unmasked, every row must see every key. Masked, only rows in [first, last) are read at all. Products have keys for
    rows, so that weights are at hand as the left operand of the sums over rows.
    """
    k, v = keys
    dk, dv = sums
    # Addresses that are computed anew leave registers to the sums where four warps have them; eight do without.
    tokens: tl.constexpr = 2 * BLOCK_Q if k[0].shape[0] <= 64 and k[0].dtype != tl.float32 else 1
    for index in range(blocks.num_blocks):
        block = block_start(blocks, index, MASKED, BLOCK_Q)
        row = block + tl.arange(0, BLOCK_Q)
        readable = (row >= seeing.first) & (row < seeing.last)
        q = load_rows(q_array, block, readable, MASKED, GROUP, BLOCK_Q, widths, tokens)
        d_out = load_rows(d_out_array, block, readable, MASKED, GROUP, BLOCK_Q, v_widths, tokens)
        products = product(k, q)
        seen = sees((row // GROUP)[None, :], seeing.key[:, None], seeing.q_len, seeing.window, features.CAUSAL,
                    features.HAS_WINDOW)  # fmt: skip
        norm, offset, share = load_terms(terms_ptr, block, readable, MASKED, BLOCK_Q)
        # Without these two a key is seen by every row that there is.
        hidden: tl.constexpr = MASKED and (features.CAUSAL or features.HAS_WINDOW)
        weights, slope = weigh(products, norm[None, :], seen, scales, hidden, features.HAS_SOFT_CAP)
        shared = weights
        if features.HAS_SHARE:
            shared = weights * share[None, :]
        dv = accumulate(narrow(shared, d_out[0].dtype), d_out, dv)
        d_weights = product(v, d_out)
        d_logits = change(weights, slope, d_weights, offset[None, :], share[None, :], features.HAS_SOFT_CAP,
                          features.HAS_SHARE)  # fmt: skip
        dk = accumulate(narrow(d_logits, q[0].dtype), q, dk)
    return dk, dv


@triton.jit
def visit_all_rows(keys, q_array, d_out_array, terms_ptr, edges, seeing, scales, features, GROUP: tl.constexpr,
                   BLOCK_Q: tl.constexpr, widths, v_widths):  # fmt: skip
    """dk and dv of `keys` = (k, v), but for the scale."""
    k, v = keys
    sums = (zeros(k[0].shape[0], widths), zeros(v[0].shape[0], v_widths))
    sums = visit_rows(keys, sums, q_array, d_out_array, terms_ptr, end_blocks(edges, BLOCK_Q), seeing, scales, features,
                      True, GROUP, BLOCK_Q, widths, v_widths)  # fmt: skip
    return visit_rows(keys, sums, q_array, d_out_array, terms_ptr, whole_blocks(edges, BLOCK_Q), seeing, scales,
                      features, False, GROUP, BLOCK_Q, widths, v_widths)  # fmt: skip


@triton.jit
def load_terms(terms_ptr, first, readable, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """(norm, offset, share) of the rows [first, first + BLOCK); 0 where not readable, where neither q nor d_out will
    be anything else.

    Each is loaded by itself, so that it takes registers no sooner than it is needed.
    """
    beyond = first % (2 * BLOCK)  # for what it is good says `row_offsets`
    row_terms = terms_ptr + tl.cast(first - beyond, tl.int64) * TERMS + (beyond + tl.arange(0, BLOCK)) * TERMS
    terms = ()
    for index in tl.static_range(3):
        one = tl.load(row_terms + index, mask=readable, other=0.0) if MASKED else tl.load(row_terms + index)
        terms += (one,)
    return terms


@triton.jit
def row_blocks(low, high, q_len, kv_len, window, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, GROUP: tl.constexpr,
               BLOCK_Q: tl.constexpr):  # fmt: skip
    """(first, last, edges) for the keys [low, high]: rows [first, last) see some of them, and in the picture of `Edges`
    rows stand for keys and keys for queries."""
    ahead = kv_len - q_len
    first = 0
    whole_first = 0
    if CAUSAL:
        first = tl.minimum(tl.maximum(low - ahead, 0), q_len)
        whole_first = tl.minimum(tl.maximum(high - ahead, 0), q_len)
    last = q_len
    whole_last = q_len
    if HAS_WINDOW:
        last = tl.minimum(tl.maximum(high + window - ahead, first), q_len)
        whole_last = tl.minimum(tl.maximum(low + window - ahead, 0), q_len)
    start = first * GROUP // BLOCK_Q * BLOCK_Q
    end = tl.maximum((last * GROUP + BLOCK_Q - 1) // BLOCK_Q * BLOCK_Q, start)
    whole_start = tl.minimum((whole_first * GROUP + BLOCK_Q - 1) // BLOCK_Q * BLOCK_Q, end)
    whole_stop = tl.maximum(whole_last * GROUP // BLOCK_Q * BLOCK_Q, whole_start)
    return first * GROUP, last * GROUP, Edges(start, whole_start, whole_stop, end)


@triton.jit(do_not_specialize=VARYING)
def dkv_kernel(
    d_out_ptr, q_ptr, k_ptr, v_ptr, terms_ptr, cu_q_lens_ptr, cu_kv_lens_ptr,
    dk_ptr, dv_ptr,
    num_q_tokens, num_kv_tokens, num_seqs, window,
    d_out_head_stride, q_head_stride, k_head_stride, v_head_stride,
    sm_scale, soft_cap,
    d_out_token_stride: tl.constexpr, q_token_stride: tl.constexpr, k_token_stride: tl.constexpr,
    v_token_stride: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr, HAS_SHARE: tl.constexpr, CAUSAL: tl.constexpr,
    GROUP: tl.constexpr, NUM_HEADS: tl.constexpr, D: tl.constexpr, D_MAIN: tl.constexpr, D_REST: tl.constexpr,
    DV: tl.constexpr, DV_MAIN: tl.constexpr, DV_REST: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys of one KV head, over all rows that see it; keys of no sequence get 0."""
    block = tl.program_id(0)  # under a causal mask the first keys are seen by the most rows: begin with them
    kv_head = tl.program_id(1)
    start, kv_len, low, q_start, q_len = find_block(
        block, cu_kv_lens_ptr, cu_q_lens_ptr, num_seqs, num_kv_tokens, num_q_tokens, 1, BLOCK_KV
    )
    if (low >= 0) & (low < kv_len):
        key = low + tl.arange(0, BLOCK_KV)
        readable = before(kv_len - low, BLOCK_KV)
        if HAS_WINDOW:  # what no row sees is not read; then masks on the logits are enough
            readable = readable & (tl.arange(0, BLOCK_KV) > tl.maximum(kv_len - q_len, 0) - window - low)
        k_ptr = head_start(k_ptr, start, kv_head, k_token_stride, k_head_stride, 1)
        v_ptr = head_start(v_ptr, start, kv_head, v_token_stride, v_head_stride, 1)
        q_ptr = head_start(q_ptr, q_start, kv_head, q_token_stride, q_head_stride, GROUP)
        d_out_ptr = head_start(d_out_ptr, q_start, kv_head, d_out_token_stride, d_out_head_stride, GROUP)
        terms_ptr += (kv_head.to(tl.int64) * num_q_tokens + q_start) * (GROUP * TERMS)
        scales = logit_scales(sm_scale, soft_cap, HAS_SOFT_CAP)
        k = load_rows(Array(k_ptr, k_token_stride, 0), low, readable, True, 1, BLOCK_KV, Widths(D, D_MAIN, D_REST))
        v = load_rows(Array(v_ptr, v_token_stride, 0), low, readable, True, 1, BLOCK_KV, Widths(DV, DV_MAIN, DV_REST))
        first, last, edges = row_blocks(
            low, tl.minimum(low + BLOCK_KV, kv_len) - 1, q_len, kv_len, window, CAUSAL, HAS_WINDOW, GROUP, BLOCK_Q,
        )  # fmt: skip
        dk, dv = visit_all_rows(
            (k, v), Array(q_ptr, q_token_stride, q_head_stride),
            Array(d_out_ptr, d_out_token_stride, d_out_head_stride), terms_ptr, edges,
            Seeing(first, last, key - (kv_len - q_len), q_len, window), scales,
            Features(CAUSAL, HAS_WINDOW, HAS_SOFT_CAP, HAS_SHARE), GROUP, BLOCK_Q, Widths(D, D_MAIN, D_REST),
            Widths(DV, DV_MAIN, DV_REST),
        )  # fmt: skip

        writable = key < kv_len
        heads: tl.constexpr = NUM_HEADS // GROUP
        dk_ptr = head_start(dk_ptr, start + low, kv_head, heads * D, D, 1)
        dv_ptr = head_start(dv_ptr, start + low, kv_head, heads * DV, DV, 1)
        store_rows(Array(dk_ptr, heads * D, D), 0, times(dk, sm_scale), writable, 1, BLOCK_KV,
                   Widths(D, D_MAIN, D_REST))  # fmt: skip
        store_rows(Array(dv_ptr, heads * DV, DV), 0, dv, writable, 1, BLOCK_KV, Widths(DV, DV_MAIN, DV_REST))


@triton.jit
def visit_keys(
    rows, dq, k_array, v_array, blocks, visible, scales, features, MASKED: tl.constexpr, BLOCK_KV: tl.constexpr,
    widths, v_widths,
):  # fmt: skip
    """What blocks of keys add to dq; which they are and what is read of them as in the forward kernel."""
    for index in range(blocks.num_blocks):
        block = block_start(blocks, index, MASKED, BLOCK_KV)
        key = block + tl.arange(0, BLOCK_KV)
        readable = (key >= visible.first) & (key < visible.last)
        k = load_rows(k_array, block, readable, MASKED, 1, BLOCK_KV, widths)
        v = load_rows(v_array, block, readable, MASKED, 1, BLOCK_KV, v_widths)
        products = product(rows.q, k)
        d_weights = product(rows.d_out, v)
        seen = sees(visible.position[:, None], key[None, :], visible.kv_len, visible.window, features.CAUSAL,
                    features.HAS_WINDOW)  # fmt: skip
        weights, slope = weigh(products, rows.norm[:, None], seen, scales, MASKED, features.HAS_SOFT_CAP)
        d_logits = change(weights, slope, d_weights, rows.offset[:, None], rows.share[:, None], features.HAS_SOFT_CAP,
                          features.HAS_SHARE)  # fmt: skip
        dq = accumulate(narrow(d_logits, rows.q[0].dtype), k, dq)
    return dq


@triton.jit
def visit_all_keys(rows, k_array, v_array, edges, visible, scales, features, BLOCK_KV: tl.constexpr, widths, v_widths):
    """dq of a block of rows, but for the scale."""
    dq = zeros(rows.norm.shape[0], widths)
    dq = visit_keys(rows, dq, k_array, v_array, whole_blocks(edges, BLOCK_KV), visible, scales, features, False,
                    BLOCK_KV, widths, v_widths)  # fmt: skip
    return visit_keys(rows, dq, k_array, v_array, end_blocks(edges, BLOCK_KV), visible, scales, features, True,
                      BLOCK_KV, widths, v_widths)  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def dq_kernel(
    d_out_ptr, q_ptr, k_ptr, v_ptr, terms_ptr, cu_q_lens_ptr, cu_kv_lens_ptr,
    dq_ptr,
    num_q_tokens, num_kv_tokens, num_seqs, window,
    d_out_head_stride, q_head_stride, k_head_stride, v_head_stride,
    sm_scale, soft_cap,
    d_out_token_stride: tl.constexpr, q_token_stride: tl.constexpr, k_token_stride: tl.constexpr,
    v_token_stride: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr, HAS_SHARE: tl.constexpr, CAUSAL: tl.constexpr,
    GROUP: tl.constexpr, NUM_HEADS: tl.constexpr, D: tl.constexpr, D_MAIN: tl.constexpr, D_REST: tl.constexpr,
    DV: tl.constexpr, DV_MAIN: tl.constexpr, DV_REST: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """dq of a block of rows of one KV head, over all keys that they see; padding rows get 0."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the last rows see the most keys: begin with them
    kv_head = tl.program_id(1)
    start, q_len, first_row, kv_start, kv_len = find_block(
        block, cu_q_lens_ptr, cu_kv_lens_ptr, num_seqs, num_q_tokens, num_kv_tokens, GROUP, BLOCK_Q
    )
    rows = q_len * GROUP
    if (first_row >= 0) & (first_row < rows):
        row = first_row + tl.arange(0, BLOCK_Q)
        inside = before(rows - first_row, BLOCK_Q)
        if CAUSAL:  # what sees nothing is not read; then masks on the logits are enough
            inside = inside & (row >= (q_len - kv_len) * GROUP)
        low = kv_len - q_len + first_row // GROUP
        high = kv_len - q_len + tl.minimum((first_row + BLOCK_Q - 1) // GROUP, q_len - 1)
        position = kv_len - q_len + row // GROUP
        first, last, edges = key_blocks(low, high, kv_len, window, CAUSAL, HAS_WINDOW, BLOCK_KV)
        q_ptr = head_start(q_ptr, start, kv_head, q_token_stride, q_head_stride, GROUP)
        d_out_ptr = head_start(d_out_ptr, start, kv_head, d_out_token_stride, d_out_head_stride, GROUP)
        k_ptr = head_start(k_ptr, kv_start, kv_head, k_token_stride, k_head_stride, 1)
        v_ptr = head_start(v_ptr, kv_start, kv_head, v_token_stride, v_head_stride, 1)
        terms_ptr += (kv_head.to(tl.int64) * num_q_tokens + start) * (GROUP * TERMS)
        scales = logit_scales(sm_scale, soft_cap, HAS_SOFT_CAP)
        q = load_rows(Array(q_ptr, q_token_stride, q_head_stride), first_row, inside, True, GROUP, BLOCK_Q,
                      Widths(D, D_MAIN, D_REST))  # fmt: skip
        d_out = load_rows(Array(d_out_ptr, d_out_token_stride, d_out_head_stride), first_row, inside, True, GROUP,
                          BLOCK_Q, Widths(DV, DV_MAIN, DV_REST))  # fmt: skip
        norm, offset, share = load_terms(terms_ptr, first_row, inside, True, BLOCK_Q)
        dq = visit_all_keys(
            RowTerms(q, d_out, norm, offset, share), Array(k_ptr, k_token_stride, 0), Array(v_ptr, v_token_stride, 0),
            edges, Visible(first, last, position, kv_len, window), scales,
            Features(CAUSAL, HAS_WINDOW, HAS_SOFT_CAP, HAS_SHARE), BLOCK_KV, Widths(D, D_MAIN, D_REST),
            Widths(DV, DV_MAIN, DV_REST),
        )  # fmt: skip

        dq_ptr = head_start(dq_ptr, start, kv_head, NUM_HEADS * D, D, GROUP)
        store_rows(Array(dq_ptr, NUM_HEADS * D, D), first_row, times(dq, sm_scale), row < rows, GROUP, BLOCK_Q,
                   Widths(D, D_MAIN, D_REST))  # fmt: skip


def prepare(call: Any, d_out: Any, launch: Any) -> tuple[Any, Any | None]:
    """`norm`, `offset` and `share` of all rows, and the parts of d_sinks, if any: [blocks, H]."""
    out, lse = launch.packed(call.out), launch.packed(call.lse)
    d_lse = lse if call.d_lse is None else launch.packed(call.d_lse)
    pad = next_power_of_2(call.v_head_dim)
    block = max(16, min(128, PREPARED // pad))
    blocks = cdiv(call.num_q_tokens, block)
    sinks = lse if call.sinks is None else launch.packed(call.sinks)
    terms, parts = launch(
        prepare_kernel,
        (blocks, call.num_q_heads),
        (out, d_out, lse, d_lse, sinks),
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
        GROUP=call.group,
        NUM_HEADS=call.num_q_heads,
        DV=call.v_head_dim,
        DV_PAD=pad,
        BLOCK=block,
        **_varlen.stride_arguments(launch, out=out, d_out=d_out),
    )
    return terms, None if call.sinks is None else parts


def has_share(call: Any) -> bool:
    return call.sinks is not None and call.d_lse is not None


def run(call: VarlenAttentionBackward, tile: Tile, launch: Any) -> Any:
    """Enqueue the kernels; returns dq, dk, dv and, with sinks, d_sinks."""
    d_out, q = (_varlen.near(array, call.group, launch) for array in (call.d_out, call.q))
    k, v = (_varlen.near(array, 1, launch) for array in (call.k, call.v))
    cu_q_lens, cu_kv_lens = map(launch.packed, (call.cu_q_lens, call.cu_kv_lens))
    terms, parts = prepare(call, d_out, launch)
    inputs = (d_out, q, k, v, terms, cu_q_lens, cu_kv_lens)
    shared = _varlen.shared_arguments(call) | _varlen.stride_arguments(launch, d_out=d_out, q=q, k=k, v=v)
    shared["HAS_SHARE"] = has_share(call)
    row_programs = call.num_q_tokens * call.group // tile.dq_block_q + call.num_seqs + 2
    [dq] = launch(
        dq_kernel,
        (row_programs if call.num_q_tokens else 0, call.num_kv_heads),
        inputs,
        [(call.q.shape, call.q.dtype)],
        num_warps=tile.dq_num_warps,
        num_stages=tile.dq_num_stages,
        BLOCK_Q=tile.dq_block_q,
        BLOCK_KV=tile.dq_block_kv,
        **shared,
    )
    key_programs = call.num_kv_tokens // tile.block_kv + call.num_seqs + 2
    dk, dv = launch(
        dkv_kernel,
        (key_programs if call.num_kv_tokens else 0, call.num_kv_heads),
        inputs,
        [(call.k.shape, call.k.dtype), (call.v.shape, call.v.dtype)],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        BLOCK_Q=tile.block_q,
        BLOCK_KV=tile.block_kv,
        **shared,
    )
    return (dq, dk, dv) if parts is None else (dq, dk, dv, column_sums(parts, launch))
