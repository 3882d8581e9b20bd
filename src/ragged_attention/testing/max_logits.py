"""Checks of `max_logits`, the largest visible logit of each query head, which attention calls return on request."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from ragged_attention.testing.compare import agrees, identical
from ragged_attention.testing.drawing import Check, on_corner, on_drawn, on_drawn_paths, on_every_path
from ragged_attention.testing.mla.ragged import CORNERS as LATENT_CORNERS
from ragged_attention.testing.mla.ragged import ragged_specs
from ragged_attention.testing.paged.corners import CORNERS as PAGED_CORNERS
from ragged_attention.testing.paged.oracle import expect_results
from ragged_attention.testing.paged.strategies import specs
from ragged_attention.testing.rounded_weights import allowance
from ragged_attention.testing.runner import Runner
from ragged_attention.testing.varlen.corners import VARLENS
from ragged_attention.testing.varlen.oracle import varlen_agrees
from ragged_attention.testing.varlen.specs import VarlenBatch
from ragged_attention.testing.varlen.strategies import varlen_specs

REQUESTS: Mapping[str, Any] = {"return_lse": True, "return_max_logits": True}
PAGED = (
    "one key", "decode of a long sequence", "prefill of more rows than a tile", "mixed", "no query but padding",
    "no keys with sinks", "more queries than keys", "every edge at once", "a draft tree",
    "a draft mask with a window, sinks and a soft cap", "window of 1", "ranges over splits",
    "ranges with biases, sinks and a soft cap", "blocks of every edge", "blocks over splits", "blocks within ranges",
    "blocks with a draft tree", "blocks with biases, sinks and a soft cap", "blocks of an 8-bit cache, pages missing",
    "e4m3 queries, 8-bit cache", "small soft cap", "sm_scale negative", "sm_scale 0", "large logits", "sinks +inf",
    "ALiBi over splits", "a relative bias of each query", "invalid page indices", "GQA ratio 5", "bfloat16",
)  # fmt: skip
LATENTS = (
    "one key", "mixed", "decode of a long sequence", "prompt of more rows than a tile", "every edge at once",
    "num_seqs 0", "ranges over splits", "ranges without sense", "soft cap, window and sinks", "sm_scale negative",
    "invalid page indices", "two scales, soft cap, 40 heads", "two scales, DeepSeek V3", "fp8_v32",
    "fp8_v32, window and soft cap", "e4m3 queries of float16 rows", "128 heads",
)  # fmt: skip
PACKED = (
    "one key", "causal", "more queries than keys, causal", "empty on either side", "no sequences", "no keys",
    "several blocks", "several blocks, not causal", "window over blocks", "spans over blocks",
    "ranges with biases, sinks and a soft cap", "blocks over blocks", "blocks with biases, sinks and a soft cap",
    "soft cap", "sm_scale negative", "large logits", "sinks +inf", "ALiBi", "a relative bias of each query",
    "grouped heads", "512/512",
)  # fmt: skip
ON_EVERY_PATH = {
    "ragged_paged_attention": ("decode of a long sequence", "every edge at once", "blocks over splits", "large logits"),
    "ragged_mla_attention": ("decode of a long sequence", "mixed", "every edge at once"),
    "varlen_attention": ("several blocks", "blocks over blocks"),
}
BUILDERS: Mapping[str, Mapping[str, Any]] = {
    "ragged_paged_attention": {name: PAGED_CORNERS[name] for name in PAGED},
    "ragged_mla_attention": {name: LATENT_CORNERS[name] for name in LATENTS},
    "varlen_attention": {name: VARLENS[name].build for name in PACKED},
}
NAMES = {"ragged_paged_attention": "attention", "ragged_mla_attention": "ragged latents", "varlen_attention": "packed"}
CLEAN: Mapping[str, st.SearchStrategy[Any]] = {
    "ragged_paged_attention": specs(clean=True),
    "ragged_mla_attention": ragged_specs(clean=True),
    "varlen_attention": varlen_specs(clean=True),
}
ANY: Mapping[str, st.SearchStrategy[Any]] = {
    "ragged_paged_attention": specs(),
    "ragged_mla_attention": ragged_specs(),
    "varlen_attention": varlen_specs(),
}


def kind_of(batch: Any) -> str:
    """The kind of bounds for `max_logits`: those of lse, which is computed from the same logits.

    This kind has no bound on the cosine difference, because it means nothing if `sm_scale` is 0 and a backend
    multiplies by a tiny number instead.
    """
    return f"lse {batch.dtype if isinstance(batch, VarlenBatch) else batch.kind}"


def check_max_logits(runner: Runner, batch: Any, options: Mapping[str, Any] | None = None) -> None:
    """The backend returns the reference's `max_logits`, and with it the reference's out and lse."""
    out, lse, got = runner.run(batch.OPERATION, batch, options=options, **REQUESTS)
    agrees(got, batch.expected_max_logits(), kind_of(batch), "max_logits")
    if isinstance(batch, VarlenBatch):
        varlen_agrees((out, lse), batch.expected(), batch.dtype, rounding=allowance(runner, batch))
    else:
        expect_results(runner, batch, (out, lse), batch)


def max_logits_of(runner: Runner, batch: Any) -> NDArray[Any]:
    return runner.run(batch.OPERATION, batch, **REQUESTS)[2]


# ---- laws


def it_is_the_largest_of_all_calls(runner: Runner, spec: Any) -> None:
    """A batch's `max_logits` is the maximum over calls that have one sequence each."""
    batch = spec.build()
    if isinstance(batch, VarlenBatch):
        parts = [batch.of([seq]) for seq in range(batch.num_seqs)]
    else:
        parts = [batch.alone(seq) for seq in range(len(batch.bounds()))]
    largest = np.full(batch.q.shape[1], -np.inf)
    for part in parts:
        largest = np.maximum(largest, max_logits_of(runner, part))
    agrees(max_logits_of(runner, batch), largest, kind_of(batch), "max_logits")


