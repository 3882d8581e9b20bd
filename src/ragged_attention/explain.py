"""What every backend says to a call, as a table: which one runs it, and why the others would not.

This module stands above the front ends, since they turn a call's arguments into its record.
"""

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ragged_attention import dispatch
from ragged_attention.calls import CALLS, Call
from ragged_attention.errors import InvalidInput

VIEWED = ("ragged_paged_attention", "mla_decode")  # operations whose plan `ragged-attention view` shows


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What one backend says to a call."""

    backend: str
    chosen: bool
    takes: bool
    text: str


def answers(call: Call, *, backend: str | Sequence[str] | None = None) -> list[Answer]:
    """What every backend says to a call, the requested ones first; an import error that fails the call is raised."""
    asked = dispatch.candidates(call.OPERATION, call.device, backend)
    by_default = dispatch.by_default(call.OPERATION, call.device, backend)
    found: list[Answer] = []
    chosen = False
    for name in dict.fromkeys((*asked, *dispatch.backends())):
        wanted = name in asked and not chosen
        try:
            reason = dispatch.verdicts(call, [name], by_default)[name]
        except Exception as error:
            if wanted:
                raise
            reason = f"its import fails: {type(error).__name__}: {error}"
        takes = reason is None
        text = reason or ("chosen" if wanted else "could run" if name in asked else "could run, not asked for")
        found.append(Answer(name, wanted and takes, takes, text))
        chosen = chosen or found[-1].chosen
    found += [Answer(name, False, False, dispatch.why_shadowed(name)) for name in dispatch.shadowed()]
    return found


def explanation(call: Call, *, backend: str | Sequence[str] | None = None) -> str:
    """A table: each backend, whether it is the one chosen, and why the others would not run the call."""
    rows = [f"{call.OPERATION} from {call.device.framework} on {call.device.name or call.device.platform}"]
    for answer in answers(call, backend=backend):
        rows.append(f"{'*' if answer.chosen else ' '} {answer.backend:10} {answer.text}")
    if call.OPERATION in VIEWED:
        rows.append("`ragged-attention view` shows how Triton's kernels divide such a batch.")
    return "\n".join(rows)


def explain(operation: str, *arguments: Any, backend: str | Sequence[str] | None = None, **keywords: Any) -> str:
    """Which backend would run `operation(*arguments, **keywords)`, and why the others would not, as a table.

    `operation` is a name such as "ragged_paged_attention" or a front end's function; the rest are
    the arguments of the call itself. The first array tells the framework.
    """
    name = operation if isinstance(operation, str) else getattr(operation, "__name__", repr(operation))
    if name not in CALLS:
        raise InvalidInput(f"expected operation to be one of {', '.join(CALLS)}, got {name!r}")
    front = _front_end(arguments, keywords)
    given = inspect.signature(getattr(front, name)).bind(*arguments, **keywords)
    given.apply_defaults()
    return explanation(front.call_of(name, given.arguments), backend=backend)


def _front_end(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    torch: Any = sys.modules.get("torch")
    for value in (*arguments, *keywords.values()):
        first = value[0] if isinstance(value, tuple | list) and value else value
        if torch is not None and isinstance(first, torch.Tensor):
            return importlib.import_module("ragged_attention.torch")
        if type(first).__module__.partition(".")[0] in ("jax", "jaxlib", "numpy"):
            return importlib.import_module("ragged_attention.jax")
    raise TypeError("expected a torch, jax or NumPy array among the arguments, got none")
