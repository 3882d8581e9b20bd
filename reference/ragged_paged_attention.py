"""Ragged paged attention: prefill, chunked prefill, decode and any mix of them over a paged KV cache."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragged_attention.calls.cache_formats import KvFormat
from ragged_attention.reference._kv_layout import Float64, per_head, sequence_bounds, true_queries, widened
from ragged_attention.reference._scaled_rows import values_of
from ragged_attention.reference._softmax import logits_of, share_of_keys, sink_of_each, slope_of_each, softmax

FEATURES = frozenset({
    "num_seqs", "sm_scale", "causal", "sliding_window", "soft_cap", "sinks", "alibi_slopes", "relative_bias",
    "k_scale", "v_scale", "k_scale_pages", "v_scale_pages", "return_lse", "return_max_logits", "draft_mask",
    "key_ranges", "selected", "block_size", "out_dtype",
})  # fmt: skip
BATCH_INVARIANT = True


def visible(
    q_len: int,
    kv_len: int,
    valid: NDArray[np.bool_],
    causal: bool,
    sliding_window: int | None,
    drafted: NDArray[np.bool_] | None = None,
    ranges: NDArray[np.int32] | None = None,
) -> NDArray[np.bool_]:
    """Whether each query sees each key, bool [q_len, kv_len].

    `drafted` holds the queries' rows of the draft mask, and `ranges` [q_len, R, 2] their key ranges; None if the call
    has none.
    """
    position = (kv_len - q_len + np.arange(q_len))[:, None]
    key = np.arange(kv_len)[None, :]
    seen = np.broadcast_to(valid[None, :kv_len], (q_len, kv_len)).copy()
    if ranges is not None:
        begins, ends = np.moveaxis(ranges, 2, 0)[..., None]
        return seen & ((begins <= key) & (key < ends)).any(axis=1)
    if drafted is not None:
        new = np.arange(kv_len) - (kv_len - q_len)  # index among this step's tokens, negative for earlier keys
        rows = np.pad(drafted, ((0, 0), (0, max(q_len - drafted.shape[1], 0))))
        seen &= np.where(new < 0, True, rows[:, np.maximum(new, 0)])
    elif causal:
        seen &= key <= position
    if sliding_window is not None:
        seen &= key > position - sliding_window
    return seen


def named(selected: NDArray[np.int32], block_size: int, kv_len: int) -> NDArray[np.bool_]:
    """Whether a query's list names the block of a key, by KV head or for all heads, bool [K or 1, q_len, kv_len].

    `selected` [q_len, K or 1, N] holds the lists of these queries.
    """
    blocks = -(-kv_len // block_size)
    entries = np.where((selected >= 0) & (selected < blocks), selected, blocks)  # block `blocks` has no keys
    listed = np.zeros((*selected.shape[:2], blocks + 1), bool)
    np.put_along_axis(listed, entries, True, axis=2)
    return np.repeat(listed[..., :blocks], block_size, axis=2)[..., :kv_len].swapaxes(0, 1)


def seen_by_heads(
    seen: NDArray[np.bool_], selected: NDArray[np.int32] | None, block_size: int | None
) -> NDArray[np.bool_]:
    """Whether each query sees each key, by KV head or for all heads, bool [K or 1, q_len, kv_len].

    A query sees the keys that the other masks allow, `seen` [q_len, kv_len], and that its list names, if the call has
    lists.
    """
    if selected is None:
        return seen[None]
    assert block_size is not None
    return seen & named(selected, block_size, seen.shape[1])


def of_head(seen: NDArray[np.bool_], kv_head: int) -> NDArray[np.bool_]:
    """The mask [q_len, kv_len] of a KV head, from the result of `seen_by_heads`."""
    return seen[kv_head % len(seen)]


def rows_of(array: ArrayLike | None, rows: slice) -> NDArray[Any] | None:
    """The given rows of an array, or None if the call has no such array."""
    return None if array is None else np.asarray(array)[rows]


def keys_after(q_len: int, kv_len: int) -> NDArray[np.int64]:
    """The distance of each key after each query, [q_len, kv_len]; negative for keys before the query."""
    return np.arange(kv_len)[None, :] - (kv_len - q_len + np.arange(q_len))[:, None]


def columns_of(q_len: int, kv_len: int, width: int, at_own: int) -> NDArray[np.int64]:
    """The table column for each query and key, [q_len, kv_len]; `at_own` is the column for a query's own position."""
    return np.clip(at_own - keys_after(q_len, kv_len), 0, width - 1)


