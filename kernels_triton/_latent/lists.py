"""Latent attention: lists of keys, and the query token and head of each row."""

import dataclasses
from typing import NamedTuple

import triton
import triton.language as tl

from ragged_attention.kernels_triton._constants import Constants
from ragged_attention.kernels_triton._mask import MaskKind, first_key
from ragged_attention.kernels_triton._pages import are_readable, pages_of
from ragged_attention.kernels_triton._splits import splits_of_sequence


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class ListKind(Constants):
    """The properties of a call's key lists, and the size of key blocks."""

    MASK: MaskKind
    Q_TOKENS: int  # query tokens per sequence
    HAS_LENS: bool
    LENS_OF_TOKENS: bool  # whether each query token has a length of its own
    HAS_EXTRA: bool  # whether there is a second cache
    HAS_EXTRA_LENS: bool
    EXTRA_LENS_OF_TOKENS: bool
    BLOCK_KV: int
    MIN_BLOCKS: int  # minimum blocks per split, unless scheduled


class Lists(NamedTuple):
    """The lengths of the lists into both caches."""

    lens_ptr: tl.tensor
    extra_lens_ptr: tl.tensor
    longest: tl.tensor  # the maximum number of keys in a list of the first cache
    extra_longest: tl.tensor  # the maximum number of keys in a list of the second cache


@triton.jit
def token_and_head(row, job, kv_head, GROUP: tl.constexpr, SPARSE: tl.constexpr):
    """(query token, query head) of a job's rows."""
    if SPARSE:
        token = job + tl.zeros_like(row)
        head = kv_head * GROUP + row
    else:
        token = row // GROUP
        head = kv_head * GROUP + row % GROUP
    return token, head


@triton.jit
def list_length(lens_ptr, index, longest, HAS_LENS: tl.constexpr):
    """The number of keys in a list, clamped to [0, longest]."""
    count = longest
    if HAS_LENS:
        count = tl.minimum(tl.maximum(tl.load(lens_ptr + index), 0), longest)
    return count


@triton.jit
def blocks_before(position, mask, KIND: tl.constexpr, BLOCK_KV: tl.constexpr):
    """The number of whole key blocks before the first key that the query at `position` sees."""
    blocks = 0
    if KIND.HAS_FIRST_KEY:
        blocks = tl.maximum(first_key(position, mask, KIND), 0) // BLOCK_KV
    return blocks


@triton.jit
def list_blocks(lists, seq, job, mask, KIND: tl.constexpr):
    """(keys in a job's list, keys in its second list, skipped blocks, other blocks).

    Blocks are those of the first list. The first blocks, which no query sees, are skipped.
    """
    index = seq * KIND.Q_TOKENS + job if KIND.LENS_OF_TOKENS else seq
    num_keys = list_length(lists.lens_ptr, index, lists.longest, KIND.HAS_LENS)
    skipped = blocks_before(num_keys - KIND.Q_TOKENS, mask, KIND.MASK, KIND.BLOCK_KV)
    num_blocks = (num_keys + KIND.BLOCK_KV - 1) // KIND.BLOCK_KV - skipped
    num_extra_keys = 0
    if KIND.HAS_EXTRA:
        index = seq * KIND.Q_TOKENS + job if KIND.EXTRA_LENS_OF_TOKENS else seq
        num_extra_keys = list_length(lists.extra_lens_ptr, index, lists.extra_longest, KIND.HAS_EXTRA_LENS)
    return num_keys, num_extra_keys, skipped, num_blocks


@triton.jit
def list_splits(lists, seq, job, num_splits, mask, KIND: tl.constexpr):
    """The number of splits of a job without a schedule."""
    _, num_extra_keys, _, num_blocks = list_blocks(lists, seq, job, mask, KIND)
    all_blocks = num_blocks + (num_extra_keys + KIND.BLOCK_KV - 1) // KIND.BLOCK_KV
    splits, _ = splits_of_sequence(all_blocks, num_splits, KIND.MIN_BLOCKS)
    return splits


@triton.jit
def entries_of(list_ptr, block, exists, first, last, SPARSE: tl.constexpr, PAGE_SIZE: tl.constexpr,
               BLOCK_KV: tl.constexpr):  # fmt: skip
    """The entries of a list for a block of keys: slots or, in a dense call, pages.

    They are -1 for a block that does not exist and, unless the block has a single page, for keys outside [first, last).
    """
    if SPARSE:
        position = block * BLOCK_KV + tl.arange(0, BLOCK_KV)
        entries = tl.load(list_ptr + position, mask=position < tl.where(exists, last, 0), other=-1)
    else:
        entries = pages_of(list_ptr, block * BLOCK_KV, first, last, exists, True, PAGE_SIZE, BLOCK_KV)
    return entries


@triton.jit
def keys_of(entries, block, first, last, num_slots, SPARSE: tl.constexpr, PAGE_SIZE: tl.constexpr,
            BLOCK_KV: tl.constexpr):  # fmt: skip
    """(position, page, offset in the page, whether readable) of each key in a block, from the list's `entries`."""
    position = block * BLOCK_KV + tl.arange(0, BLOCK_KV)
    if SPARSE:
        readable = (entries >= 0) & (entries < num_slots)
        slot = tl.where(readable, entries, 0)
        page = slot // PAGE_SIZE
        offset = slot % PAGE_SIZE
    else:
        page = entries
        readable = are_readable(position, page, first, last, num_slots // PAGE_SIZE, PAGE_SIZE, BLOCK_KV)
        offset = position % PAGE_SIZE
    return position, page, offset, readable
