"""Check latent attention on two interpreted TPU cores; the argument is the interpreter's mode.

Chunks are short, so that short lists have as many chunks as real lists with thousands of keys. There are more heads
than fit into one tile.
"""

import sys
from typing import Any
from unittest import mock

from ragged_attention.kernels_pallas import _latent
from ragged_attention.testing.mla import ragged
from ragged_attention.testing.mla.oracle import check_decode, check_prefill
from ragged_attention.testing.mla.specs import DecodeSpec, PrefillSpec
from ragged_attention.testing.paged.oracle import check_attention
from ragged_attention.testing.tpu_interpreter import InterpretedRunner

_latent.LONGEST_CHUNK = 32
runner = InterpretedRunner(backend="pallas", mode=sys.argv[1], cores=2)
options = {"num_keys_per_block": 16}
check_prefill(runner, PrefillSpec(tokens=2, rows=90, topk=110, lens="wild", poison="nan").build(), options)
extra: dict[str, Any] = {"extra_topk": 50, "extra_slots": 20, "extra_lens": "inside"}
check_decode(runner, DecodeSpec(topk=70, lens="inside", q_tokens=2, poison="nan", **extra).build(), options)
pages: dict[str, Any] = {"topk": 0, "kv_lens": (150, 0, 61, 64), "causal": True, "poison": "nan", "garbage": True}
queries: dict[str, Any] = {"q_tokens": 3, "heads": 2, "page_size": 2, "dtype": "bfloat16", "spare_columns": 40}
check_decode(runner, DecodeSpec(**pages, **queries).build(), options | {"num_queries_per_block": 2})
many: dict[str, Any] = {"tokens": 2, "heads": 600, "kv_heads": 2, "topk": 9, "sinks": "mixed", "dtype": "float16"}
check_prefill(runner, PrefillSpec(**many).build(), options)
fp8: dict[str, Any] = {"format": "fp8_v32", "d_v": 576, "page_size": 8, "kv_lens": (150, 9), "poison": "nan"}
check_decode(runner, DecodeSpec(topk=0, dtype="bfloat16", **fp8).build(), options)
window: dict[str, Any] = {"sliding_window": 40, "soft_cap": 2.0, "kv_lens": (150, 3, 0), "q_tokens": 3, "poison": "nan"}
check_decode(runner, DecodeSpec(topk=0, **window, page_size=7, heads=4, kv_heads=2, dtype="bfloat16").build(), options)
_latent.MAX_ROWS = 16  # fewer rows than a tile of queries has; with `group=40`, fewer than one token has
lens = ((1, 150), (0, 9), (9, 130), (3, 2), (2, 61))
for group, scalar_memory in ((3, 160), (40, 1 << 20)):  # the table is read in pieces, then at once
    spec = ragged._spec(lens=lens, group=group, sliding_window=70, page_size=2, padding=3, poison="nan")
    with mock.patch.object(_latent, "table_bytes", lambda call, size=scalar_memory: size):
        check_attention(runner, spec.build(), options | {"num_queries_per_block": 4})
