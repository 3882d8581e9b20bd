"""The function that transformers calls for each attention layer, and the operations that it calls."""

from typing import Any

import torch

from ragged_attention.errors import Unsupported
from ragged_attention.integrations.transformers import _continuous, _dense, _latent
from ragged_attention.integrations.transformers._calls import note
from ragged_attention.integrations.transformers._layout import (
    is_padding,
    packed_edges,
    pages_of,
    shown_first,
    whole_mask,
)
from ragged_attention.torch import ragged_paged_attention, varlen_attention

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_HEAD = 256  # of `varlen_attention`


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    cache: Any = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a layer of transformers; the arguments are those of its attention interface.

    Args:
        query, key, value: [B, H, L_q, D], [B, K, L_k, D] and [B, K, L_k, D_v].
        attention_mask: what `_masks.mask` made.
        cache: in continuous batching the paged cache, of which `others` name the places.

    Returns:
        [B, L_q, H, D_v], and None in the place of weights.

    Raises:
        Unsupported: the layer selects blocks of keys, or attends to latents in continuous batching.
    """
    if others.get("block_indices") is not None:
        raise Unsupported(f"expected attention without block_indices, got some from {type(module).__name__}")
    if attention_mask is not None and attention_mask.ndim == 2:
        attention_mask = attention_mask.bool()
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    known = {
        "sm_scale": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "soft_cap": softcap or None,
        "sinks": None if s_aux is None else s_aux.float(),
    }
    if _latent.is_absorbed(module):
        return _latent.attend(module, query, key, attention_mask, known["sm_scale"], dropout, others, cache), None
    known["sliding_window"] = _window(module, sliding_window)
    if cache is not None:
        return _continuous.attend(module, query, key, value, cache, known, others), None
    reason = _why_dense(query, value, attention_mask, dropout, others)
    if reason is not None:
        note(module, "dense attention in torch", reason)
        return _densely(query, key, value, attention_mask, causal, dropout, known, others), None
    if query.shape[2] == 1 and not _needs_gradient(query, key, value) and is_padding(attention_mask):
        pages = pages_of(key, value, attention_mask)
        if pages is not None:
            note(module, "ragged_paged_attention")
            return _decoded(query, *pages, known), None
    note(module, "varlen_attention")
    return _packed(query, key, value, attention_mask, causal, known, others), None


def _window(module: torch.nn.Module, given: int | None) -> int | None:
    """The sliding window of a layer; one that only its mask would have told of is the configuration's."""
    if given is not None:
        return given
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    types = getattr(config, "layer_types", None)
    if types is None or layer is None or types[layer] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)


def _needs_gradient(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


# ---- what our operations do not take


def _why_dense(
    query: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, dropout: float, others: dict[str, Any]
) -> str | None:
    if dropout:
        return "it drops weights"
    if others.get("position_bias") is not None:
        return "it has a bias of positions"
    if others.get("indices") is not None:
        return "each query has its own list of keys"
    if mask is not None and mask.ndim == 4:
        return "its mask is no causal one, window or padding"
    if query.dtype not in DTYPES:
        return f"it is in {query.dtype}"
    if max(query.shape[-1], value.shape[-1]) > LARGEST_HEAD:
        return f"its heads have more than {LARGEST_HEAD} dimensions"
    return None


def _densely(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    dropout: float,
    known: dict[str, Any],
    others: dict[str, Any],
) -> torch.Tensor:
    rows, q_len, kv_len = query.shape[0], query.shape[2], key.shape[2]
    mask = packed_edges(rows, q_len, kv_len, others) if mask is None else mask
    if mask is not None and mask.ndim == 2:  # behind what it tells of, a cache of fixed size has room
        kv_len = mask.shape[1]
        key, value = key[:, :, :kv_len], value[:, :, :kv_len]
    shown = whole_mask(mask, rows, q_len, kv_len, causal=causal, window=known["sliding_window"], device=query.device)
    if (indices := others.get("indices")) is not None:
        chosen = torch.zeros(*indices.shape[:2], kv_len, dtype=torch.bool, device=query.device)
        chosen = chosen.scatter_(-1, indices.long(), True)[:, None]
        shown = shown & chosen if shown.dtype == torch.bool else shown.masked_fill(~chosen, -torch.inf)
    names = ("sm_scale", "soft_cap", "sinks")
    return _dense.attend(query, key, value, shown, bias=others.get("position_bias"), dropout=dropout,
                         **{name: known[name] for name in names})  # fmt: skip


# ---- decode over a cache


def _decoded(
    query: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    kv_lens: torch.Tensor,
    table: torch.Tensor,
    known: dict[str, Any],
) -> torch.Tensor:
    edges = torch.arange(query.shape[0] + 1, dtype=torch.int32, device=query.device)
    out = ragged_paged_attention(query[:, :, 0], (k_pages, v_pages), kv_lens, table, edges, max_q_len=1, **known)
    return out[:, None]


# ---- packed


def _packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    known: dict[str, Any],
    others: dict[str, Any],
) -> torch.Tensor:
    """Rows laid out one after another; with padding, that comes last in its row and is a sequence of its own there."""
    rows, heads, q_len, _ = query.shape
    if mask is not None and mask.ndim == 2:
        return _without_padding(query, key, value, mask, causal, known)
    edges = mask if mask is not None else packed_edges(rows, q_len, key.shape[2], others)
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    if edges is not None:
        cu_q_lens, cu_kv_lens = edges, others.get("cu_seq_lens_k") if mask is None else edges
        cu_kv_lens = edges if cu_kv_lens is None else cu_kv_lens.int()
    else:
        sequences = torch.arange(rows + 1, dtype=torch.int32, device=query.device)
        cu_q_lens, cu_kv_lens = sequences * q_len, sequences * key.shape[2]
    out = varlen_attention(q, k, v, cu_q_lens, cu_kv_lens, causal=causal, **known)
    return out.view(rows, q_len, heads, -1)


def _without_padding(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    shown: torch.Tensor,
    causal: bool,
    known: dict[str, Any],
) -> torch.Tensor:
    """Each row's tokens before its padding, as two sequences, so that shapes do not depend on lengths."""
    rows, heads, q_len, _ = query.shape
    length = shown.shape[1]
    if not causal or q_len > length:
        real = shown.new_ones(rows, q_len)
    else:
        real = shown if q_len == length else shown[:, -q_len:]
    (q_order, q_lens), (order, kv_lens) = shown_first(real), shown_first(shown)

    def ordered(tensor: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        tensor = tensor.transpose(1, 2)[:, : places.shape[1]]
        index = places[:, :, None, None].expand(-1, -1, *tensor.shape[2:])
        return tensor.gather(1, index).flatten(0, 1)

    def edges(lens: torch.Tensor, whole: int) -> torch.Tensor:
        starts = torch.arange(rows, device=query.device) * whole
        inner = torch.stack((starts, starts + lens), 1).flatten()
        return torch.cat((inner, inner.new_tensor([rows * whole]))).int()

    out = varlen_attention(
        ordered(query, q_order), ordered(key, order), ordered(value, order),
        edges(q_lens, q_len), edges(kv_lens, length), causal=causal, **known,
    ).view(rows, q_len, heads, -1)  # fmt: skip
    back = torch.argsort(q_order, dim=1)[:, :, None, None].expand_as(out)
    return out.gather(1, back)
