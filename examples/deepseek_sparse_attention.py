"""Run a layer like DeepSeek-V3.2's sparse attention: latents in an fp8 cache, and an indexer that selects the top-k.

    python examples/deepseek_sparse_attention.py
    python examples/deepseek_sparse_attention.py --device cuda --backend triton --topk 2048 --prompt 4096

The function `attend` is the layer: it writes the cache, selects keys and attends to them. Two prompts are prefilled in
one step. Then both sequences decode, from the same paged cache. Each selection is checked against logits in float64.
Each output is compared with the layer as the paper defines it: with keys and values for every head, dense attention
under a mask, and no absorbed projections. Weights and hidden states are random. Sizes are small, except those of the
caches. docs/sparse_attention.md explains the operations.
"""

import argparse
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from deepseek_parts import (
    PAGE_SIZE,
    SCALE_BYTES,
    Step,
    check_choice,
    ended,
    expect_close,
    index_keys_in,
    parser_of,
    rms_norm,
    shuffled_pages,
)

from ragged_attention.torch import (
    dequantize_mla_cache,
    indexer_topk,
    mla_decode,
    page_indices_to_slots,
    quantize_indexer_keys,
    sparse_mla_prefill,
    write_indexer_cache,
    write_mla_cache,
)

LATENT, ROTARY, TOKEN_BYTES = 512, 64, 656  # as in the model: the format fp8_v32
HIDDEN, Q_RANK, NUM_HEADS, NOPE, VALUE = 256, 128, 8, 32, 32  # the model: 7168, 1536, 128, 128, 128
INDEX_HEADS, INDEX_DIM = 4, 128  # the model: 64, 128
SM_SCALE = (NOPE + ROTARY) ** -0.5  # from the heads before absorption; the default would be (LATENT + ROTARY) ** -0.5
# Relative to the output's norm. Queries and attended latents are rounded to bfloat16, with an error of 2^-9 each.
LAYER_BOUND = 2**-7
OPERATIONS = (
    "sparse_mla_prefill", "mla_decode", "write_mla_cache", "indexer_topk", "quantize_indexer_keys",
    "write_indexer_cache",
)  # fmt: skip

