"""What a right kernel may lose by rounding softmax weights to 16 bits before it multiplies them with values.

Such kernels use matrix units that take 16 bits only. A weight is then wrong by at most half a unit in the last place,
so an element of out is wrong by at most `UNITS[dtype]` times the weighted mean of the values' magnitudes. Where values
cancel, that is more than the bounds of `compare` allow. A `Runner` with `rounded_weights` is allowed it. The lse is
not, because it is computed from weights that are not rounded, and gradients are not either.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragged_attention.testing.runner import Runner

UNITS: Mapping[str, float] = {"bfloat16": 2.0**-8, "float16": 2.0**-11}  # the largest relative error of a rounding
Allowance = NDArray[np.float64] | float


def allowance(runner: Runner, *batches: Any) -> Allowance:
    """How far the outs of batches may differ from each other, or that of one from the definition, beyond the bounds.

    An array of out's shape, or 0 for a runner without `rounded_weights`, and for float32.
    """
    return sum((of_batch(batch) for batch in batches), start=0.0) if runner.rounded_weights else 0.0


def of_batch(batch: Any) -> Allowance:
    """The largest error of each element of out that rounded weights explain."""
    unit = UNITS.get(batch.dtype, 0.0)
    return unit * batch.mean_magnitudes() if unit else 0.0
