"""Attention over packed sequences in Triton: one kernel, with online softmax over blocks of keys as in FlashAttention.

A program computes a block of rows of one KV head and one sequence. It finds the sequence by binary search, so the grid
follows from shapes alone. Only the first and last key blocks, which some row does not see in full, pay for masks.
"""

import dataclasses
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ragged_attention.calls import VarlenAttention
from ragged_attention.kernels_triton import _varlen, ragged_paged_attention
from ragged_attention.kernels_triton._bias import Table, bias_arguments, capped_and_biased, load_slopes, table_of
from ragged_attention.kernels_triton._compiler import first_of_block
from ragged_attention.kernels_triton._formats import narrow
from ragged_attention.kernels_triton._key_ranges import exact_and_other_ends
from ragged_attention.kernels_triton._mask import Mask, may_read, ranges_array, sees_of
from ragged_attention.kernels_triton._max_logits import (
    absent,
    cleared,
    keeps_largest,
    larger,
    largest_of_state,
    raise_largest,
    unchanged,
)
from ragged_attention.kernels_triton._rows import Rows, logit_scales
from ragged_attention.kernels_triton._segments import expect_segments
from ragged_attention.kernels_triton._selected import (
    MOST_TOKENS,
    blocks_of_step,
    joined_tokens,
    keys_of_step,
    too_long,
)
from ragged_attention.kernels_triton._sequences import (
    VARYING,
    block_start,
    end_blocks,
    whole_blocks,
)
from ragged_attention.kernels_triton._softmax import finish, online_softmax
from ragged_attention.kernels_triton._tiles import (
    OLDER_COMPILER,
    WGMMA,
    Sizes,
    expect_between,
    expect_power_of_two,
    launchable_in_float32,
    on_cuda_cores,
)
from ragged_attention.kernels_triton._varlen import (
    Config,
    Keys,
    accumulate,
    find_job,
    gather_rows,
    load_rows,
    product,
    rows_of,
    store_rows,
    times,
    visible_blocks,
    visits_of_job,
    zeros,
)

FEATURES = frozenset({
    "max_q_len", "max_kv_len", "sm_scale", "causal", "sliding_window", "soft_cap", "sinks", "alibi_slopes",
    "relative_bias", "key_ranges", "selected", "block_size", "return_max_logits", "deterministic",
})  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The tunable sizes. Rows are query tokens times heads of a group."""

    block_q: int = 64  # rows per program
    block_kv: int = 64  # keys per step
    num_warps: int = 4
    num_stages: int = 2
    joined_tokens: int = 1  # tokens per program that attends to selected blocks
    segment_kv: int = 0  # keys per segment, or 0. With segments, the kernels of `ragged_paged_attention` run

    def __post_init__(self) -> None:
        expect_power_of_two(self, block_q=(16, 256), block_kv=(16, 256), num_warps=(1, 16))
        expect_power_of_two(self, joined_tokens=(1, MOST_TOKENS))
        expect_between(self, num_stages=(1, 8))
        expect_segments(self)


def why_not(call: VarlenAttention) -> str | None:
    return launchable_in_float32(call, forward_kernel) or too_long(call)


def heuristic(call: VarlenAttention) -> Tile:
    """A tile that fits registers and shared memory; see docs/compile_matrix.md."""
    tile = sizes(call)
    keys, stages = _varlen.fit_rows(call, tile.rows * sum(_varlen.widths(call)[0]), tile.keys, tile.stages)
    tile = tile._replace(rows=_varlen.rows_at_most(call, tile.rows), keys=keys, stages=stages)
    return Tile(**tile.fields("block_q"), joined_tokens=joined_tokens(call, tile.rows, call.num_kv_tokens))


def invariant_tile(call: VarlenAttention) -> Tile:
    """A batch-invariant tile, with which a query's results have the same bits as in `ragged_paged_attention`."""
    tile = ragged_paged_attention.invariant_tile(call.as_ragged())
    return Tile(**{field.name: getattr(tile, field.name) for field in dataclasses.fields(Tile)})


