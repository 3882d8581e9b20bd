"""The `key_ranges` of attention calls, made from the masks that models use.

Every function takes arrays of torch, jax or NumPy and returns i32 [T, R, 2] of the same framework, on the same device:
for each query, R ranges [begin, end) of positions in its sequence. Nothing is read back from the device, except by
`tree_ranges`. The first arguments are those of `ragged_paged_attention`; for `varlen_attention`, `kv_lens` are the
differences of `cu_kv_lens`:

    cu_q_lens: i32 [S + 1], prefix sums of the query lengths.
    kv_lens: i32 [S], the number of keys of each sequence; query i of a sequence is at position `kv_len - q_len + i`.
    num_tokens: T, the number of query rows; rows after the last sequence get empty ranges.
    num_seqs: the number of live sequences, an int or an array of one element; None means S.

Pass the result to an attention operation as `key_ranges`, without `causal` and `sliding_window`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ragged_attention.calls.fields import (
    LARGEST_INT32,
    MAX_KEY_RANGES,
    Count,
    Sizes,
    expect_any_array,
    expect_array,
    expect_bool,
    expect_count,
    expect_nonempty,
    is_array,
    is_integer,
)
from ragged_attention.errors import InvalidInput

__all__ = [
    "block_causal_ranges",
    "causal_ranges",
    "chunked_ranges",
    "per_sequence_causal",
    "prefix_window_ranges",
    "ranges_from_flashinfer",
    "span_ranges",
    "spans_from_vllm",
    "tree_ranges",
    "window_ranges",
]


class _Queries(NamedTuple):
    """The sequence and the position of each query row, the sequence's number of keys, and whether the row is live.

    A row is live if it belongs to a sequence. A position is negative if a sequence has more queries than keys. Window
    bounds may be 2**31 - 1, so they are clipped before they are added to a position: int32 must not overflow.
    """

    xp: Any  # numpy, torch or jax.numpy
    seq: Any  # [T]
    position: Any  # [T]
    kv_len: Any  # [T]
    live: Any  # [T]

    def before(self, distance: int) -> Any:
        """The position that is `distance` before each query's own, or 0 if that is negative."""
        return self.position.clip(min=distance) - distance

    def window_begin(self, sliding_window: int | None) -> Any:
        if sliding_window is None:
            return self.before(LARGEST_INT32)
        expect_count("sliding_window", sliding_window, 1)
        return self.before(sliding_window - 1)

    def ranges(self, *pairs: tuple[Any, Any]) -> Any:
        """The ranges of all queries, i32 [T, R, 2], from R pairs (begin, end) of numbers or arrays [T]."""
        columns = [self.xp.where(self.live, edge + self.position * 0, 0) for pair in pairs for edge in pair]
        stacked = self.xp.stack(columns, -1).reshape(len(self.position), len(pairs), 2)
        return _cast(self.xp, stacked)


def _namespace(name: str, array: Any) -> Any:
    expect_any_array(name, array)
    if type(array).__module__.partition(".")[0] == "torch":
        import torch

        return torch
    return np if isinstance(array, np.ndarray) else array.__array_namespace__()


def _cast(xp: Any, array: Any) -> Any:
    return array.to(xp.int32) if xp.__name__ == "torch" else array.astype(xp.int32)


def _arange(xp: Any, stop: int, like: Any) -> Any:
    where = {"device": like.device} if xp.__name__ == "torch" else {}
    return xp.arange(stop, dtype=xp.int32, **where)


def _queries(cu_q_lens: Any, kv_lens: Any, num_tokens: int, num_seqs: Any) -> _Queries:
    xp = _namespace("cu_q_lens", cu_q_lens)
    expect_array("cu_q_lens", cu_q_lens, "S+1", ("int32",), {})
    expect_nonempty("cu_q_lens", "S+1", cu_q_lens.shape[0])
    max_num_seqs = cu_q_lens.shape[0] - 1
    expect_array("kv_lens", kv_lens, "S", ("int32",), {"S": max_num_seqs})
    if "torch" in (names := {xp.__name__, _namespace("kv_lens", kv_lens).__name__}) and len(names) > 1:
        raise TypeError(f"expected kv_lens to be an array like cu_q_lens, got {type(kv_lens).__name__}")
    expect_count("num_tokens", num_tokens, 0)
    if num_seqs is not None:
        Count().check("num_seqs", num_seqs, None, Sizes(S=max_num_seqs))
    tokens = _arange(xp, num_tokens, cu_q_lens)
    if max_num_seqs < 1:
        return _Queries(xp, tokens, tokens, tokens, tokens < 0)
    edges, count = cu_q_lens, max_num_seqs
    if num_seqs is not None:  # edges after the last live sequence may have any values
        count = num_seqs if is_integer(num_seqs) else num_seqs.reshape(()).clip(max=max_num_seqs)
        edges = xp.where(_arange(xp, max_num_seqs + 1, edges) <= count, edges, LARGEST_INT32)
    side = {"right": True} if xp.__name__ == "torch" else {"side": "right"}
    indices = xp.searchsorted(edges, tokens, **side) - 1
    live = (indices >= 0) & (indices < count)
    seq = xp.where(live, indices, 0)
    kv_len = kv_lens[seq]
    return _Queries(xp, seq, kv_len - edges[seq + 1] + tokens, kv_len, live)


