"""Attention with all logits in memory, for calls that none of our operations takes."""

import torch

from ragged_attention.integrations.transformers._layout import LayerCall, sinks_of_queries


def attend(call: LayerCall, shown: torch.Tensor) -> torch.Tensor:
    """Attention [B, L_q, H, D_v] with its softmax in float32; a query that sees no key gets 0.

    `shown` can be broadcast to [B, H, L_q, L_k]. It is bool, or numbers to add to the logits. Three keywords are
    supported: `position_bias` is added too, `sinks` are one more logit of each query, and `indices` limits each query
    to a list of keys.
    """
    group = call.query.shape[1] // call.key.shape[1]
    key, value = (tensor.repeat_interleave(group, 1) for tensor in (call.key, call.value))
    logits = (call.query @ key.transpose(2, 3)).float() * call.settings["sm_scale"]
    if (soft_cap := call.settings["soft_cap"]) is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    if (bias := call.others.get("position_bias")) is not None:
        logits = logits + bias
    logits = logits.masked_fill(~shown, -torch.inf) if shown.dtype == torch.bool else logits + shown
    if (indices := call.others.get("indices")) is not None:
        listed = torch.zeros(*indices.shape[:2], key.shape[2], dtype=torch.bool, device=key.device)
        logits = logits.masked_fill(~listed.scatter_(-1, indices.long(), True)[:, None], -torch.inf)
    if (sinks := call.settings["sinks"]) is not None:
        sink = sinks.view(1, -1, 1, 1).expand(logits.shape[0], -1, logits.shape[2], 1)
        logits = torch.cat((logits, sink), -1)
    if (sinks := sinks_of_queries(call)) is not None:
        logits = torch.cat((logits, sinks), -1)
    blind = (logits == -torch.inf).all(-1, keepdim=True)
    weights = logits.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    weights = torch.nn.functional.dropout(weights[..., : key.shape[2]], call.dropout)
    return (weights.to(value.dtype) @ value).transpose(1, 2)
