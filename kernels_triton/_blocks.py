"""The scores of blocks of keys for each index head in Triton, and the selection of blocks.

A block's score is its largest product of the query and a key. The score kernel multiplies a tile of queries with a tile
of keys. The queries are those of neighbouring tokens of one sequence, for the heads that share a head of keys. Columns
are keys, counted from the first key that a token sees. A tile holds whole blocks, so programs have no scores to merge.
Blocks are selected by the kernels of `top_k_indices`. Before that, `raise_kernel` raises the scores of blocks that are
always selected.
"""

import dataclasses
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ragged_attention.kernels_triton import indexer_logits, top_k_indices
from ragged_attention.kernels_triton._constants import Constants
from ragged_attention.kernels_triton._formats import decode, e4m3_format
from ragged_attention.kernels_triton._indexer import (
    KeyArray,
    KeyBlock,
    Operands,
    Queries,
    Sequence,
    Shape,
    Sight,
    Tables,
    clamped,
    find_sequence,
    in_format,
    key_places,
    load_keys,
    load_scales,
    pages_of_keys,
    seen_in_sequence,
    seen_range,
)
from ragged_attention.kernels_triton._sequences import VARYING, PageTable, count_sequences
from ragged_attention.kernels_triton._softmax import matmul
from ragged_attention.kernels_triton._splits import Batch
from ragged_attention.kernels_triton._tiles import (
    WGMMA,
    cdiv,
    expect_power_of_two,
    item_size,
    launchable,
    next_power_of_2,
    on_cuda_cores,
    page_unit,
    stride_arguments,
)

FEATURES = frozenset({
    "key_scale", "starts", "stops", "max_keys", "page_indices", "kv_lens", "cu_q_lens", "num_seqs",
})  # fmt: skip
MAX_ROWS = 64  # maximum rows of queries per product
MAX_COLUMNS = 128  # maximum columns of a query per product
LARGEST_FINITE: tl.constexpr = tl.constexpr(0x7F7FFFFF)  # the bits of the largest float32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The tunable sizes of the score kernel."""

    block_n: int = 128  # keys per product, unless a block has more keys
    block_t: int = 16  # tokens per program
    num_warps: int = 4

    def __post_init__(self) -> None:
        expect_power_of_two(self, block_n=(16, 256), block_t=(1, 64), num_warps=(1, 16))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Config(Constants):
    """The compile-time constants of the score kernel."""

    SHAPE: Shape
    SIGHT: Sight
    GROUP: int  # heads that share a head of keys
    GROUP_BLOCK: int  # heads per product
    BLOCK_M: int  # rows per product
    BLOCK_N: int  # keys per product
    BLOCK_T: int  # tokens per program
    BLOCK_SIZE: int  # keys per block


class Rows(NamedTuple):
    """The rows of a product, each with its token and head. `seen` is the number of columns that the token sees."""

    token: tl.tensor
    head: tl.tensor
    exists: tl.tensor
    seen: tl.tensor


@triton.jit
def load_rows(rows, first_column, queries, SHAPE: tl.constexpr):
    """The queries of the rows [BLOCK_M, BLOCK_D] as an operand; rows that do not exist are 0."""
    d = first_column + tl.arange(0, SHAPE.BLOCK_D)
    place = rows.token.to(tl.int64) * queries.token_stride + rows.head.to(tl.int64) * queries.head_stride
    mask = rows.exists[:, None]
    if SHAPE.D % SHAPE.BLOCK_D:
        mask = mask & (d < SHAPE.D)[None, :]
    stored = tl.load(
        in_format(queries.ptr, SHAPE.Q_FORMAT) + place[:, None] + d[None, :],
        mask=mask,
        other=0.0 if SHAPE.Q_FORMAT == "e4m3_units" else 0,
    )
    if SHAPE.Q_FORMAT != "plain" and SHAPE.Q_FORMAT != "e4m3_units":
        stored = decode(stored, SHAPE.Q_FORMAT, tl.float16)
    return stored


