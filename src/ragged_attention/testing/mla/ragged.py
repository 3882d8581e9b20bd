"""Ragged attention over latents: batches, specs, named batches, laws and checks."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Self

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from ragged_attention.reference._kv_layout import per_head
from ragged_attention.reference.ragged_mla_attention import ragged_mla_attention
from ragged_attention.testing import formats
from ragged_attention.testing.compare import agrees, identical
from ragged_attention.testing.drawing import Check, built, on_corner, on_drawn, on_drawn_paths, on_every_path
from ragged_attention.testing.mla import latents
from ragged_attention.testing.mla.cache_specs import LatentWriteBatch
from ragged_attention.testing.mla.specs import BYTES, AnyLatents, DecodeBatch, magnitudes_first
from ragged_attention.testing.paged import laws as paged_laws
from ragged_attention.testing.paged import strategies as paged_strategies
from ragged_attention.testing.paged.corners import ALL_EDGES, MIXED
from ragged_attention.testing.paged.oracle import (
    check_attention,
    check_determinism,
    check_without_lse,
    expect_results,
)
from ragged_attention.testing.paged.specs import Batch, Contradiction, RaggedTables, Spec
from ragged_attention.testing.rounded_weights import allowance
from ragged_attention.testing.runner import Runner

TABLES = ("kv_lens", "page_indices", "cu_q_lens", "num_seqs")
ROW_SIZE = 0.1  # typical size of latents in models
LOGITS = ("sm_scale", "causal", "sliding_window", "soft_cap", "sinks")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RaggedLatentBatch(AnyLatents, RaggedTables):
    """The arguments of one `ragged_mla_attention` call in NumPy."""

    OPERATION: ClassVar[str] = "ragged_mla_attention"
    PAGES: ClassVar[tuple[str, ...]] = ("kv_cache",)
    CACHE: ClassVar[str] = "kv_cache"
    ROWS: ClassVar[str] = "q"

    kv_cache: latents.Cache
    d_v: int = 512
    kv_scale: float | NDArray[np.float32] | None = None
    rope_scale: float | NDArray[np.float32] | None = None

    @property
    def pages(self) -> list[NDArray[Any]]:
        return [self.kv_cache]

    def with_pages(self, arrays: list[NDArray[Any]]) -> Self:
        return self.change(kv_cache=arrays[0])

    def pages_poisoned(self, kind: str, unread: NDArray[np.bool_], rng: np.random.Generator) -> list[NDArray[Any]]:
        if self.code_dtype is None:
            return [latents.poisoned(self.kv_cache, self.format, unread[..., 0], kind, rng)]
        cache = self.kv_cache.copy()
        cache[unread[..., 0]] = formats.poison(kind, self.code_dtype, cache[unread[..., 0]].shape, rng)
        return [cache]

    def expected(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return ragged_mla_attention(**self.arguments(), return_lse=True, code_dtype=self.code_dtype, q_dtype=self.dtype)

    def expected_max_logits(self) -> NDArray[np.float64]:
        dtypes = {"code_dtype": self.code_dtype, "q_dtype": self.dtype}
        return ragged_mla_attention(**self.arguments(), return_max_logits=True, **dtypes)[1]

    def rows(self) -> NDArray[np.float32]:
        """The cache's dequantised rows [P, G, 1, d_qk]."""
        if self.code_dtype is not None:
            values = formats.values_of(self.kv_cache, self.code_dtype)
        else:
            rows = latents.rows_of(self.kv_cache, self.format)
            values = rows.reshape(*self.kv_cache.shape[:3], rows.shape[-1])
        factors = np.repeat(per_head(self.kv_scale, 1), values.shape[-1])
        if self.rope_scale is not None:
            factors[self.d_v :] = per_head(self.rope_scale, 1)
        with np.errstate(all="ignore"):
            return (values * factors).astype(np.float32)

    def widened(self) -> Self:
        """The batch with its cache in float32, without scales."""
        scales = {"kv_scale": None, "rope_scale": None}
        plain = {"cache_format": None, "cache_layout": None, "out_dtype": None, **scales}
        return self.change(kv_cache=self.rows(), dtype="float32", **plain)

    def mean_magnitudes(self) -> NDArray[np.float64]:
        return magnitudes_first(self).expected()[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedLatentSpec:
    """The parameters of a `ragged_mla_attention` call: those of ragged attention, and the format of the latents.

    The fields of `tables` apply, except those for K and V heads. Its `group` is the number of query heads, its
    `cache_dtype` is the dtype of a plain 8-bit cache, and its `scales` give the `kv_scale`.
    """

    tables: Spec
    d_qk: int = 48  # row width of a plain cache; quantised formats define theirs
    d_v: int = 32
    format: str = "plain"
    bytes_as: str = "uint8"  # the dtype in which the bytes of a quantised cache are passed
    group_scales: str = "arbitrary"
    rope: str | None = None  # kind of `rope_scale` for a plain cache: None, float or array

    @property
    def seed(self) -> int:
        return self.tables.seed

    def build(self) -> RaggedLatentBatch:
        spec = self.tables
        plain = self.format == "plain"
        width = self.d_qk if plain else latents.LAID_OUT[self.format].width
        if self.d_v > width:
            raise Contradiction("values are columns of the rows")
        plain_tables = {"poison": None, "draft": None, "selection": None}
        bare = dataclasses.replace(spec, num_kv_heads=1, combined=True, head_dim=16, **plain_tables)
        paged = bare.build()
        rng = np.random.default_rng(spec.seed + 1)
        q = np.clip(rng.standard_normal((len(paged.q), spec.group, width)), -1, 1) * spec.magnitude
        cache, stored = self._cache(rng, (paged.num_pages, spec.page_size, 1, width))
        batch = RaggedLatentBatch(
            q=formats.rounded(q, paged.q_dtype or spec.dtype),
            kv_cache=cache,
            max_q_len=paged.max_q_len,
            d_v=self.d_v,
            kv_scale=paged.k_scale if plain else None,
            rope_scale=self._rope_scale(rng) if plain else None,
            cache_layout=latents.layout_of(self.format),
            key_ranges=paged.key_ranges,
            q_scale=paged.q_scale,
            out_dtype=paged.out_dtype,
            dtype=spec.dtype,
            q_dtype=paged.q_dtype,
            cache_dtype=stored,
            strided=spec.strided,
            **{name: getattr(paged, name) for name in (*TABLES, *LOGITS)},
        )
        return batch.poisoned(spec.poison, spec.seed) if spec.poison else batch

    def _rope_scale(self, rng: np.random.Generator) -> Any:
        """A scale so different from `kv_scale` that a kernel which exchanges the two scales exceeds every tolerance."""
        scale = np.float32(rng.uniform(3, 5))
        return {None: None, "float": float(scale), "array": np.full(1, scale, np.float32)}[self.rope]

    def _cache(self, rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[latents.Cache, str]:
        """The cache, and the dtype in which it is passed."""
        rows = rng.standard_normal(shape) * (4.0 if self.tables.cache_dtype == "int8" else ROW_SIZE)
        if self.format != "plain":
            rows = formats.rounded(rows, self.tables.dtype)
            return latents.quantised(rows, self.format, self.group_scales, rng), self.bytes_as
        stored = self.tables.cache_dtype or self.tables.dtype
        return formats.stored(rows, stored), stored


# ---- checks


def check_update(runner: Runner, spec: RaggedLatentSpec) -> None:
    """The cache has the same bits as after a separate write, and the attention sees the new rows."""
    spec = dataclasses.replace(spec, tables=dataclasses.replace(spec.tables, sharing=None, poison=None))
    batch, new = spec.build(), new_rows(spec)
    out, lse, cache = runner.update_latents(batch, new)
    identical(cache, runner.run("write_mla_cache", new), "cache")
    expect_results(runner, batch, (out, lse), batch.with_pages([cache]))


def new_rows(spec: RaggedLatentSpec) -> LatentWriteBatch:
    """The write, by tables, that precedes a spec's attention call; padding rows are NaN."""
    batch = spec.build()
    rng = np.random.default_rng(spec.seed + 2)
    kv = formats.rounded(rng.standard_normal((len(batch.q), 1, batch.q.shape[2])) * ROW_SIZE, batch.dtype)
    kv[max((stop for _, stop in batch.bounds()), default=0) :] = np.nan
    names = (*TABLES, "kv_scale", "rope_scale", "cache_format", "cache_layout", "dtype", "cache_dtype", "strided")
    d_v = None if batch.rope_scale is None else batch.d_v
    return LatentWriteBatch(kv=kv, cache=batch.kv_cache, d_v=d_v, **{name: getattr(batch, name) for name in names})


# ---- laws


def it_is_ragged_attention_of_one_head(runner: Runner, spec: RaggedLatentSpec) -> None:
    """The results equal ragged attention with one KV head, whose K are the rows and whose V are their first columns."""
    batch = spec.build().change(out_dtype=None, rope_scale=None)
    cache = batch.kv_cache
    values = cache[..., : batch.d_v].copy()
    other = Batch(
        kv_pages=(cache, values), k_scale=batch.kv_scale, v_scale=batch.kv_scale, dtype=batch.dtype, q=batch.q,
        cache_dtype=batch.cache_dtype, max_q_len=batch.max_q_len, key_ranges=batch.key_ranges,
        **{name: getattr(batch, name) for name in (*TABLES, *LOGITS)},
    )  # fmt: skip
    paged_laws.same(runner, batch, other)


def of_equal_counts_it_is_a_decode(runner: Runner, spec: RaggedLatentSpec) -> None:
    """If all sequences have the same number of queries, the results equal `mla_decode`, causal or not."""
    lens = spec.tables.lens
    count = max(1, max((q_len for q_len, _ in lens), default=1))
    longest = tuple((count, kv_len) for _, kv_len in lens) or ((count, 3),)
    tables = dataclasses.replace(
        spec.tables, lens=longest, count="none", padding=0, cache_dtype=None, scales=None, limit=None, ranges=None
    )
    batch = dataclasses.replace(spec, tables=tables, rope=None).build()
    out, lse = runner.run(batch.OPERATION, batch, return_lse=True)
    names = ("kv_cache", "page_indices", "kv_lens", "d_v", *LOGITS, "cache_layout", "out_dtype", "dtype", "cache_dtype")
    q = batch.q.reshape(len(longest), count, *batch.q.shape[1:])
    decode = DecodeBatch(q=q, **{name: getattr(batch, name) for name in names})
    decoded, decoded_lse = runner.run("mla_decode", decode)
    agrees(out, decoded.reshape(out.shape), batch.kind, allowance=allowance(runner, batch, batch))
    agrees(lse, np.swapaxes(decoded_lse, 1, 2).reshape(lse.shape), f"lse {batch.kind}", "lse")


def two_scales_are_those_of_the_columns(runner: Runner, spec: RaggedLatentSpec) -> None:
    """If queries are 0 in the rotary columns, lse does not depend on `rope_scale`.

    If they are 0 in all other columns, it does not depend on `kv_scale`.
    """
    batch = dataclasses.replace(spec, rope=spec.rope or "float").build()
    rotary = np.arange(batch.q.shape[-1]) >= batch.d_v
    for hidden, scales in ((rotary, {"rope_scale": None}), (~rotary, {"kv_scale": batch.rope_scale})):
        blind = batch.change(q=np.where(hidden, np.float32(0), batch.q))
        lse = runner.run(batch.OPERATION, blind, return_lse=True)[1]
        want = runner.run(batch.OPERATION, blind.change(**scales), return_lse=True)[1]
        agrees(lse, want, f"lse {batch.kind}", "lse")


def a_wider_result_is_rounded_once(runner: Runner, spec: RaggedLatentSpec) -> None:
    batch = spec.build()
    wide, narrow = (runner.run(batch.OPERATION, batch.change(out_dtype=dtype)) for dtype in ("float32", batch.dtype))
    identical(formats.rounded(wide, batch.dtype), narrow, "out")


def parts_merge(runner: Runner, spec: RaggedLatentSpec) -> None:
    """Results over disjoint keys merge, by their lse, into the whole result; float32 parts avoid a second rounding."""
    paged_laws.expect_parts_to_merge(runner, spec.build().change(sinks=None, out_dtype="float32"))


def writing_first_is_the_same(runner: Runner, spec: RaggedLatentSpec) -> None:
    """A write by tables gives the same cache as a write to the slots that the tables name."""
    batch, new = spec.build(), new_rows(spec)
    written = runner.run("write_mla_cache", new)
    by_slots = new.change(slot_mapping=_slots_of(batch), page_indices=None, kv_lens=None, cu_q_lens=None, num_seqs=None)
    identical(written, runner.run("write_mla_cache", by_slots), "cache")


def _slots_of(batch: RaggedLatentBatch) -> NDArray[np.int64]:
    """The slot of each token; -1 for a token without a slot."""
    slots = np.full(len(batch.q), -1, np.int64)
    for seq, (start, stop) in enumerate(batch.bounds()):
        count = min(stop - start, batch.kv_len(seq))
        slots[stop - count : stop] = batch.slots(seq)[batch.kv_len(seq) - count :]
    return slots


# ---- drawn batches

WIDTHS = ((48, 32), (64, 64), (80, 64), (16, 16), (96, 48), (576, 512))
QUANTISED = tuple(latents.LAID_OUT)


@st.composite
def ragged_specs(
    draw: st.DrawFn, *, clean: bool = False, formats: tuple[str, ...] = (*("plain",) * 5, *QUANTISED)
) -> RaggedLatentSpec:
    """Any valid `ragged_mla_attention` call; `clean` excludes what laws add themselves."""
    tables = draw(paged_strategies.specs(clean=clean))
    d_qk, d_v = draw(st.sampled_from(WIDTHS))
    format = draw(st.sampled_from(formats))
    if format != "plain":
        d_qk, d_v = latents.LAID_OUT[format].width, draw(st.sampled_from([512, 512, 64, 480]))
    heads = draw(st.sampled_from([1, 2, 3, 7, 16, 17, 40]))
    return RaggedLatentSpec(
        tables=dataclasses.replace(
            tables,
            num_kv_heads=1,
            group=heads,
            combined=True,
            v_head_dim=None,
            alibi=None,
            bias=None,
            draft=None,
            cache_dtype=tables.cache_dtype if format == "plain" else None,
            q_scales=tables.q_scales if format == "plain" or tables.dtype == "bfloat16" else None,
        ),
        d_qk=d_qk,
        d_v=d_v,
        format=format,
        bytes_as=draw(st.sampled_from(BYTES)),
        group_scales=draw(st.sampled_from(latents.SCALES)),
        rope=draw(st.sampled_from([None, None, "float", "array"])),
    )


def _spec(d_qk: int = 48, d_v: int = 32, format: str = "plain", rope: str | None = None, **fields: Any) -> Any:
    """A spec with the usual mix of sequences; `fields` are fields of `tables`."""
    tables = Spec(**{"lens": MIXED, "group": 3, **fields})
    return RaggedLatentSpec(tables=tables, d_qk=d_qk, d_v=d_v, format=format, rope=rope)


_SPECS: dict[str, RaggedLatentSpec] = {
    "one key": _spec(lens=((1, 1),)),
    "mixed": _spec(group=16),
    "decode": _spec(lens=((1, 40), (1, 1), (1, 16)), group=16),
    "decode of a long sequence": _spec(lens=((1, 700), (1, 3)), page_size=16, group=5),
    "prompt of more rows than a tile": _spec(lens=((90, 130),), page_size=16, group=4, dtype="bfloat16"),
    "speculative": _spec(lens=((4, 60), (3, 35), (4, 4)), group=16, dtype="bfloat16"),
    "many sequences": _spec(lens=tuple((n % 3, 3 * n % 17 + n % 3) for n in range(21))),
    "more queries than keys": _spec(lens=((5, 2), (9, 8), (2, 1))),
    "no keys with sinks": _spec(lens=((1, 0), (3, 0), (2, 5)), sinks="normal"),
    "no query but padding": _spec(lens=((0, 9), (0, 0)), padding=3, garbage=True, poison="nan"),
    "every edge at once": _spec(
        lens=ALL_EDGES, count="array", spare_seqs=2, padding=3, poison="nan", garbage=True, group=4
    ),
    "num_seqs an int below the maximum": _spec(count="int", spare_seqs=3, padding=2, poison="nan", garbage=True),
    "num_seqs 0": _spec(lens=(), count="array", spare_seqs=3, padding=4, garbage=True, poison="nan"),
    "not causal": _spec(causal=False),
    "window of 1": _spec(sliding_window=1, poison="nan", garbage=True),
    "window, not causal": _spec(sliding_window=3, causal=False, poison="nan"),
    "window in a long sequence": _spec(lens=((1, 600), (6, 500)), page_size=16, sliding_window=100, poison="nan"),
    "window within the last pages": _spec(lens=((6, 14), (1, 29)), page_size=3, sliding_window=2),
    "window longer than all": _spec(sliding_window=2**31 - 1),
    "ranges of each query": _spec(ranges="few", poison="nan", group=16, garbage=True),
    "ranges over splits": _spec(lens=((1, 700), (3, 600)), page_size=16, ranges="prefix", group=5, poison="nan"),
    "ranges of more rows than a tile": _spec(
        lens=((90, 330),), page_size=16, ranges="spans", group=4, dtype="bfloat16", poison="nan"
    ),
    "ranges without sense": _spec(lens=ALL_EDGES, ranges="any", padding=3, poison="nan", garbage=True, sinks="mixed"),
    "ranges, fp8_v32": _spec(d_v=512, format="fp8_v32", dtype="bfloat16", ranges="chunks", soft_cap=3.0, page_size=16),
    "soft cap": _spec(soft_cap=2.0, sm_scale=0.5),
    "soft cap, window and sinks": _spec(soft_cap=5.0, sliding_window=6, sinks="mixed", group=7),
    "sm_scale negative": _spec(sm_scale=-0.2, sliding_window=9),
    "sinks +inf": _spec(sinks="+inf"),
    "max_q_len wrongly 1": _spec(lens=((1, 700), (3, 300), (40, 200), (0, 5)), page_size=16, limit="1", padding=5),
    "page size 1": _spec(page_size=1, spare_columns=2, garbage=True, poison="nan"),
    "page size 3": _spec(page_size=3, garbage=True, poison="nan"),
    "page size 128": _spec(page_size=128, poison="nan"),
    "128 heads": _spec(lens=((3, 9), (1, 21)), group=128, dtype="bfloat16"),
    "DeepSeek V3, bfloat16": _spec(576, 512, dtype="bfloat16", page_size=64, group=16),
    "no rotary columns": _spec(512, 512, dtype="bfloat16", page_size=64, group=12),
    "d_qk 1024": _spec(1024, 512, lens=((2, 9), (1, 30))),
    "float16": _spec(dtype="float16", soft_cap=20.0),
    "shared prefix": _spec(lens=((1, 30), (4, 25), (1, 18)), sharing="prefix", garbage=True),
    "invalid page indices": _spec(invalid_pages=True, poison="nan", garbage=True, page_size=2),
    "invalid page indices with sinks": _spec(invalid_pages=True, sinks="normal", page_size=1, seed=1),
    "infinity in all that is unread": _spec(poison="inf", padding=2, count="array", spare_seqs=1, sliding_window=4),
    "strided": _spec(strided=True, sinks="normal", count="array", spare_seqs=1),
    "strided 8-bit": _spec(strided=True, cache_dtype="float8_e5m2", scales="float"),
    "to float32": _spec(dtype="bfloat16", out_dtype="float32", sinks="normal"),
    "to bfloat16": _spec(out_dtype="bfloat16"),
    "to float16": _spec(dtype="bfloat16", out_dtype="float16", padding=2),
    "scaled": _spec(scales="float"),
    "e4m3 queries": _spec(dtype="bfloat16", q_scales="heads", poison="nan", padding=2),
    "e4m3 queries of float16 rows": _spec(dtype="float16", q_scales="array", soft_cap=3.0),
    "e4m3 queries, 8-bit rows": _spec(
        dtype="bfloat16", q_scales="float", cache_dtype="float8_e4m3fn", scales="float", sm_scale=0.3, strided=True
    ),
    "e4m3 queries, fp8_v32": _spec(d_v=512, format="fp8_v32", dtype="bfloat16", q_scales="heads", out_dtype="float32"),
    **{
        f"{cache_dtype}, {dtype} queries": _spec(
            dtype=dtype, cache_dtype=cache_dtype, scales=scales, poison="nan", d_qk=80, d_v=64
        )
        for cache_dtype, dtype, scales in (
            ("float8_e4m3fn", "bfloat16", "float"), ("float8_e4m3fn", "float32", "heads"),
            ("float8_e5m2", "float16", "array"), ("int8", "bfloat16", "heads"), ("int8", "float16", None),
            ("float8_e4m3fnuz", "bfloat16", "float"), ("float8_e4m3fnuz", "float16", None),
        )
    },
    **{
        f"two scales, {cache_dtype}, {dtype} queries": _spec(
            dtype=dtype, cache_dtype=cache_dtype, scales=scales, rope=rope, poison="nan", d_qk=80, d_v=64
        )
        for cache_dtype, dtype, scales, rope in (
            ("float8_e4m3fn", "bfloat16", "float", "float"), ("float8_e4m3fnuz", "float16", "array", "array"),
            ("int8", "float32", None, "float"), ("float8_e5m2", "bfloat16", "heads", "array"),
        )
    },
    "two scales of float32 rows": _spec(scales="float", rope="array", sinks="normal", sliding_window=7),
    "two scales, soft cap, 40 heads": _spec(
        cache_dtype="float8_e4m3fn", dtype="bfloat16", scales="float", rope="float", group=40, soft_cap=2.0, d_v=16
    ),
    "two scales, no rotary columns": _spec(d_qk=64, d_v=64, cache_dtype="int8", scales="float", rope="float"),
    "two scales, DeepSeek V3": _spec(
        576, 512, cache_dtype="float8_e4m3fn", dtype="bfloat16", scales="float", rope="float", page_size=64, group=64,
        poison="nan",
    ),
    "8-bit without a scale": _spec(cache_dtype="float8_e4m3fn", dtype="bfloat16", sliding_window=5),
    "8-bit, DeepSeek V3": _spec(
        576, 512, cache_dtype="float8_e4m3fn", dtype="bfloat16", scales="float", page_size=64, group=16, poison="nan"
    ),
    **{
        f"{format}": _spec(d_v=512, format=format, dtype="bfloat16", page_size=page_size, poison="nan", garbage=True)
        for format, page_size in zip(QUANTISED, (64, 64, 3, 16, 5, 16), strict=True)
    },
    "fp8_v32, window and soft cap": _spec(
        d_v=512, format="fp8_v32", dtype="bfloat16", sliding_window=7, soft_cap=3.0, page_size=16
    ),
}  # fmt: skip
CORNERS: dict[str, Callable[[], RaggedLatentBatch]] = {name: spec.build for name, spec in _SPECS.items()}
ON_EVERY_PATH = ("mixed", "decode of a long sequence", "every edge at once", "window in a long sequence", "fp8_v32")
UPDATES = {
    "a step of every kind": _spec(group=2),
    "every edge at once": _spec(lens=ALL_EDGES, count="array", spare_seqs=2, padding=3, garbage=True),
    "num_seqs an int": _spec(count="int", spare_seqs=2, padding=1, garbage=True),
    "page size 1": _spec(page_size=1, garbage=True, dtype="bfloat16"),
    "float8_e4m3fn": _spec(cache_dtype="float8_e4m3fn", dtype="bfloat16", scales="float"),
    "float8_e4m3fnuz": _spec(cache_dtype="float8_e4m3fnuz", dtype="bfloat16", scales="float"),
    "int8": _spec(cache_dtype="int8", dtype="float16", scales="array"),
    "two scales": _spec(cache_dtype="float8_e4m3fn", dtype="bfloat16", scales="float", rope="float"),
    "fp8_v32": _spec(d_v=512, format="fp8_v32", dtype="bfloat16", page_size=5),
    "fp8_v4": _spec(d_v=512, format="fp8_v4", dtype="bfloat16", page_size=5),
    "invalid page indices": _spec(invalid_pages=True, garbage=True, page_size=2),
}
_ANY = ragged_specs(clean=True)
_FLOATS = ragged_specs(clean=True, formats=("plain",))
LAWS: dict[str, tuple[Callable[[Runner, Any], None], st.SearchStrategy[Any]]] = {
    "a query that sees no key gives 0 and -inf": (paged_laws.fully_masked_queries_give_nothing, _ANY),
    "what no query sees takes no part": (paged_laws.unseen_takes_no_part, _ANY),
    "pages may move": (paged_laws.pages_may_move, _FLOATS),
    "sequences do not mix": (paged_laws.sequences_do_not_mix, _ANY),
    "hints change nothing": (paged_laws.hints_change_nothing, _ANY),
    "a huge window is none": (paged_laws.a_huge_window_is_none, _ANY),
    "a quantised cache is its dequantised values": (
        paged_laws.quantised_is_dequantised, ragged_specs(clean=True, formats=QUANTISED)
    ),
    "sinks take their share and leave the lse": (paged_laws.sinks_take_their_share, _ANY),
    "a double is its multiplicity": (paged_laws.a_double_is_its_multiplicity, _ANY),
    "it is ragged attention of one KV head": (
        it_is_ragged_attention_of_one_head, _FLOATS.filter(lambda spec: spec.d_qk <= 512)
    ),
    "of equal counts it is a decode": (of_equal_counts_it_is_a_decode, _ANY),
    "two scales are those of the columns": (
        two_scales_are_those_of_the_columns, _FLOATS.filter(lambda spec: spec.d_v < spec.d_qk)
    ),
    "a wider result is rounded once": (a_wider_result_is_rounded_once, _ANY),
    "parts merge through their lse": (parts_merge, _ANY),
    "writing by tables is writing by slots": (writing_first_is_the_same, _ANY),
}  # fmt: skip


def corners() -> Iterator[Check]:
    for name, build in CORNERS.items():
        yield Check("corner", f"ragged latents, {name}", on_corner(check_attention, build))
    for name in ON_EVERY_PATH:
        run = on_every_path("ragged_mla_attention", check_attention, CORNERS[name])
        yield Check("corner", f"ragged latents on every path, {name}", run)
    for name, spec in UPDATES.items():
        yield Check("corner", f"ragged latents, update, {name}", on_corner(check_update, lambda spec=spec: spec))


def agreement() -> Iterator[Check]:
    drawn = on_drawn_paths("ragged_mla_attention", check_attention, ragged_specs())
    yield Check("agreement", "ragged latents on drawn batches", drawn)
    for name, check, share in (
        ("ragged latents without lse", built(check_without_lse), 0.1),
        ("ragged latents, the same bits again", built(check_determinism), 0.1),
        ("ragged latents, update on drawn batches", check_update, 0.3),
    ):
        yield Check("agreement", name, on_drawn(check, ragged_specs(), share))


def laws() -> Iterator[Check]:
    for name, (law, specs) in LAWS.items():
        yield Check("law", f"ragged latents, {name}", on_drawn(law, specs, 0.3))
