"""Attention over a paged KV cache: `ragged_paged_attention`, writes to the cache, and merges of partial results."""
