"""How decode on a CPU grows: time per key and KV head, the cost of padding, and how evenly programs fill threads.

    python -m benchmarks.cpu.growth [--threads 1,2] [--rounds 15] [--save]

A batch has 1 to 64 sequences of 128 to 65536 keys, with at most a gigabyte of keys and values. Each call of a batch
reads other pages of the cache, as the layers of a model do, so that small batches do not find their keys in the CPU's
caches. If decode grows linearly, the time per key is the same for all batches, except that the fixed cost of a call
shows in the smallest batches. Pages are read in random order. For comparison, a plain read is torch's maximum over a
quarter of the cache, in memory order.

A padded batch has ten times as many sequences, whose page tables are ten times as long. The added sequences and the
added table entries are not used.

For more threads than the machine has, the command computes a plan. It uses the kernels' own division into programs. As
in the kernels, a thread starts the next program when it has finished one. The time of a program is not measured: it is
its number of keys. With --save the results go to benchmarks/results; `make docs` then draws the picture.
"""

import argparse
import heapq
import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.cpu import page
from benchmarks.cpu.__main__ import facts
from benchmarks.cpu.cases import HEAD_DIM, NUM_KV_HEADS, NUM_Q_HEADS, PAGE_SIZE
from benchmarks.timing import on_cpu, ratio
from ragged_attention.portable.numba._paged_heads import heads_per_program
from ragged_attention.portable.numba._splits import PROGRAMS, splits_of
from ragged_attention.torch import ragged_paged_attention

