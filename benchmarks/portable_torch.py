"""The torch fallback on a CPU beside a loop of SDPA over gathered sequences and compiled FlexAttention.

    python -m benchmarks.portable_torch [--repeats 15] [--threads N] [--no-flex] [--no-save]

All of them get the same paged cache, with pages in random order, and gather from it inside the timed region. They run
in one process, in turn, round after round; a ratio is the median over the rounds of (peer / ours), so above 1 means
that ours is faster. With one thread the clock is the process's CPU time, which other work on the machine disturbs
less than it does the wall's. The peers are given their best form that was found:

    sdpa         a sequence at a time, `scaled_dot_product_attention(..., enable_gqa=True)`
    sdpa-packed  the same with the query heads of a KV head laid out so that K and V are not repeated: as further
                 rows for a decode, as a dimension that K and V are expanded over for a prefill
    flex         all sequences of one length in one call of the compiled `flex_attention` over contiguous K and V; the
                 block masks are made before, outside the timed region

Memory is the highest sum of what torch's allocator holds above the inputs, the result included, from the profiler's
memory events; beside it stands the size of the result and of one gathered sequence (K and V in the cache's dtype).
"""

import argparse
import dataclasses
import datetime
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.profiler import ProfilerActivity, profile

from benchmarks.cases.paged import PagedCase
from benchmarks.portable_workloads import HEAD_DIM, NUM_KV_HEADS, NUM_Q_HEADS, PAGE_SIZE, RESULTS, WORKLOADS
from ragged_attention.torch import ragged_paged_attention

GROUP = NUM_Q_HEADS // NUM_KV_HEADS
Peer = Callable[["Batch"], torch.Tensor]


class Batch:
    """A workload's inputs."""

    def __init__(self, case: PagedCase) -> None:
        self.sequences = list(zip(case.q_lens, case.kv_lens, strict=True))
        self.inputs = case.torch_inputs()
        self.q, self.kv_pages, self.table = (self.inputs[name] for name in ("q", "kv_pages", "page_indices"))
        self.masks = {lens: self._block_mask(*lens) for lens in set(self.sequences)}

    @staticmethod
    def _block_mask(q_len: int, kv_len: int) -> Any:
        offset = kv_len - q_len
        return create_block_mask(lambda b, h, i, j: i + offset >= j, None, None, q_len, kv_len, device="cpu")

    def gathered_bytes(self) -> int:
        return 2 * max(kv_len for _, kv_len in self.sequences) * NUM_KV_HEADS * HEAD_DIM * self.q.itemsize

    def keys_and_values(self, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One sequence gathered: K and V as [K, kv_len, D]."""
        kv_len = self.sequences[seq][1]
        own = self.table[seq, : -(-kv_len // PAGE_SIZE)]
        sides = (self.kv_pages[:, :, 0::2], self.kv_pages[:, :, 1::2])
        k, v = (side.index_select(0, own).flatten(0, 1)[:kv_len].transpose(0, 1) for side in sides)
        return k, v


def ours(batch: Batch) -> torch.Tensor:
    result = ragged_paged_attention(**batch.inputs, backend="eager")
    assert isinstance(result, torch.Tensor)
    return result


def sdpa(batch: Batch) -> torch.Tensor:
    out, start = torch.empty_like(batch.q), 0
    for seq, (q_len, _) in enumerate(batch.sequences):
        k, v = batch.keys_and_values(seq)
        q = batch.q[start : start + q_len].transpose(0, 1)
        result = functional.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=q_len > 1, enable_gqa=True
        )
        out[start : start + q_len] = result[0].transpose(0, 1)
        start += q_len
    return out


def sdpa_packed(batch: Batch) -> torch.Tensor:
    out, start = torch.empty_like(batch.q), 0
    for seq, (q_len, kv_len) in enumerate(batch.sequences):
        k, v = batch.keys_and_values(seq)
        q = batch.q[start : start + q_len].view(q_len, NUM_KV_HEADS, GROUP, HEAD_DIM)
        rows = out[start : start + q_len].view(q.shape)
        if q_len == 1:
            rows[0] = functional.scaled_dot_product_attention(q, k[None], v[None])[0]
        else:
            k, v = (x[:, None].expand(NUM_KV_HEADS, GROUP, kv_len, HEAD_DIM) for x in (k, v))
            result = functional.scaled_dot_product_attention(q.permute(1, 2, 0, 3), k, v, is_causal=True)
            rows.copy_(result.permute(2, 0, 1, 3))
        start += q_len
    return out


def flex(compiled: Callable[..., Any]) -> Peer:
    def run(batch: Batch) -> torch.Tensor:
        out, start = torch.empty_like(batch.q), 0
        for lens, mask in sorted(batch.masks.items(), reverse=True):
            chosen = [seq for seq, own in enumerate(batch.sequences) if own == lens]
            gathered = [batch.keys_and_values(seq) for seq in chosen]
            k, v = (torch.stack(side) for side in zip(*gathered, strict=True))  # contiguous, which it is faster on
            stop = start + len(chosen) * lens[0]
            q = batch.q[start:stop].view(len(chosen), lens[0], NUM_Q_HEADS, HEAD_DIM).transpose(1, 2)
            result = compiled(q, k, v, block_mask=mask, enable_gqa=True)
            out[start:stop] = result.transpose(1, 2).flatten(0, 1)
            start = stop
        return out

    return run


def peak_bytes(function: Peer, batch: Batch) -> int:
    """The most that torch's CPU allocator held at once for one call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        function(batch)
    events: Any = record.profiler.kineto_results.events()  # type: ignore[union-attr]
    held = peak = 0
    for event in events:
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def measure(batch: Batch, functions: dict[str, Peer], repeats: int) -> dict[str, Any]:
    """Milliseconds and memory of each, and the median of peer / ours over the rounds."""
    expected = sdpa(batch).float()
    tolerance = 2e-5 if batch.q.dtype == torch.float32 else 2e-2
    for name, function in functions.items():
        difference = (function(batch).float() - expected).abs().max().item()  # also the warm-up
        assert difference < tolerance, f"{name} is off by {difference}"
    memory = {name: peak_bytes(function, batch) for name, function in functions.items()}
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    rounds: list[dict[str, float]] = []
    for _ in range(repeats):
        rounds.append({})
        for name, function in functions.items():
            start = clock()
            function(batch)
            rounds[-1][name] = 1e3 * (clock() - start)
    return {
        name: {
            "ms": statistics.median(each[name] for each in rounds),
            "times_ours": statistics.median(each[name] / each["ours"] for each in rounds),
            "peak_mib": memory[name] / 2**20,
        }
        for name in functions
    }


def environment() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), cpu)
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "date": datetime.date.today().isoformat(),
        "commit": git.stdout.strip(),
        "cpu": cpu,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "clock": "CPU time" if torch.get_num_threads() == 1 else "wall",
        "torch": torch.__version__,
        "load_average": os.getloadavg()[0],
    }


