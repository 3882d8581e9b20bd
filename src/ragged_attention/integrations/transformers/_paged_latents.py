"""Continuous batching of absorbed latent attention: a paged cache of latents, and of the keys of indexers.

transformers' paged cache has keys and values of the same shape for all layers. Our cache extends it, so it has the same
blocks, prefix sharing, copies and offloading, but other contents. For one layer after another, a block has the latents
of its tokens with their rotary columns, and then the keys of the layer's indexer, if it has one. So a block is the page
with the same number in every layer, and page tables and lists of slots are the same for all layers.
"""

import functools
import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from ragged_attention.errors import Unsupported
from ragged_attention.integrations.transformers._calls import note
from ragged_attention.integrations.transformers._continuous import page_table
from ragged_attention.integrations.transformers._masks import Pattern, pattern_of
from ragged_attention.torch import (
    indexer_topk,
    mla_decode,
    ragged_mla_attention,
    sparse_mla_prefill,
)

KIND = "full_attention"  # the kind of all layers, because all tokens are kept
# The absorbed attention modules by layer of the model for which a cache is being made; see `_host`.
_layers: ContextVar[Mapping[int, Any] | None] = ContextVar("layers", default=None)


class Row(NamedTuple):
    """The elements that a layer stores per token, and the layer whose latents it reads."""

    latent: int  # columns of latent, rotary key and padding to `_latent.ALIGNMENT`; 0 if another layer stores them
    key: int  # columns of the indexer's key; 0 without an indexer
    source: int  # the layer whose latents are read: the layer itself, unless layers share latents (mistral_large4)


class Step(NamedTuple):
    """The places of a forward pass's tokens in the cache.

    table, kv_lens, edges: the `page_indices`, `kv_lens` and `cu_q_lens` of our operations.
    slots: [T], the slots of the new tokens.
    longest, longest_q: the maximum length of a sequence, and of its new tokens.
    written: the layers that have written their latents.
    """

    table: torch.Tensor
    kv_lens: torch.Tensor
    edges: torch.Tensor
    slots: torch.Tensor
    longest: int
    longest_q: int
    written: set[int]


class Held(NamedTuple):
    """A layer's pages and its step: latents [P, G, 1, L] of layer `source`, and the indexer's keys [P, G, D or 0]."""

    source: int
    latents: torch.Tensor
    keys: torch.Tensor
    step: Step


