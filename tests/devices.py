"""Checks of attention over eight jax devices, which are virtual devices of one CPU; run as a script.

`python -m tests.devices heads decode` runs the checks `check_heads()` and `check_decode()` and prints their results as
JSON. A check is a function `check_<name>()` that raises if something is wrong. With `RANK` and `WORLD_SIZE` in the
environment the script is one of several processes of `jax.distributed`, each of which has two devices.
"""

import functools
import importlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))
DEVICES = 2 if PROCESSES > 1 else 8
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"

from ragged_attention.testing import environment  # noqa: E402

environment.prepare("cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

import ragged_attention as ra  # noqa: E402
from ragged_attention.calls import CALLS  # noqa: E402
from ragged_attention.calls.sharding import KvShard  # noqa: E402
from ragged_attention.errors import InvalidInput  # noqa: E402
from tests.divided import (  # noqa: E402
    HEADS,
    KV_HEADS,
    LENS,
    PAGE,
    WIDTH,
    divisible_arguments,
    random_ranges,
    shards_of,
    writing_calls,
)

# Typed as Any, because the checks call these functions in ways that their overloads do not list.
rj: Any = importlib.import_module("ragged_attention.jax")
rd: Any = importlib.import_module("ragged_attention.jax.distributed")
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter", "collective-broadcast")
WHOLE, HEADS_SPEC = PartitionSpec(), PartitionSpec(None, "heads")


def mesh_of(size: int, name: str) -> Mesh:
    return Mesh(np.array(jax.devices()[:size]), (name,))


def collectives(function: Any, *arguments: Any) -> Counter[str]:
    """The numbers of collective operations in a compiled function, by kind."""
    text = function.lower(*arguments).compile().as_text()
    names = re.findall(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(", text)
    return Counter(names)


def close(found: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-5) -> None:
    for part, value in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(part), np.asarray(value), rtol=rtol, atol=atol)


def same(found: Any, expected: Any) -> None:
    for part, value in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(part), np.asarray(value))


def refused(match: str, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
    try:
        function(*arguments, **keywords)
    except InvalidInput as error:
        message = str(error)
    else:
        message = "nothing"
    assert message == match, message


# ---- attention divided by heads

WITHOUT_HEADS = {  # operations without heads to divide, and operations that need all heads for their selection
    "make_decode_schedule", "page_indices_to_slots", "top_k_indices", "indexer_topk", "attention_target",
    "quantize_indexer_keys",
    "write_indexer_cache", "quantize_mla_cache", "dequantize_mla_cache", "quantize_kv", "dequantize_kv",
}  # fmt: skip


SUMS_OVER_HEADS = ("indexer_logits", "indexer_logits_backward", "sparse_mla_prefill_backward")


def check_heads() -> list[str]:
    """Every operation over eight devices gives the same bits as on one device, without communication.

    The operations in SUMS_OVER_HEADS are the exception: they need one all-reduce, and their results are close. Returns
    the operations whose results are divided among the devices.
    """
    mesh, divided = mesh_of(8, "heads"), []
    for operation in sorted(CALLS.keys() - WITHOUT_HEADS):
        given = divisible_arguments(operation, 8)
        arrays = {name: rd.to_jax(value) for name, value in given.items() if hasattr(value, "shape")}
        others = {name: value for name, value in given.items() if name not in arrays and value is not None}
        function = getattr(rj, operation)
        with ra.use_backend(batch_invariant=True):  # otherwise the number of heads may change the KV splits
            expected = function(**arrays, **others)

            def over(arrays: Any, function: Any = function, others: Any = others) -> Any:
                return rd.over_heads(function, "heads", mesh=mesh)(**arrays, **others)

            found = jax.jit(over)(arrays)
            placed = {}  # the arrays as a model has them: already sharded over heads
            for name, value in arrays.items():
                specs = rd._specs(rd.heads_of_fields(CALLS[operation]).get(name), name, value, 8, "heads")
                placed[name] = jax.device_put(value, NamedSharding(mesh, specs))
            exchanges = collectives(jax.jit(over), placed)
        if operation in SUMS_OVER_HEADS:
            assert exchanges == {"all-reduce": 1}, exchanges
            close(found, expected)
        else:
            assert not exchanges, (operation, exchanges)
            same(found, expected)
            if not any(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(jax.jit(over)(placed))):
                divided.append(operation)
    return divided


def check_writes_over_heads() -> list[str]:
    """Calls that write a cache give the same results over two devices as on one, whether the cache is divided or whole.

    The devices exchange nothing. Returns the operations that wrote a whole cache.
    """
    mesh, whole = mesh_of(2, "heads"), []
    for operation, arguments, is_whole in writing_calls():
        if operation in WITHOUT_HEADS:
            continue
        arrays = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray | tuple)}
        others = {name: value for name, value in arguments.items() if name not in arrays}
        over, alone = rd.over_heads(getattr(rj, operation), "heads", mesh=mesh), getattr(rj, operation)
        for backend in ("numba", "xla"):

            def call(arrays: Any, over: Any = over, others: Any = others, backend: Any = backend) -> Any:
                return over(**arrays, **others, backend=backend)

            expected = jax.jit(functools.partial(alone, **others, backend=backend))(**arrays)
            compiled = jax.jit(call).lower(arrays).compile()
            assert not re.search("|".join(COLLECTIVES), compiled.as_text() or ""), operation
            found = compiled(jax.tree.map(jnp.asarray, arrays))
            close(found, expected)
            assert jax.tree.leaves(found)[-1].sharding.is_fully_replicated == is_whole, operation
            if "new_kv" in arrays:
                close(call(arrays), expected)
        whole += [operation] * is_whole
    return sorted(set(whole))


