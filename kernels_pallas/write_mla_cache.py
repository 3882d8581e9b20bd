"""The write of a step's latent rows into the cache on TPUs: groups of rows are fetched, changed and copied back.

Rows of 8 or 16 bits share 32-bit words with their neighbours, so a copy moves at least one group of rows that share
words. Before the kernel runs, XLA lists the groups that the step changes, each group once, and builds their new words.
Each grid step fetches all groups of a block together, changes their words and copies them back. No group is listed
twice, so copies of different blocks cannot touch the same memory.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ragged_attention.calls import WriteMlaCache
from ragged_attention.jax_shared.latents import new_rows
from ragged_attention.kernels_pallas._blocks import (
    LANES,
    LARGEST_INT,
    cannot_run,
    compiler_params,
    expect_sizes,
    in_powers_of_2,
    next_power_of_2,
    round_up,
)
from ragged_attention.kernels_pallas._latent import rows_per_word
from ragged_attention.kernels_pallas._latent_rows import refusal, words_of
from ragged_attention.kernels_pallas._new_rows import slots, too_many_slots

CHUNK = 8  # groups whose words are changed together
FEATURES = frozenset({
    "slot_mapping", "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "kv_scale", "power_of_two_scales",
    "cache_format", "cache_layout",
})  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The tunable parameters.

    Attributes:
        num_groups_per_block: groups of rows fetched and copied back together, a multiple of 8.
        vmem_limit_bytes: bytes of VMEM that the compiler may use; 0 is its default.
    """

    num_groups_per_block: int = 128
    vmem_limit_bytes: int = 0

    def __post_init__(self) -> None:
        expect_sizes(self, num_groups_per_block=(CHUNK, 8192, CHUNK), vmem_limit_bytes=(0, LARGEST_INT))


def why_not(call: WriteMlaCache) -> str | None:
    if (reason := cannot_run(call) or refusal(call.kv_format) or too_many_slots(call)) is not None:
        return reason
    packing, rows = rows_per_word(call.cache.dtype), call.num_slots * call.num_kv_heads
    if rows >= 2**31 - packing:
        return f"numbers rows in int32, got {call.num_slots} slots of {call.num_kv_heads} KV heads"
    if rows % packing:
        return f"takes caches of a multiple of {packing} rows, which share words, got {rows}"
    return None


