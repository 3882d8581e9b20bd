"""Normalises and rotates latent rows, writes them to the cache, and rotates queries, in plain torch operations."""

from typing import Any

import torch

from ragged_attention.calls import LatentNormRopeWrite
from ragged_attention.portable.torch_eager import write_mla_cache
from ragged_attention.portable.torch_eager._host import why_not as why_not
from ragged_attention.portable.torch_eager._rotary import angles, prepared

FEATURES = write_mla_cache.FEATURES - {"d_v"} | {"kv_weight", "eps", "interleaved"}


def run(call: LatentNormRopeWrite, tile: Any, launch: Any) -> list[torch.Tensor]:
    tables = angles(call)
    rows = prepared(call.kv, call.kv_weight, call, tables, call.width - 2 * call.half)
    return [prepared(call.q, None, call, tables), write_mla_cache.write(call, rows)]
