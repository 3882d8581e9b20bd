"""Loops over the sequences of a batch in tiles; index values are clamped to what the other arrays can hold."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ragged_attention.jax_shared.axes import fori_loop
from ragged_attention.jax_shared.pages import bounds_of


class Sequences(NamedTuple):
    """Each sequence's query rows [start, stop) and number of keys, i32 [S]; sequences past `num_seqs` have no rows."""

    starts: jax.Array
    stops: jax.Array
    kv_lens: jax.Array

    def tiled_by(self, size: int) -> jax.Array:
        """A mask [S] of sequences cut into tiles of `size` rows: those of one row if `size` is 1, else longer ones."""
        lengths = self.stops - self.starts
        return lengths == 1 if size == 1 else lengths > 1


def sequences(kv_lens: Any, cu_q_lens: Any, num_seqs: Any, num_tokens: int, capacity: int) -> Sequences:
    """The sequences of a call, each of which can hold `capacity` positions."""
    return Sequences(*bounds_of(cu_q_lens, num_tokens, num_seqs), jnp.clip(kv_lens, 0, capacity))


def walk_tiles(
    starts: jax.Array, stops: jax.Array, included: jax.Array, size: int, num_rows: int,
    step: Callable[[jax.Array, jax.Array, jax.Array, Any], Any], state: Any,
) -> Any:  # fmt: skip
    """`state` after `step(seq, first, row, state)` for each tile, in order, of the sequences in the mask `included`.

    A tile has the `size` consecutive rows `row`, i32 [size]. Its own rows are those of `row` from `first` on that
    belong to sequence `seq`. A tile that would exceed `num_rows` begins before `first`.
    """
    tiles = jnp.where(included, (stops - starts + (size - 1)) // size, 0)
    ends = jnp.cumsum(tiles, dtype=jnp.int32)

    def one(index: jax.Array, state: Any) -> Any:
        seq = jnp.sum(ends <= index, dtype=jnp.int32)
        first = at(starts, seq) + (index - (at(ends, seq) - at(tiles, seq))) * size
        row = jnp.minimum(first, num_rows - size) + jnp.arange(size, dtype=jnp.int32)
        return step(seq, first, row, state)

    return fori_loop(jnp.int32(0), ends[-1], one, state) if len(ends) else state


def put(whole: jax.Array, part: jax.Array, row: jax.Array, own: jax.Array, axis: int = 0) -> jax.Array:
    """`whole` with a tile's `own` rows replaced by those of `part`; `row` has the tile's indices along `axis`."""
    old = lax.dynamic_slice_in_dim(whole, row[0], len(row), axis)
    own = own.reshape(-1, *(1,) * (whole.ndim - axis - 1))
    return lax.dynamic_update_slice_in_dim(whole, jnp.where(own, part.reshape(old.shape), old), row[0], axis)


def at(array: jax.Array, *index: Any) -> jax.Array:
    """`array[index]` for indices that must be in bounds."""
    return array.at[index].get(mode="promise_in_bounds")
