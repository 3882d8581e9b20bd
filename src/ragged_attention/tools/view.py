"""Show a batch: its pages, the keys that each program visits, and how the programs fill a GPU.

Nothing is launched, and without --q-lens and --kv-lens a sample batch is shown. The tiles are those that the Triton
backend would select for the device. The keys that a program visits follow from the kernels' own index arithmetic
(`ragged_attention.tools.schedule`). The time of a program is its number of keys, so the schedule shows which programs
wait for others, but no microseconds.
"""

import argparse
import collections
import dataclasses
import importlib.util
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from ragged_attention import dispatch, key_ranges
from ragged_attention.calls import CACHE_FORMATS, Call, Device, MakeDecodeSchedule, MlaDecode
from ragged_attention.errors import InvalidInput, Unsupported
from ragged_attention.explain import VIEWED
from ragged_attention.tools import drawing
from ragged_attention.tools.arguments import Parser, at_least, dtype, heads
from ragged_attention.tools.gpus import GPUS
from ragged_attention.tools.samples import FRAMEWORKS, KV_FORMATS, LatentSample, Sample, device_of
from ragged_attention.tools.schedule import Launch, Program, Turn, Visit, filled, launches_of, timeline

DEFAULT_GPU = "h200"
# The lengths of the batch to show if none are given: query tokens and keys of each sequence, by operation.
SAMPLE_LENGTHS = {
    "ragged_paged_attention": ("15x1,128", "15x2000,4100"),
    "mla_decode": ("16x1", "15x2000,65500"),
}
CELLS = (12, 64)  # minimum and maximum number of a bar's cells in the terminal
BESIDE = 60  # columns of the terminal that a row needs in addition to its bar
MASKS = {
    "chunk": "chunk=SIZE", "block": "block=SIZE", "sides": "sides=LEFT,RIGHT", "prefix": "prefix=KEYS,WINDOW",
    "span": "span=BEGIN,END",
}  # fmt: skip
SHADES = " ▁▂▃▄▅▆▇█"
MAX_ROWS = 24
MAX_ENTRIES = 2**26  # maximum size of page tables, which are arrays with values here


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """The lengths of a batch, its sample, and its device, which determine the launches."""

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    sample: Sample | LatentSample
    device: Device
    scheduled: bool = False
    mask: str | None = None  # a name from MASKS and its numbers, such as "chunk=64"

    @property
    def device_name(self) -> str:
        return self.device.name or self.device.arch or self.device.platform

    @property
    def lengths(self) -> list[tuple[int, int]]:
        return list(zip(self.q_lens, self.kv_lens, strict=True))

    @property
    def pages(self) -> list[int]:
        return [-(-kv_len // self.sample.page_size) for kv_len in self.kv_lens]

    @property
    def keys(self) -> list[int]:
        """The number of keys of each sequence or, in sparse calls, of its list."""
        topk = self.sample.topk if isinstance(self.sample, LatentSample) else 0
        return [min(kv_len, topk) if topk else kv_len for kv_len in self.kv_lens]

    def table(self) -> Any:
        """Page tables. The pages are assigned in ascending order."""
        ends = np.cumsum(self.pages)
        columns = np.arange(max(self.pages))
        pages = (ends - self.pages)[:, None] + columns
        return np.where(columns < np.asarray(self.pages)[:, None], pages, -1).astype(np.int32)

    @property
    def operation(self) -> str:
        return "ragged_paged_attention" if isinstance(self.sample, Sample) else "mla_decode"

    def arrays(self) -> dict[str, Any]:
        """The lengths and tables, as arrays with values."""
        kv_lens = np.asarray(self.kv_lens, np.int32)
        if isinstance(self.sample, Sample):
            edges = np.cumsum([0, *self.q_lens]).astype(np.int32)
            ranges = {} if self.mask is None else {"key_ranges": ranges_of(self.mask, edges, kv_lens)}
            return {"kv_lens": kv_lens, "page_indices": self.table(), "cu_q_lens": edges, **ranges}
        if self.sample.topk:
            return {"topk_lens": np.asarray(self.keys, np.int32)}
        return {"kv_lens": kv_lens, "page_indices": self.table()}

    def call(self) -> Call:
        """The record of the call. All arrays except lengths and tables are only shapes."""
        scheduled = {"schedule": self.schedule()} if self.scheduled else {}
        return self.sample.call(self.operation, self.device, **self.arrays(), **scheduled)

    def schedule(self) -> Any:
        """The schedule that the reference implementation of `make_decode_schedule` returns."""
        sample: Any = self.sample
        rows = sample.num_q_heads if sample.topk else sample.num_q_tokens * sample.num_q_heads // sample.num_kv_heads
        side_by_side = sample.num_q_tokens if sample.topk else sample.num_kv_heads
        made = MakeDecodeSchedule(
            lens=np.asarray(self.keys, np.int32), sparse=sample.topk > 0, programs=side_by_side * -(-rows // 64),
            device=self.device,
        )  # fmt: skip
        reference: Any = dispatch.load("make_decode_schedule", "reference")
        return reference.make_decode_schedule(made.lens, None, made.sparse, made.num_ranges, made.overhead)

    def launches(self) -> list[Launch]:
        call = self.call()
        backend: Any = dispatch.load(call.OPERATION, "triton")
        if self.device.platform != "cpu" and (reason := backend.why_not(call)):
            raise Unsupported(f"triton: {reason}")
        return launches_of(call)


def main(argv: Sequence[str] | None = None) -> int:
    """Show the batch that the arguments describe. With --svg, also draw it to a file."""
    parsed = _parser().parse_args(argv)
    console = Console()
    if parsed.q_lens is None and parsed.kv_lens is None:
        parsed.q_lens, parsed.kv_lens = SAMPLE_LENGTHS[parsed.operation]
        given = f"--q-lens {parsed.q_lens} --kv-lens {parsed.kv_lens}"
        console.print(f"This is a sample batch. Show another one by {given}", highlight=False, soft_wrap=True)
    elif parsed.q_lens is None or parsed.kv_lens is None:
        given, lacking = ("kv", "q") if parsed.q_lens is None else ("q", "kv")
        raise InvalidInput(f"expected --{lacking}-lens with --{given}-lens, one number for each sequence, got none")
    batch = batch_of(parsed)
    seq = max(range(len(batch.kv_lens)), key=batch.keys.__getitem__) if parsed.sequence is None else parsed.sequence
    if not 0 <= seq < len(batch.kv_lens):
        raise InvalidInput(f"expected --sequence from 0 to {len(batch.kv_lens) - 1}, got {seq}")
    launches = batch.launches()
    show_batch(console, batch, launches)
    show_keys(console, batch, launches, seq)
    show_launches(console, batch, launches)
    if parsed.svg:
        try:
            parsed.svg.write_text(picture(batch, launches, seq).svg())
        except OSError as error:
            raise InvalidInput(f"expected --svg to name a file to write, got {parsed.svg} ({error.strerror})") from None
        console.print(f"drawn in {escape(str(parsed.svg))}", highlight=False, soft_wrap=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="ragged-attention view", description=__doc__)
    add = parser.add_argument
    add("--operation", choices=VIEWED, default=VIEWED[0], help=f"default: {VIEWED[0]}")
    add("--q-lens", metavar="N,N,...", help="query tokens of each sequence: 1,1,512 or 63x1,512")
    add("--kv-lens", metavar="N,N,...", help="keys of each sequence, with this step's: 4096,131072,512")
    add("--page-size", type=at_least(1), metavar="N", help="positions in a page (default: 16 or, for latents, 64)")
    add("--heads", type=heads, metavar="H/K", help="query heads and KV heads (default: 32/8 or, for latents, 128/1)")
    add("--dtype", type=dtype, default="bfloat16", metavar="DTYPE", help="the queries' dtype (default: bfloat16)")
    add(
        "--device", metavar="NAME",
        help=f"{', '.join(GPUS)}, an architecture such as sm_89, or a device of this machine, such as cpu "
        f"(default: this machine's GPU or else {DEFAULT_GPU})",
    )  # fmt: skip
    add(
        "--sequence", type=at_least(0), metavar="N",
        help="the sequence whose keys are shown (default: the one with the most keys)",
    )  # fmt: skip
    add("--svg", type=Path, metavar="FILE", help="also draw the batch, as an SVG picture")
    add = parser.add_argument_group("for paged attention").add_argument
    add("--head-dim", type=at_least(1), metavar="N", help=f"default: {Sample.head_dim}")
    add(
        "--cache-dtype", type=dtype, metavar="DTYPE", help="the pages' dtype, such as fp8 or int8 (default: as --dtype)"
    )
    add("--kv-format", metavar="NAME", help=f"a format whose rows have scales: {', '.join(KV_FORMATS)} (default: none)")
    add(
        "--sliding-window", "--window", type=int, metavar="N",
        help="the number of keys that a query sees at most (default: all)",
    )  # fmt: skip
    add("--mask", metavar="KIND=N,...", help=f"ranges of keys: {', '.join(MASKS.values())}")
    add("--draft", type=int, metavar="WIDTH", help="columns of a draft mask, for speculative decoding over a tree")
    add = parser.add_argument_group("for latent attention (--operation mla_decode)").add_argument
    add(
        "--cache-format",
        metavar="NAME",
        help=f"plain, {', '.join(CACHE_FORMATS)} (default: {LatentSample.cache_format})",
    )
    add("--topk", type=at_least(0), metavar="N", help="keys in a query's list (default: 0, a dense call)")
    add("--schedule", action="store_true", help="divide the keys by make_decode_schedule instead of by shapes")
    return parser


def _lengths(text: str) -> tuple[int, ...]:
    lengths: list[int] = []
    for word in text.split(","):
        if not (match := re.fullmatch(r"\s*(?:([1-9]\d{0,5})x)?(\d{1,9})\s*", word)):
            raise InvalidInput(f"expected lengths such as 1,1,512 or 63x1,512, got {text!r}")
        lengths += [int(match[2])] * int(match[1] or 1)
    return tuple(lengths)


def ranges_of(mask: str, cu_q_lens: Any, kv_lens: Any) -> Any:
    """The ranges of keys of a mask in the form of MASKS, such as "chunk=256"."""
    match = re.fullmatch(r"(\w+)=(\d{1,9})(?:,(\d{1,9}))?", mask)
    if not match or match[1] not in MASKS or (match[3] is None) == ("," in MASKS[match[1]]):
        raise InvalidInput(f"expected a mask of the form {' or '.join(MASKS.values())}, got {mask!r}")
    kind, first, second = match[1], int(match[2]), int(match[3] or 0)
    tables = cu_q_lens, kv_lens, int(cu_q_lens[-1])
    if kind == "span":
        spans = np.broadcast_to(np.array([[first, second]], np.int32), (len(kv_lens), 1, 2))
        return key_ranges.span_ranges(*tables, spans=spans)
    if kind == "sides":
        return key_ranges.window_ranges(*tables, left=first, right=second)
    if kind == "prefix":
        return key_ranges.prefix_window_ranges(*tables, prefix=first, sliding_window=second)
    if kind == "chunk":
        return key_ranges.chunked_ranges(*tables, chunk=first)
    return key_ranges.block_causal_ranges(*tables, block=first)


def device_named(name: str | None) -> Device:
    """A device that runs Triton kernels, by one of the names that `device_of` takes."""
    framework = next((name for name in FRAMEWORKS if importlib.util.find_spec(name)), FRAMEWORKS[0])
    device = device_of(framework, name)
    if name is None and device.platform not in ("cuda", "rocm"):
        device = device_of(framework, DEFAULT_GPU)
    if device.platform not in ("cuda", "rocm", "cpu"):
        raise InvalidInput(f"expected device to be a GPU of NVIDIA or AMD, or cpu, got {name or device.platform!r}")
    return device


def batch_of(parsed: argparse.Namespace) -> Batch:
    """The batch that the arguments describe. Raises `InvalidInput` for invalid arguments."""
    q_lens, kv_lens = _lengths(parsed.q_lens), _lengths(parsed.kv_lens)
    if len(q_lens) != len(kv_lens):
        raise InvalidInput(f"expected as many --kv-lens as --q-lens, {len(q_lens)}, got {len(kv_lens)}")
    for seq, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        if not 1 <= q_len <= kv_len:
            raise InvalidInput(f"expected 1 <= q_len <= kv_len={kv_len} of sequence {seq}, got {q_len}")
    if (size := len(kv_lens) * -(-max(kv_lens) // (parsed.page_size or 16))) > MAX_ENTRIES:
        raise InvalidInput(f"expected page tables of at most {MAX_ENTRIES} entries, got {size}")
    latent = parsed.operation == MlaDecode.OPERATION
    for name in (
        ("head_dim", "cache_dtype", "kv_format", "sliding_window", "draft", "mask")
        if latent
        else ("cache_format", "topk", "schedule")
    ):
        if getattr(parsed, name):
            raise InvalidInput(f"expected no --{name.replace('_', '-')} of {parsed.operation}, got one")
    shapes = {"num_tokens": sum(q_lens), "max_num_seqs": len(q_lens), "max_len": max(kv_lens), "dtype": parsed.dtype}
    names = ("page_size", "head_dim", "cache_dtype", "kv_format", "draft", "cache_format")
    shapes |= {name: getattr(parsed, name) for name in names if getattr(parsed, name) is not None}
    if parsed.heads:
        shapes |= dict(zip(("num_q_heads", "num_kv_heads"), parsed.heads, strict=True))
    if not latent:
        ranges = (
            None if parsed.mask is None else ranges_of(parsed.mask, np.array([0, 0], np.int32), np.zeros(1, np.int32))
        )
        count = None if ranges is None else ranges.shape[1]
        sample: Any = Sample(**shapes, sliding_window=parsed.sliding_window, max_q_len=max(q_lens), key_ranges=count)
    elif len(set(q_lens)) > 1:
        raise InvalidInput(f"expected --q-lens of mla_decode to be all the same, got {min(q_lens)} and {max(q_lens)}")
    else:
        sample = LatentSample(**shapes, topk=parsed.topk or 0, causal=not parsed.topk and q_lens[0] > 1)
    device = device_named(parsed.device)
    return Batch(
        q_lens=q_lens, kv_lens=kv_lens, sample=sample, device=device, scheduled=parsed.schedule, mask=parsed.mask
    )


def short(kernel: str) -> str:
    return kernel.removesuffix("_kernel")


def programs_of(launches: Sequence[Launch], seq: int) -> list[tuple[Launch, Program]]:
    """The programs that work on a sequence, for one KV head."""
    return [(launch, program) for launch in launches for program in launch.programs if program.seq == seq]


def show_batch(console: Console, batch: Batch, launches: Sequence[Launch]) -> None:
    """Print each sequence, its pages and its programs. A run of sequences with equal lengths shares a row."""
    sample, size = batch.sample, batch.sample.page_size
    heads = f"{sample.num_q_heads}/{sample.num_kv_heads} heads"
    title = f"sequences: {len(batch.q_lens)}, tokens: {sum(batch.q_lens)}, {heads}, on {batch.device_name}"
    numbers = (Column(heading, justify="right") for heading in ("tokens", "keys", "pages", "unused slots"))
    table = Table("sequence", *numbers, "programs per KV head", title=title, title_justify="left")
    rows = drawing.runs(batch.lengths)
    for first, last in rows[:MAX_ROWS]:
        q_len, kv_len = batch.lengths[first]
        pages = batch.pages[first]
        counts = collections.Counter(launch.kernel for launch, _ in programs_of(launches, first))
        text = ", ".join(f"{short(name)} {count}" for name, count in counts.items())
        table.add_row(drawing.named(first, last), str(q_len), str(kv_len), str(pages), str(pages * size - kv_len), text)
    console.print(table)
    if len(rows) > MAX_ROWS:
        console.print(f"and {len(rows) - MAX_ROWS} more")
    slots, used = sum(batch.pages) * size, sum(batch.kv_lens)
    padded = max(batch.pages) * size * len(batch.kv_lens)
    console.print(
        f"pages of {size}: {sum(batch.pages)}; {used} of {slots} slots are used ({used / slots:.0%}); "
        f"padded to the longest sequence they would be {padded}",
        highlight=False,
    )


def shade(visit: Visit) -> str:
    return "▒" if visit.masked else "█"


def cells_of(console: Console) -> int:
    return min(max(console.width - BESIDE, CELLS[0]), CELLS[1])


def bar(program: Program, num_keys: int, cells: int) -> str:
    """A sequence's keys from left to right: █ visited without masks, ▒ visited with masks, · not visited."""
    line = ["·"] * cells
    for visit in sorted(program.visits, key=lambda visit: visit.masked):
        start, stop = visit.start * cells // num_keys, -(-min(visit.stop, num_keys) * cells // num_keys)
        line[start:stop] = shade(visit) * (stop - start)
    return "".join(line)


def show_keys(console: Console, batch: Batch, launches: Sequence[Launch], seq: int) -> None:
    """Print the blocks of a sequence's keys that each of its programs visits."""
    programs = programs_of(launches, seq)
    keys = batch.keys[seq]
    title = f"Keys of sequence {seq}: █ without masks, ▒ with masks, · not visited"
    program, tokens, bars = (Column(name, no_wrap=True) for name in ("program", "tokens", f"keys 0 - {keys - 1}"))
    table = Table(program, tokens, "blocks of keys", bars, title=title, title_justify="left")
    kernel = {program: launch.kernel for launch, program in programs}
    groups = drawing.groups_of(program for _, program in programs)
    for group in drawing.evenly(groups, MAX_ROWS):
        visits = sorted(group[0].visits, key=lambda visit: visit.start)
        blocks = ", ".join(f"{shade(visit)} {visit.start} - {visit.stop} by {visit.block}" for visit in visits)
        name = f"{short(kernel[group[0]])} {drawing.label_of(group)}"
        table.add_row(name, drawing.tokens_of(group[0]), blocks, bar(group[0], keys, cells_of(console)))
    console.print(table)
    if len(groups) > MAX_ROWS:
        console.print(f"{MAX_ROWS} of {len(groups)} rows")


def show_launches(console: Console, batch: Batch, launches: Sequence[Launch]) -> None:
    """Print each launch: its grid, its programs that have work, and the multiprocessors that they fill over time."""
    lanes = max(batch.device.num_multiprocessors, 1)
    headings = "kernel", "grid", "work for", "longest", f"{lanes} multiprocessors over time"
    table = Table(*headings, title="Launches, in order", title_justify="left")
    for launch in launches:
        turns = timeline(launch, lanes)
        end = max((turn.stop for turn in turns), default=0)
        shares = busy(turns, lanes, end, cells_of(console) // 2)
        text = f"{shares} {end} keys, {filled(turns, lanes):.0%} filled" if end else ""
        grid = " x ".join(map(str, launch.grid))
        working = f"{launch.working} of {np.prod(launch.grid)}"
        longest = f"{launch.longest} keys" if launch.programs else ""
        table.add_row(short(launch.kernel), grid, working, longest, text)
    console.print(table)


def busy(turns: Sequence[Turn], lanes: int, end: int, cells: int) -> str:
    """The share of multiprocessors that have work, from a kernel's start to its end."""
    edges = np.linspace(0, end, cells + 1)
    work = np.zeros(cells)
    for turn in turns:
        work += np.clip(np.minimum(edges[1:], turn.stop) - np.maximum(edges[:-1], turn.start), 0, None)
    shares = work / (max(end, 1) / cells * lanes)
    return "".join(SHADES[math.ceil(share * (len(SHADES) - 1) - 0.5) or int(share > 0)] for share in shares)


def picture(batch: Batch, launches: Sequence[Launch], seq: int) -> drawing.Drawing:
    """The batch and its pages, the keys of one sequence, and each kernel's programs on the multiprocessors."""
    lanes, size = max(batch.device.num_multiprocessors, 1), batch.sample.page_size
    where = f"{len(batch.q_lens)} sequences on {batch.device_name}"
    drawn = drawing.Drawing(
        "A batch of ragged-attention", f"{where}: their pages, the keys of sequence {seq}, and the schedule"
    )
    y = drawing.draw_pages(drawn, 20, batch.lengths, size) + 22
    drawn.text(10, y, f"Programs of sequence {seq}, and the keys that they visit", "head")
    programs = [program for _, program in programs_of(launches, seq)]
    y = drawing.draw_keys(drawn, y + 20, programs, batch.keys[seq]) + 24
    for launch in launches:
        if launch.programs:
            share = filled(timeline(launch, lanes), lanes)
            head = f"{launch.kernel}: {launch.working} programs on {lanes} multiprocessors, {share:.0%} filled"
            drawn.text(10, y, head, "head")
            drawn.legend(drawing.LEFT, y + 18, [("one", "other sequences"), ("two", f"sequence {seq}")])
            y = drawing.draw_timeline(drawn, y + 28, launch, lanes, seq) + 24
    return drawn
