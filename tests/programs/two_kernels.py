"""Compile the kernels that the arguments name, or load them from the cache, and print their numbers of cache hits.

With "shifted", the process first compiles another function. Numba then gives `thrice` the number that `twice` had in
the process that stored the kernel `first`. Code that this process compiles later must still call `thrice`.
"""

import sys
from typing import Any

import numba

from ragged_attention.portable.numba._compiling import machine_code


def scaled(by: int) -> Any:
    @numba.njit(error_model="numpy")
    def helper(x: int) -> int:
        for step in range(x):
            x += step % 3 * by if x % 7 else step // 5
            x ^= step * 11 if x % 5 else by
            x -= x // 13 if x & by else -step
        return x * by

    return helper


twice, thrice = scaled(2), scaled(3)


def first(x: int) -> int:
    return twice(x) + twice(x + 1)


def second(x: int) -> int:
    return thrice(x) + thrice(x + 1)


KERNELS = {"first": first, "second": second}
shifted = "shifted" in sys.argv
if shifted:
    numba.njit(lambda: 0)()
    assert thrice(21) == thrice.py_func(21)
for name in sys.argv[1:]:
    if name in KERNELS:
        (function,) = machine_code(name, {KERNELS[name]: "int64(int64)"})
        assert function.ctypes(21) == KERNELS[name](21), name
        print(function.cache_hits)
if shifted:
    assert numba.njit(lambda x: thrice(x) + thrice(x + 1))(21) == second(21)
