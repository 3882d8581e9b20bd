"""The jax front end: every operation on jax arrays, under `jit`, `vmap`, `lax.scan` and `jax.export`.

A backend is selected for each platform when a function is lowered, so one traced function runs on a CPU, a GPU
(through jax-triton) and a TPU. Requests (`set_backend`, `use_backend`, the environment) are read when a function is
traced. One export can serve several platforms, except that jax-triton refuses exports for CUDA and another platform.
"""

from ragged_attention.jax._lower import FRONT_END

call_of = FRONT_END.call_of
paged_attention = FRONT_END.paged_attention
prefill_attention = FRONT_END.prefill_attention
indexer_logits = FRONT_END.indexer_logits
indexer_logits_backward = FRONT_END.indexer_logits_backward
indexer_topk = FRONT_END.indexer_topk
quantize_indexer_keys = FRONT_END.quantize_indexer_keys
attention_target = FRONT_END.attention_target
top_k_indices = FRONT_END.top_k_indices
write_indexer_cache = FRONT_END.write_indexer_cache
block_scores = FRONT_END.block_scores
select_blocks = FRONT_END.select_blocks
top_k_blocks = FRONT_END.top_k_blocks
dequantize_mla_cache = FRONT_END.dequantize_mla_cache
make_decode_schedule = FRONT_END.make_decode_schedule
mla_decode = FRONT_END.mla_decode
page_indices_to_slots = FRONT_END.page_indices_to_slots
quantize_mla_cache = FRONT_END.quantize_mla_cache
sparse_mla_prefill = FRONT_END.sparse_mla_prefill
sparse_mla_prefill_backward = FRONT_END.sparse_mla_prefill_backward
write_mla_cache = FRONT_END.write_mla_cache
merge_attention_states = FRONT_END.merge_attention_states
ragged_paged_attention = FRONT_END.ragged_paged_attention
write_kv_pages = FRONT_END.write_kv_pages
norm_rope_write = FRONT_END.norm_rope_write
quantize_kv = FRONT_END.quantize_kv
dequantize_kv = FRONT_END.dequantize_kv
latent_norm_rope_write = FRONT_END.latent_norm_rope_write
ragged_mla_attention = FRONT_END.ragged_mla_attention
varlen_attention = FRONT_END.varlen_attention
varlen_attention_backward = FRONT_END.varlen_attention_backward