def sizes(call: Any) -> Sizes:
    """The preferred sizes, whether or not they fit shared memory."""
    arch, columns = call.device.arch, _varlen.columns(call)
    if call.device.platform == "cpu":
        return Sizes(64, 64, 4, 2)
    biased = call.relative_bias is not None
    stages = 1 if biased and OLDER_COMPILER and not arch.startswith("sm_") else 2  # two fail on gfx942
    if on_cuda_cores(call):
        return Sizes(16, 16, 8 if columns > 512 else 4, stages)
    if biased:  # the addresses of bias entries take registers
        return Sizes(64 if columns <= 256 else 32, 32, 8 if columns > 512 and arch.startswith("sm_") else 4, stages)
    if not arch.startswith("sm_"):
        return Sizes(128, 32, 4, 2) if columns <= 320 else Sizes(64, 32, 4, 1)
    whole = not any(rest for _, rest in _varlen.widths(call))
    # Soft caps, lists of blocks and, with Triton 3.6, ranges of keys leave too few registers for 128 keys.
    simple = call.soft_cap is None and call.selected is None and not (OLDER_COMPILER and call.key_ranges is not None)
    keeps = keeps_largest(call)  # a second maximum takes registers, too
    simple = simple and not keeps
    if arch == "sm_90" and columns <= 256 and whole and simple:
        return Sizes(128, 128, 8, 3)
    limited = (keeps or (OLDER_COMPILER and call.key_ranges is not None)) and arch not in WGMMA
    most_columns = 320 if arch in WGMMA else 256  # maximum columns with which 128 rows and 64 keys fit
    if columns <= most_columns:
        return Sizes(128, 32 if limited else 64, 8, 3)
    if columns > 512:
        return Sizes(32 if arch in WGMMA else 64, 32, 8, 3)
    return Sizes(128 if arch in WGMMA or columns <= 320 else 64, 32, 8, 3)


class Queries(NamedTuple):
    """A block of query rows, and the factors of their logits; see `logit_scales`."""

    q: tl.tuple
    inner: tl.tensor
    cap: tl.tensor
    outer: tl.tensor
    slope: tl.tensor  # each row's ALiBi slope in base 2, if HAS_ALIBI
    table: tl.tuple  # the rows' tables of the relative bias, if there is one


@triton.jit
def attend(queries, state, arrays, blocks, visible, mask, CONFIG: tl.constexpr, MASKED: tl.constexpr,
           EXACT: tl.constexpr = False):  # fmt: skip
    """Online softmax of query rows over blocks of keys; returns the new `state`, (m_i, l_i, acc).

    If KEEPS_LARGEST, `state` also has the largest logits before the soft cap and biases.

    Without MASKED, every row must see every key of the blocks. With MASKED, only keys in [visible.first, visible.last)
    are read. A key that no row sees has no effect, even if it is NaN. EXACT is explained in `_pages.attend`.
    """
    BLOCK_KV: tl.constexpr = CONFIG.EXACT_KV if EXACT else CONFIG.BLOCK_KV
    m_i, l_i, acc = state[0], state[1], state[2]
    largest = largest_of_state(state)
    for index in range(blocks.num_blocks):
        block = block_start(blocks, index, MASKED, BLOCK_KV)
        key = block + tl.arange(0, BLOCK_KV)
        readable = may_read(key, visible, CONFIG.MASK, EXACT)
        k = load_rows(arrays.k, block, readable, MASKED, BLOCK_KV, CONFIG.K)
        products = product(queries.q, k)
        logits, scale = capped_and_biased(products, queries, key, visible, CONFIG)
        if MASKED:
            seen = sees_of(visible, key, mask, CONFIG.MASK)
            logits = tl.where(seen, logits, float("-inf"))
        if CONFIG.KEEPS_LARGEST:
            products = unchanged(products, queries, CONFIG)
            if MASKED:
                products = tl.where(seen, products, float("-inf"))
            largest = larger(largest, products)
        weights, alpha, m_i, l_i = online_softmax(logits, m_i, l_i, scale)
        rounded = narrow(weights, queries.q[0].dtype)
        v = load_rows(arrays.v, block, readable, MASKED, BLOCK_KV, CONFIG.V)
        acc = accumulate(rounded, v, times(acc, alpha[:, None]))
    state = (m_i, l_i, acc)
    if CONFIG.KEEPS_LARGEST:
        state += (largest,)
    return state


