"""Which tests a run takes: the covering part, the rest of them, or all; and of these, one shard.

`make test` runs the covering part, `make test-all` everything, and continuous integration the covering part and one
shard of the rest, chosen by the commit, so that over the commits everything runs.

The covering part has every test but those that `SHARES` thins out. These are slow because each of their cases is traced
and compiled anew, or interpreted line by line. They are thinned out by groups: the cases whose ids begin alike, and
within the suite of these the checks of one operation; of each group at least one case stays. A few long tests are left
out whole. The suite's corners still check every operation on every backend through both front ends; laws are thinned
out only on runners beside those that run them all, torch's eager and reference. The rest is what was left out, with the
tests that draw batches, for these draw more.
"""

import os
import zlib
from collections import defaultdict
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import pytest

from benchmarks.shards import in_shard
from ragged_attention.testing.drawing import PROFILES, examples_of

TIERS = ("covering", "rest", "all")


def quick_to_compile() -> str:
    """Flags by which XLA compiles for a CPU in half the time: each module in one piece, and fusions in an older way.

    jaxlib 0.11 no longer has the older way, and XLA ends the process at a flag that it does not know.
    """
    in_one_piece, older = "--xla_cpu_parallel_codegen_split_count=1", "--xla_cpu_use_fusion_emitters=false"
    try:
        has_both = tuple(map(int, metadata.version("jaxlib").split(".")[:2])) < (0, 11)
    except metadata.PackageNotFoundError:
        return ""
    return f"{older} {in_one_piece}" if has_both else in_one_piece


