"""Dividing a decode step's work among programs, on Hopper; the definition is in `reference`."""

import dataclasses
from typing import Any

from ragged_attention.kernels_cuda.latent import cannot_run as why_not  # noqa: F401
from ragged_attention.kernels_cuda.latent import why_not_by_default as why_not_by_default
from ragged_attention.kernels_cuda.native import Native

SCHEDULE = Native("ra_make_decode_schedule")
FEATURES = frozenset({"extra_lens", "sparse", "num_parts", "overhead"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Nothing may be tuned."""


def heuristic(call: Any) -> Tile:
    del call
    return Tile()


def run(call: Any, tile: Tile, launch: Any) -> Any:
    """Enqueue the kernel; returns parts and num_splits."""
    del tile
    results = launch.native(
        SCHEDULE,
        {
            "lens": launch.packed(call.lens),
            "extra_lens": None if call.extra_lens is None else launch.packed(call.extra_lens),
        },
        {"parts": ((call.num_parts, 8), "int32"), "num_splits": ((call.num_seqs + 1,), "int32")},
        {
            "num_seqs": call.num_seqs,
            "num_parts": call.num_parts,
            "overhead": call.overhead,
            "sparse": int(bool(call.sparse)),
        },
    )
    return results["parts"], results["num_splits"]
