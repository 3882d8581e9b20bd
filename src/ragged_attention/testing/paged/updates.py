"""Checks of attention calls that also write the step's new keys and values."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ragged_attention.testing import compare, formats
from ragged_attention.testing.drawing import Check, drawn
from ragged_attention.testing.paged.corners import ALL_EDGES, MIXED
from ragged_attention.testing.paged.oracle import expect_results
from ragged_attention.testing.paged.specs import Spec, WriteBatch, pages_of
from ragged_attention.testing.paged.strategies import coded, specs, write_batch
from ragged_attention.testing.runner import Runner

# The option to write and attend in one kernel. Backends without it, or calls without it, use two kernels.
FUSED = {"fused_update": True}

UPDATES: dict[str, Spec] = {
    "decode": Spec(lens=((1, 40), (1, 1), (1, 16)), group=4, num_kv_heads=2, dtype="bfloat16"),
    "a step of every kind": Spec(lens=MIXED, num_kv_heads=2, group=2),
    "every edge at once": Spec(lens=ALL_EDGES, count="array", spare_seqs=2, padding=3, garbage=True),
    "num_seqs an int": Spec(lens=MIXED, count="int", spare_seqs=2, padding=1, garbage=True),
    "no query at all": Spec(lens=((0, 9), (0, 0)), garbage=True),
    "into a pair": Spec(lens=MIXED, combined=False, v_head_dim=40, dtype="bfloat16", num_kv_heads=2),
    "page size 3": Spec(lens=MIXED, page_size=3, head_dim=24, dtype="float16", sinks="normal"),
    "page size 1": Spec(lens=MIXED, page_size=1, garbage=True),
    "one KV head, head_dim 128": Spec(lens=MIXED, page_size=16, head_dim=128, group=8, dtype="bfloat16"),
    "a long prefill": Spec(lens=((100, 130), (40, 40)), page_size=16, group=2, num_kv_heads=2, dtype="bfloat16"),
    "window": Spec(lens=((1, 60), (9, 33)), sliding_window=4, num_kv_heads=2),
    "not causal": Spec(lens=MIXED, causal=False, num_kv_heads=2),
    "float8_e4m3fn": Spec(lens=MIXED, cache_dtype="float8_e4m3fn", dtype="bfloat16", scales="heads", num_kv_heads=2),
    "float8_e5m2": Spec(lens=MIXED, cache_dtype="float8_e5m2", scales="float", combined=False),
    "float8_e4m3fnuz": Spec(lens=MIXED, cache_dtype="float8_e4m3fnuz", dtype="bfloat16", scales="float"),
    "int8": Spec(lens=MIXED, cache_dtype="int8", dtype="bfloat16", scales="float", num_kv_heads=2),
    "invalid page indices": Spec(lens=MIXED, invalid_pages=True, garbage=True, page_size=2),
    "strided": Spec(lens=MIXED, strided=True, num_kv_heads=2, dtype="bfloat16"),
}


def check_update(
    runner: Runner, spec: Spec, options: Mapping[str, Any] | None = None, *, of_codes: bool = False
) -> None:
    """The pages have the same bits as after a separate write, and the attention sees them."""
    spec = dataclasses.replace(spec, sharing=None, poison=None)
    batch, new = spec.build(), _with_nan_where_nothing_goes(write_batch(spec, by_tables=True))
    if of_codes:
        new = coded(new, finite=True)
    out, lse, pages = runner.update(batch, new, options=options)
    for got, want in zip(pages_of(pages), pages_of(runner.run("write_kv_pages", new)), strict=True):
        compare.identical(got, want, "pages")
    expect_results(runner, batch, (out, lse), batch.change(kv_pages=pages))


def _with_nan_where_nothing_goes(new: WriteBatch) -> WriteBatch:
    """The write with NaN in padding rows."""
    tables = new.cu_q_lens, new.num_seqs
    assert tables[0] is not None
    count = len(tables[0]) - 1 if tables[1] is None else int(np.asarray(tables[1]).reshape(()))
    k, v = new.k.copy(), new.v.copy()
    k[tables[0][count] :], v[tables[0][count] :] = np.nan, np.nan
    return new.change(k=k, v=v)


def _paths(runner: Runner) -> list[Mapping[str, Any]]:
    return [{}, *([FUSED] if "fused_update" in runner.tunables("ragged_paged_attention") else [])]


def _on_each_path(spec: Spec, *, of_codes: bool = False) -> Callable[[Runner, int], int]:
    def run(runner: Runner, examples: int) -> int:
        del examples
        for options in _paths(runner):
            check_update(runner, spec, options, of_codes=of_codes)
        return len(_paths(runner))

    return run


def _on_drawn(runner: Runner, examples: int) -> int:
    pairs = st.tuples(specs(), st.sampled_from(_paths(runner)))
    return drawn(runner, pairs, lambda pair: check_update(runner, *pair), max(1, examples // 2))


def corners() -> Iterator[Check]:
    """Checks that run every named update with the backend's own options and, if it offers `FUSED`, with that option."""
    for name, spec in UPDATES.items():
        yield Check("corner", f"update, {name}", _on_each_path(spec))
    for name in formats.QUANTIZED:
        yield Check("corner", f"update, codes of {name}", _on_each_path(UPDATES[name], of_codes=True))


def agreement() -> Iterator[Check]:
    yield Check("agreement", "update on drawn batches", _on_drawn)
