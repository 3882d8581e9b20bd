"""The function that transformers calls for each attention layer, and the operations that it calls."""

from typing import Any

import torch

from ragged_attention.errors import Unsupported
from ragged_attention.integrations.transformers import _continuous, _dense, _latent
from ragged_attention.integrations.transformers._calls import note
from ragged_attention.integrations.transformers._keywords import expect_no_more_than_places, own_attention
from ragged_attention.integrations.transformers._layout import (
    pages_of,
    queries_first,
    queries_last,
    shown_first,
    takes_pages,
    told_edges,
)
from ragged_attention.integrations.transformers._masks import (
    Pattern,
    as_numbers,
    hides_nothing,
    is_of_rows,
    is_within,
    pattern_of,
    seen,
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
        attention_mask: what `_masks.mask` made, which alone says who sees whom; or any tensor that goes with
            [B, H, L_q, L_k], bool, or numbers to add. Without one all see all, but that where `is_causal` or the
            module's attribute of that name says so queries see the keys up to their own place, counted from the first,
            as transformers' SDPA attention has it.
        sliding_window: heeded in continuous batching only, which has no masks.
        cache: in continuous batching with transformers 5.23 the paged cache; `others` name its places.

    Returns:
        [B, L_q, H, D_v], and None in the place of weights.

    Raises:
        Unsupported: the layer selects blocks of keys, attends to latents in continuous batching, wants weights, or
            hands over what is not known here and not read by its own eager attention; the mask is of other numbers.
    """
    if others.get("block_indices") is not None:
        raise Unsupported(f"expected attention without block_indices, got some from {type(module).__name__}")
    known = {
        "sm_scale": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "soft_cap": softcap or None,
        "sinks": None if s_aux is None else s_aux.float(),
    }
    if cache is not None or others.get("read_index") is not None:
        expect_no_more_than_places(module, {"dropout": dropout or None, **others})
        if attention_mask is not None and pattern_of(attention_mask) is None:
            raise Unsupported(f"expected continuous batching without masks, got one of {type(module).__name__}'s own")
        if _latent.is_absorbed(module):
            raise _latent.unsupported(module, "continuous batching")
        known["sliding_window"] = sliding_window
        return _continuous.attend(module, query, key, value, cache, known, others), None
    if query.shape[0] != key.shape[0]:  # either may be one for all
        rows = max(query.shape[0], key.shape[0])
        query, key, value = (tensor.expand(rows, -1, -1, -1) for tensor in (query, key, value))
    eager = own_attention(module, others)
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    pattern = _pattern(module, attention_mask, query, key, causal, others)
    if eager is not None and _latent.is_absorbed(module):
        raise _latent.unsupported(module, "keywords that only its own eager attention knows")
    if eager is not None:
        note(module, "the model's own eager attention", "it has keywords that only that knows")
        mask = _whole(attention_mask, pattern, query, key)
        mask = as_numbers(mask, query.dtype) if mask.dtype == torch.bool else mask
        named = {"softcap": softcap, "s_aux": s_aux, **others}
        return eager(module, query, key, value, mask, scaling=known["sm_scale"], dropout=dropout, **named)[0], None
    if _latent.is_absorbed(module):
        return _latent.attend(module, query, key, attention_mask, pattern, known, dropout, others), None
    reason = _why_dense(query, key, value, pattern, dropout, others)
    if pattern is None or reason is not None:
        note(module, "dense attention in torch", reason or "its mask is no causal one, window or padding")
        shown = _whole(attention_mask, pattern, query, key)
        return _densely(query, key, value, shown, dropout, known, others), None
    if isinstance(pattern.end, int):
        key, value = key[:, :, : pattern.end], value[:, :, : pattern.end]
    known["sliding_window"] = pattern.window
    wanted = query.shape[2] == 1 or _width(query, value) > LARGEST_HEAD
    if wanted and _may_lie_in_pages(query, key, value, pattern):
        note(module, "ragged_paged_attention")
        return _over_pages(query, *pages_of(key, value, pattern.shown), pattern, known), None
    note(module, "varlen_attention")
    told = attention_mask is None or pattern_of(attention_mask).edges is None  # type: ignore[union-attr]
    cu_kv_lens = others.get("cu_seq_lens_k") if told else None
    known["deterministic"] = bool(others.get("deterministic"))
    return _packed(query, key, value, pattern, cu_kv_lens, known), None


def _pattern(
    module: torch.nn.Module,
    mask: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    causal: bool,
    others: dict[str, Any],
) -> Pattern | None:
    """What is said of who sees whom, by a mask, by a module where there is none, and by lengths of packed sequences."""
    q_len, kv_len = query.shape[2], key.shape[2]
    if mask is None:
        if others.get("cu_seq_lens_q") is not None:
            return Pattern(causal, edges=others["cu_seq_lens_q"].int())
        return Pattern(causal=True, end=q_len) if causal and q_len > 1 else Pattern()
    if not isinstance(mask, torch.Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise Unsupported(f"expected a mask of bool or of numbers to add, got {getattr(mask, 'dtype', type(mask))}")
    pattern = pattern_of(mask)
    if pattern is None or (not hides_nothing(pattern) and mask.shape[2:] != (q_len, kv_len)):
        return None
    if is_of_rows(pattern):
        return pattern if mask.shape[0] == query.shape[0] else None
    if pattern.end is not None:
        return pattern
    return pattern._replace(edges=told_edges(module, pattern, query, key, others))


def _whole(mask: Any, pattern: Pattern | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Who sees whom as a tensor that goes with [B, H, L_q, L_k], bool or numbers to add."""
    if pattern is None:
        return mask
    rows = query.shape[0] if is_of_rows(pattern) else 1
    return seen(pattern, rows, query.shape[2], key.shape[2], query.device)


def _width(query: torch.Tensor, value: torch.Tensor) -> int:
    return max(query.shape[-1], value.shape[-1])


def _needs_gradient(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


# ---- what our operations do not take


def _why_dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: Pattern | None,
    dropout: float,
    others: dict[str, Any],
) -> str | None:
    if dropout:
        return "it drops weights"
    if others.get("position_bias") is not None:
        return "it has a bias of positions"
    if others.get("indices") is not None:
        return "each query has its own list of keys"
    if pattern is None or not is_within(pattern, key.shape[2]):
        return "its mask is no causal one, window or padding"
    if query.dtype not in DTYPES:
        return f"it is in {query.dtype}"
    if (width := _width(query, value)) > LARGEST_HEAD and not _may_lie_in_pages(query, key, value, pattern):
        return f"its heads have {width} dimensions"
    return None


def _densely(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    shown: torch.Tensor,
    dropout: float,
    known: dict[str, Any],
    others: dict[str, Any],
) -> torch.Tensor:
    if (indices := others.get("indices")) is not None:
        chosen = torch.zeros(*indices.shape[:2], key.shape[2], dtype=torch.bool, device=query.device)
        chosen = chosen.scatter_(-1, indices.long(), True)[:, None]
        shown = shown & chosen if shown.dtype == torch.bool else shown.masked_fill(~chosen, -torch.inf)
    return _dense.attend(query, key, value, shown, bias=others.get("position_bias"), dropout=dropout, **known)


# ---- over a cache


def _may_lie_in_pages(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pattern: Pattern) -> bool:
    return pattern.edges is None and takes_pages(query, value) and not _needs_gradient(query, key, value)


def _over_pages(
    query: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    kv_lens: torch.Tensor,
    table: torch.Tensor,
    pattern: Pattern,
    known: dict[str, Any],
) -> torch.Tensor:
    rows, _, q_len, _ = query.shape
    q, order = query.transpose(1, 2), queries_last(pattern, q_len)
    q = q if order is None else q.take_along_dim(order, 1)
    edges = torch.arange(rows + 1, dtype=torch.int32, device=query.device) * q_len
    out = ragged_paged_attention(
        q.flatten(0, 1), (k_pages, v_pages), kv_lens, table, edges, max_q_len=q_len, causal=pattern.causal, **known
    ).unflatten(0, (rows, q_len))
    return out if order is None else torch.empty_like(out).scatter_(1, order.expand_as(out), out)


# ---- packed


def _packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: Pattern,
    cu_kv_lens: torch.Tensor | None,
    known: dict[str, Any],
) -> torch.Tensor:
    """Rows laid out one after another; with padding, that comes last in its row and is a sequence of its own there."""
    rows, heads, q_len, _ = query.shape
    if pattern.shown is not None:
        return _without_padding(query, key, value, pattern, pattern.shown, known)
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    if pattern.edges is not None:
        cu_q_lens, cu_kv_lens = pattern.edges, pattern.edges if cu_kv_lens is None else cu_kv_lens.int()
    else:
        sequences = torch.arange(rows + 1, dtype=torch.int32, device=query.device)
        cu_q_lens, cu_kv_lens = sequences * q_len, sequences * key.shape[2]
    out = varlen_attention(q, k, v, cu_q_lens, cu_kv_lens, causal=pattern.causal, **known)
    return out.view(rows, q_len, heads, -1)


def _without_padding(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: Pattern,
    shown: torch.Tensor,
    known: dict[str, Any],
) -> torch.Tensor:
    """Each row's tokens before its padding, as two sequences, so that shapes do not depend on lengths."""
    rows, heads, q_len, _ = query.shape
    length = shown.shape[1]
    (q_order, q_lens), (order, kv_lens) = queries_first(pattern, shown, q_len), shown_first(shown)

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
        edges(q_lens, q_len), edges(kv_lens, length), causal=pattern.causal, **known,
    ).view(rows, q_len, heads, -1)  # fmt: skip
    back = torch.argsort(q_order, dim=1)[:, :, None, None].expand_as(out)
    return out.gather(1, back)
