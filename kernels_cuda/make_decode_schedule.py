"""The schedule of a decode step, which divides its work among thread blocks, computed on Hopper."""

from typing import Any

from ragged_attention.calls import MakeDecodeSchedule
from ragged_attention.kernels_cuda import _latent
from ragged_attention.kernels_cuda._native import Native

FEATURES = frozenset({"extra_lens", "sparse", "num_parts", "overhead"})
SCHEDULE = Native("ra_make_decode_schedule")


def why_not(call: MakeDecodeSchedule) -> str | None:
    return _latent.cannot_run(call)


def why_not_by_default(call: MakeDecodeSchedule) -> str | None:
    return _latent.why_not_by_default(call, None)


def run(call: MakeDecodeSchedule, tile: Any, launch: Any) -> Any:
    """Enqueue the kernel, and return parts and num_splits."""
    results = launch.native(
        SCHEDULE,
        {
            "lens": launch.packed(call.lens),
            "extra_lens": None if call.extra_lens is None else launch.packed(call.extra_lens),
        },
        {"parts": ((call.num_ranges, 8), "int32"), "num_splits": ((call.num_seqs + 1,), "int32")},
        {
            "num_seqs": call.num_seqs,
            "num_parts": call.num_ranges,
            "overhead": call.overhead,
            "sparse": int(bool(call.sparse)),
        },
    )
    return results["parts"], results["num_splits"]
