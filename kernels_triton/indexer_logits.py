"""The lightning indexer's logits in Triton: the selection of a kernel and its block sizes, and the launches."""

import dataclasses
from typing import Any

from ragged_attention.calls import IndexerCall, IndexerLogits
from ragged_attention.kernels_triton._formats import e4m3_format
from ragged_attention.kernels_triton._indexer import (
    Config,
    Shape,
    Sight,
    fill_kernel,
    list_logits_kernel,
    tile_logits_kernel,
    walk_logits_kernel,
)
from ragged_attention.kernels_triton._splits import FEW_TOKENS
from ragged_attention.kernels_triton._tiles import (
    OLDER_COMPILER,
    WGMMA,
    cdiv,
    expect_between,
    expect_power_of_two,
    fit,
    item_size,
    launchable,
    next_power_of_2,
    on_cuda_cores,
    page_unit,
    stride_arguments,
)

FEATURES = frozenset({
    "key_scale", "starts", "stops", "relative", "max_keys", "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "ratio",
    "indices",
})  # fmt: skip
PROGRAMS = 16  # walk kernel programs per multiprocessor: many programs balance different lengths
FILL_BLOCK = 4096  # logits that one program of `fill_kernel` sets to -inf
MAX_HEADS = 64  # maximum heads per product


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The tunable sizes, and which kernel runs."""

    walk: bool = False  # True selects the walk kernel, False the tile kernel
    block_n: int = 128  # keys per product
    block_t: int = 32  # tokens per program of the tile kernel
    num_parts: int = 1  # programs of the walk kernel per token
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self) -> None:
        expect_power_of_two(self, block_n=(16, 256), block_t=(1, 256), num_warps=(1, 16))
        expect_between(self, num_parts=(1, 65535), num_stages=(1, 8))


def why_not(call: IndexerCall) -> str | None:
    return launchable(call, tile_logits_kernel)


def heuristic(call: IndexerLogits) -> Tile:
    """The walk kernel's tile if sequences average at most FEW_TOKENS query tokens, else the tile kernel's.

    A call with lists of keys runs the list kernel. It has the sizes of the walk kernel, because a program of each of
    these two kernels has only one token.
    """
    return tile_for(call, call.listed or decodes(call))


def invariant_tile(call: IndexerLogits) -> Tile:
    """A batch-invariant tile. Without lists, it selects the tile kernel, because the walk kernel rounds differently."""
    return tile_for(call, call.listed)


def decodes(call: Any) -> bool:
    """Whether sequences have at most FEW_TOKENS query tokens on average. Packed keys count as one sequence."""
    return call.num_tokens <= FEW_TOKENS * (max(call.page_indices.shape[0], 1) if call.paged else 1)


def tile_for(call: Any, walk: bool) -> Tile:
    """The tile of a kernel, with sizes that compile without spills in all cases of docs/compile_matrix.md."""
    block_n, num_warps, num_stages = sizes(call, walk)
    block_n, num_stages = fit_blocks(call, walk, block_n, num_stages)
    parts = cdiv(PROGRAMS * call.device.num_multiprocessors, max(call.num_tokens, 1))
    return Tile(
        walk=walk,
        block_n=block_n,
        block_t=max(1, min(32, next_power_of_2(call.num_tokens))),
        num_parts=max(1, min(parts, cdiv(call.columns, 4 * block_n))),
        num_warps=num_warps,
        num_stages=num_stages,
    )


def sizes(call: Any, walk: bool) -> tuple[int, int, int]:
    """(keys, warps, stages) of a tile, whether or not they fit shared memory."""
    arch = call.device.arch
    if on_cuda_cores(call):
        if call.listed:
            return 32, 4, 2
        if walk or (arch == "sm_120" and not OLDER_COMPILER):
            return 64, 4, 2
        return (64 if call.paged else 32, 4, 1) if OLDER_COMPILER else (32, 4, 2)  # other sizes spill
    if not arch.startswith("sm_"):
        return 64, 4, 2
    if walk and item_size(call.q) == 2 and call.key_dtype == "float8_e4m3fn":
        return 64, 4, 3  # decoding takes registers: 4 programs of 64 keys fit a multiprocessor, but only 2 of 128
    if walk or (arch in WGMMA and call.head_dim <= 128):
        return 128, 4, 3
    if item_size(call.q) == 1 and not has_units(call) and call.num_heads <= MAX_HEADS:
        return 128, 8, 3  # decoding queries takes registers
    return 64, 8 if OLDER_COMPILER and call.num_heads <= MAX_HEADS else 4, 3


def fit_blocks(call: Any, walk: bool, block_n: int, stages: int) -> tuple[int, int]:
    """(keys, stages), reduced until the held operand and one streamed operand per stage fit in shared memory."""
    block_h, block_d = blocks(call)
    width = block_d * max(item_size(call.q), 1 if has_units(call) else 2)

    def size(keys: int, stages: int) -> int:
        held, visited = (block_h, keys) if walk else (keys, block_h)
        return (held + stages * visited) * width

    return fit(call, block_n, stages, size, good_keys=64)


def has_units(call: Any) -> bool:
    """Whether matrix units multiply the e4m3 codes of queries and keys directly."""
    arch = call.device.arch
    return call.key_dtype == "float8_e4m3fn" and item_size(call.q) == 1 and e4m3_format(arch) == "e4m3"


def blocks(call: Any) -> tuple[int, int]:
    """(heads, columns) of one product."""
    heads = min(next_power_of_2(max(call.num_heads, 16)), MAX_HEADS)
    if on_cuda_cores(call):
        return 32, 16
    return heads, max(next_power_of_2(call.head_dim), 32)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A call's arguments in the kernels' terms."""

    call: Any
    arrays: tuple[Any, ...]  # in the kernels' order; the first, q, is also the stand-in for absent arrays
    tables: dict[str, Any]  # numeric arguments about visible keys
    addresses: dict[str, Any]  # numeric arguments about the addresses of queries and keys
    sight: Sight
    shape: Shape


