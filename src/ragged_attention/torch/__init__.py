"""The torch front end: every operation on torch tensors, on any device torch has.

Each function is a `torch.library` operator underneath (`torch.ops.ragged_attention.*`), so it works under
`torch.compile(fullgraph=True)` and in CUDA graphs. Nothing synchronises with the device unless the backend `eager`
or `reference`, or `validate="full"`, is in force.
"""

from collections.abc import Mapping
from typing import Any

from ragged_attention.calls import CALLS, Call
from ragged_attention.torch import _operators, _plan
from ragged_attention.torch.heads_first import paged_attention as paged_attention
from ragged_attention.torch.heads_first import prefill_attention as prefill_attention
from ragged_attention.torch.indexer import indexer_logits as indexer_logits
from ragged_attention.torch.indexer import indexer_topk as indexer_topk
from ragged_attention.torch.indexer import quantize_indexer_keys as quantize_indexer_keys
from ragged_attention.torch.indexer import top_k_indices as top_k_indices
from ragged_attention.torch.indexer import write_indexer_cache as write_indexer_cache
from ragged_attention.torch.mla import dequantize_mla_cache as dequantize_mla_cache
from ragged_attention.torch.mla import make_decode_schedule as make_decode_schedule
from ragged_attention.torch.mla import mla_decode as mla_decode
from ragged_attention.torch.mla import page_indices_to_slots as page_indices_to_slots
from ragged_attention.torch.mla import quantize_mla_cache as quantize_mla_cache
from ragged_attention.torch.mla import sparse_mla_prefill as sparse_mla_prefill
from ragged_attention.torch.mla import sparse_mla_prefill_backward as sparse_mla_prefill_backward
from ragged_attention.torch.mla import write_mla_cache as write_mla_cache
from ragged_attention.torch.paged import merge_attention_states as merge_attention_states
from ragged_attention.torch.paged import ragged_paged_attention as ragged_paged_attention
from ragged_attention.torch.paged import write_kv_pages as write_kv_pages
from ragged_attention.torch.ragged_mla import ragged_mla_attention as ragged_mla_attention
from ragged_attention.torch.varlen import varlen_attention as varlen_attention
from ragged_attention.torch.varlen import varlen_attention_backward as varlen_attention_backward


def call_of(operation: str, arguments: Mapping[str, Any]) -> Call:
    """The checked record of a call by the public function's arguments, every one given by name."""
    record = CALLS[operation]
    return _plan.checked(record, _operators.prepare(record, arguments))
