"""Pieces that the Triton kernels share: finding a sequence, walking its pages, online softmax, 8-bit formats.

Notation in kernels: rows are (query token, head of the group) pairs, flattened token by token, so that one KV head's
queries fill a tile's M dimension whatever the group. Logits are held in base 2 (`exp2` is the hardware's own).
"""

# Triton's language only looks like Python: its constexprs and early-bound branches defeat a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

from typing import Any

import triton
import triton.language as tl

from ragged_attention.calls import dtype_name
from ragged_attention.errors import InvalidInput

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
PAGE_SCAN: tl.constexpr = tl.constexpr(256)

# Arguments that change from step to step while a model is served, wherever a kernel has them. Triton would compile a
# kernel anew where one of them becomes 1, or a multiple of 16, or stops being it. Strides, which stay, are not among
# them: that they are multiples of 16 is what wide loads rest on.
VARYING = (
    "blocks", "capacity", "count", "extra_longest", "extra_num_slots", "first_token", "fixed_splits", "longest",
    "max_num_seqs", "num_entries", "num_kv_tokens", "num_pages", "num_parts", "num_q_tokens", "num_rows", "num_seqs",
    "num_slots", "num_tokens", "overhead", "rows", "search_steps", "table_stride", "window",
)  # fmt: skip


# ---- host side


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def expect_power_of_two(tile: Any, **bounds: tuple[int, int]) -> None:
    """Check the fields of a tile that are named, each against its (low, high)."""
    for name, (low, high) in bounds.items():
        value = getattr(tile, name)
        if not isinstance(value, int) or value & (value - 1) or not low <= value <= high:
            raise InvalidInput(f"expected {name} to be a power of two from {low} to {high}, got {value!r}")


def expect_between(tile: Any, **bounds: tuple[int, int]) -> None:
    """Check the fields of a tile that are named, each against its (low, high)."""
    for name, (low, high) in bounds.items():
        value = getattr(tile, name)
        if not isinstance(value, int) or not low <= value <= high:
            raise InvalidInput(f"expected {name} from {low} to {high}, got {value!r}")


def launchable(call: Any, kernel: Any) -> str | None:
    """Why Triton kernels cannot run where the call is, None if they can."""
    device = call.device
    if device.no_triton:
        return device.no_triton
    if device.platform == "cpu":
        if isinstance(kernel, triton.JITFunction):
            return "a CPU runs Triton only by interpreter: set TRITON_INTERPRET=1 before triton is first imported"
        return None
    if device.platform not in ("cuda", "rocm"):
        return f"expected a platform of cuda or rocm, got {device.platform}"
    if device.platform == "cuda" and int(device.arch.removeprefix("sm_")) < 80:
        return f"expected sm_80 or newer, got {device.arch}"
    return None


def launchable_in_float32(call: Any, kernel: Any) -> str | None:
    """`launchable`, of operations that take float64 elsewhere."""
    if dtype_name(call.q) == "float64":
        return "expected q.dtype to be bfloat16, float16 or float32, got float64"
    return launchable(call, kernel)


def cache_format(call: Any) -> str:
    """How kernels are to read the cache: `plain`, or which 8-bit format, with e4m3 in hardware where there is that."""
    kind = call.cache_dtype
    if kind == "float8_e4m3fn":
        arch = call.device.arch
        hardware = int(arch[3:]) >= 89 if arch.startswith("sm_") else arch in ("gfx942", "gfx950")
        return "e4m3" if hardware else "e4m3_bits"
    return {"float8_e5m2": "e5m2", "int8": "int8"}.get(kind, "plain")


def cache_views(call: Any, launch: Any) -> tuple[Any, Any, tuple[int, int, int], tuple[int, int, int], int]:
    """Both layouts in one form: K and V arrays, strides of (page, slot, head) of each, where V begins in its array."""
    if call.combined:
        page, slot, head, _ = launch.strides(call.kv_pages)
        return call.kv_pages, call.kv_pages, (page, slot, 2 * head), (page, slot, 2 * head), head
    k_pages, v_pages = call.kv_pages
    k_strides, v_strides = launch.strides(k_pages)[:3], launch.strides(v_pages)[:3]
    return k_pages, v_pages, k_strides, v_strides, 0


def scale_arguments(name: str, scale: Any, stand_in: Any, launch: Any) -> tuple[Any, dict[str, Any]]:
    """A scale as (array, arguments): `<name>_factor` for a number, `<NAME>_STRIDE` (0 or 1) for an array, else -1."""
    if scale is None or not hasattr(scale, "shape"):
        factor = 1.0 if scale is None else float(scale)
        return stand_in, {f"{name}_factor": factor, f"{name.upper()}_STRIDE": -1}
    one = len(scale.shape) == 0 or scale.shape[0] == 1
    return launch.packed(scale), {f"{name}_factor": 1.0, f"{name.upper()}_STRIDE": 0 if one else 1}


