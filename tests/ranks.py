"""Checks that several processes run together, as ranks of a gloo group; run as a script.

`python -m tests.ranks 4 heads decode` forks four ranks, which is quicker than starting new processes. All ranks run
`check_heads` and then `check_decode`. A check is a function `check_<name>(rank, size)` that raises if something is
wrong. The result of rank 0 is printed as JSON. If a rank fails, all ranks end.
"""

import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import ragged_attention as ra
from ragged_attention.calls import CALLS
from ragged_attention.calls.sharding import NEEDS_ALL_HEADS, Heads, KvShard, heads_of_arguments, heads_of_fields
from ragged_attention.errors import InvalidInput
from tests.divided import (
    HEADS,
    KV_HEADS,
    LENS,
    PAGE,
    TRAFFIC,
    WIDTH,
    divisible_arguments,
    random_ranges,
    shards_of,
    writing_calls,
)

# Typed as Any, because the checks call these functions in ways that their overloads do not list.
rt: Any = importlib.import_module("ragged_attention.torch")
rd: Any = importlib.import_module("ragged_attention.torch.distributed")
TIMEOUT = timedelta(seconds=60)


# ---- counters of operations, memory and traffic


class Watched(TorchDispatchMode):
    """Counts the operations of process groups and the peak bytes of new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.alive = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self.calls[func._schema.name.partition("::")[2]] += 1
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor):
                self._meet(tensor.untyped_storage())
        return results

    def _meet(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.alive += size
            self.most = max(self.most, self.alive)
            weakref.finalize(storage, self._part, key, size)

    def _part(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size


def written_bytes() -> int:
    """The bytes that this process has written by system calls so far, including those to sockets."""
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["wchar"])


def same(found: Any, expected: Any, label: str) -> None:
    assert torch.equal(found, expected), f"{label}: {(found.double() - expected.double()).abs().max()}"


def refused(match: str, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
    try:
        function(*arguments, **keywords)
    except (InvalidInput, RuntimeError) as error:
        message = str(error)
    else:
        message = "nothing"
    assert message == match, message


# ---- attention divided by heads


def operator_call(operation: str, size: int) -> tuple[dict[str, Any], list[Any]]:
    """An operation's arguments by name, and as its operator's flat list. `size` ranks can divide their heads."""
    arguments = {
        name: tuple(map(torch.from_numpy, value)) if isinstance(value, tuple)
        else torch.from_numpy(value) if hasattr(value, "shape") else value
        for name, value in divisible_arguments(operation, size).items()
    }  # fmt: skip
    return arguments, CALLS[operation].flatten(arguments)


def check_heads(rank: int, size: int) -> Any:
    """Every operator on DTensors sharded over heads gives the same bits as on one device, without communication.

    Results that are partial sums are only close. Returns the operations that have sharded results.
    """
    mesh = init_device_mesh("cpu", (size,))
    divided = []
    for operation, record in CALLS.items():
        arguments, flat = operator_call(operation, size)
        operator = getattr(torch.ops.ragged_attention, operation)
        heads = heads_of_arguments(record)
        names = [argument.name for argument in operator.default._schema.arguments]
        whole = [value.clone() if isinstance(value, torch.Tensor) else value for value in flat]
        parts = []
        for name, value in zip(names, flat, strict=False):
            if isinstance(value, torch.Tensor):
                where = heads.get(name) if operation not in NEEDS_ALL_HEADS else None
                combined = name == "kv_pages" and arguments["kv_pages"] is value
                many = where is not None and where.count(tuple(value.shape), combined) > 1
                placement = Shard(value.ndim + where.axis) if where is not None and many else Replicate()
                value = distribute_tensor(value, mesh, [placement], src_data_rank=None)
            parts.append(value)
        with ra.use_backend(batch_invariant=True):  # otherwise the number of heads may change the KV splits
            expected = operator(*whole, None, None)
            with Watched() as watched:
                found = operator(*parts, None, None)
        assert not watched.calls, (operation, watched.calls)
        several = isinstance(expected, tuple | list)
        pairs = (
            [] if expected is None else list(zip(*((x if several else [x]) for x in (found, expected)), strict=True))
        )
        if record.WRITES:  # compare the arguments that were written too
            pairs += [(part, value) for part, value in zip(parts, whole, strict=True) if isinstance(part, DTensor)]
        for index, (part, value) in enumerate(pairs):
            assert part.shape == value.shape, (operation, index, part.shape, value.shape)
            placed = part.placements[0]
            divided += [operation] * placed.is_shard()
            if placed.is_partial():
                torch.testing.assert_close(part.full_tensor(), value, rtol=1e-4, atol=1e-5)
            else:
                same(
                    part.to_local(), distribute_tensor(value, mesh, [placed], src_data_rank=None).to_local(), operation
                )
    return sorted(set(divided))


def check_gradients_over_heads(rank: int, size: int) -> None:
    """Autograd works through DTensors.

    A gradient is sharded like its input. The gradient of a shared KV head is a partial sum.
    """
    mesh = init_device_mesh("cpu", (size,))
    edges = torch.tensor([0, 7, 7, 12], dtype=torch.int32)
    for kv_heads in (size, 1):
        torch.manual_seed(1)
        leaves = [torch.randn(12, heads, 16) for heads in (2 * size, kv_heads, kv_heads)] + [torch.randn(2 * size)]
        weights = torch.randn(12, 2 * size, 16)
        places = [Shard(1), *[Shard(1) if kv_heads > 1 else Replicate()] * 2, Shard(0)]
        whole = [leaf.clone().requires_grad_() for leaf in leaves]
        parts = [
            distribute_tensor(leaf, mesh, [place], src_data_rank=None).requires_grad_()
            for leaf, place in zip(leaves, places, strict=True)
        ]
        scored = distribute_tensor(weights, mesh, [Replicate()], src_data_rank=None)
        ranges = torch.from_numpy(random_ranges(12, 7))
        replicated = distribute_tensor(ranges, mesh, [Replicate()], src_data_rank=None)
        for mask, own in (
            ({"causal": True},) * 2,
            ({"key_ranges": ranges},) * 2,
            ({"key_ranges": ranges}, {"key_ranges": replicated}),
        ):
            (rt.varlen_attention(*whole[:3], edges, edges, sinks=whole[3], **mask) * weights).sum().backward()
            with Watched() as watched:
                out = rt.varlen_attention(*parts[:3], edges, edges, sinks=parts[3], **own)
                (out * scored).sum().backward()
            assert not watched.calls, watched.calls
            for part, value in zip(parts, whole, strict=True):
                assert isinstance(part.grad, DTensor)
                gradient = part.grad.redistribute(mesh, [Replicate()]).to_local()
                torch.testing.assert_close(gradient, value.grad, rtol=1e-5, atol=1e-5)
    compiled = torch.compile(
        lambda q, k, v: rt.varlen_attention(q, k, v, edges, edges) * 2, fullgraph=True, backend="aot_eager"
    )
    expected = rt.varlen_attention(*(part.detach() for part in parts[:3]), edges, edges) * 2
    same(compiled(*(part.detach() for part in parts[:3])).to_local(), expected.to_local(), "compiled")


def check_meshes(rank: int, size: int) -> None:
    """Heads can be sharded over one dimension of a two-dimensional mesh, and over both."""
    mesh = init_device_mesh("cpu", (2, size // 2))
    edges = torch.tensor([0, 7, 12], dtype=torch.int32)
    torch.manual_seed(7)
    rows = [torch.randn(12, heads, 16) for heads in (2 * size, size, size)]
    expected = rt.varlen_attention(*rows, edges, edges)
    for places in ([Replicate(), Shard(1)], [Shard(1), Replicate()], [Shard(1), Shard(1)]):
        parts = [distribute_tensor(row, mesh, places, src_data_rank=None) for row in rows]
        with Watched() as watched:
            found = rt.varlen_attention(*parts, edges, edges)
        assert not watched.calls, watched.calls
        assert list(found.placements) == places
        same(found.to_local(), distribute_tensor(expected, mesh, places, src_data_rank=None).to_local(), str(places))


def check_writes_over_heads(rank: int, size: int) -> None:
    """`new_kv=` and `out=` on DTensors write to the rank's local memory."""
    mesh = init_device_mesh("cpu", (size,))
    arguments, _ = operator_call("ragged_paged_attention", size)
    tables = [arguments[name] for name in ("kv_lens", "page_indices", "cu_q_lens")]
    new = tuple(torch.randn(6, size, 16) for _ in "kv")
    pages = arguments["kv_pages"].clone()
    expected, pages = rt.ragged_paged_attention(arguments["q"], pages, *tables, new_kv=new)

    def divided(array: torch.Tensor, axis: int) -> Any:
        return distribute_tensor(array.clone(), mesh, [Shard(axis)], src_data_rank=None)

    q, own_pages, own_new = divided(arguments["q"], 1), divided(arguments["kv_pages"], 2), [divided(n, 1) for n in new]
    memory = divided(torch.full_like(expected, torch.nan), 1)
    found, written = rt.ragged_paged_attention(q, own_pages, *tables, new_kv=tuple(own_new), out=memory)
    assert found is memory
    assert written is own_pages
    same(memory.to_local(), divided(expected, 1).to_local(), "out")
    same(own_pages.to_local(), divided(pages, 2).to_local(), "pages")


