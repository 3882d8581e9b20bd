"""Attention with all logits in memory: what no operation of ours takes."""

import torch


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    shown: torch.Tensor,
    *,
    sm_scale: float,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Softmax in float32.

    Args:
        query, key, value: [B, H, L_q, D], [B, K, L_k, D] and [B, K, L_k, D_v]; K divides H.
        shown: who sees whom, bool [B or 1, H or 1, L_q, L_k], or numbers to add to the logits. A query that sees no
            key gets 0.
        bias: further numbers to add, of a shape that goes with [B, H, L_q, L_k].
        dropout: the share of weights that is dropped.

    Returns:
        [B, L_q, H, D_v].
    """
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    logits = (query @ key.transpose(2, 3)).float() * sm_scale
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    if bias is not None:
        logits = logits + bias
    logits = logits.masked_fill(~shown, -torch.inf) if shown.dtype == torch.bool else logits + shown
    if sinks is not None:
        sink = sinks.float().view(1, -1, 1, 1).expand(logits.shape[0], -1, logits.shape[2], 1)
        logits = torch.cat((logits, sink), -1)
    blind = (logits == -torch.inf).all(-1, keepdim=True)
    weights = logits.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    weights = torch.nn.functional.dropout(weights[..., : key.shape[2]], dropout)
    return (weights.to(value.dtype) @ value).transpose(1, 2)
