"""The checks of operations over heads-first pages that `suite` includes: corner cases, drawn batches and laws."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ragged_attention.testing import formats
from ragged_attention.testing.compare import agrees, identical
from ragged_attention.testing.drawing import Check, on_corner, on_drawn, on_drawn_paths, on_every_path
from ragged_attention.testing.heads_first.specs import (
    ChunkBatch,
    ChunkSpec,
    PagedBatch,
    PagedSpec,
    check_chunk,
    check_paged,
)
from ragged_attention.testing.integers import INT32, garbage
from ragged_attention.testing.paged.specs import Spec
from ragged_attention.testing.paged.strategies import specs
from ragged_attention.testing.rounded_weights import allowance
from ragged_attention.testing.runner import Runner

LENGTHS = ((1, 5), (1, 0), (1, 37), (1, 1), (1, 16))
ALL = {"poison": "nan", "garbage": True}


def _paged(lens: tuple[tuple[int, int], ...] = LENGTHS, scaled: bool = True, **fields: Any) -> PagedSpec:
    return PagedSpec(spec=Spec(lens=lens, **fields), scaled=scaled)


def _chunk(length: int, chunk: int, align: str = "chunk", given: str = "array", **fields: Any) -> ChunkSpec:
    return ChunkSpec(spec=Spec(lens=(), **fields), length=length, chunk=chunk, align=align, given=given)


_CACHES = {
    f"{cache_dtype} pages, {dtype} queries": {
        "cache_dtype": cache_dtype, "dtype": dtype, "num_kv_heads": 2, "group": 2, "page_size": page_size, **ALL,
    }
    for cache_dtype, dtype, page_size in (
        ("int8", "bfloat16", 4), ("int8", "float32", 3), ("float8_e4m3fn", "bfloat16", 16),
        ("float8_e5m2", "float16", 5), ("float8_e4m3fnuz", "bfloat16", 8),
    )
}  # fmt: skip

PAGED: dict[str, PagedSpec] = {
    "one key": _paged(((1, 1),)),
    "lengths of every kind": _paged(num_kv_heads=2, group=2, **ALL),
    "no keys at all": _paged(((1, 0), (1, 0)), **ALL),
    "no keys first and last": _paged(((1, 0), (1, 9), (1, 0), (1, 0), (1, 20), (1, 0)), num_kv_heads=2, **ALL),
    "no sequences": _paged(()),
    "a long sequence": _paged(((1, 700), (1, 3)), page_size=16, num_kv_heads=2, group=4, dtype="bfloat16", **ALL),
    "soft cap": _paged(soft_cap=2.0, group=4, **ALL),
    "sm_scale negative": _paged(sm_scale=-0.3, group=3),
    "sm_scale 0": _paged(sm_scale=0.0),
    "page size 1": _paged(page_size=1, spare_columns=2, **ALL),
    "page size 3": _paged(page_size=3, group=5, spare_columns=3, dtype="float16", **ALL),
    "page size 128": _paged(page_size=128, dtype="bfloat16", group=8, **ALL),
    "three KV heads": _paged(num_kv_heads=3, group=2, dtype="bfloat16", **ALL),
    "GQA ratio 24": _paged(group=24, **ALL),
    **{f"head_dim {d}": _paged(head_dim=d, dtype="bfloat16", group=2, **ALL) for d in (24, 64, 80, 128, 192, 256)},
    "infinity in all that is unread": _paged(poison="inf", garbage=True, group=2),
    "invalid page indices": _paged(invalid_pages=True, page_size=2, **ALL),
    "shared prefix": _paged(((1, 30), (1, 25), (1, 18)), sharing="prefix", garbage=True),
    "one page repeated": _paged(((1, 30), (1, 25)), sharing="repeat"),
    "strided": _paged(strided=True, num_kv_heads=2, group=2, dtype="bfloat16"),
    **{name: _paged(**fields) for name, fields in _CACHES.items()},
    "8-bit pages without scales": _paged(cache_dtype="float8_e4m3fn", dtype="bfloat16", group=2, scaled=False, **ALL),
    "quantised, soft cap": _paged(cache_dtype="int8", dtype="bfloat16", soft_cap=3.0, sm_scale=-0.4, group=4),
    "quantised, long": _paged(((1, 600), (1, 77)), cache_dtype="int8", page_size=16, group=8, dtype="bfloat16", **ALL),
    "quantised, invalid page indices": _paged(cache_dtype="int8", invalid_pages=True, page_size=2, **ALL),
    "quantised, strided": _paged(cache_dtype="float8_e5m2", strided=True, num_kv_heads=2, dtype="float16"),
}  # fmt: skip

CHUNKS: dict[str, ChunkSpec] = {
    "the first chunk": _chunk(8, 8, num_kv_heads=2, group=2, **ALL),
    "a later chunk": _chunk(24, 8, num_kv_heads=2, group=2, **ALL),
    "a partial chunk": _chunk(21, 8, num_kv_heads=2, group=2, **ALL),
    "a partial first chunk": _chunk(3, 8, group=3, **ALL),
    "one row of a chunk": _chunk(17, 8, **ALL),
    "a chunk of one": _chunk(13, 1, group=4, **ALL),
    "no length": _chunk(0, 4, **ALL),
    "no rows": _chunk(9, 0),
    "chunk not a multiple of the page": _chunk(22, 7, page_size=4, num_kv_heads=2, dtype="bfloat16", **ALL),
    "page size 3": _chunk(20, 8, page_size=3, num_kv_heads=3, spare_columns=3, **ALL),
    "page size 128": _chunk(100, 64, page_size=128, dtype="bfloat16", group=2, **ALL),
    "at the end": _chunk(21, 8, "end", num_kv_heads=2, group=2, **ALL),
    "at the end of a short sequence": _chunk(3, 8, "end", num_kv_heads=2, group=2, **ALL),
    "at the end of nothing": _chunk(0, 4, "end", **ALL),
    "at the end, as the chunk stands": _chunk(16, 8, "end", **ALL),
    "length an int": _chunk(21, 8, given="int", **ALL),
    "length a scalar": _chunk(21, 8, given="scalar", **ALL),
    "window of 1": _chunk(21, 8, sliding_window=1, **ALL),
    "window": _chunk(45, 16, sliding_window=6, group=3, **ALL),
    "window at the end": _chunk(45, 16, "end", sliding_window=6, group=3, **ALL),
    "window longer than all": _chunk(21, 8, sliding_window=2**31 - 1),
    "soft cap": _chunk(21, 8, soft_cap=2.0, group=2, **ALL),
    "soft cap and window": _chunk(30, 16, soft_cap=0.5, sliding_window=5, sm_scale=-0.5),
    "many rows": _chunk(300, 128, page_size=16, group=2, num_kv_heads=2, dtype="bfloat16", **ALL),
    "invalid page indices": _chunk(21, 8, invalid_pages=True, page_size=2, **ALL),
    "one page repeated": _chunk(21, 8, sharing="repeat"),
    "strided": _chunk(21, 8, strided=True, num_kv_heads=2, dtype="bfloat16", spare_columns=1),
    **{f"head_dim {d}": _chunk(21, 8, head_dim=d, dtype="bfloat16", group=2, **ALL) for d in (24, 80, 128, 256)},
    **{name: _chunk(21, 8, **fields) for name, fields in _CACHES.items()},
    "quantised at the end, window": _chunk(21, 8, "end", cache_dtype="int8", sliding_window=5, group=2, **ALL),
    "quantised, strided": _chunk(21, 8, cache_dtype="float8_e5m2", strided=True, num_kv_heads=2, dtype="float16"),
}


def _out_of_range() -> PagedBatch:
    """A batch with invalid lengths, for which the results are still defined."""
    batch = _paged(num_kv_heads=2).build()
    return batch.change(lengths=np.array([-1, INT32.max, 37, INT32.min, 1000], np.int32))


def _chunk_of_length(length: int, align: str) -> Callable[[], ChunkBatch]:
    return lambda: _chunk(21, 8, align).build().change(length=np.array([length], np.int32))


PAGED_CORNERS: dict[str, Callable[[], PagedBatch]] = {
    **{name: spec.build for name, spec in PAGED.items()},
    "lengths out of range": _out_of_range,
    "tables without columns": lambda: _paged().build().change(page_indices=np.zeros((len(LENGTHS), 0), np.int32)),
    "a cache without pages": lambda: _paged().build().changed_pages(lambda pages: pages[:, :0]),
}
CHUNK_CORNERS: dict[str, Callable[[], ChunkBatch]] = {
    **{name: spec.build for name, spec in CHUNKS.items()},
    **{
        f"length {length}, align {align}": _chunk_of_length(length, align)
        for length in (-1, 1000, INT32.max, INT32.min)
        for align in ("chunk", "end")
    },
    "a table without columns": lambda: _chunk(21, 8).build().change(page_indices=np.zeros(0, np.int32)),
}
PATHS_OF_PAGED = ("lengths of every kind", "a long sequence", "no keys first and last", "int8 pages, bfloat16 queries")
PATHS_OF_CHUNKS = ("a partial chunk", "many rows", "window", "int8 pages, bfloat16 queries")


@st.composite
def paged_specs(draw: st.DrawFn, *, clean: bool = False) -> PagedSpec:
    """Any valid `paged_attention` call."""
    spec = draw(specs(clean=clean))
    scaled = spec.cache_dtype == "int8" or draw(st.sampled_from([True, True, False]))
    return PagedSpec(spec=spec, scaled=scaled)


@st.composite
def chunk_specs(draw: st.DrawFn, *, clean: bool = False) -> ChunkSpec:
    """Any valid `prefill_attention` call."""
    spec = draw(specs(clean=clean))
    return ChunkSpec(
        spec=spec,
        length=draw(st.sampled_from([0, 1, 7, 8, 16]) | st.integers(0, 70)),
        chunk=draw(st.sampled_from([1, 4, 8, 8, 13, 40])),
        align=draw(st.sampled_from(["chunk", "chunk", "end"])),
        given=draw(st.sampled_from(["int", "array", "scalar"])),
        scaled=spec.cache_dtype == "int8" or draw(st.sampled_from([True, True, False])),
    )


# ---- laws


def heads_first_is_a_matter_of_layout(runner: Runner, spec: PagedSpec) -> None:
    """Paged attention equals ragged attention over transposed pages, with one query per sequence."""
    spec = dataclasses.replace(spec, scaled=False)
    batch = spec.ragged()
    batch = batch.change(**dict.fromkeys(("k_scale", "v_scale"), 1.0 if batch.cache_dtype == "int8" else None))
    out, _ = runner.run("ragged_paged_attention", batch, return_lse=True)
    rounding = allowance(runner, batch, batch)
    agrees(runner.run("paged_attention", spec.build()), out, batch.kind, allowance=rounding)


def the_last_row_is_a_decode(runner: Runner, spec: ChunkSpec) -> None:
    """The result for a chunk's last row that is not padding equals that of paged attention for this query."""
    spec = dataclasses.replace(spec, align="chunk", spec=dataclasses.replace(spec.spec, sliding_window=None))
    batch = spec.build()
    if not batch.live:
        return
    names = ("k_pages", "v_pages", "sm_scale", "soft_cap", "dtype", "cache_dtype", "strided")
    last = PagedBatch(
        q=batch.q[batch.live - 1 : batch.live],
        page_indices=batch.page_indices[None],
        lengths=np.array([spec.length], np.int32),
        **{name: getattr(batch, name) for name in names},
    )
    agrees(
        runner.run("prefill_attention", batch)[batch.live - 1 : batch.live],
        runner.run("paged_attention", last),
        batch.kind,
        allowance=allowance(runner, last, last),
    )


