"""Serves a checkpoint of transformers with our attention, and checks it against the eager attention of transformers.

Prompts are served together: by continuous batching if the model's cache allows it, else in one padded batch. Latent
attention is absorbed. Then eager attention reads the generated tokens, and every token is compared with the token
that eager attention selects.
"""

import copy
import dataclasses
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.nn.utils.rnn import pad_sequence

from ragged_attention.demo.prompts import PROMPTS
from ragged_attention.demo.tiny import save_tiny
from ragged_attention.errors import InvalidInput, Unsupported
from ragged_attention.integrations import transformers as ragged

CLOSE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}  # rounding may reorder closer logits
PAGE_SIZE, STEP_TOKENS = 16, 256


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """The comparison of the served tokens with those that eager attention selects."""

    num_tokens: int
    num_equal: int
    furthest: float  # the largest lead of eager attention's best logit over the served token's logit


def main(folder: Path, family: str | None, max_new_tokens: int, device: str | None) -> int:
    """Serve the demo's prompts with a checkpoint. Returns 1 if rounding cannot explain a token, else 0."""
    console = Console(soft_wrap=True, highlight=False)
    if family is not None:
        save_tiny(family, folder)
        console.print(f"a random {family} of two layers, written to {folder}", markup=False)
    model, tokenizer = load(folder, device or ("cuda" if torch.cuda.is_available() else "cpu"))
    prompts = [encoded(prompt.text, tokenizer) for prompt in PROMPTS]
    began = time.perf_counter()
    answers = serve(model, prompts, max_new_tokens)
    seconds = time.perf_counter() - began
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        console.print(f"{prompt.text.strip().splitlines()[-1]!r} -> {decoded(answer, tokenizer)!r}", markup=False)
    written = sum(map(len, answers))
    console.print(f"\n{type(model).__name__}, {model.dtype}: {written} tokens in {seconds:.1f} s", markup=False)
    console.print(ragged.explain(), markup=False)
    verdict = check(model, prompts, answers)
    console.print(
        f"\n{verdict.num_equal} of {verdict.num_tokens} tokens are those of transformers' eager attention; "
        f"the others' logits are at most {verdict.furthest:.2g} lower than theirs"
    )
    return int(verdict.furthest > CLOSE.get(model.dtype, 1e-3))


def load(folder: Path, device: str) -> tuple[Any, Any]:
    """A model with our attention, and its tokenizer, or None if the folder has no tokenizer."""
    if not (folder / "config.json").is_file():
        raise InvalidInput(f"expected a folder with a checkpoint of transformers, got {folder} without config.json")
    ragged.register()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", attn_implementation=ragged.NAME)
    model.to(device)
    if has_latents(model):
        ragged.absorb_mla(model)
    has_tokenizer = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    return model.eval(), AutoTokenizer.from_pretrained(folder) if has_tokenizer else None


def has_latents(model: Any) -> bool:
    """Whether the model caches latents, from which a module's `expand_kv` computes keys and values."""
    return any(hasattr(module, "expand_kv") for module in model.modules())


def encoded(text: str, tokenizer: Any) -> list[int]:
    return list(text.encode()) if tokenizer is None else tokenizer(text)["input_ids"]


def decoded(tokens: list[int], tokenizer: Any) -> str:
    if tokenizer is None:
        return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")
    return tokenizer.decode(tokens)


def serve(model: Any, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    """The tokens that the model writes after each prompt by greedy decoding. No token ends the generation."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    kinds = getattr(model.config, "layer_types", None) or ["full_attention"]
    if has_latents(model) or not set(kinds) <= {"full_attention", "sliding_attention"}:
        return _padded(model, prompts, max_new_tokens)
    longest = max(map(len, prompts)) + max_new_tokens
    config = ContinuousBatchingConfig(
        page_size=PAGE_SIZE, num_blocks=len(prompts) * -(-longest // PAGE_SIZE) + 8, max_batch_tokens=STEP_TOKENS,
        max_requests_per_batch=len(prompts),
    )  # fmt: skip
    options = GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    out = model.generate_batch(prompts, generation_config=options, continuous_batching_config=config, warmup=False)
    if len(out) < len(prompts):
        raise Unsupported(
            f"expected an answer to each of {len(prompts)} prompts, got {len(out)} of continuous batching"
        )
    return [out[name].generated_tokens for name in sorted(out, key=lambda name: int(name.rpartition("_")[2]))]


def _left_padded(model: Any, prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts as rows that are padded on the left, and a mask that is 0 for padding."""
    rows = [torch.tensor(prompt, device=model.device) for prompt in prompts]
    ids, mask = (pad_sequence(each, True, padding_side="left") for each in (rows, list(map(torch.ones_like, rows))))
    return ids, mask


def _padded(model: Any, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    ids, mask = _left_padded(model, prompts)
    options = {"max_new_tokens": max_new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(ids, attention_mask=mask, **options)[:, ids.shape[1] :].tolist()


@torch.no_grad()
def check(model: Any, prompts: list[list[int]], answers: list[list[int]]) -> Verdict:
    """Compare each token with the token that eager attention selects. All prompts are in one padded batch."""
    eager = _with_eager_attention(model)
    ids, mask = _left_padded(model, prompts)
    written, read, cache, below = torch.tensor(answers, device=model.device), ids, None, []
    for step in range(written.shape[1]):
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -read.shape[1] :]
        output = eager(read, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
        logits, cache, read = output.logits[:, -1].float(), output.past_key_values, written[:, step, None]
        below.append(logits.max(1).values - logits.gather(1, read)[:, 0])
        mask = torch.cat((mask, torch.ones_like(read)), 1)
    gaps = torch.stack(below)
    return Verdict(gaps.numel(), int((gaps == 0).sum()), float(gaps.max()))


def _with_eager_attention(model: Any) -> Any:
    """A copy of the model with eager attention, built by transformers without changes of ours."""
    eager = type(model)(copy.deepcopy(model.config)).to(device=model.device, dtype=model.dtype).eval()
    eager.load_state_dict(model.state_dict())
    eager.set_attn_implementation("eager")
    return eager
