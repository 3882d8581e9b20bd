"""Time the CPU kernels' products with register blocks of several widths, on this machine's CPU.

    python -m benchmarks.cpu.blocks

A block holds the accumulator of four rows and some vectors of columns in registers. The kernels use blocks that are
`WIDE` vectors wide (`_products`). The command prints the rates of this and other widths, for float32 and for pairs of
bfloat16, on one thread with all operands in the second-level cache. NUMBA_CPU_FEATURES simulates a CPU with fewer
instructions:

    NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES=+avx,+avx2,+fma,+f16c python -m benchmarks.cpu.blocks
"""

import time
from typing import Any

import numba
import numpy as np
from rich.console import Console
from rich.table import Table

from ragged_attention.portable.numba._products import WIDE, product_of
from ragged_attention.portable.numba._vectors import LANES, PAIRS, add_product, add_products_of_pairs

# They stand for queries of a prompt, columns of a head (or pairs of columns), and keys. They are multiples of every
# block size.
ROWS, KEYS, COLUMNS = 384, 64, 192
WIDTHS = (1, 2, 3, 4, 6)


def rate(add: Any, vectors: int, seconds: float = 0.2) -> float:
    """The operations per second with blocks that are `vectors` vectors wide."""
    product = product_of(add, False, True, vectors)

    @numba.njit
    def repeated(p: int, v: int, out: int, times: int) -> None:
        for _ in range(times):
            product(p, v, out, ROWS, KEYS, COLUMNS, KEYS, 1, COLUMNS, COLUMNS, 1.0, 0)

    p, v, out = (np.ones(shape, np.float32) for shape in ((ROWS, KEYS), (KEYS, COLUMNS), (ROWS, COLUMNS)))
    a, b, c = (array.ctypes.data for array in (p, v, out))
    repeated(a, b, c, 1)
    best, end = np.inf, time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        repeated(a, b, c, 10)
        best = min(best, (time.perf_counter() - start) / 10)
    return 2 * ROWS * KEYS * COLUMNS * (2 if add is add_products_of_pairs else 1) / best


def rates(seconds: float = 0.2) -> dict[str, dict[int, float]]:
    """The rate for each format and block width."""
    formats = {"float32": add_product} | ({"bfloat16 in pairs": add_products_of_pairs} if PAIRS else {})
    return {name: {vectors: rate(add, vectors, seconds) for vectors in WIDTHS} for name, add in formats.items()}


def main() -> None:
    table = Table(title=f"GFLOP/s; a vector has {LANES} floats, and the kernels compute {WIDE} of them together")
    table.add_column("format")
    for vectors in WIDTHS:
        table.add_column(f"4 x {vectors}")
    for name, by_width in rates().items():
        table.add_row(name, *(f"{by_width[vectors] / 1e9:.0f}" for vectors in WIDTHS))
    Console().print(table)


if __name__ == "__main__":
    main()
