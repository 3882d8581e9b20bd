"""Train a layer with DeepSeek's sparse attention: first dense, then the indexer alone, then both with selected keys.

    python examples/train_deepseek.py

This takes about half a minute on one core. A sequence lists pairs of a key and a value, then asks for the value of each
key. One layer of latent attention can learn this task. There are three stages, as in DeepSeek-V3.2's report:

1. Dense: the layer attends to all earlier tokens and is trained with the loss of the answers.
2. Warm-up: the layer is frozen. The indexer learns to predict the share of attention that each token gets.
3. Sparse: each query attends to the few tokens that the indexer selects. Both the layer and the indexer are trained,
   and the indexer's loss covers only the selected tokens.

In the first step of each stage, all gradients are compared with those that torch's autograd computes in float64 from
the formulas.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console

from ragged_attention.demo.torch_model import device_named, one_thread
from ragged_attention.torch import attention_target, indexer_logits, indexer_topk, sparse_mla_prefill

WIDTH, HEADS, LATENT = 64, 4, 64  # the width of the residual stream, the heads and latent width of attention
INDEX_HEADS, INDEX_WIDTH = 4, 32
SYMBOLS = 64  # the number of different keys, and of different values
BOUND = 1e-4  # relative to a gradient's largest entry: sums are in float32
Weights = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Batch:
    """Sequences of the same length, packed one after the other."""

    tokens: torch.Tensor  # [T]
    previous: torch.Tensor  # [T], the token before each token
    answers: torch.Tensor  # [T], the value to predict; -100 if the token is not a question
    starts: torch.Tensor  # i32 [T], the first key that each query sees
    stops: torch.Tensor  # i32 [T], one past the last key that each query sees

    def ranges(self) -> dict[str, Any]:
        """The arguments that give the range of keys that each query sees."""
        return {"starts": self.starts, "stops": self.stops}

    def all_earlier(self, length: int) -> torch.Tensor:
        """Lists i32 [T, length] of all keys that each query sees, padded with -1."""
        keys = self.starts[:, None] + torch.arange(length, dtype=torch.int32, device=self.tokens.device)
        return torch.where(keys < self.stops[:, None], keys, -1)


def batch_of(arguments: argparse.Namespace, generator: torch.Generator, device: str) -> Batch:
    """Random pairs, then questions for their values in another order. Each answer follows its question."""
    shape = (arguments.sequences, SYMBOLS)
    keys, order = (torch.rand(shape, generator=generator).argsort(1)[:, : arguments.pairs] for _ in range(2))
    order = torch.rand(keys.shape, generator=generator).argsort(1)
    values = torch.randint(SYMBOLS, keys.shape, generator=generator)
    pairs = torch.stack([keys, SYMBOLS + values], 2)
    questions = pairs.gather(1, order[..., None].expand_as(pairs))
    answers = torch.stack([questions[..., 1] - SYMBOLS, torch.full_like(order, -100)], 2)
    tokens = torch.cat([pairs, questions], 1).flatten(1)
    answers = torch.cat([torch.full_like(pairs, -100), answers], 1).flatten(1)
    length = tokens.shape[1]
    indices = torch.arange(tokens.numel())
    starts = indices - indices % length
    previous = F.pad(tokens[:, :-1], (1, 0), value=2 * SYMBOLS)
    parts = (tokens.flatten(), previous.flatten(), answers.flatten(), starts.int(), (indices + 1).int())
    return Batch(*(part.to(device) for part in parts))


def initial_weights(generator: torch.Generator) -> Weights:
    shapes = {
        "embedding": (2 * SYMBOLS, WIDTH), "before": (2 * SYMBOLS + 1, WIDTH), "queries": (WIDTH, HEADS * LATENT),
        "latents": (WIDTH, LATENT), "output": (HEADS * LATENT, WIDTH), "unembedding": (WIDTH, SYMBOLS),
        "index_queries": (WIDTH, INDEX_HEADS * INDEX_WIDTH), "index_keys": (WIDTH, INDEX_WIDTH),
        "index_weights": (WIDTH, INDEX_HEADS),
    }  # fmt: skip
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    one_hot = ("embedding", "before")  # their inputs are one-hot, so they are not scaled by the size of their inputs
    return {name: weight if name in one_hot else weight / len(weight) ** 0.5 for name, weight in drawn.items()}


OF_INDEXER = ("index_queries", "index_keys", "index_weights")


def projected(weights: Weights, batch: Batch) -> tuple[torch.Tensor, ...]:
    """The queries [T, H, D] and latents [T, 1, D] of attention, and the indexer's queries, keys and head weights.

    The indexer's inputs are detached, so its loss trains only the indexer.
    """
    x = weights["embedding"][batch.tokens] + weights["before"][batch.previous]
    q = (x @ weights["queries"]).unflatten(1, (HEADS, LATENT))
    latents = (x @ weights["latents"])[:, None]
    index_q, index_keys, index_weights = (x.detach() @ weights[name] for name in OF_INDEXER)
    return q, latents, index_q.unflatten(1, (INDEX_HEADS, INDEX_WIDTH)), index_keys, index_weights


def loss_of_answers(weights: Weights, batch: Batch, out: torch.Tensor) -> torch.Tensor:
    logits = out.flatten(1) @ weights["output"] @ weights["unembedding"]
    return F.cross_entropy(logits, batch.answers)


def divergence(target: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """The KL divergence from a target to the softmax of scores, averaged over tokens. Scores without a key are -inf."""
    log_shares = scores.log_softmax(-1).masked_fill(scores == -torch.inf, 0)  # the target of a missing key is 0
    return F.kl_div(log_shares, target, reduction="sum") / len(target)


# ---- the stages


def dense_loss(weights: Weights, batch: Batch, arguments: argparse.Namespace) -> torch.Tensor:
    q, latents, *_ = projected(weights, batch)
    lists = batch.all_earlier(arguments.length)[:, None]
    out, _, _ = sparse_mla_prefill(q, latents, lists, d_v=LATENT, backend=arguments.backend)
    return loss_of_answers(weights, batch, out)


def warm_up_loss(weights: Weights, batch: Batch, arguments: argparse.Namespace) -> torch.Tensor:
    q, latents, *indexer = projected(weights, batch)
    q, latents = q.detach(), latents.detach()
    lists = batch.all_earlier(arguments.length)[:, None]
    _, _, lse = sparse_mla_prefill(q, latents, lists, d_v=LATENT, backend=arguments.backend)
    target = attention_target(q, latents, lse, **batch.ranges(), backend=arguments.backend)
    return divergence(target, indexer_logits(*indexer, **batch.ranges(), backend=arguments.backend))


def selected(weights: Weights, batch: Batch, arguments: argparse.Namespace) -> torch.Tensor:
    """Lists i32 [T, top_k] of the keys that the indexer selects."""
    q, keys, head_weights = (part.detach() for part in projected(weights, batch)[2:])
    return indexer_topk(q, keys, head_weights, arguments.top_k, **batch.ranges(), backend=arguments.backend)


def sparse_loss(weights: Weights, batch: Batch, arguments: argparse.Namespace) -> torch.Tensor:
    q, latents, *indexer = projected(weights, batch)
    lists = selected(weights, batch, arguments)
    out, _, lse = sparse_mla_prefill(q, latents, lists[:, None], d_v=LATENT, backend=arguments.backend)
    target = attention_target(q, latents, lse, lists, backend=arguments.backend)
    scores = indexer_logits(*indexer, indices=lists, backend=arguments.backend)
    return loss_of_answers(weights, batch, out) + divergence(target, scores)


STAGES: dict[str, Callable[[Weights, Batch, argparse.Namespace], torch.Tensor]] = {
    "dense": dense_loss, "warm-up": warm_up_loss, "sparse": sparse_loss
}  # fmt: skip


def by_formulas(stage: str, weights: Weights, batch: Batch, arguments: argparse.Namespace) -> torch.Tensor:
    """The loss of a stage, computed from the formulas with all queries and keys, in the dtype of the weights.

    Only the selection of keys comes from the tested operations. A selection by formulas might differ from it, because
    rounding changes the order of almost equal scores.
    """
    q, latents, index_q, index_keys, index_weights = projected(weights, batch)
    indices = torch.arange(len(batch.tokens), device=q.device)
    seen = (indices >= batch.starts[:, None]) & (indices < batch.stops[:, None])
    if stage == "sparse":
        single = {name: weight.detach().float() for name, weight in weights.items()}
        seen = (selected(single, batch, arguments)[..., None] == indices).any(1)
    logits = torch.einsum("thd,sd->ths", q, latents[:, 0]) * LATENT**-0.5
    shares = logits.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    answers = loss_of_answers(weights, batch, shares @ latents[:, 0])
    products = torch.einsum("thd,sd->ths", index_q, index_keys).relu()
    scores = torch.einsum("ths,th->ts", products, index_weights).masked_fill(~seen, -torch.inf)
    match = divergence(shares.detach().mean(1), scores)
    return {"dense": answers, "warm-up": match, "sparse": answers + match}[stage]


def largest_difference(stage: str, weights: Weights, batch: Batch, arguments: argparse.Namespace) -> float:
    """The largest difference of a gradient from the float64 gradient, relative to that gradient's largest entry."""
    learning = [name for name in weights if (name in OF_INDEXER) >= (stage == "warm-up")]
    if stage == "dense":
        learning = [name for name in learning if name not in OF_INDEXER]
    gradients = torch.autograd.grad(STAGES[stage](weights, batch, arguments), [weights[name] for name in learning])
    wide = {name: weight.detach().double().requires_grad_() for name, weight in weights.items()}
    expected = torch.autograd.grad(by_formulas(stage, wide, batch, arguments), [wide[name] for name in learning])
    pairs = zip(gradients, expected, strict=True)
    return max(float((got - want).abs().max() / want.abs().max()) for got, want in pairs)


