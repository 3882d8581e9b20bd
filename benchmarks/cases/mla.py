"""Named shapes of multi-head latent attention, W9 to W12.

All sequences of a case have the same lengths. As explained in `base`, a floor counts each needed byte once and the
operations of visible pairs: 2 * heads * (d_qk + d_v) for each pair of a query token and a key that it sees.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.cases.base import Case, Compared, K, Tables, taken
from benchmarks.compiled.compiling import ITEMSIZE
from ragged_attention.calls import CACHE_FORMATS, Call, Device
from ragged_attention.reference.mla_decode import mla_decode
from ragged_attention.reference.quantize_mla_cache import quantize_mla_cache
from ragged_attention.tools.samples import FakeArray, LatentSample

ROWS = 2039  # number of random latent rows; a larger cache repeats the pages that they fill


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentCase(Case, LatentSample):
    """One batch over a latent cache. A prefill is one sequence with many query tokens."""

    name: str
    workload: str
    prefill: bool = False
    cache_format: str = "plain"
    d_qk: int = 576
    topk: int = 0

    @property
    def operation(self) -> str:
        return "sparse_mla_prefill" if self.prefill else "mla_decode"

    @property
    def key_format(self) -> str:
        return f"{self.cache_format} beside {self.extra_format}" if self.extra_format else self.cache_format

    @property
    def row_bytes(self) -> int:
        return self._row_bytes(self.cache_format)

    def _row_bytes(self, cache_format: str) -> int:
        if cache_format != "plain":
            return CACHE_FORMATS[cache_format].token_bytes
        return self.num_kv_heads * self.d_qk * ITEMSIZE[self.dtype]

    @property
    def widths(self) -> tuple[int, int]:
        """The bytes per row of the first and of the second cache."""
        return self.row_bytes, self._row_bytes(self.extra_format or self.cache_format)

    @property
    def q_shape(self) -> tuple[int, ...]:
        tokens = (self.num_tokens,) if self.prefill else (self.max_num_seqs, self.num_q_tokens)
        return (*tokens, self.num_q_heads, self.d_qk)

    @property
    def packed(self) -> bool:
        """Whether the rows are packed, without pages. Operations on a cache then see pages of one row."""
        return self.prefill and self.cache_format == "plain"

    def num_pages(self, page_size: int) -> int:
        """The number of pages, one of which is unused."""
        return super().num_pages(page_size) + 1

    def _cache(self, page_size: int, cache_format: str | None = None) -> FakeArray:
        if self.packed:
            return FakeArray((self.max_len, 1, self.num_kv_heads, self.d_qk), self.dtype)
        return super()._cache(page_size, cache_format)

    def _rows(self) -> FakeArray:
        cache = super()._rows()
        return FakeArray((self.max_len, *cache.shape[2:]), cache.dtype) if self.packed else cache

    @property
    def wgmma_rows(self) -> int:
        """The rows of a product, or 0 if wgmma is not expected.

        For formats with small scale groups, some Triton versions have no wgmma tile.
        """
        tokens = 1 if self.topk else self.num_q_tokens
        return self.num_q_heads // self.num_kv_heads * tokens if self.cache_format in ("plain", "fp8_v32") else 0

    def needed_rows(self) -> tuple[int, int]:
        """The number of rows of each cache that at least one query sees.

        The lists of a sequence overlap as little as possible, so a sequence needs one row per list entry, up to all
        `max_len` rows.
        """
        if not self.topk:
            window = self.sliding_window or self.max_len
            return self.max_num_seqs * min(self.max_len, window + self.num_q_tokens - 1), 0
        main, extra = (min(self.max_len, self.num_q_tokens * topk) for topk in (self.topk, self.extra_topk))
        return self.max_num_seqs * main, self.max_num_seqs * extra

    def needed_cache_bytes(self, widths: tuple[int, int]) -> int:
        """The bytes of the rows that at least one query sees, if rows of the two caches have `widths` bytes."""
        return sum(rows * width for rows, width in zip(self.needed_rows(), widths, strict=True))

    def listed_bytes(self) -> int:
        """The bytes of all listed rows. A row counts once for each list that contains it."""
        return self.num_tokens * (self.topk * self.widths[0] + self.extra_topk * self.widths[1])

    def needed_bytes(self) -> int:
        """The bytes of queries, latent rows, lists or tables, and output, each counted once."""
        queries = math.prod(self.q_shape[:-1]) * (self.d_qk + self.d_v) * ITEMSIZE[self.dtype]
        lists = self.num_tokens * (self.topk + self.extra_topk) * self.num_kv_heads
        tables = lists if self.topk else self.max_num_seqs * (self.pages_per_seq(self.page_size) + 1)
        return queries + self.needed_cache_bytes(self.widths) + 4 * tables

    def visible_pairs(self) -> int:
        if self.topk:
            return self.num_tokens * (self.topk + self.extra_topk)
        return self.max_num_seqs * sum(len(self._seen(token)) for token in range(self.num_q_tokens))

    def _seen(self, token: int) -> range:
        """The positions that a query token of a dense case sees."""
        position = self.max_len - self.num_q_tokens + token
        first = max(position - self.sliding_window + 1, 0) if self.sliding_window else 0
        return range(first, position + 1 if self.causal else self.max_len)

    def flops(self) -> int:
        return 2 * self.visible_pairs() * self.num_q_heads * (self.d_qk + self.d_v)

    def scaled_down(self, *, length: int = 77, sequences: int = 3) -> "LatentCase":
        """A small case of the same kind, with the same widths, cache format and page sizes."""
        factor = max(1.0, self.max_len / length)
        num_seqs = min(self.max_num_seqs, sequences)
        return dataclasses.replace(
            self,
            name=f"{self.name}_small",
            max_num_seqs=num_seqs,
            num_tokens=num_seqs * min(self.num_q_tokens, 9 if self.prefill else 2),
            max_len=int(self.max_len / factor),
            num_q_heads=min(self.num_q_heads, 16) * self.num_kv_heads,
            sliding_window=self.sliding_window and max(1, int(self.sliding_window / factor)),
            topk=self.topk and max(9, int(self.topk / factor)),
            extra_topk=self.extra_topk and max(5, int(self.extra_topk / factor)),
        )

    def calls(self, device: Device) -> Iterator[Call]:
        """The calls of a serving step. A prefill over packed rows adds its gradient, without and with determinism."""
        yield self.attention_call(device)
        yield self.call("write_mla_cache", device)
        yield self.call("latent_norm_rope_write", device)
        if self.cache_format != "plain":
            yield self.call("quantize_mla_cache", device)
        if not self.prefill:
            yield self.call("make_decode_schedule", device, num_parts=device.num_multiprocessors)
        elif self.packed:
            for deterministic in (False, True):
                yield self.call("sparse_mla_prefill_backward", device, deterministic=deterministic)
            # `attention_target` trains an indexer, over lists or ranges. With few heads the compiler unrolls its only
            # loop, and the compile matrix, which checks the loops of workloads, would report that loop as missing.
            if self.num_kv_heads == 1 and (self.workload == "-" or self.num_q_heads > 64):
                for topk in (self.topk, 0):
                    yield dataclasses.replace(self, topk=topk).call("attention_target", device)

    # ---- inputs

    def _page_table(self, page_size: int, generator: np.random.Generator) -> np.ndarray:
        """The page indices of every sequence, [S, M], in random order."""
        count = self.max_num_seqs * self.pages_per_seq(page_size)
        return generator.permutation(count + 1)[:count].reshape(self.max_num_seqs, -1).astype(np.int32)

    def _lists(self, topk: int, page_size: int, generator: np.random.Generator) -> np.ndarray:
        """Distinct random positions of the sequence for every query token, as slots. Longer lists end with -1.

        All positions of a sequence are put in one random order, and each list is a contiguous piece of it. The pieces
        begin at evenly spaced places, assigned to the queries at random, so a sequence's lists overlap as little as
        possible.
        """
        pages = None if self.packed else self._page_table(page_size, generator)
        lists = np.empty((self.max_num_seqs, self.num_q_tokens, topk), np.int32)
        for seq in range(self.max_num_seqs):
            order = generator.permutation(self.max_len).astype(np.int32)
            starts = generator.permutation(self.num_q_tokens) * self.max_len // self.num_q_tokens
            positions = starts[:, None] + np.arange(topk)
            selected = order[positions % self.max_len]
            if pages is not None:
                selected = pages[seq, selected // page_size] * page_size + selected % page_size
            lists[seq] = np.where(np.arange(topk) < self.max_len, selected, -1)
        if not self.prefill:
            return lists
        return np.repeat(lists.reshape(self.num_tokens, 1, topk), self.num_kv_heads, 1)

    def tables(self, seed: int = 0) -> Tables:
        """The index arrays: pages in random order with lengths, or lists of slots."""
        generator = np.random.default_rng(seed)
        if not self.topk:
            lens = np.full(self.max_num_seqs, self.max_len, np.int32)
            return {"page_indices": self._page_table(self.page_size, generator), "kv_lens": lens}
        found = {"indices": self._lists(self.topk, self.page_size, generator)}
        if self.extra_topk:
            found["extra_indices"] = self._lists(self.extra_topk, self.extra_page_size, generator)
        return found

    def changed(self, seed: int = 2) -> "Iterator[tuple[LatentCase, Tables]]":
        """Yield this case with other lists or lengths, then with the lists or lengths of `seed`."""
        if self.topk:
            yield self, self.tables(seed + 1)
        else:
            other = dataclasses.replace(self, max_len=self.max_len // 2 + 1)
            yield other, {"kv_lens": np.full(self.max_num_seqs, other.max_len, np.int32)}
        yield self, self.tables(seed)

    def values(self, name: str, array: FakeArray, generator: np.random.Generator) -> np.ndarray:
        if array.dtype == "uint8":
            num_pages, page_size = min(array.shape[0], -(-ROWS // array.shape[1])), array.shape[1]
            rows = generator.standard_normal((num_pages, page_size, 1, self.d_qk), np.float32) / 10
            cache_format = self.extra_format if name.startswith("extra_") else None
            return quantize_mla_cache(rows, cache_format or self.cache_format, cache_layout=self.cache_layout).ravel()
        values = super().values(name, array, generator)
        return values.clip(-1, 1) if name == "q" else values if name == "sinks" else values / 10

    # ---- results

    @property
    def bounds(self) -> str:
        return f"{'prefill' if self.prefill else 'decode'} out" if self.dtype != "float32" else self.dtype

    def compared(self, inputs: dict[str, Any], out: Any, to_numpy: Any) -> Compared:
        """The first, a middle and the last query token of the first, a middle and the last sequence."""
        seqs, tokens = ({0, count // 2, count - 1} for count in (self.max_num_seqs, self.num_q_tokens))
        for seq, token in itertools.product(sorted(seqs), sorted(tokens)):
            index = token if self.prefill else (seq, token)
            caches: dict[str, Any] = {}
            for prefix in ("", "extra_") if self.extra_topk else ("",):
                cache = inputs["kv" if self.prefill else f"{prefix}kv_cache"]
                slots = self._seen_slots(inputs, prefix, seq, token, to_numpy)
                caches[f"{prefix}kv_cache"], caches[f"{prefix}indices"] = _gathered(cache, slots, to_numpy)
            sinks = to_numpy(inputs["sinks"]) if self.sinks else None
            options = {"d_v": self.d_v, "sinks": sinks, "soft_cap": self.soft_cap, "cache_layout": self.cache_layout}
            want, _ = mla_decode(to_numpy(inputs["q"][index])[None, None], **options, **caches)
            yield f"sequence {seq}, query {token}", to_numpy(out[index]), want[0, 0]

    def _seen_slots(self, inputs: Any, prefix: str, seq: int, token: int, to_numpy: Any) -> np.ndarray:
        """The slots of the keys that a query token sees."""
        if self.topk:
            lists = inputs[f"{prefix}indices"]
            slots = to_numpy(lists[token, 0] if self.prefill else lists[seq, token]).astype(np.int64)
            return slots[slots >= 0]
        positions = np.array(self._seen(token))
        pages = to_numpy(inputs["page_indices"][seq]).astype(np.int64)
        return pages[positions // self.page_size] * self.page_size + positions % self.page_size


def _gathered(cache: Any, slots: np.ndarray, to_numpy: Any) -> tuple[np.ndarray, np.ndarray]:
    """A small cache of only the pages that contain `slots`, and the slots' places in the small cache."""
    page_size = cache.shape[1] if len(cache.shape) == 4 else 1
    pages, order = np.unique(slots // page_size, return_inverse=True)
    gathered = to_numpy(taken(cache, pages))
    if len(cache.shape) == 3:
        gathered = gathered[:, None]
    return gathered, (order * page_size + slots % page_size)[None, None].astype(np.int32)


# ---- the cases


def batch(
    name: str, workload: str, num_seqs: int, num_q_heads: int, *, num_q_tokens: int = 1, **fields: Any
) -> LatentCase:
    """A case of `num_seqs` sequences with `num_q_tokens` query tokens each."""
    num_tokens = num_seqs * num_q_tokens
    return LatentCase(
        name=name, workload=workload, max_num_seqs=num_seqs, num_tokens=num_tokens, num_q_heads=num_q_heads, **fields
    )


def _dense(name: str, num_seqs: int, kv_len: int, heads: int, **fields: Any) -> LatentCase:
    return batch(name, "W9", num_seqs, heads, max_len=kv_len, **fields)


def _sparse(name: str, workload: str, num_seqs: int, heads: int, **fields: Any) -> LatentCase:
    shape: dict[str, Any] = {"max_len": 32 * K, "topk": 2 * K, "cache_format": "fp8_v32"}
    return batch(name, workload, num_seqs, heads, **(shape | fields))


def _prefill(name: str, kv_len: int, **fields: Any) -> LatentCase:
    shape: dict[str, Any] = {"workload": "W12", "num_q_tokens": 4 * K, "num_q_heads": 128, "topk": 2 * K}
    return batch(name, num_seqs=1, max_len=kv_len, prefill=True, **(shape | fields))


V4: dict[str, Any] = {"cache_format": "fp8_v4", "d_qk": 512}
V41: dict[str, Any] = {"cache_format": "fp8_v41", "d_qk": 512}
V4_DECODE: dict[str, Any] = V4 | {
    "num_q_tokens": 2, "max_len": 16 * K, "topk": 128, "page_size": 256, "extra_topk": 512, "sinks": True,
}  # fmt: skip

V41_DECODE: dict[str, Any] = V4_DECODE | V41 | {"extra_format": "fp4_v41"}

_ALL = (
    _dense("mla_dense_h128_128x4k", 128, 4 * K, 128),
    _dense("mla_dense_h128_128q2s4k", 128, 4 * K, 128, num_q_tokens=2, causal=True),
    _dense("mla_dense_h64_128x4k", 128, 4 * K, 64),
    _dense("mla_dense_h16_128x4k", 128, 4 * K, 16),
    _dense("mla_dense_h16_1x32k", 1, 32 * K, 16),
    _dense("mla_dense_fp8_h128_128x4k", 128, 4 * K, 128, cache_format="fp8_v32"),
    _sparse("mla_sparse_h128_128q2", "W10", 128, 128, num_q_tokens=2),
    _sparse("mla_sparse_bf16_h128_32q2", "W10", 32, 128, num_q_tokens=2, cache_format="plain"),
    _sparse("mla_sparse_v4_h64_128q2", "W10", 128, 64, **V4_DECODE),
    _sparse("mla_sparse_v41_h64_128q2", "W10", 128, 64, **V41_DECODE),
    *(
        _sparse(f"mla_sparse_h{heads}_b{num_seqs}", "W11", num_seqs, heads)
        for heads in (8, 16, 32)
        for num_seqs in (1, 8, 64)
    ),
    _prefill("mla_prefill_h128_8k", 8 * K),
    _prefill("mla_prefill_h128_32k", 32 * K),
    _prefill("mla_prefill_h128_128k", 128 * K),
    _prefill("mla_prefill_h16_32k", 32 * K, num_q_heads=16),
    _prefill("mla_prefill_fp8_h128_32k", 32 * K, cache_format="fp8_v32"),
    _prefill("mla_prefill_v4_h64_32k", 32 * K, num_q_heads=64, topk=512, **V4, sinks=True),
)
CASES = {case.name: case for case in _ALL}

# No table reports these shapes. The compile matrix needs them, because they compile to different code.
_MORE = (
    _sparse("mla_sparse_v4_h16", "-", 8, 16, **V4, page_size=61),
    _sparse("mla_sparse_v4_h32", "-", 8, 32, **V4),
    _sparse("mla_sparse_v41_h16", "-", 8, 16, **V41),
    _sparse("mla_sparse_v41_pages_h64", "-", 8, 64, **V41, cache_layout="page"),
    _sparse("mla_sparse_fp4_h16", "-", 8, 16, **V41 | {"cache_format": "fp4_v41"}),
    _prefill("mla_prefill_v41_h64_64q", 32 * K, workload="-", num_q_tokens=64, num_q_heads=64, topk=640, **V41),
    _sparse("mla_float16_h32", "-", 8, 32, cache_format="plain", dtype="float16", sinks=True),
    _sparse("mla_float16_fp8_h16", "-", 8, 16, dtype="float16"),
    _sparse("mla_float32_h16", "-", 8, 16, cache_format="plain", dtype="float32", topk=200),
    _sparse("mla_float32_fp8_h16", "-", 8, 16, dtype="float32", topk=200),
    _sparse("mla_float32_v4_h16", "-", 8, 16, **V4, dtype="float32", topk=200),
    batch("mla_dense_page16_h64", "-", 8, 64, max_len=4 * K, page_size=16),
    batch(
        "mla_dense_window_h128",
        "-",
        8,
        128,
        num_q_tokens=2,
        max_len=4 * K,
        causal=True,
        sliding_window=1000,
        soft_cap=30.0,
    ),
    _dense("mla_narrow_24_heads", 8, 1 * K, 24, num_kv_heads=2, d_qk=144, d_v=80, page_size=24, dtype="float16"),
    _prefill("mla_prefill_h16_2k", 2 * K, workload="-", num_q_tokens=512, topk=200, num_q_heads=16, sinks=True),
    _prefill(
        "mla_prefill_float32_h16",
        2 * K,
        workload="-",
        num_q_tokens=512,
        num_q_heads=16,
        d_qk=192,
        d_v=128,
        dtype="float32",
    ),
    # With so few queries, the backend does not dequantise the whole cache first.
    _prefill("mla_prefill_fp8_h128_64q", 32 * K, workload="-", num_q_tokens=64, cache_format="fp8_v32"),
    _prefill("mla_prefill_v4_h64_64q", 32 * K, workload="-", num_q_tokens=64, num_q_heads=64, topk=512, **V4),
    _sparse("mla_one_of_everything", "-", 1, 1, cache_format="plain", max_len=1, topk=1, page_size=1),
)
COMPILED_ONLY = {case.name: case for case in _MORE}
