"""Time first calls on this machine's CPU, with an empty and then with a filled cache of compiled kernels.

    python -m benchmarks.cpu.cold [--save]

Each call is the first call of a new process. Imports are not timed. With --save the table goes to
docs/cpu_measured.md.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.cpu import page

BEGIN, END = "<!-- written by `python -m benchmarks.cpu.cold --save` -->\n", "<!-- end of the first calls -->\n"
SEQUENCES, LENGTH, PAGE_SIZE = 8, 1024, 16


def _decode(dtype: torch.dtype, **options: Any) -> Any:
    from ragged_attention.torch import ragged_paged_attention

    pages = LENGTH // PAGE_SIZE
    q, kv = torch.randn(SEQUENCES, 32, 128).to(dtype), torch.randn(SEQUENCES * pages, PAGE_SIZE, 16, 128).to(dtype)
    table = torch.arange(SEQUENCES * pages, dtype=torch.int32).view(SEQUENCES, pages)
    lens, edges = torch.full((SEQUENCES,), LENGTH, dtype=torch.int32), torch.arange(SEQUENCES + 1, dtype=torch.int32)
    return functools.partial(ragged_paged_attention, q, kv, lens, table, edges, backend="numba", **options)


def _decode_of_lists() -> Any:
    lists = torch.arange(4, dtype=torch.int32).expand(SEQUENCES, 8, 4).contiguous()
    return _decode(torch.bfloat16, selected=lists, block_size=64)


def _decode_of_latents() -> Any:
    from ragged_attention.torch import mla_decode

    pages = LENGTH // PAGE_SIZE
    q, kv = torch.randn(SEQUENCES, 1, 16, 576), torch.randn(SEQUENCES * pages, PAGE_SIZE, 1, 576)
    table = torch.arange(SEQUENCES * pages, dtype=torch.int32).view(SEQUENCES, pages)
    lens = torch.full((SEQUENCES,), LENGTH, dtype=torch.int32)
    return functools.partial(mla_decode, q.bfloat16(), kv.bfloat16(), table, lens, d_v=512, backend="numba")


CALLS: dict[str, Callable[[], Any]] = {
    "decode, bf16": lambda: _decode(torch.bfloat16),
    "decode with ALiBi, bf16": lambda: _decode(torch.bfloat16, alibi_slopes=torch.ones(32)),
    "decode of listed blocks, bf16": _decode_of_lists,
    "MLA decode, bf16": _decode_of_latents,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write the table to docs/cpu_measured.md")
    parser.add_argument("--call", choices=CALLS, help="make only this call, in this process, and print its seconds")
    options = parser.parse_args(argv)
    if options.call:
        print(json.dumps(seconds(CALLS[options.call]())))
        return 0
    lines = ["| first call | empty cache, s | CPU time of it, s | full cache, s |", "|---|---|---|---|"]
    for name in CALLS:
        with tempfile.TemporaryDirectory() as cache:
            empty, full = (in_a_process(name, cache) for _ in range(2))
        lines.append(f"| {name} | {empty['whole']:.1f} | {empty['cpu']:.1f} | {full['whole']:.2f} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if options.save:
        page.replace(page.PAGE, f"On {page.machine()}.\n\n{text}", BEGIN, END)
    return 0


def seconds(call: Callable[[], Any]) -> dict[str, float]:
    """The seconds of a call: elapsed time, and CPU time."""
    whole, cpu = time.perf_counter(), time.process_time()
    call()
    return {"whole": time.perf_counter() - whole, "cpu": time.process_time() - cpu}


def in_a_process(name: str, cache: str) -> dict[str, float]:
    """`seconds` of a call in a new process, which caches its compiled kernels in `cache`."""
    command = [sys.executable, "-m", "benchmarks.cpu.cold", "--call", name]
    done = subprocess.run(
        command, env=os.environ | {"XDG_CACHE_HOME": cache}, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout)


if __name__ == "__main__":
    raise SystemExit(main())
