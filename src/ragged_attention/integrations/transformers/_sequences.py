"""Attention over keys and values as packed sequences, by `varlen_attention`."""

from collections.abc import Callable
from typing import Any

import torch

from ragged_attention.integrations.transformers import _layout
from ragged_attention.integrations.transformers._layout import LayerCall
from ragged_attention.integrations.transformers._masks import Pattern, pattern_of
from ragged_attention.torch import varlen_attention

Layout = Callable[[torch.Tensor], torch.Tensor]  # [B, H, L, D] as [T, H, D]


def packed(call: LayerCall, pattern: Pattern, settings: dict[str, Any], tables: torch.Tensor | None) -> torch.Tensor:
    """Attention [B, L_q, H, D_v] with the rows laid out one after another."""
    rows, _, q_len, _ = call.query.shape
    device = call.query.device
    if pattern.edges is None:
        edges = _layout.row_edges(rows, q_len, device), _layout.row_edges(rows, call.key.shape[2], device)
    else:
        is_from_layer = call.mask is None or pattern_of(call.mask).edges is None  # type: ignore[union-attr]
        cu_kv_lens = call.others.get("cu_seq_lens_k") if is_from_layer else None
        edges = pattern.edges, pattern.edges if cu_kv_lens is None else cu_kv_lens.int()
    return _attend(call, settings, tables, _in_rows, _in_rows, edges).unflatten(0, (rows, q_len))


def without_padding(
    call: LayerCall, pattern: Pattern, shown: torch.Tensor, settings: dict[str, Any], tables: torch.Tensor | None
) -> torch.Tensor:
    """Attention with each row as two sequences, its tokens and its padding, so that shapes do not depend on lengths."""
    rows, _, q_len, _ = call.query.shape
    order, kv_lens = _layout.shown_first(shown)
    if tables is not None and not pattern.causal and q_len > 1:  # a bias counts positions of queries as those of keys
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
    out = _attend(call, settings, tables, ordered(q_order), ordered(order), both).unflatten(0, (rows, q_len))
    return out.take_along_dim(torch.argsort(q_order, dim=1)[:, :, None, None], 1)


def _in_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2).flatten(0, 1)


def _attend(
    call: LayerCall, settings: dict[str, Any], tables: torch.Tensor | None, queries: Layout, keys: Layout,
    edges: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """The result [T, H, D_v] with what belongs to queries and to keys laid out in these ways."""
    if tables is not None:
        is_shared = tables.shape[0] == tables.shape[2] == 1
        each = tables[0, :, 0] if is_shared else queries(tables.expand(*call.query.shape[:3], -1))
        settings = {**settings, "relative_bias": each}
    sinks = _layout.sinks_of_queries(call)
    operation = _layout.with_sinks(varlen_attention, None if sinks is None else queries(sinks))
    return operation(queries(call.query), keys(call.key), keys(call.value), *edges, **settings)
