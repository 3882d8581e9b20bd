"""Attention over several devices, using only the collectives and tensors of `torch.distributed`.

**Heads.** Importing this module tells DTensor how to divide each operator by heads. If the arguments are sharded over
heads, so are the results, and the ranks exchange nothing. Index arrays are replicated, as DTensors or as plain tensors.

**Positions.** `context_parallel_decode` and `context_parallel_mla_decode` attend to a KV cache whose positions are
divided among the ranks of a group, and exchange `(out, lse)` once. `context_parallel_varlen_attention` passes the keys
and values of packed sequences around a ring, forward and backward. Every sum is taken in the order of the ranks, so
results do not depend on timing.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ragged_attention import config, dispatch
from ragged_attention.calls import CALLS, Call, expect_bool
from ragged_attention.calls.context_parallel import Ranks, page_size_of
from ragged_attention.calls.fields import expect_lists
from ragged_attention.calls.sharding import (
    Heads,
    KvShard,
    expect_each_its_own_heads,
    expect_ring,
    heads_of_arguments,
    heads_of_results,
    is_sum_over_heads,
    zigzag_edges,
    zigzag_order,
    zigzag_pairs,
)
from ragged_attention.errors import InvalidInput
from ragged_attention.torch import merge_attention_states, varlen_attention, varlen_attention_backward
from ragged_attention.torch._operators import FRONT_END

__all__ = [
    "KvShard",
    "context_parallel_decode",
    "context_parallel_mla_decode",
    "context_parallel_varlen_attention",
    "zigzag_part",
    "zigzag_whole",
]

Group = dist.ProcessGroup | None

# ---- heads: how DTensor divides each operator

GRADIENTS = ("d_out", "d_lse", "d_logits")  # their placements come from autograd, all others from the caller


@dataclasses.dataclass(frozen=True, slots=True)
class _Division:
    """The division of one call: the mesh, and its dimensions over which heads are sharded."""

    mesh: DeviceMesh
    dims: frozenset[int]

    def placements(self, placement: Placement) -> tuple[Placement, ...]:
        """The given placement on the dimensions that divide heads; arrays are replicated on all others."""
        return tuple(placement if dim in self.dims else Replicate() for dim in range(self.mesh.ndim))


def _on_shards(
    record: type[Call], cls: Any, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
) -> Any:
    """Run an operator on DTensors: call it on this rank's shards, and make DTensors of its results."""
    values = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | (kwargs or {})
    heads = heads_of_arguments(record) | ({"out": Heads(-2, "H")} if record.TAKES_OUT else {})
    division = _divide(record, heads, values)
    _expect_lists_of_all(heads, values)
    local = {name: _local(record, name, value, heads.get(name), values, division) for name, value in values.items()}
    returned = func(**local)
    if returned is None:
        return None
    results = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    written = 1 if "out" in values and record.TAKES_OUT else 0  # the operator does not return a result written to `out`
    sources = heads_of_results(record, [3] * written + [result.ndim for result in results])[written:]
    wrapped = [
        DTensor.from_local(result, division.mesh, _placed(record, result, source, values, division), run_check=False)
        for result, source in zip(results, sources, strict=True)
    ]
    return type(returned)(wrapped) if isinstance(returned, (tuple, list)) else wrapped[0]


def _expect_lists_of_all(heads: Mapping[str, Heads], values: Mapping[str, Any]) -> None:
    """Check the number of lists of blocks over all ranks: a rank's only list may be a share, or serve all KV heads."""
    if values.get("selected") is None:
        return
    keys = "k" if "k" in values else "kv_pages"
    combined = keys == "kv_pages" and values["v_pages"] is None
    expect_lists("selected", values["selected"].shape[1], heads[keys].count(tuple(values[keys].shape), combined))


