"""Named calls for the edge cases of block selection."""

from collections.abc import Callable
from typing import Any

from ragged_attention.testing.blocks.specs import BlocksBatch, BlocksSpec, TopKBatch, TopKSpec
from ragged_attention.testing.indexer.corners import ALL_EDGES, MIXED
from ragged_attention.testing.indexer.specs import BYTES, E4M3, IndexerSpec

MODEL: dict[str, Any] = {"heads": 4, "head_dim": 128, "dtype": "bfloat16", "page_size": 128}  # MiniMax M3
BLOCKS_OF_MODEL: dict[str, Any] = {"block_size": 128, "top_k": 16, "local_blocks": 1}


def _spec(blocks: dict[str, Any] | None = None, **keys: Any) -> BlocksSpec:
    return BlocksSpec(keys=IndexerSpec(**{"lens": MIXED, "heads": 4} | keys), **(blocks or {}))


SPECS: dict[str, BlocksSpec] = {
    "one key": _spec(lens=((1, 1),)),
    "mixed": _spec(dtype="bfloat16"),
    "mixed, a head of keys for each": _spec({"key_heads": 4}, dtype="bfloat16"),
    "mixed, heads share keys": _spec({"key_heads": 2}, heads=6, dtype="float16", scaled=True),
    "mixed, pages of bytes": _spec(dtype="bfloat16", cache_dtype=BYTES, head_dim=64),
    "mixed, e4m3 pages with scales": _spec({"key_heads": 2}, dtype="float16", cache_dtype=E4M3, scaled=True),
    "mixed, e4m3 queries": _spec(dtype=E4M3, cache_dtype=BYTES, head_dim=32, heads=8),
    "as in the model": _spec(BLOCKS_OF_MODEL, lens=((1, 700), (3, 300)), **MODEL, poison=True, garbage=True),
    "prefill as in the model": _spec(BLOCKS_OF_MODEL, lens=((70, 400),), **MODEL),
    "blocks of one key": _spec({"block_size": 1}),
    "blocks that hold pages": _spec({"block_size": 16}, page_size=4),
    "pages that hold blocks": _spec({"block_size": 2}, page_size=8),
    "blocks and pages of other sizes": _spec({"block_size": 8}, page_size=3, cache_dtype=BYTES, strided=True),
    "a block of everything": _spec({"block_size": 256}),
    "head size 256": _spec(head_dim=256, dtype="bfloat16"),
    "one head": _spec(heads=1, head_dim=80, dtype="float16"),
    "decode of a long sequence": _spec({"block_size": 8}, lens=((1, 900), (1, 3)), page_size=16, dtype="bfloat16"),
    "prefill of more rows than a tile": _spec(lens=((100, 130),), page_size=16, dtype="bfloat16"),
    "every edge at once": _spec({"init_blocks": 1, "local_blocks": 2}, lens=ALL_EDGES, count="array", spare_seqs=2,
                                padding=3, poison=True, garbage=True),
    "num_seqs an int": _spec(count="int", spare_seqs=3, padding=2, poison=True, garbage=True),
    "num_seqs 0": _spec(lens=(), count="array", spare_seqs=3, padding=4, garbage=True, poison=True),
    "no queries": _spec(lens=((0, 9), (0, 0)), garbage=True),
    "more queries than keys": _spec(lens=((5, 2), (9, 8), (2, 1)), poison=True),
    "invalid page indices": _spec({"local_blocks": 1}, invalid_pages=True, garbage=True, poison=True),
    "strided": _spec({"key_heads": 2}, strided=True, dtype="bfloat16", scaled=True),
    "NaN and infinities that are seen": _spec(special=True, dtype="bfloat16", scaled=True),
    "NaN in pages of bytes": _spec({"local_blocks": 1}, special=True, dtype=E4M3, cache_dtype=BYTES),
    "packed": _spec(packed=True, dtype="bfloat16", poison=True),
    "packed, heads share keys": _spec({"key_heads": 2}, packed=True, scaled=True, cache_dtype=E4M3),
    "packed, any ranges": _spec({"block_size": 8}, packed=True, ranges="any", scaled=True, dtype="float16"),
    "packed, wild ranges": _spec(packed=True, ranges="wild", poison=True, strided=True),
    "packed, as many keys as the longest": _spec(packed=True, max_keys=37, dtype="bfloat16"),
    "packed, fewer keys": _spec(packed=True, max_keys=6, poison=True),
    "packed, no keys": _spec(lens=((2, 0),), packed=True),
}  # fmt: skip
ON_EVERY_PATH = ("as in the model", "every edge at once", "packed, wild ranges", "mixed, heads share keys",
                 "blocks and pages of other sizes")  # fmt: skip

# Calls with rounded scores. Calls with exact scores, below, cover the other edge cases of selection.
SELECTED = ("mixed, heads share keys", "as in the model", "every edge at once", "more queries than keys",
            "NaN and infinities that are seen", "NaN in pages of bytes", "packed, any ranges")  # fmt: skip

