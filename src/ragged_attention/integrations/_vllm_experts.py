"""The experts of MiniMax M3 on a CPU, for `_vllm_bindings`. vLLM's operator supports them, but its classes refuse them.

Each function takes a method of vLLM's classes and returns a replacement of the method.
"""

from typing import Any

import torch

from ragged_attention.errors import Unsupported

_ACTIVATION = (7.0, 1.702, 1.0)  # the limit, the slope and the offset that are built into vLLM's operator


def supports_activation(original: Any) -> Any:
    """Accept MiniMax M3's activation. vLLM's operator supports it if the rows of gate and up projection alternate."""
    return staticmethod(lambda activation: _is_of_halves(activation) or original.__func__(activation))


def pad_moe_intermediate(original: Any) -> Any:
    """After an expert's weights are loaded, make the rows of its gate and its up projection alternate."""

    def pad(self: Any, layer: Any) -> None:
        original(self, layer)
        config = self.moe_config
        if not _is_of_halves(config.activation):
            return
        settings = (config.swiglu_limit, config.swiglu_alpha, config.swiglu_beta)
        if settings != _ACTIVATION:
            names = "swiglu_limit, swiglu_alpha and swiglu_beta"
            raise Unsupported(f"expected {names} of experts to be {_ACTIVATION} on a CPU, got {settings}")
        halves = layer.w13_weight.data.chunk(2, dim=1)
        layer.w13_weight.data = torch.stack(halves, dim=2).flatten(1, 2)

    return pad


def apply(original: Any) -> Any:
    """Pass the activation to vLLM's operator under the name that the operator uses for alternating rows."""

    def apply_experts(self: Any, *arguments: Any, activation: Any, **named: Any) -> Any:
        passed = type(activation).SWIGLUOAI if _is_of_halves(activation) else activation
        return original(self, *arguments, activation=passed, **named)

    return apply_experts


def compute_routing(original: Any) -> Any:
    """Route by sigmoids and a bias, without groups of experts. vLLM's CPU router supports this only with groups."""

    def route(self: Any, hidden_states: torch.Tensor, router_logits: torch.Tensor, *rest: Any, **named: Any) -> Any:
        if self.scoring_func != "sigmoid" or self.use_grouped_topk or self.custom_routing_function is not None:
            return original(self, hidden_states, router_logits, *rest, **named)
        scores = router_logits.float().sigmoid()
        bias = self.e_score_correction_bias
        experts = (scores if bias is None else scores + bias).topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, experts)
        if self.renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights * self.routed_scaling_factor, experts.int()

    return route


def _is_of_halves(activation: Any) -> bool:
    """Whether the activation is MiniMax M3's, with the gate in the first half of an expert's rows."""
    return activation is type(activation).SWIGLUOAI_UNINTERLEAVE
