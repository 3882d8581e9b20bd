"""What only a device can show: capture and replay, compilation around the operators, streams, stray accesses."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

from benchmarks.cases.base import Case
from benchmarks.cases.catalogue import find
from benchmarks.run import to_numpy
from ragged_attention.testing.compare import identical


@dataclasses.dataclass
class Check:
    """One check's outcome."""

    name: str
    passed: bool
    message: str = ""


def _operation(case: Case) -> Callable[..., Any]:
    return getattr(importlib.import_module("ragged_attention.torch"), case.operation)


def _attention(case: Case, inputs: dict[str, Any], backend: str) -> Any:
    return case.judged(_operation(case)(**inputs, backend=backend))


def _listed(out: Any) -> list[Any]:
    return out if isinstance(out, list) else [out]


def _same_bits(case: Case, inputs: dict[str, Any], out: Any, backend: str) -> None:
    """Whether another call gives the same."""
    for got, want in zip(_listed(out), _listed(_attention(case, inputs, backend)), strict=True):
        identical(to_numpy(got), to_numpy(want))


def compiled(case: Case, backend: str, device: str) -> None:
    """`torch.compile(fullgraph=True)` around the call gives the call's own bits."""
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
    """A captured call, replayed after the lengths and queries have changed in place, is right for the new ones."""
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
    """On a stream of its own the call waits for that stream's work and for nothing else's."""
    import torch

    inputs = case.torch_inputs(3, device)
    queries, inputs["q"] = inputs["q"], torch.full_like(inputs["q"], float("nan"))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # what runs too early sees the NaN
        inputs["q"].copy_(queries)
        out = _attention(case, inputs, backend)
    stream.synchronize()
    case.check(inputs, out, to_numpy)


def without_waiting(case: Case, backend: str, device: str) -> None:
    """The call never makes the host wait for the device."""
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
    """Ten times longer page tables with the same lengths cost under 3 % more."""
    import torch

    from benchmarks import timing

    inputs = case.torch_inputs(5, device)
    table = inputs["page_indices"]
    longer = dict(inputs, page_indices=torch.nn.functional.pad(table, (0, 9 * table.shape[1])))
    candidates = {
        name: timing.captured(lambda given=given: _attention(case, given, backend))
        for name, given in (("as is", inputs), ("longer", longer))
    }
    times = timing.on_gpu(candidates, rounds=50)
    growth = timing.ratio(times["as is"], times["longer"])
    if growth > 1.03:
        raise AssertionError(f"expected a 10x longer page table to cost under 3 % more, got {growth - 1:.1%}")


ANYWHERE = (compiled,)
ON_A_GPU = (compiled, replayed, on_another_stream, without_waiting)
TIMED = (flat_in_padding,)
NEW_QUERIES = (replayed, on_another_stream)  # for which a gradient's other arguments would be no forward pass's


def checks(cases: list[Case], backend: str, device: str, *, timed: Case | None = None) -> list[Check]:
    """Every check on every case that the device allows."""
    chosen: list[tuple[Callable[..., None], Case]] = [
        (check, case)
        for case in cases
        for check in (ON_A_GPU if device == "cuda" else ANYWHERE)
        if not (case.backward and check in NEW_QUERIES)
    ]
    if timed is not None and device == "cuda":
        chosen += [(check, timed) for check in TIMED]
    found = []
    for check, case in chosen:
        name = f"{check.__name__.replace('_', ' ')}, {case.name}, {backend}"
        try:
            check(case, backend, device)
            found.append(Check(name, True))
        except Exception as error:  # a row of the report
            found.append(Check(name, False, f"{type(error).__name__}: {str(error)[:400]}"))
    return found


def poke(seeds: int, backend: str = "triton", device: str = "cuda") -> None:
    """Run calls whose index arrays hold any values at all: under a memory checker, which sees every stray access."""
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


def small(names: tuple[str, ...], length: int = 333) -> list[Case]:
    return [find(name).scaled_down(length=length, sequences=6) for name in names]