def nothing_else_counts(runner: Runner, spec: Any) -> None:
    """NaN or infinity in keys that no query sees changes nothing; without any keys, the largest logit is -inf."""
    batch = spec.build()
    want = max_logits_of(runner, batch)
    for kind in ("nan", "inf"):
        poisoned: Any = batch.poisoned(kind, spec.seed)
        if not isinstance(batch, VarlenBatch):
            poisoned = poisoned.with_garbage_tails(spec.seed)
        agrees(max_logits_of(runner, poisoned), want, kind_of(batch), f"max_logits with {kind} in what no query sees")
    lengths = "cu_kv_lens" if isinstance(batch, VarlenBatch) else "kv_lens"
    blind = batch.change(**{lengths: np.zeros_like(getattr(batch, lengths))})
    identical(max_logits_of(runner, blind), np.full_like(want, -np.inf), "max_logits without keys")


def a_visible_nan_shows(runner: Runner, spec: Any) -> None:
    """NaN in one head of a query that sees a key makes this head's largest logit NaN. Others do not change."""
    batch = spec.build()
    sees = ~(batch.fully_masked_heads() if isinstance(batch, VarlenBatch) else batch.fully_masked())
    if not sees.any():
        return
    visible = np.argwhere(sees)
    token, head = visible[np.random.default_rng(spec.seed).integers(len(visible))]
    q, want = batch.q.copy(), max_logits_of(runner, batch).copy()
    q[token, head] = want[head] = np.nan
    agrees(max_logits_of(runner, batch.change(q=q)), want, kind_of(batch), "max_logits with NaN in a query")


LAWS = {
    "max_logits is the largest of all calls": it_is_the_largest_of_all_calls,
    "nothing that no query sees is in max_logits": nothing_else_counts,
    "a visible NaN is in max_logits": a_visible_nan_shows,
}


def corners(operation: str) -> Iterator[Check]:
    builders, what = BUILDERS[operation], NAMES[operation]
    for name, build in builders.items():
        yield Check("corner", f"{what}, max_logits, {name}", on_corner(check_max_logits, build))
    for name in ON_EVERY_PATH[operation]:
        run = on_every_path(operation, check_max_logits, builders[name])
        yield Check("corner", f"{what}, max_logits on every path, {name}", run)


def agreement(operation: str) -> Iterator[Check]:
    run = on_drawn_paths(operation, check_max_logits, ANY[operation])
    yield Check("agreement", f"{NAMES[operation]}, max_logits on drawn batches", run)


def laws(operation: str) -> Iterator[Check]:
    for name, law in LAWS.items():
        yield Check("law", f"{NAMES[operation]}, {name}", on_drawn(law, CLEAN[operation], 0.2))
