"""The jax fallback on a CPU beside JAX's own reference and ejKernel's XLA version.

    python -m benchmarks.portable_jax [--repeats 9] [--no-save]

All of them get the same paged cache, with pages in random order. They run in one process, in turn, round after round;
a ratio is the median over the rounds of (peer / ours), so above 1 means that ours is faster.

    jax        `ref_ragged_paged_attention` of jax.experimental.pallas. It slices by lengths, so it cannot be traced
               with lengths that are arrays; here they are constants of the jitted function, which is compiled for
               these very lengths (ours is compiled once for all)
    ejkernel   `ragged_page_attention_v2` of ejkernel.kernels._xla, under jit with its own defaults, which compute in
               bfloat16, and in float32 where the inputs are float32; left out where it is not installed

Memory is XLA's own count of temporary bytes; `block` is one block of gathered K and V of ours, in the cache's dtype.
"""

import argparse
import dataclasses
import datetime
import importlib
import json
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as jax_reference
from rich.console import Console
from rich.table import Table

from benchmarks.cases.paged import PagedCase
from benchmarks.portable_workloads import HEAD_DIM, NUM_KV_HEADS, RESULTS, WORKLOADS
from ragged_attention.calls import NOWHERE
from ragged_attention.jax import ragged_paged_attention
from ragged_attention.portable.xla.ragged_paged_attention import heuristic

SCALE = HEAD_DIM**-0.5
Peer = tuple[Any, tuple[Any, ...]]  # a jitted function and its arguments


class Batch:
    """A workload's inputs."""

    def __init__(self, case: PagedCase) -> None:
        tables = case.tables()
        inputs = case.jax_inputs()
        self.q, self.kv_pages = inputs["q"], inputs["kv_pages"]
        # Kept on the host, for a peer that needs constants.
        self.kv_lens: Any = tables["kv_lens"]
        self.table: Any = tables["page_indices"]
        self.cu_q_lens: Any = tables["cu_q_lens"]
        self.num_seqs: Any = np.array([len(case.kv_lens)], np.int32)

    @property
    def arguments(self) -> tuple[Any, ...]:
        tables = (self.kv_lens, self.table, self.cu_q_lens, self.num_seqs)
        return (self.q, self.kv_pages, *map(jnp.asarray, tables))


def ours(batch: Batch) -> Peer:
    return jax.jit(lambda *arguments: ragged_paged_attention(*arguments, backend="xla")), batch.arguments


def jax_own(batch: Batch) -> Peer:
    def attend(q: Any, kv_pages: Any, table: Any) -> Any:
        return jax_reference.ref_ragged_paged_attention(
            q, kv_pages, batch.kv_lens, table, batch.cu_q_lens, batch.num_seqs, sm_scale=SCALE
        )

    return jax.jit(attend), (batch.q, batch.kv_pages, jnp.asarray(batch.table))


def ejkernel(batch: Batch) -> Peer | None:
    try:
        module = importlib.import_module("ejkernel.kernels._xla.ragged_page_attention_v2")
    except ImportError:
        return None

    def attend(*arguments: Any) -> Any:
        return module.ragged_page_attention_v2(*arguments, softmax_scale=SCALE, compute_dtype=batch.q.dtype)

    return jax.jit(attend), batch.arguments


PEERS = {"jax": jax_own, "ejkernel": ejkernel}


@dataclasses.dataclass(frozen=True)
class Result:
    workload: str
    dtype: str
    ours_ms: float
    peers_ms: dict[str, float]
    ratios: dict[str, float]
    temporary_mb: dict[str, float]
    block_mb: float
    compile_s: dict[str, float]


def measure(case: PagedCase, repeats: int) -> Result:
    batch = Batch(case)
    functions = {"ours": ours(batch)} | {name: made for name, make in PEERS.items() if (made := make(batch))}
    compiled, compile_s, outs = {}, {}, {}
    for name, (function, arguments) in functions.items():
        start = time.perf_counter()
        compiled[name] = function.lower(*arguments).compile()
        compile_s[name] = time.perf_counter() - start
        outs[name] = np.asarray(compiled[name](*arguments), np.float32)
        if (difference := np.abs(outs[name] - outs["ours"]).max()) > 0.05:
            raise RuntimeError(f"expected {name} to agree with ours, got a difference of {difference}")
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, (_, arguments) in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(compiled[name](*arguments))
            times[name].append((time.perf_counter() - start) * 1e3)
    block = (
        heuristic(case.attention_call(NOWHERE)).block_kv * 2 * NUM_KV_HEADS * HEAD_DIM * batch.kv_pages.dtype.itemsize
    )
    medians = {name: statistics.median(values) for name, values in times.items()}
    return Result(
        workload=case.name,
        dtype=case.dtype,
        ours_ms=medians.pop("ours"),
        peers_ms=medians,
        ratios={
            name: statistics.median(peer / own for peer, own in zip(times[name], times["ours"], strict=True))
            for name in medians
        },
        temporary_mb={name: made.memory_analysis().temp_size_in_bytes / 1e6 for name, made in compiled.items()},
        block_mb=block / 1e6,
        compile_s=compile_s,
    )


def rows_of(results: list[Result]) -> list[list[str]]:
    rows = []
    for result in results:
        row = [result.workload, result.dtype, f"{result.ours_ms:.1f}"]
        for name in PEERS:
            row.append(f"{result.ratios[name]:.2f}" if name in result.ratios else "absent")
        memory = ", ".join(f"{name} {value:.0f}" for name, value in result.temporary_mb.items())
        rows.append([*row, memory, f"{result.block_mb:.1f}"])
    return rows


HEADINGS = ["workload", "dtype", "ours, ms", *(f"{name} / ours" for name in PEERS), "temporary MB", "block MB"]


def save(results: list[Result], repeats: int) -> Path:
    root = Path(__file__).parent.parent
    revision = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=False
    )
    about = {
        "date": datetime.date.today().isoformat(),
        "commit": revision.stdout.strip(),
        "jax": jax.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "load": os.getloadavg()[0],
        "repeats": repeats,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"portable_jax_{about['date']}.json"
    held = {"about": about, "results": [dataclasses.asdict(result) for result in results]}
    path.write_text(json.dumps(held, indent=1) + "\n")
    lines = [f"# The jax fallback on a CPU, {about['date']}", ""]
    lines += [", ".join(f"{name} {value}" for name, value in about.items() if name != "date") + ".", ""]
    lines += ["A ratio above 1 means that ours is faster. The load is other work on the machine at the time.", ""]
    table = [HEADINGS, ["---"] * len(HEADINGS), *rows_of(results)]
    path.with_suffix(".md").write_text("\n".join(lines + ["| " + " | ".join(row) + " |" for row in table]) + "\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--no-save", action="store_true")
    chosen = parser.parse_args()
    console = Console()
    results = []
    with console.status("measuring") as status:
        for workload in WORKLOADS:
            for dtype in ("float32", "bfloat16"):
                status.update(f"{workload.name}, {dtype}")
                results.append(measure(dataclasses.replace(workload, dtype=dtype), chosen.repeats))
    table = Table(*HEADINGS)
    for row in rows_of(results):
        table.add_row(*row)
    console.print(table)
    if not chosen.no_save:
        console.print(f"written: {save(results, chosen.repeats)}")


if __name__ == "__main__":
    main()
