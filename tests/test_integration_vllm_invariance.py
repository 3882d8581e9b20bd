"""With `VLLM_BATCH_INVARIANT=1`, a request's attention through our classes has the same bits alone and in a batch.

Each request runs alone, and then in a batch before and after other requests, with equal numbers of new tokens.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import ragged_attention as ra
from ragged_attention.errors import Unsupported
from ragged_attention.integrations import vllm as ours
from tests import vllm_fakes as fakes
from tests.test_integration_vllm import (
    Latents,
    Step,
    decode_of,
    implementation,
    latent_implementation,
    sparse_step,
    vllm_config,
)


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[fakes.Registry]:
    """A fake vLLM with its variable set, and Numba's backend, the only one on a CPU that is batch-invariant."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with fakes.installed(monkeypatch) as registry, ra.use_backend("numba"):
        yield registry


def batches(count: int) -> list[list[int]]:
    """Batches of each request alone, of all requests, and of all requests in reverse order."""
    return [*([row] for row in range(count)), [*range(count)], [*reversed(range(count))]]


def expect_the_same_bits(found: Sequence[dict[int, Any]]) -> None:
    """Assert that every request has the same bits in all of its batches."""
    for results in found:
        for row, tensors in results.items():
            for got, alone in zip(tensors, found[row][row], strict=True):
                assert torch.equal(got, alone), f"request {row} of {[*results]}"


def rows_of(q_lens: Sequence[int], batch: Sequence[int]) -> dict[int, slice]:
    """The rows of each request's tokens in a batch."""
    places, begin = {}, 0
    for row in batch:
        places[row] = slice(begin, begin + q_lens[row])
        begin += q_lens[row]
    return places


# (new tokens, length) of requests. One has too many new tokens for latent attention to be cheaper. The first one's
# context is long enough for KV splits, whose number depends on the rest of the batch unless invariance is requested.
LENS = ((1, 2000), (7, 300), (150, 1500), (1, 1), (20, 20))


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_mla(kv_cache_dtype):
    data = Latents([length for _, length in LENS])
    q_lens = [q_len for q_len, _ in LENS]
    impl = latent_implementation("MLA", 64, 16, kv_cache_dtype=kv_cache_dtype)
    cache = data.cache if kv_cache_dtype == "auto" else torch.full(data.cache.shape, 127, dtype=torch.uint8)
    data.write(impl, cache, kv_cache_dtype, scale=0.02)
    q = torch.randn(sum(q_lens), 2, 80)
    given, found = rows_of(q_lens, range(len(LENS))), []
    for batch in batches(len(LENS)):
        part = SimpleNamespace(table=data.table[batch], kv_lens=data.kv_lens[batch])
        metadata: Any = decode_of(part, [q_lens[row] for row in batch])  # type: ignore[arg-type]
        layer = SimpleNamespace(_k_scale=torch.tensor(0.02))
        out, lse = impl.forward_mqa(torch.cat([q[given[row]] for row in batch]), cache, metadata, layer)
        found.append({row: (out[place], lse[place]) for row, place in rows_of(q_lens, batch).items()})
    expect_the_same_bits(found)


