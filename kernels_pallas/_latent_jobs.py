"""Jobs of `_latent` whose queries are tokens of sequences: what each computes, as tables made of index arrays.

A tile of queries is some consecutive tokens, whosoever they are, so neither queries nor results have to be moved. It
has a job for each sequence that has tokens in it, one job after another; a job stores the rows of its own tokens, and
the first one of a tile also what tokens of no sequence get. How many jobs there are depends on shapes alone: those
that are too many have no tokens.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ragged_attention.jax_shared.pages import live_edges
from ragged_attention.kernels_pallas._blocks import cdiv


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Whose tokens the queries are."""

    lists: Any  # i32 [T], of which list a token sees keys, -1 for none; a list's tokens follow each other
    positions: Any  # i32 [T], among the keys of the list
    changes: int  # how often, at most, neighbours in a tile have different lists

    def part(self, first: int, count: int) -> "Tokens":
        """Some of the tokens."""
        own = slice(first, first + count)
        return dataclasses.replace(self, lists=self.lists[own], positions=self.positions[own])


class Jobs(NamedTuple):
    """What each job has, core after core, all i32 [jobs]."""

    lists: Any
    tiles: Any
    positions: Any  # of a tile's first token, were it one of the list's
    begins: Any  # the first token of the tile that is the job's own
    ends: Any  # one past the last


def tokens_of_sequences(call: Any) -> Tokens:
    """The packed tokens of a call with `cu_q_lens`, whatever that holds; list s is that of sequence s."""
    edges = live_edges(call.cu_q_lens, call.num_seqs, call.num_tokens)
    stops = jax.lax.cummax(jnp.maximum(edges[:-1], edges[1:]))
    token = jnp.arange(call.num_tokens, dtype=jnp.int32)
    seq = jnp.searchsorted(stops, token, side="right").astype(jnp.int32)
    live = (seq < call.max_num_seqs) & (edges[0] <= token)
    seq = jnp.minimum(seq, call.max_num_seqs - 1)
    positions = jnp.clip(call.kv_lens, 0, call.capacity)[seq] - (stops[seq] - token)
    return Tokens(lists=jnp.where(live, seq, -1), positions=positions, changes=call.max_num_seqs + 1)


def num_tiles(num_tokens: int, size: int, cores: int) -> int:
    """Tiles of `size` tokens, as many for each core."""
    return cdiv(num_tokens, size * cores) * cores


def jobs_of(tokens: Tokens, size: int, cores: int) -> Jobs:
    """The jobs on tiles of `size` tokens; core c has each c-th tile, so that early and late positions are shared."""
    num_tokens = len(tokens.lists)
    tiles = num_tiles(num_tokens, size, cores) // cores
    missing = tiles * cores * size - num_tokens

    def of_cores(array: Any) -> Any:
        padded = jnp.pad(array, (0, missing), constant_values=-1)
        return padded.reshape(tiles, cores, size).swapaxes(0, 1).reshape(cores, -1)

    lists, positions = of_cores(tokens.lists), of_cores(tokens.positions)
    here = tiles * size
    place = jnp.arange(here, dtype=jnp.int32)
    begins = (place % size == 0) | (lists != jnp.roll(lists, 1, axis=1))
    count = min(tiles + tokens.changes, here)
    first = jax.vmap(lambda each: jnp.nonzero(each, size=count, fill_value=here)[0])(begins).astype(jnp.int32)
    past = jnp.concatenate([first[:, 1:], jnp.full((cores, 1), here, jnp.int32)], axis=1)
    own = jnp.minimum(first, here - 1)
    tile = own // size
    found, position = (jnp.take_along_axis(array, own, axis=1) for array in (lists, positions))
    begin, end = (jnp.where((found >= 0) & (first < here), at - tile * size, 0) for at in (first, past))
    tile = tile * cores + jnp.arange(cores, dtype=jnp.int32)[:, None]
    columns = (jnp.maximum(found, 0), tile, position - (own - own // size * size), begin, end)
    return Jobs(*(column.reshape(-1) for column in columns))
