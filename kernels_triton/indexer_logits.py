"""The lightning indexer's logits in Triton: which of two kernels, how large their blocks are, and their launches."""

import dataclasses
import math
from typing import Any

from ragged_attention.calls import IndexerCall, IndexerLogits
from ragged_attention.kernels_triton._formats import e4m3_format
from ragged_attention.kernels_triton._indexer import fill_kernel, tile_logits_kernel, walk_logits_kernel
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
)

FEATURES = frozenset({
    "key_scale", "starts", "stops", "relative", "max_keys", "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "ratio",
})  # fmt: skip
FEW_TOKENS = 4  # of a sequence that counts as decoding
PROGRAMS = 16  # of a walk, for each multiprocessor: sequences differ in length
FILL_BLOCK = 4096  # numbers that a program sets
MOST_HEADS = 64  # of one product


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """What may be tuned."""

    walk: bool = False  # a program has a token's queries and walks over keys; else keys, and walks over tokens
    block_n: int = 128  # keys of a product
    block_t: int = 32  # tokens of a program that has keys
    num_parts: int = 1  # programs of a token that walk over keys
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self) -> None:
        expect_power_of_two(self, block_n=(16, 256), block_t=(1, 256), num_warps=(1, 16))
        expect_between(self, num_parts=(1, 65535), num_stages=(1, 8))


def why_not(call: IndexerCall) -> str | None:
    return launchable(call, tile_logits_kernel)


def heuristic(call: IndexerLogits) -> Tile:
    """Walks over keys for few tokens a sequence, over tokens for more."""
    return tile_for(call, decodes(call))


def invariant_tile(call: IndexerLogits) -> Tile:
    """The bits of a logit depend on the kernel and on the sizes of its products."""
    return tile_for(call, False)


def decodes(call: Any) -> bool:
    """Whether sequences have so few tokens, on average, that keys are read for no more than those."""
    return call.num_tokens <= FEW_TOKENS * (max(call.page_indices.shape[0], 1) if call.paged else 1)


def tile_for(call: Any, walk: bool) -> Tile:
    """The sizes that compile without a spill for all of docs/compile_matrix.md."""
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
    """Keys, warps and stages."""
    arch = call.device.arch
    if on_cuda_cores(call):
        if walk or (arch == "sm_120" and not OLDER_COMPILER):
            return 64, 4, 2
        return (64, 4, 1) if OLDER_COMPILER else (32, 4, 2)  # the others spilled
    if not arch.startswith("sm_"):
        return 64, 4, 2
    if walk and item_size(call.q) == 2 and call.key_dtype == "float8_e4m3fn":
        return 64, 4, 3  # decoding keys takes registers, and four programs of 64 wait less than two of 128
    if walk or (arch in WGMMA and call.head_dim <= 128):
        return 128, 4, 3
    if item_size(call.q) == 1 and not has_units(call) and call.num_heads <= MOST_HEADS:
        return 128, 8, 3  # decoding queries takes registers
    return 64, 8 if OLDER_COMPILER and call.num_heads <= MOST_HEADS else 4, 3


def fit_blocks(call: Any, walk: bool, block_n: int, stages: int) -> tuple[int, int]:
    """Keys and stages that stay within the device's shared memory: what is walked over is there once a stage."""
    block_h, block_d = blocks(call)
    width = block_d * max(item_size(call.q), 1 if has_units(call) else 2)

    def size(keys: int, stages: int) -> int:
        held, walked = (block_h, keys) if walk else (keys, block_h)
        return (held + stages * walked) * width

    return fit(call, block_n, stages, size, good_keys=64)


def has_units(call: Any) -> bool:
    """Whether queries and keys of e4m3 are multiplied as they are."""
    arch = call.device.arch
    return call.key_dtype == "float8_e4m3fn" and item_size(call.q) == 1 and e4m3_format(arch) == "e4m3"


def blocks(call: Any) -> tuple[int, int]:
    """Heads and columns of one product."""
    heads = min(next_power_of_2(max(call.num_heads, 16)), MOST_HEADS)
    if on_cuda_cores(call):
        return 32, 16
    return heads, max(next_power_of_2(call.head_dim), 32)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A call in the kernels' terms."""

    call: Any
    arrays: tuple[Any, ...]
    tables: dict[str, Any]  # the arguments that say what a token sees
    rows: dict[str, Any]  # those that say where queries and keys lie, and what they are

    @property
    def stand_in(self) -> Any:
        """What kernels get for an array that is not there."""
        return self.arrays[0]


def work_of(call: Any, launch: Any) -> Work:
    """A call's arrays as kernels take them, with what stands in for those that are not given."""
    q, weights = launch.packed(call.q), launch.packed(call.weights)
    keys = launch.words(call.keys, packed_rows=True) if call.bytes else call.keys
    scale = q if call.key_scale is None else call.key_scale
    names = ("starts", "stops", "page_indices", "kv_lens", "cu_q_lens")
    given = [q if (array := getattr(call, name)) is None else launch.packed(array) for name in names]
    num_seqs = q if call.num_seqs is None else call.num_seqs
    return Work(
        call=call,
        arrays=(q, keys, weights, scale, *given, num_seqs),
        tables=tables_of(call),
        rows={
            "table_stride": launch.strides(given[2])[0],
            "q_token_stride": launch.strides(q)[0],
            "q_head_stride": launch.strides(q)[1],
            "weights_stride": launch.strides(weights)[0],
            **key_addresses(call, keys, launch),
            **shape_of(call),
        },
    )


