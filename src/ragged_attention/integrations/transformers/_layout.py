"""A layer's call, and its keys and values as the pages or packed sequences of our operations."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ragged_attention.errors import Unsupported
from ragged_attention.integrations.transformers._masks import Pattern, computed_once, edges_of


class LayerCall(NamedTuple):
    """The arguments of an attention layer.

    query, key, value: [B, H, L_q, D], [B, K, L_k, D] and [B, K, L_k, D_v]; K divides H.
    settings: the scale, soft cap and sinks, by the names of our operations.
    others: the other keywords of transformers.
    pattern: the visible keys, or None if only `mask` can express them.
    selection: the indexer's selection from the visible keys (`_selection`), or None.
    """

    module: Any
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    settings: dict[str, Any]
    others: dict[str, Any]
    pattern: Pattern | None = None
    selection: Any = None


def need_gradient(*tensors: torch.Tensor | None) -> bool:
    """Whether any of the tensors requires a gradient."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def sinks_of_queries(call: LayerCall) -> torch.Tensor | None:
    """The keyword `sinks`, which is one more logit for each query [B, H, L_q, 1], or None.

    Raises:
        Unsupported: the keyword has another shape.
    """
    sinks, size = call.others.get("sinks"), (*call.query.shape[:3], 1)
    if sinks is not None and tuple(getattr(sinks, "shape", ())) != size:
        raise Unsupported(f"expected sinks of each query, {list(size)}, got {getattr(sinks, 'shape', sinks)}")
    return sinks


def with_sinks(operation: Callable[..., Any], sinks: torch.Tensor | None) -> Callable[..., torch.Tensor]:
    """The operation with one more logit for each query, `sinks` [T, H, 1], in the denominator of its softmax."""
    if sinks is None:
        return operation

    def attend(*args: Any, **settings: Any) -> torch.Tensor:
        out, lse = operation(*args, return_lse=True, **settings)
        return (out * torch.sigmoid(lse[..., None] - sinks)).to(out.dtype)

    return attend


