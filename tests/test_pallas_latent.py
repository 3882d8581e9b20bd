"""Latent attention on TPUs: limits of tiles, refused calls, decoding of small floats, and lists of several chunks."""

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

import ragged_attention as ra
from ragged_attention import dispatch
from ragged_attention.calls import CACHE_FORMATS, Device, MlaDecode
from ragged_attention.reference.dequantize_mla_cache import dequantize_mla_cache
from ragged_attention.tools.samples import sample_of
from tests.processes import printed

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax.experimental import pallas as pl  # noqa: E402

from ragged_attention.kernels_pallas import (  # noqa: E402
    _latent,
    _latent_rows,
    mla_decode,
    ragged_mla_attention,
    sparse_mla_prefill,
    write_mla_cache,
)
from ragged_attention.kernels_pallas._latent_jobs import Tokens, jobs_of, num_tiles, tokens_of_sequences  # noqa: E402
from ragged_attention.testing.drawing import PROFILES, examples_of  # noqa: E402
from ragged_attention.testing.tpu_interpreter import watched  # noqa: E402

TPU = Device(framework="jax", platform="tpu", shared_memory=128 << 20)
MODULES = {
    "mla_decode": mla_decode,
    "ragged_mla_attention": ragged_mla_attention,
    "sparse_mla_prefill": sparse_mla_prefill,
}


@pytest.mark.parametrize("module", MODULES.values())
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"num_keys_per_block": 0}, "expected num_keys_per_block between 16 and 2048, got 0"),
        ({"num_keys_per_block": 40}, "expected num_keys_per_block to be a multiple of 16, got 40"),
        ({"vmem_limit_bytes": -1}, "expected vmem_limit_bytes between 0 and 2147483647, got -1"),
    ],
)
def test_tiles_have_limits(module: Any, fields: dict[str, int], text: str) -> None:
    with pytest.raises(ra.InvalidInput, match=f"^{text}$"):
        module.Tile(**fields)


@pytest.mark.parametrize("module", [mla_decode, ragged_mla_attention])
def test_query_blocks_have_limits(module: Any) -> None:
    with pytest.raises(ra.InvalidInput, match=r"^expected num_queries_per_block between 1 and 1024, got 0$"):
        module.Tile(num_queries_per_block=0)


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        (0, "expected num_groups_per_block between 8 and 8192, got 0"),
        (20, "expected num_groups_per_block to be a multiple of 8, got 20"),
    ],
)
def test_blocks_of_written_groups_have_limits(groups: int, text: str) -> None:
    with pytest.raises(ra.InvalidInput, match=f"^{text}$"):
        write_mla_cache.Tile(num_groups_per_block=groups)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"cache_format": "fp8_v4"}, "takes caches that have the bytes of a token together, got 'fp8_v4' by pages"),
        ({"page_size": 1, "max_num_seqs": 3, "max_len": 3}, "takes caches of a multiple of 4 rows, .* got 9"),
        ({"max_num_seqs": 2**20}, r"expected num_pages \* page_size < 2\*\*31 - 1, got 4294967296"),
        ({"cache_format": "plain", "num_kv_heads": 2, "max_num_seqs": 2**18}, "numbers rows in int32, got 1073741824"),
        ({"cache_format": "plain", "page_size": 3}, None),
        ({"cache_format": "plain", "stored": "float8_e4m3fnuz"}, "reads no cache of float8_e4m3fnuz"),
    ],
)
def test_what_the_write_takes(fields: dict[str, Any], reason: str | None) -> None:
    call: Any = sample_of("write_mla_cache", **fields).call("write_mla_cache", TPU)
    found = write_mla_cache.why_not(call)
    assert found is None if reason is None else re.match(reason, found or "")


