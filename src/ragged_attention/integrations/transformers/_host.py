"""Joining transformers, and leaving it: every place of it that is changed."""

from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.generation.continuous_batching import cache, continuous_api, initialization

from ragged_attention.integrations.transformers import _continuous
from ragged_attention.integrations.transformers._attention import attention
from ragged_attention.integrations.transformers._masks import mask

# Where continuous batching asks whether an implementation is flash attention: packed queries, no mask.
ASKING = (cache, continuous_api, initialization)
QUESTION = "is_flash_attention_requested"
# The cache whose `update` gathers all keys before a layer attends, which ours attends to where they lie.
PAGED: Any = cache.PagedAttentionCache


def _answer(asked: Any, ours: str) -> Any:
    def is_flash_attention_requested(
        config: Any = None, requested_attention_implementation: str | None = None, version: Any = None
    ) -> bool:
        name = requested_attention_implementation if config is None else config._attn_implementation
        if name == ours:
            return version is None
        return asked(config, requested_attention_implementation, version)

    is_flash_attention_requested.asked = asked  # type: ignore[attr-defined]
    return is_flash_attention_requested


def _instead(asked: Any, ours: str) -> Any:
    def update(self: Any, key_states: Any, value_states: Any, layer_idx: int, kwargs: dict[str, Any]) -> Any:
        mine = self.config._attn_implementation == ours
        return (_continuous.update if mine else asked)(self, key_states, value_states, layer_idx, kwargs)

    update.asked = asked  # type: ignore[attr-defined]
    return update


def register(name: str) -> None:
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    for module in ASKING:
        asked = getattr(module, QUESTION)
        if not hasattr(asked, "asked"):
            setattr(module, QUESTION, _answer(asked, name))
    if not hasattr(PAGED.update, "asked"):
        PAGED.update = _instead(PAGED.update, name)


def unregister(name: str) -> None:
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(name, None)
    for module in ASKING:
        asked = getattr(module, QUESTION)
        setattr(module, QUESTION, getattr(asked, "asked", asked))
    PAGED.update = getattr(PAGED.update, "asked", PAGED.update)
