"""A model's mask, and what it says in few words beside it.

transformers describes who sees whom by a function of indices and has each attention implementation make its mask of
it. Models pass that on as it is, or slice it, add to it, read it in indexers of their own. So ours is the mask of eager
attention, [B, 1, L_q, L_k], 0 where a key is seen and the smallest number elsewhere, and what it says stands beside it
as its `pattern`, if our operations can be told of it. The numbers are made when somebody reads them, which our
operations do not. Whatever is made of the mask is a tensor like any other, without a pattern, and is taken by its word.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import masking_utils

T = TypeVar("T")
aten = torch.ops.aten
_found: Any = WeakTensorKeyDictionary()  # what was found out about the padding of each mask that is in use


class Pattern(NamedTuple):
    """Who sees whom, in the terms of our operations; with every field at its default, all see all.

    causal: a query sees the keys up to its own position; the last query stands at the last key before `end`.
    window: the most keys that a query sees, the one at its own position among them.
    shown: bool [B, N], which of the first N keys of each row are seen at all; those behind them are not.
    end: where the keys end, a number or a tensor of one, if that is not the last key: a cache of fixed size has room.
    edges: int32 [S + 1], edges of sequences that are packed into rows, all rows laid out one after another.
    told: that no token is padding was said, by a mask of ones.
    """

    causal: bool = False
    window: int | None = None
    shown: torch.Tensor | None = None
    end: Any = None
    edges: torch.Tensor | None = None
    told: bool = False


# Functions, not properties: Dynamo of torch 2.9 does not follow those of a tuple.


def is_of_rows(pattern: Pattern) -> bool:
    """Whether it says something of each row by itself."""
    return pattern.shown is not None or pattern.edges is not None


def hides_nothing(pattern: Pattern) -> bool:
    """Whether all see all, however many they are."""
    return not pattern.causal and pattern.window is None and pattern.end is None and not is_of_rows(pattern)


def is_within(pattern: Pattern, kv_len: int) -> bool:
    """Whether the keys end within the first `kv_len`, as those that a cache of fixed size has do."""
    return isinstance(pattern.end, torch.Tensor) or pattern.end is None or pattern.end <= kv_len


def seen(
    pattern: Pattern, rows: int, q_len: int, kv_len: int, device: Any, queries: slice = slice(None)
) -> torch.Tensor:
    """A pattern as a whole mask for some of the queries, bool [rows, 1, queries, kv_len]."""
    end = kv_len if pattern.end is None else pattern.end
    position = (torch.arange(q_len, device=device) + (end - q_len))[queries, None]
    key = torch.arange(kv_len, device=device)
    found = key <= position if pattern.causal else (key < end).expand(position.shape[0], kv_len)
    if pattern.window is not None:
        found = found & (key > position - pattern.window)
    found = found.expand(rows, 1, -1, -1)
    if pattern.edges is not None:
        places = torch.arange(rows * kv_len, device=device)
        number = torch.bucketize(places, pattern.edges[1:], right=True).view(rows, kv_len)
        found = found & (number[:, queries, None] == number[:, None])[:, None]
    if pattern.shown is not None:
        shown = torch.nn.functional.pad(pattern.shown, (0, kv_len - pattern.shown.shape[1]))
        found = found & shown[:, None, None]
    return found


# ---- the mask that models get


class Mask(torch.Tensor):
    """A mask of eager attention whose numbers are made when they are read, and whose `pattern` says the same."""

    pattern: Pattern | None
    _said: Pattern
    _numbers: torch.Tensor | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, pattern: Pattern, size: tuple[int, ...], dtype: torch.dtype, device: Any, nothing: Any = None
    ) -> "Mask":
        self: Any = torch.Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=device)  # type: ignore[attr-defined]
        self.pattern, self._said, self._numbers = pattern, pattern, None
        # Compilers take a mask apart into these tensors, and want at least one.
        self.shown, self.end, self.edges = pattern.shown, pattern.end, pattern.edges
        self.nothing = torch.empty(0, device=device) if nothing is None else nothing
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Mask({self.pattern}, {tuple(self.shape)}, {self.dtype}, {self.device})"

    def numbers(self) -> torch.Tensor:
        if self._numbers is None:
            rows, _, q_len, kv_len = self.shape
            with torch.inference_mode(False):  # in which nothing would tell whether they are written to
                self._numbers = as_numbers(seen(self._said, rows, q_len, kv_len, self.device), self.dtype)
        return self._numbers

    # What is sliced here is a view that shares the numbers' count of writes, as none is that is made by dispatch.

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
        """The same mask on a device, which may be another."""
        moved = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), self._said)
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
        inner = [name for name in ("shown", "end", "edges") if isinstance(getattr(self, name), torch.Tensor)]
        return ["nothing", *inner], (self._said._replace(**dict.fromkeys(inner)), self.dtype, self.device)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> "Mask":
        pattern, dtype, device = context
        said = {name: inner[name] for name in inner if name != "nothing"}
        return Mask(pattern._replace(**said), tuple(size), dtype, device, inner["nothing"])


def _changes_nothing(func: Any, mask: Mask, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operation gives the same mask again: an alias, a copy, also on a device, a slice of everything."""
    if func in (aten.detach.default, aten.alias.default, aten.clone.default):
        return True
    if func is aten.slice.Tensor:
        dim, start, end, step = tuple(args[1:]) + (0, None, None, 1)[len(args) - 1 :]
        return (start or 0) == 0 and (end is None or end >= mask.shape[dim]) and step == 1
    if func is aten._to_copy.default:
        return kwargs.keys() <= {"device", "dtype", "non_blocking"} and kwargs.get("dtype", mask.dtype) == mask.dtype
    return False


