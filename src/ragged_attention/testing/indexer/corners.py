"""Named calls for the edge cases of the indexer's operations."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ragged_attention.testing.indexer import table_writes
from ragged_attention.testing.indexer.gradients import LogitsGradientBatch, LogitsGradientSpec
from ragged_attention.testing.indexer.key_specs import (
    QuantizeKeysBatch,
    QuantizeKeysSpec,
    SelectBatch,
    SelectSpec,
    WriteKeysBatch,
    WriteKeysSpec,
)
from ragged_attention.testing.indexer.specs import BYTES, E4M3, IndexerBatch, IndexerSpec, TopkBatch
from ragged_attention.testing.indexer.targets import TargetBatch, TargetSpec
from ragged_attention.testing.integers import INT32

MIXED = ((5, 5), (1, 37), (4, 21), (1, 9))  # prefill, decode, chunk, decode
ALL_EDGES = ((0, 7), (3, 0), (4, 2), (1, 33), (0, 0), (6, 30))
MODEL: dict[str, Any] = {
    "heads": 64,
    "head_dim": 128,
    "dtype": E4M3,
    "cache_dtype": BYTES,
    "page_size": 64,
}  # DeepSeek-V3.2

SPECS: dict[str, IndexerSpec] = {
    # Layouts and formats of keys.
    "one key": IndexerSpec(lens=((1, 1),)),
    "mixed": IndexerSpec(lens=MIXED, dtype="bfloat16"),
    "mixed, pages of bytes": IndexerSpec(lens=MIXED, dtype="bfloat16", cache_dtype=BYTES, heads=8, head_dim=64),
    "mixed, e4m3 queries": IndexerSpec(lens=MIXED, dtype=E4M3, cache_dtype=BYTES, heads=8, head_dim=32),
    "mixed, e4m3 pages with scales": IndexerSpec(lens=MIXED, dtype="float16", cache_dtype=E4M3, scaled=True),
    "mixed, float32 beside bytes": IndexerSpec(lens=MIXED, cache_dtype=BYTES, head_dim=48),
    "as in the model": IndexerSpec(lens=((1, 300), (3, 70)), **MODEL, poison=True, garbage=True),
    "prefill as in the model": IndexerSpec(lens=((70, 150),), **MODEL),
    "32 heads": IndexerSpec(lens=((2, 100), (9, 9)), **{**MODEL, "heads": 32}),
    "decode of a long sequence": IndexerSpec(lens=((1, 900), (1, 3)), page_size=16, dtype="bfloat16", heads=16),
    "prefill of more rows than a tile": IndexerSpec(lens=((100, 130),), page_size=16, dtype="bfloat16", heads=4),
    "head size 256": IndexerSpec(lens=MIXED, head_dim=256, dtype="bfloat16"),
    "head size 80": IndexerSpec(lens=MIXED, head_dim=80, dtype="float16", heads=5),
    "page size 1": IndexerSpec(lens=MIXED, page_size=1, cache_dtype=BYTES, dtype="bfloat16", garbage=True),
    "page size 3": IndexerSpec(lens=MIXED, page_size=3, cache_dtype=BYTES, dtype="bfloat16", strided=True),
    "one page all over": IndexerSpec(lens=MIXED, repeated_pages=True),
    # Sequences and tables.
    "every edge at once": IndexerSpec(lens=ALL_EDGES, count="array", spare_seqs=2, padding=3, poison=True,
                                      garbage=True),
    "num_seqs an int": IndexerSpec(lens=MIXED, count="int", spare_seqs=3, padding=2, poison=True, garbage=True),
    "num_seqs 0": IndexerSpec(lens=(), count="array", spare_seqs=3, padding=4, garbage=True, poison=True),
    "no queries": IndexerSpec(lens=((0, 9), (0, 0)), garbage=True),
    "more queries than keys": IndexerSpec(lens=((5, 2), (9, 8), (2, 1)), poison=True),
    "invalid page indices": IndexerSpec(lens=MIXED, invalid_pages=True, garbage=True, poison=True, cache_dtype=BYTES),
    "strided": IndexerSpec(lens=MIXED, strided=True, dtype="bfloat16", scaled=True),
    "ratio 4": IndexerSpec(lens=((9, 40), (1, 3), (4, 67)), ratio=4, poison=True, garbage=True, cache_dtype=BYTES),
    "ratio 128": IndexerSpec(lens=((2, 1000), (130, 130)), ratio=128, poison=True, dtype="bfloat16"),
    "NaN and infinities that are seen": IndexerSpec(lens=MIXED, special=True, dtype="bfloat16", scaled=True),
    "NaN in pages of bytes": IndexerSpec(lens=MIXED, special=True, dtype=E4M3, cache_dtype=BYTES, heads=17),
    # Packed keys.
    "packed": IndexerSpec(lens=MIXED, packed=True, dtype="bfloat16", poison=True),
    "packed as DeepGEMM has it": IndexerSpec(lens=((70, 150), (3, 300)), packed=True, scaled=True, poison=True,
                                             heads=64, head_dim=128, dtype=E4M3),
    "packed, any ranges": IndexerSpec(lens=MIXED, packed=True, ranges="any", scaled=True, dtype="float16"),
    "packed, wild ranges": IndexerSpec(lens=MIXED, packed=True, ranges="wild", poison=True, strided=True),
    "relative": IndexerSpec(lens=MIXED, packed=True, relative=True, dtype="bfloat16", scaled=True),
    "relative, as many columns as the longest": IndexerSpec(lens=MIXED, packed=True, relative=True, max_keys=37),
    "relative, fewer columns": IndexerSpec(lens=MIXED, packed=True, relative=True, max_keys=6, poison=True),
    "relative, more columns than keys": IndexerSpec(lens=((2, 3),), packed=True, relative=True, max_keys=100),
    "relative, wild ranges": IndexerSpec(lens=MIXED, packed=True, relative=True, ranges="wild", poison=True),
    "packed, no keys": IndexerSpec(lens=((2, 0),), packed=True),
    "packed, a long prefill": IndexerSpec(lens=((150, 400), (90, 90)), packed=True, dtype="bfloat16", heads=4),
}  # fmt: skip
ON_EVERY_PATH = (
    "as in the model", "prefill as in the model", "every edge at once", "packed as DeepGEMM has it",
    "packed, wild ranges", "relative, fewer columns", "ratio 4", "invalid page indices", "decode of a long sequence",
)  # fmt: skip

# Lists of packed keys.
LISTED: dict[str, IndexerSpec] = {
    "lists": IndexerSpec(lens=MIXED, packed=True, listed=6, dtype="bfloat16", poison=True),
    "lists as in the model": IndexerSpec(lens=((40, 150), (3, 300)), packed=True, listed=70, heads=64, head_dim=128,
                                         dtype="bfloat16", scaled=True, poison=True),
    "lists, e4m3 queries and keys": IndexerSpec(lens=MIXED, packed=True, listed=6, dtype=E4M3, head_dim=32, heads=8,
                                                scaled=True, poison=True),
    "lists, e4m3 keys": IndexerSpec(lens=MIXED, packed=True, listed=6, dtype="float16", cache_dtype=E4M3, scaled=True),
    "lists of any keys": IndexerSpec(lens=MIXED, packed=True, listed=20, ranges="any", heads=5, strided=True),
    "lists, wild ones": IndexerSpec(lens=MIXED, packed=True, listed=20, ranges="wild", poison=True),
    "lists of one entry": IndexerSpec(lens=MIXED, packed=True, listed=1, heads=1),
    "lists, head size 256": IndexerSpec(lens=MIXED, packed=True, listed=40, head_dim=256, heads=17, dtype="float16"),
    "lists, more than 64 heads": IndexerSpec(lens=MIXED, packed=True, listed=9, heads=70, dtype="bfloat16"),
    "lists without entries": IndexerSpec(lens=MIXED, packed=True, listed=0),
    "lists, no keys": IndexerSpec(lens=((2, 0),), packed=True, listed=3, ranges="wild"),
    "lists, no queries": IndexerSpec(lens=((0, 9),), packed=True, listed=3),
    "lists, NaN and infinities that are seen": IndexerSpec(lens=MIXED, packed=True, listed=9, special=True),
}  # fmt: skip
LISTED_ON_EVERY_PATH = ("lists as in the model", "lists, wild ones", "lists of any keys")

# Gradients of the logits.
PLAIN: dict[str, Any] = {"packed": True, "poison": True}
GRADIENTS: dict[str, IndexerSpec] = {
    **{name: spec for name, spec in LISTED.items() if not spec.special and E4M3 not in (spec.dtype, spec.cache_dtype)},
    "ranges": IndexerSpec(lens=MIXED, **PLAIN),
    "ranges, bfloat16": IndexerSpec(lens=MIXED, **PLAIN, dtype="bfloat16", scaled=True),
    "ranges as in the model": IndexerSpec(lens=((40, 150), (3, 300)), **PLAIN, heads=64, head_dim=128,
                                          dtype="bfloat16", scaled=True),
    "any ranges": IndexerSpec(lens=MIXED, **PLAIN, ranges="any", scaled=True, dtype="float16"),
    "wild ranges": IndexerSpec(lens=MIXED, **PLAIN, ranges="wild", strided=True),
    "relative": IndexerSpec(lens=MIXED, **PLAIN, relative=True, scaled=True),
    "relative, fewer columns": IndexerSpec(lens=MIXED, **PLAIN, relative=True, max_keys=6, dtype="bfloat16"),
    "relative, more columns than keys": IndexerSpec(lens=((2, 3),), **PLAIN, relative=True, max_keys=100),
    "relative, wild ranges": IndexerSpec(lens=MIXED, **PLAIN, relative=True, ranges="wild"),
    "every edge": IndexerSpec(lens=ALL_EDGES, **PLAIN),
    "one head": IndexerSpec(lens=MIXED, **PLAIN, heads=1, dtype="float16"),
    "17 heads": IndexerSpec(lens=MIXED, **PLAIN, heads=17, head_dim=48),
    "more than 64 heads": IndexerSpec(lens=MIXED, **PLAIN, heads=70, dtype="bfloat16"),
    "head size 256": IndexerSpec(lens=MIXED, **PLAIN, head_dim=256, dtype="bfloat16"),
    "head size 80": IndexerSpec(lens=MIXED, **PLAIN, head_dim=80),
    "products of 0": IndexerSpec(lens=MIXED, **PLAIN, exact=True, heads=8),
    "products of 0 in lists": IndexerSpec(lens=MIXED, **PLAIN, exact=True, heads=8, listed=12, ranges="any"),
    "numbers where logits are -inf": IndexerSpec(lens=MIXED, packed=True, ranges="any"),
    "numbers where lists have none": IndexerSpec(lens=MIXED, packed=True, ranges="any", listed=12),
    "no keys": IndexerSpec(lens=((2, 0),), packed=True),
    "no queries": IndexerSpec(lens=((0, 9),), packed=True),
    "a long prefill": IndexerSpec(lens=((150, 400), (90, 90)), **PLAIN, dtype="bfloat16", heads=4),
}  # fmt: skip
GRADIENTS_ON_EVERY_PATH = (
    "ranges as in the model", "lists as in the model", "wild ranges", "lists, wild ones", "relative, fewer columns",
    "more than 64 heads", "lists, more than 64 heads",
)  # fmt: skip

# Targets of training, in which keys are rows of latents.
LATENTS: dict[str, Any] = {"packed": True, "poison": True, "head_dim": 576, "dtype": "bfloat16"}
TARGETS: dict[str, TargetSpec] = {
    "lists": TargetSpec(of=IndexerSpec(lens=MIXED, **PLAIN, listed=6)),
    "lists as in the model": TargetSpec(of=IndexerSpec(lens=((20, 150), (3, 300)), **LATENTS, listed=70, heads=128)),
    "lists of a part of the keys": TargetSpec(of=IndexerSpec(lens=MIXED, **LATENTS, listed=9, heads=16), wider=True),
    "lists, lengths": TargetSpec(of=IndexerSpec(lens=MIXED, **PLAIN, listed=9, dtype="float16"), lens="any"),
    "lists, wild lengths": TargetSpec(of=IndexerSpec(lens=MIXED, **PLAIN, listed=9, ranges="any"), lens="wild"),
    "lists, wild ones": TargetSpec(of=IndexerSpec(lens=MIXED, **PLAIN, listed=20, ranges="wild")),
    "lists, strided": TargetSpec(of=IndexerSpec(lens=MIXED, **PLAIN, listed=20, ranges="any", strided=True)),
    "lists of one entry": TargetSpec(of=IndexerSpec(lens=MIXED, **PLAIN, listed=1, heads=1)),
    "lists, 70 heads": TargetSpec(of=IndexerSpec(lens=MIXED, **PLAIN, listed=9, heads=70, dtype="bfloat16")),
    "lists, some heads without keys": TargetSpec(of=IndexerSpec(lens=MIXED, **PLAIN, listed=9), blind_heads=0.5),
    "lists, no head has keys": TargetSpec(of=IndexerSpec(lens=MIXED, **PLAIN, listed=9), blind_heads=1.0),
    "lists without entries": TargetSpec(of=IndexerSpec(lens=MIXED, packed=True, listed=0)),
    "lists, no keys": TargetSpec(of=IndexerSpec(lens=((2, 0),), packed=True, listed=3, ranges="wild")),
    "no queries": TargetSpec(of=IndexerSpec(lens=((0, 9),), packed=True, listed=3)),
    "rows of 1024": TargetSpec(of=IndexerSpec(lens=MIXED, packed=True, listed=9, head_dim=1024, dtype="float16")),
    "a scale": TargetSpec(of=IndexerSpec(lens=MIXED, **PLAIN, listed=9), sm_scale=-0.5),
    "ranges": TargetSpec(of=IndexerSpec(lens=MIXED, **PLAIN, heads=17)),
    "ranges as in the model": TargetSpec(of=IndexerSpec(lens=((20, 150), (3, 300)), **LATENTS, heads=128)),
    "any ranges": TargetSpec(of=IndexerSpec(lens=MIXED, **PLAIN, ranges="any", dtype="float16"), blind_heads=0.2),
    "wild ranges": TargetSpec(of=IndexerSpec(lens=MIXED, **PLAIN, ranges="wild", strided=True)),
    "relative": TargetSpec(of=IndexerSpec(lens=MIXED, **PLAIN, relative=True)),
    "relative, fewer columns": TargetSpec(of=IndexerSpec(lens=MIXED, **PLAIN, relative=True, max_keys=6)),
    "relative, wild ranges": TargetSpec(of=IndexerSpec(lens=MIXED, **PLAIN, relative=True, ranges="wild")),
    "ranges, no keys": TargetSpec(of=IndexerSpec(lens=((2, 0),), packed=True)),
}  # fmt: skip
TARGETS_ON_EVERY_PATH = ("lists as in the model", "lists, wild lengths", "wild ranges", "relative, fewer columns")
TARGET_CORNERS: dict[str, Callable[[], TargetBatch]] = {name: spec.build for name, spec in TARGETS.items()}

# Calls whose logits are exact, so that only one selection is correct.
EXACT: dict[str, IndexerSpec] = {
    "many ties": IndexerSpec(lens=MIXED, exact=True, top_k=6),
    "as in the model, top-k of 2048": IndexerSpec(lens=((1, 2500), (2, 300)), **MODEL, exact=True, top_k=2048),
    "as in the model, top-k of 512": IndexerSpec(lens=((1, 1400),), **MODEL, exact=True, top_k=512, garbage=True),
    "as in the model, top-k of 1152": IndexerSpec(lens=((1, 1300),), **MODEL, exact=True, top_k=1152),
    "prefill as in the model": IndexerSpec(lens=((40, 150),), **MODEL, exact=True, top_k=64, poison=True),
    "the best few of many": IndexerSpec(lens=((1, 2500),), **MODEL, exact=True, top_k=16, seed=7),
    "top-k of 1": IndexerSpec(lens=MIXED, exact=True, top_k=1, cache_dtype=BYTES, dtype="bfloat16"),
    "top-k of 4096": IndexerSpec(lens=((1, 60), (1, 9)), exact=True, top_k=4096),
    "every edge at once": IndexerSpec(lens=ALL_EDGES, exact=True, count="array", spare_seqs=2, padding=3, poison=True,
                                      garbage=True),
    "NaN that is seen": IndexerSpec(lens=MIXED, exact=True, special=True, top_k=30),
    "invalid page indices": IndexerSpec(lens=MIXED, exact=True, invalid_pages=True, garbage=True, poison=True),
    "packed, wild ranges": IndexerSpec(lens=MIXED, exact=True, packed=True, ranges="wild", poison=True, scaled=True),
    "relative": IndexerSpec(lens=MIXED, exact=True, packed=True, relative=True, max_keys=20, dtype="bfloat16"),
    "ratio 4": IndexerSpec(lens=((9, 40), (1, 3), (4, 67)), exact=True, ratio=4, poison=True, garbage=True),
    "candidates": IndexerSpec(lens=MIXED, exact=True, candidate_block_size=4, top_k=9, poison=True),
    "candidates in pages of bytes": IndexerSpec(lens=((1, 300), (3, 70)), **MODEL, exact=True, candidate_block_size=16,
                                                top_k=50),
    "candidates among packed keys": IndexerSpec(lens=MIXED, exact=True, packed=True, candidate_block_size=3, top_k=9),
    "candidates, relative": IndexerSpec(lens=MIXED, exact=True, packed=True, relative=True, candidate_block_size=5),
    "candidates in blocks beyond all keys": IndexerSpec(lens=((2, 5),), exact=True, candidate_block_size=2**31 - 1),
    "packed, no keys": IndexerSpec(lens=((2, 0),), packed=True, exact=True),
}  # fmt: skip
EXACT_ON_EVERY_PATH = (
    "many ties", "every edge at once", "as in the model, top-k of 512", "packed, wild ranges", "relative", "candidates",
)  # fmt: skip

SELECT: dict[str, SelectSpec] = {
    "few columns": SelectSpec(columns=3, edges="none"),
    "no columns": SelectSpec(columns=0, edges="none"),
    "no rows": SelectSpec(rows=0),
    "ties": SelectSpec(columns=300, values="few", top_k=40),
    "all equal": SelectSpec(columns=300, values="one", top_k=40, edges="none"),
    "zeros of both signs": SelectSpec(columns=300, values="zeros", top_k=40),
    "special values": SelectSpec(columns=300, values="special", top_k=40),
    "neighbouring floats": SelectSpec(columns=1000, values="close", top_k=300),
    "every exponent": SelectSpec(columns=1000, values="wide", top_k=100),
    "wild ranges": SelectSpec(columns=100, edges="wild", rows=9),
    "starts alone": SelectSpec(columns=100, edges="starts"),
    "stops alone": SelectSpec(columns=100, edges="stops"),
    "strided": SelectSpec(columns=100, strided=True),
    "top-k of 4096 of many": SelectSpec(rows=2, columns=9000, top_k=4096),
    "a long row": SelectSpec(rows=1, columns=40000, top_k=2048),
    "a long row of few values": SelectSpec(rows=1, columns=40000, top_k=1000, values="few"),
    "many rows": SelectSpec(rows=150, columns=70, top_k=16),
}
SELECT_ON_EVERY_PATH = ("ties", "special values", "neighbouring floats", "wild ranges", "top-k of 4096 of many")

QUANTIZE: dict[str, QuantizeKeysSpec] = {
    "rows": QuantizeKeysSpec(head_dim=128, dtype="bfloat16"),
    "powers of two": QuantizeKeysSpec(head_dim=128, power_of_two=True, dtype="bfloat16"),
    "float16": QuantizeKeysSpec(head_dim=64, dtype="float16", reach=3),
    "every size": QuantizeKeysSpec(rows=40, head_dim=32, reach=30),
    "special values": QuantizeKeysSpec(rows=40, head_dim=48, special=True),
    "special values, powers of two": QuantizeKeysSpec(rows=40, head_dim=48, special=True, power_of_two=True),
    "no rows": QuantizeKeysSpec(rows=0),
    "strided": QuantizeKeysSpec(head_dim=80, strided=True),
    "head size 256": QuantizeKeysSpec(head_dim=256),
}
WRITE: dict[str, WriteKeysSpec] = {
    "a step": WriteKeysSpec(keys=QuantizeKeysSpec(head_dim=128, dtype="bfloat16"), page_size=64),
    "slots of int64": WriteKeysSpec(keys=QuantizeKeysSpec(rows=9), slots="int64"),
    "page size 1": WriteKeysSpec(page_size=1, num_pages=7),
    "page size 3": WriteKeysSpec(page_size=3, keys=QuantizeKeysSpec(power_of_two=True)),
    "no pages": WriteKeysSpec(num_pages=0),
    "no tokens": WriteKeysSpec(keys=QuantizeKeysSpec(rows=0)),
    "special values": WriteKeysSpec(keys=QuantizeKeysSpec(rows=12, special=True)),
    "pages apart": WriteKeysSpec(keys=QuantizeKeysSpec(rows=9, strided=True)),
}


def _wild_candidates() -> TopkBatch:
    """Candidate lists with the smallest and the largest int32, and other invalid blocks."""
    batch = EXACT["candidates"].build_topk()
    lists = np.array([INT32.min, INT32.max, -1, 0, 2**30, -2, 1, 1], np.int32)
    return batch.change(candidate_blocks=np.tile(lists, (len(batch.q), 1)))


def _fewer_sequences() -> IndexerBatch:
    """A call whose entries past the live sequences would be valid as two more sequences."""
    return IndexerSpec(lens=(*MIXED, (2, 9), (3, 3))).build().change(num_seqs=np.array([len(MIXED)], np.int32))


LOGITS_CORNERS: dict[str, Callable[[], IndexerBatch]] = {
    **{name: spec.build for name, spec in (SPECS | LISTED).items()},
    "sequences that do not count": _fewer_sequences,
}
GRADIENT_CORNERS: dict[str, Callable[[], LogitsGradientBatch]] = {
    name: LogitsGradientSpec(of=spec).build for name, spec in GRADIENTS.items()
}
TOPK_CORNERS: dict[str, Callable[[], TopkBatch]] = {name: spec.build_topk for name, spec in SPECS.items()}
EXACT_CORNERS: dict[str, Callable[[], TopkBatch]] = {
    **{name: spec.build_topk for name, spec in EXACT.items()},
    "candidates, wild ones": _wild_candidates,
}
SELECT_CORNERS: dict[str, Callable[[], SelectBatch]] = {name: spec.build for name, spec in SELECT.items()}
QUANTIZE_CORNERS: dict[str, Callable[[], QuantizeKeysBatch]] = {name: spec.build for name, spec in QUANTIZE.items()}
WRITE_CORNERS: dict[str, Callable[[], WriteKeysBatch]] = {
    **{name: spec.build for name, spec in WRITE.items()},
    **table_writes.CORNERS,
}
