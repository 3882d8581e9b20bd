"""The same bits in every batch, where vLLM's own variable asks for them."""

import contextlib
import os
from typing import Any

from ragged_attention.config import use_backend

_INVARIANT = use_backend(batch_invariant=True)


def is_batch_invariant() -> bool:
    """Whether vLLM's own variable asks for results that do not depend on the rest of the batch."""
    return os.environ.get("VLLM_BATCH_INVARIANT", "0") == "1"


def as_vllm_asks() -> contextlib.AbstractContextManager[Any]:
    """The context of an attention call, which is batch-invariant if vLLM asks for it."""
    return _INVARIANT if is_batch_invariant() else contextlib.nullcontext()
