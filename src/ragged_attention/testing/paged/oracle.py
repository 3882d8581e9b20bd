"""What writes and merges must give, by the definition."""

import numpy as np

from ragged_attention.reference._kv_layout import per_head
from ragged_attention.reference.merge_attention_states import merge_attention_states
from ragged_attention.reference.write_kv_pages import write_kv_pages
from ragged_attention.testing import formats
from ragged_attention.testing.compare import agrees, identical
from ragged_attention.testing.paged.specs import MergeBatch, Pages, WriteBatch, like_pages, pages_of, split
from ragged_attention.testing.runner import Runner


def check_write(runner: Runner, batch: WriteBatch) -> None:
    """The tokens are in their slots, to the last bit, and nothing else has changed.

    Where a scale is no power of two, a device may divide by it with an error of two units in the last place of
    float32; then either neighbour of a value that close to a tie will do.
    """
    lower, upper = (_written(batch, step) for step in ((-2, 2) if _inexact(batch) else (0, 0)))
    got = runner.run("write_kv_pages", batch)
    for name, side, low, high in zip("kv", split(got), split(lower), split(upper), strict=True):
        values, low, high = (formats.values_of(array, batch.cache_dtype) for array in (side, low, high))
        low, high = np.fmin(low, high), np.fmax(low, high)
        within = (values >= low) & (values <= high)
        identical(np.where(within, low, values), low, f"{name} of the pages")


def _inexact(batch: WriteBatch) -> bool:
    scales = [per_head(scale, 1 if np.ndim(scale) == 0 else len(scale)) for scale in (batch.k_scale, batch.v_scale)]  # type: ignore[arg-type]
    return any((np.frexp(scale)[0] != 0.5).any() for scale in scales)


def _written(batch: WriteBatch, step: int) -> Pages:
    """The definition's pages, for tokens that lie `step` units in the last place of float32 away."""
    arguments = batch.arguments()
    for name in ("k", "v"):
        for _ in range(abs(step)):
            arguments[name] = np.nextafter(arguments[name], np.float32(np.inf * step), dtype=np.float32)
    if batch.cache_dtype in formats.QUANTIZED:
        return write_kv_pages(**arguments, cache_dtype=batch.cache_dtype)
    pages = write_kv_pages(**arguments)
    return like_pages(pages, [formats.rounded(array, batch.cache_dtype) for array in pages_of(pages)])


def check_merge(runner: Runner, batch: MergeBatch) -> None:
    out, lse = runner.run("merge_attention_states", batch)
    want_out, want_lse = merge_attention_states(**batch.arguments())
    agrees(out, want_out, batch.out_dtype or batch.dtype)
    agrees(lse, want_lse, f"lse {batch.dtype}", "lse")