HEADINGS = ("batch", "", "ms", "times ours", "peak MiB", "result MiB", "gathered MiB")


def rows_of(results: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    rows = []
    for entry in results:
        for name, numbers in entry["measured"].items():
            cells = (f"{numbers['ms']:.2f}", f"{numbers['times_ours']:.2f}", f"{numbers['peak_mib']:.1f}")
            sizes = (f"{entry['result_mib']:.1f}", f"{entry['gathered_mib']:.1f}")
            rows.append((f"{entry['workload']}, {entry['dtype']}", name, *cells, *sizes))
    return rows


def save(facts: dict[str, Any], results: list[dict[str, Any]]) -> None:
    stem = RESULTS / f"portable_torch_{facts['threads']}_threads_{facts['date']}"
    stem.with_suffix(".json").write_text(json.dumps({"environment": facts, "results": results}, indent=1) + "\n")
    lines = ["# The torch fallback on a CPU", ""]
    lines += ["Written by `python -m benchmarks.portable_torch`, whose docstring says what is measured.", ""]
    lines += [f"- {key}: {value}" for key, value in facts.items()]
    lines += ["", "| " + " | ".join(HEADINGS) + " |", "|---|---|" + "--:|" * (len(HEADINGS) - 2)]
    lines += ["| " + " | ".join(row) + " |" for row in rows_of(results)]
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-flex", action="store_true", help="leave out FlexAttention, which needs a C++ compiler")
    parser.add_argument("--no-save", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    console = Console()
    facts, results = environment(), []
    for workload in WORKLOADS:
        for dtype in ("float32", "bfloat16"):
            functions: dict[str, Peer] = {"ours": ours, "sdpa": sdpa, "sdpa-packed": sdpa_packed}
            if not arguments.no_flex:
                torch.compiler.reset()  # else the earlier shapes count against the limit of recompilations
                functions["flex"] = flex(torch.compile(flex_attention, dynamic=False))
            batch = Batch(dataclasses.replace(workload, dtype=dtype))
            with console.status(f"{workload.name}, {dtype}"):
                measured = measure(batch, functions, arguments.repeats)
            results.append(
                {
                    "workload": workload.name,
                    "dtype": dtype,
                    "measured": measured,
                    "result_mib": batch.q.nbytes / 2**20,
                    "gathered_mib": batch.gathered_bytes() / 2**20,
                }
            )
    table = Table(*HEADINGS)
    before = None
    for batch_name, *row in rows_of(results):
        if batch_name != before:
            table.add_section()
        table.add_row(batch_name if batch_name != before else "", *row)
        before = batch_name
    console.print(table)
    if not arguments.no_save:
        save(facts, results)


if __name__ == "__main__":
    main()
