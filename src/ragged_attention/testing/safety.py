"""Run every operation with garbage in its index arrays, and with its arrays next to unreadable pages.

This module runs as a separate process, because an access outside an array kills the process.

`python -m ragged_attention.testing.safety --backend triton --framework torch --examples 25`
"""

import argparse
import ctypes
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ragged_attention import dispatch
from ragged_attention.calls import QUANTIZED
from ragged_attention.testing import empties
from ragged_attention.testing.blocks import garbage as blocks_safety
from ragged_attention.testing.drawing import paths, taken_of
from ragged_attention.testing.guarding import guarded, run_module
from ragged_attention.testing.heads_first import suite as heads_first_suite
from ragged_attention.testing.indexer import garbage as indexer_safety
from ragged_attention.testing.integers import INT32, garbage
from ragged_attention.testing.mla import garbage as mla_safety
from ragged_attention.testing.paged import norm_rope
from ragged_attention.testing.paged.specs import Batch, Spec, WriteBatch
from ragged_attention.testing.paged.strategies import merge_batch, write_batch
from ragged_attention.testing.runner import Declined, Runner
from ragged_attention.testing.selected import garbage_lists
from ragged_attention.testing.varlen import garbage as varlen_safety

MODULE = "ragged_attention.testing.safety"
DTYPES = ("float32", "bfloat16", "float16")
CACHES = (None, *QUANTIZED)


def garbage_attention(seed: int) -> Batch:
    """A valid batch whose index arrays are then filled with arbitrary int32 values."""
    rng = np.random.default_rng(seed)
    lens = tuple((int(rng.integers(0, 5)), int(rng.integers(0, 30))) for _ in range(rng.integers(1, 4)))
    batch = Spec(
        lens=lens,
        page_size=int(rng.choice([1, 2, 3, 8])),
        num_kv_heads=int(rng.choice([1, 2])),
        group=int(rng.choice([1, 3])),
        head_dim=int(rng.choice([16, 24, 80])),
        combined=bool(rng.random() < 0.5),
        dtype=str(rng.choice(DTYPES)),
        cache_dtype=CACHES[int(rng.integers(0, len(CACHES)))],
        count=str(rng.choice(["none", "array"])),
        padding=int(rng.integers(0, 3)),
        causal=bool(rng.random() < 0.7),
        sliding_window=[None, None, 1, 5, 2**31 - 1][int(rng.integers(0, 5))],
        sinks=[None, "normal"][int(rng.integers(0, 2))],
        alibi=[None, None, "usual"][int(rng.integers(0, 3))],
        ranges=[None, None, "any", "many"][int(rng.integers(0, 4))],
        selection=garbage_lists(rng),
        strided=bool(rng.random() < 0.3),
        seed=seed,
    ).build()
    return batch.with_any_tables(rng)


def garbage_write(seed: int) -> WriteBatch:
    """The write that would precede `garbage_attention(seed)`, with garbage in its page tables or slots."""
    rng = np.random.default_rng(seed)
    batch = garbage_attention(seed)
    v_head_dim = 16
    spec = Spec(
        lens=((len(batch.q), len(batch.q)),), page_size=batch.page_size, num_kv_heads=batch.num_kv_heads,
        v_head_dim=v_head_dim, combined=False, dtype=batch.dtype, cache_dtype=batch.cache_dtype, seed=seed,
    )  # fmt: skip
    write = write_batch(spec)
    write = write.change(k=np.nan_to_num(write.k), v=np.nan_to_num(write.v), slot_mapping=None)
    if rng.random() < 0.5:
        tables = ("page_indices", "kv_lens", "cu_q_lens", "num_seqs")
        return write.change(**{name: getattr(batch, name) for name in tables})
    slots = garbage(rng, len(batch.q), batch.num_pages * batch.page_size)
    return write.change(slot_mapping=slots.astype(np.int64) << 8 if rng.random() < 0.3 else slots)


