"""The torch front end: every operation on torch tensors, on any device that torch has.

Each function calls a `torch.library` operator (`torch.ops.ragged_attention.*`), so it works under
`torch.compile(fullgraph=True)` and in CUDA graphs. Nothing waits for the device except the backends `eager` and
`reference`, and checks under `validate="full"`.
"""

from ragged_attention.torch._operators import FRONT_END

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