def causal_ranges(
    cu_q_lens: Any, kv_lens: Any, num_tokens: int, *, sliding_window: int | None = None, num_seqs: Any = None
) -> Any:
    """Keys up to the query's own position p, [max(0, p - sliding_window + 1), p + 1): R is 1."""
    queries = _queries(cu_q_lens, kv_lens, num_tokens, num_seqs)
    return queries.ranges((queries.window_begin(sliding_window), queries.position + 1))


def window_ranges(
    cu_q_lens: Any,
    kv_lens: Any,
    num_tokens: int,
    *,
    left: int | None = None,
    right: int | None = None,
    num_seqs: Any = None,
) -> Any:
    """A window on both sides of the query's position p, [p - left, p + right + 1), as encoders use it: R is 1.

    None means no bound, like -1 in FlashAttention's `window_size`.
    """
    queries = _queries(cu_q_lens, kv_lens, num_tokens, num_seqs)
    left, right = (LARGEST_INT32 if side is None else side for side in (left, right))
    expect_count("left", left, 0)
    expect_count("right", right, 0)
    after = (queries.kv_len - 1 - queries.position).clip(max=right)
    return queries.ranges((queries.before(left), queries.position + after + 1))


def per_sequence_causal(cu_q_lens: Any, kv_lens: Any, num_tokens: int, *, causal: Any, num_seqs: Any = None) -> Any:
    """Keys up to the query's own position if its sequence's `causal`, bool [S], is set, else all keys: R is 1.

    One batch can thus hold sequences of draft tokens that all see each other, and causal sequences.
    """
    queries = _queries(cu_q_lens, kv_lens, num_tokens, num_seqs)
    expect_array("causal", causal, "S", ("bool",), {"S": kv_lens.shape[0]})
    is_causal = causal[queries.seq] if kv_lens.shape[0] else queries.live
    return queries.ranges((0, queries.xp.where(is_causal, queries.position + 1, queries.kv_len)))


