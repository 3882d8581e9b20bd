"""The reference implementations of latent attention agree with hand-computed cases and with other projects' formats."""

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragged_attention.calls import CACHE_FORMATS
from ragged_attention.reference._kv_layout import bfloat16_bits, bfloat16_values, e8m0_values
from ragged_attention.reference.dequantize_mla_cache import dequantize_mla_cache
from ragged_attention.reference.make_decode_schedule import make_decode_schedule
from ragged_attention.reference.mla_decode import mla_decode
from ragged_attention.reference.page_indices_to_slots import page_indices_to_slots
from ragged_attention.reference.quantize_mla_cache import quantize_mla_cache
from ragged_attention.reference.sparse_mla_prefill import sparse_mla_prefill
from ragged_attention.reference.write_mla_cache import write_mla_cache
from ragged_attention.testing.compare import agrees, identical

INF, NAN = float("inf"), float("nan")
OUTSIDE = [-(2**31), -123456, -2, -1, 2**31 - 1]  # no cache has such a slot
BITS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64)


def close(got: Any, want: Any) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-14)


# Formats.


def test_every_e8m0_code_means_what_the_format_says() -> None:
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(e8m0_values(codes), codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float64))


@given(bits=BITS)
def test_bfloat16_rounds_to_nearest_even(bits: list[int]) -> None:
    values = np.array(bits, np.uint32).view(np.float32)
    nan = np.isnan(values)
    with np.errstate(invalid="ignore"):
        want = values.astype(ml_dtypes.bfloat16)
    got = bfloat16_bits(values)
    np.testing.assert_array_equal(got[~nan], want.view(np.uint16)[~nan])
    np.testing.assert_array_equal(bfloat16_values(got), want.astype(np.float64))
    np.testing.assert_array_equal(got >> 15, np.signbit(values))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_the_bytes_of_a_token_in_fp8_v32(dtype: Any) -> None:
    cache = np.zeros((2, 3, 1, 656), np.uint8)
    token = cache[1, 2, 0]
    token[512:528] = np.array([0.5, 3.0, 1.0, -0.1], "<f4").view(np.uint8)  # any scale will do
    token[[5, 127, 128, 255, 511]] = 0x38, 0xC0, 0x38, 0x7E, 0x40  # 1, -2, 1, 448, 2
    token[[528, 529]] = 0xC0, 0x3F  # 1.5
    token[[654, 655]] = 0x80, 0xBF  # -1
    rows = dequantize_mla_cache(cache.view(dtype))
    assert rows.shape == (2, 3, 1, 576)
    row = rows[1, 2, 0]
    assert row[[5, 127, 128, 255]].tolist() == [0.5, -1.0, 3.0, 1344.0]
    assert row[511] == np.float32(-0.1) * 2
    assert row[[512, 575]].tolist() == [1.5, -1.0]
    assert np.count_nonzero(rows) == 7


def test_the_bytes_of_a_page_in_fp8_v4() -> None:
    cache = np.zeros((2, 3, 1, 584), np.uint8)
    page = cache[1].reshape(-1)  # three rows of 576, then three of 8
    page[576 * 2 + 5], page[576 * 2 + 64], page[576 * 2 + 447] = 0x38, 0xC0, 0x40  # 1, -2, 2
    page[576 * 2 + 448 : 576 * 2 + 450] = 0xC0, 0x3F  # 1.5
    page[576 * 2 + 574 : 576 * 3] = 0x80, 0xBF  # -1
    page[576 * 3 + 8 * 2 : 576 * 3 + 8 * 3] = 126, 129, 0, 0, 0, 0, 127, 99
    rows = dequantize_mla_cache(cache)
    assert rows.shape == (2, 3, 1, 512)
    assert rows[1, 2, 0, [5, 64, 447, 448, 511]].tolist() == [0.5, -8.0, 2.0, 1.5, -1.0]
    assert np.count_nonzero(rows) == 5


def test_every_code_of_a_value_is_read() -> None:
    cache = np.zeros((1, 1, 1, 656), np.uint8)
    codes = cache[0, 0, 0, :512] = np.tile(np.arange(256, dtype=np.uint8), 2)
    cache[0, 0, 0, 512:528] = np.array([1, 1, 0.3, 0.3], "<f4").view(np.uint8)
    scales = np.repeat(np.array([1, 0.3], np.float32), 256)
    want = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales
    identical(dequantize_mla_cache(cache)[0, 0, 0, :512], want)


