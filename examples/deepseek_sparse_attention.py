"""One attention layer in the shape of DeepSeek-V3.2: latents in an fp8 cache, of which an indexer picks the top-k.

    python examples/deepseek_sparse_attention.py
    python examples/deepseek_sparse_attention.py --device cuda --backend triton --topk 2048 --prompt 4096

Two prompts are prefilled in one call straight from the quantised paged cache, then both sequences go on token by token
from the same cache. Every result is compared with dense attention under a mask, over the dequantised cache, in
float64. Weights and hidden states are random, for it is the layer alone; sizes are small but for those of the cache.
"""

import argparse
import math
import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F

import ragged_attention as ra
from ragged_attention.testing import agrees
from ragged_attention.torch import (
    dequantize_mla_cache,
    make_decode_schedule,
    mla_decode,
    page_indices_to_slots,
    sparse_mla_prefill,
    write_mla_cache,
)

LATENT, ROTARY, TOKEN_BYTES, PAGE_SIZE = 512, 64, 656, 64  # as in the model: the format fp8_v32
HIDDEN, Q_RANK, NUM_HEADS, NOPE, VALUE = 256, 128, 8, 32, 32  # the model: 7168, 1536, 128, 128, 128
INDEX_HEADS, INDEX_DIM = 4, 128  # the model: 64, 128
SM_SCALE = (NOPE + ROTARY) ** -0.5  # of the heads as they are before W_UK is absorbed
LAYER_BOUND = 2**-7  # of the layer's output in norm: bfloat16 queries and latent outputs err by 2^-9 each

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


