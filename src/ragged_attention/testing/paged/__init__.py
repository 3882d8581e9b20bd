"""Checks of attention over a paged KV cache, of writes to the cache, and of merges of partial results."""
