"""Position biases that depend only on the distance between query and key, as tables.

In transformers, a few functions make these biases as dense arrays. Their replacements here return a `DistanceBias`,
whose numbers are computed only if something reads them.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from ragged_attention.errors import Unsupported

# Functions that read properties of a tensor, but not its numbers.
ABOUT = {
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.is_floating_point,
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda")),
}  # fmt: skip
PRODUCTS = {torch.mul, torch.Tensor.mul, torch.Tensor.__mul__}


class Tables(NamedTuple):
    """Biases by distance.

    values: [B, H, L_q, W]. Column `own + d` is for the key d positions before a query. The first and the last column
        are also for all keys that are farther away. B and L_q may be 1, for all rows and queries.
    first: the position of the first query, if the first key is at position 0.
    is_regular: whether the positions of queries, and those of keys, increase by one. Like `first`, it may be a tensor.
    """

    values: torch.Tensor
    own: int
    first: Any
    is_regular: Any = True


class DistanceBias(torch.Tensor):
    """A bias [B, H, L_q, L_k] of tables, whose numbers are computed when they are read.

    A conversion to another dtype, or a product with a factor per query, is a `DistanceBias` again. Every other function
    reads the numbers. Gradients flow through the tables or through the numbers.
    """

    tables: Tables
    _compute: Callable[[], torch.Tensor]
    _numbers: dict[bool, torch.Tensor]

    @staticmethod
    def __new__(cls, tables: Tables, size: tuple[int, ...], compute: Callable[[], torch.Tensor]) -> "DistanceBias":
        values = tables.values
        self: Any = torch.Tensor._make_wrapper_subclass(cls, size, dtype=values.dtype, device=values.device)  # type: ignore[attr-defined]
        self.tables, self._compute, self._numbers = tables, compute, {}
        return self

    def numbers(self) -> torch.Tensor:
        needed = torch.is_grad_enabled()
        if needed not in self._numbers:
            self._numbers[needed] = self._compute()
        return self._numbers[needed]

    def _mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "DistanceBias":
        tables = self.tables._replace(values=function(self.tables.values))
        return DistanceBias(tables, tuple(self.shape), lambda: function(self.numbers()))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        bias = args[0] if args else None
        if isinstance(bias, DistanceBias):
            if func in ABOUT:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if func is torch.Tensor.float or (func is torch.Tensor.to and _is_of_type(args[1:]) and not kwargs):
                return bias._mapped(lambda tensor: func(tensor, *args[1:]))
            if func in PRODUCTS and not kwargs and _is_of_queries(bias, args[1]):
                return bias._mapped(lambda tensor: tensor * args[1])
        args, kwargs = tree_map_only(DistanceBias, DistanceBias.numbers, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def numbers(bias: DistanceBias) -> torch.Tensor:  # this way, no gradient reaches the tables
            if bias.tables.values.requires_grad:
                raise Unsupported(f"expected a trained bias of positions to be read by functions of torch, got {func}")
            return bias.numbers()

        args, kwargs = tree_map_only(DistanceBias, numbers, (args, kwargs or {}))
        return func(*args, **kwargs)


def _is_of_type(arguments: tuple[Any, ...]) -> bool:
    return len(arguments) == 1 and isinstance(arguments[0], torch.dtype) and arguments[0].is_floating_point


def _is_of_queries(bias: DistanceBias, factor: Any) -> bool:
    """Whether a factor can be broadcast to [B, H, L_q, 1]."""
    if not isinstance(factor, torch.Tensor):
        return isinstance(factor, (int, float))
    if isinstance(factor, DistanceBias) or factor.ndim > 4 or (factor.ndim and factor.shape[-1] != 1):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        size = tuple(bias.shape)
    return torch.broadcast_shapes(size, factor.shape) == size


def bucketed(original: Any, ours: str, kind: type) -> Any:
    """The replacement for `compute_bias` of t5 and its relatives, for attention of class `kind`."""

    def compute_bias(
        self: Any, query_length: int, key_length: int, device: Any = None, past_seen_tokens: Any = 0
    ) -> torch.Tensor:
        def compute() -> torch.Tensor:
            return original(self, query_length, key_length, device=device, past_seen_tokens=past_seen_tokens)

        if not _is_for_ours(self, ours, kind) or (is_checkpointed(self) and not _keeps_arguments(self)):
            return compute()
        farthest = self.relative_attention_max_distance  # all distances from here on share a bucket
        row = original(self, 1, 2 * farthest + 1, device=device, past_seen_tokens=farthest)
        tables = Tables(row.flip(-1), farthest, past_seen_tokens)
        return DistanceBias(tables, (1, row.shape[1], query_length, key_length), compute)

    return compute_bias


def is_checkpointed(module: Any) -> bool:
    return getattr(module, "gradient_checkpointing", False) and module.training


def _keeps_arguments(module: Any) -> bool:
    """Whether checkpointing passes the original arguments to layers again, not copies through which gradients flow."""
    checkpoint = getattr(module, "_gradient_checkpointing_func", None)
    return getattr(checkpoint, "keywords", {}).get("use_reentrant") is False


def told(original: Any, ours: str, kind: type, part: str) -> Any:
    """The replacement for `forward` of inkling's attention: it tells the bias module whether our attention runs."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        getattr(self, part).is_for_ours = _is_for_ours(self, ours, kind)
        return original(self, *args, **kwargs)

    return forward


def of_each_query(original: Any, ours: str, kind: type, find_distances: Callable[..., Any]) -> Any:
    """The replacement for `forward` of a module of class `kind` that makes the bias of inkling.

    `find_distances` returns the distances [L_q, L_k] in the arguments of `forward`. It also returns arguments with
    which `forward` makes the biases of `_distances` only.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        def compute() -> torch.Tensor:
            return original(self, *args, **kwargs)

        if type(self) is not kind or not getattr(self, "is_for_ours", False):
            return compute()
        distance, changed = find_distances(self, *args, **kwargs)
        if not distance.numel():
            return compute()
        values, first = original(self, *changed), distance[0, 0]
        queries, keys = (torch.arange(length, device=distance.device) for length in distance.shape)
        is_regular = (distance == first + queries[:, None] - keys).all()
        return DistanceBias(Tables(values, 1, first, is_regular), (*values.shape[:2], *distance.shape), compute)

    return forward


def by_positions(
    module: Any, relative_states: torch.Tensor, query_positions: torch.Tensor, key_positions: torch.Tensor
) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """The `find_distances` of inkling, for `of_each_query`."""
    keys = -_distances(module, key_positions)
    return query_positions[:, None] - key_positions, (relative_states, torch.zeros_like(query_positions), keys)


def by_distances(
    module: Any, hidden_states: torch.Tensor, relative_distance: torch.Tensor, position_ids: torch.Tensor
) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """The `find_distances` of inkling2, for `of_each_query`."""
    distances = _distances(module, relative_distance).expand(len(relative_distance), -1)
    return relative_distance, (hidden_states, distances, position_ids)


def _distances(module: Any, like: torch.Tensor) -> torch.Tensor:
    """The distances from -1 to `rel_extent`. In inkling, these two have no bias, but all distances between them do."""
    return torch.arange(-1, module.rel_extent + 1, device=like.device)


def _is_for_ours(module: Any, ours: str, kind: type) -> bool:
    """Whether our attention computes a module of class `kind`. Subclasses may have other distances."""
    is_ours = type(module) is kind and module.config._attn_implementation == ours
    return is_ours and not torch.compiler.is_compiling()
