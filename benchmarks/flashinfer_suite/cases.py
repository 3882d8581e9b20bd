"""The sample of FlashInfer's pytest cases."""

from pathlib import Path

from benchmarks.flashinfer_suite.substitute import as_sm12x
from benchmarks.foreign_tests import Sample

FILES = (
    "tests/attention/test_batch_decode_kernels.py",
    "tests/attention/test_batch_prefill_kernels.py",
    "tests/attention/test_single_prefill.py",
    "tests/attention/test_decode_prefill_lse.py",
    "tests/attention/test_shared_prefix_kernels.py",
    "tests/attention/test_sliding_window.py",
    "tests/attention/test_logits_cap.py",
    "tests/attention/test_tensor_cores_decode.py",
    "tests/attention/test_non_contiguous_decode.py",
    "tests/attention/test_non_contiguous_prefill.py",
    "tests/attention/test_decode_fp8_calibration_scale.py",
    "tests/attention/test_deepseek_mla.py",
    "tests/attention/test_fp8_prefill.py",
    "tests/attention/test_batch_invariant_fa2.py",
    "tests/attention/test_batch_prefill.py",
    "tests/attention/test_hopper_fp8_attention.py",
    "tests/attention/test_page.py",
    "tests/attention/test_mla_page.py",
    "tests/attention/test_alibi.py",
    "tests/attention/test_block_sparse.py",
    "tests/utils/test_quantization.py",
    "tests/utils/test_topk.py",
    "tests/trace/test_append_paged_kv_cache_reference_correctness.py",
    "tests/trace/test_append_paged_mla_kv_cache_reference_correctness.py",
    "tests/trace/test_merge_state_reference_correctness.py",
    "tests/trace/test_merge_state_in_place_reference_correctness.py",
    "tests/trace/test_merge_states_reference_correctness.py",
    "tests/trace/test_mla_paged_decode_reference_correctness.py",
    "tests/trace/test_multi_level_cascade_run_reference_correctness.py",
    "tests/trace/test_single_decode_reference_correctness.py",
    "tests/trace/test_single_prefill_reference_correctness.py",
)
MSA_FILES = (
    "tests/msa_ops/test_msa_ops.py",
    "tests/msa_ops/test_msa_topk_per_token.py",
    "tests/msa_ops/test_packed_kv.py",
    "tests/msa_ops/test_sparse_prefill.py",
    "tests/msa_ops/test_proxy_fp4.py",
    "tests/msa_ops/test_cuda_graph.py",
)
SIZES = ("batch_size", "num_qo_heads", "num_heads", "head_dim", "qo_len", "kv_len", "kv_len_2", "shared_kv_len",
         "unique_kv_len", "vocab_size", "seq_len", "num_rows", "max_len", "nnz_kv")  # fmt: skip

# Tests that say nothing about our results: they start processes that need FlashInfer, or check FlashInfer's limits.
LEFT_OUT = {
    "test_single_decode_torch_compile_cuda_graph": "a process of FlashInfer's, for CUDA graphs",
    "test_single_prefill_torch_compile_cuda_graph": "a process of FlashInfer's, for CUDA graphs",
    "test_nvfp4_quantize_append_paged_kv_cache_with_slot_mapping_cuda_graph_bad_scale": "a process of FlashInfer's",
    "test_batch_decode_rejects_unequal_kv_strides_nvfp4_contract": "a limit of a kernel of FlashInfer's",
    "test_fp8_kv_plan_rejects_fp16_q": "a limit of a kernel of FlashInfer's",
    "test_fp8_kv_requires_scales": "the words of FlashInfer's errors",
    "test_tensor_core_decode_rejects_mismatched_q_len": "the words of FlashInfer's errors",
    "test_q2k_indices_must_be_contiguous": "a limit of a kernel of FlashInfer's",
    "test_unrelated_strided_views_rejected": "a limit of a kernel of FlashInfer's",
    "test_msa_proxy_score_paged_fp8": "the words of FlashInfer's errors",
    "test_proxy_split_k_heuristic": "how FlashInfer divides work",
    "test_union_prefill_kernel_matches_public_api_and_oracle": "a kernel of FlashInfer's by itself",
}


def run(checkout: Path, only: str, cases: int, largest: float) -> Sample:
    """Run the sample of cases in the files whose names contain `only`."""
    sample = Sample(cases, largest, SIZES, left_out=LEFT_OUT)
    sample.run(checkout, [file for file in FILES if only in file])
    with as_sm12x():
        sample.run(checkout, [file for file in MSA_FILES if only in file])
    return sample
