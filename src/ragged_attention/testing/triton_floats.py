"""Make Triton's interpreter convert and compute narrow floats (bfloat16 and 8 bits), which NumPy lacks, like a GPU.

The interpreter holds a bfloat16 as a uint16 and an 8-bit float as a uint8. Triton 3.6 to 3.9 truncate where a GPU
rounds to nearest even, and they add, multiply, compare and `tl.dot` the codes as if they were integers. They also label
the result of a comparison with the dtype of its operands, so that masks are refused. `install` replaces those parts.
NVIDIA GPUs are the model: 8-bit floats and integers saturate, and `fp_downcast_rounding="rtz"` still truncates.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter

from ragged_attention.testing.ptx import numbers

# fp8e4b15 is left to Triton: no framework has arrays of it.
NARROW = ("bf16", "fp8e5", "fp8e4nv", "fp8e4b8", "fp8e5b16")
NO_NEGATIVE_ZERO = ("fp8e4b8", "fp8e5b16")  # code 0x80 is NaN in these formats
TOWARDS_ZERO = interpreter._ir.ROUNDING_MODE.RTZ


def is_narrow(dtype: Any) -> bool:
    return dtype.scalar.name in NARROW


@functools.cache
def values_by_code(name: str) -> NDArray[np.float32]:
    """The values of an 8-bit float's 256 codes."""
    if name not in NO_NEGATIVE_ZERO:
        return numbers.FP8["e4m3" if name == "fp8e4nv" else "e5m2"]
    dtype = tl.core.dtype(name)
    values = numbers.fp8_values(dtype.fp_mantissa_width, dtype.exponent_bias, {})
    values[128] = np.nan
    return values


