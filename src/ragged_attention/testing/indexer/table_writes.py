"""Writes of the indexer's keys by the tables of a step, and the law that they equal writes by slots."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragged_attention.reference.write_kv_pages import slots_from_tables
from ragged_attention.testing import formats
from ragged_attention.testing.compare import identical
from ragged_attention.testing.indexer.key_specs import WriteKeysBatch
from ragged_attention.testing.indexer.oracle import canonical
from ragged_attention.testing.indexer.specs import BYTES, E4M3, IndexerBatch, IndexerSpec
from ragged_attention.testing.runner import Runner

TABLES = ("page_indices", "kv_lens", "cu_q_lens", "num_seqs")
MIXED = ((5, 5), (1, 37), (4, 21), (1, 9))  # prefill, decode, chunk, decode


def slots_of(batch: IndexerBatch) -> NDArray[np.int32]:
    """The slot of each row of queries, or -1."""
    tables: Any = {name: getattr(batch, name) for name in TABLES}
    num_pages, page_size = batch.keys.shape[:2]
    slots = slots_from_tables(**tables, num_tokens=len(batch.q), num_pages=num_pages, page_size=page_size)
    return slots.astype(np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableWriteSpec:
    """The parameters of a `write_indexer_cache` call that uses the tables of an indexer call."""

    of: IndexerSpec
    power_of_two: bool = False

    def paged(self) -> IndexerBatch:
        """The indexer call, over pages of bytes in which no two positions share a slot."""
        fixed = {"packed": False, "relative": False, "max_keys": None, "ratio": 1, "repeated_pages": False}
        return dataclasses.replace(self.of, **fixed, cache_dtype=BYTES).build()

    def build(self) -> WriteKeysBatch:
        batch, rng = self.paged(), np.random.default_rng(self.of.seed + 1)
        dtype = "bfloat16" if self.of.dtype == E4M3 else self.of.dtype
        k = formats.rounded(rng.standard_normal((len(batch.q), self.of.head_dim)), dtype)
        k[slots_of(batch) < 0] = np.nan
        tables = {name: getattr(batch, name) for name in TABLES}
        return WriteKeysBatch(
            k=k, cache=batch.keys, power_of_two=self.power_of_two, **tables, dtype=dtype, strided=self.of.strided
        )


def tables_are_slots(runner: Runner, spec: IndexerSpec) -> None:
    """A write by the tables of a step changes the cache like a write to the slots that the tables give."""
    write = TableWriteSpec(of=spec)
    by_tables = write.build()
    by_slots = by_tables.change(slot_mapping=slots_of(write.paged()), **dict.fromkeys(TABLES))
    want = canonical(runner.run("write_indexer_cache", by_slots))
    identical(canonical(runner.run("write_indexer_cache", by_tables)), want, "cache")


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


def _fewer_sequences() -> WriteKeysBatch:
    """A write whose entries past the live sequences would be valid as two more sequences."""
    batch = TableWriteSpec(of=IndexerSpec(lens=(*MIXED, (2, 9), (3, 3)))).build()
    return batch.change(num_seqs=np.array([len(MIXED)], np.int32))


CORNERS: dict[str, Callable[[], WriteKeysBatch]] = {
    **{name: TableWriteSpec(of=spec, power_of_two=spec.page_size == 3).build for name, spec in SPECS.items()},
    "tables, sequences that do not count": _fewer_sequences,
}
