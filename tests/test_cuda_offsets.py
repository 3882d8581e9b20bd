"""With arrays of more than 2^31 elements, no product of an index and a stride is computed in 32 bits.

Nothing is computed at that size. The entries of operands lie far apart in memory that is mapped but mostly untouched,
and must give the same bits as packed operands. If a grid has too many results, only its last thread blocks run.
"""

import ctypes
import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ragged_attention.kernels_cuda import _abi, _native
from ragged_attention.testing import cuda_emulator

if reason := cuda_emulator.missing():
    pytest.skip(f"the emulation cannot be built: {reason}", allow_module_level=True)

NO_RESERVE = 0x4000  # MAP_NORESERVE, which `mmap` lacks before Python 3.13
FAR = 2**31 + 64  # a stride in elements that exceeds 32 bits
EVERY_BLOCK = 2**63 - 1


@pytest.fixture(scope="module")
def emulation() -> Iterator[ctypes.CDLL]:
    library = _native.emulation()
    library.ra_emulate_last.argtypes, library.ra_emulate_last.restype = (ctypes.c_int64,), None
    yield library
    library.ra_emulate_last(EVERY_BLOCK)


def mapped(count: int, dtype: Any) -> np.ndarray:
    """`count` zeros in mapped memory, of which only touched pages take memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    return np.frombuffer(mmap.mmap(-1, count * np.dtype(dtype).itemsize, flags=flags), dtype)


def laid(array: np.ndarray, strides: tuple[int, ...]) -> np.ndarray:
    """A copy of `array` with these strides, in elements."""
    count = 1 + sum((size - 1) * stride for size, stride in zip(array.shape, strides, strict=True))
    memory = mapped(count, array.dtype)
    found = np.lib.stride_tricks.as_strided(memory, array.shape, [stride * array.itemsize for stride in strides])
    found[...] = array
    return found


def steps(array: np.ndarray) -> list[int]:
    return [stride // array.itemsize for stride in array.strides]


def attend(library: ctypes.CDLL, name: str, given: dict[str, np.ndarray], **numbers: int) -> list[np.ndarray]:
    """Out and lse of a call that uses the arrays' strides, with one part for each sequence."""
    q, kv, lists, lens = (given[name] for name in ("q", "kv", "lists", "lens"))
    num_seqs, num_q_tokens, num_q_heads, d_qk = q.shape
    out = np.zeros((num_seqs, num_q_tokens, num_q_heads, 512), np.uint16)
    lse = np.zeros((num_seqs, num_q_heads, num_q_tokens), np.float32)
    sparse = lists.ndim == 4
    list_steps, lens_steps = steps(lists), steps(lens)
    record = _abi.Latent(
        num_seqs=num_seqs, num_q_tokens=num_q_tokens, num_q_heads=num_q_heads, num_kv_heads=kv.shape[2], d_qk=d_qk,
        dtype=0, format=kv.dtype == np.uint8, sparse=sparse, causal=0, num_pages=kv.shape[0], page_size=kv.shape[1],
        list_seq_stride=list_steps[0], list_token_stride=list_steps[1] if sparse else 0,
        list_head_stride=list_steps[2] if sparse else 0, list_length=lists.shape[-1], lens_seq_stride=lens_steps[0],
        lens_token_stride=lens_steps[1] if sparse else 0, num_parts=num_seqs, num_splits=1, sm_scale=0.1,
        **dict(zip(("q_seq_stride", "q_token_stride", "q_head_stride"), steps(q)[:3], strict=True)),
        **dict(zip(("page_stride", "slot_stride", "head_stride"), steps(kv)[:3], strict=True)),
    )  # fmt: skip
    for field, array in {**given, "out": out, "lse": lse}.items():
        setattr(record, field, array.ctypes.data)
    for field, value in numbers.items():
        setattr(record, field, value)
    code = getattr(library, name)(ctypes.byref(record), None)
    assert code == 0, library.ra_error_string(code)
    return [out, lse]


