"""Named batches for the edge cases of `ragged_paged_attention`, of writes and of merges."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ragged_attention.testing import formats, selected
from ragged_attention.testing.integers import INT32
from ragged_attention.testing.paged.decodes import DECODES
from ragged_attention.testing.paged.specs import Batch, MergeBatch, Spec, WriteBatch
from ragged_attention.testing.paged.strategies import coded, merge_batch, write_batch
from ragged_attention.testing.ranges import KINDS
from ragged_attention.testing.selected import Selection

MIXED = ((5, 5), (1, 37), (4, 21), (1, 9))  # prefill, decode, chunk, decode
ALL_EDGES = ((0, 7), (3, 0), (4, 2), (1, 33), (0, 0), (6, 30))


def _lens(batch: Batch, **values: Any) -> Batch:
    """The batch with single entries of its index arrays replaced, such as `kv_lens={1: -5}`."""
    fields = {}
    for name, entries in values.items():
        fields[name] = getattr(batch, name).copy()
        for index, value in entries.items():
            fields[name][index] = value
    return batch.change(**fields)


def _plain(**fields: Any) -> Spec:
    return Spec(**{"lens": MIXED, **fields})


_SPECS: dict[str, Spec] = {
    # Lengths of sequences.
    "one key": Spec(lens=((1, 1),)),
    "decode": Spec(lens=((1, 40), (1, 1), (1, 16)), group=4),
    "decode of a long sequence": Spec(lens=((1, 700), (1, 3)), page_size=16, num_kv_heads=2, group=3),
    "prefill": Spec(lens=((7, 7), (16, 16), (1, 1)), group=2),
    "prefill of more rows than a tile": Spec(lens=((100, 130),), page_size=16, group=2, dtype="bfloat16"),
    "chunks": Spec(lens=((5, 40), (8, 9), (3, 17)), num_kv_heads=2),
    "speculative": Spec(lens=((4, 60), (3, 35), (4, 4)), group=8, dtype="bfloat16"),
    "mixed": _plain(num_kv_heads=2, group=3),
    "many sequences": Spec(lens=tuple((n % 3, 3 * n % 17 + n % 3) for n in range(21))),
    # Sequences with few or no queries or keys.
    "no queries": Spec(lens=((0, 9), (2, 11), (0, 0), (0, 3), (1, 4)), garbage=True),
    "no query at all": Spec(lens=((0, 9), (0, 0)), garbage=True),
    "no query but padding": Spec(lens=((0, 9), (0, 0)), padding=3, garbage=True, poison="nan"),
    "no keys": Spec(lens=((1, 0), (3, 0), (2, 5))),
    "no keys with sinks": Spec(lens=((1, 0), (3, 0), (2, 5)), sinks="normal"),
    "more queries than keys": Spec(lens=((5, 2), (9, 8), (2, 1)), group=2),
    "more queries than keys, not causal": Spec(lens=((5, 2), (9, 8), (2, 1)), causal=False, sliding_window=3),
    "every edge at once": Spec(lens=ALL_EDGES, count="array", spare_seqs=2, padding=3, poison="nan", garbage=True),
    # Padding and the number of sequences.
    "padding rows": _plain(padding=5, poison="nan"),
    "num_seqs an int below the maximum": _plain(count="int", spare_seqs=3, padding=2, poison="nan", garbage=True),
    "num_seqs an array below the maximum": _plain(count="array", spare_seqs=3, padding=2, poison="nan", garbage=True),
    "num_seqs an array at the maximum": _plain(count="array", padding=1),
    "num_seqs 0": Spec(lens=(), count="array", spare_seqs=3, padding=4, garbage=True, poison="nan"),
    "num_seqs 0 as an int": Spec(lens=(), count="int", spare_seqs=3, padding=4, garbage=True),
    # Masks and logits.
    "not causal": _plain(causal=False, group=2),
    "a draft tree": Spec(lens=((5, 40), (3, 3), (1, 9)), draft=6, group=4, poison="nan", garbage=True),
    "a drafted token that no query sees": Spec(lens=((1, 2), (3, 5)), draft=2, poison="nan", garbage=True, seed=2),
    "draft masks narrower than the drafts": Spec(lens=((7, 30), (2, 9), (4, 2)), draft=3, num_kv_heads=2, padding=2),
    "a draft mask with a window, sinks and a soft cap": _plain(draft=20, sliding_window=5, sinks="mixed", soft_cap=2.0),
    "a draft mask of more rows than a tile": Spec(
        lens=((100, 230), (30, 30)), draft=100, page_size=16, group=2, dtype="bfloat16", poison="nan"
    ),
    "a draft mask, not causal, with pages missing": _plain(draft=9, causal=False, invalid_pages=True, poison="nan"),
    "a draft mask without columns": _plain(draft=0, group=2),
    "window of 1": _plain(sliding_window=1, poison="nan", garbage=True),
    "window of 1, not causal": _plain(sliding_window=1, causal=False, poison="nan"),
    "window": _plain(sliding_window=7, group=3, poison="nan"),
    "window of a page": _plain(sliding_window=8, page_size=8, poison="inf", garbage=True),
    "window in a long sequence": Spec(lens=((1, 600), (6, 500)), page_size=16, sliding_window=100, poison="nan"),
    "window within the last pages": Spec(lens=((6, 14), (1, 29)), page_size=3, sliding_window=2, group=2),
    "window longer than all": _plain(sliding_window=2**31 - 1),
    **{f"ranges, {kind}": _plain(ranges=kind, group=2, poison="nan", garbage=True, padding=3) for kind in KINDS},
    "ranges of every edge": Spec(
        lens=ALL_EDGES, count="array", spare_seqs=2, ranges="any", padding=3, poison="nan", garbage=True
    ),
    "ranges over splits": Spec(lens=((1, 700), (3, 600)), page_size=16, ranges="prefix", group=2, poison="nan"),
    "many ranges over splits": Spec(lens=((1, 900), (2, 600)), page_size=16, ranges="many", seed=3, poison="nan"),
    "ranges of more rows than a tile": Spec(
        lens=((100, 330), (40, 90)), page_size=16, ranges="few", group=2, dtype="bfloat16", poison="nan"
    ),
    "spans of more rows than a tile": Spec(
        lens=((150, 350), (40, 90)), page_size=16, ranges="spans", group=2, dtype="bfloat16", poison="nan", seed=1
    ),
    "chunks of more rows than a tile": Spec(lens=((150, 350), (9, 90)), page_size=16, ranges="chunks", poison="nan"),
    "ranges with biases, sinks and a soft cap": _plain(
        ranges="few", alibi="mixed", bias="shared", sinks="mixed", soft_cap=2.0, group=3, poison="nan", seed=6
    ),
    "ranges over an 8-bit cache, pages missing": _plain(
        ranges="few", cache_dtype="int8", dtype="bfloat16", scales="heads", num_kv_heads=2, invalid_pages=True
    ),
    **{
        f"blocks, {kind}": _plain(
            selection=Selection(kind=kind, size=4), num_kv_heads=2, group=2, poison="nan", garbage=True, padding=3
        )
        for kind in selected.KINDS
    },
    **{
        f"blocks of {size} of one list for all heads": Spec(
            lens=((5, 5), (1, 597), (4, 300), (1, 9)), page_size=16, num_kv_heads=2, poison="nan",
            selection=Selection(kind="own", size=size, shared=True),
        )
        for size in (1, 2, 8, 16, 32, 64, 128, 256)
    },
    "blocks of every edge": Spec(
        lens=ALL_EDGES, count="array", spare_seqs=2, padding=3, poison="nan", garbage=True, num_kv_heads=2,
        selection=Selection(kind="few", size=2),
    ),
    "blocks of pages": _plain(selection=Selection(kind="few", size=8), page_size=8, num_kv_heads=3, poison="nan"),
    "blocks over splits": Spec(
        lens=((1, 2100), (3, 600)), page_size=16, num_kv_heads=2, group=3, dtype="bfloat16", poison="nan",
        selection=Selection(kind="own", size=64, length=9),
    ),
    "blocks of pages that no block divides": Spec(
        lens=((1, 700), (20, 90)), page_size=24, num_kv_heads=2, poison="nan", dtype="bfloat16",
        selection=Selection(kind="few", size=32, length=7),
    ),
    "blocks of more rows than a tile": Spec(
        lens=((100, 330), (40, 90)), page_size=16, num_kv_heads=2, group=2, dtype="bfloat16", poison="nan",
        selection=Selection(kind="own", size=16, length=5),
    ),
    "blocks, not causal": _plain(selection=Selection(kind="few", size=4), causal=False, num_kv_heads=2, poison="nan"),
    "blocks in a window": Spec(
        lens=((1, 600), (6, 500)), page_size=16, sliding_window=100, num_kv_heads=2, poison="nan",
        selection=Selection(kind="own", size=16, length=20),
    ),
    "blocks within ranges": _plain(
        selection=Selection(kind="few", size=4), ranges="few", num_kv_heads=2, group=2, poison="nan", seed=1
    ),
    "blocks with a draft tree": Spec(
        lens=((5, 40), (3, 3), (1, 9)), draft=6, num_kv_heads=2, group=2, poison="nan", garbage=True,
        selection=Selection(kind="own", size=4),
    ),
    "blocks with biases, sinks and a soft cap": _plain(
        selection=Selection(kind="own", size=8), alibi="mixed", bias="shared", sinks="mixed", soft_cap=2.0,
        num_kv_heads=2, group=3, poison="nan", seed=6,
    ),
    "blocks of an 8-bit cache, pages missing": _plain(
        selection=Selection(kind="few", size=8), cache_dtype="int8", dtype="bfloat16", scales="heads", num_kv_heads=2,
        invalid_pages=True,
    ),
    "to float32": _plain(dtype="bfloat16", out_dtype="float32", sinks="normal", group=2),
    "to bfloat16": _plain(out_dtype="bfloat16", lens=((1, 700), (3, 3)), page_size=16),
    "to float16": _plain(dtype="bfloat16", out_dtype="float16", cache_dtype="int8", padding=2, num_kv_heads=2),
    "e4m3 queries": _plain(dtype="bfloat16", q_scales="heads", group=3, num_kv_heads=2, poison="nan", padding=2),
    "e4m3 queries over float32": _plain(q_scales="array", group=2, sliding_window=6),
    "e4m3 queries over float16": _plain(dtype="float16", q_scales="float", soft_cap=3.0, sm_scale=0.2, combined=False),
    "e4m3 queries, 8-bit cache": _plain(
        dtype="bfloat16", q_scales="float", cache_dtype="float8_e4m3fn", scales="heads", num_kv_heads=2, strided=True
    ),
    "soft cap": _plain(soft_cap=2.0),
    "small soft cap": _plain(soft_cap=0.01, dtype="bfloat16"),
    "soft cap and window": _plain(soft_cap=5.0, sliding_window=6, sinks="normal", group=2),
    "sm_scale": _plain(sm_scale=0.7),
    "sm_scale 0": _plain(sm_scale=0.0),
    "sm_scale negative": _plain(sm_scale=-0.2, sliding_window=9),
    "large logits": _plain(magnitude=12.0, group=2),
    "sinks": _plain(sinks="normal", group=4),
    "sinks -inf": _plain(sinks="-inf", group=2),
    "sinks +inf": _plain(sinks="+inf", group=2),
    "sinks of all kinds": _plain(sinks="mixed", num_kv_heads=2, group=4, padding=2),
    "ALiBi": _plain(alibi="usual", num_kv_heads=2, group=4, dtype="bfloat16"),
    "ALiBi of more queries than keys, not causal": Spec(
        lens=((5, 2), (9, 8), (2, 1)), causal=False, alibi="mixed", group=3, poison="nan"
    ),
    "ALiBi over splits": Spec(lens=((1, 700), (3, 600)), page_size=16, alibi="usual", group=2, dtype="bfloat16"),
    "ALiBi of more rows than a tile": Spec(lens=((100, 330),), page_size=16, alibi="usual", group=2, dtype="bfloat16"),
    "ALiBi with a window, sinks and a soft cap": _plain(
        alibi="mixed", sliding_window=6, sinks="mixed", soft_cap=2.0, group=3, poison="nan", padding=2
    ),
    "ALiBi over a draft tree": Spec(lens=((5, 40), (3, 3), (1, 9)), draft=6, alibi="mixed", group=4, poison="nan"),
    "ALiBi over an 8-bit cache": _plain(
        alibi="mixed", cache_dtype="float8_e4m3fn", dtype="bfloat16", scales="heads", num_kv_heads=2, combined=False
    ),
    "ALiBi with pages missing": _plain(alibi="mixed", invalid_pages=True, page_size=2, poison="nan", garbage=True),
    "ALiBi, sm_scale 0": _plain(alibi="usual", sm_scale=0.0, group=2),
    "ALiBi, sm_scale negative": _plain(alibi="usual", sm_scale=-0.2, soft_cap=3.0),
    "a relative bias": _plain(bias="shared", num_kv_heads=2, group=2, dtype="bfloat16"),
    "a relative bias of each query": _plain(bias="own", num_kv_heads=2, group=3, padding=2, seed=2),
    "a relative bias, not causal": _plain(bias="shared", causal=False, group=2, poison="nan", seed=3),
    "a relative bias of more queries than keys, not causal": Spec(
        lens=((5, 2), (9, 8), (2, 1)), causal=False, bias="own", group=3, poison="nan"
    ),
    "a relative bias with padding": _plain(bias="own", padding=3, group=2, poison="nan", seed=7),
    "a relative bias over splits": Spec(lens=((1, 700), (3, 600)), page_size=16, bias="own", group=2, seed=1),
    "a relative bias of more rows than a tile": Spec(
        lens=((100, 330),), page_size=16, bias="own", group=2, dtype="bfloat16", seed=4
    ),
    "a relative bias with slopes, a window, sinks and a soft cap": _plain(
        bias="shared", alibi="mixed", sliding_window=6, sinks="mixed", soft_cap=2.0, group=3, poison="nan", seed=5
    ),
    "a relative bias over a draft tree": Spec(lens=((5, 40), (3, 3)), draft=6, bias="own", group=4, poison="nan"),
    "a relative bias over an 8-bit cache": _plain(
        bias="shared", cache_dtype="int8", dtype="bfloat16", scales="heads", num_kv_heads=2, sm_scale=-0.1
    ),
    "sinks over a long sequence": Spec(lens=((1, 700),), page_size=32, sinks="normal", group=2),
    **{
        f"max_q_len wrongly {limit}": Spec(
            lens=((1, 700), (3, 600), (40, 800), (0, 5), (9, 9)), page_size=16, group=2, dtype="bfloat16", limit=limit,
            padding=21, poison="nan", garbage=True, count="array", spare_seqs=1
        )
        for limit in ("0", "1")
    },
    # Shapes.
    "page size 1": _plain(page_size=1, spare_columns=2, garbage=True, poison="nan"),
    "page size 3": _plain(page_size=3, garbage=True, poison="nan"),
    "page size 7": _plain(page_size=7, poison="nan"),
    "page size 128": _plain(page_size=128, poison="nan"),
    "GQA ratio 3": _plain(num_kv_heads=2, group=3, dtype="bfloat16"),
    "GQA ratio 5": _plain(group=5, dtype="float16"),
    "GQA ratio 24": Spec(lens=((2, 9), (1, 30)), group=24),
    **{
        f"head_dim {head_dim}": Spec(lens=((3, 9), (1, 21)), head_dim=head_dim, dtype=dtype, poison="nan")
        for head_dim, dtype in (
            (24, "float32"), (72, "float16"), (80, "bfloat16"), (96, "float32"), (112, "bfloat16"), (128, "bfloat16"),
            (192, "bfloat16"), (256, "float16"), (512, "bfloat16"),
        )
    },
    "head_dim 512, a prompt": Spec(
        lens=((50, 110), (1, 40)), page_size=16, group=2, head_dim=512, dtype="bfloat16", poison="nan", garbage=True
    ),
    "a pair of pages": _plain(combined=False, num_kv_heads=2, group=2, poison="nan"),
    "V wider than K": _plain(combined=False, head_dim=16, v_head_dim=64, poison="nan"),
    "V narrower than K": _plain(combined=False, head_dim=192, v_head_dim=128, dtype="bfloat16", group=2),
    "spare columns": _plain(spare_columns=4, garbage=True, poison="nan"),
    # Dtypes.
    "bfloat16": _plain(dtype="bfloat16", num_kv_heads=2, group=2),
    "float16": _plain(dtype="float16", num_kv_heads=2, group=2, soft_cap=20.0),
    **{
        f"{cache_dtype} cache, {dtype} queries": _plain(
            dtype=dtype, cache_dtype=cache_dtype, scales=scales, num_kv_heads=2, poison="nan", combined=combined
        )
        for cache_dtype, dtype, scales, combined in (
            ("float8_e4m3fn", "bfloat16", "float", True), ("float8_e4m3fn", "float32", "heads", False),
            ("float8_e5m2", "float16", "array", True), ("float8_e5m2", "bfloat16", "heads", False),
            ("float8_e4m3fnuz", "bfloat16", "float", True), ("float8_e4m3fnuz", "float32", "heads", False),
            ("int8", "bfloat16", "heads", True), ("int8", "float16", "float", False),
        )
    },
    "8-bit cache without scales": _plain(cache_dtype="float8_e4m3fn", dtype="bfloat16", sliding_window=5),
    "8-bit cache of every code": _plain(cache_dtype="float8_e4m3fn", magnitude=120.0, sm_scale=1e-4),
    "float8_e4m3fnuz cache of every code": _plain(cache_dtype="float8_e4m3fnuz", magnitude=60.0, sm_scale=1e-4),
    # Pages.
    "shared prefix": Spec(lens=((1, 30), (4, 25), (1, 18)), sharing="prefix", garbage=True),
    "one page repeated": Spec(lens=((1, 30), (4, 25)), sharing="repeat"),
    "invalid page indices": _plain(invalid_pages=True, poison="nan", garbage=True, page_size=2),
    "invalid page indices with sinks": _plain(invalid_pages=True, sinks="normal", page_size=1, seed=1),
    "infinity in all that is unread": _plain(poison="inf", padding=2, count="array", spare_seqs=1, sliding_window=4),
    # Memory.
    "strided": _plain(strided=True, num_kv_heads=2, group=2, sinks="normal", count="array", spare_seqs=1),
    "strided pair": _plain(strided=True, combined=False, v_head_dim=24, num_kv_heads=2, dtype="bfloat16"),
    "strided 8-bit cache": _plain(strided=True, cache_dtype="float8_e5m2", scales="heads", num_kv_heads=2),
}  # fmt: skip


def _empty_tables() -> Batch:
    return _plain().build().change(page_indices=np.zeros((len(MIXED), 0), np.int32))


def _cut_tables(columns: int) -> Batch:
    batch = Spec(lens=((2, 6), (3, 12)), draft=4, sinks="normal").build()
    return batch.change(page_indices=batch.page_indices[:, :columns])


def _no_pages() -> Batch:
    return _plain().build().change(kv_pages=np.zeros((0, 4, 2, 16), np.float32))


def _without_new_pages(**fields: Any) -> Batch:
    """A batch without pages for sequences' new tokens; the last sequence has no page at all."""
    batch = Spec(lens=((2, 6), (3, 12), (4, 16), (2, 9)), num_kv_heads=2, group=2, **fields).build()
    table = batch.page_indices.copy()
    table[0, 1], table[1, 2], table[2, 3], table[3] = -1, INT32.min, batch.num_pages, -7
    return batch.change(page_indices=table)