def groups(layout: Any, *firsts: list[float]) -> np.ndarray:
    """A row [1, 1, 1, width]: each group begins with its `firsts`, the rotary columns are 1, 2, ..., all others 0."""
    row = np.zeros((1, 1, 1, layout.width))
    for index, values in enumerate(firsts):
        row[..., layout.group * index : layout.group * index + len(values)] = values
    row[..., layout.values :] = 1 + np.arange(layout.rotary)
    return row


# The first columns of a group, its unrounded scale, the scale rounded up to a power of two, and the codes for that.
GROUPS = [
    ([448.0, 1.0, -0.0], 1.0, 1.0, [0x7E, 0x38, 0x80]),
    ([449.0, -2.0], 449 / 448, 2.0, [0x76, 0xB8]),  # 224.5 is stored as 224
    ([0.0, 0.0], 1e-4, 2.0**-13, [0, 0]),
    ([1e-3, -1e-9], 1e-4, 2.0**-13, [0x50, 0x80]),  # 8.192 is stored as 8
    ([-0.0546875], 0.0546875 / 448, 2.0**-13, [0xFE]),  # 2 ** -13 itself is not rounded up
    ([NAN, 1.0, -1.0], NAN, NAN, [0x7F, 0x7F, 0x7F]),
    ([-INF, 1.0, -1.0], INF, INF, [0x7F, 0, 0x80]),
    ([2.0**127], 2.0**127 / 448, 2.0**119, [0x78]),
]


@pytest.mark.parametrize(("firsts", "scale", "power", "codes"), GROUPS)
def test_a_group_quantised_to_fp8_v32(firsts: list[float], scale: float, power: float, codes: list[int]) -> None:
    row = groups(CACHE_FORMATS["fp8_v32"], [], firsts)
    token = quantize_mla_cache(row, "fp8_v32").reshape(-1)
    assert token.shape == (656,)
    np.testing.assert_array_equal(token[512:528].view("<f4")[:2], np.array([2.0**-13, power], np.float32))
    assert token[128 : 128 + len(codes)].tolist() == codes
    assert not token[:128].any()
    assert (token[528:].view("<u2").astype(np.uint32) << 16).view(np.float32).tolist() == list(range(1, 65))
    token = quantize_mla_cache(row, "fp8_v32", False).reshape(-1)
    np.testing.assert_array_equal(token[512:528].view("<f4")[:2], np.array([1e-4, scale], np.float32))


@pytest.mark.parametrize(("firsts", "scale", "power", "codes"), GROUPS)
def test_a_group_quantised_to_fp8_v4(firsts: list[float], scale: float, power: float, codes: list[int]) -> None:
    del scale
    layout = CACHE_FORMATS["fp8_v4"]
    kv = np.concatenate([groups(layout), groups(layout, [], [], firsts)], axis=1)
    page = quantize_mla_cache(kv, "fp8_v4").reshape(-1)
    assert page.shape == (2 * 584,)
    exponent = 127 + int(np.log2(power)) if np.isfinite(power) else 0xFF
    assert page[2 * 576 :].tolist() == [114] * 7 + [0, 114, 114, exponent] + [114] * 4 + [0]
    assert page[576 + 128 : 576 + 128 + len(codes)].tolist() == codes
    assert page[576 + 448 : 2 * 576].view(ml_dtypes.bfloat16).astype(int).tolist() == list(range(1, 65))


# The values of the e2m1 codes 0 to 15, as listed in the specification.
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


@pytest.mark.parametrize("layout", ["token", "page"])
def test_the_bytes_of_a_token_in_fp8_v41(layout: str) -> None:
    cache = np.zeros((2, 3, 1, 528), np.uint8)
    page = cache[1].reshape(-1)
    values, scales = (2 * 528, 2 * 528 + 512) if layout == "token" else (2 * 512, 3 * 512 + 2 * 16)
    page[values + 5], page[values + 32], page[values + 511] = 0x38, 0xC0, 0x7E  # 1, -2, 448
    page[scales : scales + 16] = [126, 129, *[0xFF] * 13, 127]
    rows = dequantize_mla_cache(cache, cache_layout=layout)
    assert rows.shape == (2, 3, 1, 512)
    assert rows[1, 2, 0, [5, 32, 511]].tolist() == [0.5, -8.0, 448.0]
    assert np.isnan(rows[1, 2, 0, 64:480]).all()
    assert np.count_nonzero(np.nan_to_num(rows)) == 3


