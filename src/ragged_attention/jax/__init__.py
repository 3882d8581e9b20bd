"""The jax front end: every operation on jax arrays, under `jit`, `vmap`, `lax.scan` and `jax.export`.

The backend is chosen for each platform when a function is lowered, so one traced function runs on a CPU, a GPU
(through jax-triton) and a TPU. Requests (`set_backend`, `use_backend`, the environment) are read when a function is
traced.
One export can serve several platforms, except that jax-triton refuses one for CUDA together with others.
"""

from collections.abc import Mapping
from typing import Any

from ragged_attention.calls import CALLS, Call
from ragged_attention.jax._launcher import device_facts
from ragged_attention.jax._lower import default_platform, prepare
from ragged_attention.jax.heads_first import paged_attention as paged_attention
from ragged_attention.jax.heads_first import prefill_attention as prefill_attention
from ragged_attention.jax.indexer import indexer_logits as indexer_logits
from ragged_attention.jax.indexer import indexer_topk as indexer_topk
from ragged_attention.jax.indexer import quantize_indexer_keys as quantize_indexer_keys
from ragged_attention.jax.indexer import top_k_indices as top_k_indices
from ragged_attention.jax.indexer import write_indexer_cache as write_indexer_cache
from ragged_attention.jax.mla import dequantize_mla_cache as dequantize_mla_cache
from ragged_attention.jax.mla import make_decode_schedule as make_decode_schedule
from ragged_attention.jax.mla import mla_decode as mla_decode
from ragged_attention.jax.mla import page_indices_to_slots as page_indices_to_slots
from ragged_attention.jax.mla import quantize_mla_cache as quantize_mla_cache
from ragged_attention.jax.mla import sparse_mla_prefill as sparse_mla_prefill
from ragged_attention.jax.mla import sparse_mla_prefill_backward as sparse_mla_prefill_backward
from ragged_attention.jax.mla import write_mla_cache as write_mla_cache
from ragged_attention.jax.paged import merge_attention_states as merge_attention_states
from ragged_attention.jax.paged import ragged_paged_attention as ragged_paged_attention
from ragged_attention.jax.paged import write_kv_pages as write_kv_pages
from ragged_attention.jax.ragged_mla import ragged_mla_attention as ragged_mla_attention
from ragged_attention.jax.varlen import varlen_attention as varlen_attention
from ragged_attention.jax.varlen import varlen_attention_backward as varlen_attention_backward


def call_of(operation: str, arguments: Mapping[str, Any]) -> Call:
    """The checked record of a call by the public function's arguments, every one given by name."""
    record = CALLS[operation]
    return record(**prepare(record, arguments), device=device_facts(default_platform()))
