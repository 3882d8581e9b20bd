"""All changes to transformers: the registration of our attention, the replaced functions, and how to undo them."""

import functools
import importlib.util
from collections.abc import Iterator
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.generation.continuous_batching import cache, continuous_api, initialization

from ragged_attention.errors import Unsupported
from ragged_attention.integrations.transformers import (
    _continuous,
    _distance_bias,
    _latent,
    _paged_latents,
    _selection,
)
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


def _refusing_latents(original: Any, ours: str) -> Any:
    def switch_to_cb_friendly_attn(self: Any, model: Any, auto_switch_to_flash: bool = True) -> None:
        _batched_layers(model, ours)  # raises errors here, where the caller sees them; later steps run in a thread
        return original(self, model, auto_switch_to_flash)

    return switch_to_cb_friendly_attn


def _batched_layers(model: Any, ours: str) -> dict[int, Any]:
    config = model.config.get_text_config()
    if config._attn_implementation != ours:
        return {}
    selecting = {name for _, name, _ in SELECTING}
    for module in model.modules():
        if (name := type(module).__name__) in selecting:
            raise Unsupported(
                f"expected a model whose keys transformers can page in generate_batch, got {type(model).__name__}, "
                f"whose {name} has keys of its own"
            )
    return _latent.batched_layers(model, config)


def _with_layers(original: Any, ours: str) -> Any:
    def _create_batch_processor(self: Any) -> Any:
        with _paged_latents.caching(_batched_layers(self.model, ours)):
            return original(self)

    return _create_batch_processor


def _for_layers(original: Any, ours: str) -> Any:
    def make(**arguments: Any) -> Any:
        return _paged_latents.make(original, _latent.ALIGNMENT, arguments)

    return make


def _with_lists_of_keys(original: Any, ours: str) -> Any:
    def group_layers_by_attn_type(config: Any) -> dict[str, list[int]]:
        kinds = getattr(config, "layer_types", None) or ()
        if config._attn_implementation == ours and "indexed_attention" in kinds:
            return {_paged_latents.KIND: list(range(len(kinds)))}
        return original(config)

    return group_layers_by_attn_type


# The attention class of each family whose bias follows from buckets of distances.
BUCKETED = {
    "t5": "T5Attention", "mt5": "MT5Attention", "umt5": "UMT5Attention", "longt5": "LongT5Attention",
    "switch_transformers": "SwitchTransformersAttention", "pop2piano": "Pop2PianoAttention", "udop": "UdopAttention",
    "pix2struct": "Pix2StructTextAttention",
}  # fmt: skip
# Attention with a bias per query: the family, its attention classes, the class that makes the bias, the function that
# finds distances in the arguments of that class, and the name under which an attention module has it. Not every release
# has all of these classes.
OF_QUERIES: tuple[tuple[str, tuple[str, ...], str, Any, str], ...] = (
    ("inkling", ("InklingAttention",), "InklingRelativeLogits", _distance_bias.by_positions, "rel_logits_proj"),
    *(
        (family, (f"{name}SlidingAttention", f"{name}FullAttention"), name + bias, find_distances, part)
        for family, name in (("inkling2", "Inkling2"), ("inkling2_loop", "Inkling2Loop"))
        for bias, find_distances, part in (
            ("RelativeLogits", _distance_bias.by_positions, "rel_logits_proj"),  # release 5.23
            ("RelativePositionBias", _distance_bias.by_distances, "relative_position_bias"),
        )
    ),
)


def _biases() -> Iterator[tuple[Any, str, Any]]:
    """The functions that make biases of positions, as in `REPLACED`."""
    for family, name in BUCKETED.items():
        kind = getattr(_models(family), name)
        yield kind, "compute_bias", functools.partial(_distance_bias.bucketed, kind=kind)
    for family, names, bias, find_distances, part in OF_QUERIES:
        models = _models(family)
        if (maker := getattr(models, bias, None)) is not None:
            for kind in (getattr(models, name) for name in names):
                yield kind, "forward", functools.partial(_distance_bias.told, kind=kind, part=part)
            yield (
                maker,
                "forward",
                functools.partial(_distance_bias.of_each_query, kind=maker, find_distances=find_distances),
            )


# Indexers that select blocks of keys per KV head: the family, the indexer's class, and the replacement of `forward`.
SELECTING = (
    ("minimax_m3_vl", "MiniMaxM3VLIndexer", _selection.of_blocks),
    ("qwen4_exp", "Qwen4ExpTextQSAIndexer", _selection.of_groups),
)


def _indexers() -> Iterator[tuple[Any, str, Any]]:
    """The functions that select blocks of keys, as in `REPLACED`."""
    for family, name, replacing in SELECTING:
        if (models := _models(family)) is not None:
            kind = getattr(models, name)
            yield kind, "forward", functools.partial(replacing, kind=kind)


def _models(family: str) -> Any:
    """The module of a family's models, or None if this release does not have it."""
    if importlib.util.find_spec(f"transformers.models.{family}") is None:
        return None
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


# The replaced functions: owner, name, and the function that makes the replacement.
# - `is_flash_attention_requested`: if it returns True, continuous batching packs queries and makes no mask.
# - `update` gathers all keys before a layer attends; the replacement leaves them in place.
# - The next four give a model with absorbed latent attention our own cache, and refuse latent attention that is not
#   absorbed. Two of them pass the model from the manager to the cache, which would only get the configuration. The last
#   one groups layers, because transformers does not know layers with lists of keys.
# - All others make position biases, and select blocks of keys.
REPLACED: list[tuple[Any, str, Any]] = [
    *((module, "is_flash_attention_requested", _recognising) for module in (cache, continuous_api, initialization)),
    (cache.PagedAttentionCache, "update", _without_gathering),
    (continuous_api.ContinuousBatchingManager, "switch_to_cb_friendly_attn", _refusing_latents),
    (continuous_api.ContinuousBatchingManager, "_create_batch_processor", _with_layers),
    (continuous_api, "PagedAttentionCache", _for_layers),
    (initialization, "group_layers_by_attn_type", _with_lists_of_keys),
    *_biases(),
    *_indexers(),
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
