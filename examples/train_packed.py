"""Train the demo's transformer on packed documents, and a second time on the same documents with padding.

    python examples/train_packed.py

This takes one or two minutes on one core. In the packed run, the documents of a step are concatenated to one row.
`varlen_attention` gets their boundaries, so a token sees only its own document. In the padded run, each document has a
row, which is as long as the longest document, and torch's own attention is used. Both runs have the same initial
weights, so their losses must be equal except for rounding. `--plot` draws both loss curves.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from train_demo import attend, corpus, descend, initial_weights, learning_rate, optimizer_of

from ragged_attention.demo.torch_model import GQA, device_named, one_thread
from ragged_attention.torch import varlen_attention

Weights = dict[str, torch.Tensor]
Documents = list[torch.Tensor]  # the documents of a step, as bytes
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def batches(paragraphs: list[str], arguments: argparse.Namespace, device: str) -> Iterator[Documents]:
    """The documents of each step, with at least `tokens` bytes in total. The seed determines their order."""
    generator = torch.Generator().manual_seed(arguments.seed)
    documents: Documents = []
    while True:
        for index in torch.randperm(len(paragraphs), generator=generator).tolist():
            encoded = bytearray(paragraphs[index].encode()[: arguments.length + 1])
            documents.append(torch.frombuffer(encoded, dtype=torch.uint8).long().to(device))
            if sum(map(len, documents)) >= arguments.tokens:
                yield documents
                documents = []


class Row(NamedTuple):
    """The documents of one step in one row. All tensors are [T] except the edges [N + 1]."""

    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor  # the position of each token in its own document
    edges: torch.Tensor  # the start of each document, and the end of the row
    longest: int


def row_of(documents: Documents) -> Row:
    lengths = [len(document) - 1 for document in documents]
    tokens, targets = (torch.cat([document[part] for document in documents]) for part in (slice(-1), slice(1, None)))
    positions = torch.cat([torch.arange(length, device=tokens.device) for length in lengths])
    edges = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(tokens.device, torch.int32)
    return Row(tokens, targets, positions, edges, max(lengths))


def row_loss(weights: Weights, row: Row, attend: Attend) -> torch.Tensor:
    """The mean loss in nats per byte on documents in one row. In `attend`, a token must see only its own document."""
    hidden = GQA.forward_by_heads(weights, row.tokens, row.positions, attend)
    return F.cross_entropy(hidden @ weights["embed"].T, row.targets)


def packed_loss(weights: Weights, documents: Documents, backend: str | None = None) -> torch.Tensor:
    """The mean loss in nats per byte on packed documents. No document sees another."""
    row = row_of(documents)

    def attend_packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return varlen_attention(
            q, k, v, row.edges, row.edges, max_q_len=row.longest, max_kv_len=row.longest, causal=True, backend=backend
        )

    return row_loss(weights, row, attend_packed)


def padded_loss(weights: Weights, documents: Documents) -> torch.Tensor:
    """The mean loss in nats per byte on padded rows [N, T], with torch's attention. Padding does not count."""
    tokens = torch.nn.utils.rnn.pad_sequence([document[:-1] for document in documents], batch_first=True)
    targets = torch.nn.utils.rnn.pad_sequence([document[1:] for document in documents], True, padding_value=-100)
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    hidden = GQA.forward_by_heads(weights, tokens, positions, attend)
    return F.cross_entropy((hidden @ weights["embed"].T).flatten(0, 1), targets.flatten())


@dataclasses.dataclass
class Run:
    """One of the two training runs."""

    loss_of: Callable[[Weights, Documents], torch.Tensor]
    weights: Weights
    optimizer: torch.optim.Optimizer
    losses: list[float] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    def step(self, documents: Documents, rate: float) -> None:
        start = time.perf_counter()
        loss = self.loss_of(self.weights, documents)
        descend(self.optimizer, loss, rate)
        self.losses.append(loss.item())
        self.seconds += time.perf_counter() - start


