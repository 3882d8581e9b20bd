"""Tables of the jobs of `_latent` whose queries are tokens of sequences.

A tile of queries consists of consecutive tokens, which may belong to several sequences, so neither queries nor results
have to be moved. A tile has one job for each list of keys that its tokens attend to, and these jobs are consecutive. A
job stores the rows of its own tokens, and the first job of a tile also stores the results of tokens that belong to no
sequence. The number of jobs depends on shapes alone; surplus jobs have no tokens.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ragged_attention.jax_shared.pages import live_edges
from ragged_attention.kernels_pallas._blocks import cdiv


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Each query token's list of keys, and its position in that list."""

    lists: Any  # i32 [T], each token's list, or -1; tokens with the same list are consecutive
    positions: Any  # i32 [T], each token's position in its list
    changes: int  # upper bound on the pairs of neighbouring tokens in one tile that have different lists

    def part(self, first: int, count: int) -> "Tokens":
        """Up to `count` of the tokens, from token `first` on."""
        part = slice(first, first + count)
        return dataclasses.replace(self, lists=self.lists[part], positions=self.positions[part])


class Jobs(NamedTuple):
    """The table of jobs; each column is i32 [jobs], and the jobs of a core are consecutive."""

    lists: Any
    tiles: Any
    positions: Any  # the position that the tile's first token has, or would have, in the job's list
    begins: Any  # the first of the tile's tokens that belong to the job
    ends: Any  # one past the last of these tokens


def tokens_of_sequences(call: Any) -> Tokens:
    """The packed tokens of a call, whose `cu_q_lens` may have any values; list s has the keys of sequence s."""
    edges = live_edges(call.cu_q_lens, call.num_seqs, call.num_tokens)
    stops = jax.lax.cummax(jnp.maximum(edges[:-1], edges[1:]))
    token = jnp.arange(call.num_tokens, dtype=jnp.int32)
    seq = jnp.searchsorted(stops, token, side="right").astype(jnp.int32)
    live = (seq < call.max_num_seqs) & (edges[0] <= token)
    seq = jnp.minimum(seq, call.max_num_seqs - 1)
    positions = jnp.clip(call.kv_lens, 0, call.capacity)[seq] - (stops[seq] - token)
    return Tokens(lists=jnp.where(live, seq, -1), positions=positions, changes=call.max_num_seqs + 1)


def num_tiles(num_tokens: int, size: int, cores: int) -> int:
    """The number of tiles of `size` tokens, rounded up so that all cores have the same number of tiles."""
    return cdiv(num_tokens, size * cores) * cores


def jobs_of(tokens: Tokens, size: int, cores: int) -> Jobs:
    """The jobs on tiles of `size` tokens.

    Core c of n has the tiles c, c + n, c + 2n and so on, so every core gets both early and late positions.
    """
    num_tokens = len(tokens.lists)
    tiles = num_tiles(num_tokens, size, cores) // cores
    missing = tiles * cores * size - num_tokens

    def of_cores(array: Any) -> Any:
        padded = jnp.pad(array, (0, missing), constant_values=-1)
        return padded.reshape(tiles, cores, size).swapaxes(0, 1).reshape(cores, -1)

    lists, positions = of_cores(tokens.lists), of_cores(tokens.positions)
    per_core = tiles * size
    token = jnp.arange(per_core, dtype=jnp.int32)
    begins = (token % size == 0) | (lists != jnp.roll(lists, 1, axis=1))
    count = min(tiles + tokens.changes, per_core)
    first = jax.vmap(lambda row: jnp.nonzero(row, size=count, fill_value=per_core)[0])(begins).astype(jnp.int32)
    past = jnp.concatenate([first[:, 1:], jnp.full((cores, 1), per_core, jnp.int32)], axis=1)
    token = jnp.minimum(first, per_core - 1)
    tile = token // size
    number, position = (jnp.take_along_axis(array, token, axis=1) for array in (lists, positions))
    begin, end = (jnp.where((number >= 0) & (first < per_core), edge - tile * size, 0) for edge in (first, past))
    tile = tile * cores + jnp.arange(cores, dtype=jnp.int32)[:, None]
    columns = (jnp.maximum(number, 0), tile, position - (token - token // size * size), begin, end)
    return Jobs(*(column.reshape(-1) for column in columns))
