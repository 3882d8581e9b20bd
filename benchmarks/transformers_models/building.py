"""Builds a tiny model of each family. It has every kind of layer once, and random weights."""

import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM, PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks.transformers_models.families import FAMILIES, OWN
from benchmarks.transformers_models.sizes import (
    EVEN_FROM_NONE,
    EVEN_FROM_ZERO,
    HEAD_SIZES,
    KINDS_OF_LAYERS,
    LARGE_HEAD,
    LAYERS,
    NUMBERS_OF_LAYERS,
    OF_ENCODERS,
    SIZES,
    TEXT,
)

KINDS: dict[str, tuple[Any, Any]] = {
    "causal": (AutoModelForCausalLM, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "seq2seq": (AutoModelForSeq2SeqLM, modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    "images": (AutoModelForImageTextToText, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
}
MOST_LAYERS = 5
MOST_PARAMETERS = 40_000_000
# The standard deviation of weights. It is larger than in transformers, so that attention is not nearly uniform.
SPREAD = 0.15


def build(family: str, kind: str) -> Any:
    """The model in float32, with transformers' eager attention."""
    auto = KINDS[kind][0]
    config = configuration(family, kind)
    with torch.device("meta"):
        count = sum(each.numel() for each in auto.from_config(config, attn_implementation="eager").parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"expected at most {MOST_PARAMETERS} parameters, got {count}")
    torch.manual_seed(0)
    model = auto.from_config(config, attn_implementation="eager").eval().float()
    draw_weights(model)
    return model


def configuration(family: str, kind: str) -> Any:
    of_family = copy.deepcopy(FAMILIES.get(family, {}))
    config = CONFIG_MAPPING[family]
    small = merged(smaller(config(), decoder=kind == "causal"), of_family)
    made = config(**small)
    for each in (made, *(value for value in vars(made).values() if isinstance(value, PreTrainedConfig))):
        if hasattr(each, "use_cache"):
            each.use_cache = True
    return made


def smaller(config: Any, *, text: bool = True, decoder: bool = False) -> dict[str, Any]:
    """Arguments with which a configuration is small. For a nested configuration, the argument is a dict."""
    config.allow_global_per_layer_attribute_access = True  # allows reading sizes that differ by layer
    counts = {name: value for name in LAYERS if isinstance(value := getattr(config, name, None), int)}
    count = next(iter(counts.values()), 0)
    layers = layers_kept(config, count)
    small: dict[str, Any] = dict.fromkeys(counts, len(layers))
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            of_text = any(word in name for word in TEXT)
            small[name] = smaller(value, text=of_text, decoder=False) | {"model_type": value.model_type}
        elif name in NUMBERS_OF_LAYERS:
            small[name] = [0]
        elif isinstance(value, list | tuple):
            if len(value) == count > 2:
                small[name] = [value[number] for number in layers]
        elif name not in counts and _is_size(name, value):
            small[name] = _size(name, value, text)
    if getattr(config, "kv_lora_rank", None) and "num_key_value_heads" in small:
        small["num_key_value_heads"] = SIZES["num_attention_heads"]  # expanded latents have keys for every head
    if decoder and hasattr(config, "is_decoder") and not getattr(config, "is_encoder_decoder", False):
        small["is_decoder"] = True
    return small


def layers_kept(config: Any, count: int) -> list[int]:
    """The indices of the layers to keep, in order: the first of each kind, and at least two."""
    lists = [getattr(config, name, None) for name in KINDS_OF_LAYERS]
    lists = [each for each in lists if isinstance(each, list | tuple) and len(each) == count]
    first: dict[tuple[str, ...], int] = {}
    for number in range(count):
        first.setdefault(tuple(str(each[number]) for each in lists), number)
    numbers = list(first.values())[:MOST_LAYERS]
    return numbers if len(numbers) > 1 else list(range(min(2, count)))


def _is_size(name: str, value: Any) -> bool:
    if name not in OF_ENCODERS or isinstance(value, bool | dict):
        return False
    if value is None:
        return name in EVEN_FROM_NONE
    return value != 0 or isinstance(value, float) or name in EVEN_FROM_ZERO


def _size(name: str, value: Any, text: bool) -> Any:
    if name in HEAD_SIZES and isinstance(value, int) and value > 256:
        return LARGE_HEAD
    return (SIZES if text else OF_ENCODERS).get(name, OF_ENCODERS[name])


def merged(small: dict[str, Any], of_family: dict[str, Any]) -> dict[str, Any]:
    """The arguments `small`, in which the family's own values replace others, also within nested dicts."""
    for name, value in of_family.items():
        if value == OWN:
            small.pop(name, None)
        elif isinstance(value, dict) and isinstance(small.get(name), dict):
            merged(small[name], value)
        else:
            small[name] = value
    return small


def draw_weights(model: Any) -> None:
    random = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue
        with torch.no_grad():
            if parameter.dim() > 1:
                parameter.normal_(0, SPREAD, generator=random)
            elif "sink" in name:
                parameter.normal_(0, 1, generator=random)
            elif not torch.isfinite(parameter).all() or parameter.abs().max() > 1e4:
                parameter.zero_()  # parameters without initial values, which a checkpoint would set
            elif not parameter.any():
                # gates and biases are not 0, since zeros would hide the gated results
                parameter.normal_(0, SPREAD, generator=random)
