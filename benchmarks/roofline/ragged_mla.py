"""The launches of ragged attention over latents on Triton, and their work.

`ragged_attention.tools.schedule` could find the visited keys, but it runs the index arithmetic of each program, and a
prompt has thousands of programs. Since that takes seconds, this module repeats how the kernels divide the keys.
"""

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

from benchmarks.cases.ragged_mla import RaggedLatentCase
from benchmarks.compiled import compiling
from benchmarks.compiled.compiling import ITEMSIZE
from benchmarks.roofline.mla import columns_of, latent_bytes
from benchmarks.roofline.model import KernelArgs, Machine, Programs, Step, Work, cdiv, visible
from ragged_attention.calls import Device


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """A sequence: its key blocks [begin, end) that queries see, divided into KV splits of `each` blocks."""

    q_len: int
    kv_len: int
    short: bool
    begin: int
    end: int
    each: int

    @property
    def parts(self) -> range:
        """The first block of each KV split."""
        return range(self.begin, self.end, self.each)


def planned(case: RaggedLatentCase, device: Device) -> tuple[str, ...]:
    del case, device
    return ("triton",)


def spans(case: RaggedLatentCase, kernel_args: KernelArgs) -> list[Span]:
    """The sequences of a launch. The KV splits of all short sequences have the same number of blocks."""
    block, launched = kernel_args["BLOCK_KV"], []
    for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True):
        first, last = visible(kv_len - q_len, kv_len - 1, kv_len, kernel_args["window"])
        short = q_len * case.num_q_heads <= kernel_args["SHORT_ROWS"]
        if kernel_args["HAS_SHORT" if short else "HAS_LONG"]:
            launched.append(Span(q_len, kv_len, short, first // block, cdiv(last, block), 2**31))
    if not kernel_args["SPLIT_KV"]:
        return launched
    blocks = sum(span.end - span.begin for span in launched if span.short)
    each = max(cdiv(blocks, kernel_args["num_splits"]), kernel_args["MIN_BLOCKS"])
    return [dataclasses.replace(span, each=each) if span.short else span for span in launched]


def attended(case: RaggedLatentCase, kernel_args: KernelArgs) -> tuple[Work, Programs, Work, int]:
    """(work of the attention kernel, its programs, work of the combine kernel, its rows)."""
    total, combined, rows_combined = Work(), Work(), 0
    programs: collections.Counter[tuple[float, ...]] = collections.Counter()
    block, count, heads = kernel_args["BLOCK_KV"], kernel_args["BLOCK_H"], case.num_q_heads
    columns, again, queried = columns_of(kernel_args)
    plain = case.cache_format == "plain"
    key_bytes = case.width * ITEMSIZE[case.stored or case.dtype] if plain else latent_bytes(case.cache_format)
    item = ITEMSIZE[case.dtype]
    for span in spans(case, kernel_args):
        ahead, num_rows = span.kv_len - span.q_len, span.q_len * heads
        for first_row in range(0, num_rows, count):
            high = min((first_row + count - 1) // heads, span.q_len - 1)
            first, last = visible(ahead + first_row // heads, ahead + high, span.kv_len, kernel_args["window"])
            for part in span.parts:
                begin = max(part, first // block)
                end = min(part + span.each, span.end, cdiv(last, block))
                pairs = 2 * count * block * max(end - begin, 0)
                seen = max(min(last, end * block) - max(first, begin * block), 0)
                total += Work(flops=pairs * columns, again=pairs * again, keys=seen * key_bytes)
                programs[(float(max(end - begin, 0)),)] += 1
        parts = len(span.parts)
        total += Work(rows=num_rows * (parts * queried * item + case.d_v * (item if parts == 1 else 4 * parts)))
        if parts > 1:
            combined += Work(rows=num_rows * case.d_v * (4 * parts + item))
            rows_combined += num_rows
    return total, programs, combined, rows_combined


def steps(case: RaggedLatentCase, backend: str, device: Device, machine: Machine, tile: Any) -> Iterator[Step]:
    """The steps of a case: one launch for all sequences, or one for the long and one for the short sequences."""
    del backend
    combined, rows = Work(), 0
    floor, _ = case.floor_seconds(machine.memory, machine.multiplying)
    needed = case.needed_bytes()
    for launch in compiling.record(case.attention_call(device), tile):
        if launch.name == "ragged_latent_kernel":
            work, programs, combined, rows = attended(case, launch.constants)
            yield Step(launch.name, work, needed, floor, programs)
            floor, needed = 0.0, 0
    if rows:
        yield Step("combine_kernel", combined, programs={(): rows})
