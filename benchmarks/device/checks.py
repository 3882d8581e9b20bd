"""Items: checks that need a device, such as graph capture and replay, torch.compile, streams, no synchronisation."""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.cases.base import Case
from benchmarks.cases.catalogue import CASES
from benchmarks.device import cuda
from benchmarks.device.record import PASSED
from benchmarks.run import to_numpy
from ragged_attention.testing import environment
from ragged_attention.testing.compare import identical

SMALL = {
    "triton": (
        "decode_64x4k", "mixed_2q2k_32q1s1k", "gpt_oss_window_64x4k", "fp8_64x4k", "speculative_64q4s4k",
        "mla_dense_h128_128q2s4k", "mla_sparse_h16_b8", "mla_sparse_v4_h64_128q2", "mla_prefill_fp8_h128_32k",
        "mla_ragged_mixed", "mha_gqa_8x2k", "mha_gqa_8x2k_backward", "indexer_decode_64x32k",
    ),
    "cuda": (
        "mla_dense_h128_128q2s4k", "mla_sparse_bf16_h128_32q2", "mla_sparse_h16_b8", "mla_prefill_h128_32k",
        "mla_prefill_fp8_h128_32k",
    ),
}  # fmt: skip
WHOLE = {"triton": "decode_64x4k", "cuda": "mla_dense_h128_128x4k"}  # the cases that are timed, at full size
LENGTH, CPU_LENGTH, SEQUENCES = 333, 48, 6


def _operation(case: Case) -> Callable[..., Any]:
    return getattr(importlib.import_module("ragged_attention.torch"), case.operation)


def _attention(case: Case, inputs: dict[str, Any], backend: str) -> Any:
    return case.judged(_operation(case)(**inputs, backend=backend))


def _listed(out: Any) -> list[Any]:
    return out if isinstance(out, list) else [out]


def _same_bits(case: Case, inputs: dict[str, Any], out: Any, backend: str) -> None:
    """Check that another call gives the same bits as `out`."""
    for got, want in zip(_listed(out), _listed(_attention(case, inputs, backend)), strict=True):
        identical(to_numpy(got), to_numpy(want))


def compiled(case: Case, backend: str, device: str) -> None:
    """Check that `torch.compile(fullgraph=True)` around the call gives the same bits as the plain call."""
    import torch

    inputs = case.torch_inputs(1, device)
    operation = _operation(case)
    by = "inductor" if device == "cuda" else "aot_eager"

    def together(inputs: dict[str, Any]) -> list[Any]:
        return [array * 1 for array in _listed(case.judged(operation(**inputs, backend=backend)))]

    function = torch.compile(together, fullgraph=True, backend=by)
    results = function(inputs)
    out = results if case.backward else results[0]
    _same_bits(case, inputs, out, backend)
    case.check(inputs, out, to_numpy)


def replayed(case: Case, backend: str, device: str) -> None:
    """Check that the replay of a captured call is right after the lengths and queries have changed in place."""
    import torch

    from benchmarks import timing

    inputs = case.torch_inputs(2, device)
    replay = timing.captured(lambda: _attention(case, inputs, backend))
    for other, tables in case.changed():
        for name, table in tables.items():
            inputs[name].copy_(torch.from_numpy(table))
        inputs["q"].copy_(torch.randn(inputs["q"].shape, device=device))
        out = replay()
        torch.cuda.synchronize()
        other.check(inputs, out, to_numpy)
        _same_bits(case, inputs, out, backend)


def on_another_stream(case: Case, backend: str, device: str) -> None:
    """Check that a call on another stream waits for the earlier work of that stream."""
    import torch

    inputs = case.torch_inputs(3, device)
    queries, inputs["q"] = inputs["q"], torch.full_like(inputs["q"], float("nan"))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # a call that runs too early sees the NaN
        inputs["q"].copy_(queries)
        out = _attention(case, inputs, backend)
    stream.synchronize()
    case.check(inputs, out, to_numpy)


