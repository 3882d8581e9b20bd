"""The keys that a tile of queries sees, if lists name blocks of keys for each KV head, and the loop over those keys."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ragged_attention.jax_shared.axes import while_loop

NOWHERE = 2**31 - 1  # after all keys, and after all blocks
FEW = 32  # lists of up to this many entries are compared with all blocks; longer lists are searched


class Selected(NamedTuple):
    """The lists of a tile's rows: ascending, with NOWHERE for entries that name no key of the sequence."""

    entries: jax.Array  # i32 [size, K or 1, N], N >= 1
    size: int  # keys in a block

    @classmethod
    def of_tile(cls, call: Any, row: jax.Array, own: jax.Array, kv_len: jax.Array) -> "Selected | None":
        """The lists of the consecutive rows `row`; None if the call has no lists.

        Rows outside the mask `own`, which another tile computes, see no key.
        """
        if call.selected is None:
            return None
        some = lax.dynamic_slice_in_dim(call.selected, row[0], len(row))
        last = (kv_len - 1) // call.block_size  # -1 without keys
        named = own[:, None, None] & (some >= 0) & (some <= last)
        entries = jnp.sort(jnp.where(named, some, NOWHERE), axis=-1)
        return cls(jnp.pad(entries, ((0, 0), (0, 0), (0, not some.shape[2])), constant_values=NOWHERE), call.block_size)

    def next(self, key: jax.Array) -> jax.Array:
        """The first key, from `key` on, that any list names; NOWHERE if there is none."""
        is_block = self.entries < NOWHERE
        begin = jnp.where(is_block, self.entries, 0) * self.size
        later = is_block & (begin + self.size > key)
        return jnp.where(later, jnp.maximum(begin, key), NOWHERE).min()

    def see(self, key: jax.Array) -> jax.Array:
        """Bool [K or 1, size, keys]: whether a row's list names each of the consecutive keys `key`."""
        first = key[0] // self.size
        block = first + jnp.arange((len(key) - 2 + self.size) // self.size + 1, dtype=jnp.int32)
        named = self._name(block)
        return jnp.take(named, key // self.size - first, axis=-1).swapaxes(0, 1)

    def _name(self, block: jax.Array) -> jax.Array:
        """Bool [size, K or 1, blocks]: whether a list names a block."""
        if self.entries.shape[-1] <= FEW:
            return (self.entries[..., None] == block).any(axis=2)
        flat = self.entries.reshape(-1, self.entries.shape[-1])
        index = jax.vmap(lambda entries: jnp.searchsorted(entries, block, method="scan_unrolled"))(flat)
        is_named = jnp.take_along_axis(flat, jnp.minimum(index, flat.shape[-1] - 1), axis=-1) == block
        return is_named.reshape(*self.entries.shape[:2], -1)

    def over_blocks(
        self, start: jax.Array, stop: jax.Array, size: int, step: Callable[[jax.Array, Any], Any], state: Any
    ) -> Any:
        """`state` after `step(first, state)` for blocks of `size` keys that begin in [start, stop).

        Each block begins at a key that some list names.
        """

        def one(carried: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            first, state = carried
            return self.next(first + size), step(first, state)

        return while_loop(lambda carried: carried[0] < stop, one, (self.next(start), state))[1]
