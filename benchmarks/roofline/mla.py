"""The plans of latent attention, on Triton and on CUDA.

The CUDA kernels run no Python, so this module states how kernels divide a job, for both backends.
"""

import collections
import dataclasses
import importlib
from collections.abc import Iterator
from typing import Any

from benchmarks.cases.mla import LatentCase
from benchmarks.compiled import compiling
from benchmarks.compiled.compiling import ITEMSIZE
from benchmarks.roofline.model import KernelArgs, Machine, Programs, Step, Work, cdiv
from ragged_attention import dispatch
from ragged_attention.calls import Call, Device

LATENT_BYTES = {
    "fp8_v32": 512 + 4 * 4 + 2 * 64, "fp8_v4": 448 + 7 + 2 * 64, "fp8_v41": 512 + 16, "fp4_v41": 256 + 32,
    "decoded_v32": 2 * 512 + 4 * 4 + 2 * 64, "decoded_v4": 2 * 512,
}  # fmt: skip


def latent_bytes(layout: str) -> int:
    """The bytes that a kernel reads of a row, by the kernel's name for its format and layout."""
    return LATENT_BYTES[layout.removesuffix("_page")]


@dataclasses.dataclass(frozen=True, slots=True)
class Tiles:
    """How a kernel divides the rows and keys of a job, and what it multiplies for each pair of a row and a key."""

    rows: int
    keys: int
    num_splits: int
    least_blocks: int  # the fewest blocks in a KV split
    columns: int
    columns_again: int
    query_bytes: int  # bytes that are read for each row
    format: str  # of the rows in the cache
    extra_format: str  # of the rows in the second cache


def triton_tiles(case: LatentCase, kernel_args: KernelArgs) -> Tiles:
    columns, again, queried = columns_of(case.d_v, kernel_args)
    return Tiles(
        rows=kernel_args["BLOCK_H"],
        keys=kernel_args["BLOCK_KV"],
        num_splits=kernel_args["fixed_splits"],
        least_blocks=kernel_args["MIN_BLOCKS"],
        columns=columns,
        columns_again=again,
        query_bytes=queried * ITEMSIZE[case.dtype],
        format=kernel_args["FORMAT"],
        extra_format=kernel_args["EXTRA_FORMAT"],
    )


def columns_of(d_v: int, kernel_args: KernelArgs) -> tuple[int, int, int]:
    """Three numbers of columns of a Triton kernel.

    They are the columns that it multiplies for a row and a key, those that it multiplies again to correct rounding, and
    the columns of queries that it reads.
    """
    a, b, layout = kernel_args["D_V"], kernel_args["D_REST"], kernel_args["FORMAT"]
    values = kernel_args["WIDTH"] * kernel_args["GROUPS"]
    rest = kernel_args["D_REST_PAD"] if b else 0
    columns = 2 * values + rest + (rest if layout.endswith("v32") and d_v > a else 0)
    again = values * (kernel_args["GROUP_PARTS"] - 1) + rest * (kernel_args["PARTS"] - 1)
    return columns, again, a + b + (a if layout == "fp8_v32" else 0)


def cuda_tiles(case: LatentCase, call: Call, tile: Any) -> Tiles:
    """Blocks of 64 rows, or of the heads rounded up to a power of two if they are few, and of 64 keys, as in csrc."""
    latent = importlib.import_module("ragged_attention.kernels_cuda._latent")
    return Tiles(
        rows=max(8, latent.power_of_2(case.num_q_heads)) if latent.is_narrow(call, tile) else latent.ROWS,
        keys=64,
        num_splits=tile.num_splits,
        least_blocks=1,
        columns=case.d_qk + case.d_v,
        columns_again=0,
        query_bytes=case.d_qk * ITEMSIZE[case.dtype],
        format=case.cache_format,
        extra_format=case.extra_format or case.cache_format,
    )


