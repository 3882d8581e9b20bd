"""Our operations in models of transformers: generation, continuous batching, training.

    from ragged_attention.integrations import transformers as ragged
    ragged.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation=ragged.NAME)

Tested with transformers 5.23 and 5.24. The name is the same for `forward`, `generate`, `generate_batch` and training.
The operation depends on the call:

    training, prefill            `varlen_attention`, packed without the padding
    decode over a cache          `ragged_paged_attention` over the cache in place; page tables omit the padding
    layers with selected blocks  these two operations, with lists of blocks; `select_blocks` and `indexer_topk` in
                                 indexers
    `generate_batch`             `ragged_paged_attention` over the pages of its cache, without gathering; layers with a
                                 sliding window: `varlen_attention` over the contents of their ring buffers
    after `absorb_mla`           `ragged_mla_attention` and `sparse_mla_prefill` over the latents; `indexer_logits` and
                                 `top_k_indices` in indexers
    `absorb_mla`, then           `ragged_mla_attention`, `sparse_mla_prefill` and `mla_decode` over pages of latents;
      `generate_batch`           `indexer_topk` in indexers

Some calls are not supported by these operations: with dropout, with biases that do not follow from distance, and with
masks of many runs of keys. They are computed densely in torch. The result is the same, but this is slower and keeps all
logits of a layer in memory. `explain` says which operation ran, and why. The model's mask decides which keys a query
sees. A keyword that could change the result is never ignored.
"""

import importlib.metadata
import sys
from typing import Any

from ragged_attention.errors import Unsupported, how_to_install

__all__ = ["NAME", "PAGED_NAME", "absorb_mla", "explain", "register", "unregister"]

NAME = "ragged"
PAGED_NAME = NAME  # the name for `generate_batch`
OLDEST, EXCLUDED = (5, 23), (5, 25)  # the supported releases: OLDEST <= release < EXCLUDED


def _check_host() -> None:
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        raise Unsupported(f"expected transformers to be installed: {how_to_install('transformers')}") from None
    release = tuple(int(part) for part in version.split(".")[:2])
    if not OLDEST <= release < EXCLUDED:
        tested = " or ".join(f"{OLDEST[0]}.{minor}" for minor in range(OLDEST[1], EXCLUDED[1]))
        raise Unsupported(f"expected transformers {tested}, with which this was tested, got {version}")


def register() -> None:
    """Make `attn_implementation="ragged"` known to transformers. Calling it again changes nothing.

    Some functions of transformers are replaced. For models with our attention, the replacements change this:

    - `generate_batch` takes only two implementations by name, and flash attention. The functions by which three of its
      modules recognise flash attention recognise our attention too.
    - The `update` of its cache does not gather keys.
    - A model after `absorb_mla` gets a cache of latents. Any other model with latent attention is refused.
    - The functions of t5, its relatives and inkling that make position biases return tables by distance.
    - The indexers of minimax_m3_vl and qwen4_exp leave the selection of blocks to our attention.

    Raises:
        Unsupported: transformers is not installed, or its release is not supported.
    """
    _check_host()
    from ragged_attention.integrations.transformers import _host

    _host.register(NAME)


def unregister() -> None:
    """Undo `register`. Models that use our attention must first get another attention implementation."""
    host = sys.modules.get(f"{__name__}._host")
    if host is not None:
        host.unregister(NAME)


def absorb_mla(model: Any) -> Any:
    """Let a model with multi-head latent attention attend to its cached latents, without keys and values of each head.

    Queries are multiplied by the key projection, and results by the value projection. The model is changed in place:
    its attention modules get another class, and its attention implementation becomes ours. Indexers of known forms then
    select keys by `indexer_logits` and `top_k_indices`. Tested with every family of docs/transformers_models.md that
    has latents. `generate_batch` takes such a model only after this call.

    Args:
        model: a model of transformers, or a module that contains one.

    Returns:
        The model.

    Raises:
        Unsupported: the model has no latent attention of a known form. Later calls of the model also raise this error,
            if they have dropout, position biases, or soft caps together with lists of keys.
    """
    register()
    from ragged_attention.integrations.transformers import _latent

    return _latent.absorb(model, NAME)


def explain() -> str:
    """A text with the number of attention calls so far, one line for each class of module, operation and reason.

    Calls inside `torch.compile` are not counted.
    """
    from ragged_attention.integrations.transformers import _calls

    return _calls.explain()
