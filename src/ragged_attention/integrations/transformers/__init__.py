"""Our operations in models of transformers: generation, continuous batching, training.

    from ragged_attention.integrations import transformers as ragged
    ragged.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation=ragged.NAME)

Tested with transformers 5.23 and 5.24. One name serves `forward`, `generate`, `generate_batch` and training. The
operation depends on the call:

    training, prefill            `varlen_attention`, packed without the padding
    decode over a cache          `ragged_paged_attention` over the cache in place; page tables omit the padding
    sparse layers by blocks      the same two, with lists of the selected blocks; `select_blocks`, `indexer_topk` in
                                 indexers
    `generate_batch`             `ragged_paged_attention` over the pages of its cache, without gathering; layers with a
                                 sliding window: `varlen_attention` over the contents of their ring buffers
    after `absorb_mla`           `ragged_mla_attention` and `sparse_mla_prefill` over the latents; `indexer_logits` and
                                 `top_k_indices` in indexers
    the same in `generate_batch` over pages of latents, `mla_decode` too; `indexer_topk` in indexers

Calls that these do not take (dropout, biases that do not follow from distance, masks of many runs of keys) are computed
densely in torch, with the same result, but slower and with all logits of a layer in memory. `explain` tells which
operation ran, and why. The model's mask decides which keys a query sees. No keyword that could matter is ignored.
"""

import importlib.metadata
import sys
from typing import Any

from ragged_attention.errors import Unsupported, how_to_install

__all__ = ["NAME", "PAGED_NAME", "absorb_mla", "explain", "register", "unregister"]

NAME = "ragged"
PAGED_NAME = NAME  # the name for `generate_batch`
OLDEST, EXCLUDED = (5, 23), (5, 25)  # the supported releases: from the first to before the second


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

    `generate_batch` takes only two implementations by name, and those of flash attention. So the functions by which
    three of its modules recognise flash attention are replaced by functions that recognise ours too. Its cache's
    `update` is replaced by one that does not gather keys for ours. The functions that make the cache are replaced too,
    so that a model after `absorb_mla` gets one of latents, and another model with latent attention is refused. The
    functions of t5, its relatives and inkling that make biases of positions return tables by distance for ours. The
    indexers of minimax_m3_vl and qwen4_exp leave the choice of blocks to ours.

    Raises:
        Unsupported: transformers is not installed, or its release is not supported.
    """
    _check_host()
    from ragged_attention.integrations.transformers import _host

    _host.register(NAME)


def unregister() -> None:
    """Undo `register`; models that use the name must be given another one first."""
    host = sys.modules.get(f"{__name__}._host")
    if host is not None:
        host.unregister(NAME)


def absorb_mla(model: Any) -> Any:
    """Let a model with multi-head latent attention attend to its cached latents, without keys and values of each head.

    Queries are multiplied by the key projection, and results by the value projection. The model is changed in place:
    its attention modules get another class, and its attention implementation becomes ours. Indexers of known forms then
    select keys by `indexer_logits` and `top_k_indices`. Tested with every family of docs/transformers_models.md that
    has latents. `generate_batch` takes the model only so.

    Args:
        model: a model of transformers, or a module that contains one.

    Returns:
        The model.

    Raises:
        Unsupported: the model has no latent attention of a known form. Its calls are refused with dropout, position
            biases, or soft caps with lists of keys.
    """
    register()
    from ragged_attention.integrations.transformers import _latent

    return _latent.absorb(model, NAME)


def explain() -> str:
    """The number of attention calls so far, with a line for each class of module, operation and reason.

    Calls inside `torch.compile` are not counted.
    """
    from ragged_attention.integrations.transformers import _calls

    return _calls.explain()
