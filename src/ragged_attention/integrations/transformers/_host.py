"""Registers our attention with transformers, and undoes it: all changes to transformers are here."""

from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.generation.continuous_batching import cache, continuous_api, initialization

from ragged_attention.integrations.transformers import _continuous
from ragged_attention.integrations.transformers._attention import attention
from ragged_attention.integrations.transformers._masks import mask


def _recognising(original: Any, ours: str) -> Any:
    def is_flash_attention_requested(
        config: Any = None, requested_attention_implementation: str | None = None, version: Any = None
    ) -> bool:
        name = requested_attention_implementation if config is None else config._attn_implementation
        if name == ours:
            return version is None
        return original(config, requested_attention_implementation, version)

    return is_flash_attention_requested


def _without_gathering(original: Any, ours: str) -> Any:
    def update(self: Any, key_states: Any, value_states: Any, layer_idx: int, kwargs: dict[str, Any]) -> Any:
        is_ours = self.config._attn_implementation == ours
        return (_continuous.update if is_ours else original)(self, key_states, value_states, layer_idx, kwargs)

    return update


# The functions that are replaced, by owner and name. Continuous batching packs queries and makes no mask if the first
# one returns True. The second one gathers all keys before a layer attends; ours attends to them in place.
REPLACED: list[tuple[Any, str, Any]] = [
    *((module, "is_flash_attention_requested", _recognising) for module in (cache, continuous_api, initialization)),
    (cache.PagedAttentionCache, "update", _without_gathering),
]


def register(name: str) -> None:
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    for owner, attribute, replacing in REPLACED:
        original = getattr(owner, attribute)
        if not hasattr(original, "original"):
            replacement = replacing(original, name)
            replacement.original = original
            setattr(owner, attribute, replacement)


def unregister(name: str) -> None:
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(name, None)
    for owner, attribute, _ in REPLACED:
        current = getattr(owner, attribute)
        setattr(owner, attribute, getattr(current, "original", current))
