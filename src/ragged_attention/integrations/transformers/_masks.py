"""The mask of our attention: a tensor like eager attention's mask, with a `pattern` that our operations understand.

transformers describes visibility by a function of indices, from which each attention implementation makes its mask.
Models pass the mask on, slice it, add to it, or read it in their own indexers. So ours is the mask of eager attention
[B, 1, L_q, L_k]: 0 for a visible key, else the smallest number. If our operations can express the visibility, the mask
has a `pattern`, and its numbers are computed only if something reads them. A tensor computed from the mask has no
pattern of its own; `_tensors` reads it.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import masking_utils

from ragged_attention.errors import Unsupported
from ragged_attention.integrations.transformers._ranges import blocks, ranges_of, shown_by

T = TypeVar("T")
aten = torch.ops.aten
PLAIN = masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function
_results: Any = WeakTensorKeyDictionary()  # the results of `computed_once`, by the `shown` of each mask in use


class Pattern(NamedTuple):
    """The keys that each query sees, in the terms of our operations. By default each query sees all keys.

    causal: a query sees the keys up to its own position; the last query is at the last key before `end`.
    window: the maximum number of keys that a query sees, including the one at its own position.
    shown: bool [B, N], which of the first N keys of each row are not padding; later keys are hidden.
    end: the number of keys (an int or a tensor) if a cache of fixed size has unused places after them.
    edges: int32 [S + 1], the edges of sequences packed into rows, with the rows laid out one after another.
    has_padding_mask: whether the model got a padding mask, which may hide nothing.
    ranges: int32 [1 or B, L_q, R, 2], the ranges of keys that each query sees. If given, no field above hides a key.
    blind: bool [1 or B, 1 or L_q], queries that give all their visible keys equal weight.
    selection: the indexer's selection from these keys (`_selection`), or None.
    """

    causal: bool = False
    window: int | None = None
    shown: torch.Tensor | None = None
    end: Any = None
    edges: torch.Tensor | None = None
    has_padding_mask: bool = False
    ranges: torch.Tensor | None = None
    blind: torch.Tensor | None = None
    selection: Any = None


# A pattern's properties are functions, because the Dynamo of torch 2.9 does not follow properties of a tuple.


def is_of_rows(pattern: Pattern) -> bool:
    """Whether the pattern may differ by row."""
    return any(field is not None for field in (pattern.shown, pattern.edges, pattern.ranges))


def hides_nothing(pattern: Pattern) -> bool:
    """Whether each query sees all keys, for any number of keys."""
    return not pattern.causal and pattern.window is None and pattern.end is None and not is_of_rows(pattern)


def is_within(pattern: Pattern, kv_len: int) -> bool:
    """Whether `end` is at most `kv_len`. A tensor always is, because it comes from a cache of fixed size."""
    return isinstance(pattern.end, torch.Tensor) or pattern.end is None or pattern.end <= kv_len


def visible(
    pattern: Pattern, rows: int, q_len: int, kv_len: int, device: Any, queries: slice = slice(None)
) -> torch.Tensor:
    """A pattern as a mask for some of the queries, bool [rows, 1, queries, kv_len].

    Raises:
        Unsupported: the pattern has a selection, whose lists are made for our operations only.
    """
    if pattern.selection is not None:
        raise Unsupported("expected masks of selected keys to be read by our attention alone, got another reader")
    if pattern.ranges is not None:
        return shown_by(pattern.ranges[:, queries], kv_len)[:, None].expand(rows, -1, -1, -1)
    end = kv_len if pattern.end is None else pattern.end
    position = (torch.arange(q_len, device=device) + (end - q_len))[queries, None]
    key = torch.arange(kv_len, device=device)
    sees = key <= position if pattern.causal else (key < end).expand(position.shape[0], kv_len)
    if pattern.window is not None:
        sees = sees & (key > position - pattern.window)
    sees = sees.expand(rows, 1, -1, -1)
    if pattern.edges is not None:
        places = torch.arange(rows * kv_len, device=device)
        number = torch.bucketize(places, pattern.edges[1:], right=True).view(rows, kv_len)
        sees = sees & (number[:, queries, None] == number[:, None])[:, None]
    if pattern.shown is not None:
        sees = sees & torch.nn.functional.pad(pattern.shown, (0, kv_len - pattern.shown.shape[1]))[:, None, None]
    return sees


class Mask(torch.Tensor):
    """A mask of eager attention whose numbers are computed when they are read.

    `pattern` becomes None when the numbers are written to.
    """

    pattern: Pattern | None
    _original: Pattern
    _numbers: torch.Tensor | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, pattern: Pattern, size: tuple[int, ...], dtype: torch.dtype, device: Any, nothing: Any = None
    ) -> "Mask":
        self: Any = torch.Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=device)  # type: ignore[attr-defined]
        self.pattern, self._original, self._numbers = pattern, pattern, None
        # Compilers take a mask apart into these tensors, and need at least one.
        self.shown, self.end, self.edges, self.ranges = pattern.shown, pattern.end, pattern.edges, pattern.ranges
        self.nothing = torch.empty(0, device=device) if nothing is None else nothing
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Mask({self.pattern}, {tuple(self.shape)}, {self.dtype}, {self.device})"

    def numbers(self) -> torch.Tensor:
        if self._numbers is None:
            rows, _, q_len, kv_len = self.shape
            with torch.inference_mode(False):  # inference tensors have no counter of writes
                self._numbers = as_numbers(visible(self._original, rows, q_len, kv_len, self.device), self.dtype)
        return self._numbers

    # Slices are made here, because a view made in `__torch_dispatch__` would not share the counter of writes.

    def __getitem__(self, index: Any) -> torch.Tensor:
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) <= 4 and all(
            isinstance(part, slice) and part.indices(size) == (0, size, 1)
            for part, size in zip(parts, self.shape, strict=False)
        ):
            return self
        return self.numbers()[index]

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.clone()

    def __setitem__(self, index: Any, value: Any) -> None:
        self.numbers()[index] = value

    def like(self, device: Any) -> "Mask":
        """An equal mask on a device."""
        moved = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), self._original)
        return Mask(moved, tuple(self.shape), self.dtype, device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, Mask) and first.pattern is not None and _changes_nothing(func, first, args, kwargs):
            return first.like(kwargs.get("device", first.device))
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if isinstance(value, Mask) and argument.alias_info is not None and argument.alias_info.is_write:
                    value.numbers()
                    value.pattern = None
        args, kwargs = tree_map_only(Mask, Mask.numbers, (args, kwargs))
        return func(*args, **kwargs)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        inner = [name for name in ("shown", "end", "edges", "ranges") if isinstance(getattr(self, name), torch.Tensor)]
        return ["nothing", *inner], (self._original._replace(**dict.fromkeys(inner)), self.dtype, self.device)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> "Mask":
        pattern, dtype, device = context
        tensors = {name: inner[name] for name in inner if name != "nothing"}
        return Mask(pattern._replace(**tensors), tuple(size), dtype, device, inner["nothing"])


def _changes_nothing(func: Any, mask: Mask, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operation returns an equal mask: an alias, a copy (on any device), or a slice of everything."""
    if func in (aten.detach.default, aten.alias.default, aten.clone.default):
        return True
    if func is aten.slice.Tensor:
        dim, start, end, step = tuple(args[1:]) + (0, None, None, 1)[len(args) - 1 :]
        return (start or 0) == 0 and (end is None or end >= mask.shape[dim]) and step == 1
    if func is aten._to_copy.default:
        return kwargs.keys() <= {"device", "dtype", "non_blocking"} and kwargs.get("dtype", mask.dtype) == mask.dtype
    return False


