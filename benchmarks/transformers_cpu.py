"""Run models of transformers on this machine's CPU, with our attention and with transformers' own.

    python -m benchmarks.transformers_cpu [--modes prompts,decode] [--dtypes float32] [--rounds 5] [--save]

The models have random weights and four small layers, so that attention takes a large share of the time at these
lengths. All runs of a mode are in one process. In each round, every attention function runs once. Results are compared
with those of the mode's last attention function. A peak is the rise of the process's memory during a run (VmHWM, which
Linux can reset). With --save the table goes to docs/transformers.md.
"""

import argparse
import copy
import ctypes
import dataclasses
import datetime
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from benchmarks.cpu import page
from benchmarks.timing import Timing, ratio
from ragged_attention.integrations import transformers as ragged

PAGE = page.ROOT / "docs" / "transformers.md"
BEGIN, END = "<!-- written by `make bench-transformers` -->\n", "<!-- end of what is written -->\n"
OURS, ABSORBED = "ragged", "ragged, absorbed"
SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "max_position_embeddings": 8192,
    "eos_token_id": 1023,
}
GROUPED: dict[str, Any] = SIZES | {"num_key_value_heads": 4, "head_dim": 64}
LATENT: dict[str, Any] = SIZES | {
    "num_key_value_heads": 16,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "kv_lora_rank": 256,
    "q_lora_rank": 256,
    "first_k_dense_replace": 4,
}
LENGTHS = (1500, 800, 1200, 500)  # lengths of the prompts of a batch, padded on the left
NEW_TOKENS = 24
PAD = 0


@dataclasses.dataclass
class Run:
    """The results of one run of a model."""

    seconds: float
    tokens: int
    peak: int  # bytes
    result: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Mode:
    """A way to use a model: the attention functions with which it is timed, and the function that makes a run."""

    name: str
    what: str
    attentions: tuple[str, ...]
    run: Callable[[Any], Run]
    model: Callable[[torch.dtype], Any]


def grouped(dtype: torch.dtype) -> Any:
    """A model like Qwen3, with 16 query heads and 4 KV heads of 64 dimensions."""
    return _random(transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**GROUPED), dtype)


def latent(dtype: torch.dtype) -> Any:
    """A model like DeepSeek V3, with 16 heads, latents of 256 dimensions and 32 rotary dimensions."""
    return _random(transformers.DeepseekV3ForCausalLM, transformers.DeepseekV3Config(**LATENT), dtype)


def _random(kind: Any, config: Any, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    return kind(config).eval().to(dtype)


# ---- the modes


class Clock:
    """Replaces a streamer. `generate` passes it the prompt and then every token as soon as it is generated."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: torch.Tensor) -> None:
        del tokens
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing. A streamer must have this method."""


def _prompts() -> list[list[int]]:
    random = torch.Generator().manual_seed(1)
    return [torch.randint(1, 1000, (length,), generator=random).tolist() for length in LENGTHS]


def _padded() -> dict[str, torch.Tensor]:
    longest = max(LENGTHS)
    rows = [[PAD] * (longest - len(prompt)) + prompt for prompt in _prompts()]
    ids = torch.tensor(rows)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def _generated(model: Any, tokens: int) -> tuple[list[float], torch.Tensor]:
    clock = Clock()
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": PAD, "min_new_tokens": tokens}
    with torch.inference_mode():
        result = model.generate(**_padded(), max_new_tokens=tokens, streamer=clock, **options)
    return clock.times, result[:, max(LENGTHS) :]


def prompts(model: Any) -> Run:
    with Peak() as peak:
        times, result = _generated(model, 1)
    return Run(times[1] - times[0], sum(LENGTHS), peak.bytes, result)


def decode(model: Any) -> Run:
    with Peak() as peak:
        times, result = _generated(model, NEW_TOKENS + 1)
    return Run(times[-1] - times[1], NEW_TOKENS * len(LENGTHS), peak.bytes, result)


def batched(model: Any) -> Run:
    """Generate by continuous batching for two batches of prompts, in mixed steps of up to 512 tokens."""
    config = transformers.GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=PAD
    )
    cache = ContinuousBatchingConfig(
        page_size=32, num_blocks=512, max_batch_tokens=512, max_requests_per_batch=8, allow_block_sharing=False,
        auto_switch_to_flash=False,
    )  # fmt: skip
    inputs = _prompts() + [prompt[::-1] for prompt in _prompts()]
    with Peak() as peak:
        begin = time.perf_counter()
        outputs = model.generate_batch(
            inputs, generation_config=config, continuous_batching_config=cache, warmup=False, progress_bar=False
        )
        seconds = time.perf_counter() - begin
    rows = sorted(outputs, key=lambda name: int(name.rpartition("_")[2]))
    tokens = torch.tensor([outputs[row].generated_tokens for row in rows])
    return Run(seconds, tokens.numel() + sum(map(len, inputs)), peak.bytes, tokens)


def packed(model: Any) -> Run:
    """Run one training step, forward and backward, on packed sequences."""
    ids = torch.tensor([[token for prompt in _prompts() for token in prompt]])
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    model.train()
    model.zero_grad()
    with Peak() as peak:
        begin = time.perf_counter()
        loss = model(input_ids=ids, position_ids=positions, labels=ids, use_cache=False).loss
        loss.backward()
        seconds = time.perf_counter() - begin
    model.eval()
    return Run(seconds, ids.numel(), peak.bytes, loss.detach()[None])


