"""The function that transformers calls for each attention layer."""

from typing import Any

import torch

from ragged_attention.errors import Unsupported
from ragged_attention.integrations.transformers import (
    _bias,
    _continuous,
    _dense,
    _latent,
    _layout,
    _lists,
    _masks,
    _selection,
    _sequences,
    _tensors,
)
from ragged_attention.integrations.transformers._calls import note
from ragged_attention.integrations.transformers._keywords import expect_no_more_than_places, own_attention
from ragged_attention.integrations.transformers._layout import LayerCall
from ragged_attention.integrations.transformers._masks import Pattern, pattern_of
from ragged_attention.torch import ragged_paged_attention

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 512  # the limit of `varlen_attention`


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
    """Attention of a layer, with the arguments and results of transformers' attention interface.

    Args:
        query, key, value: [B, H, L_q, D], [B, K, L_k, D] and [B, K, L_k, D_v].
        attention_mask: a mask made by `_masks.mask`, or a tensor that can be broadcast to [B, H, L_q, L_k], either bool
            or numbers to add to the logits. It alone decides which keys are visible.
        sliding_window: used only in continuous batching, which has no masks.
        is_causal: read if there is no mask. If true, query i sees keys 0 to i, as in transformers' SDPA attention;
            otherwise each query sees all keys. None stands for the module's attribute `is_causal`.
        cache: the paged cache, in continuous batching with transformers 5.23. `others` have the step's places in it.

    Returns:
        [B, L_q, H, D_v], and None instead of the attention weights.

    Raises:
        Unsupported: an unknown indexer selects blocks of keys; or blocks are selected in a call that our operations do
            not take; or the layer attends to latents in transformers' own paged cache; or attention weights are
            requested; or neither we nor the model's own eager attention know a keyword; or the mask has a wrong dtype.
    """
    selection = others.get("block_indices")
    if selection is not None and not isinstance(selection, _selection.Selection):
        raise Unsupported(f"expected attention without block_indices, got some from {type(module).__name__}")
    settings = {
        "sm_scale": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "soft_cap": softcap or None,
        "sinks": None if s_aux is None else s_aux.float(),
    }
    call = LayerCall(module, query, key, value, attention_mask, dropout, settings, others)
    is_absorbed = _latent.is_absorbed(module)
    if cache is not None or others.get("read_index") is not None:
        has_pages = is_absorbed and others.get("latent_pages") is not None
        allowed = {"indices": None} if has_pages else {}  # `indices` are slots of these pages
        expect_no_more_than_places(module, {"dropout": dropout or None, **others, **allowed})
        pattern = Pattern() if attention_mask is None else pattern_of(attention_mask)
        if pattern is None or pattern.ranges is not None:
            raise Unsupported(f"expected continuous batching without masks, got one of {type(module).__name__}'s own")
        settings["sliding_window"] = sliding_window
        if has_pages:
            return _latent.attend(call), None
        if is_absorbed:
            raise _latent.unsupported(module, "continuous batching over another cache than its own")
        return _continuous.attend(call, cache), None
    if query.shape[0] != key.shape[0]:  # a batch size of 1 is for all rows
        rows = max(query.shape[0], key.shape[0])
        query, key, value = (tensor.expand(rows, -1, -1, -1) for tensor in (query, key, value))
        call = call._replace(query=query, key=key, value=value)
    eager = own_attention(module, others)
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    call = call._replace(pattern=_pattern(call, causal))
    if selection is None and call.pattern is not None:
        selection = call.pattern.selection
    call = call._replace(selection=selection)
    if eager is not None and is_absorbed:
        raise _latent.unsupported(module, "keywords that only its own eager attention knows")
    if eager is not None and selection is not None:
        raise _selection.unsupported(module, "it has keywords that only the model's own eager attention knows")
    if eager is not None:
        note(module, "the model's own eager attention", "it has keywords that only that knows")
        mask = _shown(call)
        mask = _masks.as_numbers(mask, query.dtype) if mask.dtype == torch.bool else mask
        named = {"softcap": softcap, "s_aux": s_aux, **others}
        return eager(module, query, key, value, mask, scaling=settings["sm_scale"], dropout=dropout, **named)[0], None
    attend, blind = _latent.attend if is_absorbed else _attend, None if call.pattern is None else call.pattern.blind
    if blind is None:
        return attend(call), None
    out = attend(call._replace(query=query.masked_fill(blind[:, None, :, None], 0.0)))
    # With sinks, the weight of a blind query (see `Pattern`) goes to the sinks.
    has_sinks = s_aux is not None or others.get("sinks") is not None
    return out.masked_fill(blind[..., None, None], 0.0) if has_sinks else out, None


