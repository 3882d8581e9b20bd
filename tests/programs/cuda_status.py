"""Load the CUDA kernels, and print the code of the status that they report for the device."""

from ragged_attention.kernels_cuda import _native

_native.library()
print(_native.status().code)
