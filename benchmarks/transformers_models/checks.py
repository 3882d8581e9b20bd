"""The comparisons for a model. Each way to use it runs with transformers' own attention and with ours."""

from collections.abc import Iterator
from typing import Any

from benchmarks.transformers_models.images import BEHIND
from benchmarks.transformers_models.outcomes import Outcome, compare
from benchmarks.transformers_models.running import (
    Inputs,
    absorbed_batching,
    continuous_batching,
    generate,
    generate_alone,
    left_padding,
    logits,
    logits_alone,
    packed_or_alone,
    packed_training,
    padded_training,
    right_padding,
    static_cache,
    train,
    training_alone,
)
from ragged_attention.errors import Unsupported
from ragged_attention.integrations import transformers as ragged


def absorb(model: Any) -> Any:
    """The model after `absorb_mla`, or None if `absorb_mla` does not support the model."""
    try:
        return ragged.absorb_mla(model)
    except Unsupported:
        return None


def compare_absorbed(model: Any, exact: Any, absorbed: Any) -> Iterator[Outcome]:
    for run in (generate, left_padding, padded_training):
        yield compare(model, exact, run, ours=absorbed)
    yield compare(model, exact, packed_or_alone, packed_training, ours=absorbed)


def compare_images(model: Any, exact: Any, inputs: Inputs) -> Iterator[Outcome]:
    """Yield the outcomes of generation after prompts with images, and of training on prompts that include text."""
    yield compare(model, exact, lambda each, name: generate(each, name, inputs))
    if "input_ids" in inputs:
        labels = inputs["input_ids"].clone()
        labels[:, :-BEHIND] = -100
        yield compare(model, exact, lambda each, name: train(each, name, [inputs | {"labels": labels}]))


def compare_all(
    model: Any, exact: Any, another: Any, kind: str, images: Inputs | None
) -> Iterator[tuple[str, Outcome]]:
    """Yield (column of the table, outcome) for all checks that a model supports. The last check may hang.

    Args:
        model: the model to check.
        exact: the same model in float32, which may be `model` itself.
        another: one more copy of the model, which may be modified.
        kind: one of `building.KINDS`.
        images: prompts with images, or None if the model takes none.
    """
    yield "generate", compare(model, exact, generate, generate_alone)
    yield "logits", compare(model, exact, logits)
    yield "logits", compare(model, exact, left_padding, logits_alone)
    yield "logits", compare(model, exact, right_padding)
    yield "static cache", compare(model, exact, static_cache, generate, generate_alone)
    yield "padded", compare(model, exact, padded_training, training_alone)
    if kind != "seq2seq":
        yield "packed", compare(model, exact, packed_or_alone, packed_training)
    if images is not None:
        for outcome in compare_images(model, exact, images):
            yield "images", outcome
    if (absorbed := absorb(another)) is not None:
        for outcome in compare_absorbed(model, exact, absorbed):
            yield "absorbed", outcome
    if kind == "causal" and exact is model and not model.config.is_encoder_decoder:
        yield "batching", compare(model, exact, continuous_batching)
        if absorbed is not None:
            yield "batching", compare(model, exact, absorbed_batching, ours=absorbed)
