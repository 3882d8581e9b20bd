"""Compare the gradients of rollouts that are packed as a prefix tree with those of the same rollouts without sharing.

    python examples/train_tree.py

This takes a few seconds on one core. In reinforcement learning, a model is trained on many answers to one prompt, and
dialogues share their turns up to the point where they differ. In a prefix tree, each shared token is computed only
once. `tree_ranges` lists the ancestors of each token. With these lists, a token sees only its ancestors and itself in
`varlen_attention`. In the loss, a shared token counts once for each rollout that contains it, so the loss and the
gradients equal those of the rollouts without sharing.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from train_demo import corpus, initial_weights

from ragged_attention.demo.torch_model import GQA, device_named, one_thread
from ragged_attention.key_ranges import tree_ranges
from ragged_attention.torch import varlen_attention

Weights = dict[str, torch.Tensor]
Rollouts = list[tuple[int, ...]]


class Tree(NamedTuple):
    """Rollouts as a prefix tree whose tokens are packed depth first. Every field is a tensor [T]."""

    tokens: torch.Tensor
    parents: torch.Tensor  # the packed position of a token's parent, -1 for a root
    depths: torch.Tensor  # a token's position in the rollouts that contain it
    counts: torch.Tensor  # the number of rollouts that contain a token


def tree_of(rollouts: Rollouts) -> Tree:
    """The prefix tree of rollouts. Sorting puts them in depth-first order."""
    rows: list[tuple[int, int, int]] = []
    counts: list[int] = []
    path: list[int] = []  # the packed positions of the previous rollout's tokens
    previous: tuple[int, ...] = ()
    for rollout in sorted(rollouts):
        pairs = enumerate(zip(previous, rollout, strict=False))
        shared = next((index for index, (old, new) in pairs if old != new), len(previous))
        path = path[:shared]
        for place in path:
            counts[place] += 1
        for token in rollout[shared:]:
            rows.append((token, path[-1] if path else -1, len(path)))
            counts.append(1)
            path.append(len(rows) - 1)
        previous = rollout
    tokens, parents, depths = (torch.tensor(column) for column in zip(*rows, strict=True))
    return Tree(tokens, parents.to(torch.int32), depths, torch.tensor(counts))


def tree_loss(weights: Weights, rollouts: Rollouts, backend: str | None = None) -> torch.Tensor:
    """The loss of all rollouts in nats. Each token of the tree is computed once and predicted from its parent."""
    tree = tree_of(rollouts)
    edges, ranges = torch.tensor([0, len(tree.tokens)], dtype=torch.int32), tree_ranges(tree.parents)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return varlen_attention(q, k, v, edges.to(q.device), edges.to(q.device), key_ranges=ranges, backend=backend)

    device = weights["embed"].device
    tokens, ranges = tree.tokens.to(device), ranges.to(device)
    hidden = GQA.forward_by_heads(weights, tokens, tree.depths.to(device), attend)
    predicted = tree.parents >= 0
    logits = hidden[tree.parents[predicted].to(device)] @ weights["embed"].T
    nats = F.cross_entropy(logits, tokens[predicted.to(device)], reduction="none")
    return (nats * tree.counts[predicted].to(device)).sum()


def unshared_loss(weights: Weights, rollouts: Rollouts, backend: str | None = None) -> torch.Tensor:
    """The same loss without sharing: rollouts are packed one after another, each with its own copy of shared tokens."""
    device = weights["embed"].device
    lengths = [len(rollout) for rollout in rollouts]
    tokens = torch.cat([torch.tensor(rollout, device=device) for rollout in rollouts])
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    edges = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(device, torch.int32)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return varlen_attention(q, k, v, edges, edges, causal=True, backend=backend)

    hidden = GQA.forward_by_heads(weights, tokens, positions, attend)
    later = positions[1:] > 0  # the first token of a rollout is not predicted
    logits = hidden[:-1][later] @ weights["embed"].T
    return F.cross_entropy(logits, tokens[1:][later], reduction="sum")


class Step(NamedTuple):
    """A loss, its gradients, the seconds that computing them took, and the bytes saved for the backward pass."""

    loss: float
    gradients: Weights
    seconds: float
    kept: int


def step(loss_of: Callable[..., torch.Tensor], weights: Weights, rollouts: Rollouts, backend: str | None) -> Step:
    saved: dict[int, int] = {}  # the size of each saved storage by its address
    for weight in weights.values():
        weight.grad = None

    def save(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    start = time.perf_counter()
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        loss = loss_of(weights, rollouts, backend)
    loss.backward()
    seconds = time.perf_counter() - start
    gradients = {name: weight.grad.clone() for name, weight in weights.items() if weight.grad is not None}
    return Step(loss.item(), gradients, seconds, sum(saved.values()))


def rollouts_of(text: bytes, prompt: int, turns: int, answers: int, length: int) -> Rollouts:
    """Dialogues that share a prompt of `prompt` bytes, with `turns` different turns and `answers` answers per turn."""

    def pieces() -> Iterator[bytes]:
        for start in range(prompt, len(text) - length, length):
            yield text[start : start + length]

    piece = pieces()
    return [
        tuple(text[:prompt] + turn + next(piece))
        for turn in (next(piece) for _ in range(turns))
        for _ in range(answers)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prompt", type=int, default=512, help="bytes that all rollouts share")
    parser.add_argument("--turns", type=int, default=2, help="number of different turns that follow the prompt")
    parser.add_argument("--answers", type=int, default=8, help="number of rollouts per turn")
    parser.add_argument("--length", type=int, default=64, help="bytes per turn and per answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="torch device; default: a GPU if one is available")
    parser.add_argument("--backend", help="backend of varlen_attention; default: chosen for the device")
    arguments = parser.parse_args(argv)
    drawn = initial_weights(torch.Generator().manual_seed(arguments.seed))
    device = device_named(arguments.device)
    weights = {name: weight.detach().to(device).requires_grad_() for name, weight in drawn.items()}
    text = " ".join(corpus()).encode()
    rollouts = rollouts_of(text, arguments.prompt, arguments.turns, arguments.answers, arguments.length)
    with one_thread():
        for loss_of in (tree_loss, unshared_loss):  # the first call compiles kernels
            step(loss_of, weights, rollouts, arguments.backend)
        tree, unshared = (step(loss_of, weights, rollouts, arguments.backend) for loss_of in (tree_loss, unshared_loss))
    show(Console(), rollouts, tree, unshared)
    return 0


def show(console: Console, rollouts: Rollouts, tree: Step, unshared: Step) -> None:
    counts = {"as a tree": len(tree_of(rollouts).tokens), "without sharing": sum(map(len, rollouts))}
    table = Table("", "tokens", "loss", "seconds", "MB saved for backward", title=f"{len(rollouts)} rollouts")
    for (name, count), result in zip(counts.items(), (tree, unshared), strict=True):
        table.add_row(name, str(count), f"{result.loss:.3f}", f"{result.seconds:.2f}", f"{result.kept / 1e6:.1f}")
    console.print(table)
    largest = max(relative_difference(tree.gradients[name], gradient) for name, gradient in unshared.gradients.items())
    console.print(f"largest relative difference of a gradient: {largest:.1g}", highlight=False)


def relative_difference(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value - expected).abs().max() / expected.abs().max())


if __name__ == "__main__":
    raise SystemExit(main())
