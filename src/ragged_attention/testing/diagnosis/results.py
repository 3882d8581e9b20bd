"""The results of a call in one shape for all attentions, and the same call over other caches."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragged_attention.testing import formats
from ragged_attention.testing.compare import agrees
from ragged_attention.testing.diagnosis.forms import Form, Results
from ragged_attention.testing.functions import DEFINITIONS, RESULTS
from ragged_attention.testing.heads_first.specs import HeadsFirstArrays, PagedBatch, expected_chunk, expected_paged
from ragged_attention.testing.mla import latents
from ragged_attention.testing.mla.ragged import RaggedLatentBatch
from ragged_attention.testing.mla.specs import DecodeBatch, PrefillBatch
from ragged_attention.testing.paged.specs import RaggedTables
from ragged_attention.testing.runner import Runner
from ragged_attention.testing.varlen.specs import VarlenBatch


def operation_of(batch: Any) -> str:
    """The operation whose arguments a batch of an attention has."""
    if isinstance(batch, HeadsFirstArrays):
        return "paged_attention" if isinstance(batch, PagedBatch) else "prefill_attention"
    return "mla_decode" if isinstance(batch, DecodeBatch) else batch.OPERATION


def results(runner: Runner, batch: Any, options: Mapping[str, Any]) -> Results:
    """What a backend computes for a batch, by names, with a row for each query."""
    asked = {"return_lse": True} if isinstance(batch, (RaggedTables, VarlenBatch)) else {}
    return _named(runner.run(operation_of(batch), batch, options=options, **asked), batch)


def expected(batch: Any) -> Results:
    """What the definition gives for a batch, in the same form."""
    if isinstance(batch, HeadsFirstArrays):
        definition: Any = expected_paged if isinstance(batch, PagedBatch) else expected_chunk
        return _named(definition(batch), batch)
    if isinstance(batch, RaggedTables):
        return _named(batch.expected(), batch)
    return _named(DEFINITIONS[operation_of(batch)](**batch.arguments()), batch)


def _named(found: Any, batch: Any) -> Results:
    if isinstance(batch, HeadsFirstArrays):
        return {"out": found}
    named: Results = dict(zip(RESULTS[operation_of(batch)], found, strict=True))
    if isinstance(batch, DecodeBatch):  # out [S, Q, H, d_v] and lse [S, H, Q]
        out, lse = named["out"], named["lse"]
        lse = np.swapaxes(lse, 1, 2) if lse.ndim == 3 else lse
        named = {"out": out.reshape(-1, *out.shape[2:]), "lse": lse.reshape(-1, lse.shape[2])}
    return named


def kind_of(name: str, batch: Any) -> str:
    """Which bounds hold for a result of a batch."""
    if isinstance(batch, (DecodeBatch, PrefillBatch)):
        return f"{'decode' if isinstance(batch, DecodeBatch) else 'prefill'} {name}"
    if isinstance(batch, VarlenBatch) and batch.dtype != "float32":
        return f"varlen {name}"
    return batch.kind if name == "out" else f"lse {batch.kind}"


def alike(got: Results, want: Results, batch: Any) -> bool:
    """Whether results agree within the bounds of the suite."""
    try:
        for name, array in got.items():
            agrees(array, want[name], kind_of(name, batch), name)
    except AssertionError:
        return False
    return True


# ---- other caches


def moved(batch: Any, order: NDArray[np.int64], sizes: tuple[int, ...]) -> Any:
    """The batch in which each slot of its caches holds what the slot in `order` held; arrays without strides of 0."""
    batch = batch.change(alike={})
    if isinstance(batch, VarlenBatch):
        return batch.change(k=batch.k[order], v=batch.v[order])
    if isinstance(batch, HeadsFirstArrays):
        size = batch.page_size
        return batch.changed_pages(
            lambda pages: np.moveaxis(latents.repaged(np.moveaxis(pages, 0, 2), "plain", order, size), 2, 0)
        )
    if isinstance(batch, RaggedTables):
        format = batch.format if isinstance(batch, RaggedLatentBatch) else "plain"
        return batch.with_pages([latents.repaged(pages, format, order, batch.page_size) for pages in batch.pages])
    caches, start = {}, 0
    for each, size in zip(
        batch.selections() if isinstance(batch, DecodeBatch) else (batch.selection,), sizes, strict=True
    ):
        own = order[start : start + size] - start
        new = latents.repaged(each.cache, each.format, own, each.cache.shape[1])
        caches[each.name] = new.reshape(getattr(batch, each.name).shape)
        start += size
    return batch.change(**caches)


def with_other_values(batch: Any, form: Form, where: NDArray[np.bool_], seed: int = 0) -> Any:
    """The batch in which some of its slots hold what slots hold that are read, and are finite therefore."""
    rng, order, start = np.random.default_rng(seed), np.arange(len(where)), 0
    read, sizes = form.read(), form.sizes
    for size in sizes:
        own = slice(start, start + size)
        if (sources := np.flatnonzero(read[own])).size:
            order[own] = np.where(where[own], start + rng.choice(sources, size), order[own])
        start += size
    return moved(batch, order, sizes)


def finite_queries(batch: Any) -> Any:
    """The batch with finite numbers in the rows of q that take no part."""
    return batch.change(q=np.nan_to_num(batch.q, posinf=0.0, neginf=0.0))


def with_queries(batch: Any, q: NDArray[Any]) -> Any:
    """The batch with other queries, [T, H, D]."""
    return batch.change(q=formats.rounded(q.reshape(batch.q.shape), batch.q_dtype or batch.dtype))
