"""Named shapes of the lightning indexer, W14, which selects the keys that sparse latent attention reads.

All sequences of a case have the same lengths. As explained in `base`, a floor counts each needed byte once and the
operations of visible pairs: 2 * heads * head size for each pair of a query token and a key that it sees. No floor
includes the selection itself. Values are small integers, so that logits are exact and there is one right answer.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.cases.base import Case, Compared, K, Tables, taken
from benchmarks.compiled.compiling import ITEMSIZE
from ragged_attention.calls import Call, Device
from ragged_attention.calls.indexer import E4M3, SCALE_BYTES
from ragged_attention.reference._kv_layout import encode
from ragged_attention.reference.indexer_topk import indexer_topk
from ragged_attention.tools.samples import TABLES, FakeArray, IndexerSample

PAGES = 509  # number of random pages; a larger cache repeats them


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexerCase(Case, IndexerSample):
    """One batch of the indexer. The defaults are those of DeepSeek-V3.2, with 8-bit queries and keys."""

    name: str
    workload: str
    num_q_tokens: int  # query tokens per sequence; there are `max_num_seqs` sequences
    num_tokens: int = dataclasses.field(init=False)
    relative: bool = False
    trained: bool = False  # whether the calls are those of a training step

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_tokens", self.max_num_seqs * self.num_q_tokens)

    @property
    def operation(self) -> str:
        return "indexer_topk"

    @property
    def key_format(self) -> str:
        return "8 bits" if self.stored == E4M3 else "plain"

    @property
    def stored(self) -> str:
        """The dtype of the stored key values."""
        return E4M3 if self.cache_dtype == "uint8" else self.cache_dtype

    @property
    def wgmma_rows(self) -> int:
        """The rows of a product. In the indexer, they are keys."""
        return 64

    @property
    def key_bytes(self) -> int:
        scales = SCALE_BYTES if self.cache_dtype == "uint8" or self.packed else 0
        return self.head_dim * ITEMSIZE[self.stored] + scales

    def needed_bytes(self) -> int:
        """The bytes of queries, weights, keys and the result, each counted once."""
        queries = self.num_tokens * self.num_q_heads * (self.head_dim * ITEMSIZE[self.dtype] + 4)
        return queries + self.max_num_seqs * self.max_len * self.key_bytes + 4 * self.num_tokens * self.top_k

    def visible_pairs(self) -> int:
        hidden = self.num_q_tokens * (self.num_q_tokens - 1) // 2
        return self.max_num_seqs * (self.num_q_tokens * self.max_len - hidden)

    def flops(self) -> int:
        return 2 * self.visible_pairs() * self.num_q_heads * self.head_dim

    def floor_seconds(self, bytes_per_second: float, flops_per_second: float) -> tuple[float, str]:
        """The least time of any implementation.

        8-bit products run at twice `flops_per_second`, the rate of 16-bit products.
        """
        return super().floor_seconds(bytes_per_second, flops_per_second * (2 if self.dtype == E4M3 else 1))

    def scaled_down(self, *, length: int = 77, sequences: int = 3) -> "IndexerCase":
        """A small case of the same kind, with the same widths and page size."""
        factor = max(1.0, self.max_len / length)
        return dataclasses.replace(
            self,
            name=f"{self.name}_small",
            max_num_seqs=min(self.max_num_seqs, sequences),
            num_q_tokens=min(self.num_q_tokens, 9),
            max_len=int(self.max_len / factor),
            num_q_heads=min(self.num_q_heads, 16),
            top_k=max(9, int(self.top_k / factor)),
        )

    def calls(self, device: Device) -> Iterator[Call]:
        """The calls of a serving step (the selection, then each of its operations) or of a training step.

        A training step computes logits and their gradient over ranges of keys, then over lists.
        """
        if self.trained:
            for operation in ("indexer_logits", "indexer_logits_backward"):
                for listed in (False, True):
                    yield dataclasses.replace(self, listed=listed).call(operation, device)
            return
        yield self.attention_call(device)
        for operation in ("indexer_logits", "top_k_indices", "quantize_indexer_keys"):
            yield self.call(operation, device)
        if self.cache_dtype == "uint8":
            yield self.call("write_indexer_cache", device)
            slots = dict.fromkeys(TABLES) | {"slot_mapping": FakeArray((self.num_tokens,), "int64")}
            yield self.call("write_indexer_cache", device, **slots)

    # ---- arguments

    @property
    def num_pages(self) -> int:
        """The number of pages, one of which is unused."""
        return super().num_pages + 1

    def _axes(self) -> dict[str, int]:
        columns = self.max_num_seqs * self.max_len if self.packed else self.pages_per_seq * self.page_size
        return super()._axes() | {"N": columns}

    # ---- inputs

    def tables(self, seed: int = 0) -> Tables:
        """Pages in random order, or ranges of keys. The last query of a sequence sees all of its keys."""
        generator = np.random.default_rng(seed)
        found: Tables = {}
        if self.packed:
            token = np.arange(self.num_tokens)
            found["starts"] = (token // self.num_q_tokens * self.max_len).astype(np.int32)
            seen = self.max_len - self.num_q_tokens + token % self.num_q_tokens + 1
            found["stops"] = (found["starts"] + seen).astype(np.int32)
        else:
            count = self.max_num_seqs * self.pages_per_seq
            order = generator.permutation(count + 1)[:count].astype(np.int32)
            found["page_indices"] = order.reshape(self.max_num_seqs, -1)
            found["kv_lens"] = np.full(self.max_num_seqs, self.max_len, np.int32)
            found["cu_q_lens"] = (np.arange(self.max_num_seqs + 1) * self.num_q_tokens).astype(np.int32)
        if self.candidate_blocks:
            blocks = max(1, self.max_len // self.candidate_block_size)
            listed = generator.integers(0, blocks, (self.num_tokens, self.candidate_blocks), np.int32)
            found["candidate_blocks"] = listed
        return found

    def changed(self) -> "Iterator[tuple[IndexerCase, Tables]]":
        """Yield this case with other pages, then with the pages of seed 0."""
        yield self, self.tables(1)
        yield self, self.tables(0)

    def values(self, name: str, array: FakeArray, generator: np.random.Generator) -> np.ndarray:
        if array.dtype != "uint8":
            drawn = generator.integers(-2, 3, min(super().values(name, array, generator).size, 2**20))
            return (2.0**drawn if name == "key_scale" else drawn).astype(np.float32)
        count = min(array.shape[0], PAGES)
        pages = np.empty((count, self.page_size * (self.head_dim + SCALE_BYTES)), np.uint8)
        rows = generator.integers(-2, 3, (count, self.page_size * self.head_dim)).astype(np.float64)
        pages[:, : rows.shape[1]] = encode(rows, E4M3)
        scales = 2.0 ** generator.integers(-2, 3, (count, self.page_size))
        pages[:, rows.shape[1] :] = scales.astype("<f4").view(np.uint8)
        return pages.ravel()

    # ---- results

    @property
    def bounds(self) -> str:
        return "float32"

    def compared(self, inputs: dict[str, Any], out: Any, to_numpy: Any) -> Compared:
        """The selected keys of the first, a middle and the last token."""
        for token in sorted({0, self.num_tokens // 2, self.num_tokens - 1}):
            rows = slice(token, token + 1)
            arguments = {name: to_numpy(inputs[name][rows]) for name in ("q", "weights")}
            if self.candidate_blocks:
                arguments["candidate_blocks"] = to_numpy(inputs["candidate_blocks"][rows])
                arguments["candidate_block_size"] = self.candidate_block_size
            want = indexer_topk(
                **arguments, **self._seen(inputs, token, to_numpy), top_k=self.top_k, q_dtype=self.dtype,
                key_dtype=self.stored,
            )  # fmt: skip
            yield f"token {token}", to_numpy(out[rows]).astype(np.float64), want.astype(np.float64)

    def _seen(self, inputs: dict[str, Any], token: int, to_numpy: Any) -> dict[str, Any]:
        """The keys of one token, as arguments for a call with that token alone."""
        if self.packed:
            names = ("starts", "stops")
            arguments = {name: to_numpy(inputs[name][token : token + 1]) for name in names}
            return arguments | {
                "keys": to_numpy(inputs["keys"]),
                "key_scale": to_numpy(inputs["key_scale"]),
                "relative": self.relative,
            }
        seq, later = token // self.num_q_tokens, self.num_q_tokens - 1 - token % self.num_q_tokens
        pages = to_numpy(inputs["page_indices"][seq]).astype(np.int64)
        return {
            "keys": to_numpy(taken(inputs["keys"], pages)),
            "page_indices": np.arange(len(pages), dtype=np.int32)[None],
            "kv_lens": np.array([self.max_len - later], np.int32),
            "cu_q_lens": np.array([0, 1], np.int32),
        }


# ---- the cases


def _decode(name: str, num_seqs: int, kv_len: int, **fields: Any) -> IndexerCase:
    shape: dict[str, Any] = {"workload": "W14", "num_q_tokens": 1}
    return IndexerCase(name=f"indexer_{name}", max_num_seqs=num_seqs, max_len=kv_len, **(shape | fields))


def _prefill(name: str, num_tokens: int, kv_len: int, **fields: Any) -> IndexerCase:
    shape: dict[str, Any] = {"workload": "W14", "max_num_seqs": 1}
    return IndexerCase(name=f"indexer_{name}", num_q_tokens=num_tokens, max_len=kv_len, **(shape | fields))


PLAIN: dict[str, Any] = {"workload": "-", "dtype": "bfloat16", "cache_dtype": "bfloat16"}
FLOAT32: dict[str, Any] = {"workload": "-", "dtype": "float32", "cache_dtype": "float32"}

_ALL = (
    _decode("decode_64x32k", 64, 32 * K),
    _decode("decode_64q2s32k", 64, 32 * K, num_q_tokens=2),
    _decode("decode_1x128k", 1, 128 * K),
    _prefill("prefill_4k", 4 * K, 4 * K),
)
CASES = {case.name: case for case in _ALL}

# No table reports these shapes. The compile matrix needs them, because they compile to different code.
_MORE = (
    _decode("decode_bf16_queries", 64, 32 * K, workload="-", dtype="bfloat16"),
    _decode("decode_bf16", 64, 32 * K, **PLAIN),
    _decode("decode_float32", 64, 8 * K, **FLOAT32),
    _decode("candidates", 64, 32 * K, workload="-", candidate_blocks=64, candidate_block_size=128),
    _prefill("prefill_bf16_queries", 4 * K, 4 * K, workload="-", dtype="bfloat16"),
    _prefill("prefill_bf16", 4 * K, 4 * K, **PLAIN),
    _prefill("prefill_float32", 512, 4 * K, **FLOAT32),
    _prefill("prefill_page24", 4 * K, 4 * K, workload="-", page_size=24, num_q_heads=32),
    _prefill("prefill_wide", 4 * K, 4 * K, head_dim=256, **PLAIN),
    _prefill("narrow_5_heads", 512, 4 * K, num_q_heads=5, head_dim=80, **(PLAIN | {"dtype": "float16",
             "cache_dtype": "float16"})),
    _decode("decode_8_heads", 64, 32 * K, workload="-", num_q_heads=8, head_dim=80),
    _prefill("128_heads", 4 * K, 4 * K, workload="-", num_q_heads=128),
    _prefill("packed", 4 * K, 4 * K, workload="-", packed=True, cache_dtype=E4M3),
    _prefill("training", 4 * K, 4 * K, packed=True, trained=True, **PLAIN),
    _prefill("training_wide", 4 * K, 4 * K, packed=True, trained=True, head_dim=256, **PLAIN),
    _prefill("training_float32", 512, 4 * K, packed=True, trained=True, **FLOAT32),
    _prefill("training_5_heads", 512, 4 * K, packed=True, trained=True, num_q_heads=5, head_dim=80,
             **(PLAIN | {"dtype": "float16", "cache_dtype": "float16"})),
    _prefill("packed_relative", 4 * K, 4 * K, workload="-", packed=True, cache_dtype=E4M3, relative=True, top_k=512),
)  # fmt: skip
COMPILED_ONLY = {case.name: case for case in _MORE}