def chunked_ranges(
    cu_q_lens: Any, kv_lens: Any, num_tokens: int, *, chunk: int, lookback: int = 0, num_seqs: Any = None
) -> Any:
    """Keys from the start of the chunk of the query's position p, [p // chunk * chunk, p + 1), as in Llama 4: R is 1.

    A query also sees the `lookback` whole chunks before its own.
    """
    queries = _queries(cu_q_lens, kv_lens, num_tokens, num_seqs)
    expect_count("chunk", chunk, 1)
    expect_count("lookback", lookback, 0)
    begin = ((queries.position // chunk).clip(min=lookback) - lookback) * chunk
    return queries.ranges((begin, queries.position + 1))


def block_causal_ranges(cu_q_lens: Any, kv_lens: Any, num_tokens: int, *, block: int, num_seqs: Any = None) -> Any:
    """Keys up to the end of the block of the query's position p, [0, min(kv_len, (p // block + 1) * block)): R is 1.

    This is the mask of diffusion language models that generate a block at a time.
    """
    queries = _queries(cu_q_lens, kv_lens, num_tokens, num_seqs)
    expect_count("block", block, 1)
    position = queries.position.clip(min=0)
    begin = position - position % block
    end = begin + (queries.kv_len - begin).clip(max=block)
    return queries.ranges((0, queries.xp.where(queries.position < 0, 0, end)))


def prefix_window_ranges(
    cu_q_lens: Any, kv_lens: Any, num_tokens: int, *, prefix: Any, sliding_window: int, num_seqs: Any = None
) -> Any:
    """A prefix of every sequence and a window up to the query's own position: R is 2.

    `prefix` is the number of keys in the prefix, an int or i32 [S]. A query within the prefix sees the whole prefix.
    """
    queries = _queries(cu_q_lens, kv_lens, num_tokens, num_seqs)
    if is_array(prefix):
        expect_array("prefix", prefix, "S", ("int32",), {"S": kv_lens.shape[0]})
        prefix = prefix[queries.seq] if kv_lens.shape[0] else 0
    else:
        expect_count("prefix", prefix, 0)
    return queries.ranges((0, prefix), (queries.window_begin(sliding_window), queries.position + 1))


def span_ranges(
    cu_q_lens: Any,
    kv_lens: Any,
    num_tokens: int,
    *,
    spans: Any,
    sliding_window: int | None = None,
    clamp_to_window: bool = False,
    num_seqs: Any = None,
) -> Any:
    """Keys up to the query's own position, and all keys of the image or audio span that contains the query: R is 1.

    Args:
        spans: i32 [S, N, 2], up to N spans [begin, end) of positions of each sequence; empty spans have no effect.
        sliding_window: limits the keys before the query's own position, except those in its span.
        clamp_to_window: whether the window limits the keys in the span too, as in Gemma 4 and in the models of Hugging
            Face transformers.
    """
    queries = _queries(cu_q_lens, kv_lens, num_tokens, num_seqs)
    expect_bool("clamp_to_window", clamp_to_window)
    expect_array("spans", spans, "S N 2", ("int32",), {"S": kv_lens.shape[0], "2": 2})
    first, end = queries.window_begin(sliding_window), queries.position + 1
    begin, xp = first, queries.xp
    for index in range(spans.shape[1] if kv_lens.shape[0] else 0):
        start, stop = spans[:, index, 0][queries.seq], spans[:, index, 1][queries.seq]
        inside = (start <= queries.position) & (queries.position < stop)
        begin = xp.where(inside, xp.minimum(begin, start.clip(min=0)), begin)
        end = xp.where(inside, xp.maximum(end, stop), end)
    return queries.ranges((first if clamp_to_window else begin, end))


def tree_ranges(parents: Any) -> Any:
    """Each token's ancestors and the token itself, for packed prefix trees; R is the most ranges that a token needs.

    A tree packs drafts, or rollouts that share prompts; each token comes after its parent. Depth-first order is best,
    because a token's ancestors then form few runs of adjacent positions. The values are read on the host, so call this
    function outside `jax.jit`, and pass the ranges to the jitted step.

    Args:
        parents: i32 [T], the position of each token's parent, which must be less than the token's own position; -1 for
            a root. A tree is one sequence of `varlen_attention`.

    Raises:
        InvalidInput: a parent does not precede its token, `parents` is traced by jax, or a token and its ancestors form
            more than 8 runs; then the message gives the number of runs.
    """
    xp = _namespace("parents", parents)
    expect_array("parents", parents, "T", ("int32",), {})
    if type(parents).__name__.endswith("Tracer"):
        raise InvalidInput(
            "expected parents with values that the host can read, got a tracer of jax: call tree_ranges outside "
            "jax.jit, and pass the ranges in as an array"
        )
    host = parents.cpu().numpy() if xp.__name__ == "torch" else np.asarray(parents)
    bad = np.flatnonzero((host < -1) | (host >= np.arange(len(host))))
    if bad.size:
        raise InvalidInput(f"expected parents[{bad[0]}] from -1 to {bad[0] - 1}, before the token, got {host[bad[0]]}")
    counts = np.ones(len(host), np.int32)  # the number of runs that each token needs
    for token, parent in enumerate(host.tolist()):
        if parent >= 0:
            counts[token] = counts[parent] + (parent < token - 1)
    if (needed := int(counts.max(initial=1))) > MAX_KEY_RANGES:
        raise InvalidInput(f"expected ancestors in at most {MAX_KEY_RANGES} runs of neighbours, got {needed}")
    ranges = np.zeros((len(host), needed, 2), np.int32)
    for token, (parent, count) in enumerate(zip(host.tolist(), counts.tolist(), strict=True)):
        if parent >= 0:
            ranges[token] = ranges[parent]
        if parent < token - 1 or parent < 0:  # a run begins
            ranges[token, count - 1, 0] = token
        ranges[token, count - 1, 1] = token + 1
    return xp.asarray(ranges, device=parents.device) if xp is not np else ranges


def spans_from_vllm(ranges: Any) -> Any:
    """The `spans` of `span_ranges` from vLLM's inclusive ranges [S, N, 2]. Ranges of one token become empty spans."""
    return _half_open(ranges, "S N 2", lambda begin, last: begin < last)


def ranges_from_flashinfer(ranges: Any) -> Any:
    """`key_ranges` from ranges [T, R, 2] that are inclusive at both ends; (-1, -1) is an empty range."""
    return _half_open(ranges, "T R 2", lambda begin, last: (begin >= 0) & (begin <= last))


def _half_open(ranges: Any, shape: str, is_range: Callable[[Any, Any], Any]) -> Any:
    """Inclusive ranges [begin, last] as [begin, last + 1), and empty ones as [0, 0)."""
    xp = _namespace("ranges", ranges)
    expect_array("ranges", ranges, shape, ("int32", "int64"), {"2": 2})
    begin, last = ranges[..., 0], ranges[..., 1].clip(max=LARGEST_INT32 - 1)
    valid = is_range(begin, last)
    return _cast(xp, xp.stack([xp.where(valid, begin, 0), xp.where(valid, last + 1, 0)], -1))