def check_scaled_queries() -> None:
    """8-bit queries sharded over heads work with one scale and with one scale for each head."""
    random = np.random.default_rng(2)
    q = jnp.asarray(random.normal(size=(3, 8, 16)), jnp.float8_e4m3fn)
    pages = jnp.asarray(random.normal(size=(8, PAGE, 16, 16)), jnp.bfloat16)
    tables = jnp.array([6, 4, 3]), jnp.zeros((3, 2), jnp.int32), jnp.arange(4)
    over = rd.over_heads(rj.ragged_paged_attention, "heads", mesh=mesh_of(4, "heads"))
    for scale in (0.5, jnp.float32(0.5), jnp.ones(1), jnp.linspace(0.25, 2, 8)):
        close(over(q, pages, *tables, q_scale=scale), rj.ragged_paged_attention(q, pages, *tables, q_scale=scale))


def check_gradients_over_heads() -> None:
    mesh = mesh_of(8, "heads")
    edges, random = jnp.array([0, 7, 7, 12]), np.random.default_rng(1)
    for kv_heads in (8, 1):
        q, k, v = (jnp.asarray(random.normal(size=(12, heads, 16)), jnp.float32) for heads in (16, kv_heads, kv_heads))
        sinks = jnp.asarray(random.normal(size=16), jnp.float32)

        for mask in ({"causal": True}, {"key_ranges": random_ranges(12, 7)}):

            def loss(attend: Any, *leaves: Any, mask: Any = mask) -> Any:
                q, k, v, sinks = leaves
                return (attend(q, k, v, edges, edges, sinks=sinks, **mask) ** 2).sum()

            over = rd.over_heads(rj.varlen_attention, "heads", mesh=mesh)
            gradient = functools.partial(jax.grad, argnums=(0, 1, 2, 3))
            found = jax.jit(gradient(functools.partial(loss, over)))(q, k, v, sinks)
            expected = gradient(functools.partial(loss, rj.varlen_attention))(q, k, v, sinks)
            close(found, expected)


