"""Attention over several devices, using only the collectives of `jax.shard_map`.

**Heads.** `over_heads` divides the heads of any operation over an axis of a mesh, under `jit` and for arrays with a
`NamedSharding`. The devices exchange nothing except sums over heads, which few operations have.

**Positions.** Within a `jax.shard_map` of the caller, `context_parallel_decode` and `context_parallel_mla_decode`
attend to a KV cache whose positions are divided among devices, and exchange `(out, lse)` once.
`context_parallel_varlen_attention` passes the keys and values of packed sequences around a ring, forward and backward.
Every sum is taken in the order of the ranks.

A rank is a device's index along the axis, and the group's size is the size of the axis.
"""

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ragged_attention import dispatch
from ragged_attention.calls import CALLS, Call, expect_bool, is_array
from ragged_attention.calls.context_parallel import Ranks, page_size_of
from ragged_attention.calls.paged import with_scale_pages
from ragged_attention.calls.sharding import (
    WITHOUT_HEADS,
    Heads,
    KvShard,
    expect_each_its_own_heads,
    expect_ring,
    heads_of_fields,
    heads_of_results,
    is_sum_over_heads,
    zigzag_edges,
    zigzag_order,
    zigzag_pairs,
)
from ragged_attention.errors import InvalidInput
from ragged_attention.jax import merge_attention_states, varlen_attention, varlen_attention_backward
from ragged_attention.jax._launcher import device_facts
from ragged_attention.jax._lower import FRONT_END, default_platform, expect_held, held_by_jax, to_jax
from ragged_attention.jax_shared.axes import as_varied_as, fori_loop, varied_axes, varying

__all__ = [
    "KvShard",
    "context_parallel_decode",
    "context_parallel_mla_decode",
    "context_parallel_varlen_attention",
    "over_heads",
    "zigzag_part",
    "zigzag_whole",
]

AxisName = str | tuple[str, ...]
Operation = TypeVar("Operation", bound=Callable[..., Any])

# ---- heads


def over_heads(operation: Operation, axis_name: AxisName, *, mesh: jax.sharding.Mesh | None = None) -> Operation:
    """An operation of `ragged_attention.jax` with its heads divided over an axis of a mesh.

    Args:
        operation: a public function, such as `ragged_paged_attention`.
        axis_name: the axis, or axes, of the mesh that divide heads.
        mesh: None means the current mesh (`jax.set_mesh`).

    Returns:
        a function of the operation's arguments, which are arrays with all heads. Queries, caches, sinks, scales per KV
        head and lists of blocks per KV head are divided by heads, and so are the results. Other index arrays are
        replicated. If the arrays are already sharded in this way, devices exchange only sums over heads: the logits of
        an indexer, and the gradient of a single KV head that serves all query heads. Under `batch_invariant=True` the
        bits are those of one device; otherwise a kernel may choose other KV splits for fewer heads. A cache with a
        single KV head, such as a latent cache, is replicated. If the call writes such a cache (`new_kv`), each device
        writes all new rows to its own copy, and the returned cache is replicated too.

    Raises (when called):
        InvalidInput: the number of heads is not a multiple of the axis's size; the operation needs all heads
            (`indexer_topk`, `attention_target`), or has none.
        Every error of the operation.
    """
    record = CALLS[operation.__name__]
    signature = inspect.signature(operation)
    absent = {name: parameter.default for name, parameter in signature.parameters.items()}
    fields = heads_of_fields(record)
    if not fields or record.OPERATION in WITHOUT_HEADS:
        raise InvalidInput(f"expected an operation with heads, got {record.OPERATION}")

    @functools.wraps(operation)
    def divided(*arguments: Any, **keywords: Any) -> Any:
        expect_each_its_own_heads(record, "call it without over_heads, on arrays that each device has whole")
        given = signature.bind(*arguments, **keywords).arguments
        if "k_scale_pages" in signature.parameters:
            given = with_scale_pages(absent | given)
        call = FRONT_END.call_of(operation.__name__, absent | given)
        given = {name: held_by_jax(call, name, to_jax(value)) for name, value in given.items()}
        arrays = {name: value for name, value in given.items() if any(map(is_array, jax.tree.leaves(value)))}
        others = {name: value for name, value in given.items() if name not in arrays}
        current = jax.sharding.get_abstract_mesh() if mesh is None else mesh
        axes = (axis_name,) if isinstance(axis_name, str) else axis_name
        size = math.prod(current.shape[axis] for axis in axes)
        specs = {name: _specs(fields.get(name), name, value, size, axis_name) for name, value in arrays.items()}
        shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), arrays)
        whole = jax.eval_shape(lambda arrays: operation(**others, **arrays), shapes)
        summed, out_specs = _of_results(record, whole, arrays, specs, axis_name)

        def local(arrays: dict[str, Any]) -> Any:
            leaves, structure = jax.tree.flatten(operation(**others, **arrays))
            leaves = [lax.psum(leaf, axis_name) if sums else leaf for leaf, sums in zip(leaves, summed, strict=True)]
            return jax.tree.unflatten(structure, leaves)

        if getattr(current, "explicit_axes", ()):  # for other axes, jax moves the arrays itself
            arrays = jax.tree.map(
                lambda array, spec: jax.sharding.reshard(array, NamedSharding(current, spec)), arrays, specs
            )
        # `check_vma` supports neither Pallas kernels, nor calls that return divided results and a replicated cache.
        without_pallas = device_facts(default_platform()).why_unavailable("pallas") is not None
        checks = without_pallas and not (_writes(record, arrays) and PartitionSpec() in jax.tree.leaves(out_specs))
        return jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=out_specs, check_vma=checks)(arrays)

    return divided  # type: ignore[return-value]


