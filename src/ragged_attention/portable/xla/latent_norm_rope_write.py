"""Normalises and rotates latent rows, writes them to the cache, and rotates queries, in plain jax operations."""

from typing import Any

import jax

from ragged_attention.calls import LatentNormRopeWrite
from ragged_attention.portable.xla import write_mla_cache
from ragged_attention.portable.xla._framework import why_not as why_not
from ragged_attention.portable.xla._rotary import angles, prepared

FEATURES = write_mla_cache.FEATURES - {"d_v"} | {"kv_weight", "eps", "interleaved"}


def run(call: LatentNormRopeWrite, tile: Any, launch: Any) -> list[jax.Array]:
    """The rotated queries, and the new cache in the old cache's memory if that is donated."""
    tables = angles(call)
    rows = prepared(call.kv, call.kv_weight, call, tables, call.width - 2 * call.half)
    return [prepared(call.q, None, call, tables), write_mla_cache.written(call, rows)]