def check_without_exceptions() -> None:
    """`jax.shard_map` with its check of varying axes (`check_vma`) accepts each backend that runs here."""
    mesh, edges = mesh_of(4, "heads"), jnp.array([0, 4, 10])
    q, k = jnp.ones((10, 8, 16)), jnp.ones((10, 4, 16))
    ranges = jnp.asarray(random_ranges(10, 6))
    for backend, mask in (("numba", None), ("xla", None), ("xla", ranges), ("reference", None)):
        mapped = jax.shard_map(
            lambda q, k, v, edges, backend=backend, mask=mask: rj.varlen_attention(
                q, k, v, edges, edges, key_ranges=mask, backend=backend
            ),
            mesh=mesh, in_specs=(HEADS_SPEC, HEADS_SPEC, HEADS_SPEC, WHOLE), out_specs=HEADS_SPEC,
        )  # fmt: skip
        gradient = jax.jit(jax.grad(lambda q, mapped=mapped: mapped(q, k, k, edges).sum()))
        assert gradient(q).shape == q.shape if backend != "reference" else mapped(q, k, k, edges).shape == q.shape


def check_the_mesh_in_force() -> None:
    """`over_heads` without a mesh uses jax's current mesh, here a mesh with explicit axes.

    Arrays that are placed differently are moved, and the results are sharded over heads.
    """
    q, pages = jnp.ones((3, 8, 16)), jnp.ones((8, PAGE, 16, 16))
    tables = jnp.array([6, 4, 3]), jnp.zeros((3, 2), jnp.int32), jnp.arange(4)
    expected = rj.ragged_paged_attention(q, pages, *tables)
    over = rd.over_heads(rj.ragged_paged_attention, "heads")
    with jax.set_mesh(jax.make_mesh((4,), ("heads",))):
        for function in (over, jax.jit(over)):
            found = function(q, pages, *tables)
            assert found.sharding.spec[1] == "heads"
            close(found, expected)


def check_what_heads_refuse() -> None:
    mesh, edges = mesh_of(4, "heads"), jnp.array([0, 5])
    over = rd.over_heads(rj.varlen_attention, "heads", mesh=mesh)
    rows = [jnp.zeros((5, heads, 16)) for heads in (6, 3, 12)]
    what = "to be a multiple of the mesh's size = 4, got"
    refused(f"expected num_q_heads of q {what} 6", over, rows[0], rows[1], rows[1], edges, edges)
    refused(f"expected num_kv_heads of k {what} 3", over, rows[2], rows[1], rows[1], edges, edges)
    refused(
        "expected indexer_topk with all heads on each device, got q sharded over heads: call it without over_heads, on "
        "arrays that each device has whole",
        rd.over_heads(rj.indexer_topk, "heads", mesh=mesh),
    )
    refused(
        "expected an operation with heads, got page_indices_to_slots", rd.over_heads, rj.page_indices_to_slots, "heads"
    )


# ---- caches divided by positions


def own_caches(rule: KvShard, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The pages [size, P, G, ...] and page tables [size, S, M] of all ranks for the rows [S, L, ...].

    Unused slots are NaN.
    """
    columns = -(-max(LENS) // PAGE) + 1
    all_pages, tables = [], []
    for rank in range(rule.size):
        table = np.random.default_rng(rank).permutation(len(LENS) * columns).reshape(len(LENS), columns)
        flat = np.full((table.size * PAGE, *rows.shape[2:]), np.nan, np.float32)
        for seq, length in enumerate(LENS):
            own = rule.at(rank).local(np.arange(length, dtype=np.int32))
            assert (own >= 0).sum() == rule.at(rank).lengths(np.asarray(length))
            flat[table[seq, own[own >= 0] // PAGE] * PAGE + own[own >= 0] % PAGE] = rows[seq, :length][own >= 0]
        table[:, -1] = 10**6  # not a page: no call may read this column
        all_pages.append(flat.reshape(-1, PAGE, *rows.shape[2:]))
        tables.append(table.astype(np.int32))
    return np.stack(all_pages), np.stack(tables)


def over_keys(mesh: Mesh, call: Callable[..., Any], out_specs: Any) -> Any:
    """A jitted function of all ranks' caches and page tables [size, ...] and of replicated arrays."""

    def local(cache: Any, table: Any, *others: Any) -> Any:
        return call(cache[0], table[0], *others)

    def mapped(cache: Any, table: Any, *others: Any) -> Any:
        specs = (PartitionSpec("keys"), PartitionSpec("keys"), *[WHOLE] * len(others))
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False)(
            cache, table, *others
        )

    return jax.jit(mapped)


