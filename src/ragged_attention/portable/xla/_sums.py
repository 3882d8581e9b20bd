"""Sums of rows that are added by index."""

import jax
import jax.numpy as jnp
from jax import lax

Arrays = tuple[jax.Array, ...]


def added(total: jax.Array, where: jax.Array, rows: jax.Array, *, sort: bool) -> jax.Array:
    """`total` [M, D] with rows [n, D] added at indices `where` [n]; a row with index M is ignored.

    XLA adds rows in order on a CPU, but in any order on a GPU. For a fixed order on a GPU, `sort` sorts the rows by
    index. Then a scan sums the rows of each index in fixed pairs, and each index is written once.
    """
    if not sort:
        return total.at[where].add(rows, mode="drop")
    order = jnp.argsort(where, stable=True)
    where, rows = where[order], rows[order]
    begins = jnp.concatenate([jnp.ones(1, bool), where[1:] != where[:-1]])

    def join(left: Arrays, right: Arrays) -> Arrays:
        return left[0] | right[0], jnp.where(right[0], right[1], left[1] + right[1])

    _, sums = lax.associative_scan(join, (begins[:, None], rows))
    ends = jnp.concatenate([begins[1:], jnp.ones(1, bool)])
    # The last row of each index has the sum. All other rows get distinct indices beyond `total`, and are dropped.
    dropped = len(total) + jnp.arange(len(where), dtype=where.dtype)
    where = jnp.where(ends & (where < len(total)), where, dropped)
    return total.at[where].add(sums, mode="drop", unique_indices=True)
