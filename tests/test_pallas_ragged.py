"""Ragged paged attention on TPUs: limits of tiles, refused calls, and page tables that are read in pieces."""

import dataclasses
import importlib
import types
from typing import Any

import numpy as np
import pytest

import ragged_attention as ra
from ragged_attention import dispatch
from ragged_attention.calls import Device
from ragged_attention.calls.cache_formats import SCALED_FORMATS
from ragged_attention.tools.samples import FakeArray, sample_of
from tests.processes import printed

jax = pytest.importorskip("jax")

from jax.experimental.pallas import tpu as pltpu  # noqa: E402

from ragged_attention.kernels_pallas import _ragged_kernel as kernel  # noqa: E402
from ragged_attention.kernels_pallas import _scale_pages as scale_pages  # noqa: E402
from ragged_attention.kernels_pallas import ragged_paged_attention as kernels  # noqa: E402
from ragged_attention.kernels_pallas._ranges import ranges_of  # noqa: E402

TPU = Device(framework="jax", platform="tpu", shared_memory=128 << 20, scalar_memory=1 << 20)


def _call(device: Device = TPU, **sample: Any) -> Any:
    return sample_of("ragged_paged_attention", **sample).call("ragged_paged_attention", device)


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"num_kv_pages_per_block": 0}, ra.InvalidInput, "expected num_kv_pages_per_block between 1 and 4096, got 0"),
        ({"num_kv_pages_per_block": 2.0}, TypeError, "expected num_kv_pages_per_block to be an int, got float"),
        ({"num_queries_per_block": 1025}, ra.InvalidInput, "expected num_queries_per_block between 1 and 1024"),
        ({"block_kv": 200}, ra.InvalidInput, "expected block_kv to be a multiple of 128, got 200"),
        ({"decode_block_kv": 130}, ra.InvalidInput, "expected decode_block_kv to be a multiple of 128, got 130"),
        ({"split_weights_below": -1}, ra.InvalidInput, "expected split_weights_below between 0 and"),
        ({"vmem_limit_bytes": True}, TypeError, "expected vmem_limit_bytes to be an int, got bool"),
        ({"fused_update": 1}, TypeError, "expected fused_update to be a bool, got int"),
    ],
)
def test_tiles_have_limits(fields: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"^{text}"):
        kernels.Tile(**fields)


def test_what_is_refused_and_why() -> None:
    assert kernels.why_not(_call()) is None
    assert kernels.why_not(_call(dtype="float16")) == "TPUs have no float16"
    assert kernels.why_not(_call(cache_dtype="float8_e4m3fnuz")) == "reads no cache of float8_e4m3fnuz"
    torch = Device(framework="torch", platform="cpu")
    assert kernels.why_not(_call(device=torch)) == "runs on jax arrays, got a call from torch"
    small = dataclasses.replace(TPU, shared_memory=1 << 16)
    assert "bytes of vector memory for pages of 16 positions, 49152 are for them" in str(
        kernels.why_not(_call(device=small))
    )
    narrow = dataclasses.replace(TPU, scalar_memory=8)
    assert "bytes of scalar memory for one row of page_indices" in str(kernels.why_not(_call(device=narrow)))


ONE_SCALE = "takes scale pages of one scale for each row and no zero points, got "
PAIRS = [
    ("int8", "bfloat16", "takes keys and values of one format, got int8 beside bfloat16"),
    ("float8_e4m3fn", "float8_e5m2", "takes keys and values of one format, got float8_e4m3fn beside float8_e5m2"),
    ("int8", "float8_e4m3fnuz", "takes keys and values of one format, got int8 beside float8_e4m3fnuz"),
]


@pytest.mark.parametrize("operation", ["ragged_paged_attention", "write_kv_pages"])
def test_which_formats_are_taken(operation: str) -> None:
    module = importlib.import_module(f"ragged_attention.kernels_pallas.{operation}")
    expected = {
        "int8_token_head": None,
        "e4m3_token_head": None,
        "e5m2_token_head": None,
        "e4m3fnuz_token_head": "reads no cache of float8_e4m3fnuz",
        **{name: ONE_SCALE + name for name in ("int4_token_head", "nvfp4", "mxfp8", "mxfp4")},
    }
    assert set(expected) == {form.name for form in SCALED_FORMATS}
    for name, reason in expected.items():
        assert dispatch.refusal("pallas", sample_of(operation, kv_format=name).call(operation, TPU)) == reason
    sample = sample_of(operation, kv_format="int8_token_head", split_pages=True)
    call: Any = sample.call(operation, TPU)
    absent = dataclasses.replace(call, v_scale_pages=None, v_scale=1.0)
    assert module.why_not(absent) == "takes keys and values of one format, got int8_token_head beside int8"
    for k, v, reason in PAIRS:
        pages = tuple(FakeArray(call.k_pages_like.shape, dtype) for dtype in (k, v))
        scales = {"k_scale": 1.0, "v_scale": 1.0, "k_scale_pages": None, "v_scale_pages": None}
        plain = dataclasses.replace(call, kv_pages=pages, **scales)
        assert module.why_not(plain) == reason


