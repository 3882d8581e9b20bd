"""Constants and functions that all Pallas kernels share.

Two rules shape the kernels. First, a kernel starts its own copies between memories and waits for them, so each buffer
has its own semaphore. Second, kernels must also run in jax's TPU interpret mode, which supports only plain indexing of
references. So kernels load whole blocks, and reshape or bitcast the loaded values.
"""

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
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)  # the logit of a key that a query does not see
LARGEST_INT = 2**31 - 1
NOWHERE = LARGEST_INT  # the position of a key that no query sees


def cannot_run(call: Any) -> str | None:
    """Why no Pallas kernel can run the call, or None."""
    if call.device.framework != "jax":
        return f"runs on jax arrays, got a call from {call.device.framework}"
    return None


def expect_sizes(tile: Any, **limits: tuple[int, int] | tuple[int, int, int]) -> None:
    """Check that each named field of a tile is an int within its (low, high), and a multiple of a third number."""
    for name, (low, high, *multiples) in limits.items():
        value = getattr(tile, name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"expected {name} to be an int, got {type(value).__name__}")
        if not low <= value <= high:
            raise InvalidInput(f"expected {name} between {low} and {high}, got {value}")
        if multiples and value % multiples[0]:
            raise InvalidInput(f"expected {name} to be a multiple of {multiples[0]}, got {value}")


def cdiv(a: Any, b: Any) -> Any:
    return (a + (b - 1)) // b


def round_up(value: int, multiple: int) -> int:
    return cdiv(value, multiple) * multiple


def next_power_of_2(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def item_size(array: Any) -> int:
    return jnp.dtype(dtype_name(array)).itemsize


def written_dtype(call: Any) -> Any:
    """The dtype in which a kernel writes `out`: float32 in place of float16, which TPUs lack."""
    wanted = jnp.dtype(call.out_dtype or dtype_name(call.q))
    return jnp.dtype(jnp.float32) if wanted == jnp.float16 else wanted


def vector_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    """The size of an array in VMEM, in bytes, with its last two dimensions padded to whole tiles."""
    size = jnp.dtype(dtype).itemsize
    *rest, rows, lanes = shape
    tile = min(32 // size, max(next_power_of_2(rows), 4 // size))
    return math.prod(rest) * round_up(rows, tile) * round_up(lanes, LANES) * size


def bytes_of(scratch: Any) -> int:
    """Bytes of VMEM that a tree of scratch shapes takes."""
    shapes = [item for item in jax.tree.leaves(scratch) if getattr(item, "memory_space", None) == pltpu.VMEM]
    return sum(vector_bytes(item.shape, item.dtype) for item in shapes)


def product(left: Any, right: Any, left_axis: int = 1, right_axis: int = 0) -> Any:
    """The matrix product over one axis of each operand, accumulated in float32.

    The precision is explicit, so `jax_default_matmul_precision` does not affect it; float32 operands keep all bits.
    """
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else lax.Precision.DEFAULT
    dimensions = (((left_axis,), (right_axis,)), ((), ()))
    return lax.dot_general(left, right, dimensions, precision=precision, preferred_element_type=jnp.float32)


def in_pieces(count: Any, most: int, do: Callable[[Any, int], None]) -> None:
    """Call `do(offset, size)` for pieces that together cover `count`, which is at most `most`.

    The sizes of the pieces are powers of two.
    """
    piece = next_power_of_2(most + 1) >> 1 if most else 0
    offset = jnp.int32(0)
    while piece:
        taken = (count & piece) != 0

        @pl.when(taken)
        def _(offset: Any = offset, piece: int = piece) -> None:
            do(offset, piece)

        offset = offset + jnp.where(taken, piece, 0)
        piece >>= 1


def compiler_params(vmem_limit_bytes: int | None, *semantics: str) -> Any:
    """The compiler parameters of a `pallas_call`; `semantics` describes the dimensions of its grid.

    The compiler's bounds checks are off, because kernels clamp or check every index before a copy. The checks would be
    most of a copy's scalar instructions.
    """
    return pltpu.CompilerParams(
        vmem_limit_bytes=vmem_limit_bytes or None,
        dimension_semantics=semantics or None,  # type: ignore[arg-type]
        disable_bounds_checks=True,
    )