def _all_invalid() -> Batch:
    batch = _plain(sinks="normal").build()
    return batch.change(page_indices=np.full_like(batch.page_indices, INT32.max))


def _tables_without_rows() -> Batch:
    return Spec(lens=(), padding=3).build()


# Invalid index values, for which the results are still defined.
_VALUES: dict[str, Callable[[], Batch]] = {
    "kv_len over what the table holds": lambda: _lens(_plain().build(), kv_lens={0: INT32.max, 1: 1000}),
    "kv_len negative": lambda: _lens(_plain().build(), kv_lens={1: -1, 2: INT32.min}),
    "cu_q_lens over the tokens": lambda: _lens(_plain().build(), cu_q_lens={4: INT32.max}),
    "num_seqs over the maximum": lambda: _plain().build().change(num_seqs=np.array([INT32.max], np.int32)),
    "num_seqs negative": lambda: _plain(padding=1).build().change(num_seqs=np.array([-3], np.int32)),
    "every page index invalid": _all_invalid,
    **{
        f"new tokens' pages missing, {name}": lambda fields=fields: _without_new_pages(**fields)
        for name, fields in {
            "causal": {},
            "not causal": {"causal": False, "sliding_window": 3},
            "drafted": {"draft": 4},
            "drafted, a window": {"draft": 2, "sliding_window": 3, "sinks": "mixed"},
            "drafted, an 8-bit cache": {"draft": 4, "cache_dtype": "int8", "dtype": "bfloat16", "combined": False},
        }.items()
    },
    "drafted, tables without columns": lambda: _cut_tables(0),
    "drafted, tables of fewer columns": lambda: _cut_tables(1),
    "tables without columns": _empty_tables,
    "a cache without pages": _no_pages,
    "tables without rows": _tables_without_rows,
}

