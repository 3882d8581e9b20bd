"""Merge states with `numba`; print the sum of the result and each function's number of cache hits."""

import torch

from ragged_attention.portable.numba import _compiling, merge_attention_states
from ragged_attention.torch import merge_attention_states as merge

_compiling.PATIENCE = 0
print(merge(torch.ones(2, 3, 4, 16), torch.zeros(2, 3, 4), backend="numba")[0].sum().item())
kernel = merge_attention_states.KERNEL
print([function.cache_hits for function in kernel.compiled])
