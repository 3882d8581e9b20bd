"""Quantises this step's indexer keys and writes them to the indexer's pages, in place, in plain torch operations."""

from typing import Any

import torch

from ragged_attention.calls import WriteIndexerCache
from ragged_attention.portable.torch_eager._host import why_not as why_not
from ragged_attention.portable.torch_eager._indexer import planes_of
from ragged_attention.portable.torch_eager._latents import CHUNK, quantized_groups
from ragged_attention.portable.torch_eager.write_kv_pages import last_writers, slots_of

FEATURES = frozenset({"slot_mapping", "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "power_of_two"})


def run(call: WriteIndexerCache, tile: Any, launch: Any) -> torch.Tensor:
    values, scales = planes_of(call.cache)
    slots, tokens = last_writers(slots_of(call), call.num_slots)
    for some, rows in zip(slots.split(CHUNK), tokens.split(CHUNK), strict=True):
        page, offset = some // call.page_size, some % call.page_size
        codes, factors = quantized_groups(call.k[rows].to(torch.float32), call.power_of_two)
        values[page, offset] = codes
        scales[page, offset] = factors.unsqueeze(-1).view(torch.uint8)
    return call.cache
