"""Attention over lists of selected blocks agrees with two other formulations of block-sparse attention.

Both formulations are reimplemented here. In the first, each query gathers the keys of its blocks, as in naive
implementations of native sparse attention. The second is a dense mask in which each block is on or off, as in
FlashInfer's sparse attention for MiniMax.
"""

import math
from typing import Any

import numpy as np
import pytest

import ragged_attention as ra
from ragged_attention.calls.fields import MAX_BLOCK_SIZE
from ragged_attention.explain import explanation
from ragged_attention.testing.compare import agrees
from ragged_attention.tools.samples import Sample, device_of

torch = pytest.importorskip("torch")
rt = pytest.importorskip("ragged_attention.torch")


SIZES = [2**power for power in range(MAX_BLOCK_SIZE.bit_length())]
BACKENDS = ("reference", "eager", "numba", "triton")
WITH_GRADIENT = ("reference", "eager")
KV_HEADS, GROUP, WIDTH = 2, 3, 16
# (q_len, kv_len): decode, chunk, prompt, no keys, fewer keys than queries
LENS = ((1, 530), (70, 300), (5, 5), (3, 0), (4, 2))


def random_lists(rng: np.random.Generator, heads: int, size: int, length: int = 6) -> Any:
    """Lists [T, heads, length] in which most entries name blocks; the others are duplicates, -1 or out of range."""
    tokens = sum(q_len for q_len, _ in LENS)
    named = rng.integers(0, max(600 // size, 1) + 1, (tokens, heads, length))
    named[..., -1] = named[..., 0]
    wild = rng.choice([-1, -1, -(2**31), 2**31 - 1, 2**31 // size, -7, 10**6], named.shape)
    return torch.from_numpy(np.where(rng.random(named.shape) < 0.3, wild, named).astype(np.int32))


def by_gathering(q: Any, k: Any, v: Any, lists: Any, size: int, causal: bool) -> tuple[Any, Any]:
    """Out and lse of one sequence: each query gathers its distinct blocks' keys, up to its position if `causal`."""
    q_len, heads, width = q.shape
    kv_len = len(k)
    out = q.new_zeros(q_len, heads, v.shape[-1])
    lse = q.new_full((q_len, heads), -torch.inf)
    for token in range(q_len):
        for head in range(heads):
            kv_head = head // GROUP
            own = lists[token, kv_head if lists.shape[1] > 1 else 0].tolist()
            last = kv_len - q_len + token if causal else kv_len - 1
            keys = [key for block in sorted(set(own)) for key in range(block * size, min((block + 1) * size, last + 1))
                    if 0 <= block <= last // size]  # fmt: skip
            if keys:
                logits = k[keys, kv_head] @ q[token, head] / math.sqrt(width)
                lse[token, head] = torch.logsumexp(logits, 0)
                out[token, head] = torch.softmax(logits, 0) @ v[keys, kv_head]
    return out, lse


def by_mask(q: Any, k: Any, v: Any, lists: Any, size: int, causal: bool) -> tuple[Any, Any]:
    """Out and lse of one sequence, by a dense mask that is on for the blocks in a query's list."""
    q_len, kv_len = len(q), len(k)
    block = torch.arange(kv_len) // size
    on = (lists.long()[..., None] == block).any(2).transpose(0, 1)  # [K or 1, q_len, kv_len]
    if causal:
        on = on & (torch.arange(kv_len) <= kv_len - q_len + torch.arange(q_len)[:, None])
    on = on.expand(KV_HEADS, -1, -1).repeat_interleave(GROUP, 0)
    k, v = (array.repeat_interleave(GROUP, 1) for array in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    logits = logits.masked_fill(~on, -torch.inf)
    lse = torch.logsumexp(logits, -1) if kv_len else logits.new_full(logits.shape[:2], -torch.inf)
    weights = torch.exp(logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return torch.einsum("hqk,khd->qhd", weights, v), lse.T


def sequences(dtype: Any = torch.float64) -> tuple[list[Any], Any, Any]:
    """The queries, keys and values of each sequence, and cu_q_lens and cu_kv_lens."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    made = [
        (normal(q_len, KV_HEADS * GROUP, WIDTH), *(normal(kv_len, KV_HEADS, WIDTH) for _ in range(2)))
        for q_len, kv_len in LENS
    ]
    edges = [torch.tensor(np.cumsum([0, *lens]), dtype=torch.int32) for lens in zip(*LENS, strict=True)]
    return made, *edges


def definition(made: list[Any], lists: Any, size: int, causal: bool, form: Any = by_mask) -> tuple[Any, Any]:
    """Out and lse of all sequences by one formulation, `by_mask` or `by_gathering`."""
    ends = np.cumsum([len(q) for q, _, _ in made])
    found = [
        form(q.double(), k.double(), v.double(), lists[end - len(q) : end], size, causal)
        for end, (q, k, v) in zip(ends, made, strict=True)
    ]
    out, lse = (torch.cat(parts) for parts in zip(*found, strict=True))
    return out, lse


@pytest.mark.parametrize("size", SIZES)
def test_both_definitions_say_the_same(size: int) -> None:
    made, _, _ = sequences()
    lists = random_lists(np.random.default_rng(size), KV_HEADS, size)
    for causal in (True, False):
        for one, other in zip(*(definition(made, lists, size, causal, form) for form in (by_mask, by_gathering)),
                              strict=True):  # fmt: skip
            torch.testing.assert_close(one, other)


def paged(made: list[Any], size: int) -> dict[str, Any]:
    """Arguments with the sequences' keys in pages of `size`, which are NaN where no sequence has a key."""
    counts = [-(-len(k) // size) for _, k, _ in made]
    order, starts = np.random.default_rng(1).permutation(sum(counts)), np.cumsum([0, *counts])
    table = torch.zeros(len(made), max(counts), dtype=torch.int32)
    pages = [torch.full((sum(counts), size, KV_HEADS, WIDTH), torch.nan) for _ in range(2)]
    for seq, (_, *rows) in enumerate(made):
        own = torch.from_numpy(order[starts[seq] : starts[seq + 1]])
        table[seq, : len(own)] = own
        for held, array in zip(pages, rows, strict=True):
            slots = own.repeat_interleave(size)[: len(array)], torch.arange(len(array)) % size
            held[slots] = array.float()
    return {
        "kv_pages": tuple(pages), "page_indices": table,
        "kv_lens": torch.tensor([len(k) for _, k, _ in made], dtype=torch.int32),
    }  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", SIZES)
def test_ragged_paged_attention_is_the_definition(size: int, backend: str) -> None:
    made, edges, _ = sequences(torch.float32)
    arguments = {"q": torch.cat([q for q, _, _ in made]), "cu_q_lens": edges, **paged(made, 16)}
    for heads, causal in ((KV_HEADS, True), (1, False)):
        lists = random_lists(np.random.default_rng(size), heads, size)
        out, lse = rt.ragged_paged_attention(
            **arguments, selected=lists, block_size=size, causal=causal, return_lse=True, backend=backend
        )
        want_out, want_lse = definition(made, lists, size, causal)
        agrees(out.numpy(), want_out.numpy(), "float32")
        agrees(lse.numpy(), want_lse.numpy(), "lse float32")


@pytest.mark.parametrize("backend", WITH_GRADIENT)
@pytest.mark.parametrize("size", SIZES)
def test_varlen_attention_and_its_gradient_are_the_definition(size: int, backend: str) -> None:
    """Results equal those of the dense mask, and the gradient equals torch's gradient through that mask."""
    made, *edges = sequences(torch.float64)
    for heads, causal in ((KV_HEADS, True), (1, False)):
        lists = random_lists(np.random.default_rng(size), heads, size)
        packed = [torch.cat(arrays).requires_grad_() for arrays in zip(*made, strict=True)]
        given = [array.detach().clone().requires_grad_() for array in packed]
        out, lse = rt.varlen_attention(
            *given, *edges, selected=lists, block_size=size, causal=causal, return_lse=True, backend=backend
        )
        parts = zip(
            *(array.split([pair[index > 0] for pair in LENS]) for index, array in enumerate(packed)), strict=True
        )
        want_out, want_lse = definition(list(parts), lists, size, causal)
        torch.testing.assert_close(out, want_out)
        torch.testing.assert_close(lse, want_lse)
        d_out, d_lse = torch.randn_like(out), torch.randn_like(lse)
        sums = [
            (out * d_out).sum() + (torch.where(lse == -torch.inf, 0, lse) * d_lse).sum()
            for out, lse in ((out, lse), (want_out, want_lse))
        ]
        found, want = torch.autograd.grad(sums[0], given), torch.autograd.grad(sums[1], packed)
        for one, other in zip(found, want, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("backend", WITH_GRADIENT)
@pytest.mark.parametrize("size", [1, 4, 16])
def test_finite_differences_agree(size: int, backend: str) -> None:
    generator = torch.Generator().manual_seed(size)
    q, k, v = (
        torch.randn(n, heads, 5, generator=generator, dtype=torch.float64) for n, heads in ((6, 4), (12, 2), (12, 2))
    )
    sinks = torch.randn(4, generator=generator, dtype=torch.float64)
    bias = torch.randn(4, 7, generator=generator, dtype=torch.float64)
    lists = torch.randint(-1, 10 // size + 2, (6, 2, 3), generator=generator, dtype=torch.int32)
    edges = torch.tensor([0, 4, 6], dtype=torch.int32), torch.tensor([0, 9, 12], dtype=torch.int32)

    def attend(q: Any, k: Any, v: Any, sinks: Any, bias: Any) -> Any:
        out, lse = rt.varlen_attention(
            q, k, v, *edges, selected=lists, block_size=size, causal=True, sinks=sinks, relative_bias=bias,
            soft_cap=2.0, return_lse=True, backend=backend,
        )  # fmt: skip
        return out, torch.where(lse == -torch.inf, 0.0, lse)

    arguments = [array.requires_grad_() for array in (q, k, v, sinks, bias)]
    assert torch.autograd.gradcheck(attend, arguments, fast_mode=True)


@pytest.mark.parametrize("backend", WITH_GRADIENT)
def test_lists_have_no_gradient_and_are_left_alone(backend: str) -> None:
    made, *edges = sequences(torch.float32)
    lists = random_lists(np.random.default_rng(0), KV_HEADS, 8)
    before = lists.clone()
    q, k, v = (torch.cat(arrays).requires_grad_() for arrays in zip(*made, strict=True))
    rt.varlen_attention(q, k, v, *edges, selected=lists, block_size=8, backend=backend).sum().backward()
    assert torch.equal(lists, before)
    assert lists.grad is None


@pytest.mark.parametrize("backend", ["reference", "numba", "triton"])
def test_padding_of_lists_changes_no_bit_of_a_batch_invariant_call(backend: str) -> None:
    made, edges, _ = sequences(torch.float32)
    arguments = {"q": torch.cat([q for q, _, _ in made]), "cu_q_lens": edges, **paged(made, 16)}
    lists = random_lists(np.random.default_rng(0), 1, 32, length=24)
    found = []
    for more in (0, 1, 40):
        padded = torch.nn.functional.pad(lists, (0, more), value=-1)
        with ra.use_backend(batch_invariant=True):
            out = rt.ragged_paged_attention(**arguments, selected=padded, block_size=32, backend=backend)
        found.append(out)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("listed", [True, False])
def test_explain_names_the_view_of_calls_that_it_can_show(listed: bool) -> None:
    sample = Sample(selected=4, block_size=16) if listed else Sample()
    told = explanation(sample.call("ragged_paged_attention", device_of("torch", "sm_90")), backend=["triton", "eager"])
    assert "* triton" in told
    assert ("ragged-attention view" in told) != listed