CORNERS: dict[str, Callable[[], Batch]] = {name: spec.build for name, spec in _SPECS.items()} | DECODES | _VALUES


def _with_special_values() -> WriteBatch:
    """A write with NaN, infinities, ties, and values beyond the format's range."""
    write = write_batch(Spec(lens=((6, 6),), cache_dtype="float8_e4m3fn"))
    k = write.k.copy()
    special = [
        np.nan, -np.nan, np.inf, -np.inf, 448.0, 464.0, 465.0, 1e30, 2.0**-10, 3 * 2.0**-10, 17.0, 19.0, -0.0,
        -(2.0**-11), 2.0**-149,
    ]  # fmt: skip
    k[:, 0, : len(special)] = special
    return write.change(k=k, slot_mapping=np.arange(6, dtype=np.int32))


def _special_int8() -> WriteBatch:
    write = write_batch(Spec(lens=((2, 2),), cache_dtype="int8"))
    k = write.k.copy()
    k[:, 0, :10] = [0.5, 1.5, 2.5, -0.5, -1.5, 127.5, -128.5, 1e9, -np.inf, np.inf]
    return write.change(k=k, k_scale=1.0, slot_mapping=np.array([3, 1], np.int64))


def _extreme_slots() -> WriteBatch:
    """A write to slots far outside the cache, including slots whose low 32 bits are a slot inside it."""
    write = write_batch(Spec(lens=((9, 9),)))
    slots = [-1, 0, 2**32, 2**32 + 1, -(2**63), 2**63 - 1, 2**31, -(2**32), 5]
    return write.change(slot_mapping=np.array(slots, np.int64), k=np.nan_to_num(write.k), v=np.nan_to_num(write.v))


