"""Train the demo's transformer on this project's own documentation.

    python examples/train_demo.py

takes a few minutes on one core and writes src/ragged_attention/demo/weights.npz. The text is small and the model
is meant to know it by heart: `ragged-attention demo` shows how text is served, not how it is learnt.
"""

import argparse
import ast
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ragged_attention.demo.model import WEIGHTS
from ragged_attention.demo.torch_model import forward

ROOT = Path(__file__).resolve().parent.parent
PAPERS = ("README.md", "CONTRIBUTING.md", "docs/*.md", "reference/README.md")
SIZES = {"V": 256, "E": 128, "L": 4, "H": 8, "K": 2, "D": 16, "F": 192}
SHAPES = {
    "embed": "VE", "q": "LEHD", "k": "LEKD", "v": "LEKD", "o": "LHDE", "gate": "LEF", "up": "LEF", "down": "LFE",
    "attention_norm": "LE", "feed_norm": "LE", "last_norm": "E",
}  # fmt: skip
SHUFFLE_EVERY = 20  # steps
STARTS = re.compile(r"\s*([-*] |\d+\. |#+ |\w+(, \w+)*: )")
INDENTED_CODE = re.compile(r"^ {4}.*$", re.MULTILINE)


def paragraphs_of(text: str) -> Iterator[str]:
    """Running text, each paragraph on one line; tables, comments and fenced code are left out."""
    lines: list[str] = []
    fenced = False
    for line in [*text.splitlines(), ""]:
        fence = line.lstrip().startswith("```")
        fenced ^= fence
        passes = not (fenced or fence or line.lstrip().startswith(("|", "<!--"))) and line.strip()
        if lines and (not passes or STARTS.match(line)):
            yield " ".join(lines)
            lines = []
        if passes:
            lines.append(line.strip())


def docstrings_of(path: Path) -> Iterator[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield text


def corpus() -> list[str]:
    """The papers and the docstrings as paragraphs, each ending in a newline, none twice."""
    papers = [path.read_text() for pattern in PAPERS for path in sorted(ROOT.glob(pattern))]
    texts = [INDENTED_CODE.sub("\n", paper) for paper in papers]
    for path in sorted((ROOT / "src" / "ragged_attention").rglob("*.py")):
        if not any(parent.is_symlink() for parent in path.parents):
            texts += docstrings_of(path)
    found = dict.fromkeys(paragraph for text in texts for paragraph in paragraphs_of(text))
    return [f"{paragraph}\n" for paragraph in found if len(paragraph) >= 24]


def initial_weights(generator: torch.Generator) -> dict[str, torch.Tensor]:
    weights = {}
    for name, letters in SHAPES.items():
        shape = [SIZES[letter] for letter in letters]
        if name.endswith("norm"):
            weights[name] = torch.ones(shape)
            continue
        fan_in = SIZES["H"] * SIZES["D"] if name == "o" else SIZES["F"] if name == "down" else SIZES["E"]
        depth = math.sqrt(2 * SIZES["L"]) if name in ("o", "down") else 1
        weights[name] = torch.randn(shape, generator=generator) * fan_in**-0.5 / depth
    return {name: weight.requires_grad_() for name, weight in weights.items()}


class Text:
    """The paragraphs as bytes, from which pieces are drawn."""

    def __init__(self, paragraphs: list[str], generator: torch.Generator) -> None:
        self.paragraphs = paragraphs
        self.generator = generator

    def shuffle(self) -> None:
        """Put the paragraphs in a new order: after a newline anything may follow, as in the demo's prompts."""
        order = torch.randperm(len(self.paragraphs), generator=self.generator).tolist()
        encoded = [self.paragraphs[index].encode() for index in order]
        lengths = torch.tensor([len(paragraph) for paragraph in encoded])
        self.starts = lengths.cumsum(0) - lengths
        self.bytes = torch.frombuffer(bytearray(b"".join(encoded)), dtype=torch.uint8).long()

    def pieces(self, batch: int, length: int) -> torch.Tensor:
        """Pieces [B, T + 1]: half begin where a paragraph does, as prompts do, half anywhere."""
        at_starts = self.starts[torch.randint(len(self.starts), (batch // 2,), generator=self.generator)]
        anywhere = torch.randint(len(self.bytes), (batch - batch // 2,), generator=self.generator)
        rows = torch.cat((at_starts, anywhere))[:, None] + torch.arange(length + 1)
        return self.bytes[rows % len(self.bytes)]


def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention, by torch's fused function for speed."""
    del layer
    q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def loss_on(weights: dict[str, torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
    """Nats a byte on pieces of text [B, T + 1]."""
    hidden = forward(weights, batch[:, :-1], torch.arange(batch.shape[1] - 1), attend)
    logits = hidden @ weights["embed"].T
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def learning_rate(step: int, arguments: argparse.Namespace) -> float:
    warmed = min(1.0, (step + 1) / 50)
    return arguments.rate * warmed * (0.02 + 0.98 * (1 + math.cos(math.pi * step / arguments.steps)) / 2)


def optimizer_of(weights: dict[str, torch.Tensor], arguments: argparse.Namespace) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights.values(), lr=arguments.rate, betas=(0.9, 0.98), weight_decay=0.0)


def descend(optimizer: torch.optim.Optimizer, loss: torch.Tensor, rate: float) -> None:
    (group,) = optimizer.param_groups
    group["lr"] = rate
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
    optimizer.step()


def train(paragraphs: list[str], arguments: argparse.Namespace, console: Console) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(arguments.seed)
    text = Text(paragraphs, generator)
    weights = initial_weights(generator)
    optimizer = optimizer_of(weights, arguments)
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("training", total=arguments.steps)
        for step in range(arguments.steps):
            if step % SHUFFLE_EVERY == 0:
                text.shuffle()
            loss = loss_on(weights, text.pieces(arguments.batch, arguments.length))
            descend(optimizer, loss, learning_rate(step, arguments))
            progress.advance(task)
            if step % 50 == 0 or step == arguments.steps - 1:
                console.print(f"step {step:5}  loss {loss.item():.3f} nats a byte", highlight=False)
    return weights


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=16, help="pieces of text a step")
    parser.add_argument("--length", type=int, default=176, help="bytes of a piece")
    parser.add_argument("--rate", type=float, default=4e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "src" / "ragged_attention" / "demo" / WEIGHTS)
    arguments = parser.parse_args(argv)
    console = Console()
    torch.set_num_threads(1)
    text = corpus()
    console.print(f"{len(text)} paragraphs, {sum(len(paragraph.encode()) for paragraph in text)} bytes")
    weights = train(text, arguments, console)
    stored: dict[str, Any] = {name: weight.detach().numpy().astype(np.float16) for name, weight in weights.items()}
    np.savez(arguments.out, **stored)
    console.print(f"{arguments.out}: {arguments.out.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