class PagedLatentCache(PagedAttentionCache):
    """transformers' paged cache, for latents.

    Args:
        rows: the sizes that each layer stores per token.
        activations: the maximum number of elements that a layer computes per token, by which transformers sizes the
            cache.
        arguments: the arguments of `PagedAttentionCache`.
    """

    def __init__(self, rows: Mapping[int, Row], activations: int, **arguments: Any) -> None:
        config, dtype = arguments["config"], arguments["dtype"]
        if arguments["distributed_helper"].tp_size > 1:
            raise Unsupported("expected continuous batching over latents on one device, got tensor parallelism")
        super().__init__(**{**arguments, "config": _as_heads(config, rows, activations)})
        self.config = config
        self.page_size = arguments["continuous_batching_config"].page_size
        self.rows, self._first, self._step = rows, min(rows), None
        allocator = self.cache_allocators[KIND]
        self._stride = allocator.block_physical_stride
        blocks = self.cache_tensor.view(-1, allocator.bytes_per_block).view(dtype)
        widths = _widths(rows)
        parts = iter(blocks.split([self.page_size * width for width in widths], 1))
        pages = [part.unflatten(1, (self.page_size, width)) for part, width in zip(parts, widths, strict=True)]
        self._latents, self._keys = (dict(zip(rows, pages[number::2], strict=True)) for number in (0, 1))

    def enter(self, layer: int, places: Mapping[str, Any]) -> Held:
        """A layer's pages, when its forward begins. `places` has keywords that transformers passes to all layers."""
        if self._step is None or layer == self._first:  # once per pass, so that a graph may record it
            self._step = self._placed(places)
        return self.held(layer)

    def held(self, layer: int) -> Held:
        assert self._step is not None  # made by the first layer's hook
        source = self.rows[layer].source
        return Held(source, self._latents[source][:, :, None], self._keys[layer], self._step)

    def _placed(self, places: Mapping[str, Any]) -> Step:
        written, read = (places[name][0] for name in ("write_index", "read_index"))
        cu_kv_lens, longest = places["cu_seq_lens_k"][KIND].int(), int(places["max_length_k"][KIND])
        slots = self._slots(written)
        # If all sequences begin in this step, `read` is empty, and all keys are those of new tokens.
        table = page_table(self._slots(read) if read.numel() else slots, cu_kv_lens, longest, self.page_size)
        edges, longest_q = places["cu_seq_lens_q"].int(), int(places["max_length_q"])
        return Step(table, cu_kv_lens.diff(), edges, slots, longest, longest_q, set())

    def _slots(self, index: torch.Tensor) -> torch.Tensor:
        """Our slots, which count tokens, from transformers' indices, which count rows of heads."""
        return index // self._stride * self.page_size + index % self._stride

    @torch.compiler.disable
    def update(  # type: ignore[override]
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, kwargs: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the latents [1, 1, T, ...] and the rotary columns of the new tokens, and return both unchanged."""
        del kwargs
        held = self.held(layer_idx)
        new = torch.cat((key_states[0, 0], value_states[0, 0]), -1)
        self._write(held.latents[:, :, 0], torch.nn.functional.pad(new, (0, held.latents.shape[-1] - new.shape[-1])))
        held.step.written.add(layer_idx)
        return key_states, value_states

    @torch.compiler.disable
    def update_indexer(self, keys: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Write the keys [1, T, D] of a layer's indexer, and return them."""
        self._write(self.held(layer_idx).keys, keys[0])
        return keys

    def _write(self, pages: torch.Tensor, new: torch.Tensor) -> None:
        assert self._step is not None
        slots = self._step.slots
        pages[slots // self.page_size, slots % self.page_size] = new.to(pages.dtype)


def _as_heads(config: Any, rows: Mapping[int, Row], activations: int) -> Any:
    """A configuration of keys and values that take as much memory as the rows. transformers sizes the cache by it.

    Each of its "layers" is a part of the rows: one head of keys and one head of values per token. `PagedLatentCache`
    decides how a block is divided among the real layers.
    """
    parts = [width for width in _widths(rows) if width]
    part = math.gcd(*parts)
    return SimpleNamespace(
        num_hidden_layers=sum(parts) // part, num_key_value_heads=1, head_dim=part // 2,
        num_attention_heads=math.ceil(activations / (part // 2)), hidden_size=config.hidden_size,
        vocab_size=config.vocab_size, layer_types=None, sliding_window=None,
        _attn_implementation=config._attn_implementation,
    )  # fmt: skip


def _widths(rows: Mapping[int, Row]) -> list[int]:
    return [width for row in rows.values() for width in (row.latent, row.key)]


@contextmanager
def caching(layers: Mapping[int, Any]) -> Iterator[None]:
    """A context in which `make` makes a cache for these absorbed modules, or transformers' cache if there are none."""
    token = _layers.set(layers)
    try:
        yield
    finally:
        _layers.reset(token)


def make(original: Any, alignment: int, arguments: dict[str, Any]) -> Any:
    """The cache that a model needs, with the arguments of transformers' `PagedAttentionCache`."""
    layers = _layers.get()
    if not layers:
        return original(**arguments)
    rows, activations = {}, 0
    for number in sorted(layers):
        module = layers[number]
        indexer = getattr(module, "indexer", None)
        latent = module.kv_lora_rank + module.qk_rope_head_dim
        latent += -latent % alignment
        sources = getattr(module.config, "kv_source_layers", None)
        source = number if sources is None else sources[number]
        rows[number] = Row(latent if source == number else 0, 0 if indexer is None else indexer.head_dim, source)
        head = module.qk_nope_head_dim + module.qk_rope_head_dim + 2 * latent + module.v_head_dim
        chosen = 0 if indexer is None else indexer.index_topk * 2 * torch.int32.itemsize  # positions and slots
        activations = max(activations, module.num_heads * head + math.ceil(chosen / arguments["dtype"].itemsize))
    return PagedLatentCache(rows, activations, **arguments)


# ---- a layer's forward

_unread = torch.empty(1, 1, 1, 0)  # an unused mask, for layers that slice their mask for an indexer
_unread.pattern = Pattern()  # type: ignore[attr-defined]


def enter(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The forward hook of absorbed modules: with our cache, it adds the keyword `latent_pages` for attention."""
    cache = kwargs.get("cache")
    if not isinstance(cache, PagedLatentCache):
        return None
    kwargs = {**kwargs, "latent_pages": cache.enter(module.layer_idx, kwargs)}
    mask = kwargs.get("attention_mask")
    if mask is None or pattern_of(mask) is not None:
        kwargs["attention_mask"] = _unread
    if not _has_cache(type(module)):  # transformers 5.23 would pass the cache to the attention function instead
        kwargs["past_key_values"] = kwargs.pop("cache")
    return args, kwargs


@functools.cache
def _has_cache(kind: type) -> bool:
    return "cache" in inspect.signature(kind.forward).parameters


def select(indexer: Any, q: torch.Tensor, weights: torch.Tensor, held: Held) -> torch.Tensor:
    """The slots [1, T, N] to which each new token attends, padded with -1. The new keys are already in the cache."""
    note(indexer, "indexer_topk")
    step, tokens = held.step, q.shape[1]
    positions = indexer_topk(
        q[0].to(held.keys.dtype), held.keys, weights[0], min(indexer.index_topk, step.longest),
        page_indices=step.table, kv_lens=step.kv_lens, cu_q_lens=step.edges,
    )  # fmt: skip
    sequence = torch.bucketize(torch.arange(tokens, dtype=torch.int32, device=q.device), step.edges[1:], right=True)
    sequence = sequence.clamp(max=step.table.shape[0] - 1)[:, None]
    page_size, shown = held.keys.shape[1], positions.clamp(min=0)
    slots = step.table[sequence, shown // page_size] * page_size + shown % page_size
    return torch.where(positions < 0, -1, slots)[None]


def attend(module: Any, q: torch.Tensor, held: Held, indices: torch.Tensor | None, settings: Any) -> torch.Tensor:
    """The attention [1, T, H, L] of absorbed queries [1, T, H, L + R] to all latents, or to those in lists.

    Raises:
        Unsupported: no layer has written the latents that this layer reads, or it has both lists of keys and a window.
    """
    step, kind = held.step, type(module).__name__
    if held.source not in step.written:
        raise Unsupported(f"expected layers that write their latents in continuous batching, got {kind} without")
    if indices is None:
        note(module, "ragged_mla_attention")
        return ragged_mla_attention(
            q[0], held.latents, step.kv_lens, step.table, step.edges, max_q_len=step.longest_q, **settings
        )[None]
    if settings.pop("sliding_window") is not None:
        raise Unsupported(f"expected lists of latents without a window in continuous batching, got {kind} with one")
    lists = indices[0][:, None]
    if step.longest_q == 1 or settings["soft_cap"] is not None:
        note(module, "mla_decode")
        return mla_decode(q[0][:, None], held.latents, indices=lists, **settings)[0].transpose(0, 1)
    note(module, "sparse_mla_prefill")
    settings.pop("soft_cap")
    return sparse_mla_prefill(q[0], held.latents, lists, **settings)[0][None]
