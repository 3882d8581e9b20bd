"""The plans of ragged attention over latents."""

import collections
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from benchmarks.compiled import compiling
from benchmarks.compiled.compiling import ITEMSIZE
from benchmarks.roofline import KernelArgs, Machine, Programs, Step, Work, cdiv
from benchmarks.roofline.mla import columns_of, latent_bytes
from benchmarks.roofline.paged import Rows
from ragged_attention.calls import Device

if TYPE_CHECKING:
    from benchmarks.cases.ragged_mla import RaggedLatentCase


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """The rows of a sequence, the blocks of keys that they see, and in how many of them its parts are."""

    q_len: int
    kv_len: int
    short: bool
    begin: int
    end: int
    each: int  # blocks of a part

    @property
    def parts(self) -> range:
        return range(self.begin, self.end, self.each)


def spans(case: "RaggedLatentCase", kernel_args: KernelArgs) -> list[Span]:
    """Every sequence of a launch; the keys of all short ones are cut in parts of one length."""
    block, found = kernel_args["BLOCK_KV"], []
    for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True):
        rows = Rows(kv_len - q_len, kv_len - 1, kv_len, kernel_args["window"])
        short = q_len * case.num_q_heads <= kernel_args["SHORT_ROWS"]
        if kernel_args["SHORT" if short else "LONG"]:
            found.append(Span(q_len, kv_len, short, rows.first // block, cdiv(rows.last, block), 2**31))
    if kernel_args["WHOLE"]:
        return found
    blocks = sum(span.end - span.begin for span in found if span.short)
    each = max(cdiv(blocks, kernel_args["num_splits"]), kernel_args["MIN_BLOCKS"])
    return [dataclasses.replace(span, each=each) if span.short else span for span in found]


def attended(case: "RaggedLatentCase", kernel_args: KernelArgs) -> tuple[Work, Programs, Work, int]:
    """What a launch of the attention kernel does, and what the kernel that combines its parts, of so many rows."""
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
            rows = Rows(ahead + first_row // heads, ahead + high, span.kv_len, kernel_args["window"])
            for part in span.parts:
                begin = max(part, rows.first // block)
                end = min(part + span.each, span.end, cdiv(rows.last, block))
                pairs = 2 * count * block * max(end - begin, 0)
                seen = max(min(rows.last, end * block) - max(rows.first, begin * block), 0)
                total += Work(flops=pairs * columns, again=pairs * again, keys=seen * key_bytes)
                programs[(float(max(end - begin, 0)),)] += 1
        parts = len(span.parts)
        total += Work(rows=num_rows * (parts * queried * item + case.d_v * (item if parts == 1 else 4 * parts)))
        if parts > 1:
            combined += Work(rows=num_rows * case.d_v * (4 * parts + item))
            rows_combined += num_rows
    return total, programs, combined, rows_combined


def steps(case: "RaggedLatentCase", device: Device, machine: Machine, tile: Any) -> Iterator[Step]:
    """One launch for all sequences, or one for those that are short after one for the others."""
    combined, rows = Work(), 0
    floor, _ = case.floor_seconds(machine.memory, machine.multiplying)
    needed = case.needed_bytes()
    for launch in compiling.record(case.attention_call(device), tile):
        if launch.name == "ragged_latent_kernel":
            work, programs, combined, rows = attended(case, launch.arguments)
            yield Step(launch.name, work, needed, floor, programs)
            floor, needed = 0.0, 0
    if rows:
        yield Step("combine_kernel", combined, programs={(): rows})
