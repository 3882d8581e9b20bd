"""Train one of the demo's transformers on this project's own documentation.

    python examples/train_demo.py --model mla

This takes a few minutes on one core and writes src/ragged_attention/demo/weights_mla.npz. The text is small, and the
model is meant to memorise it: `ragged-attention demo` shows how text is served, not how well a model learns.
"""

import argparse
import ast
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ragged_attention.demo.model import KINDS, LARGEST_CODE
from ragged_attention.demo.torch_model import GQA, MLA

Tensor = torch.Tensor
Tensors = dict[str, Tensor]

ROOT = Path(__file__).resolve().parent.parent
PAPERS = ("README.md", "CONTRIBUTING.md", "docs/*.md", "reference/README.md")
# The pages that a model of half a million weights can memorise. The first pages are those from which the demo takes its
# prompts.
BY_HEART = (
    "docs/concepts.md", "README.md", "CONTRIBUTING.md", "docs/backends.md", "docs/configuration.md",
    "reference/README.md",
)  # fmt: skip
# The size of each dimension. The letters are explained in `ragged_attention.demo.model`; Q is N + R, and W is C + R.
SIZES = {
    "gqa": {"V": 256, "E": 128, "L": 4, "H": 8, "K": 2, "D": 16, "F": 192},
    "mla": {"V": 256, "E": 128, "L": 4, "H": 8, "N": 16, "Q": 32, "C": 64, "W": 80, "F": 136},
}
FEED = {"gate": "LEF", "up": "LEF", "down": "LFE", "attention_norm": "LE", "feed_norm": "LE", "last_norm": "E"}
SHAPES = {
    "gqa": {"embed": "VE", "q": "LEHD", "k": "LEKD", "v": "LEKD", "o": "LHDE", **FEED},
    "mla": {
        "embed": "VE", "q": "LEHQ", "latent": "LEW", "latent_norm": "LC", "k": "LCHN", "v": "LCHN", "o": "LHNE", **FEED,
    },
}  # fmt: skip
SHUFFLE_EVERY = 20  # steps
CALIBRATION_PIECES = 64
STARTS = re.compile(r"\s*([-*] |\d+\. |#+ |\w+(, \w+)*: )")
INDENTED_CODE = re.compile(r"^ {4}.*$", re.MULTILINE)


def paragraphs_of(text: str) -> Iterator[str]:
    """The paragraphs of a text, each on one line, without tables, comments and fenced code."""
    lines: list[str] = []
    fenced = False
    for line in [*text.splitlines(), ""]:
        fence = line.lstrip().startswith("```")
        fenced ^= fence
        is_text = not (fenced or fence or line.lstrip().startswith(("|", "<!--"))) and line.strip()
        if lines and (not is_text or STARTS.match(line)):
            yield " ".join(lines)
            lines = []
        if is_text:
            lines.append(line.strip())


