"""CUTLASS kernels for Hopper."""
