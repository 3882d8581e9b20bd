"""jax's interpreter of TPU kernels rounds to the nearest in every format, in conversions and products, as TPUs do."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ragged_attention.testing import tpu_interpreter

FLOATS = (ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
INTEGERS = (np.int8, np.int32)


def edges(dtype: Any) -> np.ndarray[Any, Any]:
    """The values of a dtype as float32, the ties between them, and the float32 neighbours of all of these."""
    size = np.dtype(dtype).itemsize
    every = np.arange(1 << (8 * size)).astype(f"u{size}").view(dtype).astype(np.float32)
    every = np.unique(every[np.isfinite(every)])[:: 61 if size == 2 else 1]
    here = np.concatenate([every, every[1:] / 2 + every[:-1] / 2])
    return np.concatenate(
        [here, (here.view(np.int32) + 1).view(np.float32), (here.view(np.int32) - 1).view(np.float32)]
    )


def run(kernel: Any, *arrays: Any, out: Any, mode: str) -> Any:
    with tpu_interpreter.watched(mode):
        return jax.block_until_ready(pl.pallas_call(kernel, out_shape=out)(*arrays))


@pytest.mark.parametrize("mode", tpu_interpreter.MODES)
def test_conversions_round_to_the_nearest_and_integers_saturate(mode: str) -> None:
    special = np.array([np.nan, np.inf, -np.inf, 3.4e38, 464, 465, 1e6, 300, -300, 3e9, -3e9, 1.5, -2.5], np.float32)
    with np.errstate(all="ignore"):
        x = np.concatenate([*map(edges, FLOATS), special])
        x = np.resize(x, -(-len(x) // 1024) * 1024).reshape(-1, 128)

        def kernel(x_ref: Any, *outs: Any) -> None:
            for out in outs[: len(FLOATS) + len(INTEGERS)]:
                out[...] = x_ref[...].astype(out.dtype)
            for dtype, out in zip(FLOATS, outs[-len(FLOATS) :], strict=True):
                out[...] = x_ref[...].astype(dtype).astype(jnp.float32)

        shapes = [jax.ShapeDtypeStruct(x.shape, dtype) for dtype in (*FLOATS, *INTEGERS)]
        shapes += [jax.ShapeDtypeStruct(x.shape, np.float32)] * len(FLOATS)
        found = [np.asarray(array) for array in run(kernel, x, out=shapes, mode=mode)]
        narrow = [x.astype(dtype).astype(np.float32) for dtype in FLOATS]
        for got, want in zip(found[: len(FLOATS)], narrow, strict=True):
            np.testing.assert_array_equal(got.astype(np.float32), want)
        for got, dtype in zip(found[len(FLOATS) :], INTEGERS, strict=False):
            whole = np.clip(np.trunc(np.nan_to_num(x.astype(np.float64))), *((i := np.iinfo(dtype)).min, i.max))
            np.testing.assert_array_equal(got, whole.astype(dtype))
        # A conversion rounds even if its result is widened at once.
        for got, want in zip(found[-len(FLOATS) :], narrow, strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bfloat16", "float16"])
def test_products_of_16_bits_are_summed_in_float32(dtype: Any) -> None:
    a, b = np.random.default_rng(0).standard_normal((2, 128, 128)).astype(dtype)

    def kernel(a_ref: Any, b_ref: Any, wide: Any, narrow: Any) -> None:
        wide[...] = jnp.dot(a_ref[...], b_ref[...], preferred_element_type=jnp.float32)
        narrow[...] = a_ref[...] * b_ref[...]

    shapes = [jax.ShapeDtypeStruct(a.shape, kind) for kind in (np.float32, dtype)]
    wide, narrow = run(kernel, a, b, out=shapes, mode="on_wait")
    np.testing.assert_allclose(wide, a.astype(np.float64) @ b.astype(np.float64), rtol=0, atol=2e-5)
    np.testing.assert_array_equal(np.asarray(narrow), a * b)
