"""The jax backends' quotient is the nearest float32, however the device divides."""

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("jax")

import jax

from ragged_attention.jax_shared.pages import nearest_quotient, quotient

COUNT = 200_000
TINY = np.finfo(np.float32).tiny


def floats(kind: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Dividends and divisors: random bits, values near powers of two, or values as quantising divides them."""
    generator = np.random.default_rng(0)
    if kind == "bits":
        values, divisor = generator.integers(0, 2**32, (2, COUNT), dtype=np.uint32).view(np.float32)
        return values, divisor
    if kind == "powers":
        near_one = 1 + generator.integers(-4, 5, (2, COUNT)) * 2.0**-23
        values, divisor = np.ldexp(near_one, generator.integers(-20, 20, (2, COUNT))).astype(np.float32)
        return values, divisor
    return generator.standard_normal(COUNT, np.float32), generator.uniform(0.01, 400, COUNT).astype(np.float32)


@pytest.mark.parametrize("kind", ["bits", "powers", "quantised"])
def test_the_nearest_quotient_follows_from_any_near_estimate(kind: str) -> None:
    values, divisor = floats(kind)
    divisor = np.where(np.abs(divisor) < TINY, np.copysign(np.float32(0), divisor), divisor)
    with np.errstate(all="ignore"):
        want = values / divisor
    normal = (np.abs(values) >= TINY) & (np.abs(want) > 2 * TINY) & (np.abs(want) < 2.0**127)
    for units in range(-3, 4):
        estimate = np.where(normal, (want.view(np.int32) + units).view(np.float32), want)
        found = np.asarray(jax.jit(nearest_quotient)(values, divisor, estimate))
        np.testing.assert_array_equal(found, want, f"{units} units off")
    found = np.asarray(jax.jit(quotient)(values, divisor))
    np.testing.assert_array_equal(found[normal], want[normal])
