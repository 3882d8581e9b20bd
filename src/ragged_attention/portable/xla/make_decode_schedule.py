"""The schedule of a decode step in plain jax operations: the reference's loops, on the device."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ragged_attention.calls import MakeDecodeSchedule
from ragged_attention.portable.xla._framework import why_not as why_not
from ragged_attention.portable.xla._ragged import at

BLOCK = 64  # keys per block
LARGEST_INT32 = 2**31 - 1
FEATURES = frozenset({"extra_lens", "sparse", "num_parts", "overhead"})


class Begin(NamedTuple):
    """Where a program begins: its first sequence, and the block and the split in it."""

    seq: jax.Array
    block: jax.Array
    split: jax.Array
    num_splits: jax.Array  # i32 [S + 1], the cumulative number of splits of the sequences finished so far


def run(call: MakeDecodeSchedule, tile: Any, launch: Any) -> tuple[jax.Array, jax.Array]:
    num_seqs, overhead = call.num_seqs, min(call.overhead, LARGEST_INT32)
    if num_seqs == 0:
        return jnp.zeros((call.num_ranges, 8), jnp.int32).at[:, 2].set(-1), jnp.zeros(1, jnp.int32)
    ends = _blocks(jnp.maximum(call.lens, int(call.sparse)))
    if call.extra_lens is not None:
        ends += _blocks(jnp.maximum(call.extra_lens, 0))
    # The sums are int32, so the costs are clamped to values whose sums cannot overflow.
    overhead = min(overhead, LARGEST_INT32 // (num_seqs + 1) - 1)
    blocks = jnp.clip(ends, 1, LARGEST_INT32 // (num_seqs + 1) - overhead)
    payload = (jnp.sum(blocks + overhead, dtype=jnp.int32) - 1) // min(call.num_ranges, LARGEST_INT32) + 1 + overhead
    zero = jnp.int32(0)

    def affords(state: tuple[Begin, jax.Array]) -> jax.Array:
        begin, budget = state
        rest = at(blocks, jnp.minimum(begin.seq, num_seqs - 1)) - begin.block
        return (begin.seq < num_seqs) & (budget >= rest + overhead)

    def finish(state: tuple[Begin, jax.Array]) -> tuple[Begin, jax.Array]:
        """Give the rest of a sequence to the program."""
        (seq, block, split, num_splits), budget = state
        num_splits = num_splits.at[seq + 1].set(at(num_splits, seq) + split + 1)
        return Begin(seq + 1, zero, zero, num_splits), budget - (at(blocks, seq) - block + overhead)

    def deal(begin: Begin, _: None) -> tuple[Begin, jax.Array]:
        (seq, block, split, num_splits), budget = lax.while_loop(affords, finish, (begin, payload))
        partly = (seq < num_seqs) & (budget > overhead)
        block = jnp.where(partly, block + (budget - overhead), block)
        split = jnp.where(partly, split + 1, split)
        last = jnp.where(block > 0, seq, seq - 1)
        stop = jnp.where(block > 0, block, jnp.where(seq > 0, at(ends, jnp.maximum(seq - 1, 0)), 0))
        part = jnp.stack([begin.seq, begin.block, last, stop, begin.split, zero, zero, zero])
        return Begin(seq, block, split, num_splits), part

    begin = Begin(zero, zero, zero, jnp.zeros(num_seqs + 1, jnp.int32))
    end, parts = lax.scan(deal, begin, None, length=call.num_ranges)
    return parts, end.num_splits


def _blocks(keys: jax.Array) -> jax.Array:
    """The number of blocks that `keys` keys fill. The usual (keys + BLOCK - 1) // BLOCK could overflow."""
    return (keys - 1) // BLOCK + 1