def check_whole_caches(rank: int, size: int) -> list[str]:
    """Calls that write a cache give the same results on DTensors as on one device, with a divided or a whole cache.

    The ranks exchange nothing. Returns the operations that wrote a whole cache. Two ranks can run it.
    """
    mesh, whole = init_device_mesh("cpu", (size,)), []
    for operation, arguments, is_whole in writing_calls():
        record, function = CALLS[operation], getattr(rt, operation)

        def place(name: str, value: Any, record: Any = record, arguments: Any = arguments) -> Any:
            if isinstance(value, tuple):
                return tuple(place(name, part) for part in value)
            if not isinstance(value, np.ndarray):
                return value
            tensor, heads = torch.from_numpy(value.copy()), heads_of_fields(record).get(name)
            if name.endswith("_scale_pages"):
                heads = Heads(2 - tensor.ndim, "K")
            rows_of_latents = name in ("kv", "new_kv") and tensor.ndim == 2
            is_divided = heads is not None and not rows_of_latents and heads.are_divided(
                name, tuple(tensor.shape), size, name == "kv_pages"
            )  # fmt: skip
            placement = Shard(tensor.ndim + heads.axis) if heads is not None and is_divided else Replicate()
            return distribute_tensor(tensor, mesh, [placement], src_data_rank=None)

        placed = {name: place(name, value) for name, value in arguments.items()}
        single = tree_map(lambda v: torch.from_numpy(v.copy()) if isinstance(v, np.ndarray) else v, arguments)
        expected = function(**single)
        outs = ({}, {"out": _memory(placed["q"], expected[0])}) if "new_kv" in arguments else ({},)
        for out in outs:
            given = {name: place(name, value) for name, value in arguments.items()}
            with Watched() as watched:
                found = function(**given, **out)
            assert not watched.calls, (operation, watched.calls)
            for part, value in zip(tree_leaves(found), tree_leaves(expected), strict=True):
                local = distribute_tensor(value, mesh, part.placements, src_data_rank=None).to_local()
                torch.testing.assert_close(part.to_local(), local, rtol=1e-5, atol=1e-5)
            cache = tree_leaves(found)[-1]
            assert cache.placements[0].is_replicate() == is_whole, operation
            assert any(cache is value for value in tree_leaves(given)), operation
        whole += [operation] * is_whole
    return sorted(set(whole))


