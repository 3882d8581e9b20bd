"""The demo of a checkpoint of transformers: served with our attention, checked against transformers' own.

Prompts are served together: by continuous batching where the model's cache allows, else in one padded batch, latent
attention absorbed. Then the eager attention of transformers reads the answers along, and every token is compared with
what that would have written there.
"""

import copy
import dataclasses
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ragged_attention.demo.prompts import PROMPTS
from ragged_attention.demo.tiny import save_tiny
from ragged_attention.errors import InvalidInput, Unsupported
from ragged_attention.integrations import transformers as ragged

CLOSE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}  # logits that rounding may put in either order
PAGE_SIZE, STEP_TOKENS = 16, 256


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """Of so many tokens, how many are eager's own; by how much the worst other one lies below eager's in its logits."""

    num_tokens: int
    num_equal: int
    furthest: float


def main(folder: Path, family: str | None, max_new_tokens: int, device: str | None) -> int:
    """Serve the demo's prompts with a checkpoint; 1 if a token is none that eager attention could have written."""
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
    """A model with our attention, and its tokenizer, None where it has none."""
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
    """Whether attention is over cached latents, of which a module's `expand_kv` makes keys and values."""
    return any(hasattr(module, "expand_kv") for module in model.modules())


def encoded(text: str, tokenizer: Any) -> list[int]:
    return list(text.encode()) if tokenizer is None else tokenizer(text)["input_ids"]


def decoded(tokens: list[int], tokenizer: Any) -> str:
    if tokenizer is None:
        return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")
    return tokenizer.decode(tokens)


def serve(model: Any, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    """What the model writes after each prompt, the likeliest token each time, whatever it is."""
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
    wanted = GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    out = model.generate_batch(prompts, generation_config=wanted, continuous_batching_config=config, warmup=False)
    if len(out) < len(prompts):
        raise Unsupported(
            f"expected an answer to each of {len(prompts)} prompts, got {len(out)} of continuous batching"
        )
    return [out[name].generated_tokens for name in sorted(out, key=lambda name: int(name.rpartition("_")[2]))]


def _left_padded(model: Any, prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts as rows that end together, and where they are not padding."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=model.device)
    lens = torch.tensor([len(prompt) for prompt in prompts], device=model.device)
    return ids, (torch.arange(longest, device=model.device) >= longest - lens[:, None]).long()


def _padded(model: Any, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    ids, shown = _left_padded(model, prompts)
    wanted = {"max_new_tokens": max_new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(ids, attention_mask=shown, **wanted)[:, ids.shape[1] :].tolist()


@torch.no_grad()
def check(model: Any, prompts: list[list[int]], answers: list[list[int]]) -> Verdict:
    """Have eager attention read along, in one padded batch over a cache, and judge each token before it is read."""
    judge = _with_eager_attention(model)
    ids, shown = _left_padded(model, prompts)
    written, read, cache, below = torch.tensor(answers, device=model.device), ids, None, []
    for step in range(written.shape[1]):
        positions = (shown.cumsum(1) - 1).clamp(min=0)[:, -read.shape[1] :]
        found = judge(read, attention_mask=shown, position_ids=positions, past_key_values=cache, use_cache=True)
        logits, cache, read = found.logits[:, -1].float(), found.past_key_values, written[:, step, None]
        below.append(logits.max(1).values - logits.gather(1, read)[:, 0])
        shown = torch.cat((shown, torch.ones_like(read)), 1)
    gaps = torch.stack(below)
    return Verdict(gaps.numel(), int((gaps == 0).sum()), float(gaps.max()))


def _with_eager_attention(model: Any) -> Any:
    """Another model of the same weights as transformers made it."""
    judge = type(model)(copy.deepcopy(model.config)).to(device=model.device, dtype=model.dtype).eval()
    judge.load_state_dict(model.state_dict())
    judge.set_attn_implementation("eager")
    return judge
