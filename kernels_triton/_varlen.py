"""Functions that attention over packed sequences shares with its gradient.

Rows are (query token, query head) pairs of one KV head, token by token, so that one program serves all query heads of a
KV head. If a head size is not a power of two, a row is two tiles if that takes less padding: 192 columns are 128 + 64.
These two tiles are called the *parts* of a row.
"""

import dataclasses
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ragged_attention.kernels_triton._bias import Bias
from ragged_attention.kernels_triton._compiler import aligned_down
from ragged_attention.kernels_triton._constants import Constants
from ragged_attention.kernels_triton._formats import narrow
from ragged_attention.kernels_triton._key_ranges import range_edges, smaller_block
from ragged_attention.kernels_triton._mask import (
    MaskKind,
    Visible,
    packed_mask_arguments,
    seen_by_all,
    visible_keys,
)
from ragged_attention.kernels_triton._selected import (
    ListKind,
    Visits,
    join,
    list_kind,
    named_blocks,
    num_jobs,
    steps_of,
)
from ragged_attention.kernels_triton._sequences import Edges, find_segment, max_blocks, query_edge, segment_edge
from ragged_attention.kernels_triton._softmax import matmul
from ragged_attention.kernels_triton._tiles import NARROWEST, WGMMA, cdiv, fit, item_size, next_power_of_2

# The maximum that the token indices, or the head indices, within a block may contribute to a 32-bit offset.
LARGEST_OFFSET: tl.constexpr = tl.constexpr(2**30)
LARGEST_TOKEN_STRIDE = LARGEST_OFFSET.value // 256  # no block has more than 256 rows


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Layout(Constants):
    """The memory layout of an array [tokens, heads, width], and the division of its rows into parts."""

    NUM_HEADS: int
    GROUP: int  # heads per KV head
    D: int  # the width
    MAIN: int  # columns of the first part
    REST: int  # columns of the second part, or 0 without one
    TOKEN_STRIDE: int


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Config(Constants):
    """The compile-time constants of a kernel that visits keys or rows."""

    BLOCK_Q: int  # rows per block
    BLOCK_KV: int  # keys per block
    EXACT_KV: int = dataclasses.field(init=False)  # keys per block of the exact loop; see `_key_ranges`
    MASK: MaskKind
    Q: Layout
    K: Layout
    V: Layout
    OUT: Layout  # the forward kernel's output, and the gradient of that output
    HAS_SOFT_CAP: bool
    HAS_ALIBI: bool
    BIAS: Bias
    HAS_SINKS: bool = False
    NEGATED: bool = False  # whether queries are negated, because the scale of logits is negative
    HAS_SHARE: bool = False  # whether gradients have the factor `share`; see `_varlen_gradient`
    LISTS: ListKind | None = None  # the lists of blocks of keys, if there are any
    KEEPS_LARGEST: bool = False  # see `keeps_largest`

    def __post_init__(self) -> None:
        object.__setattr__(self, "EXACT_KV", smaller_block(self.BLOCK_KV))
        super().__post_init__()


# ---- host side


def near(array: Any, rows: int, launch: Any) -> Any:
    """The array [tokens, heads, width], or a copy if 32 bits are too few for the offsets within a block of rows.

    `rows` is the number of rows per token in a block. Each row of the result is contiguous.
    """
    array = launch.packed(array)
    token, head, _ = launch.strides(array)
    return array if token <= LARGEST_TOKEN_STRIDE and head * rows <= LARGEST_OFFSET.value else launch.contiguous(array)


def parts(width: int, split: bool = True) -> tuple[int, int]:
    """The columns of a head's two parts, both powers of two. The second is 0 if one part takes no more padding."""
    whole = max(NARROWEST, next_power_of_2(width))
    half = whole // 2
    rest = max(NARROWEST, next_power_of_2(width - half)) if width > half >= NARROWEST else half
    return (half, rest) if split and rest < half else (whole, 0)


