"""Counts of attention calls, by the operation that computed them."""

from collections import Counter

import torch

calls: Counter[tuple[str, str, str]] = Counter()  # number of calls by (module class, operation, reason or "")


def note(module: torch.nn.Module, operation: str, reason: str = "") -> None:
    """Count a call for `explain`."""
    if not torch.compiler.is_compiling():
        calls[type(module).__name__, operation, reason] += 1


def explain() -> str:
    lines = [
        f"{count:8d} {module}: {operation}" + (f", since {reason}" if reason else "")
        for (module, operation, reason), count in sorted(calls.items())
    ]
    return "\n".join(lines) or "no attention layer has been called"
