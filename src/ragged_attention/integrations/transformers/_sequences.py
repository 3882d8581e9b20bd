"""Attention over keys and values as packed sequences, by `varlen_attention`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ragged_attention.integrations.transformers import _layout
from ragged_attention.integrations.transformers._layout import LayerCall
from ragged_attention.integrations.transformers._masks import Pattern, pattern_of
from ragged_attention.torch import varlen_attention

Layout = Callable[[torch.Tensor], torch.Tensor]  # packs [B, H, L, D] as [T, H, D]


class Laid(NamedTuple):
    """The layout of a call as packed sequences.

    queries, keys: functions that pack a tensor [B, H, L, D] with an entry for each query, or for each key.
    edges: the edges of the queries' sequences and of the keys' sequences, int32 [S + 1] each.
    longest: an upper bound of the number of keys per sequence.
    order: the original index in its row of each packed query, int [B, L_q], or None if the order is unchanged.
    """

    queries: Layout
    keys: Layout
    edges: tuple[torch.Tensor, torch.Tensor]
    longest: int
    order: torch.Tensor | None = None


def laid_out(call: LayerCall, pattern: Pattern, *, has_bias: bool = False) -> Laid:
    """The layout of a call. With `has_bias` and without causality, query i and key i have the same position."""
    shown = pattern.shown
    return _packed(call, pattern) if shown is None else _without_padding(call, pattern, shown, has_bias)


def _packed(call: LayerCall, pattern: Pattern) -> Laid:
    """The layout of a call without padding: the rows one after another."""
    (rows, _, q_len, _), kv_len, device = call.query.shape, call.key.shape[2], call.query.device
    if pattern.edges is None:
        edges = _layout.row_edges(rows, q_len, device), _layout.row_edges(rows, kv_len, device)
    else:
        is_from_layer = call.mask is None or pattern_of(call.mask).edges is None  # type: ignore[union-attr]
        cu_kv_lens = call.others.get("cu_seq_lens_k") if is_from_layer else None
        edges = pattern.edges, pattern.edges if cu_kv_lens is None else cu_kv_lens.int()

    def in_rows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(1, 2).flatten(0, 1)

    return Laid(in_rows, lambda tensor: in_rows(tensor[:, :, :kv_len]), edges, kv_len)


def _without_padding(call: LayerCall, pattern: Pattern, shown: torch.Tensor, has_bias: bool) -> Laid:
    """The layout of each row as two sequences, its tokens and its padding, so that shapes do not depend on lengths."""
    rows, _, q_len, _ = call.query.shape
    order, kv_lens = _layout.shown_first(shown)
    if has_bias and not pattern.causal and q_len > 1:  # the bias takes query i to be at the position of key i
        q_order, q_lens = order, kv_lens
    else:
        q_order, q_lens = _layout.queries_first(pattern, shown, q_len)

    def ordered(places: torch.Tensor) -> Layout:
        def lay_out(tensor: torch.Tensor) -> torch.Tensor:
            tensor = tensor.transpose(1, 2)[:, : places.shape[1]]
            return tensor.take_along_dim(places[:, :, None, None], 1).flatten(0, 1)

        return lay_out

    def edges(lens: torch.Tensor, whole: int) -> torch.Tensor:
        starts = torch.arange(rows, device=lens.device) * whole
        inner = torch.stack((starts, starts + lens), 1).flatten()
        return torch.cat((inner, inner.new_tensor([rows * whole]))).int()

    both = edges(q_lens, q_len), edges(kv_lens, shown.shape[1])
    return Laid(ordered(q_order), ordered(order), both, shown.shape[1], q_order)


def attend(call: LayerCall, pattern: Pattern, settings: dict[str, Any], tables: torch.Tensor | None) -> torch.Tensor:
    """Attention [B, L_q, H, D_v] of a call, computed over packed sequences."""
    laid = laid_out(call, pattern, has_bias=tables is not None)
    if tables is not None:
        is_shared = tables.shape[0] == tables.shape[2] == 1
        bias = tables[0, :, 0] if is_shared else laid.queries(tables.expand(*call.query.shape[:3], -1))
        settings = {**settings, "relative_bias": bias}
    if call.selection is not None:
        settings = {**settings, **call.selection.lists(laid, call.key.shape[1])}
    sinks = _layout.sinks_of_queries(call)
    operation = _layout.with_sinks(varlen_attention, None if sinks is None else laid.queries(sinks))
    out = operation(laid.queries(call.query), laid.keys(call.key), laid.keys(call.value), *laid.edges, **settings)
    out = out.unflatten(0, (call.query.shape[0], call.query.shape[2]))
    return out if laid.order is None else out.take_along_dim(torch.argsort(laid.order, dim=1)[:, :, None, None], 1)