_WRITES: dict[str, Spec] = {
    "a step of every kind": _plain(num_kv_heads=2, group=2),
    "into a pair": _plain(combined=False, v_head_dim=40, dtype="bfloat16"),
    "page size 3": _plain(page_size=3, head_dim=24, dtype="float16"),
    "float8_e4m3fn": _plain(cache_dtype="float8_e4m3fn", dtype="bfloat16", scales="heads", num_kv_heads=2),
    "float8_e5m2": _plain(cache_dtype="float8_e5m2", scales="float", combined=False),
    "float8_e4m3fnuz": _plain(cache_dtype="float8_e4m3fnuz", dtype="bfloat16", scales="heads", num_kv_heads=2),
    "int8": _plain(cache_dtype="int8", dtype="float16", scales="array"),
    "scaled float32": _plain(scales="heads", num_kv_heads=2),
    "every edge at once": Spec(lens=ALL_EDGES, count="array", spare_seqs=2, padding=3, garbage=True, poison="nan"),
    "num_seqs an int": _plain(count="int", spare_seqs=2, padding=1, garbage=True),
    "invalid page indices": _plain(invalid_pages=True, garbage=True, page_size=2),
    "strided": _plain(strided=True, num_kv_heads=2, dtype="bfloat16"),
    "strided pair": _plain(strided=True, combined=False, v_head_dim=24, cache_dtype="int8"),
    "no tokens": Spec(lens=((0, 5), (0, 0))),
}