def alignments_meet(runner: Runner, spec: ChunkSpec) -> None:
    """A chunk's results are equal with align="chunk" and align="end" if its rows are rolled to the same positions."""
    batch = dataclasses.replace(spec, align="chunk").build()
    live = batch.live
    ended = batch.change(q=np.roll(np.nan_to_num(batch.q), -live, axis=0), align="end")
    out, at_end = runner.run("prefill_attention", batch), runner.run("prefill_attention", ended)
    rounding = np.broadcast_to(allowance(runner, batch, batch), out.shape)[:live]
    agrees(out[:live], at_end[len(batch.q) - live :], batch.kind, allowance=rounding)
    identical(out[live:], np.zeros_like(out[live:]), "rows past the length")


def scaled_pages_are_their_values(runner: Runner, spec: PagedSpec) -> None:
    """Quantised pages give the same results as their dequantised values."""
    cached = spec.spec.cache_dtype if spec.spec.cache_dtype in formats.QUANTIZED else "int8"
    batch = PagedSpec(spec=dataclasses.replace(spec.spec, cache_dtype=cached)).build().change(dtype="float32")
    wide = batch.widened()
    rounding = allowance(runner, batch, wide)
    agrees(runner.run("paged_attention", batch), runner.run("paged_attention", wide), batch.kind, allowance=rounding)


