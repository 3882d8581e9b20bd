"""Ways to use a model. Each function runs it with one attention function and returns tensors.

Generation is forced to given tokens and returns logits. If models chose their tokens, a choice between two likely
tokens could hide or magnify a difference.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.data.data_collator import DataCollatorWithFlattening
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from benchmarks.transformers_models.outcomes import EAGER, Result
from benchmarks.transformers_models.sizes import VOCABULARY
from ragged_attention.integrations import transformers as ragged

Inputs = dict[str, torch.Tensor]

ROWS, LENGTH, NEW = 3, 17, 10
PADDING = (4, 0, 10)  # padding tokens per row


def tokens(rows: int = ROWS, length: int = LENGTH, seed: int = 0) -> torch.Tensor:
    return torch.randint(4, VOCABULARY - 4, (rows, length), generator=torch.Generator().manual_seed(seed))


def padding(*, right: bool = False) -> torch.Tensor:
    """The attention mask of the tokens, which is 0 for padding."""
    left = (torch.arange(LENGTH) >= torch.tensor(PADDING)[:, None]).long()
    return left.flip(1) if right else left


DECODED = tokens(length=9, seed=5)  # the decoder's tokens in an encoder-decoder model
SEQUENCES = [tokens(1, length, seed=length)[0].tolist() for length in (5, 9, 3, 12)]
PROMPTS = [tokens(1, length, seed=length)[0].tolist() for length in (3, 11, 7, 30, 5)]
PROMPTS.append([*PROMPTS[3][:20], 7, 8])  # shares a prefix with another prompt


class Given(LogitsProcessor):
    """A logits processor that makes `generate` choose given tokens. All rows get the same tokens."""

    def __init__(self) -> None:
        self._left = iter(tokens(1, NEW, seed=99)[0].tolist())

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        del input_ids
        forced = torch.full_like(scores, -torch.inf)
        forced[..., next(self._left)] = 0.0
        return forced


# ---- checks


def generate(model: Any, attention: str, inputs: Inputs | None = None, **options: Any) -> Result:
    """The logits while given tokens are generated, by default after prompts with padding on the left."""
    model.eval().set_attn_implementation(attention)
    inputs = in_dtype(model, inputs or {"input_ids": tokens(), "attention_mask": padding()})
    model.generation_config.update(pad_token_id=0, eos_token_id=None)
    with torch.no_grad():
        made = model.generate(
            **inputs, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, num_beams=1, use_cache=True,
            logits_processor=LogitsProcessorList([Given()]), output_logits=True, return_dict_in_generate=True,
            disable_compile=True, **options,
        )  # fmt: skip
    return (torch.stack(made.logits, 1),)


def in_dtype(model: Any, inputs: Inputs) -> Inputs:
    """The inputs with floats converted to the model's dtype."""
    return {name: value.to(model.dtype) if value.is_floating_point() else value for name, value in inputs.items()}


def static_cache(model: Any, attention: str) -> Result:
    return generate(model, attention, cache_implementation="static")


def logits(model: Any, attention: str, mask: torch.Tensor | None = None) -> Result:
    """The logits of one forward pass, without the logits at padding."""
    model.eval().set_attn_implementation(attention)
    inputs = {"input_ids": tokens()} | ({} if mask is None else {"attention_mask": mask})
    decodes = model.config.is_encoder_decoder
    inputs |= {"decoder_input_ids": DECODED} if decodes else {}
    with torch.no_grad():
        values = model(**inputs, use_cache=False).logits
    return (values if mask is None or decodes else values[mask.bool()],)


def left_padding(model: Any, attention: str) -> Result:
    return logits(model, attention, padding())


def right_padding(model: Any, attention: str) -> Result:
    return logits(model, attention, padding(right=True))


def train(model: Any, attention: str, batches: Sequence[Inputs], weights: Sequence[float] = (1.0,)) -> Result:
    """The loss over some batches, and all its gradients in one tensor."""
    model.train().set_attn_implementation(attention)
    model.zero_grad()
    losses = torch.stack([model(**in_dtype(model, batch), use_cache=False).loss for batch in batches])
    loss = losses @ torch.tensor(weights, dtype=losses.dtype)
    loss.backward()
    flat = [torch.zeros(each.numel()) if each.grad is None else each.grad.flatten() for each in model.parameters()]
    model.zero_grad()
    gradients = torch.cat([each.float() for each in flat])
    return loss.detach(), gradients