def as_numbers(sees: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A bool mask as the numbers that eager attention adds to logits."""
    return torch.where(sees, torch.zeros((), dtype=dtype, device=sees.device), torch.finfo(dtype).min)


def pattern_of(mask: torch.Tensor) -> Pattern | None:
    """The pattern of a mask that `mask` made and nobody has changed, else None."""
    pattern = getattr(mask, "pattern", None)
    if pattern is None or torch.compiler.is_compiling():
        return pattern
    numbers = getattr(mask, "_numbers", None)
    return pattern if numbers is None or numbers._version == 0 else None  # else it was changed through a view


class Rules(NamedTuple):
    """The meaning of a mask function. In packed rows, tokens have sequence numbers, and positions in sequences."""

    causal: bool = False
    window: int | None = None
    packed: torch.Tensor | None = None
    positions: torch.Tensor | None = None


# The code objects identify the functions that transformers makes; their closures hold the arguments.
WINDOW, PACKED, MOVED, ALL = (
    made.__code__
    for made in (
        masking_utils.sliding_window_overlay(1),
        masking_utils.packed_sequence_mask_function(None),  # type: ignore[arg-type]
        masking_utils.remap_positions_for_packed_sequence(None, None),  # type: ignore[arg-type]
        masking_utils.and_masks(),
    )
)


@torch.compiler.assume_constant_result
def rules_of(function: Callable[..., Any]) -> Rules | None:
    """The meaning of a mask function, or None if our operations cannot express it."""
    if function in PLAIN:
        return Rules(causal=function is masking_utils.causal_mask_function)
    code = getattr(function, "__code__", None)
    if code not in (WINDOW, PACKED, MOVED, ALL):
        return None
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    arguments = {name: cell.cell_contents for name, cell in cells}
    if code is WINDOW:
        size = arguments["sliding_window"]
        return Rules(window=size) if type(size) is int and size > 0 else None
    if code is PACKED:
        return Rules(packed=arguments["packed_sequence_mask"])
    if code is MOVED:
        rules, positions = rules_of(arguments["mask_function"]), arguments["position_ids"]
        return None if rules is None or rules[2:] != (None, None) else rules._replace(positions=positions)
    return _all_of([rules_of(each) for each in arguments["mask_functions"]])


def _all_of(parts: list[Rules | None]) -> Rules | None:
    known = [each for each in parts if each is not None]
    windows, packed, positions = (
        [value for each in known if (value := getattr(each, name)) is not None]
        for name in ("window", "packed", "positions")
    )
    if len(known) < len(parts) or len(packed) > 1 or len(positions) > len(packed):
        return None
    return Rules(any(each.causal for each in known), min(windows, default=None), *(packed or [None]), *positions)


def _edges(rules: Rules, rows: int, length: int) -> torch.Tensor | None:
    """The edges of packed sequences, or None if a sequence's tokens or its positions are not consecutive."""
    assert rules.packed is not None
    packed = rules.packed.expand(rows, -1)
    if packed.shape[1] != length:
        return None
    steps = packed.diff(dim=1)
    is_contiguous = (steps >= 0).all()
    if rules.positions is not None:
        is_contiguous = is_contiguous & ((rules.positions.diff(dim=1) == 1) | (steps != 0)).all()
    return edges_of(packed) if bool(is_contiguous) else None


def edges_of(packed: torch.Tensor) -> torch.Tensor:
    """The edges of packed sequences, from the number of each token's sequence [B, L]."""
    starts = torch.ones_like(packed, dtype=torch.bool)
    starts[:, 1:] = packed[:, 1:] != packed[:, :-1]
    edges = starts.flatten().nonzero()[:, 0]
    return torch.cat((edges, edges.new_tensor([packed.numel()]))).int()


def keep_results(shown: torch.Tensor) -> torch.Tensor:
    """Let `computed_once` store results for `shown`, and return it. After that, it must not be changed."""
    _results[shown] = {}
    return shown


def computed_once(shown: torch.Tensor, name: Any, compute: Callable[[], T]) -> T:
    """The result of `compute` for the `shown` of a mask, stored as long as the mask, which layers share, exists."""
    results = None if torch.compiler.is_compiling() else _results.get(shown)
    if results is None:  # not passed to `keep_results`, so it may be changed later
        return compute()
    if name not in results:
        results[name] = compute()
    return results[name]


def _padding(mask: torch.Tensor | None, rows: int, first: Any, length: int, device: Any) -> torch.Tensor | None:
    """Which of `length` keys from position `first` on are not padding, or None if none of them is padding."""
    if mask is None:
        return None
    prepared: Any = masking_utils.prepare_padding_mask(mask, length, first)
    shown = prepared[:, first : first + length].to(device=device, dtype=torch.bool).expand(rows, -1)
    # A compiler cannot read values, so it keeps a mask without padding too.
    return shown if torch.compiler.is_compiling() or not bool(shown.all()) else None


def has_holes(shown: torch.Tensor) -> bool:
    """Whether padding is between other tokens, so that leaving it out would change distances between keys."""
    return bool(((shown[:, 1:] != shown[:, :-1]).sum(1) - (~shown[:, 0]).int() > 1).any())


def _is_plain(
    q_length: int, mask_function: Callable[..., Any], attention_mask: torch.Tensor | None, others: dict[str, Any]
) -> bool:
    """Whether a compiler can follow `_pattern`, because the mask function has no tensors, and no values are read.

    If transformers makes the function inside the graph, a compiler can read its closure only if it has no tensors. That
    is so if transformers would allow skipping the mask. Chunked attention is an exception: its function has the
    padding.
    """
    if q_length == 1 or mask_function in PLAIN:
        return True
    may_skip = others.get("allow_is_causal_skip", True) or others.get("allow_is_bidirectional_skip", False)
    chunked = getattr(others.get("config"), "attention_chunk_size", None) is not None
    return attention_mask is None and may_skip and not chunked


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    device: Any = "cpu",
    **others: Any,
) -> torch.Tensor:
    """The mask of our attention implementation, with the arguments of transformers' mask interface."""
    if attention_mask is not None:
        attention_mask = attention_mask.bool()
    known: dict[str, Any] = dict(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, device=device,
    )  # fmt: skip
    whole: dict[str, Any] = {**others, **known, "dtype": dtype, "allow_is_bidirectional_skip": False}
    compiling = torch.compiler.is_compiling()
    if not compiling or _is_plain(q_length, mask_function, attention_mask, others):
        pattern = _pattern(use_vmap=others.get("use_vmap", False), **known)
    elif torch.compiler.is_dynamo_compiling() and not _is_one_graph():
        return _outside_the_graph(**others, **known, dtype=dtype)
    else:
        pattern = None
    if pattern is None and not compiling:
        pattern = _in_ranges({**known, "use_vmap": others.get("use_vmap", False)})
    if pattern is None:
        return masking_utils.eager_mask(**whole)
    if compiling:  # the graph computes the numbers only if something reads them
        made = masking_utils.eager_mask(**whole)
        made.pattern = pattern  # type: ignore[attr-defined]
        return made
    if pattern.shown is not None:
        keep_results(pattern.shown)
    return Mask(pattern, (batch_size, 1, q_length, kv_length), dtype, device)


