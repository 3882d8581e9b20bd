"""The names, order and defaults of the arguments of FlashInfer 0.7.2.post1, which `compat.flashinfer` preserves.

FlashInfer's `BatchDecodeWithPagedKVCacheWrapper.plan` takes its arguments after `page_size` as `*args, **kwargs`. They
are written out here in the order in which it reads them.
"""

SIGNATURES = {
    "decode.single_decode_with_kv_cache": (
        "q, k, v, kv_layout='NHD', pos_encoding_mode='NONE', use_tensor_cores=False, q_scale=None, "
        "k_scale=None, v_scale=None, window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, "
        "rope_theta=None, return_lse=False"
    ),
    "decode.BatchDecodeWithPagedKVCacheWrapper.__init__": (
        "self, float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, use_tensor_cores=False, "
        "paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None, "
        "backend='auto', jit_args=None"
    ),
    "decode.BatchDecodeWithPagedKVCacheWrapper.reset_workspace_buffer": (
        "self, float_workspace_buffer, int_workspace_buffer"
    ),
    "decode.BatchDecodeWithPagedKVCacheWrapper.plan": (
        "self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, "
        "pos_encoding_mode='NONE', window_left=-1, logits_soft_cap=None, q_data_type='float16', "
        "kv_data_type=None, o_data_type=None, data_type=None, sm_scale=None, rope_scale=None, "
        "rope_theta=None, non_blocking=True, block_tables=None, seq_lens=None, fixed_split_size=None, "
        "disable_split_kv=False, q_len_per_req=1, *, window_right=0, is_causal=None"
    ),
    "decode.BatchDecodeWithPagedKVCacheWrapper.forward": (
        "self, q, paged_kv_cache, pos_encoding_mode='NONE', q_scale=None, k_scale=None, v_scale=None, "
        "window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None"
    ),
    "decode.BatchDecodeWithPagedKVCacheWrapper.run": (
        "self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, "
        "return_lse=False, enable_pdl=None, window_left=None, sinks=None, q_len_per_req=None, "
        "skip_softmax_threshold_scale_factor=None, kv_cache_sf=None"
    ),
    "decode.BatchDecodeWithPagedKVCacheWrapper.forward_return_lse": (
        "self, q, paged_kv_cache, pos_encoding_mode='NONE', q_scale=None, k_scale=None, v_scale=None, "
        "window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None"
    ),
    "decode.CUDAGraphBatchDecodeWithPagedKVCacheWrapper.__init__": (
        "self, workspace_buffer, indptr_buffer, indices_buffer, last_page_len_buffer, kv_layout='NHD', "
        "use_tensor_cores=False"
    ),
    "decode.fast_decode_plan": (
        "self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, "
        "pos_encoding_mode='NONE', window_left=-1, logits_soft_cap=None, q_data_type=None, kv_data_type=None, "
        "data_type=None, sm_scale=None, rope_scale=None, rope_theta=None, non_blocking=True, fixed_split_size=None, "
        "disable_split_kv=False, q_len_per_req=1, global_override_indptr_cpu=None"
    ),
    "prefill.single_prefill_with_kv_cache": (
        "q, k, v, scale_q=None, scale_k=None, scale_v=None, o_dtype=None, custom_mask=None, "
        "packed_custom_mask=None, causal=False, kv_layout='NHD', pos_encoding_mode='NONE', "
        "use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None, rope_scale=None, "
        "rope_theta=None, backend='auto', return_lse=False, kv_cache_sf=None, k_scale=None, v_scale=None"
    ),
    "prefill.BatchPrefillWithPagedKVCacheWrapper.__init__": (
        "self, float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, qo_indptr_buf=None, "
        "paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, "
        "custom_mask_buf=None, mask_indptr_buf=None, backend='auto', jit_args=None, jit_kwargs=None, "
        "variant_owns_mask=False"
    ),
    "prefill.BatchPrefillWithPagedKVCacheWrapper.reset_workspace_buffer": (
        "self, float_workspace_buffer, int_workspace_buffer"
    ),
    "prefill.BatchPrefillWithPagedKVCacheWrapper.plan": (
        "self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, "
        "num_kv_heads, head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, "
        "causal=False, pos_encoding_mode='NONE', use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, "
        "logits_soft_cap=None, rope_scale=None, rope_theta=None, q_data_type='float16', kv_data_type=None, "
        "o_data_type=None, non_blocking=True, prefix_len_ptr=None, token_pos_in_items_ptr=None, "
        "token_pos_in_items_len=0, max_item_len_ptr=None, seq_lens=None, seq_lens_q=None, block_tables=None, "
        "max_token_per_sequence=None, max_sequence_kv=None, fixed_split_size=None, disable_split_kv=False, "
        "uniform_q_len=None"
    ),
    "prefill.BatchPrefillWithPagedKVCacheWrapper.forward": (
        "self, q, paged_kv_cache, causal=False, pos_encoding_mode='NONE', use_fp16_qk_reduction=False, "
        "k_scale=None, v_scale=None, window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, "
        "rope_theta=None"
    ),
    "prefill.BatchPrefillWithPagedKVCacheWrapper.run": (
        "self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, "
        "return_lse=False, lse_base='log2', lse_layout='NH', enable_pdl=None, window_left=None, sinks=None, "
        "kv_cache_sf=None, skip_softmax_threshold_scale_factor=None, use_fp16_softmax=None, "
        "uses_spcompress=None"
    ),
    "prefill.BatchPrefillWithPagedKVCacheWrapper.forward_return_lse": (
        "self, q, paged_kv_cache, causal=False, pos_encoding_mode='NONE', use_fp16_qk_reduction=False, "
        "k_scale=None, v_scale=None, window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, "
        "rope_theta=None"
    ),
    "prefill.BatchPrefillWithRaggedKVCacheWrapper.__init__": (
        "self, float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, qo_indptr_buf=None, "
        "kv_indptr_buf=None, custom_mask_buf=None, mask_indptr_buf=None, backend='auto', jit_args=None, "
        "jit_kwargs=None, variant_owns_mask=False"
    ),
    "prefill.BatchPrefillWithRaggedKVCacheWrapper.reset_workspace_buffer": (
        "self, float_workspace_buffer, int_workspace_buffer"
    ),
    "prefill.BatchPrefillWithRaggedKVCacheWrapper.plan": (
        "self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, "
        "custom_mask=None, packed_custom_mask=None, causal=False, pos_encoding_mode='NONE', "
        "use_fp16_qk_reduction=False, window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, "
        "rope_theta=None, q_data_type='float16', kv_data_type=None, o_data_type=None, non_blocking=True, "
        "prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0, max_item_len_ptr=None, "
        "fixed_split_size=None, disable_split_kv=False, seq_lens=None, seq_lens_q=None, "
        "max_token_per_sequence=None, max_sequence_kv=None, v_indptr=None, o_indptr=None, uniform_q_len=None"
    ),
    "prefill.BatchPrefillWithRaggedKVCacheWrapper.forward": (
        "self, q, k, v, causal=False, pos_encoding_mode='NONE', use_fp16_qk_reduction=False, window_left=-1, "
        "logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None"
    ),
    "prefill.BatchPrefillWithRaggedKVCacheWrapper.run": (
        "self, q, k, v, *args, q_scale=None, k_scale=None, v_scale=None, o_scale=None, out=None, lse=None, "
        "return_lse=False, lse_base='log2', lse_layout='NH', enable_pdl=None, kv_cache_sf=None"
    ),
    "prefill.BatchPrefillWithRaggedKVCacheWrapper.forward_return_lse": (
        "self, q, k, v, causal=False, pos_encoding_mode='NONE', use_fp16_qk_reduction=False, window_left=-1, "
        "logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None"
    ),
    "mla.BatchMLAPagedAttentionWrapper.__init__": (
        "self, float_workspace_buffer, use_cuda_graph=False, qo_indptr=None, kv_indptr=None, kv_indices=None, "
        "kv_len_arr=None, backend='auto'"
    ),
    "mla.BatchMLAPagedAttentionWrapper.plan": (
        "self, qo_indptr=None, kv_indptr=None, kv_indices=None, kv_len_arr=None, num_heads=None, "
        "head_dim_ckv=None, head_dim_kpe=None, page_size=None, causal=None, sm_scale=None, q_data_type=None, "
        "kv_data_type=None, use_profiler=False, *, metadata=None, cum_seq_lens_q=None, block_tables=None, "
        "seq_lens=None, max_q_len=None, query_layout=None, kv_cache_layout=None, lse_mode='none', "
        "output_dtype=None, output_scale='none', scale_mode='default', skip_softmax=False, enable_pdl=None, "
        "use_sinks=False"
    ),
    "mla.BatchMLAPagedAttentionWrapper.run": (
        "self, q_nope=None, q_pe=None, ckv_cache=None, kpe_cache=None, out=None, lse=None, return_lse=False, "
        "profiler_buffer=None, kv_len=None, page_table=None, return_lse_base_on_e=False, o_scale=None, *, "
        "query=None, kv_cache=None, ckv_scale=None, ckv_scale_arr=None, kpe_scale=None, sinks=None, "
        "skip_softmax_threshold_scale_factor=None, bmm1_scale=None, bmm2_scale=None"
    ),
    "mla.MLAPlanMetadata.csr": (
        "cls, qo_indptr, kv_indptr, kv_indices, kv_len_arr"
    ),
    "mla.MLAPlanMetadata.dense": (
        "cls, cum_seq_lens_q, block_tables, seq_lens, max_q_len=None"
    ),
    "mla.MLAPlanMetadata.dual": (
        "cls, qo_indptr, kv_indptr, kv_indices, kv_len_arr, *, cum_seq_lens_q, block_tables, seq_lens, "
        "max_q_len=None"
    ),
    "cascade.merge_state": (
        "v_a, s_a, v_b, s_b"
    ),
    "cascade.merge_state_in_place": (
        "v, s, v_other, s_other, mask=None"
    ),
    "cascade.merge_states": (
        "v, s"
    ),
    "cascade.MultiLevelCascadeAttentionWrapper.__init__": (
        "self, num_levels, float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, "
        "qo_indptr_buf_arr=None, paged_kv_indptr_buf_arr=None, paged_kv_indices_buf_arr=None, "
        "paged_kv_last_page_len_buf_arr=None"
    ),
    "cascade.MultiLevelCascadeAttentionWrapper.reset_workspace_buffer": (
        "self, float_workspace_buffer, int_workspace_buffers"
    ),
    "cascade.MultiLevelCascadeAttentionWrapper.plan": (
        "self, qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len, "
        "num_qo_heads, num_kv_heads, head_dim, page_size, causal=False, pos_encoding_mode='NONE', "
        "use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None, rope_scale=None, "
        "rope_theta=None, q_data_type='float16', kv_data_type=None"
    ),
    "cascade.MultiLevelCascadeAttentionWrapper.run": (
        "self, q, paged_kv_cache"
    ),
    "cascade.BatchDecodeWithSharedPrefixPagedKVCacheWrapper.__init__": (
        "self, float_workspace_buffer, kv_layout='NHD'"
    ),
    "cascade.BatchDecodeWithSharedPrefixPagedKVCacheWrapper.reset_workspace_buffer": (
        "self, float_workspace_buffer, int_workspace_buffer"
    ),
    "cascade.BatchDecodeWithSharedPrefixPagedKVCacheWrapper.begin_forward": (
        "self, unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len, num_qo_heads, num_kv_heads, "
        "head_dim, page_size, data_type='float16'"
    ),
    "cascade.BatchDecodeWithSharedPrefixPagedKVCacheWrapper.forward": (
        "self, q, k_shared, v_shared, unique_kv_cache"
    ),
    "cascade.BatchPrefillWithSharedPrefixPagedKVCacheWrapper.__init__": (
        "self, float_workspace_buffer, kv_layout='NHD'"
    ),
    "cascade.BatchPrefillWithSharedPrefixPagedKVCacheWrapper.reset_workspace_buffer": (
        "self, float_workspace_buffer, int_workspace_buffer"
    ),
    "cascade.BatchPrefillWithSharedPrefixPagedKVCacheWrapper.begin_forward": (
        "self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, "
        "num_kv_heads, head_dim, page_size"
    ),
    "cascade.BatchPrefillWithSharedPrefixPagedKVCacheWrapper.forward": (
        "self, q, k_shared, v_shared, unique_kv_cache, causal=False, use_fp16_qk_reduction=False, "
        "sm_scale=None, rope_scale=None, rope_theta=None"
    ),
    "page.get_batch_indices_positions": (
        "append_indptr, seq_lens, nnz, batch_indices=None, positions=None"
    ),
    "page.get_seq_lens": (
        "kv_indptr, kv_last_page_len, page_size"
    ),
    "page.append_paged_mla_kv_cache": (
        "append_ckv, append_kpe, batch_indices, positions, ckv_cache, kpe_cache, kv_indices, kv_indptr, "
        "kv_last_page_len"
    ),
    "page.append_paged_kv_cache": (
        "append_key, append_value, batch_indices, positions, paged_kv_cache, kv_indices, kv_indptr, "
        "kv_last_page_len, kv_layout='NHD'"
    ),
    "page.nvfp4_quantize_append_paged_kv_cache": (
        "append_key, append_value, batch_indices, positions, paged_kv_cache, kv_cache_sf, kv_indices, kv_indptr, "
        "kv_last_page_len, k_scale, v_scale, kv_layout='NHD'"
    ),
    "page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping": (
        "append_key, append_value, slot_mapping, paged_kv_cache, kv_cache_sf, k_scale, v_scale, kv_layout='NHD'"
    ),
    "topk.top_k": (
        "input, k, sorted=False, deterministic=False, tie_break=0, dsa_graph_safe=False"
    ),
    "topk.top_k_page_table_transform": (
        "input, src_page_table, lengths, k, row_to_batch=None, deterministic=False, tie_break=0, "
        "dsa_graph_safe=False, row_starts=None, page_table_row_starts=None, *, page_size=1, out=None, "
        "out_raw_indices=None"
    ),
    "topk.top_k_ragged_transform": (
        "input, offsets, lengths, k, deterministic=False, tie_break=0, dsa_graph_safe=False, row_starts=None"
    ),
    "sparse.BlockSparseAttentionWrapper.__init__": (
        "self, float_workspace_buffer, backend='auto'"
    ),
    "sparse.BlockSparseAttentionWrapper.reset_workspace_buffer": (
        "self, float_workspace_buffer, int_workspace_buffer"
    ),
    "sparse.BlockSparseAttentionWrapper.plan": (
        "self, indptr, indices, M, N, R, C, num_qo_heads, num_kv_heads, head_dim, mask=None, packed_mask=None, "
        "causal=False, pos_encoding_mode='NONE', use_fp16_qk_reduction=False, logits_soft_cap=None, sm_scale=None, "
        "rope_scale=None, rope_theta=None, q_data_type='float16', kv_data_type=None, o_data_type='float16', "
        "non_blocking=True, block_mask=None, kv_block_lens=None, q2k_indices=None, q2k_num=None, kv_splits=None, "
        "use_clc=None, q_scale=None, k_scale=None, v_scale=None"
    ),
    "sparse.BlockSparseAttentionWrapper.forward": (
        "self, q, k, v, scale_q=None, scale_k=None, scale_v=None, pos_encoding_mode='NONE', "
        "use_fp16_qk_reduction=False, logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None"
    ),
    "sparse.BlockSparseAttentionWrapper.run": (
        "self, q, k, v, scale_q=None, scale_k=None, scale_v=None, out=None, lse=None, return_lse=False, "
        "enable_pdl=None"
    ),
    "sparse.VariableBlockSparseAttentionWrapper.__init__": (
        "self, float_workspace_buffer, backend='auto'"
    ),
    "sparse.VariableBlockSparseAttentionWrapper.reset_workspace_buffer": (
        "self, float_workspace_buffer, int_workspace_buffer"
    ),
    "sparse.VariableBlockSparseAttentionWrapper.plan": (
        "self, block_mask_map, block_row_sz, block_col_sz, num_qo_heads, num_kv_heads, head_dim, causal=False, "
        "pos_encoding_mode='NONE', use_fp16_qk_reduction=False, logits_soft_cap=None, sm_scale=None, "
        "rope_scale=None, rope_theta=None, non_blocking=True, q_data_type='float16', kv_data_type=None"
    ),
    "sparse.VariableBlockSparseAttentionWrapper.forward": (
        "self, q, k, v, pos_encoding_mode='NONE', use_fp16_qk_reduction=False, logits_soft_cap=None, sm_scale=None, "
        "rope_scale=None, rope_theta=None"
    ),
    "sparse.VariableBlockSparseAttentionWrapper.run": (
        "self, q, k, v, out=None, lse=None, return_lse=False, enable_pdl=None"
    ),
    "msa_ops.msa_proxy_score": (
        "q, k, cu_seqlens_q, cu_seqlens_k=None, *, page_table=None, seqused_k=None, causal=True, max_seqlen_q=None, "
        "max_k_tiles=None, output=None, reduce_heads=False, q_offset=None"
    ),
    "msa_ops.msa_topk_select": (
        "max_score, topk, num_valid_pages=None, output=None, force_begin_blocks=0, force_end_blocks=0"
    ),
    "msa_ops.msa_sparse_attention": (
        "q, k, v, q2k_indices, cu_seqlens_q, cu_seqlens_k=None, causal=False, softmax_scale=None, page_table=None, "
        "seqused_k=None, return_softmax_lse=False, k_scale=None, v_scale=None, k_global_scale=None, "
        "v_global_scale=None, q_offset=None, return_temperature_lse=False, lse_temperature_scale=1.0, workspace=None"
    ),
    "msa_ops.msa_sparse_decode_attention": (
        "q, k, v, q2k_indices, *, page_table=None, seqused_k=None, cu_seqlens_k=None, seqlen_q=1, causal=True, "
        "softmax_scale=None, return_softmax_lse=False, k_scale=None, v_scale=None, k_global_scale=None, "
        "v_global_scale=None, q_offset=None, partial_dtype=None, force_fused=None, workspace=None, out=None"
    ),
    "msa_ops.supports_packed_kv": (
        "device"
    ),
    "quantization.packbits": (
        "x, bitorder='big'"
    ),
    "quantization.segment_packbits": (
        "x, indptr, bitorder='big'"
    ),
    "quantization.nvfp4_kv_quantize": (
        "input, global_scale"
    ),
    "quantization.nvfp4_kv_dequantize": (
        "fp4_data, block_scales, global_scale, output_dtype=torch.bfloat16"
    ),
    "quantization.nvfp4_kv_dequantize_paged": (
        "paged_kv_cache, kv_cache_sf, block_tables, seq_lens, k_scale, v_scale, output_k, output_v, kv_layout='NHD'"
    ),
}  # fmt: skip