def ascends(batch: Batch) -> bool:
    """Whether `cu_q_lens` ascends. If not, it is undefined which rows belong to which sequence."""
    count = len(batch.bounds())
    return bool((np.diff(batch.cu_q_lens[: count + 1].astype(np.int64)) >= 0).all())


def _attention(runner: Runner, seed: int, options: Mapping[str, Any]) -> None:
    batch = garbage_attention(seed)
    out, lse = runner.run("ragged_paged_attention", batch, options=options, return_lse=True)
    if ascends(batch) and (not np.isfinite(out).all() or np.isnan(lse).any()):
        raise AssertionError("expected finite outputs from finite inputs, got others")


def _write(runner: Runner, seed: int, options: Mapping[str, Any]) -> None:
    del options
    runner.run("write_kv_pages", garbage_write(seed))


def _norm_rope(runner: Runner, seed: int, options: Mapping[str, Any]) -> None:
    """Run `norm_rope_write` with garbage in its page tables or slots, and arbitrary positions."""
    del options
    write, rng = garbage_write(seed), np.random.default_rng(seed)
    num_tokens, _, width = write.k.shape
    batch = norm_rope.NormRopeBatch(
        q=write.k, positions=rng.integers(INT32.min, INT32.max, num_tokens, np.int32, endpoint=True),
        cos_sin=rng.random((5, width)).astype(np.float32), **{
            field.name: getattr(write, field.name)
            for field in dataclasses.fields(write)
            if field.init and not field.name.endswith("_scale_pages")
        },
    )  # fmt: skip
    runner.run("norm_rope_write", batch)


def _merge(runner: Runner, seed: int, options: Mapping[str, Any]) -> None:
    del options
    dtype = DTYPES[seed % len(DTYPES)]
    runner.run(
        "merge_attention_states", merge_batch((1 + seed % 3, seed % 4, 3, 16), dtype=dtype, empty=0.3, seed=seed)
    )


EXAMPLES: tuple[tuple[str, Callable[[Runner, int, Mapping[str, Any]], None]], ...] = (
    ("ragged_paged_attention", _attention),
    ("write_kv_pages", _write),
    ("norm_rope_write", _norm_rope),
    ("merge_attention_states", _merge),
)
SLOWER = (
    *mla_safety.EXAMPLES,
    *heads_first_suite.GARBAGE,
    *varlen_safety.EXAMPLES,
    *indexer_safety.EXAMPLES,
    *blocks_safety.EXAMPLES,
)


def check_garbage(runner: Runner, examples: int) -> int:
    """The backend survives garbage in its index arrays.

    This runs in this process if the runner notices accesses outside arrays. Otherwise it runs in a separate process,
    because such an access kills the process.
    """
    if runner.notices_steps_outside:
        return _survives_here(runner, examples)
    ended = run_module(MODULE, [*runner.as_arguments(), "--examples", str(examples)])
    if ended.returncode:
        last = (ended.stdout.strip().splitlines() or ["no example was begun"])[-1]
        outcome = f"exit status {ended.returncode} at: {last}\n{ended.stderr[-3000:]}"
        raise AssertionError(f"expected to survive garbage indices, got {outcome}")
    return examples


def _survives_here(runner: Runner, examples: int) -> int:
    """Run the examples in this process. With up to 12 `examples`, each operation runs only once."""
    every = (*EXAMPLES, *SLOWER)

    def attempts() -> Iterator[Callable[[], None]]:
        for seed in range(examples):
            for operation, example in every if examples > 12 else every[seed::examples]:
                ways = paths(runner, operation)
                yield functools.partial(example, runner, seed, ways[seed % len(ways)])

    with runner.overlapping():
        return taken_of(attempts())


