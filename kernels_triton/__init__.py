"""Triton kernels for all GPUs. No module in this package imports torch or jax."""
