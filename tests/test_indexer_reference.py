"""The indexer's reference agrees with separate formulas, with results worked out by hand and across cache formats."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ragged_attention.reference.indexer_logits import indexer_logits
from ragged_attention.reference.indexer_topk import indexer_topk
from ragged_attention.reference.quantize_indexer_keys import quantize_indexer_keys
from ragged_attention.reference.top_k_indices import top_k_indices
from ragged_attention.reference.write_indexer_cache import write_indexer_cache
from ragged_attention.testing.compare import chosen_agree, logits_agree
from tests.arrays import ints

INF, NAN = float("inf"), float("nan")
RNG = np.random.default_rng(0)


def by_hand(q: Any, keys: Any, weights: Any) -> np.ndarray:
    """The logits of every query with every key, computed with scalar loops."""
    logits = np.zeros((len(q), len(keys)))
    for token, heads in enumerate(q):
        for row, key in enumerate(keys):
            logits[token, row] = sum(
                weight * max(sum(a * b for a, b in zip(head, key, strict=True)), 0.0)
                for head, weight in zip(heads, weights[token], strict=True)
            )
    return logits


def bytes_of(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Pages of bytes: the values of all keys of a page, followed by their scales."""
    pages = []
    for codes, factors in zip(values.astype(ml_dtypes.float8_e4m3fn), scales.astype("<f4"), strict=True):
        pages.append(np.frombuffer(codes.tobytes() + factors.tobytes(), np.uint8))
    return np.array(pages).reshape(len(values), values.shape[1], 1, values.shape[2] + 4)


def test_the_score_is_the_formula() -> None:
    q, keys, weights = RNG.standard_normal((3, 2, 16)), RNG.standard_normal((5, 16)), RNG.standard_normal((3, 2))
    scale = RNG.uniform(1, 2, 5)
    everything: dict[str, Any] = {"starts": ints(0, 0, 0), "stops": ints(5, 5, 5)}
    np.testing.assert_allclose(indexer_logits(q, keys, weights, **everything), by_hand(q, keys, weights), rtol=1e-12)
    np.testing.assert_allclose(
        indexer_logits(q, keys, weights, key_scale=scale, **everything), by_hand(q, keys, weights) * scale, rtol=1e-12
    )


def test_queries_see_up_to_their_own_token_in_pages() -> None:
    """Queries see the keys up to their own token.

    One sequence has 7 tokens in pages 2 and 0, of which the last 3 are queries. The other has 1 token.
    """
    keys = RNG.standard_normal((3, 4, 16))
    q, weights = RNG.standard_normal((4, 2, 16)), RNG.standard_normal((4, 2))
    tables: dict[str, Any] = {"page_indices": ints([2, 0], [1, 77]), "kv_lens": ints(7, 1), "cu_q_lens": ints(0, 3, 4)}
    logits = indexer_logits(q, keys, weights, **tables)
    row = by_hand(q, np.concatenate([keys[2], keys[0]]), weights)
    for query, seen in enumerate((5, 6, 7)):
        np.testing.assert_allclose(logits[query, :seen], row[query, :seen], rtol=1e-12)
        assert (logits[query, seen:] == -INF).all()
    np.testing.assert_allclose(logits[3, :1], by_hand(q, keys[1, :1], weights)[3], rtol=1e-12)
    assert (logits[3, 1:] == -INF).all()


@pytest.mark.parametrize(("position", "seen"), [(0, 0), (2, 0), (3, 1), (6, 1), (7, 2), (11, 3)])
def test_a_compressed_row_is_seen_once_its_last_token_is(position: int, seen: int) -> None:
    """With a ratio of 4, row j holds tokens 4 j to 4 j + 3 and is visible from token 4 j + 3 on."""
    tables: dict[str, Any] = {"page_indices": ints([0]), "kv_lens": ints(position + 1), "cu_q_lens": ints(0, 1)}
    logits = indexer_logits(np.ones((1, 1, 16)), np.ones((1, 8, 16)), np.ones((1, 1)), ratio=4, **tables)
    assert (logits[0] != -INF).sum() == seen


def test_a_full_table_has_room_for_tokens_without_a_row() -> None:
    """With a ratio of 2, a page of 2 rows holds 4 tokens, and a fifth token has no row yet.

    The two queries are the last two of five tokens, at positions 3 and 4, and both see both rows.
    """
    tables: dict[str, Any] = {"page_indices": ints([0]), "kv_lens": ints(5), "cu_q_lens": ints(0, 2)}
    logits = indexer_logits(np.ones((2, 1, 16)), np.ones((1, 2, 16)), np.ones((2, 1)), ratio=2, **tables)
    np.testing.assert_array_equal(logits, np.full((2, 2), 16.0))


