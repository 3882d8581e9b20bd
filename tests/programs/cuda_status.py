"""Load the CUDA kernels and print the status code of the device."""

from ragged_attention.kernels_cuda import _native

_native.library()
print(_native.status().code)