def tables_of(call: Any) -> dict[str, Any]:
    return {
        "num_tokens": call.num_tokens,
        "max_num_seqs": call.page_indices.shape[0] if call.paged else 0,
        "capacity": call.token_capacity if call.paged else 0,
        "num_kv_tokens": call.columns if call.paged else call.keys.shape[0],
        "longest": 0 if call.paged else min(call.columns, call.keys.shape[0]),
        "HAS_NUM_SEQS": call.num_seqs is not None,
        "PAGE_SIZE": call.page_size if call.paged else 0,
        "RATIO": call.ratio,
        "RELATIVE": bool(call.relative),
    }


def key_addresses(call: Any, keys: Any, launch: Any) -> dict[str, Any]:
    """Where keys and their scales lie, as arguments of kernels."""
    page, slot = (launch.strides(keys) if call.paged else (0, *launch.strides(keys)))[:2]
    scale_page, scale_slot = (0, 0) if call.key_scale is None else (0, *launch.strides(call.key_scale))[-2:]
    # Compilers learn that a number is a multiple of 16 or nothing; pages may begin at a multiple of less.
    unit = math.gcd(page, 16)
    return {
        "num_pages": keys.shape[0],
        "page_stride": page // unit,
        "slot_stride": slot,
        "scale_page_stride": scale_page,
        "scale_slot_stride": scale_slot,
        "PAGE_UNIT": unit,
        "SCALES": "page" if call.bytes else "none" if call.key_scale is None else "array",
    }


def shape_of(call: Any) -> dict[str, Any]:
    block_h, block_d = blocks(call)
    codes = "e4m3_units" if has_units(call) else e4m3_format(call.device.arch)
    return {
        "HEADS": call.num_heads,
        "BLOCK_H": block_h,
        "D": call.head_dim,
        "BLOCK_D": block_d,
        "Q_FORMAT": codes if item_size(call.q) == 1 else "plain",
        "KEY_FORMAT": codes if call.key_dtype == "float8_e4m3fn" else "plain",
    }


def candidate_size(call: Any) -> int:
    """Positions of a block of candidates; those that there are not do not count."""
    return min(call.candidate_block_size, max(call.columns, 1))


def enqueue(
    work: Work, tile: Tile, launch: Any, first_token: int, num_rows: int, row_stride: int, given: Any, *, fill: bool,
    rows: int | None = None,
) -> Any:  # fmt: skip
    """Enqueue the logits of some tokens and return them, [num_rows, row_stride], in the memory of `given` if any.

    New memory has room for `rows`, if that is given. With `fill` all logits are written, otherwise only what a token
    sees, of its candidates if it has some.
    """
    candidates = getattr(work.call, "candidate_blocks", None)
    common = {
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "first_token": first_token,
        "row_stride": row_stride,
        "BLOCK_N": tile.block_n,
        "FILL": fill,
        **work.tables,
        **work.rows,
    }
    outputs = [((rows or num_rows, row_stride), "float32")] if given is None else []
    last = work.stand_in if given is None else given
    if not tile.walk and candidates is None:
        inputs = (*work.arrays, last)
        grid = (cdiv(work.tables["num_kv_tokens"], tile.block_n), cdiv(num_rows, tile.block_t))
        own = {"num_rows": num_rows, "BLOCK_T": tile.block_t}
        kernel = tile_logits_kernel
    else:
        listed = work.stand_in if candidates is None else launch.packed(candidates)
        inputs = (*work.arrays, listed, last)
        grid = (num_rows, tile.num_parts)
        own = {
            "num_parts": tile.num_parts,
            "num_entries": 0 if candidates is None else candidates.shape[1],
            "candidates_stride": launch.strides(listed)[0],
            "LISTED": candidates is not None,
            "SIZE": 1 if candidates is None else candidate_size(work.call),
        }
        kernel = walk_logits_kernel
    inplace = () if given is None else (len(inputs) - 1,)
    return launch(kernel, grid, inputs, outputs, inplace=inplace, **common, **own)[0]


def filled(work: Work, launch: Any, num_rows: int, row_stride: int, given: Any = None) -> Any:
    """Enqueue logits that are all -inf, and return them; in the memory of `given` if any."""
    (logits,) = launch(
        fill_kernel,
        (cdiv(num_rows * row_stride, FILL_BLOCK),),
        (work.stand_in if given is None else given,),
        [((num_rows, row_stride), "float32")] if given is None else [],
        inplace=() if given is None else (0,),
        count=num_rows * row_stride,
        BLOCK=FILL_BLOCK,
    )
    return logits


def run(call: IndexerLogits, tile: Tile, launch: Any) -> Any:
    """Enqueue the kernels; returns the logits."""
    work, shape = work_of(call, launch), (call.num_tokens, call.columns)
    given = filled(work, launch, *shape) if call.relative else None
    return enqueue(work, tile, launch, 0, *shape, given, fill=not call.relative)