def work_of(call: Any, launch: Any) -> Work:
    """The `Work` of a call, with q as a stand-in for absent arrays."""
    q, weights = launch.packed(call.q), launch.packed(call.weights)
    keys = launch.words(call.keys, packed_rows=True) if call.bytes else call.keys
    scale = q if call.key_scale is None else call.key_scale
    names = ("starts", "stops", "page_indices", "kv_lens", "cu_q_lens")
    optional = [q if (array := getattr(call, name)) is None else launch.packed(array) for name in names]
    num_seqs = q if call.num_seqs is None else call.num_seqs
    page, slot = (launch.strides(keys) if call.paged else (0, *launch.strides(keys)))[:2]
    scale_page, scale_slot = (0, 0) if call.key_scale is None else (0, *launch.strides(call.key_scale))[-2:]
    unit = page_unit(page)
    return Work(
        call=call,
        arrays=(q, keys, weights, scale, *optional, num_seqs),
        tables={
            "num_tokens": call.num_tokens,
            "max_num_seqs": call.page_indices.shape[0] if call.paged else 0,
            "capacity": call.token_capacity if call.paged else 0,
            "num_kv_tokens": call.columns if call.paged else call.keys.shape[0],
            "longest": 0 if call.paged else min(call.columns, call.keys.shape[0]),
        },
        addresses={
            "num_pages": keys.shape[0],
            "table_stride": launch.strides(optional[2])[0],
            "weights_stride": launch.strides(weights)[0],
            "page_stride": page // unit,
            "slot_stride": slot,
            "scale_page_stride": scale_page,
            "scale_slot_stride": scale_slot,
            **stride_arguments(launch, ("token", "head"), q=q),
        },
        sight=Sight(
            PAGED=call.paged,
            RATIO=call.ratio,
            RELATIVE=bool(call.relative),
            HAS_NUM_SEQS=call.num_seqs is not None,
        ),
        shape=shape_of(call, unit),
    )


def shape_of(call: Any, unit: int) -> Shape:
    """The sizes of a call's arrays and the formats of its queries and keys, as a `Shape`."""
    block_h, block_d = blocks(call)
    codes = "e4m3_units" if has_units(call) else e4m3_format(call.device.arch)
    return Shape(
        HEADS=call.num_heads,
        BLOCK_H=block_h,
        D=call.head_dim,
        BLOCK_D=block_d,
        Q_FORMAT=codes if item_size(call.q) == 1 else "plain",
        KEY_FORMAT=codes if call.key_dtype == "float8_e4m3fn" else "plain",
        PAGE_SIZE=call.page_size if call.paged else 0,
        PAGE_UNIT=unit,
        SCALES="page" if call.bytes else "none" if call.key_scale is None else "array",
    )