@triton.jit
def maxima(products, CONFIG: tl.constexpr):
    """The largest product of each block [BLOCK_M, BLOCK_N / BLOCK_SIZE]; NaN if one of the block's products is NaN."""
    if CONFIG.BLOCK_SIZE == 1:
        return products
    else:
        NUM_BLOCKS: tl.constexpr = CONFIG.BLOCK_N // CONFIG.BLOCK_SIZE
        by_block = tl.reshape(products, [CONFIG.BLOCK_M, NUM_BLOCKS, CONFIG.BLOCK_SIZE])
        has_nan = tl.max((by_block != by_block).to(tl.int32), 2)
        return tl.where(has_nan > 0, float("nan"), tl.max(by_block, 2))


@triton.jit
def scores_of_rows(rows, tile_start, base, seq, operands, CONFIG: tl.constexpr):
    """The scores of the blocks in a tile of columns, whose first key is `base` + `tile_start`."""
    SHAPE: tl.constexpr = CONFIG.SHAPE
    column = tile_start + tl.arange(0, CONFIG.BLOCK_N)
    products = tl.full([CONFIG.BLOCK_M, CONFIG.BLOCK_N], float("-inf"), tl.float32)
    high = tl.max(rows.seen, 0)
    if tile_start < high:
        keys = base + column
        page = pages_of_keys(keys, column < high, seq, operands.table, SHAPE.PAGE_SIZE)
        block = KeyBlock(key_places(keys, page, operands.keys, SHAPE), page)
        sums = tl.zeros([CONFIG.BLOCK_M, CONFIG.BLOCK_N], tl.float32)
        for first_column in range(0, SHAPE.D, SHAPE.BLOCK_D):
            k = load_keys(block, first_column, operands, SHAPE, False)
            sums = matmul(load_rows(rows, first_column, operands.queries, SHAPE), tl.trans(k), sums)
        if SHAPE.SCALES != "none":
            sums = sums * load_scales(keys, page, operands.keys, SHAPE)[None, :]
        visible = (column[None, :] < rows.seen[:, None]) & (page >= 0)[None, :]
        products = tl.where(visible, sums, float("-inf"))
    return maxima(products, CONFIG)


