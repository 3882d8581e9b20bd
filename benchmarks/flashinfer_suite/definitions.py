"""Runs FlashInfer's trace definitions.

A definition has three functions: `init` makes the inputs, and `check` compares our results with those of `reference`.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

import ragged_attention.compat.flashinfer as ours
from ragged_attention.compat.flashinfer._tables import block_table
from ragged_attention.torch import norm_rope_write

WORKSPACE = torch.empty(16, dtype=torch.uint8)
Outputs = tuple[Any, Any]  # our results, the reference's results


def planned(wrapper: Any, inputs: Mapping[str, Any], names: tuple[str, ...], reference: Callable[..., Any]) -> Outputs:
    """(results of our wrapper after `plan` and `run`, results of the reference).

    The reference gets the tensors, then those arguments of the plan that `names` lists, then the scale.
    """
    plan, run = inputs["plan"], dict(inputs["run"])
    planned_wrapper = wrapper(WORKSPACE)
    planned_wrapper.plan(**plan)
    got = planned_wrapper.run(**run, return_lse=True)
    tensors = [x for value in run.values() for x in (value if isinstance(value, tuple) else (value,))]
    scale = plan.get("sm_scale", run["q"].shape[-1] ** -0.5 if "q" in run else None)
    return got, reference(*tensors, *(plan[name] for name in names), scale)


def called(name: str) -> Callable[..., Outputs]:
    """A function that calls our function `name` and the reference with the same arguments.

    bfloat16 arguments are converted to float16, since the checks for single requests have bounds below the rounding of
    bfloat16.
    """

    def compare(inputs: Mapping[str, Any], reference: Callable[..., Any]) -> Outputs:
        half = {key: value.half() if is_bfloat16(value) else value for key, value in inputs.items()}
        return getattr(ours, name)(**half), reference(**half)

    return compare


def written(name: str, *outputs: str) -> Callable[..., Outputs]:
    """A function that compares our function `name` with the reference. Both write the arguments `outputs` in place."""

    def compare(inputs: Mapping[str, Any], reference: Callable[..., Any]) -> Outputs:
        copies = {key: copied(value) for key, value in inputs.items()}
        getattr(ours, name)(**inputs)
        got = [x for key in outputs for x in (inputs[key] if isinstance(inputs[key], tuple) else (inputs[key],))]
        results = reference(**copies)
        if results is None:
            results = tuple(copies[key] for key in outputs)
        return tuple(got), tuple(results)

    return compare


def sorted_selection(name: str) -> Callable[..., Outputs]:
    """A function that sorts our selection and the reference's before a comparison, since their orders may differ."""
    return lambda inputs, reference: (
        getattr(ours, name)(**inputs).sort(1)[0], reference(**inputs).sort(1)[0],
    )  # fmt: skip


