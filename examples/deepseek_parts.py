"""Helpers that the two examples of DeepSeek's layers share: batches, page tables, the indexer's cache, and checks."""

import argparse
import sys
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

import ragged_attention as ra
from ragged_attention.testing.compare import chosen_agree

PAGE_SIZE = 64  # tokens per page
SCALE_BYTES = 4  # the float32 scale of one indexer key


def rms_norm(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:])


class Step:
    """T new tokens, packed one sequence after another: sequence s has counts[s] tokens from position starts[s] on."""

    def __init__(
        self, starts: Sequence[int], counts: Sequence[int], width: int, generator: torch.Generator, device: torch.device
    ) -> None:
        number = torch.tensor(counts, dtype=torch.int32, device=device)
        self.seqs = torch.arange(len(counts), device=device).repeat_interleave(number, output_size=sum(counts))
        self.cu_q_lens = F.pad(number.cumsum(0, dtype=torch.int32), (1, 0))
        self.kv_lens = torch.tensor(starts, dtype=torch.int32, device=device) + number
        offsets = self.kv_lens - self.cu_q_lens[1:]  # a token's position minus its index in the batch, per sequence
        self.positions = torch.arange(sum(counts), device=device) + offsets[self.seqs]
        self.hidden = torch.randn(sum(counts), width, generator=generator).to(device)


def shuffled_pages(num_seqs: int, max_len: int, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    """A random page table, i32 [S, M], in which no two sequences share a page."""
    pages_per_seq = -(-max_len // PAGE_SIZE)
    shuffled = torch.randperm(num_seqs * pages_per_seq, generator=generator, dtype=torch.int32)
    return shuffled.view(num_seqs, pages_per_seq).to(device)


def index_keys_in(pages: torch.Tensor) -> torch.Tensor:
    """The dequantised keys in some pages of the indexer's cache, float64 on the CPU. Scales follow a page's values."""
    size, head_dim = pages.shape[1], pages.shape[3] - SCALE_BYTES
    values, scales = pages.flatten(1).cpu().split((size * head_dim, size * SCALE_BYTES), dim=1)
    keys = values.view(torch.float8_e4m3fn).double().view(-1, head_dim)
    return keys * scales.contiguous().view(torch.float32).double().view(-1, 1)


def check_choice(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor, chosen: torch.Tensor
) -> None:
    """Raise AssertionError unless `chosen` [T, topk] lists the keys with the largest logits, except for rounding.

    The T tokens have queries [T, H, D] and head weights [T, H]. Token t sees the first seen[t] of the keys [L, D],
    which are float64.
    """
    q, weights = q.cpu().double(), weights.cpu().double()
    future = torch.arange(len(keys)) >= seen.cpu()[:, None]
    products = torch.einsum("thd,ld->thl", q, keys).relu()
    logits = torch.einsum("thl,th->tl", products, weights).masked_fill(future, -torch.inf)
    # The logits if no terms cancelled: rounding errors are bounded by a fraction of these sums.
    magnitudes = torch.einsum("thd,ld,th->tl", q.abs(), keys.abs(), weights.abs())
    chosen_agree(chosen.cpu(), logits, magnitudes, chosen.shape[1])


def expect_close(got: torch.Tensor, want: torch.Tensor, bound: float) -> float:
    """The error of a layer's output relative to the expected norm. Raises AssertionError if it exceeds the bound."""
    error = float((got.cpu() - want).norm() / want.norm())
    if not error <= bound:
        raise AssertionError(f"expected the layer's output within {bound:g} of its norm, got {error:g}")
    return error


def parser_of(doc: str | None, prompt: int, new_tokens: int, parts: str) -> argparse.ArgumentParser:
    """A parser of the arguments that both examples have. `parts` says what the requested backend computes."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--prompt", type=int, default=prompt, help="tokens of the longer prompt")
    parser.add_argument("--new-tokens", type=int, default=new_tokens, help="decode steps after the prompts")
    parser.add_argument("--backend", default="auto", help=f"backend of {parts}")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def ended(run: Callable[[argparse.Namespace], None], arguments: argparse.Namespace, operations: Sequence[str]) -> int:
    """The exit status of a run with the requested backend for the operations: 1 if a check fails, and 0 otherwise."""
    backend: str = arguments.backend
    try:
        with ra.use_backend(dict.fromkeys(operations, backend)):
            run(arguments)
    except AssertionError as error:
        print(error, file=sys.stderr)
        return 1
    return 0