class GuardedModule:
    """Stands in for torch or NumPy in a launcher: `empty`, `array` and `full` allocate guarded memory."""

    def __init__(self, module: Any, side: str) -> None:
        self._module, self._side = module, side

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def empty(self, shape: Sequence[int], *, dtype: Any, device: Any) -> Any:
        """`torch.empty`, guarded and with all bits set (NaN for floats) if it is on the CPU."""
        like = self._module.empty(tuple(shape), dtype=dtype, device=device)
        if like.device.type != "cpu":
            return like
        raw = np.full(like.numel() * like.element_size(), 0xFF, np.uint8)
        flat = self._module.from_numpy(guarded(raw, self._side))
        return flat.view(dtype).view(tuple(shape)) if like.numel() else like

    def array(self, values: Any, dtype: Any = None) -> Any:
        return guarded(np.asarray(values, dtype), self._side)

    def full(self, shape: Sequence[int], value: float, dtype: Any) -> Any:
        return guarded(np.full(shape, value, dtype), self._side)


def guard_the_launcher(framework: str, side: str) -> None:
    """Make this process's launcher and its replays allocate guarded memory from now on."""
    if framework == "torch":
        import torch

        from ragged_attention.torch import _launcher, _replay

        _launcher.torch = _replay.torch = GuardedModule(torch, side)  # type: ignore[assignment]
    else:
        from ragged_attention.jax import _launcher

        _launcher.np = GuardedModule(np, side)  # type: ignore[assignment]


def read_one_further(side: str) -> float:
    """Read one element outside a guarded array, which must kill the process."""
    array = guarded(np.ones(8, np.float32), side)
    beyond = np.lib.stride_tricks.as_strided(array, (1,), (0,))
    step = 8 if side == "end" else -1
    address = beyond.__array_interface__["data"][0] + step * array.itemsize
    return ctypes.c_float.from_address(address).value


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=MODULE, description=__doc__)
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--framework", default="torch")
    parser.add_argument("--device")
    parser.add_argument("--examples", type=int, default=25)
    parser.add_argument("--emulated", metavar="MODE", help="run CUDA kernels on a CPU, in this mode of the emulation")
    parser.add_argument("--room", help="the backend's package, if no installed package announces it")
    parser.add_argument("--prove-guard", choices=["start", "end"], help="read one element outside an array, and die")
    options = parser.parse_args(argv)
    if options.prove_guard:
        read_one_further(options.prove_guard)
        return 0
    from ragged_attention.testing.cuda_emulator import emulated

    if options.room:
        dispatch.third_party_packages = lambda: {options.backend: options.room}
    for side in ("end", "start"):
        guard_the_launcher(options.framework, side)
        runner = Runner(
            framework=options.framework, backend=options.backend, device=options.device,
            place=functools.partial(guarded, side=side),
        )  # fmt: skip
        if options.emulated:
            runner = emulated(runner, options.emulated)
        for seed in range(0 if side == "end" else 1, options.examples, 2):
            # Each of the slower operations runs with every second seed; half of them run with each seed.
            slower = [pair for number, pair in enumerate(SLOWER) if (seed // 2 + number) % 2 == 0]
            for operation, example in (*EXAMPLES, *slower):
                ways = paths(runner, operation)
                path = ways[seed % len(ways)]
                what = f"{operation}, seed {seed}, guarded at the {side}, options {dict(path)}"
                _survive(runner, what, functools.partial(example, runner, seed, path))
        if side == "end" and options.framework == "torch":  # jax allocates all arrays except results itself
            for name, attempt in empties.attempts(runner):
                _survive(runner, f"{name}, guarded at the end", attempt)
    return 0


def _survive(runner: Runner, what: str, attempt: Callable[[], object]) -> None:
    """Print the attempt, then run it, so that the last line of a process that dies names its attempt."""
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()
    try:
        with runner.around():
            attempt()
    except Declined as refusal:
        sys.stdout.write(f"declined: {refusal}\n")


if __name__ == "__main__":
    sys.exit(main())