@triton.jit(do_not_specialize=(*VARYING, "num_blocks", "num_tiles"))
def block_scores_kernel(
    q_ptr, keys_ptr, scale_ptr, starts_ptr, stops_ptr, page_indices_ptr, kv_lens_ptr, cu_q_lens_ptr, num_seqs_ptr,
    given_scores_ptr, scores_ptr,
    first_token, num_rows, num_tokens, max_num_seqs, capacity, num_kv_tokens, longest, num_pages, table_stride,
    q_token_stride, q_head_stride, page_stride, slot_stride, head_stride, scale_page_stride, scale_slot_stride,
    scale_head_stride, num_blocks, num_tiles, row_stride, CONFIG: tl.constexpr,
):  # fmt: skip
    """Compute the scores of a tile of columns for a few tokens and the heads that share a head of keys.

    The tokens of one product belong to one sequence or, if keys are packed, have ranges that begin at the same key.
    """
    SHAPE: tl.constexpr = CONFIG.SHAPE
    HEAD_BLOCKS: tl.constexpr = (CONFIG.GROUP + CONFIG.GROUP_BLOCK - 1) // CONFIG.GROUP_BLOCK
    NUM_BLOCKS: tl.constexpr = CONFIG.BLOCK_N // CONFIG.BLOCK_SIZE
    tile_start = tl.program_id(0) % num_tiles * CONFIG.BLOCK_N
    token = first_token + tl.program_id(0) // num_tiles * CONFIG.BLOCK_T
    end = tl.minimum(token + CONFIG.BLOCK_T, first_token + num_rows)
    key_head = tl.program_id(1) // HEAD_BLOCKS
    first_head = tl.program_id(1) % HEAD_BLOCKS * CONFIG.GROUP_BLOCK  # index among heads that share a head of keys
    num_seqs = count_sequences(num_seqs_ptr, max_num_seqs, CONFIG.SIGHT.HAS_NUM_SEQS)
    batch = Batch(cu_q_lens_ptr, kv_lens_ptr, num_seqs, max_num_seqs, num_tokens, capacity)
    tables = Tables(batch, starts_ptr, stops_ptr, num_kv_tokens, longest)
    operands = Operands(
        Queries(q_ptr, q_token_stride, q_head_stride, q_ptr, 0),
        KeyArray(
            keys_ptr + key_head.to(tl.int64) * head_stride, page_stride, slot_stride,
            scale_ptr + key_head.to(tl.int64) * scale_head_stride, scale_page_stride, scale_slot_stride,
        ),
        PageTable(page_indices_ptr, table_stride, num_pages),
    )  # fmt: skip
    row = tl.arange(0, CONFIG.BLOCK_M)
    of_group = first_head + row % CONFIG.GROUP_BLOCK
    head = key_head * CONFIG.GROUP + of_group
    block = tile_start // CONFIG.BLOCK_SIZE + tl.arange(0, NUM_BLOCKS)
    while token < end:
        own = token + row // CONFIG.GROUP_BLOCK
        if CONFIG.SIGHT.PAGED:
            sequence = find_sequence(token, batch)
            stop = tl.minimum(tl.maximum(sequence.stop, token + 1), end)
            base = 0
            seen = seen_in_sequence(own, sequence, 1)
        else:
            sequence = Sequence(0, 0, 0, 0)
            base = clamped(tl.load(starts_ptr + token), 0, num_kv_tokens)
            first, last = seen_range(own, own < end, tables)
            stop = tl.min(tl.where((own > token) & (own < end) & (first != base), own, end), 0)
            seen = last - first
        exists = (own < stop) & (of_group < CONFIG.GROUP)
        rows = Rows(own, head, exists, tl.where(exists, seen, 0))
        scores = scores_of_rows(rows, tile_start, base, sequence.seq, operands, CONFIG)
        place = ((own - first_token).to(tl.int64) * SHAPE.HEADS + head) * row_stride
        mask = exists[:, None] & (block < num_blocks)[None, :]
        tl.store(scores_ptr + place[:, None] + block[None, :], scores, mask=mask)
        token = stop


