"""Checks of attention and writes over caches with scales for each row or for blocks of its columns."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ragged_attention.testing import formats
from ragged_attention.testing.compare import agrees
from ragged_attention.testing.drawing import Check, built, on_corner, on_drawn, on_drawn_paths
from ragged_attention.testing.paged import laws as paged_laws
from ragged_attention.testing.paged.corners import ALL_EDGES, MIXED
from ragged_attention.testing.paged.oracle import check_attention, check_write
from ragged_attention.testing.paged.specs import Batch, Spec, WriteBatch, by_q_head
from ragged_attention.testing.paged.strategies import scaled_specs, scaled_write_specs, write_batch
from ragged_attention.testing.rounded_weights import allowance
from ragged_attention.testing.runner import Runner
from ragged_attention.testing.selected import Selection

SHORT: dict[str, Any] = {"lens": MIXED}
LONG: dict[str, Any] = {"lens": ((1, 700), (1, 3)), "page_size": 16}


def _of(name: str, /, **fields: Any) -> Spec:
    """A spec whose keys and values have the named format."""
    width = 32 if formats.KV_FORMATS[name].group > 16 else 16
    return Spec(**{**SHORT, "head_dim": width, "num_kv_heads": 2, "stored": (name, name), **fields})


_OF_EACH: dict[str, dict[str, Any]] = {
    "bfloat16 queries": {"dtype": "bfloat16", "poison": "nan", "garbage": True, "group": 2},
    "float16 queries": {"dtype": "float16", "poison": "inf", "combined": False, "sliding_window": 5, "padding": 2},
    "float32 queries, any scales": {"wild": True, "scales": "heads", "strided": True, "page_size": 3},
    "a long decode": {**LONG, "dtype": "bfloat16", "group": 4, "scales": "float", "poison": "nan"},
    "a prefill of more rows than a tile": {
        "lens": ((100, 130),), "page_size": 16, "group": 2, "dtype": "bfloat16", "head_dim": 64, "wild": True,
        "poison": "nan",
    },
    "lists of blocks": {"selection": Selection(kind="few", size=8), "dtype": "bfloat16", "poison": "nan"},
}  # fmt: skip
_PAIRS: dict[str, Spec] = {
    "bfloat16 beside int8": Spec(**SHORT, stored=("int8_token_head", "bfloat16"), dtype="bfloat16", poison="nan"),
    "int8 without scale pages beside nvfp4": Spec(
        **SHORT, stored=("int8", "nvfp4"), dtype="float16", scales="float", group=4, wild=True
    ),
    "int4 beside mxfp8": Spec(
        **SHORT, stored=("int4_token_head", "mxfp8"), head_dim=64, dtype="bfloat16", strided=True
    ),
    "float32 beside int4": Spec(**LONG, stored=("float32", "int4_token_head"), num_kv_heads=2, poison="inf"),
    "e4m3 beside e5m2": Spec(**SHORT, stored=("float8_e4m3fn", "float8_e5m2"), dtype="bfloat16", scales="heads"),
    "int8 beside bfloat16, no scale pages": Spec(**SHORT, stored=("int8", "bfloat16"), dtype="bfloat16", group=2),
    "nvfp4 of a wide head beside a narrow one": Spec(
        **SHORT, stored=("nvfp4", "nvfp4"), combined=False, head_dim=192, v_head_dim=128, dtype="bfloat16", group=2
    ),
    "every edge at once": Spec(
        lens=ALL_EDGES, count="array", spare_seqs=2, padding=3, poison="nan", garbage=True, soft_cap=3.0,
        stored=("e4m3_token_head", "int4_token_head"), sinks="mixed", alibi="mixed", dtype="bfloat16",
    ),
    "a draft tree": Spec(
        lens=((5, 40), (3, 3), (1, 9)), draft=6, group=4, stored=("mxfp4", "int8_token_head"), head_dim=32,
        poison="nan", dtype="bfloat16",
    ),
    "ranges, pages missing": Spec(
        **SHORT, ranges="few", stored=("nvfp4", "mxfp4"), head_dim=32, invalid_pages=True, poison="nan", page_size=2,
    ),
}  # fmt: skip


def special_write(name: str) -> WriteBatch:
    """A write of rows with NaN, infinities, zeros of both signs, elements of only one sign, and rounding ties."""
    write = write_batch(_of(name, lens=((9, 9),), head_dim=32), by_tables=True)
    k, v = write.k.copy(), np.zeros_like(write.v)
    k[0, 0, 3], k[1, :, 5], k[2, 1, 7], k[3] = np.nan, np.inf, -np.inf, 0.0
    k[3, 1, 1::2] = -0.0
    k[4] = np.where(np.arange(32) % 2, -0.0, 1e-30)
    k[5, :, 0], k[5, :, 1:] = 127.0, np.arange(31) - 15.5
    k[6, :, 0], k[6, :, 1:] = 6.0, np.arange(31) / 4 - 3.75
    k[7] = np.abs(k[7]) + 3
    k[8], v[8] = -np.abs(k[8]) - 5, 3.3e38
    return write.change(k=k, v=v)


WRITES: dict[str, Callable[[], WriteBatch]] = {
    **{f"{name}, by tables": lambda name=name: write_batch(_of(name), by_tables=True) for name in formats.SCALED},
    **{
        f"{name}, by slots": lambda name=name: write_batch(
            _of(name, dtype="bfloat16", combined=False, strided=True, head_dim=96)
        )
        for name in formats.SCALED
    },
    **{f"{name}, special values": lambda name=name: special_write(name) for name in formats.SCALED},
    **{
        f"{name}, {scale} beside scale pages": lambda name=name, scale=scale: write_batch(
            _of(name, dtype="float16"), reach=50.0
        ).change(k_scale=scale, v_scale=np.array([2.0, 0.125], np.float32))
        for name, scale in zip(formats.SCALED, (0.5, 4.0) * len(formats.SCALED), strict=False)
    },
    "bfloat16 beside int8": lambda: write_batch(_PAIRS["bfloat16 beside int8"], by_tables=True),
    "int8 beside nvfp4": lambda: write_batch(
        dataclasses.replace(_PAIRS["int8 without scale pages beside nvfp4"], scales=None), by_tables=True
    ),
    "every edge at once": lambda: write_batch(_PAIRS["every edge at once"], by_tables=True),
    "no tokens": lambda: write_batch(_of("nvfp4", lens=((0, 5), (0, 0))), by_tables=True),
}


def garbage_reaches_who_sees_it(runner: Runner, spec: Spec) -> None:
    """A NaN or infinite scale changes only the rows of queries that see its position.

    If the scales are NaN, these rows become NaN: in all columns if keys have scales, else in at least one column.
    """
    batch, rng = spec.build(), np.random.default_rng(spec.seed)
    bad = rng.random((batch.num_pages, batch.page_size, batch.num_kv_heads)) < 0.1
    dirty, kind = batch, str(rng.choice(["nan", "inf"]))
    for side in "kv":
        scales, form = getattr(batch, f"{side}_scale_pages"), batch.formats[f"{side}_format"]
        if scales is not None:
            garbage = formats.poisoned_scales(kind, form, scales.shape)
            dirty = dirty.change(**{f"{side}_scale_pages": np.where(bad[..., None], garbage, scales)})
    clean = ~_rows_that_see(batch, bad)
    out, lse = runner.run(batch.OPERATION, dirty, return_lse=True)
    want, want_lse = runner.run(batch.OPERATION, batch, return_lse=True)
    rounding = np.broadcast_to(allowance(runner, batch, batch), out.shape)[clean]
    agrees(out[clean], want[clean], batch.kind, "out of rows that see no garbage", allowance=rounding)
    agrees(lse[clean], want_lse[clean], f"lse {batch.kind}", "lse of rows that see no garbage")
    if kind == "nan" and not batch.fully_masked()[~clean].any():
        in_all = batch.formats["k_format"].scaled
        hit = np.isnan(out[~clean])
        if not (hit.all() if in_all else hit.any(axis=1).all()):
            raise AssertionError(f"out of rows that see NaN: expected NaN in {'all' if in_all else 'some'} columns")


def _rows_that_see(batch: Batch, bad: np.ndarray) -> np.ndarray:
    """Whether a query head sees a `bad` slot of its KV head, bool [T, H]."""
    rows = np.zeros(batch.q.shape[:2], bool)
    flat = bad.reshape(-1, batch.num_kv_heads)
    for seq, (start, stop) in enumerate(batch.bounds()):
        slots = np.clip(batch.slots(seq), 0, len(flat) - 1)
        seen = np.broadcast_to(batch.seen(seq), (batch.num_kv_heads, stop - start, len(slots)))
        rows[start:stop] = by_q_head((seen & flat[slots].T[:, None]).any(axis=2), batch.q.shape[1])
    return rows


LAWS: dict[str, paged_laws.Law] = {
    "what no query sees takes no part": paged_laws.unseen_takes_no_part,
    "pages may move": paged_laws.pages_may_move,
    "pages may be shared": paged_laws.pages_may_be_shared,
    "sequences do not mix": paged_laws.sequences_do_not_mix,
    "the output is a mixture of the values": paged_laws.output_is_a_mixture,
    "a quantised cache is its dequantised values": paged_laws.quantised_is_dequantised,
    "garbage reaches who sees it": garbage_reaches_who_sees_it,
}


def corners() -> Iterator[Check]:
    for name in formats.SCALED:
        for what, fields in _OF_EACH.items():
            build = lambda name=name, fields=fields: _of(name, **fields).build()  # noqa: E731
            yield Check("corner", f"attention over scale pages, {name}, {what}", on_corner(check_attention, build))
    for name, spec in _PAIRS.items():
        yield Check("corner", f"attention over scale pages, {name}", on_corner(check_attention, spec.build))
    for name, build_write in WRITES.items():
        yield Check("corner", f"write of scale pages, {name}", on_corner(check_write, build_write))


def agreement() -> Iterator[Check]:
    yield Check(
        "agreement", "attention over scale pages on drawn batches",
        on_drawn_paths("ragged_paged_attention", check_attention, scaled_specs()),
    )  # fmt: skip
    yield Check(
        "agreement", "write of scale pages on drawn batches", on_drawn(built(check_write), scaled_write_specs, 0.5)
    )


def laws() -> Iterator[Check]:
    for name, law in LAWS.items():
        yield Check("law", f"over scale pages: {name}", on_drawn(law, scaled_specs(clean=True), 0.3))
