"""Normalises and rotates queries and keys, and writes keys and values to the pages, in plain torch operations."""

from typing import Any

import torch

from ragged_attention.calls import NormRopeWrite
from ragged_attention.portable.torch_eager import write_kv_pages
from ragged_attention.portable.torch_eager._host import why_not as why_not
from ragged_attention.portable.torch_eager._rotary import angles, prepared

FEATURES = write_kv_pages.FEATURES | {"q_weight", "k_weight", "eps", "interleaved"}


def run(call: NormRopeWrite, tile: Any, launch: Any) -> list[torch.Tensor]:
    cos, sin = angles(call)
    q = prepared(call.q, call.q_weight, call.eps, cos, sin, call.interleaved)
    k = prepared(call.k, call.k_weight, call.eps, cos, sin, call.interleaved)
    return [q, *write_kv_pages.write(call, k, call.v)]
