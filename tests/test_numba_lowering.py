"""Our own lowering of the operations in CPU kernels, in place of Numba's, computes what Python computes."""

import itertools
import math
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")

from ragged_attention.portable.numba._compiling import machine_code, quietly
from ragged_attention.portable.numba._vectors import compiled, float_at, inlined, set_float, set_int

NUMBERS = (-(2**62), -17, -8, -3, -1, 0, 1, 2, 3, 8, 16, 17, 2**62)


@compiled
def write_operators(a, b, out):
    total = a
    total += b
    total *= 3
    total -= 1
    set_int(out, 0, total)
    set_int(out, 1, a & b)
    set_int(out, 2, a | b)
    set_int(out, 3, a ^ b)
    set_int(out, 4, min(a, b))
    set_int(out, 5, max(a, b))
    set_int(out, 6, (a < b) + 2 * (a <= b) + 4 * (a > b) + 8 * (a >= b) + 16 * (a == b) + 32 * (a != b))
    if b:
        set_int(out, 7, a // b)
        set_int(out, 8, a % b)
    set_int(out, 9, a // 16)
    set_int(out, 10, a % -3)


def operators(a, b, out):
    write_operators(a, b, out)
    return 0


@compiled
def write_range(start, stop, step, out):
    count = 0
    for number in range(start, stop, step):
        count += 1
        set_int(out, count, number)
    for number in range(start, stop):
        if number > start + 2:
            break
        for _ in range(number):
            count += 100
    set_int(out, 0, count)


def ranges(start, stop, step, out):
    write_range(start, stop, step, out)
    return 0


@compiled
def write_extremes(numbers, out):
    a, b = float_at(numbers, 0), float_at(numbers, 1)
    set_float(out, 0, min(a, b))
    set_float(out, 1, max(a, b))
    set_float(out, 2, max(a, 1))
    set_float(out, 3, min(2, b))


def extremes(numbers, out):
    write_extremes(numbers, out)
    return 0


@compiled
def called_from_an_inlined_one(a):
    return a + 1


@inlined
def inlined_one(a):
    return called_from_an_inlined_one(a) + 1


def calls(a):
    return inlined_one(a)


def code_of(function, num_arguments):
    with quietly():
        return machine_code(function.__name__, {function: f"int64({', '.join(['int64'] * num_arguments)})"})[0]


def results_of(function: Any, *arguments: int, dtype: Any = np.int64) -> np.ndarray:
    out = np.zeros(64, dtype)
    assert code_of(function, len(arguments) + 1).ctypes(*arguments, out.ctypes.data) == 0
    return out


def wrapped(number):
    """The lowest 64 bits of a number, as a signed integer."""
    return (number + 2**63) % 2**64 - 2**63


def test_operators_of_integers():
    for a, b in itertools.product(NUMBERS, repeat=2):
        found = results_of(operators, a, b)
        compared = (a < b) + 2 * (a <= b) + 4 * (a > b) + 8 * (a >= b) + 16 * (a == b) + 32 * (a != b)
        quotients = [a // b, a % b] if b else [0, 0]
        expected = [a & b, a | b, a ^ b, min(a, b), max(a, b), compared, *quotients, a // 16, a % -3]
        assert found[1:11].tolist() == expected, (a, b)
        if abs(a) < 2**60 and abs(b) < 2**60:
            assert found[0] == wrapped(3 * (a + b) - 1), (a, b)


@pytest.mark.parametrize("step", [1, 2, 3, 7, -1, -2, -5])
def test_ranges(step):
    for start, stop in itertools.product((-5, 0, 3, 9), repeat=2):
        found, numbers = results_of(ranges, start, stop, step), list(range(start, stop, step))
        nested = sum(100 * len(range(number)) for number in range(start, min(stop, start + 3)))
        assert found[0] == len(numbers) + nested, (start, stop)
        assert found[1 : 1 + len(numbers)].tolist() == numbers, (start, stop)


def test_extremes_of_floats():
    for a, b in itertools.product((-math.inf, -1.5, 0.0, 1.0, 3.0, math.inf, math.nan), repeat=2):
        pair = np.array([a, b], np.float32)
        found = results_of(extremes, pair.ctypes.data, dtype=np.float32)[:4]
        expected = np.array([min(a, b), max(a, b), max(a, 1), min(2, b)], np.float32)
        np.testing.assert_array_equal(found, expected, str((a, b)))


def test_a_compiled_function_is_not_inlined_for_its_caller_s_sake(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # an empty cache, so that no code comes from other processes
    assert code_of(calls, 1).ctypes(5) == 7
    for function, attribute in ((called_from_an_inlined_one, "noinline"), (inlined_one, "alwaysinline")):
        (made,) = function.overloads.values()
        header = next(line for line in made.library.texts[0].splitlines() if line.startswith("define"))
        assert attribute in header.split(), header