QUICK_TO_COMPILE = quick_to_compile()
# Of the tests whose ids begin like this, below tests/, the covering part takes one case in so many of each group; of
# those with a 0 none: each takes as long as dozens of others.
SHARES = {
    "test_agreement.py::test_agreement[jax-": 3,
    "test_agreement.py::test_agreement[torch-triton-": 3,
    "test_agreement.py::test_corner[jax-numba-": 4,
    "test_agreement.py::test_corner[jax-reference-": 30,
    "test_agreement.py::test_corner[jax-triton-": 60,
    "test_agreement.py::test_corner[jax-xla-": 24,
    "test_agreement.py::test_corner[torch-reference-": 4,
    "test_agreement.py::test_corner[torch-triton-": 18,
    "test_laws.py::test_law[jax-numba-": 4,
    "test_laws.py::test_law[jax-reference-": 12,
    "test_laws.py::test_law[jax-triton-": 20,
    "test_laws.py::test_law[jax-xla-": 12,
    "test_laws.py::test_law[torch-triton-": 9,
    "test_compat_easydel.py::test_any_heads_and_page_sizes[": 4,
    "test_compat_easydel.py::test_decode_and_its_scale[": 4,
    "test_compat_easydel.py::test_every_length_of_a_chunk[": 3,
    "test_compat_ejkernel.py::test_agreement_with_the_definition[": 4,
    "test_compat_ejkernel.py::test_exactly_packed_tokens[": 4,
    "test_compat_ejkernel.py::test_tables_wider_than_64_pages[": 2,
    "test_compat_flash_mla.py::test_a_covering_part_of_2026_on_eager[": 4,
    "test_compat_flash_mla.py::test_a_covering_part_on_the_interpreter[": 8,
    "test_compat_flash_mla.py::test_any_number_of_heads[": 3,
    "test_compat_flash_mla.py::test_any_page_size[": 3,
    "test_compat_flash_mla.py::test_any_top_k[": 3,
    "test_compat_flash_mla.py::test_both_call_forms[": 2,
    "test_compat_flash_mla.py::test_dense_attention_in_three_forms[": 2,
    "test_compat_flash_mla.py::test_every_format_serves_dense_and_sparse[": 2,
    "test_compat_flash_mla.py::test_lengths_beyond_the_list[": 3,
    "test_compat_flash_mla.py::test_the_whole_list_of_2025_on_eager[": 6,
    "test_compat_jax_pallas.py::test_decode_agrees_with_jaxs_reference_and_the_definition[": 6,
    "test_compat_jax_pallas.py::test_every_drop_in_on_the_tpu_kernels": 0,
    "test_compat_jax_pallas.py::test_quantised_caches[": 6,
    "test_compat_jax_pallas.py::test_ragged_attention_agrees_with_jaxs_reference_and_the_definition[": 12,
    "test_compat_tpu_inference.py::test_a_cache_of_eight_bits_and_its_scales[": 3,
    "test_compat_tpu_inference.py::test_a_mixed_batch[": 3,
    "test_compile_matrix.py::test_a_thousand_batches_compile_few_variants": 0,
    "test_compile_matrix.py::test_compiled_": 0,
    "test_cuda_emulation.py::test_no_index_makes_them_touch_what_is_not_theirs[": 3,
    "test_cuda_emulation.py::test_the_kernels_agree_with_the_definition[": 3,
    "test_cuda_front_ends.py::test_decode[": 6,
    "test_cuda_front_ends.py::test_on_a_gpu_the_ffi_library_asks_for_the_stream": 0,
    "test_cuda_layouts.py::": 0,
    "test_cuda_library.py::": 0,
    "test_cuda_mutants.py::test_a_planted_fault_is_caught[": 0,
    "test_cuda_mutants.py::test_an_honest_kernel_passes[": 0,
    "test_cuda_mutants.py::test_the_sanitizer_": 0,
    "test_cuda_sass.py::test_the_kernels_are_as_planned": 0,
    "test_cuda_sass.py::test_the_page_has_every_kernel": 0,
    "test_demo.py::test_the_demo_serves_what_full_attention_gives[": 2,
    "test_demo.py::test_the_triton_kernels_run_in_the_interpreter_without_being_asked_to[": 0,
    "test_distributed_jax.py::test_a_devices_memory_falls_as_devices_grow": 0,
    "test_distributed_jax.py::test_a_ring_exchanges_keys_and_nothing_else": 0,
    "test_distributed_jax.py::test_heads_of_every_operation": 0,
    "test_distributed_jax.py::test_positions": 0,
    "test_distributed_jax.py::test_the_example_agrees_with_one_device[": 0,
    "test_distributed_jax.py::test_two_processes": 0,
    "test_distributed_torch.py::test_a_rank_that_": 0,
    "test_distributed_torch.py::test_a_ranks_memory_falls_as_ranks_grow": 0,
    "test_distributed_torch.py::test_heads_of_every_operator[": 0,
    "test_distributed_torch.py::test_one_rank_is_a_group_too": 0,
    "test_distributed_torch.py::test_positions_over_more_ranks[": 0,
    "test_distributed_torch.py::test_the_example_agrees_with_one_device[": 0,
    "test_docs.py::test_python_blocks_run[": 6,
    "test_gradients_jax.py::test_finite_differences_agree[": 2,
    "test_gradients_jax.py::test_gradients_lower_to_triton_for_cuda_and_to_xla_for_a_cpu": 0,
    "test_gradients_jax.py::test_jit_and_grad_in_either_order[": 4,
    "test_gradients_torch.py::test_a_step_with_its_gradient_compiles_into_one_graph[inductor]": 0,
    "test_heads_first_jax.py::test_new_keys_are_written_and_then_seen[": 2,
    "test_heads_first_mutants.py::test_a_wrong_prefill_is_caught[": 12,
    "test_jax_front_end.py::test_attention_keeps_no_second_cache[": 3,
    "test_jax_front_end.py::test_one_function_lowers_to_triton_for_cuda_and_to_xla_for_a_cpu": 0,
    "test_jax_reference.py::test_agrees_with_the_reference_of_jax[": 8,
    "test_kernels_numba.py::test_a_cpu_without_wide_registers_gives_the_same": 0,
    "test_kernels_triton.py::test_a_row_may_be_chosen_from_in_parts[": 4,
    "test_kernels_triton.py::test_ragged_latents_in_parts[": 6,
    "test_kernels_varlen.py::test_small_blocks_give_what_the_definition_says[": 2,
    "test_loops.py::test_a_prediction_is_made": 0,
    "test_memory_safety.py::test_a_kernel_that_steps_outside_dies[": 4,
    "test_memory_safety.py::test_garbage_indices[": 4,
    "test_mla_jax_front_end.py::test_a_donated_cache_is_written_in_place[": 3,
    "test_mla_jax_front_end.py::test_attention_keeps_no_second_cache[": 3,
    "test_mla_jax_front_end.py::test_one_function_lowers_to_triton_for_cuda_and_to_xla_for_a_cpu": 0,
    "test_mla_jax_front_end.py::test_quantised_bytes_are_those_of_the_definition[": 4,
    "test_mla_jax_front_end.py::test_the_dtype_of_the_bytes_is_of_no_matter[": 3,
    "test_mla_jax_front_end.py::test_the_fallback_agrees_with_the_definition[": 4,
    "test_mla_jax_front_end.py::test_under_other_rules_of_types[": 2,
    "test_mla_mutants.py::test_a_wrong_decode_is_caught[": 6,
    "test_mla_mutants.py::test_a_wrong_helper_is_caught[": 2,
    "test_mla_mutants.py::test_a_wrong_prefill_is_caught[": 3,
    "test_mla_torch_front_end.py::test_a_whole_step_compiles_into_one_graph[": 4,
    "test_mutants.py::test_a_wrong_attention_is_caught[": 2,
    "test_num_seqs.py::test_an_update_writes_those_and_attends_to_them[": 3,
    "test_num_seqs.py::test_attention_is_that_of_the_live_sequences[": 3,
    "test_pallas_heads_first.py::test_every_way_to_cut_a_call_gives_the_same[": 0,
    "test_pallas_latent.py::test_lists_of_many_chunks[": 0,
    "test_pallas_ragged.py::test_a_table_beyond_scalar_memory_is_taken_in_pieces": 0,
    "test_pallas_write.py::test_runs_and_slots_that_come_twice_are_written_without_a_race[": 2,
    "test_peers_compiled.py::test_a_peer_stands_beside_ours": 0,
    "test_pipelines.py::test_a_kernel_is_compiled_and_read": 0,
    "test_pipelines.py::test_decode_loops_keep_keys_ahead": 0,
    "test_pipelines.py::test_the_indexers_decoding_reaches_the_bandwidth": 0,
    "test_portable_varlen.py::test_eager_holds_few_logits_of_long_sequences[": 2,
    "test_portable_varlen.py::test_xla_tiles_of_any_size_agree[": 3,
    "test_ptx_cuda.py::test_a_kernel_agrees_with_the_definition[": 0,
    "test_ptx_cuda.py::test_every_kernel_has_a_case": 0,
    "test_ptx_cuda.py::test_faults_of_few_heads_are_noticed[": 3,
    "test_ptx_cuda.py::test_few_heads[": 2,
    "test_ptx_cuda.py::test_planted_faults_are_noticed[": 0,
    "test_ptx_cuda.py::test_the_suite[": 0,
    "test_ptx_suite.py::": 0,
    "test_rejects.py::test_invalid_values_are_else_no_error[": 4,
    "test_roofline.py::test_the_model_counts_what_the_kernels_do[": 6,
    "test_small_soft_caps.py::test_a_small_cap_in_the_kernel_for_tpus": 0,
    "test_tiles.py::test_the_tiles_of_gpus_agree_with_the_definition[": 0,
    "test_torch_front_end.py::test_a_whole_step_compiles_into_one_graph[": 3,
    "test_tpu_cores.py::test_sharded_heads_give_the_unsharded_result[on_wait]": 0,
    "test_tpu_cores.py::test_two_cores_share_a_decode_in_every_way[": 0,
    "test_tpu_interpret.py::test_a_kernel_that_hangs_is_ended_and_named": 0,
    "test_tpu_interpret.py::test_all_checks_agree[": 0,
    "test_tpu_interpret.py::test_an_honest_kernel_passes[": 0,
    "test_tpu_interpret.py::test_the_kernels_agree_with_the_definition[eager-": 0,
    "test_tpu_lowering.py::test_a_case_lowers[": 32,
    "test_tpu_mutants.py::test_a_planted_fault_is_caught[": 4,
    "test_triton_far_strides.py::test_strides_may_exceed_32_bits[": 3,
    "test_varlen_mutants.py::test_a_law_notices_without_an_oracle[": 3,
    "test_varlen_mutants.py::test_a_wrong_dense_gradient_is_caught[": 3,
    "test_varlen_reference.py::test_gradients_of_packed_attention[": 4,
    "test_vllm_cases.py::test_agreement_with_the_definition[": 17,
}


