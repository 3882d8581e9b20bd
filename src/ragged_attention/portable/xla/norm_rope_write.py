"""Normalises and rotates queries and keys, and writes keys and values to the pages, in plain jax operations."""

from typing import Any

import jax

from ragged_attention.calls import NormRopeWrite
from ragged_attention.portable.xla import write_kv_pages
from ragged_attention.portable.xla._framework import why_not as why_not
from ragged_attention.portable.xla._rotary import angles, prepared

FEATURES = (write_kv_pages.FEATURES - {"k_scale_pages", "v_scale_pages"}) | {
    "q_weight", "k_weight", "eps", "interleaved",
}  # fmt: skip


def run(call: NormRopeWrite, tile: Any, launch: Any) -> list[jax.Array]:
    """The new queries, and the new pages in the old pages' memory if those are donated."""
    tables = angles(call)
    q, k = prepared(call.q, call.q_weight, call, tables), prepared(call.k, call.k_weight, call, tables)
    return [q, *write_kv_pages.written(call, k, call.v)]