def _memory(q: Any, like: torch.Tensor) -> Any:
    """New memory for a result with the placements of the queries."""
    return distribute_tensor(torch.full_like(like, torch.nan), q.device_mesh, q.placements, src_data_rank=None)


def check_what_heads_refuse(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,))
    edges = torch.tensor([0, 5], dtype=torch.int32)

    def attend(q_heads: int, kv_heads: int, q_place: Any, kv_place: Any) -> Any:
        arrays = [torch.zeros(5, heads, 16) for heads in (q_heads, kv_heads, kv_heads)]
        places = [q_place, kv_place, kv_place]
        parts = [distribute_tensor(a, mesh, [p], src_data_rank=None) for a, p in zip(arrays, places, strict=True)]
        return rt.varlen_attention(*parts, edges, edges)

    odd, heads, what = size + 1, 4 * size, f"to be a multiple of the mesh's size = {size}, got {size + 1}"
    refused(f"expected num_q_heads of q {what}", attend, odd, 1, Shard(1), Replicate())
    refused(f"expected num_kv_heads of k {what}", attend, odd * size, odd, Shard(1), Replicate())
    message = "expected q placed as Shard(dim=1), as its heads are, got Shard(dim=0)"
    refused(message, attend, heads, heads, Shard(0), Shard(1))
    assert attend(heads, heads, Replicate(), Shard(1)).placements == (Shard(1),)  # replicated heads need no transfer
    one, two = (distribute_tensor(torch.zeros(5, heads, 16), mesh, [Shard(1)], src_data_rank=None) for _ in "ab")
    refused("expected v to be a DTensor, as other arrays of the call are, got a Tensor",
            rt.varlen_attention, one, two, torch.zeros(5, heads, 16), edges, edges)  # fmt: skip
    if size > 1:  # otherwise each rank would take its one local list for a list that all its heads share
        what = f"one list for all KV heads or one for each of num_kv_heads={heads}, got {size}"
        lists = {"selected": torch.zeros(5, size, 1, dtype=torch.int32), "block_size": 8}
        refused(f"expected selected to have {what}", rt.varlen_attention, one, two, two, edges, edges, **lists)
    alone = init_device_mesh("cpu", (size, 1), mesh_dim_names=("a", "b"))["b"]
    other = DTensor.from_local(torch.zeros(5, heads, 16), alone, [Shard(1)], run_check=False)
    refused(f"expected v on the mesh of q, of size {size}, got one of size 1",
            rt.varlen_attention, one, two, other, edges, edges)  # fmt: skip
    pages = distribute_tensor(torch.zeros(2, PAGE, 2 * size, 16), mesh, [Replicate()], src_data_rank=None)
    new = [distribute_tensor(torch.zeros(2, size, 16), mesh, [Shard(1)], src_data_rank=None) for _ in "kv"]
    refused("expected kv_pages placed as Shard(dim=2), as its heads are, got Replicate()",
            rt.write_kv_pages, *new, pages, torch.zeros(2, dtype=torch.int32))  # fmt: skip
    q = distribute_tensor(torch.zeros(2, size, 16), mesh, [Shard(1)], src_data_rank=None)
    weights = distribute_tensor(torch.zeros(2, size), mesh, [Shard(1)], src_data_rank=None)
    keys = distribute_tensor(torch.zeros(8, 16), mesh, [Replicate()], src_data_rank=None)
    ends = torch.full((2,), 8, dtype=torch.int32)
    refused("expected indexer_topk with all heads on each device, got q sharded over heads: replicate its arrays, as "
            "`tensor.redistribute` does",
            rt.indexer_topk, q, keys, weights, 3, starts=torch.zeros_like(ends), stops=ends)  # fmt: skip


