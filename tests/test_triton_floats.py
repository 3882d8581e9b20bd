"""With the test kit's fixes, Triton's interpreter converts and computes as GPUs do, also in dtypes that NumPy lacks."""

import importlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ragged_attention.host.interpreting import interpreting
from ragged_attention.testing import triton_interpreter

pytest.importorskip("triton")
pytest.importorskip("torch")

import torch
import triton
import triton.language as tl

from tests.processes import printed
from tests.programs.compiled_conversions import every_conversion

assert triton_interpreter.quicken()

NUMPY_DTYPES = {  # torch dtype -> dtype of NumPy or ml_dtypes
    torch.float64: np.float64,
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.float8_e5m2: ml_dtypes.float8_e5m2,
}
if not triton.__version__.startswith("3.6."):  # the interpreter of Triton 3.6 does not take these dtypes
    NUMPY_DTYPES |= {
        torch.float8_e4m3fnuz: ml_dtypes.float8_e4m3fnuz,
        torch.float8_e5m2fnuz: ml_dtypes.float8_e5m2fnuz,
    }
EIGHT_BITS = [dtype for dtype in NUMPY_DTYPES if dtype.itemsize == 1]
NARROW = [torch.bfloat16, *EIGHT_BITS]


def every_code(dtype: torch.dtype) -> np.ndarray[Any, Any]:
    """All values of a dtype that has at most 16 bits."""
    codes = np.arange(1 << (8 * dtype.itemsize))
    return codes.astype(f"u{dtype.itemsize}").view(NUMPY_DTYPES[dtype])


def edges(dtype: torch.dtype) -> np.ndarray[Any, Any]:
    """The values of a dtype as float32, the ties between them, and the float32 neighbours of all of these."""
    exact = every_code(dtype).astype(np.float32)
    exact = np.unique(exact[np.isfinite(exact)]).astype(np.float64)
    beyond = exact[-1] + (exact[-1] - exact[-2]) * np.array([0.5, 1, 2])
    here = np.concatenate([exact, (exact[1:] + exact[:-1]) / 2, beyond, -beyond]).astype(np.float32)
    bits = here.view(np.int32)
    return np.concatenate([here, (bits + 1).view(np.float32), (bits - 1).view(np.float32), -here])


def samples(source: torch.dtype, target: torch.dtype) -> np.ndarray[Any, Any]:
    if source.itemsize <= 2:
        return every_code(source)
    special = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 3e38, -3e38, 1e-45, -1e-45, 1e-38]
    around = [edges(target)] if target.itemsize <= 2 else [edges(torch.float16), edges(torch.float8_e5m2)]
    return np.concatenate([*around, np.array(special, np.float32)]).astype(NUMPY_DTYPES[source])


def on_tensors(values: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of the values, padded with zeros to a power of two of elements, as Triton needs."""
    block = np.zeros(1 << (len(values) - 1).bit_length(), NUMPY_DTYPES[dtype])
    block[: len(values)] = values
    return torch.from_numpy(block.view(f"i{dtype.itemsize}")).view(dtype)


def as_numbers(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]).numpy()


def launched(kernel: Any, *arguments: Any, **constants: Any) -> None:
    with interpreting():
        kernel[(1,)](*arguments, **constants)


@triton.jit
def convert(x_ptr, out_ptr, BLOCK: tl.constexpr, BY_STORE: tl.constexpr, ROUNDING: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    if not BY_STORE:
        x = x.to(out_ptr.dtype.element_ty, fp_downcast_rounding=ROUNDING)
    tl.store(out_ptr + i, x)


def converted(x: torch.Tensor, target: torch.dtype, by_store: bool = False, rounding: Any = None) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=target)
    launched(convert, x, out, BLOCK=len(x), BY_STORE=by_store, ROUNDING=rounding)
    return out


def expect_same_bits(got: torch.Tensor, want: np.ndarray[Any, Any]) -> None:
    """Check that the bits are identical, except that every NaN equals every other."""
    result = as_numbers(got).view(want.dtype)
    nan = np.isnan(want.astype(np.float64))
    np.testing.assert_array_equal(np.isnan(result.astype(np.float64)), nan)
    bits = f"u{want.dtype.itemsize}"
    np.testing.assert_array_equal(result.view(bits)[~nan], want.view(bits)[~nan])


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """Silence NumPy's warnings, since overflow and NaN are tested on purpose."""
    with np.errstate(all="ignore"):
        yield


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(NUMPY_DTYPES, 2)), ids=str)
def test_conversions_round_to_nearest_even(source: torch.dtype, target: torch.dtype) -> None:
    x = on_tensors(samples(source, target), source)
    want = as_numbers(x).view(NUMPY_DTYPES[source]).astype(np.float64 if source.itemsize == 8 else np.float32)
    if target in EIGHT_BITS:  # conversions to 8 bits saturate
        largest = float(ml_dtypes.finfo(NUMPY_DTYPES[target]).max)
        want = np.clip(want, -largest, largest)
    want = want.astype(NUMPY_DTYPES[target])
    expect_same_bits(converted(x, target), want)
    expect_same_bits(converted(x, target, by_store=True), want)


