"""The error of a correct kernel that rounds softmax weights to 16 bits before it multiplies them with values.

Such kernels use matrix units that take only 16-bit operands. A weight is then wrong by at most half a unit in the last
place, so an element of out is wrong by at most `UNITS[dtype]` times the weighted mean of the values' magnitudes. If
values cancel, this exceeds the tolerances of `compare`. A `Runner` with `rounded_weights` is granted this error in out,
but not in lse, which is computed from unrounded weights, and not in gradients.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragged_attention.testing.runner import Runner

UNITS: Mapping[str, float] = {"bfloat16": 2.0**-8, "float16": 2.0**-11}  # the largest relative error of a rounding
Allowance = NDArray[np.float64] | float


def allowance(runner: Runner, *batches: Any) -> Allowance:
    """The error granted to each element of out beyond the tolerances; 0 without `rounded_weights` or in float32.

    One batch is compared with the reference; several are compared with each other, so their errors add up.
    """
    return sum((of_batch(batch) for batch in batches), start=0.0) if runner.rounded_weights else 0.0


def of_batch(batch: Any) -> Allowance:
    """The largest error that rounded weights can cause in each element of out."""
    unit = UNITS.get(batch.dtype, 0.0)
    return unit * batch.mean_magnitudes() if unit else 0.0
