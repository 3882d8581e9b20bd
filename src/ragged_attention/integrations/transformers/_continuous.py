"""Continuous batching: attention over the pages of transformers' own cache."""

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.utils._pytree import tree_map_only
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from ragged_attention.errors import Unsupported
from ragged_attention.integrations.transformers._calls import note
from ragged_attention.integrations.transformers._layout import LayerCall, takes_pages
from ragged_attention.torch import ragged_paged_attention, varlen_attention

# The `write_index` of the step in which each layer was last written, by cache and layer.
_written: WeakKeyDictionary[Any, dict[int, Any]] = WeakKeyDictionary()
_gather: Any = vars(PagedAttentionCache)["update"]  # transformers' own function, which `_host` replaces


class Pages(NamedTuple):
    """A layer's paged cache, and the slots of a step's sequences, one sequence after another."""

    tokens: tuple[torch.Tensor, torch.Tensor]
    pages: tuple[torch.Tensor, torch.Tensor]
    slots: torch.Tensor
    cu_kv_lens: torch.Tensor
    longest: int
    page_size: int


class Gathered(torch.Tensor):
    """Keys or values [1, K, N, D] of a step's sequences, which are gathered only when they are read."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: Pages, part: int) -> "Gathered":
        _, heads, width = held.tokens[part].shape
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, (1, heads, held.slots.numel(), width), dtype=held.tokens[part].dtype, device=held.tokens[part].device
        )

    def __init__(self, held: Pages, part: int) -> None:
        self.held, self.part = held, part

    def numbers(self) -> torch.Tensor:
        return self.held.tokens[self.part].index_select(0, self.held.slots).transpose(0, 1)[None]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Gathered, Gathered.numbers, (args, kwargs or {}))
        return func(*args, **kwargs)


def update(
    cache: Any, key: torch.Tensor, value: torch.Tensor, layer: int, places: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """`PagedAttentionCache.update`, except that keys and values of full attention are not gathered.

    The values in `places` are replaced by those of the layer. `places["window"]` is set if the layer's cache has only
    the keys of a window.
    """
    allocator = cache.layer_to_allocator[layer]
    kind = allocator.layer_type
    if kind == "full_attention" and places["read_index"][allocator.index].numel():
        tokens = allocator._kv_token_views[layer]
        for stored, new in zip(tokens, (key, value), strict=True):
            stored.index_copy_(0, places["write_index"][allocator.index], new[0].transpose(0, 1))
        places["cu_seq_lens_k"] = places["cu_seq_lens_k"][kind].int()
        places["max_length_k"] = int(places["max_length_k"][kind])
        held = Pages(
            tokens, allocator._kv_page_views[layer], places["read_index"][allocator.index], places["cu_seq_lens_k"],
            places["max_length_k"], allocator.tokens_per_page,
        )  # fmt: skip
        return Gathered(held, 0), Gathered(held, 1)
    if kind == "sliding_attention":
        places["window"] = allocator.sliding_window
    elif kind != "full_attention":
        raise Unsupported(f"expected full or sliding attention in continuous batching, got {kind}")
    return _gather(cache, key, value, layer, places)


def attend(call: LayerCall, cache: Any) -> torch.Tensor:
    """One step of a layer: each sequence attends to its own keys.

    Args:
        call: its query is [1, H, T, D], the new tokens of all sequences, one after another. Its key and value are the
            results of `update`; with a `cache` they are the new keys and values, which are written to it first. Its
            settings include the window. Its other keywords are `cu_seq_lens_q`, `max_length_q`, `cu_seq_lens_k`,
            `max_length_k`, `read_index` and `write_index`. Before `update`, the last four have a value for each kind of
            layer or for each cache.
        cache: the paged cache with transformers 5.23, otherwise None. In later releases, layers call `update`.

    Returns:
        [1, T, H, D_v].

    Raises:
        Unsupported: the layer has neither full nor sliding attention, or it has no cache of its own.
    """
    module, query, settings, places = call.module, call.query, call.settings, call.others
    key, value = call.key, call.value
    if cache is not None:
        places = dict(places)
        _expect_once(module, cache, places)
        key, value = update(cache, key, value, module.layer_idx, places)
    if settings["sliding_window"] is None:
        settings = {**settings, "sliding_window": places.get("window")}
    edges, q = places["cu_seq_lens_q"].int(), query[0].transpose(0, 1)
    if isinstance(key, Gathered) and isinstance(value, Gathered) and (key.part, value.part) == (0, 1):
        held = key.held
        if value.held is held and takes_pages(query, value):
            note(module, "ragged_paged_attention")
            table = page_table(held.slots, held.cu_kv_lens, held.longest, held.page_size)
            return ragged_paged_attention(
                q, held.pages, held.cu_kv_lens.diff(), table, edges, max_q_len=places.get("max_length_q"), **settings
            )[None]
    cu_kv_lens = places["cu_seq_lens_k"]
    if not isinstance(cu_kv_lens, torch.Tensor):
        raise Unsupported(
            f"expected continuous batching with a cache for each layer, got {type(module).__name__} without one"
        )
    note(module, "varlen_attention")
    k, v = (tensor[0].transpose(0, 1) for tensor in (key, value))
    return varlen_attention(q, k, v, edges, cu_kv_lens.int(), causal=True, **settings)[None]


def _expect_once(module: Any, cache: Any, places: dict[str, Any]) -> None:
    """Raise Unsupported if a layer attends twice in a step, because it would overwrite its first keys and values."""
    step, written = places.get("write_index"), _written.setdefault(cache, {})
    if step is not None and written.get(module.layer_idx) is step:
        raise Unsupported(
            f"expected layers that attend once in a step of continuous batching, got {type(module).__name__}"
        )
    written[module.layer_idx] = step


def page_table(slots: torch.Tensor, cu_kv_lens: torch.Tensor, longest: int, page_size: int) -> torch.Tensor:
    """The page tables [S, M] of sequences, from the slots of their keys, one sequence after another."""
    starts = torch.arange(0, longest, page_size, device=slots.device)
    first = cu_kv_lens[:-1, None] + starts
    pages = slots[first.clamp(max=slots.numel() - 1)] // page_size
    return torch.where(starts < cu_kv_lens.diff()[:, None], pages, 0).int()
