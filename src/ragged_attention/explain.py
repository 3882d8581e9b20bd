"""Tables of which backend runs a call, and why the other backends do not.

This module imports the front ends when it needs them, because they turn a call's arguments into its record.
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

VIEWED = ("ragged_paged_attention", "mla_decode")  # the operations whose plan `ragged-attention view` shows


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """Whether one backend takes a call, and why or why not."""

    backend: str
    chosen: bool
    takes: bool
    text: str


def answers(call: Call, *, backend: str | Sequence[str] | None = None) -> list[Answer]:
    """Whether each backend takes the call, and the reason; requested backends come first.

    An import error is raised if the call would raise it.
    """
    asked = dispatch.candidates(call.OPERATION, call.device, backend)
    by_default = dispatch.by_default(call.OPERATION, call.device, backend)
    results: list[Answer] = []
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
        results.append(Answer(name, wanted and takes, takes, text))
        chosen = chosen or results[-1].chosen
    results += [Answer(name, False, False, dispatch.why_shadowed(name)) for name in dispatch.shadowed()]
    return results


def explanation(call: Call, *, backend: str | Sequence[str] | None = None) -> str:
    """A table of all backends. It marks the backend that runs the call, and says why each other backend does not."""
    rows = [f"{call.OPERATION} from {call.device.framework} on {call.device.name or call.device.platform}"]
    for answer in answers(call, backend=backend):
        rows.append(f"{'*' if answer.chosen else ' '} {answer.backend:10} {answer.text}")
    if call.OPERATION in VIEWED and getattr(call, "selected", None) is None:
        rows.append("`ragged-attention view` shows how Triton's kernels divide such a batch.")
    return "\n".join(rows)


def explain(operation: str, *arguments: Any, backend: str | Sequence[str] | None = None, **keywords: Any) -> str:
    """A table of which backend would run `operation(*arguments, **keywords)`, and why the other backends would not.

    `operation` is a name such as "ragged_paged_attention" or a front end's function. The framework is that of the first
    array among the arguments.
    """
    name = operation if isinstance(operation, str) else getattr(operation, "__name__", repr(operation))
    if name not in CALLS:
        raise InvalidInput(f"expected operation to be one of {', '.join(CALLS)}, got {name!r}")
    front_end = _front_end(arguments, keywords)
    bound = inspect.signature(getattr(front_end, name)).bind(*arguments, **keywords)
    bound.apply_defaults()
    return explanation(front_end.call_of(name, bound.arguments), backend=backend)


def _front_end(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    torch: Any = sys.modules.get("torch")
    for value in (*arguments, *keywords.values()):
        first = value[0] if isinstance(value, tuple | list) and value else value
        if torch is not None and isinstance(first, torch.Tensor):
            return importlib.import_module("ragged_attention.torch")
        if type(first).__module__.partition(".")[0] in ("jax", "jaxlib", "numpy"):
            return importlib.import_module("ragged_attention.jax")
    raise TypeError("expected a torch, jax or NumPy array among the arguments, got none")
