"""What an attention layer is told beside queries, keys and values: what we know, and what nobody reads.

Nothing is swallowed: a keyword that is in neither list below is computed with by the model's own eager attention if
that takes it, is let by if the layer only hands on what it was given and its eager attention takes no such thing, and
is refused otherwise.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ragged_attention.errors import Unsupported

# Read by our attention.
KNOWN = frozenset(
    ("position_bias", "indices", "block_indices", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
     "deterministic")
)  # fmt: skip
# Not for the attention itself.
HARMLESS = frozenset(
    (
        # Queries and keys come rotated, and who sees whom is said by the mask.
        "position_ids", "cache_position", "position_embeddings",
        # The layer has put its keys and values into its cache, and has got all of them back.
        "use_cache", "past_key_values",
        # What a model returns, and how a loss is taken. Weights, which we have not, are refused.
        "return_dict", "output_hidden_states", "output_router_logits", "output_attentions",
        "num_items_in_batch", "labels", "logits_to_keep",
    )
)  # fmt: skip
# Where continuous batching has put the keys of a step, for `_continuous`.
PLACES = frozenset(
    ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "read_index", "write_index", "logits_indices",
     "block_table", "k_cache", "v_cache", "window")
)  # fmt: skip
EAGER = "eager_attention_forward"  # how the functions are called, or how their names end


def own_attention(module: torch.nn.Module, others: dict[str, Any]) -> Callable[..., Any] | None:
    """The eager attention that alone knows what to do with a keyword; None where there is no such keyword.

    Raises:
        Unsupported: nobody is known to take a keyword, or weights are asked for.
    """
    unknown = _beside(KNOWN, others)
    return _who_takes(type(module), unknown) if unknown else None


def expect_no_more_than_places(module: torch.nn.Module, others: dict[str, Any]) -> None:
    """Continuous batching takes no keyword beside those of its own."""
    unknown = _beside(PLACES, others)
    if unknown and (not KNOWN.isdisjoint(unknown) or _who_takes(type(module), unknown) is not None):
        names = ", ".join(unknown)
        raise Unsupported(f"expected continuous batching without {names}, got some from {type(module).__name__}")


def _beside(known: frozenset[str], others: dict[str, Any]) -> tuple[str, ...]:
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