# ---- caches divided by positions


def own_table(shard: KvShard) -> torch.Tensor:
    """A page table that is large enough for all positions of a rank, with pages in random order."""
    pages = -(-max(LENS) // PAGE) + 1
    generator = torch.Generator().manual_seed(shard.rank)
    return torch.randperm(len(LENS) * pages, generator=generator).reshape(len(LENS), pages).to(torch.int32)


def own_cache(shard: KvShard, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's pages [P, G, ...] of the rows [S, L, ...], with NaN in unused slots, and its page table."""
    table = own_table(shard)
    pages = torch.full((table.numel() * PAGE, *rows.shape[2:]), torch.nan)
    for seq, length in enumerate(LENS):
        positions = shard.local(torch.arange(length, dtype=torch.int32))[None]
        slots = rt.page_indices_to_slots(positions, table[seq : seq + 1], PAGE)[0]
        pages[slots[slots >= 0].long()] = rows[seq, :length][slots >= 0]
        assert int((slots >= 0).sum()) == int(shard.lengths(torch.tensor(length)))
    pages = pages.unflatten(0, (-1, PAGE))
    table[:, -1] = 10**6  # no call may look up this column
    return pages, table


def check_decode(rank: int, size: int) -> None:
    """Decode and drafts over the pages of several ranks give the result of one device.

    The results are bitwise equal to a merge of all ranks' partial results in the order of ranks.
    """
    torch.manual_seed(2)
    rows = torch.randn(len(LENS), max(LENS), 2 * KV_HEADS, WIDTH)
    sinks, kv_lens = torch.randn(HEADS), torch.tensor(LENS, dtype=torch.int32)
    whole, whole_table = own_cache(KvShard(1, PAGE, 0), rows)
    rule: Any = None
    pages: Any = None
    table: Any = None
    found: Any = None
    for lens_q in ((1, 1, 0, 1), (5, 2, 0, 1)):
        edges = torch.tensor([0, *torch.tensor(lens_q).cumsum(0)], dtype=torch.int32)
        q = torch.randn(int(edges[-1]) + 2, HEADS, WIDTH)  # the last two rows are padding
        keywords: dict[str, Any] = {"soft_cap": 20.0, "k_scale": 0.5, "v_scale": 2.0}
        expected = rt.ragged_paged_attention(
            q, whole, kv_lens, whole_table, edges, sinks=sinks, return_lse=True, **keywords
        )
        for rule in shards_of(size):
            pages, table = own_cache(rule.at(rank), rows)
            with Watched() as watched:
                found = rd.context_parallel_decode(
                    q, pages, kv_lens, table, edges, shard=rule, sinks=sinks, return_lse=True, **keywords,
                    max_q_len=1 if max(lens_q) == 1 else None,
                )  # fmt: skip
            assert watched.calls == {"_allgather_base_": 1}, watched.calls
            for part, value in zip(found, expected, strict=True):
                torch.testing.assert_close(part, value, rtol=1e-5, atol=1e-5)
            outs, lses = [], []
            for other in range(size):  # compute the parts of all ranks in this process
                pages, table = own_cache(rule.at(other), rows)
                tables = (kv_lens, table, edges)
                if max(lens_q) > 1:
                    tables = rd._ranks(None, None, pages, q).one_query_each(q, *tables, None)
                alone = rt.ragged_paged_attention(
                    q, pages, rule.at(other).lengths(tables[0]), *tables[1:], causal=False, return_lse=True,
                    max_q_len=1, **keywords,
                )  # fmt: skip
                outs.append(alone[0])
                lses.append(alone[1])
            merged = rt.merge_attention_states(outs, lses, sinks=sinks)
            for part, value in zip(found, merged, strict=True):
                same(part, value, f"{rule}")
        with Watched() as watched:
            own = rd.context_parallel_decode(
                q, *own_cache(rule.at(rank), rows)[:1], kv_lens, own_cache(rule.at(rank), rows)[1], edges, shard=rule,
                sinks=sinks, own_heads=True, out_dtype="bfloat16", **keywords,
            )  # fmt: skip
        assert watched.calls == {"alltoall_base_": 1}, watched.calls
        same(own, found[0].chunk(size, 1)[rank].to(torch.bfloat16), "own heads")


def check_half(rank: int, size: int) -> None:
    """Context-parallel decode works with bfloat16 queries and pages on a named backend."""
    torch.manual_seed(9)
    rows = torch.randn(len(LENS), max(LENS), 2 * KV_HEADS, WIDTH)
    kv_lens, q = torch.tensor(LENS, dtype=torch.int32), torch.randn(len(LENS), HEADS, WIDTH).bfloat16()
    edges = torch.arange(len(LENS) + 1, dtype=torch.int32)
    whole, whole_table = own_cache(KvShard(1, PAGE, 0), rows)
    pages, table = own_cache(KvShard(size, PAGE, rank), rows)
    for backend in ("numba", "eager"):
        found = rd.context_parallel_decode(
            q, pages.bfloat16(), kv_lens, table, edges, max_q_len=1, out_dtype="float32", backend=backend
        )
        expected = rt.ragged_paged_attention(q.float(), whole.bfloat16().float(), kv_lens, whole_table, edges)
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def check_scaled_queries(rank: int, size: int) -> None:
    """8-bit queries sharded over heads work with one scale and with one scale for each head."""
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(5)
    q, pages = (
        torch.randn(3, HEADS, WIDTH).to(torch.float8_e4m3fn),
        torch.randn(8, PAGE, 2 * KV_HEADS, WIDTH).bfloat16(),
    )
    tables = torch.tensor([6, 4, 3]).int(), torch.tensor([[0, 5], [2, 7], [1, 3]]).int(), torch.arange(4).int()
    parts = [distribute_tensor(array, mesh, [Shard(axis)], src_data_rank=None) for array, axis in ((q, 1), (pages, 2))]
    for scale in (0.5, torch.tensor(0.5), torch.linspace(0.25, 2, HEADS)):
        own: Any = scale
        if isinstance(scale, torch.Tensor):
            placement = Shard(0) if scale.ndim else Replicate()
            own = distribute_tensor(scale, mesh, [placement], src_data_rank=None)
        expected = rt.ragged_paged_attention(q, pages, *tables, q_scale=scale, backend="eager")
        found = rt.ragged_paged_attention(parts[0], parts[1], *tables, q_scale=own, backend="eager")
        mine = expected.chunk(size, 1)[rank]
        torch.testing.assert_close(found.to_local(), mine, rtol=1e-2, atol=1e-2)


def check_live_sequences(rank: int, size: int) -> None:
    """The table entries after the live sequences are never read, not even to find a query's sequence."""
    torch.manual_seed(8)
    rows = torch.randn(len(LENS), max(LENS), 2 * KV_HEADS, WIDTH)
    kv_lens, q = torch.tensor([41, 3, 10**9, -7], dtype=torch.int32), torch.randn(6, HEADS, WIDTH)
    edges = torch.tensor([0, 3, 4, -(10**9), 2], dtype=torch.int32)
    whole, whole_table = own_cache(KvShard(1, PAGE, 0), rows)
    pages, table = own_cache(KvShard(size, PAGE, rank), rows)
    for count in (2, torch.tensor([2], dtype=torch.int32)):
        expected = rt.ragged_paged_attention(q, whole, kv_lens, whole_table, edges, count)
        found = rd.context_parallel_decode(q, pages, kv_lens, table, edges, count)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert not found[4:].any()


def check_mla_decode(rank: int, size: int) -> None:
    """Latent decode over the caches of several ranks gives the result of one device.

    The cases are dense, causal, and sparse over lists of positions.
    """
    torch.manual_seed(3)
    rows = torch.randn(len(LENS), max(LENS), 1, 48)
    sinks, kv_lens = torch.randn(HEADS), torch.tensor(LENS, dtype=torch.int32)
    whole, whole_table = own_cache(KvShard(1, PAGE, 0), rows)
    rule: Any = None
    pages: Any = None
    table: Any = None
    found: Any = None
    q = torch.randn(len(LENS), 2, HEADS, 48)
    listed = torch.stack([torch.randint(-1, max(length, 1), (2, 9), dtype=torch.int32) for length in LENS])
    listed[2] = -1  # sequence 2 is empty, so its lists hold no positions
    slots = rt.page_indices_to_slots(listed, whole_table, PAGE)
    for lens in (None, torch.tensor([9, 4, 7, 0], dtype=torch.int32), torch.full((len(LENS), 2), 5, dtype=torch.int32)):
        expected = rt.mla_decode(q, whole, indices=slots, topk_lens=lens, d_v=32, sinks=sinks)
        for rule in shards_of(size):
            pages, table = own_cache(rule.at(rank), rows)
            found = rd.context_parallel_mla_decode(
                q, pages, table, indices=listed, topk_lens=lens, shard=rule, d_v=32, sinks=sinks
            )
            for part, value in zip(found, expected, strict=True):
                torch.testing.assert_close(part, value, rtol=1e-5, atol=1e-5)
    for causal in (False, True):
        expected = rt.mla_decode(q, whole, whole_table, kv_lens, causal=causal, d_v=32, sinks=sinks)
        for rule in shards_of(size):
            pages, table = own_cache(rule.at(rank), rows)
            with Watched() as watched:
                found = rd.context_parallel_mla_decode(
                    q, pages, table, kv_lens, causal=causal, shard=rule, d_v=32, sinks=sinks
                )
            assert watched.calls == {"_allgather_base_": 1}, watched.calls
            for part, value in zip(found, expected, strict=True):
                torch.testing.assert_close(part, value, rtol=1e-5, atol=1e-5)
        own, lse = rd.context_parallel_mla_decode(
            q, pages, table, kv_lens, causal=causal, shard=rule, d_v=32, sinks=sinks, own_heads=True
        )
        same(own, found[0].chunk(size, 2)[rank], "own heads")
        same(lse, found[1].chunk(size, 1)[rank], "own heads")
        out, lse = rd.context_parallel_mla_decode(q[:0], pages, table[:0], kv_lens[:0], causal=causal, d_v=32)
        assert out.shape == (0, 2, HEADS, 32)
        assert lse.shape == (0, HEADS, 2)


def check_what_positions_refuse(rank: int, size: int) -> None:
    pages = torch.zeros(8, PAGE, 2, WIDTH)
    tables = torch.tensor([3], dtype=torch.int32), torch.zeros(1, 3, dtype=torch.int32), torch.tensor([0, 1])
    tables = (*tables[:2], tables[2].to(torch.int32))
    q = torch.zeros(1, size + 1, WIDTH)

    def decode(shard: Any, q: Any = q, **keywords: Any) -> Any:
        return rd.context_parallel_decode(q, pages, *tables, shard=shard, **keywords)

    refused(f"expected a shard of a group of size {size}, got one of a group of size {size + 1}",
            decode, KvShard(size + 1, PAGE))  # fmt: skip
    other = (rank + 1) % size
    refused(f"expected the shard of rank {rank}, got that of rank {other}", decode, KvShard(size, PAGE, other))
    refused(f"expected num_q_heads of q to be a multiple of the group's size = {size}, got {size + 1}",
            decode, None, own_heads=True)  # fmt: skip
    with ra.use_backend(validate="full"):
        decode(KvShard(size, PAGE))
        own, theirs, other = (PAGE, 2 * PAGE, 1) if rank == 0 else (2 * PAGE, PAGE, 0)
        message = f"expected shard.interleave={own} on every rank, as on rank {rank}, got {theirs} on rank {other}"
        refused(message, decode, KvShard(size, own))
    for leaf in (q, pages):
        leaf.requires_grad_()
        refused("context_parallel_decode has no gradient: it works on a KV cache, for inference", decode, None)
        leaf.requires_grad_(False)
    rows = torch.zeros(3, 2, WIDTH)
    edges = torch.tensor([0, 3], dtype=torch.int32)
    attend = rd.context_parallel_varlen_attention
    refused("expected q.shape[0] to be a multiple of the pieces of a rank = 2, got 3", attend, rows, rows, rows, edges)
    refused("expected k.shape[0] = q.shape[0] = 2, got 3", attend, rows[:2], rows, rows, edges)
    double = rows[:2].double()
    refused("expected q.dtype to be float32 or float16 or bfloat16, got float64", attend, double, double, double, edges)
    refused(f"expected the number of tokens to be a multiple of 2 * the group's size = {2 * size}, got 3",
            rd.zigzag_part, rows)  # fmt: skip


# ---- context-parallel attention over packed sequences


def packed(size: int, pieces: int, heads: tuple[int, int] = (4, 2)) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The leaves q, k, v and sinks for `2 * size` pieces of `pieces` tokens, and the edges of all kinds of sequence."""
    torch.manual_seed(4)
    tokens = 2 * size * pieces
    leaves = [torch.randn(tokens, count, width) for count, width in ((heads[0], 16), (heads[1], 16), (heads[1], 8))]
    cuts = [
        0,
        1,
        1,
        pieces - 1,
        2 * pieces + 2,
        tokens - 3,
    ]  # one token, an empty sequence, sequences across pieces, padding
    return [*leaves, torch.randn(heads[0])], torch.tensor(cuts, dtype=torch.int32)


def check_varlen(rank: int, size: int) -> None:
    """Ring attention over packed sequences has the results and gradients of one device, and equal bits in each run."""
    leaves, edges = packed(size, 6)
    weights, lse_weights = torch.randn(len(leaves[0]), 4, 8), torch.randn(len(leaves[0]), 4)
    live = (torch.arange(len(leaves[0])) < edges[-1])[:, None]
    for causal in (True, False):
        whole = [leaf.clone().requires_grad_() for leaf in leaves]
        keywords: dict[str, Any] = {"soft_cap": 5.0, "deterministic": True, "return_lse": True}
        expected = rt.varlen_attention(*whole[:3], edges, edges, causal=causal, sinks=whole[3], **keywords)
        loss = (expected[0] * weights).sum() + torch.where(live, expected[1] * lse_weights, 0.0).sum()
        loss.backward()
        runs = []
        for _ in range(2):
            own = [rd.zigzag_part(leaf).requires_grad_() for leaf in leaves[:3]] + [leaves[3].clone().requires_grad_()]
            found = rd.context_parallel_varlen_attention(*own[:3], edges, causal=causal, sinks=own[3], **keywords)
            lse_part = torch.where(rd.zigzag_part(live), found[1] * rd.zigzag_part(lse_weights), 0.0)
            ((found[0] * rd.zigzag_part(weights)).sum() + lse_part.sum()).backward()
            gradients: list[Any] = [leaf.grad for leaf in own]
            dist.all_reduce(gradients[3])  # sinks are replicated, so their gradients are summed over ranks
            runs.append([*(part.detach() for part in found), *gradients])
        for one, two in zip(*runs, strict=True):
            same(one, two, "another run")
        wholes = [*(rd.zigzag_whole(part) for part in runs[0][:5]), runs[0][5]]
        for part, value in zip(
            wholes, [*expected, *(leaf.grad for leaf in whole if leaf.grad is not None)], strict=True
        ):
            torch.testing.assert_close(part, value.detach(), rtol=2e-5, atol=2e-5)
    order = rd.zigzag_part(torch.arange(4 * size))
    same(order, torch.tensor([2 * rank, 2 * rank + 1, 4 * size - 2 * rank - 2, 4 * size - 2 * rank - 1]), "zigzag")
    own = [rd.zigzag_part(leaf).requires_grad_() for leaf in leaves[:3]]
    # These tunables are for the forward pass only, because the backward pass has other options.
    tunables = {"backend": "numba", "options": {"block_kv": 32}}
    rd.context_parallel_varlen_attention(*own, edges, **tunables).sum().backward()
    with ra.use_backend("eager"):  # in force in this thread only: autograd runs in another thread
        rd.context_parallel_varlen_attention(*own, edges).sum().backward()
    half = [leaf.to(torch.bfloat16) for leaf in leaves[:3]]
    found = rd.zigzag_whole(rd.context_parallel_varlen_attention(*map(rd.zigzag_part, half), edges))
    expected = rt.varlen_attention(*half, edges, edges, causal=True)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


# ---- traffic and memory


def moved(work: Callable[[], Any]) -> int:
    """The bytes that this rank's process writes during `work`. The process prints nothing, so all are sent to ranks."""
    work()  # opens the connections
    dist.barrier()
    bytes_before = written_bytes()
    work()
    bytes_after = written_bytes()
    dist.barrier()
    return bytes_after - bytes_before


def check_traffic(rank: int, size: int) -> dict[str, int]:
    """The bytes that each kind of call sends, as counted by the operating system."""
    form = TRAFFIC
    q = torch.randn(form["tokens"], form["heads"], form["width"])
    lens = torch.full((form["tokens"],), 4, dtype=torch.int32)
    pages = torch.randn(form["tokens"], PAGE, 2 * form["kv_heads"], form["width"])
    table = torch.arange(form["tokens"], dtype=torch.int32)[:, None]
    edges = torch.arange(form["tokens"] + 1, dtype=torch.int32)
    rows = [torch.randn(2 * form["piece"], form[heads], form["width"]) for heads in ("heads", "kv_heads", "kv_heads")]
    whole = torch.tensor([0, 2 * form["piece"] * size], dtype=torch.int32)

    def decode(**keywords: Any) -> None:
        rd.context_parallel_decode(q, pages, lens, table, edges, max_q_len=1, **keywords)

    def step() -> None:
        own = [row.clone().requires_grad_() for row in rows]
        rd.context_parallel_varlen_attention(*own, whole).sum().backward()

    return {
        "decode": moved(decode),
        "decode_own_heads": moved(lambda: decode(own_heads=True)),
        "prefill": moved(lambda: rd.context_parallel_varlen_attention(*rows, whole)),
        "training": moved(step),
    }


def check_memory(rank: int, size: int) -> dict[str, int]:
    """The peak bytes of a rank, without its inputs, in a forward and a backward pass of 3072 tokens."""
    leaves, _ = packed(size, 1536 // size)
    own = [rd.zigzag_part(leaf).requires_grad_() for leaf in leaves[:3]]
    edges = torch.tensor([0, 3072], dtype=torch.int32)
    with Watched() as watched:
        rd.context_parallel_varlen_attention(*own, edges).sum().backward()
    return {"bytes": watched.most}


def check_death(rank: int, size: int) -> None:
    """If a rank dies in the middle of a call, the others raise an error and do not wait."""
    if rank == size - 1:
        for other in range(rank):  # each rank sends only after it has connected to all ranks
            dist.recv(torch.zeros(1), other)
        os._exit(3)
    dist.send(torch.zeros(1), size - 1)
    leaves, edges = packed(size, 4)
    began = time.monotonic()
    try:
        rd.context_parallel_varlen_attention(*(rd.zigzag_part(leaf) for leaf in leaves[:3]), edges)
        rd.context_parallel_decode(
            leaves[0][:1], torch.zeros(2, PAGE, 4, 16), edges[:1] + 2, edges[None, :2], torch.tensor([0, 1]).int()
        )
    except RuntimeError as error:
        sys.stdout.write(json.dumps({"rank": rank, "seconds": time.monotonic() - began, "said": str(error)}) + "\n")
        sys.stdout.flush()
        raise
    raise AssertionError("a rank died, and no error was raised")


def check_silence(rank: int, size: int) -> None:
    """If a rank never answers, the others raise an error after the group's timeout."""
    group = dist.new_group(timeout=timedelta(seconds=4))
    leaves, edges = packed(size, 4)
    if rank > 0:
        time.sleep(12)
        return
    began = time.monotonic()
    try:
        rd.context_parallel_varlen_attention(*(rd.zigzag_part(leaf) for leaf in leaves[:3]), edges, group=group)
    except RuntimeError as error:
        message = str(error)
    else:
        message = "nothing"
    assert "imed out" in message, message
    assert time.monotonic() - began < 10


# ---- the processes


def work(rank: int, size: int, checks: list[str], rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=TIMEOUT)
    try:
        for name in checks:
            result = globals()[f"check_{name}"](rank, size)
            if rank == 0:
                sys.stdout.write(json.dumps({name: result}) + "\n")
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)  # a regular exit could wait for ranks that wait for this rank
    sys.stdout.flush()
    dist.barrier()  # gloo aborts ranks that still communicate with a rank that has left
    dist.destroy_process_group()


def main(size: int, checks: list[str]) -> int:
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=work, args=(rank, size, checks, f"{folder}/ranks")) for rank in range(size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    return max(abs(process.exitcode or 0) for process in ranks)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