@pytest.mark.parametrize("target", [torch.float16, *NARROW], ids=str)
def test_float64_is_rounded_once(target: torch.dtype) -> None:
    """A float64 next to a tie rounds to its own side, even if the nearest float32 is the tie."""
    values = np.array([1.0, 1.25, 1.5, -1.25], NUMPY_DTYPES[target])  # each has a tie with its successor
    above = (values.view(f"u{target.itemsize}") + 1).view(NUMPY_DTYPES[target])
    tie = (values.astype(np.float64) + above.astype(np.float64)) / 2
    expect_same_bits(converted(on_tensors(tie * (1 + 2**-40), torch.float64), target), above)
    expect_same_bits(converted(on_tensors(tie * (1 - 2**-40), torch.float64), target), values)


@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16, torch.float8_e5m2], ids=str)
def test_truncation_stays_where_it_is_asked_for(target: torch.dtype) -> None:
    x = on_tensors(samples(torch.float32, target), torch.float32)
    held = x.numpy()
    got = as_numbers(converted(x, target, rounding="rtz")).view(NUMPY_DTYPES[target])
    finite = every_code(target).astype(np.float32)
    finite = np.unique(np.abs(finite[np.isfinite(finite)]))
    largest = np.inf if target.itemsize == 2 else finite[-1]
    towards_zero = finite[np.maximum(np.searchsorted(finite, np.abs(held), side="right") - 1, 0)]
    want = np.copysign(np.where(np.isinf(held), largest, towards_zero), held).astype(np.float32)
    np.testing.assert_array_equal(got.astype(np.float32), np.where(np.isnan(held), np.nan, want))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool], ids=str)
