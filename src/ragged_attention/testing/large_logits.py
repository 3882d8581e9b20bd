"""Attention over logits that exp cannot take: right only if the largest one is subtracted first.

Drawn batches have logits of a few units, and named ones may be more than a partial backend takes. So drawn batches are
checked with larger queries too.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ragged_attention.testing.compare import agrees
from ragged_attention.testing.diagnosis.results import enlarged, expected, kind_of, results
from ragged_attention.testing.drawing import Check, built, on_drawn
from ragged_attention.testing.heads_first.suite import chunk_specs, paged_specs
from ragged_attention.testing.mla.ragged import ragged_specs
from ragged_attention.testing.mla.strategies import decode_specs, prefill_specs
from ragged_attention.testing.paged.strategies import specs
from ragged_attention.testing.rounded_weights import allowance
from ragged_attention.testing.runner import Runner
from ragged_attention.testing.varlen.strategies import varlen_specs

ERROR = 2.0**-18  # of a logit in float32, in parts of the largest; products may cancel
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
    """A batch's results over larger queries agree with the definition, as far as float32 has its logits."""
    if (found := enlarged(batch)) is None:
        return
    large, largest = found
    got, want = results(runner, large, {}), expected(large)
    of_logits = np.reshape(2 * ERROR * largest * large.mean_magnitudes(), want["out"].shape)
    rounding = allowance(runner, large)
    rounding = np.reshape(rounding, want["out"].shape) if np.ndim(rounding) else 0.0
    for name, array in got.items():
        extra = of_logits + rounding if name == "out" else ERROR * largest
        agrees(array, want[name], kind_of(name, large), name, allowance=extra)


def agreement() -> Iterator[Check]:
    """A check of each attention."""
    for name, strategy in FAMILIES.items():
        yield Check("agreement", f"{name}, large logits", on_drawn(built(check), strategy, 0.2))
