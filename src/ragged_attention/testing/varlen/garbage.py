"""Calls over packed sequences, and gradients, with arbitrary int32 values in prefix sums, lists and lengths."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ragged_attention.testing.integers import garbage
from ragged_attention.testing.mla.specs import PrefillSpec
from ragged_attention.testing.runner import Runner
from ragged_attention.testing.selected import garbage_lists
from ragged_attention.testing.varlen.gradients import GradientBatch, GradientSpec
from ragged_attention.testing.varlen.specs import VarlenBatch, VarlenSpec

DTYPES = ("float32", "bfloat16", "float16")


def garbage_varlen(seed: int) -> GradientBatch:
    """Packed sequences with arbitrary int32 values in one or both prefix sums."""
    rng = np.random.default_rng(seed)
    lens = tuple((int(rng.integers(0, 12)), int(rng.integers(0, 30))) for _ in range(rng.integers(1, 4)))
    spec = VarlenSpec(
        lens=lens,
        kv_heads=int(rng.choice([1, 2])),
        group=int(rng.choice([1, 3])),
        d=int(rng.choice([16, 24, 7])),
        d_v=int(rng.choice([16, 9])),
        dtype=str(rng.choice(DTYPES)),
        q_padding=int(rng.integers(0, 3)),
        kv_padding=int(rng.integers(0, 3)),
        limits=[None, "exact"][int(rng.integers(0, 2))],
        causal=bool(rng.random() < 0.6),
        sliding_window=[None, None, 1, 5][int(rng.integers(0, 4))],
        sinks=[None, "normal"][int(rng.integers(0, 2))],
        alibi=[None, None, "usual"][int(rng.integers(0, 3))],
        bias=[None, None, "shared", "own"][int(rng.integers(0, 4))],
        ranges=[None, None, "any", "many"][int(rng.integers(0, 4))],
        selection=garbage_lists(rng),
        strided=bool(rng.random() < 0.3),
        seed=seed,
    )
    batch = GradientSpec(of=spec, d_lse=bool(rng.random() < 0.5)).build()
    forward: Any = batch.forward
    wild = {
        "cu_q_lens": garbage(rng, forward.cu_q_lens.shape, len(forward.q)),
        "cu_kv_lens": garbage(rng, forward.cu_kv_lens.shape, len(forward.k)),
    }
    if rng.random() < 0.3:
        wild = {name: np.sort(edges) for name, edges in wild.items()}
    if rng.random() < 0.4:
        del wild[str(rng.choice(list(wild)))]
    return batch.change(**wild)


def garbage_sparse(seed: int) -> GradientBatch:
    """A gradient of sparse prefill with arbitrary int32 values in its lists and lengths."""
    rng = np.random.default_rng(seed)
    spec = PrefillSpec(
        heads=int(rng.choice([1, 3, 17])),
        d_qk=int(rng.choice([48, 80])),
        d_v=int(rng.choice([16, 48])),
        dtype=str(rng.choice(DTYPES)),
        topk=int(rng.choice([1, 5, 20])),
        rows=int(rng.choice([0, 1, 9])),
        page_size=[None, 1, 3][int(rng.integers(0, 3))],
        lens=[None, "wild"][int(rng.integers(0, 2))],
        sinks=[None, "normal"][int(rng.integers(0, 2))],
        deterministic=bool(rng.random() < 0.5),
        strided=bool(rng.random() < 0.3),
        seed=seed,
    )
    batch = GradientSpec(of=spec, d_lse=bool(rng.random() < 0.5)).build()
    forward: Any = batch.forward
    return batch.change(indices=garbage(rng, forward.indices.shape, forward.selection.num_slots))


def ascends(batch: VarlenBatch) -> bool:
    """Whether both prefix sums ascend. If not, it is undefined which rows belong to which sequence."""
    return all(bool((np.diff(edges.astype(np.int64)) >= 0).all()) for edges in (batch.cu_q_lens, batch.cu_kv_lens))


def _expect_finite(results: Mapping[str, np.ndarray]) -> None:
    for name, array in results.items():
        if not np.isfinite(array).all():
            raise AssertionError(f"expected finite {name} from finite inputs, got others")


def _varlen(runner: Runner, seed: int, options: Mapping[str, Any]) -> None:
    batch: Any = garbage_varlen(seed).forward
    out, lse = runner.run("varlen_attention", batch, options=options, return_lse=True)
    if ascends(batch):
        _expect_finite({"out": out, "lse": np.where(lse == -np.inf, 0.0, lse)})


def _varlen_backward(runner: Runner, seed: int, options: Mapping[str, Any]) -> None:
    batch = garbage_varlen(seed)
    gradients = runner.backward(batch.backward(*batch.results()), options=options)
    if ascends(batch.forward):  # type: ignore[arg-type]
        _expect_finite(gradients)


def _sparse_backward(runner: Runner, seed: int, options: Mapping[str, Any]) -> None:
    batch = garbage_sparse(seed)
    out, lse = batch.results()
    if seed % 3 == 0:  # with a wrong lse, results may be anything, but accesses must stay inside the arrays
        runner.backward(batch.backward(out, np.full_like(lse, -100)), options=options)
    else:
        _expect_finite(runner.backward(batch.backward(out, lse), options=options))


EXAMPLES: tuple[tuple[str, Callable[[Runner, int, Mapping[str, Any]], None]], ...] = (
    ("varlen_attention", _varlen),
    ("varlen_attention_backward", _varlen_backward),
    ("sparse_mla_prefill_backward", _sparse_backward),
)