def as_numbers(shown: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is added to logits, as eager attention adds it."""
    return torch.where(shown, torch.zeros((), dtype=dtype, device=shown.device), torch.finfo(dtype).min)


def pattern_of(mask: torch.Tensor) -> Pattern | None:
    """What a mask says in few words, if it is ours and as we made it."""
    pattern = getattr(mask, "pattern", None)
    if pattern is None or torch.compiler.is_compiling():
        return pattern
    numbers = getattr(mask, "_numbers", None)
    return pattern if numbers is None or numbers._version == 0 else None  # written to through a part of it


# ---- what a function of indices says


class Said(NamedTuple):
    """What a mask function stands for: of packed rows, the number of each token's sequence, and its position there."""

    causal: bool = False
    window: int | None = None
    packed: torch.Tensor | None = None
    positions: torch.Tensor | None = None


# By the code of the functions that transformers makes: what else is handed to it is nobody's but its own.
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
def said_by(function: Callable[..., Any]) -> Said | None:
    """What a mask function stands for, None where that is nothing that our operations know."""
    if function is masking_utils.causal_mask_function:
        return Said(causal=True)
    if function is masking_utils.bidirectional_mask_function:
        return Said()
    code = getattr(function, "__code__", None)
    if code not in (WINDOW, PACKED, MOVED, ALL):
        return None
    cells = function.__closure__ or ()
    made = dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True))
    if code is WINDOW:
        size = made["sliding_window"]
        return Said(window=size) if type(size) is int and size > 0 else None
    if code is PACKED:
        return Said(packed=made["packed_sequence_mask"])
    if code is MOVED:
        inner = said_by(made["mask_function"])
        return None if inner is None or inner[2:] != (None, None) else inner._replace(positions=made["position_ids"])
    return _all_of([said_by(each) for each in made["mask_functions"]])


def _all_of(parts: list[Said | None]) -> Said | None:
    known = [each for each in parts if each is not None]
    windows, packed, positions = (
        [value for each in known if (value := getattr(each, name)) is not None]
        for name in ("window", "packed", "positions")
    )
    if len(known) < len(parts) or len(packed) > 1 or len(positions) > len(packed):
        return None
    return Said(any(each.causal for each in known), min(windows, default=None), *(packed or [None]), *positions)


def _edges(said: Said, rows: int, length: int) -> torch.Tensor | None:
    """Edges of packed sequences; None where tokens of one number do not lie together, or their positions jump."""
    assert said.packed is not None
    packed = said.packed.expand(rows, -1)
    if packed.shape[1] != length:
        return None
    steps = packed.diff(dim=1)
    whole = (steps >= 0).all()
    if said.positions is not None:
        whole = whole & ((said.positions.diff(dim=1) == 1) | (steps != 0)).all()
    return edges_of(packed) if bool(whole) else None


def edges_of(packed: torch.Tensor) -> torch.Tensor:
    """The edges of sequences by their numbers [B, L] in each row."""
    starts = torch.ones_like(packed, dtype=torch.bool)
    starts[:, 1:] = packed[:, 1:] != packed[:, :-1]
    edges = starts.flatten().nonzero()[:, 0]
    return torch.cat((edges, edges.new_tensor([packed.numel()]))).int()


# ---- padding


def found_once(shown: torch.Tensor, name: Any, find: Callable[[], T]) -> T:
    """What `find` gives for a mask: all layers of a forward pass have the same one, so it is kept while that lives."""
    known = None if torch.compiler.is_compiling() else _found.get(shown)
    if known is None:  # not made by `mask`, so its owner may change it
        return find()
    if name not in known:
        known[name] = find()
    return known[name]


