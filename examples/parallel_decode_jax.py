"""Compute attention on several devices in jax, and check the results against attention on one device.

    python examples/parallel_decode_jax.py
    python examples/parallel_decode_jax.py --devices 3

On a CPU the devices are virtual. Six sequences are decoded for a few steps, once with a KV cache that is divided by
heads, and once with a KV cache that is divided by positions. Each device writes only the keys and values of its part.
Then the example decodes with MLA over a latent cache: once over all positions, and once over lists of positions. Last,
it computes attention over packed sequences and its gradients with ring attention.

The example prints the largest difference of each result from the result on one device, and the collective operations in
each compiled function. The exit status is 0 if all differences are below 1e-4, and 1 otherwise.
"""

import argparse
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

SEQS, STEPS, PAGE = 6, 4, 16
KV_HEADS, GROUP, SIZE = 12, 2, 64  # 12 KV heads are divided by 2, 3, 4 or 6 devices
LATENT, D_V = 96, 64
SM_SCALE = 48**-0.5  # from the 48 columns of a head before absorption, not from the 96 columns after it
PROMPTS = (100, 37, 64, 5, 81, 16)
BOUND = 1e-4


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--devices", type=int, default=4, help="number of devices: 2, 3, 4 or 6 (default 4)")
    parsed = parser.parse_args(argv)
    if parsed.devices < 1 or KV_HEADS % parsed.devices:
        parser.error(f"expected --devices to divide {KV_HEADS} heads, got {parsed.devices}")
    return parsed


ARGUMENTS = arguments(None if __name__ == "__main__" else [])
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={ARGUMENTS.devices}"
)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from ragged_attention.jax import (  # noqa: E402
    mla_decode,
    page_indices_to_slots,
    ragged_paged_attention,
    varlen_attention,
    write_kv_pages,
    write_mla_cache,
)
from ragged_attention.jax.distributed import (  # noqa: E402
    KvShard,
    context_parallel_decode,
    context_parallel_mla_decode,
    context_parallel_varlen_attention,
    over_heads,
    zigzag_part,
)