@torch.compiler.assume_constant_result
def _is_one_graph() -> bool:
    """Whether the graph that is being compiled must not break."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return bool(getattr(InstructionTranslator.current_tx(), "one_graph", True))


@torch.compiler.disable(reason="masks of packed sequences, images, chunks or padded windows are read by the host")
def _outside_the_graph(**arguments: Any) -> torch.Tensor:
    return mask(**arguments)


def _pattern(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any,
    kv_offset: Any,
    mask_function: Callable[..., Any],
    attention_mask: torch.Tensor | None,
    device: Any,
    use_vmap: bool,
) -> Pattern | None:
    end = q_offset + q_length - kv_offset
    is_whole_row = not isinstance(end, torch.Tensor) and end == kv_length and torch.device(device).type == "cpu"
    rules = pattern = None
    if q_length != 1 or (is_whole_row and not torch.compiler.is_compiling()):  # a CPU reads a whole row in place
        rules = rules_of(mask_function)
    if rules is not None:
        pattern = _expressed(rules, batch_size, q_length, kv_length, end, kv_offset, attention_mask, device)
    if pattern is not None or q_length != 1:
        return pattern
    # If a row has a single query, any mask function yields a list of visible keys. The device computes this list once
    # for all layers, and the host does not wait.
    row: Any = masking_utils.sdpa_mask(
        batch_size, 1, kv_length, q_offset, kv_offset, mask_function, attention_mask,
        allow_is_causal_skip=False, use_vmap=use_vmap, device=device,
    )  # fmt: skip
    return Pattern(shown=row[:, 0, 0])


def _in_ranges(known: Mapping[str, Any]) -> Pattern | None:
    """The pattern of a mask as ranges, or None if a query sees too many runs of keys. The mask is computed in parts.

    `known` has the arguments of transformers' mask interface.
    """

    def parts() -> Iterator[torch.Tensor]:
        for queries in blocks(*(known[name] for name in ("batch_size", "q_length", "kv_length"))):
            own = {"q_length": queries.stop - queries.start, "q_offset": known["q_offset"] + queries.start}
            made: Any = masking_utils.sdpa_mask(**{**known, **own}, allow_is_causal_skip=False)
            yield made[:1, 0] if made.stride(0) == 0 else made[:, 0]

    ranges = ranges_of(parts())
    return None if ranges is None else Pattern(ranges=ranges)


def _expressed(
    rules: Rules, rows: int, q_length: int, kv_length: int, end: Any, first: Any, padding: Any, device: Any
) -> Pattern | None:
    """The pattern of a mask function's rules and of the padding, or None. Only the first `end` keys are in use."""
    # Convert to int and bool, so that compilers do not treat them as parts of a constant.
    causal, window = bool(rules.causal), None if rules.window is None else int(rules.window)
    if not causal and window is None and rules.packed is None:
        return Pattern(shown=_padding(padding, rows, first, kv_length, device))
    fixed = isinstance(end, torch.Tensor)
    is_at_end = not fixed and end == kv_length
    if rules.packed is not None:
        is_self_attention = is_at_end and q_length == kv_length and padding is None
        edges = _edges(rules, rows, q_length) if is_self_attention else None
        return None if edges is None else Pattern(causal, window, edges=edges)
    if rules.positions is not None or not (is_at_end if not causal else fixed or q_length <= end <= kv_length):
        return None
    shown = _padding(padding, rows, first, kv_length if fixed else end, device)
    if fixed:
        is_used = torch.arange(kv_length, device=device) < end
        shown = is_used.expand(rows, -1) if shown is None else shown & is_used
    may_have_window = causal and q_length > 1 and not torch.compiler.is_compiling()  # the next test reads values
    if window is not None and shown is not None and not (may_have_window and not has_holes(shown)):
        return None
    return Pattern(causal, window, shown, None if is_at_end else end, has_padding_mask=padding is not None)