# Calls whose scores are exact, so that only one selection is correct.
EXACT: dict[str, BlocksSpec] = {
    "many ties": _spec({"top_k": 4}, exact=True),
    "as in the model": _spec(BLOCKS_OF_MODEL, lens=((1, 2700), (2, 300)), **MODEL, exact=True),
    "the best few of many": _spec({"block_size": 1, "top_k": 16}, lens=((1, 900),), exact=True, seed=7),
    "first and last": _spec({"block_size": 2, "top_k": 5, "init_blocks": 2, "local_blocks": 2}, exact=True),
    "all that may be chosen is forced": _spec({"top_k": 3, "init_blocks": 1, "local_blocks": 2}, exact=True),
    "the same block is first and last": _spec({"init_blocks": 3}, lens=((1, 3), (2, 2)), exact=True),
    "top-k of 1": _spec({"top_k": 1, "local_blocks": 1}, exact=True, cache_dtype=BYTES, dtype="bfloat16"),
    "top-k of 4096": _spec({"top_k": 4096}, lens=((1, 60), (1, 9)), exact=True),
    "every edge at once": _spec({"init_blocks": 1, "local_blocks": 1}, lens=ALL_EDGES, exact=True, count="array",
                                spare_seqs=2, padding=3, poison=True, garbage=True),
    "splits of whole blocks": _spec({"block_size": 256, "top_k": 21}, lens=((1, 5121),), page_size=64, exact=True),
    "splits of a few tokens": _spec({"block_size": 16, "top_k": 9, "local_blocks": 1}, lens=((3, 2600), (2, 7)),
                                    page_size=64, exact=True),
    "NaN that is seen": _spec({"block_size": 1, "top_k": 9, "local_blocks": 3}, exact=True, special=True),
    "invalid page indices": _spec({"block_size": 2, "local_blocks": 1}, exact=True, invalid_pages=True, garbage=True,
                                  poison=True),
    "packed, wild ranges": _spec({"key_heads": 2}, exact=True, packed=True, ranges="wild", poison=True, scaled=True),
    "packed, fewer keys": _spec({"block_size": 8}, exact=True, packed=True, max_keys=20, dtype="bfloat16"),
    "packed, no keys": _spec(lens=((2, 0),), packed=True, exact=True),
}  # fmt: skip
EXACT_ON_EVERY_PATH = ("many ties", "first and last", "every edge at once", "packed, wild ranges", "NaN that is seen")

TOP_K: dict[str, TopKSpec] = {
    "few blocks": TopKSpec(blocks=3, seen="all"),
    "no blocks": TopKSpec(blocks=0, local_blocks=1),
    "no tokens": TopKSpec(tokens=0),
    "no heads": TopKSpec(heads=0),
    "nothing is seen": TopKSpec(seen="none", init_blocks=1, local_blocks=1),
    "ties": TopKSpec(blocks=300, values="few", top_k=40),
    "all equal": TopKSpec(blocks=300, values="one", top_k=40, seen="all"),
    "zeros of both signs": TopKSpec(blocks=300, values="zeros", top_k=40),
    "special values": TopKSpec(blocks=300, values="special", top_k=40),
    "special values, some forced": TopKSpec(blocks=300, values="special", top_k=40, init_blocks=9, local_blocks=20),
    "infinite scores beside forced ones": TopKSpec(
        blocks=300, values="special", seen="all", top_k=30, init_blocks=9, local_blocks=20
    ),
    "neighbouring floats": TopKSpec(blocks=1000, values="close", top_k=300, local_blocks=1),
    "all that may be chosen is forced": TopKSpec(init_blocks=2, local_blocks=3),
    "more forced than there are": TopKSpec(blocks=4, top_k=12, init_blocks=6, local_blocks=6, seen="all"),
    "strided": TopKSpec(blocks=100, strided=True, local_blocks=2),
    "top-k of 4096 of many": TopKSpec(tokens=1, heads=2, blocks=9000, top_k=4096),
    "as in the model": TopKSpec(tokens=2, heads=4, blocks=8192, top_k=16, local_blocks=1),
}
TOP_K_ON_EVERY_PATH = ("ties", "special values, some forced", "neighbouring floats", "as in the model")

SCORES_CORNERS: dict[str, Callable[[], BlocksBatch]] = {name: spec.build for name, spec in SPECS.items()}
SELECT_CORNERS: dict[str, Callable[[], BlocksBatch]] = {name: SPECS[name].build for name in SELECTED}
EXACT_CORNERS: dict[str, Callable[[], BlocksBatch]] = {name: spec.build for name, spec in EXACT.items()}
TOP_K_CORNERS: dict[str, Callable[[], TopKBatch]] = {name: spec.build for name, spec in TOP_K.items()}
