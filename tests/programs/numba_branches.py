"""Compute attention without and with ALiBi; print which functions `numba` compiles and loads for each call."""

import torch

from ragged_attention.portable.numba import _compiling
from ragged_attention.torch import ragged_paged_attention

q, pages = torch.randn(2, 4, 32), torch.randn(2, 16, 4, 32)
batch = torch.full((2,), 9).int(), torch.arange(2).int()[:, None], torch.arange(3).int()
seen: set[str] = set()
for slopes in (None, torch.ones(4)):
    ragged_paged_attention(q, pages, *batch, alibi_slopes=slopes, backend="numba")
    codes = {code.__name__: code for made in _compiling._made.values() for code in made}
    for loaded in (0, 1):
        names = sorted(name for name in codes.keys() - seen if codes[name].cache_hits == loaded)
        print("loaded:" if loaded else "compiled:", *names)
    seen |= codes.keys()
