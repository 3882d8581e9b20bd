"""Checks that compare attention, writes and merges with the reference."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragged_attention.reference._kv_layout import per_head
from ragged_attention.reference.merge_attention_states import merge_attention_states
from ragged_attention.reference.write_kv_pages import write_kv_pages
from ragged_attention.testing import formats
from ragged_attention.testing.compare import agrees, identical
from ragged_attention.testing.paged.specs import (
    MergeBatch,
    Pages,
    RaggedTables,
    WriteBatch,
    like_pages,
    pages_of,
    split,
)
from ragged_attention.testing.rounded_weights import allowance
from ragged_attention.testing.runner import Runner


def check_attention(runner: Runner, batch: RaggedTables, options: Mapping[str, Any] | None = None) -> None:
    """The backend's out and lse agree with the reference's."""
    expect_results(runner, batch, runner.run(batch.OPERATION, batch, options=options, return_lse=True), batch)


def expect_results(runner: Runner, batch: RaggedTables, got: Any, seen: RaggedTables) -> None:
    """Raise AssertionError unless `got`, a batch's out and lse, agrees with the reference for the batch `seen`."""
    (out, lse), (want_out, want_lse) = got, seen.expected()
    agrees(out, want_out, batch.kind, allowance=allowance(runner, seen))
    agrees(lse, want_lse, f"lse {batch.kind}", "lse")


def check_without_lse(runner: Runner, batch: RaggedTables) -> None:
    got = runner.run(batch.OPERATION, batch)
    agrees(got, batch.expected()[0], batch.kind, allowance=allowance(runner, batch))


def check_determinism(runner: Runner, batch: RaggedTables) -> None:
    results = (runner.run(batch.OPERATION, batch, return_lse=True) for _ in range(2))
    for name, first, again in zip(("out", "lse"), *results, strict=True):
        identical(first, again, name)


def check_write(runner: Runner, batch: WriteBatch) -> None:
    """The tokens are in their slots with the reference's bits, and nothing else has changed.

    If a scale is not a power of two, a device may divide by it with an error of two units in the last place of float32.
    So if a value is that close to a tie, either neighbour is accepted.
    """
    if batch.stored is not None:
        check_scaled_write(runner, batch)
        return
    exact = batch.copies or not (inexact(batch.k_scale) or inexact(batch.v_scale))
    lower, upper = (_written(batch, step) for step in ((0, 0) if exact else (-2, 2)))
    got = runner.run("write_kv_pages", batch)
    for name, side, low, high in zip("kv", split(got), split(lower), split(upper), strict=True):
        between(side, low, high, batch.cache_dtype, f"{name} of the pages")


def check_scaled_write(runner: Runner, batch: WriteBatch) -> None:
    """A write with scale pages leaves the reference's codes and scales, with the same bits."""
    got = runner.run("write_kv_pages", batch)
    want = write_kv_pages(**batch.arguments(), **batch.formats)
    for name, side, wanted, form in zip("kv", split(got[0]), split(want[0]), batch.formats.values(), strict=True):
        wanted = wanted if form.quantized else formats.rounded(wanted, form.codes)
        identical(side, wanted, f"{name} of the pages")
    for name, scales, wanted in zip("kv", got[1:], want[1:], strict=True):
        if wanted is not None:  # compare bits, because a scale's low bits may be a zero point
            identical(bits_of(scales), bits_of(wanted), f"scales of {name}")


def bits_of(array: NDArray[Any]) -> NDArray[Any]:
    """The bits of an array, with one pattern for all NaN."""
    numbers = np.where(np.isnan(array), np.float32(np.nan), array) if array.dtype == np.float32 else array
    return numbers.view(np.uint32) if numbers.dtype == np.float32 else numbers


def inexact(scale: Any) -> bool:
    """Whether division by a scale may round, because the scale is not a power of two."""
    scales = per_head(scale, 1 if np.ndim(scale) == 0 else len(scale))
    return bool((np.frexp(scales)[0] != 0.5).any())


def between(got: NDArray[Any], lower: NDArray[Any], upper: NDArray[Any], cache_dtype: str, what: str) -> None:
    """Raise AssertionError unless every stored value lies between two bounds, which may be in either order."""
    values, low, high = (formats.values_of(array, cache_dtype) for array in (got, lower, upper))
    low, high = np.fmin(low, high), np.fmax(low, high)
    within = (values >= low) & (values <= high)
    identical(np.where(within, low, values), low, what)


def nudged(values: NDArray[np.float32], step: int) -> NDArray[np.float32]:
    """The values moved by `step` units in the last place of float32."""
    for _ in range(abs(step)):
        values = np.nextafter(values, np.float32(np.inf * step), dtype=np.float32)
    return values


def _written(batch: WriteBatch, step: int) -> Pages:
    """The reference's pages for K and V whose elements are moved by `step` units in the last place of float32."""
    arguments = batch.change(k=nudged(batch.k, step), v=nudged(batch.v, step)).arguments()
    if batch.quantized:
        return write_kv_pages(**arguments, **batch.formats, copies=batch.copies)
    pages = write_kv_pages(**arguments)
    return like_pages(pages, [formats.rounded(array, batch.cache_dtype) for array in pages_of(pages)])


def check_merge(runner: Runner, batch: MergeBatch) -> None:
    out, lse = runner.run("merge_attention_states", batch)
    want_out, want_lse = merge_attention_states(**batch.arguments())
    agrees(out, want_out, batch.out_dtype or batch.dtype)
    agrees(lse, want_lse, f"lse {batch.dtype}", "lse")