SCALE_PAGES = ("k_scale_pages", "v_scale_pages")  # [P, G, K] or [P, G, K, n]


def _writes(record: type[Call], arrays: Mapping[str, Any]) -> bool:
    """Whether a call with these arrays writes its cache, which is then its last result."""
    return record.WRITES or "new_kv" in arrays


def _specs(heads: Heads | None, name: str, value: Any, size: int, axis_name: AxisName) -> Any:
    """The partition specs of an argument's arrays."""
    combined = name == "kv_pages" and is_array(value)

    def spec(array: Any) -> PartitionSpec:
        own = Heads(2 - len(array.shape), "K") if name in SCALE_PAGES else heads
        without_heads = name in ("kv", "new_kv") and len(array.shape) == 2  # latents without a head axis
        if own is None or without_heads or not own.are_divided(name, array.shape, size, combined):
            return PartitionSpec()
        axis = len(array.shape) + own.axis
        return PartitionSpec(*[None] * axis, axis_name)

    return jax.tree.map(spec, value)


def _of_results(
    record: type[Call], whole: Any, arrays: Mapping[str, Any], specs: Mapping[str, Any], axis_name: AxisName
) -> tuple[list[bool], Any]:
    """Whether each result is a sum over devices, and the partition specs of the results."""
    leaves, structure = jax.tree.flatten(whole)
    written = (record.CACHE, *SCALE_PAGES) if _writes(record, arrays) else ()
    pages = [leaf for name in written for leaf in jax.tree.leaves(specs.get(name))]
    attended = leaves[: len(leaves) - len(pages)]
    sources = heads_of_results(record, [len(leaf.shape) for leaf in attended])
    if record.OPERATION.endswith("_backward"):
        sources = [source for source, result in zip(sources, whole, strict=True) if result is not None]
    summed, divided = [], []
    for leaf, source in zip(attended, sources, strict=False):
        name, heads = source if source is not None else ("", Heads(-1, "H"))
        sums = source is not None and is_sum_over_heads(record, heads, arrays[name].shape)
        summed.append(sums)
        axis = len(leaf.shape) + heads.axis
        divided.append(PartitionSpec() if sums or source is None else PartitionSpec(*[None] * axis, axis_name))
    return [*summed, *[False] * len(pages)], jax.tree.unflatten(structure, [*divided, *pages])


# ---- positions: decode


