"""Attention over pages stored heads first: `paged_attention` and `prefill_attention`."""
