"""Arguments for tests of the torch operators."""

import inspect
from typing import Any

import ragged_attention.torch as rt
from ragged_attention.calls import CALLS
from ragged_attention.torch._operators import FRONT_END


def operator_arguments(operation: str, *arguments: Any, **keywords: Any) -> tuple[Any, ...]:
    """The arguments of `torch.ops.ragged_attention.<operation>` for a call of the public function on `eager`."""
    given = inspect.signature(getattr(rt, operation)).bind(*arguments, **keywords)
    given.apply_defaults()
    record = CALLS[operation]
    return (*record.flatten(FRONT_END.prepare(record, given.arguments)), "eager", None)
