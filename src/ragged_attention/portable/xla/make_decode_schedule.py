"""The schedule of a decode step, on plain jax operations: the definition's walk, as loops on the device."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ragged_attention.calls import MakeDecodeSchedule
from ragged_attention.portable.xla._framework import why_not as why_not
from ragged_attention.portable.xla._ragged import at

BLOCK = 64  # keys
LARGEST = 2**31 - 1
FEATURES = frozenset({"extra_lens", "sparse", "num_parts", "overhead"})


class Begin(NamedTuple):
    """Where a part begins: sequence, block and split in it; and what has been dealt before it."""

    seq: jax.Array
    block: jax.Array
    split: jax.Array
    num_splits: jax.Array  # i32 [S + 1]


def run(call: MakeDecodeSchedule, tile: Any, launch: Any) -> tuple[jax.Array, jax.Array]:
    num_seqs, overhead = call.num_seqs, min(call.overhead, LARGEST)
    if num_seqs == 0:
        return jnp.zeros((call.num_ranges, 8), jnp.int32).at[:, 2].set(-1), jnp.zeros(1, jnp.int32)
    ends = _blocks(jnp.maximum(call.lens, int(call.sparse)))
    if call.extra_lens is not None:
        ends += _blocks(jnp.maximum(call.extra_lens, 0))
    # There are no wider integers: a sequence too long for the sums counts as one that they can hold.
    overhead = min(overhead, LARGEST // (num_seqs + 1) - 1)
    blocks = jnp.clip(ends, 1, LARGEST // (num_seqs + 1) - overhead)
    payload = (jnp.sum(blocks + overhead, dtype=jnp.int32) - 1) // min(call.num_ranges, LARGEST) + 1 + overhead

    def affords(state: tuple[Begin, jax.Array]) -> jax.Array:
        begin, budget = state
        rest = at(blocks, jnp.minimum(begin.seq, num_seqs - 1)) - begin.block
        return (begin.seq < num_seqs) & (budget >= rest + overhead)

    def finish(state: tuple[Begin, jax.Array]) -> tuple[Begin, jax.Array]:
        """The rest of a sequence goes to the part."""
        (seq, block, split, num_splits), budget = state
        num_splits = num_splits.at[seq + 1].set(at(num_splits, seq) + split + 1)
        start = jnp.int32(0)
        return Begin(seq + 1, start, start, num_splits), budget - (at(blocks, seq) - block + overhead)

    def deal(begin: Begin, _: None) -> tuple[Begin, jax.Array]:
        (seq, block, split, num_splits), budget = lax.while_loop(affords, finish, (begin, payload))
        partly = (seq < num_seqs) & (budget > overhead)
        block = jnp.where(partly, block + (budget - overhead), block)
        split = jnp.where(partly, split + 1, split)
        last = jnp.where(block > 0, seq, seq - 1)
        stop = jnp.where(block > 0, block, jnp.where(seq > 0, at(ends, jnp.maximum(seq - 1, 0)), 0))
        zero = jnp.int32(0)
        part = jnp.stack([begin.seq, begin.block, last, stop, begin.split, zero, zero, zero])
        return Begin(seq, block, split, num_splits), part

    zero = jnp.int32(0)
    begin = Begin(zero, zero, zero, jnp.zeros(num_seqs + 1, jnp.int32))
    end, parts = lax.scan(deal, begin, None, length=call.num_ranges)
    return parts, end.num_splits


def _blocks(keys: jax.Array) -> jax.Array:
    """Blocks that so many keys fill; the count plus BLOCK could overflow."""
    return (keys - 1) // BLOCK + 1