def context_parallel_decode(
    q: jax.Array,
    kv_pages: jax.Array | tuple[jax.Array, jax.Array],
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: int | jax.Array | None = None,
    *,
    axis_name: AxisName,
    shard: KvShard | None = None,
    own_heads: bool = False,
    max_q_len: int | None = None,
    sm_scale: float | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: float | jax.Array | None = None,
    v_scale: float | jax.Array | None = None,
    return_lse: bool = False,
    out_dtype: Any = None,
    backend: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Causal `ragged_paged_attention` of few queries over a KV cache whose positions are divided among devices.

    Shapes use the letters of `ragged_paged_attention`. Call it within `jax.shard_map`, on every device of the axis. All
    arguments must be equal on all devices, except the device's pages.

    Args:
        q, kv_lens, cu_q_lens, num_seqs: as in `ragged_paged_attention`, for the whole batch: q [T, H, D]; kv_lens i32
            [S], which counts the keys of all devices; and cu_q_lens i32 [S + 1].
        kv_pages: this device's pages, as `ragged_paged_attention` takes them.
        page_indices: i32 [S, M], this device's pages of each sequence, as indices into its `kv_pages`. The pages hold
            the device's positions in order, without gaps.
        axis_name: the axis, or axes, that divide positions.
        shard: the rule that divides positions; its rank is None. By default, pages go to the devices in rotation
            (`interleave` is the page size).
        own_heads: return only this device's H / size heads, in order. An all-to-all of 1 / size of the data then
            replaces the all-gather. Use it if the same axis divides the heads of the layer.
        max_q_len: 1 promises that no sequence has more than one query, which saves a gather of the page table.
        sinks: f32 [H]; they count once, in the merged result.
        sm_scale, soft_cap, k_scale, v_scale, out_dtype, backend, options: as in `ragged_paged_attention`.
        return_lse: also return the log-sum-exp over the keys of all devices.

    Returns:
        out [T, H, D_v] (or [T, H / size, D_v]) of q's dtype or `out_dtype`, with equal bits on every device; with
        `return_lse` also lse [T, H] float32. There is one exchange, of T * H * (D_v + 1) float32 per device. There is
        no gradient. jax does not know that the results of all devices are equal: use `check_vma=False`, or an axis in
        `out_specs`.

    Raises:
        InvalidInput: as `ragged_paged_attention`; also if the shard has a rank, if its size differs from the axis's, or
            if `own_heads` is True and the number of heads is not a multiple of the axis's size.
        TypeError, Unsupported: as `ragged_paged_attention`.
    """
    expect_bool("own_heads", own_heads)
    expect_bool("return_lse", return_lse)
    expect_held(
        q=q, kv_pages=kv_pages, kv_lens=kv_lens, page_indices=page_indices, cu_q_lens=cu_q_lens, num_seqs=num_seqs,
        sinks=sinks, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    return _ranks(axis_name, shard, kv_pages).decode(
        q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs, own_heads=own_heads, max_q_len=max_q_len,
        sm_scale=sm_scale, soft_cap=soft_cap, sinks=to_jax(sinks), k_scale=k_scale, v_scale=v_scale,
        return_lse=return_lse, out_dtype=out_dtype, backend=backend, options=options,
    )  # fmt: skip


def context_parallel_mla_decode(
    q: jax.Array,
    kv_cache: jax.Array,
    page_indices: jax.Array,
    kv_lens: jax.Array | None = None,
    *,
    axis_name: AxisName,
    indices: jax.Array | None = None,
    topk_lens: jax.Array | None = None,
    shard: KvShard | None = None,
    own_heads: bool = False,
    d_v: int = 512,
    sm_scale: float | None = None,
    causal: bool = False,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    cache_format: str | None = None,
    cache_layout: str | None = None,
    out_dtype: Any = None,
    backend: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`mla_decode`, dense or sparse, over a latent cache whose positions are divided among devices.

    Shapes use the letters of `mla_decode`. Call it within `jax.shard_map`, on every device of the axis. All arguments
    must be equal on all devices, except the device's cache and pages.

    Args:
        q: [S, Q, H, d_qk], as `mla_decode` takes it.
        kv_cache: this device's pages, in any format.
        page_indices: as in `context_parallel_decode`.
        kv_lens: i32 [S], lengths over all devices, for dense calls, as in `mla_decode`.
        indices: i32 [S, Q, N], **positions** in each query's sequence, counted over all devices, as an indexer returns
            them; they are not slots. They make the call sparse. Each device reads the keys at its own positions, in
            the order of the list. Negative positions select nothing.
        topk_lens: i32 [S] or [S, Q], the lengths of the lists; later entries of `indices` are ignored.
        axis_name, shard, own_heads, sinks: as in `context_parallel_decode`.
        d_v, sm_scale, causal, soft_cap, cache_format, cache_layout, out_dtype, backend, options: as in `mla_decode`.

    Returns:
        out [S, Q, H, d_v] (or H / size heads of it) of q's dtype or `out_dtype`, and lse [S, H, Q] float32, with equal
        bits on every device. There is one exchange, of S * Q * H * (d_v + 1) float32 per device. There is no gradient.

    Raises:
        InvalidInput, TypeError, Unsupported: as `context_parallel_decode` and `mla_decode`.
    """
    expect_bool("own_heads", own_heads)
    expect_held(
        q=q, kv_cache=kv_cache, page_indices=page_indices, kv_lens=kv_lens, indices=indices, topk_lens=topk_lens,
        sinks=sinks,
    )  # fmt: skip
    return _ranks(axis_name, shard, kv_cache).mla_decode(
        q, kv_cache, page_indices, kv_lens, indices=indices, topk_lens=topk_lens,
        own_heads=own_heads, d_v=d_v, sm_scale=sm_scale, causal=causal, soft_cap=soft_cap, sinks=to_jax(sinks),
        cache_format=cache_format, cache_layout=cache_layout, out_dtype=out_dtype, backend=backend, options=options,
    )  # fmt: skip


def _ranks(axis_name: AxisName, shard: KvShard | None, cache: Any) -> Ranks:
    """The devices of an axis, which divide positions by the caller's rule. By default, pages go to them in rotation."""
    size = lax.axis_size(axis_name)
    shard = shard or KvShard(size, page_size_of(cache))
    shard.expect(size, None)
    if shard.rank is not None:
        raise InvalidInput(f"expected shard.rank=None in jax, where each device has its own, got {shard.rank}")
    return Ranks(
        shard=shard.at(lax.axis_index(axis_name)), size_name="the axis's size", operations=FRONT_END, namespace=jnp,
        take_along_axis=jnp.take_along_axis, arange=lambda stop, like: jnp.arange(stop, dtype=jnp.int32),
        all_gather=lambda sent: lax.all_gather(sent, axis_name),
        all_to_all=lambda sent: lax.all_to_all(sent, axis_name, 0, 0),
    )  # fmt: skip


# ---- positions: packed sequences


def context_parallel_varlen_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cu_lens: jax.Array,
    *,
    axis_name: AxisName,
    causal: bool = True,
    sm_scale: float | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Self-attention of packed sequences whose tokens are divided among devices in zigzag order.

    Call it within `jax.shard_map`. Each of `size` devices has T / size rows of the T tokens, in the order of
    `zigzag_part`. Keys and values go around a ring: a device sends them to the next device while it works on them.

    Args:
        q, k, v: this device's rows, [T / size, H, D], [T / size, K, D] and [T / size, K, D_v], float32, float16 or
            bfloat16.
        cu_lens: i32 [S + 1], prefix sums of the sequences' lengths over all devices, equal on all devices. If the last
            sum is less than T, the rows after it are padding.
        axis_name: the axis that divides tokens.
        sinks: f32 [H], equal on all devices.
        causal, sm_scale, soft_cap, return_lse, deterministic, backend, options: as in `varlen_attention`. Windows
            are not supported.

    Returns:
        out [T / size, H, D_v] of q's dtype, in the order of q; with `return_lse` also lse [T / size, H] float32.
        Like `varlen_attention`, it can be differentiated once. Partial results and gradients of keys are added in
        float32, in an order that the rank determines. A device sends keys and values size - 1 times, and again for the
        gradient. It sends float32 gradients of keys and values size times.

    Raises:
        InvalidInput: as `varlen_attention`; also if the number of rows is odd, or differs between q, k and v.
        TypeError, Unsupported: as `varlen_attention`.
    """
    expect_bool("return_lse", return_lse)
    expect_bool("causal", causal)
    expect_held(q=q, k=k, v=v, sinks=sinks, cu_lens=cu_lens)
    expect_ring(q, k, v)
    keywords = {"sm_scale": sm_scale, "soft_cap": soft_cap, "deterministic": deterministic, "backend": backend}
    gradients = keywords | {"backend": dispatch.backends_offering("varlen_attention_backward", backend)}
    ring = _Ring(axis_name, causal, keywords | {"options": options}, gradients)

    @jax.custom_vjp
    def attend(q: Any, k: Any, v: Any, sinks: Any, cu_lens: Any) -> Any:
        return ring.forward(q, k, v, sinks, cu_lens)

    def save(*given: Any) -> Any:
        results = attend(*given)
        return results, (*given, *results)

    attend.defvjp(save, ring.backward)
    out, lse = attend(q, k, v, sinks, cu_lens)
    return (out, lse) if return_lse else out


def zigzag_part(whole: jax.Array, size: int) -> jax.Array:
    """Rows of all tokens [T, ...] in zigzag order: first the T / size rows of the first device, and so on.

    The tokens are cut into 2 * size pieces. Rank r has the pieces r and 2 * size - 1 - r, which divides the work of
    causal attention evenly. Call this function outside `jax.shard_map`, whose spec then divides the first axis. Reorder
    positions and labels in the same way.

    Raises:
        InvalidInput: T is not a multiple of 2 * size; pad the batch.
    """
    return jnp.concatenate([whole[rows.start : rows.stop] for rows in zigzag_order(whole.shape[0], size)])


def zigzag_whole(parts: jax.Array, size: int) -> jax.Array:
    """The inverse of `zigzag_part`: rows [T, ...] in the order of the tokens."""
    order = zigzag_order(parts.shape[0], size)
    pieces = sorted(zip(order, jnp.split(parts, len(order)), strict=True), key=lambda pair: pair[0].start)
    return jnp.concatenate([piece for _, piece in pieces])


Keys = tuple[jax.Array, jax.Array]


class _Ring:
    """The forward and the backward pass of one attention call over a ring of devices.

    A device has two pieces of rows, so its arrays are [2, rows of a piece, ...] here.
    """

    def __init__(self, axis_name: AxisName, causal: bool, keywords: Any, gradients: Any) -> None:
        self.axis_name, self.causal = axis_name, causal
        self.keywords, self.gradients = keywords, gradients  # the keywords of varlen_attention and of its gradient
        self.size = lax.axis_size(axis_name)

    @property
    def rank(self) -> jax.Array:
        return lax.axis_index(self.axis_name)

    def pass_on(self, arrays: Any) -> Any:
        """Send arrays to the next device, and return those of the previous device."""
        routes = [(rank, (rank + 1) % self.size) for rank in range(self.size)]
        return jax.tree.map(lambda array: lax.ppermute(array, self.axis_name, routes), arrays)

    def around(self, attend: Callable[..., Any], keys: Keys, state: Any, followers: Any) -> tuple[Any, Any]:
        """The state and the followers after `attend(source, own, keys, state, followers)` for the keys of all devices.

        A device's own keys come first. Keys are sent on size - 1 times, each time while `attend` uses them. `followers`
        are arrays that belong to the keys, such as their gradients. They are sent on after each call of `attend`, so in
        the end they return to the device that owns the keys.
        """
        work = functools.partial(attend, self.rank, True)
        axes = varied_axes((keys, self.rank)) | varied_axes(jax.eval_shape(work, keys, state, followers))
        state, followers = varying((state, followers), axes)
        if self.size == 1:
            return work(keys, state, followers)

        def step(index: Any, own: bool, keys: Keys, state: Any, followers: Any) -> tuple[Keys, Any, Any]:
            next_keys = self.pass_on(keys)
            state, followers = attend((self.rank - index) % self.size, own, keys, state, followers)
            return next_keys, state, self.pass_on(followers)

        carried = step(0, True, keys, state, followers)
        if self.size > 2:
            carried = fori_loop(1, self.size - 1, lambda index, carried: step(index, False, *carried), carried)
        state, followers = attend((self.rank + 1) % self.size, False, *carried)
        return state, self.pass_on(followers)

    def pairs(self, source: Any, own: bool, cu_lens: jax.Array, rows: int) -> list[tuple[Any, ...]]:
        """The pairs of a query piece of this device and a key piece of `source` that attend.

        Each pair has the indices of the two pieces, the prefix sums within them, and whether the mask is causal. The
        pairs are those of `zigzag_pairs`, computed on the device: only there it is known whether `source` comes
        earlier.
        """
        pairs: list[tuple[Any, Any, bool]] = zigzag_pairs(0, 0, self.causal)
        if self.causal and not own:
            later = (source > self.rank).astype(jnp.int32)
            pairs = [(1, 0, False), (later, later, False)]
        mine, theirs = (jnp.stack(zigzag_edges(cu_lens, rank, self.size, rows)) for rank in (self.rank, source))
        return [(i, j, _at(mine, i), _at(theirs, j), causal) for i, j, causal in pairs]

    def forward(self, q: Any, k: Any, v: Any, sinks: Any, cu_lens: Any) -> tuple[jax.Array, jax.Array]:
        q, k, v = map(_halves, (q, k, v))

        def attend(source: Any, own: bool, keys: Keys, state: Any, followers: Any) -> Any:
            for i, j, q_edges, kv_edges, causal in self.pairs(source, own, cu_lens, q.shape[1]):
                out, lse = varlen_attention(
                    _at(q, i), _at(keys[0], j), _at(keys[1], j), q_edges, kv_edges, causal=causal, return_lse=True,
                    **self.keywords,
                )  # fmt: skip
                before, before_lse = (_at(each, i) for each in state)
                merged = merge_attention_states([before, out.astype(jnp.float32)], [before_lse, lse])
                state = tuple(each.at[i].set(part) for each, part in zip(state, merged, strict=True))
            return state, followers

        out = jnp.zeros((*q.shape[:-1], v.shape[-1]), jnp.float32)
        (out, lse), _ = self.around(attend, (k, v), (out, jnp.full(q.shape[:-1], -jnp.inf, jnp.float32)), ())
        return merge_attention_states([_joined(out)], [_joined(lse)], sinks=sinks, out_dtype=q.dtype)

    def backward(self, saved: Any, cotangents: Any) -> Any:
        given, (d_out, d_lse) = saved[:5], cotangents
        sinks, cu_lens = given[3:]
        q, k, v, out, lse, d_out, d_lse = map(_halves, (*given[:3], *saved[5:], d_out, d_lse))

        def attend(source: Any, own: bool, keys: Keys, state: Any, followers: Any) -> Any:
            (dq, d_sinks), (dk, dv) = state, followers
            for i, j, q_edges, kv_edges, causal in self.pairs(source, own, cu_lens, q.shape[1]):
                dq_part, dk_part, dv_part, d_sink, _ = varlen_attention_backward(
                    _at(d_out, i), _at(q, i), _at(keys[0], j), _at(keys[1], j), _at(out, i), _at(lse, i), q_edges,
                    kv_edges, d_lse=_at(d_lse, i), causal=causal, sinks=sinks, **self.gradients,
                )  # fmt: skip
                dq, dk, dv = dq.at[i].add(dq_part), dk.at[j].add(dk_part), dv.at[j].add(dv_part)
                # Every call returns the whole sink gradient of its queries, so it is added once for each query piece.
                if sinks is not None and own and i == j:
                    d_sinks += d_sink
            return (dq, d_sinks), (dk, dv)

        zeros = [jnp.zeros(each.shape, jnp.float32) for each in (q, k, v)]
        state = zeros[0], None if sinks is None else jnp.zeros_like(sinks)
        (dq, d_sinks), (dk, dv) = self.around(attend, (k, v), state, tuple(zeros[1:]))
        gradients = [*(_joined(each).astype(q.dtype) for each in (dq, dk, dv)), d_sinks]
        pairs = zip(gradients, given[:4], strict=True)
        return *(None if gradient is None else as_varied_as(gradient, like) for gradient, like in pairs), None


def _halves(array: jax.Array) -> jax.Array:
    return array.reshape(2, -1, *array.shape[1:])


def _joined(pieces: jax.Array) -> jax.Array:
    return pieces.reshape(-1, *pieces.shape[2:])


def _at(pieces: jax.Array, index: Any) -> jax.Array:
    """The piece at `index`, which may be traced."""
    return pieces[index] if isinstance(index, int) else lax.dynamic_index_in_dim(pieces, index, keepdims=False)
