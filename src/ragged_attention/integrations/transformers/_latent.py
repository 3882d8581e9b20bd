"""Latent attention without keys and values of each head.

In transformers, a module's `expand_kv` computes keys and values from the cached latents. Here it returns the latents.
Queries are multiplied by the key projection instead, and results by the value projection. Prefill, decode and packed
sequences are a single call over the latents. Each query gets a list of its keys only if gradients are required, if the
mask has no pattern, or if an indexer selects keys. In continuous batching, the latents are in our own paged cache
(`_paged_latents`).
"""

from typing import Any

import torch

from ragged_attention.errors import Unsupported
from ragged_attention.integrations.transformers import _lists, _paged_latents
from ragged_attention.integrations.transformers._calls import note
from ragged_attention.integrations.transformers._indexer import index, is_indexed
from ragged_attention.integrations.transformers._layout import LayerCall, need_gradient, over_pages, pages_of
from ragged_attention.integrations.transformers._masks import Pattern, is_within
from ragged_attention.torch import ragged_mla_attention

NEEDED = ("expand_kv", "kv_b_proj", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "num_heads")
ALIGNMENT = 16  # latents are padded to a multiple of this many columns


class Absorbed:
    """The mixin that makes an attention class absorbed."""

    def expand_kv(self, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and the values: latents [B, 1, L, ...] followed by their rotary columns, and the latents alone."""
        return torch.cat((kv_nope, k_rot), -1), kv_nope


def is_absorbed(module: torch.nn.Module) -> bool:
    return isinstance(module, Absorbed)


def unsupported(module: Any, what: str) -> Unsupported:
    return Unsupported(f"expected absorbed latent attention without {what}, got {type(module).__name__} with it")


def _has_latents(module: Any) -> bool:
    return all(hasattr(module, attribute) for attribute in NEEDED)


def absorb(model: Any, name: str) -> Any:
    for module in model.modules():
        if not is_absorbed(module) and _has_latents(module):
            kind = type(module)
            module.__class__ = type(f"Absorbed{kind.__name__}", (Absorbed, kind), {})
            module.register_forward_pre_hook(_paged_latents.enter, with_kwargs=True)
    if not any(map(is_absorbed, model.modules())):
        raise Unsupported(f"expected a model with latent attention, got {type(model).__name__}")
    index(model)
    model.set_attn_implementation(name)
    return model


def batched_layers(model: Any, config: Any) -> dict[int, Any]:
    """A model's absorbed attention modules by layer, for continuous batching. Empty without latent attention.

    Raises:
        Unsupported: the model is not absorbed, or has layers or indexers of other kinds.
    """
    name, modules = type(model).__name__, [module for module in model.modules() if _has_latents(module)]
    layers = {module.layer_idx: module for module in modules}
    if layers and len(layers) != config.num_hidden_layers:
        raise Unsupported(
            f"expected latent attention in all layers in generate_batch, got {len(layers)} of "
            f"{config.num_hidden_layers} in {name}"
        )
    for module in modules:
        indexer = getattr(module, "indexer", None)
        if not is_absorbed(module):
            raise Unsupported(
                f"expected absorb_mla(model) before generate_batch, since transformers cannot page latents, "
                f"got {name} without"
            )
        if indexer is not None and not is_indexed(indexer):
            raise Unsupported(f"expected indexers of a known form in generate_batch, got {type(indexer).__name__}")
    return layers


def attend(call: LayerCall) -> torch.Tensor:
    """Attention of an absorbed module, whose keys are latents [B, 1, L_k, L + R]; returns [B, L_q, H, D_v]."""
    module, query, latents, pattern, others = call.module, call.query, call.key, call.pattern, call.others
    refused = {"dropout": call.dropout or None, "a bias of positions": others.get("position_bias"),
              "sinks of each query": others.get("sinks"),
              "deterministic gradients": others.get("deterministic") or None}  # fmt: skip
    for what, value in refused.items():
        if value is not None:
            raise unsupported(module, what)
    width, nope = module.kv_lora_rank, module.qk_nope_head_dim
    weight = module.kv_b_proj.weight.view(module.num_heads, nope + module.v_head_dim, width)
    q = torch.einsum("bhqn,hnl->bqhl", query[..., :nope], weight[:, :nope])
    q = torch.cat((q, query[..., nope:].transpose(1, 2)), -1)
    padding = -latents.shape[-1] % ALIGNMENT, -width % ALIGNMENT
    if padding[0]:
        q, latents = (torch.nn.functional.pad(tensor, (0, padding[0])) for tensor in (q, latents))
    settings = {**call.settings, "d_v": width + padding[1]}
    held = others.get("latent_pages")
    gradient = need_gradient(q, latents, call.settings["sinks"])
    at_once = pattern is not None and is_within(pattern, latents.shape[2])
    if held is not None:
        out = _paged_latents.attend(module, q, held, others.get("indices"), settings)
    elif gradient or others.get("indices") is not None or not at_once:
        note(module, "sparse_mla_prefill")
        if settings.pop("soft_cap") is not None:
            raise Unsupported(f"expected lists of latents without a soft cap, got {type(module).__name__} with one")
        out = _lists.attend(call, q, latents, settings)
    else:
        note(module, "ragged_mla_attention")
        assert pattern is not None
        out = _at_once(q, latents, pattern, others, settings)
    return torch.einsum("bqhl,hvl->bqhv", out[..., :width], weight[:, nope:])


def _at_once(
    q: torch.Tensor, latents: torch.Tensor, pattern: Pattern, others: dict[str, Any], settings: dict[str, Any]
) -> torch.Tensor:
    """Attention of all queries in one call, to the keys of their row without padding, or of their packed sequence."""
    settings = {**settings, "sliding_window": pattern.window}
    if (edges := pattern.edges) is not None:
        lens = edges.diff()
        longest = int(others.get("max_length_q") or lens.max())
        table = edges[:-1, None] + torch.arange(longest, dtype=torch.int32, device=q.device)
        pages = latents.flatten(0, 2)[:, None, None]  # with pages of one key, a sequence may begin anywhere
        return ragged_mla_attention(
            q.flatten(0, 1), pages, lens, table, edges, max_q_len=longest, causal=pattern.causal, **settings
        ).unflatten(0, q.shape[:2])
    latents = latents[:, :, : pattern.end] if isinstance(pattern.end, int) else latents
    pages, _, lens, table = pages_of(latents, latents, pattern.shown)
    return over_pages(ragged_mla_attention, q, pages, lens, table, pattern, settings)
