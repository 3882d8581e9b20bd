"""Where transformers keeps keys and values, in the terms of our operations."""

from typing import Any

import torch

from ragged_attention.integrations.transformers._masks import edges_of, found_once


def is_padding(mask: torch.Tensor | None) -> bool:
    """Whether a mask of `_masks.mask` says no more than which keys are padding."""
    return mask is None or mask.ndim == 2


def shown_first(shown: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys of each row, those that are shown first and in their order; and how many are shown."""
    return found_once(shown, "order", lambda: (torch.argsort(~shown, dim=1, stable=True), shown.sum(1)))


def pages_of(
    key: torch.Tensor, value: torch.Tensor, shown: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """A cache [B, K, L, D] as pages where it lies: k_pages, v_pages, kv_lens, page_indices; None if it cannot be.

    Without padding a row is a page. With it a page is one key, so that a row's list can leave keys out: page p begins p
    keys behind the cache's first number, which is the same place in every head. Keys and values that do not lie alike,
    such as those that a layer has just computed from latents, are copied where that makes them.
    """
    rows, _, length, _ = key.shape
    device = key.device
    if shown is None and device.type == "cpu":  # where kernels are not compiled for a page size
        table = torch.arange(rows, dtype=torch.int32, device=device)[:, None]
        return key.transpose(1, 2), value.transpose(1, 2), torch.full_like(table[:, 0], length), table
    if _step(key) != _step(value):
        key, value = key.contiguous(), value.contiguous()
    step = _step(key)
    if step is None or step != _step(value):
        return None
    if shown is None:
        shown = torch.ones(rows, length, dtype=torch.bool, device=device)
    table, lens = found_once(shown, step, lambda: _listed(shown, step))
    pages = (
        tensor.as_strided(
            ((rows - 1) * step + length, 1, tensor.shape[1], tensor.shape[3]),
            (tensor.stride(2), tensor.stride(2), tensor.stride(1), 1),
        )
        for tensor in (key, value)
    )
    return *pages, lens, table  # type: ignore[return-value]


def _step(tensor: torch.Tensor) -> int | None:
    """How many keys behind each other the rows of [B, K, L, D] begin; None if that is no whole number."""
    row, _, key, number = tensor.stride()
    return row // key if number == 1 and row % key == 0 else None


def _listed(shown: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables of pages of one key, and lengths."""
    order, lens = shown_first(shown)
    return (torch.arange(shown.shape[0], device=shown.device)[:, None] * step + order).int(), lens.int()


def packed_edges(rows: int, q_len: int, kv_len: int, others: dict[str, Any]) -> torch.Tensor | None:
    """The edges of sequences that only the arguments tell of: named, or seen by positions that do not go on."""
    if others.get("cu_seq_lens_q") is not None:
        return others["cu_seq_lens_q"].int()
    positions = others.get("position_ids")
    if positions is None or not q_len == kv_len > 1 or torch.compiler.is_compiling():
        return None
    if positions.ndim != 2 or positions.shape != (rows, q_len):
        return None
    numbers = (positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1).cumsum(1)
    return edges_of(numbers) if bool(numbers[:, -1].any()) else None


def whole_mask(
    mask: torch.Tensor | None,
    rows: int,
    q_len: int,
    kv_len: int,
    *,
    causal: bool,
    window: int | None = None,
    queries: slice = slice(None),
    device: Any = "cpu",
) -> torch.Tensor:
    """Whatever `_masks.mask` made as a mask [B, 1, queries, L_k]: bool, or numbers where it was of numbers.

    The last query stands at the last key, behind which a cache of fixed size may have room.
    """
    if mask is not None and mask.ndim == 4:
        return mask[:, :, queries, :kv_len]
    end = mask.shape[1] if mask is not None and mask.ndim == 2 else kv_len
    position = torch.arange(end - q_len, end, device=device)[queries, None]
    key = torch.arange(kv_len, device=device)
    seen = key <= position if causal else key < end
    if window is not None:
        seen = seen & (key > position - window)
    seen = seen.expand(rows, 1, position.shape[0], kv_len)
    if mask is not None and mask.ndim == 1:
        number = torch.bucketize(torch.arange(rows * kv_len, device=device), mask[1:], right=True).view(rows, kv_len)
        return seen & (number[:, queries, None] == number[:, None])[:, None]
    return seen if mask is None else seen & torch.nn.functional.pad(mask, (0, kv_len - end))[:, None, None]