def test_a_page_of_bytes_is_read_as_it_is_written_here() -> None:
    values, scales = RNG.integers(-8, 9, (3, 4, 16)).astype(np.float32), RNG.uniform(0.1, 3, (3, 4)).astype(np.float32)
    q, weights = RNG.standard_normal((1, 2, 16)), RNG.standard_normal((1, 2))
    tables: dict[str, Any] = {"page_indices": ints([2, 0, 1]), "kv_lens": ints(12), "cu_q_lens": ints(0, 1)}
    got = indexer_logits(q, bytes_of(values, scales), weights, **tables)
    want = by_hand(q, values[[2, 0, 1]].reshape(12, 16), weights) * scales[[2, 0, 1]].reshape(12)
    np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_keys_are_quantised_as_the_formula_says(power_of_two: bool) -> None:
    k = (RNG.standard_normal((40, 32)) * 10.0 ** RNG.integers(-6, 6, (40, 1))).astype(np.float32)
    codes, scales = quantize_indexer_keys(k, power_of_two)
    want = np.maximum(np.abs(k).max(axis=1) / np.float32(448), np.float32(1e-4))
    if power_of_two:
        want = 2.0 ** np.ceil(np.log2(want.astype(np.float64)))
    np.testing.assert_array_equal(scales, want.astype(np.float32))
    stored = (k / scales[:, None]).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(codes, stored.view(np.uint8))


def test_a_write_fills_pages_of_bytes() -> None:
    k = RNG.standard_normal((3, 16)).astype(np.float32)
    codes, scales = quantize_indexer_keys(k)
    cache = np.full((2, 4, 1, 20), 7, np.uint8)
    new = write_indexer_cache(k, cache, np.array([5, -1, 0]))
    want = cache.copy().reshape(2, 80)
    want[1, 16:32], want[1, 68:72] = codes[0], np.frombuffer(scales[:1].tobytes(), np.uint8)
    want[0, 0:16], want[0, 64:68] = codes[2], np.frombuffer(scales[2:].tobytes(), np.uint8)
    np.testing.assert_array_equal(new.reshape(2, 80), want)
    assert (cache == 7).all()


def test_ties_go_to_the_larger_column() -> None:
    rows = np.array([[1.0, 2, 1, 2, 1], [0.0, -0.0, 0, -0.0, -1], [NAN, -INF, 3, NAN, INF]])
    np.testing.assert_array_equal(top_k_indices(rows, 3), [[1, 3, 4], [1, 2, 3], [2, 4, -1]])
    np.testing.assert_array_equal(top_k_indices(rows, 1), [[3], [3], [4]])
    got = top_k_indices(rows, 2, ints(0, 2, 3), ints(3, 9, 4))
    np.testing.assert_array_equal(got, [[1, 2], [2, 3], [-1, -1]])


def test_candidates_are_a_set_of_blocks() -> None:
    """Candidate blocks are a set: order, repetitions and invalid entries do not matter.

    The keys 0 to 9 have logits 0 to 9, in blocks of 3; the last block is short.
    """
    q, keys = np.eye(16)[None, :1], np.zeros((10, 16))
    keys[:, 0] = np.arange(10)
    call: dict[str, Any] = {"starts": ints(0), "stops": ints(10), "candidate_block_size": 3}
    for blocks, want in (
        ([3, 0, 0, -1], [1, 2, 9]), ([1], [3, 4, 5]), ([-1, 99, -(2**31)], [-1, -1, -1]), ([0, 1, 2, 3], [7, 8, 9]),
    ):  # fmt: skip
        got = indexer_topk(q, keys, np.ones((1, 1)), 3, candidate_blocks=ints(blocks), **call)
        np.testing.assert_array_equal(got, [want])


def test_what_rounding_leaves_open_is_allowed_and_no_more() -> None:
    logits, sizes = np.array([[5.0, 4.0, 4.0 + 1e-4, 1.0]]), np.ones((1, 4))
    for fine in ([0, 1], [0, 2]):
        assert chosen_agree([fine], logits, sizes, 2)
    for wrong, text in (
        ([0, 3], "left out"), ([1, 2], "left out"), ([2, 0], "ascending"), ([0, 0], "ascending"),
        ([0, -1], "ascending"), ([0, 4], "that are seen"),
    ):  # fmt: skip
        with pytest.raises(AssertionError, match=text):
            chosen_agree([wrong], logits, sizes, 2)
    with pytest.raises(AssertionError, match="that are seen"):
        chosen_agree([[0, 1]], np.array([[5.0, -INF, 1.0, -INF]]), sizes, 2)
    with pytest.raises(AssertionError, match="expected 1 columns"):
        chosen_agree([[0, 1]], np.array([[5.0, -INF, -INF, NAN]]), sizes, 2)


def test_logits_are_held_to_their_products() -> None:
    want, sizes = np.array([[1.0, -INF, 0.0]]), np.array([[10.0, INF, 1.0]])
    assert logits_agree([[1.001, -INF, 4e-4]], want, sizes)
    for wrong, text in (
        ([1.006, -INF, 0], "expected 1 within"), ([1, -INF, 6e-4], "expected 0 within"), ([1, 0, 0], "-inf in one"),
        ([NAN, -INF, 0], "NaN in one"), ([1.0049, -INF, 0], "cosine"),
    ):  # fmt: skip
        with pytest.raises(AssertionError, match=text):
            logits_agree([wrong], want, sizes)
