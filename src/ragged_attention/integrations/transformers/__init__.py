"""Our operations under models of transformers: generation, continuous batching, training.

    from ragged_attention.integrations import transformers as ragged
    ragged.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation=ragged.NAME)

Tested with transformers 5.23 and 5.24. One name serves `forward`, `generate`, `generate_batch` and training. Which
operation a call becomes depends on what it is:

    training, prefill            `varlen_attention`, packed without the padding
    decode over a cache          `ragged_paged_attention` over the cache where it lies, padding left out by its pages
    `generate_batch`             `ragged_paged_attention` over the pages of its cache, nothing gathered; layers with a
                                 sliding window: `varlen_attention` over what their ring buffers hold
    after `absorb_mla`           `mla_decode` and `sparse_mla_prefill` over the latents; `indexer_logits` and
                                 `top_k_indices` in indexers

What these do not take (dropout, position biases, masks of another form) is computed densely in torch, with the same
result: slower, and with all logits of a layer in memory. `explain` says what went where, and why. Who sees whom is what
the model's mask says; a keyword that is not known here is never ignored.
"""

import importlib.metadata
import sys
from typing import Any

from ragged_attention.errors import Unsupported

__all__ = ["NAME", "PAGED_NAME", "absorb_mla", "explain", "register", "unregister"]

NAME = "ragged"
PAGED_NAME = NAME  # what `generate_batch` takes
OLDEST, NEWEST = (5, 23), (5, 25)  # interfaces: from this release to before that one


def _check_host() -> None:
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        raise Unsupported(
            "expected transformers to be installed: pip install 'ragged-attention[transformers]'"
        ) from None
    release = tuple(int(part) for part in version.split(".")[:2])
    if not OLDEST <= release < NEWEST:
        tested = " or ".join(f"{OLDEST[0]}.{minor}" for minor in range(OLDEST[1], NEWEST[1]))
        raise Unsupported(f"expected transformers {tested}, with which this was tested, got {version}")


def register() -> None:
    """Make `attn_implementation="ragged"` known to transformers; again is nothing.

    `generate_batch` takes two implementations by name and else only flash attention's: the functions by which its three
    modules recognise those are replaced by ones that recognise ours too. Its cache's `update` is replaced by one that
    leaves ours the keys where they lie.

    Raises:
        Unsupported: transformers is not installed, or is a release whose interfaces this was not written for.
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

    The projection of latents to keys is multiplied into the queries, that to values follows the attention. The model is
    changed in place: its attention modules get another class, and its attention implementation becomes ours. Tested
    with deepseek_v3, deepseek_v32 and glm_moe_dsa, whose indexers then choose by `indexer_logits` and `top_k_indices`.

    Args:
        model: a model of transformers, or a module that holds one.

    Returns:
        The model.

    Raises:
        Unsupported: it has no latent attention, or has it in a form that is not known here. Calls are refused with
            dropout, position biases, soft caps beside lists of keys, and in continuous batching.
    """
    register()
    from ragged_attention.integrations.transformers import _latent

    return _latent.absorb(model, NAME)


def explain() -> str:
    """What the attention calls so far became: one line for each class of modules, operation and reason, with a count.

    Calls inside `torch.compile` are not counted.
    """
    from ragged_attention.integrations.transformers import _calls

    return _calls.explain()
