"""The keys that a block of queries sees, if lists name blocks of keys for each KV head; computed on the host."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ragged_attention.portable.torch_eager._host import Ints, on_host


class Selected(NamedTuple):
    """The lists of blocks of a call."""

    entries: Ints  # [T, K or 1, N]
    size: int  # keys in a block

    def named(self, rows: slice, position: Ints) -> NDArray[np.bool_]:
        """Whether the lists of some rows name the keys at ascending positions, [K or 1, rows, keys]."""
        entries, block = self.entries[rows], position // self.size
        nothing = int(block[-1]) + 1 if len(block) else 0
        named = np.zeros((*entries.shape[:2], nothing + 1), bool)
        inside = (entries >= 0) & (entries < nothing)
        np.put_along_axis(named, np.where(inside, entries, nothing), True, axis=2)
        return named.take(block, axis=2).swapaxes(0, 1)


def lists_on_host(call: Any) -> Selected | None:
    """The lists of blocks of a call, if it has any."""
    return None if call.selected is None else Selected(on_host(call.selected), call.block_size)


def visible(call: Any, query: Ints, key: Ints, ranges: Ints | None) -> NDArray[np.bool_]:
    """Whether queries see keys, given their positions, under all masks except lists and drafts, [rows, keys].

    `ranges` are the queries' ranges of keys, [rows, R, 2], if the call has any.
    """
    if ranges is not None:
        begins, ends = np.moveaxis(ranges, 2, 0)[..., None]
        return ((begins <= key) & (key < ends)).any(1)
    seen = np.ones((len(query), len(key)), bool)
    if call.causal:
        seen &= key <= query[:, None]
    if call.sliding_window is not None:
        seen &= key > query[:, None] - call.sliding_window
    return seen


class VisibleKeys(NamedTuple):
    """The keys of a block of rows, and masks of them, for each KV head or for all."""

    keys: Ints  # ascending indices of the keys that some row sees, and of small gaps between them
    hidden: torch.Tensor | None  # bool [K or 1, rows, keys]: whether a row does not see a key; None if all see all
    blind: torch.Tensor | None  # bool [K or 1, rows]: whether a row sees no key; None if there is no such row
    unseen: torch.Tensor | None  # bool [K or 1, keys]: whether no row sees a key; None if there is no such key


def visible_keys(seen: NDArray[np.bool_], device: torch.device, gap: int = 0) -> VisibleKeys | None:
    """The `VisibleKeys` of rows, or None if no row sees a key; `seen` [K or 1, rows, keys] marks visible keys.

    Gaps of up to `gap` keys between visible keys are filled.
    """
    of_heads: Any = seen.any(1)
    keys = np.flatnonzero(of_heads.any(0))
    if not len(keys):
        return None
    filled = np.zeros(seen.shape[2], bool)
    filled[keys] = True
    for last in np.flatnonzero((np.diff(keys) > 1) & (np.diff(keys) <= gap + 1)):
        filled[keys[last] : keys[last + 1]] = True
    keys = np.flatnonzero(filled)
    masks = ~seen[..., keys], ~seen.any(2), ~of_heads[:, keys]
    hidden, blind, unseen = (torch.from_numpy(mask).to(device) if mask.any() else None for mask in masks)
    return VisibleKeys(keys, hidden, blind, unseen)


def of_heads(mask: torch.Tensor, heads: slice) -> torch.Tensor:
    """The part of a mask [K or 1, ...] that applies to the KV heads `heads`."""
    return mask if len(mask) == 1 else mask[heads]
