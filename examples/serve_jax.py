"""Serve a few requests with one jitted step in jax: ragged batches, donated pages, and heads sharded over a mesh.

    python examples/serve_jax.py
    python examples/serve_jax.py --devices 8 --requests 12

The model is a tiny decoder with random weights, which are a dict of arrays. It has RMSNorm, RoPE, grouped heads and a
gated MLP. Each step takes one ragged batch of prefill chunks and decodes. A sequence joins when enough pages are free,
and leaves when it is done. The step is compiled only once. Every device has its share of the heads, of the KV cache and
of the MLP. On a CPU the devices are virtual. Decoding is greedy. The tokens must equal those of one device, and those
of a dense forward pass without a cache.
"""

import argparse
import collections
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ragged_attention.jax import ragged_paged_attention

VOCABULARY, LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FEED = 97, 2, 64, 16, 8, 16, 128
PAGE_SIZE, NUM_PAGES, MAX_LEN, MAX_PROMPT = 8, 28, 80, 48  # too few pages for MAX_SEQS long sequences, so some wait
MAX_SEQS, MAX_TOKENS = 4, 32  # per step: sequences, and new tokens of all sequences
EPSILON = 1e-6
AXIS = "heads"  # the axis of the mesh

Arrays = dict[str, jax.Array]
Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]

# The axis along which a weight is divided among the devices. Every device holds all other weights whole.
SHARDED = {"q": 2, "k": 2, "v": 2, "o": 1, "gate": 2, "up": 2, "down": 1}
SHAPES = {
    "embed": (VOCABULARY, HIDDEN),
    "q": (LAYERS, HIDDEN, HEADS, HEAD_DIM), "k": (LAYERS, HIDDEN, KV_HEADS, HEAD_DIM),
    "v": (LAYERS, HIDDEN, KV_HEADS, HEAD_DIM), "o": (LAYERS, HEADS, HEAD_DIM, HIDDEN),
    "gate": (LAYERS, HIDDEN, FEED), "up": (LAYERS, HIDDEN, FEED), "down": (LAYERS, FEED, HIDDEN),
}  # fmt: skip


def random_weights(seed: int) -> dict[str, np.ndarray]:
    """Random weights, large enough that the next token depends on all earlier tokens."""
    generator = np.random.default_rng(seed)
    drawn = {name: generator.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}
    return {name: array if name == "embed" else array * 1.5 * HIDDEN**-0.5 for name, array in drawn.items()}


def norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + EPSILON)