def bias_of(q_len: int, kv_len: int, slope: float, table: Float64 | None = None, at_own: int = 0) -> Float64:
    """The bias [q_len, kv_len] of one head's logits: `slope` times the key's distance after the query.

    The entry of `table`, [B] or [q_len, B], for this distance is added; `at_own` is the column for a query's own
    position.
    """
    bias = slope * widened(keys_after(q_len, kv_len))
    if table is None:
        return bias
    columns = columns_of(q_len, kv_len, table.shape[-1], at_own)
    return bias + np.take_along_axis(np.broadcast_to(table, (q_len, table.shape[-1])), columns, axis=1)


def table_of(relative_bias: ArrayLike | None, head: int, rows: slice) -> Float64 | None:
    """A head's relative bias table for the given query rows, [B] or [n, B]."""
    if relative_bias is None:
        return None
    tables = widened(relative_bias)
    return tables[head] if tables.ndim == 2 else tables[rows, head]


def column_at_own(relative_bias: ArrayLike | None, causal: bool) -> int:
    """The table column for a query's own position."""
    return 0 if causal or relative_bias is None else np.shape(relative_bias)[-1] // 2


def attend(
    q: Float64, k: Float64, v: Float64, seen: NDArray[np.bool_], scale: float, soft_cap: float | None, sink: float,
    bias: Float64 | float = 0.0,
) -> tuple[Float64, Float64]:  # fmt: skip
    """One head: q [q_len, D], k [kv_len, D], v [kv_len, D_v] -> out [q_len, D_v] and lse [q_len].

    `bias` [q_len, kv_len] is added to the logits.
    """
    used = seen.any(axis=0)  # a key that no query sees is left out, because it may hold NaN
    k, v, seen, bias = k[used], v[used], seen[:, used], np.broadcast_to(bias, seen.shape)[:, used]
    out, _, lse = softmax(np.where(seen, logits_of(q, k, scale, soft_cap) + bias, -np.inf), v)
    return out * share_of_keys(lse, sink)[:, None], lse


def largest_logit(q: Float64, k: Float64, seen: NDArray[np.bool_], scale: float) -> float:
    """The largest `scale * q . k` over queries and keys that they see: NaN if any is NaN, -inf without any."""
    used = seen.any(axis=0)
    return float(np.where(seen[:, used], logits_of(q, k[used], scale, None), -np.inf).max(initial=-np.inf))


def split_values(
    kv_pages: Any, scale_pages: tuple[Any, Any] = (None, None), formats: tuple[Any, Any] = (None, None)
) -> tuple[Float64, Float64]:
    """The values of K [P, G, K, D] and V [P, G, K, D_v] of combined or split pages."""
    if not isinstance(kv_pages, tuple | list):
        kv_pages = np.asarray(kv_pages)[:, :, 0::2], np.asarray(kv_pages)[:, :, 1::2]
    k, v = (
        widened(pages) if form is None else values_of(pages, scales, form)
        for pages, scales, form in zip(kv_pages, scale_pages, formats, strict=True)
    )
    return k, v


