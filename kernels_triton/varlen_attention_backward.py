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
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

import dataclasses
from typing import Any

import triton
import triton.language as tl

from ragged_attention.calls import VarlenAttentionBackward
from ragged_attention.kernels_triton import _varlen
from ragged_attention.kernels_triton._formats import narrow
from ragged_attention.kernels_triton._sequences import VARYING
from ragged_attention.kernels_triton._softmax import LOG2E, column_sums, tanh
from ragged_attention.kernels_triton._tiles import (
    WGMMA,
    cdiv,
    expect_between,
    expect_power_of_two,
    launchable_in_float32,
    next_power_of_2,
    on_cuda_cores,
)
from ragged_attention.kernels_triton._varlen import (
    accumulate,
    find_block,
    head_start,
    key_blocks,
    load_columns,
    load_rows,
    logit_scales,
    product,
    sees,
    store_rows,
    zeros,
)

PREPARED = 2048  # elements of `out` that one program of the first kernel reads
# Numbers of a row, with one to spare: loaded together they are an asynchronous copy of 16 bytes, alone one of 4 for
# every thread that needs them.
TERMS: tl.constexpr = tl.constexpr(4)
EARLY = triton.__version__.startswith("3.6")  # needs fewer registers for masks than its successors
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


def dkv_sizes(call: Any) -> tuple[int, int, int, int]:
    """Rows per step, keys, warps and stages of the kernel of dk and dv, both of which it holds in registers."""
    arch, columns = call.device.arch, _varlen.columns(call)
    if call.device.platform == "cpu":
        return 64, 64, 4, 2
    if on_cuda_cores(call):
        return 16, 16, 4, 1
    if not arch.startswith("sm_"):
        return 32, 64 if columns <= 320 and call.soft_cap is None else 32, 4, 1
    if arch == "sm_90":
        # Both sums of 64 keys or more, as wgmma wants, leave few registers: 64 rows only where nothing but masks and
        # exponentials is done to logits, and only with a compiler that copes with that.
        simple = call.soft_cap is None and not has_share(call) and 64 % call.group == 0
        if columns <= 256:
            return 64 if simple and EARLY and call.causal and not call.sliding_window else 32, 128, 8, 3
        return (32, 128 if simple and EARLY else 64, 8, 3) if columns <= 320 else (32, 32, 8, 3)
    if arch in WGMMA:
        return 64 if columns <= 256 else 32, 128 if columns <= 320 else 64, 8, 2
    if columns <= 128:
        return 32, 128, 8, 2
    return (64, 64, 8, 2) if columns <= 256 else (32, 64, 8, 2) if columns <= 384 else (32, 32, 8, 2)


