"""Latent decode: one program for each query token and block of heads. A row's first columns are also its values."""

import triton
import triton.language as tl

FEATURES = {"page_indices", "kv_lens", "d_v", "sm_scale"}


def why_not(call):
    if call.num_kv_heads != 1 or call.cache_dtype not in ("float32", "float16", "bfloat16"):
        return "expected one KV head and a cache of 16 or 32 bits"


@triton.jit
def latent_decode(
    q_ptr, cache_ptr, tables_ptr, kv_lens_ptr, out_ptr, lse_ptr,
    sm_scale, queries, pages_per_seq, num_pages, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0)
    seq = query // queries
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    columns = tl.arange(0, BLOCK_V)
    inside = (heads < HEADS)[:, None]
    rows = query * HEADS + heads
    q = tl.load(q_ptr + rows[:, None] * D + dims[None, :], mask=inside & (dims < D)[None, :], other=0.0)
    kv_len = tl.minimum(tl.load(kv_lens_ptr + seq), pages_per_seq * PAGE)
    m = tl.full([BLOCK_H], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_H], tl.float32)  # noqa: E741
    acc = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
    for first in range(0, kv_len, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        page = tl.load(tables_ptr + seq * pages_per_seq + n // PAGE, mask=n < kv_len, other=-1)
        seen = (page >= 0) & (page < num_pages)
        row = cache_ptr + (page * PAGE + n % PAGE)[:, None] * D
        k = tl.load(row + dims[None, :], mask=seen[:, None] & (dims < D)[None, :], other=0.0)
        v = tl.load(row + columns[None, :], mask=seen[:, None] & (columns < DV)[None, :], other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * sm_scale
        s = tl.where(seen[None, :], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp(s - base[:, None])
        alpha = tl.exp(m - base)
        l = l * alpha + tl.sum(p, 1)  # noqa: E741
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m = m_new
    acc = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    tl.store(out_ptr + rows[:, None] * DV + columns[None, :], acc, mask=inside & (columns < DV)[None, :])
    lse = tl.where(l == 0.0, float("-inf"), m + tl.log(l))
    tl.store(lse_ptr + (seq * HEADS + heads) * queries + query % queries, lse, mask=heads < HEADS)


def run(call, tile, launch):
    seqs, queries, heads, d = call.q.shape
    arrays = (call.q, call.kv_cache, call.page_indices, call.kv_lens)
    out, lse = launch(
        latent_decode, (seqs * queries, triton.cdiv(heads, 16)), [launch.contiguous(array) for array in arrays],
        [(call.out_shape, call.q.dtype), ((seqs, heads, queries), "float32")],
        sm_scale=call.scale, queries=queries, pages_per_seq=call.page_indices.shape[1], num_pages=call.num_pages,
        HEADS=heads, D=d, DV=call.d_v, PAGE=call.page_size, BLOCK_H=16, BLOCK_D=triton.next_power_of_2(d),
        BLOCK_V=triton.next_power_of_2(call.d_v), BLOCK_N=32,
    )  # fmt: skip
    return out, lse
