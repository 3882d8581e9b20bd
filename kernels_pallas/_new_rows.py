"""The K and V of a step as rows that a kernel can copy, and the slot of each token."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ragged_attention.jax_shared import pages, scaled_rows
from ragged_attention.kernels_pallas._blocks import LARGEST_INT


def new_rows(call: Any, k: jax.Array, v: jax.Array) -> list[jax.Array]:
    """The rows of K [T, K, D] and V [T, K, D_v] for each array of `call.caches`, in its dtype."""
    rows = scaled_rows.new_rows(call, k, v)
    return [lax.bitcast_convert_type(bits, array.dtype) for bits, array in zip(rows, call.caches, strict=True)]


def too_many_slots(call: Any) -> str | None:
    """Why int32 cannot number the slots of `call`'s pages, or None."""
    if (num_slots := call.num_pages * call.page_size) >= LARGEST_INT:
        return f"expected num_pages * page_size < 2**31 - 1, got {num_slots}"
    return None


def last_writes(slots: jax.Array, block: int) -> jax.Array:
    """The slots of each block of tokens, [blocks, block]; -1 if a later token of the block has the same slot.

    Concurrent copies may arrive in any order, and may interleave, so there must be only one copy to each slot.
    """
    slots = jnp.pad(slots, (0, -len(slots) % block), constant_values=-1).reshape(-1, block)
    token = jnp.arange(block)
    overwritten = (slots[:, :, None] == slots[:, None, :]) & (token[:, None] < token[None, :])
    return jnp.where(overwritten.any(axis=2), -1, slots)


def slots(call: Any) -> jax.Array:
    """The slot, page * G + offset, of each token of a call that writes pages, i32 [T]; -1 for tokens without a slot."""
    if call.slot_mapping is None:
        return slots_from_tables(call, call.num_tokens)
    slot = call.slot_mapping
    return jnp.where((slot >= 0) & (slot < call.num_pages * call.page_size), slot, -1).astype(jnp.int32)


def slots_from_tables(call: Any, num_tokens: int) -> jax.Array:
    """The slot of each of `num_tokens` packed tokens, by the page table, i32 [T]; -1 for tokens without a slot."""
    page, offset = pages.addresses_of_tokens(call, num_tokens)
    return jnp.where(page < call.num_pages, page * call.page_size + offset, -1)


def write_scales(call: Any, rows: list[jax.Array], slots: jax.Array) -> list[jax.Array]:
    """The scale pages of `call`, with new scales written to `slots`, i32 [T]. `rows` are [T, K, 1] for each array.

    XLA writes in place. If several tokens have the same slot, the last one is written, as in the kernels that write
    the codes.
    """
    order = jnp.argsort(slots, stable=True)
    ordered = slots[order]
    is_last = (ordered >= 0) & (ordered != jnp.roll(ordered, -1)).at[-1].set(True)
    page, offset = jnp.where(is_last, ordered // call.page_size, call.num_pages), ordered % call.page_size
    scales = [array for array in call.scale_pages if array is not None]
    return [array.at[page, offset].set(new[order], mode="drop") for array, new in zip(scales, rows, strict=True)]