@triton.jit
def attend_all(queries, arrays, edges, visible, mask, CONFIG: tl.constexpr):
    """The state of `attend` after all keys that query rows see."""
    ROWS: tl.constexpr = queries.q[0].shape[0]
    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    state = (m_i, l_i, zeros(ROWS, CONFIG.V))
    if CONFIG.KEEPS_LARGEST:
        state += (m_i,)
    state = attend(queries, state, arrays, whole_blocks(edges, CONFIG.BLOCK_KV), visible, mask, CONFIG, False)
    ends = end_blocks(edges, CONFIG.BLOCK_KV)
    if CONFIG.MASK.RANGES:
        exact, ends = exact_and_other_ends(edges, visible.ranges.solid, CONFIG.EXACT_KV, CONFIG.BLOCK_KV)
        state = attend(queries, state, arrays, exact, visible, mask, CONFIG, True, EXACT=True)
    return attend(queries, state, arrays, ends, visible, mask, CONFIG, True)


@triton.jit
def attend_to_blocks(queries, arrays, visits, visible, mask, CONFIG: tl.constexpr):
    """The state of `attend` for a job's query rows, after the blocks that its lists name."""
    LISTS: tl.constexpr = CONFIG.LISTS
    BLOCK_KV: tl.constexpr = CONFIG.BLOCK_KV
    ROWS: tl.constexpr = queries.q[0].shape[0]
    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    acc = zeros(ROWS, CONFIG.V)
    largest = m_i
    following = blocks_of_step(visits, 0, LISTS, BLOCK_KV)
    for step in range(visits.end):
        block = following
        following = blocks_of_step(visits, step + 1, LISTS, BLOCK_KV)
        key, readable, seen = keys_of_step(visits, block, step, mask, LISTS, BLOCK_KV)
        k = gather_rows(arrays.k, key, 0, readable, CONFIG.K)
        products = product(queries.q, k)
        logits, scale = capped_and_biased(products, queries, key, visible, CONFIG)
        if CONFIG.KEEPS_LARGEST:
            largest = larger(largest, tl.where(seen, unchanged(products, queries, CONFIG), float("-inf")))
        weights, alpha, m_i, l_i = online_softmax(tl.where(seen, logits, float("-inf")), m_i, l_i, scale)
        rounded = narrow(weights, queries.q[0].dtype)
        v = gather_rows(arrays.v, key, 0, readable, CONFIG.V)
        acc = accumulate(rounded, v, times(acc, alpha[:, None]))
    state = (m_i, l_i, acc)
    if CONFIG.KEEPS_LARGEST:
        state += (largest,)
    return state