def check_decode() -> None:
    """Decode and drafts over the pages of several devices give the result of one device, with one collective."""
    random = np.random.default_rng(2)
    rows = random.normal(size=(len(LENS), max(LENS), 2 * KV_HEADS, WIDTH)).astype(np.float32)
    sinks, kv_lens = jnp.asarray(random.normal(size=HEADS), jnp.float32), jnp.array(LENS)
    whole, whole_table = (jnp.asarray(array[0]) for array in own_caches(KvShard(1, PAGE), rows))
    for size, rule in [(4, rule) for rule in shards_of(4)] + [(3, KvShard(3, PAGE))]:
        mesh = mesh_of(size, "keys")
        cache, table = own_caches(rule, rows)
        for lens_q in ((1, 1, 0, 1), (5, 2, 0, 1)):
            edges = jnp.array([0, *np.cumsum(lens_q)], jnp.int32)
            q = jnp.asarray(random.normal(size=(int(edges[-1]) + 2, HEADS, WIDTH)), jnp.float32)

            def decode(cache: Any, table: Any, q: Any, rule: Any = rule, edges: Any = edges, **more: Any) -> Any:
                return rd.context_parallel_decode(
                    q, cache, kv_lens, table, edges, axis_name="keys", shard=rule, sinks=sinks, return_lse=True,
                    soft_cap=20.0, max_q_len=1 if len(q) == 5 else None, **more,
                )  # fmt: skip

            expected = rj.ragged_paged_attention(
                q, whole, kv_lens, whole_table, edges, sinks=sinks, return_lse=True, soft_cap=20.0
            )
            function = over_keys(mesh, decode, WHOLE)
            found = function(cache, table, q)
            close(found, expected)
            with jax.numpy_dtype_promotion("strict"):
                same(over_keys(mesh, decode, WHOLE)(cache, table, q), found)
            if rule.interleave == PAGE:
                assert collectives(function, cache, table, q) == {"all-gather": 1}
                own = over_keys(
                    mesh, lambda *given, decode=decode: decode(*given, own_heads=True), (HEADS_KEYS, HEADS_KEYS)
                )
                assert collectives(own, cache, table, q) == {"all-to-all": 1}
                same(own(cache, table, q), found)


HEADS_KEYS = PartitionSpec(None, "keys")


def check_live_sequences() -> None:
    """The table entries after the live sequences are never read, not even to find a query's sequence."""
    random = np.random.default_rng(8)
    rows = random.normal(size=(len(LENS), max(LENS), 2 * KV_HEADS, WIDTH)).astype(np.float32)
    q = jnp.asarray(random.normal(size=(6, HEADS, WIDTH)), jnp.float32)
    kv_lens, edges = jnp.array([41, 3, 10**9, -7]), jnp.array([0, 3, 4, -(10**9), 2])
    whole, whole_table = (jnp.asarray(array[0]) for array in own_caches(KvShard(1, PAGE), rows))

    def decode(cache: Any, table: Any, q: Any) -> Any:
        return rd.context_parallel_decode(q, cache, kv_lens, table, edges, 2, axis_name="keys")

    found = over_keys(mesh_of(4, "keys"), decode, WHOLE)(*own_caches(KvShard(4, PAGE), rows), q)
    close(found, rj.ragged_paged_attention(q, whole, kv_lens, whole_table, edges, 2))


