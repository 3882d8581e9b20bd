"""Decoding over a KV cache whose positions are divided among ranks, on the arrays of any framework."""

import dataclasses
from collections.abc import Callable
from typing import Any

from ragged_attention.calls.fields import LARGEST_INT32
from ragged_attention.calls.sharding import KvShard, dtype_of_parts, expect_divisible


def page_size_of(pages: Any) -> int:
    """The page size G of a cache, which is an array [P, G, ...] or a pair of such arrays."""
    return (pages[0] if isinstance(pages, (tuple, list)) else pages).shape[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranks:
    """The ranks that divide the positions of one call; a front end supplies its operations and communication."""

    shard: KvShard  # the rule that divides positions, and this rank's index
    size_name: str  # what error messages call the number of ranks
    operations: Any  # the front end, which has the operations as methods
    namespace: Any  # torch or jax.numpy
    take_along_axis: Callable[[Any, Any, int], Any]
    arange: Callable[[int, Any], Any]  # i32 numbers from 0 up to the first argument, on the device of the second one
    all_gather: Callable[[Any], Any]  # takes [N]; returns the arrays of all ranks, [size, N]
    all_to_all: Callable[[Any], Any]  # takes [size, N]; row r goes to rank r, and row r of the result is from rank r

    def decode(
        self, q: Any, kv_pages: Any, kv_lens: Any, page_indices: Any, cu_q_lens: Any, num_seqs: Any, *,
        own_heads: bool, max_q_len: int | None, sinks: Any, return_lse: bool, out_dtype: Any, **keywords: Any,
    ) -> Any:  # fmt: skip
        """The body of `context_parallel_decode`; `keywords` go to `ragged_paged_attention`."""
        if max_q_len != 1:
            kv_lens, page_indices, cu_q_lens = self.one_query_each(q, kv_lens, page_indices, cu_q_lens, num_seqs)
            num_seqs = None
        out, lse = self.operations.ragged_paged_attention(
            q, kv_pages, self.shard.lengths(kv_lens), page_indices, cu_q_lens, num_seqs, max_q_len=1, causal=False,
            return_lse=True, out_dtype=dtype_of_parts(q), **keywords,
        )  # fmt: skip
        merged, lse = self._merge(out, lse, sinks, own_heads, out_dtype or q.dtype)
        return (merged, lse) if return_lse else merged

    def mla_decode(
        self, q: Any, kv_cache: Any, page_indices: Any, kv_lens: Any, *, indices: Any, topk_lens: Any, own_heads: bool,
        d_v: int, causal: bool, sinks: Any, out_dtype: Any, **keywords: Any,
    ) -> tuple[Any, Any]:  # fmt: skip
        """The body of `context_parallel_mla_decode`; `keywords` go to `mla_decode`."""
        (num_seqs, num_q, num_heads), out_dtype = q.shape[:3], out_dtype or q.dtype
        if indices is not None:
            own, topk_lens = self._own_entries(indices, topk_lens)
            keywords["indices"] = self.operations.page_indices_to_slots(own, page_indices, kv_cache.shape[1])
        elif causal and num_q > 1 and kv_lens is not None:
            # Each query becomes a sequence of the positions that it sees.
            seen = kv_lens[:, None] - (num_q - 1 - self.arange(num_q, kv_lens))
            tables = self.namespace.broadcast_to(page_indices[:, None], (num_seqs, num_q, page_indices.shape[1]))
            keywords |= {
                "kv_lens": self.shard.lengths(seen.clip(0).reshape(-1)),
                "page_indices": tables.reshape(num_seqs * num_q, page_indices.shape[1]),
            }
            q = q.reshape(num_seqs * num_q, 1, *q.shape[2:])
        else:
            own_lens = None if kv_lens is None else self.shard.lengths(kv_lens)
            keywords |= {"kv_lens": own_lens, "page_indices": page_indices}
        out, lse = self.operations.mla_decode(
            q, kv_cache, topk_lens=topk_lens, d_v=d_v, out_dtype=dtype_of_parts(q), **keywords
        )
        out, lse = out.reshape(-1, num_heads, d_v), lse.swapaxes(1, 2).reshape(-1, num_heads)
        merged, lse = self._merge(out, lse, sinks, own_heads, out_dtype)
        out, lse = (array.reshape(num_seqs, num_q, *array.shape[1:]) for array in (merged, lse))
        return out, lse.swapaxes(1, 2)

    def one_query_each(
        self, q: Any, kv_lens: Any, page_indices: Any, cu_q_lens: Any, num_seqs: Any
    ) -> tuple[Any, Any, Any]:
        """The lengths, block table and prefix sums of a batch in which each query is a sequence of its own.

        A causal mask is aligned with a sequence's last key, which may be on another rank. So each query gets, as its
        length, the number of positions that it sees. For a padding row that number is 0.
        """
        count, ends = kv_lens.shape[0], cu_q_lens[1:]
        tokens = self.arange(q.shape[0], kv_lens)
        is_live = self.arange(count, kv_lens) < (count if num_seqs is None else num_seqs)
        live_ends = self.namespace.where(is_live, ends, LARGEST_INT32)  # later entries may have any values
        seqs = self.namespace.searchsorted(live_ends, tokens, side="right").clip(max=count - 1)
        seen = kv_lens[seqs] - (ends[seqs] - 1 - tokens)
        sees_keys = (tokens < ends[seqs]) & is_live[seqs]
        lens = self.namespace.where(sees_keys, seen.clip(0), 0)
        lens = self.namespace.asarray(lens, dtype=self.namespace.int32)
        return lens, page_indices[seqs], self.arange(q.shape[0] + 1, kv_lens)

    def _own_entries(self, positions: Any, topk_lens: Any) -> tuple[Any, Any]:
        """This rank's entries of the lists, numbered locally and moved to the front, [S, Q, N]; their counts [S, Q]."""
        own = self.shard.local(positions)
        if topk_lens is not None:
            lens = topk_lens[:, None] if topk_lens.ndim == 1 else topk_lens
            own = self.namespace.where(self.arange(own.shape[-1], own) < lens[..., None], own, -1)
        is_other = self.namespace.asarray(own < 0, dtype=self.namespace.int8)  # not every device sorts bools
        order = self.namespace.argsort(is_other, stable=True)
        return self.take_along_axis(own, order, -1), (own >= 0).sum(-1, dtype=self.namespace.int32)

    def _merge(self, out: Any, lse: Any, sinks: Any, own_heads: bool, out_dtype: Any) -> tuple[Any, Any]:
        """Exchange `out` [T, H, D_v] and `lse` [T, H], both float32, in one message, and merge them in rank order."""
        size, (tokens, heads, width) = self.shard.size, out.shape
        if own_heads:
            heads = expect_divisible("num_q_heads of q", heads, size, self.size_name)
            parts = out.reshape(tokens, size, heads, width), lse.reshape(tokens, size, heads)
            rows = [part.swapaxes(0, 1).reshape(size, -1) for part in parts]
            received = self.all_to_all(self.namespace.concatenate(rows, 1))
            sinks = None if sinks is None else sinks.reshape(size, heads)[self.shard.rank]
        else:
            received = self.all_gather(self.namespace.concatenate([out.reshape(-1), lse.reshape(-1)]))
        values = tokens * heads * width
        outs = received[:, :values].reshape(size, tokens, heads, width)
        lses = received[:, values:].reshape(size, tokens, heads)
        return self.operations.merge_attention_states(outs, lses, sinks=sinks, out_dtype=out_dtype)
