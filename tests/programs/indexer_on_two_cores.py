"""Check the indexer on two interpreted TPU cores; the argument is the interpreter's mode.

The inputs have several blocks of keys and of rows. A chunk is one tile.
"""

import sys
from typing import Any

from ragged_attention.testing.indexer.oracle import check_exact_topk, check_logits
from ragged_attention.testing.indexer.specs import IndexerSpec
from ragged_attention.testing.tpu_interpreter import InterpretedRunner

runner = InterpretedRunner(backend="pallas", mode=sys.argv[1], cores=2)
keys: dict[str, Any] = {"page_size": 16, "dtype": "bfloat16", "poison": True, "garbage": True, "invalid_pages": True}
keys |= {"lens": ((3, 300), (1, 40), (9, 200), (0, 50), (5, 1)), "padding": 2}
options = {"num_queries_per_block": 2, "num_keys_per_block": 128}
check_logits(runner, IndexerSpec(cache_dtype="uint8", heads=9, **keys).build(), options)
options |= {"num_rows_per_chunk": 6, "num_rows_per_block": 2}
spec = IndexerSpec(exact=True, top_k=70, candidate_block_size=24, **keys)
check_exact_topk(runner, spec.build_topk(), options)