WRITE_CORNERS: dict[str, Callable[[], WriteBatch]] = {
    **{f"by tables: {name}": lambda spec=spec: write_batch(spec, by_tables=True) for name, spec in _WRITES.items()},
    **{f"by slots: {name}": lambda spec=spec: write_batch(spec) for name, spec in _WRITES.items()},
    "by slots: int64": lambda: write_batch(_plain(), slot_dtype=np.int64),
    "by slots: values beyond float8_e4m3fn": lambda: write_batch(_plain(cache_dtype="float8_e4m3fn"), reach=1e4),
    "by slots: values beyond float8_e5m2": lambda: write_batch(_plain(cache_dtype="float8_e5m2"), reach=1e6),
    "by slots: values beyond float8_e4m3fnuz": lambda: write_batch(_plain(cache_dtype="float8_e4m3fnuz"), reach=1e4),
    "by slots: values beyond int8": lambda: write_batch(_plain(cache_dtype="int8"), reach=1e4),
    "special values into float8_e4m3fn": _with_special_values,
    "special values into float8_e5m2": lambda: _with_special_values().change(cache_dtype="float8_e5m2"),
    "special values into float8_e4m3fnuz": lambda: _with_special_values().change(cache_dtype="float8_e4m3fnuz"),
    "special values into int8": _special_int8,
    **{
        f"codes of {cache_dtype}, {how}": lambda spec=spec, how=how: coded(
            write_batch(spec, by_tables=how == "by tables")
        )
        for cache_dtype, how, spec in (
            ("float8_e4m3fn", "by slots", _plain(cache_dtype="float8_e4m3fn", scales="heads", num_kv_heads=2)),
            (
                "float8_e5m2",
                "by tables",
                _plain(cache_dtype="float8_e5m2", combined=False, v_head_dim=24, strided=True),
            ),
            ("float8_e4m3fnuz", "by slots", _plain(cache_dtype="float8_e4m3fnuz", scales="float", page_size=3)),
            ("int8", "by tables", _plain(cache_dtype="int8", dtype="bfloat16", scales="float", page_size=3)),
        )
    },
    "slots far outside": _extreme_slots,
}


