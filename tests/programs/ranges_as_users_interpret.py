"""Check key ranges in Triton's unmodified interpreter, as users run it.

The interpreter that the tests modify accepts masks that are not bool. `python -m
tests.programs.ranges_as_users_interpret`, with TRITON_INTERPRET=1, prints "well".
"""

import torch

from ragged_attention.key_ranges import prefix_window_ranges
from ragged_attention.testing import agrees
from ragged_attention.torch import ragged_mla_attention, ragged_paged_attention, varlen_attention

Q_LENS, KV_LENS = [3, 0, 20], [7, 2, 40]
EDGES, KV_EDGES = (torch.tensor([0, *lens]).cumsum(0).int() for lens in (Q_LENS, KV_LENS))
KV = torch.tensor(KV_LENS).int()
RANGES = prefix_window_ranges(EDGES, KV, 25, prefix=2, sliding_window=9)  # the last two queries are padding
BIAS = torch.randn(2, 5)


def packed(backend: str) -> list[torch.Tensor]:
    """The output of packed attention and its gradients."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(count, heads, 16, requires_grad=True) for count, heads in ((25, 2), (49, 1), (49, 1)))
    bias = BIAS.clone().requires_grad_()
    out = varlen_attention(q, k, v, EDGES, KV_EDGES, key_ranges=RANGES, relative_bias=bias, backend=backend)
    return [out, *torch.autograd.grad(out.square().sum(), (q, k, v, bias))]


def paged(backend: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    tables = KV, torch.arange(18).reshape(3, 6).int(), EDGES
    kv_pages, latents = torch.randn(18, 8, 2, 16), torch.randn(18, 8, 1, 32)
    return [
        ragged_paged_attention(torch.randn(25, 2, 16), kv_pages, *tables, key_ranges=RANGES, backend=backend),
        ragged_mla_attention(torch.randn(25, 2, 32), latents, *tables, d_v=16, key_ranges=RANGES, backend=backend),
    ]


for results in (packed, paged):
    for got, want in zip(results("triton"), results("reference"), strict=True):
        agrees(got.detach().numpy(), want.detach().numpy(), "float32")
print("well")