def widths(call: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """(parts of queries and keys, parts of values), in columns.

    On GPUs whose matrix units read operands from registers, rows have only one part in the gradient: two parts would
    take too many registers. Wide heads in float32 are an exception. They do not use matrix units, and their padding
    would take too much shared memory.
    """
    arch = call.device.arch
    in_registers = call.OPERATION.endswith("backward") and arch.startswith("sm_") and arch not in WGMMA
    split = not in_registers or (item_size(call.q) == 4 and max(call.head_dim, call.v_head_dim) > 256)
    return parts(call.head_dim, split), parts(call.v_head_dim, split)


def columns(call: Any) -> int:
    """The total columns of a key and its value, which equal those of a query and its output's gradient."""
    return sum(map(sum, widths(call)))


def rows_at_most(call: Any, rows: int) -> int:
    """The rows per block: `rows`, or fewer if the batch has fewer."""
    return min(rows, max(16, next_power_of_2(call.num_q_tokens * call.group)))


def fit_rows(call: Any, kept: int, step: int, stages: int) -> tuple[int, int]:
    """(rows per step, stages), reduced until streamed blocks of two arrays and `kept` elements fit shared memory."""

    def size(step: int, stages: int) -> int:
        return (kept + stages * step * columns(call)) * item_size(call.q)

    return fit(call, step, stages, size, good_keys=16)


def shared_arguments(
    call: Any, launch: Any, *names: str
) -> tuple[dict[str, Any], tuple[Any, Any], dict[str, Any], dict[str, Any]]:  # fmt: skip
    """(arrays by `names`, (cu_q_lens, cu_kv_lens), numeric arguments, fields of `Config`) that the kernels share."""
    arrays = {name: near(getattr(call, name), 1 if name in ("k", "v") else call.group, launch) for name in names}
    parts_of_keys, parts_of_values = widths(call)
    mask, numbers = packed_mask_arguments(call)

    def layout(name: str, width: int, padded: tuple[int, int], group: int = 1) -> Layout:
        num_heads = call.num_kv_heads * group
        stride = launch.strides(arrays[name])[0] if name in arrays else num_heads * width
        return Layout(NUM_HEADS=num_heads, GROUP=group, D=width, MAIN=padded[0], REST=padded[1], TOKEN_STRIDE=stride)

    numbers |= {
        "num_q_tokens": call.num_q_tokens,
        "num_kv_tokens": call.num_kv_tokens,
        "num_seqs": call.num_seqs,
        "sm_scale": call.scale,
        "soft_cap": float(call.soft_cap or 1.0),
        **{f"{name}_head_stride": launch.strides(array)[1] for name, array in arrays.items()},
    }
    return arrays, (launch.packed(call.cu_q_lens), launch.packed(call.cu_kv_lens)), numbers, {
        "MASK": mask,
        "Q": layout("q", call.head_dim, parts_of_keys, call.group),
        "K": layout("k", call.head_dim, parts_of_keys),
        "V": layout("v", call.v_head_dim, parts_of_values),
        "OUT": layout("d_out", call.v_head_dim, parts_of_values, call.group),
        "HAS_SOFT_CAP": call.soft_cap is not None,
        "HAS_ALIBI": call.alibi_slopes is not None,
    }  # fmt: skip


def lists_of(call: Any, launch: Any, tokens: int, edges: tuple[Any, Any], numbers: Any, kind: MaskKind) -> Any:
    """(the joined lists of blocks, their form), or (a stand-in, None) without lists."""
    if call.selected is None:
        return edges[0], None
    lists = list_kind(call, tokens, call.num_kv_tokens, kind)
    counts = {"num_tokens": call.num_q_tokens, "max_num_seqs": call.num_seqs, "capacity": call.num_kv_tokens}
    window = numbers["window"]
    named = join(call, launch, lists, (*edges, edges[0]), {**counts, "window": window}, packed=True)
    return named, lists


def programs(call: Any, block_q: int, lists: ListKind | None) -> tuple[int, int]:
    """(programs per KV head, rows per program) of a kernel that computes blocks of at most `block_q` rows."""
    if lists is None:
        return max_blocks(call.num_q_tokens * call.group, block_q, call.num_seqs), block_q
    rows = lists.plain.TOKENS * call.group
    block_q = min(block_q, max(NARROWEST, next_power_of_2(rows)))
    return num_jobs(call.num_q_tokens, call.num_seqs, lists) * cdiv(rows, block_q), block_q


# ---- where a program works


class Array(NamedTuple):
    """The address of one sequence's rows of one KV head in an array; see `Layout`."""

    ptr: tl.tensor  # the address of the first row
    head_stride: tl.tensor


class Keys(NamedTuple):
    """The keys and values of one sequence and KV head."""

    k: Array
    v: Array


@triton.jit
def rows_of(ptr, token, kv_head, head_stride, LAYOUT: tl.constexpr):
    """The `Array` of a KV head's rows from `token` on."""
    offset = token.to(tl.int64) * LAYOUT.TOKEN_STRIDE + kv_head.to(tl.int64) * LAYOUT.GROUP * head_stride
    return Array(ptr + offset, head_stride)


@triton.jit
def find_block(block, own_edges_ptr, other_edges_ptr, num_seqs, num_own, num_other, GROUP: tl.constexpr,
               BLOCK: tl.constexpr):  # fmt: skip
    """(start, length, first row, other start, other length) for a block of query rows, or of keys.

    `start` and `length` describe the block's sequence, in tokens. `first row` is the block's first row, counted from
    `start`. If it is outside [0, length * GROUP), the block is empty. For a block of query rows, `other start` and
    `other length` describe the sequence's keys; for a block of keys, its queries. `other length` is 0 for rows or keys
    that belong to no sequence.
    """
    segment = find_segment(block, own_edges_ptr, num_seqs, num_own, GROUP, BLOCK)
    start = segment_edge(own_edges_ptr, segment, num_seqs, num_own)
    stop = tl.maximum(segment_edge(own_edges_ptr, segment + 1, num_seqs, num_own), start)
    first_row = (block - (start * GROUP // BLOCK + segment)) * BLOCK
    other_start = 0
    other_len = 0
    if (segment > 0) & (segment <= num_seqs):
        other_start = query_edge(other_edges_ptr, segment - 1, num_other)
        other_len = tl.maximum(query_edge(other_edges_ptr, segment, num_other) - other_start, 0)
    return start, stop - start, first_row, other_start, other_len


class Job(NamedTuple):
    """The rows of one sequence and KV head that a program computes, and the sequence's keys; see `find_block`."""

    number: tl.tensor  # the index of the job whose lists of blocks the program visits; see `_selected`
    job_row: tl.tensor  # the job's first row
    first_row: tl.tensor
    end_row: tl.tensor  # at most `first_row` if the program has no rows
    start: tl.tensor
    q_len: tl.tensor
    kv_start: tl.tensor
    kv_len: tl.tensor


@triton.jit
def find_job(block, q_edges_ptr, kv_edges_ptr, num_seqs, num_q_tokens, num_kv_tokens, CONFIG: tl.constexpr):
    """The `Job` of a program: a block of rows or, with lists of blocks, a block of the rows of a few tokens."""
    GROUP: tl.constexpr = CONFIG.Q.GROUP
    BLOCK_Q: tl.constexpr = CONFIG.BLOCK_Q
    if CONFIG.LISTS is None:
        start, q_len, first_row, kv_start, kv_len = find_block(
            block, q_edges_ptr, kv_edges_ptr, num_seqs, num_q_tokens, num_kv_tokens, GROUP, BLOCK_Q
        )
        job_row = first_row
        end_row = q_len * GROUP
    else:
        TOKENS: tl.constexpr = CONFIG.LISTS.TOKENS
        ROW_BLOCKS: tl.constexpr = (TOKENS * GROUP + BLOCK_Q - 1) // BLOCK_Q
        job_block = block
        block = job_block // ROW_BLOCKS
        start, q_len, token, kv_start, kv_len = find_block(
            block, q_edges_ptr, kv_edges_ptr, num_seqs, num_q_tokens, num_kv_tokens, 1, TOKENS
        )
        job_row = token * GROUP
        first_row = job_row + job_block % ROW_BLOCKS * BLOCK_Q
        end_row = tl.minimum(token + TOKENS, q_len) * GROUP
    return Job(block, job_row, first_row, end_row, start, q_len, kv_start, kv_len)


@triton.jit
def visits_of_job(lists_ptr, job, kv_head, CONFIG: tl.constexpr):
    """(`Visits`, `Visible`) of a job that has lists of blocks."""
    num_old = job.kv_len - job.q_len
    low = num_old + job.first_row // CONFIG.Q.GROUP
    row = job.first_row + tl.arange(0, CONFIG.BLOCK_Q)
    visible = Visible(0, job.kv_len, low, low, num_old + row // CONFIG.Q.GROUP, job.kv_len, num_old, 0, 0)
    first = job.job_row // CONFIG.Q.GROUP
    named = named_blocks(lists_ptr, job.number, kv_head, CONFIG.LISTS)
    visits = Visits(
        named.ptr, named.num_blocks, 0, steps_of(named, CONFIG.LISTS, CONFIG.BLOCK_KV), row - job.job_row,
        job.start + first, num_old + first, num_old, job.kv_len,
    )  # fmt: skip
    return visits, visible


@triton.jit
def visible_blocks(rows, first_row, q_len, kv_len, mask, CONFIG: tl.constexpr):
    """(`Visible`, `Edges`) of the block of rows that begins at `first_row`."""
    GROUP: tl.constexpr = CONFIG.Q.GROUP
    BLOCK_KV: tl.constexpr = CONFIG.BLOCK_KV
    low = kv_len - q_len + first_row // GROUP
    high = kv_len - q_len + tl.minimum((first_row + CONFIG.BLOCK_Q - 1) // GROUP, q_len - 1)
    visible = visible_keys(rows, low, high, q_len, kv_len, mask, GROUP, CONFIG.MASK)
    if CONFIG.MASK.RANGES:
        edges = range_edges(0, kv_len, visible.ranges, CONFIG.MASK, BLOCK_KV, BLOCK_KV)
    else:
        start = visible.first // BLOCK_KV * BLOCK_KV
        end = tl.maximum((visible.last + BLOCK_KV - 1) // BLOCK_KV * BLOCK_KV, start)
        whole_start, whole_stop = seen_by_all(start, visible.last, end, visible, mask, CONFIG.MASK, BLOCK_KV)
        edges = Edges(start, whole_start, whole_stop, end, ())
    return visible, edges


@triton.jit
def load_columns(ptr, offsets, readable, MASKED: tl.constexpr, WIDTH: tl.constexpr, FROM: tl.constexpr,
                 PAD: tl.constexpr):  # fmt: skip
    """Columns [FROM, FROM + PAD) of the rows at `offsets`; 0 from WIDTH on and, if MASKED, in unreadable rows."""
    d = FROM + tl.arange(0, PAD)
    pointers = ptr + (offsets[:, None] + d[None, :])
    if MASKED and FROM + PAD > WIDTH:
        loaded = tl.load(pointers, mask=readable[:, None] & (d < WIDTH)[None, :], other=0)
    elif MASKED:
        loaded = tl.load(pointers, mask=readable[:, None], other=0)
    elif FROM + PAD > WIDTH:
        loaded = tl.load(pointers, mask=(d < WIDTH)[None, :], other=0)
    else:
        loaded = tl.load(pointers)
    return loaded


@triton.jit
def store_columns(ptr, offsets, columns, writable, WIDTH: tl.constexpr, FROM: tl.constexpr, PAD: tl.constexpr):
    """Store columns at the addresses from which `load_columns` would load them."""
    d = FROM + tl.arange(0, PAD)
    mask = writable[:, None] & (d < WIDTH)[None, :]
    tl.store(ptr + (offsets[:, None] + d[None, :]), narrow(columns, ptr.dtype.element_ty), mask=mask)


@triton.jit
def row_offsets(array, first, TOKEN_STRIDE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
                STEP: tl.constexpr):  # fmt: skip
    """(pointer, offsets) of the rows [first, first + BLOCK), where `first` is a multiple of BLOCK.

    The 64-bit pointer is the address of a token whose index is a multiple of STEP. The offsets have 32 bits, which
    `near` makes possible, unless TOKEN_STRIDE is very large. With STEP = 1, all blocks have equal offsets if GROUP
    divides BLOCK. With a larger STEP, each iteration of a loop computes the offsets; see `aligned_down`.
    """
    inner = tl.arange(0, BLOCK)
    if BLOCK % GROUP != 0:
        inner += first % GROUP
    token = first // GROUP
    if TOKEN_STRIDE * (BLOCK + STEP - 1) > LARGEST_OFFSET:
        inner = inner.to(tl.int64)
    inner_token = inner // GROUP
    base, rest = aligned_down(token, STEP)
    inner_token += rest
    ptr = array.ptr + tl.cast(base, tl.int64) * TOKEN_STRIDE
    return ptr, inner_token * TOKEN_STRIDE + (inner % GROUP) * array.head_stride


@triton.jit
def load_rows(array, first, readable, MASKED: tl.constexpr, BLOCK: tl.constexpr, LAYOUT: tl.constexpr,
              STEP: tl.constexpr = 1):  # fmt: skip
    """The rows [first, first + BLOCK), as a tuple of one or two parts. If MASKED, unreadable rows are 0."""
    ptr, offsets = row_offsets(array, first, LAYOUT.TOKEN_STRIDE, LAYOUT.GROUP, BLOCK, STEP)
    parts = (load_columns(ptr, offsets, readable, MASKED, LAYOUT.D, 0, LAYOUT.MAIN),)
    if LAYOUT.REST:
        parts += (load_columns(ptr, offsets, readable, MASKED, LAYOUT.D, LAYOUT.MAIN, LAYOUT.REST),)
    return parts


@triton.jit
def gather_rows(array, token, head, readable, LAYOUT: tl.constexpr):
    """The rows of tokens and heads, as tuples of parts like those of `load_rows`; unreadable rows are 0."""
    offsets = token.to(tl.int64) * LAYOUT.TOKEN_STRIDE + head * array.head_stride
    parts = (load_columns(array.ptr, offsets, readable, True, LAYOUT.D, 0, LAYOUT.MAIN),)
    if LAYOUT.REST:
        parts += (load_columns(array.ptr, offsets, readable, True, LAYOUT.D, LAYOUT.MAIN, LAYOUT.REST),)
    return parts


@triton.jit
def store_rows(ptr, token, kv_head, first, parts, writable, BLOCK: tl.constexpr, LAYOUT: tl.constexpr):
    """Store a tuple of parts in the rows [first, first + BLOCK) of a contiguous array, counted from `token`."""
    stride: tl.constexpr = LAYOUT.NUM_HEADS * LAYOUT.D
    ptr += token.to(tl.int64) * stride + kv_head.to(tl.int64) * (LAYOUT.GROUP * LAYOUT.D)
    ptr, offsets = row_offsets(Array(ptr, LAYOUT.D), first, stride, LAYOUT.GROUP, BLOCK, 1)
    store_columns(ptr, offsets, parts[0], writable, LAYOUT.D, 0, LAYOUT.MAIN)
    if LAYOUT.REST:
        store_columns(ptr, offsets, parts[1], writable, LAYOUT.D, LAYOUT.MAIN, LAYOUT.REST)


# ---- products of rows, which are tuples of one or two parts


@triton.jit
def zeros(ROWS: tl.constexpr, LAYOUT: tl.constexpr):
    """A zero accumulator for rows."""
    parts = (tl.zeros([ROWS, LAYOUT.MAIN], tl.float32),)
    if LAYOUT.REST:
        parts += (tl.zeros([ROWS, LAYOUT.REST], tl.float32),)
    return parts


@triton.jit
def times(parts, factor):
    products = ()
    for i in tl.static_range(len(parts)):
        products += (parts[i] * factor,)
    return products


@triton.jit
def product(a, b):
    """a @ b.T of two blocks of rows, in float32."""
    products = tl.zeros([a[0].shape[0], b[0].shape[0]], tl.float32)
    for i in tl.static_range(len(a)):
        products = matmul(a[i], tl.trans(b[i]), products)
    return products


@triton.jit
def accumulate(weights, rows, acc):
    """acc + weights @ rows, for each part of the rows."""
    sums = ()
    for i in tl.static_range(len(acc)):
        sums += (matmul(weights, rows[i], acc[i]),)
    return sums
