"""Attention by lists of keys, if all heads share one row per key: a latent, or a key that is also the value.

Lists express any mask that is the same for all heads and only hides keys. No logits are kept in memory.
"""

from collections.abc import Iterator
from typing import Any

import torch

from ragged_attention.errors import Unsupported
from ragged_attention.integrations.transformers._calls import note
from ragged_attention.integrations.transformers._layout import LayerCall, need_gradient
from ragged_attention.integrations.transformers._masks import is_within, visible
from ragged_attention.torch import mla_decode, sparse_mla_prefill

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
QUERIES = 256  # maximum number of queries per call with lists of keys
MAX_WIDTH = 1024  # maximum columns of a row


def takes_shared(call: LayerCall) -> bool:
    """Whether lists can compute a call with one KV head, whose keys are also its values (deepseek_v4)."""
    width, others = call.key.shape[-1], call.others
    if call.key is not call.value or call.key.shape[1] != 1 or width % 16 or width > MAX_WIDTH:
        return False
    if call.dropout or call.settings["soft_cap"] is not None:
        return False
    if call.query.dtype not in DTYPES or call.key.dtype != call.query.dtype:
        return False
    if any(others.get(name) is not None for name in ("position_bias", "sinks", "indices")):
        return False
    if call.pattern is not None:
        return is_within(call.pattern, call.key.shape[2])
    return _fault(call.mask) is None


def attend_shared(call: LayerCall) -> torch.Tensor:
    """Attention [B, L_q, H, D] of a call that `takes_shared` accepts."""
    settings = {name: value for name, value in call.settings.items() if name != "soft_cap"}
    settings["d_v"] = call.value.shape[-1]
    q, sinks = call.query.transpose(1, 2), settings["sinks"]
    if call.query.shape[2] == 1 and not need_gradient(q, call.key, sinks):
        note(call.module, "mla_decode")
        ((lists, _),) = lists_of(call, call.key)
        pages = call.key.flatten(0, 2)[:, None, None]  # pages of one key, so kernels do not depend on lengths
        return mla_decode(q, pages, indices=lists, **settings)[0]
    note(call.module, "sparse_mla_prefill")
    settings["deterministic"] = bool(call.others.get("deterministic"))
    return attend(call, q, call.key, settings)


def attend(call: LayerCall, q: torch.Tensor, rows: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    """The attention [B, L_q, H, d_v] of each query [B, L_q, H, D] to its list of the rows [B, 1, L_k, D]."""
    flat, parts = rows.flatten(0, 2)[:, None], []
    for lists, queries in lists_of(call, rows):
        out, _, _ = sparse_mla_prefill(q[:, queries].flatten(0, 1), flat, lists.flatten(0, 1)[:, None], **settings)
        parts.append(out.unflatten(0, (q.shape[0], -1)))
    return torch.cat(parts, 1)


def lists_of(call: LayerCall, rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, slice]]:
    """Yield the lists [B, queries, N] of up to `QUERIES` queries at a time, which bounds memory, and their slice.

    Lists have indices of rows, counted over all sequences of the rows [B, 1, L_k, D], and are padded with -1.
    """
    (batch, _, q_len, _), length = call.query.shape, rows.shape[2]
    first = torch.arange(batch, device=rows.device)[:, None, None] * length
    whole: Any = as_bool(call.mask, batch, q_len, length) if call.pattern is None else None
    indices, longest = call.others.get("indices"), None
    if whole is not None and indices is None and not torch.compiler.is_compiling():
        longest = max(1, int(whole.sum(-1).max()))
    for start in range(0, q_len, QUERIES):
        queries = slice(start, start + QUERIES)
        if whole is not None:
            sees = whole[:, :, queries]
        else:
            assert call.pattern is not None
            sees = visible(call.pattern, batch, q_len, length, rows.device, queries)
        lists = _listed(sees[:, 0], queries, indices)
        if longest is not None:
            lists = lists.sort(-1, descending=True).values[..., :longest]  # in descending order, so that -1 comes last
        yield torch.where(lists < 0, -1, lists + first).int(), queries


def _fault(mask: Any) -> str | None:
    """The reason why lists cannot express a mask without a pattern, or None."""
    if mask.ndim > 2 and mask.shape[-3] != 1:
        return f"one mask for all heads over latents, got one of shape {tuple(mask.shape)}"
    if mask.dtype != torch.bool and (torch.compiler.is_compiling() or bool(((mask != 0) & ~_hidden(mask)).any())):
        return "a mask over latents to be bool, or 0 and the smallest number, got other numbers"
    return None


def _hidden(mask: torch.Tensor) -> torch.Tensor:
    return mask <= torch.finfo(mask.dtype).min / 2


def as_bool(mask: Any, rows: int, q_len: int, length: int) -> torch.Tensor:
    """A mask without a pattern as bool [B, 1, L_q, L_k]. Raises Unsupported if lists of keys cannot express it."""
    fault = _fault(mask)
    if fault is not None:
        raise Unsupported(f"expected {fault}")
    return (mask if mask.dtype == torch.bool else ~_hidden(mask)).expand(rows, 1, q_len, length)


def _listed(shown: torch.Tensor, queries: slice, indices: torch.Tensor | None) -> torch.Tensor:
    """The keys [B, queries, N] that some queries see, padded with -1; only those in `indices` [B, L_q, N], if given."""
    length = shown.shape[2]
    if indices is None:
        return torch.where(shown, torch.arange(length, device=shown.device), -1)
    indices = indices[:, queries].long()
    return torch.where(shown.gather(-1, indices.clamp(0, length - 1)) & (indices >= 0), indices, -1)
