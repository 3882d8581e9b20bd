"""Attention over packed sequences in Triton: one kernel, online softmax over blocks of keys as in FlashAttention.

A program has a block of rows of one KV head and one sequence; it finds the sequence by binary search, so the grid
follows from shapes alone. Only the blocks of keys at either end, which some row sees in part, pay for masks.
"""

# Triton's language only looks like Python: its constexprs and early-bound branches defeat a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

import dataclasses
from typing import Any

import triton
import triton.language as tl

from ragged_attention.calls import VarlenAttention
from ragged_attention.kernels_triton import _varlen
from ragged_attention.kernels_triton._formats import narrow
from ragged_attention.kernels_triton._sequences import VARYING, block_start, end_blocks, whole_blocks
from ragged_attention.kernels_triton._softmax import LN2, LOG2E, online_softmax, soft_capped
from ragged_attention.kernels_triton._tiles import (
    WGMMA,
    expect_between,
    expect_power_of_two,
    launchable_in_float32,
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
    load_rows,
    logit_scales,
    product,
    sees,
    store_rows,
    times,
    zeros,
)

FEATURES = frozenset({
    "max_q_len", "max_kv_len", "sm_scale", "causal", "sliding_window", "soft_cap", "sinks", "deterministic",
})  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """What may be tuned. Rows are query tokens times heads of a group."""

    block_q: int = 64  # rows of a program
    block_kv: int = 64  # its keys per step
    num_warps: int = 4
    num_stages: int = 2

    def __post_init__(self) -> None:
        expect_power_of_two(self, block_q=(16, 256), block_kv=(16, 256), num_warps=(1, 16))
        expect_between(self, num_stages=(1, 8))


def why_not(call: VarlenAttention) -> str | None:
    return launchable_in_float32(call, forward_kernel)


def heuristic(call: VarlenAttention) -> Tile:
    """Tiles that fit registers and shared memory; see docs/compile_matrix.md."""
    tile = invariant_tile(call)
    return dataclasses.replace(tile, block_q=_varlen.rows_at_most(call, tile.block_q))


def invariant_tile(call: VarlenAttention) -> Tile:
    """The same for any number of rows."""
    block_q, block_kv, num_warps, num_stages = sizes(call)
    block_kv, num_stages = _varlen.fit_rows(call, block_q * sum(_varlen.widths(call)[0]), block_kv, num_stages)
    return Tile(block_q=block_q, block_kv=block_kv, num_warps=num_warps, num_stages=num_stages)


def sizes(call: Any) -> tuple[int, int, int, int]:
    """Rows, keys, warps and stages."""
    arch, columns = call.device.arch, _varlen.columns(call)
    if call.device.platform == "cpu":
        return 64, 64, 4, 2
    if on_cuda_cores(call):
        return 16, 16, 4, 2
    if not arch.startswith("sm_"):
        return (128, 32, 4, 2) if columns <= 320 else (64, 32, 4, 1)
    whole = not any(rest for _, rest in _varlen.widths(call))
    if arch == "sm_90" and columns <= 256 and whole and call.soft_cap is None:
        return 128, 128, 8, 3
    if arch in WGMMA:
        return (128, 64, 8, 3) if columns <= 320 else (128, 32, 8, 3)
    return (128, 64, 8, 3) if columns <= 256 else (128, 32, 8, 3) if columns <= 320 else (64, 32, 8, 3)


@triton.jit
def attend(
    q, state, k_array, v_array, blocks, visible, scales, features, MASKED: tl.constexpr, BLOCK_KV: tl.constexpr,
    widths, v_widths,
):  # fmt: skip
    """Online softmax of the rows of `q` over blocks of keys, from `state` = (m_i, l_i, acc) to what that becomes.

    Unmasked, every row must see every key of them. Masked, only keys in [first, last) are read at all: what no row of
    the tile sees takes no part, NaN or not.
    """
    m_i, l_i, acc = state
    inner, outer, cap = scales
    for index in range(blocks.num_blocks):
        block = block_start(blocks, index, MASKED, BLOCK_KV)
        key = block + tl.arange(0, BLOCK_KV)
        readable = (key >= visible.first) & (key < visible.last)
        k = load_rows(k_array, block, readable, MASKED, 1, BLOCK_KV, widths)
        logits = product(q, k)
        if features.HAS_SOFT_CAP:
            logits = soft_capped(logits * inner, cap)
        if MASKED:
            seen = sees(visible.position[:, None], key[None, :], visible.kv_len, visible.window, features.CAUSAL,
                        features.HAS_WINDOW)  # fmt: skip
            logits = tl.where(seen, logits, float("-inf"))
        weights, alpha, m_i, l_i = online_softmax(logits, m_i, l_i, outer)
        rounded = narrow(weights, q[0].dtype)
        v = load_rows(v_array, block, readable, MASKED, 1, BLOCK_KV, v_widths)
        acc = accumulate(rounded, v, times(acc, alpha[:, None]))
    return m_i, l_i, acc


@triton.jit
def attend_all(q, k_array, v_array, edges, visible, scales, features, BLOCK_KV: tl.constexpr, widths, v_widths):
    """(m_i, l_i, acc) of rows after all keys that they see."""
    m_i = tl.full([q[0].shape[0]], float("-inf"), tl.float32)
    l_i = tl.zeros([q[0].shape[0]], tl.float32)
    acc = zeros(q[0].shape[0], v_widths)
    state = attend(q, (m_i, l_i, acc), k_array, v_array, whole_blocks(edges, BLOCK_KV), visible, scales, features,
                   False, BLOCK_KV, widths, v_widths)  # fmt: skip
    return attend(q, state, k_array, v_array, end_blocks(edges, BLOCK_KV), visible, scales, features, True, BLOCK_KV,
                  widths, v_widths)  # fmt: skip