@pytest.mark.parametrize("layout", ["token", "page"])
def test_the_bytes_of_a_token_in_fp4_v41(layout: str) -> None:
    cache = np.zeros((2, 3, 1, 288), np.uint8)
    page = cache[1].reshape(-1)
    values, scales = (2 * 288, 2 * 288 + 256) if layout == "token" else (2 * 256, 3 * 256 + 2 * 32)
    page[values : values + 8] = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]  # every code, in order
    page[values + 255] = 0xE3  # 1.5, then -4
    page[scales : scales + 32] = [0x40, 0x7F, *[0x38] * 29, 0xB0]  # 2, NaN, 1, -0.5
    rows = dequantize_mla_cache(cache, cache_layout=layout)
    assert rows.shape == (2, 3, 1, 512)
    row = rows[1, 2, 0]
    identical(row[:16], 2 * np.array(E2M1))
    assert np.isnan(row[16:32]).all()
    assert row[510:].tolist() == [-0.75, 2.0]
    assert np.count_nonzero(np.nan_to_num(rows)) == 16


# The first columns of a group, its scale, and the codes.
GROUPS_OF_4_BITS = [
    ([6.0, 1.0, -0.0], 1.0, [7, 2, 8]),
    ([6.0, 0.25, 0.75, -1.25, 1.75, 2.5, 3.5, -5.0], 1.0, [7, 0, 2, 10, 4, 4, 6, 14]),  # ties round to the even code
    ([6.0, 0.2500001, 0.7499999, 5.0000005, -0.2], 1.0, [7, 1, 1, 7, 8]),
    ([0.0, 0.0], 2.0**-9, [0, 0]),
    ([1e-30, -1e-30], 2.0**-9, [0, 8]),
    ([2688.0, -1e9, 224.0], 448.0, [7, 15, 1]),
    ([6.2, 3.1], 1.0, [7, 5]),  # the scale is rounded down, so the largest value saturates
    ([6.5, 1.0], 1.125, [7, 2]),
    ([NAN, 6.0, -6.0], NAN, [0, 0, 0]),
    ([-INF, 6.0, 448.0], 448.0, [15, 0, 2]),
]


@pytest.mark.parametrize("layout", ["token", "page"])
@pytest.mark.parametrize(("firsts", "scale", "codes"), GROUPS_OF_4_BITS)
def test_a_group_quantised_to_fp4_v41(firsts: list[float], scale: float, codes: list[int], layout: str) -> None:
    form = CACHE_FORMATS["fp4_v41"]
    kv = np.concatenate([groups(form), groups(form, [], [], firsts)], axis=1)
    page = quantize_mla_cache(kv, "fp4_v41", cache_layout=layout).reshape(-1)
    assert page.shape == (2 * 288,)
    values, scales = (288, 288 + 256) if layout == "token" else (256, 512 + 32)
    stored = page[scales : scales + 32].view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    np.testing.assert_array_equal(stored, [2.0**-9] * 2 + [scale] + [2.0**-9] * 29)
    found = page[values + 16 : values + 24]
    assert [code for byte in found.tolist() for code in (byte % 16, byte // 16)][: len(codes)] == codes


@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-12, 12))
def test_quantising_to_4_bits_takes_the_nearest_of_a_table(seed: int, exponent: int) -> None:
    kv = np.random.default_rng(seed).standard_normal((2, 3, 1, 512)).astype(np.float32) * np.float32(2.0**exponent)
    values = kv.reshape(2, 3, 1, 32, 16)
    scales = np.clip(np.abs(values).max(-1) / np.float32(6), np.float32(2**-9), np.float32(448))
    scales = scales.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    scaled = (values / scales[..., None]).astype(np.float64)
    off = np.abs(scaled[..., None] - np.array(E2M1))
    best = off.min(-1, keepdims=True)
    code = np.where(off == best, [code % 2 for code in range(16)], 2).argmin(-1)  # ties go to the even code
    want = np.array(E2M1)[code] * scales[..., None]
    got = dequantize_mla_cache(quantize_mla_cache(kv, "fp4_v41"))
    np.testing.assert_array_equal(got, want.reshape(kv.shape))


@pytest.mark.parametrize("name", [name for name, layout in CACHE_FORMATS.items() if layout.codes == "float8_e4m3fn"])
@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-20, 20))
def test_quantising_is_dividing_and_rounding(name: str, seed: int, exponent: int) -> None:
    """Quantising equals division and rounding by `ml_dtypes`, with scales from a logarithm instead of from bits."""
    layout = CACHE_FORMATS[name]
    kv = np.random.default_rng(seed).standard_normal((2, 3, 1, layout.width)).astype(np.float32)
    kv *= np.float32(2.0**exponent)
    values = kv[..., : layout.values].reshape(2, 3, 1, -1, layout.group)
    amax = np.abs(values).max(-1)
    scales = 2.0 ** np.ceil(np.log2(np.maximum(amax / np.float32(448), np.float32(1e-4))))
    stored = (values / scales[..., None].astype(np.float32)).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    want = np.concatenate(
        [(stored * scales[..., None]).reshape(2, 3, 1, -1), kv[..., layout.values :].astype(ml_dtypes.bfloat16)],
        axis=-1,
    )
    identical(dequantize_mla_cache(quantize_mla_cache(kv, name)), want.astype(np.float64))


