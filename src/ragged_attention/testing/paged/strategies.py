"""Hypothesis strategies that draw specs, so that failures shrink to few features."""

import dataclasses
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ragged_attention.testing import formats
from ragged_attention.testing.integers import garbage
from ragged_attention.testing.paged.specs import MergeBatch, Spec, WriteBatch, sinks_of
from ragged_attention.testing.ranges import KINDS
from ragged_attention.testing.selected import selections

PAGE_SIZES = (1, 2, 3, 4, 8, 16, 32)
HEAD_DIMS = (16, 24, 40, 64, 80)
# The number of KV heads, and of query heads per KV head.
HEADS = ((1, 1), (2, 1), (1, 3), (2, 2), (1, 5), (1, 8), (3, 2))
SEEDS = st.integers(0, 2**32 - 1)

# Strategies for one sequence's (q_len, kv_len).
prefill = st.integers(1, 12).map(lambda n: (n, n))
chunk = st.builds(lambda q, past: (q, q + past), st.integers(2, 9), st.integers(1, 40))
decode = st.integers(1, 70).map(lambda kv: (1, kv))
speculative = st.builds(lambda q, past: (q, q + past), st.integers(2, 4), st.integers(10, 60))
odd = st.sampled_from([(0, 0), (0, 7), (1, 0), (3, 0), (4, 2), (9, 1)])  # no queries or keys, or more queries than keys
sequence = st.one_of(decode, prefill, chunk, speculative, odd)


@st.composite
def specs(draw: st.DrawFn, *, clean: bool = False, cache_dtypes: tuple[str | None, ...] | None = None) -> Spec:
    """Any valid `ragged_paged_attention` call.

    `clean` excludes draft masks, query scales and result dtypes. It also excludes what laws add themselves: poison,
    missing pages and shared pages.
    """
    lens = tuple(draw(st.lists(sequence, min_size=1, max_size=4)))
    num_kv_heads, group = draw(st.sampled_from(HEADS))
    combined = draw(st.booleans())
    head_dim = draw(st.sampled_from(HEAD_DIMS))
    cached = (None, None, *formats.QUANTIZED) if cache_dtypes is None else cache_dtypes
    count = draw(st.sampled_from(["none", "int", "array", "array"]))
    spec = Spec(
        lens=lens,
        page_size=draw(st.sampled_from(PAGE_SIZES)),
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        v_head_dim=None if combined else draw(st.sampled_from([None, 16, 48])),
        combined=combined,
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        cache_dtype=draw(st.sampled_from(cached)),
        count=count,
        spare_seqs=0 if count == "none" else draw(st.integers(0, 3)),
        padding=draw(st.sampled_from([0, 1, 5])),
        spare_columns=draw(st.sampled_from([0, 0, 1, 3])),
        limit=draw(st.sampled_from([None, "exact", "loose"])),
        causal=draw(st.sampled_from([True, True, False])),
        sliding_window=draw(st.sampled_from([None, None, 1, 2, 5, 17, 1000])),
        soft_cap=draw(st.sampled_from([None, None, 0.5, 30.0])),
        sm_scale=draw(st.sampled_from([None, None, 0.3])),
        sinks=draw(st.sampled_from([None, None, "normal", "mixed"])),
        draft=None if clean else draw(st.sampled_from([None] * 6 + [2, 12])),
        scales=draw(st.sampled_from([None, "float", "array", "heads"])),
        sharing=None if clean else draw(st.sampled_from([None, None, "prefix", "repeat"])),
        invalid_pages=False if clean else draw(st.sampled_from([False, False, True])),
        poison=None if clean else draw(st.sampled_from([None, "nan", "inf"])),
        garbage=False if clean else draw(st.sampled_from([True, True, False])),
        strided=draw(st.booleans()),
        seed=draw(SEEDS),
        alibi=draw(st.sampled_from([None, None, None, "usual", "mixed"])),
        bias=draw(st.sampled_from([None, None, None, "shared", "own"])),
        ranges=draw(st.one_of(st.none(), st.none(), st.none(), st.sampled_from(KINDS))),
        selection=draw(st.one_of(st.none(), st.none(), st.none(), selections)),
    )
    if clean:
        return spec
    widened = spec.cache_dtype is None or spec.dtype == "bfloat16"  # e4m3 queries with an 8-bit cache need bfloat16
    return dataclasses.replace(
        spec,
        q_scales=draw(st.sampled_from([None] * 6 + ["float", "array", "heads"])) if widened else None,
        out_dtype=draw(st.sampled_from([None] * 4 + ["float32", "bfloat16", "float16"])),
    )


