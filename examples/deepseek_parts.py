"""What the examples in the shapes of DeepSeek's layers share: steps of a batch, the indexer's pages and its check."""

import argparse
import sys
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

import ragged_attention as ra
from ragged_attention.testing.compare import chosen_agree

PAGE_SIZE = 64  # tokens
SCALE_BYTES = 4  # of a key of the indexer, float32


def rms_norm(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:])


class Step:
    """Some new tokens of every sequence, those of one sequence after those of another: T in all."""

    def __init__(
        self, starts: Sequence[int], counts: Sequence[int], width: int, generator: torch.Generator, device: torch.device
    ) -> None:
        number = torch.tensor(counts, dtype=torch.int32, device=device)
        self.seqs = torch.arange(len(counts), device=device).repeat_interleave(number, output_size=sum(counts))
        self.cu_q_lens = F.pad(number.cumsum(0, dtype=torch.int32), (1, 0))
        self.kv_lens = torch.tensor(starts, dtype=torch.int32, device=device) + number
        first = self.kv_lens - self.cu_q_lens[1:]  # of a sequence's tokens: what its place in the batch lacks
        self.positions = torch.arange(sum(counts), device=device) + first[self.seqs]
        self.hidden = torch.randn(sum(counts), width, generator=generator).to(device)


def shuffled_pages(num_seqs: int, max_len: int, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    """A page table [S, M] of sequences that share no page, i32."""
    pages_per_seq = -(-max_len // PAGE_SIZE)
    shuffled = torch.randperm(num_seqs * pages_per_seq, generator=generator, dtype=torch.int32)
    return shuffled.view(num_seqs, pages_per_seq).to(device)


def index_keys_in(pages: torch.Tensor) -> torch.Tensor:
    """The dequantised keys in some pages of the indexer's, float64 on the CPU: a page holds its values, then scales."""
    size, head_dim = pages.shape[1], pages.shape[3] - SCALE_BYTES
    values, scales = pages.flatten(1).cpu().split((size * head_dim, size * SCALE_BYTES), dim=1)
    keys = values.view(torch.float8_e4m3fn).double().view(-1, head_dim)
    return keys * scales.contiguous().view(torch.float32).double().view(-1, 1)


def check_choice(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor, chosen: torch.Tensor
) -> None:
    """No key may be left out whose logit is above a chosen one's by more than rounding.

    T tokens with queries [T, H, D] and weights [T, H] see the first `seen` [T] of the keys [L, D], float64.
    """
    q, weights = q.cpu().double(), weights.cpu().double()
    future = torch.arange(len(keys)) >= seen.cpu()[:, None]
    products = torch.einsum("thd,ld->thl", q, keys).relu()
    logits = torch.einsum("thl,th->tl", products, weights).masked_fill(future, -torch.inf)
    # What they would be if nothing cancelled: rounding is a part of that.
    magnitudes = torch.einsum("thd,ld,th->tl", q.abs(), keys.abs(), weights.abs())
    chosen_agree(chosen.cpu(), logits, magnitudes, chosen.shape[1])


def expect_close(got: torch.Tensor, want: torch.Tensor, bound: float) -> float:
    """The error of a layer's output as a part of its norm; raises AssertionError if it is beyond the bound."""
    error = float((got.cpu() - want).norm() / want.norm())
    if not error <= bound:
        raise AssertionError(f"expected the layer's output within {bound:g} of its norm, got {error:g}")
    return error


def parser_of(doc: str | None, prompt: int, new_tokens: int, what: str) -> argparse.ArgumentParser:
    """The arguments that the examples have in common."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--prompt", type=int, default=prompt, help="tokens of the longer prompt")
    parser.add_argument("--new-tokens", type=int, default=new_tokens, help="tokens decoded after it")
    parser.add_argument("--backend", default="auto", help=f"of {what}")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def ended(run: Callable[[argparse.Namespace], None], arguments: argparse.Namespace, operations: Sequence[str]) -> int:
    """The exit status of a run whose operations have the backend that was asked for."""
    backend: str = arguments.backend
    try:
        with ra.use_backend(dict.fromkeys(operations, backend)):
            run(arguments)
    except AssertionError as error:
        print(error, file=sys.stderr)
        return 1
    return 0