@pytest.mark.parametrize("name", CACHE_FORMATS)
@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(0, 8))
def test_quantising_keeps_what_has_been_quantised(name: str, seed: int, exponent: int) -> None:
    random = np.random.default_rng(seed)
    kv = np.ldexp(random.standard_normal((2, 3, 1, CACHE_FORMATS[name].width)), exponent)
    once = dequantize_mla_cache(quantize_mla_cache(kv, name))
    identical(dequantize_mla_cache(quantize_mla_cache(once, name)), once)


def test_a_product_beyond_float32_is_infinite() -> None:
    cache = np.zeros((1, 1, 1, 656), np.uint8)
    cache[..., 0], cache[..., 512:516] = 0x7E, np.array([3e38], "<f4").view(np.uint8)
    assert dequantize_mla_cache(cache)[0, 0, 0, 0] == INF


# Attention. With q = 0 all visible keys have weight 1. With q = ln 3 in one column, a key with 1 there has weight 3.

WIDTH = 16


def rows_of(*values: float) -> np.ndarray:
    """Rows [n, 1, WIDTH] with a value in the first column and its parity in the last."""
    rows = np.zeros((len(values), 1, WIDTH))
    rows[:, 0, 0], rows[:, 0, -1] = values, np.nan_to_num(values) % 2
    return rows


def sparse(kv: np.ndarray, *lists: list[int], q: float = 0.0, **more: Any) -> tuple[Any, Any, Any]:
    """The first column of out, max_logits and lse, for one head per token, in which odd rows have the weight e^q."""
    queries = np.zeros((len(lists), 1, WIDTH))
    queries[..., -1] = q
    out, max_logits, lse = sparse_mla_prefill(
        queries, kv, np.array(lists, np.int32)[:, None], sm_scale=1.0, d_v=WIDTH, **more
    )
    return out[:, 0, 0], max_logits[:, 0], lse[:, 0]


def test_keys_weigh_by_their_logits() -> None:
    out, max_logits, lse = sparse(rows_of(10.0, 21.0, 30.0), [0, 1], q=np.log(3.0))
    close([out, max_logits, lse], [[(10 + 3 * 21) / 4], [np.log(3)], [np.log(4)]])


def test_order_is_free_and_a_duplicate_counts_twice() -> None:
    rows = rows_of(10.0, 21.0, 30.0)
    close(sparse(rows, [2, 1])[0], sparse(rows, [1, 2])[0])
    out, max_logits, lse = sparse(rows, [1, 0, 1], q=np.log(3.0))
    close([out, max_logits, lse], [[(10 + 6 * 21) / 7], [np.log(3)], [np.log(7)]])


@pytest.mark.parametrize("bad", [*OUTSIDE, 3])
def test_an_index_that_names_no_row_selects_nothing_wherever_it_stands(bad: int) -> None:
    rows = rows_of(10.0, 21.0, NAN)
    for index in range(3):
        chosen = [0, 1]
        chosen.insert(index, bad)
        close(sparse(rows, chosen)[0], [15.5])
    assert [float(value[0]) for value in sparse(rows, [bad, bad])] == [0.0, -INF, -INF]


def test_entries_behind_the_length_are_ignored() -> None:
    rows = rows_of(10.0, 21.0, 30.0, NAN)
    chosen = [0, 1, 2, 3]
    out, _, lse = sparse(rows, *[chosen] * 4, topk_lens=np.array([3, 1, 0, -5], np.int32))
    close(out, [61 / 3, 10, 0, 0])
    close(lse, [np.log(3), 0, -INF, -INF])
    close(sparse(rows[:3], [0, 1], topk_lens=np.array([99], np.int32))[0], [15.5])


@pytest.mark.parametrize(("sink", "left"), [(-INF, 1.0), (INF, 0.0), (np.log(2.0), 0.5), (np.log(6.0), 0.25)])
def test_a_sink_takes_its_share_and_changes_nothing_else(sink: float, left: float) -> None:
    rows = rows_of(10.0, 21.0)
    out, max_logits, lse = sparse(rows, [0, 1], [-1, -1], sinks=np.array([sink]))
    close(out, [15.5 * left, 0])
    close(lse, [np.log(2), -INF])
    close(max_logits, [0, -INF])