def check_mla_decode() -> None:
    random = np.random.default_rng(3)
    rows = random.normal(size=(len(LENS), max(LENS), 1, 48)).astype(np.float32)
    sinks, kv_lens = jnp.asarray(random.normal(size=HEADS), jnp.float32), jnp.array(LENS)
    whole, whole_table = (jnp.asarray(array[0]) for array in own_caches(KvShard(1, PAGE), rows))
    q = jnp.asarray(random.normal(size=(len(LENS), 2, HEADS, 48)), jnp.float32)
    listed = np.stack([random.integers(-1, max(length, 1), (2, 9), np.int32) for length in LENS])
    listed[2] = -1  # sequence 2 is empty, so its lists hold no positions
    slots = rj.page_indices_to_slots(jnp.asarray(listed), whole_table, PAGE)
    lens = jnp.array([9, 4, 7, 0])
    mesh = mesh_of(4, "keys")
    cache: Any = None
    table: Any = None
    found: Any = None
    function: Any = None
    for rule in shards_of(4)[:4]:
        cache, table = own_caches(rule, rows)

        def sparse(cache: Any, table: Any, q: Any, rule: Any = rule) -> Any:
            return rd.context_parallel_mla_decode(
                q, cache, table, indices=jnp.asarray(listed), topk_lens=lens, axis_name="keys", shard=rule, d_v=32,
                sinks=sinks,
            )  # fmt: skip

        def dense(cache: Any, table: Any, q: Any, rule: Any = rule, **more: Any) -> Any:
            return rd.context_parallel_mla_decode(
                q, cache, table, kv_lens, causal=True, axis_name="keys", shard=rule, d_v=32, sinks=sinks, **more
            )

        chosen = over_keys(mesh, sparse, WHOLE)(cache, table, q)
        close(chosen, rj.mla_decode(q, whole, indices=slots, topk_lens=lens, d_v=32, sinks=sinks))
        with jax.numpy_dtype_promotion("strict"):
            same(over_keys(mesh, sparse, WHOLE)(cache, table, q), chosen)
        function = over_keys(mesh, dense, WHOLE)
        found = function(cache, table, q)
        close(found, rj.mla_decode(q, whole, whole_table, kv_lens, causal=True, d_v=32, sinks=sinks))
        own = over_keys(mesh, functools.partial(dense, own_heads=True), (PartitionSpec(None, None, "keys"), HEADS_KEYS))
        same(own(cache, table, q), found)
    assert collectives(function, cache, table, q) == {"all-gather": 1}

    def of_nothing(cache: Any, table: Any, q: Any) -> Any:
        return rd.context_parallel_mla_decode(q, cache, table, kv_lens[:0], causal=True, axis_name="keys", d_v=32)

    out, lse = over_keys(mesh, of_nothing, WHOLE)(cache, table[:, :0], q[:0])
    assert out.shape == (0, 2, HEADS, 32)
    assert lse.shape == (0, HEADS, 2)


def check_what_positions_refuse() -> None:
    mesh = mesh_of(4, "keys")
    tables = jnp.array([3]), jnp.array([0, 1])
    cache, table, q = jnp.zeros((4, 8, PAGE, 2, WIDTH)), jnp.zeros((4, 1, 3), jnp.int32), jnp.zeros((1, 5, WIDTH))

    def decode(shard: Any, **keywords: Any) -> Any:
        def call(cache: Any, table: Any, q: Any) -> Any:
            return rd.context_parallel_decode(
                q, cache, tables[0], table, tables[1], axis_name="keys", shard=shard, **keywords
            )

        return over_keys(mesh, call, WHOLE)(cache, table, q)

    refused("expected a shard of a group of size 4, got one of a group of size 2", decode, KvShard(2, PAGE))
    refused("expected shard.rank=None in jax, where each device has its own, got 1", decode, KvShard(4, PAGE, 1))
    refused("expected num_q_heads of q to be a multiple of the axis's size = 4, got 5", decode, None, own_heads=True)

    def attend(*rows: Any) -> Any:
        mapped = jax.shard_map(
            lambda *rows: rd.context_parallel_varlen_attention(*rows, jnp.array([0, 3]), axis_name="keys"),
            mesh=mesh, in_specs=PartitionSpec("keys"), out_specs=PartitionSpec("keys"),
        )  # fmt: skip
        return mapped(*rows)

    odd, even = jnp.zeros((12, 2, WIDTH)), jnp.zeros((8, 2, WIDTH))
    refused("expected q.shape[0] to be a multiple of the pieces of a rank = 2, got 3", attend, odd, odd, odd)
    refused("expected k.shape[0] = q.shape[0] = 2, got 3", attend, even, odd, odd)
    whole = even.astype(jnp.int8)
    refused("expected q.dtype to be float32 or float16 or bfloat16, got int8", attend, whole, whole, whole)
    refused(
        "expected the number of tokens to be a multiple of 2 * the group's size = 8, got 12", rd.zigzag_part, odd, 4
    )