def item_size(array: Any) -> int:
    return {"float32": 4, "float16": 2, "bfloat16": 2}.get(dtype_name(array), 1)


# ---- sequences


@triton.jit
def count_sequences(num_seqs_ptr, max_num_seqs, HAS_NUM_SEQS: tl.constexpr):
    """The number of live sequences, held within the tables."""
    count = max_num_seqs
    if HAS_NUM_SEQS:
        count = tl.minimum(tl.maximum(tl.load(num_seqs_ptr), 0), max_num_seqs)
    return count


# The interpreter's own arithmetic knows no bfloat16: it multiplies the bits and rounds towards zero.
INTERPRETED: tl.constexpr = tl.constexpr(not isinstance(count_sequences, triton.JITFunction))


@triton.jit
def query_edge(cu_q_lens_ptr, index, num_tokens):
    return tl.minimum(tl.maximum(tl.load(cu_q_lens_ptr + index), 0), num_tokens)


@triton.jit
def segment_edge(cu_q_lens_ptr, segment, num_seqs, num_tokens):
    """Where a segment of the query rows starts: 0 is what lies before the first sequence (nothing, in a lawful call),
    then come the sequences, and `num_seqs + 1` is the padding behind them."""
    edge = query_edge(cu_q_lens_ptr, tl.minimum(tl.maximum(segment - 1, 0), num_seqs), num_tokens)
    return tl.where(segment == 0, 0, tl.where(segment > num_seqs + 1, num_tokens, edge))


