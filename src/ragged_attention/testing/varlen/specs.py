"""Batches of attention over packed sequences, and `VarlenSpec`, from which they are built.

As with `Spec`, Hypothesis draws the fields and one seed, and NumPy fills in the values. Keys are standard normal,
queries are standard normal times `magnitude`, and values are a quarter of standard normal. With larger values, softmax
weights that are rounded to 16 bits would exceed the tolerances.
"""

import dataclasses
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from ragged_attention.reference.ragged_paged_attention import column_at_own, columns_of
from ragged_attention.reference.varlen_attention import sequences, varlen_attention
from ragged_attention.testing import formats
from ragged_attention.testing.mla.specs import sinks_of
from ragged_attention.testing.paged.specs import Arrays, bias_table, by_q_head, slopes_of
from ragged_attention.testing.ranges import ranges_of
from ragged_attention.testing.selected import Selection, lists_of


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class VarlenBatch(Arrays):
    """The arguments of one `varlen_attention` call in NumPy."""

    OPERATION: ClassVar[str] = "varlen_attention"

    q: NDArray[np.float32]
    k: NDArray[np.float32]
    v: NDArray[np.float32]
    cu_q_lens: NDArray[np.int32]
    cu_kv_lens: NDArray[np.int32]
    max_q_len: int | None = None
    max_kv_len: int | None = None
    sm_scale: float | None = None
    causal: bool = False
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: NDArray[np.float32] | None = None
    alibi_slopes: NDArray[np.float32] | None = None
    relative_bias: NDArray[np.float32] | None = None
    key_ranges: NDArray[np.int32] | None = None
    selected: NDArray[np.int32] | None = None
    block_size: int | None = None
    deterministic: bool = False

    @property
    def num_seqs(self) -> int:
        return len(self.cu_q_lens) - 1

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    @property
    def scale(self) -> float:
        return self.q.shape[2] ** -0.5 if self.sm_scale is None else self.sm_scale

    def parts(self) -> list[tuple[slice, slice, NDArray[np.bool_]]]:
        """The query rows and keys of each sequence, and whether a query sees a key, bool [K or 1, q_len, kv_len]."""
        edges = self.cu_q_lens, self.cu_kv_lens
        masks = self.causal, self.sliding_window, self.key_ranges, self.selected, self.block_size
        return list(sequences(*edges, len(self.q), len(self.k), *masks))

    def masked(self, **mask: Any) -> Self:
        """The batch without key ranges and lists of blocks, and with the given mask arguments."""
        return self.change(**{"key_ranges": None, "selected": None, "block_size": None, **mask})

    def fully_masked_heads(self) -> NDArray[np.bool_]:
        """Whether a query head sees no key, bool [T_q, H]; true in padding rows."""
        fully_masked = np.ones(self.q.shape[:2], bool)
        for rows, _, seen in self.parts():
            fully_masked[rows] = by_q_head(~seen.any(axis=2), self.q.shape[1])
        return fully_masked

    def unseen(self) -> NDArray[np.bool_]:
        """Whether no query sees a KV head's key, bool [T_k, K]; true in padding rows."""
        unseen = np.ones(self.k.shape[:2], bool)
        for _, keys, seen in self.parts():
            unseen[keys] = ~seen.any(axis=1).T
        return unseen

    def unused_columns(self) -> NDArray[np.bool_]:
        """Whether no query uses an entry of `relative_bias` for a key that it sees, in the shape of `relative_bias`."""
        assert self.relative_bias is not None
        unused: NDArray[Any] = np.ones(self.relative_bias.shape, bool)
        at_own = column_at_own(self.relative_bias, self.causal)
        for rows, _, seen in self.parts():
            kv_heads, q_len, kv_len = seen.shape
            columns = columns_of(q_len, kv_len, unused.shape[-1], at_own)
            for kv_head, query, key in np.argwhere(seen):
                tables = unused if unused.ndim == 2 else unused[rows][query]
                tables.reshape(kv_heads, -1, unused.shape[-1])[kv_head, :, columns[query, key]] = False
        return unused

    def poisoned(self, kind: str, seed: int = 0) -> Self:
        """The batch with NaN or infinities in every key, value and query that takes no part."""
        rng = np.random.default_rng(seed)
        arrays = {
            name: np.where(rows[..., None], formats.poison(kind, "float32", array.shape, rng), array)
            for name, array, rows in (
                ("q", self.q, self.fully_masked_heads()),
                ("k", self.k, self.unseen()),
                ("v", self.v, self.unseen()),
            )
        }
        return self.change(**arrays)

    def expected(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The reference's out and lse, computed in float64 from the rounded inputs."""
        out, lse = varlen_attention(**self.arguments())
        return out, lse

    def expected_max_logits(self) -> NDArray[np.float64]:
        return varlen_attention(**self.arguments(), return_max_logits=True)[2]

    def mean_magnitudes(self) -> NDArray[np.float64]:
        """The weighted means of the values' magnitudes, in out's shape."""
        return self.change(v=np.abs(self.v)).expected()[0]

    def of(self, order: list[int] | NDArray[np.integer[Any]]) -> Self:
        """The batch of the sequences in `order`, without padding."""
        parts = self.parts()
        rows = [np.arange(len(self.q))[parts[seq][0]] for seq in order]
        keys = [np.arange(len(self.k))[parts[seq][1]] for seq in order]
        q_rows, kv_rows = (np.concatenate([np.empty(0, int), *each]) for each in (rows, keys))
        edges = [np.cumsum([0, *map(len, each)], dtype=np.int32) for each in (rows, keys)]
        bias = self.relative_bias if np.ndim(self.relative_bias) != 3 else self.relative_bias[q_rows]  # type: ignore[index]
        return self.change(
            q=self.q[q_rows],
            k=self.k[kv_rows],
            v=self.v[kv_rows],
            cu_q_lens=edges[0],
            cu_kv_lens=edges[1],
            relative_bias=bias,
            key_ranges=None if self.key_ranges is None else self.key_ranges[q_rows],
            selected=None if self.selected is None else self.selected[q_rows],
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class VarlenSpec:
    """The parameters of a `varlen_attention` call."""

    lens: tuple[tuple[int, int], ...] = ((5, 9), (3, 3))  # (q_len, kv_len) of each sequence
    kv_heads: int = 1
    group: int = 1
    d: int = 16
    d_v: int = 16
    dtype: str = "float32"
    q_padding: int = 0  # query rows past the last sequence
    kv_padding: int = 0
    limits: str | None = None  # max_q_len and max_kv_len: None, exact or loose
    causal: bool = False
    sliding_window: int | None = None
    soft_cap: float | None = None
    sm_scale: float | None = None
    sinks: str | None = None  # kind of sinks: normal, -inf, +inf or mixed
    alibi: str | None = None  # kind of ALiBi slopes: usual or mixed
    bias: str | None = None  # relative bias: one table for all queries (shared) or one for each (own)
    ranges: str | None = None  # kind of key ranges, see `ranges_of`; they replace the masks above
    selection: Selection | None = None  # lists of key blocks, within the masks above
    deterministic: bool = False
    poison: str | None = None  # nan or inf in everything that takes no part
    strided: bool = False
    magnitude: float = 1.0
    seed: int = 0

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    def build(self) -> VarlenBatch:
        rng = np.random.default_rng(self.seed)
        edges = [np.cumsum([0, *(pair[side] for pair in self.lens)], dtype=np.int32) for side in (0, 1)]
        tokens, keys = int(edges[0][-1]) + self.q_padding, int(edges[1][-1]) + self.kv_padding
        batch = VarlenBatch(
            q=formats.rounded(rng.standard_normal((tokens, self.heads, self.d)) * self.magnitude, self.dtype),
            k=formats.rounded(rng.standard_normal((keys, self.kv_heads, self.d)), self.dtype),
            v=formats.rounded(rng.standard_normal((keys, self.kv_heads, self.d_v)) / 4, self.dtype),
            cu_q_lens=edges[0],
            cu_kv_lens=edges[1],
            max_q_len=self._limit(0),
            max_kv_len=self._limit(1),
            sm_scale=self.sm_scale,
            causal=self.causal and self.ranges is None,
            sliding_window=self.sliding_window if self.ranges is None else None,
            soft_cap=self.soft_cap,
            sinks=sinks_of(rng, self.heads, self.sinks),
            alibi_slopes=slopes_of(rng, self.heads, self.alibi),
            relative_bias=bias_table(rng, tokens, self.heads, self.bias),
            key_ranges=ranges_of(rng, self.lens, tokens, self.ranges),
            selected=lists_of(rng, self.lens, tokens, self.kv_heads, self.selection),
            block_size=self.selection and self.selection.size,
            deterministic=self.deterministic,
            dtype=self.dtype,
            strided=self.strided,
        )
        return batch.poisoned(self.poison, self.seed) if self.poison else batch

    def _limit(self, side: int) -> int | None:
        longest = max((pair[side] for pair in self.lens), default=0)
        return {None: None, "exact": longest, "loose": 2 * longest + 3}[self.limits]
