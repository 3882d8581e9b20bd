"""Attention over packed sequences: one program for each sequence and head. The last programs clear the unused rows."""

import triton
import triton.language as tl

FEATURES = {"sm_scale", "causal"}


def why_not(call):
    if call.lse_dtype != "float32":
        return "expected q of 16 or 32 bits"


@triton.jit
def packed_attention(
    q_ptr, k_ptr, v_ptr, q_edges_ptr, kv_edges_ptr, out_ptr, lse_ptr,
    sm_scale, tokens, num_seqs, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0)
    head = tl.program_id(1)
    kv_head = head // (HEADS // KV_HEADS)
    alive = seq < num_seqs
    q_start = tl.load(q_edges_ptr + seq)
    q_stop = tl.load(q_edges_ptr + seq + 1, mask=alive, other=0)
    q_stop = tl.where(alive, q_stop, tokens)
    kv_start = tl.load(kv_edges_ptr + seq, mask=alive, other=0)
    kv_stop = tl.load(kv_edges_ptr + seq + 1, mask=alive, other=0)
    dims = tl.arange(0, BLOCK_D)
    columns = tl.arange(0, BLOCK_V)
    for m_first in range(q_start, q_stop, BLOCK_M):
        row = m_first + tl.arange(0, BLOCK_M)
        here = row < q_stop
        wanted = here[:, None] & (dims < D)[None, :]
        q = tl.load(q_ptr + (row * HEADS + head)[:, None] * D + dims[None, :], mask=wanted, other=0.0)
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
        acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        for n_first in range(kv_start, kv_stop, BLOCK_N):
            key = n_first + tl.arange(0, BLOCK_N)
            there = key < kv_stop
            k_row = key * KV_HEADS + kv_head
            k = tl.load(k_ptr + k_row[:, None] * D + dims[None, :], mask=there[:, None] & (dims < D), other=0.0)
            v = tl.load(v_ptr + k_row[:, None] * DV + columns[None, :], mask=there[:, None] & (columns < DV), other=0.0)
            s = tl.dot(q, tl.trans(k), input_precision="ieee") * sm_scale
            seen = here[:, None] & there[None, :]
            if CAUSAL:
                seen = seen & ((kv_stop - key)[None, :] >= (q_stop - row)[:, None])
            s = tl.where(seen, s, float("-inf"))
            m_new = tl.maximum(m, tl.max(s, 1))
            base = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.exp(s - base[:, None])
            alpha = tl.exp(m - base)
            l = l * alpha + tl.sum(p, 1)  # noqa: E741
            acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
            m = m_new
        acc = acc / tl.where(l == 0.0, 1.0, l)[:, None]
        place = out_ptr + (row * HEADS + head)[:, None] * DV + columns[None, :]
        tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=here[:, None] & (columns < DV)[None, :])
        tl.store(lse_ptr + row * HEADS + head, tl.where(l == 0.0, float("-inf"), m + tl.log(l)), mask=here)


def run(call, tile, launch):
    tokens, heads, d = call.q.shape
    arrays = (call.q, call.k, call.v, call.cu_q_lens, call.cu_kv_lens)
    out, lse = launch(
        packed_attention, (call.num_seqs + 1, heads), [launch.contiguous(array) for array in arrays],
        [(call.out_shape, call.q.dtype), ((tokens, heads), "float32")],
        sm_scale=call.scale, tokens=tokens, num_seqs=call.num_seqs, HEADS=heads, KV_HEADS=call.num_kv_heads, D=d,
        DV=call.v_head_dim, CAUSAL=call.causal, BLOCK_M=16, BLOCK_N=32, BLOCK_D=triton.next_power_of_2(d),
        BLOCK_V=triton.next_power_of_2(call.v_head_dim),
    )  # fmt: skip
    return out, lse
