"""Lists of blocks of keys, for attention to selected blocks: a kernel that sorts and joins them.

Each query token has a list of blocks. A *job* is a few consecutive query tokens of a sequence, at most TOKENS. The
attention kernels give each job and KV head a program, which visits the blocks that at least one list of the job names.
So tokens with similar lists share the loads of keys, and the products have more rows. With TOKENS = 1, each token is a
job.

For each job, the kernel here writes the number of blocks, and the blocks in ascending order without repetitions. It
leaves out blocks that masks hide from all tokens that name them. If a job has several tokens, it also writes a set of
bits for each block: one bit for each token that names the block. A set is stored as two running sums. Their difference
is the set, so no memory has to be cleared first.
"""

import dataclasses
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ragged_attention.kernels_triton._constants import Constants
from ragged_attention.kernels_triton._mask import LARGEST_INT, Mask, MaskKind, end_key, first_key, in_ranges, sees
from ragged_attention.kernels_triton._sequences import VARYING, count_sequences, max_blocks
from ragged_attention.kernels_triton._splits import Batch, find_rows, length_of
from ragged_attention.kernels_triton._tiles import next_power_of_2, stride_arguments

MOST_TOKENS = 16  # maximum tokens per job: the running sums of their bits fit 31 bits
SMALLEST = 32  # the least number of entries that a program sorts, padding included
MOST_ENTRIES = 2**15  # maximum entries that one program can sort
JOINED_ENTRIES = 2**12  # maximum entries of the lists of one job, unless a single list has more


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ListKind(Constants):
    """The form of the joined lists, i32 [jobs, HEADS, STRIDE], and the masks within the blocks."""

    BLOCK_SIZE: int  # keys per block
    TOKENS: int  # maximum query tokens per job
    WIDTH: int  # maximum blocks per job
    HEADS: int  # lists per token: one for each KV head, or 1 if all KV heads share a list
    GROUP: int  # query heads per KV head
    MASK: MaskKind
    STRIDE: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "STRIDE", 1 + self.WIDTH * (3 if self.TOKENS > 1 else 1))
        super().__post_init__()


class Named(NamedTuple):
    """The blocks that a job's lists name."""

    ptr: tl.tensor  # the address of the first block
    num_blocks: tl.tensor


class Visits(NamedTuple):
    """The blocks that a program visits, and the rows of the job that the program computes."""

    ptr: tl.tensor  # the address of the job's first block
    num_blocks: tl.tensor
    begin: tl.tensor  # the program visits the steps [begin, end)
    end: tl.tensor
    row: tl.tensor  # the program's rows, counted from the job's first row
    token: tl.tensor  # the job's first query token
    position: tl.tensor  # the position of that token in its sequence
    num_old: tl.tensor  # the position of the sequence's first query of this step
    kv_len: tl.tensor  # the number of the sequence's keys


@triton.jit
def list_place(job, head, LISTS: tl.constexpr):
    """The offset of a job's list in the joined lists. All heads share a list if HEADS is 1."""
    if LISTS.HEADS == 1:
        head = 0
    return (job.to(tl.int64) * LISTS.HEADS + head) * LISTS.STRIDE


@triton.jit
def named_blocks(lists_ptr, job, head, LISTS: tl.constexpr, exists=True):
    """The blocks of one or more jobs and a KV head, as `Named`; none for a job that does not exist."""
    ptr = lists_ptr + list_place(job, head, LISTS)
    return Named(ptr + 1, tl.load(ptr, mask=exists, other=0))


@triton.jit
def steps_of(named, LISTS: tl.constexpr, BLOCK_KV: tl.constexpr):
    """The number of steps of BLOCK_KV keys in which a loop visits the blocks."""
    return (named.num_blocks * LISTS.BLOCK_SIZE + BLOCK_KV - 1) // BLOCK_KV


