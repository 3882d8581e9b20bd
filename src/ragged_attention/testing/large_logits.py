"""Attention with logits so large that exp overflows unless the largest logit is subtracted first.

The logits of drawn batches are small, and a partial backend may decline the named batches with large ones. So these
checks enlarge the queries of drawn batches.
"""

from collections.abc import Iterator
from typing import Any

from ragged_attention.testing.diagnosis.results import enlarged, expect_agreement, expected, results
from ragged_attention.testing.drawing import Check, built, on_drawn
from ragged_attention.testing.heads_first.suite import chunk_specs, paged_specs
from ragged_attention.testing.mla.ragged import ragged_specs
from ragged_attention.testing.mla.strategies import decode_specs, prefill_specs
from ragged_attention.testing.paged.strategies import specs
from ragged_attention.testing.rounded_weights import allowance
from ragged_attention.testing.runner import Runner
from ragged_attention.testing.varlen.strategies import varlen_specs

ERROR = 2.0**-18  # error of a float32 logit relative to the largest logit; its products may cancel
FAMILIES = {
    "attention": specs(clean=True),
    "paged decode": paged_specs(clean=True),
    "chunked prefill": chunk_specs(clean=True),
    "latent decode": decode_specs(clean=True),
    "sparse prefill": prefill_specs(clean=True),
    "ragged latents": ragged_specs(clean=True),
    "packed": varlen_specs(clean=True),
}


def check(runner: Runner, batch: Any) -> None:
    """A batch's results with enlarged queries agree with the reference, within what float32 logits allow."""
    if (large_and_logit := enlarged(batch)) is None:
        return
    large, largest = large_and_logit
    of_logits = ERROR * largest
    rounding = 2 * of_logits * large.mean_magnitudes() + allowance(runner, large)
    expect_agreement(results(runner, large, {}), expected(large), large, rounding, of_logits)


def agreement() -> Iterator[Check]:
    """One check for each attention operation."""
    for name, strategy in FAMILIES.items():
        yield Check("agreement", f"{name}, large logits", on_drawn(built(check), strategy, 0.2))