def test_each_kv_head_has_its_own_lists_and_query_heads() -> None:
    kv = np.concatenate([rows_of(1.0, 3.0, 5.0), rows_of(100.0, 300.0, 500.0)], axis=1)
    indices = np.array([[[0, 1, -1], [2, -1, 1]]], np.int32)
    out, _, lse = sparse_mla_prefill(np.zeros((1, 6, WIDTH)), kv, indices, d_v=WIDTH)
    close(out[0, :, 0], [2, 2, 2, 400, 400, 400])
    close(lse, np.full((1, 6), np.log(2)))


def test_the_default_scale_and_the_first_columns_as_the_value() -> None:
    random = np.random.default_rng(0)
    q, kv = random.standard_normal((1, 2, 48)), random.standard_normal((5, 1, 48))
    out, max_logits, lse = sparse_mla_prefill(q, kv, np.arange(5, dtype=np.int32)[None, None], d_v=32)
    logits = q[0] @ kv[:, 0].T / np.sqrt(48)
    weights = np.exp(logits)
    close(out[0], weights @ kv[:, 0, :32] / weights.sum(1, keepdims=True))
    close(max_logits[0], logits.max(1))
    close(lse[0], np.log(weights.sum(1)))


@pytest.mark.parametrize("name", CACHE_FORMATS)
def test_prefill_reads_a_paged_cache_by_slots(name: str) -> None:
    random = np.random.default_rng(1)
    width = CACHE_FORMATS[name].width
    cache = quantize_mla_cache(random.standard_normal((4, 3, 1, width)), name)
    q, indices = random.standard_normal((5, 2, width)), random.integers(-4, 16, (5, 1, 7)).astype(np.int32)
    rows = dequantize_mla_cache(cache)
    want = sparse_mla_prefill(q, rows.reshape(12, 1, width), indices, d_v=width)
    for kv in (rows, cache, cache.view(np.int8)):
        for got, expected in zip(sparse_mla_prefill(q, kv, indices, d_v=width), want, strict=True):
            close(got, expected)


def dense(values: list[list[float]], table: Any, lens: Any, num_q_tokens: int = 1, **more: Any) -> tuple[Any, Any]:
    """The first column of out [S, Q] and lse [S, Q], for one head that gives all keys the same weight."""
    pages = np.stack([rows_of(*page) for page in values])
    table, lens = np.array(table, np.int32), np.array(lens, np.int32)
    q = np.zeros((len(lens), num_q_tokens, 1, WIDTH))
    out, lse = mla_decode(q, pages, table, lens, d_v=WIDTH, **more)
    assert lse.shape == (len(lens), 1, num_q_tokens)
    return out[..., 0, 0], lse[:, 0]


PAGES = [[1.0, 2.0], [3.0, 4.0], [50.0, 60.0], [NAN, NAN]]


def test_a_sequence_sees_the_positions_its_table_lists() -> None:
    out, lse = dense(PAGES, [[2, 0, 9], [0, 1, 3], [9, 9, 9]], [3, 4, 0])
    close(out[:, 0], [111 / 3, 10 / 4, 0])
    close(lse[:, 0], [np.log(3), np.log(4), -INF])


def test_causal_is_aligned_at_the_end() -> None:
    out, lse = dense(PAGES, [[0, 1], [1, 0], [0, 1]], [4, 2, 0], 3, causal=True)
    close(out, [[1.5, 2, 2.5], [0, 3, 3.5], [0, 0, 0]])
    close(lse, np.array([[np.log(2), np.log(3), np.log(4)], [-INF, 0, np.log(2)], [-INF] * 3]))
    close(dense(PAGES, [[0, 1], [1, 0]], [4, 2], 3)[0], [[2.5] * 3, [3.5] * 3])


@pytest.mark.parametrize("bad", [*OUTSIDE, 4])
def test_a_page_that_is_not_there_hides_its_positions(bad: int) -> None:
    out, lse = dense(PAGES, [[0, bad, 2]], [5], 2, causal=True)
    close(out, [[1.5, 53 / 3]])
    close(lse, [[np.log(2), np.log(3)]])


def test_lengths_are_held_within_the_table() -> None:
    close(dense(PAGES, [[0, 1]] * 3, [2**31 - 1, -1, -(2**31)])[0], [[2.5], [0], [0]])
    close(dense(PAGES, [[0, 1]], [2**31 - 1], 2, causal=True)[0], [[2, 2.5]])