def candidate_size(call: Any) -> int:
    """The number of positions per candidate block, at most the number of columns."""
    return min(call.candidate_block_size, max(call.columns, 1))


def enqueue(
    work: Work, tile: Tile, launch: Any, first_token: int, num_rows: int, row_stride: int, target: Any, *, fill: bool,
    rows: int | None = None,
) -> Any:  # fmt: skip
    """Enqueue the logits of `num_rows` tokens; returns the array to which they are written.

    This is `target` or, if it is None, a new array [rows, row_stride], where `rows` is `num_rows` by default. With
    `fill`, all logits are written; otherwise only the logits of seen keys or, if tokens have lists of candidates, of
    seen candidates.
    """
    candidates = getattr(work.call, "candidate_blocks", None)
    common = {
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "first_token": first_token,
        "row_stride": row_stride,
        **work.tables,
        **work.addresses,
        "CONFIG": Config(
            SHAPE=work.shape,
            SIGHT=work.sight,
            BLOCK_N=tile.block_n,
            BLOCK_T=tile.block_t,
            FILL=fill,
            HAS_CANDIDATES=candidates is not None,
            CANDIDATE_SIZE=1 if candidates is None else candidate_size(work.call),
        ),
    }
    outputs = [((rows or num_rows, row_stride), "float32")] if target is None else []
    last = work.arrays[0] if target is None else target
    if not tile.walk and candidates is None:
        inputs = (*work.arrays, last)
        grid = (cdiv(work.tables["num_kv_tokens"], tile.block_n), cdiv(num_rows, tile.block_t))
        numbers = {"num_rows": num_rows}
        kernel = tile_logits_kernel
    else:
        listed = work.arrays[0] if candidates is None else launch.packed(candidates)
        inputs = (*work.arrays, listed, last)
        grid = (num_rows, tile.num_parts)
        numbers = {
            "num_parts": tile.num_parts,
            "num_entries": 0 if candidates is None else candidates.shape[1],
            "candidates_stride": launch.strides(listed)[0],
        }
        kernel = walk_logits_kernel
    inplace = () if target is None else (len(inputs) - 1,)
    return launch(kernel, grid, inputs, outputs, inplace=inplace, **common, **numbers)[0]


def filled(work: Work, launch: Any, num_rows: int, row_stride: int, target: Any = None) -> Any:
    """Enqueue `fill_kernel`; returns logits that are all -inf, in the array `target` unless it is None."""
    (logits,) = launch(
        fill_kernel,
        (cdiv(num_rows * row_stride, FILL_BLOCK),),
        (work.arrays[0] if target is None else target,),
        [((num_rows, row_stride), "float32")] if target is None else [],
        inplace=() if target is None else (0,),
        count=num_rows * row_stride,
        BLOCK=FILL_BLOCK,
    )
    return logits


def logits_of_lists(call: IndexerLogits, tile: Tile, launch: Any) -> Any:
    """Enqueue the kernel for lists of packed keys; returns the logits."""
    q, weights, lists = launch.packed(call.q), launch.packed(call.weights), launch.packed(call.indices)
    scale = q if call.key_scale is None else call.key_scale
    (logits,) = launch(
        list_logits_kernel,
        (call.num_tokens, cdiv(call.columns, tile.block_n)),
        (q, call.keys, weights, scale, lists),
        [((call.num_tokens, call.columns), "float32")],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        num_kv_tokens=call.keys.shape[0],
        num_entries=call.columns,
        list_stride=launch.strides(lists)[0],
        weights_stride=launch.strides(weights)[0],
        slot_stride=launch.strides(call.keys)[0],
        scale_slot_stride=0 if call.key_scale is None else launch.strides(scale)[0],
        **stride_arguments(launch, ("token", "head"), q=q),
        SHAPE=shape_of(call, 1),
        BLOCK_N=tile.block_n,
    )
    return logits


def run(call: IndexerLogits, tile: Tile, launch: Any) -> Any:
    """Enqueue the kernels; returns the logits."""
    if call.listed:
        return logits_of_lists(call, tile, launch)
    work, shape = work_of(call, launch), (call.num_tokens, call.columns)
    target = filled(work, launch, *shape) if call.relative else None
    return enqueue(work, tile, launch, 0, *shape, target, fill=not call.relative)