OWN = ("sdpa", "eager")
PAGED = ("sdpa", "paged|eager")  # in `generate_batch`, both of these compute over pages
MODES = (
    Mode("prompts", f"prompts of {', '.join(map(str, LENGTHS))} tokens, padded", (OURS, *OWN), prompts, grouped),
    Mode("decode", f"{NEW_TOKENS} new tokens for each prompt", (OURS, *OWN), decode, grouped),
    Mode("batched", "8 such prompts by `generate_batch`", (OURS, *PAGED), batched, grouped),
    Mode("packed", "training on the 4, packed", (OURS, "sdpa"), packed, grouped),
    Mode("latent prompts", "latent attention: the prompts", (OURS, ABSORBED, "sdpa"), prompts, latent),
    Mode("latent decode", "latent attention: the tokens", (OURS, ABSORBED, "sdpa"), decode, latent),
)


# ---- measuring


class Peak:
    """The rise of this process's memory within a block, in bytes."""

    bytes = 0

    def __enter__(self) -> "Peak":
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark to the present use
        self._before = _status("VmRSS")
        return self

    def __exit__(self, *error: object) -> None:
        self.bytes = _status("VmHWM") - self._before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def measured(mode: Mode, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """The results of a mode by attention: tokens per second, peak of memory, ratio of time, agreement."""
    model = mode.model(dtype)
    models: dict[str, Any] = dict.fromkeys(mode.attentions, model)
    if ABSORBED in models:
        models[ABSORBED] = ragged.absorb_mla(copy.deepcopy(model))
    runs: dict[str, list[Run]] = {name: [] for name in models}
    for _ in range(1 + rounds):
        for name, variant in models.items():
            variant.set_attn_implementation(ragged.NAME if name in (OURS, ABSORBED) else name)
            runs[name].append(mode.run(variant))
    reference = runs[mode.attentions[-1]][0].result
    timings = {name: Timing(tuple(run.seconds for run in found[1:])) for name, found in runs.items()}
    return {
        "name": mode.name,
        "what": mode.what,
        "dtype": str(dtype).rpartition(".")[2],
        "tokens_per_second": {name: runs[name][0].tokens / timing.median for name, timing in timings.items()},
        "peaks": {name: statistics.median(run.peak for run in found[1:]) for name, found in runs.items()},
        "ratios": {name: ratio(timings[OURS], timing) for name, timing in timings.items()},
        "agreement": {name: _agreement(found[0].result, reference) for name, found in runs.items()},
    }


def _agreement(result: torch.Tensor, reference: torch.Tensor) -> float:
    """The share of equal tokens. For a loss, the difference from the reference."""
    if result.dtype.is_floating_point:
        return float((result - reference).abs().max())
    return float((result == reference).float().mean())


# ---- output

HEADS = ("", "attention", "tokens a second", "time / ours", "peak, MB", "tokens equal (loss off by)")


def lines_of(row: Mapping[str, Any]) -> Iterator[list[str]]:
    for index, name in enumerate(row["ratios"]):
        yield [
            "" if index else f"{row['what']}, {row['dtype']}",
            f"`{name}`" if name in OWN + PAGED else name,
            f"{row['tokens_per_second'][name]:.0f}",
            f"{row['ratios'][name]:.2f}",
            f"{row['peaks'][name] / 1e6:.0f}",
            _agreement_text(row["agreement"][name], row["name"]),
        ]


def _agreement_text(agreement: float, mode: str) -> str:
    return f"{agreement:.1g}" if mode == "packed" else f"{100 * agreement:.0f} %"


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    about = f"{page.machine()}, torch {torch.__version__}, transformers {transformers.__version__}"
    lines = [f"Measured on {about}, {torch.get_num_threads()} threads, {datetime.date.today().isoformat()}.", ""]
    lines += ["| " + " | ".join(HEADS) + " |", "|---" * len(HEADS) + "|"]
    for row in rows:
        lines += ["| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines_of(row)]
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(*HEADS)
    for row in rows:
        for line in lines_of(row):
            table.add_row(*line)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0, or 1 if our result in float32 differs from that of transformers' own attention."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--modes", default="", help="names of modes, or how they begin, separated by commas (default: all)"
    )
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--save", action="store_true", help="write the table")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    ragged.register()
    console, rows = Console(), []
    for mode in MODES:
        if not mode.name.startswith(tuple(options.modes.split(","))):
            continue
        for dtype in options.dtypes.split(","):
            with console.status(f"{mode.name}, {dtype}"):
                rows.append(measured(mode, getattr(torch, dtype), options.rounds))
            console.print(_table(rows[-1:]))
    if options.save:
        page.replace(PAGE, markdown(rows), BEGIN, END)
    ours = [(row, name) for row in rows for name in (OURS, ABSORBED) if name in row["ratios"]]
    return int(any(_wrong(row, row["agreement"][name]) for row, name in ours if row["dtype"] == "float32"))


def _wrong(row: Mapping[str, Any], agreement: float) -> bool:
    return agreement > 1e-4 if row["name"] == "packed" else agreement < 1


if __name__ == "__main__":
    raise SystemExit(main())