@st.composite
def scaled_specs(draw: st.DrawFn, *, clean: bool = False) -> Spec:
    """Any valid `ragged_paged_attention` call in which keys or values have scale pages."""
    spec = draw(specs(clean=clean, cache_dtypes=(None,)))
    names = st.sampled_from([*formats.SCALED])
    others = st.sampled_from([*formats.SCALED, spec.dtype, *formats.QUANTIZED])
    stored = draw(st.one_of(names.map(lambda name: (name, name)), st.tuples(names, others), st.tuples(others, names)))
    columns = max(formats.KV_FORMATS[name].group for name in stored)
    widths = (32, 64, 96) if columns > 16 else (16, 48, 64, 80)
    return dataclasses.replace(
        spec,
        stored=stored,
        wild=draw(st.sampled_from([False, False, True])),
        head_dim=draw(st.sampled_from(widths)),
        v_head_dim=None if spec.combined else draw(st.sampled_from([None, widths[0]])),
        q_scales=None,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WriteSpec:
    """The parameters of a `write_kv_pages` call in which all tokens have different slots."""

    spec: Spec
    by_tables: bool = False
    slots: str = "int32"
    reach: float = 1.0  # scale of the values; 1000 exceeds the range of e4m3
    coded: bool = False  # whether K and V are codes of 8-bit pages

    def build(self) -> WriteBatch:
        batch = write_batch(self.spec, by_tables=self.by_tables, slot_dtype=np.dtype(self.slots), reach=self.reach)
        return coded(batch) if self.coded else batch


write_specs = st.builds(
    WriteSpec,
    spec=specs(),
    by_tables=st.booleans(),
    slots=st.sampled_from(["int32", "int64"]),
    reach=st.sampled_from([1.0, 1000.0]),
    coded=st.sampled_from([False, False, True]),
)


# `k_scale` and `v_scale` divide rows before they are quantised, so row scales would not be exact with them.
scaled_write_specs = st.builds(
    WriteSpec,
    spec=scaled_specs().map(lambda spec: dataclasses.replace(spec, scales=None)),
    by_tables=st.booleans(),
    reach=st.sampled_from([1.0, 1000.0]),
)


def coded(batch: WriteBatch, *, finite: bool = False) -> WriteBatch:
    """The write with arbitrary or finite codes as K and V; unchanged unless it has 8-bit pages without scale pages."""
    if not batch.quantized or batch.stored is not None:
        return batch
    rng, dtype = np.random.default_rng(len(batch.k)), np.int8 if batch.cache_dtype == "int8" else np.uint8
    k, v = (rng.integers(0, 256, array.shape, np.uint8).view(dtype) for array in (batch.k, batch.v))
    if finite:
        k, v = (formats.stored(rng.standard_normal(array.shape) * 3, batch.cache_dtype) for array in (k, v))
    return batch.change(k=k, v=v)


def write_batch(spec: Spec, *, by_tables: bool = False, slot_dtype: Any = np.int32, reach: float = 1.0) -> WriteBatch:
    """The write that precedes a spec's attention call, into pages that are already filled."""
    batch = dataclasses.replace(spec, sharing=None, poison=None).build()
    rng = np.random.default_rng(spec.seed + 1)
    num_tokens = len(batch.q)
    v_head_dim = spec.v_head_dim or spec.head_dim
    k = rng.standard_normal((num_tokens, spec.num_kv_heads, spec.head_dim)) * spec.magnitude * reach
    v = rng.standard_normal((num_tokens, spec.num_kv_heads, v_head_dim)) * spec.magnitude * reach
    write = WriteBatch(
        k=formats.rounded(k, spec.dtype),
        v=formats.rounded(v, spec.dtype),
        kv_pages=batch.kv_pages,
        k_scale=batch.k_scale,
        v_scale=batch.v_scale,
        k_scale_pages=batch.k_scale_pages,
        v_scale_pages=batch.v_scale_pages,
        dtype=spec.dtype,
        cache_dtype=batch.cache_dtype,
        stored=batch.stored,
        strided=spec.strided,
    )
    if by_tables:
        tables = ("page_indices", "kv_lens", "cu_q_lens", "num_seqs")
        return write.change(**{name: getattr(batch, name) for name in tables})
    slots = rng.permutation(max(num_tokens, batch.num_pages * spec.page_size))[:num_tokens].astype(np.int64)
    slots[slots >= batch.num_pages * spec.page_size] = -1
    lost = rng.random(num_tokens) < 0.3
    outside = garbage(rng, num_tokens, 3).astype(np.int64)
    outside[(outside >= 0) & (outside < 2**30)] += batch.num_pages * spec.page_size
    if slot_dtype == np.int64:
        outside = np.where(rng.random(num_tokens) < 0.3, outside << 31, outside)
        outside[(outside >= 0) & (outside < batch.num_pages * spec.page_size)] = -1
    slots = np.where(lost, outside, slots)
    k, v = write.k.copy(), write.v.copy()
    k[lost], v[lost] = np.nan, np.nan
    return write.change(k=k, v=v, slot_mapping=slots.astype(slot_dtype))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MergeSpec:
    """The parameters of a `merge_attention_states` call; some parts are empty and have NaN in out."""

    parts: int
    tokens: int
    heads: int
    v_head_dim: int
    dtype: str = "float32"
    empty: float = 0.0
    spread: float = 1.0
    sinks: str | None = None
    out_dtype: str | None = None
    strided: bool = False
    seed: int = 0

    def build(self) -> MergeBatch:
        shape = (self.parts, self.tokens, self.heads, self.v_head_dim)
        options = {name: getattr(self, name) for name in ("dtype", "empty", "spread", "sinks", "out_dtype", "strided")}
        return merge_batch(shape, **options, seed=self.seed)


merge_specs = st.builds(
    MergeSpec,
    parts=st.integers(1, 5),
    tokens=st.integers(0, 5),
    heads=st.sampled_from([1, 2, 3, 5, 8]),
    v_head_dim=st.sampled_from([1, 8, 16, 40, 64, 80, 128]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    empty=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    spread=st.sampled_from([0.1, 1.0, 30.0, 300.0]),
    sinks=st.sampled_from([None, None, "normal", "mixed"]),
    out_dtype=st.sampled_from([None, None, "float32", "bfloat16", "float16"]),
    strided=st.booleans(),
    seed=SEEDS,
)


def merge_batch(
    shape: tuple[int, int, int, int],
    *,
    dtype: str = "float32",
    empty: float = 0.0,
    spread: float = 1.0,
    sinks: str | None = None,
    out_dtype: str | None = None,
    strided: bool = False,
    seed: int = 0,
) -> MergeBatch:
    """Random parts of `shape` [N, T, H, D_v]; `empty` is the fraction without keys, `spread` the size of lse."""
    rng = np.random.default_rng(seed)
    none = rng.random(shape[:3]) < empty
    outs = formats.rounded(rng.standard_normal(shape), dtype)
    lses = (rng.standard_normal(shape[:3]) * spread).astype(np.float32)
    return MergeBatch(
        outs=np.where(none[..., None], np.float32(np.nan), outs),
        lses=np.where(none, np.float32(-np.inf), lses),
        sinks=sinks_of(rng, shape[2], sinks),
        out_dtype=out_dtype,
        dtype=dtype,
        strided=strided,
    )