def padded_training(model: Any, attention: str) -> Result:
    """Train on a batch with padding on the left. In encoder-decoder models, the decoder's text has no padding."""
    mask = padding()
    labels = tokens().masked_fill(mask == 0, -100)
    labels[:, 1:][mask[:, :-1] == 0] = -100  # the prediction at the last padding token is not specified
    labels = DECODED if model.config.is_encoder_decoder else labels
    return train(model, attention, [{"input_ids": tokens(), "attention_mask": mask, "labels": labels}])


# These functions run the same prompts one at a time, without padding. So their results are right even for models in
# which transformers' own attention lets tokens see padding.


def rows_alone() -> list[torch.Tensor]:
    return [row[shown.bool()][None] for row, shown in zip(tokens(), padding(), strict=True)]


def generate_alone(model: Any, attention: str) -> Result:
    results = [generate(model, attention, {"input_ids": row}) for row in rows_alone()]
    return (torch.cat([made for (made,) in results]),)


def logits_alone(model: Any, attention: str) -> Result:
    model.eval().set_attn_implementation(attention)
    with torch.no_grad():
        return (torch.cat([model(input_ids=row, use_cache=False).logits[0] for row in rows_alone()]),)


def training_alone(model: Any, attention: str) -> Result:
    return _weighted(model, attention, rows_alone())


def _weighted(model: Any, attention: str, sequences: Sequence[torch.Tensor]) -> Result:
    """Train on sequences [1, L] with the mean loss over all their tokens."""
    counts = [each.shape[1] - 1 for each in sequences]
    batches = [{"input_ids": each, "labels": each} for each in sequences]
    return train(model, attention, batches, [count / sum(counts) for count in counts])


def packed_training(model: Any, attention: str) -> Result:
    """Train on sequences packed into one row. Their positions separate them."""
    collate: Any = DataCollatorWithFlattening(return_flash_attn_kwargs=False)
    return train(model, attention, [dict(collate([{"input_ids": each, "labels": each} for each in SEQUENCES]))])


def packed_or_alone(model: Any, attention: str) -> Result:
    """`packed_training` with our attention. With transformers' eager attention, the sequences run one at a time.

    Packed sequences and single sequences have the same mean loss.
    """
    if attention != EAGER:
        return packed_training(model, attention)
    return _weighted(model, attention, [torch.tensor([each]) for each in SEQUENCES])


def continuous_batching(model: Any, attention: str) -> Result:
    """The tokens of `generate_batch`, with our attention or, for transformers' side, with `sdpa`.

    transformers' tokens must equal those of `generate`.
    """
    if attention == ragged.NAME:
        return _batched(model, ragged.PAGED_NAME)
    made, alone = _batched(model, "sdpa"), _alone(model)
    if not torch.equal(*made, *alone):
        raise ValueError("generate_batch chooses other tokens than generate")
    return made


def absorbed_batching(model: Any, attention: str) -> Result:
    """The tokens of `generate_batch` after `absorb_mla`, with our attention.

    transformers' side uses `generate`, because its batching has no pages of latents.
    """
    if attention == ragged.NAME:
        return _batched(model, ragged.PAGED_NAME)
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    if any("attention" not in kind or "linear" in kind for kind in kinds):
        raise ValueError("generate_batch takes no recurrent layers")
    return _alone(model)


def _batched(model: Any, attention: str) -> Result:
    model.eval().set_attn_implementation(attention)
    errors = Errors()
    log = logging.getLogger("ContinuousBatchingLogger")
    log.handlers, log.propagate = [errors], False
    made = model.generate_batch(
        PROMPTS,
        generation_config=GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=8, num_blocks=40, max_batch_tokens=24, max_requests_per_batch=8
        ),
        warmup=False,
    )
    generated = [made[name].generated_tokens for name in sorted(made, key=lambda name: int(name.rpartition("_")[2]))]
    if [len(each) for each in generated] != [NEW] * len(PROMPTS):
        raise errors.last or RuntimeError(f"expected {NEW} tokens for each of {len(PROMPTS)} prompts, got {generated}")
    return (torch.tensor(generated),)


def _alone(model: Any) -> Result:
    """The tokens that `generate` chooses after each prompt."""
    model.eval().set_attn_implementation(EAGER)
    model.generation_config.update(pad_token_id=0, eos_token_id=None)
    made = [model.generate(torch.tensor([each]), max_new_tokens=NEW, do_sample=False) for each in PROMPTS]
    return (torch.cat([each[:, -NEW:] for each in made]),)


class Errors(logging.Handler):
    """Keeps the last logged exception. Continuous batching only logs the exceptions of its thread."""

    last: BaseException | None = None

    def emit(self, record: logging.LogRecord) -> None:
        self.last = (record.exc_info and record.exc_info[1]) or self.last