def test_integers_become_bfloat16_by_value(dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, 3, 255, 257, 258, 259, 384, 32767, 2**24 + 1, 2**31 - 1, -7, -129, -257, -258, -(2**31)])
    x, out = x.to(dtype), torch.zeros(16, dtype=torch.bfloat16)
    launched(convert, x, out, BLOCK=16, BY_STORE=False, ROUNDING=None)
    torch.testing.assert_close(out, x.float().bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("target", [torch.int16, torch.int32, torch.int64], ids=str)
def test_integers_saturate(source: torch.dtype, target: torch.dtype) -> None:
    x = torch.tensor([0.0, 1.5, -1.5, 2.5, 1e5, -1e5, 3e9, -3e9, 1e38, -1e38, torch.inf, -torch.inf, 7, 8, 9, 10])
    x, out, info = x.to(source), torch.zeros(16, dtype=target), torch.iinfo(target)
    launched(convert, x, out, BLOCK=16, BY_STORE=False, ROUNDING=None)
    want = [
        min(max(int(v), info.min), info.max) if abs(v) < 1e30 else info.max if v > 0 else info.min for v in x.tolist()
    ]
    assert out.tolist() == want


@triton.jit
def compute(a_ptr, b_ptr, out_ptr, WHAT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    a = tl.load(a_ptr + i)
    b = tl.load(b_ptr + i)
    if WHAT == "add":
        result = a + b
    elif WHAT == "subtract":
        result = a - b
    elif WHAT == "multiply":
        result = a * b
    elif WHAT == "scaled":
        result = a * 0.5
    elif WHAT == "negative":
        result = -a
    elif WHAT == "maximum":
        result = tl.maximum(a, b)
    elif WHAT == "less":
        result = (a < b).to(a.dtype)
    elif WHAT == "where":
        result = tl.where(a < b, a, -1.5)
    elif WHAT == "clamped":
        result = tl.clamp(a, b * 0.0 - 1.0, b * 0.0 + 1.0)
    elif WHAT == "fma":
        result = tl.fma(a, b, a)
    elif WHAT == "sum":
        result = a * 0.0 + tl.sum(a, 0)
    elif WHAT == "largest":
        result = a * 0.0 + tl.max(a, 0)
    else:
        result = tl.cumsum(a, 0)
    tl.store(out_ptr + i, result)


COMPUTED = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "scaled": lambda a, b: a * 0.5,
    "negative": lambda a, b: -a,
    "maximum": torch.maximum,
    "less": lambda a, b: (a < b).double(),
    "where": lambda a, b: torch.where(a < b, a, -1.5),
    "clamped": lambda a, b: a.clamp(-1, 1),
    "fma": lambda a, b: a * b + a,
    "sum": lambda a, b: a.sum().expand(a.shape),
    "largest": lambda a, b: a.max().expand(a.shape),
    "running": lambda a, b: a.cumsum(0),
}


@pytest.mark.parametrize("what", COMPUTED)
def test_arithmetic_on_bfloat16_is_that_of_its_values(what: str) -> None:
    a, b = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = torch.zeros(64, dtype=torch.bfloat16)
    launched(compute, a, b, out, WHAT=what, BLOCK=64)
    torch.testing.assert_close(out, COMPUTED[what](a.double(), b.double()).bfloat16(), rtol=0, atol=0)


@triton.jit
def product(a_ptr, b_ptr, out_ptr):
    i = tl.arange(0, 16)
    block = i[:, None] * 16 + i[None, :]
    acc = tl.full([16, 16], 1.0, tl.float32)
    tl.store(out_ptr + block, tl.dot(tl.load(a_ptr + block), tl.load(b_ptr + block), acc))


@pytest.mark.parametrize("dtype", [torch.float16, *NARROW], ids=str)
def test_dot_multiplies_values(dtype: torch.dtype) -> None:
    a, b = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    out = torch.zeros(16, 16)
    launched(product, a, b, out)
    torch.testing.assert_close(out, a.float() @ b.float() + 1)


@triton.jit
def multiply_block(a_ptr, b_ptr, out_ptr, rows: tl.constexpr, inner: tl.constexpr, columns: tl.constexpr):
    row, k, column = tl.arange(0, rows)[:, None], tl.arange(0, inner), tl.arange(0, columns)
    a = tl.load(a_ptr + row * inner + k[None, :])
    b = tl.load(b_ptr + k[:, None] * columns + column[None, :])
    tl.store(out_ptr + row * columns + column[None, :], tl.dot(a, b, input_precision="ieee"))


@pytest.mark.parametrize("columns", [16, 64])
def test_a_row_of_a_dot_has_the_same_bits_in_any_block(columns: int) -> None:
    a, b = torch.randn(64, 32), torch.randn(32, columns)
    whole, parts = torch.empty(64, columns), torch.empty(64, columns)
    launched(multiply_block, a, b, whole, rows=64, inner=32, columns=columns)
    for first in range(0, 64, 16):
        launched(multiply_block, a[first:], b, parts[first:], rows=16, inner=32, columns=columns)
    assert torch.equal(whole, parts)


@triton.jit
def add_atomically(x_ptr, out_ptr, before_ptr):
    i = tl.arange(0, 16)
    before = tl.atomic_add(out_ptr + i // 8, tl.load(x_ptr + i), mask=i % 4 != 3)
    tl.store(before_ptr + i, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_atomic_adds_round_each_sum(dtype: torch.dtype) -> None:
    x = torch.randn(16, generator=torch.Generator().manual_seed(0)).to(dtype)
    out, before = torch.tensor([100.0, -3.0]).to(dtype), torch.zeros(16, dtype=dtype)
    want, sums = torch.zeros(16, dtype=dtype), out.clone()
    for i in [i for i in range(16) if i % 4 != 3]:
        want[i] = sums[i // 8]
        sums[i // 8] += x[i]
    launched(add_atomically, x, out, before)
    assert torch.equal(out, sums)
    assert torch.equal(before, want)


def test_conversions_are_those_that_are_compiled_for_an_h100(tmp_path: Path) -> None:
    """Conversions equal those compiled for an H100 bit for bit, except in the bits of a float16 NaN."""
    floats = np.concatenate([edges(torch.float8_e4m3fn), edges(torch.float8_e5m2), edges(torch.bfloat16)[::97]])
    floats = np.concatenate(
        [floats, np.array([np.nan, np.inf, -np.inf, 1e9, -1e9, 3e10, -3e10, 300, -300, 4e4, -4e4], np.float32)]
    )
    floats = np.resize(floats, -(-len(floats) // 256) * 256)
    np.save(tmp_path / "floats.npy", floats)
    printed("-m", "tests.programs.compiled_conversions", str(tmp_path / "floats.npy"), str(tmp_path / "compiled.npz"))
    launch = importlib.import_module("ragged_attention.torch._launcher").Launcher()
    compiled = np.load(tmp_path / "compiled.npz")
    for name, tensor in every_conversion(launch, torch.from_numpy(floats)).items():
        got, want = as_numbers(tensor), compiled[name].view(f"i{tensor.itemsize}")
        if name == "float16":
            got, want = (np.where(np.isnan(bits.view(np.float16)), 0x7FFF, bits) for bits in (got, want))
        np.testing.assert_array_equal(got, want, err_msg=name)
