"""Images for `benchmarks.vllm_check`: processors, prompts with images, and configurations.

All tokens of an image see one another, also later tokens (vLLM's `mm_prefix`). In a prompt for vLLM one token stands
for an image, and vLLM's processor replaces it by the image's tokens. For transformers' model this module replaces it.
Images are random, with the size that the model requires.
"""

import dataclasses
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

# The special tokens are at the end of the vocabulary.
WORDS = 501
SPECIAL = (
    "<sound>",
    "</sound>",
    "<audio>",
    "\n",
    "\n\n",
    "\n\n\n",
    "\n\n\n\n",
    "<image>",
    "<begin>",
    "<end>",
    "<|video|>",
)
NAMES = dict(enumerate(SPECIAL, WORDS))
_BREAK, _IMAGE, _BEGIN, _END, _VIDEO = (WORDS + SPECIAL.index(name) for name in ("\n\n", *SPECIAL[-4:]))
_VISION = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A family of models: its configuration, and the tokens of an image in a prompt."""

    title: str
    settings: dict[str, Any]
    processor: dict[str, Any]
    size: tuple[int, int]  # (height, width) of an image
    tokens: int  # tokens per image
    prompt_token: int  # the token that stands for an image in a prompt for vLLM
    around: tuple[tuple[int, ...], tuple[int, ...]]  # the tokens before and after the tokens of the image
    arrays: tuple[str, ...]  # the processor's arrays that transformers' model accepts
    types: str  # the model's argument that marks the image tokens

    @property
    def name(self) -> str:
        return self.title.lower()


KINDS = {
    "Gemma3Config": Kind(
        title="Gemma3",
        settings={
            "vision_config": _VISION | {"image_size": 32, "patch_size": 4, "vision_use_head": False},
            "mm_tokens_per_image": 16,
            "image_token_index": _IMAGE,
            "boi_token_index": _BEGIN,
            "eoi_token_index": _END,
        },
        processor={"size": {"height": 32, "width": 32}},
        size=(32, 32),
        tokens=16,
        prompt_token=_BEGIN,
        around=((_BREAK, _BEGIN), (_END, _BREAK)),
        arrays=("pixel_values",),
        types="token_type_ids",
    ),
    "Gemma4Config": Kind(
        title="Gemma4",
        settings={
            "vision_config": _VISION
            | {"num_key_value_heads": 2, "head_dim": 32, "patch_size": 4, "pooling_kernel_size": 3}
            | {"default_output_length": 70},
            "image_token_id": _IMAGE,
            "boi_token_id": _BEGIN,
            "eoi_token_id": _END,
            "video_token_id": _VIDEO,
        },
        processor={"patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 3},
        size=(84, 120),
        tokens=70,
        prompt_token=_IMAGE,
        around=((_BEGIN,), (_END,)),
        arrays=("pixel_values", "image_position_ids"),
        types="mm_token_type_ids",
    ),
}


def configuration(name: str, text: dict[str, Any]) -> Any:
    """A model's configuration, including that of its text model."""
    transformers: Any = importlib.import_module("transformers")
    shared = {name: text[name] for name in ("initializer_range", "pad_token_id", "bos_token_id", "eos_token_id")}
    return getattr(transformers, name)(text_config=text, **KINDS[name].settings, **shared)


def save_tokenizer(folder: Path) -> None:
    """Save a tokenizer that knows numbers and the tokens around images."""
    tokenizers: Any = importlib.import_module("tokenizers")
    transformers: Any = importlib.import_module("transformers")
    words = {str(i): i for i in range(WORDS)} | {name: i for i, name in NAMES.items()}
    roles = ("boa_token", "eoa_token", "audio_token"), ("image_token", "boi_token", "eoi_token")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0")),
        unk_token="0",
        pad_token="0",
        bos_token="1",
        additional_special_tokens=list(SPECIAL),
        extra_special_tokens=dict(zip(roles[0], SPECIAL[:3], strict=True))
        | dict(zip(roles[1], SPECIAL[-4:-1], strict=True)),
    ).save_pretrained(folder)


