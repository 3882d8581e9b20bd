"""FlashInfer's attention by its names, order, defaults and conventions, on every device.

`import ragged_attention.compat.flashinfer as flashinfer` runs code written for the `flashinfer` package, 0.7.2.post1:
the wrappers with `plan` and `run`, attention of single requests, merges, appends to paged caches, top-k, block sparse
matrices, and MiniMax's sparse attention. The modules have FlashInfer's names too, such as `flashinfer.decode`.

`plan` keeps tensors and settings and compiles nothing. No kernel uses the workspace, and arguments that choose among
FlashInfer's kernels have no effect. An argument that would change results, and that our operations do not support,
raises `Unsupported` with its name. Log-sum-exps have base 2, except those of `msa_ops`, which have base e. They include
sinks.
"""

from ragged_attention.compat.flashinfer import (
    cascade,
    decode,
    mla,
    msa_ops,
    page,
    prefill,
    quantization,
    sparse,
    topk,
)
from ragged_attention.compat.flashinfer.cascade import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    MultiLevelCascadeAttentionWrapper,
    merge_state,
    merge_state_in_place,
    merge_states,
)
from ragged_attention.compat.flashinfer.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
    single_decode_with_kv_cache,
)
from ragged_attention.compat.flashinfer.mla import BatchMLAPagedAttentionWrapper
from ragged_attention.compat.flashinfer.page import (
    append_paged_kv_cache,
    append_paged_mla_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
    nvfp4_quantize_append_paged_kv_cache,
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,
)
from ragged_attention.compat.flashinfer.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from ragged_attention.compat.flashinfer.quantization import (
    nvfp4_kv_dequantize,
    nvfp4_kv_dequantize_paged,
    nvfp4_kv_quantize,
    packbits,
    segment_packbits,
)
from ragged_attention.compat.flashinfer.sparse import (
    BlockSparseAttentionWrapper,
    VariableBlockSparseAttentionWrapper,
)
from ragged_attention.compat.flashinfer.topk import (
    TopKTieBreak,
    top_k,
    top_k_page_table_transform,
    top_k_ragged_transform,
)

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "BlockSparseAttentionWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "TopKTieBreak",
    "VariableBlockSparseAttentionWrapper",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "cascade",
    "decode",
    "fast_decode_plan",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "mla",
    "msa_ops",
    "nvfp4_kv_dequantize",
    "nvfp4_kv_dequantize_paged",
    "nvfp4_kv_quantize",
    "nvfp4_quantize_append_paged_kv_cache",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
    "packbits",
    "page",
    "prefill",
    "quantization",
    "segment_packbits",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "sparse",
    "top_k",
    "top_k_page_table_transform",
    "top_k_ragged_transform",
    "topk",
]
