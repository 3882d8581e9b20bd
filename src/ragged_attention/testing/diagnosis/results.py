"""The results of any attention call in a common shape, and variants of a call with other caches or queries."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragged_attention.testing import formats
from ragged_attention.testing.compare import agrees
from ragged_attention.testing.diagnosis.forms import Form, Results, attended, form_of
from ragged_attention.testing.functions import RESULTS
from ragged_attention.testing.heads_first.specs import HeadsFirstArrays
from ragged_attention.testing.mla import latents
from ragged_attention.testing.mla.ragged import RaggedLatentBatch
from ragged_attention.testing.mla.specs import DecodeBatch, PrefillBatch
from ragged_attention.testing.paged.specs import RaggedTables
from ragged_attention.testing.rounded_weights import Allowance
from ragged_attention.testing.runner import Runner
from ragged_attention.testing.varlen.specs import VarlenBatch

LARGE = 128.0  # the least magnitude of the largest logit in `enlarged`; exp overflows in float32 at 89
MOST = 2.0**15  # the largest magnitude of a query element; float16's range ends at twice this


def results(runner: Runner, batch: Any, options: Mapping[str, Any]) -> Results:
    """A backend's results for a batch, by name, with a row for each query."""
    keywords = {"return_lse": True} if isinstance(batch, (RaggedTables, VarlenBatch)) else {}
    return _named(runner.run(batch.OPERATION, batch, options=options, **keywords), batch)


def expected(batch: Any) -> Results:
    """The reference's results for a batch, by name, with a row for each query."""
    return _named(batch.expected(), batch)


def _named(returned: Any, batch: Any) -> Results:
    if isinstance(batch, HeadsFirstArrays):
        return {"out": returned}
    named: Results = dict(zip(RESULTS[batch.OPERATION], returned, strict=True))
    if isinstance(batch, DecodeBatch):  # out [S, Q, H, d_v] and lse [S, H, Q]
        out, lse = named["out"], named["lse"]
        lse = np.swapaxes(lse, 1, 2) if lse.ndim == 3 else lse
        named = {"out": out.reshape(-1, *out.shape[2:]), "lse": lse.reshape(-1, lse.shape[2])}
    return named


def kind_of(name: str, batch: Any) -> str:
    """The kind of bounds in `compare` for a result of a batch."""
    if isinstance(batch, (DecodeBatch, PrefillBatch)):
        return f"{'decode' if isinstance(batch, DecodeBatch) else 'prefill'} {name}"
    if isinstance(batch, VarlenBatch) and batch.dtype != "float32":
        return f"varlen {name}"
    return batch.kind if name == "out" else f"lse {batch.kind}"


def expect_agreement(
    got: Results, want: Results, batch: Any, rounding: Allowance = 0.0, of_logits: float = 0.0
) -> None:
    """Raise AssertionError unless results agree within the bounds of the suite.

    Out may additionally be wrong by `rounding`, and other results by `of_logits`.
    """
    of_out = np.reshape(rounding, got["out"].shape) if np.ndim(rounding) and "out" in got else rounding
    for name, array in got.items():
        agrees(array, want[name], kind_of(name, batch), name, allowance=of_out if name == "out" else of_logits)


def agree(got: Results, want: Results, batch: Any, rounding: Allowance = 0.0) -> bool:
    """Whether results agree within the bounds of `expect_agreement`."""
    try:
        expect_agreement(got, want, batch, rounding)
    except AssertionError:
        return False
    return True


# ---- other caches


def moved(batch: Any, order: NDArray[np.int64], sizes: tuple[int, ...]) -> Any:
    """The batch with its cache slots permuted: slot i has the old contents of slot `order[i]`.

    A cache for which `order` is -1 everywhere is filled with zeros. No array has strides of 0 any more.
    """
    batch = batch.change(expanded={})

    def taken(cache: NDArray[Any], format: str = "plain", start: int = 0) -> NDArray[Any]:
        slots = order[start : start + cache.shape[0] * cache.shape[1]] - start
        if (order[start : start + len(slots)] < 0).all():
            return np.zeros_like(cache)
        return latents.repaged(cache, format, slots, cache.shape[1])

    if isinstance(batch, VarlenBatch):
        return batch.change(**{name: taken(getattr(batch, name)[:, None])[:, 0] for name in ("k", "v")})
    if isinstance(batch, HeadsFirstArrays):
        return batch.changed_pages(lambda pages: np.moveaxis(taken(np.moveaxis(pages, 0, 2)), 2, 0))
    if isinstance(batch, RaggedTables):
        format = batch.format if isinstance(batch, RaggedLatentBatch) else "plain"
        return batch.with_pages([taken(pages, format) for pages in batch.pages])
    selections = batch.selections() if isinstance(batch, DecodeBatch) else (batch.selection,)
    starts = np.cumsum([0, *sizes])
    return batch.change(
        **{
            each.name: taken(each.cache, each.format, start).reshape(getattr(batch, each.name).shape)
            for each, start in zip(selections, starts, strict=False)
        }
    )


def with_other_values(batch: Any, form: Form, where: NDArray[np.bool_], seed: int = 0) -> Any:
    """The batch with the slots in `where` overwritten by the contents of slots that some query sees.

    If a cache has no such slots, it is filled with zeros if `where` has all of its slots, and else unchanged.
    """
    rng, order, start = np.random.default_rng(seed), np.arange(len(where)), 0
    read, sizes = form.read(), form.sizes
    for size in sizes:
        slots = slice(start, start + size)
        if (sources := np.flatnonzero(read[slots])).size:
            order[slots] = np.where(where[slots], start + rng.choice(sources, size), order[slots])
        elif where[slots].all():
            order[slots] = -1
        start += size
    return moved(batch, order, sizes)


def finite_queries(batch: Any) -> Any:
    """The batch with NaN and infinities in q replaced by finite numbers."""
    return batch.change(q=np.nan_to_num(batch.q, posinf=0.0, neginf=0.0))


def with_queries(batch: Any, q: NDArray[Any]) -> Any:
    """The batch with the queries `q` [T, H, D], rounded to its dtype."""
    return batch.change(q=formats.rounded(q.reshape(batch.q.shape), batch.q_dtype or batch.dtype))


def enlarged(batch: Any) -> tuple[Any, float] | None:
    """The batch with queries multiplied by a power of two, and its largest logit.

    None for 8-bit queries, for logits that are nearly 0, and if the queries would become too large.
    """
    if batch.q_dtype is not None:  # 8-bit queries have too small a range
        return None
    # A soft cap limits large logits, and a sink may take all weight from small ones.
    batch = batch.change(**{name: None for name in ("soft_cap", "sinks") if getattr(batch, name, None) is not None})
    form = form_of(batch)
    assert form is not None
    logits = attended(form)["max_logits"]
    largest = float(np.abs(logits[np.isfinite(logits)]).max(initial=0.0))
    if largest < 2.0**-6:
        return None
    factor = max(2.0 ** np.ceil(np.log2(LARGE / largest)), 1.0)
    q = (batch.q * factor).astype(np.float32)
    return None if np.abs(q).max() > MOST else (batch.change(q=q), largest * factor)
