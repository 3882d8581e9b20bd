"""Run a layer like DeepSeek-V4's compressed sparse attention: near tokens are uncompressed, far ones compressed.

    python examples/deepseek_v4_attention.py
    python examples/deepseek_v4_attention.py --device cuda --backend triton --heads 64 --window 128 --topk 128 \\
        --prompt 1024

Each token attends to the last tokens of its sequence and to the top-k compressed rows, in one softmax with an attention
sink. A compressed row stands for 4 tokens. Uncompressed rows and compressed rows are in two fp8 caches. An indexer
selects the compressed rows. It has its own compressed keys, which are in a third cache in e4m3. One call of
`mla_decode` reads both fp8 caches. Prefill uses the same call as decode steps, because each token has its own lists.
The three caches share one page table: a page has 64 tokens in the first cache, and 16 compressed rows or keys in the
other two caches.

Every selection is checked against logits in float64, computed from the same quantised values. Every attention output is
compared with dense attention under a mask, in float64 over the dequantised caches. The layer's output is compared with
the layer in float64 without a cache. Weights and hidden states are random. docs/sparse_attention.md explains the
operations.
"""

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import torch
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

from ragged_attention.testing.compare import agrees
from ragged_attention.torch import (
    dequantize_mla_cache,
    indexer_topk,
    mla_decode,
    page_indices_to_slots,
    quantize_indexer_keys,
    write_indexer_cache,
    write_mla_cache,
)

ROW, ROTARY, ROW_BYTES = 512, 64, 584  # as in the model: the format fp8_v4, with the rotary columns last
RATIO = 4  # tokens per compressed row
HIDDEN, Q_RANK = 256, 128  # the model: 4096, 1024
INDEX_HEADS, INDEX_DIM = 4, 128  # the model: 64, 128
SM_SCALE = ROW**-0.5
# The weight of the rows' RMSNorm, which a model would learn. The queries' RMSNorm has the weight 1 / GAIN, so GAIN does
# not change the logits. Kernel tests scale rows by the same factor.
GAIN = 0.1
# Relative to the output's norm. Rounding to e4m3 has a relative error of at most 2^-4, and of 2^-5.3 on average.
LAYER_BOUND = 2**-4

OPERATIONS = ("mla_decode", "write_mla_cache", "indexer_topk", "quantize_indexer_keys", "write_indexer_cache")


