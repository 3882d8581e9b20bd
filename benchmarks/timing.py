"""Times calls, on a GPU with events and a cold L2 cache, on a CPU by the clock. Results are medians of many runs.

Candidates are interleaved: each candidate runs once per round, so that changes of clock or load affect all candidates.
On a CPU, every round has a new random order. A ratio is the median of the ratios within each round.
"""

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

FLUSH_BYTES = 256 * 2**20  # more than any L2 cache holds
WARM_UP, LONGEST = 20, 0.5  # for `host_seconds`: calls that are not counted, and seconds after which no call begins


@dataclasses.dataclass(frozen=True)
class Timing:
    """The seconds of each round."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Half the interquartile range, relative to the median."""
        if len(self.samples) < 4:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4)
        return (high - low) / 2 / self.median


def ratio(base: Timing, other: Timing) -> float:
    """The time of `other` relative to `base`. Above 1, `base` is faster."""
    pairs = zip(other.samples, base.samples, strict=True)
    return statistics.median(theirs / ours for theirs, ours in pairs)


def on_cpu(candidates: Mapping[str, Callable[[], Any]], *, rounds: int = 15, warm_up: int = 2) -> dict[str, Timing]:
    """Wall-clock times by candidate. A candidate must not return before its result is ready."""
    return _rounds(candidates, _wall_clock, rounds, warm_up)


def on_gpu(
    candidates: Mapping[str, Callable[[], Any]], *, rounds: int = 50, warm_up: int = 3, cold: bool = True
) -> dict[str, Timing]:
    """Device times by candidate, measured with torch's events before and after a call.

    With `cold`, the L2 cache is flushed before each call. The flush also keeps the device busy while the host enqueues,
    so that times exclude the cost of the launch.
    """
    import torch

    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda") if cold else None
    events = {name: [] for name in candidates}

    def measure(name: str, function: Callable[[], Any]) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if flush is not None:
            flush.zero_()
        start.record()
        function()
        stop.record()
        events[name].append((start, stop))
        return 0.0

    for name, function in candidates.items():
        for _ in range(warm_up):
            function()
        events[name].clear()
    torch.cuda.synchronize()
    for _ in range(rounds):
        for name, function in candidates.items():
            measure(name, function)
    torch.cuda.synchronize()
    return {
        name: Timing(tuple(start.elapsed_time(stop) / 1e3 for start, stop in pairs)) for name, pairs in events.items()
    }


def captured(function: Callable[[], Any]) -> Callable[[], Any]:
    """A function that replays `function` as a CUDA graph, so that its time is the kernels' time alone."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


def host_seconds(function: Callable[[], Any], *, calls: int = 200, settle: Callable[[], Any] | None = None) -> float:
    """The median time that the host spends on a call. `settle` waits for the device, so that its queue never fills.

    The first calls are not counted. A slow function is called less often: no call begins after `LONGEST` seconds.
    """
    samples: list[float] = []
    until = time.perf_counter() + LONGEST
    for index in range(calls + WARM_UP):
        if settle is not None and index % WARM_UP == 0:
            settle()
        begin = time.perf_counter()
        if begin > until and samples:
            break
        function()
        samples.append(time.perf_counter() - begin)
    if settle is not None:
        settle()
    return statistics.median(samples[min(WARM_UP, len(samples) // 2) :])


def _wall_clock(function: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def _rounds(
    candidates: Mapping[str, Callable[[], Any]], measure: Callable[[Any], float], rounds: int, warm_up: int
) -> dict[str, Timing]:
    for function in candidates.values():
        for _ in range(warm_up):
            function()
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    order, chance = list(candidates), random.Random(0)
    for _ in range(rounds):
        chance.shuffle(order)  # A candidate finds the caches as the previous candidate left them.
        for name in order:
            samples[name].append(measure(candidates[name]))
    return {name: Timing(tuple(values)) for name, values in samples.items()}


def copy_bandwidth(device: Any = "cuda", size: int = 2**31) -> float:
    """The bytes per second that a large copy within the device's memory reads and writes."""
    import torch

    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = {"copy": lambda: target.copy_(source)}
    timing = on_gpu(copy, rounds=20) if source.is_cuda else on_cpu(copy, rounds=5)
    return 2 * size / timing["copy"].median


def matmul_rate(device: Any = "cuda", size: int = 8192, dtype: str = "bfloat16") -> float:
    """The operations per second of a large square matrix product with random values."""
    import torch

    left, right = (torch.randn(size, size, device=device, dtype=getattr(torch, dtype)) for _ in range(2))
    product = {"matmul": lambda: left @ right}
    timing = on_gpu(product, rounds=20) if left.is_cuda else on_cpu(product, rounds=3)
    return 2 * size**3 / timing["matmul"].median
