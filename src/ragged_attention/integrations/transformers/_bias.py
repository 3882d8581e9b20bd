"""Biases of positions, as the tables by distance of our operations.

Models give attention a dense bias [B, H, L_q, L_k]. Where it depends on distance alone, transformers makes it by one of
a few functions, which are replaced: they return a `DistanceBias`, whose numbers are computed only if something reads
them. Any other bias is taken by its numbers, as a table if there is one query, else densely.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from ragged_attention.errors import Unsupported
from ragged_attention.integrations.transformers._layout import LayerCall, need_gradient, shown_first
from ragged_attention.integrations.transformers._masks import Pattern, has_holes

# What asks about a tensor, but not for its numbers.
ABOUT = {
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.is_floating_point,
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda")),
}  # fmt: skip
PRODUCTS = {torch.mul, torch.Tensor.mul, torch.Tensor.__mul__}
_zeros: Any = WeakTensorKeyDictionary()  # the version of each bias that was read, and whether it was 0


class Tables(NamedTuple):
    """Biases by distance.

    values: [B, H, L_q, W]. Column `own + d` belongs to the key d positions before a query; the first and last column
        belong to all keys beyond them too. B and L_q may be 1, for all rows and queries.
    first: the position of the first query, where the first key is at 0.
    is_regular: whether positions of queries and keys each rise by one. Like `first`, it may be a tensor.
    """

    values: torch.Tensor
    own: int
    first: Any
    is_regular: Any = True


class DistanceBias(torch.Tensor):
    """A bias [B, H, L_q, L_k] of tables, whose numbers are computed when they are read.

    It may be converted and multiplied by a factor of each query; everything else reads the numbers. Gradients flow
    through the tables or through the numbers.
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
        def numbers(bias: DistanceBias) -> torch.Tensor:  # no gradient flows from here
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


def why_dense(call: LayerCall) -> str | None:
    """Why none of our operations takes a call's bias, or None if one does; the call has a pattern."""
    bias, pattern, (rows, heads, q_len, _), kv_len = _bias(call), call.pattern, call.query.shape, call.key.shape[2]
    if bias is None or pattern is None:
        return None
    if tuple(bias.shape[2:]) != (q_len, kv_len) or bias.shape[1] != heads or bias.shape[0] not in (1, rows):
        return "it has a bias of positions of another shape"
    if q_len == 1 or _is_zero(call):
        return None
    if not isinstance(bias, DistanceBias) or torch.compiler.is_compiling():
        return "it has a bias of positions that is not known to follow from distance"
    first, end = bias.tables.first, kv_len if pattern.end is None else pattern.end
    if not bool((first + q_len == end) & bias.tables.is_regular):
        return "its bias counts positions otherwise than its mask"
    if pattern.edges is not None:
        of_keys = call.others.get("cu_seq_lens_k")
        if q_len != kv_len or not (of_keys is None or torch.equal(of_keys.int(), pattern.edges)):
            return "it has a bias of positions between other sequences"
    if pattern.shown is not None and (not (pattern.causal or q_len == kv_len) or has_holes(pattern.shown)):
        return "it has a bias of positions, some of which are padding"
    return None


def is_given(call: LayerCall) -> bool:
    """Whether a call that is not computed densely has a bias other than 0."""
    bias = _bias(call)
    return bias is not None and (call.query.shape[2] == 1 or not _is_zero(call))


def needs_gradient(call: LayerCall) -> bool:
    bias = _bias(call)
    return need_gradient(bias.tables.values if isinstance(bias, DistanceBias) else bias)


def tables_of(call: LayerCall, pattern: Pattern) -> torch.Tensor:
    """The bias of a call as tables [B, H, L_q, W], or [1, H, 1, W] for all queries, of our operations.

    Those of one query follow the keys that are not padding, in their order, up to the last one, and are those of a
    causal operation. Others have the columns of a causal operation if the pattern is causal, and else as many before a
    query's own position as after it.
    """
    bias = _bias(call)
    if call.query.shape[2] == 1:
        row = (bias.numbers() if isinstance(bias, DistanceBias) else bias)[:, :, :, : call.key.shape[2]]
        if pattern.shown is None:
            return row.flip(-1).expand(call.query.shape[0], -1, -1, -1).float()
        order, lens = shown_first(pattern.shown)
        distance = torch.arange(order.shape[1], device=order.device)
        place = order.gather(1, (lens[:, None] - 1 - distance).clamp(min=0))
        return row.take_along_dim(place[:, None, None], 3).float()
    values, own = bias.tables.values.float(), bias.tables.own
    if pattern.causal:
        return values[..., own:]
    ahead = values.shape[-1] - 1 - own
    first, last = values[..., :1], values[..., -1:]
    lacking = max(ahead - own, 0), max(own - ahead, 0)
    return torch.cat((first.expand(*first.shape[:3], lacking[0]), values, last.expand(*last.shape[:3], lacking[1])), -1)


