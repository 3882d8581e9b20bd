"""Triton kernels for every GPU; neither torch nor jax is known here."""