def _attend(call: LayerCall) -> torch.Tensor:
    """Attention over keys and values by one of our operations, or densely."""
    pattern, reason = call.pattern, _why_dense(call)
    if reason is not None and call.selection is not None:
        raise _selection.unsupported(call.module, reason)
    if reason is not None and _lists.takes_shared(call):
        return _lists.attend_shared(call)
    if reason is not None:
        note(call.module, "dense attention in torch", reason)
        return _dense.attend(call, _shown(call))
    assert pattern is not None  # `_why_dense` refuses calls without a pattern
    if isinstance(pattern.end, int):
        call = call._replace(key=call.key[:, :, : pattern.end], value=call.value[:, :, : pattern.end])
    settings = {**call.settings, "sliding_window": pattern.window}
    tables = _bias.tables_of(call, pattern) if _bias.is_given(call) else None
    if call.query.shape[2] == 1 and _may_use_pages(call, pattern):
        note(call.module, "ragged_paged_attention")
        k_pages, v_pages, kv_lens, table = _layout.pages_of(call.key, call.value, pattern.shown)
        q = call.query.transpose(1, 2)
        if tables is not None:  # the table of a single query is for causal operations
            pattern, settings["relative_bias"] = pattern._replace(causal=True), tables.transpose(1, 2).flatten(0, 1)
        sinks = _layout.sinks_of_queries(call)
        operation = _layout.with_sinks(ragged_paged_attention, None if sinks is None else sinks[:, :, 0])
        if call.selection is not None:
            settings |= call.selection.lists(_sequences.laid_out(call, pattern), call.key.shape[1])
        return _layout.over_pages(operation, q, (k_pages, v_pages), kv_lens, table, pattern, settings)
    note(call.module, "varlen_attention")
    settings["deterministic"] = bool(call.others.get("deterministic"))
    settings["causal"] = pattern.causal or (tables is not None and call.query.shape[2] == 1)
    if pattern.ranges is not None:
        settings["key_ranges"] = _layout.key_ranges(pattern.ranges, call.query.shape[0])
    return _sequences.attend(call, pattern, settings, tables)


def _pattern(call: LayerCall, causal: bool) -> Pattern | None:
    """The pattern of a call's mask, with the edges of packed sequences. Without a mask, `causal` decides."""
    mask, (rows, heads, q_len, _), kv_len = call.mask, call.query.shape, call.key.shape[2]
    if mask is None:
        if call.others.get("cu_seq_lens_q") is not None:
            return Pattern(causal, edges=call.others["cu_seq_lens_q"].int())
        return Pattern(causal=True, end=q_len) if causal and q_len > 1 else Pattern()
    if not isinstance(mask, torch.Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise Unsupported(f"expected a mask of bool or of numbers to add, got {getattr(mask, 'dtype', type(mask))}")
    pattern = pattern_of(mask)
    if pattern is None:
        is_listed = call.key is call.value and call.key.shape[1] == 1  # `_lists` computes it with any mask
        return None if is_listed else _tensors.pattern_of_numbers(mask, (rows, heads, q_len, kv_len))
    if not _masks.hides_nothing(pattern) and mask.shape[2:] != (q_len, kv_len):
        return None
    if _masks.is_of_rows(pattern):
        return pattern if mask.shape[0] == rows else None
    return pattern if pattern.end is not None else pattern._replace(edges=_layout.packed_edges(call, pattern))


def _shown(call: LayerCall) -> Any:
    """A call's mask as a tensor that can be broadcast to [B, H, L_q, L_k], either bool or numbers to add."""
    if call.pattern is None or _tensors.is_by_numbers(call.mask):
        return call.mask
    rows = call.query.shape[0] if _masks.is_of_rows(call.pattern) else 1
    return _masks.visible(call.pattern, rows, call.query.shape[2], call.key.shape[2], call.query.device)


def _may_use_pages(call: LayerCall, pattern: Pattern) -> bool:
    if _layout.need_gradient(call.query, call.key, call.value, call.settings["sinks"]) or _bias.needs_gradient(call):
        return False
    return pattern.edges is None and _layout.takes_pages(call.query, call.value)


def _why_dense(call: LayerCall) -> str | None:
    """Why none of our operations takes a call, or None if one does."""
    if call.dropout:
        return "it drops weights"
    if call.others.get("indices") is not None:
        return "each query has its own list of keys"
    if call.pattern is None or not _masks.is_within(call.pattern, call.key.shape[2]):
        return "its mask is not up to 8 ranges of keys for all heads"
    if call.selection is not None:
        reason = call.selection.why_not(call.pattern, call.key.shape[1], call.query.shape[2])
        if reason is not None:
            return reason
    if (reason := _bias.why_dense(call)) is not None:
        return reason
    hides_padding = call.pattern.shown is not None or call.pattern.ranges is not None
    if call.query.shape[2] > 1 and hides_padding and _mixes_tokens(call.module):
        return "results of padding reach other tokens"
    if call.query.dtype not in DTYPES:
        return f"it is in {call.query.dtype}"
    if (width := max(call.query.shape[-1], call.value.shape[-1])) > MAX_HEAD_DIM:
        return f"its heads have {width} dimensions"
    return None


def _mixes_tokens(module: Any) -> bool:
    """Whether layers also mix tokens outside attention (deepseek_v4). Padding must then attend as in eager mode."""
    return getattr(getattr(module, "config", None), "compress_rates", None) is not None
