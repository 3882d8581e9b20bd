"""The patterns of masks that transformers or a model made, found by reading the masks' values.

Some models make their own masks, of bool or of numbers to add to logits. If all heads share such a mask, and its values
only hide keys, it has a pattern: padding, or ranges of keys. A mask is read once for all layers that share it.
"""

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ragged_attention.integrations.transformers._masks import Mask, Pattern, keep_results, pattern_of
from ragged_attention.integrations.transformers._ranges import blocks, ranges_of

# The version of a mask's memory and the mask's pattern, by the tensor that owns the memory and the place in it.
_known: Any = WeakTensorKeyDictionary()
HIDDEN = -1e8  # a key with this number or less, such as -1e9, has no weight if another key has 0
PLACES = 16  # maximum entries per tensor, because a mask for all lengths is sliced anew in every step


def pattern_of_numbers(mask: torch.Tensor, size: tuple[int, int, int, int]) -> Pattern | None:
    """The pattern of a mask that can be broadcast to `size`, [B, H, L_q, L_k], or None if it has none.

    Compilers and transformations of functions cannot read values, and a mask that is trained has no pattern.
    """
    if torch.compiler.is_compiling() or mask.requires_grad:
        return None
    if torch._C._functorch.is_functorch_wrapped_tensor(mask):  # type: ignore[attr-defined]
        return None
    if isinstance(mask, Mask):
        mask = mask.numbers()
    if mask.is_inference():  # such a tensor has no counter of writes
        return _pattern(mask, size)
    base = mask if mask._base is None else mask._base
    place = size, mask.storage_offset(), tuple(mask.shape), mask.stride(), mask.dtype
    patterns = _known.setdefault(base, {})
    if place not in patterns or patterns[place][0] != mask._version:
        if len(patterns) == PLACES:
            patterns.clear()
        patterns[place] = mask._version, _pattern(mask, size)
    return patterns[place][1]


def is_by_numbers(mask: Any) -> bool:
    """Whether a mask has only numbers, and no pattern."""
    return mask is not None and pattern_of(mask) is None


def _pattern(mask: torch.Tensor, size: tuple[int, int, int, int]) -> Pattern | None:
    rows, heads, q_len, kv_len = size
    if mask.ndim > 4:
        return None
    mask = mask[(None,) * (4 - mask.ndim)]
    fits = mask.shape[0] in (1, rows) and mask.shape[1] in (1, heads) and mask.shape[2] in (1, q_len)
    if not fits or mask.shape[3] != kv_len or 0 in mask.shape:
        return None
    for dim in (0, 1, 2):
        if mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    parts, blind = [], []
    for queries in blocks(mask.shape[0] * mask.shape[1], mask.shape[2], kv_len):
        read = _read(mask[:, :, queries])
        if read is None:
            return None
        parts.append(read[0])
        blind.append(read[1])
    blinded = torch.cat(blind, 1)
    blinded = blinded if bool(blinded.any()) else None
    if mask.shape[2] > 1:
        ranges = ranges_of(parts)
        return None if ranges is None else Pattern(ranges=ranges, blind=blinded)
    shown = parts[0][:, 0]
    if bool(shown.all()):
        return Pattern(blind=blinded)
    return Pattern(shown=keep_results(shown.expand(rows, -1).clone()), blind=blinded)


def _read(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The keys that some queries see, bool [B, queries, L_k], and whether each query is blind, bool [B, queries].

    A query whose keys are all hidden by finite numbers is blind. Such numbers are so large that rounding removes the
    logits from the sum, so the query gives equal weight to the keys with the largest number. The result is None if the
    mask differs between heads or does more than hide keys. A row of -1e9 alone does more.
    """
    if mask.shape[1] > 1 and not bool((mask == mask[:, :1]).all()):
        return None
    mask = mask[:, 0]
    if mask.dtype == torch.bool:
        return mask, torch.zeros(mask.shape[:2], dtype=torch.bool, device=mask.device)
    sees, least = mask == 0, torch.finfo(mask.dtype).min / 2
    most = mask.amax(-1, keepdim=True)
    if not bool((sees | (mask <= max(HIDDEN, least))).all() & ((most == 0) | (most <= least)).all()):
        return None
    blind = (most < 0) & (most > -torch.inf)
    return sees | (blind & (mask == most)), blind[..., 0]