def prepare_vllm(config: str) -> None:
    """Let vLLM load a model and its processor without torchvision, whose installed build may be for another torch.

    The class of image processors that needs torchvision is replaced by the equivalent class that uses Pillow. The class
    of the model is registered, since vLLM would otherwise inspect it in another process, without this change.
    Processors of videos and sounds are only stubs.
    """
    kind, transformers = KINDS[config], importlib.import_module("transformers")
    pillow = pillow_processors(kind)
    setattr(pillow, f"{kind.title}ImageProcessor", getattr(pillow, f"{kind.title}ImageProcessorPil"))
    sys.modules[f"transformers.models.{kind.name}.image_processing_{kind.name}"] = pillow
    whole: Any = getattr(transformers, f"{kind.title}Processor")
    built = type(whole.__name__, (whole,), {"check_argument_for_proper_class": lambda *_: None})
    absent = {}
    if kind.name == "gemma4":
        videos = SimpleNamespace(valid_kwargs=transformers.processing_utils.VideosKwargs)
        absent = {"feature_extractor": SimpleNamespace(), "video_processor": videos}

    def from_pretrained(path: str, **_: Any) -> Any:
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(path)
        parts = {"image_processor": image_processor(kind), "tokenizer": tokenizer, **absent}
        return built(**parts, image_seq_length=kind.tokens)

    whole.from_pretrained = from_pretrained
    name = f"{kind.title}ForConditionalGeneration"
    model = getattr(importlib.import_module(f"vllm.model_executor.models.{kind.name}_mm"), name)
    importlib.import_module("vllm").ModelRegistry.register_model(name, model)
    if kind.name == "gemma3":  # transformers writes shorter names than vLLM reads
        model.hf_to_vllm_mapper.orig_to_new_prefix["vision_tower."] = "vision_tower.vision_model."


def pillow_processors(kind: Kind) -> Any:
    return importlib.import_module(f"transformers.models.{kind.name}.image_processing_pil_{kind.name}")


def image_processor(kind: Kind) -> Any:
    return getattr(pillow_processors(kind), f"{kind.title}ImageProcessorPil")(**kind.processor)


def images(kind: Kind, count: int) -> list[Any]:
    """`count` random images, equal in every process."""
    pillow: Any = importlib.import_module("PIL.Image")
    draw = np.random.default_rng(0)
    return [pillow.fromarray(draw.integers(0, 256, (*kind.size, 3), np.uint8)) for _ in range(count)]


def parts_of(prompts: list[list[int]]) -> list[list[list[int]]]:
    """The parts of each prompt before, between and after its images. Prompts have two, one and no images in turn."""
    parts = []
    for i, prompt in enumerate(prompts):
        words = [3 + token % (WORDS - 3) for token in prompt]
        third = max(len(words) // 3, 1)
        cuts = [[third, 2 * third], [third], []][i % 3]
        parts.append([words[a:b] for a, b in zip([0, *cuts], [*cuts, len(words)], strict=True)])
    return parts


def with_images(kind: Kind, prompts: list[list[int]], image: list[int]) -> list[tuple[list[int], list[Any]]]:
    """(tokens, images) of each prompt. The tokens `image` stand for an image."""
    parts = parts_of(prompts)
    supply = iter(images(kind, sum(len(prompt) - 1 for prompt in parts)))
    requests = []
    for first, *others in parts:
        tokens = list(first)
        for part in others:
            tokens += image + part
        requests.append((tokens, [next(supply) for _ in others]))
    return requests


def requests_for_vllm(config: str, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """The prompts as requests for vLLM."""
    kind, requests = KINDS[config], []
    for tokens, shown in with_images(kind, prompts, [kind.prompt_token]):
        request: dict[str, Any] = {"prompt_token_ids": tokens}
        requests.append(request | ({"multi_modal_data": {"image": shown}} if shown else {}))
    return requests


def expanded(config: str, prompts: list[list[int]]) -> list[tuple[list[int], dict[str, Any]]]:
    """The prompts as inputs of transformers' model: (tokens, the arrays of their images)."""
    kind, requests = KINDS[config], []
    before, after = kind.around
    processor = image_processor(kind)
    for tokens, shown in with_images(kind, prompts, [*before, *[_IMAGE] * kind.tokens, *after]):
        arrays = processor(shown, return_tensors="pt") if shown else {}
        requests.append((tokens, {name: arrays[name] for name in arrays if name in kind.arrays}))
    return requests


def types(config: str, tokens: Any) -> dict[str, Any]:
    """The argument that marks the tokens of images."""
    return {KINDS[config].types: (tokens == _IMAGE).long()}