def shapes(num_heads: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights. A product sums over a weight's first axis; with `out`, over its first two axes."""
    return {
        "q_down": (HIDDEN, Q_RANK), "q_up": (Q_RANK, num_heads, ROW), "kv": (HIDDEN, ROW),
        "row_kv": (HIDDEN, 2, ROW), "row_gate": (HIDDEN, 2, ROW), "row_bias": (1, 2, RATIO, ROW),
        "key_kv": (HIDDEN, 2, INDEX_DIM), "key_gate": (HIDDEN, 2, INDEX_DIM), "key_bias": (1, 2, RATIO, INDEX_DIM),
        "index_q": (Q_RANK, INDEX_HEADS, INDEX_DIM), "index_weight": (HIDDEN, INDEX_HEADS),
        "sinks": (1, num_heads), "out": (num_heads, ROW, HIDDEN),
    }  # fmt: skip


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Apply the rotary embedding to the last ROTARY columns of x [T, ..., D], in adjacent pairs; positions are [T]."""
    half = ROTARY // 2
    frequencies = 10000.0 ** -(torch.arange(half, device=x.device, dtype=x.dtype) / half)
    angles = (positions[:, None] * frequencies).view(len(x), *[1] * (x.dim() - 2), half)
    unrotated, even, odd = x[..., :-ROTARY], x[..., -ROTARY::2], x[..., 1 - ROTARY :: 2]
    cos, sin = angles.cos(), angles.sin()
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((unrotated, rotated), dim=-1)


def recent_tokens(hidden: torch.Tensor, seqs: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The hidden states [N, 2, RATIO, HIDDEN] of N groups of tokens: first of the preceding group, then of the group.

    A sequence's first group, which has the index 0, has no preceding group and gets arbitrary states for it. `hidden`
    [S, L, HIDDEN] are the states of all tokens. `seqs` [N] are the sequences of the groups, and `numbers` [N] are the
    groups' indices in these sequences.
    """
    positions = numbers[:, None] * RATIO + torch.arange(-RATIO, RATIO, device=numbers.device)
    return hidden[seqs[:, None], positions.clamp(min=0)].unflatten(1, (2, RATIO))


class Layer:
    """The projections around the attention. Most methods take T tokens and their positions."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights

    @classmethod
    def random(cls, num_heads: int, generator: torch.Generator, device: torch.device) -> "Layer":
        weights = {}
        for name, shape in shapes(num_heads).items():
            fan_in = num_heads * ROW if name == "out" else shape[0]
            weights[name] = (torch.randn(shape, generator=generator) * fan_in**-0.5).to(device)
        return cls(weights)

    def double(self) -> "Layer":
        """A copy of the layer in float64 on the CPU."""
        return Layer({name: weight.cpu().double() for name, weight in self.weights.items()})

    @property
    def sinks(self) -> torch.Tensor:
        return self.weights["sinks"][0]

    def queries(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The queries of the attention [T, H, ROW]."""
        low = rms_norm(hidden @ self.weights["q_down"])
        return rotate(rms_norm(torch.einsum("tr,rhd->thd", low, self.weights["q_up"])) / GAIN, positions)

    def rows(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The cached rows [T, ROW] of tokens; a row is the key and the value of all heads."""
        return rotate(GAIN * rms_norm(hidden @ self.weights["kv"]), positions)

    def compressed(self, name: str, recent: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """The compressed rows of N groups of RATIO tokens, or with the name "key" the indexer's compressed keys.

        A row is a mean over its group and the preceding group, weighted in each column by gates. `recent`
        [N, 2, RATIO, HIDDEN] has the hidden states of the preceding group and of the group. `numbers` [N] are the
        groups' indices in their sequences; group 0 has no preceding group. A row has the position of its group's first
        token.
        """
        values = torch.einsum("npth,hpd->nptd", recent, self.weights[f"{name}_kv"])
        gates = torch.einsum("npth,hpd->nptd", recent, self.weights[f"{name}_gate"]) + self.weights[f"{name}_bias"]
        is_preceding = torch.tensor([True, False], device=numbers.device)
        gates = gates.masked_fill(((numbers == 0)[:, None] & is_preceding)[:, :, None, None], -torch.inf)
        rows = (gates.flatten(1, 2).softmax(1) * values.flatten(1, 2)).sum(1)
        return rotate(GAIN * rms_norm(rows), numbers * RATIO)

    def index_queries(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The indexer's queries [T, INDEX_HEADS, INDEX_DIM] in e4m3, and its head weights times the queries' scales."""
        low = rms_norm(hidden @ self.weights["q_down"])
        q = rotate(torch.einsum("tr,rhd->thd", low, self.weights["index_q"]), positions)
        values, scales = quantize_indexer_keys(q.flatten(0, 1))
        weights = hidden @ self.weights["index_weight"] * (INDEX_HEADS * INDEX_DIM) ** -0.5
        return values.view(q.shape), weights * scales.view(weights.shape)

    def output(self, attended: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The output of the layer, from the result of attention [T, H, ROW].

        The cached rows, which are also the values, have rotated columns. Here, the result is rotated by the negative
        positions of the queries, so that the contribution of a row depends only on its distance from the query.
        """
        return torch.einsum("thd,hde->te", rotate(attended, -positions), self.weights["out"])


class Cache:
    """Three paged caches with one page table: rows of tokens, compressed rows, and the indexer's compressed keys."""

    def __init__(self, num_seqs: int, max_len: int, generator: torch.Generator, device: torch.device) -> None:
        self.page_indices = shuffled_pages(num_seqs, max_len, generator, device)
        num_pages, pages_per_seq = self.page_indices.numel(), self.page_indices.shape[1]
        kinds = ((PAGE_SIZE, ROW_BYTES), (PAGE_SIZE // RATIO, ROW_BYTES), (PAGE_SIZE // RATIO, INDEX_DIM + SCALE_BYTES))
        self.near, self.far, self.keys = (  # all NaN at first
            torch.full((num_pages, size, 1, row), 0xFF, dtype=torch.uint8, device=device) for size, row in kinds
        )
        # An engine would keep only the last RATIO to 2 * RATIO tokens, from which the next compressed row is made.
        self.hidden = torch.zeros(num_seqs, pages_per_seq * PAGE_SIZE, HIDDEN, device=device)

    def slots(self, seqs: torch.Tensor, positions: torch.Tensor, page_size: int) -> torch.Tensor:
        """The slots of positions [T, ...] in the sequences `seqs` [T]; -1 for a negative position."""
        return page_indices_to_slots(positions.int(), self.page_indices[seqs], page_size)

    def write(self, layer: Layer, step: Step) -> None:
        """Write the rows of T tokens, and the compressed rows of the groups that they complete."""
        self.hidden[step.seqs, step.positions] = step.hidden
        slots = self.slots(step.seqs, step.positions[:, None], PAGE_SIZE)[:, 0]
        write_mla_cache(layer.rows(step.hidden, step.positions).bfloat16(), self.near, slots)
        last = step.positions % RATIO == RATIO - 1
        seqs, numbers = step.seqs[last], step.positions[last] // RATIO
        recent = recent_tokens(self.hidden, seqs, numbers)
        slots = self.slots(seqs, numbers[:, None], PAGE_SIZE // RATIO)[:, 0]
        write_mla_cache(layer.compressed("row", recent, numbers).bfloat16(), self.far, slots)
        write_indexer_cache(layer.compressed("key", recent, numbers), self.keys, slots)

    def rows(self, pages: torch.Tensor, seq: int, length: int) -> torch.Tensor:
        """The dequantised rows of a sequence, float64 on the CPU."""
        rows = dequantize_mla_cache(pages[self.page_indices[seq]], dtype=torch.float32)
        return rows.flatten(0, 2)[:length].cpu().double()

    def index_keys(self, seq: int, length: int) -> torch.Tensor:
        """The dequantised keys of the indexer, float64 on the CPU."""
        return index_keys_in(self.keys[self.page_indices[seq]])[:length]


class Chosen(NamedTuple):
    """The queries of T tokens, and the rows to which they attend."""

    q: torch.Tensor  # queries of the attention
    index_q: torch.Tensor
    index_weights: torch.Tensor
    near: torch.Tensor  # slots of tokens [T, window], -1 for no token
    # The chosen compressed rows [T, topk], as indices in their sequence, ascending, padded with -1.
    numbers: torch.Tensor
    far: torch.Tensor  # the slots of these compressed rows


def choose(layer: Layer, cache: Cache, step: Step, window: int, topk: int) -> Chosen:
    """Each token's queries and lists: the last tokens of its sequence, and the indexer's top-k compressed rows."""
    index_q, weights = layer.index_queries(step.hidden, step.positions)
    numbers = indexer_topk(
        index_q, cache.keys, weights, topk,
        page_indices=cache.page_indices, kv_lens=step.kv_lens, cu_q_lens=step.cu_q_lens, ratio=RATIO,
    )  # fmt: skip
    last = step.positions[:, None] - torch.arange(window, device=step.positions.device)
    near = cache.slots(step.seqs, last, PAGE_SIZE)
    far = cache.slots(step.seqs, numbers, PAGE_SIZE // RATIO)
    return Chosen(layer.queries(step.hidden, step.positions).bfloat16(), index_q, weights, near, numbers, far)


def attend(layer: Layer, cache: Cache, chosen: Chosen) -> tuple[torch.Tensor, torch.Tensor]:
    """The out [T, H, ROW] and lse [T, H]. All tokens are one batch entry, because each token has its own lists."""
    out, lse = mla_decode(
        chosen.q[None], cache.near, indices=chosen.near[None], extra_kv_cache=cache.far,
        extra_indices=chosen.far[None], sinks=layer.sinks, sm_scale=SM_SCALE, d_v=ROW,
    )  # fmt: skip
    return out[0], lse[0].T


def dense(
    q: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of queries [T, H, ROW] to rows [L, ROW] under a mask [T, L]. The lse does not include the sinks."""
    logits = (torch.einsum("thd,ld->thl", q, rows) * SM_SCALE).masked_fill(~mask[:, None], -torch.inf)
    sink = sinks[:, None].expand(*logits.shape[:2], 1)
    return torch.cat((logits, sink), -1).softmax(-1)[..., :-1] @ rows, logits.logsumexp(-1)


class Check:
    """Checks selections against logits in float64 and results against dense attention; keeps the largest errors."""

    def __init__(self, layer: Layer, cache: Cache, window: int) -> None:
        self.layer, self.exact, self.cache, self.window = layer, layer.double(), cache, window
        self.out = self.lse = self.layer_error = 0.0
        self.selected: list[int] = []

    def __call__(self, step: Step, chosen: Chosen, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Check the out [T, H, ROW] and lse [T, H] of T tokens, and raise AssertionError if they are wrong."""
        for seq, length in enumerate(step.kv_lens.tolist()):
            in_seq = step.seqs == seq
            positions, numbers = step.positions[in_seq].cpu(), chosen.numbers[in_seq].cpu()
            keys = self.cache.index_keys(seq, length // RATIO)
            check_choice(chosen.index_q[in_seq], chosen.index_weights[in_seq], keys, (positions + 1) // RATIO, numbers)
            mask = self._mask(positions, numbers, length)
            near, far = (
                self.cache.rows(self.cache.near, seq, length),
                self.cache.rows(self.cache.far, seq, length // RATIO),
            )
            sinks = self.exact.sinks
            want, want_lse = dense(chosen.q[in_seq].cpu().double(), torch.cat((near, far)), mask, sinks)
            got, got_lse = out[in_seq].cpu().double(), lse[in_seq].cpu().double()
            agrees(got, want, "decode out", f"out of sequence {seq}")
            agrees(got_lse, want_lse, "decode lse", f"lse of sequence {seq}")
            self.out = max(self.out, float((got - want).abs().max()))
            self.lse = max(self.lse, float((got_lse - want_lse).abs().max()))
            result = self.layer.output(out[in_seq].float(), step.positions[in_seq])
            self._check_layer(result, self.cache.hidden[seq, :length].cpu().double(), positions, mask)
            self.selected += (numbers >= 0).sum(-1).tolist()

    def _mask(self, positions: torch.Tensor, numbers: torch.Tensor, length: int) -> torch.Tensor:
        """The mask [T, length + length // RATIO] of each query: its visible tokens, and then its compressed rows."""
        distance = positions[:, None] - torch.arange(length)
        far = torch.zeros(len(numbers), length // RATIO + 1, dtype=torch.bool)  # one more column, for -1
        far = far.scatter(1, numbers.long().remainder(far.shape[1]), True)[:, :-1]
        return torch.cat(((distance >= 0) & (distance < self.window), far), 1)

    def _check_layer(
        self, got: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor
    ) -> None:
        """Compare the layer's output with its output in float64 without a cache, from all tokens [L, HIDDEN]."""
        near = self.exact.rows(hidden, torch.arange(len(hidden)))
        numbers = torch.arange(len(hidden) // RATIO)
        far = self.exact.compressed("row", recent_tokens(hidden[None], torch.zeros_like(numbers), numbers), numbers)
        q = self.exact.queries(hidden[positions], positions)
        out, _ = dense(q, torch.cat((near, far)), mask, self.exact.sinks)
        want = self.exact.output(out, positions)
        self.layer_error = max(self.layer_error, expect_close(got, want, LAYER_BOUND))

    def __str__(self) -> str:
        few, many = min(self.selected), max(self.selected)
        return (
            f"compressed rows per token: {few if few == many else f'{few} to {many}'}; "
            f"largest error: out {self.out:.1e}, lse {self.lse:.1e}, layer {self.layer_error:.1e} of its norm"
        )


def run(arguments: argparse.Namespace) -> None:
    """Prefill, then decode, and print the results of the checks."""
    device, generator = torch.device(arguments.device), torch.Generator().manual_seed(arguments.seed)
    lens = [arguments.prompt, -(-arguments.prompt * 2 // 3)]
    layer = Layer.random(arguments.heads, generator, device)
    cache = Cache(len(lens), max(lens) + arguments.new_tokens, generator, device)

    def forward(starts: Sequence[int], counts: Sequence[int], check: Check) -> None:
        step = Step(starts, counts, HIDDEN, generator, device)
        cache.write(layer, step)
        chosen = choose(layer, cache, step, arguments.window, arguments.topk)
        check(step, chosen, *attend(layer, cache, chosen))

    check = Check(layer, cache, arguments.window)
    forward([0] * len(lens), lens, check)
    print(f"prefill of {sum(lens)} tokens in {len(lens)} sequences; {check}")
    check = Check(layer, cache, arguments.window)
    for number in range(arguments.new_tokens):
        forward([length + number for length in lens], [1] * len(lens), check)
    print(f"decode of {arguments.new_tokens} tokens in {len(lens)} sequences; {check}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, 90, 9, "attention, indexer and cache writes")
    parser.add_argument("--heads", type=int, default=12, help="query heads; the models have 64 and 128")
    parser.add_argument(
        "--window", type=int, default=24, help="uncompressed tokens that each token sees; the model: 128"
    )
    parser.add_argument("--topk", type=int, default=8, help="compressed rows that each token sees; the model: 512")
    return ended(run, parser.parse_args(argv), OPERATIONS)


if __name__ == "__main__":
    raise SystemExit(main())
