"""Print the numbers of Triton kernels that a family's jax functions call when lowered for CUDA and for a CPU.

Usage: lowered.py paged|latents|gradients|indexer
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import jax_triton  # noqa: F401  the caller skips its test if this import fails

from ragged_attention import jax as ra


def array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def paged(q: Any, kv_pages: Any, kv_lens: Any, page_indices: Any, cu_q_lens: Any) -> Any:
    return ra.ragged_paged_attention(q, kv_pages, kv_lens, page_indices, cu_q_lens)


def latents(q: Any, kv: Any, cache: Any, slots: Any, lists: Any, table: Any, lens: Any) -> Any:
    cache = ra.write_mla_cache(kv, cache, slots)
    schedule = ra.make_decode_schedule(lens, 2, 1, 16, num_parts=4)
    dense, _ = ra.mla_decode(q, cache, table, lens, schedule=schedule)
    sparse, _ = ra.mla_decode(q, cache, indices=lists)
    prefill, _, _ = ra.sparse_mla_prefill(q[:, 0], cache, lists)
    return dense, sparse, prefill, cache


def indexer(q: Any, weights: Any, keys: Any, table: Any, lens: Any, edges: Any) -> Any:
    """The indexer's results for a prefill, whose logits a kernel computes in tiles, and for one query per sequence."""
    steps = (q, weights, edges), (q[: len(lens)], weights[: len(lens)], jnp.arange(len(lens) + 1, dtype=jnp.int32))
    results = []
    for rows, row_weights, row_edges in steps:
        lies: dict[str, Any] = {"page_indices": table, "kv_lens": lens, "cu_q_lens": row_edges}
        results.append(ra.indexer_logits(rows, keys, row_weights, **lies))
        results.append(ra.indexer_topk(rows, keys, row_weights, 512, **lies))
    return results


def gradients(q: Any, k: Any, v: Any, edges: Any, latent_q: Any, kv: Any, lists: Any) -> Any:
    def loss(q: Any, k: Any, v: Any, latent_q: Any, kv: Any) -> Any:
        out: Any = ra.varlen_attention(q, k, v, edges, edges, causal=True, sliding_window=64, soft_cap=30)
        as_it_comes, _, _ = ra.sparse_mla_prefill(latent_q, kv, lists)
        in_order, _, _ = ra.sparse_mla_prefill(latent_q, kv, lists, deterministic=True)
        return sum(result.astype("float32").sum() for result in (out, as_it_comes, in_order))

    return jax.grad(loss, (0, 1, 2, 3, 4))(q, k, v, latent_q, kv)


STEPS = {
    "paged": (
        paged,
        (array("float16", 8, 4, 64), array("float16", 6, 16, 4, 64)),
        (array("int32", 3), array("int32", 3, 2), array("int32", 4)),
    ),
    "latents": (
        latents,
        (array("bfloat16", 2, 1, 16, 576), array("bfloat16", 2, 576), array("uint8", 4, 64, 1, 656)),
        (array("int32", 2), array("int32", 2, 1, 128), array("int32", 2, 2), array("int32", 2)),
    ),
    "indexer": (
        indexer,
        (array("bfloat16", 256, 64, 128), array("float32", 256, 64), array("bfloat16", 64, 64, 128)),
        (array("int32", 2, 32), array("int32", 2), array("int32", 3)),
    ),
    "gradients": (
        gradients,
        (array("bfloat16", 256, 8, 128), array("bfloat16", 256, 2, 128), array("bfloat16", 256, 2, 128)),
        (
            array("int32", 3),
            array("bfloat16", 4, 16, 576),
            array("bfloat16", 256, 1, 576),
            array("int32", 4, 1, 64),
        ),
    ),
}
step, arrays, more = STEPS[sys.argv[1]]
traced = jax.jit(step).trace(*arrays, *more)
texts = [traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cuda", "cpu")]
print(*[text.count("triton_kernel_call") for text in texts])
