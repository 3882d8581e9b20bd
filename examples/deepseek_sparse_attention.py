"""One attention layer in the shape of DeepSeek-V3.2: latents in an fp8 cache, of which an indexer picks the top-k.

    python examples/deepseek_sparse_attention.py
    python examples/deepseek_sparse_attention.py --device cuda --backend triton --topk 2048 --prompt 4096

Two prompts are prefilled in one call straight from the quantised paged cache, then both sequences go on token by token
from the same cache. The indexer's keys are e4m3 in pages of their own, which share the page table of the latents. Every
choice is judged by logits in float64 on the same quantised numbers, every result compared with dense attention under a
mask, over the dequantised cache, in float64. Weights and hidden states are random, for it is the layer alone; sizes are
small but for those of the caches. docs/sparse_attention.md explains the operations.
"""

import argparse
import math
from collections.abc import Sequence
from typing import NamedTuple

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

from ragged_attention.testing import agrees
from ragged_attention.torch import (
    dequantize_mla_cache,
    indexer_topk,
    make_decode_schedule,
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
SM_SCALE = (NOPE + ROTARY) ** -0.5  # of the heads as they are before W_UK is absorbed
LAYER_BOUND = 2**-7  # of the layer's output in norm: bfloat16 queries and latent outputs err by 2^-9 each
OPERATIONS = (
    "sparse_mla_prefill", "mla_decode", "make_decode_schedule", "write_mla_cache", "indexer_topk",
    "quantize_indexer_keys", "write_indexer_cache",
)  # fmt: skip

SHAPES = {
    "q_down": (HIDDEN, Q_RANK), "q_up": (Q_RANK, NUM_HEADS, NOPE + ROTARY),
    "kv_down": (HIDDEN, LATENT + ROTARY), "k_up": (LATENT, NUM_HEADS, NOPE), "v_up": (LATENT, NUM_HEADS, VALUE),
    "out": (NUM_HEADS, VALUE, HIDDEN),
    "index_q": (Q_RANK, INDEX_HEADS, INDEX_DIM), "index_k": (HIDDEN, INDEX_DIM), "index_weight": (HIDDEN, INDEX_HEADS),
}  # fmt: skip


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of the last dimension, in pairs of neighbours; x is [T, ..., R], positions [T]."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** -(torch.arange(half, device=x.device) / half)
    angles = (positions[:, None] * frequencies).view(len(x), *[1] * (x.dim() - 2), half)
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class Layer:
    """The projections around the attention; T tokens at a time, each at its position."""

    def __init__(self, generator: torch.Generator, device: torch.device) -> None:
        self.weights = {}
        for name, shape in SHAPES.items():
            fan_in = math.prod(shape[:2]) if name == "out" else shape[0]
            self.weights[name] = (torch.randn(shape, generator=generator) * fan_in**-0.5).to(device)

    def queries(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The heads' queries, float32: [T, H, NOPE] and, rotated, [T, H, ROTARY]."""
        low = rms_norm(hidden @ self.weights["q_down"])
        q = torch.einsum("tr,rhd->thd", low, self.weights["q_up"])
        return q[..., :NOPE], rotate(q[..., NOPE:], positions)

    def absorbed_queries(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """q . (W_UK c) = (W_UK^T q) . c, so W_UK goes into the queries: [T, H, LATENT + ROTARY] bfloat16."""
        nope, rotary = self.queries(hidden, positions)
        absorbed = torch.einsum("thd,lhd->thl", nope, self.weights["k_up"])
        return torch.cat((absorbed, rotary), dim=-1).bfloat16()

    def latents(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What is cached of a token: [T, LATENT + ROTARY] bfloat16, key and value of all heads."""
        row = hidden @ self.weights["kv_down"]
        return torch.cat((rms_norm(row[:, :LATENT]), rotate(row[:, LATENT:], positions)), dim=-1).bfloat16()

    def output(self, attended: torch.Tensor) -> torch.Tensor:
        """W_UV and the output projection, on the attention's mixtures of latents [T, H, LATENT]."""
        heads = torch.einsum("thl,lhd->thd", attended.float(), self.weights["v_up"])
        return torch.einsum("thd,hde->te", heads, self.weights["out"])

    def index_keys(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What the indexer caches of a token: [T, INDEX_DIM]."""
        keys = F.layer_norm(hidden @ self.weights["index_k"], (INDEX_DIM,))
        return torch.cat((rotate(keys[:, :ROTARY], positions), keys[:, ROTARY:]), dim=-1)

    def index_queries(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The indexer's queries [T, INDEX_HEADS, INDEX_DIM] in e4m3, and the weights of its heads with their scales."""
        low = rms_norm(hidden @ self.weights["q_down"])
        q = torch.einsum("tr,rhd->thd", low, self.weights["index_q"])
        q = torch.cat((rotate(q[..., :ROTARY], positions), q[..., ROTARY:]), dim=-1)
        values, scales = quantize_indexer_keys(q.flatten(0, 1))
        weights = hidden @ self.weights["index_weight"] * (INDEX_HEADS * INDEX_DIM) ** -0.5
        return values.view(q.shape), weights * scales.view(weights.shape)


class Cache:
    """The paged caches of all sequences: latents in fp8, and in pages of the same numbers the keys of the indexer."""

    def __init__(self, num_seqs: int, max_len: int, generator: torch.Generator, device: torch.device) -> None:
        self.page_indices = shuffled_pages(num_seqs, max_len, generator, device)
        self.pages, self.index_pages = (  # NaN until they are written
            torch.full((self.page_indices.numel(), PAGE_SIZE, 1, row), 0xFF, dtype=torch.uint8, device=device)
            for row in (TOKEN_BYTES, INDEX_DIM + SCALE_BYTES)
        )

    def slots(self, seqs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Slots of positions [T, ...], token t's in its sequence seqs[t]; -1 for -1."""
        return page_indices_to_slots(positions.int(), self.page_indices[seqs], PAGE_SIZE)

    def rows(self, seq: int, length: int) -> torch.Tensor:
        """The dequantised latents of a sequence, float64 on the CPU."""
        rows = dequantize_mla_cache(self.pages[self.page_indices[seq]], dtype=torch.float32)
        return rows.flatten(0, 2)[:length].cpu().double()

    def index_keys(self, seq: int, length: int) -> torch.Tensor:
        """The dequantised keys of the indexer, float64 on the CPU."""
        return index_keys_in(self.index_pages[self.page_indices[seq]])[:length]


class Chosen(NamedTuple):
    """What T tokens attend with, and to what."""

    q: torch.Tensor  # of the attention
    index_q: torch.Tensor
    index_weights: torch.Tensor
    positions: torch.Tensor  # [T, topk], ascending, then -1
    slots: torch.Tensor  # the same in the cache


def prepare(layer: Layer, cache: Cache, step: Step, topk: int) -> Chosen:
    """Caches the step's tokens, and chooses what each of them attends to."""
    hidden, positions = step.hidden, step.positions
    slots = cache.slots(step.seqs, positions[:, None])[:, 0]
    write_mla_cache(layer.latents(hidden, positions), cache.pages, slots)
    write_indexer_cache(layer.index_keys(hidden, positions), cache.index_pages, slots)
    index_q, weights = layer.index_queries(hidden, positions)
    selected = indexer_topk(
        index_q, cache.index_pages, weights, topk,
        page_indices=cache.page_indices, kv_lens=step.kv_lens, cu_q_lens=step.cu_q_lens,
    )  # fmt: skip
    q = layer.absorbed_queries(hidden, positions)
    return Chosen(q, index_q, weights, selected, cache.slots(step.seqs, selected))


class Check:
    """Judges choices, compares with dense attention under a mask, and remembers the largest errors."""

    def __init__(self, layer: Layer, cache: Cache) -> None:
        self.layer, self.cache = layer, cache
        self.out = self.lse = self.layer_error = 0.0
        self.selected: list[int] = []

    def __call__(self, kind: str, step: Step, chosen: Chosen, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Results of T tokens: out [T, H, LATENT], lse [T, H]. Raises AssertionError where they are off."""
        for seq, length in enumerate(step.kv_lens.tolist()):
            own = step.seqs == seq
            hidden, positions, wanted = step.hidden[own], step.positions[own], chosen.positions[own].cpu()
            keys = self.cache.index_keys(seq, length)
            check_choice(chosen.index_q[own], chosen.index_weights[own], keys, positions + 1, wanted)
            rows = self.cache.rows(seq, length)
            mask = torch.zeros(len(wanted), length + 1, dtype=torch.bool)  # a column more for -1
            mask = mask.scatter(1, wanted.long().remainder(length + 1), True)[:, None, :-1]
            logits = torch.einsum("thd,ld->thl", chosen.q[own].cpu().double(), rows) * SM_SCALE
            logits = logits.masked_fill(~mask, -torch.inf)
            want = logits.softmax(-1) @ rows[:, :LATENT]
            got, got_lse, want_lse = out[own].cpu().double(), lse[own].cpu().double(), logits.logsumexp(-1)
            agrees(got, want, f"{kind} out", f"out of sequence {seq}")
            agrees(got_lse, want_lse, f"{kind} lse", f"lse of sequence {seq}")
            self.out = max(self.out, float((got - want).abs().max()))
            self.lse = max(self.lse, float((got_lse - want_lse).abs().max()))
            self._check_layer(self.layer.output(out[own]), hidden, positions, rows, mask)
            self.selected += mask.sum(-1).flatten().tolist()

    def _check_layer(
        self, got: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor
    ) -> None:
        """The layer as it is written in the paper: keys and values of every head, nothing absorbed."""
        weights = {name: weight.cpu().double() for name, weight in self.layer.weights.items()}
        nope, rotary = (part.cpu().double() for part in self.layer.queries(hidden, positions))
        keys = torch.einsum("kl,lhd->khd", rows[:, :LATENT], weights["k_up"])
        values = torch.einsum("kl,lhd->khd", rows[:, :LATENT], weights["v_up"])
        logits = torch.einsum("thd,khd->thk", nope, keys) + torch.einsum("thd,kd->thk", rotary, rows[:, LATENT:])
        probabilities = (logits * SM_SCALE).masked_fill(~mask, -torch.inf).softmax(-1)
        want = torch.einsum("thk,khd,hde->te", probabilities, values, weights["out"])
        self.layer_error = max(self.layer_error, expect_close(got, want, LAYER_BOUND))

    def __str__(self) -> str:
        few, many = min(self.selected), max(self.selected)
        return (
            f"keys per token: {few if few == many else f'{few} to {many}'}; "
            f"largest error: out {self.out:.1e}, lse {self.lse:.1e}, layer {self.layer_error:.1e} of its norm"
        )


def run(arguments: argparse.Namespace) -> None:
    """Prefill, then decode; prints what was checked."""
    device, generator = torch.device(arguments.device), torch.Generator().manual_seed(arguments.seed)
    lens = [arguments.prompt, -(-arguments.prompt * 2 // 3)]
    num_seqs, topk = len(lens), arguments.topk
    layer = Layer(generator, device)
    cache = Cache(num_seqs, max(lens) + arguments.new_tokens, generator, device)

    step = Step([0] * num_seqs, lens, HIDDEN, generator, device)
    chosen = prepare(layer, cache, step, topk)
    out, _, lse = sparse_mla_prefill(chosen.q, cache.pages, chosen.slots[:, None], sm_scale=SM_SCALE, d_v=LATENT)
    check = Check(layer, cache)
    check("prefill", step, chosen, out, lse)
    print(f"prefill of {sum(lens)} tokens in {num_seqs} sequences; {check}")

    check = Check(layer, cache)
    # It serves every step and every layer.
    schedule = make_decode_schedule(None, num_seqs, 1, NUM_HEADS, topk=topk, device=device)
    for number in range(arguments.new_tokens):
        step = Step([length + number for length in lens], [1] * num_seqs, HIDDEN, generator, device)
        chosen = prepare(layer, cache, step, topk)
        out, lse = mla_decode(
            chosen.q[:, None], cache.pages, indices=chosen.slots[:, None], sm_scale=SM_SCALE, d_v=LATENT,
            schedule=schedule,
        )  # fmt: skip
        check("decode", step, chosen, out[:, 0], lse[:, :, 0])
    print(f"decode of {arguments.new_tokens} tokens in {num_seqs} sequences; {check}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, 96, 8, "attention, indexer, schedule and writing")
    parser.add_argument("--topk", type=int, default=32, help="positions that each token attends to")
    return ended(run, parser.parse_args(argv), OPERATIONS)


if __name__ == "__main__":
    raise SystemExit(main())
