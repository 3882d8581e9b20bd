"""The keys that a tile of queries sees, if each query sees ranges of keys, and the loop over blocks of those keys."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ragged_attention.jax_shared.axes import while_loop

NOWHERE = 2**31 - 1  # after all keys


class Ranges(NamedTuple):
    """The ranges [begin, end) of keys that each row of a tile sees, i32 [size, R]; empty ones are [0, 0)."""

    begins: jax.Array
    ends: jax.Array

    @classmethod
    def of_tile(cls, call: Any, row: jax.Array, own: jax.Array, kv_len: jax.Array) -> "Ranges | None":
        """The ranges of the consecutive rows `row`; None if the call has no ranges.

        Rows outside the mask `own`, which another tile computes, see no key.
        """
        if call.key_ranges is None:
            return None
        some = jnp.clip(lax.dynamic_slice_in_dim(call.key_ranges, row[0], len(row)), 0, kv_len)
        begins, ends = some[..., 0], some[..., 1]
        is_range = own[:, None] & (begins < ends)
        return cls(jnp.where(is_range, begins, 0), jnp.where(is_range, ends, 0))

    def next(self, key: jax.Array) -> jax.Array:
        """The first key, from `key` on, that any row sees; NOWHERE if there is none."""
        return jnp.where(self.ends > key, jnp.maximum(self.begins, key), NOWHERE).min()

    def see(self, key: jax.Array) -> jax.Array:
        """Bool [size, keys]: whether a row sees a key."""
        return ((self.begins[..., None] <= key) & (key < self.ends[..., None])).any(axis=1)

    def over_blocks(self, size: int, step: Callable[[jax.Array, Any], Any], state: Any) -> Any:
        """`state` after `step(first, state)` for blocks of `size` keys; each begins at a key that some row sees."""

        def one(carried: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            first, state = carried
            return self.next(first + size), step(first, state)

        first = self.next(jnp.int32(0))
        return while_loop(lambda carried: carried[0] < NOWHERE, one, (first, state))[1]
