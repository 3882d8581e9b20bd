"""Fallback on plain jax operations, compiled by XLA: CPUs, and any device without a kernel of ours."""
