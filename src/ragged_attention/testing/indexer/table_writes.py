"""Writes of the indexer's keys by the tables of a step, and the law that they are writes by slots."""

import dataclasses
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ragged_attention.testing import formats
from ragged_attention.testing.compare import identical
from ragged_attention.testing.indexer.key_specs import WriteKeysBatch
from ragged_attention.testing.indexer.oracle import canonical
from ragged_attention.testing.indexer.specs import BYTES, E4M3, IndexerBatch, IndexerSpec
from ragged_attention.testing.runner import Runner

MIXED = ((5, 5), (1, 37), (4, 21), (1, 9))  # prefill, decode, chunk, decode


def slots_of(batch: IndexerBatch) -> NDArray[np.int32]:
    """The slot of each row of queries, or -1: token i of a sequence has position `kv_len - q_len + i`."""
    assert batch.page_indices is not None
    assert batch.kv_lens is not None
    num_pages, page_size = batch.keys.shape[:2]
    slots = np.full(len(batch.q), -1, np.int32)
    for seq, (start, stop) in enumerate(batch.bounds()):
        for row in range(start, stop):
            position = int(batch.kv_lens[seq]) - (stop - row)
            if position >= 0 and 0 <= (page := int(batch.page_indices[seq, position // page_size])) < num_pages:
                slots[row] = page * page_size + position % page_size
    return slots


def by_tables(spec: IndexerSpec, *, power_of_two: bool = False) -> tuple[WriteKeysBatch, NDArray[np.int32]]:
    """The write of a step's new keys by the tables of an indexer's call, and the slots of those keys.

    A key without a slot is NaN.
    """
    spec = dataclasses.replace(
        spec, packed=False, relative=False, max_keys=None, ratio=1, cache_dtype=BYTES, repeated_pages=False
    )
    batch, rng = spec.build(), np.random.default_rng(spec.seed + 1)
    slots = slots_of(batch)
    dtype = "bfloat16" if spec.dtype == E4M3 else spec.dtype
    k = formats.rounded(rng.standard_normal((len(batch.q), spec.head_dim)), dtype)
    k[slots < 0] = np.nan
    tables = {name: getattr(batch, name) for name in ("page_indices", "kv_lens", "cu_q_lens", "num_seqs")}
    write = WriteKeysBatch(
        k=k, cache=batch.keys, power_of_two=power_of_two, **tables, dtype=dtype, strided=spec.strided
    )  # fmt: skip
    return write, slots


def tables_are_slots(runner: Runner, spec: IndexerSpec) -> None:
    """A write by the tables of a step changes the cache as one by the slots that the tables give."""
    write, slots = by_tables(spec)
    none = dict.fromkeys(("page_indices", "kv_lens", "cu_q_lens", "num_seqs"))
    want = runner.run("write_indexer_cache", write.change(slot_mapping=slots, **none))
    identical(canonical(runner.run("write_indexer_cache", write)), canonical(want), "cache")


SPECS: dict[str, IndexerSpec] = {
    "tables": IndexerSpec(lens=MIXED, head_dim=128, dtype="bfloat16", page_size=64),
    "tables, every edge": IndexerSpec(
        lens=((0, 7), (3, 0), (4, 2), (1, 33), (0, 0), (6, 30)), count="array", spare_seqs=2, padding=3, garbage=True
    ),
    "tables, num_seqs an int": IndexerSpec(lens=MIXED, count="int", spare_seqs=3, padding=2, garbage=True),
    "tables, num_seqs 0": IndexerSpec(lens=(), count="array", spare_seqs=3, padding=4, garbage=True),
    "tables, invalid page indices": IndexerSpec(lens=MIXED, invalid_pages=True, garbage=True, dtype="float16"),
    "tables, page size 1": IndexerSpec(lens=MIXED, page_size=1),
    "tables, page size 3, strided": IndexerSpec(lens=MIXED, page_size=3, strided=True, head_dim=48),
    "tables, more tokens than a program has": IndexerSpec(lens=((150, 400), (90, 90)), head_dim=256),
}


def corner(spec: IndexerSpec) -> Callable[[], WriteKeysBatch]:
    return lambda: by_tables(spec, power_of_two=spec.page_size == 3)[0]


CORNERS: dict[str, Callable[[], WriteKeysBatch]] = {name: corner(spec) for name, spec in SPECS.items()}