def _divide(record: type[Call], heads: Mapping[str, Heads], values: Mapping[str, Any]) -> _Division:
    """The mesh of a call's DTensors, and its dimensions that divide heads."""
    arrays = [
        (name, item) for name, value in values.items() for item in (value if isinstance(value, list) else [value])
    ]
    distributed = {name: array for name, array in arrays if isinstance(array, DTensor)}
    first, mesh = next((name, value.device_mesh) for name, value in distributed.items())
    for name, value in distributed.items():
        if value.device_mesh != mesh:
            sizes = f"{mesh.size()}, got one of size {value.device_mesh.size()}"
            raise InvalidInput(f"expected {name} on the mesh of {first}, of size {sizes}")
    dims = {
        dim
        for name, value in distributed.items()
        for dim, placement in enumerate(value.placements)
        if name in heads and placement.is_shard(value.ndim + heads[name].axis)
    }
    if dims:
        expect_each_its_own_heads(record, "replicate its arrays, as `tensor.redistribute` does")
    return _Division(mesh, frozenset(dims))


def _local(
    record: type[Call], name: str, value: Any, heads: Heads | None, values: Mapping[str, Any], division: _Division
) -> Any:
    """This rank's part of an argument."""
    if isinstance(value, (tuple, list)):
        return [_local(record, name, each, None, values, division) for each in value]
    if not isinstance(value, torch.Tensor):
        return value
    wanted = division.placements(Replicate())
    combined = name == "kv_pages" and values["v_pages"] is None  # pages with keys and values interleaved
    size = math.prod(division.mesh.size(dim) for dim in division.dims)
    if heads is not None and heads.are_divided(name, tuple(value.shape), size, combined):
        wanted = division.placements(Shard(value.ndim + heads.axis))
    if not isinstance(value, DTensor):
        if value.is_floating_point() and value.numel() != 1:
            raise InvalidInput(f"expected {name} to be a DTensor, as other arrays of the call are, got a Tensor")
        value = DTensor.from_local(value, division.mesh, division.placements(Replicate()), run_check=False)
    if value.placements == wanted:
        return value.to_local()
    written = ("out",) if record.TAKES_OUT else ()
    if record.WRITES:
        written = [flat.split()[-1] for name in record.WRITTEN for flat in record.KINDS[name].schema(name)]
    replicated = all(got in (want, Replicate()) for got, want in zip(value.placements, wanted, strict=True))
    if name not in GRADIENTS and (name in written or not replicated):
        expected, got = (", ".join(map(repr, placements)) for placements in (wanted, value.placements))
        raise InvalidInput(f"expected {name} placed as {expected}, as its heads are, got {got}")
    return value.redistribute(division.mesh, wanted).to_local()


def _placed(
    record: type[Call], result: torch.Tensor, source: tuple[str, Heads] | None, values: Mapping[str, Any],
    division: _Division,
) -> tuple[Placement, ...]:  # fmt: skip
    """The placements of a result; `source` is its entry in `heads_of_results`."""
    if source is None or result.shape == (0,):  # an empty tensor stands for an absent result
        return division.placements(Replicate())
    argument, heads = source
    if is_sum_over_heads(record, heads, values[argument].shape):
        return division.placements(Partial())
    return division.placements(Shard(result.ndim + heads.axis))


for _record in CALLS.values():
    for _overload in ("", ".out")[: 2 if _record.TAKES_OUT else 1]:
        torch.library.register_torch_dispatch(
            f"ragged_attention::{_record.OPERATION}{_overload}", DTensor, functools.partial(_on_shards, _record)
        )


# ---- positions: decode


