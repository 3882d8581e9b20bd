"""Observes the attention layers of a model while it runs with our attention."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface

from ragged_attention.integrations import transformers as ragged

RECURRENT = re.compile("Mamba|Mixer|Delta|Linear.*Attention|ShortConv|Recurrent|RGLRU|Lightning|Rwkv|LSTM")
ATTENTION = re.compile("Attention|Attn")
ARGUMENTS = {
    "sliding_window": "window", "softcap": "soft cap", "s_aux": "sinks", "sinks": "sinks of each query",
    "position_bias": "position bias", "indices": "lists of keys", "block_indices": "blocks of keys",
}  # fmt: skip
SOFTMAX = ("softmax", "logsumexp", "scaled_dot_product_attention")


class Watched:
    """The kinds of attention that our function computes, and the classes of modules that compute it themselves."""

    def __init__(self, model: Any) -> None:
        names = {type(module).__name__ for module in model.modules()}
        self.kinds = {"recurrent"} if any(RECURRENT.search(name) for name in names) else set()
        self.own: set[str] = set()


class OwnSoftmax(TorchFunctionMode):
    """Records every softmax outside our attention, by the class of the innermost attention module that computes it."""

    def __init__(self, watched: Watched) -> None:
        super().__init__()
        self.watched, self.modules, self.within_ours = watched, [], False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        name = getattr(function, "__name__", "")
        # scores of attention have more than two dimensions; a router's scores have two
        if name in SOFTMAX and not self.within_ours and self.modules and args and args[0].ndim > 2:
            self.watched.own.add(self.modules[-1])
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def watching(model: Any) -> Iterator[Watched]:
    """A context in which a model is watched.

    While it is active, the calls of our attention by any model are recorded.
    """
    watched = Watched(model)
    mode = OwnSoftmax(watched)
    ours = AttentionInterface()[ragged.NAME]

    def seen(module: Any, query: Any, key: Any, value: Any, *rest: Any, **others: Any) -> Any:
        watched.kinds.update(kinds_of(module, query, key, value, others))
        pattern = getattr(rest[0] if rest else None, "pattern", None)  # the mask's pattern
        if pattern is not None and pattern.selection is not None:
            watched.kinds.add(ARGUMENTS["block_indices"])
        mode.within_ours = True
        try:
            return ours(module, query, key, value, *rest, **others)
        finally:
            mode.within_ours = False

    def enter(module: Any, *_: Any) -> None:
        mode.modules.append(type(module).__name__)

    def leave(*_: Any) -> None:
        mode.modules.pop()

    found = [module for module in model.modules() if ATTENTION.search(type(module).__name__)]
    hooks = [module.register_forward_pre_hook(enter) for module in found]
    hooks += [module.register_forward_hook(leave, always_call=True) for module in found]
    AttentionInterface.register(ragged.NAME, seen)
    try:
        with mode:
            yield watched
    finally:
        AttentionInterface.register(ragged.NAME, ours)
        for hook in hooks:
            hook.remove()


def kinds_of(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, others: Any) -> set[str]:
    kinds = {words for name, words in ARGUMENTS.items() if others.get(name) is not None}
    heads, kv_heads = query.shape[1], key.shape[1]
    if getattr(module, "is_cross_attention", False):
        kinds.add("cross")
    if hasattr(module, "kv_lora_rank"):
        kinds.add("latent")
    else:
        kinds.add("all heads" if heads == kv_heads else "one for all" if kv_heads == 1 else "grouped")
    if max(query.shape[-1], value.shape[-1]) > 256:
        kinds.add("heads over 256")
    return kinds
