"""Run the drop-ins for other jax projects on our TPU kernels, which are interpreted with race detection."""

import jax.numpy as jnp
import numpy as np

from ragged_attention.compat import easydel, ejkernel, jax_pallas
from ragged_attention.reference.paged_attention import paged_attention
from ragged_attention.reference.prefill_attention import prefill_attention
from ragged_attention.testing.compare import agrees
from ragged_attention.testing.tpu_interpreter import watched
from tests.paged_batches import heads_first, ragged

batch = ragged(((1, 9), (0, 0), (4, 14)), head_dim=128)
sinks = jnp.array([0.5, -1.0, 3.0, 0.0])
with watched("on_wait"):
    out = jax_pallas.ragged_paged_attention(
        *batch.arrays, sm_scale=0.2, num_kv_pages_per_block=2, num_queries_per_block=8, backend="pallas"
    )
    with_sinks = ejkernel.ragged_page_attention_v2(
        *batch.arrays, softmax_aux=sinks, sliding_window=5, num_warps=4, backend="pallas"
    )
agrees(out, batch.defined(sm_scale=0.2), "float32")
agrees(with_sinks, batch.defined(sinks=sinks, sliding_window=5), "float32")

batch = ragged([(1, length) for length in (0, 3, 8, 21)], padding=4, more_seqs=0, head_dim=128)
pages = heads_first(batch.kv_pages)
k_pages, v_pages, kv_lens, table = map(np.asarray, (*pages, batch.kv_lens, batch.page_indices))
with watched("on_wait"):
    decoded = jax_pallas.paged_attention(
        batch.q[:4], *pages, batch.kv_lens, batch.page_indices, pages_per_compute_block=2, backend="pallas"
    )
    chunk = easydel.prefill_attention(batch.q[4:], *pages, 21, batch.page_indices[3], backend="pallas")
q = np.asarray(batch.q)
agrees(decoded, paged_attention(q[:4], k_pages, v_pages, kv_lens, table, sm_scale=1.0), "float32")
agrees(chunk, prefill_attention(q[4:], k_pages, v_pages, 21, table[3]).reshape(4, -1), "float32")
print("right")