def context_parallel_decode(
    q: torch.Tensor,
    kv_pages: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_lens: torch.Tensor,
    page_indices: torch.Tensor,
    cu_q_lens: torch.Tensor,
    num_seqs: int | torch.Tensor | None = None,
    *,
    group: Group = None,
    shard: KvShard | None = None,
    own_heads: bool = False,
    max_q_len: int | None = None,
    sm_scale: float | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    return_lse: bool = False,
    out_dtype: Any = None,
    backend: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal `ragged_paged_attention` of few queries over a KV cache whose positions are divided among ranks.

    Shapes use the letters of `ragged_paged_attention`. All ranks pass equal arguments, except for their pages.

    Args:
        q, kv_lens, cu_q_lens, num_seqs: as in `ragged_paged_attention`, for the whole batch: q [T, H, D]; kv_lens i32
            [S], which counts the keys of all ranks; and cu_q_lens i32 [S + 1].
        kv_pages: this rank's pages, as `ragged_paged_attention` takes them.
        page_indices: i32 [S, M], this rank's pages of each sequence. The pages hold the rank's positions in order,
            without gaps.
        group: the process group; None is the default one.
        shard: the rule that divides positions. By default, pages go to the ranks in rotation (`interleave` is the page
            size).
        own_heads: return only this rank's H / size heads, in the order of the ranks. An all-to-all of 1 / size of the
            data then replaces the all-gather. Use it if the same ranks divide the heads of the layer.
        max_q_len: 1 promises that no sequence has more than one query, which saves a gather of the page table.
        sinks: f32 [H]; they count once, in the merged result.
        sm_scale, soft_cap, k_scale, v_scale, out_dtype, backend, options: as in `ragged_paged_attention`.
        return_lse: also return the log-sum-exp over the keys of all ranks.

    Returns:
        out [T, H, D_v] (or [T, H / size, D_v]) of q's dtype or `out_dtype`, with equal bits on every rank and in every
        run; with `return_lse` also lse [T, H] float32. There is one exchange, of T * H * (D_v + 1) float32 per rank. A
        rank without keys of a sequence does no other work for that sequence. There is no gradient.

    Raises:
        InvalidInput: as `ragged_paged_attention`; also if the shard's size or rank differs from the group's, or if
            `own_heads` is True and the number of heads is not a multiple of the group's size. `validate="full"` adds an
            exchange that compares the ranks' rules and shapes of q.
        TypeError, Unsupported: as `ragged_paged_attention`.
        RuntimeError: an argument requires grad; a rank of the group is gone.
    """
    expect_bool("own_heads", own_heads)
    expect_bool("return_lse", return_lse)
    _refuse_gradient("context_parallel_decode", q, kv_pages, sinks)
    return _ranks(group, shard, kv_pages, q).decode(
        q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs, own_heads=own_heads, max_q_len=max_q_len,
        sm_scale=sm_scale, soft_cap=soft_cap, sinks=sinks, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse,
        out_dtype=out_dtype, backend=backend, options=options,
    )  # fmt: skip


def context_parallel_mla_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    page_indices: torch.Tensor,
    kv_lens: torch.Tensor | None = None,
    *,
    indices: torch.Tensor | None = None,
    topk_lens: torch.Tensor | None = None,
    group: Group = None,
    shard: KvShard | None = None,
    own_heads: bool = False,
    d_v: int = 512,
    sm_scale: float | None = None,
    causal: bool = False,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    cache_format: str | None = None,
    cache_layout: str | None = None,
    out_dtype: Any = None,
    backend: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`mla_decode`, dense or sparse, over a latent cache whose positions are divided among ranks.

    Shapes use the letters of `mla_decode`. All ranks pass equal arguments, except for their cache and pages.

    Args:
        q: [S, Q, H, d_qk], as `mla_decode` takes it.
        kv_cache: this rank's pages, in any format.
        page_indices: as in `context_parallel_decode`.
        kv_lens: i32 [S], lengths over all ranks, for dense calls, as in `mla_decode`.
        indices: i32 [S, Q, N], **positions** in each query's sequence, counted over all ranks, as an indexer returns
            them; they are not slots. They make the call sparse. Each rank reads the keys at its own positions, in the
            order of the list. Negative positions select nothing.
        topk_lens: i32 [S] or [S, Q], the lengths of the lists; later entries of `indices` are ignored.
        group, shard, own_heads, sinks: as in `context_parallel_decode`.
        d_v, sm_scale, causal, soft_cap, cache_format, cache_layout, out_dtype, backend, options: as in `mla_decode`.

    Returns:
        out [S, Q, H, d_v] (or H / size heads of it) of q's dtype or `out_dtype`, and lse [S, H, Q] float32, with equal
        bits on every rank and in every run. There is one exchange, of S * Q * H * (d_v + 1) float32 per rank. There
        is no gradient.

    Raises:
        InvalidInput, TypeError, Unsupported, RuntimeError: as `context_parallel_decode` and `mla_decode`.
    """
    expect_bool("own_heads", own_heads)
    _refuse_gradient("context_parallel_mla_decode", q, kv_cache, sinks)
    return _ranks(group, shard, kv_cache, q).mla_decode(
        q, kv_cache, page_indices, kv_lens, indices=indices, topk_lens=topk_lens, own_heads=own_heads,
        d_v=d_v, sm_scale=sm_scale, causal=causal, soft_cap=soft_cap, sinks=sinks, cache_format=cache_format,
        cache_layout=cache_layout, out_dtype=out_dtype, backend=backend, options=options,
    )  # fmt: skip


def _refuse_gradient(operation: str, *values: Any) -> None:
    arrays = [array for value in values for array in (value if isinstance(value, (tuple, list)) else (value,))]
    if torch.is_grad_enabled() and any(isinstance(array, torch.Tensor) and array.requires_grad for array in arrays):
        raise RuntimeError(f"{operation} has no gradient: it works on a KV cache, for inference")


def _ranks(group: Group, shard: KvShard | None, cache: Any, q: torch.Tensor) -> Ranks:
    """The processes of a group, which divide positions by the caller's rule. By default, they get pages in rotation."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    shard = shard or KvShard(size, page_size_of(cache))
    shard.expect(size, rank)
    if config.validates_values():
        _expect_agreement(group, {"shard.interleave": shard.interleave, "q.shape": list(q.shape)}, rank)

    def all_to_all(sent: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received

    return Ranks(
        shard=shard.at(rank), size_name="the group's size", operations=FRONT_END, namespace=torch,
        take_along_axis=torch.take_along_dim, all_to_all=all_to_all,
        arange=lambda stop, like: torch.arange(stop, dtype=torch.int32, device=like.device),
        all_gather=lambda sent: _all_gathered(sent, group).view(size, -1),
    )  # fmt: skip


def _expect_agreement(group: Group, facts: Mapping[str, Any], rank: int) -> None:
    """Raise `InvalidInput` if the ranks' rules or shapes differ, which would garble an exchange."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, dict(facts), group)
    for other, theirs in enumerate(gathered):
        for name, value in facts.items():
            if (got := theirs[name]) != value:
                raise InvalidInput(
                    f"expected {name}={value} on every rank, as on rank {rank}, got {got} on rank {other}"
                )


def _all_gathered(part: torch.Tensor, group: Group) -> torch.Tensor:
    """The parts of all ranks, concatenated."""
    whole = part.new_empty(dist.get_world_size(group) * part.shape[0], *part.shape[1:])
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch before 2.13 has the latter
    gather(whole, part, group=group)
    return whole


# ---- positions: packed sequences


def context_parallel_varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_lens: torch.Tensor,
    *,
    group: Group = None,
    causal: bool = True,
    sm_scale: float | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Self-attention of packed sequences whose tokens are divided among ranks in zigzag order.

    Each of `size` ranks has T / size rows of the T tokens, as `zigzag_part` returns them. Keys and values go around a
    ring: a rank sends them to the next rank while it works on them, and never holds more than two ranks' keys.

    Args:
        q, k, v: this rank's rows, [T / size, H, D], [T / size, K, D] and [T / size, K, D_v], float32, float16 or
            bfloat16.
        cu_lens: i32 [S + 1], prefix sums of the sequences' lengths over all ranks, equal on all ranks. If the last sum
            is less than T, the rows after it are padding.
        group: the process group; None is the default one.
        sinks: f32 [H], equal on all ranks. Their gradient counts this rank's queries only: sum it over the group, like
            the gradient of every replicated parameter.
        causal, sm_scale, soft_cap, return_lse, deterministic, backend, options: as in `varlen_attention`. Windows
            are not supported.

    Returns:
        out [T / size, H, D_v] of q's dtype, in the order of q; with `return_lse` also lse [T / size, H] float32.
        Like `varlen_attention`, it can be differentiated once. Partial results and gradients of keys are added in
        float32, in an order that the rank determines. A rank sends keys and values size - 1 times, and again for the
        gradient. It sends float32 gradients of keys and values size times.

    Raises:
        InvalidInput: as `varlen_attention`; also if the number of rows is odd, or differs between q, k and v.
        TypeError, Unsupported: as `varlen_attention`.
        RuntimeError: a rank of the group is gone.
    """
    expect_bool("return_lse", return_lse)
    expect_bool("causal", causal)
    expect_ring(q, k, v)
    keywords = {"sm_scale": sm_scale, "soft_cap": soft_cap, "deterministic": deterministic, "backend": backend}
    ring = _Ring(group, causal, keywords | {"options": options}, keywords | _gradients_request(backend))
    out, lse = _RingAttention.apply(q, k, v, sinks, cu_lens, ring)
    return (out, lse) if return_lse else out


def zigzag_part(whole: torch.Tensor, *, group: Group = None) -> torch.Tensor:
    """This rank's rows [T / size, ...] of an array over all tokens [T, ...], in zigzag order.

    The tokens are cut into 2 * size pieces. Rank r has the pieces r and 2 * size - 1 - r, which divides the work of
    causal attention evenly. Divide positions and labels in the same way.

    Raises:
        InvalidInput: T is not a multiple of 2 * size; pad the batch.
    """
    rank = dist.get_rank(group)
    pieces = zigzag_order(whole.shape[0], dist.get_world_size(group))[2 * rank : 2 * rank + 2]
    return torch.cat([whole[piece.start : piece.stop] for piece in pieces])


def zigzag_whole(part: torch.Tensor, *, group: Group = None) -> torch.Tensor:
    """The array over all tokens [T, ...] from the ranks' parts [T / size, ...] in zigzag order. It has no gradient."""
    size = dist.get_world_size(group)
    gathered = _all_gathered(part.detach().contiguous(), group)
    whole = torch.empty_like(gathered)
    pieces = zigzag_order(gathered.shape[0], size)
    for piece, rows in zip(pieces, gathered.split(len(pieces[0])), strict=True):
        whole[piece.start : piece.stop] = rows
    return whole


def _gradients_request(backend: Any) -> dict[str, Any]:
    """The backend and options for the gradient, read in the forward pass, since autograd runs in another thread."""
    operation = "varlen_attention_backward"
    names = config.requested(operation, dispatch.backends_offering(operation, backend))
    return {"backend": names, "options": dict(config.requested_options(operation))}


class _Ring:
    """The ranks of one call, in a ring. The forward and the backward pass share this object."""

    def __init__(self, group: Group, causal: bool, keywords: Mapping[str, Any], gradients: Mapping[str, Any]) -> None:
        self.group, self.causal = group, causal
        self.keywords, self.gradients = keywords, gradients  # the keywords of varlen_attention and of its gradient
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        world = dist.group.WORLD if group is None else group
        assert world is not None
        self.peers = [dist.get_global_rank(world, (self.rank + step) % self.size) for step in (1, -1)]

    def pass_on(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Send a tensor to the next rank. The returned function waits for the previous rank's tensor and returns it.

        The caller must keep the sent tensor alive until the returned function has finished.
        """
        received = torch.empty_like(tensor)
        send = dist.P2POp(dist.isend, tensor, self.peers[0], self.group)
        receive = dist.P2POp(dist.irecv, received, self.peers[1], self.group)
        works = dist.batch_isend_irecv([send, receive])

        def wait() -> torch.Tensor:
            for work in works:
                work.wait()
            return received

        return wait

    def steps(self, k: torch.Tensor, v: torch.Tensor, cu_lens: torch.Tensor) -> Iterator[tuple[Any, Any]]:
        """The two pieces (k, v) of each rank's keys, and the pairs of pieces that attend. This rank's keys come first.

        A pair is the index of a piece of this rank's queries, the index of a piece of the keys, the prefix sums within
        both pieces, and whether the mask is causal. Keys are sent on while the caller works on them.
        """
        rows = k.shape[0] // 2
        own, packed = zigzag_edges(cu_lens, self.rank, self.size, rows), torch.cat([k.flatten(), v.flatten()])
        for step in range(self.size):
            receive = self.pass_on(packed) if step < self.size - 1 else None
            source = (self.rank - step) % self.size
            theirs = zigzag_edges(cu_lens, source, self.size, rows)
            pairs = zigzag_pairs(self.rank, source, self.causal)
            yield _pieces(packed, k, v), [(i, j, own[i], theirs[j], causal) for i, j, causal in pairs]
            packed = packed if receive is None else receive()


def _pieces(packed: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The two pieces of keys and values in a message, in the shapes of `k` and `v`."""
    parts = packed[: k.numel()].view(k.shape), packed[k.numel() :].view(v.shape)
    return list(zip(*(part.chunk(2) for part in parts), strict=True))


class _RingAttention(torch.autograd.Function):
    """Attention over a ring of ranks."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None,
        cu_lens: torch.Tensor, ring: _Ring,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        queries = q.chunk(2)
        parts: list[Any] = [None, None]
        for keys, pairs in ring.steps(k, v, cu_lens):
            for i, j, q_edges, kv_edges, causal in pairs:
                k_piece, v_piece = keys[j]
                out, lse = varlen_attention(
                    queries[i], k_piece, v_piece, q_edges, kv_edges, causal=causal, return_lse=True, **ring.keywords
                )
                parts[i] = _added(parts[i], out.float(), lse)
        merged = [merge_attention_states([out], [lse], sinks=sinks, out_dtype=q.dtype) for out, lse in parts]
        out, lse = (torch.cat(pieces) for pieces in zip(*merged, strict=True))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, sinks, cu_lens, out, lse)
        ctx.ring = ring
        return out, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        q, k, v, sinks, cu_lens, out, lse = ctx.saved_tensors
        ring: _Ring = ctx.ring
        d_out, d_lse = gradients
        d_out = torch.zeros_like(out) if d_out is None else d_out
        d_lses = (None, None) if d_lse is None else d_lse.chunk(2)
        by_piece = list(zip(d_out.chunk(2), q.chunk(2), out.chunk(2), lse.chunk(2), d_lses, strict=True))
        dq = torch.zeros_like(q, dtype=torch.float32)
        d_sinks = None if sinks is None else torch.zeros_like(sinks)
        d_packed = torch.zeros(k.numel() + v.numel(), dtype=torch.float32, device=k.device)
        for step, (keys, pairs) in enumerate(ring.steps(k, v, cu_lens)):
            d_keys = _pieces(d_packed, k, v)
            for i, j, q_edges, kv_edges, causal in pairs:
                d_piece, q_piece, out_piece, lse_piece, d_lse_piece = by_piece[i]
                k_piece, v_piece = keys[j]
                *parts, d_sink, _ = varlen_attention_backward(
                    d_piece, q_piece, k_piece, v_piece, out_piece, lse_piece, q_edges, kv_edges, d_lse=d_lse_piece,
                    causal=causal, sinks=sinks, **ring.gradients,
                )  # fmt: skip
                for total, part in zip((dq.chunk(2)[i], *d_keys[j]), parts, strict=True):
                    total += part
                # Every call returns the whole sink gradient of its queries, so it is added once for each query piece.
                if d_sinks is not None and d_sink is not None and step == 0 and i == j:
                    d_sinks += d_sink
            if ring.size > 1:
                d_packed = ring.pass_on(d_packed)()
        dk, dv = d_packed[: k.numel()].view(k.shape), d_packed[k.numel() :].view(v.shape)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_sinks, None, None


def _added(before: Any, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The merged result `before`, which is None at first, merged with one more partial result."""
    return (out, lse) if before is None else merge_attention_states([before[0], out], [before[1], lse])
