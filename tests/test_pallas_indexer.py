"""The indexer on TPUs: limits of tiles, refused calls, division into tiles and pieces, and top-k of long rows."""

from typing import Any

import numpy as np
import pytest

import ragged_attention as ra
from ragged_attention.calls import Device, IndexerLogits
from ragged_attention.tools.samples import sample_of
from tests.processes import printed

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

from ragged_attention.kernels_pallas import _indexer, indexer_logits, indexer_topk, top_k_indices  # noqa: E402
from ragged_attention.testing.drawing import PROFILES, examples_of  # noqa: E402
from ragged_attention.testing.tpu_interpreter import watched  # noqa: E402

TPU = Device(framework="jax", platform="tpu", shared_memory=128 << 20)
MODULES = {"indexer_logits": indexer_logits, "indexer_topk": indexer_topk, "top_k_indices": top_k_indices}


def _call(operation: str = "indexer_logits", device: Device = TPU, **sample: Any) -> Any:
    return sample_of(operation, **sample).call(operation, device)


@pytest.mark.parametrize(
    ("module", "fields", "text"),
    [
        (indexer_logits, {"num_keys_per_block": 64}, "expected num_keys_per_block between 128 and 4096, got 64"),
        (indexer_logits, {"num_keys_per_block": 200}, "expected num_keys_per_block to be a multiple of 128, got 200"),
        (indexer_logits, {"num_queries_per_block": 65}, "expected num_queries_per_block between 1 and 64, got 65"),
        (indexer_topk, {"num_rows_per_chunk": 0}, "expected num_rows_per_chunk between 1 and 2147483647, got 0"),
        (indexer_topk, {"num_rows_per_block": 65}, "expected num_rows_per_block between 1 and 64, got 65"),
        (top_k_indices, {"num_rows_per_block": 0}, "expected num_rows_per_block between 1 and 64, got 0"),
        (top_k_indices, {"vmem_limit_bytes": -1}, "expected vmem_limit_bytes between 0 and 2147483647, got -1"),
    ],
)
def test_tiles_have_limits(module: Any, fields: dict[str, int], text: str) -> None:
    with pytest.raises(ra.InvalidInput, match=f"^{text}$"):
        module.Tile(**fields)


@pytest.mark.parametrize("operation", MODULES)
def test_what_is_refused_and_why(operation: str) -> None:
    module = MODULES[operation]
    assert module.why_not(_call(operation)) is None
    torch = Device(framework="torch", platform="cpu")
    assert module.why_not(_call(operation, device=torch)) == "runs on jax arrays, got a call from torch"


def test_rows_of_logits_that_do_not_fit_are_refused() -> None:
    text = "keeps a row of logits in vector memory, takes at most 1048576 columns, got 1048640"
    long = _call("indexer_topk", max_len=2**20 + 1)
    assert indexer_topk.why_not(long) == text
    assert indexer_logits.why_not(_call(max_len=2**20 + 1)) is None
    longer = _call("top_k_indices", max_len=2**20 + 64)
    assert top_k_indices.why_not(longer) == text
    columns = _call(max_len=2**30 + 1)
    assert indexer_logits.why_not(columns) == f"takes at most {2**30} columns, got {2**30 + 64}"
    keys = _call(max_len=2**28, max_num_seqs=8)
    assert indexer_logits.why_not(keys) == f"numbers keys in int32, got {2**31}"


@pytest.mark.parametrize(
    ("sample", "queries", "keys"),
    [
        ({}, 1, 512),  # a decode
        ({"num_tokens": 96}, 4, 512),  # a decode with drafts
        ({"num_tokens": 4096, "max_num_seqs": 4}, 8, 512),
        ({"num_tokens": 4096, "max_num_seqs": 4, "num_q_heads": 65}, 8, 256),
        ({"packed": True, "max_len": 100, "max_num_seqs": 1}, 8, 128),
    ],
)
def test_tiles_follow_from_shapes(sample: dict[str, Any], queries: int, keys: int) -> None:
    tile = indexer_logits.heuristic(_call(**sample))
    assert (tile.num_queries_per_block, tile.num_keys_per_block) == (queries, keys)