SHAPES = {
    "q_down": (HIDDEN, Q_RANK), "q_up": (Q_RANK, NUM_HEADS, NOPE + ROTARY),
    "kv_down": (HIDDEN, LATENT + ROTARY), "k_up": (LATENT, NUM_HEADS, NOPE), "v_up": (LATENT, NUM_HEADS, VALUE),
    "out": (NUM_HEADS, VALUE, HIDDEN),
    "index_q": (Q_RANK, INDEX_HEADS, INDEX_DIM), "index_k": (HIDDEN, INDEX_DIM), "index_weight": (HIDDEN, INDEX_HEADS),
}  # fmt: skip


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Apply the rotary embedding to the last dimension of x [T, ..., R], in adjacent pairs; positions are [T]."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** -(torch.arange(half, device=x.device) / half)
    angles = (positions[:, None] * frequencies).view(len(x), *[1] * (x.dim() - 2), half)
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class Layer:
    """The projections around the attention. The methods take T tokens and, where needed, their positions."""

    def __init__(self, generator: torch.Generator, device: torch.device) -> None:
        self.weights = {}
        for name, shape in SHAPES.items():
            fan_in = math.prod(shape[:2]) if name == "out" else shape[0]
            self.weights[name] = (torch.randn(shape, generator=generator) * fan_in**-0.5).to(device)

    def queries(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The queries in float32: the columns without rotation [T, H, NOPE], and the rotated columns [T, H, ROTARY]."""
        low = rms_norm(hidden @ self.weights["q_down"])
        q = torch.einsum("tr,rhd->thd", low, self.weights["q_up"])
        return q[..., :NOPE], rotate(q[..., NOPE:], positions)

    def absorbed_queries(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The queries [T, H, LATENT + ROTARY] in bfloat16, with W_UK absorbed: q . (W_UK c) = (W_UK^T q) . c."""
        nope, rotary = self.queries(hidden, positions)
        absorbed = torch.einsum("thd,lhd->thl", nope, self.weights["k_up"])
        return torch.cat((absorbed, rotary), dim=-1).bfloat16()

    def latents(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The cached rows, bfloat16 [T, LATENT + ROTARY]. A row is the key of all heads, and its latent their value."""
        row = hidden @ self.weights["kv_down"]
        return torch.cat((rms_norm(row[:, :LATENT]), rotate(row[:, LATENT:], positions)), dim=-1).bfloat16()

    def output(self, attended: torch.Tensor) -> torch.Tensor:
        """The output of the layer: W_UV and the output projection, applied to the attended latents [T, H, LATENT]."""
        heads = torch.einsum("thl,lhd->thd", attended.float(), self.weights["v_up"])
        return torch.einsum("thd,hde->te", heads, self.weights["out"])

    def index_keys(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The indexer's keys of tokens [T, INDEX_DIM], not yet quantised."""
        keys = F.layer_norm(hidden @ self.weights["index_k"], (INDEX_DIM,))
        return torch.cat((rotate(keys[:, :ROTARY], positions), keys[:, ROTARY:]), dim=-1)

    def index_queries(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The indexer's queries [T, INDEX_HEADS, INDEX_DIM] in e4m3, and its head weights times the queries' scales."""
        low = rms_norm(hidden @ self.weights["q_down"])
        q = torch.einsum("tr,rhd->thd", low, self.weights["index_q"])
        q = torch.cat((rotate(q[..., :ROTARY], positions), q[..., ROTARY:]), dim=-1)
        values, scales = quantize_indexer_keys(q.flatten(0, 1))
        weights = hidden @ self.weights["index_weight"] * (INDEX_HEADS * INDEX_DIM) ** -0.5
        return values.view(q.shape), weights * scales.view(weights.shape)


class Cache:
    """Two paged caches with one page table: the latents in fp8, and the indexer's keys."""

    def __init__(self, num_seqs: int, max_len: int, generator: torch.Generator, device: torch.device) -> None:
        self.page_indices = shuffled_pages(num_seqs, max_len, generator, device)
        self.latents, self.index_keys = (  # all NaN at first
            torch.full((self.page_indices.numel(), PAGE_SIZE, 1, row), 0xFF, dtype=torch.uint8, device=device)
            for row in (TOKEN_BYTES, INDEX_DIM + SCALE_BYTES)
        )


def attend(layer: Layer, cache: Cache, step: Step, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's output [T, HIDDEN] for the tokens of a step, and the positions [T, topk] to which each attends."""
    hidden, positions = step.hidden, step.positions
    tables: dict[str, Any] = {"page_indices": cache.page_indices, "kv_lens": step.kv_lens, "cu_q_lens": step.cu_q_lens}
    write_mla_cache(layer.latents(hidden, positions), cache.latents, **tables)
    write_indexer_cache(layer.index_keys(hidden, positions), cache.index_keys, **tables)

    index_q, weights = layer.index_queries(hidden, positions)
    chosen = indexer_topk(index_q, cache.index_keys, weights, topk, **tables)
    slots = page_indices_to_slots(chosen, cache.page_indices, PAGE_SIZE, cu_q_lens=step.cu_q_lens)

    q = layer.absorbed_queries(hidden, positions)
    if len(q) == len(step.kv_lens):  # one token of each sequence
        out = mla_decode(q[:, None], cache.latents, indices=slots[:, None], sm_scale=SM_SCALE, d_v=LATENT)[0][:, 0]
    else:
        out, _, _ = sparse_mla_prefill(q, cache.latents, slots[:, None], sm_scale=SM_SCALE, d_v=LATENT)
    return layer.output(out), chosen


def check(layer: Layer, cache: Cache, step: Step, out: torch.Tensor, chosen: torch.Tensor) -> float:
    """The largest error of a sequence's output relative to its norm. Raises AssertionError if a check fails."""
    weights = {name: weight.cpu().double() for name, weight in layer.weights.items()}
    errors = []
    for seq, length in enumerate(step.kv_lens.tolist()):
        in_seq, pages = step.seqs == seq, cache.page_indices[seq]
        hidden, positions, listed = step.hidden[in_seq], step.positions[in_seq], chosen[in_seq].cpu()
        index_keys = index_keys_in(cache.index_keys[pages])[:length]
        check_choice(*layer.index_queries(hidden, positions), index_keys, positions + 1, listed)

        rows = dequantize_mla_cache(cache.latents[pages], dtype=torch.float32).flatten(0, 2)[:length].cpu().double()
        nope, rotary = (part.cpu().double() for part in layer.queries(hidden, positions))
        keys = torch.einsum("kl,lhd->khd", rows[:, :LATENT], weights["k_up"])
        values = torch.einsum("kl,lhd->khd", rows[:, :LATENT], weights["v_up"])
        logits = torch.einsum("thd,khd->thk", nope, keys) + torch.einsum("thd,kd->thk", rotary, rows[:, LATENT:])
        seen = (listed[..., None] == torch.arange(length)).any(1)[:, None]
        probabilities = (logits * SM_SCALE).masked_fill(~seen, -torch.inf).softmax(-1)
        want = torch.einsum("thk,khd,hde->te", probabilities, values, weights["out"])
        errors.append(expect_close(out[in_seq], want, LAYER_BOUND))
    return max(errors)


def run(arguments: argparse.Namespace) -> None:
    """Prefill, then decode. Print the number of keys per token and the error of each step."""
    device, generator = torch.device(arguments.device), torch.Generator().manual_seed(arguments.seed)
    lens = [arguments.prompt, -(-arguments.prompt * 2 // 3)]
    layer = Layer(generator, device)
    cache = Cache(len(lens), max(lens) + arguments.new_tokens, generator, device)
    starts, counts = [0] * len(lens), lens
    for number in range(1 + arguments.new_tokens):
        step = Step(starts, counts, HIDDEN, generator, device)
        out, chosen = attend(layer, cache, step, arguments.topk)
        error, listed = check(layer, cache, step, out, chosen), (chosen >= 0).sum(1)
        what = f"decode step {number}" if number else f"prefill of {' and '.join(map(str, lens))} tokens"
        print(f"{what}: {listed.min()} to {listed.max()} keys per token, error {error:.1e} of the output's norm")
        starts, counts = step.kv_lens.tolist(), [1] * len(lens)


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, 96, 4, "attention, indexer and cache writes")
    parser.add_argument("--topk", type=int, default=32, help="positions that each token attends to")
    return ended(run, parser.parse_args(argv), OPERATIONS)


if __name__ == "__main__":
    raise SystemExit(main())