def run_of(loss_of: Callable[[Weights, Documents], torch.Tensor], arguments: argparse.Namespace, device: str) -> Run:
    drawn = initial_weights(torch.Generator().manual_seed(arguments.seed))
    weights = {name: weight.detach().to(device).requires_grad_() for name, weight in drawn.items()}
    return Run(loss_of, weights, optimizer_of(weights, arguments))


def train(paragraphs: list[str], arguments: argparse.Namespace, console: Console) -> dict[str, Run]:
    device = device_named(arguments.device)

    def packed(weights: Weights, documents: Documents) -> torch.Tensor:
        return packed_loss(weights, documents, arguments.backend)

    runs = {"packed": run_of(packed, arguments, device), "padded": run_of(padded_loss, arguments, device)}
    for step, documents in zip(range(arguments.steps), batches(paragraphs, arguments, device), strict=False):
        for run in runs.values():
            run.step(documents, learning_rate(step, arguments))
        if step % 25 == 0 or step == arguments.steps - 1:
            lengths = [len(document) - 1 for document in documents]
            both_losses = "  ".join(f"{name} {run.losses[-1]:.4f}" for name, run in runs.items())
            console.print(
                f"step {step:4}  {both_losses}  ({sum(lengths)} bytes in {len(lengths)} documents)", highlight=False
            )
    return runs


WIDTH, HEIGHT, LEFT, TOP = 640, 360, 56, 44  # the size of the picture, and the origin of its axes
STROKES = (("#9cc4e4", 7), ("#1b3a57", 1.5))  # the first curve is wider, so both are visible where they coincide


def picture(curves: dict[str, list[float]], title: str) -> str:
    """An SVG picture of the losses over the steps."""
    steps, highest = max(map(len, curves.values())), max(map(max, curves.values()))
    right, bottom = WIDTH - 16, HEIGHT - 40

    def x(step: float) -> float:
        return LEFT + (right - LEFT) * step / max(steps - 1, 1)

    def y(loss: float) -> float:
        return bottom - (bottom - TOP) * loss / highest

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12" fill="#222">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="24" font-size="15">{title}</text>',
        f'<text x="{(LEFT + right) / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">step</text>',
    ]
    for loss in range(int(highest) + 1):
        parts.append(f'<path d="M{LEFT} {y(loss):.1f}H{right}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss}</text>')
    for step in range(0, steps, max(steps // 6 // 5 * 5, 1)):
        parts.append(f'<text x="{x(step):.1f}" y="{bottom + 18}" text-anchor="middle">{step}</text>')
    for (name, losses), (color, width), row in zip(curves.items(), STROKES, (0, 1), strict=True):
        points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in enumerate(losses))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="{width}"/>')
        middle = TOP + 16 + 20 * row
        parts.append(f'<path d="M{right - 210} {middle}h28" stroke="{color}" stroke-width="{width}"/>')
        parts.append(f'<text x="{right - 174}" y="{middle + 4}">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--tokens", type=int, default=800, help="minimum number of bytes per step")
    parser.add_argument("--length", type=int, default=384, help="longest document in bytes; longer documents are cut")
    parser.add_argument("--rate", type=float, default=4e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="torch device; default: a GPU if one is available")
    parser.add_argument("--backend", help="backend of varlen_attention; default: chosen for the device")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture of the losses to this file, as SVG")
    arguments = parser.parse_args(argv)
    console = Console()
    with one_thread():
        runs = train(corpus(), arguments, console)
    packed, padded = runs.values()
    largest = max(abs(first - second) for first, second in zip(packed.losses, padded.losses, strict=True))
    console.print(f"largest difference of the losses of a step: {largest:.2g} nats per byte", highlight=False)
    console.print(f"packed {packed.seconds:.1f} s, padded {padded.seconds:.1f} s", highlight=False)
    if arguments.plot:
        curves = {"packed, varlen_attention": packed.losses, "padded, torch's attention": padded.losses}
        arguments.plot.write_text(picture(curves, "Loss of the demo's transformer, nats per byte"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