def rms_norm(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:])


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

    def index_scores(self, hidden: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """How much each token wants each position of its sequence [T, L]; keys are [T, L, INDEX_DIM]."""
        low = rms_norm(hidden @ self.weights["q_down"])
        q = torch.einsum("tr,rhd->thd", low, self.weights["index_q"])
        q = torch.cat((rotate(q[..., :ROTARY], positions), q[..., ROTARY:]), dim=-1)
        products = torch.einsum("thd,tld->thl", q, keys).relu() * INDEX_DIM**-0.5
        scores = torch.einsum("thl,th->tl", products, hidden @ self.weights["index_weight"])
        future = torch.arange(keys.shape[1], device=keys.device) > positions[:, None]
        return scores.masked_fill(future, -torch.inf)


class Cache:
    """The paged fp8 cache of all sequences, and the indexer's keys, which are kept apart."""

    def __init__(self, num_seqs: int, max_len: int, generator: torch.Generator, device: torch.device) -> None:
        pages_per_seq = -(-max_len // PAGE_SIZE)
        num_pages = num_seqs * pages_per_seq
        shuffled = torch.randperm(num_pages, generator=generator, dtype=torch.int32)
        self.page_indices = shuffled.view(num_seqs, pages_per_seq).to(device)
        shape = (num_pages, PAGE_SIZE, 1, TOKEN_BYTES)
        self.pages = torch.full(shape, 0xFF, dtype=torch.uint8, device=device)  # NaN until it is written
        self.index_keys = torch.zeros(num_seqs, pages_per_seq * PAGE_SIZE, INDEX_DIM, device=device)

    def slots(self, seqs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Slots of positions [T, ...], token t's in its sequence seqs[t]; -1 for -1."""
        return page_indices_to_slots(positions.int(), self.page_indices[seqs], PAGE_SIZE)

    def rows(self, seq: int, length: int) -> torch.Tensor:
        """The dequantised rows of a sequence, float64 on the CPU."""
        rows = dequantize_mla_cache(self.pages[self.page_indices[seq]], dtype=torch.float32)
        return rows.flatten(0, 2)[:length].cpu().double()


def prepare(
    layer: Layer, cache: Cache, hidden: torch.Tensor, seqs: torch.Tensor, positions: torch.Tensor, topk: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Caches T tokens, which may be of any sequences; returns queries, selected positions and their slots [T, topk]."""
    slots = cache.slots(seqs, positions[:, None])[:, 0]
    write_mla_cache(layer.latents(hidden, positions), cache.pages, slots)
    cache.index_keys[seqs, positions] = layer.index_keys(hidden, positions)
    longest = int(positions.max()) + 1
    scores = layer.index_scores(hidden, positions, cache.index_keys[seqs, :longest])
    scores = F.pad(scores, (0, max(topk - longest, 0)), value=-torch.inf)
    best, selected = scores.topk(topk, dim=-1)
    selected = selected.masked_fill(best == -torch.inf, -1)
    return layer.absorbed_queries(hidden, positions), selected, cache.slots(seqs, selected)


class Check:
    """Compares with dense attention under a mask, and remembers the largest errors."""

    def __init__(self, layer: Layer, cache: Cache) -> None:
        self.layer, self.cache = layer, cache
        self.out = self.lse = self.layer_error = 0.0
        self.selected: list[int] = []

    def __call__(
        self, kind: str, hidden: torch.Tensor, seqs: torch.Tensor, positions: torch.Tensor, q: torch.Tensor,
        selected: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    ) -> None:  # fmt: skip
        """Results of T tokens: out [T, H, LATENT], lse [T, H]. Raises AssertionError where they are off."""
        for seq in seqs.unique().tolist():
            own = seqs == seq
            rows = self.cache.rows(seq, int(positions[own].max()) + 1)
            wanted = selected[own].cpu()
            mask = torch.zeros(len(wanted), len(rows) + 1, dtype=torch.bool)  # a column more for -1
            mask = mask.scatter(1, wanted.remainder(len(rows) + 1), True)[:, None, :-1]
            logits = torch.einsum("thd,ld->thl", q[own].cpu().double(), rows) * SM_SCALE
            logits = logits.masked_fill(~mask, -torch.inf)
            want = logits.softmax(-1) @ rows[:, :LATENT]
            got, got_lse, want_lse = out[own].cpu().double(), lse[own].cpu().double(), logits.logsumexp(-1)
            agrees(got, want, f"{kind} out", f"out of sequence {seq}")
            agrees(got_lse, want_lse, f"{kind} lse", f"lse of sequence {seq}")
            self.out = max(self.out, float((got - want).abs().max()))
            self.lse = max(self.lse, float((got_lse - want_lse).abs().max()))
            self._check_layer(self.layer.output(out[own]), hidden[own], positions[own], rows, mask)
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
        error = float((got.cpu() - want).norm() / want.norm())
        if not error <= LAYER_BOUND:
            raise AssertionError(f"expected the layer's output within {LAYER_BOUND:g} of its norm, got {error:g}")
        self.layer_error = max(self.layer_error, error)

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

    hidden = torch.randn(sum(lens), HIDDEN, generator=generator).to(device)
    seqs = torch.arange(num_seqs).repeat_interleave(torch.tensor(lens)).to(device)
    positions = torch.cat([torch.arange(length) for length in lens]).to(device)
    q, selected, slots = prepare(layer, cache, hidden, seqs, positions, topk)
    out, _, lse = sparse_mla_prefill(q, cache.pages, slots[:, None], sm_scale=SM_SCALE, d_v=LATENT)
    check = Check(layer, cache)
    check("prefill", hidden, seqs, positions, q, selected, out, lse)
    print(f"prefill of {len(hidden)} tokens in {num_seqs} sequences; {check}")

    check, seqs = Check(layer, cache), torch.arange(num_seqs, device=device)
    # It serves every step and every layer.
    schedule = make_decode_schedule(None, num_seqs, 1, NUM_HEADS, topk=topk, device=device)
    for step in range(arguments.new_tokens):
        hidden = torch.randn(num_seqs, HIDDEN, generator=generator).to(device)
        positions = torch.tensor(lens, device=device) + step
        q, selected, slots = prepare(layer, cache, hidden, seqs, positions, topk)
        out, lse = mla_decode(
            q[:, None], cache.pages, indices=slots[:, None], sm_scale=SM_SCALE, d_v=LATENT, schedule=schedule
        )
        check("decode", hidden, seqs, positions, q, selected, out[:, 0], lse[:, :, 0])
    print(f"decode of {arguments.new_tokens} tokens in {num_seqs} sequences; {check}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--topk", type=int, default=32, help="positions that each token attends to")
    parser.add_argument("--prompt", type=int, default=96, help="tokens of the longer prompt")
    parser.add_argument("--new-tokens", type=int, default=8, help="tokens decoded after it")
    parser.add_argument("--backend", default="auto", help="of the attention, the schedule and the cache's writing")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    operations = ("sparse_mla_prefill", "mla_decode", "make_decode_schedule", "write_mla_cache")
    try:
        with ra.use_backend(dict.fromkeys(operations, arguments.backend)):
            run(arguments)
    except AssertionError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
