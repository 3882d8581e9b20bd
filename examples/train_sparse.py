"""Train the demo's transformer with sparse attention: each query sees only the blocks of keys that it selects.

    python examples/train_sparse.py

This takes about ten seconds on one core. Documents are packed one after another. In every layer and for each KV head,
`select_blocks` scores the blocks of keys in a query's document, and selects the best ones. `varlen_attention` then
computes attention with the selected blocks. A selection has no gradient, so it is made from detached queries and keys;
the loss falls nevertheless. The gradients of the first step are compared with those of torch's own attention under a
dense mask of the same blocks.
"""

import argparse
import statistics
import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from rich.console import Console
from train_demo import corpus, descend, initial_weights, optimizer_of
from train_packed import Attend, Row, Weights, batches, row_loss, row_of

from ragged_attention.demo.torch_model import device_named, one_thread
from ragged_attention.torch import select_blocks, varlen_attention

BOUND = 1e-4  # relative to a gradient's largest entry: float32 sums differ in their order
FALL = 0.8  # the largest allowed ratio of the mean loss of the last steps to that of the first steps
STEPS = 5  # the number of first steps, and of last steps, over which the loss is averaged


def starts_of(row: Row) -> torch.Tensor:
    """The position in the row at which each token's document begins."""
    return torch.arange(len(row.tokens), device=row.tokens.device) - row.positions


def selected_blocks(q: torch.Tensor, k: torch.Tensor, row: Row, arguments: argparse.Namespace) -> torch.Tensor:
    """The blocks i32 [T, K, N] that each query selects in its document for each KV head, including its own block.

    The query heads of a KV head share one selection, which is made with the mean of their queries.
    """
    mean_q = q.detach().unflatten(1, (k.shape[1], -1)).mean(2)
    starts = starts_of(row)
    return select_blocks(
        mean_q, k.detach(), arguments.blocks, block_size=arguments.block_size, starts=starts.int(),
        stops=(starts + row.positions + 1).int(), max_keys=row.longest, local_blocks=1, backend=arguments.backend,
    )  # fmt: skip


def sparse_attention(row: Row, arguments: argparse.Namespace, history: list[torch.Tensor] | None = None) -> Attend:
    """Attention with the blocks that queries select. Each layer's lists are appended to `history`."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        lists = selected_blocks(q, k, row, arguments)
        if history is not None:
            history.append(lists)
        return varlen_attention(
            q, k, v, row.edges, row.edges, max_q_len=row.longest, max_kv_len=row.longest, causal=True, selected=lists,
            block_size=arguments.block_size, backend=arguments.backend,
        )  # fmt: skip

    return attend


def masked_attention(row: Row, arguments: argparse.Namespace, lists: list[torch.Tensor]) -> Attend:
    """The same attention computed by torch. It reads every key, and masks the blocks that a layer's lists do not have.

    It gets the lists of `sparse_attention`. If it made its own lists, rounding might change the order of two blocks
    with almost equal scores, and so the selection.
    """
    layers, starts = iter(lists), starts_of(row)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        named = (next(layers)[..., None] == row.positions // arguments.block_size).any(2)  # [T, K, T]
        causal = (starts[:, None] == starts) & (row.positions[:, None] >= row.positions)
        mask = (named & causal[:, None]).repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(0, 1)
        q, k, v = (heads.transpose(0, 1)[None] for heads in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None], enable_gqa=True)[0].transpose(0, 1)

    return attend


def largest_difference(weights: Weights, row: Row, arguments: argparse.Namespace) -> float:
    """The largest difference between gradients of sparse and masked attention, relative to their largest entries."""
    lists: list[torch.Tensor] = []
    gradients = gradients_of(row_loss(weights, row, sparse_attention(row, arguments, lists)), weights)
    expected = gradients_of(row_loss(weights, row, masked_attention(row, arguments, lists)), weights)
    pairs = zip(gradients, expected, strict=True)
    return max(float((got - want).abs().max() / want.abs().max()) for got, want in pairs)


def gradients_of(loss: torch.Tensor, weights: Weights) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(loss, tuple(weights.values()))


def train(weights: Weights, steps: Sequence[Row], arguments: argparse.Namespace, console: Console) -> list[float]:
    """Run one training step for each row, and return the losses of all steps."""
    optimizer, losses = optimizer_of(weights, arguments), []
    for step, row in enumerate(steps):
        loss = row_loss(weights, row, sparse_attention(row, arguments))
        descend(optimizer, loss, arguments.rate)
        losses.append(loss.item())
        if step % 10 == 0 or step == len(steps) - 1:
            console.print(f"step {step:4}  {losses[-1]:.4f} nats per byte", highlight=False)
    return losses


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if the gradients equal those under the dense mask and the loss falls, and 1 otherwise."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=800, help="minimum number of bytes per step")
    parser.add_argument("--length", type=int, default=384, help="longest document in bytes; longer documents are cut")
    parser.add_argument("--block-size", type=int, default=16, help="keys per block")
    parser.add_argument("--blocks", type=int, default=4, help="blocks that a query sees, including its own")
    parser.add_argument("--rate", type=float, default=2e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="torch device; default: a GPU if one is available")
    parser.add_argument("--backend", help="backend of block selection and attention; default: chosen for the device")
    arguments = parser.parse_args(argv)
    console, device = Console(), device_named(arguments.device)
    drawn = initial_weights(torch.Generator().manual_seed(arguments.seed))
    weights = {name: weight.detach().to(device).requires_grad_() for name, weight in drawn.items()}
    documents = batches(corpus(), arguments, device)
    steps = [row_of(next(documents)) for _ in range(arguments.steps)]
    with one_thread():
        difference = largest_difference(weights, steps[0], arguments)
        console.print(f"largest relative difference of a gradient: {difference:.1g}", highlight=False)
        start = time.perf_counter()
        losses = train(weights, steps, arguments, console)
        seconds = time.perf_counter() - start
    first, last = statistics.mean(losses[:STEPS]), statistics.mean(losses[-STEPS:])
    seen = arguments.blocks * arguments.block_size
    console.print(
        f"from {first:.2f} to {last:.2f} nats per byte in {len(losses)} steps and {seconds:.1f} s, with at most {seen} "
        f"of up to {arguments.length} keys per query", highlight=False,
    )  # fmt: skip
    return int(difference > BOUND or last > FALL * first)


if __name__ == "__main__":
    raise SystemExit(main())
