"""The scale of a cache in any of its forms: a number, an array with one entry, an array with one entry per KV head."""

from typing import Any

import numpy as np

from ragged_attention.calls import dtype_name
from ragged_attention.portable.numba._formats import CODES, number_at
from ragged_attention.portable.numba._vectors import inlined


def fields_of(name: str) -> tuple[str, ...]:
    """The names of a scale's numbers in a record; its array is the operand `name`."""
    return f"{name}_format", f"{name}_stride", f"{name}_number"


def numbers_of(name: str, scale: Any, launch: Any) -> tuple[Any, dict[str, Any]]:
    """The operand and the numbers of a scale."""
    array = None if scale is None or isinstance(scale, int | float) else launch.contiguous(scale)
    number = 1.0 if scale is None or array is not None else float(scale)
    code = 0 if array is None else CODES[dtype_name(array)]
    per_head = array is not None and array.shape not in ((), (1,))
    return array, dict(zip(fields_of(name), (code, int(per_head), number), strict=True))


@inlined
def scale_of(array, code, stride, number, head):
    """A KV head's scale."""
    return number_at(code, array, head * stride) if array else np.float32(number)