@triton.jit
def negated(parts):
    negative = ()
    for i in tl.static_range(len(parts)):
        negative += ((-parts[i].to(tl.float32)).to(parts[i].dtype),)
    return negative


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
    q_ptr, k_ptr, v_ptr, cu_q_lens_ptr, cu_kv_lens_ptr, sinks_ptr, slopes_ptr, bias_ptr, ranges_ptr,
    lists_ptr, given_max_ptr, out_ptr, lse_ptr, max_ptr,
    num_q_tokens, num_kv_tokens, num_seqs, window, q_head_stride, k_head_stride, v_head_stride, sm_scale, soft_cap,
    CONFIG: tl.constexpr,
):  # fmt: skip
    """Attend with one block of rows of one KV head to all keys that they see. Rows without a sequence see no key."""
    GROUP: tl.constexpr = CONFIG.Q.GROUP
    BLOCK_Q: tl.constexpr = CONFIG.BLOCK_Q
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # start with the last rows, which see the most keys
    kv_head = tl.program_id(1)
    mask = Mask(window, ranges_ptr=ranges_ptr)
    job = find_job(block, cu_q_lens_ptr, cu_kv_lens_ptr, num_seqs, num_q_tokens, num_kv_tokens, CONFIG)
    start = job.start
    first_row = job.first_row
    if (first_row >= 0) & (first_row < job.end_row):
        readable = first_of_block(job.end_row - first_row, BLOCK_Q)
        q_rows = rows_of(q_ptr, start, kv_head, q_head_stride, CONFIG.Q)
        k_rows = rows_of(k_ptr, job.kv_start, kv_head, k_head_stride, CONFIG.K)
        v_rows = rows_of(v_ptr, job.kv_start, kv_head, v_head_stride, CONFIG.V)
        inner, cap, outer = logit_scales(sm_scale, soft_cap, CONFIG.HAS_SOFT_CAP)
        q = load_rows(q_rows, first_row, readable, True, BLOCK_Q, CONFIG.Q)
        if CONFIG.NEGATED:  # the online softmax needs a positive scale
            q = negated(q)
        rows = Rows(first_row + tl.arange(0, BLOCK_Q), job.end_row, start, kv_head)
        slope = outer  # a stand-in, not used without HAS_ALIBI
        if CONFIG.HAS_ALIBI:
            slope = load_slopes(slopes_ptr, rows, GROUP)
        table = Table(outer, outer)  # a stand-in, not used without a relative bias
        if CONFIG.BIAS.WIDTH:
            table = table_of(bias_ptr, rows, CONFIG.BIAS, GROUP)
        queries = Queries(q, inner, cap, outer, slope, table)
        if CONFIG.LISTS is None:
            visible, edges = visible_blocks(rows, first_row, job.q_len, job.kv_len, mask, CONFIG)
            state = attend_all(queries, Keys(k_rows, v_rows), edges, visible, mask, CONFIG)
        else:
            visits, visible = visits_of_job(lists_ptr, job, kv_head, CONFIG)
            state = attend_to_blocks(queries, Keys(k_rows, v_rows), visits, visible, mask, CONFIG)

        m_i, l_i, acc = state[0], state[1], state[2]
        row = first_row + tl.arange(0, BLOCK_Q)
        head = kv_head * GROUP + row % GROUP
        exists = row < job.end_row
        factor, lse = finish(m_i, l_i, sinks_ptr, head, exists, 1.0, CONFIG.HAS_SINKS)
        tl.store(lse_ptr + (start + row // GROUP).to(tl.int64) * CONFIG.Q.NUM_HEADS + head, lse, mask=exists)
        store_rows(out_ptr, start, kv_head, first_row, times(acc, factor[:, None]), exists, BLOCK_Q, CONFIG.OUT)
        if max_ptr is not None:
            raise_largest(max_ptr, largest_of_state(state), l_i, head, exists)


def run_as_ragged(call: VarlenAttention, tile: Tile, launch: Any) -> Any:
    """Enqueue the kernels of `ragged_paged_attention` over packed keys; returns out, lse and requested max_logits."""
    ragged = call.as_ragged()
    ragged_tile = ragged_paged_attention.invariant_tile(ragged)
    return ragged_paged_attention.run(ragged, dataclasses.replace(ragged_tile, **dataclasses.asdict(tile)), launch)


def run(call: VarlenAttention, tile: Tile, launch: Any) -> Any:
    """Enqueue the kernel; returns out, lse and, on request, the largest logits."""
    if tile.segment_kv:
        return run_as_ragged(call, tile, launch)
    arrays, edges, numbers, config = _varlen.shared_arguments(call, launch, "q", "k", "v")
    sinks, slopes = (edges[0] if heads is None else launch.packed(heads) for heads in (call.sinks, call.alibi_slopes))
    bias, bias_form = bias_arguments(call, launch, edges[0])
    named, lists = _varlen.lists_of(call, launch, tile.joined_tokens, edges, numbers, config["MASK"])
    programs, block_q = _varlen.programs(call, tile.block_q, lists)
    inputs = (*arrays.values(), *edges, sinks, slopes, bias, ranges_array(call, launch, edges[0]), named)
    return launch(
        forward_kernel,
        (programs, call.num_kv_heads),
        (*inputs, cleared(call, launch, edges[0])),
        [(call.out_shape, call.q.dtype), (call.q.shape[:2], "float32")],
        inplace=(len(inputs),) if call.return_max_logits else (),
        **absent(call),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        CONFIG=Config(
            BLOCK_Q=block_q,
            BLOCK_KV=tile.block_kv,
            LISTS=lists,
            HAS_SINKS=call.sinks is not None,
            NEGATED=call.scale < 0,
            BIAS=bias_form,
            KEEPS_LARGEST=keeps_largest(call),
            **config,
        ),
        **numbers,
    )
