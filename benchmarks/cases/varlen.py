"""Named shapes of attention without a cache, W13.

A case is a forward pass or its gradient. As explained in `base`, a floor counts each needed byte once and the
operations of visible pairs: two products in the forward pass, and five in the gradient, which has to compute the logits
again.
"""

import dataclasses
import functools
import importlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.cases.base import ROWS, Case, Compared, K, Tables, drawn, rounded, spans
from benchmarks.cases.lists import list_entries, list_table, named_pairs, small_block
from benchmarks.cases.ranges import num_pairs, range_table
from benchmarks.compiled.compiling import ITEMSIZE
from ragged_attention.reference.ragged_paged_attention import (
    bias_of,
    column_at_own,
    of_head,
    seen_by_heads,
    table_of,
    visible,
)
from ragged_attention.reference.varlen_attention import varlen_attention
from ragged_attention.reference.varlen_attention_backward import attend_backward, row_terms
from ragged_attention.tools.samples import FakeArray, VarlenSample

# inputs of a gradient that the forward pass neither takes nor returns
GRADIENT_INPUTS = ("d_out", "d_lse", "return_d_relative_bias")


@dataclasses.dataclass(frozen=True, kw_only=True)
class VarlenCase(Case, VarlenSample):
    """One batch of packed sequences. Its sizes follow from the lengths."""

    name: str
    workload: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    d_v: int = 128
    backward: bool = False
    batch_invariant: bool = False
    num_tokens: int = dataclasses.field(init=False)
    max_num_seqs: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_tokens", sum(self.q_lens))
        object.__setattr__(self, "max_num_seqs", len(self.q_lens))

    @property
    def operation(self) -> str:
        return "varlen_attention_backward" if self.backward else "varlen_attention"

    @property
    def num_kv_tokens(self) -> int:
        return sum(self.kv_lens)

    @property
    def q_shape(self) -> tuple[int, int, int]:
        return (self.num_tokens, self.num_q_heads, self.head_dim)

    @property
    def wgmma_rows(self) -> int:
        """The rows of a product, or 0 if registers do not suffice, as with biases or very wide heads."""
        if self.relative_bias or self.head_dim + self.d_v > 512:
            return 0
        # batch-invariant programs have two accumulators
        if self.batch_invariant and (self.sliding_window or self.head_dim > 128):
            return 0
        tokens = max(self.q_lens)
        if self.selected:  # a job has one token, or up to 16
            tokens = 1 if self.key_ranges or self.batch_invariant else min(tokens, 16)
        return tokens * self.num_q_heads // self.num_kv_heads

    def needed_bytes(self) -> int:
        """The bytes of all inputs and outputs, each counted once."""
        rows = math.prod(self.q_shape) + math.prod(self.out_shape)
        keys = self.num_kv_tokens * self.num_kv_heads * (self.head_dim + self.d_v)
        lse = 4 * self.num_tokens * self.num_q_heads
        if self.backward:  # q, d_out, out and dq; k, v and their gradients
            rows, keys = 2 * rows, 2 * keys
        tables = 8 * self.num_tokens * (self.key_ranges or 0) + 4 * list_entries(self)
        return (rows + keys) * ITEMSIZE[self.dtype] + lse + tables

    def visible_pairs(self) -> int:
        if self.key_ranges:
            return num_pairs(self)
        if self.selected:
            return named_pairs(self, causal=self.causal)[0]
        total = 0
        for q_len, kv_len in zip(self.q_lens, self.kv_lens, strict=True):
            position = np.arange(kv_len - q_len, kv_len, dtype=np.int64)
            last = np.minimum(position + 1, kv_len) if self.causal else np.full(q_len, kv_len)
            first = np.maximum(position + 1 - (self.sliding_window or kv_len + q_len), 0)
            total += int(np.maximum(last - first, 0).sum())
        return total

    def flops(self) -> int:
        """The operations of the products.

        A forward pass has one product of width `head_dim` and one of width `d_v`. A gradient has three products of
        width `head_dim` and two of width `d_v`.
        """
        columns = 3 * self.head_dim + 2 * self.d_v if self.backward else self.head_dim + self.d_v
        return 2 * self.visible_pairs() * self.num_q_heads * columns

    def scaled_down(self, *, length: int = 77, sequences: int = 3) -> "VarlenCase":
        """A small case of the same kind, with the same widths and GQA ratio."""
        factor = max(1.0, max(self.kv_lens) / length)

        def shorter(lens: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(max(1, int(n / factor) - index) for index, n in enumerate(lens[:sequences]))

        kv_heads = min(2, self.num_kv_heads)
        return dataclasses.replace(
            self,
            name=f"{self.name}_small",
            q_lens=shorter(self.q_lens),
            kv_lens=shorter(self.kv_lens),
            num_q_heads=self.num_q_heads // self.num_kv_heads * kv_heads,
            num_kv_heads=kv_heads,
            sliding_window=self.sliding_window and max(1, int(self.sliding_window / factor)),
            block_size=small_block(self),
        )

    # ---- inputs

    def arguments(self, operation: str) -> dict[str, Any]:
        return super().arguments(operation) | {"max_q_len": max(self.q_lens), "max_kv_len": max(self.kv_lens)}

    def tables(self, seed: int = 0) -> Tables:
        """The index arrays. They follow from the lengths, so `seed` is not used."""
        del seed
        lens = {"cu_q_lens": self.q_lens, "cu_kv_lens": self.kv_lens}
        tables = {name: np.concatenate([[0], np.cumsum(value)]).astype(np.int32) for name, value in lens.items()}
        return tables | range_table(self) | list_table(self)

    def changed(self) -> "Iterator[tuple[VarlenCase, Tables]]":
        """Yield this case with the lengths shifted by one sequence, then the case itself."""
        other = dataclasses.replace(self, q_lens=(*self.q_lens[1:], 0), kv_lens=(*self.kv_lens[1:], 0))
        tables = other.tables()
        for name in tables.keys() & {"key_ranges", "selected"}:  # rows of padding repeat other rows and are not read
            tables[name] = np.resize(tables[name], (self.num_tokens, *tables[name].shape[1:]))
        yield other, tables
        yield self, self.tables()

    def values(self, name: str, array: FakeArray, generator: np.random.Generator) -> np.ndarray:
        """Random values.

        The values of v, d_out and d_lse are small, because few keys per query magnify the rounding of weights.
        """
        if name == "alibi_slopes":
            return 0.5 ** (1 + np.arange(self.num_q_heads, dtype=np.float32) % 8)
        return super().values(name, array, generator) * {"v": 1 / 4, "d_out": 1 / 16, "d_lse": 1 / 16}.get(name, 1)

    def with_forward(self, inputs: dict[str, Any], framework: str) -> dict[str, Any]:
        """The inputs. A gradient's `out` and `lse` come from a forward pass on the device's default backend."""
        if not self.backward:
            return inputs
        arguments = {name: value for name, value in inputs.items() if name not in GRADIENT_INPUTS}
        if framework == "numpy":
            out, lse = varlen_attention(**arguments)
            return inputs | {"out": rounded(out, self.dtype), "lse": lse}
        out, lse = importlib.import_module(f"ragged_attention.{framework}").varlen_attention(
            **arguments, return_lse=True
        )
        return inputs | {"out": out, "lse": lse}

    # ---- results

    @property
    def bounds(self) -> str:
        return self.dtype if self.dtype == "float32" else "gradient" if self.backward else "varlen out"

    def compared(self, inputs: dict[str, Any], out: Any, to_numpy: Any) -> Compared:
        return (self._compared_gradients if self.backward else self._compared_rows)(inputs, out, to_numpy)

    def _sequence(self, seq: int) -> tuple[slice, slice]:
        """The slices of a sequence's query tokens and keys."""
        rows, keys = (slice(sum(lens[:seq]), sum(lens[: seq + 1])) for lens in (self.q_lens, self.kv_lens))
        return rows, keys

    def _compared_rows(self, inputs: dict[str, Any], out: Any, to_numpy: Any) -> Compared:
        for span in spans(self.q_lens, self.kv_lens):
            all_rows, keys = self._sequence(span.seq)
            rows = span.rows
            if self.causal:
                keys = slice(keys.start, keys.start + max(span.kv_len, 0))
            elif (
                self.sliding_window or self.alibi_slopes or self.relative_bias
            ):  # positions depend on the number of queries
                rows = all_rows
            want, _ = varlen_attention(
                to_numpy(inputs["q"][rows]),
                *(to_numpy(inputs[name][keys]) for name in ("k", "v")),
                cu_q_lens=[0, rows.stop - rows.start],
                cu_kv_lens=[0, keys.stop - keys.start],
                sinks=to_numpy(inputs["sinks"]) if self.sinks else None,
                alibi_slopes=to_numpy(inputs["alibi_slopes"]) if self.alibi_slopes else None,
                relative_bias=self._tables(inputs, rows, to_numpy),
                key_ranges=self._rows_of("key_ranges", inputs, rows, to_numpy),
                selected=self._rows_of("selected", inputs, rows, to_numpy),
                block_size=self.block_size,
                causal=self.causal,
                sliding_window=self.sliding_window,
                soft_cap=self.soft_cap,
            )
            yield str(dataclasses.replace(span, start=rows.start, stop=rows.stop)), to_numpy(out[rows]), want

    def _compared_gradients(self, inputs: dict[str, Any], out: Any, to_numpy: Any) -> Compared:
        """Yield (name, result, reference) for parts of dq, dk and dv: three sequences, the first and last KV head."""
        for seq in sorted({0, len(self.q_lens) - 1, int(np.argmax(self.q_lens))}):
            for kv_head in sorted({0, self.num_kv_heads - 1}):
                for name, got, want in self._some_gradients(inputs, out, seq, kv_head, to_numpy):
                    yield f"{name} of sequence {seq}, KV head {kv_head}", got, want

    def _tables(self, inputs: dict[str, Any], rows: slice, to_numpy: Any) -> np.ndarray | None:
        """The relative bias for some queries, or None."""
        if not self.relative_bias:
            return None
        return to_numpy(inputs["relative_bias"][rows] if self.own_tables else inputs["relative_bias"])

    def _rows_of(self, name: str, inputs: dict[str, Any], rows: slice, to_numpy: Any) -> np.ndarray | None:
        """The key ranges or the block lists of some queries, or None."""
        return to_numpy(inputs[name][rows]) if getattr(self, name) else None

    def _some_gradients(self, inputs: dict[str, Any], out: Any, seq: int, kv_head: int, to_numpy: Any) -> Compared:
        """Yield (name, result, reference) for one KV head and its query heads, for a sequence's first and last rows."""
        rows, keys = self._sequence(seq)
        q_len, kv_len = self.q_lens[seq], self.kv_lens[seq]
        group = self.num_q_heads // self.num_kv_heads
        ranges = self._rows_of("key_ranges", inputs, rows, to_numpy)
        lists = self._rows_of("selected", inputs, rows, to_numpy)
        seen = visible(q_len, kv_len, np.ones(kv_len, bool), self.causal, self.sliding_window, ranges=ranges)
        seen = of_head(seen_by_heads(seen, lists, self.block_size), kv_head)
        k, v = (to_numpy(inputs[name][keys, kv_head]) for name in ("k", "v"))
        some_rows, some_keys = (sorted({*range(min(ROWS, n)), *range(max(0, n - ROWS), n)}) for n in (q_len, kv_len))
        dk, dv = np.zeros((len(some_keys), self.head_dim)), np.zeros((len(some_keys), self.d_v))
        for head in range(kv_head * group, (kv_head + 1) * group):
            one = slice(head, head + 1)
            arrays = {name: to_numpy(inputs[name][rows, one]) for name in ("d_out", "q", "out", "lse")}
            d_lse = to_numpy(inputs["d_lse"][rows, one]) if self.d_lse else None
            sinks = to_numpy(inputs["sinks"][one]) if self.sinks else None
            terms = row_terms(arrays["d_out"], arrays["out"], arrays["lse"], d_lse, sinks)[:3]
            share, delta, d_lse = (term[:, 0] for term in terms)
            d_out, q, lse = (arrays[name][:, 0] for name in ("d_out", "q", "lse"))
            options = (self.head_dim**-0.5, self.soft_cap)
            slope = float(to_numpy(inputs["alibi_slopes"][head])) if self.alibi_slopes else 0.0
            tables = self._tables(inputs, rows, to_numpy)
            table, at_own = table_of(tables, head, slice(None)), column_at_own(tables, self.causal)
            bias = bias_of(q_len, kv_len, slope, table, at_own)
            want = attend_backward(
                d_out[some_rows], q[some_rows], k, v, seen[some_rows], lse[some_rows], share[some_rows],
                delta[some_rows], d_lse[some_rows], *options, bias[some_rows],
            )[0]  # fmt: skip
            yield f"dq of head {head}", to_numpy(out[0][rows, head])[some_rows], want
            _, more_dk, more_dv, _ = attend_backward(
                d_out, q, k[some_keys], v[some_keys], seen[:, some_keys], lse, share, delta, d_lse, *options,
                bias[:, some_keys],
            )  # fmt: skip
            dk, dv = dk + more_dk, dv + more_dv
        for name, got, want in (("dk", out[1], dk), ("dv", out[2], dv)):
            yield name, to_numpy(got[keys, kv_head])[some_keys], want


# ---- the cases


def _both(
    name: str, workload: str, lens: tuple[int, ...], heads: tuple[int, int], widths: tuple[int, int], **options: Any
) -> Iterator[VarlenCase]:
    """Yield a forward pass and its gradient."""
    make = functools.partial(
        VarlenCase, workload=workload, num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=widths[0], d_v=widths[1],
        **({"q_lens": lens, "kv_lens": lens} | options),
    )  # fmt: skip
    yield make(name=f"mha_{name}")
    yield make(name=f"mha_{name}_backward", backward=True)


def _invariant(name: str, heads: tuple[int, int], width: int, **options: Any) -> VarlenCase:
    """A forward pass with batch-invariant tiles."""
    return VarlenCase(
        name=f"mha_invariant_{name}", workload="-", q_lens=(4 * K,) * 2, kv_lens=(4 * K,) * 2, num_q_heads=heads[0],
        num_kv_heads=heads[1], head_dim=width, d_v=128, batch_invariant=True, **options,
    )  # fmt: skip


# As in upstream's benchmark, every batch has 16k tokens, so a batch of longer sequences has fewer sequences.
_SHAPES = (((128, 128), (16, 16)), ((192, 128), (16, 16)))
_ALL = (
    *(
        case
        for widths, heads in _SHAPES
        for length in (4 * K, 8 * K)
        for causal in (True, False)
        for case in _both(
            f"{widths[0]}_{length // K}k{'' if causal else '_full'}", "W13", (length,) * (16 * K // length), heads,
            widths, causal=causal,
        )
    ),
    *_both("gqa_8x2k", "W13", (2 * K,) * 8, (32, 8), (128, 128)),
    *_both("packed", "W13", tuple(drawn(64, 2 * K, 16)), (32, 8), (128, 128)),
)  # fmt: skip
CASES = {case.name: case for case in _ALL}

# No table reports these shapes. The compile matrix needs them, because they compile to different code.
_MORE = (
    *_both("float16_64", "-", (1000,) * 4, (32, 8), (64, 64), dtype="float16"),
    *_both("float32_80", "-", (333,) * 4, (8, 4), (80, 80), dtype="float32", sliding_window=100),
    *_both("gemma_256", "-", (1000,) * 4, (16, 8), (256, 256), soft_cap=50.0, sliding_window=512),
    *_both("wide_512", "-", (1000,) * 4, (8, 1), (512, 512), sinks=True, d_lse=True),
    *_both("wide_464_float16", "-", (1000,) * 4, (16, 16), (464, 464), dtype="float16", soft_cap=50.0,
           sliding_window=512),
    *_both("wide_320_float32", "-", (333,) * 4, (8, 8), (320, 320), dtype="float32"),
    *_both("everything_128", "-", (1000,) * 4, (28, 4), (128, 128), soft_cap=50.0, sliding_window=512, sinks=True,
           d_lse=True),
    *_both("alibi_128", "-", (1000,) * 4, (32, 8), (128, 128), alibi_slopes=True),
    *_both("alibi_192", "-", (1000,) * 4, (16, 16), (192, 128), alibi_slopes=True, soft_cap=50.0, d_lse=True,
           sinks=True),
    *_both("bias_128", "-", (1000,) * 4, (32, 8), (128, 128), relative_bias=True, causal=False),
    *_both("bias_192", "-", (1000,) * 4, (16, 16), (192, 128), relative_bias=True, soft_cap=50.0, d_lse=True,
           sinks=True),
    *_both("bias_float32_64", "-", (333,) * 4, (8, 8), (64, 64), dtype="float32", relative_bias=True, causal=False),
    *_both("own_bias_80", "-", (333,) * 4, (8, 4), (80, 80), relative_bias=True, own_tables=True, alibi_slopes=True,
           sliding_window=100),
    *_both("bias_256", "-", (1000,) * 4, (16, 8), (256, 256), relative_bias=True),
    *_both("one_range_128", "-", (4 * K,) * 4, (16, 16), (128, 128), key_ranges=1, causal=False),
    *_both("two_ranges_128", "-", (1000,) * 4, (32, 8), (128, 128), key_ranges=2, causal=False),
    *_both("two_ranges_192", "-", (1000,) * 4, (16, 16), (192, 128), key_ranges=2, causal=False, sinks=True),
    *_both("two_ranges_bias_64", "-", (1000,) * 4, (8, 8), (64, 64), key_ranges=2, causal=False, relative_bias=True),
    *_both("blocks_64", "-", (2 * K,) * 4, (64, 4), (128, 128), selected=16, block_size=64),
    *_both("blocks_16_192", "-", (1000,) * 4, (16, 16), (192, 128), selected=16, block_size=16, sinks=True, d_lse=True,
           soft_cap=50.0),
    *_both("blocks_8_bias", "-", (1000,) * 4, (8, 4), (64, 64), selected=32, block_size=8, relative_bias=True),
    *_both("blocks_1_float32", "-", (333,) * 4, (8, 4), (80, 80), dtype="float32", selected=64, block_size=1),
    *_both("blocks_128_ranges", "-", (1000,) * 4, (32, 8), (128, 128), selected=4, block_size=128, key_ranges=1,
           causal=False),
    *_both("cross_96_72", "-", (500,) * 4, (12, 12), (96, 72), kv_lens=(700,) * 4, causal=False, sinks=True),
    *_both("one_of_everything", "-", (1,), (1, 1), (1, 1)),
    _invariant("128", (32, 8), 128),
    _invariant("192_sinks", (16, 8), 192, sinks=True, dtype="float16"),
    _invariant("window", (32, 8), 128, sliding_window=1000),
    _invariant("blocks", (32, 8), 128, selected=16, block_size=64),
)  # fmt: skip
COMPILED_ONLY = {case.name: case for case in _MORE}
