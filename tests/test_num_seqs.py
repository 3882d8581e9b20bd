"""Sequences past the array `num_seqs` do not exist: none of their values in the index arrays changes a result.

A case is a backend, `num_seqs`, the number S of sequences in the arrays, and the values after the last live sequence:
zeros, as many schedulers pad, or garbage. The expected result is computed from the live sequences alone.
"""

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from ragged_attention import dispatch
from ragged_attention.reference.ragged_paged_attention import ragged_paged_attention as definition
from ragged_attention.testing import tpu_interpreter

PAGE_SIZE, PAGES_PER_SEQ, HEADS, DIM = 4, 3, 2, 16
# Counts below 0 mean 0, and counts above S mean S.
COUNTS = [(count, size) for size in (1, 3, 16) for count in sorted({-7, 0, 1, size // 2, size - 1, size, size + 3})]
FEW = [(0, 16), (1, 16), (10, 16)]  # for backends whose calls are slow
INT32 = np.iinfo(np.int32)
TAILS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], NDArray[Any]]] = {
    "zeros": lambda rng, shape: np.zeros(shape),
    "garbage": lambda rng, shape: rng.choice([INT32.min, -1, 0, 1, 2, 7, 11, INT32.max], shape),
}


class Batch(NamedTuple):
    """The arrays of a call with S sequences, and `num_seqs`. Tokens of sequences that are not live are padding."""

    q: NDArray[Any]
    new: tuple[NDArray[Any], NDArray[Any]]
    kv_pages: NDArray[Any]
    kv_lens: NDArray[Any]
    page_indices: NDArray[Any]
    cu_q_lens: NDArray[Any]
    num_seqs: int

    @property
    def live(self) -> int:
        return min(max(self.num_seqs, 0), len(self.kv_lens))


def batch_of(count: int, size: int, tail: str) -> Batch:
    """A batch of `size` sequences with `num_seqs=count`. Equal shapes let all counts share one compiled program."""
    rng = np.random.default_rng(size)
    tokens, num_pages, live = 3 * size + 2, PAGES_PER_SEQ * size, min(max(count, 0), size)
    q_lens = np.arange(size) * 2 % 4 + 1 - (np.arange(size) % 5 == 4)  # 1, 3, 1, 3, 0, 3, 1, ...
    kv_lens = q_lens + rng.integers(0, 6, size)
    tables = {
        "kv_lens": kv_lens,
        "page_indices": rng.permutation(num_pages).reshape(size, PAGES_PER_SEQ),
        "cu_q_lens": np.concatenate([[0], np.cumsum(q_lens)]),
    }
    for name, table in tables.items():
        first = live + (name == "cu_q_lens")
        table[first:] = TAILS[tail](rng, table[first:].shape)
    shape = (num_pages, PAGE_SIZE, 2, DIM)
    q, pages = (rng.standard_normal(shape).astype(np.float32) for shape in ((tokens, HEADS, DIM), shape))
    k, v = rng.standard_normal((2, tokens, 1, DIM)).astype(np.float32)
    return Batch(q, (k, v), pages, **{name: table.astype(np.int32) for name, table in tables.items()}, num_seqs=count)


