"""Fallbacks for every device on which torch or jax runs, tuned for CPUs."""
