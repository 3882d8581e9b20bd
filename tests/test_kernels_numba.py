"""Tests of the CPU kernels beyond the suite: numbers and formats, threads, forks, the cache, other CPUs, XLA."""

import functools
import itertools
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

numba = pytest.importorskip("numba")
torch = pytest.importorskip("torch")

import ragged_attention as ra  # noqa: E402
from ragged_attention.calls import CACHE_FORMATS, FLOAT8, QUANTIZED, CacheFormat  # noqa: E402
from ragged_attention.calls.cache_formats import LAYOUTS  # noqa: E402
from ragged_attention.key_ranges import causal_ranges  # noqa: E402
from ragged_attention.portable.numba import _formats, _softmax, _vectors  # noqa: E402
from ragged_attention.reference._kv_layout import encode, format_values  # noqa: E402
from ragged_attention.testing import agrees  # noqa: E402
from ragged_attention.testing.ranges import ranges_of  # noqa: E402
from ragged_attention.testing.selected import Selection, lists_of  # noqa: E402
from ragged_attention.torch import (  # noqa: E402
    dequantize_mla_cache,
    indexer_logits,
    indexer_topk,
    merge_attention_states,
    mla_decode,
    quantize_mla_cache,
    ragged_mla_attention,
    ragged_paged_attention,
    sparse_mla_prefill,
    top_k_indices,
    varlen_attention,
    write_indexer_cache,
    write_kv_pages,
    write_mla_cache,
)
from tests.processes import printed, run_python  # noqa: E402

LANES = _vectors.LANES
CODES = np.arange(256, dtype=np.uint8)
HALVES = np.arange(2**16, dtype=np.uint16)


# ---- numbers


@numba.njit
def _widen(code: int, source: int, target: int, count: int, factor: float) -> None:
    if factor == 1:
        _formats.widen(code, source, target, count)
    else:
        _formats.widen_e4m3(source, target, count, np.float32(factor))


@numba.njit
def _narrow(code: int, source: int, target: int, count: int, divisor: float) -> None:
    _formats.narrow(code, source, target, count, np.float32(divisor))


