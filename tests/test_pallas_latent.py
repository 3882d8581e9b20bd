"""Latent attention on TPUs: tiles' limits, what is refused, how small floats are decoded, lists of several chunks."""

import dataclasses
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import ragged_attention as ra
from ragged_attention.calls import Device, MlaDecode
from ragged_attention.samples import sample_of

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax.experimental import pallas as pl  # noqa: E402

from ragged_attention.kernels_pallas import _latent, mla_decode, sparse_mla_prefill  # noqa: E402
from ragged_attention.testing.drawing import PROFILES, examples_of  # noqa: E402
from ragged_attention.testing.tpu_interpreter import watched  # noqa: E402

TPU = Device(framework="jax", platform="tpu", shared_memory=128 << 20)
ROOMS = {"mla_decode": mla_decode, "sparse_mla_prefill": sparse_mla_prefill}


@pytest.mark.parametrize("room", [mla_decode, sparse_mla_prefill])
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"num_keys_per_block": 0}, "expected num_keys_per_block between 16 and 2048, got 0"),
        ({"num_keys_per_block": 40}, "expected num_keys_per_block to be a multiple of 16, got 40"),
        ({"vmem_limit_bytes": -1}, "expected vmem_limit_bytes between 0 and 2147483647, got -1"),
    ],
)
def test_tiles_have_limits(room: Any, fields: dict[str, int], text: str) -> None:
    with pytest.raises(ra.InvalidInput, match=f"^{text}$"):
        room.Tile(**fields)


def test_query_blocks_have_limits() -> None:
    with pytest.raises(ra.InvalidInput, match=r"^expected num_queries_per_block between 1 and 1024, got 0$"):
        mla_decode.Tile(num_queries_per_block=0)


def _call(operation: str = "mla_decode", device: Device = TPU, **sample: Any) -> Any:
    return sample_of(operation, **sample).call(operation, device)


@pytest.mark.parametrize("operation", ROOMS)
def test_what_is_refused_and_why(operation: str) -> None:
    room = ROOMS[operation]
    for form in ("plain", "fp8_v32"):
        assert room.why_not(_call(operation, cache_format=form)) is None
    text = "takes cache_format 'plain' and 'fp8_v32', got 'fp8_v4', whose pages no copy can cut into rows"
    assert room.why_not(_call(operation, cache_format="fp8_v4")) == text
    assert room.why_not(_call(operation, cache_format="fp8_v41", cache_layout="page")) == text.replace("v4'", "v41'")
    assert (
        room.why_not(_call(operation, cache_format="fp4_v41"))
        == "takes cache_format 'plain' and 'fp8_v32', got 'fp4_v41'"
    )
    torch = Device(framework="torch", platform="cpu")
    assert room.why_not(_call(operation, device=torch)) == "runs on jax arrays, got a call from torch"


def test_more_rows_than_int32_counts_are_refused() -> None:
    rows = jax.ShapeDtypeStruct((2**25, 64, 1, 64), jnp.bfloat16)
    call = MlaDecode(
        q=jax.ShapeDtypeStruct((1, 1, 8, 64), jnp.bfloat16),
        kv_cache=rows,
        indices=jax.ShapeDtypeStruct((1, 1, 16), jnp.int32),
        d_v=64,
        device=TPU,
    )
    text = "numbers rows in int32, got 2147483648 slots of 1 KV heads"
    assert mla_decode.why_not(call) == text
    small = jax.ShapeDtypeStruct((4, 64, 1, 64), jnp.bfloat16)
    second = {"extra_kv_cache": rows, "extra_indices": call.indices}
    assert mla_decode.why_not(dataclasses.replace(call, kv_cache=small)) is None
    assert mla_decode.why_not(dataclasses.replace(call, kv_cache=small, **second)) == text


def test_a_table_may_list_more_positions_than_int32_counts() -> None:
    """Its last pages are never reached: no position of theirs wraps around to a small one."""
    cache, table = jnp.zeros((1, 2**20, 1, 8)), jnp.zeros((1, 2**11 + 1), jnp.int32)
    pieces = _latent.whole_pages(cache, table, jnp.array([300], jnp.int32), unit=256).pieces
    assert pieces.shape == (1, (2**11 + 1) * 2**12)
    assert int((pieces >= 0).sum()) == 2