def attended(case: LatentCase, tiles: Tiles) -> tuple[Work, Programs, Work, Programs]:
    """The work and the programs of the attention kernel, then those of the kernel that merges its KV splits."""
    tokens = 1 if case.topk else case.num_q_tokens  # per job
    group = case.num_q_heads // case.num_kv_heads
    jobs, rows = case.num_tokens // tokens * case.num_kv_heads, group * tokens
    lengths = [length for length in (case.topk, case.extra_topk) if length] or [case.max_len]
    formats, plain = (tiles.format, tiles.extra_format), case.d_qk * ITEMSIZE[case.dtype]
    widths = [plain if layout == "plain" else latent_bytes(layout) for layout in formats]
    listed = sum(length * width for length, width in zip(lengths, widths, strict=False))
    blocks = sum(cdiv(length, tiles.keys) for length in lengths)
    longest = max(cdiv(blocks, tiles.num_splits), tiles.least_blocks)
    parts = cdiv(blocks, longest)
    job, programs = Work(), collections.Counter()
    for row in range(0, rows, tiles.rows):
        read, count = listed, blocks
        if case.causal:
            hidden = max(tokens - 1 - (row + tiles.rows - 1) // group, 0)
            read, count = listed - hidden * widths[0], cdiv(case.max_len - hidden, tiles.keys)
        pairs = 2 * tiles.rows * tiles.keys * count
        job += Work(flops=pairs * tiles.columns, again=pairs * tiles.columns_again, keys=read)
        for first in range(0, blocks, longest):
            programs[(float(max(min(longest, count - first), 0)),)] += jobs
    out, part = case.d_v * ITEMSIZE[case.dtype], 4 * case.d_v
    job += Work(rows=rows * (parts * (tiles.query_bytes + part) if parts > 1 else tiles.query_bytes + out))
    if parts == 1:
        return job * jobs, programs, Work(), {}
    return job * jobs, programs, Work(rows=rows * (parts * part + out)) * jobs, {(): rows * jobs}


def fetched(case: LatentCase, work: Work, row_blocks: int, machine: Machine, widths: tuple[int, int]) -> float:
    """The bytes that come from memory. Rows of several lists come again if the L2 cache has evicted them meanwhile.

    Programs that share a list or a sequence run at the same time and read it once.
    """
    needed = case.needed_cache_bytes(widths)
    again = max(work.keys / row_blocks - needed, 0) * max(0, 1 - machine.cache_size / needed)
    return case.needed_bytes() + needed - case.needed_cache_bytes(case.widths) + again


def decoded(case: LatentCase, launch: compiling.Launch) -> Step:
    """The kernel that decodes a whole cache, although the case needs only the rows in its lists."""
    num_slots, _, width = launch.operands[-1].shape
    asked = num_slots * LATENT_BYTES[case.cache_format]
    written = num_slots * ITEMSIZE["bfloat16"] * (width if case.cache_format == "fp8_v4" else 584)
    return Step(launch.name, Work(keys=asked, rows=written), asked + written, programs={(): launch.programs})


def steps(case: LatentCase, backend: str, device: Device, machine: Machine, tile: Any) -> Iterator[Step]:
    """The floor of a sparse case includes reading the rows of every list from the L2 cache."""
    call = case.attention_call(device)
    if backend == "cuda":
        tiles = cuda_tiles(case, call, tile or dispatch.load(case.operation, "cuda").heuristic(call))
    else:
        launches = {launch.name: launch for launch in compiling.record(call, tile)}
        tiles = triton_tiles(case, launches["latent_kernel"].arguments)
        if "decode_kernel" in launches:
            yield decoded(case, launches["decode_kernel"])
    floor, _ = case.floor_seconds(machine.memory, machine.multiplying)
    if case.topk:
        floor = max(floor, case.listed_bytes() / machine.cache)
    work, programs, combined, rows_combined = attended(case, tiles)
    rows = case.num_q_heads // case.num_kv_heads * (1 if case.topk else case.num_q_tokens)
    widths = case.widths
    if tiles.format.startswith("decoded"):
        widths = latent_bytes(tiles.format), 0
    memory = fetched(case, work, cdiv(rows, tiles.rows), machine, widths)
    yield Step("latent_kernel", work, memory, floor, programs)
    if combined.rows:
        yield Step("combine_kernel", combined, programs=rows_combined)


def planned(case: LatentCase, device: Device) -> tuple[str, ...]:
    """Triton, and CUDA if it has a kernel for the case, whether that is built or not."""
    latent = importlib.import_module("ragged_attention.kernels_cuda._latent")
    cuda_takes = latent.cannot_take(case.attention_call(device), sparse=case.topk > 0) is None
    return ("triton", "cuda") if cuda_takes else ("triton",)