@pytest.mark.parametrize("packing", [1, 2, 4])
def test_groups_of_rows_come_once_and_the_last_row_stays(packing: int) -> None:
    rng = np.random.default_rng(packing)
    rows = rng.integers(-1, 40, 64).astype(np.int32)
    groups, sources = map(np.asarray, write_mla_cache.changed_groups(jnp.asarray(rows), packing))
    last = {int(row): token for token, row in enumerate(rows) if row >= 0}
    assert groups[groups >= 0].tolist() == sorted({row // packing for row in last})
    assert (groups[np.count_nonzero(groups >= 0) :] == -1).all()
    found = {int(g) * packing + r: int(sources[i, r]) for i, g in enumerate(groups) for r in range(packing) if g >= 0}
    assert {row: token for row, token in found.items() if token >= 0} == last


def test_lengths_of_careful_weights_have_limits() -> None:
    with pytest.raises(ra.InvalidInput, match=r"^expected split_weights_below between 0 and 2147483647, got -1$"):
        ragged_mla_attention.Tile(split_weights_below=-1)


@pytest.mark.parametrize(
    ("sample", "tokens"),
    [
        ({"num_tokens": 32, "max_num_seqs": 32}, 1),  # a decode
        ({"num_tokens": 512, "max_num_seqs": 65, "num_q_heads": 16}, 8),
        ({"num_tokens": 512, "max_num_seqs": 4, "num_q_heads": 16}, 16),  # limited to 256 rows
        ({"num_tokens": 512, "max_num_seqs": 4, "num_q_heads": 600}, 1),
    ],
)
def test_a_tile_has_as_many_tokens_as_a_sequence(sample: dict[str, Any], tokens: int) -> None:
    call = _call("ragged_mla_attention", cache_format="plain", **sample)
    assert ragged_mla_attention.heuristic(call).num_queries_per_block == tokens
    assert ragged_mla_attention.heuristic(dataclasses.replace(call, max_q_len=1)).num_queries_per_block == 1


def _call(operation: str = "mla_decode", device: Device = TPU, **sample: Any) -> Any:
    return sample_of(operation, **sample).call(operation, device)


@pytest.mark.parametrize("operation", MODULES)
def test_what_is_refused_and_why(operation: str) -> None:
    module = MODULES[operation]
    for form in ("plain", "fp8_v32", "fp8_v41", "fp4_v41"):
        assert module.why_not(_call(operation, cache_format=form)) is None
    text = "takes caches that have the bytes of a token together, got 'fp8_v4' by pages"
    assert module.why_not(_call(operation, cache_format="fp8_v4")) == text
    for form in ("fp8_v41", "fp4_v41"):
        by_pages = _call(operation, cache_format=form, cache_layout="page")
        assert module.why_not(by_pages) == text.replace("fp8_v4", form)
    torch = Device(framework="torch", platform="cpu")
    assert module.why_not(_call(operation, device=torch)) == "runs on jax arrays, got a call from torch"


@pytest.mark.parametrize("operation", ["ragged_mla_attention", "write_mla_cache"])
def test_one_scale_serves_all_columns(operation: str) -> None:
    call = _call(operation, cache_format="plain", stored="float8_e4m3fn", rope_scale=0.5)
    assert str(dispatch.refusal("pallas", call)).startswith("does not honour rope_scale")


def test_no_cache_of_e4m3fnuz_is_read() -> None:
    call = _call("ragged_mla_attention", cache_format="plain", stored="float8_e4m3fnuz")
    assert ragged_mla_attention.why_not(call) == "reads no cache of float8_e4m3fnuz"


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
    """A table may list more positions than int32 can count. The last pages' positions do not wrap to small ones."""
    cache, table = jnp.zeros((1, 2**20, 1, 8)), jnp.zeros((1, 2**11 + 1), jnp.int32)
    pieces = _latent.whole_pages(cache, table, jnp.array([300], jnp.int32), piece_rows=256).pieces
    assert pieces.shape == (1, (2**11 + 1) * 2**12)
    assert int((pieces >= 0).sum()) == 2


def test_pages_are_fetched_in_pieces_that_are_whole_words() -> None:
    sizes = (1, 2, 4, 48, 61, 64, 1024)
    assert [_latent.piece_rows_of(size, jnp.bfloat16) for size in sizes] == [None, 2, 4, 16, None, 64, 256]
    assert [_latent.piece_rows_of(size, jnp.uint8) for size in sizes] == [None, None, 4, 16, None, 64, 256]
    assert [_latent.piece_rows_of(size, jnp.float32) for size in sizes] == [1, 2, 4, 16, 1, 64, 256]


def test_layouts_are_those_of_rows_that_share_words() -> None:
    assert _latent.row_layout(jnp.bfloat16).tiling == ((2, 128), (2, 1))
    assert _latent.row_layout(jnp.uint8).tiling == ((4, 128), (4, 1))
    assert _latent.row_layout(jnp.float32).tiling == ((1, 128),)
    assert _latent.row_layout(jnp.uint8).major_to_minor == (0, 2, 1, 3)
    assert _latent.row_layout(jnp.bfloat16, rank=3).major_to_minor == (1, 0, 2)


# `cu_q_lens` with empty sequences, with padding on both sides, without tokens, and with invalid values.
EDGES = [
    (0, 5, 5, 6, 21),
    (3, 3, 9, 10, 18),
    (0, 0, 0),
    (9, 4, 25, -3),  # not ascending, and out of range
    (2**31 - 1, -(2**31), 7),
]


@pytest.mark.parametrize("edges", EDGES)
@pytest.mark.parametrize("size", [1, 4, 32])
@pytest.mark.parametrize("cores", [1, 2])
def test_each_token_of_a_sequence_has_one_job(edges: tuple[int, ...], size: int, cores: int) -> None:
    num_tokens, lens = 21, np.arange(len(edges) - 1) * 7
    call = _call("ragged_mla_attention", cache_format="plain", num_tokens=num_tokens, max_num_seqs=len(lens))
    given = {"cu_q_lens": jnp.array(edges, jnp.int32), "kv_lens": jnp.array(lens, jnp.int32)}
    tokens = tokens_of_sequences(dataclasses.replace(call, **given))
    jobs = jobs_of(tokens, size, cores)
    tiles = num_tiles(num_tokens, size, cores)
    owned, last = {}, {}
    for index, (which, tile, position, begin, end) in enumerate(zip(*map(np.asarray, jobs), strict=True)):
        core = index // (len(jobs.lists) // cores)
        assert 0 <= tile < tiles
        assert tile % cores == core
        assert last.get(core, -1) <= tile  # a tile's jobs are consecutive
        last[core] = tile
        for offset in range(begin, end):
            token = tile * size + offset
            assert token not in owned
            owned[token] = (which, position + offset)
    assert {*np.asarray(jobs.tiles)} == set(range(tiles))  # every tile has a job, so the rows of every tile are stored
    lists, positions = np.asarray(tokens.lists), np.asarray(tokens.positions)
    assert owned == {token: (lists[token], positions[token]) for token in range(num_tokens) if lists[token] >= 0}


def test_tokens_are_those_of_their_sequences() -> None:
    call = _call("ragged_mla_attention", cache_format="plain", num_tokens=9, max_num_seqs=4)
    given = {"cu_q_lens": jnp.array([1, 3, 3, 7, 99], jnp.int32), "kv_lens": jnp.array([10, 5, 2, 7], jnp.int32)}
    tokens = tokens_of_sequences(dataclasses.replace(call, **given, num_seqs=jnp.array([3], jnp.int32)))
    assert tokens.lists.tolist() == [-1, 0, 0, 2, 2, 2, 2, -1, -1]
    assert tokens.positions.tolist()[1:7] == [8, 9, -2, -1, 0, 1]


def test_equal_counts_of_whole_tiles_have_no_job_too_many() -> None:
    lists = jnp.repeat(jnp.arange(6, dtype=jnp.int32), 4)
    jobs = jobs_of(Tokens(lists=lists, positions=jnp.zeros(24, jnp.int32), changes=0), 4, 1)
    assert jobs.lists.tolist() == jobs.tiles.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("dtype", "exponent"), [("float8_e4m3fn", 4), ("float8_e5m2", 5), ("float16", 5)])
def test_every_small_float_is_decoded_exactly(dtype: str, exponent: int) -> None:
    """Decoding by integer arithmetic is exact. TPUs may lack these dtypes, and have no subnormal numbers."""
    bits = jnp.dtype(dtype).itemsize * 8
    codes = np.arange(2**bits, dtype=np.int32).reshape(-1, 128)

    def kernel(given: Any, decoded: Any) -> None:
        decoded[...] = _latent_rows.from_bits(given[...], exponent=exponent, mantissa=bits - 1 - exponent)

    with watched("eager"):
        got = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(codes.shape, jnp.float32))(codes)
    want = codes.astype(f"uint{bits}").view(jnp.dtype(dtype)).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(got), want)
    np.testing.assert_array_equal(
        np.signbit(got), np.signbit(want) & ~np.isnan(want) | np.signbit(got) & np.isnan(want)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["fp8_v41", "fp4_v41"])
