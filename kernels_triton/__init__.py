"""Triton kernels for NVIDIA and AMD GPUs. No module in this package imports torch or jax."""
