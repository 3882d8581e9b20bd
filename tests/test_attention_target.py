"""The target of an indexer agrees with attention's probabilities and works in a training step."""

import warnings
from typing import Any

import numpy as np
import pytest

from ragged_attention.reference.attention_target import attention_target

torch = pytest.importorskip("torch")

import ragged_attention.torch as rt  # noqa: E402

T, H, D, N = 6, 4, 32, 12
INDICES = torch.tensor([[0, -1, -1], [0, 1, -1], [2, 0, 1], [-1, -1, -1], [4, 4, 0], [11, 3, 99]], dtype=torch.int32)


def latents() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(T, H, D, generator=generator), torch.randn(N, 1, D, generator=generator)


@pytest.mark.parametrize("backend", ["reference", "eager", None])
def test_it_takes_what_sparse_prefill_takes_and_returns(backend: str | None) -> None:
    q, kv = latents()
    indices = INDICES[:, None]
    _, _, lse = rt.sparse_mla_prefill(q, kv, indices, d_v=16)
    target = rt.attention_target(q, kv, lse, indices, backend=backend)
    for token, entries in enumerate(INDICES.tolist()):
        counted = [column for column, key in enumerate(entries) if 0 <= key < N]
        logits = q[token] @ kv[[entries[column] for column in counted], 0].T * D**-0.5
        wanted = torch.zeros(3)
        if counted:
            wanted[counted] = logits.softmax(-1).mean(0)
        torch.testing.assert_close(target[token], wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rt.attention_target(q, kv[:, 0], lse, INDICES, backend=backend), target)


def test_sinks_belong_to_lse() -> None:
    """If the lse includes sinks, which differ by head, the target consists of the probabilities with these sinks."""
    q, kv = latents()
    sinks = torch.tensor([-1.0, 0.0, 2.0, 5.0])
    _, _, lse = rt.sparse_mla_prefill(q, kv, INDICES[:, None], d_v=16, sinks=sinks)
    target = rt.attention_target(q, kv, torch.logaddexp(lse, sinks), INDICES)
    logits = torch.cat([q[2] @ kv[[2, 0, 1], 0].T * D**-0.5, sinks[:, None]], 1)
    shares = logits.softmax(-1)[:, :3].sum(0)
    torch.testing.assert_close(target[2], shares / shares.sum(), rtol=1e-5, atol=1e-5)


def test_the_dense_target_has_the_columns_of_the_logits() -> None:
    q, kv = latents()
    starts, stops = torch.zeros(T, dtype=torch.int32), torch.arange(3, 3 + T, dtype=torch.int32)
    everything = torch.arange(N, dtype=torch.int32).expand(T, 1, N)
    _, _, lse = rt.sparse_mla_prefill(q, kv, everything, d_v=16, topk_lens=stops)
    target = rt.attention_target(q, kv, lse, starts=starts, stops=stops)
    weights, keys = torch.randn(T, 2), torch.randn(N, 16)
    logits = rt.indexer_logits(torch.randn(T, 2, 16), keys, weights, starts=starts, stops=stops)
    assert torch.equal(target == 0, logits == -torch.inf)
    torch.testing.assert_close(target.sum(1), torch.ones(T))


def test_it_is_a_constant() -> None:
    q, kv = latents()
    lse = torch.zeros(T, H, requires_grad=True)
    assert not rt.attention_target(q.requires_grad_(), kv.requires_grad_(), lse, INDICES).requires_grad
    jax = pytest.importorskip("jax")
    rj = pytest.importorskip("ragged_attention.jax")
    given = [array.detach().numpy() for array in (q, kv, lse)]

    def loss(q: Any) -> Any:
        return (rj.attention_target(q, *given[1:], INDICES.numpy()) * q.sum(axis=(1, 2))[:, None]).sum()

    gradient = jax.grad(loss)(given[0])
    target = attention_target(given[0], given[1][:, 0], given[2], INDICES.numpy())
    np.testing.assert_allclose(gradient, np.broadcast_to(target.sum(1)[:, None, None], gradient.shape), rtol=1e-4)


@pytest.mark.parametrize("compiler", [None, "aot_eager", "inductor"])
def test_an_indexer_learns_its_target(compiler: str | None) -> None:
    """Training reduces DeepSeek's sparse attention loss, the divergence from the target over the selected keys."""
    generator = torch.Generator().manual_seed(1)
    q, kv = latents()
    _, _, lse = rt.sparse_mla_prefill(q, kv, INDICES[:, None], d_v=16)
    shapes = {"q": (T, 2, 16), "keys": (N, 16), "weights": (T, 2)}
    given = {name: torch.randn(shape, generator=generator).requires_grad_() for name, shape in shapes.items()}

    def loss(index_q: Any, keys: Any, weights: Any) -> Any:
        target = rt.attention_target(q, kv, lse, INDICES[:, None])
        logits = rt.indexer_logits(index_q, keys, weights, indices=INDICES)
        log_shares = torch.where(logits > -torch.inf, logits, -1e9).log_softmax(-1)
        return torch.nn.functional.kl_div(log_shares, target, reduction="sum")

    torch._dynamo.reset()
    run = loss if compiler is None else torch.compile(loss, fullgraph=True, backend=compiler)
    optimizer = torch.optim.Adam([*given.values()], lr=0.05)
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own internals
        for _ in range(40):
            optimizer.zero_grad()
            value = run(*given.values())
            value.backward()
            optimizer.step()
            losses.append(float(value))
    assert losses[-1] < 0.1 * losses[0], losses