def bits(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Random bfloat16 numbers as uint16."""
    return (rng.standard_normal(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def floats(bfloats: np.ndarray) -> np.ndarray:
    return (bfloats.astype(np.uint32) << 16).view(np.float32)


def rows_fp8(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Random rows of an `fp8_v32` cache."""
    rows = rng.integers(0, 120, (*shape, 656), np.uint8)
    rows[..., 512:528] = rng.uniform(0.5, 2, (*shape, 4)).astype(np.float32).view(np.uint8)
    rows[..., 528:] = bits(rng, *shape, 64).view(np.uint8)
    return rows


def dense(page_size: int) -> tuple[str, dict[str, np.ndarray]]:
    rng = np.random.default_rng(page_size)
    pages = 3
    table = np.array([[2, 0, 1], [1, 2, 0]], np.int32)
    given = {
        "q": bits(rng, 2, 2, 4, 576), "kv": bits(rng, pages, page_size, 2, 576), "lists": table,
        "lens": np.array([page_size * 3, page_size * 2 - 1], np.int32),
    }  # fmt: skip
    return "ra_mla_decode_dense", given


def sparse(fp8: bool) -> tuple[str, dict[str, np.ndarray]]:
    rng = np.random.default_rng(int(fp8))
    heads, page_size = (1 if fp8 else 2), 3
    given = {
        "q": bits(rng, 2, 2, 4, 576),
        "kv": rows_fp8(rng, 3, page_size, heads) if fp8 else bits(rng, 3, page_size, heads, 576),
        "lists": rng.integers(0, 9, (2, 2, heads, 8), np.int32), "lens": np.array([[8, 5], [0, 7]], np.int32),
    }  # fmt: skip
    return ("ra_mla_decode_sparse_fp8" if fp8 else "ra_sparse_mla_prefill"), given


def narrow() -> tuple[str, dict[str, np.ndarray]]:
    return "ra_mla_decode_sparse_fp8_narrow", sparse(True)[1]


CASES: dict[str, tuple[Any, dict[str, tuple[int, ...]]]] = {
    "q": (dense(2), {"q": (4 * FAR, 2 * FAR, FAR // 2, 1)}),
    "table and lengths": (dense(2), {"lists": (FAR, 1), "lens": (FAR,)}),
    "kv, gathered": (dense(2), {"kv": (FAR, FAR // 2, 3 * FAR, 1)}),
    "kv by TMA": (dense(64), {"kv": (FAR, 2 * 576, 3 * FAR, 1)}),
    "kv of lists": (sparse(False), {"kv": (FAR, FAR // 4, 3 * FAR, 1)}),
    "slots of lists": (sparse(False), {"kv": (3 * FAR, FAR, 576, 1)}),
    "slots of lists in pages of one": (sparse(False), {"kv": (3 * FAR // 2, FAR // 2, 576, 1)}),
    "lists and their lengths": (sparse(False), {"lists": (4 * FAR, 2 * FAR, FAR, 1), "lens": (2 * FAR, FAR)}),
    "rows of bytes": (sparse(True), {"kv": (3 * FAR, FAR, 656, 1)}),
    "rows of bytes, few heads": (narrow(), {"kv": (3 * FAR, FAR, 656, 1)}),
    "q beside bytes, few heads": (narrow(), {"q": (4 * FAR, 2 * FAR, FAR // 2, 1)}),
    "q beside bytes": (sparse(True), {"q": (4 * FAR, 2 * FAR, FAR // 2, 1)}),
}


@pytest.mark.parametrize("case", CASES)
def test_operands_that_lie_far_apart(emulation: ctypes.CDLL, case: str) -> None:
    (name, given), far = CASES[case]
    want = attend(emulation, name, given)
    got = attend(emulation, name, given | {array: laid(given[array], strides) for array, strides in far.items()})
    assert (want[0] != 0).any()
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("splits", [1, 2])
def test_results_that_lie_far_apart(emulation: ctypes.CDLL, splits: int) -> None:
    """The last two of 2^22 + 2 sequences, which all read the same operands, have the right results."""
    name, given = dense(64)
    given = {
        "q": given["q"][:1, :1, :1],
        "kv": given["kv"][:, :, :1],
        "lists": given["lists"][:1],
        "lens": given["lens"][:1],
    }
    want = [array.ravel() for array in attend(emulation, name, given)]
    count = 2**22 + 2
    out, lse = mapped(count * 512, np.uint16), mapped(count, np.float32)
    partial_out, partial_lse = mapped(2 * count * 512, np.float32), mapped(2 * count, np.float32)
    emulation.ra_emulate_last(2 * splits)
    try:
        attend(
            emulation, name, given, num_seqs=count, q_seq_stride=0, list_seq_stride=0, lens_seq_stride=0,
            num_splits=splits, num_parts=splits * count, num_partials=splits * count, out=out.ctypes.data,
            lse=lse.ctypes.data, partial_out=partial_out.ctypes.data, partial_lse=partial_lse.ctypes.data,
        )  # fmt: skip
    finally:
        emulation.ra_emulate_last(EVERY_BLOCK)
    for sequence in (count - 2, count - 1):
        got = floats(out[512 * sequence :][:512])
        np.testing.assert_allclose(got, floats(want[0]), rtol=2.01 / 128, atol=8e-4)
        np.testing.assert_allclose(lse[sequence], want[1][0], rtol=1e-5)


@pytest.mark.parametrize(
    "numbers",
    [
        {"num_pages": 2**32}, {"num_seqs": 2**31}, {"num_q_heads": 2**40}, {"list_length": 2**31}, {"page_size": 2**33},
        {"page_size": 0}, {"num_kv_heads": 0}, {"num_splits": 2**20}, {"num_parts": 1}, {"num_q_tokens": -1},
        {"num_q_tokens": 2**16, "num_q_heads": 2**16}, {"parts": 4096, "num_parts": 2**30},
    ],
    ids=str,
)  # fmt: skip
def test_sizes_of_more_than_32_bits_are_refused(emulation: ctypes.CDLL, numbers: dict[str, int]) -> None:
    name, given = dense(64)
    with pytest.raises(AssertionError, match="no kernel was compiled for these arguments"):
        attend(emulation, name, given, **numbers)


@pytest.mark.parametrize("numbers", [{"num_parts": 2**31}, {"num_seqs": 2**31}, {"overhead": 2**31}, {"overhead": -1}])
def test_schedules_of_more_than_32_bits_are_refused(emulation: ctypes.CDLL, numbers: dict[str, int]) -> None:
    record = _abi.Schedule(**{"num_seqs": 1, "num_parts": 1, "overhead": 5} | numbers)
    assert emulation.ra_make_decode_schedule(ctypes.byref(record), None) == _abi.NO_KERNEL