def test_the_heads_of_a_dense_cache_are_apart() -> None:
    pages = np.concatenate([np.stack([rows_of(*page) for page in PAGES[:3]])] * 2, axis=2)
    pages[:, :, 1] *= 10
    out, lse = mla_decode(np.zeros((1, 1, 4, WIDTH)), pages, np.array([[0, 1]]), np.array([4]), d_v=WIDTH)
    close(out[0, 0, :, 0], [2.5, 2.5, 25, 25])
    close(lse, np.full((1, 4, 1), np.log(4)))


def test_lists_have_lengths_of_their_sequence_or_their_own() -> None:
    pages = np.stack([rows_of(*page) for page in PAGES])
    indices = np.array([[[0, 4], [5, 1]], [[2, 3], [-1, 0]]], np.int32)
    q = np.zeros((2, 2, 1, WIDTH))

    def out(lens: Any) -> Any:
        return mla_decode(q, pages, indices=indices, topk_lens=np.array(lens, np.int32), d_v=WIDTH)[0][..., 0, 0]

    close(out([2, 1]), [[25.5, 31], [3, 0]])
    close(out([[1, 2], [9, -9]]), [[1, 31], [3.5, 0]])


def test_an_extra_cache_is_more_of_the_same_list() -> None:
    random = np.random.default_rng(2)
    pages, extra = random.standard_normal((3, 4, 1, WIDTH)), random.standard_normal((5, 2, 1, WIDTH))
    q, sinks = random.standard_normal((2, 3, 2, WIDTH)), random.standard_normal(2)
    indices = random.integers(-2, 13, (2, 3, 6)).astype(np.int32)
    extra_indices = random.integers(-2, 11, (2, 3, 4)).astype(np.int32)
    lens, extra_lens = np.array([6, 3]), np.array([[4, 1, 0], [2, 9, -1]])
    got = mla_decode(
        q, pages, indices=indices, topk_lens=lens, d_v=WIDTH, sinks=sinks,
        extra_kv_cache=extra, extra_indices=extra_indices, extra_topk_lens=extra_lens,
    )  # fmt: skip
    rows = np.concatenate([pages.reshape(12, 1, WIDTH), extra.reshape(10, 1, WIDTH)])[:, None]
    inside = (indices >= 0) & (indices < 12) & (np.arange(6) < lens[:, None, None])
    extra_inside = (extra_indices >= 0) & (extra_indices < 10) & (np.arange(4) < extra_lens[..., None])
    both = np.concatenate([np.where(inside, indices, -1), np.where(extra_inside, extra_indices + 12, -1)], axis=-1)
    want = mla_decode(q, rows, indices=both, d_v=WIDTH, sinks=sinks)
    close(got[0], want[0])
    close(got[1], want[1])


@pytest.mark.parametrize("name", CACHE_FORMATS)
def test_decode_reads_a_quantised_cache_dense_and_sparse(name: str) -> None:
    random = np.random.default_rng(3)
    width = CACHE_FORMATS[name].width
    cache = quantize_mla_cache(random.standard_normal((4, 3, 1, width)), name, True)
    rows = dequantize_mla_cache(cache)
    q, sinks = random.standard_normal((2, 2, 3, width)), np.array([0.5, -INF, INF])
    calls: list[dict[str, Any]] = [
        {"page_indices": np.array([[3, 0], [1, 7]]), "kv_lens": np.array([5, 6]), "causal": True},
        {"indices": random.integers(-2, 13, (2, 2, 5)).astype(np.int32)},
    ]
    for call in calls:
        for got, want in zip(
            mla_decode(q, cache, sinks=sinks, cache_format=name, **call),
            mla_decode(q, rows, sinks=sinks, **call),
            strict=True,
        ):
            close(got, want)


@pytest.mark.parametrize("name", CACHE_FORMATS)
def test_what_no_query_sees_takes_no_part(name: str) -> None:
    layout = CACHE_FORMATS[name]
    garbage = np.full((3, 2, 1, layout.token_bytes), 0xFF, np.uint8)
    cache = write_mla_cache(np.full((1, 1, layout.width), 6.0), garbage, np.array([2]))  # exact in every format
    q = np.ones((1, 1, 1, layout.width))
    for more in ({}, {"extra_kv_cache": garbage, "extra_indices": np.array([[[-1, 6]]])}):
        close(mla_decode(q, cache, indices=np.array([[[-1, 2, 3]]]), topk_lens=np.array([2]), d_v=64, **more)[0], 6)
    close(mla_decode(q, cache, np.array([[-1, 1]]), np.array([3]), d_v=64)[0], 6)
    assert np.isnan(mla_decode(q, cache, np.array([[-1, 1]]), np.array([4]), d_v=64)[0]).all()


