"""What attention calls became, for who wants to know."""

from collections import Counter

import torch

_calls: Counter[tuple[str, str, str]] = Counter()


def note(module: torch.nn.Module, operation: str, reason: str = "") -> None:
    """Remember for `explain` what a call became."""
    if not torch.compiler.is_compiling():
        _calls[type(module).__name__, operation, reason] += 1


def counts() -> dict[tuple[str, str, str], int]:
    """How often calls of a class of modules became an operation, for a reason or for none ("")."""
    return dict(_calls)


def explain() -> str:
    lines = [
        f"{count:8d} {module}: {operation}" + (f", since {reason}" if reason else "")
        for (module, operation, reason), count in sorted(_calls.items())
    ]
    return "\n".join(lines) or "no attention layer has been called"


def clear() -> None:
    """Forget all calls."""
    _calls.clear()
