"""Normalises and rotates queries and keys, and writes keys and values to the pages, in plain torch operations."""

from typing import Any

import torch

from ragged_attention.calls import NormRopeWrite
from ragged_attention.portable.torch_eager import write_kv_pages
from ragged_attention.portable.torch_eager._host import why_not as why_not
from ragged_attention.portable.torch_eager._rotary import angles, prepared

FEATURES = (write_kv_pages.FEATURES - {"k_scale_pages", "v_scale_pages"}) | {
    "q_weight", "k_weight", "eps", "interleaved",
}  # fmt: skip


def run(call: NormRopeWrite, tile: Any, launch: Any) -> list[torch.Tensor]:
    tables = angles(call)
    q, k = prepared(call.q, call.q_weight, call, tables), prepared(call.k, call.k_weight, call, tables)
    return [q, *write_kv_pages.write(call, k, call.v)]