@triton.jit
def index_of_step(step, LISTS: tl.constexpr, BLOCK_KV: tl.constexpr):
    """For each key that a loop visits in a step, the index of its block in the list; one index if all keys share it."""
    if LISTS.BLOCK_SIZE >= BLOCK_KV:
        index = step // (LISTS.BLOCK_SIZE // BLOCK_KV)
    else:
        index = step * (BLOCK_KV // LISTS.BLOCK_SIZE) + tl.arange(0, BLOCK_KV) // LISTS.BLOCK_SIZE
    return index


@triton.jit
def blocks_of_step(visits, step, LISTS: tl.constexpr, BLOCK_KV: tl.constexpr):
    """The blocks at `index_of_step`; -1 after the last block."""
    index = index_of_step(step, LISTS, BLOCK_KV)
    return tl.load(visits.ptr + index, mask=index < visits.num_blocks, other=-1)


@triton.jit
def keys_of_blocks(block, step, LISTS: tl.constexpr, BLOCK_KV: tl.constexpr):
    """The keys that a loop visits in a step, given their blocks; negative after the last block."""
    offset = tl.arange(0, BLOCK_KV)
    if LISTS.BLOCK_SIZE >= BLOCK_KV:
        offset += step % (LISTS.BLOCK_SIZE // BLOCK_KV) * BLOCK_KV
    else:
        offset = offset % LISTS.BLOCK_SIZE
    return block * LISTS.BLOCK_SIZE + offset


@triton.jit
def seen_by_query(visits, key, exists, mask, KIND: tl.constexpr):
    """Whether the only query of a job sees each key, [keys]; `exists` says which keys exist."""
    seen = exists & sees(visits.position, key, visits.kv_len, mask, KIND)
    if KIND.HAS_DRAFT_MASK:
        new = key - visits.num_old
        inside = exists & (new >= 0) & (new < mask.draft_width)
        entry = tl.load(mask.draft_ptr + visits.token.to(tl.int64) * mask.draft_stride + new, mask=inside, other=0)
        seen = seen & ((new < 0) | (entry != 0))
    if KIND.RANGES:
        ranges = mask.ranges_ptr + visits.token.to(tl.int64) * (2 * KIND.RANGES)
        seen = seen & in_ranges(ranges, key, visits.kv_len, KIND)
    return seen


@triton.jit
def seers_of(visits, index, key, mask, LISTS: tl.constexpr):
    """For each key, the set of the job's queries that see it, as bits.

    A query sees a key if its list names the key's block, and no mask hides the key from it.

    `index` is a result of `index_of_step`. There are no masks except causal ones and windows.
    """
    exists = index < visits.num_blocks
    before = tl.load(visits.ptr + LISTS.WIDTH + index, mask=exists, other=0)
    seers = tl.load(visits.ptr + 2 * LISTS.WIDTH + index, mask=exists, other=0) - before
    after = key - visits.position  # the key is this far after the job's first query
    if LISTS.MASK.CAUSAL:
        seers = seers & (-1 << tl.minimum(tl.maximum(after, 0), LISTS.TOKENS))
    if LISTS.MASK.HAS_WINDOW:
        seers = seers & ((1 << tl.minimum(tl.maximum(after + mask.window, 0), LISTS.TOKENS)) - 1)
    return seers + tl.zeros_like(key)


@triton.jit
def keys_of_step(visits, block, step, mask, LISTS: tl.constexpr, BLOCK_KV: tl.constexpr):
    """(key, whether some row of the job sees it, whether each row sees it) for the keys that a loop visits in a step.

    `block` is a result of `blocks_of_step`. The last result is [rows or 1, keys]. All results are computed from
    integers alone, so that loads of keys do not wait for logits.
    """
    key = keys_of_blocks(block, step, LISTS, BLOCK_KV)
    exists = (key >= 0) & (key < visits.kv_len)
    if LISTS.TOKENS == 1:
        readable = seen_by_query(visits, key, exists, mask, LISTS.MASK)
        seen = readable[None, :]
    else:
        index = index_of_step(step, LISTS, BLOCK_KV)
        seers = tl.where(exists, seers_of(visits, index, key, mask, LISTS), 0)
        readable = seers != 0
        token = tl.minimum(visits.row // LISTS.GROUP, LISTS.TOKENS)  # rows after the job's last token have no bit
        seen = ((seers[None, :] >> token[:, None]) & 1) != 0
    return key, readable, seen


@triton.jit
def visible_blocks(entries, exists, query, num_old, kv_len, mask, KIND: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The blocks at the addresses `entries`; -1 for an entry that does not exist, or if masks hide all of its block.

    `query`, to which an entry belongs, is counted from the sequence's first query, whose position is `num_old`.
    """
    block = tl.load(entries, mask=exists, other=-1)
    low = tl.maximum(first_key(num_old + query, mask, KIND), 0) // BLOCK_SIZE
    high = (tl.maximum(end_key(num_old + query, kv_len, KIND), 0) + BLOCK_SIZE - 1) // BLOCK_SIZE
    return tl.where((block >= low) & (block < high), block, -1)


@triton.jit
def names(lists_ptr, count, block, WIDTH: tl.constexpr):
    """Whether the sorted lists of `count` blocks at the addresses `lists_ptr` name `block`, by binary search.

    The arguments broadcast. If the lengths of sequences are invalid, a query may have a list that was never written,
    with an arbitrary count. So `count` is limited to WIDTH, the maximum length of a list.
    """
    count = tl.minimum(count, WIDTH)
    low = tl.zeros_like(block + count)
    high = low + count
    size = WIDTH
    while size > 0:
        size = size // 2
        middle = (low + high) // 2
        less = tl.load(lists_ptr + middle, mask=middle < high, other=LARGEST_INT) < block
        low = tl.where(less, middle + 1, low)
        high = tl.where(less, high, middle)
    return tl.load(lists_ptr + low, mask=low < count, other=-1) == block


@triton.jit(do_not_specialize=VARYING)
def join_kernel(
    selected_ptr, cu_q_lens_ptr, kv_lens_ptr, num_seqs_ptr,
    lists_ptr,
    num_tokens, max_num_seqs, capacity, window, selected_token_stride, selected_head_stride,
    HAS_NUM_SEQS: tl.constexpr, PACKED: tl.constexpr, N: tl.constexpr, N_PAD: tl.constexpr, LISTS: tl.constexpr,
):  # fmt: skip
    """Join the lists [N] of one job's tokens."""
    TOKENS: tl.constexpr = LISTS.TOKENS
    BLOCK_SIZE: tl.constexpr = LISTS.BLOCK_SIZE
    ENTRIES: tl.constexpr = TOKENS * N_PAD
    job = tl.program_id(0)
    head = tl.program_id(1)
    num_seqs = count_sequences(num_seqs_ptr, max_num_seqs, HAS_NUM_SEQS)
    batch = Batch(cu_q_lens_ptr, kv_lens_ptr, num_seqs, max_num_seqs, num_tokens, capacity)
    seq, start, q_len, first, live = find_rows(job, batch, 1, TOKENS)
    if (first >= 0) & (first < q_len):
        kv_len = 0
        if live:
            kv_len = length_of(seq, kv_lens_ptr, capacity, PACKED)
        place = tl.arange(0, ENTRIES)
        query = first + place // N_PAD
        column = place % N_PAD
        exists = (query < q_len) & (column < N)
        entries = selected_ptr + head.to(tl.int64) * selected_head_stride
        entries += (start + query).to(tl.int64) * selected_token_stride + column
        block = visible_blocks(entries, exists, query, kv_len - q_len, kv_len, Mask(window), LISTS.MASK, BLOCK_SIZE)
        code = tl.sort(tl.where(block >= 0, block * TOKENS + place // N_PAD, LARGEST_INT))
        before = tl.gather(code, tl.maximum(place - 1, 0), 0)
        exists = code != LARGEST_INT
        block = code // TOKENS
        opens = exists & ((place == 0) | (before // TOKENS != block))
        rank = tl.cumsum(opens.to(tl.int32), 0) - 1
        target = lists_ptr + list_place(job, head, LISTS)
        tl.store(target, tl.sum(opens.to(tl.int32), 0))
        tl.store(target + 1 + rank, block, mask=opens)
        if TOKENS > 1:
            after = tl.gather(code, tl.minimum(place + 1, ENTRIES - 1), 0)
            new = exists & ((place == 0) | (before != code))  # a list may name a block twice
            bits = tl.where(new, 1 << code % TOKENS, 0)
            sums = tl.cumsum(bits, 0)
            closes = exists & ((place == ENTRIES - 1) | (after // TOKENS != block))
            tl.store(target + 1 + LISTS.WIDTH + rank, sums - bits, mask=opens)
            tl.store(target + 1 + 2 * LISTS.WIDTH + rank, sums, mask=closes)


# ---- host side


def too_long(call: Any) -> str | None:
    """The reason why a call's lists cannot be sorted; None if they can be sorted, or if the call has no lists."""
    if call.selected is None or call.num_selected <= MOST_ENTRIES:
        return None
    return f"expected lists of at most {MOST_ENTRIES} blocks, got {call.num_selected}"


def most_joined(call: Any, capacity: int) -> int:
    """The maximum number of tokens whose lists one program can join; 1 without lists.

    `capacity` is the maximum number of keys of a sequence.
    """
    if call.selected is None or call.key_ranges is not None or getattr(call, "draft_mask", None) is not None:
        return 1  # jobs of several tokens support only causal masks and windows; see `seers_of`
    tokens, entries, blocks = MOST_TOKENS, next_power_of_2(call.num_selected), capacity // call.block_size + 1
    while tokens > 1 and (tokens * entries > JOINED_ENTRIES or tokens * blocks > LARGEST_INT.value):
        tokens //= 2
    return tokens


def joined_tokens(call: Any, rows: int, capacity: int) -> int:
    """The tokens per job for prompts: as many as one program can join, with at most `rows` rows in total."""
    tokens, most = 1, most_joined(call, capacity)
    while 2 * tokens * call.group <= rows and tokens < most:
        tokens *= 2
    return tokens


def list_kind(call: Any, tokens: int, capacity: int, mask: MaskKind) -> ListKind:
    """The form of a call's joined lists. A job has `tokens` tokens, or as many as one program can join."""
    tokens = min(tokens, most_joined(call, capacity))
    return ListKind(
        BLOCK_SIZE=call.block_size,
        TOKENS=tokens,
        WIDTH=tokens * call.num_selected,
        HEADS=call.selected.shape[1],
        GROUP=call.group,
        MASK=mask,
    )


def num_jobs(num_tokens: int, num_seqs: int, lists: ListKind) -> int:
    """An upper bound on the number of jobs, which follows from shapes alone. Some jobs have no token."""
    return max_blocks(num_tokens, lists.plain.TOKENS, num_seqs)


def join(
    call: Any, launch: Any, lists: ListKind, sequences: tuple[Any, ...], numbers: dict[str, int], *,
    has_num_seqs: bool = False, packed: bool = False,
) -> Any:  # fmt: skip
    """Enqueue the kernel; returns the joined lists.

    `sequences` has cu_q_lens, kv_lens (cu_kv_lens if `packed`) and num_seqs or a stand-in. `numbers` has num_tokens,
    max_num_seqs, capacity (the number of all keys if `packed`) and window.
    """
    selected, form = launch.packed(call.selected), lists.plain
    jobs = num_jobs(numbers["num_tokens"], numbers["max_num_seqs"], lists)
    columns = max(next_power_of_2(call.num_selected), SMALLEST // form.TOKENS)
    return launch(
        join_kernel,
        (jobs, form.HEADS),
        (selected, *sequences),
        [((max(jobs, 1), form.HEADS, form.STRIDE), "int32")],
        num_warps=min(max(form.TOKENS * columns // 512, 1), 32),
        num_stages=1,
        **numbers,
        **stride_arguments(launch, ("token", "head"), selected=selected),
        HAS_NUM_SEQS=has_num_seqs,
        PACKED=packed,
        N=call.num_selected,
        N_PAD=columns,
        LISTS=lists,
    )[0]
