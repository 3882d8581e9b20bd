"""The fallback in plain jax operations, compiled by XLA, for CPUs and devices that have no kernel of ours."""
