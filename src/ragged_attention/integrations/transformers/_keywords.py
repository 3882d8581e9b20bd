"""The keywords of attention layers: those that we use, and those that may be ignored.

No other keyword is dropped silently. If the model's own eager attention takes the keyword, that attention computes the
layer. If it does not take the keyword, and the layer's code does not name it either, the keyword is ignored, because
the layer only passes it on. In all other cases, and if the model has no eager attention, the call is refused.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ragged_attention.errors import Unsupported

# Used by our attention.
KNOWN = frozenset(
    ("position_bias", "sinks", "indices", "block_indices", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q",
     "max_length_k", "deterministic")
)  # fmt: skip
# Attention does not need these.
HARMLESS = frozenset(
    (
        # Queries and keys are already rotated, and the mask decides visibility.
        "position_ids", "cache_position", "position_embeddings",
        # The layer has already updated its cache and passes all of its keys and values.
        "use_cache", "past_key_values",
        # These affect a model's outputs and its loss. A request for weights, which we do not keep, is refused.
        "return_dict", "output_hidden_states", "output_router_logits", "output_attentions",
        "num_items_in_batch", "labels", "logits_to_keep",
    )
)  # fmt: skip
# The places of a step's keys in continuous batching, for `_continuous` and `_paged_latents`.
PLACES = frozenset(
    ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "read_index", "write_index", "logits_indices",
     "block_table", "k_cache", "v_cache", "window", "latent_pages")
)  # fmt: skip
EAGER = "eager_attention_forward"  # the suffix of the names of eager attention functions


def own_attention(module: torch.nn.Module, others: dict[str, Any]) -> Callable[..., Any] | None:
    """The module's eager attention if it takes a keyword that ours does not take, else None.

    Raises:
        Unsupported: neither attention takes a keyword that may matter, or attention weights are requested.
    """
    unknown = _unlisted(KNOWN, others)
    return _who_takes(type(module), unknown) if unknown else None


def expect_no_more_than_places(module: torch.nn.Module, others: dict[str, Any]) -> None:
    """Raise Unsupported for keywords that continuous batching does not take."""
    unknown = _unlisted(PLACES, others)
    if unknown and (not KNOWN.isdisjoint(unknown) or _who_takes(type(module), unknown) is not None):
        names = ", ".join(unknown)
        raise Unsupported(f"expected continuous batching without {names}, got some from {type(module).__name__}")


def _unlisted(known: frozenset[str], others: dict[str, Any]) -> tuple[str, ...]:
    if others.get("output_attentions"):
        raise Unsupported("expected output_attentions=False, got True: weights are not kept")
    return tuple(
        name for name, value in others.items()
        if value is not None and name not in known and name not in HARMLESS
    )  # fmt: skip


@torch.compiler.assume_constant_result
def _who_takes(kind: type, unknown: tuple[str, ...]) -> Callable[..., Any] | None:
    forward = inspect.unwrap(kind.forward)
    names = [name for name in forward.__code__.co_names if name.endswith(EAGER)]
    eager = next((forward.__globals__[name] for name in names if name in forward.__globals__), None)
    taken = () if eager is None else inspect.signature(eager).parameters
    named = str(forward.__code__.co_consts)
    for name in unknown:
        if eager is None or (name not in taken and repr(name) in named):
            raise Unsupported(f"expected attention without {name}, got some from {kind.__name__}")
    return eager if any(name in taken for name in unknown) else None