def shown_first(shown: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An order of each row's keys in which padding comes last, and the number of keys that are not padding."""
    return computed_once(shown, "order", lambda: _shown_first(shown))


def _shown_first(shown: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.argsort(~shown, dim=1, stable=True), shown.sum(1)


def queries_shown(pattern: Pattern, shown: torch.Tensor, q_len: int) -> torch.Tensor:
    """Which queries [B, L_q] are not padding. Without causality this is unknown, and none of them counts as padding."""
    if not pattern.causal:
        return shown.new_ones(shown.shape[0], q_len)
    if isinstance(pattern.end, torch.Tensor):
        return shown[:, pattern.end - q_len + torch.arange(q_len, device=shown.device)]
    return shown if q_len == shown.shape[1] else shown[:, -q_len:]


def queries_first(pattern: Pattern, shown: torch.Tensor, q_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`shown_first` for queries: their order, and their number in each row."""
    real = queries_shown(pattern, shown, q_len)
    if real is shown:
        return shown_first(shown)
    return computed_once(shown, ("queries", q_len, pattern.causal), lambda: _shown_first(real))


def _queries_last(pattern: Pattern, q_len: int) -> torch.Tensor | None:
    """An order [B, L_q, 1, 1] of queries in which padding comes first, or None if it already does.

    In our operations, a row's last query is at the row's last key. So padding must come before all other queries.
    """
    shown = pattern.shown
    if shown is None or not pattern.causal or q_len == 1:
        return None
    return computed_once(shown, ("padding first", q_len), lambda: _padding_first(queries_shown(pattern, shown, q_len)))


def _padding_first(shown: torch.Tensor) -> torch.Tensor | None:
    if not torch.compiler.is_compiling() and bool((shown[:, 1:] >= shown[:, :-1]).all()):
        return None
    return torch.argsort(shown, dim=1, stable=True)[:, :, None, None]


def row_edges(rows: int, length: int, device: torch.device) -> torch.Tensor:
    """The edges of rows of equal length that are laid out one after another."""
    return torch.arange(rows + 1, dtype=torch.int32, device=device) * length


def key_ranges(ranges: torch.Tensor, rows: int) -> torch.Tensor:
    """The ranges of a pattern as the argument [B * L_q, R, 2] of our operations."""
    return ranges.expand(rows, -1, -1, -1).flatten(0, 1)


def over_pages(
    operation: Callable[..., torch.Tensor], q: torch.Tensor, pages: Any, kv_lens: torch.Tensor, table: torch.Tensor,
    pattern: Pattern, settings: dict[str, Any],
) -> torch.Tensor:  # fmt: skip
    """The result [B, L_q, H, D_v] of an operation over pages, for queries [B, L_q, H, D]."""
    rows, q_len = q.shape[:2]
    order = _queries_last(pattern, q_len)
    q = q if order is None else q.take_along_dim(order, 1)
    edges = row_edges(rows, q_len, q.device)
    if pattern.ranges is None:
        settings = {**settings, "causal": pattern.causal}
    else:
        settings = {**settings, "key_ranges": key_ranges(pattern.ranges, rows)}
    out = operation(q.flatten(0, 1), pages, kv_lens, table, edges, max_q_len=q_len, **settings)
    out = out.unflatten(0, (rows, q_len))
    return out if order is None else torch.empty_like(out).scatter_(1, order.expand_as(out), out)


def takes_pages(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether operations over pages take these head sizes."""
    return all(tensor.shape[-1] % 8 == 0 and 16 <= tensor.shape[-1] <= 512 for tensor in (query, value))


def pages_of(
    key: torch.Tensor, value: torch.Tensor, shown: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A cache [B, K, L, D] as k_pages, v_pages, kv_lens and page_indices, without a copy if possible.

    On a CPU, a row without padding is a page. Otherwise a page is one key, so that a row's table can leave keys out.
    Page p begins p keys after the start of the cache, in every head. Keys and values are copied if their strides do not
    allow this or differ from each other, such as keys and values that a layer has just computed from latents.
    """
    rows, _, length, _ = key.shape
    device = key.device
    in_rows = all(tensor.stride(3) == 1 for tensor in (key, value))
    if shown is None and in_rows and device.type == "cpu":  # kernels for CPUs are not compiled for a page size
        table = torch.arange(rows, dtype=torch.int32, device=device)[:, None]
        return key.transpose(1, 2), value.transpose(1, 2), torch.full_like(table[:, 0], length), table
    step = _step(key)
    if step is None or step != _step(value):
        step = key.shape[1] * length
        key, value = (
            tensor if _step(tensor) == step else tensor.clone(memory_format=torch.contiguous_format)
            for tensor in (key, value)
        )
    if shown is None:
        shown = torch.ones(rows, length, dtype=torch.bool, device=device)
    table, lens = computed_once(shown, step, lambda: _listed(shown, step))
    pages = (
        tensor.as_strided(
            ((rows - 1) * step + length, 1, tensor.shape[1], tensor.shape[3]),
            (tensor.stride(2), tensor.stride(2), tensor.stride(1), 1),
        )
        for tensor in (key, value)
    )
    return (*pages, lens, table)  # type: ignore[return-value]


def _step(tensor: torch.Tensor) -> int | None:
    """The distance between rows of a tensor [B, K, L, D] in keys, or None if it is not a whole number."""
    row, _, key, number = tensor.stride()
    return row // key if number == 1 and row % key == 0 else None


def _listed(shown: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The page tables for pages of one key, and the rows' lengths."""
    order, lens = shown_first(shown)
    return (torch.arange(shown.shape[0], device=shown.device)[:, None] * step + order).int(), lens.int()


def packed_edges(call: LayerCall, pattern: Pattern) -> torch.Tensor | None:
    """The edges of packed sequences that the layer's keywords name and its mask ignores, or None.

    They are given by `cu_seq_lens_q`. Without it, sequences begin where positions restart at 0, which some models
    ignore in their mask. This holds only without a cache, without a padding mask, and if the layer uses the positions
    for rotary embeddings.
    """
    if call.others.get("cu_seq_lens_q") is not None:
        return call.others["cu_seq_lens_q"].int()
    positions, (rows, _, q_len, _) = call.others.get("position_ids"), call.query.shape
    if positions is None or call.others.get("use_cache") is not False or not pattern.causal or pattern.has_padding_mask:
        return None
    if not q_len == call.key.shape[2] > 1 or positions.shape != (rows, q_len) or torch.compiler.is_compiling():
        return None
    if not _rotates(type(call.module)):
        return None
    begins, continues = positions[:, 1:] == 0, positions.diff(dim=1) == 1
    is_packed = begins.any() & (begins | continues).all() & (positions[:, 0] == 0).all()
    if not bool(is_packed):
        return None
    return edges_of(torch.nn.functional.pad(begins, (1, 0)).cumsum(1))


@functools.cache
def _rotates(kind: type) -> bool:
    return "position_embeddings" in inspect.signature(kind.forward).parameters