def add_options(group: Any) -> None:
    group.addoption("--tier", choices=TIERS, help="default: covering; all in larger profiles and for tests by their id")
    group.addoption("--shard", metavar="WHICH/COUNT", help="of these tests one shard; WHICH is a number or any text")


def tier_of(config: pytest.Config) -> str:
    by_id = any("::" in argument for argument in config.args)
    whole = by_id or examples_of() != PROFILES["dev"]
    return config.getoption("--tier") or ("all" if whole else "covering")


def configure(config: pytest.Config) -> None:
    if tier_of(config) == "covering":
        # Compiling is most of what tests from jax do. Where everything runs, XLA optimises as it does for users.
        os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        os.environ.setdefault("XLA_FLAGS", QUICK_TO_COMPILE)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tier, shard = tier_of(config), config.getoption("--shard")
    left_out = left_out_of_the_covering_part({item.nodeid: _check_of(item) for item in items})
    kept, spared = [], []
    for item in items:
        draws = "examples" in getattr(item, "fixturenames", ())
        chosen = {"covering": item.nodeid not in left_out, "rest": item.nodeid in left_out or draws, "all": True}[tier]
        (kept if chosen and (not shard or in_shard(item.nodeid, shard)) else spared).append(item)
    config.hook.pytest_deselected(items=spared)
    items[:] = kept


def left_out_of_the_covering_part(tests: Mapping[str, str]) -> set[str]:
    """Of these tests, each an id with the check of the suite that it runs or "", those that are left out."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for node, check in tests.items():
        slow = next((prefix for prefix in SHARES if node.removeprefix("tests/").startswith(prefix)), "")
        groups[slow, subject_of(check)].append(node)
    left_out = set()
    for (slow, subject), group in groups.items():
        if (every := SHARES.get(slow, 1)) == 0:
            left_out.update(group)
            continue
        # Where each group begins differs, so that runners do not all take the same checks.
        first = zlib.crc32(f"{slow}{subject}".encode()) % min(every, len(group))
        left_out.update(node for number, node in enumerate(group) if number % every != first)
    return left_out


def subject_of(check: str) -> str:
    """What a check is about, as its name begins: "corner: latent decode"."""
    kind, _, name = check.partition(": ")
    return f"{kind}: {name.partition(',')[0]}" if "," in name else kind


def _check_of(item: pytest.Item) -> str:
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return str(params.get("check", ""))