def whole(count: int) -> int:
    """`count` rounded up to a multiple of the vector width."""
    return -(-count // LANES) * LANES


def widened(name: str, stored: np.ndarray, count: int | None = None, factor: float = 1.0) -> np.ndarray:
    """Stored numbers as float32; elements that were not written hold 7."""
    count = len(stored) if count is None else count
    out = np.full(whole(count) + LANES, 7, np.float32)
    _widen(_formats.CODES[name], stored.ctypes.data, out.ctypes.data, count, factor)
    return out


def narrowed(name: str, values: np.ndarray, dtype: Any, count: int | None = None) -> np.ndarray:
    """float32 numbers in their stored form; elements that were not written hold 77."""
    assert len(values) % LANES == 0
    out = np.full(len(values), 77, dtype)
    _narrow(_formats.CODES[name], values.ctypes.data, out.ctypes.data, len(values) if count is None else count, 1.0)
    return out


def test_every_code_of_every_format_is_decoded() -> None:
    for name in FLOAT8:
        assert np.array_equal(widened(name, CODES)[:256], format_values(name).astype(np.float32), equal_nan=True)
    assert np.array_equal(widened("int8", CODES)[:256], CODES.view(np.int8).astype(np.float32))
    assert np.array_equal(
        widened("float16", HALVES)[:-LANES], HALVES.view(np.float16).astype(np.float32), equal_nan=True
    )
    wide = (HALVES.astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(widened("bfloat16", HALVES)[:-LANES], wide, equal_nan=True)


@numba.njit
def _pair(code: int, first: int, second: int, target: int, count: int) -> None:
    _formats.pair(code, first, second, target, count)


@pytest.mark.parametrize("name", ["bfloat16", *QUANTIZED])
def test_every_code_becomes_half_of_a_pair(name: str) -> None:
    stored = HALVES if name == "bfloat16" else CODES
    second = np.ascontiguousarray(stored[::-1])
    pairs = np.full(len(stored) + LANES, 7, np.uint32)
    _pair(_formats.CODES[name], stored.ctypes.data, second.ctypes.data, pairs.ctypes.data, len(stored))
    for half, expected in ((pairs << 16, stored), (pairs & 0xFFFF0000, second)):
        values = half[: len(stored)].view(np.float32)
        assert np.array_equal(values, widened(name, expected)[: len(stored)], equal_nan=True)
    assert (pairs[len(stored) :] == 7).all()


@numba.njit
def _pairs_of_four(source: int, target: int, count: int) -> None:
    for index in range(0, count, LANES):
        _formats.pairs_of_four_e4m3(source, index, target, count)


def test_every_four_codes_become_two_pairs() -> None:
    stored = np.concatenate([CODES, np.random.default_rng(0).integers(0, 256, 768).astype(np.uint8)])
    pairs = np.full((2, len(stored) // 4), 7, np.uint32)
    _pairs_of_four(stored.ctypes.data, pairs.ctypes.data, pairs.shape[1])
    halves = np.stack([pairs[0] << 16, pairs[0] & 0xFFFF0000, pairs[1] << 16, pairs[1] & 0xFFFF0000], axis=1)
    expected = widened("float8_e4m3fn", stored)[: len(stored)]
    assert np.array_equal(halves.ravel().view(np.float32), expected, equal_nan=True)


@numba.njit
def _transpose(sources: int, count: int, otherwise: int, target: int, stride: int) -> None:
    _vectors.transpose(sources, count, otherwise, 2 * LANES, target, stride)


@pytest.mark.parametrize("count", [1, 5, 40])
def test_rows_become_columns(count: int) -> None:
    columns = 2 * LANES
    rows = np.arange(LANES * (columns + 4), dtype=np.float32).reshape(LANES, columns + 4)
    addresses, otherwise = rows.ctypes.data + np.arange(LANES) * rows.strides[0], np.full(columns, -1, np.float32)
    addresses[3] = 0
    out = np.full((columns, LANES + 2), 7, np.float32)
    _transpose(addresses.ctypes.data, count, otherwise.ctypes.data, out.ctypes.data, LANES + 2)
    expected = rows[:, :columns].T.copy()
    expected[:, 3] = expected[:, count:] = -1
    assert np.array_equal(out[:, :LANES], expected)
    assert (out[:, LANES:] == 7).all()


@pytest.mark.parametrize("factor", [2.0**-120, 0.3, 2.0**110, 2.0**127])
def test_a_factor_of_any_size_is_applied_without_loss(factor: float) -> None:
    with np.errstate(over="ignore"):
        expected = (format_values("float8_e4m3fn").astype(np.float32) * np.float32(factor)).astype(np.float32)
    assert np.array_equal(widened("float8_e4m3fn", CODES, factor=factor)[:256], expected, equal_nan=True)


@pytest.mark.parametrize("count", range(40))
def test_no_more_is_read_and_written_than_asked_for(count: int) -> None:
    for name, dtype in zip(_formats.CODES, ("f4", "u2", "u2", "u1", "u1", "i1", "u1"), strict=True):
        stored = np.zeros(48, dtype)
        found = widened(name, stored, count)
        assert (found[: whole(count)] == 0).all()
        assert (found[whole(count) :] == 7).all()
        written = narrowed(name, np.zeros(48, np.float32), dtype, count)
        assert (written[:count] == 0).all()
        assert (written[count:] == 77).all()


def test_subnormal_numbers_stay_where_arithmetic_takes_them_for_0() -> None:
    """Conversions keep subnormal numbers in threads whose arithmetic flushes them to 0, as XLA's threads do."""
    small = np.arange(1, 2 * LANES + 4, dtype=np.uint32) << 16  # bits of float32 numbers that are subnormal in bfloat16
    values = np.concatenate([small.view(np.float32), np.zeros(LANES, np.float32)])
    stored = (small >> 16).astype(np.uint16)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormal numbers")
    try:
        copied, from_bfloat16 = (widened(name, each, len(small))[: len(small)].view(np.uint32)
                                 for name, each in (("float32", values), ("bfloat16", stored)))  # fmt: skip
        out = np.full(len(values), 7, np.uint16)
        _narrow(_formats.CODES["bfloat16"], values.ctypes.data, out.ctypes.data, len(small), 1.0)
    finally:
        torch.set_flush_denormal(False)
    assert np.array_equal(copied, small)
    assert np.array_equal(from_bfloat16, small)
    assert np.array_equal(out[: len(small)], stored)


def hard_values() -> np.ndarray:
    """float32 values of every magnitude: also halfway between two codes, beyond the largest, and NaN of both signs."""
    rng = np.random.default_rng(0)
    finite = format_values("float8_e4m3fn")[:127]
    of_fnuz = format_values("float8_e4m3fnuz")[:128]
    middles = np.concatenate([(each[1:] + each[:-1]) / 2 for each in (finite, of_fnuz)])
    with np.errstate(invalid="ignore", over="ignore"):
        values = np.concatenate([
            rng.standard_normal(4000) * 10.0 ** rng.integers(-12, 12, 4000),
            format_values("float8_e5m2"), HALVES.view(np.float16).astype(np.float64), middles, -middles,
            np.nextafter(middles, 0), [np.inf, -np.inf, np.nan, -np.nan, 0.0, -0.0, 448, 464, 465, 57344, 61440, 65519,
                                       65520, 1e38, 247.9, 248, 2.0**-149],
        ]).astype(np.float32)  # fmt: skip
    return np.concatenate([values, np.zeros(-len(values) % LANES, np.float32)])


def test_numbers_are_rounded_as_they_are_stored() -> None:
    values = hard_values()
    for name, dtype in (*((name, "u1") for name in FLOAT8), ("int8", "i1")):
        assert np.array_equal(narrowed(name, values, dtype), encode(values, name))
    with np.errstate(over="ignore"):
        assert np.array_equal(narrowed("float16", values, np.float16), values.astype(np.float16), equal_nan=True)
    rounded = torch.from_numpy(values).bfloat16().float().numpy()
    found = (narrowed("bfloat16", values, "u2").astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(found, rounded, equal_nan=True)


@numba.njit
def _map_exp2(source: int, target: int, count: int) -> None:
    for index in range(0, count, LANES):
        _vectors.store(target, index, _vectors.exp2(_vectors.load(source, index)))


@numba.njit
def _map_capped(source: int, target: int, count: int) -> None:
    for index in range(0, count, LANES):
        _vectors.store(target, index, _softmax.soft_capped(_vectors.load(source, index), _vectors.splat(1.0)))


def mapped(function: Any, values: np.ndarray) -> np.ndarray:
    out = np.empty_like(values)
    function(values.ctypes.data, out.ctypes.data, len(values))
    return out.astype(np.float64)


def test_exponentials_and_tangents_are_accurate() -> None:
    x = np.linspace(-126, 0, 80000, dtype=np.float32)
    assert np.max(np.abs(mapped(_map_exp2, x) / np.exp2(x.astype(np.float64)) - 1)) < 2e-7
    rest = np.array([-127, -300, -np.inf, np.nan] + [0] * 12, np.float32)
    assert np.array_equal(mapped(_map_exp2, rest), [0, 0, 0, np.nan] + [1] * 12, equal_nan=True)
    x = np.concatenate([np.geomspace(1e-30, 20, 40000), -np.geomspace(1e-30, 20, 40000)]).astype(np.float32)
    assert np.max(np.abs(mapped(_map_capped, x) / np.tanh(x.astype(np.float64)) - 1)) < 4e-7
    rest = np.array([np.inf, -np.inf, np.nan] + [0] * 13, np.float32)
    assert np.array_equal(mapped(_map_capped, rest), [1, -1, np.nan] + [0] * 13, equal_nan=True)


@numba.njit
def _weigh(s: int, count: int, m_i: int, l_i: int, out: int) -> int:
    return _softmax.weigh(s, count, count, 0, m_i, l_i, out, 2 * LANES)


def test_four_rows_are_weighed_at_once() -> None:
    """A row without keys, with a NaN or with a new largest logit does not affect the other rows.

    Each bit of the result tells whether a few keys have most of a row's weight.
    """
    generator, count = np.random.default_rng(0), 16 * LANES
    logits = generator.normal(size=(4, count)).astype(np.float32)
    logits[1] = -np.inf
    logits[2, 3] = np.nan
    logits[3, 5] = 40
    m_i, l_i = np.array([9, -np.inf, -np.inf, 2], np.float32), np.array([1, 0, 0, 3], np.float32)
    out, s = np.ones((4, 2 * LANES), np.float32), logits.copy()
    bits = _weigh(s.ctypes.data, count, m_i.ctypes.data, l_i.ctypes.data, out.ctypes.data)
    high = np.array([9, -np.inf, np.nanmax(logits[2]), 40], np.float32)
    assert np.array_equal(m_i, high)
    base = np.array([9, 0, 0, 40])[:, None]
    assert np.allclose(s[[0, 1, 3]], np.exp2(logits.astype(np.float64) - base)[[0, 1, 3]], rtol=4e-6, atol=1e-37)
    assert np.allclose(l_i[[0, 3]], [1 + s[0].sum(), 3 * 2.0**-38 + s[3].sum()], rtol=1e-6)
    assert np.array_equal(l_i[1:3], [0, np.nan], equal_nan=True)
    assert np.array_equal(out[[0, 3]], np.repeat(np.array([[1], [2.0**-38]], np.float32), 2 * LANES, 1))
    assert bits == 0b1000

    m_i, l_i, s = np.full(4, -np.inf, np.float32), np.zeros(4, np.float32), np.zeros((4, count), np.float32)
    assert _weigh(s.ctypes.data, count, m_i.ctypes.data, l_i.ctypes.data, out.ctypes.data) == 0  # equal weights


@pytest.mark.parametrize("cache_format", ["plain", "fp8_v4", "fp8_v41", "fp4_v41"])
def test_a_key_that_a_list_names_often_keeps_its_weight(cache_format: str) -> None:
    """A key that a list names many times gets an exact weight: its equal rounding errors would not cancel out."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.zeros(4, 16, 1, 512)
    rows[..., :32] = torch.randint(-1, 2, (4, 16, 1, 32), generator=generator)  # exact in every format
    rows[..., 64:] = torch.randint(-4, 5, (4, 16, 1, 448), generator=generator)
    cache = rows.bfloat16()
    stored = cache if cache_format == "plain" else quantize_mla_cache(cache, cache_format)
    q = torch.zeros(1, 1, 16, 512).bfloat16()
    q[..., :32] = torch.randn(1, 1, 16, 32, generator=generator)
    named = torch.tensor([3] * 150 + [40] * 130 + [17] * 120).int()[torch.randperm(400, generator=generator)]
    options: dict[str, Any] = {"indices": named.view(1, 1, -1), "sm_scale": 0.25, "out_dtype": torch.float32}
    rows = stored if cache_format == "plain" else dequantize_mla_cache(stored, cache_format, dtype="float32")
    exact, _ = mla_decode(q.float(), rows.float(), backend="reference", **options)
    found, _ = mla_decode(q, stored, backend="numba", **options)
    assert (found - exact).abs().max() < 2e-5 * exact.abs().max()


def test_the_largest_scale_of_a_quantised_row_loses_nothing() -> None:
    cache = torch.zeros(1, 1, 1, 584, dtype=torch.uint8)
    cache[..., :448] = 1  # the smallest positive e4m3 number, 2 ** -9
    cache[..., 576:583] = 254  # the scale 2 ** 127
    rows = dequantize_mla_cache(cache, dtype="float32", backend="numba")
    assert torch.equal(rows[..., :448], torch.full((1, 1, 1, 448), 2.0**118))


@pytest.mark.parametrize("cache_layout", LAYOUTS)
def test_a_new_row_of_the_table_of_formats_is_all_that_a_format_needs(
    monkeypatch: pytest.MonkeyPatch, cache_layout: str
) -> None:
    """Kernels do not depend on a format's name: a new format of e2m1 values with e4m3 scales works everywhere."""
    made_up = CacheFormat(
        name="made_up", codes="float4_e2m1fn", values=512, rotary=64, group=16, scales="float8_e4m3fn",
        token_bytes=416, layouts=LAYOUTS,
    )  # fmt: skip
    monkeypatch.setitem(CACHE_FORMATS, "made_up", made_up)
    generator = torch.Generator().manual_seed(0)
    rows, new = (torch.randn(*shape, 1, 576, generator=generator) for shape in ((6, 4), (5,)))
    q = torch.randn(4, 2, 576, generator=generator)
    table, edges = torch.randperm(6, generator=generator).view(2, 3).int(), torch.tensor([0, 3, 4]).int()
    lists, lens = torch.randint(-2, 26, (4, 1, 9), generator=generator).int(), torch.tensor([11, 6]).int()
    found: dict[str, list[Any]] = {}
    for backend in ("numba", "reference"):
        where: dict[str, Any] = {"cache_layout": cache_layout, "backend": backend}
        cache = quantize_mla_cache(rows, "made_up", **where)
        write_mla_cache(new, cache, torch.tensor([3, 17, 4, 23, -1]), **where)
        found[backend] = [
            cache,
            dequantize_mla_cache(cache, dtype="float32", **where),
            mla_decode(q[:, None], cache, indices=lists, extra_kv_cache=cache, extra_indices=lists, **where)[0],
            mla_decode(q[:2, None], cache, table, lens, **where)[0],
            ragged_mla_attention(q, cache, lens, table, edges, **where),
            sparse_mla_prefill(q, cache, lists, **where)[0],
        ]
    for ours, expected in zip(*found.values(), strict=True):
        assert torch.allclose(ours.float(), expected.float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(found["numba"][0], found["reference"][0])


# ---- threads


def batch(lens: list[int], seed: int = 0) -> tuple[Any, ...]:
    """A decode of one query per sequence: 4 heads on 2 KV heads, pages of 16."""
    generator = torch.Generator().manual_seed(seed)
    pages = max(lens) // 16 + 1
    q = torch.randn(len(lens), 4, 32, generator=generator)
    kv_pages = torch.randn(len(lens) * pages, 16, 4, 32, generator=generator)
    table = torch.randperm(len(lens) * pages, generator=generator).view(len(lens), pages).int()
    return q, kv_pages, torch.tensor(lens).int(), table, torch.arange(len(lens) + 1).int()


def with_threads(count: int, call: Callable[[], Any]) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return call()
    finally:
        torch.set_num_threads(before)


def test_the_number_of_threads_changes_no_bit() -> None:
    skewed = batch([17] * 6 + [5000])  # the last sequence is split
    alone, together = (
        with_threads(count, lambda: ragged_paged_attention(*skewed, backend="numba")) for count in (1, 3)
    )
    assert torch.equal(alone, together)
    assert (alone - ragged_paged_attention(*skewed, backend="eager")).abs().max() < 1e-5


def test_calls_of_several_threads_do_not_disturb_each_other() -> None:
    batches = [batch([200 + 10 * seed, 1500], seed) for seed in range(4)]
    expected = [ragged_paged_attention(*each, backend="numba") for each in batches]
    wrong: list[int] = []

    def serve(index: int) -> None:
        for _ in range(20):
            if not torch.equal(ragged_paged_attention(*batches[index], backend="numba"), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=serve, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces the memory limit that this test sets")
def test_threads_that_a_call_has_started_end_before_it() -> None:
    assert printed("-m", "tests.programs.numba_in_a_fork") == "well\n"


def test_a_call_for_which_there_is_no_memory_fails_as_a_whole() -> None:
    pytest.importorskip("jax")
    assert printed("-m", "tests.no_memory").endswith("\nwell\n")


# ---- compiling


def test_kernels_are_kept_on_disk_and_a_line_says_so(tmp_path: Path) -> None:
    first, second = (run_python("-m", "tests.programs.numba_cache_hits", XDG_CACHE_HOME=str(tmp_path)) for _ in "12")
    assert first.stdout == "192.0\n[0, 0]\n", first.stderr
    assert second.stdout == "192.0\n[1, 1]\n", second.stderr
    assert first.stderr.startswith("ragged_attention: compiling the kernel merge_attention_states for this CPU, once, ")
    assert f" seconds; the code will be cached in {tmp_path}" in first.stderr


def test_a_branch_is_compiled_when_a_call_first_needs_it_and_kept_on_disk(tmp_path: Path) -> None:
    first, second = (printed("-m", "tests.programs.numba_branches", XDG_CACHE_HOME=str(tmp_path)) for _ in "12")
    kernel = "attend_to_range mix_floats multiply_floats plan run_kernel work"
    assert first.splitlines() == [f"compiled: {kernel}", "loaded:", "compiled: add_slopes", "loaded:"]
    assert second.splitlines() == ["compiled:", f"loaded: {kernel}", "compiled:", "loaded: add_slopes"]


def test_xla_refuses_a_call_whose_branch_this_process_lacks() -> None:
    """A call that was not traced in this process, as after `jax.export`, fails and does not jump to missing code."""
    jax = pytest.importorskip("jax")
    from ragged_attention.jax import ragged_paged_attention
    from ragged_attention.portable.numba._call import KERNEL

    jnp = jax.numpy
    q, pages, slopes = jnp.ones((2, 4, 32)), jnp.ones((2, 16, 4, 32)), jnp.ones(4)
    batch = jnp.full(2, 9), jnp.arange(2)[:, None], jnp.arange(3)
    attend = jax.jit(lambda *given: ragged_paged_attention(q, pages, *batch, alibi_slopes=given[0], backend="numba"))
    expected = attend(slopes)
    index = next(index for index, each in enumerate(KERNEL.fields.branches) if each.name == "add_slopes")
    address, KERNEL.addresses[index] = KERNEL.addresses[index], 0
    try:
        with pytest.raises(Exception, match="lacks a branch that this call needs"):
            jax.block_until_ready(attend(slopes))
    finally:
        KERNEL.addresses[index] = address
    assert (attend(slopes) == expected).all()


def test_a_cpu_without_wide_registers_gives_the_same() -> None:
    """Tests pass with the code that LLVM compiles for a generic CPU of this architecture."""
    here = Path(__file__)
    tests = [f"{here}::{name}" for name, value in globals().items() if name.startswith("test_") and "numbers" in name]
    tests += [f"{here}::test_every_code_of_every_format_is_decoded",
              f"{here}::test_every_four_codes_become_two_pairs",
              f"{here}::test_no_division_of_the_keys_changes_a_logit_or_a_choice",
              f"{here}::test_exponentials_and_tangents_are_accurate",
              f"{here}::test_the_number_of_threads_changes_no_bit"]  # fmt: skip
    output = printed("-m", "tests.programs.tests_on_a_generic_cpu", *tests, NUMBA_CPU_NAME="generic")
    assert f"{len(tests)} passed" in output


# ---- operands written in place, and XLA


def test_of_two_tokens_for_one_slot_the_later_one_wins_on_any_number_of_threads() -> None:
    k = torch.arange(64.0).view(64, 1, 1).expand(64, 1, 16).contiguous()
    slots = torch.arange(64) % 5
    pages = torch.zeros(3, 2, 2, 16)
    with_threads(3, lambda: write_kv_pages(k, k, pages, slots, backend="numba"))
    assert pages[:, :, 0, 0].flatten().tolist() == [60.0, 61.0, 62.0, 63.0, 59.0, 0.0]


def to_jax(given: Any) -> Any:
    jnp = pytest.importorskip("jax.numpy")
    return tuple(jnp.asarray(array.numpy()) for array in given)


def test_jitted_steps_write_donated_pages_in_place() -> None:
    jax = pytest.importorskip("jax")
    from ragged_attention.jax import ragged_paged_attention as attention
    from ragged_attention.jax import write_kv_pages as write

    q, kv_pages, kv_lens, table, edges = to_jax(batch([40, 300]))
    k = v = q[:, :2]

    def step(kv_pages: Any) -> Any:
        kv_pages = write(k, v, kv_pages, (table, kv_lens, edges), backend="numba")
        return attention(q, kv_pages, kv_lens, table, edges, backend="numba"), kv_pages

    expected = jax.jit(step)(kv_pages)
    place = kv_pages.unsafe_buffer_pointer()
    out, written = jax.jit(step, donate_argnums=0)(kv_pages)
    assert written.unsafe_buffer_pointer() == place
    assert np.array_equal(out, expected[0])
    assert np.array_equal(written, expected[1])


def test_xla_maps_and_scans_over_calls() -> None:
    jax = pytest.importorskip("jax")
    from ragged_attention.jax import ragged_paged_attention as attention

    q, *rest = to_jax(batch([40, 300]))
    several = jax.numpy.stack([q, 2 * q, 3 * q])

    def one(q: Any) -> Any:
        return attention(q, *rest, backend="numba")

    expected = np.stack([one(q) for q in several])
    assert np.array_equal(jax.jit(jax.vmap(one))(several), expected)
    assert np.array_equal(jax.jit(lambda all: jax.lax.scan(lambda c, q: (c, one(q)), 0, all)[1])(several), expected)


def test_parts_that_saw_nothing_take_no_part_in_a_merge() -> None:
    outs = torch.randn(2, 3, 4, 24)
    outs[1] = torch.nan
    lses = torch.stack([torch.randn(3, 4), torch.full((3, 4), -torch.inf)])
    out, lse = merge_attention_states(outs, lses, backend="numba")
    assert torch.allclose(out, outs[0])
    assert torch.allclose(lse, lses[0])


def nan_batch(operation: str, tokens: int, keys: int) -> Callable[[], Any]:
    """A call of `operation` whose keys and values are all NaN."""
    pages, width = keys // 16 + 1, 576 if operation == "latent" else 64
    cache = torch.full((pages, 16, 1, width), torch.nan)
    q, cu_q_lens = torch.randn(tokens, 4, width), torch.tensor([0, tokens]).int()
    given: dict[str, Any] = {"return_lse": True, "backend": "numba"}
    if operation == "packed":
        k = cache.view(-1, 1, width)[:keys]
        return functools.partial(varlen_attention, q, k, k, cu_q_lens, torch.tensor([0, keys]).int(), **given)
    attend = ragged_mla_attention if operation == "latent" else ragged_paged_attention
    held: Any = cache if operation == "latent" else (cache, cache)
    if operation == "lists":
        given |= {"selected": torch.zeros(tokens, 1, 1).int(), "block_size": 16}
    table = torch.arange(pages).int()[None]
    return functools.partial(attend, q, held, torch.tensor([keys]).int(), table, cu_q_lens, **given)


@pytest.mark.parametrize("operation", ["paged", "latent", "packed", "lists"])
@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("keys", [20, 300])
def test_rows_that_see_nothing_but_nan_are_nan(operation: str, tokens: int, keys: int) -> None:
    """A row whose logits are all NaN gives NaN. It is not a row without keys, although its maximum is -inf."""
    assert all(result.isnan().all() for result in nan_batch(operation, tokens, keys)())


# ---- rows with scales


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_scales_may_be_any_power_of_two(name: str) -> None:
    """Every possible code of a scale gives right results, in a sequence of two keys. Some value codes are NaN."""
    generator, powers = torch.Generator().manual_seed(0), torch.arange(256).to(torch.uint8)
    width, dtype = (64, torch.float8_e4m3fn) if name == "mxfp8" else (32, torch.uint8)
    k, v = (torch.randint(0, 256, (256, 2, 1, width), generator=generator).to(torch.uint8) for _ in range(2))
    v[:, 1] = v[:, 0]  # both values are equal, so their mean is exact
    pages = torch.where(k & 0x7F == 0x7F, 0, k).view(dtype), v.view(dtype)

    def scales(least: int, most: int) -> Any:
        codes = torch.where(powers == 255, powers, powers.clamp(least, most))
        return codes.view(torch.float8_e8m0fnu).view(-1, 1, 1, 1).expand(256, 2, 1, 2)

    # Beyond these scales, keys, queries or values would be infinite in bfloat16, or subnormal, which counts as 0.
    q = torch.randn(256, 4, 64, generator=generator) * 2.0 ** (120 - powers.clamp(10, 220).float()).view(-1, 1, 1)
    for k_scales, v_scales in ((scales(10, 220), scales(127, 127)), (scales(127, 127), scales(0, 245))):
        given = {"k_scale_pages": k_scales, "v_scale_pages": v_scales, "return_lse": True}
        ours, expected = (
            ragged_paged_attention(
                q.bfloat16(),
                pages,
                torch.full((256,), 2).int(),
                powers.int()[:, None],
                torch.arange(257).int(),
                backend=backend,
                **given,
            )
            for backend in ("numba", "reference")
        )
        assert ours[0][-1].isnan().all()
        assert agrees(ours[0].float(), expected[0].float(), "bfloat16")
        assert agrees(ours[1], expected[1], "lse bfloat16")


@pytest.mark.parametrize("v_head_dim", [64, 80])  # 80 columns are five blocks of 16, an odd number
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("sliding_window", [None, 1])  # a window of 1 has one key, without a partner in its pair
def test_scales_of_nvfp4_may_be_any_code(v_head_dim: int, strided: bool, sliding_window: int | None) -> None:
    """Every possible code of a scale gives right results, in a sequence of two keys. Some value codes are NaN."""
    generator, codes = torch.Generator().manual_seed(0), torch.arange(256).to(torch.uint8)
    step, widths = 3 if strided else 1, (64, v_head_dim)
    pages, scales = [], []
    for width in widths:
        rows = torch.randint(0, 256, (256, 2, 1, width // 2), generator=generator).to(torch.uint8)
        rows[:, 1] = rows[:, 0]
        pages.append(rows)
        of_blocks = torch.randint(0, 126, (256, 2, 1, step * width // 16), generator=generator).to(torch.uint8)
        scales.append(of_blocks[..., ::step])
    scales[0][:, :, 0, 1] = torch.where(codes & 0x7F == 0x7F, 0, codes)[:, None]
    scales[1][:, :, 0, v_head_dim // 16 - 1] = codes[:, None]
    k_scales, v_scales = (each.view(torch.float8_e4m3fn) for each in scales)
    q = torch.randn(256, 4, 64, generator=generator).bfloat16() / 512
    tables = torch.full((256,), 2).int(), codes.int()[:, None], torch.arange(257).int()
    ours, expected = (
        ragged_paged_attention(
            q, tuple(pages), *tables, k_scale_pages=k_scales, v_scale_pages=v_scales, sm_scale=0.01,
            sliding_window=sliding_window, backend=backend,
        )
        for backend in ("numba", "reference")
    )  # fmt: skip
    assert [token for token in range(256) if ours[token].isnan().any()] == [127, 255]
    assert agrees(ours.float(), expected.float(), "bfloat16")


def test_zero_points_need_not_be_integers() -> None:
    """Fractional zero points give right results.

    Kernels multiply codes minus the nearest integer, and subtract the rest of the zero point afterwards.
    """
    generator, lens = torch.Generator().manual_seed(0), [3, 70, 400]
    size = 30, 16, 2
    pages = tuple(torch.randint(0, 256, (*size, 32), generator=generator).to(torch.uint8) for _ in range(2))
    table = torch.randperm(30, generator=generator)[:26].expand(3, 26).int().contiguous()
    q = torch.randn(60, 8, 64, generator=generator).bfloat16()
    cu_q_lens = torch.tensor([0, 2, 10, 60]).int()
    for least, most in ((0, 15), (7.4, 7.6), (-30, 0), (15, 50)):
        scales = tuple(
            torch.stack(
                [
                    torch.rand(size, generator=generator) / max(abs(least), abs(most), 8),
                    least + (most - least) * torch.rand(size, generator=generator),
                ],
                -1,
            ).to(torch.float16)
            for _ in range(2)
        )
        given = {"k_scale_pages": scales[0], "v_scale_pages": scales[1], "return_lse": True, "soft_cap": 5.0}
        ours, expected = (
            ragged_paged_attention(q, pages, torch.tensor(lens).int(), table, cu_q_lens, backend=backend, **given)
            for backend in ("numba", "reference")
        )
        assert agrees(ours[0].float(), expected[0].float(), "bfloat16")
        assert agrees(ours[1], expected[1], "lse bfloat16")


# ---- latents


def latent_batch(lens: list[tuple[int, int]], heads: int, cache_format: str, dtype: Any = torch.float32) -> Any:
    """Sequences with the (queries, keys) in `lens`, in pages of 16; rows that belong to no sequence are NaN."""
    generator = torch.Generator().manual_seed(0)
    pages, tokens = max(keys for _, keys in lens) // 16 + 1, sum(queries for queries, _ in lens)
    table = torch.randperm(len(lens) * pages, generator=generator).view(len(lens), pages).int()
    rows = torch.randn(len(lens) * pages, 16, 1, 576, generator=generator).to(dtype)
    for pages_of_sequence, (_, keys) in zip(table, lens, strict=True):
        rows[pages_of_sequence[keys // 16].long(), keys % 16 :] = torch.nan
        rows[pages_of_sequence[keys // 16 + 1 :].long()] = torch.nan
    return {
        "q": torch.randn(tokens, heads, 576, generator=generator).to(dtype),
        "kv_cache": rows if cache_format == "plain" else quantize_mla_cache(rows, cache_format, backend="numba"),
        "kv_lens": torch.tensor([keys for _, keys in lens]).int(),
        "page_indices": table,
        "cu_q_lens": torch.tensor([0, *(queries for queries, _ in lens)]).cumsum(0).int(),
    }


@pytest.mark.parametrize("cache_format", ["plain", "fp8_v32"])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 700, "soft_cap": 4.0}], ids=str)
def test_no_division_of_prompts_and_decodes_changes_what_latents_give(cache_format: str, options: Any) -> None:
    """The number of threads changes no bit. Blocks and splits change only the rounding. The long decode is split."""
    lens = [(1, 40), (33, 70), (5, 5), (0, 20), (2, 6000)]
    batch = latent_batch(lens, 3, cache_format) | options | {"return_lse": True}

    def ours(**tile: int) -> Any:
        return ragged_mla_attention(**batch, backend="numba", options=tile)

    expected = with_threads(1, ours)
    assert all(torch.equal(*pair) for pair in zip(expected, with_threads(3, ours), strict=True))
    eager = ragged_mla_attention(**batch, backend="eager")
    tiles = ({}, {"block_rows": 1, "block_kv": 8}, {"block_rows": 5, "num_splits": 4}, {"block_rows": 128})
    for tile in tiles:
        assert all(agrees(*pair, "float32") for pair in zip(ours(**tile), eager, strict=True))


def test_a_sequence_of_latents_has_the_same_bits_alone_and_in_a_batch() -> None:
    lens = [(1, 5000), (40, 90), (1, 30), (2, 3000)]
    batch = latent_batch(lens, 16, "plain", torch.bfloat16)
    with ra.use_backend("numba", batch_invariant=True):
        together = ragged_mla_attention(**batch)
        for seq, (first, stop) in enumerate(itertools.pairwise(batch["cu_q_lens"].tolist())):
            alone = batch | {name: batch[name][seq : seq + 1] for name in ("kv_lens", "page_indices")}
            alone |= {"q": batch["q"][first:stop], "cu_q_lens": torch.tensor([0, stop - first]).int()}
            assert torch.equal(ragged_mla_attention(**alone), together[first:stop])


@pytest.mark.parametrize("heads", [3, 40])  # with 3 heads keys are read as stored, with 40 transposed
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_rounded_weights_leave_latents_within_bounds_where_few_keys_have_all_weight(
    heads: int, cache_dtype: Any
) -> None:
    batch = latent_batch([(3, 3), (1, 2), (4, 400)], heads, "plain", torch.bfloat16)
    batch |= {"kv_cache": batch["kv_cache"].to(cache_dtype), "out_dtype": torch.float32}
    in_float32 = batch | {"q": batch["q"].float(), "kv_cache": batch["kv_cache"].float()}
    out, expected = (ragged_mla_attention(**each, backend="numba") for each in (batch, in_float32))
    assert agrees(out, expected, "bfloat16")


def test_a_key_that_is_listed_often_rounds_no_worse() -> None:
    """A key that is listed many times gets an exact weight: its equal rounding errors would not cancel out."""
    q, rows = torch.randn(2, 1, 5, 576).bfloat16(), torch.randn(4, 1, 1, 576).bfloat16()
    indices = torch.randint(0, 4, (2, 1, 600)).int()
    options: dict[str, Any] = {"indices": indices, "soft_cap": 1.5, "out_dtype": torch.float32, "backend": "numba"}
    out, _ = mla_decode(q, rows, None, None, **options)
    assert agrees(out, mla_decode(q.float(), rows.float(), None, None, **options)[0], "float32")


def test_of_two_latents_for_one_position_the_later_one_wins_on_any_number_of_threads() -> None:
    table = torch.arange(40).view(1, 40).int().expand(3, 40)  # the sequences have the same pages
    edges, kv_lens = torch.tensor([0, 300, 310, 610]).int(), torch.tensor([300, 200, 300]).int()
    kv, cache = torch.randn(610, 32).bfloat16(), torch.zeros(40, 8, 1, 32, dtype=torch.int8)
    tables = {"page_indices": table, "kv_lens": kv_lens, "cu_q_lens": edges}
    with_threads(3, lambda: write_mla_cache(kv, cache, **tables, kv_scale=0.05, backend="numba"))
    stored = torch.from_numpy(encode((kv[310:].float() / torch.tensor(0.05)).numpy(), "int8"))
    assert torch.equal(cache.view(320, 32)[:300], stored.view(torch.int8))


# ---- masks as ranges of keys


@pytest.mark.parametrize("operation", ["paged", "latent", "packed", "gradient"])
@pytest.mark.skipif(sys.platform != "linux", reason="the test protects memory by calls of Linux")
def test_blocks_of_keys_that_no_query_sees_are_not_read(operation: str) -> None:
    for mask in ("ranges", "lists")[: 1 if operation == "latent" else 2]:
        assert printed("-m", "tests.programs.unseen_keys", operation, mask) == "well\n"
    assert run_python("-m", "tests.programs.unseen_keys", operation, "causal").returncode == -signal.SIGSEGV


LENGTHS = [(1, 40), (33, 70), (5, 5), (0, 20), (2, 6000), (70, 400)]


def ranges(kind: str) -> Any:
    """Key ranges for the sequences in `LENGTHS`."""
    tokens = sum(queries for queries, _ in LENGTHS)
    return torch.from_numpy(ranges_of(np.random.default_rng(0), LENGTHS, tokens, kind))


def paged_batch(dtype: Any = torch.float32) -> dict[str, Any]:
    """The tables of `latent_batch`, with 6 heads on 2 KV heads; rows that belong to no sequence are NaN."""
    batch = latent_batch(LENGTHS, 1, "plain")
    pages = batch.pop("kv_cache")[..., :128].reshape(-1, 16, 4, 32).to(dtype)
    return batch | {"q": batch["q"][:, 0, : 6 * 32].reshape(-1, 6, 32).to(dtype), "kv_pages": pages}


def by_name(kind: str) -> Any:
    """An attention function and its arguments, for the sequences in `LENGTHS`."""
    if kind == "paged":
        return ragged_paged_attention, paged_batch()
    return ragged_mla_attention, latent_batch(LENGTHS, 3, kind)


@pytest.mark.parametrize("kind", ["paged", "plain", "fp8_v32"])
@pytest.mark.parametrize("mask", ["prefix", "spans", "few", "many", "any"])
def test_no_division_of_what_ranges_show_changes_the_results(kind: str, mask: str) -> None:
    """The number of threads changes no bit. Blocks and splits change only the rounding."""
    function, batch = by_name(kind)
    batch |= {"key_ranges": ranges(mask), "return_lse": True}

    def ours(**tile: int) -> Any:
        return function(**batch, backend="numba", options=tile)

    expected = with_threads(1, ours)
    assert all(torch.equal(*pair) for pair in zip(expected, with_threads(3, ours), strict=True))
    reference = function(**batch, backend="reference")
    block, parts = ("block_q", "segment_kv") if kind == "paged" else ("block_rows", "num_splits")
    for tile in ({}, {block: 1, "block_kv": 8}, {block: 5, parts: 4}, {block: 128, parts: 64}):
        assert all(agrees(*pair, "float32") for pair in zip(ours(**tile), reference, strict=True)), tile


@pytest.mark.parametrize("kind", ["paged", "plain"])
@pytest.mark.parametrize("window", [None, 1, 50])
def test_a_mask_has_the_same_bits_by_ranges(kind: str, window: int | None) -> None:
    """A causal mask or window as key ranges has the same work division and bits as the mask given by its arguments."""
    function, batch = by_name(kind)
    tables = batch["cu_q_lens"], batch["kv_lens"], len(batch["q"])
    ranged = function(**batch, key_ranges=causal_ranges(*tables, sliding_window=window), return_lse=True)
    named = function(**batch, sliding_window=window, return_lse=True)
    assert all(torch.equal(*pair) for pair in zip(ranged, named, strict=True))


def test_gradients_have_the_same_bits_by_ranges() -> None:
    edges, keys = torch.tensor([0, 33, 103]).int(), torch.tensor([0, 70, 470]).int()
    generator = torch.Generator().manual_seed(0)
    shapes = ((103, 6, 32), (470, 2, 32), (470, 2, 32))
    q, k, v = (torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)

    def gradients(**mask: Any) -> Any:
        out = varlen_attention(q, k, v, edges, keys, backend="numba", **mask)
        return torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    for window in (None, 50):
        named = gradients(causal=True, sliding_window=window)
        ranged = gradients(key_ranges=causal_ranges(edges, keys.diff(), 103, sliding_window=window))
        assert all(torch.equal(*pair) for pair in zip(named, ranged, strict=True))


def test_a_sequence_of_latents_that_ranges_show_has_the_same_bits_alone_and_in_a_batch() -> None:
    batch = latent_batch(LENGTHS, 16, "plain", torch.bfloat16) | {"key_ranges": ranges("prefix")}
    with ra.use_backend("numba", batch_invariant=True):
        together = ragged_mla_attention(**batch)
        for seq, (first, stop) in enumerate(itertools.pairwise(batch["cu_q_lens"].tolist())):
            alone = batch | {name: batch[name][seq : seq + 1] for name in ("kv_lens", "page_indices")}
            alone |= {name: batch[name][first:stop] for name in ("q", "key_ranges")}
            alone |= {"cu_q_lens": torch.tensor([0, stop - first]).int()}
            assert torch.equal(ragged_mla_attention(**alone), together[first:stop])


# ---- lists of blocks


def lists_of_blocks(size: int, length: int = 9, seed: int = 0) -> Any:
    """Block lists for the sequences in `LENGTHS` and two KV heads, with duplicates and unused entries."""
    kinds, tokens = Selection(kind="own", size=size, length=length), sum(queries for queries, _ in LENGTHS)
    return torch.from_numpy(lists_of(np.random.default_rng(seed), LENGTHS, tokens, 2, kinds))


def grouped_batch(group: int, dtype: Any = torch.float32) -> dict[str, Any]:
    """`paged_batch` with `group` query heads on each of its two KV heads."""
    batch = paged_batch(dtype)
    generator = torch.Generator().manual_seed(group)
    return batch | {"q": torch.randn(len(batch["q"]), 2 * group, 32, generator=generator).to(dtype)}


@pytest.mark.parametrize("group", [1, 3, 4, 20])
@pytest.mark.parametrize("size", [1, 8, 128])
def test_no_division_of_what_lists_name_changes_the_results(group: int, size: int) -> None:
    """The number of threads changes no bit. Blocks and splits change only the rounding."""
    lists: dict[str, Any] = {"selected": lists_of_blocks(size, 40), "block_size": size, "sliding_window": 3000}
    batch: dict[str, Any] = grouped_batch(group) | lists | {"return_lse": True}

    def ours(**tile: int) -> Any:
        return ragged_paged_attention(**batch, backend="numba", options=tile)

    expected = with_threads(1, ours)
    assert all(torch.equal(*pair) for pair in zip(expected, with_threads(3, ours), strict=True))
    reference = ragged_paged_attention(**batch, backend="reference")
    for tile in ({}, {"block_q": 1, "block_kv": 8}, {"block_q": 5, "segment_kv": 40}, {"block_kv": 1024}):
        assert all(agrees(*pair, "float32") for pair in zip(ours(**tile), reference, strict=True)), tile


def packed_gradients(lists: Any, size: int, group: int = 3, nan: Any = None, **mask: Any) -> tuple[Any, ...]:
    """The result and the gradients of packed attention over `LENGTHS`; the keys and values at `nan` are NaN."""
    edges, keys = (torch.tensor([0, *lens]).cumsum(0).int() for lens in zip(*LENGTHS, strict=True))
    generator = torch.Generator().manual_seed(0)
    shapes = ((int(edges[-1]), 2 * group, 32), (int(keys[-1]), 2, 32), (int(keys[-1]), 2, 24))
    arrays = [torch.randn(shape, generator=generator) for shape in shapes]
    for array in arrays[1:] if nan is not None else ():
        array[nan] = torch.nan
    given: dict[str, Any] = {"causal": True, "backend": "numba"} | mask
    q, k, v = leaves = [array.requires_grad_() for array in arrays]
    out, lse = varlen_attention(q, k, v, edges, keys, selected=lists, block_size=size, return_lse=True, **given)
    towards = torch.randn(out.shape, generator=generator), torch.randn(lse.shape, generator=generator)
    loss = (out * towards[0]).sum() + (torch.where(lse == -torch.inf, 0.0, lse) * towards[1]).sum()
    return out, *torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("size", [1, 16, 256])
def test_gradients_through_lists_are_the_definition_on_any_number_of_threads(group: int, size: int) -> None:
    masks: tuple[dict[str, Any], ...] = ({}, {"key_ranges": ranges("spans"), "causal": False}, {"sliding_window": 50})
    for mask in masks:
        call = functools.partial(packed_gradients, lists_of_blocks(size), size, group, **mask)
        found = with_threads(1, call)
        assert all(torch.equal(*pair) for pair in zip(found, with_threads(3, call), strict=True))
        expected = packed_gradients(lists_of_blocks(size), size, group, **(mask | {"backend": "reference"}))
        for ours, definition in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, definition, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("size", [1, 16])
def test_the_order_of_a_list_and_doubles_in_it_change_no_bit(size: int) -> None:
    lists = lists_of_blocks(size)
    changed = torch.cat([lists, lists[..., 3:5], torch.full_like(lists[..., :2], -1)], -1).flip(-1).contiguous()
    for group in (3, 4):
        batch = grouped_batch(group, torch.bfloat16)
        one, other = (
            ragged_paged_attention(**batch, selected=each, block_size=size, backend="numba", options={"segment_kv": 64})
            for each in (lists, changed)
        )
        assert torch.equal(one, other)
    for one, other in zip(packed_gradients(lists, size), packed_gradients(changed, size), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("size", [1, 4])
def test_a_key_reaches_only_the_queries_whose_lists_name_it(dtype: Any, group: int, size: int) -> None:
    """NaN in a key does not change a bit of other queries in the same tile, whose lists do not name the key."""
    lists, (queries, keys), first = lists_of_blocks(size, 5), LENGTHS[1], LENGTHS[0][0]
    named = 40 // size  # a block that half of the second sequence's queries list
    lists[lists == named] = -1
    lists[first : first + queries, :, 3] = 0  # all queries list block 0, which does not change
    lists[first : first + queries : 2, :, 2] = named
    names = (lists == named).any(2).repeat_interleave(group, 1)
    names[:first], names[first + queries :] = False, False
    batch = grouped_batch(group, dtype)
    position = range(named * size, (named + 1) * size)
    spoiled = batch["kv_pages"].clone()
    for key in position:
        spoiled[batch["page_indices"][1, key // 16], key % 16] = torch.nan
    attend = functools.partial(ragged_paged_attention, selected=lists, block_size=size, backend="numba")
    clean, found = attend(**batch), attend(**batch | {"kv_pages": spoiled})
    sees = names & (keys - queries + torch.arange(len(lists)) - first >= named * size)[:, None]
    assert torch.equal(clean[~sees], found[~sees])
    assert found[sees].isnan().all()
    own = [LENGTHS[0][1] + key for key in position]
    clean, found = (packed_gradients(lists, size, group, nan)[1] for nan in (None, own))
    assert torch.equal(clean[~sees], found[~sees])
    assert found[sees].isnan().all()


def test_lists_of_a_long_sequence_are_marked_in_several_tables() -> None:
    """Lists of 11 single keys among 20000 give right results in a decode, a chunk and a gradient."""
    generator = torch.Generator().manual_seed(0)
    queries, keys = 7, 20_000
    q, k, v = (torch.randn(n, heads, 16, generator=generator) for n, heads in ((queries, 4), (keys, 2), (keys, 2)))
    lists = torch.randint(-1, keys, (queries, 2, 11), generator=generator).int()
    edges, lens = torch.tensor([0, queries]).int(), torch.tensor([0, keys]).int()
    found = {}
    for backend in ("numba", "reference"):
        given: dict[str, Any] = {"causal": True, "selected": lists, "block_size": 1, "backend": backend}
        leaves = [array.clone().requires_grad_() for array in (q, k, v)]
        out = varlen_attention(leaves[0], leaves[1], leaves[2], edges, lens, **given)
        pages = torch.stack([k, v], 2).view(-1, 16, 4, 16)
        table, edge = torch.arange(len(pages)).int()[None], torch.tensor([0, 1]).int()
        decoded = ragged_paged_attention(q[-1:], pages, lens[1:], table, edge, **given | {"selected": lists[-1:]})
        found[backend] = [out, decoded, *torch.autograd.grad(out.square().sum(), leaves)]
    for ours, expected in zip(*found.values(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


# ---- the indexer


def index_batch(lens: list[tuple[int, int]], heads: int = 3, head_dim: int = 64) -> dict[str, Any]:
    """Sequences with the (queries, keys) in `lens`, in byte pages of 16 keys; their logits have many ties."""
    generator = torch.Generator().manual_seed(0)
    pages, tokens = max(keys for _, keys in lens) // 16 + 1, sum(queries for queries, _ in lens)
    cache = torch.zeros(len(lens) * pages, 16, 1, head_dim + 4, dtype=torch.uint8)
    keys = torch.randint(-2, 3, (len(lens) * pages * 16, head_dim), generator=generator).bfloat16()
    write_indexer_cache(keys, cache, torch.arange(len(keys)), True, backend="numba")
    return {
        "q": torch.randint(-2, 3, (tokens, heads, head_dim), generator=generator).bfloat16(),
        "keys": cache,
        "weights": torch.randint(1, 3, (tokens, heads), generator=generator).float(),
        "page_indices": torch.randperm(len(cache), generator=generator).view(len(lens), pages).int(),
        "kv_lens": torch.tensor([keys for _, keys in lens]).int(),
        "cu_q_lens": torch.tensor([0, *(queries for queries, _ in lens)]).cumsum(0).int(),
    }


def test_no_division_of_the_keys_changes_a_logit_or_a_choice() -> None:
    """The numbers of threads and blocks change neither logits nor selections.

    Several programs share the long sequence. The program that ends last selects.
    """
    batch = index_batch([(1, 17)] * 6 + [(3, 9000), (40, 700)])
    expected = indexer_logits(**batch, backend="numba")
    chosen = top_k_indices(expected, 100, backend="reference")

    def both(tile: dict[str, int]) -> Any:
        options: dict[str, Any] = {"backend": "numba", "options": tile}
        return indexer_logits(**batch, **options), indexer_topk(**batch, top_k=100, **options)

    for threads, tile in ((1, {}), (3, {}), (2, {"block_q": 1, "block_kv": 8}), (2, {"block_q": 64, "block_kv": 160})):
        logits, positions = with_threads(threads, functools.partial(both, tile))
        assert torch.equal(logits, expected)
        assert torch.equal(positions, chosen)


def test_rows_of_logits_that_are_too_long_to_lie_side_by_side_are_chosen_from_one_by_one() -> None:
    batch = index_batch([(3, 150_000), (9, 40_000)], heads=1, head_dim=16)
    chosen = top_k_indices(indexer_logits(**batch, backend="numba"), 3000, backend="reference")
    assert torch.equal(indexer_topk(**batch, top_k=3000, backend="numba"), chosen)


def test_candidates_of_a_long_sequence_are_divided_too() -> None:
    batch = index_batch([(2, 9000), (1, 30)])
    blocks = torch.stack([torch.randperm(600)[:500] for _ in range(3)]).int()
    logits = indexer_logits(**batch, backend="numba")
    listed = (blocks[:, :, None] == torch.arange(logits.shape[1]) // 16).any(1)
    chosen = top_k_indices(logits.where(listed, -torch.inf), 700, backend="reference")
    options = {"candidate_blocks": blocks, "candidate_block_size": 16}
    assert torch.equal(indexer_topk(**batch, top_k=700, **options, backend="numba"), chosen)


# ---- scale pages


def test_scales_lie_where_their_strides_say() -> None:
    """Scales may follow each head's row, with rows more than 2 ** 31 elements apart, or have axes in any order."""
    pages, size, heads, width, far = 3, 4, 2, 32, 2**30 + 64
    memory = torch.empty(far * 2 + size * heads * (width + 4), dtype=torch.uint8)  # mostly untouched
    rows = memory.as_strided((pages, size, heads, width + 4), (far, heads * (width + 4), width + 4, 1))
    scales = memory.view(torch.float32)[width // 4 :].as_strided(
        (pages, size, heads, 1), (far // 4, heads * (width + 4) // 4, (width + 4) // 4, 1)
    )
    transposed = torch.zeros(2, heads, size, pages, dtype=torch.float16).permute(3, 2, 1, 0)
    values = torch.zeros(pages, size, heads, width // 2, dtype=torch.uint8)
    torch.manual_seed(0)
    k, v = torch.randn(2, pages * size, heads, width)
    near = {
        "kv_pages": (torch.zeros(pages, size, heads, width, dtype=torch.int8), torch.zeros_like(values)),
        "k_scale_pages": torch.zeros(pages, size, heads, 1),
        "v_scale_pages": torch.zeros(pages, size, heads, 2, dtype=torch.float16),
    }
    far_apart = {
        "kv_pages": (rows[..., :width].view(torch.int8), values), "k_scale_pages": scales, "v_scale_pages": transposed,
    }  # fmt: skip
    q, table = torch.randn(1, 4, width), torch.tensor([[2, 0, 1]]).int()
    lens, edges = torch.tensor([11]).int(), torch.tensor([0, 1]).int()
    outs = []
    for cache in (near, far_apart):
        write_kv_pages(k, v, slot_mapping=torch.arange(pages * size), **cache, backend="numba")
        outs.append(ragged_paged_attention(q, kv_lens=lens, page_indices=table, cu_q_lens=edges, **cache))
    assert torch.equal(*outs)
    assert torch.equal(near["k_scale_pages"], scales)
    assert torch.equal(near["v_scale_pages"], transposed)
