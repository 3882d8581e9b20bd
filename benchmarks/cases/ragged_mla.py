"""Named shapes of ragged attention over latents: decodes, prompts, chunks and batches that mix them."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.cases.base import Case, Compared, K, Tables, drawn, spans, taken
from benchmarks.cases.ranges import num_keys, num_pairs, range_table
from benchmarks.compiled.compiling import ITEMSIZE
from ragged_attention.calls import CACHE_FORMATS, Call, Device
from ragged_attention.reference.quantize_mla_cache import quantize_mla_cache
from ragged_attention.reference.ragged_mla_attention import ragged_mla_attention
from ragged_attention.tools.samples import FakeArray, LatentSample

ROWS = 2039  # number of random latent rows; a larger cache repeats the pages that they fill
SCALE = 0.05  # the scale of a plain 8-bit cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedLatentCase(Case, LatentSample):
    """One batch over a latent cache. Its sizes follow from the lengths."""

    name: str
    workload: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    cache_format: str = "plain"
    causal: bool = True
    topk: int = 0
    num_tokens: int = dataclasses.field(init=False)
    max_num_seqs: int = dataclasses.field(init=False)
    max_len: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        sizes = {"num_tokens": sum(self.q_lens), "max_num_seqs": len(self.kv_lens), "max_len": max(self.kv_lens)}
        for name, size in sizes.items():
            object.__setattr__(self, name, size)

    @property
    def operation(self) -> str:
        return "ragged_mla_attention"

    @property
    def key_format(self) -> str:
        return "8 bits" if self.stored else self.cache_format

    @property
    def row_bytes(self) -> int:
        layout = CACHE_FORMATS.get(self.cache_format)
        return layout.token_bytes if layout else self.width * ITEMSIZE[self.stored or self.dtype]

    @property
    def pages_needed(self) -> tuple[int, ...]:
        return tuple(-(-kv_len // self.page_size) for kv_len in self.kv_lens)

    def num_pages(self, page_size: int) -> int:
        """The number of pages, one of which is unused."""
        return sum(-(-kv_len // page_size) for kv_len in self.kv_lens) + 1

    @property
    def wgmma_rows(self) -> int:
        """The rows of a product, or 0 if wgmma is not expected.

        Some Triton versions have a wgmma tile only for a plain cache. Key ranges leave too few registers for the tile.
        An exception is a single range that all heads of a tile share.
        """
        rows = max(self.q_lens) * self.num_q_heads
        shared = not self.key_ranges or (self.key_ranges == 1 and self.num_q_heads % 64 == 0)
        return rows if self.cache_format == "plain" and not self.stored and self.d_v <= 512 and shared else 0

    def arguments(self, operation: str) -> dict[str, Any]:
        arguments = super().arguments(operation)
        if operation == self.operation:
            arguments["max_q_len"] = max(self.q_lens)
        if self.stored and operation in (self.operation, "write_mla_cache"):
            arguments["kv_scale"] = SCALE
        return arguments

    def needed_bytes(self) -> int:
        """The bytes of queries, visible latent rows, tables and output, each counted once."""
        queries = self.num_tokens * self.num_q_heads * (self.width + self.d_v) * ITEMSIZE[self.dtype]
        keys = self.needed_keys()
        tables = -(-keys // self.page_size) + 2 * len(self.kv_lens) + 1 + 2 * self.num_tokens * (self.key_ranges or 0)
        return queries + keys * self.row_bytes + 4 * tables

    def needed_keys(self) -> int:
        """The number of latent rows that at least one query sees, over all sequences."""
        if self.key_ranges:
            return num_keys(self)
        window = self.sliding_window or math.inf
        lengths = zip(self.q_lens, self.kv_lens, strict=True)
        return sum(int(min(kv_len, q_len - 1 + window)) for q_len, kv_len in lengths if q_len)

    def visible_pairs(self) -> int:
        if self.key_ranges:
            return num_pairs(self)
        window = self.sliding_window or self.max_len
        total = 0
        for q_len, kv_len in zip(self.q_lens, self.kv_lens, strict=True):
            seen = np.arange(kv_len - q_len + 1, kv_len + 1, dtype=np.int64)
            total += int(np.minimum(seen, window).sum())
        return total

    def flops(self) -> int:
        return 2 * self.visible_pairs() * self.num_q_heads * (self.width + self.d_v)

    def scaled_down(self, *, length: int = 77, sequences: int = 3) -> "RaggedLatentCase":
        """A small case with the first sequences and the last one.

        Widths, cache format, page size and options do not change.
        """
        factor = max(1.0, self.max_len / length)
        lengths = list(zip(self.q_lens, self.kv_lens, strict=True))
        kept_lens = lengths[: sequences - 1] + lengths[sequences - 1 :][-1:]
        kv_lens = [max(1, int(kv_len / factor)) for _, kv_len in kept_lens]
        q_lens = [
            min(kv_len, q_len if q_len <= 2 else max(9, int(q_len / factor)))
            for (q_len, _), kv_len in zip(kept_lens, kv_lens, strict=True)
        ]
        return dataclasses.replace(
            self,
            name=f"{self.name}_small",
            q_lens=tuple(q_lens),
            kv_lens=tuple(kv_lens),
            num_q_heads=min(self.num_q_heads, 16),
            sliding_window=self.sliding_window and max(1, int(self.sliding_window / factor)),
        )

    def calls(self, device: Device) -> Iterator[Call]:
        """The calls of a serving step. New rows are written through the tables that the attention uses."""
        yield self.attention_call(device)
        tables = self.arguments(self.operation)
        names = ("kv_lens", "page_indices", "cu_q_lens")
        yield self.call("write_mla_cache", device, slot_mapping=None, **{name: tables[name] for name in names})

    # ---- inputs

    def tables(self, seed: int = 0) -> Tables:
        """Pages in random order. The entries after the last used page of a row are garbage."""
        generator = np.random.default_rng(seed)
        order = generator.permutation(self.num_pages(self.page_size)).astype(np.int32)
        page_indices = generator.integers(-(2**31), 2**31, (len(self.kv_lens), max(self.pages_needed)), np.int32)
        start = 0
        for seq, count in enumerate(self.pages_needed):
            page_indices[seq, :count] = order[start : start + count]
            start += count
        return {
            "kv_lens": np.array(self.kv_lens, np.int32),
            "page_indices": page_indices,
            "cu_q_lens": np.concatenate([[0], np.cumsum(self.q_lens)]).astype(np.int32),
        } | range_table(self)

    def changed(self) -> "Iterator[tuple[RaggedLatentCase, Tables]]":
        lengths = zip(self.q_lens, self.kv_lens, strict=True)
        kv_lens = tuple(max(q_len, kv_len * (1 + seq % 3) // 4) for seq, (q_len, kv_len) in enumerate(lengths))
        other = dataclasses.replace(self, kv_lens=kv_lens)
        return ((case, {"kv_lens": np.array(case.kv_lens, np.int32)} | range_table(case)) for case in (other, self))

    def values(self, name: str, array: FakeArray, generator: np.random.Generator) -> np.ndarray:
        if array.dtype == "uint8":
            num_pages, page_size = min(array.shape[0], -(-ROWS // array.shape[1])), array.shape[1]
            rows = generator.standard_normal((num_pages, page_size, 1, self.width), np.float32) / 10
            return quantize_mla_cache(rows, self.cache_format).ravel()
        values = super().values(name, array, generator)
        if name == "kv_cache" and self.stored:
            return np.rint(values * 32).clip(-128, 127) if array.dtype == "int8" else values * 2
        return values.clip(-1, 1) if name == "q" else values if name == "sinks" else values / 10

    # ---- results

    @property
    def bounds(self) -> str:
        return "decode out" if self.dtype != "float32" else self.dtype

    def compared(self, inputs: dict[str, Any], out: Any, to_numpy: Any) -> Compared:
        page_indices = to_numpy(inputs["page_indices"])
        for span in spans(self.q_lens, self.kv_lens):
            pages = page_indices[span.seq, : -(-span.kv_len // self.page_size)].astype(np.int64)
            want = ragged_mla_attention(
                to_numpy(inputs["q"][span.rows]),
                to_numpy(taken(inputs["kv_cache"], pages)),
                [span.kv_len],
                np.arange(len(pages), dtype=np.int32)[None],
                [0, span.stop - span.start],
                d_v=self.d_v,
                sinks=to_numpy(inputs["sinks"]) if self.sinks else None,
                sliding_window=self.sliding_window,
                soft_cap=self.soft_cap,
                key_ranges=to_numpy(inputs["key_ranges"][span.rows]) if self.key_ranges else None,
                kv_scale=np.float32(SCALE) if self.stored else None,
                rope_scale=self.rope_scale,
                code_dtype=self.stored,
            )
            yield str(span), to_numpy(out[span.rows]), want


# ---- the cases


def batch(
    name: str, lengths: list[tuple[int, int]], heads: int, *, workload: str = "W9", **fields: Any
) -> RaggedLatentCase:
    """A case with these (query tokens, keys) per sequence."""
    q_lens, kv_lens = zip(*lengths, strict=True)
    return RaggedLatentCase(name=name, workload=workload, q_lens=q_lens, kv_lens=kv_lens, num_q_heads=heads, **fields)


MIXED = [(1, length) for length in drawn(200, 8 * K, 63)] + [(2 * K, 6 * K)]
_ALL = (
    batch("mla_ragged_64x4k", [(1, 4 * K)] * 64, 128),
    batch("mla_ragged_h16_64x4k", [(1, 4 * K)] * 64, 16),
    batch("mla_ragged_4k", [(4 * K, 4 * K)], 128),
    batch("mla_ragged_mixed", MIXED, 128),
)
CASES = {case.name: case for case in _ALL}

FEW = [(1, 900), (300, 300), (3, 70)]
# No table reports these shapes. The compile matrix needs them, because they compile to different code.
_MORE = (
    batch("mla_ragged_window_cap", FEW, 128, sliding_window=100, soft_cap=30.0, sinks=True),
    batch("mla_ragged_page_24_h12", FEW, 12, page_size=24, sliding_window=100),
    batch("mla_ragged_e4m3", MIXED, 128, stored="float8_e4m3fn"),
    batch("mla_ragged_fnuz", MIXED, 128, stored="float8_e4m3fnuz"),
    batch("mla_ragged_two_scales", MIXED, 128, stored="float8_e4m3fn", rope_scale=0.5),
    batch("mla_ragged_two_scales_h16", FEW, 16, stored="int8", dtype="float16", rope_scale=0.05),
    batch("mla_ragged_int8_h16", FEW, 16, stored="int8", dtype="float16"),
    batch("mla_ragged_fp8", MIXED, 128, cache_format="fp8_v32"),
    batch("mla_ragged_fp8_window_cap", FEW, 128, cache_format="fp8_v32", sliding_window=100, soft_cap=30.0),
    batch("mla_ragged_v4_h64", FEW, 64, cache_format="fp8_v4"),
    batch("mla_ragged_v41_h16", FEW, 16, cache_format="fp8_v41"),
    batch("mla_ragged_float32_h16", FEW, 16, dtype="float32"),
    batch("mla_ragged_one_range_64x4k", [(1, 4 * K)] * 64, 128, key_ranges=1),
    batch("mla_ragged_two_ranges", MIXED, 128, key_ranges=2),
    batch("mla_ragged_two_ranges_h16", FEW, 16, key_ranges=2),
    batch("mla_ragged_two_ranges_fp8", FEW, 128, cache_format="fp8_v32", key_ranges=2),
)
COMPILED_ONLY = {case.name: case for case in _MORE}