def without_waiting(case: Case, backend: str, device: str) -> None:
    """Check that the call never makes the host wait for the device."""
    import torch

    inputs = case.torch_inputs(4, device)
    _attention(case, inputs, backend)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _attention(case, inputs, backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def flat_in_padding(case: Case, backend: str, device: str) -> None:
    """Check that ten times longer page tables with the same lengths cost under 3 % more."""
    import torch

    from benchmarks import timing

    inputs = case.torch_inputs(5, device)
    table = inputs["page_indices"]
    longer = dict(inputs, page_indices=torch.nn.functional.pad(table, (0, 9 * table.shape[1])))
    candidates = {
        name: timing.captured(lambda arguments=arguments: _attention(case, arguments, backend))
        for name, arguments in (("as is", inputs), ("longer", longer))
    }
    times = timing.on_gpu(candidates, rounds=50)
    growth = timing.ratio(times["as is"], times["longer"])
    if growth > 1.03:
        raise AssertionError(f"expected a 10x longer page table to cost under 3 % more, got {growth - 1:.1%}")


ANYWHERE: dict[str, Callable[..., None]] = {"compiled": compiled}
# Compiling takes longest, so it comes last.
ON_A_GPU: dict[str, Callable[..., None]] = {
    "replayed": replayed, "on another stream": on_another_stream, "without waiting": without_waiting, **ANYWHERE
}  # fmt: skip
TIMED = "flat in padding"
# These checks change the queries. A gradient is left out, because its `out` and `lse` belong to the old queries.
NEW_QUERIES = ("replayed", "on another stream")


class Items:
    def __init__(self, device: str) -> None:
        environment.prepare(device)
        self.device = device
        self.calls = dict(self._calls())

    def _calls(self) -> Iterator[tuple[str, tuple[Callable[..., None], Case, str]]]:
        """Yield (name, (check, case, backend)). In a rehearsal on a CPU, eager replaces Triton.

        Items whose name starts with `TIMED` measure time, so nothing else may use the device meanwhile.
        """
        gpu = self.device == "cuda"
        for backend, names in SMALL.items():
            if backend == "cuda" and cuda.absent(self.device):
                continue
            by = backend if gpu or backend == "cuda" else "eager"
            for check, run in (ON_A_GPU if gpu else ANYWHERE).items():
                for name in names:
                    case = CASES[name].scaled_down(length=LENGTH if gpu else CPU_LENGTH, sequences=SEQUENCES)
                    if not (case.backward and check in NEW_QUERIES):
                        yield f"{check}, {name}, {by}", (run, case, by)
            if gpu:
                yield f"{TIMED}, {WHOLE[backend]}, {by}", (flat_in_padding, CASES[WHOLE[backend]], by)

    def facts(self) -> dict[str, Any]:
        return {}

    def names(self, what: str) -> list[str]:
        return [name for name in self.calls if name.startswith(TIMED) == (what == "timed")]

    def run(self, what: str, name: str) -> dict[str, Any]:
        del what
        check, case, backend = self.calls[name]
        with cuda.in_place(self.device):
            check(case, backend, self.device)
        return {"result": PASSED}

    def settle(self) -> None:
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()


def poke(seeds: int, backend: str = "triton", device: str = "cuda") -> None:
    """Run calls with arbitrary values in their index arrays. A memory checker then sees every stray access."""
    from ragged_attention.testing import runner_for, safety
    from ragged_attention.testing.mla import garbage as mla_safety
    from ragged_attention.testing.runner import Declined
    from ragged_attention.testing.varlen import garbage as varlen_safety

    runner = runner_for(backend, "torch", device)
    for seed in range(seeds):
        for _, example in (*safety.EXAMPLES, *mla_safety.EXAMPLES, *varlen_safety.EXAMPLES):
            try:
                example(runner, seed, {})
            except Declined:
                continue