@triton.jit
def negated(parts):
    negative = ()
    for i in tl.static_range(len(parts)):
        negative += ((-parts[i].to(tl.float32)).to(parts[i].dtype),)
    return negative


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
    q_ptr, k_ptr, v_ptr, cu_q_lens_ptr, cu_kv_lens_ptr, sinks_ptr,
    out_ptr, lse_ptr,
    num_q_tokens, num_kv_tokens, num_seqs, window,
    q_head_stride, k_head_stride, v_head_stride,
    sm_scale, soft_cap,
    q_token_stride: tl.constexpr, k_token_stride: tl.constexpr, v_token_stride: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr, CAUSAL: tl.constexpr,
    GROUP: tl.constexpr, NUM_HEADS: tl.constexpr, D: tl.constexpr, D_MAIN: tl.constexpr, D_REST: tl.constexpr,
    DV: tl.constexpr, DV_MAIN: tl.constexpr, DV_REST: tl.constexpr, NEGATIVE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """One block of rows of one KV head over all keys that they see; padding rows are blocks that see none."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the last rows see the most keys: begin with them
    kv_head = tl.program_id(1)
    start, q_len, first_row, kv_start, kv_len = find_block(
        block, cu_q_lens_ptr, cu_kv_lens_ptr, num_seqs, num_q_tokens, num_kv_tokens, GROUP, BLOCK_Q
    )
    rows = q_len * GROUP
    if (first_row >= 0) & (first_row < rows):
        readable = before(rows - first_row, BLOCK_Q)
        q_ptr = head_start(q_ptr, start, kv_head, q_token_stride, q_head_stride, GROUP)
        k_ptr = head_start(k_ptr, kv_start, kv_head, k_token_stride, k_head_stride, 1)
        v_ptr = head_start(v_ptr, kv_start, kv_head, v_token_stride, v_head_stride, 1)
        scales = logit_scales(tl.abs(sm_scale), soft_cap, HAS_SOFT_CAP)
        q = load_rows(Array(q_ptr, q_token_stride, q_head_stride), first_row, readable, True, GROUP, BLOCK_Q,
                      Widths(D, D_MAIN, D_REST))  # fmt: skip
        if NEGATIVE:  # the softmax's maximum needs a positive factor
            q = negated(q)
        low = kv_len - q_len + first_row // GROUP
        high = kv_len - q_len + tl.minimum((first_row + BLOCK_Q - 1) // GROUP, q_len - 1)
        position = kv_len - q_len + (first_row + tl.arange(0, BLOCK_Q)) // GROUP
        first, last, edges = key_blocks(low, high, kv_len, window, CAUSAL, HAS_WINDOW, BLOCK_KV)
        m_i, l_i, acc = attend_all(
            q, Array(k_ptr, k_token_stride, 0), Array(v_ptr, v_token_stride, 0), edges,
            Visible(first, last, position, kv_len, window), scales,
            Features(CAUSAL, HAS_WINDOW, HAS_SOFT_CAP), BLOCK_KV, Widths(D, D_MAIN, D_REST),
            Widths(DV, DV_MAIN, DV_REST),
        )  # fmt: skip

        row = first_row + tl.arange(0, BLOCK_Q)
        head = kv_head * GROUP + row % GROUP
        empty = l_i == 0.0  # no key seen
        m_i = tl.where(empty, 0.0, m_i)
        l_i = tl.where(empty, 1.0, l_i)
        denominator = l_i
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + head, mask=row < rows, other=float("-inf"))
            denominator += tl.math.exp2(sink * LOG2E - m_i)
        share = tl.where(empty, 0.0, 1.0 / denominator)[:, None]
        lse = tl.where(empty, float("-inf"), (m_i + tl.math.log2(l_i)) * LN2)
        tl.store(lse_ptr + (start + row // GROUP).to(tl.int64) * NUM_HEADS + head, lse, mask=row < rows)
        out_ptr = head_start(out_ptr, start, kv_head, NUM_HEADS * DV, DV, GROUP)
        store_rows(Array(out_ptr, NUM_HEADS * DV, DV), first_row, times(acc, share), row < rows, GROUP, BLOCK_Q,
                   Widths(DV, DV_MAIN, DV_REST))  # fmt: skip


def run(call: VarlenAttention, tile: Tile, launch: Any) -> Any:
    """Enqueue the kernel; returns out and lse."""
    q = _varlen.near(call.q, call.group, launch)
    k, v = (_varlen.near(array, 1, launch) for array in (call.k, call.v))
    cu_q_lens, cu_kv_lens = map(launch.packed, (call.cu_q_lens, call.cu_kv_lens))
    blocks = call.num_q_tokens * call.group // tile.block_q + call.num_seqs + 2
    return launch(
        forward_kernel,
        (blocks if call.num_q_tokens else 0, call.num_kv_heads),
        (q, k, v, cu_q_lens, cu_kv_lens, cu_q_lens if call.sinks is None else launch.packed(call.sinks)),
        [(call.out_shape, call.q.dtype), (call.q.shape[:2], "float32")],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        HAS_SINKS=call.sinks is not None,
        NEGATIVE=call.scale < 0,
        BLOCK_Q=tile.block_q,
        BLOCK_KV=tile.block_kv,
        **_varlen.shared_arguments(call),
        **_varlen.stride_arguments(launch, q=q, k=k, v=v),
    )