def test_every_code_under_every_scale_is_the_value_itself(form: str, dtype: str) -> None:
    """Every code times every scale is exact, also in bfloat16. Columns have the order of the reordered queries."""
    layout = CACHE_FORMATS[form]
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], layout.scale_bytes, axis=1)
    values = np.resize(np.arange(256, dtype=np.uint8), (256, layout.value_bytes))
    rows = np.concatenate([values, scales], axis=1)

    def kernel(given: Any, decoded: Any) -> None:
        (operand, scale), *others = _latent_rows.operands(given[...], layout, jnp.dtype(dtype))
        assert (scale, others) == (None, [])
        decoded[...] = operand.astype(jnp.float32)

    with watched("eager"):
        shape = jax.ShapeDtypeStruct((256, layout.width), jnp.float32)
        got = pl.pallas_call(kernel, out_shape=shape)(rows.astype(np.int32))
    with np.errstate(over="ignore"):
        want = dequantize_mla_cache(rows[:, None, None], form)[:, 0, 0].astype(np.float32)
    want[np.abs(want) < np.finfo(np.float32).smallest_normal] = 0  # some devices have no subnormal numbers
    if form == "fp8_v41":
        want[0] *= 0  # scale code 0 is itself a subnormal number
    got = np.array(_latent_rows.restore(got, layout, layout.width))
    got[np.abs(got) < np.finfo(np.float32).smallest_normal] = 0
    np.testing.assert_array_equal(got, want)
    columns = _latent_rows.reorder(jnp.arange(layout.width), layout)
    np.testing.assert_array_equal(_latent_rows.restore(columns, layout, 64), np.arange(64))


# The mode that detects races; the larger profiles run both modes.
MODES = ["on_wait", "eager"][: 2 if examples_of() > PROFILES["dev"] else 1]


@pytest.mark.parametrize("mode", MODES)
def test_lists_of_many_chunks(mode: str) -> None:
    printed("-W", "error", "-m", "tests.programs.latent_chunks", mode)