def rope(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotate the channel pairs (i, i + D/2) of [T, heads, D] by their angles."""
    half = x.shape[-1] // 2
    angles = (positions[:, None] * 10000.0 ** -(jnp.arange(half) / half))[:, None]
    low, high = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate((low * cos - high * sin, high * cos + low * sin), axis=-1)


def total(x: jax.Array) -> jax.Array:
    """The sum of all devices' partial results."""
    return jax.lax.psum(x, AXIS)


def forward(weights: Arrays, tokens: jax.Array, positions: jax.Array, attend: Attend, add: Callable = total) -> Any:
    """Hidden states [T, E] of tokens [T]. `attend(layer, q, k, v)` is the only part in which tokens interact."""
    x = weights["embed"][tokens]
    for layer in range(LAYERS):
        h = norm(x)
        q, k, v = (jnp.einsum("te,ehd->thd", h, weights[name][layer]) for name in "qkv")
        attended = attend(layer, rope(q, positions), rope(k, positions), v)
        x = x + add(jnp.einsum("thd,hde->te", attended, weights["o"][layer]))
        h = norm(x)
        x = x + add((jax.nn.silu(h @ weights["gate"][layer]) * (h @ weights["up"][layer])) @ weights["down"][layer])
    return norm(x)


def serve_step(weights: Arrays, kv_pages: list[jax.Array], batch: Arrays, backend: str | None) -> Any:
    """One device's part of a step: each sequence's next token [S], and the pages with the new keys and values."""
    kv_pages = list(kv_pages)

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out, written = ragged_paged_attention(
            q, kv_pages[layer], batch["kv_lens"], batch["page_indices"], batch["cu_q_lens"], batch["num_seqs"],
            new_kv=(k, v), backend=backend,
        )  # fmt: skip
        kv_pages[layer] = written  # type: ignore[assignment]
        return out

    hidden = forward(weights, batch["tokens"], batch["positions"], attend)
    last = batch["cu_q_lens"][1:] - 1  # rows without a sequence are arbitrary and never read
    return jnp.argmax(hidden[last] @ weights["embed"].T, axis=-1), kv_pages


@jax.jit
def dense_tokens(weights: Arrays, tokens: jax.Array) -> jax.Array:
    """The most likely next token after each of a sequence's tokens [T], with plain attention on one device."""

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        del layer
        k, v = (jnp.repeat(heads, HEADS // KV_HEADS, axis=1) for heads in (k, v))
        logits = jnp.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5
        seen = jnp.tril(jnp.ones(logits.shape[1:], bool))
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=-1), v)

    hidden = forward(weights, tokens, jnp.arange(len(tokens)), attend, add=lambda x: x)
    return jnp.argmax(hidden @ weights["embed"].T, axis=-1)


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt, and the progress of its sequence."""

    prompt: list[int]
    max_new_tokens: int
    generated: list[int] = dataclasses.field(default_factory=list)
    pages: list[int] = dataclasses.field(default_factory=list)
    cached: int = 0  # the number of tokens whose keys and values are in the cache

    @property
    def num_pages(self) -> int:
        return -(-(len(self.prompt) + self.max_new_tokens) // PAGE_SIZE)

    @property
    def new(self) -> list[int]:
        """Tokens whose keys and values are not in the cache yet."""
        return (self.prompt + self.generated)[self.cached :]


def random_requests(count: int, max_new_tokens: int, seed: int) -> list[Request]:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(2, MAX_PROMPT + 1, count)
    return [Request(generator.integers(0, VOCABULARY, length).tolist(), max_new_tokens) for length in lengths]


def chunks_of(running: Iterable[Request]) -> list[tuple[Request, int]]:
    """The sequences of a step, each with the number of its new tokens: first decodes, then chunks of prompts."""
    chunks, left = [], MAX_TOKENS
    for request in sorted(running, key=lambda request: len(request.new) > 1):
        if (count := min(len(request.new), left)) > 0:
            chunks.append((request, count))
            left -= count
    return chunks


def table_row(request: Request) -> list[int]:
    """The pages of a sequence in the order of its positions, as a row of the page table."""
    return request.pages + [0] * (MAX_LEN // PAGE_SIZE - len(request.pages))


def batch_of(chunks: Sequence[tuple[Request, int]]) -> dict[str, np.ndarray]:
    """The arrays of a step. Their shapes never change, so the step is compiled only once."""
    batch = {
        "tokens": np.zeros(MAX_TOKENS, np.int32), "positions": np.zeros(MAX_TOKENS, np.int32),
        "kv_lens": np.zeros(MAX_SEQS, np.int32), "page_indices": np.zeros((MAX_SEQS, MAX_LEN // PAGE_SIZE), np.int32),
        "cu_q_lens": np.zeros(MAX_SEQS + 1, np.int32), "num_seqs": np.array([len(chunks)], np.int32),
    }  # fmt: skip
    first = 0
    for row, (request, count) in enumerate(chunks):
        batch["tokens"][first : first + count] = request.new[:count]
        batch["positions"][first : first + count] = np.arange(request.cached, request.cached + count)
        batch["kv_lens"][row] = request.cached + count
        batch["page_indices"][row] = table_row(request)
        first += count
        batch["cu_q_lens"][row + 1] = first
    return batch


class Server:
    """The compiled step for some devices, with its weights and pages."""

    def __init__(self, weights: dict[str, np.ndarray], num_devices: int, backend: str | None) -> None:
        mesh = Mesh(np.array(jax.devices()[:num_devices]), (AXIS,))
        specs = {name: PartitionSpec(*[None] * SHARDED[name], AXIS) if name in SHARDED else PartitionSpec()
                 for name in weights}  # fmt: skip
        heads = PartitionSpec(None, None, AXIS)  # pages are [P, G, 2K, D]; K and V of a head stay together
        place = functools.partial(NamedSharding, mesh)
        self.weights = {name: jax.device_put(array, place(specs[name])) for name, array in weights.items()}
        empty = np.zeros((NUM_PAGES, PAGE_SIZE, 2 * KV_HEADS, HEAD_DIM), np.float32)
        self.kv_pages = [jax.device_put(empty, place(heads)) for _ in range(LAYERS)]
        step = jax.shard_map(
            functools.partial(serve_step, backend=backend), mesh=mesh,
            in_specs=(specs, heads, PartitionSpec()), out_specs=(PartitionSpec(), heads), check_vma=False,
        )  # fmt: skip
        lowered = jax.jit(step, donate_argnums=1).lower(self.weights, self.kv_pages, batch_of([]))
        self.step = lowered.compile()
        self.page_bytes = LAYERS * empty.nbytes // num_devices
        analysis = self.step.memory_analysis()
        # The size of the outputs that reuse the memory of donated inputs.
        self.aliased_bytes = 0 if analysis is None else analysis.alias_size_in_bytes
        self.donates = self.aliased_bytes >= self.page_bytes
        self.num_steps = self.num_mixed_steps = 0
        self.seconds = 0.0

    def advance(self, chunks: Sequence[tuple[Request, int]]) -> None:
        """Run one step: cache each sequence's chunk, and append a token to each sequence without uncached tokens."""
        start, donated = time.perf_counter(), self.kv_pages
        tokens, self.kv_pages = self.step(self.weights, donated, batch_of(chunks))
        for (request, count), token in zip(chunks, np.asarray(tokens).tolist(), strict=False):
            request.cached += count
            if not request.new:
                request.generated.append(token)
        self.seconds += time.perf_counter() - start
        self.donates &= all(pages.is_deleted() for pages in donated)
        self.num_steps += 1
        self.num_mixed_steps += len({count == 1 for _, count in chunks}) == 2

    def serve(self, requests: Iterable[Request]) -> None:
        """Run all requests to completion. They join in order, if the batch is not full and enough pages are free."""
        queue, running, free = collections.deque(requests), [], list(range(NUM_PAGES))
        while queue or running:
            while queue and len(running) < MAX_SEQS and queue[0].num_pages <= len(free):
                running.append(request := queue.popleft())
                request.pages = [free.pop() for _ in range(request.num_pages)]
            self.advance(chunks_of(running))
            for request in [active for active in running if len(active.generated) == active.max_new_tokens]:
                running.remove(request)
                free += request.pages  # their contents stay, but the next sequence must not see them


def dense_agrees(weights: dict[str, np.ndarray], requests: Iterable[Request]) -> bool:
    """Whether each generated token equals that of a forward pass over all tokens before it."""
    for request in requests:
        tokens = np.zeros(MAX_LEN, np.int32)
        tokens[: len(request.prompt) + len(request.generated)] = request.prompt + request.generated
        likeliest = np.asarray(dense_tokens(weights, tokens))[len(request.prompt) - 1 :]
        if likeliest[: len(request.generated)].tolist() != request.generated:
            return False
    return True


def run(arguments: argparse.Namespace) -> bool:
    """Serve on one device and on all requested devices. Return whether every check holds."""
    weights, served, donates = random_weights(arguments.seed), {}, True
    for num_devices in sorted({1, arguments.devices}):
        requests = random_requests(arguments.requests, arguments.max_new_tokens, arguments.seed)
        server = Server(weights, num_devices, arguments.backend)
        server.serve(requests)
        served[num_devices], donates = requests, donates and server.donates
        count = sum(len(request.generated) for request in requests)
        print(
            f"devices: {num_devices}; {count} tokens of {len(requests)} requests in {server.num_steps} steps, "
            f"{server.num_mixed_steps} of them mixed; {count / server.seconds:.0f} tokens per second; "
            f"{server.page_bytes} bytes of pages on each device, {server.aliased_bytes} bytes written in place"
        )
    on_one, on_all = ([request.generated for request in served[num_devices]] for num_devices in (1, arguments.devices))
    checks = {
        "as on one device": on_all == on_one,
        "as a dense forward pass": dense_agrees(weights, served[arguments.devices]),
        "pages donated": donates,
    }
    print("check: " + ", ".join(f"{name}: {'yes' if holds else 'NO'}" for name, holds in checks.items()))
    return all(checks.values())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    sizes = [size for size in range(1, KV_HEADS + 1) if KV_HEADS % size == 0]
    parser.add_argument("--devices", type=int, default=1, choices=sizes, help="devices that share the heads")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=24, help=f"per request, up to {MAX_LEN - MAX_PROMPT}")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and prompts")
    parser.add_argument("--backend", help="backend of the attention; default: chosen for the device")
    arguments = parser.parse_args(argv)
    if arguments.requests < 1:
        parser.error(f"expected --requests >= 1, got {arguments.requests}")
    if not 1 <= arguments.max_new_tokens <= MAX_LEN - MAX_PROMPT:
        parser.error(f"expected --max-new-tokens from 1 to {MAX_LEN - MAX_PROMPT}, got {arguments.max_new_tokens}")
    if arguments.devices > 1:
        # XLA reads this flag when jax first looks for devices, not when jax is imported. The flag affects only CPUs.
        flag = f"--xla_force_host_platform_device_count={arguments.devices}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    if (available := len(jax.devices())) < arguments.devices:
        parser.error(f"expected --devices of at most {available}, which is what jax has here, got {arguments.devices}")
    with jax.default_matmul_precision("highest"):
        return 0 if run(arguments) else 1


if __name__ == "__main__":
    raise SystemExit(main())