def values_of(data: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """The exact values of floats that the interpreter holds: float64 for float64, else float32."""
    name = dtype.scalar.name
    if name == "bf16":
        return numbers.bf16_value(data)
    if name in NARROW:
        return values_by_code(name)[data]
    return data if name == "fp64" else data.astype(np.float32)


def to_8_bits(values: NDArray[Any], dtype: Any, towards_zero: bool) -> NDArray[np.uint8]:
    """The codes of float32 or float64 values in an 8-bit float format, saturated."""
    magnitudes = values_by_code(dtype.name)[:128]
    finite = magnitudes[np.isfinite(magnitudes)]
    size = np.minimum(np.abs(values.astype(np.float64)), finite[-1])
    exponent = np.maximum(np.frexp(size)[1] - 1, 1 - dtype.exponent_bias)
    step = np.ldexp(1.0, exponent - dtype.fp_mantissa_width)
    code = np.searchsorted(finite, (np.floor if towards_zero else np.rint)(size / step) * step)
    negative = np.signbit(values) & ((code > 0) | (dtype.name not in NO_NEGATIVE_ZERO))
    nan = 0x80 if dtype.name in NO_NEGATIVE_ZERO else 0x7F
    return np.where(np.isnan(values), nan, code | (negative * 0x80)).astype(np.uint8)


def converted(data: NDArray[Any], source: Any, target: Any, rounding: Any = None) -> NDArray[Any]:
    """Convert floats from one of Triton's dtypes to another, both in the NumPy dtypes that the interpreter uses.

    The result is rounded to nearest even, or towards zero if `rounding` is RTZ.
    """
    source, target = source.scalar, target.scalar
    values = values_of(data, source)
    if target.is_fp8():
        return to_8_bits(values, target, rounding == TOWARDS_ZERO)
    np_dtype = interpreter._get_np_dtype(target)
    nearest = numbers.bf16_bits(values).reshape(values.shape) if target.is_bf16() else values.astype(np_dtype)
    if rounding != TOWARDS_ZERO:
        return nearest
    return numbers.step_back(nearest, values_of(nearest, target), values)


def to_integers(values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Floats as integers, rounded towards zero and saturated; as on GPUs, conversion to 8 bits goes through 16 bits."""
    wide = np.dtype(f"{dtype.kind}{max(2, dtype.itemsize)}")
    return numbers.to_integer(values, "rzi", wide.str).reshape(values.shape).astype(dtype)


def widened(handle: Any) -> Any:
    """A handle's values as float32 if its dtype is narrow, else the handle itself."""
    if not is_narrow(handle.dtype):
        return handle
    return interpreter.TensorHandle(values_of(handle.data, handle.dtype), tl.float32)


def narrowed(handle: Any, dtype: Any) -> Any:
    """A handle of floats, rounded to a narrow dtype."""
    return interpreter.TensorHandle(converted(handle.data, handle.dtype, dtype), dtype.scalar)


class Builder(interpreter.InterpreterBuilder):
    """The interpreter's operations; those on narrow floats compute in float32 and round the result once."""

    def get_bf16(self, value: float) -> Any:  # Triton 3.6 lacks this method
        return narrowed(self.get_fp32(value), tl.bfloat16)

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if source.is_floating() and (is_narrow(source) or is_narrow(target)):
            return self.create_fp_to_fp(src, dst_type, None)
        if is_narrow(target):
            return narrowed(super().cast_impl(src, tl.float32), target)
        if source.is_floating() and target.is_int():
            data = to_integers(values_of(src.data, source), interpreter._get_np_dtype(target))
            return interpreter.TensorHandle(data, target)
        return super().cast_impl(src, dst_type)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if source.is_fp8e4b15() or target.is_fp8e4b15():
            return super().create_fp_to_fp(src, dst_type, rounding_mode)
        return interpreter.TensorHandle(converted(src.data, source, target, rounding_mode), target)

    def unary_op(self, arg: Any, op: Any) -> Any:
        result = super().unary_op(widened(arg), op)
        return narrowed(result, arg.dtype) if is_narrow(arg.dtype) else result

    def binary_op(self, lhs: Any, rhs: Any, op: Any) -> Any:
        result = super().binary_op(widened(lhs), widened(rhs), op)
        if result.data.dtype == np.bool_:
            return interpreter.TensorHandle(result.data, tl.int1)
        return narrowed(result, lhs.dtype) if is_narrow(lhs.dtype) else result

    def ternary_op(self, lhs: Any, rhs: Any, other: Any, op: Any) -> Any:
        if not is_narrow(lhs.dtype):  # `tl.where`, whose first operand is its condition, only selects codes
            return super().ternary_op(lhs, rhs, other, op)
        return narrowed(super().ternary_op(widened(lhs), widened(rhs), widened(other), op), lhs.dtype)

    def create_fma(self, x: Any, y: Any, z: Any) -> Any:
        if not is_narrow(z.dtype):
            return super().create_fma(x, y, z)
        wide = (values_of(handle.data, handle.dtype).astype(np.float64) for handle in (x, y, z))
        return narrowed(interpreter.TensorHandle(numbers.fma_wide(*wide), tl.float64), z.dtype)

    def create_dot(self, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        """The product of two blocks, summed in float64 and rounded once.

        On a GPU, a row's sum does not depend on its place in a block. With float32 sums it might: NumPy's BLAS library
        adds in an order that depends on shapes and on the CPU.
        """
        if not (a.dtype.is_floating() and b.dtype.is_floating() and d.dtype.scalar.is_fp32()):
            return super().create_dot(widened(a), widened(b), d, input_precision, max_num_imprecise_acc)
        exact = (values_of(handle.data, handle.dtype).astype(np.float64) for handle in (a, b, d))
        a, b, d = (interpreter.TensorHandle(data, tl.float64) for data in exact)
        result = super().create_dot(a, b, d, input_precision, max_num_imprecise_acc)
        return interpreter.TensorHandle(result.data.astype(np.float32), tl.float32)

    def create_atomic_rmw(self, rmwOp: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        if not is_narrow(val.dtype) or rmwOp != interpreter._ir.ATOMIC_OP.FADD:
            return super().create_atomic_rmw(rmwOp, ptr, val, mask, sem, scope)
        before, always = np.zeros_like(val.data), np.ones(1, np.bool_)
        for index in np.flatnonzero(mask.data):
            place = ptr.data.reshape(-1)[index : index + 1]
            old = interpreter._interpreter.load(place, always, np.zeros(1, before.dtype), before.dtype)
            before.reshape(-1)[index : index + 1] = old
            addend = interpreter.TensorHandle(val.data.reshape(-1)[index : index + 1], val.dtype)
            total = self.create_fadd(interpreter.TensorHandle(old, val.dtype), addend)
            interpreter._interpreter.store(place, total.data, always)
        return interpreter.TensorHandle(before, val.dtype.scalar)


def _retyped(tensor: Any, handle: Any) -> Any:
    """A tensor of the same shape with another handle."""
    kind = tl.block_type(handle.dtype, list(tensor.shape)) if tensor.type.is_block() else handle.dtype
    return tl.tensor(handle, kind)


def _on_values(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a reduction or scan that uses one NumPy function, so that it works on the values of narrow floats."""

    @functools.wraps(method)
    def on_values(self: Any, tensor: Any, *others: Any, **named: Any) -> Any:
        dtype = tensor.dtype
        if not is_narrow(dtype):
            return method(self, tensor, *others, **named)
        results = method(self, _retyped(tensor, widened(tensor.handle)), *others, **named)
        each = results if isinstance(results, tuple | list) else (results,)
        each = [
            _retyped(result, narrowed(result.handle, dtype)) if result.dtype.is_floating() else result
            for result in each
        ]
        return type(results)(each) if isinstance(results, tuple | list) else each[0]

    return on_values


def install() -> None:
    """Replace the operations, reductions and scans of this process's interpreter."""
    interpreter.interpreter_builder.__class__ = Builder
    for holder, names in ((interpreter.ReduceOps, ("sum", "min_max")), (interpreter.ScanOps, ("cumsum", "cumprod"))):
        for name in names:
            setattr(holder, name, _on_values(getattr(holder, name)))
