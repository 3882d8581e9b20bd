"""Attention over a paged KV cache: one program for each query token and KV head."""

import triton
import triton.language as tl

FEATURES = {"sm_scale", "return_lse"}


def why_not(call):
    if not call.combined or not call.causal or call.cache_dtype not in ("float32", "float16", "bfloat16"):
        return "expected causal=True and a combined cache of 16 or 32 bits"


@triton.jit
def paged_decode(
    q_ptr, kv_ptr, kv_lens_ptr, tables_ptr, edges_ptr, out_ptr, lse_ptr,
    sm_scale, num_tokens, num_seqs, pages_per_seq, num_pages,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    kv_head = tl.program_id(1)
    seqs = tl.arange(0, BLOCK_S)
    ends = tl.load(edges_ptr + 1 + seqs, mask=seqs < num_seqs, other=num_tokens + 1)
    seq = tl.sum((ends <= token).to(tl.int32), 0)
    alive = seq < num_seqs
    end = tl.minimum(tl.load(edges_ptr + seq + 1, mask=alive, other=0), num_tokens)
    kv_len = tl.load(kv_lens_ptr + seq, mask=alive, other=0)
    kv_len = tl.minimum(tl.maximum(kv_len, 0), pages_per_seq * PAGE) - (end - token - 1)
    kv_len = tl.where(alive, kv_len, 0)  # rows after the last sequence see no keys

    heads = tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    rows = (token * KV_HEADS + kv_head) * GROUP + heads
    inside = (heads < GROUP)[:, None] & (dims < D)[None, :]
    q = tl.load(q_ptr + rows[:, None] * D + dims[None, :], mask=inside & alive, other=0.0)
    m = tl.full([BLOCK_H], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_H], tl.float32)  # noqa: E741
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for first in range(0, kv_len, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        page = tl.load(tables_ptr + seq * pages_per_seq + n // PAGE, mask=n < kv_len, other=-1)
        seen = (page >= 0) & (page < num_pages)
        row = ((page * PAGE + n % PAGE) * KV_HEADS + kv_head) * 2
        wanted = seen[:, None] & (dims < D)[None, :]
        k = tl.load(kv_ptr + row[:, None] * D + dims[None, :], mask=wanted, other=0.0)
        v = tl.load(kv_ptr + (row + 1)[:, None] * D + dims[None, :], mask=wanted, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * sm_scale
        s = tl.where(seen[None, :], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp(s - base[:, None])
        alpha = tl.exp(m - base)
        l = l * alpha + tl.sum(p, 1)  # noqa: E741
        acc = acc * alpha[:, None] + tl.dot(p, v.to(tl.float32), input_precision="ieee")
        m = m_new
    out = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    tl.store(out_ptr + rows[:, None] * D + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(lse_ptr + rows, tl.where(l == 0.0, float("-inf"), m + tl.log(l)), mask=heads < GROUP)


def run(call, tile, launch):
    tokens, heads, d = call.q.shape
    group = heads // call.num_kv_heads
    arrays = (call.q, call.kv_pages, call.kv_lens, call.page_indices, call.cu_q_lens)
    out, lse = launch(
        paged_decode, (tokens, call.num_kv_heads), [launch.contiguous(array) for array in arrays],
        [(call.out_shape, call.q.dtype), ((tokens, heads), "float32")],
        sm_scale=call.scale, num_tokens=tokens, num_seqs=call.kv_lens.shape[0],
        pages_per_seq=call.page_indices.shape[1], num_pages=call.num_pages,
        KV_HEADS=call.num_kv_heads, GROUP=group, D=d, PAGE=call.page_size,
        BLOCK_H=max(16, triton.next_power_of_2(group)), BLOCK_D=triton.next_power_of_2(d), BLOCK_N=32,
        BLOCK_S=triton.next_power_of_2(max(1, call.kv_lens.shape[0])),
    )  # fmt: skip
    return (out, lse) if call.return_lse else out