HEADS_AND_PAGES = [(1, 16), (2, 3), (3, 24), (8, 16), (8, 7), (40, 4), (100, 2), (4, 512)]


@pytest.mark.parametrize(("heads", "page_size"), HEADS_AND_PAGES)
@pytest.mark.parametrize("block_q", [1, 16])
def test_each_row_of_a_part_finds_its_scales(
    monkeypatch: pytest.MonkeyPatch, heads: int, page_size: int, block_q: int
) -> None:
    """Scales read from lines, as the kernel reads them, are in the order of the operand's rows."""
    monkeypatch.setattr(pltpu, "roll", jax.numpy.roll)  # `pltpu.roll` works only inside kernels
    rng = np.random.default_rng(page_size)
    call = _call(num_q_heads=heads, num_kv_heads=heads, page_size=page_size, kv_format="int8_token_head", max_len=600)
    plan = kernels.plan_of(call, kernels.Tile(num_kv_pages_per_block=-(-512 // page_size)), block_q, 32)
    k, v = (rng.standard_normal((plan.pages, page_size, heads, 1)).astype(np.float32) for _ in "kv")
    k[-1, 0], v[0, -1] = np.nan, np.inf
    buffer = scale_pages.in_lines(jax.numpy.asarray(k), jax.numpy.asarray(v))[None]
    assert plan.scale_lines is not None
    assert buffer.shape[2:] == (plan.scale_lines.lines, plan.scale_lines.width)
    wanted = np.concatenate([k[..., 0], v[..., 0]], axis=2).reshape(plan.block, -1)
    for part in range(plan.block // plan.block_kv):
        found = np.asarray(scale_pages.scales_of_part(plan, buffer, 0, part))
        keys = part * plan.block_kv + plan.order(np.arange(plan.block_kv))
        np.testing.assert_array_equal(found[:, : 2 * heads], wanted[keys])


def test_an_update_numbers_slots_in_int32() -> None:
    call = _call(max_num_seqs=2**20)
    new = [jax.ShapeDtypeStruct((call.num_tokens, call.num_kv_heads, call.head_dim), call.q.dtype)] * 2
    assert kernels.why_not(call) is None
    text = "expected num_pages * page_size < 2**31 - 1, got 4294967296"
    assert kernels.why_not(dataclasses.replace(call, new_kv=tuple(new))) == text


@pytest.mark.parametrize("version", ["TPU_V4", "TPU_V5E", "TPU_V5P", "TPU_V6E", "TPU_7X"])
@pytest.mark.parametrize("heads", [(32, 8), (8, 1), (12, 2), (5, 1), (64, 8)])
@pytest.mark.parametrize("page_size", [16, 128, 256])
def test_the_heuristic_keeps_to_the_vector_memory(version: str, heads: tuple[int, int], page_size: int) -> None:
    info = pltpu.get_tpu_info_for_chip(getattr(pltpu.ChipVersion, version), 1)
    device = dataclasses.replace(TPU, shared_memory=info.vmem_capacity_bytes, scalar_memory=info.smem_capacity_bytes)
    for head_dim in (64, 128, 256):
        call = _call(device, num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, page_size=page_size)
        tile = kernels.heuristic(call)
        assert kernels.used_memory(call, tile) <= device.shared_memory * 5 // 8
        assert kernels.used_memory(call, tile) < tile.vmem_limit_bytes <= device.shared_memory


def test_a_table_beyond_scalar_memory_is_taken_in_pieces() -> None:
    printed("-m", "tests.programs.table_in_pieces")


def test_blocks_between_ranges_are_left_out() -> None:
    """A tile visits no block between two ranges: here a prefix and a window per query, then queries without keys."""
    call = _call(num_tokens=40, max_num_seqs=2, max_len=4096, key_ranges=2)
    plan = kernels.plan_of(call, kernels.Tile(num_kv_pages_per_block=16, num_queries_per_block=16), 16, 40)
    assert plan.block == 256
    starts, q_lens, kv_lens = (np.array(each, np.int32) for each in ([0, 20], [20, 17], [4000, 700]))
    seqs = kernel.Sequences(starts, q_lens, kv_lens, None)
    ranges = np.array([[[0, 300], [3600 + row, 3700 + row]] for row in range(20)] + [[[5, 5], [9, 2]]] * 20, np.int32)
    ranges[37:] = [[0, 4000], [-9, 9]]  # padding rows
    found, rows = ranges_of(plan, seqs, q_lens > 1, jax.numpy.asarray(ranges))
    assert (found.first_tiles.tolist(), rows.shape[1:]) == ([0, 2], (4, plan.rows))
    assert not rows[2:].any()
    refs: Any = types.SimpleNamespace(ranges=found)
    visited = []
    for tile in range(4):
        span: Any = types.SimpleNamespace(tile=tile, high=found.highs[tile])
        blocks = [int(found.lows[tile]) // plan.block]
        while (blocks[-1] + 1) * plan.block < span.high:
            blocks.append(int(kernel.block_after(plan, refs, span, blocks[-1])))
        visited.append(blocks)
    assert visited == [[0, 1, 14], [0, 1, 14], [0], [0]]
