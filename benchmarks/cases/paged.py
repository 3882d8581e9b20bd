"""Named shapes of real models over a paged cache, W1 to W8. All measurements and some tests use them."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.cases.base import Case, Compared, K, Span, Tables, drawn, spans, taken
from benchmarks.cases.lists import list_entries, list_table, named_pairs, small_block
from benchmarks.cases.ranges import num_keys, num_pairs, range_table
from benchmarks.compiled.compiling import ITEMSIZE
from ragged_attention.calls import Call, Device
from ragged_attention.calls.cache_formats import UNSCALED_FORMATS
from ragged_attention.reference.ragged_paged_attention import ragged_paged_attention
from ragged_attention.tools.samples import TABLES, FakeArray, Sample

LARGEST_WGMMA_HEAD = 256  # 64 rows of a wider output do not fit the registers under Triton 3.6


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedCase(Case, Sample):
    """One batch over pages. Its sizes follow from the lengths."""

    name: str
    workload: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    spare_pages: int = 1  # unused pages
    head_scales: bool = False  # whether the scale is an array with one value for each KV head
    batch_invariant: bool = False
    num_tokens: int = dataclasses.field(init=False)
    max_num_seqs: int = dataclasses.field(init=False)
    max_len: int = dataclasses.field(init=False)
    max_q_len: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        sizes = {"num_tokens": sum(self.q_lens), "max_num_seqs": len(self.kv_lens)}
        sizes |= {"max_len": max(self.kv_lens, default=0), "max_q_len": max(self.q_lens, default=0)}
        for name, size in sizes.items():
            object.__setattr__(self, name, size)

    @property
    def operation(self) -> str:
        return "ragged_paged_attention"

    @property
    def key_format(self) -> str:
        return "8 bits" if ITEMSIZE[self.stored] == 1 else "plain"

    @property
    def row_bytes(self) -> int:
        """The bytes of one row of keys (or values), for one KV head and position."""
        if self.form is None:
            return self.head_dim * ITEMSIZE[self.stored]
        scales = self.form.scales_of_row(self.head_dim) * ITEMSIZE[self.form.scales]
        return self.head_dim // self.form.columns_per_element + scales

    @property
    def pages_needed(self) -> tuple[int, ...]:
        return tuple(-(-kv_len // self.page_size) for kv_len in self.kv_lens)

    @property
    def num_pages(self) -> int:
        return sum(self.pages_needed) + self.spare_pages

    @property
    def wgmma_rows(self) -> int:
        group = self.num_q_heads // self.num_kv_heads
        rows = max(self.q_lens) * group
        if self.selected:  # a job has one token, or up to 16
            rows = group * (1 if self.batch_invariant or self.key_ranges else min(max(self.q_lens), 16))
        # The addresses for a draft mask or a relative bias leave too few registers for a tile of 64 rows.
        lacks_registers = self.draft is not None or self.relative_bias
        if self.batch_invariant:  # batch-invariant programs have two accumulators
            lacks_registers |= bool(self.sliding_window or self.key_ranges or self.form or self.head_dim > 128)
        # The scale pages of heads with more than 128 columns also leave too few registers.
        widest = LARGEST_WGMMA_HEAD if self.form is None else 128
        return rows if self.head_dim <= widest and not lacks_registers else 0

    def needed_keys(self) -> int:
        """The number of cache positions that at least one query sees, over all sequences."""
        if self.key_ranges:
            return num_keys(self)
        if self.selected:
            return named_pairs(self, causal=True)[1]
        window = self.sliding_window or math.inf
        return sum(
            int(min(kv_len, q_len - 1 + window))
            for q_len, kv_len in zip(self.q_lens, self.kv_lens, strict=True)
            if q_len
        )

    def needed_bytes(self) -> int:
        """The bytes of queries, visible keys and values, tables and output, each counted once."""
        queries = 2 * math.prod(self.q_shape) * ITEMSIZE[self.dtype]
        row = 2 * self.num_kv_heads * self.row_bytes
        keys = self.needed_keys()
        tables = -(-keys // self.page_size) + 2 * len(self.kv_lens) + 1 + 2 * self.num_tokens * (self.key_ranges or 0)
        return queries + keys * row + 4 * (tables + list_entries(self))

    def flops(self) -> int:
        return 4 * self.visible_pairs() * self.num_q_heads * self.head_dim

    def visible_pairs(self) -> int:
        if self.key_ranges:
            return num_pairs(self)
        if self.selected:
            return named_pairs(self, causal=True)[0]
        window = self.sliding_window or max(self.kv_lens, default=1)
        total = 0
        for q_len, kv_len in zip(self.q_lens, self.kv_lens, strict=True):
            seen = np.arange(kv_len - q_len + 1, kv_len + 1, dtype=np.int64)
            total += int(np.minimum(seen, window).sum())
        return total

    def scaled_down(self, *, length: int = 77, sequences: int = 4) -> "PagedCase":
        """A small case of the same kind, with the same head size, GQA ratio, page size and options.

        The longest sequence gets about `length` positions, and the window shrinks in proportion. At most
        `sequences` sequences remain: first one sequence of each kind, then others. A kind is a number of queries, and
        whether the sequence is the longest.
        """
        factor = max(1.0, max(self.kv_lens) / length)
        kinds = [(q_len, kv_len == max(self.kv_lens)) for q_len, kv_len in zip(self.q_lens, self.kv_lens, strict=True)]
        order = sorted(range(len(kinds)), key=lambda seq: kinds[: seq + 1].count(kinds[seq]))
        kept_lens = [(self.q_lens[seq], self.kv_lens[seq]) for seq in order[:sequences]]
        kv_lens = [max(1, int(kv_len / factor) - index) for index, (_, kv_len) in enumerate(kept_lens)]
        q_lens = [
            min(kv_len, q_len if q_len <= 8 else max(9, int(q_len / factor)))
            for (q_len, _), kv_len in zip(kept_lens, kv_lens, strict=True)
        ]
        kv_heads = min(2, self.num_kv_heads)
        return dataclasses.replace(
            self,
            name=f"{self.name}_small",
            q_lens=tuple(q_lens),
            kv_lens=tuple(kv_lens),
            num_q_heads=self.num_q_heads // self.num_kv_heads * kv_heads,
            num_kv_heads=kv_heads,
            sliding_window=self.sliding_window and max(1, int(self.sliding_window / factor)),
            block_size=small_block(self),
        )

    def calls(self, device: Device) -> Iterator[Call]:
        """The calls of a serving step, including the operations over heads-first pages.

        `write_kv_pages` is called with tables, then with slots.
        """
        yield self.attention_call(device)
        yield self.call("write_kv_pages", device)
        slots = {"slot_mapping": FakeArray((self.num_tokens,), "int64")}
        yield self.call("write_kv_pages", device, **dict.fromkeys(TABLES), **slots)
        if self.form is not None:
            return
        for operation in ("norm_rope_write", "merge_attention_states", "paged_attention", "prefill_attention"):
            yield self.call(operation, device)

    def arguments(self, operation: str) -> dict[str, Any]:
        arguments = super().arguments(operation)
        if self.head_scales and arguments.get("k_scale") is not None:
            arguments |= dict.fromkeys(("k_scale", "v_scale"), FakeArray((self.num_kv_heads,), "float32"))
        return arguments

    def tables(self, seed: int = 0) -> Tables:
        """Pages in random order. The entries after the last used page of a row are garbage."""
        generator = np.random.default_rng(seed)
        order = generator.permutation(self.num_pages).astype(np.int32)
        page_indices = generator.integers(-(2**31), 2**31, (len(self.kv_lens), max(self.pages_needed)), np.int32)
        start = 0
        for seq, count in enumerate(self.pages_needed):
            page_indices[seq, :count] = order[start : start + count]
            start += count
        found = {
            "kv_lens": np.array(self.kv_lens, np.int32),
            "page_indices": page_indices,
            "cu_q_lens": np.concatenate([[0], np.cumsum(self.q_lens)]).astype(np.int32),
        }
        if self.draft is not None:  # a tree: each new token sees itself and about half of the new tokens before it
            found["draft_mask"] = np.concatenate([self._tree(q_len, generator) for q_len in self.q_lens])
        return found | range_table(self) | list_table(self)

    def _tree(self, q_len: int, generator: np.random.Generator) -> np.ndarray:
        rows, columns = np.arange(q_len)[:, None], np.arange(self.draft or 0)
        return (columns == rows) | ((columns < rows) & (generator.random((q_len, len(columns))) < 0.5))

    def changed(self) -> "Iterator[tuple[PagedCase, Tables]]":
        lengths = zip(self.q_lens, self.kv_lens, strict=True)
        kv_lens = tuple(max(q_len, kv_len * (1 + seq % 3) // 4) for seq, (q_len, kv_len) in enumerate(lengths))
        other = dataclasses.replace(self, kv_lens=kv_lens)
        for case in (other, self):
            yield case, {"kv_lens": np.array(case.kv_lens, np.int32)} | range_table(case) | list_table(case)

    def values(self, name: str, array: FakeArray, generator: np.random.Generator) -> np.ndarray:
        values = super().values(name, array, generator)
        if name == "alibi_slopes":
            return 0.5 ** (1 + np.arange(self.num_q_heads, dtype=np.float32) % 8)
        if name in ("k_scale", "v_scale"):
            return (self.scale or 1.0) * (1 + np.abs(values))
        return np.rint(values * 32).clip(-128, 127) if array.dtype == "int8" else values

    @property
    def bounds(self) -> str:
        return self.dtype

    def compared(self, inputs: dict[str, Any], out: Any, to_numpy: Any) -> Compared:
        page_indices = to_numpy(inputs["page_indices"])
        for span in self._compared_spans():
            pages = page_indices[span.seq, : -(-span.kv_len // self.page_size)].astype(np.int64)
            arrays = inputs["kv_pages"] if self.split_pages else (inputs["kv_pages"],)
            gathered = tuple(to_numpy(taken(array, pages)) for array in arrays)
            want = ragged_paged_attention(
                to_numpy(inputs["q"][span.rows]),
                gathered if self.split_pages else gathered[0],
                [span.kv_len],
                np.arange(len(pages), dtype=np.int32)[None],
                [0, span.stop - span.start],
                sinks=to_numpy(inputs["sinks"]) if self.sinks else None,
                alibi_slopes=to_numpy(inputs["alibi_slopes"]) if self.alibi_slopes else None,
                relative_bias=to_numpy(inputs["relative_bias"]) if self.relative_bias else None,
                sliding_window=self.sliding_window,
                soft_cap=self.soft_cap,
                draft_mask=to_numpy(inputs["draft_mask"][span.rows]).astype(bool) if self.draft else None,
                key_ranges=to_numpy(inputs["key_ranges"][span.rows]) if self.key_ranges else None,
                selected=to_numpy(inputs["selected"][span.rows]) if self.selected else None,
                block_size=self.block_size,
                **{name: self._scale_in(inputs, name, to_numpy) for name in ("k_scale", "v_scale")},
                **self.formats,
            )
            yield str(span), to_numpy(out[span.rows]), want

    @property
    def formats(self) -> dict[str, Any]:
        """The arguments `k_format` and `v_format` of the reference."""
        return dict.fromkeys(("k_format", "v_format"), self.form or UNSCALED_FORMATS[self.stored])

    def _compared_spans(self) -> Iterator[Span]:
        """The compared rows of some sequences.

        With a draft mask, a span is a whole sequence, because the mask's columns start at the first new token.
        """
        for span in spans(self.q_lens, self.kv_lens):
            if self.draft is None:
                yield span
            elif span.start == sum(self.q_lens[: span.seq]):
                stop = span.start + self.q_lens[span.seq]
                yield dataclasses.replace(span, stop=stop, kv_len=self.kv_lens[span.seq])

    def _scale_in(self, inputs: dict[str, Any], name: str, to_numpy: Any) -> Any:
        return to_numpy(inputs[name]) if self.head_scales else self.scale


def _decode(
    name: str, workload: str, count: int, kv_len: int, heads: tuple[int, int, int], **options: Any
) -> PagedCase:
    return _batch(name, workload, [(1, kv_len)] * count, heads, **options)


def _batch(
    name: str, workload: str, lengths: list[tuple[int, int]], heads: tuple[int, int, int], **options: Any
) -> PagedCase:
    q_lens, kv_lens = zip(*lengths, strict=True)
    return PagedCase(
        name=name, workload=workload, q_lens=q_lens, kv_lens=kv_lens,
        num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=heads[2], **options,
    )  # fmt: skip


LLAMA_8B, LLAMA_70B, LLAMA_70B_TP8 = (32, 8, 128), (64, 8, 128), (8, 1, 128)
GPT_OSS, GEMMA2, GEMMA3, GEMMA4 = (64, 8, 64), (16, 8, 256), (32, 16, 128), (32, 4, 512)
MINIMAX_M3, M3_BLOCKS = (64, 4, 128), {"selected": 16, "block_size": 128}
GEMMA2_OPTIONS: dict[str, Any] = {"soft_cap": 50.0, "sliding_window": 4096}
FP8: dict[str, Any] = {"cache_dtype": "float8_e4m3fn", "scale": 0.25}
FNUZ: dict[str, Any] = {"cache_dtype": "float8_e4m3fnuz", "scale": 0.25}  # the caches of AMD's MI300

_ALL = (
    _decode("decode_64x4k", "W1", 64, 4 * K, LLAMA_8B),
    _decode("decode_64x4k_page1", "W1", 64, 4 * K, LLAMA_8B, page_size=1),
    _decode("decode_64x4k_page64", "W1", 64, 4 * K, LLAMA_8B, page_size=64),
    _decode("decode_64x4k_page256", "W1", 64, 4 * K, LLAMA_8B, page_size=256),
    _decode("decode_64x4k_split_pages", "W1", 64, 4 * K, LLAMA_8B, split_pages=True),
    _decode("decode_32x1k", "W1", 32, 1 * K, LLAMA_8B),
    _decode("decode_1x32k", "W2", 1, 32 * K, LLAMA_8B),
    _decode("decode_1x128k", "W2", 1, 128 * K, LLAMA_8B),
    _decode("decode_8x32k", "W2", 8, 32 * K, LLAMA_8B),
    # Batches that mix one long sequence with short ones.
    _batch("decode_63x1k_1x128k", "W2", [(1, 1 * K)] * 63 + [(1, 128 * K)], LLAMA_8B),
    _batch("decode_255x1k_1x128k", "W2", [(1, 1 * K)] * 255 + [(1, 128 * K)], LLAMA_8B),
    _decode("decode_70b_64x4k", "W3", 64, 4 * K, LLAMA_70B),
    _decode("decode_70b_tp8_64x4k", "W3", 64, 4 * K, LLAMA_70B_TP8),
    _batch("prefill_2k", "W4", [(2 * K, 2 * K)], LLAMA_8B),
    _batch("prefill_4k", "W4", [(4 * K, 4 * K)], LLAMA_8B),
    _batch("prefill_8k", "W4", [(8 * K, 8 * K)], LLAMA_8B),
    _batch("mixed_2q2k_32q1s1k", "W5", [(2 * K, 2 * K)] * 2 + [(1, 1 * K)] * 32, LLAMA_8B),
    _batch("mixed_prefill_part", "W5", [(2 * K, 2 * K)] * 2, LLAMA_8B),
    _batch(
        "mixed_128_decodes_1_prefill",
        "W5",
        [(1, kv_len) for kv_len in drawn(2 * K, 8 * K, 128)] + [(n, n) for n in drawn(512, 6000, 1)],
        LLAMA_8B,
    ),
    _batch("chunk_1k_at_2k", "W5", [(1 * K, 2 * K)], LLAMA_8B),
    _batch("speculative_64q4s4k", "W5", [(4, 4 * K)] * 64, LLAMA_8B),
    _batch("speculative_tree_64q4s4k", "W5", [(4, 4 * K)] * 64, LLAMA_8B, draft=4),
    _decode("gpt_oss_window_64x4k", "W6", 64, 4 * K, GPT_OSS, sinks=True, sliding_window=128),
    _decode("gpt_oss_full_64x4k", "W6", 64, 4 * K, GPT_OSS, sinks=True),
    _batch("gpt_oss_prefill_4k", "W6", [(4 * K, 4 * K)], GPT_OSS, sinks=True, sliding_window=128),
    _decode("gemma2_32x4k", "W7", 32, 4 * K, GEMMA2, **GEMMA2_OPTIONS),
    _batch("gemma2_prefill_4k", "W7", [(4 * K, 4 * K)], GEMMA2, **GEMMA2_OPTIONS),
    _decode("gemma3_32x4k", "W7", 32, 4 * K, GEMMA3, sliding_window=1024),
    _decode("gemma4_global_32x4k", "W7", 32, 4 * K, GEMMA4),
    _batch("gemma4_global_prefill_4k", "W7", [(4 * K, 4 * K)], GEMMA4),
    _decode("fp8_64x4k", "W8", 64, 4 * K, LLAMA_8B, **FP8),
    _decode("fp8_64x4k_page64", "W8", 64, 4 * K, LLAMA_8B, page_size=64, **FP8),
    _decode("fp8_64x4k_head_scales", "W8", 64, 4 * K, LLAMA_8B, head_scales=True, **FP8),
    _batch("fp8_prefill_4k", "W8", [(4 * K, 4 * K)], LLAMA_8B, **FP8),
    _batch("fp8_prefill_4k_head_scales", "W8", [(4 * K, 4 * K)], LLAMA_8B, head_scales=True, **FP8),
)  # fmt: skip
CASES = {case.name: case for case in _ALL}

# No table reports these shapes. The compile matrix needs them, because they compile to different code.
_MORE = (
    _batch("float32_mixed", "-", [(256, 512)] + [(1, 1 * K)] * 8, (8, 4, 64), dtype="float32", return_lse=True),
    _batch("phi_head_80_mixed", "-", [(512, 512)] + [(1, 1 * K)] * 8, (32, 32, 80), dtype="float16"),
    _batch("int8_mixed", "-", [(512, 512)] + [(1, 1 * K)] * 8, LLAMA_8B, cache_dtype="int8", scale=0.03),
    _decode("fnuz_64x4k", "-", 64, 4 * K, LLAMA_8B, **FNUZ),
    _batch("fnuz_prefill_4k", "-", [(4 * K, 4 * K)], LLAMA_8B, **FNUZ),
    _batch("ratio_7_page_24", "-", [(512, 512)] + [(1, 1 * K)] * 8, (28, 4, 128), page_size=24, return_lse=True),
    # Unusual window sizes.
    _batch("window_2047_head_80", "-", [(512, 4 * K)] + [(1, 4 * K)] * 8, (32, 32, 80), sliding_window=2047),
    _batch("window_2047_head_96", "-", [(512, 4 * K)] + [(1, 4 * K)] * 8, (32, 32, 96), sliding_window=2047),
    _batch("window_2047_head_128", "-", [(512, 4 * K)] + [(1, 4 * K)] * 8, LLAMA_8B, sliding_window=2047),
    _batch("alibi_mixed", "-", [(512, 4 * K)] + [(1, 4 * K)] * 8, LLAMA_8B, alibi_slopes=True),
    _batch("alibi_fp8", "-", [(512, 4 * K)] + [(1, 4 * K)] * 8, LLAMA_8B, alibi_slopes=True, **FP8),
    _batch(
        "alibi_float16_cap_head_256",
        "-",
        [(512, 4 * K)] + [(1, 4 * K)] * 8,
        GEMMA2,
        dtype="float16",
        alibi_slopes=True,
        **GEMMA2_OPTIONS,
    ),
    _batch("bias_mixed", "-", [(512, 4 * K)] + [(1, 4 * K)] * 8, LLAMA_8B, relative_bias=True),
    _batch(
        "bias_float16_cap_head_256",
        "-",
        [(512, 4 * K)] + [(1, 4 * K)] * 8,
        GEMMA2,
        dtype="float16",
        relative_bias=True,
        **GEMMA2_OPTIONS,
    ),
    _batch("draft_tree_64", "-", [(64, 4 * K)] + [(8, 4 * K)] * 8, LLAMA_8B, draft=64),
    _batch("invariant_mixed", "-", [(512, 4 * K)] + [(1, 4 * K)] * 8, LLAMA_8B, batch_invariant=True),
    _batch("invariant_fp8", "-", [(512, 4 * K)] + [(1, 4 * K)] * 8, LLAMA_8B, batch_invariant=True, **FP8),
    _batch("invariant_sinks", "-", [(512, 4 * K)] + [(1, 4 * K)] * 8, GPT_OSS, batch_invariant=True, sinks=True),
    *(
        _batch(f"invariant_{name}", "-", [(512, 4 * K)] + [(1, 4 * K)] * 8, heads, batch_invariant=True, **options)
        for name, heads, options in (
            ("head_256", GEMMA2, {"soft_cap": 50.0}),
            ("head_512", GEMMA4, {}),
            ("head_80_float16", (32, 32, 80), {"dtype": "float16", "page_size": 64}),
            ("window", GEMMA3, {"sliding_window": 2047}),
            ("bias", LLAMA_8B, {"relative_bias": True}),
            ("ranges", LLAMA_8B, {"key_ranges": 2}),
            ("nvfp4", LLAMA_8B, {"kv_format": "nvfp4"}),
        )
    ),
    _batch("invariant_float32", "-", [(64, 4 * K)], (8, 4, 80), batch_invariant=True, dtype="float32"),
    _batch("invariant_draft", "-", [(8, 4 * K)] * 8, LLAMA_8B, batch_invariant=True, draft=8),
    # Real models need one or two key ranges. With eight ranges the kernels are right, but spill registers.
    _batch("one_range_4k", "-", [(4 * K, 4 * K)] + [(1, 4 * K)] * 8, LLAMA_8B, key_ranges=1),
    _batch("two_ranges_4k", "-", [(4 * K, 4 * K)] + [(1, 4 * K)] * 8, LLAMA_8B, key_ranges=2),
    _batch("two_ranges_sinks", "-", [(4 * K, 4 * K)] + [(1, 4 * K)] * 8, GPT_OSS, key_ranges=2, sinks=True),
    _batch("two_ranges_fp8", "-", [(512, 4 * K)] + [(1, 4 * K)] * 8, LLAMA_8B, key_ranges=2, **FP8),
    # Block lists as models select them: 16 blocks of 128 keys in MiniMax M3, many small blocks, single keys, lists of
    # whole prompts.
    _batch("blocks_128_prompt", "-", [(4 * K, 4 * K)] + [(1, 4 * K)] * 8, MINIMAX_M3, page_size=128, **M3_BLOCKS),
    _decode("blocks_128_decode", "-", 32, 32 * K, MINIMAX_M3, page_size=128, **M3_BLOCKS),
    _batch("blocks_64_fp8", "-", [(512, 4 * K)] * 2, LLAMA_8B, page_size=64, selected=32, block_size=64, **FP8),
    _batch("blocks_16_bias", "-", [(512, 4 * K)] * 2, (32, 4, 128), selected=64, block_size=16, relative_bias=True),
    _batch("blocks_8_cap_head_256", "-", [(512, 4 * K)] * 2, GEMMA2, selected=64, block_size=8, **GEMMA2_OPTIONS),
    _batch("blocks_1_float32", "-", [(64, 4 * K)] * 2, LLAMA_8B, dtype="float32", selected=256, block_size=1),
    _decode("blocks_1_decode", "-", 16, 16 * K, LLAMA_8B, selected=2 * K, block_size=1),
    _batch(
        "blocks_sinks_ranges", "-", [(512, 4 * K)] * 2, GPT_OSS, selected=16, block_size=128, key_ranges=1, sinks=True
    ),
    _decode("blocks_fp8_decode", "-", 32, 16 * K, LLAMA_8B, page_size=64, selected=16, block_size=128, **FP8),
    _batch("blocks_invariant", "-", [(512, 4 * K)] + [(1, 4 * K)] * 8, MINIMAX_M3, batch_invariant=True, **M3_BLOCKS),
    # Formats with scale pages.
    *(
        _batch(f"{name}_mixed", "-", [(512, 4 * K)] + [(1, 4 * K)] * 8, LLAMA_8B, kv_format=name)
        for name in ("int8_token_head", "e4m3_token_head", "int4_token_head", "nvfp4", "mxfp8", "mxfp4")
    ),
    _batch("mxfp8_float16", "-", [(512, 4 * K)] + [(1, 4 * K)] * 8, LLAMA_8B, kv_format="mxfp8", dtype="float16"),
    _batch("nvfp4_float16_head_64", "-", [(512, 4 * K)] * 2, GPT_OSS, kv_format="nvfp4", dtype="float16", sinks=True),
    _batch("int8_token_head_cap_256", "-", [(512, 4 * K)] * 2, GEMMA2, kv_format="int8_token_head", **GEMMA2_OPTIONS),
    _batch("int4_token_head_256", "-", [(512, 4 * K)] * 2, GEMMA2, kv_format="int4_token_head"),
    _batch("nvfp4_head_512", "-", [(512, 4 * K)] * 2, GEMMA4, kv_format="nvfp4"),
    _batch("nvfp4_float32", "-", [(64, 4 * K)] * 2, LLAMA_8B, kv_format="nvfp4", dtype="float32"),
    _batch("int8_token_head_float32", "-", [(64, 4 * K)] * 2, LLAMA_8B, kv_format="int8_token_head", dtype="float32"),
    _batch("mxfp4_draft_tree_64", "-", [(64, 4 * K)] + [(8, 4 * K)] * 8, LLAMA_8B, draft=64, kv_format="mxfp4"),
    _batch(
        "mxfp4_draft_tree_group_16", "-", [(64, 4 * K)] + [(4, 4 * K)] * 8, (32, 2, 128), draft=64, kv_format="mxfp4"
    ),
    _batch("draft_tree_group_16", "-", [(64, 4 * K)] + [(4, 4 * K)] * 8, (32, 2, 128), draft=64),
    _batch(
        "int8_token_head_bias",
        "-",
        [(512, 4 * K)] + [(1, 4 * K)] * 8,
        LLAMA_8B,
        relative_bias=True,
        kv_format="int8_token_head",
    ),
    _batch("nvfp4_two_ranges", "-", [(512, 4 * K)] * 2, LLAMA_8B, kv_format="nvfp4", key_ranges=2),
    _decode("blocks_int4_decode", "-", 32, 16 * K, LLAMA_8B, kv_format="int4_token_head", selected=16, block_size=128),
    _batch("blocks_nvfp4", "-", [(512, 4 * K)] * 2, LLAMA_8B, kv_format="nvfp4", selected=32, block_size=64),
    # Sizes of 1, which Triton specialises to constants.
    _batch("one_of_everything", "-", [(1, 16)], (1, 1, 128), spare_pages=0),
    _batch("one_page_slot", "-", [(1, 1)], (1, 1, 16), page_size=1, spare_pages=0, return_lse=True),
)
COMPILED_ONLY = {case.name: case for case in _MORE}
