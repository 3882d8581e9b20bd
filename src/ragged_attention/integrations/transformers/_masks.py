"""What a model's mask becomes: as little as says it all.

transformers describes who sees whom by a function of indices and makes the mask of an attention implementation from
it. That of plain causal or full attention, with or without a window, becomes

    None               nothing is padded, and the last query stands at the last key
    bool [B, N]        which of the first N keys of each row are not padding
    int32 [S + 1]      edges of sequences that are packed into rows, all rows laid out one after another

and anything else a mask [B, 1, L_q, L_k], which `_dense` computes with. The window itself is an argument of the
attention.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import masking_utils

T = TypeVar("T")
_found: Any = WeakTensorKeyDictionary()  # what was found out about each mask of padding that is in use


class Pattern(NamedTuple):
    """Who sees whom: all earlier keys and itself, or all; at most `window` keys; sequences of packed rows."""

    windowed: bool = False
    packed: torch.Tensor | None = None


def _enclosed(function: Callable[..., Any]) -> dict[str, Any]:
    """What a function that transformers made was made of."""
    cells = function.__closure__ or ()
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))


def pattern_of(function: Callable[..., Any]) -> Pattern | None:
    """What a mask function stands for, None where that is none of ours."""
    if function in (masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function):
        return Pattern()
    maker, made = function.__qualname__.partition(".")[0], _enclosed(function)
    if maker == "sliding_window_overlay":
        return Pattern(windowed=True)
    if maker == "packed_sequence_mask_function":
        return Pattern(packed=made["packed_sequence_mask"])
    if maker == "remap_positions_for_packed_sequence":
        return pattern_of(made["mask_function"])
    if maker != "and_masks":
        return None
    found = [pattern_of(each) for each in made["mask_functions"]]
    if None in found:
        return None
    packed = [each.packed for each in found if each is not None and each.packed is not None]
    return Pattern(any(each.windowed for each in found if each is not None), packed[0] if packed else None)


def edges_of(packed: torch.Tensor) -> torch.Tensor:
    """The edges of sequences by their numbers [B, L] in each row."""
    starts = torch.ones_like(packed, dtype=torch.bool)
    starts[:, 1:] = packed[:, 1:] != packed[:, :-1]
    edges = starts.flatten().nonzero()[:, 0]
    return torch.cat((edges, edges.new_tensor([packed.numel()]))).int()


def found_once(shown: torch.Tensor, name: Any, find: Callable[[], T]) -> T:
    """What `find` gives for a mask: all layers of a forward pass have the same one, so it is kept while that lives."""
    known = None if torch.compiler.is_compiling() else _found.get(shown)
    if known is None:  # not made by `mask`, so its owner may change it
        return find()
    if name not in known:
        known[name] = find()
    return known[name]


def _has_holes(shown: torch.Tensor) -> bool:
    """Whether padding lies between what is not padding, so that leaving it out would bring keys nearer."""
    return bool(((shown[:, 1:] != shown[:, :-1]).sum(1) - (~shown[:, 0]).int() > 1).any())


def _padding(
    shown: torch.Tensor | None, batch_size: int, q_length: int, kv_length: int, q_offset: Any, device: Any
) -> torch.Tensor | None:
    """Which keys are not padding, None if none is and all are there; a cache of fixed size has room behind them."""
    if shown is None:
        if isinstance(q_offset, int) and q_offset + q_length >= kv_length:
            return None
        there = torch.arange(kv_length, device=device) < q_offset + q_length
        return there.expand(batch_size, kv_length)
    shown = shown[:, -kv_length:].to(device=device, dtype=torch.bool)
    compiling = torch.compiler.is_compiling()  # when the host cannot look
    return None if shown.shape[1] == kv_length and not compiling and bool(shown.all()) else shown


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    config: Any = None,
    device: Any = "cpu",
    **others: Any,
) -> torch.Tensor | None:
    """The mask of our attention implementation; the arguments are those of transformers' mask interface."""

    def dense(make: Callable[..., Any]) -> Any:
        others.pop("allow_is_causal_skip", None)
        return make(batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
                    kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask, device=device,
                    allow_is_causal_skip=False, **others)  # fmt: skip

    if getattr(config, "compress_rates", None) is not None:  # a model that adds a bias to it
        return dense(masking_utils.eager_mask)
    if getattr(config, "index_topk", None) is not None:  # a model whose indexer reads it
        return dense(masking_utils.sdpa_mask)
    pattern = pattern_of(mask_function)
    if pattern is None:
        return dense(masking_utils.sdpa_mask)
    if pattern.packed is not None:
        return edges_of(pattern.packed)
    shown = _padding(attention_mask, batch_size, q_length, kv_length, q_offset, device)
    if shown is not None and pattern.windowed and not torch.compiler.is_compiling() and _has_holes(shown):
        return dense(masking_utils.sdpa_mask)
    if shown is not None and not torch.compiler.is_compiling():
        _found[shown] = {}
    return shown
