"""Paged decode and chunked prefill on TPUs: how launches are divided, valid options, and reasons to decline a call."""

import dataclasses
import re

import pytest

from ragged_attention.calls import Device
from ragged_attention.errors import InvalidInput
from ragged_attention.testing.drawing import PROFILES, examples_of
from ragged_attention.tools.samples import Sample
from tests.processes import printed

pytest.importorskip("jax")

from ragged_attention.kernels_pallas import paged_attention, prefill_attention
from ragged_attention.kernels_pallas._blocks import next_power_of_2
from ragged_attention.kernels_pallas._heads_first import padded_page

TPU = Device(framework="jax", platform="tpu", shared_memory=16 << 20, scalar_memory=1 << 20)
MEGACORE = dataclasses.replace(TPU, num_multiprocessors=2)
KERNELS = {"paged_attention": paged_attention, "prefill_attention": prefill_attention}


# The mode that detects races; the larger profiles run both modes.
MODES = ["on_wait", "eager"][: 2 if examples_of() > PROFILES["dev"] else 1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("program", ["decode", "prefill"])
def test_every_way_to_cut_a_call_gives_the_same(program, mode):
    printed("-W", "error", "-m", f"tests.programs.heads_first_{program}", mode)


@pytest.mark.parametrize(
    ("sample", "pages", "heads", "per_tile", "rows"),
    [
        (Sample(), 32, 8, 2, 8),
        (Sample(num_q_heads=8), 32, 8, 8, 8),
        (Sample(num_q_heads=5, num_kv_heads=1), 32, 1, 1, 8),
        (Sample(num_q_heads=36, num_kv_heads=12), 32, 6, 2, 8),
        (Sample(num_q_heads=128, num_kv_heads=2), 32, 2, 1, 64),
        (Sample(num_q_heads=22, num_kv_heads=11), 32, 1, 1, 8),
        (Sample(page_size=256), 2, 8, 2, 8),
        (Sample(page_size=5), 64, 8, 2, 8),
        (Sample(max_len=64), 4, 8, 2, 8),
        (Sample(dtype="float32", head_dim=512), 8, 8, 2, 8),
        (Sample(cache_dtype="int8"), 32, 8, 2, 8),
        (Sample(page_size=4096), 1, 1, 1, 8),
    ],
)
def test_a_step_of_decode_takes_the_heads_and_pages_that_fit(sample, pages, heads, per_tile, rows):
    call = sample.call("paged_attention", TPU)
    plan = paged_attention.plan_of(call, paged_attention.heuristic(call))
    assert (plan.pages_per_block, plan.heads, plan.per_tile, plan.rows) == (pages, heads, per_tile, rows)
    assert paged_attention.used_memory(plan, call) <= TPU.shared_memory * 3 // 4


@pytest.mark.parametrize(
    ("sample", "pages", "heads", "block_q"),
    [
        (Sample(num_tokens=512), 32, 8, 64),
        (Sample(num_tokens=12), 32, 8, 16),
        (Sample(num_tokens=512, num_q_heads=128, num_kv_heads=1), 32, 1, 8),
        (Sample(num_tokens=512, num_q_heads=12, num_kv_heads=4), 32, 4, 64),
        (Sample(num_tokens=512, dtype="float32", head_dim=256), 8, 4, 64),
        (Sample(num_tokens=512, page_size=2048), 1, 1, 64),
    ],
)
def test_a_step_of_prefill_takes_the_rows_heads_and_pages_that_fit(sample, pages, heads, block_q):
    call = sample.call("prefill_attention", TPU)
    plan = prefill_attention.plan_of(call, prefill_attention.heuristic(call))
    assert (plan.pages_per_block, plan.heads, plan.block_q) == (pages, heads, block_q)
    assert prefill_attention.used_memory(plan, call) <= TPU.shared_memory * 3 // 4


@pytest.mark.parametrize(
    ("device", "sample", "mode"),
    [
        (TPU, Sample(), None),
        (MEGACORE, Sample(), "batch"),
        (MEGACORE, Sample(max_num_seqs=1), "kv_head"),
        (MEGACORE, Sample(max_num_seqs=1, num_kv_heads=1), None),
    ],
)
def test_cores_share_what_can_be_shared(device, sample, mode):
    assert paged_attention.heuristic(sample.call("paged_attention", device)).megacore_mode == mode


@pytest.mark.parametrize("operation", KERNELS)
@pytest.mark.parametrize(
    ("sample", "device", "reason"),
    [
        (Sample(), TPU, None),
        (Sample(cache_dtype="float8_e5m2", head_dim=24, page_size=3), TPU, None),
        (Sample(), Device(framework="torch", platform="cuda"), "runs on jax arrays, got a call from torch"),
        (Sample(dtype="float16", cache_dtype="int8"), TPU, "TPUs have no float16"),
        (Sample(cache_dtype="float8_e4m3fnuz"), TPU, "reads no cache of float8_e4m3fnuz"),
        (
            Sample(page_size=2**15, max_len=2**15, num_kv_heads=1, num_q_heads=1),
            TPU,
            "has no vector memory for two buffers of a page of call.page_size=32768, call.head_dim=128",
        ),
        (
            Sample(page_size=1, max_len=200000),
            TPU,
            "needs 800008 bytes of scalar memory for 1 row(s) of page_indices, at most 786432 are for them",
        ),
    ],
)
def test_what_the_kernels_take(operation, sample, device, reason):
    assert KERNELS[operation].why_not(sample.call(operation, device)) == reason


@pytest.mark.parametrize(
    ("operation", "options", "error", "text"),
    [
        (
            "paged_attention",
            {"megacore_mode": "heads"},
            InvalidInput,
            "expected megacore_mode to be one of None, 'batch', 'kv_head', got 'heads'",
        ),
        ("paged_attention", {"inline_seq_dim": 1}, TypeError, "expected inline_seq_dim to be a bool, got int"),
        (
            "paged_attention",
            {"pages_per_compute_block": -1},
            InvalidInput,
            "expected pages_per_compute_block between 0 and 1048576, got -1",
        ),
        (
            "prefill_attention",
            {"num_queries_per_block": 24},
            InvalidInput,
            "expected num_queries_per_block to be a power of two from 8, got 24",
        ),
        (
            "prefill_attention",
            {"num_queries_per_block": 4},
            InvalidInput,
            "expected num_queries_per_block to be a power of two from 8, got 4",
        ),
    ],
)
def test_options_have_limits(operation, options, error, text):
    with pytest.raises(error, match=re.escape(text)):
        KERNELS[operation].Tile(**options)


@pytest.mark.parametrize(
    ("operation", "sample", "options", "text"),
    [
        (
            "paged_attention",
            Sample(),
            {"pages_per_compute_block": 3},
            "expected pages_per_compute_block to divide call.pages_per_seq=256, got 3",
        ),
        (
            "paged_attention",
            Sample(max_num_seqs=3),
            {"megacore_mode": "batch"},
            "expected max_num_seqs to be a multiple of cores=2 for megacore_mode='batch', got 3",
        ),
        (
            "paged_attention",
            Sample(num_kv_heads=1),
            {"megacore_mode": "kv_head"},
            "expected num_kv_heads to be a multiple of cores=2 for megacore_mode='kv_head', got 1",
        ),
        (
            "paged_attention",
            Sample(page_size=1024, num_kv_heads=1, num_q_heads=1, max_len=2**15, cache_dtype="int8"),
            {"pages_per_compute_block": 32},
            "expected pages_per_compute_block to fit in 16777216 bytes of vector memory, got 32, which take ",
        ),
        (
            "prefill_attention",
            Sample(page_size=1024, num_kv_heads=1, num_q_heads=1, max_len=2**15, cache_dtype="int8"),
            {"num_kv_pages_per_block": 32},
            "expected num_kv_pages_per_block to fit in 16777216 bytes of vector memory, got 32, which take ",
        ),
    ],
)
def test_options_fit_the_call(operation, sample, options, text):
    kernels = KERNELS[operation]
    with pytest.raises(InvalidInput, match=re.escape(text)):
        kernels.run(sample.call(operation, MEGACORE), kernels.Tile(**options), None)


@pytest.mark.parametrize("page_size", [1, 3, 8, 20, 24, 33, 128, 384])
def test_pages_are_padded_to_whole_registers(page_size):
    assert padded_page(page_size, False) in (page_size, max(8, next_power_of_2(page_size)))
    assert padded_page(page_size, False) % 8 == 0
    scaled = padded_page(page_size, True)
    assert scaled % 128 == 0 or 128 % scaled == 0