@triton.jit(do_not_specialize=(*VARYING, "num_blocks"))
def raise_kernel(
    given_ptr, target_ptr, out_ptr, token_stride, head_stride, num_blocks, row_stride,
    HEADS: tl.constexpr, IN_PLACE: tl.constexpr, INIT: tl.constexpr, LOCAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a row of scores in which exactly the blocks that are always selected have the score infinity.

    Every other positive score becomes the next smaller float32. So none of them is infinite, and their order remains.
    """
    row = tl.program_id(0).to(tl.int64)
    target = out_ptr + row * row_stride
    source = given_ptr + row // HEADS * token_stride + row % HEADS * head_stride
    if IN_PLACE:
        source = target
    own = tl.full([], -1, tl.int32)
    for start in range(0, num_blocks, BLOCK):
        block = start + tl.arange(0, BLOCK)
        scores = tl.load(source + block, mask=block < num_blocks, other=float("-inf"))
        own = tl.maximum(own, tl.max(tl.where(scores == float("-inf"), -1, block), 0))
    for start in range(0, num_blocks, BLOCK):
        block = start + tl.arange(0, BLOCK)
        scores = tl.load(source + block, mask=block < num_blocks, other=float("-inf"))
        forced = (scores != float("-inf")) & ((block < INIT) | (block > own - LOCAL))
        bits = scores.to(tl.int32, bitcast=True)
        smaller = tl.where((bits > 0) & (bits <= LARGEST_FINITE + 1), bits - 1, bits).to(tl.float32, bitcast=True)
        tl.store(target + block, tl.where(forced, float("inf"), smaller), mask=block < num_blocks)


# ---- launches


def why_not(call: Any) -> str | None:
    return launchable(call, block_scores_kernel)


def group_block(call: Any) -> int:
    """The number of heads per product, among the heads that share a head of keys."""
    return min(next_power_of_2(call.group), MAX_ROWS)


def heuristic(call: Any) -> Tile:
    """The tile for a call. A program has one token of a decode, or enough tokens of a prompt to fill a product."""
    return tile_for(call, indexer_logits.decodes(call))


def invariant_tile(call: Any) -> Tile:
    """A batch-invariant tile."""
    return tile_for(call, False)


def tile_for(call: Any, decodes: bool) -> Tile:
    on_cores = on_cuda_cores(call)
    decodes_queries = item_size(call.q) == 1 and not indexer_logits.has_units(call)
    lacks_registers = decodes_queries or (call.head_dim > MAX_COLUMNS and call.device.arch not in WGMMA)
    rows = 16 if on_cores else MAX_ROWS // 2 if lacks_registers else MAX_ROWS
    return Tile(
        block_n=64 if on_cores else 128,
        block_t=1 if decodes else max(1, rows // group_block(call)),
        num_warps=8 if call.block_size > 128 and not on_cores else 4,
    )


def config_of(call: Any, tile: Tile, unit: int) -> Config:
    """The constants of a launch; page strides are in units of `unit` elements."""
    units = indexer_logits.has_units(call)
    codes = "e4m3_units" if units else e4m3_format(call.device.arch)
    heads = group_block(call)
    shape = Shape(
        HEADS=call.num_heads,
        BLOCK_H=heads,
        D=call.head_dim,
        BLOCK_D=16 if on_cuda_cores(call) else min(max(next_power_of_2(call.head_dim), 32), MAX_COLUMNS),
        Q_FORMAT=codes if item_size(call.q) == 1 else "plain",
        KEY_FORMAT=codes if call.key_dtype == "float8_e4m3fn" else "plain",
        PAGE_SIZE=call.page_size if call.paged else 0,
        PAGE_UNIT=unit,
        SCALES="page" if call.bytes else "none" if call.key_scale is None else "array",
    )
    sight = Sight(PAGED=call.paged, RATIO=1, RELATIVE=True, HAS_NUM_SEQS=call.num_seqs is not None)
    return Config(
        SHAPE=shape,
        SIGHT=sight,
        GROUP=call.group,
        GROUP_BLOCK=heads,
        BLOCK_M=max(16, tile.block_t * heads),
        BLOCK_N=max(tile.block_n, call.block_size),
        BLOCK_T=tile.block_t,
        BLOCK_SIZE=call.block_size,
    )


def enqueue_scores(
    call: Any, tile: Tile, launch: Any, first_token: int, num_rows: int, shape: tuple[int, ...], target: Any = None
) -> Any:
    """Enqueue the scores of `num_rows` tokens; returns `target` or a new array of `shape`, [rows, H, stride]."""
    q = launch.packed(call.q)  # also a stand-in for absent arrays
    keys = launch.words(call.keys, packed_rows=True) if call.bytes else call.keys
    names = ("starts", "stops", "page_indices", "kv_lens", "cu_q_lens")
    optional = [q if (array := getattr(call, name)) is None else launch.packed(array) for name in names]
    strides = (0, 0, 0) if call.bytes else launch.strides(keys)[:-1]
    page, slot, head = strides if len(strides) == 3 else (0, *strides)
    if call.bytes:
        page, slot = launch.strides(keys)[0], call.head_dim
    scale_strides = () if call.key_scale is None else launch.strides(call.key_scale)
    scale_page, scale_slot, scale_head = (*(0 for _ in range(3 - len(scale_strides))), *scale_strides)
    unit = page_unit(page)
    config = config_of(call, tile, unit)
    plain = config.plain
    num_tiles = cdiv(call.columns, plain.BLOCK_N)
    parts = call.num_kv_heads * cdiv(plain.GROUP, plain.GROUP_BLOCK)
    inputs = (
        q, keys, q if call.key_scale is None else call.key_scale, *optional,
        q if call.num_seqs is None else call.num_seqs, q if target is None else target,
    )  # fmt: skip
    return launch(
        block_scores_kernel,
        (num_tiles * cdiv(num_rows, tile.block_t), parts),
        inputs,
        [(shape, "float32")] if target is None else [],
        inplace=() if target is None else (len(inputs) - 1,),
        num_warps=tile.num_warps,
        num_stages=1,
        first_token=first_token,
        num_rows=num_rows,
        num_tokens=call.num_tokens,
        max_num_seqs=call.page_indices.shape[0] if call.paged else 0,
        capacity=call.token_capacity if call.paged else 0,
        num_kv_tokens=call.columns if call.paged else call.keys.shape[0],
        longest=0 if call.paged else min(call.columns, call.keys.shape[0]),
        num_pages=keys.shape[0],
        table_stride=launch.strides(optional[2])[0],
        **stride_arguments(launch, ("token", "head"), q=q),
        page_stride=page // unit,
        slot_stride=slot,
        head_stride=head,
        scale_page_stride=scale_page,
        scale_slot_stride=scale_slot,
        scale_head_stride=scale_head,
        num_blocks=call.num_blocks,
        num_tiles=num_tiles,
        row_stride=shape[-1],
        CONFIG=config,
    )[0]


def enqueue_raised(call: Any, launch: Any, given: Any, num_rows: int, shape: tuple[int, ...], *, in_place: bool) -> Any:
    """Enqueue `raise_kernel` for rows of scores; returns `given` if `in_place`, else a new array of `shape`."""
    token_stride, head_stride = launch.strides(given)[:2]
    return launch(
        raise_kernel,
        (num_rows,),
        (given, given),
        [] if in_place else [(shape, "float32")],
        inplace=(1,) if in_place else (),
        num_warps=4,
        num_stages=1,
        token_stride=token_stride,
        head_stride=head_stride,
        num_blocks=call.num_blocks,
        row_stride=shape[-1],
        HEADS=call.num_heads,
        IN_PLACE=in_place,
        INIT=call.init_blocks,
        LOCAL=call.local_blocks,
        BLOCK=min(1024, max(64, next_power_of_2(call.num_blocks))),
    )[0]


def selection_tile(call: Any, num_rows: int) -> top_k_indices.Tile:
    """The tile of a selection from rows of scores."""
    return top_k_indices.tile_for(call, num_rows, call.num_blocks)


def enqueue_selection(
    call: Any, scores: Any, first_token: int, num_rows: int, row_stride: int, tile: top_k_indices.Tile, launch: Any,
    target: Any = None,
) -> Any:  # fmt: skip
    """Enqueue the selection of blocks for `num_rows` tokens and all heads; returns int32 [T, H, top_k], or `target`."""
    rows = top_k_indices.LogitRows(
        logits=scores, num_rows=num_rows * call.num_heads, row_stride=row_stride, columns=call.num_blocks,
        tables=(scores,) * 5, numbers=top_k_indices.NO_INDEXER, counted="all",
        first_token=first_token * call.num_heads,
    )  # fmt: skip
    positions: Any = None
    if tile.num_splits > 1:
        columns = tile.num_splits * call.top_k
        outputs = [((rows.num_rows, columns), "float32"), ((rows.num_rows, columns), "int32")]
        scores, positions = top_k_indices.select(rows, call.top_k, tile, launch, outputs, num_splits=tile.num_splits)
        rows = dataclasses.replace(rows, logits=scores, row_stride=columns, columns=columns)
    outputs = [((1,), "float32")]  # a stand-in, since no scores are written
    if target is None:
        outputs.append(((call.num_tokens, call.num_heads, call.top_k), "int32"))
    return top_k_indices.select(rows, call.top_k, tile, launch, outputs, positions=positions, target=target)[1]
