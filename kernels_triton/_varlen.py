"""What the kernels of attention over packed sequences and of its gradient share.

Rows are (query token, head of the group) pairs, token by token, so that a program serves all query heads of a KV head.
A head size that is not a power of two is held in two parts where that is narrower: 192 as 128 + 64, 80 as 64 + 16.
"""

# Triton's language only looks like Python: its constexprs and early-bound branches defeat a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ragged_attention.kernels_triton._formats import narrow
from ragged_attention.kernels_triton._sequences import Edges, find_segment, query_edge, segment_edge
from ragged_attention.kernels_triton._softmax import LOG2E, matmul, unit_under_cap
from ragged_attention.kernels_triton._tiles import WGMMA, fit, item_size, next_power_of_2

NARROWEST = 16  # columns that a matrix product takes at least
LARGEST_OFFSET: tl.constexpr = tl.constexpr(2**30)  # that tokens, and heads, of a block may add in 32 bits
LARGEST_TOKEN_STRIDE = LARGEST_OFFSET.value // 256  # of the largest block's rows
# Stands for a scale of 0, so that -inf times it stays -inf and one can divide by it.
SMALLEST_SCALE: tl.constexpr = tl.constexpr(1e-30)


# ---- host side


def near(array: Any, rows: int, launch: Any) -> Any:
    """An array [tokens, heads, width] with packed rows, `rows` of them per token, so that those of a block are close.

    It is copied if not: kernels count with 32 bits within a block.
    """
    array = launch.packed(array)
    token, head, _ = launch.strides(array)
    return array if token <= LARGEST_TOKEN_STRIDE and head * rows <= LARGEST_OFFSET.value else launch.contiguous(array)


def parts(width: int, split: bool = True) -> tuple[int, int]:
    """Columns of the two parts that a head size is held in, powers of two; the second is 0 where one part is best."""
    whole = max(NARROWEST, next_power_of_2(width))
    half = whole // 2
    rest = max(NARROWEST, next_power_of_2(width - half)) if width > half >= NARROWEST else half
    return (half, rest) if split and rest < half else (whole, 0)