def expected_pages(batch: Batch) -> NDArray[Any]:
    """The expected pages: those of the batch, with the new tokens of the live sequences written one by one."""
    pages = batch.kv_pages.copy()
    for seq in range(batch.live):
        start, stop = batch.cu_q_lens[seq : seq + 2]
        for token in range(start, stop):
            position = batch.kv_lens[seq] - (stop - token)
            page = batch.page_indices[seq, position // PAGE_SIZE]
            pages[page, position % PAGE_SIZE] = np.concatenate([new[token] for new in batch.new])
    return pages


def expected_results(batch: Batch, kv_pages: Any) -> list[NDArray[Any]]:
    """The expected out and lse, computed from tables that hold only the live sequences."""
    live = batch.live
    return definition(
        batch.q, kv_pages, batch.kv_lens[:live], batch.page_indices[:live], batch.cu_q_lens[: live + 1], return_lse=True
    )


class Backend(NamedTuple):
    """A backend, the front end through which it is called, and the context `around` each call."""

    framework: str
    name: str
    around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    options: dict[str, Any] | None = None
    counts: list[tuple[int, int]] = COUNTS

    def call(self, operation: str, *arrays: Any, **others: Any) -> list[NDArray[Any]]:
        """The operation's results as NumPy arrays, for NumPy arrays."""
        function = getattr(importlib.import_module(f"ragged_attention.{self.framework}"), operation)
        given = [self._bring(array) for array in arrays]
        others = {name: self._bring(value) for name, value in others.items()}
        with self.around():
            results = function(*given, **others, backend=self.name)
            results = results if isinstance(results, tuple) else (results,)
            return [np.asarray(result) for result in results]

    def _bring(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(self._bring, value))
        if not isinstance(value, np.ndarray):
            return value
        if self.framework == "jax":
            return importlib.import_module("jax.numpy").asarray(value)
        return importlib.import_module("torch").from_numpy(value.copy())


def interpreted() -> contextlib.AbstractContextManager[None]:
    return tpu_interpreter.watched("eager")


BACKENDS = {
    "torch-reference": Backend("torch", "reference"),
    "torch-eager": Backend("torch", "eager"),
    "torch-triton": Backend("torch", "triton", counts=FEW),
    "jax-xla": Backend("jax", "xla"),
    "jax-pallas": Backend("jax", "pallas", around=interpreted, counts=FEW),
    "jax-pallas, fused": Backend(
        "jax", "pallas", around=interpreted, options={"fused_update": True}, counts=FEW
    ),
}  # fmt: skip


UNFUSED = [name for name in BACKENDS if "fused" not in name]


def each_case(names: Iterable[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that parametrises a test by backend names and by arguments of `batch_of`."""
    cases = [
        pytest.param(name, (count, size, tail), id=f"{name}-{count} of {size}-{tail}")
        for name in names
        for count, size in BACKENDS[name].counts
        for tail in TAILS
    ]
    mark = pytest.mark.parametrize(("name", "case"), cases)
    return lambda test: pytest.mark.each("name")(mark(test))


@pytest.fixture
def backend(name: str) -> Backend:
    found = BACKENDS[name]
    for needed in (found.framework, *(["triton"] if found.name == "triton" else [])):
        pytest.importorskip(needed)
    return found


@pytest.fixture
def batch(case: tuple[int, int, str]) -> Batch:
    return batch_of(*case)


def close(results: list[NDArray[Any]], expected: list[NDArray[Any]]) -> None:
    for result, want in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, want, rtol=2e-5, atol=2e-5)


def tables_of(batch: Batch) -> dict[str, NDArray[Any]]:
    return {
        "kv_lens": batch.kv_lens,
        "page_indices": batch.page_indices,
        "cu_q_lens": batch.cu_q_lens,
        "num_seqs": np.array([batch.num_seqs], np.int32),
    }


@each_case(UNFUSED)
def test_attention_is_that_of_the_live_sequences(backend: Backend, batch: Batch) -> None:
    found = backend.call("ragged_paged_attention", batch.q, batch.kv_pages, **tables_of(batch), return_lse=True)
    close(found, expected_results(batch, batch.kv_pages))


@each_case(UNFUSED)
def test_the_tokens_of_the_live_sequences_are_written(backend: Backend, batch: Batch) -> None:
    found = backend.call("write_kv_pages", *batch.new, batch.kv_pages, **tables_of(batch))
    close(found, [expected_pages(batch)])


@each_case(UNFUSED)
def test_attention_over_latents_is_that_of_the_live_sequences(backend: Backend, batch: Batch) -> None:
    """Results are right before and after this step's rows are written. The cache is made of the K pages alone."""
    steps: list[tuple[Any, dict[str, Any]]] = [(batch.kv_pages, {})]
    if dispatch.backends_offering("write_mla_cache", backend.name):
        steps.append((expected_pages(batch), {"new_kv": batch.new[0]}))
    for pages, more in steps:
        found = backend.call(
            "ragged_mla_attention", batch.q, np.ascontiguousarray(batch.kv_pages[:, :, :1]), **tables_of(batch),
            d_v=DIM, return_lse=True, **more,
        )  # fmt: skip
        cache = pages[:, :, :1]
        close(found, [*expected_results(batch, (cache, cache)), *([cache] if more else [])])


@each_case(BACKENDS)
def test_an_update_writes_those_and_attends_to_them(backend: Backend, batch: Batch) -> None:
    found = backend.call(
        "ragged_paged_attention", batch.q, batch.kv_pages, **tables_of(batch), return_lse=True, new_kv=batch.new,
        options=backend.options,
    )  # fmt: skip
    pages = expected_pages(batch)
    close(found, [*expected_results(batch, pages), pages])
