"""The launches of latent attention and their work, on Triton and on CUDA.

The CUDA kernels have no index arithmetic in Python that could be run. So this module repeats how the kernels of both
backends divide a job.
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
from ragged_attention.calls import CACHE_FORMATS, Call, Device


def latent_bytes(cache_format: str) -> int:
    """The bytes that a kernel reads per row of a quantised cache, without padding."""
    form = CACHE_FORMATS[cache_format]
    return form.row_bytes + form.scale_bytes


def decoded_bytes(row_format: Any) -> int:
    """The bytes per row, without padding, of a cache that a kernel has dequantised for another.

    They are 16-bit values, and float32 scales if the format folds them into logits and weights.
    """
    scales = 4 * row_format.VALUES // row_format.GROUP if row_format.FOLDED else 0
    return 2 * (row_format.VALUES + row_format.ROTARY) + scales


@dataclasses.dataclass(frozen=True, slots=True)
class Tiles:
    """A kernel's tile of rows and keys, its KV splits, and the columns that it multiplies per row and key."""

    rows: int
    keys: int
    num_splits: int
    least_blocks: int  # the smallest number of key blocks per KV split
    columns: int
    columns_again: int
    query_bytes: int  # bytes read per row of queries
    row_bytes: tuple[int, int]  # bytes read per row of the first and of the second cache


def stored_bytes(case: LatentCase) -> tuple[int, int]:
    """The bytes that are read per row of the first and of the second cache, for one KV head."""
    formats = (case.cache_format, case.extra_format or case.cache_format)
    plain = case.d_qk * ITEMSIZE[case.dtype]
    first, second = (plain if name == "plain" else latent_bytes(name) for name in formats)
    return first, second


def triton_tiles(case: LatentCase, launch: compiling.Launch, *, decoded: bool) -> Tiles:
    constants = launch.constants
    columns, again, queried = columns_of(constants)
    return Tiles(
        rows=constants["BLOCK_H"],
        keys=constants["BLOCK_KV"],
        num_splits=constants["fixed_splits"],
        least_blocks=constants["MIN_BLOCKS"],
        columns=columns,
        columns_again=again,
        query_bytes=queried * ITEMSIZE[case.dtype],
        row_bytes=(decoded_bytes(launch.arguments["CONFIG"].plain.FORMAT), 0) if decoded else stored_bytes(case),
    )


def columns_of(constants: KernelArgs) -> tuple[int, int, int]:
    """(columns that a Triton kernel multiplies per row and key, columns multiplied again, columns read per query).

    Columns are multiplied again to correct rounding.
    """
    values, grouped = constants["WIDTH"] * constants["GROUPS"], constants["GROUPED"]
    rest = constants["REST_PAD"] if constants["REST"] else 0
    columns = 2 * values + rest * (2 if constants["REST_IS_VALUE"] else 1)
    again = values * (constants["PRODUCTS"] - 1) + rest * (constants["REST_PRODUCTS"] - 1)
    return columns, again, grouped + constants["REST"] + (grouped if constants["RESCALED"] else 0)


def cuda_tiles(case: LatentCase, call: Call, tile: Any) -> Tiles:
    """The tiles of the CUDA sources: 64 keys and 64 rows.

    Kernels for few heads have fewer rows: the number of heads, rounded up to a power of two, and at least 8.
    """
    latent = importlib.import_module("ragged_attention.kernels_cuda._latent")
    return Tiles(
        rows=max(8, latent.power_of_2(case.num_q_heads)) if latent.is_narrow(call, tile) else latent.ROWS,
        keys=64,
        num_splits=tile.num_splits,
        least_blocks=1,
        columns=case.d_qk + case.d_v,
        columns_again=0,
        query_bytes=case.d_qk * ITEMSIZE[case.dtype],
        row_bytes=stored_bytes(case),
    )


def attended(case: LatentCase, tiles: Tiles) -> tuple[Work, Programs, Work, Programs]:
    """(work of the attention kernel, its programs, work of the kernel that merges KV splits, its programs)."""
    tokens = 1 if case.topk else case.num_q_tokens  # tokens per job
    group = case.num_q_heads // case.num_kv_heads
    jobs, rows = case.num_tokens // tokens * case.num_kv_heads, group * tokens
    lengths = [length for length in (case.topk, case.extra_topk) if length] or [case.max_len]
    listed = sum(length * width for length, width in zip(lengths, tiles.row_bytes, strict=False))
    blocks = sum(cdiv(length, tiles.keys) for length in lengths)
    longest = max(cdiv(blocks, tiles.num_splits), tiles.least_blocks)
    parts = cdiv(blocks, longest)
    job, programs = Work(), collections.Counter()
    for row in range(0, rows, tiles.rows):
        read, count = listed, blocks
        if case.causal:
            hidden = max(tokens - 1 - (row + tiles.rows - 1) // group, 0)
            read, count = listed - hidden * tiles.row_bytes[0], cdiv(case.max_len - hidden, tiles.keys)
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
    """The bytes that come from memory.

    A row in several lists is read again if the L2 cache has evicted it. Programs that share a list or a sequence run at
    the same time, so they read its rows from memory once.
    """
    needed = case.needed_cache_bytes(widths)
    again = max(work.keys / row_blocks - needed, 0) * max(0, 1 - machine.cache_size / needed)
    return case.needed_bytes() + needed - case.needed_cache_bytes(case.widths) + again


def decoded(case: LatentCase, launch: compiling.Launch) -> Step:
    """The step of the kernel that dequantises the whole cache, although the case needs only the listed rows."""
    num_slots = launch.operands[-1].shape[0]
    requested = num_slots * latent_bytes(case.cache_format)
    written = num_slots * decoded_bytes(launch.arguments["DECODED"].plain)
    return Step(launch.name, Work(keys=requested, rows=written), requested + written, programs={(): launch.programs})


def steps(case: LatentCase, backend: str, device: Device, machine: Machine, tile: Any) -> Iterator[Step]:
    """The steps of a case. The floor of a case with lists includes one read from the L2 cache per list entry."""
    call, widths = case.attention_call(device), case.widths
    if backend == "cuda":
        tiles = cuda_tiles(case, call, tile or dispatch.load(case.operation, "cuda").heuristic(call))
    else:
        launches = {launch.name: launch for launch in compiling.record(call, tile)}
        decoding = "decode_kernel" in launches
        tiles = triton_tiles(case, launches["latent_kernel"], decoded=decoding)
        if decoding:
            widths = tiles.row_bytes
            yield decoded(case, launches["decode_kernel"])
    floor, _ = case.floor_seconds(machine.memory, machine.multiplying)
    if case.topk:
        floor = max(floor, case.listed_bytes() / machine.cache)
    work, programs, combined, rows_combined = attended(case, tiles)
    rows = case.num_q_heads // case.num_kv_heads * (1 if case.topk else case.num_q_tokens)
    memory = fetched(case, work, cdiv(rows, tiles.rows), machine, widths)
    yield Step("latent_kernel", work, memory, floor, programs)
    if combined.rows:
        yield Step("combine_kernel", combined, programs=rows_combined)


def planned(case: LatentCase, device: Device) -> tuple[str, ...]:
    """The backends: Triton, and CUDA if it has a kernel for the case. The kernel need not be built."""
    latent = importlib.import_module("ragged_attention.kernels_cuda._latent")
    cuda_takes = latent.cannot_take(case.attention_call(device), sparse=case.topk > 0) is None
    return ("triton", "cuda") if cuda_takes else ("triton",)