def widths(call: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """The parts of queries and keys, and those of values.

    The gradient has one part on GPUs whose matrix unit takes its operands from registers: two would not fit them.
    """
    arch = call.device.arch
    split = not call.OPERATION.endswith("backward") or arch in WGMMA or not arch.startswith("sm_")
    return parts(call.head_dim, split), parts(call.v_head_dim, split)


def columns(call: Any) -> int:
    """Columns of a key and its value together, or of a query and its output's gradient."""
    return sum(map(sum, widths(call)))


def rows_at_most(call: Any, rows: int) -> int:
    """Rows of a block, no more than a small batch has."""
    return min(rows, max(16, next_power_of_2(call.num_q_tokens * call.group)))


def fit_rows(call: Any, kept: int, step: int, stages: int) -> tuple[int, int]:
    """Rows per step and stages with which blocks of two arrays, besides `kept` elements, fit the shared memory."""

    def size(step: int, stages: int) -> int:
        return (kept + stages * step * columns(call)) * item_size(call.q)

    return fit(call, step, stages, size, good_keys=16)


def shared_arguments(call: Any) -> dict[str, Any]:
    """The arguments of every kernel that visits keys or rows."""
    # A window as long as the longest sequence hides nothing.
    window = call.sliding_window if call.sliding_window and call.sliding_window < call.num_kv_tokens else None
    (d_main, d_rest), (dv_main, dv_rest) = widths(call)
    return {
        "num_q_tokens": call.num_q_tokens,
        "num_kv_tokens": call.num_kv_tokens,
        "num_seqs": call.num_seqs,
        "window": window or 0,
        "sm_scale": call.scale,
        "soft_cap": float(call.soft_cap or 1.0),
        "HAS_WINDOW": window is not None,
        "HAS_SOFT_CAP": call.soft_cap is not None,
        "CAUSAL": bool(call.causal),
        "GROUP": call.group,
        "NUM_HEADS": call.num_q_heads,
        "D": call.head_dim,
        "D_MAIN": d_main,
        "D_REST": d_rest,
        "DV": call.v_head_dim,
        "DV_MAIN": dv_main,
        "DV_REST": dv_rest,
    }


def stride_arguments(launch: Any, **arrays: Any) -> dict[str, int]:
    """`<name>_token_stride` and `<name>_head_stride` of arrays [tokens, heads, width]."""
    found = {}
    for name, array in arrays.items():
        found[f"{name}_token_stride"], found[f"{name}_head_stride"] = launch.strides(array)[:2]
    return found


# ---- where a program works


class Array(NamedTuple):
    """Rows of one sequence and KV head in an array [tokens, heads, width]."""

    ptr: tl.tensor  # where the first begins
    token_stride: tl.constexpr
    head_stride: tl.tensor


class Widths(NamedTuple):
    """A head size, and the columns of the two parts that it is held in; the second is 0 where one part is best."""

    D: tl.constexpr
    MAIN: tl.constexpr
    REST: tl.constexpr


class Features(NamedTuple):
    """What hides keys or changes logits, and whether rows have a share (in the gradient)."""

    CAUSAL: tl.constexpr
    HAS_WINDOW: tl.constexpr
    HAS_SOFT_CAP: tl.constexpr
    HAS_SHARE: tl.constexpr = tl.constexpr(False)


class Visible(NamedTuple):
    """Which keys of a sequence the rows of a block see."""

    first: tl.tensor  # some row sees the keys [first, last)
    last: tl.tensor
    position: tl.tensor  # of each row
    kv_len: tl.tensor
    window: tl.tensor


@triton.jit
def find_block(block, own_edges_ptr, other_edges_ptr, num_seqs, num_own, num_other, GROUP: tl.constexpr,
               BLOCK: tl.constexpr):  # fmt: skip
    """The sequence that a block of rows belongs to: (start, length, first row of the block in it) on the rows' own
    side, and (start, length) on the other, of length 0 for rows that belong to no sequence.

    There is nothing to do if the first row is not in [0, length * GROUP).
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


@triton.jit
def key_blocks(low, high, kv_len, window, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, BLOCK_KV: tl.constexpr):
    """(first, last, edges) for queries at positions [low, high]."""
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(low - window + 1, 0)
    last = kv_len
    if CAUSAL:
        last = tl.minimum(high + 1, kv_len)
    last = tl.maximum(last, first)
    start = first // BLOCK_KV * BLOCK_KV
    end = tl.maximum((last + BLOCK_KV - 1) // BLOCK_KV * BLOCK_KV, start)
    whole_start = start
    if HAS_WINDOW:
        whole_start = tl.minimum(tl.maximum(high - window + BLOCK_KV, start) // BLOCK_KV * BLOCK_KV, end)
    whole_stop = kv_len
    if CAUSAL:
        whole_stop = tl.minimum(kv_len, low + 1)
    whole_stop = tl.maximum(tl.maximum(whole_stop, 0) // BLOCK_KV * BLOCK_KV, whole_start)
    return first, last, Edges(start, whole_start, whole_stop, end)


@triton.jit
def before(count, BLOCK: tl.constexpr):
    """Which rows of a block are among its first `count`.

    Not found by comparing the numbers of rows or keys that the block's program has use for in the end: compilers
    (Triton 3.6 to 3.9) then keep those in registers throughout its loops instead of computing them again.
    """
    return tl.arange(0, BLOCK) < count


@triton.jit
def load_columns(ptr, offsets, readable, MASKED: tl.constexpr, WIDTH: tl.constexpr, FROM: tl.constexpr,
                 PAD: tl.constexpr):  # fmt: skip
    """Columns [FROM, FROM + PAD) of rows at offsets: 0 from WIDTH on and, if MASKED, in rows not readable."""
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
    """Write what `load_columns` reads."""
    d = FROM + tl.arange(0, PAD)
    mask = writable[:, None] & (d < WIDTH)[None, :]
    tl.store(ptr + (offsets[:, None] + d[None, :]), narrow(columns, ptr.dtype.element_ty), mask=mask)


@triton.jit
def row_offsets(array, first, GROUP: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr = 1):
    """Where the rows [first, first + BLOCK) of an array lie, `first` being a multiple of BLOCK: a pointer, to a token
    whose number is a multiple of TOKENS, and how far each row is from there.

    The pointer has 64 bits, the rest 32 but for tokens that are very wide, as `near` has seen to. With TOKENS = 1 only
    the pointer differs between blocks, where GROUP divides BLOCK. A loop then keeps what each row adds to it, at two
    registers for each row of a thread; with more TOKENS than a block has, it is computed in each turn.
    """
    inner = tl.arange(0, BLOCK)
    if BLOCK % GROUP != 0:
        inner += first % GROUP
    token = first // GROUP
    if array.token_stride * (BLOCK + TOKENS - 1) > LARGEST_OFFSET:
        inner = inner.to(tl.int64)
    inner_token = inner // GROUP
    if TOKENS > 1:
        inner_token += token % TOKENS
        token -= token % TOKENS
    ptr = array.ptr + tl.cast(token, tl.int64) * array.token_stride
    return ptr, inner_token * array.token_stride + (inner % GROUP) * array.head_stride


@triton.jit
def load_rows(array, first, readable, MASKED: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, widths,
              TOKENS: tl.constexpr = 1):  # fmt: skip
    """The rows [first, first + BLOCK), as a tuple of their one or two parts; zero where not readable."""
    ptr, offsets = row_offsets(array, first, GROUP, BLOCK, TOKENS)
    parts = (load_columns(ptr, offsets, readable, MASKED, widths.D, 0, widths.MAIN),)
    if widths.REST:
        parts += (load_columns(ptr, offsets, readable, MASKED, widths.D, widths.MAIN, widths.REST),)
    return parts


@triton.jit
def store_rows(array, first, parts, writable, GROUP: tl.constexpr, BLOCK: tl.constexpr, widths):
    """Write the rows [first, first + BLOCK), from a tuple of their parts."""
    ptr, offsets = row_offsets(array, first, GROUP, BLOCK)
    store_columns(ptr, offsets, parts[0], writable, widths.D, 0, widths.MAIN)
    if widths.REST:
        store_columns(ptr, offsets, parts[1], writable, widths.D, widths.MAIN, widths.REST)


@triton.jit
def head_start(ptr, start, kv_head, token_stride, head_stride, GROUP: tl.constexpr):
    """Where the rows of a sequence and KV head begin."""
    return ptr + start.to(tl.int64) * token_stride + kv_head.to(tl.int64) * GROUP * head_stride


# ---- products of rows, which are tuples of one or two parts


@triton.jit
def zeros(ROWS: tl.constexpr, widths):
    """Accumulators."""
    parts = (tl.zeros([ROWS, widths.MAIN], tl.float32),)
    if widths.REST:
        parts += (tl.zeros([ROWS, widths.REST], tl.float32),)
    return parts


@triton.jit
def times(parts, factor):
    products = ()
    for i in tl.static_range(len(parts)):
        products += (parts[i] * factor,)
    return products


@triton.jit
def product(a, b):
    """a @ b.T over rows, in float32."""
    products = tl.zeros([a[0].shape[0], b[0].shape[0]], tl.float32)
    for i in tl.static_range(len(a)):
        products = matmul(a[i], tl.trans(b[i]), products)
    return products


@triton.jit
def accumulate(weights, rows, acc):
    """acc + weights @ rows."""
    sums = ()
    for i in tl.static_range(len(acc)):
        sums += (matmul(weights, rows[i], acc[i]),)
    return sums


@triton.jit
def sees(position, key, kv_len, window, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Whether the query at a position sees a key, in as few comparisons as possible.

    Rows behind the last of their sequence see no key that no row of the sequence sees.
    """
    if CAUSAL and HAS_WINDOW:
        seen = (position - key).to(tl.uint32, bitcast=True) < tl.cast(window, tl.uint32, bitcast=True)
    elif CAUSAL:
        seen = key <= position
    elif HAS_WINDOW:
        seen = (key > position - window) & (key < kv_len)
    else:
        seen = key < kv_len
    return seen


@triton.jit
def logit_scales(sm_scale, soft_cap, HAS_SOFT_CAP: tl.constexpr):
    """(inner, outer, cap): what logits are multiplied by before and after `cap`, to be in base 2; none is 0."""
    inner = tl.where(tl.abs(sm_scale) < SMALLEST_SCALE, SMALLEST_SCALE, sm_scale)
    outer = inner * LOG2E
    cap = soft_cap
    if HAS_SOFT_CAP:
        unit = unit_under_cap(soft_cap)
        inner = inner * unit
        outer = LOG2E / unit
        cap = soft_cap * unit
    return inner, outer, cap
