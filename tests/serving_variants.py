"""The number of variants of each Triton kernel that a thousand serving batches need; run as a script, without
TRITON_INTERPRET. Nothing is compiled: the script counts the distinct keys by which Triton specialises launches."""

import dataclasses
import json
import random
from collections.abc import Iterator
from typing import Any

from benchmarks.compiled import compiling
from ragged_attention.tools.samples import LatentSample, Sample, VarlenSample, device_of

BATCHES = 1000
SERVED: dict[str, tuple[str, Any]] = {
    "ragged_paged_attention": ("ragged_paged_attention", Sample(sinks=True, return_lse=True)),
    "ragged_paged_attention, window": ("ragged_paged_attention", Sample(cache_dtype="float8_e4m3fn")),
    "write_kv_pages": ("write_kv_pages", Sample()),
    "paged_attention": ("paged_attention", Sample()),
    "prefill_attention, scaled": ("prefill_attention", Sample(cache_dtype="int8")),
    "merge_attention_states": ("merge_attention_states", Sample()),
    "mla_decode, sparse": ("mla_decode", LatentSample()),
    "mla_decode, dense": ("mla_decode", LatentSample(cache_format="plain", topk=0)),
    "sparse_mla_prefill": ("sparse_mla_prefill", LatentSample(cache_format="plain")),
    "write_mla_cache": ("write_mla_cache", LatentSample()),
    "quantize_mla_cache": ("quantize_mla_cache", LatentSample()),
    "make_decode_schedule": ("make_decode_schedule", LatentSample()),
    "varlen_attention": ("varlen_attention", VarlenSample()),
    "varlen_attention_backward": ("varlen_attention_backward", VarlenSample()),
    "sparse_mla_prefill_backward": ("sparse_mla_prefill_backward", LatentSample(cache_format="plain")),
}


def batches(sample: Any, windows: bool) -> Iterator[Any]:
    """Copies of the sample whose numbers of sequences and tokens, lengths and windows vary like an engine's steps."""
    draw = random.Random(7)
    for _ in range(BATCHES):
        seqs = draw.randint(1, 300)
        tokens = seqs if draw.random() < 0.5 else seqs + draw.randint(1, 5000)
        if isinstance(sample, LatentSample):  # every sequence has the same number of queries
            tokens = seqs * draw.choice([1, 2])
        changed: dict[str, Any] = {"max_num_seqs": seqs, "num_tokens": tokens}
        if hasattr(sample, "max_len"):
            changed["max_len"] = draw.randint(2000, 40000)
        if hasattr(sample, "max_q_len"):
            changed["max_q_len"] = 1 if tokens == seqs else draw.randint(2, 5000)
        if windows:
            changed["sliding_window"] = draw.choice([1, 16, 127, 128, 1023, 1024])
        yield dataclasses.replace(sample, **changed)


def variants(operation: str, sample: Any, windows: bool) -> dict[str, int]:
    """The number of compiled variants of each kernel."""
    keys_of: dict[str, set[Any]] = {}
    for batch in batches(sample, windows):
        for launch in compiling.record(batch.call(operation, device_of("torch", "sm_90"))):
            key = repr((launch.num_warps, launch.num_stages, compiling.specialise(launch, False)))
            keys_of.setdefault(launch.name, set()).add(key)
    return {name: len(keys) for name, keys in keys_of.items()}


if __name__ == "__main__":
    counts = {name: variants(*served, windows="window" in name) for name, served in SERVED.items()}
    print(json.dumps(counts, indent=1))  # noqa: T201
