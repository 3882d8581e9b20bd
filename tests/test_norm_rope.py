"""The fused step before attention agrees with other projects' functions, on tensors as in a model."""

import pytest

pytest.importorskip("torch")

import torch

import ragged_attention as ra
from ragged_attention.testing.compare import agrees
from ragged_attention.torch import norm_rope_write

modeling = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
BACKENDS = ("reference", "eager", "numba")


@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_and_keys_are_those_of_qwen3(backend):
    """The results equal Qwen3's head norm and rotary embedding in float32, for views of one qkv tensor."""
    torch.manual_seed(3)
    qkv, positions = torch.randn(5, 8 * 32), torch.tensor([0, 3, 7, 1, 9])
    q, k, v = (part.view(5, -1, 32) for part in qkv.split([4 * 32, 2 * 32, 2 * 32], -1))
    norms = [modeling.Qwen3RMSNorm(32, eps=1e-5) for _ in range(2)]
    for norm in norms:
        norm.weight.data.uniform_(0.5, 1.5)
    angles = torch.arange(10)[:, None] / 100 ** (torch.arange(16) / 16)
    whole = torch.cat([angles, angles], -1)[positions][None]
    normed = [norm(x).transpose(0, 1)[None] for norm, x in zip(norms, (q, k), strict=True)]
    with torch.no_grad():
        wanted = [x[0].transpose(0, 1) for x in modeling.apply_rotary_pos_emb(*normed, whole.cos(), whole.sin())]
        weights = {"q_weight": norms[0].weight, "k_weight": norms[1].weight}
        new, pages = norm_rope_write(
            q, k, v, (torch.zeros(2, 4, 2, 32), torch.zeros(2, 4, 2, 32)), torch.tensor([6, 0, -1, 3, 7]),
            positions=positions, cos_sin=(angles.cos(), angles.sin()), eps=1e-5, backend=backend, **weights,
        )  # fmt: skip
    assert agrees(new, wanted[0], "float32")
    rows = pages[0].flatten(0, 1)[torch.tensor([6, 0, 3, 7])]
    assert agrees(rows, wanted[1][[0, 1, 3, 4]], "float32")
    assert not pages[0].flatten(0, 1)[[1, 2, 4, 5]].any()


def test_a_table_whose_rows_are_not_packed_is_refused():
    q, pages = torch.ones(1, 1, 16), torch.zeros(1, 4, 2, 16)
    with pytest.raises(ra.InvalidInput, match="expected cos_sin with a last stride of 1, got 4"):
        norm_rope_write(q, q, q, pages, torch.tensor([0]), positions=torch.tensor([0]), cos_sin=torch.ones(8, 4).T)
