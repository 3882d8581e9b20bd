"""Position biases in calls of a layer, as the tables by distance that our operations take.

Models pass a dense bias [B, H, L_q, L_k] to attention. A bias that is known to follow from distance is a
`DistanceBias`. Any other bias becomes a table if there is a single query; otherwise the call is computed densely.
"""

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ragged_attention.integrations.transformers._distance_bias import DistanceBias, is_checkpointed
from ragged_attention.integrations.transformers._layout import LayerCall, need_gradient, shown_first
from ragged_attention.integrations.transformers._masks import Pattern, has_holes

_zeros: Any = WeakTensorKeyDictionary()  # the version of each bias that was read, and whether it was 0


def why_dense(call: LayerCall) -> str | None:
    """Why none of our operations takes a call's bias, or None if one does. The pattern of the call must be known."""
    bias, pattern, (rows, heads, q_len, _), kv_len = _bias(call), call.pattern, call.query.shape, call.key.shape[2]
    if bias is None or pattern is None:
        return None
    if tuple(bias.shape[2:]) != (q_len, kv_len) or bias.shape[1] != heads or bias.shape[0] not in (1, rows):
        return "it has a bias of positions of another shape"
    if pattern.blind is not None and not _is_zero(call):
        return "it has a bias of positions, some of which are padding"
    if q_len == 1 or _is_zero(call):
        return None
    if not isinstance(bias, DistanceBias) or torch.compiler.is_compiling():
        return "it has a bias of positions that is not known to follow from distance"
    first, end = bias.tables.first, kv_len if pattern.end is None else pattern.end
    if not bool((first + q_len == end) & bias.tables.is_regular):
        return "its bias counts positions otherwise than its mask"
    if pattern.edges is not None:
        of_keys = call.others.get("cu_seq_lens_k")
        if q_len != kv_len or not (of_keys is None or torch.equal(of_keys.int(), pattern.edges)):
            return "it has a bias of positions between other sequences"
    if pattern.shown is not None and (not (pattern.causal or q_len == kv_len) or has_holes(pattern.shown)):
        return "it has a bias of positions, some of which are padding"
    return None


def is_given(call: LayerCall) -> bool:
    """Whether a call that is not computed densely has a bias other than 0."""
    bias = _bias(call)
    return bias is not None and (call.query.shape[2] == 1 or not _is_zero(call))


def needs_gradient(call: LayerCall) -> bool:
    bias = _bias(call)
    return need_gradient(bias.tables.values if isinstance(bias, DistanceBias) else bias)


def tables_of(call: LayerCall, pattern: Pattern) -> torch.Tensor:
    """The bias of a call as tables for our operations: [B, H, L_q, W], or [1, H, 1, W] for all queries.

    The table of a single query is for a causal operation over the keys that are not padding, in their order. With more
    queries, tables are for a causal operation if the pattern is causal; otherwise they have as many columns before a
    query's own position as after it.
    """
    bias = _bias(call)
    if call.query.shape[2] == 1:
        row = (bias.numbers() if isinstance(bias, DistanceBias) else bias)[:, :, :, : call.key.shape[2]]
        if pattern.shown is None:
            return row.flip(-1).expand(call.query.shape[0], -1, -1, -1).float()
        order, lens = shown_first(pattern.shown)
        distance = torch.arange(order.shape[1], device=order.device)
        place = order.gather(1, (lens[:, None] - 1 - distance).clamp(min=0))
        return row.take_along_dim(place[:, None, None], 3).float()
    values, own = bias.tables.values.float(), bias.tables.own
    if pattern.causal:
        return values[..., own:]
    ahead = values.shape[-1] - 1 - own
    first, last = values[..., :1], values[..., -1:]
    lacking = max(ahead - own, 0), max(own - ahead, 0)
    return torch.cat((first.expand(*first.shape[:3], lacking[0]), values, last.expand(*last.shape[:3], lacking[1])), -1)


def _bias(call: LayerCall) -> Any:
    return call.others.get("position_bias")


def _is_zero(call: LayerCall) -> bool:
    """Whether all of a bias is known to be 0, as in cross attention of t5. It is read once for all layers."""
    bias = _bias(call)
    if isinstance(bias, DistanceBias) or torch.compiler.is_compiling():
        return False
    # Under checkpointing, the layer makes its zeros require a gradient, but nobody reads that gradient.
    if bias.requires_grad and not (bias.is_leaf and is_checkpointed(call.module)):
        return False
    known = _zeros.get(bias)
    if known is None or known[0] != bias._version:
        known = _zeros[bias] = bias._version, not bool(bias.any())
    return known[1]