@triton.jit
def find_segment(block, cu_q_lens_ptr, num_seqs, num_tokens, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """The segment that a block of rows belongs to.

    Segment i is given blocks from `start_i * GROUP // BLOCK + i` on: that leaves each enough of them, and needs no
    count of the blocks of those before it, so the grid follows from shapes alone.
    """
    low = 0
    high = num_seqs + 2
    while high - low > 1:
        middle = (low + high) // 2
        first = segment_edge(cu_q_lens_ptr, middle, num_seqs, num_tokens) * GROUP // BLOCK + middle
        found = first <= block
        low = tl.where(found, middle, low)
        high = tl.where(found, high, middle)
    return low


@triton.jit
def pages_are_valid(page_row_ptr, first_page, last_page, num_pages):
    """Whether every page index in [first_page, last_page) names a page, as 1 or 0."""
    valid = 1
    for start in range(first_page, last_page, PAGE_SCAN):
        slots = start + tl.arange(0, PAGE_SCAN)
        pages = tl.load(page_row_ptr + slots, mask=slots < last_page, other=0)
        good = (pages >= 0) & (pages < num_pages)
        valid = tl.minimum(valid, tl.min(good.to(tl.int32), 0))
    return valid


# ---- elements


@triton.jit
def tanh(x):
    """By its series where the closed form would cancel; relative error about 4e-7."""
    square = x * x
    series = x * (1 + square * (-0.33333334 + square * (0.13333334 + square * (-0.05396825 + square * 0.02186949))))
    small = tl.math.exp2(tl.abs(x) * (-2 * LOG2E))
    closed = (1 - small) / (1 + small)
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0, -closed, closed))


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """float32 to a float type of 16 or 32 bits, to nearest even."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        value = tl.where(x == x, rounded, (bits >> 16) | 0x40).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        value = x.to(DTYPE)
    return value


@triton.jit
def decode(stored, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Elements of the cache as operands; exact for every format, scales excluded."""
    if FORMAT == "plain":
        value = stored
    elif FORMAT == "int8":
        value = stored.to(tl.float32).to(DTYPE)
    elif FORMAT == "e4m3":
        value = stored.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    elif FORMAT == "e5m2":
        value = (stored.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(DTYPE)
    else:
        code = stored.to(tl.uint16)
        half = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
        wide = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        value = tl.where((code & 0x7F) == 0x7F, float("nan"), wide).to(DTYPE)
    return value


@triton.jit
def encode_float8(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    """float32 to the bits of an 8-bit float: nearest even, saturating, sign of NaN kept; the same bits everywhere."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    dropped: tl.constexpr = 23 - MANTISSA
    rounded = magnitude + ((1 << (dropped - 1)) - 1) + ((magnitude >> dropped) & 1)
    normal = (rounded >> dropped).to(tl.int32) - ((127 - BIAS) << MANTISSA)
    # Adding a power of two whose last place is the format's smallest step rounds to that step.
    step: tl.constexpr = 2.0 ** (23 + 1 - BIAS - MANTISSA)
    small = (magnitude.to(tl.float32, bitcast=True) + step).to(tl.uint32, bitcast=True).to(tl.int32)
    small = small - ((127 + 23 + 1 - BIAS - MANTISSA) << 23)
    least_normal: tl.constexpr = (127 + 1 - BIAS) << 23
    code = tl.where(magnitude < least_normal, small, tl.minimum(normal, LARGEST))
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code.to(tl.uint32) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def encode(x, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """float32 values as elements of the cache."""
    if FORMAT == "plain":
        stored = narrow(x, DTYPE)
    elif FORMAT == "int8":
        held = tl.minimum(tl.maximum(tl.where(x == x, x, 0.0), -128.0), 127.0)
        stored = ((held + 12582912.0) - 12582912.0).to(tl.int8)  # adding 1.5 * 2^23 rounds to a whole number
    elif FORMAT == "e5m2":
        stored = encode_float8(x, 2, 15, 0x7B)
    else:
        stored = encode_float8(x, 3, 7, 0x7E)
    return stored


@triton.jit
def load_scale(scale_ptr, kv_head, factor, STRIDE: tl.constexpr):
    """A KV head's scale, from an array (STRIDE 0 or 1) or the number `factor` (STRIDE -1)."""
    scale = factor
    if STRIDE >= 0:
        scale = tl.load(scale_ptr + kv_head * STRIDE).to(tl.float32)
    return scale


# ---- attention over a range of keys


@triton.jit
def matmul(a, b, acc):
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def lost_to_rounding(exact, rounded):
    return narrow(exact - rounded.to(tl.float32), rounded.dtype)


@triton.jit
def pages_of(page_row_ptr, block, keys, first, last, num_pages, MASKED: tl.constexpr, PAGE_SIZE: tl.constexpr,
             BLOCK_KV: tl.constexpr):  # fmt: skip
    """The pages of keys within a block, one for all where a block lies on one page, and which keys may be read."""
    readable = keys < last
    if PAGE_SIZE % BLOCK_KV == 0:
        page = tl.load(page_row_ptr + block // PAGE_SIZE)
        if MASKED:
            known = (page >= 0) & (page < num_pages)
            readable = (keys >= tl.where(known, first, last)) & readable
    elif MASKED:
        readable = (keys >= first) & readable
        page = tl.load(page_row_ptr + keys // PAGE_SIZE, mask=readable, other=-1)
        readable = readable & (page >= 0) & (page < num_pages)
    else:
        page = tl.load(page_row_ptr + keys // PAGE_SIZE)
    return page, readable


@triton.jit
def attend(
    q, highest, total, acc,
    k_ptr, v_ptr, page_row_ptr, left, left_blocks, right, num_blocks, first, last, position, window, num_pages,
    k_page_stride, k_slot_stride, v_page_stride, v_slot_stride, inner_scale, outer_scale,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_KV: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    DV: tl.constexpr, DV_PAD: tl.constexpr, FORMAT: tl.constexpr, WEIGHT_PARTS: tl.constexpr,
):  # fmt: skip
    """Online softmax of the rows of `q` over `num_blocks` blocks of keys: `left_blocks` from `left` on, the rest from
    `right` on.

    Unmasked, every row must see every key of them and every page must be valid. Masked, only keys in [first, last)
    on valid pages are read at all: what no row of the tile sees takes no part, NaN or not.

    Rounded to bfloat16, a weight is off by up to 2^-9 of itself, too much where few keys share the output; a second
    dot of what the rounding lost (WEIGHT_PARTS 2) mends that.
    """
    d = tl.arange(0, D_PAD)
    dv = tl.arange(0, DV_PAD)
    for index in range(num_blocks):
        block = left + index * BLOCK_KV
        if MASKED:
            block = tl.where(index < left_blocks, block, right + (index - left_blocks) * BLOCK_KV)
        keys = block + tl.arange(0, BLOCK_KV)
        page, readable = pages_of(page_row_ptr, block, keys, first, last, num_pages, MASKED, PAGE_SIZE, BLOCK_KV)
        k_rows = k_ptr + page.to(tl.int64) * k_page_stride + (keys % PAGE_SIZE).to(tl.int64) * k_slot_stride
        if MASKED:
            k = tl.load(k_rows[:, None] + d[None, :], mask=readable[:, None] & (d < D)[None, :], other=0)
        elif D == D_PAD:
            k = tl.load(k_rows[:, None] + d[None, :])
        else:
            k = tl.load(k_rows[:, None] + d[None, :], mask=(d < D)[None, :], other=0)
        logits = tl.zeros([q.shape[0], BLOCK_KV], tl.float32)
        logits = matmul(q, tl.trans(decode(k, FORMAT, q.dtype)), logits)
        if HAS_SOFT_CAP:
            logits = tanh(logits * inner_scale)
        if MASKED:
            seen = readable[None, :]
            if CAUSAL:
                seen = seen & (keys[None, :] <= position[:, None])
            if HAS_WINDOW:
                seen = seen & (keys[None, :] > position[:, None] - window)
            logits = tl.where(seen, logits, float("-inf"))
        higher = tl.maximum(highest, tl.max(logits, 1) * outer_scale)
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.math.exp2(logits * outer_scale - finite[:, None])
        kept = tl.math.exp2(highest - finite)
        total = total * kept + tl.sum(weights, 1)
        highest = higher
        rounded = narrow(weights, q.dtype)
        twice: tl.constexpr = WEIGHT_PARTS == 2 and q.shape[0] >= 64 and DV_PAD >= 256
        if twice:  # as one dot, each key standing twice: chained dots of that size would copy the accumulator
            rounded = tl.reshape(tl.join(rounded, lost_to_rounding(weights, rounded)), [q.shape[0], 2 * BLOCK_KV])
            keys = block + tl.arange(0, 2 * BLOCK_KV) // 2
            page, readable = pages_of(page_row_ptr, block, keys, first, last, num_pages, MASKED, PAGE_SIZE, BLOCK_KV)
        v_rows = v_ptr + page.to(tl.int64) * v_page_stride + (keys % PAGE_SIZE).to(tl.int64) * v_slot_stride
        if MASKED:
            v = tl.load(v_rows[:, None] + dv[None, :], mask=readable[:, None] & (dv < DV)[None, :], other=0)
        elif DV == DV_PAD:
            v = tl.load(v_rows[:, None] + dv[None, :])
        else:
            v = tl.load(v_rows[:, None] + dv[None, :], mask=(dv < DV)[None, :], other=0)
        values = decode(v, FORMAT, q.dtype)
        if FORMAT != "plain" and FORMAT != "e4m3_bits" and q.shape[0] < 128:
            # A factor of 1 has compilers decode before the values are laid out for the product, not byte by byte after.
            values = values * tl.where(readable, 1.0, 0.0).to(q.dtype)[:, None]
        acc = matmul(rounded, values, acc * kept[:, None])
        if WEIGHT_PARTS == 2 and not twice:
            acc = matmul(lost_to_rounding(weights, rounded), values, acc)
    return highest, total, acc


@triton.jit
def key_range(low, high, kv_len, window, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """The keys [first, last) that some query at a position in [low, high] sees."""
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(low - window + 1, 0)
    last = kv_len
    if CAUSAL:
        last = tl.minimum(high + 1, kv_len)
    return first, tl.maximum(last, first)


@triton.jit
def attend_range(
    q, start, stop, first, last, low, high, kv_len,
    k_ptr, v_ptr, page_row_ptr, position, window, num_pages,
    k_page_stride, k_slot_stride, v_page_stride, v_slot_stride, inner_scale, outer_scale,
    ROWS: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_KV: tl.constexpr, EDGE_KV: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    DV: tl.constexpr, DV_PAD: tl.constexpr, FORMAT: tl.constexpr, WEIGHT_PARTS: tl.constexpr,
    CAREFUL_KEYS: tl.constexpr,
):  # fmt: skip
    """Attention over keys [start, stop) within [first, last) for queries at positions [low, high]; start is a block's.

    Only the blocks at either end, of EDGE_KV keys, which some query sees in part, pay for masks. A page index that
    names no page makes all blocks of the range such ends, and so does a query that sees fewer than CAREFUL_KEYS keys:
    there the rounding of weights would not average out, and the masked loop takes care of it.
    """
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DV_PAD], tl.float32)
    end = tl.maximum((stop + EDGE_KV - 1) // EDGE_KV * EDGE_KV, start)
    whole_start = start
    if HAS_WINDOW:
        whole_start = (tl.maximum(high - window + 1, start) + BLOCK_KV - 1) // BLOCK_KV * BLOCK_KV
        whole_start = tl.minimum(whole_start, end)
    whole_stop = tl.minimum(stop, kv_len)
    if CAUSAL:
        whole_stop = tl.minimum(whole_stop, low + 1)
    whole_stop = tl.maximum(whole_stop // BLOCK_KV * BLOCK_KV, whole_start)
    valid = pages_are_valid(
        page_row_ptr, whole_start // PAGE_SIZE, (whole_stop + PAGE_SIZE - 1) // PAGE_SIZE, num_pages
    )
    fewest = kv_len
    if CAUSAL:
        fewest = tl.minimum(fewest, low + 1)
    if HAS_WINDOW:
        fewest = tl.minimum(fewest, window)
    whole_stop = tl.where((valid == 1) & (fewest >= CAREFUL_KEYS), whole_stop, whole_start)
    whole_blocks = (whole_stop - whole_start) // BLOCK_KV
    highest, total, acc = attend(
        q, highest, total, acc, k_ptr, v_ptr, page_row_ptr, whole_start, 0, 0, whole_blocks, first, last, position,
        window, num_pages, k_page_stride, k_slot_stride, v_page_stride, v_slot_stride, inner_scale, outer_scale,
        False, CAUSAL, HAS_WINDOW, HAS_SOFT_CAP, PAGE_SIZE, BLOCK_KV, D, D_PAD, DV, DV_PAD, FORMAT,
        WEIGHT_PARTS,
    )  # fmt: skip
    left_blocks = (whole_start - start) // EDGE_KV
    num_blocks = left_blocks + (end - whole_stop) // EDGE_KV
    return attend(
        q, highest, total, acc, k_ptr, v_ptr, page_row_ptr, start, left_blocks, whole_stop, num_blocks, first, last,
        position, window, num_pages, k_page_stride, k_slot_stride, v_page_stride, v_slot_stride, inner_scale,
        outer_scale, True, CAUSAL, HAS_WINDOW, HAS_SOFT_CAP, PAGE_SIZE, EDGE_KV, D, D_PAD, DV, DV_PAD, FORMAT,
        2 if q.dtype == tl.bfloat16 else 1,
    )  # fmt: skip


# ---- merging


@triton.jit
def merge_parts(
    parts_ptr, lses_ptr, count, part_stride, lse_stride, LSE_UNIT: tl.constexpr,
    PARTS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """One row's `count` partial results into (acc [D_PAD], highest, total): acc / total is the result, base-2 logits.

    `lses` times LSE_UNIT are in base 2. A part whose lse is -inf is not read.
    """
    highest = float("-inf")
    for start in range(0, count, PARTS):
        part = start + tl.arange(0, PARTS)
        lse = tl.load(lses_ptr + part.to(tl.int64) * lse_stride, mask=part < count, other=float("-inf"))
        highest = tl.maximum(highest, tl.max(lse * LSE_UNIT, 0))
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    d = tl.arange(0, D_PAD)
    acc = tl.zeros([D_PAD], tl.float32)
    total = 0.0
    for start in range(0, count, PARTS):
        part = start + tl.arange(0, PARTS)
        lse = tl.load(lses_ptr + part.to(tl.int64) * lse_stride, mask=part < count, other=float("-inf"))
        weights = tl.math.exp2(lse * LSE_UNIT - finite)
        # A NaN lse must reach the result, so read unless the lse is -inf rather than if it is above.
        live = (part < count) & (lse != float("-inf"))
        rows = parts_ptr + part.to(tl.int64) * part_stride
        values = tl.load(rows[:, None] + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0).to(tl.float32)
        acc += tl.sum(weights[:, None] * values, 0)
        total += tl.sum(weights, 0)
    return acc, highest, total


# ---- gradients of sinks


@triton.jit(do_not_specialize=VARYING)
def sum_kernel(terms_ptr, sums_ptr, num_rows, num_columns, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros([BLOCK, COLUMNS], tl.float32)
    for start in range(0, num_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        mask = (row < num_rows)[:, None] & (column < num_columns)[None, :]
        acc += tl.load(terms_ptr + row.to(tl.int64)[:, None] * num_columns + column[None, :], mask=mask, other=0)
    tl.store(sums_ptr + column, tl.sum(acc, 0), mask=column < num_columns)


def column_sums(terms: Any, launch: Any) -> Any:
    """Enqueue the sums of the columns of a float32 array [rows, columns], always in the same order."""
    num_rows, num_columns = terms.shape
    (sums,) = launch(
        sum_kernel,
        (cdiv(num_columns, 16),),
        (terms,),
        [((num_columns,), "float32")],
        num_rows=num_rows,
        num_columns=num_columns,
        BLOCK=64,
        COLUMNS=16,
    )
    return sums