def _one_part_empty() -> MergeBatch:
    batch = merge_batch((3, 4, 2, 16))
    lses, outs = batch.lses.copy(), batch.outs.copy()
    lses[1], outs[1] = -np.inf, np.inf
    return batch.change(lses=lses, outs=outs)


MERGE_CORNERS: dict[str, Callable[[], MergeBatch]] = {
    "one part": lambda: merge_batch((1, 3, 2, 16)),
    "one part is empty": _one_part_empty,
    "every part is empty": lambda: merge_batch((3, 4, 2, 16), empty=1.0),
    "many parts": lambda: merge_batch((17, 3, 2, 40), empty=0.3),
    "lses far apart": lambda: merge_batch((4, 5, 3, 64), spread=300.0),
    "V of one": lambda: merge_batch((2, 3, 2, 1)),
    "bfloat16": lambda: merge_batch((3, 5, 4, 80), dtype="bfloat16", empty=0.3),
    "float16": lambda: merge_batch((3, 5, 4, 128), dtype="float16", empty=0.3),
    "strided": lambda: merge_batch((3, 5, 4, 64), strided=True, empty=0.3),
    "sinks": lambda: merge_batch((3, 5, 4, 64), sinks="mixed", empty=0.3),
    "sinks of everything": lambda: merge_batch((2, 3, 4, 16), sinks="+inf", empty=0.5),
    "sinks of nothing": lambda: merge_batch((2, 3, 4, 16), sinks="-inf", empty=0.5),
    "sinks far from the logits": lambda: merge_batch((2, 3, 4, 16), sinks="normal", spread=300.0, dtype="bfloat16"),
    "to float32": lambda: merge_batch((3, 5, 4, 80), dtype="bfloat16", out_dtype="float32", sinks="normal"),
    "to bfloat16": lambda: merge_batch((3, 5, 4, 80), out_dtype="bfloat16", empty=0.3),
    "to float16, strided": lambda: merge_batch((3, 5, 4, 64), out_dtype="float16", strided=True),
    "no tokens": lambda: merge_batch((3, 0, 4, 64)),
    "values as they are": lambda: _equal_parts(),
}


def _equal_parts() -> MergeBatch:
    """A merge of parts with equal outs, which keeps the out and adds the weights."""
    batch = merge_batch((4, 3, 2, 16), dtype="bfloat16")
    outs = np.broadcast_to(formats.rounded(batch.outs[:1], "bfloat16"), batch.outs.shape).copy()
    return batch.change(outs=outs)