def heuristic(call: Any) -> Tile:
    """A block for all new rows, but of at most 256 groups, 4 MiB and a sixteenth of VMEM."""
    row = round_up(call.cache.shape[3], LANES) * 4 * 8  # VMEM pads a row of words to a tile of 8
    most = max(min(call.device.shared_memory // 16, 4 << 20) // row, CHUNK)
    wanted = min(max(next_power_of_2(call.num_tokens * call.num_kv_heads), CHUNK), 256)
    return Tile(num_groups_per_block=min(wanted, 1 << most.bit_length() - 1))


def run(call: Any, tile: Tile, launch: Any) -> jax.Array:
    """The new cache, which reuses the memory of the old one if that is donated."""
    if 0 in (call.num_tokens, *call.cache.shape):
        return call.cache
    words = words_of(call.cache)
    packing, block = rows_per_word(words.dtype), tile.num_groups_per_block
    heads = jnp.arange(call.num_kv_heads, dtype=jnp.int32)
    slot = slots(call)[:, None]
    rows = jnp.where(slot >= 0, slot * call.num_kv_heads + heads, -1).reshape(-1)
    rows = jnp.pad(rows, (0, -len(rows) % block), constant_values=-1)
    groups, sources = changed_groups(rows, packing)
    bits = new_rows(call, call.kv)
    new, kept = new_words(bits.reshape(-1, bits.shape[-1]), sources)
    cache = words.reshape(-1, packing, words.shape[-1])
    written = write_groups(cache, groups.reshape(-1, 1, block), new, kept, tile.vmem_limit_bytes)
    written = written.reshape(call.cache.shape)
    return written if written.dtype == call.cache.dtype else lax.bitcast_convert_type(written, call.cache.dtype)


def changed_groups(rows: jax.Array, packing: int) -> tuple[jax.Array, jax.Array]:
    """The groups of `packing` rows that change, i32 [N], and the new row for each of their rows, i32 [N, packing].

    `rows` [N] has the cache row of each new row, or -1. Each group is listed once, in ascending order; the rest of the
    list is -1. Of several new rows for the same cache row, the last is listed; a cache row without a new row has -1.
    """
    count = len(rows)
    order = jnp.argsort(jnp.where(rows >= 0, rows, LARGEST_INT), stable=True).astype(jnp.int32)
    rows = rows[order]
    group = jnp.where(rows >= 0, rows // packing, -1)
    is_first = (group >= 0) & (group != jnp.roll(group, 1)).at[0].set(True)  # the first new row of its group
    is_last = (rows >= 0) & (rows != jnp.roll(rows, -1)).at[-1].set(True)  # the last new row of its cache row
    place = jnp.cumsum(is_first.astype(jnp.int32)) - 1
    groups = jnp.full(count, -1, jnp.int32).at[jnp.where(is_first, place, count)].set(group, mode="drop")
    sources = jnp.full((count, packing), -1, jnp.int32)
    return groups, sources.at[jnp.where(is_last, place, count), rows % packing].set(order, mode="drop")


def new_words(bits: jax.Array, sources: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The words of each group [N, 1, columns], with zeros for unchanged rows, and a mask of bits to keep [N, 1, 1]."""
    width = bits.dtype.itemsize * 8
    words, kept = jnp.zeros((len(sources), bits.shape[1]), jnp.uint32), jnp.zeros(len(sources), jnp.uint32)
    for row in range(sources.shape[1]):
        source, shift = sources[:, row], width * row
        new = jnp.where(source[:, None] >= 0, bits[jnp.maximum(source, 0)].astype(jnp.uint32) << shift, 0)
        words |= new
        kept |= jnp.where(source >= 0, jnp.uint32(0), jnp.uint32(2**width - 1) << shift)
    return words[:, None], kept[:, None, None]


def kernel(groups: Any, new: Any, kept: Any, initial: Any, cache: Any, buffer: Any, fetched: Any, stored: Any) -> None:
    """Change one block of groups. `groups` are their indices, padded with -1. For `new` and `kept`, see `new_words`."""
    del initial  # aliases `cache`
    block = groups.shape[-1]

    def move(semaphore: Any, *, fetching: bool) -> None:
        """Copy all groups from the cache to the buffer, or back."""

        def start(index: Any) -> Any:
            local, remote = buffer.at[pl.ds(index, 1)], cache.at[pl.ds(groups[0, 0, index], 1)]
            source, target = (remote, local) if fetching else (local, remote)
            pltpu.make_async_copy(source, target, semaphore).start()
            return index + 1

        def wait(_: Any, size: int) -> None:
            some = buffer.at[pl.ds(0, size)]  # which groups are named does not matter, because a semaphore counts bytes
            pltpu.make_async_copy(some, some, semaphore).wait()

        count = lax.while_loop(
            lambda index: (index < block) & (groups[0, 0, jnp.minimum(index, block - 1)] >= 0), start, 0
        )
        in_powers_of_2(count, block, wait)

    def change(chunk: Any, _: Any) -> Any:
        some = pl.ds(chunk * CHUNK, CHUNK)
        words = pltpu.bitcast(buffer[some], jnp.uint32)
        buffer[some] = pltpu.bitcast((words & kept[some]) | new[some], buffer.dtype)
        return _

    move(fetched, fetching=True)
    lax.fori_loop(0, block // CHUNK, change, 0)
    move(stored, fetching=False)


def write_groups(cache: jax.Array, groups: jax.Array, new: jax.Array, kept: jax.Array, limit: int) -> jax.Array:
    """`cache` [groups, packing, columns] with the words of `groups` [blocks, 1, block] changed."""
    _, packing, width = cache.shape
    block = groups.shape[2]
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        kernel,
        grid=(len(groups),),
        in_specs=[
            pl.BlockSpec((1, 1, block), lambda i: (i, 0, 0), memory_space=pltpu.SMEM),
            pl.BlockSpec((block, 1, width), lambda i: (i, 0, 0)),
            pl.BlockSpec((block, 1, 1), lambda i: (i, 0, 0)),
            anywhere,
        ],
        out_specs=anywhere,
        out_shape=jax.ShapeDtypeStruct(cache.shape, cache.dtype),
        scratch_shapes=[pltpu.VMEM((block, packing, width), cache.dtype), *[pltpu.SemaphoreType.DMA] * 2],
        input_output_aliases={3: 0},
        compiler_params=compiler_params(limit),
        name="write_mla_cache",
    )(groups, new, kept, cache)
