"""Indexer logits over packed keys: one program for each query token, with a product row for each head."""

import triton
import triton.language as tl

FEATURES = {"starts", "stops"}


def why_not(call):
    if call.starts is None or call.key_dtype not in ("float32", "float16", "bfloat16"):
        return "expected packed keys of 16 or 32 bits, with starts and stops"


@triton.jit
def score(
    q_ptr, keys_ptr, weights_ptr, starts_ptr, stops_ptr, out_ptr,
    num_keys, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    heads = tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    wanted = (heads < HEADS)[:, None] & (dims < D)[None, :]
    q = tl.load(q_ptr + (token * HEADS + heads)[:, None] * D + dims[None, :], mask=wanted, other=0.0)
    weights = tl.load(weights_ptr + token * HEADS + heads, mask=heads < HEADS, other=0.0)
    start = tl.load(starts_ptr + token)
    stop = tl.load(stops_ptr + token)
    for first in range(0, num_keys, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        seen = (n >= start) & (n < stop)
        k = tl.load(keys_ptr + n[:, None] * D + dims[None, :], mask=seen[:, None] & (dims < D)[None, :], other=0.0)
        s = tl.maximum(tl.dot(q, tl.trans(k), input_precision="ieee"), 0.0)
        logits = tl.sum(s * weights[:, None], 0)
        tl.store(out_ptr + token * num_keys + n, tl.where(seen, logits, float("-inf")), mask=n < num_keys)


def run(call, tile, launch):
    tokens, heads, d = call.q.shape
    arrays = (call.q, call.keys, call.weights, call.starts, call.stops)
    (logits,) = launch(
        score, (tokens,), [launch.contiguous(array) for array in arrays], call.results(),
        num_keys=call.keys.shape[0], HEADS=heads, D=d, BLOCK_H=max(16, triton.next_power_of_2(heads)),
        BLOCK_D=triton.next_power_of_2(d), BLOCK_N=32,
    )  # fmt: skip
    return logits