def ragged_paged_attention(
    q: ArrayLike,
    kv_pages: Any,
    kv_lens: ArrayLike,
    page_indices: ArrayLike,
    cu_q_lens: ArrayLike,
    num_seqs: ArrayLike | None = None,
    *,
    max_q_len: int | None = None,
    sm_scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    relative_bias: ArrayLike | None = None,
    q_scale: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    k_scale_pages: ArrayLike | None = None,
    v_scale_pages: ArrayLike | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    new_kv: None = None,
    draft_mask: ArrayLike | None = None,
    key_ranges: ArrayLike | None = None,
    selected: ArrayLike | None = None,
    block_size: int | None = None,
    out_dtype: str | None = None,
    k_format: KvFormat | None = None,
    v_format: KvFormat | None = None,
    q_dtype: str | None = None,
) -> Any:
    """Out [T, H, D_v] in float64, and lse [T, H] and max_logits [H] on request; arguments are the operation's.

    `new_kv` is written by `write_kv_pages` before this is called. `k_format` and `v_format` are needed if the pages
    hold codes as bits. Scale pages are [P, G, K, n]. `q_dtype` names the dtype to which queries are rounded if
    `q_scale` is an array.
    """
    del max_q_len, out_dtype  # they do not change the result
    assert new_kv is None
    page_indices = np.asarray(page_indices)
    k_pages, v_pages = split_values(kv_pages, (k_scale_pages, v_scale_pages), (k_format, v_format))
    num_pages, page_size, num_kv_heads, _ = k_pages.shape
    num_tokens, num_q_heads, head_dim = np.shape(q)
    q, scale = true_queries(q, q_scale, head_dim**-0.5 if sm_scale is None else sm_scale, q_dtype)
    k_scale, v_scale = per_head(k_scale, num_kv_heads), per_head(v_scale, num_kv_heads)
    out = np.zeros((num_tokens, num_q_heads, v_pages.shape[-1]))
    lse, max_logits = np.full((num_tokens, num_q_heads), -np.inf), np.full(num_q_heads, -np.inf)
    sinks, slopes = sink_of_each(sinks, num_q_heads), slope_of_each(alibi_slopes, num_q_heads)
    at_own = column_at_own(relative_bias, causal and key_ranges is None)
    for seq, (start, stop) in enumerate(sequence_bounds(cu_q_lens, num_seqs, num_tokens)):
        q_len = stop - start
        kv_len = int(np.clip(np.asarray(kv_lens)[seq], 0, page_indices.shape[1] * page_size))
        pages = page_indices[seq, : -(-kv_len // page_size)]
        valid = np.repeat((pages >= 0) & (pages < num_pages), page_size)[:kv_len]
        if q_len == 0 or not valid.any():
            continue
        pages = np.where((pages >= 0) & (pages < num_pages), pages, 0)
        k = k_pages[pages].reshape(-1, *k_pages.shape[2:])[:kv_len]
        v = v_pages[pages].reshape(-1, *v_pages.shape[2:])[:kv_len]
        drafted, ranges = rows_of(draft_mask, slice(start, stop)), rows_of(key_ranges, slice(start, stop))
        seen = visible(q_len, kv_len, valid, causal, sliding_window, drafted, ranges)
        seen = seen_by_heads(seen, rows_of(selected, slice(start, stop)), block_size)
        for head in range(num_q_heads):
            kv_head = head // (num_q_heads // num_kv_heads)
            table, factor = table_of(relative_bias, head, slice(start, stop)), scale * float(k_scale[kv_head])
            bias = bias_of(q_len, kv_len, slopes[head], table, at_own)
            out[start:stop, head], lse[start:stop, head] = attend(
                q[start:stop, head], k[:, kv_head], v[:, kv_head], of_head(seen, kv_head),
                factor, soft_cap, sinks[head], bias,
            )  # fmt: skip
            out[start:stop, head] *= v_scale[kv_head]
            largest = largest_logit(q[start:stop, head], k[:, kv_head], of_head(seen, kv_head), factor)
            max_logits[head] = np.maximum(max_logits[head], largest)
    results = (out, *[lse] * return_lse, *[max_logits] * return_max_logits)
    return results if len(results) > 1 else out


def run(call: Any, tile: Any, launch: Any) -> Any:
    formats = {"k_format": call.k_format, "v_format": call.v_format}
    return launch.on_host(ragged_paged_attention, call, call.results(), **formats)