def _padding(mask: torch.Tensor | None, rows: int, first: Any, length: int, device: Any) -> torch.Tensor | None:
    """Which of `length` keys, the first of which stands at `first`, a mask of padding shows; None if it shows all."""
    if mask is None:
        return None
    there: Any = masking_utils.prepare_padding_mask(mask, length, first)
    shown = there[:, first : first + length].to(device=device, dtype=torch.bool).expand(rows, -1)
    compiling = torch.compiler.is_compiling()  # when the host cannot look
    return None if not compiling and bool(shown.all()) else shown


def _has_holes(shown: torch.Tensor) -> bool:
    """Whether padding lies between what is not padding, so that leaving it out would bring keys nearer."""
    return bool(((shown[:, 1:] != shown[:, :-1]).sum(1) - (~shown[:, 0]).int() > 1).any())


# ---- the interface


def _is_plain(
    q_length: int, mask_function: Callable[..., Any], attention_mask: torch.Tensor | None, others: dict[str, Any]
) -> bool:
    """Whether a compiler can follow how the pattern is found: no tensor is in the function, and none must be looked at.

    A function that transformers made in the graph can be looked into if it is made of numbers alone. That it is where
    transformers would leave a plain mask out, but that of chunks has the padding in it.
    """
    if q_length == 1 or mask_function in (
        masking_utils.causal_mask_function,
        masking_utils.bidirectional_mask_function,
    ):
        return True
    plain = others.get("allow_is_causal_skip", True) or others.get("allow_is_bidirectional_skip", False)
    chunked = getattr(others.get("config"), "attention_chunk_size", None) is not None
    return attention_mask is None and plain and not chunked


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
    """The mask of our attention implementation; the arguments are those of transformers' mask interface."""
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
    mixed = q_length > 1 and getattr(others.get("config"), "compress_rates", None) is not None
    if pattern is None or (mixed and pattern.shown is not None):  # what padding attends to reaches other tokens
        return masking_utils.eager_mask(**whole)
    if compiling:  # whose graph has the numbers only where they are read
        made = masking_utils.eager_mask(**whole)
        made.pattern = pattern  # type: ignore[attr-defined]
        return made
    if pattern.shown is not None:
        _found[pattern.shown] = {}
    return Mask(pattern, (batch_size, 1, q_length, kv_length), dtype, device)


@torch.compiler.assume_constant_result
def _is_one_graph() -> bool:
    """Whether the graph that is being compiled must not break."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return bool(getattr(InstructionTranslator.current_tx(), "one_graph", True))


@torch.compiler.disable(reason="masks of packed sequences, images, chunks or padded windows are looked at by the host")
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
    if q_length != 1 or (is_whole_row and not torch.compiler.is_compiling()):  # a CPU reads a whole row where it lies
        said = said_by(mask_function)
        if said is not None:
            pattern = _of_many(said, batch_size, q_length, kv_length, end, kv_offset, attention_mask, device)
            if pattern is not None:
                return pattern
    if q_length != 1:
        return None
    # The keys that a row's only query sees are a list, whatever the function is. A device makes it without the host,
    # and all layers share it.
    row: Any = masking_utils.sdpa_mask(
        batch_size, 1, kv_length, q_offset, kv_offset, mask_function, attention_mask,
        allow_is_causal_skip=False, use_vmap=use_vmap, device=device,
    )  # fmt: skip
    return Pattern(shown=row[:, 0, 0])


def _of_many(
    said: Said,
    rows: int,
    q_length: int,
    kv_length: int,
    end: Any,
    first: Any,
    padding: torch.Tensor | None,
    device: Any,
) -> Pattern | None:
    """The pattern of what a function says, with padding; the keys end at `end`, in what is at hand of them."""
    # Numbers and flags as such: to compilers, what is found in a constant is but something in a constant.
    causal, window = bool(said.causal), None if said.window is None else int(said.window)
    if not causal and window is None and said.packed is None:
        return Pattern(shown=_padding(padding, rows, first, kv_length, device))
    fixed = isinstance(end, torch.Tensor)
    is_at_end = not fixed and end == kv_length
    if said.packed is not None:
        alone = is_at_end and q_length == kv_length and padding is None
        edges = _edges(said, rows, q_length) if alone else None
        return None if edges is None else Pattern(causal, window, edges=edges)
    if said.positions is not None or not (is_at_end if not causal else fixed or q_length <= end <= kv_length):
        return None
    shown = _padding(padding, rows, first, kv_length if fixed else end, device)
    if fixed:
        there = torch.arange(kv_length, device=device) < end
        shown = there.expand(rows, -1) if shown is None else shown & there
    in_a_row = causal and q_length > 1 and not torch.compiler.is_compiling()  # or not for the host to see
    if window is not None and shown is not None and not (in_a_row and not _has_holes(shown)):
        return None
    return Pattern(causal, window, shown, None if is_at_end else end, told=padding is not None)