# ---- context-parallel attention over packed sequences


def packed(size: int, piece: int) -> tuple[list[jax.Array], jax.Array]:
    """The leaves q, k, v and sinks for `2 * size` pieces of `piece` tokens, and the sequences' edges.

    The sequences are of every kind: one has one token, one is empty, others cross pieces, and padding follows.
    """
    random, tokens = np.random.default_rng(4), 2 * size * piece
    shapes = (tokens, 4, 16), (tokens, 2, 16), (tokens, 2, 8), (4,)
    leaves = [jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes]
    return leaves, jnp.array([0, 1, 1, piece - 1, 2 * piece + 2, tokens - 3])


def ring(mesh: Mesh, edges: Any, **keywords: Any) -> Any:
    """A function that computes attention over a mesh from whole arrays in zigzag order."""
    rows = PartitionSpec("keys")

    def attend(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        return rd.context_parallel_varlen_attention(
            q, k, v, edges, axis_name="keys", sinks=sinks, return_lse=True, **keywords
        )

    return jax.shard_map(attend, mesh=mesh, in_specs=(rows, rows, rows, WHOLE), out_specs=(rows, rows))


def check_varlen() -> dict[str, Any]:
    """Ring attention over packed sequences has the results and gradients of one device.

    Returns the numbers of collectives in the forward pass and in training, by the number of devices.
    """
    exchanges = {}
    for size, causal in ((4, True), (3, True), (2, False), (1, True)):
        mesh = mesh_of(size, "keys")
        leaves, edges = packed(size, 6)
        random = np.random.default_rng(5)
        weights = jnp.asarray(random.normal(size=(len(leaves[0]), 4, 9)), jnp.float32)
        live = (jnp.arange(len(leaves[0])) < edges[-1])[:, None]
        attend = ring(mesh, edges, causal=causal, soft_cap=5.0)

        def around(q: Any, k: Any, v: Any, sinks: Any, attend: Any = attend, size: int = size) -> Any:
            found = attend(*(rd.zigzag_part(array, size) for array in (q, k, v)), sinks)
            return tuple(rd.zigzag_whole(part, size) for part in found)

        def alone(q: Any, k: Any, v: Any, sinks: Any, edges: Any = edges, causal: bool = causal) -> Any:
            return rj.varlen_attention(q, k, v, edges, edges, causal=causal, soft_cap=5.0, sinks=sinks, return_lse=True)

        def loss(function: Any, *leaves: Any, weights: Any = weights, live: Any = live) -> Any:
            out, lse = function(*leaves)
            return (out * weights[..., :8]).sum() + jnp.where(live, lse * weights[..., 8], 0.0).sum(), (out, lse)

        found = jax.jit(jax.grad(lambda *given: loss(around, *given), argnums=(0, 1, 2, 3), has_aux=True))(*leaves)
        expected = jax.grad(lambda *given: loss(alone, *given), argnums=(0, 1, 2, 3), has_aux=True)(*leaves)
        close(found, expected, rtol=2e-5, atol=2e-5)
        placed = [jax.device_put(leaf, NamedSharding(mesh, PartitionSpec("keys"))) for leaf in leaves[:3]]
        exchanges[f"forward over {size}"] = collectives(jax.jit(attend), *placed, leaves[3])
        training = jax.jit(jax.grad(lambda *given, attend=attend: attend(*given)[0].sum(), argnums=(0, 1, 2)))
        exchanges[f"training over {size}"] = collectives(training, *placed, leaves[3])
    return exchanges


def check_memory() -> dict[str, int]:
    """The bytes that XLA plans on one device for a forward and a backward pass of 4096 tokens."""
    sizes = {}
    for size in (1, 2, 4, 8):
        mesh = mesh_of(size, "keys")
        leaves, _ = packed(size, 2048 // size)
        attend = ring(mesh, jnp.array([0, 4096]))
        step = jax.jit(jax.grad(lambda *given, attend=attend: attend(*given)[0].sum(), argnums=(0, 1, 2)))
        placed = [jax.device_put(leaf, NamedSharding(mesh, PartitionSpec("keys"))) for leaf in leaves[:3]]
        plan: Any = step.lower(*placed, leaves[3]).compile().memory_analysis()
        sizes[size] = plan.temp_size_in_bytes + plan.output_size_in_bytes + plan.argument_size_in_bytes
    return sizes


# ---- devices in several processes


def check_processes() -> None:
    """Decode and ring attention over the devices of several processes have the results of one device.

    Each process compares the parts that it holds.
    """
    devices = np.array(jax.devices())
    mesh = Mesh(devices, ("keys",))
    random = np.random.default_rng(6)
    rows = random.normal(size=(len(LENS), max(LENS), 2 * KV_HEADS, WIDTH)).astype(np.float32)
    rule, kv_lens, edges = KvShard(len(devices), PAGE), np.array(LENS, np.int32), np.array([0, 1, 2, 2, 3], np.int32)
    q = random.normal(size=(3, HEADS, WIDTH)).astype(np.float32)
    cache, table = own_caches(rule, rows)

    def globally(array: np.ndarray, spec: PartitionSpec) -> jax.Array:
        return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])

    def decode(cache: Any, table: Any, q: Any, kv_lens: Any, edges: Any) -> Any:
        return rd.context_parallel_decode(q, cache, kv_lens, table, edges, axis_name="keys")

    given = [globally(cache, PartitionSpec("keys")), globally(table, PartitionSpec("keys"))]
    given += [globally(array, WHOLE) for array in (q, kv_lens, edges)]
    found = over_keys(mesh, decode, WHOLE)(*given)
    whole, whole_table = (jnp.asarray(array[0]) for array in own_caches(KvShard(1, PAGE), rows))
    expected = np.asarray(rj.ragged_paged_attention(jnp.asarray(q), whole, kv_lens, whole_table, edges))
    close(found.addressable_data(0), expected)
    leaves, packed_edges = packed(len(devices), 6)
    attend = jax.jit(ring(mesh, packed_edges))
    parts = [np.asarray(rd.zigzag_part(leaf, len(devices))) for leaf in leaves[:3]]
    out, _ = attend(*(globally(part, PartitionSpec("keys")) for part in parts), globally(np.asarray(leaves[3]), WHOLE))
    alone = rj.varlen_attention(*leaves[:3], packed_edges, packed_edges, causal=True, sinks=leaves[3])
    ordered = np.asarray(rd.zigzag_part(alone, len(devices)))
    for shard in out.addressable_shards:
        close(shard.data, ordered[shard.index])


def main(checks: list[str]) -> None:
    if PROCESSES > 1:
        jax.distributed.initialize(os.environ["COORDINATOR"], PROCESSES, int(os.environ["RANK"]))
    for name in checks:
        sys.stdout.write(json.dumps({name: globals()[f"check_{name}"]()}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