def test_every_request_of_mla_goes_by_latents(monkeypatch):
    """Every request of MLA runs as latent attention, because it counts as a decode.

    vLLM's builder counts requests up to its threshold as decodes if all requests before them in the batch are decodes.
    """
    builder_cls = ours.RaggedMLABackend.get_builder_cls()
    config = vllm_config()
    assert (
        builder_cls(None, ["layer"], config, torch.device("cpu")).reorder_batch_threshold == 64
    )  # the most tokens of a step
    with pytest.raises(Unsupported, match="expected no context parallelism for RAGGED_MLA with VLLM_BATCH_INVARIANT=1"):
        builder_cls(None, ["layer"], vllm_config(2), torch.device("cpu"))
    impl, unread = latent_implementation("MLA", 64, 16), torch.empty(0)
    with pytest.raises(Unsupported, match="expected all requests as decodes with VLLM_BATCH_INVARIANT=1"):
        impl.forward_mha(unread, unread, unread, unread, None, unread, unread)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    assert builder_cls(None, ["layer"], config, torch.device("cpu")).reorder_batch_threshold == 128
    assert builder_cls(None, ["layer"], vllm_config(2), torch.device("cpu")).reorder_batch_threshold == 1


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_ds_mla"])
def test_sparse_mla(kv_cache_dtype):
    """Sparse MLA is invariant, also in batches of decodes, which use another operation without invariance."""
    data, q_lens, topk = Latents([1100, 70, 1050, 40], rank=512, rope=64), [1, 6, 1, 2], 1024
    given = rows_of(q_lens, range(4))
    lists = torch.full((sum(q_lens), topk), -1, dtype=torch.int32)
    for row, place in given.items():
        for i, token in enumerate(range(place.start, place.stop)):
            chosen = torch.randperm(data.lens[row] - q_lens[row] + i + 1)[:topk].int()
            lists[token, : len(chosen)] = chosen
    indexer = SimpleNamespace(topk_indices_buffer=lists)
    impl = latent_implementation("SparseMLA", 512, 64, kv_cache_dtype=kv_cache_dtype, indexer=indexer)
    packed = kv_cache_dtype == "fp8_ds_mla"
    cache = torch.full((*data.cache.shape[:2], 656), 255, dtype=torch.uint8) if packed else data.cache
    data.write(impl, cache, kv_cache_dtype)
    q, found = torch.randn(sum(q_lens), 2, 576), []
    for batch in [*batches(4), [0, 2], [2, 0]]:
        part = SimpleNamespace(table=data.table[batch], kv_lens=data.kv_lens[batch], lens=data.lens)
        own = torch.cat([torch.arange(given[row].start, given[row].stop) for row in batch])
        indexer.topk_indices_buffer = lists[own]
        metadata = sparse_step(part, [q_lens[row] for row in batch])  # type: ignore[arg-type]
        out, lse = impl.forward_mqa(q[own], cache, metadata, SimpleNamespace())
        found.append({row: (out[place], lse[place]) for row, place in rows_of(q_lens, batch).items()})
    expect_the_same_bits(found)


@pytest.mark.parametrize(
    "options",
    [{}, {"sliding_window": 40}, {"attn_type": "encoder_only"}, {"attn_type": "encoder", "sliding_window": 40}],
)
def test_attention(options):
    """Attention is invariant, over the cache and in layers without a cache."""
    step, impl, q_lens = Step(LENS, padding=0), implementation(**options), [q_len for q_len, _ in LENS]
    given, found = rows_of(q_lens, range(len(LENS))), []
    for batch in batches(len(LENS)):
        part = object.__new__(Step)
        vars(part).update(vars(step))
        own = torch.cat([torch.arange(given[row].start, given[row].stop) for row in batch])
        part.q, part.k, part.v, part.slots, part.tokens = (
            step.q[own],
            step.k[own],
            step.v[own],
            step.slots[own],
            len(own),
        )
        edges = torch.tensor([0, *(q_lens[row] for row in batch)]).cumsum(0, dtype=torch.int32)
        part.common = dataclasses.replace(
            step.common, query_start_loc=edges, query_start_loc_cpu=edges, seq_lens=step.common.seq_lens[batch],
            num_reqs=len(batch), num_actual_tokens=len(own), max_query_len=max(q_lens[row] for row in batch),
            block_table_tensor=step.table[batch], slot_mapping=part.slots,
        )  # fmt: skip
        out = part.run(impl)
        found.append({row: (out[place],) for row, place in rows_of(q_lens, batch).items()})
    expect_the_same_bits(found)


def test_backends_that_do_not_promise_it_refuse():
    step = Step([(1, 20)])
    with ra.use_backend("eager"), pytest.raises(Unsupported, match="does not promise the same bits in every batch"):
        step.run(implementation())