@pytest.mark.parametrize("num_splits", [2, 3, 7, 40])
def test_keys_in_splits_merge_into_the_unsplit_result(num_splits: int) -> None:
    random = np.random.default_rng(5)
    pages, q = random.standard_normal((6, 4, 2, 32)), random.standard_normal((3, 2, 4, 32))
    call = {
        "page_indices": np.array([[0, 1, 2], [3, -1, 4], [5, 5, 5]]),
        "kv_lens": np.array([12, 9, 0]),
        "sinks": np.array([0.0, -INF, INF, 1.0]),
        "causal": True,
        "d_v": 16,
    }
    for got, want in zip(
        mla_decode(q, pages, num_splits=num_splits, **call), mla_decode(q, pages, **call), strict=True
    ):
        close(got, want)


def test_dense_is_sparse_over_all_positions() -> None:
    random = np.random.default_rng(6)
    pages, q = random.standard_normal((6, 4, 1, 32)), random.standard_normal((2, 3, 4, 32))
    table, lens = np.array([[4, 0, 2], [1, 9, 3]], np.int32), np.array([10, 12], np.int32)
    positions = np.broadcast_to(np.arange(12, dtype=np.int32), (2, 3, 12))
    seen = positions < (lens[:, None] - np.array([2, 1, 0]))[..., None]
    indices = page_indices_to_slots(np.where(seen, positions, -1), table, 4)
    want = mla_decode(q, pages, table, lens, causal=True, d_v=32)
    for got, expected in zip(mla_decode(q, pages, indices=indices, d_v=32), want, strict=True):
        agrees(got, expected, "float32")


# Schedules.


def test_the_schedule_of_a_short_an_empty_and_a_long_sequence() -> None:
    """85 blocks plus 3 overheads of 5, divided among 8 parts, are 13 per part. Each sequence in a part costs 5 more."""
    parts, num_splits = make_decode_schedule(np.array([300, 0, 5000]), num_parts=8)
    assert num_splits.tolist() == [0, 1, 2, 9]
    cuts = [*range(0, 79, 13), 79]
    long = [[2, start, 2, stop, index] for index, (start, stop) in enumerate(itertools.pairwise(cuts))]
    assert parts[:, :5].tolist() == [[0, 0, 1, 0, 0], *long]
    assert parts.dtype == num_splits.dtype == np.int32
    assert not parts[:, 5:].any()


def test_few_sequences_are_cut_and_spare_parts_are_idle() -> None:
    parts, num_splits = make_decode_schedule(np.full(2, 2048), sparse=True, num_parts=66)
    assert num_splits.tolist() == [0, 16, 32]
    want = [[seq, 2 * split, seq, 2 * split + 2, split] for seq in range(2) for split in range(16)]
    assert parts[:32, :5].tolist() == want
    assert parts[32:, :5].tolist() == [[2, 0, 1, 32, 0]] * 34


def test_many_sequences_are_dealt_out_whole() -> None:
    parts, num_splits = make_decode_schedule(np.full(128, 2048), sparse=True, num_parts=33)
    assert num_splits.tolist() == list(range(129))
    # A part has a payload of 149 blocks, into which 4 sequences fit: each counts as 37 blocks, with the overhead.
    assert parts[:, :5].tolist() == [[4 * part, 0, 4 * part + 3, 32, 0] for part in range(32)] + [[128, 0, 127, 32, 0]]


def test_a_list_counts_for_one_entry_and_an_extra_one_begins_a_block() -> None:
    def blocks(*arguments: Any) -> list[int]:
        return make_decode_schedule(*arguments)[0][:, 3].tolist()

    assert blocks(np.array([0]), None, True) == [1]
    assert blocks(np.array([0]), None, False) == [0]
    assert blocks(np.array([-7]), None, False) == [0]
    assert blocks(np.array([-(2**31)]), np.array([64]), True) == [2]
    assert blocks(np.array([65]), np.array([64]), True) == [3]
    assert blocks(np.array([65]), np.array([-3]), True) == [2]
    assert blocks(np.array([2**31 - 1]), np.array([2**31 - 1]), True) == [2**26]


def test_no_sequences_make_idle_parts() -> None:
    parts, num_splits = make_decode_schedule(np.zeros(0, np.int32), num_parts=3)
    assert num_splits.tolist() == [0]
    assert parts[:, :5].tolist() == [[0, 0, -1, 0, 0]] * 3