def docstrings_of(path: Path) -> Iterator[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield text


def papers(patterns: Iterable[str]) -> list[str]:
    texts = [path.read_text() for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    return [INDENTED_CODE.sub("\n", paper) for paper in texts]


def corpus() -> list[str]:
    """The paragraphs of all papers and docstrings."""
    texts = papers(PAPERS)
    for path in sorted((ROOT / "src" / "ragged_attention").rglob("*.py")):
        if not any(parent.is_symlink() for parent in path.parents):
            texts += docstrings_of(path)
    return paragraphs_in(texts)


def paragraphs_in(texts: Iterable[str]) -> list[str]:
    """The paragraphs with at least 24 characters, without duplicates. Each ends in a newline."""
    paragraphs = dict.fromkeys(paragraph for text in texts for paragraph in paragraphs_of(text))
    return [f"{paragraph}\n" for paragraph in paragraphs if len(paragraph) >= 24]


def initial_weights(generator: torch.Generator, kind: str = "gqa") -> Tensors:
    sizes, shapes = SIZES[kind], SHAPES[kind]
    weights = {}
    for name, letters in shapes.items():
        shape = [sizes[letter] for letter in letters]
        if name.endswith("norm"):
            weights[name] = torch.ones(shape)
            continue
        fan_in = math.prod(shape[1:-1]) if name in ("o", "down") else shape[1]
        depth = math.sqrt(2 * sizes["L"]) if name in ("o", "down") else 1
        weights[name] = torch.randn(shape, generator=generator) * fan_in**-0.5 / depth
    return {name: weight.requires_grad_() for name, weight in weights.items()}


class Text:
    """The bytes of the paragraphs, from which random pieces are drawn."""

    def __init__(self, paragraphs: list[str], generator: torch.Generator) -> None:
        self.paragraphs = paragraphs
        self.generator = generator

    def shuffle(self) -> None:
        """Shuffle the paragraphs, so that any paragraph may follow a newline, as in the demo's prompts."""
        order = torch.randperm(len(self.paragraphs), generator=self.generator).tolist()
        encoded = [self.paragraphs[index].encode() for index in order]
        lengths = torch.tensor([len(paragraph) for paragraph in encoded])
        self.starts = lengths.cumsum(0) - lengths
        self.bytes = torch.frombuffer(bytearray(b"".join(encoded)), dtype=torch.uint8).long()

    def pieces(self, batch: int, length: int) -> Tensor:
        """Random pieces [B, T + 1]. Half of the pieces begin where a paragraph begins, like the demo's prompts."""
        at_starts = self.starts[torch.randint(len(self.starts), (batch // 2,), generator=self.generator)]
        anywhere = torch.randint(len(self.bytes), (batch - batch // 2,), generator=self.generator)
        rows = torch.cat((at_starts, anywhere))[:, None] + torch.arange(length + 1)
        return self.bytes[rows % len(self.bytes)]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention with torch's fused function, which is fast."""
    q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def loss_on(kind: str, weights: Tensors, batch: Tensor) -> Tensor:
    """The mean loss in nats per byte on pieces of text [B, T + 1]."""
    positions = torch.arange(batch.shape[1] - 1)
    transformer = MLA if kind == "mla" else GQA
    hidden = transformer.forward_by_heads(weights, batch[:, :-1], positions, attend)
    logits = hidden @ weights["embed"].T
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def learning_rate(step: int, arguments: argparse.Namespace) -> float:
    warmed = min(1.0, (step + 1) / 50)
    return arguments.rate * warmed * (0.02 + 0.98 * (1 + math.cos(math.pi * step / arguments.steps)) / 2)


def optimizer_of(weights: Tensors, arguments: argparse.Namespace) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights.values(), lr=arguments.rate, betas=(0.9, 0.98), weight_decay=0.0)


def descend(optimizer: torch.optim.Optimizer, loss: Tensor, rate: float) -> None:
    (group,) = optimizer.param_groups
    group["lr"] = rate
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
    optimizer.step()


def train(paragraphs: list[str], arguments: argparse.Namespace, console: Console) -> Tensors:
    generator = torch.Generator().manual_seed(arguments.seed)
    text = Text(paragraphs, generator)
    weights = initial_weights(generator, arguments.model)
    optimizer = optimizer_of(weights, arguments)
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("training", total=arguments.steps)
        for step in range(arguments.steps):
            if step % SHUFFLE_EVERY == 0:
                text.shuffle()
            loss = loss_on(arguments.model, weights, text.pieces(arguments.batch, arguments.length))
            descend(optimizer, loss, learning_rate(step, arguments))
            progress.advance(task)
            if step % 50 == 0 or step == arguments.steps - 1:
                console.print(f"step {step:5}  loss {loss.item():.3f} nats per byte", highlight=False)
    if arguments.model == "mla":
        weights["kv_scale"] = kv_scales(weights, text.pieces(CALIBRATION_PIECES, arguments.length))
    return weights


@torch.no_grad()
def kv_scales(weights: Tensors, batch: Tensor) -> Tensor:
    """The KV scale of each layer: the smallest power of two with which the cached values fit into the 8-bit format."""
    positions = torch.arange(batch.shape[1])
    largest = torch.zeros(len(weights["latent"]))

    def attended(layer: int, h: Tensor) -> Tensor:
        largest[layer] = MLA.latent_rows(weights, layer, h, positions).abs().max()
        return attend(*MLA.heads(weights, layer, h, positions))

    MLA.forward(weights, batch, attended)
    return torch.exp2((largest / LARGEST_CODE).log2().ceil())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=KINDS, required=True)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=16, help="pieces of text per step")
    parser.add_argument("--length", type=int, default=176, help="bytes per piece")
    parser.add_argument("--rate", type=float, default=4e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="default: the file in the demo's folder")
    arguments = parser.parse_args(argv)
    out = arguments.out or ROOT / "src" / "ragged_attention" / "demo" / KINDS[arguments.model].file
    console = Console()
    torch.set_num_threads(1)
    text = paragraphs_in(papers(BY_HEART))
    console.print(f"{len(text)} paragraphs, {sum(len(paragraph.encode()) for paragraph in text)} bytes")
    weights = train(text, arguments, console)
    stored: dict[str, Any] = {name: weight.detach().numpy().astype(np.float16) for name, weight in weights.items()}
    np.savez(out, **stored)
    console.print(f"{out}: {out.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
