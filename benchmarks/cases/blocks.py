"""Named shapes of block selection, which selects the key blocks that sparse attention reads (keys with heads).

The compile matrix compiles them. No table of times reports them yet. As in `indexer`, all sequences of a case have the
same lengths. Values are small integers, so that scores are exact and there is one right answer.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.cases.base import Compared, K
from benchmarks.cases.indexer import IndexerCase
from benchmarks.compiled.compiling import ITEMSIZE
from ragged_attention.calls import Call, Device
from ragged_attention.calls.indexer import E4M3
from ragged_attention.reference.select_blocks import select_blocks
from ragged_attention.tools.samples import BlocksSample


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlocksCase(IndexerCase, BlocksSample):
    """One batch of block selection. The defaults are those of MiniMax M3."""

    dtype: str = "bfloat16"
    cache_dtype: str = "bfloat16"
    num_q_heads: int = 4
    page_size: int = 128
    top_k: int = 16

    @property
    def operation(self) -> str:
        return "select_blocks"

    @property
    def wgmma_rows(self) -> int:
        """The rows of a product: the tokens times the heads that share a KV head."""
        return min(self.num_q_tokens * self.num_q_heads // self.num_kv_heads, 64)

    def needed_bytes(self) -> int:
        """The bytes of queries, keys and the result, each counted once."""
        rows = self.num_tokens * self.num_q_heads
        keys = self.max_num_seqs * self.max_len * self.num_kv_heads * self.key_bytes
        return rows * self.head_dim * ITEMSIZE[self.dtype] + keys + 4 * rows * self.top_k

    def scaled_down(self, *, length: int = 77, sequences: int = 3) -> "BlocksCase":
        small: Any = super().scaled_down(length=length, sequences=sequences)
        return dataclasses.replace(small, block_size=min(self.block_size, 8), num_q_heads=self.num_q_heads)

    def calls(self, device: Device) -> Iterator[Call]:
        """The calls of a serving step: the whole selection, then each of its operations."""
        yield self.attention_call(device)
        for operation in ("block_scores", "top_k_blocks"):
            yield self.call(operation, device)

    def compared(self, inputs: dict[str, Any], out: Any, to_numpy: Any) -> Compared:
        """The selected blocks of the first, a middle and the last token."""
        for token in sorted({0, self.num_tokens // 2, self.num_tokens - 1}):
            rows = slice(token, token + 1)
            seen = {name: value for name, value in self._seen(inputs, token, to_numpy).items() if name != "relative"}
            want = select_blocks(
                to_numpy(inputs["q"][rows]), **seen, top_k=self.top_k, block_size=self.block_size,
                init_blocks=self.init_blocks, local_blocks=self.local_blocks, q_dtype=self.dtype,
                key_dtype=self.stored,
            )  # fmt: skip
            yield f"token {token}", to_numpy(out[rows]).astype(np.float64), want.astype(np.float64)


def _decode(name: str, num_seqs: int, kv_len: int, **fields: Any) -> BlocksCase:
    shape: dict[str, Any] = {"workload": "-", "num_q_tokens": 1}
    return BlocksCase(name=f"blocks_{name}", max_num_seqs=num_seqs, max_len=kv_len, **(shape | fields))


def _prefill(name: str, num_tokens: int, kv_len: int, **fields: Any) -> BlocksCase:
    shape: dict[str, Any] = {"workload": "-", "max_num_seqs": 1}
    return BlocksCase(name=f"blocks_{name}", num_q_tokens=num_tokens, max_len=kv_len, **(shape | fields))


EIGHT_BITS: dict[str, Any] = {"dtype": E4M3, "cache_dtype": "uint8", "page_size": 64}
FLOAT32: dict[str, Any] = {"dtype": "float32", "cache_dtype": "float32"}

CASES: dict[str, BlocksCase] = {}
_MORE = (
    _decode("decode_64x32k", 64, 32 * K),
    _decode("decode_bytes", 64, 32 * K, **(EIGHT_BITS | {"dtype": "bfloat16"})),
    _prefill("prefill_4k", 4 * K, 4 * K),
    _prefill("prefill_bytes", 4 * K, 4 * K, **EIGHT_BITS),
    _prefill("prefill_float32", 512, 4 * K, **FLOAT32),
    _prefill("prefill_wide", 512, 4 * K, head_dim=256, block_size=256, dtype="float16", cache_dtype="float16"),
    _prefill("single_keys", 512, 4 * K, block_size=1, num_q_heads=16, num_kv_heads=4, page_size=24),
    _prefill("packed", 4 * K, 4 * K, packed=True, dtype=E4M3, cache_dtype=E4M3, block_size=8, local_blocks=0),
)
COMPILED_ONLY = {case.name: case for case in _MORE}