def _bias(call: LayerCall) -> Any:
    return call.others.get("position_bias")


def _is_zero(call: LayerCall) -> bool:
    """Whether a bias is known to be 0 throughout, as in cross attention of t5. Layers share it, so it is read once."""
    bias = _bias(call)
    if isinstance(bias, DistanceBias) or torch.compiler.is_compiling():
        return False
    # In checkpoints the layer itself lets its zeros require a gradient, which nobody reads.
    if bias.requires_grad and not (bias.is_leaf and _is_checkpointed(call.module)):
        return False
    known = _zeros.get(bias)
    if known is None or known[0] != bias._version:
        known = _zeros[bias] = bias._version, not bool(bias.any())
    return known[1]


def bucketed(original: Any, ours: str, kind: type) -> Any:
    """The replacement for `compute_bias` of t5 and its relatives, for attention of class `kind`."""

    def compute_bias(
        self: Any, query_length: int, key_length: int, device: Any = None, past_seen_tokens: Any = 0
    ) -> torch.Tensor:
        def compute() -> torch.Tensor:
            return original(self, query_length, key_length, device=device, past_seen_tokens=past_seen_tokens)

        if not _is_for_ours(self, ours, kind) or (_is_checkpointed(self) and not _keeps_arguments(self)):
            return compute()
        farthest = self.relative_attention_max_distance  # all keys from there on share a bucket
        row = original(self, 1, 2 * farthest + 1, device=device, past_seen_tokens=farthest)
        tables = Tables(row.flip(-1), farthest, past_seen_tokens)
        return DistanceBias(tables, (1, row.shape[1], query_length, key_length), compute)

    return compute_bias


def _is_checkpointed(module: Any) -> bool:
    return getattr(module, "gradient_checkpointing", False) and module.training


def _keeps_arguments(module: Any) -> bool:
    """Whether checkpoints give layers their arguments again, and not copies through which all gradients flow."""
    checkpoint = getattr(module, "_gradient_checkpointing_func", None)
    return getattr(checkpoint, "keywords", {}).get("use_reentrant") is False


def told(original: Any, ours: str, kind: type, part: str) -> Any:
    """The replacement for `forward` of inkling's attention: it tells the module that makes the bias who attends."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        getattr(self, part).is_for_ours = _is_for_ours(self, ours, kind)
        return original(self, *args, **kwargs)

    return forward


def by_positions(original: Any, ours: str, kind: type) -> Any:
    """The replacement for `forward` of the module that makes the bias of inkling."""

    def forward(
        self: Any, relative_states: torch.Tensor, query_positions: torch.Tensor, key_positions: torch.Tensor
    ) -> torch.Tensor:
        def compute() -> torch.Tensor:
            return original(self, relative_states, query_positions, key_positions)

        if not _is_made_for_ours(self, kind):
            return compute()
        values = original(self, relative_states, torch.zeros_like(query_positions), -_distances(self, key_positions))
        return _of_each_query(values, query_positions[:, None] - key_positions, compute)

    return forward


def by_distances(original: Any, ours: str, kind: type) -> Any:
    """The replacement for `forward` of the module that makes the bias of inkling2."""

    def forward(
        self: Any, hidden_states: torch.Tensor, relative_distance: torch.Tensor, position_ids: torch.Tensor
    ) -> torch.Tensor:
        def compute() -> torch.Tensor:
            return original(self, hidden_states, relative_distance, position_ids)

        if not _is_made_for_ours(self, kind):
            return compute()
        distances = _distances(self, relative_distance).expand(len(relative_distance), -1)
        return _of_each_query(original(self, hidden_states, distances, position_ids), relative_distance, compute)

    return forward


def _is_made_for_ours(module: Any, kind: type) -> bool:
    return type(module) is kind and getattr(module, "is_for_ours", False)


def _distances(module: Any, like: torch.Tensor) -> torch.Tensor:
    """From -1, the last distance without a bias of inkling, to `rel_extent`, the first one without it again."""
    return torch.arange(-1, module.rel_extent + 1, device=like.device)


def _of_each_query(values: torch.Tensor, distance: torch.Tensor, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The bias of tables whose columns are `_distances`, for queries and keys at a distance [L_q, L_k]."""
    if not distance.numel():
        return compute()
    first = distance[0, 0]
    queries, keys = (torch.arange(length, device=distance.device) for length in distance.shape)
    is_regular = (distance == first + queries[:, None] - keys).all()
    return DistanceBias(Tables(values, 1, first, is_regular), (*values.shape[:2], *distance.shape), compute)


def _is_for_ours(module: Any, ours: str, kind: type) -> bool:
    """Whether attention of class `kind`, and of no subclass, which may count otherwise, is computed by ours."""
    is_ours = type(module) is kind and module.config._attn_implementation == ours
    return is_ours and not torch.compiler.is_compiling()
