"""vLLM's decode context parallelism through our classes, on ranks that are threads of one process.

Each rank has its own query heads, its own positions of the cache (the rest is NaN) and its own page numbers. Together
the ranks must return the result of one rank that holds the whole cache.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import ragged_attention as ra
from ragged_attention.calls.sharding import KvShard
from ragged_attention.errors import Unsupported
from ragged_attention.integrations import vllm as ours
from ragged_attention.testing.compare import agrees
from tests import vllm_fakes as fakes
from tests import vllm_rank_fakes as ranks
from tests.test_integration_vllm import (
    KEPT,
    Latents,
    Step,
    attend,
    dequantised,
    implementation,
    latent_implementation,
    metadata_builder,
    vllm_config,
)

# Contexts of 33, 23, 2, 0 and 0 keys. Some of four ranks hold no key of the third request, and no rank holds a key
# of the last two requests.
MIXED = [(1, 34), (7, 30), (1, 3), (18, 18), (1, 1)]
DECODE = [(1, 34), (1, 2), (1, 17)]
HEADS = 2  # query heads per rank


@pytest.fixture(params=["eager", "numba"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with ra.use_backend(request.param):
        yield request.param


def dealt(table: torch.Tensor, lens: Sequence[int], page: int, shard: KvShard) -> tuple[torch.Tensor, Any]:
    """A rank's page table, and a function from a request and positions to slots: -1 for other ranks' positions."""
    pages = [-(-int(shard.lengths(torch.tensor(length))) // page) for length in lens]
    own = torch.full_like(table, 9999)  # unused entries must not be read as pages
    order = (torch.randperm(sum(pages)) + 1).tolist()
    for row, count in enumerate(pages):
        own[row, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)

    def slots(row: int, positions: torch.Tensor) -> torch.Tensor:
        local = shard.local(positions)
        return torch.where(local < 0, -1, own[row, local.clip(0) // page].long() * page + local % page)

    return own, slots


def part_of(whole: Step, group: ranks.Group, interleave: int) -> Step:
    """One rank's part of a step."""
    shard, page, heads = KvShard(group.world_size, interleave, group.rank_in_group), whole.page, group.rank_in_group
    part = object.__new__(Step)
    vars(part).update(vars(whole))
    part.table, slots = dealt(whole.table, [length for _, length in whole.lens], page, shard)
    part.cache = torch.full(whole.cache.shape, float("nan")).to(whole.cache.dtype)
    part.slots, begin = torch.full_like(whole.slots, -1), 0
    for row, (q_len, kv_len) in enumerate(whole.lens):
        positions = torch.arange(kv_len)
        own, there = slots(row, positions), whole.table[row, positions // page].long()
        earlier = (own >= 0) & (positions < kv_len - q_len)
        kept = whole.cache[there[earlier], :, positions[earlier] % page]
        part.cache[own[earlier] // page, :, own[earlier] % page] = kept
        part.slots[begin : begin + q_len] = own[kv_len - q_len :]
        begin += q_len
    part.q = whole.q[:, HEADS * heads : HEADS * (heads + 1)]
    part.common = dataclasses.replace(whole.common, block_table_tensor=part.table, slot_mapping=part.slots)
    return part


def on_ranks(whole: Step, size: int, interleave: int, layers: Sequence[dict[str, Any]], **config: Any) -> torch.Tensor:
    """The output of a layer's step on each rank, with the heads of all ranks side by side.

    `layers` has the options of each rank.
    """

    def rank(group: ranks.Group) -> torch.Tensor:
        part = part_of(whole, group, interleave)
        impl = implementation(num_heads=HEADS, num_kv_heads=1, **layers[group.rank_in_group])
        assert impl.need_to_return_lse_for_decode
        builder = metadata_builder(SimpleNamespace(), ranks=size, interleave=interleave, **config)
        return part.run(impl, builder)

    return torch.cat(ranks.on_ranks(size, rank), dim=1)


@pytest.mark.parametrize("lens", [MIXED, DECODE], ids=["mixed", "decode"])
@pytest.mark.parametrize(("size", "interleave"), [(2, 1), (2, 4), (4, 1), (4, 8), (4, 16)])
def test_attention_over_ranks(size, interleave, lens, vllm, backend):
    whole = Step(lens, heads=(HEADS * size, 1))
    out = on_ranks(whole, size, interleave, [{}] * size)
    undivided = whole.run(implementation(num_heads=HEADS * size, num_kv_heads=1))
    assert agrees(out, whole.dense(), "float32")
    assert agrees(out, undivided.double(), "float32")


@pytest.mark.parametrize("exchange", ["ag_rs", "a2a"])
def test_soft_caps_and_sinks_over_ranks(exchange, vllm, backend):
    """A sink counts only once, for the heads of its own rank, whatever the number of ranks."""
    whole, sinks = Step(MIXED, heads=(4, 1)), torch.tensor([0.5, -1.0, 2.0, 0.0])
    layers = [{"logits_soft_cap": 1.5, "sinks": own} for own in sinks.split(HEADS)]
    out = on_ranks(whole, 2, 4, layers, exchange=exchange)
    whole.run(implementation(num_heads=4, num_kv_heads=1))  # writes the new keys
    assert agrees(out, whole.dense(cap=1.5, sinks=sinks), "float32")


def test_bfloat16_over_ranks(vllm, backend):
    whole = Step(MIXED, heads=(4, 1), dtype=torch.bfloat16)
    out = on_ranks(whole, 2, 1, [{}] * 2)
    whole.run(implementation(num_heads=4, num_kv_heads=1))
    assert agrees(out.float(), whole.dense(), "bfloat16")


def test_an_8_bit_cache_over_ranks(vllm, backend):
    """Earlier keys are read from the 8-bit cache.

    The step's own keys are used unquantised, because no rank's cache has all of them.
    """
    whole = Step([(1, 34), (7, 30)], heads=(4, 1), cache_dtype="fp8", scales=(0.5, 0.25))
    out = on_ranks(whole, 2, 4, [{"kv_cache_dtype": "fp8"}] * 2)
    begin = 0
    for row, (q_len, kv_len) in enumerate(whole.lens):
        at = torch.arange(kv_len - q_len)
        held = whole.cache[whole.table[row, at // whole.page].long(), :, at % whole.page].float()
        new = slice(begin, begin + q_len)
        k = torch.cat((held[..., :32] * 0.5, whole.k[new]))
        v = torch.cat((held[..., 32:] * 0.25, whole.v[new]))
        seen = torch.arange(kv_len) <= torch.arange(kv_len - q_len, kv_len)[:, None]
        want, _ = attend(whole.q[new], k.expand(-1, 4, -1), v.expand(-1, 4, -1), 0.3, seen)
        assert agrees(out[new], want, "float32")
        begin += q_len


def test_new_tokens_that_see_each_other_over_ranks(vllm, backend):
    whole = Step([(7, 30), (3, 3)], heads=(4, 1))
    whole.common.causal = False
    out = on_ranks(whole, 2, 1, [{}] * 2)
    whole.run(implementation(num_heads=4, num_kv_heads=1))
    assert agrees(out, whole.dense(causal=False), "float32")


@pytest.mark.parametrize("known", [True, False])
def test_a_step_without_context_exchanges_nothing(known, vllm, backend):
    """Ranks exchange nothing if the host knows that no request has earlier keys. Exchanges leave results unchanged."""
    whole = Step([(5, 5), (20, 20)], heads=(4, 1))
    if known:
        whole.common.seq_lens_cpu_upper_bound = whole.common.seq_lens
    exchanges = []

    def rank(group: ranks.Group) -> torch.Tensor:
        part, impl = part_of(whole, group, 4), implementation(num_heads=HEADS, num_kv_heads=1)
        out = part.run(impl, metadata_builder(ranks=2, interleave=4))
        exchanges.append(group.exchanges)
        return out

    out = torch.cat(ranks.on_ranks(2, rank), dim=1)
    whole.run(implementation(num_heads=4, num_kv_heads=1))
    assert agrees(out, whole.dense(), "float32")
    assert exchanges == [0, 0] if known else min(exchanges) > 0


def test_a_graph_is_captured_with_its_exchanges(vllm):
    """A captured graph contains the exchanges, because only some of its steps have context.

    The lengths stay in the memory that they had during the capture.
    """
    whole = Step([(5, 5), (20, 20)], heads=(4, 1))
    whole.common.seq_lens_cpu_upper_bound = whole.common.seq_lens

    def rank(group: ranks.Group) -> None:
        builder = metadata_builder(ranks=2, interleave=4)
        assert builder.build(0, whole.common).context_lens is None
        captured = builder.build_for_cudagraph_capture(whole.common)
        assert captured.context_lens.tolist() == [0, 0]
        longer = dataclasses.replace(whole.common, seq_lens=torch.tensor([20, 21]).int(), seq_lens_cpu_upper_bound=None)
        replayed = builder.build(0, longer)
        assert captured.context_lens.tolist() == [[8, 1], [7, 0]][group.rank_in_group]
        assert replayed.context_lens.data_ptr() == captured.context_lens.data_ptr()

    ranks.on_ranks(2, rank)
    alone = metadata_builder()
    assert alone.build_for_cudagraph_capture(whole.common).context_lens is None


def test_a_cache_that_every_rank_holds_is_read_as_ever(vllm, backend):
    """A cache that every rank has as a whole is read without exchanges between ranks.

    Small draft models have such caches, which vLLM marks in the cache's specification.
    """
    whole = Step(MIXED, heads=(4, 1))
    builder = metadata_builder(SimpleNamespace(dcp_sharded=False), ranks=2)
    assert agrees(whole.run(implementation(num_heads=4, num_kv_heads=1), builder), whole.dense(), "float32")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sliding_window": 9}, "expected sliding_window to be None for RAGGED under context parallelism, got 9"),
        (
            {"kv_sharing_target_layer_name": "model.layers.1"},
            "expected kv_sharing_target_layer_name to be None for RAGGED under context .*, got 'model.layers.1'",
        ),
        ({"alibi_slopes": [0.5] * 4}, "expected alibi_slopes to be None for RAGGED"),
        (
            {"attn_type": "encoder_decoder"},
            "expected attn_type to be decoder for RAGGED under context parallelism, got 'encoder_decoder'",
        ),
    ],
)
def test_a_layer_that_cannot_run_over_ranks_is_refused(options, message, vllm):
    def rank(group: ranks.Group) -> None:
        implementation(attn_type="encoder_only")  # accepted, because this layer has no cache
        with pytest.raises(Unsupported, match=message):
            implementation(**options)

    ranks.on_ranks(2, rank)


# Sparse latent attention


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_ds_mla"])
@pytest.mark.parametrize("q_lens", [(1, 1, 1), (1, 6, 2)], ids=["decode", "mixed"])
@pytest.mark.parametrize(("size", "interleave"), [(2, 1), (2, 4), (4, 16)])
def test_sparse_mla_over_ranks(size, interleave, q_lens, kv_cache_dtype, vllm, backend):
    """Sparse MLA works over ranks: each rank attends to its own positions in the lists, which all ranks share."""
    whole, tokens, heads = Latents([40, 16, 23], rank=512, rope=64), sum(q_lens), HEADS * size
    owner = [row for row, n in enumerate(q_lens) for _ in range(n)]
    seen = [whole.lens[row] - n + i + 1 for row, n in enumerate(q_lens) for i in range(n)]
    buffer = torch.full((tokens + 4, 8), -1, dtype=torch.int32)
    for t in range(tokens):
        chosen = torch.randperm(seen[t])[:5].int()
        buffer[t, torch.randperm(8)[: len(chosen)]] = chosen  # lists may contain -1 anywhere
    buffer[0] = -1  # an empty list
    buffer[1, :], buffer[1, 3] = -1, seen[1] - 1  # a list whose only position is on one rank
    q = torch.randn(tokens, heads, 576)
    packed = kv_cache_dtype == "fp8_ds_mla"
    width, dtype, unwritten = (656, torch.uint8, 255) if packed else (576, torch.float32, float("nan"))

    def rank(group: ranks.Group) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        shard = KvShard(size, interleave, group.rank_in_group)
        table, slots = dealt(whole.table, whole.lens, whole.page, shard)
        impl = latent_implementation(
            "SparseMLA", 512, 64, kv_cache_dtype=kv_cache_dtype, heads=HEADS,
            indexer=SimpleNamespace(topk_indices_buffer=buffer),
        )  # fmt: skip
        assert impl.need_to_return_lse_for_decode
        cache = torch.full((len(whole.cache) + 1, whole.page, width), unwritten, dtype=dtype)
        own = torch.cat([slots(row, torch.arange(length)) for row, length in enumerate(whole.lens)])
        kv_c, k_pe = torch.cat(whole.rows).split([512, 64], -1)
        impl.do_kv_cache_update(kv_c, k_pe.unsqueeze(1), cache, own, kv_cache_dtype, torch.tensor(1.0))
        builder_cls = ours.RaggedSparseMLABackend.get_builder_cls()
        builder = builder_cls(None, ["layer"], vllm_config(size, interleave), torch.device("cpu"))
        edges = torch.tensor([0, *q_lens]).cumsum(0, dtype=torch.int32)
        common = fakes.CommonAttentionMetadata(
            query_start_loc=edges, query_start_loc_cpu=edges, seq_lens=whole.kv_lens, num_reqs=len(q_lens),
            num_actual_tokens=tokens, max_query_len=max(q_lens), max_seq_len=max(whole.lens),
            block_table_tensor=table, slot_mapping=own,
        )  # fmt: skip
        metadata = builder.build(0, common)
        assert metadata.seq_lens is whole.kv_lens  # vLLM's layer reads the lengths from this field
        out, lse = impl.forward_mqa(q, cache, metadata, SimpleNamespace())
        assert (out[0] == 0).all()
        assert (lse[0] == float("-inf")).all()
        merged, lse = ranks.cp_lse_ag_out_rs(out, lse, group, return_lse=True)
        return merged, lse, [torch.empty(0)] if not packed else [dequantised(cache[s // 16, s % 16]) for s in [own]]

    results = ranks.on_ranks(size, rank)
    out, lse = (torch.cat([result[i] for result in results], dim=1) for i in range(2))
    rows = torch.cat(whole.rows)
    if packed:  # each position's row as written by the rank that holds it
        holder = torch.cat([torch.arange(length) // interleave % size for length in whole.lens])
        rows = torch.stack([result[2][0] for result in results])[holder, torch.arange(len(rows))]
    kept = rows.split(whole.lens)
    for t in range(tokens):
        mine = kept[owner[t]][buffer[t][buffer[t] >= 0].long()]
        want, want_lse = attend(q[t : t + 1], mine, mine[:, :512], 0.2)
        assert agrees(out[t : t + 1], want, "float32")
        assert agrees(lse[t : t + 1], want_lse, "lse float32")


def test_padding_stays(vllm):
    """Padding rows of the output keep `KEPT` under context parallelism too."""
    whole = Step(DECODE, heads=(4, 1), padding=5)
    out = on_ranks(whole, 2, 1, [{}] * 2)  # `Step.run` checks the padding rows
    assert not (out == KEPT).any()
