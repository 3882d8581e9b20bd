"""Makes prompts with images, in the form that a model accepts.

A form is the shape of the images, and the arguments that describe them. Forms are tried with transformers' own
attention. A form is right if the model runs, and if other images give other logits.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.transformers_models.outcomes import EAGER, brief, distance
from benchmarks.transformers_models.running import Inputs, generate, tokens

Form = Callable[[int], Inputs]
ROWS = 2  # the number of prompts, each of which has one image
IMAGE_TOKENS = ("image_token_id", "image_token_index", "image_patch_id")
OF_IMAGE = ("mm_token_type_ids", "token_type_ids", "image_embeds_position_mask")  # arguments that mark the image tokens
BEFORE, BEHIND, PAD = 3, 5, 2  # tokens before and after the image, and padding tokens in the first row
SIDE, PATCH = 28, 14  # defaults for configurations without an image size or a patch size


class NoForm(Exception):
    """The model accepts none of the known forms of images."""


def image_inputs(model: Any) -> Inputs:
    """Inputs of `generate` for prompts with images, padded on the left.

    Raises:
        NoForm: the model accepts none of the known forms. The message is the error of the first form.
    """
    reasons = []
    for form in forms(model):
        try:
            inputs, others = (prompts(model, pixels) for pixels in (form(0), form(1)))
            if distance(generate(model, EAGER, inputs), generate(model, EAGER, others)) > 1e-6:
                return inputs
            reasons.append("its images change nothing")
        except Exception as error:
            reasons.append(brief(error))
    raise NoForm(reasons[0] if reasons else "its forward pass takes no images in a known form")


def forms(model: Any) -> list[Form]:
    """The possible forms of random images, as functions of a seed.

    Forms for models whose forward pass has special arguments come first.
    """
    takes = set(inspect.signature(model.forward).parameters)
    vision = getattr(model.config, "vision_config", None) or model.config
    side, patch = (_first(getattr(vision, name, None)) for name in ("image_size", "patch_size"))
    side, patch = side or SIDE, patch or PATCH
    merge = _first(getattr(vision, "spatial_merge_size", None)) or 2
    grid = 2 * merge  # patches in height and in width
    count, flat = ROWS * grid * grid, 3 * patch * patch
    image = (3, side, side)
    found: list[Form] = []

    def add(name: str, *shapes: tuple[int, ...], **others: Any) -> None:
        """Add a form for each of the shapes, if the forward pass has the argument `name`, which belongs to the form."""
        arguments = {key: torch.as_tensor(value) for key, value in others.items()}
        if name in takes:
            found.extend(
                lambda seed, shape=shape: {"pixel_values": _noise(shape, seed)} | arguments for shape in shapes
            )

    thw = {"image_grid_thw": [[1, grid, grid]] * ROWS}
    thw |= {"image_merge_sizes": [merge] * ROWS} if "image_merge_sizes" in takes else {}
    add("image_grid_thw", (count, flat), (count, 2 * flat), (count, 3, patch, patch), **thw)
    add("image_grid_thw", (ROWS * 4, merge * patch, merge * patch, 3), image_grid_thw=[[1, 2, 2]] * ROWS)
    add("image_grid_hw", (count, flat), image_grid_hw=[[grid, grid]] * ROWS)
    add("image_sizes", (ROWS, *image), *((ROWS, crops, *image) for crops in (3, 5)), image_sizes=[[side, side]] * ROWS)
    add("target_sizes", (1, 3, patch, count * patch), target_sizes=[[grid, grid]] * ROWS)
    patches = {"spatial_shapes": [[grid, grid]] * ROWS, "pixel_attention_mask": torch.ones(ROWS, grid * grid).long()}
    add("spatial_shapes", (ROWS, grid * grid, flat), **patches)
    places = torch.cartesian_prod(torch.arange(grid), torch.arange(grid)).expand(ROWS, -1, -1)
    add(
        "image_position_ids",
        (ROWS, grid * grid, flat),
        (ROWS, grid * grid, merge * merge * flat),
        image_position_ids=places,
    )
    if "aspect_ratio_ids" in takes:
        tiles = vision.max_num_tiles
        ratios = {"aspect_ratio_ids": [[1]] * ROWS, "aspect_ratio_mask": [[[1] * tiles]] * ROWS}
        shown = torch.ones(ROWS, BEFORE + BEHIND, 1, tiles).long()
        add("aspect_ratio_ids", (ROWS, 1, tiles, *image), cross_attention_mask=shown, **ratios)
    add("image_attention_mask", (ROWS, 1, *image), image_attention_mask=torch.ones(ROWS, BEFORE + BEHIND, 1).long())
    queries = {"qformer_input_ids": tokens(ROWS, 4), "qformer_attention_mask": torch.ones(ROWS, 4).long()}
    add("qformer_input_ids", (ROWS, *image), (ROWS, 2, *image), **queries)
    pooling = {"image_token_pooling": [[0, 1, 2, 3]] * ROWS, "image_grids": [[1, 1, 0, 0]] * ROWS}
    add("image_token_pooling", (ROWS, 4, flat), image_num_crops=[1] * ROWS, **pooling)
    if "high_res_pixel_values" in takes:
        large = model.config.high_res_vision_config.image_size
        add("high_res_pixel_values", (ROWS, *image), high_res_pixel_values=_noise((ROWS, 3, large, large), 2))
    add("pixel_values", (ROWS, *image), (ROWS, 1, *image), (ROWS, 4, flat), (ROWS, 2, side, side, 3))
    for shown in (torch.ones(ROWS, 1), torch.ones(ROWS, 1, side, side)):
        add("pixel_attention_mask", (ROWS, 1, *image), pixel_attention_mask=shown.bool())
    return found


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list | tuple) else value


def _noise(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def prompts(model: Any, pixels: Inputs) -> Inputs:
    """Inputs with text before and after the image tokens, or only images if the model takes no text."""
    takes = inspect.signature(model.forward).parameters
    inputs = dict(pixels)
    if "input_ids" in takes:
        count = tokens_of(model, pixels)
        ids = tokens(ROWS, BEFORE + count + BEHIND)
        of_image = torch.zeros_like(ids)
        of_image[:, BEFORE : BEFORE + count] = 1
        names = [name for name in IMAGE_TOKENS if isinstance(getattr(model.config, name, None), int)]
        if names:
            ids[of_image.bool()] = getattr(model.config, names[0])
        shown = torch.ones_like(ids)
        shown[0, :PAD] = 0
        inputs |= {"input_ids": ids, "attention_mask": shown}
        inputs |= {name: of_image for name in OF_IMAGE if name in takes}
        inputs |= {"bbox": torch.zeros(*ids.shape, 4).long()} if "bbox" in takes else {}
    return inputs


def tokens_of(model: Any, pixels: Inputs) -> int:
    """The number of tokens per image. It is 0 if the model's prompts have no image tokens."""
    features = [getattr(each, "get_image_features", None) for each in (model, model.base_model)]
    features = [each for each in features if each is not None]
    if not features:
        return 0
    takes = {name for each in features for name in inspect.signature(each).parameters}
    arguments = {name: value for name, value in pixels.items() if name in takes or "args" in takes}
    with torch.no_grad():
        found = features[0](**arguments)
    if hasattr(found, "last_hidden_state"):
        found = found.last_hidden_state if found.pooler_output is None else found.pooler_output
    width = model.config.get_text_config().hidden_size
    return _numbers(found) // width // ROWS


def _numbers(found: Any) -> int:
    return found.numel() if isinstance(found, torch.Tensor) else sum(map(_numbers, found))
