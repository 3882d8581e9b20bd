"""Batches for tests of the drop-ins for JAX, EasyDeL and ejKernel over paged caches.

Everything that no query may read is hostile: slots after a sequence's end and unused pages hold NaN, and page table
entries after the last used page are invalid.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ragged_attention.reference.ragged_paged_attention import ragged_paged_attention as definition

NO_PAGE = -12345


@dataclasses.dataclass(frozen=True)
class Batch:
    """The six array arguments of JAX's and ejKernel's ragged attention, in their order."""

    q: Any
    kv_pages: Any
    kv_lens: Any
    page_indices: Any
    cu_q_lens: Any
    num_seqs: Any

    @property
    def arrays(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    @property
    def num_tokens(self) -> int:
        """The number of rows of q without the padding."""
        return int(self.cu_q_lens[int(self.num_seqs[0])])

    def with_(self, **changes: Any) -> "Batch":
        return dataclasses.replace(self, **changes)

    def defined(self, **options: Any) -> Any:
        """The result of the reference implementation in float64, for caches that are not quantised."""
        q, kv_pages = (np.asarray(array, np.float64) for array in (self.q, self.kv_pages))
        return definition(q, kv_pages, *map(np.asarray, self.arrays[2:]), **options)


def ragged(
    lens: Sequence[tuple[int, int]],
    *,
    page_size: int = 4,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 32,
    dtype: Any = "float32",
    kv_dtype: Any = None,
    padding: int = 3,
    more_seqs: int = 2,
    pages_per_seq: int = 0,
    seed: int = 0,
) -> Batch:
    """A batch of sequences (q_len, kv_len), followed by `padding` rows of q and `more_seqs` unused table rows."""
    rng = np.random.default_rng(seed)
    pages = [-(-kv_len // page_size) for _, kv_len in lens]
    count, num_seqs = sum(pages) + 2, len(lens) + more_seqs
    kv = np.full((count, page_size, 2 * heads[1], head_dim), np.nan, np.float32)
    table = np.full((num_seqs, max(pages_per_seq, *pages, 1)), NO_PAGE, np.int32)
    free = iter(rng.permutation(count))
    for seq, (_, kv_len) in enumerate(lens):
        for column in range(pages[seq]):
            page = table[seq, column] = next(free)
            live = min(page_size, kv_len - column * page_size)
            kv[page, :live] = rng.standard_normal((live, *kv.shape[2:]))
    cu_q_lens = np.zeros(num_seqs + 1, np.int32)  # zeros follow the last sequence, as in JAX's tests
    cu_q_lens[1 : len(lens) + 1] = np.cumsum([q_len for q_len, _ in lens])
    kv_lens = np.zeros(num_seqs, np.int32)
    kv_lens[: len(lens)] = [kv_len for _, kv_len in lens]
    q = rng.standard_normal((sum(q_len for q_len, _ in lens) + padding, heads[0], head_dim))
    return Batch(
        q=jnp.asarray(q, dtype),
        kv_pages=jnp.asarray(kv, kv_dtype or dtype),
        kv_lens=jnp.asarray(kv_lens),
        page_indices=jnp.asarray(table),
        cu_q_lens=jnp.asarray(cu_q_lens),
        num_seqs=jnp.array([len(lens)], jnp.int32),
    )


def heads_first(pages: Any) -> tuple[Any, Any]:
    """The keys and the values of interleaved pages, each [num_kv_heads, num_pages, page_size, head_dim]."""
    return jnp.moveaxis(pages[:, :, 0::2], 2, 0), jnp.moveaxis(pages[:, :, 1::2], 2, 0)