@torch.no_grad()
def attention_share(weights: Weights, batch: Batch, arguments: argparse.Namespace) -> float:
    """The share of dense attention that goes to the selected keys, averaged over the questions."""
    q, latents, *_ = projected(weights, batch)
    _, _, lse = sparse_mla_prefill(q, latents, batch.all_earlier(arguments.length)[:, None], d_v=LATENT)
    target = attention_target(q, latents, lse, **batch.ranges())
    lists = selected(weights, batch, arguments)
    shares = target.gather(1, lists.long().clamp(min=0)).masked_fill(lists < 0, 0).sum(1)
    return float(shares[batch.answers >= 0].mean())


@torch.no_grad()
def part_right(weights: Weights, batch: Batch, arguments: argparse.Namespace) -> float:
    """The share of the questions that the layer answers correctly with the selected keys."""
    q, latents, *_ = projected(weights, batch)
    lists = selected(weights, batch, arguments)
    out, _, _ = sparse_mla_prefill(q, latents, lists[:, None], d_v=LATENT, backend=arguments.backend)
    best = (out.flatten(1) @ weights["output"] @ weights["unembedding"]).argmax(1)
    return float((best == batch.answers)[batch.answers >= 0].float().mean())


def train(
    stage: str, weights: Weights, batches: Iterator[Batch], arguments: argparse.Namespace, console: Console
) -> tuple[float, float, float]:
    """Run a stage. Return the largest difference of a gradient in its first step, its first loss and its last loss."""
    steps = {"dense": arguments.dense, "warm-up": arguments.warm_up, "sparse": arguments.sparse}[stage]
    learning = [weight for name, weight in weights.items() if stage != "warm-up" or name in OF_INDEXER]
    optimizer, losses = torch.optim.Adam(learning, lr=arguments.rate), []
    difference = largest_difference(stage, weights, next(batches), arguments)
    start = time.perf_counter()
    for _ in range(steps):
        loss = STAGES[stage](weights, next(batches), arguments)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    seconds, last = time.perf_counter() - start, sum(losses[-5:]) / len(losses[-5:])
    console.print(
        f"{stage:7}  loss {losses[0]:.3f} to {last:.3f} in {steps} steps and {seconds:.1f} s; "
        f"largest relative difference of a gradient: {difference:.1g}", highlight=False,
    )  # fmt: skip
    return difference, losses[0], last


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if gradients equal those of the formulas, losses fall and the warm-up improves the selection; else 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dense", type=int, default=150, help="steps of the dense stage")
    parser.add_argument("--warm-up", type=int, default=300, help="steps that train the indexer alone")
    parser.add_argument("--sparse", type=int, default=200, help="steps of the sparse stage")
    parser.add_argument("--sequences", type=int, default=16, help="sequences per step")
    parser.add_argument("--pairs", type=int, default=24, help="pairs per sequence, and also questions per sequence")
    parser.add_argument("--top-k", type=int, default=8, help="keys that the indexer selects per query")
    parser.add_argument("--rate", type=float, default=5e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="torch device; default: a GPU if one is available")
    parser.add_argument("--backend", help="backend of all operations; default: chosen for the device")
    arguments = parser.parse_args(argv)
    arguments.length = 4 * arguments.pairs
    console, device = Console(), device_named(arguments.device)
    generator = torch.Generator().manual_seed(arguments.seed)
    weights = {name: weight.to(device).requires_grad_() for name, weight in initial_weights(generator).items()}
    batches = (batch_of(arguments, generator, device) for _ in iter(int, 1))
    with one_thread():
        results = [train("dense", weights, batches, arguments, console)]
        before = attention_share(weights, next(batches), arguments)
        results.append(train("warm-up", weights, batches, arguments, console))
        after = attention_share(weights, next(batches), arguments)
        results.append(train("sparse", weights, batches, arguments, console))
    right = part_right(weights, next(batches), arguments)
    console.print(
        f"for a question, the indexer selects {arguments.top_k} of up to {arguments.length} keys; they get "
        f"{before:.0%} of the attention before the warm-up and {after:.0%} after it; at the end, {right:.0%} of the "
        f"answers are right", highlight=False,
    )  # fmt: skip
    fell = all(last < 0.8 * first for _, first, last in results)
    return int(max(difference for difference, _, _ in results) > BOUND or not fell or after < before)


if __name__ == "__main__":
    raise SystemExit(main())