def test_pages_are_fetched_in_pieces_that_are_whole_words() -> None:
    sizes = (1, 2, 4, 48, 61, 64, 1024)
    assert [_latent.unit_of(size, jnp.bfloat16) for size in sizes] == [None, 2, 4, 16, None, 64, 256]
    assert [_latent.unit_of(size, jnp.uint8) for size in sizes] == [None, None, 4, 16, None, 64, 256]
    assert [_latent.unit_of(size, jnp.float32) for size in sizes] == [1, 2, 4, 16, 1, 64, 256]


def test_layouts_are_those_of_rows_that_share_words() -> None:
    assert _latent.row_layout(jnp.bfloat16).tiling == ((2, 128), (2, 1))
    assert _latent.row_layout(jnp.uint8).tiling == ((4, 128), (4, 1))
    assert _latent.row_layout(jnp.float32).tiling == ((1, 128),)
    assert _latent.row_layout(jnp.uint8).major_to_minor == (0, 2, 1, 3)
    assert _latent.row_layout(jnp.bfloat16, rank=3).major_to_minor == (1, 0, 2)


@pytest.mark.parametrize(("dtype", "exponent"), [("float8_e4m3fn", 4), ("float16", 5)])
def test_every_small_float_is_decoded_exactly(dtype: str, exponent: int) -> None:
    """Integer arithmetic, since not every TPU has these floats, and none has numbers below the normal ones."""
    bits = jnp.dtype(dtype).itemsize * 8
    codes = np.arange(2**bits, dtype=np.int32).reshape(-1, 128)

    def kernel(given: Any, decoded: Any) -> None:
        decoded[...] = _latent._from_bits(given[...], exponent=exponent, mantissa=bits - 1 - exponent)

    with watched("eager"):
        got = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(codes.shape, jnp.float32))(codes)
    want = codes.astype(f"uint{bits}").view(jnp.dtype(dtype)).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(got), want)
    np.testing.assert_array_equal(
        np.signbit(got), np.signbit(want) & ~np.isnan(want) | np.signbit(got) & np.isnan(want)
    )


# Lists of many chunks, on two cores, as they are with thousands of keys; more heads than go together.
INTERPRETED = """
import sys
from ragged_attention.kernels_pallas import _latent
from ragged_attention.testing.mla import corners as mla_corners
from ragged_attention.testing.mla.specs import DecodeSpec, PrefillSpec
from ragged_attention.testing.mla.oracle import check_decode, check_prefill
from ragged_attention.testing.tpu_interpreter import InterpretedRunner

_latent.LONGEST_CHUNK = 32
runner = InterpretedRunner(backend="pallas", mode=sys.argv[1], cores=2)
options = {"num_keys_per_block": 16}
check_prefill(runner, PrefillSpec(tokens=2, rows=90, topk=110, lens="wild", poison="nan").build(), options)
extra = {"extra_topk": 50, "extra_slots": 20, "extra_lens": "inside"}
check_decode(runner, DecodeSpec(topk=70, lens="inside", q_tokens=2, poison="nan", **extra).build(), options)
pages = {"topk": 0, "kv_lens": (150, 0, 61, 64), "causal": True, "poison": "nan", "garbage": True}
queries = {"q_tokens": 3, "heads": 2, "page_size": 2, "dtype": "bfloat16", "spare_columns": 40}
check_decode(runner, DecodeSpec(**pages, **queries).build(), options | {"num_queries_per_block": 2})
many = {"tokens": 2, "heads": 600, "kv_heads": 2, "topk": 9, "sinks": "mixed", "dtype": "float16"}
check_prefill(runner, PrefillSpec(**many).build(), options)
fp8 = {"format": "fp8_v32", "d_v": 576, "page_size": 8, "kv_lens": (150, 9), "dtype": "bfloat16", "poison": "nan"}
check_decode(runner, DecodeSpec(topk=0, **fp8).build(), options)
"""


# The mode in which races are looked for, and both in the larger profiles.
MODES = ["on_wait", "eager"][: 2 if examples_of() > PROFILES["dev"] else 1]


@pytest.mark.parametrize("mode", MODES)
def test_lists_of_many_chunks(mode: str) -> None:
    command = [sys.executable, "-W", "error", "-c", INTERPRETED, mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
