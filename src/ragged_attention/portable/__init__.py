"""Fallbacks that run wherever torch or jax runs; correct everywhere, tuned for CPUs."""