@pytest.mark.parametrize(
    ("page_size", "size", "unit", "count"),
    [(64, 512, 64, 8), (16, 512, 16, 32), (1024, 512, 256, 2), (48, 384, 16, 8), (64, 384, 64, 2), (16, 4096, 16, 32)],
)
def test_keys_are_fetched_in_pieces_of_pages(page_size: int, size: int, unit: int, count: int) -> None:
    """A page is fetched in pieces of a power of two of keys, and the pieces of a block fill whole registers."""
    call = _paged(page_size)
    pieces = _indexer.pieces_of(call, indexer_logits.Tile(num_keys_per_block=size))
    assert pieces.keys.shape[1:] == (unit, 16)
    assert pieces.numbers.shape[2] == count
    assert unit * count % 128 == 0
    assert pieces.known is None
    first = np.asarray(pieces.numbers).reshape(-1)[: page_size // unit]
    np.testing.assert_array_equal(first, 2 * (page_size // unit) + np.arange(page_size // unit))


@pytest.mark.parametrize("page_size", [1, 3, 8, 40])
def test_keys_of_small_pages_are_put_together(page_size: int) -> None:
    pieces = _indexer.pieces_of(_paged(page_size), indexer_logits.Tile(num_keys_per_block=128))
    assert pieces.keys.shape[1:] == (128, 16)
    assert pieces.known is not None
    np.testing.assert_array_equal(pieces.known, np.repeat([[True, False, True]], page_size, axis=1))


def _paged(page_size: int) -> Any:
    """A call with one sequence in pages 2, 7 and 0, of which page 7 does not exist."""
    keys = jnp.zeros((3, page_size, 16))
    return IndexerLogits(
        q=jnp.zeros((1, 2, 16)), keys=keys, weights=jnp.zeros((1, 2)), page_indices=jnp.array([[2, 7, 0]], jnp.int32),
        kv_lens=jnp.array([5], jnp.int32), cu_q_lens=jnp.array([0, 1], jnp.int32), device=TPU,
    )  # fmt: skip


@pytest.mark.parametrize("edges", [[0, 7, 3, 9, 12], [-5, 2, 2, 99, 4], [9, 8, 7, 6, 5], [3, 3, 3, 3, 3]])
@pytest.mark.parametrize("rows", [1, 4])
def test_no_edges_lead_outside(edges: list[int], rows: int) -> None:
    """For any `cu_q_lens`, the tiles' tokens, sequences, columns and rows are within their arrays."""
    call = IndexerLogits(
        q=jnp.zeros((12, 1, 16)), keys=jnp.zeros((2, 16, 16)), weights=jnp.zeros((12, 1)), device=TPU,
        page_indices=jnp.zeros((4, 3), jnp.int32), kv_lens=jnp.array([2**31 - 1, -7, 40, 3], jnp.int32),
        cu_q_lens=jnp.array(edges, jnp.int32),
    )  # fmt: skip
    found = _indexer.rows_of(call, rows)
    assert 0 <= found.token.min() <= found.token.max() < 12
    assert 0 <= found.seq.min() <= found.seq.max() < 4
    assert 0 <= found.stops.min() <= found.stops.max() <= 48
    assert found.of_token is None or -1 <= found.of_token.min() <= found.of_token.max() < found.token.size


def test_a_choice_among_many_equal_numbers_is_exact() -> None:
    """Top-k among many equal logits is exact, also at the borders of the kernel's blocks."""
    rng = np.random.default_rng(0)
    logits = rng.integers(0, 3, (3, 40000)).astype(np.float32)
    starts, stops = jnp.array([0, 17, 39990], jnp.int32), jnp.array([40000, 39000, 40000], jnp.int32)
    tile = top_k_indices.Tile(num_rows_per_block=2)
    with watched("eager"):
        got = np.asarray(top_k_indices.largest(jnp.asarray(logits), 1500, starts, stops, tile))
    for row, found, start, stop in zip(logits, got, starts, stops, strict=True):
        columns = np.arange(int(start), int(stop))
        best = columns[np.lexsort((columns, row[columns]))][::-1][:1500]
        np.testing.assert_array_equal(found, np.pad(np.sort(best), (0, 1500 - len(best)), constant_values=-1))


# The mode that detects races; the larger profiles run both modes.
MODES = ["on_wait", "eager"][: 2 if examples_of() > PROFILES["dev"] else 1]


@pytest.mark.parametrize("mode", MODES)
def test_two_cores_share_the_tiles(mode: str) -> None:
    printed("-W", "error", "-m", "tests.programs.indexer_on_two_cores", mode)