WHOLE, KEYS = PartitionSpec(), PartitionSpec("keys")
RULE = KvShard(ARGUMENTS.devices, PAGE)
COLLECTIVES = r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("


class Run:
    """One run: a mesh, random numbers, and the results of the comparisons."""

    def __init__(self) -> None:
        self.mesh = Mesh(np.array(jax.devices()[: ARGUMENTS.devices]), ("keys",))
        self.random = np.random.default_rng(0)
        self.results: dict[str, tuple[float, Counter[str]]] = {}

    def normal(self, *shape: int) -> jax.Array:
        return jnp.asarray(self.random.normal(size=shape), jnp.float32)

    def table(self) -> jax.Array:
        """A page table with enough pages for every sequence, in random order."""
        columns = -(-(max(PROMPTS) + STEPS) // PAGE)
        return jnp.asarray(self.random.permutation(SEQS * columns).reshape(SEQS, columns), jnp.int32)

    def on_each(self, function: Callable[..., Any], num_replicated: int, out_spec: Any) -> Callable[..., Any]:
        """A jitted function that runs `function` on every device.

        Its first argument is an array of caches [devices, ...], one for each device. It is followed by `num_replicated`
        arrays, which every device gets whole.
        """

        def local(cache: jax.Array, *arrays: jax.Array) -> Any:
            return function(cache[0], *arrays)

        specs = (KEYS, *[WHOLE] * num_replicated)
        # check_vma=False: all devices merge the same parts in the same order, so their results are equal. Jax cannot
        # infer that.
        mapped = jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=out_spec, check_vma=False)
        return jax.jit(mapped)

    def compare(self, name: str, function: Any, arrays: Sequence[Any], expected: Any) -> None:
        """Record a jitted function's difference from `expected`, and the collective operations in its code."""
        difference = float(jnp.abs(function(*arrays) - expected).max())
        collectives = Counter(re.findall(COLLECTIVES, function.lower(*arrays).compile().as_text()))
        largest, _ = self.results.get(name, (0.0, collectives))
        self.results[name] = max(largest, difference), collectives


def slots_of(positions: jax.Array, seqs: jax.Array, table: jax.Array, shard: KvShard) -> jax.Array:
    """The slots in which a device stores the tokens at these positions, or -1 for the tokens of other devices."""
    local_positions = jnp.expand_dims(shard.local(positions), 1)
    return page_indices_to_slots(local_positions, table[seqs], PAGE)[:, 0]


def tokens(first: Sequence[int], stop: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """The positions and sequences of tokens: for each sequence, its positions from `first` to before `stop`."""
    spans = [np.arange(*span, dtype=np.int32) for span in zip(first, stop, strict=True)]
    seqs = [np.full(len(span), seq, np.int32) for seq, span in enumerate(spans)]
    return jnp.asarray(np.concatenate(spans)), jnp.asarray(np.concatenate(seqs))


def decode(run: Run) -> None:
    """Decode for a few steps with caches divided by heads and by positions, and compare with an undivided cache."""
    table, alone = run.table(), KvShard(1, PAGE, 0)
    shape = (table.size, PAGE, 2 * KV_HEADS, SIZE)
    pages = jnp.zeros(shape)
    own_pages = jnp.zeros((ARGUMENTS.devices, *shape))  # a server would allocate only each device's part
    edges = jnp.arange(SEQS + 1, dtype=jnp.int32)

    def write_own(pages: Any, k: Any, v: Any, positions: Any, seqs: Any) -> Any:
        shard = RULE.at(jax.lax.axis_index("keys"))
        written = write_kv_pages(k, v, pages, slots_of(positions, seqs, table, shard))
        assert isinstance(written, jax.Array)
        return written[None]

    def attend_own(pages: Any, q: Any, kv_lens: Any) -> Any:
        return context_parallel_decode(q, pages, kv_lens, table, edges, axis_name="keys", shard=RULE, max_q_len=1)

    by_heads = jax.jit(over_heads(ragged_paged_attention, "keys", mesh=run.mesh))
    writing, attending = run.on_each(write_own, 4, KEYS), run.on_each(attend_own, 2, WHOLE)
    lens = [0] * SEQS
    for step in range(STEPS + 1):
        stop = [length + 1 for length in lens] if step else list(PROMPTS)
        positions, seqs = tokens(lens, stop)
        k, v = (run.normal(len(positions), KV_HEADS, SIZE) for _ in "kv")
        written = write_kv_pages(k, v, pages, slots_of(positions, seqs, table, alone))
        assert isinstance(written, jax.Array)
        pages, own_pages, lens = written, writing(own_pages, k, v, positions, seqs), stop
        if step:
            q, kv_lens = run.normal(SEQS, GROUP * KV_HEADS, SIZE), jnp.array(lens, jnp.int32)
            expected = ragged_paged_attention(q, pages, kv_lens, table, edges)
            run.compare("by heads", by_heads, (q, pages, kv_lens, table, edges), expected)
            run.compare("by positions", attending, (own_pages, q, kv_lens), expected)


def decode_latents(run: Run) -> None:
    """Decode with MLA, first over all cached positions, and then over lists of positions as an indexer returns them."""
    table, alone = run.table(), KvShard(1, PAGE, 0)
    positions, seqs = tokens([0] * SEQS, PROMPTS)
    rows = run.normal(len(positions), 1, LATENT)
    cache = write_mla_cache(rows, jnp.zeros((table.size, PAGE, 1, LATENT)), slots_of(positions, seqs, table, alone))
    parts = [
        write_mla_cache(rows, jnp.zeros_like(cache), slots_of(positions, seqs, table, RULE.at(rank)))
        for rank in range(ARGUMENTS.devices)
    ]
    caches, kv_lens = jnp.stack(parts), jnp.array(PROMPTS, jnp.int32)
    q = run.normal(SEQS, 2, GROUP * KV_HEADS, LATENT)
    listed = jnp.asarray(np.stack([run.random.integers(-1, length, (2, 24)) for length in PROMPTS]), jnp.int32)

    def attend(cache: Any, q: Any, *, indices: Any = None) -> Any:
        return context_parallel_mla_decode(
            q, cache, table, None if indices is not None else kv_lens, indices=indices, causal=indices is None,
            d_v=D_V, sm_scale=SM_SCALE, axis_name="keys", shard=RULE,
        )[0]  # fmt: skip

    expected, _ = mla_decode(q, cache, table, kv_lens, causal=True, d_v=D_V, sm_scale=SM_SCALE)
    run.compare("all latents", run.on_each(attend, 1, WHOLE), (caches, q), expected)
    slots = page_indices_to_slots(listed, table, PAGE)
    expected, _ = mla_decode(q, cache, indices=slots, d_v=D_V, sm_scale=SM_SCALE)
    sparse = run.on_each(lambda cache, q, listed: attend(cache, q, indices=listed), 2, WHOLE)
    run.compare("listed latents", sparse, (caches, q, listed), expected)


def train(run: Run) -> None:
    """Compute attention over packed sequences and its gradients, with ring attention and on one device."""
    rows = 48 * ARGUMENTS.devices
    edges = jnp.array([0, 30, 31, rows - 5], jnp.int32)
    leaves = [run.normal(rows, count, SIZE) for count in (GROUP * KV_HEADS, KV_HEADS, KV_HEADS)]
    weights = run.normal(rows, GROUP * KV_HEADS, SIZE)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return context_parallel_varlen_attention(q, k, v, edges, axis_name="keys")

    ring = jax.jit(jax.shard_map(attend, mesh=run.mesh, in_specs=(KEYS, KEYS, KEYS), out_specs=KEYS))
    divided = NamedSharding(run.mesh, KEYS)
    parts = [jax.device_put(zigzag_part(leaf, ARGUMENTS.devices), divided) for leaf in leaves]

    def alone(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return varlen_attention(q, k, v, edges, edges, causal=True)

    expected = alone(*leaves)
    run.compare("ring attention", ring, parts, zigzag_part(expected, ARGUMENTS.devices))
    weight_parts = zigzag_part(weights, ARGUMENTS.devices)

    def ring_gradients(*parts: Any) -> Any:
        of_parts = jax.grad(lambda *parts: (ring(*parts) * weight_parts).sum(), argnums=(0, 1, 2))(*parts)
        return jnp.concatenate(of_parts, axis=1)

    whole = jax.grad(lambda *leaves: (alone(*leaves) * weights).sum(), argnums=(0, 1, 2))(*leaves)
    expected = zigzag_part(jnp.concatenate(whole, axis=1), ARGUMENTS.devices)
    run.compare("ring gradients", jax.jit(ring_gradients), parts, expected)


def main() -> int:
    run = Run()
    for part in (decode, decode_latents, train):
        part(run)
    print(f"{ARGUMENTS.devices} devices, {jax.default_backend()}; largest difference from one device, and collectives:")
    for name, (difference, collectives) in run.results.items():
        counts = ", ".join(f"{count} {operation}" for operation, count in collectives.items()) or "nothing"
        print(f"  {name:<20} {difference:.1e}  {counts} {'' if difference < BOUND else 'TOO LARGE'}".rstrip())
    return 0 if all(difference < BOUND for difference, _ in run.results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