@given(
    lens=st.lists(st.integers(0, 3000), min_size=1, max_size=20),
    sparse=st.booleans(),
    num_parts=st.integers(1, 40),
    overhead=st.integers(0, 8),
)
def test_a_schedule_covers_every_block_once(lens: list[int], sparse: bool, num_parts: int, overhead: int) -> None:
    parts, num_splits = make_decode_schedule(np.array(lens), None, sparse, num_parts, overhead)
    blocks = [max(-(-length // 64), 1) for length in lens]
    payload = -(-(sum(blocks) + len(lens) * overhead) // num_parts) + overhead
    begin, splits = (0, 0), [0] * len(lens)
    for first, start, last, stop, split, *_ in parts.tolist():
        assert (first, start) == begin
        if first == len(lens):
            continue
        assert split == splits[first]
        stop = stop if last > first or stop > 0 else blocks[last]  # an empty sequence ends at 0
        whole = stop in (0, -(-lens[last] // 64), blocks[last])
        costs = [blocks[seq] + overhead for seq in range(first, last)] + [(stop or blocks[last]) + overhead]
        assert sum(costs) - start <= payload
        for seq in range(first, last + 1):
            splits[seq] += 1
        begin = (last + 1, 0) if whole else (last, stop)
    assert begin == (len(lens), 0)
    assert num_splits.tolist() == [0, *itertools.accumulate(splits)]


# The cache.


def test_positions_become_slots() -> None:
    table = np.array([[3, 1, -5], [7, 2**31 - 1, 2**29]], np.int32)
    positions = np.array([[[0, 5, 4, -1], [7, 8, 12, 2**31 - 1]], [[3, 4, 8, 11], [-(2**31), 0, 1, 2]]], np.int32)
    slots = page_indices_to_slots(positions, table, 4)
    assert slots.dtype == np.int32
    assert slots.tolist() == [[[12, 5, 4, -1], [7, -1, -1, -1]], [[31, -1, -1, -1], [-1, 28, 29, 30]]]
    assert page_indices_to_slots(np.array([1, 3]), table, 4).tolist() == [13, 31]
    assert page_indices_to_slots(np.array([5, 5]), np.array([[0], [1]]), 2**40).tolist() == [5, -1]
    assert page_indices_to_slots(np.array([0, 5]), np.zeros((2, 0)), 4).tolist() == [-1, -1]


def test_rows_of_a_ragged_batch_become_slots() -> None:
    table, positions = np.array([[3, 1], [7, 0], [2, 2]]), np.array([[0, 5], [4, -1], [7, 8], [1, 1], [6, 2]])
    slots = page_indices_to_slots(positions, table, 4, cu_q_lens=np.array([0, 1, 1, 4]))
    assert slots.tolist() == [[12, 5], [8, -1], [11, -1], [9, 9], [-1, -1]]
    slots = page_indices_to_slots(positions, table, 4, cu_q_lens=np.array([0, 1, 2, -9]), num_seqs=np.array([2]))
    assert slots.tolist() == [[12, 5], [0, -1], [-1, -1], [-1, -1], [-1, -1]]


SLOTS = np.array([4, -1, 0, 99, 4, -(2**63)])


def test_rows_are_written_to_their_slots() -> None:
    kv = np.arange(6 * 2 * WIDTH, dtype=np.float64).reshape(6, 2, WIDTH)
    cache = np.full((3, 2, 2, WIDTH), -1.0)
    want = cache.copy()
    want[0, 0], want[2, 0] = kv[2], kv[4]  # the later of two tokens with this slot
    identical(write_mla_cache(kv, cache, SLOTS), want)
    assert (cache == -1).all()


@pytest.mark.parametrize("name", CACHE_FORMATS)
@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_quantised_rows_are_written_to_their_slots(name: str, dtype: Any) -> None:
    layout = CACHE_FORMATS[name]
    random = np.random.default_rng(7)
    kv = random.standard_normal((6, 1, layout.width)).astype(np.float32)
    cache = random.integers(0, 256, (3, 2, 1, layout.token_bytes), dtype=np.uint8)
    before = dequantize_mla_cache(cache)
    got = write_mla_cache(kv, cache.view(dtype), SLOTS)
    assert got.dtype == dtype
    want = before.copy()
    want[0, 0], want[2, 0] = dequantize_mla_cache(quantize_mla_cache(kv[[[2, 4]]][..., None, 0, :], name))[0]
    identical(dequantize_mla_cache(got), want)
    whole = write_mla_cache(kv, np.zeros_like(cache), np.arange(6))
    identical(whole, quantize_mla_cache(kv.reshape(3, 2, 1, -1), name))


def test_scales_are_written_as_they_come_on_request() -> None:
    kv = np.random.default_rng(8).standard_normal((2, 1, 576)).astype(np.float32)
    got = write_mla_cache(kv, np.zeros((1, 2, 1, 656), np.uint8), np.arange(2), power_of_two_scales=False)
    identical(got, quantize_mla_cache(kv[None], "fp8_v32", False))
