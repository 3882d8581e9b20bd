"""The reference implementation agrees with independent implementations, as far as there are any."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragged_attention.calls import FLOAT8
from ragged_attention.reference._kv_layout import decode, encode, format_values, widened
from ragged_attention.reference.paged_attention import paged_attention
from ragged_attention.reference.prefill_attention import prefill_attention
from ragged_attention.reference.write_kv_pages import slots_from_tables
from ragged_attention.testing.compare import agrees, identical

FORMATS = {name: getattr(ml_dtypes, name) for name in FLOAT8}
NUM_KV_HEADS, GROUP, NUM_PAGES, PAGE_SIZE, HEAD_DIM = 2, 3, 7, 4, 16


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_means_what_the_format_says(name: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(format_values(name), codes.view(FORMATS[name]).astype(np.float64))


@pytest.mark.parametrize("name", FORMATS)
@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
def test_encoding_rounds_as_the_format_does_and_saturates(name: str, bits: list[int]) -> None:
    values = np.array(bits, np.uint32).view(np.float32)
    largest = float(ml_dtypes.finfo(FORMATS[name]).max)
    with np.errstate(invalid="ignore"):
        want = np.clip(values, -largest, largest).astype(FORMATS[name]).view(np.uint8)
    got = np.asarray(encode(values, name))
    nan = np.isnan(values)
    np.testing.assert_array_equal(got[~nan], want[~nan])
    assert np.isnan(decode(got, name)[nan]).all()
    if name == "float8_e4m3fnuz":  # this format has no -0 and only one NaN
        np.testing.assert_array_equal(got >> 7, nan | (np.signbit(values) & (got != 0)))
    else:
        np.testing.assert_array_equal(got >> 7, np.signbit(values))


@pytest.mark.parametrize("name", FORMATS)
def test_encoding_agrees_at_every_tie_and_next_to_it(name: str) -> None:
    """Encoding agrees at all values and midpoints, at their float32 neighbours, and for subnormals and overflows."""
    finite = np.unique(format_values(name)[np.isfinite(format_values(name))])
    least = float(ml_dtypes.finfo(FORMATS[name]).smallest_subnormal)
    exact = [*finite, *(finite[1:] + finite[:-1]) / 2, *(least * np.array([0.25, 0.5, 0.75, 1.5, -0.5, -0.75]))]
    middle = np.array([*exact, 0.0, -0.0, 2.0**-149, -(2.0**-149)], np.float32)
    beyond = np.array([finite[-1] * factor for factor in (1.01, 1.04, 1.07, 2, 1e9)] + [np.inf], np.float32)
    values = np.concatenate([middle, np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf), beyond, -beyond])
    want = np.clip(values, finite[0], finite[-1]).astype(FORMATS[name]).view(np.uint8)
    np.testing.assert_array_equal(encode(values, name), want)


def test_e4m3fnuz_has_one_nan_and_no_negative_zero() -> None:
    codes = encode([np.nan, -np.nan, -0.0, -(2.0**-12), -(2.0**-11), np.inf, -np.inf, 240.0, 247.9], "float8_e4m3fnuz")
    assert codes.tolist() == [0x80, 0x80, 0, 0, 0, 0x7F, 0xFF, 0x7F, 0x7F]
    assert np.flatnonzero(np.isnan(format_values("float8_e4m3fnuz"))).tolist() == [0x80]


@pytest.mark.parametrize(("bits", "narrow"), [(0x7D00, "2"), (0x7FA00000, "4"), (0x7FF4000000000000, "8")])
@pytest.mark.parametrize("to", [np.float32, np.float64])
def test_signaling_nans_become_quiet(bits: int, narrow: str, to: type[np.floating]) -> None:
    """Widening makes signaling NaNs quiet, so later operations do not warn. Warnings are errors here."""
    values = np.array([bits], f"u{narrow}").view(f"f{narrow}")
    assert np.isnan(widened(values, to) @ np.ones(1, to))
    assert np.signbit(widened(np.array([-0.0], f"f{narrow}"), to))


def test_int8_rounds_half_to_even_and_saturates() -> None:
    values = [0.5, 1.5, 2.5, -0.5, -1.5, 127.4, 127.6, 1e9, -128.4, -1e9, float("inf"), float("nan")]
    assert encode(values, "int8").tolist() == [0, 2, 2, 0, -2, 127, 127, 127, -128, -128, 127, 0]


def heads_first(seed: int) -> tuple[Any, ...]:
    random = np.random.default_rng(seed)
    pages = random.standard_normal((2, NUM_KV_HEADS, NUM_PAGES, PAGE_SIZE, HEAD_DIM))
    return random, pages[0], pages[1], random.permutation(NUM_PAGES).astype(np.int32)


def dense(q: np.ndarray, k_pages: np.ndarray, v_pages: np.ndarray, row: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Plain attention over a sequence's positions, one head at a time; `seen` is the mask [queries, keys]."""
    out = np.zeros(q.shape)
    for head in range(q.shape[1]):
        k, v = (pages[head // GROUP][row].reshape(-1, HEAD_DIM)[: seen.shape[1]] for pages in (k_pages, v_pages))
        weights = np.exp(q[:, head] @ k.T * HEAD_DIM**-0.5) * seen
        total = weights.sum(1, keepdims=True)
        out[:, head] = np.divide(weights @ v, total, out=np.zeros((len(q), HEAD_DIM)), where=total > 0)
    return out


def test_paged_attention_is_attention_over_the_first_keys() -> None:
    random, k_pages, v_pages, row = heads_first(0)
    q = random.standard_normal((3, NUM_KV_HEADS * GROUP, HEAD_DIM))
    lengths = np.array([1, 0, 22], np.int32)
    got = paged_attention(q, k_pages, v_pages, lengths, np.stack([row] * 3))
    for index, length in enumerate(lengths):
        want = dense(q[index : index + 1], k_pages, v_pages, row, np.ones((1, length)))
        agrees(got[index : index + 1].astype(np.float32), want, "float32")


def test_quantised_heads_first_pages_are_weights_times_scales() -> None:
    random, k_pages, v_pages, row = heads_first(1)
    q = random.standard_normal((1, NUM_KV_HEADS * GROUP, HEAD_DIM))
    scales = np.abs(random.standard_normal((NUM_KV_HEADS, NUM_PAGES, PAGE_SIZE, 1))) / 50
    weight = random.integers(-128, 128, k_pages.shape).astype(np.int8)
    arguments = (np.array([19], np.int32), row[None])
    identical(
        paged_attention(q, (weight, scales), v_pages, *arguments),
        paged_attention(q, weight * scales, v_pages, *arguments),
        "out",
    )


@pytest.mark.parametrize(("align", "length"), [("chunk", 5), ("chunk", 8), ("chunk", 13), ("end", 13), ("end", 5)])
def test_prefill_attention_places_its_rows(align: str, length: int) -> None:
    random, k_pages, v_pages, row = heads_first(2)
    chunk = 8
    q = random.standard_normal((chunk, NUM_KV_HEADS * GROUP, HEAD_DIM))
    got = prefill_attention(q, k_pages, v_pages, length, row, sliding_window=6, align=align)
    first = length - chunk if align == "end" else (length - 1) // chunk * chunk
    position, key = first + np.arange(chunk)[:, None], np.arange(length)[None, :]
    seen = (key <= position) & (key > position - 6) & (position < length)
    agrees(got.astype(np.float32), dense(q, k_pages, v_pages, row, seen), "float32")


def test_slots_follow_the_tables() -> None:
    page_indices = np.array([[3, 1], [9, 2]], np.int32)  # page 9 does not exist
    slots = slots_from_tables(page_indices, np.array([6, 5]), np.array([0, 3, 5]), None, 7, NUM_PAGES, PAGE_SIZE)
    assert slots.tolist() == [3 * 4 + 3, 1 * 4 + 0, 1 * 4 + 1, -1, 2 * 4 + 0, -1, -1]