def dq_sizes(call: Any) -> tuple[int, int, int, int]:
    """Rows, keys per step, warps and stages of the kernel of dq."""
    arch, columns = call.device.arch, _varlen.columns(call)
    if call.device.platform == "cpu":
        return 64, 64, 4, 2
    if on_cuda_cores(call):
        return 16, 16, 8 if arch.startswith("sm_") else 4, 1
    if not arch.startswith("sm_"):
        return (64, 32, 4, 1) if columns <= 320 else (32, 32, 4, 1)
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
    out_places = token.to(tl.int64) * out_token_stride + head.to(tl.int64) * out_head_stride
    d_out_places = token.to(tl.int64) * d_out_token_stride + head.to(tl.int64) * d_out_head_stride
    out = load_columns(out_ptr, out_places, some, True, DV, 0, DV_PAD).to(tl.float32)
    d_out = load_columns(d_out_ptr, d_out_places, some, True, DV, 0, DV_PAD).to(tl.float32)
    delta = tl.sum(out * d_out, 1)
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
    place = terms_ptr + (((head // GROUP).to(tl.int64) * num_tokens + token) * GROUP + head % GROUP) * TERMS
    terms = tl.join(tl.join(norm, share), tl.join(offset, share))
    tl.store(place[:, None] + tl.arange(0, TERMS)[None, :], tl.reshape(terms, [BLOCK, TERMS]), mask=inside[:, None])


@triton.jit
def weigh(products, norm, seen, inner, outer, MASKED: tl.constexpr, HAS_SOFT_CAP: tl.constexpr):
    """(weights, slope) of pairs of row and key, from q . k: 2^(logit - norm) and the slope of the soft cap there."""
    slope = 1.0
    if HAS_SOFT_CAP:
        products = tanh(products * inner)
        slope = 1 - products * products
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


@triton.jit
def visit_rows(
    k, k_rest, v, v_rest, dk, dk_rest, dv, dv_rest,
    q_ptr, d_out_ptr, terms_ptr, left, left_blocks, right, num_blocks, first, last, key, q_len, kv_len, window,
    q_token_stride, q_head_stride, d_out_token_stride, d_out_head_stride, inner, outer,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr,
    HAS_SHARE: tl.constexpr, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr,
    D: tl.constexpr, D_MAIN: tl.constexpr, D_REST: tl.constexpr,
    DV: tl.constexpr, DV_MAIN: tl.constexpr, DV_REST: tl.constexpr,
):  # fmt: skip
    """What `num_blocks` blocks of rows, `left_blocks` from `left` on and the rest from `right` on, add to dk and dv.

    Unmasked, every row must see every key. Masked, only rows in [first, last) are read at all. Products have keys for
    rows, so that weights are at hand as the left operand of the sums over rows.
    """
    for index in range(num_blocks):
        block = left + index * BLOCK_Q
        if MASKED:
            block = tl.where(index < left_blocks, block, right + (index - left_blocks) * BLOCK_Q)
        row = block + tl.arange(0, BLOCK_Q)
        readable = (row >= first) & (row < last)
        q, q_rest = load_rows(
            q_ptr, block, readable, q_token_stride, q_head_stride, MASKED, GROUP, BLOCK_Q, D, D_MAIN, D_REST
        )  # fmt: skip
        d_out, d_out_rest = load_rows(
            d_out_ptr, block, readable, d_out_token_stride, d_out_head_stride, MASKED, GROUP, BLOCK_Q,
            DV, DV_MAIN, DV_REST,
        )  # fmt: skip
        products = product(k, k_rest, q, q_rest, D_REST)
        position = kv_len - q_len + row // GROUP
        seen = sees(position[None, :], key[:, None], kv_len, window, CAUSAL, HAS_WINDOW)
        norm, offset, share = load_terms(terms_ptr, block, readable, MASKED, BLOCK_Q)
        hidden: tl.constexpr = MASKED and (CAUSAL or HAS_WINDOW)  # else a key is seen by every row that there is
        weights, slope = weigh(products, norm[None, :], seen, inner, outer, hidden, HAS_SOFT_CAP)
        shared = weights
        if HAS_SHARE:
            shared = weights * share[None, :]
        dv, dv_rest = accumulate(narrow(shared, d_out.dtype), d_out, d_out_rest, dv, dv_rest, DV_REST)
        d_weights = product(v, v_rest, d_out, d_out_rest, DV_REST)
        d_logits = change(weights, slope, d_weights, offset[None, :], share[None, :], HAS_SOFT_CAP, HAS_SHARE)
        dk, dk_rest = accumulate(narrow(d_logits, q.dtype), q, q_rest, dk, dk_rest, D_REST)
    return dk, dk_rest, dv, dv_rest


@triton.jit
def load_terms(terms_ptr, first, readable, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """(norm, offset, share) of the rows [first, first + BLOCK); 0 where not readable, where neither q nor d_out will
    be anything else."""
    row = tl.arange(0, BLOCK)
    places = terms_ptr + tl.cast(first, tl.int64) * TERMS + ((row * TERMS)[:, None] + tl.arange(0, TERMS)[None, :])
    terms = tl.load(places, mask=readable[:, None], other=0.0) if MASKED else tl.load(places)
    even, odd = tl.split(tl.reshape(terms, [BLOCK, 2, 2]))
    norm, share = tl.split(even)
    offset, _ = tl.split(odd)
    return norm, offset, share


@triton.jit
def row_blocks(low, high, q_len, kv_len, window, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, GROUP: tl.constexpr,
               BLOCK_Q: tl.constexpr):  # fmt: skip
    """Which rows see keys [low, high]: (first, last, start, whole_start, whole_stop, end), as of `key_blocks`."""
    ahead = kv_len - q_len
    first = 0
    whole = 0
    if CAUSAL:
        first = tl.minimum(tl.maximum(low - ahead, 0), q_len)
        whole = tl.minimum(tl.maximum(high - ahead, 0), q_len)
    last = q_len
    whole_last = q_len
    if HAS_WINDOW:
        last = tl.minimum(tl.maximum(high + window - ahead, first), q_len)
        whole_last = tl.minimum(tl.maximum(low + window - ahead, 0), q_len)
    start = first * GROUP // BLOCK_Q * BLOCK_Q
    end = tl.maximum((last * GROUP + BLOCK_Q - 1) // BLOCK_Q * BLOCK_Q, start)
    whole_start = tl.minimum((whole * GROUP + BLOCK_Q - 1) // BLOCK_Q * BLOCK_Q, end)
    whole_stop = tl.maximum(whole_last * GROUP // BLOCK_Q * BLOCK_Q, whole_start)
    return first * GROUP, last * GROUP, start, whole_start, whole_stop, end


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
        # What no row sees is not read; then masks on the logits are enough. This is not a comparison of `key`, which
        # would stay in registers until it is needed again at the end.
        readable = tl.arange(0, BLOCK_KV) < kv_len - low
        if HAS_WINDOW:
            readable = readable & (tl.arange(0, BLOCK_KV) > tl.maximum(kv_len - q_len, 0) - window - low)
        k_ptr = head_start(k_ptr, start, kv_head, k_token_stride, k_head_stride, 1)
        v_ptr = head_start(v_ptr, start, kv_head, v_token_stride, v_head_stride, 1)
        q_ptr = head_start(q_ptr, q_start, kv_head, q_token_stride, q_head_stride, GROUP)
        d_out_ptr = head_start(d_out_ptr, q_start, kv_head, d_out_token_stride, d_out_head_stride, GROUP)
        terms_ptr += (kv_head.to(tl.int64) * num_q_tokens + q_start) * (GROUP * TERMS)
        inner, outer = logit_scales(sm_scale, soft_cap, HAS_SOFT_CAP)
        k, k_rest = load_rows(k_ptr, low, readable, k_token_stride, 0, True, 1, BLOCK_KV, D, D_MAIN, D_REST)
        v, v_rest = load_rows(v_ptr, low, readable, v_token_stride, 0, True, 1, BLOCK_KV, DV, DV_MAIN, DV_REST)
        dk, dk_rest = zeros(BLOCK_KV, D_MAIN, D_REST)
        dv, dv_rest = zeros(BLOCK_KV, DV_MAIN, DV_REST)
        first, last, begin, whole_start, whole_stop, end = row_blocks(
            low, tl.minimum(low + BLOCK_KV, kv_len) - 1, q_len, kv_len, window, CAUSAL, HAS_WINDOW, GROUP, BLOCK_Q,
        )  # fmt: skip
        left_blocks = (whole_start - begin) // BLOCK_Q
        num_blocks = left_blocks + (end - whole_stop) // BLOCK_Q
        dk, dk_rest, dv, dv_rest = visit_rows(
            k, k_rest, v, v_rest, dk, dk_rest, dv, dv_rest, q_ptr, d_out_ptr, terms_ptr,
            begin, left_blocks, whole_stop, num_blocks, first, last, key, q_len, kv_len, window,
            q_token_stride, q_head_stride, d_out_token_stride, d_out_head_stride, inner, outer,
            True, CAUSAL, HAS_WINDOW, HAS_SOFT_CAP, HAS_SHARE, GROUP, BLOCK_Q,
            D, D_MAIN, D_REST, DV, DV_MAIN, DV_REST,
        )  # fmt: skip
        dk, dk_rest, dv, dv_rest = visit_rows(
            k, k_rest, v, v_rest, dk, dk_rest, dv, dv_rest, q_ptr, d_out_ptr, terms_ptr,
            whole_start, 0, 0, (whole_stop - whole_start) // BLOCK_Q, first, last, key, q_len, kv_len, window,
            q_token_stride, q_head_stride, d_out_token_stride, d_out_head_stride, inner, outer,
            False, CAUSAL, HAS_WINDOW, HAS_SOFT_CAP, HAS_SHARE, GROUP, BLOCK_Q,
            D, D_MAIN, D_REST, DV, DV_MAIN, DV_REST,
        )  # fmt: skip

        writable = key < kv_len
        heads: tl.constexpr = NUM_HEADS // GROUP
        dk_ptr = head_start(dk_ptr, start + low, kv_head, heads * D, D, 1)
        dv_ptr = head_start(dv_ptr, start + low, kv_head, heads * DV, DV, 1)
        store_rows(dk_ptr, 0, dk * sm_scale, dk_rest * sm_scale, writable, heads * D, 1, BLOCK_KV, D, D_MAIN, D_REST)
        store_rows(dv_ptr, 0, dv, dv_rest, writable, heads * DV, 1, BLOCK_KV, DV, DV_MAIN, DV_REST)


@triton.jit
def visit_keys(
    q, q_rest, d_out, d_out_rest, dq, dq_rest, norm, offset, share,
    k_ptr, v_ptr, left, left_blocks, right, num_blocks, first, last, position, kv_len, window,
    k_token_stride, v_token_stride, inner, outer,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr,
    HAS_SHARE: tl.constexpr, BLOCK_KV: tl.constexpr, D: tl.constexpr, D_MAIN: tl.constexpr, D_REST: tl.constexpr,
    DV: tl.constexpr, DV_MAIN: tl.constexpr, DV_REST: tl.constexpr,
):  # fmt: skip
    """What `num_blocks` blocks of keys add to dq; which they are and what is read of them as in the forward kernel."""
    for index in range(num_blocks):
        block = left + index * BLOCK_KV
        if MASKED:
            block = tl.where(index < left_blocks, block, right + (index - left_blocks) * BLOCK_KV)
        key = block + tl.arange(0, BLOCK_KV)
        readable = (key >= first) & (key < last)
        k, k_rest = load_rows(
            k_ptr, block, readable, k_token_stride, 0, MASKED, 1, BLOCK_KV, D, D_MAIN, D_REST
        )  # fmt: skip
        v, v_rest = load_rows(
            v_ptr, block, readable, v_token_stride, 0, MASKED, 1, BLOCK_KV, DV, DV_MAIN, DV_REST
        )  # fmt: skip
        products = product(q, q_rest, k, k_rest, D_REST)
        d_weights = product(d_out, d_out_rest, v, v_rest, DV_REST)
        seen = sees(position[:, None], key[None, :], kv_len, window, CAUSAL, HAS_WINDOW)
        weights, slope = weigh(products, norm[:, None], seen, inner, outer, MASKED, HAS_SOFT_CAP)
        d_logits = change(weights, slope, d_weights, offset[:, None], share[:, None], HAS_SOFT_CAP, HAS_SHARE)
        dq, dq_rest = accumulate(narrow(d_logits, q.dtype), k, k_rest, dq, dq_rest, D_REST)
    return dq, dq_rest


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
        inside = tl.arange(0, BLOCK_Q) < rows - first_row
        if CAUSAL:  # what sees nothing is not read; then masks on the logits are enough
            inside = inside & (row >= (q_len - kv_len) * GROUP)
        low = kv_len - q_len + first_row // GROUP
        high = kv_len - q_len + tl.minimum((first_row + BLOCK_Q - 1) // GROUP, q_len - 1)
        position = kv_len - q_len + row // GROUP
        first, last, begin, whole_start, whole_stop, end = key_blocks(
            low, high, kv_len, window, CAUSAL, HAS_WINDOW, BLOCK_KV
        )
        q_ptr = head_start(q_ptr, start, kv_head, q_token_stride, q_head_stride, GROUP)
        d_out_ptr = head_start(d_out_ptr, start, kv_head, d_out_token_stride, d_out_head_stride, GROUP)
        k_ptr = head_start(k_ptr, kv_start, kv_head, k_token_stride, k_head_stride, 1)
        v_ptr = head_start(v_ptr, kv_start, kv_head, v_token_stride, v_head_stride, 1)
        terms_ptr += (kv_head.to(tl.int64) * num_q_tokens + start) * (GROUP * TERMS)
        inner, outer = logit_scales(sm_scale, soft_cap, HAS_SOFT_CAP)
        q, q_rest = load_rows(
            q_ptr, first_row, inside, q_token_stride, q_head_stride, True, GROUP, BLOCK_Q, D, D_MAIN, D_REST
        )  # fmt: skip
        d_out, d_out_rest = load_rows(
            d_out_ptr, first_row, inside, d_out_token_stride, d_out_head_stride, True, GROUP, BLOCK_Q,
            DV, DV_MAIN, DV_REST,
        )  # fmt: skip
        dq, dq_rest = zeros(BLOCK_Q, D_MAIN, D_REST)
        norm, offset, share = load_terms(terms_ptr, first_row, inside, True, BLOCK_Q)
        dq, dq_rest = visit_keys(
            q, q_rest, d_out, d_out_rest, dq, dq_rest, norm, offset, share, k_ptr, v_ptr,
            whole_start, 0, 0, (whole_stop - whole_start) // BLOCK_KV, first, last, position, kv_len, window,
            k_token_stride, v_token_stride, inner, outer, False, CAUSAL, HAS_WINDOW, HAS_SOFT_CAP, HAS_SHARE,
            BLOCK_KV, D, D_MAIN, D_REST, DV, DV_MAIN, DV_REST,
        )  # fmt: skip
        left_blocks = (whole_start - begin) // BLOCK_KV
        num_blocks = left_blocks + (end - whole_stop) // BLOCK_KV
        dq, dq_rest = visit_keys(
            q, q_rest, d_out, d_out_rest, dq, dq_rest, norm, offset, share, k_ptr, v_ptr,
            begin, left_blocks, whole_stop, num_blocks, first, last, position, kv_len, window,
            k_token_stride, v_token_stride, inner, outer, True, CAUSAL, HAS_WINDOW, HAS_SOFT_CAP, HAS_SHARE,
            BLOCK_KV, D, D_MAIN, D_REST, DV, DV_MAIN, DV_REST,
        )  # fmt: skip

        dq_ptr = head_start(dq_ptr, start, kv_head, NUM_HEADS * D, D, GROUP)
        store_rows(dq_ptr, first_row, dq * sm_scale, dq_rest * sm_scale, row < rows, NUM_HEADS * D, GROUP, BLOCK_Q,
                   D, D_MAIN, D_REST)  # fmt: skip


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