def rotated(inputs: Mapping[str, Any], reference: Callable[..., Any]) -> Outputs:
    """Rotated queries and keys, for pairs (i, i + half) and for adjacent pairs. Our keys are read back from pages."""
    got, want = [], []
    head, count = inputs["head_size"], len(inputs["positions"])
    q, k = (inputs[name].unflatten(-1, (-1, head)) for name in ("query", "key"))
    for is_neox in (True, False):
        pages = torch.zeros(2, -(-count // 16), 16, *k.shape[1:], dtype=k.dtype)
        rotated_q, (keys, _) = norm_rope_write(
            q, k, torch.zeros_like(k), (pages[0], pages[1]), torch.arange(count), positions=inputs["positions"],
            cos_sin=inputs["cos_sin_cache"], interleaved=not is_neox,
        )  # fmt: skip
        got += [rotated_q.flatten(1), keys.flatten(0, 1)[:count].flatten(1)]
        want += reference(**inputs, is_neox=is_neox)
    return tuple(got), tuple(want)


def rotated_into_pages(inputs: Mapping[str, Any], reference: Callable[..., Any]) -> Outputs:
    """Rotated keys and values, written to 8-bit pages."""
    copies = {key: copied(value) for key, value in inputs.items()}
    reference(**copies)
    q, k = (torch.cat((inputs[f"{name}_rope"], inputs[f"{name}_nope"]), -1) for name in "qk")
    lens = torch.bincount(inputs["batch_indices"]).int()
    _, (keys, values) = norm_rope_write(
        q, k, inputs["v"], inputs["paged_kv_cache"], positions=inputs["pos_ids"], cos_sin=inputs["cos_sin_cache"],
        interleaved=not inputs["is_neox"], kv_lens=lens,
        page_indices=block_table(inputs["kv_indptr"], inputs["kv_indices"]),
        cu_q_lens=torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int(), k_scale=1.0, v_scale=1.0,
    )  # fmt: skip
    width = inputs["k_rope"].shape[-1]
    keys = torch.cat((keys[..., width:].float(), keys[..., :width].float()), -1)
    return (keys, values.float()), tuple(pages.float() for pages in copies["paged_kv_cache"])


def of_msa(name: str) -> Callable[..., Outputs]:
    """A function that calls our MSA function `name` and the reference with the same arguments."""
    return lambda inputs, reference: (getattr(ours.msa_ops, name)(**inputs), reference(**inputs))


def is_bfloat16(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16


def copied(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(copied, value))
    return value.clone() if isinstance(value, torch.Tensor) else value


def by_plan(wrapper: Any, *names: str) -> Callable[..., Outputs]:
    return lambda inputs, reference: planned(wrapper, inputs, names, reference)


HEADS = dict(num_qo_heads=8, num_kv_heads=2, head_dim=64)
LATENTS = dict(num_qo_heads=4, page_size=16, num_pages_per_seq=2)
# (a definition's module, its name, the sizes for its `init`, the function that returns our outputs and the
# reference's).
DEFINITIONS: tuple[tuple[str, str, dict[str, int], Callable[..., Outputs]], ...] = (
    ("attention", "gqa_paged_decode_trace", {"batch_size": 5, "num_pages_per_seq": 3, **HEADS},
     by_plan(ours.BatchDecodeWithPagedKVCacheWrapper, "indptr", "indices")),
    ("attention", "gqa_paged_prefill_trace", {"total_q": 37, "num_pages_per_seq": 2, **HEADS},
     by_plan(ours.BatchPrefillWithPagedKVCacheWrapper, "qo_indptr", "paged_kv_indptr", "paged_kv_indices")),
    ("attention", "gqa_ragged_prefill_trace", {"total_q": 37, "total_kv": 90, **HEADS},
     by_plan(ours.BatchPrefillWithRaggedKVCacheWrapper, "qo_indptr", "kv_indptr")),
    ("attention", "mla_paged_decode_trace", {"batch_size": 3, **LATENTS},
     by_plan(ours.BatchMLAPagedAttentionWrapper, "kv_indptr", "kv_indices")),
    ("attention", "mla_paged_prefill_trace", {"total_q": 13, **LATENTS},
     by_plan(ours.BatchMLAPagedAttentionWrapper, "qo_indptr", "kv_indptr", "kv_indices")),
    ("attention", "single_decode_with_kv_cache_trace", {"kv_len": 77, **HEADS}, called("single_decode_with_kv_cache")),
    ("attention", "single_prefill_with_kv_cache_trace", {"qo_len": 19, "kv_len": 77, **HEADS},
     called("single_prefill_with_kv_cache")),
    ("cascade", "merge_state_trace", {"seq_len": 9}, called("merge_state")),
    ("cascade", "merge_state_in_place_trace", {"seq_len": 9}, written("merge_state_in_place", "v", "s")),
    ("cascade", "merge_states_trace", {"seq_len": 9, "num_states": 5}, called("merge_states")),
    ("msa", "msa_proxy_score_trace", {"total_q": 37, "total_k": 900}, of_msa("msa_proxy_score")),
    ("msa", "msa_topk_select_trace", {"total_q": 9}, of_msa("msa_topk_select")),
    ("msa", "msa_sparse_attention_trace", {"total_q": 37, "total_k": 900}, of_msa("msa_sparse_attention")),
    ("msa", "msa_sparse_decode_attention_trace", {"total_q": 6, "total_k": 900, "seqlen_q": 2},
     of_msa("msa_sparse_decode_attention")),
    ("page", "append_paged_kv_cache_trace", {"nnz_kv": 21}, written("append_paged_kv_cache", "paged_kv_cache")),
    ("page", "append_paged_mla_kv_cache_trace", {"nnz_kv": 21},
     written("append_paged_mla_kv_cache", "ckv_cache", "kpe_cache")),
    ("rope", "apply_rope_with_cos_sin_cache_trace", {"nnz": 23, "num_q_heads_x_head_size": 512,
     "num_k_heads_x_head_size": 128, "head_size": 64, "rotary_dim": 32}, rotated),
    ("rope", "rope_quantize_fp8_append_paged_kv_cache_trace", {"nnz": 40}, rotated_into_pages),
    ("sampling", "top_k_ragged_transform_trace", {"num_rows": 7}, sorted_selection("top_k_ragged_transform")),
    ("sampling", "top_k_page_table_transform_trace", {"num_rows": 4}, sorted_selection("top_k_page_table_transform")),
)  # fmt: skip


def judge(only: str) -> dict[str, str]:
    """Definition -> its outcome, for definitions whose names contain `only`."""
    outcomes = {}
    trace: Any = importlib.import_module("flashinfer.trace")
    for module, name, sizes, compare in DEFINITIONS:
        if only not in name:
            continue
        definition = getattr(importlib.import_module(f"flashinfer.trace.templates.{module}"), name, None)
        outcome = "absent"  # this version of FlashInfer has no such definition
        if definition is not None:
            got, want = compare(definition.init(**sizes, device="cpu"), definition.reference)
            check = definition.check or trace.default_check
            outcome = "passed" if check(want, got) else "failed"
        outcomes[name.removesuffix("_trace")] = outcome
    return outcomes
