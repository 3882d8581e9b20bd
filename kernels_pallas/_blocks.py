"""Constants and functions that all Pallas kernels share.

Two rules shape the kernels. First, a cache stays in HBM: a kernel itself starts the copies from or to it, and waits for
them on semaphores. Second, kernels must also run in jax's TPU interpret mode, in which a reference can be indexed, but
not reshaped or bitcast. So kernels reshape and bitcast the values that they have loaded.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ragged_attention.calls import dtype_name
from ragged_attention.errors import InvalidInput

LANES = 128
LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)  # a finite stand-in for -inf: MASKED - MASKED is 0, not NaN
LARGEST_INT = 2**31 - 1
NOWHERE = LARGEST_INT  # the position of a key that no query sees
MAX_PIECES = 32  # maximum pieces of pages per block of keys: a 32-bit mask has one bit per piece
UNROLL = 8  # maximum copies started per iteration of a loop


def cannot_run(call: Any) -> str | None:
    """Why no Pallas kernel can run the call, or None."""
    if call.device.framework != "jax":
        return f"runs on jax arrays, got a call from {call.device.framework}"
    if getattr(call, "cache_dtype", None) == "float8_e4m3fnuz":
        return "reads no cache of float8_e4m3fnuz"
    return None


def expect_sizes(tile: Any, **limits: tuple[int, int] | tuple[int, int, int]) -> None:
    """Check that each named field of a tile is an int within its limits: (low, high) or (low, high, divisor)."""
    for name, (low, high, *divisors) in limits.items():
        value = getattr(tile, name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"expected {name} to be an int, got {type(value).__name__}")
        if not low <= value <= high:
            raise InvalidInput(f"expected {name} between {low} and {high}, got {value}")
        if divisors and value % divisors[0]:
            raise InvalidInput(f"expected {name} to be a multiple of {divisors[0]}, got {value}")


def cdiv(a: Any, b: Any) -> Any:
    return (a + (b - 1)) // b


def round_up(value: int, multiple: int) -> int:
    return cdiv(value, multiple) * multiple


def next_power_of_2(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def item_size(array: Any) -> int:
    return jnp.dtype(dtype_name(array)).itemsize


def written_dtype(call: Any) -> Any:
    """The dtype in which a kernel writes `out`. float32 replaces float16, which TPUs do not have."""
    wanted = jnp.dtype(call.out_dtype or dtype_name(call.q))
    return jnp.dtype(jnp.float32) if wanted == jnp.float16 else wanted


def vector_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    """Bytes that an array takes in VMEM, where its last two dimensions are padded to whole tiles."""
    size = jnp.dtype(dtype).itemsize
    *rest, rows, lanes = shape
    tile = min(32 // size, max(next_power_of_2(rows), 4 // size))
    return math.prod(rest) * round_up(rows, tile) * round_up(lanes, LANES) * size


def bytes_of(scratch: Any) -> int:
    """Bytes that a tree of scratch shapes takes in VMEM."""
    shapes = [item for item in jax.tree.leaves(scratch) if getattr(item, "memory_space", None) == pltpu.VMEM]
    return sum(vector_bytes(item.shape, item.dtype) for item in shapes)


def product(left: Any, right: Any, left_axis: int = 1, right_axis: int = 0) -> Any:
    """The matrix product over one axis of each operand, accumulated in float32.

    The precision is explicit, so `jax_default_matmul_precision` does not affect it. float32 operands are not rounded.
    """
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else lax.Precision.DEFAULT
    dimensions = (((left_axis,), (right_axis,)), ((), ()))
    return lax.dot_general(left, right, dimensions, precision=precision, preferred_element_type=jnp.float32)


def in_powers_of_2(count: Any, most: int, do: Callable[[Any, int], None]) -> None:
    """Call `do(offset, size)` for ranges that cover `range(count)`. Sizes are powers of two, and `count` <= `most`."""
    size = next_power_of_2(most + 1) >> 1 if most else 0
    offset = jnp.int32(0)
    while size:
        included = (count & size) != 0
        pl.when(included)(functools.partial(do, offset, size))
        offset = offset + jnp.where(included, size, 0)
        size >>= 1


def start_pieces(count: int, start: Callable[[Any], None]) -> None:
    """Call `start(piece)` for each of `count` pieces of a block."""
    pl.loop(0, count, unroll=math.gcd(count, UNROLL))(start)


def bits_of_valid(pieces: jax.Array) -> jax.Array:
    """A 32-bit mask for each block of `pieces` [..., pieces per block]: bit i is set if entry i is not negative."""
    bits = jnp.uint32(1) << jnp.arange(pieces.shape[-1], dtype=jnp.uint32)
    return lax.bitcast_convert_type(jnp.where(pieces >= 0, bits, 0).sum(axis=-1, dtype=jnp.uint32), jnp.int32)


def reset_softmax(m_i: Any, l_i: Any, acc: Any, lowest: float) -> None:
    """Reset an online softmax to its state before any key, with `lowest` as the maximum."""
    m_i[...] = jnp.full(m_i.shape, lowest, jnp.float32)
    l_i[...] = jnp.zeros(l_i.shape, jnp.float32)
    acc[...] = jnp.zeros(acc.shape, jnp.float32)


def compiler_params(vmem_limit_bytes: int | None, *semantics: str) -> Any:
    """The compiler parameters of a `pallas_call`; `semantics` describes the dimensions of its grid.

    The compiler's bounds checks are off, because kernels clamp or check every index before a copy. With checks, most
    scalar instructions of a copy would be checks.
    """
    return pltpu.CompilerParams(
        vmem_limit_bytes=vmem_limit_bytes or None,
        dimension_semantics=semantics or None,  # type: ignore[arg-type]
        disable_bounds_checks=True,
    )
