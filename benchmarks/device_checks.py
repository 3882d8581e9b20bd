"""What only a device can show: capture and replay, compilation around the operators, streams, stray accesses."""

import dataclasses
from collections.abc import Callable
from typing import Any

from benchmarks import gate
from benchmarks.cases import Case, scaled_down, torch_inputs
from benchmarks.run import to_numpy
from ragged_attention.testing.compare import identical


@dataclasses.dataclass
class Check:
    """One check's outcome."""

    name: str
    passed: bool
    message: str = ""


def _attention(inputs: dict[str, Any], backend: str) -> Any:
    from ragged_attention.torch import ragged_paged_attention

    return ragged_paged_attention(**inputs, backend=backend)


def _right(case: Case, inputs: dict[str, Any], out: Any) -> None:
    gate.check(case, inputs, out, to_numpy)


def compiled(case: Case, backend: str, device: str) -> None:
    """`torch.compile(fullgraph=True)` around the call gives the call's own bits."""
    import torch

    inputs = torch_inputs(case, 1, device)
    by = "inductor" if device == "cuda" else "aot_eager"
    function = torch.compile(lambda inputs: _attention(inputs, backend) * 1, fullgraph=True, backend=by)
    out = function(inputs)
    identical(to_numpy(out), to_numpy(_attention(inputs, backend)))
    _right(case, inputs, out)


def replayed(case: Case, backend: str, device: str) -> None:
    """A captured call, replayed after the lengths and queries have changed in place, is right for the new ones."""
    import torch

    from benchmarks import timing

    inputs = torch_inputs(case, 2, device)
    replay = timing.captured(lambda: _attention(inputs, backend))
    shorter = dataclasses.replace(
        case,
        kv_lens=tuple(
            max(q_len, kv_len * (1 + seq % 3) // 4)
            for seq, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True))
        ),
    )
    for changed in (shorter, case):
        inputs["kv_lens"].copy_(torch.tensor(changed.kv_lens, dtype=torch.int32))
        inputs["q"].copy_(torch.randn(case.q_shape, device=device))
        out = replay()
        torch.cuda.synchronize()
        _right(changed, inputs, out)
        identical(to_numpy(out), to_numpy(_attention(inputs, backend)))


def on_another_stream(case: Case, backend: str, device: str) -> None:
    """On a stream of its own the call waits for that stream's work and for nothing else's."""
    import torch

    inputs = torch_inputs(case, 3, device)
    queries, inputs["q"] = inputs["q"], torch.full_like(inputs["q"], float("nan"))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # what runs too early sees the NaN
        inputs["q"].copy_(queries)
        out = _attention(inputs, backend)
    stream.synchronize()
    _right(case, inputs, out)


def without_waiting(case: Case, backend: str, device: str) -> None:
    """The call never makes the host wait for the device."""
    import torch

    inputs = torch_inputs(case, 4, device)
    _attention(inputs, backend)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _attention(inputs, backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def flat_in_padding(case: Case, backend: str, device: str) -> None:
    """Ten times longer page tables with the same lengths cost under 3 % more."""
    import torch

    from benchmarks import timing

    inputs = torch_inputs(case, 5, device)
    longer = dict(inputs, page_indices=torch.nn.functional.pad(inputs["page_indices"], (0, 9 * max(case.pages_needed))))
    candidates = {
        name: timing.captured(lambda given=given: _attention(given, backend))
        for name, given in (("as is", inputs), ("longer", longer))
    }
    times = timing.on_gpu(candidates, rounds=50)
    growth = timing.ratio(times["as is"], times["longer"])
    if growth > 1.03:
        raise AssertionError(f"expected a 10x longer page table to cost under 3 % more, got {growth - 1:.1%}")


ANYWHERE = (compiled,)
ON_A_GPU = (compiled, replayed, on_another_stream, without_waiting)
TIMED = (flat_in_padding,)


def checks(cases: list[Case], backend: str, device: str, *, timed: Case | None = None) -> list[Check]:
    """Every check on every case that the device allows."""
    chosen: list[tuple[Callable[..., None], Case]] = [
        (check, case) for case in cases for check in (ON_A_GPU if device == "cuda" else ANYWHERE)
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
    from ragged_attention.testing import runner_for
    from ragged_attention.testing.runners import Declined
    from ragged_attention.testing.safety import one_example

    runner = runner_for(backend, "torch", device)
    for seed in range(seeds):
        try:
            one_example(runner, seed, None)
        except Declined:
            continue


def small(names: tuple[str, ...], length: int = 333) -> list[Case]:
    from benchmarks.cases import find

    return [scaled_down(find(name), length=length, sequences=6) for name in names]