Law = tuple[Callable[[Runner, Any], None], st.SearchStrategy[Any]]
HEADS_FIRST_LAWS: dict[str, Law] = {
    "heads-first pages are a matter of layout": (heads_first_is_a_matter_of_layout, paged_specs(clean=True)),
    "the last row of a chunk is a decode": (the_last_row_is_a_decode, chunk_specs(clean=True)),
    "a chunk at its place and one at the end meet": (alignments_meet, chunk_specs(clean=True)),
    "pages with scales are their values": (scaled_pages_are_their_values, paged_specs(clean=True)),
}

# ---- garbage in index arrays, for `safety`


def _wild_paged(runner: Runner, seed: int, options: Mapping[str, Any]) -> None:
    rng = np.random.default_rng(seed)
    batch = PagedSpec(spec=_wild_spec(rng, seed, ((1, 9), (1, 0), (1, 21)))).build()
    lengths = garbage(rng, batch.lengths.shape, 40) if rng.random() < 0.7 else batch.lengths
    tables = garbage(rng, batch.page_indices.shape, 20) if rng.random() < 0.7 else batch.page_indices
    _expect_finite(runner.run("paged_attention", batch.change(lengths=lengths, page_indices=tables), options=options))


def _wild_chunk(runner: Runner, seed: int, options: Mapping[str, Any]) -> None:
    rng = np.random.default_rng(seed)
    align, spec = str(rng.choice(["chunk", "end"])), _wild_spec(rng, seed, ())
    batch = ChunkSpec(spec=spec, length=int(rng.integers(0, 30)), chunk=int(rng.choice([1, 5, 8])), align=align).build()
    length = garbage(rng, 1, 40) if rng.random() < 0.7 else batch.length
    tables = garbage(rng, batch.page_indices.shape, 20) if rng.random() < 0.7 else batch.page_indices
    _expect_finite(runner.run("prefill_attention", batch.change(length=length, page_indices=tables), options=options))


