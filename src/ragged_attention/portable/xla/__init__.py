"""The fallback in plain jax operations, compiled by XLA, for CPUs and devices without kernels in this package."""