FILE = page.RESULTS / "growth_cpu.json"
NUM_SEQS = (1, 4, 16, 64)
LENGTHS = (128, 512, 2048, 8192, 32768, 65536)
MOST_KEYS = 2**18  # the most keys of a batch; keys and values are then a gigabyte
PADDING = 10
PADDED = ((1, 128), (8, 1024), (64, 128), (64, 1024))  # (sequences, keys) of the padded batches
PLANNED = {
    "1 of 1k": (1024,),
    "1 of 64k": (65536,),
    "8 of 1k": (1024,) * 8,
    "20 of 200 to 4k": tuple(200 + 997 * seq % 3800 for seq in range(20)),
    "31 of 256, 1 of 16k": (*(256,) * 31, 16384),
}
PLANNED_THREADS = (1, 2, 4, 8, 16, 32, 64)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    most = os.cpu_count() or 1
    parser.add_argument("--threads", default=",".join(map(str, sorted({1, most}))), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", action="store_true", help="write the results")
    options = parser.parse_args(argv)
    cache, record = new_cache(), facts()
    for threads in map(int, options.threads.split(",")):
        torch.set_num_threads(threads)
        run = {
            "threads": threads,
            "read": plain_read(cache, options.rounds),
            "growth": growth(cache, options.rounds),
            "padding": padding(cache, options.rounds),
        }
        record["runs"].append(run)
        sys.stdout.write(report(run))
    record["plan"] = {name: [filled(lens, threads) for threads in PLANNED_THREADS] for name, lens in PLANNED.items()}
    record["planned_threads"] = PLANNED_THREADS
    for name, shares in record["plan"].items():
        sys.stdout.write(f"{name}: " + ", ".join(f"{100 * share:.0f} %" for share in shares) + "\n")
    if options.save:
        FILE.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def new_cache() -> torch.Tensor:
    """Pages for `MOST_KEYS` keys: copies of 64 random pages."""
    torch.manual_seed(0)
    pages = torch.randn(64, PAGE_SIZE, 2 * NUM_KV_HEADS, HEAD_DIM).bfloat16()
    return pages.repeat(MOST_KEYS // PAGE_SIZE // len(pages), 1, 1, 1)


def decode(cache: torch.Tensor, num_seqs: int, keys: int, padding: int = 1) -> Callable[[], Any]:
    """A function that decodes a batch, with other pages in each call.

    Its tables have `padding` times as many rows and columns as needed. A padded batch uses the pages in another order,
    so that the CPU's caches do not contain its pages from the unpadded batch.
    """
    pages = -(-keys // PAGE_SIZE)
    order = torch.randperm(len(cache), generator=torch.Generator().manual_seed(padding)).int()
    tables = []
    for page_indices in order.split(num_seqs * pages)[: len(cache) // (num_seqs * pages)][:64]:
        table = torch.zeros(padding * num_seqs, padding * pages, dtype=torch.int32)
        table[:num_seqs, :pages] = page_indices.view(num_seqs, pages)
        tables.append(table)
    lens = torch.zeros(padding * num_seqs, dtype=torch.int32)
    lens[:num_seqs] = keys
    edges = torch.arange(padding * num_seqs + 1).clamp(max=num_seqs).int()
    q, count = torch.randn(num_seqs, NUM_Q_HEADS, HEAD_DIM).bfloat16(), torch.tensor([num_seqs]).int()
    next_table = itertools.cycle(tables)
    return lambda: ragged_paged_attention(q, cache, lens, next(next_table), edges, num_seqs=count, backend="numba")


def plain_read(cache: torch.Tensor, rounds: int) -> float:
    """The gigabytes per second that torch reads when it computes the maximum of a quarter of the cache."""
    quarters = itertools.cycle(cache.view(torch.int32).chunk(4))
    seconds = on_cpu({"read": lambda: next(quarters).max()}, rounds=rounds)["read"].median
    return 1e-9 * cache.nbytes / 4 / seconds


def growth(cache: torch.Tensor, rounds: int) -> list[dict[str, Any]]:
    """The milliseconds of each batch, and its nanoseconds per key and KV head."""
    rows = []
    for num_seqs, keys in itertools.product(NUM_SEQS, LENGTHS):
        if num_seqs * keys <= MOST_KEYS:
            many = rounds * max(1, min(10, MOST_KEYS // 8 // (num_seqs * keys)))  # shorter calls run more often
            seconds = on_cpu({"ours": decode(cache, num_seqs, keys)}, rounds=many)["ours"].median
            per_key = 1e9 * seconds / (num_seqs * keys * NUM_KV_HEADS)
            rows.append({"num_seqs": num_seqs, "keys": keys, "milliseconds": 1e3 * seconds, "nanoseconds": per_key})
    return rows


def padding(cache: torch.Tensor, rounds: int) -> list[dict[str, Any]]:
    """The time of padded batches relative to plain ones, and the difference in microseconds."""
    rows = []
    for num_seqs, keys in PADDED:
        plain, padded = decode(cache, num_seqs, keys), decode(cache, num_seqs, keys, PADDING)
        times = on_cpu({"plain": plain, "padded": padded}, rounds=10 * rounds)
        more = 1e6 * (times["padded"].median - times["plain"].median)
        relative = ratio(times["plain"], times["padded"])
        rows.append({"num_seqs": num_seqs, "keys": keys, "ratio": relative, "microseconds": more})
    return rows


# ---- the plan


def programs_of(lens: Sequence[int], threads: int) -> list[int]:
    """The work of each program of a decode, in the order of execution: its keys times its KV heads."""
    total, units = float(sum(lens)), []
    for keys in lens:
        num_splits = splits_of.py_func(keys, keys, total, PROGRAMS // NUM_KV_HEADS, 0)
        step = -(-keys // num_splits)
        units += [min((split + 1) * step, keys) - split * step for split in range(num_splits)]
    heads = heads_per_program.py_func(NUM_KV_HEADS, len(units) * NUM_KV_HEADS, threads)
    return [keys * heads for keys in units for _ in range(NUM_KV_HEADS // heads)]


def filled(lens: Sequence[int], threads: int) -> float:
    """The share of the time of all threads in which they run programs, until the last thread has finished."""
    busy = [0] * threads  # when each thread becomes free
    for keys in (programs := programs_of(lens, threads)):
        heapq.heapreplace(busy, busy[0] + keys)
    return sum(programs) / (threads * max(busy))


def report(run: dict[str, Any]) -> str:
    """The text that the terminal shows about a run."""
    lines = [f"{run['threads']} threads; a plain read has {run['read']:.1f} GB/s"]
    for row in run["growth"]:
        rate = 2 * HEAD_DIM * torch.bfloat16.itemsize / row["nanoseconds"]
        found = f"{row['milliseconds']:.3f} ms, {row['nanoseconds']:.2f} ns for a key and KV head, {rate:.1f} GB/s"
        lines.append(f"{row['num_seqs']} of {row['keys']}: {found}")
    for row in run["padding"]:
        lines.append(f"{row['num_seqs']} of {row['keys']}, padded: x {row['ratio']:.3f}, {row['microseconds']:.1f} us")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