def _wild_spec(rng: np.random.Generator, seed: int, lens: tuple[tuple[int, int], ...]) -> Spec:
    return Spec(
        lens=lens,
        page_size=int(rng.choice([1, 2, 3, 8])),
        num_kv_heads=int(rng.choice([1, 2])),
        group=int(rng.choice([1, 3])),
        head_dim=int(rng.choice([16, 24, 80])),
        dtype=str(rng.choice(["float32", "bfloat16", "float16"])),
        cache_dtype=[None, None, "float8_e4m3fn", "float8_e4m3fnuz", "int8"][int(rng.integers(0, 5))],
        sliding_window=[None, 1, 5][int(rng.integers(0, 3))],
        strided=bool(rng.random() < 0.3),
        seed=seed,
    )


def _expect_finite(out: np.ndarray) -> None:
    if not np.isfinite(out).all():
        raise AssertionError("expected finite outputs from finite inputs, got others")


GARBAGE: tuple[tuple[str, Callable[[Runner, int, Mapping[str, Any]], None]], ...] = (
    ("paged_attention", _wild_paged),
    ("prefill_attention", _wild_chunk),
)

# ---- the checks


def corners() -> Iterator[Check]:
    """Checks that run every named batch with the backend's own options, and some with each set of options."""
    for name, build in PAGED_CORNERS.items():
        yield Check("corner", f"paged decode, {name}", on_corner(check_paged, build))
    for name, build in CHUNK_CORNERS.items():
        yield Check("corner", f"chunked prefill, {name}", on_corner(check_chunk, build))
    for name in PATHS_OF_PAGED:
        run = on_every_path("paged_attention", check_paged, PAGED_CORNERS[name])
        yield Check("corner", f"paged decode on every path, {name}", run)
    for name in PATHS_OF_CHUNKS:
        run = on_every_path("prefill_attention", check_chunk, CHUNK_CORNERS[name])
        yield Check("corner", f"chunked prefill on every path, {name}", run)


def agreement() -> Iterator[Check]:
    """Checks that compare drawn batches with the reference."""
    yield Check(
        "agreement", "paged decode on drawn batches", on_drawn_paths("paged_attention", check_paged, paged_specs())
    )
    yield Check(
        "agreement", "chunked prefill on drawn batches", on_drawn_paths("prefill_attention", check_chunk, chunk_specs())
    )


def laws() -> Iterator[Check]:
    """Checks of properties that need no reference result."""
    for name, (law, strategy) in HEADS_FIRST_LAWS.items():
        yield Check("law", name, on_drawn(law, strategy, 0.3))
