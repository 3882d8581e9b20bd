"""Counts the operations that attention calls became."""

from collections import Counter

import torch

_calls: Counter[tuple[str, str, str]] = Counter()


def note(module: torch.nn.Module, operation: str, reason: str = "") -> None:
    """Count a call for `explain`."""
    if not torch.compiler.is_compiling():
        _calls[type(module).__name__, operation, reason] += 1


def counts() -> dict[tuple[str, str, str], int]:
    """The number of calls by class of module, operation and reason, which may be empty."""
    return dict(_calls)


def explain() -> str:
    lines = [
        f"{count:8d} {module}: {operation}" + (f", since {reason}" if reason else "")
        for (module, operation, reason), count in sorted(_calls.items())
    ]
    return "\n".join(lines) or "no attention layer has been called"


def clear() -> None:
    _calls.clear()
