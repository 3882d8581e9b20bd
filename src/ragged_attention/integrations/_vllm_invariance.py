"""Batch-invariant results, if vLLM's own environment variable requests them."""

import contextlib
import os
from typing import Any

from ragged_attention.config import use_backend

_INVARIANT = use_backend(batch_invariant=True)


def is_batch_invariant() -> bool:
    """Whether vLLM's environment variable requests batch-invariant results."""
    return os.environ.get("VLLM_BATCH_INVARIANT", "0") == "1"


def as_vllm_asks() -> contextlib.AbstractContextManager[Any]:
    """A context in which attention calls are batch-invariant if vLLM requests it."""
    return _INVARIANT if is_batch_invariant() else contextlib.nullcontext()
